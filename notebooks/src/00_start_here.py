# %% [markdown]
# # 0. Start here
#
# You know the loop: forward, loss, backward, step. It works in float32, which spends 32 bits on each number.
# What happens if every number gets 16 bits? Why does the same loop break then, and which four lines repair
# it? This notebook shows it in one minute. The other eleven explain it.
#
# After this notebook you will be able to
#
# - say what the three ways of training in this notebook are: float32, float16 everywhere, mixed precision;
# - read a training run that turned into NaN, and find the operation where it began;
# - write the mixed-precision loop, and say what each of its lines is for;
# - find the notebook that answers your question.
#
# It needs about 20 minutes. Where you see **Predict**, stop and write your answer down first. The answer is
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

import matplotlib.pyplot as plt
import numpy as np

import minamp.nn.functional as F
from minamp import nn, optim, watch
from minamp.data import DataLoader, digits
from minamp.formats import bfloat16, float16, float32, format_of

BLUE, RED, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#666666"
plt.rcParams.update(
    {"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
)
print("minamp", minamp.__version__)

# %% [markdown]
# ## The task
#
# 5,000 real handwritten digits come with minamp: 4,000 to learn from, 1,000 to test on. The network has three
# layers. It gives ten *scores* to an image, one for each digit. The loss is the textbook formula: $e$ to the
# power of each score, divided by their sum, gives probabilities $p$, and the loss is $-\log p$ of the right
# digit:
#
# $$ \mathrm{loss} = -\log \frac{e^{s_\mathrm{right}}}{\sum_j e^{s_j}}. $$

# %%
train_set, test_set = digits()


def network():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


def textbook_loss(scores, target):
    e = scores.exp()
    p = e / e.sum(1, keepdim=True)
    return -minamp.gather(p, 1, target.reshape(-1, 1)).log().mean()


figure, panels = plt.subplots(1, 10, figsize=(9, 1.1), layout="constrained")
for digit, axes in enumerate(panels):
    axes.imshow(train_set.images[train_set.labels == digit][0, 0], cmap="gray_r")
    axes.set(title=digit, xticks=[], yticks=[])
plt.show()

# %% [markdown]
# *One image of each class; 28 x 28 pixels each.*
#
# Here is the training loop. If you know PyTorch, every line looks familiar. Two settings decide about
# precision: `weights` is the format in which weights and images are stored, and `region` is the format of the
# `autocast` block around the forward pass, if there is one. `scaling` switches the `GradScaler` on.


# %%
class Run:
    """One training: two passes over the digits, batches of 64, SGD with momentum."""

    def __init__(self, weights=float32, region=None, scaling=False, loss_function=textbook_loss, steps=124):
        minamp.manual_seed(0)
        self.losses, self.largest_scores, self.skipped = [], [], 0
        self.model = network().to(weights)
        optimizer = optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        scaler = minamp.GradScaler(enabled=scaling)
        batches = DataLoader(train_set, batch_size=64, shuffle=True, seed=0, drop_last=True)
        while len(self.losses) < steps:
            for x, y in batches:
                with minamp.autocast(dtype=region or float16, enabled=region is not None):
                    scores = self.model(x.to(weights))
                    loss = loss_function(scores, y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                self.skipped += scaler.step(optimizer) is None  # None: the step was skipped
                scaler.update()
                self.losses.append(loss.item())
                self.largest_scores.append(scores.max().item())
                if len(self.losses) == steps:
                    break
        with minamp.no_grad():
            scores = self.model(minamp.tensor(test_set.images).to(weights)).float().numpy()
        self.accuracy = (scores.argmax(1) == test_set.labels).mean() if np.isfinite(scores).all() else None

    @property
    def first_nan(self):
        """The first step, counted from 1, whose loss is NaN; None if there is none."""
        bad = np.isnan(self.losses)
        return int(np.argmax(bad)) + 1 if bad.any() else None

    def __str__(self):
        if self.first_nan:
            return f"NaN from step {self.first_nan} on"
        return f"reads {10 * self.accuracy:.0f} of 10 test digits"


# %% [markdown]
# ## The collapse in one minute
#
# Three runs of the same loop, from the same weights, over the same batches:
#
# - **float32**: every number has 32 bits;
# - **float16 everywhere**: weights, images, scores, loss, gradients, all with 16 bits;
# - **autocast + scaler**: weights in float32, the loop with the lines of mixed precision.
#
# **Predict.** Does the float16 run learn as well, learn slower, or break? If it breaks: at once, or after how
# many of the 124 steps?

# %% tags=["hide-output"]
full = Run()
broken = Run(weights=float16)
mixed = Run(region=float16, scaling=True)
for name, run in (("float32", full), ("float16 everywhere", broken), ("autocast + scaler", mixed)):
    print(f"{name:20}loss {run.losses[0]:.1f} at first; {run}")
assert full.first_nan is mixed.first_nan is None and 2 < broken.first_nan <= 40
assert full.accuracy > 0.85 and mixed.accuracy > 0.85
assert broken.losses[broken.first_nan - 2] < broken.losses[0] / 2  # it learned, until then

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
steps = np.arange(1, 41)
limit = watch.exp_limit(float16)
for run, name, color, style in (
    (full, "float32", GREY, "-"),
    (mixed, "autocast + scaler", BLUE, "--"),
    (broken, "float16 everywhere", RED, "-"),
):
    left.plot(steps, run.losses[:40], color=color, ls=style, lw=3 if run is broken else 1.5, label=name)
    right.plot(steps, run.largest_scores[:40], color=color, ls=style, lw=3 if run is broken else 1.5)
last = broken.first_nan - 1
left.plot(last, broken.losses[last - 1], "X", color=RED, ms=12)
right.plot(broken.first_nan, broken.largest_scores[last], "X", color=RED, ms=12)
right.axhline(limit, color=GREY, lw=0.8, ls=":")
right.text(40, limit + 0.3, "exp overflows float16 above this", ha="right")
left.set(xlabel="training step", ylabel="loss", title="The loss of a batch", ylim=(0, None))
right.set(xlabel="training step", ylabel="score", title="The largest of its 640 scores", ylim=(0, None))
left.legend(frameon=False)
plt.show()

# %% [markdown]
# *The first 40 steps. Left: all three losses fall together, until the float16 run ends at the cross: the next
# loss is NaN, and so are all that follow. Right: the largest score of each batch. The surer the network gets,
# the larger its scores; at the cross one of them passes the dotted line.*
#
# The float16 run did not learn badly. It learned well, and that is what broke it. minamp can name the
# operation where it began: inside `watch.first_bad_op`, every operation is checked, forward and backward.
#
# **Predict.** Which operation was it? Choose from: a matrix product, `exp`, `sum`, division, `log`.

# %% tags=["hide-output"]
with watch.first_bad_op() as bad:
    Run(weights=float16, steps=broken.first_nan)
op = bad.found
print(f"{op.op}, {op.phase}, in {op.dtype}: {op.count} of 640 results are {op.result}")
print(f"it was given {op.value:.0f}; {op.limit}")
nan = np.concatenate([p.detach().float().numpy().ravel() for p in broken.model.parameters()])
print(f"share of the weights that are NaN at the end: {np.isnan(nan).mean():.0%}")
assert (op.op, op.phase, op.result) == ("exp", "forward", "inf") and op.value > limit
assert format_of(float16).max == 65504

# %% [markdown]
# The largest float16 number is 65504, and $e$ to the power of the printed score is larger, so it becomes
# infinite. Infinity divided by infinity is NaN, "not a number". Anything that is computed with a NaN is NaN:
# the loss, then the gradients, then the weights. Nothing brings such a weight back.
#
# ## What exactly has to change?
#
# Six settings of the same run. Two of them leave everything in 16 bits and change something else: the formula
# (`F.cross_entropy` is equal on paper, but subtracts the largest score before `exp`), or the format (bfloat16
# has 16 bits too, but reaches as far as float32). Two leave the formula alone and use `autocast`, with and
# without the scaler.
#
# **Predict.** Which of the six break?

# %% tags=["hide-output"]
settings = {
    "float32": full,
    "float16 everywhere": broken,
    "float16 everywhere,\nF.cross_entropy": Run(weights=float16, loss_function=F.cross_entropy),
    "bfloat16 everywhere": Run(weights=bfloat16),
    "autocast": Run(region=float16),
    "autocast + scaler": mixed,
}
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, (name, run) in zip(panels.flat, settings.items(), strict=True):
    axes.plot(full.losses, color=GREY, lw=1)
    axes.plot(run.losses, color=RED if run.first_nan else BLUE, lw=2)
    if run.first_nan:
        axes.plot(run.first_nan - 2, run.losses[run.first_nan - 2], "X", color=RED, ms=11)
    axes.text(0.97, 0.9, run, transform=axes.transAxes, ha="right", color=RED if run.first_nan else BLUE)
    axes.set(title=name, ylim=(0, 3))
for axes in panels[1]:
    axes.set_xlabel("training step")
for axes in panels[:, 0]:
    axes.set_ylabel("loss")
plt.show()
broke = [name for name, run in settings.items() if run.first_nan]
print("broken:", ", ".join(broke))
assert broke == ["float16 everywhere"]
assert all(run.accuracy > 0.85 for run in settings.values() if not run.first_nan)

# %% [markdown]
# *The loss of six settings (thick) over that of float32 (thin, grey), and how many of ten test digits they read.
# A cross marks the last loss that is a number.*
#
# One of six breaks, and there is more than one cure. `autocast` is the one that works without changing your
# formulas: it knows for each operation whether float16 is good enough for it. Matrix products run in float16,
# `exp`, `sum` and `log` in float32.
#
# This run did not need the scaler, and float16 weights with a careful loss did well too. Do not take that as a
# rule: two more failures exist, and they are silent. Gradients that are too small for float16 become 0
# ([notebook 3](03_underflow.ipynb)), and weights in float16 swallow small updates ([notebook
# 5](05_master_weights.ipynb)).
#
# ## The loop, line by line
#
# Four lines in the loop are those of mixed precision; the scaler is made once, before it.
#
# ```python
# scaler = minamp.GradScaler()
# for x, y in batches:
#     with minamp.autocast(dtype=float16):      # 1
#         loss = loss_function(model(x), y)
#     optimizer.zero_grad()
#     scaler.scale(loss).backward()             # 2  instead of loss.backward()
#     scaler.step(optimizer)                    # 3  instead of optimizer.step()
#     scaler.update()                           # 4
# ```
#
# 1. Inside the region each operation runs in the format that suits it. The backward pass stays outside: the
#    gradient of an operation uses the format of that operation.
# 2. The scaler holds one number, the loss scale. The loss is multiplied by it, so all gradients arrive
#    multiplied by it. Small ones are lifted to where float16 can hold them.
# 3. `step` divides the gradients by the scale. If one is infinite or NaN, it skips this step: no weight
#    changes.
# 4. `update` halves the scale after a skipped step. After many good steps in a row it doubles it.
#
# **Predict.** In this loop, which of these are float16: the weights, the hidden values, the scores, the loss,
# the weight gradients?

# %% tags=["hide-output"]
minamp.manual_seed(0)
model = network()
scaler = minamp.GradScaler()
x, y = next(iter(DataLoader(train_set, batch_size=64, shuffle=True, seed=0)))
with minamp.autocast(dtype=float16):
    hidden = model[2](model[1](model[0](x)))
    scores = model(x)
    exponentials = scores.exp()
    loss = textbook_loss(scores, y)
scaled = scaler.scale(loss)
scaled.backward()
for name, t in {
    "images": x,
    "weights": model[1].weight,
    "hidden values": hidden,
    "scores": scores,
    "exp of scores": exponentials,
    "loss": loss,
    "loss times scale": scaled,
    "weight gradients": model[1].weight.grad,
}.items():
    print(f"{name:18}{t.dtype}")
assert (hidden.dtype, scores.dtype, loss.dtype) == (float16, float16, float32)
assert model[1].weight.dtype == model[1].weight.grad.dtype == scaled.dtype == float32
print(f"\nloss {loss.item():.1f}, scale {scaler.get_scale():g} = 2^{np.log2(scaler.get_scale()):.0f}")
assert scaler.get_scale() > format_of(float16).max

# %% [markdown]
# What lies between the layers is float16. The weights stay float32, and so do their gradients and all that
# has to do with the loss. The initial scale alone is more than float16 can hold, so it could not be
# otherwise. Why the gradients come back as float32 is in [notebook 2](02_autograd.ipynb).
#
# Lines 3 and 4 are easy to try: put an infinity into one gradient.

# %%
optimizer = optim.SGD(model.parameters(), lr=0.05)
before = [p.detach().clone() for p in model.parameters()]
model[1].weight.grad[0, 0] = float("inf")
answer, scale_before = scaler.step(optimizer), scaler.get_scale()
scaler.update()
same = all(
    np.array_equal(p.detach().numpy(), b.numpy()) for p, b in zip(model.parameters(), before, strict=True)
)
print(f"step was skipped: {answer is None}, all weights as before: {same}")
print(f"scale before update {scale_before:g}, after it {scaler.get_scale():g}")
assert answer is None and same and scaler.get_scale() == scale_before / 2

# %% [markdown]
# ## Why take the trouble?
#
# Half the bits are half the memory and half the traffic between memory and processor, and many GPUs have
# units made for float16 matrices. How much faster that is has to be measured on one ([notebook
# 9](09_gpu.ipynb)). Memory can be counted here: a training step must keep, until backward, what its gradients
# will need.
#
# **Predict.** For a small convolutional network: how much less is kept under `autocast`?


# %% tags=["hide-output"]
def kept(region):
    minamp.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(784, 10)),
    )
    with watch.saved_bytes() as saved, minamp.autocast(dtype=float16, enabled=region):
        F.cross_entropy(model(x), y)
    return saved


full_bytes, mixed_bytes = kept(False), kept(True)
print(
    f"kept for backward, batch of 64: float32 {full_bytes.total / 1e6:.1f} MB, autocast {mixed_bytes.total / 1e6:.1f} MB"
)
print(f"that is {mixed_bytes.total / full_bytes.total:.0%} of it; by operation, in kB:")
for op in mixed_bytes.by_op:
    print(f"  {op:20}{full_bytes.by_op.get(op, 0) / 1e3:8.0f}{mixed_bytes.by_op[op] / 1e3:8.0f}")
assert 0.45 < mixed_bytes.total / full_bytes.total < 0.65

# %% [markdown]
# What lies between the layers is halved. It is not exactly half in all, because what the loss keeps is float32
# both times, and the float16 copies of the weights come on top.
#
# ## The map
#
# Read them in this order; each can also be run alone.
#
# | | the question | in it |
# |---|---|---|
# | [1. Number formats](01_number_formats.ipynb) | Which numbers exist in 16 bits? | bits, steps, overflow, sums |
# | [2. Autograd](02_autograd.ipynb) | In which format do gradients come? | an engine in thirty lines |
# | [3. Underflow](03_underflow.ipynb) | Where do small gradients go? | a network that needs a loss scale |
# | [4. Softmax](04_softmax_instability.ipynb) | Why the collapse to NaN? | this collapse, step by step |
# | [5. Master weights](05_master_weights.ipynb) | Why does a float16 weight stop? | swallowed updates, and cures |
# | [6. Cast policy](06_cast_policy.ipynb) | How does autocast choose? | its table, and a changed line |
# | [7. Scale dynamics](07_scale_dynamics.ipynb) | How is the scale found? | start-up, balance, spikes |
# | [8. Detector](08_detector.ipynb) | And in a real training? | a failure and its diagnosis |
# | [9. GPU](09_gpu.ipynb) | When is float16 faster? | products and convolutions |
# | [10. Claims](10_claims.ipynb) | Is it true what people say? | seventeen claims, tested |
# | [11. Several processes](11_data_parallel.ipynb) | And if several share the work? | averages, skips, shares |
#
# Three failures, three cures:
#
# | you see | the reason | the cure | notebook |
# |---|---|---|---|
# | NaN | a number was too large for float16 | the cast policy of `autocast` | 4, 6 |
# | a loss that does not move | gradients were too small for float16 | loss scaling, `GradScaler` | 3, 7 |
# | a loss that falls slower than it should | updates were too small for a float16 weight | float32 weights | 5 |
#
# ## Questions
#
# 1. In `Run`, multiply the learning rate by a fifth. Does the float16 run still break? Earlier or later, and
#    why?
# 2. The float16 run had a loss of NaN at one step. Why are all losses after it NaN too, even though the next
#    batches are fine?
# 3. Would `GradScaler` alone, without `autocast`, have saved the float16 run? Look at where the first infinity
#    appeared.
#
# ## Where it is in minamp, and where it comes from
#
# - [`minamp.autocast.autocast`](../minamp/autocast.py) is the region, [`minamp.policy.POLICIES`](../minamp/policy.py)
#   what can be done to an operation inside it.
# - [`minamp.scaler.GradScaler`](../minamp/scaler.py): its docstring is the whole algorithm.
# - [`minamp.watch.bad_op.first_bad_op`](../minamp/watch/bad_op.py) and
#   [`minamp.watch.memory.saved_bytes`](../minamp/watch/memory.py):
#   the instruments used here.
# - [`minamp.demo.experiment.ARMS`](../minamp/demo/experiment.py): the three failures as one table; `make demo`
#   runs them.
# - Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018: section 3 has the
#   three cures, float32 weights (3.1), loss scaling (3.2) and float32 sums (3.3).
