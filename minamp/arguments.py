"""What ops are given in place of Tensors: numbers are welcome, arrays and lists are refused by name."""

import inspect

import numpy as np

from minamp.formats import is_floating
from minamp.tensor import Tensor

PLAIN = {int, float, bool, type(None)}  # welcome without a second look


def refuse_strangers(op, names, args, on_gpu):
    """TypeError for an array, a list or the like among the arguments: no policy would cast it, no gradient reach it.

    A 0-dim array is a number, if it is on the device.
    """
    for name, a in zip(names, args, strict=False):  # one argument too many has no name
        number = type(a) in PLAIN or isinstance(a, (Tensor, int, float, np.generic))
        if not number and (getattr(a, "ndim", 1) or on_gpu and isinstance(a, np.ndarray)):
            raise no_tensor(op, name, a, ", device='cuda'" if on_gpu else "")


def spelled(names, starred, args, kwargs):
    """A call spelled as PyTorch does, for a function of the arguments `names` and of *`starred` (or None): (args, kwargs).

    `input` and `other` name the first two, axis means dim and keepdims keepdim; *sizes may come as sizes=.
    """
    for theirs, i in (("input", 0), ("other", 1)):
        if theirs in kwargs and theirs not in names and i < len(names):
            kwargs[names[i]] = kwargs.pop(theirs)
    for theirs, ours in (("axis", "dim"), ("keepdims", "keepdim")):
        if theirs in kwargs and ours in names:
            kwargs[ours] = kwargs.pop(theirs)
    if starred in kwargs:
        before = (kwargs.pop(name) for name in names[len(args) :] if name in kwargs)
        args = (*args, *before, kwargs.pop(starred))
    return args, kwargs


def starred_name(code):
    """The name of the *argument of a function, given its code; None if it has none."""
    named = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[named] if code.co_flags & 0x04 else None


def number(value):
    """A factor such as alpha, which may come as a tensor of one element or as NumPy's, as a number."""
    return value.item() if isinstance(value, Tensor | np.generic) else value


def check_number(owner, name, value):
    """TypeError for an option that has to be a number: "1e-3" from a settings file is none."""
    if not isinstance(value, (int, float, np.number, Tensor)):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}")


def check_floating(op, x, error=RuntimeError, dtype=None):
    """`error` for a tensor of integers or bools, unless it is to be cast to a floating `dtype`."""
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    if not is_floating(dtype):
        raise error(f"{op}: not defined for {dtype}: use x.float()")


def bound(function, args, kwargs):
    """Parameter name -> argument, of a call that `function` accepted."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def missing_attribute(op, given, error):
    """What to raise after an AttributeError, `given` the arguments by name: that of a list without .shape is a TypeError.

    The error itself if the object it speaks of is none of the arguments, nor part of one.
    """
    for name, a in [*given.items()]:
        if isinstance(a, (list, tuple)):
            given |= {f"{name}[{i}]": part for i, part in enumerate(a)}
    for name, a in given.items():
        if a is error.obj and not isinstance(a, Tensor):
            return no_tensor(op, name, a)
    return error


def no_tensor(op, name, a, device=""):
    """The TypeError for an argument that has to be a Tensor."""
    module = type(a).__module__
    kind = "NumPy array" if isinstance(a, np.ndarray) else type(a).__name__
    if module not in ("builtins", "numpy"):
        kind = f"{module}.{kind}"
    holds_numbers = isinstance(a, (list, tuple, int, float, np.generic, np.ndarray))
    repair = f"use minamp.tensor({name}{device})" if holds_numbers else "give a Tensor"
    return TypeError(f"{op}: {name} is a {kind}, not a Tensor: {repair}")
