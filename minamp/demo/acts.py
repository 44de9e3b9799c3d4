"""The acts: what is told of each run, and the claims that must hold. Every number was measured a moment before."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from minamp import watch
from minamp.data import digits
from minamp.demo import figures
from minamp.demo.experiment import ARMS, EPOCH, PLATEAU, QUICK, STEPS, TITLES, first_gradients, train
from minamp.demo.figures import percent, save_figure
from minamp.formats import format_of


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

    def progress(self):
        """A rich Progress: a bar and a count of steps for every run; nothing where there is no terminal."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("  {task.description:<22}"),
            BarColumn(),
            TextColumn("step {task.completed}/{task.total}"),
        )
        return Progress(
            *columns,
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def train(self, act):
        steps = (QUICK if self.quick else STEPS)[act]
        with self.progress() as bar:
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
    stage.arm("scaled", plateau(cured))
    stage.say(
        f"The scale started at {65536:,}; {skipped(cured)}; it ended at {found:,.0f}, at which {percent(cured.flushed)} of the "
        "first batch's gradients become 0."
    )
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
            "not the faster one. On a GPU with tensor cores it can be, for networks large enough (notebook 9)."
        )
    stage.say()
    slack = 0.03 if stage.quick else 0.01
    for run in fp16, bf16_run:
        gap = full.score - run.score
        stage.claim(4, f"{run.name}: test accuracy at most {slack} below float32's", gap <= slack)
    stage.draw("scale.png", lambda figure: figures.scale_trace(figure, fp16, interval), 4)


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
        "flushed: gradients of the first batch that became 0, at the run's last scale; lost: updates that changed no "
        "weight; skips: steps skipped by the scaler."
    )
