# %% [markdown]
# # 8. The detector whose loss turned NaN
#
# A detector was switched to half precision with four changed lines: `autocast` around the forward pass, and
# the scaler's `scale`, `step` and `update`. Memory fell. Next day the loss was NaN. Were the four lines wrong?
#
# After this notebook you will be able to
#
# - tell the changes that break such a training at once from those that break it late, and from harmless ones;
# - read what `minamp.doctor` says about a training step, and know what an empty list means;
# - explain why a textbook softmax in float16 fails only after it has learned;
# - measure what mixed precision saves, with `minamp.verify_amp`.
#
# It needs about 45 minutes. Where you see **Predict**, stop and write your answer down first. The answer is
# the output of the next cell, folded away where the viewer can do that.
#
# The first cell finds minamp. If it says that minamp is not there: get the repository, run `pip install -e .`
# in its folder, and start this notebook again.
# On a hosted notebook service, in a cell above the first: `!git clone` the repository, then `%pip install -e` its
# folder, with `[gpu]` behind the folder's name where the service has a GPU, and restart the kernel.

# %%
import sys
from pathlib import Path

try:
    import minamp
except ImportError:  # not installed, but perhaps this notebook lies in the repository
    roots = [p for p in Path.cwd().resolve().parents if (p / "minamp" / "formats.py").exists()]
    if not roots:
        raise ImportError(
            "minamp is not here: get its repository, run `pip install -e .` in its folder, and restart"
        ) from None
    sys.path.insert(0, str(roots[0]))
    import minamp

import re
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

import minamp.nn.functional as F
from minamp import nn, optim, watch
from minamp.data import DataLoader, digits
from minamp.demo.detector import VARIANTS
from minamp.demo.experiment import endless
from minamp.detector import Detector, decode, detect, detection_loss, mean_average_precision
from minamp.formats import cast, float16, neighbours
from minamp.scenes import scenes

BLUE, RED, GREY = "#0072b2", "#d55e00", "#666666"
plt.rcParams.update({"figure.dpi": 80, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
print("minamp", minamp.__version__)

# %% [markdown]
# ## The loop, and twelve ways to change it
#
# A *scene* is an image of 64 x 64 pixels with up to six handwritten digits. A *detector* says where they are
# and which they are. Ours lays two grids over the image. Each cell answers with a box, with a score for "there
# is something" and with ten scores, one for each digit. The three losses are added:
#
# $$ L = 5\,L_\mathrm{box} + L_\mathrm{something} + L_\mathrm{digit}. $$
#
# The class below is the loop, as it stands in `minamp.demo.detector`. A *variant* says what somebody changed
# in it. `variant.finish` is what comes after backward; the recipe's is: unscale, clip, step, update.


# %%
class Training:
    """The detector, its optimizer, its scaler and its scenes; step() is one step of training."""

    def __init__(self, variant, data, widths=(8, 16, 32), warmup=30):
        minamp.manual_seed(0)
        self.variant, self.warmup, self.count = variant, warmup, 0
        self.model = Detector(widths, head=variant.head).to(variant.weights)
        self.optimizer = optim.SGD(
            self.model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        self.scaler = minamp.GradScaler(enabled=variant.scaler is not None, **(variant.scaler or {}))
        self.batches = endless(DataLoader(data, 8, shuffle=True, seed=0, drop_last=True))
        self.scores = []  # the largest class score of each step

    def region(self, enabled=True):
        half = self.variant.autocast
        return minamp.autocast(dtype=half or float16, enabled=enabled and half is not None)

    def step(self, rate=0.1):
        """One step with this learning rate. Returns the loss, and whether the weights were updated."""
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = rate * min(1, self.count / self.warmup)
        x, boxes, classes = next(self.batches)
        x, boxes = x.to(self.variant.weights), boxes.to(self.variant.weights)
        with self.region():
            grids = self.model(x)
        self.scores.append(max(float(grid.detach()[:, 5:].amax().item()) for grid in grids))
        if self.variant.floats:
            grids = [grid.float() for grid in grids]
        with self.region(self.variant.loss_inside):
            loss = detection_loss(grids, boxes, classes, self.variant.class_loss)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        updated = self.variant.finish(self.model, self.optimizer, self.scaler)
        return loss.item(), updated is not None


seen, unseen = scenes(32), scenes(32, "test")
for variant in VARIANTS.values():
    print(f"{variant.name:21}{variant.change}")

# %% [markdown]
# ## What it learns
#
# The grade of a detector is its *mean average precision*, mAP: 1 if it finds every digit, names it rightly and
# invents none.
#
# **Predict.** We train by the recipe, 200 steps on only 32 scenes. What grade will it get on those 32? And on
# 32 others?

# %% tags=["hide-output", "machine"]
recipe, steps = Training(VARIANTS["float16"], seen, warmup=50), 200
losses = [recipe.step(rate=0.05 * (1 + np.cos(np.pi * k / steps)))[0] for k in range(steps)]
recipe.model.eval()


def found(data, threshold=0.05):
    with minamp.no_grad(), recipe.region():
        return detect(recipe.model(minamp.tensor(data.images)), score_threshold=threshold)


grades = [mean_average_precision(found(data), data.boxes, data.classes) for data in (seen, unseen)]
print(f"loss {losses[0]:.1f} -> {np.mean(losses[-10:]):.1f}, scale {recipe.scaler.get_scale():g}")
print(f"mAP@0.5: {grades[0]:.2f} on the 32 scenes of the training, {grades[1]:.2f} on 32 others")
assert np.isfinite(losses).all() and grades[0] > 5 * grades[1]

# %% [markdown]
# It has learned its 32 scenes by heart, which is all that so short a training can do. That is enough here: we
# want to see the arithmetic at work. The full training, 4,000 scenes and 1,200 steps for
# each variant, takes 25 minutes: `python -m minamp.demo detector`. Its table stands in `figures/detector.md`,
# and we read it below.

# %% tags=["machine"]
figure, panels = plt.subplots(2, 3, figsize=(9, 6.2), layout="constrained")
for row, data, name in zip(panels, (seen, unseen), ("seen in training", "never seen"), strict=True):
    crowded = np.argsort(-(data.classes >= 0).sum(1), kind="stable")[:3]
    answers = found(data, 0.2)
    for axes, i in zip(row, crowded, strict=True):
        axes.imshow(-data.images[i, 0], cmap="gray")
        for x1, y1, x2, y2 in data.boxes[i][data.classes[i] >= 0]:
            axes.plot([x1, x2, x2, x1, x1], [y1, y1, y2, y2, y1], color=GREY, ls=":", lw=1.5)
        boxes, _, labels = (part.numpy() for part in answers[i])
        for (x1, y1, x2, y2), label in zip(boxes, labels, strict=True):
            axes.plot([x1, x2, x2, x1, x1], [y1, y1, y2, y2, y1], color=BLUE, lw=1.5)
            axes.text(x1, y1 - 1, str(label), color=BLUE, weight="bold")
        axes.set(title=f"{name}\ndigits: {(data.classes[i] >= 0).sum()}, boxes: {len(boxes)}")
        axes.set(xlim=(0, 64), ylim=(64, -6), xticks=(0, 32, 64), yticks=(0, 32, 64))
for axes in panels[1]:
    axes.set_xlabel("pixels")
for axes in panels[:, 0]:
    axes.set_ylabel("pixels")
plt.show()

# %% [markdown]
# Dotted: where the digits are. Blue: what the detector found, with the digit that it takes it for. Above,
# scenes of the training; below, scenes of digits that it never saw. Where it can't decide between two digits it
# may draw a box for each.
#
# ## What goes wrong at once
#
# **Predict.** All twelve variants train for 16 steps from the same start. Which of them will show in 16 steps
# that something is wrong, and how: NaN, an error, a loss that does not move?

# %% tags=["hide-output", "machine"]
short = 16
runs, first_bad = {}, {}
for name, variant in VARIANTS.items():
    training, losses, skipped, end = Training(variant, seen), [], [], ""
    for k in range(short):
        with watch.first_bad_op() as bad:
            try:
                loss, updated = training.step()
            except RuntimeError as problem:
                end = f"{type(problem).__name__} in step {k + 1}"
                break
        losses.append(loss)
        skipped += [] if updated else [k]
        if not np.isfinite(loss) and bad.found:
            first_bad.setdefault(name, f"step {k + 1}: {bad}")
        if not all(weight.isfinite().all() for weight in training.model.parameters()):
            end = f"weights NaN after step {k + 1}"
            break
    runs[name] = losses, skipped, end
    outcome = end or f"loss {losses[0]:.1f} -> {losses[-1]:.1f}, {len(skipped)} steps skipped"
    print(f"{name:21}{outcome}")
assert "RuntimeError" in runs["no_update"][2] and "NaN" in runs["step_before_unscale"][2]
assert runs["softmax_half"][0][-1] < runs["softmax_half"][0][0] - 1 and not runs["softmax_half"][2]
assert runs["float16"][0][-1] < runs["clip_before_unscale"][0][-1] - 2

# %%
picked = (
    "float32",
    "float16",
    "clip_before_unscale",
    "step_before_unscale",
    "init_scale_2_20",
    "softmax_half",
)
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, name in zip(panels.flat, picked, strict=True):
    losses, skipped, end = runs[name]
    at = np.arange(1, len(losses) + 1)
    axes.plot(np.arange(1, len(runs["float32"][0]) + 1), runs["float32"][0], color=GREY, ls="--", lw=1)
    axes.plot(at, losses, color=BLUE, marker=".", label="loss")
    if skipped:
        height = np.nan_to_num(np.array(losses)[skipped], nan=4.5, posinf=4.5, neginf=4.5)
        axes.plot(at[skipped], height, "x", color=RED, ms=8, label="step skipped")
    if end:
        axes.text(1, 5.5, end, color=RED)
    axes.set(title=name, ylim=(4, 16), xlim=(0, short + 1))
for axes in panels[1]:
    axes.set_xlabel("step")
for axes in panels[:, 0]:
    axes.set_ylabel("loss")
panels[0, 1].legend(frameon=False, loc="lower left")
plt.show()

# %% [markdown]
# Six of the twelve, 16 steps each; the dashed line is float32's loss in every panel. Crosses are steps that the
# scaler skipped, at the bottom if the loss was not finite. `clip_before_unscale` limits gradients that are still
# tens of thousands of times too large; after unscaling next to nothing is left. `step_before_unscale` takes a step
# with the scaled gradients. A start at $2^{20}$ costs a few skipped steps and then goes on like the others.
#
# And `softmax_half`? It learns, and its loss is even lower, for it adds up another class loss.
#
# Two variants compute the boxes and their loss in float16: `half` and `softmax_half`. A young network draws
# boxes that are far too large, and the area of a box is a product.
#
# **Predict.** From which side on is the area of a square box infinite in float16?

# %% tags=["hide-output"]
for side in (255.0, 256.0):
    print(f"{side:g} x {side:g} pixels: {(minamp.tensor(side, dtype=float16) ** 2).item()}")

# %% [markdown]
# Here is the first operation that made inf or NaN of finite numbers, for each variant that lost a step that
# way. Which steps these are depends on the machine, since a young network's boxes are a matter of chance.

# %% tags=["machine"]
for name, text in first_bad.items():
    print(f"{name}, {text.partition('; ')[0]}")
    print(f"    in the end: {runs[name][2] or 'the step was skipped, and the training went on'}")

# %% [markdown]
# This is what the scaler's skipping is for: a variant that uses its scaler rightly loses a step, one without
# loses its weights. (`step_before_unscale` has a scaler and asks it too late.)
#
# Here is what the full training of the same variants found:

# %%
table = Path(minamp.__file__).parents[1] / "figures" / "detector.md"
rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.read_text().splitlines()]
full = {row[0].strip("`"): (row[2], row[3], row[6]) for row in rows[2:]}
assert full.keys() == VARIANTS.keys()
print(f"{'':21}{'1,200 steps on 4,000 scenes':48}mAP@0.5   kept MB")
for name, (outcome, grade, kept) in full.items():
    print(f"{name:21}{outcome:48}{grade:>7}{kept:>10}")

# %% [markdown]
# Two things to take from the two tables. A training that looks well for a while proves nothing: `softmax_half`
# fails after hundreds of good steps. And one that survives proves little too: compare `half` above and here.
# The same code, with another batch size, warm-up and width.
#
# ## The doctor
#
# Waiting for a NaN is a slow way to find a fault. `minamp.doctor(step, model=..., optimizer=..., scaler=...)`
# runs your step once as it is and once in float32, more often where that leaves a question, watches every op and
# every call of the loop, puts everything back, and says what is wrong with the *code*, whether or not it has done
# harm yet.
#
# **Predict.** For which of the twelve variants will it find something, at step 1, before anything is learned?

# %% tags=["hide-output"]
reports = {}
for name, variant in VARIANTS.items():
    training = Training(variant, seen)
    reports[name] = minamp.doctor(
        training.step, model=training.model, optimizer=training.optimizer, scaler=training.scaler
    )
    assert training.count == 0, "put back"
    print(f"{name:21}{', '.join(finding.code for finding in reports[name]) or '-'}")
assert reports["float32"] == reports["float16"] == reports["bfloat16"] == []
failed = {name for name, (_, grade, _) in full.items() if grade == "-" or float(grade) < 0.9}
assert {name for name in reports if reports[name]} == failed | {"half"}

# %% [markdown]
# The recipe gets none, in either half format, and neither does float32. Each variant that fails in the full
# table gets a finding that names its fault. `half` gets one too, although it did well in the full training: its
# loss is computed in float16, and we saw how that overflows.
#
# Four variants are changed and get no finding. That is right:
#
# - `autocast_all`: autocast keeps a list of ops that it computes in float32: exp is one, and the losses are
#   others. A box's width is an exp, so inside the region the boxes are float32. The next cell prints it.
# - `head_float` only saves less: compare the last column of the full table.
# - `init_scale_2_20`: the scaler finds its way down by itself, as the figure shows.
# - `no_scaler`: a scaler is needed where gradients are flushed to zero. The next cell says how many that are.

# %%
with minamp.no_grad(), minamp.autocast():
    grids = Detector((8, 16, 32))(minamp.tensor(seen.images[:1]))
    inside = decode(grids)[0].dtype
print(
    f"the grids are {grids[0].dtype}, the boxes {inside} inside the region, {decode(grids)[0].dtype} outside"
)
assert inside == minamp.float32
numbers = reports["no_scaler"].advice.numbers
print(f"gradients that are 0 in float16 without a scale: {numbers['flushed_unscaled']:.1%} of the others")
print(
    f"the largest gradient: {numbers['largest_gradient']:.1f}, a good first scale: {numbers['init_scale']:g}"
)
assert numbers["flushed_unscaled"] < 0.01

# %% [markdown]
# So an **empty list** means: in these few steps nothing was done that is known to go wrong. It does not mean
# that the network learns, nor that other data can't overflow.
#
# ## The old line
#
# `softmax_half` has the four lines right. What it also has is an old class loss, from the days of float32. We
# copy it here, so that the doctor can name the line.


# %% tags=["machine"]
def softmax_loss(scores, labels):
    """Minus the logarithm of the right digit's probability, by the textbook."""
    e = scores.exp()
    p = e / e.sum(-1, keepdim=True)
    return -p.gather(1, labels[:, None]).log().sum()


def told(report):
    """The findings, without the place where the kernel keeps the cell."""
    for finding in report:
        print(re.sub(r"\S*ipykernel\S*\.py:", "line ", str(finding)), end="\n\n")


patient = Training(replace(VARIANTS["softmax_half"], class_loss=softmax_loss), seen)
report = minamp.doctor(patient.step, model=patient.model, optimizer=patient.optimizer, scaler=patient.scaler)
told(report)
assert [finding.code for finding in report] == ["softmax_in_half", "log_of_softmax"]

# %% [markdown]
# Read the evidence: the largest score is far below the limit that is printed beside it. Nothing has overflowed,
# and the fault is found all the same, because the doctor looks at which op runs in which format.
#
# Where does the half come from? `scores` are what a convolution under autocast gives: float16. Nobody changed
# the old line; the four new lines changed what it is handed.
#
# **Predict.** What is the largest float16 number whose exp is finite in float16? And what is the exp of the
# next one?

# %% tags=["hide-output"]
candidates = np.arange(0, 16, 2**-7)  # float16 holds all of these, and from 8 on no others
limit = float(candidates[np.isfinite(cast(np.exp(candidates), float16))].max())
above = neighbours(limit, float16)[1]
for x in (limit, above):
    print(f"exp({x}) = {np.exp(x):.1f}, in float16 {minamp.tensor(x, dtype=float16).exp().item()}")
print(f"float32 takes scores up to {np.log(np.finfo(np.float32).max):.1f}")

# %% [markdown]
# A row with one infinite exp has an infinite sum, `inf / inf` is NaN, and so is the loss.
#
# ## Why it comes late
#
# The softmax of a right score $z$ among nine others near 0 is
#
# $$ p = \frac{e^z}{e^z + 9}, \qquad 1 - p \approx 9\,e^{-z}. $$
#
# The gradient of the loss $-\log p$ is $p - 1$: never quite 0, so training goes on pushing $z$ up, but ever more
# slowly. To halve the doubt $1 - p$, $z$ must grow by $\log 2$. A new network's scores lie near 0. It takes a
# while until it is so sure that $z$ reaches the printed limit.
#
# Look at the detector of the first section, trained by the recipe. Its scores grew as well:

# %% tags=["machine"]
print("step             " + "".join(f"{k:7}" for k in (1, 50, 100, 150, 200)))
print("largest score    " + "".join(f"{recipe.scores[k - 1]:7.1f}" for k in (1, 50, 100, 150, 200)))
assert max(recipe.scores[-50:]) > recipe.scores[0] + 3

# %% [markdown]
# To see the end of it we take a network that trains faster: two linear layers that sort single digits, with
# the old class loss, for 400 steps. Six settings: three learning rates, and 100 or 4,000 digits to learn.
#
# **Predict.** Which of the six fails first? Does a smaller learning rate cure it? Does the scaler, which skips
# every step with a NaN and halves the scale?

# %% tags=["hide-output", "machine"]
split = digits("train")


def classify(rate, count, class_loss, inside, steps=400, batch=64):
    """Train the classifier; the largest score of every step, the steps whose loss is not finite, the scales."""
    minamp.manual_seed(0)
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer, scaler = optim.SGD(model.parameters(), rate, momentum=0.9), minamp.GradScaler()
    images, labels = split.images[:count].reshape(count, -1), split.labels[:count]
    scores, lost, scales = [], [], []
    for k in range(steps):
        pick = rng.integers(0, count, batch)
        x, y = minamp.tensor(images[pick]), minamp.tensor(labels[pick])
        with minamp.autocast():
            z = model(x)
            loss = class_loss(z, y) / batch if inside else None
        if not inside:
            loss = class_loss(z, y) / batch
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scores.append(z.detach().amax().item())
        lost += [] if np.isfinite(loss.item()) else [k]
        scales.append(scaler.get_scale())
    return np.array(scores), np.array(lost, int), scales


settings = [(rate, count) for count in (100, 4000) for rate in (0.001, 0.003, 0.01)]
grown = {setting: classify(*setting, softmax_loss, inside=False) for setting in settings}
print(
    f"{'rate':>7}{'digits':>8}{'largest score':>15}{'first lost':>12}{'lost steps':>12}{'scale at the end':>18}"
)
for (rate, count), (scores, lost, scales) in grown.items():
    first = f"step {lost[0] + 1}" if len(lost) else "none"
    print(f"{rate:7}{count:8}{scores.max():15.1f}{first:>12}{len(lost):12}{scales[-1]:18.3g}")
    assert set(np.flatnonzero(scores > limit)) <= set(lost)

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, ((rate, count), (scores, lost, _)) in zip(panels.flat, grown.items(), strict=True):
    axes.plot(np.arange(1, len(scores) + 1), scores, color=BLUE, lw=1)
    axes.plot(lost + 1, np.zeros(len(lost)), "|", color=RED, ms=8)
    axes.axhline(limit, color=GREY, ls="--", lw=1)
    axes.set(title=f"rate {rate}, {count} digits", ylim=(-1, 18))
for axes in panels[1]:
    axes.set_xlabel("step")
for axes in panels[:, 0]:
    axes.set_ylabel("largest score")
plt.show()

# %% [markdown]
# Blue: the largest score of each batch. Dashed: the limit from above. Red marks: steps whose loss is not
# finite. Where the blue line is above the dashed one, steps are lost. A smaller learning rate puts it off; the
# smallest has not got there in 400 steps, and its line still rises. Then the scale falls to almost nothing, in
# vain: the forward pass overflows, and no scale touches the forward pass. The weights are saved, since the scaler
# skips these steps, but a skipped step teaches nothing.
#
# The repair is one line: `cross_entropy` inside the region. It subtracts the largest score before exp, and
# autocast computes it in float32.

# %% tags=["machine"]
cured, lost, scales = classify(0.01, 4000, lambda z, y: F.cross_entropy(z, y, reduction="sum"), inside=True)
print(f"largest score {cured.max():.1f}, lost steps: {len(lost)}, scale at the end {scales[-1]:g}")
assert not len(lost) and cured.max() > limit

# %% [markdown]
# ## Did it pay?
#
# Memory fell, the story says. `verify_amp` runs a step with its autocast regions and without them.
#
# **Predict.** Half as many bytes for each number: does the memory that backward needs fall to one half?

# %% tags=["hide-output"]
for widths in ((8, 16, 32), (16, 32, 64)):
    training = Training(VARIANTS["float16"], seen, widths)
    verified = minamp.verify_amp(
        training.step, model=training.model, optimizer=training.optimizer, scaler=training.scaler, rounds=1
    )
    kept, everything = verified.saved_bytes, verified.all_bytes
    print(
        f"widths {widths}: kept for backward {kept.with_amp / 1e6:.2f} MB instead of "
        f"{kept.without_amp / 1e6:.2f}, {kept.ratio:.0%}; with weights, gradients, momentum {everything.ratio:.0%}"
    )
    copies = sum(2 * weight.numel() for weight in training.model.parameters())
    print(f"    half copies of all weights would be {copies / 1e6:.2f} MB")
    assert verified.on and 0.5 < kept.ratio < 0.6
print("outputs in float16:", ", ".join(verified.activations["float16"]))
print("outputs in float32:", ", ".join(verified.activations["float32"]))

# %% [markdown]
# Nearly. The printed list says what stays in float32: the loss and the boxes, and the upsampling between the two
# grids with all that it is joined to. Besides, autocast makes half *copies* of the weights and keeps them for
# backward, next to the float32 weights; the more weights for each pixel, the more they count. (On a CPU those of
# 8,192 weights and more lie in words of 4 bytes, which saves time.)
#
# `print(verified)` also shows times. On a CPU half arithmetic is emulated, so time can't fall there.
#
# ## Questions
#
# 1. The doctor calls `log_of_softmax` a warning and `softmax_in_half` an error. Repair only the second, with
#    `scores.float()` in `softmax_loss`. From which difference of scores on is the loss infinite now?
# 2. Somebody puts `min_scale=1.0` into the scaler of `softmax_half`. What changes, and what does not?
# 3. `softmax_half` was trained with a weight decay of 5e-4. Would a larger one cure it? What would you look at
#    to decide that in 50 steps?
# 4. Run the doctor on `half` and follow its repair. What does the next report say?
#
# ## Where it is in minamp, and where it comes from
#
# - [`minamp.demo.detector.VARIANTS`](../minamp/demo/detector.py) and
#   [`minamp.demo.detector.train`](../minamp/demo/detector.py): the twelve trainings in full.
# - [`minamp.detector.model.Detector`](../minamp/detector/model.py),
#   [`minamp.detector.loss.detection_loss`](../minamp/detector/loss.py),
#   [`minamp.detector.boxes.detect`](../minamp/detector/boxes.py): the detector;
#   [`minamp.scenes.scenes`](../minamp/scenes.py): its data.
# - [`minamp.clinic.rules.base.CODES`](../minamp/clinic/rules/base.py): what the doctor can find;
#   [`minamp.clinic.rules.softmax.softmax_in_half`](../minamp/clinic/rules/softmax.py): how it finds this one.
#   All of them, with their repairs: [what the doctor finds](pages/doctor.md).
# - [`minamp.verify.report.Report`](../minamp/verify/report.py): what `verify_amp` returns, the three indicators.
# - Ge et al., [YOLOX](https://arxiv.org/abs/2107.08430), 2021, section 2: the detector's plan. Micikevicius et
#   al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018, section 3.
