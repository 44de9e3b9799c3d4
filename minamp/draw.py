"""The one random generator of a thread, and the values that everything random is drawn as."""

import threading

import numpy as np

from minamp.formats import float32, float64, format_of, is_floating

local = threading.local()


def generator():
    """This thread's NumPy Generator, which initialisation, dropout and rand* draw from."""
    if not hasattr(local, "generator"):
        local.generator = np.random.default_rng()
    return local.generator


def manual_seed(seed):
    """Start this thread's generator anew from `seed` (an int)."""
    local.generator = np.random.default_rng(seed)
    return local.generator


def get_rng_state():
    """The generator's state as a dict of plain values."""
    return generator().bit_generator.state


def set_rng_state(state):
    """Put back what get_rng_state gave."""
    generator().bit_generator.state = state


def _check_floating(name, dtype):
    if not is_floating(dtype):
        raise RuntimeError(f"{name}: draws floating values, dtype {dtype} can't hold them: use randint")


def uniform(name, shape, dtype):
    """An array of values in [0, 1), with as many bits as `dtype` holds just below 1: more would round up to 1."""
    _check_floating(name, dtype)
    if dtype.itemsize > 2:
        return generator().random(shape, dtype)
    steps = 2 / format_of(dtype).eps
    return np.floor(generator().random(shape, np.float32) * steps) / steps


def normal(name, shape, dtype):
    """An array of standard normal values, float32 or float64."""
    _check_floating(name, dtype)
    return generator().standard_normal(shape, float64 if dtype == float64 else float32)
