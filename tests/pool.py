"""The stand-in's memory pool: how many bytes its arrays hold, CuPy's hooks, and memory that ends when a test says so."""

import types
import weakref

import faults
import numpy as np

TOTAL = 1 << 34
_live = {}  # id of the NumPy array that owns the memory -> (reference, bytes)
_kept = 0  # freed, but not given back
_hooks = {}


class MemoryHook:
    """CuPy's base class: entered, it is told of everything the pool hands out and takes back."""

    name = "hook"

    def __enter__(self):
        _hooks[self.name] = self

    def malloc_postprocess(self, device_id, size, mem_size, mem_ptr, pmem_id): ...

    def free_postprocess(self, device_id, mem_size, mem_ptr, pmem_id): ...


def _owner(a):
    while isinstance(a.base, np.ndarray):
        a = a.base
    return a


def hold(a):
    """Count the memory of `a`, if no array holds it yet."""
    global _kept
    owner = _owner(a)
    key = id(owner)
    if key in _live:
        return
    size = -(-owner.nbytes // 512) * 512
    fails = faults.allocation(size, used_bytes)
    for hook in _hooks.values():
        hook.malloc_postprocess(
            device_id=0,
            size=owner.nbytes,
            mem_size=size,
            mem_ptr=0 if fails else owner.ctypes.data,
            pmem_id=key,
        )
    if fails:
        raise fails
    _kept = max(0, _kept - size)
    _live[key] = weakref.ref(owner, lambda _: _free(key)), size


def _free(key):
    global _kept
    _, size = _live.pop(key)
    _kept += size
    for hook in _hooks.values():
        hook.free_postprocess(device_id=0, mem_size=size, mem_ptr=1, pmem_id=key)


def block(a):
    return types.SimpleNamespace(size=_live[id(_owner(a))][1])


def used_bytes():
    return sum(size for _, size in _live.values())


def free_bytes():
    return _kept


def total_bytes():
    return used_bytes() + _kept


def free_all_blocks():
    global _kept
    _kept = 0


def mem_get_info():
    return TOTAL - total_bytes(), TOTAL
