"""What a tensor can be made of: numbers and bools, those that a dtype can hold, and sizes."""

import functools
import math
import operator

import numpy as np

from minamp import backends
from minamp.formats import format_of, is_floating


def numbers(name, data):
    """`data` (numbers, nested lists, arrays) as an array; TypeError if it holds anything else, such as None or text."""
    array = backends.array(data)
    if array.dtype.kind not in "biuf" and not is_floating(array.dtype):
        raise TypeError(f"{name}: needs numbers or bools, got {type(data).__name__} {data!r:.60}")
    return array


def unpacked(args):
    """What stands behind a *: f(2, 3) and f((2, 3)) mean the same."""
    return tuple(args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args)


def sizes(name, size):
    """`size` - ints, or one tuple or list of them - as a tuple; TypeError for what is no int, RuntimeError below 0."""
    size = unpacked(size)
    try:
        size = tuple(operator.index(n) for n in size)
    except TypeError:
        raise TypeError(f"{name}: size {size} is not of ints: give ints or one tuple of them") from None
    if any(n < 0 for n in size):
        raise RuntimeError(f"{name}: size {size} has a negative number: give 0 or more")
    return size


def sized(function):
    """Decorator for a function of *size: its sizes may come as size=, too."""

    @functools.wraps(function)
    def made(*args, size=None, **options):
        return function(*args, *(() if size is None else (size,)), **options)

    return made


def check_fits(name, value, dtype):
    """RuntimeError for a number that `dtype` can't hold: see check_integers, and in floating ones a finite number beyond them.

    Such as -1e9 in float16: an infinity has to be meant.
    """
    if not is_floating(dtype):
        check_integers(name, np.asarray(value), dtype)
        return
    if not math.isfinite(value):
        return
    limit = format_of(dtype).max
    if abs(value) > limit:
        raise RuntimeError(
            f"{name}: value {value} can't be held by {np.dtype(dtype)}, whose limits are +-{limit:g}: "
            f"use {math.copysign(limit, value):g} or {math.copysign(math.inf, value)}, or x.float()"
        )


def check_integers(name, array, dtype):
    """RuntimeError for numbers that the integer `dtype` can't hold; unsigned ones wrap negative numbers, as in PyTorch."""
    if dtype is None or np.dtype(dtype).kind not in "iu" or not array.size or array.dtype.kind == "b":
        return
    limits = np.iinfo(dtype)
    if not (array.min() >= (limits.min or -limits.max) and array.max() <= limits.max):
        raise RuntimeError(
            f"{name}: a number among {array.min()} to {array.max()} can't be held by {np.dtype(dtype)}: give a wider dtype"
        )
