"""Calls: a listener (minamp/announce.py) that notes the calls of the loop in a Trace.

A user's own optimizer or scaler class may define step() anew, which nobody has announced: while the doctor looks, it is.
"""

import math

import numpy as np

from minamp import backends, optim
from minamp.announce import announced, listen
from minamp.autocast import state as autocast_state
from minamp.backends.errors import user_line
from minamp.clinic.patient import listed
from minamp.clinic.trace import Call, Gradient, Value, alike, largest, length
from minamp.formats import widen
from minamp.optimizer import Optimizer
from minamp.quiet import quiet
from minamp.scaler import GradScaler

METHODS = {
    "scaler": (GradScaler, ("scale", "unscale_", "step", "update", "state_dict", "load_state_dict")),
    "optimizer": (Optimizer, ("step", "zero_grad", "state_dict")),
}
# Where a rule compares the gradients of two moments: what these calls have written, and what those were given.
WRITE_GRADIENTS = {"backward", "clip_grad_norm_", "clip_grad_value_"}
READ_GRADIENTS = WRITE_GRADIENTS | {"scaler.unscale_", "scaler.step", "optimizer.step"}


class Calls(listen):
    """Context manager: the calls of the loop that happen inside, as events of `trace`. `patient` names the parameters."""

    def __init__(self, trace, patient):
        self.trace, self.patient, self.step = trace, patient, 0
        self.open = []  # a Call or None for every announced call that is running, outermost first
        self.gradient_arrays, self._held = {}, {}
        self._known = {}  # parameter name -> its Gradient when last looked at
        self.moving = {}  # the half weights as they were after the last backward
        self.unheld = {}  # and of weights that no optimizer holds: name -> (tensor, its array, its gradient)

    def __enter__(self):
        self._replaced = [
            *_announce([self.patient.scaler] if self.patient.scaler else [], "scaler"),
            *_announce(self.patient.optimizers, "optimizer"),
        ]
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for kind, name, method in self._replaced:
            setattr(kind, name, method)
        for held in (self.gradient_arrays, self._held, self.moving, self.unheld):
            held.clear()  # the facts stay, the arrays need not

    def by_hand(self):
        """The half weights that the step has written after backward without an optimizer: as optimizer.step's 'lost'."""
        return _lost({name: w for name, w in self.moving.items() if _is_written(*w)})

    @quiet
    def descents(self):
        """name -> (rate, cosine) of the weights without an optimizer that the step has changed.

        rate: the change's length over the gradient's, cosine: of the angle between the way down the gradient and the change.
        """
        found = {}
        for name, (p, before, gradient) in self.unheld.items():
            change = (before - widen(backends.host(p._data))).ravel()
            moved, size = length(change), length(gradient)
            if change.size > 1 and 0 < moved < math.inf and 0 < size < math.inf:
                found[name] = (moved / size, float(np.dot(change, gradient)) / (moved * size))
        return found

    @property
    def current(self):
        """The innermost call of the loop that is running."""
        return next((call for call in reversed(self.open) if call is not None), None)

    def begin(self, name, arguments):
        """A listener's part: an announced call begins."""
        self.open.append(self._begin(name, arguments))

    def end(self, result):
        """A listener's part: the innermost announced call ends."""
        call = self.open.pop()
        if call is not None:
            self._end(call, result)

    def _begin(self, name, arguments):
        owner = next(iter(arguments.values()))
        if name.startswith("scaler.") and not (
            arguments["enabled"] if name == "scaler.new" else owner.is_enabled()
        ):
            return None
        outer = self.current
        if outer is not None and (outer.name, outer.owner) == (name, id(owner)):
            return None  # super().step(), a nested list in scale()
        optimizer = owner if name.startswith("optimizer.") else arguments.get("optimizer")
        if optimizer is not None:
            self._adopt(optimizer)
        call = Call(
            index=len(self.trace.events),
            step=self.step,
            name=name,
            owner=id(owner),
            line=user_line(),
            region=autocast_state.dtype if autocast_state.enabled else None,
            within=outer,
            before=self.gradients() if name in READ_GRADIENTS else {},
            depth=autocast_state.depth,
        )
        self._held[id(owner)] = owner
        self.trace.add(call)
        call.facts.update(self._facts(name, owner, arguments))
        return call

    def _facts(self, name, owner, arguments):
        """What the rules want to know of a call of that name, beside the gradients."""
        if name in ("scaler.step", "scaler.unscale_"):
            return {"optimizer": id(arguments["optimizer"])}
        if name == "scaler.update":
            return {
                "scale": owner.get_scale(),
                "new_scale": arguments["new_scale"],
                "floor": getattr(owner, "_min_scale", -math.inf),
                "ceiling": getattr(owner, "_max_scale", math.inf),
                "good_steps_before": owner._get_growth_tracker(),
            }
        if name == "scaler.scale":
            return {"scale": owner.get_scale()}
        if name == "scaler.new":
            return {"scale": arguments["init_scale"]}
        if name == "autocast":
            return {"enabled": owner.enabled}
        if name == "Function.apply":
            return {"function": owner}
        if name in ("backward", "grad"):
            facts = {"roots": [self.value_of(x) for x in listed(owner)], "scaler": self.patient.scale}
            if name == "grad":
                names = [self.patient.names.get(id(x)) for x in listed(arguments["inputs"])]
                return {**facts, "inputs": names}
            return {**facts, "versions": self.patient.versions}
        if name == "optimizer.step":
            kind = type(owner).__name__ if type(owner).__module__ == optim.__name__ else "SGD"
            rates = [float(g["lr"]) for g in owner.param_groups] if isinstance(owner, optim.SGD) else []
            return {
                "weights": self.patient.half_weights(id(owner)),
                "kind": kind,
                "closure": arguments.get("closure") is not None,
                "rate": max(rates, default=0.0),
            }
        if name == "save":
            parts = owner.values() if isinstance(owner, dict) else listed(owner)
            several = sum(isinstance(x, dict) for x in parts) > 1  # states in one file
            return {"scaler": _holds_scaler(owner), "whole": several}
        if name.startswith("clip"):
            return {"limit": float(arguments["max_norm" if name == "clip_grad_norm_" else "clip_value"])}
        return {}

    def _adopt(self, optimizer):
        """Take in an optimizer that nobody has handed over."""
        if self.patient.adopt(optimizer):
            self._held[id(optimizer)] = optimizer
            self._replaced += _announce([optimizer], "optimizer")
            self.trace.parameters.update(self.patient.describe())

    def _end(self, call, result):
        if call.name in WRITE_GRADIENTS:
            was, call.after = call.before, self.gradients()
            call.written = {n: g for n, g in call.after.items() if n not in was or was[n].stamp != g.stamp}
        if call.name == "scaler.update":
            scaler = self._held[call.owner]
            call.facts["scale_after"] = scaler.get_scale()
            call.facts["good_steps"] = scaler._get_growth_tracker()
        elif call.name == "optimizer.step":
            call.facts["lost"] = _lost(call.facts.pop("weights"))
        elif call.name == "backward":
            self.moving = self.patient.half_weights()
            self.unheld |= self.patient.unheld({n: self.patient.parameters[n].grad for n in call.written})
        elif call.name == "grad":
            given = dict(zip(call.facts["inputs"], result or (), strict=False))
            self.moving |= self.patient.half_weights(gradients=given)
            self.unheld |= self.patient.unheld(given)

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


class Backwards(listen):
    """Context manager that counts the calls of backward and grad that have begun inside."""

    def __init__(self):
        self.count = 0

    def begin(self, name, arguments):
        self.count += name in ("backward", "grad")

    def end(self, result):
        pass


def _is_written(p, before, _, version):
    """Whether a weight was written: by an op, which counts up its version, or in its memory, as by NumPy."""
    return p._version[0] != version or not np.array_equal(backends.host(p._data), before)


def _holds_scaler(x):
    """Whether what is saved holds the state of a GradScaler, however nested."""
    if isinstance(x, dict):
        return "growth_factor" in x or any(map(_holds_scaler, x.values()))
    return isinstance(x, list | tuple) and any(map(_holds_scaler, x))


def _announce(objects, family):
    """Announce the methods of a loop that users' classes define themselves; (class, name, method) to put back."""
    replaced = []
    for kind in {k for x in objects for k in type(x).__mro__}:
        ours, names = METHODS[family]
        for name in names:
            method = vars(kind).get(name)
            if method is not None and not hasattr(method, "announces"):
                replaced.append((kind, name, method))
                setattr(kind, name, announced(f"{family}.{name}", like=getattr(ours, name))(method))
    return replaced


def _sample(array):
    """About 1,024 values of an array, evenly spread: they differ when somebody has scaled, clipped or replaced it.

    A gradient is asked for before and after every call of the loop; looking at all of it took a third of the doctor's time.
    """
    every = array.size // 1024 | 1
    return backends.host(array if every == 1 else array.reshape(-1)[::every]).tobytes()


def _lost(weights):
    """name -> (weights whose gradient is not 0, those of them that the step left as they were)."""
    found = {}
    for name, (p, before, moving, _) in weights.items():
        count = int(np.count_nonzero(moving))
        if count:
            found[name] = (count, int(np.count_nonzero(moving & alike(p._data, before))))
    return found
