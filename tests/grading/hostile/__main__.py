import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grading import tiny
from grading.hostile import THEMES, cheats, loops
from grading.hostile.case import MARK
from minamp.grade.one import grade_one
from minamp.grade.sandbox import Limits, Sandbox

PR_SET_CHILD_SUBREAPER = 36
EXECUTING = ("compile", "exec", "import", "pickle.find_class", "marshal.loads")


class Watch:
    """Hears what this process executes; what comes from a student is kept in `heard`."""

    def __init__(self):
        self.heard = []
        sys.addaudithook(self)

    def __call__(self, event, args):
        if event in EXECUTING and any(map(self._marked, args)):
            self.heard.append(event)

    def _marked(self, thing):
        if isinstance(thing, str | bytes):
            return (MARK if isinstance(thing, str) else MARK.encode()) in thing
        return any(map(self._marked, getattr(thing, "co_consts", ())))


def grade(cases, sandbox, threads):
    """{case: its faults}, without those that have none."""

    def one(k):
        return list(
            cases[k].faults(grade_one(tiny.TINY, cases[k].write(Path(folder) / str(k)), sandbox, seed=k))
        )

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
        return {
            case.name: faults
            for case, faults in zip(cases, pool.map(one, range(len(cases))), strict=True)
            if faults
        }


def left_over():
    """Whether a process that began here still runs in ten seconds. Those that lost their parent are this one's."""
    until = time.monotonic() + 10.0
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] or time.monotonic() < until:
            time.sleep(0.001)
        return True
    return False


def graded(theme):
    """What grading a theme brings, as JSON data."""
    listener = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):  # another run of these tests has it already
        listener.bind(cheats.LISTENER)
        listener.listen()
    watch = Watch()
    # Loops mostly sleep, side by side. Where nothing has to run out of time, nothing does, however busy the machine is.
    seconds, threads = (loops.SECONDS, 12) if theme in ("loops", "plain") else (30.0, 2)
    limits = Limits(group=seconds, total=5 * seconds, memory=1 << 30)
    faults = grade(THEMES[theme], Sandbox(limits, unsafe=theme == "plain"), threads)
    heard = list(watch.heard)
    exec(f"{MARK!r}")
    return {"faults": faults, "executed": heard, "deaf": watch.heard == heard, "left over": left_over()}


def killed():
    """What is left of a grader that was killed while an answer slept, as JSON data."""
    with tempfile.TemporaryDirectory() as folder:
        path = next(case for case in loops.CASES if case.name == "sleeps").write(Path(folder) / "one")
        grader = os.fork()
        if not grader:
            grade_one(tiny.TINY, path, Sandbox(), seed=0)
        while not Path(f"/proc/{grader}/task/{grader}/children").read_text():
            time.sleep(0.01)
        time.sleep(1.0)
        os.kill(grader, signal.SIGKILL)
    return {"left over": left_over()}


if sys.argv[1].startswith("--"):
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print(json.dumps(killed() if sys.argv[1] == "--kill" else graded(sys.argv[2])))
else:
    for theme, cases in THEMES.items():
        for k, case in enumerate(cases):
            case.write(Path(sys.argv[1]) / re.sub(r"\W+", "_", f"{theme} {k:02} {case.name}"))
