"""Exact casts, limits, neighbours and stochastic rounding, against NumPy's casts and arithmetic."""

import math
import warnings

import numpy as np
import pytest

from minamp import halves
from minamp.formats import (
    FORMATS,
    bfloat16,
    bits,
    cast,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    float64,
    format_of,
    is_floating,
    is_half,
    narrow,
    neighbours,
    round_to,
    stochastic_round,
    tf32,
    ulp,
    widen,
)

HALVES = [float16, bfloat16]
LOW = [float16, bfloat16, float8_e4m3fn, float8_e5m2]
INF, NAN = math.inf, math.nan
ids = {"ids": lambda d: d.name if hasattr(d, "name") else None}


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with np.errstate(all="warn"):
            yield


def numpy_cast(a, dtype):
    """NumPy's own cast, kept quiet: the reference."""
    with np.errstate(all="ignore"):
        return np.asarray(a).astype(dtype)


def patterns(dtype):
    return np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)


def finite(dtype):
    """Every positive finite value from 0 up, as float64."""
    a = numpy_cast(patterns(dtype), float64)
    return a[: np.flatnonzero(~np.isfinite(a))[0]]


def same(a, b):
    """Equal bit for bit, except that any NaN equals any NaN."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape
    wide_a, wide_b = numpy_cast(a, float64), numpy_cast(b, float64)
    u = f"u{a.dtype.itemsize}"
    np.testing.assert_array_equal(np.isnan(wide_a), np.isnan(wide_b))
    keep = ~np.isnan(wide_a)
    np.testing.assert_array_equal(a[keep].view(u), b[keep].view(u))
    return True


def in_small_pieces(f, a):
    return np.concatenate([f(a[i : i + 500]) for i in range(0, a.size, 500)])


# ----------------------------------------------------------------------------------------------------- limits


TABLE = {  # bits, exponent, mantissa, bias, max, overflow, smallest normal, smallest subnormal, flush, eps
    float32: (
        32,
        8,
        23,
        127,
        3.4028234663852886e38,
        3.4028235677973366e38,
        2**-126,
        2**-149,
        2**-150,
        2**-23,
    ),
    tf32: (19, 8, 10, 127, 3.4011621342146535e38, 3.401992901712019e38, 2**-126, 2**-136, 2**-137, 2**-10),
    float16: (
        16,
        5,
        10,
        15,
        65504,
        65520,
        6.103515625e-05,
        5.960464477539063e-08,
        2.9802322387695312e-08,
        2**-10,
    ),
    bfloat16: (
        16,
        8,
        7,
        127,
        3.3895313892515355e38,
        3.39617752923046e38,
        2**-126,
        2**-133,
        2**-134,
        0.0078125,
    ),
    float8_e4m3fn: (8, 4, 3, 7, 448, math.nextafter(464, INF), 0.015625, 0.001953125, 9.765625e-04, 0.125),
    float8_e5m2: (8, 5, 2, 15, 57344, 61440, 6.103515625e-05, 1.52587890625e-05, 2**-17, 0.25),
}


@pytest.mark.parametrize("dtype", TABLE, **ids)
def test_limits(dtype):
    f = format_of(dtype)
    limits = f.max, f.overflow, f.smallest_normal, f.smallest_subnormal, f.flush, f.eps
    assert (f.bits, f.exponent_bits, f.mantissa_bits, f.bias, *limits) == TABLE[dtype]
    assert all(type(x) is float for x in limits)
    assert f.has_inf == (dtype is not float8_e4m3fn)
    below = {float16: 65472, bfloat16: 3.3762391092936863e38, float8_e4m3fn: 416, float8_e5m2: 49152}
    assert neighbours(f.max, dtype)[0] == below.get(dtype, neighbours(f.max, dtype)[0])


def test_double_limits():
    f, info = format_of(float64), np.finfo(float64)
    assert (f.max, f.smallest_normal, f.smallest_subnormal, f.eps) == (info.max, info.tiny, 5e-324, info.eps)
    assert (f.overflow, f.flush) == (INF, 0.0)  # both lie outside what a Python float can hold


@pytest.mark.parametrize("dtype", LOW, **ids)
def test_flush_and_overflow_are_where_narrow_changes(dtype):
    f = format_of(dtype)
    at = np.array([f.flush, math.nextafter(f.flush, 1), math.nextafter(f.overflow, 0), f.overflow])
    zero, tiny, largest, beyond = narrow(at, dtype).astype(float64)
    assert (zero, tiny, largest) == (0, f.smallest_subnormal, f.max)
    assert beyond == INF if f.has_inf else math.isnan(beyond)


def test_counts():
    counts = {float16: (31743, 1023), bfloat16: (32639, 127), float8_e4m3fn: (126, 7), float8_e5m2: (123, 3)}
    for dtype, (positive, subnormal) in counts.items():
        a = finite(dtype)[1:]
        assert (a.size, (a < format_of(dtype).smallest_normal).sum()) == (positive, subnormal)


def test_lookup():
    assert format_of("float16") is format_of(np.float16) is FORMATS[float16]
    assert format_of(tf32) is tf32 and tf32 not in FORMATS.values() and tf32.dtype == float32
    assert [is_half(d) for d in FORMATS] == [False, False, True, True, False, False]
    assert all(is_floating(d) for d in FORMATS) and not is_floating(np.dtype(np.int32))


# ------------------------------------------------------------------------------------------- nearest rounding


@pytest.mark.parametrize("dtype", LOW, **ids)
def test_every_pattern_there_and_back(dtype):
    a = np.tile(patterns(dtype), max(1, 8192 // 2 ** (8 * dtype.itemsize)))
    wide = widen(a)
    same(wide, a.astype(float32))
    same(in_small_pieces(widen, a), wide)
    for way in (narrow, lambda x, d: in_small_pieces(lambda y: narrow(y, d), x)):
        same(way(wide, dtype), a)
        same(way(numpy_cast(wide, float64), dtype), a)
    same(round_to(wide, dtype), wide)
    same(cast(cast(a, float64), dtype), a)


def test_widening_of_arrays_without_and_with_many_subnormals():
    h = patterns(float16)
    normal = h[(np.abs(h.astype(float32)) >= 2**-14)]  # the integer path, without subnormals
    special = np.concatenate([np.tile(normal, 3), h])  # the integer path, with some, with infinities and NaN
    small = h[:1024].repeat(10)  # the table
    for a in (normal, special, small, -small, np.zeros(9000, float16), -np.zeros(9000, float16)):
        assert (widen(a).view("u4") == a.astype(float32).view("u4")).all()


def step_towards(a, end):
    with np.errstate(all="ignore"):
        return np.nextafter(a, a.dtype.type(end))


def around_boundaries(dtype, through):
    """Every value, every midpoint and the neighbours of both in float32 or float64; and the answers."""
    grid = finite(dtype)
    f = format_of(dtype)
    step = f.max - grid[-2]
    ends = np.append(grid, f.max + step) if f.has_inf else grid
    middle = (ends[:-1] + ends[1:]) / 2
    x, want = [], []
    codes = np.arange(ends.size)
    values = np.append(grid, INF)[: ends.size]
    for offset in (-INF, 0, INF):
        for points, down in ((middle, codes[:-1]), (grid, None)):
            at = points.astype(through)
            assert (at == points).all()
            at = step_towards(at, offset) if offset else at
            if down is None:
                to = values[: grid.size]  # one float32 step off a value changes nothing
            else:
                even = down + down % 2
                to = values[{-INF: down, 0: even, INF: down + 1}[offset]]
            x.append(at)
            want.append(to)
    x = np.concatenate(x)
    want = np.copysign(np.concatenate(want), x).astype(dtype)  # one step below 0 gives -0
    return np.concatenate([x, -x]), np.concatenate([want, -want])


@pytest.mark.parametrize("through", [float32, float64], **ids)
@pytest.mark.parametrize("dtype", LOW, **ids)
def test_every_rounding_boundary(dtype, through):
    x, want = around_boundaries(dtype, through)
    same(narrow(x, dtype), want)
    same(in_small_pieces(lambda y: narrow(y, dtype), x), want)
    if through == float32:
        same(round_to(x, dtype), want.astype(float32))
        same(in_small_pieces(lambda y: round_to(y, dtype), x), want.astype(float32))


@pytest.mark.parametrize("dtype", HALVES, **ids)
def test_random_float32_patterns(dtype):
    x = np.random.default_rng(0).integers(0, 2**32, 300_000, np.uint32)
    x[:100_000] = x[:100_000] & 0x8FFFFFFF | 0x30000000  # exponents of half
    x = x.view(float32)
    want = numpy_cast(x, dtype)
    same(narrow(x, dtype), want)
    same(round_to(x, dtype), want.astype(float32))


@pytest.mark.parametrize("size", [8, 5000])
@pytest.mark.parametrize("dtype", LOW, **ids)
def test_nan_infinity_and_zero(dtype, size):
    payloads = np.array([0x7F800001, 0x7F801FFF, 0x7F802000, 0x7FC00000, 0x7FFFFFFF], np.uint32)
    nan = np.resize(np.concatenate([payloads, payloads | 0x80000000]), size).view(float32)
    doubles = np.resize(np.array([0x7FF0000000000001, 0xFFF0000000000001], np.uint64), size).view(float64)
    for a in (nan, doubles):
        assert np.isnan(narrow(a, dtype).astype(float32)).all()
        assert np.isnan(cast(a, float32)).all()
    assert np.isnan(round_to(nan, dtype)).all()
    special = np.resize(np.array([INF, -INF, 0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30, 1e-42, -1e-42]), size)
    want = numpy_cast(numpy_cast(special, float32), dtype)
    same(narrow(special, dtype), want)
    same(narrow(numpy_cast(special, float32), dtype), want)
    same(round_to(numpy_cast(special, float32), dtype), want.astype(float32))


@pytest.mark.parametrize("dtype", HALVES, **ids)
@pytest.mark.parametrize("size", [8, 70_000])
def test_arrays_of_one_value(dtype, size):
    """What a piece of an array contains decides which steps are taken, so try pieces of one thing."""
    tiny = [0, 2**-26, 2**-25, 3 * 2**-26, 2**-24, 2**-15, 2**-14]
    values = [*tiny, 1, 32768, 65519, 65520, 65536, 1e30, 3.4e38, INF, NAN]
    for x in values + [-x for x in values]:
        a = np.full(size, x, float32)
        want = numpy_cast(a, dtype)
        same(narrow(a, dtype), want)
        same(round_to(a, dtype), numpy_cast(want, float32))
        same(widen(want), numpy_cast(want, float32))


def test_known_roundings_to_half():
    pairs = [
        (2049, 2048),
        (2051, 2052),
        (4098, 4096),
        (4102, 4104),
        (1 + 2**-11, 1),
        (1 + 3 * 2**-11, 1.001953125),
    ]
    pairs += [
        (0.1, 0.0999755859375),
        (1 / 3, 0.333251953125),
        (2**-25, 0),
        (3 * 2**-25, 2**-23),
        (5 * 2**-25, 2**-23),
    ]
    pairs += [
        (65519.99, 65504),
        (65520, INF),
        (65536, INF),
        (1e-8, 0),
        (1e-5, 1.0013580322265625e-05),
        (70000, INF),
    ]
    x, want = np.array(pairs).T
    assert narrow(x, float16).tolist() == want.tolist()
    assert narrow(x.astype(float32), float16).tolist() == want.tolist()
    assert round_to(x.astype(float32), float16).tolist() == round_to(x, float16).tolist() == want.tolist()
    # float64 is rounded once: by way of float32 this would be 1
    assert round_to(np.full(5000, 1 + 2.0**-11 + 2.0**-40), float16).tolist() == [1 + 2.0**-10] * 5000
    assert narrow(np.array([257, 259, 0.1, 3.14159]), bfloat16).tolist() == [
        256,
        260,
        0.10009765625,
        3.140625,
    ]
    assert len(set(narrow(np.arange(4096.0), float16).tolist())) == 3073
    with np.errstate(all="ignore"):
        assert (
            math.isnan(narrow(np.float32(464.01), float8_e4m3fn))
            and narrow(np.float32(464), float8_e4m3fn) == 448
        )


def test_double_is_rounded_once():
    x = np.array([1 + 2**-11 + 2**-40, 2**-25 + 2**-60, 65520 - 1e-6])
    assert narrow(x, float16).tolist() == [1.0009765625, 2**-24, 65504]
    assert narrow(np.resize(x, 6000), float16).tolist() == [1.0009765625, 2**-24, 65504] * 2000
    twice = narrow(x.astype(float32), float16).tolist()
    assert twice == [1.0, 0.0, INF]
    assert narrow(np.array(1 + 2**-8 + 2**-40), bfloat16) == 1.0078125
    assert narrow(np.array(1 + 2**-4 + 2**-40), float8_e4m3fn) == 1.125
    assert narrow(np.array(464 + 2e-14 * 464), float8_e4m3fn) != 448
    assert bits(1 + 2**-11 + 2**-40, tf32) == "0 01111111 0000000001"


# ---------------------------------------------------------------------------------------- layout, out, errors


def layouts():
    base = np.random.default_rng(1).standard_normal((8, 6, 20, 30)).astype(float32)
    yield "C", base
    yield "F", np.asfortranarray(base)
    yield "channels last", base.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)
    yield "gaps", base[:, ::2, :, 3:]
    yield "channels last with gaps", base.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)[:, :, 2:]
    yield "reversed", base[::-1, :, ::-1]
    yield "broadcast", np.broadcast_to(base[:, :1], base.shape)
    yield "one channel", base[:, :1, :, None].swapaxes(0, 1)
    yield "0-d", base[0, 0, 0, :1].reshape(())
    yield "0-d view", np.array(1e9, float32)
    yield "empty", base[:, :0]


@pytest.mark.parametrize("dtype", HALVES, **ids)
@pytest.mark.parametrize("a", [pytest.param(a, id=name) for name, a in layouts()])
def test_layout_is_kept(a, dtype):
    h = numpy_cast(a, dtype)
    back = h.astype(float32)
    strided = np.empty((*h.shape, 2), dtype)[..., 0]
    strided[...] = h
    for result, want in (
        (narrow(a, dtype), h),
        (narrow(a.astype(float64), dtype), h),
        (widen(h), back),
        (widen(strided), strided.astype(float32)),
        (round_to(a, dtype), back),
        (cast(a, dtype), h),
    ):
        assert isinstance(result, np.ndarray)
        same(result, want)
        moving = [i for i in range(a.ndim) if a.shape[i] > 1]  # an axis of length 1 has no stride to speak of
        assert [result.strides[i] for i in moving] == [want.strides[i] for i in moving]
    for out in (a.copy(order="K"), np.empty(a.shape, float32), np.empty((*a.shape, 2), float32)[..., 1]):
        assert round_to(a, dtype, out=out) is out
        same(out, back)
    in_place = a.copy(order="K")
    assert round_to(in_place, dtype, out=in_place) is in_place
    same(in_place, back)


def test_in_place_through_views():
    x = np.random.default_rng(2).standard_normal(200_001).astype(float32)
    want = narrow(x, float16).astype(float32)
    shifted = x.copy()
    round_to(shifted[:-1], float16, out=shifted[1:])
    same(shifted[1:], want[:-1])
    every_other = x.copy()
    round_to(every_other[::2], float16, out=every_other[::2])
    same(every_other[::2], want[::2])
    same(every_other[1::2], x[1::2])


def test_nothing_to_do_returns_the_array_itself():
    x = np.ones(3, float32)
    assert widen(x) is x and cast(x, float32) is x and round_to(x, float32) is x and round_to(x, float64) is x
    h, i = np.ones(3, bfloat16), np.ones(3, np.int64)
    assert narrow(h, bfloat16) is h and cast(h, "bfloat16") is h and widen(i) is i


def test_error_texts():
    names = "float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2"
    x = np.ones(2, float32)
    calls = [
        lambda: format_of(np.int32),
        lambda: format_of("complex64"),
        lambda: format_of("not a dtype"),
        lambda: narrow(x, np.dtype(np.int8)),
        lambda: narrow(x, float64),
        lambda: narrow(np.ones(2, np.int64), float16),
        lambda: cast(np.ones(2, complex), float16),
        lambda: cast(x, np.complex64),
        lambda: cast(x, "half a byte"),
        lambda: round_to(x.astype(float16), float16),
        lambda: stochastic_round(np.ones(2, int), float16, np.random.default_rng(0)),
    ]
    named = [
        "int32",
        "complex64",
        "not",
        "int8",
        "float64",
        "int64",
        "complex128",
        "complex64",
        "half a byte",
    ]
    named += ["float16", "int64"]
    for call, name in zip(calls, named, strict=True):
        with pytest.raises(
            TypeError, match=rf"unsupported dtype {name}.*supported are {names}: convert first"
        ):
            call()
    with pytest.raises(ValueError, match=r"out has shape \(3,\) but a has shape \(2,\)"):
        round_to(x, float16, out=np.ones(3, float32))


# --------------------------------------------------------------------------------------------------- any cast


def test_cast_between_all_formats():
    x = np.array([0.0, -0.0, 1, -2.5, 3e-5, 300, 1e6, INF, -INF, NAN])
    for source in FORMATS:
        a = cast(x, source)
        exact = a.astype(float64)
        for target in FORMATS:
            with np.errstate(all="ignore"):
                same(cast(a, target), exact.astype(target))  # a handful of values that float32 holds


def test_cast_integers_and_bools():
    assert cast(np.array([True, False]), bfloat16).tolist() == [1, 0]
    assert cast(np.array([2049, 65519, 65520, -70000]), float16).tolist() == [2048, 65504, INF, -INF]
    assert cast(np.array([257, -259], np.int16), bfloat16).tolist() == [256, -260]
    assert cast(np.array([1.9, -1.9, 0], bfloat16), np.int32).tolist() == [1, -1, 0]
    assert cast(np.array([NAN, 0.5, 0], float16), bool).tolist() == [True, True, False]
    cast(np.array([NAN, INF, 1e30]), np.int32)  # undefined values, but no warning
    tie = 2**62 + 2**54  # between two bfloat16 numbers; float32 and float64 both lose the 1
    for dtype, sign in ((np.int64, 1), (np.int64, -1), (np.uint64, 1)):
        a = np.array([tie - 1, tie, tie + 1], dtype) * dtype(sign)
        assert cast(a, bfloat16).astype(float64).tolist() == [
            sign * 2.0**62,
            sign * 2.0**62,
            sign * (2.0**62 + 2.0**55),
        ]
    assert cast(np.array([-(2**63)]), bfloat16).astype(float64).tolist() == [-(2.0**63)]
    assert cast(np.array([2**64 - 1], np.uint64), bfloat16).astype(float64).tolist() == [2.0**64]
    assert cast(3, float16) == 3 and cast(1e-8, float16) == 0


# ---------------------------------------------------------------------------------------- stochastic rounding


@pytest.mark.parametrize("dtype", LOW, **ids)
def test_stochastic_rounding_is_unbiased(dtype):
    f, n = format_of(dtype), 40_000
    for x in (
        1 + 0.3 * f.eps,
        -1 - 0.9 * f.eps,
        0.3 * f.smallest_subnormal,
        2.5 * f.smallest_subnormal,
        f.max * 0.99,
    ):
        below, above = neighbours(x, dtype)
        r = stochastic_round(np.full(n, x), dtype, np.random.default_rng(3)).astype(float64)
        assert set(r) == {below, above}
        assert abs(r.mean() - x) < 5 * (above - below) / 2 / math.sqrt(n)


@pytest.mark.parametrize("dtype", LOW, **ids)
def test_stochastic_rounding_leaves_the_grid_alone(dtype):
    a = patterns(dtype)
    for source in (float32, float64):
        same(stochastic_round(numpy_cast(a, source), dtype, np.random.default_rng(4)), a)


def test_stochastic_rounding_past_the_end_seeds_and_layout():
    x = np.array([65504, 65519.9, 65520, 1e300, -1e300])
    assert stochastic_round(x, float16, np.random.default_rng(0)).tolist() == [65504, 65504, INF, INF, -INF]
    a = np.random.default_rng(5).standard_normal((30, 40)).astype(float32).T
    one, two = (stochastic_round(a, bfloat16, np.random.default_rng(6)) for _ in range(2))
    assert one.dtype == bfloat16 and one.strides == a.astype(bfloat16).strides
    same(one, two)
    third = stochastic_round(a.astype(float64) / 3, float32, np.random.default_rng(6))
    assert third.dtype == float32 and np.abs(third - a / 3).max() <= 2**-23
    assert stochastic_round(np.array(0.1), float16, np.random.default_rng(0)).shape == ()
    on_tf32 = stochastic_round(a, tf32, np.random.default_rng(0))
    same(round_to(on_tf32, tf32), on_tf32)


def test_stochastic_weight_updates_arrive():
    """1000 updates of 1e-4 to a weight of 1.0 in half: nearest rounding loses all of them."""
    rng = np.random.default_rng(7)
    w = np.ones(200, float16)
    for _ in range(1000):
        w = stochastic_round(w.astype(float32) - np.float32(1e-4), float16, rng)
    assert abs(w.astype(float64).mean() - 0.9) < 0.002
    assert narrow(np.float32(1 - 1e-4), float16) == 1


# -------------------------------------------------------------------------------------------- looking at them


@pytest.mark.parametrize("dtype", LOW, **ids)
def test_neighbours_and_ulp_agree_with_the_list_of_all_values(dtype):
    f, a = format_of(dtype), finite(dtype)
    line = np.concatenate([-a[:0:-1], a])
    below, above = neighbours(line, dtype)
    end = INF if f.has_inf else NAN
    np.testing.assert_array_equal(below, np.append(-end, line[:-1]))
    np.testing.assert_array_equal(above, np.append(line[1:], end))
    gaps = (line[:-1] + line[1:]) / 2
    np.testing.assert_array_equal(neighbours(gaps, dtype)[0], line[:-1])
    np.testing.assert_array_equal(neighbours(gaps, dtype)[1], line[1:])
    np.testing.assert_array_equal(ulp(a, dtype)[:-1], np.diff(a))


@pytest.mark.parametrize("dtype", [float32, float64], **ids)
def test_neighbours_are_nextafter(dtype):
    x = numpy_cast([0, 1, -1, 1.5, 2**-126, 2.0**-130, 3e38, -1e-45], dtype)
    np.testing.assert_array_equal(neighbours(x, dtype)[0], step_towards(x, -INF))
    np.testing.assert_array_equal(neighbours(x, dtype)[1], step_towards(x, INF))


def test_neighbours_of_single_numbers():
    assert neighbours(1, float16) == (1 - 2**-11, 1 + 2**-10)
    assert neighbours(0.1, float16) == (0.0999755859375, 0.10003662109375)
    assert neighbours(1e6, float16) == (65504, INF) and neighbours(INF, float16) == (65504, INF)
    assert neighbours(-INF, float16) == (-INF, -65504)
    assert all(map(math.isnan, neighbours(NAN, float16)))
    assert (ulp(1, float16), ulp(2049, float16), ulp(0, float16), ulp(60000, float16)) == (
        2**-10,
        2,
        2**-24,
        32,
    )
    assert ulp(INF, float16) == INF and math.isnan(ulp(NAN, float16)) and type(ulp(1, float16)) is float


def test_bits():
    assert bits(1, float16) == "0 01111 0000000000"
    assert bits(-0.0, float16) == "1 00000 0000000000"
    assert bits(65520, float16) == "0 11111 0000000000"
    assert bits(2**-24, float16) == "0 00000 0000000001"
    assert bits(-0.1, bfloat16) == "1 01111011 1001101"
    assert bits(448, float8_e4m3fn) == "0 1111 110" and bits(INF, float8_e4m3fn) == "0 1111 111"
    assert bits(57344, float8_e5m2) == "0 11110 11"
    assert bits(1, float32) == "0 01111111 " + "0" * 23
    assert bits(0.5, float64) == "0 01111111110 " + "0" * 52
    assert bits(1 + 2**-10 + 2**-11, tf32) == "0 01111111 0000000010"


def test_the_scratch_constant_survives():
    assert (halves._TINY == 2**-14).all()
