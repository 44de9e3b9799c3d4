"""Casts on the GPU: round to nearest even, once, as formats.py does on the CPU."""

import numpy as np

from minamp.backends.device import xp
from minamp.formats import FORMATS, float32, float64, is_half


def widen(a):
    """float16 and bfloat16 as float32, exactly; other arrays as they are."""
    return a.astype(float32) if is_half(a.dtype) else a


def alike(a, b):
    """Two operands of one dtype: as they are if they have it, else widened."""
    if a.dtype == b.dtype:
        return a, b
    a, b = widen(a), widen(b)
    wide = np.result_type(a.dtype, b.dtype)
    return a.astype(wide, copy=False), b.astype(wide, copy=False)


def narrow(a, dtype):
    """A floating array rounded once to float16 or bfloat16."""
    if a.dtype == dtype:
        return a
    if a.dtype == float64:
        a = _to_odd(a)
    elif a.dtype != float32:
        a = widen(a)
    return a.astype(dtype)


def cast(a, dtype):
    """`a` as `dtype`, rounded once: floating formats, integers and bool, both ways. TypeError for float8."""
    dtype = np.dtype(dtype)
    if a.dtype == dtype:
        return a
    if is_half(dtype):
        if a.dtype.kind in "iu":
            a = _integers_to_odd(a)
        return narrow(a.astype(float32) if a.dtype.kind == "b" else a, dtype)
    if dtype.kind not in "fiub" or dtype in FORMATS and dtype.itemsize == 1:
        raise TypeError(f"{dtype} is not to be had on the GPU: use float16 or bfloat16, or x.cpu() first")
    return widen(a).astype(dtype, copy=False)


def _to_odd(a):
    """float64 to float32, truncated, with the last bit set if anything was lost: the second rounding then falls right."""
    f = a.astype(float32)
    back = f.astype(float64)
    bits = f.view(np.int32)
    bits -= xp.abs(back) > xp.abs(a)
    bits |= (back != a) & ~xp.isnan(a)
    return f


def _integers_to_odd(a):
    """Integers as float64; from 2^53 on, where that would round, the last 12 bits become one sticky bit."""
    if a.dtype.itemsize == 8:
        low = a & 4095
        big = (a >= 2**53) | (a <= -(2**53)) if a.dtype.kind == "i" else a >= 2**53
        a = xp.where(big, a - low + (low != 0) * a.dtype.type(2048), a)
    return a.astype(float64)
