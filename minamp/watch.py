"""Telemetry: what half precision does to the numbers of a training step.

`tensor_stats` and `exponent_histogram` look at one array. The three context managers look over the engine's shoulder: every op
that runs inside them, forward and backward, is shown to them (record.observers). They change no number.

    with watch.first_bad_op() as bad:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    print(bad)      # exp (forward) made 2 of 640 float16 values inf; the input there is 12.55; exp overflows ...
"""

import math
import tracemalloc
from dataclasses import dataclass

import numpy as np

from minamp import backends, cuda
from minamp.formats import cast, float32, float64, format_of, is_floating, neighbours, widen
from minamp.op import LOWER_PRECISION
from minamp.record import FREED, observe
from minamp.tensor import Tensor


def _array(x):
    """Tensor, array or number as a NumPy array on the CPU; half as float32, which holds the same values."""
    x = backends.move(x._data, "cpu") if isinstance(x, Tensor) else np.asarray(x)
    return widen(x) if is_floating(x.dtype) else x


def _finite(x):
    return bool(np.isfinite(x).all())


# --------------------------------------------------------------------------------------------------------------- one array


@dataclass(frozen=True)
class TensorStats:
    """Shares of all values, each between 0 and 1, and the range of the finite non-zero ones."""

    dtype: np.dtype  # the format the values were judged by
    size: int
    zeros: float  # 0 already before the cast
    flushed: float  # not 0 before the cast, 0 after it
    subnormal: float  # kept, but below the smallest normal number, so with fewer digits
    inf: float  # after the cast: overflow counts
    nan: float
    max_abs: float  # before the cast; 0.0 if there is no finite non-zero value
    min_abs: float

    @property
    def flushed_of_nonzero(self):
        """flushed as a share of the non-zero values: zeros are often ReLU's and say nothing about the format."""
        return self.flushed / (1.0 - self.zeros) if self.zeros < 1.0 else 0.0


def tensor_stats(x, dtype=None):
    """What a cast of x to `dtype` does to its values, as TensorStats.

    x: Tensor or floating array of any shape; dtype: default its own. TypeError for a dtype that is no floating format.
    """
    f = format_of((x if isinstance(x, Tensor) else np.asarray(x)).dtype if dtype is None else dtype)
    x = _array(x)
    y = np.abs(cast(cast(x, f.dtype), float64))
    a = np.abs(x)
    kept = a[np.isfinite(a) & (a > 0)]

    def share(mask):
        return float(np.count_nonzero(mask) / x.size) if x.size else 0.0

    return TensorStats(
        f.dtype,
        x.size,
        zeros=share(x == 0),
        flushed=share((x != 0) & (y == 0)),
        subnormal=share((y > 0) & (y < f.smallest_normal)),
        inf=share(np.isinf(y)),
        nan=share(np.isnan(y)),
        max_abs=float(kept.max(initial=0.0)),
        min_abs=float(kept.min()) if kept.size else 0.0,
    )


@dataclass
class Histogram:
    """How many values have which power of two: counts[k] are those with 2^(low+k) <= |x| < 2^(low+k+1). Histograms add up."""

    low: int
    counts: np.ndarray
    zeros: int = 0
    nonfinite: int = 0
    below: int = 0  # not 0, but under 2^low
    above: int = 0  # finite, from 2^high on

    @property
    def exponents(self):
        return np.arange(self.low, self.low + len(self.counts))

    @property
    def total(self):
        return int(self.counts.sum()) + self.zeros + self.nonfinite + self.below + self.above

    def __add__(self, other):
        if (self.low, len(self.counts)) != (other.low, len(other.counts)):
            raise ValueError(
                "histograms of different ranges can't be added: make both with the same low and high"
            )
        return Histogram(
            self.low,
            self.counts + other.counts,
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.below + other.below,
            self.above + other.above,
        )


def exponent_histogram(x, low=-40, high=16):
    """Counts of x's values by floor(log2 |x|), for exponents low <= e < high; zeros and non-finite values apart.

    x: Tensor or array. The defaults span float16 (2^-24 to just under 2^16) and what falls off below it.
    """
    x = _array(x).ravel()
    if x.dtype not in (float32, float64):
        x = x.astype(float64)
    finite = x[np.isfinite(x)]
    e = (
        np.frexp(finite[finite != 0])[1] - 1
    )  # exact, unlike floor(log2): the mantissa of frexp lies in [0.5, 1)
    inside = e[(e >= low) & (e < high)]
    return Histogram(
        low,
        np.bincount(inside - low, minlength=high - low),
        zeros=int(np.count_nonzero(finite == 0)),
        nonfinite=x.size - finite.size,
        below=int(np.count_nonzero(e < low)),
        above=int(np.count_nonzero(e >= high)),
    )


# ------------------------------------------------------------------------------------------------------ the first bad op


@dataclass(frozen=True)
class BadOp:
    """An op that was given finite values and returned inf or nan."""

    op: str
    phase: str  # 'forward' or 'backward'
    dtype: np.dtype  # of the bad result
    shape: tuple
    result: str  # 'inf' or 'nan'
    count: int  # bad values
    inputs: tuple  # (name, shape, value) per input: value at the bad place, or the largest where places don't match
    limit: str  # the limit that was passed, in words
    argument: str = ""  # backward: whose gradient the result is

    @property
    def value(self):
        """The first input's value at the bad place: the largest logit where exp overflowed."""
        return self.inputs[0][2]

    def __str__(self):
        what = f"gradient for {self.argument}" if self.argument else "result"
        given = ", ".join(f"{name} = {value:.6g} (shape {shape})" for name, shape, value in self.inputs)
        return (
            f"{self.op} ({self.phase}): {self.count} of {math.prod(self.shape)} values of its {self.dtype} {what} are "
            f"{self.result}, from finite inputs {given}; {self.limit}"
        )


class first_bad_op(observe):
    """Context manager that finds the first op, forward or backward, to turn finite inputs into inf or nan.

    `found` is a BadOp or None; str() says it in one line. Checks every array, so for single steps, not for whole trainings.
    """

    def __init__(self):
        super().__init__(self._see)
        self.found, self._given = None, None

    def _see(self, phase, op, inputs, output):
        if self.found is not None:
            return
        y = _array(output)
        if _finite(y):
            return
        arrays = _forward_inputs(op, inputs) if phase == "forward" else _backward_inputs(op, *inputs)
        bad_input = [name for name, a in arrays if not _finite(a)]
        if bad_input:
            self._given = self._given or (op.name, phase, bad_input[0])
            return
        argument, dtype = "", output.dtype
        if phase == "backward":
            _, node, i = inputs
            argument, dtype = _argument(op, i), node.metas[i][1]
        self.found = _diagnose(op, phase, arrays, y, dtype, argument)

    def __str__(self):
        if self.found is not None:
            return str(self.found)
        if self._given is not None:
            op, phase, name = self._given
            return (
                f"no op turned finite values into inf or nan, but {op} ({phase}) was given a non-finite {name}: "
                "it was so before, look at the data or the weights"
            )
        return "every op gave finite results"


def _argument(op, i):
    return f"{op.params[0]}[{i}]" if op.variadic else op.params[i]


def _forward_inputs(op, args):
    return [
        (_argument(op, i), _array(a))
        for i, a in enumerate(args)
        if isinstance(a, Tensor)
        and is_floating(a.dtype)
        or isinstance(a, float | int)
        and not isinstance(a, bool)
    ]


def _backward_inputs(op, g, node, i):
    named = [("incoming gradient", _array(g))]
    for position, value, counter, *_ in node.saved if node.saved is not FREED else ():
        if counter is not None and is_floating(value.dtype):
            named.append(("output" if position < 0 else _argument(op, position), _array(value)))
    return named


def _diagnose(op, phase, arrays, y, dtype, argument):
    bad = ~np.isfinite(y)
    # Sums of products have no single input behind a bad value; other ops do, where the shapes match.
    at_place = op.policy != LOWER_PRECISION
    values = []
    for _, a in arrays:
        try:
            values.append(np.broadcast_to(a, y.shape)[bad] if at_place else a.ravel())
        except ValueError:
            values.append(a.ravel())
    # Among the bad places, the one whose first input is largest: the most extreme logit, not just any.
    worst = int(np.argmax(np.abs(values[0]))) if values[0].size else 0
    picked = [
        float(v[worst]) if len(v) == len(values[0]) and at_place else float(v[np.argmax(np.abs(v))])
        for v in values
    ]
    named = tuple((name, a.shape, v) for (name, a), v in zip(arrays, picked, strict=True))
    result = "nan" if np.isnan(y[bad]).any() else "inf"
    limit = _limit(op.name if phase == "forward" else "", dtype, result, picked)
    return BadOp(op.name, phase, dtype, y.shape, result, int(bad.sum()), named, limit, argument)


def exp_limit(dtype):
    """The largest x of the format whose exp is still finite in it: 11.0859375 for float16."""
    return neighbours(math.log(format_of(dtype).overflow), dtype)[0]


def _limit(op, dtype, result, values):
    f = format_of(dtype)
    if op in ("exp", "naive_half_softmax"):
        return f"exp overflows {f.name} above {exp_limit(dtype)!r}"
    if op == "div" and values[-1] == 0:
        return "it divides by 0"
    if op in ("log", "naive_half_cross_entropy"):
        return "log is -inf at 0 and nan below"
    if op == "sqrt":
        return "sqrt is nan below 0"
    if result == "nan":
        return "nan has no limit to name: an infinity met another one, or a zero, inside the op"
    return f"{f.name} ends at {f.max:g}, and results from {f.overflow:g} on become inf"


# ------------------------------------------------------------------------------------------------------------------ memory


class saved_bytes(observe):
    """Context manager that adds up what the ops recorded inside keep for backward.

    `total` in bytes, `by_op` a dict (an array that several ops keep is counted once, with the first). Counted: inputs,
    activations, masks, half copies of weights. Not counted: the weights themselves, which live anyway.
    """

    def __init__(self):
        super().__init__(self._see)
        self.by_op, self._seen = {}, {}

    @property
    def total(self):
        return sum(self.by_op.values())

    def _see(self, phase, op, inputs, output):
        node = output._node if phase == "forward" else None
        if node is None or node.op is not op or node.saved is FREED:
            return
        kept = [
            value for _, value, counter, _, edge in node.saved if counter is not None and not _is_leaf(edge)
        ]
        kept += [
            value
            for value in node.attrs.values()
            if isinstance(value, np.ndarray) or backends.device.holds(value)
        ]
        for array in kept:
            # A reshape starts at the same address and is the same memory; a slice of the data set is not all of it.
            key, size = backends.block(array)
            if key not in self._seen:
                self._seen[key] = array  # held, so that the address is not given out again meanwhile
                self.by_op[op.name] = self.by_op.get(op.name, 0) + size


def _is_leaf(edge):
    return edge is not None and edge.op is None


class peak_memory:
    """Context manager: `bytes`, the most that a block had allocated at once beside what was there when it began.

    device: 'cpu' counts what Python and NumPy allocate (tracemalloc, which slows small ops several times); 'cuda' counts the
    pool's blocks and waits for the GPU at both ends. One at a time.
    """

    def __init__(self, device="cpu"):
        self.device, self.bytes = backends.Device(device), None

    def __enter__(self):
        if self.device.type == "cpu":
            tracemalloc.start()
        else:
            cuda.synchronize()
            cuda.reset_peak_memory_stats(self.device)
            self._before = cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *_):
        if self.device.type == "cpu":
            self.bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        else:
            cuda.synchronize()
            self.bytes = cuda.max_memory_allocated(self.device) - self._before


# --------------------------------------------------------------------------------------------------------------- gradients


class gradient_histograms(observe):
    """Context manager: histograms of all gradients that a backward inside makes, as `activations` and `weights`.

    Weights are the leaves with requires_grad, each counted once; everything else is an activation (casts are not counted
    again). low, high: the exponents shown, as in exponent_histogram.
    """

    def __init__(self, low=-40, high=16):
        super().__init__(self._see)
        self.low, self.high = low, high
        self.activations = self.weights = exponent_histogram(np.zeros(0), low, high)

    def _see(self, phase, op, inputs, output):
        if phase != "backward":
            return
        _, node, i = inputs
        edge = node.edges[i]
        if _is_leaf(edge):
            self.weights = self.weights + exponent_histogram(output, self.low, self.high)
        elif not op.is_cast and not (edge.op.is_cast and _is_leaf(edge.edges[0])):
            self.activations = self.activations + exponent_histogram(output, self.low, self.high)
