# %% [markdown]
# # Exercise 2. A softmax that survives half
#
# A run in half precision has died again, at the last layer, just when the loss was good. The logits arrive in
# float16 and their gradients leave in float16; that is given. What happens in between is yours: softmax for
# attention, softmax under a mask, log-softmax, cross-entropy, and the way back through each of them. You write
# them so that no finite logit can break them and no gradient is lost that half could have held.
#
# Afterwards you will be able to
#
# - write softmax and cross-entropy that are right for every logit that half can hold, masks included;
# - say where a float32 accumulator is needed, and prove it with a number;
# - write the gradients and round them once, at the end, with a loss scale in them;
# - see which of two formulas that are equal on paper loses its digits.
#
# It builds on notebook 4, [How a loss becomes NaN](../04_softmax_instability.ipynb), and notebook 2,
# [Autograd](../02_autograd.ipynb). Plan two hours: four tasks for 88 points and one question for 12. You need
# Python and NumPy, nothing else.
#
# Write your answers where it says so, and keep the names and arguments of the functions. The cell below each
# answer checks some of it; the marks come from more checks of the same kind, with other numbers. Whatever they
# check stands in the docstrings and in the text here. A group of checks gives all of its points or none.
#
# **The rule for all tasks.** What is stored in half is widened to float32, everything is computed there, sums
# too, and a half result is rounded once, when it is complete. So a half result may be off by half a step, which is
# the rounding, and by the little that float32 adds: for a sum of $n$ numbers about $n$ times $2^{-24}$ of their
# size. In which order you sum, and whether you compute in float64, is up to you. No function changes its arguments.

# %% nbgrader={"grade": false, "grade_id": "setup", "locked": true, "schema_version": 3, "solution": false, "task": false}
import numpy as np

rng = np.random.default_rng(0)


def half_step(x):
    """The distance from one half to the next at abs(x): 2**-10 at 1, 2**-24 below 2**-14."""
    return np.exp2(np.frexp(np.maximum(np.abs(x), 2.0**-14))[1] - 11.0)


def check_form(y, dtype, shape):
    """That y is an array of this dtype and shape; if not, the message says what it is."""
    assert isinstance(y, np.ndarray), f"the result must be an array, it is a {type(y).__name__}"
    assert y.dtype == dtype, f"the result must be {np.dtype(dtype)}, it is {y.dtype}"
    assert y.shape == shape, f"the result must have the shape {shape}, it has {y.shape}"


def count_off(y, true, tolerance):
    """How many numbers of y are not within the tolerance of the true ones. NaN and infinity never are."""
    y = np.asarray(y, np.float64)
    return int((~(np.abs(y - true) <= tolerance)).sum())


# %% [markdown]
# ## Task 1. Softmax and its gradient
#
# $$ p_i = \frac{e^{z_i - m}}{\sum_j e^{z_j - m}}, \quad m = \max_j z_j, \qquad
#    \frac{\partial L}{\partial z_i} = p_i \Big( g_i - \sum_j g_j\, p_j \Big) \quad\text{with}\quad
#    g_i = \frac{\partial L}{\partial p_i}. $$
#
# The sums run over one axis, the one of the classes or of the attended positions; each slice along it stands for
# itself. A logit may be minus infinity: a position that does not take part, with probability 0. If nothing takes
# part, the result is NaN, as in PyTorch: $0/0$ has no better answer, and task 2 is for those who want one.
#
# Two places need more than half can give. A sum of 70,000 terms of 1 does not fit into half, and a running sum in
# half of 4096 ones gives 2048. And with a loss scale in it the gradient $g$ may come close to 65504, so that
# $g_i - \sum_j g_j p_j$ doesn't fit, though its product with $p_i$ does.


# %% nbgrader={"grade": false, "grade_id": "softmax", "locked": false, "schema_version": 3, "solution": true, "task": false}
def softmax(z, axis=-1):
    """Softmax of half logits along an axis: computed in float32, rounded once to half.

    z: float16 array (one dimension or more), finite or -inf. Returns a new float16 array of z's shape. -inf gives
    probability 0; a slice of only -inf gives NaN. z is not changed.
    """
    ### BEGIN SOLUTION
    x = z.astype(np.float32)
    with np.errstate(invalid="ignore"):  # -inf - -inf, where nothing takes part
        e = np.exp(x - x.max(axis, keepdims=True))
    return (e / e.sum(axis, keepdims=True)).astype(np.float16)
    ### END SOLUTION


def softmax_grad(g, p, axis=-1):
    """The gradient of a loss by the logits, from its gradient g by the probabilities p: float32, rounded once.

    g, p: float16 arrays of one shape, g finite, p what softmax gave. Returns a new float16 array of that shape.
    g and p are not changed.
    """
    ### BEGIN SOLUTION
    g, p = g.astype(np.float32), p.astype(np.float32)
    return (p * (g - (g * p).sum(axis, keepdims=True))).astype(np.float16)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "softmax_range", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
# Every logit, every axis, -inf: 7 points
z = np.array([[12, 0, 0], [60000, 60000, -60000], [-60000, -60032, -np.inf]], np.float16)
before = z.copy()
p = softmax(z)
check_form(p, np.float16, (3, 3))
assert (z == before).all(), "softmax changes the logits that it is given"
assert np.isfinite(p).all(), f"these probabilities are not finite: {p.tolist()}"
assert p[0, 0] == 1 and p[1].tolist() == [0.5, 0.5, 0] and p[2].tolist() == [1, 0, 0], f"wrong: {p.tolist()}"
p = softmax(np.array([[0, 1], [0, 1]], np.float16), 0)
assert (p == 0.5).all(), "along axis 0 the two logits of each slice are equal"
p = softmax(np.full((1, 3), -np.inf, np.float16))
assert p.dtype == np.float16 and np.isnan(p).all(), "a slice of only -inf must give NaN"
### BEGIN HIDDEN TESTS
for kind in rng.permutation(
    ["ordinary", "anywhere in half's range", "far above 0", "far below 0", "of very different slices"]
):
    n, other = int(rng.integers(2, 13)), int(rng.integers(13, 20))
    logits = {
        "ordinary": rng.normal(0, 4, (other, 3, n)),
        "anywhere in half's range": rng.uniform(-65504, 65504, (other, 3, n)),
        "far above 0": 65504 - 32 * rng.integers(0, 3, (other, 3, n)),
        "far below 0": -65504 + 32 * rng.integers(0, 3, (other, 3, n)),
        "of very different slices": rng.normal(0, 3, (other, 3, n))
        + rng.choice([-900, 0, 900], (other, 3, 1)),
    }[kind].astype(np.float16)
    logits[rng.random(logits.shape) < 0.15] = -np.inf
    logits[..., 0] = np.where(np.isinf(logits).all(-1), 0, logits[..., 0])
    place = int(rng.integers(0, 3))
    z = np.moveaxis(logits, -1, place).copy()
    before = z.copy()
    p = (
        softmax(z)
        if place == 2 and rng.random() < 0.5
        else softmax(z, place if rng.random() < 0.5 else place - 3)
    )
    check_form(p, np.float16, before.shape)
    assert np.array_equal(z, before), "softmax changes the logits that it is given"
    e = np.exp(before.astype(np.float64) - before.astype(np.float64).max(place, keepdims=True))
    true = e / e.sum(place, keepdims=True)
    bad = int((~np.isfinite(p)).sum())
    assert bad == 0, (
        f"logits {kind}, along axis {place} of {p.shape}: {bad} of {p.size} results are not finite"
    )
    bad = int((p[np.isneginf(before)] != 0).sum())
    assert bad == 0, f"logits {kind}: {bad} logits of -inf have a probability that is not 0"
    # the shift and exp cost at most (2 + 20) units of 2^-24, the sum n, the division and its rounding the rest
    bad = count_off(p, true, 0.5 * half_step(true) + (n + 32) * 2.0**-24 * true)
    assert bad == 0, (
        f"logits {kind}, along axis {place} of {p.shape}: {bad} of {p.size} probabilities are off"
    )
z = rng.normal(0, 3, (6, 5)).astype(np.float16)
nothing = rng.permutation(6)[:2]
z[nothing] = -np.inf
p = softmax(z, 1)
check_form(p, np.float16, (6, 5))
assert np.isnan(p[nothing]).all(), "a slice of only -inf must give NaN"
assert np.isfinite(np.delete(p, nothing, 0)).all(), "a slice of only -inf must not spoil the others"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "softmax_sum", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
# Long sums, and one rounding: 7 points
p = softmax(np.zeros((4096, 2), np.float16), 0)
check_form(p, np.float16, (4096, 2))
assert (p == 2.0**-12).all(), f"4096 equal logits along axis 0: {p[0, 0]} is not 1/4096"
p = softmax(np.zeros(70000, np.float16))
assert np.isfinite(p).all() and (p > 0).all(), f"70,000 equal logits have the probability {p[0]}"
### BEGIN HIDDEN TESTS
count = int(rng.integers(66000, 80000))
level = np.float16(rng.uniform(-60000, 60000))
p = softmax(np.full(count, level))
check_form(p, np.float16, (count,))
bad = count_off(p, 1 / count, 0.51 * 2.0**-24)
assert bad == 0, f"{bad} of {count} equal logits have a wrong probability"
for place in rng.permutation(3):
    n = int(rng.integers(300, 500))
    logits = (rng.normal(0, rng.uniform(0.5, 3), (4, 3, n)) + rng.uniform(-20, 20)).astype(np.float16)
    z = np.moveaxis(logits, -1, place).copy()
    p = softmax(z.copy(), int(place))
    check_form(p, np.float16, z.shape)
    e = np.exp(z.astype(np.float64) - z.astype(np.float64).max(place, keepdims=True))
    true = e / e.sum(place, keepdims=True)
    bad = count_off(p, true, 0.5 * half_step(true) + (n + 32) * 2.0**-24 * true)
    assert bad == 0, (
        f"sums of {n} terms along axis {place}: {bad} of {p.size} probabilities are further off than float32 and "
        "one rounding to half explain"
    )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "softmax_grad", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
# The gradient's formula: 6 points
p = np.array([[0.5, 0.25, 0.25], [1, 0, 0]], np.float16)
g = np.array([[8, 4, 0], [3, 5, 7]], np.float16)
before = g.copy(), p.copy()
d = softmax_grad(g, p)
check_form(d, np.float16, (2, 3))
assert (g == before[0]).all() and (p == before[1]).all(), "softmax_grad changes an array that it is given"
assert d[0].tolist() == [1.5, -0.25, -1.25], f"the first row is not {d[0].tolist()}"
assert (d[1] == 0).all(), "a softmax that is sure passes no gradient on"
### BEGIN HIDDEN TESTS
for place in rng.permutation([0, 1, 2, 1, 0, 2]):
    n = int(rng.integers(2, 13))
    e = np.exp(rng.normal(0, 2, (9, 4, n)))
    p = np.moveaxis(e / e.sum(-1, keepdims=True), -1, place).astype(np.float16)
    g = (rng.normal(0, 1, p.shape) * 2.0 ** rng.integers(-3, 9)).astype(np.float16)
    before = g.copy(), p.copy()
    d = softmax_grad(g, p, int(place) - 3) if rng.random() < 0.5 else softmax_grad(g, p, axis=int(place))
    check_form(d, np.float16, p.shape)
    assert (g == before[0]).all() and (p == before[1]).all(), "softmax_grad changes an array that it is given"
    g, p = g.astype(np.float64), p.astype(np.float64)
    true = p * (g - (g * p).sum(place, keepdims=True))
    size = p * (np.abs(g) + (np.abs(g) * p).sum(place, keepdims=True))
    # this group asks for the formula: eight steps, 0.8 % at most, are allowed; the next one asks for the rounding
    bad = count_off(d, true, 8 * half_step(size))
    assert bad == 0, f"along axis {place} of {p.shape}: {bad} of {p.size} gradients are wrong"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "softmax_grad_once", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
# The gradient in float32, rounded once: 5 points
d = softmax_grad(np.array([60000, -60000], np.float16), np.array([0.875, 0.125], np.float16))
check_form(d, np.float16, (2,))
assert np.isfinite(d).all(), f"this gradient fits into half, it is not {d.tolist()}"
d = softmax_grad(np.full((4096, 1), 16, np.float16), np.full((4096, 1), 2.0**-12, np.float16), 0)
assert (d == 0).all(), "if all g are equal, nothing changes the loss: the gradient is 0"
### BEGIN HIDDEN TESTS
for kind, size, width in rng.permutation(
    np.array(
        [("near half's largest number", 65504, 6), ("of ordinary size", 4, 400), ("small", 2e-4, 400)], object
    )
):
    for place in rng.permutation(2):
        n = int(rng.integers(width // 2, width))
        e = np.exp(rng.normal(0, 1.5, (8, n)))
        p = np.moveaxis(e / e.sum(-1, keepdims=True), -1, place).astype(np.float16)
        g = rng.uniform(-size, size, p.shape).astype(np.float16)
        d = softmax_grad(g.copy(), p.copy(), int(place))
        check_form(d, np.float16, p.shape)
        g, p = g.astype(np.float64), p.astype(np.float64)
        true = p * (g - (g * p).sum(place, keepdims=True))
        terms = p * (np.abs(g) + (np.abs(g) * p).sum(place, keepdims=True))
        # half a step for the rounding; a sum of n terms, two products and a difference in float32
        bad = count_off(d, true, 0.5 * half_step(true) + (n + 8) * 2.0**-24 * terms)
        assert bad == 0, (
            f"g {kind}, sums of {n}: {bad} of {d.size} gradients are further off than float32 and one rounding "
            "to half explain"
        )
d = softmax_grad(np.full((3000, 4), 8, np.float16), np.full((3000, 4), 1 / 3000, np.float16), 0)
true = np.float64(np.float16(1 / 3000)) * (8 - 24000 * np.float64(np.float16(1 / 3000)))
bad = count_off(d, true, 0.5 * half_step(true) + 3000 * 2.0**-24 * 16 / 3000)
assert bad == 0, f"a sum of 3000 terms along axis 0: {bad} of {d.size} gradients are off"
### END HIDDEN TESTS

# %% [markdown]
# ## Task 2. A mask that holds
#
# Attention hides positions: padding, or the future. Many programs add a large negative number to the hidden
# scores. In half -1e9 is minus infinity, so a row with nothing to see becomes NaN; -65504 becomes minus
# infinity too when it is *added* to a score of -16; and any finite number fails if a visible score is low enough. A
# mask is not a number: hidden positions take no part, in the maximum neither, and a row in which all are hidden
# gives zeros, so that whatever it would have read contributes nothing.


# %% nbgrader={"grade": false, "grade_id": "masked_softmax", "locked": false, "schema_version": 3, "solution": true, "task": false}
def masked_softmax(z, hidden):
    """Softmax along the last axis over the positions that are not hidden: float32, rounded once to half.

    z: float16 array (one dimension or more), finite. hidden: bool array that broadcasts to z's shape, True where a
    position takes no part. Returns a new float16 array of z's shape: 0 where hidden, softmax over the others where
    not, all 0 in a row without others. Neither argument is changed.
    """
    ### BEGIN SOLUTION
    x = np.where(hidden, -np.inf, z.astype(np.float32))
    top = x.max(-1, keepdims=True)
    e = np.exp(x - np.where(np.isinf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    return (e / np.where(total == 0, 1, total)).astype(np.float16)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "masked_softmax_values", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
# Some hidden, some not: 7 points
z = np.array([[1, 1, 9], [-65504, 65504, -65504]], np.float16)
hidden = np.array([[False, False, True], [False, True, False]])
before = z.copy(), hidden.copy()
p = masked_softmax(z, hidden)
check_form(p, np.float16, (2, 3))
assert (z == before[0]).all() and (hidden == before[1]).all(), (
    "masked_softmax changes an array that it is given"
)
assert p[0].tolist() == [0.5, 0.5, 0], f"the third position is hidden: {p[0].tolist()}"
assert p[1].tolist() == [0.5, 0, 0.5], f"the middle position is hidden: {p[1].tolist()}"
p = masked_softmax(z, np.array([True, False, False]))
assert p.shape == (2, 3) and (p[:, 0] == 0).all(), "one mask for all rows: it broadcasts"
### BEGIN HIDDEN TESTS
for kind in rng.permutation(
    ["ordinary", "far apart", "low, and the hidden ones high", "high, and the hidden ones low"]
):
    n = int(rng.integers(3, 12))
    shape, mask_shape = (4, 7, n), [(4, 7, n), (4, 1, n), (7, n), (n,)][rng.integers(0, 4)]
    hidden = rng.random(mask_shape) < 0.4
    hidden[..., 0], hidden[..., 1] = False, True
    hidden = np.take(hidden, rng.permutation(n), -1)
    full = np.broadcast_to(hidden, shape)
    z = {
        "ordinary": rng.normal(0, 3, shape),
        "far apart": rng.uniform(-65504, 65504, shape),
        "low, and the hidden ones high": np.where(
            full, rng.uniform(100, 65504, shape), -65504 + rng.choice([0, 32], shape)
        ),
        "high, and the hidden ones low": np.where(
            full, -65504, rng.normal(0, 3, shape) + rng.choice([0, 2000])
        ),
    }[kind].astype(np.float16)
    before = z.copy(), hidden.copy()
    p = masked_softmax(z, hidden)
    check_form(p, np.float16, shape)
    assert (z == before[0]).all() and (hidden == before[1]).all(), (
        "masked_softmax changes an array that it is given"
    )
    wide = np.where(full, -np.inf, before[0].astype(np.float64))
    e = np.exp(wide - wide.max(-1, keepdims=True))
    true = e / e.sum(-1, keepdims=True)
    bad = int((~(p[full] == 0)).sum())
    assert bad == 0, f"scores {kind}: {bad} of {int(full.sum())} hidden positions are not exactly 0"
    bad = count_off(p, true, 0.5 * half_step(true) + (n + 32) * 2.0**-24 * true)
    assert bad == 0, f"scores {kind}: {bad} of {int((~full).sum())} visible positions are off"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "masked_softmax_nothing", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
# Rows in which all are hidden: 5 points
p = masked_softmax(np.array([[3, 2, 1], [0, 0, 8]], np.float16), np.array([[True] * 3, [False, False, True]]))
check_form(p, np.float16, (2, 3))
assert (p[0] == 0).all(), f"with all hidden the row must be 0: {p[0].tolist()}"
assert p[1].tolist() == [0.5, 0.5, 0], f"the other row is as without it: {p[1].tolist()}"
### BEGIN HIDDEN TESTS
for scale in rng.permutation([1, 30, 65504]):
    z = rng.uniform(-scale, scale, (12, 3, 5)).astype(np.float16)
    hidden = rng.random((12, 3, 5)) < 0.3
    hidden[..., 2] = False
    nothing = rng.random((12, 3)) < 0.4
    nothing[0], nothing[1] = True, False
    hidden[nothing] = True
    p = masked_softmax(z.copy(), hidden.copy())
    check_form(p, np.float16, (12, 3, 5))
    bad = int((~(p[nothing] == 0).all(-1)).sum())
    assert bad == 0, f"{bad} of {int(nothing.sum())} rows in which all are hidden are not exactly 0"
    wide = np.where(hidden, -np.inf, z.astype(np.float64))[~nothing]
    e = np.exp(wide - wide.max(-1, keepdims=True))
    true = e / e.sum(-1, keepdims=True)
    bad = count_off(p[~nothing], true, 0.5 * half_step(true) + 40 * 2.0**-24 * true)
    assert bad == 0, f"rows in which all are hidden spoil the others: {bad} probabilities are off"
p = masked_softmax(z, np.full(z.shape, True))
assert p.shape == z.shape and (p == 0).all(), "with everything hidden the result must be 0 everywhere"
### END HIDDEN TESTS

# %% [markdown]
# ## Task 3. Log-softmax and its gradient
#
# $$ \ell_i = \log p_i = (z_i - m) - \log \sum_j e^{z_j - m}, \qquad
#    \frac{\partial L}{\partial z_i} = g_i - e^{\ell_i} \sum_j g_j \quad\text{with}\quad
#    g_i = \frac{\partial L}{\partial \ell_i}. $$
#
# The logarithm of a probability that was stored is a trap at both ends: a small one is 0 and its logarithm is
# infinite, a large one is 1 and its logarithm is 0. So no probability is formed. And the order of the operations
# counts: $z_i - (m + \log \sum)$ is the same on paper, and PyTorch had it that way once. Near 60,000 the step of
# float32 is 1/256, and the logarithm of the sum, which is between 0 and $\log n$, is rounded to that.
#
# The result is float32, as under autocast. The gradient comes in float32 too, and it leaves through the cast that
# widened the logits: there, and only there, it is rounded to half.


# %% nbgrader={"grade": false, "grade_id": "log_softmax", "locked": false, "schema_version": 3, "solution": true, "task": false}
def log_softmax(z, axis=-1):
    """The logarithm of softmax of half logits along an axis, in float32.

    z: float16 array (one dimension or more), finite or -inf, but no slice of only -inf. Returns a new float32 array
    of z's shape, for up to 100 classes within 1e-5 + 1e-6 * abs(log p) of the true logarithm log p, for every logit
    that half can hold; -inf for a logit of -inf. z is not changed.
    """
    ### BEGIN SOLUTION
    x = z.astype(np.float32)
    x -= x.max(axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis, keepdims=True))
    ### END SOLUTION


def log_softmax_grad(g, logp, axis=-1):
    """The gradient of a loss by the half logits, from its gradient g by logp: float32, rounded once to half.

    g, logp: float32 arrays of one shape, g finite, logp what log_softmax gave. Returns a new float16 array of that
    shape. g and logp are not changed.
    """
    ### BEGIN SOLUTION
    return (g - np.exp(logp) * g.sum(axis, keepdims=True)).astype(np.float16)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "log_softmax_small", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
# Very unlikely and very likely: 7 points
z = np.array([[0, 20], [0, 9], [0, -1000], [0, -np.inf]], np.float16)
before = z.copy()
y = log_softmax(z)
check_form(y, np.float32, (4, 2))
assert np.array_equal(z, before), "log_softmax changes the logits that it is given"
assert abs(y[0, 0] + 20) < 1e-4, f"behind by 20 the logarithm is not {y[0, 0]}"
assert abs(y[1, 1] + 1.2340e-4) < 1e-5, f"ahead by 9 the logarithm is not {y[1, 1]}"
assert y[2, 1] == -1000, f"behind by 1000 the logarithm is not {y[2, 1]}"
assert y[3].tolist() == [0, -np.inf], "a logit of -inf has the logarithm -inf and takes no part"
### BEGIN HIDDEN TESTS
for place in rng.permutation([0, 1, 2, 2]):
    n = int(rng.integers(2, 100))
    spread = rng.choice([1, 5, 20, 200, 5000], (4, 5, 1))
    logits = rng.normal(0, spread, (4, 5, n))
    logits = (logits - logits.max(-1, keepdims=True) + rng.uniform(-8, 8, (4, 5, 1))).astype(np.float16)
    logits[0, :, 0] = rng.uniform(-8, 8, 5)
    logits[0, :, 1] = logits[0, :, 0] - np.linspace(8, 15, 5)  # class 0 is far ahead
    logits[0, :, 2:] = logits[0, :, :1] - 40
    logits[1, 1] = np.where(rng.random(n) < 0.3, -np.inf, logits[1, 1])
    logits[1, 1, 0] = 0
    z = np.moveaxis(logits, -1, place).copy()
    before = z.copy()
    y = log_softmax(z, int(place) - 3) if rng.random() < 0.5 else log_softmax(z, int(place))
    check_form(y, np.float32, before.shape)
    assert np.array_equal(z, before), "log_softmax changes the logits that it is given"
    wide = before.astype(np.float64)
    wide = wide - wide.max(place, keepdims=True)
    true = wide - np.log(np.exp(wide).sum(place, keepdims=True))
    hidden = np.isneginf(before)
    assert np.isneginf(y[hidden]).all(), "a logit of -inf has another logarithm than -inf"
    bad = int((~np.isfinite(y[~hidden])).sum())
    assert bad == 0, f"{bad} of {y.size} logarithms are not finite"
    bad = count_off(y[~hidden], true[~hidden], 1e-5 + 1e-6 * np.abs(true[~hidden]))
    assert bad == 0, f"along axis {place} of {y.shape}: {bad} of {y.size} logarithms are off"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "log_softmax_large", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
# Large logits: 6 points
z = np.array([[60000, 60000], [-65504, -65504], [65504, -65504]], np.float16)
y = log_softmax(z)
check_form(y, np.float32, (3, 2))
assert np.isfinite(y).all(), f"these logarithms are not finite: {y.tolist()}"
assert np.abs(y[:2] + np.log(2)).max() < 1e-5, f"equal logits have log(1/2), not {y[:2].tolist()}"
assert y[2].tolist() == [0, -131008], f"the difference of these logits is 131008, not {-y[2, 1]}"
### BEGIN HIDDEN TESTS
for place in rng.permutation(2):
    n = int(rng.integers(2, 60))
    level = rng.choice([-65504, -60000, -4000, 4000, 30000, 60000], (12, 1)) + 32 * rng.integers(
        0, 5, (12, 1)
    )
    logits = (level + rng.choice([0, 0, 32, 1000], (12, n))).clip(-65504, 65504).astype(np.float16)
    logits[:3] = rng.uniform(-65504, 65504, (3, n))
    z = logits if place else logits.T.copy()
    y = log_softmax(z.copy(), int(place))
    check_form(y, np.float32, z.shape)
    wide = z.astype(np.float64)
    wide = wide - wide.max(place, keepdims=True)
    true = wide - np.log(np.exp(wide).sum(place, keepdims=True))
    bad = int((~np.isfinite(y)).sum())
    assert bad == 0, f"{bad} of {y.size} logarithms of large logits are not finite"
    bad = count_off(y, true, 1e-5 + 1e-6 * np.abs(true))
    assert bad == 0, f"large logits along axis {place} of {y.shape}: {bad} of {y.size} logarithms are off"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "log_softmax_grad", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
# The gradient: 8 points
logp = np.log(np.array([[0.5, 0.25, 0.25], [1, 1e-30, 1e-30]])).astype(np.float32)
g = np.array([[4, 0, -2], [0, -3, 0]], np.float32)
before = g.copy(), logp.copy()
d = log_softmax_grad(g, logp)
check_form(d, np.float16, (2, 3))
assert (g == before[0]).all() and (logp == before[1]).all(), (
    "log_softmax_grad changes an array that it is given"
)
assert np.abs(d[0] - [3, -0.5, -2.5]).max() < 1e-2, f"the first row is not {d[0].tolist()}"
assert d[1].tolist() == [3, -3, 0], (
    f"the true class is hopelessly behind: the second row is not {d[1].tolist()}"
)
d = log_softmax_grad(np.full(8, 30000, np.float32), np.full(8, np.log(1 / 8), np.float32))
assert np.abs(d).max() < 0.1, f"all g equal: the gradient is near 0, not {d.tolist()}"
### BEGIN HIDDEN TESTS
for place in rng.permutation([0, 1, 2, 0, 1, 2]):
    n = int(rng.integers(2, 200))
    wide = rng.normal(0, rng.choice([1, 5, 12]), (3, 6, n))
    wide = wide - wide.max(-1, keepdims=True)
    logp = np.moveaxis(wide - np.log(np.exp(wide).sum(-1, keepdims=True)), -1, place).astype(np.float32)
    size = 2.0 ** rng.integers(-12, 15)
    sparse = rng.random(logp.shape) < rng.choice([0.1, 1])
    g = (rng.uniform(-0.5, 1.5, logp.shape) * size * sparse).astype(np.float32)
    before = g.copy(), logp.copy()
    d = (
        log_softmax_grad(g, logp, int(place) - 3)
        if rng.random() < 0.5
        else log_softmax_grad(g, logp, int(place))
    )
    check_form(d, np.float16, logp.shape)
    assert (g == before[0]).all() and (logp == before[1]).all(), (
        "log_softmax_grad changes an array it is given"
    )
    g, p = g.astype(np.float64), np.exp(logp.astype(np.float64))
    true = g - p * g.sum(place, keepdims=True)
    terms = np.abs(g) + p * np.abs(g).sum(place, keepdims=True)
    # half a step for the rounding; a sum of n terms, exp, a product and a difference in float32
    fits = np.abs(true) < 65000
    tolerance = 0.5 * half_step(true) + (n + 8) * 2.0**-24 * terms
    bad = count_off(d[fits], true[fits], tolerance[fits])
    assert bad == 0, f"along axis {place} of {d.shape}: {bad} of {d.size} gradients are off"
### END HIDDEN TESTS

# %% [markdown]
# ## Task 4. Cross-entropy, from the logits to their gradient
#
# Now both ends of a training step: $N$ rows of $C$ logits, a true class $t$ each, and the mean loss of the rows that
# count,
#
# $$ L = \frac{1}{K} \sum_{\text{rows that count}} -\log p_t, \qquad
#    \frac{\partial S L}{\partial z_i} = \frac{S}{K} \big( p_i - [i = t] \big), $$
#
# with $K$ the number of rows that count: those whose target is not `ignore_index`, the mark for padding. $S$ is what
# arrives from above, 1 or the loss scale. `GradScaler` starts at 65536, which is not a half number: infinity in half,
# while the gradient with it fits if $K$ is not too small.
#
# A probability of $10^{-9}$ is 0 in half, but times $65536/4$ it is $1.6 \cdot 10^{-5}$, which half holds. That is what
# loss scaling is for, and it works only if nothing is rounded before the scale is in. At the other end what is too
# large becomes infinity: the scaler waits for that sign, so do not clip.


# %% nbgrader={"grade": false, "grade_id": "cross_entropy", "locked": false, "schema_version": 3, "solution": true, "task": false}
def cross_entropy(z, target, ignore_index=-100):
    """The mean of -log softmax(z)[target] over the rows whose target is not ignore_index, in float32.

    z: float16 array (N, C), finite. target: int64 array (N,), class ids from 0 to C - 1 or ignore_index, which may
    be any integer, a class id too; at least one row counts. Returns the mean as one number: np.float32, or a Python
    float, or an array without dimensions. Arguments are not changed.
    """
    ### BEGIN SOLUTION
    rows = np.flatnonzero(target != ignore_index)
    x = z[rows].astype(np.float32)
    x -= x.max(1, keepdims=True)
    losses = np.log(np.exp(x).sum(1)) - x[np.arange(len(rows)), target[rows]]
    return losses.mean()
    ### END SOLUTION


def cross_entropy_grad(g, z, target, ignore_index=-100):
    """The gradient of g * cross_entropy(z, target, ignore_index) by z: float32, rounded once to half.

    g: a float, 1.0 or the loss scale. z, target, ignore_index as in cross_entropy. Returns a new float16 array
    (N, C): 0 in rows that do not count, infinity where the gradient is too large for half. Arguments are not changed.
    """
    ### BEGIN SOLUTION
    rows = np.flatnonzero(target != ignore_index)
    x = z[rows].astype(np.float32)
    e = np.exp(x - x.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    p[np.arange(len(rows)), target[rows]] -= 1
    d = np.zeros(z.shape, np.float16)
    with np.errstate(over="ignore"):  # the loss scaler looks for the infinities
        d[rows] = p * (g / len(rows))
    return d
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "cross_entropy_loss", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
# The loss: 8 points
z = np.array([[0, 0], [20, 0], [60000, -60000]], np.float16)
loss = cross_entropy(z, np.array([1, 0, 0]))
assert np.ndim(loss) == 0, "the loss must be one number"
assert abs(float(loss) - np.log(2) / 3) < 1e-5, f"the mean of log(2), 2e-9 and 0 is not {loss}"
loss = cross_entropy(np.full((1, 3), 60000, np.float16), np.array([2]))
assert abs(float(loss) - np.log(3)) < 1e-5, f"three large and equal logits: the loss is log(3), not {loss}"
loss = cross_entropy(z, np.array([1, 1, 1]))
assert abs(float(loss) - (np.log(2) + 120020) / 3) < 0.1, (
    f"losses may be larger than 65504: {loss} is not the mean"
)
### BEGIN HIDDEN TESTS
for kind in rng.permutation(
    ["ordinary", "sure", "anywhere in half's range", "large and close together", "many"]
):
    rows, classes = int(rng.integers(1, 60)), int(rng.integers(2, 40))
    if kind == "many":
        rows, classes = int(rng.integers(2500, 3000)), 3
    target = rng.integers(0, classes, rows)
    z = {
        "ordinary": rng.normal(0, 3, (rows, classes)),
        "sure": rng.normal(0, 1, (rows, classes)) + 18 * (np.arange(classes) == target[:, None]),
        "anywhere in half's range": rng.uniform(-65504, 65504, (rows, classes)),
        "large and close together": (
            rng.choice([-60000, 60000], (rows, 1)) + 32 * rng.integers(0, 2, (rows, classes))
        ),
        "many": rng.normal(0, 60, (rows, classes)),
    }[kind].astype(np.float16)
    before = z.copy(), target.copy()
    loss = cross_entropy(z, target)
    assert np.ndim(loss) == 0, "the loss must be one number"
    assert (z == before[0]).all() and (target == before[1]).all(), (
        "cross_entropy changes an array that it is given"
    )
    wide = before[0].astype(np.float64)
    wide = wide - wide.max(1, keepdims=True)
    true = (np.log(np.exp(wide).sum(1)) - wide[np.arange(rows), target]).mean()
    assert np.isfinite(float(loss)), f"logits {kind}, {rows} rows of {classes}: the loss is {float(loss)}"
    # sums of C and of N terms, one after the other at worst, and a few operations more, in float32
    fair = abs(float(loss) - true) <= (rows + classes + 8) * 2.0**-24 * (2 + true)
    assert fair, f"logits {kind}, {rows} rows of {classes}: the loss is off by {abs(float(loss) - true):.2g}"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "cross_entropy_ignored", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
# Rows that do not count, in the loss and in the gradient: 6 points
z = np.array([[0, 0], [5, -5], [0, 0], [7, 7]], np.float16)
target = np.array([1, -100, 0, -100])
loss, d = cross_entropy(z, target), cross_entropy_grad(1.0, z, target)
check_form(d, np.float16, (4, 2))
assert np.ndim(loss) == 0, "the loss must be one number"
assert abs(float(loss) - np.log(2)) < 1e-3, f"two rows count, each with log(2): the mean is not {loss}"
assert (d[[1, 3]] == 0).all(), "rows that do not count have no gradient"
assert (np.abs(d[[0, 2]]) == 0.25).all(), f"two rows count: {d.tolist()}"
assert abs(float(cross_entropy(z, np.array([0, 1, 0, 1]), 1)) - np.log(2)) < 1e-3, (
    "ignore_index may be a class id"
)
### BEGIN HIDDEN TESTS
cases = [(-100, 4), (-100, 130), (-1, 9), (0, 9), (3, 4), (255, 130), (int(rng.integers(-90, -2)), 130)]
for ignore_index, classes in rng.permutation(cases).tolist():
    rows = int(rng.integers(6, 40))
    z = rng.normal(0, 1, (rows, classes)).astype(np.float16)
    target = rng.integers(0, classes, rows)
    target[rng.random(rows) < 0.4] = ignore_index
    target[:2] = ignore_index, (ignore_index + 1) % classes
    order = rng.permutation(rows)
    target = target[order]
    count = target != ignore_index
    z[~count] *= np.float16(rng.choice([1, 1000]))
    before = z.copy(), target.copy()
    given = () if ignore_index == -100 else (ignore_index,)
    loss, d = cross_entropy(z, target, *given), cross_entropy_grad(1.0, z, target, *given)
    check_form(d, np.float16, (rows, classes))
    assert (z == before[0]).all() and (target == before[1]).all(), "an array of logits or targets is changed"
    wide = z[count].astype(np.float64)
    wide = wide - wide.max(1, keepdims=True)
    logp = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    hit = np.arange(classes) == target[count][:, None]
    text = f"ignore_index {ignore_index}, {classes} classes, {int(count.sum())} of {rows} rows count"
    # this group asks what is counted, the others ask for precision
    assert np.ndim(loss) == 0, "the loss must be one number"
    assert abs(float(loss) / -logp[hit].mean() - 1) < 2e-3, f"{text}: the loss is wrong"
    bad = int((d[~count] != 0).any(1).sum())
    assert bad == 0, f"{text}: {bad} rows that do not count have a gradient"
    true = (np.exp(logp) - hit) / count.sum()
    bad = count_off(d[count], true, 2e-3 / count.sum())
    assert bad == 0, f"{text}: {bad} gradients are wrong"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "cross_entropy_grad", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
# The gradient without a scale: 8 points
z, target = np.array([[0, 0], [20, 0]], np.float16), np.array([0, 1])
before = z.copy(), target.copy()
d = cross_entropy_grad(1.0, z, target)
check_form(d, np.float16, (2, 2))
assert (z == before[0]).all() and (target == before[1]).all(), (
    "cross_entropy_grad changes an array that it is given"
)
assert d.tolist() == [[-0.25, 0.25], [0.5, -0.5]], f"the gradient is not {d.tolist()}"
d = cross_entropy_grad(1.0, np.array([[60000, -60000, 60000]], np.float16), np.array([1]))
assert d.tolist() == [[0.5, -1, 0.5]], f"large logits: the gradient is not {d.tolist()}"
### BEGIN HIDDEN TESTS
kinds = ["ordinary", "sure", "anywhere in half's range", "of very different rows", "ordinary"]
for kind, g in zip(rng.permutation(kinds), rng.permutation([1.0, 1.0, 0.5, 3.0, -2.0]).tolist(), strict=True):
    rows, classes = int(rng.integers(1, 40)), int(rng.integers(2, 30))
    target = rng.integers(0, classes, rows)
    z = {
        "ordinary": rng.normal(0, 3, (rows, classes)),
        "sure": rng.normal(0, 1, (rows, classes)) + 9 * (np.arange(classes) == target[:, None]),
        "anywhere in half's range": rng.uniform(-65504, 65504, (rows, classes)),
        "of very different rows": rng.normal(0, 3, (rows, classes)) + rng.choice([-900, 0, 900], (rows, 1)),
    }[kind].astype(np.float16)
    before = z.copy(), target.copy()
    d = cross_entropy_grad(g, z, target)
    check_form(d, np.float16, (rows, classes))
    assert (z == before[0]).all() and (target == before[1]).all(), (
        "cross_entropy_grad changes an array it is given"
    )
    e = np.exp(before[0].astype(np.float64) - before[0].astype(np.float64).max(1, keepdims=True))
    hit = np.arange(classes) == target[:, None]
    true = g / rows * (e / e.sum(1, keepdims=True) - hit)
    # p is relatively exact; p - 1 is off by p's last place, which is 2^-24 of 1
    slack = (classes + 64) * 2.0**-24 * (np.abs(true) + hit * abs(g) / rows)
    bad = count_off(d, true, 0.5 * half_step(true) + slack)
    assert bad == 0, f"logits {kind}, {rows} rows of {classes}, g = {g}: {bad} of {d.size} gradients are off"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "cross_entropy_scaled", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
# The gradient with a loss scale, rounded once: 8 points
z = np.array([[0, -20.72], [0, 0], [0, 0], [0, 0]], np.float16)
d = cross_entropy_grad(65536.0, z, np.array([0, 0, 0, 0]))
check_form(d, np.float16, (4, 2))
assert 1.6e-5 < d[0, 1] < 1.7e-5, f"1e-9 times 65536 / 4 is a half number, and not {d[0, 1]}"
assert d[1].tolist() == [-8192, 8192], f"65536 / 4 / 2 is 8192: {d[1].tolist()}"
d = cross_entropy_grad(2.0**18, z[1:2], np.array([0]))
assert d.tolist() == [[-np.inf, np.inf]], (
    f"131072 is too large for half and becomes infinity, not {d.tolist()}"
)
### BEGIN HIDDEN TESTS
for scale in rng.permutation(2.0 ** np.array([10, 14, 16, 16, 17, 20, 24])).tolist():
    rows, classes = int(rng.choice([1, 4, 30, 500])), int(rng.integers(2, 30))
    target = rng.integers(0, classes, rows)
    z = (rng.uniform(-28, 0, (rows, classes)) + rng.uniform(-10, 10, (rows, 1))).astype(np.float16)
    d = cross_entropy_grad(scale, z.copy(), target.copy())
    check_form(d, np.float16, (rows, classes))
    e = np.exp(z.astype(np.float64) - z.astype(np.float64).max(1, keepdims=True))
    hit = np.arange(classes) == target[:, None]
    true = scale / rows * (e / e.sum(1, keepdims=True) - hit)
    text = f"scale 2^{np.log2(scale):g}, {rows} rows of {classes}"
    big, fits = np.abs(true) > 65600, np.abs(true) < 65400
    bad = int((d[big] != np.copysign(np.inf, true[big])).sum())
    assert bad == 0, (
        f"{text}: {bad} of {int(big.sum())} gradients that are too large for half are not infinite"
    )
    slack = (classes + 64) * 2.0**-24 * (np.abs(true) + hit * scale / rows)
    bad = count_off(d[fits], true[fits], (0.5 * half_step(true) + slack)[fits])
    assert bad == 0, (
        f"{text}: {bad} of {int(fits.sum())} gradients are further off than float32 and one rounding to half explain"
    )
### END HIDDEN TESTS

# %% [markdown]
# ## What it is good for
#
# No points here. A linear classifier in half, trained twice on the same data by gradient descent with momentum: with
# your functions and a loss scale, and with the textbook formulas, every operation rounded to half. Which of the two
# columns ends, and what had the loss come down to just before?

# %%
data = np.random.default_rng(1)
labels = data.integers(0, 3, 90)
features = (2 * np.eye(3)[labels] + data.normal(0, 0.5, (90, 3))).astype(np.float16)


def textbook(z, target):
    """Loss and gradient as the formulas stand in a book, in half."""
    e = np.exp(z)
    p = e / e.sum(1, keepdims=True)
    one_hot = np.eye(3, dtype=np.float16)[target]
    return -np.log((p * one_hot).sum(1)).mean(), (p - one_hot) / np.float16(len(z))


def yours(z, target):
    """The same with your functions and a loss scale of 1024."""
    return cross_entropy(z, target), cross_entropy_grad(1024.0, z, target).astype(np.float32) / 1024


weights = {f: np.zeros((3, 3), np.float32) for f in (yours, textbook)}
velocity = {f: np.zeros((3, 3), np.float32) for f in (yours, textbook)}
print("step     yours  textbook   largest logit")
with np.errstate(all="ignore"):
    for step in range(16):
        losses, logits = [], []
        for f in (yours, textbook):
            z = features @ weights[f].astype(np.float16)
            loss, gradient = f(z, labels)
            velocity[f] = 0.9 * velocity[f] + features.T.astype(np.float32) @ gradient.astype(np.float32)
            weights[f] -= 0.7 * velocity[f]
            losses.append(float(loss))
            logits.append(float(z.max()))
        print(f"{step:4}{losses[0]:10.4f}{losses[1]:10.4f}{logits[0]:16.2f}")

# %% [markdown]
# ## Question (12 points)
#
# Answer in your own words, with numbers, about 15 lines in all.
#
# 1. To repair the textbook column a colleague shifts the logits and writes `-np.log(p + 1e-8)`, with $p$ stored in half.
#    What is 1e-8 in half? What are loss and gradient where the true class is behind by 20, and where it is ahead by 9?
#    Which of the two would the run show you?
# 2. Why does `cross_entropy_grad` take the logits and not the half probabilities that `softmax` returned? Give an
#    example of a row and a scale for which the second way loses a gradient that the first one keeps.
# 3. $K = 4096$ rows, no loss scale. Below which $|p_i - [i = t]|$ does the gradient become 0 in half? Which powers of two
#    may the scale be so that the largest possible gradient stays finite? And why does no scale repair a NaN in the loss?

# %% [markdown] nbgrader={"grade": true, "grade_id": "written", "locked": false, "points": 12, "schema_version": 3, "solution": true, "task": false}
# **Model answer**
#
# 1. 1e-8 is at most $2^{-25} \approx 3 \cdot 10^{-8}$ and becomes 0, so nothing is added. Behind by 20: $p = 2 \cdot 10^{-9}$ is
#    stored as 0, the loss is infinite, and the gradient, $p$ times $1/p$, is 0 times infinity, NaN; true are 20 and -1.
#    Ahead by 9: $p = 0.99988$ is rounded to 1, since the half below 1 is $1 - 2^{-11} = 0.9995$; loss and gradient are 0,
#    true are $1.2 \cdot 10^{-4}$ and $-1.2 \cdot 10^{-4}$. The first shows at once, as inf or NaN. The second is silent: sure
#    examples take no more part in training.
# 2. $p_t - 1$ from a half $p_t$ is 0 as soon as $p_t$ is above $1 - 2^{-12}$, a lead of about 8.3, and any other $p_i$ up to
#    $2^{-25}$ is 0; a scale that comes later multiplies 0. Example: logits 0 and -12, true class 0, scale 65536, one row.
#    From the logits: $p_1 = 6.1 \cdot 10^{-6}$, gradient -0.40 and 0.40. From half probabilities: $p_0 = 1$, gradient 0
#    instead of -0.40. The rounding has to come after the scale.
# 3. $|p_i - [i = t]| / 4096 \le 2^{-25}$ becomes 0: $2^{-13} \approx 1.2 \cdot 10^{-4}$ and less. The largest possible
#    $|p_i - [i = t]|$ is 1: $S / 4096 < 65520$, so $S$ up to $2^{27}$ ($2^{28}$ gives 65536, infinity). The scale multiplies the
#    loss *after* it has been computed; NaN times anything is NaN, so every step is skipped and the scale halves down to
#    nothing. The formula must change, the scale can't help.
#
# **Mark scheme**
#
# - 4 points for 1: 1e-8 is 0 (1), behind by 20 infinite loss and a gradient that is not a number (1), ahead by 9 both 0 (1),
#   the second is the silent one (1).
# - 4 points for 2: what half does to a probability near 1 or near 0 (1), the scale must be in before the rounding (1), an
#   example whose numbers are right on both ways (2).
# - 4 points for 3: $K \cdot 2^{-25}$ or its value (1), the largest scale $2^{27}$ (1; $2^{28}$ earns nothing), the scale comes
#   after the NaN (1), skipped steps and a sinking scale (1).
