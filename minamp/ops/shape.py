"""Ops that move values and compute nothing: shapes, joins, and dropout's mask. Picking and placing: indexing.py."""

import math

from minamp import backends
from minamp.draw import generator
from minamp.numbers import unpacked
from minamp.op import NOT_LISTED, composite, op
from minamp.tensor import Tensor
from minamp.warn import warn


def expands(shape, to):
    """Whether `shape` can be expanded to the shape `to`."""
    lead = len(to) - len(shape)
    return lead >= 0 and all(n in (1, size) for n, size in zip(shape, to[lead:], strict=True))


def dim_of(name, x, dim):
    """`dim` as a non-negative int; IndexError names the op."""
    if not -max(x.ndim, 1) <= dim < max(x.ndim, 1):
        raise IndexError(f"{name}: dim {dim} is out of range for a tensor of shape {x.shape}")
    return dim % max(x.ndim, 1)


# --------------------------------------------------------------------------------------------------------------------- shapes


@op(policy=NOT_LISTED, moves=True, view=True)
class reshape:
    """x in another shape with as many elements; one size may be -1."""

    def call(x, *shape):
        shape = unpacked(shape)
        known = math.prod(n for n in shape if n != -1)
        if shape.count(-1) > 1 or (x.numel() % max(known, 1) if -1 in shape else known != x.numel()):
            raise RuntimeError(f"reshape: shape {shape} does not hold the {x.numel()} elements of {x.shape}")
        return (x,), {"shape": shape}

    def forward(m, x, *, shape):
        return x.reshape(shape)

    def vjp_x(m, g, x_shape):
        return m.reshape(g, x_shape)


@op(policy=NOT_LISTED, moves=True, view=True)
class permute:
    """x with its dimensions in the order of `dims`."""

    def call(x, *dims):
        dims = tuple(dim_of("permute", x, d) for d in unpacked(dims))
        if sorted(dims) != list(range(x.ndim)):
            raise RuntimeError(
                f"permute: dims {dims} must name each of the {x.ndim} dimensions of {x.shape} once"
            )
        return (x,), {"dims": dims}

    def forward(m, x, *, dims):
        return m.permute(x, dims)

    def vjp_x(m, g, dims):
        return m.permute(g, tuple(dims.index(i) for i in range(len(dims))))


@op(policy=NOT_LISTED, moves=True, view=True)
class expand:
    """x with dimensions of size 1 repeated to `size` (-1 keeps a size), without copying."""

    def call(x, *size):
        shape = unpacked(size)
        lead = len(shape) - x.ndim
        full = tuple(x.shape[i - lead] if n == -1 and i >= lead else n for i, n in enumerate(shape))
        if not expands(x.shape, full):
            raise RuntimeError(f"expand: {x.shape} can't be repeated to {shape}: sizes must be equal or 1")
        return (x,), {"shape": full}

    def forward(m, x, *, shape):
        return m.expand(x, shape)

    def vjp_x(m, g):
        return g  # the sum over the repeated dimensions is done for every op


@op(policy=NOT_LISTED)
class sum_to:
    """x summed down to `shape`: what undoes a broadcast."""

    def forward(m, x, *, shape):
        return m.sum_to(x, shape)

    def vjp_x(m, g, x_shape):
        return m.expand(g, x_shape)


@composite
def view(x, *size):
    """reshape under torch's other name."""
    return reshape(x, *size)


@composite
def flatten(x, start_dim=0, end_dim=-1):
    """Dimensions start_dim..end_dim as one."""
    first, last = dim_of("flatten", x, start_dim), dim_of("flatten", x, end_dim)
    if first > last:
        raise RuntimeError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    return reshape(x, (*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


@composite
def ravel(x):
    """All values in one dimension."""
    return reshape(x, -1)


@composite
def unflatten(x, dim, sizes):
    """x with dimension `dim` as several of `sizes`; one of them may be -1."""
    dim, sizes = dim_of("unflatten", x, dim), tuple(sizes)
    known = math.prod(n for n in sizes if n != -1)
    whole = x.shape[dim] if x.ndim else 1
    fits = whole % max(known, 1) == 0 if -1 in sizes else whole == known
    if not sizes or sizes.count(-1) > 1 or not fits:
        raise RuntimeError(f"unflatten: sizes {sizes} must multiply to {whole}, dimension {dim} of {x.shape}")
    return reshape(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


@composite
def transpose(x, dim0, dim1):
    """x with two dimensions swapped."""
    dims = list(range(x.ndim))
    a, b = dim_of("transpose", x, dim0), dim_of("transpose", x, dim1)
    if x.ndim:
        dims[a], dims[b] = b, a
    return permute(x, dims)


@composite
def movedim(x, source, destination):
    """x with the dimensions `source` (an int or several) at the places `destination`, the others in their order."""
    source, destination = ((d,) if isinstance(d, int) else tuple(d) for d in (source, destination))
    if len(source) != len(destination):
        raise RuntimeError(f"movedim: source {source} and destination {destination} must be as many")
    source, destination = ([dim_of("movedim", x, d) for d in dims] for dims in (source, destination))
    if len({*source}) < len(source) or len({*destination}) < len(source):
        raise RuntimeError(f"movedim: source {source} or destination {destination} names a dimension twice")
    others = iter(d for d in range(x.ndim) if d not in source)
    to = dict(zip(destination, source, strict=True))
    return permute(x, [to[d] if d in to else next(others) for d in range(x.ndim)])


@composite
def mT(x):
    """x with its last two dimensions swapped."""
    return transpose(x, -1, -2)


@composite
def t(x):
    """A matrix transposed; a view of vectors and numbers as they are."""
    if x.ndim > 2:
        raise RuntimeError(
            f"t() is for matrices, this tensor has shape {x.shape}: use x.mT or x.permute(...)"
        )
    return transpose(x, 0, -1)


@composite
def squeeze(x, dim=None):
    """x without its dimensions of size 1: all of them, or those that `dim` (an int or a tuple) names."""
    dims = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    drop = [dim_of("squeeze", x, d) for d in dims]
    if len(set(drop)) < len(drop):
        raise RuntimeError(f"squeeze: dims {dim} name a dimension twice")
    return reshape(x, tuple(n for i, n in enumerate(x.shape) if not (i in drop and n == 1)))


@composite
def unsqueeze(x, dim):
    """x with a new dimension of size 1 at `dim`."""
    if not -x.ndim - 1 <= dim <= x.ndim:
        raise IndexError(f"unsqueeze: dim {dim} is out of range for a tensor of shape {x.shape}")
    dim %= x.ndim + 1
    return reshape(x, (*x.shape[:dim], 1, *x.shape[dim:]))


# ---------------------------------------------------------------------------------------------------------------------- joins


@op(policy=NOT_LISTED, mixed="promote", moves=True)
class cat:
    """Tensors joined along `dim`; different float dtypes promote, as in torch."""

    def call(tensors, dim=0):
        tensors = _listed("cat", tensors)
        if not tensors:
            raise RuntimeError("cat: needs at least one tensor")
        first = next((x for x in tensors if x.shape != (0,)), tensors[0])
        dim = dim_of("cat", first, dim)
        if first.ndim > 1:  # tensor([]) joins with anything, as in PyTorch
            none = (*first.shape[:dim], 0, *first.shape[dim + 1 :])
            tensors = tuple(reshape(x, none) if x.shape == (0,) else x for x in tensors)
        return tensors, {"dim": dim}

    def forward(m, *tensors, dim):
        widest = {x.dtype for x in tensors}
        return m.cat(tensors if len(widest) == 1 else [m.widen(x) for x in tensors], dim)

    def vjp_tensors(m, g, i, tensors_shape, dim):
        start = sum(shape[dim] for shape in tensors_shape[:i])
        key = (slice(None),) * dim + (slice(start, start + tensors_shape[i][dim]),)
        return m.index(g, key)


def _listed(name, tensors):
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{name}: tensors must be a list or tuple of Tensors, got {type(tensors).__name__}")
    return tuple(tensors)


@composite
def repeat(x, *repeats):
    """x laid side by side `repeats` times along each dimension; more numbers than dimensions add leading ones."""
    sizes = unpacked(repeats)
    if len(sizes) < x.ndim:
        raise RuntimeError(f"repeat: sizes {sizes} must name each of the {x.ndim} dimensions of {x.shape}")
    if any(n < 0 for n in sizes):
        raise RuntimeError(f"repeat: sizes {sizes} must not be negative")
    shape = (1,) * (len(sizes) - x.ndim) + x.shape
    # (2, 3) becomes (1, 2, 1, 3), then (r, 2, s, 3): its gradient is one sum
    x = reshape(x, tuple(n for size in shape for n in (1, size)))
    x = expand(x, tuple(n for pair in zip(sizes, shape, strict=True) for n in pair))
    out = reshape(x, tuple(r * n for r, n in zip(sizes, shape, strict=True)))
    return out.clone() if out._is_view else out  # one value repeated, or nothing, is reshaped without a copy


@composite
def tile(x, *dims):
    """repeat that leaves the leading dimensions once where fewer numbers are given."""
    sizes = unpacked(dims)
    return repeat(x, (1,) * (x.ndim - len(sizes)) + sizes)


@composite
def stack(tensors, dim=0):
    """Tensors of one shape joined along a new dimension."""
    return cat([unsqueeze(x, dim) for x in _listed("stack", tensors)], dim)


@composite
def hstack(tensors):
    """Tensors side by side: joined along dimension 1, those of one dimension along 0."""
    tensors = [x if x.ndim else x.reshape(1) for x in _listed("hstack", tensors)]
    return cat(tensors, min(1, tensors[0].ndim - 1) if tensors else 0)


@composite
def vstack(tensors):
    """Tensors one above the other: joined along dimension 0, those of one dimension as rows."""
    return cat([x if x.ndim > 1 else x.reshape(1, -1) for x in _listed("vstack", tensors)], 0)


# -------------------------------------------------------------------------------------------------------------------- dropout


@op(policy=NOT_LISTED)
class masked_scale:
    """x * scale where mask holds, 0 elsewhere: dropout once its mask is drawn."""

    def forward(m, x, mask, *, scale):
        return x * mask * scale

    def vjp_x(m, g, mask, scale):
        return g * mask * scale


@composite
def dropout(x, p=0.5, training=True, inplace=False):
    """Zero each value with probability p and scale the rest by 1/(1-p) (Srivastava et al., 2014); the identity in evaluation.

    inplace is accepted as in torch, and x is left alone all the same.
    """
    return _dropped("dropout", x, x.shape, p, training)


def _dropped(name, x, shape, p, training):
    """Dropout of x with one draw for each element of `shape`, which broadcasts against x."""
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: p must lie in [0, 1], got {p}")
    if not training or p == 0:
        return x
    mask = Tensor(backends.of(x._data).keep_mask(generator(), shape, p))
    return masked_scale(x, mask, 1 / (1 - p) if p < 1 else 0.0)


@composite
def dropout1d(input, p=0.5, training=True, inplace=False):
    """Dropout of whole channels of input (N, C, L) or (C, L): all of a channel's values, or none."""
    if input.ndim not in (2, 3):
        raise RuntimeError(f"dropout1d: input must be (N, C, L) or (C, L), got shape {input.shape}")
    return _dropped("dropout1d", input, (*input.shape[:-1], 1), p, training)


@composite
def dropout2d(input, p=0.5, training=True, inplace=False):
    """Dropout of whole channels of input (N, C, H, W). Of three dimensions, as in torch: (N, C, L), with a warning."""
    if input.ndim not in (3, 4):
        raise RuntimeError(f"dropout2d: input must be (N, C, H, W), got shape {input.shape}: use dropout")
    if input.ndim == 3:
        warn(f"dropout2d: input {input.shape} is taken as (N, C, L), not (C, H, W): use dropout1d")
    return _dropped("dropout2d", input, (*input.shape[:2], *(1,) * (input.ndim - 2)), p, training)
