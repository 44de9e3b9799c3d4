"""Where PyTorch and NumPy read an index differently: an int beside index arrays."""

import numpy as np

_BASIC = (int, slice, type(None), type(...))


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
