"""Half arithmetic: inputs and outputs are half, sums are float32, and every result is rounded once."""

import math

import numpy as np
import pytest

import minamp
from minamp import bfloat16, float16, float32, nn, tensor
from minamp.backends import cpu
from minamp.formats import cast, round_to, widen
from minamp.methods import OPS
from minamp.record import observers
from minamp.tensor import Tensor

HALF = [float16, bfloat16]


def half(data, dtype=float16, requires_grad=False):
    return tensor(np.asarray(data, np.float64), dtype=dtype, requires_grad=requires_grad)


# ---- accumulators. In float16 2048 + 1 is 2048, in bfloat16 256 + 1 is 256: a sum that is right was not made in half.


@pytest.mark.parametrize("dtype, n", [(float16, 4096), (bfloat16, 1000)])
@pytest.mark.parametrize("layout", ["rows", "columns", "transposed", "strided"])
def test_sums_over_every_axis_and_layout(dtype, n, layout):
    shape, dim = ((n, 8), 0) if layout != "rows" else ((8, n), 1)
    x = minamp.ones(*shape, dtype=dtype)
    if layout == "transposed":
        x, dim = x.T, 1
    if layout == "strided":
        x = x[:, ::2]
    assert x.sum(dim).dtype == dtype and set(x.sum(dim).tolist()) == {n}
    assert set(x.sum(dim, keepdim=True).reshape(-1).tolist()) == {n}
    assert set(x.mean(dim).tolist()) == {1} and x.mean().item() == 1
    assert x.sum().item() == n * x.shape[1 - dim]


def test_sums_over_the_axes_of_images():
    x = minamp.ones(64, 8, 16, 16, dtype=float16)
    for images, dims in ((x, (0, 2, 3)), (x.permute(0, 2, 3, 1), (0, 1, 2))):
        assert set(images.sum(dims).tolist()) == {16384}


def test_a_mean_overflows_neither_in_its_sum_nor_in_its_count():
    x = minamp.ones(70000, dtype=float16)
    assert x.mean().item() == 1
    assert half(np.full((1000, 2), 100.0)).mean(0).tolist() == [100, 100]  # the sum 100000 is inf in half
    assert x.sum().item() == math.inf  # 70000 itself is


def test_a_variance_overflows_only_where_it_is_too_large_itself():
    signs = np.resize([1.0, -1.0], 1000)
    assert half(200 * signs).var(correction=0).item() == 40000
    assert half(300 * signs).var(correction=0).item() == math.inf  # 90000 > 65504
    assert half(300 * signs, bfloat16).var(correction=0).item() == 90112  # 90000 to 8 bits


@pytest.mark.parametrize(
    "shapes", [((4097,), (4097,)), ((2, 4097), (4097, 2)), ((2, 4097), (4097,)), ((3, 2, 4097), (3, 4097, 2))]
)
def test_matmul_of_4097_ones(shapes):
    a, b = (minamp.ones(*s, dtype=float16) for s in shapes)
    assert set((a @ b).reshape(-1).tolist()) == {4096}  # 4097 rounded once: a tie, to even
    a, b = (minamp.ones(*s, dtype=bfloat16) for s in shapes)
    assert set((a @ b).reshape(-1).tolist()) == {4096}
    assert (half([300.0, 300.0]) @ half([300.0, -300.0])).item() == 0  # the products 90000 would be inf


def test_linear_adds_its_bias_before_the_rounding():
    x, w, b = half([[2048.0, 1.0]]), half([[1.0, 0.5]]), half([0.5])
    assert OPS["linear"](x, w, b).item() == 2048  # 2049 in float32: a tie, to even
    assert OPS["linear"](x, w, half([0.75])).item() == 2050  # 2048.5 would have been 2048, and 2048.75 too


def test_norms_take_their_statistics_in_float32():
    x = half(40.0 * np.resize([1.0, -1.0], (2, 64)))  # the sum of squares 102400 is inf in half
    for y in (OPS["layer_norm"](x, 64), OPS["rms_norm"](x, 64), OPS["group_norm"](x, 2)):
        assert y.dtype == float16 and set(np.abs(y._data).reshape(-1).tolist()) == {1}
    # eps is not rounded to 0
    assert (OPS["layer_norm"](half(np.full((1, 8), 3.0)), 8, eps=1e-8)._data == 0).all()


def test_softmax_of_70000_equal_logits():
    y = OPS["softmax"](minamp.zeros(70000, dtype=float16), 0)
    assert set(y.tolist()) == {float(np.float16(1 / 70000))}


@pytest.mark.parametrize("dtype", HALF)
def test_losses_divide_before_they_round(dtype):
    x, zero = half(np.full((128, 128), 4.0), dtype, requires_grad=True), minamp.zeros(128, 128, dtype=dtype)
    for name, expected in (("l1_loss", 4), ("mse_loss", 16), ("smooth_l1_loss", 3.5), ("huber_loss", 3.5)):
        x.grad = None
        loss = OPS[name](x, zero)  # the sum is 65536 and more
        loss.backward()
        assert loss.dtype == dtype and loss.item() == expected
        assert set(x.grad.reshape(-1).tolist()) == {(8 if name == "mse_loss" else 1) / 16384}
    assert OPS["l1_loss"](half(np.full((128, 128), 4.0)), zero.half(), reduction="sum").item() == math.inf
    logits, target = minamp.zeros(16384, 64, dtype=dtype), Tensor(np.zeros(16384, np.int64))
    once = widen(cast(widen(cast(np.array(math.log(64)), dtype)), dtype)).item()
    for smoothing in (0.0, 0.5):
        assert OPS["cross_entropy"](logits, target, label_smoothing=smoothing).item() == once
    loss = OPS["binary_cross_entropy_with_logits"](
        half(np.full(16384, 8.0), dtype), minamp.zeros(16384, dtype=dtype)
    )
    assert loss.item() == 8


# ---- gradients


@pytest.mark.parametrize("dtype, n", [(float16, 4096), (bfloat16, 1000)])
def test_the_gradient_of_a_broadcast_is_summed_in_float32(dtype, n):
    for shape in ((), (1,), (1, 8), (8,)):
        b = minamp.ones(*shape, dtype=dtype, requires_grad=True)
        (minamp.ones(n, 8, dtype=dtype) + b).backward(minamp.ones(n, 8, dtype=dtype))
        assert b.grad.dtype == dtype and set(b.grad.reshape(-1).tolist()) == {n if 8 in shape else 8 * n}
    w = minamp.ones(8, dtype=dtype, requires_grad=True)
    OPS["layer_norm"](minamp.randn(n, 8).to(dtype), 8, None, w).backward(minamp.ones(n, 8, dtype=dtype))
    assert set(w.grad.tolist()) == {n}


@pytest.mark.parametrize("dtype, n", [(float16, 4096), (bfloat16, 1000)])
def test_gradients_that_meet_at_one_place_are_summed_in_float32(dtype, n):
    x = minamp.ones(2, dtype=dtype, requires_grad=True)
    x[np.zeros(n, int)].backward(minamp.ones(n, dtype=dtype))
    assert x.grad.tolist() == [n, 0]
    x.grad = None
    OPS["gather"](x, 0, Tensor(np.ones(n, int))).backward(minamp.ones(n, dtype=dtype))
    assert x.grad.tolist() == [0, n]


def test_gradients_of_a_half_loss_over_more_rows_than_half_can_count():
    x = minamp.zeros(70000, 2, dtype=float16, requires_grad=True)
    for create_graph in (False, True):
        x.grad = None
        OPS["cross_entropy"](x, Tensor(np.zeros(70000, np.int64))).backward(
            half(1024.0), create_graph=create_graph
        )
        np.testing.assert_allclose(
            x.grad._data, np.resize([-512 / 70000, 512 / 70000], (70000, 2)), rtol=2e-3
        )


@pytest.mark.parametrize("dtype", HALF)
def test_every_gradient_on_the_way_lies_on_the_grid(dtype):
    gradients = []

    def observe(phase, op, inputs, output):
        if phase == "backward":
            gradients.append(output)

    x = half([[0.3, 0.7, -1.1], [0.9, -0.2, 0.1]], dtype, requires_grad=True)
    observers.append(observe)
    try:
        y = OPS["log_softmax"](OPS["gelu"](OPS["layer_norm"](x, 3)) * OPS["exp"](x) / 3.0, 1)
        (y**2).mean().backward()
    finally:
        observers.remove(observe)
    assert len(gradients) == 9 and x.grad.dtype == dtype
    for g in gradients:
        np.testing.assert_array_equal(g, round_to(g, dtype))


# ---- one rounding: the float64 result rounded once

_rng = np.random.default_rng(5)
NUMBERS = np.concatenate(
    [_rng.standard_normal(3000), _rng.uniform(-11, 11, 3000), _rng.standard_normal(1000) * 1e-4]
)
EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", EXACT)
def test_arithmetic_is_the_exact_result_rounded_once(name, dtype):
    a, b = half(NUMBERS, dtype), half(NUMBERS[::-1], dtype)
    with np.errstate(all="ignore"):
        exact = cast(EXACT[name](a.double()._data, b.double()._data), dtype)
    np.testing.assert_array_equal(widen(OPS[name](a, b)._data), widen(exact))


@pytest.mark.parametrize("dtype", HALF)
def test_roots_and_squares_are_the_exact_result_rounded_once(dtype):
    a = half(np.abs(NUMBERS), dtype)
    np.testing.assert_array_equal(widen(OPS["sqrt"](a)._data), widen(cast(np.sqrt(a.double()._data), dtype)))
    np.testing.assert_array_equal(widen(OPS["square"](a)._data), widen(cast(a.double()._data ** 2, dtype)))


FUNCTIONS = {
    "exp": np.exp,
    "tanh": np.tanh,
    "log": lambda x: np.log(np.abs(x)),
    "log1p": lambda x: np.log1p(np.abs(x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "erf": np.vectorize(math.erf),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": np.vectorize(lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2))),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_within_one_step_of_the_exact_result(name, dtype):
    x = half(np.abs(NUMBERS) if name.startswith("log") else NUMBERS, dtype)
    if name == "gelu":
        x = x[x > -3.5]  # further left float32's 1 + erf has fewer digits than half, as in PyTorch
    y, exact = OPS[name](x), cast(FUNCTIONS[name](x.double()._data), dtype)
    assert y.dtype == dtype
    steps = np.abs(_order(y._data) - _order(exact))
    assert steps.max() <= 1 and (steps > 0).mean() < 0.01


def _order(a):
    """Half numbers by their place on the number line."""
    bits = a.view(np.int16).astype(np.int64)
    return np.where(bits < 0, -32768 - bits, bits)


def test_known_saturations():
    assert OPS["exp"](half([11.0859375, 11.09375])).tolist() == [65248, math.inf]
    assert OPS["sigmoid"](half([8.3125, 8.3203125])).tolist()[1] == 1 > OPS["sigmoid"](half([8.3125])).item()
    assert OPS["tanh"](half([4.5078125])).item() == 1 > OPS["tanh"](half([4.50390625])).item()
    for name in ("silu", "gelu", "tanh", "sigmoid", "erf"):
        x = half([65504.0, -65504.0], requires_grad=True)
        y = OPS[name](x)
        y.sum().backward()
        assert np.isfinite(y._data).all() and np.isfinite(x.grad._data).all()


def test_results_keep_their_format():
    for dtype in HALF:
        x = half([[1.0, 2.0]], dtype)
        for y in (
            x + 1.0,
            2 * x,
            x / 3,
            x**2,
            -x,
            x.sum(),
            x.mean(),
            x.var(),
            x.max(),
            x @ x.T,
            OPS["softmax"](x, 1),
        ):
            assert y.dtype == dtype
    assert float32 not in {(x + x).dtype, (x * 0.5).dtype}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_weights_gradient_is_kept_where_it_was_made(monkeypatch, autocast):
    """Neither a reshape to its own shape nor a cast on the way may lead to a copy: 0.2 ms of a step with 660,000 weights."""
    copied = []
    owned = cpu.owned
    monkeypatch.setattr(cpu, "owned", lambda g, *rest: copied.append(g.shape) or owned(g, *rest))
    layers = nn.Sequential(
        nn.Linear(8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    with minamp.autocast(enabled=autocast):
        loss = layers(minamp.ones(5, 8)).float().sum()
    loss.backward()
    assert [shape for shape in copied if len(shape) > 1] == []
    assert all(p.grad.dtype == float32 and p.grad.shape == p.shape for p in layers.parameters())
