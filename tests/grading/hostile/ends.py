"""Answers that end, kill, multiply, starve or flood the process that runs them."""

from grading.hostile.case import body, top

ENDS = r"`scale` ended its process \({}\)"

CASES = [
    body("sys.exit", "import sys\nsys.exit(0)", "raised SystemExit: 0"),
    top("sys.exit at the top", "import sys\nsys.exit()", "Your cell `scale` raised SystemExit"),
    top("exit at the top", "exit()", "Your cell `scale` raised NameError: name 'exit'"),
    body("os._exit", "import os\nos._exit(0)", ENDS.format("exit code 0")),
    top("os._exit at the top", "import os\nos._exit(3)", "Your cell " + ENDS.format("exit code 3")),
    body("SIGKILL for itself", "import os\nos.kill(os.getpid(), 9)", ENDS.format("SIGKILL")),
    body("SIGKILL for its parent", "import os\nos.kill(os.getppid(), 9)"),
    body("SIGSTOP for its parent", "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)"),
    body(
        "SIGKILL for all others", "import os\ntry:\n    os.kill(-1, 9)\nexcept ProcessLookupError:\n    pass"
    ),
    body(
        "SIGTERM for its group",
        "import os\nos.killpg(0, 15)\nimport time\ntime.sleep(9)",
        "ended its process",
    ),
    body("crashes", "import ctypes\nctypes.string_at(0)", ENDS.format("SIGSEGV")),
    top("crashes at the top", "import ctypes\nctypes.string_at(0)", "Your cell " + ENDS.format("SIGSEGV")),
    body(
        "recurses through the stack",
        """
        import sys
        sys.setrecursionlimit(10**9)
        def again(v):
            return [*map(again, [v])]
        again(0)
        """,
        "ended its process|MemoryError|RecursionError",
    ),
    body("forks", "import os\nwhile True:\n    os.fork()", "raised BlockingIOError"),
    body(
        "starts a program",
        "import subprocess, sys\nsubprocess.Popen([sys.executable])",
        "raised BlockingIOError",
    ),
    body(
        "starts a program by system()",
        "import os\nif os.system('sleep 99 &') == 0:\n    raise RuntimeError('leak')",
    ),
    body(
        "starts a thread",
        "import threading\nthreading.Thread(target=print).start()",
        "can't start new thread",
    ),
    body(
        "starts a thread of C",
        """
        import ctypes
        thread, start = ctypes.c_ulong(), ctypes.CFUNCTYPE(None)(print)
        if ctypes.CDLL(None).pthread_create(ctypes.byref(thread), None, start, None) == 0:
            raise RuntimeError("leak")
        """,
    ),
    body("wants a huge array", "np.ones(2**40)", "MemoryError"),
    body("wants memory bit by bit", "hog = []\nwhile True:\n    hog.append(np.empty(2**24))", "MemoryError"),
    body(
        "fills the disk",
        """
        import os
        for place in ("/tmp", "/dev/shm", "/dev", "/", "/grader", "/usr/lib", "/proc", "."):
            for write in (lambda: os.mkdir(place + "/x"), lambda: open(place + "/y", "wb").write(bytes(2**20))):
                try:
                    write()
                except OSError:
                    continue
                raise RuntimeError("leak: " + place)
        """,
    ),
    body(
        "fills files without a name",
        "import os\nos.write(os.memfd_create('x'), b'x')",
        "raised OSError: .*File too large",
    ),
    *(
        body(
            name,
            f"""
            import os, struct
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, {data})
                except OSError:
                    pass
            {then}
            """,
            reason,
        )
        for name, data, then, reason in [
            (
                "writes garbage to every descriptor",
                r"b'\xff' * 4096",
                "",
                "`scale` sent back what cannot be read",
            ),
            (
                "announces a giant frame",
                "struct.pack('<II', 256, 2**32 - 1)",
                "",
                "`scale` sent back what cannot be read",
            ),
            (
                "announces a giant header",
                "struct.pack('<II', 2**32 - 1, 0)",
                "",
                "`scale` sent back what cannot be read",
            ),
            ("sends half a frame", "struct.pack('<I', 256)", "os._exit(0)", ENDS.format("exit code 0")),
            (
                "sends deep JSON",
                "struct.pack('<II', 10**5, 0) + b'[' * 10**5",
                "",
                "`scale` sent back what cannot be read",
            ),
        ]
    ),
    body("closes every descriptor", "import os\nos.closerange(0, 64)", "ended its process"),
    top(
        "closes every descriptor at the top",
        "import os\nos.closerange(0, 64)",
        "Your cell `scale` ended its process",
    ),
    # in the second call, from Python 3.13 on, what is imported anew has no modules to clear
    body("forgets all modules", "import sys\ngetattr(sys, 'modules', {}).clear()"),
    body("leaves exit handlers", "import atexit, os\natexit.register(os.abort)"),
    body("leaves a profiler", "import sys\nsys.setprofile(lambda *a: 1 / 0)", "raised|ended|returned"),
]
