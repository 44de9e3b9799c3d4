"""A stand-in for the GPU's array module, over NumPy: stricter than CuPy, and it counts.

    with standin.installed() as gpu:        # 'cuda' works as a device now
        x = minamp.tensor([1.0], device="cuda")
        gpu.count.clear()
        ...
        assert gpu.count["get"] == 0        # transfers to the host; also "put", "sync" and "kernel"

It refuses what hides a transfer or a wait: implicit conversion to NumPy, host arrays mixed with its own (also 0-dim ones), and
NumPy functions on its arrays. 0-dim results stay arrays of it, memory from empty() is nan, and only functions that are listed
here exist, so the lists are what the CUDA backend needs of CuPy. Kernels run as NumPy doubles (doubles.py), cuBLAS as a
column-major reference that reads and writes memory by address (blas.py).
"""

import contextlib
import types
from collections import Counter

import blas
import doubles
import faults
import numpy as np
import pool

from minamp.backends import device


class _Count(Counter):
    def __setitem__(self, key, value):
        grew = value > self[key]
        super().__setitem__(key, value)
        if grew:
            faults.seen(key)


count = _Count()
REFUSED = "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."


def _in(x):
    """The NumPy array inside a stand-in array; Python and NumPy scalars pass; host arrays don't."""
    if isinstance(x, ndarray):
        return x._a
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}")
    if isinstance(x, tuple | list):
        return type(x)(_in(v) for v in x)
    return x


def _out(x):
    if isinstance(x, np.ndarray | np.generic):
        return ndarray(np.asarray(x))
    return type(x)(_out(v) for v in x) if isinstance(x, tuple | list) else x


def _kernel(function, *args, **kwargs):
    count["kernel"] += 1
    with np.errstate(all="ignore"):  # a GPU does not warn
        return _out(function(*_in(args), **{k: _in(v) for k, v in kwargs.items()}))


def _operator(name):
    def method(self, *others):
        return _kernel(getattr(np.ndarray, name), self, *others)

    return method


def _inplace(name):
    def method(self, other):
        _kernel(getattr(np.ndarray, name), self, other)
        return self

    return method


class _Flags:
    def __init__(self, flags):
        self.c_contiguous = flags.c_contiguous


class ndarray:
    __slots__ = ("_a",)
    __array_priority__ = 2000
    __array_ufunc__ = None  # host + this comes here, and is refused; np.exp(this) is a TypeError
    __hash__ = None

    def __init__(self, a):
        pool.hold(a)
        self._a = a

    dtype, shape, ndim, size, strides, itemsize, nbytes = (
        property(lambda self, n=n: getattr(self._a, n))
        for n in ("dtype", "shape", "ndim", "size", "strides", "itemsize", "nbytes")
    )
    flags = property(lambda self: _Flags(self._a.flags))
    T = property(lambda self: ndarray(self._a.T))
    data = property(lambda self: types.SimpleNamespace(ptr=self._a.ctypes.data, mem=pool.block(self._a)))
    device = property(lambda self: types.SimpleNamespace(id=0))

    def __array__(self, *args, **kwargs):
        raise TypeError(REFUSED)

    def __array_function__(self, *args):
        raise TypeError(REFUSED)

    def __len__(self):
        return len(self._a)

    def __iter__(self):
        raise TypeError("iterating over an array on the GPU takes it apart value by value")

    def __getitem__(self, key):
        out = self._a[self._key(key)]
        if not isinstance(out, np.ndarray):
            out = self._a[(*(key if isinstance(key, tuple) else (key,)), ...)]
        if not np.may_share_memory(out, self._a):
            count["kernel"] += 1
        return ndarray(out)

    def __setitem__(self, key, value):
        count["kernel"] += 1
        self._a[self._key(key)] = _in(value)

    @staticmethod
    def _key(key):
        for k in key if isinstance(key, tuple) else (key,):
            if isinstance(k, list | np.ndarray):
                raise TypeError(f"Unsupported type {type(k)}: an index from the host")
            if isinstance(k, ndarray) and k.dtype == np.bool_:
                count["sync"] += 1  # the size of the result depends on values
        return _in(key)

    # views and copies
    def reshape(self, *shape):
        out = self._a.reshape(*shape)
        count["kernel"] += not np.may_share_memory(out, self._a)
        return ndarray(out)

    def transpose(self, *axes):
        return ndarray(self._a.transpose(*axes))

    def view(self, dtype):
        return ndarray(self._a.view(dtype))

    def astype(self, dtype, copy=True):
        return self if not copy and self.dtype == dtype else _kernel(np.ndarray.astype, self, dtype)

    def copy(self):
        return _kernel(np.ndarray.copy, self)

    def all(self, axis=None, keepdims=False):
        return _kernel(np.all, self, axis=axis, keepdims=keepdims)

    def any(self, axis=None, keepdims=False):
        return _kernel(np.any, self, axis=axis, keepdims=keepdims)

    # to the host
    def get(self):
        count["get"] += 1
        return self._a.copy()

    def _wait(self, function):
        count["sync"] += 1
        return function(self._a)

    def __bool__(self):
        return self._wait(bool)

    def __int__(self):
        return self._wait(int)

    def __float__(self):
        return self._wait(float)

    def __index__(self):
        return self._wait(lambda a: a.__index__())

    def item(self):
        return self._wait(np.ndarray.item)

    def tolist(self):
        return self._wait(np.ndarray.tolist)


for _n in "add sub mul truediv floordiv mod pow and or xor".split():
    setattr(ndarray, f"__{_n}__", _operator(f"__{_n}__"))
    setattr(ndarray, f"__r{_n}__", _operator(f"__r{_n}__"))
    setattr(ndarray, f"__i{_n}__", _inplace(f"__i{_n}__"))
for _n in "eq ne lt le gt ge neg abs invert".split():
    setattr(ndarray, f"__{_n}__", _operator(f"__{_n}__"))


def _function(name):
    def function(*args, **kwargs):
        return _kernel(getattr(np, name), *args, **kwargs)

    return function


MODULE = types.SimpleNamespace(ndarray=ndarray)
for _n in (
    "abs sign exp log log1p expm1 log2 log10 sqrt tanh sin cos maximum minimum where isfinite isnan isinf round floor "
    "ceil copysign clip zeros_like ones_like full_like max min prod argmax argsort cumsum cumprod concatenate take tril "
    "triu zeros full arange tri flip"
).split():
    setattr(MODULE, _n, _function(_n))


def _view(name):
    def function(x, *args, **kwargs):
        out = getattr(np, name)(_in(x), *args, **kwargs)
        count["kernel"] += not np.may_share_memory(out, x._a)
        return ndarray(out)

    setattr(MODULE, name, function)


for _n in "reshape transpose swapaxes moveaxis broadcast_to ascontiguousarray".split():
    _view(_n)


def _module(function):
    setattr(MODULE, function.__name__, function)
    return function


@_module
def asarray(x):
    if isinstance(x, ndarray):
        return x
    count["put"] += 1
    return ndarray(np.array(x))


@_module
def empty(shape, dtype):
    """Memory that holds what nobody should read: nan, or all bits."""
    a = np.empty(shape, dtype)
    a.view(np.uint8).reshape(-1)[...] = 0xFF if a.ndim else 0
    return ndarray(a)


@_module
def sum(x, axis=None, dtype=None, keepdims=False):
    if x.dtype.itemsize == 2 and dtype is None:
        raise TypeError("the sum of a half array has no accumulator: say dtype=float32")
    a = x._a if dtype is None else x._a.astype(dtype)
    return _kernel(np.sum, ndarray(a), axis=axis, keepdims=keepdims)


@_module
def matmul(a, b):
    if a.dtype.itemsize == 2:
        raise TypeError("matmul of half arrays: gemm.py does those")
    return _kernel(np.matmul, a, b)


@_module
def may_share_memory(a, b):
    return np.may_share_memory(_in(a), _in(b))


def _add_at(x, key, values):
    if x.dtype.itemsize == 2:
        raise TypeError("add.at on half: each step would be rounded")
    ndarray._key(key)  # refuses host indices
    _kernel(np.add.at, x, key, values)


MODULE.add = types.SimpleNamespace(at=_add_at)


@_module
class RawKernel:
    def __init__(self, source, name, options=()):
        base = doubles.of(name).__name__
        assert base in source and name.removeprefix(base).split("_")[-1] in source
        self.name, self.double = name, doubles.of(name)

    def __call__(self, grid, block, args):
        count["kernel"] += 1
        for a in args:
            assert isinstance(a, ndarray | np.generic), (
                f"{self.name}: a bare {type(a).__name__} as an argument"
            )
            assert not isinstance(a, ndarray) or a._a.flags.c_contiguous, f"{self.name}: an array with gaps"
        self.double(*(a._a if isinstance(a, ndarray) else a for a in args))


class second(ndarray):
    """An array on a second GPU: for what is to be refused, nothing computes there."""

    __slots__ = ()
    device = property(lambda self: types.SimpleNamespace(id=1))


class Device(contextlib.nullcontext):
    compute_capability = "90"
    id = 0

    def __init__(self, index=0):
        super().__init__()
        assert index == 0

    def synchronize(self):
        count["sync"] += 1


class Event:
    """Marks how many kernels were launched before it; a kernel takes a millisecond."""

    done = True

    def __init__(self, block, disable_timing):
        self.timed = not disable_timing

    def record(self):
        self.at = count["kernel"]

    def synchronize(self):
        count["sync"] += 1


def get_elapsed_time(start, end):
    assert start.timed and end.timed
    return float(end.at - start.at)


def _cublas(name):
    def call(*args):
        count["kernel"] += 1
        getattr(blas, name)(*args)

    return call


MODULE.cuda = types.SimpleNamespace(
    is_available=lambda: True,
    Device=Device,
    Event=Event,
    get_elapsed_time=get_elapsed_time,
    MemoryHook=pool.MemoryHook,
    runtime=types.SimpleNamespace(
        getDeviceCount=lambda: 1, runtimeGetVersion=lambda: 13020, memGetInfo=pool.mem_get_info
    ),
    device=types.SimpleNamespace(get_cublas_handle=lambda: 1),
    cublas=types.SimpleNamespace(
        gemmEx=_cublas("gemm_ex"),
        gemmStridedBatchedEx=_cublas("gemm_strided_batched_ex"),
        setMathMode=lambda handle, mode: None,
    ),
)
MODULE.get_default_memory_pool = lambda: pool


@contextlib.contextmanager
def installed():
    """The stand-in in CuPy's place; yields this module's names as an object with `count`."""
    before = device.use(MODULE)
    device._ready.append("ok")  # the real check multiplies halves
    count.clear()
    try:
        yield types.SimpleNamespace(count=count, ndarray=ndarray, xp=MODULE)
    finally:
        faults.clear()
        device.use(before)
