"""SGD, Adam, AdamW, and float32 master weights for half parameters.

Whatever a weight's format, its update is computed in float32 (float64 for float64 weights): widened, updated,
rounded once to nearest. So an update below half a step of the format is lost: w = 1 in float16 minus 1e-4
stays 1, a hundred times over. master_weights=True keeps a float32 copy that the updates add up in, and rounds
that into the half weight after every step (Micikevicius et al., 2018, section 3.1).
"""

from collections import defaultdict

import numpy as np

from minamp import backends
from minamp.formats import cast, float32, float64, is_half, narrow, widen
from minamp.nn.module import zero_grad
from minamp.record import enable_grad
from minamp.tensor import Tensor


class Optimizer:
    """Base class: parameter groups, state, the float32 arithmetic of half weights; subclasses write _update.

    params: an iterable of Tensors, or of dicts with 'params' and that group's own options. ValueError for an
    empty list, a tensor that is not a leaf, or one listed twice; TypeError for what is not a Tensor.
    """

    def __init__(self, params, defaults):
        if isinstance(params, Tensor | set):
            raise TypeError(
                f"{self._name}: params must be a list of Tensors or of dicts, got a "
                f"{type(params).__name__}: use [tensor]"
            )
        self.defaults = defaults
        self.param_groups = []
        self.state = defaultdict(dict)  # parameter -> its buffers by name
        self._seen = {}  # half parameter -> its version after our last write
        groups = list(params)
        if not groups:
            raise ValueError(f"{self._name}: got an empty parameter list: give it model.parameters()")
        for group in groups if isinstance(groups[0], dict) else [{"params": groups}]:
            self.add_param_group(group)

    _name = property(lambda self: type(self).__name__)

    def add_param_group(self, param_group):
        """Add a dict with 'params' and, if they differ from the defaults, its own options."""
        if not isinstance(param_group, dict):
            raise TypeError(
                f"{self._name}: a parameter group must be a dict, got {type(param_group).__name__}"
            )
        params = param_group["params"]
        if isinstance(params, set):
            raise TypeError(f"{self._name}: params must have an order, a set has none: use a list")
        params = [params] if isinstance(params, Tensor) else list(params)
        known = {id(p): f"group {i}" for i, group in enumerate(self.param_groups) for p in group["params"]}
        for i, p in enumerate(params):
            where = f"parameter {i} of group {len(self.param_groups)}"
            if not isinstance(p, Tensor):
                raise TypeError(f"{self._name}: {where} must be a Tensor, got {type(p).__name__}")
            if not p.is_leaf:
                raise ValueError(
                    f"{self._name}: {where}, shape {p.shape}, was made by {p._node.op.name} and can't be "
                    "trained: use a leaf"
                )
            if id(p) in known:
                raise ValueError(
                    f"{self._name}: {where}, shape {p.shape}, is in {known[id(p)]} already: list it once"
                )
            known[id(p)] = "this group"
        group = {"params": params, **{k: v for k, v in param_group.items() if k != "params"}}
        for option, value in self.defaults.items():
            group.setdefault(option, value)
        self._check(group)
        self.param_groups.append(group)

    def _check(self, group):
        """Raise ValueError for an option out of its range."""

    def _require(self, group, option, ok, range_text):
        if not ok:
            raise ValueError(f"{self._name}: {option} must be {range_text}, got {group[option]!r}")

    def zero_grad(self, set_to_none=True):
        """Drop the gradients of all parameters and of their masters, or write zeros."""
        for group in self.param_groups:
            for p in group["params"]:
                zero_grad(p, set_to_none)

    # -- the step

    @backends.quiet
    def step(self, closure=None):
        """Update every parameter that has a gradient. Returns closure()'s loss, or True: the step was made.

        closure: recomputes loss and gradients; called first, with gradients on.
        """
        result = True
        if closure is not None:
            with enable_grad():
                result = closure()
        for group in self.param_groups:
            for p in group["params"]:
                master = self._master(p, group)
                if master is not p:
                    self._copy_in(p, master, stepping=True)
                if master.grad is None:
                    continue
                if not is_half(p.dtype):
                    self._update(p._data, p.grad._data, self.state[p], group)
                else:  # widen, update in float32, round once
                    w = widen(p._data) if master is p else master._data
                    self._update(w, widen(master.grad._data), self.state[p], group)
                    p._data[...] = narrow(w, p.dtype)
                p._version[0] += 1  # a cached half copy of this weight is stale now
                if master is not p:
                    master.grad = None
                    self._seen[p] = p._version[0]
        return result

    def _update(self, w, g, state, group):
        raise NotImplementedError(f"{self._name} has no _update(w, g, state, group): define it")

    @staticmethod
    def _buffer(state, name, like):
        """The array of the buffer `name`, zeros at first."""
        if name not in state:
            state[name] = Tensor(np.zeros_like(like))
        return state[name]._data

    # -- master weights

    def master_params(self):
        """Per parameter, the tensor that step() updates: the float32 master of a half weight, or itself.

        Its .grad is the gradient step() will use: the half gradient, widened once. There GradScaler unscales
        and clip_grad_norm_ clips, in float32, so that small gradients keep their digits; zero_grad() and
        step() drop it.
        """
        for group in self.param_groups:
            for p in group["params"]:
                master = self._master(p, group)
                if master is not p:
                    self._copy_in(p, master)
                yield master

    def _copy_in(self, p, master, stepping=False):
        """Widen the half gradient into master.grad, unless that is set: by an earlier call or by the user.

        RuntimeError if p.grad has changed after that earlier call: it may be scaled where master.grad is
        unscaled, so neither of them can be what is meant.
        """
        g = master.grad
        if g is not None:
            source, version = getattr(g, "source", (None, 0))
            if source is None or source is p.grad and version == source._version[0]:
                return
            if p.grad is not None and (stepping or source is p.grad):
                raise RuntimeError(
                    f"{self._name}: the {p.dtype} gradient of a parameter of shape {p.shape} was written "
                    "after its float32 copy "
                    "was made (by unscale_ or master_params): write to the .grad of "
                    "optimizer.master_params(), or call zero_grad() first"
                )
        master.grad = None if p.grad is None else Tensor(np.array(widen(p.grad._data)))
        if p.grad is not None:
            master.grad.source = (p.grad, p.grad._version[0])

    def _master(self, p, group):
        if not (group.get("master_weights") and is_half(p.dtype)):
            return p
        state = self.state[p]
        if "master" not in state:
            state["master"] = Tensor(np.array(widen(p._data)), requires_grad=True)
        master = state["master"]
        if self._seen.get(p) != p._version[0]:
            # Somebody wrote into the weight (load_state_dict, copy_): its new values count, and where it
            # still is the rounded master, the master's digits are kept.
            same = narrow(master._data, p.dtype) == p._data
            master.data = np.where(same, master._data, widen(p._data))
            self._seen[p] = p._version[0]
        p.master = master  # for clip_grad_norm_(model.parameters()) and model.zero_grad()
        return master

    # -- saving and loading

    def state_dict(self):
        """{'state': {index: buffers}, 'param_groups': [options, 'params' as indices]}; shares memory."""
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
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict):
        """Take over what state_dict() gave, parameters in the same order; buffers (or arrays) are copied.

        ValueError, and nothing is loaded, if the groups' number or sizes or a buffer's shape don't fit.
        """
        saved = state_dict["param_groups"]
        ours, theirs = ([len(g["params"]) for g in groups] for groups in (self.param_groups, saved))
        if ours != theirs:
            raise ValueError(
                f"{self._name}.load_state_dict: parameter groups of sizes {theirs} don't fit this "
                f"optimizer's {ours}: "
                "build it from the same parameters in the same groups"
            )
        by_index = {}
        for group, other in zip(self.param_groups, saved, strict=True):
            by_index.update(zip(other["params"], group["params"], strict=True))
        state = defaultdict(dict)
        for i, buffers in state_dict["state"].items():
            for name, value in buffers.items():
                state[by_index[i]][name] = self._loaded(i, by_index[i], name, value)
        self.state, self._seen = state, {}
        for group, other in zip(self.param_groups, saved, strict=True):
            group.update({k: v for k, v in other.items() if k != "params"})

    def _loaded(self, i, p, name, value):
        if name == "step":
            return int(value)
        if not isinstance(value, Tensor | np.ndarray):
            return value
        array = value._data if isinstance(value, Tensor) else value
        if array.shape != p.shape:
            raise ValueError(
                f"{self._name}.load_state_dict: {name} of parameter {i} has shape {array.shape}, the "
                f"parameter {p.shape}"
            )
        array = np.array(cast(array, float64 if p.dtype == float64 else float32))
        return Tensor(array, requires_grad=name == "master")

    def __repr__(self):
        lines = [f"{self._name} ("]
        for i, group in enumerate(self.param_groups):
            lines += [f"Parameter Group {i}"] + [
                f"    {k}: {group[k]}" for k in sorted(group) if k != "params"
            ]
        return "\n".join([*lines, ")"])


class SGD(Optimizer):
    """w -= lr * g, with momentum, Nesterov momentum, weight decay; torch.optim.SGD's formulas.

    master_weights=True: keep float32 copies of half weights. ValueError for options out of range.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        *,
        maximize=False,
        master_weights=False,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "master_weights": master_weights,
            },
        )

    def _check(self, group):
        for option in ("lr", "momentum", "weight_decay"):
            self._require(group, option, group[option] >= 0, "at least 0")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"{self._name}: nesterov=True needs momentum above 0 and dampening 0, "
                f"got momentum={group['momentum']!r}, dampening={group['dampening']!r}"
            )

    def _update(self, w, g, state, group):
        fresh = "momentum_buffer" not in state
        backends.of(w).sgd(
            w,
            g,
            self._buffer(state, "momentum_buffer", w) if group["momentum"] else None,
            fresh,
            lr=group["lr"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )


class Adam(Optimizer):
    """Steps of about lr whatever the gradient's size (Kingma and Ba, 2015); torch.optim.Adam's formulas.

    amsgrad=True: divide by the largest second moment so far (Reddi et al., 2018). Moments, eps and bias
    correction are float32, where eps = 1e-8 is not 0, as it is in float16. master_weights=True: keep float32
    copies of half weights. ValueError for options out of range.
    """

    decoupled = False

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        *,
        maximize=False,
        master_weights=False,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "master_weights": master_weights,
            },
        )

    def _check(self, group):
        for option in ("lr", "eps", "weight_decay"):
            self._require(group, option, group[option] >= 0, "at least 0")
        self._require(group, "betas", all(0 <= beta < 1 for beta in group["betas"]), "two numbers in [0, 1)")

    def _update(self, w, g, state, group):
        state["step"] = state.get("step", 0) + 1
        backends.of(w).adam(
            w,
            g,
            self._buffer(state, "exp_avg", w),
            self._buffer(state, "exp_avg_sq", w),
            self._buffer(state, "max_exp_avg_sq", w) if group["amsgrad"] else None,
            state["step"],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.decoupled,
            maximize=group["maximize"],
        )


class AdamW(Adam):
    """Adam whose weight decay shrinks the weight directly (Loshchilov and Hutter, 2019)."""

    decoupled = True

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        *,
        maximize=False,
        master_weights=False,
    ):
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, master_weights=master_weights
        )
