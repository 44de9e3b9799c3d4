"""How much memory of the GPU is used, now and at most. CuPy keeps no peak, so a hook on its pool counts along.

The hook is put in place when the GPU is first used; CuPy keeps hooks per thread, so what other threads allocate enters the
peak only where a function here is called next.
"""

from minamp.backends import device
from minamp.backends.device import xp

_hooks = {}  # id of the array module -> its hook, entered in this thread


def _counter(base):
    class Counter(base):
        """Bytes in use and their peak, per device, as the pool rounds them (to 512)."""

        name = "minamp"

        def __init__(self):
            self.now, self.peak = {}, {}

        def malloc_postprocess(self, device_id, size, mem_size, mem_ptr, pmem_id):
            if mem_ptr:  # 0: the pool had no more
                now = self.now[device_id] = self.now.get(device_id, 0) + mem_size
                if now > self.peak.get(device_id, 0):
                    self.peak[device_id] = now

        def free_postprocess(self, device_id, mem_size, mem_ptr, pmem_id):
            self.now[device_id] = self.now.get(device_id, 0) - mem_size

    return Counter()


def start():
    """Count from now on; once per array module."""
    module = device.array_module()
    hook = _hooks.get(id(module))
    if hook is None:
        hook = _hooks[id(module)] = _counter(module.cuda.MemoryHook)
        hook.__enter__()
    return hook


def _pool():
    return xp.get_default_memory_pool()


def _counted():
    """(hook, number of the current GPU), the hook's count put right by the pool's own."""
    hook, i = start(), device.current()
    hook.now[i] = used = _pool().used_bytes()
    hook.peak[i] = max(hook.peak.get(i, 0), used)
    return hook, i


def allocated():
    """Bytes that arrays on the current GPU take up."""
    return _pool().used_bytes()


def peak():
    """The most that `allocated` has been since the start or the last `reset_peak`."""
    hook, i = _counted()
    return hook.peak[i]


def reset_peak():
    hook, i = _counted()
    hook.peak[i] = hook.now[i]


def reserved():
    """Bytes the pool holds: those in use and those kept for the next array."""
    return _pool().total_bytes()


def empty_cache():
    """Give what the pool keeps without using it back to the driver."""
    _pool().free_all_blocks()


def info():
    """(free, total) bytes of the current GPU, as the driver counts them for all processes."""
    return xp.cuda.runtime.memGetInfo()


def room():
    """(free, total) with what the pool could give away counted as free; (None, None) where the driver does not answer."""
    try:
        free, total = info()
        return free + _pool().free_bytes(), total
    except Exception:  # asked for the text of another error, which matters more
        return None, None
