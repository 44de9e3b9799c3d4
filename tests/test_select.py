"""Choosing by bits gives what np.where gives, bit for bit, whatever the dtype, the layout and what is broadcast."""

import ml_dtypes
import numpy as np
import pytest

from minamp.backends.select import keep, where

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64, np.bool_]


def values(dtype, shape, seed):
    """Random bit patterns: infinities, nans of all kinds, subnormals and zeros of both signs are among them."""
    rng, size = np.random.default_rng(seed), np.dtype(dtype).itemsize
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * size), dtype).reshape(shape)


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(*(np.ascontiguousarray(x).view(np.uint8) for x in (a, b)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("rows", [3, 300])  # 30 and 3000 values: np.where itself, and the bits
def test_where_is_numpys(dtype, rows):
    a, b = values(dtype, (rows, 10), 1), values(dtype, (rows, 10), 2)
    condition = np.random.default_rng(3).random((rows, 10)) < 0.5
    one = a.reshape(-1)[:1].reshape(())
    for c, x, y in (
        (condition, a, b),
        (condition, a[:1], b[:, :1]),
        (condition, one, b),
        (condition, a, one),
        (condition.T, a.T, b.T),
        (condition[::-1, ::2], a[:, 1::2], b[::-1, :5]),
        (condition[:, :1], a, b),
        (condition, values(dtype, (2, rows, 10), 4), b),
    ):
        same(where(c, x, y), np.where(c, x, y))


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, float("inf"), float("nan"), 3])
def test_numbers_take_the_dtype_of_the_array(number):
    a = values(np.float32, (5000,), 1)
    condition = a > 0
    same(where(condition, a, number), np.where(condition, a, number))
    same(where(condition, number, a), np.where(condition, number, a))
    same(where(condition, number, 2.0), np.where(condition, number, 2.0))
    with np.errstate(invalid="ignore"):  # NumPy's word for a signalling nan that becomes float64
        same(where(condition, a, np.float64(2.0)), np.where(condition, a, np.float64(2.0)))
    same(where(condition.astype(np.int8), a, number), np.where(condition, a, number))


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=lambda d: np.dtype(d).name)
def test_keep_is_where_with_zeros(dtype):
    x = values(dtype, (100, 50), 1)
    condition = np.random.default_rng(2).random(x.shape) < 0.5
    zeros = np.zeros_like(x)
    same(keep(x, condition), np.where(condition, x, zeros))
    same(keep(x.T, condition.T), np.where(condition, x, zeros).T)
    out = np.ones_like(x)[:, ::-1]
    keep(x, condition, out)
    same(out, np.where(condition, x, zeros))
