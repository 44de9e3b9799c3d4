"""Activations and the exp and log ops beside them: gradients in float64, and in half at the far ends of the format."""

import math
from statistics import NormalDist

import numpy as np
import pytest

import minamp
from minamp import bfloat16, float16, float32, float64, tensor
from minamp.autograd import check_grads, grad
from minamp.formats import cast, format_of, ulp, widen
from minamp.methods import OPS
from minamp.nn import functional as F
from minamp.op import Op
from minamp.tensor import Tensor

OP = type("Ops", (), {"__getattr__": lambda self, name: OPS[name]})()
_rng = np.random.default_rng(5)


def a(*shape):
    """Normal values, none nearer to 0 than 0.05, so that a difference never straddles a kink there."""
    x = _rng.standard_normal(shape)
    return x + 0.05 * np.sign(x)


def line(name, function, *arrays):
    return pytest.param(name, function, arrays, id=name)


LINES = [
    line("tanh", OP.tanh, a(2, 3)),
    line("sigmoid", OP.sigmoid, a(2, 3)),
    line("relu", lambda x: OP.relu(x) ** 2, a(2, 3)),
    line("relu_grad", lambda x, g: OP.relu_grad(g, x.relu()) ** 2, a(2, 3), a(2, 3)),
    line("leaky_relu", lambda x: OP.leaky_relu(x) ** 2, a(2, 3)),
    line("leaky_relu", lambda x: OP.leaky_relu(x, 0.3) ** 2, a(2, 3)),
    line("prelu", lambda x, w: OP.prelu(x, w) ** 2, a(2, 3, 2), a(3)),
    line("prelu", lambda x, w: OP.prelu(x, w) ** 2, a(2, 3), a(1)),
    line("prelu", lambda x, w: OP.prelu(x, w) ** 2, a(4), a()),
    line("prelu", lambda x, w: OP.prelu(x, w) ** 2, a(), a(1)),
    line("elu", OP.elu, a(2, 3)),
    line("elu", lambda x: OP.elu(x, 0.5), a(2, 3)),
    line("erf", OP.erf, a(2, 3)),
    line("erfinv", OP.erfinv, a(2, 3) / 4),
    line("gelu", OP.gelu, a(2, 3)),
    line("gelu", lambda x: OP.gelu(x, approximate="tanh"), a(2, 3)),
    line("silu", OP.silu, a(2, 3)),
    line("logsigmoid", OP.logsigmoid, a(2, 3)),
    line("softplus", OP.softplus, a(2, 3)),
    line("softplus", lambda x: OP.softplus(x, beta=2, threshold=1), a(2, 3)),
    # gates
    line("hardtanh", lambda x: OP.hardtanh(x, -0.4, 0.7) ** 2, a(2, 3)),
    line("relu6", lambda x: OP.relu6(x * 4) ** 2, a(2, 3)),
    line("hardsigmoid", lambda x: OP.hardsigmoid(x * 3) ** 2, a(2, 3)),
    line("hardswish", lambda x: OP.hardswish(x * 3), a(2, 3)),
    line("mish", OP.mish, a(2, 3)),
    line("selu", OP.selu, a(2, 3)),
    line("gated", OP.gated, a(2, 3), a(3)),
    line("glu", OP.glu, a(2, 4)),
]


@pytest.mark.parametrize("name, function, arrays", LINES)
def test_gradients(name, function, arrays):
    check_grads(function, *arrays)


def test_every_activation_has_a_line():
    files = ("minamp.ops.activations", "minamp.ops.gates")
    declared = {n for n, o in OPS.items() if isinstance(o, Op) and o.__module__ in files}
    assert declared - {p.values[0] for p in LINES} == set()


def test_erf_piece_by_piece():
    x = (2.0 * np.random.default_rng(0).standard_normal((300, 250))).astype(np.float32)
    x.flat[[0, 40_000, 74_998, 74_999]] = np.inf, -np.inf, np.nan, -0.0
    y = OP.erf(Tensor(x)).numpy()
    exact = np.array([math.erf(v) for v in x.reshape(-1)]).reshape(x.shape)
    np.testing.assert_allclose(y, exact, rtol=0, atol=3e-7)
    assert np.all(np.abs(y)[np.abs(x) >= 4] == 1) and math.copysign(1, y[-1, -1]) == -1
    np.testing.assert_array_equal(OP.erf(Tensor(x[::2].T)).numpy(), y[::2].T)


@pytest.mark.parametrize("dtype", [float32, float64], ids=str)
def test_erfinv_is_the_inverse(dtype):
    """Against the normal distribution's quantiles; near the ends a unit in the last place of x is many of y."""
    x = np.array([*np.linspace(-0.999, 0.999, 201), 1 - 2.0**-20, 2.0**-20 - 1, 1e-6, 0.0], dtype)
    y = OP.erfinv(Tensor(x)).numpy()
    exact = np.array([NormalDist().inv_cdf((1 + float(v)) / 2) / math.sqrt(2) for v in x])
    slope = np.sqrt(np.pi) / 2 * np.exp(exact**2)
    eps = np.finfo(dtype).eps
    assert (abs(y - exact) <= 4 * eps * (abs(exact) + slope)).all()
    ends = OP.erfinv(tensor([1.0, -1.0, 1.5, math.nan])).tolist()
    assert ends[:2] == [math.inf, -math.inf] and math.isnan(ends[2]) and math.isnan(ends[3])


# ---- in half, from one end of the format to the other, against the derivative in float64


def sigma(x):
    return np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))


def normal_cdf(x):
    return np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])


def tanh_gelu_slope(x):
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    s = sigma(2 * u)  # (1 + tanh u) / 2
    return s + 2 * x * s * sigma(-2 * u) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


def mish_slope(x):
    t = np.tanh(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))
    return t + x * sigma(x) * (1 - t * t)


ENDS = [0.0, 1e-3, 0.5, 1.0, 2.0, 5.0, 8.0, 10.0, 17.0, 30.0, 88.0, 148.0, 6e4, 65504.0]
BOTH = [-v for v in ENDS] + ENDS
POSITIVE = [6e-8, 1e-4, *ENDS[1:]]
# function, its derivative in float64, the points
SMOOTH = {
    "leaky_relu": (OP.leaky_relu, lambda x: np.where(x > 0, 1, 0.01), BOTH),
    "relu": (OP.relu, lambda x: np.where(x > 0, 1.0, 0.0), BOTH),
    "elu": (OP.elu, lambda x: np.exp(np.minimum(x, 0)), BOTH),
    "gelu": (OP.gelu, lambda x: normal_cdf(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi), BOTH),
    "gelu, tanh": (lambda x: OP.gelu(x, approximate="tanh"), tanh_gelu_slope, BOTH),
    "silu": (OP.silu, lambda x: sigma(x) * (1 + x * sigma(-x)), BOTH),
    "erf": (OP.erf, lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x), BOTH),
    "hardtanh": (OP.hardtanh, lambda x: 1.0 * (abs(x) < 1), BOTH),
    "relu6": (OP.relu6, lambda x: 1.0 * ((x > 0) & (x < 6)), BOTH),
    "hardsigmoid": (OP.hardsigmoid, lambda x: (abs(x) < 3) / 6, BOTH),
    "hardswish": (OP.hardswish, lambda x: np.where(x < 3, (x > -3) * (x / 3 + 0.5), 1), BOTH),
    "mish": (OP.mish, mish_slope, BOTH),
    "selu": (
        OP.selu,
        lambda x: 1.0507009873554805 * np.where(x > 0, 1, 1.6732632423543772 * np.exp(np.minimum(x, 0))),
        BOTH,
    ),
    "atan": (OP.atan, lambda x: 1 / (1 + x * x), BOTH),
    "logsigmoid": (OP.logsigmoid, lambda x: sigma(-x), BOTH),
    "softplus": (OP.softplus, sigma, BOTH),
    "softplus, beta": (lambda x: OP.softplus(x, beta=3), lambda x: sigma(3 * x), BOTH),
    "exp": (OP.exp, np.exp, BOTH),
    "expm1": (OP.expm1, np.exp, BOTH),
    "sin": (OP.sin, np.cos, BOTH),
    "cos": (OP.cos, lambda x: -np.sin(x), BOTH),
    "log": (OP.log, lambda x: 1 / x, POSITIVE),
    "log2": (OP.log2, lambda x: 1 / (x * math.log(2)), POSITIVE),
    "log10": (OP.log10, lambda x: 1 / (x * math.log(10)), POSITIVE),
    "log1p": (OP.log1p, lambda x: 1 / (1 + x), [-0.5, 0.0, *POSITIVE]),
    "sqrt": (OP.sqrt, lambda x: 0.5 / np.sqrt(x), POSITIVE),
    "rsqrt": (OP.rsqrt, lambda x: -0.5 * x**-1.5, POSITIVE),
    "reciprocal": (OP.reciprocal, lambda x: -1 / (x * x), POSITIVE),
}


def slope(function, points, dtype, create_graph=False):
    x = Tensor(cast(np.array(points), dtype), requires_grad=True)
    (g,) = grad(function(x), x, Tensor(np.ones(len(points), np.float32)), create_graph=create_graph)
    assert g.dtype == dtype
    return widen(x._data).astype(float), widen(g._data).astype(float), x, g


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize("name", SMOOTH)
def test_half_gradients_at_the_ends_of_the_format(name, dtype):
    """Within 2 steps of the exact derivative; where that overflows, inf. 2**-22: gelu's 1 + erf(x) in float32.

    rsqrt and reciprocal take powers of their rounded output, as PyTorch: their last digits are 3 and 2 roundings away, and
    where the output is inf the gradient is too.
    """
    function, derivative, points = SMOOTH[name]
    x, g, *_ = slope(function, points, dtype)
    with np.errstate(all="ignore"):
        exact = derivative(x)
        exact = np.where(np.abs(exact) >= format_of(dtype).overflow, np.copysign(np.inf, exact), exact)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(g[~finite], exact[~finite])
    assert np.isfinite(g[finite]).all()
    assert (np.abs(g[finite] - exact[finite]) <= 2 * ulp(exact[finite], dtype) + 2**-22).all()


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize(
    "name, derivative",
    [
        ("tanh", lambda x: np.cosh(np.minimum(np.abs(x), 300)) ** -2.0),
        ("sigmoid", lambda x: sigma(x) * sigma(-x)),
    ],
)
def test_gradients_from_a_rounded_output_are_off_by_its_rounding(name, derivative, dtype):
    x, g, *_ = slope(OPS[name], BOTH, dtype)
    assert (np.abs(g - derivative(x)) <= format_of(dtype).eps).all()


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "tanh",
        "sigmoid",
        "elu",
        "gelu",
        "gelu, tanh",
        "silu",
        "erf",
        "logsigmoid",
        "softplus",
        "softplus, beta",
    ],
)
def test_second_gradients_at_the_ends_are_finite(name, dtype):
    function = OPS[name] if name in OPS else SMOOTH[name][0]
    _, g, x, first = slope(function, BOTH, dtype, create_graph=True)
    assert np.isfinite(g).all()
    first.sum().backward()
    assert np.isfinite(widen(x.grad._data)).all()


def test_half_prelu_at_the_ends():
    x, w = tensor(BOTH, dtype=float16, requires_grad=True), tensor([0.25], dtype=float16, requires_grad=True)
    F.prelu(x, w).backward(minamp.ones(len(BOTH), dtype=float16))
    assert x.grad.tolist() == [0.25] * len(ENDS) + [0.25] + [1] * (len(ENDS) - 1)
    assert w.grad.item() == -math.inf  # the sum of the negative inputs, -125000, is past the format
    np.testing.assert_array_equal(
        F.prelu(x, w)._data, np.where(x._data > 0, x._data, x._data * np.float16(0.25))
    )


# ---- values


def test_values_in_half():
    def at(function, *xs):
        return function(tensor(list(xs), dtype=float16)).tolist()

    assert at(F.softplus, 0.0, 20.0, 65504.0, -65504.0) == [float(np.float16(math.log(2))), 20, 65504, 0]
    assert at(F.logsigmoid, -65504.0, 65504.0, 17.328125, 17.34375) == [-65504, 0, -(2.0**-24), 0]
    assert at(F.elu, -65504.0, 65504.0, -8.3203125, -8.3125) == [-1, 65504, -1, -1 + 2.0**-11]
    assert at(F.leaky_relu, -1024.0, 8.0) == [-10.2421875, 8] and at(
        lambda x: F.leaky_relu(x, 0.5), -4.0
    ) == [-2]
    assert at(OP.expm1, 2.0**-14) == [2.0**-14] and at(OP.log1p, 2.0**-24) == [2.0**-24]
    assert at(OP.log2, 2.0**-24, 32768.0, 0.0) == [-24, 15, -math.inf] and at(OP.log10, 1000.0) == [3]
    assert at(OP.rsqrt, 4.0, 0.0, 65504.0) == [0.5, math.inf, float(np.float16(65504**-0.5))]


def test_softplus_above_its_threshold_is_the_input():
    x = tensor([0.9, 1.1], requires_grad=True)
    y = F.softplus(x, beta=2, threshold=2)
    y.sum().backward()
    assert y[1].item() == x[1].item() and x.grad[1].item() == 1
    assert abs(y[0].item() - math.log1p(math.exp(1.8)) / 2) < 1e-6


def test_gradients_at_the_kinks_are_the_left_ones():
    for function, expected in ((F.relu, 0), (F.leaky_relu, 0.01), (F.elu, 1), (lambda x: F.elu(x, 2.0), 2)):
        x = Tensor(np.array([0.0, -0.0]), requires_grad=True)
        function(x).sum().backward()
        assert x.grad.tolist() == [expected] * 2


@pytest.mark.parametrize("dtype", [float16, float32])
def test_elu_keeps_the_sign_of_zero(dtype):
    y = F.elu(tensor([0.0, -0.0], dtype=dtype))
    assert np.signbit(y.numpy()).tolist() == [False, True]


def test_inplace_is_accepted_and_changes_nothing():
    x = tensor([-1.0, 2.0])
    for function, args in ((F.relu, ()), (F.silu, ()), (F.elu, (0.5,)), (F.leaky_relu, (0.2,))):
        assert function(x, *args, inplace=True).equal(function(x, *args, True)) and x.tolist() == [-1, 2]
        assert function(x, *args, True).equal(function(x, *args))
    assert F.dropout(x, p=1.0, inplace=True).tolist() == [0, 0] and x.tolist() == [-1, 2]


def test_clamp():
    x = tensor([-1.0, 0.0, 0.5, 1.0, 2.0, math.nan], requires_grad=True)
    y = x.clamp(0, 1)
    y.sum().backward()
    assert y.tolist()[:5] == [0, 0, 0.5, 1, 1] and math.isnan(y.tolist()[5])
    assert x.grad.tolist() == [0, 1, 1, 1, 0, 0]  # the bounds are inside
    assert set(x.detach()[:5].clamp(2, 1).tolist()) == {1}  # max wins
    assert (
        OP.clamp(tensor([1, 5]), max=3).tolist() == [1, 3]
        and OP.clamp(tensor([1, 5]), max=3.5).dtype == float32
    )
    lo, hi = tensor([0.0, 2.0], requires_grad=True), tensor([1.0, 1.0], requires_grad=True)
    OP.clamp(tensor([-1.0, 1.5]), lo, hi).sum().backward()
    assert lo.grad.tolist() == [1, 0] and hi.grad.tolist() == [0, 1]
    h = tensor([3.0], dtype=float16)
    assert h.clamp(max=2.0).dtype == float16 and h.clamp_(0, 1).tolist() == [1] and h.tolist() == [1]


def test_addcmul_and_addcdiv_round_once():
    x, y, z = (tensor([v], dtype=float16) for v in (-60000.0, 300.0, 300.0))
    assert OP.addcmul(x, y, z).item() == 30000 and OP.addcdiv(x, y * 200, z, value=3).item() == -59392
    with pytest.raises(RuntimeError, match=r"addcdiv: int64 / int64 has no quotient.*tensor1\.float\(\)"):
        OP.addcdiv(tensor([1]), tensor([1]), tensor([2]))
    assert OP.addcmul(tensor([1]), tensor([2]), tensor([3]), value=2).tolist() == [13]
    a16, a32 = minamp.ones(2, dtype=float16), minamp.ones(2)
    assert OP.addcmul(a32, a16, a16).dtype == OP.addcmul(a16, a32, a16).dtype == float32
    with minamp.autocast():
        assert OP.addcmul(a16, a16, a16).dtype == float16 and OP.addcdiv(a16, a16, a32).dtype == float32
        with pytest.raises(RuntimeError, match="addcmul: bfloat16 in a float16 autocast region"):
            OP.addcmul(a32.bfloat16(), a32.bfloat16(), a32.bfloat16())


def test_autocast():
    h, f = tensor([0.5], dtype=float16), tensor([0.5])
    with minamp.autocast():
        for name in ("expm1", "log1p", "log2", "log10", "rsqrt", "reciprocal", "softplus"):
            assert OPS[name](h).dtype == float32
        for name in (
            "tanh",
            "sigmoid",
            "relu",
            "leaky_relu",
            "elu",
            "gelu",
            "silu",
            "logsigmoid",
            "erf",
            "sin",
            "cos",
        ):
            assert OPS[name](h).dtype == float16 and OPS[name](f).dtype == float32
        assert F.prelu(f, f).dtype == float16 and F.prelu(f.double(), f.double()).dtype == float64


def test_integers():
    i = tensor([0, 1])
    for name in ("tanh", "sigmoid", "erf", "expm1", "log2", "rsqrt", "sin", "cos"):
        assert OPS[name](i).dtype == float32
    for name in ("leaky_relu", "elu", "gelu", "silu", "logsigmoid", "softplus"):
        with pytest.raises(RuntimeError, match=rf"{name}: not defined for int64: use x\.float\(\)"):
            OPS[name](i)


ERRORS = [
    (
        lambda: F.prelu(minamp.ones(2, 4), minamp.ones(3)),
        r"prelu: weight holds 3 slopes, input \(2, 4\) has 4 channels: give 1 or 4",
    ),
    (
        lambda: F.prelu(minamp.ones(4), minamp.ones(4)),
        r"prelu: weight holds 4 slopes, input \(4,\) has 1 channels",
    ),
    (
        lambda: F.prelu(minamp.ones(2, 4), minamp.ones(4, 1)),
        r"prelu: weight must have shape \(C,\) or be one number, got shape \(4, 1\)",
    ),
    (lambda: F.prelu(tensor([1]), minamp.ones(1)), "prelu: not defined for int64"),
    (lambda: F.prelu(minamp.ones(1), minamp.ones(1).half()), r"prelu: tensors of different dtypes"),
    (lambda: OP.clamp(minamp.ones(1)), "clamp: at least one of min and max must be given"),
]


@pytest.mark.parametrize("call, text", ERRORS)
def test_errors(call, text):
    with pytest.raises(RuntimeError, match=text):
        call()


@pytest.mark.parametrize("dtype", [float16, bfloat16, minamp.float32, minamp.float64])
def test_relu_masks_an_infinite_gradient(dtype):
    x = minamp.tensor([-1.0, 0.0, 2.0], dtype=dtype, requires_grad=True)
    x.relu().backward(minamp.full((3,), float("inf"), dtype=dtype))
    assert x.grad.tolist() == [0.0, 0.0, float("inf")]
    zero_dim = minamp.tensor(2.0, dtype=dtype, requires_grad=True)
    zero_dim.relu().backward()
    assert zero_dim.grad.item() == 1.0


@pytest.mark.parametrize("size", [4, 50_000])
@pytest.mark.parametrize("dtype", [float16, bfloat16, minamp.float32, minamp.float64])
@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_relu_and_its_gradient_pass_nan_on(nan, dtype, size):
    x = minamp.tensor(np.tile([nan, -1.0, -0.0, 2.0], size // 4), dtype=dtype, requires_grad=True)
    assert np.signbit(x.detach().float().numpy()[0]) == (math.copysign(1, nan) < 0)
    y = x.relu()
    y.backward(minamp.ones_like(y))
    assert np.isnan(y.detach().float().numpy()[::4]).all() and y.tolist()[1:4] == [0.0, 0.0, 2.0]
    assert x.grad.tolist()[:4] == [1.0, 0.0, 0.0, 1.0]
