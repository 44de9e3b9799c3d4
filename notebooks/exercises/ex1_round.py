# %% [markdown]
# # Exercise 1. Round to half by hand
#
# You bring a training loop to an accelerator that computes in float32 and has integer instructions, but none
# that converts to a 16-bit float. Weights and activations are to be stored in 16 bits all the same. So you
# write the conversions that a GPU has in hardware: bits in, bits out, every rounding mode it knows, and at the
# end the one that lets 16-bit weights learn from updates that are too small for them.
#
# Afterwards you will be able to
#
# - read the bits of any IEEE format, subnormals and special values included;
# - round correctly: to nearest with ties to even, and toward zero, up or down, once and not twice;
# - say what happens at both ends of half's range, and to NaN, in each of these modes;
# - round stochastically with given random bits, and say what that does for a weight.
#
# It builds on notebook 1, [Number formats](../01_number_formats.ipynb), and for the last task on notebook 5,
# [Master weights](../05_master_weights.ipynb). Plan two hours: four tasks for 88 points and one question for 12.
# You need Python and NumPy, nothing else.
#
# Write your answers where it says so, and keep the names and arguments of the functions. The cell below each
# answer checks some of it; the marks come from more checks of the same kind, with other numbers. Whatever they
# check stands in the docstrings and in the text here. A group of checks gives all of its points or none.

# %% nbgrader={"grade": false, "grade_id": "setup", "locked": true, "schema_version": 3, "solution": false, "task": false}
import numpy as np

rng = np.random.default_rng(0)


def fields(pattern, e=5, m=10):
    """Sign, exponent and mantissa of a bit pattern: fields(0x3C00) is '0 01111 0000000000'."""
    text = f"{int(pattern):0{1 + e + m}b}"
    return f"{text[0]} {text[1 : 1 + e]} {text[1 + e :]}"


def float_bits(*values):
    """The bits of these numbers as float32, in a uint32 array: float_bits(1.0) is [0x3F800000]."""
    return np.array(values, np.float32).view(np.uint32)


def check_form(y, dtype, shape):
    """That y is an array of this dtype and shape; if not, the message says what it is."""
    assert isinstance(y, np.ndarray), f"the result must be an array, it is a {type(y).__name__}"
    assert y.dtype == dtype, f"the result must be {np.dtype(dtype)}, it is {y.dtype}"
    assert y.shape == shape, f"the result must have the input's shape {shape}, it has {y.shape}"


def differ(y, expected, text):
    """What is wrong with 16-bit patterns that ought to be the expected ones: a list of one message, or of none."""
    y, expected = np.asarray(y, np.int64).reshape(-1), np.asarray(expected, np.int64).reshape(-1)
    wrong, sign = int((y != expected).sum()), int((y ^ expected == 0x8000).sum())
    only = f", {sign} of these only in the sign" if sign else ""
    return [f"{wrong} of {y.size} numbers {text}{only}"] if wrong else []


# %% [markdown]
# ## Task 1. Read the bits
#
# A format with $e$ exponent bits and $m$ mantissa bits has, from the top, one sign bit, the exponent field $E$
# and the mantissa field $M$. With the bias $b = 2^{e-1} - 1$ the number is
#
# $$ (-1)^s \cdot 2^{E-b} \cdot \left(1 + \frac{M}{2^m}\right) \quad\text{for } 0 < E < 2^e - 1, \qquad
#    (-1)^s \cdot 2^{1-b} \cdot \frac{M}{2^m} \quad\text{for } E = 0. $$
#
# The top exponent, all bits one, holds infinity ($M = 0$) and NaN ($M > 0$). half is $e = 5$, $m = 10$; bfloat16
# is 8 and 7, float32 is 8 and 23. Not every format in use follows this rule (e4m3fn has no infinity); all in
# this exercise do.
#
# `fields(0x3C00)` shows a half's three fields, `fields(0x3F80, 8, 7)` those of a bfloat16. One warning about
# integers in NumPy: an unsigned 3 minus 15 is not -12, and no error tells you.


# %% nbgrader={"grade": false, "grade_id": "decode", "locked": false, "schema_version": 3, "solution": true, "task": false}
def decode(bits, e, m):
    """The numbers that bit patterns of the format with e exponent and m mantissa bits stand for, exactly.

    bits: uint32 array (one dimension or more), each pattern in the low 1 + e + m bits, the bits above are 0.
    2 <= e <= 8, 1 <= m <= 23. Returns a new float64 array of the same shape. Zero keeps its sign; infinity has
    its sign; NaN is NaN, its sign does not matter. bits is not changed.
    """
    ### BEGIN SOLUTION
    bits = bits.astype(np.int64)
    sign = bits >> (e + m)
    exponent = (bits >> m) & (2**e - 1)
    mantissa = bits & (2**m - 1)
    # below the smallest normal number the step no longer changes, and there is no leading one
    significand = np.where(exponent > 0, mantissa + 2**m, mantissa)
    x = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - (2 ** (e - 1) - 1) - m)
    x = np.where(exponent == 2**e - 1, np.where(mantissa == 0, np.inf, np.nan), x)
    return np.where(sign == 1, -x, x)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "decode_normal", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
# Normal numbers, in any format: 7 points
bits = np.array([[0x3C00, 0xC100], [0x3555, 0x7BFF]], np.uint32)
x = decode(bits, 5, 10)
check_form(x, np.float64, (2, 2))
assert (x == [[1.0, -2.5], [0.333251953125, 65504.0]]).all(), f"these four halves are not {x.tolist()}"
x = decode(np.array([0x3F80, 0x4049], np.uint32), 8, 7)
assert (x == [1.0, 3.140625]).all(), f"these two bfloat16 numbers are not {x.tolist()}"
### BEGIN HIDDEN TESTS
formats = [(5, 10), (8, 7), (8, 23), (4, 3), (5, 2), (2, 1), *rng.integers([2, 1], [9, 24], (6, 2)).tolist()]
for k in rng.permutation(len(formats)):
    e, m = formats[k]
    exponent = rng.integers(1, 2**e - 1, 60)
    exponent[:2] = 1, 2**e - 2
    mantissa, sign = rng.integers(0, 2**m, 60), rng.integers(0, 2, 60)
    bits = ((sign << (e + m)) + (exponent << m) + mantissa).astype(np.uint32).reshape(3, 20)
    before = bits.copy()
    x = decode(bits, e, m)
    check_form(x, np.float64, (3, 20))
    true = (1 - 2 * sign) * (1 + mantissa / 2**m) * 2.0 ** (exponent - (2 ** (e - 1) - 1))
    wrong = int((x.reshape(-1) != true).sum())
    assert wrong == 0, f"{wrong} of 60 normal numbers of the format with e = {e}, m = {m} are wrong"
    assert (bits == before).all(), "your function changes the array of bits that it is given"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "decode_subnormal", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
# Subnormal numbers and both zeros: 6 points
x = decode(np.array([0x0001, 0x83FF, 0x0000, 0x8000], np.uint32), 5, 10)
check_form(x, np.float64, (4,))
assert x[0] == 2.0**-24, "0x0001 is the smallest positive half"
assert x[1] == -1023 * 2.0**-24, "0x83FF is the largest subnormal half, with a minus"
assert (x[2:] == 0).all() and (np.signbit(x[2:]) == [False, True]).all(), "0x0000 is 0 and 0x8000 is -0"
### BEGIN HIDDEN TESTS
formats = [(5, 10), (8, 7), (8, 23), (4, 3), (5, 2), (2, 1), *rng.integers([2, 1], [9, 24], (6, 2)).tolist()]
for k in rng.permutation(len(formats)):
    e, m = formats[k]
    mantissa, sign = rng.integers(0, 2**m, 60), rng.integers(0, 2, 60)
    mantissa[:4], sign[:4] = (0, 0, 1, 2**m - 1), (0, 1, 1, 0)
    x = decode(((sign << (e + m)) + mantissa).astype(np.uint32).reshape(5, 12), e, m)
    check_form(x, np.float64, (5, 12))
    x = x.reshape(-1)
    wrong = int((np.abs(x) != mantissa * 2.0 ** (2 - 2 ** (e - 1) - m)).sum())
    assert wrong == 0, f"{wrong} of 60 numbers with exponent field 0 are wrong, for e = {e}, m = {m}"
    wrong = int((np.signbit(x) != (sign == 1)).sum())
    assert wrong == 0, f"{wrong} of 60 numbers with exponent field 0 have the wrong sign (zero has one too)"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "decode_special", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
# Infinities and NaN: 5 points
x = decode(np.array([0x7C00, 0xFC00, 0x7E00], np.uint32), 5, 10)
check_form(x, np.float64, (3,))
assert x[0] == np.inf and x[1] == -np.inf, "0x7C00 and 0xFC00 are the two infinities of half"
assert np.isnan(x[2]), "0x7E00 is NaN"
### BEGIN HIDDEN TESTS
formats = [(5, 10), (8, 7), (8, 23), (4, 3), (5, 2), (2, 1), *rng.integers([2, 1], [9, 24], (6, 2)).tolist()]
for k in rng.permutation(len(formats)):
    e, m = formats[k]
    mantissa, sign = rng.integers(1, 2**m, 40), rng.integers(0, 2, 40)
    mantissa[:4] = 0, 0, 1, 2**m - 1
    sign[:2] = 0, 1
    x = decode(((sign << (e + m)) + ((2**e - 1) << m) + mantissa).astype(np.uint32), e, m)
    check_form(x, np.float64, (40,))
    assert x[0] == np.inf and x[1] == -np.inf, f"an infinity is wrong, for e = {e}, m = {m}"
    wrong = int((~np.isnan(x[2:])).sum())
    assert wrong == 0, f"{wrong} of 38 NaN patterns are not NaN, for e = {e}, m = {m}"
### END HIDDEN TESTS

# %% [markdown]
# ## Task 2. From float32 to half, in four modes
#
# CUDA has four functions for this conversion, `__float2half_rn`, `_rz`, `_ru` and `_rd`: to **n**earest, toward
# **z**ero, **u**p and **d**own. All four do the same with the 24 bits of the significand $1.M$ of a float32:
#
# 1. cut it where the half ends: some bits are *kept*, the *rest* is lost. A half keeps 11 bits, and below its
#    smallest normal number $2^{-14}$ one less for every power of two, since there the step stays $2^{-24}$;
# 2. decide from the rest, the last bit kept, the sign and the mode whether the magnitude goes one step up;
# 3. put sign, exponent and mantissa together. One step up is +1 on the whole pattern: a full mantissa carries
#    into the exponent field, the largest subnormal number becomes the smallest normal one, and 65504 becomes
#    infinity.
#
# So one correct decision does it, and it must see *all* of the rest: whoever first rounds to 11 bits and then
# cuts a subnormal number rounds twice.
#
# **The ends.** To nearest, a magnitude of 65520 or more is infinite (65520 lies halfway from 65504 to 65536, the
# number that would come next), and one of $2^{-25}$ or less is 0. A directed mode never goes to the other side:
# "rz" turns everything finite above 65504 into 65504 and everything below $2^{-24}$ into 0; "ru" turns $10^{-30}$
# into $2^{-24}$, $10^{30}$ into infinity, $-10^{-30}$ into -0 and $-10^{30}$ into -65504; "rd" is its mirror image.
#
# `astype(np.float16)` knows the first mode and no other. Write it in integers, and you have all four.


# %% nbgrader={"grade": false, "grade_id": "to_half_bits", "locked": false, "schema_version": 3, "solution": true, "task": false}
def to_half_bits(x, mode="rn"):
    """The bits of float32 numbers rounded once to half, as bits.

    x: uint32 array (one dimension or more), patterns of float32; it is not changed.
    mode: "rn" to nearest, a tie goes to the neighbour whose last bit is 0; "rz" toward zero; "ru" toward
    +infinity; "rd" toward -infinity. Returns a new uint16 array of x's shape. The sign is always kept, that of
    zeros, of results that become zero, and of NaN too. Subnormal halves are made, and subnormal float32 numbers
    are read, none is flushed. An infinity stays one in every mode; NaN stays NaN, with any mantissa but 0.
    """
    ### BEGIN SOLUTION
    sign = (x >> 16) & 0x8000
    exponent = ((x >> 23) & 0xFF).astype(np.int64)
    mantissa = (x & 0x7FFFFF).astype(np.int64)
    significand = np.where(exponent > 0, mantissa | 0x800000, mantissa)
    scale = np.maximum(exponent - 112, 1)  # half's exponent field; subnormal numbers count as 1
    # below half's normal range one more bit is cut per power of two, up to all 24 and the one that decides
    cut = np.minimum(13 + scale - (exponent - 112), 25)
    kept, rest, middle = significand >> cut, significand & ((1 << cut) - 1), 1 << (cut - 1)
    away = {"rn": True, "rz": False, "ru": sign == 0, "rd": sign != 0}[mode]  # may the magnitude grow?
    nearer = (rest > middle) | ((rest == middle) & (kept & 1 == 1))
    up = nearer if mode == "rn" else away & (rest > 0)
    pattern = ((scale - 1) << 10) + kept + up  # the leading one in kept makes scale out of scale - 1
    pattern = np.minimum(pattern, np.where(away, 0x7C00, 0x7BFF))
    pattern = np.where(exponent == 255, np.where(mantissa == 0, 0x7C00, 0x7E00), pattern)
    return (pattern | sign).astype(np.uint16)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "to_half_bits_nearest", "locked": true, "points": 10, "schema_version": 3, "solution": false, "task": false}
# To nearest in half's normal range, ties and carries included: 10 points
x = float_bits(1.0, -0.15625, 0.1, 1 + 2**-11, 1 + 3 * 2**-11, 2 - 2**-12)
y = to_half_bits(x)
check_form(y, np.uint16, (6,))
assert y[0] == 0x3C00 and y[1] == 0xB100, (
    f"1 and -5/32 are halves: {fields(y[0])} and {fields(y[1])} are not they"
)
assert y[2] == 0x2E66, f"the half nearest to 0.1 is not {fields(y[2])}"
assert y[3] == 0x3C00, "1 + 2^-11 is a tie: the even neighbour is below"
assert y[4] == 0x3C02, "1 + 3 * 2^-11 is a tie: the even neighbour is above"
assert y[5] == 0x4000, "2 - 2^-12 is nearest to 2: the carry goes into the exponent field"
### BEGIN HIDDEN TESTS
lower = rng.integers(0x0400, 0x7BFF, 400)  # normal halves, none of them the largest
lower[:40] = (rng.integers(1, 30, 40) << 10) + 0x3FF  # the next one is a power of two
low = lower.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
groups = {
    "exactly between two halves": low + 0x1000,
    "just above the middle between two halves": low + 0x1001,
    "just below the middle between two halves": low + 0x0FFF,
    "that are halves": low,
    "somewhere between two halves": low + rng.integers(0, 0x2000, 400).astype(np.uint32),
}
faults = []
for k in rng.permutation(len(groups)):
    text, x = list(groups.items())[k]
    x = (x | (rng.integers(0, 2, 400) << 31).astype(np.uint32)).reshape(20, 20)
    before = x.copy()
    y = to_half_bits(x, "rn") if k % 2 else to_half_bits(x)
    check_form(y, np.uint16, (20, 20))
    faults += differ(y, before.view(np.float32).astype(np.float16).view(np.uint16), text)
    assert (x == before).all(), "your function changes the array of bits that it is given"
assert not faults, "to nearest, normal results, wrong: " + "; ".join(faults)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "to_half_bits_small", "locked": true, "points": 9, "schema_version": 3, "solution": false, "task": false}
# To nearest below 2^-14: subnormal results and what becomes zero: 9 points
x = float_bits(2.0**-24, 1e-5, 2.0**-25, -(2.0**-25), 3 * 2.0**-26, 2.0**-14 - 2.0**-30)
y = to_half_bits(x)
check_form(y, np.uint16, (6,))
assert y[0] == 0x0001 and y[1] == 0x00A8, "2^-24 and 1e-5 are not lost: the results are subnormal"
assert y[2] == 0x0000 and y[3] == 0x8000, "2^-25 is a tie between 0 and 2^-24, and the sign is kept"
assert y[4] == 0x0001, "3 * 2^-26 is nearer to 2^-24 than to 0"
assert y[5] == 0x0400, "2^-14 - 2^-30 is nearest to the smallest normal half"
### BEGIN HIDDEN TESTS
lower = rng.integers(0, 0x0400, 400)  # zero and the subnormal halves, in steps of 2^-24
lower[:40] = rng.integers(0, 4, 40)
lower[40:50] = 0x3FF
step = 2.0**-24


def near(values, steps):
    """The float32 bits of values, moved by so many float32 steps."""
    return (values.astype(np.float32).view(np.uint32).astype(np.int64) + steps).astype(np.uint32)


groups = {
    "exactly between two subnormal halves": near((lower + 0.5) * step, 0),
    "just above the middle between two subnormal halves": near((lower + 0.5) * step, 1),
    "just below the middle between two subnormal halves": near((lower + 0.5) * step, -1),
    "that are subnormal halves or zero": near(lower * step, 0),
    "somewhere between two subnormal halves": near((lower + rng.random(400)) * step, 0),
    "below 2^-26": near(np.exp2(rng.uniform(-149, -26, 400)), 0),
    "that are subnormal float32": rng.integers(1, 0x800000, 400).astype(np.uint32),
}
faults = []
for k in rng.permutation(len(groups)):
    text, x = list(groups.items())[k]
    x = (x | (rng.integers(0, 2, 400) << 31).astype(np.uint32)).reshape(40, 10)
    y = to_half_bits(x.copy())
    check_form(y, np.uint16, (40, 10))
    faults += differ(y, x.view(np.float32).astype(np.float16).view(np.uint16), text)
assert not faults, "to nearest, subnormal results, wrong: " + "; ".join(faults)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "to_half_bits_ends", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
# To nearest: overflow and infinity; NaN in every mode: 8 points
y = to_half_bits(float_bits(65504, 65519, 65520, -1e30, np.inf, -np.inf))
check_form(y, np.uint16, (6,))
assert y[0] == y[1] == 0x7BFF, "65504 and 65519 are nearest to 65504, the largest half"
assert y[2] == 0x7C00 and y[3] == 0xFC00, "65520 and -1e30 overflow to infinity"
assert y[4] == 0x7C00 and y[5] == 0xFC00, "an infinity stays one"
y = to_half_bits(np.array([0x7FC00000, 0xFF800001], np.uint32))
assert (y & 0x7FFF > 0x7C00).all(), f"NaN must stay NaN, this is {fields(y[0])} and {fields(y[1])}"
assert (y >> 15 == [0, 1]).all(), "NaN must keep its sign"
### BEGIN HIDDEN TESTS
around = (float_bits(65520).astype(np.int64) + rng.integers(-0x0FFF, 0x1000, 200)).astype(np.uint32)
around[:4] = float_bits(65520) + np.array([0, -1, 1, 0]).astype(np.uint32)
far = rng.integers(0x47800000, 0x7F800000, 200).astype(np.uint32)
far[:2] = 0x47800000, 0x7F7FFFFF
groups = {"between 65504 and 65536": around, "of 65536 and more": far}
faults = []
for k in rng.permutation(2):
    text, x = list(groups.items())[k]
    x = x | (rng.integers(0, 2, 200) << 31).astype(np.uint32)
    y = to_half_bits(x.copy())
    check_form(y, np.uint16, (200,))
    with np.errstate(over="ignore"):
        faults += differ(y, x.view(np.float32).astype(np.float16).view(np.uint16), text)
assert not faults, "to nearest, wrong: " + "; ".join(faults)
payload = rng.integers(1, 0x800000, 300)
payload[:100] = rng.integers(1, 0x2000, 100)  # nothing of it among the ten bits that fit
payload[100:200] = 0x7FFFFF - rng.integers(0, 0x2000, 100)  # would carry if it were rounded
sign = rng.integers(0, 2, 300)
for mode in ("rn", "rz", "ru", "rd"):
    y = to_half_bits(((sign << 31) + 0x7F800000 + payload).astype(np.uint32), mode)
    check_form(y, np.uint16, (300,))
    wrong = int((y & 0x7FFF <= 0x7C00).sum())
    assert wrong == 0, f'{wrong} of 300 NaN patterns are no NaN in mode "{mode}"'
    wrong = int((y >> 15 != sign).sum())
    assert wrong == 0, f'{wrong} of 300 NaN patterns have the wrong sign in mode "{mode}"'
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "to_half_bits_directed", "locked": true, "points": 9, "schema_version": 3, "solution": false, "task": false}
# Toward zero, up and down: 9 points
x = float_bits(0.1, -0.1, 1e-30, -1e-30, 1e30, -1e30, np.inf, 0.5)
for mode, expected in {
    "rz": [0x2E66, 0xAE66, 0x0000, 0x8000, 0x7BFF, 0xFBFF, 0x7C00, 0x3800],
    "ru": [0x2E67, 0xAE66, 0x0001, 0x8000, 0x7C00, 0xFBFF, 0x7C00, 0x3800],
    "rd": [0x2E66, 0xAE67, 0x0000, 0x8001, 0x7BFF, 0xFC00, 0x7C00, 0x3800],
}.items():
    y = to_half_bits(x, mode)
    check_form(y, np.uint16, (8,))
    wrong = ", ".join(f"{v:g}" for v in x.view(np.float32)[y != np.array(expected)])
    assert not wrong, f'mode "{mode}" is wrong for {wrong}'
### BEGIN HIDDEN TESTS
special = float_bits(
    0, 65504, 65505, 65519, 65520, 65535, 65536, 2.0**-24, 2.0**-25, 2.0**-14, 2.0**-126, np.inf
)
on_grid = rng.integers(0, 0x7C00, 200).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
groups = {
    "with normal results": rng.integers(0x38800000, 0x477FE000, 200).astype(np.uint32),
    "below 2^-14": rng.integers(0x33000000, 0x38800000, 200).astype(np.uint32),
    "below 2^-25": rng.integers(1, 0x33000000, 200).astype(np.uint32),
    "above 65504": rng.integers(0x477FE001, 0x7F800000, 200).astype(np.uint32),
    "that are halves": on_grid,
    "next to halves": np.maximum(on_grid, 1) + rng.choice(np.array([-1, 1]), 200).astype(np.uint32),
    "at the limits of half": np.concatenate([special] * 10),
}
faults = []
for k in rng.permutation(len(groups)):
    text, x = list(groups.items())[k]
    x = x | (rng.integers(0, 2, x.size) << 31).astype(np.uint32)
    value = x.view(np.float32)
    with np.errstate(over="ignore"):
        nearest = value.astype(np.float16)
    toward_zero = nearest.view(np.uint16) - (np.abs(nearest.astype(np.float64)) > np.abs(value))
    inexact = toward_zero.astype(np.uint16).view(np.float16) != value
    for mode in ("rz", "ru", "rd"):
        away = {"rz": False, "ru": ~np.signbit(value), "rd": np.signbit(value)}[mode]
        y = to_half_bits(x.copy(), mode)
        check_form(y, np.uint16, x.shape)
        faults += differ(y, toward_zero + (inexact & away), f'{text} in mode "{mode}"')
assert not faults, "wrong: " + "; ".join(faults)
### END HIDDEN TESTS

# %% [markdown]
# ## Task 3. From float32 to bfloat16
#
# A bfloat16 number is the upper half of a float32: the same exponent field, 7 bits of mantissa instead of 23. No
# subnormal needs a cut of its own, and rounding is one addition and one shift. What can go wrong in two lines?
# The tie, and the numbers at the top: a NaN whose mantissa is all in the lower half must not become infinity,
# and a NaN with a full mantissa must not carry into the sign. The first happened in more than one
# library, and a NaN that is stored as infinity or as -0 hides the step in which a run went wrong.


# %% nbgrader={"grade": false, "grade_id": "to_bfloat16_bits", "locked": false, "schema_version": 3, "solution": true, "task": false}
def to_bfloat16_bits(x):
    """The bits of float32 numbers rounded once to bfloat16, to nearest with ties to even, as bits.

    x: uint32 array (one dimension or more), patterns of float32; it is not changed. Returns a new uint16 array
    of x's shape. Subnormal numbers are rounded like all others. A finite number at least half a step above the
    largest bfloat16 becomes infinity; an infinity stays one. NaN stays NaN, with any mantissa but 0. The sign is
    always kept, that of zeros and NaN too.
    """
    ### BEGIN SOLUTION
    # a full half step if the last bit kept is 1, so that a tie goes up; one unit less if it is 0
    rounded = (x + 0x7FFF + ((x >> 16) & 1)) >> 16
    nan = (x & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (x >> 16) | 0x0040, rounded).astype(np.uint16)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "to_bfloat16_bits_nearest", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
# Finite numbers: 8 points
x = float_bits(1.0, 257.0, 259.0, -0.1, 3.14159, 0.0)
y = to_bfloat16_bits(x)
check_form(y, np.uint16, (6,))
assert y[0] == 0x3F80, "1 is a bfloat16 number and stays"
assert y[1] == 0x4380 and y[2] == 0x4382, "257 and 259 are ties: 256 and 260 are the even neighbours"
assert y[3] == 0xBDCD and y[4] == 0x4049 and y[5] == 0, "-0.1, 3.14159 or 0 went to the wrong neighbour"
### BEGIN HIDDEN TESTS
low = rng.integers(0, 0x7F7F, 400) << 16  # finite bfloat16 numbers, none of them the largest, as float32
low[:60] = rng.integers(0, 0x80, 60) << 16  # subnormal ones
low[60:90] = ((rng.integers(0, 0xFE, 30) << 7) + 0x7F) << 16  # a carry goes into the exponent
groups = {
    "exactly between two bfloat16 numbers": low + 0x8000,
    "just above the middle between two bfloat16 numbers": low + 0x8001,
    "just below the middle between two bfloat16 numbers": low + 0x7FFF,
    "that are bfloat16 numbers": low,
    "somewhere between two bfloat16 numbers": low + rng.integers(0, 0x10000, 400),
}
faults = []
for k in rng.permutation(len(groups)):
    text, x = list(groups.items())[k]
    x = (x + (rng.integers(0, 2, 400) << 31)).astype(np.uint32).reshape(4, 10, 10)
    before = x.copy()
    y = to_bfloat16_bits(x)
    check_form(y, np.uint16, (4, 10, 10))
    value = before.view(np.float32).astype(np.float64)
    step = np.exp2(np.maximum(np.frexp(value)[1] - 1, -126) - 7.0)
    expected = (np.rint(value / step) * step).astype(np.float32).view(np.uint32) >> 16
    faults += differ(y, expected, text)
    assert (x == before).all(), "your function changes the array of bits that it is given"
assert not faults, "wrong: " + "; ".join(faults)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "to_bfloat16_bits_ends", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
# Overflow, infinity, NaN: 6 points
y = to_bfloat16_bits(np.array([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7FC00000, 0x7F800001], np.uint32))
check_form(y, np.uint16, (5,))
assert y[0] == 0x7F80 and y[1] == 0xFF80, "an infinity stays one"
assert y[2] == 0x7F80, "the largest float32 is more than half a step above the largest bfloat16"
assert (y[3:] & 0x7FFF > 0x7F80).all(), f"NaN must stay NaN: {fields(y[3], 8, 7)} and {fields(y[4], 8, 7)}"
### BEGIN HIDDEN TESTS
payload = rng.integers(1, 0x800000, 300)
payload[:100] = rng.integers(1, 0x10000, 100)  # nothing of it among the seven bits that fit
payload[100:200] = 0x7FFFFF - rng.integers(0, 0x8000, 100)  # would carry if it were rounded
sign = rng.integers(0, 2, 300)
y = to_bfloat16_bits(((sign << 31) + 0x7F800000 + payload).astype(np.uint32))
check_form(y, np.uint16, (300,))
wrong = int((y & 0x7FFF <= 0x7F80).sum())
assert wrong == 0, f"{wrong} of 300 NaN patterns are no NaN"
wrong = int((y >> 15 != sign).sum())
assert wrong == 0, f"{wrong} of 300 NaN patterns have the wrong sign"
top = 0x7F7F0000 + rng.integers(0, 0x10000, 200)  # from the largest bfloat16 to the largest float32
top[:4] = 0x7F7F7FFF, 0x7F7F8000, 0x7F7F0000, 0x7F7FFFFF
sign = rng.integers(0, 2, 200)
y = to_bfloat16_bits(((sign << 31) + top).astype(np.uint32))
check_form(y, np.uint16, (200,))
faults = differ(y, (sign << 15) + np.where(top >= 0x7F7F8000, 0x7F80, 0x7F7F), "from the largest bfloat16 on")
assert not faults, "wrong: " + faults[0]
### END HIDDEN TESTS

# %% [markdown]
# ## Task 4. Stochastic rounding with given bits
#
# A weight of 1.0 in half never moves by an update of 0.0001: the nearest half is always 1.0 again. Stochastic
# rounding goes up *sometimes*, with odds that make the result right on average. Recent GPUs have it as an
# instruction that takes the random bits as an operand, and so will you: then the result can be checked.
#
# Let $d$ be half's step at $|x|$: $2^{E-10}$ for $2^E \le |x| < 2^{E+1}$, and $2^{-24}$ for everything below
# $2^{-14}$. The 32 random bits $r$ make a number $u = r / 2^{32}$ in $[0, 1)$, and the magnitude of the result is
#
# $$ \left\lfloor \frac{|x|}{d} + u \right\rfloor \cdot d. $$
#
# In words: add noise of less than one step, then cut. A number that is a half stays, whatever $r$ is. One that
# lies a quarter of the way up goes up for a quarter of all $r$, those with $u \ge 3/4$. The floor is of the exact
# sum: all 32 bits count. In half's normal range the rest has 13 bits, and the 13 upper bits of $r$ decide; a number
# far below $2^{-24}$ has a longer rest.
#
# At the top the instruction can be told to stay finite, and so do we: a finite number never becomes infinity,
# its magnitude is at most 65504.


# %% nbgrader={"grade": false, "grade_id": "stochastic_half_bits", "locked": false, "schema_version": 3, "solution": true, "task": false}
def stochastic_half_bits(x, r):
    """The bits of float32 numbers rounded stochastically to half, as bits.

    x: uint32 array (one dimension or more), patterns of float32. r: uint32 array of the same shape, one number's
    random bits each. Neither is changed, and no other source of randomness is used. Returns a new uint16 array
    of x's shape: floor(abs(x) / d + r / 2**32) steps d, at most 65504 for a finite x, with x's sign (zeros and
    results that become zero keep it too). An infinity stays one; NaN stays NaN, with any mantissa but 0, and
    keeps its sign.
    """
    ### BEGIN SOLUTION
    sign = (x >> 16) & 0x8000
    magnitude = x & 0x7FFFFFFF
    # patterns are in the order of the numbers: at most that of 65504, for infinity and NaN too at first
    value = np.minimum(magnitude, 0x477FE000).view(np.float32).astype(np.float64)
    exponent = np.frexp(np.maximum(value, 2.0**-14))[1] - 1  # frexp's mantissa lies in [0.5, 1)
    steps = np.ldexp(value, 10 - exponent)  # exact, for only the exponent changes
    whole = np.floor(steps)
    # floor(steps + u) in exact numbers: the fraction has at most 24 bits, the other side is a whole number
    whole += (steps - whole) * 2.0**32 >= 2.0**32 - r
    pattern = ((exponent + 14) << 10) + whole.astype(np.int64)
    special = np.where(magnitude == 0x7F800000, 0x7C00, 0x7E00)
    return (np.where(magnitude < 0x7F800000, pattern, special) | sign).astype(np.uint16)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "stochastic_half_bits_kept", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
# What randomness must not change: halves, the range, infinity and NaN: 6 points
x = float_bits(1.0, -0.15625, -0.0, 2.0**-24, 65504, np.inf, 65519, -1e30)
for r in (0, 0xFFFFFFFF):
    y = stochastic_half_bits(x, np.full(8, r, np.uint32))
    check_form(y, np.uint16, (8,))
    assert (y[:5] == [0x3C00, 0xB100, 0x8000, 0x0001, 0x7BFF]).all(), f"a half moved, with r = {r:#x}"
    assert y[5] == 0x7C00, "an infinity stays one"
    assert y[6] == 0x7BFF and y[7] == 0xFBFF, "a finite number becomes at most 65504"
### BEGIN HIDDEN TESTS
for r in (0, 0xFFFFFFFF, None):
    halves = rng.integers(0, 0x7C01, 300) + (rng.integers(0, 2, 300) << 15)
    halves[:6] = 0x0000, 0x8000, 0x7C00, 0xFC00, 0x0400, 0x83FF
    halves = rng.permutation(halves).astype(np.uint16).reshape(30, 10)
    x = halves.view(np.float16).astype(np.float32).view(np.uint32)
    random = np.full((30, 10), r, np.uint32) if r is not None else rng.integers(0, 2**32, (30, 10), np.uint32)
    before = x.copy(), random.copy()
    y = stochastic_half_bits(x, random)
    check_form(y, np.uint16, (30, 10))
    faults = differ(y, halves, "that are halves (zeros and infinities are too) did not stay")
    assert not faults, faults[0]
    assert (x == before[0]).all() and (random == before[1]).all(), (
        "your function changes an array it is given"
    )
x = rng.integers(0x477FE001, 0x7F800000, 200)  # above 65504
x[:40] = rng.integers(0x477FE001, 0x47800000, 40)  # below 65536
x[40] = 0x7F7FFFFF  # the largest float32
sign = rng.integers(0, 2, 200)
random = rng.integers(0, 2**32, 200, np.uint32)
random[::4], random[1::4] = 0xFFFFFFFF, 0
y = stochastic_half_bits((x + (sign << 31)).astype(np.uint32), random)
faults = differ(
    y, 0x7BFF + (sign << 15), "that are finite and above 65504 did not become 65504 with their sign"
)
assert not faults, faults[0]
payload = rng.integers(1, 0x800000, 200)
payload[:80] = rng.integers(1, 0x2000, 80)
payload[80:160] = 0x7FFFFF - rng.integers(0, 0x2000, 80)
y = stochastic_half_bits(((sign << 31) + 0x7F800000 + payload).astype(np.uint32), random)
wrong = int(((y & 0x7FFF <= 0x7C00) | (y >> 15 != sign)).sum())
assert wrong == 0, f"{wrong} of 200 NaN patterns are no NaN or have the wrong sign"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "stochastic_half_bits_odds", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
# Up or down in half's normal range: 8 points
x = float_bits(1 + 2.0**-12)  # a quarter of the way from 1 to the next half
for r, expected in ((0, 0x3C00), (0xBFFFFFFF, 0x3C00), (0xC0000000, 0x3C01), (0xFFFFFFFF, 0x3C01)):
    y = stochastic_half_bits(x, np.array([r], np.uint32))
    check_form(y, np.uint16, (1,))
    assert y[0] == expected, f"1 + 2^-12 goes {'up' if expected & 1 else 'down'} with r = {r:#x}"
x = np.full(4096, float_bits(-(2 - 2.0**-12))[0])  # three quarters of the way from -1.999 to -2
y = stochastic_half_bits(x, (np.arange(4096) << 20).astype(np.uint32))
assert set(y.tolist()) == {0xBFFF, 0xC000}, "a number has only two neighbours, here 1.999 and 2 with a minus"
assert (y == 0xC000).sum() == 3072, f"{(y == 0xC000).sum()} of 4096 went away from zero, it should be 3072"
### BEGIN HIDDEN TESTS
low = rng.integers(0x0400, 0x7BFF, 600)
low[:60] = (rng.integers(1, 30, 60) << 10) + 0x3FF  # the next half is a power of two
rest = rng.integers(1, 0x2000, 600)
rest[:20], rest[20:40] = 1, 0x1FFF
turn = 2**32 - (rest << 19)  # the smallest r that goes up
groups = {
    "with random bits that just take them up": turn,
    "with random bits that just leave them": turn - 1,
    "with any random bits": rng.integers(0, 2**32, 600),
    "with all random bits 1": np.full(600, 2**32 - 1),
    "with all random bits 0": np.zeros(600, np.int64),
}
faults = []
for k in rng.permutation(len(groups)):
    text, r = list(groups.items())[k]
    sign = rng.integers(0, 2, 600)
    x = low.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32) + rest + (sign << 31)
    y = stochastic_half_bits(x.astype(np.uint32).reshape(60, 10), r.astype(np.uint32).reshape(60, 10))
    check_form(y, np.uint16, (60, 10))
    faults += differ(y, low + (r >= turn) + (sign << 15), text)
assert not faults, "normal results, wrong: " + "; ".join(faults)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "stochastic_half_bits_small", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
# Up or down below 2^-14, where the step is 2^-24: 6 points
x = float_bits(2.0**-26, 2.0**-26, -5.75 * 2.0**-24, -5.75 * 2.0**-24, 2.0**-60)
r = np.array([0xBFFFFFFF, 0xC0000000, 0x3FFFFFFF, 0x40000000, 0xFFFFFFFF], np.uint32)
y = stochastic_half_bits(x, r)
check_form(y, np.uint16, (5,))
assert y[0] == 0 and y[1] == 1, "2^-26 is a quarter of the way from 0 to 2^-24"
assert y[2] == 0x8005 and y[3] == 0x8006, "-5.75 steps become -5 or -6 steps"
assert y[4] == 0, "2^-60 is so far below a step that even the largest r leaves it at 0"
### BEGIN HIDDEN TESTS
tiny = np.exp2(rng.uniform(-52, -24, 600))
value = rng.integers(0, 0x400, 600) * 2.0**-24 * (rng.random(600) < 0.5) + tiny
value[:20] = 2.0**-14 - np.exp2(rng.uniform(-38, -25, 20))
value = value.astype(np.float32)
steps = value.astype(np.float64) * 2.0**24
whole = np.floor(steps)
# the smallest r that goes up; 2^32 if none does
turn = np.ceil((1 - (steps - whole)) * 2.0**32).astype(np.int64)
groups = {
    "with random bits that just take them up": np.minimum(turn, 2**32 - 1),
    "with random bits that just leave them": turn - 1,
    "with any random bits": rng.integers(0, 2**32, 600),
    "with all random bits 1": np.full(600, 2**32 - 1),
    "with all random bits 0": np.zeros(600, np.int64),
}
faults = []
for k in rng.permutation(len(groups)):
    text, r = list(groups.items())[k]
    sign = rng.integers(0, 2, 600)
    x = value.view(np.uint32) + (sign << 31)
    y = stochastic_half_bits(x.astype(np.uint32).reshape(20, 30), r.astype(np.uint32).reshape(20, 30))
    check_form(y, np.uint16, (20, 30))
    faults += differ(y, whole.astype(np.int64) + (r >= turn) + (sign << 15), text)
far = np.exp2(rng.uniform(-149, -57, 100)).astype(np.float32).view(np.uint32)
y = stochastic_half_bits(far, np.full(100, 2**32 - 1, np.uint32))
faults += differ(y, np.zeros(100), "below 2^-57, which no random bits can take up,")
assert not faults, "results below 2^-14, wrong: " + "; ".join(faults)
### END HIDDEN TESTS

# %% [markdown]
# ## What it is good for
#
# No points here. A thousand updates of 0.0001 for 200 weights of 1.0, computed in float32 and stored in 16 bits
# after each, with your functions.

# %%
w = {"half, to nearest": float_bits(*[1.0] * 200)}
w["half, stochastic"] = w["bfloat16, to nearest"] = w["half, to nearest"]
for _ in range(1000):
    for name, bits in w.items():
        updated = (bits.view(np.float32) + np.float32(1e-4)).view(np.uint32)
        if name == "bfloat16, to nearest":
            stored = decode(to_bfloat16_bits(updated).astype(np.uint32), 8, 7)
        elif name == "half, to nearest":
            stored = decode(to_half_bits(updated).astype(np.uint32), 5, 10)
        else:
            r = rng.integers(0, 2**32, bits.shape, np.uint32)
            stored = decode(stochastic_half_bits(updated, r).astype(np.uint32), 5, 10)
        w[name] = stored.astype(np.float32).view(np.uint32)
for name, bits in w.items():
    print(
        f"{name:22} mean {bits.view(np.float32).mean():.4f}, standard deviation {bits.view(np.float32).std():.4f}"
    )

# %% [markdown]
# ## Question (12 points)
#
# Answer in your own words, with numbers, about 15 lines in all.
#
# 1. The first and the last line just printed do not move at all. From which update on would a weight of 1.0
#    move, in half and in bfloat16, upwards and downwards?
# 2. The stochastic weights have the right mean. With which odds does one update move a weight, and where does
#    the standard deviation come from? Estimate it without the computer, and compare.
# 3. A colleague converts gradients to half with "rz", because it never makes an infinity. What does that do to
#    a gradient above 65504, to a very small one and to a sum of many gradients, and why is it a bad idea if a loss
#    scaler watches the run?

# %% [markdown] nbgrader={"grade": true, "grade_id": "written", "locked": false, "points": 12, "schema_version": 3, "solution": true, "task": false}
# **Model answer**
#
# 1. An update is lost if the sum is rounded back to 1.0: if it is at most half a step, because 1.0 is even and wins
#    the tie. Above 1 half's step is $2^{-10}$, so an update must exceed $2^{-11} \approx 4.9 \cdot 10^{-4}$. Below 1
#    steps are half as long: $2^{-12} \approx 2.4 \cdot 10^{-4}$. In bfloat16 the steps are $2^{-7}$ and $2^{-8}$, so the
#    limits are $2^{-8} \approx 3.9 \cdot 10^{-3}$ and $2^{-9} \approx 2.0 \cdot 10^{-3}$. 0.0001 is below all four.
# 2. The odds are the part of a step that was added, $p = 10^{-4} / 2^{-10} \approx 0.102$; then the weight moves by a
#    whole step. The number of moves in 1000 updates is binomial with mean $1000 p \approx 102$ and standard deviation
#    $\sqrt{1000\, p\, (1 - p)} \approx 9.6$, so the weight ends at $1.1 \pm 9.6 \cdot 2^{-10} \approx 1.1 \pm 0.0094$, which
#    is what was printed. The error of the mean is gone, the noise of a single weight is the price; it grows with the
#    square root of the number of updates, the update itself with the number.
# 3. A gradient above 65504 becomes 65504: it is wrong, by any factor, and finite. Below $2^{-24}$ it becomes 0, where
#    nearest would still have given $2^{-24}$ above $2^{-25}$. Every other one loses half a step of magnitude on
#    average: the errors all have the same direction, they don't cancel in a sum, and so the sum is too small. And the
#    scaler needs the infinity: it is the signal to skip the step and to lower the scale. With "rz" no overflow is ever
#    seen, the scale grows on, and the optimizer steps with clipped gradients.
#
# **Mark scheme**
#
# - 4 points for 1: half a step and the tie (2), the smaller step below 1 (1), the numbers of both formats (1).
# - 4 points for 2: the odds as a fraction of a step (1), the mean (1), the standard deviation from independent moves,
#   any derivation (1), a number near 0.009 and the comparison (1).
# - 4 points for 3: saturation is finite but wrong (1), small ones become 0 (1), bias in one direction (1), the scaler is
#   blind (1).
