"""What fills a Trace: one observer for the ops, one profile hook for the calls of the loop.

The hook (sys.setprofile) sees every Python call of this thread and knows the interesting ones by their code. So nothing is
wrapped or replaced, and it does not matter by which name the user holds a function, or which subclass overrides it.
"""

import inspect
import math
import sys

import numpy as np

from minamp import backends
from minamp.autocast import autocast
from minamp.autocast import state as autocast_state
from minamp.autograd import grad
from minamp.backends.errors import NOT_USERS, place, user_line
from minamp.checkpoint import save
from minamp.clinic.trace import Call, Error, Gradient, OpRun, Spoilt, Value, largest
from minamp.formats import is_floating, widen
from minamp.function import Function, _Applied
from minamp.nn.module import Module
from minamp.nn.utils import clip_grad_norm_, clip_grad_value_
from minamp.optim import Optimizer
from minamp.record import observe
from minamp.scaler import GradScaler
from minamp.tensor import Tensor


def _code(function):
    return getattr(inspect.unwrap(function), "__code__", None)


class Calls:
    """Context manager: the calls of the loop that happen inside, as events of `trace`. `patient` names the parameters."""

    def __init__(self, trace, patient):
        self.trace, self.patient, self.step = trace, patient, 0
        self.open = []  # (frame, Call or None) of the tracked calls that are running, outermost first
        self.gradient_arrays, self._held = {}, {}
        self._sizes = {}  # a gradient's stamp -> its largest magnitude
        self.moving = {}  # the half weights as they were after the last backward
        self.table = {
            _code(GradScaler.__init__): "scaler.new",
            _code(Tensor.backward): "backward",
            _code(Module.state_dict): "model.state_dict",
            _code(clip_grad_norm_): "clip_grad_norm_",
            _code(clip_grad_value_): "clip_grad_value_",
            _code(autocast.__enter__): "autocast",
            _code(Function.apply.__func__): "Function.apply",
            _code(save): "save",
            _code(grad): "grad",
        }
        scalers = {GradScaler, *(type(s) for s in [patient.scaler] if s is not None)}
        for kind in scalers:
            for name in ("scale", "unscale_", "step", "update", "state_dict"):
                self._track(kind, name, f"scaler.{name}")
        for kind in {Optimizer, *(type(o) for o in patient.optimizers)}:
            for name in ("step", "zero_grad", "state_dict"):
                self._track(kind, name, f"optimizer.{name}")

    def _track(self, kind, name, event):
        code = _code(getattr(kind, name, None)) if hasattr(kind, name) else None
        if code is not None:
            self.table[code] = event

    def __enter__(self):
        self.outer = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_):
        sys.setprofile(self.outer)

    def by_hand(self):
        """The half weights that the step has written after backward without an optimizer: as optimizer.step's 'lost'."""
        written = {n: w for n, w in self.moving.items() if w[0]._version[0] != w[3]}
        return _lost(written)

    @property
    def current(self):
        """The innermost tracked call that is running."""
        return next((call for _, call in reversed(self.open) if call is not None), None)

    def _see(self, frame, event, _):
        if event == "call":
            name = self.table.get(frame.f_code)
            if name is not None:
                self.open.append((frame, self._begin(name, frame)))
        elif event == "return" and self.open and self.open[-1][0] is frame:
            _, call = self.open.pop()
            if call is not None:
                self._end(call, frame)

    def _begin(self, name, frame):
        code = frame.f_code
        args = [frame.f_locals[n] for n in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        owner = args[0]
        if name.startswith("scaler.") and not _enabled(owner, name, frame):
            return None
        outer = self.current
        if outer is not None and (outer.name, outer.owner) == (name, id(owner)):
            return None  # super().step(), a nested list in scale()
        region = autocast_state.dtype if autocast_state.enabled else None
        call = Call(
            len(self.trace.events), self.step, name, id(owner), user_line(), region, outer, self.gradients()
        )
        self._held[id(owner)] = owner
        self.trace.events.append(call)
        if name in ("scaler.step", "scaler.unscale_"):
            call.facts["optimizer"] = id(args[1])
        elif name == "scaler.update":
            floor = getattr(owner, "_min_scale", -math.inf)
            call.facts.update(scale=owner.get_scale(), new_scale=args[1], floor=floor)
        elif name == "scaler.new":
            call.facts["scale"] = frame.f_locals["init_scale"]
        elif name == "autocast":
            call.facts.update(enabled=owner.enabled)
        elif name == "Function.apply":
            call.facts["function"] = owner
        elif name == "backward":
            call.facts["root"] = self.value_of(owner)
        elif name == "optimizer.step":
            call.facts["weights"] = self.patient.half_weights(id(owner))
        elif name.startswith("clip") and isinstance(owner, list | tuple):
            call.facts["names"] = [self.patient.names.get(id(p)) for p in owner]
        return call

    def _end(self, call, frame):
        call.after = self.gradients()
        if call.name == "scaler.update":
            scaler = self._held[call.owner]
            call.facts["scale_after"] = scaler.get_scale()
            call.facts["good_steps"] = scaler._get_growth_tracker()
        elif call.name == "optimizer.step":
            call.facts["lost"] = _lost(call.facts.pop("weights"))
        elif call.name == "backward":
            self.moving = self.patient.half_weights()

    def value_of(self, tensor):
        """A tensor's facts; Ops, which knows where it comes from, puts its own in place."""
        return Value(tensor.dtype, tensor.shape, largest(tensor._data), tensor.requires_grad)

    def gradients(self):
        """Parameter name -> Gradient: of the master where step() will use that one."""
        found, self.gradient_arrays = {}, {}
        for name, p in self.patient.parameters.items():
            master = getattr(p, "master", None)
            g = p._grad if master is None or master._grad is None else master._grad
            if g is not None:
                self._held[id(g)] = g
                stamp = (id(g), g._version[0], _sample(g._data))
                size = self._sizes.get(stamp)
                if size is None:
                    size = self._sizes[stamp] = largest(g._data)
                found[name] = Gradient(g.dtype, size, stamp)
                self.gradient_arrays[id(g._data)] = name
        return found


def _enabled(scaler, name, frame):
    return frame.f_locals.get("enabled", True) if name == "scaler.new" else scaler.is_enabled()


def _sample(array):
    """About 4,096 values of an array, evenly spread: they differ when somebody has scaled, clipped or replaced it.

    A gradient is asked for before and after every call of the loop; looking at all of it took a third of the doctor's time.
    """
    flat = array.reshape(-1)
    return backends.host(flat[:: flat.size // 4096 | 1]).tobytes()


def _lost(weights):
    """name -> (weights whose gradient is not 0, those of them that the step left as they were)."""
    found = {}
    for name, (p, before, moving, _) in weights.items():
        count = int(np.count_nonzero(moving))
        if count:
            found[name] = (count, int(np.count_nonzero(moving & (backends.host(p._data) == before))))
    return found


class Ops(observe):
    """Context manager: the forwards that run inside, as events of the trace that `calls` fills.

    ranges=False: without the magnitudes, which cost a pass over every array.
    """

    def __init__(self, calls, ranges=True):
        super().__init__(self._see)
        self.calls, self.trace, self.ranges = calls, calls.trace, ranges
        self.made = {}  # id of an array -> (array, its Value, the version it had)
        calls.value_of = self.value_of

    def _see(self, phase, op, inputs, output):
        if phase != "forward":
            return
        node = output._node
        attrs = node.attrs if node is not None and node.op is op else {}
        run = OpRun(
            index=len(self.trace.events),
            step=self.calls.step,
            op=op.name,
            policy=getattr(op, "policy", "Function"),
            line=user_line(),
            inputs=[v for v in map(self.value_of, inputs) if v is not None],
            output=self._measure(output),
            attrs={k: v for k, v in attrs.items() if isinstance(v, int | float)},
            region=autocast_state.dtype if autocast_state.enabled else None,
            within=self.calls.current,
        )
        run.output.source = run
        run.spoilt = _spoilt(run, inputs, output) if self.ranges else None
        self.made[id(output._data)] = (output._data, run.output, output._version[0])
        self.trace.events.append(run)

    def value_of(self, x):
        """The facts of an op's argument, or None if it is neither tensor, array nor number."""
        if isinstance(x, Tensor):
            known = self.made.get(id(x._data))
            if known is None or known[2] != x._version[0]:
                known = self.made[id(x._data)] = (x._data, self._measure(x), x._version[0])
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
            largest(x._data) if self.ranges else 0.0,
            recorded,
            trained=recorded and x.is_leaf,
            constant=float(x.item()) if x.numel() == 1 and not recorded else None,
        )


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
        if frame.f_code is _code(_Applied.pull):
            function = frame.f_locals["self"].cls
        if not frame.f_code.co_filename.startswith(NOT_USERS):
            line = place(frame, at.tb_lineno)
        at = at.tb_next
    return Error(exception, line, function)
