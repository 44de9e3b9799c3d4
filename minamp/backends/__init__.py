"""The only rooms that know NumPy from CuPy. Everything above asks `of(array)` for the module that computes on it."""

import functools

import numpy as np

from minamp.backends import cpu, device, errors
from minamp.backends.device import gpu_status
from minamp.backends.errors import explain, guard
from minamp.backends.ongrid import OnGrid


def of(array):
    """The backend module whose arrays `array` is one of."""
    if type(array) is np.ndarray or not device.holds(array):
        return cpu
    from minamp.backends import cuda

    return cuda


def array(data):
    """`data` as it is if it is an array of a backend, else as a NumPy array."""
    # what NumPy makes of 0-dim arrays; asked first, an add of two takes 0.2 us less
    if isinstance(data, np.generic):
        return np.asarray(data)
    return data if isinstance(data, OnGrid) or device.holds(data) else np.asarray(data)


def host(array):
    """`array` as a NumPy array; from a GPU a copy, which waits for the device."""
    return array if type(array) is np.ndarray or not device.holds(array) else device.to_host(array)


def checkable(array):
    """`array` on the CPU, for a check of its values; None where that would wait for a GPU, unless debug(sync=True) wants it."""
    return host(array) if of(array) is cpu or errors.checking else None


def widen(a):
    """Half arrays as float32, exactly; others as they are."""
    return of(a).widen(a)


def narrow(a, dtype):
    """`a` rounded once to a format smaller than float32."""
    return of(a).narrow(a, dtype)


def cast(a, dtype):
    """`a` in `dtype`, rounded once."""
    return of(a).cast(a, dtype)


def bf16_works():
    """Whether the current GPU multiplies bfloat16; there must be one."""
    from minamp.backends import cuda_check

    return cuda_check.bf16_works()


def device_type(name):
    """'cpu' or 'cuda' for a device name such as 'cuda:0'; RuntimeError for a name no torch user would know."""
    return _parse(str(name))[0]


@functools.cache  # a training step asks twenty times, for one or two names
def _parse(name):
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda") or colon and not index.isdecimal():
        raise RuntimeError(f"unknown device {name!r}: use 'cpu' or 'cuda'")
    return kind, int(index) if colon else None


def move(array, name):
    """`array` on the device `name` ('cpu', 'cuda', 'cuda:0'). RuntimeError where that device is not to be had."""
    kind, index = _parse(str(name))
    if kind == "cpu":
        return host(array)
    if device.holds(array):
        if index in (None, array.device.id):
            return array
        array = device.to_host(array)
    with guard(f"moving {array.dtype} {array.shape} to {name}"):
        return device.to_device(array, index)


def device_name(array):
    """'cpu', or 'cuda:0' with the number of the GPU the array lies on."""
    return f"cuda:{array.device.id}" if device.holds(array) else "cpu"


def block(array):
    """(address, bytes) of the memory `array` reads: no more than what it lies in, however often broadcast."""
    if device.holds(array):
        return array.data.ptr, min(array.nbytes, array.data.mem.size)
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return array.__array_interface__["data"][0], min(array.nbytes, owner.nbytes)


class Device(str):
    """'cpu' or 'cuda:0', with .type ('cpu', 'cuda') and .index as torch.device has them."""

    __slots__ = ()
    type = property(lambda self: device_type(self))
    index = property(lambda self: _parse(self)[1])

    def __new__(cls, type, index=None):
        name = type if index is None else f"{type}:{index}"
        device_type(name)
        return super().__new__(cls, name)

    def same(self, name):
        """Whether `name` is this device: 'cuda' is any GPU."""
        kind, index = _parse(str(name))
        return kind == self.type and index in (None, self.index)
