"""Ops: an observer (minamp/record.py) that notes the ops that run in a Trace; and the error with which a step ends."""

import math

import numpy as np

from minamp import backends
from minamp.autocast import state as autocast_state
from minamp.backends.errors import NOT_USERS, place, user_line
from minamp.clinic.trace import Error, OpRun, Spoilt, Value, largest
from minamp.formats import is_floating, widen
from minamp.function import Applied
from minamp.policy import LOWER_PRECISION
from minamp.quiet import quiet
from minamp.record import observe
from minamp.tensor import Tensor


class Ops(observe):
    """Context manager: the forwards that run inside, as events of the trace that `calls` fills."""

    def __init__(self, calls):
        self.calls, self.trace = calls, calls.trace
        self.made = {}  # id of an array -> (array, its Value, the version it had)
        self.nodes = {}  # id of a Node -> (Node, the Value of what it made): an op in place moves its Node
        calls.value_of = self.value_of

    def __exit__(self, *error):
        super().__exit__(*error)
        self.made.clear()  # the facts stay, the arrays need not
        self.nodes.clear()
        del self.calls.value_of

    def see(self, phase, op, inputs, output):
        if phase != "forward":
            if op.policy == LOWER_PRECISION:
                self.trace.pulled.add(inputs[1].dtype)
            return
        node = output._node
        attrs = node.attrs if node is not None and node.op is op else {}
        run = OpRun(
            index=len(self.trace.events),
            step=self.calls.step,
            op=op.name,
            policy=op.policy,
            line=user_line(),
            inputs=[v for v in map(self.value_of, inputs) if v is not None],
            output=self._measure(output),
            attrs={k: v for k, v in attrs.items() if isinstance(v, int | float)},
            region=autocast_state.dtype if autocast_state.enabled else None,
            within=self.calls.current,
        )
        if op.name in ("add", "sub") and any(v.gradient for v in run.tensors):
            run.attrs["alpha"] = _rate(inputs, output)
        run.output.source = run
        run.spoilt = _spoilt(run, inputs, output)
        self.made[id(output._data)] = (output._data, run.output, output._version[0])
        if node is not None:
            self.nodes[id(node)] = node, run.output
        self.trace.add(run)

    def value_of(self, x):
        """The facts of an op's argument, or None if it is neither tensor, array nor number."""
        if isinstance(x, Tensor):
            known = self.made.get(id(x._data))
            if known is None or known[2] != x._version[0]:
                _, written = self.nodes.get(id(x._node), (None, None))
                value = written if known is not None and written is not None else self._measure(x)
                known = self.made[id(x._data)] = (x._data, value, x._version[0])
            value = known[1]
            value.gradient = self.calls.gradient_arrays.get(id(x._data), value.gradient)
            return value
        if isinstance(x, np.ndarray) and x.ndim:
            return Value(x.dtype, x.shape, largest(x))
        if isinstance(x, int | float | np.number | np.ndarray) and not isinstance(x, bool):
            return Value(constant=float(x), largest=abs(float(x)))
        return None

    def _measure(self, x):
        recorded = x.requires_grad
        return Value(
            x.dtype,
            x.shape,
            largest(x._data),
            recorded,
            constant=float(x.item()) if x.numel() == 1 and not recorded else None,
        )


@quiet
def _rate(inputs, output):
    """By how much add or sub has multiplied its second argument: an op without history has no attributes to ask."""
    a, b, y = (backends.host(x._data) if isinstance(x, Tensor) else x for x in (*inputs, output))
    size = largest(widen(b)) if isinstance(b, np.ndarray) else abs(b)
    return largest(widen(y) - (widen(a) if isinstance(a, np.ndarray) else a)) / size if size else 1.0


def _spoilt(run, inputs, output):
    """Where finite inputs gave inf or nan; None if they did not."""
    if math.isfinite(run.output.largest) or not all(math.isfinite(v.largest) for v in run.inputs):
        return None
    y = widen(backends.host(output._data))
    bad = ~np.isfinite(y)
    ranges = []
    for x in inputs:
        array = backends.host(x._data) if isinstance(x, Tensor) else x
        if not isinstance(array, np.ndarray | int | float) or run.is_product:
            continue
        array = np.asarray(array)
        try:
            here = np.broadcast_to(widen(array) if is_floating(array.dtype) else array, y.shape)[bad]
            ranges.append((float(here.min()), float(here.max())))
        except ValueError:
            ranges.append(None)
    kind = "nan" if np.isnan(y[bad]).any() else "-inf" if (y[bad] < 0).all() else "inf"
    return Spoilt(int(bad.sum()), kind, ranges)


def error_of(exception):
    """The facts of an exception that left the step: the user's line, and the Function whose backward it came from."""
    line, function, at = "", None, exception.__traceback__
    while at is not None:
        frame = at.tb_frame
        if frame.f_code is Applied.pull.__code__:
            function = frame.f_locals["self"].cls
        if not frame.f_code.co_filename.startswith(NOT_USERS):
            line = place(frame, at.tb_lineno)
        at = at.tb_next
    return Error(exception, line, function)
