# %% [markdown]
# # Exercise 3. Autocast for an engine of five ops
#
# Below is an automatic differentiation engine with five ops. It refuses to mix formats: a product of a float16
# and a float32 array is an error. A user would have to write every cast by hand, for every op, and think of each
# op's range while doing so. You take that work over. You write down what each op needs, you make a cast that
# backward can go through, you make the region that switches it all on, and you see to it that no weight is cast
# twice. At the end a small network runs in mixed precision, and you will see why the gradients of its weights are
# float32 although its products are half.
#
# After this exercise you will be able to
#
# - say in which format an op computes, given its inputs and its region;
# - write a cast as an op with a gradient, and say in which format that gradient arrives, and why;
# - write nested regions that come back to where they were, whatever happens inside;
# - keep the casts of weights without ever serving a wrong or a stale one.
#
# The float32 weights with their half copies are from Micikevicius et al., [Mixed Precision
# Training](https://arxiv.org/abs/1710.03740), 2018, section 3.1; the names and the rules are PyTorch's.
#
# It needs about two hours, and [notebook 2](../02_autograd.ipynb) and [notebook 6](../06_cast_policy.ipynb). Your
# answers may use NumPy and what is given here, nothing else. Each group of tests earns its points as a whole. Some
# of its checks are here to help you; others are not shown, and ask for what the text and the docstrings promise.

# %% nbgrader={"grade": false, "grade_id": "setup", "locked": true, "schema_version": 3, "solution": false, "task": false}
import numpy as np

rng = np.random.default_rng(0)

FORMATS = {np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16", np.dtype(np.float32): "float32"}


def convert(array, dtype):
    """An array in the format `dtype`, rounded to nearest, ties to even. An array of uint16 holds the bits of bfloat16."""
    array = np.asarray(array)
    with np.errstate(over="ignore", invalid="ignore"):
        if array.dtype == np.uint16:
            array = np.left_shift(array, 16, dtype=np.uint32).view(np.float32)
        if dtype != "bfloat16":
            return array.astype(dtype)
        array = array.astype(np.float32)
        # to the next bfloat16 number
        step = np.ldexp(np.float32(1), np.maximum(np.frexp(array)[1], -125) - 8)
        return ((np.rint(array / step) * step).view(np.uint32) >> 16).astype(np.uint16)


def same(a, b):
    """Whether two arrays have one dtype, one shape and the same values; a NaN is the same as a NaN."""
    if (
        not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray))
        or a.dtype != b.dtype
        or a.shape != b.shape
    ):
        return False
    return np.array_equal(convert(a, "float32"), convert(b, "float32"), equal_nan=True)


# %% [markdown]
# ## The engine
#
# A `Tensor` is an array, in one of three formats, that remembers how it was made. NumPy has no bfloat16, so arrays
# of `uint16` hold its bits; `convert` takes care of that. `run` computes an op as a tensor core does: the inputs
# are widened to float32, the result is rounded once to the format of the inputs, and so is every gradient.


# %% nbgrader={"grade": false, "grade_id": "engine", "locked": true, "schema_version": 3, "solution": false, "task": false}
class Tensor:
    """An array that remembers how it was made.

    data: its values, a NumPy array. parents: pairs of a Tensor that it was made from and the vjp that leads there, a
    function from this Tensor's gradient to the parent's; none for a leaf. version: how often `write_` changed the values.
    """

    def __init__(self, data, parents=(), requires_grad=False):
        self.data, self.parents, self.grad, self.version = np.asarray(data), tuple(parents), None, 0
        self.requires_grad = requires_grad or any(parent.requires_grad for parent, _ in self.parents)

    @property
    def dtype(self):
        """The format's name: "float16", "bfloat16" or "float32"."""
        return FORMATS[self.data.dtype]

    @property
    def is_leaf(self):
        """True if it was not made from other Tensors: a weight, or an input."""
        return not self.parents

    def write_(self, values):
        """Change the values in place, as an optimizer does. The format stays."""
        self.data[...] = convert(values, self.dtype)
        self.version += 1

    def backward(self, g=None):
        """Put into .grad of all that this was made from, and that requires it, the gradient; g: that of this one, or ones."""
        self.grad = convert(np.ones(self.data.shape), self.dtype) if g is None else g
        for node in reversed(in_order(self)):
            for parent, vjp in node.parents:
                if parent.requires_grad:
                    g = vjp(node.grad)
                    parent.grad = g if parent.grad is None else plus(parent.grad, g)


def in_order(last, seen=None):
    """All Tensors that `last` was made from, each after its parents."""
    seen = {} if seen is None else seen
    for parent, _ in last.parents:
        if parent not in seen:
            in_order(parent, seen)
    seen[last] = True
    return list(seen)


def plus(a, b):
    """The sum of two gradients of one Tensor, in their format."""
    return convert(convert(a, "float32") + convert(b, "float32"), FORMATS[a.dtype])


OPS = {  # the forward, and one vjp for each input; all on float32 arrays
    "matmul": (lambda a, b: a @ b, lambda g, a, b: g @ b.T, lambda g, a, b: a.T @ g),
    "add": (lambda a, b: a + b, lambda g, a, b: g, lambda g, a, b: g),
    "relu": (lambda x: np.maximum(x, 0), lambda g, x: g * (x > 0)),
    "exp": (lambda x: np.exp(x), lambda g, x: g * np.exp(x)),
    "sum": (lambda x: x.sum(), lambda g, x: np.full_like(x, g)),
}


def run(op, *inputs):
    """An op on Tensors of one format: computed in float32, each result rounded once. RuntimeError for two formats."""
    formats = {x.dtype for x in inputs}
    if len(formats) > 1:
        raise RuntimeError(f"{op}: {' and '.join(sorted(formats))} do not mix: cast one of them")
    (dtype,), (forward, *vjps) = formats, OPS[op]
    wide = [convert(x.data, "float32") for x in inputs]

    def rounded(vjp):
        return lambda g: convert(vjp(convert(g, "float32"), *wide), dtype)

    with np.errstate(over="ignore", invalid="ignore"):
        return Tensor(
            convert(forward(*wide), dtype), [(x, rounded(v)) for x, v in zip(inputs, vjps, strict=True)]
        )


# %% [markdown]
# A first look: two products in float16 and their gradients, and the refusal.

# %%
a = Tensor(np.array([[1, 2]], np.float16))
w = Tensor(np.array([[0.1], [300]], np.float16), requires_grad=True)
y = run("sum", run("matmul", a, w))
y.backward()
print(f"y = {y.data} in {y.dtype}; gradient of w in {FORMATS[w.grad.dtype]}: {w.grad.ravel()}")
try:
    run("matmul", a, Tensor(np.ones((2, 1), np.float32)))
except RuntimeError as error:
    print("RuntimeError:", error)

# %% [markdown]
# ## Task 1. The policy
#
# Each op has a rule, which follows from what the op does to the range of its numbers and from what it costs. Three
# lists hold the ops that need something; an op on no list computes in the format that it is given.
#
# - Products: cast every input to the half format of the region. That includes the bias of `linear` and `conv2d`.
# - Ops that leave the range of float16 easily, forward or backward: cast every input to float32.
# - Ops that bring several inputs together: cast every input to the *widest* format among them. A format is wider
#   than another if it holds all of the other's numbers. float32 is wider than both halves. Neither half is wider
#   than the other, since float16 has more digits and bfloat16 more range; if they meet, both become float32.
#
# Only float16, bfloat16 and float32 inputs are ever cast. All other inputs, float64 and integers for instance, stay
# as they are and have no say in what is widest. (In PyTorch the third list is made by its type promotion, which
# is at work outside of regions too.)

# %% nbgrader={"grade": false, "grade_id": "lists", "locked": true, "schema_version": 3, "solution": false, "task": false}
HALF = {"matmul", "linear", "conv2d"}
FLOAT32 = {"exp", "log", "pow", "sum", "softmax", "layer_norm", "mse_loss"}
WIDEST = {"add", "mul", "cat", "where"}


# %% nbgrader={"grade": false, "grade_id": "compute_dtypes", "locked": false, "schema_version": 3, "solution": true, "task": false}
def compute_dtypes(op, dtypes, region):
    """The formats in which autocast hands the inputs of an op to it.

    op: its name; it is in HALF, FLOAT32, WIDEST or in none of them. dtypes: a list with the format of each input, such as
    "float16", "bfloat16", "float32", "float64", "int64" or "bool". region: "float16" or "bfloat16", the half format of the
    region; None where autocast is off, and then nothing is cast.
    Returns a list of as many names.
    """
    ### BEGIN SOLUTION
    eligible = {"float16", "bfloat16", "float32"}
    present = eligible.intersection(dtypes)
    if region is None:
        target = None
    elif op in HALF:
        target = region
    elif op in FLOAT32:
        target = "float32"
    elif op in WIDEST:
        target = "float32" if len(present) > 1 else None  # any two of the three formats meet in float32
    else:
        target = None
    return [target if target is not None and d in eligible else d for d in dtypes]
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "compute_dtypes_half", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
text = "An op of the list HALF does not get each of its inputs in the half format of its region."
assert list(compute_dtypes("matmul", ["float32", "float32"], "float16")) == ["float16", "float16"], text
assert list(compute_dtypes("matmul", ["float16", "float32"], "float16")) == ["float16", "float16"], text
### BEGIN HIDDEN TESTS
answer = list(compute_dtypes("matmul", ["float32", "float16"], "bfloat16"))
assert answer == ["bfloat16"] * 2, text + " Look at a region in bfloat16."
for region in ("float16", "bfloat16"):
    assert list(compute_dtypes("linear", ["float32"] * 3, region)) == [region] * 3, text + " Look at a bias."
for _ in range(12):
    region, count = str(rng.choice(["float16", "bfloat16"])), rng.integers(2, 4)
    dtypes = [str(d) for d in rng.choice(["float16", "bfloat16", "float32"], count)]
    answer = list(compute_dtypes(str(rng.choice(sorted(HALF))), dtypes, region))
    assert answer == [region] * count, text
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "compute_dtypes_float32", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
text = "An op of the list FLOAT32 does not get each of its inputs in float32."
assert list(compute_dtypes("exp", ["float16"], "float16")) == ["float32"], text
### BEGIN HIDDEN TESTS
for _ in range(12):
    region, count = str(rng.choice(["float16", "bfloat16"])), rng.integers(1, 4)
    dtypes = [str(d) for d in rng.choice(["float16", "bfloat16", "float32"], count)]
    answer = list(compute_dtypes(str(rng.choice(sorted(FLOAT32))), dtypes, region))
    assert answer == ["float32"] * count, text
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "compute_dtypes_widest", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
text = "An op of the list WIDEST does not get its inputs in the widest format among them."
assert list(compute_dtypes("add", ["float16", "float32"], "float16")) == ["float32", "float32"], text
assert list(compute_dtypes("add", ["float16", "float16"], "float16")) == ["float16", "float16"], text
### BEGIN HIDDEN TESTS
for one in ("float16", "bfloat16", "float32"):
    for region in ("float16", "bfloat16"):
        for count in (1, 2, 3):
            answer = list(compute_dtypes(str(rng.choice(sorted(WIDEST))), [one] * count, region))
            assert answer == [one] * count, text + " Look at inputs that have one format already."
for _ in range(12):
    region, count = str(rng.choice(["float16", "bfloat16"])), rng.integers(2, 5)
    dtypes = [*rng.choice(["float16", "bfloat16", "float32"], 2, replace=False), *["float16"] * (count - 2)]
    dtypes = [str(d) for d in rng.permutation(dtypes)]
    answer = list(compute_dtypes(str(rng.choice(sorted(WIDEST))), dtypes, region))
    assert answer == ["float32"] * count, text + " Look at every pair of different formats."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "compute_dtypes_untouched", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
answer = list(compute_dtypes("relu", ["float16"], "bfloat16"))
assert answer == ["float16"], "An op on no list was given another format."
answer = list(compute_dtypes("matmul", ["float64", "float32"], "float16"))
assert answer == ["float64", "float16"], "Only float16, bfloat16 and float32 are cast, float64 is not."
### BEGIN HIDDEN TESTS
never = ["float64", "int64", "int32", "bool"]
everything = ["float16", "bfloat16", "float32", *never]
for _ in range(8):
    dtypes = [str(d) for d in rng.choice(everything, rng.integers(1, 4))]
    name = str(rng.choice(["relu", "tanh", "mean", "max_pool2d", "dropout"]))
    answer = list(compute_dtypes(name, dtypes, str(rng.choice(["float16", "bfloat16"]))))
    assert answer == dtypes, "An op on no list was given another format."
for name in sorted(HALF | FLOAT32 | WIDEST):
    dtypes = [str(d) for d in rng.permutation(everything)]
    answer = list(compute_dtypes(name, dtypes, None))
    assert answer == dtypes, "Where autocast is off, something was cast."
    dtypes = [str(d) for d in rng.permutation(never)]
    answer = list(compute_dtypes(name, dtypes, "float16"))
    assert answer == dtypes, "An input that is no float16, bfloat16 or float32 was cast."
for stays in never:
    name = str(rng.choice(sorted(WIDEST)))
    answer = list(compute_dtypes(name, ["float16", stays, "float16"], "float16"))
    assert answer == ["float16", stays, "float16"], "An input that is never cast has a say in what is widest."
    answer = list(compute_dtypes(name, [stays, "float32", "bfloat16"], "float16"))
    assert answer == [stays, "float32", "float32"], (
        "Beside an input that is never cast, others are cast wrong."
    )
### END HIDDEN TESTS

# %% [markdown]
# ## Task 2. A cast is an op
#
# A cast changes the numbers a little, so it is a function like others and belongs in the record; a weight whose
# cast is not recorded gets no gradient. Away from its rounding steps its slope is 1. So the gradient passes
# through,
#
# $$ \bar x = \bar y, $$
#
# but in another format: a gradient has the format of the Tensor that it is the gradient *of*.
#
# In this engine `Tensor(data, parents)` records an op; `parents` holds a pair (Tensor, vjp) for each input. The
# engine calls `vjp` with the gradient of the result, and takes what it returns for the gradient of that input.


# %% nbgrader={"grade": false, "grade_id": "cast", "locked": false, "schema_version": 3, "solution": true, "task": false}
def cast(x, dtype):
    """The Tensor x in the format `dtype`: an op, with a gradient.

    x: a Tensor; it is not changed. dtype: "float16", "bfloat16" or "float32".
    Returns x itself if it has that format. Otherwise a new Tensor, recorded as made from x, with the values of x as
    `convert` rounds them: what is too large becomes inf, what is too small 0. The gradient that arrives at x is the one
    of the result, as `convert` rounds it to the format of x.
    """
    ### BEGIN SOLUTION
    if x.dtype == dtype:
        return x
    return Tensor(convert(x.data, dtype), [(x, lambda g: convert(g, x.dtype))])
    ### END SOLUTION


# %% [markdown]
# Two programs for your `cast`. Tensors cannot leave the machine that grades them; formats, arrays and truth values
# can.


# %% tags=["driver"] nbgrader={"grade": false, "grade_id": "cast_driver", "locked": true, "schema_version": 3, "solution": false, "task": false}
def cast_chain(array, formats, g):
    """A leaf with the values `array`, cast to each of `formats` in turn; then backward, with the gradient g of the last.

    Returns lists with an entry for the leaf and one for each cast: the format, the values, the gradient (None: it got
    none), and whether it is another Tensor than the one before it (True for the leaf).
    """
    chain = [Tensor(np.array(array), requires_grad=True)]
    for dtype in formats:
        chain.append(cast(chain[-1], dtype))
    chain[-1].backward(np.array(g))
    return {
        "formats": [x.dtype for x in chain],
        "values": [x.data for x in chain],
        "grads": [x.grad for x in chain],
        "new": [True] + [y is not x for x, y in zip(chain, chain[1:], strict=False)],
    }


def weight_gradient(w, inputs, formats):
    """A weight with the values w, cast for each product x @ w to that product's format; the loss is the sum of all products.

    inputs: the arrays x. formats: as many names. Returns the gradients of the weight and of the operand of each product.
    """
    weight, operands, loss = Tensor(np.array(w), requires_grad=True), [], None
    for x, dtype in zip(inputs, formats, strict=True):
        operands.append(cast(weight, dtype))
        product = run("matmul", Tensor(convert(x, dtype)), operands[-1])
        term = run("sum", cast(product, "float32"))
        loss = term if loss is None else run("add", loss, term)
    loss.backward()
    return {"grad": weight.grad, "operands": [x.grad for x in operands]}


# %% nbgrader={"grade": true, "grade_id": "cast_values", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
x = np.array([1.0, 0.1, 1e-8, 70000.0], np.float32)
ran = cast_chain(x, ["float16"], np.ones(4, np.float16))
assert ran["formats"] == ["float32", "float16"], "A cast does not have the format that was asked for."
assert same(ran["values"][1], convert(x, "float16")), (
    "The values of a cast are not those of its input, rounded."
)
assert same(ran["values"][0], x), "The input of a cast was changed."
ran = cast_chain(x, ["float32"], x)
assert ran["new"] == [True, False], "A Tensor that has the format already must come back itself."
### BEGIN HIDDEN TESTS
edges = "0 -0 inf -inf nan 65504 65519.99 65520 1e30 -3.4e38 2048.5 2049 2051 257 259 6e-5 1e-7 3e-8 1e-40"
edges = np.array(
    [*map(float, edges.split()), *(1 + 2.0 ** np.arange(-12, -6)), *(1 + 3 * 2.0 ** np.arange(-12, -6))]
)
edges = np.append(edges, 2.0 ** np.array([-24, -25, -133])).astype(np.float32)
names = ["float16", "bfloat16", "float32"]
for start in names:
    for k in range(4):
        values = rng.standard_normal((3, 4)) * 2.0 ** rng.integers(-28, 18, (3, 4))
        x = convert(edges if k == 0 else values.astype(np.float32), start)
        path = [str(d) for d in rng.choice(names, rng.integers(1, 4))]
        ran = cast_chain(x, path, convert(np.zeros(x.shape), path[-1]))
        assert ran["formats"] == [start, *path], "A cast does not have the format that was asked for."
        assert same(ran["values"][0], x), "The input of a cast was changed."
        right, before = x, start
        for dtype, value, new in zip(path, ran["values"][1:], ran["new"][1:], strict=True):
            assert new == (dtype != before), (
                "A Tensor must come back itself if it has the format, and only then."
            )
            right = convert(right, dtype)
            assert same(value, right), (
                f"The values of a cast from {before} to {dtype} are not those of `convert`."
            )
            before = dtype
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "cast_gradient", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
ran = cast_chain(np.array([1.0, 2.0], np.float32), ["float16"], np.array([0.5, -3.0], np.float16))
g = ran["grads"][0]
assert g is not None, "No gradient arrived at the input of a cast."
assert g.dtype == np.float32, "The gradient of a float32 Tensor did not arrive in float32."
assert same(g, np.array([0.5, -3.0], np.float32)), "The gradient did not pass through the cast."
### BEGIN HIDDEN TESTS
names = ["float16", "bfloat16", "float32"]
for start in names:
    for _ in range(6):
        shape = tuple(rng.integers(1, 5, rng.integers(1, 4)))
        path = [start, *(str(d) for d in rng.choice(names, rng.integers(1, 4)))]
        x = convert(rng.standard_normal(shape) * 100, start)
        g = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 20, shape)
        right = convert(g.astype(np.float32), path[-1])
        ran = cast_chain(x, path[1:], right)
        for dtype, value in zip(path[::-1], ran["grads"][::-1], strict=True):
            right = convert(right, dtype)
            assert value is not None, "No gradient arrived at the input of a cast."
            assert value.dtype == right.dtype, f"The gradient of a {dtype} Tensor arrived in another format."
            wrong = np.count_nonzero(convert(value, "float32") != convert(right, "float32"))
            assert same(value, right), (
                f"{wrong} of {value.size} values of a {dtype} Tensor's gradient are wrong."
            )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "cast_weight", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
inputs = [np.array([[2048.0]], np.float32), np.array([[1.0]], np.float32)]
g = weight_gradient(np.ones((1, 1), np.float32), inputs, ["float16", "float16"])["grad"]
assert g is not None, "No gradient arrived at a weight."
assert g.dtype == np.float32, "The gradient of a float32 weight did not arrive in float32."
assert g.item() == 2049, "What arrives at a weight through two casts must be added up in float32."
### BEGIN HIDDEN TESTS
for start in ("float32", "float32", "float16", "bfloat16"):
    for _ in range(3):
        rows, inner, columns, uses = rng.integers(2, 5, 4)
        w = convert(rng.integers(-4, 5, (inner, columns)), start)
        inputs = [rng.integers(0, 4, (rows, inner)).astype(np.float32) for _ in range(uses)]
        names = ["float16", "bfloat16", "float32"] if start == "float32" else [start, "float32"]
        formats = [str(d) for d in rng.choice(names, uses)]
        # the sum of at most four rows of 0 to 3, at most four times: a whole number up to 48, exact in each format
        each = [np.repeat(x.sum(0)[:, None], columns, 1) for x in inputs]
        right, ran = convert(sum(each), start), weight_gradient(w, inputs, formats)
        assert ran["grad"] is not None, "No gradient arrived at a weight."
        assert ran["grad"].dtype == right.dtype, (
            f"The gradient of a {start} weight arrived in another format."
        )
        assert same(ran["grad"], right), (
            f"The gradient of a {start} weight that is used {uses} times is wrong."
        )
        for dtype, value, right in zip(formats, ran["operands"], each, strict=True):
            # without a cast it is the weight itself
            good = dtype == start or same(value, convert(right, dtype))
            assert good, f"The gradient of a {dtype} copy of a weight is wrong."
parts = rng.permutation([2048.0, 1, 1, 1, 3])
inputs = [np.full((1, 1), part, np.float32) for part in parts]
g = weight_gradient(np.ones((1, 1), np.float32), inputs, ["float16"] * 5)["grad"]
assert g.item() == parts.sum(), "What arrives at a weight through several casts must be added up in float32."
### END HIDDEN TESTS

# %% [markdown]
# ## Task 3. The region
#
# A region is a block of code in which autocast is on, or off:
#
#     with autocast(dtype="bfloat16"):
#         ...
#         with autocast(enabled=False):
#             ...
#
# Where the program stands is kept in one place, `state`. Entering a region changes it, leaving the region brings
# back what was there, and an exception in the block changes nothing about that. When the *outermost* region ends,
# the kept casts of task 4 are dropped: then the optimizer changes the weights, and their copies are worth nothing.


# %% nbgrader={"grade": false, "grade_id": "state", "locked": true, "schema_version": 3, "solution": false, "task": false}
class State:
    """Where a program stands.

    enabled: whether ops are cast here. dtype: the half format of the innermost region; "float16" outside of all.
    depth: how many regions are open, those with enabled=False counted. cache: the kept casts, a dict.
    """

    def __init__(self):
        self.enabled, self.dtype, self.depth, self.cache = False, "float16", 0, {}


state = State()


# %% nbgrader={"grade": false, "grade_id": "autocast", "locked": false, "schema_version": 3, "solution": true, "task": false}
class autocast:
    """A region, for use in `with`. `state` is changed when it is entered and when it is left, not when it is made.

    dtype: "float16" or "bfloat16"; None: the format that `state` has when the region is entered. enabled: whether ops are
    cast inside, whatever holds outside; with enabled=False, dtype counts all the same.
    On the way out enabled and dtype become what they were before, also if the block raised, and the exception goes on.
    state.cache is emptied when the outermost region ends, and at no other time.
    One object may be entered again while it is open, as it happens in a function that calls itself.
    """

    def __init__(self, dtype=None, enabled=True):
        ### BEGIN SOLUTION
        self.dtype, self.enabled = dtype, enabled
        self.outer = []  # a stack: the object may be entered again while it is open
        ### END SOLUTION

    def __enter__(self):
        ### BEGIN SOLUTION
        self.outer.append((state.enabled, state.dtype))
        state.enabled = self.enabled
        state.dtype = self.dtype or state.dtype
        state.depth += 1
        return self
        ### END SOLUTION

    def __exit__(self, error_type, error, traceback):
        ### BEGIN SOLUTION
        state.enabled, state.dtype = self.outer.pop()
        state.depth -= 1
        if state.depth == 0:
            state.cache.clear()
        return False
        ### END SOLUTION


# %% tags=["driver"] nbgrader={"grade": false, "grade_id": "autocast_driver", "locked": true, "schema_version": 3, "solution": false, "task": false}
def walk_regions(program, objects=None):
    """Run a program of nested regions, from a fresh state.

    program: a list of steps, each one of
        "look"                      note where `state` stands
        "keep"                      put one more entry into state.cache
        "fail"                      raise an exception
        ["try", steps]              run steps, and note "caught" or "no exception" at their end
        ["region", kwargs, steps]   with autocast(**kwargs): run steps
        ["enter", name, steps]      with the object of that name: run steps
    objects: {name: kwargs}, made by autocast(**kwargs) before the program begins.
    Returns a list of the notes; a look is [enabled, dtype, depth, number of entries in the cache].
    """
    state.__init__()
    regions = {name: autocast(**kwargs) for name, kwargs in (objects or {}).items()}
    notes = []

    def walk(steps):
        for step in steps:
            if step == "look":
                notes.append([state.enabled, state.dtype, state.depth, len(state.cache)])
            elif step == "keep":
                state.cache["kept", len(state.cache)] = True
            elif step == "fail":
                raise ZeroDivisionError
            elif step[0] == "try":
                try:
                    walk(step[1])
                    notes.append("no exception")
                except ZeroDivisionError:
                    notes.append("caught")
            else:
                with autocast(**step[1]) if step[0] == "region" else regions[step[1]]:
                    walk(step[2])

    walk(program)
    return notes


# %% nbgrader={"grade": true, "grade_id": "autocast_nesting", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
notes = walk_regions(["look", ["region", {}, ["look"]], "look"])
assert [n[:2] for n in notes] == [[False, "float16"], [True, "float16"], [False, "float16"]], (
    "One region is not right."
)
notes = walk_regions(
    [["region", {"dtype": "bfloat16"}, ["look", ["region", {"enabled": False}, ["look"]], "look"]]]
)
assert [n[:2] for n in notes] == [[True, "bfloat16"], [False, "bfloat16"], [True, "bfloat16"]], (
    "A region with enabled=False inside another is not right, or what comes after it."
)
### BEGIN HIDDEN TESTS
for _ in range(20):
    chain, levels = [], [[False, "float16"]]
    for _ in range(rng.integers(1, 6)):
        dtype, enabled = [None, "float16", "bfloat16"][rng.integers(3)], bool(rng.random() < 0.6)
        kwargs = {"dtype": dtype, "enabled": enabled}
        if dtype is None and rng.random() < 0.5:
            del kwargs["dtype"]
        if enabled and rng.random() < 0.5:
            del kwargs["enabled"]
        chain.append(kwargs)
        levels.append([enabled, dtype or levels[-1][1]])
    program = ["look"]
    for kwargs in reversed(chain):
        program = ["look", ["region", kwargs, program], "look"]
    notes, count = walk_regions(program), len(levels)
    assert len(notes) == 2 * count - 1, "The body of a region did not run."
    for k in range(count):
        assert notes[k][:2] == levels[k], (
            "Inside nested regions, enabled or dtype is not what the innermost asks for."
        )
    for k in range(count - 1):
        assert notes[-1 - k][:2] == levels[k], "After a region, enabled or dtype is not what it was before."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "autocast_cache", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
notes = walk_regions([["region", {}, ["keep", ["region", {}, ["keep", "look"]], "look"]], "look"])
assert [n[2] for n in notes] == [2, 1, 0], "The number of open regions is not counted right."
assert [n[3] for n in notes] == [2, 2, 0], (
    "The cache must be empty after the outermost region, and kept until then."
)
### BEGIN HIDDEN TESTS
for _ in range(20):
    kept, right = [0], []

    def steps_of(depth, kept=kept, right=right):
        steps = []
        for _ in range(rng.integers(2, 6)):
            kind = rng.integers(3)
            if kind == 0:
                kept[0] += 1
            elif kind == 1:
                right.append([depth, kept[0]])
            steps.append(["keep", "look", "region"][kind])
            if kind == 2:
                enabled = bool(rng.random() < 0.5)
                steps[-1] = ["region", {"enabled": enabled}, steps_of(depth + 1) if depth < 4 else []]
        right.append([depth, kept[0]])
        return [*steps, "look"]

    program = [["region", {"enabled": bool(rng.random() < 0.5)}, steps_of(1)], "look"]
    notes = walk_regions(program)
    assert [n[2] for n in notes] == [n[0] for n in right] + [0], (
        "The number of open regions is not counted right."
    )
    assert [n[3] for n in notes[:-1]] == [n[1] for n in right], (
        "Casts were dropped while a region was still open."
    )
    assert notes[-1][3] == 0, "After the outermost region the cache is not empty."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "autocast_exception", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
notes = walk_regions([["try", [["region", {"dtype": "bfloat16"}, ["keep", "fail"]]]], "look"])
assert notes[0] == "caught", "An exception in a region must go on after it."
assert notes[1][:3] == [False, "float16", 0], "After an exception the state is not what it was before."
assert notes[1][3] == 0, "After an exception in the outermost region the cache is not empty."
### BEGIN HIDDEN TESTS
for _ in range(20):
    formats = [str(d) for d in rng.choice(["float16", "bfloat16"], rng.integers(1, 6))]
    caught_at = rng.integers(len(formats))  # so many regions are around the try, the others inside it
    levels = [[False, "float16"], *([True, dtype] for dtype in formats)]
    program = ["keep", "fail"]
    for k in reversed(range(len(formats))):
        program = [["region", {"dtype": formats[k]}, program]]
        if k == caught_at:
            program = [["try", program]]
        if k <= caught_at:
            program.append("look")
    notes = walk_regions(program)
    assert notes[0] == "caught", "An exception in a region must go on after it."
    assert len(notes) == caught_at + 2, "After an exception the program did not go on."
    for k, note in enumerate(notes[1:]):
        level = caught_at - k
        assert note[:3] == [*levels[level], level], "After an exception the state is not what it was before."
        assert note[3] == int(level > 0), "With an exception the cache is emptied too early, or not at all."
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "autocast_again", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
program = [["enter", "a", ["look", ["enter", "a", ["look"]], "look"]], "look"]
notes = walk_regions(program, {"a": {"dtype": "bfloat16"}})
assert [n[:3] for n in notes[:3]] == [[True, "bfloat16", 1], [True, "bfloat16", 2], [True, "bfloat16", 1]], (
    "Entering one object twice is not right."
)
assert notes[3][:3] == [False, "float16", 0], (
    "After one object was entered twice, the state does not come back."
)
### BEGIN HIDDEN TESTS
text = "One object, entered several times, does not do what a fresh one would do each time."
for _ in range(20):
    objects = {
        name: {"dtype": [None, "float16", "bfloat16"][rng.integers(3)], "enabled": bool(rng.random() < 0.6)}
        for name in "abc"
    }
    names = [str(name) for name in rng.choice(list(objects), rng.integers(2, 7))]
    levels, program = [[False, "float16"]], ["look"]
    for name in names:
        levels.append([objects[name]["enabled"], objects[name]["dtype"] or levels[-1][1]])
    for name in reversed(names):
        program = ["look", ["enter", name, program], "look"]
    notes = walk_regions(program + program, objects)
    right = [[*level, depth] for depth, level in enumerate(levels)]
    assert [n[:3] for n in notes] == 2 * (right + right[-2::-1]), text
### END HIDDEN TESTS

# %% [markdown]
# ## Task 4. The cache of weight casts
#
# A weight that is used eight times in a region is cast once. That is safe only if the copy is always the right
# one. A copy is found by the weight it was made of, and three things can go wrong with that: the region inside
# wants *another format*; the weight was *changed in place*, and the copy is stale; the weight is *gone*, and
# Python gave its `id()` to another Tensor. (PyTorch's cache knows the weight alone, neither format nor version;
# [differences](../pages/differences.md) says what follows from that.)
#
# Only weights are worth keeping: float32 leaves that require a gradient. What an activation was cast to is used
# once or twice; to keep it would only hold memory.


# %% nbgrader={"grade": false, "grade_id": "cached_cast", "locked": false, "schema_version": 3, "solution": true, "task": false}
def cached_cast(x, dtype, cast):
    """The Tensor x in the format `dtype`; the copy of a weight is made once and kept in state.cache.

    cast: the function that makes a cast, called as cast(x, dtype); that of task 2, or one that counts.
    Returns x itself, without a call of cast, if x has that format.
    A copy is kept if a region is open (state.depth > 0), x is a float32 leaf that requires a gradient, and dtype is a half
    format. Everything else is cast anew each time. Keys and values of state.cache are your choice; who empties it is not
    your concern here.
    A kept copy is returned again only for the same weight, the same dtype and the same x.version; otherwise a new one is
    made and kept. A weight may be gone before the region ends, and another Tensor may then have its id().
    """
    ### BEGIN SOLUTION
    if x.dtype == dtype:
        return x
    keep = state.depth > 0 and x.dtype == "float32" and x.is_leaf and x.requires_grad
    if not keep:
        return cast(x, dtype)
    key = (x, dtype)  # x itself: while the entry is there, its id belongs to no other Tensor
    version, copy = state.cache.get(key, (None, None))
    if version != x.version:
        copy = cast(x, dtype)
        state.cache[key] = x.version, copy
    return copy
    ### END SOLUTION


# %% tags=["driver"] nbgrader={"grade": false, "grade_id": "cached_cast_driver", "locked": true, "schema_version": 3, "solution": false, "task": false}
def run_casts(tensors, program):
    """Run a program of casts by your cached_cast and count how many of them are made.

    tensors: {name: {"values": array, "requires_grad": bool, "leaf": bool}}. `state` is set by hand, so no region of
    yours plays a part. program: a list of steps, each one of
        ["open"], ["close"]      one more region is open, one less; the last to close empties the cache
        ["cast", name, dtype]    cast the Tensor of that name
        ["write", name, values]  change it in place
        ["renew", name]          drop it, and make a new one from the same description
        ["renew", name, values]  the same, with other values
    Returns for each "cast": {"made": casts made for it, "format", "values", "itself": whether it is the Tensor itself}.
    """
    state.__init__()
    made, notes = [], []

    def counting_cast(x, dtype):
        made.append(dtype)
        return Tensor(convert(x.data, dtype))

    def make(values, requires_grad, leaf):
        x = Tensor(np.array(values), requires_grad=requires_grad)
        return x if leaf else run("add", x, Tensor(convert(np.zeros(x.data.shape), x.dtype)))

    alive = {name: make(**of) for name, of in tensors.items()}
    for step in program:
        if step[0] in ("open", "close"):
            state.depth += 1 if step[0] == "open" else -1
            state.enabled = state.depth > 0
            if state.depth == 0:
                state.cache.clear()
        elif step[0] == "cast":
            before, y = len(made), cached_cast(alive[step[1]], step[2], counting_cast)
            note = {"made": len(made) - before, "format": y.dtype, "values": np.array(y.data)}
            notes.append({**note, "itself": y is alive[step[1]]})
            del y
        elif step[0] == "write":
            alive[step[1]].write_(step[2])
        else:
            del alive[step[1]]
            of = tensors[step[1]]
            alive[step[1]] = make(step[2] if len(step) > 2 else of["values"], of["requires_grad"], of["leaf"])
    return notes


# %% nbgrader={"grade": true, "grade_id": "cached_cast_once", "locked": true, "points": 8, "schema_version": 3, "solution": false, "task": false}
w = np.array([[0.1, 1 / 3]], np.float32)
weight = {"values": w, "requires_grad": True, "leaf": True}
notes = run_casts({"w": weight}, [["open"], ["cast", "w", "float16"], ["cast", "w", "float16"], ["close"]])
assert [n["made"] for n in notes] == [1, 0], "A weight that is used twice in a region must be cast once."
assert all(same(n["values"], convert(w, "float16")) for n in notes), (
    "The copy does not have the weight's values, rounded."
)
### BEGIN HIDDEN TESTS
for dtype in ("float16", "bfloat16"):
    for _ in range(5):
        names = list("abcd")[: rng.integers(2, 5)]
        values = {name: rng.standard_normal((2, 3)).astype(np.float32) for name in names}
        values["b"] = values["a"]  # equal values, but two weights with a gradient each
        tensors = {name: {"values": v, "requires_grad": True, "leaf": True} for name, v in values.items()}
        program, right, depth, seen = [], [], 0, set()
        for _ in range(30):
            kind = rng.integers(6)
            if depth == 0 or (kind == 0 and depth < 4):
                program.append(["open"])
                depth += 1
            elif kind == 1:
                program.append(["close"])
                depth -= 1
                seen = seen if depth else set()
            else:
                name = str(rng.choice(names))
                program.append(["cast", name, dtype])
                right.append((name, int(name not in seen)))
                seen.add(name)
        notes = run_casts(tensors, program)
        for (name, made), note in zip(right, notes, strict=True):
            assert note["format"] == dtype, "A copy does not have the format that was asked for."
            assert same(note["values"], convert(values[name], dtype)), (
                "A copy does not have the values of its weight."
            )
            assert note["made"] <= made, "A weight is cast again although its copy could be used."
            assert note["made"] >= made, (
                "A copy was used that is none of this weight, or of an outermost region that ended."
            )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "cached_cast_which", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
w = np.array([[0.1, 1 / 3]], np.float32)
weight = {"values": w, "requires_grad": True, "leaf": True}
frozen = {"values": w, "requires_grad": False, "leaf": True}
twice = [["open"], ["cast", "x", "float16"], ["cast", "x", "float16"], ["close"]]
assert [n["made"] for n in run_casts({"x": frozen}, twice)] == [1, 1], (
    "A frozen weight is no weight: it is cast each time."
)
notes = run_casts({"x": weight}, [["open"], ["cast", "x", "float32"], ["close"]])
assert notes[0]["made"] == 0 and notes[0]["itself"], (
    "A Tensor that has the format already must come back itself."
)
### BEGIN HIDDEN TESTS
names = ["float16", "bfloat16", "float32"]
for start, dtype in [(start, dtype) for start in names for dtype in names]:
    for requires_grad, leaf, inside in np.ndindex(2, 2, 2):
        values = convert(rng.standard_normal((2, 2)), start)
        tensors = {"x": {"values": values, "requires_grad": bool(requires_grad), "leaf": bool(leaf)}}
        program = [["cast", "x", dtype]] * 3
        notes = run_casts(tensors, [["open"], *program, ["close"]] if inside else program)
        for note in notes:
            assert note["itself"] == (dtype == start), (
                "A Tensor must come back itself if it has the format already, and not otherwise."
            )
            assert note["format"] == dtype, "A copy does not have the format that was asked for."
            assert same(note["values"], convert(values, dtype)), "A copy does not have its Tensor's values."
        kept = start == "float32" and requires_grad and leaf and inside
        what = f"a {start} Tensor, " + ("leaf, " if leaf else "made from others, ")
        what += ("requires a gradient, " if requires_grad else "frozen, ") + ("in" if inside else "outside")
        text = f"The wrong number of casts for {what} a region: is its copy to be kept?"
        casts = [0, 0, 0] if dtype == start else [1, 0, 0] if kept else [1, 1, 1]
        assert [note["made"] for note in notes] == casts, text
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "cached_cast_format", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
w = np.array([[0.1, 1 / 3]], np.float32)
weight = {"values": w, "requires_grad": True, "leaf": True}
casts = [["cast", "w", dtype] for dtype in ("float16", "bfloat16", "float16", "bfloat16")]
notes = run_casts({"w": weight}, [["open"], *casts, ["close"]])
assert [n["format"] for n in notes] == ["float16", "bfloat16"] * 2, (
    "A copy does not have the format that was asked for."
)
assert [n["made"] for n in notes] == [1, 1, 0, 0], (
    "A weight that is used in two formats must be cast once to each."
)
### BEGIN HIDDEN TESTS
for _ in range(6):
    names = list("abc")
    values = {name: rng.standard_normal((2, 3)).astype(np.float32) for name in names}
    tensors = {name: {"values": v, "requires_grad": True, "leaf": True} for name, v in values.items()}
    asked = [(str(rng.choice(names)), str(rng.choice(["float16", "bfloat16"]))) for _ in range(20)]
    notes = run_casts(tensors, [["open"], *(["cast", *pair] for pair in asked), ["close"]])
    for k, (pair, note) in enumerate(zip(asked, notes, strict=True)):
        assert note["format"] == pair[1], "A copy does not have the format that was asked for."
        assert same(note["values"], convert(values[pair[0]], pair[1])), (
            "A copy does not have the values of its weight."
        )
        assert note["made"] == int(pair not in asked[:k]), (
            "A weight that is used in two formats must be cast once to each."
        )
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "cached_cast_stale", "locked": true, "points": 7, "schema_version": 3, "solution": false, "task": false}
w = np.array([[0.1, 1 / 3]], np.float32)
weight = {"values": w, "requires_grad": True, "leaf": True}
use = ["cast", "w", "float16"]
notes = run_casts({"w": weight}, [["open"], use, ["write", "w", 2 * w], use, use, ["close"]])
assert same(notes[1]["values"], convert(2 * w, "float16")), "After a change in place, an old copy was used."
assert [n["made"] for n in notes] == [1, 1, 0], "After a change in place, cast once more and keep that copy."
### BEGIN HIDDEN TESTS
for _ in range(6):
    now = {name: rng.standard_normal((2, 3)).astype(np.float32) for name in "abc"}
    tensors = {name: {"values": v, "requires_grad": True, "leaf": True} for name, v in now.items()}
    dtype, program, right, kept = str(rng.choice(["float16", "bfloat16"])), [["open"]], [], set()
    for _ in range(30):
        name = str(rng.choice(list(now)))
        if rng.random() < 0.25:
            now[name] = rng.standard_normal((2, 3)).astype(np.float32)
            program.append(["write", name, now[name]])
            kept.discard(name)
        else:
            program.append(["cast", name, dtype])
            right.append((now[name], int(name not in kept)))
            kept.add(name)
    for (values, made), note in zip(right, run_casts(tensors, program), strict=True):
        assert same(note["values"], convert(values, dtype)), "After a change in place, an old copy was used."
        assert note["made"] == made, "After changes in place, the number of casts is not right."
# Tensors that come and go in one region. Nothing else holds them, so most new ones get the id of the one before.
program, right = [["open"]], []
for _ in range(40):
    right.append(rng.standard_normal((2, 3)).astype(np.float32))
    program += [["renew", "w", right[-1]], use, use]
notes = run_casts({"w": {"values": right[0], "requires_grad": True, "leaf": True}}, [*program, ["close"]])
for k, note in enumerate(notes):
    assert same(note["values"], convert(right[k // 2], "float16")), (
        "A new Tensor was given the copy of one that is gone."
    )
    assert note["made"] == 1 - k % 2, (
        "For Tensors that come and go in one region, the number of casts is not right."
    )
### END HIDDEN TESTS

# %% [markdown]
# ## All together
#
# With your four parts a library's way through an op takes three lines. Here is a small network in a region; look at
# the formats forward, and at those of the gradients.


# %%
def op(name, *inputs):
    """What happens at each op of a program: look up the policy, cast, compute."""
    region = state.dtype if state.enabled else None
    formats = compute_dtypes(name, [x.dtype for x in inputs], region)
    return run(name, *(cached_cast(x, f, cast) for x, f in zip(inputs, formats, strict=True)))


draw = np.random.default_rng(1)
x = Tensor(draw.normal(0, 1, (3, 4)).astype(np.float32))
w1, w2 = (Tensor(draw.normal(0, 0.5, (4, 4)).astype(np.float32), requires_grad=True) for _ in range(2))
with autocast(dtype="float16"):
    hidden = op("relu", op("matmul", x, w1))
    again = op("relu", op("matmul", hidden, w1))  # w1 is used twice, and cast once
    scores = op("add", op("matmul", again, w2), x)
    loss = op("sum", op("exp", scores))
loss.backward()
print(f"{'':8}{'format':10}its gradient")
for name in ("hidden", "again", "scores", "loss", "w1", "w2"):
    tensor = globals()[name]
    print(f"{name:8}{tensor.dtype:10}{FORMATS[tensor.grad.dtype]}")
rounded = [np.mean(convert(w.grad, "float16") == w.grad) for w in (w1, w2)]
print(f"of the values of w1.grad and w2.grad, {rounded[0]:.0%} and {rounded[1]:.0%} are float16 numbers")

# %% [markdown]
# ## Question
#
# A colleague looks at this output and writes: "All weight gradients are float32. So backward runs in float32 under
# autocast, small gradients cannot underflow, and loss scaling is superfluous."
#
# Answer in 150 words or less:
#
# 1. In which formats does the gradient travel from the loss to `w1`, op by op? Where does it become float32, and
#    which of your functions does that?
# 2. What becomes of a gradient of $10^{-9}$ that arrives at `hidden`, and what does `w1.grad` show of it? Why does
#    multiplying the loss by 1024 help, although nothing about the formats changes?
# 3. What is a float32 gradient good for all the same? Name one use.

# %% [markdown] nbgrader={"grade": true, "grade_id": "written", "locked": false, "points": 10, "schema_version": 3, "solution": true, "task": false}
# **A model answer**
#
# 1. `sum`, `exp` and the addition are float32, and so are the gradients there. The addition got the last product
#    through a cast from float16; on the way back that cast makes the gradient float16. Products and ReLUs hand on
#    float16 gradients, down to the float16 copy of `w1`. The last step is the cast of `w1` itself: its vjp converts
#    to the format of its input, float32. So it is `cast` (task 2) that makes the gradient float32, at the very end.
# 2. $10^{-9}$ is below $2^{-25}$, half of the smallest float16 number: in the format of `hidden` it is 0, and a
#    float32 zero arrives at `w1`. A wider format does not bring back what was lost before. With the loss times
#    1024 every gradient on the way is 1024 times larger: $10^{-6}$ survives float16 (with few digits), and after
#    the last cast it can be divided by 1024 in float32.
# 3. To unscale it without losing it again; to add it up over micro-batches; to make updates of float32 weights that
#    are too small for half.
#
# **Mark scheme**, 10 points
#
# - Question 1, 4 points: float16 through products and ReLUs (2); float32 only at the end, by the vjp of the
#   weight's cast, in the format of its input (2). 1 of the latter 2 for "autocast converts the gradients at the
#   end" without the cast.
# - Question 2, 4 points: it is 0 in float16 (1) with the limit, $2^{-25}$ or about $3 \cdot 10^{-8}$ or the
#   smallest subnormal (1); a float32 zero arrives, or: precision that is lost does not come back (1); scaling
#   moves the values into the range of float16 (1).
# - Question 3, 2 points: one sound use, with its reason. No points for "it is more exact".
