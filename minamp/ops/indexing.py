"""Picking values and placing them: indices, masks, embeddings; gather and scatter have a room of their own (scatter.py).

Nothing is computed but sums over places that are named twice, and those are float32. Orders, pads and parts: arrange.py.
"""

import numpy as np

from minamp import backends
from minamp.arguments import no_tensor
from minamp.devices import same_device
from minamp.formats import is_floating
from minamp.keys import as_taken, ints_first, plain_key, without_idle_ellipsis
from minamp.numbers import check_fits
from minamp.op import NOT_LISTED, PROMOTE, composite, op
from minamp.ops.shape import dim_of, stack
from minamp.tensor import Tensor


def integers(name, x, index):
    """The array of `index`, which picks from x, as a copy that later writes don't reach.

    RuntimeError if it does not hold integers, or lies on another GPU.
    """
    if isinstance(index, Tensor) and index.device.type != "cpu":  # one on the CPU is moved
        same_device(name, input=x, index=index)
    at = index._data if isinstance(index, Tensor) else backends.array(index)
    if at.dtype.kind not in "iu":
        raise RuntimeError(f"{name}: index must hold integers, this one is {at.dtype}: use index.long()")
    return at.copy()


def _outside(at, size):
    """A place in `at` that is none of `size` places; None if all are, or if looking would wait for a GPU."""
    seen = backends.checkable(at)
    if seen is not None and seen.size and not (0 <= seen.min() and seen.max() < size):
        return seen.min() if seen.min() < 0 else seen.max()


def check_range(name, at, dim, shape, error=RuntimeError):
    """Raise `error` for a place in `at` that dimension `dim` of `shape` has not."""
    size = shape[dim] if shape else 1
    bad = _outside(at, size)
    if bad is not None:
        raise error(
            f"{name}: index {bad} is out of bounds for dimension {dim} of {shape}: give 0 to {size - 1}"
        )


# ------------------------------------------------------------------------------------------------------------------ x[key]


@op(policy=NOT_LISTED, stored=True, view=True)
class index:
    """x[key] with ints, slices, None, Ellipsis, integer and bool arrays or tensors."""

    def call(x, key):
        key = without_idle_ellipsis(plain_key(key, x), x.ndim)
        if steps := ints_first(key):
            first, key = steps
            x = index(x, first)
            key = without_idle_ellipsis(key, x.ndim)
        return (x,), {"key": key}

    def forward(m, x, *, key):
        return m.index(x, key)

    def vjp_x(m, g, x_shape, key):
        return m.index_grad(g, key, x_shape)


pick = index  # the op, where a parameter is called index


@op(policy=NOT_LISTED)
class index_grad:
    """Zeros of `shape` with g added at `key`; repeated positions add up in float32."""

    def call(g, key, shape):
        return (g,), {"key": plain_key(key, g), "shape": shape}

    def forward(m, g, *, key, shape):
        return m.index_grad(g, key, shape)

    def vjp_g(m, g, key):
        return m.index(g, key)


@op(policy=PROMOTE)
class index_put:
    """x with `values` written, or with accumulate=True added, at `indices`, a tuple of integer or bool tensors, as in x[indices].

    values broadcasts to x[indices] and has the dtype of x (RuntimeError otherwise; autocast promotes). Repeated places:
    added up in float32 with accumulate, else one of the values stays. TypeError for indices that are not a tuple.
    """

    def call(input, indices, values, accumulate=False):
        if not isinstance(indices, tuple | list):
            raise TypeError(
                f"index_put: indices must be a tuple of tensors, got {type(indices).__name__}: write (index,)"
            )
        same_device("index_put", input=input, values=values)
        if values.dtype != input.dtype and not (is_floating(values.dtype) and is_floating(input.dtype)):
            raise RuntimeError(
                f"index_put: values are {values.dtype}, input {input.dtype}: cast them with values.to(input.dtype)"
            )
        key = plain_key(tuple(indices), input)
        return (input, as_taken(key, input, values)), {"key": key, "accumulate": accumulate}

    def forward(m, x, values, *, key, accumulate):
        return m.index_put(x, key, values, accumulate)

    def vjp_x(m, g, key, accumulate):
        return g if accumulate else m.index_clear(g, key)

    def vjp_values(m, g, values_shape, key):
        g = m.index(g, key)
        extra = max(0, len(values_shape) - g.ndim)  # x[key] = v lets v have more dimensions, of size 1
        shape = values_shape[extra:]
        return m.reshape(m.sum_to(g, shape), values_shape)


@op(policy=NOT_LISTED, moves=True)
class index_clear:
    """x with zeros at `key`."""

    def call(x, key):
        return (x,), {"key": plain_key(key, x)}

    def forward(m, x, *, key):
        return m.index_clear(x, key)

    def vjp_x(m, g, key):
        return m.index_clear(g, key)


@op(policy=NOT_LISTED)
class index_add:
    """input with alpha * source added, slice i of it to the one that index[i] names along `dim`. Sums are float32.

    index: a vector of integers, as long as source is along `dim`. RuntimeError where shapes or dtypes don't fit.
    """

    def call(input, dim, index, source, *, alpha=1):
        same_device("index_add", input=input, source=source)
        dim, at = dim_of("index_add", input, dim), integers("index_add", input, index).reshape(-1)
        if source.dtype != input.dtype:
            raise RuntimeError(
                f"index_add: source is {source.dtype}, input {input.dtype}: cast it with source.to(input.dtype)"
            )
        fits = (*input.shape[:dim], len(at), *input.shape[dim + 1 :])
        if source.shape != fits or not input.ndim:
            raise RuntimeError(
                f"index_add: source has shape {source.shape}, input {input.shape}, index {len(at)} places along dimension "
                f"{dim}: give source {fits}, and input at least one dimension"
            )
        check_range("index_add", at, dim, input.shape, IndexError)
        return (input, source), {"key": (slice(None),) * dim + (at,), "alpha": alpha}

    def forward(m, input, source, *, key, alpha):
        return m.index_put(input, key, source if alpha == 1 else source * alpha, True)

    def vjp_input(m, g):
        return g

    def vjp_source(m, g, key, alpha):
        g = m.index(g, key)
        return g if alpha == 1 else g * alpha


@composite
def index_select(input, dim, index):
    """The slices of input along `dim` that the integers in `index` (a vector or a number) name."""
    dim, at = dim_of("index_select", input, dim), integers("index_select", input, index)
    if at.ndim > 1:
        raise IndexError(f"index_select: index has shape {at.shape}: give a vector, or use gather")
    check_range("index_select", at, dim, input.shape, IndexError)
    return pick(input, (slice(None),) * dim + (at.reshape(-1),))


# --------------------------------------------------------------------------------------------------- masks


@composite
def nonzero(input, *, as_tuple=False):
    """Where input is not 0, in order: int64, a row of indices for each place; as_tuple=True: a vector for each dimension."""
    m = backends.of(input._data)
    at = tuple(Tensor(part) for part in m.nonzero(m.widen(input._data.reshape(input.shape or (1,)))))
    return at if as_tuple else stack(at, 1)[:, : input.ndim]


def number_in(name, value, dtype):
    """`value` as a number of `dtype`; RuntimeError where a finite value lies outside the format, TypeError for no number."""
    if not isinstance(value, (int, float, np.generic)):
        raise no_tensor(name, "value", value)
    check_fits(name, value, dtype)
    return float(value) if is_floating(dtype) else np.dtype(dtype).type(value).item()


@op(policy=NOT_LISTED, mixed="first", moves=True)
class masked_fill:
    """x with `value` (a number or 0-dim tensor) where mask (bool, broadcast against x) holds.

    RuntimeError for a mask that is not bool, and for a value that the format of x can't hold, such as -1e9 in float16.
    """

    def call(input, mask, value):
        if not isinstance(mask, Tensor) or mask.dtype != np.bool_:
            found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise RuntimeError(f"masked_fill: mask must be a bool tensor, got {found}: use mask.bool()")
        if not isinstance(value, Tensor):
            return (input, mask, number_in("masked_fill", value, input.dtype)), {}
        if value.ndim:
            raise RuntimeError(
                f"masked_fill: value must be a number or a 0-dim tensor, this one has shape {value.shape}: use minamp.where"
            )
        if backends.checkable(value._data) is not None:
            number_in("masked_fill", value.item(), input.dtype)
        return (input, mask, value.to(input.dtype)), {}

    def forward(m, x, mask, value):
        return m.masked_fill(x, mask, value)

    def vjp_x(m, g, mask):
        return m.masked_fill(g, mask, 0.0)

    def vjp_value(m, g, mask):
        return m.sum(m.where(mask, g, m.zeros_like(g)))


# -------------------------------------------------------------------------------------------------------- embedding, classes


def padding_row(name, padding_idx, rows):
    """`padding_idx` (or None) counted from the first of `rows`; AssertionError, as in PyTorch, for one outside of them."""
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise AssertionError(
            f"{name}: padding_idx {padding_idx} is outside a table of {rows} rows: give 0 to {rows - 1}"
        )
    return padding_idx % rows


@op(policy=NOT_LISTED, stored=True)
class embedding:
    """Rows of weight (num, dim) at the integers in input (any shape); a row picked twice gets the float32 sum of both gradients.

    padding_idx: a row that gets no gradient. IndexError for an id outside the table, RuntimeError for ids that are not integers.
    """

    def call(input, weight, padding_idx=None):
        ids = input._data
        if ids.dtype.kind not in "iu":
            raise RuntimeError(f"embedding: ids must be integers, these are {ids.dtype}: use input.long()")
        if weight.ndim != 2:
            raise RuntimeError(f"embedding: weight must be (num, dim), this one has shape {weight.shape}")
        num = weight.shape[0]
        bad = _outside(ids, num)
        if bad is not None:
            raise IndexError(
                f"embedding: id {bad} is out of range for a table of {num} rows: give 0 to {num - 1}"
            )
        return (input, weight), {"padding_idx": padding_row("embedding", padding_idx, num)}

    def forward(m, ids, weight, *, padding_idx):
        return m.index(weight, ids)

    def vjp_weight(m, g, ids, weight_shape, padding_idx):
        if padding_idx is not None:
            keep = ids != padding_idx
            g, ids = m.index(g, keep), ids[keep]
        return m.index_grad(g, ids, weight_shape)


@composite
def one_hot(input, num_classes=-1):
    """(...) class ids as (..., num_classes) int64 zeros with one 1; -1: as many classes as the largest id needs."""
    ids = input._data
    if ids.dtype != np.int64:
        raise RuntimeError(f"one_hot: class ids must be int64, these are {ids.dtype}: use input.long()")
    if not ids.size and num_classes <= 0:
        raise RuntimeError("one_hot: no ids to infer the number of classes from: give num_classes")
    seen = backends.checkable(ids)
    if seen is not None and seen.size and seen.min() < 0:
        raise RuntimeError(f"one_hot: class ids must not be negative, found {seen.min()}")
    num_classes = int(backends.of(ids).amax(ids)) + 1 if num_classes == -1 else num_classes
    if seen is not None and seen.size and seen.max() >= num_classes:
        raise RuntimeError(
            f"one_hot: id {seen.max()} does not fit num_classes {num_classes}: give {seen.max() + 1} or more"
        )
    return Tensor((ids[..., None] == backends.of(ids).arange(num_classes)).astype(np.int64))
