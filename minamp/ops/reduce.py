"""Reductions. The accumulator is float32 for half and float32 input, float64 for float64."""

import math
from collections import namedtuple

import numpy as np

from minamp.arguments import check_floating
from minamp.devices import same_device
from minamp.formats import is_floating
from minamp.op import FP32_SET_OPT_DTYPE, NOT_LISTED, composite, op
from minamp.ops.elementwise import maximum, minimum
from minamp.ops.scatter import gather
from minamp.ops.shape import dim_of, squeeze
from minamp.tensor import Tensor


def dims_of(name, x, dim):
    """`dim` (int, tuple, list or None) as a tuple of non-negative ints; IndexError or RuntimeError names the op."""
    if dim is None:
        return tuple(range(x.ndim))
    dims = tuple(dim_of(name, x, d) for d in ((dim,) if isinstance(dim, int) else dim))
    if not dims:
        return tuple(range(x.ndim))
    if len(set(dims)) < len(dims):
        raise RuntimeError(f"{name}: dim {dim} names a dimension of shape {x.shape} twice")
    return dims if x.ndim else ()


def counted(m, y, dtype):
    """A sum or product of integers, which is int64, in the integer dtype that was asked for."""
    return y if dtype is None or is_floating(np.dtype(dtype)) else m.cast(y, dtype)


def over(m, g, shape, dim, keepdim):
    """`g`, the gradient of a reduction over `dim`, spread back over `shape`."""
    if not keepdim:
        g = m.reshape(g, tuple(1 if i in dim else n for i, n in enumerate(shape)))
    return m.expand(g, shape)


@op(policy=FP32_SET_OPT_DTYPE)
class sum:
    """Sum over dim (all by default), integers as int64. dtype: cast to it first."""

    def call(x, dim=None, keepdim=False, *, dtype=None):
        return (x,), {"dim": dims_of("sum", x, dim), "keepdim": keepdim, "dtype": dtype}

    def forward(m, x, *, dim, keepdim, dtype):
        return counted(m, m.sum(x, dim, keepdim), dtype)

    def vjp_x(m, g, x_shape, dim, keepdim):
        return over(m, g, x_shape, dim, keepdim)


@op(policy=NOT_LISTED)
class mean:
    """Mean over dim (all by default); nan over nothing. The sum is float32, so half does not overflow on the way."""

    def call(x, dim=None, keepdim=False, *, dtype=None):
        x = x if dtype is None else x.to(dtype)
        if x.dtype.kind in "iub":
            raise RuntimeError(f"mean: {x.dtype} has no mean in its own dtype: use x.float().mean()")
        dim = dims_of("mean", x, dim)
        count = math.prod(x.shape[d] for d in dim)
        return (x,), {"dim": dim, "keepdim": keepdim, "count": count}

    def forward(m, x, *, dim, keepdim, count):
        return m.sum(x, dim, keepdim) / x.dtype.type(count)

    def vjp_x(m, g, x_shape, dim, keepdim, count):
        return over(m, g * (1.0 / count) if count else g, x_shape, dim, keepdim)


def spread_arguments(name, x, dim, correction, keepdim, unbiased):
    """Checked arguments of var and std; count: what a sum of squares is divided by, never below 0."""
    if isinstance(dim, bool):  # torch's var(unbiased)
        dim, unbiased = None, dim
    check_floating(name, x)
    dim = dims_of(name, x, dim)
    correction = correction if unbiased is None else int(unbiased)
    values = math.prod(x.shape[d] for d in dim)
    return (x,), {"dim": dim, "keepdim": keepdim, "count": values - correction if values > correction else 0}


@op(policy=NOT_LISTED)
class var:
    """Variance over dim, divided by n - correction (1 by default). Mean and squares in float32. RuntimeError for integers."""

    def call(x, dim=None, correction=1, keepdim=False, unbiased=None):
        return spread_arguments("var", x, dim, correction, keepdim, unbiased)

    def forward(m, x, *, dim, keepdim, count):
        centred = x - m.mean(x, dim, True)
        return m.sum(centred * centred, dim, keepdim) / x.dtype.type(count)

    def vjp_x(m, g, x, dim, keepdim, count):
        return (
            over(m, g, x.shape, dim, keepdim)
            * (x - m.mean(x, dim, True))
            * (2.0 / count if count else math.nan)
        )


def _of_something(name, x, dim):
    """dims_of; RuntimeError if they, over which the extreme is wanted, hold nothing. Other dimensions may."""
    dim = dims_of(name, x, dim)
    if not math.prod(x.shape[d] for d in dim):
        raise RuntimeError(
            f"{name}: the extreme of nothing (a tensor of shape {x.shape} over dim {dim}) does not exist"
        )
    return dim


class _Extreme:
    """What amax and amin have in common: those of x that equal the extreme y, or are nan as it is, share its gradient."""

    def vjp_x(m, g, x, y, dim, keepdim):
        best = (x == over(m, y, x.shape, dim, keepdim)) + (x != x)
        share = m.where(best, m.ones_like(x), m.zeros_like(x))
        return over(m, g, x.shape, dim, keepdim) * share / m.sum(share, dim, True)


@op(policy=NOT_LISTED)
class amax(_Extreme):
    """Largest value over dim; equal maxima share the gradient. nan wins."""

    def call(x, dim=None, keepdim=False):
        return (x,), {"dim": _of_something("amax", x, dim), "keepdim": keepdim}

    def forward(m, x, *, dim, keepdim):
        return m.amax(x, dim, keepdim)


@op(policy=NOT_LISTED)
class amin(_Extreme):
    """Smallest value over dim; equal minima share the gradient. nan wins."""

    def call(x, dim=None, keepdim=False):
        return (x,), {"dim": _of_something("amin", x, dim), "keepdim": keepdim}

    def forward(m, x, *, dim, keepdim):
        return m.amin(x, dim, keepdim)


def _position_arguments(name, x, dim, keepdim):
    _of_something(name, x, dim)
    return (x,), {"dim": None if dim is None else dim_of(name, x, dim), "keepdim": keepdim}


@op(policy=NOT_LISTED)
class argmax:
    """Position of the largest value over dim, int64 (in the flattened tensor without dim)."""

    def call(x, dim=None, keepdim=False):
        return _position_arguments("argmax", x, dim, keepdim)

    def forward(m, x, *, dim, keepdim):
        return m.argmax(x, dim, keepdim)


@op(policy=NOT_LISTED)
class argmin:
    """Position of the smallest value over dim, int64 (in the flattened tensor without dim)."""

    def call(x, dim=None, keepdim=False):
        return _position_arguments("argmin", x, dim, keepdim)

    def forward(m, x, *, dim, keepdim):
        return m.argmin(x, dim, keepdim)


@op(policy=NOT_LISTED)
class all:
    """True where every value over dim is non-zero."""

    def call(x, dim=None, keepdim=False):
        return (x,), {"dim": dims_of("all", x, dim), "keepdim": keepdim}

    def forward(m, x, *, dim, keepdim):
        return (x != 0).all(axis=dim, keepdims=keepdim)


@op(policy=NOT_LISTED)
class any:
    """True where some value over dim is non-zero."""

    def call(x, dim=None, keepdim=False):
        return (x,), {"dim": dims_of("any", x, dim), "keepdim": keepdim}

    def forward(m, x, *, dim, keepdim):
        return (x != 0).any(axis=dim, keepdims=keepdim)


# ---------------------------------------------------------------------- max and min: values and positions, as torch returns them

Extreme = namedtuple("Extreme", ["values", "indices"])


def _extreme(x, dim, keepdim, position):
    at = position(x, dim, True)
    values = gather(x, dim, at)
    return Extreme(values, at) if keepdim else Extreme(squeeze(values, dim), squeeze(at, dim))


@composite
def max(x, dim=None, keepdim=False):
    """Largest value; with dim: (values, indices), the gradient going to the first; with a tensor: the larger of the two."""
    if isinstance(dim, Tensor):
        return maximum(x, dim)
    return amax(x) if dim is None else _extreme(x, dim, keepdim, argmax)


@composite
def min(x, dim=None, keepdim=False):
    """Smallest value; with dim: (values, indices), the gradient going to the first; with a tensor: the smaller of the two."""
    if isinstance(dim, Tensor):
        return minimum(x, dim)
    return amin(x) if dim is None else _extreme(x, dim, keepdim, argmin)


# -------------------------------------------------------------------------------------------------- whether two are the same


@composite
def equal(a, b):
    """True (a Python bool) if a and b have the same shape and values."""
    return a.shape == b.shape and bool(all(a == b))


@composite
def isclose(a, b, rtol=1e-5, atol=1e-8, equal_nan=False):
    """Where |a - b| <= atol + rtol * |b|, or both are the same inf; computed in float64. equal_nan: nan is close to nan.

    RuntimeError for two dtypes.
    """
    same_device("isclose", a=a, b=b)
    if a.dtype != b.dtype:
        raise RuntimeError(f"isclose: a is {a.dtype}, b {b.dtype}: cast one with .to()")
    return _close(a, b, rtol, atol, equal_nan)


@composite
def allclose(a, b, rtol=1e-5, atol=1e-8, equal_nan=False):
    """True (a Python bool) if isclose holds everywhere; dtypes may differ."""
    return bool(all(_close(a, b, rtol, atol, equal_nan)))


def _close(a, b, rtol, atol, equal_nan):
    a, b = a.detach().double(), b.detach().double()
    close = ((a - b).abs() <= atol + rtol * b.abs()) | (a == b)
    return close | (a.isnan() & b.isnan()) if equal_nan else close


@composite
def count_nonzero(x, dim=None):
    """How many values are not 0: of all, or along `dim` (an int or several)."""
    return sum(x != 0, dim)
