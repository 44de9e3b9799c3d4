"""Batches in shares: every rank draws the same order and takes its part of each batch."""

from minamp.data import DataLoader
from minamp.distributed.group import agree, get_rank, get_world_size, group


class ShardedLoader(DataLoader):
    """A DataLoader of whole batches of which this rank gets its share: rows rank*k to (rank+1)*k, k = batch_size / ranks.

    batch_size is that of all ranks together, so a run on n ranks sees the batches of a run on one, and the average of the
    ranks' mean losses is the mean loss of the batch. A last batch that is not full is left out. ValueError, on every rank, for a
    batch size that the ranks don't divide, and for ranks with different data sizes, batch sizes, seeds or orders.
    """

    def __init__(self, dataset, batch_size, shuffle=False, *, seed=0):
        super().__init__(dataset, batch_size, shuffle, seed=seed, drop_last=True)
        group()  # the error of a missing init()
        n = len(self.dataset)
        agree("the loader's [samples, batch_size, shuffle, seed]", [n, self.batch_size, bool(shuffle), seed])
        if self.batch_size % get_world_size():
            raise ValueError(
                f"ShardedLoader: a batch of {self.batch_size} can't be shared evenly by {get_world_size()} ranks: "
                "give a multiple"
            )
        if self.batch_size > n:
            raise ValueError(
                f"ShardedLoader: batch_size {self.batch_size} is more than the {n} samples there are"
            )

    def _load(self, at):
        share = self.batch_size // get_world_size()
        return super()._load(at[get_rank() * share : (get_rank() + 1) * share])
