"""The gradients of the elementwise, matmul, reduce, shape, normalize and loss ops against central differences in float64,
first and second order, and what these ops promise beyond their gradients. Half formats: test_half.py."""

import math
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import minamp
from minamp import float16, float32, float64, tensor
from minamp.autograd import check_grads
from minamp.methods import OPS
from minamp.op import Op
from minamp.tensor import Tensor

F = type("Ops", (), {"__getattr__": lambda self, name: OPS[name]})()
_rng = np.random.default_rng(7)


def a(*shape):
    """Normal values, none nearer to 0 than 0.05, so that a difference never straddles a kink there."""
    x = _rng.standard_normal(shape)
    return x + 0.05 * np.sign(x)


def pos(*shape):
    return _rng.uniform(0.3, 1.7, shape)


def prob(*shape):
    return _rng.uniform(0.1, 0.9, shape)


def ids(high, *shape):
    return Tensor(_rng.integers(0, high, shape))


MASK = Tensor(np.array([[True, False, True], [False, False, True]]))
TARGET = Tensor(np.array([2, -100, 0, 1]))
IMAGE_TARGET = Tensor(np.array([[0, 2], [1, -100]]))
STATISTICS = (Tensor(pos(3)), Tensor(pos(3)))


def line(name, function, *arrays, order=2):
    return pytest.param(name, function, arrays, order, id=name)


LINES = [
    # elementwise
    line("to", lambda x: x.to(float64) * F.to(x, float64), a(3)),
    line("to_device", lambda x: F.to_device(x, "cpu") ** 2, a(3)),
    line("clone", lambda x: F.clone(x) ** 2, a(3)),
    line("add", F.add, a(2, 3), a(2, 3)),
    line("add", lambda x, y: F.add(x, y, alpha=3) ** 2, a(2, 1), a(3)),
    line("sub", lambda x, y: F.sub(x, y, alpha=3) ** 2, a(2, 1, 3), a(4, 1)),
    line("mul", F.mul, a(2, 3), a(3)),
    line("mul", F.mul, a(), a(2)),
    line("mul", F.mul, a(0, 3), a(3)),
    line("div", F.div, a(2, 3), pos(2, 1)),
    line("div floor", lambda x, y: F.div(x, y, rounding_mode="floor") * x, a(2, 3), pos(3)),
    line("trunc_divide", lambda x, y: F.div(x, y, rounding_mode="trunc") * x, a(2, 3), pos(3)),
    line("reciprocal", lambda x: 2.0 / x, pos(3)),
    line("neg", lambda x: F.neg(x) * x, a(2, 3)),
    line("pow", F.pow, pos(2, 3), a(3)),
    line("pow", lambda x: x**3 + x**0.0, a(4)),
    line("pow", lambda x: 2**x, a(4)),
    line("square", F.square, a(2, 3)),
    line("abs", lambda x: F.abs(x) * x, a(2, 3)),
    line("sign", lambda x: F.sign(x) * x, a(2, 3)),
    line("remainder", lambda x, y: F.remainder(x, y) ** 2, a(2, 3), pos(2, 1)),
    line("floor_divide", lambda x, y: F.floor_divide(x, y) * x, a(2, 3), pos(3)),
    line("maximum", lambda x, y: F.maximum(x, y) ** 2, a(2, 3), a(3)),
    line("minimum", lambda x, y: F.minimum(x, y) ** 2, a(2, 3), a(3)),
    line("where", lambda x, y: F.where(MASK, x, y) ** 2, a(2, 3), a(3)),
    line("zeros_like", lambda x: F.zeros_like(x) + x, a(2)),
    line("exp", F.exp, a(2, 3)),
    line("log", F.log, pos(2, 3)),
    line("log1p", F.log1p, pos(2, 3)),
    line("sqrt", F.sqrt, pos(2, 3)),
    line("log2", F.log2, pos(2, 3)),
    line("log10", F.log10, pos(2, 3)),
    line("expm1", F.expm1, a(2, 3)),
    line("rsqrt", F.rsqrt, pos(2, 3)),
    line("sin", F.sin, a(2, 3)),
    line("cos", F.cos, a(2, 3)),
    line("tan", F.tan, a(2, 3) / 4),
    line("asin", F.asin, a(2, 3) / 4),
    line("acos", F.acos, a(2, 3) / 4),
    line("atan", F.atan, a(2, 3)),
    line("atan2", F.atan2, a(2, 3), a(3)),
    line("sinh", F.sinh, a(2, 3)),
    line("cosh", F.cosh, a(2, 3)),
    line("lerp", lambda x, y: F.lerp(x, y, 0.3) ** 2, a(2, 3), a(2, 3)),
    line("lerp", F.lerp, a(2, 3), a(3), a(2, 1)),
    line("nan_to_num", lambda x: F.nan_to_num(x) ** 2, a(2, 3)),
    line("clamp", lambda x: F.clamp(x, -0.5, 0.7) ** 2, a(3, 4)),
    line("clamp", lambda x: F.clamp(x, max=0.01) ** 2, a(3, 4)),
    line("clamp", lambda x, lo, hi: F.clamp(x, lo, hi) ** 2, a(3, 4), a(4), a(3, 1)),
    line("clamp", lambda x, lo: F.clamp(x, lo) ** 2, a(3, 4), a(3, 1)),
    line("clamp", lambda x, hi: F.clamp(x, max=hi) ** 2, a(3, 4), a()),
    line("addcmul", lambda x, y, z: F.addcmul(x, y, z, value=0.5) ** 2, a(2, 3), a(3), a(2, 1)),
    line("addcdiv", lambda x, y, z: F.addcdiv(x, y, z, value=0.5) ** 2, a(2, 3), a(3), pos(2, 1)),
    line("tanh", F.tanh, a(2, 3)),
    line("sigmoid", F.sigmoid, a(2, 3)),
    line("relu", lambda x: F.relu(x) ** 2, a(2, 3)),
    line("erf", F.erf, a(2, 3)),
    line("gelu", F.gelu, a(2, 3)),
    line("gelu", lambda x: F.gelu(x, approximate="tanh"), a(2, 3)),
    line("silu", F.silu, a(2, 3)),
    # matmul
    line("matmul", F.matmul, a(2, 3), a(3, 4)),
    line("matmul", F.matmul, a(3), a(3)),
    line("matmul", F.matmul, a(2, 3), a(3)),
    line("matmul", F.matmul, a(3), a(3, 2)),
    line("matmul", F.matmul, a(3), a(2, 3, 2)),
    line("matmul", F.matmul, a(2, 2, 3), a(3)),
    line("matmul", F.matmul, a(2, 1, 2, 3), a(2, 3, 2)),
    line("matmul", F.matmul, a(0, 3), a(3, 2)),
    line("matmul", F.matmul, a(2, 0), a(0, 2)),
    line("linear", F.linear, a(2, 3), a(4, 3), a(4)),
    line("linear", F.linear, a(2, 2, 3), a(4, 3), a(4)),
    line("linear", F.linear, a(3), a(4, 3), a(4)),
    line("linear", F.linear, a(2, 3), a(4, 3)),
    # reduce
    line("sum", lambda x: F.sum(x) ** 2, a(2, 3)),
    line("sum", lambda x: F.sum(x, 1, keepdim=True) * x, a(2, 3, 2)),
    line("sum", lambda x: F.sum(x, (0, -1)) ** 2, a(2, 3, 2)),
    line("sum", lambda x: F.sum(x) ** 2, a()),
    line("sum", F.sum, a(0, 3)),
    line("mean", lambda x: F.mean(x) ** 2, a(2, 3)),
    line("mean", lambda x: F.mean(x, (0, 2), keepdim=True) * x, a(2, 3, 2)),
    line("var", F.var, a(2, 3)),
    line("var", lambda x: F.var(x, 1, correction=0, keepdim=True) * x, a(2, 3)),
    line("var", lambda x: F.var(x, (0, 2)), a(2, 3, 2)),
    line("ones_like", lambda x: F.ones_like(x) * x, a(2)),
    line("amax", lambda x: F.amax(x) ** 2, a(2, 3)),
    line("amax", lambda x: F.amax(x, 1, keepdim=True) * x, a(2, 3)),
    line("amin", lambda x: F.amin(x, (0, 1)) ** 2, a(2, 3, 2)),
    line("max", lambda x: F.max(x, 1).values ** 2, a(2, 3)),
    line("max", lambda x, y: F.max(x, y) ** 2, a(2, 3), a(2, 3)),
    line("min", lambda x: F.min(x, 0, keepdim=True)[0] ** 2, a(2, 3)),
    # shape
    line("reshape", lambda x: F.reshape(x, 3, -1) ** 2, a(2, 3)),
    line("permute", lambda x: F.permute(x, 2, 0, 1) ** 2, a(2, 3, 4)),
    line("expand", lambda x: F.expand(x, 2, 3, 4) ** 2, a(3, 1)),
    line("sum_to", lambda x: F.sum_to(x, (1, 3)) ** 2, a(2, 2, 3)),
    line("transpose", lambda x: F.transpose(x, 0, -1) ** 2, a(2, 3, 4)),
    line("round", lambda x: F.round(x) + x, np.array([0.4, 2.6])),
    line("floor", lambda x: F.floor(x) + x, np.array([0.4, 2.6])),
    line("ceil", lambda x: F.ceil(x) + x, np.array([0.4, 2.6])),
    line("trunc", lambda x: F.trunc(x) + x, np.array([0.4, -2.6])),
    line("repeat", lambda x: F.repeat(x, 2, 1, 2) ** 2, a(2, 3)),
    line("flatten", lambda x: F.flatten(x, 1) ** 2, a(2, 3, 4)),
    line("unflatten", lambda x: F.unflatten(x, 1, (2, -1)) ** 2, a(2, 4)),
    line("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2) ** 2, a(4, 2, 1)),
    line("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2) ** 2, a(1, 4, 2)),
    line("unfold", lambda x: F.unfold(x, (2, 1), 1, (1, 0), (1, 2)) ** 2, a(2, 1, 3, 3)),
    line("fold", lambda x: F.fold(x, (3, 2), 2, 1, (0, 1)) ** 2, a(1, 4, 6)),
    line("squeeze", lambda x: F.squeeze(x, 1) ** 2, a(2, 1, 3)),
    line("unsqueeze", lambda x: F.unsqueeze(x, -1) ** 2, a(2, 3)),
    line("cat", lambda x, y: F.cat([x, y, x], 1) ** 2, a(2, 3), a(2, 1)),
    line("stack", lambda x, y: F.stack([x, y], -1) ** 2, a(2, 3), a(2, 3)),
    line("index", lambda x: x[1:, ::2] ** 2, a(3, 4)),
    line("index", lambda x: x[[0, 0, 2], 1] ** 2, a(3, 4)),
    line("index", lambda x: x[MASK] ** 2, a(2, 3)),
    line("index", lambda x: x[..., None, -1] ** 2, a(2, 3)),
    line("index_grad", lambda x: F.index_grad(x, ([0, 0, 2],), (4,)) ** 2, a(3)),
    line("gather", lambda x: F.gather(x, 1, Tensor(np.array([[0, 0], [2, 1]]))) ** 2, a(2, 3)),
    line("gather", lambda x: F.gather(x, 1, Tensor(np.array([[2, 0, 1]]))) ** 2, a(2, 3)),
    line("gather_grad", lambda x: F.gather_grad(x, 1, np.array([[0, 0], [2, 1]]), (2, 3)) ** 2, a(2, 2)),
    line("masked_scale", lambda x: F.masked_scale(x, MASK, 2.0) ** 2, a(2, 3)),
    # normalize
    line("softmax", lambda x: F.softmax(x, 1), a(2, 3)),
    line("softmax", lambda x: F.softmax(x, 0), a(2, 3, 2)),
    line("log_softmax", lambda x: F.log_softmax(x, -1), a(2, 3)),
    line("log_softmax", lambda x: F.log_softmax(x, 0), a(3)),
    line("layer_norm", lambda x, w, b: F.layer_norm(x, (3,), w, b), a(2, 2, 3), a(3), a(3)),
    line("layer_norm", lambda x: F.layer_norm(x, (2, 3), eps=0.1), a(2, 2, 3)),
    line("rms_norm", lambda x, w: F.rms_norm(x, (3,), w), a(2, 3), a(3)),
    line("rms_norm", lambda x: F.rms_norm(x, (2, 3), eps=0.1), a(2, 2, 3)),
    line("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), a(2, 4, 3), a(4), a(4)),
    line("group_norm", lambda x: F.group_norm(x, 1), a(2, 4)),
    line("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), a(4, 3), a(3), a(3)),
    line("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), a(2, 3, 2, 2)),
    line("batch_norm", lambda x, w, b: F.batch_norm(x, *STATISTICS, w, b) ** 2, a(4, 3, 2), a(3), a(3)),
    line("instance_norm", lambda x, w, b: F.instance_norm(x, None, None, w, b), a(2, 3, 4), a(3), a(3)),
    line("instance_norm", lambda x: F.instance_norm(x, *STATISTICS, use_input_stats=False) ** 2, a(2, 3, 2)),
    # loss
    line("mse_loss", F.mse_loss, a(2, 3), a(2, 3)),
    line("mse_loss", lambda x, t: F.mse_loss(x, t, reduction="none"), a(2, 3), a(2, 3)),
    line("l1_loss", lambda x, t: F.l1_loss(x, t, reduction="sum") ** 2, a(2, 3), a(2, 3)),
    line("smooth_l1_loss", lambda x, t: F.smooth_l1_loss(x, t, beta=0.7), a(3, 4), a(3, 4)),
    line("smooth_l1_loss", lambda x, t: F.smooth_l1_loss(x, t, beta=0.0) ** 2, a(2, 3), a(2, 3)),
    line("huber_loss", lambda x, t: F.huber_loss(x, t, delta=0.7), a(3, 4), a(3, 4)),
    line("kl_div", lambda x, t: F.kl_div(x, t, reduction="batchmean"), a(2, 3), pos(2, 3)),
    line("kl_div", lambda x, t: F.kl_div(x, t, reduction="sum", log_target=True), a(2, 3), a(2, 3)),
    line("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, a(2, 3), prob(2, 3)),
    line(
        "binary_cross_entropy_with_logits",
        lambda x, t: F.binary_cross_entropy_with_logits(
            x, t, Tensor(W3), reduction="sum", pos_weight=Tensor(2 * W3)
        ),
        a(2, 3),
        prob(2, 3),
    ),
    line("binary_cross_entropy", F.binary_cross_entropy, prob(2, 3), prob(2, 3)),
    line(
        "binary_cross_entropy",
        lambda x, t: F.binary_cross_entropy(x, t, Tensor(W3), reduction="none"),
        prob(2, 3),
        prob(2, 3),
    ),
    line("nll_loss", lambda x: F.nll_loss(x, TARGET, Tensor(W3)) ** 2, a(4, 3)),
    line("nll_loss", lambda x: F.nll_loss(x, IMAGE_TARGET, reduction="none") ** 2, a(2, 3, 2)),
    line("cross_entropy", lambda x: F.cross_entropy(x, TARGET), a(4, 3)),
    line("cross_entropy", lambda x: F.cross_entropy(x, TARGET, Tensor(W3), label_smoothing=0.2), a(4, 3)),
    line("cross_entropy", lambda x: F.cross_entropy(x, IMAGE_TARGET, reduction="sum"), a(2, 3, 2)),
    line("cross_entropy", lambda x: F.cross_entropy(x, Tensor(np.array(1))), a(3)),
    line(
        "cross_entropy",
        lambda x, t: F.cross_entropy(x, t, Tensor(W3), label_smoothing=0.2),
        a(4, 3),
        prob(4, 3),
    ),
]
W3 = np.array([0.5, 1.0, 2.0])


@pytest.mark.parametrize("name, function, arrays, order", LINES)
def test_gradients(name, function, arrays, order):
    check_grads(function, *arrays, order=order)


def test_every_gradient_has_a_line():
    families = {
        f"minamp.ops.{f}"
        for f in (
            "cast",
            "elementwise",
            "exponential",
            "reduce",
            "shape",
            "normalize",
            "loss",
            "cross_entropy",
        )
    }
    declared = {n for n, o in OPS.items() if isinstance(o, Op) and o.__module__ in families and any(o.vjps)}
    assert declared - {p.values[0] for p in LINES} == set()


# ---- elementwise


@pytest.mark.parametrize("dtype, tolerance", [(float64, 1e-15), (float32, 3e-7)])
def test_erf_on_a_grid(dtype, tolerance):
    x = np.concatenate([np.linspace(-7, 7, 4001), np.logspace(-30, 0, 301)]).astype(dtype)
    y = OPS["erf"](Tensor(x))._data
    exact = np.array([math.erf(v) for v in x])
    assert y.dtype == dtype and np.abs(y).max() == 1
    assert (np.abs(y - exact) <= tolerance * np.abs(exact)).all()
    ends = OPS["erf"](Tensor(np.array([np.inf, -np.inf, np.nan, -0.0], dtype)))._data
    assert ends[0] == 1 and ends[1] == -1 and np.isnan(ends[2]) and np.signbit(ends[3])


def test_gradients_at_kinks_and_ties():
    x = tensor([0.0, -0.0, 2.0], requires_grad=True)
    (OPS["relu"](x) + OPS["abs"](x)).sum().backward()
    assert x.grad.tolist() == [0, 0, 2]
    x, y = tensor([1.0, 2.0], requires_grad=True), tensor([1.0, 3.0], requires_grad=True)
    OPS["maximum"](x, y).sum().backward()
    assert x.grad.tolist() == [0.5, 0] and y.grad.tolist() == [0.5, 1]
    x = tensor([[1.0, 1.0, 0.0]], requires_grad=True)
    x.max(1).values.sum().backward()  # the first of equals
    assert x.grad.tolist() == [[1, 0, 0]]
    x.grad = None
    x.max().backward()  # shared
    assert x.grad.tolist() == [[0.5, 0.5, 0]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_a_cube_is_two_products(dtype):
    x = np.array([-3, -2, -1, 0, 1, 2, 5], dtype)
    for power, expected in ((3, dtype), (3.0, np.float32 if dtype == np.int64 else dtype)):
        y = tensor(x) ** power
        assert y.tolist() == [-27, -8, -1, 0, 1, 8, 125] and y.dtype == expected


def test_gradients_of_powers_of_zero():
    a, b = tensor([0.0, 0.0, 0.0], requires_grad=True), tensor([0.0, 1.0, 2.0], requires_grad=True)
    (a**b).sum().backward()
    assert a.grad.tolist() == [0, 1, 0] and b.grad.tolist() == [0, 0, 0]


def test_gradients_of_a_number_to_a_power():
    """As PyTorch: the logarithm of a negative base is nan, of zero -inf, and 0 ** b is flat only from b = 0 on."""
    b = tensor([-1.0, 0.0, 2.0, math.nan], dtype=float64, requires_grad=True)
    for base, expected in ((-2.0, [math.nan] * 4), (0.0, [-math.inf, 0, 0, math.nan])):
        for a in (base, tensor(base, dtype=float64)):
            (g,) = minamp.autograd.grad((a**b).sum(), b)
            np.testing.assert_array_equal(g.numpy(), expected)
    a, b = tensor([-0.0]), tensor([-1.0], requires_grad=True)
    (a**b).backward()  # -inf, whose slope is the product of two infinities
    assert b.grad.item() == math.inf


@pytest.mark.parametrize("base", [np.uint8, np.int64, np.float32])
def test_the_gradient_of_an_exponent_is_computed_in_the_dtype_of_the_power(base):
    b = tensor([1.0, 0.5], dtype=float64, requires_grad=True)
    (Tensor(np.array([2, 3], base)) ** b).sum().backward()
    np.testing.assert_allclose(b.grad.numpy(), [2 * math.log(2), 3**0.5 * math.log(3)], rtol=1e-15)
    b = tensor([1.0], requires_grad=True)
    (Tensor(np.array([3], np.uint8)) ** b).backward()  # NumPy's log of uint8 is float16
    assert abs(b.grad.item() - 3 * math.log(3)) < 1e-6


def test_extremes_pass_the_gradient_on_beside_nan():
    for name in ("maximum", "minimum"):
        x, y = (tensor(v, requires_grad=True) for v in ([math.nan, 1.0], [1.0, math.nan]))
        OPS[name](x, y).backward(tensor([3.0, 5.0]))
        assert x.grad.tolist() == y.grad.tolist() == [3, 5]
    lo, hi = tensor([2.0], requires_grad=True), tensor([1.0], requires_grad=True)
    F.clamp(tensor([math.nan]), lo, hi).backward()
    assert lo.grad.tolist() == [0] and hi.grad.tolist() == [1]


def test_the_gradient_of_log10_is_finite_where_it_fits():
    x = tensor([1e-5], dtype=float32, requires_grad=True)
    x.log10().backward(tensor([5e33]))
    assert np.isclose(x.grad.item(), 5e33 / 1e-5 / math.log(10), rtol=1e-6)  # 5e38 on the way would be inf


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.int8])
def test_a_0_dim_integer_tensor_widens_no_integers(kind):
    x, two = Tensor(np.array([1, 5], kind)), tensor(2)
    for name in ("add", "sub", "mul", "maximum", "minimum", "pow", "bitwise_and"):
        assert OPS[name](x, two).dtype == kind and OPS[name](two, x).dtype == kind, name
    assert F.where(x > two, x, two).tolist() == [2, 5] and F.where(x > two, x, two).dtype == kind
    assert F.clamp(x, two).dtype == kind and (x / two).dtype == float32 and (x == two).dtype == bool


BOOLS = Tensor(np.array([True, False]))
REFUSED = [
    (lambda: BOOLS - BOOLS, "sub: bools can't be subtracted: use ~mask"),
    (lambda: 1 - BOOLS, "sub: bools can't be subtracted"),
    (lambda: tensor([1.0, 2.0]) - BOOLS, "sub: bools can't be subtracted"),
    (lambda: tensor([1.0]) - True, "sub: bools can't be subtracted"),
    (lambda: -BOOLS, "neg: bools have no minus: use ~mask"),
    (lambda: ~tensor([1.0]), r"bitwise_not: needs bools or integers, got float32: compare first"),
    (lambda: tensor([1.0]) & tensor([1]), r"bitwise_and: needs bools or integers, got float32"),
    (lambda: tensor([1]) | tensor([1.0]).half(), r"bitwise_or: needs bools or integers, got float16"),
    (lambda: tensor([1]) ^ 0.5, r"bitwise_xor: needs bools or integers, got a float"),
    (
        lambda: Tensor(np.array([1], np.uint8)) + 300,
        r"add \(a uint8 \(1,\)\): .*300.* uint8: use x\.long\(\)",
    ),
    (lambda: tensor([2]) ** -1, r"pow: int64 to the power -1 is no whole number: use x\.float\(\)"),
    (lambda: 2 ** tensor([1, -3]), r"pow: int to the power -3 is no whole number: use x\.float\(\)"),
    (
        lambda: minamp.where(tensor([1, 0]), tensor([1.0, 2.0]), 0.0),
        "where: condition must be bool, got int64",
    ),
    (lambda: tensor(2.0).sum((0, -1)), r"sum: dim \(0, -1\) names a dimension of shape \(\) twice"),
    (
        lambda: minamp.ones(2, 3).mean((0, -2)),
        r"mean: dim \(0, -2\) names a dimension of shape \(2, 3\) twice",
    ),
    (
        lambda: F.embedding(tensor([0]), tensor([1.0, 2.0])),
        r"embedding: weight must be \(num, dim\), this one has shape \(2,\)",
    ),
    (
        lambda: F.add(tensor([1]), tensor([1]), alpha=0.5),
        r"add: alpha is 0\.5, but the tensors hold integers",
    ),
    (lambda: F.sub(tensor([1]), 1, alpha=0.5), r"sub: alpha is 0\.5, but the tensors hold integers"),
]


@pytest.mark.parametrize("call, text", REFUSED)
def test_dtypes_an_op_is_not_for(call, text):
    with pytest.raises(RuntimeError, match=text):
        call()


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.bool_])
def test_extremes_of_small_integers(kind):
    """min is not -max(-x): -(-128) is -128, -1 of uint8 is 255, and bools have no minus."""
    x = Tensor(np.array([[1, 0, 3], [-128, 5, 2]]).astype(kind))
    low = x._data.min(1).tolist()
    assert x.amin(1).tolist() == x.min(1).values.tolist() == low and x.amin().item() == x.min().item() == min(
        low
    )
    assert x.argmin(1).tolist() == x.min(1).indices.tolist() == x._data.argmin(1).tolist()
    assert x.amin().dtype == kind and x.amax(1).tolist() == x._data.max(1).tolist()


def test_sums_of_integers_are_int64():
    for kind in (np.uint8, np.int32, np.bool_):
        for x in (Tensor(np.ones((2, 3), kind)), Tensor(np.array(1, kind))):
            assert x.sum().dtype == x.sum(0).dtype == np.int64
    with pytest.raises(RuntimeError, match=r"var: not defined for int64: use x\.float\(\)"):
        tensor([1, 2]).var()


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.bool_])
def test_an_integer_dtype_asked_for_is_the_result(kind):
    x = tensor([[1, 2], [3, 4]])
    for y in (x.sum(dtype=kind), x.sum(1, dtype=kind), x.prod(dtype=kind), x.cumsum(0, dtype=kind)):
        assert y.dtype == kind
    assert (
        x.cumprod(1, dtype=kind).dtype == kind and x.sum(0, dtype=kind).tolist() == [4, 6] or kind is np.bool_
    )
    assert tensor([1.7, 2.7]).sum(dtype=kind).item() in (3, True)  # cast first


def test_sign_of_nan_is_0():
    """And with it the slope of abs, of l1_loss and of the norm of order 1; elsewhere nan stays nan."""
    nan = tensor([math.nan, -2.0], requires_grad=True)
    assert nan.sign().tolist() == [0, -1]

    def slope(function):
        (g,) = minamp.autograd.grad(function(nan).sum(), nan)
        return g.tolist()

    zero = minamp.zeros(2)
    for function in (F.abs, lambda x: F.l1_loss(x, zero), lambda x: minamp.linalg.vector_norm(x, 1)):
        assert slope(function)[0] == 0 > slope(function)[1]
    for loss in (F.smooth_l1_loss, F.huber_loss, F.mse_loss):
        assert math.isnan(slope(lambda x, loss=loss: loss(x, zero))[0])


def test_the_extreme_among_nans_passes_its_gradient_to_them():
    x = tensor([[1.0, math.nan, 3.0], [1.0, 2.0, 2.0]], requires_grad=True)
    x.amax(1).backward(tensor([6.0, 4.0]))
    assert x.grad.tolist() == [[0, 6, 0], [0, 2, 2]]
    x.grad = None
    x.min().backward()
    assert x.grad.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_0_dim_tensors_have_gradients_like_others():
    x = tensor(2.0, requires_grad=True)
    x.flip(0).backward()
    assert x.grad.item() == 1
    y = F.cosine_similarity(x, tensor(-3.0), dim=0)
    y.backward()
    assert y.item() == -1 and y.shape == () and x.grad.item() == 1


def test_powers_of_bools_are_int64():
    for y in (BOOLS**2, BOOLS**0, BOOLS.square(), 2**BOOLS):
        assert y.dtype == np.int64
    assert (BOOLS**2).tolist() == BOOLS.square().tolist() == BOOLS.long().tolist()


def test_sign_of_bools():
    assert F.sign(BOOLS).equal(BOOLS) and F.sign(BOOLS)._data is not BOOLS._data


def test_a_call_with_wrong_arguments_is_a_type_error():
    x = tensor([1.0])
    for call, text in (
        (lambda: F.exp(x, x), "^exp: takes x; got 2 arguments"),
        (lambda: F.exp(x, [1]), "^exp: takes x; got 2 arguments"),
        (lambda: F.exp(x, base=2), "^exp: takes x, and no argument named 'base'"),
        (lambda: F.mul(x), "^mul: takes a, b; got 1 arguments"),
        (lambda: x + None, r"^add \(a float32 \(1,\)\): unsupported operand"),
        (lambda: F.cat(1.0), "^cat: tensors must be a list or tuple of Tensors, got float"),
        (lambda: F.stack(x), "^stack: tensors must be a list or tuple of Tensors, got Tensor"),
    ):
        with pytest.raises(TypeError, match=text):
            call()


SQUARE = minamp.ones(2, 2)
NEEDS_TENSORS = {  # the argument that is refused -> a call with `wrong` in its place
    "matmul: a": lambda wrong: F.matmul(wrong, SQUARE),
    "matmul: b": lambda wrong: F.matmul(SQUARE, wrong),
    "linear: x": lambda wrong: F.linear(wrong, SQUARE),
    "linear: weight": lambda wrong: F.linear(SQUARE, wrong),
    "mse_loss: target": lambda wrong: F.mse_loss(SQUARE, wrong),
    "where: condition": lambda wrong: F.where(wrong, SQUARE, SQUARE),
    "masked_fill: value": lambda wrong: F.masked_fill(SQUARE, SQUARE > 0, wrong),
    "mm: mat2": lambda wrong: F.mm(SQUARE, wrong),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("argument", NEEDS_TENSORS)
@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (np.ones((2, 2), np.float32), "NumPy array"),
        ([[1.0, 1.0], [1.0, 1.0]], "list"),
        ((1.0, 1.0), "tuple"),
        (None, "NoneType"),
        ("1", "str"),
        (1.5, "float"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_no_tensor_is_refused_by_name(wrong, kind, argument, autocast):
    """No policy would cast an array, so a product with it would not be half; nor would a gradient reach it."""
    if argument == "masked_fill: value" and kind == "float":
        return  # a number is what it takes
    with minamp.autocast(enabled=autocast):
        repair = "give a Tensor" if kind in ("NoneType", "str") else r"use minamp.tensor\("
        with pytest.raises(TypeError, match=f"^{argument} is a {kind}, not a Tensor: {repair}"):
            NEEDS_TENSORS[argument](wrong)


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "div", "maximum", "minimum", "pow", "lt", "eq", "remainder", "floor_divide"]
)
@pytest.mark.parametrize("array", [np.ones(2), [1.0, 1.0], "1", {1.0}, np.ones(2, np.float16)], ids=repr)
def test_elementwise_ops_take_numbers_and_no_arrays(name, array):
    x = tensor([1.0, 2.0], requires_grad=True)
    kind = "NumPy array" if isinstance(array, np.ndarray) else type(array).__name__
    second = "exponent" if name == "pow" else "b"
    for p, call in ((second, lambda: OPS[name](x, array)), ("a", lambda: OPS[name](array, x))):
        with pytest.raises(TypeError, match=f"^{name}: {p} is a {kind}, not a Tensor: "):
            call()
    for number in (2, 2.0, np.float32(2), np.float64(2), np.int64(2), np.array(2.0)):
        assert OPS[name](x, number).shape == (2,)


def test_parts_of_lists_and_composites_are_refused_by_name():
    x = minamp.ones(2, 3)
    for call, text in (
        (lambda: F.cat([x, [1.0]]), r"cat: tensors\[1\] is a list"),
        (lambda: F.cat([x, np.ones((2, 3))]), r"cat: tensors\[1\] is a NumPy array"),
        (lambda: F.einsum("ij,jk->ik", x, 1.0), r"einsum: operands\[1\] is a float"),
        (lambda: F.cross_entropy([[1.0]], x), "cross_entropy: input is a list"),
        (lambda: F.cross_entropy(x, [0, 1]), "cross_entropy: target is a list"),
        (lambda: F.allclose(x, [1.0]), "allclose: b is a list"),
        (lambda: F.flatten(1.0), "flatten: x is a float"),
        (lambda: F.scatter(x, 1, tensor([[0], [1]]), [1.0]), "scatter: value is a list"),
    ):
        with pytest.raises(TypeError, match=f"^{text}, not a Tensor: use minamp.tensor"):
            call()


def test_another_attribute_error_stays_one(monkeypatch):
    """Only the object that was given in a Tensor's place is spoken of."""
    monkeypatch.setattr(F.linear, "call", lambda x, weight, bias=None: x.no_such_attribute)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        F.linear(SQUARE, SQUARE)


def test_gather_reads_less_than_the_whole():
    x = tensor(np.arange(12.0).reshape(3, 4))
    assert OPS["gather"](x, 1, tensor([[3, 0], [1, 1]])).tolist() == [[3, 0], [5, 5]]


def test_a_number_over_a_tensor_is_the_reciprocal_times_it():
    third = np.float16(1 / np.float16(3))
    # rounded twice, as in PyTorch
    assert (5.0 / tensor([3.0], dtype=float16)).item() == np.float16(5 * float(third))
    assert (1 / tensor([4])).dtype == float32 and (1 / tensor([4])).item() == 0.25


# ---- reductions of nothing and of numbers


def test_reductions_of_nothing():
    empty = minamp.zeros(0, 3)
    assert empty.sum().item() == 0 and empty.sum(0).tolist() == [0, 0, 0] and empty.sum(1).shape == (0,)
    assert math.isnan(empty.mean().item()) and np.isnan(empty.mean(0)._data).all()
    assert math.isnan(empty.var().item()) and math.isnan(tensor(2.0).var().item())
    for name in ("amax", "amin", "argmax", "argmin"):
        for dim in (None, 0):
            with pytest.raises(
                RuntimeError, match=rf"{name}: the extreme of nothing .*shape \(0, 3\) over dim"
            ):
                OPS[name](empty, dim)
        assert OPS[name](empty, 1).shape == (0,) and OPS[name](empty, -1, True).shape == (0, 1)
    x = minamp.zeros(0, 3, requires_grad=True)
    assert x.max(1).indices.shape == x.amin(1).shape == (0,)
    (x.min(1).values.sum() + x.amax(1).sum()).backward()
    assert x.grad.shape == (0, 3)
    assert tensor(2.0).sum(0).item() == tensor(2.0).mean(-1).item() == tensor(2.0).max(0).values.item() == 2
    with pytest.raises(IndexError, match=r"sum: dim 2 is out of range for a tensor of shape \(0, 3\)"):
        empty.sum(2)


# ---- normalize


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_edges(name):
    f = OPS[name]
    assert f(tensor([[0.0, 1000.0], [-1000.0, 0.0]]), 1).isfinite().all()
    y = f(tensor([[-np.inf, -np.inf], [0.0, -np.inf]]), 1)._data
    assert np.isnan(y[0]).all() and y[1].tolist() == ([1, 0] if name == "softmax" else [0, -np.inf])
    assert f(minamp.zeros(3, 0), 1).shape == (3, 0) and f(minamp.zeros(0, 3), 1).shape == (0, 3)
    assert f(tensor(3.0), 0).item() == (1 if name == "softmax" else 0)
    assert f(tensor([1, 2]), 0, dtype=float32).dtype == float32
    assert f(minamp.ones(2, dtype=float16), 0, float32).dtype == float32
    with pytest.raises(RuntimeError, match=rf"{name}: not defined for int64: use x.float\(\)"):
        f(tensor([1, 2]), 0)
    with pytest.raises(RuntimeError, match=rf"{name}: not defined for int64: use x.float\(\)"):
        f(tensor([1.0, 2.0]), 0, dtype=np.int64)
    with pytest.raises(IndexError, match=rf"{name}: dim 2 is out of range for a tensor of shape \(2,\)"):
        f(tensor([1.0, 2.0]), 2)


def test_batch_norm_moves_the_running_statistics():
    x = tensor(np.array([[1.0, 10.0], [3.0, 30.0], [5.0, 20.0]], np.float32), requires_grad=True)
    mean, var = minamp.zeros(2), minamp.ones(2)
    memory, versions = mean._data, (mean._version[0], var._version[0])
    y = OPS["batch_norm"](x, mean, var, training=True, momentum=0.25)
    assert mean.tolist() == [0.75, 5.0] and mean._data is memory  # a quarter of the way to 3 and 20
    assert var.tolist() == [1.75, 25.75]  # to 4 and 100: squares over n - 1
    assert (mean._version[0], var._version[0]) == (versions[0] + 1, versions[1] + 1)
    assert not mean.requires_grad and not var.requires_grad
    np.testing.assert_allclose(y._data.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose((y._data**2).mean(0), 1, rtol=1e-5)  # normalised with n
    OPS["batch_norm"](x, mean, var, training=False)
    assert mean.tolist() == [0.75, 5.0]


@pytest.mark.parametrize("shape", [(0, 2), (3, 2, 0)])
def test_an_empty_batch_moves_no_statistics(shape):
    mean, var = minamp.ones(2), minamp.ones(2)
    assert OPS["batch_norm"](minamp.zeros(shape), mean, var, training=True).shape == shape
    assert mean.tolist() == var.tolist() == [1, 1]


def test_group_norm_of_one_value_a_group():
    with pytest.raises(ValueError, match=r"group_norm: input \(1, 4, 1\) has one value per group"):
        OPS["group_norm"](minamp.ones(1, 4, 1), 4)
    assert OPS["group_norm"](minamp.ones(2, 4, 1), 4).tolist() == minamp.zeros(2, 4, 1).tolist()


def test_batch_norm_refuses_to_forget_the_statistics_it_used():
    x, mean, var = minamp.ones(2, 3, requires_grad=True), minamp.zeros(3), minamp.ones(3)
    y = OPS["batch_norm"](x, mean, var).sum()
    mean.add_(1.0)
    with pytest.raises(RuntimeError, match="batch_norm: argument 'mean'.*written in place"):
        y.backward()


def test_batch_norm_of_half_with_float32_parameters():
    # the variance 90000 is inf in half
    x = tensor(np.array([[300.0], [-300.0]]), dtype=float16, requires_grad=True)
    w, b, mean, var = (
        minamp.ones(1, requires_grad=True),
        minamp.zeros(1, requires_grad=True),
        minamp.zeros(1),
        minamp.ones(1),
    )
    y = OPS["batch_norm"](x, mean, var, w, b, training=True)
    assert y.dtype == float16 and y.tolist() == [[1], [-1]] and var.dtype == float32
    assert var.item() == pytest.approx(0.9 + 0.1 * 180000)
    (y * tensor([[1.0], [0.0]], dtype=float16)).sum().backward()
    assert x.grad.dtype == float16 and w.grad.dtype == b.grad.dtype == float32
    assert w.grad.item() == pytest.approx(1) and b.grad.item() == 1


def test_normalisation_errors():
    x, two, three = minamp.ones(4, 3), minamp.ones(2), minamp.ones(3)
    with pytest.raises(
        ValueError, match=r"batch_norm: input \(1, 3\) has one value per channel.*larger batches"
    ):
        OPS["batch_norm"](x[:1], None, None, training=True)
    with pytest.raises(RuntimeError, match="batch_norm: training=False needs running_mean and running_var"):
        OPS["batch_norm"](x, None, None)
    with pytest.raises(
        RuntimeError, match=r"batch_norm: weight has shape \(2,\), input \(4, 3\) has 3 channels: give \(3,\)"
    ):
        OPS["batch_norm"](x, three, three, two)
    with pytest.raises(
        RuntimeError, match=r"group_norm: input must be \(N, C, ...\), this one has shape \(3,\)"
    ):
        OPS["group_norm"](three, 1)
    with pytest.raises(
        RuntimeError, match="group_norm: 3 channels can't be split into 2 groups: choose a divisor"
    ):
        OPS["group_norm"](x, 2)
    with pytest.raises(
        RuntimeError, match=r"layer_norm: input \(4, 3\) does not end in normalized_shape \(4,\)"
    ):
        OPS["layer_norm"](x, 4)
    with pytest.raises(RuntimeError, match=r"layer_norm: bias has shape \(2,\), normalized_shape is \(3,\)"):
        OPS["layer_norm"](x, (3,), three, two)
    with pytest.raises(RuntimeError, match=r"layer_norm: not defined for int64: use x.float\(\)"):
        OPS["layer_norm"](tensor([1, 2]), 2)


# ---- losses


def test_cross_entropy_keeps_what_a_probability_loses():
    x = tensor([[0.0, 200.0]], requires_grad=True)  # the probability e**-200 is 0 in float32
    loss = OPS["cross_entropy"](x, tensor([0]))
    loss.backward()
    assert loss.item() == 200 and x.grad.tolist() == [[-1, 1]]


def test_class_weights_and_ignored_ids():
    logp = tensor([[-1.0, -2.0], [-3.0, -4.0], [-np.inf, -np.inf]])
    target, weight = tensor([0, 1, -100]), tensor([1.0, 3.0])
    assert OPS["nll_loss"](logp, target).item() == 2.5  # (1 + 4) / 2
    assert OPS["nll_loss"](logp, target, weight).item() == 3.25  # (1 + 3 * 4) / (1 + 3)
    assert OPS["nll_loss"](logp, target, weight, reduction="none").tolist() == [1, 12, 0]
    assert OPS["nll_loss"](logp[:2], tensor([0, 1]), ignore_index=1).item() == 1


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_without_dim_takes_torchs_and_warns(name):
    for shape, dim in (((3,), 0), ((2, 3), 1), ((2, 3, 2), 0), ((2, 3, 2, 2), 1)):
        x = tensor(a(*shape))
        with pytest.warns(UserWarning, match=f"{name}: dim is not given, {dim} is taken: pass dim="):
            y = OPS[name](x)
        assert y.tolist() == OPS[name](x, dim).tolist()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weight", [None, Tensor(np.array([0.5, 2.0, 1.0]))])
def test_what_is_ignored_gets_no_gradient_even_where_nothing_counts(smoothing, weight):
    x = minamp.zeros(2, 3, dtype=float64, requires_grad=True)
    loss = OPS["cross_entropy"](x, tensor([-100, -100]), weight, label_smoothing=smoothing)
    loss.backward()
    assert math.isnan(loss.item()) and x.grad.tolist() == [[0, 0, 0]] * 2


def test_the_mean_over_a_total_weight_of_0_is_nan():
    for smoothing in (0.0, 0.1):
        f, weight = OPS["cross_entropy"], tensor([0.0, 1.0])
        loss = f(tensor([[1.0, 2.0]]), tensor([0]), weight, label_smoothing=smoothing)
        assert math.isnan(loss.item())


def test_label_smoothing_equals_smoothed_probabilities():
    x, target = tensor(a(4, 3)), tensor([2, 0, 1, 1])
    smooth = Tensor(0.7 * np.eye(3)[target._data] + 0.1)
    hard = OPS["cross_entropy"](x, target, label_smoothing=0.3).item()
    assert hard == pytest.approx(OPS["cross_entropy"](x, smooth).item(), abs=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_nothing(smoothing):
    for logits, target in (
        (minamp.zeros(0, 3), tensor(np.zeros(0, int))),
        (minamp.zeros(2, 3), tensor([-100, -100])),
    ):
        f = OPS["cross_entropy"]
        assert math.isnan(f(logits, target, label_smoothing=smoothing).item())
        assert f(logits, target, reduction="sum", label_smoothing=smoothing).item() == 0
        assert f(logits, target, reduction="none", label_smoothing=smoothing).tolist() == [0] * len(target)
    for name in (
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
    ):
        x = minamp.zeros(0, 3, requires_grad=True)
        loss = OPS[name](x, minamp.zeros(0, 3))
        loss.backward()
        assert math.isnan(loss.item()) and x.grad.shape == (0, 3)


def test_with_logits_is_finite_where_the_probability_is_not():
    x = tensor([200.0, -200.0], requires_grad=True)
    loss = OPS["binary_cross_entropy_with_logits"](x, tensor([0.0, 1.0]))
    loss.backward()
    assert loss.item() == 200 and x.grad.tolist() == [0.5, -0.5]
    p = tensor([1.0, 0.0], requires_grad=True)
    loss = OPS["binary_cross_entropy"](p, tensor([0.0, 1.0]))
    loss.backward()
    assert loss.item() == 100 and np.isfinite(p.grad._data).all()


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
@pytest.mark.parametrize("log_target", [False, True])
def test_the_gradients_of_kl_div_undo_a_broadcast(reduction, log_target):
    x, t = tensor(a(2, 1), requires_grad=True), tensor(pos(3), requires_grad=True)
    found = []
    for inputs in ((x, t), (x.expand(2, 3), t.expand(2, 3))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that they differ in shape is what this is about
            y = OPS["kl_div"](*inputs, reduction=reduction, log_target=log_target).sum()
        found.append([g._data for g in minamp.autograd.grad(y, (x, t))])
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_kl_div_of_one_number_is_its_own_batch():
    x = tensor(-1.0, requires_grad=True)
    y = OPS["kl_div"](x, tensor(1.0), reduction="batchmean")
    y.backward()
    assert y.item() == 1 and x.grad.item() == -1


def test_huber_loss_is_linear_from_delta_on():
    x = tensor([0.5, 1.0, -1.0, 2.0], requires_grad=True)
    y = OPS["huber_loss"](x, minamp.zeros(4), reduction="sum")
    (g,) = minamp.autograd.grad(y, x, create_graph=True)
    (h,) = minamp.autograd.grad(g.sum(), x)
    assert g.tolist() == [0.5, 1, -1, 1] and h.tolist() == [1, 0, 0, 0]


def test_kl_div_counts_zero_probabilities_nothing():
    x = tensor([[-1.0, -2.0]])
    assert OPS["kl_div"](x, tensor([[1.0, 0.0]]), reduction="batchmean").item() == 1
    with pytest.warns(
        UserWarning, match="kl_div: reduction='mean' divides by the number of entries.*use 'batchmean'"
    ):
        assert OPS["kl_div"](x, tensor([[1.0, 0.0]])).item() == 0.5


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
def test_losses_of_different_shapes_warn_and_broadcast(name):
    x, t = tensor(np.ones((2, 1)), requires_grad=True), tensor(np.zeros(2), requires_grad=True)
    with pytest.warns(
        UserWarning, match=rf"{name}: target \(2,\) and input \(2, 1\) differ in shape"
    ) as caught:
        loss = OPS[name](x, t, reduction="none")
    assert loss.shape == (2, 2) and caught[0].filename == __file__
    loss.sum().backward()
    assert x.grad.shape == (2, 1) and t.grad.shape == (2,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OPS[name](x, tensor(np.zeros((2, 1))))


def test_loss_errors():
    x, f = minamp.zeros(2, 3), minamp.zeros(2)
    with pytest.raises(IndexError, match=r"nll_loss: class id 3 is not in \[0, 3\): the input has 3 classes"):
        OPS["cross_entropy"](x, tensor([0, 3]))
    with pytest.raises(IndexError, match="class id -1 is not"):
        OPS["cross_entropy"](x, tensor([0, -1]), label_smoothing=0.1)
    with pytest.raises(
        RuntimeError,
        match=r"cross_entropy: target holds class ids and must be integer, this one is float32: use target.long\(\)",
    ):
        OPS["cross_entropy"](x, f)
    with pytest.raises(
        RuntimeError, match="nll_loss: target holds class ids and must be integer, this one is bool"
    ):
        OPS["nll_loss"](x, tensor([True, False]))
    with pytest.raises(
        ValueError,
        match=r"cross_entropy: target \(3,\) does not fit input \(2, 3\): give one class id per row",
    ):
        OPS["cross_entropy"](x, tensor([0, 1, 2]))
    with pytest.raises(
        RuntimeError, match=r"nll_loss: weight has shape \(2,\), input \(2, 3\) has 3 classes: give \(3,\)"
    ):
        OPS["cross_entropy"](x, tensor([0, 1]), f)
    with pytest.raises(
        RuntimeError,
        match=r"cross_entropy: weight has shape \(2,\), input \(2, 3\) has 3 classes: give \(3,\)",
    ):
        OPS["cross_entropy"](x, minamp.ones(2, 3), f)
    with pytest.raises(
        RuntimeError, match="cross_entropy: ignore_index=1 names a class id, this target holds"
    ):
        OPS["cross_entropy"](x, minamp.full(x.shape, 1 / 3), ignore_index=1)
    for name, options in (
        ("binary_cross_entropy", {"weight": minamp.ones(2, 3)}),
        ("binary_cross_entropy_with_logits", {"weight": minamp.ones(2, 3)}),
        ("binary_cross_entropy_with_logits", {"pos_weight": minamp.ones(2)}),
    ):
        ((what, weight),), p = options.items(), minamp.full((3,), 0.5)
        shapes = (
            rf"{name}: {what} {re.escape(str(weight.shape))} can't be expanded to the shape of input \(3,\)"
        )
        with pytest.raises(RuntimeError, match=shapes):
            OPS[name](p, p, **options)
    with pytest.raises(RuntimeError, match=r"binary_cross_entropy: target must lie in \[0, 1\]"):
        OPS["binary_cross_entropy"](tensor([0.5, 0.5]), tensor([0.0, 2.0]))
    with pytest.raises(ValueError, match=r"cross_entropy: label_smoothing must lie in \[0, 1\], got 2"):
        OPS["cross_entropy"](x, tensor([0, 1]), label_smoothing=2)
    for name in ("mse_loss", "l1_loss", "kl_div", "binary_cross_entropy_with_logits", "binary_cross_entropy"):
        with pytest.raises(
            ValueError, match=rf"{name}: reduction must be one of 'mean', .*'sum', 'none', got 'avg'"
        ):
            OPS[name](x, x, reduction="avg")
    for name in ("binary_cross_entropy_with_logits", "binary_cross_entropy"):
        with pytest.raises(ValueError, match=rf"{name}: target \(2,\) must have the shape of input \(2, 3\)"):
            OPS[name](x, f)
    for bad in (1.5, -0.5, math.nan):
        with pytest.raises(
            RuntimeError, match=r"binary_cross_entropy: input must lie in \[0, 1\]: apply sigmoid"
        ):
            OPS["binary_cross_entropy"](tensor([bad]), tensor([1.0]))
    with pytest.raises(ValueError, match="huber_loss: delta must be positive, got 0"):
        OPS["huber_loss"](x, x, delta=0)
    with pytest.raises(ValueError, match="smooth_l1_loss: beta must not be negative, got -1"):
        OPS["smooth_l1_loss"](x, x, beta=-1)


def test_warnings_stay_off_in_every_thread():
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("error")
        results = list(pool.map(lambda _: Tensor(np.float32([3e38])) * 10.0, range(8)))
    assert all(np.isinf(r._data).all() for r in results)
    with pytest.warns(RuntimeWarning):  # and the caller's own settings stay as they are
        np.float32(3e38) * np.float32(10)


def test_remainder_and_floor_divide_are_pythons():
    for dtype in (float16, float32, float64, np.int64):
        values = [7, -7, 0, 6]
        x = tensor(values, dtype=dtype)
        for b in (3, -3):
            assert (x % b).tolist() == [v % b for v in values] and (x // b).tolist() == [
                v // b for v in values
            ]
            assert (x % b).dtype == (x // b).dtype == dtype
            both = x % tensor(b, dtype=dtype), x // tensor(b, dtype=dtype)
            assert [t.tolist() for t in both] == [(x % b).tolist(), (x // b).tolist()]
        assert (7 % tensor([4, -4], dtype=dtype)).tolist() == [3, -1]
        assert (7 // tensor([4, -4], dtype=dtype)).tolist() == [1, -2]
    x %= 4
    assert x.tolist() == [3, 1, 0, 2]
    x //= 2
    assert x.tolist() == [1, 0, 0, 1] and (tensor([5]) % 2.5).dtype == float32


def test_over_zero_there_is_no_remainder():
    x = tensor([1, 2])
    for name in ("remainder", "floor_divide"):
        for zero in (0, tensor([1, 0]), False):
            with pytest.raises(RuntimeError, match=f"^{name}: integers can't be divided by 0: use x.float"):
                OPS[name](x, zero)
    assert math.isnan((tensor([1.0]) % 0).item()) and (tensor([1.0]) // 0).item() == math.inf


def test_factors_may_come_as_tensors():
    x = minamp.ones(2, 2)
    half, one = minamp.tensor(0.5, dtype=float16), minamp.tensor(1.0)
    assert x.add(x, alpha=half).tolist() == [[1.5, 1.5]] * 2
    assert x.sub(x, alpha=one).tolist() == [[0.0, 0.0]] * 2
    assert minamp.addcmul(x, x, x, value=half).tolist() == minamp.addcdiv(x, x, x, value=half).tolist()
    assert minamp.addmm(x, x, x, beta=half, alpha=half).tolist() == [[1.5, 1.5]] * 2
    with pytest.raises(RuntimeError, match="alpha is 0.5, but the tensors hold integers"):
        x.long().add(x.long(), alpha=half)


def test_numpys_numbers_are_pythons():
    mask = tensor([True, False])
    assert (mask * np.int32(3)).dtype == (mask * 3).dtype == np.int64
    assert (mask.int() + np.int64(3)).dtype == np.int32
    x = tensor([0.1])
    assert (x * np.float64(0.1)).item() == (x * 0.1).item()
    assert (x.half() * np.float64(0.1)).dtype == float16
    w = tensor([2.0], requires_grad=True)
    (w ** np.int64(2)).backward(create_graph=True)
    assert w.grad.item() == 4.0


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
def test_losses_broadcast_before_dtypes_meet(name):
    x, t = minamp.ones(2, dtype=float16).requires_grad_(), minamp.tensor(0.5).requires_grad_()
    with pytest.warns(UserWarning, match="differ in shape"):
        loss = OPS[name](x, t)
    assert loss.dtype == float32  # as for a target of two float32 values
    loss.backward()
    assert (t.grad.dtype, t.grad.shape) == (float32, ()) and t.grad.item() == -x.grad.float().sum().item()


def test_products_take_no_integers_beside_floats():
    x = minamp.ones(2, 2)
    for product in (
        lambda: x @ (x > 0),
        lambda: x.long() @ x,
        lambda: F.linear(x, x.int()),
        lambda: minamp.addmm(x, x, x.bool()),
        lambda: F.conv1d(x[None], x[None].long()),
    ):
        with pytest.raises(RuntimeError, match="tensors of different dtypes"):
            product()
        with minamp.autocast(), pytest.raises(RuntimeError, match="tensors of different dtypes"):
            product()


def test_an_operand_that_only_its_own_gradient_would_read_is_not_kept():
    x, w = minamp.ones(2, 2).requires_grad_(), minamp.ones(2, 2)
    y = x * 1
    out = minamp.einsum("ij,jk->ik", y, w)
    y.mul_(2.0)
    out.sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0]] * 2


def test_powers_and_remainders_of_bools_are_bools():
    mask = tensor([True, False])
    for y in (mask**mask, mask**True, mask // tensor([True, True]), mask % True):
        assert y.dtype == np.bool_


def test_quotients_rounded_by_div():
    for dtype in (float16, float32, np.int64):
        x, y = tensor([7, -7, 7, -7], dtype=dtype), tensor([2, 2, -2, -2], dtype=dtype)
        assert F.div(x, y, rounding_mode="floor").tolist() == [3, -4, -4, 3]
        assert x.div(y, rounding_mode="trunc").tolist() == [3, -3, -3, 3]
        assert x.divide(2, rounding_mode="trunc").dtype == F.div(x, 2, rounding_mode="floor").dtype == dtype
        assert x.div_(2, rounding_mode="trunc") is x and x.tolist() == [3, -3, 3, -3]
    # of the rounded quotient; 1.0 // 0.1 is 9
    assert F.div(tensor([1.0]), 0.1, rounding_mode="trunc").item() == 10
    large = 2**53 + 1  # float64 does not hold it
    assert F.div(tensor([2 * large, -large]), 2, rounding_mode="trunc").tolist() == [large, -(2**52)]
    assert F.div(x, 2, rounding_mode=None).dtype == float32
    with pytest.raises(
        RuntimeError, match="div: rounding_mode must be None, 'floor' or 'trunc', got 'round'"
    ):
        F.div(x, 2, rounding_mode="round")
