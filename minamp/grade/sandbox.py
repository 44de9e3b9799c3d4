"""Where a student's code runs: a process that sees no network, no home, no course, and may use little of everything.

bubblewrap gives it namespaces of its own and a read-only file system made of the system's libraries, Python's and NumPy;
worker.py, the first thing that runs there, sets the limits.
"""

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minamp.grade import frames

START = 10.0  # seconds that the sandbox, Python and NumPy may take to start; 0.13 measured


class SandboxError(RuntimeError):
    """No sandbox could be had: nothing was marked, and it is not the student's doing."""


@dataclass(frozen=True)
class Limits:
    """What one submission may use: seconds of one test group, seconds of all groups together, bytes of address space."""

    group: float = 5.0
    total: float = 60.0
    memory: int = 2 << 30


@dataclass(frozen=True)
class Sandbox:
    """How students' code is run. `unsafe`: as a plain process of this user with the resource limits alone, to try things out."""

    limits: Limits = Limits()
    unsafe: bool = False

    def why_not(self):
        """None, or the reason in words why this machine gives no sandbox, with the repair. Found out by starting one."""
        try:
            self.start([]).close()
        except SandboxError as error:
            return str(error)
        return None

    def start(self, cells):
        """A Process that holds `cells`, dicts of id, part and source. SandboxError says why there is none."""
        if reason := self._missing():
            raise SandboxError(reason)
        here, there = socket.socketpair()
        with there:
            process = subprocess.Popen(
                self.command(there.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[there.fileno()],
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        running = Process(process, here)
        try:
            until = time.monotonic() + START
            # As arrays of bytes: a header has no room for sources.
            data = [cell | {"source": np.frombuffer(cell["source"].encode(), np.uint8)} for cell in cells]
            frames.send(here, data, until)
            frames.receive(here, until)
        except (EOFError, TimeoutError, frames.FrameError):
            raise SandboxError(_reason(running.last_words())) from None
        except BaseException:
            running.close()
            raise
        process.stderr.close()
        return running

    def command(self, descriptor):
        """The command line of the sandboxed worker whose channel to the grader is `descriptor`."""
        # A venv's interpreter is a link to the real one.
        python = [os.path.realpath(sys._base_executable), "-sSPB"]
        room = Path(__file__).parent
        arguments = [str(descriptor), str(self.limits.memory), str(math.ceil(self.limits.group) + 1)]
        if self.unsafe:
            return [*python, str(room / "worker.py"), *arguments, str(_numpy().parent)]
        return [*_bwrap(python[0], room), *python, "/grader/worker.py", *arguments, "/site"]

    def _missing(self):
        if os.name != "posix":
            return "Grading needs Linux; this is another system. A virtual machine or a container with Linux will do."
        if self.unsafe:
            return None
        if os.geteuid() == 0:
            return (
                "This is root, whom the limit on processes does not bind: run the grader as an ordinary user."
            )
        if sys.platform != "linux":
            return "The sandbox is made by bubblewrap, which exists on Linux only: grade there, or in a container with Linux."
        if shutil.which("bwrap") is None:
            return "bubblewrap is missing: sudo apt-get install bubblewrap (Fedora: sudo dnf install bubblewrap)."
        return None


ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
# Products as on the grader's side: other kernels give other last digits, which float16 rounds to other halves. A right answer
# lost 3 points that way, for 1 seed in 80.
ENVIRONMENT |= {
    name: os.environ[name] for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if name in os.environ
}


def _numpy():
    return Path(np.__file__).parent


def _bwrap(python, room):
    """bwrap and its options: what the worker, run by the interpreter `python`, finds in its file system."""
    base = Path(sys.base_prefix)
    libraries = [*map(Path, ("/usr/lib", "/usr/lib64", "/lib", "/lib64")), base / "lib", base / "lib64"]
    libraries = [path for path in libraries if path.is_dir()]
    # Whatever is installed beside NumPy, minamp above all, is hidden.
    hidden = {path for lib in libraries for path in lib.glob("python3*/*-packages") if not path.is_symlink()}
    libs = _numpy().with_name("numpy.libs")
    # As process 1 the worker cannot be killed or stopped by a child, and no process but these two is there.
    options = "--unshare-all --die-with-parent --new-session --as-pid-1 --cap-drop ALL --clearenv".split()
    for name, value in ENVIRONMENT.items():
        options += ["--setenv", name, value]
    for path in libraries:
        options += ["--ro-bind", path, path]
    for path in sorted(hidden):
        options += ["--tmpfs", path, "--remount-ro", path]
    # The second is where Debian's own NumPy finds its BLAS.
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        options += ["--ro-bind-try", path, path]
    options += ["--ro-bind", python, python]
    options += ["--ro-bind", _numpy(), "/site/numpy", "--ro-bind-try", libs, "/site/numpy.libs"]
    for name in ("worker.py", "confine.py", "frames.py"):
        options += ["--ro-bind", room / name, f"/grader/{name}"]
    # Nothing can be written anywhere: no disk to fill, no note left for the next test group.
    options += "--proc /proc --dev /dev --remount-ro /dev --remount-ro / --chdir /".split()
    return [shutil.which("bwrap"), *map(str, options), "--"]


def _reason(words):
    """Why the sandbox did not start, from what it said."""
    if "Unknown option" in words:
        return f"bubblewrap is too old ({words}): 0.5 or newer is needed."
    if any(sign in words for sign in ("namespace", "uid map", "loopback", "Operation not permitted")):
        return (
            f"The sandbox could not be made ({words}). It needs user namespaces: "
            "sudo sysctl kernel.unprivileged_userns_clone=1, on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0; "
            "a container must allow them."
        )
    return f"The sandbox did not start ({words or 'it said nothing'})."


class Process:
    """A worker that runs: its channel, and its end."""

    def __init__(self, process, channel):
        self.process, self.channel = process, channel

    def close(self):
        """Kill everything that runs in the sandbox, and wait until the worker is gone."""
        self._kill()
        self.process.wait()
        # It dies with bubblewrap, a moment later, and its children with it: then nobody holds the other end of the channel.
        with contextlib.suppress(OSError):
            self.channel.settimeout(2.0)
            while self.channel.recv(4096):
                pass
        self.channel.close()
        self.process.stderr.close()

    def last_words(self):
        """Close it; what it wrote to standard error, in one line."""
        self._kill()
        words = self.process.stderr.read(2000).decode("utf-8", "replace")
        self.close()
        return " ".join(words.split())

    def _kill(self):
        if self.process.returncode is None:  # not waited for yet, so that the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
