"""What goes wrong on a GPU, on demand: memory that ends at the n-th array, a kernel that fails some calls after its launch."""

_memory = _kernel = None  # how many allocations or launches are still good
_sick = None  # after a failed kernel: how many more launches go through before one is refused


class OutOfMemoryError(MemoryError):
    """CuPy's name and words."""


class CUDARuntimeError(RuntimeError):
    """CuPy's name."""


def out_of_memory_at(n):
    """Let the n-th array from now (0: the next) find no memory, that one only."""
    global _memory
    _memory = n


def fail_kernel(n):
    """Let the n-th launch from now (0: the next) fail: noticed two launches later, or where somebody waits."""
    global _kernel
    _kernel = n


def clear():
    global _memory, _kernel, _sick
    _memory = _kernel = _sick = None


def allocation(size, used):
    """The error for an array of `size` bytes, or None."""
    global _memory
    if _memory is None:
        return None
    _memory -= 1
    if _memory >= 0:
        return None
    _memory = None
    return OutOfMemoryError(f"Out of memory allocating {size:,} bytes (allocated so far: {used():,} bytes).")


def pending():
    """Whether the failure that was ordered has not happened yet."""
    return _memory is not None


def seen(what):
    """The stand-in has launched a kernel, copied to the host or waited."""
    global _kernel, _sick
    if _sick is not None:
        _sick -= what == "kernel"
        if _sick <= 0 or what in ("get", "sync"):
            raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")
    elif _kernel is not None and what == "kernel":
        _kernel -= 1
        if _kernel < 0:
            _kernel, _sick = None, 2
