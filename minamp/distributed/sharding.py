"""Optimizer state in shares: every rank keeps the masters and moments of a part of the parameters, and updates that part.

Rajbhandari et al., "ZeRO", 2020, section 5.1 (stage 1). Of Adam with float32 masters for half weights, 12 bytes of 16 per
parameter are optimizer state; n ranks keep 12/n each.
"""

import numpy as np

from minamp import backends
from minamp.distributed.group import group
from minamp.formats import FORMATS
from minamp.nn.module import zero_grad
from minamp.scaler import GradScaler
from minamp.tensor import Tensor

NAMED = {f.name: dtype for dtype, f in FORMATS.items()}


class ZeroRedundancyOptimizer:
    """An optimizer of which this rank holds a share: `optimizer_class` over its part of `params`, a broadcast after each step.

    params: a list of Tensors, the same on every rank, with gradients that are the same too (DistributedDataParallel's).
    param_groups and master_params() are those of this rank's share, so a GradScaler sees only that: use ShardedGradScaler, or
    the ranks may not skip together. state_dict() is the whole state, gathered, as optimizer_class itself would give it; it is a
    collective call, like step(). Names are torch.distributed.optim.ZeroRedundancyOptimizer's.
    """

    def __init__(self, params, optimizer_class, **defaults):
        self.params = list(params)
        self._class, self._defaults = optimizer_class, defaults
        self.owner = _owners(self.params, group().size)
        self.mine = [i for i, rank in enumerate(self.owner) if rank == group().rank]
        self.optim = optimizer_class([self.params[i] for i in self.mine], **defaults) if self.mine else None

    @property
    def param_groups(self):
        """The groups of this rank's share; empty on a rank without one."""
        return self.optim.param_groups if self.optim else []

    @property
    def state(self):
        return self.optim.state if self.optim else {}

    def master_params(self):
        """The tensors of this rank's share whose .grad step() will use."""
        return self.optim.master_params() if self.optim else []

    def zero_grad(self, set_to_none=True):
        """Drop the gradients of all parameters, also of other ranks' shares."""
        for p in self.params:
            zero_grad(p, set_to_none)

    def step(self):
        """Update this rank's share, then receive the others'. A collective call; returns True."""
        if self.optim:
            self.optim.step()
        for rank in range(group().size):
            self._receive(
                [p for p, owner in zip(self.params, self.owner, strict=True) if owner == rank], rank
            )
        return True

    def _receive(self, parameters, rank):
        """Rank `rank`'s values of its parameters, bit for bit, in one message."""
        arrays = [np.ascontiguousarray(backends.host(p._data)) for p in parameters]
        flat = np.concatenate([np.zeros(0, np.uint8), *(a.reshape(-1).view(np.uint8) for a in arrays)])
        group().broadcast(flat, rank, "ZeroRedundancyOptimizer.step")
        if rank == group().rank:
            return
        for p, a, part in zip(
            parameters, arrays, np.split(flat, np.cumsum([a.nbytes for a in arrays])), strict=False
        ):
            p._data[...] = backends.move(part.view(a.dtype).reshape(a.shape), p.device)
            p._version[0] += 1

    def state_bytes(self):
        """Bytes of optimizer state that this rank keeps: moments and masters."""
        tensors = [t for buffers in self.state.values() for t in buffers.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.dtype.itemsize for t in tensors)

    def state_dict(self):
        """The whole state, on every rank, in the form of optimizer_class.state_dict(). A collective call."""
        whole = self._class(self.params, **self._defaults)
        own = self.optim.state_dict() if self.optim else {"state": {}}
        for i, rank in enumerate(self.owner):
            buffers = own["state"].get(self.mine.index(i), {}) if rank == group().rank else {}
            found = {}
            for name, value in self._described(buffers, rank):
                if isinstance(value, list):
                    dtype, shape = value
                    given = buffers[name]._data if rank == group().rank else np.zeros(shape, NAMED[dtype])
                    array = np.ascontiguousarray(backends.host(given)).copy()
                    group().broadcast(array, rank, "ZeroRedundancyOptimizer.state_dict")
                    value = Tensor(array)
                found[name] = value
            if found:
                whole.state[self.params[i]] = found
        saved = whole.state_dict()
        if self.optim:
            options = {k: v for k, v in self.optim.param_groups[0].items() if k != "params"}
            saved["param_groups"][0].update(options)
        return saved

    def _described(self, buffers, rank):
        """(name, number) or (name, [dtype, shape]) of every buffer of a parameter, as its owner has them."""
        mine = [
            [k, [v.dtype.name, list(v.shape)] if isinstance(v, Tensor) else v] for k, v in buffers.items()
        ]
        return group().gather(mine, "ZeroRedundancyOptimizer.state_dict")[rank]

    def load_state_dict(self, state_dict):
        """Take this rank's share of a whole state, from state_dict() here or of a plain optimizer, of any number of ranks."""
        (saved,) = state_dict["param_groups"]
        if len(saved["params"]) != len(self.params):
            raise ValueError(
                f"ZeroRedundancyOptimizer.load_state_dict: the state is of {len(saved['params'])} parameters, there are "
                f"{len(self.params)}: build it from the same parameters"
            )
        if self.optim:
            index = [saved["params"][i] for i in self.mine]
            state = {k: state_dict["state"][i] for k, i in enumerate(index) if i in state_dict["state"]}
            share = {**saved, "params": list(range(len(self.mine)))}
            self.optim.load_state_dict({"state": state, "param_groups": [share]})


class ShardedGradScaler(GradScaler):
    """A GradScaler for optimizers that hold other gradients on every rank: one rank's inf or nan makes all of them skip.

    unscale_() and step() are collective calls. The name is torch.distributed.fsdp's.
    """

    def _unscale(self, optimizer, scale, allow_half=False):
        found = super()._unscale(optimizer, scale, allow_half)
        mine = (
            -1.0 if found is None else float(backends.host(found) if not isinstance(found, float) else found)
        )
        largest = group().largest(mine, "ShardedGradScaler: comparing found_inf")
        return None if largest < 0 else largest


def _owners(params, size):
    """Per parameter the rank that owns it: the largest first, each to the rank that has least."""
    load, owner = [0] * size, [0] * len(params)
    for i in sorted(range(len(params)), key=lambda i: -params[i].numel()):
        owner[i] = load.index(min(load))
        load[owner[i]] += params[i].numel()
    return owner
