"""The first bad op: which op turned finite values into inf or nan, and which limit was passed."""

import math
from dataclasses import dataclass

import numpy as np

from minamp.formats import format_of, is_floating, neighbours
from minamp.op import LOWER_PRECISION
from minamp.record import FREED, observe
from minamp.tensor import Tensor
from minamp.watch.numbers import as_array


def _finite(x):
    return bool(np.isfinite(x).all())


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
        self.found, self._given = None, None

    def see(self, phase, op, inputs, output):
        if self.found is not None:
            return
        y = as_array(output)
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
            argument, dtype = op._names(node.metas)[i], node.metas[i][1]
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


def _forward_inputs(op, args):
    numbers = [
        (name, a)
        for name, a in zip(op._names(args), args, strict=True)
        if isinstance(a, Tensor | float | int) and not isinstance(a, bool)
    ]
    # indices and masks only where there is nothing else, as in the log of an integer
    floating = [(name, a) for name, a in numbers if not isinstance(a, Tensor) or is_floating(a.dtype)]
    return [(name, as_array(a)) for name, a in floating or numbers]


def _backward_inputs(op, g, node, i):
    arrived = g if isinstance(g, tuple) else (g,)
    named = [("incoming gradient", as_array(x)) for x in arrived if x is not None]
    names = op._names(node.metas)
    for position, value, counter, *_ in node.saved if node.saved is not FREED else ():
        if counter is not None and is_floating(value.dtype):
            named.append(("output" if position < 0 else names[position], as_array(value)))
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
