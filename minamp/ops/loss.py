"""Losses. Each is computed in float32 and averaged before it is rounded, so a half loss overflows only if its mean does."""

import math

import numpy as np

from minamp.op import FP32, op
from minamp.ops.reduce import mean, sum
from minamp.ops.shape import expand
from minamp.warn import warn

# --------------------------------------------------------------------------------------------------------------- reductions


REDUCTIONS = ("mean", "sum", "none")


def check_reduction(name, reduction, allowed=REDUCTIONS):
    """ValueError for a reduction that is not allowed."""
    if reduction not in allowed:
        raise ValueError(
            f"{name}: reduction must be one of {', '.join(map(repr, allowed))}, got {reduction!r}"
        )


def _check_shapes(name, input, target):
    """Different shapes broadcast, but hardly ever as meant: (N,) against (N, 1) is N x N losses. PyTorch warns as well."""
    if input.shape != target.shape:
        warn(
            f"{name}: target {target.shape} and input {input.shape} differ in shape and will be broadcast: "
            "reshape one to the shape of the other"
        )


def reduced(m, losses, reduction, weight=None):
    """The losses, each times its `weight` if there is one, as they are, their sum or their mean."""
    losses = losses if weight is None else losses * weight
    if reduction == "none":
        return losses
    total = m.sum(losses)
    return total / losses.size if reduction == "mean" else total


def reduce_losses(losses, reduction):
    """`reduced` of a Tensor, for losses made of ops."""
    return losses if reduction == "none" else mean(losses) if reduction == "mean" else sum(losses)


def each(g, like, reduction, weight=None):
    """The gradient of every single loss, given that of the reduced one; `like` has the losses' shape."""
    g = g * (1.0 / max(math.prod(like.shape), 1)) if reduction == "mean" else g
    return g if weight is None else g * weight


# -------------------------------------------------------------------------------------------------------- of two like tensors


def _pair(name, input, target, reduction, **attrs):
    check_reduction(name, reduction)
    _check_shapes(name, input, target)
    if input.shape != target.shape:  # before dtypes meet, as in PyTorch: a 0-dim target counts like any other
        try:
            shape = np.broadcast_shapes(input.shape, target.shape)
        except ValueError:
            pass  # the op itself says so
        else:
            input, target = expand(input, shape), expand(target, shape)
    return (input, target), {"reduction": reduction, **attrs}


@op(policy=FP32, mixed="promote", ints="float")
class mse_loss:
    """(input - target)**2, averaged. Both of one shape; others broadcast with a UserWarning. reduction: 'mean', 'sum', 'none'."""

    def call(input, target, *, reduction="mean"):
        return _pair("mse_loss", input, target, reduction)

    def forward(m, x, target, *, reduction):
        d = x - target
        return reduced(m, d * d, reduction)

    def vjp_x(m, g, x, target, reduction):
        d = x - target
        return each(g, d, reduction) * (2.0 * d)

    def vjp_target(m, g, x, target, reduction):
        d = target - x
        return each(g, d, reduction) * (2.0 * d)


@op(policy=FP32, mixed="promote", ints="float")
class l1_loss:
    """abs(input - target), averaged. Shapes and reduction as mse_loss."""

    def call(input, target, *, reduction="mean"):
        return _pair("l1_loss", input, target, reduction)

    def forward(m, x, target, *, reduction):
        return reduced(m, m.abs(x - target), reduction)

    def vjp_x(m, g, x, target, reduction):
        d = x - target
        return each(g, d, reduction) * m.sign(d)

    def vjp_target(m, g, x, target, reduction):
        d = target - x
        return each(g, d, reduction) * m.sign(d)


def _smooth_slope(m, d, beta):
    return m.where(m.abs(d) >= beta, m.sign(d), d / beta) if beta else m.sign(d)  # nan stays nan


@op(policy=FP32, mixed="promote", ints="float")
class smooth_l1_loss:
    """d*d / (2 beta) where abs(d) < beta, abs(d) - beta/2 elsewhere (Girshick, Fast R-CNN, 2015, equation 3), averaged.

    Shapes and reduction as mse_loss; beta=0 is l1_loss. ValueError for a negative beta.
    """

    def call(input, target, *, reduction="mean", beta=1.0):
        if beta < 0:
            raise ValueError(f"smooth_l1_loss: beta must not be negative, got {beta}")
        return _pair("smooth_l1_loss", input, target, reduction, beta=float(beta))

    def forward(m, x, target, *, reduction, beta):
        d = m.abs(x - target)
        return reduced(m, m.where(d < beta, d * d * (0.5 / beta), d - 0.5 * beta) if beta else d, reduction)

    def vjp_x(m, g, x, target, reduction, beta):
        d = x - target
        return each(g, d, reduction) * _smooth_slope(m, d, beta)

    def vjp_target(m, g, x, target, reduction, beta):
        d = target - x
        return each(g, d, reduction) * _smooth_slope(m, d, beta)


def _huber_slope(m, d, delta):
    # at delta both are the same, and the second derivative is 0, as PyTorch's; nan stays nan
    return m.where(m.abs(d) >= delta, delta * m.sign(d), d)


@op(policy=FP32, mixed="promote", ints="float")
class huber_loss:
    """d*d / 2 where abs(d) <= delta, delta * (abs(d) - delta/2) elsewhere (Huber, 1964), averaged.

    Shapes and reduction as mse_loss. ValueError unless delta is positive.
    """

    def call(input, target, reduction="mean", delta=1.0):
        if delta <= 0:
            raise ValueError(f"huber_loss: delta must be positive, got {delta}")
        return _pair("huber_loss", input, target, reduction, delta=float(delta))

    def forward(m, x, target, *, reduction, delta):
        d = m.abs(x - target)
        return reduced(m, m.where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta)), reduction)

    def vjp_x(m, g, x, target, reduction, delta):
        d = x - target
        return each(g, d, reduction) * _huber_slope(m, d, delta)

    def vjp_target(m, g, x, target, reduction, delta):
        d = target - x
        return each(g, d, reduction) * _huber_slope(m, d, delta)


@op(policy=FP32, mixed="promote")
class kl_div:
    """target * (log(target) - input): the divergence of the distribution exp(input) from `target`.

    input: log-probabilities. target: probabilities, 0 counting 0; log_target=True: log-probabilities too. Shapes as mse_loss.
    reduction: 'batchmean' (the divergence: the sum over the batch size), 'mean' (warns, for it divides by the number of
    entries), 'sum', 'none'.
    """

    def call(input, target, *, reduction="mean", log_target=False):
        if reduction == "mean":
            warn(
                "kl_div: reduction='mean' divides by the number of entries, not by the batch size: "
                "use 'batchmean' for the divergence"
            )
        check_reduction("kl_div", reduction, ("mean", "batchmean", "sum", "none"))
        _check_shapes("kl_div", input, target)
        return (input, target), {"reduction": reduction, "log_target": log_target}

    def forward(m, x, target, *, reduction, log_target):
        if log_target:
            losses = m.exp(target) * (target - x)
        else:
            losses = m.where(target == 0, m.zeros_like(target), target * m.log(target)) - target * x
        if reduction == "batchmean":
            return m.sum(losses) / _batch(x.shape)
        return reduced(m, losses, reduction)

    def vjp_x(m, g, target, x_shape, target_shape, reduction, log_target):
        g = _kl_each(m, g, x_shape, target_shape, reduction)
        return -(g * (m.exp(target) if log_target else target))

    def vjp_target(m, g, x, target, reduction, log_target):
        g = _kl_each(m, g, x.shape, target.shape, reduction)
        if log_target:
            return g * (m.exp(target) * (target - x + 1.0))
        return g * (m.log(target) + 1.0 - x)


def _batch(shape):
    return shape[0] if shape else 1


def _kl_each(m, g, x_shape, target_shape, reduction):
    """The gradient of every single loss, in their shape: target alone may be smaller."""
    shape = np.broadcast_shapes(x_shape, target_shape)
    count = {"batchmean": _batch(x_shape), "mean": math.prod(shape)}.get(reduction, 1)
    return m.expand(g * (1.0 / count) if count > 1 else g, shape)
