"""Answers in a plain process, not a sandbox, where they can reach the worker that starts them: then there is a new one."""

from grading.hostile.case import Case, body, top
from grading.hostile.loops import SLOW

# Only once: the next parent is the grader, and nothing here protects it.
KILL = """
import os, signal
if x.ndim == 3:
    os.kill(os.getppid(), signal.SIG{})
"""

CASES = [
    Case("right"),
    body("SIGKILL for the worker", KILL.format("KILL")),
    body("SIGSTOP for the worker", KILL.format("STOP")),
    body(
        "SIGKILL for the worker and the end",
        KILL.format("KILL") + "    os._exit(0)",
        "`scale` ended its process .killed",
        groups=["scale_shapes"],
    ),
    top("the end at the top", "import os\nos._exit(0)", "Your cell `scale` ended its process .exit code 0"),
    top("loops at the top", "import os\nos.nice(19)\nwhile True:\n    pass", f"Your cell `scale` {SLOW}"),
    body("forks", "import os\nos.fork()", "raised BlockingIOError"),
    body("imports minamp", "import minamp", "raised ModuleNotFoundError"),
]
