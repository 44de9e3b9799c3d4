"""Optimizers: torch's formulas over many steps, options, groups, state, master weights."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest

import minamp
from minamp import nn, optim
from minamp.backends import blocks

f16, f32, f64 = np.float16, np.float32, np.float64


def parameter(values, dtype=f32):
    return nn.Parameter(np.array(values, dtype))


def give(p, values):
    p.grad = minamp.Tensor(np.array(values, p.dtype.type).reshape(p.shape))


def reference_sgd(w, gs, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False, maximize=False):
    w, b = w.astype(f64), None
    for g in gs:
        d = (-g if maximize else g) + weight_decay * w
        if momentum:
            b = d if b is None else momentum * b + (1 - dampening) * d
            d = d + momentum * b if nesterov else b
        w = w - lr * d
    return w


def reference_adam(w, gs, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled):
    w = w.astype(f64)
    m, v, top = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gs, 1):
        g = -g if maximize else g
        if decoupled:
            w = w * (1 - lr * weight_decay)
        else:
            g = g + weight_decay * w
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        top = np.maximum(top, v)
        second = (top if amsgrad else v) / (1 - betas[1] ** t)
        w = w - lr * m / (1 - betas[0] ** t) / (np.sqrt(second) + eps)
    return w


def reference_rmsprop(w, gs, lr, alpha, eps, weight_decay, momentum, centered, maximize):
    w = w.astype(f64)
    v, mean, b = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for g in gs:
        g = (-g if maximize else g) + weight_decay * w
        v = alpha * v + (1 - alpha) * g * g
        mean = alpha * mean + (1 - alpha) * g
        b = momentum * b + g / (np.sqrt(v - mean * mean if centered else v) + eps)
        w = w - lr * b
    return w


SGD_OPTIONS = [
    {"momentum": mu, "dampening": damp, "weight_decay": wd, "nesterov": nest, "maximize": up}
    for mu, damp, wd, nest, up in itertools.product(
        (0, 0.9), (0, 0.3), (0, 0.1), (False, True), (False, True)
    )
    if not nest or mu and not damp
]
ADAM_OPTIONS = [
    {"betas": betas, "eps": 1e-3, "weight_decay": wd, "amsgrad": ams, "maximize": up}
    for betas, wd, ams, up in itertools.product(
        ((0.9, 0.999), (0.5, 0.9)), (0, 0.1), (False, True), (False, True)
    )
]
RMSPROP_OPTIONS = [
    {"alpha": 0.9, "eps": 1e-3, "weight_decay": wd, "momentum": mu, "centered": centered, "maximize": up}
    for wd, mu, centered, up in itertools.product((0, 0.1), (0, 0.9), (False, True), (False, True))
]


def ten_steps(make, dtype):
    rng = np.random.default_rng(3)
    w0 = rng.standard_normal((5, 7)).astype(dtype)
    gs = rng.standard_normal((10, 5, 7)).astype(dtype)
    p = parameter(w0, dtype)
    optimizer = make([p])
    for g in gs:
        give(p, g)
        assert optimizer.step() is True
    return w0, gs.astype(f64), p.data.numpy()


@pytest.mark.parametrize("options", SGD_OPTIONS)
def test_sgd_is_the_formula_in_float64_and_in_float32(options):
    for dtype, tolerance in ((f64, 1e-13), (f32, 3e-6)):
        w0, gs, got = ten_steps(lambda ps: optim.SGD(ps, lr=0.05, **options), dtype)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, reference_sgd(w0, gs, 0.05, **options), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("options", ADAM_OPTIONS)
def test_adam_is_the_formula_in_float64_and_in_float32(kind, options):
    for dtype, tolerance in ((f64, 1e-13), (f32, 3e-6)):
        w0, gs, got = ten_steps(lambda ps: getattr(optim, kind)(ps, lr=0.05, **options), dtype)
        want = reference_adam(w0, gs, 0.05, decoupled=kind == "AdamW", **options)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", RMSPROP_OPTIONS)
def test_rmsprop_is_the_formula_in_float64_and_in_float32(options):
    for dtype, tolerance in ((f64, 1e-13), (f32, 3e-6)):
        w0, gs, got = ten_steps(lambda ps: optim.RMSprop(ps, lr=0.01, **options), dtype)
        np.testing.assert_allclose(got, reference_rmsprop(w0, gs, 0.01, **options), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [f32, f64])
def test_rmsprop_centered_on_gradients_that_are_all_alike(dtype):
    """Their variance is 0; the mean square less the squared mean may come out below, whose root would be nan."""
    p = parameter(np.zeros(100), dtype)
    optimizer = optim.RMSprop([p], lr=0.0, alpha=0.5, centered=True)
    for _ in range(60):
        give(p, np.linspace(0.1, 0.9, 100))
        optimizer.step()
    v, mean = (optimizer.state[p][n].numpy() for n in ("square_avg", "grad_avg"))
    assert (v - mean * mean).min() < 0 and not p.isnan().any().item()


def test_defaults_are_torchs():
    p = parameter([1.0])
    shown = {"params": [p], "maximize": False, "capturable": False}
    shown |= {"master_weights": False, "write_back": "nearest"}
    sgd = {"lr": 1e-3, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}
    adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False}
    assert optim.SGD([p]).param_groups == [shown | sgd]
    assert optim.Adam([p]).param_groups == [shown | adam]
    assert optim.AdamW([p]).param_groups == [shown | adam | {"weight_decay": 1e-2}]
    rmsprop = {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0, "centered": False}
    assert optim.RMSprop([p]).param_groups == [shown | rmsprop]


@pytest.mark.parametrize("shape", [(), (0,), (7,), (200_000,), (3, 90_000), (90_000, 3), (40, 40, 50)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_blocks_cover_every_weight_once_in_any_layout(shape, order):
    rng = np.random.default_rng(0)
    w, g = (np.asarray(rng.standard_normal(shape).astype(f32), order=order) for _ in range(2))
    p = nn.Parameter(w)
    optimizer = optim.SGD([p], lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.1)
    want = reference_sgd(w.copy(), [g] * 3, 0.5, momentum=0.9, nesterov=True, weight_decay=0.1)
    for _ in range(3):
        p.grad = minamp.Tensor(g.copy())
        optimizer.step()
    assert p._data is w, "the update must stay in the weight's memory"
    np.testing.assert_allclose(w, want, rtol=1e-5, atol=1e-5)
    sizes = [s.size for s, *_ in blocks.blocks([w], [g])]
    assert max(sizes) <= max(blocks.BLOCK, w[:1].size if w.ndim else 1)


def test_adam_squares_large_gradients_without_overflow():
    p = parameter([1.0])
    optimizer = optim.Adam([p], lr=0.1)
    give(p, [1e20])  # 1e40 is inf in float32, 0.001 * 1e40 is not
    optimizer.step()
    assert p.item() == pytest.approx(0.9)


def test_step_leaves_gradients_and_parameters_without_gradient_alone():
    p, q = parameter([1.0, 2.0]), parameter([3.0])
    optimizer = optim.SGD([p, q], lr=0.5, momentum=0.9, weight_decay=0.1, maximize=True)
    give(p, [1.0, -1.0])
    optimizer.step()
    assert p.grad.tolist() == [1.0, -1.0]
    assert q.tolist() == [3.0] and q not in optimizer.state


def test_step_writes_in_place_and_counts_as_a_write():
    p = parameter([1.0])
    optimizer = optim.SGD([p], lr=0.5)
    memory, version = p._data, p._version[0]
    give(p, [1.0])
    optimizer.step()
    assert p._data is memory and memory[0] == 0.5 and p._version[0] == version + 1


def test_autocast_sees_the_updated_weight():
    p = parameter([[1.0]])
    optimizer = optim.SGD([p], lr=0.5)
    x = minamp.ones(1, 1)
    with minamp.autocast():
        y = (x @ p).sum()
        y.backward()
        optimizer.step()
        assert (x @ p).item() == 0.5


# -- closures, zero_grad


def test_closure_runs_with_gradients_on_and_its_loss_is_returned():
    p = parameter([2.0])
    optimizer = optim.SGD([p], lr=0.25)

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    with minamp.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 4.0 and p.item() == 1.0


def test_zero_grad_drops_or_zeroes():
    p = parameter([1.0])
    optimizer = optim.SGD([p])
    give(p, [3.0])
    optimizer.zero_grad(set_to_none=False)
    assert p.grad.tolist() == [0.0]
    optimizer.zero_grad()
    assert p.grad is None


# -- groups and errors


def test_groups_have_their_own_options():
    p, q, r = parameter([1.0]), parameter([1.0]), parameter([1.0])
    optimizer = optim.SGD([{"params": p}, {"params": [q], "lr": 0.5}], lr=0.1)
    optimizer.add_param_group({"params": [r], "lr": 1.0})
    for t in (p, q, r):
        give(t, [1.0])
    optimizer.step()
    assert [round(t.item(), 6) for t in (p, q, r)] == [0.9, 0.5, 0.0]


def test_repr_lists_the_groups():
    assert repr(optim.SGD([parameter([1.0])], lr=0.5)) == (
        "SGD (\nParameter Group 0\n    capturable: False\n    dampening: 0\n    lr: 0.5\n    master_weights: False\n"
        "    maximize: False\n    momentum: 0\n    nesterov: False\n    weight_decay: 0\n    write_back: nearest\n)"
    )


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda p: optim.SGD([]), ValueError, "SGD: got an empty parameter list: give it model.parameters()"),
        (lambda p: optim.SGD(p), TypeError, r"SGD: params must be a list .* got a Parameter: use \[tensor\]"),
        (lambda p: optim.SGD({p}), TypeError, "got a set"),
        (lambda p: optim.SGD([{"params": {p}}]), TypeError, "a set has none: use a list"),
        (lambda p: optim.SGD([p, 1.0]), TypeError, "parameter 1 of group 0 must be a Tensor, got float"),
        (
            lambda p: optim.SGD([p * 2]),
            ValueError,
            r"parameter 0 of group 0, shape \(1,\), was made by mul .* use a leaf",
        ),
        (
            lambda p: optim.SGD([p, p]),
            ValueError,
            "parameter 1 of group 0, .* is in this group already: list it once",
        ),
        (
            lambda p: optim.SGD([{"params": [p]}, {"params": [p]}]),
            ValueError,
            "parameter 0 of group 1, .* is in group 0 already",
        ),
        (
            lambda p: optim.SGD([p]).add_param_group([p]),
            TypeError,
            "a parameter group must be a dict, got list",
        ),
        (lambda p: optim.SGD([p], lr=-1), ValueError, "SGD: lr must be at least 0, got -1"),
        (lambda p: optim.SGD([p], lr=math.nan), ValueError, "SGD: lr must be at least 0, got nan"),
        (lambda p: optim.SGD([p], momentum=-0.5), ValueError, "SGD: momentum must be at least 0, got -0.5"),
        (lambda p: optim.SGD([p], weight_decay=-1), ValueError, "weight_decay must be at least 0, got -1"),
        (
            lambda p: optim.SGD([p], nesterov=True),
            ValueError,
            "nesterov=True needs momentum above 0 and dampening 0",
        ),
        (lambda p: optim.SGD([p], momentum=0.9, dampening=0.1, nesterov=True), ValueError, "dampening=0.1"),
        (lambda p: optim.SGD([{"params": [p], "lr": -2}]), ValueError, "SGD: lr must be at least 0, got -2"),
        (
            lambda p: optim.Adam([p], betas=(0.9, 1.0)),
            ValueError,
            r"Adam: betas must be two numbers in \[0, 1\), got \(0.9, 1",
        ),
        (lambda p: optim.Adam([p], betas=(-0.1, 0.9)), ValueError, r"betas must be two numbers in \[0, 1\)"),
        (lambda p: optim.AdamW([p], eps=-1e-8), ValueError, "AdamW: eps must be at least 0, got -1e-08"),
        (lambda p: optim.RMSprop([p], alpha=1.5), ValueError, r"RMSprop: alpha must be in \[0, 1\], got 1.5"),
        (lambda p: optim.RMSprop([p], alpha="0.9"), TypeError, "RMSprop: alpha must be a number"),
    ],
)
def test_errors_name_the_option_its_value_and_the_repair(make, kind, text):
    with pytest.raises(kind, match=text):
        make(parameter([1.0]))


# -- state


def trained(kind, steps, dtype=f32, **options):
    rng = np.random.default_rng(1)
    ps = [parameter(rng.standard_normal(s), dtype) for s in ((3, 4), (4,))]
    optimizer = getattr(optim, kind)(ps, lr=0.05, **options)
    advance(ps, optimizer, steps, rng)
    return ps, optimizer, rng


def advance(ps, optimizer, steps, rng):
    for _ in range(steps):
        for p in ps:
            give(p, rng.standard_normal(p.shape))
        optimizer.step()


KINDS = [
    ("SGD", {"momentum": 0.9}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("master", [False, True])
def test_a_restored_optimizer_goes_on_bit_for_bit(kind, options, master):
    dtype = f16 if master else f32
    ps, optimizer, rng = trained(kind, 4, dtype, master_weights=master, **options)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    weights = [p.data.numpy().copy() for p in ps]
    later = copy.deepcopy(rng)
    advance(ps, optimizer, 3, rng)

    for load_first in (True, False):  # the weights may come back before or after the optimizer's state
        qs = [parameter(w if load_first else np.zeros_like(w), dtype) for w in weights]
        fresh = getattr(optim, kind)(qs, lr=1.0, master_weights=master, **options)
        fresh.load_state_dict(saved)
        if not load_first:
            for q, w in zip(qs, weights, strict=True):
                with minamp.no_grad():
                    q.copy_(minamp.Tensor(w))
        advance(qs, fresh, 3, copy.deepcopy(later))
        assert fresh.param_groups[0]["lr"] == 0.05
        for p, q in zip(ps, qs, strict=True):
            np.testing.assert_array_equal(p.data.numpy(), q.data.numpy())
            for name, value in optimizer.state[p].items():
                other = fresh.state[q][name]
                assert (
                    value == other
                    if name == "step"
                    else np.array_equal(value.data.numpy(), other.data.numpy())
                )


def test_state_dict_has_torchs_layout_and_takes_arrays():
    ps, optimizer, _ = trained("Adam", 2, amsgrad=True)
    saved = optimizer.state_dict()
    assert sorted(saved) == ["param_groups", "state"] and sorted(saved["state"]) == [0, 1]
    assert saved["param_groups"][0]["params"] == [0, 1] and saved["param_groups"][0]["lr"] == 0.05
    assert sorted(saved["state"][0]) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]
    assert saved["state"][0]["step"] == 2 and saved["state"][0]["exp_avg"].shape == (3, 4)
    arrays = {i: {k: np.asarray(v) for k, v in s.items()} for i, s in saved["state"].items()}
    optimizer.load_state_dict({"state": arrays, "param_groups": saved["param_groups"]})
    assert optimizer.state[ps[0]]["step"] == 2
    assert optimizer.state[ps[0]]["exp_avg"]._data is not arrays[0]["exp_avg"]


def test_load_state_dict_refuses_other_groups_and_shapes_and_changes_nothing():
    ps, optimizer, _ = trained("SGD", 2, momentum=0.9)
    before = optimizer.state[ps[0]]["momentum_buffer"].numpy().copy()
    saved = optimizer.state_dict()
    other = optim.SGD([parameter([1.0])]).state_dict()
    with pytest.raises(ValueError, match=r"groups of sizes \[1\] don't fit this optimizer's \[2\]"):
        optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match=r"groups of sizes \[2, 2\]"):
        optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"] * 2})
    wrong = {0: {"momentum_buffer": np.ones((3, 4))}, 1: {"momentum_buffer": np.ones(5)}}
    with pytest.raises(
        ValueError, match=r"momentum_buffer of parameter 1 has shape \(5,\), the parameter \(4,\)"
    ):
        optimizer.load_state_dict({"state": wrong, "param_groups": saved["param_groups"]})
    assert np.array_equal(optimizer.state[ps[0]]["momentum_buffer"].numpy(), before)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"state": {7: {}}}, ValueError, "'state' is of a parameter 7 that no group lists"),
        ({"lr": "x"}, TypeError, "^SGD: lr must be a number, got 'x'"),
        ({"lr": math.inf}, ValueError, "^SGD: lr must be finite, got inf"),
        ({"momentum": -1}, ValueError, "^SGD: momentum must be at least 0, got -1"),
        ({"write_back": "bogus"}, ValueError, "^SGD: write_back must be one of "),
        ({"params": None}, ValueError, "group 0 has no 'params'"),
        ({"state": {0: {"step": "x"}}}, ValueError, "step of parameter 0 must be a whole number"),
        ({"state": {0: {"step": -1}}}, ValueError, "step of parameter 0 must be a whole number"),
        (
            {"state": {1: {"momentum_buffer": 1.0}}},
            ValueError,
            "momentum_buffer must be a Tensor or an array, got 1.0",
        ),
    ],
)
def test_load_state_dict_refuses_what_can_not_be_and_changes_nothing(wrong, error, text):
    ps, optimizer, _ = trained("SGD", 2, momentum=0.9)
    saved = optimizer.state_dict()
    group = {**saved["param_groups"][0], "lr": 0.5} | {k: v for k, v in wrong.items() if k != "state"}
    if wrong.get("params", 1) is None:
        del group["params"]
    state, before = optimizer.state, repr(optimizer)
    with pytest.raises(error, match=text):
        optimizer.load_state_dict({"state": wrong.get("state", {}), "param_groups": [group]})
    assert optimizer.state is state and repr(optimizer) == before


def test_a_momentum_buffer_that_torch_has_not_made_yet_is_taken_as_absent():
    p, q = parameter([1.0]), parameter([1.0])
    optimizer, fresh = optim.SGD([p], lr=0.5, momentum=0.9), optim.SGD([q], lr=0.5, momentum=0.9)
    saved = fresh.state_dict()
    optimizer.load_state_dict({**saved, "state": {0: {"momentum_buffer": None}}})
    for t, o in ((p, optimizer), (q, fresh)):
        for _ in range(2):
            give(t, [1.0])
            o.step()
    assert p.item() == q.item()


# -- parameters whose data was exchanged


def test_a_step_that_can_not_be_made_writes_no_weight_and_counts_no_step():
    def exchanged(p, optimizer):
        p.data = np.ones(3, f32)

    def no_longer_written(p, optimizer):
        p._data.flags.writeable = False

    def other_buffer(p, optimizer):
        p.grad, p.data = None, np.ones(3, f32)
        give(p, [1.0, 1.0, 1.0])

    def other_format(p, optimizer):
        p.requires_grad, p.data = False, np.ones(2, np.int64)

    for spoil, error, text in (
        (
            exchanged,
            RuntimeError,
            r"gradient of a parameter of shape \(3,\) has shape \(2,\).*call zero_grad\(\)",
        ),
        (no_longer_written, RuntimeError, r"^Adam.step: a float32 parameter of shape \(2,\) is read-only"),
        (other_buffer, RuntimeError, r"exp_avg of a parameter of shape \(3,\).*build a new optimizer"),
        (other_format, TypeError, r"^Adam.step: a parameter of shape \(2,\) is int64"),
    ):
        first, half, p = parameter([1.0]), parameter([1.0], f16), parameter([1.0, 1.0])
        optimizer = optim.Adam([first, half, p])
        for t in (first, half, p):
            give(t, np.ones(t.shape))
        optimizer.step()
        before = first.item(), half.item()
        spoil(p, optimizer)
        with pytest.raises(error, match=text):
            optimizer.step()
        assert (first.item(), half.item()) == before
        assert {t: s["step"] for t, s in optimizer.state.items()} == {first: 1, half: 1, p: 1}


@pytest.mark.parametrize(
    ("options", "name"), [({"master_weights": True}, "master"), ({"write_back": "kahan"}, "compensation")]
)
def test_a_master_or_compensation_of_another_shape_is_named(options, name):
    p = parameter([1.0, 1.0], f16)
    optimizer = optim.SGD([p], lr=0.5, **options)
    give(p, [1.0, 1.0])
    optimizer.step()
    p.grad, p.data = None, np.ones(3, f16)
    give(p, [1.0, 1.0, 1.0])
    with pytest.raises(RuntimeError, match=rf"the {name} of a parameter of shape \(3,\) has shape \(2,\)"):
        optimizer.step()
    assert p.tolist() == [1.0, 1.0, 1.0]


# -- half weights and their masters


def test_B42_small_updates_are_lost_in_half_and_kept_in_the_master():
    one, half, mixed = parameter([1.0]), parameter([1.0], f16), parameter([1.0], f16)
    optimizers = [
        optim.SGD([one], lr=1e-4),
        optim.SGD([half], lr=1e-4),
        optim.SGD([mixed], lr=1e-4, master_weights=True),
    ]
    for _ in range(100):
        for p, optimizer in zip((one, half, mixed), optimizers, strict=True):
            give(p, [1.0])
            optimizer.step()
    (master,) = optimizers[2].master_params()
    assert one.data.numpy()[0] == master.data.numpy()[0] == f32(0.98999834)  # 0.9899983 to seven digits
    assert half.data.numpy()[0] == 1.0  # half a step below 1 is 2.44e-4
    assert mixed.data.numpy()[0] == f16(0.9899983) and mixed.dtype == f16


@pytest.mark.parametrize("dtype", [minamp.float16, minamp.bfloat16])
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_half_weights_are_updated_in_float32_and_rounded_once(kind, master, dtype):
    rng = np.random.default_rng(5)
    p = nn.Parameter(minamp.Tensor(rng.standard_normal(50)).to(dtype))
    q = nn.Parameter(p.data.numpy().astype(f32))
    options = {"momentum": 0.9, "weight_decay": 0.01} if kind == "SGD" else {}
    half = getattr(optim, kind)([p], lr=0.01, master_weights=master, **options)
    single = getattr(optim, kind)([q], lr=0.01, **options)
    memory = p._data
    for _ in range(5):
        p.grad = minamp.Tensor(rng.standard_normal(50)).to(dtype)
        q.grad = p.grad.float()
        half.step()
        single.step()
        if not master:
            q.data.copy_(q.data.to(dtype))
        assert np.array_equal(p.data.numpy(), q.data.numpy().astype(dtype))
    assert p._data is memory and p.dtype == dtype
    buffers = {k: v for k, v in half.state[p].items() if k != "step"}
    assert {v.dtype for v in buffers.values()} == {minamp.float32} and ("master" in buffers) == master


@pytest.mark.parametrize("master", [False, True])
def test_adam_on_half_weights_with_zero_gradient_stays_finite(master):
    p = parameter([1.0, -2.0], f16)  # eps = 1e-8 is 0 in float16: 0 / 0 in a half update
    optimizer = optim.Adam([p], master_weights=master)
    for _ in range(3):
        give(p, [0.0, 0.0])
        optimizer.step()
    assert p.tolist() == [1.0, -2.0]


def test_master_params_yields_masters_for_half_and_the_others_themselves():
    p, q, r = parameter([1.0], f16), parameter([1.0]), parameter([1.0], f16)
    optimizer = optim.SGD([{"params": [p, q]}, {"params": [r], "master_weights": False}], master_weights=True)
    give(p, [2.0])
    masters = list(optimizer.master_params())
    assert masters[0].dtype == f32 and masters[1] is q and masters[2] is r
    assert masters[0].grad.dtype == f32 and masters[0].grad.tolist() == [2.0]
    assert list(optimizer.master_params())[0] is masters[0]


def test_step_uses_the_masters_gradient_and_drops_it():
    p = parameter([1.0], f16)
    optimizer = optim.SGD([p], lr=1.0, master_weights=True)
    give(p, [65504.0])
    (master,) = optimizer.master_params()
    master.grad.mul_(2.0**-30)  # unscaled: below half's range
    assert optimizer.step() is True
    assert master.data.numpy()[0] == f32(1) - f32(65504) * f32(2.0**-30) and master.grad is None
    give(p, [0.5])
    optimizer.step()
    assert master.data.numpy()[0] == pytest.approx(0.49993902)


def test_zero_grad_of_optimizer_and_of_model_drop_the_masters_gradient():
    model = nn.Linear(2, 1).half()
    optimizer = optim.SGD(model.parameters(), lr=1.0, master_weights=True)
    for zero in (optimizer.zero_grad, model.zero_grad):
        model(minamp.ones(1, 2).half()).sum().backward()
        assert all(m.grad is not None for m in optimizer.master_params())
        zero()
        assert all(m.grad is None for m in optimizer.master_params())


def test_a_new_gradient_replaces_the_copy_and_a_gradient_written_later_is_refused():
    p = parameter([1.0], f16)
    optimizer = optim.SGD([p], lr=1.0, master_weights=True)
    give(p, [1.0])
    (master,) = optimizer.master_params()
    give(p, [2.0])  # the next backward after a skipped step, gradients dropped by hand
    assert next(iter(optimizer.master_params())).grad.tolist() == [2.0]
    with minamp.no_grad():
        p.grad.mul_(0.5)
    text = r"float16 gradient of a parameter of shape \(1,\) was written after .* call zero_grad\(\) first"
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    assert master.data.numpy()[0] == 1.0
    master.grad = minamp.tensor([0.25])  # the user's own counts
    optimizer.step()
    assert master.data.numpy()[0] == 0.75


def test_clip_grad_norm_of_the_model_clips_the_masters_gradients():
    p = parameter([1.0], f16)
    optimizer = optim.SGD([p], lr=1.0, master_weights=True)
    give(p, [1024.0])
    (master,) = optimizer.master_params()
    master.grad.fill_(4.0)
    assert nn.utils.clip_grad_norm_([p], 2.0).item() == 4.0
    assert master.grad.item() == pytest.approx(2.0, abs=1e-5) and p.grad.item() == 1024.0


def test_a_weight_written_by_others_restarts_its_master_only_where_it_changed():
    p = parameter([1.0, 1.0], f16)
    optimizer = optim.SGD([p], lr=1e-4, master_weights=True)
    give(p, [1.0, 1.0])
    optimizer.step()
    with minamp.no_grad():
        p.copy_(minamp.tensor([1.0, 5.0]))
    (master,) = optimizer.master_params()
    assert master.tolist() == [float(f32(1) - f32(1e-4)), 5.0]


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_the_standard_loop_with_half_weights_follows_autocast_on_float32_weights(kind):
    """Skips, norms and weights agree: a half model with masters is a float32 model under autocast."""
    F, runs = nn.functional, []
    rng = np.random.default_rng(0)
    x, y = minamp.Tensor(rng.standard_normal((64, 20)).astype(f32)), minamp.Tensor(rng.integers(0, 5, 64))
    for master in (False, True):
        minamp.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
        with minamp.no_grad():
            for p in model.parameters():
                p.copy_(p.half())  # both start from the same values
        if master:
            model.half()
        optimizer = getattr(optim, kind)(model.parameters(), lr=0.01, master_weights=master)
        scaler, trace = minamp.GradScaler(init_scale=2.0**26), []
        for _ in range(20):
            with minamp.autocast():
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
            stepped = scaler.step(optimizer)
            scaler.update()
            trace.append((stepped, norm.item() if stepped else None, scaler.get_scale()))
        runs.append((trace, [p.data.numpy().copy() for p in optimizer.master_params()]))
    (steps, weights), (other_steps, other_weights) = runs
    assert {s for s, *_ in steps} == {None, True}
    assert [(s, scale) for s, _, scale in steps] == [(s, scale) for s, _, scale in other_steps]
    for (_, a, _), (_, b, _) in zip(steps, other_steps, strict=True):
        assert a == b or a == pytest.approx(b, rel=1e-3)
    for a, b in zip(weights, other_weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


# ---- arguments that are no numbers, no parameters


@pytest.mark.parametrize("option", ["lr", "momentum", "dampening", "weight_decay"])
@pytest.mark.parametrize("wrong", ["1e-3", None, [0.1]], ids=repr)
def test_options_are_numbers(option, wrong):
    """YAML reads 1e-3 as text."""
    with pytest.raises(TypeError, match=f"^SGD: {option} must be a number, got "):
        optim.SGD([minamp.nn.Parameter(np.ones(2, np.float32))], **{"lr": 0.1, option: wrong})


def test_a_users_optimizer_has_options_of_its_own_kinds():
    """Adafactor's eps is a pair."""

    class Own(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": None, "eps": (1e-30, 1e-3)})

    own = Own([parameter([1.0])])
    assert own.param_groups[0]["eps"] == (1e-30, 1e-3) and own.param_groups[0]["lr"] is None
    own.load_state_dict(own.state_dict())


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_options_are_finite(kind, wrong):
    optimizer = getattr(optim, kind)
    for option in {"lr", "momentum", "dampening", "weight_decay", "eps", "alpha"} & optimizer(
        [parameter([1.0])]
    ).defaults.keys():
        with pytest.raises(
            ValueError, match=f"^{kind}: {option} must be (at least 0|finite|in .0, 1.), got {wrong}"
        ):
            optimizer([parameter([1.0])], **{option: wrong})


@pytest.mark.parametrize(
    "dtype", [minamp.int64, minamp.bool, minamp.float8_e4m3fn, minamp.float8_e5m2], ids=str
)
def test_what_has_no_update_is_no_parameter(dtype):
    optimizer = optim.SGD([parameter([1.0])], lr=0.1)
    with pytest.raises(
        TypeError, match=f"^SGD: parameter 0 of group 1 of shape .1,. is {dtype}, .*give x.float"
    ):
        optimizer.add_param_group({"params": minamp.ones(1).to(dtype)})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("betas", [("0.9", 0.999), 0.9, (0.9,), "ab", None], ids=repr)
def test_betas_are_two_numbers(betas):
    with pytest.raises((TypeError, ValueError), match="^Adam: betas must be "):
        optim.Adam([minamp.nn.Parameter(np.ones(2, np.float32))], betas=betas)


def test_a_model_is_no_list_of_parameters():
    with pytest.raises(
        TypeError, match=r"^SGD: params must be a list.*got a Linear: use model.parameters\(\)"
    ):
        optim.SGD(minamp.nn.Linear(2, 2), lr=0.1)
    with pytest.raises(ValueError, match=r"^SGD: a parameter group needs 'params', this one has \['lr'\]"):
        optim.SGD([{"lr": 0.1}], lr=0.1)


@pytest.mark.parametrize("wrong", [None, {}, [1], {"state": {}}], ids=repr)
def test_a_state_that_is_none_is_not_loaded(wrong):
    optimizer = optim.SGD([minamp.nn.Parameter(np.ones(2, np.float32))], lr=0.1)
    with pytest.raises(
        ValueError, match="^SGD.load_state_dict: needs a dict with 'state' and 'param_groups'"
    ):
        optimizer.load_state_dict(wrong)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_state_of_a_users_optimizer_is_its_own_affair():
    """Adafactor's rows have another shape than the weight, and a step may be a tensor."""

    class Own(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state |= {"step": minamp.tensor(0.0), "row": minamp.zeros(2), "scale": 0.5}
                state["step"] += 1
                state["row"].add_(p.grad.sum(1))

    w = parameter([[1.0, 2.0], [3.0, 4.0]])
    w.grad = minamp.tensor([[1.0, 1.0], [2.0, 2.0]])
    own, other = Own([w]), Own([w])
    own.step()
    other.load_state_dict(own.state_dict())
    other.step()
    state = other.state[w]
    assert state["step"].item() == 2 and state["row"].tolist() == [4, 8] and state["scale"] == 0.5
    assert own.state[w]["step"].item() == 1 and own.state[w]["row"].tolist() == [2, 4]
