"""Convolution and pooling on the GPU, channels last: column kernel and one matrix product a chunk.

Logical shapes are NCHW everywhere; in memory images lie as (N, H, W, C), and results keep that order (a permuted view), so a
chain of layers never transposes. A convolution is columns (positions, KH * KW * C) times weights (KH * KW * C, O). Columns are
nine times the input for a 3x3 kernel: they are made in chunks that stay in the second-level cache, and again in backward
instead of being kept.
"""

import numpy as np

from minamp.backends import kernels
from minamp.backends.conv import conv_size, pool_size, windows
from minamp.backends.cuda_cast import widen
from minamp.backends.device import xp
from minamp.backends.gemm import gemm
from minamp.formats import float32, is_half

# 8 images of 56 x 56, 64 channels, 3x3 in half make 29 MB of columns: within the cache of an H100 (50 MB) or A100 (40 MB).
COLUMN_BYTES = 29 << 20


def _alike(a, b):
    if a.dtype == b.dtype:
        return a, b
    a, b = widen(a), widen(b)
    wide = np.result_type(a.dtype, b.dtype)
    return a.astype(wide, copy=False), b.astype(wide, copy=False)


def _channels_last(x):
    """x (N, C, H, W) as a contiguous (N, H, W, C): no copy if it lies so already."""
    return xp.ascontiguousarray(x.transpose(0, 2, 3, 1))


def _matrix(w, groups):
    """Weights (O, C / groups, KH, KW) as one (KH * KW * C / groups, O / groups) for each group."""
    o, cg, kh, kw = w.shape
    w = w.reshape(groups, o // groups, cg, kh, kw).transpose(0, 3, 4, 2, 1)
    return xp.ascontiguousarray(w).reshape(groups, kh * kw * cg, o // groups)


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
        self.width = kernel[0] * kernel[1] * self.cg
        self.total = x.shape[0] * size[0] * size[1]
        # a 1x1 kernel that visits every position reads x itself
        self.plain = kernel == stride == (1, 1) and padding == (0, 0)
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
        kernels.im2col(columns, self.x, first, count, c0, self.cg, *self.geometry)
        return columns


def conv2d(x, w, bias, stride, padding, dilation, groups):
    """x (N, C, H, W), w (O, C / groups, KH, KW), bias (O,) or None -> (N, O, OH, OW) in the dtype of x and w.

    The bias lies in the result before the product is added to it in float32, so half is rounded once.
    """
    x, w = _alike(x, w)
    if bias is not None and bias.dtype != x.dtype:
        x, w, bias = widen(x), widen(w), widen(bias)
    n, (o, _, kh, kw) = x.shape[0], w.shape
    size = conv_size(x.shape[2:], (kh, kw), stride, padding, dilation)
    columns = _Columns(_channels_last(x), (kh, kw), size, stride, padding, dilation, groups)
    weights, og = _matrix(w, groups), o // groups
    y = xp.empty((n, *size, o), x.dtype)
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
    g, x = _alike(g, x)
    o, cg, kh, kw = w_shape
    og = o // groups
    columns = _Columns(_channels_last(x), (kh, kw), g.shape[2:], stride, padding, dilation, groups)
    flat = _channels_last(g).reshape(-1, o)
    out = xp.zeros((groups, kh * kw * cg, og), float32 if is_half(x.dtype) else x.dtype)
    for first, count in columns.chunks():
        for k in range(groups):
            part = flat[first : first + count, k * og : (k + 1) * og]
            gemm(columns(first, count, k).T, part, out[k], beta=1.0)
    return out.reshape(groups, kh, kw, cg, og).transpose(0, 4, 3, 1, 2).reshape(w_shape)


def conv2d_input_grad(g, w, x_shape, stride, padding, dilation, groups):
    """The gradient that reaches x: float32 columns of it by one product, gathered into each element, rounded once."""
    return _gathered(g, w, x_shape, stride, padding, dilation, groups, g.dtype)


def conv2d_transposed(x, w, bias, y_shape, stride, padding, dilation, groups):
    """conv2d_input_grad as a forward, plus bias (O,) or None; float32 with a bias, since rounding comes after it."""
    if bias is None:
        return conv2d_input_grad(x, w, y_shape, stride, padding, dilation, groups)
    y = _gathered(x, w, y_shape, stride, padding, dilation, groups, float32 if is_half(x.dtype) else x.dtype)
    y += widen(bias).reshape(-1, 1, 1)
    return y


def _gathered(g, w, x_shape, stride, padding, dilation, groups, dtype):
    g, w = _alike(g, w)
    (n, c, h, wide), (o, cg, kh, kw) = x_shape, w.shape
    size, og = g.shape[2:], o // groups
    flat, weights = _channels_last(g).reshape(-1, o), _matrix(w, groups)
    out = xp.empty((n, h, wide, c), dtype)
    kind = float32 if is_half(g.dtype) else g.dtype
    positions, width, buffer = size[0] * size[1], kh * kw * cg, None
    for first, count in _chunks(n * positions, width * kind.itemsize, whole=positions):
        buffer = xp.empty((count, width), kind) if buffer is None else buffer
        columns, images = buffer[:count], out[first // positions : (first + count) // positions]
        for k in range(groups):
            gemm(flat[first : first + count, k * og : (k + 1) * og], weights[k].T, columns)
            kernels.col2im(images, columns, k * cg, cg, size, (kh, kw), stride, padding, dilation)
    return out.transpose(0, 3, 1, 2)


# ----------------------------------------------------------------------------------------------------------------- max pooling


def max_pool2d(x, kernel, stride, padding, dilation, ceil_mode):
    """The largest value of every window; nan wins, the padding is -inf. One launch a kernel offset."""
    size = pool_size(x.shape[2:], kernel, stride, padding, dilation, ceil_mode)
    x = _channels_last(x)
    y = xp.full((len(x), *size, x.shape[3]), -np.inf, x.dtype)
    for _, window, at in windows(x.shape[1:3], size, kernel, stride, padding, dilation):
        best = y[window]
        xp.maximum(best, x[at], out=best)
    return y.transpose(0, 3, 1, 2)


def max_pool2d_position(x, y, kernel, stride, padding, dilation):
    """Which kernel offset (i * KW + j) holds the first maximum y of every window; all bits set where none does."""
    x, y = _channels_last(x), _channels_last(y)
    kind = np.uint8 if kernel[0] * kernel[1] < 256 else np.uint32
    position = xp.full(y.shape, np.iinfo(kind).max, kind)
    for k, window, at in windows(x.shape[1:3], y.shape[1:3], kernel, stride, padding, dilation):
        value, best = x[at], position[window]
        hit = (value == y[window]) | xp.isnan(value)
        xp.minimum(best, xp.where(hit, kind(k), kind(np.iinfo(kind).max)), out=best)
    return position.transpose(0, 3, 1, 2)


def max_pool2d_scatter(g, position, x_shape, kernel, stride, padding, dilation):
    """Zeros of x_shape with g added where `position` points, in float32: the gradient of max_pool2d."""
    g, position = widen(_channels_last(g)), _channels_last(position)
    n, c, h, w = x_shape
    out = xp.zeros((n, h, w, c), g.dtype)
    for k, window, at in windows((h, w), g.shape[1:3], kernel, stride, padding, dilation):
        part = out[at]
        part += xp.where(position[window] == k, g[window], 0)
    return out.transpose(0, 3, 1, 2)


def max_pool2d_gather(x, position, kernel, stride, padding, dilation):
    """x where `position` points: what max_pool2d_scatter undoes."""
    x, position = widen(_channels_last(x)), _channels_last(position)
    y = xp.zeros(position.shape, x.dtype)
    for k, window, at in windows(x.shape[1:3], position.shape[1:3], kernel, stride, padding, dilation):
        part = y[window]
        part += xp.where(position[window] == k, x[at], 0)
    return y.transpose(0, 3, 1, 2)


# ------------------------------------------------------------------------------------------------------------- average pooling


def window_mean(x, rows, cols, counts):
    """Sums of x over windows, in float32, divided by `counts` (OH, OW) and rounded to x's format."""
    return kernels.window_mean(_channels_last(x), rows, cols, counts).transpose(0, 3, 1, 2)


def window_mean_grad(g, x_shape, rows, cols, counts):
    """The gradient that reaches x in window_mean, gathered: every element sums what its windows hand it."""
    n, c, h, w = x_shape
    return kernels.window_mean_grad(_channels_last(g), (n, h, w, c), rows, cols, counts).transpose(0, 3, 1, 2)
