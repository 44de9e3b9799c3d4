"""Convolution as an implicit matrix product on tensor cores: columns that exist only in shared memory, 16 channels at a time.

The product of columns (positions, KH * KW * C) and weights (KH * KW * C, O) is cut into tiles of 64 positions x 64 output
channels, one tile a block of 128 threads. All threads together copy 16 channels of one kernel offset into shared memory (one copy
of 16 bytes a thread and operand), the four warps multiply them, and so on over offsets and channels. Columns are never written:
64 images of 64 channels, 56 x 56, take 51 MB of memory traffic in half, where column kernel and product take 514.

The text comes in three pieces. PRODUCT is the only one that knows tensor cores (CUDA C++ Programming Guide, section "Warp Matrix
Functions"); TILES, the indexing, runs with any Product, so the tests run it on a CPU with a scalar one.
"""

from minamp.backends import kernels
from minamp.backends.kernels import C_TYPES, KINDS, SOURCES, ints, optional

# Rows in shared memory are longer than what they hold, so that the rows a warp reads at once start in different banks. Fragments
# must start at multiples of 32 bytes and rows at multiples of 16: all of these are.
SIZES = r"""
#define ROWS 64  // positions of a tile
#define COLS 64  // its output channels
#define DEPTH 16  // input channels of a step
#define THREADS 128
#define A_WIDTH (DEPTH + 8)
#define B_WIDTH (COLS + 8)
#define SUM_WIDTH (COLS + 4)
"""

# A tile's sums, spread over the block: warp w holds rows 32 * (w / 2) .. + 32, columns 32 * (w % 2) .. + 32 as 2 x 2 fragments.
# Products of halves are exact in float32, where tensor cores add them up.
PRODUCT = r"""
#include <mma.h>
using namespace nvcuda;
template <class T> struct Product {
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][2];
  int row, col;
  __device__ Product() : row(threadIdx.x / 64 * 32), col(threadIdx.x / 32 % 2 * 32) {
    for (int i = 0; i < 4; i++) wmma::fill_fragment(sum[i / 2][i % 2], 0.0f);
  }
  __device__ void add(const T* a, const T* b) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> left[2];
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> right[2];
    for (int i = 0; i < 2; i++) {
      wmma::load_matrix_sync(left[i], a + (row + 16 * i) * A_WIDTH, A_WIDTH);
      wmma::load_matrix_sync(right[i], b + col + 16 * i, B_WIDTH);
    }
    for (int i = 0; i < 4; i++) wmma::mma_sync(sum[i / 2][i % 2], left[i / 2], right[i % 2], sum[i / 2][i % 2]);
  }
  __device__ void store(float* sums) const {
    for (int i = 0; i < 4; i++)
      wmma::store_matrix_sync(sums + (row + i / 2 * 16) * SUM_WIDTH + col + i % 2 * 16, sum[i / 2][i % 2], SUM_WIDTH,
                              wmma::mem_row_major);
  }
};
"""

# y[p][o] = sum over i, j, c of x[n][row][col][c] * w[(i * KW + j) * C + c][o], + bias[o] (may be null). C and O are multiples of
# 16. Every loop over threads (ALL) ends before the barrier that follows it, so one thread that runs all of a loop will do too.
TILES = r"""
#define ALL(t, n) for (int t = threadIdx.x; t < (n); t += blockDim.x)

template <class T>
__device__ void conv2d_wmma(T* y, const T* x, const T* w, const T* bias, i64 positions, i64 H, i64 Wd, i64 C, i64 O,
                            GEOMETRY_ARGS) {
  alignas(32) __shared__ T a[ROWS * A_WIDTH];
  alignas(32) __shared__ T b[DEPTH * B_WIDTH];
  alignas(32) __shared__ float sums[ROWS * SUM_WIDTH];
  __shared__ i64 image[ROWS], top[ROWS], left[ROWS];  // where the window of each position lies; image -1: there is no position
  i64 across = (O + COLS - 1) / COLS;
  i64 tiles = (positions + ROWS - 1) / ROWS * across;
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    i64 p0 = tile / across * ROWS, o0 = tile % across * COLS;
    ALL(t, ROWS) {
      i64 p = p0 + t;
      image[t] = p < positions ? p / (OH * OW) : -1;
      top[t] = p / OW % OH * sh - ph;
      left[t] = p % OW * sw - pw;
    }
    Product<T> product;
    for (i64 i = 0; i < KH; i++)
      for (i64 j = 0; j < KW; j++)
        for (i64 c = 0; c < C; c += DEPTH) {
          __syncthreads();
          ALL(t, ROWS * DEPTH / 8) {
            int r = t / (DEPTH / 8), k = t % (DEPTH / 8) * 8;
            i64 row = top[r] + i * dh, col = left[r] + j * dw;
            word16* to = (word16*)(a + r * A_WIDTH + k);
            if (image[r] < 0 || row < 0 || row >= H || col < 0 || col >= Wd) zero(*to);
            else *to = *(const word16*)(x + ((image[r] * H + row) * Wd + col) * C + c + k);
          }
          ALL(t, DEPTH * COLS / 8) {
            int k = t / (COLS / 8), q = t % (COLS / 8) * 8;
            word16* to = (word16*)(b + k * B_WIDTH + q);
            if (o0 + q >= O) zero(*to);
            else *to = *(const word16*)(w + ((i * KW + j) * C + c + k) * O + o0 + q);
          }
          __syncthreads();
          product.add(a, b);
        }
    product.store(sums);
    __syncthreads();
    ALL(e, ROWS * COLS) {
      i64 p = p0 + e / COLS, o = o0 + e % COLS;
      if (p >= positions || o >= O) continue;
      float sum = sums[e / COLS * SUM_WIDTH + e % COLS];
      y[p * O + o] = rounded<T>(bias ? sum + (float)bias[o] : sum);
    }
    __syncthreads();
  }
}
#define CONV2D_WMMA(T) \
extern "C" __global__ void __launch_bounds__(THREADS) conv2d_wmma_##T(T##_t* y, const T##_t* x, const T##_t* w, \
    const T##_t* bias, i64 positions, i64 H, i64 Wd, i64 C, i64 O, GEOMETRY_ARGS) { \
  conv2d_wmma(y, x, w, bias, positions, H, Wd, C, O, GEOMETRY); }
"""

SOURCES["conv2d_wmma"] = SIZES + PRODUCT + TILES
KINDS["conv2d_wmma"] = ("half", "bf16")  # bf16: from compute capability 8.0 on
TILE, BLOCK = 64, 128


def conv2d_wmma(y, x, w, bias, kernel, stride, padding, dilation):
    """y (N, OH, OW, O) from x (N, H, W, C), w (KH * KW * C, O), bias (O,) or None: one half dtype, C and O multiples of 16."""
    (n, *size, o), (_, h, wide, c) = y.shape, x.shape
    positions = n * size[0] * size[1]
    tiles = -(-positions // TILE) * -(-o // TILE)
    numbers = ints(positions, h, wide, c, o, *size, *kernel, *stride, *padding, *dilation)
    w = w if w.data.ptr % 16 == 0 else w.copy()  # a view may start anywhere, and is read 16 bytes at once
    arrays = (y, x, w, optional(bias))
    kernels.launch("conv2d_wmma", C_TYPES[x.dtype], tiles * BLOCK, *arrays, *numbers, block=BLOCK)
