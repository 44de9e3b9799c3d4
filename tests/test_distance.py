"""Distances: gradients also at 0, near points, blocks, batches and what is refused."""

import math

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import float16, float32, float64, nn, tensor
from minamp.autograd import check_grads
from minamp.methods import OPS
from minamp.ops import distance

_rng = np.random.default_rng(5)
INF = math.inf
ORDERS = [0, 0.5, 1, 1.5, 2, 3, 10, INF]


def a(*shape):
    return _rng.standard_normal(shape)


# ---------------------------------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("p", ORDERS)
def test_gradients(p):
    check_grads(lambda x, y: minamp.dist(x, y, p), a(2, 3), a(3))
    check_grads(lambda x, y: F.pairwise_distance(x, y, p, keepdim=True), a(2, 3), a(3))
    check_grads(lambda x, y: minamp.cdist(x, y, p), a(2, 3), a(4, 3))
    check_grads(lambda x: F.pdist(x, p), a(4, 3))


@pytest.mark.parametrize("p", ORDERS)
def test_every_row_to_every_row(p):
    x, y = tensor(a(2, 1, 3, 4)), tensor(a(5, 2, 4))
    wanted = minamp.linalg.vector_norm(x[..., None, :] - y[..., None, :, :], p, -1)
    np.testing.assert_allclose(minamp.cdist(x, y, p)._data, wanted._data, rtol=1e-15)
    d = minamp.cdist(y[0], y[0], p)
    assert F.pdist(y[0], p).tolist() == [d[0, 1].item()]
    assert F.pdist(x[0, 0], p).shape == (3,)
    check_grads(lambda x, y: minamp.cdist(x, y, p), a(2, 1, 3, 4), a(5, 2, 4), order=1)


@pytest.mark.parametrize("p", [1, 2, 3, INF])
def test_blocks_are_as_the_whole(p, monkeypatch):
    arrays, g, found = (a(2, 5, 3), a(1, 4, 3)), tensor(a(2, 5, 4)), []
    for block in (1, 2 * 2 * 4 * 3, 10**6):  # a row, two rows, all
        monkeypatch.setattr(distance, "BLOCK", block)
        x, y = (tensor(v).requires_grad_() for v in arrays)
        d = minamp.cdist(x, y, p)
        found.append([d._data, *(t._data for t in minamp.autograd.grad(d, (x, y), g))])
    for part in found[1:]:
        for ours, wanted in zip(part, found[0], strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-13)


@pytest.mark.parametrize("p", ORDERS)
def test_the_gradient_at_zero_is_zero(p):
    x = minamp.ones(2, 3, requires_grad=True)
    for function in (
        lambda x: minamp.cdist(x, x.detach(), p),
        lambda x: F.pdist(x, p),
        lambda x: minamp.dist(x, x.detach(), p),
    ):
        y = function(x)
        (g,) = minamp.autograd.grad(y.sum(), x, create_graph=True)
        assert not y.any() and g.tolist() == [[0.0] * 3] * 2
        (h,) = minamp.autograd.grad((g * g).sum() + (x * 0.0).sum(), x)
        assert h.tolist() == [[0.0] * 3] * 2


def test_of_order_inf_every_largest_difference_gets_the_gradient_whole():
    """The norm's gradient is shared, that of distances to many points is not: as in PyTorch."""
    for function, wanted in (
        (lambda x: F.pdist(x, INF).sum(), [[1.0, -1.0], [-1.0, 1.0]]),
        (lambda x: minamp.cdist(x, minamp.zeros(1, 2), INF).sum(), [[1.0, -1.0], [0.0, 0.0]]),
        (lambda x: minamp.dist(x[0], x[1].detach(), INF), [[0.5, -0.5], [0.0, 0.0]]),
    ):
        x = tensor([[1.0, -1.0], [0.0, 0.0]], requires_grad=True)
        function(x).backward()
        assert x.grad.tolist() == wanted


def test_near_points_keep_their_distance():
    """|a|**2 + |b|**2 - 2 a b of float32 would be 0, or of a size that means nothing."""
    x = tensor((1e3 + 0.01 * a(30, 4)).astype(np.float32))
    exact = minamp.cdist(x.double(), x.double())
    for mode in distance.MODES:
        np.testing.assert_allclose(minamp.cdist(x, x, compute_mode=mode)._data, exact._data, rtol=1e-6)


def test_distances_of_nothing():
    for p in ORDERS:
        x = minamp.zeros(3, 0, requires_grad=True)
        d = minamp.cdist(x, minamp.zeros(2, 0), p)
        d.sum().backward()
        assert d.tolist() == [[0.0, 0.0]] * 3 and x.grad.shape == (3, 0)
        assert minamp.cdist(minamp.zeros(0, 3), minamp.zeros(2, 3), p).shape == (0, 2)
        assert minamp.cdist(minamp.zeros(0, 4, 3), minamp.zeros(2, 3), p).shape == (0, 4, 2)
        assert F.pdist(minamp.zeros(1, 3), p).shape == F.pdist(minamp.zeros(0, 3), p).shape == (0,)


# ------------------------------------------------------------------------------------------------------------------ dtypes


def test_half_distances():
    """Sums of squares are float32, and inside a region so is the distance."""
    x, y = minamp.full((2, 3), 300.0, dtype=float16), minamp.zeros(1, 3, dtype=float16)
    exact = 300 * 3**0.5  # the square of 300 is inf in float16
    for name in ("dist", "cdist", "pairwise_distance"):
        with minamp.autocast():
            inside = OPS[name](x[:1], y)
        outside = OPS[name](x[:1], y)
        assert (inside.dtype, outside.dtype) == (float32, float16)
        assert inside.item() == pytest.approx(exact, rel=1e-6) and outside.item() == np.float16(exact)
    x = x.clone().requires_grad_()
    with minamp.autocast():
        loss = minamp.cdist(x, y).sum()
    loss.backward()
    assert x.grad.dtype == float16 and x.grad[0, 0].item() == np.float16(3**-0.5)
    assert minamp.cdist(x.double(), y.double()).dtype == float64


# ------------------------------------------------------------------------------------------------------------------ errors


def test_errors():
    x, y = minamp.ones(2, 3), minamp.ones(4, 3)
    for call, error, text in (
        (lambda: minamp.cdist(x[0], y), RuntimeError, r"cdist: x1 must be \(..., points, features\), got shape \(3,\)"),
        (lambda: minamp.cdist(x, y[0]), RuntimeError, "cdist: x2 must be"),
        (lambda: minamp.cdist(x, y[:, :2]), RuntimeError, r"cdist: x1 \(2, 3\) and x2 \(4, 2\) must have the same number"),
        (lambda: minamp.cdist(x[None].expand(2, 2, 3), minamp.ones(3, 2, 3)), RuntimeError, "cdist: shapes don't fit"),
        (lambda: minamp.cdist(x.long(), y), RuntimeError, "cdist: not defined for int64"),
        (lambda: minamp.cdist(x, y.long()), RuntimeError, "cdist: not defined for int64"),
        (lambda: minamp.cdist(x, y.double()), RuntimeError, "cdist: tensors of different dtypes"),
        (lambda: minamp.cdist(x, y, -1), RuntimeError, "cdist: p must not be negative, got -1"),
        (lambda: minamp.cdist(x, y, math.nan), RuntimeError, "cdist: p must not be negative, got nan"),
        (lambda: minamp.cdist(x, y, "fro"), TypeError, "cdist: p must be a number, got 'fro'"),
        (lambda: minamp.cdist(x, y, compute_mode="mm"), ValueError, "cdist: compute_mode must be one of .*got 'mm'"),
        (lambda: minamp.cdist(x, y.tolist()), TypeError, "cdist: x2 is a list, not a Tensor"),
        (lambda: F.pdist(x[0]), RuntimeError, r"pdist: input must be \(points, features\), got shape \(3,\)"),
        (lambda: F.pdist(x.long()), RuntimeError, "pdist: not defined for int64"),
        (lambda: F.pdist(x, -1), RuntimeError, "pdist: p must not be negative"),
        (lambda: minamp.dist(x, y), RuntimeError, "shapes don't fit"),
        (lambda: minamp.dist(x.long(), x.long()), RuntimeError, "not defined for int64"),
        (lambda: F.pairwise_distance(x, y), RuntimeError, "shapes don't fit"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()


def test_methods_and_modules():
    x, y = tensor(a(2, 3)), tensor(a(2, 3))
    assert x.dist(y, p=1).item() == pytest.approx((x - y).abs().sum().item())
    assert (
        nn.PairwiseDistance(1, 0.5, True)(x, y).tolist() == F.pairwise_distance(x, y, 1, 0.5, True).tolist()
    )
    assert nn.CosineSimilarity(0, 0.1)(x, y).tolist() == F.cosine_similarity(x, y, 0, 0.1).tolist()
