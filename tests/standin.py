"""A stand-in for the GPU's array module, over NumPy: stricter than CuPy, and it counts.

    with standin.installed() as gpu:        # 'cuda' works as a device now
        x = minamp.tensor([1.0], device="cuda")
        gpu.count.clear()
        ...
        assert gpu.count["get"] == 0        # transfers to the host; also "put", "sync" and "kernel"

It refuses what hides a transfer or a wait: implicit conversion to NumPy, host arrays mixed with its own (also 0-dim ones), and
NumPy functions on its arrays. 0-dim results stay arrays of it, memory from empty() is nan, and only functions that are listed
here exist, so the lists are what the CUDA backend needs of CuPy. Kernels run as NumPy doubles (doubles.py), cuBLAS as a
column-major reference that reads and writes memory by address (blas.py). A stream's capture notes every launch, and its graph
does them again in the same memory; unlike a GPU's, it also runs them while it captures.
"""

import contextlib
import ctypes
import inspect
import types
from collections import Counter

import blas
import doubles
import faults
import numpy as np
import pool

from minamp.backends import cublas, device


class _Count(Counter):
    def __setitem__(self, key, value):
        grew = value > self[key]
        super().__setitem__(key, value)
        if grew:
            faults.seen(key)


count = _Count()
capture = None  # (launches, arrays whose memory they use) while a stream is captured
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


def _launch(function):
    """Run it, and note it in a capture. It returns an array, or nothing and writes into memory itself."""
    count["kernel"] += 1
    with np.errstate(all="ignore"):  # a GPU does not warn
        out = function()
    if capture is not None:

        def again():
            with np.errstate(all="ignore"):
                result = function()
            if isinstance(out, np.ndarray) and result is not out:
                out[...] = result

        out = np.asarray(out) if isinstance(out, np.generic) else out
        capture[0].append(again)
    return out


def _forbid(what):
    """What waits for the GPU or copies from the host can't be captured."""
    if capture is not None:
        if what == "sync":
            raise faults.CUDARuntimeError(
                "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing"
            )
        way = {"get": "D2H", "put": "H2D"}[what]
        raise RuntimeError(f"the current stream is capturing, so {way} transfers are disallowed")
    count[what] += 1


def _kernel(function, *args, **kwargs):
    args, kwargs = _in(args), {k: _in(v) for k, v in kwargs.items()}
    return _out(_launch(lambda: function(*args, **kwargs)))


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
        if capture is not None:
            capture[1].append(a)

    dtype, shape, ndim, size, strides, itemsize, nbytes, base = (
        property(lambda self, n=n: getattr(self._a, n))
        for n in ("dtype", "shape", "ndim", "size", "strides", "itemsize", "nbytes", "base")
    )
    flags = property(lambda self: _Flags(self._a.flags))
    T = property(lambda self: ndarray(self._a.T))
    data = property(lambda self: types.SimpleNamespace(ptr=self._a.ctypes.data, mem=pool.block(self._a)))
    __cuda_array_interface__ = property(lambda self: {"data": (self.data.ptr, False), "shape": self.shape})
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
        plain = self._key(key)
        out = self._a[plain]
        if not isinstance(out, np.ndarray):
            out = self._a[(*(plain if isinstance(plain, tuple) else (plain,)), ...)]
        if not np.may_share_memory(out, self._a):
            return _kernel(lambda a, key: a[key], self, key)
        return ndarray(out)

    def __setitem__(self, key, value):
        self._key(key)
        _kernel(np.ndarray.__setitem__, self, key, value)

    @staticmethod
    def _key(key):
        for k in key if isinstance(key, tuple) else (key,):
            if isinstance(k, list | np.ndarray):
                raise TypeError(f"Unsupported type {type(k)}: an index from the host")
            if isinstance(k, ndarray) and k.dtype == np.bool_:
                _forbid("sync")  # the size of the result depends on values
        return _in(key)

    # views and copies
    def reshape(self, *shape):
        return _viewed(np.ndarray.reshape, self, *shape)

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
        _forbid("get")
        return self._a.copy()

    def _wait(self, function):
        _forbid("sync")
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
    "abs exp log log1p expm1 log2 log10 sqrt tanh sin cos tan sinh cosh arcsin arccos arctan arctan2 "
    "maximum minimum subtract remainder floor_divide where isfinite "
    "isnan isinf logical_and logical_or logical_xor logical_not "
    "round floor ceil trunc copysign clip zeros_like ones_like full_like max min prod argmax argmin argsort cumsum cumprod "
    "concatenate take tril triu zeros full arange tri flip"
).split():
    setattr(MODULE, _n, _function(_n))


def _viewed(function, x, *args, **kwargs):
    """A view where NumPy makes one, else a launch that copies."""
    out = function(x._a, *args, **kwargs)
    return ndarray(out) if np.may_share_memory(out, x._a) else _kernel(function, x, *args, **kwargs)


def _view(name):
    def function(x, *args, **kwargs):
        return _viewed(getattr(np, name), x, *args, **kwargs)

    setattr(MODULE, name, function)


for _n in "reshape transpose swapaxes moveaxis broadcast_to ascontiguousarray".split():
    _view(_n)


def _module(function):
    setattr(MODULE, function.__name__, function)
    return function


@_module
def nonzero(x):
    _forbid("sync")  # the size of the result depends on values
    return tuple(ndarray(np.array(at)) for at in np.nonzero(x._a))


@_module
def asarray(x):
    if isinstance(x, ndarray):
        return x
    _forbid("put")
    return ndarray(np.array(x))


@_module
def empty(shape, dtype):
    """Memory that holds what nobody should read: nan, or all bits."""
    a = np.empty(shape, dtype)
    a.reshape(-1).view(np.uint8)[...] = 0xFF
    return ndarray(a)


@_module
def empty_like(x, dtype=None):
    """In the order of x's memory, without its gaps."""
    like = np.empty_like(x._a, dtype=dtype)
    order = sorted(range(like.ndim), key=lambda i: -like.strides[i])
    return empty([like.shape[i] for i in order], like.dtype).transpose(*np.argsort(order))


def _sum(x, axis, dtype, keepdims, divided):
    if x.dtype.itemsize == 2 and dtype is None:
        raise TypeError("the sum of a half array has no accumulator: say dtype=float32")

    def function(a):
        total = np.sum(a if dtype is None else a.astype(dtype), axis=axis, keepdims=keepdims)
        return total / (a.size / max(total.size, 1)) if divided else total

    return _kernel(function, x)


@_module
def sum(x, axis=None, dtype=None, keepdims=False):
    return _sum(x, axis, dtype, keepdims, divided=False)


@_module
def mean(x, axis=None, dtype=None, keepdims=False):
    return _sum(x, axis, dtype, keepdims, divided=True)


@_module
def matmul(a, b):
    if a.dtype.kind not in "iub":
        raise TypeError("matmul of floats: gemm.py does those, also while a stream is captured")
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
        for a in args:
            by_value = isinstance(a, np.generic) or isinstance(a, np.ndarray) and a.dtype.names
            assert by_value or isinstance(a, ndarray), (
                f"{self.name}: a bare {type(a).__name__} as an argument"
            )
            assert not isinstance(a, ndarray) or a._a.flags.c_contiguous, f"{self.name}: an array with gaps"
        plain = [a._a if isinstance(a, ndarray) else a for a in args]
        _launch(lambda: self.double(*plain))


class second(ndarray):
    """An array on a second GPU: for what is to be refused, nothing computes there."""

    __slots__ = ()
    device = property(lambda self: types.SimpleNamespace(id=1))


PROPERTIES = {"name": b"stand-in", "major": 9, "minor": 0, "totalGlobalMem": 2**30, "multiProcessorCount": 4}


class Device(contextlib.nullcontext):
    compute_capability = "90"
    id = 0

    pci_bus_id = "0000:01:00.0"

    def __init__(self, index=0):
        super().__init__()
        assert index == 0

    def use(self):
        return self

    def synchronize(self):
        _forbid("sync")


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
    function = getattr(blas, name)
    scalars = [i for i, p in enumerate(inspect.signature(function).parameters) if p in ("alpha", "beta")]

    def call(*args):
        args = [getattr(a, "value", a) for a in args]  # ctypes' numbers, past CuPy
        held = [ctypes.create_string_buffer(ctypes.string_at(args[i], 8)) for i in scalars]  # read at once
        for i, h in zip(scalars, held, strict=True):
            args[i] = ctypes.addressof(h)
        _launch(lambda held=held: function(*args))
        return 0

    return call


def _guarded(call):
    """CuPy's wrapper of a cuBLAS call, which can't be captured."""

    def wrapper(*args):
        if capture is not None:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        call(*args)

    return wrapper


class Stream(contextlib.nullcontext):
    def __init__(self, non_blocking=False):
        super().__init__()

    def begin_capture(self):
        global capture
        capture = ([], [])

    def end_capture(self):
        global capture
        (launches, arrays), capture = capture, None
        return Graph(launches, arrays)


class Graph:
    def __init__(self, launches, arrays):
        self.launches, self.arrays = launches, arrays

    def launch(self):
        count["graph"] += 1
        for launch in self.launches:
            launch()


CUBLAS = types.SimpleNamespace(  # cuBLAS without CuPy
    cublasSetStream_v2=lambda handle, stream: 0,
    cublasGemmEx=_cublas("gemm_ex"),
    cublasGemmStridedBatchedEx=_cublas("gemm_strided_batched_ex"),
)

MODULE.cuda = types.SimpleNamespace(
    is_available=lambda: True,
    Device=Device,
    Event=Event,
    get_elapsed_time=get_elapsed_time,
    Stream=Stream,
    get_current_stream=lambda: types.SimpleNamespace(ptr=0),
    MemoryHook=pool.MemoryHook,
    MemoryPool=lambda: types.SimpleNamespace(malloc=None),
    using_allocator=lambda allocator: contextlib.nullcontext(),
    runtime=types.SimpleNamespace(
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda i: PROPERTIES,
        runtimeGetVersion=lambda: 13020,
        memGetInfo=pool.mem_get_info,
    ),
    device=types.SimpleNamespace(get_cublas_handle=lambda: 1, get_device_id=lambda: 0),
    cublas=types.SimpleNamespace(
        gemmEx=_guarded(CUBLAS.cublasGemmEx),
        gemmStridedBatchedEx=_guarded(CUBLAS.cublasGemmStridedBatchedEx),
        setMathMode=lambda handle, mode: None,
    ),
)
MODULE.get_default_memory_pool = lambda: pool


@contextlib.contextmanager
def installed():
    """The stand-in in CuPy's place; yields this module's names as an object with `count`."""
    before, loaded = device.use(MODULE), cublas.loaded
    cublas.loaded = lambda: CUBLAS
    device._ready.append("ok")  # the real check multiplies halves
    count.clear()
    try:
        yield types.SimpleNamespace(count=count, ndarray=ndarray, xp=MODULE)
    finally:
        faults.clear()
        device.use(before)
        cublas.loaded = loaded
