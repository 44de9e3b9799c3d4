"""From a list of samples to a batch."""

import copy
from collections.abc import Mapping, MutableMapping, Sequence

import numpy as np

from minamp import backends
from minamp.formats import float64
from minamp.ops.shape import stack
from minamp.tensor import Tensor, as_tensor, tensor


def default_collate(batch):
    """A list of samples as one batch: tensors, arrays and numbers are stacked, strings listed, dicts and tuples gone through.

    Python floats make float64 (model(x.float())). Tuples become lists, dicts and named tuples keep their class. RuntimeError
    names the field whose shapes or lengths differ, TypeError the one that is nothing of all that.
    """
    return _collated(batch, "")


def _collated(batch, field):
    first = batch[0]
    if isinstance(first, np.ndarray) and first.dtype.kind not in "SUO":
        batch, first = [as_tensor(a) for a in batch], as_tensor(first)
    if isinstance(first, Tensor):
        return _stacked(batch, field)
    if isinstance(first, str | bytes):
        return batch
    if isinstance(first, int | float | np.generic):
        return tensor(batch, dtype=float64 if isinstance(first, float) else None)
    return _entries(batch, field, _collated)


def _stacked(tensors, field):
    first = tensors[0]
    for i, t in enumerate(tensors):
        if not isinstance(t, Tensor):
            raise TypeError(
                f"default_collate: batch[0]{field} is a Tensor, batch[{i}]{field} a {type(t).__name__}: give tensors only"
            )
        if t.shape != first.shape:
            raise RuntimeError(
                f"default_collate: batch[0]{field} has shape {first.shape}, batch[{i}]{field} {t.shape}: "
                "pad or crop them to one shape, or give the DataLoader a collate_fn"
            )
    if any(t.requires_grad or t.dtype != first.dtype for t in tensors):
        return stack(tensors)
    # not an op: loading is no part of a step that somebody watches
    return Tensor(backends.of(first._data).cat([t._data[None] for t in tensors], 0))


def _entries(batch, field, make):
    """The structure of batch[0] with make(values, field) in place of each entry."""
    first = batch[0]
    if isinstance(first, Mapping):
        made = {key: make([x[key] for x in batch], f"{field}[{key!r}]") for key in first}
        if not isinstance(first, MutableMapping):
            return made
        like = copy.copy(first)
        like.update(made)
        return like
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        columns = zip(first._fields, zip(*batch, strict=True), strict=True)
        return type(first)(*(make(values, f"{field}.{name}") for name, values in columns))
    if isinstance(first, Sequence):
        for i, x in enumerate(batch):
            if len(x) != len(first):
                raise RuntimeError(
                    f"default_collate: batch[0]{field} has {len(first)} entries, batch[{i}]{field} {len(x)}: "
                    "give as many of each sample, or give the DataLoader a collate_fn"
                )
        return [make(values, f"{field}[{i}]") for i, values in enumerate(zip(*batch, strict=True))]
    raise TypeError(
        f"default_collate: batch[0]{field} is {first!r:.60}: give tensors, arrays of numbers, numbers, strings, "
        "dicts or lists, or give the DataLoader a collate_fn"
    )


def default_convert(data):
    """One sample with its arrays as tensors: what a DataLoader without batches gives."""
    if isinstance(data, np.ndarray | np.generic) and data.dtype.kind not in "SUO":
        return as_tensor(data)
    if isinstance(data, Mapping | Sequence) and not isinstance(data, str | bytes):
        return _entries([data], "", lambda values, field: default_convert(values[0]))
    return data
