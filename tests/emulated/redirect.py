"""The emulated CUDA in the place of the real one, for CuPy's own files as they are. To be called before CuPy is imported.

The driver, cuBLAS and cuRAND are looked for by name, and a name that is loaded already is not looked for: so loading ours first
is enough. The runtime is part of CuPy's file: there the first bytes of each function become a jump into ours, in memory only.
"""

import ctypes
import mmap
import os
import re
import subprocess
import sys

# They compute nothing on a GPU and stay CuPy's.
KEPT = {"cudaGetErrorName", "cudaGetErrorString", "cudaRuntimeGetVersion"}
PER_THREAD = ("_ptsz", "_ptds")  # variants for a default stream per thread, which CuPy takes only where asked
NOT_SUPPORTED = 801  # cudaErrorNotSupported
JUMP = b"\x48\xb8%b\xff\xe0"  # mov rax, address; jmp rax
_alive = []  # callbacks that C may still call


def install(folder, libraries):
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # compiler.py has a cache of its own
    os.environ["CUPY_ACCELERATORS"] = ""  # CUB comes compiled for GPUs: CuPy's reductions from source instead
    cuda, *_ = [ctypes.CDLL(str(folder / name)) for name in libraries]
    # Functions of cuBLAS and cuRAND are looked up when they are called: one that is missing here ends the run with status 127
    # (ARGS=-s shows its name).
    sys.setdlopenflags(os.RTLD_LAZY)
    import cupy_backends.cuda.api.runtime as runtime

    path = runtime.__file__
    with open("/proc/self/maps") as maps:
        base = int(next(line for line in maps if path in line).split("-")[0], 16)
    symbols = subprocess.run(["nm", "-S", path], capture_output=True, text=True, check=True).stdout
    for at, size, name in re.findall(r"^(\w+) (\w+) [tT] (cuda[A-Z]\w*)$", symbols, re.MULTILINE):
        if name not in KEPT and not name.endswith(PER_THREAD):
            ours = getattr(cuda, name, None) or _missing(name)
            target = ctypes.cast(ours, ctypes.c_void_p).value
            _write(base + int(at, 16), JUMP % target.to_bytes(8, "little"), int(size, 16))


def _missing(name):
    @ctypes.CFUNCTYPE(ctypes.c_int)
    def call():
        print(f"{name}: not part of the emulated GPU", file=sys.stderr)
        return NOT_SUPPORTED

    _alive.append(call)
    return call


def _write(address, code, room):
    assert len(code) <= room
    page = address & -mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    everything = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), everything):
        raise OSError(ctypes.get_errno(), "the system does not let code be changed in memory")
    ctypes.memmove(address, code, len(code))
