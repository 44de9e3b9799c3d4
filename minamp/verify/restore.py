"""Training state put back as it was: what lets a training step be tried out in the middle of a training."""

import contextlib
import copy

from minamp.autocast import clear_autocast_cache
from minamp.create import get_rng_state, set_rng_state
from minamp.tensor import Tensor


@contextlib.contextmanager
def restored(model=None, optimizer=None, scaler=None):
    """Context manager: what a block does to these (each may be None) and to the random generator is undone at its end.

    Bit for bit, also after an error: values, gradients, buffers, optimizer state, scale and counters.
    """
    undo = [_random()]
    tensors = {}  # by id: shared weights once
    if model is not None:
        undo += [_table(t) for m in model.modules() for t in (m._parameters, m._buffers)]
        _collect(tensors, [*model.parameters(), *model.buffers()])
    if optimizer is not None:
        undo += [_optimizer(optimizer)]
        _collect(tensors, [p for group in optimizer.param_groups for p in group["params"]])
        _collect(tensors, [b for s in optimizer.state.values() for b in s.values() if isinstance(b, Tensor)])
    if scaler is not None:
        undo += [_scaler(scaler)]
    undo += [_tensor(t) for t in tensors.values()]
    try:
        yield
    finally:
        for put_back in undo:
            put_back()
        clear_autocast_cache()  # versions count from their old numbers again: a copy made meanwhile could look fresh


def _collect(tensors, found):
    for t in found:
        tensors[id(t)] = t
        if t.grad is not None:
            tensors[id(t.grad)] = t.grad


def _tensor(t):
    array, values, grad = t._data, t._data.copy(), t._grad
    version, attributes = t._version[0], dict(t.__dict__)

    def put_back():
        array[...] = values
        t._data, t._grad, t._version[0] = array, grad, version
        t.__dict__.clear()
        t.__dict__.update(attributes)

    return put_back


def _table(table):
    before = dict(table)

    def put_back():
        table.clear()
        table.update(before)

    return put_back


def _optimizer(optimizer):
    state = {p: dict(buffers) for p, buffers in optimizer.state.items()}
    groups = [(group, _table(group)) for group in optimizer.param_groups]
    generator = copy.deepcopy(optimizer._generator)

    def put_back():
        optimizer.state.clear()
        optimizer.state.update(state)
        optimizer.param_groups[:] = [group for group, _ in groups]
        for _, options in groups:
            options()
        optimizer._generator = generator

    return put_back


def _scaler(scaler):
    before = {**scaler.__dict__}
    for name in "_evidence", "_records":  # what an iteration writes into
        if name in before:
            before[name] = copy.copy(before[name])
    records = {key: list(record) for key, record in before.get("_records", {}).items()}

    def put_back():
        scaler.__dict__.clear()
        scaler.__dict__.update(before)
        if records:
            scaler._records = records

    return put_back


def _random():
    state = get_rng_state()
    return lambda: set_rng_state(state)
