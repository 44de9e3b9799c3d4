"""What stands in the brackets of x[key]: as the array functions take it, and where PyTorch and NumPy read it differently."""

import numpy as np

from minamp.devices import same_device
from minamp.methods import Methods

_BASIC = (int, slice, type(None), type(...))


def plain_key(key, x):
    """An index of x with every Tensor in it replaced by a copy of its array, which later writes don't reach.

    uint8 is a mask and a 0-dim integer an int, as in PyTorch. RuntimeError for a Tensor on a GPU that x is not on, ValueError for
    a slice that does not go forward.
    """
    if isinstance(key, tuple):
        return tuple(np.array(k) if isinstance(k, tuple) else plain_key(k, x) for k in key)
    if isinstance(key, slice):
        if key.step is not None and key.step < 1:
            raise ValueError(f"index: slice step {key.step} must be greater than zero: use x.flip(dim)")
        return key
    if not isinstance(key, Methods):
        return key.copy() if isinstance(key, np.ndarray) else key
    if type(key._data) is not np.ndarray:  # one on the CPU is moved, as in PyTorch
        same_device("index", x=x, index=key)
    if not key.ndim and key.dtype.kind in "iu" and key.dtype != np.uint8 and type(key._data) is np.ndarray:
        return int(key._data)
    return key._data.astype(np.bool_) if key.dtype == np.uint8 else key._data.copy()


def picks(key):
    """Whether an index of plain_key's holds index arrays or masks, for which PyTorch wants values of x's dtype."""
    return any(
        isinstance(k, list) or getattr(k, "ndim", 0) for k in (key if isinstance(key, tuple) else (key,))
    )


def masks(key):
    """Whether all arrays that an index holds are masks: PyTorch then takes one value of any dtype."""
    arrays = (
        k for k in (key if isinstance(key, tuple) else (key,)) if isinstance(k, list) or getattr(k, "ndim", 0)
    )
    return all(_arraylike(k).dtype == np.bool_ for k in arrays)


def without_idle_ellipsis(key, ndim):
    """The key without an Ellipsis that stands for no dimension of `ndim`: in PyTorch index arrays on its sides are neighbours."""
    if not isinstance(key, tuple) or not any(k is ... for k in key) or not picks(key):
        return key
    parts = [_arraylike(k) for k in key if k is not None and k is not ... and not isinstance(k, slice)]
    read = sum(a.ndim if a.dtype == np.bool_ else 1 for a in parts) + sum(isinstance(k, slice) for k in key)
    return tuple(k for k in key if k is not ...) if read == ndim else key


def as_taken(key, x, value):
    """`value` for x[key], less the dimensions of size 1 that NumPy minds: where key names one element or masks all of x."""
    ints = key if isinstance(key, tuple) else (key,)
    if value.ndim and value.numel() == 1 and len(ints) == x.ndim and all(type(k) is int for k in ints):
        return value.reshape(())
    mask = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    if value.ndim > 1 and getattr(mask, "dtype", None) == np.bool_ and mask.ndim == x.ndim:
        return value.reshape(-1) if value.numel() == value.shape[-1] else value
    return value


def ints_first(key):
    """(a, b) so that PyTorch's x[key] is NumPy's x[a][b]; None where both read `key` alike.

    An int takes its dimension away before PyTorch looks at index arrays: x[0, :, [1, 2]] is x[0][:, [1, 2]]. For NumPy it
    is one more index array, and the dimension of arrays that stand apart moves to the front.
    """
    # the two differ over an int, an array and what keeps them apart
    if not isinstance(key, tuple) or len(key) < 3 or all(type(k) in _BASIC for k in key):
        return None
    parts = [None if k is None or k is ... or isinstance(k, slice) else _arraylike(k) for k in key]
    kinds = ["." if a is None else "i" if not a.ndim and a.dtype.kind in "iu" else "a" for a in parts]
    read = "".join(kinds)
    arrays_apart = "." in read.replace("i", "").strip(".")
    if not {"i", "a"} <= set(read) or arrays_apart or "." not in read.strip("."):
        return None
    first = []
    for k, a, kind in zip(key, parts, kinds, strict=True):
        if kind == "i" or k is ...:
            first.append(k)
        elif k is not None:  # a slice or an index array reads one dimension, a mask as many as it has
            first += [slice(None)] * (a.ndim if kind == "a" and a.dtype == np.bool_ else 1)
    return tuple(first), tuple(k for k, kind in zip(key, kinds, strict=True) if kind != "i")


def _arraylike(k):
    return k if hasattr(k, "ndim") else np.asarray(k)
