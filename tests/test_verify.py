"""verify_amp: its figures are those of watch, its verdict follows from the numbers, and it leaves no trace."""

import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import standin

import minamp
import minamp.nn.functional as F
from minamp import autocast, nn, optim, verify_amp, watch
from minamp.autocast import state, without_autocast
from minamp.autograd import is_anomaly_enabled, set_detect_anomaly
from minamp.backends import errors
from minamp.draw import generator
from minamp.record import observers
from minamp.restore import restored
from minamp.verify.report import Pair, Report, Seen

ROOT = Path(minamp.__file__).parents[1]


class Loop:
    """A net, its optimizer, its scaler, and one step of the usual loop on the same batch."""

    def __init__(self, *sizes, batch=64, dtype=minamp.float16, norm=False, device="cpu", **options):
        layers = [
            layer
            for a, b in zip(sizes, sizes[1:], strict=False)
            for layer in (
                nn.Linear(a, b),
                *([nn.BatchNorm1d(b), nn.Dropout(0.25)] if norm else ()),
                nn.ReLU(),
            )
        ]
        self.model = nn.Sequential(*layers[:-1]).to(device)
        self.optimizer = optim.Adam(self.model.parameters(), **options)
        self.scaler = minamp.GradScaler(growth_interval=3)
        self.dtype, self.x = dtype, minamp.randn(batch, sizes[0]).to(device)
        self.y = minamp.randint(sizes[-1], (batch,)).to(device)

    def step(self):
        with autocast(dtype=self.dtype):
            loss = F.cross_entropy(self.model(self.x), self.y)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    parts = property(lambda self: {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler})

    def verify(self, rounds=1):
        return verify_amp(self.step, rounds=rounds, **self.parts)


def saved(step):
    with watch.saved_bytes() as kept:
        step()
    return kept.total


# ----------------------------------------------------------------------------------------------------- the three indicators


@pytest.mark.parametrize("dtype", [minamp.float16, minamp.bfloat16])
def test_memory_is_that_of_watch_and_halves_where_activations_are_bound_to(dtype):
    loop = Loop(32, 64, 64, 10, batch=2048, dtype=dtype)
    report = loop.verify()
    loop.step()
    as_it_is = saved(loop.step)
    with without_autocast():
        plain = saved(loop.step)
    assert report.saved_bytes == Pair(as_it_is, plain)
    # by hand: x, the two relu outputs, the log-probabilities in float32, the labels; and half weights of layers 2 and 3
    half, wide = 2048 * (32 + 64 + 64) * 2 + (64 * 64 + 64 * 10) * 2, 2048 * (32 + 64 + 64) * 4
    assert plain - wide == as_it_is - half
    assert report.saved_bytes.ratio <= 0.55
    assert "It pays: backward keeps 0.5" in report.verdict and report.on


def test_memory_of_all_there_is():
    loop = Loop(512, 512, 10, batch=4)
    report = loop.verify()
    values = sum(p.numel() for p in loop.model.parameters())
    assert report.fixed_bytes == 4 * 4 * values  # weights, gradients and Adam's two moments
    assert report.all_bytes.without_amp == report.fixed_bytes + report.saved_bytes.without_amp
    slow = replace(report, step_time=SLOW).verdict  # whatever this machine's clock said
    assert "No gain here, because parameters dominate the memory: they, their gradients" in slow
    assert "the CPU emulates half arithmetic" in slow


def test_dtypes():
    report = Loop(8, 16, 4).verify()
    assert report.parameters == {"float32": {"0.weight": 128, "0.bias": 16, "2.weight": 64, "2.bias": 4}}
    assert report.gradients == report.parameters
    assert report.activations == {
        "float16": {"linear": 2, "relu": 1},
        "float32": {"log_softmax": 1, "nll_loss": 1, "mul": 1},
    }
    assert report.with_amp.products == {"float16": {"linear": 2}}
    assert report.with_amp.passed_back["float16"] == {"linear": 2, "relu": 1}
    assert report.without_amp.activations == {
        "float32": {"linear": 2, "relu": 1, "log_softmax": 1, "nll_loss": 1, "mul": 1}
    }
    # x, two weights and two biases to half, the logits to float32
    assert (report.with_amp.casts, report.without_amp.casts) == (6, 0)
    assert (report.with_amp.covered, report.without_amp.region_ops) == (2, 0)


def test_half_parameters_and_what_is_frozen():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).half()
    model[0].bias.requires_grad = False
    report = verify_amp(
        lambda: model(minamp.randn(4, 8).half()).float().sum().backward(), model=model, rounds=1
    )
    assert list(report.parameters) == ["float16"] and len(report.parameters["float16"]) == 4
    assert set(report.gradients["float16"]) == {"0.weight", "1.weight", "1.bias"}


def test_times_are_positive_and_forward_is_part_of_the_step():
    report = Loop(64, 64, 10).verify(rounds=3)
    for pair in report.forward_time, report.step_time:
        assert pair.with_amp > 0 and pair.without_amp > 0 and pair.ratio > 0
    assert report.overhead > 0 and report.rounds == 3


def test_without_model_and_optimizer():
    loop = Loop(8, 16, 4)
    report = verify_amp(loop.step, rounds=1)
    assert report.on and sorted(report.parameters["float32"].values()) == [4, 16, 64, 128]


def test_on_a_gpu():
    with standin.installed():
        on_gpu = Loop(8, 16, 4, device="cuda").verify()
    on_cpu = Loop(8, 16, 4).verify()
    assert (on_gpu.device, on_cpu.device, on_cpu.peak_bytes) == ("cuda:0", "cpu", None)
    assert on_gpu.saved_bytes == on_cpu.saved_bytes
    assert on_gpu.with_amp.activations == on_cpu.with_amp.activations
    assert "device memory, peak" in str(on_gpu) and "device memory" not in str(on_cpu)
    assert "emulates" not in on_gpu.verdict


# ------------------------------------------------------------------------------------------------------------- the verdict


def test_no_region_at_all():
    loop = Loop(8, 16, 4)
    with without_autocast():
        report = loop.verify()
    assert not report.on
    assert report.verdict == (
        "Mixed precision is not on: no op of the step ran inside an enabled autocast region, so all 2 matmuls and convolutions "
        "ran in float32. Put the forward inside `with minamp.autocast():`."
    )


def test_a_region_around_nothing_that_counts():
    model, x, y = nn.Linear(8, 4), minamp.randn(16, 8), minamp.randint(4, (16,))

    def step():
        z = model(x)
        with autocast():
            loss = F.cross_entropy(z, y)
        loss.backward()

    report = verify_amp(step, model=model, rounds=1)
    assert not report.on and report.with_amp.region_ops > 0
    assert (
        "autocast covers nothing that counts. 2 ops ran inside a region, but all 1 matmuls" in report.verdict
    )


def test_half_already():
    model, x = nn.Linear(8, 4).half(), minamp.randn(16, 8).half()

    def step(enabled):
        with autocast(enabled=enabled):
            z = model(x)
        z.float().sum().backward()

    off = verify_amp(lambda: step(False), model=model, rounds=1)
    assert not off.on and "ran in float16, but outside every enabled autocast region" in off.verdict
    on = verify_amp(lambda: step(True), model=model, rounds=1)
    assert on.on and "No gain here, because without autocast they run in float16 as well" in on.verdict


def numbers(**changes):
    """A report on a GPU where everything pays, with changes."""
    seen = Seen(
        activations={"float16": {"linear": 8}, "float32": {"log_softmax": 2}},
        products={"float16": {"linear": 4}},
        saved_bytes=500,
        casts=9,
        op_calls=60,
        region_ops=20,
        covered=4,
    )
    plain = Seen(
        activations={"float32": {"linear": 10}},
        products={"float32": {"linear": 4}},
        saved_bytes=1000,
        op_calls=40,
    )
    report = Report(
        device="cuda:0",
        rounds=10,
        with_amp=seen,
        without_amp=plain,
        fixed_bytes=100,
        peak_bytes=Pair(700, 1200),
        forward_time=Pair(1e-3, 2e-3),
        step_time=Pair(3e-3, 6e-3),
        overhead=5e-6,
        parameters={"float32": {"0": 10}},
        gradients={"float32": {"0": 10}},
    )
    return replace(report, **changes)


ON = "Mixed precision is on: 4 of 4 matmuls and convolutions ran in float16. "
SLOW = Pair(6.6e-3, 6e-3)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {},
            "It pays: backward keeps 0.50 times the bytes, which makes all memory 0.55 times as much and a step takes 0.50 "
            "times as long.",
        ),
        (
            {"fixed_bytes": 9000},
            "It pays: a step takes 0.50 times as long. But parameters dominate the memory: they, their gradients and the "
            "optimizer's state are 90% of it, and autocast shrinks only what backward keeps (to 0.50).",
        ),
        (
            {"step_time": SLOW},
            "It pays: backward keeps 0.50 times the bytes, which makes all memory 0.55 times as much. But a step takes 1.10 "
            "times as long: 9 casts cost what 4 half matmuls and convolutions win.",
        ),
        (
            {"step_time": SLOW, "overhead": 1e-4, "fixed_bytes": 9000},
            "No gain here, because parameters dominate the memory: they, their gradients and the optimizer's state are 90% of "
            "it, and autocast shrinks only what backward keeps (to 0.50); and a step takes 1.10 times as long: the model is "
            "small, so the step is launch-bound (its 40 ops take 150 us each, an op on a single number 100 us).",
        ),
    ],
)
def test_verdict_from_numbers(changes, words):
    assert numbers(**changes).verdict == ON + words


def test_verdict_where_outputs_stay_float32():
    seen = replace(numbers().with_amp, saved_bytes=980)
    assert (
        "backward keeps 0.98 times the bytes: 2 of 10 op outputs are not half"
        in numbers(with_amp=seen).verdict
    )


def test_verdict_where_nothing_shrinks():
    seen = replace(numbers().with_amp, saved_bytes=1200)
    grown = "backward keeps 1.20 times the bytes: 2 of 10 op outputs are not half, and half copies are kept beside float32 values"
    assert grown in numbers(with_amp=seen, fixed_bytes=1500).verdict  # 60% of all: half of the rest would pay
    text = numbers(with_amp=seen, fixed_bytes=9000).verdict
    assert "autocast shrinks only what backward keeps." in text


def test_verdict_on_the_cpu_names_both_reasons():
    text = numbers(device="cpu", step_time=SLOW, overhead=1e-4).verdict
    assert (
        "the CPU emulates half arithmetic (it widens to float32, computes and rounds), so time cannot" in text
    )
    assert "the step is dispatch-bound" in text


def test_a_machine_that_is_busy_every_other_step_makes_no_difference():
    loop, busy = Loop(8, 16, 4), itertools.cycle([True, False])

    def step():
        loop.step()
        if next(busy):
            time.sleep(0.02)

    ratio = minamp.verify_amp(
        step, model=loop.model, optimizer=loop.optimizer, scaler=loop.scaler
    ).step_time.ratio
    assert 0.2 < ratio < 5  # with every 20 ms on one side it is more than 10


# ------------------------------------------------------------------------------------------------------- it leaves no trace


def everything(loop):
    """All state as bytes."""
    tensors = [*loop.model.parameters(), *loop.model.buffers()]
    tensors += [p.grad for p in loop.model.parameters() if p.grad is not None]
    optimizer = [
        v.detach().numpy().tobytes() if isinstance(v, minamp.Tensor) else v
        for p in loop.model.parameters()
        for v in loop.optimizer.state.get(p, {}).values()
    ]
    return (
        [t.detach().numpy().tobytes() for t in tensors],
        optimizer,
        loop.scaler.state_dict(),
        minamp.get_rng_state(),
        state.allowed,
        state.cache,
        list(observers),
    )


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}])
def test_the_next_step_is_bit_identical(steps_before, options):
    def trained(verified):
        minamp.manual_seed(3)
        loop = Loop(8, 16, 4, norm=True, **options)
        if options:
            loop.model.half()
            loop.x = loop.x.half()
        for _ in range(steps_before):
            loop.step()
        before = everything(loop)
        if verified:
            loop.verify(rounds=2)
            assert everything(loop) == before
        return [loop.step() for _ in range(4)], everything(loop)

    assert trained(True) == trained(False)


@pytest.mark.parametrize("write_back", ["stochastic", "kahan"])
def test_half_weights_and_their_extra_digits_come_back(write_back):
    def trained(verified):
        minamp.manual_seed(3)
        model = nn.Linear(8, 4).to(minamp.bfloat16)
        optimizer = optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, write_back=write_back)
        x = minamp.randn(16, 8).bfloat16()

        def step():
            optimizer.zero_grad()
            with autocast(dtype=minamp.bfloat16):
                z = model(x)
            (z.float() ** 2).sum().backward()
            optimizer.step()

        step()
        if verified:
            verify_amp(step, model=model, optimizer=optimizer, rounds=1)
        for _ in range(5):
            step()
        return [p.detach().numpy().tobytes() for p in model.parameters()]

    assert trained(True) == trained(False)


def test_a_graph_recorded_before_can_still_be_walked():
    loop = Loop(8, 16, 4)
    expected = F.cross_entropy(loop.model(loop.x), loop.y)
    loss = F.cross_entropy(loop.model(loop.x), loop.y)
    expected.backward()
    expected = [p.grad.numpy().copy() for p in loop.model.parameters()]
    loop.model.zero_grad()
    loop.verify()
    loss.backward()  # the versions of the weights it saved are the old ones, too
    assert all(
        np.array_equal(a, p.grad.numpy()) for a, p in zip(expected, loop.model.parameters(), strict=True)
    )


def test_no_half_copy_of_a_tried_out_weight_stays():
    loop = Loop(8, 4)
    weight = loop.model[0].weight
    with autocast(), minamp.no_grad():
        for writes in range(1, 9):  # one of them gives the version that the last step meanwhile gave
            with minamp.enable_grad():
                loop.verify()
            assert minamp.is_autocast_enabled()
            for _ in range(writes):
                weight.fill_(float(writes))
            assert (F.linear(minamp.ones(1, 8), weight).numpy() == 8 * writes).all()


def test_master_weights_stay_tied_to_their_weights():
    loop = Loop(8, 4, master_weights=True)
    loop.model.half()
    loop.x = loop.x.half()
    loop.step()
    before = [(p._version[0], dict(p.__dict__), p.master.seen) for p in loop.model.parameters()]
    loop.verify()
    assert [(p._version[0], dict(p.__dict__), p.master.seen) for p in loop.model.parameters()] == before


def test_the_scale_is_harmless_meanwhile():
    loop, calls = Loop(8, 4), itertools.count()

    def step():
        scale = loop.scaler.get_scale()
        # growth_interval is 3, so it grows in these six steps, but from 1
        assert scale <= 4.0 and (next(calls) > 0 or scale == 1.0)
        loop.step()

    verify_amp(step, rounds=1, **loop.parts)
    assert next(calls) == 6 and loop.scaler.get_scale() == 65536.0


def test_an_error_in_the_step_passes_and_everything_is_put_back():
    loop, calls = Loop(8, 16, 4), itertools.count(1)

    def step():
        loop.step()
        if next(calls) == 4:
            raise ZeroDivisionError

    before = everything(loop)
    with pytest.raises(ZeroDivisionError):
        verify_amp(step, rounds=5, **loop.parts)
    assert next(calls) == 5 and everything(loop) == before


def test_what_is_not_handed_over_comes_back_too():
    loop, losses = Loop(8, 4), []
    average = [p.detach().clone() for p in loop.model.parameters()]

    def step():
        losses.append(loop.step())
        for a, p in zip(average, loop.model.parameters(), strict=True):
            a.mul_(0.9).add_(p.detach() * 0.1)

    before = everything(loop), [a.tolist() for a in average]
    verify_amp(step, rounds=1)
    assert (everything(loop), [a.tolist() for a in average]) == before and losses == []


def test_options_and_groups_come_back():
    loop = Loop(8, 4)
    with restored(optimizer=loop.optimizer):
        loop.optimizer.param_groups[0]["lr"] = 7.0
        loop.optimizer.add_param_group({"params": [minamp.zeros(2, requires_grad=True)]})
    assert [g["lr"] for g in loop.optimizer.param_groups] == [1e-3]


def test_a_step_that_seeds_leaves_the_generator_that_was_there():
    loop = Loop(8, 4)

    def step():
        minamp.manual_seed(7)
        loop.step()

    minamp.manual_seed(3)
    expected = minamp.rand(3).tolist()
    for look in (lambda: verify_amp(step, rounds=1, **loop.parts), lambda: minamp.doctor(step, **loop.parts)):
        held = minamp.manual_seed(3)
        look()
        assert generator() is held and minamp.rand(3).tolist() == expected


def test_switches_that_a_block_leaves_on_are_off_again():
    with restored():
        minamp.debug(sync=True)
        set_detect_anomaly(True)
    assert not errors.checking and not is_anomaly_enabled() and observers == []
    minamp.debug(sync=False)
    set_detect_anomaly(True)
    try:
        with restored():
            set_detect_anomaly(False)
            minamp.debug(sync=True)
        assert is_anomaly_enabled() and len(observers) == 1 and not errors.checking
    finally:
        set_detect_anomaly(False)
    assert observers == []


def test_an_observer_that_a_block_leaves_behind_goes():
    with restored():
        watch.first_bad_op().__enter__()
    assert observers == []


def test_without_autocast_switches_every_kind_of_region_off():
    a = minamp.randn(4, 4)

    @autocast()
    def decorated():
        return (a @ a).dtype

    with autocast(), without_autocast():
        assert (a @ a).dtype == minamp.float32 and decorated() == minamp.float32
        minamp.set_autocast_enabled(True)
        assert not minamp.is_autocast_enabled()
        with autocast():
            assert not minamp.is_autocast_enabled()
    assert decorated() == minamp.float16 and not minamp.is_autocast_enabled()


# ------------------------------------------------------------------------------------------------------ errors and printing


def test_errors():
    loop = Loop(8, 4)
    with pytest.raises(
        TypeError, match="step must be a function that does one training step, got float: write `def step"
    ):
        verify_amp(loop.step())
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        verify_amp(loop.step, rounds=0)
    for rounds in "a", 1.5:
        with pytest.raises(TypeError, match=f"rounds must be a whole number, got {rounds!r}: give rounds=10"):
            verify_amp(loop.step, rounds=rounds)
    assert json.loads(verify_amp(loop.step, rounds=np.int64(1)).to_json())["rounds"] == 1
    for name, kind, wrong in (
        ("model", "Module", loop.optimizer),
        ("optimizer", "Optimizer", [loop.optimizer]),
        ("scaler", "GradScaler", 3),
    ):
        given = f"{name} must be one {kind} or None, got {type(wrong).__name__}: give {name}={name}"
        with pytest.raises(TypeError, match=given):
            verify_amp(loop.step, **{name: wrong})
    with pytest.raises(
        RuntimeError, match=r"step ran no backward\(\) that reached a parameter: give a function"
    ):
        verify_amp(lambda: loop.model(loop.x))
    loop = Loop(8, 4, master_weights=True)
    loop.model.half()
    with pytest.raises(
        RuntimeError,
        match="with autocast switched off the step fails, .* linear: tensors of different dtypes",
    ):
        loop.verify()
    assert state.allowed


def test_json_holds_every_number():
    report = numbers()
    text = json.loads(report.to_json())
    assert text.pop("on") is True and text.pop("verdict") == report.verdict
    text["with_amp"], text["without_amp"] = Seen(**text["with_amp"]), Seen(**text["without_amp"])
    for name in "peak_bytes", "forward_time", "step_time":
        text[name] = Pair(**text[name])
    assert Report(**text) == report


@pytest.mark.parametrize("columns", ["80", "100"])
def test_the_table_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    lines = str(Loop(8, 16, 4).verify()).splitlines()
    assert max(map(len, lines)) <= int(columns)
    text = "\n".join(lines)
    for row in "kept for backward", "whole step", "3 float16, 3 float32", "gradients of parameters":
        assert row in text


def test_the_table_is_text_in_jupyter_too(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "kept for backward" in str(Loop(8, 16, 4).verify())


@pytest.mark.parametrize(
    "figure, text",
    [(0, "0.00 B"), (999.6, "1.00 kB"), (6460000, "6.46 MB"), (54, "54.0 B"), (123456, "123 kB")],
)
def test_figures_have_three_digits(figure, text):
    from minamp.verify.report import _bytes

    assert _bytes(figure) == text


# ------------------------------------------------------------------------------------------------------------- the command

SCRIPT = """
import minamp
from minamp import nn, optim
from helper import batch

model = nn.Linear(8, 4)
optimizer = optim.SGD(model.parameters(), lr=0.1)

def step():
    optimizer.zero_grad()
    with minamp.autocast(dtype=minamp.bfloat16):
        y = model(batch())
    y.float().sum().backward()
    optimizer.step()

def plain():
    model(batch()).sum().backward()

if __name__ == "__main__":
    raise SystemExit("trained")
"""


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "minamp.verify", *map(str, args)], capture_output=True, text=True, cwd=ROOT
    )


def test_command_on_a_script(tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("import minamp\n\ndef batch():\n    return minamp.randn(4, 8)\n")
    done = command(script, "--rounds", 1, "--json", out)
    assert done.returncode == 0, done.stderr
    assert "Mixed precision is on: 1 of 1 matmuls and convolutions ran in bfloat16" in done.stdout.replace(
        "\n", " "
    )
    assert json.loads(out.read_text())[str(script)]["parameters"] == {"float32": {"weight": 32, "bias": 4}}
    assert "Mixed precision is not on" in command(f"{script}:plain", "--rounds", 1).stdout
    missing = command(f"{script}:nothing")
    assert missing.returncode == 1 and "defines no function 'nothing': define one" in missing.stderr
    assert "there is no file 'nowhere.py': give FILE.py or FILE.py:function" in command("nowhere.py").stderr


def test_command_on_the_examples():
    done = command("--rounds", 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Mixed precision is on: ") == 4
    for name in "MLP on the digits, float16", "CNN on the digits, bfloat16":
        assert name in done.stdout
