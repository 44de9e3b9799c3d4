"""A step that asks the host for nothing: capturable optimizers, the scaler on the GPU, CUDA graphs. Under the stand-in."""

import copy

import numpy as np
import pytest
import standin
from test_cuda import CNN, Recurrent, mlp

import minamp
import minamp.nn.functional as F
from minamp import GradScaler, autocast, bfloat16, float16, float32, nn, optim
from minamp.backends import device
from minamp.tensor import Tensor

INF = float("inf")
OPTIMIZERS = {
    "sgd": lambda p, **o: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.25, weight_decay=1e-3, **o),
    "plain": lambda p, **o: optim.SGD(p, lr=0.1, **o),
    "adam": lambda p, **o: optim.Adam(p, lr=1e-2, amsgrad=True, **o),
    "adamw": lambda p, **o: optim.AdamW(p, lr=1e-2, weight_decay=0.1, **o),
    "rmsprop": lambda p, **o: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True, **o),
}
KINDS = {  # how the weights are stored -> the model's dtype, options
    "float32": (float32, {}),
    "master": (float16, {"master_weights": True}),
    "bfloat16": (bfloat16, {}),
}


@pytest.fixture
def gpu():
    with standin.installed() as gpu:
        yield gpu


class Training:
    """The standard loop: the first steps overflow. `step` is what a graph may hold, without the data."""

    def __init__(self, make, optimizer, where="cuda", kind="float32", **options):
        minamp.manual_seed(1)
        rng = np.random.default_rng(2)
        dtype, more = KINDS[kind]
        self.model = make().to(where).to(dtype)
        x = Tensor(rng.standard_normal((12, 1, 16, 16)).astype(np.float32)).to(where)
        self.x = x.flatten(1) if isinstance(self.model, nn.Sequential) else x
        self.y = Tensor(rng.integers(0, 10, 12)).to(where)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), **more, **options)
        self.scaler = GradScaler(init_scale=2.0**40, backoff_factor=2.0**-10, growth_interval=2)

    def step(self, clip=True):
        self.optimizer.zero_grad()
        with autocast(dtype=float16):
            loss = F.cross_entropy(self.model(self.x), self.y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        answer = self.scaler.step(self.optimizer)
        self.scaler.update()
        return answer

    def holds(self):
        """Every number: weights, buffers of the optimizer, steps, scale and count, as lists that == compares."""
        weights = [p.float().cpu().detach().tolist() for p in self.model.parameters()]
        state = [
            {k: float(v) if k == "step" else v.float().cpu().tolist() for k, v in s.items()}
            for s in self.optimizer.state_dict()["state"].values()
        ]
        return weights, state, self.scaler.get_scale(), self.scaler._get_growth_tracker()


def same(ours, theirs, optimizer):
    """`ours` has counters on the GPU also where the host counts otherwise: SGD's."""
    if optimizer == "sgd":
        ours[1][:] = [{k: v for k, v in s.items() if k != "step"} for s in ours[1]]
    assert ours == theirs


# the scaler's flags, nothing else; with capturable nothing at all
@pytest.mark.parametrize("capturable, copies", [(False, {"get": 1}), (True, {})])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [mlp, CNN])
def test_what_a_step_copies(gpu, make, optimizer, capturable, copies):
    run = Training(make, optimizer, capturable=capturable)
    for _ in range(6):
        gpu.count.clear()
        run.step()
    moved = dict(gpu.count)
    assert moved.pop("kernel") > 100 and moved == copies
    gpu.count.clear()
    assert run.scaler.get_scale() == 2.0**11 and gpu.count == {"get": 1}  # the scale is copied when asked for


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make, kind", [*((mlp, kind) for kind in KINDS), (CNN, "master")])
def test_deciding_on_the_gpu_changes_no_bit(gpu, make, optimizer, kind):
    """Three steps overflow, the others train and let the scale grow."""
    plain, ours = Training(make, optimizer, kind=kind), Training(make, optimizer, kind=kind, capturable=True)
    answers = [(plain.step(), ours.step()) for _ in range(8)]
    assert [a for a, _ in answers[:2]] == [None] * 2 and answers[-1] == (True, True)
    same(ours.holds(), plain.holds(), optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make, kind", [*((mlp, kind) for kind in KINDS), (CNN, "master")])
def test_a_captured_step_is_the_step(gpu, make, optimizer, kind):
    """Captured while the scale still overflows, or later: replays go on as steps would, skips and growth included."""
    for before in (1, 5):
        plain, ours = (
            Training(make, optimizer, kind=kind),
            Training(make, optimizer, kind=kind, capturable=True),
        )
        for _ in range(before):
            plain.step(), ours.step()
        g = minamp.cuda.CUDAGraph()
        with minamp.cuda.graph(g):
            ours.step()
        plain.step()
        gpu.count.clear()
        for _ in range(4):
            plain.step(), g.replay()
        assert gpu.count["graph"] == 4
        same(ours.holds(), plain.holds(), optimizer)
        plain.step(), ours.step()  # and back to steps one by one
        same(ours.holds(), plain.holds(), optimizer)


def test_a_captured_step_of_recurrent_layers(gpu):
    """Nothing is copied, their first states neither."""
    plain, ours = Training(Recurrent, "adam"), Training(Recurrent, "adam", capturable=True)
    for _ in range(2):
        gpu.count.clear()
        ours.step()
        assert set(gpu.count) == {"kernel"}
        plain.step()
    g = minamp.cuda.CUDAGraph()
    with minamp.cuda.graph(g):
        ours.step()
    plain.step()
    for _ in range(3):
        plain.step(), g.replay()
    same(ours.holds(), plain.holds(), "adam")


def test_a_graph_sees_new_data_and_a_new_scale(gpu):
    plain, ours = Training(mlp, "adam"), Training(mlp, "adam", capturable=True)
    for run in (plain, ours):
        for _ in range(5):
            run.step()
    g = minamp.cuda.CUDAGraph()
    with minamp.cuda.graph(g):
        ours.step()
    plain.step()
    state = {**plain.scaler.state_dict(), "scale": 2.0**7, "_growth_tracker": 1}
    for run in (plain, ours):
        run.x.copy_(run.x * 2.0)
        run.scaler.load_state_dict(state)
    plain.step(), g.replay()
    assert plain.scaler.get_scale() == ours.scaler.get_scale() == 2.0**8
    plain.scaler.update(2.0**5), ours.scaler.update(2.0**5)
    plain.step(), g.replay()
    assert ours.holds() == plain.holds()


def test_a_graph_keeps_the_tables_its_launches_read(gpu):
    x = minamp.ones(1, 1, 6, 6, device="cuda")
    F.avg_pool2d(x, 3)  # moves its windows to the GPU
    g = minamp.cuda.CUDAGraph()
    with minamp.cuda.graph(g):
        F.avg_pool2d(x, 3)
    tables = device.tables()
    assert tables and all(any(t is held for held in g._tables) for t in tables)


def test_what_cannot_be_captured_says_so(gpu):
    run = Training(mlp, "adam")
    run.step()
    g = minamp.cuda.CUDAGraph()
    # the flag is asked for: capturable=True is missing
    with pytest.raises(RuntimeError, match="stream is capturing, so D2H"):
        with minamp.cuda.graph(g):
            run.step()
    with pytest.raises(RuntimeError, match="^cudaErrorStreamCaptureUnsupported"):  # no failed kernel
        with minamp.debug(sync=True), minamp.cuda.graph(g):
            run.step()
    with pytest.raises(RuntimeError, match="nothing was captured: use `with minamp.cuda.graph"):
        minamp.cuda.CUDAGraph().replay()
    with pytest.raises(RuntimeError, match="no capture has begun"):
        g.capture_end()
    g.capture_begin()
    with pytest.raises(RuntimeError, match="a capture has begun already"):
        g.capture_begin()
    g.capture_end()


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr("minamp.backends.graph.gpu_status", lambda: "there is none")
    with pytest.raises(RuntimeError, match="no GPU whose work could be captured: there is none"):
        minamp.cuda.CUDAGraph()
    for optimizer in OPTIMIZERS:  # capturable is allowed on the CPU and changes nothing
        runs = [Training(mlp, optimizer, "cpu", **o) for o in ({}, {"capturable": True})]
        answers = [[run.step() for _ in range(6)] for run in runs]
        assert answers[0] == answers[1] and answers[0][0] is None and runs[0].holds() == runs[1].holds()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_launches_do_not_grow_with_the_parameters(gpu, optimizer, capturable, kind):
    dtype, options = KINDS[kind]

    def launches(n):
        params = [minamp.ones(3, 4, device="cuda", dtype=dtype, requires_grad=True) for _ in range(n)]
        opt, scaler = OPTIMIZERS[optimizer](params, capturable=capturable, **options), GradScaler()
        for _ in range(2):  # the first step makes the buffers
            for p in params:
                p.grad = minamp.ones(3, 4, device="cuda", dtype=dtype)
            scaler.scale(minamp.ones(1, device="cuda"))
            gpu.count.clear()
            scaler.step(opt)
            scaler.update()
        return gpu.count["kernel"]

    # flags made, unscale, update, update_scale; widening for masters; counting on the GPU, and room for what comes of it
    counted = capturable and optimizer not in ("plain", "rmsprop")
    assert launches(2) == launches(60) == 4 + (kind == "master") + 2 * counted


def test_steps_that_are_skipped_are_not_counted(gpu):
    for make in (optim.SGD, optim.Adam):
        options = {"momentum": 0.9, "dampening": 0.5} if make is optim.SGD else {}
        p = minamp.ones(3, device="cuda", requires_grad=True)
        opt, scaler = make([p], lr=0.5, capturable=True, **options), GradScaler(init_scale=4.0)
        for bad, steps in ((True, 0), (True, 0), (False, 1), (True, 1), (False, 2)):
            p.grad = minamp.full((3,), INF if bad else 4.0, device="cuda")
            scaler.scale(minamp.ones(1, device="cuda"))
            scaler.update(4.0)
            assert scaler.step(opt) is True  # nobody here knows
            scaler.update()
            assert opt.state[p]["step"].item() == steps
            assert scaler.get_scale() == (2.0 if bad else 4.0) and not hasattr(opt, "found_inf")
        if make is optim.SGD:  # 1, then 0.9 * 1 + 0.5 * 1: the first step that was made started the buffer
            assert opt.state[p]["momentum_buffer"].tolist() == pytest.approx([1.4] * 3)


def test_optimizers_are_skipped_one_by_one_and_the_scale_falls_once(gpu):
    params = [minamp.ones(2, device="cuda", requires_grad=True) for _ in range(3)]
    opts = [optim.SGD([p], lr=1.0, capturable=c) for p, c in zip(params, (True, True, False), strict=True)]
    scaler = GradScaler(init_scale=4.0, growth_interval=1)
    for bad, scale in (((0, 1, 2), 2.0), ((1,), 1.0), ((2,), 0.5), ((), 1.0)):
        scaler.scale(minamp.ones(1, device="cuda"))
        before = [p.detach().clone().tolist() for p in params]
        for i, (p, opt) in enumerate(zip(params, opts, strict=True)):
            p.grad = minamp.full((2,), INF if i in bad else 4.0, device="cuda")
            scaler.step(opt)
        scaler.update()
        assert scaler.get_scale() == scale
        assert [p.tolist() != b for p, b in zip(params, before, strict=True)] == [
            i not in bad for i in range(3)
        ]


def test_a_limit_of_skips_is_counted_on_the_host(gpu):
    p = minamp.ones(2, device="cuda", requires_grad=True)
    opt, scaler = optim.SGD([p], lr=1.0, capturable=True), GradScaler(max_skips=2)
    with pytest.raises(FloatingPointError, match=r"2 steps in a row .* number 0 of shape \(2,\) \(inf\)"):
        for _ in range(3):
            p.grad = minamp.full((2,), INF, device="cuda")
            scaler.scale(minamp.ones(1, device="cuda"))
            assert scaler.step(opt) is None
            scaler.update()


def test_half_weights_whose_rounding_the_kernel_does_not_know():
    p = minamp.ones(2, requires_grad=True)
    for rule in ("kahan", "stochastic"):
        with pytest.raises(ValueError, match="leave out one of write_back and capturable=True"):
            optim.Adam([p], write_back=rule, capturable=True)


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_moves_on_through_files_and_ways_of_counting(gpu, optimizer, start, tmp_path):
    """Steps counted on the GPU and on the host in turn, from one run to the next: as one run."""
    plain, first = Training(mlp, optimizer), Training(mlp, optimizer, capturable=start)
    for run in (plain, first):
        for _ in range(5):
            run.step()
    for capturable in (not start, start, not start):
        minamp.save(
            {n: getattr(first, n).state_dict() for n in ("model", "optimizer", "scaler")}, tmp_path / "s"
        )
        saved = minamp.load(tmp_path / "s")
        for group in saved["optimizer"]["param_groups"]:
            group["capturable"] = capturable
        again = Training(mlp, optimizer, capturable=capturable)
        for n in saved:
            getattr(again, n).load_state_dict(saved[n])
        plain.step(), again.step()
        first = again
    same(first.holds(), plain.holds(), optimizer)


# ---- arrays stay where their owners put them


def test_gradients_and_weights_that_others_hold_are_not_touched(gpu):
    for where in ("cpu", "cuda"):
        run = Training(mlp, "adam", where, capturable=True)
        p = next(iter(run.model.parameters()))
        for _ in range(4):  # three overflow
            run.step()
        old, values = p.grad, p.grad.tolist()
        array = p._data
        run.step()
        assert old is not p.grad and old.tolist() == values
        assert p._data is array, "weights are updated where they lie"
        p.data = p.detach().clone() * 0.5  # another array, as a user or model.to() puts it in
        before = p.detach().clone()
        run.step()
        assert p._data is not array and p.tolist() != before.tolist()


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_come_go_and_wait(gpu, where, optimizer):
    """Together and one optimizer each, parameters are updated alike: with gradients of some, later groups and new arrays."""

    def train(together):
        rng = np.random.default_rng(0)
        ps = [
            Tensor(rng.standard_normal(s).astype(np.float32)).to(where) for s in [(4, 3), (3,), (70, 50), ()]
        ]
        ps = [p.requires_grad_() for p in ps]
        make = OPTIMIZERS[optimizer]
        opts = [make(ps[:3])] if together else [make([p]) for p in ps[:3]]
        for step in range(6):
            if step == 2:
                if together:
                    opts[0].add_param_group({"params": [ps[3]], "lr": 0.5})
                else:
                    opts.append(make([{"params": [ps[3]], "lr": 0.5}]))
            if step == 3:
                ps[0].data = ps[0].detach().clone()
                opts = copy.deepcopy((ps, opts)) if where == "cpu" else (ps, opts)
                ps, opts = opts
            for i, p in enumerate(ps):
                g = Tensor(rng.standard_normal(p.shape).astype(np.float32)).to(where)
                p.grad = g if (step + i) % 3 else None
            for opt in opts:
                opt.step()
        return [p.tolist() for p in ps]

    assert train(True) == train(False)


def test_two_optimizers_share_a_model(gpu):
    results = []
    for where in ("cpu", "cuda"):
        model = nn.Linear(3, 2).to(where)
        with minamp.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        opts = [optim.SGD(model.parameters(), lr=0.1, momentum=0.9), optim.Adam(model.parameters(), lr=0.1)]
        for _ in range(3):
            for opt in opts:
                opt.zero_grad()
                model(minamp.ones(4, 3).to(where)).sum().backward()
                opt.step()
        results.append([p.tolist() for p in model.parameters()])
    assert results[0] == results[1]


def test_foreach_and_fused_are_taken_and_change_nothing():
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False, "fused": None}):
        for make in (optim.SGD, optim.Adam, optim.AdamW):
            assert "fused" not in make([minamp.ones(1, requires_grad=True)], **options).param_groups[0]
