"""The naive half versions fail exactly as half arithmetic says, and are the textbook formulas in float32."""

import numpy as np
import pytest

import minamp
from minamp import bfloat16, float16, float32, tensor
from minamp.autograd import check_grads
from minamp.formats import widen
from minamp.methods import OPS
from minamp.record import observers

NAMES = ("naive_half_sum", "naive_half_softmax", "naive_half_cross_entropy", "naive_half_layer_norm")
naive_sum, naive_softmax, naive_cross_entropy, naive_layer_norm = (OPS[n] for n in NAMES)


def half(data, dtype=float16):
    return tensor(data, dtype=dtype, requires_grad=True)


def x34():
    return np.random.default_rng(3).standard_normal((3, 4))


# ---- the running sum


def test_a_running_sum_of_ones_stalls_where_the_spacing_becomes_two():
    assert naive_sum(half(np.ones(4096))).item() == 2048
    assert naive_sum(half(np.ones(1000), bfloat16)).item() == 256
    assert naive_sum(tensor(np.ones(4096, np.float32))).item() == 4096


@pytest.mark.parametrize("step, stall, adds", [(0.1, 256.0, 2207), (1e-3, 4.0, 3070)])
def test_where_running_sums_stall(step, stall, adds):
    for n, reached in ((adds - 1, False), (adds, True), (adds + 500, True)):
        assert (naive_sum(half(np.full(n, step))).item() == stall) is reached


def test_the_running_sum_rounds_at_every_step_over_every_axis():
    data = np.random.default_rng(1).uniform(0, 8, (5, 300)).astype(np.float16)
    for x, dim in ((data, 1), (data.T, 0), (np.asfortranarray(data), -1)):
        total = np.zeros(5, np.float16)
        for column in data.T:
            total = (total.astype(np.float64) + column).astype(np.float16)  # one rounding an addition
        assert (naive_sum(tensor(x), dim)._data == total).all()
    assert naive_sum(half(data), 1, keepdim=True).shape == (5, 1) and naive_sum(half(data)).shape == ()
    assert naive_sum(half(np.zeros((0, 3)))).item() == 0 and naive_sum(half(2.0)).item() == 2


# ---- softmax and cross-entropy


def test_softmax_without_shift_overflows_where_exp_does():
    p = naive_softmax(half([[0.0, 12.0]]))
    assert p.dtype == float16 and p._data[0, 0] == 0 and np.isnan(p._data[0, 1])
    assert np.isfinite(naive_softmax(half([[0.0, 11.0859375]]))._data).all()
    assert np.isnan(naive_softmax(half([[0.0, 11.09]]))._data).any()  # stored as 11.09375
    # 3 * 22032 > 65504: the sum overflows first
    assert (naive_softmax(half([[10.0, 10.0, 10.0]]))._data == 0).all()
    assert OPS["softmax"](half([[0.0, 12.0]]), 1)._data[0].tolist() == [float(np.float16(6.144e-6)), 1.0]


def test_cross_entropy_of_an_underflown_probability():
    def loss(gap):
        return naive_cross_entropy(half([[0.0, -gap]]), tensor([1])).item()

    assert loss(17.3125) == 16.640625 and loss(17.0) == 16.640625  # p is stuck at 2**-24
    assert loss(17.34375) == np.inf
    stable = OPS["cross_entropy"](half([[0.0, -17.34375]]), tensor([1]))
    assert stable.item() == 17.34375


def test_a_confident_row_is_learnt_no_further_in_half():
    for dtype, expected in ((float16, 0.0), (float32, 2.959e-4)):
        x = half([[-8.125, 0.0]], dtype)
        loss = naive_cross_entropy(x, tensor([1]))
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-3)  # 1 + 2.96e-4 is 1 in half, so p is 1
        assert -x.grad._data[0, 1] == pytest.approx(expected, rel=1e-3)


def test_one_overflowing_row_makes_the_loss_nan():
    x = half([[0.0, 1.0], [0.0, 12.0]])
    loss = naive_cross_entropy(x, tensor([0, 1]))
    loss.backward()
    assert np.isnan(loss.item()) and np.isfinite(x.grad._data[0]).all() and np.isnan(x.grad._data[1]).all()


def test_the_softmax_gradient_is_rounded_at_every_step():
    data, g = np.float16(x34()), np.float16(x34()[::-1])
    x = half(data)
    y = naive_softmax(x, 1)
    (y * tensor(g)).sum().backward()
    p, total = y._data, np.zeros((3, 1), np.float16)
    for column in ((p * g)[:, i : i + 1] for i in range(4)):
        total = total + column
    assert (x.grad._data == p * (g - total)).all()  # NumPy's half - and * round once


# ---- layer norm


@pytest.mark.parametrize(
    "size, std, low, high",
    [(64, 8, 0, 0), (64, 30, 0.1, 0.3), (64, 64, 1, 1), (1024, 8, 0.3, 0.6), (1024, 16, 1, 1)],
)
def test_layer_norm_silently_zeroes_wide_rows(size, std, low, high):
    x = tensor(np.random.default_rng(0).standard_normal((400, size)) * std, dtype=float16)
    y = naive_layer_norm(x)._data
    zeroed = (y == 0).all(1)
    assert np.isfinite(y).all() and low <= zeroed.mean() <= high
    exact = OPS["layer_norm"](x.float(), size)._data
    worst = np.abs(y[~zeroed] - exact[~zeroed]).max(initial=0)
    assert worst <= size * 2.0**-11 * np.abs(exact).max()  # what a running sum of `size` terms can be off by
    assert (naive_layer_norm(x.float())._data != 0).any(1).all()


def test_layer_norm_loses_a_small_eps():
    row = half(np.full((1, 8), 3.0))
    assert np.isnan(naive_layer_norm(row, eps=1e-8)._data).all()  # 1e-8 is 0 in half: 0 / 0
    assert (naive_layer_norm(row, eps=1e-5)._data == 0).all()


# ---- what all of them promise


@pytest.mark.parametrize("dtype", [float16, bfloat16, float32])
def test_formats_stay_and_autocast_leaves_them_alone(dtype):
    for region in (float16, bfloat16):
        with minamp.autocast(dtype=region):
            x = half(x34(), dtype)
            outs = [
                naive_sum(x, 1),
                naive_softmax(x),
                naive_layer_norm(x),
                naive_cross_entropy(x, tensor([1, 0, 3])),
            ]
        for y in outs:
            assert y.dtype == dtype
        sum(y.float().sum() for y in outs).backward()
        assert x.grad.dtype == dtype and np.isfinite(widen(x.grad._data)).all()


def test_float32_is_the_textbook_formula():
    data = x34().astype(np.float32)
    x = tensor(data)
    np.testing.assert_allclose(naive_softmax(x)._data, OPS["softmax"](x, 1)._data, rtol=1e-6)
    np.testing.assert_allclose(naive_layer_norm(x)._data, OPS["layer_norm"](x, 4)._data, atol=1e-6)
    t = tensor([1, 0, 3])
    assert naive_cross_entropy(x, t).item() == pytest.approx(OPS["cross_entropy"](x, t).item(), rel=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: naive_sum(x, 0) ** 2,
        lambda x: naive_sum(x) ** 2,
        lambda x: naive_softmax(x, 0),
        lambda x: naive_cross_entropy(x, tensor([1, 0, 3])),
        naive_layer_norm,
    ],
)
def test_gradients(function):
    check_grads(function, x34())


def test_observers_see_them_by_name():
    seen = []

    def observe(phase, op, inputs, output):
        seen.append((phase, op.name))

    observers.append(observe)
    try:
        naive_cross_entropy(half(x34()), tensor([1, 0, 3])).backward()
        naive_sum(half(x34())).backward()
        naive_layer_norm(half(x34())).sum().backward()
    finally:
        observers.remove(observe)
    assert {(phase, name) for phase in ("forward", "backward") for name in NAMES} <= set(seen)


def test_errors():
    x = half(x34())
    with pytest.raises(
        ValueError,
        match=r"naive_half_cross_entropy: give logits \(N, C\) and target \(N,\), got \(3, 4\) and \(2,\)",
    ):
        naive_cross_entropy(x, tensor([0, 1]))
    with pytest.raises(
        RuntimeError,
        match=r"naive_half_cross_entropy: target must be integer, this one is float32: use target.long\(\)",
    ):
        naive_cross_entropy(x, minamp.zeros(3))
    with pytest.raises(IndexError, match="naive_half_softmax: dim 2 is out of range"):
        naive_softmax(x, 2)
