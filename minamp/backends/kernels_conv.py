"""CUDA kernels of convolution: the columns that a matrix product takes, and what a product's columns add up to."""

from minamp.backends import kernels
from minamp.backends.kernels import C_TYPES, KINDS, SOURCES, ints, optional
from minamp.formats import is_half

# Columns of output positions first .. first + count: columns[p][(i * KW + j) * cg + c] = x[n][row][col][c0 + c], 0 outside the
# image and in the rest of a row of `width`. x is (N, H, W, C). All are counted in words of up to 16 bytes: nothing is computed.
IM2COL = r"""
typedef unsigned short word2;
typedef unsigned int word4;
typedef i64 word8;
template <class W>
__device__ void im2col(W* columns, const W* x, i64 first, i64 count, i64 width, i64 H, i64 Wd, i64 C, i64 c0, i64 cg,
                       GEOMETRY_ARGS) {
  EACH(e, count * width) {
    i64 k = e % width, p = first + e / width;
    i64 c = k % cg, tap = k / cg;
    i64 i = tap / KW, j = tap % KW;
    i64 row = p / OW % OH * sh - ph + i * dh;
    i64 col = p % OW * sw - pw + j * dw;
    if (i >= KH || row < 0 || row >= H || col < 0 || col >= Wd) zero(columns[e]);
    else columns[e] = x[((p / (OH * OW) * H + row) * Wd + col) * C + c0 + c];
  }
}
#define IM2COL(N) extern "C" __global__ void im2col_##N(word##N* columns, const word##N* x, i64 first, i64 count, i64 width, \
    i64 H, i64 Wd, i64 C, i64 c0, i64 cg, GEOMETRY_ARGS) { \
  im2col(columns, x, first, count, width, H, Wd, C, c0, cg, GEOMETRY); }
"""

# The reverse, gathered: every element of x sums what it gave to and its channel's bias (may be null), in float32 (float64), and
# is rounded once. No atomics, so the order of the sum is fixed: kernel rows, then columns.
COL2IM = r"""
template <class S, class T>
__device__ void col2im(T* x, const S* columns, const T* bias, i64 images, i64 width, i64 H, i64 Wd, i64 C, i64 c0, i64 cg,
                       GEOMETRY_ARGS) {
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
        sum += columns[((n * OH + u / sh) * OW + v / sw) * width + (i * KW + j) * cg + c];
      }
    }
    if (bias) sum += (S)bias[c0 + c];
    x[((n * H + row) * Wd + col) * C + c0 + c] = rounded<T>(sum);
  }
}
#define COL2IM(T) extern "C" __global__ void col2im_##T(T##_t* x, const Sum<T##_t>::type* columns, const T##_t* bias, \
    i64 images, i64 width, i64 H, i64 Wd, i64 C, i64 c0, i64 cg, GEOMETRY_ARGS) { \
  col2im(x, columns, bias, images, width, H, Wd, C, c0, cg, GEOMETRY); }
"""

SOURCES.update(im2col=IM2COL, col2im=COL2IM)
KINDS.update(im2col=("2", "4", "8", "16"), col2im=tuple(C_TYPES.values()))


def row_width(k, dtype):
    """How long a row of `k` column values is made: `k`, or for half the next multiple of 8, with zeros at the end.

    Tensor cores read rows that start at multiples of 16 bytes, 8 halves. The 9 or 27 values of a first layer's 3x3 windows on 1
    or 3 channels are not that; zeros after them change no sum. Filling the channels up to 8 instead would align them too, but
    make both rows 72 long: 8 and 2.7 times the memory, where this takes 1.8 and 1.2. float32 has no such rows to keep.
    """
    return -(-k // 8) * 8 if is_half(dtype) else k


def im2col(columns, x, first, c0, cg, size, kernel, stride, padding, dilation):
    """Fill `columns` (count, width) from x (N, H, W, C), channels c0 .. c0 + cg; width >= KH * KW * cg; `size` is (OH, OW)."""
    (_, h, w, c), (count, width), item = x.shape, columns.shape, x.itemsize
    # the widest words that divide every run of channels and every address
    word = next(
        b for b in (16, 8, 4, 2) if all(v * item % b == 0 for v in (c, c0, cg, width)) and x.data.ptr % b == 0
    )
    width, c, c0, cg = (v * item // word for v in (width, c, c0, cg))
    geometry = ints(first, count, width, h, w, c, c0, cg, *size, *kernel, *stride, *padding, *dilation)
    kernels.launch("im2col", str(word), count * width, columns, x, *geometry)


def col2im(x, columns, bias, c0, cg, size, kernel, stride, padding, dilation):
    """x (N, H, W, C), channels c0 .. c0 + cg, from `columns` (N * OH * OW, width) in float32 (float64); bias (C,) or None."""
    images, h, w, c = x.shape
    geometry = ints(images, columns.shape[1], h, w, c, c0, cg, *size, *kernel, *stride, *padding, *dilation)
    kernels.launch("col2im", C_TYPES[x.dtype], images * h * w * cg, x, columns, optional(bias), *geometry)
