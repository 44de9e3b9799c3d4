"""Datasets: what has samples, those that tensors hold, parts of others, and others in a row."""

import bisect
import itertools
import math
import types

from minamp.arguments import no_tensor
from minamp.create import randperm
from minamp.tensor import Tensor
from minamp.warn import warn


class Dataset:
    """The base of datasets: a subclass has __getitem__(index), one sample, and __len__; __getitems__(indices) if it likes."""

    __class_getitem__ = classmethod(types.GenericAlias)  # Dataset[int] in annotations and as a base

    def __getitem__(self, index):
        raise NotImplementedError(
            f"{type(self).__name__}: has no __getitem__(self, index): it gives one sample"
        )

    def __add__(self, other):
        return ConcatDataset([self, other])


class IterableDataset(Dataset):
    """The base of streams: a subclass has __iter__, which gives one sample after the other, in its own order."""

    def __iter__(self):
        raise NotImplementedError(f"{type(self).__name__}: has no __iter__(self): it gives all samples")


class TensorDataset(Dataset):
    """Tensors of one length: sample i is a tuple of the i-th row of each. AssertionError, as in PyTorch, if lengths differ."""

    def __init__(self, *tensors):
        if not tensors:
            raise ValueError("TensorDataset: needs at least one tensor: give TensorDataset(images, labels)")
        for i, t in enumerate(tensors):
            if not isinstance(t, Tensor):
                raise no_tensor("TensorDataset", f"tensors[{i}]", t)
            if not t.ndim:
                raise TypeError(
                    f"TensorDataset: tensors[{i}] is one number, {t.item()}: give a row for each sample"
                )
        lengths = [len(t) for t in tensors]
        if len(set(lengths)) > 1:
            raise AssertionError(
                f"TensorDataset: tensors have different lengths {lengths}: give tensors of one length"
            )
        self.tensors = tensors

    def __getitem__(self, index):
        return tuple(t[index] for t in self.tensors)

    def __len__(self):
        return len(self.tensors[0])


class Subset(Dataset):
    """The samples of a dataset at `indices`."""

    def __init__(self, dataset, indices):
        self.dataset, self.indices = dataset, indices

    def __getitem__(self, idx):
        return self.dataset[[self.indices[i] for i in idx] if isinstance(idx, list) else self.indices[idx]]

    def __len__(self):
        return len(self.indices)


class ConcatDataset(Dataset):
    """Datasets one behind the other; AssertionError, as in PyTorch, for none, and for streams."""

    def __init__(self, datasets):
        self.datasets = list(datasets)
        if not self.datasets:
            raise AssertionError("ConcatDataset: got no dataset: give at least one")
        if any(isinstance(d, IterableDataset) for d in self.datasets):
            raise AssertionError("ConcatDataset: an IterableDataset can't be indexed: use itertools.chain")
        self.cumulative_sizes = list(itertools.accumulate(map(len, self.datasets)))

    def __getitem__(self, idx):
        n = len(self)
        if not -n <= idx < n:  # ValueError below, as in PyTorch
            error = ValueError if idx < 0 else IndexError
            raise error(f"ConcatDataset: index {idx} is out of range: there are {n} samples")
        idx %= n
        at = bisect.bisect_right(self.cumulative_sizes, idx)
        return self.datasets[at][idx - (self.cumulative_sizes[at - 1] if at else 0)]

    def __len__(self):
        return self.cumulative_sizes[-1]


def random_split(dataset, lengths, generator=None):
    """Subsets of `lengths` samples drawn at random, each sample in one of them.

    lengths: sum to len(dataset); or fractions that sum to 1, where samples that are left over go to the first ones. Warns of a
    fraction that is no sample. ValueError for lengths that don't sum to it and for negative ones.
    """
    n, sizes = len(dataset), list(lengths)
    if any(s < 0 for s in sizes):
        raise ValueError(f"random_split: lengths {sizes} has a negative number: give 0 or more")
    if math.isclose(sum(sizes), 1):
        sizes = [math.floor(n * s) for s in sizes]
        left = n - sum(sizes)
        sizes = [s + left // len(sizes) + (i < left % len(sizes)) for i, s in enumerate(sizes)]
        if 0 in sizes:
            warn(f"random_split: of {n} samples part {sizes.index(0)} gets none: give it a larger fraction")
    if sum(sizes) != n:
        raise ValueError(
            f"random_split: lengths {sizes} sum to {sum(sizes)}, and there are {n} samples: "
            "give lengths that sum to that, or fractions that sum to 1"
        )
    order = randperm(n, generator=generator).tolist()
    return [
        Subset(dataset, order[end - s : end])
        for end, s in zip(itertools.accumulate(sizes), sizes, strict=True)
    ]
