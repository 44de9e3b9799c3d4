"""Distances: of two tensors, of their vectors one by one, of every vector to every other. Sums are float32."""

import math

import numpy as np

from minamp.arguments import check_floating, check_number
from minamp.op import FP32, composite, op
from minamp.ops.indexing import index
from minamp.ops.norm import norm_vjp, vector_norm


@composite(policy=FP32)
def dist(input, other, p=2):
    """The norm of order p of input - other, one number; shapes broadcast."""
    return vector_norm(input - other, p)


@composite
def pairwise_distance(x1, x2, p=2.0, eps=1e-6, keepdim=False):
    """The norm of order p of x1 - x2 + eps over the last dimension; shapes broadcast. eps keeps it off 0."""
    return vector_norm(x1 - x2 + eps, p, -1, keepdim)


# --------------------------------------------------------------------------------------------------- of all to all

# How many differences are held at a time: 1000 x 1000 vectors of 64 numbers take 0.05 s and 12 MB, in one piece 0.09 s and
# 0.8 GB.
BLOCK = 1 << 20
MODES = (
    "use_mm_for_euclid_dist_if_necessary",
    "use_mm_for_euclid_dist",
    "donot_use_mm_for_euclid_dist",
)


def _check(name, p, **points):
    check_number(name, "p", p)
    if not p >= 0:
        raise RuntimeError(f"{name}: p must not be negative, got {p}")
    for x in points.values():
        check_floating(name, x)


@op(policy=FP32)
class cdist:
    """(..., P, M) and (..., R, M) -> (..., P, R): the distance of order p of every row of x1 to every row of x2.

    Batches broadcast. p from 0 (how many numbers differ) to inf. compute_mode is taken and without effect: the distances are
    those of differences, never of |a|**2 + |b|**2 - 2 a b, which loses near points. RuntimeError for vectors, integers, p < 0.
    """

    def call(x1, x2, p=2.0, compute_mode=MODES[0]):
        _check("cdist", p, x1=x1, x2=x2)
        for name, x in (("x1", x1), ("x2", x2)):
            if x.ndim < 2:
                raise RuntimeError(f"cdist: {name} must be (..., points, features), got shape {x.shape}")
        if x1.shape[-1] != x2.shape[-1]:
            raise RuntimeError(
                f"cdist: x1 {x1.shape} and x2 {x2.shape} must have the same number of features (columns)"
            )
        if compute_mode not in MODES:
            raise ValueError(f"cdist: compute_mode must be one of {MODES}, got {compute_mode!r}")
        return (x1, x2), {"p": p if x1.shape[-1] else 1}  # of no features, every norm is 0

    def forward(m, x1, x2, *, p):
        return m.cat([m.vector_norm(d, p, (d.ndim - 1,)) for _, d in _differences(m, x1, x2)], -2)

    def shared_slopes(m, g, x1, x2, p):
        of_x1, of_x2 = [], 0.0
        for rows, d in _differences(m, x1, x2):
            slope = _slope(m, m.index(g, rows), d, p)
            of_x1.append(m.sum(slope, -2))
            of_x2 = of_x2 - m.sum(slope, -3)
        return m.cat(of_x1, -2), of_x2

    def vjp_x1(m, g, slopes):
        return slopes[0]

    def vjp_x2(m, g, slopes):
        return slopes[1]


def _differences(m, x1, x2):
    """(key, x1[key] - x2) for some rows of x1 after the other: key picks those rows of x1, and of the distances."""
    each = math.prod(np.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])) * math.prod(x2.shape[-2:])
    step, every = max(1, BLOCK // max(1, each)), slice(None)
    for start in range(0, max(1, x1.shape[-2]), step):
        some = slice(start, start + step)
        yield (
            (..., some, every),
            m.index(x1, (..., some, None, every)) - m.index(x2, (..., None, every, every)),
        )


def _slope(m, g, d, p):
    """g * d(norm of d)/dd; of order inf, every difference that is the largest gets g whole, as in PyTorch."""
    if p != math.inf:
        return norm_vjp(m, g, d, p, (d.ndim - 1,), False)
    largest = m.vector_norm(d, p, (d.ndim - 1,), True)
    return m.reshape(g, largest.shape) * m.sign(d) * (m.abs(d) == largest)


@composite(policy=FP32)
def pdist(input, p=2.0):
    """The distances of order p of every two rows of input (N, M): those of rows 0 and 1, 0 and 2, ..., N(N-1)/2 in all."""
    _check("pdist", p, input=input)
    if input.ndim != 2:
        raise RuntimeError(f"pdist: input must be (points, features), got shape {input.shape}")
    return index(cdist(input, input, p), np.triu_indices(len(input), 1))
