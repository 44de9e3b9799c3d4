"""The DataLoader: batches of a dataset, one `for` after the other."""

import operator
import types

from minamp import backends
from minamp.tensor import Tensor
from minamp.utils.data.collate import default_collate, default_convert
from minamp.utils.data.dataset import IterableDataset, Subset, TensorDataset
from minamp.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler


def get_worker_info():
    """None: there are no worker processes."""
    return None


class DataLoader:
    """Batches of a dataset: of `batch_size` samples in the order of a sampler, or of the indices that batch_sampler gives.

    dataset: anything with len() and [index], or an IterableDataset. shuffle=True draws a new order for every `for`.
    batch_size=None gives single samples. collate_fn makes a batch of a list of samples (default_collate).
    generator: what the order is drawn from. Worker processes, pinned memory and what belongs to them are accepted and change
    nothing. ValueError for what excludes each other: batch_sampler and batch_size, sampler and shuffle, and so on.
    """

    __class_getitem__ = classmethod(types.GenericAlias)

    def __init__(
        self,
        dataset,
        batch_size=1,
        shuffle=None,
        sampler=None,
        batch_sampler=None,
        num_workers=0,
        collate_fn=None,
        pin_memory=False,
        drop_last=False,
        timeout=0,
        worker_init_fn=None,
        multiprocessing_context=None,
        generator=None,
        *,
        prefetch_factor=None,
        persistent_workers=False,
        pin_memory_device="",
        in_order=True,
    ):
        streams = isinstance(dataset, IterableDataset)
        if streams and (shuffle or sampler is not None or batch_sampler is not None):
            raise ValueError(
                "DataLoader: an IterableDataset comes in its own order: leave out shuffle, sampler and batch_sampler"
            )
        if sampler is not None and shuffle:
            raise ValueError(
                "DataLoader: sampler and shuffle exclude each other: a sampler says the order itself"
            )
        if batch_sampler is not None:
            if batch_size != 1 or shuffle or sampler is not None or drop_last:
                raise ValueError(
                    "DataLoader: batch_sampler says the batches itself: leave out batch_size, shuffle, sampler and drop_last"
                )
            batch_size = None
        elif batch_size is None and drop_last:
            raise ValueError(
                "DataLoader: without batches (batch_size=None) drop_last drops nothing: leave it out"
            )
        if streams:
            sampler = dataset  # whose "indices" are the samples
        elif sampler is None:
            sampler = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
        if batch_size is not None:
            batch_sampler = BatchSampler(sampler, batch_size, drop_last)
        if collate_fn is None:
            collate_fn = default_convert if batch_sampler is None else default_collate
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.sampler, self.batch_sampler, self.collate_fn = sampler, batch_sampler, collate_fn
        self.generator, self.num_workers, self.pin_memory = generator, num_workers, pin_memory

    def __setattr__(self, name, value):
        if name in ("dataset", "batch_size", "drop_last", "sampler", "batch_sampler") and name in vars(self):
            raise ValueError(f"DataLoader: {name} can't be changed any more: make a new DataLoader")
        super().__setattr__(name, value)

    def __len__(self):
        return len(self.sampler if self.batch_sampler is None else self.batch_sampler)

    def __iter__(self):
        return BatchIterator(self, self.sampler if self.batch_sampler is None else self.batch_sampler)

    def _load(self, at):
        """The batch of the indices `at`, or the one sample; of a stream what it gave."""
        dataset = self.dataset
        if isinstance(dataset, IterableDataset):
            return self.collate_fn(at)
        if self.batch_sampler is None:
            return self.collate_fn(dataset[at])
        while type(dataset) is Subset:
            dataset, at = dataset.dataset, [dataset.indices[i] for i in at]
        whole = isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__
        if whole and self.collate_fn is default_collate:  # without a call for each sample: 100 times faster
            return [_rows(t, [operator.index(i) for i in at]) for t in dataset.tensors]
        if hasattr(dataset, "__getitems__"):
            return self.collate_fn(dataset.__getitems__(at))
        return self.collate_fn([dataset[i] for i in at])


def _rows(t, at):
    return t[at] if t.requires_grad else Tensor(backends.of(t._data).index(t._data, at))  # see _stacked


class BatchIterator:
    """One way through a DataLoader, in the order of `sampler`."""

    def __init__(self, loader, sampler):
        self.loader, self.indices = loader, iter(sampler)

    def __iter__(self):
        return self

    def __len__(self):
        return len(self.loader)

    def __next__(self):
        return self.loader._load(next(self.indices))
