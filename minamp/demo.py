"""python -m minamp.demo: three networks fail in half precision, and each gets its cure.

ARMS below is the whole experiment; `training_step` is the loop a user writes; `train` runs it and measures. The acts only
choose what to tell, and every number they print was measured a moment before.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import minamp
import minamp.nn.functional as F
from minamp import demo_figures as figures
from minamp import nn, optim, watch
from minamp.data import DataLoader, digits
from minamp.demo_figures import percent, replacing, save_figure
from minamp.formats import format_of

# ---------------------------------------------------------------------------------------------------------- the networks


def mlp():
    """784-128-128-10 with ReLU and He's initial weights."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    return model.apply(he_normal)


def he_normal(module):
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)


def deep_mlp():
    """Seven hidden layers of 192, all weights from N(0, 0.01): AlexNet's initial values, small for a net this deep."""
    sizes = [784] + [192] * 7
    hidden = [m for a, b in zip(sizes, sizes[1:], strict=False) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(192, 10)).apply(small_normal)


def small_normal(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)


def cnn():
    """Two convolutions, two linear layers, torch's default initial weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def textbook_cross_entropy(scores, target):
    """exp, divide by the sum, logarithm: right on paper. F.cross_entropy subtracts the largest score first."""
    e = scores.exp()
    p = e / e.sum(1, keepdim=True)
    return -minamp.gather(p, 1, target.reshape(-1, 1)).log().mean()


# ----------------------------------------------------------------------------------------------------------- the experiment


@dataclass(frozen=True)
class Arm:
    """One training run. weights: the format that weights, data and so everything outside autocast is stored in."""

    name: str
    network: Callable
    optimizer: Callable
    loss: Callable = F.cross_entropy
    weights: np.dtype = minamp.float32
    autocast: np.dtype | None = None
    scaler: dict | None = None  # options of GradScaler
    decay: bool = False  # the learning rate falls linearly to 0
    post_mortem: bool = False  # look for the first op that turns finite values into inf or NaN
    count_lost: bool = False  # count the updates that change no weight


def sgd(lr, **options):
    return lambda params: optim.SGD(params, lr=lr, momentum=0.9, **options)


def adam(lr):
    return lambda params: optim.Adam(params, lr=lr)


half, bf16 = minamp.float16, minamp.bfloat16
ARMS = {
    1: [
        Arm("float32", mlp, sgd(0.05), textbook_cross_entropy),
        Arm("float16 everywhere", mlp, sgd(0.05), textbook_cross_entropy, weights=half, post_mortem=True),
        Arm("autocast", mlp, sgd(0.05), textbook_cross_entropy, autocast=half),
    ],
    2: [
        Arm("float32", mlp, sgd(1e-4), count_lost=True),
        Arm("float16 weights", mlp, sgd(1e-4), weights=half, count_lost=True),
        Arm("float16 + masters", mlp, sgd(1e-4, master_weights=True), weights=half, count_lost=True),
    ],
    3: [
        Arm("float32", deep_mlp, adam(1e-3)),
        Arm("autocast", deep_mlp, adam(1e-3), autocast=half),
        Arm("autocast + GradScaler", deep_mlp, adam(1e-3), autocast=half, scaler={}),
    ],
    4: [
        Arm("float32", cnn, adam(2e-3), decay=True),
        Arm("float16 recipe", cnn, adam(2e-3), decay=True, autocast=half, scaler={"growth_interval": 25}),
        Arm("bfloat16", cnn, adam(2e-3), decay=True, autocast=bf16),
    ],
}
TITLES = {1: "NaN collapse", 2: "Silent stall", 3: "Underflow", 4: "The full recipe"}
BATCH, EPOCH = 64, 62  # 62 full batches of 64 in the 4,000 training digits
STEPS = {1: 3 * EPOCH, 2: 7 * EPOCH, 3: 5 * EPOCH, 4: 4 * EPOCH}
QUICK = {1: EPOCH, 2: 3 * EPOCH, 3: 2 * EPOCH, 4: 2 * EPOCH}
PLATEAU = 2.2  # guessing among ten digits has a loss of log 10 = 2.303


@dataclass
class Run:
    """What `train` measured. Steps count from 1."""

    name: str
    losses: list = field(default_factory=list)
    nan_step: int | None = None
    first_bad_op: str | None = None  # the post-mortem in a line
    bad_op: str | None = None  # the op's name
    largest_input: float | None = None  # the value that the first bad op was given
    nan_gradients: float | None = None  # share of the weight gradients at the NaN step
    accuracy: float | None = None  # on the 1,000 test digits; None if the network answers NaN
    left_plateau: int | None = None  # first step with a loss below PLATEAU
    lost_updates: float | None = None  # share of the non-zero updates that changed no weight
    flushed: float | None = None  # share of the non-zero weight gradients that are 0 in the first backward
    skips: list = field(default_factory=list)
    scales: list = field(default_factory=list)
    saved_bytes: int = 0
    seconds: float = 0.0
    step_ms: float = 0.0

    @property
    def score(self):
        return self.accuracy or 0.0


def training_step(arm, model, optimizer, scaler, x, y):
    """One step of mixed-precision training. Returns the loss and whether the weights were updated."""
    with minamp.autocast(dtype=arm.autocast or half, enabled=arm.autocast is not None):
        loss = arm.loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    updated = scaler.step(optimizer)  # None: a gradient was inf or NaN, the step was skipped
    scaler.update()
    return loss.item(), updated is not None


def train(arm, data, steps, seed=0, device="cpu", advance=lambda: None):
    """Train `arm` for `steps` batches of data (what digits() returns) and measure it; calls advance() after every step."""
    train_set, test_set = data
    minamp.manual_seed(seed)
    model = arm.network().to(device, arm.weights)
    optimizer = arm.optimizer(model.parameters())
    scaler = minamp.GradScaler(device, enabled=arm.scaler is not None, **(arm.scaler or {}))
    batches = endless(DataLoader(train_set, BATCH, shuffle=True, seed=seed, drop_last=True))
    run, times, lost, updates = Run(arm.name), [], 0, 0
    start = time.perf_counter()
    for step in range(1, steps + 1):
        x, y = next(batches)
        x, y = x.to(device, arm.weights), y.to(device)
        for group in optimizer.param_groups if arm.decay else ():
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - (step - 1) / steps)
        before = [numpy(w).copy() for w in optimizer.master_params()] if arm.count_lost else None
        tick = time.perf_counter()
        with contextlib.ExitStack() as stack:
            bad = stack.enter_context(watch.first_bad_op()) if arm.post_mortem and not run.nan_step else None
            kept = stack.enter_context(watch.saved_bytes()) if step == 1 else None
            loss, updated = training_step(arm, model, optimizer, scaler, x, y)
        times.append(time.perf_counter() - tick)
        run.losses.append(loss)
        run.scales.append(scaler.get_scale())
        if kept:
            run.saved_bytes = kept.total
        if not updated:
            run.skips.append(step)
        if before:  # master_params: where updates add up, the float32 masters or else the weights themselves
            for p, w, b in zip(model.parameters(), optimizer.master_params(), before, strict=True):
                moving = numpy(optimizer.state[p]["momentum_buffer"]) != 0
                updates, lost = updates + moving.sum(), lost + (moving & (numpy(w) == b)).sum()
        if run.left_plateau is None and loss < PLATEAU:
            run.left_plateau = step
        if run.nan_step is None and not np.isfinite(loss):
            run.nan_step, gradients = (
                step,
                np.concatenate([numpy(p.grad).ravel() for p in model.parameters()]),
            )
            run.nan_gradients = float(np.isnan(gradients).mean())
            if bad and bad.found:
                run.first_bad_op, run.bad_op, run.largest_input = str(bad), bad.found.op, bad.found.value
        advance()
    run.seconds, run.step_ms = time.perf_counter() - start, 1e3 * statistics.median(times)
    run.lost_updates = float(lost / updates) if updates else None
    run.accuracy = accuracy(arm, model, test_set, device)
    return run


def endless(loader):
    while True:
        yield from loader


def numpy(tensor):
    return tensor.detach().cpu().numpy()


def accuracy(arm, model, test_set, device):
    x, y = minamp.tensor(test_set.images).to(device, arm.weights), test_set.labels
    with minamp.no_grad(), minamp.autocast(dtype=arm.autocast or half, enabled=arm.autocast is not None):
        scores = numpy(model(x).float())
    return float((scores.argmax(1) == y).mean()) if np.isfinite(scores).all() else None


def first_gradients(arm, train_set, scale, seed=0, device="cpu"):
    """The gradients of the first batch, with the loss multiplied by `scale`: (histograms, all weight gradients)."""
    minamp.manual_seed(seed)
    model = arm.network().to(device, arm.weights)
    x, y = next(iter(DataLoader(train_set, BATCH, shuffle=True, seed=seed)))
    with minamp.autocast(dtype=arm.autocast or half, enabled=arm.autocast is not None):
        loss = arm.loss(model(x.to(device)), y.to(device))
    with watch.gradient_histograms(low=-56, high=20) as seen:
        (loss * scale).backward()
    return seen, np.concatenate([numpy(p.grad).ravel() for p in model.parameters()])


# ------------------------------------------------------------------------------------------------------------- telling it


@dataclass
class Stage:
    """Where an act speaks, what it may spend, and what it found."""

    console: object
    seed: int
    device: str
    quick: bool
    figures: Path
    data: tuple = field(default_factory=digits)  # training and test digits
    runs: dict = field(default_factory=dict)  # act -> [Run]
    claims: list = field(default_factory=list)  # (act, sentence, whether it was measured to be so)

    def train(self, act):
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        steps = (QUICK if self.quick else STEPS)[act]
        columns = (
            TextColumn("  {task.description:<22}"),
            BarColumn(),
            TextColumn("step {task.completed}/{task.total}"),
        )
        with Progress(
            *columns,
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        ) as bar:
            tasks = [bar.add_task(arm.name, total=steps) for arm in ARMS[act]]
            self.runs[act] = [
                train(arm, self.data, steps, self.seed, self.device, lambda task=task: bar.advance(task))
                for arm, task in zip(ARMS[act], tasks, strict=True)
            ]
        return self.runs[act]

    def title(self, act):
        self.console.rule(f"[bold]{f'Act {act}: ' if act < 4 else ''}{TITLES[act]}", align="left")

    def say(self, text=""):
        from rich.padding import Padding

        self.console.print(Padding(text, (0, 2, 0, 2), expand=False) if text else "", highlight=False)

    def arm(self, name, text):
        self.console.print(f"    [bold]{name:<22}[/bold]{text}", highlight=False)

    def claim(self, act, sentence, ok):
        self.claims.append((act, sentence, bool(ok)))
        mark = "[bold green]  yes[/]" if ok else "[bold red]  NO [/]"
        self.console.print(f"{mark}  {sentence}", highlight=False)

    def draw(self, name, paint, height):
        path = self.figures / name
        save_figure(path, paint, height)
        self.say(f"Figure: {path}")


def outcome(run):
    if run.nan_step:
        return f"loss is NaN from step {run.nan_step} on"
    return f"loss {run.losses[0]:.2f} -> {tail(run):.2f}, {graded(run)}"


def graded(run):
    return "the network answers NaN" if run.accuracy is None else f"test accuracy {run.accuracy:.3f}"


def tail(run):
    """The loss at the end: the mean of the last 20 steps."""
    return float(np.mean(run.losses[-20:]))


def act1(stage):
    stage.title(1)
    stage.say(
        "A network of three layers learns to read 5,000 real digits: SGD with momentum, learning rate 0.05. Its loss is "
        "the textbook formula: exp of every score, divided by their sum, then the logarithm. "
        "First in float32, then the same code with everything in float16."
    )
    full, broken, cured = stage.train(1)
    stage.arm(full.name, outcome(full))
    stage.arm(broken.name, outcome(broken))
    if broken.bad_op:
        before = broken.losses[broken.nan_step - 2]
        later = sum(not np.isfinite(loss) for loss in broken.losses[broken.nan_step :])
        stage.say()
        stage.say(
            f"The post-mortem. Until then training went well: the loss went from {broken.losses[0]:.2f} to {before:.2f} in "
            f"{broken.nan_step - 1} steps. The first operation that turned finite numbers into infinite ones:"
        )
        stage.say(f"[bold]{broken.first_bad_op}[/bold].")
        stage.say(
            "The surer a network gets, the larger its scores. One infinity is enough: inf / inf is NaN, the loss averages it "
            f"in, and {percent(broken.nan_gradients)} of the weight gradients were NaN after that one backward. Of the "
            f"{len(broken.losses) - broken.nan_step} later steps {later} gave NaN: nothing repairs a NaN weight."
        )
    stage.say()
    limit = watch.exp_limit("float32")
    stage.say(
        "The cure is the cast policy: weights in float32, and the same code inside `with minamp.autocast():`. It computes "
        f"matrix products in float16, but exp, sum and log in float32, where exp overflows only above {limit:.2f}."
    )
    stage.arm(cured.name, outcome(cured))
    stage.say()
    stage.claim(
        1,
        "float16 everywhere collapsed to NaN within the first pass over the data",
        0 < (broken.nan_step or 0) <= EPOCH,
    )
    good = full.nan_step is None and full.score >= 0.8
    stage.claim(1, "float32 trained (test accuracy at least 0.8)", good)
    good = good and cured.nan_step is None and cured.score >= full.score - 0.03
    stage.claim(1, "autocast trained, at most 0.03 below float32 in accuracy", good)
    stage.draw("collapse.png", lambda figure: figures.collapse(figure, full, broken, cured, 2 * EPOCH), 4.5)


def act2(stage):
    stage.title(2)
    stage.say(
        "No NaN this time, nothing to see in a log. The same network with the stable loss F.cross_entropy, a small learning "
        "rate (0.0001), and the weights stored in float16."
    )
    full, broken, cured = stage.train(2)
    for run in full, broken:
        stage.arm(run.name, f"{outcome(run)}, {percent(run.lost_updates)} of the updates lost")
    stage.say()
    w = 0.1
    step = format_of("float16").eps * 2.0 ** np.floor(np.log2(w))
    stage.say(
        f"float16 has 11 significant bits. Near {w} its numbers are {step:.1e} apart, and an update smaller than half of that "
        f"rounds back to the old weight. {percent(broken.lost_updates)} of the non-zero updates changed nothing."
    )
    stage.say()
    stage.say(
        "The cure: master weights. The optimizer keeps a float32 copy in which small updates add up, and rounds it to float16 "
        "for the forward pass: optim.SGD(..., master_weights=True)."
    )
    stage.arm(cured.name, f"{outcome(cured)}, {percent(cured.lost_updates)} of the updates lost")
    stage.say()
    gap = full.score - broken.score
    stage.claim(
        2, f"float16 weights learned less: {gap:.3f} below float32 in accuracy (at least 0.03)", gap >= 0.03
    )
    stage.claim(2, "more than half of their updates were lost", broken.lost_updates > 0.5)
    near = abs(cured.score - full.score) <= 0.02 and abs(tail(cured) - tail(full)) <= 0.05
    stage.claim(
        2, "with master weights the result is float32's (accuracy within 0.02, loss within 0.05)", near
    )


def act3(stage):
    stage.title(3)
    stage.say(
        "A deep network: seven hidden layers, small initial weights, Adam. Weights are float32 and the forward pass runs under "
        "autocast, so the cures of acts 1 and 2 are in place. But every layer shrinks the gradients on their way back."
    )
    runs = full, broken, cured = stage.train(3)
    found = cured.scales[-1]
    looks = [(arm, scale) for arm, scale in zip(ARMS[3], (1.0, 1.0, found), strict=True)]
    (seen, exact), (_, unscaled), (_, scaled) = [
        first_gradients(a, stage.data[0], s, stage.seed, stage.device) for a, s in looks
    ]
    for run, gradients in zip(runs, (exact, unscaled, scaled), strict=True):
        run.flushed = float(((gradients == 0) & (exact != 0)).sum() / (exact != 0).sum())
    for run in full, broken:
        stage.arm(run.name, f"{plateau(run)}; {percent(run.flushed)} of the gradients flushed to 0")
    f = format_of("float16")
    stage.say()
    stage.say(
        f"Guessing has a loss of log 10 = 2.30; training lasted {len(broken.losses)} steps. A gradient of {f.flush:.2e} or less "
        f"is 0 in float16. In the first backward {percent(broken.flushed)} of the weight gradients that float32 sees became 0, "
        "and Adam does not move a weight whose gradient is 0."
    )
    stage.say()
    stage.say(
        "The cure: GradScaler. It multiplies the loss by a scale, so that all gradients arrive that much larger, and divides "
        "again in float32 before the update. If a scaled gradient overflows, it skips the step and halves the scale."
    )
    stage.arm("scaled", f"{plateau(cured)}; {percent(cured.flushed)} of the gradients flushed to 0")
    stage.say(f"The scale started at {65536:,}; {skipped(cured)}; it ended at {found:,.0f}.")
    stage.say()
    last = len(cured.losses)
    slow, quick = broken.left_plateau or last, cured.left_plateau or last
    stage.claim(3, "more than half of the unscaled gradients were flushed to 0", broken.flushed > 0.5)
    stage.claim(3, "float32 left the plateau", full.left_plateau)
    stage.claim(
        3, "without scaling the plateau lasted at least 1.5 times as long as with it", slow >= 1.5 * quick
    )
    stage.claim(3, "with GradScaler training left the plateau", cured.left_plateau)
    stage.draw("underflow.png", lambda figure: figures.underflow(figure, seen.weights, found), 6.5)


def plateau(run):
    return f"loss < {PLATEAU} from step {run.left_plateau}" if run.left_plateau else f"loss never < {PLATEAU}"


def skipped(run):
    n = len(run.skips)
    return (
        f"{n or 'no'} step{'' if n == 1 else 's'} of {len(run.losses)} {'was' if n == 1 else 'were'} skipped"
    )


def recipe(stage):
    stage.title(4)
    interval = ARMS[4][1].scaler["growth_interval"]
    stage.say(
        "All three cures together, on a small convolutional network: autocast, GradScaler, float32 weights. bfloat16 has "
        "float32's range, so it needs no scaler. By default the scale doubles after 2,000 good steps; this run has "
        f"{(QUICK if stage.quick else STEPS)[4]} steps, so here it doubles after {interval}."
    )
    full, fp16, bf16_run = stage.train(4)
    for run in full, fp16, bf16_run:
        stage.arm(
            run.name,
            f"{graded(run)}, {run.saved_bytes / 1e6:.2f} MB kept for backward, {run.step_ms:.1f} ms a step",
        )
    stage.say()
    stage.say(
        f"The scale started at {65536:,} and moved between {min(fp16.scales):,.0f} and {max(fp16.scales):,.0f}; "
        f"{skipped(fp16)}. "
        f"Memory kept for backward: {percent(fp16.saved_bytes / full.saved_bytes)} of float32's."
    )
    if stage.device == "cpu":
        stage.say(
            "Time: a CPU has no half-precision arithmetic. It computes in float32 and pays for the rounding, so here half is "
            "not the faster one. On a GPU with tensor cores it is."
        )
    stage.say()
    slack = 0.03 if stage.quick else 0.01
    for run in fp16, bf16_run:
        gap = full.score - run.score
        stage.claim(4, f"{run.name}: test accuracy at most {slack} below float32's", gap <= slack)
    stage.draw("scale.png", lambda figure: figures.scale_trace(figure, fp16, interval), 4)


# --------------------------------------------------------------------------------------------------------------- the end


def summary(stage):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        title="What was measured",
        title_justify="left",
        title_style="bold",
        padding=(0, 1, 0, 0),
    )
    for column in "act", "run", "result":
        table.add_column(column)
    for column in "accuracy", "flushed", "lost", "skips":
        table.add_column(column, justify="right", no_wrap=True)
    for act, runs in stage.runs.items():
        for arm, run in zip(ARMS[act], runs, strict=True):
            result = f"NaN from step {run.nan_step} on" if run.nan_step else f"loss {tail(run):.3f}"
            if act == 3 and not run.nan_step:
                result = plateau(run)
            table.add_row(
                TITLES[act] if run is runs[0] else "",
                run.name,
                result,
                "NaN" if run.accuracy is None else f"{run.accuracy:.3f}",
                "" if run.flushed is None else percent(run.flushed),
                "" if run.lost_updates is None else percent(run.lost_updates),
                "" if arm.scaler is None else str(len(run.skips)),
                end_section=run is runs[-1],
            )
    stage.console.print(table)
    stage.say(
        "flushed: first gradients that became 0; lost: updates that changed no weight; skips: steps skipped by the scaler."
    )


READ_NEXT = """Read next:
  minamp/demo.py       this demo; training_step is the loop to copy
  minamp/autocast.py   act 1: where the cast policy is switched on; minamp/ops/ holds the policy of every op
  minamp/optim.py      act 2: master weights
  minamp/scaler.py     act 3: the dynamic loss scale, with the algorithm in its first lines
  minamp/watch.py      the instruments used here: first_bad_op, histograms, memory
  minamp/ops/naive.py  more ways to compute wrongly in half precision"""


def report(stage, seconds):
    """Everything measured, as plain values; NaN and inf as null, which JSON has no words for."""
    acts = {str(act): {run.name: _plain(asdict(run)) for run in runs} for act, runs in stage.runs.items()}
    return {
        "seed": stage.seed,
        "device": stage.device,
        "quick": stage.quick,
        "seconds": seconds,
        "acts": acts,
        "claims": [{"act": a, "claim": sentence, "ok": ok} for a, sentence, ok in stage.claims],
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "minamp": minamp.__version__,
        },
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
    }


def _plain(values):
    def plain(v):
        if isinstance(v, list):
            return [plain(x) for x in v]
        return None if isinstance(v, float) and not np.isfinite(v) else v

    return {k: plain(v) for k, v in values.items()}


def parse(argv):
    parser = argparse.ArgumentParser(
        "python -m minamp.demo", description="Three networks fail in half precision and are cured."
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the initial weights and the order of the digits (default 0)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU if there is one"
    )
    parser.add_argument("--quick", action="store_true", help="shorter trainings, looser claims")
    parser.add_argument("--act", type=int, choices=(1, 2, 3), help="only this act")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    parser.add_argument(
        "--figures",
        type=Path,
        default=Path("figures"),
        metavar="DIR",
        help="where figures go (default figures)",
    )
    options = parser.parse_args(argv)
    if options.seed < 0:
        parser.error(f"argument --seed: must be at least 0, got {options.seed}")
    return options


def play(options):
    """Run the acts; 0 if every claim held, 1 if not."""
    from rich.console import Console

    start = time.perf_counter()
    device = options.device
    if device == "auto":
        device = "cuda" if minamp.gpu_status() == "ok" else "cpu"
    stage = Stage(Console(), options.seed, device, options.quick, options.figures)
    acts = {1: act1, 2: act2, 3: act3, 4: recipe}
    for number, act in acts.items():
        if options.act in (None, number):
            act(stage)
            stage.say()
    summary(stage)
    seconds = time.perf_counter() - start
    if options.json:
        with replacing(options.json) as temporary:
            Path(temporary).write_text(json.dumps(report(stage, seconds), indent=1, allow_nan=False))
        stage.say(f"Everything measured: {options.json}")
    missed = [sentence for _, sentence, ok in stage.claims if not ok]
    for sentence in missed:
        stage.console.print(f"[bold red]Not as expected:[/] {sentence}", highlight=False)
    stage.console.print(f"\n{READ_NEXT}\n", highlight=False, soft_wrap=True)
    stage.console.print(
        f"{len(stage.claims) - len(missed)} of {len(stage.claims)} claims held, {seconds:.0f} s.",
        highlight=False,
    )
    return 1 if missed else 0


def main(argv=None):
    options = parse(argv)
    if options.device == "cuda" and minamp.gpu_status() != "ok":
        print(f"demo: --device cuda: {minamp.gpu_status()}", file=sys.stderr)
        return 2
    try:
        return play(options)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def use_one_blas_thread():
    """Start this process anew with one BLAS thread, unless the user has chosen a number.

    The networks are so small that a second thread gains nothing, and on a busy machine two threads that wait for each other
    made the demo five times slower. BLAS reads the variable when NumPy is imported, so it has to be set before.
    """
    if os.name == "posix" and "OPENBLAS_NUM_THREADS" not in os.environ:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    use_one_blas_thread()
    sys.exit(main())
