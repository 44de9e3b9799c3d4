"""Answers that take more time than there is."""

from grading.hostile.case import SCALE, Case, body, scale, top

SECONDS = 4.0
SLOW = f"did not come to an end within {SECONDS:g} s .an endless loop"
GIVEN_UP = {"scale_shapes": "Not run: `scale` ran out of time 2 times"}
# The loops give way to the right answers beside them.
LOOP = "import os\nos.nice(19)\nwhile True:\n    pass"

CASES = [
    body("loops", LOOP, SLOW, **GIVEN_UP),
    top("loops at the top", LOOP, f"Your cell `scale` {SLOW}"),
    body(
        "swallows every exception",
        """
        import time
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                pass
        """,
        SLOW,
        **GIVEN_UP,
    ),
    body("sleeps", "import time\ntime.sleep(1000)", SLOW, **GIVEN_UP),
    body(
        "has its own time",
        "import time\ntime.time = time.monotonic = lambda: 0.0\nwhile True:\n    time.sleep(1)",
        SLOW,
        **GIVEN_UP,
    ),
    body(
        "ignores signals",
        """
        import signal
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            signal.pause()
        """,
        SLOW,
        **GIVEN_UP,
    ),
    body("stops itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", SLOW, **GIVEN_UP),
    body(
        "sends byte after byte",
        """
        import os, time
        while True:
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, bytes(1))
                except OSError:
                    pass
            time.sleep(1)
        """,
        SLOW,
        **GIVEN_UP,
    ),
    scale(
        "is asked for its message without end",
        """
        class Bad(Exception):
            def __str__(self):
                import time
                time.sleep(1000)
        def scale(x, factor):
            raise Bad
        """,
        SLOW,
        **GIVEN_UP,
    ),
    body("computes without end in C", "import os\nos.nice(19)\nreturn 9**(9**9)", SLOW, **GIVEN_UP),
    Case(
        "sleeps everywhere",
        {
            "scale": "import time\ndef scale(x, factor):\n    time.sleep(1000)\n",
            "accumulate": "def accumulate(totals, terms, weight=1):\n    time.sleep(1000)\n",
            "counter": "def Counter(limit):\n    time.sleep(1000)\n",
        },
        dict.fromkeys(SCALE, SLOW)
        | GIVEN_UP
        | dict.fromkeys(["accumulate_inplace", "counter_resets"], SLOW + "|used up"),
    ),
]
