# %% [markdown]
# # 3. Underflow
#
# Gradients are small, and float16 does not reach far down. How many of a real network's gradients does it lose?
# And what does that do to training? This notebook counts them, in a network that learns to read digits, moves
# them back into reach by hand, and ends with a network that learns nothing without that.
#
# After this notebook you will be able to
#
# - read a histogram of gradients, and say what float16 makes of each part of it;
# - say why the share of lost gradients grows while the loss falls;
# - scale a loss by hand, and say between which limits the scale must lie;
# - recognise a training that stands still because of underflow.
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

import matplotlib.pyplot as plt
import numpy as np

import minamp.nn.functional as F
from minamp import nn, optim, watch
from minamp.data import DataLoader, digits
from minamp.demo.figures import percent
from minamp.formats import bits, cast, float16, format_of

BLUE, RED, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#666666"
plt.rcParams.update(
    {"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
)
train_set, test_set = digits()
half = format_of(float16)
print("minamp", minamp.__version__)

# %% [markdown]
# ## One small number
#
# The smallest normal float16 number is $2^{-14}$. Below it lie the subnormal numbers, with fewer and fewer digits,
# down to $2^{-24}$. What is at most half of that, $2^{-25}$, is rounded to 0: it is *flushed*, or *underflows*.
#
# A cure suggests itself: multiply by a scale $S$ before the cast to float16, divide by it afterwards.
#
# **Predict.** Take $2 \cdot 10^{-8}$ and $S = 1024$. What does a cast to float16 give without the scale? With it?
# And does it matter whether the division by $S$ is done in float16 or in float32?

# %% tags=["hide-output"]
g, scale = np.float32(2e-8), 1024.0
plain = cast(g, float16)
scaled = cast(g * np.float32(scale), float16)
back_half = cast(np.float32(scaled) / np.float32(scale), float16)
back_single = np.float32(scaled) / np.float32(scale)
print(f"without the scale     {float(plain):.4g}    bits {bits(g, float16)}")
print(f"times {scale:g}            {float(scaled):.4g}  bits {bits(float(scaled), float16)}")
print(f"divided in float16    {float(back_half):.4g}")
print(f"divided in float32    {float(back_single):.4g}")
assert plain == back_half == 0 and abs(back_single / g - 1) < 0.002
assert (half.smallest_normal, half.smallest_subnormal, half.flush) == (2.0**-14, 2.0**-24, 2.0**-25)

# %% [markdown]
# The scale must be taken away in float32, or it was for nothing. The scale is a power of two, so multiplying by
# it changes no digit.
#
# ## The gradients of a real network
#
# Multiplying the *loss* by $S$ multiplies every gradient by $S$, by the chain rule. So one number moves all of
# them. To see whether that is needed, here is a small convolutional network. It trains in float32, so that nothing
# is lost, for eight passes over 4,000 digits (a pass is called an *epoch*). In six of them
# `watch.gradient_histograms` counts all gradients of some batches, by their power of two: those that travel
# between layers (*activation gradients*) and those that arrive at weights.
#
# **Predict.** Three numbers for the activation gradients: which share is exactly 0 in float32 already? Of the
# others, which share would be flushed in float16 in the first epoch? And in the eighth?


# %% tags=["hide-output", "machine"]
def convolutional():
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


EPOCHS, SCALES = (1, 2, 3, 4, 6, 8), (1, 8, 128, 1024, 2**15)
minamp.manual_seed(0)
model = convolutional()
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
batches = DataLoader(train_set, batch_size=64, shuffle=True, seed=0, drop_last=True)
seen = {}  # epoch -> (mean loss, histogram of activation gradients, histogram of weight gradients)
for epoch in range(1, EPOCHS[-1] + 1):
    histograms, losses = [], []
    for i, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if epoch in EPOCHS and i % 16 == 8:  # four batches of an epoch
            with watch.gradient_histograms(low=-80, high=16) as look:
                loss.backward()
            histograms.append((look.activations, look.weights))
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if histograms:
        activations, weights = (sum(h[1:], start=h[0]) for h in zip(*histograms, strict=True))
        seen[epoch] = np.mean(losses), activations, weights


def flushed(h, scale):
    """The share of the non-zero values that float16 flushes, if they are multiplied by `scale`, a power of two."""
    lost = h.counts[h.exponents + np.log2(scale) < -25].sum() + h.below
    return lost / (h.total - h.zeros)


print(f"{'activation gradients':22}{'zero in':>9}   share of the non-zero ones flushed at a scale of")
print(f"{'epoch':>5}{'loss':>9}{'float32':>17}   " + "".join(f"{scale:>8,}" for scale in SCALES))
for epoch, (loss, h, _) in seen.items():
    shares = "".join(f"{flushed(h, scale):8.1%}" for scale in SCALES)
    print(f"{epoch:5}{loss:9.3f}{h.zeros / h.total:17.0%}   {shares}")
    assert 0.5 < h.zeros / h.total < 0.85 and all(
        flushed(h, a) > flushed(h, b) for a, b in zip(SCALES, SCALES[1:], strict=False)
    )
first, last = seen[1], seen[8]
assert flushed(first[1], 1) < 0.1 and flushed(last[1], 1) > 1 / 3 and flushed(last[1], 2**15) < 0.2
assert flushed(last[1], 1) > 5 * flushed(last[1], 2**15) and last[0] < first[0] / 5


def top(h):
    """The power of two that all finite values of a histogram are below."""
    return h.exponents[h.counts > 0].max() + 1


above = max(top(h) for _, h, _ in seen.values()), max(top(h) for *_, h in seen.values())
print(
    f"\nall activation gradients are below 2^{above[0]}, all weight gradients below 2^{above[1]}; float16 reaches 2^16"
)
assert above[0] < above[1] < 8
scores = model(x).detach().requires_grad_()
F.cross_entropy(scores, y).backward()
by_hand = (F.softmax(scores, 1).detach().numpy() - np.eye(10)[y.numpy()]) / len(y)
assert np.allclose(scores.grad.numpy(), by_hand, atol=1e-7)  # the gradient for the scores is (p - y) / N

# %% [markdown]
# Most activation gradients are 0 before any format comes into it. Those are the places where ReLU was off, or that
# a maximum did not choose, and a cast does no harm to them. So a share of *all* values tells little. Look at the
# share of the non-zero ones.
#
# That share grows as the loss falls. The gradient of the loss for the scores is $(p - y)/N$: the probability
# minus 1 for the right digit, divided by the number of images. The better the network, the nearer $p$ is to $y$,
# and every gradient before it is a multiple of that. A network that has nearly learned its task is where float16
# loses most. At the other end there is room: nothing comes near the largest float16 number.

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 5), sharex=True, sharey=True, layout="constrained")
for axes, (epoch, (_, h, _)) in zip(panels.flat, seen.items(), strict=True):
    e, share = h.exponents, h.counts / (h.total - h.zeros)
    axes.bar(e[e < -25] + 0.5, share[e < -25], 1, color=RED)
    axes.bar(e[(e >= -25) & (e < -14)] + 0.5, share[(e >= -25) & (e < -14)], 1, color=BLUE, alpha=0.5)
    axes.bar(e[e >= -14] + 0.5, share[e >= -14], 1, color=BLUE)
    axes.axvline(-25, color=GREY, lw=1)
    axes.set(title=f"epoch {epoch}", xlim=(-56, 16), xticks=[-48, -36, -25, -14, 0, 16])
    axes.text(
        0.02,
        0.97,
        f"zero: {h.zeros / h.total:.0%} of all\nflushed: {flushed(h, 1):.0%} of\nthe others",
        transform=axes.transAxes,
        va="top",
        fontsize=9,
    )
for axes in panels[1]:
    axes.set_xlabel("power of two of the gradient")
for axes in panels[:, 0]:
    axes.set_ylabel("share of non-zero values")
plt.show()

# %% [markdown]
# *Activation gradients of the same network in six epochs, by power of two. Red: float16 flushes them to 0. Light
# blue: subnormal, kept with fewer digits. Blue: kept with all digits. Exact zeros are counted apart. The right end
# of the axis is where float16 ends. The hill moves to the left, and the space on its right stays unused.*
#
# This is the picture of figure 3 in the paper by Micikevicius et al. A loss scale of $2^k$ moves the whole hill
# $k$ places to the right: the table says how much of the red part that saves. It also says why a scale that was
# enough in the first epoch need not be enough in the eighth.
#
# ## Scaling by hand
#
# What limits the scale from above? The largest gradient times $S$ must stay below 65520, where float16 becomes
# infinite. Weight gradients are sums over a batch, so they are the larger ones, as the last line printed says.
#
# The network from above now runs a real float16 backward, under `autocast`, with the loss multiplied by $S$. The
# gradients are divided by $S$ in float32 and compared with those of a float32 run.
#
# **Predict.** Draw the error of a layer's weight gradient over $S$, from $2^{-8}$ to $2^{28}$. Is there one best
# scale?


# %% tags=["hide-output"]
def weight_gradients(scale, autocast):
    """The gradients of the four weights for 256 digits, with the loss multiplied by `scale` and the scale divided out."""
    for p in model.parameters():
        p.grad = None
    with minamp.autocast(dtype=float16, enabled=autocast):
        loss = F.cross_entropy(
            model(minamp.tensor(train_set.images[:256])), minamp.tensor(train_set.labels[:256])
        )
    (loss * scale).backward()
    return [p.grad.numpy() / np.float32(scale) for p in model.parameters() if p.ndim > 1]


def distance(a, b):
    """|a - b| / |b|, infinite if a value of a is."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b)) if np.isfinite(a).all() else np.inf


powers = np.arange(-8, 29)
exact = weight_gradients(1.0, autocast=False)
errors = np.array(
    [[distance(a, b) for a, b in zip(weight_gradients(2.0**k, True), exact, strict=True)] for k in powers]
)
names = ["first convolution", "second convolution", "first linear", "last linear"]
figure, panels = plt.subplots(1, 4, figsize=(9, 3.1), sharex=True, sharey=True, layout="constrained")
for axes, name, error in zip(panels, names, errors.T, strict=True):
    good = np.isfinite(error)
    axes.plot(powers[good], error[good], color=BLUE, lw=2)
    axes.axvspan(powers[~good][0] - 0.5, 28, color=RED, alpha=0.15, lw=0)
    axes.axvline(0, color=GREY, lw=0.8, ls="--")
    axes.set(title=name, yscale="log", ylim=(7e-4, 0.1), xlabel="power of two of S", xlim=(-8, 28))
    floor = error[good].min()
    assert error[0] > 3 * floor and (error[good] < 1.5 * floor).sum() >= 6  # a valley with a flat floor
    assert error[powers == 0] < 2 * floor
panels[0].set_ylabel("relative error of the gradient")
plt.show()
usable = powers[np.isfinite(errors).all(1) & (errors < 1.5 * errors.min(0)).all(1)]
assert len(usable) >= 5
print(
    "every layer is within 1.5 times of its smallest error at each scale of a wide range: several powers of two"
)

# %% [markdown]
# *Error of the weight gradients of four layers over the loss scale S, both axes logarithmic. Dashed: S = 1, no
# scaling. Red: an infinite gradient in this layer. On the left the error comes from gradients that were flushed or
# lost digits; the floor comes from the rounding of float16 itself, which no scale removes.*
#
# There is no best scale but a valley with a flat floor. Inside it every scale is as good as any other: a power of
# two moves numbers without touching their digits. Outside it, too small costs accuracy silently, and too large
# gives infinities, which nobody can miss. So the rule is: as large as possible, and if an infinity appears, skip
# that step and take half. That is what `GradScaler` does ([notebook 7](07_scale_dynamics.ipynb)).
#
# Look at the dashed line too. In the last epoch more than a third of the non-zero activation gradients is flushed at
# $S = 1$ (the table says how many), and yet the weight gradients are nearly as good there as they get: what is flushed
# are the smallest ones, and they add little. For this network, at this point, scaling buys little.
#
# ## A plateau, lost and regained
#
# Here is a network that learns with it and does not without: seven hidden layers, and small initial weights, with a
# standard deviation of 0.01. Each layer multiplies the gradients by small numbers on their way back. `autocast` is
# on, and the weights are float32.
#
# **Predict.** Which share of the weight gradients is lost in the first step, without scaling? With $S = 8$, 128,
# 1024? For which of them will the network learn, and what happens at $S = 2^{24}$?


# %% tags=["hide-output", "machine"]
def deep():
    sizes = [784] + [192] * 7 + [10]
    layers = [nn.Flatten()]
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), nn.ReLU()]
        nn.init.normal_(layers[-2].weight, std=0.01)
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers[:-1])


def train(scale=1.0, autocast=True, scaler=None, steps=124):
    """Losses of `steps` batches, the weight gradients of the first, and the share of zeros among those of each.

    The scale is applied by hand, or by a GradScaler.
    """
    minamp.manual_seed(0)
    model = deep()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    losses, zeros, first = [], [], None
    while len(losses) < steps:
        for x, y in DataLoader(train_set, batch_size=64, shuffle=True, seed=len(losses), drop_last=True):
            with minamp.autocast(dtype=float16, enabled=autocast):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            if scaler:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                (loss * scale).backward()
                gradients = [p.grad.numpy() for p in model.parameters() if p.ndim > 1]
                zeros.append(np.mean(np.concatenate([g.ravel() for g in gradients]) == 0))
                first = first or [g.copy() for g in gradients]
                for p in model.parameters():
                    p.grad = p.grad / scale  # in float32
                optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps or np.isnan(losses[-1]):
                return np.array(losses), first, np.array(zeros)


def left_plateau(losses):
    """The first step, counted from 1, with a loss below 2.2; None if there is none."""
    return int(np.argmax(losses < 2.2)) + 1 if (losses < 2.2).any() else None


reference, gradients, _ = train(autocast=False)
dynamic = minamp.GradScaler()
runs = {f"S = {s:g}": train(s) for s in (1.0, 8.0, 128.0, 1024.0)}
runs["S = 2^24"] = train(2.0**24)
runs["GradScaler"] = train(scaler=dynamic)
print(
    f"guessing has a loss of log 10 = {np.log(10):.2f}; float32 is below 2.2 at step {left_plateau(reference)}\n"
)


def lost(first):
    """The share of the non-zero weight gradients of the float32 run that are 0 in `first`."""
    gone = sum(((a == 0) & (b != 0)).sum() for a, b in zip(first, gradients, strict=True))
    return gone / sum((b != 0).sum() for b in gradients)


print(f"{'':12}{'first step: lost':>17}{'infinite':>11}   then")
for name, (losses, first, _) in runs.items():
    infinite = 0.0 if first is None else np.concatenate([~np.isfinite(g.ravel()) for g in first]).mean()
    shares = f"{'':28}" if first is None else f"{percent(lost(first)):>17}{percent(infinite):>11}"
    if np.isnan(losses[-1]):
        outcome = f"loss is NaN from step {len(losses)} on"
    else:
        outcome = (
            f"below 2.2 from step {left_plateau(losses)} on" if left_plateau(losses) else "never below 2.2"
        )
    print(f"{name:12}{shares}   {outcome}")
print("\nshare of zeros among all weight gradients, float32's own zeros included:")
print(f"{'step':12}" + "".join(f"{step:8}" for step in (1, 10, 20, 30, 60, 120)))
for name in ("S = 1", "S = 8", "S = 128"):
    print(f"{name:12}" + "".join(f"{runs[name][2][step - 1]:8.0%}" for step in (1, 10, 20, 30, 60, 120)))
print(f"\nthe scaler: started at {2**16:,}, ended at {dynamic.get_scale():,.0f}")

assert lost(runs["S = 1"][1]) > 0.9 and left_plateau(runs["S = 1"][0]) is None
assert np.isnan(runs["S = 2^24"][0][-1]) and dynamic.get_scale() <= 2**16
for name in ("S = 8", "S = 128", "S = 1024", "GradScaler"):
    assert left_plateau(runs[name][0]) <= 2 * left_plateau(reference)
assert 0.8 < lost(runs["S = 8"][1]) < 1
zeros = {name: runs[name][2] for name in ("S = 1", "S = 8", "S = 128")}
assert zeros["S = 1"].min() > 0.9 and zeros["S = 8"][29] < zeros["S = 8"][0] - 0.2

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, (name, (losses, *_)) in zip(panels.flat, runs.items(), strict=True):
    bad = np.isnan(losses[-1])
    stuck = left_plateau(losses) is None
    steps = np.arange(1, len(losses) + 1)
    axes.plot(np.arange(1, len(reference) + 1), reference, color=GREY, lw=1)
    axes.plot(steps, losses, color=RED if stuck else BLUE, lw=2)
    if bad:
        axes.plot(steps[-2], losses[-2], "X", color=RED, ms=11)
        axes.text(8, losses[-2], f"NaN from step {len(losses)} on", color=RED, va="bottom")
    axes.axhline(np.log(10), color=GREY, lw=0.8, ls=":")
    axes.set(title=name, ylim=(1.4, 2.6))
for axes in panels[1]:
    axes.set_xlabel("training step")
for axes in panels[:, 0]:
    axes.set_ylabel("loss")
plt.show()

# %% [markdown]
# *Loss of the deep network under autocast with six choices of the loss scale (thick), over that of float32 (thin,
# grey). Dotted: the loss of guessing. Red: the network learns nothing, or its weights become NaN (cross: the last
# loss that is a number).*
#
# Without scaling the loss lies on the dotted line, and nothing in it says why: no NaN, no infinity, no error. The
# network seems to be a bad one. Adam moves a weight by its gradient's direction, however small the gradient is, as
# long as it is well above eps (1e-8), but a gradient of 0 has no direction.
#
# $S = 8$ is enough, although the first step still loses almost everything. The list of zeros shows how. Adam
# moves each weight whose gradient is not 0, by about the learning rate. The few that move make the next gradients
# larger, so that more survive. $S = 1$ never gets that far. And $S = 2^{24}$ is too much: the first step has
# infinite gradients, the division by $S$ leaves them infinite, and Adam makes NaN of the weights.
# The scaler would have skipped that step.
#
# ## Questions
#
# 1. The loss is a mean over N images, so the gradient for a score is $(p - y)/N$. Let $p - y$ be 0.001. From which
#    batch size on is it flushed without scaling? Is it the batch size's fault?
# 2. A network needs $S \ge 2^{10}$ in one layer, and another layer overflows at $S = 2^{8}$. What does the scaler
#    do? What could you do?
# 3. bfloat16 has 7 mantissa bits and the exponents of float32. Where would its red part begin in the histograms?
#    Does it need loss scaling?
# 4. Use `optim.SGD` in place of Adam in `train`, with float32. Does the deep network leave the plateau? Why is
#    Adam's way of using gradients so sensitive to an exact 0?
#
# ## Where it is in minamp, and where it comes from
#
# - [`minamp.watch.numbers.gradient_histograms`](../minamp/watch/numbers.py) and
#   [`minamp.watch.numbers.tensor_stats`](../minamp/watch/numbers.py): count your own network's gradients.
# - [`minamp.scaler.GradScaler`](../minamp/scaler.py) scales; dividing happens in float32 in its `unscale_`.
# - [`minamp.demo.experiment.deep_mlp`](../minamp/demo/experiment.py) is the deep network,
#   [`minamp.demo.acts.act3`](../minamp/demo/acts.py) tells its story in a terminal (`make demo`).
# - Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018, section 3.2 and figure
#   3: loss scaling. Zhao et al., [Adaptive Loss Scaling for Mixed Precision
#   Training](https://arxiv.org/abs/1910.12385), 2019: one scale for each layer.
