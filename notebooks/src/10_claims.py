# %% [markdown]
# # 10. Seventeen claims
#
# Mixed precision has its folklore: sentences that are repeated in tutorials, answers and reviews. Some are
# right, some were right once, and some never were. Which are which? Here are seventeen of them, from (a) to
# (q), in our own words. Each is put to the test, and a small function turns what was measured into a verdict.
#
# After this notebook you will be able to
#
# - say of each claim whether it holds, and show the few lines that decide it;
# - take a sentence apart into pieces that can be measured;
# - tell what holds for the number format, what for the training loop, and what only for one version of one library;
# - test the eighteenth claim by yourself.
#
# It needs about 60 minutes. Where you see **Predict**, stop and write your verdict down first: true, false, or
# something between, and what that would be. The answer is the output of the next cell, folded away where the
# viewer can do that.
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

from collections import Counter
from importlib import import_module

import matplotlib.pyplot as plt
import numpy as np

import minamp.nn.functional as F
from minamp import autocast, bfloat16, float16, float32, nn, watch
from minamp.data import DataLoader, digits
from minamp.demo.experiment import mlp
from minamp.formats import cast, format_of
from minamp.nn.utils import clip_grad_norm_, clip_grad_value_
from minamp.record import observe
from minamp.tensor import OPS

half = format_of(float16)
BLUE, RED, GREY = "#0072b2", "#d55e00", "#666666"
plt.rcParams.update({"figure.dpi": 80, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
print("minamp", minamp.__version__)

# %% [markdown]
# ## How a verdict is reached
#
# A claim is cut into parts, each of which is measured and comes out as yes or no. If all are yes the claim is
# true, if none is it is false; between them it depends on how many. A few claims need another rule, because
# they are wrong in another way: such a rule is written where it is used, and it too sees nothing but
# measurements.

# %%
BOARD = {}  # letter -> (claim, verdict), for the table at the end


def weigh(parts):
    """The verdict on a claim whose parts are a dict sentence -> bool."""
    yes = sum(parts.values())
    if yes in (0, len(parts)):
        return "true" if yes else "false"
    return "half true" if 2 * yes == len(parts) else "mostly true" if 2 * yes > len(parts) else "mostly false"


def judge(letter, claim, verdict, parts):
    """Print the parts and the verdict, and keep the verdict."""
    BOARD[letter] = claim, verdict
    print()
    for sentence, holds in parts.items():
        print(f"  {'yes' if holds else 'no':5}{sentence}")
    print(f"\n({letter}) {verdict.upper()}: {claim}")


def raises(error, function, *args):
    """Whether function(*args) raises that error."""
    try:
        function(*args)
    except error:
        return True
    return False


def one_weight(value=1.0, gradient=None, lr=0.5):
    """A single float32 weight with its gradient, and an SGD optimizer for it."""
    w = minamp.tensor([value], requires_grad=True)
    if gradient is not None:
        w.grad = minamp.tensor([gradient])
    return w, minamp.optim.SGD([w], lr=lr)


def started(scaler):
    """The scaler after its first scale(): before that it has no scale to divide by."""
    scaler.scale(minamp.tensor(1.0))
    return scaler


for yes in range(5):
    print(f"{yes} of 4 parts: {weigh({str(i): i < yes for i in range(4)})}")

# %% [markdown]
# minamp does what PyTorch does on a GPU, with a short list of differences
# ([differences](pages/differences.md)). Where a claim is about PyTorch's own files or version, this notebook
# can't measure all of it. What it takes from elsewhere stands in the next cell, with the way in which it was
# found, and is printed with a star.

# %%
ELSEWHERE = {
    # Run in PyTorch 2.13.0, CPU build: torch.set_autocast_enabled("cuda", True), then a product of two CPU tensors: float32.
    "* a region leaves the tensors of other devices alone": True,
    # Run there: torch.optim.SGD, step() with a finite gradient.
    "* PyTorch's optimizers return None from a good step": True,
    # Reported by users of PyTorch 2.2.2 on a V100; not run by us.
    "* an older PyTorch refused bfloat16 on a V100": True,
    # Read in torch/cuda/__init__.py of 2.13.0: cards before Ampere pass if a bfloat16 tensor can be created there.
    "* PyTorch 2.13 refuses it there": False,
    # Looked up in the installed files of 2.13.0: there is no such file; the name stands in none of the 2,285 Python files.
    "* PyTorch 2.13 has a file torch/cuda/amp/autocast.py": False,
    "* one of its Python files has something named _CASTS": False,
}


def elsewhere(*words):
    """The entries of ELSEWHERE that contain one of these words."""
    found = {k: v for k, v in ELSEWHERE.items() if any(w in k for w in words)}
    assert len(found) == len(words)
    return found


# %% [markdown]
# ## (a) A gradient of 1e-5 becomes 0 in float16
#
# **Predict.** 1e-5 lies below float16's smallest normal number. Is it lost on its way through a float16 op?

# %% tags=["hide-output"]
print(f"{'gradient':>10}{'arrives as':>16}{'error':>10}")
arrived = {}
for g in (1e-3, 1e-5, 1e-7, 2.0**-24, 2.0**-25, 1e-8):
    x = minamp.tensor([3.0], dtype=float16, requires_grad=True)
    (x * 1.0).backward(minamp.tensor([g]).to(float16))
    arrived[g] = x.grad.item()
    print(f"{g:10.3g}{arrived[g]:16.6g}{abs(arrived[g] / g - 1):10.2%}")
claim = "a gradient of 1e-5 becomes 0 in float16"
judge("a", claim, weigh({claim: arrived[1e-5] == 0}), {claim: arrived[1e-5] == 0})
assert half.smallest_normal > 1e-5 and arrived[2.0**-25] == 0 < arrived[2.0**-24]
assert half.smallest_normal == 2.0**-14 and half.flush == 2.0**-25 and 1e-5 / half.flush > 300

# %% [markdown]
# Below $2^{-14}$ float16 goes on with *subnormal* numbers, which have fewer and fewer digits: 1e-5 is stored
# with the small error printed above. Only from $2^{-25} \approx 3 \cdot 10^{-8}$ down is there nothing left, more
# than three hundred times lower. Networks do have gradients there; the notebook on underflow counts them.
#
# ## (b) Backward converts the gradients to float32 and computes in float32
#
# **Predict.** Linear, GELU, Linear, squared error, all in a region. In which format are the gradients of the
# four results? And those of the weights?

# %% tags=["hide-output"]
minamp.manual_seed(0)
first, second = nn.Linear(8, 16), nn.Linear(16, 4)
data = minamp.randn(32, 8, requires_grad=True)
with autocast():
    h1 = first(data)
    h2 = F.gelu(h1)
    h3 = second(h2)
    loss = F.mse_loss(h3, minamp.zeros(32, 4))
for h in (h1, h2, h3, loss):
    h.retain_grad()
loss.backward()
results = {"first linear": h1, "gelu": h2, "second linear": h3, "loss": loss}
leaves = {"first.weight": first.weight, "first.bias": first.bias, "the data": data}
for name, t in {**results, **leaves}.items():
    print(f"{name:16}{str(t.dtype):10} gradient {t.grad.dtype}")
parts = {f"the gradient of the {name} is float32": t.grad.dtype == float32 for name, t in results.items()}
judge("b", "backward converts the gradients to float32 and computes in float32", weigh(parts), parts)
assert all(t.grad.dtype == float32 for t in leaves.values())


def zeros_in_weight_gradient(factor, region):
    first.weight.grad = None
    with autocast(enabled=region):
        loss = F.mse_loss(second(F.gelu(first(data))), minamp.zeros(32, 4))
    (loss * factor).backward()
    return float((first.weight.grad.numpy() == 0).mean())


lost = {region: zeros_in_weight_gradient(2.0**-17, region) for region in (False, True)}
print(
    f"\nloss times 2^-17: {lost[True]:.0%} of first.weight's gradient is 0, without autocast {lost[False]:.0%}"
)
assert lost[True] > 0.5 and lost[False] == 0

# %% [markdown]
# The gradient of a result is passed on in the result's format. The loss was computed in float32, so its
# gradient is float32; all that lies between is half. Inside an op sums are float32, here as on a GPU's tensor
# core, but what comes out is rounded to half. The weights' gradients are float32 because the last op
# before a weight is the *cast* of the weight to half, and a cast's gradient is a cast back. By then a small
# value may have become 0: the last line shows it. That is why there is loss scaling at all.
#
# ## (c) Under autocast the weights are stored in float16
#
# **Predict.** What is `weight.dtype` inside the region, after it, and after an optimizer step? How many half
# copies of a weight are made when it is used twice?

# %% tags=["hide-output"]
layer = nn.Linear(16, 16)
optimizer = minamp.optim.SGD(layer.parameters(), lr=0.1)
casts = Counter()


def count_casts(phase, op, inputs, output):
    if phase == "forward" and op.is_cast and inputs[0] is layer.weight:
        casts[str(output.dtype)] += 1


parts = {}
with autocast(), observe(count_casts):
    y = layer(layer(minamp.randn(4, 16)))
    parts["inside the region the weight is float16"] = layer.weight.dtype == float16
y.float().sum().backward()
optimizer.step()
parts["after the step it is float16"] = layer.weight.dtype == float16
parts["its saved state is float16"] = layer.state_dict()["weight"].dtype == float16
print(f"copies made of the weight, used twice: {dict(casts)}")
judge("c", "under autocast the weights are stored in float16", weigh(parts), parts)
assert casts == {"float16": 1}

# %% [markdown]
# The weights stay float32. The region makes a float16 copy when a weight is first used, keeps it for the next
# use, and drops it at the end of the outermost region. So autocast needs *more* memory for weights, not less
# (see (j)).
#
# ## (d) A convolution keeps its bias in float32
#
# **Predict.** Zero input, so the result is the bias alone. What comes out for a bias of 70000? Of 1e-9?

# %% tags=["hide-output"]
weight, picture = minamp.zeros(1, 1, 3, 3), minamp.zeros(1, 1, 3, 3)
parts = {}
for value in (70000.0, 1e-9):
    with autocast():
        out = F.conv2d(picture, weight, minamp.tensor([value])).item()
    print(f"bias {value:g} -> {out:g}")
    parts[f"a bias of {value:g} arrives"] = bool(np.isclose(out, value, rtol=1e-3, atol=0))
judge("d", "a convolution keeps its bias in float32", weigh(parts), parts)

# %% [markdown]
# The bias is an argument like the others and is cast to half with them. If you need a bias outside half's
# range, add it after the convolution, in float32.
#
# ## (e) After every good step the scale is multiplied by growth_factor
#
# **Predict.** 2,000 good steps with the default settings. How often has the scale grown? And with
# `growth_interval=1`?


# %% tags=["hide-output"]
def growths(steps, **options):
    """How often a new scaler's scale grows in that many good steps."""
    scaler, (w, optimizer) = started(minamp.GradScaler(**options)), one_weight()
    grown = 0
    for _ in range(steps):
        before = scaler.get_scale()
        w.grad = minamp.tensor([0.0])
        scaler.step(optimizer)
        scaler.update()
        grown += scaler.get_scale() > before
    return grown


default, every = growths(2000), growths(5, growth_interval=1)
print(f"default: {default} in 2000 steps; growth_interval=1: {every} in 5 steps")
parts = {"with the default settings the scale grows after every good step": default == 2000}
judge("e", "after every good step the scale is multiplied by growth_factor", weigh(parts), parts)
assert default == 1 and every == 5

# %% [markdown]
# It grows after `growth_interval` good steps *in a row*, 2,000 by default; one skipped step starts the count
# again. That keeps the skips rare: each growth can cost one step, so at most one in 2,001.
#
# ## (f) The loss must be computed outside the region
#
# **Predict.** A prediction of 400 and a target of 0, both float16: squared error inside the region, outside
# it, and outside after `.float()`?

# %% tags=["hide-output"]
prediction, target = minamp.tensor([400.0], dtype=float16), minamp.tensor([0.0], dtype=float16)
with autocast():
    inside = F.mse_loss(prediction, target)
outside = F.mse_loss(prediction, target)
widened = F.mse_loss(prediction.float(), target.float())
for where, value in {"inside": inside, "outside": outside, "outside, float()": widened}.items():
    print(f"{where:18}{value.item():10g}  {value.dtype}")
parts = {
    "inside the region the loss is wrong": inside.item() != 400.0**2,
    "outside it the same line is right": outside.item() == 400.0**2,
}
judge("f", "the loss must be computed outside the region", weigh(parts), parts)
assert inside.dtype == float32 and outside.item() == np.inf and widened.item() == 400.0**2

# %% [markdown]
# The region knows that losses want float32 and casts their inputs; outside nobody does, and $400^2$ does not
# fit. So inside is the safe place. Outside is fine too if you write `.float()` yourself.
#
# ## (g) After a scaled backward the weights' gradients are float32
#
# **Predict.** For float32 weights under autocast? For a model made half with `.half()`?


# %% tags=["hide-output"]
def gradient_after_backward(dtype):
    """dtype of a weight's gradient, how many times too large it is, and whether unscale_ refuses it."""
    minamp.manual_seed(1)
    layer = nn.Linear(8, 1).to(dtype)
    optimizer, scaler = minamp.optim.SGD(layer.parameters(), lr=0.1), minamp.GradScaler(init_scale=1024.0)
    x = minamp.randn(4, 8).to(dtype)
    with autocast():
        loss = layer(x).float().mean()
    loss.backward(retain_graph=True)
    plain = layer.weight.grad.float().numpy().copy()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    factor = float(np.median(layer.weight.grad.float().numpy() / plain))
    return layer.weight.grad.dtype, factor, raises(ValueError, scaler.unscale_, optimizer)


def where_true(holds):
    """'true' or 'false' if that is so everywhere, else where it is true; holds: a dict place -> bool."""
    places = [place for place, yes in holds.items() if yes]
    return f"true for {' and '.join(places)}" if 0 < len(places) < len(holds) else weigh(holds)


holds = {}
for dtype in (float32, float16):
    kind, factor, refused = gradient_after_backward(dtype)
    print(f"{dtype} weights: gradient {kind}, {factor:g} times too large, unscale_ refuses: {refused}")
    holds[f"{dtype} weights"] = kind == float32
    assert refused == (dtype == float16) and abs(factor / 1024 - 1) < 0.01
assert float(cast(np.float64(2.0**-16 / 1024), float16)) == 0 < float(cast(np.float64(2.0**-16), float16))
judge("g", "after a scaled backward the weights' gradients are float32", where_true(holds), holds)

# %% [markdown]
# A gradient has the format of its weight, and autocast leaves the weights alone (c). But it is still
# multiplied by the scale: whoever reads `.grad` before `unscale_` reads it too large. And a `.half()` model
# has float16 gradients, which `unscale_` refuses: dividing them in float16 would lose the small ones.
#
# ## (h) unscale_ after optimizer.step() raises an error
#
# **Predict.** Scale 1024, weight 1, true gradient 1, learning rate 0.5. You call `optimizer.step()` yourself,
# then `scaler.unscale_` and `scaler.step`. What happens to the weight? And what if the first call is
# `scaler.step`?

# %% tags=["hide-output"]
w, optimizer = one_weight(1.0, gradient=1024.0)
scaler = started(minamp.GradScaler(init_scale=1024.0))
trace = [w.item()]
optimizer.step()
trace.append(w.item())
raw_raises = raises(RuntimeError, scaler.unscale_, optimizer)
scaler.step(optimizer)
trace.append(w.item())
print("optimizer.step(), unscale_, scaler.step():", " -> ".join(f"{v:g}" for v in trace))

w2, optimizer2 = one_weight(1.0, gradient=1024.0)
scaler2 = started(minamp.GradScaler(init_scale=1024.0))
scaler2.step(optimizer2)
through_scaler_raises = raises(RuntimeError, scaler2.unscale_, optimizer2)
print(f"scaler.step(), unscale_: raises {through_scaler_raises}, the weight is {w2.item():g}")


def silent_or_not(raised, wrong):
    """For claims that promise an error."""
    return "true" if raised else "no error, but wrong" if wrong else "false"


parts = {
    "unscale_ after a raw optimizer.step() raises": raw_raises,
    "the weight is right afterwards": trace[-1] == w2.item(),
}
verdict = silent_or_not(raw_raises, wrong=trace[-1] != w2.item())
judge("h", "unscale_ after optimizer.step() raises an error", verdict, parts)
assert trace == [1.0, -511.0, -511.5] and through_scaler_raises and w2.item() == 0.5

# %% [markdown]
# The scaler knows only what is called through it. After `scaler.step` it refuses `unscale_`. A raw
# `optimizer.step()` it can't see: that step was made with gradients 1,024 times too large, and then a second
# one follows. No error, and a ruined weight.
#
# ## (i) step() returns None when it skips, and update() is still required
#
# **Predict.** Is that so? And can you tell a skipped step by the None?


# %% tags=["hide-output"]
class SilentSGD(minamp.optim.SGD):
    """An optimizer whose step returns nothing, as PyTorch's do."""

    def step(self):
        super().step()


def answers(kind):
    """What scaler.step returns for a good gradient and for an infinite one."""
    returned = []
    for g in (1.0, np.inf):
        w, _ = one_weight(gradient=g)
        returned.append(started(minamp.GradScaler()).step(kind([w], lr=0.5)))
    return returned


good, skipped = answers(minamp.optim.SGD)
good_silent, skipped_silent = answers(SilentSGD)
print(f"minamp's SGD:            good step {good}, skipped step {skipped}")
print(f"one that returns nothing: good step {good_silent}, skipped step {skipped_silent}")
w, optimizer = one_weight(gradient=np.inf)
scaler = started(minamp.GradScaler())
scaler.step(optimizer)
refused, kept = raises(RuntimeError, scaler.step, optimizer), scaler.get_scale()
scaler.update()
print(f"scale after the skip {kept:g}, after update() {scaler.get_scale():g}")
parts = {
    "a skipped step returns None": skipped is None and skipped_silent is None,
    "without update() the next step is refused": refused,
    "without update() the scale does not fall": kept == 65536.0 and scaler.get_scale() == 32768.0,
}
caveat = elsewhere("return None")
judge(
    "i",
    "step() returns None when it skips, and update() is still required",
    weigh(parts) + ", with a caveat" * (good_silent is None and all(caveat.values())),
    {**parts, **caveat},
)
assert good is True

# %% [markdown]
# The caveat: `scaler.step` hands on what the optimizer returns, and PyTorch's optimizers return None from a
# good step as well. So there None is no sign of a skip; compare `get_scale()` before and after `update()`
# instead. minamp's optimizers return True, so that here it is one.
#
# ## (j) Memory falls by 25 to 40 percent, and float16 reaches from -65504 to 65504
#
# The range is quickly looked up. Memory is a sum: weights, their gradients and Adam's two moments are float32
# with and without autocast, 16 bytes a weight. What the ops keep for backward is what shrinks, and the half
# copies of the weights come on top.
#
# **Predict.** Four layers of Linear and GELU with Adam, in six settings from narrow with a large batch to
# wide with a small one. Where does the whole fall by 25 to 40 percent? Is there a setting where it grows?

# %% tags=["hide-output"]
SETTINGS = [(64, 4096), (256, 4096), (256, 1024), (512, 512), (512, 128), (1024, 16)]  # width, batch
memory, savings = {}, {}  # (fixed, kept in float32, kept under autocast) in MB; share saved of all
print(
    f"{'width':>6}{'batch':>7}{'fixed MB':>10}{'kept, float32':>15}{'kept, autocast':>16}{'saved of all':>14}"
)
for width, batch in SETTINGS:
    minamp.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())))
    x, kept = minamp.randn(batch, width), []
    for region in (False, True):
        with watch.saved_bytes() as saved, autocast(enabled=region):
            model(x)
        kept.append(saved.total / 1e6)
    fixed = 16 * sum(p.numel() for p in model.parameters()) / 1e6
    savings[width, batch] = 1 - (fixed + kept[1]) / (fixed + kept[0])
    print(f"{width:6}{batch:7}{fixed:10.2f}{kept[0]:15.2f}{kept[1]:16.2f}{savings[width, batch]:14.0%}")
    memory[width, batch] = fixed, *kept
    assert kept[1] > kept[0] / 2
copies = 3 * 1024**2 * 4 / 1e6  # of the last three layers' weights, in words of 4 bytes
assert copies < memory[1024, 16][2] < copies + 0.5

every_half = np.arange(2**16, dtype=np.uint16).view(float16)
finite = every_half[np.isfinite(every_half)].astype(np.float64)
in_range = bool(finite.min() == -65504 and finite.max() == 65504)


def number_and_law(number, law):
    """For a sentence that is a number and a general statement."""
    return f"range {weigh({'': number})}; memory: {'a law' if law else 'not a law'}"


law = all(0.25 <= s <= 0.40 for s in savings.values())
parts = {"float16 reaches from -65504 to 65504": in_range, "memory falls by 25 to 40 % in all six": law}
judge(
    "j",
    "memory falls by 25 to 40 percent, and float16 reaches from -65504 to 65504",
    number_and_law(in_range, law),
    parts,
)
assert max(savings.values()) < 0.5 and min(savings.values()) < 0 and max(savings.values()) > 0.3
assert half.overflow == 65520 and float(cast(np.float64(65519.99), float16)) == 65504

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.8), layout="constrained")
for axes, ((width, batch), (fixed, *kept)) in zip(panels.flat, memory.items(), strict=True):
    axes.bar(("float32", "autocast"), fixed, color=BLUE, label="weights, gradients, Adam")
    axes.bar(("float32", "autocast"), kept, bottom=fixed, color=RED, label="kept for backward")
    axes.set(title=f"width {width}, batch {batch}: {-savings[width, batch]:+.0%}", ylabel="MB")
panels[0, 0].margins(y=0.45)  # room for the legend
panels[0, 0].legend(frameon=False, fontsize=8, loc="upper right")
figure.suptitle("Memory of a training step, with and without autocast")
plt.show()

# %% [markdown]
# *Memory of one step without (left bar) and with autocast (right bar), in MB, at six settings. Blue: 16 bytes
# a weight, the same on both sides. Red: what backward needs. In each title what autocast changes in all.*
#
# A saving of 25 to 40 percent is one row among six. The more activations, the nearer the saving comes to half,
# which is the best there is, as autocast halves the bytes of the red part only. The more weights and the smaller
# the batch, the less is saved, and in the end the half copies of the weights outweigh it: memory *grows*. (These
# copies take 2 bytes a weight on a GPU. On a CPU minamp keeps float16 copies of 8,192 values and more in words of
# 4 bytes, which saves time and makes the growth in the last panel twice as large.) As for the range: numbers up
# to just under 65520 still round to 65504.
#
# ## (k) Softmax in float16 makes the gradients explode
#
# **Predict.** 1,000 classes, logits from a normal distribution. Take a softmax that subtracts the largest
# logit first, and round its result to float16. How large is the largest gradient of the cross-entropy, next
# to that in float32? And how many of the probabilities are 0?

# %% tags=["hide-output"]
print(f"{'sd':>4}{'probabilities 0':>17}{'largest gradient, float16':>27}{'float32':>10}")
growth, vanished, probabilities = {}, {}, {}
for sd in (1, 2, 3, 5, 8, 12):
    logits = (np.random.default_rng(0).standard_normal((64, 1000)) * sd).astype(np.float32)
    labels = minamp.tensor(np.random.default_rng(1).integers(0, 1000, 64))
    largest = {}
    for dtype in (float32, float16):
        x = minamp.tensor(logits, dtype=dtype, requires_grad=True)
        F.cross_entropy(x, labels).backward(minamp.tensor(64.0, dtype=dtype))
        largest[dtype] = float(np.abs(x.grad.numpy().astype(np.float64)).max())
    probabilities[sd] = F.softmax(minamp.tensor(logits), 1).numpy().ravel()
    p16 = F.softmax(minamp.tensor(logits, dtype=float16), 1).numpy()
    growth[sd], vanished[sd] = largest[float16] / largest[float32], float((p16 == 0).mean())
    print(f"{sd:4}{vanished[sd]:17.1%}{largest[float16]:27.4f}{largest[float32]:10.4f}")
    assert max(largest.values()) <= 1

textbook = (
    F.softmax(minamp.tensor([11.09375, 0.0], dtype=float16), 0),
    minamp.naive_half_softmax(minamp.tensor([11.09375, 0.0], dtype=float16)),
)
print("logits (11.09375, 0): softmax", textbook[0].tolist(), " textbook exp / sum", textbook[1].tolist())
gradients = {}
for name in ("log(softmax)", "cross_entropy"):
    x = minamp.tensor([[0.0, 20.0]], dtype=float16, requires_grad=True)
    wrong = minamp.tensor(np.array([0]))
    loss = F.cross_entropy(x, wrong) if name == "cross_entropy" else -F.softmax(x, 1).log()[0, 0]
    loss.backward()
    gradients[name] = x.grad.tolist()[0]
    print(f"logits (0, 20), {name + ':':15} loss {loss.item():g}, gradient {gradients[name]}")


def literal_or_other(literal, other_harm):
    """For a sentence that names a harm: it is misleading if that does not happen, but another does."""
    return "true" if literal else "misleading" if other_harm else "false"


explodes = any(g > 1.01 for g in growth.values())
loses = any(v > 0.1 for v in vanished.values()) and bool(np.isnan(gradients["log(softmax)"]).any())
parts = {
    "the gradients grow": explodes,
    "something else goes wrong: probabilities vanish, their logarithm is -inf": loses,
}
judge("k", "softmax in float16 makes the gradients explode", literal_or_other(explodes, loses), parts)
assert bool(np.isnan(textbook[1].numpy()).any()) and gradients["cross_entropy"] == [-1.0, 1.0]
with autocast():
    assert F.softmax(minamp.ones(2, dtype=float16), 0).dtype == float32

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained")
for axes, (sd, p) in zip(panels.flat, probabilities.items(), strict=True):
    axes.hist(np.log2(np.maximum(p, 2.0**-60)), bins=np.arange(-60, 2, 2), color=BLUE)
    axes.axvspan(-60, np.log2(half.flush), color=RED, alpha=0.15, lw=0)
    axes.set(title=f"sd {sd}: {vanished[sd]:.0%} become 0", xlim=(-60, 0))
for axes in panels[1]:
    axes.set_xlabel("power of two of p")
for axes in panels[:, 0]:
    axes.set_ylabel("probabilities")
plt.show()

# %% [markdown]
# *How often a softmax over 1,000 classes gives which probability, as powers of two, for logits of six standard
# deviations (all below $2^{-60}$ in the first bar). Red: what float16 makes 0.*
#
# The gradient of the cross-entropy is $p - t$, which lies between -1 and 1 whatever happens, so nothing
# explodes. What fails is the other end. Probabilities vanish, and $\log 0$ is $-\infty$: the gradient becomes
# NaN, unless logarithm and softmax are one function that never forms $p$, as in `cross_entropy`. And the
# textbook formula without the subtraction overflows at 11.09. Under autocast softmax is computed in float32
# anyway.
#
# ## (l) SiLU is unstable in float16
#
# SiLU is $x \cdot \sigma(x) = x / (1 + e^{-x})$.
#
# **Predict.** There are 63,488 finite float16 numbers, few enough to try all. For how many does SiLU, or its
# derivative, come out infinite or NaN? And for the form $x e^x / (1 + e^x)$, each step rounded?

# %% tags=["hide-output"]
values = every_half[np.isfinite(every_half)]
x = minamp.tensor(values, requires_grad=True)
y = F.silu(x)
y.backward(minamp.ones_like(y))
exact = values.astype(np.float64)
with np.errstate(over="ignore"):
    sigma = 1 / (1 + np.exp(-exact))
exact = exact * sigma
normal = np.abs(exact) >= half.smallest_normal
computed, wanted = y.detach().numpy().astype(np.float64)[normal], exact[normal]
error = float((np.abs(computed - wanted) / np.abs(wanted)).max())
slope = x.grad.numpy().astype(np.float64)
print(f"{len(values)} values: largest relative error {error:.2e}, half an ulp is at most {half.eps / 2:.2e}")
print(f"the derivative lies in [{slope.min():.4f}, {slope.max():.4f}]")
x = minamp.tensor(np.sort(values))
formula = (x * x.exp() / (1.0 + x.exp())).numpy()
first_bad = float(x.numpy()[~np.isfinite(formula)].astype(np.float64)[0])
print(f"x e^x / (1 + e^x) is inf or NaN from x = {first_bad:g} on")
finite_y, finite_slope = (bool(np.isfinite(a).all()) for a in (y.detach().numpy(), slope))
parts = {
    "SiLU of a finite number is not finite": not finite_y,
    "its derivative is not": not finite_slope,
    "its error is larger than rounding's": error > half.eps / 2,
}
judge("l", "SiLU is unstable in float16", weigh(parts), parts)
assert OPS["silu"].policy == OPS["gelu"].policy == "not listed"
assert len(values) == 63488 and 8 < first_bad < 11

# %% [markdown]
# Written with $e^{-|x|}$, SiLU can't overflow, and it is only rounded once. A formula may be unstable; a
# function is not. SiLU and GELU are on no list of autocast, they run in the format they are given.
#
# ## (m) Clipping must come after unscale_
#
# **Predict.** A gradient of norm 0.5, scale 65536, `max_norm` 1, learning rate 1. How long is the update if you
# clip first and unscale then? And if the gradient is infinite, does the scaler still see it after clipping?


# %% tags=["hide-output"]
def update_length(order, scale, max_norm=1.0):
    """|change of w| for a true gradient (0.3, 0.4), lr 1."""
    w = minamp.zeros(2, requires_grad=True)
    w.grad = minamp.tensor([0.3 * scale, 0.4 * scale])
    optimizer, scaler = minamp.optim.SGD([w], lr=1.0), started(minamp.GradScaler(init_scale=scale))
    if order == "unscale_, clip":
        scaler.unscale_(optimizer)
    clip_grad_norm_([w], max_norm * scale if order == "clip to max_norm * scale" else max_norm)
    scaler.step(optimizer)
    return float(np.linalg.norm(w.detach().numpy()))


orders = ("unscale_, clip", "clip, unscale_", "clip to max_norm * scale")
lengths = {(order, scale): update_length(order, scale) for order in orders for scale in (256.0, 65536.0)}
for order in orders:
    print(f"{order:26}" + "".join(f"  scale {s:g}: {lengths[order, s]:.3g}" for s in (256.0, 65536.0)))


def hidden(clip):
    """Whether the step is made although a gradient was infinite, because `clip` came first."""
    w, optimizer = one_weight(gradient=np.inf)
    clip([w], 1.0)
    return started(minamp.GradScaler()).step(optimizer) is True


for name, clip in {"norm": clip_grad_norm_, "value": clip_grad_value_}.items():
    print(f"an infinite gradient, clipped by {name} before unscale_: step made {hidden(clip)}")
right, early = ([lengths[order, scale] for scale in (256.0, 65536.0)] for order in orders[:2])
parts = {
    "clipping before unscale_ changes the update": early[0] != right[0] and early[1] != right[1],
    "the change depends on the scale": early[0] != early[1],
    "after unscale_ the scale does not matter": right[0] == right[1],
}
judge("m", "clipping must come after unscale_", weigh(parts), parts)
assert abs(lengths[orders[2], 65536.0] - 0.5) < 1e-6 and abs(early[1] * 65536 - 1) < 1e-3
assert hidden(clip_grad_value_) and not hidden(clip_grad_norm_)


# %%
def losses(scale, right, steps=40):
    minamp.manual_seed(0)
    model, scaler = mlp(), minamp.GradScaler(init_scale=scale)
    optimizer, seen = minamp.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for x, y in DataLoader(TRAIN, 64, shuffle=True, seed=0, drop_last=True):
        with autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if right:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(loss.item())
        if len(seen) == steps:
            return seen


TRAIN = digits("train")
figure, panels = plt.subplots(1, 4, figsize=(9, 2.8), sharey=True, layout="constrained")
ends = {}
for axes, e in zip(panels, (0, 4, 8, 15), strict=True):
    for right, color, label in ((True, BLUE, "unscale_, clip"), (False, RED, "clip, unscale_")):
        curve = losses(2.0**e, right)
        ends[e, right] = float(np.mean(curve[-10:]))
        axes.plot(curve, color=color, label=label, lw=1.6, ls="-" if right else "--")
    axes.set(title=f"scale $2^{{{e}}}$", xlabel="step")
panels[0].set_ylabel("loss")
panels[0].legend(frameon=False)
plt.show()
assert ends[0, True] == ends[0, False] and ends[15, False] > 2 * ends[15, True]

# %% [markdown]
# *Loss of the same network on the digits over 40 steps, clipped to norm 1 in the right order (blue) and before
# `unscale_` (red, dashed), at four loss scales. At scale 1 both orders are the same.*
#
# Clipped first, the *scaled* gradients are compared with `max_norm`; unscaled, their norm is then at most
# `max_norm / scale`, and it changes whenever the scale does. Clipping to `max_norm * scaler.get_scale()` would
# be right as well. Clipping by *value* before `unscale_` has a second fault: it makes an infinity a finite
# number, so that the overflow is not noticed and the step is made.
#
# ## (n) Autocast only concerns the GPU: nothing on the CPU is converted
#
# **Predict.** A product of two float32 tensors on the CPU, inside `autocast("cpu")`: in which format is the
# result? And is the tensor itself converted?

# %% tags=["hide-output"]
a = minamp.ones(2, 2)
with autocast("cpu"):
    product = a @ a
print(
    f"{a.dtype} @ {a.dtype} on the {a.device} in a region for it: {product.dtype}; the tensor stays {a.dtype}"
)
parts = {
    **elsewhere("other devices"),
    "no region converts anything on the CPU": product.dtype == float32,
}
judge("n", "autocast only concerns the GPU: nothing on the CPU is converted", weigh(parts), parts)
assert product.dtype == float16 and a.dtype == float32

# %% [markdown]
# A region has a device type and touches the tensors of that type only; so much is right. But there are
# regions for the CPU. In PyTorch their default format is bfloat16 and they have op lists of their own. minamp
# has one list, the GPU's, and applies it everywhere whatever the device type, so the first part can't be
# measured here. With PyTorch you can check both:
#
#     import torch
#     a = torch.ones(2, 2)
#     torch.set_autocast_enabled("cuda", True)
#     print((a @ a).dtype)                        # float32: the CPU is left alone
#     torch.set_autocast_enabled("cuda", False)
#     with torch.autocast("cpu"):
#         print((a @ a).dtype)                    # bfloat16
#
# ## (o) If the loss is below 1e-4, raise init_scale to 2^20
#
# **Predict.** Weight $w = 10^{-3}$, loss $w^2 / 2$. How large is the loss, and how large its gradient? And
# what does a scaler that starts at $2^{20}$ do in the first 30 steps on the digits, next to one that starts
# at $2^{16}$?

# %% tags=["hide-output"]
w = minamp.tensor(1e-3, requires_grad=True)
loss = w * w / 2.0
loss.backward()
print(f"loss {loss.item():.1e}, gradient {w.grad.item():.1e}")


def start_up(scale, steps=30):
    """Skipped steps, and the scale after them."""
    minamp.manual_seed(0)
    model, scaler = mlp(), minamp.GradScaler(init_scale=scale)
    optimizer, skips = minamp.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), 0
    for i, (x, y) in enumerate(DataLoader(TRAIN, 64, shuffle=True, seed=0, drop_last=True)):
        if i == steps:
            return skips, scaler.get_scale()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        skips += scaler.step(optimizer) is None
        scaler.update()


starts = {e: start_up(2.0**e) for e in (16, 20, 24)}
for e, (skips, scale) in starts.items():
    print(f"init_scale 2^{e}: {skips} skipped, then scale 2^{np.log2(scale):.0f}")
print("in float16:", ", ".join(f"2^{e} = {float(cast(np.float64(2.0**e), float16)):g}" for e in (15, 16, 20)))
parts = {
    "a loss below 1e-4 means a gradient that float16 loses": abs(w.grad.item()) < half.smallest_normal,
    "starting at 2^20 skips fewer steps": starts[20][0] < starts[16][0],
    "starting at 2^20 ends at a larger scale": starts[20][1] > starts[16][1],
}
judge("o", "if the loss is below 1e-4, raise init_scale to 2^20", weigh(parts) + " advice", parts)
assert loss.item() < 1e-4 and starts[20][0] > starts[16][0]

# %% [markdown]
# The loss says nothing about the gradients: near a minimum both are small, but not in step. And the scaler
# finds its scale by itself. Too high a start costs one skipped step for each halving, and then the scale is
# what it would have been. Note the last line: the default scale itself is infinite in float16, which is why
# it is kept in float32.
#
# ## (p) bfloat16 autocast on a V100 raises a RuntimeError
#
# A V100 has no bfloat16 arithmetic.
#
# **Predict.** minamp on a CPU uses none either. What does a bfloat16 region do there?

# %% tags=["hide-output"]
minamp.manual_seed(0)
model = mlp()
x, y = (minamp.tensor(t) for t in TRAIN[:64])


def bfloat16_step():
    with autocast(dtype=bfloat16):
        scores = model(x)
        loss = F.cross_entropy(scores, y)
    loss.backward()
    return scores.dtype


refused_here = raises(RuntimeError, bfloat16_step)
print(f"scores {bfloat16_step()}, is_bf16_supported() {minamp.is_bf16_supported()}")


def once_and_now(once, now):
    """For sentences about a version."""
    return "true" if now else "outdated" if once else "false"


parts = {
    **elsewhere("older", "2.13 refuses"),
    "minamp refuses it on the CPU, which emulates it": refused_here,
}
now = parts["* PyTorch 2.13 refuses it there"] or refused_here
verdict = once_and_now(parts["* an older PyTorch refused bfloat16 on a V100"], now)
judge("p", "bfloat16 autocast on a V100 raises a RuntimeError", verdict, parts)

# %% [markdown]
# The check is still there in PyTorch, and so is its text. But the question it asks, `is_bf16_supported()`,
# now counts *emulation*: widen to float32, compute, round. That is what minamp does on the CPU, and it is
# correct; it is only not fast. Whether the *hardware* does it is another question, in both libraries
# `is_bf16_supported(including_emulation=False)`. We have run neither on a V100: the starred lines are a user
# report and a reading of the source.
#
# ## (q) The core of autocast is a table _CASTS in torch/cuda/amp/autocast.py
#
# **Predict.** Where would you look for what an op's inputs are cast to: in one table, or with each op?

# %% tags=["hide-output"]
for name in ("matmul", "softmax", "exp", "norm", "addcmul", "binary_cross_entropy", "add"):
    print(f"{name:22}{OPS[name].policy:20} declared in {OPS[name].__module__}")
parts = {
    **elsewhere("a file", "_CASTS"),
    "minamp's autocast.py holds such a table": "_CASTS" in vars(import_module("minamp.autocast")),
}
judge("q", "the core of autocast is a table _CASTS in torch/cuda/amp/autocast.py", weigh(parts), parts)

# %% [markdown]
# In PyTorch the Python side is `torch/amp/autocast_mode.py`, which switches a region on and off;
# `torch/cuda/amp` holds thin, deprecated wrappers of it. The lists of ops are not Python at all: they are
# registrations in C++, in `aten/src/ATen/autocast_mode.h` and `.cpp` (read in its source, not run). In minamp each op's policy
# stands in the op's own declaration, and the [policy table](pages/policy_table.md) is made from those. To look
# it up in your own PyTorch:
#
#     import importlib.util
#     print(importlib.util.find_spec("torch.cuda.amp.autocast"))       # None: there is no such module
#     print(importlib.util.find_spec("torch.amp.autocast_mode"))
#
# ## All seventeen

# %%
letters = "abcdefghijklmnopq"
assert sorted(BOARD) == list(letters)
for letter in letters:
    claim, verdict = BOARD[letter]
    print(f"({letter})  {claim}\n     {verdict}")
print()
for verdict, count in Counter(verdict for _, verdict in BOARD.values()).most_common():
    print(f"{count:3}  {verdict}")
assert sum(verdict == "true" for _, verdict in BOARD.values()) < 3

# %% [markdown]
# Few sentences of this kind survive unchanged. Most of the false ones have one root: they mix up the *format*
# (what can be stored), the *op* (what arithmetic is done), and the *library* (who casts what, and when). When
# you meet the next one, ask first which of the three it is about, then write the two lines that test it.
#
# ## Questions
#
# 1. "bfloat16 training needs no master weights, because bfloat16 has float32's range." Cut it into parts, and
#    judge it with `weigh`. (Which property of a format decides whether a small update survives?)
# 2. In (b), multiply the loss by $2^{-17}$ and by a scale of $2^{15}$. Which share of the gradient is 0 now? Why is
#    it not enough to multiply the weight gradients by $2^{15}$ afterwards?
# 3. In (j), for which batch does autocast begin to save memory at width 512? Derive it from the bytes per
#    weight and per activation, and check it.
# 4. `clip_grad_value_` hides an overflow if it is called before `unscale_`. What does it do to a NaN? Which
#    line of the scaler notices?
#
# ## Where it is in minamp, and where it comes from
#
# - [`minamp.formats.cast`](../minamp/formats.py): (a). [`minamp.record.observe`](../minamp/record.py): how (c)
#   looks over the engine's shoulder. [`minamp.watch.memory.saved_bytes`](../minamp/watch/memory.py): (j).
# - [`minamp.autocast.autocast`](../minamp/autocast.py) with its cache,
#   [`minamp.policy.POLICIES`](../minamp/policy.py), and the declaration of
#   [`minamp.ops.matmul.matmul`](../minamp/ops/matmul.py): (b) to (d), (f), (n), (q).
# - [`minamp.scaler.GradScaler`](../minamp/scaler.py): (e), (g) to (i), (o);
#   [`minamp.nn.utils.clip_grad_norm_`](../minamp/nn/utils.py): (m).
# - [`minamp.ops.naive.naive_half_softmax`](../minamp/ops/naive.py): (k);
#   [`minamp.ops.activations.silu`](../minamp/ops/activations.py): (l).
# - Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018, section 3: what
#   is stored, what is scaled, what is computed in float32. The rules of autocast and the scaler are those of
#   PyTorch 2.13's `torch.amp`.
