"""The story of the detector: what is told of each variant, the claims that must hold, and the table."""

from pathlib import Path

import numpy as np

from minamp.demo import figures
from minamp.demo.detector import ENOUGH, NEAR, QUICK, STEPS, VARIANTS, load, train
from minamp.demo.figures import percent
from minamp.files import replacing

COLUMNS = ("variant", "what is different", "outcome", "mAP@0.5", "skipped", "final scale", "kept MB")


def detector(stage, only=None):
    """Train every variant (or `only` one), say what came of it, and draw and write the table of all."""
    stage.console.rule("[bold]The detector whose loss turned NaN", align="left")
    steps = QUICK if stage.quick else STEPS
    stage.say(
        "A detector finds handwritten digits in scenes of 64x64 pixels. It was switched to half precision with four changed "
        "lines: autocast around the forward pass, and the scaler's scale, step and update. Memory fell. Next day the loss was "
        "NaN. Which change is to blame? Here the same detector is trained for "
        f"{steps:,} steps in each of the ways that are found in the wild."
    )
    if stage.quick:
        stage.say(
            f"[bold]--quick: {steps} steps show what fails at once. They are too few to learn from: no mAP is judged, and a "
            "loss that turns NaN later is not seen.[/bold]"
        )
    stage.say()
    data, chosen = load(stage.quick), [VARIANTS[only]] if only else list(VARIANTS.values())
    runs = stage.runs["detector"] = []
    with stage.progress() as bar:
        tasks = [bar.add_task(variant.name, total=steps) for variant in chosen]
        for variant, task in zip(chosen, tasks, strict=True):
            runs.append(
                train(variant, data, steps, stage.seed, stage.device, lambda task=task: bar.advance(task))
            )
            stage.arm(variant.name, outcome(runs[-1]))
    stage.say()
    _table(stage, runs)
    _harmless(stage, {run.name: run for run in runs})
    _post_mortem(stage, runs)
    _claims(stage, {run.name: run for run in runs})
    if not only and not stage.quick:
        stage.draw("detector.png", lambda figure: figures.detector(figure, runs, data[2]), 9)
        path = stage.figures / "detector.md"
        with replacing(path) as temporary:
            Path(temporary).write_text(markdown(runs))
        stage.say(f"Table: {path}")


def outcome(run):
    """What came of a run, in a few words."""
    if run.error:
        return run.error.split(":")[0]
    if run.broken:
        return f"weights are NaN from step {run.nan_step} on"
    if run.nan_step:
        return f"loss is NaN at step {run.nan_step}, then {run.nan_losses - 1} more times"
    return f"loss {run.losses[0]:.1f} -> {np.mean(run.losses[-20:]):.1f}"


def row(run):
    """The run's line of the table, as texts in the order of COLUMNS."""
    skipped = scale = "-"
    if VARIANTS[run.name].scaler is not None and run.scales:  # an error in the first step leaves none
        skipped = f"{len(run.skips)} of {len(run.losses)}"
        scale = f"{run.scales[-1]:,.0f}" if run.scales[-1] >= 1 else f"{run.scales[-1]:.0e}"
    mean_ap = "-" if run.mean_ap is None else f"{run.mean_ap:.3f}"
    kept = f"{run.saved_bytes / 1e6:.1f}"
    return run.name, VARIANTS[run.name].change, outcome(run), mean_ap, skipped, scale, kept


def markdown(runs):
    """The table for the README."""
    lines = [COLUMNS, ("---",) * 3 + ("---:",) * 4, *([f"`{r[0]}`", *r[1:]] for r in map(row, runs))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _table(stage, runs):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if i > 2 else "left", no_wrap=i in (0, 3))
    for run in runs:
        table.add_row(*row(run))
    stage.console.print(table)
    stage.say(
        "kept: memory held for backward in the first step. mAP@0.5: mean average precision on scenes of digits that were "
        "never trained; - where the run ended before."
    )
    for run in runs:
        if run.error:
            stage.say(f"{run.name}: {run.error}")
    stage.say()


def _harmless(stage, run):
    """Which of the changes did nothing here; said only after a full training, and of what was measured."""
    if stage.quick or "float32" not in run:
        return
    least = (run["float32"].mean_ap or 0.0) - NEAR
    names = [
        name
        for name, r in run.items()
        if name != "float32" and (r.mean_ap or 0.0) >= least and not r.nan_step
    ]
    if names:
        stage.say(
            f"Within {NEAR} of float32's mAP or above it: {', '.join(names)}. Not every deviation from the recipe is punished by "
            "every network: BatchNorm keeps this one's numbers near 1, and minamp's optimizers compute in float32 even for "
            "half weights. Acts 1 to 3 of python -m minamp.demo show networks that half weights or a missing scaler ruin."
        )
        stage.say()


def _post_mortem(stage, runs):
    for run in runs:
        if run.first_bad_op:
            stage.say(
                f"The post-mortem of {run.name}. The first operation that turned finite numbers into something else, at step "
                f"{run.nan_step}: [bold]{run.first_bad_op}[/bold]. The scaler sees NaN gradients, skips the step and halves the "
                "scale, which saves the weights and cannot help: no scale makes the forward pass right. The four lines were "
                "not wrong. An old line of the loss, exp of a score, was handed half numbers by them."
            )
            stage.say()


def _claims(stage, run):
    """Claims are made about the variants that ran, those on learning only after the full number of steps."""

    def claim(sentence, ok):
        stage.claim("detector", sentence, ok)

    if "no_update" in run:
        error = run["no_update"].error or ""
        claim("no_update: the second step is refused", error.startswith("RuntimeError at step 2"))
    if "step_before_unscale" in run:
        step = run["step_before_unscale"].nan_step or 0
        claim("step_before_unscale: NaN within 10 steps", 0 < step <= 10)
    if "init_scale_2_20" in run:
        claim("init_scale_2_20: the first step is skipped", 1 in run["init_scale_2_20"].skips)
    if {"float32", "float16"} <= run.keys():
        share = run["float16"].saved_bytes / run["float32"].saved_bytes
        claim(f"float16: {percent(share)} of float32's memory for backward (at most 60 %)", share <= 0.6)
    if stage.quick:
        return
    grade = {name: r.mean_ap or 0.0 for name, r in run.items()}
    if "float32" in run:
        claim(f"float32: mAP@0.5 {grade['float32']:.3f} (at least {ENOUGH})", grade["float32"] >= ENOUGH)
        for name in (name for name in ("float16", "bfloat16", "head_float") if name in run):
            gap = grade["float32"] - grade[name]
            claim(f"{name}: mAP@0.5 at most {NEAR} below float32's ({gap:+.3f})", gap <= NEAR)
        if "clip_before_unscale" in run:
            claim(
                "clip_before_unscale: no NaN, and it learned next to nothing (mAP@0.5 below 0.1)",
                run["clip_before_unscale"].nan_step is None and grade["clip_before_unscale"] < 0.1,
            )
    if "softmax_half" in run:
        r = run["softmax_half"]
        claim("softmax_half: trained well at first, then NaN", (r.nan_step or 0) > 100)
        claim(
            "softmax_half: skipping steps was no cure, the scale fell below 1",
            r.scales[-1] < 1 and r.nan_losses > 10,
        )
