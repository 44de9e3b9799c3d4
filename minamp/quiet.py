"""NumPy's floating-point warnings off: inf and nan are ordinary results here, as in PyTorch."""

import contextvars
import threading

import numpy as np


def quiet(function):
    """`function` without the warnings (2 us a call)."""
    return np.errstate(all="ignore")(function)


class Quietly(threading.local):
    """Quietly().run(function, *args): the same for 0.2 us. What it runs must not come back to the same object.

    Every thread makes its quiet context once and enters it again for each call: an add of two scalars takes 4.3 us that way,
    and 4.9 with an errstate of its own; rounding a small array to half takes 2 us and not 5.
    """

    def __init__(self):
        context = contextvars.Context()
        context.run(np.errstate(all="ignore").__enter__)
        self.run = context.run
