# %% [markdown]
# # 6. The cast policy
#
# One line, `with minamp.autocast():`, and half of a network runs in float16 and the rest in float32. Who
# decides which op does what? Why these ops and not others? And what happens if one of the decisions is wrong?
#
# After this notebook you will be able to
#
# - say for any op what a region does with its arguments, and why;
# - draw which parts of a network run in which format, forward and backward;
# - measure what a single entry of the policy table is worth, by changing it;
# - nest regions, leave them, count their casts, and write an op of your own that behaves in them.
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

import contextlib

import matplotlib.pyplot as plt
import numpy as np

import minamp.nn.functional as F
from minamp import nn, optim, watch
from minamp.data import DataLoader, digits
from minamp.formats import bfloat16, float16, float32, float64, format_of
from minamp.op import POLICIES, Op
from minamp.record import observe
from minamp.tensor import OPS

BLUE, RED, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#666666"
plt.rcParams.update({"figure.dpi": 80, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
train, test = digits()
print("minamp", minamp.__version__, "-", len(train), "digits to train with,", len(test), "to test")

# %% [markdown]
# ## Seven rules
#
# A region does not know your network. It looks at one op at a time, at the moment it is called, and changes
# the formats of its arguments by the op's *policy*. Nothing else happens: no weight is converted for good,
# and an op that is not called is not touched.
#
# **Predict.** `x` and `w` are float32, `h` is float16. In a float16 region, what is the format of `x @ w`? Of
# `relu(h)`, `exp(h)`, `softmax(h)`, `sum(h)`, `mean(h)`? Of `h + x`, `dot(h, x)`? Of `x @ w` if both are
# float64?

# %% tags=["hide-output"]
x, w = minamp.ones(4, 4), minamp.ones(4, 4)
h, row, half_row = x.half(), x[0], x.half()[0]
# the registry: every op with its policy, and the listed functions that are made of ops
ops = {name: o for name, o in OPS.items() if isinstance(o, Op) or o.policy != "not listed"}
cases = [
    ("x @ w", "matmul", lambda: x @ w),
    ("relu(h)", "relu", lambda: h.relu()),
    ("exp(h)", "exp", lambda: h.exp()),
    ("softmax(h)", "softmax", lambda: h.softmax(1)),
    ("sum(h)", "sum", lambda: h.sum()),
    ("mean(h)", "mean", lambda: h.mean()),
    ("h + x", "add", lambda: h + x),
    ("dot(h, x)", "dot", lambda: minamp.dot(half_row, row)),
    ("x @ w, float64", "matmul", lambda: x.double() @ w.double()),
]
print(f"{'':16}{'outside':>10}{'in a region':>14}   policy")
for text, name, compute in cases:
    try:
        outside = str(compute().dtype)
    except RuntimeError:
        outside = "error"
    with minamp.autocast():
        inside = compute().dtype
    print(f"{text:16}{outside:>10}{str(inside):>14}   {ops[name].policy}")

# %% [markdown]
# In short: products are made half, ops that can leave half's range are made float32, and everything else runs
# in what it is given. float64 and integers are never cast. Two of these may surprise: `sum` is float32 and
# `mean` is not, though a mean is a sum. The mean is no larger than its largest term, a sum can be.
#
# Here is the whole table by rule, counted in the registry. [The policy table](pages/policy_table.md) lists
# every op.

# %%
meaning = {
    "lower_precision_fp": "cast all to the region's half format",
    "fp32": "cast all to float32",
    "fp32_set_opt_dtype": "fill in dtype=float32 if the caller gave none",
    "fp32_append_dtype": "the same, for norm",
    "promote": "cast all to float32 if one is, else to half",
    "banned": "refuse, and say what to use instead",
    "not listed": "change nothing",
}
assert set(meaning) == set(POLICIES)
for policy, text in meaning.items():
    members = [name for name, o in ops.items() if o.policy == policy]
    shown = [
        n
        for n in ("matmul", "linear", "conv2d", "exp", "log", "layer_norm", "softmax", "sum")
        if n in members
    ]
    shown += [n for n in ("dot", "relu", "add", "mean", "max_pool2d", "batch_norm") if n in members]
    print(f"{policy:20}{len(members):4}  {text:46} {', '.join(shown or members[:3])}")

# %% [markdown]
# ## Why these ops
#
# Products go to half because they are where the time goes, and because they can afford it: a tensor core
# multiplies halves and adds in float32, so only the inputs and the result are rounded.
#
# For the ops that work value by value we can ask the format itself. float16 has 31,743 positive finite
# numbers. Give them all to an op, and look at what comes out, and at the slope that backward will multiply
# with. How many of them are finite, and yet infinite once they are stored in float16?
#
# **Predict.** Which of `exp`, `log`, `square`, `reciprocal`, `tanh`, `sqrt`, `gelu` make infinities of finite
# halves? `log` does not, its values lie between -17 and 11.1. Why is it on the float32 list all the same?

# %% tags=["hide-output"]
halves = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
limit = format_of(float16).overflow


def value_and_slope(name):
    """f(x) and f'(x) in float64 at every positive finite half."""
    x = minamp.tensor(halves, dtype=float64, requires_grad=True)
    y = ops[name](x)
    y.sum().backward()
    return y.detach().numpy(), x.grad.numpy()


names = "exp expm1 square reciprocal rsqrt log log2 log10 log1p softplus".split()
names += "sqrt tanh sigmoid relu leaky_relu elu gelu silu logsigmoid erf sin cos abs".split()
lost = {}
print(f"{'op':12}{'policy':12}{'value inf':>11}{'slope inf':>11}   (of {len(halves):,} halves)")
with np.errstate(all="ignore"):
    for name in names:
        value, slope = value_and_slope(name)
        lost[name] = [float((np.abs(a) >= limit).mean()) for a in (value, slope)]
        print(f"{name:12}{ops[name].policy:12}{lost[name][0]:11.1%}{lost[name][1]:11.1%}")
assert len(halves) == 31743 and np.log(halves[0]) > -17 and np.log(halves[-1]) < 11.1
unlisted = [n for n in names if ops[n].policy == "not listed"]
assert all(lost[n] == [0, 0] for n in unlisted)
harmless = [n for n in names if ops[n].policy == "fp32" and lost[n] == [0, 0]]
assert lost["log"][0] == 0 < lost["log"][1] and halves[1 / halves >= limit].max() == 2.0**-16
print(f"\nnot listed and able to overflow: {[n for n in unlisted if any(lost[n])]}")
print(f"listed as fp32 and not able to: {harmless}")

# %% [markdown]
# The range explains the list. None of the ops above that is *not listed* can turn a finite half into an
# infinity, neither in its value nor in its slope. Of those on the float32 list nearly all can. `log` overflows
# backward: its slope is $1/x$, and that is infinite in float16 for $x$ up to $2^{-16}$. The exceptions
# printed last are on the list because PyTorch has them there; the list is a decision made from experience,
# and this experiment is not how it came about.
#
# The figure shows six of them. Red is what float16 cannot hold.

# %%
floor = format_of(float16).flush
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, name in zip(panels.flat, ("exp", "square", "log", "relu", "tanh", "sqrt"), strict=True):
    with np.errstate(all="ignore"):
        value, slope = value_and_slope(name)
    axes.axhspan(np.log2(limit), 40, color=RED, alpha=0.15, lw=0)
    axes.axhspan(-40, np.log2(floor), color=RED, alpha=0.15, lw=0)
    with np.errstate(divide="ignore"):
        axes.plot(np.log2(halves), np.log2(np.abs(value)), color=BLUE, lw=2, label="|value|")
        axes.plot(np.log2(halves), np.log2(np.abs(slope)), color=RED, lw=1.4, ls="--", label="|slope|")
    axes.set(title=f"{name}: {ops[name].policy}", xlim=(-24, 16), ylim=(-34, 34))
for axes in panels[1]:
    axes.set_xlabel("log2 of the input")
for axes in panels[:, 0]:
    axes.set_ylabel("log2 of the result")
panels[0, 0].legend(frameon=False, loc="lower right")
plt.show()

# %% [markdown]
# *Value (blue) and slope (red, dashed) of six ops over all positive halves. Shaded: 0 in float16 below,
# infinite above. Upper row, on the float32 list: value or slope leaves at the top. Lower row, not listed:
# nothing leaves at the top. The slope of tanh leaves at the bottom, where it is 0: that is saturation, and
# the true slope is next to 0 there too.*
#
# ## A network, drawn
#
# Now a small network: convolution, ReLU, pooling, a linear layer, LayerNorm, ReLU, a linear layer,
# cross-entropy. An observer sees every op as it runs. It notes the format of each result, and after backward
# the format in which that result's gradient arrived.
#
# **Predict.** In a float16 region: in which format does the second ReLU run, the one after LayerNorm? How
# many casts does one forward need? In which format does the gradient of the first convolution's *output*
# arrive, and in which that of its *weight*?

# %% tags=["hide-output"]
images, labels = next(iter(DataLoader(train, 16)))


def network():
    minamp.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(8 * 14 * 14, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10)),
    )


def trace(model, x, region):
    """[(op, format of its result, format of the result's gradient, casts made for it)], and the weight gradients' formats."""
    seen, casts = [], []

    def see(phase, op, inputs, output):
        if phase == "forward":
            casts.append(op.is_cast)
            if not op.is_cast:
                output.retain_grad()
                seen.append((op.name, output, sum(casts)))
                casts.clear()

    with observe(see):
        with region:
            loss = F.cross_entropy(model(x), labels)
        loss.backward()
    rows = [(name, out.dtype, out.grad.dtype, count) for name, out, count in seen]
    return rows, {p.grad.dtype for p in model.parameters()}


def name_of(formats):
    return ", ".join(sorted(str(f) for f in formats))


rows, weights = trace(network(), images, minamp.autocast())
print(f"{'op':14}{'result':>10}{'its gradient':>15}{'casts before it':>18}")
for op, forward, backward, casts in rows:
    print(f"{op:14}{str(forward):>10}{str(backward):>15}{casts:18}")
print(f"casts in all: {sum(r[3] for r in rows)}; gradients of the weights: {name_of(weights)}")
assert weights == {float32} and rows[0][:3] == ("conv2d", float16, float16)
assert rows[5][:3] == ("layer_norm", float32, float32) and rows[6][:3] == ("relu", float32, float32)
assert rows[1][:3] == ("relu", float16, float16)

# %% [markdown]
# The same ReLU runs in float16 after the convolution and in float32 after LayerNorm: it is not listed, so it
# keeps what it is given. The gradient of a result always has the format of that result, since backward walks
# the same ops. A weight is float32, and its cast to half is an op like any other, so its gradient comes back
# through that cast as float32. The small half gradients *on the way* are what loss scaling is for.
#
# Here is the same network in five settings.

# %%
settings = {
    "no region": (network(), images, minamp.autocast(enabled=False)),
    "float16 region": (network(), images, minamp.autocast()),
    "bfloat16 region": (network(), images, minamp.autocast(dtype=bfloat16)),
    "model.half()": (network().half(), images.half(), minamp.autocast(enabled=False)),
    "model.half(), region": (network().half(), images.half(), minamp.autocast()),
}
COLOUR = {float32: BLUE, float16: RED, bfloat16: GREEN}
SHORT = {float32: "f32", float16: "f16", bfloat16: "bf16"}
figure, panels = plt.subplots(1, 5, figsize=(11, 6.2), layout="constrained")
for axes, (title, setting) in zip(panels, settings.items(), strict=True):
    rows, weights = trace(*setting)
    for i, (op, forward, backward, casts) in enumerate(rows):
        if i:
            axes.annotate(
                "", (0.5, -i + 0.3), (0.5, -i + 0.7), arrowprops={"arrowstyle": "->", "color": GREY}
            )
        for left, f in ((0.0, forward), (0.62, backward)):
            width = 0.6 if left == 0 else 0.38
            axes.add_patch(plt.Rectangle((left, -i - 0.3), width, 0.6, color=COLOUR[f], alpha=0.25, lw=0))
        axes.text(0.3, -i + 0.1, op, ha="center", va="center", fontsize=9)
        axes.text(0.3, -i - 0.15, SHORT[forward], ha="center", va="center", fontsize=8, color=COLOUR[forward])
        axes.text(0.81, -i, SHORT[backward], ha="center", va="center", fontsize=8, color=COLOUR[backward])
        if casts:
            axes.text(0.56, -i + 0.5, f"{casts} cast{'s' * (casts > 1)}", va="center", fontsize=8, color=GREY)
    axes.text(0.5, -len(rows) + 0.2, f"weight grads: {name_of(weights)}", ha="center", fontsize=8)
    axes.set(xlim=(0, 1), ylim=(-len(rows), 0.9))
    axes.set_title(title, fontsize=10)
    axes.axis("off")
    assert all(forward == backward for _, forward, backward, _ in rows)
    settings[title] = rows, weights
plt.show()
for title, (rows, weights) in settings.items():
    results = [r[1] for r in rows]
    print(
        f"{title:22} float32 results {results.count(float32):2} of {len(rows)}, casts {sum(r[3] for r in rows):2},"
        f" loss in {rows[-1][1]}, weight gradients {name_of(weights)}"
    )
assert settings["float16 region"][1] == settings["bfloat16 region"][1] == {float32}
assert settings["model.half()"][1] == settings["model.half(), region"][1] == {float16}
assert all(r[1] == float16 for r in settings["model.half()"][0])
assert settings["model.half(), region"][0][-1][1] == float32

# %% [markdown]
# *One forward and backward in five settings, from top to bottom. Left part of a box: the op and the format of
# its result. Right part: the format of the gradient of that result. Beside the arrows: casts made for the
# next op, those of its weights included. The two parts of a box always agree, and in a region the gradients
# of float32 weights are float32.*
#
# `model.half()` is a different thing from a region. It changes the weights for good, so their gradients and
# their updates are half too. A region around it repairs the loss, and not the weights: that takes master
# weights, the subject of the notebook before this one.
#
# ## Change one entry and watch
#
# What is one line of the table worth? An op keeps its rule in one attribute, so we can exchange it for a
# moment and train. The network is 784-128-128-10; the loss is the textbook one, `exp`, `sum`, `div`, `log`,
# because it is made of single ops. (`F.cross_entropy` would survive some of this. It subtracts the largest
# score before it takes `exp`.)
#
# **Predict.** Five changes, one at a time: `exp` in half; `sum` in half; `log` in half; `relu` in float32;
# `linear` in float32. Which of them ruin the training? Which change nothing but the cost?


# %% tags=["hide-output"]
@contextlib.contextmanager
def flipped(name, policy):
    """A region in this block treats the op by another policy."""
    op = ops[name]
    before, op.cast_inputs = op.cast_inputs, POLICIES[policy]
    try:
        yield
    finally:
        op.cast_inputs = before


def textbook_loss(scores, target):
    e = scores.exp()
    p = e / e.sum(1, keepdim=True)
    return -minamp.gather(p, 1, target.reshape(-1, 1)).log().mean()


def training(region, change=None, steps=124):
    """Losses of a training, bytes that its first step keeps for backward, casts of that step, and the first bad op."""
    minamp.manual_seed(0)
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader, losses, casts, bad = DataLoader(train, 64, shuffle=True, drop_last=True), [], [], None

    def loss_of(x, y):
        with minamp.autocast(enabled=region):
            return textbook_loss(model(x), y)

    with flipped(*change) if change else contextlib.nullcontext():
        while len(losses) < steps:
            for x, y in loader:
                if not losses:  # the same forward once more, under observation
                    with watch.saved_bytes() as kept, observe(lambda *seen: casts.append(seen[1].is_cast)):
                        loss_of(x, y)
                loss = loss_of(x, y)
                optimizer.zero_grad()
                loss.backward()
                if bad is None and not all(np.isfinite(p.grad.numpy()).all() for p in model.parameters()):
                    with watch.first_bad_op() as found:
                        loss_of(x, y).backward()
                    bad = len(losses) + 1, found.found
                optimizer.step()
                losses.append(loss.item())
    return losses, kept.total, sum(casts), bad


plain = training(region=False)
changes = {
    "as shipped": None,
    "exp in half": ("exp", "lower_precision_fp"),
    "sum in half": ("sum", "lower_precision_fp"),
    "log in half": ("log", "lower_precision_fp"),
    "relu in float32": ("relu", "fp32"),
    "linear in float32": ("linear", "fp32"),
}
results = {title: training(True, change) for title, change in changes.items()}
print(f"{'':20}{'loss, last 20':>14}{'kept, kB':>10}{'casts':>7}   first bad op, and its input")
for title, (losses, kept, casts, bad) in {"no region": plain, **results}.items():
    what = "-"
    if bad:
        step, found = bad
        what = f"step {step}: {found.op} ({found.phase}), {found.result} at {found.inputs[-1][2]:.3g}"
    print(f"{title:20}{np.mean(losses[-20:]):14.4f}{kept / 1e3:10.0f}{casts:7}   {what}")

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, (title, (losses, kept, casts, bad)) in zip(panels.flat, results.items(), strict=True):
    axes.plot(plain[0], color=GREY, lw=3, alpha=0.4, label="float32, no region")
    axes.plot(losses, color=RED if bad else BLUE, lw=1.2, label="this setting")
    if bad:
        axes.axvline(bad[0] - 1, color=RED, ls="--", lw=1)
        axes.text(bad[0] + 3, 3.2, f"not finite from\nstep {bad[0]} ({bad[1].op})", color=RED, va="top")
    axes.set(title=f"{title}: {casts} casts, {kept / 1e3:.0f} kB", ylim=(0, 4))
    axes.title.set_fontsize(10)
for axes in panels[1]:
    axes.set_xlabel("step")
for axes in panels[:, 0]:
    axes.set_ylabel("loss")
panels[0, 0].legend(frameon=False, fontsize=9)
plt.show()

shipped = results["as shipped"]
assert shipped[3] is None and shipped[1] < plain[1]
assert all(results[name][3] for name in ("exp in half", "sum in half", "log in half"))
assert results["exp in half"][3][1].op == "exp" and results["exp in half"][3][1].value > watch.exp_limit(
    float16
)
assert results["sum in half"][3][1].value > limit
found = results["log in half"][3][1]
assert found.op == "log" and found.inputs[-1][2] < (2.0**-16 if found.phase == "backward" else 2.0**-24)
assert not results["relu in float32"][3]
assert results["relu in float32"][0] == shipped[0] and results["relu in float32"][1] > shipped[1]
assert results["linear in float32"][0] == plain[0]

# %% [markdown]
# *The same training with one entry of the table changed in each panel. Grey: float32. The titles give the
# casts of one forward and the bytes it keeps for backward. Three changes end in NaN, two only cost.*
#
# - `exp` in half and `sum` in half are fatal within an epoch: a score above 11.09, or a row of exponentials
#   that are finite in float32 and not in half. In the second case the op named is a cast, `to`: that is where
#   the value was lost.
# - `log` in half is fatal at small probabilities. Below $2^{-16}$ its slope $1/x$ does not fit, as the table of
#   slopes said: the loss of that step is still finite, and the op named is `log` in *backward*. Below $2^{-25}$
#   the probability itself is 0 in half, and the *forward* is named. Which comes first is luck.
# - `relu` in float32 gives the same losses to the last bit, for more casts and more memory. A policy is about
#   cost as well as about range.
# - `linear` in float32 gives the losses of float32 training to the last bit: all that autocast does in this
#   network begins with the products.
#
# ## Regions
#
# A region is a setting on a stack: a format, whether casts are on, whether weight casts are kept.
#
# **Predict.** A bfloat16 region inside a float16 region: what does `x @ w` give inside, and after it? In
# `autocast(enabled=False)` inside a region, what does `h @ w` give, with `h` half and `w` float32? And a
# region without `dtype` inside the bfloat16 one?

# %% tags=["hide-output"]
assert not minamp.is_autocast_enabled()
with minamp.autocast():
    h = x @ w
    print("float16 region                    ", h.dtype)
    with minamp.autocast(dtype=bfloat16):
        print("  bfloat16 region inside          ", (x @ w).dtype)
        with minamp.autocast():
            print("    a region that names no format ", (x @ w).dtype)
    print("after them                        ", (x @ w).dtype)
    with minamp.autocast(enabled=False):
        print("  disabled inside: x @ w          ", (x @ w).dtype)
        try:
            h @ w
        except RuntimeError as error:
            print("  disabled inside: h @ w           RuntimeError:", error)
        print("  disabled inside: h.float() @ w  ", (h.float() @ w).dtype)
    y = h.clone()
    print("exp(h)                            ", h.exp().dtype)
    y.exp_()
    print("h.exp_(), in place                ", y.dtype)

# %% [markdown]
# A disabled region casts nothing, in neither direction: what came out of the outer region is still half.
# Write `.float()` where a float32 part begins. In-place forms are never cast, since the memory they write to
# has its format already.
#
# ## The cache of weight casts
#
# A weight that is used twice in a region is cast once. The copy is kept until the outermost region ends, if
# the weight is a float32 leaf that requires a gradient. An activation is used once or twice and then gone;
# keeping its copies would only hold memory.
#
# **Predict.** A weight is used eight times, as in a recurrent network. How many casts: in one region? With
# `cache_enabled=False`? In eight regions? If the weight is frozen? If each use takes a view, `w[:]`? If the
# weight is changed in place half-way?


# %% tags=["hide-output"]
def casts_of(use, region=minamp.autocast, frozen=False, uses=8, regions=1):
    """How many times a float32 tensor is cast to half in `uses` calls of use(x, weight, number of the call)."""
    weight = minamp.ones(4, 4, requires_grad=not frozen)
    x, count = minamp.ones(2, 4).half(), []
    with observe(lambda phase, op, inputs, out: count.append(op.is_cast and out.dtype == float16)):
        for r in range(regions):
            with region():
                for i in range(uses // regions):
                    use(x, weight, r * uses // regions + i)
    return sum(count)


def change_half_way(x, weight, i):
    if i == 4:
        with minamp.no_grad():
            weight.mul_(2.0)
    return x @ weight


counts = {
    "one region": casts_of(lambda x, w, i: x @ w),
    "cache off": casts_of(lambda x, w, i: x @ w, lambda: minamp.autocast(cache_enabled=False)),
    "eight regions": casts_of(lambda x, w, i: x @ w, regions=8),
    "frozen weight": casts_of(lambda x, w, i: x @ w, frozen=True),
    "a view each time": casts_of(lambda x, w, i: x @ w[:]),
    "changed half-way": casts_of(change_half_way),
}
for title, count in counts.items():
    print(f"{title:18}{count} casts for 8 uses")
assert list(counts.values()) == [1, 8, 8, 8, 8, 2]

# %% [markdown]
# The last line is one of minamp's [differences from PyTorch](pages/differences.md). There the copy is found
# by the weight alone, so a weight that is changed inside a region goes on with its old values until the
# region ends. minamp also remembers the weight's version.
#
# The practical rule is the same for both: one region around the forward, the optimizer's step outside.
#
# ## An op of your own
#
# A `Function` that you write yourself has no policy. Two decorators give it one. `custom_fwd` says what
# happens to the arguments, and `custom_bwd` makes backward run in the state that forward ran in, although
# backward is called outside the region.
#
# **Predict.** A Function computes $\sum x^2$ of a half tensor that holds 300, with `x * x`. What comes out in
# a region? And with `cast_inputs=float32`? And with `cast_inputs=float32`, outside every region?


# %% tags=["hide-output"]
def square_sum(cast_inputs, log):
    """A Function for the sum of squares that notes the state of both its bodies in the list `log`."""

    class SquareSum(minamp.autograd.Function):
        @staticmethod
        @minamp.custom_fwd(device_type="cuda", cast_inputs=cast_inputs)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            log.append((minamp.is_autocast_enabled(), x.dtype))
            return (x * x).sum()

        @staticmethod
        @minamp.custom_bwd(device_type="cuda")
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            log.append((minamp.is_autocast_enabled(), x.dtype))
            return 2.0 * x * g

    return SquareSum.apply


print(f"{'cast_inputs':12}{'region':8}{'result':>9}   {'forward body':24}{'backward body':24}gradient")
answers = {}
for cast_inputs in (None, float32):
    for region in (True, False):
        log, v = [], minamp.tensor([300.0], dtype=float16, requires_grad=True)
        with minamp.autocast(enabled=region):
            out = square_sum(cast_inputs, log)(v)
        out.backward()
        bodies = [f"{'on ' if on else 'off'}, x {f}" for on, f in log]
        print(
            f"{cast_inputs!s:12}{'yes' if region else 'no':8}{out.item():9g}   {bodies[0]:24}{bodies[1]:24}"
            f"{v.grad.item():g} {v.grad.dtype}"
        )
        answers[cast_inputs, region] = out.item()
        assert log[0] == log[1] and v.grad.dtype == float16
assert answers[float32, True] == 90000 and np.isinf([answers[None, True], answers[float32, False]]).all()

# %% [markdown]
# With `cast_inputs=float32` the body sees float32 and autocast is off in it, so 300 squared is 90000. Outside
# a region the decorator does *nothing*, not even the cast: a frequent surprise. In all four cases backward's
# body has the state of forward's body, and the gradient that leaves has the format of the argument.
#
# Without the decorators backward runs with autocast off, whatever forward did. A product in it then meets a
# half gradient and a float32 weight:


# %%
class Product(minamp.autograd.Function):
    """x @ w, without the decorators."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


class Repaired(Product):
    forward = staticmethod(minamp.custom_fwd(Product.forward, device_type="cuda"))
    backward = staticmethod(minamp.custom_bwd(Product.backward, device_type="cuda"))


for function in (Product, Repaired):
    a, b = minamp.ones(2, 3, requires_grad=True), minamp.ones(3, 4, requires_grad=True)
    with minamp.autocast():
        out = function.apply(a, b)
    try:
        out.sum().backward()
        answer = f"gradients {a.grad.dtype}, {b.grad.dtype}"
    except RuntimeError as error:
        answer = f"RuntimeError: {error}"
    print(f"{function.__name__:9} forward {out.dtype}, backward: {answer}")
    assert ("RuntimeError" in answer) == (function is Product)

# %% [markdown]
# ## Questions
#
# 1. A colleague finds `layer_norm` slow under autocast, since its output is float32 and the next linear layer
#    casts it back. What would break if it were *not listed*? Try `flipped("layer_norm", "not listed")` on the
#    network above, and read the error.
# 2. `F.cross_entropy` is not in the registry of ops. Why does it need no policy of its own? Use `observe` to
#    see which ops it is made of.
# 3. `binary_cross_entropy` is banned in a region. Give it the probability 1 - 1e-4 and think of what float16
#    makes of that. Which loss does the error recommend, and what does that one do differently?
# 4. Inside a region you write `h = x @ w; s = (h * h).sum()`. Which op overflows first if `h` holds 300, and
#    why does the policy of `sum` not help? Write it so that it does not overflow.
#
# ## Where it is in minamp, and where it comes from
#
# - [`minamp.policy.POLICIES`](../minamp/policy.py): the seven rules, each a short function.
#   [`minamp.op.op`](../minamp/op.py) is the declaration that every op names its policy in;
#   [`minamp.op.Op`](../minamp/op.py) applies it, in `__call__`.
# - [`minamp.autocast.autocast`](../minamp/autocast.py) is the stack of regions,
#   [`minamp.autocast.cast`](../minamp/autocast.py) the cache,
#   [`minamp.autocast.custom_fwd`](../minamp/autocast.py) and
#   [`minamp.autocast.custom_bwd`](../minamp/autocast.py) the decorators.
# - [`minamp.record.observe`](../minamp/record.py) shows every op that runs;
#   [`minamp.watch.bad_op.first_bad_op`](../minamp/watch/bad_op.py) and
#   [`minamp.watch.memory.saved_bytes`](../minamp/watch/memory.py) are
#   built on it.
# - Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018, section 3.3,
#   sorts a network's arithmetic into products, reductions and pointwise ops, and says which precision each
#   needs.
