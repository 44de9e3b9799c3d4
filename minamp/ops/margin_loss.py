"""Losses with a margin: what is right by more than the margin costs nothing, and soft_margin_loss little.

They are made of ops, as most of PyTorch's are: outside of a region halves are rounded after each. Exactly at the margin the
gradient is PyTorch's: clamp passes it there, relu does not.
"""

import math

from minamp import backends
from minamp.arguments import check_floating
from minamp.devices import same_device
from minamp.op import FP32, composite
from minamp.ops.activations import logsigmoid, relu
from minamp.ops.distance import pairwise_distance
from minamp.ops.elementwise import clamp, minimum, where
from minamp.ops.exponential import sqrt
from minamp.ops.loss import check_reduction, reduce_losses
from minamp.ops.reduce import sum
from minamp.ops.scatter import gather
from minamp.ops.shape import reshape, unsqueeze
from minamp.tensor import Tensor

# ------------------------------------------------------------------------------------------------- targets are 1 and -1


@composite(policy=FP32)
def soft_margin_loss(input, target, *, reduction="mean"):
    """log(1 + exp(-target * input)), averaged: of logits and targets 1 and -1. Shapes broadcast. Nothing overflows."""
    check_reduction("soft_margin_loss", reduction)
    check_floating("soft_margin_loss", input)
    return reduce_losses(-logsigmoid(target.mul(input)), reduction)


@composite(policy=FP32)
def hinge_embedding_loss(input, target, margin=1.0, *, reduction="mean"):
    """input where target is 1, max(0, margin - input) where it is -1, both together elsewhere; averaged. Shapes broadcast."""
    check_reduction("hinge_embedding_loss", reduction)
    apart = where(target.ne(1), clamp(float(margin) - input, min=0.0), 0.0)
    return reduce_losses(apart + where(target.ne(-1), input, 0.0), reduction)


@composite(policy=FP32)
def margin_ranking_loss(input1, input2, target, margin=0.0, *, reduction="mean"):
    """max(0, margin - target * (input1 - input2)), averaged: target 1 wants input1 larger, -1 input2.

    Shapes broadcast, but all have as many dimensions (RuntimeError otherwise).
    """
    check_reduction("margin_ranking_loss", reduction)
    _same_ndim("margin_ranking_loss", input1=input1, input2=input2, target=target)
    return reduce_losses(clamp(float(margin) - target * (input1 - input2), min=0.0), reduction)


@composite(policy=FP32)
def cosine_embedding_loss(input1, input2, target, margin=0.0, *, reduction="mean"):
    """1 - cos where target is 1, max(0, cos - margin) where it is -1, 0 elsewhere; averaged. cos: that of the angle of two rows.

    inputs (N, M) and target (N,), or (M,) and (). RuntimeError otherwise.
    """
    check_reduction("cosine_embedding_loss", reduction)
    dim = target.ndim
    if dim > 1 or not input1.ndim == input2.ndim == dim + 1:
        raise RuntimeError(
            f"cosine_embedding_loss: inputs {input1.shape} and {input2.shape} with target {target.shape}: "
            "give (N, M), (N, M) and (N,), or (M,), (M,) and ()"
        )
    squares = (sum(input1 * input1, dim) + 1e-12) * (sum(input2 * input2, dim) + 1e-12)
    cos = sum(input1 * input2, dim) / sqrt(squares)
    apart = where(target.eq(-1), clamp(cos - margin, min=0.0), 0.0)
    return reduce_losses(where(target.eq(1), 1.0 - cos, 0.0) + apart, reduction)


# ------------------------------------------------------------------------------------------------------------- triplets


@composite(policy=FP32)
def triplet_margin_loss(
    anchor, positive, negative, margin=1.0, p=2.0, eps=1e-6, swap=False, *, reduction="mean"
):
    """max(0, margin + |anchor - positive| - |anchor - negative|), averaged; distances as pairwise_distance of order p.

    swap: |positive - negative| counts instead of |anchor - negative| where it is smaller (Balntas et al., 2016). Shapes
    broadcast, but all have as many dimensions (RuntimeError otherwise). ValueError unless margin is positive.
    """

    def distance(a, b):
        return pairwise_distance(a, b, p, eps)

    return _triplet("triplet_margin_loss", distance, anchor, positive, negative, margin, swap, reduction)


@composite
def triplet_margin_with_distance_loss(
    anchor, positive, negative, *, distance_function=None, margin=1.0, swap=False, reduction="mean"
):
    """triplet_margin_loss with any function of two tensors for a distance, pairwise_distance by default."""
    name, distance = "triplet_margin_with_distance_loss", distance_function or pairwise_distance
    return _triplet(name, distance, anchor, positive, negative, margin, swap, reduction)


def _triplet(name, distance, anchor, positive, negative, margin, swap, reduction):
    check_reduction(name, reduction)
    check_margin(name, margin)
    same_device(name, anchor=anchor, positive=positive, negative=negative)
    _same_ndim(name, anchor=anchor, positive=positive, negative=negative)
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = minimum(far, distance(positive, negative))
    return reduce_losses(clamp(margin + near - far, min=0.0), reduction)


def check_margin(name, margin):
    """ValueError for a margin that is not positive."""
    if margin <= 0:
        raise ValueError(f"{name}: margin must be positive, got {margin}")


def _same_ndim(name, **tensors):
    """Shapes broadcast, but (N,) against (N, 1) is hardly ever meant."""
    if len({t.ndim for t in tensors.values()}) > 1:
        found = ", ".join(f"{what} {t.shape}" for what, t in tensors.items())
        raise RuntimeError(
            f"{name}: all must have the same number of dimensions ({found}): reshape or unsqueeze"
        )


# ------------------------------------------------------------------------------------------------- targets are class ids


@composite(policy=FP32)
def multi_margin_loss(input, target, p=1, margin=1.0, weight=None, *, reduction="mean"):
    """max(0, margin - input[right] + input[i])**p, summed over the wrong classes i and divided by C; averaged over rows.

    input (N, C) or (C,): scores. target (N,) or (): class ids. p: 1 or 2. weight (C,): that of the right class multiplies a
    row's loss. ValueError for another p, RuntimeError for shapes, and for ids that are not integer or not in [0, C).
    """
    check_reduction("multi_margin_loss", reduction)
    check_power("multi_margin_loss", p)
    rows = _scores("multi_margin_loss", input, target, 0)
    if target.ndim > 1 or target.numel() != len(rows):
        raise RuntimeError(
            f"multi_margin_loss: target {target.shape} does not fit input {input.shape}: give one class id per row"
        )
    classes = rows.shape[1]
    at = reshape(target, (len(rows), 1))
    losses = relu(float(margin) - gather(rows, 1, at) + rows)
    losses = losses * losses if p == 2 else losses
    right = Tensor(at._data == backends.of(at._data).arange(classes))
    losses = sum(where(right, 0.0, losses), 1) / classes
    if weight is not None:
        check_class_weight("multi_margin_loss", weight, classes)
        losses = losses * gather(weight, 0, reshape(target, (-1,)))
    return reduce_losses(reshape(losses, target.shape), reduction)


@composite(policy=FP32)
def multilabel_margin_loss(input, target, *, reduction="mean"):
    """max(0, 1 - input[j] + input[i]), summed over a row's labels j and the other classes i, divided by C; averaged over rows.

    input (N, C) or (C,): scores. target, of input's shape: a row's labels, then -1; what stands behind that does not count.
    RuntimeError for other shapes, and for ids that are not integer or not in [-1, C).
    """
    check_reduction("multilabel_margin_loss", reduction)
    if target.shape != input.shape:
        raise RuntimeError(
            f"multilabel_margin_loss: target {target.shape} must have the shape of input {input.shape}: pad with -1"
        )
    rows = _scores("multilabel_margin_loss", input, target, -1)
    (_, classes), ids = rows.shape, target._data.reshape(rows.shape)
    m = backends.of(ids)
    kept = m.cumsum(ids < 0, 1) == 0
    # (N, labels, C) pairs: few where rows have few labels. On a GPU asking for their number would wait.
    if backends.checkable(ids) is not None:
        used = int(kept.any(0).sum())
        ids, kept = ids[:, :used], kept[:, :used]
    at = ids * kept
    labels = ((at[:, :, None] == m.arange(classes)) & kept[:, :, None]).any(1)
    counted = Tensor(kept[:, :, None] & ~labels[:, None, :])
    losses = relu(1.0 - unsqueeze(gather(rows, 1, Tensor(at)), 2) + unsqueeze(rows, 1))
    losses = sum(where(counted, losses, 0.0), (1, 2)) / classes
    return reduce_losses(reshape(losses, input.shape[:-1]), reduction)


def _scores(name, input, target, lowest):
    """input as (N, C); RuntimeError unless target holds ids in [lowest, C)."""
    check_floating(name, input)
    classes = math.prod(input.shape[-1:])
    if input.ndim > 2 or not classes:
        raise RuntimeError(f"{name}: input {input.shape} must be (N, C) or (C,), with one class or more")
    if target.dtype.kind not in "iu":
        raise RuntimeError(
            f"{name}: target holds class ids and must be integer, this one is {target.dtype}: use target.long()"
        )
    seen = backends.checkable(target._data)
    if seen is not None and seen.size and not (lowest <= seen.min() and seen.max() < classes):
        bad = seen.min() if seen.min() < lowest else seen.max()
        raise RuntimeError(
            f"{name}: class id {bad} is not in [{lowest}, {classes}): the input has {classes} classes"
        )
    return reshape(input, (-1, classes))


def check_power(name, p):
    """ValueError for a p that is neither 1 nor 2."""
    if p not in (1, 2):
        raise ValueError(f"{name}: p must be 1 or 2, got {p}")


def check_class_weight(name, weight, classes=None):
    """ValueError for class weights that are no vector, RuntimeError if they are not as many as the classes."""
    if weight.ndim != 1:
        raise ValueError(f"{name}: weight must be one-dimensional, this one has shape {weight.shape}")
    if classes is not None and len(weight) != classes:
        raise RuntimeError(
            f"{name}: weight has shape {weight.shape}, the input has {classes} classes: give ({classes},)"
        )
