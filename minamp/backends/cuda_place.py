"""place.py on the GPU: picking values and placing them. Sums over repeated places are float32, their order is the GPU's."""

import numpy as np

from minamp.backends import device, place
from minamp.backends.cuda_cast import widen
from minamp.backends.device import xp


def _key(key):
    """An index whose lists and NumPy arrays have been moved to the GPU."""
    if isinstance(key, tuple):
        return tuple(_key(k) for k in key)
    return device.constant(key) if isinstance(key, list | np.ndarray) else key


def index(x, key):
    return x[_key(key)]


def assign(x, key, values):
    x[_key(key)] = values


def index_put(x, key, values, accumulate=False):
    out = x.copy()
    if accumulate:
        xp.add.at(out, _key(key), values)
    else:
        out[_key(key)] = values
    return out


def index_clear(x, key):
    out = x.copy()
    out[_key(key)] = 0
    return out


def index_grad(g, key, shape):
    """Zeros of `shape` with `g` added at `key`: repeated positions add up, in g's dtype (float32 for half)."""
    g, key = widen(g), _key(key)
    out = xp.zeros(shape, g.dtype)
    parts = key if isinstance(key, tuple) else (key,)
    if any(device.holds(k) and k.dtype.kind in "iu" for k in parts):
        xp.add.at(out, key, g)
    else:
        out[key] = g  # slices, ints and masks reach no place twice
    return out


def gather(x, dim, index):
    return x[_positions(index, dim)]


def gather_grad(g, dim, index, shape):
    g = widen(g)
    return _added(xp.zeros(shape, g.dtype), dim, index, g)


def scatter_add(x, dim, index, src):
    """A copy of x with src[p] added at place p, but index[p] along `dim`; src may be larger than index."""
    return _added(x.copy(), dim, index, src)


def _added(out, dim, index, src):
    """scatter_add into `out` itself."""
    src = src[tuple(slice(n) for n in index.shape)]
    if not out.ndim:
        return out + src
    xp.add.at(out, _positions(index, dim), src)
    return out


def scatter(x, dim, index, src):
    out = x.copy()
    out[_positions(index, dim)] = src[tuple(slice(n) for n in index.shape)] if src.ndim else src
    return out


def scatter_clear(x, dim, index):
    return index_clear(x, _positions(index, dim))


def _positions(index, dim):
    return place.positions(_key(index), dim, xp.arange)


def argsort(x, dim, descending=False):
    """The stable order along `dim`; nan counts as the largest."""
    if not x.ndim:
        return xp.zeros((), np.int64)
    x = widen(x)
    if not descending:
        return xp.argsort(x, axis=dim, kind="stable")
    # ascending order of the reversed line, reversed: equal values keep their order
    return x.shape[dim] - 1 - xp.flip(xp.argsort(xp.flip(x, dim), axis=dim, kind="stable"), dim)


def masked_fill(x, mask, value):
    return xp.where(mask, value, x)


def constant_pad_nd(x, pad, value=0.0):
    """x with `value` around it: pad names (before, after) from the last dimension on; negative numbers crop."""
    pairs = [(0, 0)] * (x.ndim - len(pad) // 2) + list(zip(pad[-2::-2], pad[-1::-2], strict=True))
    x = x[tuple(slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(x.shape, pairs, strict=True))]
    shape = tuple(n + max(a, 0) + max(b, 0) for n, (a, b) in zip(x.shape, pairs, strict=True))
    out = xp.full(shape, value, x.dtype)
    out[tuple(slice(max(a, 0), max(a, 0) + n) for n, (a, _) in zip(x.shape, pairs, strict=True))] = x
    return out


def tril(x, diagonal=0):
    return xp.tril(x, diagonal)


def triu(x, diagonal=0):
    return xp.triu(x, diagonal)
