"""Convolutions and pooling, (N, C, H, W): half in, float32 sums, one rounding. Second-order gradients are convolutions again."""

import numpy as np

from minamp.backends.conv import conv_size, pool_size
from minamp.op import LOWER_PRECISION, NOT_LISTED, composite, op
from minamp.ops.shape import cat
from minamp.tensor import Tensor

# ------------------------------------------------------------------------------------------------------- arguments and their errors


def _pair(name, what, value, least, dims=2):
    """An int or a sequence of `dims` ints >= least, as a tuple of two ints (1 or 0 goes first for one dimension)."""
    pair = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(pair) == 1:
        pair = pair * dims
    if len(pair) != dims or any(not isinstance(v, int) or v < least for v in pair):
        raise RuntimeError(f"{name}: {what} must be an int or {dims} ints of at least {least}, got {value!r}")
    return pair if dims == 2 else (least, *pair)


def _check_images(name, x, dims):
    if x.ndim not in (dims + 1, dims + 2):
        sizes = "H, W" if dims == 2 else "L"
        raise RuntimeError(f"{name}: input must be (N, C, {sizes}) or (C, {sizes}), got shape {x.shape}")
    if 0 in x.shape[-dims - 1 :]:
        raise RuntimeError(f"{name}: input of shape {x.shape} is empty; only the batch may have size 0")


def _check_weight(name, x, weight, bias, groups, dims, transposed=False):
    """Channels of input, weight and bias against each other; RuntimeError with both shapes and the count that fits."""
    if weight.ndim != dims + 2:
        raise RuntimeError(f"{name}: weight must have {dims + 2} dimensions, got shape {weight.shape}")
    if 0 in weight.shape:
        raise RuntimeError(f"{name}: weight of shape {weight.shape} is empty")
    channels = x.shape[-dims - 1]
    if not isinstance(groups, int) or groups < 1 or weight.shape[0] % groups:
        raise RuntimeError(f"{name}: groups={groups} must divide the {weight.shape[0]} channels of weight {weight.shape}")
    expected = weight.shape[0] if transposed else weight.shape[1] * groups
    if channels != expected:
        raise RuntimeError(
            f"{name}: input {x.shape} has {channels} channels, "
            f"weight {weight.shape} with groups={groups} takes {expected}"
        )
    out = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and bias.shape != (out,):
        raise RuntimeError(f"{name}: bias must have shape {(out,)}, one per output channel, got {bias.shape}")


def _check_size(name, x, kernel, padding, size, dims):
    if min(size) < 1:
        padded = tuple(n + 2 * p for n, p in zip(x.shape[-dims:], padding[-dims:], strict=True))
        raise RuntimeError(
            f"{name}: kernel {tuple(kernel[-dims:])} is larger than the padded input {padded} "
            f"(input {x.shape}, padding {padding[-dims:]}): the output would be empty"
        )


def _reach(dilation, kernel):
    return tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))


def _convolution(name, dims, input, weight, bias, stride, padding, dilation, groups):
    """What conv1d and conv2d check: ((input, weight, bias), attributes in pairs)."""
    _check_images(name, input, dims)
    _check_weight(name, input, weight, bias, groups, dims)
    stride, dilation = _pair(name, "stride", stride, 1, dims), _pair(name, "dilation", dilation, 1, dims)
    kernel = ((1,) * (2 - dims) + weight.shape[2:])
    if isinstance(padding, str):
        input, padding = _named_padding(name, padding, input, _reach(dilation, kernel), stride, dims)
    else:
        padding = _pair(name, "padding", padding, 0, dims)
    image = (1,) * (2 - dims) + input.shape[-dims:]
    size = conv_size(image, kernel, stride, padding, dilation)
    _check_size(name, input, _reach(dilation, kernel), padding, size, dims)
    return (input, weight, bias), {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def _named_padding(name, padding, input, reach, stride, dims):
    """'valid' is none; 'same' keeps the size at stride 1, an odd rest going to the end (one zero is appended there)."""
    if padding not in ("same", "valid"):
        raise RuntimeError(f"{name}: padding must be 'same', 'valid' or ints, got {padding!r}")
    if padding == "valid":
        return input, (0, 0)
    if stride != (1, 1):
        raise RuntimeError(f"{name}: padding='same' needs stride 1, got {stride[-dims:]}")
    for dim in range(-dims, 0):
        if (reach[dim] - 1) % 2:
            shape = list(input.shape)
            shape[dim] = 1
            input = cat([input, Tensor(np.zeros(shape, input.dtype))], dim)
    return input, tuple((r - 1) // 2 for r in reach)


def _images(m, x, dims):
    """(N, C, H, W), (C, H, W), (N, C, L) or (C, L) as (N, C, H, W); `dims` counts the last ones."""
    return m.reshape(x, _images_shape(x.shape, dims))


def _images_shape(shape, dims):
    return (1,) * (dims + 2 - len(shape)) + shape[:-dims] + (1,) * (2 - dims) + shape[-dims:]


def _like_input(m, y, x_shape, dims):
    """A result (N, O, OH, OW) with as many dimensions as the input had."""
    return m.reshape(y, y.shape[dims + 2 - len(x_shape) : 2] + y.shape[4 - dims :])


# --------------------------------------------------------------------------------------------------------------- convolutions


@op(policy=LOWER_PRECISION, stored=True)
class conv2d:
    """Cross-correlation of input (N, C, H, W) or (C, H, W) with weight (O, C / groups, KH, KW), plus bias (O,), as torch's.

    stride, padding, dilation: ints or pairs; padding also 'same' or 'valid'. The bias is added in float32, before rounding.
    RuntimeError for channels that don't fit and for a kernel larger than the padded input.
    """

    def call(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        return _convolution("conv2d", 2, input, weight, bias, stride, padding, dilation, groups)

    def forward(m, input, weight, bias, *, stride, padding, dilation, groups):
        y = m.conv2d(_images(m, input, 2), weight, bias, stride, padding, dilation, groups)
        return _like_input(m, y, input.shape, 2)

    def vjp_input(m, g, weight, input_shape, stride, padding, dilation, groups):
        shape = _images_shape(input_shape, 2)
        gx = m.conv2d_input_grad(_images(m, g, 2), weight, shape, stride, padding, dilation, groups)
        return m.reshape(gx, input_shape)

    def vjp_weight(m, g, input, weight_shape, stride, padding, dilation, groups):
        g, x = _images(m, g, 2), _images(m, input, 2)
        return m.conv2d_weight_grad(g, x, weight_shape, stride, padding, dilation, groups)

    def vjp_bias(m, g):
        return m.sum(_images(m, g, 2), (0, 2, 3))


@op(policy=NOT_LISTED, stored=True)
class conv2d_input_grad:
    """The gradient of conv2d that reaches its input, given g, the gradient of its output; bilinear in g and w."""

    def call(g, w, x_shape, stride, padding, dilation, groups):
        attrs = {"x_shape": x_shape, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return (g, w), attrs

    def forward(m, g, w, *, x_shape, stride, padding, dilation, groups):
        return m.conv2d_input_grad(g, w, x_shape, stride, padding, dilation, groups)

    def vjp_g(m, gx, w, stride, padding, dilation, groups):
        return m.conv2d(gx, w, None, stride, padding, dilation, groups)

    def vjp_w(m, gx, g, w_shape, stride, padding, dilation, groups):
        return m.conv2d_weight_grad(g, gx, w_shape, stride, padding, dilation, groups)


@op(policy=NOT_LISTED, stored=True)
class conv2d_weight_grad:
    """The gradient of conv2d that reaches its weight, given g, the gradient of its output; bilinear in g and x."""

    def call(g, x, w_shape, stride, padding, dilation, groups):
        attrs = {"w_shape": w_shape, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return (g, x), attrs

    def forward(m, g, x, *, w_shape, stride, padding, dilation, groups):
        return m.conv2d_weight_grad(g, x, w_shape, stride, padding, dilation, groups)

    def vjp_g(m, gw, x, stride, padding, dilation, groups):
        return m.conv2d(x, gw, None, stride, padding, dilation, groups)

    def vjp_x(m, gw, g, x_shape, stride, padding, dilation, groups):
        return m.conv2d_input_grad(g, gw, x_shape, stride, padding, dilation, groups)


@op(policy=LOWER_PRECISION, stored=True)
class conv1d:
    """conv2d along one dimension: input (N, C, L) or (C, L), weight (O, C / groups, K), bias (O,)."""

    def call(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        return _convolution("conv1d", 1, input, weight, bias, stride, padding, dilation, groups)

    def forward(m, input, weight, bias, *, stride, padding, dilation, groups):
        y = m.conv2d(_images(m, input, 1), _images(m, weight, 1), bias, stride, padding, dilation, groups)
        return _like_input(m, y, input.shape, 1)

    def vjp_input(m, g, weight, input_shape, stride, padding, dilation, groups):
        shape = _images_shape(input_shape, 1)
        gx = m.conv2d_input_grad(_images(m, g, 1), _images(m, weight, 1), shape, stride, padding, dilation, groups)
        return m.reshape(gx, input_shape)

    def vjp_weight(m, g, input, weight_shape, stride, padding, dilation, groups):
        g, x, shape = _images(m, g, 1), _images(m, input, 1), _images_shape(weight_shape, 1)
        return m.reshape(m.conv2d_weight_grad(g, x, shape, stride, padding, dilation, groups), weight_shape)

    def vjp_bias(m, g):
        return m.sum(m.reshape(g, _images_shape(g.shape, 1)), (0, 2, 3))


@op(policy=LOWER_PRECISION, stored=True)
class conv_transpose2d:
    """The gradient of conv2d as a layer: input (N, C, H, W) or (C, H, W), weight (C, O / groups, KH, KW), bias (O,), as torch's.

    OH = (H - 1) * stride - 2 * padding + dilation * (KH - 1) + output_padding + 1.
    """

    def call(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        name = "conv_transpose2d"
        _check_images(name, input, 2)
        _check_weight(name, input, weight, bias, groups, 2, transposed=True)
        stride, dilation = _pair(name, "stride", stride, 1), _pair(name, "dilation", dilation, 1)
        padding, extra = _pair(name, "padding", padding, 0), _pair(name, "output_padding", output_padding, 0)
        if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
            raise RuntimeError(f"{name}: output_padding {extra} must be smaller than stride {stride} or dilation {dilation}")
        reach = _reach(dilation, weight.shape[2:])
        size = tuple(
            (n - 1) * s - 2 * p + r + e
            for n, s, p, r, e in zip(input.shape[-2:], stride, padding, reach, extra, strict=True)
        )
        if min(size) < 1:
            raise RuntimeError(f"{name}: the output of input {input.shape} and weight {weight.shape} would have size {size}")
        attrs = {"size": size, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return (input, weight, bias), attrs

    def forward(m, input, weight, bias, *, size, stride, padding, dilation, groups):
        x = _images(m, input, 2)
        shape = (x.shape[0], weight.shape[1] * groups, *size)
        y = m.conv2d_input_grad(x, weight, shape, stride, padding, dilation, groups)
        if bias is not None:
            y = y + m.reshape(m.widen(bias), (-1, 1, 1))
        return _like_input(m, y, input.shape, 2)

    def vjp_input(m, g, weight, input_shape, stride, padding, dilation, groups):
        return m.reshape(m.conv2d(_images(m, g, 2), weight, None, stride, padding, dilation, groups), input_shape)

    def vjp_weight(m, g, input, weight_shape, stride, padding, dilation, groups):
        g, x = _images(m, g, 2), _images(m, input, 2)
        return m.conv2d_weight_grad(x, g, weight_shape, stride, padding, dilation, groups)

    def vjp_bias(m, g):
        return m.sum(_images(m, g, 2), (0, 2, 3))


# -------------------------------------------------------------------------------------------------------------------- pooling


def _pooling(name, x, kernel, stride, padding, dilation, ceil_mode):
    """Checked arguments of a pooling in pairs, and the size of its output."""
    _check_images(name, x, 2)
    kernel = _pair(name, "kernel_size", kernel, 1)
    stride = kernel if stride is None or stride == () else _pair(name, "stride", stride, 1)
    padding, dilation = _pair(name, "padding", padding, 0), _pair(name, "dilation", dilation, 1)
    if any(p > k // 2 for p, k in zip(padding, kernel, strict=True)):
        raise RuntimeError(f"{name}: padding {padding} must be at most half of kernel_size {kernel}")
    size = pool_size(x.shape[-2:], kernel, stride, padding, dilation, ceil_mode)
    _check_size(name, x, _reach(dilation, kernel), padding, size, 2)
    return kernel, stride, padding, dilation, size


@op(policy=NOT_LISTED, stored=True)
class max_pool2d:
    """The largest value of every window of input (N, C, H, W) or (C, H, W); nan wins, the padding is -inf, as torch's.

    The gradient goes to the first maximum of a window. stride: kernel_size by default. RuntimeError for a kernel larger than
    the padded input and for padding above half the kernel.
    """

    def call(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
        kernel, stride, padding, dilation, _ = _pooling("max_pool2d", input, kernel_size, stride, padding, dilation, ceil_mode)
        attrs = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
        return (input,), attrs

    def forward(m, x, *, kernel, stride, padding, dilation, ceil_mode):
        y = m.max_pool2d(_images(m, x, 2), kernel, stride, padding, dilation, ceil_mode)
        return _like_input(m, y, x.shape, 2)

    def vjp_x(m, g, x, y, kernel, stride, padding, dilation):
        x_shape, x, y = x.shape, _images(m, x, 2), _images(m, y, 2)
        position = m.max_pool2d_position(x, y, kernel, stride, padding, dilation)
        gx = m.max_pool2d_scatter(_images(m, g, 2), position, x.shape, kernel, stride, padding, dilation)
        return m.reshape(gx, x_shape)


@op(policy=NOT_LISTED, stored=True)
class max_pool2d_position:
    """Which kernel offset holds the first maximum y of every window of x: integers, without gradient."""

    def call(x, y, kernel, stride, padding, dilation):
        return (x, y), {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}

    def forward(m, x, y, *, kernel, stride, padding, dilation):
        return m.max_pool2d_position(x, y, kernel, stride, padding, dilation)


@op(policy=NOT_LISTED, stored=True)
class max_pool2d_scatter:
    """Zeros of x_shape with g added where `position` points."""

    def call(g, position, x_shape, kernel, stride, padding, dilation):
        attrs = {"x_shape": x_shape, "kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
        return (g, position), attrs

    def forward(m, g, position, *, x_shape, kernel, stride, padding, dilation):
        return m.max_pool2d_scatter(g, position, x_shape, kernel, stride, padding, dilation)

    def vjp_g(m, gx, position, kernel, stride, padding, dilation):
        return m.max_pool2d_gather(gx, position, kernel, stride, padding, dilation)


@op(policy=NOT_LISTED, stored=True)
class max_pool2d_gather:
    """x where `position` points."""

    def call(x, position, kernel, stride, padding, dilation):
        return (x, position), {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}

    def forward(m, x, position, *, kernel, stride, padding, dilation):
        return m.max_pool2d_gather(x, position, kernel, stride, padding, dilation)

    def vjp_x(m, g, position, x_shape, kernel, stride, padding, dilation):
        return m.max_pool2d_scatter(g, position, x_shape, kernel, stride, padding, dilation)


@op(policy=NOT_LISTED, stored=True)
class window_mean:
    """Sums of x over windows divided by counts (OH, OW), in float32. rows, cols: (start, stop) per output position."""

    def forward(m, x, *, rows, cols, counts):
        y = m.window_mean(_images(m, x, 2), rows, cols, counts)
        return _like_input(m, y, x.shape, 2)

    def vjp_x(m, g, x_shape, rows, cols, counts):
        gx = m.window_mean_grad(_images(m, g, 2), _images_shape(x_shape, 2), rows=rows, cols=cols, counts=counts)
        return m.reshape(gx, x_shape)


@op(policy=NOT_LISTED, stored=True)
class window_mean_grad:
    """Every window hands g / count to each of its elements: zeros of x_shape with that added."""

    def call(g, x_shape, rows, cols, counts):
        return (g,), {"x_shape": x_shape, "rows": rows, "cols": cols, "counts": counts}

    def forward(m, g, *, x_shape, rows, cols, counts):
        return m.window_mean_grad(g, x_shape, rows, cols, counts)

    def vjp_g(m, gx, rows, cols, counts):
        return m.window_mean(gx, rows=rows, cols=cols, counts=counts)


@composite
def avg_pool2d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
    """The mean of every window of input (N, C, H, W) or (C, H, W), summed in float32, as torch's.

    count_include_pad=False divides by the number of elements inside the image. Errors as max_pool2d.
    """
    kernel, stride, padding, _, size = _pooling("avg_pool2d", input, kernel_size, stride, padding, 1, ceil_mode)
    windows, counts = [], []
    for n, k, s, p, count in zip(input.shape[-2:], kernel, stride, padding, size, strict=True):
        bounds = [(i * s - p, min(i * s - p + k, n + p)) for i in range(count)]  # ceil_mode may reach past the padding
        inside = [(max(a, 0), min(b, n)) for a, b in bounds]
        windows.append(inside)
        counts.append([b - a for a, b in (bounds if count_include_pad else inside)])
    return window_mean(input, rows=windows[0], cols=windows[1], counts=np.outer(*counts))


@composite
def adaptive_avg_pool2d(input, output_size):
    """The mean over a grid of output_size windows that cover the image, as torch's; None keeps a size."""
    _check_images("adaptive_avg_pool2d", input, 2)
    sizes = (output_size,) * 2 if isinstance(output_size, int) or output_size is None else tuple(output_size)
    sizes = tuple(n if s is None else s for s, n in zip(sizes, input.shape[-2:], strict=True))
    sizes = _pair("adaptive_avg_pool2d", "output_size", sizes, 1)
    windows = [[(i * n // s, -(-(i + 1) * n // s)) for i in range(s)] for n, s in zip(input.shape[-2:], sizes, strict=True)]
    counts = [[b - a for a, b in axis] for axis in windows]
    return window_mean(input, rows=windows[0], cols=windows[1], counts=np.outer(*counts))
