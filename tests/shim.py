"""CUDA kernels on the CPU: their text compiled by g++ behind a few lines that stand for CUDA, one thread after the other."""

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from minamp.backends import kernels

SHIM = r"""
#include <cmath>
#include <cstring>
#include <immintrin.h>
using std::sqrt;
#define __global__
#define __device__
struct Dim { unsigned x; };
static Dim gridDim, blockDim, blockIdx, threadIdx;
extern "C" void at(unsigned grid, unsigned block, unsigned b, unsigned t) {
  gridDim.x = grid; blockDim.x = block; blockIdx.x = b; threadIdx.x = t;
}
struct __half {  // the processor's conversions round to nearest even and keep subnormals, as the GPU's
  unsigned short bits;
  __half() = default;
  __half(float f) : bits(_cvtss_sh(f, 0)) {}
  operator float() const { return _cvtsh_ss(bits); }
};
struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    bits = f != f ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
  }
  operator float() const { unsigned u = (unsigned)bits << 16; float f; memcpy(&f, &u, 4); return f; }
};
"""
# -ffp-contract=off: no fused multiply-add here either
FLAGS = "-std=c++17 -O2 -mf16c -ffp-contract=off -fsanitize=undefined -shared -fPIC".split()


@functools.cache
def load():
    """(the compiled kernels, '') or (None, why there are none)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None, f"the shim's half conversions are x86's, this is {platform.machine()}"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and "f16c" not in cpuinfo.read_text():
        return None, "this processor has no half conversions (f16c)"
    if shutil.which("g++") is None:
        return None, "there is no g++"
    folder = Path(tempfile.mkdtemp(prefix="kernels-"))
    source, target = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(SHIM + kernels.HEAD + "".join(dict.fromkeys(kernels.SOURCES.values())))
    made = subprocess.run(["g++", *FLAGS, source, "-o", target], capture_output=True, text=True)
    if made.returncode and "sanitize" in made.stderr + made.stdout or "ubsan" in made.stderr:
        return None, f"g++ has no undefined-behaviour sanitizer: {made.stderr.splitlines()[0]}"
    assert not made.returncode, made.stderr
    lib = ctypes.CDLL(str(target))
    shutil.rmtree(folder)
    return lib, ""


def _argument(a):
    if isinstance(a, np.ndarray):
        return ctypes.c_void_p(a.ctypes.data)
    return {
        np.int64: ctypes.c_longlong,
        np.uint64: ctypes.c_void_p,
        np.int32: ctypes.c_int,
        np.uint32: ctypes.c_uint,
        np.float32: ctypes.c_float,
        np.float64: ctypes.c_double,
    }[type(a)](a.item())


def run(name, args, grid=2, block=3):
    """Kernel `name` with all threads of a small grid: so each takes several elements, and the last ones none."""
    lib, _ = load()
    function, converted = getattr(lib, name), [_argument(a) for a in args]
    for b in range(grid):
        for t in range(block):
            lib.at(grid, block, b, t)
            function(*converted)
