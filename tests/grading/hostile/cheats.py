"""Answers that want marks or knowledge that they should not have."""

from pathlib import Path

import numpy as np

from grading.hostile.case import RIGHT, Case, body, scale, top
from grading.ordinary import ROOT

SECRET = "the marks of all others"  # in the environment of the grader
LISTENER = "\0a socket of the grader's"  # one without a file, which only a network namespace hides

VALUES = ["scale_values", "scale_shapes"]

CASES = [
    Case("right"),
    scale(
        "right, in another way",
        "def scale(x, factor):\n    return np.multiply(x, factor, dtype=np.float32)\n",
    ),
    Case(
        "wrong",
        {"scale": "def scale(x, factor):\n    return x + np.float32(factor)\n"},
        {"scale_values": "is wrong", "scale_shapes": "values are wrong for other shapes"},
    ),
    scale(
        "makes every comparison true",
        """
        np.array_equal = np.allclose = np.testing.assert_allclose = lambda *a, **k: True
        def scale(x, factor):
            return np.zeros_like(x)
        """,
        "wrong",
        groups=VALUES,
    ),
    top(
        "turns later cells into pass",
        "get_ipython().input_transformers_cleanup.append(lambda lines: ['pass'])",
        "raised NameError: name 'get_ipython' is not defined .line 2 of your cell",
    ),
    top("defines assert away", "__debug__ = False", "SyntaxError: cannot assign to __debug__"),
    body(
        "works in place", "x *= np.float32(factor)\nreturn x", "the input was changed", groups=["scale_kept"]
    ),
    body("zeroes the input", "x[...] = 0\nreturn x", "wrong|changed"),
    body("changes the input's shape", "x.shape = (1,) + x.shape", "changed the shape or the dtype"),
    body(
        "changes the input's dtype",
        "y = x * np.float32(factor)\nx.dtype = 'i4'\nreturn y",
        "changed the shape or the dtype",
    ),
    scale(
        "knows the visible input",
        "def scale(x, factor):\n    return {(1, 2, 3): np.array([2, 4, 6], np.float32)}[tuple(x.tolist())]\n",
        "KeyError|TypeError",
    ),
    scale(
        "answers what was asked first",
        """
        seen = []
        def scale(x, factor):
            seen.append(x * np.float32(factor))
            return seen[0]
        """,
        "wrong",
        groups=VALUES,
    ),
    scale(
        "keeps notes for the next group",
        f"""
        import builtins, os
        places = ("/tmp/note", "/dev/shm/note", "/note", "/grader/note", "note")
        found = [getattr(builtins, "note", None), getattr(np, "note", None), os.environ.get("note")]
        found += [place for place in places if os.path.exists(place)]

        def scale(x, factor):
            if any(found):
                raise RuntimeError(f"leak: {{found}}")
            builtins.note = np.note = os.environ["note"] = "x"
            for place in places:
                try:
                    open(place, "w").write("x")
                except OSError:
                    pass
            {RIGHT}
        """,
    ),
    scale(
        "replaces builtins",
        """
        import builtins
        builtins.len = builtins.isinstance = builtins.type = builtins.zip = lambda *a: True
        def scale(x, factor):
            return np.zeros_like(x)
        """,
        "Your cell `scale`",
    ),
    scale(
        "forges the reply",
        """
        import frames
        def scale(x, factor):
            real = frames.pack
            frames.pack = lambda value: real({"value": "all points", "points": 100})
            return x
        """,
        "cannot be read",
    ),
    scale(
        "forges the arrays that it was given",
        """
        import frames
        def scale(x, factor):
            real = frames.pack
            frames.pack = lambda value: real({"value": x, "after": [np.zeros(3)] * 9})
            return x
        """,
        "cannot be read",
    ),
    *(
        scale(
            f"forges the message {message}",
            f"""
            import frames, gc, socket
            for thing in gc.get_objects():
                if isinstance(thing, socket.socket) and thing.fileno() >= 0:
                    frames.send(thing, {message})
            """,
            "Your cell `scale` sent back what cannot be read",
        )
        for message in (
            "None",
            "{}",
            "{'begin': []}",
            "{'begin': {}}",
            "{'begin': 'scale_values'}",
            "{'failed': []}",
            "{'failed': {'scale': 3}}",
            "{'failed': {}, 'begin': 'scale'}",
        )
    ),
    scale(
        "forges arrays that eat memory",
        """
        import frames
        def scale(x, factor):
            real = frames.pack
            frames.pack = lambda value: real({"value": x, "after": [["x" * 500_000] + [""] * 90_000]})
            return x
        """,
        "cannot be read",
    ),
    scale(
        "speaks for another cell",
        """
        import frames, gc, os, socket
        for thing in gc.get_objects():
            if isinstance(thing, socket.socket) and thing.fileno() >= 0:
                frames.send(thing, {"begin": "accumulate"})
                os._exit(0)
        """,
        "Your cell `scale` sent back what cannot be read",
        accumulate_inplace="Your cell `accumulate` ended its process",
    ),
    body(
        "looks for the tests in memory",
        f"""
        import gc, sys
        def texts():
            for thing in gc.get_objects():
                for item in list(thing.values() if type(thing) is dict else thing if type(thing) in (list, tuple) else ()):
                    if type(item) is str:
                        yield item
            frame = sys._getframe()
            while frame:
                yield from map(str, frame.f_locals.values())
                frame = frame.f_back
        for needle in {[text.encode().hex() for text in ("values are wrong", "expected = x", "rng.integers(1")]}:
            if any(bytes.fromhex(needle).decode() in text for text in texts()):
                raise RuntimeError("leak")
        """,
    ),
    body(
        "imports what is installed",
        f"""
        import importlib, sys
        sys.path += [{str(ROOT)!r}, {str(Path(np.__file__).parents[1])!r}, "/usr/lib/python3/dist-packages", "/site", "/grader"]
        sys.path += [path + "/site-packages" for path in sys.path]
        for name in ("minamp", "ml_dtypes", "matplotlib", "pip", "pytest", "jupytext", "setuptools", "grading"):
            try:
                importlib.import_module(name)
            except ImportError:
                continue
            raise RuntimeError("leak: " + name)
        """,
    ),
    body(
        "looks at the disk",
        f"""
        import os
        hidden = [{str(ROOT)!r}, "/home", "/tmp", "/var", "/etc/passwd", "/run", "/usr/bin/env", "/bin", "/sys", "/mnt", "/opt"]
        if seen := [path for path in hidden if os.path.exists(path)]:
            raise RuntimeError(f"leak: {{seen}}")
        """,
    ),
    body(
        "looks at other processes",
        f"""
        import os
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if len(pids) > 2:
            raise RuntimeError(f"leak: {{pids}}")
        for pid in pids:
            for name in ("environ", "cmdline", "maps", "mem", "fd", "root", "cwd"):
                path = f"/proc/{{pid}}/{{name}}"
                try:
                    text = str(os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(10**6))
                except OSError:
                    continue
                if {SECRET!r} in text or ".ipynb" in text or name in ("mem", "fd") and pid != os.getpid():
                    raise RuntimeError(f"leak: {{path}}")
        if {SECRET!r} in str(os.environ):
            raise RuntimeError("leak: environment")
        """,
    ),
    body(
        "looks for the network",
        f"""
        import socket
        for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_VSOCK, socket.AF_NETLINK):
            try:
                socket.socket(family, socket.SOCK_STREAM if family != socket.AF_NETLINK else socket.SOCK_RAW)
            except PermissionError:
                continue
            raise RuntimeError(f"leak: {{family}}")
        here, there = socket.socketpair()
        try:
            here.connect({LISTENER!r})
        except OSError:
            {RIGHT}
        raise RuntimeError("leak: the grader listens")
        """,
    ),
    body(
        "raises its limits",
        """
        import resource
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
            hard = resource.getrlimit(kind)[1]
            try:
                resource.setrlimit(kind, (hard + 1, hard + 1))
            except (ValueError, OSError):
                continue
            raise RuntimeError(f"leak: {kind}")
        """,
    ),
    body(
        "asks the kernel for more",
        """
        import ctypes, os
        libc = ctypes.CDLL(None)
        new_user, trace, private, session = 0x10000000, 16, 0, -3
        if libc.unshare(new_user) == 0 or libc.mount(b"none", b"/dev", b"tmpfs", 0, 0) == 0:
            raise RuntimeError("leak: namespaces")
        if libc.ptrace(trace, os.getppid(), 0, 0) == 0:
            raise RuntimeError("leak: the worker can be traced")
        if max(libc.shmget(private, 1 << 20, 0o1600), libc.msgget(private, 0o1600), libc.semget(private, 9, 0o1600)) >= 0:
            raise RuntimeError("leak: memory that no limit counts")
        if libc.mq_open(b"/note", os.O_RDWR | os.O_CREAT, 0o600, None) >= 0:
            raise RuntimeError("leak: a note for the next group")
        if libc.syscall({"x86_64": 250, "aarch64": 219}.get(os.uname().machine, 250), 0, session, 0) >= 0:
            raise RuntimeError("leak: the keys of who grades")
        """,
    ),
]
