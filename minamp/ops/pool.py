"""Pooling: the largest value, or the float32 mean, of every window of (N, C, H, W) or (N, C, L)."""

import numpy as np

from minamp.arguments import check_floating
from minamp.backends.conv import pool_size
from minamp.op import NOT_LISTED, composite, op
from minamp.ops.conv import check_images, check_size, images, images_shape, like_input, pair, reach
from minamp.ops.indexing import index
from minamp.ops.reduce import max as largest
from minamp.ops.shape import flatten, squeeze, unsqueeze


def _pooling(name, x, kernel, stride, padding, dilation, ceil_mode, dims=2):
    """Checked arguments of a pooling in pairs, and the size of its output."""
    check_images(name, x, dims)
    kernel = pair(name, "kernel_size", kernel, 1, dims)
    stride = kernel if stride is None else pair(name, "stride", stride, 1, dims)
    padding, dilation = pair(name, "padding", padding, 0, dims), pair(name, "dilation", dilation, 1, dims)
    if any(p > k // 2 for p, k in zip(padding, kernel, strict=True)):
        raise RuntimeError(
            f"{name}: padding {padding[-dims:]} must be at most half of kernel_size {kernel[-dims:]}"
        )
    size = pool_size((1,) * (2 - dims) + x.shape[-dims:], kernel, stride, padding, dilation, ceil_mode)
    check_size(name, x, reach(dilation, kernel), padding, size, dims)
    return kernel, stride, padding, dilation, size


def _as_row(pool, x, *settings):
    """A pooling of lines as one of images with one row."""
    return squeeze(pool(unsqueeze(x, -2), *settings), -2)


def _apart(attrs):
    """Whether no element lies in two windows: the gradient then only moves, and rounding it again would be lost time.

    A CNN step (28x28, batch 128) under autocast takes 6 % less.
    """
    spans = reach(attrs["dilation"], attrs["kernel"])
    return all(s >= span for s, span in zip(attrs["stride"], spans, strict=True))


@op(policy=NOT_LISTED, moves=_apart)
class max_pool2d:
    """The largest value of every window of input (N, C, H, W) or (C, H, W); nan wins, the padding is -inf, as torch's.

    The gradient goes to the first maximum of a window. stride: kernel_size by default. RuntimeError for a kernel larger than
    the padded input and for padding above half the kernel.
    """

    def call(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
        kernel, stride, padding, dilation, _ = _pooling(
            "max_pool2d", input, kernel_size, stride, padding, dilation, ceil_mode
        )
        attrs = {
            "kernel": kernel,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "ceil_mode": ceil_mode,
        }
        return (input,), attrs

    def forward(m, x, *, kernel, stride, padding, dilation, ceil_mode):
        y = m.max_pool2d(images(m, x, 2), kernel, stride, padding, dilation, ceil_mode)
        return like_input(m, y, x.shape, 2)

    def vjp_x(m, g, x, y, kernel, stride, padding, dilation):
        x_shape, x, y = x.shape, images(m, x, 2), images(m, y, 2)
        position = m.max_pool2d_position(x, y, kernel, stride, padding, dilation)
        gx = m.max_pool2d_scatter(images(m, g, 2), position, x.shape, kernel, stride, padding, dilation)
        return m.reshape(gx, x_shape)


@op(policy=NOT_LISTED, stored=True)
class max_pool2d_position:
    """Which kernel offset holds the first maximum `best` of every window of x: integers, without gradient."""

    def forward(m, x, best, *, kernel, stride, padding, dilation):
        return m.max_pool2d_position(x, best, kernel, stride, padding, dilation)


@op(policy=NOT_LISTED, stored=True)
class max_pool2d_scatter:
    """Zeros of x_shape with g added where `position` points."""

    def forward(m, g, position, *, x_shape, kernel, stride, padding, dilation):
        return m.max_pool2d_scatter(g, position, x_shape, kernel, stride, padding, dilation)

    def vjp_g(m, gx, position, kernel, stride, padding, dilation):
        return m.max_pool2d_gather(gx, position, kernel, stride, padding, dilation)


@op(policy=NOT_LISTED, stored=True)
class max_pool2d_gather:
    """x where `position` points."""

    def forward(m, x, position, *, kernel, stride, padding, dilation):
        return m.max_pool2d_gather(x, position, kernel, stride, padding, dilation)

    def vjp_x(m, g, position, x_shape, kernel, stride, padding, dilation):
        return m.max_pool2d_scatter(g, position, x_shape, kernel, stride, padding, dilation)


@op(policy=NOT_LISTED, stored=True)
class window_mean:
    """Sums of x over windows divided by counts (OH, OW), in float32. rows, cols: (start, stop) per output position."""

    def forward(m, x, *, rows, cols, counts):
        y = m.window_mean(images(m, x, 2), rows, cols, counts)
        return like_input(m, y, x.shape, 2)

    def vjp_x(m, g, x_shape, rows, cols, counts):
        gx = m.window_mean_grad(
            images(m, g, 2), images_shape(x_shape, 2), rows=rows, cols=cols, counts=counts
        )
        return m.reshape(gx, x_shape)


@op(policy=NOT_LISTED, stored=True)
class window_mean_grad:
    """Every window hands g / count to each of its elements: zeros of x_shape with that added."""

    def forward(m, g, *, x_shape, rows, cols, counts):
        return m.window_mean_grad(g, x_shape, rows, cols, counts)

    def vjp_g(m, gx, rows, cols, counts):
        return m.window_mean(gx, rows=rows, cols=cols, counts=counts)


@composite
def avg_pool2d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
    """The mean of every window of input (N, C, H, W) or (C, H, W), summed in float32, as torch's.

    count_include_pad=False divides by the number of elements inside the image. Errors as max_pool2d.
    """
    check_floating("avg_pool2d", input, NotImplementedError)
    kernel, stride, padding, _, size = _pooling(
        "avg_pool2d", input, kernel_size, stride, padding, 1, ceil_mode
    )
    windows, counts = [], []
    for n, k, s, p, count in zip(input.shape[-2:], kernel, stride, padding, size, strict=True):
        # ceil_mode may reach past the padding
        bounds = [(i * s - p, min(i * s - p + k, n + p)) for i in range(count)]
        inside = [(max(a, 0), min(b, n)) for a, b in bounds]
        windows.append(inside)
        counts.append([b - a for a, b in (bounds if count_include_pad else inside)])
    return window_mean(input, rows=windows[0], cols=windows[1], counts=np.outer(*counts))


@composite
def max_pool1d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
    """max_pool2d along one dimension: the largest value of every window of input (N, C, L) or (C, L)."""
    settings = _pooling("max_pool1d", input, kernel_size, stride, padding, dilation, ceil_mode, 1)[:4]
    return _as_row(max_pool2d, input, *settings, ceil_mode)


@composite
def avg_pool1d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
    """avg_pool2d along one dimension: the mean of every window of input (N, C, L) or (C, L)."""
    check_floating("avg_pool1d", input, NotImplementedError)
    settings = _pooling("avg_pool1d", input, kernel_size, stride, padding, 1, ceil_mode, 1)[:3]
    return _as_row(avg_pool2d, input, *settings, ceil_mode, count_include_pad)


# ----------------------------------------------------------------------------------- pooling to a size, whatever the input's


def _parts(name, x, output_size):
    """Rows and columns as [(start, stop)] of output_size windows that cover the image; they overlap where it doesn't divide."""
    check_floating(name, x, NotImplementedError)
    check_images(name, x, 2)
    sizes = (output_size,) * 2 if isinstance(output_size, int) or output_size is None else tuple(output_size)
    sizes = tuple(n if s is None else s for s, n in zip(sizes, x.shape[-2:], strict=False)) + sizes[2:]
    sizes = pair(name, "output_size", sizes, 1)
    return [
        [(i * n // s, -(-(i + 1) * n // s)) for i in range(s)]
        for n, s in zip(x.shape[-2:], sizes, strict=True)
    ]


@composite
def adaptive_avg_pool2d(input, output_size):
    """The mean over a grid of output_size windows that cover the image, as torch's; None keeps a size."""
    windows = _parts("adaptive_avg_pool2d", input, output_size)
    counts = [[b - a for a, b in axis] for axis in windows]
    return window_mean(input, rows=windows[0], cols=windows[1], counts=np.outer(*counts))


@composite
def adaptive_avg_pool1d(input, output_size):
    """adaptive_avg_pool2d along one dimension: output_size means of parts of input (N, C, L) or (C, L)."""
    check_floating("adaptive_avg_pool1d", input, NotImplementedError)
    check_images("adaptive_avg_pool1d", input, 1)
    _, size = pair("adaptive_avg_pool1d", "output_size", output_size, 1, 1)
    return _as_row(adaptive_avg_pool2d, input, (1, size))


@composite
def adaptive_max_pool2d(input, output_size):
    """The largest value of each window of adaptive_avg_pool2d's; the gradient goes to the first of several."""
    rows, cols = (_padded(w) for w in _parts("adaptive_max_pool2d", input, output_size))
    key = (..., rows[:, None, :, None], cols[None, :, None, :])
    picked = index(input, key)  # (N, C, OH, OW, KH, KW)
    return largest(flatten(picked, -2), -1).values


def _padded(windows):
    """(start, stop) of windows as their places, one row each, the last place repeated in windows shorter than the longest."""
    starts, stops = np.array(windows).T
    return np.minimum(starts[:, None] + np.arange((stops - starts).max()), stops[:, None] - 1)
