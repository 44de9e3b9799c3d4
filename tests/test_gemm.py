"""gemm.py without a GPU: its arguments, handed to a column-major reference of cuBLAS (blas.py) that reads memory by address."""

import itertools

import numpy as np
import pytest
import standin

from minamp.backends import gemm
from minamp.formats import bfloat16, float16, float32, float64


@pytest.fixture
def gpu():
    with standin.installed() as gpu:
        yield gpu


def matrix(rng, rows, cols, transposed, padded, dtype):
    """(rows, cols) values of `dtype` on the stand-in: row- or column-major, with or without a gap after each line."""
    shape = (cols, rows) if transposed else (rows, cols)
    memory = np.full((shape[0], shape[1] + 3 * padded), np.nan, dtype)
    memory[:, : shape[1]] = rng.integers(-4, 5, shape)  # sums of these are exact in every format
    view = memory[:, : shape[1]]
    return standin.ndarray(view.T if transposed else view)


@pytest.mark.parametrize(
    "dtype, result", [(float16, float16), (float16, float32), (bfloat16, bfloat16), (bfloat16, float32)]
)
@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(5, 3, 7), (1, 4, 6), (4, 1, 6), (5, 6, 1), (1, 1, 1)], ids=str)
def test_strides_and_pointers(gpu, shape, beta, dtype, result):
    rng = np.random.default_rng(0)
    m, k, n = shape
    for ta, tb, pa, pb, po in itertools.product((False, True), repeat=5):
        a, b = matrix(rng, m, k, ta, pa, dtype), matrix(rng, k, n, tb, pb, dtype)
        out = matrix(rng, m, n, False, po, result)
        before = out._a.astype("f8")
        kernels = gpu.count["kernel"]
        assert gemm.gemm(a, b, out, alpha=2.0, beta=beta) is out
        assert gpu.count["kernel"] == kernels + 1  # no copies: transposes and gaps are strides
        expected = 2 * a._a.astype("f8") @ b._a.astype("f8") + beta * before
        np.testing.assert_array_equal(out._a.astype("f8"), expected)
        if po:
            assert np.isnan(out._a.base[:, n:].astype("f8")).all()  # the gaps are left alone


def test_beta_zero_does_not_read_what_was_there(gpu):
    a = standin.ndarray(np.ones((2, 2), float16))
    out = gpu.xp.empty((2, 2), float32)  # nan
    assert (gemm.gemm(a, a, out)._a == 2).all()


@pytest.mark.parametrize("dtype", [float16, float32, float64], ids=str)
@pytest.mark.parametrize(
    "a, b",
    [
        ((5, 3), (3, 4)),
        ((2, 5, 3), (3, 4)),
        ((2, 5, 3), (2, 3, 4)),
        ((5, 3), (2, 3, 4)),
        ((2, 1, 5, 3), (4, 3, 2)),
    ]
    + [
        ((3,), (3,)),
        ((3,), (3, 4)),
        ((5, 3), (3,)),
        ((2, 5, 3), (3,)),
        ((3,), (2, 3, 4)),
        ((6, 1, 5, 3), (6, 2, 3, 4)),
    ]
    + [((0, 3), (3, 4)), ((5, 0), (0, 4)), ((2, 0, 3), (2, 3, 4))],
)
def test_matmul_takes_numpys_shapes(gpu, a, b, dtype):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, s).astype(dtype) for s in (a, b))
    y = gemm.matmul(standin.ndarray(a), standin.ndarray(b), dtype)
    expected = a.astype("f8") @ b.astype("f8")
    assert y.dtype == dtype and y.shape == expected.shape
    np.testing.assert_array_equal(y._a.astype("f8"), expected)


def test_batches_lie_at_strides(gpu):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (4, 3, 5)).astype(float16), rng.integers(-4, 5, (7, 4, 5)).astype(float16)
    # (3, 4, 5) and (3, 5, 7)
    x, y = (standin.ndarray(a.transpose(1, 0, 2)), standin.ndarray(b.transpose(1, 2, 0)[:3]))
    out = gpu.xp.empty((3, 4, 7), float16)
    # y's matrices run without gaps in neither direction: gemm copies them
    np.testing.assert_array_equal(gemm.gemm(x, y, out)._a, x._a.astype("f4") @ y._a.astype("f4"))
    p = gemm.plan(x, gpu.xp.ascontiguousarray(y), out)
    assert (p.batch, p.strides, p.leading, p.transposed) == (3, (35, 5, 28), (7, 15, 7), (0, 0))
    one = gpu.xp.broadcast_to(standin.ndarray(np.ones((5, 7), float16)), (3, 5, 7))
    assert gemm.plan(x, one, out).strides == (0, 5, 28)  # one matrix for all


def test_float32_factors_are_not_rounded_to_half(gpu):
    a, b = (np.full((3, 3), v, float32) for v in (1 + 2.0**-20, 1.0))
    assert (gemm.matmul(standin.ndarray(a), standin.ndarray(b), float32)._a == 3 * a).all()


def test_half_sums_are_the_lesson(gpu):
    a, b = (standin.ndarray(np.ones(s, float16)) for s in ((1, 4096), (4096, 1)))
    out = gpu.xp.empty((1, 1), float16)
    assert gemm.gemm(a, b, out)._a == 4096
    assert gemm.gemm(a, b, out, half_sums=True)._a == 2048  # 2048 + 1 rounds to 2048
    with pytest.raises(ValueError, match="gemm: no product of float16 and float16 in float32 with half sums"):
        gemm.gemm(a, b, gpu.xp.empty((1, 1), float32), half_sums=True)


def test_weight_gradients_come_in_float32(gpu):
    """4096 products of 16 * 1: 65536 is beyond float16's largest 65504, so the sum must not pass through half."""
    from minamp.backends import cuda

    g, x = (standin.ndarray(np.full((4096, 2), v, float16)) for v in (16, 1))
    assert cuda.matmul(cuda.mT(g), x).dtype == float32 and (cuda.matmul(cuda.mT(g), x)._a == 65536).all()
    assert cuda.matmul(x, cuda.mT(g)).dtype == float16
    assert cuda.matmul_wide(x, cuda.mT(g)).dtype == float32


def test_refusals(gpu):
    half, single = (standin.ndarray(np.zeros((2, 3), d)) for d in (float16, float32))
    out = gpu.xp.empty((2, 2), float32)
    with pytest.raises(ValueError, match="gemm: no product of float16 and float32 in float32"):
        gemm.gemm(half, single.T, out)
    with pytest.raises(ValueError, match=r"gemm: \(2, 3\) @ \(2, 3\) does not make \(2, 2\)"):
        gemm.gemm(half, half, out)
    with pytest.raises(ValueError, match="gemm: a layout with gaps"):
        gemm.plan(half, half.T, standin.ndarray(np.zeros((2, 4), float32)[:, ::2]))
    with pytest.raises(ValueError, match="matmul: a number has no matrix product"):
        gemm.matmul(half, standin.ndarray(np.zeros((), float16)), float16)
    with pytest.raises(ValueError, match="the inner sizes 3, 2 differ"):
        gemm.matmul(half, half, float16)
    long = standin.ndarray(np.lib.stride_tricks.as_strided(np.zeros(1, float16), (1, 2**31), (2, 2)))
    with pytest.raises(ValueError, match=r"has a size above 2\*\*31 - 1"):
        gemm.plan(standin.ndarray(np.zeros((1, 1), float16)), long, long)


def test_a_view_that_is_not_a_matrix_is_copied(gpu):
    a = standin.ndarray(np.arange(24, dtype=float16).reshape(4, 6)[:, ::2])
    b = standin.ndarray(np.eye(3, dtype=float16))
    kernels = gpu.count["kernel"]
    np.testing.assert_array_equal(gemm.gemm(a, b, gpu.xp.empty((4, 3), float16))._a, a._a)
    assert gpu.count["kernel"] == kernels + 2


# ---- padding


def spread(*shape, dtype=float16):
    """An array of that shape that takes no memory: padding is decided by shapes and strides."""
    strides = (shape[1] * dtype.itemsize, dtype.itemsize)
    return standin.ndarray(np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, strides))


@pytest.mark.parametrize(
    "m, k, n, forward, input_grad, weight_grad",
    [
        (65536, 512, 10, (65536, 16, 512), (65536, 512, 16), (16, 512, 65536)),  # ten classes, a large input
        (128, 512, 10, None, None, None),  # a small one: the launches would take longer
        (65536, 512, 16, None, None, None),  # aligned
        (65536, 10, 12, None, None, None),  # nothing is large beside the copies
        # much work a byte, so copies are cheap
        (8192, 4096, 50257, (8192, 50264, 4096), (8192, 4096, 50264), (50264, 4096, 8192)),
    ],
)
def test_padding_pays_where_copies_are_small_beside_the_product(m, k, n, forward, input_grad, weight_grad):
    x, w, g = spread(m, k), spread(n, k), spread(m, n)
    assert gemm.padding(x, w.T, g) == forward
    assert gemm.padding(g, w, x) == input_grad
    assert gemm.padding(g.T, x, w) == weight_grad


def test_padding_is_for_matrices_of_halves():
    x, w, y = (spread(*s, dtype=float32) for s in ((65536, 512), (10, 512), (65536, 10)))
    assert gemm.padding(x, w.T, y) is None


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
def test_the_padded_product_is_called_and_gives_the_same_bits(gpu, dtype, beta, monkeypatch):
    """All three products of ten classes: forward, input gradient, weight gradient."""
    rng = np.random.default_rng(0)
    x, w, g = (
        standin.ndarray((rng.integers(-64, 65, s) / 32).astype(dtype))  # sums of these products are exact
        for s in ((128, 256), (10, 256), (128, 10))
    )
    calls, plan = [], gemm.plan
    monkeypatch.setattr(gemm, "plan", lambda *args: calls.append(plan(*args)) or calls[-1])
    bits = {}
    for pays in (2**60, 0):
        monkeypatch.setattr(gemm, "PAYS", pays)
        for name, a, b in (("y", x, w.T), ("gx", g, w), ("gw", g.T, x)):
            for result in (dtype, float32):
                out = standin.ndarray(np.ones((a.shape[0], b.shape[1]), result))
                bits[name, result, pays] = gemm.gemm(a, b, out, alpha=0.5, beta=beta)._a.tobytes()
    assert all(bits[key[:2] + (0,)] == value for key, value in bits.items())
    small, large = calls[:6], calls[6:]
    assert {(p.n, p.m, p.k) for p in small} == {(128, 10, 256), (128, 256, 10), (10, 256, 128)}
    assert {(p.n, p.m, p.k) for p in large} == {(128, 16, 256), (128, 256, 16), (16, 256, 128)}
    assert all(leading % 8 == 0 for p in large for leading in p.leading)
