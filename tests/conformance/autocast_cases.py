"""Autocast cases A01 to A26, as functions of a `kit` and a `Log`; the same lines run under torch and under minamp.

A kit holds what differs: `tn` (torch or minamp), `device` (the device_type of its regions), `counting(tensor)` (a context manager
that lists the casts of that tensor) and `listed(x)`: the CPU build of torch leaves ops like softmax and exp out of its lists, so
there x is cast to float32 by hand, as the CUDA lists would do, and the values can be compared.
"""

import threading
import warnings

import numpy as np
from scaler_cases import Log, values


def name(dtype):
    return str(dtype).removeprefix("torch.")


class DtypeLog(Log):
    def dtype(self, label, function):
        """The dtype of what function() returns, or the type of its error."""
        self.error(label, lambda: name(function().dtype))


def data(kit, *shape, seed=0, dtype=None):
    """Multiples of 1/8 between -2 and 2, exact in every format."""
    array = np.random.default_rng(seed).integers(-16, 17, shape).astype(np.float32) / 8
    return kit.tn.tensor(array.tolist()).to(dtype or kit.tn.float32)


def region(kit, dtype=None, **kwargs):
    return kit.tn.autocast(kit.device, dtype=dtype or kit.tn.float16, **kwargs)


def A01(kit, log):
    a, b = data(kit, 3, 4), data(kit, 4, 2, seed=1)
    with region(kit):
        y = a @ b
    log.dtype("inside", lambda: y)
    log.dtype("outside", lambda: a @ b)
    log.put("values", values(y))
    log.put("by hand", values(a.half() @ b.half()))
    with region(kit, kit.tn.bfloat16):
        log.dtype("bfloat16", lambda: a @ b)


def A02(kit, log):
    a, b = data(kit, 3, 4), data(kit, 4, 2, seed=1)
    with region(kit):
        log.dtype("float16 @ float32", lambda: a.half() @ b)
        log.dtype("bfloat16 @ float32", lambda: a.bfloat16() @ b)
    log.dtype("outside", lambda: a.half() @ b)


def A03(kit, log):
    a, b = data(kit, 3, 4).double(), data(kit, 4, 2, seed=1).double()
    with region(kit):
        log.dtype("float64 @ float64", lambda: a @ b)
        log.dtype("float64 @ float16", lambda: a @ b.half())
        log.dtype("float64 @ float32", lambda: a @ b.float())


def _listed_ops(tn):
    F = tn.nn.functional
    return {
        "exp": lambda x: tn.exp(x),
        "log": lambda x: tn.log(x.abs() + 1.0),
        "pow": lambda x: x**2.0,
        "layer_norm": lambda x: F.layer_norm(x, (4,)),
        "softmax": lambda x: F.softmax(x, -1),
        "log_softmax": lambda x: F.log_softmax(x, -1),
        "sum": lambda x: x.sum(),
        "sum dim": lambda x: x.sum(1, keepdim=True),
        "mse": lambda x: F.mse_loss(x, x * 0.5),
        "reciprocal": lambda x: 1.0 / (x + 3.0),
        "cross_entropy": lambda x: F.cross_entropy(x, tn.tensor([0, 3, 2])),
    }


def A04_dtypes(kit, log):
    x = data(kit, 3, 4, dtype=kit.tn.float16)
    with region(kit):
        for label, op in _listed_ops(kit.tn).items():
            log.dtype(label, lambda op=op: op(x))


def A04_values(kit, log):
    x = data(kit, 3, 4, dtype=kit.tn.float16)
    for label, op in _listed_ops(kit.tn).items():
        with region(kit):
            log.put(label, values(op(kit.listed(x))))


def A05(kit, log):
    x = data(kit, 3, 4)
    with region(kit):
        log.dtype("pow int32", lambda: x.int() ** 2)
        log.dtype("sum int32", lambda: x.int().sum())
        log.dtype("pow float64", lambda: x.double() ** 2)
        log.dtype("softmax float64", lambda: kit.tn.softmax(x.double(), 1))


def A06(kit, log):
    x = data(kit, 3, 4)
    with region(kit):
        log.dtype("sum", lambda: x.sum(dtype=kit.tn.float16))
        log.dtype("softmax", lambda: kit.tn.softmax(x.half(), 1, dtype=kit.tn.float64))


def A07(kit, log):
    tn = kit.tn
    a, b = tn.full((4,), 400.0).half(), tn.zeros(4).half()
    with region(kit):
        y = tn.nn.functional.mse_loss(a, b)
    z = tn.nn.functional.mse_loss(a, b)
    log.put("inside", [name(y.dtype), values(y)])
    log.put("outside", [name(z.dtype), values(z)])


def A08(kit, log):
    a, b = data(kit, 3, 4), data(kit, 3, 4, seed=1, dtype=kit.tn.float16)
    for enabled in (True, False):
        with region(kit, enabled=enabled):
            for label, y in {
                "add": a + b, "mul": a * b, "sub": b - a, "div": b / (a * a + 1.0), "eq": a == b, "lt": a < b,
                "where": kit.tn.where(a < b, a, b), "half * 0-dim": b * a[0, 0], "half + bfloat16": b + a.bfloat16(),
            }.items():  # fmt: skip
                log.put(f"{label} {enabled}", [name(y.dtype), values(y)])


def A09(kit, log):
    a, b, tn = data(kit, 3, 4), data(kit, 3, 4, seed=1, dtype=kit.tn.float16), kit.tn
    with region(kit):
        for op in (tn.cat, tn.stack):
            log.dtype(f"{op.__name__} float16, float32", lambda op=op: op([b, a]))
            log.dtype(f"{op.__name__} float16, float16", lambda op=op: op([b, b]))
            log.dtype(f"{op.__name__} float16, bfloat16", lambda op=op: op([b, a.bfloat16()]))


def A10(kit, log):
    tn = kit.tn
    a, b, one = data(kit, 4), data(kit, 4, seed=1, dtype=kit.tn.float16), data(kit, 1, seed=2)
    with region(kit):
        log.dtype("addcmul", lambda: tn.addcmul(a, b, b))
        log.dtype("dot", lambda: tn.dot(b, a))
        log.dtype("index_put", lambda: tn.index_put(b, (tn.tensor([0]),), one))
        log.dtype("scatter_add", lambda: tn.scatter_add(b, 0, tn.tensor([0]), one))


def A11(kit, log):
    F = kit.tn.nn.functional
    x, t = data(kit, 4).abs() * 0.25, data(kit, 4, seed=1).abs() * 0.25
    with region(kit):
        log.dtype("banned", lambda: F.binary_cross_entropy(x, t))
        log.dtype("banned module", lambda: kit.tn.nn.BCELoss()(x.half(), t.half()))
        log.dtype("with logits", lambda: F.binary_cross_entropy_with_logits(x.half(), t.half()))


def A12(kit, log):
    a, b, c = data(kit, 3, 3), data(kit, 3, 3, seed=1), data(kit, 3, 3, seed=2)
    with region(kit):
        log.dtype("addmm_", lambda: a.addmm_(b, c))
        log.dtype("pow_", lambda: a.half().pow_(2))
        log.dtype("add_ float16 to float32", lambda: a.add_(b.half()))
        log.dtype("mul_ float32 to float16", lambda: a.half().mul_(b))


def A13(kit, log):
    a, b = data(kit, 3, 4), data(kit, 4, 2, seed=1)
    with region(kit):
        h = data(kit, 2, 3, seed=2) @ a
        with region(kit, enabled=False):
            log.dtype("float32 @ float32", lambda: a @ b)
            log.dtype("float16 @ float32", lambda: h @ b)
            log.dtype("float16.float() @ float32", lambda: h.float() @ b)
            with region(kit, kit.tn.bfloat16):
                log.dtype("inner region", lambda: a @ b)
        log.dtype("after", lambda: a @ b)
    log.dtype("outside", lambda: a @ b)


def A14(kit, log):
    tn = kit.tn

    def fail():
        with region(kit, tn.bfloat16):
            raise KeyError("x")

    with region(kit):
        log.error("raised", fail)
        log.put("inner", [tn.is_autocast_enabled(kit.device), name(tn.get_autocast_dtype(kit.device))])
    log.put("outer", tn.is_autocast_enabled(kit.device))


def A15(kit, log):
    a, b = data(kit, 3, 4), data(kit, 4, 2, seed=1)

    @region(kit)
    def f(a, b):
        "Text."
        return a @ b

    log.dtype("decorated", lambda: f(a, b))
    log.put("name", [f.__name__, f.__doc__])
    log.put("after", kit.tn.is_autocast_enabled(kit.device))


def A16(kit, log):
    a, b = data(kit, 3, 4), data(kit, 4, 2, seed=1)

    def work():
        log.put("enabled", kit.tn.is_autocast_enabled(kit.device))
        log.dtype("matmul", lambda: a @ b)

    with region(kit):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        log.dtype("this thread", lambda: a @ b)


def A17(kit, log):
    tn, x = kit.tn, data(kit, 2, 4)
    fresh = lambda grad=True: tn.nn.Parameter(data(kit, 4, 3, seed=1), requires_grad=grad)  # noqa: E731

    def count(label, w, body):
        with kit.counting(w) as casts:
            body(w)
        log.put(label, len(casts))

    def twice(w, **kwargs):
        with region(kit, **kwargs):
            x @ w, x @ w

    def two_regions(w):
        for _ in range(2):
            with region(kit):
                x @ w

    def nested(w):
        with region(kit):
            x @ w
            with region(kit):
                x @ w
            with region(kit, enabled=False):
                x @ w
                with region(kit):
                    x @ w
            x @ w

    def cleared(w):
        with region(kit):
            x @ w
            tn.clear_autocast_cache()
            x @ w

    def under_no_grad(w):
        with region(kit):
            with tn.no_grad():
                x @ w, x @ w
            x @ w

    count("twice", fresh(), twice)
    count("cache off", fresh(), lambda w: twice(w, cache_enabled=False))
    count("frozen", fresh(False), twice)
    count("not a leaf", fresh() * 1.0, twice)
    count("a view", fresh()[:], twice)
    count("detached leaf", fresh().detach().clone().requires_grad_(), twice)
    count("two regions", fresh(), two_regions)
    count("nested regions", fresh(), nested)
    count("cleared", fresh(), cleared)
    count("no_grad first", fresh(), under_no_grad)


def A18(kit, log):
    tn = kit.tn
    w, b = tn.nn.Parameter(data(kit, 3, 4)), tn.nn.Parameter(data(kit, 3, seed=1))
    x = data(kit, 2, 4, seed=2)
    with region(kit), region(kit):
        for i in range(2):
            with tn.no_grad():
                log.put(f"no_grad {i}", tn.nn.functional.linear(x, w, b).requires_grad)
            y = tn.nn.functional.linear(x, w, b)
            log.put(f"grad {i}", y.requires_grad)
    y.float().sum().backward()
    log.put("grads", [values(w.grad), values(b.grad)])


def A19(kit, log):
    tn = kit.tn
    w, x = tn.nn.Parameter(tn.ones(1, 1)), tn.ones(1, 1)
    with region(kit):
        log.put("1 first", values(x @ w))
        with tn.no_grad():
            w *= 2
        log.put("2 after w *= 2", values(x @ w))
    with region(kit):
        log.put("3 next region", values(x @ w))


def A20(kit, log):
    tn, F = kit.tn, kit.tn.nn.functional
    x = data(kit, 2, 4).requires_grad_()
    w1, b1 = tn.nn.Parameter(data(kit, 4, 4, seed=1)), tn.nn.Parameter(data(kit, 4, seed=2))
    w2, b2 = tn.nn.Parameter(data(kit, 1, 4, seed=3)), tn.nn.Parameter(data(kit, 1, seed=4))
    with region(kit):
        h1 = F.linear(x, w1, b1)
        h2 = F.gelu(h1)
        h3 = F.linear(h2, w2, b2)
        loss = F.mse_loss(h3, tn.zeros(2, 1))
    for label, t in {"h1": h1, "h2": h2, "h3": h3, "loss": loss}.items():
        t.register_hook(lambda g, label=label: log.put(label, name(g.dtype)))
    loss.backward()
    for label, t in {"x": x, "w1": w1, "b1": b1, "w2": w2, "b2": b2}.items():
        log.put(f"{label}.grad", name(t.grad.dtype))


def A21(kit, log):
    tn = kit.tn
    for cache in (True, False):
        w = tn.nn.Parameter(tn.ones(1, 1))
        with region(kit, cache_enabled=cache):
            a, b = tn.tensor([[2048.0]]) @ w, tn.tensor([[1.0]]) @ w
        (a.float().sum() + b.float().sum()).backward()
        log.put(f"cache {cache}", values(w.grad))


def _function(kit, log, label, cast_inputs):
    tn = kit.tn

    class MatMul(tn.autograd.Function):
        @staticmethod
        @tn.amp.custom_fwd(device_type=kit.device, cast_inputs=cast_inputs)
        def forward(ctx, a, container):
            b = container[1][0]["t"] if isinstance(container, tuple) else container
            ctx.save_for_backward(a, b)
            log.put(f"{label} forward", [name(a.dtype), name(b.dtype), tn.is_autocast_enabled(kit.device)])
            return a @ b

        @staticmethod
        @tn.amp.custom_bwd(device_type=kit.device)
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            log.put(f"{label} backward", [name(g.dtype), tn.is_autocast_enabled(kit.device)])
            return g @ b.t(), (a.t() @ g if ctx.needs_input_grad[1] else None)

    return MatMul.apply


def A22(kit, log):
    a, b = data(kit, 3, 4).requires_grad_(), data(kit, 4, 2, seed=1).requires_grad_()
    for inside in (True, False):
        with region(kit, enabled=inside):
            y = _function(kit, log, str(inside), None)(a, b)
        log.put(f"{inside} output", [name(y.dtype), values(y)])
        a.grad = b.grad = None
        y.float().sum().backward()
        log.put(f"{inside} grads", [name(a.grad.dtype), values(a.grad), values(b.grad)])


def A23(kit, log):
    tn = kit.tn
    for inside in (True, False):
        a = data(kit, 3, 4, dtype=tn.float16).requires_grad_()
        b = data(kit, 4, 2, seed=1, dtype=tn.float16)
        with region(kit, enabled=inside):
            y = _function(kit, log, str(inside), tn.float32)(a, (0, {0: {"t": b}}))
        log.put(f"{inside} output", name(y.dtype))
        y.float().sum().backward()
        log.put(f"{inside} grad", [name(a.grad.dtype), values(a.grad)])
    for label, make in {"custom_fwd": tn.amp.custom_fwd, "custom_bwd": tn.amp.custom_bwd}.items():
        log.error(f"{label} without device_type", lambda make=make: make(lambda ctx: None))
        log.error(f"{label} device object", lambda make=make: make(device_type=tn.device("cpu")))


def A24(kit, log):
    tn, a = kit.tn, data(kit, 2, 2)
    for enabled in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with region(kit, tn.float32, enabled=enabled):
                log.put(f"enabled {enabled}", tn.is_autocast_enabled(kit.device))
                log.dtype(f"matmul {enabled}", lambda: a @ a)
        log.put(f"warned {enabled}", [c.category.__name__ for c in caught])


def A25(kit, log):
    tn = kit.tn
    log.error("device object", lambda: tn.autocast(tn.device("cpu")))
    log.error("bogus name", lambda: tn.autocast("bogus"))
    log.error("called on a tensor", lambda: region(kit)(tn.ones(1)))


def A26(kit, log):
    tn = kit.tn
    with region(kit):
        for bias in (1e-9, 70000.0, 0.1):
            y = tn.nn.functional.linear(tn.zeros(1, 2), tn.ones(1, 2), tn.tensor([bias]))
            log.put(f"bias {bias}", [name(y.dtype), values(y)])


def A27_default_dtype(kit, log):
    a = data(kit, 2, 2)
    with kit.tn.autocast(kit.device):
        log.dtype("default", lambda: a @ a)
        with kit.tn.autocast(kit.device, dtype=kit.tn.bfloat16):
            log.dtype("bfloat16", lambda: a @ a)
            with kit.tn.autocast(kit.device):
                log.dtype("inherited", lambda: a @ a)


FAKE_CUDA = {"A04_dtypes", "A05", "A06", "A09", "A10", "A11", "A12", "A27_default_dtype"}
CASES = {key: case for key, case in globals().items() if key[:1] == "A" and key[1:3].isdigit()}


def how(case):
    return "fake cuda" if case in FAKE_CUDA else "run on cpu"


def outcome(kit, case):
    log = DtypeLog()
    case(kit, log)
    return dict(log)
