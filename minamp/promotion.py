"""Type promotion: the dtype in which tensors of different dtypes meet."""

import numpy as np

from minamp.formats import float32, float64, is_floating


def is_float(a):
    """Whether `a`, a tensor, an array or a number, is floating: integer tensors count as float32 beside such a number."""
    return isinstance(a, float) or is_floating(getattr(a, "dtype", None))


def result_type(*tensors):
    """torch's type promotion: a 0-dim tensor widens no tensor with dimensions, and a number no tensor, unless of a higher kind.

    Kinds, lowest first: bool, integer, floating. float16 with bfloat16 gives float32.
    """

    def kind(dtype):
        return 2 if is_floating(dtype) else 1 if dtype.kind in "iu" else 0

    def join(dtypes):
        out = None
        for d in dtypes:
            if out is None or out == d:
                out = d
            elif kind(out) != kind(d):
                out = out if kind(out) > kind(d) else d
            elif kind(d) == 2:
                out = float64 if float64 in (out, d) else float32
            else:
                out = np.promote_types(out, d)
        return out

    numbers = [x for x in tensors if isinstance(x, bool | int | float)]
    tensors = [x for x in tensors if not isinstance(x, bool | int | float)]
    out = None
    for dtypes in (
        (t.dtype for t in tensors if t.ndim),
        (t.dtype for t in tensors if not t.ndim),
        (float32 if isinstance(n, float) else np.dtype(type(n)) for n in numbers),
    ):
        found = join(dtypes)
        if out is None or found is not None and kind(found) > kind(out):
            out = found
    return out
