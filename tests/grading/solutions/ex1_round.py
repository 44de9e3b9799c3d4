"""Answers to try on exercise 1: right ones written in other ways, and wrong ones that a student would hand in."""

from grading.local import instead, wrong

_HEAD = {
    "decode": "import numpy as np\n\ndef decode(bits, e, m):\n",
    "half": 'import numpy as np\n\ndef to_half_bits(x, mode="rn"):\n',
    "bfloat16": "import numpy as np\n\ndef to_bfloat16_bits(x):\n",
    "stochastic": "import numpy as np\n\ndef stochastic_half_bits(x, r):\n",
}


def _answer(task, body):
    """The source of an answer from the lines of its body."""
    return _HEAD[task] + "\n".join("    " + line for line in body.strip("\n").split("\n")) + "\n"


# ------------------------------------------------------------------------------------------------------------------- decode

RIGHT = {
    "decode": [
        # number by number, in Python's own integers
        _answer(
            "decode",
            """
def one(pattern):
    sign, exponent, mantissa = pattern >> (e + m), (pattern >> m) % 2**e, pattern % 2**m
    if exponent == 2**e - 1:
        x = float("nan") if mantissa else float("inf")
    elif exponent == 0:
        x = mantissa / 2**m * 2.0 ** (2 - 2 ** (e - 1))
    else:
        x = (1 + mantissa / 2**m) * 2.0 ** (exponent + 1 - 2 ** (e - 1))
    return -x if sign else x

return np.array([one(int(pattern)) for pattern in bits.ravel()]).reshape(bits.shape)
""",
        ),
        # the fields moved to where float64 has them: a multiplication repairs the bias, and makes subnormals right too
        _answer(
            "decode",
            """
wide = bits.astype(np.uint64)
one, magnitude = np.uint64(1), wide & np.uint64(2 ** (e + m) - 1)
x = (magnitude << np.uint64(52 - m)).view(np.float64) * 2.0 ** (1023 - (2 ** (e - 1) - 1))
top = magnitude >> np.uint64(m) == 2**e - 1
x[top & (magnitude % np.uint64(2**m) == 0)] = np.inf
x[top & (magnitude % np.uint64(2**m) != 0)] = np.nan
return np.copysign(x, 0.5 - (wide >> np.uint64(e + m) & one))
""",
        ),
        # every magnitude of the format in order is the one before plus a step; here by steps from the power of two
        _answer(
            "decode",
            """
bits = bits.astype(object)
exponent, mantissa = bits // 2**m % 2**e, (bits % 2**m).astype(np.float64)
exponent = exponent.astype(np.int64)
power = 2.0 ** (np.maximum(exponent, 1) - 2 ** (e - 1) + 1)
x = np.where(exponent == 0, 0.0, power) + mantissa * (power / 2**m)
x[(exponent == 2**e - 1) & (mantissa == 0)] = float("inf")
x[(exponent == 2**e - 1) & (mantissa != 0)] = float("nan")
return x * (1.0 - 2.0 * (bits // 2 ** (e + m)).astype(np.float64))
""",
        ),
    ],
    # ------------------------------------------------------------------------------------------------------- to_half_bits
    "to_half_bits": [
        # number by number, in exact fractions
        _answer(
            "half",
            """
from fractions import Fraction

def one(bits):
    sign, magnitude = bits >> 31, bits & 0x7FFFFFFF
    if magnitude >= 0x7F800000:
        return sign << 15 | (0x7C00 if magnitude == 0x7F800000 else 0x7E00)
    exponent = max(magnitude >> 23, 1)
    value = Fraction((magnitude & 0x7FFFFF) + (0x800000 if magnitude >> 23 else 0)) * Fraction(2) ** (exponent - 150)
    e = max(exponent - 127, -14)
    steps = value / Fraction(2) ** (e - 10)
    whole = steps.__floor__()
    if mode == "rn":
        whole = round(steps)  # Python's round takes ties to even
    elif steps != whole and (mode, sign) in (("ru", 0), ("rd", 1)):
        whole += 1
    pattern = (e + 14) * 1024 + whole
    if pattern >= 0x7C00:
        pattern = 0x7C00 if mode == "rn" or (mode, sign) in (("ru", 0), ("rd", 1)) else 0x7BFF
    return sign << 15 | pattern

return np.array([one(int(bits)) for bits in x.ravel()], np.uint16).reshape(x.shape)
""",
        ),
        # in float64: so many steps, rounded by NumPy
        _answer(
            "half",
            """
value = x.view(np.float32).astype(np.float64)
negative = np.signbit(value)
magnitude = np.where(np.isfinite(value), np.abs(value), 0.0)
step = 2.0 ** (np.clip(np.frexp(magnitude)[1] - 1, -14, None) - 10)
step[magnitude < 2.0**-14] = 2.0**-24
steps = magnitude / step
down, up = np.floor(steps), np.ceil(steps)
chosen = {
    "rn": np.rint(steps),
    "rz": down,
    "ru": np.where(negative, down, up),
    "rd": np.where(negative, up, down),
}[mode]
result = chosen * step
big = result > 65504
saturates = {"rn": negative & False, "rz": negative | True, "ru": negative, "rd": ~negative}[mode]
result[big & saturates] = 65504
result[big & ~saturates] = np.inf
result[np.isinf(value)] = np.inf
bits = result.astype(np.float16).view(np.uint16)  # exact by now
bits[np.isnan(value)] = 0x7E00
return bits + (negative.astype(np.uint16) << 15)
""",
        ),
        # look the neighbours up in the list of all halves
        _answer(
            "half",
            """
every = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
every = np.append(every, 65536.0)  # where infinity begins for the rounding
value = x.view(np.float32).astype(np.float64)
magnitude, negative = np.abs(value), np.signbit(value)
finite = np.where(magnitude < 65536, magnitude, 65536)
below = np.searchsorted(every, finite, side="right") - 1
above = np.searchsorted(every, finite, side="left")
low, high = finite - every[below], every[above] - finite
if mode == "rn":
    index = np.where(low < high, below, np.where(low > high, above, below + below % 2 * (above - below)))
elif mode == "rz":
    index = np.minimum(below, 0x7BFF)
else:
    index = np.where(negative == (mode == "rd"), above, np.minimum(below, 0x7BFF))
index = np.where(np.isinf(value), 0x7C00, index)
index = np.where(np.isnan(value), 0x7FFF, index)
return (index + 0x8000 * negative).astype(np.uint16)
""",
        ),
    ],
    # --------------------------------------------------------------------------------------------------- to_bfloat16_bits
    "to_bfloat16_bits": [
        # cut, look at what is lost, add one where it is due
        _answer(
            "bfloat16",
            """
x = x.astype(np.int64)
y, rest = x // 65536, x % 65536
odd = y % 2 == 1
y = y + ((rest > 32768) | ((rest == 32768) & odd))
nan = x % 2**31 > 0x7F800000
y[nan] = (x[nan] >> 31 << 15) + 0x7FC0
return y.astype(np.uint16)
""",
        ),
        # in float64, by steps
        _answer(
            "bfloat16",
            """
value = x.view(np.float32)
wide = np.where(np.isfinite(value), value, 0).astype(np.float64)
_, exponent = np.frexp(wide)
step = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
step[wide == 0] = 1
rounded = np.copysign((np.rint(wide / step) * step).astype(np.float32), value)
result = np.where(np.isfinite(value), rounded, value).view(np.uint32) >> 16
return np.where(np.isnan(value), result | 1, result).astype(np.uint16)
""",
        ),
        # number by number
        _answer(
            "bfloat16",
            """
out = np.empty(x.size, np.uint16)
for i, bits in enumerate(x.ravel().tolist()):
    if bits & 0x7F800000 == 0x7F800000 and bits & 0x7FFFFF:
        out[i] = bits >> 16 | 0x40
    else:
        kept, rest = divmod(bits, 0x10000)
        out[i] = kept + (rest + kept % 2 > 0x8000)
return out.reshape(x.shape)
""",
        ),
    ],
    # ----------------------------------------------------------------------------------------------- stochastic_half_bits
    "stochastic_half_bits": [
        # number by number, in whole numbers of 2^-181 (the smallest float32 times 2^-32)
        _answer(
            "stochastic",
            """
def one(bits, random):
    sign, magnitude = bits >> 31 << 15, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return sign | 0x7FFF
    if magnitude == 0x7F800000:
        return sign | 0x7C00
    field, mantissa = divmod(magnitude, 0x800000)
    value = mantissa << 32 if field == 0 else (mantissa + 0x800000) << (field - 1 + 32)
    e = max(field, 113)  # of the float32 exponent field, at least that of 2^-14
    step = 1 << (e - 1 + 13 + 32)
    whole = (value + step // 2**32 * random) // step
    return sign | min((e - 113) * 1024 + whole, 0x7BFF)

pairs = zip(x.ravel().tolist(), r.ravel().tolist())
return np.array([one(*pair) for pair in pairs], np.uint16).reshape(x.shape)
""",
        ),
        # the bits of task 2: kept, rest, and a comparison of the rest
        _answer(
            "stochastic",
            """
sign = (x >> 16).astype(np.int64) & 0x8000
field = (x >> 23).astype(np.int64) & 0xFF
mantissa = x.astype(np.int64) & 0x7FFFFF
significand = mantissa + 0x800000 * (field > 0)
scale = np.maximum(field - 112, 1)
cut = np.minimum(13 + scale - np.maximum(field - 112, -111), 62)
kept = significand >> cut
rest = (significand - (kept << cut)).astype(np.float64)
kept = kept + (rest * 2.0 ** (32 - cut) + r.astype(np.float64) >= 2.0**32)
kept -= (rest * 2.0 ** (32 - cut) < 2.0**32 - r) & (kept > significand >> cut)  # the sum itself may round
pattern = np.minimum((scale - 1) * 1024 + kept, 0x7BFF)
pattern[field == 255] = 0x7C00
pattern[(field == 255) & (mantissa > 0)] = 0x7C01
return (pattern + sign).astype(np.uint16)
""",
        ),
        # the two neighbours from the list of all halves
        _answer(
            "stochastic",
            """
every = np.append(np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64), 65536.0)
value = x.view(np.float32).astype(np.float64)
magnitude = np.minimum(np.where(np.isnan(value), 0, np.abs(value)), 65504.0)
below = np.searchsorted(every, magnitude, side="right") - 1
part = (magnitude - every[below]) / (every[below + 1] - every[below])
index = below + (1.0 - r / 2.0**32 <= part)
index[np.isinf(value)] = 0x7C00
index[np.isnan(value)] = 0x7D55
return (index + np.where(np.signbit(value), 0x8000, 0)).astype(np.uint16)
""",
        ),
    ],
}

# ------------------------------------------------------------------------------------------------------------- wrong answers

_DECODE = ("decode_normal", "decode_subnormal", "decode_special")
_HALF = ("to_half_bits_nearest", "to_half_bits_small", "to_half_bits_ends", "to_half_bits_directed")
_NEAREST, _SMALL, _ENDS, _DIRECTED = _HALF
_BFLOAT = ("to_bfloat16_bits_nearest", "to_bfloat16_bits_ends")
_STOCHASTIC = ("stochastic_half_bits_kept", "stochastic_half_bits_odds", "stochastic_half_bits_small")
_KEPT, _ODDS, _FEW = _STOCHASTIC

_NEARER = "(rest > middle) | ((rest == middle) & (kept & 1 == 1))"
_CLAMP = "np.minimum(pattern, np.where(away, 0x7C00, 0x7BFF))"
_SPECIAL = "np.where(exponent == 255, np.where(mantissa == 0, 0x7C00, 0x7E00), pattern)"
_CUT = "np.minimum(13 + scale - (exponent - 112), 25)"
_TURN = "(steps - whole) * 2.0**32 >= 2.0**32 - r"
_BFLOAT_NAN = "np.where(nan, (x >> 16) | 0x0040, rounded)"

WRONG = {
    "decode": [
        wrong(
            "every number has a leading one, exponent field 0 too",
            instead("np.where(exponent > 0, mantissa + 2**m, mantissa)", "mantissa + 2**m"),
            "decode_subnormal",
        ),
        wrong(
            "subnormal numbers with exponent 0 - bias",
            instead("np.maximum(exponent, 1)", "exponent"),
            "decode_subnormal",
        ),
        wrong(
            "subnormal numbers are flushed to zero",
            instead(
                "np.where(exponent > 0, mantissa + 2**m, mantissa)",
                "np.where(exponent > 0, mantissa + 2**m, 0)",
            ),
            "decode_subnormal",
        ),
        wrong(
            "bias 2 ** (e - 1)",
            instead("(2 ** (e - 1) - 1)", "2 ** (e - 1)"),
            "decode_normal",
            "decode_subnormal",
        ),
        wrong(
            "the bias of half for every format",
            instead("(2 ** (e - 1) - 1)", "15"),
            "decode_normal",
            "decode_subnormal",
        ),
        wrong(
            "ten mantissa bits whatever m says",
            instead("mantissa = bits & (2**m - 1)", "m = 10\n    mantissa = bits & (2**m - 1)"),
            *_DECODE,
        ),
        wrong(
            "the sign of zero is lost",
            instead("np.where(sign == 1, -x, x)", "np.where(sign == 1, 0 - x, x)"),
            "decode_subnormal",
        ),
        wrong(
            "the sign is looked for in bit 31",
            instead("sign = bits >> (e + m)", "sign = bits >> 31"),
            *_DECODE,
        ),
        wrong(
            "the top exponent is one more power of two, as in e4m3fn",
            instead("np.where(exponent == 2**e - 1, np.where(mantissa == 0, np.inf, np.nan), x)", "x"),
            "decode_special",
        ),
        wrong(
            "all of the top exponent is infinity",
            instead("np.where(mantissa == 0, np.inf, np.nan)", "np.inf"),
            "decode_special",
        ),
        wrong(
            "only the quiet NaN patterns are NaN",
            instead(
                "np.where(mantissa == 0, np.inf, np.nan)", "np.where(mantissa < 2 ** (m - 1), np.inf, np.nan)"
            ),
            "decode_special",
        ),
        wrong(
            "unsigned exponent minus bias",
            _answer(
                "decode",
                """
sign, exponent, mantissa = bits >> (e + m), (bits >> m) & (2**e - 1), bits & (2**m - 1)
bias = 2 ** (e - 1) - 1
x = np.where(
    exponent == 0, 2.0 ** (1 - bias) * (mantissa / 2**m), 2.0 ** (exponent - bias) * (1 + mantissa / 2**m)
)
x = np.where(exponent == 2**e - 1, np.where(mantissa == 0, np.inf, np.nan), x)
return np.where(sign == 1, -x, x)
""",
            ),
            "decode_normal",
        ),
        wrong(
            "a view of the sixteen bits as float16",
            _answer("decode", "return bits.astype(np.uint16).view(np.float16).astype(np.float64)"),
            *_DECODE,
        ),
        wrong(
            "the result is float32",
            instead("np.where(sign == 1, -x, x)", "np.where(sign == 1, -x, x).astype(np.float32)"),
            *_DECODE,
        ),
        wrong(
            "the mantissa is masked in place",
            _answer(
                "decode",
                """
sign, exponent = (bits >> (e + m)).astype(np.int64), ((bits >> m) & (2**e - 1)).astype(np.int64)
bits &= 2**m - 1
x = np.ldexp(bits + 2.0**m * (exponent > 0), np.maximum(exponent, 1) - (2 ** (e - 1) - 1) - m)
x = np.where(exponent == 2**e - 1, np.where(bits == 0, np.inf, np.nan), x)
return np.where(sign == 1, -x, x)
""",
            ),
            "decode_normal",
        ),
    ],
    "to_half_bits": [
        wrong("cut instead of rounded to nearest", instead(_NEARER, "rest < 0"), _NEAREST, _SMALL, _ENDS),
        wrong("ties away from zero", instead(_NEARER, "rest >= middle"), _NEAREST, _SMALL),
        wrong("ties toward zero", instead(_NEARER, "rest > middle"), _NEAREST, _SMALL, _ENDS),
        wrong("ties to odd", instead("(kept & 1 == 1)", "(kept & 1 == 0)"), _NEAREST, _SMALL, _ENDS),
        wrong(
            "subnormal results are flushed to zero",
            instead(_SPECIAL, "np.where(exponent < 113, 0, " + _SPECIAL + ")"),
            _SMALL,
            _DIRECTED,
        ),
        wrong(
            "rounded twice: to eleven bits, then to a subnormal",
            instead(
                "cut = " + _CUT,
                "lost, odd = significand & 0x1FFF, significand >> 13 & 1\n"
                "    if mode == 'rn':\n"
                "        up = (lost > 0x1000) | ((lost == 0x1000) & (odd == 1))\n"
                "        significand = significand - lost + 0x2000 * up\n"
                "    cut = " + _CUT,
            ),
            _SMALL,
        ),
        wrong(
            "the shift of tiny numbers is not limited",
            instead(
                "kept, rest, middle = significand >> cut, significand & ((1 << cut) - 1), 1 << (cut - 1)",
                "significand, cut = significand.astype(np.uint32), (13 + scale - (exponent - 112)).astype(np.uint32)\n"
                "    kept, rest, middle = significand >> cut, significand & ((1 << cut) - 1), 1 << (cut - 1)",
            ),
            _SMALL,
        ),
        wrong(
            "one bit too few is cut below the normal range",
            instead("13 + scale - (exponent - 112)", "13 + np.maximum(scale - (exponent - 112) - 1, 0)"),
            _SMALL,
            _DIRECTED,
        ),
        wrong(
            "infinity from everything above 65504",
            instead(_CLAMP, "np.where((x & 0x7FFFFFFF > 0x477FE000) & away, 0x7C00, " + _CLAMP + ")"),
            _ENDS,
        ),
        wrong(
            "overflow saturates at 65504",
            instead(_CLAMP, "np.minimum(pattern, 0x7BFF)"),
            _ENDS,
            _DIRECTED,
        ),
        wrong(
            "overflow is infinite in every mode",
            instead(_CLAMP, "np.minimum(pattern, 0x7C00)"),
            _DIRECTED,
        ),
        wrong("the exponent is not checked for overflow", instead(_CLAMP, "pattern"), _ENDS, _DIRECTED),
        wrong(
            "NaN becomes infinity",
            instead("np.where(mantissa == 0, 0x7C00, 0x7E00)", "0x7C00"),
            _ENDS,
        ),
        wrong(
            "NaN is recognised by the ten bits that fit",
            instead("np.where(mantissa == 0, 0x7C00, 0x7E00)", "0x7C00 | mantissa >> 13"),
            _ENDS,
        ),
        wrong(
            "NaN loses its sign",
            instead("return (pattern | sign)", "return np.where(pattern > 0x7C00, 0x7E00, pattern | sign)"),
            _ENDS,
        ),
        wrong(
            "negative results that underflow are plus zero",
            instead("return (pattern | sign)", "return np.where(pattern == 0, 0, pattern | sign)"),
            _SMALL,
            _DIRECTED,
        ),
        wrong(
            "the carry does not reach the exponent",
            instead(
                "(scale - 1) << 10) + kept + up", "(scale - 1) << 10) + (kept & 0x400) + (kept + up & 0x3FF)"
            ),
            *_HALF,
        ),
        wrong(
            "up means away from zero and down means toward zero",
            instead('"ru": sign == 0, "rd": sign != 0', '"ru": True, "rd": False'),
            _DIRECTED,
        ),
        wrong(
            "a rest of one unit is no rest",
            instead("away & (rest > 0)", "away & (rest > 1)"),
            _DIRECTED,
        ),
        wrong(
            "the smallest normal float32 counts as subnormal",
            instead(
                "np.where(exponent > 0, mantissa | 0x800000", "np.where(exponent > 1, mantissa | 0x800000"
            ),
            _DIRECTED,
        ),
        wrong(
            "an infinity is clamped by the directed modes",
            instead(
                _SPECIAL,
                "np.where((exponent == 255) & ((mantissa > 0) | (mode == 'rn')), " + _SPECIAL + ", pattern)",
            ),
            _DIRECTED,
        ),
        wrong(
            "what underflows is zero in every mode",
            instead("away & (rest > 0)", "away & (rest > 0) & (exponent > 102)"),
            _DIRECTED,
        ),
        wrong(
            "the directed modes go one step on from a half too",
            instead("away & (rest > 0)", "away & (rest >= 0)"),
            _DIRECTED,
        ),
        wrong(
            "the mode is forgotten",
            instead("significand = np.where", 'mode = "rn"\n    significand = np.where'),
            _DIRECTED,
        ),
        wrong(
            "a cast for every mode",
            _answer("half", "return x.view(np.float32).astype(np.float16).view(np.uint16)"),
            _DIRECTED,
        ),
        wrong(
            "the directed modes from the neighbours of the rounded number",
            _answer(
                "half",
                """
value = x.view(np.float32)
y = value.astype(np.float16)
if mode == "rz":
    y = np.where(np.abs(y) > np.abs(value), np.nextafter(y, np.float16(0)), y)
elif mode == "ru":
    y = np.where(y < value, np.nextafter(y, np.float16(np.inf)), y)
elif mode == "rd":
    y = np.where(y > value, np.nextafter(y, np.float16(-np.inf)), y)
return (y + np.float16(0)).view(np.uint16)
""",
            ),
            _SMALL,
            _DIRECTED,
        ),
    ],
    "to_bfloat16_bits": [
        wrong(
            "the upper half of the float32, cut",
            _answer("bfloat16", "return (x >> 16).astype(np.uint16)"),
            *_BFLOAT,
        ),
        wrong(
            "ties away from zero",
            instead("x + 0x7FFF + ((x >> 16) & 1)", "x + 0x8000"),
            "to_bfloat16_bits_nearest",
        ),
        wrong(
            "ties toward zero",
            instead("x + 0x7FFF + ((x >> 16) & 1)", "x + 0x7FFF"),
            *_BFLOAT,
        ),
        wrong(
            "the first lost bit decides a tie",
            instead("(x >> 16) & 1", "(x >> 15) & 1"),
            "to_bfloat16_bits_nearest",
        ),
        wrong(
            "NaN is rounded like a number",
            instead(_BFLOAT_NAN, "rounded"),
            "to_bfloat16_bits_ends",
        ),
        wrong(
            "NaN is cut and may become infinity",
            instead("(x >> 16) | 0x0040", "x >> 16"),
            "to_bfloat16_bits_ends",
        ),
        wrong(
            "NaN loses its sign",
            instead("(x >> 16) | 0x0040", "0x7FC0"),
            "to_bfloat16_bits_ends",
        ),
        wrong(
            "infinity counts as NaN",
            instead("> 0x7F800000", ">= 0x7F800000"),
            "to_bfloat16_bits_ends",
        ),
        wrong(
            "NaN is looked for without its sign bit",
            instead("nan = (x & 0x7FFFFFFF) > 0x7F800000", "nan = x > 0x7F800000"),
            *_BFLOAT,
        ),
        wrong(
            "overflow saturates at the largest number",
            instead(_BFLOAT_NAN, "np.where(nan, (x >> 16) | 0x0040, rounded - (rounded & 0x7FFF == 0x7F80))"),
            "to_bfloat16_bits_ends",
        ),
        wrong(
            "subnormal numbers are flushed to zero",
            instead(_BFLOAT_NAN, "np.where(x & 0x7F800000 == 0, x >> 31 << 15, " + _BFLOAT_NAN + ")"),
            "to_bfloat16_bits_nearest",
        ),
        wrong(
            "rounded to half first",
            _answer(
                "bfloat16",
                """
x = x.view(np.float32).astype(np.float16).astype(np.float32).view(np.uint32)
nan = (x & 0x7FFFFFFF) > 0x7F800000
return np.where(nan, (x >> 16) | 0x0040, (x + 0x7FFF + ((x >> 16) & 1)) >> 16).astype(np.uint16)
""",
            ),
            *_BFLOAT,
        ),
        wrong(
            "the carry does not reach the exponent",
            instead(
                "rounded = (x + 0x7FFF + ((x >> 16) & 1)) >> 16",
                "kept = x >> 16\n    up = (x & 0xFFFF) + (kept & 1) > 0x8000\n"
                "    rounded = (kept & 0xFF80) | ((kept + up) & 0x7F)",
            ),
            *_BFLOAT,
        ),
        wrong(
            "the half step is added in place",
            _answer(
                "bfloat16",
                """
nan = (x & 0x7FFFFFFF) > 0x7F800000
sign = x >> 31 << 15
x += 0x7FFF + ((x >> 16) & 1)
return np.where(nan, 0x7FC0 | sign, x >> 16).astype(np.uint16)
""",
            ),
            "to_bfloat16_bits_nearest",
        ),
        wrong(
            "the result stays uint32",
            instead(".astype(np.uint16)", ""),
            *_BFLOAT,
        ),
    ],
    "stochastic_half_bits": [
        wrong("to nearest, the random bits are not used", instead(_TURN, "steps - whole > 0.5"), _ODDS, _FEW),
        wrong("a fair coin", instead(_TURN, "(steps > whole) & (r >= 2**31)"), _ODDS, _FEW),
        wrong(
            "a generator of its own",
            instead(_TURN, "np.random.random(steps.shape) < steps - whole"),
            _ODDS,
            _FEW,
        ),
        wrong(
            "small random bits go up instead of large ones",
            instead(_TURN, "r < (steps - whole) * 2.0**32"),
            _ODDS,
            _FEW,
        ),
        wrong(
            "halves move when the random bits are zero",
            instead(_TURN, "r <= (steps - whole) * 2.0**32"),
            *_STOCHASTIC,
        ),
        wrong(
            "a sum of exactly one step stays",
            instead(_TURN, "(steps - whole) * 2.0**32 > 2.0**32 - r"),
            _ODDS,
            _FEW,
        ),
        wrong(
            "noise is added and the sum rounded to nearest",
            instead("whole += " + _TURN, "whole = np.rint(steps + r / 2.0**32)"),
            *_STOCHASTIC,
        ),
        wrong(
            "the random number is a float32 and can be 1",
            instead(
                _TURN,
                "np.float32(1) - (r / 2.0**32).astype(np.float32) <= (steps - whole).astype(np.float32)",
            ),
            *_STOCHASTIC,
        ),
        wrong(
            "only the upper eight random bits count",
            instead(_TURN, "(steps - whole) * 2.0**8 >= 2.0**8 - (r >> 24)"),
            _ODDS,
            _FEW,
        ),
        wrong(
            "thirteen random bits added, also where more bits are lost",
            _answer(
                "stochastic",
                """
sign = (x >> 16) & 0x8000
magnitude = (x & 0x7FFFFFFF).astype(np.int64)
pattern = (magnitude + (r >> 19) >> 13) - (112 << 10)
value = (x & 0x7FFFFFFF).view(np.float32).astype(np.float64)
pattern = np.where(value < 2.0**-14, np.floor(value * 2.0**24 + (r >> 19) / 2.0**13), np.minimum(pattern, 0x7BFF))
pattern = np.where(np.isinf(value), 0x7C00, np.where(np.isnan(value), 0x7E00, pattern)).astype(np.int64)
return (pattern | sign).astype(np.uint16)
""",
            ),
            _FEW,
        ),
        wrong(
            "subnormal results are flushed to zero",
            instead("special = ", "pattern = np.where(pattern < 0x0400, 0, pattern)\n    special = "),
            _KEPT,
            _FEW,
        ),
        wrong(
            "below the smallest half everything is zero",
            instead(_TURN, "(" + _TURN + ") & (value >= 2.0**-24)"),
            _FEW,
        ),
        wrong(
            "the step goes on shrinking below the normal range",
            instead("np.maximum(value, 2.0**-14)", "np.maximum(value, 2.0**-140)"),
            _KEPT,
            _FEW,
        ),
        wrong("the sign is lost", instead(" | sign).astype", ").astype"), *_STOCHASTIC),
        wrong(
            "overflow becomes infinity",
            instead("np.minimum(magnitude, 0x477FE000)", "np.minimum(magnitude, 0x47800000)"),
            _KEPT,
        ),
        wrong(
            "the largest float32 becomes NaN",
            instead("np.where(magnitude < 0x7F800000,", "np.where(magnitude < 0x7F7FFFFF,"),
            _KEPT,
        ),
        wrong(
            "an infinity becomes 65504",
            instead("np.where(magnitude < 0x7F800000,", "np.where(magnitude <= 0x7F800000,"),
            _KEPT,
        ),
        wrong(
            "NaN becomes zero",
            instead("0x7C00, 0x7E00)", "0x7C00, 0)"),
            _KEPT,
        ),
        wrong(
            "up means up, also for negative numbers",
            instead(_TURN, "np.where(sign == 0, " + _TURN + ", (whole + 1 - steps) * 2.0**32 < 2.0**32 - r)"),
            _ODDS,
            _FEW,
        ),
    ],
}
