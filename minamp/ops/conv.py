"""Convolutions, (N, C, H, W): half in, float32 sums, one rounding. Second-order gradients are convolutions again."""

import numpy as np

from minamp import backends
from minamp.backends.conv import conv_size
from minamp.op import LOWER_PRECISION, NOT_LISTED, op
from minamp.ops.shape import cat
from minamp.tensor import Tensor

# ---- arguments and their errors


def pair(name, what, value, least, dims=2):
    """An int or `dims` ints >= least, as a tuple, of two at least: with dims=1 the first is `least`, which does nothing."""
    pair = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(pair) == 1:
        pair = pair * dims
    if len(pair) != dims or any(not isinstance(v, int) or v < least for v in pair):
        raise RuntimeError(f"{name}: {what} must be an int or {dims} ints of at least {least}, got {value!r}")
    return (least,) * (2 - dims) + pair


def check_images(name, x, dims):
    if x.ndim not in (dims + 1, dims + 2):
        sizes = {1: "L", 2: "H, W", 3: "D, H, W"}[dims]
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
        raise RuntimeError(
            f"{name}: groups={groups} must divide the {weight.shape[0]} channels of weight {weight.shape}"
        )
    expected = weight.shape[0] if transposed else weight.shape[1] * groups
    if channels != expected:
        raise RuntimeError(
            f"{name}: input {x.shape} has {channels} channels, "
            f"weight {weight.shape} with groups={groups} takes {expected}"
        )
    out = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and not isinstance(bias, Tensor):
        raise RuntimeError(f"{name}: bias must be a Tensor or None, got {type(bias).__name__}")
    if bias is not None and bias.shape != (out,):
        raise RuntimeError(f"{name}: bias must have shape {(out,)}, one per output channel, got {bias.shape}")


def check_size(name, x, kernel, padding, size, dims):
    if min(size) < 1:
        padded = tuple(n + 2 * p for n, p in zip(x.shape[-dims:], padding[-dims:], strict=True))
        raise RuntimeError(
            f"{name}: kernel {tuple(kernel[-dims:])} is larger than the padded input {padded} "
            f"(input {x.shape}, padding {padding[-dims:]}): the output would be empty"
        )


def reach(dilation, kernel):
    return tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))


def _convolution(name, dims, input, weight, bias, stride, padding, dilation, groups):
    """What conv1d, conv2d and conv3d check: ((input, weight, bias), attributes in pairs, of conv3d in threes)."""
    check_images(name, input, dims)
    _check_weight(name, input, weight, bias, groups, dims)
    stride, dilation = pair(name, "stride", stride, 1, dims), pair(name, "dilation", dilation, 1, dims)
    kernel = (1,) * (2 - dims) + weight.shape[2:]
    if isinstance(padding, str):
        input, padding = _named_padding(name, padding, input, reach(dilation, kernel), stride, dims)
    else:
        padding = pair(name, "padding", padding, 0, dims)
    image = (1,) * (2 - dims) + input.shape[-dims:]
    size = conv_size(image, kernel, stride, padding, dilation)
    check_size(name, input, reach(dilation, kernel), padding, size, dims)
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return (input, weight, bias), attrs


def _named_padding(name, padding, input, reach, stride, dims):
    """'valid' is none; 'same' keeps the size at stride 1, an odd rest going to the end (one zero is appended there)."""
    if padding not in ("same", "valid"):
        raise RuntimeError(f"{name}: padding must be 'same', 'valid' or ints, got {padding!r}")
    if padding == "valid":
        return input, (0,) * len(stride)
    if max(stride) > 1:
        raise RuntimeError(f"{name}: padding='same' needs stride 1, got {stride[-dims:]}")
    for dim in range(-dims, 0):
        if (reach[dim] - 1) % 2:
            shape = list(input.shape)
            shape[dim] = 1
            input = cat([input, Tensor(backends.of(input._data).full(shape, 0, input.dtype))], dim)
    return input, tuple((r - 1) // 2 for r in reach)


def images(m, x, dims):
    """(N, C, H, W), (C, H, W), (N, C, L) or (C, L) as (N, C, H, W); `dims` counts the last ones. Of three: (N, C, D, H, W)."""
    return m.reshape(x, images_shape(x.shape, dims))


def images_shape(shape, dims):
    return (1,) * (dims + 2 - len(shape)) + shape[:-dims] + (1,) * (2 - dims) + shape[-dims:]


def like_input(m, y, x_shape, dims):
    """A result (N, O, OH, OW) with as many dimensions as the input had."""
    return m.reshape(y, y.shape[dims + 2 - len(x_shape) : 2] + y.shape[-dims:])


def _cropped(m, y, shape):
    """y without the rows and columns that `shape` has not: an output_padding of a stride or more makes room for them."""
    if y.shape[-2:] == shape[-2:]:
        return y
    return m.index(y, (..., slice(shape[-2]), slice(shape[-1])))


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
        y = m.conv2d(images(m, input, 2), weight, bias, stride, padding, dilation, groups)
        return like_input(m, y, input.shape, 2)

    def vjp_input(m, g, weight, input_shape, stride, padding, dilation, groups):
        shape = images_shape(input_shape, 2)
        gx = m.conv2d_input_grad(images(m, g, 2), weight, shape, stride, padding, dilation, groups)
        return m.reshape(gx, input_shape)

    def vjp_weight(m, g, input, weight_shape, stride, padding, dilation, groups):
        g, x = images(m, g, 2), images(m, input, 2)
        return m.conv2d_weight_grad(g, x, weight_shape, stride, padding, dilation, groups)

    def vjp_bias(m, g):
        return m.sum(images(m, g, 2), (0, 2, 3))


@op(policy=NOT_LISTED, stored=True)
class conv2d_input_grad:
    """The gradient of conv2d that reaches its input, given g, the gradient of its output; bilinear in g and w."""

    def forward(m, g, w, *, x_shape, stride, padding, dilation, groups):
        return m.conv2d_input_grad(g, w, x_shape, stride, padding, dilation, groups)

    def vjp_g(m, gx, w, g_shape, stride, padding, dilation, groups):
        return _cropped(m, m.conv2d(gx, w, None, stride, padding, dilation, groups), g_shape)

    def vjp_w(m, gx, g, w_shape, stride, padding, dilation, groups):
        return m.conv2d_weight_grad(g, gx, w_shape, stride, padding, dilation, groups)


@op(policy=NOT_LISTED, stored=True)
class conv2d_weight_grad:
    """The gradient of conv2d that reaches its weight, given g, the gradient of its output; bilinear in g and x."""

    def forward(m, g, x, *, w_shape, stride, padding, dilation, groups):
        return m.conv2d_weight_grad(g, x, w_shape, stride, padding, dilation, groups)

    def vjp_g(m, gw, x, g_shape, stride, padding, dilation, groups):
        return _cropped(m, m.conv2d(x, gw, None, stride, padding, dilation, groups), g_shape)

    def vjp_x(m, gw, g, x_shape, stride, padding, dilation, groups):
        return m.conv2d_input_grad(g, gw, x_shape, stride, padding, dilation, groups)


@op(policy=LOWER_PRECISION, stored=True)
class conv1d:
    """conv2d along one dimension: input (N, C, L) or (C, L), weight (O, C / groups, K), bias (O,)."""

    def call(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        return _convolution("conv1d", 1, input, weight, bias, stride, padding, dilation, groups)

    def forward(m, input, weight, bias, *, stride, padding, dilation, groups):
        y = m.conv2d(images(m, input, 1), images(m, weight, 1), bias, stride, padding, dilation, groups)
        return like_input(m, y, input.shape, 1)

    def vjp_input(m, g, weight, input_shape, stride, padding, dilation, groups):
        shape = images_shape(input_shape, 1)
        gx = m.conv2d_input_grad(
            images(m, g, 1), images(m, weight, 1), shape, stride, padding, dilation, groups
        )
        return m.reshape(gx, input_shape)

    def vjp_weight(m, g, input, weight_shape, stride, padding, dilation, groups):
        g, x, shape = images(m, g, 1), images(m, input, 1), images_shape(weight_shape, 1)
        return m.reshape(m.conv2d_weight_grad(g, x, shape, stride, padding, dilation, groups), weight_shape)

    def vjp_bias(m, g):
        return m.sum(images(m, g, 1), (0, 2, 3))


def _transposed(name, dims, input, weight, bias, stride, padding, output_padding, groups, dilation):
    """What both transposed convolutions check: ((input, weight, bias), attributes in pairs, among them the output's size)."""
    check_images(name, input, dims)
    _check_weight(name, input, weight, bias, groups, dims, transposed=True)
    stride, dilation = pair(name, "stride", stride, 1, dims), pair(name, "dilation", dilation, 1, dims)
    padding = pair(name, "padding", padding, 0, dims)
    extra = pair(name, "output_padding", output_padding, 0, dims)
    if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
        raise RuntimeError(
            f"{name}: output_padding {extra[-dims:]} must be smaller than stride {stride[-dims:]} or dilation {dilation[-dims:]}"
        )
    span = reach(dilation, (1,) * (2 - dims) + weight.shape[2:])
    size = tuple(
        (n - 1) * s - 2 * p + r + e
        for n, s, p, r, e in zip(
            (1,) * (2 - dims) + input.shape[-dims:], stride, padding, span, extra, strict=True
        )
    )
    if min(size) < 1:
        raise RuntimeError(
            f"{name}: the output of input {input.shape} and weight {weight.shape} would have size {size[-dims:]}"
        )
    attrs = {"size": size, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return (input, weight, bias), attrs


@op(policy=LOWER_PRECISION, stored=True)
class conv_transpose2d:
    """The gradient of conv2d as a layer: input (N, C, H, W) or (C, H, W), weight (C, O / groups, KH, KW), bias (O,), as torch's.

    OH = (H - 1) * stride - 2 * padding + dilation * (KH - 1) + output_padding + 1.
    """

    def call(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        rest = stride, padding, output_padding, groups, dilation
        return _transposed("conv_transpose2d", 2, input, weight, bias, *rest)

    def forward(m, input, weight, bias, *, size, stride, padding, dilation, groups):
        x = images(m, input, 2)
        shape = (x.shape[0], weight.shape[1] * groups, *size)
        y = m.conv2d_transposed(x, weight, bias, shape, stride, padding, dilation, groups)
        return like_input(m, y, input.shape, 2)

    def vjp_input(m, g, weight, input_shape, stride, padding, dilation, groups):
        gx = m.conv2d(images(m, g, 2), weight, None, stride, padding, dilation, groups)
        return m.reshape(_cropped(m, gx, input_shape), input_shape)

    def vjp_weight(m, g, input, weight_shape, stride, padding, dilation, groups):
        g, x = images(m, g, 2), images(m, input, 2)
        return m.conv2d_weight_grad(x, g, weight_shape, stride, padding, dilation, groups)

    def vjp_bias(m, g):
        return m.sum(images(m, g, 2), (0, 2, 3))


@op(policy=LOWER_PRECISION, stored=True)
class conv_transpose1d:
    """conv_transpose2d along one dimension: input (N, C, L) or (C, L), weight (C, O / groups, K), bias (O,)."""

    def call(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        rest = stride, padding, output_padding, groups, dilation
        return _transposed("conv_transpose1d", 1, input, weight, bias, *rest)

    def forward(m, input, weight, bias, *, size, stride, padding, dilation, groups):
        x, w = images(m, input, 1), images(m, weight, 1)
        shape = (x.shape[0], w.shape[1] * groups, *size)
        y = m.conv2d_transposed(x, w, bias, shape, stride, padding, dilation, groups)
        return like_input(m, y, input.shape, 1)

    def vjp_input(m, g, weight, input_shape, stride, padding, dilation, groups):
        gx = m.conv2d(images(m, g, 1), images(m, weight, 1), None, stride, padding, dilation, groups)
        return m.reshape(_cropped(m, gx, images_shape(input_shape, 1)), input_shape)

    def vjp_weight(m, g, input, weight_shape, stride, padding, dilation, groups):
        g, x, shape = images(m, g, 1), images(m, input, 1), images_shape(weight_shape, 1)
        return m.reshape(m.conv2d_weight_grad(x, g, shape, stride, padding, dilation, groups), weight_shape)

    def vjp_bias(m, g):
        return m.sum(images(m, g, 1), (0, 2, 3))


# ------------------------------------------------------------------------------------------------------------ three dimensions


@op(policy=LOWER_PRECISION, stored=True)
class conv3d:
    """conv2d along three dimensions: input (N, C, D, H, W) or (C, D, H, W), weight (O, C / groups, KD, KH, KW), bias (O,).

    One conv2d of all depths whose channels are the slices that a window's depth covers, so its sums run over those too.
    """

    def call(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        return _convolution("conv3d", 3, input, weight, bias, stride, padding, dilation, groups)

    def forward(m, input, weight, bias, *, stride, padding, dilation, groups):
        x, (o, c, kd, kh, kw) = images(m, input, 3), weight.shape
        reads, _ = _depths(x.shape[2], kd, stride[0], padding[0], dilation[0])
        w = m.reshape(weight, (o, c * kd, kh, kw))
        y = m.conv2d(_slices(m, x, reads), w, bias, stride[1:], padding[1:], dilation[1:], groups)
        return like_input(m, _deep(m, y, len(reads)), input.shape, 3)

    def vjp_input(m, g, weight, input_shape, stride, padding, dilation, groups):
        (n, c, d, h, w), (o, cg, kd, kh, kw) = images_shape(input_shape, 3), weight.shape
        _, read_by = _depths(d, kd, stride[0], padding[0], dilation[0])
        weight = m.reshape(m.permute(weight, (0, 2, 1, 3, 4)), (o * kd, cg, kh, kw))
        g, rest = _slices(m, images(m, g, 3), read_by), (stride[1:], padding[1:], dilation[1:], groups)
        return m.reshape(_deep(m, m.conv2d_input_grad(g, weight, (n * d, c, h, w), *rest), d), input_shape)

    def vjp_weight(m, g, input, weight_shape, stride, padding, dilation, groups):
        x, g, (o, c, kd, kh, kw) = images(m, input, 3), images(m, g, 3), weight_shape
        reads, _ = _depths(x.shape[2], kd, stride[0], padding[0], dilation[0])
        x, g = _slices(m, x, reads), _slices(m, g, np.arange(len(reads))[:, None])
        rest = stride[1:], padding[1:], dilation[1:], groups
        return m.reshape(m.conv2d_weight_grad(g, x, (o, c * kd, kh, kw), *rest), weight_shape)

    def vjp_bias(m, g):
        return m.sum(images(m, g, 3), (0, 2, 3, 4))


def _depths(size, kernel, stride, padding, dilation):
    """(output, offset) -> the input slice that it reads, and (input, offset) -> the output that reads it; -1 for none."""
    (outputs,) = conv_size(*((v,) for v in (size, kernel, stride, padding, dilation)))
    offsets = np.arange(kernel)
    reads = np.arange(outputs)[:, None] * stride - padding + offsets * dilation
    at = np.arange(size)[:, None] + padding - offsets * dilation
    read_by = np.where(at % stride == 0, at // stride, -1)
    return (np.where((a >= 0) & (a < n), a, -1) for a, n in ((reads, size), (read_by, outputs)))


def _slices(m, x, at):
    """x (N, C, D, H, W) as images (N * len(at), C * K, H, W): one for each row of `at`, of the K slices it names; -1 is zeros."""
    n, c, _, h, w = x.shape
    x = m.index(m.constant_pad_nd(x, (0, 0, 0, 0, 0, 1)), (slice(None), slice(None), at))
    return m.reshape(m.permute(x, (0, 2, 1, 3, 4, 5)), (n * len(at), c * at.shape[1], h, w))


def _deep(m, y, depth):
    """Images (N * D, C, H, W) as (N, C, D, H, W)."""
    return m.permute(m.reshape(y, (y.shape[0] // depth, depth, *y.shape[1:])), (0, 2, 1, 3, 4))
