# %% [markdown]
# # 2. Autograd
#
# A training loop calls `loss.backward()`, and every weight has a gradient. Who computes it, and in which
# format? With mixed precision the second question matters: the forward pass is float16, yet the weight
# gradients arrive as float32. This notebook builds the machine that does it, in thirty lines, and sets it
# beside minamp's own.
#
# After this notebook you will be able to
#
# - write an automatic differentiation engine, and say why it must walk backwards in a certain order;
# - check a gradient with finite differences, and choose their step;
# - say why a float16 forward pass gives float32 weight gradients, and what these have lost all the same;
# - say what happens to the gradient of a weight that is used more than once.
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

import inspect

import matplotlib.pyplot as plt
import numpy as np

import minamp.nn.functional as F
from minamp import autograd
from minamp.data import digits
from minamp.formats import bfloat16, float16, float32, float64, round_to
from minamp.record import observe
from minamp.tensor import OPS

BLUE, RED, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#666666"
plt.rcParams.update(
    {"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
)
print("minamp", minamp.__version__)

# %% [markdown]
# ## An engine in thirty lines
#
# A network is a chain of simple operations. Each knows how to do one thing beside its own work: given the
# gradient of the loss for its *output*, it computes the gradient of the loss for its *input*. Write $\bar y$
# for the gradient of the loss for $y$. For a product $y = a\,b$ of numbers, and $Y = A\,B$ of matrices,
#
# $$ \bar a = \bar y\, b, \quad \bar b = \bar y\, a, \qquad\qquad
#    \bar A = \bar Y B^{\mathsf T}, \quad \bar B = A^{\mathsf T} \bar Y. $$
#
# Such a rule is called a *vector-Jacobian product*, vjp for short. The engine needs two parts: while the
# forward pass runs, write down what was made from what, with the vjp of each step (the *record*); then walk
# the record backwards.


# %%
class Mini:
    """An array that remembers how it was made. parents: pairs of a Mini and the vjp that leads to it."""

    def __init__(self, data, parents=()):
        self.data, self.parents, self.grad = np.asarray(data), parents, None

    def __add__(self, other):  # other may be one row, added to all rows: its gradient is the sum over them
        down = (lambda g: g.sum(0)) if self.data.ndim > other.data.ndim else (lambda g: g)
        return Mini(self.data + other.data, ((self, lambda g: g), (other, down)))

    def __mul__(self, other):
        left, right = (lambda g: g * other.data), (lambda g: g * self.data)
        return Mini(self.data * other.data, ((self, left), (other, right)))

    def __matmul__(self, other):
        left, right = (lambda g: g @ other.data.T), (lambda g: self.data.T @ g)
        return Mini(self.data @ other.data, ((self, left), (other, right)))

    def relu(self):
        return Mini(np.maximum(self.data, 0), ((self, lambda g: g * (self.data > 0)),))

    def cross_entropy(self, target):  # mean of -log softmax; its gradient is (p - one-hot) / N
        shifted = self.data - self.data.max(1, keepdims=True)
        logp, n = shifted - np.log(np.exp(shifted).sum(1, keepdims=True)), len(target)
        one_hot = np.eye(logp.shape[1], dtype=logp.dtype)[target]
        return Mini(-(logp * one_hot).sum() / n, ((self, lambda g: g * (np.exp(logp) - one_hot) / n),))

    def backward(self):
        self.grad = np.ones_like(self.data)
        for node in reversed(made_in_order(self)):
            for parent, vjp in node.parents:
                g = vjp(node.grad)
                parent.grad = g if parent.grad is None else parent.grad + g


def made_in_order(last, seen=None):
    """All Minis that `last` was made from, each after its parents."""
    seen = {} if seen is None else seen  # a dict keeps the order in which it was filled
    for parent, _ in last.parents:
        if parent not in seen:
            made_in_order(parent, seen)
    seen[last] = True
    return list(seen)


x = Mini(3.0)
y = x * x + x
y.backward()
print(f"y = x*x + x at x = 3: y = {y.data:g}, its gradient {x.grad:g}; by hand 2x + 1 = {2 * 3 + 1}")
assert x.grad == 7

# %% [markdown]
# `x` is used three times here, and its gradient is the *sum* of what arrives from each use. So nobody may read
# it before all uses have delivered. That is why `backward` goes through the record in reverse order of making.
#
# A walk without that order is possible: follow every path from the loss to `x` on its own and add up what
# arrives. It gives the same number.
#
# **Predict.** Let `x = x + x`, 15 times in a row. How many vjps does the ordered walk call? How many does the
# walk along every path call?


# %% tags=["hide-output"]
def doublings(x, n):
    for _ in range(n):
        x = x + x
    return x


def every_path(node, g, x):
    """What arrives at x along all paths, and how many vjps that takes."""
    total, calls = (g if node is x else 0), 0
    for parent, vjp in node.parents:
        arrives, further = every_path(parent, vjp(g), x)
        total, calls = total + arrives, calls + 1 + further
    return total, calls


print(f"{'doublings':>9}{'ordered':>10}{'every path':>12}{'minamp':>9}")
for n in (1, 5, 10, 15):
    x = Mini(1.0)
    last = doublings(x, n)
    last.backward()
    ordered = sum(len(node.parents) for node in made_in_order(last))
    arrives, along_paths = every_path(last, 1.0, x)
    calls = []
    with observe(lambda phase, *_, calls=calls: calls.append(phase)):
        doublings(minamp.tensor(1.0, requires_grad=True), n).backward()
    print(f"{n:9}{ordered:10}{along_paths:12}{calls.count('backward'):9}")
    assert ordered == calls.count("backward") == 2 * n and along_paths == 2 ** (n + 1) - 2
    assert arrives == x.grad == 2**n

# %% [markdown]
# Two calls for each addition, against $2 + 4 + \dots + 2^n$. minamp walks in order too: each node of its record
# has a number, and the highest number goes first.
#
# ## Beside minamp's own
#
# A network with one hidden layer and 64 digits, in both engines, from the same weights.
#
# **Predict.** The two programs share nothing but the chain rule. In float64, about 16 digits: to how many
# digits do their gradients agree? And in float32?


# %% tags=["hide-output"]
train_set = digits("train")
images, target = train_set.images[:64].reshape(64, 784), train_set.labels[:64]
rng = np.random.default_rng(0)
initial = {
    "W1": rng.normal(0, 784**-0.5, (784, 32)),
    "b1": np.zeros(32),
    "W2": rng.normal(0, 32**-0.5, (32, 10)),
    "b2": np.zeros(10),
}


def network(p, x):
    """Works with both engines: they have the same operators."""
    return (x @ p["W1"] + p["b1"]).relu() @ p["W2"] + p["b2"]


for dtype, agree in ((float64, 13), (float32, 5)):
    ours = {name: Mini(w.astype(dtype)) for name, w in initial.items()}
    network(ours, Mini(images.astype(dtype))).cross_entropy(target).backward()
    theirs = {name: minamp.tensor(w, dtype=dtype, requires_grad=True) for name, w in initial.items()}
    scores = network(theirs, minamp.tensor(images, dtype=dtype))
    F.cross_entropy(scores, minamp.tensor(target)).backward()
    gap = max(
        np.abs(ours[name].grad - theirs[name].grad.numpy()).max() / np.abs(ours[name].grad).max()
        for name in initial
    )
    assert gap < 10.0**-agree
    print(f"{dtype!s:8} the gradients agree to at least {agree} digits")

# %% [markdown]
# What minamp adds is speed, many operations, half formats, errors that help, and devices. The idea is the
# same: an operation stands beside its vjps. This is the product, printed from minamp's source:

# %%
mul = OPS["mul"]
for function in (mul.forward, *(vjp for vjp, _ in mul.vjps)):
    print(inspect.getsource(function))

# %% [markdown]
# `m` is the library that does the arithmetic, NumPy or CuPy. The parameters of a vjp name what must be kept
# for backward: `vjp_a` asks for `b` only.
#
# ## Is it right? Finite differences
#
# A gradient can be checked without knowing how it was made. The slope between two points near $x$ is
#
# $$ f'(x) \approx \frac{f(x+h) - f(x-h)}{2h}. $$
#
# Two errors fight here. The formula itself is off by about $h^2$, which wants a small $h$. But each value of $f$
# is rounded, and that error is divided by $2h$, which wants a large $h$.
#
# **Predict.** For $f(x) = e^x \sin x$: which step $h$ is best in float64? In float32? And how many digits of the
# slope are right at best in float16?

# %% tags=["hide-output", "machine"]
FOUR = (float64, float32, float16, bfloat16)
points = np.linspace(0.5, 1.0, 65)
powers = np.arange(-44, 0)


def f(x, dtype):
    x = minamp.tensor(x, dtype=dtype)
    return (x.exp() * x.sin()).numpy().astype(np.float64)


figure, panels = plt.subplots(1, 4, figsize=(9, 3.1), sharex=True, sharey=True, layout="constrained")
print(f"{'':10}{'best step':>12}{'error there':>13}{'error of backward':>19}")
for axes, dtype in zip(panels, FOUR, strict=True):
    x = minamp.tensor(points, dtype=dtype, requires_grad=True)
    (x.exp() * x.sin()).sum().backward()
    at = x.detach().numpy().astype(np.float64)
    slope = np.exp(at) * (np.sin(at) + np.cos(at))
    error = []
    for h in 2.0**powers:
        difference = (f(at + h, dtype) - f(at - h, dtype)) / (2 * h)
        error.append(np.median(np.abs(difference - slope) / slope))
    backward = np.median(np.abs(x.grad.numpy().astype(np.float64) - slope) / slope)
    best = int(np.argmin(error))
    print(f"{dtype!s:10}{f'2^{powers[best]}':>12}{error[best]:13.0e}{max(backward, 1e-16):19.0e}")
    assert backward < error[best]
    axes.plot(powers, np.maximum(error, 1e-17), color=BLUE)
    axes.axhline(max(backward, 1e-16), color=RED, ls="--", lw=1)
    axes.set(title=dtype, yscale="log", ylim=(1e-17, 10), xlabel="power of two of h", xticks=[-40, -20, 0])
panels[0].set_ylabel("relative error of the slope")
plt.show()

# %% [markdown]
# *Blue: median error of the difference formula over 65 points, by step h. Dashed: error of backward in the same
# format (drawn at $10^{-16}$ if it is less). On the right of each valley the formula is too coarse, on the left
# rounding wins; at an error of 1 ($10^0$) both values of f are rounded to the same number and the slope comes out
# as 0.*
#
# In every format backward is better than the best difference: it divides by no small $h$. So gradients are
# tested in float64, where the valley is deep, even if the network will run in float16. `check_grads` does
# that, along random directions. Here it meets an operation whose gradient somebody got wrong.


# %%
class Square(autograd.Function):
    """x * x, with the 2 of its gradient forgotten."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x


autograd.check_grads(lambda x: x * x, points)
print("x * x: gradient is right")
try:
    autograd.check_grads(Square.apply, points, order=1)
except AssertionError as error:
    print("Square:", str(error).split(" is ")[0], "is wrong")
else:
    raise RuntimeError("check_grads let a wrong gradient pass")

# %% [markdown]
# ## A cast is an operation
#
# Now the formats. A cast from float32 to float16 changes the numbers a little, so it is a function like others,
# and belongs in the record. What is its vjp? Away from the tiny rounding steps its slope is 1, so the gradient
# passes unchanged. One thing must change: the gradient takes the format of what it is a gradient *of*.


# %%
def to(x, dtype):
    """x in another format, for the engine above."""
    return Mini(x.data.astype(dtype), ((x, lambda g: g.astype(x.data.dtype)),))


cast = OPS["to"]
print(inspect.getsource(cast.forward), inspect.getsource(cast.vjps[0][0]), sep="")

# %% [markdown]
# That is the same in minamp: the vjp is `return g`, and the engine brings every gradient into the format of its
# tensor. Under `autocast` the weights stay float32, and a matrix product gets a float16 copy, made by this
# operation.
#
# **Predict.** Both engines now compute the products in float16, from float32 weights. In which format does the
# gradient of `W1` arrive? And if `W1` itself is stored as float16?

# %% tags=["hide-output"]
ours = {name: Mini(w.astype(float32)) for name, w in initial.items()}
low = {name: to(w, float16) for name, w in ours.items()}
to(network(low, Mini(images.astype(float16))), float32).cross_entropy(target).backward()

theirs = {name: minamp.tensor(w, dtype=float32, requires_grad=True) for name, w in initial.items()}
x = minamp.tensor(images)
walk = []
with observe(lambda phase, op, inputs, _: walk.append((op.name, inputs)) if phase == "backward" else None):
    with minamp.autocast(dtype=float16):
        loss = F.cross_entropy((x @ theirs["W1"]).relu() @ theirs["W2"], minamp.tensor(target))
    loss.backward()

stored_half = minamp.tensor(initial["W1"], dtype=float16, requires_grad=True)
(x.half() @ stored_half).float().sum().backward()
print("float32 weight, thirty-line engine:", ours["W1"].grad.dtype)
print("float32 weight, minamp:            ", theirs["W1"].grad.dtype)
print("float16 weight, minamp:            ", stored_half.grad.dtype)
print("\nthe walk back, from the loss to W1:")
for name, (_, node, i) in walk:
    print(f"  {name:12} hands on the gradient of a {node.metas[i][1]} tensor of shape {node.metas[i][0]}")
assert ours["W1"].grad.dtype == theirs["W1"].grad.dtype == float32 and stored_half.grad.dtype == float16
assert walk[-1][0] == "to" and walk[-1][1][1].metas[0] == (float32, (784, 32))[::-1]

# %% [markdown]
# Read the list from the top: the loss works in float32; `to` brings the gradient into float16, where the
# products work; the last line, again a `to`, brings it back to float32, because `W1` is float32. That is the
# whole secret. Nobody converts gradients as an extra step.
#
# **Predict.** How many of the 25,088 values of `W1.grad`, which are float32 numbers, could have been stored in
# float16 without any error?

# %% tags=["hide-output"]
g = theirs["W1"].grad.numpy()
on_grid = round_to(g, float16) == g
print(f"{on_grid.sum():,} of {g.size:,} values of W1.grad are float16 numbers")

exact = {name: minamp.tensor(w, dtype=float32, requires_grad=True) for name, w in initial.items()}
F.cross_entropy((x @ exact["W1"]).relu() @ exact["W2"], minamp.tensor(target)).backward()
e = exact["W1"].grad.numpy()
exactly = (round_to(e, float16) == e)[e != 0].mean()
assert on_grid.all() and exactly < 0.005
print("of the non-zero values of a float32 run: less than half a percent")

# %% [markdown]
# All of them. The gradient was rounded to float16 before the last cast, and a wider format does not bring lost
# digits back. So float32 gradients say nothing about how exact they are. They are useful for what comes
# *after*: dividing by the loss scale ([notebook 3](03_underflow.ipynb)) and adding small updates to float32
# weights ([notebook 5](05_master_weights.ipynb)).
#
# ## A tensor used twice: 2048 + 1
#
# The gradient of a tensor that is used several times is a sum, and [notebook 1](01_number_formats.ipynb) showed
# what sums do in float16: there $2048 + 1 = 2048$.
#
# Take a float32 weight `w`, in float16 products with 2048 and with 1. Its gradient is $2048 + 1$. There are two
# ways to make the record: cast `w` once and use the copy twice, as `autocast` does with its cache; or cast it
# for each use.
#
# **Predict.** What is the gradient in the thirty-line engine, with one cast and with two? And in minamp?


# %% tags=["hide-output"]
def of_the_engine(casts):
    w = Mini(np.float32(1))
    copies = [to(w, float16)] * 2 if casts == 1 else [to(w, float16), to(w, float16)]
    products = [c * Mini(np.float16(v)) for c, v in zip(copies, (2048, 1), strict=True)]
    (to(products[0], float32) + to(products[1], float32)).backward()
    return w.grad


def of_minamp(casts, naive):
    w = minamp.ones(1, 1, requires_grad=True)
    with minamp.autocast(dtype=float16, cache_enabled=casts == 1):
        loss = (minamp.tensor([[2048.0]]) @ w).sum() + (minamp.tensor([[1.0]]) @ w).sum()
    if naive:
        with autograd.naive_half_accumulation():
            loss.backward()
    else:
        loss.backward()
    return w.grad.item()


print(f"{'':36}{'one cast':>9}{'two casts':>11}")
rows = {
    "thirty-line engine": [of_the_engine(1), of_the_engine(2)],
    "minamp": [of_minamp(1, False), of_minamp(2, False)],
    "minamp, naive_half_accumulation": [of_minamp(1, True), of_minamp(2, True)],
}
for name, (one, two) in rows.items():
    print(f"{name:36}{one:9g}{two:11g}")
assert list(rows.values()) == [[2048, 2049], [2049, 2049], [2048, 2049]]

# %% [markdown]
# With one cast, the two contributions meet at the float16 copy. The thirty-line engine adds them there, in
# float16, and the 1 is gone. With two casts they meet at `w`, in float32. So a cache, made to save time, changes
# a result. PyTorch adds as the thirty-line engine does; inside `naive_half_accumulation` minamp does so too.
# Otherwise minamp keeps such sums in float32, with a cache or without.
#
# Does it matter? A recurrent network uses one weight at each time step. Here is a float16 weight that is used
# $n$ times, each use contributing the same amount, in four settings.


# %%
AMOUNTS = [1.0, 0.1]


def gradients(n, dtype):
    """Of two weights, used n times with 1.0 and 0.1: summed in float32, and summed in the format."""
    w = minamp.ones(2, dtype=dtype).requires_grad_()
    amounts = minamp.tensor(AMOUNTS, dtype=dtype)
    loss = (w * amounts).float()
    for _ in range(n - 1):
        loss = loss + (w * amounts).float()
    (wide,) = autograd.grad(loss.sum(), w, retain_graph=True)
    with autograd.naive_half_accumulation():
        (naive,) = autograd.grad(loss.sum(), w)
    return wide.tolist(), naive.tolist()


figure, panels = plt.subplots(1, 4, figsize=(9, 3.1), sharex=True, sharey=True, layout="constrained")
print(f"{'':11}{'each use':>9}{'uses':>7}{'true':>8}{'float32 sum':>13}{'in the format':>15}")
for pair, dtype, uses in (
    (panels[:2], float16, [16, 64, 256, 1024, 3000, 4096]),
    (panels[2:], bfloat16, [16, 64, 256, 512, 1024]),
):
    values = np.array([gradients(n, dtype) for n in uses])  # uses x (float32, format) x amounts
    for k, (axes, amount) in enumerate(zip(pair, AMOUNTS, strict=True)):
        true = minamp.tensor(amount, dtype=dtype).item() * np.array(uses)
        wide, naive = values[:, :, k].T
        axes.plot(uses, true, color=GREY, lw=1, ls="--", label="true")
        axes.plot(uses, wide, "o", color=BLUE, ms=4, label="float32 sum")
        axes.plot(uses, naive, "x-", color=RED, lw=1.5, label="sum in the format")
        axes.set(title=f"{dtype}, {amount:g} each", xscale="log", yscale="log", xlabel="uses of the weight")
        print(f"{dtype!s:11}{amount:9g}{uses[-1]:7}{true[-1]:8g}{wide[-1]:13g}{naive[-1]:15g}")
        assert abs(wide[-1] / true[-1] - 1) < 0.01 and naive[-1] < 0.7 * true[-1] and naive[-1] == naive[-2]
panels[0].set_ylabel("gradient of the weight")
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# *The gradient of a weight over the number of its uses, both axes logarithmic. A sum kept in the format of the
# weight (red) leaves the true line (dashed) and stalls; a float32 sum, rounded once at the end (blue), does
# not.*
#
# ## Questions
#
# 1. Give `Mini` an `exp`. It takes one line. Check it with a difference: which step do you take?
# 2. Change `Mini.backward` so that the thirty-line engine prints 2049 for one cast too. What does the change cost
#    in memory?
# 3. `model.half()` makes the weights float16. In which format do the gradients arrive, and why does
#    `GradScaler` refuse them? Try it with an optimizer without master weights.
# 4. A gradient of $10^{-9}$ arrives at a float16 tensor and goes on to a float32 weight. What arrives there?
#
# ## Where it is in minamp, and where it comes from
#
# - [`minamp.record.run_backward`](../minamp/record.py) is the walk, [`minamp.record.Node`](../minamp/record.py)
#   an entry of the record, [`minamp.record.observe`](../minamp/record.py) looks over its shoulder.
# - [`minamp.op.Op`](../minamp/op.py): widening, rounding once, and calling the vjps;
#   [`minamp.ops.cast.to`](../minamp/ops/cast.py) is the cast.
# - [`minamp.autograd.check_grads`](../minamp/autograd.py) and
#   [`minamp.autograd.naive_half_accumulation`](../minamp/autograd.py).
# - [Differences from PyTorch](pages/differences.md) has the 2048 + 1.
# - Baydin et al., [Automatic Differentiation in Machine Learning: a Survey](https://arxiv.org/abs/1502.05767),
#   2018, section 3.2: reverse mode. Micikevicius et al., [Mixed Precision
#   Training](https://arxiv.org/abs/1710.03740), 2018, section 3.1: float32 weights and their float16 copies.
