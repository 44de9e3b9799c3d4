"""CUDA kernels: sources as text, and one function each that launches it. Compiled by NVRTC when first used.

One thread an element, in strides of the whole grid, without shared memory; indices have 64 bits (256 images of 64 channels, 112 x
112, make columns of more than 2^31 elements). No fused multiply-add (OPTIONS): each product is rounded as NumPy rounds it.
CuPy compiles with -ftz=true, so float32 results below 1.2e-38 become 0; half's subnormals survive.
"""

import math

import numpy as np

from minamp.backends.device import array_module, constant, xp
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
"""
INCLUDES = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"

# Columns of output positions first .. first + count: columns[p][i][j][c] = x[n][row][col][c0 + c], 0 outside the image. x is
# (N, H, W, C). Channels are counted in words of up to 16 bytes, since nothing is computed.
IM2COL = r"""
struct alignas(16) word16 { i64 a, b; };
typedef unsigned short word2;
typedef unsigned int word4;
typedef i64 word8;
template <class W> __device__ void zero(W& w) { w = 0; }
template <> __device__ void zero(word16& w) { w.a = w.b = 0; }

template <class W>
__device__ void im2col(W* columns, const W* x, i64 first, i64 count, i64 H, i64 Wd, i64 C, i64 c0, i64 cg, i64 OH, i64 OW,
                       i64 KH, i64 KW, i64 sh, i64 sw, i64 ph, i64 pw, i64 dh, i64 dw) {
  EACH(e, count * KH * KW * cg) {
    i64 c = e % cg, r = e / cg;
    i64 j = r % KW; r /= KW;
    i64 i = r % KH;
    i64 p = first + r / KH;
    i64 row = p / OW % OH * sh - ph + i * dh;
    i64 col = p % OW * sw - pw + j * dw;
    if (row < 0 || row >= H || col < 0 || col >= Wd) zero(columns[e]);
    else columns[e] = x[((p / (OH * OW) * H + row) * Wd + col) * C + c0 + c];
  }
}
#define IM2COL(N) extern "C" __global__ void im2col_##N(word##N* columns, const word##N* x, i64 first, i64 count, i64 H, \
    i64 Wd, i64 C, i64 c0, i64 cg, i64 OH, i64 OW, i64 KH, i64 KW, i64 sh, i64 sw, i64 ph, i64 pw, i64 dh, i64 dw) { \
  im2col(columns, x, first, count, H, Wd, C, c0, cg, OH, OW, KH, KW, sh, sw, ph, pw, dh, dw); }
IM2COL(2) IM2COL(4) IM2COL(8) IM2COL(16)
"""

# The reverse, gathered: every element of x sums what it gave to, in float32 (float64), and is rounded once. No atomics, so the
# order of the sum is fixed: kernel rows, then columns.
COL2IM = r"""
template <class S, class T>
__device__ void col2im(T* x, const S* columns, i64 images, i64 H, i64 Wd, i64 C, i64 c0, i64 cg, i64 OH, i64 OW,
                       i64 KH, i64 KW, i64 sh, i64 sw, i64 ph, i64 pw, i64 dh, i64 dw) {
  EACH(e, images * H * Wd * cg) {
    i64 c = e % cg, r = e / cg;
    i64 col = r % Wd; r /= Wd;
    i64 row = r % H, n = r / H;
    S sum = 0;
    for (i64 i = 0; i < KH; i++) {
      i64 u = row + ph - i * dh;
      if (u < 0 || u % sh || u / sh >= OH) continue;
      for (i64 j = 0; j < KW; j++) {
        i64 v = col + pw - j * dw;
        if (v < 0 || v % sw || v / sw >= OW) continue;
        sum += columns[((((n * OH + u / sh) * OW + v / sw) * KH + i) * KW + j) * cg + c];
      }
    }
    x[((n * H + row) * Wd + col) * C + c0 + c] = rounded<T>(sum);
  }
}
#define COL2IM(T) extern "C" __global__ void col2im_##T(T##_t* x, const Sum<T##_t>::type* columns, i64 images, i64 H, i64 Wd, \
    i64 C, i64 c0, i64 cg, i64 OH, i64 OW, i64 KH, i64 KW, i64 sh, i64 sw, i64 ph, i64 pw, i64 dh, i64 dw) { \
  col2im(x, columns, images, H, Wd, C, c0, cg, OH, OW, KH, KW, sh, sw, ph, pw, dh, dw); }
COL2IM(half) COL2IM(bf16) COL2IM(float) COL2IM(double)
"""

# g *= inverse over a flat buffer; *bad becomes 1 if a value was or became non-finite. A float16 gradient is only looked at.
UNSCALE = r"""
template <class T, class S> __device__ void unscale(T* g, u32* bad, S inverse, i64 n) {
  EACH(e, n) {
    S x = (S)g[e];
    S y = x * inverse;
    if (inverse != (S)1) g[e] = rounded<T>(y);
    if (!(x - x == (S)0) || !(y - y == (S)0) || !((S)g[e] - (S)g[e] == (S)0)) *bad = 1;  // all threads write the same
  }
}
#define UNSCALE(T) extern "C" __global__ void unscale_##T(T##_t* g, u32* bad, Sum<T##_t>::type inverse, i64 n) { \
  unscale(g, bad, inverse, n); }
UNSCALE(half) UNSCALE(bf16) UNSCALE(float) UNSCALE(double)
"""

# The optimizers' steps in backends/update.py's order of operations. `skip` (may be null) points to a flag: where it is not 0,
# nothing is written. `half16` (may be null) takes the new weight rounded to float16 or, with `brain`, to bfloat16.
UPDATE = r"""
template <class S> __device__ void store16(void* half16, int brain, i64 e, S w) {
  if (!half16) return;
  if (brain) ((bf16_t*)half16)[e] = rounded<bf16_t>(w);
  else ((half_t*)half16)[e] = rounded<half_t>(w);
}
template <class S> __device__ S direction(S w, S g, S decay, int maximize) {
  if (decay == (S)0) return maximize ? -g : g;
  S s = w * decay;
  return maximize ? s - g : s + g;
}

template <class S>
__device__ void sgd(S* w, const S* g, S* b, void* half16, const u32* skip, i64 n, S lr, S momentum, S damp, S decay,
                    int fresh, int nesterov, int maximize, int brain) {
  if (skip && *skip) return;
  EACH(e, n) {
    S d = direction(w[e], g[e], decay, maximize);
    if (b) {
      S held = b[e] * momentum;
      held = fresh ? d : held + d * damp;
      b[e] = held;
      d = nesterov ? d + held * momentum : held;
    }
    S y = w[e] - d * lr;
    w[e] = y;
    store16(half16, brain, e, y);
  }
}

template <class S>
__device__ void adam(S* w, const S* g, S* m, S* v, S* top, void* half16, const u32* skip, i64 n, S shrink, S decay,
                     S one_minus_beta1, S beta2, S one_minus_beta2, S root, S eps, S step_size, int maximize, int brain) {
  if (skip && *skip) return;
  EACH(e, n) {
    S y = w[e] * shrink;
    S d = direction(y, g[e], decay, maximize);
    S mean = m[e] + (d - m[e]) * one_minus_beta1;
    m[e] = mean;
    S square = v[e] * beta2 + d * one_minus_beta2 * d;
    v[e] = square;
    if (top) {
      S before = top[e];
      square = before != before || before > square ? before : square;
      top[e] = square;
    }
    S t = (S)sqrt(square) / root + eps;
    y = y - mean * step_size / t;
    w[e] = y;
    store16(half16, brain, e, y);
  }
}
#define UPDATE(S) \
extern "C" __global__ void sgd_##S(S* w, const S* g, S* b, void* half16, const u32* skip, i64 n, S lr, S momentum, S damp, \
    S decay, int fresh, int nesterov, int maximize, int brain) { \
  sgd(w, g, b, half16, skip, n, lr, momentum, damp, decay, fresh, nesterov, maximize, brain); } \
extern "C" __global__ void adam_##S(S* w, const S* g, S* m, S* v, S* top, void* half16, const u32* skip, i64 n, S shrink, \
    S decay, S one_minus_beta1, S beta2, S one_minus_beta2, S root, S eps, S step_size, int maximize, int brain) { \
  adam(w, g, m, v, top, half16, skip, n, shrink, decay, one_minus_beta1, beta2, one_minus_beta2, root, eps, step_size, \
       maximize, brain); }
UPDATE(float) UPDATE(double)
"""

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

# Average pooling of (N, H, W, C): rows, cols hold (start, stop) of every window; its reverse reads, for every input row and
# column, the (first, last + 1) window that covers it.
WINDOWS = r"""
template <class T, class S>
__device__ void window_mean(T* y, const T* x, const int* rows, const int* cols, const S* counts, i64 N, i64 H, i64 Wd, i64 C,
                            i64 OH, i64 OW) {
  EACH(e, N * OH * OW * C) {
    i64 c = e % C, r = e / C;
    i64 j = r % OW; r /= OW;
    i64 i = r % OH, n = r / OH;
    S sum = 0;
    for (i64 row = rows[2 * i]; row < rows[2 * i + 1]; row++)
      for (i64 col = cols[2 * j]; col < cols[2 * j + 1]; col++) sum += (S)x[((n * H + row) * Wd + col) * C + c];
    y[e] = rounded<T>(sum / counts[i * OW + j]);
  }
}
template <class T, class S>
__device__ void window_mean_grad(T* x, const T* g, const int* rows, const int* cols, const S* counts, i64 N, i64 H, i64 Wd,
                                 i64 C, i64 OH, i64 OW) {
  EACH(e, N * H * Wd * C) {
    i64 c = e % C, r = e / C;
    i64 col = r % Wd; r /= Wd;
    i64 row = r % H, n = r / H;
    S sum = 0;
    for (i64 i = rows[2 * row]; i < rows[2 * row + 1]; i++)
      for (i64 j = cols[2 * col]; j < cols[2 * col + 1]; j++) sum += (S)g[((n * OH + i) * OW + j) * C + c] / counts[i * OW + j];
    x[e] = rounded<T>(sum);
  }
}
#define WINDOWS(T) \
extern "C" __global__ void window_mean_##T(T##_t* y, const T##_t* x, const int* rows, const int* cols, \
    const Sum<T##_t>::type* counts, i64 N, i64 H, i64 Wd, i64 C, i64 OH, i64 OW) { \
  window_mean(y, x, rows, cols, counts, N, H, Wd, C, OH, OW); } \
extern "C" __global__ void window_mean_grad_##T(T##_t* x, const T##_t* g, const int* rows, const int* cols, \
    const Sum<T##_t>::type* counts, i64 N, i64 H, i64 Wd, i64 C, i64 OH, i64 OW) { \
  window_mean_grad(x, g, rows, cols, counts, N, H, Wd, C, OH, OW); }
WINDOWS(half) WINDOWS(bf16) WINDOWS(float) WINDOWS(double)
"""

SOURCES = {  # kernel name without the type it is made for -> its source
    "im2col": IM2COL,
    "col2im": COL2IM,
    "unscale": UNSCALE,
    "sgd": UPDATE,
    "adam": UPDATE,
    "keep_mask": DROPOUT,
    "window_mean": WINDOWS,
    "window_mean_grad": WINDOWS,
}
NULL = np.uint64(0)
_compiled = {}  # (module, full name) -> kernel


def source(base):
    """The whole text that the kernel `base` is compiled from."""
    return INCLUDES + HEAD + SOURCES[base]


def _launch(base, kind, n, *args):
    """Run the kernel for `n` elements. Arguments are arrays and NumPy scalars: bare Python numbers would go as 64 bits."""
    if not n:
        return
    name = f"{base}_{kind}" if kind else base
    key = (id(array_module()), name)
    kernel = _compiled.get(key)
    if kernel is None:
        kernel = _compiled[key] = xp.RawKernel(source(base), name, options=OPTIONS)
    kernel((min(-(-n // 256), 1 << 16),), (256,), args)


def _ints(*values):
    return tuple(np.int64(v) for v in values)


def im2col(columns, x, first, count, c0, cg, size, kernel, stride, padding, dilation):
    """Fill `columns` (count, KH, KW, cg) from x (N, H, W, C), channels c0 .. c0 + cg; `size` is (OH, OW)."""
    (_, h, w, c), item = x.shape, x.itemsize
    # the widest words that divide every run of channels and every address
    word = next(
        b for b in (16, 8, 4, 2) if all(v * item % b == 0 for v in (c, c0, cg)) and x.data.ptr % b == 0
    )
    c, c0, cg = (v * item // word for v in (c, c0, cg))
    n = count * kernel[0] * kernel[1] * cg
    geometry = _ints(first, count, h, w, c, c0, cg, *size, *kernel, *stride, *padding, *dilation)
    _launch("im2col", word, n, columns, x, *geometry)


def col2im(x, columns, c0, cg, size, kernel, stride, padding, dilation):
    """x (N, H, W, C), channels c0 .. c0 + cg, from `columns` (N * OH * OW, KH * KW * cg) in float32 (float64)."""
    images, h, w, c = x.shape
    geometry = _ints(images, h, w, c, c0, cg, *size, *kernel, *stride, *padding, *dilation)
    _launch("col2im", C_TYPES[x.dtype], images * h * w * cg, x, columns, *geometry)


def unscale(g, bad, inverse):
    """g *= inverse in place; bad[0] = 1 if a value was or became non-finite. g contiguous, bad uint32."""
    inverse = np.float64(inverse) if g.dtype == float64 else np.float32(inverse)
    _launch("unscale", C_TYPES[g.dtype], g.size, g, bad, inverse, np.int64(g.size))


def _optional(array):
    return NULL if array is None else array


def sgd(
    w,
    g,
    buffer,
    fresh,
    *,
    lr,
    momentum,
    dampening,
    weight_decay,
    nesterov,
    maximize,
    half=None,
    skip=None,
):
    """update.sgd in one pass, in place. half: takes the new weight rounded; skip: uint32 flag on the GPU, not 0 for no step."""
    numbers = (w.dtype.type(v) for v in (lr, momentum, 1 - dampening, weight_decay))
    flags = (np.int32(v) for v in (fresh, nesterov, maximize, half is not None and half.dtype == bfloat16))
    rest = (*map(_optional, (buffer, half, skip)), np.int64(w.size), *numbers, *flags)
    _launch("sgd", C_TYPES[w.dtype], w.size, w, g, *rest)


def adam(
    w,
    g,
    m,
    v,
    v_max,
    step,
    *,
    lr,
    betas,
    eps,
    weight_decay,
    decoupled,
    maximize,
    half=None,
    skip=None,
):
    """update.adam in one pass, in place; half and skip as in sgd."""
    beta1, beta2 = betas
    shrink, decay = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
    root, step_size = math.sqrt(1 - beta2**step), lr / (1 - beta1**step)
    numbers = (w.dtype.type(x) for x in (shrink, decay, 1 - beta1, beta2, 1 - beta2, root, eps, step_size))
    flags = (np.int32(x) for x in (maximize, half is not None and half.dtype == bfloat16))
    rest = (m, v, *map(_optional, (v_max, half, skip)), np.int64(w.size), *numbers, *flags)
    _launch("adam", C_TYPES[w.dtype], w.size, w, g, *rest)


def keep_mask(key, shape, p):
    """A bool array of `shape`, False with probability p (rounded to a multiple of 2^-32); `key`: an int below 2^64."""
    keep = xp.empty(shape, np.bool_)
    threshold = np.uint32(min(round(p * 2**32), 2**32 - 1))
    words = (np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32))
    _launch("keep_mask", "", -(-keep.size // 4), keep, np.int64(keep.size), *words, threshold)
    return keep


def window_mean(x, rows, cols, counts):
    """x (N, H, W, C) averaged over windows: (N, OH, OW, C), in x's dtype. rows, cols: (start, stop) per output position."""
    n, h, w, c = x.shape
    y = xp.empty((n, len(rows), len(cols), c), x.dtype)
    _launch(
        "window_mean",
        C_TYPES[x.dtype],
        y.size,
        y,
        x,
        *_tables(x, rows, cols, counts),
        *_ints(n, h, w, c, *y.shape[1:3]),
    )
    return y


def window_mean_grad(g, shape, rows, cols, counts):
    """The gradient that reaches an x of `shape` (N, H, W, C) in window_mean, given g (N, OH, OW, C)."""
    n, h, w, c = shape
    x = xp.empty(shape, g.dtype)
    covers = (_covering(rows, h), _covering(cols, w))
    _launch(
        "window_mean_grad",
        C_TYPES[g.dtype],
        x.size,
        x,
        g,
        *_tables(g, *covers, counts),
        *_ints(*shape, *g.shape[1:3]),
    )
    return x


def _tables(x, rows, cols, counts):
    accumulator = float64 if x.dtype == float64 else float32
    return (
        constant(np.array(rows, np.int32)),
        constant(np.array(cols, np.int32)),
        constant(np.asarray(counts, accumulator)),
    )


def _covering(windows, size):
    """For every position below `size`, the (first, last + 1) of the windows that hold it: starts and stops never fall."""
    out = []
    for at in range(size):
        held = [i for i, (start, stop) in enumerate(windows) if start <= at < stop]
        out.append((held[0], held[-1] + 1) if held else (0, 0))
    return out
