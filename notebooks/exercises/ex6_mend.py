# %% [markdown]
# # Exercise 6. Mend the broken loop
#
# Eight people have sent you their training loops. Each loop trained well in a short test, and each went wrong later: when the
# gradients grew, when the learning rate was lowered, when the job was restarted. Each has one fault, and it is never in the network.
# These are the bugs of [notebook 7](../07_scale_dynamics.ipynb) and [notebook 8](../08_detector.ipynb), in the form in which they
# come in real life: without an error message.
#
# For every loop you do two things. You **mend** it. And you **convict** it: you name the settings under which the fault shows, so that
# whoever doubts you can see it with their own eyes. When you are done you can
#
# - find the line that is wrong in a loop that looks right;
# - say under which circumstances a fault shows, and so write the test that would have caught it;
# - mend a loop without breaking what was right: the loss scale still moves, bad steps are still skipped, float16 is still used.
#
# Two hours: five minutes to read the pieces, a quarter of an hour for each loop. You need NumPy only.

# %% [markdown]
# ## The pieces
#
# A small network, an optimizer and a loss scaler, with PyTorch's names and PyTorch's behaviour, on the engine of [notebook
# 2](../02_autograd.ipynb). They are all right: there is no bug in this cell. Read it once.

# %% nbgrader={"grade": false, "grade_id": "pieces", "locked": true, "schema_version": 3, "solution": false, "task": false}
import numpy as np

np.seterr(all="ignore")  # inf and NaN are what this exercise is about


def half(a):
    """Rounded to float16; from 65520 on that is inf."""
    return np.asarray(a).astype(np.float16)


class Tensor:
    """An array that remembers how it was made. parents: pairs of a Tensor and the vjp that leads to it."""

    def __init__(self, data, parents=()):
        self.data, self.parents, self.grad = data, parents, None

    def __mul__(self, factor):
        factor = float(factor)  # NumPy's float64 would turn the format into float64
        return Tensor(self.data * factor, ((self, lambda g: g * factor),))

    def __truediv__(self, divisor):
        return self * (1 / divisor)

    def item(self):
        return float(self.data)

    def backward(self, g=1.0):
        """Add g times the gradient of this number to the .grad of all that it was made from."""
        self.grad = g if self.grad is None else self.grad + g
        for parent, vjp in self.parents:  # every value here is used once, so there is one path to each
            parent.backward(vjp(g))


def product(a, b):
    """Half matrices multiplied as a tensor core does it: float32 sums, rounded once."""
    return half(np.float32(a) @ np.float32(b))


def linear(x, weight, bias):
    """x @ weight + bias in float16, as under autocast; the gradients of weight and bias get the formats of these."""
    w, fmt = half(weight.data), weight.data.dtype
    y = half(np.float32(x.data) @ np.float32(w) + np.float32(half(bias.data)))
    to_weight = lambda g: product(x.data.T, g).astype(fmt)  # noqa: E731
    to_bias = lambda g: half(g.sum(0, dtype=np.float32)).astype(fmt)  # noqa: E731
    return Tensor(y, ((x, lambda g: product(g, w.T)), (weight, to_weight), (bias, to_bias)))


def tanh(x):
    """In float16, computed in float32 and rounded once."""
    y = half(np.tanh(np.float32(x.data)))
    return Tensor(y, ((x, lambda g: half(np.float32(g) * (1 - np.float32(y) ** 2))),))


def cross_entropy(scores, labels):
    """The mean of -log softmax at the labels, in float32 throughout; the gradient of the scores is float16."""
    z = np.float32(scores.data)
    z = z - z.max(1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    right = np.eye(z.shape[1], dtype=np.float32)[labels]
    value = np.float32(-(log_p[right == 1]).mean())
    return Tensor(value, ((scores, lambda g: half(g * (np.exp(log_p) - right) / np.float32(len(z)))),))


class MLP:
    """linear, tanh, linear: computes in float16. The two weights and two biases keep the format that they come in."""

    def __init__(self, weights):
        self.w = [Tensor(np.array(w)) for w in weights]

    def __call__(self, x):
        return linear(tanh(linear(Tensor(half(x)), *self.w[:2])), *self.w[2:])

    def parameters(self):
        return self.w

    def weights(self):
        return [np.float32(p.data) for p in self.w]


class SGD:
    """SGD with momentum 0.9, in float32; a new weight is rounded to its own format."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), float(lr)
        self.momenta = [np.zeros(p.data.shape, np.float32) for p in self.parameters]

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    def step(self):
        for i, p in enumerate(self.parameters):
            self.momenta[i] = 0.9 * self.momenta[i] + np.float32(p.grad)
            p.data = (np.float32(p.data) - self.lr * self.momenta[i]).astype(p.data.dtype)


def grad_norm(parameters):
    """The norm of all gradients together."""
    return float(np.sqrt(sum(np.square(np.float64(p.grad)).sum() for p in parameters)))


def clip_grad_norm_(parameters, max_norm):
    """Shrink the gradients to a norm of max_norm, if it is larger."""
    factor = float(min(1.0, max_norm / (grad_norm(parameters) + 1e-6)))
    for p in parameters:
        p.grad = p.grad * factor


class GradScaler:
    """PyTorch's rule and PyTorch's protests: twice the scale after growth_interval good steps in a row, half of it after a bad one."""

    def __init__(self, init_scale, growth_interval):
        self.now, self.good, self.growth_interval = float(init_scale), 0, growth_interval
        self.bad, self.stepped = {}, set()  # since the last update: optimizer -> is a gradient inf or NaN?

    def get_scale(self):
        return self.now

    def scale(self, loss):
        return loss * self.now

    def unscale_(self, optimizer):
        if optimizer in self.bad:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update()")
        for p in optimizer.parameters:
            p.grad = p.grad * (1 / self.now)
        self.bad[optimizer] = not all(np.isfinite(p.grad).all() for p in optimizer.parameters)

    def step(self, optimizer):
        if optimizer in self.stepped:
            raise RuntimeError("step() has already been called on this optimizer since the last update()")
        if optimizer not in self.bad:
            self.unscale_(optimizer)
        if not self.bad[optimizer]:
            optimizer.step()
        self.stepped.add(optimizer)

    def update(self):
        if not self.bad:
            raise RuntimeError("no optimizer was stepped or unscaled since the last update()")
        if any(self.bad.values()):
            self.now, self.good = self.now / 2, 0
        else:
            self.good += 1
            if self.good == self.growth_interval:
                self.now, self.good = self.now * 2, 0
        self.bad, self.stepped = {}, set()

    def state_dict(self):
        return {"now": self.now, "good": self.good}

    def load_state_dict(self, state):
        self.now, self.good = float(state["now"]), state["good"]


def report(weights, trace):
    """What a loop returns: the float32 weights at the end, and from the trace of each step its loss and the scale after it."""
    return {
        "weights": weights,
        "losses": [loss for loss, _ in trace],
        "scales": [scale for _, scale in trace],
    }


# %% [markdown]
# ## The instruments
#
# How do you know that a mixed-precision loop is right? Train the same in high precision, where no trick is needed, and compare.
# `twin` is that training, in float64. It has no loss scale, but it knows the scaler's rule, so that it leaves out the same steps.
# `apart` says how far a run is from its twin: 0 is the same, and 1 is as far as if it had not trained. Where the loop is right it is
# 0.001 or so.
#
# You need not read this cell, only use it: `problem(rng, **settings)` gives weights and batches to try a loop on, and what the twin
# makes of them; `drawn(rng)` gives settings from wide ranges, three at a time; the `check_...` functions are those of the tests.

# %% nbgrader={"grade": false, "grade_id": "instruments", "locked": true, "schema_version": 3, "solution": false, "task": false}
rng = np.random.default_rng(0)

# The weights that each optimizer has: one optimizer for all, or one for each layer.
ONE, TWO = ((0, 1, 2, 3),), ((0, 1), (2, 3))
PLAIN = ("lr", "init_scale", "growth_interval")  # the settings of every loop


def exact(w, x, y, temperature):
    """In float64, for a batch in parts: the loss, its gradients, and the largest value that backward meets on the way to each.

    x: (parts, rows, inputs). A part's gradients are those of its share of the loss.
    """
    h = np.tanh(x @ w[0] + w[1])
    z = (h @ w[2] + w[3]) / temperature
    z = z - z.max(-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    right = y[..., None] == np.arange(z.shape[-1])
    s = (np.exp(log_p) - right) / y.size
    d = s / temperature
    up = d @ w[2].T
    e = up * (1 - h**2)
    gradients = [x.mT @ e, e.sum(1), h.mT @ d, d.sum(1)]
    s, d, up, *sizes = (np.abs(a).max() for a in (s, d, up, *gradients))
    sizes = np.maximum(sizes, [max(s, d, up)] * 2 + [max(s, d)] * 2)
    return -log_p[right].mean(), [g.sum(0) for g in gradients], sizes


def twin(
    weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, max_norm=1e4, parts=1, temperature=1.0,
    stop=0, groups=ONE,
):  # fmt: skip
    """The training that a loop should do, in float64. Returns what a loop returns, and more for the checks.

    It leaves out the steps that float16 forces a scaler to skip. `stop` makes no difference here.
    """
    w = [np.float64(a) for a in weights]
    momenta, scale, good = [np.zeros_like(a) for a in w], float(init_scale), 0
    losses, scales, norms, made, margin = [], [], [], 0, np.inf
    for x, y in batches:
        x, y = np.float64(x), np.asarray(y)
        loss, g, sizes = exact(w, x.reshape(parts, -1, x.shape[-1]), y.reshape(parts, -1), temperature)
        norm, over = np.sqrt(sum((a**2).sum() for a in g)), scale * sizes >= 65520
        margin = min(margin, np.abs(np.log2(scale * sizes / 65520)).min())
        for group in groups:
            if not over[list(group)].any():
                for i in group:
                    momenta[i] = 0.9 * momenta[i] + g[i] * min(1, max_norm / norm)
                    w[i] = w[i] - lr * momenta[i]
        if over.any():
            scale, good = scale / 2, 0
        else:
            good, made = good + 1, made + 1
            if good == growth_interval:
                scale, good = scale * 2, 0
        for trace, value in ((losses, loss), (scales, scale), (norms, norm)):
            trace.append(value)
    more = {"start": weights, "norms": norms, "made": made, "margin": margin}
    return {"weights": [np.float32(a) for a in w], "losses": losses, "scales": scales} | more


def problem(rng, steps=6, rows=16, faint=False, least=3, **settings):
    """Weights and batches of a small task, and their twin: with these settings a healthy loop makes at least `least` steps.

    It is drawn until no scaled gradient lies so near the border to inf that float16 and float64 might disagree about it. faint:
    inputs of a millionth and a first layer that starts at 0. Its gradients are too small for float16, unless they are scaled.
    """
    for _ in range(200):
        i, h, o = 8, 12, 4
        shapes = ((0 if faint else i**-0.5, (i, h)), (0.5, h), (h**-0.5, (h, o)), (0.1, o))
        weights = [rng.normal(0, size, shape).astype(np.float32) for size, shape in shapes]
        x = rng.integers(-8, 9, (steps, rows, i)) * 2.0**-24 if faint else rng.normal(0, 1, (steps, rows, i))
        labels = (x @ rng.normal(0, 1, (i, o))).argmax(-1)
        batches = [(a.astype(np.float32), b) for a, b in zip(x, labels, strict=True)]
        truth = twin(weights, batches, **settings)
        if truth["margin"] > 0.01 and truth["made"] >= least:
            return weights, batches, truth
    raise AssertionError(f"with these settings even a healthy loop makes fewer than {least} of {steps} steps")


def drawn(rng, *more):
    """Three dicts of settings from wide ranges: each setting is once low, once high and once between, in any order.

    Each dict holds the three settings of every loop, and those named in `more`: "temperature", "parts", "max_norm". The lower
    the temperature, the larger the gradients, and so lr and scale are lower too.
    """
    t = 2.0 ** -rng.permutation(rng.integers([0, 1, 4], [1, 4, 7])) if "temperature" in more else np.ones(3)
    settings = {
        "lr": 10 ** rng.permutation(rng.uniform([-2.5, -2, -1.5], [-2, -1.5, -1])) * t**2,
        "init_scale": np.maximum(1, 2.0 ** rng.permutation(rng.integers([0, 6, 19], [6, 17, 21])) * t),
        "growth_interval": rng.permutation([1, rng.integers(2, 5), 2000]),
        "temperature": t,
        "parts": 2 ** rng.permutation(rng.integers([0, 1, 3], [1, 3, 5])),
        "max_norm": 10 ** rng.permutation(rng.uniform([-1, -0.5, 0], [-0.5, 0, 1])),
    }
    names = (*PLAIN, *more)
    columns = [settings[name].tolist() for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def apart(run, truth):
    """How far the weights of a run are from its twin's, as a share of the way that the twin went: the worst of the four arrays."""
    pairs = zip(run["weights"], truth["weights"], truth["start"], strict=True)
    far = [np.linalg.norm(np.float64(a) - b) / np.linalg.norm(np.float64(b) - start) for a, b, start in pairs]
    return float(max(far)) if np.isfinite(far).all() else np.inf


def check_training(run, truth):
    """Assert that a run has the form of a report, and the weights and losses of its twin, as far as float16 can tell."""
    assert isinstance(run, dict), f"the loop returned no dict but a {type(run).__name__}"
    missing = {"weights", "losses", "scales"} - set(run)
    assert not missing, f"the report has no {', '.join(sorted(missing))}"
    shapes = [np.shape(w) for w in run["weights"]]
    assert shapes == [w.shape for w in truth["start"]], f"the shapes of the weights are {shapes}"
    assert all(np.asarray(w).dtype == np.float32 for w in run["weights"]), "the weights are not all float32"
    steps = len(truth["losses"])
    for name in ("losses", "scales"):
        assert len(run[name]) == steps, f"there are {len(run[name])} {name} for {steps} batches"
    broken = sum(int((~np.isfinite(w)).sum()) for w in run["weights"])
    assert broken == 0, f"{broken} weights are inf or NaN at the end"
    distance = apart(run, truth)
    assert distance < 0.02, f"the weights are {distance:.2g} apart from the twin's"
    assert distance > 1e-7, "these are the twin's own weights: the loop has to train in float16"
    off = np.abs(np.float64(run["losses"]) - truth["losses"]) / np.maximum(1, truth["losses"])
    assert (off < 0.02).all(), f"{(~(off < 0.02)).sum()} of {steps} losses are not those of the batches"


def check_scaler(run, truth):
    """Assert that the scale moved as it should."""
    wrong = [
        k for k, pair in enumerate(zip(run["scales"], truth["scales"], strict=True)) if pair[0] != pair[1]
    ]
    assert not wrong, (
        f"after step {wrong[0] + 1} the scale is {run['scales'][wrong[0]]:g}: the rule leads elsewhere"
    )


def check_half(run, weights, batches, parts=1, temperature=1.0):
    """Assert that the first loss is the float16 network's, and not that of a more precise one."""
    x, y = (np.split(a, parts) for a in batches[0])
    losses = [cross_entropy(MLP(weights)(a) / temperature, b).item() for a, b in zip(x, y, strict=True)]
    error = abs(run["losses"][0] / np.mean(losses) - 1)
    assert error < 1e-6, f"the first loss is {error:.1g} off: was the network computed in float16?"


def check_trains(loop, rng, steps=9, faint=False, groups=ONE, **settings):
    """Assert that a loop does on a new problem what its twin does; lr is drawn, unless it is given. Returns all that was seen."""
    settings = {"lr": rng.uniform(0.05, 0.2)} | settings
    rows = int(rng.choice([16, 32]))
    weights, batches, truth = problem(rng, steps, rows, faint, groups=groups, **settings)
    run = loop(weights, batches, **settings)
    check_training(run, truth)
    return run, truth, weights, batches


def reference(loop):
    """A right loop in the place of yours: the grader has one, here it is yours itself."""
    return getattr(loop, "reference", loop)


def check_keeps(loop, rng, steps=9, faint=False, groups=ONE, right=None, **settings):
    """The same, and look at the scale and at the format of the network as well; growth_interval is drawn too, unless it is given.

    right: a loop whose weights this one has to find, to float32's rounding, on one of three problems. A twin's are not float16's.
    Where a float32 sum ends in another bit, as on another processor, a gradient may round to the next float16: 3 of 1,000 right
    loops are 5e-5 to 2e-4 apart then.
    """
    settings = {"growth_interval": int(rng.integers(1, 4)), "lr": rng.uniform(0.05, 0.2)} | settings
    for _ in range(3):
        run, truth, weights, batches = check_trains(loop, rng, steps, faint, groups, **settings)
        check_scaler(run, truth)
        check_half(run, weights, batches, settings.get("parts", 1), settings.get("temperature", 1.0))
        if right is None:
            return run, truth
        distance = apart(run, truth | {"weights": right(weights, batches, **settings)["weights"]})
        if distance < 5e-5:
            return run, truth
    raise AssertionError(f"the weights are {distance:.2g} apart from those that float16 leads to")


LIMITS = {
    "lr": (1e-4, 0.5),
    "init_scale": (1.0, 2.0**24),
    "growth_interval": (1, 10_000),
    "max_norm": (0.01, 1e6),
    "parts": (1, 16),
    "temperature": (2.0**-8, 4.0),
    "stop": (0, 6),
}


def check_convicts(loop, settings, rng, names, groups=ONE):
    """Assert that these settings convict a loop: on most of five problems it is far from its twin, and the twin trains."""
    assert isinstance(settings, dict), f"the settings are no dict but a {type(settings).__name__}"
    chosen = {}
    for name, value in settings.items():
        assert name in names, f"{name!r} is no setting of this loop; it has {', '.join(names)}"
        low, high = LIMITS[name]
        assert isinstance(value, int | float | np.number), f"{name} is no number but a {type(value).__name__}"
        assert low <= value <= high, f"{name} is {value:g}; it has to be from {low:g} to {high:g}"
        chosen[name] = type(low)(value)
        assert chosen[name] == value, f"{name} is {value:g}; it has to be a whole number"
    assert 16 % chosen.get("parts", 1) == 0, "parts has to divide the 16 rows of a batch"
    distances = []
    for _ in range(5):
        weights, batches, truth = problem(rng, groups=groups, **chosen)
        distances.append(apart(loop(weights, batches, **chosen), truth))
    distance = sorted(distances)[2]
    assert distance > 0.25, (
        f"acquitted: with these settings the broken loop is {distance:.2g} apart from its twin, in the middle of five problems"
    )


# %% [markdown]
# ## The rules
#
# Each loop is a function of weights, batches and settings, and returns a report: the weights at the end, and for each step the loss
# and the scale after it. All eight passed the test that their authors made: with the settings in their first line they come out within a
# few percent of the twin.
#
# **Mend it** (4 and 3 points). Below each broken loop stands a copy of it, for you to change; the original stays, for comparison. A
# mended loop has the same arguments and the same report, and does what the twin does, whatever the settings: in float16, with a
# scaler that follows its rule. Four points if the fault is gone, three more if nothing else went with it. The tests draw settings from
# wide ranges, so they tell you that there is a fault, and not under which settings.
#
# **Convict it** (4 points). Name settings under which the fault shows, as a dict. On most of five problems, the broken loop has to be more
# than 0.25 apart from its twin, and no excuse may be left: a healthy loop has to make at least three of the six steps. Settings that you
# leave out stay as they are in the loop's first line; `LIMITS` says how far you may go with the others. To try some:
#
# ```python
# settings = {"lr": 0.5}
# weights, batches, truth = problem(rng, **settings)
# apart(broken_plain(weights, batches, **settings), truth)
# ```

# %% [markdown]
# ## 1. The plain loop
#
# > It trained for three days. Then there was an overflow, as there is now and then, and ever since the scale has fallen by half in
# > every step. It is at 1e-30 by now, and the loss stands still. A fresh start from the last weights trains well.


# %% nbgrader={"grade": false, "grade_id": "broken_plain", "locked": true, "schema_version": 3, "solution": false, "task": false}
def broken_plain(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):
    """The standard loop."""
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)


# %% nbgrader={"grade": false, "grade_id": "plain", "locked": false, "schema_version": 3, "solution": true, "task": false}
def mended_plain(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):
    """The standard loop.

    This is what broken_plain should have been. It begins as a copy of it: change what is wrong.
    """
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)


def convict_plain():
    """The settings that convict broken_plain, as a dict: values for some of lr, init_scale and growth_interval."""
    ### BEGIN SOLUTION
    return {"init_scale": 2.0**20}


def mended_plain(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):  # noqa: F811
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "plain_trains", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng):
    check_trains(mended_plain, rng, **settings)

### BEGIN HIDDEN TESTS
for scale, interval in ((2.0**20, 2000), (4.0, 2)):
    check_trains(mended_plain, rng, 8, init_scale=scale, growth_interval=interval)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "plain_keeps", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng):
    check_keeps(mended_plain, rng, **settings)

### BEGIN HIDDEN TESTS
for scale, faint in ((2.0**20, False), (2.0**13, True), (1.0, False)):
    check_keeps(mended_plain, rng, 9, faint, right=reference(mended_plain), init_scale=scale)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "plain_convicts", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check_convicts(broken_plain, convict_plain(), rng, PLAIN)

### BEGIN HIDDEN TESTS
check_convicts(broken_plain, convict_plain(), rng, PLAIN)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Clipping
#
# > We clip gradients. With max_norm=10000 all is well, but that clips nothing. With a sensible max_norm such as 1 the network hardly
# > learns, and with a smaller initial scale it learns a little more. What has the scale to do with it?


# %% nbgrader={"grade": false, "grade_id": "broken_clipped", "locked": true, "schema_version": 3, "solution": false, "task": false}
def broken_clipped(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, max_norm=1e4):
    """Clips the gradients to a norm of max_norm."""
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)


# %% nbgrader={"grade": false, "grade_id": "clipped", "locked": false, "schema_version": 3, "solution": true, "task": false}
def mended_clipped(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, max_norm=1e4):
    """Clips the gradients to a norm of max_norm.

    This is what broken_clipped should have been. It begins as a copy of it: change what is wrong.
    """
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)


def convict_clipped():
    """The settings that convict broken_clipped, as a dict: values for some of lr, init_scale, growth_interval and max_norm."""
    ### BEGIN SOLUTION
    return {"max_norm": 1.0, "init_scale": 2.0**16}


def mended_clipped(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, max_norm=1e4):  # noqa: F811
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "clipped_trains", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng, "max_norm"):
    check_trains(mended_clipped, rng, **settings)

### BEGIN HIDDEN TESTS
for scale, norm in ((2.0**20, 0.2), (64.0, 0.05), (2.0**15, 1e4)):
    check_trains(mended_clipped, rng, 8, init_scale=scale, max_norm=norm)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "clipped_keeps", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng, "max_norm"):
    check_keeps(mended_clipped, rng, **settings)

### BEGIN HIDDEN TESTS
for scale, norm, faint in ((2.0**20, 0.5, False), (2.0**13, 0.3, True), (8.0, 0.3, False)):
    check_keeps(
        mended_clipped, rng, 9, faint, right=reference(mended_clipped), init_scale=scale, max_norm=norm
    )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "clipped_convicts", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check_convicts(broken_clipped, convict_clipped(), rng, (*PLAIN, "max_norm"))

### BEGIN HIDDEN TESTS
check_convicts(broken_clipped, convict_clipped(), rng, (*PLAIN, "max_norm"))
### END HIDDEN TESTS

# %% [markdown]
# ## 3. A loop that watches its gradients
#
# > Once in some thousand steps all weights are NaN, all at once. The loss before that is fine. The scaler has noticed something: it halves
# > the scale in that very step. We look at the norm of the gradients in each step, that is why we unscale them.


# %% nbgrader={"grade": false, "grade_id": "broken_watched", "locked": true, "schema_version": 3, "solution": false, "task": false}
def check_norms(run, truth):
    """Assert that the norms are those of the true gradients, wherever these were finite."""
    assert "norms" in run, "the report has no norms"
    assert len(run["norms"]) == len(truth["norms"]), (
        f"there are {len(run['norms'])} norms for {len(truth['norms'])} batches"
    )
    finite = np.isfinite(run["norms"])
    # float16 rounds a row's gradient, at most 1 / rows, by up to 2**-11 of it. Where the rows cancel, these errors stay: up to
    # 2**-11 in each of the four scores, and 1e-3 in the norm.
    true = np.array(truth["norms"])
    off = (np.abs(np.float64(run["norms"]) - true) > 0.02 * true + 1e-3)[finite]
    assert not off.any(), f"{off.sum()} of {len(finite)} norms are not those of the true gradients"
    assert finite.sum() == truth["made"], (
        f"{finite.sum()} norms are finite, and {truth['made']} steps had finite gradients"
    )


def broken_watched(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):
    """Reports the norm of the true gradients in each step as "norms"."""
    model, trace, norms = MLP(weights), [], []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(grad_norm(model.parameters()))
        optimizer.step()
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace) | {"norms": norms}


# %% nbgrader={"grade": false, "grade_id": "watched", "locked": false, "schema_version": 3, "solution": true, "task": false}
def mended_watched(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):
    """Reports the norm of the true gradients in each step as "norms".

    This is what broken_watched should have been. It begins as a copy of it: change what is wrong.
    """
    model, trace, norms = MLP(weights), [], []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(grad_norm(model.parameters()))
        optimizer.step()
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace) | {"norms": norms}


def convict_watched():
    """The settings that convict broken_watched, as a dict: values for some of lr, init_scale and growth_interval."""
    ### BEGIN SOLUTION
    return {"init_scale": 2.0**20}


def mended_watched(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):  # noqa: F811
    model, trace, norms = MLP(weights), [], []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(grad_norm(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace) | {"norms": norms}
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "watched_trains", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng):
    check_trains(mended_watched, rng, **settings)

### BEGIN HIDDEN TESTS
for scale, interval in ((2.0**20, 2000), (2.0**18, 2)):
    check_trains(mended_watched, rng, 8, init_scale=scale, growth_interval=interval)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "watched_keeps", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng):
    check_norms(*check_keeps(mended_watched, rng, **settings))

### BEGIN HIDDEN TESTS
for scale, faint in ((2.0**20, False), (2.0**13, True), (8.0, False)):
    check_norms(
        *check_keeps(mended_watched, rng, 9, faint, right=reference(mended_watched), init_scale=scale)
    )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "watched_convicts", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check_convicts(broken_watched, convict_watched(), rng, PLAIN)

### BEGIN HIDDEN TESTS
check_convicts(broken_watched, convict_watched(), rng, PLAIN)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Accumulation
#
# > For lack of memory a batch is cut into parts, and their gradients are added up. With parts=1 all is well. With more, training is worse
# > than with a smaller batch, and without clipping it explodes. unscale_ once protested here, but we have solved that.


# %% nbgrader={"grade": false, "grade_id": "broken_accumulated", "locked": true, "schema_version": 3, "solution": false, "task": false}
def broken_accumulated(
    weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, parts=1, max_norm=1e4
):
    """Computes each batch in `parts` equal parts, adds up the gradients of the mean, and clips them."""
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        total = 0.0
        for i, (a, b) in enumerate(zip(np.split(x, parts), np.split(y, parts), strict=True)):
            loss = cross_entropy(model(a), b) / parts
            scaler.scale(loss).backward()
            if i == 0:
                scaler.unscale_(optimizer)
            total += loss.item()
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        trace.append((total, scaler.get_scale()))
    return report(model.weights(), trace)


# %% nbgrader={"grade": false, "grade_id": "accumulated", "locked": false, "schema_version": 3, "solution": true, "task": false}
def mended_accumulated(
    weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, parts=1, max_norm=1e4
):
    """Computes each batch in `parts` equal parts, adds up the gradients of the mean, and clips them.

    This is what broken_accumulated should have been. It begins as a copy of it: change what is wrong.
    """
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        total = 0.0
        for i, (a, b) in enumerate(zip(np.split(x, parts), np.split(y, parts), strict=True)):
            loss = cross_entropy(model(a), b) / parts
            scaler.scale(loss).backward()
            if i == 0:
                scaler.unscale_(optimizer)
            total += loss.item()
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        trace.append((total, scaler.get_scale()))
    return report(model.weights(), trace)


def convict_accumulated():
    """The settings that convict broken_accumulated, as a dict: values for some of lr, init_scale, growth_interval, parts and max_norm."""
    ### BEGIN SOLUTION
    return {"parts": 2}


def mended_accumulated(  # noqa: F811
    weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, parts=1, max_norm=1e4
):
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        total = 0.0
        for a, b in zip(np.split(x, parts), np.split(y, parts), strict=True):
            loss = cross_entropy(model(a), b) / parts
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        trace.append((total, scaler.get_scale()))
    return report(model.weights(), trace)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "accumulated_trains", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng, "parts", "max_norm"):
    check_trains(mended_accumulated, rng, **settings)

### BEGIN HIDDEN TESTS
for scale, parts, norm in ((2.0**14, 8, 0.3), (64.0, 16, 0.5), (2.0**20, 2, 1e4)):
    check_trains(mended_accumulated, rng, 8, init_scale=scale, parts=parts, max_norm=norm)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "accumulated_keeps", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng, "parts", "max_norm"):
    check_keeps(mended_accumulated, rng, **settings)

### BEGIN HIDDEN TESTS
for scale, parts, norm, faint in (
    (2.0**20, 2, 0.5, False), (2.0**13, 4, 0.3, True), (8.0, 8, 0.3, False),
):  # fmt: skip
    settings = dict(init_scale=scale, parts=parts, max_norm=norm)
    check_keeps(mended_accumulated, rng, 8, faint, right=reference(mended_accumulated), **settings)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "accumulated_convicts", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check_convicts(broken_accumulated, convict_accumulated(), rng, (*PLAIN, "parts", "max_norm"))

### BEGIN HIDDEN TESTS
check_convicts(broken_accumulated, convict_accumulated(), rng, (*PLAIN, "parts", "max_norm"))
### END HIDDEN TESTS

# %% [markdown]
# ## 5. Two optimizers
#
# > Body and head of the network have an optimizer each, and share a scaler. It trains. But two runs that differ in nothing but the growth
# > interval give different networks, and that can't be: the scale is taken out again before the step.


# %% nbgrader={"grade": false, "grade_id": "broken_shared", "locked": true, "schema_version": 3, "solution": false, "task": false}
def broken_shared(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):
    """Two optimizers, for the two layers, with one scaler. Each leaves out its own step if one of its own gradients is not finite."""
    model, trace = MLP(weights), []
    body, head = SGD(model.parameters()[:2], lr), SGD(model.parameters()[2:], lr)
    scaler = GradScaler(init_scale, growth_interval)
    for x, y in batches:
        body.zero_grad()
        head.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for optimizer in (body, head):
            scaler.step(optimizer)
            scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)


# %% nbgrader={"grade": false, "grade_id": "shared", "locked": false, "schema_version": 3, "solution": true, "task": false}
def mended_shared(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):
    """Two optimizers, for the two layers, with one scaler. Each leaves out its own step if one of its own gradients is not finite.

    This is what broken_shared should have been. It begins as a copy of it: change what is wrong.
    """
    model, trace = MLP(weights), []
    body, head = SGD(model.parameters()[:2], lr), SGD(model.parameters()[2:], lr)
    scaler = GradScaler(init_scale, growth_interval)
    for x, y in batches:
        body.zero_grad()
        head.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for optimizer in (body, head):
            scaler.step(optimizer)
            scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)


def convict_shared():
    """The settings that convict broken_shared, as a dict: values for some of lr, init_scale and growth_interval."""
    ### BEGIN SOLUTION
    return {"growth_interval": 1}


def mended_shared(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):  # noqa: F811
    model, trace = MLP(weights), []
    body, head = SGD(model.parameters()[:2], lr), SGD(model.parameters()[2:], lr)
    scaler = GradScaler(init_scale, growth_interval)
    for x, y in batches:
        body.zero_grad()
        head.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(body)
        scaler.step(head)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "shared_trains", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng):
    check_trains(mended_shared, rng, groups=TWO, **settings)

### BEGIN HIDDEN TESTS
for scale, interval in ((1024.0, 1), (2.0**19, 1), (2.0**20, 2000)):
    check_trains(mended_shared, rng, groups=TWO, init_scale=scale, growth_interval=interval)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "shared_keeps", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng):
    check_keeps(mended_shared, rng, groups=TWO, **settings)

### BEGIN HIDDEN TESTS
for scale, faint in ((2.0**20, False), (2.0**19, False), (2.0**13, True), (8.0, False)):
    check_keeps(mended_shared, rng, 9, faint, TWO, right=reference(mended_shared), init_scale=scale)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "shared_convicts", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check_convicts(broken_shared, convict_shared(), rng, PLAIN, TWO)

### BEGIN HIDDEN TESTS
check_convicts(broken_shared, convict_shared(), rng, PLAIN, TWO)
### END HIDDEN TESTS

# %% [markdown]
# ## 6. A temperature
#
# > The scores are divided by a temperature. At 1 and above all is well. At 0.05 the loss is inf in the first step already, and every step is
# > skipped. The scale is 1e-12 now; a smaller initial scale did not help.


# %% nbgrader={"grade": false, "grade_id": "broken_tempered", "locked": true, "schema_version": 3, "solution": false, "task": false}
def softmax(x):
    """In the format of x."""
    e = np.exp(x.data - x.data.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    return Tensor(p, ((x, lambda g: p * (g - (g * p).sum(1, keepdims=True))),))


def log(x):
    """In the format of x."""
    return Tensor(np.log(x.data), ((x, lambda g: g / x.data),))


def nll_loss(log_p, labels):
    """Minus the mean of log_p at the labels, in float32."""
    pick = (np.arange(len(labels)), labels)
    share = np.zeros(log_p.data.shape, np.float32)
    share[pick] = -1 / len(labels)
    value = np.float32(-np.float32(log_p.data[pick]).mean())
    return Tensor(value, ((log_p, lambda g: (g * share).astype(log_p.data.dtype)),))


def broken_tempered(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, temperature=1.0):
    """Divides the scores by a temperature."""
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        scores = model(x) / temperature
        loss = nll_loss(log(softmax(scores)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)


# %% nbgrader={"grade": false, "grade_id": "tempered", "locked": false, "schema_version": 3, "solution": true, "task": false}
def mended_tempered(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, temperature=1.0):
    """Divides the scores by a temperature.

    This is what broken_tempered should have been. It begins as a copy of it: change what is wrong.
    """
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        scores = model(x) / temperature
        loss = nll_loss(log(softmax(scores)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)


def convict_tempered():
    """The settings that convict broken_tempered, as a dict: values for some of lr, init_scale, growth_interval and temperature."""
    ### BEGIN SOLUTION
    return {"temperature": 1 / 32}


def mended_tempered(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, temperature=1.0):  # noqa: F811
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        optimizer.zero_grad()
        scores = model(x) / temperature
        loss = cross_entropy(scores, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    return report(model.weights(), trace)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "tempered_trains", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng, "temperature"):
    check_trains(mended_tempered, rng, **settings)

### BEGIN HIDDEN TESTS
for t, scale in ((1 / 32, 2.0**16), (1 / 64, 32.0)):
    check_trains(mended_tempered, rng, 8, temperature=t, init_scale=scale, lr=0.1 * t**2)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "tempered_keeps", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng, "temperature"):
    check_keeps(mended_tempered, rng, **settings)

### BEGIN HIDDEN TESTS
for t, scale, faint in ((1 / 64, 128.0, False), (1 / 16, 2.0**16, False), (1.0, 2.0**13, True)):
    settings = dict(temperature=t, init_scale=scale, lr=0.1 * t**2)
    check_keeps(mended_tempered, rng, 9, faint, right=reference(mended_tempered), **settings)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "tempered_convicts", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check_convicts(broken_tempered, convict_tempered(), rng, (*PLAIN, "temperature"))

### BEGIN HIDDEN TESTS
check_convicts(broken_tempered, convict_tempered(), rng, (*PLAIN, "temperature"))
### END HIDDEN TESTS

# %% [markdown]
# ## 7. A checkpoint
#
# > The job is stopped every night and goes on in the morning. What comes out is not what an uninterrupted run gives. The weights are saved,
# > the momenta are saved, the batches are the right ones. On the first day the two runs agree to the last digit.


# %% nbgrader={"grade": false, "grade_id": "broken_resumed", "locked": true, "schema_version": 3, "solution": false, "task": false}
def interrupted(loop, stop=3):
    """A loop with a checkpoint as one run, which is stopped after `stop` batches and goes on."""

    def both(weights, batches, *, stop=stop, **settings):
        first = loop(weights, batches[:stop], **settings)
        second = loop(weights, batches[stop:], checkpoint=first["checkpoint"], **settings)
        return second | {name: list(first[name]) + list(second[name]) for name in ("losses", "scales")}

    return both


def broken_resumed(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, checkpoint=None):
    """Goes on from a checkpoint, if there is one, and reports a new one as "checkpoint": plain data (dicts, lists, numbers, arrays)."""
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    if checkpoint:
        model = MLP(checkpoint["model"])
        optimizer = SGD(model.parameters(), lr)
        optimizer.momenta = list(checkpoint["momenta"])
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    checkpoint = {"model": model.weights(), "momenta": optimizer.momenta}
    return report(model.weights(), trace) | {"checkpoint": checkpoint}


# %% nbgrader={"grade": false, "grade_id": "resumed", "locked": false, "schema_version": 3, "solution": true, "task": false}
def mended_resumed(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, checkpoint=None):
    """Goes on from a checkpoint, if there is one, and reports a new one as "checkpoint": plain data (dicts, lists, numbers, arrays).

    This is what broken_resumed should have been. It begins as a copy of it: change what is wrong.
    """
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    if checkpoint:
        model = MLP(checkpoint["model"])
        optimizer = SGD(model.parameters(), lr)
        optimizer.momenta = list(checkpoint["momenta"])
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    checkpoint = {"model": model.weights(), "momenta": optimizer.momenta}
    return report(model.weights(), trace) | {"checkpoint": checkpoint}


def convict_resumed():
    """The settings that convict broken_resumed, as a dict: values for some of lr, init_scale, growth_interval and stop."""
    ### BEGIN SOLUTION
    return {"init_scale": 2.0**20, "stop": 3}


def mended_resumed(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000, checkpoint=None):  # noqa: F811
    model, trace = MLP(weights), []
    optimizer, scaler = SGD(model.parameters(), lr), GradScaler(init_scale, growth_interval)
    if checkpoint:
        model = MLP(checkpoint["model"])
        optimizer = SGD(model.parameters(), lr)
        optimizer.momenta = list(checkpoint["momenta"])
        scaler.load_state_dict(checkpoint["scaler"])
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((loss.item(), scaler.get_scale()))
    checkpoint = {"model": model.weights(), "momenta": optimizer.momenta, "scaler": scaler.state_dict()}
    return report(model.weights(), trace) | {"checkpoint": checkpoint}
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "resumed_trains", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng):
    loop = interrupted(mended_resumed, int(rng.integers(1, 6)))
    check_trains(loop, rng, **settings | {"growth_interval": 2000})

### BEGIN HIDDEN TESTS
for scale, stop, interval in ((2.0**19, 4, 2000), (2.0**20, 5, 2000), (2.0**19, 1, 1), (2.0**19, 5, 1)):
    check_trains(interrupted(mended_resumed, stop), rng, init_scale=scale, growth_interval=interval)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "resumed_keeps", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng):
    check_keeps(interrupted(mended_resumed, int(rng.integers(1, 6))), rng, **settings)

### BEGIN HIDDEN TESTS
for stop, scale, faint in ((int(rng.integers(10)), 2.0**19, False), (int(rng.integers(10)), 2.0**13, True)):
    right = interrupted(reference(mended_resumed), stop)
    check_keeps(interrupted(mended_resumed, stop), rng, 9, faint, right=right, init_scale=scale)
for stop in (4, 5):
    right = interrupted(reference(mended_resumed), stop)
    check_keeps(interrupted(mended_resumed, stop), rng, right=right, init_scale=8.0, growth_interval=3)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "resumed_convicts", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check_convicts(interrupted(broken_resumed), convict_resumed(), rng, (*PLAIN, "stop"))

### BEGIN HIDDEN TESTS
check_convicts(interrupted(broken_resumed), convict_resumed(), rng, (*PLAIN, "stop"))
### END HIDDEN TESTS

# %% [markdown]
# ## 8. Half weights
#
# > The model is float16 and saves half the memory. The optimizer works on float32 masters, so small updates can't get lost. Now, for
# > fine-tuning, we have lowered the learning rate, and the network does not move at all. In float32 it does.


# %% nbgrader={"grade": false, "grade_id": "broken_stored", "locked": true, "schema_version": 3, "solution": false, "task": false}
def broken_stored(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):
    """The model's weights are float16; the optimizer has float32 masters of them, which are reported as weights."""
    model, trace = MLP([half(w) for w in weights]), []
    masters = [Tensor(np.float32(w)) for w in weights]
    optimizer, scaler = SGD(masters, lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        for p in model.parameters():
            p.grad = None
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.data, master.grad = np.float32(p.data), np.float32(p.grad)
        scaler.step(optimizer)
        scaler.update()
        for master, p in zip(masters, model.parameters(), strict=True):
            p.data = half(master.data)
        trace.append((loss.item(), scaler.get_scale()))
    return report([master.data for master in masters], trace)


# %% nbgrader={"grade": false, "grade_id": "stored", "locked": false, "schema_version": 3, "solution": true, "task": false}
def mended_stored(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):
    """The model's weights are float16; the optimizer has float32 masters of them, which are reported as weights.

    This is what broken_stored should have been. It begins as a copy of it: change what is wrong.
    """
    model, trace = MLP([half(w) for w in weights]), []
    masters = [Tensor(np.float32(w)) for w in weights]
    optimizer, scaler = SGD(masters, lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        for p in model.parameters():
            p.grad = None
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.data, master.grad = np.float32(p.data), np.float32(p.grad)
        scaler.step(optimizer)
        scaler.update()
        for master, p in zip(masters, model.parameters(), strict=True):
            p.data = half(master.data)
        trace.append((loss.item(), scaler.get_scale()))
    return report([master.data for master in masters], trace)


def convict_stored():
    """The settings that convict broken_stored, as a dict: values for some of lr, init_scale and growth_interval."""
    ### BEGIN SOLUTION
    return {"lr": 1e-4}


def mended_stored(weights, batches, *, lr=0.1, init_scale=1024.0, growth_interval=2000):  # noqa: F811
    model, trace = MLP([half(w) for w in weights]), []
    masters = [Tensor(np.float32(w)) for w in weights]
    optimizer, scaler = SGD(masters, lr), GradScaler(init_scale, growth_interval)
    for x, y in batches:
        for p in model.parameters():
            p.grad = None
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = np.float32(p.grad)
        scaler.step(optimizer)
        scaler.update()
        for master, p in zip(masters, model.parameters(), strict=True):
            p.data = half(master.data)
        trace.append((loss.item(), scaler.get_scale()))
    return report([master.data for master in masters], trace)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "stored_trains", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng):
    check_trains(mended_stored, rng, **settings)

### BEGIN HIDDEN TESTS
for lr, scale in ((1e-4, 1024.0), (1e-3, 2.0**20), (0.1, 2.0**12)):
    check_trains(mended_stored, rng, 8, lr=lr, init_scale=scale)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "stored_keeps", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
for settings in drawn(rng):
    check_keeps(mended_stored, rng, **settings)

### BEGIN HIDDEN TESTS
for lr, scale, faint in ((2e-4, 2.0**20, False), (1e-3, 2.0**13, True), (0.1, 8.0, False)):
    check_keeps(mended_stored, rng, 9, faint, right=reference(mended_stored), lr=lr, init_scale=scale)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "stored_convicts", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check_convicts(broken_stored, convict_stored(), rng, PLAIN)

### BEGIN HIDDEN TESTS
check_convicts(broken_stored, convict_stored(), rng, PLAIN)
### END HIDDEN TESTS

# %% [markdown]
# ## Looking back
#
# 1. Some of these faults leave the loss finite and falling, and only make the training worse than it should be. Choose two of them, and
#    for each name a number that you would log in every training, because it shows the fault at once. The loss does not count.
# 2. The loop without `zero_grad` trained for three days. Why did the leftover gradients do so little harm until the first overflow, and
#    what would they have done without a scaler?
# 3. Setting `init_scale=1` and never letting it grow makes some of these loops look healthy. For two of them say whether the fault is
#    mended by that or only hidden, and what it costs.

# %% [markdown] nbgrader={"grade": true, "grade_id": "looking_back", "locked": false, "points": 12, "schema_version": 3, "solution": true, "task": false}
# ### BEGIN MARK SCHEME
# 4 points for each part. 1: two faults (1 each) with a number that shows it (1 each). 2: unscale_ divides the leftovers by the scale
# once more (2), inf stays inf (1), without a scaler all gradients would add up (1). 3: two loops (1 each), hidden with a true
# circumstance under which it returns, or the cost in flushed gradients (1 each).
# ### END MARK SCHEME
#
# 1. Clipping before unscaling: the norm of the update, which is then far below lr times max_norm. Two optimizers: the norm of each optimizer's
#    update against lr times the norm of its gradient, or the scale, which moves twice in a step. Half weights: the share of weights that did
#    not change. Accumulation: the norm of the gradient before clipping, against that of a single part.
# 2. `unscale_` divides all that lies in `.grad` by the scale, the leftovers of earlier steps too, so of the gradient of the step before only
#    1/1024 remains, and nothing of older ones. An inf divided by the scale is inf, so after the first overflow every check fails. Without a
#    scaler the gradients of all steps add up: momentum 1, and the training explodes.
# 3. Clipping: hidden as long as the scale is 1, where scaled and true gradients are the same; a growing scale brings it back. Accumulation:
#    likewise. In both, gradients below $2^{-25}$ are flushed again, for which the scaler was there.
