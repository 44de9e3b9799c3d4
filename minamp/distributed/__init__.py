"""Data-parallel training on several processes: each takes a share of every batch, and gradients are averaged over MPI or NCCL.

In reading order: group.py (the processes, and waiting for each other without hanging), farewell.py (what happens when one of
them fails or leaves), half.py (sums in half, for the lesson), parallel.py (DistributedDataParallel), sharding.py (optimizer
state in shares), loader.py (batches in shares).
backends/nccl.py does the sums between GPUs.

    python -m minamp.distributed -n 2 train.py        or        mpiexec -n 2 python train.py
"""

from minamp.distributed.farewell import PeerError
from minamp.distributed.group import (
    agree,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    get_rank,
    get_world_size,
    init,
    is_initialized,
)
from minamp.distributed.loader import ShardedLoader
from minamp.distributed.log import log, track
from minamp.distributed.parallel import DistributedDataParallel
from minamp.distributed.sharding import ShardedGradScaler, ZeroRedundancyOptimizer
