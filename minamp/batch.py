"""Weights whose update is the same arithmetic, as the lists of arrays that one call of a backend takes."""

from minamp import backends
from minamp.formats import float32, is_half
from minamp.tensor import Tensor


class Batch:
    """Weights that one call of the backend `m` updates: lists of arrays, and where the optimizer's own are found.

    on_gpu: for capturable groups on a GPU the options that leave all decisions there, else False.
    """

    def __init__(self, m, on_gpu):
        self.m, self.on_gpu = m, on_gpu
        self.weights, self.ws, self.gs, self.halves, self.states, self.made = [], [], [], [], [], []

    def add(self, weight, w, g, half, state):
        if self.m.name == "cuda" and not g.flags.c_contiguous:  # a table of addresses knows no strides
            g = g.copy()
        self.weights.append(weight)
        self.ws.append(w)
        self.gs.append(g if g.dtype == w.dtype else self.m.cast(g, w.dtype))
        self.halves.append(half)
        self.states.append(state)

    def prepare(self, names, counted):
        """Make the buffers `names` that are not there yet, zeros, float32 for half weights, and counters on the GPU.

        They become state when `buffers` and `steps` are asked for them.
        """
        for w, state in zip(self.ws, self.states, strict=True):
            wide = float32 if is_half(w.dtype) else w.dtype
            made = {n: Tensor(self.m.zeros_like(w, dtype=wide)) for n in names if n not in state}
            # a buffer that nobody counted has begun
            step = state.get("step", int("momentum_buffer" in state))
            here = isinstance(step, Tensor) and backends.of(step._data) is self.m
            if self.on_gpu and counted and not here:
                made["step"] = Tensor(self.m.full((), float(step), float32))
            self.made.append(made)
        if self.on_gpu and counted:
            self.on_gpu["corrections"] = self.m.full((2 * len(self.ws),), 0.0, wide)

    def buffers(self, name):
        """The arrays of the buffers `name`."""
        for state, made in zip(self.states, self.made, strict=True):
            if name in made:
                state[name] = made[name]
        return [state[name]._data for state in self.states]

    def steps(self):
        """The number of this step; or the counters on the GPU, where the kernel counts the steps it makes."""
        if self.on_gpu:
            return self.buffers("step")
        for state in self.states:
            state["step"] = int(state.get("step", 0)) + 1
        return self.states[0]["step"]

    def options(self):
        """What else the backend's updates take."""
        halves = None if self.halves[0] is None else self.halves
        return {"halves": halves, **(self.on_gpu or {})}
