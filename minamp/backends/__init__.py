"""The only rooms that know NumPy from CuPy. Everything above asks `of(array)` for the module that computes on it."""

import contextvars
import threading

import numpy as np

from minamp.backends import cpu


def of(array):
    """The backend module whose arrays `array` is one of."""
    return cpu


def quiet(function):
    """`function` with NumPy's floating-point warnings off: inf and nan are ordinary results here, as in PyTorch (0.5 us)."""
    return np.errstate(all="ignore")(function)


class _Quietly(threading.local):
    """quietly.run(function, ...): `quiet` for an op's arithmetic, which calls no other op.

    Every thread makes its quiet context once and enters it for each op: an add of two scalars takes 4.3 us that way, and
    4.9 with an errstate of its own in every call.
    """

    def __init__(self):
        context = contextvars.Context()
        context.run(np.errstate(all="ignore").__enter__)
        self.run = context.run


quietly = _Quietly()


def gpu_status():
    """'ok', or one line saying why no GPU can be used. Never raises."""
    try:
        import cupy
    except Exception as error:  # not only ImportError: a broken toolkit raises others
        return f"cupy is not importable ({error}); pip install 'minamp[gpu]' brings it"
    try:
        if not cupy.cuda.is_available():
            return "cupy is installed, but there is no usable CUDA device (see nvidia-smi)"
    except Exception as error:
        return f"CUDA is not usable: {error}"
    return "this version of minamp computes on the CPU only"


def device_type(device):
    """'cpu' or 'cuda' for a device name such as 'cuda:0'; RuntimeError for a name no torch user would know."""
    kind = str(device).split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise RuntimeError(f"unknown device {device!r}: use 'cpu' or 'cuda'")
    return kind


def move(array, device):
    """`array` on `device` ('cpu', 'cuda', 'cuda:0'). RuntimeError where that device is not to be had."""
    if device_type(device) == "cpu":
        return array
    raise RuntimeError(f"device {str(device)!r} asked for, but {gpu_status()}. Stay on 'cpu'.")


class Device(str):
    """'cpu' or 'cuda:0', with .type ('cpu', 'cuda') and .index as torch.device has them."""

    __slots__ = ()
    type = property(lambda self: device_type(self))
    index = property(lambda self: int(self.split(":")[1]) if ":" in self else None)

    def __new__(cls, name):
        device_type(name)
        return super().__new__(cls, name)
