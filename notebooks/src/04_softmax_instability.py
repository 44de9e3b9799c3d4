# %% [markdown]
# # 4. How a loss becomes NaN
#
# A network trains well in float16, its loss falls step by step, and then it is NaN and stays NaN. Which
# operation did it, and why just when things went well?
#
# After this notebook you will be able to
#
# - say from which logit on a softmax written as in the textbook breaks, in each format;
# - write masks, logarithms of probabilities and normalisations that survive float16;
# - find the first operation of a training step that turned finite numbers into infinite ones;
# - say why a loss scaler can't repair it, and what does.
#
# It needs about 60 minutes and the first notebook, on number formats. Where you see **Predict**, stop and
# write your answer down first. The answer is the output of the next cell, folded away where the viewer can
# do that.
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

import bisect

import matplotlib.pyplot as plt
import numpy as np

import minamp.nn.functional as F
from minamp import nn, optim, watch
from minamp.data import DataLoader, digits
from minamp.formats import bfloat16, cast, float16, float32, format_of, neighbours
from minamp.record import observe

THREE = [format_of(f) for f in (float16, bfloat16, float32)]
BLUE, RED, GREY = "#0072b2", "#d55e00", "#666666"
plt.rcParams.update({"figure.dpi": 80, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
print("minamp", minamp.__version__)

# %% [markdown]
# ## exp leaves the format early
#
# A classifier ends with one number per class, the *logits* $z_i$. Softmax makes probabilities of them:
#
# $$ p_i = \frac{e^{z_i}}{\sum_j e^{z_j}}. $$
#
# The largest half number, 65504, sounds large, but $e^z$ gets there soon: it becomes infinite where it reaches
# 65520, half a step above the largest number.
#
# **Predict.** What is the largest logit whose exp is finite in float16? In bfloat16? In float32? And what is
# the textbook softmax of the two logits 12 and 0 in float16?

# %% tags=["hide-output"]
for f in THREE:
    last = watch.exp_limit(f)
    after = neighbours(last, f)[1]
    e = minamp.tensor([last, after], dtype=f.dtype).exp()
    print(f"{f.name:9} exp({last:.8g}) = {e[0].item():<12.6g} exp({after:.8g}) = {e[1].item()}")
    assert np.isfinite(e[0].item()) and np.isinf(e[1].item())

e = minamp.tensor([12.0, 0.0], dtype=float16).exp()
p = e / e.sum()
print(f"\ntextbook softmax of 12 and 0: exp {e.tolist()}, sum {e.sum().item()}, p {p.tolist()}")
assert np.isnan(p[0].item()) and p[1].item() == 0

# %% [markdown]
# Infinity divided by infinity is NaN, *not a number*. 12 against 0 is nothing extreme: it is a network that
# is sure. bfloat16 has the exponent of float32, so it has nearly its limit; what it lacks is digits, not
# range.
#
# ## The sum is infinite before any exp is
#
# **Predict.** Ten classes, all logits equal: up to which logit does the textbook softmax work in float16? And
# with a thousand classes? With 70,000, the words of a language model?


# %% tags=["hide-output"]
def largest_logit(n):
    """The largest positive half z such that the sum of n times exp(z) is finite in float16, or None."""
    grid = np.arange(0, 0x4A00, dtype=np.uint16).view(np.float16)  # every half from 0 to 12, in order

    def overflows(z):
        return np.isinf(minamp.full((n,), float(z), dtype=float16).exp().sum().item())

    i = bisect.bisect_left(grid, True, key=overflows)
    return float(grid[i - 1]) if i else None


print(f"{'classes':>8}{'largest equal logit':>21}{'ln(65520 / n)':>15}")
for n in (1, 2, 3, 10, 100, 1000, 10_000, 70_000):
    z, rule = largest_logit(n), np.log(65520 / n)
    print(f"{n:8,}{z if z is not None else 'not even 0':>21.9}{rule:15.4f}")
    # exp is rounded too, by at most 2^-11 of it, so the rule holds to that and to one step of the logit
    assert (z is None) == (rule < 0) and (z is None or abs(z - rule) < 2**-11 + neighbours(z, float16)[1] - z)

# %% [markdown]
# The rule is $n e^z < 65520$. Many small terms fill the format as one large term does.
#
# The usual repair subtracts the largest logit first. It changes nothing on paper, because numerator and
# denominator get the same factor:
#
# $$ p_i = \frac{e^{z_i - \max z}}{\sum_j e^{z_j - \max z}}. $$
#
# Now no exp is above 1. But the last line of the table stays: 70,000 terms of at most 1 can add up to more than
# 65504. So a good softmax does two things: it shifts, and it keeps its sum in float32.

# %%
z = minamp.zeros(70_000, dtype=float16)
e = (z - z.max()).exp()
print("shifted, sum stored in float16: ", e.sum().item(), "-> p", (e / e.sum())[0].item())
print("minamp.softmax, sum in float32: ", f"{minamp.softmax(z, 0)[0].item():.4g}", f"(true {1 / 70_000:.4g})")
assert (e / e.sum())[0].item() == 0 and abs(minamp.softmax(z, 0)[0].item() * 70_000 - 1) < 0.01

# %% [markdown]
# Here are six settings: the textbook formula and `minamp.softmax`, in three formats. The logits are $x$ for
# one class and 0 for nine others, and the figure shows how wrong the two probabilities are, against float64.
#
# **Predict.** Which of the six panels have a region of NaN, and where does it begin? In which panel does the
# unlikely class lose its probability without any NaN?


# %% tags=["hide-output"]
def textbook_softmax(z, dim):
    e = z.exp()
    return e / e.sum(dim, keepdim=True)


def lost(axes, x, where, color, alpha):
    """Shade the stretches of x where the condition holds."""
    axes.fill_between(
        x, 0, 1, where=where, color=color, alpha=alpha, lw=0, transform=axes.get_xaxis_transform()
    )


x = np.arange(0, 92, 0.25)
logits = np.zeros((len(x), 10))
logits[:, 0] = x
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
print(f"{'':18}{'':10}{'NaN from x =':>14}{'unlikely p is 0 from x =':>26}")
for row, (name, function) in zip(
    panels, (("textbook", textbook_softmax), ("minamp.softmax", minamp.softmax)), strict=True
):
    for axes, f in zip(row, THREE, strict=True):
        z = minamp.tensor(logits, dtype=f.dtype)
        shifted = np.exp(z.double().numpy() - z.double().numpy().max(1, keepdims=True))
        true = shifted / shifted.sum(1, keepdims=True)  # of the logits as the format stores them
        p = function(z, 1).numpy().astype(np.float64)
        nan, zero = np.isnan(p[:, 0]), p[:, 1] == 0
        first = [f"{x[np.argmax(mask)]:g}" if mask.any() else "never" for mask in (nan, zero & ~nan)]
        print(f"{name:18}{f.name:10}{first[0]:>14}{first[1]:>26}")
        if name == "textbook":
            assert x[np.argmax(nan)] - 0.25 <= watch.exp_limit(f) <= x[np.argmax(nan)]
        else:
            assert not nan.any() and zero.any() == (f.name == "float16")
        error = np.abs(p - true) / true
        axes.plot(x, np.maximum(error[:, 0], 1e-9), color=BLUE, lw=1, label="likely class")
        axes.plot(x, np.maximum(error[:, 1], 1e-9), color=RED, lw=1, ls="--", label="unlikely class")
        lost(axes, x, nan, RED, 0.2)
        axes.set(title=f"{name}, {f.name}", yscale="log", ylim=(3e-10, 4), xlim=(0, 92))
for axes in panels[1]:
    axes.set_xlabel("largest logit x, others 0")
for axes in panels[:, 0]:
    axes.set_ylabel("relative error")
panels[0, 2].legend(frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# *Relative error of softmax for the logits (x, 0, ..., 0), against float64. Shaded: NaN. Errors below 1e-9
# are drawn at the bottom edge; an error of 1 means that the probability is 0.*
#
# Upper row: every format has its cliff. Lower row: no cliff. But in float16 the unlikely class climbs to an
# error of 1: its probability has fallen below $2^{-25}$ and is stored as 0. The panel of bfloat16 shows the
# opposite bargain: never 0 up to here, and three bits fewer everywhere.
#
# A probability of 0 does no harm until somebody takes its logarithm.
#
# ## The logarithm of a probability
#
# The loss of a classifier is the cross-entropy, $-\log p_t$ of the true class $t$. In one formula,
#
# $$ -\log p_t = \log \sum_j e^{z_j - \max z} - (z_t - \max z), \qquad
#    \frac{\partial(-\log p_t)}{\partial z_i} = p_i - [i = t], $$
#
# where no probability is ever stored. `F.cross_entropy` computes that. The obvious way is two ops, softmax
# and then log, with a half number between them.
#
# **Predict.** Two classes, in float16. The true class is *behind* by 5, 12, 17 and 20: what do the two ways give
# for the loss and for its gradient? And if it is *ahead* by 9?


# %% tags=["hide-output"]
def two_ops(z, target):
    p = minamp.softmax(z, 1)
    return -minamp.gather(p, 1, target.reshape(-1, 1)).log().reshape(-1).sum()


def one_op(z, target):
    return F.cross_entropy(z, target, reduction="sum")


def loss_and_gradients(way, gaps, f):
    """Per gap (the other logit minus the true class's): loss and gradient of the true class's logit."""
    rows = []
    for gap in gaps:
        z = minamp.tensor([[0.0, gap]], dtype=f, requires_grad=True)
        loss = way(z, minamp.tensor([0]))
        loss.backward()
        rows.append((loss.item(), z.grad[0, 0].item()))
    return np.array(rows).T


gaps = [5.0, 11.0, 12.0, 16.75, 17.0, 17.25, 17.5, 20.0, -5.0, -8.0, -9.0]
split, fused = (loss_and_gradients(way, gaps, float16) for way in (two_ops, one_op))
print(f"{'behind by':>10}{'log(softmax)':>15}{'gradient':>10}{'cross_entropy':>16}{'gradient':>10}")
for gap, *numbers in zip(gaps, *split, *fused, strict=True):
    print(f"{gap:10g}{numbers[0]:15.6g}{numbers[1]:10.3g}{numbers[2]:16.6g}{numbers[3]:10.3g}")
assert np.isfinite(split[1, 1]) and np.isnan(split[1, 2:8]).all() and abs(split[0, 2] - 12) < 0.01
assert (split[0, 3:6] == float(cast(np.log(2.0**24), float16))).all()
assert np.isinf(split[0, 6:8]).all() and fused[0, 7] == 20 and fused[1, 7] == -1
assert split[0, 10] == 0 == split[1, 10] and fused[0, 10] > 0 > fused[1, 10]

# %% [markdown]
# Four accidents.
#
# - Behind by 12: the loss is right, and its gradient is not a number. The gradient of the logarithm is $1/p$,
#   which is above 65504 as soon as exp of the gap is. It is the limit of 11.09 once more.
# - Behind by about 17: $p$ is the smallest half number, $2^{-24}$, for a whole range of gaps, so the loss is stuck
#   at $24 \ln 2$.
# - Further behind: $p$ is 0, and the loss infinite. The worst predictions, from which most could be learned,
#   destroy the network.
# - Ahead by 9: $p$ is rounded to exactly 1. Loss 0, gradient 0. This one is silent: the example takes no more
#   part in training, though there would be something to learn.
#
# The fused form has none of them. Here are all gaps, for both ways and the three formats.

# %%
gaps = np.arange(-24, 24.1, 0.5)
EDGE = gaps[loss_and_gradients(one_op, gaps, float32)[1] == 0].max()  # ahead by more: gradient 0
truth = np.logaddexp(0, gaps), 1 / (1 + np.exp(-gaps))
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for row, (name, way) in zip(panels, (("log(softmax)", two_ops), ("cross_entropy", one_op)), strict=True):
    for axes, f in zip(row, THREE, strict=True):
        loss, gradient = loss_and_gradients(way, gaps, f.dtype)
        for y in truth:
            axes.plot(gaps, y, color=GREY, lw=0.8, ls=":")
        for y, color, style, label in ((loss, BLUE, "-", "loss"), (-gradient, RED, "--", "gradient")):
            good = np.isfinite(y) & (y > 0)
            axes.plot(gaps, np.where(good, y, np.nan), color=color, ls=style, lw=1.8, label=label)
        lost(axes, gaps, ~np.isfinite(gradient), RED, 0.25)
        lost(axes, gaps, np.isfinite(gradient) & (gradient == 0), GREY, 0.25)
        axes.set(title=f"{name}, {f.name}", yscale="log", ylim=(1e-11, 1e3))
        if name == "cross_entropy":
            assert np.isfinite(loss).all() and np.isfinite(gradient).all()
            assert gaps[gradient == 0].max() == EDGE
        elif f.name == "float16":
            assert gaps[np.argmax(~np.isfinite(gradient))] == 11.5 and gaps[gradient == 0].max() == -8.5
        elif f.name == "bfloat16":
            assert np.isfinite(gradient).all() and gaps[gradient == 0].max() > -8.5
for axes in panels[1]:
    axes.set_xlabel("true class behind by")
for axes in panels[:, 0]:
    axes.set_ylabel("value")
panels[0, 0].legend(frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# *Loss and gradient (without its sign) of a two-class example, by how far the true class is behind; on the left
# it is ahead. Dotted: the truth. Red: the gradient is not finite. Grey: it is exactly 0.*
#
# bfloat16 with two ops has no red zone here, but the widest grey one: with 7 mantissa bits the number just below
# 1 is further away, so $p$ becomes 1 sooner. The lower row is the same in all formats: the grey zone that remains
# is the one of float32, in which the sum is computed, and in which 1 plus something small enough is 1.
#
# ## Masks
#
# Attention hides some positions: a large negative number is added to their scores, so that their exp is 0. The
# number found in many programs is -1e9.
#
# **Predict.** In float16, what is -1e9? Softmax of three scores, of which one is hidden? Of three that are all
# hidden, as in a padded row? And is the largest negative number, -65504, a safe mask?

# %% tags=["hide-output"]
scores = minamp.tensor([-16.0, -17.0, -20.0], dtype=float16)
print("-1e9 in float16 is", float(cast(np.float64(-1e9), float16)), "\n")
print(f"{'mask':>9}  {'how':8}{'one hidden':^24}{'all hidden':^24}")
found = {}
for mask in (-1e9, -65504.0, -1e4):
    for how in ("added", "put in"):
        rows = []
        for hidden in ([False, False, True], [True, True, True]):
            if how == "added":
                z = scores + minamp.tensor(np.where(hidden, mask, 0.0), dtype=float16)
            else:
                z = minamp.where(minamp.tensor(hidden), minamp.tensor(mask, dtype=float16), scores)
            rows.append(minamp.softmax(z, 0).numpy())
        found[mask, how] = np.isfinite(rows[1]).all()
        print(f"{mask:9g}  {how:8}" + "".join(f"{'  '.join(f'{v:.3f}' for v in row):^24}" for row in rows))
        assert np.isfinite(rows[0]).all()
query = minamp.ones(1, 3, dtype=float16)
nothing = minamp.zeros(1, 1, dtype=minamp.bool)
print(
    "\nattention with everything hidden:",
    F.scaled_dot_product_attention(query, query, query, nothing).tolist(),
)

# %% [markdown]
# -1e9 is minus infinity. With one position hidden nothing happens: exp of minus infinity is 0, as wanted. With
# all of them hidden the shift computes $-\infty - (-\infty)$, and that is NaN.
#
# -65504 is safe if it is *put in place of* the score, and not if it is *added*: a score of -16 takes the sum half
# a step below the largest negative number. -1e4 is safe both ways, and small enough: its exp is 0. Safe means
# that a row with nothing to see gets the mean over everything hidden. minamp's attention gives 0 for such a row,
# which says better what is meant. And `masked_fill` refuses a number that its format can't hold:

# %%
assert found == {
    (-1e9, "added"): False,
    (-1e9, "put in"): False,
    (-65504.0, "added"): False,
    (-65504.0, "put in"): True,
    (-1e4, "added"): True,
    (-1e4, "put in"): True,
}
for score in (-15.0, -16.0):
    total = minamp.tensor(score, dtype=float16) + minamp.tensor(-65504.0, dtype=float16)
    print(f"{score:g} + -65504 = {total.item():g}")
try:
    scores.masked_fill(scores < -16.5, -1e9)
except RuntimeError as error:
    print(error)
else:
    raise AssertionError("masked_fill took -1e9 for float16")

# %% [markdown]
# ## LayerNorm: zeros, and no NaN
#
# LayerNorm divides a row by its standard deviation:
#
# $$ y = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}}, \qquad \sigma^2 = \frac{1}{D} \sum_k (x_k - \mu)^2. $$
#
# In float16 the sum of $D$ squares is near $D \sigma^2$ and overflows from a standard deviation of about
# $\sqrt{65504 / D}$ on.
#
# **Predict.** $D = 1024$: which standard deviation is that? What is the output then: infinite, NaN, or
# something else?

# %% tags=["hide-output"]
rng = np.random.default_rng(0)
print(f"limit for D = 1024: {np.sqrt(65504 / 1024):.2f}\n")
print(f"{'std of row':>11}{'NaN or inf':>12}{'rows all 0':>12}{'same, F.layer_norm':>20}")
for std in (4, 7, 8, 9, 16):
    x = minamp.tensor(rng.normal(0, std, (100, 1024)), dtype=float16, requires_grad=True)
    y = minamp.naive_half_layer_norm(x)
    (y * minamp.tensor(rng.normal(size=y.shape), dtype=float16)).sum().backward()
    naive, good = y.detach().numpy(), F.layer_norm(x, (1024,)).detach().numpy()
    zero, zero_good = (float((y == 0).all(1).mean()) for y in (naive, good))
    print(f"{std:11}{int((~np.isfinite(naive)).sum()):12}{zero:12.0%}{zero_good:20.0%}")
    assert np.isfinite(naive).all() and zero_good == 0 and (zero == (std > 8) or std == 8)
    assert std <= 8 or not x.grad.numpy().any()

# %% [markdown]
# The variance is infinite, and a number divided by infinity is 0. So the row becomes zeros: no NaN in the loss, no
# inf in the output, nothing that an alarm for such values would see. Everything the row said is gone, and the
# gradient through it as well.
#
# A look *inside* shows it. Here is the formula in single ops, under `watch.first_bad_op`, which checks every
# result:

# %%
x = minamp.tensor(rng.normal(0, 16, (4, 1024)), dtype=float16)
with watch.first_bad_op() as bad:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).sum(-1, keepdim=True) / 1024
    y = centred / (variance + 1e-5).sqrt()
print(bad)
print("largest output:", y.abs().max().item())
assert bad.found.op == "sum" and y.abs().max().item() == 0

# %% [markdown]
# The same formula has a lower end too. The figure shows how large the output is, which should be 1, for rows of
# all sizes.

# %%
stds = np.exp2(np.arange(-16, 7.1, 0.5))
figure, panels = plt.subplots(1, 4, figsize=(9, 2.9), sharey=True, layout="constrained")
for axes, d in zip(panels, (64, 256, 1024, 4096), strict=True):
    x = minamp.tensor(stds[:, None] * np.random.default_rng(d).normal(size=(len(stds), d)), dtype=float16)
    rms = [
        np.sqrt((y.numpy().astype(np.float64) ** 2).mean(1))
        for y in (minamp.naive_half_layer_norm(x), F.layer_norm(x, (d,)))
    ]
    limit = np.sqrt(65504 / d)
    axes.plot(stds, rms[0], color=RED, lw=1.8, label="all in float16")
    axes.plot(stds, rms[1], color=BLUE, lw=1.2, ls="--", label="F.layer_norm")
    axes.axvline(limit, color=GREY, lw=0.8, ls=":")
    axes.set(title=f"D = {d}", xscale="log", xlabel="std of the row", ylim=(-0.05, 1.4))
    assert (rms[0][stds > 1.2 * limit] == 0).all() and (np.abs(rms[1][stds > 0.1] - 1) < 1e-3).all()
panels[0].set_ylabel("rms of the output")
panels[0].legend(frameon=False, loc="upper left")
plt.show()
stall = rms[0][(stds >= 1) & (stds <= 4)]
print("D = 4096, rms of the output for rows of std 1 to 4:", np.round(stall, 3))
constant = minamp.full((1, 64), 3.0, dtype=float16)
for eps in (1e-5, 1e-8):
    print(f"a constant row, eps = {eps:g}:", minamp.naive_half_layer_norm(constant, eps)[0, 0].item())
assert (np.abs(stall - 1) > 0.02).any() and np.isnan(
    minamp.naive_half_layer_norm(constant, 1e-8)[0, 0].item()
)

# %% [markdown]
# *Size of LayerNorm's output against the size of its input row, for four widths D. Dotted: the limit
# $\sqrt{65504/D}$, a little above which the output is exactly 0.*
#
# On the left both curves fall in the same way: there $\varepsilon = 10^{-5}$ is larger than the variance, as
# everywhere. That is why $\varepsilon$ must not be smaller: 1e-8 is 0 in float16, and a constant row becomes 0
# divided by 0.
#
# At D = 4096 something is wrong well before the limit: the printed sizes are not 1. The sum of squares stalls, as
# sums do in the notebook on number formats. `F.layer_norm` has neither fault, with the same half input and
# output, because only its statistics are kept in float32.
#
# ## A collapse, operation by operation
#
# Now the real thing. A network of three layers reads handwritten digits, with SGD at a learning rate of 0.05.
# Weights, data and every operation are float16, and the loss is the textbook formula.
#
# **Predict.** For how many of the 62 steps will it work? Will the loss rise before it breaks? Which operation
# will be the first to give a bad number?


# %% tags=["hide-output"]
def network():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


def textbook_cross_entropy(z, target):
    p = textbook_softmax(z, 1)
    return -minamp.gather(p, 1, target.reshape(-1, 1)).log().mean()


def train(loss_function, weights=float32, autocast=False, lr=0.05, seed=0, after_nan=4):
    """One pass over the digits; per step the loss and the largest logit. Ends some steps after the first NaN."""
    minamp.manual_seed(seed)
    model = network().to(weights)
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, logits = [], []
    for x, y in DataLoader(TRAIN, 64, shuffle=True, seed=seed, drop_last=True):
        with minamp.autocast(dtype=float16, enabled=autocast):
            z = model(x.to(weights))
            loss = loss_function(z, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        logits.append(z.float().max().item())
        if np.isnan(losses).sum() > after_nan:
            break
    return np.array(losses), np.array(logits)


TRAIN = digits("train")
losses, logits = train(textbook_cross_entropy, weights=float16)
collapse = int(np.argmax(np.isnan(losses))) + 1
print(f"{'step':>4}{'loss':>9}{'largest logit':>15}")
for step, (loss, logit) in enumerate(zip(losses, logits, strict=True), 1):
    print(f"{step:4}{loss:9.3f}{logit:15.3f}")
assert np.isnan(losses[collapse - 1 :]).all() and logits[collapse - 1] > watch.exp_limit(float16)
assert losses[collapse - 2] < losses[0] / 2 and (logits[: collapse - 1] <= watch.exp_limit(float16)).all()

# %% [markdown]
# It was going well: up to the last good step the loss had fallen to less than half. Nothing announced the end,
# unless somebody had looked at the largest logit. It grows *because* the network learns: to be surer, it must
# push the logits apart. So this failure hits the runs that work.
#
# Let us take the step apart. `observe` shows every operation to a function of ours, forward and backward; we
# train up to the step in question and write down what each operation gave.

# %%
minamp.manual_seed(0)
model = network().to(float16)
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
trace = []


def note(phase, op, inputs, output):
    if np.issubdtype(output.dtype, np.integer):  # the class ids
        return
    a = np.asarray(output.detach().numpy() if phase == "forward" else output).astype(np.float64)
    target = "" if phase == "forward" else op.params[inputs[2]]
    largest = np.abs(a[np.isfinite(a)]).max(initial=0.0)
    trace.append((phase, op.name, target, a.shape, largest, int(np.isinf(a).sum()), int(np.isnan(a).sum())))


for step, (x, y) in enumerate(DataLoader(TRAIN, 64, shuffle=True, seed=0, drop_last=True), 1):
    trace.clear()
    with observe(note), watch.first_bad_op() as bad:
        loss = textbook_cross_entropy(model(x.to(float16)), y)
        optimizer.zero_grad()
        loss.backward()
    if step == collapse:
        break
    optimizer.step()

print(f"step {step}: {bad}\n")
print(f"{'':9} {'op':9}{'gradient for':14}{'shape':>18}{'largest':>10}{'inf':>5}{'nan':>7}")
for phase, op, target, shape, largest, inf, nan in trace:
    print(f"{phase:9} {op:9}{target:14}{str(shape):>18}{largest:10.4g}{inf:5}{nan:7}")
assert bad.found.op == "exp" and bad.found.phase == "forward"

# %% [markdown]
# Read it from top to bottom; *largest* is the largest finite size.
#
# 1. Up to the logits everything is finite. `exp` is the first to fail, and in very few places.
# 2. `sum` makes the rows of those examples infinite, `div` makes infinity / infinity = NaN of them.
# 3. `mean` averages over the batch: one bad example is enough for a loss of NaN.
# 4. Backward, NaN spreads along the rows of the bad examples. Then comes the gradient for a weight: a sum over all
#    examples, so it takes every bad one in. Only units that were switched off by ReLU for the bad examples keep
#    a finite gradient.
#
# **Predict.** What share of all weight gradients is NaN after this one step? And how many weights, once the
# optimizer has used them?

# %% tags=["hide-output"]
optimizer.step()
print(f"{'parameter':12}{'shape':>12}{'NaN gradients':>15}{'NaN weights':>13}")
for name, p in model.named_parameters():
    g, w = watch.tensor_stats(p.grad), watch.tensor_stats(p)
    print(f"{name:12}{str(p.shape):>12}{g.nan:15.1%}{w.nan:13.1%}")
    assert g.nan == w.nan > 0.1
with minamp.no_grad():
    answers = model(minamp.tensor(digits("test").images[:200]).to(float16)).numpy()
print(f"\nof 200 other images, {np.isnan(answers).all(1).mean():.0%} now get NaN for every class")
assert np.isnan(answers).all()

# %% [markdown]
# A weight that is NaN stays NaN: whatever is subtracted from it. Every later loss in the first table is NaN for
# that reason. Two bad numbers among 640 have ended the training.
#
# ## What saves it, and what does not
#
# Six settings of the same training. The dashed line is the limit of exp in float16.
#
# **Predict.** Which of them collapse? Is a smaller learning rate a cure?

# %% tags=["hide-output"]
runs = {
    "float32": dict(loss_function=textbook_cross_entropy),
    "float16 everywhere": dict(loss_function=textbook_cross_entropy, weights=float16),
    "float16, learning rate 0.01": dict(loss_function=textbook_cross_entropy, weights=float16, lr=0.01),
    "bfloat16 everywhere": dict(loss_function=textbook_cross_entropy, weights=bfloat16),
    "float16, F.cross_entropy": dict(loss_function=F.cross_entropy, weights=float16),
    "autocast": dict(loss_function=textbook_cross_entropy, autocast=True),
}
figure, panels = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained")
print(f"{'':30}{'first NaN at step':>18}{'largest logit':>15}{'mean of last 10 losses':>24}")
for axes, (name, options) in zip(panels.flat, runs.items(), strict=True):
    losses, logits = train(**options)
    bad = np.isnan(losses)
    first = int(np.argmax(bad)) + 1 if bad.any() else None
    print(f"{name:30}{first or 'never':>18}{np.nanmax(logits):15.2f}{losses[-10:].mean():24.3f}")
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, np.where(bad, np.nan, losses), color=GREY, lw=1.2, ls=":", label="loss")
    axes.plot(steps[:first], logits[:first], color=BLUE, lw=1.5, label="largest logit")
    axes.axhline(watch.exp_limit(float16), color=RED, lw=0.8, ls="--")
    if first:
        axes.axvspan(first, 62, color=RED, alpha=0.15, lw=0)
        axes.plot(first, logits[first - 1], "o", color=RED, ms=5)
    axes.set(title=name, xlim=(1, 62), ylim=(0, 30))
    assert bad.any() == (name in ("float16 everywhere", "float16, learning rate 0.01"))
    assert not first or logits[first - 1] > watch.exp_limit(float16) >= logits[: first - 1].max()
    assert first or logits.max() > watch.exp_limit(float16)
for axes in panels[1]:
    axes.set_xlabel("step")
for axes in panels[:, 0]:
    axes.set_ylabel("logit, loss")
panels[0, 1].legend(frameon=False, loc="upper right")
plt.show()

# %% [markdown]
# *Largest logit and loss of each step in six settings; 62 steps are one pass over the digits. Dashed: above
# this logit exp is infinite in float16. Red: the loss is NaN.*
#
# - Every run passes the dashed line, the good ones too. Only where exp itself is float16 is that the end.
# - A smaller learning rate only puts it off.
# - The stable loss is a cure, with all weights in float16. So is autocast, with the textbook loss unchanged: it
#   computes matrix products in float16, but exp, sum and log in float32. Which op gets which format is the
#   *cast policy*, a notebook of its own.
# - bfloat16 has the range. What it gives up is shown in the notebook on master weights.
#
# ## A loss scaler can't repair it
#
# A `GradScaler` skips a step whose gradients are inf or NaN and halves its scale (the notebook on underflow has
# the reason for scaling). Suppose the loss is computed outside the `autocast` block, on half logits, a common
# mistake.
#
# **Predict.** Weights are float32 and bad steps are skipped, so no weight becomes NaN. Does training go on? What
# happens to the scale?


# %% tags=["hide-output"]
def scaled_training(loss_inside):
    minamp.manual_seed(0)
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = minamp.GradScaler("cpu")
    rows = []
    for x, y in DataLoader(TRAIN, 64, shuffle=True, seed=0, drop_last=True):
        with minamp.autocast(dtype=float16):
            z = model(x)
            loss = textbook_cross_entropy(z, y) if loss_inside else None
        if loss is None:
            loss = textbook_cross_entropy(z, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        updated = scaler.step(optimizer)
        scaler.update()
        rows.append((loss.item(), updated is None, scaler.get_scale()))
    assert all(np.isfinite(p.detach().numpy()).all() for p in model.parameters())
    return loss.dtype, *(np.array(column) for column in zip(*rows, strict=True))


print(f"{'loss computed':16}{'its dtype':>10}{'NaN losses':>12}{'skipped steps':>15}{'final scale':>13}")
outcome = {}
for inside in (False, True):
    dtype, losses, skipped, scales = scaled_training(inside)
    outcome[inside] = np.isnan(losses).sum(), skipped.sum(), scales[-1]
    assert skipped[0] == (not inside) and np.isfinite(losses[0])
    name = "inside autocast" if inside else "outside"
    print(f"{name:16}{dtype!s:>10}{np.isnan(losses).sum():12}{skipped.sum():15}{scales[-1]:13.3g}")
assert outcome[False][0] > 31 and outcome[False][2] < 1 and outcome[True][0] == 0 and outcome[True][2] > 1000

# %% [markdown]
# The weights survive, but from the collapse on most steps are thrown away, because most batches hold one sure
# example. The scale is halved each time and sinks below 1, where it does the opposite of its job. (The very first step
# is skipped for another reason: the scaled loss is float32 and finite, but the gradient that reaches the half loss is
# the scale itself, and 65536 is infinite in float16.) The fault is in the *forward* pass, and no factor after the loss
# reaches it. A NaN in the loss means: look for the op, not at the scale. Inside the block the same formula runs in
# float32, and all is well.
#
# ## Questions
#
# 1. SiLU is $x / (1 + e^{-x})$. From which $x$ on does this form break in float16, and is the result wrong there?
#    And if it is written $x e^x / (1 + e^x)$? Try both.
# 2. A model has 30,000 classes and logits near 0 at the start. Does the textbook softmax survive its first step
#    in float16? Up to which equal logit?
# 3. Someone repairs log(softmax) with $\log(p + 10^{-8})$. What is $10^{-8}$ in float16? Which constant would do, and
#    how large can the loss then get?
# 4. RMSNorm divides by $\sqrt{\frac{1}{D} \sum x_k^2}$. An activation has 4096 channels of size 5. What does it give in
#    float16, and how would you notice?
#
# ## Where it is in minamp, and where it comes from
#
# - [`minamp.ops.normalize.softmax`](../minamp/ops/normalize.py),
#   [`minamp.ops.normalize.log_softmax`](../minamp/ops/normalize.py) and
#   [`minamp.ops.normalize.layer_norm`](../minamp/ops/normalize.py): shifted, statistics in float32.
#   [`minamp.ops.cross_entropy.cross_entropy`](../minamp/ops/cross_entropy.py) stores no probability.
# - [`minamp.ops.naive.naive_half_layer_norm`](../minamp/ops/naive.py) and its neighbours are the formulas that fail, to be
#   looked at only.
# - [`minamp.ops.attention.scaled_dot_product_attention`](../minamp/ops/attention.py): masks.
# - [`minamp.watch.bad_op.first_bad_op`](../minamp/watch/bad_op.py), [`minamp.watch.bad_op.exp_limit`](../minamp/watch/bad_op.py),
#   [`minamp.record.observe`](../minamp/record.py): looking inside a step.
# - [`minamp.demo.acts.act1`](../minamp/demo/acts.py): this collapse, as `make demo` tells it.
# - Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018, section 3.3: which
#   operations need float32. Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017,
#   section 3.2: attention and its mask. Ba, Kiros and Hinton, [Layer Normalization](https://arxiv.org/abs/1607.06450),
#   2016, section 3.
