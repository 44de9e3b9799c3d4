"""Norms, logsumexp and std: gradients also at 0, nothing overflows on the way, orders and errors as in torch."""

import math

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import bfloat16, float16, float32, float64, linalg, tensor
from minamp.autograd import check_grads
from minamp.methods import OPS

_rng = np.random.default_rng(11)
INF = math.inf
ORDERS = [0, 0.5, 1, 1.5, 2, 2.5, 3, 10, INF, -INF, -1, -2.5]


def a(*shape):
    x = _rng.standard_normal(shape)
    return x + 0.1 * np.sign(x)


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("options", [{}, {"dim": 1}, {"dim": (0, 2), "keepdim": True}], ids=str)
def test_gradients_of_vector_norm(ord, options):
    check_grads(lambda x: linalg.vector_norm(x, ord, **options), a(2, 3, 2))


@pytest.mark.parametrize(
    "function, arrays",
    [
        (lambda x: x.norm(), (a(2, 3),)),
        (lambda x: x.norm(3, 1), (a(2, 3),)),
        (lambda x: x.norm() * x, (a(),)),
        (lambda x: x.norm(), (np.array([0.0, 1.5, -2.0]),)),
        (F.normalize, (a(2, 3),)),
        (lambda x: F.normalize(x, 3, 0), (a(2, 3),)),
        (F.cosine_similarity, (a(2, 3), a(1, 3))),
        (lambda x, y: F.cosine_similarity(x, y, -2), (a(2, 3, 2), a(3, 1))),
        (lambda x: x.logsumexp(1), (a(2, 3),)),
        (lambda x: x.logsumexp((0, 1), keepdim=True), (a(2, 3),)),
        (lambda x: x.logsumexp(0) * x, (a(),)),
        (lambda x: x.std(), (a(2, 3),)),
        (lambda x: x.std(1, correction=0, keepdim=True), (a(2, 3),)),
        (lambda x: OPS["var_mean"](x, 0)[0] * OPS["std_mean"](x, 0)[1], (a(2, 3),)),
    ],
)
def test_gradients(function, arrays):
    check_grads(function, *arrays)


@pytest.mark.parametrize("p", [0.5, 1, 1.5, 2, 3, INF])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_of_renorm(p, dim):
    check_grads(
        lambda x: x.renorm(p, dim, 0.7), a(3, 2, 2)
    )  # some slices are above, some below for most orders


# ---- values and subgradients


@pytest.mark.parametrize(
    "ord, norm, slope",  # of [3, -3], as torch has them
    [
        (0, 2, 0),
        (0.5, 12, 2),
        (1, 6, 1),
        (2, 18**0.5, 0.5**0.5),
        (3, 54 ** (1 / 3), 0.25 ** (1 / 3)),
        (INF, 3, 0.5),
        (-INF, 3, 0.5),
        (-1, 1.5, 0.25),
    ],
)
def test_orders(ord, norm, slope):
    x = tensor([3.0, -3.0], dtype=float64, requires_grad=True)
    y = linalg.vector_norm(x, ord)
    y.backward()
    np.testing.assert_allclose([y.item(), *x.grad.tolist()], [norm, slope, -slope], rtol=1e-14)


@pytest.mark.parametrize("dtype", [float64, float32, float16, bfloat16], ids=str)
@pytest.mark.parametrize("ord", ORDERS)
def test_the_gradient_at_zero_is_zero(ord, dtype):
    x = minamp.zeros(3, dtype=dtype, requires_grad=True)
    y = linalg.vector_norm(x, ord)
    assert y.item() == 0
    (g,) = minamp.autograd.grad(y, x, create_graph=True)
    assert g.tolist() == [0, 0, 0]
    (h,) = minamp.autograd.grad((g * g).sum() + (x * 0.0).sum(), x)
    assert h.tolist() == [0, 0, 0]


@pytest.mark.parametrize("function", [F.normalize, lambda x: x.std(1), lambda x: F.cosine_similarity(x, x)])
def test_other_gradients_at_zero_are_finite(function):
    x = minamp.zeros(1, 3, requires_grad=True)
    y = function(x)
    (g,) = minamp.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = minamp.autograd.grad((g * 1e-12).sum() + (x * 0.0).sum(), x)
    assert np.isfinite(y._data).all() and np.isfinite(g._data).all() and np.isfinite(h._data).all()


def test_cosine_similarity_of_a_vector_shorter_than_eps():
    x, y = minamp.tensor([[0.3, 0.4]], requires_grad=True), minamp.tensor([[1.0, 0.0]])
    F.cosine_similarity(x, y, eps=2.0).sum().backward()
    # both count as of length 2, and the length of x is taken to grow along x / |x|: (y/2 - x/|x| * (x/2 . y/2)) / 2
    np.testing.assert_allclose(x.grad._data, [[(0.5 - 0.6 * 0.075) / 2, -0.8 * 0.075 / 2]], rtol=1e-6)


# ---- half: squares are float32


def test_squares_do_not_overflow_on_the_way():
    assert minamp.full((10000,), 3.0, dtype=float16).norm().item() == 300
    # squares sum to 102400
    assert minamp.full((64, 40), 6.32455532, dtype=float32).half().norm().item() == 320
    x = minamp.full((4,), 148.0, dtype=float16, requires_grad=True)
    x.norm().backward()
    assert x.norm().item() == 296 and x.grad.tolist() == [0.5] * 4


@pytest.mark.parametrize("ord", [2, 1, 3, 10, INF, 0.5, -1])
@pytest.mark.parametrize("value", [0.0, 65504.0, -65504.0, 148.0, -148.0, 6e4, -6e4])
def test_gradients_at_the_limits_of_half(ord, value):
    """The norm of two such values can be infinite in half; its gradient never is."""
    x = tensor([value, value], dtype=float16, requires_grad=True)
    wide = tensor([value, value], dtype=float16).double().requires_grad_()
    for t in (x, wide):
        linalg.vector_norm(t, ord).backward()
    np.testing.assert_array_equal(x.grad.numpy(), wide.grad.numpy().astype(np.float16))


@pytest.mark.parametrize("value", [65504.0, -65504.0, 148.0, 6e4])
def test_the_rest_at_the_limits_of_half(value):
    x = tensor([[value, -value, 0.0]], dtype=float16, requires_grad=True)
    with np.errstate(all="raise"):
        for function, expected in (
            (F.normalize, [0.5**0.5, 0.5**0.5, 0]),
            (lambda x: F.cosine_similarity(x, x), [1]),
            (lambda x: x.logsumexp(1), [abs(value)]),
            (lambda x: x.std(1, correction=0), [abs(value) * (2 / 3) ** 0.5]),
        ):
            x.grad = None
            y = function(x)
            y.sum().backward()
            np.testing.assert_allclose(np.abs(y._data.astype(float)).reshape(-1), expected, rtol=2.0**-11)
            assert y.dtype == float16 and np.isfinite(x.grad.numpy()).all()


def test_a_zero_vector_in_half_normalizes_to_zeros():
    """There eps = 1e-12 is 0: the length has to stay float32."""
    assert F.normalize(minamp.zeros(1, 2, dtype=float16)).tolist() == [[0, 0]]


def test_powers_do_not_overflow_in_float32():
    assert linalg.vector_norm(tensor([6e4, 6e4]), 10).item() == pytest.approx(6e4 * 2**0.1, rel=1e-6)


# ---- logsumexp


@pytest.mark.parametrize("dtype", [float16, bfloat16, float32, float64], ids=str)
def test_logsumexp_of_infinities(dtype):
    for values, expected, slopes in (
        ([-INF, -INF], -INF, [math.nan, math.nan]),  # PyTorch's too
        ([1.0, INF], INF, [0, math.nan]),
        ([0.0, -INF], 0, [1, 0]),
        ([6e4, -6e4], float(tensor(6e4, dtype=dtype)), [1, 0]),
    ):
        x = tensor(values, dtype=dtype, requires_grad=True)
        y = x.logsumexp(0)
        y.backward()
        assert y.item() == expected
        np.testing.assert_array_equal(x.grad.numpy().astype(float), slopes)
    assert minamp.zeros(0, dtype=dtype).logsumexp(0).item() == -INF
    assert tensor([0, 0]).logsumexp(0).item() == pytest.approx(math.log(2))


def test_the_gradient_of_logsumexp_does_not_know_that_its_output_was_rounded():
    x = tensor([100.0, 100.0, 100.0], dtype=float16, requires_grad=True)
    x.logsumexp(0).backward()  # 101.0986 is 101.125 in half, exp(100 - 101.125) 3% below 1/3
    assert x.grad.tolist() == [np.float16(1 / 3)] * 3


# ---- dtypes and errors


def test_dtypes():
    h, f = minamp.ones(2, 3, dtype=float16), minamp.ones(2, 3)
    for call in (lambda x, **kw: x.norm(**kw), lambda x, **kw: linalg.vector_norm(x, **kw)):
        assert call(h).dtype == float16 and call(h, dtype=float32).dtype == float32
        with minamp.autocast():
            assert call(h).dtype == call(f).dtype == call(h.bfloat16()).dtype == float32
            assert call(h.double()).dtype == call(h, dtype=float64).dtype == float64
    assert F.normalize(h).dtype == F.cosine_similarity(h, h).dtype == h.logsumexp(0).dtype == float16
    assert F.cosine_similarity(h, f).dtype == float32
    with minamp.autocast():
        for y in (F.normalize(h), F.cosine_similarity(h, h), F.cosine_similarity(h, f), h.logsumexp(0)):
            assert y.dtype == float32
        assert h.std().dtype == float16


def test_torch_norms_names():
    x = tensor([[3.0, 4.0], [0.0, 0.0]])
    assert x.norm().item() == x.norm("fro").item() == x.norm(None).item() == 5
    assert x.norm("fro", (0, 1)).item() == 5 and x.norm(dim=1, keepdim=True).tolist() == [[5], [0]]
    assert x.norm(float("inf")).item() == 4 and minamp.norm(x, 1).item() == 7
    assert math.isnan(minamp.ones(1).std().item()) and minamp.ones(3).std().item() == 0
    assert tensor([1.0, 3.0]).std(False).item() == tensor([1.0, 3.0]).std(unbiased=False).item() == 1


def test_errors():
    x, ints = minamp.ones(2, 3), tensor([1, 2])
    for name in ("norm", "vector_norm", "std"):
        with pytest.raises(RuntimeError, match=rf"{name}: not defined for int64: use x.float\(\)"):
            OPS[name](ints)
        with pytest.raises(
            IndexError, match=rf"{name}: dim 2 is out of range for a tensor of shape \(2, 3\)"
        ):
            OPS[name](x, dim=2)
    with pytest.raises(RuntimeError, match="vector_norm: dtype float16 is narrower than the input's float32"):
        linalg.vector_norm(x, dtype=float16)
    with pytest.raises(TypeError, match="vector_norm: the order must be a number.*'fro'"):
        linalg.vector_norm(x, "fro")
    with pytest.raises(NotImplementedError, match="norm: the nuclear norm needs singular values"):
        x.norm("nuc")
    for ord in (INF, -1):
        with pytest.raises(RuntimeError, match=rf"vector_norm: the {ord} norm of nothing \(shape \(0, 2\)"):
            linalg.vector_norm(minamp.zeros(0, 2), ord)
    assert linalg.vector_norm(minamp.zeros(0, 2), 3).item() == linalg.vector_norm(minamp.zeros(0)).item() == 0
    with pytest.raises(RuntimeError, match=r"cosine_similarity: shapes \(2, 3\) and \(2,\) don't broadcast"):
        F.cosine_similarity(x, minamp.ones(2))


@pytest.mark.parametrize("ord", [INF, -INF])
def test_the_gradient_of_an_extreme_norm_stays_at_its_nan(ord):
    x = tensor([1.0, math.nan, 3.0], requires_grad=True)
    y = linalg.vector_norm(x, ord)
    y.backward()
    np.testing.assert_array_equal([y.item(), *x.grad.tolist()], [math.nan, 0, math.nan, 0])


def test_logsumexp_of_one_number():
    for value, slope in ((2.0, 1.0), (math.nan, math.nan), (-INF, math.nan)):
        x = tensor(value, requires_grad=True)
        y = OPS["logsumexp"](x, 0)
        y.backward()
        np.testing.assert_equal([y.item(), x.grad.item()], [value, slope])
    check_grads(lambda x: OPS["logsumexp"](x * x, 0), np.array(0.7))


def test_var_mean_and_std_mean_take_unbiased():
    x = tensor([[1.0, 2.0, 4.0], [0.0, 5.0, 7.0]])
    for pair, name in (("var_mean", "var"), ("std_mean", "std")):
        for args, kwargs in (((1,), {"unbiased": False}), ((False,), {}), ((1, False, True), {})):
            spread, middle = OPS[pair](x, *args, **kwargs)
            dim = None if args == (False,) else 1
            assert spread.equal(OPS[name](x, dim, 0, len(args) > 1))
            assert middle.equal(x.mean(dim, len(args) > 1))


def test_a_norm_has_a_floating_dtype():
    for name in ("norm", "vector_norm"):
        with pytest.raises(RuntimeError, match=f"{name}: dtype must be floating, got int64"):
            OPS[name](tensor([1.0]), dtype=np.int64)


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm"])
def test_third_derivatives_of_norms_are_those_of_differences(norm):
    rng = np.random.default_rng(0)
    start, weights = rng.standard_normal((2, 3, 4))

    def squared_second(array):
        x = minamp.tensor(array, requires_grad=True)
        y = F.layer_norm(x, (4,)) if norm == "layer_norm" else F.batch_norm(x, None, None, training=True)
        value = (y * minamp.tensor(weights)).sum()
        for _ in range(2):
            (g,) = minamp.autograd.grad(value, x, create_graph=True)
            value = (g * g).sum()
        return value, x

    value, x = squared_second(start)
    (third,) = minamp.autograd.grad(value, x)
    step = 1e-5 * rng.standard_normal((3, 4))
    difference = (squared_second(start + step)[0].item() - squared_second(start - step)[0].item()) / 2
    assert float((third.numpy() * step).sum()) == pytest.approx(difference, rel=1e-6)


# ---- renorm


def test_renorm_shortens_what_is_too_long():
    x = tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], requires_grad=True)
    y = x.renorm(2, 0, 1.0)
    np.testing.assert_allclose(y._data, [[0.6, 0.8], [0.3, 0.4], [0, 0]], rtol=1e-6)
    assert y[1:].tolist() == x[1:].tolist() and x.renorm(2, 0, 0.0).abs().sum().item() == 0
    y.sum().backward()
    np.testing.assert_allclose(x.grad._data, [[0.2 * 0.16, -0.2 * 0.12], [1, 1], [1, 1]], rtol=1e-5)
    columns = x.detach().renorm(1, 1, 1.0)
    np.testing.assert_allclose(columns.abs().sum(0)._data, [1, 1], rtol=1e-6)
    table = x.detach().clone()
    assert table.renorm_(2, 0, 1.0) is table and table.tolist() == y.tolist()
    assert minamp.zeros(0, 3).renorm(2, 0, 1.0).shape == (0, 3)


def test_renorm_of_half():
    """The norm is float32: that of (300, 300) is a finite number, though its square is none in float16."""
    x = minamp.full((1, 2), 300.0, dtype=float16, requires_grad=True)
    y = x.renorm(2, 0, 1.0)
    assert y.dtype == float16 and y.tolist() == [[np.float16(0.5**0.5)] * 2]
    y[0, 0].backward()
    assert x.grad.tolist() == [[np.float16(0.5**1.5 / 300), -np.float16(0.5**1.5 / 300)]]
    with minamp.autocast():
        assert x.renorm(2, 0, 1.0).dtype == float32


def test_renorm_errors():
    x = minamp.ones(2, 3)
    for call, error, text in (
        (
            lambda: x[0].renorm(2, 0, 1.0),
            RuntimeError,
            r"renorm: input needs at least 2 dimensions, .*\(3,\)",
        ),
        (lambda: x.renorm(0, 0, 1.0), RuntimeError, "renorm: p must be positive, got 0"),
        (lambda: x.renorm(math.nan, 0, 1.0), RuntimeError, "renorm: p must be positive, got nan"),
        (lambda: x.renorm("fro", 0, 1.0), TypeError, "renorm: p must be a number, got 'fro'"),
        (lambda: x.renorm(2, 0, -1.0), RuntimeError, "renorm: maxnorm must not be negative, got -1.0"),
        (lambda: x.renorm(2, 2, 1.0), IndexError, "renorm: dim 2 is out of range"),
        (lambda: x.long().renorm(2, 0, 1.0), RuntimeError, "renorm: not defined for int64"),
    ):
        with pytest.raises(error, match=text):
            call()
