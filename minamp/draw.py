"""The one random generator of a thread, generators of one's own, and the values that everything random is drawn as."""

import secrets
import threading

import numpy as np

from minamp import backends
from minamp.formats import float32, float64, format_of, is_floating

local = threading.local()


class Generator(np.random.Generator):
    """NumPy's Generator with PyTorch's names: Generator().manual_seed(0); seeded by chance until then.

    device: where PyTorch would draw. Here all values are drawn on the host, the same for every device.
    """

    def __init__(self, device="cpu"):
        super().__init__(np.random.PCG64())
        self.device = backends.Device(device)
        self.seed()

    def manual_seed(self, seed):
        """Start anew from `seed` (an int). Returns the generator itself."""
        self.bit_generator.state = np.random.PCG64(seed).state
        self._seed = seed
        return self

    def seed(self):
        """Start anew from a seed that the system draws. Returns it."""
        return self.manual_seed(secrets.randbits(64)).initial_seed()

    def initial_seed(self):
        """The seed that it last started from."""
        return self._seed

    def get_state(self):
        """The state as a dict of plain values."""
        return self.bit_generator.state

    def set_state(self, state):
        """Put back what get_state gave. Returns the generator itself."""
        self.bit_generator.state = state
        return self


def generator():
    """This thread's Generator, which initialisation, dropout and rand* draw from."""
    if not hasattr(local, "generator"):
        local.generator = Generator()
    return local.generator


def source(given):
    """The generator that a call was given, this thread's for None. TypeError for what is none, such as a seed."""
    if given is None:
        return generator()
    if not isinstance(given, np.random.Generator):
        raise TypeError(
            f"generator must be a Generator, got {given!r}: use minamp.Generator().manual_seed(0)"
        )
    return given


def manual_seed(seed):
    """Start this thread's generator anew from `seed` (an int)."""
    local.generator = Generator().manual_seed(seed)
    return local.generator


def get_rng_state():
    """The generator's state as a dict of plain values."""
    return generator().get_state()


def set_rng_state(state):
    """Put back what get_rng_state gave."""
    generator().set_state(state)


def _check_floating(name, dtype):
    if not is_floating(dtype):
        raise RuntimeError(f"{name}: draws floating values, dtype {dtype} can't hold them: use randint")


def uniform(name, shape, dtype, given=None):
    """An array of values in [0, 1), with as many bits as `dtype` holds just below 1: more would round up to 1."""
    _check_floating(name, dtype)
    if dtype.itemsize > 2:
        return source(given).random(shape, dtype)
    steps = 2 / format_of(dtype).eps
    return np.floor(source(given).random(shape, np.float32) * steps) / steps


def normal(name, shape, dtype, given=None):
    """An array of standard normal values, float32 or float64."""
    _check_floating(name, dtype)
    return source(given).standard_normal(shape, float64 if dtype == float64 else float32)


def exponential(name, shape, dtype, given=None):
    """An array of exponentially distributed values of mean 1, float64."""
    _check_floating(name, dtype)
    return source(given).standard_exponential(shape)
