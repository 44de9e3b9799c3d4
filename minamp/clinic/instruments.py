"""What fills a Trace: one observer for the ops, one listener for the calls of the loop (minamp/announce.py).

A user's own optimizer or scaler class may define step() anew, which nobody has announced: while the doctor looks, it is.
"""

import math

import numpy as np

from minamp import backends
from minamp.announce import announced, listeners
from minamp.autocast import state as autocast_state
from minamp.backends.errors import NOT_USERS, place, user_line
from minamp.clinic.trace import Call, Error, Gradient, OpRun, Spoilt, Value, largest, length
from minamp.formats import is_floating, widen
from minamp.function import _Applied
from minamp.record import observe
from minamp.tensor import Tensor

METHODS = {
    "scaler": ("scale", "unscale_", "step", "update", "state_dict"),
    "optimizer": ("step", "zero_grad", "state_dict"),
}
# Whatever else runs inside them, these may leave the gradients other than they were.
WRITE_GRADIENTS = {"backward", "scaler.unscale_", "scaler.step", "clip_grad_norm_", "clip_grad_value_"}
WRITE_GRADIENTS |= {f"optimizer.{name}" for name in METHODS["optimizer"]}


class Calls:
    """Context manager: the calls of the loop that happen inside, as events of `trace`. `patient` names the parameters."""

    def __init__(self, trace, patient):
        self.trace, self.patient, self.step = trace, patient, 0
        self.open = []  # a Call or None for every announced call that is running, outermost first
        self.gradient_arrays, self._held = {}, {}
        self._known = {}  # parameter name -> its Gradient when last looked at
        self.moving = {}  # the half weights as they were after the last backward

    def __enter__(self):
        self._replaced = [
            *_announce([self.patient.scaler] if self.patient.scaler else [], "scaler"),
            *_announce(self.patient.optimizers, "optimizer"),
        ]
        listeners.append(self)
        return self

    def __exit__(self, *_):
        listeners.remove(self)
        for kind, name, method in self._replaced:
            setattr(kind, name, method)
        for held in (self.gradient_arrays, self._held, self.moving):
            held.clear()  # the facts stay, the arrays need not

    def by_hand(self):
        """The half weights that the step has written after backward without an optimizer: as optimizer.step's 'lost'."""
        written = {n: w for n, w in self.moving.items() if w[0]._version[0] != w[3]}
        return _lost(written)

    @property
    def current(self):
        """The innermost call of the loop that is running."""
        return next((call for call in reversed(self.open) if call is not None), None)

    def begin(self, name, arguments):
        """A listener's part: an announced call begins."""
        self.open.append(self._begin(name, arguments))

    def end(self):
        """A listener's part: the innermost announced call ends."""
        call = self.open.pop()
        if call is not None:
            self._end(call)

    def _begin(self, name, arguments):
        owner = next(iter(arguments.values()))
        if name.startswith("scaler.") and not (
            arguments["enabled"] if name == "scaler.new" else owner.is_enabled()
        ):
            return None
        outer = self.current
        if outer is not None and (outer.name, outer.owner) == (name, id(owner)):
            return None  # super().step(), a nested list in scale()
        if name in ("scaler.step", "scaler.unscale_"):
            self._adopt(arguments["optimizer"])
        elif name.startswith("optimizer."):
            self._adopt(owner)
        region = autocast_state.dtype if autocast_state.enabled else None
        before = self.gradients() if name in WRITE_GRADIENTS else {}
        call = Call(len(self.trace.events), self.step, name, id(owner), user_line(), region, outer, before)
        call.depth = autocast_state.depth
        self._held[id(owner)] = owner
        self.trace.add(call)
        if name in ("scaler.step", "scaler.unscale_"):
            call.facts["optimizer"] = id(arguments["optimizer"])
        elif name == "scaler.update":
            floor = getattr(owner, "_min_scale", -math.inf)
            call.facts.update(scale=owner.get_scale(), new_scale=arguments["new_scale"], floor=floor)
            call.facts["good_steps_before"] = owner._get_growth_tracker()
        elif name == "scaler.scale":
            call.facts["scale"] = owner.get_scale()
        elif name == "scaler.new":
            call.facts["scale"] = arguments["init_scale"]
        elif name == "autocast":
            call.facts.update(enabled=owner.enabled)
        elif name == "Function.apply":
            call.facts["function"] = owner
        elif name == "backward":
            call.facts["root"] = self.value_of(owner)
            call.facts["versions"] = {name: p._version[0] for name, p in self.patient.parameters.items()}
        elif name == "grad":
            call.facts["root"] = self.value_of(
                owner[0] if isinstance(owner, list | tuple) and owner else owner
            )
        elif name == "optimizer.step":
            call.facts["weights"] = self.patient.half_weights(id(owner))
        elif name == "save":
            call.facts["scaler"] = _holds_scaler(owner)
            parts = owner.values() if isinstance(owner, dict) else ()
            call.facts["whole"] = sum(isinstance(x, dict) for x in parts) > 1  # several states in one file
        elif name.startswith("clip"):
            call.facts["limit"] = float(arguments["max_norm" if name == "clip_grad_norm_" else "clip_value"])
            if isinstance(owner, list | tuple):
                call.facts["names"] = [self.patient.names.get(id(p)) for p in owner]
        return call

    def _adopt(self, optimizer):
        """Take in an optimizer that nobody has handed over."""
        if self.patient.adopt(optimizer):
            self._held[id(optimizer)] = optimizer
            self._replaced += _announce([optimizer], "optimizer")
            self.trace.parameters.update(self.patient.describe())

    def _end(self, call):
        call.after = self.gradients() if call.name in WRITE_GRADIENTS else call.before
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
                known = self._known.get(name)
                if known is None or known.stamp != stamp:
                    known = self._known[name] = Gradient(g.dtype, largest(g._data), length(g._data), stamp)
                found[name] = known
                self.gradient_arrays[id(g._data)] = name
        return found


class Backwards:
    """Context manager that counts the calls of backward and grad that have begun inside."""

    def __init__(self):
        self.count = 0

    def __enter__(self):
        listeners.append(self)
        return self

    def __exit__(self, *_):
        listeners.remove(self)

    def begin(self, name, arguments):
        self.count += name in ("backward", "grad")

    def end(self):
        pass


def _holds_scaler(x):
    """Whether what is saved holds the state of a GradScaler, however nested."""
    if isinstance(x, dict):
        return "growth_factor" in x or any(map(_holds_scaler, x.values()))
    return isinstance(x, list | tuple) and any(map(_holds_scaler, x))


def _announce(objects, family):
    """Announce the methods of a loop that users' classes define themselves; (class, name, method) to put back."""
    replaced = []
    for kind in {k for x in objects for k in type(x).__mro__}:
        for name in METHODS[family]:
            method = vars(kind).get(name)
            if method is not None and not hasattr(method, "announces"):
                replaced.append((kind, name, method))
                setattr(kind, name, announced(f"{family}.{name}")(method))
    return replaced


def _sample(array):
    """About 1,024 values of an array, evenly spread: they differ when somebody has scaled, clipped or replaced it.

    A gradient is asked for before and after every call of the loop; looking at all of it took a third of the doctor's time.
    """
    flat = array.reshape(-1)
    return backends.host(flat[:: flat.size // 1024 | 1]).tobytes()


def _lost(weights):
    """name -> (weights whose gradient is not 0, those of them that the step left as they were)."""
    found = {}
    for name, (p, before, moving, _) in weights.items():
        count = int(np.count_nonzero(moving))
        if count:
            found[name] = (count, int(np.count_nonzero(moving & (backends.host(p._data) == before))))
    return found


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
        if frame.f_code is _Applied.pull.__code__:
            function = frame.f_locals["self"].cls
        if not frame.f_code.co_filename.startswith(NOT_USERS):
            line = place(frame, at.tb_lineno)
        at = at.tb_next
    return Error(exception, line, function)
