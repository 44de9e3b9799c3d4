"""series.py on the GPU: running products, recurrences and vector norms, in float32 for half."""

import numpy as np

from minamp.backends.cuda_cast import widen
from minamp.backends.device import xp


def _counted(x):
    """x as what its sums and products are: half as float32, all integers (bools too) as int64."""
    return x.astype(np.int64) if x.dtype.kind in "iub" else widen(x)


def cumsum(x, dim):
    x = _counted(x)
    return xp.cumsum(x, axis=dim) if x.ndim else x.copy()


def prod(x, dim, keepdim=False):
    return xp.prod(_counted(x), axis=dim, keepdims=keepdim)


def cumprod(x, dim):
    x = _counted(x)
    return xp.cumprod(x, axis=dim) if x.ndim else x.copy()


def recurrence(a, b, dim):
    """y[k] = a[k] * y[k-1] + b[k] along `dim`, y[-1] = 0: two launches a step."""
    a, b = xp.moveaxis(widen(a), dim, 0), xp.moveaxis(widen(b), dim, 0)
    y = b.copy()
    for k in range(1, len(y)):
        step = y[k, ...]
        step += a[k, ...] * y[k - 1, ...]
    return xp.moveaxis(y, 0, dim)


def vector_norm(x, ord, dim, keepdim=False):
    """(sum |x|**ord)**(1/ord) over the dimensions `dim`; ord 0 counts, inf and -inf are the extremes of |x|."""
    a = xp.abs(widen(x))
    kind = a.dtype
    if ord == 2:
        return xp.sqrt(xp.sum(a * a, axis=dim, keepdims=keepdim, dtype=kind))
    if ord == 1:
        return xp.sum(a, axis=dim, keepdims=keepdim, dtype=kind)
    if ord == 0:
        return xp.sum(a != 0, axis=dim, keepdims=keepdim, dtype=kind)
    if ord == float("inf"):
        return xp.max(a, axis=dim, keepdims=keepdim)
    if ord == -float("inf"):
        return xp.min(a, axis=dim, keepdims=keepdim)
    # Powers of |x| over its extreme, so that 6e4**10 does not leave float32; an extreme of 0, inf or nan can't be divided by.
    one = kind.type(1)
    if any(x.shape[d] == 0 for d in dim):  # nothing has no extreme
        pivot = xp.sum(a, axis=dim, keepdims=True, dtype=kind)
    else:
        pivot = (xp.max if ord > 0 else xp.min)(a, axis=dim, keepdims=True)
    pivot = xp.where(xp.isfinite(pivot) & (pivot > 0), pivot, one)
    total = xp.sum((a / pivot) ** ord, axis=dim, keepdims=True, dtype=kind) ** (1.0 / ord) * pivot
    return (
        total
        if keepdim
        else total.reshape(tuple(n for i, n in enumerate(total.shape) if i not in _set(dim, x.ndim)))
    )


def _set(dim, ndim):
    return {d % ndim for d in (dim if isinstance(dim, tuple) else (dim,))}
