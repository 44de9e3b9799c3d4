"""Sums between GPUs by NCCL, through CuPy; minamp/distributed/group.py uses it where every rank has a GPU of its own."""

import importlib
import platform
import warnings

from minamp.backends import device
from minamp.backends.device import xp
from minamp.formats import bfloat16, float16, float32, float64

# ncclDataType_t and ncclRedOp_t of NCCL 2
KINDS, SUM = {float16: 6, float32: 7, float64: 8, bfloat16: 9}, 0


def _nccl():
    """CuPy's module, which `import cupy` leaves out; its warning that the library is missing is why_not's answer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(xp.cuda, "nccl", None) or importlib.import_module("cupy.cuda.nccl")


def why_not():
    """Why NCCL can't be used here, in one line; None if it can."""
    status = device.gpu_status()
    if status != "ok":
        return status
    try:
        _nccl().get_version()
    except (ImportError, AttributeError, RuntimeError):
        return "CuPy finds no NCCL: pip install nvidia-nccl-cu13"
    return None


def card():
    """The current GPU by a name that all ranks of all machines would give it."""
    return f"{platform.node()} {xp.cuda.Device().pci_bus_id}"


def unique_id():
    """What rank 0 makes and sends to all, so that they find each other: a list of whole numbers."""
    return list(_nccl().get_unique_id())


class Ring:
    """NCCL's communicator: this rank of `size`, on the GPU that is current. Sums run on a stream of their own."""

    def __init__(self, size, identity, rank):
        self.comm = _nccl().NcclCommunicator(size, bytes(identity), rank)
        self.stream = xp.cuda.Stream(non_blocking=True)

    def start_all_reduce(self, array):
        """Begin to sum a contiguous array in place over all ranks; the request has Test(), as MPI's."""
        if array.dtype not in KINDS:
            raise TypeError(f"all_reduce: NCCL can't add {array.dtype}: convert to float32 first")
        self.stream.wait_event(xp.cuda.get_current_stream().record())  # what fills the array comes first
        place = array.data.ptr
        self.comm.allReduce(place, place, array.size, KINDS[array.dtype], SUM, self.stream.ptr)
        return _Request(self.stream.record())


class _Request:
    def __init__(self, event):
        self.event = event

    def Test(self):
        return self.event.done
