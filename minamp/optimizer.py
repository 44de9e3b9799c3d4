"""Optimizer: what SGD, Adam and RMSprop share. Parameter groups, the step through batches of weights, saving and loading."""

import math
from collections import defaultdict

import numpy as np

from minamp import backends, weights
from minamp.announce import announced
from minamp.arguments import check_number
from minamp.batch import Batch
from minamp.devices import same_device
from minamp.draw import generator
from minamp.formats import float32, float64
from minamp.nn.module import zero_grad
from minamp.quiet import quiet
from minamp.record import enable_grad
from minamp.tensor import Tensor


class Optimizer:
    """Base class: parameter groups, state, the float32 arithmetic of half weights; subclasses write _update.

    params: an iterable of Tensors, or of dicts with 'params' and that group's own options. ValueError for an
    empty list, a tensor that is not a leaf, or one listed twice; TypeError for what is not a Tensor, or one of integers
    or of float8, which no update fits.
    """

    def __init__(self, params, defaults):
        if isinstance(params, Tensor | set):
            raise TypeError(
                f"{self._name}: params must be a list of Tensors or of dicts, got a {type(params).__name__}: use [tensor]"
            )
        self.defaults = defaults
        self.param_groups = []
        self.state = defaultdict(dict)  # parameter -> its buffers by name
        self._generator = None
        try:
            groups = list(params)
        except TypeError:
            kind = type(params).__name__
            raise TypeError(
                f"{self._name}: params must be a list of Tensors, got a {kind}: use model.parameters()"
            ) from None
        if not groups:
            raise ValueError(f"{self._name}: got an empty parameter list: give it model.parameters()")
        for group in groups if isinstance(groups[0], dict) else [{"params": groups}]:
            self.add_param_group(group)

    _name = property(lambda self: type(self).__name__)
    _numbers = ()  # the options that must be finite numbers; what a user's own optimizer takes is its own affair

    def add_param_group(self, param_group):
        """Add a dict with 'params' and, if they differ from the defaults, its own options."""
        if not isinstance(param_group, dict):
            raise TypeError(
                f"{self._name}: a parameter group must be a dict, got {type(param_group).__name__}"
            )
        if "params" not in param_group:
            raise ValueError(f"{self._name}: a parameter group needs 'params', this one has {[*param_group]}")
        params = param_group["params"]
        if isinstance(params, set):
            raise TypeError(f"{self._name}: params must have an order, a set has none: use a list")
        params = [params] if isinstance(params, Tensor) else list(params)
        known = {id(p): f"group {i}" for i, group in enumerate(self.param_groups) for p in group["params"]}
        for i, p in enumerate(params):
            where = f"parameter {i} of group {len(self.param_groups)}"
            if not isinstance(p, Tensor):
                raise TypeError(f"{self._name}: {where} must be a Tensor, got {type(p).__name__}")
            weights.check_format(f"{self._name}: {where}", p)
            if not p.is_leaf:
                raise ValueError(
                    f"{self._name}: {where}, shape {p.shape}, was made by {p._node.op.name} and can't be trained: use a leaf"
                )
            if id(p) in known:
                raise ValueError(
                    f"{self._name}: {where}, shape {p.shape}, is in {known[id(p)]} already: list it once"
                )
            known[id(p)] = "this group"
        group = {"params": params, **{k: v for k, v in param_group.items() if k != "params"}}
        for option, value in self.defaults.items():
            group.setdefault(option, value)
        self._check_options(group)
        self.param_groups.append(group)

    def _check_options(self, group):
        """TypeError or ValueError for an option of a group that can't be."""
        for option in self._numbers:
            check_number(self._name, option, group[option])
        weights.check(self._name, group)
        self._check(group)
        for option in self._numbers:
            self._require(group, option, math.isfinite(group[option]), "finite")

    def _check(self, group):
        """Raise ValueError for an option out of its range."""

    def _require(self, group, option, ok, range_text):
        if not ok:
            raise ValueError(f"{self._name}: {option} must be {range_text}, got {group[option]!r}")

    @announced("optimizer.zero_grad")
    def zero_grad(self, set_to_none=True):
        """Drop the gradients of all parameters and of their masters, or write zeros."""
        for group in self.param_groups:
            for p in group["params"]:
                zero_grad(p, set_to_none)

    # -- the step

    @announced("optimizer.step")
    @quiet
    def step(self, closure=None):
        """Update every parameter that has a gradient. Returns closure()'s loss, or True: the step was made.

        closure: recomputes loss and gradients; called first, with gradients on. RuntimeError, and no weight is
        written, for a gradient or buffer that no longer fits its parameter, or a parameter that can't be written.
        """
        result = True
        if closure is not None:
            with enable_grad():
                result = closure()
        with backends.guard(f"{self._name}.step"):
            groups = [(group, self._stored(group)) for group in self.param_groups]
            owners = iter(weights.owners([w for _, stored in groups for w in stored], stepping=True))
            batches = [(batch, g) for g, stored in groups for batch in self._batches(g, stored, owners)]
            # All memory is asked for before the first weight is written: a GPU without enough of it changes nothing.
            for batch, group in batches:
                batch.prepare(self._buffer_names(group), self._counts(group))
            for batch, group in batches:
                self._update(batch, group)
                for weight, w in zip(batch.weights, batch.ws, strict=True):
                    weight.write(w)
        return result

    def _stored(self, group):
        return [weights.of(p, group, self) for p in group["params"]]

    def _batches(self, group, stored, owners):
        """The weights of a group that have a gradient, in Batches."""
        batches, names = {}, self._buffer_names(group)
        for weight, owner in zip(stored, owners, strict=False):  # owners goes on with the next group's
            if owner.grad is None:
                continue
            p, state = weight.p, self.state[weight.p]
            self._check_fit(p, owner.grad, state, names)
            w, half = weight.read(), weight.half()
            m = backends.of(w)
            on_gpu = m.name == "cuda" and bool(group.get("capturable"))
            key = (m, w.dtype, half is not None and half.dtype, on_gpu or self._stage(state))
            if key not in batches:
                weights.check_format(f"{self._name}.step: a parameter", p)
                flag = getattr(self, "found_inf", None)  # GradScaler's, there during its step
                batches[key] = Batch(m, on_gpu and {"skip": None if flag is None else flag._data})
            batches[key].add(weight, w, owner.grad._data, half, state)
        return batches.values()

    def _check_fit(self, p, grad, state, names):
        """RuntimeError for a parameter whose data was exchanged for what its update does not fit."""
        weights.check_shape("gradient", grad, p, "call zero_grad() before backward()")
        if backends.of(grad._data) is not backends.of(p._data):
            same_device(f"{self._name}.step", parameter=p, gradient=grad)
        for name in names:
            if name in state:
                weights.check_shape(name, state[name], p, "build a new optimizer")
        if not getattr(p._data.flags, "writeable", True):  # a GPU's arrays all are
            raise RuntimeError(
                f"{self._name}.step: a {p.dtype} parameter of shape {p.shape} is read-only: set p.data = p.data.clone()"
            )

    def _stage(self, state):
        """What the tensors of one batch have in common: whether, or how often, they were updated before."""

    def _buffer_names(self, group):
        """The buffers that _update will ask its batch for."""
        return ()

    def _counts(self, group):
        """Whether _update asks its batch for the number of the step."""
        return False

    def _update(self, batch, group):
        raise NotImplementedError(f"{self._name} has no _update(batch, group): define it")

    @property
    def _reads_found_inf(self):
        """Whether a step can be left out without anybody but the GPU knowing."""
        return all(group.get("capturable") for group in self.param_groups)

    def master_params(self):
        """Per parameter, the tensor whose .grad step() uses: the float32 master of a half weight, or itself.

        A master's gradient is the half gradient, widened once. There GradScaler unscales and clip_grad_norm_
        clips, in float32, so that small gradients keep their digits; zero_grad() and step() drop it.
        """
        return iter(weights.owners([w for group in self.param_groups for w in self._stored(group)]))

    @property
    def generator(self):
        """What write_back='stochastic' draws from; seeded once, from minamp.manual_seed's generator."""
        if self._generator is None:
            self._generator = np.random.default_rng(generator().integers(2**63))
        return self._generator

    # -- saving and loading

    @announced("optimizer.state_dict")
    def state_dict(self):
        """{'state': {index: buffers}, 'param_groups': [options, 'params' as indices]}; shares memory.

        With stochastic write-back also 'generator', where its random numbers stand, None before the first.
        """
        index, groups = {}, []
        for group in self.param_groups:
            for p in group["params"]:
                index[id(p)] = len(index)
            groups.append({**group, "params": [index[id(p)] for p in group["params"]]})
        state = {
            index[id(p)]: {k: v.detach() if isinstance(v, Tensor) else v for k, v in buffers.items()}
            for p, buffers in self.state.items()
            if buffers
        }
        saved = {"state": state, "param_groups": groups}
        if any(group.get("write_back") == "stochastic" for group in groups):
            drawn = self._generator is not None
            saved["generator"] = self._generator.bit_generator.state if drawn else None
        return saved

    def load_state_dict(self, state_dict):
        """Take over what state_dict() gave, parameters in the same order; buffers (or arrays) are copied.

        ValueError, and nothing is loaded, if the groups' number or sizes or a buffer's shape don't fit, or an option
        can't be (TypeError for one that is no number). A buffer that is None is not there yet: torch's SGD saves such.
        """
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            found = [*state_dict] if isinstance(state_dict, dict) else type(state_dict).__name__
            raise ValueError(
                f"{self._name}.load_state_dict: needs a dict with 'state' and 'param_groups', got {found}: give what "
                "state_dict() gave"
            )
        saved = state_dict["param_groups"]
        for i, group in enumerate(saved):
            if "params" not in group:
                raise ValueError(
                    f"{self._name}.load_state_dict: group {i} has no 'params': give what state_dict() gave"
                )
        ours, theirs = ([len(g["params"]) for g in groups] for groups in (self.param_groups, saved))
        if ours != theirs:
            raise ValueError(
                f"{self._name}.load_state_dict: parameter groups of sizes {theirs} don't fit this optimizer's {ours}: "
                "build it from the same parameters in the same groups"
            )
        by_index, updated = {}, []
        for group, other in zip(self.param_groups, saved, strict=True):
            by_index.update(zip(other["params"], group["params"], strict=True))
            updated.append({**group, **other, "params": group["params"]})
            self._check_options(updated[-1])
        state = defaultdict(dict)
        for i, buffers in state_dict["state"].items():
            if i not in by_index:
                raise ValueError(
                    f"{self._name}.load_state_dict: 'state' is of a parameter {i!r} that no group lists: give what "
                    "state_dict() gave"
                )
            for name, value in buffers.items():
                if value is not None:
                    state[by_index[i]][name] = self._loaded(i, by_index[i], name, value)
        for group in updated:
            for buffers in [state[p] for p in group["params"] if p in state]:
                for name in buffers.keys() & self._buffer_names(group):
                    if not isinstance(buffers[name], Tensor):
                        raise ValueError(
                            f"{self._name}.load_state_dict: {name} must be a Tensor or an array, got {buffers[name]!r}"
                        )
        random = self._generator
        if "generator" in state_dict:
            random = None  # nothing was drawn yet
            if state_dict["generator"] is not None:
                random = np.random.default_rng(0)
                random.bit_generator.state = state_dict["generator"]
        self.state, self._generator = state, random
        for group, new in zip(self.param_groups, updated, strict=True):
            group.update(new)

    def _loaded(self, i, p, name, value):
        ours = type(self)._update is not Optimizer._update  # else the user wrote step() and knows what fits
        if name == "step":
            if ours:
                return self._loaded_step(i, value)
            return value.detach().clone() if isinstance(value, Tensor) else value
        array = value._data if isinstance(value, Tensor) else value
        if not isinstance(array, np.ndarray) and not backends.device.holds(array):
            return value
        fits = array.shape == p.shape
        if ours and not fits:
            raise ValueError(
                f"{self._name}.load_state_dict: {name} of parameter {i} has shape {array.shape}, the parameter {p.shape}"
            )
        kept = p.dtype if p.dtype == float64 or name == "compensation" else float32
        array = backends.move(array, p.device)
        like = p._data if fits else array
        return Tensor(backends.of(array).owned(array, kept, like), requires_grad=name == "master")

    def _loaded_step(self, i, value):
        try:
            step = int(value)  # also a counter that was on a GPU
        except (TypeError, ValueError, OverflowError):
            step = -1
        if step < 0:
            raise ValueError(
                f"{self._name}.load_state_dict: step of parameter {i} must be a whole number, at least 0, got {value!r}"
            )
        return step

    def __repr__(self):
        lines = [f"{self._name} ("]
        for i, group in enumerate(self.param_groups):
            lines += [f"Parameter Group {i}"] + [
                f"    {k}: {group[k]}" for k in sorted(group) if k != "params"
            ]
        return "\n".join([*lines, ")"])
