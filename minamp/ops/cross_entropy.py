"""Cross-entropies, of two classes and of C. Those of logits form no probability that could be rounded to 0 or 1."""

import math

from minamp import backends
from minamp.devices import same_device
from minamp.formats import float32, float64, is_floating
from minamp.op import BANNED, FP32, composite, op
from minamp.ops.elementwise import neg, where
from minamp.ops.loss import check_reduction, each, reduce_losses, reduced
from minamp.ops.normalize import log_softmax
from minamp.ops.reduce import mean, sum
from minamp.ops.shape import expands, reshape
from minamp.quiet import quiet
from minamp.tensor import Tensor

# --------------------------------------------------------------------------------------------------------------- of two classes


def _check_like(name, input, target, **weights):
    """target has the shape of input, and weights can be expanded to it."""
    if input.shape != target.shape:
        raise ValueError(
            f"{name}: target {target.shape} must have the shape of input {input.shape}: reshape one of them"
        )
    for what, weight in weights.items():
        if weight is not None and not expands(weight.shape, input.shape):
            raise RuntimeError(
                f"{name}: {what} {weight.shape} can't be expanded to the shape of input {input.shape}: reshape it"
            )


@op(policy=FP32, mixed="promote")
class binary_cross_entropy_with_logits:
    """-(t log s + (1 - t) log(1 - s)) with s = sigmoid(input), averaged, without ever rounding s to 0 or 1.

    target in [0, 1], of input's shape (ValueError otherwise). weight multiplies every loss, pos_weight the term of the positives;
    both expand to input's shape (RuntimeError otherwise). reduction: 'mean', 'sum', 'none'.
    """

    def call(input, target, weight=None, *, reduction="mean", pos_weight=None):
        check_reduction("binary_cross_entropy_with_logits", reduction)
        _check_like("binary_cross_entropy_with_logits", input, target, weight=weight, pos_weight=pos_weight)
        return (input, target, weight, pos_weight), {"reduction": reduction}

    def forward(m, x, target, weight, pos_weight, *, reduction):
        losses = (1.0 - target) * x + _positives(target, pos_weight) * _minus_log_sigmoid(m, x)
        return reduced(m, losses, reduction, weight)

    def vjp_x(m, g, x, target, weight, pos_weight, reduction):
        g = each(g, x, reduction, weight)
        s = m.sigmoid(x)
        return g * (
            s - target if pos_weight is None else (1.0 - target) - _positives(target, pos_weight) * (1.0 - s)
        )

    def vjp_target(m, g, x, weight, pos_weight, reduction):
        g = each(g, x, reduction, weight)
        if pos_weight is None:
            return -(g * x)
        return g * ((pos_weight - 1.0) * _minus_log_sigmoid(m, x) - x)


def _minus_log_sigmoid(m, x):
    """log(1 + e**-x), of which at most e**0 is formed."""
    return m.log1p(m.exp(-m.abs(x))) + m.maximum(-x, 0.0)


def _positives(target, pos_weight):
    return 1.0 if pos_weight is None else 1.0 + (pos_weight - 1.0) * target


@op(
    policy=BANNED,
    banned_text=(
        "binary_cross_entropy: unsafe in an autocast region, for a half sigmoid is exactly 1 from about 8.3 on and 0 from "
        "about -17.3 down, and its logarithm is lost: give the logits to binary_cross_entropy_with_logits, which is float32 here"
    ),
    mixed="promote",
)
class binary_cross_entropy:
    """-(t log p + (1 - t) log(1 - p)) of probabilities p, averaged; logarithms stop at -100. Refused inside autocast.

    input and target in [0, 1] and of one shape; weight expands to it. RuntimeError otherwise, and for nan.
    """

    def call(input, target, weight=None, *, reduction="mean"):
        check_reduction("binary_cross_entropy", reduction)
        _check_like("binary_cross_entropy", input, target, weight=weight)
        return (input, target, weight), {"reduction": reduction}

    def forward(m, x, target, weight, *, reduction):
        for name, array, repair in (
            ("input", x, "apply sigmoid, or use binary_cross_entropy_with_logits"),
            ("target", target, "give the probability of the positive class"),
        ):
            seen = backends.checkable(array)
            if seen is not None and not ((seen >= 0) & (seen <= 1)).all():
                raise RuntimeError(f"binary_cross_entropy: {name} must lie in [0, 1]: {repair}")
        losses = -(target * m.maximum(m.log(x), -100.0) + (1.0 - target) * m.maximum(m.log1p(-x), -100.0))
        return reduced(m, losses, reduction, weight)

    def vjp_x(m, g, x, target, weight, reduction):
        g = each(g, x, reduction, weight)
        return g * ((x - target) / m.maximum(x * (1.0 - x), 1e-12))  # finite at 0 and 1, as PyTorch

    def vjp_target(m, g, x, weight, reduction):
        g = each(g, x, reduction, weight)
        return g * (m.maximum(m.log1p(-x), -100.0) - m.maximum(m.log(x), -100.0))


# ----------------------------------------------------------------------------------------------------------------- of C classes


def _class_dim(name, input, target):
    """Where the classes lie: dimension 1 of (N, C, ...), 0 of (C,). Errors for ids that don't fit."""
    dim = 0 if input.ndim == 1 else 1
    if not input.ndim or target.shape != input.shape[:dim] + input.shape[dim + 1 :]:
        raise ValueError(
            f"{name}: target {target.shape} does not fit input {input.shape}: give one class id per row, (N,) for (N, C)"
        )
    if target.dtype.kind not in "iu":
        raise RuntimeError(
            f"{name}: target holds class ids and must be integer, this one is {target.dtype}: use target.long()"
        )
    return dim


def _check_weight(name, input, weight, dim):
    classes = input.shape[dim]
    if weight is not None and weight.shape != (classes,):
        raise RuntimeError(
            f"{name}: weight has shape {weight.shape}, input {input.shape} has {classes} classes: give ({classes},)"
        )


@op(policy=FP32)
class nll_loss:
    """-input[target]: the negative log-likelihood of the right class, averaged with the classes' weights.

    input (N, C), (N, C, d1, ...) or (C,): log-probabilities. target (N), (N, d1, ...) or (): class ids; those equal to
    ignore_index count nothing. weight (C,) or None. reduction: 'mean' (nan where nothing counts), 'sum', 'none'.
    IndexError for an id outside [0, C), ValueError for shapes, RuntimeError for a target that is not integer.
    """

    def call(input, target, weight=None, *, ignore_index=-100, reduction="mean"):
        check_reduction("nll_loss", reduction)
        same_device("nll_loss", input=input, target=target, weight=weight)
        dim = _class_dim("nll_loss", input, target)
        _check_weight("nll_loss", input, weight, dim)
        classes = input.shape[dim]
        ids = target._data
        kept = ids != ignore_index
        seen = backends.checkable(ids)
        if seen is not None:
            wrong = seen[(seen != ignore_index) & ((seen < 0) | (seen >= classes))]
            if wrong.size:
                raise IndexError(
                    f"nll_loss: class id {wrong[0]} is not in [0, {classes}): the input has {classes} classes"
                )
        # an ignored id reads class 0, and that counts 0
        at = (ids * kept).reshape(ids.shape[:dim] + (1,) + ids.shape[dim:])
        kept = Tensor(kept.reshape(at.shape).astype(input.dtype))
        return (input, kept, weight), {"at": at, "dim": dim, "reduction": reduction}

    def forward(m, x, kept, weight, *, at, dim, reduction):
        shares = _shares(m, kept, weight, at)
        losses = m.where(kept > 0, -m.gather(x, dim, at) * shares, 0.0)
        if reduction == "none":
            return m.reshape(losses, at.shape[:dim] + at.shape[dim + 1 :])
        return m.sum(losses) / m.sum(shares) if reduction == "mean" else m.sum(losses)

    def vjp_x(m, g, kept, weight, x_shape, at, dim, reduction):
        shares = _shares(m, kept, weight, at)
        if reduction == "none":
            g = m.reshape(g, at.shape)
        elif reduction == "mean":
            # the mean and not the sum: as tensors of half a sum beyond 65504 would be inf
            g = g / m.mean(shares) * (1.0 / max(at.size, 1))
        g = g if weight is None else g * shares
        # 0 for what is ignored, also where nothing counts and g is inf
        return m.gather_grad(m.where(kept > 0, -g, 0.0), dim, at, x_shape)


def _shares(m, kept, weight, at):
    """How much each entry counts: its class's weight, 0 where it is ignored."""
    return kept if weight is None else kept * m.index(weight, at)


@composite
def cross_entropy(input, target, weight=None, *, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    """nll_loss of log_softmax(input): the loss of a classifier that gives logits.

    input (N, C), (N, C, d1, ...) or (C,): logits. target: class ids as in nll_loss, or probabilities of input's shape.
    weight (C,). label_smoothing in [0, 1]: that share of every target is spread evenly (Szegedy et al., 2016, section 7).
    ignore_index: for class ids only. reduction: 'mean', 'sum', 'none'. ValueError, RuntimeError and IndexError as in nll_loss.
    """
    check_reduction("cross_entropy", reduction)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing must lie in [0, 1], got {label_smoothing}")
    same_device("cross_entropy", input=input, target=target, weight=weight)
    dim = 0 if input.ndim == 1 else 1
    if input.ndim and input.shape == target.shape and is_floating(target.dtype):
        _check_weight("cross_entropy", input, weight, dim)
        if ignore_index >= 0:
            raise RuntimeError(
                f"cross_entropy: ignore_index={ignore_index} names a class id, this target holds probabilities: leave it out"
            )
        return _soft_cross_entropy(log_softmax(input, dim), target, weight, reduction, label_smoothing, dim)
    _class_dim("cross_entropy", input, target)
    logp = log_softmax(input, dim)
    if not label_smoothing:
        return nll_loss(logp, target, weight, ignore_index=ignore_index, reduction=reduction)
    kept = target._data != ignore_index
    hard = nll_loss(logp, target, weight, ignore_index=ignore_index, reduction="none")
    even = where(Tensor(kept), neg(mean(_weighted(logp, weight, dim), dim)), 0.0)
    losses = hard * (1.0 - label_smoothing) + even * label_smoothing
    if reduction != "mean":
        return losses if reduction == "none" else sum(losses)
    if weight is not None:
        kept = backends.widen(weight._data)[target._data * kept] * kept
    return mean(losses) * _inverse_share(kept, losses.dtype == float64)


@quiet
def _inverse_share(kept, double):
    """How many entries there are for each that counts, 0-dim and on their device so that nobody waits; nan where none does."""
    m = backends.of(kept)
    counted = m.cast(m.asarray(m.sum(kept)), float64)
    share = m.where(counted == 0, math.nan, kept.size / counted)
    return m.asarray(m.cast(share, float64 if double else float32))


def _soft_cross_entropy(logp, target, weight, reduction, label_smoothing, dim):
    """cross_entropy against probabilities; the mean is over the rows, whatever the weights."""
    if label_smoothing:
        target = target * (1.0 - label_smoothing) + label_smoothing / target.shape[dim]
    losses = neg(sum(_weighted(logp * target, weight, dim), dim))
    return reduce_losses(losses, reduction)


def _weighted(x, weight, dim):
    """x times the weight of its class."""
    return x if weight is None else x * reshape(weight, (-1,) + (1,) * (x.ndim - 1 - dim))
