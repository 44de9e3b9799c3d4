"""What a GradScaler can say when it gives up: which tensor went non-finite first, and whether a smaller scale would help."""

import weakref

import numpy as np

from minamp import backends
from minamp.watch import first_bad_op


def _looked_at(tensor):
    """Its values in main memory, widened."""
    return backends.widen(backends.host(tensor._data))


class Evidence:
    """What one iteration showed about the first non-finite tensor, for the message with which a scaler gives up."""

    def __init__(self, observing=False):
        self.loss_was_finite, self.parameter, self.watch = True, None, first_bad_op() if observing else None
        if observing:
            self.watch.__enter__()
            # also for a training that ends here: nobody calls close() then
            self._end = weakref.finalize(self, self.watch.__exit__)

    def close(self):
        """End the observation."""
        if self.watch is not None:
            self._end()

    def loss(self, loss):
        """Note whether the loss itself is finite."""
        self.loss_was_finite = self.loss_was_finite and bool(np.isfinite(_looked_at(loss)).all())

    def gradient(self, position, g):
        """Note the first parameter with a non-finite gradient: its place in the optimizer's list, its shape, inf or nan."""
        if self.parameter is None:
            self.parameter = (position, g.shape, "nan" if np.isnan(_looked_at(g)).any() else "inf")

    def __str__(self):
        position, shape, kind = self.parameter
        first = f"First parameter with a bad gradient: number {position} of shape {shape} ({kind}). "
        if self.watch is not None:
            first = f"First non-finite tensor: {self.watch}. " + first
        if not self.loss_was_finite:
            return first + (
                "The loss is not finite before any scaling, so the forward made it: no scale helps. "
                "Look at the inputs and at the ops that ran in half"
            )
        if kind == "nan":
            return (
                first
                + "The loss is finite and a gradient is nan, so the backward made it: look at the op named, not at the scale"
            )
        return (
            first
            + "The loss is finite and a gradient is inf: the scale may still be too high, or the gradient does not fit the format"
        )
