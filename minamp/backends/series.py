"""Running products, recurrences and vector norms. Half is widened: products and sums are float32."""

import numpy as np

from minamp.formats import widen


def _counted(x):
    """x as what its sums and products are: half as float32, all integers (bools too) as int64."""
    return x.astype(np.int64) if x.dtype.kind in "iub" else widen(x)


def cumsum(x, dim):
    x = _counted(x)
    return np.cumsum(x, axis=dim) if x.ndim else x.copy()


def prod(x, dim, keepdim=False):
    return np.prod(_counted(x), axis=dim, keepdims=keepdim)


def cumprod(x, dim):
    x = _counted(x)
    return np.cumprod(x, axis=dim) if x.ndim else x.copy()


def recurrence(a, b, dim):
    """y[k] = a[k] * y[k-1] + b[k] along `dim`, y[-1] = 0: one step after the other, all other dimensions at once."""
    a, b = np.moveaxis(widen(a), dim, 0), np.moveaxis(widen(b), dim, 0)
    y = np.array(b)
    for k in range(1, len(y)):
        y[k, ...] += a[k] * y[k - 1]
    return np.moveaxis(y, 0, dim)


def vector_norm(x, ord, dim, keepdim=False):
    """(sum |x|**ord)**(1/ord) over the dimensions `dim`; ord 0 counts, inf and -inf are the extremes of |x|."""
    a = np.abs(widen(x))
    if ord == 2:
        return np.sqrt(np.sum(a * a, axis=dim, keepdims=keepdim))
    if ord == 1:
        return np.sum(a, axis=dim, keepdims=keepdim)
    if ord == 0:
        return np.sum(a != 0, axis=dim, keepdims=keepdim, dtype=a.dtype)
    if ord == float("inf"):
        return np.max(a, axis=dim, keepdims=keepdim)
    if ord == -float("inf"):
        return np.min(a, axis=dim, keepdims=keepdim)
    # Powers of |x| over its extreme, so that 6e4**10 does not leave float32; an extreme of 0, inf or nan can't be divided by.
    pivot = np.max(a, axis=dim, keepdims=True, initial=0) if ord > 0 else np.min(a, axis=dim, keepdims=True)
    pivot = np.where(np.isfinite(pivot) & (pivot > 0), pivot, a.dtype.type(1))
    total = np.sum((a / pivot) ** ord, axis=dim, keepdims=True) ** (1.0 / ord) * pivot
    return total if keepdim else np.squeeze(total, dim)
