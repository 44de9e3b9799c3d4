"""New tensors, and the one random generator they are drawn from."""

import math
import threading

import numpy as np

from minamp.formats import float32, float64, format_of, is_floating
from minamp.numbers import check_fits, numbers, sized, sizes
from minamp.tensor import Tensor

int64 = np.dtype(np.int64)
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


def _new(array, dtype, device, requires_grad):
    out = Tensor(array).to(dtype)
    out = out if device is None else out.to(device)
    return out.requires_grad_() if requires_grad else out


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


@sized
def zeros(*size, dtype=float32, device=None, requires_grad=False):
    """Zeros; sizes as ints or one tuple."""
    return full(sizes("zeros", size), 0, dtype=dtype, device=device, requires_grad=requires_grad)


@sized
def ones(*size, dtype=float32, device=None, requires_grad=False):
    """Ones; sizes as ints or one tuple."""
    return full(sizes("ones", size), 1, dtype=dtype, device=device, requires_grad=requires_grad)


def full(size, fill_value, *, dtype=None, device=None, requires_grad=False):
    """`fill_value` everywhere: bool for a bool, int64 for an int, else float32. RuntimeError for one the dtype can't hold."""
    filled = np.full(sizes("full", (size,)), numbers("full", fill_value))
    usual = float32 if filled.dtype.kind == "f" else filled.dtype
    dtype = usual if dtype is None else np.dtype(dtype)
    check_fits("full", fill_value, dtype)
    return _new(filled, dtype, device, requires_grad)


@sized
def empty(*size, dtype=float32, device=None, requires_grad=False):
    """Zeros: memory whose contents don't matter."""
    return zeros(sizes("empty", size), dtype=dtype, device=device, requires_grad=requires_grad)


def arange(start=None, end=None, step=1, *, dtype=None, device=None, requires_grad=False):
    """start, start + step, ... below end: int64 for ints, float32 if any is a float; dtype int64 makes ints of all three."""
    start, end = (0, start) if end is None else (0 if start is None else start, end)
    if dtype is not None and np.dtype(dtype) == int64 and end is not None:
        start, end, step = int(start), int(end), int(step)
    if end is None:
        raise TypeError("arange: needs an end: give arange(end) or arange(start, end)")
    if not step or not math.isfinite(end - start):
        raise RuntimeError(
            f"arange: from {start} to {end} by {step} has no end: give finite ends and a step that is not 0"
        )
    if (end - start) * step < 0:
        raise RuntimeError(f"arange: from {start} to {end} leads no step of {step}: turn its sign round")
    if dtype is None:
        dtype = float32 if any(isinstance(v, float) for v in (start, end, step)) else int64
    return _new(np.arange(start, end, step), dtype, device, requires_grad)


def linspace(start, end, steps, *, dtype=float32, device=None, requires_grad=False):
    """`steps` values from start to end, both included."""
    (steps,) = sizes("linspace", (steps,))
    return _new(np.linspace(start, end, steps), dtype, device, requires_grad)


def eye(n, m=None, *, dtype=float32, device=None, requires_grad=False):
    """The n by m identity matrix."""
    return _new(np.eye(*sizes("eye", (n, n if m is None else m))), dtype, device, requires_grad)


@sized
def randn(*size, dtype=float32, device=None, requires_grad=False):
    """Standard normal values."""
    dtype = np.dtype(dtype)
    return _new(normal("randn", sizes("randn", size), dtype), dtype, device, requires_grad)


@sized
def rand(*size, dtype=float32, device=None, requires_grad=False):
    """Uniform values in [0, 1)."""
    dtype = np.dtype(dtype)
    return _new(uniform("rand", sizes("rand", size), dtype), dtype, device, requires_grad)


def randint(low=0, high=None, size=None, *, dtype=int64, device=None, requires_grad=False):
    """Integers in [low, high); randint(high, size) counts from 0."""
    low, high, size = (
        (0, low, high) if size is None else (0, low, size) if high is None else (low, high, size)
    )
    if not low < high:
        raise RuntimeError(f"randint: no integers lie in [{low}, {high}): give low < high")
    return _new(generator().integers(low, high, sizes("randint", (size,))), dtype, device, requires_grad)


def randperm(n, *, dtype=int64, device=None, requires_grad=False):
    """The integers below n in random order."""
    (n,) = sizes("randperm", (n,))
    return _new(generator().permutation(n), dtype, device, requires_grad)


def from_numpy(array):
    """A Tensor sharing the array's memory. TypeError for what is no NumPy array."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"from_numpy: needs a NumPy array, got {type(array).__name__}: use minamp.tensor")
    return Tensor(numbers("from_numpy", array))


def zeros_like(input, *, dtype=None, device=None, requires_grad=False):
    """Zeros in the shape and dtype of input."""
    return zeros(
        input.shape, dtype=dtype or input.dtype, device=device or input.device, requires_grad=requires_grad
    )


def ones_like(input, *, dtype=None, device=None, requires_grad=False):
    """Ones in the shape and dtype of input."""
    return ones(
        input.shape, dtype=dtype or input.dtype, device=device or input.device, requires_grad=requires_grad
    )


def full_like(input, fill_value, *, dtype=None, device=None, requires_grad=False):
    """`fill_value` in the shape and dtype of input."""
    return full(
        input.shape,
        fill_value,
        dtype=dtype or input.dtype,
        device=device or input.device,
        requires_grad=requires_grad,
    )


def randn_like(input, *, dtype=None, device=None, requires_grad=False):
    """Standard normal values in the shape and dtype of input."""
    return randn(
        input.shape, dtype=dtype or input.dtype, device=device or input.device, requires_grad=requires_grad
    )


def rand_like(input, *, dtype=None, device=None, requires_grad=False):
    """Uniform values in the shape and dtype of input."""
    return rand(
        input.shape, dtype=dtype or input.dtype, device=device or input.device, requires_grad=requires_grad
    )
