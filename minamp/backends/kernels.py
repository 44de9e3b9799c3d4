"""CUDA kernels: sources as text, and one function each that launches it. Compiled by NVRTC when first used.

Here is what all of them share, and dropout's; kernels_elementwise.py, _conv, _pool and _wmma hold those of their rooms.
One thread an element, in strides of the whole grid, without shared memory (but for the last); indices have 64 bits (256 images
of 64 channels, 112 x 112, make columns of more than 2^31 elements). No fused multiply-add (OPTIONS): each product is rounded as
NumPy rounds it. CuPy compiles with -ftz=true, so float32 results below 1.2e-38 become 0; half's subnormals survive.
"""

import numpy as np

from minamp.backends.device import array_module, xp
from minamp.formats import bfloat16, float16, float32, float64

OPTIONS = ("--std=c++17", "-fmad=false")
C_TYPES = {float16: "half", bfloat16: "bf16", float32: "float", float64: "double"}

HEAD = r"""
typedef long long i64;
typedef unsigned int u32;
typedef __half half_t;
typedef __nv_bfloat16 bf16_t;
typedef float float_t;
typedef double double_t;
template <class T> struct Sum { typedef float type; };
template <> struct Sum<double> { typedef double type; };
template <class T> __device__ T rounded(double x) { return T((float)x); }
template <> __device__ double rounded<double>(double x) { return x; }
#define EACH(i, n) \
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (i64)gridDim.x * blockDim.x)

// how windows lie on an image: their number, then kernel, stride, padding and dilation
#define GEOMETRY OH, OW, KH, KW, sh, sw, ph, pw, dh, dw
#define GEOMETRY_ARGS i64 OH, i64 OW, i64 KH, i64 KW, i64 sh, i64 sw, i64 ph, i64 pw, i64 dh, i64 dw

struct alignas(16) word16 { i64 a, b; };  // what one thread can move at once
template <class W> __device__ void zero(W& w) { w = 0; }
template <> __device__ void zero(word16& w) { w.a = w.b = 0; }
"""
INCLUDES = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"

# Which values dropout keeps: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, section 3.3),
# counter e / 4, its e % 4th word. keep[e] = word >= threshold, so the share of zeros is threshold / 2^32.
DROPOUT = r"""
extern "C" __global__ void keep_mask(bool* keep, i64 n, u32 key0, u32 key1, u32 threshold) {
  EACH(block, (n + 3) / 4) {
    u32 x[4] = {(u32)block, (u32)(block >> 32), 0, 0}, k0 = key0, k1 = key1;
    for (int round = 0; round < 10; round++) {
      unsigned long long p0 = 0xD2511F53ull * x[0], p1 = 0xCD9E8D57ull * x[2];
      x[0] = (u32)(p1 >> 32) ^ x[1] ^ k0;
      x[1] = (u32)p1;
      x[2] = (u32)(p0 >> 32) ^ x[3] ^ k1;
      x[3] = (u32)p0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < 4; i++)
      if (4 * block + i < n) keep[4 * block + i] = x[i] >= threshold;
  }
}
"""

# Kernel name without the types it is made for -> its text; the other rooms add theirs. Where KINDS names types, the text ends in
# a macro NAME(types) and `source` makes the kernels asked for: one of max pooling's takes NVRTC 0.3 s, all 8 of a text 1.6.
SOURCES = {
    "keep_mask": DROPOUT,
}
KINDS = {}
NULL = np.uint64(0)
_compiled = {}  # (module, full name) -> kernel


def source(base, *kinds):
    """The whole text that the kernel `base` is compiled from, for these `kinds`."""
    return INCLUDES + HEAD + SOURCES[base] + instances(base, kinds)


def instances(base, kinds):
    """Lines that make the kernel `base` for `kinds`, such as 'half' or 'half_8'."""
    return "".join(f"{base.upper()}({kind.replace('_', ', ')})\n" for kind in kinds if base in KINDS)


def launch(base, kind, n, *args, block=256):
    """Run the kernel with `n` threads. Arguments are arrays and NumPy scalars: bare Python numbers would go as 64 bits."""
    if not n:
        return
    name = f"{base}_{kind}" if kind else base
    key = (id(array_module()), name)
    kernel = _compiled.get(key)
    if kernel is None:
        kernel = _compiled[key] = xp.RawKernel(source(base, kind), name, options=OPTIONS)
    kernel((min(-(-n // block), 1 << 16),), (block,), args)


def ints(*values):
    return tuple(np.int64(v) for v in values)


def optional(array):
    """`array` without gaps, or a null pointer for None."""
    return NULL if array is None else xp.ascontiguousarray(array)


def keep_mask(key, shape, p):
    """A bool array of `shape`, False with probability p (rounded to a multiple of 2^-32); `key`: an int below 2^64."""
    keep = xp.empty(shape, np.bool_)
    threshold = np.uint32(min(round(p * 2**32), 2**32 - 1))
    words = (np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32))
    launch("keep_mask", "", -(-keep.size // 4), keep, np.int64(keep.size), *words, threshold)
    return keep
