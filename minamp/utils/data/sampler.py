"""Samplers: in which order the samples of a dataset come, drawn from the thread's generator or a given one.

Their iterators keep their place in plain attributes, so that a training step that asks for its next batch can be undone
(minamp/restore.py).
"""

import itertools
import operator
import types

from minamp.create import arange, multinomial, randint, randperm
from minamp.formats import float64
from minamp.ops.shape import cat
from minamp.tensor import as_tensor


def _count(name, value):
    """A whole number of at least 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return operator.index(value)


class Order:
    """An iterator over a vector of indices."""

    def __init__(self, indices):
        self.indices, self.at = as_tensor(indices).cpu().numpy(), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.indices):
            raise StopIteration
        self.at += 1
        return self.indices.item(self.at - 1)


class Sampler:
    """The base of samplers: a subclass has __iter__, which gives indices of samples, or lists of them, and perhaps __len__."""

    __class_getitem__ = classmethod(types.GenericAlias)

    def __iter__(self):
        raise NotImplementedError(
            f"{type(self).__name__}: has no __iter__(self): it gives indices of samples"
        )


class SequentialSampler(Sampler):
    """All samples, the first one first."""

    def __init__(self, data_source):
        self.data_source = data_source

    def __iter__(self):
        return Order(arange(len(self)))

    def __len__(self):
        return len(self.data_source)


class RandomSampler(Sampler):
    """num_samples samples (None: as many as there are) in a new random order each time.

    Without replacement none comes twice before all others have come. TypeError for a replacement that is not a bool,
    ValueError for a num_samples that is not positive.
    """

    def __init__(self, data_source, replacement=False, num_samples=None, generator=None):
        if not isinstance(replacement, bool):
            raise TypeError(f"RandomSampler: replacement must be True or False, got {replacement!r}")
        self.data_source, self.replacement, self.generator = data_source, replacement, generator
        self._num_samples = num_samples
        _count("RandomSampler: num_samples", self.num_samples)

    @property
    def num_samples(self):
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __iter__(self):
        n, k, g = len(self.data_source), self.num_samples, self.generator
        if self.replacement:
            return Order(randint(n, (k,), generator=g))
        return Order(cat([randperm(n, generator=g) for _ in range(-(-k // n))])[:k])

    def __len__(self):
        return self.num_samples


class SubsetRandomSampler(Sampler):
    """The samples at `indices` in a new random order each time."""

    def __init__(self, indices, generator=None):
        self.indices, self.generator = indices, generator

    def __iter__(self):
        return Order(as_tensor(self.indices)[randperm(len(self), generator=self.generator)])

    def __len__(self):
        return len(self.indices)


class WeightedRandomSampler(Sampler):
    """num_samples indices drawn in proportion to `weights`, a vector; without replacement none comes twice."""

    def __init__(self, weights, num_samples, replacement=True, generator=None):
        self.weights, self.num_samples = as_tensor(weights, float64), _count("num_samples", num_samples)
        self.replacement, self.generator = replacement, generator
        if not isinstance(replacement, bool):
            raise ValueError(f"WeightedRandomSampler: replacement must be True or False, got {replacement!r}")
        if self.weights.ndim != 1:
            raise ValueError(f"WeightedRandomSampler: weights has shape {self.weights.shape}: give a vector")

    def __iter__(self):
        return Order(multinomial(self.weights, self.num_samples, self.replacement, generator=self.generator))

    def __len__(self):
        return self.num_samples


class BatchSampler(Sampler):
    """Lists of batch_size indices each of a sampler, or of what else can be iterated; drop_last: without one that is not full."""

    def __init__(self, sampler, batch_size, drop_last):
        self.sampler, self.batch_size = sampler, _count("batch_size", batch_size)
        if not isinstance(drop_last, bool):
            raise ValueError(f"drop_last must be True or False, got {drop_last!r}")
        self.drop_last = drop_last

    def __iter__(self):
        return _Lists(iter(self.sampler), self.batch_size, self.drop_last)

    def __len__(self):
        n = len(self.sampler)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)


class _Lists:
    """The iterator of a BatchSampler."""

    def __init__(self, indices, batch_size, drop_last):
        self.indices, self.batch_size = indices, batch_size
        self.least = batch_size if drop_last else 1

    def __iter__(self):
        return self

    def __next__(self):
        found = list(itertools.islice(self.indices, self.batch_size))
        if len(found) < self.least:
            raise StopIteration
        return found
