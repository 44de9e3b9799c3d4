"""minamp as the cases see it."""

import contextlib

import minamp
from minamp.methods import OPS
from minamp.record import observe


class Kit:
    tn, device = minamp, "cpu"

    @staticmethod
    def find(op):
        """The function that minamp has under this name, or None."""
        return OPS.get(op) or getattr(minamp.nn.functional, op, None)

    @staticmethod
    def listed(x):
        return x

    @staticmethod
    @contextlib.contextmanager
    def counting(tensor):
        casts = []

        def see(phase, op, inputs, output):
            if phase == "forward" and op.name == "to" and inputs[0].shape == tensor.shape:
                casts.append(inputs[0])

        with observe(see):
            yield casts
