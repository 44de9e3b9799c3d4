"""Memory: what the ops keep for backward, and the most that a block has allocated at once."""

import tracemalloc

import numpy as np

from minamp import backends, cuda
from minamp.function import Applied
from minamp.record import FREED, is_leaf, observe


class saved_bytes(observe):
    """Context manager that adds up what the ops recorded inside keep for backward.

    `total` in bytes, `by_op` a dict (an array that several ops keep is counted once, with the first). Counted: inputs,
    activations, masks, half copies of weights, what a Function saves. Not counted: the weights themselves, which live anyway.
    """

    def __init__(self):
        self.by_op, self._seen = {}, {}

    @property
    def total(self):
        return sum(self.by_op.values())

    def see(self, phase, op, inputs, output):
        node = output._node if phase == "forward" else None
        if node is None or node.saved is FREED:
            return
        if isinstance(op, Applied):
            kept = [t._data for t, _ in op.ctx._saved if t is not None and not is_leaf(t._node)]
        else:
            kept = [
                value
                for _, value, counter, _, edge in node.saved
                if counter is not None and not is_leaf(edge)
            ]
            kept += [
                value
                for value in node.attrs.values()
                if isinstance(value, np.ndarray) or backends.device.holds(value)
            ]
        for array in kept:
            # A reshape starts at the same address and is the same memory; a slice of the data set is not all of it.
            key, size = backends.block(array)
            if key not in self._seen:
                self._seen[key] = array  # held, so that the address is not given out again meanwhile
                self.by_op[op.name] = self.by_op.get(op.name, 0) + size


class peak_memory:
    """Context manager: `bytes`, the most that a block had allocated at once beside what was there when it began.

    device: 'cpu' counts what Python and NumPy allocate (tracemalloc, which slows small ops several times; one that was on goes
    on, its peak starts anew); 'cuda' counts the pool's blocks and waits for the GPU at both ends. One at a time.
    """

    def __init__(self, device="cpu"):
        self.device, self.bytes = backends.Device(device), None

    def __enter__(self):
        if self.device.type == "cpu":
            self._started = not tracemalloc.is_tracing()
            if self._started:
                tracemalloc.start()
            tracemalloc.reset_peak()
            self._before = tracemalloc.get_traced_memory()[0]
        else:
            cuda.synchronize()
            cuda.reset_peak_memory_stats(self.device)
            self._before = cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *_):
        if self.device.type == "cpu":
            self.bytes = tracemalloc.get_traced_memory()[1] - self._before
            if self._started:
                tracemalloc.stop()
        else:
            cuda.synchronize()
            self.bytes = cuda.max_memory_allocated(self.device) - self._before
