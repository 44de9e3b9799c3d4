"""Normalisation: softmax, and the norms of layers. Statistics are float32 whatever the input is stored in.

Nothing is kept for backward but the input (or, for softmax, the output): mean and variance are computed again there, once.
"""

import math

from minamp.arguments import check_floating
from minamp.devices import same_device
from minamp.formats import float32, float64, format_of, is_half
from minamp.op import FP32, FP32_SET_OPT_DTYPE, NOT_LISTED, composite, op
from minamp.ops.reduce import mean
from minamp.ops.shape import dim_of, repeat, reshape
from minamp.record import no_grad
from minamp.warn import warn

# ------------------------------------------------------------------------------------------------------------------- softmax


def _softmax_arguments(name, x, dim, dtype):
    check_floating(name, x, dtype=dtype)
    if dim is None:
        dim = 0 if x.ndim in (0, 1, 3) else 1
        warn(f"{name}: dim is not given, {dim} is taken: pass dim=")
    return (x,), {"dim": dim_of(name, x, dim), "dtype": dtype}


@op(policy=FP32_SET_OPT_DTYPE)
class softmax:
    """e**x / sum(e**x) over dim, shifted by the largest x so that nothing overflows. dtype: cast to it first.

    Any shape; RuntimeError for integers without a floating dtype. A row of only -inf gives nan. Half is computed in float32.
    dim left out warns and is 0 of 0, 1 or 3 dimensions, else 1.
    """

    def call(input, dim=None, dtype=None):
        return _softmax_arguments("softmax", input, dim, dtype)

    def forward(m, x, *, dim, dtype):
        if not x.size:
            return x
        e = m.exp(_shifted(m, x, dim))
        return e / _total(m, e, dim)

    def vjp_x(m, g, y, dim):
        return y * (g - _total(m, g * y, dim))


@op(policy=FP32_SET_OPT_DTYPE)
class log_softmax:
    """log(softmax(x)) over dim without ever forming a probability, so that small ones keep their logarithm.

    Any shape; RuntimeError for integers without a floating dtype. A row of only -inf gives nan. Half is computed in float32.
    dim left out: as softmax.
    """

    def call(input, dim=None, dtype=None):
        return _softmax_arguments("log_softmax", input, dim, dtype)

    def forward(m, x, *, dim, dtype):
        if not x.size:
            return x
        z = _shifted(m, x, dim)
        return z - m.log(_total(m, m.exp(z), dim))

    def vjp_x(m, g, y, dim):
        return g - m.exp(y) * _total(m, g, dim)


def _shifted(m, x, dim):
    return x - m.amax(x, dim, True) if x.ndim else x - x


def _total(m, x, dim):
    return m.sum(x, dim, True) if x.ndim else x


# --------------------------------------------------------------------------------------- the norms: shared by all that follow


def _standardised(m, x, dims, eps):
    """x with mean 0 and variance 1 over `dims`, and the factor 1/std it was multiplied with."""
    centred = x - m.mean(x, dims, True)
    scale = 1.0 / m.sqrt(m.mean(centred * centred, dims, True) + eps)
    return centred * scale, scale


def _standardised_vjp(m, g, standardised, dims):
    """The gradient that reaches x. Mean and scale depend on x too: hence the two terms that are taken away."""
    xhat, scale = standardised
    return (g - m.mean(g, dims, True) - xhat * m.mean(g * xhat, dims, True)) * scale


def _last_dims(name, x, normalized_shape, **affine):
    """The trailing dimensions that `normalized_shape` names, as negative ints; errors name the op and both shapes."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise RuntimeError(
            f"{name}: input {x.shape} does not end in normalized_shape {shape}: give its last dimensions"
        )
    for what, tensor in affine.items():
        if tensor is not None and tensor.shape != shape:
            raise RuntimeError(
                f"{name}: {what} has shape {tensor.shape}, normalized_shape is {shape}: give the same shape"
            )
    return tuple(range(-len(shape), 0))


@op(policy=FP32)
class layer_norm:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimensions (Ba, Kiros and Hinton, 2016, section 3).

    input (..., *normalized_shape), weight and bias of normalized_shape or None. RuntimeError where the shapes differ.
    """

    def call(input, normalized_shape, weight=None, bias=None, eps=1e-5):
        check_floating("layer_norm", input)
        dims = _last_dims("layer_norm", input, normalized_shape, weight=weight, bias=bias)
        return (input, weight, bias), {"dims": dims, "eps": eps}

    def forward(m, x, weight, bias, *, dims, eps):
        y, _ = _standardised(m, x, dims, eps)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    def shared_standardised(m, g, x, dims, eps):
        return _standardised(m, x, dims, eps)

    def vjp_x(m, g, standardised, weight, dims):
        return _standardised_vjp(m, g if weight is None else g * weight, standardised, dims)

    def vjp_weight(m, g, standardised):
        return g * standardised[0]

    def vjp_bias(m, g):
        return g


@op(policy=FP32, mixed="first")
class rms_norm:
    """x / sqrt(mean(x * x) + eps) * weight over the last dimensions (Zhang and Sennrich, 2019, section 3).

    input (..., *normalized_shape), weight of normalized_shape or None. eps=None: the spacing above 1 of the format that is
    computed in (float32's for half). RuntimeError where the shapes differ.
    """

    def call(input, normalized_shape, weight=None, eps=None):
        check_floating("rms_norm", input)
        dims = _last_dims("rms_norm", input, normalized_shape, weight=weight)
        if eps is None:
            eps = format_of(float64 if input.dtype == float64 else float32).eps
        return (input, weight), {"dims": dims, "eps": eps}

    def forward(m, x, weight, *, dims, eps):
        y = x * _rms_scale(m, x, dims, eps)
        return y if weight is None else y * weight

    def shared_scaled(m, g, x, dims, eps):
        scale = _rms_scale(m, x, dims, eps)
        return x * scale, scale

    def vjp_x(m, g, scaled, weight, dims):
        xhat, scale = scaled
        g = g if weight is None else g * weight
        return (g - xhat * m.mean(g * xhat, dims, True)) * scale

    def vjp_weight(m, g, scaled):
        return g * scaled[0]


def _rms_scale(m, x, dims, eps):
    return 1.0 / m.sqrt(m.mean(x * x, dims, True) + eps)


# ----------------------------------------------------------------------------------------------- norms with one weight a channel


def _channels(name, x, **tensors):
    """Check that x is (N, C, ...) and every tensor given is (C,)."""
    check_floating(name, x)
    if x.ndim < 2:
        raise RuntimeError(f"{name}: input must be (N, C, ...), this one has shape {x.shape}")
    same_device(name, input=x, **tensors)
    for what, tensor in tensors.items():
        if tensor is not None and tensor.shape != x.shape[1:2]:
            raise RuntimeError(
                f"{name}: {what} has shape {tensor.shape}, input {x.shape} has {x.shape[1]} channels: give ({x.shape[1]},)"
            )


def _column(m, v, ndim):
    """(C,) as (C, 1, 1, ...), which broadcasts against (N, C, ...)."""
    return m.reshape(v, (v.shape[0],) + (1,) * (ndim - 2))


def _affine(m, y, weight, bias):
    y = y if weight is None else y * _column(m, weight, y.ndim)
    return y if bias is None else y + _column(m, bias, y.ndim)


def _over_channels(ndim):
    return (0, *range(2, ndim))


@op(policy=FP32)
class group_norm:
    """layer_norm over groups of channels of each sample (Wu and He, 2018, section 3.1).

    input (N, C, ...), C divisible by num_groups, weight and bias (C,) or None: RuntimeError otherwise. ValueError for one
    sample with one value a group.
    """

    def call(input, num_groups, weight=None, bias=None, eps=1e-5):
        _channels("group_norm", input, weight=weight, bias=bias)
        if num_groups < 1 or input.shape[1] % num_groups:
            raise RuntimeError(
                f"group_norm: {input.shape[1]} channels can't be split into {num_groups} groups: choose a divisor"
            )
        if input.numel() == num_groups:
            raise ValueError(
                f"group_norm: input {input.shape} has one value per group, whose variance is 0: take fewer groups"
            )
        return (input, weight, bias), {"groups": num_groups, "eps": eps}

    def forward(m, x, weight, bias, *, groups, eps):
        xhat, _ = _standardised(m, _grouped(m, x, groups), (2,), eps)
        return _affine(m, m.reshape(xhat, x.shape), weight, bias)

    def shared_standardised(m, g, x, groups, eps):
        return _standardised(m, _grouped(m, x, groups), (2,), eps)

    def vjp_x(m, g, standardised, weight, x_shape, groups):
        g = _grouped(m, _affine(m, g, weight, None), groups)
        return m.reshape(_standardised_vjp(m, g, standardised, (2,)), x_shape)

    def vjp_weight(m, g, standardised):
        return m.sum(g * m.reshape(standardised[0], g.shape), _over_channels(g.ndim))

    def vjp_bias(m, g):
        return m.sum(g, _over_channels(g.ndim))


def _grouped(m, x, groups):
    return m.reshape(x, (x.shape[0], groups, math.prod(x.shape[1:]) // groups))


@op(policy=NOT_LISTED, mixed="first")
class batch_norm:
    """(x - mean) / sqrt(var + eps) * weight + bias for every channel (Ioffe and Szegedy, 2015, algorithm 1).

    input (N, C, ...); the statistics, weight and bias (C,) or None. training=True takes mean and variance from the batch
    and moves the running ones a step of `momentum` towards them, in place and outside the record (the variance divided by
    n - 1, as PyTorch does; an empty batch moves nothing); training=False uses the running ones. Half input with float32
    parameters gives half output.
    ValueError for a batch with one value a channel, RuntimeError for missing statistics or wrong shapes.
    """

    def call(
        input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):
        _channels(
            "batch_norm", input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias
        )
        if not training and (running_mean is None or running_var is None):
            raise RuntimeError(
                "batch_norm: training=False needs running_mean and running_var: give both, or training=True"
            )
        if training and input.numel() == input.shape[1]:
            raise ValueError(
                f"batch_norm: input {input.shape} has one value per channel, whose variance is 0: train on larger batches"
            )
        given, none = (running_mean, running_var), (None, None)
        used = none if training else given
        moved = given if training and input.numel() else none
        return (input, weight, bias, *used), {"moved": moved, "momentum": momentum, "eps": eps}

    def forward(m, x, weight, bias, mean, var, *, moved, momentum, eps):
        if mean is None:
            dims = _over_channels(x.ndim)
            mean = m.mean(x, dims, True)
            centred = x - mean
            var = m.mean(centred * centred, dims, True)
            count = x.size // x.shape[1]
            y = _affine(m, centred / m.sqrt(var + eps), weight, bias)
            seen = (mean, var * (count / (count - 1)))
            new = [
                (r, _followed(m, r, batch, momentum))
                for r, batch in zip(moved, seen, strict=True)
                if r is not None
            ]
            # The last thing: what fails before changes nothing.
            for r, values in new:
                r._data[...] = values
                r._version[0] += 1
            return y
        scale = 1.0 / m.sqrt(var + eps)
        return _affine(m, (x - _column(m, mean, x.ndim)) * _column(m, scale, x.ndim), weight, bias)

    def shared_standardised(m, g, x, mean, var, eps):
        if mean is None:
            return _standardised(m, x, _over_channels(x.ndim), eps)
        scale = _column(m, 1.0 / m.sqrt(var + eps), x.ndim)
        return (x - _column(m, mean, x.ndim)) * scale, scale

    def vjp_x(m, g, standardised, weight, mean):
        g = _affine(m, g, weight, None)
        if mean is not None:
            return g * standardised[1]
        return _standardised_vjp(m, g, standardised, _over_channels(g.ndim))

    def vjp_weight(m, g, standardised):
        return m.sum(g * standardised[0], _over_channels(g.ndim))

    def vjp_bias(m, g):
        return m.sum(g, _over_channels(g.ndim))


def _followed(m, running, batch, momentum):
    """(1 - momentum) * running + momentum * batch, in the dtype of `running`."""
    old = m.widen(running._data)
    return m.cast((1.0 - momentum) * old + momentum * m.reshape(batch, old.shape), running.dtype)


@composite
def instance_norm(
    input,
    running_mean=None,
    running_var=None,
    weight=None,
    bias=None,
    use_input_stats=True,
    momentum=0.1,
    eps=1e-5,
):
    """batch_norm of every sample by itself (Ulyanov, Vedaldi and Lempitsky, 2016): input (N, C, ...), the others (C,) or None.

    use_input_stats=True moves the running statistics, where given, towards the mean of the samples' own; False uses them.
    ValueError for samples with one value a channel, RuntimeError for missing statistics or wrong shapes.
    """
    tensors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    _channels("instance_norm", input, **tensors)
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise RuntimeError(
                "instance_norm: use_input_stats=False needs running_mean and running_var: give both, or True"
            )
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    (n, c), rest = input.shape[:2], input.shape[2:]
    if math.prod(rest) == 1:
        raise ValueError(
            f"instance_norm: input {input.shape} has one value per channel and sample, whose variance is 0"
        )
    if not input.numel():
        return input.clone()
    # as float32, so that what comes back of all samples is summed before it is rounded
    wide = {name: t.float() if t is not None and is_half(t.dtype) else t for name, t in tensors.items()}
    each = {name: t if t is None else repeat(t, n) for name, t in wide.items()}
    y = batch_norm(reshape(input, (1, n * c, *rest)), **each, training=True, momentum=momentum, eps=eps)
    with no_grad():
        for name in ("running_mean", "running_var"):
            if tensors[name] is not None:
                tensors[name].copy_(mean(reshape(each[name], (n, c)), 0))
    return reshape(y, input.shape)
