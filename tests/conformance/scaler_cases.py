"""GradScaler traces. Every case is a function of `tn` (torch or minamp) and a `Log`: the same lines make the golden values and
are compared with them. B01 to B44 are named cases (B24 and B25 need sparse gradients, which minamp does not have); the seeded
ones after them mix good, inf and nan iterations with two optimizers, unscale_ before step, and changes of every setting.
"""

import copy
import math
import pickle

import numpy as np

INF, NAN = math.inf, math.nan


class Log(dict):
    """label -> what happened there; labels are unique within a case."""

    def put(self, label, value):
        assert label not in self, label
        self[label] = value

    def trace(self, label, scaler, *params):
        """Scale, growth tracker, and the values of the parameters."""
        self.put(label, [scaler.get_scale(), scaler._get_growth_tracker(), *(values(p) for p in params)])

    def error(self, label, function):
        """The type of the error that function() raises, or what it returns if that is a plain value."""
        try:
            answer = function()
        except Exception as error:
            self.put(label, type(error).__name__)
        else:
            self.put(label, answer if isinstance(answer, str | float | int) else "no error")


def values(t):
    return t.detach().tolist()


def setup(tn, n=1, lr=0.5, size=1, **kwargs):
    """A scaler, and n parameters of ones with an SGD each."""
    params = [tn.nn.Parameter(tn.ones(size)) for _ in range(n)]
    optimizers = [tn.optim.SGD([p], lr=lr) for p in params]
    return tn.amp.GradScaler(device="cpu", **kwargs), params, optimizers


def backward(scaler, p, slope):
    """A loss whose gradient is `slope`; scaled by the scaler on its way."""
    p.grad = None
    scaler.scale((p * slope).sum()).backward()


def iterate(scaler, p, optimizer, slope):
    backward(scaler, p, slope)
    scaler.step(optimizer)
    scaler.update()


def slopes(text):
    """'g i n' -> 0.5, inf, nan."""
    return [{"g": 0.5, "i": INF, "n": NAN}[c] for c in text.split()]


def run(tn, log, text, **kwargs):
    scaler, (p,), (optimizer,) = setup(tn, **kwargs)
    for i, slope in enumerate(slopes(text)):
        iterate(scaler, p, optimizer, slope)
        log.trace(f"{i:03d}", scaler, p)
    return scaler, p, optimizer


# ----------------------------------------------------------------------------------------------------------------- B01 to B44


def B01(tn, log):
    s = tn.amp.GradScaler(device="cpu")
    log.put(
        "defaults", [s.get_scale(), s.get_growth_factor(), s.get_backoff_factor(), s.get_growth_interval()]
    )
    log.put("enabled", s.is_enabled())
    log.put("tracker", s._get_growth_tracker())
    log.put("created", s._scale is not None)


def B02(tn, log):
    for kwargs in ({"growth_factor": 1.0}, {"backoff_factor": 1.0}):
        log.error(str(kwargs), lambda k=kwargs: tn.amp.GradScaler(device="cpu", **k))
        log.error(f"disabled {kwargs}", lambda k=kwargs: tn.amp.GradScaler(device="cpu", enabled=False, **k))
    for kwargs in (
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"init_scale": 0.0},
        {"init_scale": -1.0},
    ):
        log.error(str(kwargs), lambda k=kwargs: tn.amp.GradScaler(device="cpu", **k))


def B03(tn, log):
    for where in ("plain", "transposed", "sliced"):
        for bad in (None, INF, NAN):
            grad = np.full((20, 10) if where == "sliced" else (10, 10), 4.0, np.float32)
            if bad is not None:
                grad[4 if where == "sliced" else 2, 2] = bad
            p = tn.nn.Parameter(tn.ones(10, 10))
            optimizer = tn.optim.SGD([p], lr=1.0)
            s = tn.amp.GradScaler(device="cpu", init_scale=4.0)
            s.scale(tn.ones(1))
            g = tn.from_numpy(grad)
            p.grad = g[::2] if where == "sliced" else g.t() if where == "transposed" else g
            s.unscale_(optimizer)
            log.put(f"{where} {bad} grad", values(p.grad))
            s.update()
            log.trace(f"{where} {bad}", s)


def B04(tn, log):
    run(tn, log, "g g i", init_scale=4.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=2)


def B05(tn, log):
    s, t = tn.amp.GradScaler(device="cpu", init_scale=2.0), tn.tensor([4.0])
    a, (b, c), [d, (e, f)] = nested = s.scale((t, (t, t), [t, (t, t)]))
    log.put("values", [values(x) for x in (a, b, c, d, e, f)])
    log.put("types", [type(nested).__name__, type(nested[1]).__name__, type(nested[2]).__name__])
    log.put("original", values(t))
    log.put("empty", str(tn.amp.GradScaler(device="cpu").scale([])))
    log.put("lazy", type(s.scale(x for x in (t, t))).__name__)
    log.error("number", lambda: s.scale(3.0))


def B06(tn, log):
    for created in (False, True):
        s0 = tn.amp.GradScaler(
            "cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2
        )
        s1 = tn.amp.GradScaler(
            "cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1
        )
        if created:
            for s in (s0, s1):
                s.scale(tn.ones(1))
        state = s0.state_dict()
        log.put(f"state {created}", dict(state))
        s1.load_state_dict({**state, "_growth_tracker": 1})
        log.put(f"loaded {created}", s1.state_dict())
        log.put(
            f"getters {created}",
            [s1.get_scale(), s1.get_growth_factor(), s1.get_backoff_factor(), s1.get_growth_interval()],
        )
        log.error(f"missing key {created}", lambda s=s1: s.load_state_dict({"scale": 1.0}))


def _two_layers(tn, lr=1.0):
    rng = np.random.default_rng(7)
    w = [tn.nn.Parameter(tn.from_numpy(rng.integers(-4, 5, (3, 3)).astype(np.float32) / 8)) for _ in range(2)]
    return w, tn.optim.SGD(w, lr=lr)


def _batches(tn, n=4):
    rng = np.random.default_rng(8)
    # multiples of 1/8 and a loss that is linear in either weight: every value is exact in float32
    return [tn.from_numpy(rng.integers(-2, 3, (2, 3)).astype(np.float32) / 8) for _ in range(n)]


def B07(tn, log):
    (a, b), optimizer = _two_layers(tn, lr=0.125)
    s = tn.amp.GradScaler("cpu", init_scale=128.0, growth_factor=2.0, growth_interval=1)
    for i, x in enumerate(_batches(tn)):
        optimizer.zero_grad()
        s.scale((x @ a @ b).sum()).backward()
        if i == 2:
            a.grad[1, 0] = INF
        s.step(optimizer)
        s.update()
        log.trace(str(i), s, a, b)


def B08(tn, log):
    run(tn, log, "g i g g", init_scale=128.0, growth_interval=2)


def B09(tn, log):
    run(tn, log, "g g g g", init_scale=128.0, growth_interval=2)


def B10(tn, log):
    s, (p,), (optimizer,) = setup(tn, init_scale=128.0, growth_interval=1)
    for i in range(4):
        s.scale((p * 0.5).sum() / 2).backward()
        if i % 2:
            s.step(optimizer)
            s.update()
            optimizer.zero_grad()
        log.trace(str(i), s, p)


def B11(tn, log):
    for unscaled in (True, False):
        (a, b), optimizer = _two_layers(tn)
        s = tn.amp.GradScaler("cpu", init_scale=128.0, growth_factor=2.0, growth_interval=1)
        for i, x in enumerate(_batches(tn)):
            optimizer.zero_grad()
            s.scale((x @ a @ b).sum()).backward()
            if i == 2:
                a.grad[1, 0] = INF
            if unscaled:
                s.unscale_(optimizer)
            norm = tn.nn.utils.clip_grad_norm_([a, b], 0.2 * (1.0 if unscaled else s.get_scale()))
            log.put(f"norm {unscaled} {i}", float(norm))
            s.step(optimizer)
            s.update()
        log.trace(f"end {unscaled}", s, a, b)


def B12(tn, log):
    for name, pair in {
        "second": (1.0, INF),
        "first": (NAN, 1.0),
        "both": (INF, INF),
        "none": (1.0, 1.0),
    }.items():
        s, params, optimizers = setup(tn, 2, init_scale=128.0, growth_interval=1)
        for p, slope in zip(params, pair, strict=True):
            backward(s, p, slope)
        for optimizer in optimizers:
            s.step(optimizer)
        s.update()
        log.trace(name, s, *params)


def B13(tn, log):
    s, params, optimizers = setup(tn, 2, init_scale=128.0, growth_interval=1)
    for i in range(4):
        for p, slope in zip(params, (0.25, INF if i == 2 else 0.5), strict=True):
            backward(s, p, slope)
        s.unscale_(optimizers[0])
        for optimizer in optimizers:
            s.step(optimizer)
        s.update()
        log.trace(str(i), s, *params)


def B14(tn, log):
    s, params, optimizers = setup(tn, 2, init_scale=128.0, growth_interval=1)
    backward(s, params[0], 1.0)
    backward(s, params[1], INF)
    s.step(optimizers[0])
    s.update()
    log.trace("second not stepped", s, *params)


def B15(tn, log):
    for init, growth in ((1e38, 16.0), (2.0**126, 2.0)):
        s, (p,), (optimizer,) = setup(tn, init_scale=init, growth_factor=growth, growth_interval=1)
        for i in range(3):
            iterate(s, p, optimizer, 2.0**-40)
            log.trace(f"{init} {i}", s, p)


def B16(tn, log):
    s, (p,), (optimizer,) = setup(tn, init_scale=4.0)
    backward(s, p, 1.0)
    s.unscale_(optimizer)
    log.error("unscale_ twice", lambda: s.unscale_(optimizer))
    s.step(optimizer)
    log.error("unscale_ after step", lambda: s.unscale_(optimizer))
    log.error("step twice", lambda: s.step(optimizer))
    s.update()
    log.trace("update", s, p)
    iterate(s, p, optimizer, 1.0)
    log.trace("again", s, p)
    backward(s, p, INF)
    s.step(optimizer)
    log.error("step after a skip", lambda: s.step(optimizer))


def B17(tn, log):
    s, (p,), (optimizer,) = setup(tn, init_scale=4.0)
    for name, call in {
        "unscale_": lambda: s.unscale_(optimizer),
        "step": lambda: s.step(optimizer),
        "update": lambda: s.update(),
        "update(2.0)": lambda: s.update(2.0),
    }.items():
        log.error(f"{name} before scale", call)
    s.scale(tn.ones(1))
    p.grad = None
    log.error("unscale_ without grads", lambda: s.unscale_(optimizer))
    s, (p,), (optimizer,) = setup(tn, init_scale=4.0)
    s.scale(tn.ones(1))
    log.error("step without grads", lambda: s.step(optimizer))
    log.error("update without step", lambda: s.update())


def B18(tn, log):
    def closure():
        return None

    for enabled in (True, False):
        s, (p,), (optimizer,) = setup(tn, init_scale=4.0, enabled=enabled)
        backward(s, p, 1.0)
        log.error(f"closure= {enabled}", lambda s=s, o=optimizer: s.step(o, closure=closure))
        s, (p,), (optimizer,) = setup(tn, init_scale=4.0, enabled=enabled)
        backward(s, p, 1.0)
        log.error(f"closure {enabled}", lambda s=s, o=optimizer: s.step(o, closure))


def B19(tn, log):
    a, b = tn.nn.Parameter(tn.ones(1)), tn.nn.Parameter(tn.ones(1).half())
    optimizer = tn.optim.SGD([a, b], lr=0.5)
    s = tn.amp.GradScaler("cpu", init_scale=4.0)
    s.scale(tn.ones(1))
    a.grad, b.grad = tn.tensor([8.0]), tn.tensor([8.0]).half()
    log.error("unscale_", lambda: s.unscale_(optimizer))
    log.put("grads", [values(a.grad), values(b.grad)])
    b.grad = None
    log.error("still ready", lambda: s.unscale_(optimizer))
    log.put("grad", values(a.grad))


def B20(tn, log):
    p = tn.nn.Parameter(tn.ones(1))
    optimizer = tn.optim.SGD([p], lr=0.5, momentum=0.9, weight_decay=0.1)
    s = tn.amp.GradScaler("cpu", init_scale=4.0)
    for i, slope in enumerate(slopes("i g i g g")):
        iterate(s, p, optimizer, slope)
        log.trace(str(i), s, p)
        log.put(f"buffers {i}", sum(len(b) for b in optimizer.state_dict()["state"].values()))


def B21(tn, log):
    class Mine(tn.optim.SGD):
        def step(self, *args, **kwargs):
            self.seen = [args, kwargs]
            return "ret"

    p = tn.nn.Parameter(tn.ones(1))
    optimizer = Mine([p], lr=0.5)
    s = tn.amp.GradScaler("cpu", init_scale=4.0)
    backward(s, p, 1.0)
    log.put("returned", s.step(optimizer, 3, foo=1))
    log.put("seen", [list(optimizer.seen[0]), optimizer.seen[1]])
    s.update()
    backward(s, p, INF)
    log.put("skipped", s.step(optimizer, 3, foo=1))
    s.update()
    plain = tn.optim.SGD([p], lr=0.5)
    backward(s, p, 1.0)
    log.put("plain", s.step(plain))


def B22(tn, log):
    s, (p,), (optimizer,) = setup(tn, init_scale=4.0)
    backward(s, p, 1.0)
    s.unscale_(optimizer)
    p.grad.fill_(INF)
    s.step(optimizer)
    s.update()
    log.trace("written after unscale_", s, p)


def B23(tn, log):
    s, (p,), (optimizer,) = setup(tn, init_scale=4.0)
    backward(s, p, INF)
    s.unscale_(optimizer)
    p.grad.fill_(1.0)
    s.step(optimizer)
    s.update()
    log.trace("repaired after unscale_", s, p)


def B26(tn, log):
    s, (p,), (optimizer,) = setup(tn, enabled=False)
    loss = (p * INF).sum()
    log.put("same object", s.scale(loss) is loss)
    log.put("same number", s.scale(3))
    loss.backward()
    s.unscale_(optimizer)
    s.step(optimizer)
    s.update()
    log.trace("disabled", s, p)
    log.put("state", s.state_dict())
    s.load_state_dict({})
    log.error("getter", lambda: s.get_growth_factor())


def B27(tn, log):
    s = tn.amp.GradScaler("cpu", enabled=False)
    log.error("load {}", lambda: tn.amp.GradScaler("cpu").load_state_dict(s.state_dict()))


def B28(tn, log):
    s, p, optimizer = run(tn, log, "g", init_scale=4.0)
    s.update(10.0)
    log.trace("update(10.0)", s)
    backward(s, p, INF)
    s.step(optimizer)
    s.update(3.5)
    log.trace("found_inf is discarded", s, p)
    s.update(tn.tensor(7.0))
    log.trace("0-dim tensor", s)
    for value in (-1.0, 0.0, INF):
        log.error(f"update({value})", lambda v=value: s.update(v))


def B29(tn, log):
    s, _, _ = run(tn, log, "g", init_scale=4.0)
    log.error("two elements", lambda: s.update(tn.tensor([1.0, 2.0])))
    log.error("requires grad", lambda: s.update(tn.tensor([1.0], requires_grad=True)))
    log.error("int", lambda: s.update(10))


def B30(tn, log):
    s, p, optimizer = run(tn, log, "g", init_scale=128.0, growth_interval=3)
    backward(s, p, 1.0)
    s.unscale_(optimizer)
    log.error("pickle after unscale_", lambda: pickle.dumps(s))
    log.error("deepcopy after unscale_", lambda: copy.deepcopy(s))
    s.update()
    log.trace("unscale_ and update, no step", s, p)
    copied = pickle.loads(pickle.dumps(s))
    log.put("pickled", [copied.get_scale(), copied._get_growth_tracker()])
    log.put("lazy again", copied._scale is None)
    log.put(
        "factors", [copied.get_growth_factor(), copied.get_backoff_factor(), copied.get_growth_interval()]
    )


def B31(tn, log):
    s, p, optimizer = run(tn, log, "g g", init_scale=128.0, growth_interval=3)
    fresh = tn.amp.GradScaler("cpu")
    fresh.load_state_dict(s.state_dict())
    iterate(fresh, p, optimizer, 0.5)
    log.trace("resumed", fresh, p)


def B32(tn, log):
    for slope in (4.0, INF):
        s, p, optimizer = _fused(tn, log, str(slope))
        backward(s, p, slope)
        s.step(optimizer)
        log.put(f"gone {slope}", [hasattr(optimizer, "grad_scale"), hasattr(optimizer, "found_inf")])
        s.update()
        log.trace(str(slope), s)


def B33(tn, log):
    s, p, optimizer = _fused(tn, log, "unscaled")
    backward(s, p, 4.0)
    s.unscale_(optimizer)
    s.step(optimizer)
    log.put("grad", values(p.grad))


def _fused(tn, log, label):
    class Fused(tn.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            scale = self.grad_scale
            log.put(f"step {label}", [None if scale is None else float(scale), float(self.found_inf)])

    p = tn.nn.Parameter(tn.ones(1))
    return tn.amp.GradScaler("cpu", init_scale=2.0), p, Fused([p], lr=0.5)


def _end_to_end(tn, log, scale, steps):
    w = tn.nn.Parameter(tn.tensor([[2.0]]))
    optimizer = tn.optim.SGD([w], lr=0.01)
    s = tn.amp.GradScaler("cpu", init_scale=scale)
    for i in range(steps):
        optimizer.zero_grad()
        with tn.autocast("cpu", dtype=tn.float16):
            loss = tn.nn.functional.mse_loss(tn.tensor([[3.0]]) @ w, tn.tensor([[0.0]]))
        s.scale(loss).backward()
        log.put(f"loss {i}", float(loss.detach()))
        log.put(f"scaled grad {i}", values(w.grad))
        s.unscale_(optimizer)
        log.put(f"grad {i}", values(w.grad))
        s.step(optimizer)
        s.update()
        log.trace(f"{i}", s, w)


def B34(tn, log):
    _end_to_end(tn, log, 1024.0, 2)


def B35(tn, log):
    _end_to_end(tn, log, 2048.0, 2)


def B36(tn, log):
    run(tn, log, "i i i", init_scale=2.0)


def B37(tn, log):
    run(tn, log, "i " * 151, init_scale=1.0)


def B38(tn, log):
    s, (p,), (optimizer,) = setup(tn, init_scale=2.0**-127)
    s.scale(tn.ones(1))
    p.grad = tn.tensor([3.0])
    s.unscale_(optimizer)
    log.put("grad", values(p.grad))
    s.step(optimizer)
    s.update()
    log.trace("overflow by the multiplication", s, p)


def B39(tn, log):
    s, (p,), (optimizer,) = setup(tn, init_scale=8.0, growth_interval=10)
    for i, slope in enumerate(slopes("g g g g g g g i g g")):
        if i == 3:
            s.set_growth_interval(2)
        iterate(s, p, optimizer, slope)
        log.trace(str(i), s, p)


def B40(tn, log):
    s = tn.amp.GradScaler("cpu")
    for name, t in {
        "float16 0-dim": tn.tensor(1.0).half(),
        "float16 1-dim": tn.tensor([1.0]).half(),
        "bfloat16 1-dim": tn.tensor([1.0]).bfloat16(),
        "float64": tn.tensor([1.0]).double(),
        "int64": tn.tensor([3]),
    }.items():
        y = s.scale(t)
        log.put(name, [str(y.dtype).removeprefix("torch."), values(y)])


CLIP = [
    ((3.0, 4.0), {"max_norm": 1.0}),
    ((3.0, 4.0), {"max_norm": 10.0}),
    ((3.0, 4.0), {"max_norm": 5.0}),
    ((3.0, -4.0), {"max_norm": 1.0, "norm_type": INF}),
    ((3.0, -4.0), {"max_norm": 1.0, "norm_type": "inf"}),
    ((3.0, -4.0), {"max_norm": 1.0, "norm_type": 1}),
    ((4.0, 9.0), {"max_norm": 1.0, "norm_type": 0.5}),
    ((3.0, INF), {"max_norm": 1.0}),
    ((3.0, NAN), {"max_norm": 1.0}),
    ((3.0, INF), {"max_norm": 1.0, "error_if_nonfinite": True}),
    ((1e20, 1e20), {"max_norm": 1.0}),
    ((0.0, 0.0), {"max_norm": 1.0}),
    ((3.0, 4.0), {"max_norm": -1.0}),
    ((), {"max_norm": 1.0}),
]


def B41(tn, log):
    for grads, kwargs in CLIP:
        params = [tn.nn.Parameter(tn.ones(1)) for _ in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = tn.tensor([g])
        label = f"{grads} {kwargs}"
        log.error(f"norm {label}", lambda p=params, k=kwargs: float(tn.nn.utils.clip_grad_norm_(p, **k)))
        log.put(f"grads {label}", [values(p.grad) for p in params])
    p = tn.nn.Parameter(tn.ones(5))
    p.grad = tn.tensor([-10.0, 2.0, 9.8, NAN, INF])
    tn.nn.utils.clip_grad_value_([p], 2.5)
    log.put("value", values(p.grad))


def B42(tn, log):
    for dtype in (tn.float32, tn.float16):
        w = tn.ones(1).to(dtype)
        for _ in range(100):
            w -= 1e-4
        log.put(str(dtype).removeprefix("torch."), values(w))


def B43(tn, log):
    for unscale in (True, False):
        s, (p,), (optimizer,) = setup(tn, lr=1.0, size=2)
        backward(s, p, tn.tensor([0.3, 0.4]))
        if unscale:
            s.unscale_(optimizer)
        log.put(f"norm {unscale}", float(tn.nn.utils.clip_grad_norm_([p], 1.0)))
        s.step(optimizer)
        log.put(f"p {unscale}", values(p))


def B44(tn, log):
    for scale in (1.0, 65536.0):
        s, (p,), (optimizer,) = setup(tn, init_scale=scale)
        s.scale((p.half() * 2.0**-13).float() * 2.0**-13).backward()
        log.put(f"scaled {scale}", values(p.grad))
        s.unscale_(optimizer)
        log.put(f"unscaled {scale}", values(p.grad))


# --------------------------------------------------------------------------------------------------------------- seeded traces


def seeded(seed):
    """A random run; torch and minamp draw the same decisions, for these depend on nothing they answer but the tracker."""

    def case(tn, log):
        rng = np.random.default_rng(seed)
        choose = lambda *options: options[rng.integers(len(options))]  # noqa: E731
        n = choose(1, 1, 2)
        s, params, optimizers = setup(
            tn,
            n,
            lr=0.125,
            size=3,
            init_scale=choose(1.0, 2.0**7, 2.0**16, 3e4, 2.0**-20),
            growth_factor=choose(1.5, 2.0, 4.0, 1.1),
            backoff_factor=choose(0.5, 0.25, 0.9, 0.1),
            growth_interval=choose(1, 2, 3, 5),
        )
        bad = choose(0.1, 0.3, 0.6)
        for i in range(24):
            for p in params:
                slope = rng.integers(-8, 9, 3).astype(np.float32) / 4
                if rng.random() < bad:
                    slope[rng.integers(3)] = choose(INF, -INF, NAN)
                backward(s, p, tn.from_numpy(slope))
            stepped = [o for o in optimizers if rng.random() < 0.9] or optimizers[:1]
            for optimizer in stepped:
                if rng.random() < 0.3:
                    s.unscale_(optimizer)
                    if rng.random() < 0.5:
                        tn.nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 1.5)
                s.step(optimizer)
            if rng.random() < 0.06:
                s.update(choose(16.0, 1024.0, 0.75))
            else:
                s.update()
            if rng.random() < 0.1:  # never below the tracker: there minamp differs on purpose, see B39
                s.set_growth_interval(s._get_growth_tracker() + choose(1, 2, 4))
            if rng.random() < 0.05:
                s.set_growth_factor(choose(1.25, 3.0))
            if rng.random() < 0.05:
                s.set_backoff_factor(choose(0.125, 0.75))
            log.trace(f"{i:02d}", s, *params)

    return case


CASES = {name: case for name, case in globals().items() if name[:1] == "B" and name[1:].isdigit()}
CASES |= {f"seed {seed:02d}": seeded(seed) for seed in range(24)}


def outcome(tn, case):
    log = Log()
    case(tn, log)
    return dict(log)
