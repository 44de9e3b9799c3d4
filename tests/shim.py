"""CUDA kernels on the CPU: their text compiled by g++ behind a few lines that stand for CUDA, one thread after the other."""

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from minamp.backends import cuda, kernels, kernels_update, kernels_wmma  # noqa: F401  cuda imports every room's kernels

SHIM = r"""
#include <cmath>
#include <cstring>
#include <immintrin.h>
using std::erf;
using std::exp;
using std::fabs;
using std::sqrt;
using std::pow;
#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(n)
static void __syncthreads() {}  // threads run one after the other: a kernel with barriers runs as blocks of one thread
#define __grid_constant__
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
# In the place of tensor cores: the same sums, one product after the other.
PRODUCT = r"""
template <class T> struct Product {
  float sum[ROWS][COLS] = {};
  void add(const T* a, const T* b) {
    for (int r = 0; r < ROWS; r++)
      for (int k = 0; k < DEPTH; k++)
        for (int c = 0; c < COLS; c++) sum[r][c] += (float)a[r * A_WIDTH + k] * (float)b[k * B_WIDTH + c];
  }
  void store(float* sums) const {
    for (int r = 0; r < ROWS; r++) memcpy(sums + r * SUM_WIDTH, sum[r], sizeof sum[r]);
  }
};
"""
# -ffp-contract=off: no fused multiply-add here either. -fno-strict-aliasing: CUDA's way to copy 16 bytes at once.
FLAGS = (
    "-std=c++17 -O2 -mf16c -ffp-contract=off -fno-strict-aliasing -fsanitize=undefined -shared -fPIC".split()
)


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
    texts = "".join(dict.fromkeys(kernels.SOURCES.values())).replace(kernels_wmma.PRODUCT, PRODUCT)
    made = "".join(kernels.instances(base, kinds) for base, kinds in kernels.KINDS.items())
    source.write_text(SHIM + kernels.HEAD + texts + made)
    made = subprocess.run(["g++", *FLAGS, source, "-o", target], capture_output=True, text=True)
    if made.returncode and "sanitize" in made.stderr + made.stdout or "ubsan" in made.stderr:
        return None, f"g++ has no undefined-behaviour sanitizer: {made.stderr.splitlines()[0]}"
    assert not made.returncode, made.stderr
    lib = ctypes.CDLL(str(target))
    shutil.rmtree(folder)
    return lib, ""


class Table(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_longlong * (kernels_update.TABLE.itemsize // 8))]


def _argument(a):
    if isinstance(a, np.ndarray) and a.dtype.names:
        return Table.from_buffer_copy(a)
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
