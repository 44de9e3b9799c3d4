"""Putting values in another arrangement: orders, triangles, pads, parts, flips. Nothing is computed, so nothing is rounded."""

from collections import namedtuple

import numpy as np

from minamp import backends
from minamp.numbers import unpacked
from minamp.op import NOT_LISTED, composite, op
from minamp.ops.compare import isnan
from minamp.ops.elementwise import where
from minamp.ops.indexing import index, index_put, integers, number_in
from minamp.ops.scatter import gather
from minamp.ops.shape import dim_of, permute, reshape, squeeze
from minamp.tensor import Tensor

# ------------------------------------------------------------------------------------------------------------------- orders

Sorted = namedtuple("Sorted", ["values", "indices"])
TopK = namedtuple("TopK", ["values", "indices"])
Median = namedtuple("Median", ["values", "indices"])


@op(policy=NOT_LISTED)
class argsort:
    """The positions (int64) that sort x along `dim`; always stable, nan counts as the largest."""

    def call(input, dim=-1, descending=False, stable=True):
        return (input,), {"dim": dim_of("argsort", input, dim), "descending": descending}

    def forward(m, x, *, dim, descending):
        return m.argsort(x, dim, descending)


@composite
def sort(input, dim=-1, descending=False, stable=True):
    """(values, indices) along `dim`; always stable, nan counts as the largest. Gradients go back to where values came from."""
    at = argsort(input, dim, descending)
    return Sorted(gather(input, dim, at), at)


@composite
def topk(input, k, dim=-1, largest=True, sorted=True):
    """(values, indices) of the k largest (smallest) along `dim`, in order whether `sorted` or not; nan counts as the largest."""
    dim = dim_of("topk", input, dim)
    size = input.shape[dim] if input.ndim else 1
    if not 0 <= k <= size:
        raise RuntimeError(f"topk: k {k} is out of range, dimension {dim} of {input.shape} has {size} values")
    at = argsort(input, dim, largest)
    at = index(at, (slice(None),) * dim + (slice(k),)) if input.ndim else at
    return TopK(gather(input, dim, at), at)


@composite
def median(input, dim=None, keepdim=False):
    """The middle value, the lower of two, nan if there is one; with dim: (values, indices). IndexError for no values."""
    if dim is None or not input.ndim:
        line = median(reshape(input, (-1,)), 0)
        return line.values if dim is None else line
    dim = dim_of("median", input, dim)
    n = input.shape[dim]
    if not n:
        raise IndexError(f"median: dimension {dim} of {input.shape} has no values")
    order = argsort(input, dim)
    middle, last = (narrow(order, dim, i, 1) for i in ((n - 1) // 2, n - 1))
    at = where(isnan(gather(input, dim, last)), last, middle)  # in order nan comes last
    values = gather(input, dim, at)
    return Median(values, at) if keepdim else Median(squeeze(values, dim), squeeze(at, dim))


@composite
def select(input, dim, index):
    """The slice of input at `index` along `dim`, without that dimension: a view. IndexError where there is none."""
    dim = dim_of("select", input, dim)
    if not input.ndim or not -input.shape[dim] <= index < input.shape[dim]:
        raise IndexError(f"select: index {index} is out of range for dimension {dim} of {input.shape}")
    return squeeze(narrow(input, dim, index, 1), dim)


@composite
def repeat_interleave(input, repeats, dim=None):
    """Every slice along `dim` (of all values in a row by default) `repeats` times, an int or a Tensor with one for each slice."""
    if dim is None:
        return repeat_interleave(reshape(input, (-1,)), repeats, 0)
    dim = dim_of("repeat_interleave", input, dim)
    size = input.shape[dim]
    times = integers("repeat_interleave", input, repeats) if isinstance(repeats, Tensor) else repeats
    times = np.asarray(backends.host(times))
    if times.ndim > 1 or times.size not in (1, size) or (times < 0).any():
        raise RuntimeError(
            f"repeat_interleave: repeats must be a number from 0 on, or {size} of them, got {repeats}"
        )
    return index(input, (slice(None),) * dim + (np.repeat(np.arange(size), times),))


@composite
def narrow(input, dim, start, length):
    """The `length` slices of input along `dim` from `start` on: a view. IndexError or RuntimeError where there are fewer."""
    dim = dim_of("narrow", input, dim)
    size = input.shape[dim] if input.ndim else 0
    if not -size <= start <= size:
        raise IndexError(
            f"narrow: start {start} is out of range, dimension {dim} of {input.shape} has {size} slices"
        )
    start += size if start < 0 else 0
    if not 0 <= length <= size - start:
        raise RuntimeError(
            f"narrow: length {length} from {start} on does not fit dimension {dim} of {input.shape}"
        )
    return index(input, (slice(None),) * dim + (slice(start, start + length),))


# ------------------------------------------------------------------------------------------------------------------ triangles


def _matrix(name, x, diagonal):
    if x.ndim < 2:
        raise RuntimeError(f"{name}: needs at least 2 dimensions, this tensor has shape {x.shape}")
    return (x,), {"diagonal": diagonal}


@op(policy=NOT_LISTED, moves=True)
class tril:
    """The lower triangle of the last two dimensions, up to `diagonal`; zeros above."""

    def call(input, diagonal=0):
        return _matrix("tril", input, diagonal)

    def forward(m, x, *, diagonal):
        return m.tril(x, diagonal)

    def vjp_x(m, g, diagonal):
        return m.tril(g, diagonal)


@op(policy=NOT_LISTED, moves=True)
class triu:
    """The upper triangle of the last two dimensions, from `diagonal` on; zeros below."""

    def call(input, diagonal=0):
        return _matrix("triu", input, diagonal)

    def forward(m, x, *, diagonal):
        return m.triu(x, diagonal)

    def vjp_x(m, g, diagonal):
        return m.triu(g, diagonal)


@composite
def diag(input, diagonal=0):
    """The diagonal of a matrix as a vector, or a vector on the diagonal of a matrix of zeros; `diagonal` above the main one."""
    if input.ndim not in (1, 2):
        raise RuntimeError(f"diag: input has shape {input.shape}: give a vector or a matrix")
    below, right = max(-diagonal, 0), max(diagonal, 0)
    length = len(input) if input.ndim == 1 else max(min(input.shape[0] - below, input.shape[1] - right), 0)
    at = np.arange(length) + below, np.arange(length) + right
    if input.ndim == 2:
        return index(input, at)
    size = length + abs(diagonal)
    return index_put.plain(input.new_zeros(size, size), at, input)


# --------------------------------------------------------------------------------------------------------- pads, parts, flips

_AT_ONCE = 8  # pieces; of more, halves are cut first: a piece's gradient is as large as what it was cut from, n times n in all


def _pad_sizes(name, x, pad):
    pad = tuple(int(n) for n in pad)
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise RuntimeError(
            f"{name}: pad {pad} must be (before, after) for the last dimension, then for the one before it, "
            f"at most {2 * x.ndim} numbers for shape {x.shape}"
        )
    for i, n in enumerate(reversed(x.shape[x.ndim - len(pad) // 2 :])):
        if n + pad[2 * i] + pad[2 * i + 1] < 0 or -min(pad[2 * i : 2 * i + 2]) > n:
            raise RuntimeError(f"{name}: pad {pad} crops more than there is of {x.shape}")
    return pad


@op(policy=NOT_LISTED, moves=True)
class constant_pad_nd:
    """x with `value` around it, see pad."""

    def call(input, pad, value=0.0):
        pad = _pad_sizes("constant_pad_nd", input, pad)
        return (input,), {"pad": pad, "value": number_in("constant_pad_nd", value, input.dtype)}

    def forward(m, x, *, pad, value):
        return m.constant_pad_nd(x, pad, value)

    def vjp_x(m, g, pad):
        return m.constant_pad_nd(g, tuple(-n for n in pad))


_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}  # torch's name -> NumPy's


@composite
def pad(input, pad, mode="constant", value=None):
    """input with room around it: pad = (before, after) of the last dimension, then of the one before it, and so on.

    mode: 'constant' (filled with `value`, 0 by default; negative numbers crop), 'reflect', 'replicate' or 'circular'.
    RuntimeError where the pad does not fit the shape, or the format can't hold the value.
    """
    if mode == "constant":
        return constant_pad_nd(input, pad, 0.0 if value is None else value)
    if mode not in _MODES:
        raise NotImplementedError(f"pad: unknown mode {mode!r}: use 'constant' or one of {list(_MODES)}")
    if value is not None:
        raise RuntimeError(f"pad: mode {mode!r} takes no value")
    pad, places = _pad_sizes("pad", input, pad), []
    for i in range(len(pad) // 2):
        dim, sizes = input.ndim - 1 - i, pad[2 * i : 2 * i + 2]
        most = {"reflect": input.shape[dim] - 1, "circular": input.shape[dim]}.get(mode)
        if min(sizes) < 0 or most is not None and max(sizes) > most:
            raise RuntimeError(f"pad: {mode!r} with {sizes} does not fit dimension {dim} of {input.shape}")
        places.append(np.pad(np.arange(input.shape[dim]), sizes, mode=_MODES[mode]))
    # all dimensions at once: what comes back to a corner is summed before it is rounded
    return index(input, (..., *np.ix_(*reversed(places)))) if places else input


@op(policy=NOT_LISTED, moves=True)
class flip:
    """x in reverse order along `dims`."""

    def call(input, *dims):
        dims = tuple(dim_of("flip", input, d) for d in unpacked(dims))
        if len(set(dims)) < len(dims):
            raise RuntimeError(f"flip: dims {dims} name a dimension twice")
        return (input,), {"dims": dims if input.ndim else ()}

    def forward(m, x, *, dims):
        return m.flip(x, dims).copy()

    def vjp_x(m, g, dims):
        return m.flip(g, dims)


@composite
def roll(input, shifts, dims=None):
    """input moved by `shifts` places along `dims`, or as if flat; what leaves at one end enters at the other."""
    if dims is None:
        return reshape(roll(reshape(input, -1), shifts, 0), input.shape)
    shifts, dims = ((n,) if isinstance(n, int) else tuple(n) for n in (shifts, dims))
    if len(shifts) != len(dims):
        raise RuntimeError(f"roll: {len(shifts)} shifts for {len(dims)} dims: give one for each")
    for shift, dim in zip(shifts, dims, strict=True):
        dim = dim_of("roll", input, dim)
        size = input.shape[dim] if input.ndim else 0
        if size:
            at = (np.arange(size) - shift) % size
            input = index(input, (slice(None),) * dim + (at,))
    return input


@composite
def split(tensor, split_size_or_sections, dim=0):
    """Views of `tensor` cut along `dim`: pieces of one size (the last may be smaller), or of the sizes in a list."""
    if not tensor.ndim:
        raise RuntimeError("split: a 0-dim tensor can't be cut: use x.reshape(1)")
    dim = dim_of("split", tensor, dim)
    total, sizes = tensor.shape[dim], split_size_or_sections
    if isinstance(sizes, int):
        if sizes < 0 or sizes == 0 and total:
            raise RuntimeError(f"split: size {sizes} can't cut dimension {dim} of {tensor.shape}")
        sizes = [min(sizes, total - i) for i in range(0, total, sizes)] if total else [0]
    if sum(sizes) != total or any(n < 0 for n in sizes):
        raise RuntimeError(
            f"split: sizes {list(sizes)} must sum to {total}, dimension {dim} of {tensor.shape}, and none be negative"
        )
    if len(sizes) > _AT_ONCE:
        halves = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
        parts = split(tensor, [sum(half) for half in halves], dim)
        return sum((split(x, half, dim) for x, half in zip(parts, halves, strict=True)), ())
    ends = np.cumsum(sizes).tolist()
    cut = (slice(None),) * dim
    return tuple(index(tensor, (*cut, slice(e - n, e))) for n, e in zip(sizes, ends, strict=True))


@composite
def chunk(input, chunks, dim=0):
    """At most `chunks` views of input along `dim`, all of one size but the last."""
    if chunks < 1:
        raise RuntimeError(f"chunk: chunks must be at least 1, got {chunks}")
    size = input.shape[dim_of("chunk", input, dim)] if input.ndim else 0
    return split(input, -(-size // chunks) or [0] * chunks, dim)


@composite
def unbind(input, dim=0):
    """The slices of input along `dim`, without it."""
    dim = dim_of("unbind", input, dim)
    if input.shape[dim] > _AT_ONCE:
        return sum((unbind(half, dim) for half in chunk(input, 2, dim)), ())
    return tuple(index(input, (slice(None),) * dim + (i,)) for i in range(input.shape[dim]))


# --------------------------------------------------------------------------------------------- channels of images as pixels


@composite
def pixel_shuffle(input, upscale_factor):
    """(..., C * r * r, H, W) as (..., C, H * r, W * r): r * r channels become a block of pixels (Shi et al., 2016)."""
    r = _factor("pixel_shuffle", input, "upscale_factor", upscale_factor)
    *lead, c, h, w = input.shape
    if c % (r * r):
        raise RuntimeError(
            f"pixel_shuffle: the {c} channels of {input.shape} must be a multiple of {r * r}, upscale_factor squared"
        )
    return _swapped(input, lead, (c // (r * r), r, r, h, w), (0, 3, 1, 4, 2), (c // (r * r), h * r, w * r))


@composite
def pixel_unshuffle(input, downscale_factor):
    """pixel_shuffle undone: (..., C, H * r, W * r) as (..., C * r * r, H, W)."""
    r = _factor("pixel_unshuffle", input, "downscale_factor", downscale_factor)
    *lead, c, h, w = input.shape
    if h % r or w % r:
        raise RuntimeError(
            f"pixel_unshuffle: height and width of {input.shape} must be multiples of downscale_factor {r}"
        )
    return _swapped(input, lead, (c, h // r, r, w // r, r), (0, 2, 4, 1, 3), (c * r * r, h // r, w // r))


def _factor(name, x, what, r):
    if x.ndim < 3:
        raise RuntimeError(f"{name}: input must be (..., C, H, W), got shape {x.shape}")
    if r < 1:
        raise RuntimeError(f"{name}: {what} must be at least 1, got {r}")
    return r


def _swapped(x, lead, apart, order, together):
    """x (*lead, ...) with the rest of its dimensions taken apart, put into `order` and together again."""
    n = len(lead)
    dims = (*range(n), *(n + i for i in order))
    return reshape(permute(reshape(x, (*lead, *apart)), dims), (*lead, *together))
