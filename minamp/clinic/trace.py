"""Trace: what happened in a training step, as plain facts in their order. Nothing here judges; the rules do.

Two kinds of events stand in `events`: `OpRun`, an op's forward, and `Call`, a call of something that belongs to the loop -
backward, scaler.step, optimizer.step, zero_grad, clipping, saving. calls.py and ops.py record them.
"""

import functools
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from minamp import backends
from minamp.formats import float16, float32, float64, is_floating, is_half, widen
from minamp.policy import LOWER_PRECISION
from minamp.quiet import Quietly

_quietly = Quietly()


@dataclass(eq=False)
class Value:
    """A tensor or number that an op was given or has made."""

    dtype: np.dtype | None = None  # None for a plain number
    shape: tuple = ()
    largest: float = 0.0  # the largest magnitude: inf or nan if there is one
    recorded: bool = False  # leads back to something that wants a gradient
    constant: float | None = None  # the value, if it is a number or one element without history
    gradient: str | None = None  # the parameter whose .grad it is
    source: "OpRun | None" = None  # the op that made it, if that ran under observation

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def half(self):
        return self.dtype is not None and is_half(self.dtype)

    @property
    def floating(self):
        return self.dtype is not None and is_floating(self.dtype)


@dataclass(eq=False)
class Spoilt:
    """The places where an op made inf or nan of finite inputs."""

    count: int
    kind: str  # 'inf', '-inf' or 'nan'
    ranges: list  # per input: (lowest, highest) of its values there; None where shapes don't match


@dataclass(eq=False)
class OpRun:
    """One forward of one op."""

    index: int
    step: int  # which call of the user's step
    op: str
    policy: str
    line: str  # the user's line
    inputs: list
    output: Value
    attrs: dict  # those that are numbers
    region: np.dtype | None  # the dtype of the autocast region it ran in
    within: "Call | None"  # the tracked call it ran in
    spoilt: Spoilt | None = None

    @property
    def tensors(self):
        return [v for v in self.inputs if v.dtype is not None]

    @property
    def constants(self):
        return [v.constant for v in self.inputs if v.constant is not None]

    @property
    def is_product(self):
        """A matmul or a convolution, by policy."""
        return self.policy == LOWER_PRECISION

    def inside(self, name):
        return self.within is not None and self.within.inside(name)

    def ancestors(self, stop=None, limit=200):
        """The ops its inputs come from, nearest first; not beyond those for which stop(op) holds."""
        seen, queue = set(), [v.source for v in self.inputs]
        while queue and len(seen) < limit:
            run = queue.pop(0)
            if run is None or run in seen:
                continue
            seen.add(run)
            yield run
            if stop is None or not stop(run):
                queue.extend(v.source for v in run.inputs)


@dataclass(eq=False)
class Gradient:
    """A parameter's gradient at one moment."""

    dtype: np.dtype
    largest: float
    length: float  # its 2-norm
    stamp: tuple  # changes whenever the gradient is written or replaced


@dataclass(eq=False)
class Call:
    """One call of something that belongs to the loop, such as 'scaler.step'."""

    index: int
    step: int
    name: str
    owner: int  # id of the scaler, optimizer or model
    line: str
    region: np.dtype | None
    within: "Call | None"
    # parameter name -> Gradient, for calls that may write gradients
    before: dict = field(default_factory=dict)
    after: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    depth: int = 0  # of autocast regions, also of those that are switched off
    written: dict = field(
        default_factory=dict
    )  # of `after`, once the call has ended: the gradients that it wrote

    def inside(self, name):
        call = self
        while call is not None:
            if call.name == name:
                return True
            call = call.within
        return False


@dataclass(eq=False)
class Parameter:
    """A trained tensor, as it was before the first step."""

    name: str
    dtype: np.dtype
    shape: tuple
    optimizers: tuple = ()  # ids of those that hold it: an optimizer may have another inside
    master: bool = False
    finite: bool = True


@dataclass(eq=False)
class Trace:
    """All facts of all observed calls of the step."""

    events: list = field(default_factory=list)
    ops: list = field(default_factory=list)  # of the events, the OpRuns
    _calls: dict = field(default_factory=lambda: defaultdict(list))  # and the Calls, by name
    _asked: dict = field(default_factory=dict)  # names -> the Calls of those names until now
    parameters: dict = field(default_factory=dict)  # name -> Parameter
    # (name, number of bad values) of the running statistics that hold inf or nan for good
    batch_norms: list = field(default_factory=list)
    # ids of the scalers that scaled a loss and were not there before
    scalers_made: set = field(default_factory=set)
    # updates without an optimizer: as a Call's facts['lost']
    lost_by_hand: dict = field(default_factory=dict)
    # dtypes of the matmuls and convolutions that gradients came through
    pulled: set = field(default_factory=set)
    spoils: bool = False  # whether a parameter holds inf or nan after the first call
    versions: dict = field(default_factory=dict)  # parameter name -> how often it had been written at the end
    # names of the half weights that the user keeps in a wider format as well
    masters: set = field(default_factory=set)
    # name -> (rate, cosine) of what changed the weights without an optimizer
    descents: dict = field(default_factory=dict)
    # ids of the optimizers that step on gradients that are not finite, where it had to be tried
    heedless: set = field(default_factory=set)
    # and the ops that hide from the scaler that they are not
    healers: list = field(default_factory=list)
    half_state: list = field(default_factory=list)  # (where, dtype) of second moments kept in half
    error: "Error | None" = None
    reference: object = None  # advice.Reference: the float32 run
    readings: dict = field(default_factory=dict)  # what rules have read from all this and will read again

    def add(self, event):
        """The OpRun or Call that just began."""
        self.events.append(event)
        if isinstance(event, OpRun):
            self.ops.append(event)
        else:
            self._calls[event.name].append(event)
            self._asked.clear()

    def calls(self, *names):
        """The Calls of that name or those names until now, in their order: the rules ask 90 times, mostly the same."""
        found = self._asked.get(names)
        if found is None:
            found = itertools.chain(*(self._calls[n] for n in names if n in self._calls))
            found = tuple(found if len(names) == 1 else sorted(found, key=lambda c: c.index))
            self._asked[names] = found
        return found

    def between(self, a, b):
        return self.events[a.index + 1 : b.index]

    @property
    def repeats(self):
        """Whether the second call, in float32, made the calls of the first at the same lines, and but for casts its ops."""
        calls = ([], [])
        for event in self.events:
            within = event.within
            # custom_fwd and custom_bwd open their own regions, and not where autocast is off
            own = isinstance(event, Call) and event.name == "autocast" and within is not None
            # whether scaler.step makes the optimizer's step depends on the numbers
            decided = within is not None and within.inside("scaler.step")
            if isinstance(event, Call) and not own and not decided:
                calls[event.step].append((event.name, event.line, event.depth, event.facts.get("enabled")))
        first = [run.op for run in self.ops if run.op != "to"]
        return calls[0] == calls[1] and first == [name for name in self.reference.ops if name != "to"]

    @property
    def halves(self):
        """(op, whether it was given a half tensor, whether it made one) of the first call's forwards but casts; () of no half."""
        if not any(run.is_product and run.output.half and run.output.recorded for run in self.ops):
            return ()
        plain = [run for run in self.ops if run.step == 0 and run.op != "to"]
        return [(run.op, any(v.half for v in run.tensors), run.output.half) for run in plain]

    @property
    def loses(self):
        """Whether an update has left half weights as they were."""
        steps = (call.facts.get("lost", {}) for call in self.calls("optimizer.step"))
        return any(still for lost in (self.lost_by_hand, *steps) for _, still in lost.values())

    @property
    def scaled(self):
        """Whether an enabled GradScaler scaled a loss."""
        return bool(self.calls("scaler.scale"))

    @property
    def in_float16(self):
        """Whether a matmul or convolution of the training was float16."""
        return any(r.is_product and r.output.recorded and r.output.dtype == float16 for r in self.ops)

    def leads_to_a_loss(self, run):
        """Whether a backward or grad starts from what comes of an op, as it does not from what is only logged.

        True where that is not known: inside a Function or a backward, and where an error has ended the step.
        """
        unknown = self.error is not None or run.inside("Function.apply") or run.inside("backward")
        return unknown or run in self._under_losses

    def trains(self, run):
        """Whether an op leads to a loss, or takes what comes of a gradient: no metric."""
        near = (run, *run.ancestors(limit=20))
        return self.leads_to_a_loss(run) or any(v.gradient for r in near for v in r.inputs)

    @functools.cached_property
    def _under_losses(self):
        found, queue = set(), [v.source for c in self.calls("backward", "grad") for v in c.facts["roots"]]
        while queue:
            run = queue.pop()
            if run is not None and run not in found:
                found.add(run)
                queue += [v.source for v in run.inputs]
        return found

    def held_by(self, optimizer):
        """The names of the parameters that an optimizer (its id) holds; None if none of ours."""
        return [n for n, p in self.parameters.items() if optimizer in p.optimizers] or None

    @property
    def unheld(self):
        """The names of the parameters that no optimizer holds that the step uses, but to clear gradients."""
        asked = {c.facts["optimizer"] for c in self.calls("scaler.step", "scaler.unscale_")}
        used = asked.union(c.owner for c in self.calls("optimizer.step"))
        return {n for n, p in self.parameters.items() if used.isdisjoint(p.optimizers)}

    def last_backward(self, before, names=None):
        """The last backward before an event, of those that wrote the gradient of one of `names`."""
        for c in reversed(self.calls("backward")):
            if c.index < before.index and (names is None or not c.written.keys().isdisjoint(names)):
                return c
        return None

    def fails_with(self, kind, *texts):
        """Whether the step raised an error of that kind with one of the texts in its message."""
        return self.error is not None and self.error.kind == kind and any(t in self.error.text for t in texts)


@dataclass(eq=False)
class Error:
    """The exception with which a step ended."""

    exception: Exception
    line: str
    function: type | None  # the autograd.Function in whose backward it was raised

    @property
    def kind(self):
        return type(self.exception).__name__

    @property
    def text(self):
        return str(self.exception)


def state_shapes(parameters):
    """The shapes that an optimizer's state has: those of the parameters, and that of all of them in one vector."""
    shapes = [p.shape for p in parameters]
    return {*shapes, (sum(map(math.prod, shapes)),)}


_MAGNITUDE = np.array(0x7FFF, np.int16)  # all bits of a half but the sign


def magnitudes(half):
    """Half values without their sign, as int16: in the order of the values, 0 for 0, above all others those of inf and nan.

    NumPy compares integers 60 times faster than halves.
    """
    return backends.host(half).view(np.int16) & _MAGNITUDE


def alike(a, b):
    """Where two half arrays of one dtype hold the same number; a nan is none."""
    x, y = (backends.host(half).view(np.int16) for half in (a, b))
    zeros = magnitudes(x | y) == 0  # 0 and -0
    return (x == y) & (magnitudes(a) <= magnitudes(np.array(np.inf, a.dtype))) | zeros


def largest(array):
    """The largest magnitude in an array: inf if there is one, nan if there is one; 0.0 for an empty or whole-number array.

    1 us for a few values, 4 for 50,000.
    """
    array = backends.host(array)
    if not array.size:
        return 0.0
    flat = array.ravel("K")  # of a permuted array a view too, where reshape copies
    if array.dtype in (float32, float64):
        return abs(
            max(flat.item(flat.argmax()), -flat.item(flat.argmin()))
        )  # argmax finds nan before all else
    if is_half(array.dtype):
        return abs(float(flat[magnitudes(flat).argmax()]))
    return 0.0


def length(array):
    """The 2-norm of an array, right to six digits; inf where a square overflows float32."""
    flat = widen(backends.host(array)).ravel("K")
    return math.sqrt(_quietly.run(np.dot, flat, flat))
