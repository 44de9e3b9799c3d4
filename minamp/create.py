"""New tensors; the random ones are drawn by draw.py, from `generator` or else from this thread's."""

import math

import numpy as np

from minamp.arguments import check_floating, no_tensor
from minamp.backends import host
from minamp.draw import normal, source, uniform
from minamp.formats import float32, float64, widen
from minamp.numbers import check_fits, numbers, sized, sizes
from minamp.tensor import Tensor

int64 = np.dtype(np.int64)


def _new(array, dtype, device, requires_grad):
    out = Tensor(array).to(dtype)
    out = out if device is None else out.to(device)
    return out.requires_grad_() if requires_grad else out


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
    if end is None:
        start, end = None, start
    if end is None:
        raise TypeError("arange: needs an end: give arange(end) or arange(start, end)")
    start = 0 if start is None else start
    if dtype is not None and np.dtype(dtype) == int64:
        start, end, step = int(start), int(end), int(step)
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
def randn(*size, generator=None, dtype=float32, device=None, requires_grad=False):
    """Standard normal values."""
    dtype = np.dtype(dtype)
    return _new(normal("randn", sizes("randn", size), dtype, generator), dtype, device, requires_grad)


@sized
def rand(*size, generator=None, dtype=float32, device=None, requires_grad=False):
    """Uniform values in [0, 1)."""
    dtype = np.dtype(dtype)
    return _new(uniform("rand", sizes("rand", size), dtype, generator), dtype, device, requires_grad)


def randint(low=0, high=None, size=None, *, generator=None, dtype=int64, device=None, requires_grad=False):
    """Integers in [low, high); randint(high, size) counts from 0."""
    if size is None:
        high, size = None, high
    if high is None:
        low, high = 0, low
    if not low < high:
        raise RuntimeError(f"randint: no integers lie in [{low}, {high}): give low < high")
    return _new(
        source(generator).integers(low, high, sizes("randint", (size,))), dtype, device, requires_grad
    )


def randperm(n, *, generator=None, dtype=int64, device=None, requires_grad=False):
    """The integers below n in random order."""
    (n,) = sizes("randperm", (n,))
    return _new(source(generator).permutation(n), dtype, device, requires_grad)


def from_numpy(array):
    """A Tensor sharing the array's memory. TypeError for what is no NumPy array."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"from_numpy: needs a NumPy array, got {type(array).__name__}: use minamp.tensor")
    return Tensor(numbers("from_numpy", array))


def _like(input, dtype, device, requires_grad):
    """The options of a new tensor like `input`, but for those that are given."""
    return {"dtype": dtype or input.dtype, "device": device or input.device, "requires_grad": requires_grad}


def zeros_like(input, *, dtype=None, device=None, requires_grad=False):
    """Zeros in the shape and dtype of input."""
    return zeros(input.shape, **_like(input, dtype, device, requires_grad))


def empty_like(input, *, dtype=None, device=None, requires_grad=False):
    """Zeros in the shape and dtype of input: memory whose contents don't matter."""
    return empty(input.shape, **_like(input, dtype, device, requires_grad))


def ones_like(input, *, dtype=None, device=None, requires_grad=False):
    """Ones in the shape and dtype of input."""
    return ones(input.shape, **_like(input, dtype, device, requires_grad))


def full_like(input, fill_value, *, dtype=None, device=None, requires_grad=False):
    """`fill_value` in the shape and dtype of input."""
    return full(input.shape, fill_value, **_like(input, dtype, device, requires_grad))


def randn_like(input, *, dtype=None, device=None, requires_grad=False):
    """Standard normal values in the shape and dtype of input."""
    return randn(input.shape, **_like(input, dtype, device, requires_grad))


def rand_like(input, *, dtype=None, device=None, requires_grad=False):
    """Uniform values in the shape and dtype of input."""
    return rand(input.shape, **_like(input, dtype, device, requires_grad))


def bernoulli(input, *, generator=None):
    """1 with the probability that stands in `input`, else 0, in its shape and dtype. RuntimeError outside [0, 1]."""
    p = _weights("bernoulli", input)
    if not ((p >= 0) & (p <= 1)).all():
        raise RuntimeError(
            "bernoulli: probabilities must lie in [0, 1]: use x.clamp(0, 1), or sigmoid of scores"
        )
    return _new(source(generator).random(p.shape) < p, input.dtype, input.device, False)


def multinomial(input, num_samples, replacement=False, *, generator=None):
    """num_samples indices (int64) for each row of `input`, drawn in proportion to the weights that stand there.

    input: a vector or matrix of floats; a row need not sum to 1. Without replacement no index comes twice in a row.
    RuntimeError for weights that are negative or not finite, and for rows with too few that are not 0.
    """
    weights = _weights("multinomial", input)
    if weights.ndim not in (1, 2):
        raise RuntimeError(
            f"multinomial: input has shape {input.shape}: give a vector, or a matrix of one row for each draw"
        )
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise RuntimeError("multinomial: weights must be finite and not negative: use softmax of the scores")
    least = 1 if replacement else num_samples
    if num_samples < 1 or ((weights > 0).sum(-1) < least).any():
        raise RuntimeError(
            f"multinomial: can't draw {num_samples} of {input.shape[-1]} weights where fewer than {least} are above 0"
            + ("" if replacement else ": draw fewer, or replacement=True")
        )
    if replacement:
        ends = np.cumsum(np.atleast_2d(weights), -1)
        draws = source(generator).random((len(ends), num_samples)) * ends[:, -1:]
        ends[ends == ends[:, -1:]] = np.inf  # a draw that was rounded up to the sum is the last one's
        at = np.stack([np.searchsorted(end, u, side="right") for end, u in zip(ends, draws, strict=True)])
    else:  # the num_samples smallest of exponential waiting times, whose rates are the weights
        with np.errstate(divide="ignore"):
            at = np.argsort(source(generator).standard_exponential(weights.shape) / weights, -1)[
                ..., :num_samples
            ]
    return _new(at.reshape(*input.shape[:-1], num_samples), int64, input.device, False)


def _weights(name, x):
    """The values of a floating tensor as a float64 array."""
    if not isinstance(x, Tensor):
        raise no_tensor(name, "input", x)
    check_floating(name, x)
    return widen(host(x._data)).astype(float64)
