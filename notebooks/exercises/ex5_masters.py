# %% [markdown]
# # Exercise 5. Masters
#
# A network was converted to 16 bits to save memory. No gradient is NaN, nothing overflows, the loss falls a little, and
# then it stands still. You know why from [notebook 5](../05_master_weights.ipynb): an update of less than half a step of the
# format is rounded away, in every step anew. In this exercise you write the four ways out that people use: SGD and Adam with
# float32 master weights for a float16 network, and for bfloat16 weights without masters stochastic rounding and Kahan's
# compensation.
#
# When you are done you can
#
# - write an optimizer for half weights that loses nothing, and say which of its numbers may be 16 bits wide;
# - tell the formulas of PyTorch's optimizers from their near relatives;
# - round by chance without a bias, and carry what rounding has lost into the next step;
# - choose between the four, in bytes per weight and in what each does to the weights.
#
# Everything is NumPy. bfloat16 has no dtype there: such weights are passed as their bits, in `uint16` arrays. An optimizer is a
# plain function here: old state in, new state out.
#
# You write the cells that raise `NotImplementedError`. Below each of them, asserts check some simple cases. More are checked when
# you hand in: other shapes, other values, many steps. About two hours.

# %% nbgrader={"grade": false, "grade_id": "setup", "locked": true, "schema_version": 3, "solution": false, "task": false}
import numpy as np

rng = np.random.default_rng(0)

# The arrays of the states below and their dtypes.
SGD = {"weight": np.float16, "master": np.float32, "momentum": np.float32}
ADAM = {"weight": np.float16, "master": np.float32, "exp_avg": np.float32, "exp_avg_sq": np.float32}
KAHAN = {"weight": np.uint16, "compensation": np.uint16}


def bfloat16_bits(x):
    """float32 values (finite) rounded to the nearest bfloat16, ties to even, as uint16 bits."""
    b = np.asarray(x, np.float32).view(np.uint32)
    return ((b + 0x7FFF + ((b >> 16) & 1)) >> 16).astype(np.uint16)


def bfloat16_values(bits):
    """The values of bfloat16 bits as float32, exactly: a bfloat16 number is the upper half of a float32 number."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def start(dtypes, weight):
    """The state before the first step: `weight` as weight and master, and zeros."""
    state = {name: np.zeros(weight.shape, dtype) for name, dtype in dtypes.items()}
    state["weight"] = weight.astype(dtypes["weight"])
    if "master" in state:
        state["master"] = weight.astype(np.float32)
    return state | ({"step": 0} if dtypes is ADAM else {})


def check_array(a, name, dtype, shape):
    """Assert that `a` is an array of this dtype and shape, without inf and NaN."""
    assert isinstance(a, np.ndarray), f"{name}: this is no array but a {type(a).__name__}"
    assert a.dtype == dtype, f"{name}: the dtype is {a.dtype}, it should be {np.dtype(dtype)}"
    assert a.shape == shape, f"{name}: the shape is {a.shape}, it should be {shape}"
    bad = int((~np.isfinite(a)).sum())
    assert bad == 0, f"{name}: {bad} of {a.size} values are inf or NaN"


def check_state(state, shape, dtypes):
    """Assert that `state` is a dict with arrays of these names and dtypes, and Adam's with an int as well."""
    assert isinstance(state, dict), f"the state is no dict but a {type(state).__name__}"
    names = set(dtypes) | ({"step"} if dtypes is ADAM else set())
    assert set(state) == names, f"the state has the keys {sorted(state)}, it should have {sorted(names)}"
    for name, dtype in dtypes.items():
        check_array(state[name], name, dtype, shape)
    step = state.get("step", 0)
    assert isinstance(step, int | np.integer), f"step: this is no int but a {type(step).__name__}"


def compare(a, expected, tolerance, what):
    """Assert that all values of `a` are within `tolerance` of what is expected."""
    error = np.abs(np.float64(a) - expected)
    far = ~(error <= tolerance)
    assert not far.any(), f"{what}: {far.sum()} of {far.size} values are off, by up to {error[far].max():.2g}"


def copied(state):
    """The state with arrays of its own."""
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in state.items()}


def same(state, other):
    """Whether two states hold the same numbers, bit by bit."""
    return all(np.array_equal(state[name], other[name]) for name in other)


# %% [markdown]
# ## SGD with masters
#
# The network computes with float16 weights and leaves float16 gradients. The optimizer keeps two float32 numbers per weight: the
# *master*, which is the weight as the optimizer knows it, and the momentum. With gradient $g$, master $w$, momentum $b$, and
# $\mu$, $\lambda$ for `momentum` and `weight_decay`, these are the formulas of `torch.optim.SGD`:
#
# $$ d = g + \lambda w, \qquad b \leftarrow \mu\, b + d, \qquad w \leftarrow w - \mathrm{lr}\; b . $$
#
# **Your task.** All of it in float32, and at the end the float16 weight is the master, rounded. Mind what NumPy does with a
# Python float and a float16 array: `0.1 * g` is float16.


# %% nbgrader={"grade": false, "grade_id": "sgd_step", "locked": false, "schema_version": 3, "solution": true, "task": false}
def sgd_step(state, grad, lr, momentum=0.0, weight_decay=0.0):
    """One step of SGD for float16 weights with float32 masters. Returns the new state.

    state: a dict of three arrays of one shape (any shape):
        "weight"    float16: what the network computes with
        "master"    float32: the weight as the optimizer knows it
        "momentum"  float32: b of the formulas above, zeros before the first step
    grad: float16, of the same shape. lr, momentum, weight_decay: floats; lr may be another one in each step.

    Returns a new dict with the same three keys, dtypes and shapes. The arithmetic is float32 or better; the new weight is the
    new master rounded to the nearest float16, ties to even. Neither `state` nor `grad` is changed. Inputs are finite.
    """
    ### BEGIN SOLUTION
    master, g = state["master"], grad.astype(np.float32)
    direction = g + weight_decay * master
    buffer = momentum * state["momentum"] + direction
    master = master - lr * buffer
    return {"weight": master.astype(np.float16), "master": master, "momentum": buffer}
    ### END SOLUTION


# %% [markdown]
# Small updates must add up. A hundred steps of 0.0001 away from 1 lead to 0.99; each of them alone is too small for float16.

# %% nbgrader={"grade": true, "grade_id": "sgd_step_small", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
state = start(SGD, np.ones(3))
for _ in range(100):
    state = sgd_step(state, np.array([1, 0, -1], np.float16), lr=1e-4)
    check_state(state, (3,), SGD)
compare(state["master"], np.array([0.99, 1, 1.01]), 1e-5, "the masters after 100 updates of 0.0001")

### BEGIN HIDDEN TESTS
for shape in ((40,), (3, 17), (2, 3, 8)):
    steps, lr = 40, float(10 ** rng.uniform(-4.5, -3.5))
    weight = (rng.uniform(0.5, 2, shape) * rng.choice([-1, 0, 1], shape)).astype(np.float16)
    state = start(SGD, weight)
    w, top = np.float64(weight), np.abs(np.float64(weight))
    for _ in range(steps):
        g = rng.standard_normal(shape).astype(np.float16)
        state = sgd_step(state, g, lr=lr)
        check_state(state, shape, SGD)
        w = w - lr * np.float64(g)
        top = np.maximum(top, np.abs(w))
    # each step rounds twice in float32, to within 2^-24 of numbers no larger than `top`
    compare(state["master"], w, 3 * steps * 2.0**-24 * top, f"the masters after {steps} small updates")
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "sgd_step_momentum", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
state = start(SGD, np.zeros(1))
for expected in (-0.5, -1.25, -2.125):
    state = sgd_step(state, np.ones(1, np.float16), lr=0.5, momentum=0.5)
    compare(state["master"], expected, 1e-6, "the master under a constant gradient of 1")

### BEGIN HIDDEN TESTS
for shape in ((50,), (7, 9)):
    steps, mu = 12, float(rng.uniform(0.6, 0.95))
    weight = (rng.uniform(0.1, 1, shape) * rng.choice([-1, 0, 1], shape)).astype(np.float16)
    state = start(SGD, weight)
    w, b = np.float64(weight), np.zeros(shape)
    top_w, top_b, lrs = np.abs(w), np.abs(b), 10 ** rng.uniform(-3, -1, steps)
    for lr in lrs:
        g = rng.standard_normal(shape).astype(np.float16)
        state = sgd_step(state, g, lr=float(lr), momentum=mu)
        check_state(state, shape, SGD)
        b = mu * b + np.float64(g)
        w = w - lr * b
        top_w, top_b = np.maximum(top_w, np.abs(w)), np.maximum(top_b, np.abs(b))
    # float32: two roundings a step for the momentum, two for the master, and the momentum's error on top
    unit = 3 * steps * 2.0**-24
    compare(state["momentum"], b, unit * top_b, "the momentum")
    compare(
        state["master"],
        w,
        unit * (top_w + lrs.sum() * top_b),
        "the masters with momentum, lr changing from step to step",
    )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "sgd_step_decay", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
state = start(SGD, np.ones(1))
for expected in (0.75, 0.4375):
    state = sgd_step(state, np.zeros(1, np.float16), lr=0.5, momentum=0.5, weight_decay=0.5)
    compare(state["master"], expected, 1e-6, "a master of 1 that only decays")

### BEGIN HIDDEN TESTS
for shape, mu in (((60,), 0.9), ((5, 12), float(rng.uniform(0.5, 0.9)))):
    steps, lr, decay = 10, float(rng.uniform(0.1, 0.5)), float(rng.uniform(0.1, 0.5))
    # in the middle of a training: a master lies somewhere within half a step of its weight
    master = (rng.uniform(0.5, 4, shape) * rng.choice([-1, 1], shape)).astype(np.float32)
    state = start(SGD, master)
    w, b = np.float64(master), np.zeros(shape)
    top_w, top_b = np.abs(w), np.abs(b)
    for _ in range(steps):
        g = (rng.standard_normal(shape) * rng.integers(0, 2, shape)).astype(np.float16)
        state = sgd_step(state, g, lr=lr, momentum=mu, weight_decay=decay)
        check_state(state, shape, SGD)
        b = mu * b + (np.float64(g) + decay * w)
        w = w - lr * b
        top_w, top_b = np.maximum(top_w, np.abs(w)), np.maximum(top_b, np.abs(b))
    # two roundings a step for the master, and three for the momentum, which all reach the master by way of lr
    compare(
        state["master"],
        w,
        4 * steps * 2.0**-24 * (top_w + 2 * lr * steps * top_b),
        "the masters with weight decay and momentum",
    )
### END HIDDEN TESTS

# %% [markdown]
# The new weight is the new master, rounded to nearest, and what the function was given stays as it was.

# %% nbgrader={"grade": true, "grade_id": "sgd_step_write", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
state = start(SGD, np.ones(2))
before = copied(state)
new = sgd_step(state, np.array([1, 1], np.float16), lr=0.75 * 2.0**-10)
check_state(new, (2,), SGD)
assert (new["weight"] == np.float16(1 - 2.0**-10)).all(), (
    "1 - 0.75 / 1024 lies half-way between two float16 numbers and was not rounded to the even one"
)
assert same(state, before), "the state that was given has been changed"

### BEGIN HIDDEN TESTS
for shape in ((200,), (4, 25)):
    # weights m * 2^e with 11 binary digits and updates of k / 8 of their step: every master here is exact in float32
    digits, exponent = rng.integers(1024, 2048, shape), int(rng.integers(-12, 0))
    weight = (digits * rng.choice([-1, 1], shape) * 2.0**exponent).astype(np.float16)
    eighths = rng.integers(-12, 13, shape)
    g, lr = (eighths / 8).astype(np.float16), 2.0**exponent
    state = start(SGD, weight)
    before, g_before = copied(state), g.copy()
    new = sgd_step(state, g, lr=lr)
    check_state(new, shape, SGD)
    exact = np.float64(weight) - lr * np.float64(g)
    far = new["weight"].view(np.uint16) != exact.astype(np.float16).view(np.uint16)
    ties = eighths % 8 == 4
    assert not far.any(), (
        f"{far.sum()} of {far.size} weights are not the nearest float16 to their master; {(far & ties).sum()} of {ties.sum()} ties are wrong"
    )
    assert same(state, before) and np.array_equal(g, g_before), (
        "the state or the gradient that was given has been changed"
    )
    for _ in range(3):
        new = sgd_step(new, g, lr=lr)
    drifted = int((new["weight"] != new["master"].astype(np.float16)).sum())
    assert drifted == 0, (
        f"after four steps {drifted} of {far.size} weights are not the nearest float16 to the master that was returned with them"
    )
### END HIDDEN TESTS

# %% [markdown]
# ## Adam with masters
#
# Adam divides by the root of a mean of squares, and squares are where float16 gives out first: $g^2$ is 0 in float16 for every
# $|g|$ up to $1.72 \cdot 10^{-4}$, and $\varepsilon = 10^{-8}$ is 0 as well. The formulas of `torch.optim.Adam`, with the number
# $t = 1, 2, \ldots$ of the step:
#
# $$ d = g + \lambda w, \qquad m \leftarrow \beta_1 m + (1 - \beta_1)\, d, \qquad v \leftarrow \beta_2 v + (1 - \beta_2)\, d^2, $$
#
# $$ \hat m = \frac{m}{1 - \beta_1^t}, \qquad \hat v = \frac{v}{1 - \beta_2^t}, \qquad
#    w \leftarrow w - \mathrm{lr}\; \frac{\hat m}{\sqrt{\hat v} + \varepsilon} . $$
#
# Three places are easy to get wrong: $\varepsilon$ stands outside the root, and is added after the bias of $v$ has been corrected;
# the first step has $t = 1$; and weight decay is part of the gradient (taking it out of there makes another optimizer, AdamW).
#
# **Your task.** The same contract as before, with two means in place of the momentum.


# %% nbgrader={"grade": false, "grade_id": "adam_step", "locked": false, "schema_version": 3, "solution": true, "task": false}
def adam_step(state, grad, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    """One step of Adam for float16 weights with float32 masters. Returns the new state.

    state: a dict of four arrays of one shape (any shape) and a count:
        "weight"      float16: what the network computes with
        "master"      float32: the weight as the optimizer knows it
        "exp_avg"     float32: m of the formulas above, zeros before the first step
        "exp_avg_sq"  float32: v, zeros before the first step
        "step"        int: how many steps were made, 0 before the first one
    grad: float16, of the same shape.

    Returns a new dict with the same five keys, dtypes and shapes. The arithmetic is float32 or better; the new weight is the
    new master rounded to the nearest float16. Neither `state` nor `grad` is changed. Inputs are finite, and eps is positive.
    """
    ### BEGIN SOLUTION
    beta1, beta2 = betas
    step, master = state["step"] + 1, state["master"]
    g = grad.astype(np.float32) + weight_decay * master
    m = beta1 * state["exp_avg"] + (1 - beta1) * g
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * g * g
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    master = master - lr * m_hat / (np.sqrt(v_hat) + eps)
    return {
        "weight": master.astype(np.float16),
        "master": master,
        "exp_avg": m,
        "exp_avg_sq": v,
        "step": step,
    }
    ### END SOLUTION


# %% [markdown]
# Adam's first step is lr, whatever the size of the gradient, as long as it is well above eps. A gradient of 0 makes
# no step.

# %% nbgrader={"grade": true, "grade_id": "adam_step_first", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
state = start(ADAM, np.zeros(4))
before = copied(state)
new = adam_step(state, np.array([100, -0.5, 1e-3, 0], np.float16), lr=0.25)
check_state(new, (4,), ADAM)
assert new["step"] == 1, "the count of steps is not 1 after the first one"
compare(
    new["master"],
    np.array([-0.25, 0.25, -0.25, 0]),
    1e-4,
    "the first step with gradients 100, -0.5, 0.001 and 0",
)
assert same(state, before), "the state that was given has been changed"

### BEGIN HIDDEN TESTS
for shape, eps in (((300,), 1e-8), ((11, 20), 1e-8), ((5, 6, 7), float(10 ** rng.uniform(-6, -4)))):
    lr = float(10 ** rng.uniform(-4, -1))
    g = (2.0 ** rng.uniform(-24, 8, shape) * rng.choice([-1, 0, 1], shape, p=[0.45, 0.1, 0.45])).astype(
        np.float16
    )
    state = start(ADAM, np.zeros(shape))
    new = adam_step(state, g, lr=lr, eps=eps)
    check_state(new, shape, ADAM)
    d = np.float64(g)
    # a dozen roundings to within 2^-24, and 1 - beta2 may have been taken in float32, where it is 2e-5 off
    expected, small = -lr * d / (np.abs(d) + eps), np.abs(d) < 1e-4
    for what, those in (
        ("below 0.0001", small & (d != 0)),
        ("from 0.0001 up", ~small),
        ("that are 0", d == 0),
    ):
        compare(
            new["master"][those],
            expected[those],
            1e-4 * np.abs(expected[those]),
            f"the first step for gradients {what}, eps = {eps:.1g}",
        )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "adam_step_means", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
state = start(ADAM, np.zeros(2))
for _ in range(2):
    state = adam_step(state, np.array([1, 2.0**-13], np.float16), betas=(0.5, 0.75))
check_state(state, (2,), ADAM)
compare(state["exp_avg"], np.array([0.75, 0.75 * 2.0**-13]), 1e-10, "exp_avg after two equal gradients")
compare(
    state["exp_avg_sq"],
    np.array([0.4375, 0.4375 * 2.0**-26]),
    1e-12,
    "exp_avg_sq after two equal gradients, 1 and 2^-13",
)

### BEGIN HIDDEN TESTS
for shape, top in (((80,), 1.0), ((6, 15), 1e-3), ((40,), 1.7e-4)):
    beta1, beta2 = float(rng.uniform(0.5, 0.95)), float(rng.choice([0.99, 0.999, 0.9999]))
    state = start(ADAM, np.zeros(shape))
    m, v, top_m = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for _ in range(8):
        g = (top * rng.uniform(0.1, 1, shape) * rng.choice([-1, 1], shape)).astype(np.float16)
        state = adam_step(state, g, betas=(beta1, beta2))
        check_state(state, shape, ADAM)
        d = np.float64(g)
        m, v = beta1 * m + (1 - beta1) * d, beta2 * v + (1 - beta2) * d**2
        top_m = np.maximum(top_m, np.abs(m))
    # 1 - beta taken in float32 is up to 3e-7 off for beta1 and 1.7e-4 for beta2; 24 roundings are 1.4e-6
    compare(state["exp_avg"], m, 5e-6 * top_m, f"exp_avg after 8 gradients up to {top:g}")
    compare(state["exp_avg_sq"], v, 2.2e-4 * v, f"exp_avg_sq after 8 gradients up to {top:g}")
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "adam_step_run", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
state = start(ADAM, np.ones(2))
for _ in range(100):
    state = adam_step(state, np.array([1e-3, -4], np.float16), lr=1e-4)
check_state(state, (2,), ADAM)
compare(state["master"], np.array([0.99, 1.01]), 1e-4, "the masters after 100 steps of 0.0001")
compare(state["weight"], np.array([0.99, 1.01]), 6e-4, "the weights after 100 steps of 0.0001")

### BEGIN HIDDEN TESTS
for shape, eps, lr, size in (
    ((40,), 1e-8, 1e-4, 1),
    ((5, 9), float(rng.uniform(0.01, 0.1)), 1e-2, 0.01),
    ((2, 3, 7), 1e-8, 3e-5, 1e-5),
):
    steps, betas = 25, (float(rng.uniform(0.5, 0.95)), float(rng.uniform(0.95, 0.999)))
    weight = (rng.uniform(0.5, 2, shape) * rng.choice([-1, 0, 1], shape)).astype(np.float16)
    state = start(ADAM, weight)
    w, m, v, path = np.float64(weight), np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for t in range(1, steps + 1):
        g = (size * (rng.standard_normal(shape) + 1)).astype(np.float16)
        state = adam_step(state, g, lr, betas, eps)
        check_state(state, shape, ADAM)
        assert state["step"] == t, f"the count of steps is {state['step']!r} after {t} steps"
        d = np.float64(g)
        m, v = betas[0] * m + (1 - betas[0]) * d, betas[1] * v + (1 - betas[1]) * d**2
        rms = np.sqrt(v / (1 - betas[1] ** t))
        u = lr * (m / (1 - betas[0] ** t)) / (rms + eps)
        w, path = w - u, path + lr * rms / (rms + eps)
    # a step is right to 5e-5 (1 - beta2 taken in float32 is at most 3e-5 off); adding it rounds to within 2^-24 of the master
    compare(
        state["master"],
        w,
        5e-5 * path + steps * 2.0**-24 * np.abs(w),
        f"the masters after {steps} steps, eps = {eps:.1g}",
    )
    nearest = state["weight"] == state["master"].astype(np.float16)
    assert nearest.all(), (
        f"{(~nearest).sum()} of {nearest.size} weights are not the nearest float16 to their master"
    )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "adam_step_decay", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
state = start(ADAM, np.ones(1))
state = adam_step(state, np.zeros(1, np.float16), lr=0.25, weight_decay=0.5)
check_state(state, (1,), ADAM)
compare(state["exp_avg"], 0.05, 1e-6, "exp_avg of a weight of 1 that only decays")

### BEGIN HIDDEN TESTS
for shape in ((50,), (7, 8)):
    steps, lr, decay, betas = 6, float(rng.uniform(0.01, 0.05)), float(rng.uniform(0.2, 0.5)), (0.8, 0.95)
    # in the middle of a training: a master lies somewhere within half a step of its weight
    master = (rng.uniform(1, 4, shape) * rng.choice([-1, 1], shape)).astype(np.float32)
    state = start(ADAM, master)
    w, m, v, path = np.float64(master), np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for t in range(1, steps + 1):
        g = (np.sign(w) * rng.uniform(0, 0.2, shape) * rng.integers(0, 2, shape)).astype(np.float16)
        state = adam_step(state, g, lr, betas, weight_decay=decay)
        check_state(state, shape, ADAM)
        d = np.float64(g) + decay * w
        m, v = betas[0] * m + (1 - betas[0]) * d, betas[1] * v + (1 - betas[1]) * d**2
        if t == 1:
            # these are the given masters, so exp_avg is right to a few roundings of d and of its two terms
            size = 0.2 * (np.abs(np.float64(g)) + decay * np.abs(w))
            compare(state["exp_avg"], m, 2e-6 * size, "exp_avg after one step with weight decay")
        u = lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + 1e-8)
        w, path = w - u, path + lr
    # a step is right to 1e-5 with these betas
    compare(state["master"], w, 1e-5 * path + steps * 2.0**-24 * np.abs(w), "the masters with weight decay")
### END HIDDEN TESTS

# %% [markdown]
# ## Stochastic rounding
#
# Masters cost four bytes per weight. Without them, a bfloat16 weight can still learn from small updates, if it is rounded by
# chance: up or down, with odds that make it right on average. If $x$ lies between neighbouring bfloat16 numbers $a < b$,
#
# $$ P(b) = \frac{x - a}{b - a}, \qquad P(a) = \frac{b - x}{b - a} . $$
#
# A bfloat16 number is the upper half of a float32 number; look at what the lower half then means. Each value needs a random
# number of its own.
#
# **Your task.** The seed makes it repeatable: the same seed and the same input give the same output. Which generator you use, and how, is
# up to you.


# %% nbgrader={"grade": false, "grade_id": "stochastic_bits", "locked": false, "schema_version": 3, "solution": true, "task": false}
def stochastic_bits(x, seed):
    """float32 values rounded by chance to one of the two neighbouring bfloat16 numbers, as uint16 bits of the same shape.

    x: float32, any shape, of both signs; finite, and so small that no neighbour is infinite. It is not changed.
    seed: an int from 0 to 2^31. The result depends on `x` and `seed` alone, and each value is rounded independently of the
    others, with the odds above. A value that is a bfloat16 number stays what it is.
    """
    ### BEGIN SOLUTION
    bits = x.view(np.uint32)
    noise = np.random.default_rng(seed).integers(0, 2**16, x.shape, dtype=np.uint32)
    # a carry into the upper half has the odds (lower half) / 2^16
    return ((bits + noise) >> 16).astype(np.uint16)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "stochastic_bits_neighbours", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
x = np.array([[1.0, -2.5], [1.001, -1.001]], np.float32)
r = stochastic_bits(x, 0)
check_array(r, "the result", np.uint16, (2, 2))
assert np.array_equal(bfloat16_values(r)[0], x[0]), (
    "1 and -2.5 are bfloat16 numbers and must stay what they are"
)
assert set(np.abs(bfloat16_values(r)[1])) <= {np.float32(1), np.float32(1.0078125)}, (
    "1.001 lies between 1 and 1.0078125"
)

### BEGIN HIDDEN TESTS
for shape in ((3000,), (30, 40), (5, 6, 7)):
    bits = rng.integers(0, 0x7F7F0000, shape, dtype=np.uint32)  # every exponent, subnormal numbers too
    bits &= np.uint32(0xFFFF0000) | rng.choice(np.array([0, 0xFFFF, 0x8000, 0xFF00], np.uint32), shape)
    bits |= rng.integers(0, 2, shape, dtype=np.uint32) << 31
    x, seed = bits.view(np.float32), int(rng.integers(2**31))
    x_before = x.copy()
    r = stochastic_bits(x, seed)
    check_array(r, "the result", np.uint16, shape)
    assert np.array_equal(x, x_before), "the array that was given has been changed"
    near, off = (bits >> 16).astype(np.uint16), (bits & 0xFFFF) != 0
    moved = int((r != near)[~off].sum())
    assert moved == 0, f"{moved} of {(~off).sum()} bfloat16 numbers did not stay what they are"
    for sign, those in (("positive", bits < 2**31), ("negative", bits >= 2**31)):
        lost = int(((r != near) & (r != near + np.uint16(1)) & those).sum())
        assert lost == 0, f"{lost} of {those.sum()} {sign} values did not become one of their two neighbours"
    assert np.array_equal(r, stochastic_bits(x, seed)), "the same input and seed gave two different results"
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "stochastic_bits_odds", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
x = np.full(4096, 1 + 0.25 * 2.0**-7, np.float32)  # a quarter of the way from 1 to the next bfloat16 number
for sign in (1, -1):
    mean = np.abs(bfloat16_values(stochastic_bits(np.float32(sign) * x, 1))).mean(dtype=np.float64)
    assert abs(mean - x[0]) < 3e-4, (
        f"{sign * x[0]} is not right on average: the mean is off by {mean - x[0]:.2g}"
    )

### BEGIN HIDDEN TESTS
n = 8192
for part in (0.5, 1 / 16, 15 / 16, float(rng.uniform(0.1, 0.45)), float(rng.uniform(0.55, 0.9))):
    for sign in (1, -1):
        low = int(rng.integers(0x3000, 0x4800))
        down, up = (sign * bfloat16_values(np.array([low, low + 1])).astype(np.float64)).tolist()
        x = np.float32(down + part * (up - down))
        share = (np.float64(x) - down) / (up - down)
        r = stochastic_bits(np.full(n, x, np.float32), int(rng.integers(2**31)))
        check_array(r, "the result", np.uint16, (n,))
        away = float((bfloat16_values(r) == np.float32(up)).mean())
        # five standard deviations of a share of n: six wrong verdicts in ten million
        limit = 5 * np.sqrt(share * (1 - share) / n)
        assert abs(away - share) <= limit, (
            f"{'positive' if sign > 0 else 'negative'} values go away from 0 too {'often' if away > share else 'seldom'}: "
            f"the share is off by {abs(away - share) / limit * 5:.0f} standard deviations"
        )
# a weight that small updates pull towards 0 and away from it: right on average, on both sides of a power of two
for target in (1.0, -1.0, 0.5):
    w = np.full(2048, target, np.float32)
    updates = rng.choice([-1, 1]) * rng.uniform(2e-4, 6e-4, 12)
    for u in updates:
        w = bfloat16_values(stochastic_bits(w - np.float32(u), int(rng.integers(2**31))))
    # a step of the format is 2^-7 at most; the variance of one rounding is at most u * 2^-7
    limit = 5 * np.sqrt(np.abs(updates).sum() * 2.0**-7 / len(w))
    error = abs(w.mean(dtype=np.float64) - (target - updates.sum()))
    assert error <= limit, (
        f"after 12 small updates the mean of 2048 weights is off by {error / limit * 5:.0f} standard deviations"
    )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "stochastic_bits_independent", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
x = np.full((32, 32), 1 + 2.0**-8, np.float32)  # half-way
first, second = stochastic_bits(x, 1), stochastic_bits(x, 2)
assert len(np.unique(first)) == 2, "1024 equal values were all rounded in the same direction"
assert not np.array_equal(first, second), "two seeds gave the same result"

### BEGIN HIDDEN TESTS
n = 64
for low in (0x3F80, 0xBF00):
    x = np.full((n, n), low << 16 | 0x8000, np.uint32).view(np.float32)
    ups = [stochastic_bits(x, int(seed)) for seed in rng.integers(2**31, size=3)]
    for r in ups:
        check_array(r, "the result", np.uint16, (n, n))
    ups = [(r != low).astype(np.float64) for r in ups]
    # squared deviations of n sums of n coins, over their variance: n on average, with a deviation of sqrt(2 n)
    for what, axis in (("rows", 1), ("columns", 0)):
        chi = ((ups[0].sum(axis) - n / 2) ** 2).sum() / (n / 4)
        assert abs(chi - n) <= 7 * np.sqrt(2 * n), (
            f"equal values in the same {what} are not rounded independently"
        )
    for a, b, what in (
        (ups[0], ups[1], "two seeds"),
        (ups[1], ups[2], "two seeds"),
        (ups[0][:-1], ups[0][1:], "neighbours"),
    ):
        equal = (a == b).mean()
        assert abs(equal - 0.5) <= 5 * 0.5 / np.sqrt(a.size), (
            f"{what}: {equal:.0%} of the values are rounded alike"
        )
### END HIDDEN TESTS

# %% [markdown]
# ## Kahan's compensation
#
# Rounding by chance is right on average, and noisy. The other way is to remember. Beside the weight $w$ lies a second bfloat16
# number $c$: what rounding has *added* to the weight so far and should not have, so that the weight that is meant is $w - c$.
# A step by the update $u$ is
#
# $$ t = (w - c) - u, \qquad w \leftarrow \mathrm{round}(t), \qquad c \leftarrow \mathrm{round}(w - t), $$
#
# where the last $w$ is the new one, the sums are float32, and round is rounding to the nearest bfloat16.
#
# **Your task.** `bfloat16_bits` and `bfloat16_values` from the first cell do the rounding and the widening.


# %% nbgrader={"grade": false, "grade_id": "kahan_step", "locked": false, "schema_version": 3, "solution": true, "task": false}
def kahan_step(state, update):
    """Subtract `update` from bfloat16 weights with Kahan's compensation. Returns the new state.

    state: a dict of two uint16 arrays of one shape (any shape), the bits of bfloat16 numbers:
        "weight"        w of the formulas above
        "compensation"  c, zeros before the first step
    update: float32, of the same shape.

    Returns a new dict with the same two keys, dtypes and shapes. Neither `state` nor `update` is changed. Inputs are finite, and so are
    all results.
    """
    ### BEGIN SOLUTION
    meant = bfloat16_values(state["weight"]) - bfloat16_values(state["compensation"]) - update
    weight = bfloat16_bits(meant)
    return {"weight": weight, "compensation": bfloat16_bits(bfloat16_values(weight) - meant)}
    ### END SOLUTION


# %% [markdown]
# A hundred updates of 0.0001, each of them far too small for a bfloat16 weight of 1 to notice:

# %% nbgrader={"grade": true, "grade_id": "kahan_step_small", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
state = start(KAHAN, bfloat16_bits(np.ones(2)))
for _ in range(100):
    state = kahan_step(state, np.array([1e-4, -1e-4], np.float32))
    check_state(state, (2,), KAHAN)
meant = np.float64(bfloat16_values(state["weight"])) - bfloat16_values(state["compensation"])
compare(meant, np.array([0.99, 1.01]), 1e-3, "weight minus compensation after 100 updates of 0.0001")

### BEGIN HIDDEN TESTS
for shape in ((30,), (4, 9), (2, 3, 5)):
    steps = 60
    weight = bfloat16_bits(rng.uniform(0.5, 1.9, shape) * rng.choice([-1, 1], shape))
    pull = rng.uniform(1e-4, 4e-4, shape) * rng.choice([-1, 1], shape)
    state = start(KAHAN, weight)
    w = np.float64(bfloat16_values(weight))
    for _ in range(steps):
        u = (pull * rng.uniform(0.5, 1.5, shape)).astype(np.float32)
        state = kahan_step(state, u)
        check_state(state, shape, KAHAN)
        w = w - u
    # c is at most half a step, 2^-8, and rounded to within 2^-8 of itself
    meant = np.float64(bfloat16_values(state["weight"])) - bfloat16_values(state["compensation"])
    compare(meant, w, steps * 2.0**-16, f"weight minus compensation after {steps} small updates")
    compare(
        bfloat16_values(state["weight"]),
        w,
        2.0**-8 + steps * 2.0**-16,
        f"the weight after {steps} small updates",
    )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "kahan_step_once", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
state = {"weight": bfloat16_bits([1.0, -1.0]), "compensation": bfloat16_bits([0.001, 0.001])}
new = kahan_step(state, np.array([0.25, 0.25], np.float32))
check_state(new, (2,), KAHAN)
compare(
    bfloat16_values(new["weight"]),
    np.array([0.749, -1.251]),
    4e-3,
    "1 and -1 with a compensation of 0.001, minus 0.25",
)

### BEGIN HIDDEN TESTS
for shape in ((200,), (10, 12)):
    weight = bfloat16_bits(2.0 ** rng.uniform(-6, 6, shape) * rng.choice([-1, 1], shape))
    w = np.float64(bfloat16_values(weight))
    step = 2.0 ** (np.floor(np.log2(np.abs(w))) - 7)
    c = bfloat16_bits(step * rng.uniform(-0.5, 0.5, shape))
    update = (np.abs(w) * 2.0 ** rng.uniform(-8, 2, shape) * rng.choice([-1, 1], shape)).astype(np.float32)
    state, update_before = {"weight": weight, "compensation": c}, update.copy()
    before = copied(state)
    new = kahan_step(state, update)
    check_state(new, shape, KAHAN)
    t = w - np.float64(bfloat16_values(c)) - np.float64(update)
    fine = 2.0**-22 * (np.abs(w) + np.abs(update))  # two float32 sums
    half_step = 2.0 ** (np.floor(np.log2(np.abs(t) + fine)) - 8)
    after, added = (np.float64(bfloat16_values(new[name])) for name in ("weight", "compensation"))
    compare(
        after, t, half_step + fine, "one step: the weight is not the bfloat16 number nearest to (w - c) - u"
    )
    compare(
        added,
        after - t,
        2.0**-8 * np.abs(after - t) + 2 * fine,
        "one step: the compensation is not what rounding added",
    )
    assert same(state, before) and np.array_equal(update, update_before), (
        "the state or the update that was given has been changed"
    )
### END HIDDEN TESTS

# %% [markdown]
# The compensation is what belongs to this step alone: with updates that need no rounding it is 0 again.

# %% nbgrader={"grade": true, "grade_id": "kahan_step_remembers", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
state = start(KAHAN, bfloat16_bits([1.0]))
for u in (2.0**-10, -(2.0**-10)):
    state = kahan_step(state, np.array([u], np.float32))
check_state(state, (1,), KAHAN)
assert (state["weight"] == bfloat16_bits([1.0])).all() and not (state["compensation"] & 0x7FFF).any(), (
    "there and back is not where it began"
)

### BEGIN HIDDEN TESTS
for shape in ((50,), (6, 8)):
    # multiples of 1 / 2048 below a step, there and back in another order: nothing is lost on the way
    weight = bfloat16_bits(rng.integers(130, 250, shape) / 128 * rng.choice([-1, 1], shape))
    state = start(KAHAN, weight)
    moves, meant = rng.integers(-6, 7, (6, *shape)) / 2048, np.float64(bfloat16_values(weight))
    for u in np.concatenate([moves, -rng.permutation(moves)]):
        state, meant = kahan_step(state, u.astype(np.float32)), meant - u
        check_state(state, shape, KAHAN)
        there = np.float64(bfloat16_values(state["weight"])) - bfloat16_values(state["compensation"])
        lost = int((there != meant).sum())
        assert lost == 0, (
            f"{lost} of {there.size} moves were not remembered, although nothing has to be lost in them"
        )
    left = int((state["compensation"] & 0x7FFF != 0).sum())
    assert left == 0, f"{left} of {there.size} compensations are not 0 although nothing is left to compensate"
### END HIDDEN TESTS

# %% [markdown]
# ## Which one?
#
# A network with a billion weights is to be fine-tuned with Adam at a learning rate of $10^{-5}$. Its weights are about 0.02 in size.
#
# 1. For each of four ways, float32 weights, float16 with masters, bfloat16 with stochastic rounding, bfloat16 with Kahan: how many
#    gigabytes do the weights and all that the optimizer keeps take? Adam's means are float32 in all four.
# 2. What would bfloat16 weights rounded to nearest do in this training? Give the numbers that decide it.
# 3. Somebody finds that 16 bits for the means as well would save four gigabytes. Name one thing that goes wrong in float16 and one in
#    bfloat16.
# 4. Which way would you choose, and what would you log during the training to find out that it was the wrong choice?

# %% [markdown] nbgrader={"grade": true, "grade_id": "choose_answer", "locked": false, "points": 12, "schema_version": 3, "solution": true, "task": false}
# ### BEGIN MARK SCHEME
# 3 points for each part. 1: the four numbers; a forgotten master or means cost 2 points. 2: the step of the format and Adam's update,
# compared. 3: one true fault for each format (1.5 each). 4: any choice with a reason that fits the numbers (1.5), and something that would show
# the fault: share of weights that stand still, distance to a float32 run, weight minus compensation (1.5). The loss alone is not enough.
# ### END MARK SCHEME
#
# 1. The means take 8 bytes per weight. float32: 4 + 8 = 12 GB. float16 and master: 2 + 4 + 8 = 14 GB. bfloat16, stochastic: 2 + 8 = 10 GB.
#    bfloat16 and compensation: 2 + 2 + 8 = 12 GB.
# 2. 0.02 lies between $2^{-6}$ and $2^{-5}$, where bfloat16 numbers are $2^{-13} = 1.2 \cdot 10^{-4}$ apart. Adam's steps are about lr, $10^{-5}$,
#    and anything below half a step, $6 \cdot 10^{-5}$, is lost. Weights of this size do not move at all; only those below 0.004 do.
# 3. float16: squares of gradients below $1.7 \cdot 10^{-4}$ are 0 and eps is 0, so the step is infinite. bfloat16: $\beta_2 = 0.999$ rounds to 1, so
#    nothing is ever forgotten.
# 4. For example stochastic rounding, the smallest; its noise, a step of $10^{-4}$ in weights of 0.02, averages out over many weights and
#    steps. I should log the distance of a few layers to a float32 run of some hundred steps, and the mean update that really
#    happened against the one that was wanted.
