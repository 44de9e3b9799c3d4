# %% [markdown]
# # 1. Number formats
#
# After this notebook you will be able to
#
# - read a half-precision number from its bits, and write one down by hand;
# - say how far apart neighbouring numbers are, and so which additions do nothing;
# - say which values become 0 and which become infinite, in each of six formats;
# - predict where a running sum stalls.
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

from minamp.formats import (
    bfloat16,
    bits,
    cast,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    format_of,
    neighbours,
    round_to,
    tf32,
    ulp,
)

SIX = [format_of(f) for f in (float32, tf32, float16, bfloat16, float8_e4m3fn, float8_e5m2)]
BLUE, RED, GREY = "#0072b2", "#d55e00", "#666666"
plt.rcParams.update({"figure.dpi": 80, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
print("minamp", minamp.__version__)

# %% [markdown]
# ## Bits by hand
#
# A floating-point number has three fields: a sign bit $s$, an exponent field $e$ and a mantissa field $m$ of
# $p$ bits. With the format's bias $b$ its value is
#
# $$ x = (-1)^s \cdot 2^{e-b} \cdot \left(1 + \frac{m}{2^p}\right) \qquad\text{if } e > 0, $$
#
# $$ x = (-1)^s \cdot 2^{1-b} \cdot \frac{m}{2^p} \qquad\text{if } e = 0. $$
#
# The second line holds the *subnormal* numbers, and 0. The largest $e$ is set apart: $m = 0$ is infinity, anything else
# NaN (e4m3fn keeps all but one of these patterns for numbers). float16 has a 5-bit exponent with bias 15 and a 10-bit
# mantissa.
#
# **Predict.** Write 0.15625 = 5/32 in float16: which power of two is just below it, and what is left for the
# mantissa?

# %% tags=["hide-output"]
print(bits(0.15625, float16))

# %% [markdown]
# The power of two below 5/32 is 1/8, so the exponent field is 15 - 3. What is left is the factor 5/4 = 1 +
# 1/4, and a quarter is the mantissa's second bit. The function below is the formula above; it gets the number
# back.


# %%
def value(pattern, f):
    """The number that a string of bits such as '0 01100 0100000000' stands for in the format f."""
    s, e, m = (int(field, 2) for field in pattern.split())
    fraction = m / 2**f.mantissa_bits
    if e == 0:
        return (-1) ** s * 2.0 ** (1 - f.bias) * fraction
    return (-1) ** s * 2.0 ** (e - f.bias) * (1 + fraction)


half = format_of(float16)
for x in (0.15625, 1.0, -2.5, 0.1, 1e-5, 2.0**-24):
    pattern = bits(x, half)
    print(f"{x:<12.6g} {pattern}   = {value(pattern, half):.15g}")
    assert value(pattern, half) == float(cast(np.float64(x), half.dtype))

# %% [markdown]
# One tenth is not a sum of a few powers of two, so it is rounded to the nearest number of the format. If two
# are equally near, the one whose last bit is 0 wins: *round to nearest, ties to even*. Every format here does
# that.
#
# ## Six formats side by side
#
# They differ in how they spend their bits. The exponent buys *range*, the mantissa buys *precision*.
#
# **Predict.** float16 and bfloat16 both have 16 bits. Which one reaches further? Which one has more digits?
# And which of the six have the range of float32?

# %% tags=["hide-output"]
print(
    f"{'':14}{'bits':>12}{'largest':>11}{'normal from':>13}{'smallest':>11}{'0 up to':>11}{'eps':>10}{'integers to':>13}"
)
for f in SIX:
    fields = f"1+{f.exponent_bits}+{f.mantissa_bits}"
    print(
        f"{f.name:14}{fields:>12}{f.max:11.3g}{f.smallest_normal:13.3g}{f.smallest_subnormal:11.3g}"
        f"{f.flush:11.3g}{f.eps:10.2g}{2 ** (f.mantissa_bits + 1):13,}"
    )

# %% [markdown]
# - *largest*: $(2 - 2^{-p}) \cdot 2^{b}$; e4m3fn is the exception, it gives up infinity for one more power of
#   two.
# - *normal from* $2^{1-b}$; *smallest*: the smallest subnormal, $2^{1-b-p}$; *0 up to*: half of that, a tie
#   that goes to even.
# - *eps*: the step just above 1, $2^{-p}$; *integers to*: up to $2^{p+1}$ every whole number is there.
#
# tf32 is what a tensor core makes of float32 input: the range of float32 with the mantissa of float16, kept
# in 32-bit words.

# %%
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for i, f in enumerate(reversed(SIX)):
    low, normal, high = (np.log2(v) for v in (f.smallest_subnormal, f.smallest_normal, f.max))
    axes.barh(i, high - normal, left=normal, color=BLUE, label="normal: full precision" if i == 0 else None)
    axes.barh(i, normal - low, left=low, color=RED, label="subnormal: fewer digits" if i == 0 else None)
axes.set_yticks(range(6), [f.name for f in reversed(SIX)])
axes.set(xlabel="power of two", title="What can be stored at all")
axes.legend(loc="lower right", frameon=False)
plt.show()

# %% [markdown]
# ## The step from one number to the next
#
# The distance to the next number is called *ulp*, unit in the last place. Between two powers of two it is
# constant. For a normal number
#
# $$ \mathrm{ulp}(x) = 2^{\lfloor \log_2 |x| \rfloor - p}. $$
#
# It doubles at every power of two, so *relative* to $x$ it stays between $2^{-p-1}$ and $2^{-p}$. The subnormal numbers
# all have the ulp of the smallest normal one.
#
# **Predict.** In float16, what is 2048 + 1? 2048 + 2? 2048 + 3? And 1 + 0.0004?

# %% tags=["hide-output"]
for a, b in ((2048, 1), (2048, 2), (2048, 3), (1, 0.0004), (1, 0.0005)):
    total = minamp.tensor(float(a), dtype=float16) + minamp.tensor(float(b), dtype=float16)
    print(
        f"{a} + {b} = {total.item():.10g}     ulp({a}) = {ulp(a, float16):g}, neighbours {neighbours(a, float16)}"
    )

# %% [markdown]
# An addition does nothing if what is added is less than half an ulp, or exactly half of it and the number is
# even. That one rule explains the weights that stop learning (notebook on master weights) and the sums at the
# end of this one.
#
# ## Subnormals, flush to zero, overflow
#
# **Predict.** Which of these survive in float16: 1e-5? 6e-8? 3e-8? 2.9e-8? 65504? 65519? 65520?

# %% tags=["hide-output"]
print(f"{'x':>10}{'float16':>18}{'error':>9}   bits")
for x in (1e-4, 1e-5, 6e-8, 3e-8, 2.9e-8, 65504.0, 65519.0, 65520.0):
    y = float(cast(np.float64(x), float16))
    error = f"{abs(y - x) / x:.2%}" if np.isfinite(y) else "lost"
    print(f"{x:10.6g}{y:18.9g}{error:>9}   {bits(x, float16)}")
print(f"\nflush: |x| <= {half.flush:.9g} = 2^{np.log2(half.flush):.0f} becomes 0")
print(f"overflow: |x| >= {half.overflow:g} becomes inf, though the largest number is {half.max:g}")

# %% [markdown]
# Two common beliefs are wrong. A value of 1e-5 is *not* lost in float16: it is subnormal, stored with fewer
# digits. And overflow does not begin at the largest number but half a step above it, because up to there the
# largest number is the nearest one.
#
# The figure shows the largest relative error of a cast within each power of two, for all six formats at once.
# Read the panels of float16 and float8 from right to left: lost to infinity (e4m3fn has none: NaN), then a flat floor
# of at most half an eps, then the subnormals, whose error doubles with every power of two, then 100 %: the value is 0.
# Of float32, tf32 and bfloat16 there is only the floor: their ends lie outside of the picture.

# %%
powers = np.arange(-60, 40)
x = np.exp2(powers)[:, None] * np.linspace(1, 2, 1001)[:-1]  # a row for each power of two
figure, panels = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained")
for axes, f in zip(panels.flat, SIX, strict=True):
    y = (round_to(x, tf32) if f is tf32 else cast(x, f.dtype)).astype(np.float64)
    error = (np.abs(y - x) / x).max(axis=1)
    axes.step(powers, np.where(np.isfinite(error), error, np.nan), where="post", color=BLUE)
    for start, end in ((-60, np.log2(f.flush)), (np.log2(f.overflow), 40)):
        if start < end:
            axes.axvspan(start, end, color=RED, alpha=0.15, lw=0)
    axes.axhline(f.eps / 2, color=GREY, lw=0.8, ls="--")
    axes.set(title=f.name, yscale="log", ylim=(1e-9, 3), xlim=(-60, 40))
for axes in panels[1]:
    axes.set_xlabel("power of two of x")
for axes in panels[:, 0]:
    axes.set_ylabel("largest relative error")
figure.suptitle("Error of one cast. Red: lost, to 0 on the left, to inf or NaN on the right. Dashed: eps / 2")
plt.show()

# %% [markdown]
# Gradients of a network lie mostly on the left of this picture. That is why float16 training needs *loss
# scaling*, which moves them to the right, and bfloat16 training does not: its range is that of float32, and
# it pays for that with three bits less of mantissa.
#
# ## Sums that stall
#
# A running sum $S_n = \mathrm{round}(S_{n-1} + x)$ stalls as soon as $x$ is no more than half an ulp of the
# sum:
#
# $$ x \le \tfrac{1}{2}\,\mathrm{ulp}(S) = 2^{\lfloor\log_2 S\rfloor - p - 1}. $$
#
# **Predict.** Add 4096 ones in float16, one after the other. What comes out? And in bfloat16?

# %% tags=["hide-output"]
ones = np.ones(4096)
for f in (float16, bfloat16):
    x = minamp.tensor(ones, dtype=f)
    print(
        f"{f}: running sum {minamp.naive_half_sum(x).item():g}, with a float32 accumulator {x.sum().item():g}"
    )

# %% [markdown]
# `naive_half_sum` rounds after every addition; it is in minamp to be looked at, not to be used. `sum` adds in
# float32 and rounds once at the end, which is what a tensor core and every reduction in minamp does.
#
# Here are six settings of the same experiment: three formats, and two values that are added again and again.


# %%
def running_sum(x, f, count):
    """All partial sums of count times x, rounded to the format f after each addition."""
    total, sums = np.float64(0), []
    x = np.float64(round_to(np.float64(x), f))
    for _ in range(count):
        total = np.float64(round_to(total + x, f))
        sums.append(total)
    return np.array(sums)


count = 5000
figure, panels = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, layout="constrained")
print(f"{'':12}{'added':>8}{'stalls at':>12}{'after':>8}{'true there':>12}{'by the rule':>13}")
for row, x in zip(panels, (0.1, 0.001), strict=True):
    for axes, f in zip(row, (tf32, half, format_of(bfloat16)), strict=True):
        sums = running_sum(x, f, count)
        stall = int(np.argmax(sums == sums[-1])) + 1
        # the rule: the first power of two from which on half an ulp is no less than x
        rule = next(2.0**e for e in range(-20, 20) if ulp(2.0**e, f) / 2 >= round_to(np.float64(x), f))
        text = (f"{sums[-1]:12.4g}{stall:8}{stall * x:12.4g}") if stall < count else f"{'not yet':>12}{'':20}"
        print(f"{f.name:12}{x:8}{text}{rule:13.4g}")
        axes.plot(x * np.arange(1, count + 1), color=GREY, ls="--", lw=1, label="true")
        axes.plot(sums, color=RED, lw=1.8, label="running sum")
        axes.set(title=f"{f.name}, adding {x}")
for axes in panels[1]:
    axes.set_xlabel("additions")
panels[0, 0].legend(frameon=False)
plt.show()

# %% [markdown]
# tf32 and float16 stall at the same place: both have 10 mantissa bits, and range plays no part. bfloat16,
# with 7, stalls at an eighth of it. Before a sum stalls it can also run *ahead* of the true one: each step is
# rounded, and if it is always rounded up, the errors add up.
#
# ## Questions
#
# 1. Write -0.75 in bfloat16 by hand: sign, exponent field, mantissa. Check with `bits(-0.75, bfloat16)`.
# 2. The loss scale of a new `GradScaler` is 65536. Why must the scale, and the scaled loss, not be stored in
#    float16?
# 3. A weight is 1.0 in float16, and an update wants to take 0.0002 away. What happens? And if it wants to add
#    0.0004? Why do the two limits differ by a factor of two? Use `neighbours(1.0, float16)`.
# 4. You average the loss over N examples by adding N values near 2 in bfloat16 and dividing. From which N on
#    is the mean wrong by more than half?
#
# ## Where it is in minamp, and where it comes from
#
# - [`minamp.formats.bits`](../minamp/formats.py), [`minamp.formats.ulp`](../minamp/formats.py),
#   [`minamp.formats.neighbours`](../minamp/formats.py): looking at numbers;
#   [`minamp.formats.FORMATS`](../minamp/formats.py) is the table above, every limit computed from the bit
#   counts.
# - [`minamp.formats.cast`](../minamp/formats.py) rounds once, to nearest even; its tests go through all
#   65,536 half patterns.
# - [`minamp.ops.naive.naive_half_sum`](../minamp/ops/naive.py) is the sum that stalls,
#   [`minamp.ops.reduce.sum`](../minamp/ops/reduce.py) the one that does not.
# - Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018: float16 training.
#   Kalamkar et al., [A Study of BFLOAT16](https://arxiv.org/abs/1905.12322), 2019. Micikevicius et al., [FP8
#   Formats for Deep Learning](https://arxiv.org/abs/2209.05433), 2022: e4m3 and e5m2.
