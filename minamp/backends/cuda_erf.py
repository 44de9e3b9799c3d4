"""The error function on the GPU: erf.py's rational approximations, every branch computed and one chosen."""

import math

from minamp.backends import erf as table
from minamp.backends.device import xp
from minamp.formats import float32


def _ratio(x, top, bottom, leading=1.0):
    p, q = xp.full_like(x, top[0]), xp.full_like(x, leading)
    for a in top[1:]:
        p *= x
        p += a
    for b in bottom:
        q *= x
        q += b
    p /= q
    return p


def erf(x):
    """erf of a float32 or float64 array, in its dtype."""
    if x.dtype == float32:
        v = xp.clip(x, -table.SINGLE_END, table.SINGLE_END)
        y = xp.tanh(v * _ratio(v * v, table.SINGLE_TOP, table.SINGLE_BOTTOM[1:], table.SINGLE_BOTTOM[0]))
        return xp.where(xp.abs(x) < table.SINGLE_END, y, xp.sign(x))
    a = xp.abs(x)
    v = xp.clip(a, 0.25, 6.0)  # keeps the branches not taken finite
    s = 1 / (v * v)
    small = a * _ratio(a * a, table.SMALL_TOP, table.SMALL_BOTTOM)
    middle = 1 - xp.exp(-v * v) * _ratio(v, table.MIDDLE_TOP, table.MIDDLE_BOTTOM)
    large = 1 - xp.exp(-v * v) / v * (
        1 / math.sqrt(math.pi) - s * _ratio(s, table.LARGE_TOP, table.LARGE_BOTTOM)
    )
    y = xp.where(a <= 0.46875, small, xp.where(a <= 4, middle, xp.where(a < 6, large, 1.0)))
    return xp.copysign(xp.where(xp.isnan(a), a, y), x)
