# %% [markdown]
# # 9. On a GPU
#
# Half precision was made to be fast, and so far nothing was faster: minamp on a CPU *emulates* half arithmetic.
# What does a GPU do with half numbers, how much faster can it get, and how do you see whether it did?
#
# After this notebook you will be able to
#
# - say what a tensor core rounds, and why it adds in float32;
# - bound the gain of a product or a convolution by arithmetic, before anything is run;
# - choose sizes that tensor cores like;
# - check with three indicators whether mixed precision is on in a training step, and whether it pays.
#
# It needs about 45 minutes. Where you see **Predict**, stop and write your answer down first. The answer is
# the output of the next cell, folded away where the viewer can do that.
#
# It runs without a GPU. What only a GPU can tell is then printed as *not measured*, with the reason; no time
# below is made up. With a GPU the same cells measure.
#
# The first cell finds minamp. If it says that minamp is not there: get the repository, run `pip install -e .`
# in its folder, and start this notebook again.
# On a hosted notebook service, in a cell above the first: `!git clone` the repository, then `%pip install -e` its
# folder, with `[gpu]` behind the folder's name where the service has a GPU, and restart the kernel. On your own
# machine with an NVIDIA GPU, `pip install -e .[gpu]` brings what it takes.

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

import textwrap
import time
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np

import minamp.nn.functional as F
from minamp import autocast, float16, float32, nn
from minamp.backends import gemm
from minamp.backends.cuda_conv import COLUMN_BYTES
from minamp.data import digits
from minamp.demo.experiment import mlp
from minamp.formats import cast, format_of, round_to, ulp

half = format_of(float16)
BLUE, RED, GREY = "#0072b2", "#d55e00", "#666666"
plt.rcParams.update({"figure.dpi": 80, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
print("minamp", minamp.__version__)

# %% [markdown]
# ## Is there one?
#
# `gpu_status()` says `ok`, or in one line why not. Nothing else in minamp has to know: a tensor moved with
# `.to("cuda")` is computed on by CuPy, another one by NumPy, and the code above them is the same.

# %% tags=["machine"]
GPU = minamp.gpu_status() == "ok"
print("\n".join(textwrap.wrap(minamp.gpu_status(), 100)))


# %%
def not_measured():
    """What a row of a table says where there is no GPU."""
    return f"not measured: {minamp.gpu_status()}"


# %% [markdown]
# ## What a tensor core computes
#
# A tensor core multiplies small tiles of matrices, 16 x 16 for instance, in one instruction:
#
# $$ D = A \cdot B + C, \qquad d_{ij} = c_{ij} + \sum_k a_{ik} b_{kj}, $$
#
# with $A$ and $B$ in float16 and $C$ and $D$, the running sums, in float32. A large product is many of these
# instructions; at the end the sums are rounded to float16, once.
#
# **Predict.** A float16 number has 11 binary digits, a float32 number 24. How many does the product of two
# float16 numbers need? For how many of a million random pairs is the float32 product not exact?

# %% tags=["hide-output"]
rng = np.random.default_rng(0)
every_half = np.arange(2**16, dtype=np.uint16).view(float16)
every_half = every_half[np.isfinite(every_half)]
a, b = rng.choice(every_half, (2, 1_000_000))
in_float32 = a.astype(np.float32) * b.astype(np.float32)
inexact = int((in_float32.astype(np.float64) != a.astype(np.float64) * b.astype(np.float64)).sum())
print(f"{inexact} of {len(a):,} products are not exact in float32")
with np.errstate(over="ignore", under="ignore"):
    in_half = cast(in_float32, float16)
print(f"rounded to float16, {np.mean(in_half.astype(np.float64) != in_float32):.1%} of them are not exact,")
print(f"and {np.mean(np.isinf(in_half)):.0%} are infinite")
small, large = half.smallest_subnormal**2, half.max**2
single = format_of(float32)
print(
    f"the products lie between {small:.3g} and {large:.3g}, float32 between {single.smallest_normal:.3g} and {single.max:.3g}"
)
assert inexact == 0 and single.smallest_normal < small and large < single.max

# %% [markdown]
# Twice eleven digits are twenty-two, so every product fits, and the range fits too. What is left to round are
# the additions and the last step. That also says how to emulate a tensor core: widen to float32, multiply
# with float32, round once. It is what minamp does on a CPU, and why its half results there are those of a GPU
# up to the order of the additions.
#
# ## Why the sums are float32
#
# **Predict.** A dot product of 4,096 pairs, both uniform between 0 and 1. The products are exact, but the
# running sum is rounded to float16 after each addition. By how much is the result wrong? And with float32
# sums, rounded to float16 at the end? And what is 300 · 300 - 300 · 300?


# %% tags=["hide-output"]
def prefixes(a, b, dtype):
    """The running sums of a * b along the last axis, rounded to dtype after each exact addition."""
    terms = a.astype(np.float64) * b.astype(np.float64)
    sums, total = np.empty_like(terms), np.zeros(terms.shape[:-1])
    for k in range(terms.shape[-1]):
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.asarray(round_to(total + terms[..., k], dtype), np.float64)
        sums[..., k] = total
    return sums


K, SAMPLES = 4096, 64
PLAIN = str.maketrans("", "", "${}")  # names as text, without the figure's signs
normal, other = rng.standard_normal((2, SAMPLES, K))
PAIRS = {
    "uniform from 0 to 1": rng.random((2, SAMPLES, K)),
    "normal after ReLU": np.maximum((normal, other), 0),
    "normal": np.stack((normal, other)),
    "normal, times $2^{-10}$": np.stack((normal, other)) * 2.0**-10,
}
errors = {}
for name, pair in PAIRS.items():
    a, b = (cast(x, float16) for x in pair)
    exact = np.cumsum(a.astype(np.float64) * b.astype(np.float64), axis=-1)
    size = np.sqrt(np.mean(exact**2, axis=0))  # over the samples, for each number of terms
    for kind, sums in {
        "float16 sums": prefixes(a, b, float16),
        "float32 sums": cast(prefixes(a, b, float32), float16).astype(np.float64),
    }.items():
        errors[name, kind] = np.sqrt(np.mean((sums - exact) ** 2, axis=0)) / size
print(f"{'error at 4096 terms':26}{'float16 sums':>14}{'float32 sums':>14}")
for name in PAIRS:
    values = (errors[name, kind][-1] for kind in ("float16 sums", "float32 sums"))
    print(f"{name.translate(PLAIN):26}" + "".join(f"{v:14.2%}" for v in values))
x = np.array([300.0, 300.0]), np.array([300.0, -300.0])
cancelled = [prefixes(*x, dtype)[-1] for dtype in (float16, float32)]
print(f"300 * 300 - 300 * 300: float16 sums {cancelled[0]:g}, float32 sums {cancelled[1]:g}")
assert errors["uniform from 0 to 1", "float16 sums"][-1] > 0.05
assert all(errors[name, "float32 sums"][-1] < half.eps for name in list(PAIRS)[:3])
assert all(errors[name, "float16 sums"][-1] > 10 * errors[name, "float32 sums"][-1] for name in PAIRS)
assert cancelled == [np.inf, 0.0]
assert max(PAIRS, key=lambda name: errors[name, "float16 sums"][-1]) == "uniform from 0 to 1"
assert max(PAIRS, key=lambda name: PAIRS[name].prod(axis=0).sum(axis=-1).mean()) == "uniform from 0 to 1"

# %%
figure, panels = plt.subplots(1, 4, figsize=(9.5, 2.9), sharex=True, sharey=True, layout="constrained")
terms = np.arange(1, K + 1)
for axes, name in zip(panels, PAIRS, strict=True):
    for kind, color in (("float16 sums", RED), ("float32 sums", BLUE)):
        axes.plot(terms, errors[name, kind], color=color, label=kind, lw=1.6)
    axes.axhline(half.eps / 2, color=GREY, lw=0.8, ls="--")
    axes.set(title=name, xscale="log", yscale="log", xlabel="terms", ylim=(5e-5, 0.5))
panels[0].set_ylabel("relative error")
panels[0].legend(frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# *Error of a dot product against its number of terms, for four kinds of numbers: root mean square over 64
# samples, relative to the root mean square of the result. Red: the running sum is float16. Blue: it is
# float32 and rounded to float16 at the end. Dashed: half an eps, the most one rounding can do to a normal
# number.*
#
# With float32 sums the error of the first three stays where one rounding puts it, whatever the number of terms.
# With float16 sums it grows with every term, and most for the uniform numbers, whose sum is the largest: the
# larger the sum, the larger its steps. In the last panel the products are near the smallest float16 numbers.
# There a float32 sum gets better as it grows out of their coarse grid, and a float16 sum does not, since each of
# its steps was rounded on that grid. A float16 sum can also overflow half-way although the result is small.
#
# A tensor core can do both, and the float16 variant is never what you want in training. minamp's products ask
# cuBLAS for float32 sums, and forbid it to add partial results in half. For this lesson alone its `gemm` has
# `half_sums=True`:

# %% tags=["machine"]
if GPU:
    a, b = (
        minamp.tensor(x[:1].astype(np.float32)).half().to("cuda")._data for x in PAIRS["uniform from 0 to 1"]
    )
    exact = (cast(a.get(), np.float64) @ cast(b.get(), np.float64).T).item()
    for half_sums in (True, False):
        out = minamp.zeros(1, 1, dtype=float16, device="cuda")._data
        error = float(gemm.gemm(a, b.T, out, half_sums=half_sums).get()[0, 0]) / exact - 1
        print(f"{'float16' if half_sums else 'float32'} sums on this GPU: {error:+.2%}")
else:
    print("\n".join(textwrap.wrap(not_measured(), 100)))

# %% [markdown]
# ## How much faster can it get?
#
# A computation moves $B$ bytes and does $N$ operations. If the chip does at most $P$ operations a second, and
# its memory carries at most $W$ bytes a second, then it takes at least
#
# $$ t \ge \max\left(\frac{N}{P}, \frac{B}{W}\right), \qquad
# \text{or in operations a second}\quad \frac{N}{t} \le \min\left(P, \frac{N}{B} W\right). $$
#
# The second form, drawn against the *intensity* $N/B$, looks like a roof: a slope, where the memory is the
# limit, and a flat top, where the arithmetic is. And nothing takes less time than the launch of a kernel, some
# microseconds.
#
# Half changes two things: $B$ is halved, and $P$ is that of the tensor cores. The next cell holds the only figures
# in this notebook that are typed in: **peaks from the makers' data sheets**, which no program reaches, and three
# microseconds for a launch, which is an assumption. Nothing about them was measured here. Put your own card's
# figures in.


# %%
@dataclass
class Card:
    """Peaks, by data sheet: operations a second with tensor cores and in float32, bytes a second. Seconds a launch."""

    half: float
    float32: float
    bandwidth: float
    launch: float = 3e-6

    def seconds(self, work, dtype):
        """The least time the work can take."""
        peak = self.half if dtype == float16 else self.float32
        return max(work.operations / peak, work.bytes(dtype) / self.bandwidth, self.launch)


@dataclass
class Work:
    """So many operations on so many numbers read and written."""

    name: str
    operations: float
    numbers: float

    def bytes(self, dtype):
        return self.numbers * dtype.itemsize


def product(name, m, k, n):
    """(m, k) @ (k, n): a multiplication and an addition for each of m * k * n terms."""
    return Work(name, 2 * m * k * n, m * k + k * n + m * n)


CARDS = {
    "T4": Card(65e12, 8.1e12, 320e9),
    "A100": Card(312e12, 19.5e12, 2039e9),
    "H200": Card(989e12, 67e12, 4800e9),
}
YOURS = "T4"
positions, channels = 64 * 56 * 56, 64  # 64 images of 56 x 56
WORKS = [
    Work("add, 16 million numbers", 16e6, 3 * 16e6),
    product("linear, one sample, 4096", 1, 4096, 4096),
    product("10 classes, batch 65536", 65536, 512, 10),
    Work(
        "conv 3 x 3, 64 channels", 2 * positions * 9 * channels**2, 2 * positions * channels + 9 * channels**2
    ),
    product("product 4096 x 4096 x 4096", 4096, 4096, 4096),
    product("product 128 x 128 x 128", 128, 128, 128),
]

# %% [markdown]
# **Predict.** For each of the six works: does half gain nothing, a factor of two, or more, on the first card?
# (The printed gain is a bound: arithmetic from the peak figures.)

# %% tags=["hide-output"]
gains = {
    name: [card.seconds(work, float32) / card.seconds(work, float16) for work in WORKS]
    for name, card in CARDS.items()
}
print(
    f"{'':28}{'operations':>12}{'bytes':>10}{'a byte':>10}   gain at most on"
    + "".join(f"{c:>7}" for c in CARDS)
)
for i, work in enumerate(WORKS):
    intensity = work.operations / work.bytes(float16)
    print(
        f"{work.name:28}{work.operations:12.2g}{work.bytes(float16):10.2g}{intensity:10.4g}{'':18}"
        + "".join(f"{gains[c][i]:7.1f}" for c in CARDS)
    )
T4 = CARDS["T4"]
assert gains["T4"][0] == gains["T4"][1] == gains["T4"][2] == 2  # memory-bound
assert abs(gains["T4"][4] - T4.half / T4.float32) < 1e-9 and gains["T4"][4] > 8  # compute-bound
assert gains["T4"][5] == 1  # launch-bound
assert 2 < gains["T4"][3] <= gains["T4"][4] and 0.16 < WORKS[0].operations / WORKS[0].bytes(float16) < 0.17

# %%
card = CARDS[YOURS]
figure, panels = plt.subplots(2, 3, figsize=(9.5, 5.2), sharex=True, sharey=True, layout="constrained")
intensity = np.geomspace(0.05, 5000, 200)
for axes, work in zip(panels.flat, WORKS, strict=True):
    for dtype, peak, color in ((float16, card.half, BLUE), (float32, card.float32, RED)):
        axes.loglog(intensity, np.minimum(peak, intensity * card.bandwidth) / 1e12, color=color, lw=1)
        reached = work.operations / card.seconds(work, dtype) / 1e12
        axes.plot(work.operations / work.bytes(dtype), reached, "o", color=color, ms=8, label=str(dtype))
    gain = card.seconds(work, float32) / card.seconds(work, float16)
    axes.set_title(f"{work.name}:\nat most {gain:.1f} x", fontsize=10)
for axes in panels[1]:
    axes.set_xlabel("operations a byte")
for axes in panels[:, 0]:
    axes.set_ylabel("TFLOP/s")
panels[0, 0].legend(frameon=False, loc="upper left")
figure.suptitle(
    f"Arithmetic from peak figures, not measured: {YOURS}, {card.half / 1e12:g} TFLOP/s half, "
    f"{card.float32 / 1e12:g} float32, {card.bandwidth / 1e9:g} GB/s"
)
plt.show()

# %% [markdown]
# *Rooflines of one card for half (blue) and float32 (red) and, as dots, the most that six works can reach
# under them: arithmetic from the peak figures above, nothing of it measured. On the slope
# both roofs are one. A dot below its roof is held down by the time of a launch.*
#
# - Under the slope, half gains a factor of *two*, as it moves half the bytes: additions, activations, a layer
#   with one sample, a layer with few outputs.
# - Under the flat top it gains what the tensor cores give: the ratio of the two peaks.
# - Below the roof it gains nothing. A small network is all launches, and the casts that autocast adds are
#   launches too.
#
# So large batches and wide layers pay, and a network gains less than its largest product.
#
# ## A product and a convolution in minamp
#
# A convolution is a product as well: each output position takes its window of the input as a row of
# $C \cdot 3 \cdot 3$ numbers, a *column* in the usual name, times the weights. minamp makes these columns in
# chunks, each small enough for the cache of an A100 (40 MB) or a larger card, and multiplies chunk by chunk. A T4's
# 4 MB are too small for one.
#
# **Predict.** A product of 512 x 512 and a convolution, both with half inputs. Which format do they come out
# in? How many results differ from the exact sum, rounded once? And how many more bytes does the convolution
# move if all columns are written out and read?

# %% tags=["hide-output"]
rng = np.random.default_rng(1)
A, B = (minamp.tensor(rng.standard_normal((512, 512)).astype(np.float32)).half() for _ in range(2))
images = minamp.tensor(rng.standard_normal((4, 16, 14, 14)).astype(np.float32)).half()
kernels = minamp.tensor(rng.standard_normal((32, 16, 3, 3)).astype(np.float32) / 12).half()


def windows_times_weights(x, w):
    """The convolution with padding 1 as one product of columns and weights, in float64."""
    padded = np.pad(cast(x, np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    columns = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3)).transpose(
        0, 2, 3, 1, 4, 5
    )
    n, h, wide = columns.shape[:3]
    rows = columns.reshape(n * h * wide, -1)
    y = rows @ cast(w, np.float64).reshape(len(w), -1).T
    return y.reshape(n, h, wide, len(w)).transpose(0, 3, 1, 2)


def compare(name, y, exact):
    """Print how many values are not the exact ones rounded once, and how far off those are that don't nearly cancel."""
    y, exact = cast(y.cpu().numpy(), np.float64), np.asarray(exact)
    other = y != cast(cast(exact, float16), np.float64)
    plain = np.abs(exact) > 0.01 * exact.std()
    far = (np.abs(y - exact) / ulp(exact, float16))[plain].max()
    print(
        f"{name:12} under {np.ceil(100 * other.mean()):.0f} % of {y.size:,} values differ from the exact sum rounded once;"
    )
    print(f"{'':12} above 1 % of the typical size all are within {np.ceil(10 * far) / 10:.1f} ulp of it")
    return other.mean(), far


EXACT = {
    "product": cast(A.numpy(), np.float64) @ cast(B.numpy(), np.float64),
    "convolution": windows_times_weights(images.numpy(), kernels.numpy()),
}
for name, y in {"product": A @ B, "convolution": F.conv2d(images, kernels, padding=1)}.items():
    share, far = compare(name, y, EXACT[name])
    assert y.dtype == float16 and share < 0.01 and far < 0.7

values = positions * channels
least, columns = 2 * values * 2, 9 * values * 2
print("64 images of 56 x 56, 64 channels:")
print(
    f"input and output {least / 1e6:.0f} MB, with columns written and read {(least + 2 * columns) / 1e6:.0f} MB"
)
chunks = -(-columns // COLUMN_BYTES)
print(f"columns {columns / 1e6:.0f} MB, made in {chunks} chunks of at most {COLUMN_BYTES / 1e6:.0f} MB")
assert (least + 2 * columns) / least == 10

# %% [markdown]
# Half in, float32 sums, half out. Of the few results that are not the rounded exact sum most are near a tie, and
# the float32 sum fell on the other side; in some the terms nearly cancel, and what is left are the float32 sum's
# own errors. Written out, the columns would make ten times the traffic; in chunks most of it stays in the cache.
#
# The same on the GPU, if there is one: the code differs in `.to("cuda")` only.

# %% tags=["machine"]
if GPU:
    compare("product", A.to("cuda") @ B.to("cuda"), EXACT["product"])
    compare("convolution", F.conv2d(images.to("cuda"), kernels.to("cuda"), padding=1), EXACT["convolution"])
else:
    print("\n".join(textwrap.wrap(not_measured(), 100)))

# %% [markdown]
# ## Sizes in multiples of 8
#
# A GPU reads memory in words of 16 bytes, that is 8 half numbers. If each row of a matrix starts at a multiple
# of 16 bytes, every word holds numbers of one row. NVIDIA's guides advise it for tensor cores.
#
# **Predict.** A layer with 10 classes: how long is a row of its result, and how many of the rows start at a
# multiple of 16 bytes? With 1000 classes? With 1001? And for which of these does minamp pad?

# %% tags=["hide-output"]
print(f"{'columns':>8}{'row':>12}{'rows that start at a word':>28}")
aligned = {}
for n in (8, 10, 12, 16, 1000, 1001):
    starts = np.arange(65536) * n * float16.itemsize
    aligned[n] = np.mean(starts % 16 == 0)
    print(f"{n:8}{n * float16.itemsize:6} bytes{aligned[n]:28.1%}")


def padded(m, k, n):
    """What minamp makes of the sizes of (m, k) @ (k, n) in half; the arrays only lend their shapes and strides."""
    a, b, out = (np.empty(shape, float16) for shape in ((m, k), (k, n), (m, n)))
    return gemm.padding(a, b, out)


print()
sizes = {}
for m, k, n in ((65536, 512, 10), (65536, 512, 16), (8192, 4096, 1001), (256, 128, 10), (65536, 509, 512)):
    sizes[m, k, n] = padded(m, k, n)
    print(
        f"({m}, {k}) @ ({k}, {n}): {f'padded to (m, n, k) = {sizes[m, k, n]}' if sizes[m, k, n] else 'as it is'}"
    )
assert aligned[8] == aligned[16] == aligned[1000] == 1 and aligned[10] == 0.25 and aligned[1001] < 0.2
assert [new and new[1] for new in sizes.values()] == [16, None, 1008, None, None]

a, b = (cast(rng.integers(-8, 8, shape).astype(np.float64), float16) for shape in ((64, 32), (32, 10)))
wide = minamp.tensor(a) @ minamp.tensor(np.pad(b, ((0, 0), (0, 6))))
assert bool((wide[:, :10].numpy() == (minamp.tensor(a) @ minamp.tensor(b)).numpy()).all())

# %% [markdown]
# With 10 columns only every fourth row starts at a word. minamp makes the result 16 wide, with zeros that
# change no sum, and takes 10 columns of it; but only where the product is large enough to pay for the copies.
# Small ones stay as they are, and so do those where the copies would be a large part of the work, as in the last
# line, whose inputs are odd. You can do better and choose the sizes yourself: hidden layers, channels, and a
# vocabulary padded to a multiple of 8.
#
# ## Three indicators
#
# A speed-up that does not come is hard to see. `verify_amp` runs a training step as it is and again with
# autocast switched off, and compares three things:
#
# 1. **dtypes**: in which format matmuls and convolutions ran;
# 2. **memory**: what is kept for backward;
# 3. **time** of the step.
#
# **Predict.** Three steps: a network under autocast; the same one, but `model(x)` stands before the region and
# only the loss in it; and a wide network with Adam and a batch of 4. In which is mixed precision on? What
# becomes of the memory kept for backward, and of all memory?


# %% tags=["hide-output"]
def make_step(network, batch, outside=False, device="cpu"):
    """A training step on the digits, and what verify_amp restores after it."""
    minamp.manual_seed(0)
    model = network().to(device)
    optimizer, scaler = minamp.optim.Adam(model.parameters(), lr=1e-3), minamp.GradScaler()
    x, y = (minamp.tensor(t).to(device) for t in digits("train")[:batch])

    def step():
        with autocast(enabled=not outside):
            scores = model(x)
        with autocast():
            loss = F.cross_entropy(scores, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step, {"model": model, "optimizer": optimizer, "scaler": scaler}


def wide_network():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


STEPS = {
    "network under autocast": (mlp, 256, False),
    "model outside the region": (mlp, 256, True),
    "wide, Adam, batch of 4": (wide_network, 4, False),
}
reports = {}
print(f"{'':26}{'on':>5}{'products run in':>22}{'kept for backward':>19}{'all memory':>12}")
for name, setting in STEPS.items():
    step, parts = make_step(*setting)
    report = reports[name] = minamp.verify_amp(step, rounds=1, **parts)
    ran = ", ".join(f"{sum(row.values())} {dtype}" for dtype, row in report.with_amp.products.items())
    print(
        f"{name:26}{'yes' if report.on else 'no':>5}{ran:>22}{report.saved_bytes.ratio:17.2f} x{report.all_bytes.ratio:10.2f} x"
    )
good, off, wide = reports.values()
assert good.on and not off.on and wide.on
assert good.saved_bytes.ratio < 0.8 and off.saved_bytes.ratio > 0.95 and wide.all_bytes.ratio > 1.02

# %% [markdown]
# One indicator alone would mislead. In the second step there *is* a region, and it does nothing: all products
# are float32. In the third it is on, and memory grows. The few activations shrink, but backward keeps the half
# copies of the weights, which outweigh them by far (the more so on a CPU, where minamp keeps large ones in words
# of 4 bytes). Here is the whole report for the first one, times of this machine included, on the GPU if there is one:

# %% tags=["machine"]
step, parts = make_step(*STEPS["network under autocast"], device="cuda" if GPU else "cpu")
print(minamp.verify_amp(step, rounds=5, **parts))

# %% [markdown]
# ## What this machine measures
#
# Times in half and in float32 on the GPU, between two marks in its stream of work, the fastest of ten rounds:
# after the arithmetic the measurement. The last row is the emulation on the CPU: there half is the float32 product
# and the casts around it, so nothing can be won.


# %% tags=["machine"]
def gpu_seconds(function, rounds=10, calls=5):
    """Seconds a call takes on the GPU, without Python's part."""
    start, end = (minamp.cuda.Event(enable_timing=True) for _ in range(2))
    best = np.inf
    for _ in range(rounds):
        function()
        start.record()
        for _ in range(calls):
            function()
        end.record()
        best = min(best, start.elapsed_time(end) / 1000 / calls)
    return best


def cpu_seconds(candidates, rounds=20):
    """Of each function the fastest of some calls, in turn: what slows one down slows the others."""
    best = [np.inf] * len(candidates)
    for _ in range(rounds):
        for i, function in enumerate(candidates):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def functions(dtype, device):
    """name -> (a function to time, its operations)."""
    x, y = (minamp.randn(2048, 2048).to(device, dtype) for _ in range(2))
    images, kernels = (
        minamp.randn(64, 64, 56, 56).to(device, dtype),
        minamp.randn(64, 64, 3, 3).to(device, dtype),
    )
    long, narrow = minamp.randn(65536, 512).to(device, dtype), minamp.randn(512, 10).to(device, dtype)
    return {
        "product 2048 x 2048 x 2048": (lambda: x @ y, 2 * 2048**3),
        WORKS[3].name: (lambda: F.conv2d(images, kernels, padding=1), WORKS[3].operations),
        WORKS[2].name: (lambda: long @ narrow, WORKS[2].operations),
    }


def row(name, seconds, operations):
    wide, narrow = seconds
    print(
        f"{name:34}{1e3 * wide:10.3f} ms{1e3 * narrow:10.3f} ms{wide / narrow:8.2f} x{operations / narrow / 1e12:10.3f} TFLOP/s"
    )


minamp.manual_seed(0)
print(f"{'':34}{'float32':>13}{'float16':>13}{'gain':>10}{'in half':>18}")
if GPU:
    both = [functions(dtype, "cuda") for dtype in (float32, float16)]
    for name, (_, operations) in both[0].items():
        row(name, [gpu_seconds(f[name][0]) for f in both], operations)
else:
    print("\n".join(textwrap.wrap(f"on a GPU: {not_measured()}", 100)))
x, y = minamp.randn(512, 512), minamp.randn(512, 512)
pairs = [(x, y), (x.half(), y.half())]
row("CPU, product 512 x 512 x 512", cpu_seconds([lambda a=a, b=b: a @ b for a, b in pairs]), 2 * 512**3)

# %% [markdown]
# ## Questions
#
# 1. A square product of size $n$ in half does $2n^3$ operations on $3n^2$ numbers. From which $n$ on is it under
#    the flat top of your card? Check with `product` and `Card.seconds`.
# 2. In the table of works the layer with one sample gains a factor of two, like an addition. Why does a batch
#    of 256 gain more? For which batch does the bound leave the slope?
# 3. A language model has 50,257 words. What does minamp make of its last layer with a batch of 8,192 and 768
#    inputs? Would 50,264 words be better, and what happens to the seven words that don't exist?
# 4. `verify_amp` says that mixed precision is on, but does not pay. Name two reasons it can find, and for each
#    what you would change.
#
# ## Where it is in minamp, and where it comes from
#
# - [`minamp.backends.gemm.gemm`](../minamp/backends/gemm.py): the one entry to products on the GPU, half in,
#   float32 sums; [`minamp.backends.gemm.padding`](../minamp/backends/gemm.py): multiples of 8.
# - [`minamp.backends.cuda_conv.conv2d`](../minamp/backends/cuda_conv.py): columns and products in chunks;
#   [`minamp.backends.kernels_wmma.conv2d_wmma`](../minamp/backends/kernels_wmma.py): the same on tensor cores by
#   hand, without columns; [`minamp.backends.cpu.matmul`](../minamp/backends/cpu.py): the emulation.
# - [`minamp.backends.device.gpu_status`](../minamp/backends/device.py); `minamp.verify_amp`, whose words come from
#   [`minamp.verify.report.verdict`](../minamp/verify/report.py). `make bench` measures all this with more care
#   ([speed](pages/speed.md)).
# - Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018, section 3.3: which
#   sums are float32. Markidis et al., [NVIDIA Tensor Core Programmability, Performance &
#   Precision](https://arxiv.org/abs/1803.04014), 2018. Williams, Waterman and Patterson, Roofline: An Insightful
#   Visual Performance Model for Multicore Architectures, Communications of the ACM, 2009.
