"""Sums between GPUs by NCCL, through CuPy; minamp/distributed/group.py uses it where every rank has a GPU of its own."""

from minamp.backends import device
from minamp.backends.device import xp
from minamp.formats import bfloat16, float16, float32, float64


def why_not():
    """Why NCCL can't be used here, in one line; None if it can."""
    status = device.gpu_status()
    if status != "ok":
        return status
    try:
        xp.cuda.nccl.get_version()
    except (ImportError, AttributeError, RuntimeError):
        return "CuPy finds no NCCL: pip install nvidia-nccl-cu13"
    return None


def unique_id():
    """What rank 0 makes and sends to all, so that they find each other: a list of whole numbers."""
    return list(xp.cuda.nccl.get_unique_id())


class Ring:
    """NCCL's communicator: this rank of `size`, on the GPU that is current. Sums run on a stream of their own."""

    def __init__(self, size, identity, rank):
        self.comm = xp.cuda.nccl.NcclCommunicator(size, tuple(identity), rank)
        self.stream = xp.cuda.Stream(non_blocking=True)

    def start_all_reduce(self, array):
        """Begin to sum a contiguous array in place over all ranks; the request has Test(), as MPI's."""
        nccl = xp.cuda.nccl
        kinds = {
            float64: nccl.NCCL_FLOAT64,
            float32: nccl.NCCL_FLOAT32,
            float16: nccl.NCCL_FLOAT16,
            bfloat16: getattr(nccl, "NCCL_BFLOAT16", None),
        }
        if kinds.get(array.dtype) is None:
            raise TypeError(
                f"all_reduce: NCCL can't add {array.dtype} through CuPy: convert to float32 first"
            )
        self.stream.wait_event(xp.cuda.get_current_stream().record())  # what fills the array comes first
        place = array.data.ptr
        self.comm.allReduce(place, place, array.size, kinds[array.dtype], nccl.NCCL_SUM, self.stream.ptr)
        return _Request(self.stream.record())


class _Request:
    def __init__(self, event):
        self.event = event

    def Test(self):
        return self.event.done
