"""Number formats: limits, neighbours, exact casts, nearest and stochastic rounding.

Every cast here rounds once, to nearest with ties to even, keeps subnormals, infinities, NaN and the sign of
zero, and never warns. float16 is converted by arithmetic on whole arrays because NumPy's own cast is slow:
half to single takes 2.2 ms per million (here 0.5), single to half 3.3 ms and, for small gradients, about 90 ms,
since every result that underflows raises a flag of its own (here 1.3 ms always).
The tests prove the casts over all 65,536 half patterns and all rounding boundaries.
"""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from minamp import halves
from minamp.quiet import Quietly, quiet

float64 = np.dtype(np.float64)
float32 = np.dtype(np.float32)
float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)


@dataclass(frozen=True)
class Format:
    """A binary floating-point format; every limit follows from its exponent and mantissa bits."""

    name: str
    dtype: np.dtype  # how it is stored (tf32 lives in float32 words)
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float  # spacing just above 1
    flush: float  # largest magnitude that rounds to 0: half the smallest subnormal, a tie that goes to even
    overflow: float  # smallest magnitude that rounds to inf or NaN: abs(x) >= overflow, for every float64 x
    has_inf: bool  # e4m3fn has none and overflows to NaN

    min = property(lambda self: -self.max)
    tiny = property(lambda self: self.smallest_normal)  # torch.finfo's name


def _format(name: str, dtype: np.dtype, e: int, m: int, has_inf: bool = True) -> Format:
    bias = 2 ** (e - 1) - 1
    top = bias if has_inf else bias + 1  # e4m3fn spends only one pattern of its top exponent on NaN
    unit = math.ldexp(1.0, top - m)  # spacing below max
    largest = math.ldexp(2.0 - 2.0**-m, top) if has_inf else math.ldexp(2.0 - 2.0 ** (1 - m), top)
    # Half a step above max is a tie. With IEEE's odd max the tie goes up, to inf: 65520 for half. e4m3fn's
    # max 448 is even, so 464 still rounds to 448 and the first float64 above it is the first to become NaN.
    overflow = largest + unit / 2 if has_inf else math.nextafter(largest + unit / 2, math.inf)
    tiny = math.ldexp(1.0, 1 - bias)
    smallest = math.ldexp(1.0, 1 - bias - m)
    return Format(
        name, dtype, 1 + e + m, e, m, bias, largest, tiny, smallest, 2.0**-m, smallest / 2, overflow, has_inf
    )


tf32 = _format("tf32", float32, 8, 10)  # what a tensor core makes of float32 inputs; no dtype of its own
FORMATS: dict[np.dtype, Format] = {
    f.dtype: f
    for f in (
        _format("float64", float64, 11, 52),
        _format("float32", float32, 8, 23),
        _format("float16", float16, 5, 10),
        _format("bfloat16", bfloat16, 8, 7),
        _format("float8_e4m3fn", float8_e4m3fn, 4, 3, has_inf=False),
        _format("float8_e5m2", float8_e5m2, 5, 2),
    )
}
_HALF = frozenset((float16, bfloat16))
_LOW = frozenset((float16, bfloat16, float8_e4m3fn, float8_e5m2))
_NAMES = ", ".join(f.name for f in FORMATS.values())

_quietly = Quietly()
_SMALL = 2048  # below this size one astype is quicker than a dozen NumPy calls


def _unsupported(dtype) -> TypeError:
    return TypeError(
        f"unsupported dtype {dtype}; supported are {_NAMES}: convert first, e.g. x.astype(minamp.float32)"
    )


def format_of(dtype) -> Format:
    """The Format of a dtype (np.dtype, its scalar type or its name); a Format, such as `tf32`, is its own."""
    if isinstance(dtype, Format):
        return dtype
    try:
        return FORMATS[np.dtype(dtype)]
    except (TypeError, KeyError):
        raise _unsupported(getattr(dtype, "__name__", dtype)) from None


def is_floating(dtype) -> bool:
    """True for the six dtypes of FORMATS."""
    return dtype in FORMATS


def is_half(dtype) -> bool:
    """True for float16 and bfloat16."""
    return dtype in _HALF


# ------------------------------------------------------------------------------------------- nearest rounding


def widen(a: np.ndarray) -> np.ndarray:
    """float16, bfloat16 or float8 as float32, exactly, layout kept; other arrays come back as they are."""
    if a.dtype not in _LOW:
        return a
    if a.dtype != float16 or a.size < 4 * _SMALL or not isinstance(a, np.ndarray):
        return a.astype(float32)  # ml_dtypes takes 0.1 ms per million bfloat16; and widening never warns
    source, target, out = flat(a, float32)
    halves.widen(source, target)
    return out


def narrow(a: np.ndarray, dtype) -> np.ndarray:
    """Any of the formats rounded once to float16, bfloat16 or float8, in the same layout.

    TypeError for any other dtype; see `cast`.
    """
    a = _array(a)
    dtype = dtype if dtype in _LOW else format_of(dtype).dtype
    if a.dtype == dtype:
        return a
    if a.dtype not in FORMATS or dtype not in _LOW:
        raise _unsupported(a.dtype if dtype in _LOW else f"{dtype} for narrow()")
    a = widen(a)
    if a.dtype == float64 and (dtype != float16 or a.size >= _SMALL):
        a = _to_odd(a)
    if dtype != float16 or a.size < _SMALL:
        return _quietly.run(a.astype, dtype)
    source, target, out = flat(a, dtype)
    _quietly.run(halves.narrow, source, target)
    return out


def round_to(a: np.ndarray, dtype, out: np.ndarray | None = None) -> np.ndarray:
    """`a` (float32, or float64) rounded once to a smaller format's grid, as float32: widen(narrow(a, dtype)), faster.

    `out` may be `a` itself. With float32 or float64 as dtype there is nothing to round and `a` comes back.
    """
    a = _array(a)
    if a.dtype not in (float32, float64):
        raise _unsupported(f"{a.dtype} for round_to(), which takes float32 or float64")
    if out is not None and out.shape != a.shape:
        raise ValueError(f"round_to(): out has shape {out.shape} but a has shape {a.shape}: make them equal")
    f = format_of(dtype)
    dtype = f.dtype
    if a.dtype == float64 and (dtype in _LOW or f is tf32):
        a = _to_odd(a)
    if f is tf32:
        result = _round_tf32(a)
    elif dtype not in _LOW:
        result = a
    elif dtype != float16 or a.size < _SMALL:
        # bfloat16 both ways takes 0.6 ms per million, integer arithmetic 0.8
        result = _quietly.run(a.astype, dtype)
        if out is None:
            result = result.astype(float32)
    else:
        source, target, result = flat(a, float32, out)
        _quietly.run(halves.round_, source, target)
    if out is None or result is out:
        return result
    np.copyto(out, result, casting="unsafe")
    return out


def cast(a: np.ndarray, dtype) -> np.ndarray:
    """`a` as `dtype`, rounded once: any of the formats, integers or bool, both ways. Never warns."""
    a = _array(a)
    if a.dtype is dtype or a.dtype == dtype:
        return a
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        raise _unsupported(dtype) from None
    for each in (a.dtype, dtype):
        if each not in FORMATS and each.kind not in "biu":
            raise _unsupported(each)
    if a.dtype.kind in "iu" and dtype in _LOW:
        a = _integers_to_odd(a)
    if dtype in _LOW:
        return narrow(a.astype(float32) if a.dtype.kind == "b" else a, dtype)
    return _quietly.run(widen(a).astype, dtype)


def _array(a) -> np.ndarray:
    return a if isinstance(a, (np.ndarray, np.generic)) else np.asarray(a)


def flat(a: np.ndarray, dtype: np.dtype, out: np.ndarray | None = None):
    """`a` and a new array of the same layout, both as flat views in memory order, and that new array itself.

    The new array is `out` where its layout allows.
    """
    fits = out is not None and out.dtype == dtype and out.strides == a.strides and _dense(out)
    if not fits or (out is not a and np.may_share_memory(out, a)):
        out = np.empty_like(a, dtype=dtype)
    if a.flags.c_contiguous:
        return a.reshape(-1), out.reshape(-1), out
    axes = sorted(range(a.ndim), key=lambda i: -out.strides[i])
    return np.ascontiguousarray(a.transpose(axes)).reshape(-1), out.transpose(axes).reshape(-1), out


def _dense(a: np.ndarray) -> bool:
    return a.transpose(sorted(range(a.ndim), key=lambda i: -a.strides[i])).flags.c_contiguous


@quiet
def _round_tf32(a: np.ndarray) -> np.ndarray:
    """Add just under half of the last place kept, plus one if that place is odd, and cut."""
    bits = a.view(np.int32)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000
    return np.where(np.isnan(a), a, bits.view(np.float32))


@quiet
def _to_odd(a: np.ndarray) -> np.ndarray:
    """float64 to float32, truncated, with the last bit set if anything was lost.

    A second rounding then sees on which side of a midpoint the value lay. By way of plain float32
    1 + 2^-11 + 2^-40 would become 1 in half, a full step off.
    """
    source, target, out = flat(a, float32)
    for x, f in halves.pieces(source, target):
        f[...] = x
        back = f.astype(float64)
        bits = f.view(np.int32)
        bits -= np.abs(back) > np.abs(x)
        bits |= (back != x) & ~np.isnan(x)
    return out


def _integers_to_odd(a: np.ndarray) -> np.ndarray:
    """Integers as float64; from 2^53 on, where that would round, the last 12 bits become one sticky bit."""
    if a.dtype.itemsize == 8 and a.size and (a.max() >= 2**53 or a.min() <= -(2**53)):
        low = a & a.dtype.type(4095)
        big = (a >= 2**53) | (a <= -(2**53)) if a.dtype.kind == "i" else a >= 2**53
        a = np.where(big, a - low + a.dtype.type(2048) * (low != 0), a)
    return a.astype(float64)


# ---------------------------------------------------------------------------------------- stochastic rounding


@quiet
def stochastic_round(a: np.ndarray, dtype, rng: np.random.Generator) -> np.ndarray:
    """Each value of float32 or float64 `a` goes up or down to `dtype`, with odds that give it the mean `a`.

    Values on the grid stay. Above the largest finite number there is no upper neighbour to weigh, so nearest
    rounding applies as in `narrow` (half: 65504 up to 65520, then inf). inf and NaN are kept. Odds are
    multiples of 2^-53.
    """
    a, f = _array(a), format_of(dtype)
    if a.dtype not in (float32, float64):
        raise _unsupported(f"{a.dtype} for stochastic_round(), which takes float32 or float64")
    x = a.astype(float64)
    step = _spacing(x, f)
    steps = np.where(np.abs(x) <= f.max, x / step, 0.0)
    whole = np.floor(steps)
    whole += rng.random(a.shape) < steps - whole
    x = np.where(np.abs(x) <= f.max, np.copysign(whole * step, x), x)
    out = np.empty_like(a, dtype=f.dtype)
    out[...] = cast(x, f.dtype)
    return out


# ----------------------------------------------------------------------------------------- looking at numbers


def _spacing(x: np.ndarray, f: Format) -> np.ndarray:
    exponent = np.frexp(x)[1] - 1  # frexp's mantissa lies in [0.5, 1)
    exponent = np.where(x == 0, 1 - f.bias, np.maximum(exponent, 1 - f.bias))
    return np.ldexp(1.0, exponent - f.mantissa_bits)


def ulp(x, dtype):
    """The format's spacing at x (a float or an array): eps at 1, smallest_subnormal at 0, inf past max."""
    f, x = format_of(dtype), cast(x, float64)
    y = np.where(np.abs(x) <= f.max, _spacing(x, f), np.where(np.isnan(x), np.nan, np.inf))
    return y if y.ndim else float(y)


@quiet
def neighbours(x, dtype):
    """The nearest numbers of the format strictly below and strictly above x (a float or an array), as a pair.

    Past the largest number lies inf, or NaN in float8_e4m3fn, which has no inf.
    """
    f, x = format_of(dtype), cast(x, float64)
    # A power of two has the smaller spacing on the side of 0; one float64 step that way finds it.
    below, above = np.nextafter(x, -np.inf), np.nextafter(x, np.inf)
    down, up = _spacing(below, f), _spacing(above, f)
    below, above = (np.ceil(x / down) - 1) * down, (np.floor(x / up) + 1) * up
    end = np.inf if f.has_inf else np.nan
    below = np.where(x > f.max, f.max, np.where(below < -f.max, -end, below))
    above = np.where(x < -f.max, -f.max, np.where(above > f.max, end, above))
    below, above = (np.where(np.isnan(x), np.nan, y) for y in (below, above))
    return (below, above) if below.ndim else (float(below), float(above))


def bits(x, dtype) -> str:
    """Sign, exponent and mantissa of x rounded to the format: bits(1, float16) is '0 01111 0000000000'."""
    f = format_of(dtype)
    if f is tf32:
        x = round_to(np.asarray(cast(x, float64)), tf32)
    pattern = int(np.asarray(cast(x, f.dtype)).view(f"u{f.dtype.itemsize}"))
    text = f"{pattern:0{8 * f.dtype.itemsize}b}"
    e = 1 + f.exponent_bits
    return f"{text[0]} {text[1:e]} {text[e : f.bits]}"
