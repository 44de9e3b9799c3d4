"""The array module of the GPU: imported here and nowhere else, and only when an array of it or a device 'cuda' turns up."""

import sys
import time

import numpy as np

from minamp.formats import (  # imports ml_dtypes: without it first, CuPy has no bfloat16
    float8_e4m3fn,
    float8_e5m2,
)

TOOLKIT = "pip install 'minamp[gpu]' brings CuPy and the CUDA libraries that fit it"


class _ArrayModule:
    """`xp`: attributes are looked up in the array module when they are used, so that importing minamp needs no GPU."""

    module = None

    def __getattr__(self, name):
        return getattr(array_module(), name)


xp = _ArrayModule()


def array_module():
    """CuPy; or what `use` put in its place."""
    if _ArrayModule.module is None:
        import cupy

        _ArrayModule.module = cupy
    return _ArrayModule.module


def use(module):
    """Compute with `module` instead of CuPy (None: CuPy again). Returns the one before. For tests without a GPU."""
    before, _ArrayModule.module = _ArrayModule.module, module
    _ready.clear()
    return before


def holds(array):
    """Whether `array` lies on the GPU."""
    module = _ArrayModule.module or sys.modules.get("cupy")
    return module is not None and isinstance(array, module.ndarray)


_ready = []  # 'ok' once a GPU has answered: it is asked once


def gpu_status():
    """'ok', or one line saying why no GPU can be used and what to do. Never raises.

    Four answers: CuPy is not importable; no usable device; a device, but its libraries are incomplete; ok.
    """
    if _ready:
        return _ready[0]
    try:
        cupy = array_module()
    except Exception as error:  # not only ImportError: a broken installation raises others
        return f"cupy is not importable ({line(error)}): {TOOLKIT}"
    try:
        if not cupy.cuda.is_available():
            return f"cupy is installed, but there is no usable CUDA device{_why(cupy)}: check nvidia-smi and the driver"
        card, cuda = capability(), cupy.cuda.runtime.runtimeGetVersion() // 1000
    except Exception as error:
        return f"CUDA is not usable ({line(error)}): check nvidia-smi and the driver"
    if card < 75 and cuda >= 13:
        return (
            f"the GPU has compute capability {card / 10} (a V100 has 7.0), and CuPy for CUDA {cuda} needs 7.5 (Turing, T4) "
            "or newer: put cupy-cuda12x in the place of cupy-cuda13x, or use a newer card"
        )
    try:
        # compiles one kernel and calls cuBLAS once; these look for their libraries only when they are used
        a = cupy.ones((8, 8), np.float16)
        float((a @ a + a)[0, 0])
    except Exception as error:
        return f"there is a CUDA device, but the toolkit is incomplete ({line(error)}): {TOOLKIT}"
    from minamp.backends import memory  # which asks this room

    memory.start()
    _ready.append("ok")
    return "ok"


def need(what):
    """RuntimeError, with the reason, if no GPU can be used."""
    status = gpu_status()
    if status != "ok":
        raise RuntimeError(f"{what} asked for, but {status}. Stay on 'cpu' until then.")


def _why(cupy):
    """The driver's own words, which is_available() keeps to itself."""
    try:
        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f" ({line(error)})"
    return ""


def line(error):
    """An error's kind and the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def capability():
    """The current GPU's compute capability times ten: 75, 80, 90, 120."""
    return int(xp.cuda.Device().compute_capability)


def properties():
    """What the driver says of the current GPU, by CUDA's names: name (bytes), totalGlobalMem, major, minor and others."""
    return xp.cuda.runtime.getDeviceProperties(current())


def count():
    """The number of GPUs."""
    return xp.cuda.runtime.getDeviceCount()


def in_use():
    """Whether anything has been computed on a GPU, or could have been."""
    return bool(_ready)


def synchronize():
    """Wait for the current GPU."""
    xp.cuda.Device().synchronize()


def clock():
    """Seconds, read when all that was launched is done: what a measurement starts and ends with."""
    if in_use():
        synchronize()
    return time.perf_counter()


def to_host(array):
    """A copy in main memory: waits for the GPU."""
    return array.get()


def to_device(array, index=None):
    """A copy of a NumPy array on the GPU (number `index`, default the current one). RuntimeError where there is none."""
    need("device 'cuda'")
    if array.dtype in (float8_e4m3fn, float8_e5m2):
        raise RuntimeError(
            f"{array.dtype} arrays can't be moved to the GPU: cast them first, e.g. to float16"
        )
    if index is None:
        return xp.asarray(array)
    with gpu(index):
        return xp.asarray(array)


def gpu(index):
    """The GPU with this number: a context manager, current inside. RuntimeError where there are not so many."""
    if index >= count():
        raise RuntimeError(
            f"device 'cuda:{index}' asked for, but there are {count()} GPUs: give a number below {count()}"
        )
    return xp.cuda.Device(index)


def current():
    """The number of the GPU that computes."""
    return xp.cuda.device.get_device_id()


_constants = {}  # (module, GPU, bytes, dtype, shape) -> array: the geometry of pools and resizes, moved once


def constant(array):
    """A small NumPy array on the GPU, moved there the first time and kept: what depends on shapes only."""
    array = np.asarray(array)
    key = (id(_ArrayModule.module), current(), array.tobytes(), array.dtype, array.shape)
    if key not in _constants:
        if len(_constants) > 1000:
            _constants.clear()
        _constants[key] = to_device(array)
    return _constants[key]


def tables():
    """All arrays that `constant` keeps."""
    return list(_constants.values())
