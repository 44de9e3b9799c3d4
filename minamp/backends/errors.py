"""What the GPU reports, in minamp's words: which op, which arrays, which line, and what to do about it."""

import contextlib
import functools
import linecache
import os
import re
import sys

import numpy as np

from minamp.backends import device

# whose frames are nobody's own code: ours, and NumPy's and contextlib's decorators between them
NOT_USERS = (
    *(os.path.dirname(f) + os.sep for f in (os.path.dirname(os.path.abspath(__file__)), np.__file__)),
    contextlib.__file__,
)
# By name: looking at the classes would load their libraries, which may be what is missing.
_KERNEL_ERRORS = {"CUDARuntimeError", "CUDADriverError", "CUBLASError"}

checking = False  # minamp.debug(sync=True) is on: every op is waited for, so an error belongs to the op that meets it


class OutOfMemoryError(RuntimeError):
    """The GPU's memory is used up. `needed` and `free` in bytes (None: not known); nothing was written."""

    def __init__(self, text, needed=None, free=None):
        super().__init__(text)
        self.needed, self.free = needed, free


def explain(error, what):
    """Raise the named error if `error` is the GPU's, with `what` (op and arguments) in it; else return."""
    kind = type(error).__name__
    if kind == "OutOfMemoryError" and isinstance(error, MemoryError) or _no_memory(error):
        raise _out_of_memory(error, what) from error
    if kind not in _KERNEL_ERRORS or "StreamCapture" in str(error):  # what can't be captured harms nothing
        return
    if checking:
        text = f"{what}: its kernel failed on the GPU ({device.line(error)}). Called at {user_line()}. "
    else:
        text = (
            f"{what}: the GPU reports {device.line(error)}. Kernels fail late, so an earlier op may be the one: "
            "run the step inside minamp.debug(sync=True), which names it. "
        )
    raise RuntimeError(text + "The GPU can't be used any more in this process: start it again") from error


def _no_memory(error):
    """The same said by the driver or by cuBLAS, whose workspace does not come from CuPy's pool."""
    said = str(error)
    return type(error).__name__ in _KERNEL_ERRORS and (
        "cudaErrorMemoryAllocation" in said or "CUDA_ERROR_OUT_OF_MEMORY" in said or "ALLOC_FAILED" in said
    )


def _out_of_memory(error, what):
    from minamp.backends import memory

    found = re.search(r"([\d,]+) bytes", str(error))
    needed = int(found[1].replace(",", "")) if found else None
    free, total = memory.room()
    return OutOfMemoryError(
        f"{what}: out of memory on the GPU: {_size(needed)} needed, {_size(free)} free of {_size(total)}. Nothing was "
        "written. Lower the batch (and add up the gradients of several), run it through in chunks, or keep less for "
        "backward: autocast halves it, and minamp.utils.checkpoint runs parts of the forward again instead of keeping them",
        needed,
        free,
    )


def _size(n):
    return "an unknown number of bytes" if n is None else f"{n} bytes ({n / 2**20:.1f} MB)"


class guard(contextlib.ContextDecorator):
    """Context manager or decorator for what is no op (an optimizer's step, a move): errors inside get `what` into their text.

    While minamp.debug(sync=True) is on it also waits for the GPU at its end.
    """

    def __init__(self, what):
        self.what = what

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if error is not None:
            explain(error, self.what)
        elif checking:
            wait(self.what)


def wait(what):
    """Wait for the GPU; a kernel that failed is reported as that of `what`."""
    if device.in_use():
        try:
            device.synchronize()
        except Exception as error:
            explain(error, what)
            raise


def user_line():
    """'file:line in function: code' of the innermost frame outside minamp."""
    frame = sys._getframe(1)
    while frame is not None and ours(frame.f_code.co_filename):
        frame = frame.f_back
    return "no user code on the stack" if frame is None else place(frame, frame.f_lineno)


@functools.lru_cache(1024)
def ours(file):
    """Whether code of that file is nobody's own."""
    return file.startswith(NOT_USERS)


def place(frame, line):
    """A line of a frame's code as 'file:line in function: code'."""
    return _place(frame.f_code, line)


@functools.lru_cache(1024)  # the doctor asks for every op of a step: 2 us instead of 10
def _place(code, line):
    name = code.co_filename
    return f"{name}:{line} in {code.co_name}: {linecache.getline(name, line).strip()}"
