"""The demo's figures. Each is drawn from what was measured; matplotlib is imported when the first one is."""

import numpy as np

from minamp.files import replacing

# Okabe and Ito: apart for all kinds of colour vision
BLUE, RED, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#666666"


def percent(share):
    """'93.5 %', but never '100.0 %' or '0.0 %' for a share that is not exactly that."""
    text = f"{100 * share:.1f}"
    if text == "100.0":
        return "100 %" if share == 1 else ">99.9 %"
    if text == "0.0":
        return "0 %" if share == 0 else "<0.1 %"
    return f"{text} %"


def save_figure(path, paint, height):
    """Let paint(figure) draw into a temporary file and move it into place: an interrupted run leaves no half-written figure."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with rc_context(style), replacing(path) as temporary:
        figure = Figure(figsize=(10, height), layout="constrained")
        paint(figure)
        figure.savefig(temporary, format="png", dpi=120)


def collapse(figure, full, broken, cured, shown):
    """The losses of the first `shown` steps, with the NaN step marked."""
    axes = figure.subplots()
    shown = min(len(full.losses), shown)
    steps = np.arange(1, shown + 1)
    axes.plot(steps, full.losses[:shown], color=GREY, lw=1.5, label="float32")
    axes.plot(
        steps,
        cured.losses[:shown],
        color=BLUE,
        lw=1.5,
        label="autocast: float16, but exp, sum and log in float32",
    )
    axes.plot(steps, broken.losses[:shown], color=RED, lw=3, label="float16 everywhere")
    if broken.nan_step:
        at, loss = broken.nan_step - 1, broken.losses[broken.nan_step - 2]
        axes.plot(at, loss, "X", color=RED, ms=14)
        text = f"NaN at step {broken.nan_step}"
        if broken.bad_op is not None:
            text += f": {broken.bad_op}({broken.largest_input:.2f}) overflows float16"
        axes.annotate(
            text,
            (at, loss),
            (at + 0.07 * shown, 0.62 * max(full.losses[:shown])),
            color=RED,
            arrowprops={"arrowstyle": "->", "color": RED},
        )
    axes.set(xlabel="training step", ylabel="loss", xlim=(0, shown), ylim=(0, None))
    axes.set_title("Act 1: the same code in three precisions", loc="left")
    axes.legend(loc="upper right")


def underflow(figure, weights, scale):
    """The measured float32 gradients, and where they come to lie when the loss is multiplied by `scale` (a power of two)."""
    shift, shown = int(np.log2(scale)), slice(4, None)
    panels = figure.subplots(2, sharex=True, sharey=True)
    for axes, moved, title in zip(
        panels, (0, shift), ("Without scaling", f"Loss times {scale:,.0f}"), strict=True
    ):
        e, n = weights.exponents[shown] + moved, weights.counts[shown]
        lost, over = e < -25, e >= 16
        axes.bar(e[~lost & ~over] + 0.5, n[~lost & ~over], 0.9, color=BLUE)
        axes.bar(e[lost | over] + 0.5, n[lost | over], 0.9, color=RED)
        nonzero = weights.total - weights.zeros
        share = (n[lost].sum() + weights.below + weights.counts[: shown.start].sum()) / nonzero
        axes.axvspan(-25, 16, color=BLUE, alpha=0.07, lw=0)
        for x in (-25, -14, 16):
            axes.axvline(x, color=GREY, lw=1, ls="--" if x == -14 else "-")
        axes.set(ylabel="weight gradients", xlim=(-52, 20))
        axes.margins(y=0.3)
        axes.set_title(
            f"{title}: {percent(share)} of the non-zero gradients are too small for float16", loc="left"
        )
        top = axes.get_xaxis_transform()
        for x, text, side in (
            (-25.4, "0 in float16", "right"),
            (-24.6, "fewer digits", "left"),
            (-13.6, "full precision", "left"),
            (16.3, "inf", "left"),
        ):
            axes.text(
                x, 0.97, text, transform=top, ha=side, va="top", color=RED if x in (-25.4, 16.3) else BLUE
            )
    panels[1].set_xlabel("power of two of the gradient (-25 stands for values from 2$^{-25}$ to 2$^{-24}$)")


def scale_trace(figure, run, interval):
    """The loss scale after every step, with the skipped steps marked."""
    axes = figure.subplots()
    steps = np.arange(1, len(run.scales) + 1)
    axes.step(steps, run.scales, where="post", color=BLUE, lw=2, label="scale")
    if run.skips:
        at = np.array(run.skips)
        axes.plot(
            at,
            np.array(run.scales)[at - 1],
            "v",
            color=RED,
            ms=10,
            label="overflow: step skipped, scale halved",
        )
    axes.set_yscale("log", base=2)
    axes.set(xlabel="training step", ylabel="loss scale", xlim=(0, len(steps)))
    axes.set_ylim(min(run.scales) / 2, max(run.scales) * 4)
    axes.set_title(
        f"The dynamic loss scale: doubled after {interval} good steps, halved on overflow", loc="left"
    )
    axes.legend(loc="upper right", ncols=2)


def detector(figure, runs, scene):
    """The losses, the grades of all variants, and what float16 found in a scene (of Scenes) twice as large as in training."""
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 2))
    _detector_losses(figure.add_subplot(grid[0, :]), {run.name: run for run in runs})
    _detector_grades(figure.add_subplot(grid[1, 0]), runs)
    _detector_scene(figure.add_subplot(grid[1, 1]), next(r for r in runs if r.name == "float16"), scene)


def _detector_losses(axes, runs):
    """The loss, as a mean over 20 steps; a NaN leaves a gap, and a cross marks where the first one was."""
    for name, color, style in (
        ("float32", GREY, "-"),
        ("float16", BLUE, "-"),
        ("clip_before_unscale", GREEN, "--"),
        ("softmax_half", RED, "-"),
    ):
        losses = np.array(runs[name].losses)
        wide = max(1, min(20, len(losses) // 10))
        smooth = np.convolve(losses, np.full(wide, 1 / wide), "valid")
        axes.plot(np.arange(wide, len(losses) + 1), smooth, color=color, ls=style, lw=2, label=name)
    broken = runs["softmax_half"]
    if broken.nan_step:
        at = np.flatnonzero(~np.isfinite(broken.losses)) + 1
        axes.plot(
            at,
            np.zeros(len(at)),
            "x",
            color=RED,
            ms=8,
            clip_on=False,
            label=f"softmax_half: NaN, {len(at)} times",
        )
    axes.set(xlabel="training step", ylabel="loss", xlim=(0, len(runs["float32"].losses)), ylim=(0, None))
    axes.set_title("The detector whose loss turned NaN", loc="left")
    axes.legend(loc="center right", bbox_to_anchor=(1, 0.6))


def _detector_grades(axes, runs):
    at = np.arange(len(runs))
    grades = np.array([run.mean_ap or 0.0 for run in runs])
    hurt = [run.mean_ap is None or run.nan_step is not None or run.mean_ap < grades.max() / 2 for run in runs]
    axes.barh(at, grades, 0.7, color=[RED if bad else BLUE for bad in hurt])
    for y, run, grade in zip(at, runs, grades, strict=True):
        text = f"{grade:.3f}" + (f", NaN at step {run.nan_step}" if run.nan_step else "")
        if run.mean_ap is None:
            text = f"NaN at step {run.nan_step}" if run.broken else run.error.split(":")[0]
        inside = grade > 0.6
        axes.text(
            grade - 0.02 if inside else grade + 0.02,
            y,
            text,
            va="center",
            ha="right" if inside else "left",
            color="white" if inside else RED,
        )
    axes.set_yticks(at, [run.name for run in runs])
    axes.invert_yaxis()
    axes.set(xlabel="mAP@0.5 on test scenes", xlim=(0, 1))


def _detector_scene(axes, run, scene):
    """The scene's image with the detections of a score above 0.5."""
    axes.imshow(-scene.images[0, 0], cmap="gray")  # ink is dark
    for x1, y1, x2, y2, score, label in run.example:
        if score > 0.5:
            axes.plot([x1, x2, x2, x1, x1], [y1, y1, y2, y2, y1], color=BLUE, lw=2)
            axes.text(x1, y1 - 1, f"{label:.0f}", color=BLUE, weight="bold")
    axes.set(xlabel="pixels", xlim=(0, scene.images.shape[3]), ylim=(scene.images.shape[2], -8))
    axes.set_title(f"{run.name} finds, in 128x128", loc="left")
