"""Convolution and pooling on the GPU, channels last: column kernel and one matrix product a chunk.

Logical shapes are NCHW everywhere; in memory images lie as (N, H, W, C), and results keep that order (a permuted view), so a
chain of layers never transposes. A convolution is columns (positions, KH * KW * C) times weights (KH * KW * C, O). Columns are
nine times the input for a 3x3 kernel: they are made in chunks that stay in the second-level cache, and again in backward
instead of being kept. With MINAMP_WMMA=1 in the environment the forward takes a kernel that makes no columns, where it can.
"""

import os

from minamp.backends import kernels_conv, kernels_pool, kernels_wmma
from minamp.backends.conv import conv_size, pool_size
from minamp.backends.cuda_cast import alike, widen
from minamp.backends.device import xp
from minamp.backends.gemm import gemm
from minamp.formats import bfloat16, float32, is_half

# 8 images of 56 x 56, 64 channels, 3x3 in half make 29 MB of columns: within the cache of an H100 (50 MB) or A100 (40 MB).
COLUMN_BYTES = 29 << 20
# Off unless asked for: it moves a tenth of the memory, but no GPU has told yet from which size on it is faster.
WMMA = os.environ.get("MINAMP_WMMA") == "1"


def _channels_last(x):
    """x (N, C, H, W) as a contiguous (N, H, W, C): no copy if it lies so already."""
    return xp.ascontiguousarray(x.transpose(0, 2, 3, 1))


def _matrix(w, groups, width):
    """Weights (O, C / groups, KH, KW) as one (width, O / groups) for each group, zeros below the KH * KW * C / groups rows."""
    o, cg, kh, kw = w.shape
    w = w.reshape(groups, o // groups, cg, kh, kw).transpose(0, 3, 4, 2, 1)
    w = xp.ascontiguousarray(w).reshape(groups, kh * kw * cg, o // groups)
    if width == w.shape[1]:
        return w
    out = xp.zeros((groups, width, o // groups), w.dtype)
    out[:, : w.shape[1]] = w
    return out


def _chunks(total, row_bytes, whole=1):
    """(first, count) that cut `total` positions, in multiples of `whole`, so that a chunk's columns take COLUMN_BYTES."""
    step = max(1, COLUMN_BYTES // max(1, row_bytes * whole)) * whole
    for first in range(0, total, step):
        yield first, min(step, total - first)


class _Columns:
    """The columns of x (N, H, W, C), chunk by chunk in one buffer."""

    def __init__(self, x, kernel, size, stride, padding, dilation, groups):
        self.x, self.cg = x, x.shape[3] // groups
        self.geometry = (size, kernel, stride, padding, dilation)
        self.total = x.shape[0] * size[0] * size[1]
        # a 1x1 kernel that visits every position reads x itself
        self.plain = kernel == stride == (1, 1) and padding == (0, 0)
        values = kernel[0] * kernel[1] * self.cg
        self.width = values if self.plain else kernels_conv.row_width(values, x.dtype)
        self.buffer = None

    def chunks(self):
        return _chunks(self.total, self.width * self.x.itemsize)

    def __call__(self, first, count, group):
        c0 = group * self.cg
        if self.plain:
            return self.x.reshape(-1, self.x.shape[3])[first : first + count, c0 : c0 + self.cg]
        if self.buffer is None:
            self.buffer = xp.empty((count, self.width), self.x.dtype)  # the first chunk is the largest
        columns = self.buffer[:count]
        kernels_conv.im2col(columns, self.x, first, c0, self.cg, *self.geometry)
        return columns


def _takes_wmma(x, w, groups):
    """Whether conv2d's forward on x (N, H, W, C) is one kernel on tensor cores: asked for, and in shapes it is written for.

    float16, or bfloat16 from compute capability 8.0 on; one group; C and O multiples of 16, its fragments' side.
    """
    return (
        WMMA
        and is_half(x.dtype)
        and groups == 1
        and w.shape[0] % 16 == w.shape[1] % 16 == 0
        and x.data.ptr % 16 == 0
        and (x.dtype != bfloat16 or int(xp.cuda.Device().compute_capability) >= 80)
    )


def conv2d(x, w, bias, stride, padding, dilation, groups):
    """x (N, C, H, W), w (O, C / groups, KH, KW), bias (O,) or None -> (N, O, OH, OW) in the dtype of x and w.

    The bias lies in the result before the product is added to it in float32, so half is rounded once.
    """
    x, w = alike(x, w)
    if bias is not None and bias.dtype != x.dtype:
        x, w, bias = widen(x), widen(w), widen(bias)
    n, (o, _, kh, kw) = x.shape[0], w.shape
    size, x = conv_size(x.shape[2:], (kh, kw), stride, padding, dilation), _channels_last(x)
    y = xp.empty((n, *size, o), x.dtype)
    if _takes_wmma(x, w, groups):
        weights = _matrix(w, 1, kh * kw * w.shape[1])
        kernels_wmma.conv2d_wmma(y, x, weights, bias, (kh, kw), stride, padding, dilation)
        return y.transpose(0, 3, 1, 2)
    columns = _Columns(x, (kh, kw), size, stride, padding, dilation, groups)
    weights, og = _matrix(w, groups, columns.width), o // groups
    if bias is not None:
        y[...] = bias
    flat = y.reshape(-1, o)
    for first, count in columns.chunks():
        for k in range(groups):
            out = flat[first : first + count, k * og : (k + 1) * og]
            gemm(columns(first, count, k), weights[k], out, beta=0.0 if bias is None else 1.0)
    return y.transpose(0, 3, 1, 2)


def conv2d_weight_grad(g, x, w_shape, stride, padding, dilation, groups):
    """The gradient that reaches w, given g (N, O, OH, OW): float32 (float64), added up over the chunks by the product itself."""
    g, x = alike(g, x)
    o, cg, kh, kw = w_shape
    og = o // groups
    columns = _Columns(_channels_last(x), (kh, kw), g.shape[2:], stride, padding, dilation, groups)
    flat = _channels_last(g).reshape(-1, o)
    out = xp.zeros((groups, columns.width, og), float32 if is_half(x.dtype) else x.dtype)
    for first, count in columns.chunks():
        for k in range(groups):
            part = flat[first : first + count, k * og : (k + 1) * og]
            gemm(columns(first, count, k).T, part, out[k], beta=1.0)
    out = out[:, : kh * kw * cg]
    return out.reshape(groups, kh, kw, cg, og).transpose(0, 4, 3, 1, 2).reshape(w_shape)


def conv2d_input_grad(g, w, x_shape, stride, padding, dilation, groups):
    """The gradient that reaches x: float32 columns of it by one product, gathered into each element, rounded once."""
    return conv2d_transposed(g, w, None, x_shape, stride, padding, dilation, groups)


def conv2d_transposed(g, w, bias, x_shape, stride, padding, dilation, groups):
    """conv2d_input_grad as a forward, plus bias (O,) or None: added where the columns are gathered, before rounding."""
    g, w = alike(g, w)
    if bias is not None and bias.dtype != g.dtype:
        g, w, bias = widen(g), widen(w), widen(bias)
    (n, c, h, wide), (o, cg, kh, kw) = x_shape, w.shape
    size, og = g.shape[2:], o // groups
    width = kernels_conv.row_width(kh * kw * cg, g.dtype)
    flat, weights = _channels_last(g).reshape(-1, o), _matrix(w, groups, width)
    out = xp.empty((n, h, wide, c), g.dtype)
    kind = float32 if is_half(g.dtype) else g.dtype
    positions, buffer = size[0] * size[1], None
    for first, count in _chunks(n * positions, width * kind.itemsize, whole=positions):
        buffer = xp.empty((count, width), kind) if buffer is None else buffer
        columns, images = buffer[:count], out[first // positions : (first + count) // positions]
        for k in range(groups):
            gemm(flat[first : first + count, k * og : (k + 1) * og], weights[k].T, columns)
            kernels_conv.col2im(images, columns, bias, k * cg, cg, size, (kh, kw), stride, padding, dilation)
    return out.transpose(0, 3, 1, 2)


# --------------------------------------------------------------------------------------------- pooling, each in one launch


def max_pool2d(x, kernel, stride, padding, dilation, ceil_mode):
    """The largest value of every window; nan wins, the padding is -inf."""
    size = pool_size(x.shape[2:], kernel, stride, padding, dilation, ceil_mode)
    y = kernels_pool.max_pool2d(_channels_last(x), size, kernel, stride, padding, dilation)
    return y.transpose(0, 3, 1, 2)


def max_pool2d_position(x, y, *geometry):
    """Which kernel offset (i * KW + j) holds the first maximum y of every window; all bits set where none does."""
    x, y = _channels_last(x), _channels_last(y)
    return kernels_pool.max_pool2d_position(x, y, *geometry).transpose(0, 3, 1, 2)


def max_pool2d_scatter(g, position, x_shape, *geometry):
    """Zeros of x_shape with g added where `position` points, in float32, rounded once: the gradient of max_pool2d."""
    (n, c, h, w), g, position = x_shape, _channels_last(g), _channels_last(position)
    return kernels_pool.max_pool2d_scatter(g, position, (n, h, w, c), *geometry).transpose(0, 3, 1, 2)


def max_pool2d_gather(x, position, *geometry):
    """x where `position` points: what max_pool2d_scatter undoes."""
    x, position = _channels_last(x), _channels_last(position)
    return kernels_pool.max_pool2d_gather(x, position, *geometry).transpose(0, 3, 1, 2)


def window_mean(x, rows, cols, counts):
    """Sums of x over windows, in float32, divided by `counts` (OH, OW) and rounded to x's format."""
    return kernels_pool.window_mean(_channels_last(x), rows, cols, counts).transpose(0, 3, 1, 2)


def window_mean_grad(g, x_shape, rows, cols, counts):
    """The gradient that reaches x in window_mean, gathered: every element sums what its windows hand it."""
    n, c, h, w = x_shape
    return kernels_pool.window_mean_grad(_channels_last(g), (n, h, w, c), rows, cols, counts).transpose(
        0, 3, 1, 2
    )
