"""Fifteen mistakes that people have reported in public, each with what must happen instead.

The project and number of the report stand with each test; words and numbers are our own.
"""

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import GradScaler, autocast, float16, float32, nn, optim, tensor
from minamp.nn.utils import clip_grad_norm_

INF, NAN = float("inf"), float("nan")


def iterate(scaler, pairs):
    """One iteration with the given (optimizer, parameter, scaled gradient) triples."""
    scaler.scale(tensor(1.0))
    for _, p, g in pairs:
        p.grad = tensor(np.full(p.shape, g, np.float32))
    for opt, _, _ in pairs:
        scaler.step(opt)
    scaler.update()


def weight(value=1.0):
    return tensor([value], requires_grad=True)


def test_bug01_growth_stops_at_the_last_finite_scale():  # pytorch 98828
    p, s = weight(), GradScaler(growth_interval=1)
    opt = optim.SGD([p], lr=0.0)
    for _ in range(200):
        iterate(s, [(opt, p, 0.0)])
    assert s.get_scale() == 2.0**127
    iterate(s, [(opt, p, 0.0)])
    assert np.isfinite(p.grad.item())  # at an infinite scale 0 * inf would be nan
    s = GradScaler(growth_interval=1, max_scale=2.0**24)
    for _ in range(20):
        iterate(s, [(opt, p, 0.0)])
    assert s.get_scale() == 2.0**24


def test_bug02_a_gradient_that_no_scale_cures_ends_with_a_diagnosis():  # WSL-Images 9, pytorch 40497
    p, s = weight(), GradScaler()
    opt = optim.SGD([p], lr=0.1)
    for _ in range(166):
        iterate(s, [(opt, p, NAN)])
    assert s.get_scale() == 0.0  # what happens without the options
    s = GradScaler(min_scale=1.0, max_skips=5)
    with pytest.raises(
        FloatingPointError, match=r"5 steps in a row were skipped and the scale is down to 2048\..*number 0"
    ):
        for _ in range(10):
            iterate(s, [(opt, p, NAN)])
    assert p.item() == 1.0


def test_bug03_clip_after_unscale():  # pytorch 40907, Pytorch-UNet 468
    def left(order):
        p, s = minamp.zeros(2, requires_grad=True), GradScaler()
        opt = optim.SGD([p], lr=1.0)
        s.scale(tensor(1.0))
        p.grad = tensor([3e-3 * 65536, 4e-3 * 65536])
        if order == "right":
            s.unscale_(opt)
        clip_grad_norm_([p], 1.0)
        s.step(opt)
        return float(np.linalg.norm(p.detach().numpy()))

    assert left("right") == pytest.approx(5e-3, rel=1e-5) and left("wrong") == pytest.approx(1.5e-5, rel=0.02)


def test_bug04_a_mask_constant_that_half_can_not_hold():  # apex 93, fairseq 3575
    scores, mask = tensor([[1.0, 2.0]], dtype=float16), tensor([[False, True]])
    with pytest.raises((RuntimeError, ValueError), match=r"masked_fill.*-1000000000.*float16.*-65504"):
        scores.masked_fill(mask, -1e9)
    lowest = float(np.finfo(np.float16).min)
    with autocast():  # softmax runs in float32 there
        assert F.softmax(scores.masked_fill(mask, lowest), dim=-1).tolist() == [[1.0, 0.0]]
    two_masks = tensor([-1e4], dtype=float16) + tensor([-6e4], dtype=float16)
    assert two_masks.item() == -INF


def test_bug05_binary_cross_entropy_on_probabilities():  # pytorch 61098
    logit, target = tensor([20.0], dtype=float16), tensor([0.0], dtype=float16)
    with autocast():
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(logit.sigmoid(), target)
        assert F.binary_cross_entropy_with_logits(logit, target).item() == pytest.approx(20.0)
        with autocast(enabled=False):
            F.binary_cross_entropy(logit.sigmoid().float(), target.float())
    assert logit.sigmoid().item() == 1.0  # so log(1 - p) is -inf


@pytest.mark.parametrize("optimizer", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("gradient", [0.0, 1e-4])
def test_bug06_adam_on_half_weights_stays_finite(optimizer, gradient):  # chainer 6299, optax 1754
    p = tensor([1.0], dtype=float16, requires_grad=True)
    opt = optimizer([p], lr=1e-3, weight_decay=0.0)
    for _ in range(5):
        p.grad = tensor([gradient], dtype=float16)
        opt.step()
    moved = 1.0 - p.item()
    assert moved == 0.0 if gradient == 0 else moved == pytest.approx(5e-3, rel=0.1)


def test_bug07_layer_norm_statistics_are_float32():  # pytorch 66707, numpy 21941
    x = tensor([[400.0, -400.0] * 8], dtype=float16)
    assert F.layer_norm(x, (16,)).tolist() == [[1.0, -1.0] * 8]
    assert np.isinf(x.var(dim=-1, correction=0).item())  # the variance itself, 160000, is beyond half
    assert x.float().var(dim=-1, correction=0).item() == 160000


def test_bug08_a_mean_does_not_overflow_on_the_way():  # chainer 6702
    x, zero = minamp.full((16384,), 4.0, dtype=float16), minamp.zeros(16384, dtype=float16)
    assert F.l1_loss(x, zero).item() == x.mean().item() == 4.0
    assert np.isinf(x.sum().item())


def test_bug09_evaluation_before_training_in_one_region():  # apex PR 132, pytorch 112583
    layer = nn.Linear(2, 2)
    with autocast():
        with minamp.no_grad():
            layer(minamp.ones(1, 2))
        loss = layer(minamp.ones(1, 2)).sum()
    loss.backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None


def test_bug10_an_optimizer_without_gradients_says_so_and_stops_no_other():  # nerfstudio PR 1919
    p, q, s = weight(), weight(), GradScaler(init_scale=4.0)
    idle, busy = optim.Adam([p], lr=0.1), optim.SGD([q], lr=0.5)
    s.scale(tensor(1.0))
    q.grad = tensor([4.0])
    with pytest.raises(AssertionError, match="no parameter of this Adam has a gradient"):
        s.step(idle)
    s.step(busy)
    s.update()
    assert q.item() == 0.5 and p.item() == 1.0 and s._get_growth_tracker() == 1


def test_bug11_unscale_belongs_to_the_end_of_an_accumulation_window():  # Swin-Transformer 311
    p, s = weight(), GradScaler(init_scale=1024.0)
    opt = optim.SGD([p], lr=0.1)
    for micro_batch in range(2):
        s.scale((p * 0.01).sum()).backward()
        if micro_batch == 0:
            s.unscale_(opt)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        s.unscale_(opt)


def test_bug12_one_scaler_two_optimizers():  # accelerate 439
    a, b, s = weight(), weight(), GradScaler(init_scale=128.0)
    oa, ob = optim.SGD([a], lr=1.0), optim.SGD([b], lr=1.0)
    iterate(s, [(oa, a, INF), (ob, b, 128.0 * 0.25)])
    assert a.item() == 1.0 and b.item() == 0.75 and s.get_scale() == 64.0


def test_bug13_resume_is_exact():  # ultralytics PR 22189, catalyst 991
    def fresh():
        minamp.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        return (
            net,
            optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
            GradScaler(init_scale=2.0**17, growth_interval=7),
        )

    def train(net, opt, scaler, steps):
        losses = []
        for i in steps:
            rng = np.random.default_rng(i)
            x, y = tensor(rng.standard_normal((16, 8)).astype(np.float32)), tensor(rng.integers(0, 4, 16))
            opt.zero_grad()
            with autocast():
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            losses.append((loss.item(), scaler.get_scale()))
        return losses

    straight = train(*fresh(), range(20))
    first, second = fresh(), fresh()
    losses = train(*first, range(10))
    for old, new in zip(first, second, strict=True):
        new.load_state_dict(old.state_dict())
    assert losses + train(*second, range(10, 20)) == straight
    assert len({scale for _, scale in straight}) > 1  # the scale did move


def test_bug14_half_matmul_is_a_float32_matmul_rounded_once():  # numpy 11590
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((64, 4097)).astype(np.float16) for _ in range(2))
    y = (tensor(a) @ tensor(b).mT).numpy()
    assert y.dtype == np.float16
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    rounded = exact.astype(np.float16)
    assert (y == rounded).mean() > 0.99 and np.abs(y - exact).max() <= 1.01 * np.abs(rounded - exact).max()
    ones = minamp.ones(1, 4097, dtype=float16)
    assert (ones @ ones.mT).item() == 4096  # 4097 rounds to even; sums in half stick at 2048


def test_bug15_a_half_model_under_a_scaler():  # pytorch 74739, pytorch-lightning 5140
    net = nn.Linear(2, 1).half()
    before = net.weight.detach().clone()
    opt, s = optim.SGD(net.parameters(), lr=0.1), GradScaler(init_scale=8.0)
    s.scale(net(minamp.ones(1, 2, dtype=float16)).sum().float()).backward()
    with pytest.raises(
        ValueError,
        match="keep the weights in float32 and run the forward under autocast.*master_weights=True",
    ):
        s.step(opt)
    assert net.weight.grad.tolist() == [[8.0, 8.0]] and net.weight.tolist() == before.tolist()
    opt = optim.SGD(net.parameters(), lr=0.1, master_weights=True)
    s = GradScaler(init_scale=8.0)
    opt.zero_grad()
    s.scale(net(minamp.ones(1, 2, dtype=float16)).sum().float()).backward()
    assert s.step(opt) is True
    np.testing.assert_allclose(net.weight.float().tolist(), before.float().numpy() - 0.1, atol=1e-3)
    assert next(iter(opt.master_params())).dtype == float32
