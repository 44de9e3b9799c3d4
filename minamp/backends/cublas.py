"""cuBLAS's two products, as CuPy calls them; and past CuPy while a stream is captured.

CuPy's wrappers raise NotImplementedError then, before they call anything. cuBLAS itself can be captured (its manual, "CUDA Graphs
Support"), with the factors as they are at the call. So the same arguments go to the library that CuPy has loaded.
"""

import ctypes
import sys

from minamp.backends.device import xp

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_longlong}
# handle, transposed, m, n, k; alpha; address, type, leading dimension (and stride) of both; beta; of the result; the rest
_ARGUMENTS = {
    "gemmEx": "piiiii p pii pii p pii ii",
    "gemmStridedBatchedEx": "piiiii p piil piil p piil iii",
}


def call(name, handle, *args):
    """gemmEx or gemmStridedBatchedEx, on the current stream."""
    try:
        getattr(xp.cuda.cublas, name)(handle, *args)
    except NotImplementedError:
        cublas = loaded()
        product = getattr(cublas, f"cublas{name[0].upper()}{name[1:]}")
        types = [_KINDS[k] for k in _ARGUMENTS[name].replace(" ", "")]
        args = [kind(a) for kind, a in zip(types, (handle, *args), strict=True)]
        stream = ctypes.c_void_p(xp.cuda.get_current_stream().ptr)
        if status := cublas.cublasSetStream_v2(args[0], stream) or product(*args):
            raise xp.cuda.cublas.CUBLASError(status) from None


def loaded():
    """cuBLAS as CuPy has loaded it: its name finds it then, wherever it lies."""
    version = xp.cuda.runtime.runtimeGetVersion() // 1000
    return ctypes.CDLL(f"cublas64_{version}.dll" if sys.platform == "win32" else f"libcublas.so.{version}")
