"""The group: all processes of a run, numbered by rank, and what they do together. MPI carries it (mpi4py).

Nothing here blocks inside MPI. Every call starts a non-blocking operation and then asks whether it is done, so that a rank that
waits still hears that another one has failed (farewell.py), and gives up after `timeout` seconds.
"""

import json
import time

import numpy as np

import minamp
from minamp import backends
from minamp.distributed.farewell import Farewell
from minamp.distributed.half import half_sum
from minamp.formats import is_half

_group = None


class Group:
    """The processes of an MPI communicator; `rank` and `size` are MPI's. Messages are JSON, nothing is unpickled."""

    def __init__(self, timeout):
        from mpi4py import MPI

        self.MPI, self.comm, self.timeout = MPI, MPI.COMM_WORLD.Dup(), timeout
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.farewell = Farewell(MPI, self.rank, self.size, timeout)
        self.ring = None  # NCCL's, where every rank has a GPU

    # -- waiting

    def wait(self, request, what):
        """Until `request` is done. PeerError if a rank fails or leaves meanwhile, TimeoutError after `timeout` seconds."""
        start, asked = time.monotonic(), 0
        while not request.Test():
            asked += 1
            if asked % 20 == 0:
                self.farewell.look(what)
                waited = time.monotonic() - start
                if waited > self.timeout:
                    raise TimeoutError(
                        f"rank {self.rank} has waited {waited:.0f} s for the other ranks in {what}: one of them hangs, is much "
                        "slower, or has taken another way through the program; init(timeout=...) sets how long to wait"
                    )
                # A rank that is early leaves the core to the others; the first 20 questions take about 20 us.
                time.sleep(2e-5)

    # -- arrays

    def start_all_reduce(self, array):
        """Begin to sum a contiguous array over all ranks, in place; the request to wait for. Half goes by half.py."""
        if backends.device.holds(array):
            return self.ring.start_all_reduce(array) if self.ring else _ThroughHost(self, array)
        if is_half(array.dtype):
            view, op = array.view(np.uint16), half_sum(self.MPI, array.dtype)
            return self.comm.Iallreduce(self.MPI.IN_PLACE, [view, self.MPI.UINT16_T], op=op)
        return self.comm.Iallreduce(self.MPI.IN_PLACE, array)

    def largest(self, number, what):
        """The largest of one float per rank."""
        box = np.array([number], np.float64)
        self.wait(self.comm.Iallreduce(self.MPI.IN_PLACE, box, op=self.MPI.MAX), what)
        return float(box[0])

    def broadcast(self, array, source, what="broadcast"):
        """Copy a contiguous array of any dtype from rank `source` to all, in place."""
        self.wait(self.comm.Ibcast(array.reshape(-1).view(np.uint8), root=source), what)

    def gather(self, data, what):
        """A list with every rank's `data` (what JSON can hold), on every rank."""
        text = np.frombuffer(json.dumps(data).encode(), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        self.wait(self.comm.Iallgather(np.array([text.size], np.int64), sizes), what)
        whole = np.zeros(sizes.sum(), np.uint8)
        self.wait(self.comm.Iallgatherv(text, [whole, sizes]), what)
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        return [json.loads(part.tobytes()) for part in parts]

    def barrier(self):
        self.wait(self.comm.Ibarrier(), "barrier")


class _ThroughHost:
    """The sum of a GPU's array without NCCL: copied to main memory, summed there, copied back."""

    def __init__(self, group, array):
        self.array, self.copy = array, backends.host(array)
        self.request = group.start_all_reduce(self.copy)

    def Test(self):
        done = self.request.Test()
        if done:
            self.array[...] = backends.move(self.copy, backends.device_name(self.array))
        return done


# ------------------------------------------------------------------------------------------------------------ what the user calls


def init(backend=None, timeout=60.0):
    """Join the group; call it once, at the start of the program, on every rank.

    backend: 'mpi' sums gradients in main memory, 'nccl' between GPUs, one for each rank; None takes 'nccl' if every rank has
    a GPU and NCCL. timeout: seconds a rank waits for the others before it gives up with a TimeoutError.
    From here on an exception that ends one rank ends all of them, each with an error that names that rank.
    ImportError without mpi4py, ValueError for another backend or ranks that run different versions of minamp.
    """
    global _group
    if backend not in (None, "mpi", "nccl"):
        raise ValueError(f"init: backend must be 'mpi' or 'nccl', got {backend!r}")
    if _group is not None:
        raise RuntimeError("init: this process has joined the group already: call init() once")
    try:
        group = Group(timeout)
    except (ImportError, RuntimeError) as error:  # the second: mpi4py without a library that it can load
        raise ImportError(
            f"init: MPI is not to be had ({error}): pip install 'minamp[distributed]' brings mpi4py and MPICH, "
            "and python -m minamp.distributed -n 2 train.py starts two ranks"
        ) from error
    _group = group
    agree("minamp's version", minamp.__version__)
    if backend != "mpi":
        _join_ring(group, needed=backend == "nccl")


def _join_ring(group, needed):
    from minamp.backends import nccl

    reasons = group.gather(nccl.why_not(), "looking for NCCL")
    missing = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
    if not missing:
        cards = group.gather(nccl.card(), "looking for GPUs")
        if len(set(cards)) < len(cards):  # NCCL refuses that
            missing = [
                "ranks share a GPU: give each one of its own, by minamp.cuda.set_device or CUDA_VISIBLE_DEVICES"
            ]
    if not missing:
        group.ring = nccl.Ring(
            group.size, group.gather(group.rank == 0 and nccl.unique_id(), "NCCL")[0], group.rank
        )
    elif needed:
        raise RuntimeError(
            f"init: NCCL is not to be had: {missing[0]}; backend='mpi' goes through main memory"
        )


def group():
    """The Group of this process. RuntimeError before init()."""
    if _group is None:
        raise RuntimeError(
            "minamp.distributed: this process has joined no group: call minamp.distributed.init() first"
        )
    return _group


def is_initialized():
    """Whether init() was called."""
    return _group is not None


def get_rank():
    """This process's number, from 0; 0 too without init()."""
    return 0 if _group is None else _group.rank


def get_world_size():
    """The number of processes; 1 without init()."""
    return 1 if _group is None else _group.size


def barrier():
    """Wait until every rank is here."""
    group().barrier()


def all_reduce(tensor):
    """Sum a Tensor over all ranks, in place and in its own format; returns it.

    A half tensor is added in float32 and rounded once for each rank it passes: 2048 + 1 is 2048, 40000 + 40000 is inf.
    ValueError, naming the rank, if shapes or dtypes differ.
    """
    agree("the tensor of all_reduce", [str(tensor.dtype), list(tensor.shape)])
    array = np.ascontiguousarray(backends.host(tensor._data))
    group().wait(group().start_all_reduce(array), "all_reduce")
    _write(tensor, array)
    return tensor


def broadcast(tensor, src=0):
    """Copy rank `src`'s Tensor into everybody's, in place; returns it. ValueError if shapes or dtypes differ."""
    agree("the tensor of broadcast", [str(tensor.dtype), list(tensor.shape)])
    array = np.ascontiguousarray(backends.host(tensor._data))
    group().broadcast(array, src)
    _write(tensor, array)
    return tensor


def all_gather_object(data):
    """A list with every rank's `data` - numbers, strings, lists, dicts, None - on every rank."""
    return group().gather(data, "all_gather_object")


def agree(what, value):
    """Make sure that every rank has the same `value` (what JSON can hold). ValueError on every rank for the first difference."""
    mine = json.loads(json.dumps(value))
    for rank, theirs in enumerate(everyone := group().gather(mine, f"comparing {what}")):
        if theirs != everyone[0]:
            a, b = _first_difference(everyone[0], theirs)
            raise ValueError(
                f"the ranks differ in {what}: rank 0 has {a}, rank {rank} has {b}: start all with the same"
            )


def _first_difference(a, b):
    if isinstance(a, list) and isinstance(b, list):
        for x, y in zip(a, b, strict=False):
            if x != y:
                return _first_difference(x, y) if isinstance(x, list) and len(x) == len(y) > 3 else (x, y)
        return f"{len(a)} of them", f"{len(b)}"
    return repr(a), repr(b)


def _write(tensor, array):
    with minamp.no_grad():
        tensor._data[...] = backends.move(array.reshape(tensor.shape), tensor.device)
        tensor._version[0] += 1
