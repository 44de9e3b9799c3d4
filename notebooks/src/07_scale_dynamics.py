# %% [markdown]
# # 7. The dynamics of the loss scale
#
# The loss scale is not set, it is found, and found again for as long as training goes on. The rule that does
# it is three lines long. Where does it lead from a bad start? How many steps does it waste? What do noise,
# spikes and bugs do to it? And what happens if your loop calls the scaler in the wrong order?
#
# After this notebook you will be able to
#
# - predict a start-up, a skip rate and a level of the scale from four numbers;
# - tell a scale that is searching from one that is sinking because of a bug;
# - choose the initial scale and the growth interval for a short run and for a long one;
# - recognise the usual order bugs by what they do to the gradients.
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

import math
from statistics import NormalDist

import matplotlib.pyplot as plt
import numpy as np

import minamp.nn.functional as F
from minamp import nn, optim
from minamp.data import DataLoader, digits
from minamp.formats import cast, float16, float32, format_of

LIMIT = format_of(float16).overflow  # a gradient of this size or more is inf in float16
BLUE, RED, GREY = "#0072b2", "#d55e00", "#666666"
plt.rcParams.update({"figure.dpi": 80, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
print("minamp", minamp.__version__, "- float16 overflows at", LIMIT)

# %% [markdown]
# ## The rule
#
# With the scale $S$, a count of good steps, the growth interval $N$, the growth factor $g = 2$ and the
# backoff factor $b = 1/2$:
#
# - a gradient is not finite: skip the step, $S \leftarrow bS$, the count starts again from 0;
# - all are finite: make the step; after $N$ such steps in a row $S \leftarrow gS$, and the count starts
#   again.
#
# That is a control loop. Its sensor is a single bit, *did anything overflow?*, and the scale always creeps up
# until it does. To watch the loop alone we replace the network by one gradient of known size $G$. Everything
# else is minamp's own: the `GradScaler`, the optimizer, the cast of the scaled gradient to float16.
#
# **Predict.** $G = 1000$, $S = 8$, $N = 4$. What are the scale and the verdict in each of the next 24 steps?


# %% tags=["hide-output"]
class Loop:
    """A GradScaler with one parameter, whose gradient is given instead of computed."""

    def __init__(self, init_scale, growth_interval, **options):
        self.weight = minamp.zeros(1, requires_grad=True)
        self.optimizer = optim.SGD([self.weight], lr=0.0)
        self.scaler = minamp.GradScaler(init_scale=init_scale, growth_interval=growth_interval, **options)
        self.scaler.scale(minamp.zeros(()))  # a scaler begins with the first loss it sees

    def step(self, gradient):
        """One iteration with a true gradient of this size: (scale used, whether the step was made)."""
        scale = self.scaler.get_scale()
        scaled = cast(np.array([gradient * scale]), float16).astype(float32)  # backward passes it on in half
        self.weight.grad = minamp.tensor(scaled)
        made = self.scaler.step(self.optimizer) is not None
        self.scaler.update()
        return scale, made

    def run(self, gradients):
        """Scales used and verdicts for a series of gradients, as two arrays."""
        scales, made = zip(*(self.step(g) for g in gradients), strict=True)
        return np.array(scales), np.array(made)


scales, made = Loop(8.0, growth_interval=4).run([1000.0] * 24)
print("scale", *(f"{s:4g}" for s in scales))
print("step ", *(" yes" if m else "skip" for m in made))
best = 2.0 ** math.floor(math.log2(LIMIT / 1000))
print(f"65520 / 1000 = {LIMIT / 1000:.4g}, so the largest power of two that fits is {best:g}")
assert best == 64 and not made[scales > best].any() and made[scales <= best].all()

# %% [markdown]
# The loop finds the largest power of two that fits, stays for $N$ steps, tries twice that, is refused, and
# returns. The refused step is the price of knowing.
#
# ## Start-up
#
# The two directions have different speeds: down one power of two *per step*, up one *per N steps*. From $S_0$
# to the level $S^* = 2^{\lfloor \log_2 (65520/G) \rfloor}$ it takes
#
# $$ \left\lceil \log_2 \frac{S_0 G}{65520} \right\rceil \text{ skipped steps down,} \qquad
# N \log_2 \frac{S^*}{S_0} \text{ steps up.} $$
#
# **Predict.** Let $S^* = 2^{23}$ and $N = 50$. How many steps until the scale is there from $2^0$, $2^8$,
# $2^{16}$ (the default), $2^{23}$, $2^{24}$, $2^{32}$? How many with the default $N = 2000$?

# %% tags=["hide-output"]
N, G = 50, 2.0**-7.3
level = 2.0 ** math.floor(math.log2(LIMIT / G))
starts = [0, 8, 16, 23, 24, 32]
startups = {}
print(
    f"level 2^{math.log2(level):.0f}\n{'from':>6}{'steps':>8}{'by formula':>12}{'skipped':>9}{'with N = 2000':>15}"
)
for e in starts:
    scales, made = startups[e] = Loop(2.0**e, N).run([G] * 1250)
    arrival = int(np.argmax(scales == level))
    down, up = max(0, math.ceil(math.log2(2.0**e * G / LIMIT))), max(0, math.log2(level) - e)
    print(f"{f'2^{e}':>6}{arrival:8}{down + N * up:12g}{(~made[:arrival]).sum():9}{down + 2000 * up:15g}")
    assert arrival == down + N * up and (~made[:arrival]).sum() == down

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, e in zip(panels.flat, starts, strict=True):
    scales, made = startups[e]
    steps = np.arange(1, len(scales) + 1)
    axes.step(steps, np.log2(scales), where="post", color=BLUE, label="scale")
    axes.plot(steps[~made], np.log2(scales[~made]), ".", color=RED, ms=5, label="skipped step")
    axes.axhline(math.log2(LIMIT / G), color=GREY, ls="--", lw=1, label="limit, 65520 / G")
    axes.set(title=f"from 2^{e}: {int(np.argmax(scales == level))} steps")
for axes in panels[1]:
    axes.set_xlabel("step")
for axes in panels[:, 0]:
    axes.set_ylabel("log2 of the scale")
panels[1, 2].legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# *The scale from six initial values, with a gradient that does not change and N = 50. Climbing takes N steps
# per power of two, falling one. Once there, all six look alike.*
#
# So start too high rather than too low: a few skipped steps cost less than thousands of steps with gradients
# that underflow. A run of a few hundred steps never climbs at all with $N = 2000$; give a short run a smaller
# growth interval.
#
# ## The price: how many steps are skipped
#
# At the level, a period is $N$ good steps and one skipped. For other factors: growths and backoffs must
# cancel, so each growth by $g$ allows $r = \log g / \log (1/b)$ backoffs, and
#
# $$ \text{skip rate} \le \frac{r}{N + r}, \qquad \text{with the default factors } \frac{1}{N+1}. $$
#
# **Predict.** Which share of the steps is lost with $N$ = 10, 100, 2000? And with $N = 10$, $g = 2$ and $b =
# 1/4$?

# %% tags=["hide-output"]
print(f"{'N':>6}{'g':>8}{'b':>7}{'steps':>8}{'skipped':>9}{'rate':>11}{'r / (N + r)':>13}")
for n, g, b, periods in (
    (10, 2, 0.5, 40),
    (100, 2, 0.5, 20),
    (2000, 2, 0.5, 2),
    (10, 2, 0.25, 20),
    (10, 2**0.5, 0.5, 20),
):
    r = math.log(g) / math.log(1 / b)
    length = round(periods * (n + r) / r)
    scales, made = Loop(level, n, growth_factor=g, backoff_factor=b).run([G] * length)
    skips = int((~made).sum())
    print(f"{n:6}{g:8.4g}{b:7}{length:8}{skips:9}{skips / length:11.5f}{r / (n + r):13.5f}")
    assert skips == periods

# %% [markdown]
# With the default one step in 2001 is lost: nothing. A skip now and then is the loop at work and no reason to
# worry. The bound does not depend on the network, on the gradients or on the learning rate; the level does.
#
# ## Noise
#
# Real gradients jump from batch to batch. Let $\log_2 G$ be normal with a standard deviation of $\sigma$
# bits. Now one large batch among many is enough to be refused. The scale neither rises nor falls on average
# when an attempt to climb succeeds as often as it fails: $(1-p)^N = 1/2$, so the probability of an overflow
# per step is
#
# $$ p \approx \frac{\ln 2}{N}, \qquad \log_2 S_{eq} = \log_2 65520 - \mu - z\,\sigma, \quad z =
# \Phi^{-1}\!\left(1 - \frac{\ln 2}{N}\right). $$
#
# $\Phi^{-1}$ is the quantile of the normal distribution. The scale follows the *tail* of the gradients, not
# their typical size.
#
# **Predict.** With $N = 100$, $z$ is about 2.5. If the gradients scatter by two bits, how far below the limit
# of the median gradient does the scale live? Does noise raise the skip rate?

# %% tags=["hide-output"]
N, length = 100, 2500
z = NormalDist().inv_cdf(1 - math.log(2) / N)
median_limit = math.log2(LIMIT / G)
noisy = {}
print(
    f"z = {z:.2f}, limit of the median gradient 2^{median_limit:.1f}, bound of the skip rate {1 / (N + 1):.4f}"
)
print(f"{'sigma':>6}{'skip rate':>11}{'mean log2 S':>13}{'predicted':>11}{'below the limit':>17}")
for sigma in (0.0, 0.25, 0.5, 1.0, 2.0, 3.0):
    gradients = np.exp2(math.log2(G) + sigma * np.random.default_rng(0).standard_normal(length))
    start = round(median_limit - z * sigma)
    scales, made = Loop(2.0**start, N).run(gradients)
    mean, predicted = np.log2(scales).mean(), median_limit - z * sigma
    noisy[sigma] = scales, made, gradients, predicted
    print(f"{sigma:6}{(~made).mean():11.4f}{mean:13.2f}{predicted:11.2f}{median_limit - mean:17.2f}")
    assert abs(mean - predicted) < 1 and (~made).mean() <= 1.15 / (N + 1)
assert noisy[2.0][1].mean() >= noisy[0.0][1].mean() and median_limit - np.log2(noisy[2.0][0]).mean() > 4

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, (sigma, (scales, made, gradients, predicted)) in zip(panels.flat, noisy.items(), strict=True):
    steps = np.arange(1, length + 1)
    axes.plot(steps, np.log2(LIMIT / gradients), ",", color=GREY, alpha=0.5)
    axes.step(steps, np.log2(scales), where="post", color=BLUE, lw=1.2)
    axes.plot(steps[~made], np.log2(scales[~made]), ".", color=RED, ms=4)
    axes.axhline(predicted, color="black", ls="--", lw=1)
    axes.set(title=f"sigma = {sigma:g} bits, {(~made).sum()} skips", ylim=(8, 30))
for axes in panels[1]:
    axes.set_xlabel("step")
for axes in panels[:, 0]:
    axes.set_ylabel("log2 of the scale")
plt.show()

# %% [markdown]
# *The scale (blue), the limit that each batch sets (grey dots) and the skipped steps (red) for six strengths
# of noise, N = 100. Dashed: the predicted level. The more the batches scatter, the lower the scale;
# the number of skips does not rise.*
#
# Noise costs *headroom*: bits of the format that most batches could use and do not. It costs no steps.
#
# ## Spikes
#
# Now and then a batch is far out. Let $G$ jump by 12 bits for $L$ steps.
#
# **Predict.** How many steps are skipped if $L$ = 1, 5, 30? How many steps does it take until the scale is
# back, with $N = 50$?

# %% tags=["hide-output"]
N, jump = 50, 12
spikes = {}
print(f"{'L':>4}{'skipped':>9}{'lowest':>9}{'back after':>12}{'N x bits lost':>15}")
for L in (0, 1, 2, 5, 10, 30):
    # the spike comes right after the scale has been refused at twice its level
    gradients = np.full(1000, G)
    gradients[60 : 60 + L] *= 2.0**jump
    scales, made = spikes[L] = Loop(level, N).run(gradients)
    lowest = scales[60:].min()
    back = int(np.argmax(scales[60 + L :] == level)) + L
    lost_bits = math.log2(level / lowest)
    skipped = int((~made[60 : 60 + max(L, 1)]).sum())
    print(f"{L:4}{skipped:9}{f'2^{math.log2(lowest):.0f}':>9}{back:12}{N * lost_bits:15g}")
    assert skipped == min(L, jump) and lost_bits == min(L, jump) and back - N * lost_bits <= L

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, (L, (scales, made)) in zip(panels.flat, spikes.items(), strict=True):
    steps = np.arange(1, len(scales) + 1)
    if L:
        axes.axvspan(60, 60 + L, color=RED, alpha=0.2, lw=0)
    axes.step(steps, np.log2(scales), where="post", color=BLUE)
    axes.plot(steps[~made], np.log2(scales[~made]), ".", color=RED, ms=5)
    axes.set(title=f"{L} spiked step{'s' * (L != 1)}", ylim=(9, 26))
for axes in panels[1]:
    axes.set_xlabel("step")
for axes in panels[:, 0]:
    axes.set_ylabel("log2 of the scale")
plt.show()

# %% [markdown]
# *Spikes of six lengths (shaded) and what they do to the scale; red dots are skipped steps. A long spike
# costs no more than a medium one: once the scale has found the level of the spike, training goes on inside
# it.*
#
# Each skipped step costs $N$ steps of climbing. With the default $N$ one bad batch costs 2000 steps at half
# the scale, which is one bit of headroom and usually nothing. Five in a row cost 10,000 steps and five bits,
# and five bits may be the ones that matter.
#
# ## A NaN that no scale cures
#
# The loop believes that every bad gradient is an overflow. A NaN from a bug, say a logarithm of 0, does not
# go away at a smaller scale. Let it occur with probability $q$ per step, whatever the scale. An attempt to
# climb succeeds with probability $P = (1-q)^N$, and takes $(1-P)/q$ steps on average, so the scale moves by
#
# $$ \frac{q\,(2P - 1)}{1 - P} \quad\text{powers of two per step:} \qquad \text{it sinks if } q > \frac{\ln 2}{N}. $$
#
# **Predict.** $N = 50$. The scale is far below any overflow. One batch in 500 has a NaN: does the scale sink?
# One in 50? One in 25? With the default $N = 2000$, which share of bad batches can a run bear?

# %% tags=["hide-output"]
N, length, tiny = 50, 2000, 2.0**-100  # a gradient so small that it never overflows here
sinking = {}
print(f"{'q N':>6}{'one in':>9}{'drift per 1000 steps':>22}{'by formula':>12}{'+-':>6}{'made':>9}")
for qn in (0.1, 0.5, math.log(2), 1.0, 2.0, 3.0):
    q = qn / N
    gradients = np.where(np.random.default_rng(1).random(length) < q, np.nan, tiny)
    scales, made = Loop(2.0**16, N).run(gradients)
    sinking[qn] = scales, made
    P = (1 - q) ** N
    drift, formula = np.log2(scales[-1] / scales[0]) / length * 1000, 1000 * q * (2 * P - 1) / (1 - P)
    attempts = length * q / (1 - P)
    # each attempt is a coin: up with P, else down
    scatter = 2 * math.sqrt(attempts * P * (1 - P)) / length * 1000
    print(f"{qn:6.2g}{1 / q:9.3g}{drift:22.1f}{formula:12.1f}{scatter:6.1f}{made.mean():9.2%}")
    assert abs(drift - formula) < 3 * scatter
print(f"\nthe border for N = 2000: one bad batch in {2000 / math.log(2):.0f}")
assert (
    min(made.mean() for _, made in sinking.values()) > 0.9
    and sinking[0.1][0][-1] > 2.0**30
    and sinking[2.0][0][-1] < 1
)

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, (qn, (scales, _)) in zip(panels.flat, sinking.items(), strict=True):
    steps, q = np.arange(1, length + 1), qn / N
    P = (1 - q) ** N
    axes.axhspan(-110, 0, color=RED, alpha=0.1, lw=0)
    axes.step(steps, np.log2(scales), where="post", color=BLUE)
    axes.plot(steps, 16 + steps * q * (2 * P - 1) / (1 - P), color="black", ls="--", lw=1)
    axes.set(title=f"q N = {qn:.2g}: a NaN in {1 / q:.3g} steps", ylim=(-110, 60))
    axes.title.set_fontsize(10)
for axes in panels[1]:
    axes.set_xlabel("step")
for axes in panels[:, 0]:
    axes.set_ylabel("log2 of the scale")
plt.show()

# %% [markdown]
# *A NaN that has nothing to do with the scale, in six frequencies. Dashed: the formula. Shaded: a scale below
# 1, which makes gradients smaller than they are. Even in the last panel more than nine of ten steps are made;
# counting skipped steps does not show the trouble, the scale does.*
#
# A true gradient would have to be 65520 or more to need a scale below 1. So such a scale points to a bug.
# Each bad batch takes one power of two, and only $N$ clean steps in a row give it back.
#
# **Predict.** Now *every* step is NaN. From the default $2^{16}$, how many steps until the scale is 1? Until
# it is 0? If the bug goes away after 60 steps, does training recover? And after 170?

# %% tags=["hide-output"]
loop = Loop(2.0**16, growth_interval=1)
scales, _ = loop.run([np.nan] * 170)
print(
    f"1 after {int(np.argmax(scales == 1))} steps, 0 after {int(np.argmax(scales == 0))} (the scale is float32)"
)
for bad in (60, 140, 170):
    loop = Loop(2.0**16, growth_interval=1)
    loop.run([np.nan] * bad)
    low = loop.scaler.get_scale()
    scales, made = loop.run([G] * 150)
    print(
        f"{bad} bad steps: scale {low:.3g}; of the next 150 clean steps {made.sum()} were made, scale {scales[-1]:.3g}"
    )
    assert made.any() == (bad < 170)
loop = Loop(2.0**16, growth_interval=1, min_scale=1.0)
loop.run([np.nan] * 170)
scales, made = loop.run([G] * 150)
print(
    f"170 bad steps with min_scale=1: scale {scales[0]:g}; {made.sum()} of the next 150 were made, {scales[-1]:.3g}"
)
assert scales[0] == 1 and made.any()
assert int(np.argmax(Loop(2.0**16, 1).run([np.nan] * 170)[0] == 0)) == 166

# %% [markdown]
# At a scale of 0 every gradient is $0 \cdot \infty$, a NaN, and the loop is locked for good. It keeps
# running, it prints a loss, and it learns nothing. With PyTorch's scaler it ends worse: that one looks for
# infinities before it divides. From $2^{-128}$ down $1/S$ is infinite in float32, and the first clean step
# writes an infinity or a NaN into the weights ([differences](pages/differences.md)). So tell the scaler better:
# `min_scale` is a floor; the last printed line used it. `max_skips` is a limit to its patience:

# %%
minamp.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = optim.SGD(network.parameters(), lr=0.1)
scaler = minamp.GradScaler(max_skips=5)
for step in range(1, 100):
    with minamp.autocast():
        p = network(minamp.zeros(8, 4)).softmax(1) * 0.0
        loss = -p.log().mean()  # the bug: a logarithm of 0
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    try:
        scaler.update()
    except FloatingPointError as error:
        print(f"step {step}:", error)
        report = str(error)
        break
assert step == 5 and "log (forward)" in report and "no scale helps" in report

# %% [markdown]
# It stops after five skips in a row and names the op that made the first infinity, its input, and whether the
# loss itself was still finite. That last point separates the two cases: *loss not finite* is a bug in the
# forward or in the data, and no scale helps. *Loss finite, gradients infinite* is what the loop is for.
#
# ## A real training
#
# Now the digits, a network 784-64-64-10, and scales that are nobody's formula. The grey line is the limit
# that the largest weight gradient of each step sets. Six settings: three initial scales, then three growth
# intervals.
#
# **Predict.** From $2^{32}$ with a growth interval of 50: how many of the first steps are skipped? Does the
# scale at the end depend on the start? As the loss falls, does the scale rise or fall?

# %% tags=["hide-output"]
train, test = digits()


def mlp():
    minamp.manual_seed(0)
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


def training(init_scale, growth_interval, steps=400):
    """Scales, verdicts, limits 65520 / max |g| and the accuracy of a training with SGD."""
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = minamp.GradScaler(init_scale=init_scale, growth_interval=growth_interval)
    loader, trace = DataLoader(train, 64, shuffle=True, drop_last=True), []
    while len(trace) < steps:
        for x, y in loader:
            with minamp.autocast():
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            largest = max(float(np.abs(p.grad.numpy()).max()) for p in model.parameters())
            scale, made = scaler.get_scale(), scaler.step(optimizer) is not None
            scaler.update()
            trace.append((scale, made, LIMIT / largest if 0 < largest < np.inf else np.nan))
            if len(trace) == steps:
                break
    with minamp.no_grad():
        accuracy = float((model(minamp.tensor(test.images)).numpy().argmax(1) == test.labels).mean())
    scales, made, limits = (np.array(column) for column in zip(*trace, strict=True))
    return scales, made.astype(bool), limits, accuracy


runs = {
    (e, n): training(2.0**e, n) for e, n in ((32, 50), (16, 50), (0, 50), (16, 10), (16, 200), (16, 2000))
}
print(
    f"{'from':>6}{'N':>6}{'skipped at once':>17}{'skips':>7}{'rate later':>12}{'1/(N+1)':>10}{'last':>7}{'accuracy':>10}"
)
for (e, n), (scales, made, _, accuracy) in runs.items():
    first, later = int(np.argmax(made)), (~made[len(made) // 2 :]).mean()
    print(
        f"{f'2^{e}':>6}{n:6}{first:17}{(~made).sum():7}{later:12.4f}{1 / (n + 1):10.4f}"
        f"{f'2^{math.log2(scales[-1]):.0f}':>7}{accuracy:10.3f}"
    )

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, ((e, n), (scales, made, limits, _)) in zip(panels.flat, runs.items(), strict=True):
    steps = np.arange(1, len(scales) + 1)
    axes.plot(steps, np.log2(limits), color=GREY, lw=0.6, alpha=0.7, label="limit, 65520 / max |g|")
    axes.step(steps, np.log2(scales), where="post", color=BLUE, lw=1.6, label="scale")
    axes.plot(steps[~made], np.log2(scales[~made]), ".", color=RED, ms=5, label="skipped step")
    axes.set(title=f"from 2^{e}, N = {n}: {(~made).sum()} skips")
for axes in panels[1]:
    axes.set_xlabel("step")
for axes in panels[:, 0]:
    axes.set_ylabel("log2 of the scale")
panels[1, 2].legend(frameon=False, fontsize=9, loc="lower right")
plt.show()

accuracies = [run[3] for run in runs.values()]
assert max(accuracies) - min(accuracies) < 0.02
assert 8 <= int(np.argmax(runs[32, 50][1])) <= 20 and runs[16, 2000][0][-1] == 2.0**16
assert abs(math.log2(runs[32, 50][0][-1] / runs[16, 50][0][-1])) <= 3
limits = runs[16, 2000][2]
assert np.nanmedian(limits[-100:]) > 4 * np.nanmedian(limits[:50])
assert all((~made[200:]).mean() <= 1.5 / (n + 1) + 1 / 200 for (_, n), (_, made, _, _) in runs.items())

# %% [markdown]
# *The scale (blue) in six trainings of one network, and the limit set by the largest weight gradient of each
# step (grey). Top: three initial scales. Bottom: three growth intervals. The scale stays under the lower edge
# of the grey band once it has found it; from 2^0, or with N = 200 or 2000, 400 steps are too
# short for that.*
#
# The band rises: the gradients shrink as the loss falls, so the scale may rise too, and that is when small
# gradients need it most. All six end with nearly the same accuracy, printed above: this network is not at the
# limit. Notebook 3 has one that is.
#
# ## Wrong orders
#
# The right order has five lines. The third, clipping, wants true gradients, so it comes after the second:
#
#     scaler.scale(loss).backward()
#     scaler.unscale_(optimizer)
#     clip_grad_norm_(model.parameters(), max_norm)
#     scaler.step(optimizer)
#     scaler.update()
#
# **Predict.** What does the optimizer see, and does the network learn, if: you clip *before* `unscale_`? You
# call `optimizer.step()` on gradients that are still scaled? You call `update()` before `step()`? You unscale
# gradients of a loss that was never scaled? A second backward comes after `unscale_`?

# %% tags=["hide-output"]
clip = nn.utils.clip_grad_norm_


def right(scaler, optimizer, loss, again, clip):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip()
    scaler.step(optimizer)
    scaler.update()


def clip_first(scaler, optimizer, loss, again, clip):
    scaler.scale(loss).backward()
    clip()
    scaler.step(optimizer)
    scaler.update()


def raw_step(scaler, optimizer, loss, again, clip):
    scaler.scale(loss).backward()
    optimizer.step()


def update_first(scaler, optimizer, loss, again, clip):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip()
    scaler.update()
    scaler.step(optimizer)


def not_scaled(scaler, optimizer, loss, again, clip):
    scaler.scale(loss)
    loss.backward()
    scaler.unscale_(optimizer)
    clip()
    scaler.step(optimizer)
    scaler.update()


def backward_after(scaler, optimizer, loss, again, clip):
    scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)
    scaler.scale(again() / 2).backward()  # meant to accumulate the same batch in two halves
    scaler.step(optimizer)
    scaler.update()


def ordered(order, steps=62):
    """Losses of one epoch in this order, the norms of the gradients that the steps really used, and a refusal."""
    model, losses, norms = mlp(), [], []
    optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler, inner = minamp.GradScaler(init_scale=2.0**12), optimizer.step

    def counted(*args, **kwargs):
        norms.append(math.sqrt(sum(float(np.square(p.grad.numpy()).sum()) for p in model.parameters())))
        return inner(*args, **kwargs)

    optimizer.step = counted
    for x, y in DataLoader(train, 64, shuffle=True, drop_last=True):

        def loss_of(x=x, y=y):
            with minamp.autocast():
                return F.cross_entropy(model(x), y)

        loss = loss_of()
        losses.append(loss.item())
        if not np.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        try:
            order(scaler, optimizer, loss, loss_of, lambda: clip(model.parameters(), 2.0))
        except RuntimeError as error:
            return losses, norms, str(error)
    return losses, norms, None


orders = {
    "right": right,
    "clip before unscale_": clip_first,
    "optimizer.step() on scaled": raw_step,
    "update before step": update_first,
    "loss not scaled": not_scaled,
    "backward after unscale_": backward_after,
}
with np.errstate(all="ignore"):
    traces = {title: ordered(order) for title, order in orders.items()}
true_norm = traces["right"][1][0]
print(f"{'':28}{'first norm used':>16}{'times the right one':>21}{'steps':>7}{'last loss':>11}")
for title, (losses, norms, refusal) in traces.items():
    ratio = f"2^{math.log2(norms[0] / true_norm):.1f}"
    print(f"{title:28}{norms[0]:16.4g}{ratio:>21}{len(norms):7}{losses[-1]:11.3g}")
    if refusal:
        print(f"    refused at step {len(losses)}: {refusal}")

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, (title, (losses, _, refusal)) in zip(panels.flat, traces.items(), strict=True):
    axes.plot(traces["right"][0], color=GREY, lw=3, alpha=0.4)
    axes.plot(losses, "o-" if refusal else "-", color=BLUE if title == "right" else RED, lw=1.4, ms=4)
    if not np.isfinite(losses[-1]):
        axes.plot(losses[:-1], "o", color=RED, ms=4)
        axes.text(len(losses) + 1, 12, f"NaN at step {len(losses)}", color=RED, va="center")
    if refusal:
        axes.text(len(losses) + 2, losses[-1], f"refused at step {len(losses)}", color=RED, va="center")
    axes.set(title=title, yscale="log", ylim=(0.1, 100))
    axes.title.set_fontsize(10)
for axes in panels[1]:
    axes.set_xlabel("step")
for axes in panels[:, 0]:
    axes.set_ylabel("loss")
plt.show()

first = {title: norms[0] / true_norm for title, (_, norms, _) in traces.items()}
assert abs(math.log2(first["clip before unscale_"]) + 12) < 0.1
assert traces["clip before unscale_"][0][-1] > 2 > 1 > traces["right"][0][-1]
assert first["optimizer.step() on scaled"] > 2.0**11
assert [t for t, trace in traces.items() if np.isnan(trace[0][-1])] == [
    "optimizer.step() on scaled",
    "backward after unscale_",
]
assert abs(math.log2(first["update before step"]) + 12) < 0.1
assert len(traces["update before step"][0]) == 2 and traces["loss not scaled"][0][-1] > 2
assert [title for title, trace in traces.items() if trace[2]] == ["update before step"]
assert first["backward after unscale_"] > 2.0**10

# %% [markdown]
# *The loss over one epoch in six orders, with a scale of $2^{12}$. Grey: the right order. Four of the wrong
# ones raise no error: two explode, and two stand still, with a finite loss that looks like a bad learning
# rate.*
#
# - *Clip before unscale_*: the threshold is compared with gradients that are $S$ times too large. All
#   together they are cut to it, then divided by $S$. The step is $S$ times too small.
# - *optimizer.step()*: the step is $S$ times too large, and nothing checks for infinities.
# - *update before step*: `update()` forgets that the gradients were unscaled, so `step` divides by $S$ again.
#   The first step is $S$ times too small; the second iteration is refused.
# - *loss not scaled*: divided by $S$, never multiplied.
# - *backward after unscale_*: one half of the gradient is true, the other is $S$ times too large. Accumulate
#   first, unscale once, then step.
#
# Forgetting `update()`, or stepping twice, is caught in the same way: the scaler knows where it stands.

# %%
loop = Loop(2.0**16, growth_interval=50)
loop.step(G)
for call in ("step", "step", "unscale_"):
    loop.weight.grad = minamp.tensor([1.0])
    try:
        getattr(loop.scaler, call)(loop.optimizer)
        print(f"{call}: done")
    except RuntimeError as error:
        print(f"{call}: RuntimeError: {error}")
        caught = call
assert caught == "unscale_"

# %% [markdown]
# ## Questions
#
# 1. Adam divides by a running root mean square of the gradients. Replace SGD by `optim.Adam(..., lr=1e-3)` in
#    `ordered`. Which of the wrong orders can you no longer see in the loss? Are they harmless then? Think of
#    eps, and of the first step after the scale has changed.
# 2. A colleague trains for 300 steps with the default scaler, finds the scale at 65536 all the time, and
#    concludes that dynamic scaling is useless. What would you change, and what would you look at?
# 3. Two runs skip 0.05 % and 0.5 % of their steps, both with N = 2000. Which one has a bug, and how does the
#    bound of the skip rate tell you? Where would you look next?
# 4. The gradients of a network are all exactly 0 for a long time. What does the scale do? Which option of
#    minamp's `GradScaler` prevents it?
#
# ## Where it is in minamp, and where it comes from
#
# - [`minamp.scaler.GradScaler`](../minamp/scaler.py): the rule in its first lines; `unscale_` is the sensor,
#   `update` the controller, [`minamp.scaler.Stage`](../minamp/scaler.py) is what refuses a second step.
# - [`minamp.evidence.Evidence`](../minamp/evidence.py) collects what the scaler says when it gives up, with
#   [`minamp.watch.bad_op.first_bad_op`](../minamp/watch/bad_op.py).
# - [`minamp.nn.utils.clip_grad_norm_`](../minamp/nn/utils.py) clips, and knows nothing of scales.
# - Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018, section 3.2: loss
#   scaling, and skipping a step that overflows. Zhang et al., [OPT](https://arxiv.org/abs/2205.01068), 2022,
#   section 2.5: a large training whose loss scale sank to 0, and what was done about it.
