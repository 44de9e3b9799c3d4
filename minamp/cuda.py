"""The names of torch.cuda that training scripts ask for: is there a GPU, wait for it, its memory, its clock.

Functions that answer with a number of a GPU raise RuntimeError where there is none, and say why; what only tidies up or waits
does nothing there.
"""

from types import SimpleNamespace

from minamp import amp, backends  # noqa: F401  torch.cuda.amp
from minamp.backends import gpu_status, memory
from minamp.backends.errors import OutOfMemoryError  # noqa: F401  torch's place for it
from minamp.backends.graph import CUDAGraph, graph  # noqa: F401
from minamp.draw import manual_seed

manual_seed_all = manual_seed  # the host's generator draws for every device


def is_available():
    """True where a GPU can be used; minamp.gpu_status() says why not."""
    return gpu_status() == "ok"


def device_count():
    """How many GPUs there are; 0 where none can be used."""
    return backends.device.count() if is_available() else 0


def set_device(device):
    """Compute on the GPU `device` (a number or 'cuda:1') from here on: 'cuda' is that one then. RuntimeError without it."""
    backends.device.need("minamp.cuda.set_device")
    index = _index(device)
    if index is not None:
        backends.device.gpu(index).use()


def current_device():
    """The number of the GPU that computes. RuntimeError without one."""
    backends.device.need("minamp.cuda.current_device")
    return backends.device.current()


def get_device_properties(device=None):
    """name, total_memory (bytes), multi_processor_count, major and minor (the compute capability) of a GPU."""
    found = _on(device, "get_device_properties", backends.device.properties)
    return SimpleNamespace(
        name=found["name"].decode(),
        major=found["major"],
        minor=found["minor"],
        total_memory=found["totalGlobalMem"],
        multi_processor_count=found["multiProcessorCount"],
    )


def get_device_name(device=None):
    """The GPU's name, such as 'NVIDIA H200'."""
    return get_device_properties(device).name


def get_device_capability(device=None):
    """(major, minor): float16 has tensor cores from (7, 0) on, bfloat16 from (8, 0) on."""
    found = get_device_properties(device)
    return found.major, found.minor


def synchronize(device=None):
    """Wait until everything launched on the GPU is done; on the CPU there is nothing to wait for."""
    if backends.device.in_use():
        backends.device.synchronize()


def is_bf16_supported(including_emulation=True):
    """Whether the GPU multiplies bfloat16: tried once with a small product, not read off a version. False without a GPU."""
    return is_available() and backends.bf16_works()


# ---- memory


def memory_allocated(device=None):
    """Bytes that tensors take up on the GPU, as the pool rounds them (to 512 a tensor)."""
    return _on(device, "memory_allocated", memory.allocated)


def max_memory_allocated(device=None):
    """The most that memory_allocated() has been since the GPU was first used or reset_peak_memory_stats() was called."""
    return _on(device, "max_memory_allocated", memory.peak)


def reset_peak_memory_stats(device=None):
    """Let max_memory_allocated() begin again from what is in use now."""
    _on(device, "reset_peak_memory_stats", memory.reset_peak)


def memory_reserved(device=None):
    """Bytes the pool holds: those in use and those it keeps for the next tensor."""
    return _on(device, "memory_reserved", memory.reserved)


def mem_get_info(device=None):
    """(free, total) bytes of the GPU, as its driver counts them for all processes."""
    return _on(device, "mem_get_info", memory.info)


def empty_cache():
    """Give the memory that the pool keeps without using it back to the driver."""
    if backends.device.in_use():
        memory.empty_cache()


def _on(device, name, function):
    """`function` on the GPU `device` (default the current one). RuntimeError without one."""
    backends.device.need(f"minamp.cuda.{name}")
    index = _index(device)
    if index is None:
        return function()
    with backends.device.gpu(index):
        return function()


def _index(device):
    """1 for 1 and 'cuda:1', None for None and 'cuda'."""
    return device if isinstance(device, int) else None if device is None else backends.Device(device).index


# ---- time


class Event:
    """A mark in the GPU's stream of work: record() sets it, start.elapsed_time(end) are milliseconds between two.

    Time measured so holds the GPU's work alone, without what Python does before and after it. enable_timing must be True
    for that. RuntimeError without a GPU.
    """

    def __init__(self, enable_timing=False, blocking=False):
        backends.device.need("minamp.cuda.Event")
        self._event = backends.device.xp.cuda.Event(block=blocking, disable_timing=not enable_timing)
        self._timed, self._recorded = enable_timing, False

    def record(self):
        """Set the mark behind what has been launched so far."""
        self._event.record()
        self._recorded = True

    def query(self):
        """Whether the GPU has come past the mark."""
        return bool(self._event.done)

    def synchronize(self):
        """Wait until the GPU comes past the mark."""
        self._event.synchronize()

    def elapsed_time(self, end_event):
        """Milliseconds from this mark to `end_event`; waits for that one."""
        for name, event in (("start", self), ("end", end_event)):
            if not event._timed:
                raise ValueError(
                    f"elapsed_time: the {name} event keeps no time: make it with enable_timing=True"
                )
            if not event._recorded:
                raise ValueError(f"elapsed_time: the {name} event was not recorded: call record() first")
        end_event.synchronize()
        return float(backends.device.xp.cuda.get_elapsed_time(self._event, end_event._event))
