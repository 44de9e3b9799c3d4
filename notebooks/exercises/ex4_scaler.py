# %% [markdown]
# # Exercise 4. A loss scaler
#
# A loss scaler is thirty lines of code between `backward()` and the optimizer, and many mixed-precision bugs live
# in these lines or around them. A NaN slips through, a count is never reset, a resumed run begins to climb again;
# a loop clips before it unscales, or forgets the update after a skipped step. Hardly any of them raises an error:
# the run just learns less, or stops learning. You write the scaler from its parts, and then the loop around it.
#
# After this exercise you will be able to
#
# - unscale gradients without losing them, and find every infinity and NaN in them;
# - write the rule by which the scale moves, and say after which step it moves;
# - write a scaler that knows where each optimizer stands, skips as it should, and survives a restart;
# - put clipping, accumulation and several optimizers around it in the right order.
#
# Loss scaling is from Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018,
# section 3.2; the rule that finds the scale, and the names, are those of PyTorch's `GradScaler`.
#
# It needs about two hours, and [notebook 3](../03_underflow.ipynb) and [notebook 7](../07_scale_dynamics.ipynb).
# Your answers may use NumPy and what is given here, nothing else. Each group of tests earns its points as a
# whole. Some of its checks are here to help you; others are not shown, and ask for what the text and the
# docstrings promise.

# %% nbgrader={"grade": false, "grade_id": "setup", "locked": true, "schema_version": 3, "solution": false, "task": false}
import numpy as np

rng = np.random.default_rng(0)


def same(a, b):
    """Whether both are float32 arrays of one shape with the same values; a NaN is the same as a NaN."""
    arrays = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype == np.float32
    return arrays and a.shape == b.shape and np.array_equal(a, b, equal_nan=True)


# %% [markdown]
# ## Task 1. Unscale and look
#
# Backward began with the loss times $S$, so every gradient is $S$ times too large. The scaler divides by $S$ and
# looks whether anything in the gradients is infinite or NaN. Two things are easily done wrong. Gradients may
# still be float16 arrays, and dividing *there* brings back the underflow that scaling was for: the quotient
# belongs in float32. And a value can be finite before the division and infinite after it, if $S$ has sunk far
# below 1.


# %% nbgrader={"grade": false, "grade_id": "unscale", "locked": false, "schema_version": 3, "solution": true, "task": false}
def unscale(grads, scale):
    """The gradients divided by the scale, in float32, and whether any of their values is not finite.

    grads: a list of float32 and float16 arrays, and None for a parameter without a gradient. None of them is changed.
    scale: a float, a power of two from 2**-126 to 2**127.
    Returns (unscaled, found_inf). unscaled: a list of new float32 arrays with the shapes of grads, None where grads has
    None; what is infinite or NaN stays so. found_inf: one bool, True if any value of any gradient is inf, -inf or NaN,
    before the division or after it.
    """
    ### BEGIN SOLUTION
    inverse, unscaled, found_inf = np.float32(1.0 / scale), [], False
    for g in grads:
        if g is not None:
            g = g.astype(np.float32) * inverse
            # What was not finite before the product is not finite after it, so one look is enough.
            found_inf = found_inf or not np.isfinite(g).all()
        unscaled.append(g)
    return unscaled, bool(found_inf)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "unscale_values", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
g = np.array([[1024.0, -512.0], [0.0, 3.0]], np.float32)
unscaled, found_inf = unscale([g, None], 1024.0)
assert len(unscaled) == 2, "The list that came back has another length."
assert same(unscaled[0], np.array([[1, -0.5], [0, 3 / 1024]], np.float32)), "A gradient is not divided right."
assert unscaled[1] is None, "A parameter without a gradient must stay without one."
assert g[0, 0] == 1024, "The gradients that came in were changed."
### BEGIN HIDDEN TESTS
for k in [*range(-6, 32, 2), 100, 126]:
    grads = []
    for _ in range(rng.integers(1, 5)):
        shape = tuple(rng.integers(0, 4, rng.integers(1, 4)))
        g = (rng.standard_normal(shape) * 2.0 ** rng.integers(-10, 10)).astype(np.float32)
        grads.append(g if rng.random() < 0.8 else None)
    before = [None if g is None else g.copy() for g in grads]
    unscaled, found_inf = unscale(grads, 2.0**k)
    assert len(unscaled) == len(grads), "The list that came back has another length."
    for g, old, new in zip(grads, before, unscaled, strict=True):
        assert (new is None) == (old is None), "None must stay None, and an array must stay an array."
        if old is not None:
            assert getattr(new, "dtype", None) == np.float32, "An unscaled gradient is no float32 array."
            assert new.shape == old.shape, "An unscaled gradient has another shape."
            # By a power of two: exact, or rounded once where it is subnormal, so every way gives the same bits.
            right = (old.astype(np.float64) / 2.0**k).astype(np.float32)
            assert same(new, right), "A gradient is not divided right."
            assert same(g, old), "The gradients that came in were changed."
    assert not found_inf, "Finite gradients were found to be infinite or NaN."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "unscale_half", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
g = np.array([2.0**-14, 100.0], np.float16)
(divided,), found_inf = unscale([g], 2.0**16)
right = np.array([2.0**-30, 100 / 65536], np.float32)
assert same(divided, right), "A float16 gradient is not divided in float32."
assert not found_inf, "Finite float16 gradients were found to be infinite or NaN."
### BEGIN HIDDEN TESTS
for k in range(-15, 41, 5):
    shape = tuple(rng.integers(1, 6, rng.integers(1, 3)))
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-24, 13, shape)
    wide = values.astype(np.float32)
    wide.flat[0] = 2.0**17  # a float32 number that float16 does not have
    grads = [values.astype(np.float16), wide][:: rng.choice([-1, 1])]
    before = [g.copy() for g in grads]
    unscaled, found_inf = unscale(grads, 2.0**k)
    for g, old, new in zip(grads, before, unscaled, strict=True):
        assert getattr(new, "dtype", None) == np.float32, "An unscaled gradient is no float32 array."
        assert new.shape == old.shape, "An unscaled gradient has another shape."
        wrong = np.count_nonzero(new != old.astype(np.float64) / 2.0**k)
        assert wrong == 0, (
            f"{wrong} of {new.size} values of a {old.dtype} gradient are not divided in float32."
        )
        assert np.array_equal(g, old), "The gradients that came in were changed."
    assert not found_inf, "Finite gradients were found to be infinite or NaN."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "unscale_found", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
good, bad = np.ones(3, np.float32), np.array([1, np.inf, 1], np.float32)
assert not unscale([good, good], 4.0)[1], "Finite gradients were found to be infinite or NaN."
assert unscale([bad, good], 4.0)[1], "An infinity was not found."
assert unscale([good, None, np.array([np.nan], np.float16)], 4.0)[1], "A NaN was not found."
### BEGIN HIDDEN TESTS
for value, name in ((np.inf, "An infinity"), (-np.inf, "A negative infinity"), (np.nan, "A NaN")):
    for dtype in ("float32", "float16"):
        for j in (0, 1, 3, 0, 1, 3):
            grads = [rng.standard_normal(tuple(rng.integers(1, 5, 2))).astype(np.float32) for _ in range(4)]
            grads[2], grads[j] = None, grads[j].astype(dtype)
            grads[j].flat[rng.integers(grads[j].size)] = value
            unscaled, found_inf = unscale(grads, float(2.0 ** rng.integers(-4, 20)))
            assert np.ndim(found_inf) == 0, "found_inf is not one bool for all gradients."
            assert found_inf, f"{name} in a {dtype} gradient, one of several, was not found."
            assert len(unscaled) == 4 and unscaled[j] is not None, (
                "A gradient that is not finite was dropped."
            )
            stays = same(np.isfinite(unscaled[j]) * np.float32(1), np.isfinite(grads[j]) * np.float32(1))
            assert stays, f"{name} in a {dtype} gradient did not stay there, or others appeared."
large = np.full((40, 40), 3e38, np.float32)
large[rng.random(large.shape) < 0.5] *= -1
text = "Large but finite gradients, or none at all, were found to be infinite."
for grads in ([large], [np.abs(large)], [np.full(100, 60000, np.float16)], [good * 1e6], [], [None]):
    assert not unscale(grads, 2.0)[1], text
for k in (-126, -120):
    with np.errstate(over="ignore"):
        found_inf = unscale([good, np.array([3.0, 2.0**7], np.float32)], 2.0**k)[1]
    assert bool(found_inf) == (k == -126), "What the division makes infinite, and only that, must be found."
### END HIDDEN TESTS

# %% [markdown]
# ## Task 2. The rule
#
# A gradient that is not finite: the scale is too large, make it smaller. A long run of good steps: try a larger
# one. With the growth factor $g$, the backoff factor $b$ and the growth interval $N$,
#
# $$ S \leftarrow b\,S \text{ after a bad iteration}, \qquad
#    S \leftarrow g\,S \text{ after } N \text{ good ones in a row}. $$
#
# The state of a scaler is a dict with the keys that PyTorch uses, so it can be saved with a model.


# %% nbgrader={"grade": false, "grade_id": "state", "locked": true, "schema_version": 3, "solution": false, "task": false}
def state_of(scale, interval, tracker=0, growth=2.0, backoff=0.5):
    """The state of a scaler."""
    factors = {"growth_factor": float(growth), "backoff_factor": float(backoff)}
    return {
        "scale": float(scale),
        **factors,
        "growth_interval": int(interval),
        "_growth_tracker": int(tracker),
    }


# %% nbgrader={"grade": false, "grade_id": "update_scale", "locked": false, "schema_version": 3, "solution": true, "task": false}
def update_scale(state, found_inf):
    """The state of a scaler after one more iteration.

    state: a dict with the floats "scale", "growth_factor" and "backoff_factor", all powers of two, and the ints
    "growth_interval" and "_growth_tracker": the good iterations in a row since the scale last grew or shrank. It is not
    changed. found_inf: whether any gradient of this iteration was not finite.
    Returns a new dict with the same keys. After a bad iteration: the scale times backoff_factor, the tracker 0. After a
    good one the tracker is one more, and with the growth_interval-th in a row the scale grows by growth_factor and the
    tracker is 0 again. The scale is a float32 number: where it would grow to infinity in float32, it stays, and the
    tracker is 0 all the same.
    """
    ### BEGIN SOLUTION
    scale, tracker = state["scale"], state["_growth_tracker"]
    if found_inf:
        scale, tracker = scale * state["backoff_factor"], 0
    else:
        tracker += 1
        if tracker == state["growth_interval"]:
            larger, tracker = scale * state["growth_factor"], 0
            if larger <= float(np.finfo(np.float32).max):
                scale = larger
    return {**state, "scale": scale, "_growth_tracker": tracker}
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "update_scale_backoff", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
after = update_scale(state_of(64, interval=10, tracker=7), True)
assert after["scale"] == 32, "After a bad iteration the scale is not right."
assert after["_growth_tracker"] == 0, "After a bad iteration the good ones are not counted anew."
### BEGIN HIDDEN TESTS
for _ in range(20):
    interval, backoff = rng.integers(1, 2000), 2.0 ** -rng.integers(1, 5)
    state = state_of(2.0 ** rng.integers(-20, 100), interval, rng.integers(interval), backoff=backoff)
    after = update_scale(dict(state), True)
    assert set(after) == set(state), "The keys of the new state are others than those of the old one."
    assert after["scale"] == state["scale"] * backoff, "After a bad iteration the scale is not right."
    assert after["_growth_tracker"] == 0, "After a bad iteration the good ones are not counted anew."
    for key in ("growth_factor", "backoff_factor", "growth_interval"):
        assert after[key] == state[key], f"{key} was changed."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "update_scale_growth", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
state, scales = state_of(64, interval=3), []
for _ in range(7):
    state = update_scale(dict(state), False)
    scales.append(state["scale"])
assert scales == [64, 64, 128, 128, 128, 256, 256], "With an interval of 3 the scale grows at the wrong time."
### BEGIN HIDDEN TESTS
for _ in range(30):
    interval, growth = int(rng.choice([1, 2, 5, 10, 2000])), 2.0 ** rng.integers(1, 4)
    tracker = int(rng.integers(max(0, interval - 3), interval))
    state = state_of(2.0 ** rng.integers(-5, 40), interval, tracker, growth, backoff=0.25)
    after = update_scale(dict(state), False)
    assert set(after) == set(state), "The keys of the new state are others than those of the old one."
    full = tracker + 1 == interval
    text = f"After a good iteration {'that completes' if full else 'before the end of'} the interval, "
    assert after["scale"] == state["scale"] * (growth if full else 1), text + "the scale is not right."
    assert after["_growth_tracker"] == (0 if full else tracker + 1), text + "the tracker is not right."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "update_scale_row", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
state, scales = state_of(64, interval=2), []
for found_inf in (False, True, False, False):
    state = update_scale(dict(state), found_inf)
    scales.append(state["scale"])
assert scales == [64, 32, 32, 64], "Good, bad, good, good: the scale does not move as it should."
### BEGIN HIDDEN TESTS
text = "In a run of good and bad iterations the scale does not move as it should."
for interval in rng.permutation([2, 3, 4, 5]).tolist():
    state, power, row = state_of(2.0**16, interval), 16, 0
    bads = (rng.random(20) < rng.uniform(0.1, 0.4)).tolist()
    bads[:7] = [False, False, False, True, False, False, False]
    for bad in bads:
        state = update_scale(dict(state), bad)
        row = 0 if bad else row + 1
        power += -1 if bad else row % interval == 0
        assert state["scale"] == 2.0**power, text
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "update_scale_limit", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
after = update_scale(state_of(2.0**127, interval=1), False)
assert after["scale"] == 2.0**127, "The scale must not grow to infinity in float32."
### BEGIN HIDDEN TESTS
for power, growth, right in ((126, 2, 127), (126, 4, 126), (125, 8, 125), (124, 8, 127), (100, 16, 104)):
    interval = int(rng.integers(1, 10))
    after = update_scale(state_of(2.0**power, interval, interval - 1, growth), False)
    assert after["scale"] == 2.0**right, (
        "Near the largest float32 number the scale does not grow as it should."
    )
    assert after["_growth_tracker"] == 0, (
        "Where the scale cannot grow, the tracker must be 0 again all the same."
    )
### END HIDDEN TESTS

# %% [markdown]
# ## Task 3. The scaler
#
# Now the object around these two functions. Between two calls of `update` it has to know where *each* optimizer
# stands: its gradients are still scaled, or are unscaled, or its step was made or skipped. So it unscales them
# once, whether the user calls `unscale_` (to clip) or leaves that to `step`, and it can refuse a call that comes
# at the wrong time. If one value of one gradient is not finite, the *whole* step of that optimizer is skipped:
# weights, momentum and step count stay as they are. Other optimizers make theirs.


# %% nbgrader={"grade": false, "grade_id": "optimizer", "locked": true, "schema_version": 3, "solution": false, "task": false}
class Parameter:
    """A weight. data: a float32 array. grad: an array of its shape, float32 or float16, or None."""

    def __init__(self, data):
        self.data, self.grad = np.array(data, np.float32), None


class SGD:
    """Gradient descent with momentum, for a list `params`. It counts its steps, and knows nothing of scales."""

    def __init__(self, params, lr=0.5, momentum=0.5):
        self.params, self.lr, self.momentum, self.steps = list(params), lr, momentum, 0
        self.velocities = [np.zeros_like(p.data) for p in self.params]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        self.steps += 1
        for p, v in zip(self.params, self.velocities, strict=True):
            if p.grad is not None:
                v[...] = self.momentum * v + p.grad
                p.data[...] = p.data - self.lr * v
        return True


# %% nbgrader={"grade": false, "grade_id": "GradScaler", "locked": false, "schema_version": 3, "solution": true, "task": false}
class GradScaler:
    """Loss scaling for any number of optimizers, each with a list `params` and a method step().

    An iteration is scale(loss), backward, then unscale_ (or not) and step for each optimizer, then update, once. Use your
    functions `unscale` and `update_scale`.
    """

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        ### BEGIN SOLUTION
        self.state = {
            "scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "_growth_tracker": 0,
        }
        self.found = {}  # optimizer: whether its gradients, unscaled since the last update(), were not finite
        self.stepped = set()  # the optimizers whose step was made or skipped since then
        ### END SOLUTION

    def get_scale(self):
        """The scale, a float."""
        ### BEGIN SOLUTION
        return self.state["scale"]
        ### END SOLUTION

    def scale(self, loss):
        """loss * scale, for whatever can be multiplied by a float. What is float32 stays float32."""
        ### BEGIN SOLUTION
        return loss * self.state["scale"]
        ### END SOLUTION

    def unscale_(self, optimizer):
        """Unscale the gradients of the optimizer's params: each p.grad becomes a new array, None stays None.

        Whether any of them was not finite is remembered for step and update: what happens to the gradients afterwards, by
        clipping for instance, does not count. RuntimeError, and nothing is changed, if since the last update() this
        optimizer was unscaled already, or step was called for it.
        """
        ### BEGIN SOLUTION
        if optimizer in self.found:
            raise RuntimeError("unscale_: call it once between two updates, and before step")
        grads, self.found[optimizer] = unscale([p.grad for p in optimizer.params], self.state["scale"])
        for p, g in zip(optimizer.params, grads, strict=True):
            p.grad = g
        ### END SOLUTION

    def step(self, optimizer):
        """Unscale, if that was not done since the last update(); then optimizer.step(), if all gradients were finite.

        Returns what optimizer.step() returns; None if the step is skipped. RuntimeError, and nothing is changed, if since
        the last update() step was called for this optimizer already, whether its step was made or skipped.
        """
        ### BEGIN SOLUTION
        if optimizer in self.stepped:
            raise RuntimeError("step: call it once between two updates")
        if optimizer not in self.found:
            self.unscale_(optimizer)
        self.stepped.add(optimizer)
        if self.found[optimizer]:
            return None
        return optimizer.step()
        ### END SOLUTION

    def update(self):
        """The scale and the count for the next iteration, in which all optimizers start anew.

        The iteration was bad if the gradients of any optimizer that was unscaled since the last update() were not finite.
        It counts as one iteration, however many optimizers there are.
        """
        ### BEGIN SOLUTION
        found_inf = any(self.found.values())
        self.state = update_scale(self.state, found_inf)
        self.found, self.stepped = {}, set()
        ### END SOLUTION

    def state_dict(self):
        """The state, as a dict with the keys of task 2. It is a copy: later updates do not change it."""
        ### BEGIN SOLUTION
        return dict(self.state)
        ### END SOLUTION

    def load_state_dict(self, state):
        """Go on from what state_dict() of another scaler gave: scale, factors, interval and tracker. The dict is not kept."""
        ### BEGIN SOLUTION
        self.state = dict(state)
        ### END SOLUTION


# %% [markdown]
# The program that drives your scaler. There is no network here: true gradients are given, and multiplied as
# backward would do it, by what `scale` makes of a loss of 1.


# %% tags=["driver"] nbgrader={"grade": false, "grade_id": "scaler_driver", "locked": true, "schema_version": 3, "solution": false, "task": false}
def drive(weights, program, **settings):
    """Drive a GradScaler(**settings) through a program.

    weights: for each optimizer (an SGD) a list of arrays, its parameters. program: a list of steps, each one of
        ["backward", k, grads]   the parameters of optimizer k get these gradients, times the scale; None stays None
        ["put", k, grads]        their gradients become these arrays, as they are
        ["unscale_", k]          gives None, or "RuntimeError" if that is raised
        ["step", k]              gives what it returns, or "RuntimeError" if that is raised
        ["update"]
        ["look"]                 gives the scale and, optimizer by optimizer, weights, gradients and the number of steps
        ["scale", loss]          gives what it returns
        ["state_dict"]           gives what it returns
        ["save"], ["load"]       keep what state_dict returns; load that into a new GradScaler() and go on with it
    Returns a list of what the steps gave.
    """
    scaler, saved, notes = GradScaler(**settings), None, []
    optimizers = [SGD([Parameter(w) for w in group]) for group in weights]
    for name, *args in program:
        if name in ("backward", "put"):
            seed = scaler.scale(np.float32(1)) if name == "backward" else np.float32(1)
            for p, g in zip(optimizers[args[0]].params, args[1], strict=True):
                p.grad = None if g is None else (g * seed).astype(g.dtype)
        elif name in ("unscale_", "step"):
            try:
                notes.append(getattr(scaler, name)(optimizers[args[0]]))
            except NotImplementedError:
                raise
            except RuntimeError:
                notes.append("RuntimeError")
        elif name == "look":
            note = {"scale": scaler.get_scale(), "steps": [optimizer.steps for optimizer in optimizers]}
            note["weights"] = [[p.data.copy() for p in optimizer.params] for optimizer in optimizers]
            note["grads"] = [[p.grad for p in optimizer.params] for optimizer in optimizers]
            notes.append(note)
        elif name == "save":
            saved = scaler.state_dict()
        elif name == "load":
            scaler = GradScaler()
            scaler.load_state_dict(saved)
        elif name == "update":
            scaler.update()
        else:
            notes.append(scaler.scale(*args) if name == "scale" else dict(scaler.state_dict()))
    return notes


# %% nbgrader={"grade": true, "grade_id": "GradScaler_step", "locked": true, "points": 9, "schema_version": 3, "solution": false, "task": false}
one, g, bad = np.ones(2, np.float32), np.array([0.5, -1], np.float32), np.array([np.inf, 1], np.float32)
gave, look = drive([[one]], [["backward", 0, [g]], ["step", 0], ["update"], ["look"]])
assert gave is True, "A step with finite gradients must be made, and give what optimizer.step() gives."
assert same(look["weights"][0][0], np.array([0.75, 1.5], np.float32)), (
    "After a good step the weights are wrong."
)
gave, look = drive([[one]], [["backward", 0, [bad]], ["step", 0], ["update"], ["look"]])
assert gave is None and look["steps"] == [0], (
    "With an infinite gradient the step must be skipped, and give None."
)
assert same(look["weights"][0][0], one), "A step that is skipped has changed the weights."
(scaled,) = drive([], [["scale", np.float32(0.5)]])
assert scaled == 2.0**15 and np.asarray(scaled).dtype == np.float32, "scale(0.5) is wrong, or not float32."
### BEGIN HIDDEN TESTS
for _ in range(8):
    shapes = [tuple(rng.integers(1, 4, rng.integers(1, 3))) for _ in range(3)]
    weights = [rng.integers(-8, 9, shape).astype(np.float32) for shape in shapes]
    w, v, steps = [x.astype(np.float64) for x in weights], [np.zeros(shape) for shape in shapes], 0
    program, right = [], []
    for k in range(8):
        grads = [(rng.integers(-8, 9, shape) / 4).astype(np.float32) for shape in shapes]
        bad, (none, j) = k > 0 and rng.random() < 0.4, rng.permutation(3)[:2]
        if bad:
            grads[j].flat[rng.integers(grads[j].size)] = np.inf
        if rng.random() < 0.3:
            grads[none] = None
        if not bad:
            steps += 1
            for x, m, g in zip(w, v, grads, strict=True):
                if g is not None:  # quarters, halved at most 9 times: exact in float32
                    m[...] = 0.5 * m + g
                    x -= 0.5 * m
        program += [["backward", 0, grads], ["step", 0], ["update"], ["look"]]
        right.append((None if bad else True, steps, [x.astype(np.float32) for x in w]))
    notes = drive([weights], program, init_scale=float(2 ** rng.integers(0, 40)), growth_interval=1000)
    for k, (gives, steps, after) in enumerate(right):
        gave, look = notes[2 * k : 2 * k + 2]
        kind = f"After {'good' if gives else 'bad'} gradients, "
        assert gave is gives, kind + "what step gives is wrong."
        assert look["steps"] == [steps], kind + "optimizer.step() was called too often, or not at all."
        for x, y in zip(after, look["weights"][0], strict=True):
            assert same(x, y), kind + "the weights of one of several parameters are wrong."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "GradScaler_once", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
one, g = np.ones(2, np.float32), np.array([0.5, -1.0], np.float32)
program = [["backward", 0, [g]], ["unscale_", 0], ["look"], ["unscale_", 0], ["look"], ["step", 0]]
_, look, second, again, gave = drive([[one]], program)
assert same(look["grads"][0][0], g), "After unscale_ the gradients are not the true ones."
assert second == "RuntimeError", "A second unscale_ before update() must raise RuntimeError."
assert same(again["grads"][0][0], g), "A second unscale_ must leave the gradients alone."
assert gave is True, "After unscale_ the step must be made."
notes = drive([[one]], [["backward", 0, [g]], ["step", 0], ["step", 0], ["unscale_", 0]])
assert notes[1:] == ["RuntimeError"] * 2, "After step, another step or unscale_ must raise RuntimeError."
### BEGIN HIDDEN TESTS
for _ in range(6):
    g = (rng.integers(1, 9, (2, 3)) / 4).astype(np.float32)
    bad = np.where(rng.permutation(6).reshape(2, 3) == 0, np.float32(np.inf), g)
    start, scale = [[np.zeros((2, 3), np.float32)]], float(2 ** rng.integers(1, 30))
    # unscaled, then clipped by the user, then stepped
    clipped = [["unscale_", 0], ["put", 0, [g / 4]], ["step", 0], ["look"], ["update"]]
    notes = drive(start, 2 * [["backward", 0, [g]], *clipped], init_scale=scale)
    assert notes[1::3] == [True, True], "A step after unscale_ must be made, in each iteration."
    assert same(notes[2]["grads"][0][0], g / 4), (
        "Gradients that were unscaled, then clipped, were changed by step."
    )
    assert same(notes[2]["weights"][0][0], -g / 8), (
        "A step must take the gradients as they are after clipping."
    )
    _, gave, look = drive(start, [["backward", 0, [bad]], *clipped], init_scale=scale)
    assert gave is None and look["steps"] == [0], (
        "What unscale_ found must count, also if it is clipped away."
    )
    # calls at the wrong time, after a step that was made and after one that was skipped
    for grads in (g, bad):
        program = [["backward", 0, [grads]], ["step", 0], ["look"], ["unscale_", 0], ["step", 0], ["look"]]
        _, before, unscaled, stepped, after = drive(start, program, init_scale=scale)
        assert unscaled == stepped == "RuntimeError", "After a step, made or skipped, both must be refused."
        assert after["steps"] == before["steps"], "A refused step was made all the same."
        assert same(after["grads"][0][0], before["grads"][0][0]), "A refused call has changed gradients."
        assert same(after["weights"][0][0], before["weights"][0][0]), "A refused call has changed weights."
    program = [["backward", 0, [g]], ["unscale_", 0], ["step", 0], ["step", 0], ["update"]]
    notes = drive(start, 3 * program, init_scale=scale)
    assert notes == 3 * [None, True, "RuntimeError"], (
        "update() must begin a new iteration, with the same rules."
    )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "GradScaler_several", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
one, g, bad = np.ones(2, np.float32), np.array([0.5, -1], np.float32), np.array([np.inf, 0], np.float32)
program = [["backward", 0, [bad]], ["backward", 1, [g]], ["step", 0], ["step", 1], ["update"], ["look"]]
first, second, look = drive([[one], [one]], program, init_scale=8.0)
assert first is None and second is True, "Only the optimizer with the infinite gradient must skip its step."
assert same(look["weights"][1][0], np.array([0.75, 1.5], np.float32)), "The step of the other one is wrong."
assert look["scale"] == 4, "With one bad optimizer of two, the scale must shrink once."
### BEGIN HIDDEN TESTS
text = "With several optimizers, "
for _ in range(12):
    count = int(rng.integers(2, 5))
    weights = [[rng.integers(-8, 9, 3).astype(np.float32)] for _ in range(count)]
    w, v = np.array(weights, np.float64)[:, 0], np.zeros((count, 3))
    program, right, scale, tracker, all_good = [], [], 2.0**20, 0, True
    for _ in range(4):
        bad, early = rng.random(count) < rng.choice([0, 0.4]), rng.random(count) < 0.4
        grads = (rng.integers(-8, 9, (count, 3)) / 4).astype(np.float32)
        v[~bad] = 0.5 * v[~bad] + grads[~bad]
        w[~bad] -= 0.5 * v[~bad]
        all_good = all_good and not bad.any()
        scale, tracker = scale / (1 + bad.any()), tracker + 1
        right.append((scale, tracker if all_good else None, w.astype(np.float32)))
        grads[bad, rng.integers(3)] = np.inf
        program += [["backward", int(k), [grads[k]]] for k in rng.permutation(count)]
        program += [["unscale_", int(k)] for k in np.flatnonzero(early)]
        program += [["step", int(k)] for k in rng.permutation(count)]
        program += [["update"], ["state_dict"], ["look"]]
    notes = [note for note in drive(weights, program, init_scale=2.0**20) if isinstance(note, dict)]
    for (scale, tracker, w), state, look in zip(right, notes[::2], notes[1::2], strict=True):
        assert look["scale"] == scale, text + "the scale after update() is wrong."
        assert tracker in (None, state.get("_growth_tracker")), text + "an iteration must be counted once."
        for k in range(count):
            assert same(look["weights"][k][0], w[k]), text + "the weights of one of them are wrong."
one, bad = np.ones(1, np.float32), np.array([np.inf], np.float32)
program = [["backward", 0, [bad]], ["backward", 1, [one]], ["unscale_", 0], ["step", 1], ["update"], ["look"]]
_, gave, look = drive([[one], [one]], program, init_scale=2.0**20)
assert gave is True and look["scale"] == 2.0**19, "What was found counts for the scale, stepped or not."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "GradScaler_state", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
one, g = np.ones(2, np.float32), np.array([0.5, -1.0], np.float32)
twice = 2 * [["backward", 0, [g]], ["step", 0], ["update"]]
state = drive([[one]], [*twice, ["state_dict"]], init_scale=128.0, growth_interval=30)[-1]
assert set(state) == set(state_of(128, 30)), "The state does not have the five keys of task 2."
state = drive([[one]], [*twice, ["save"], ["load"], *twice, ["state_dict"]], init_scale=128.0)[-1]
assert state["_growth_tracker"] == 4, "After a restart the count of good iterations does not go on."
### BEGIN HIDDEN TESTS
for _ in range(6):
    growth, backoff = float(2 ** rng.integers(1, 4)), float(2.0 ** -rng.integers(1, 4))
    settings = {
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": int(rng.integers(2, 5)),
    }
    iterations, cut = [], int(rng.integers(3, 9))
    for k in range(16):
        g = np.where(
            (rng.random(2) < 0.1) & (k != cut) | (k == 0), np.inf, rng.integers(-8, 9, 2) / 4
        ).astype(np.float32)
        iterations.append([["backward", 0, [g]], ["step", 0], ["update"], ["state_dict"]])
    before, after = sum(iterations[:cut], []), sum(iterations[cut:], [])
    run = {"init_scale": float(2 ** rng.integers(5, 20)), **settings}
    whole = drive([[one]], before + after, **run)[1::2]
    resumed = drive([[one]], [*before, ["save"], ["load"], *after], **run)[1::2]
    assert resumed == whole, "A run that was saved and resumed goes on otherwise than one without a stop."
    for state in resumed:
        assert {key: state[key] for key in settings} == settings, (
            "Factors or interval in the state are wrong."
        )
    # brought back to an earlier state, the scaler is where it was then, whatever came between
    for between in ([*after], [["load"], *after]):
        state = drive([[one]], [*before, ["save"], *between, ["load"], ["state_dict"]], **run)[-1]
        assert state == whole[cut - 1], "A saved state was changed by iterations that came after it."
### END HIDDEN TESTS

# %% [markdown]
# ## Task 4. The loop
#
# The best scaler is no help in a loop that calls it in the wrong order. Write one iteration of a loop with
# everything that a real one has: the batch comes in several micro-batches, whose gradients add up; there are
# several optimizers; the gradients are clipped.
#
# Think of three things. A threshold for clipping is meant for gradients of their true size. An iteration is one
# iteration, however many micro-batches and optimizers it has. And the scaler must hear of every iteration, the bad
# ones and the good ones.


# %% nbgrader={"grade": false, "grade_id": "train_iteration", "locked": false, "schema_version": 3, "solution": true, "task": false}
def train_iteration(scaler, optimizers, batches, clip, max_norm):
    """One iteration: every optimizer takes one step along the gradient of the mean of the losses of all batches, clipped.

    scaler: has the methods scale, unscale_, step and update of task 3. optimizers: a list; each has zero_grad() and
    step(). Their gradients may still be there from the iteration before.
    batches: a list of functions. batch() runs the forward pass of one micro-batch and returns its loss, which can be
    multiplied and divided by a number and has a method backward(). That adds to the gradients of all optimizers, and
    frees the memory of the forward pass; there is memory for one forward pass at a time.
    clip: clip(optimizer, max_norm) cuts the gradients of an optimizer, as they are at that moment, to the norm max_norm.
    Returns nothing.
    """
    ### BEGIN SOLUTION
    for optimizer in optimizers:
        optimizer.zero_grad()
    for batch in batches:
        scaler.scale(batch() / len(batches)).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        clip(optimizer, max_norm)
        scaler.step(optimizer)
    scaler.update()
    ### END SOLUTION


# %% [markdown]
# Your loop is run with stand-ins that write down what is called.


# %% tags=["driver"] nbgrader={"grade": false, "grade_id": "loop_driver", "locked": true, "schema_version": 3, "solution": false, "task": false}
class NotingScaler:
    """Writes down what is called; the steps of the optimizers `skipping` give None, as if they were skipped."""

    def __init__(self, notes, skipping):
        self.notes, self.skipping = notes, skipping

    def scale(self, loss):
        return NotingLoss(self.notes, loss.number, loss.factor, loss.scaled + 1)

    def unscale_(self, optimizer):
        self.notes.append(["unscale_", optimizer.number])

    def step(self, optimizer):
        self.notes.append(["step", optimizer.number])
        return None if optimizer.number in self.skipping else True

    def update(self):
        self.notes.append(["update"])


class NotingOptimizer:
    """Writes down what is called."""

    def __init__(self, notes, number):
        self.notes, self.number = notes, number

    def zero_grad(self):
        self.notes.append(["zero_grad", self.number])

    def step(self):
        self.notes.append(["optimizer.step", self.number])


class NotingLoss:
    """The loss of one micro-batch, times `factor`; `scaled` says how often a scaler has scaled it."""

    def __init__(self, notes, number, factor=1.0, scaled=0):
        self.notes, self.number, self.factor, self.scaled = notes, number, factor, scaled

    def __mul__(self, by):
        return NotingLoss(self.notes, self.number, self.factor * by, self.scaled)

    __rmul__ = __mul__

    def __truediv__(self, by):
        return NotingLoss(self.notes, self.number, self.factor / by, self.scaled)

    def backward(self):
        self.notes.append(["backward", self.number, self.factor, self.scaled])


def run_iteration(optimizers, batches, max_norm, skipping=()):
    """Run your train_iteration with so many optimizers and micro-batches; the step of the optimizers `skipping` is skipped.

    Returns what was called, in order: ["zero_grad", k], ["forward", i], ["backward", i, factor of the loss, how often it
    was scaled], ["unscale_", k], ["clip", k, max_norm], ["step", k] for scaler.step, ["optimizer.step", k] for
    optimizers[k].step, ["update"].
    """
    notes = []

    def batch(i):
        def forward():
            notes.append(["forward", i])
            return NotingLoss(notes, i)

        return forward

    def clip(optimizer, max_norm):
        notes.append(["clip", optimizer.number, max_norm])

    opts = [NotingOptimizer(notes, k) for k in range(optimizers)]
    train_iteration(NotingScaler(notes, skipping), opts, [batch(i) for i in range(batches)], clip, max_norm)
    return notes


# %% nbgrader={"grade": true, "grade_id": "train_iteration_order", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
names = [note[0] for note in run_iteration(1, 1, 2.5)]
assert names.count("backward") == 1, "Backward does not run once for one micro-batch."
assert "update" in names, "The scaler never hears that the iteration is over."
### BEGIN HIDDEN TESTS
for skipping in ([], [0]):
    max_norm = float(rng.uniform(0.5, 5))
    notes = run_iteration(1, 1, max_norm, skipping)
    names = [note[0] for note in notes]
    first = {name: names.index(name) for name in names[::-1]}
    assert "optimizer.step" not in names, "A step is made that the scaler does not know of."
    for name in ("zero_grad", "backward", "unscale_", "clip", "step"):
        assert name in names, f"{name} is not called."
    assert "update" in names, "There is an iteration after which the scaler is not updated."
    assert [n[2:] for n in notes if n[0] == "backward"] == [[1.0, 1]], (
        "Backward does not begin at the scaled loss."
    )
    assert first["zero_grad"] < first["backward"], "Old gradients are still there when backward begins."
    assert "zero_grad" not in names[first["backward"] : first["step"]], (
        "Gradients are dropped before the step."
    )
    assert first["backward"] < first["unscale_"], "Gradients are unscaled before backward has made them."
    assert first["unscale_"] < first["clip"], "Gradients are clipped while they are still scaled."
    assert first["clip"] < first["step"], "Gradients are clipped after the step."
    assert first["step"] < first["update"], "The scaler is updated before the step."
    for name in ("backward", "unscale_", "clip", "step", "update"):
        assert names.count(name) == 1, f"{name} is called more than once."
    assert ["clip", 0, max_norm] in notes, "Gradients are not clipped to max_norm."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "train_iteration_accumulate", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
done = [note[1] for note in run_iteration(1, 4, 1.0) if note[0] == "backward"]
assert done == [0, 1, 2, 3], "Backward does not run once for each micro-batch."
### BEGIN HIDDEN TESTS
for batches in (2, 3, 4, int(rng.integers(5, 9))):
    notes = run_iteration(1, batches, 1.0)
    names = [note[0] for note in notes]
    passes = [note[:2] for note in notes if note[0] in ("forward", "backward")]
    assert passes == [[name, i] for i in range(batches) for name in ("forward", "backward")], (
        "A forward pass is not followed by its own backward: two are in memory at a time, or one is lost."
    )
    last = len(names) - 1 - names[::-1].index("backward")
    calls = set(names[names.index("backward") : last])
    assert "zero_grad" not in calls, "The gradients of a micro-batch are dropped before they were used."
    assert not {"unscale_", "clip"} & calls, "Gradients are unscaled or clipped before all have arrived."
    assert not {"step", "update"} & calls, "Steps or updates are made before all micro-batches are through."
    for note in notes:
        if note[0] == "backward":
            assert note[3] == 1, "The loss of a micro-batch is not scaled once."
            # at most a quotient and a product of floats: an error of a few times 1e-16
            assert abs(note[2] * batches - 1) < 1e-12, "The gradient is not that of the mean of the losses."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "train_iteration_several", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
notes = run_iteration(2, 1, 1.0)
assert notes.count(["update"]) == 1, "An iteration with two optimizers is one iteration."
### BEGIN HIDDEN TESTS
for share in (1.0, *7 * [0.5]):
    count = int(rng.integers(1, 5))
    skipping = [k for k in range(count) if rng.random() < share]
    notes = run_iteration(count, int(rng.integers(1, 3)), 1.0, skipping)
    assert notes.count(["update"]) == 1, (
        "With several optimizers, some skipping, the scaler is not updated once."
    )
    for k in range(count):
        assert notes.count(["unscale_", k]) == 1, "The gradients of an optimizer are not unscaled once."
        assert notes.count(["clip", k, 1.0]) == 1, "The gradients of an optimizer are not clipped once."
        assert notes.count(["step", k]) == 1, "An optimizer does not get one step."
        assert notes.index(["step", k]) < notes.index(["update"]), (
            "The scaler is updated before all steps are through."
        )
### END HIDDEN TESTS

# %% [markdown]
# ## All together
#
# Your scaler and your loop, on the fit of a line. The loss has the weight $2^{-22}$, as an auxiliary loss may have;
# without scaling its float16 gradients are 0.


# %%
class HalfLoss:
    """The mean squared error of x @ w for one micro-batch, times a factor; forward and backward in float16."""

    def __init__(self, w, x, y, factor=2.0**-22):
        self.w, self.x, self.y, self.factor = w, x.astype(np.float16), y.astype(np.float16), factor
        self.error = (self.x @ w.data.astype(np.float16) - self.y).astype(np.float32)

    def __mul__(self, by):
        return HalfLoss(self.w, self.x, self.y, self.factor * by)

    def __truediv__(self, by):
        return self * (1 / by)

    def backward(self):
        with np.errstate(over="ignore", invalid="ignore"):
            g = (2 * self.factor * self.error / len(self.error)).astype(np.float16)  # of the prediction
            g = (self.x.T.astype(np.float32) @ g.astype(np.float32)).astype(np.float16).astype(np.float32)
        self.w.grad = g if self.w.grad is None else self.w.grad + g


def clip_norm(optimizer, max_norm):
    for p in optimizer.params:
        with np.errstate(invalid="ignore"):
            p.grad = p.grad * np.float32(min(1, max_norm / (np.linalg.norm(p.grad) + 1e-6)))


def fit(scaler, iterations=100):
    """Fit a line of three coefficients: the largest error of one, the scale after each iteration, the skipped steps."""
    draw, w, true = np.random.default_rng(1), Parameter(np.zeros(3)), np.array([0.5, -1, 2], np.float32)
    optimizer, scales = SGD([w], lr=2.0**20), []
    for _ in range(iterations):
        x, noise = (
            draw.normal(size=(2, 256, 3)).astype(np.float32),
            draw.normal(0, 0.1, (2, 256)).astype(np.float32),
        )
        batches = [lambda x=x[i], e=noise[i]: HalfLoss(w, x, x @ true + e) for i in range(2)]
        train_iteration(scaler, [optimizer], batches, clip_norm, max_norm=1.0)
        scales.append(scaler.get_scale())
    return np.abs(w.data - true).max(), scales, iterations - optimizer.steps


without, _, _ = fit(GradScaler(init_scale=1.0))
error, scales, skipped = fit(GradScaler(init_scale=2.0**16, growth_interval=3))
print(
    f"largest error of a coefficient: without scaling {without:.2g}, with it {error:.2g}; {skipped} steps skipped"
)
print("log2 of the scale, every fourth iteration:", *np.log2(scales[::4]).astype(int))

# %% [markdown]
# ## Question
#
# Three people send you their runs. All use float16 autocast and a `GradScaler` with a growth interval of 2000.
#
# - **Run A**, 100,000 iterations: the scale goes up and down between $2^{11}$ and $2^{12}$. 46 steps were skipped.
# - **Run B**: all went well for 4,000 iterations, with the scale at $2^{12}$. Since then the loss is printed as
#   NaN, *every* step is skipped, and the scale has halved each time. It is at $2^{-30}$ now.
# - **Run C**, 300 iterations, `init_scale=1024`: the scale was 1024 from the first to the last, and no step was
#   skipped. A third of the values of the weight gradients are exactly 0; in float32 training it is one in a
#   hundred.
#
# For each run: is the scaler doing its work, or is something wrong? What do you change, and where do you look
# next? For run B say also what becomes of the scale if nobody stops it, and why neither a smaller `init_scale`
# nor another `backoff_factor` helps. 200 words or less.

# %% [markdown] nbgrader={"grade": true, "grade_id": "written", "locked": false, "points": 12, "schema_version": 3, "solution": true, "task": false}
# **A model answer**
#
# *Run A* is healthy. The scale climbs after 2000 good steps, is refused, and comes back; that costs at most one
# step in 2001, so up to 49 in 100,000. 46 is what one expects. Nothing to change.
#
# *Run B* has a bug. The loss itself is NaN, so the forward is not finite, and the scale comes in after it: no
# scale changes a NaN. The scaler takes each NaN for an overflow and halves; the true gradients would have to be
# above 65504 to need a scale below 1. Going on, the scale reaches $2^{-149}$ and then 0 in float32, $1/S$ is
# infinite before that, and even clean gradients then come out infinite or NaN, so training never recovers. A
# smaller start or another backoff only changes how long that takes. Look for the first op that made a NaN or an
# infinity in iteration 4,000 and for its input (a logarithm of 0, an overflow in the forward, a broken batch); go
# back to a checkpoint before it.
#
# *Run C* works by the rule, and is badly set. With an interval of 2000 the scale cannot grow in 300 steps, and
# 1024 is too small: values underflow. Start higher ($2^{16}$: too high costs a few skipped steps only), and take
# a smaller growth interval, 50 for instance. Then look at the share of zeros again.
#
# **Mark scheme**, 12 points
#
# - A, 3 points: healthy (1), because of the bound of one in $N + 1$, or an equal count (2).
# - B, 5 points: a NaN of the forward, seen by the NaN loss (1); no scale cures it, since the scale acts after the
#   forward (1); the scale sinks to 0, or its inverse to infinity, and training is then lost for good (1); start
#   and backoff only change the time (1); looks for the first op or batch that is not finite (1).
# - C, 4 points: underflow, the scale is too small (1); it cannot grow, because 300 is less than 2000 (1); a
#   larger init_scale or a smaller interval (1); the costs are lopsided, too high is cheap and too low is not, or:
#   looks at the share of zeros again (1).
