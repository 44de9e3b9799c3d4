"""The doctor itself: what it leaves behind (nothing), how often it runs the step, what its report looks like, what it refuses.

What it finds in which script is tested by tests/test_doctor.py.
"""

import array
import collections
import dataclasses
import enum
import functools
import json
import math
import random
import sys
import threading
import types

import numpy as np
import pytest
from gallery import parts

import minamp
import minamp.nn.functional as F
from minamp import GradScaler, autocast, float16, nn, optim, utils
from minamp.announce import listeners
from minamp.autocast import state as autocast_state
from minamp.clinic import advice
from minamp.clinic.advice import HIGH, LOW
from minamp.clinic.calls import Calls
from minamp.clinic.patient import Patient
from minamp.clinic.report import Advice, Finding, Report
from minamp.clinic.rules.base import CODES, RULES
from minamp.clinic.trace import Trace, alike, largest, magnitudes
from minamp.record import observe, observers
from minamp.restore import Snapshot


class Trainer:
    """Everything that a step can change: weights, statistics, moments, scale, five random generators, own attributes."""

    def __init__(self, raising=None):
        minamp.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.own, self.raising = np.random.default_rng(7), raising
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        self.optimizer = optim.Adam(self.model.parameters(), lr=1e-2)
        self.scaler = GradScaler(init_scale=2.0**10, growth_interval=2)
        self.count, self.losses = 0, []
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def step(self):
        self.count += 1
        x = minamp.tensor(
            np.random.randn(8, 6).astype(np.float32) + self.own.standard_normal((8, 6)) * 0.1
        ).float()
        x = x + random.random()
        y = minamp.randint(0, 3, (8,))
        self.optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        if self.raising and self.count >= 2:
            raise self.raising
        self.scaler.update()
        for name, p in self.model.named_parameters():
            self.average[name].mul_(0.9).add_(p.detach() * 0.1)
        self.losses.append(loss.item())

    def state(self):
        arrays = [t._data for t in (*self.model.state_dict().values(), *self.average.values())]
        arrays += [p.grad._data for p in self.model.parameters() if p.grad is not None]
        arrays += [v._data for s in self.optimizer.state.values() for v in s.values() if hasattr(v, "_data")]
        return (
            [a.tobytes() for a in arrays],
            [p._version[0] for p in self.model.parameters()],
            [s.get("step") for s in self.optimizer.state.values()],
            self.scaler.state_dict(),
            len(self.scaler._records),
            (self.count, list(self.losses)),
            repr((minamp.get_rng_state(), np.random.get_state(legacy=False), random.getstate())),
            repr(self.own.bit_generator.state),
            (
                autocast_state.enabled,
                autocast_state.depth,
                len(autocast_state.cache),
                minamp.is_grad_enabled(),
            ),
            (list(observers), list(listeners)),
        )


def examine(t):
    return minamp.doctor(t.step, model=t.model, optimizer=t.optimizer, scaler=t.scaler)


@pytest.mark.parametrize("before", [0, 3])
def test_nothing_is_changed_and_training_goes_on_bit_for_bit(before):
    ends = []
    for examined in (True, False):
        t = Trainer()
        for _ in range(before):
            t.step()
        if examined:
            state = t.state()
            assert examine(t) == []
            assert t.state() == state
        for _ in range(3):
            t.step()
        ends.append(t.state())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("error", [KeyError("the user's own"), KeyboardInterrupt()])
def test_an_unknown_error_is_raised_again_after_everything_is_put_back(error):
    t = Trainer(raising=error)
    state, enter = t.state(), autocast.__enter__
    with pytest.raises(type(error)) as raised:
        examine(t)
    assert raised.value is error
    assert t.state() == state and autocast.__enter__ is enter


def test_a_known_error_becomes_a_finding_and_everything_is_put_back():
    t = Trainer()
    t.scaler.update = lambda: None  # forgotten
    state = t.state()
    report = examine(t)
    assert [f.code for f in report] == ["update_forgotten"] and t.state() == state
    assert report.error.startswith("RuntimeError: step() has already been called") and report.error in str(
        report
    )


def test_closures_are_put_back_and_iterators_are_not():
    runs, seen, cell = 0, [], {"n": 0}
    w = minamp.tensor([1.0, 2.0], requires_grad=True)
    held = []

    def step():
        nonlocal runs
        runs += 1
        cell["n"] += 1
        held.append(cell["n"])
        sys.intern("x")
        seen_outside.calls += 1
        (w * 3.0).sum().backward()
        with minamp.no_grad():
            w.sub_(0.1 * w.grad)
        w.grad = None

    class Counter:
        __slots__ = ("calls", "__weakref__")

    seen_outside = Counter()
    seen_outside.calls = 0
    real = iter(range(100))
    report = minamp.doctor(lambda: (next(real), step()))
    assert next(real) == report.steps == 2  # an iterator is where it stands
    assert runs == cell["n"] == seen_outside.calls == 0 and held == [] and seen == []
    assert w.tolist() == [1.0, 2.0] and w.grad is None and w._version == [0]


@pytest.mark.parametrize(
    "what, runs",
    [
        ("finite", 2),  # once as it is, once in float32
        ("is skipped", 2),  # which spoils nothing, and the float32 gradients say why
        ("is skipped for no reason", 4),  # is every one?
        ("overflows", 3),  # the weights are spoilt: the float32 run starts anew
        ("overflows in float32", 3),  # where the step has gone on; perhaps not where it started
        ("raises in float32", 4),  # twice as it is, and not in float32 again
        ("is in float32 every second time", 4),
    ],
)
def test_how_often_the_step_runs(what, runs):
    minamp.manual_seed(0)
    model, calls, turns = nn.Linear(4, 4), iter(range(9)), [0]
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler(
        init_scale=2.0**40 if what == "is skipped" else 2.0, enabled=what.startswith("is skipped")
    )

    def step():
        next(calls)
        turns[0] += 1
        optimizer.zero_grad()
        with autocast(dtype=float16, enabled=what != "is in float32 every second time" or turns[0] % 2 == 1):
            y = model(minamp.ones(2, 4))
        if what == "is skipped for no reason" and y.dtype == float16:
            y.register_hook(lambda g: g * math.inf)
        factor = {"overflows": 1e38, "overflows in float32": 1.0 if y.dtype == float16 else 1e38}.get(
            what, 1.0
        )
        if what == "raises in float32" and y.dtype != float16:
            raise ValueError("only half, please")
        scaler.scale((y.float() * factor).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    report = minamp.doctor(step, model, optimizer, scaler)
    assert report.steps == next(calls) == runs


def test_an_iterator_that_ends():
    model, batches = nn.Linear(4, 4), iter([minamp.ones(2, 4)])
    with pytest.raises(
        RuntimeError, match="^doctor: an iterator was at its end in run [23] of the step: give"
    ):
        minamp.doctor(lambda: model(next(batches)).sum().backward(), model)


settings = types.ModuleType("settings")  # as a module of the user's


def test_what_classes_modules_and_arrays_of_numbers_hold_comes_back():
    settings.count = 0

    class Base:
        total, log = 0, []

        @classmethod
        def counted(cls):
            cls.total += 1

    class Loop(Base):
        numbers, byte = array.array("q", [0]), bytearray(1)

        def step(self):
            settings.count += 1
            self.counted()
            Loop.log.append(Loop.total)
            Loop.numbers[0] += 1
            Loop.byte[0] += 1
            Loop.new = True
            (w * 1.0).sum().backward()

    w, loop = minamp.ones(2).requires_grad_(True), Loop()
    loop.step()
    before = settings.count, Base.total, Loop.total, list(Base.log), list(Loop.numbers), bytes(Loop.byte)
    minamp.doctor(loop.step)
    assert before == (
        *(settings.count, Base.total, Loop.total),
        *(list(Base.log), list(Loop.numbers), bytes(Loop.byte)),
    )


class Loud:
    """Methods of a container that do more than the library's, as Counter.update, which counts what it is given."""

    def _refuse(self, *_):
        raise AssertionError("the user's own method")

    update = extend = clear = __setitem__ = __iter__ = items = keys = values = _refuse


LOUD = {kind: type(f"Loud{kind.__name__}", (Loud, kind), {}) for kind in (dict, list, set, collections.deque)}


def test_containers_come_back_by_the_methods_of_their_base_class():
    counts, order = collections.Counter(a=1), collections.OrderedDict(a=1, b=2)
    loud = {kind: made({1: 2} if kind is dict else [1, 2]) for kind, made in LOUD.items()}
    cells, memory = np.array([1, [2]], object), memoryview(bytearray(b"abc"))

    def state():
        held = [list(kind.__iter__(x)) for kind, x in loud.items()]
        return dict(counts), list(order), held, repr(cells.tolist()), bytes(memory)

    w, before = minamp.ones(2).requires_grad_(True), state()

    def step():
        counts["b"] += 1
        order.move_to_end("a")
        dict.__setitem__(loud[dict], 3, 4)
        for kind in (list, collections.deque):
            kind.append(loud[kind], 3)
        set.add(loud[set], 3)
        cells[0] = 5
        cells[1].append(6)
        memory[0] = 0
        (w * 1.0).sum().backward()

    minamp.doctor(step)
    assert state() == before
    step()
    assert state() != before


def test_what_methods_and_hooks_reach_comes_back():
    noise, seen = np.random.default_rng(0), []

    class Noisy(nn.Module):
        @property
        def strength(self):
            return float(noise.random())

        @staticmethod
        def note(x):
            seen.append(x.shape)

        @functools.cached_property
        def first(self):
            seen.append("first")
            return 0.0

        def evaluate(self):
            return large

        def forward(self, x):
            x = x + self.first
            self.note(x)
            return x + self.strength * minamp.tensor(noise.standard_normal(x.shape).astype(np.float32))

    class Remote:
        def __getattr__(self, name):
            raise RuntimeError(name)

    large, Noisy.remote = [np.zeros(3)], Remote()
    model = nn.Sequential(Noisy(), nn.Linear(4, 2))
    model[1].weight.register_hook(lambda g: seen.append(g))
    assert Snapshot(model=model).reached(id(noise)) and not Snapshot(model=model).reached(id(large))
    before = noise.bit_generator.state
    minamp.doctor(lambda: model(minamp.ones(2, 4)).sum().backward(), model)
    assert noise.bit_generator.state == before and seen == []


def test_two_loaders_zipped_come_back():
    data = utils.data.TensorDataset(minamp.arange(20).float().reshape(10, 2))
    both = zip(utils.data.DataLoader(data, 2), utils.data.DataLoader(data, 1), strict=False)
    model = nn.Linear(2, 1)

    def step():
        (large,), (small,) = next(both)
        (model(large).sum() * model(small).sum()).backward()

    step()
    minamp.doctor(step, model)
    assert [x[0][0, 0].item() for x in next(both)] == [4.0, 2.0]


def test_hooks_views_and_replaced_arrays_come_back():
    p = minamp.tensor([1.0, 2.0], requires_grad=True)
    array, node, extra = p._data, p._node, {"a": [1, {2}], "b": p}
    before = Snapshot(p=p, extra=extra)
    p.register_hook(lambda g: g)
    p.data = np.zeros(2, np.float16)
    p.grad = minamp.ones(2, dtype=float16)
    extra["a"][1].add(3)
    extra["a"].append(4)
    del extra["b"]
    before.restore()
    assert p._data is array and p.tolist() == [1.0, 2.0] and p.grad is None and p._node is node
    assert node.dtype == np.float32 and not node.hooks
    assert extra["a"] == [1, {2}] and extra["b"] is p


def test_an_optimizer_class_of_the_users_own_is_listened_to_and_left_as_it_was():
    class Base:
        def step(self):
            for p in self.parameters:
                p._data -= 0.1 * p.grad._data

    class Own(Base):
        def __init__(self, parameters):
            self.parameters = list(parameters)

        def zero_grad(self):
            for p in self.parameters:
                p.grad = None

    t = Trainer()
    t.optimizer = Own(t.model.parameters())
    step, zero_grad = Base.step, Own.zero_grad
    patient = Patient(t.step, t.model, t.optimizer, None)
    calls = Calls(Trace(), patient)
    with calls:
        t.optimizer.zero_grad()
        t.model(minamp.randn(8, 6)).sum().backward()
        t.optimizer.step()
    assert [c.name for c in calls.trace.calls("optimizer.zero_grad", "backward", "optimizer.step")] == [
        "optimizer.zero_grad",
        "backward",
        "optimizer.step",
    ]
    assert Base.step is step and Own.zero_grad is zero_grad and "step" not in vars(Own)
    assert listeners == []


def test_report_as_text_and_as_data():
    finding = Finding(
        "loss_in_half",
        "error",
        "The loss is half.",
        "a.py:3 in f: x",
        "loss.float()",
        {"loss": 2.0**16, "g": np.inf},
    )
    report = Report([finding], Advice("Use it.", {"share": 0.5, "top": float("nan")}), 4, "ValueError: no")
    text = str(report)
    for part in (
        "1 finding in 4 runs",
        "error: loss_in_half",
        "a.py:3",
        "65536 (2^16)",
        "loss.float()",
        "Use it.",
        "ValueError: no",
    ):
        assert part in text
    data = report.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["findings"][0]["evidence"] == {"loss": 65536.0, "g": "inf"}
    assert data["advice"]["numbers"] == {"share": 0.5, "top": "nan"} and data["steps"] == 4
    assert "nothing wrong" in str(Report([], Advice(""), 4)) and report[0] is finding and len(report) == 1


def test_advice_has_its_numbers_from_the_float32_run():
    t = Trainer()
    numbers = examine(t).advice.numbers
    assert numbers["parameters"] == 6 * 16 + 16 + 32 + 16 * 3 + 3
    assert 0 < numbers["largest_gradient"] < 10  # not a thousand times that: the scale is taken out
    assert (
        numbers["init_scale"] <= numbers["ceiling"]
        and numbers["ceiling"] * numbers["largest_gradient"] <= 65504 / 2
    )
    assert 0 <= numbers["flushed_at_init_scale"] <= numbers["flushed_unscaled"] <= 1


@pytest.mark.parametrize("fails", [False, True])
def test_the_scale_of_every_backward_is_taken_out_of_its_gradients(fails):
    head, x = nn.Linear(8, 4), minamp.randn(16, 8)
    optimizer, scaler = (
        optim.SGD(head.parameters(), lr=0.0),
        GradScaler(init_scale=2.0**12, growth_interval=1),
    )
    allowed = minamp.tensor([True, True, True, False])

    def step():
        optimizer.zero_grad()
        with autocast():
            z = head(x)
            # in float16 that raises: only the float32 run goes on
            z = z.masked_fill(~allowed, -1e9) if fails else z
        z = z[:, :3].float()
        scaler.scale((z * z).mean()).backward()
        if not fails:  # a second one, scaled by hand
            ((head(x)[:, :3] ** 2).mean() * 64.0).backward()
        scaler.step(optimizer)
        scaler.update()

    report = minamp.doctor(step, head, optimizer, scaler)
    assert fails == (report[:1] != [] and report[0].code == "mask_overflows")
    z = head(x)[:, :3]
    true = minamp.autograd.grad((z * z).mean(), [z, *head.parameters()])
    largest_of_one = max(abs(d.numpy()).max() for d in true)
    assert report.advice.numbers["largest_gradient"] == pytest.approx(largest_of_one, rel=1e-3)


@pytest.mark.parametrize("covered", [True, False])
def test_gradients_between_float32_tensors_are_no_matter_of_float16s_range(covered):
    """Those of a sum are 1 and those of what half has made here a millionth of it."""
    minamp.manual_seed(0)
    model, x = parts.mlp(8, 16, 4), minamp.randn(32, 8)
    optimizer, scaler = optim.SGD(model.parameters(), lr=0.0), GradScaler(init_scale=1.0)

    def step():
        optimizer.zero_grad()
        with autocast(enabled=covered):
            z = model(x)
        scaler.scale((z.float() * 1e-6).abs().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    numbers = minamp.doctor(step, model, optimizer, scaler).advice.numbers
    if not covered:  # nothing is half: the advice is for a step in which all would be
        assert numbers["largest_gradient"] == pytest.approx(1.0)
        return
    assert 0 < numbers["largest_gradient"] < 1e-4 and not numbers["bfloat16_would_do"]
    skipped = []
    for factor in (1.0, 8.0):  # the ceiling leaves room for a factor of 2 to 4
        scaler.load_state_dict({**scaler.state_dict(), "scale": factor * numbers["ceiling"]})
        step()
        skipped.append(scaler.get_scale() < factor * numbers["ceiling"])
    assert skipped == [False, True]


def test_weights_at_which_nothing_arrives_are_named():
    minamp.manual_seed(0)
    model, x = parts.mlp(8, 16, 4), minamp.randn(32, 8)

    def step():
        model.zero_grad()
        with autocast():
            z = model(x)
        (1e-9 * z.float().square().mean()).backward()

    found = minamp.doctor(step, model)[0]
    assert found.code == "gradients_flushed" and found.evidence["flushed_there"] == 1.0
    assert "and nothing arrives at 0.weight, 2.weight." in found.what
    step()
    assert all((p.grad == 0).all() for p in model.parameters())


def counted_exponents(x, shift):
    counts = np.zeros(HIGH - LOW)
    advice._count_exponents(counts, x, shift)
    return counts


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, minamp.bfloat16])
@pytest.mark.parametrize("shift", [0, -16, 3])
def test_gradients_are_counted_by_their_power_of_two(dtype, shift):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(3000) * 10 ** rng.uniform(-3, 3, 3000)
    x[rng.permutation(3000)[:300]] = [0.0] * 200 + [np.inf] * 50 + [np.nan] * 50
    x = x.astype(dtype).reshape(30, 100).T
    with np.errstate(invalid="ignore"):
        exponents = np.frexp(x.astype(np.float64))[1] - 1 + shift
    expected = collections.Counter(exponents[np.isfinite(x) & (x != 0)].tolist())
    counts = counted_exponents(x, shift)
    assert {LOW + i: int(counts[i]) for i in np.flatnonzero(counts)} == expected


def test_the_smallest_gradients_are_counted_whatever_the_scale():
    tiny = np.float32([1e-45, -1e-40, 2.0**-126, 0.0])
    for shift in (0.0, -1000.0, 1000.0):  # beyond any float32 scale: at the ends
        assert counted_exponents(tiny, shift).sum() == 3
    assert counted_exponents(np.full(200_000, 0.5, np.float32), 0)[-1 - LOW] == pytest.approx(
        200_000, rel=0.01
    )


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e30, np.inf, np.nan])
def test_a_loss_times_any_number_is_looked_at_to_the_end(factor):
    model, x = nn.Linear(8, 3), minamp.randn(16, 8)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        (model(x).sum() * factor).backward()
        optimizer.step()

    report = minamp.doctor(step, model, optimizer)
    assert "parameters" in report.advice.numbers  # the float32 run came to its end


def test_every_code_has_one_rule():
    assert list(RULES) != [] and set(RULES) == set(CODES) and len(CODES) == 27


@pytest.mark.parametrize("dtype", [float16, minamp.bfloat16])
def test_halves_compared_by_bits_are_compared_by_value(dtype):
    a = np.arange(65536).astype(np.uint16).view(dtype)
    rng = np.random.default_rng(0)
    for b in (a, -a, rng.permutation(a), np.where(rng.random(65536) < 0.5, a, dtype.type(-0.0))):
        x, y = (h.astype(dtype).reshape(256, 256).T for h in (a, b))
        with np.errstate(invalid="ignore"):
            assert (alike(x, y) == (x == y)).all()
            assert ((magnitudes(x) == 0) == (x == 0)).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, minamp.bfloat16])
def test_largest_magnitude_by_bits(dtype):
    x = np.array([[1.5, -3.0], [0.0, -0.25]]).astype(dtype)
    assert largest(x) == largest(x.T) == 3.0 and largest(x[:0]) == 0.0
    x[1, 0] = -np.inf
    assert largest(x) == np.inf
    x[0, 0] = np.nan
    assert np.isnan(largest(x))


@pytest.mark.parametrize(
    "argument, value, text",
    [
        ("step", 3, "doctor: step must be callable without arguments, got int: put one training step"),
        ("model", [1], "doctor: model must be a Module or a list of Modules, got int: give model=model"),
        (
            "optimizer",
            "SGD",
            "doctor: optimizer must be an Optimizer or a list of them, got str: give optimizer=optimizer",
        ),
        ("scaler", 2.0, "doctor: scaler must be a GradScaler or None, got float: give scaler=scaler"),
        ("scaler", [], "got list: give scaler=scaler; of several any one, the step leads to the others"),
    ],
)
def test_arguments_of_the_wrong_kind(argument, value, text):
    t = Trainer()
    arguments = dict(step=t.step, model=t.model, optimizer=t.optimizer, scaler=t.scaler) | {argument: value}
    with pytest.raises(TypeError) as raised:
        minamp.doctor(**arguments)
    assert text in str(raised.value) and t.count == 0


def test_a_step_that_calls_the_doctor_is_refused():
    """It used to call itself without end: each level twice."""
    t = Trainer()
    state = t.state()

    def step():
        t.step()
        return minamp.doctor(step, t.model, t.optimizer, t.scaler)

    with pytest.raises(RuntimeError, match="called by a step that the doctor is examining"):
        step()
    t = Trainer()
    with pytest.raises(RuntimeError, match="called by a step that the doctor is examining"):
        minamp.doctor(step)
    assert examine(Trainer()) == [] and not listeners and t.state() == state


def test_what_another_thread_observes_goes_on():
    """Its observers come and go while the doctor looks, and are none of those that it puts back."""
    entered, leave = threading.Event(), threading.Event()
    seen = []

    def beside():
        with observe(lambda phase, op, *_: seen.append(op.name)):
            entered.set()
            assert leave.wait(10)
            minamp.ones(2) * 2.0

    other = threading.Thread(target=beside)
    t, own = Trainer(), []

    def step():
        t.step()
        if not own:
            own.append(other.start())
            entered.wait(10)

    minamp.doctor(step, t.model, t.optimizer, t.scaler)
    assert len(observers) == 1
    leave.set()
    other.join()
    assert seen[-1:] == ["mul"] and observers == []


def test_what_can_not_be_written_is_left_alone():
    class Mode(enum.Enum):
        TRAIN, EVAL = "train", 2

    class Flags(enum.Flag):
        AMP, EMA = 1, 2

    @dataclasses.dataclass(frozen=True, slots=True)
    class Options:
        clip: float
        seen: list

    t, options = Trainer(), Options(1.0, [])

    def step():
        t.step()
        options.seen.append((Mode.TRAIN, Flags.AMP | Flags.EMA))

    state = t.state()
    assert minamp.doctor(step, t.model, t.optimizer, t.scaler) == []
    assert t.state() == state and options.seen == []


def test_ctrl_c_while_things_are_put_back():
    x, presses = minamp.zeros(3), iter([True])  # an iterator is not put back

    class Clock:
        """What is put back last but one: Ctrl-C comes there, the first time."""

        __slots__ = ("time",)

        def __setattr__(self, name, value):
            if name in self.__slots__ and value == 1 and hasattr(self, name) and next(presses, False):
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    first, later = Clock(), [1, 2]
    first.time = 1
    before = Snapshot(x=x, first=first, later=later)
    x.fill_(1.0)
    first.time = 2
    later.append(3)
    with pytest.raises(KeyboardInterrupt):
        before.restore()
    assert x.tolist() == [0.0] * 3 and first.time == 1 and later == [1, 2]
