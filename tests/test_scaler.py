"""GradScaler, case by case (B01...): the behaviour of torch.amp.GradScaler, with its flaws mended where the test says so.

Unless a test says otherwise: one parameter that starts at 1.0, SGD with lr 0.5, and a "good" iteration leaves a scaled gradient
whose unscaled value is 0.5; a "bad" one leaves inf.
"""

import copy
import gc
import pickle

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import GradScaler, bfloat16, float16, float32, float64, optim
from minamp.backends import cpu
from minamp.nn.utils import clip_grad_norm_, clip_grad_value_

INF, NAN = float("inf"), float("nan")


def param(value=1.0, dtype=float32):
    return minamp.tensor([value], dtype=dtype, requires_grad=True)


def start(scaler):
    """Create the scale, as the first scaler.scale(loss) does."""
    scaler.scale(minamp.tensor(1.0))
    return scaler


def set_grad(p, scaler, kind):
    value = {"good": 0.5 * scaler.get_scale(), "inf": INF, "nan": NAN}[kind]
    p.grad = minamp.tensor([value], dtype=p.dtype)


def run(scaler, kinds, p=None, opt=None):
    """One iteration per kind; the scales and growth counts after each."""
    p = param() if p is None else p
    opt = opt or optim.SGD([p], lr=0.5)
    start(scaler)
    scales, counts, values = [], [], []
    for kind in kinds:
        set_grad(p, scaler, kind)
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
        counts.append(scaler._get_growth_tracker())
        values.append(p.item())
    return scales, counts, values


def test_B01_defaults():
    s = GradScaler()
    assert (s.get_scale(), s.get_growth_factor(), s.get_backoff_factor(), s.get_growth_interval()) == (
        65536.0,
        2.0,
        0.5,
        2000,
    )
    assert s.is_enabled() and s._get_growth_tracker() == 0 and s._scale is None


def test_B02_factors_on_the_wrong_side_of_one():
    with pytest.raises(AssertionError, match="growth_factor must be greater than 1"):
        GradScaler(growth_factor=1.0)
    with pytest.raises(AssertionError, match="backoff_factor must be less than 1"):
        GradScaler(backoff_factor=1.0)
    GradScaler(growth_factor=1.0, backoff_factor=1.0, enabled=False)


@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced"])
@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_B03_unscale_and_check_in_one_pass(layout, bad):
    g = np.full((20, 10), 4.0, np.float32)
    g = {"plain": g[:10].copy(), "transposed": g[:10].T, "sliced": g[::2]}[layout]
    if bad is not None:
        g[2, 2] = bad
    assert cpu.unscale([g], np.float32(4)).tolist() == [bad is not None] * 2
    rest = np.ones((10, 10), bool)
    rest[2, 2] = bad is None
    assert (g[rest] == 1.0).all()


def test_B04_scale_and_count():
    s = GradScaler(init_scale=4.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=2)
    assert run(s, ["good", "good", "inf"])[:2] == ([4.0, 8.0, 2.0], [1, 0, 0])


def test_B05_nested_outputs_keep_their_nesting():
    s, t = GradScaler(init_scale=2.0), minamp.tensor(4.0)
    out = s.scale((t, (t, t), [t, (t, t)]))
    assert (
        isinstance(out, tuple)
        and isinstance(out[1], tuple)
        and isinstance(out[2], list)
        and isinstance(out[2][1], tuple)
    )
    assert [x.item() for x in (out[0], *out[1], out[2][0], *out[2][1])] == [8.0] * 6
    assert s.scale([]) == []
    with pytest.raises(ValueError, match="nested lists and tuples"):
        s.scale(3.0)


@pytest.mark.parametrize("lazy", [True, False])
def test_B06_load_state_dict(lazy):
    s0 = GradScaler(init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
    s1 = GradScaler(init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
    s1._growth_tracker = 7
    if not lazy:
        start(s1)
    s1.load_state_dict(s0.state_dict())
    assert (s1.get_scale(), s1.get_growth_factor(), s1.get_backoff_factor(), s1.get_growth_interval()) == (
        3.0,
        4.0,
        0.5,
        2,
    )
    assert s1._get_growth_tracker() == 0


def small_training(scaler=None, bad_at=None, clip=None):
    """Four batches on a two-layer net, lr 1; returns its weights."""
    minamp.manual_seed(3)
    net = minamp.nn.Sequential(minamp.nn.Linear(8, 8), minamp.nn.Linear(8, 8))
    opt = optim.SGD(net.parameters(), lr=1.0)
    rng = np.random.default_rng(5)
    for i in range(4):
        x, y = (minamp.tensor(rng.standard_normal((8, 8)).astype(np.float32)) for _ in range(2))
        opt.zero_grad()
        loss = F.mse_loss(net(x), y)
        (scaler.scale(loss) if scaler else loss).backward()
        if i == bad_at:
            if not scaler:
                continue
            net[1].weight.grad[0, 0] = INF
        if scaler:
            if clip == "unscaled":
                scaler.unscale_(opt)
                clip_grad_norm_(net.parameters(), 0.2)
            elif clip == "scaled":
                clip_grad_norm_(net.parameters(), 0.2 * scaler.get_scale())
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
    return np.concatenate([p.detach().numpy().ravel() for p in net.parameters()])


def test_B07_training_with_one_overflow_equals_training_without_that_step():
    s = GradScaler(init_scale=128.0, growth_factor=2.0, growth_interval=1)
    scaled, plain = small_training(s, bad_at=2), small_training(bad_at=2)
    assert s.get_scale() == 128 * 2**3 * 0.5
    np.testing.assert_array_equal(scaled, plain)  # powers of two: not one bit differs


def test_B08_trace_with_an_overflow():
    s = GradScaler(init_scale=128.0, growth_interval=2)
    assert run(s, ["good", "inf", "good", "good"]) == (
        [128, 64, 64, 128],
        [1, 0, 1, 0],
        [0.75, 0.75, 0.5, 0.25],
    )


def test_B09_trace_of_four_good_steps():
    assert run(GradScaler(init_scale=128.0, growth_interval=2), ["good"] * 4)[0] == [128, 256, 256, 512]


def test_B10_accumulation_over_two_micro_batches():
    s, p = GradScaler(init_scale=128.0, growth_interval=1), param()
    opt, steps = optim.SGD([p], lr=0.5), 0
    for i in range(4):
        s.scale((p * 1.0).sum() / 2).backward()
        if i % 2:
            steps += s.step(opt) is True
            s.update()
            opt.zero_grad()
    assert s.get_scale() == 512 and steps == 2 and p.item() == 0.0


def test_B11_clip_after_unscale_or_with_the_threshold_scaled():
    results = []
    for clip in ("unscaled", "scaled"):
        s = GradScaler(init_scale=128.0, growth_interval=1)
        results.append(small_training(s, bad_at=2, clip=clip))
        assert s.get_scale() == 512
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first, p0", [("good", 0.5), ("inf", 1.0)])
def test_B12_two_optimizers_one_scale(first, p0):
    s, a, b = start(GradScaler(init_scale=128.0, growth_interval=1)), param(), param()
    oa, ob = optim.SGD([a], lr=0.5), optim.SGD([b], lr=0.5)
    a.grad = minamp.tensor([128.0 if first == "good" else INF])
    b.grad = minamp.tensor([INF])
    s.step(oa), s.step(ob), s.update()
    assert (a.item(), b.item(), s.get_scale()) == (p0, 1.0, 64.0)  # one backoff, however many overflowed


def test_B13_two_models_two_losses():
    s = GradScaler(init_scale=128.0, growth_interval=1)
    w0, w1 = param(), param()
    o0, o1 = optim.SGD([w0], lr=0.0), optim.SGD([w1], lr=0.0)
    stepped = [0, 0]
    for i in range(4):
        o0.zero_grad(), o1.zero_grad()
        a, b = w0 * 2.0, w1 * 3.0
        s.scale((a + b).sum()).backward(retain_graph=True)
        s.scale((a - b).sum()).backward()
        if i == 2:
            w1.grad = minamp.tensor([INF])
        s.unscale_(o0)
        stepped[0] += s.step(o0) is True
        stepped[1] += s.step(o1) is True
        s.update()
    assert s.get_scale() == 512 and stepped == [4, 3]


def test_B14_an_optimizer_that_is_not_stepped_counts_for_nothing():
    s, a, b = start(GradScaler(init_scale=4.0, growth_interval=1)), param(), param()
    oa = optim.SGD([a], lr=0.5)
    set_grad(a, s, "good"), set_grad(b, s, "inf")
    s.step(oa), s.update()
    assert s.get_scale() == 8.0


def test_B15_growth_never_reaches_inf():
    s = GradScaler(init_scale=1e38, growth_factor=16.0, growth_interval=1)
    scales, counts, _ = run(s, ["good"])
    assert scales == [float(np.float32(1e38))] and counts == [0]
    assert run(GradScaler(init_scale=2.0**126, growth_interval=1), ["good"] * 3)[0] == [2.0**127] * 3


def test_B16_calls_out_of_order():
    s, p = start(GradScaler(init_scale=4.0)), param()
    opt = optim.SGD([p], lr=0.5)
    set_grad(p, s, "good")
    s.unscale_(opt)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        s.unscale_(opt)
    s.step(opt)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        s.unscale_(opt)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        s.step(opt)
    s.update()
    set_grad(p, s, "good")
    s.unscale_(opt), s.step(opt), s.update()
    assert p.item() == 0.5


def test_B17_calls_too_early():
    s, p = GradScaler(), param()
    opt = optim.SGD([p], lr=0.5)
    for call in (lambda: s.step(opt), lambda: s.unscale_(opt), s.update, lambda: s.update(2.0)):
        with pytest.raises(AssertionError, match="call scaler.scale"):
            call()
    start(s)
    with pytest.raises(AssertionError, match="no parameter of this SGD has a gradient"):
        s.step(opt)
    with pytest.raises(AssertionError, match="update: no optimizer was stepped or unscaled"):
        GradScaler.update(start(GradScaler()))


def test_B18_closures_are_refused():
    s, p = start(GradScaler()), param()
    opt = optim.SGD([p], lr=0.5)
    set_grad(p, s, "good")
    with pytest.raises(RuntimeError, match="closure"):
        s.step(opt, closure=lambda: None)
    with pytest.raises(RuntimeError, match="closure"):  # PyTorch does not notice a positional one
        s.step(opt, lambda: None)
    assert p.item() == 1.0
    GradScaler(enabled=False).step(opt, closure=lambda: 0.0)


def test_B19_half_gradients_are_refused_and_nothing_is_changed():
    s, p, h = start(GradScaler(init_scale=4.0)), param(), param(dtype=float16)
    opt = optim.SGD([p, h], lr=0.5)
    p.grad, h.grad = minamp.tensor([8.0]), minamp.tensor([8.0], dtype=float16)
    with pytest.raises(ValueError, match="float16 gradients.*master_weights"):
        s.unscale_(opt)
    assert p.grad.item() == h.grad.item() == 8.0
    h.grad = None
    s.step(opt)  # still READY
    assert p.item() == 0.0


def test_B20_a_skipped_step_touches_no_state():
    s, p = start(GradScaler()), param()
    opt = optim.SGD([p], lr=0.5, momentum=0.9, weight_decay=0.1)
    set_grad(p, s, "inf")
    assert s.step(opt) is None
    assert p.item() == 1.0 and not opt.state[p]


def test_B21_arguments_are_handed_on():
    class Recorder(optim.SGD):
        def step(self, *args, **kwargs):
            self.called = (args, kwargs)
            return "ret"

    s, p = start(GradScaler()), param()
    opt = Recorder([p], lr=0.5)
    set_grad(p, s, "good")
    assert s.step(opt, 3, foo=1) == "ret" and opt.called == ((3,), {"foo": 1})
    s.update()
    set_grad(p, s, "inf")
    assert s.step(opt, 3, foo=1) is None


def test_B22_what_is_written_after_unscale_is_not_looked_at_again():
    s, p = start(GradScaler(init_scale=4.0)), param()
    opt = optim.SGD([p], lr=0.5)
    set_grad(p, s, "good")
    s.unscale_(opt)
    p.grad = minamp.tensor([INF])
    s.step(opt), s.update()
    assert p.item() == -INF and s.get_scale() == 4.0 and s._get_growth_tracker() == 1


def test_B23_an_overflow_repaired_after_unscale_is_still_skipped():
    s, p = start(GradScaler(init_scale=4.0)), param()
    opt = optim.SGD([p], lr=0.5)
    set_grad(p, s, "inf")
    s.unscale_(opt)
    p.grad = minamp.tensor([1.0])
    s.step(opt), s.update()
    assert p.item() == 1.0 and s.get_scale() == 2.0


@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_B24_a_gradient_that_was_gathered_from_rows(bad):
    """PyTorch's case has a sparse gradient; minamp has no sparse tensors, an embedding's gradient is dense."""
    s, table = start(GradScaler(init_scale=4.0)), minamp.zeros(2, 3, requires_grad=True)
    values = minamp.tensor([16.0, 32.0, 64.0 if bad is None else bad])
    table[minamp.tensor([0, 1, 1]), minamp.tensor([2, 0, 2])].backward(values)
    opt = optim.SGD([table], lr=1.0)
    s.unscale_(opt)
    assert s._records[id(opt)].found_inf == (bad is not None)
    if bad is None:
        assert table.grad.tolist() == [[0, 0, 4], [8, 0, 16]]


def test_B25_rows_used_twice_overflow_half_when_added():
    s, weight = start(GradScaler()), minamp.zeros(2, 1, requires_grad=True)
    rows = F.embedding(minamp.tensor([1, 1]), weight.half())
    rows.backward(minamp.tensor([[64000.0], [64000.0]], dtype=float16))
    opt = optim.SGD([weight], lr=1.0)
    s.unscale_(opt)
    assert s._records[id(opt)].found_inf == 1.0


def test_B26_disabled():
    s, p = GradScaler(enabled=False), param()
    opt, loss = optim.SGD([p], lr=0.5), object()
    assert s.scale(loss) is loss
    p.grad = minamp.tensor([INF])
    s.unscale_(opt), s.step(opt), s.update()
    assert p.item() == -INF and s.get_scale() == 1.0 and s.state_dict() == {} and s._get_growth_tracker() == 0
    with pytest.raises(AttributeError):
        s.get_growth_factor()


def test_B27_the_state_of_a_disabled_scaler_is_refused():
    with pytest.raises(RuntimeError, match="saved from a disabled scaler"):
        GradScaler().load_state_dict(GradScaler(enabled=False).state_dict())
    GradScaler(enabled=False).load_state_dict({})
    s = GradScaler(init_scale=8.0)
    with pytest.raises(KeyError, match="load_state_dict: the state has no 'growth_factor'"):
        s.load_state_dict({"scale": 2.0})
    assert s.get_scale() == 8.0


@pytest.mark.parametrize(
    "key, value, error",
    [
        ("scale", "x", TypeError),
        ("scale", NAN, ValueError),
        ("growth_factor", None, TypeError),
        ("backoff_factor", -0.5, ValueError),
        ("growth_interval", 0, ValueError),
        ("_growth_tracker", 0.5, ValueError),
        ("_growth_tracker", 2**31, ValueError),
    ],
)
@pytest.mark.parametrize("lazy", [True, False])
def test_a_state_that_can_not_be_is_refused_and_nothing_is_changed(key, value, error, lazy):
    s = GradScaler(init_scale=8.0) if lazy else start(GradScaler(init_scale=8.0))
    before = s.state_dict()
    state = {
        "scale": 2.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 1,
    }
    with pytest.raises(error, match=f"^load_state_dict: {key} must be "):
        s.load_state_dict(state | {key: value})
    assert s.state_dict() == before


def test_a_scale_that_shrank_to_0_is_saved_and_loaded():
    s = GradScaler(init_scale=2.0**-149)
    run(s, ["inf"])
    fresh = GradScaler()
    fresh.load_state_dict(s.state_dict())
    assert fresh.get_scale() == 0.0


def test_B28_update_with_a_new_scale():
    s = GradScaler(init_scale=4.0)
    run(s, ["good"])
    s.update(10.0)
    assert s.get_scale() == 10.0 and s._get_growth_tracker() == 1


def test_B29_what_new_scale_may_be():
    s = start(GradScaler(init_scale=4.0))
    with pytest.raises(AssertionError, match="one element and no grad"):
        s.update(minamp.tensor([1.0, 2.0]))
    with pytest.raises(AssertionError, match="one element and no grad"):
        s.update(minamp.tensor(1.0, requires_grad=True))
    s.update(10)  # PyTorch: AttributeError
    assert s.get_scale() == 10.0
    s.update(minamp.tensor(3.0))
    assert s.get_scale() == 3.0


def test_B30_pickle():
    s, p = start(GradScaler(init_scale=128.0, growth_interval=3)), param()
    opt = optim.SGD([p], lr=0.5)
    set_grad(p, s, "good")
    s.unscale_(opt)
    for copier in (pickle.dumps, copy.deepcopy):
        with pytest.raises(AssertionError, match=r"pickle it after update\(\)"):
            copier(s)
    s.step(opt), s.update()
    again = pickle.loads(pickle.dumps(s))
    assert again.get_scale() == 128.0 and again._get_growth_tracker() == 1 and again._scale is None


def test_B31_resume():
    s = GradScaler(init_scale=128.0, growth_interval=3)
    run(s, ["good", "good"])
    fresh = GradScaler()
    fresh.load_state_dict(s.state_dict())
    assert run(fresh, ["good"])[:2] == ([256.0], [0])


class ScalingOptimizer(optim.SGD):
    """An optimizer that unscales and skips by itself."""

    _step_supports_amp_scaling = True
    seen = None

    def step(self):
        scale = None if self.grad_scale is None else self.grad_scale.item()
        self.seen = (scale, self.found_inf.item())
        return True


def test_B32_an_optimizer_that_scales_by_itself():
    p = param()
    for grad, found in ((4.0, 0.0), (INF, 1.0)):
        s, opt = start(GradScaler(init_scale=2.0)), ScalingOptimizer([p], lr=0.5)
        p.grad = minamp.tensor([grad])
        assert s.step(opt) is True
        assert opt.seen == (2.0, found) and not hasattr(opt, "grad_scale") and not hasattr(opt, "found_inf")
        assert p.grad.item() == grad


def test_B33_such_an_optimizer_after_unscale():
    s, p = start(GradScaler(init_scale=2.0)), param()
    opt = ScalingOptimizer([p], lr=0.5)
    p.grad = minamp.tensor([4.0])
    s.unscale_(opt)
    s.step(opt)
    assert opt.seen == (None, 0.0) and p.grad.item() == 2.0


def one_weight(scale):
    """y = w*x in half with w = 2, x = 3, target 0, squared error, lr 0.01."""
    w, x = param(2.0), minamp.tensor([[3.0]])
    s, opt = GradScaler(init_scale=scale), optim.SGD([w], lr=0.01)

    def iterate():
        opt.zero_grad()
        with minamp.autocast():
            loss = F.mse_loss(x @ w.reshape(1, 1), minamp.zeros(1, 1))
        s.scale(loss).backward()
        scaled = w.grad.item()
        s.step(opt), s.update()
        return loss.item(), scaled

    return w, s, iterate


def test_B34_end_to_end():
    w, s, iterate = one_weight(1024.0)
    assert iterate() == (36.0, 36864.0)
    assert w.item() == pytest.approx(1.64, abs=1e-6) and w.grad.item() == 36.0


def test_B35_end_to_end_with_a_scale_too_high():
    w, s, iterate = one_weight(2048.0)
    assert iterate() == (36.0, INF) and w.item() == 2.0 and s.get_scale() == 1024.0
    assert iterate() == (36.0, 36864.0)


def test_B36_three_backoffs():
    assert run(GradScaler(init_scale=2.0), ["inf"] * 3)[0] == [1, 0.5, 0.25]


def test_B37_backoff_without_floor_reaches_zero():
    scales = run(GradScaler(init_scale=1.0), ["nan"] * 150)[0]
    assert scales[-1] == 0.0 and scales[-2] == 2.0**-149


def test_B38_a_gradient_that_overflows_when_unscaled_is_found():
    s, p = start(GradScaler(init_scale=2.0**-127)), param()
    opt = optim.SGD([p], lr=0.5)
    p.grad = minamp.tensor([3.0])
    # PyTorch looks before the multiplication only: the weight becomes -inf
    assert s.step(opt) is None and p.item() == 1.0
    s.update()
    assert s.get_scale() == 2.0**-128


def test_B39_an_interval_lowered_below_the_count_still_grows():
    s = GradScaler(init_scale=8.0, growth_interval=10)
    run(s, ["good"] * 3)
    s.set_growth_interval(2)
    # PyTorch compares with ==: 8, 8, 8, 8 and no growth until an overflow resets the count
    assert run(s, ["good"] * 4 + ["inf"] + ["good"] * 2)[0] == [16, 16, 32, 32, 16, 16, 32]


def test_B40_what_a_half_loss_becomes():
    s = GradScaler()
    y = s.scale(minamp.tensor(1.0, dtype=float16))
    assert y.dtype == float32 and y.item() == 65536.0
    y = s.scale(minamp.tensor([1.0], dtype=float16))
    assert y.dtype == float16 and y.item() == INF
    assert s.scale(minamp.tensor(1)).dtype == float32
    assert s.scale(minamp.tensor([1.0], dtype=float64)).dtype == float64


def test_B43_clipping_the_scaled_gradient_stops_learning():
    def update_length(unscale_first):
        s = start(GradScaler())
        p = minamp.zeros(2, requires_grad=True)
        opt = optim.SGD([p], lr=1.0)
        p.grad = minamp.tensor([0.3 * 65536, 0.4 * 65536])
        if unscale_first:
            s.unscale_(opt)
        clip_grad_norm_([p], 1.0)
        s.step(opt)
        return float(np.linalg.norm(p.detach().numpy()))

    assert update_length(True) == pytest.approx(0.5, rel=1e-6)
    assert update_length(False) == pytest.approx(1 / 65536, rel=1e-5)


def test_B44_a_small_gradient_lives_through_half_only_when_scaled():
    def gradient(scale):
        w = param()
        h = w.half() * 1.0
        (h.float() * 2.0**-26 * scale).sum().backward()
        return w.grad.item() / scale

    assert gradient(1.0) == 0.0 and gradient(65536.0) == 2.0**-26


def test_a_float64_gradient_is_unscaled_in_float64():
    s, p = start(GradScaler(init_scale=3.0)), minamp.tensor([1.0], dtype=float64, requires_grad=True)
    p.grad = minamp.tensor([1.0], dtype=float64)
    s.unscale_(optim.SGD([p], lr=1.0))
    assert p.grad.item() == float(np.float32(1 / 3))  # the inverse is a float32, as in PyTorch


def test_a_bfloat16_gradient_is_unscaled_in_float32():
    s, p = start(GradScaler(init_scale=3.0)), param(dtype=bfloat16)
    p.grad = minamp.tensor([100.0], dtype=bfloat16)
    s.unscale_(optim.SGD([p], lr=1.0))
    # 33.33; an inverse rounded to bfloat16 would give 33.5
    assert p.grad.dtype == bfloat16 and p.grad.item() == 33.25


def test_unscale_without_step_and_gradients_of_size_zero():
    s, p, empty = (
        start(GradScaler(init_scale=4.0, growth_interval=1)),
        param(),
        minamp.zeros(0, requires_grad=True),
    )
    opt = optim.SGD([p], lr=0.5)
    p.grad = minamp.tensor([4.0])
    s.unscale_(opt)
    s.update()
    assert p.grad.item() == 1.0 and p.item() == 1.0 and s.get_scale() == 8.0
    empty.grad = minamp.zeros(0)
    assert s.step(optim.SGD([empty], lr=0.5)) is True  # nothing in it, but it was checked
    s.update()
    assert s.get_scale() == 16.0


def test_clip_grad_value_hides_an_overflow_that_norm_clipping_does_not():
    p = minamp.zeros(5, requires_grad=True)
    p.grad = minamp.tensor([-10.0, 2.0, 9.8, NAN, INF])
    clip_grad_value_([p], 2.5)
    np.testing.assert_array_equal(p.grad.numpy(), np.float32([-2.5, 2, 2.5, NAN, 2.5]))


# ---- beyond PyTorch: bounds, and giving up


def test_floor_and_ceiling():
    s = GradScaler(init_scale=4.0, growth_interval=1, min_scale=1.0, max_scale=8.0)
    assert run(s, ["good"] * 3 + ["inf"] * 5)[0] == [8, 8, 8, 4, 2, 1, 1, 1]
    with pytest.raises(ValueError, match="init_scale 4.0 lies outside min_scale 8.0 and max_scale None"):
        GradScaler(init_scale=4.0, min_scale=8.0)
    with pytest.raises(ValueError, match="max_skips must be a whole number of steps, at least 1, got 0"):
        GradScaler(max_skips=0)


def training(scaler, forward, steps):
    """Steps of one weight through `forward` under autocast."""
    p = param()
    opt = optim.SGD([p], lr=0.0)
    for _ in range(steps):
        opt.zero_grad()
        with minamp.autocast():
            loss = forward(p)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


def test_giving_up_on_a_bug_in_the_forward():
    s = GradScaler(init_scale=64.0, max_skips=3)
    with pytest.raises(FloatingPointError) as caught:
        training(s, lambda p: (p * 0.0).log().sum() * 0.0, steps=10)
    text = str(caught.value)
    assert "3 steps in a row were skipped and the scale is down to 8" in text
    assert "First non-finite tensor: log (forward)" in text and "the forward made it: no scale helps" in text
    assert "number 0 of shape (1,) (nan)" in text


def test_giving_up_on_a_nan_in_the_input():
    bad = minamp.tensor([[float("nan")]])
    with pytest.raises(
        FloatingPointError, match="to .forward. was given a non-finite x: .*look at the data"
    ) as caught:
        training(GradScaler(max_skips=2), lambda p: (bad.half() @ p.reshape(1, 1)).sum(), steps=10)
    assert "no scale helps" in str(caught.value)


def test_giving_up_on_a_nan_made_by_the_backward():
    with pytest.raises(FloatingPointError) as caught:
        training(GradScaler(max_skips=2), lambda p: (p * 0.0).sqrt().sum(), steps=10)
    assert "sqrt (backward)" in str(caught.value)


def test_giving_up_on_a_gradient_that_does_not_fit():
    with pytest.raises(
        FloatingPointError, match="the scale may still be too high, or the gradient does not fit"
    ):
        training(
            GradScaler(init_scale=2.0**30, max_skips=2),
            lambda p: (p.reshape(1, 1) @ p.reshape(1, 1)).sum(),
            steps=10,
        )


def test_skips_that_are_not_in_a_row_are_fine():
    s = GradScaler(max_skips=2)
    run(s, ["inf", "good", "inf", "good", "nan", "good"])
    with pytest.raises(FloatingPointError):
        run(s, ["inf", "inf"])
    run(s, ["inf", "good"])  # the count starts anew


def test_nothing_is_observed_once_training_goes_on():
    from minamp.record import observers

    s = GradScaler(max_skips=2)
    run(s, ["inf"])
    assert len(observers) == 1
    run(s, ["good"])
    assert not observers


def test_only_the_last_step_before_giving_up_is_observed_and_not_past_the_scalers_end():
    from minamp.record import observers

    s = GradScaler(max_skips=3)
    run(s, ["inf"])
    assert not observers
    run(s, ["inf"])
    assert len(observers) == 1
    del s
    gc.collect()
    assert not observers


# ---- what is no number


def test_a_number_is_no_device():
    """torch.cuda.amp.GradScaler(1024.0) set the scale; here and in torch.amp the device comes first."""
    for number in (1024.0, 2**10):
        with pytest.raises(TypeError, match=f"first argument is the device.*use init_scale={number}"):
            GradScaler(number)
    with pytest.raises(RuntimeError, match="unknown device 'gpu': use 'cpu' or 'cuda'"):
        GradScaler("gpu")


@pytest.mark.parametrize("option", ["init_scale", "growth_factor", "backoff_factor", "growth_interval"])
@pytest.mark.parametrize("wrong", ["1024", None, [2.0], np.ones(2)], ids=repr)
def test_options_are_numbers(option, wrong):
    with pytest.raises(TypeError, match=f"^GradScaler: {option} must be a number, got "):
        GradScaler(**{option: wrong})


@pytest.mark.parametrize("option", ["min_scale", "max_scale", "max_skips"])
def test_bounds_are_numbers(option):
    with pytest.raises(TypeError, match=f"^GradScaler: {option} must be a number, got 'x'"):
        GradScaler(**{option: "x"})


@pytest.mark.parametrize(
    "option, wrong",
    [
        *(("init_scale", x) for x in (-1, 0, NAN, INF, 1e39, 1e-50)),
        ("growth_factor", INF),
        *(("backoff_factor", x) for x in (-1, 0.0)),
        *(("growth_interval", x) for x in (0, -1, 1.5, NAN, INF)),
        *(("min_scale", x) for x in (-1, NAN)),
        *(("max_scale", x) for x in (-1, NAN)),
        *(("max_skips", x) for x in (0, 1.5, NAN, INF)),
    ],
)
def test_numbers_with_which_no_scaler_works(option, wrong):
    with pytest.raises(ValueError, match=f"^GradScaler: {option} must be .*, got "):
        GradScaler(**{option: wrong})


@pytest.mark.parametrize("wrong", [-1, 0, NAN, INF, 1e39])
def test_a_new_scale_works(wrong):
    s = start(GradScaler(init_scale=8.0))
    with pytest.raises(ValueError, match="^update: new_scale must be a positive number that float32 holds"):
        s.update(wrong)
    assert s.get_scale() == 8.0


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
def test_setters_refuse_what_never_works(name):
    s = GradScaler()
    before, put = s.state_dict(), getattr(s, f"set_{name}")
    for wrong, error in (
        ("2", TypeError),
        (None, TypeError),
        (NAN, ValueError),
        (0, ValueError),
        (-2, ValueError),
    ):
        with pytest.raises(error, match=f"^set_{name}: new_"):
            put(wrong)
    assert s.state_dict() == before
    put(1)  # a factor of 1 keeps the scale where it is; torch's setters take it too
    assert getattr(s, f"get_{name}")() == 1


@pytest.mark.parametrize("wrong", ["1024", [2.0], np.ones((4, 3)), {}], ids=repr)
def test_a_new_scale_is_one_number(wrong):
    s = GradScaler(init_scale=8.0)
    s.scale(minamp.tensor(1.0))
    with pytest.raises(TypeError, match="^update: new_scale must be a number, got "):
        s.update(wrong)
    assert s.get_scale() == 8.0
