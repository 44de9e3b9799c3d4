"""CUDA kernels of pooling: the largest value of every window and its gradient, and the same of the mean. x is (N, H, W, C)."""

import numpy as np

from minamp.backends import kernels
from minamp.backends.device import constant, xp
from minamp.backends.kernels import C_TYPES, KINDS, SOURCES, ints
from minamp.formats import float32, float64

# Max pooling, one thread a result. `position` numbers the kernel offset (i * KW + j) that holds the first maximum; all bits are
# set where a window lies outside the image (its maximum is `least`, -inf). The gradient is gathered, as in col2im: every
# element sums in float32 what the windows hand it that point at it.
WINDOW = r"""
typedef unsigned char u8;

#define WINDOW(e) \
  i64 c = e % C, r = e / C; \
  i64 top = r / OW % OH * sh - ph, left = r % OW * sw - pw, n = r / (OW * OH);
#define OFFSETS(i, j, row, col) \
  for (i64 i = 0, row = top; i < KH; i++, row += dh) \
    for (i64 j = 0, col = left; j < KW; j++, col += dw) \
      if (row >= 0 && row < H && col >= 0 && col < Wd)
"""
MAX_POOL2D = r"""
template <class T, class S>
__device__ void max_pool2d(T* y, const T* x, S least, i64 N, i64 H, i64 Wd, i64 C, GEOMETRY_ARGS) {
  EACH(e, N * OH * OW * C) {
    WINDOW(e)
    S best = least;
    OFFSETS(i, j, row, col) {
      S value = (S)x[((n * H + row) * Wd + col) * C + c];
      if (value > best || value != value) best = value;  // nan wins, and stays
    }
    y[e] = rounded<T>(best);
  }
}
#define MAX_POOL2D(T) extern "C" __global__ void max_pool2d_##T(T##_t* y, const T##_t* x, Sum<T##_t>::type least, \
    i64 N, i64 H, i64 Wd, i64 C, GEOMETRY_ARGS) { \
  max_pool2d(y, x, least, N, H, Wd, C, GEOMETRY); }
"""
MAX_POOL2D_POSITION = r"""
template <class T, class S, class P>
__device__ void max_pool2d_position(P* position, const T* x, const T* y, i64 N, i64 H, i64 Wd, i64 C, GEOMETRY_ARGS) {
  EACH(e, N * OH * OW * C) {
    WINDOW(e)
    S best = (S)y[e];
    P found = (P)-1;
    OFFSETS(i, j, row, col) {
      S value = (S)x[((n * H + row) * Wd + col) * C + c];
      if (found == (P)-1 && (value == best || value != value)) found = (P)(i * KW + j);
    }
    position[e] = found;
  }
}
#define MAX_POOL2D_POSITION(T, bits) extern "C" __global__ void max_pool2d_position_##T##_##bits(u##bits* position, \
    const T##_t* x, const T##_t* y, i64 N, i64 H, i64 Wd, i64 C, GEOMETRY_ARGS) { \
  max_pool2d_position<T##_t, Sum<T##_t>::type>(position, x, y, N, H, Wd, C, GEOMETRY); }
"""
MAX_POOL2D_SCATTER = r"""
template <class T, class S, class P>
__device__ void max_pool2d_scatter(T* x, const T* g, const P* position, i64 N, i64 H, i64 Wd, i64 C, GEOMETRY_ARGS) {
  EACH(e, N * H * Wd * C) {
    i64 c = e % C, r = e / C;
    i64 col = r % Wd; r /= Wd;
    i64 row = r % H, n = r / H;
    S sum = 0;
    for (i64 i = 0; i < KH; i++) {
      i64 u = row + ph - i * dh;
      if (u < 0 || u % sh || u / sh >= OH) continue;
      for (i64 j = 0; j < KW; j++) {
        i64 v = col + pw - j * dw;
        if (v < 0 || v % sw || v / sw >= OW) continue;
        i64 at = ((n * OH + u / sh) * OW + v / sw) * C + c;
        if (position[at] == i * KW + j) sum += (S)g[at];
      }
    }
    x[e] = rounded<T>(sum);
  }
}
#define MAX_POOL2D_SCATTER(T, bits) extern "C" __global__ void max_pool2d_scatter_##T##_##bits(T##_t* x, \
    const T##_t* g, const u##bits* position, i64 N, i64 H, i64 Wd, i64 C, GEOMETRY_ARGS) { \
  max_pool2d_scatter<T##_t, Sum<T##_t>::type>(x, g, position, N, H, Wd, C, GEOMETRY); }
"""
MAX_POOL2D_GATHER = r"""
template <class T, class P>
__device__ void max_pool2d_gather(T* y, const T* x, const P* position, i64 N, i64 H, i64 Wd, i64 C, GEOMETRY_ARGS) {
  EACH(e, N * OH * OW * C) {
    WINDOW(e)
    i64 i = position[e] / KW, j = position[e] % KW;
    if (position[e] == (P)-1) y[e] = rounded<T>(0);
    else y[e] = x[((n * H + top + i * dh) * Wd + left + j * dw) * C + c];
  }
}
#define MAX_POOL2D_GATHER(T, bits) extern "C" __global__ void max_pool2d_gather_##T##_##bits(T##_t* y, \
    const T##_t* x, const u##bits* position, i64 N, i64 H, i64 Wd, i64 C, GEOMETRY_ARGS) { \
  max_pool2d_gather(y, x, position, N, H, Wd, C, GEOMETRY); }
"""

# Average pooling of (N, H, W, C): rows, cols hold (start, stop) of every window; its reverse reads, for every input row and
# column, the (first, last + 1) window that covers it.
WINDOW_MEAN = r"""
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
#define WINDOW_MEAN(T) extern "C" __global__ void window_mean_##T(T##_t* y, const T##_t* x, const int* rows, \
    const int* cols, const Sum<T##_t>::type* counts, i64 N, i64 H, i64 Wd, i64 C, i64 OH, i64 OW) { \
  window_mean(y, x, rows, cols, counts, N, H, Wd, C, OH, OW); }
"""
WINDOW_MEAN_GRAD = r"""
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
#define WINDOW_MEAN_GRAD(T) extern "C" __global__ void window_mean_grad_##T(T##_t* x, const T##_t* g, const int* rows, \
    const int* cols, const Sum<T##_t>::type* counts, i64 N, i64 H, i64 Wd, i64 C, i64 OH, i64 OW) { \
  window_mean_grad(x, g, rows, cols, counts, N, H, Wd, C, OH, OW); }
"""

_positioned = {  # made for the type of the values and the bits of a position
    "max_pool2d_position": MAX_POOL2D_POSITION,
    "max_pool2d_scatter": MAX_POOL2D_SCATTER,
    "max_pool2d_gather": MAX_POOL2D_GATHER,
}
_plain = {"max_pool2d": MAX_POOL2D, "window_mean": WINDOW_MEAN, "window_mean_grad": WINDOW_MEAN_GRAD}
SOURCES.update({name: WINDOW + text for name, text in _positioned.items()})
SOURCES.update({name: WINDOW + text for name, text in _plain.items()})
KINDS.update(dict.fromkeys(_positioned, tuple(f"{t}_{bits}" for t in C_TYPES.values() for bits in (8, 32))))
KINDS.update(dict.fromkeys(_plain, tuple(C_TYPES.values())))


def max_pool2d(x, size, *geometry):
    """The largest value of every window: (N, OH, OW, C). size: (OH, OW); geometry: kernel, stride, padding, dilation."""
    n, h, w, c = x.shape
    y = xp.empty((n, *size, c), x.dtype)
    least = _accumulator(x).type(-np.inf)
    kernels.launch("max_pool2d", C_TYPES[x.dtype], y.size, y, x, least, *_ints(x.shape, size, geometry))
    return y


def max_pool2d_position(x, y, *geometry):
    """Which kernel offset holds the first maximum y of every window."""
    kernel = geometry[0]
    position = xp.empty(y.shape, np.uint8 if kernel[0] * kernel[1] < 256 else np.uint32)
    numbers = _ints(x.shape, y.shape[1:3], geometry)
    kernels.launch("max_pool2d_position", _kind(x, position), y.size, position, x, y, *numbers)
    return position


def max_pool2d_scatter(g, position, shape, *geometry):
    """Zeros of `shape` with g added where `position` points, in g's dtype, rounded once."""
    x = xp.empty(shape, g.dtype)
    numbers = _ints(shape, g.shape[1:3], geometry)
    kernels.launch("max_pool2d_scatter", _kind(g, position), x.size, x, g, position, *numbers)
    return x


def max_pool2d_gather(x, position, *geometry):
    """x where `position` points, 0 where it points nowhere."""
    y = xp.empty(position.shape, x.dtype)
    numbers = _ints(x.shape, y.shape[1:3], geometry)
    kernels.launch("max_pool2d_gather", _kind(x, position), y.size, y, x, position, *numbers)
    return y


def _kind(x, position):
    return f"{C_TYPES[x.dtype]}_{8 * position.itemsize}"


def _ints(shape, size, geometry):
    return ints(*shape, *size, *(v for pair in geometry for v in pair))


def _accumulator(x):
    return float64 if x.dtype == float64 else float32


def window_mean(x, rows, cols, counts):
    """x (N, H, W, C) averaged over windows: (N, OH, OW, C), in x's dtype. rows, cols: (start, stop) per output position."""
    n, h, w, c = x.shape
    y = xp.empty((n, len(rows), len(cols), c), x.dtype)
    kernels.launch(
        "window_mean",
        C_TYPES[x.dtype],
        y.size,
        y,
        x,
        *_tables(x, rows, cols, counts),
        *ints(n, h, w, c, *y.shape[1:3]),
    )
    return y


def window_mean_grad(g, shape, rows, cols, counts):
    """The gradient that reaches an x of `shape` (N, H, W, C) in window_mean, given g (N, OH, OW, C)."""
    n, h, w, c = shape
    x = xp.empty(shape, g.dtype)
    covers = (_covering(rows, h), _covering(cols, w))
    kernels.launch(
        "window_mean_grad",
        C_TYPES[g.dtype],
        x.size,
        x,
        g,
        *_tables(g, *covers, counts),
        *ints(*shape, *g.shape[1:3]),
    )
    return x


def _tables(x, rows, cols, counts):
    return (
        constant(np.array(rows, np.int32)),
        constant(np.array(cols, np.int32)),
        constant(np.asarray(counts, _accumulator(x))),
    )


def _covering(windows, size):
    """For every position below `size`, the (first, last + 1) of the windows that hold it: starts and stops never fall."""
    out = []
    for at in range(size):
        held = [i for i, (start, stop) in enumerate(windows) if start <= at < stop]
        out.append((held[0], held[-1] + 1) if held else (0, 0))
    return out
