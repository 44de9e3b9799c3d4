"""Patient: what was handed to the doctor, checked, and its parameters under names."""

import math

import numpy as np

from minamp import backends, optim
from minamp.clinic.trace import Parameter, largest, magnitudes, state_shapes
from minamp.formats import cast, float32, float64, is_floating, is_half, widen
from minamp.nn.module import Module
from minamp.tensor import Tensor

UNHELD = (), "nearest"
HALF_ON_PURPOSE = {"compensation"}  # what Kahan summation keeps beside a half weight


class Patient:
    """step, models, optimizers and scaler. TypeError, naming the argument, for what they can't be."""

    def __init__(self, step, model, optimizer, scaler):
        if not callable(step):
            raise TypeError(
                f"doctor: step must be callable without arguments, got {type(step).__name__}: "
                "put one training step into a function and give that"
            )
        self.models, self.optimizers, self.scaler = listed(model), listed(optimizer), scaler
        for m in self.models:
            if not isinstance(m, Module):
                raise TypeError(
                    f"doctor: model must be a Module or a list of Modules, got {type(m).__name__}: give model=model"
                )
        for o in self.optimizers:
            if not callable(getattr(o, "step", None)):
                raise TypeError(
                    f"doctor: optimizer must be an Optimizer or a list of them, got {type(o).__name__}: "
                    "give optimizer=optimizer"
                )
        if scaler is not None and not callable(getattr(scaler, "scale", None)):
            raise TypeError(
                f"doctor: scaler must be a GradScaler or None, got {type(scaler).__name__}: give scaler=scaler; "
                "of several any one, the step leads to the others"
            )
        self.parameters = {}  # name -> tensor
        for i, m in enumerate(self.models):
            for name, p in m.named_parameters():
                self.parameters[self._path(i, name)] = p
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.rounding = {}  # id of a parameter -> (ids of its optimizers, how they bring an update back into a half weight)
        for o in self.optimizers:
            self._enter(o)

    def _enter(self, optimizer):
        for g in _groups(optimizer):
            rule = "master" if g.get("master_weights") else g.get("write_back", "nearest")
            for p in g["params"]:
                holders, _ = self.rounding.get(id(p), UNHELD)
                self.rounding[id(p)] = (*holders, id(optimizer)), rule
                if id(p) not in self.names:
                    self.names[id(p)] = f"parameter {len(self.names)}"
                    self.parameters[self.names[id(p)]] = p

    def adopt(self, optimizer):
        """Take in an optimizer that the step uses and that was not handed over; whether it is a new one."""
        new = not any(optimizer is o for o in self.optimizers)
        if new:
            self.optimizers.append(optimizer)
            self._enter(optimizer)
        return new

    def find_parameters(self, before):
        """Without a model and an optimizer: what the step reaches and wants a gradient."""
        if not self.parameters:
            for path, p in reversed(before.leaves):
                name = path if path not in self.parameters else f"parameter {len(self.names)}"
                self.parameters[name], self.names[id(p)] = p, name

    def _path(self, i, name):
        return name if len(self.models) == 1 else f"model[{i}].{name}"

    @property
    def scaled(self):
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def scale(self):
        """The scale that the scaler has now; 1.0 without one."""
        return self.scaler.get_scale() if self.scaled else 1.0

    @property
    def finite(self):
        """Whether no parameter holds inf or nan now."""
        return all(math.isfinite(largest(p._data)) for p in self.parameters.values())

    @property
    def versions(self):
        """name -> how often the parameter has been written until now."""
        return {name: p._version[0] for name, p in self.parameters.items()}

    def kept(self, before):
        """Whether all parameters are now what they were `before`."""
        return all(before.kept(p._data) for p in self.parameters.values())

    def describe(self):
        """name -> Parameter."""
        found = {}
        for name, p in self.parameters.items():
            if p.requires_grad:
                holders, rule = self.rounding.get(id(p), UNHELD)
                finite = math.isfinite(largest(p._data))
                found[name] = Parameter(name, p.dtype, p.shape, holders, rule == "master", finite)
        return found

    def half_weights(self, optimizer=None, gradients=None):
        """name -> (tensor, its array, where its gradient is not 0, its version) of the half weights rounded to nearest.

        optimizer: its id, None for the weights that no optimizer holds. gradients: by name, if they are not those in .grad.
        """
        found = {}
        for name, p in self.parameters.items():
            holders, rule = self.rounding.get(id(p), UNHELD)
            wanted = optimizer in holders if optimizer is not None else not holders
            g = p.grad if gradients is None else gradients.get(name)
            if wanted and rule == "nearest" and is_half(p.dtype) and g is not None:
                weight, gradient = backends.host(p._data).copy(), backends.host(g._data)
                moving = magnitudes(gradient) != 0 if is_half(gradient.dtype) else gradient != 0
                found[name] = (p, weight, moving, p._version[0])
        return found

    def unheld(self, gradients):
        """name -> (tensor, its array and its gradient, copied in float32), for those of `gradients` that no optimizer holds."""
        found = {}
        for name, g in gradients.items():
            p = self.parameters.get(name)
            if p is not None and g is not None and id(p) not in self.rounding:
                weight, gradient = (backends.host(x._data).astype(np.float32) for x in (p, g))
                found[name] = (p, weight, gradient.ravel())
        return found

    def ill_statistics(self):
        """name -> (number of bad values, version) of the running statistics that hold inf or nan.

        In a buffer under another name, of a layer of the user's own, nan alone is bad: a mask is full of infinities.
        """
        found = {}
        for i, model in enumerate(self.models):
            for name, buffer in model.named_buffers():
                if is_floating(buffer.dtype):
                    values = backends.widen(backends.host(buffer._data))
                    bad = int((~np.isfinite(values) if _is_running(name) else np.isnan(values)).sum())
                    if bad:
                        found[self._path(i, name)] = (bad, buffer._version[0])
        return found

    def still_ill(self, before):
        """(name, number of bad values) of those in `before`, the ill statistics of an earlier moment, that training won't heal.

        What a layer of the user's own averages stays ill; a nan that only holds a place goes, or is not written.
        """
        now = {name: version for name, (_, version) in self.ill_statistics().items()} if before else {}
        return [
            (name, bad)
            for name, (bad, version) in before.items()
            if _is_running(name) or now.get(name, version) != version
        ]

    def half_state(self, before):
        """(where, dtype) of second moments in half: what changed, has a parameter's shape and no negative value."""
        shapes = state_shapes(self.parameters.values())
        mine = {id(p._data) for p in self.parameters.values()}
        mine |= {id(b._data) for m in self.models for b in m.buffers()}

        def fits(array):
            return is_half(array.dtype) and array.shape in shapes and id(array) not in mine

        found = []
        for o in self.optimizers:
            for p, buffers in getattr(o, "state", {}).items():
                for name, value in buffers.items() if isinstance(buffers, dict) else ():
                    if isinstance(value, Tensor) and name not in HALF_ON_PURPOSE and fits(value._data):
                        found.append((f"{name} of {self.names.get(id(p), 'a parameter')}", value._data))
        # Weights that no optimizer of ours updates may have their moments anywhere; else the walk is not worth its time.
        ours = {id(o) for o in self.optimizers if type(o).__module__ == optim.__name__}
        if any(ours.isdisjoint(self.rounding.get(id(p), UNHELD)[0]) for p in self.parameters.values()):
            found += before.changed(lambda path, a: ".grad" not in path and fits(a))
        return [(path, a.dtype) for path, a in found if (backends.host(a) >= 0).all() and (a != 0).any()]

    def masters(self, before):
        """Names of the half weights of which the user keeps more than they hold.

        In a wider format: what changed there, rounded, is the weight. Or in half beside it: what rounding has taken.
        """
        half = {n: backends.host(p._data) for n, p in self.parameters.items() if is_half(p.dtype)}
        shapes, total = state_shapes(half.values()), sum(w.size for w in half.values())
        mine = {id(p._data) for p in self.parameters.values()}

        def fits(path, a):
            kept = (
                a.dtype in (float32, float64)
                or is_half(a.dtype)
                and id(a) not in mine
                and ".grad" not in path
            )
            return kept and (a.shape in shapes or a.ndim == 1 and a.size > total)  # one vector may be padded

        kept = [backends.host(a) for _, a in before.changed(fits)]
        kept = [part for a in kept for part in (a, *_parts(a, list(half.values())))]
        return {n for n, w in half.items() if any(_holds_more(a, w) for a in kept)}


def _parts(array, weights):
    """What one vector of all weights holds for each of them; nothing if it is none."""
    ends = np.cumsum([w.size for w in weights])
    if array.ndim != 1 or array.size < ends[-1]:
        return []
    return [part.reshape(w.shape) for part, w in zip(np.split(array, ends), weights, strict=False)]


def _holds_more(kept, half):
    """Whether an array of the shape of half weights, rounded, is them, or is what rounding them has taken."""
    if kept.shape != half.shape:
        return False
    return _is_rest(kept, half) if is_half(kept.dtype) else _rounds_to(kept, half)


def _is_rest(rest, half):
    """Whether a half array is nowhere more than half the distance from a weight to its next number, and not all 0."""
    rest, distance = np.abs(widen(rest)), widen(np.spacing(np.abs(half)))
    return bool(rest.any()) and bool((rest <= 0.51 * distance).all())


def _rounds_to(wide, half):
    """Whether an array, rounded, is the half one, and holds more than that."""
    return np.array_equal(cast(wide, half.dtype), half) and not np.array_equal(wide, widen(half))


def _is_running(name):
    """Whether a buffer has the name of BatchNorm's statistics."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def listed(x):
    """One or several as a list; of None none."""
    return [] if x is None else list(x) if isinstance(x, list | tuple) else [x]


def _groups(optimizer):
    return getattr(optimizer, "param_groups", ())
