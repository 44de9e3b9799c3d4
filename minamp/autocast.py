"""Autocast regions: a stack of (dtype, cache) settings, and the cache of weight casts that lives as long as the outermost one.

Which op is cast to what is its policy (minamp/policy.py); here is only where autocast is on, and with which dtype.
All state is thread-local: a new thread starts outside every region.
"""

import functools
import inspect
import threading

import numpy as np

from minamp.announce import announced
from minamp.backends import device_type as check_device
from minamp.formats import bfloat16, float16, float32, is_half
from minamp.methods import OPS
from minamp.record import enable_grad, grad_mode
from minamp.tensor import Tensor
from minamp.warn import warn


class _State(threading.local):
    def __init__(self):
        self.enabled = False
        self.allowed = True  # False inside without_autocast
        self.dtype = float16  # what a region without dtype= uses: the enclosing one's, float16 outside
        self.cache_enabled = True
        self.depth = 0
        self.outer = []  # what every region that is open in this thread found, innermost last
        self.cache = {}  # (id of weight, dtype) -> (weight, its version, the cast)


state = _State()


def is_autocast_enabled(device_type=None):
    """True inside an enabled region of this thread."""
    return state.enabled


def get_autocast_dtype(device_type=None):
    """The dtype that matmuls and convolutions are cast to (float16 unless a region says otherwise)."""
    return state.dtype


def is_autocast_cache_enabled():
    """True where weight casts are kept for reuse."""
    return state.cache_enabled


def set_autocast_enabled(*args):
    """set_autocast_enabled([device_type,] enabled): switch autocast on or off in this thread; regions do this for you."""
    state.enabled = bool(args[-1]) and state.allowed and _casts_to(state.dtype)


def set_autocast_dtype(*args):
    """set_autocast_dtype([device_type,] dtype): the dtype of regions that name none, in this thread.

    One that is no half format disables them, and warns where they open.
    """
    dtype = np.dtype(args[-1])
    state.enabled = state.enabled and _casts_to(dtype)
    state.dtype = dtype


def set_autocast_cache_enabled(enabled):
    """Whether weight casts are kept, in this thread."""
    state.cache_enabled = bool(enabled)


def clear_autocast_cache():
    """Drop the kept weight casts; leaving the outermost region does this by itself."""
    state.cache.clear()


def _casts_to(dtype):
    """Whether there is something to cast to `dtype`; a warning if there is not."""
    if not is_half(dtype):
        warn(
            f"autocast: dtype {dtype} is not a half format, the region is disabled: use {float16} or {bfloat16}"
        )
    return is_half(dtype)


def _check_device_type(name, device_type):
    if type(device_type) is not str:
        raise ValueError(
            f"{name}: device_type must be a string such as 'cuda' or 'cpu', got {type(device_type).__name__}"
        )


class autocast:
    """A region where ops run in the dtype their policy names; context manager and decorator, as torch.autocast.

    device_type: 'cuda' or 'cpu', optional and without effect: regions work on every device. dtype: float16 or bfloat16;
    default: the enclosing region's, float16 outside. enabled=False opens a region where nothing is cast.
    cache_enabled: keep the half copy of a weight until the outermost region ends.
    Another dtype, named or taken over, warns (UserWarning) and disables the region, on every device; PyTorch does so on the
    CPU only.
    Raises ValueError for a device_type that is not a string, RuntimeError for an unknown device.
    """

    def __init__(self, device_type="cuda", dtype=None, enabled=True, cache_enabled=None):
        _check_device_type("autocast", device_type)
        check_device(device_type)
        self.dtype = None if dtype is None else np.dtype(dtype)
        self.enabled = bool(enabled) and _casts_to(state.dtype if self.dtype is None else self.dtype)
        self.cache_enabled = cache_enabled

    @announced("autocast")
    def __enter__(self):
        state.outer.append((state.enabled, state.dtype, state.cache_enabled))
        state.dtype = state.dtype if self.dtype is None else self.dtype
        # the enclosing region's dtype may be another than when this object was made
        state.enabled = self.enabled and state.allowed and is_half(state.dtype)
        state.cache_enabled = state.cache_enabled if self.cache_enabled is None else bool(self.cache_enabled)
        state.depth += 1
        return self

    def __exit__(self, *_):
        state.enabled, state.dtype, state.cache_enabled = state.outer.pop()
        state.depth -= 1
        if state.depth == 0:
            state.cache.clear()

    def _fresh(self):
        return type(self)(dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled)

    def __call__(self, function):
        if not callable(function):
            raise TypeError(
                f"autocast is a context manager or a decorator, {type(function).__name__} is not callable: use `with autocast():`"
            )
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def generator(*args, **kwargs):
                # The region is open while the body runs and closed at every yield.
                body, send, value = function(*args, **kwargs), "send", (None,)
                while True:
                    try:
                        with self._fresh():
                            out = getattr(body, send)(*value)
                    except StopIteration as stop:
                        return stop.value
                    try:
                        send, value = "send", ((yield out),)
                    except GeneratorExit:
                        body.close()
                        raise
                    except BaseException as error:
                        send, value = "throw", (error,)

            return generator

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            with self._fresh():
                return function(*args, **kwargs)

        return wrapped


class without_autocast:
    """Context manager: no region casts anything, neither those opened inside nor the one around it.

    It runs a training step that has its regions inside as if they were not there, to compare the two (verify_amp).
    """

    def __init__(self):
        self.outer = []  # its own, not the regions' one: the step may leave a region open

    def __enter__(self):
        self.outer.append((state.enabled, state.allowed))
        state.enabled = state.allowed = False
        return self

    def __exit__(self, *_):
        state.enabled, state.allowed = self.outer.pop()


def cast(tensor, dtype):
    """`tensor` in `dtype`; the half copy of a float32 weight is made once and kept until the outermost region ends.

    The key holds the dtype and the weight's version, so a copy is never stale and never of the wrong format. The copy is
    recorded even under no_grad: one made without history must not be served to a training forward.
    """
    if tensor.dtype == dtype:
        return tensor
    keep = (
        state.cache_enabled
        and not grad_mode.inference
        and tensor.requires_grad
        and tensor.dtype == float32
        and is_half(dtype)
        and tensor.is_leaf
        and not tensor._is_view
    )
    if not keep:
        return tensor.to(dtype)
    key = (id(tensor), dtype)
    found = state.cache.get(key)
    if found is not None and found[1] == tensor._version[0]:
        return found[2]
    to = OPS["to"] if grad_mode.enabled else enable_grad()(OPS["to"])
    copy = to(tensor, dtype, factor=True)
    state.cache[key] = (tensor, tensor._version[0], copy)
    return copy


# ------------------------------------------------------------------------------------------- decorators for autograd.Function


def _cast_nested(value, dtype):
    """`value` with every floating tensor in it (not float64) cast; dicts (keys too), lists, tuples and iterables are walked."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype == float32 or is_half(value.dtype) else value
    if isinstance(value, str | bytes | np.ndarray):
        return value
    if isinstance(value, dict):
        return {_cast_nested(k, dtype): _cast_nested(v, dtype) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast_nested(v, dtype) for v in value)
    if hasattr(value, "__iter__"):
        return (_cast_nested(v, dtype) for v in value)
    return value


def custom_fwd(fwd=None, *, device_type, cast_inputs=None):
    """Decorator for the forward of an autograd.Function, as torch.amp.custom_fwd.

    cast_inputs=None: the body runs in the caller's region as it is. cast_inputs=dtype: inside a region, floating tensors among
    the arguments are cast to dtype and the body runs with autocast off; outside a region nothing happens.
    device_type: str, required, without effect. ValueError if it is not a str.
    """
    _check_device_type("custom_fwd", device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(ctx, *args, **kwargs):
        ctx._autocast_dtype, ctx._autocast_enabled = state.dtype, state.enabled and cast_inputs is None
        if cast_inputs is None or not state.enabled:
            return fwd(ctx, *args, **kwargs)
        args, kwargs = _cast_nested(args, cast_inputs), _cast_nested(kwargs, cast_inputs)
        with autocast(enabled=False):
            return fwd(ctx, *args, **kwargs)

    return forward


def custom_bwd(bwd=None, *, device_type):
    """Decorator for the backward of an autograd.Function: it runs under the autocast state its forward's body had.

    AttributeError, when backward runs, without custom_fwd on a forward(ctx, ...).
    """
    _check_device_type("custom_bwd", device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx, *args, **kwargs):
        if not hasattr(ctx, "_autocast_enabled"):
            raise AttributeError(
                "custom_bwd: ctx has no _autocast_enabled, which custom_fwd notes there: put "
                f"@custom_fwd(device_type={device_type!r}) on forward(ctx, ...); a forward beside setup_context is given no ctx"
            )
        with autocast(enabled=ctx._autocast_enabled, dtype=ctx._autocast_dtype):
            return bwd(ctx, *args, **kwargs)

    return backward
