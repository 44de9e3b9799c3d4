"""NumPy's side of the short list of functions that op declarations compute with.

Every function takes and returns plain arrays, and is spelled as PyTorch spells it, so that a declaration reads the same when
it is handed arrays (this module) or tensors (`minamp.ops`). Half arrays are widened on the way in: every sum below has a
float32 (or float64) accumulator, and rounding to half is the caller's one step at the end.
"""

import ctypes
import math
import sys

import numpy as np

from minamp.backends.conv import (  # noqa: F401  the convolution room, same vocabulary
    conv2d,
    conv2d_input_grad,
    conv2d_transposed,
    conv2d_weight_grad,
    max_pool2d,
    max_pool2d_gather,
    max_pool2d_position,
    max_pool2d_scatter,
    window_mean,
    window_mean_grad,
)
from minamp.backends.erf import erf  # noqa: F401
from minamp.backends.ongrid import OnGrid
from minamp.backends.place import (  # noqa: F401  picking and placing
    argsort,
    assign,
    constant_pad_nd,
    gather,
    gather_grad,
    index,
    index_clear,
    index_grad,
    index_put,
    masked_fill,
    scatter,
    scatter_add,
    scatter_clear,
    tril,
    triu,
)
from minamp.backends.select import keep as _keep
from minamp.backends.select import where  # noqa: F401  part of the vocabulary
from minamp.backends.series import cumprod, cumsum, prod, recurrence, vector_norm  # noqa: F401
from minamp.backends.update import (  # noqa: F401  the scaler's and the optimizers' arithmetic
    adam,
    rmsprop,
    sgd,
    unscale,
    update_scale,
    widen_all,
)
from minamp.backends.upsample import upsample2d, upsample2d_grad  # noqa: F401
from minamp.formats import cast, narrow, round_to, widen  # noqa: F401  part of the vocabulary
from minamp.formats import flat as _flat
from minamp.formats import is_half as _is_half
from minamp.quiet import quiet as _quiet

name = "cpu"


def _keep_freed_memory():
    """Tell glibc to keep freed blocks up to 32 MB for the next step; elsewhere there is nothing to tell.

    By default they go back to the kernel, which clears every page again in the next step: with this a CNN step (28x28,
    batch 128) takes 0.6 times as long in float32, 0.75 times under autocast.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


_keep_freed_memory()

abs = np.abs
exp, log, sqrt, tanh = np.exp, np.log, np.sqrt, np.tanh
sin, cos, tan, sinh, cosh = np.sin, np.cos, np.tan, np.sinh, np.cosh
asin, acos, atan, atan2 = np.arcsin, np.arccos, np.arctan, np.arctan2
log1p, expm1, log2, log10 = np.log1p, np.expm1, np.log2, np.log10
maximum, minimum = np.maximum, np.minimum
isfinite, isnan, isinf = np.isfinite, np.isnan, np.isinf
nonzero = np.nonzero
round, floor, ceil, trunc = np.round, np.floor, np.ceil, np.trunc
logical_and, logical_or = np.logical_and, np.logical_or
logical_xor, logical_not = np.logical_xor, np.logical_not
asarray, zeros_like, ones_like = np.asarray, np.zeros_like, np.ones_like
permute, flip = np.transpose, np.flip
may_share_memory = np.may_share_memory


def cat(xs, dim):
    return np.concatenate(xs, axis=dim)


def reshape(x, shape):
    """`x` itself if that is its shape: a gradient that is no view may be rounded and kept where it lies."""
    return x if x.shape == shape else np.reshape(x, shape)


@_quiet
def full(shape, value, dtype):
    return np.full(shape, value, dtype)


def arange(n):
    return np.arange(n)


def lower_triangle(rows, cols):
    return np.tri(rows, cols, dtype=np.bool_)


def keep_mask(generator, shape, p):
    """A bool array, False with probability p."""
    return generator.random(shape, np.float32) >= p


def factor(x, dtype):
    """`x` rounded to `dtype` for products alone, as an array or, where that is large enough to pay, what reads like one."""
    if dtype != np.float16 or x.dtype != np.float32 or x.size < 8192:
        return cast(x, dtype)
    return OnGrid(round_to(x, dtype))


def grid(g, dtype, new=False):
    """A gradient rounded to `dtype`, in the form it travels in: as float32 words, which no later op has to widen.

    new: it may be rounded where it lies, which takes a fifth less time (0.7 ms per million).
    """
    g = np.asarray(g)
    if g.dtype == np.float64:
        return widen(narrow(g, dtype))
    return round_to(widen(g), dtype, out=g if new and g.dtype == np.float32 else None)


def store(out, x):
    """float32 `x` into the memory of the half array `out`, rounded once."""
    out[...] = narrow(x, out.dtype)


def owned(x, dtype, like):
    """`x`, which may be shared, as an array of its own in `dtype` that lies in memory as `like` does."""
    made = cast(x, dtype)
    if made is not x and made.strides == like.strides:
        return made
    out = np.empty_like(like, dtype, subok=False)
    out[...] = made
    return out


# ---- sums: the accumulator is float32 for half and float32 input, float64 for float64, int64 for integers


def sum(x, dim=None, keepdim=False):
    if x.dtype.kind == "u":  # NumPy would count on in uint64
        return np.sum(x, axis=dim, keepdims=keepdim, dtype=np.int64)
    return np.sum(widen(x), axis=dim, keepdims=keepdim)


def mean(x, dim=None, keepdim=False):
    total = np.sum(widen(x), axis=dim, keepdims=keepdim)
    return total / (x.size / max(total.size, 1))  # of nothing: 0 / 0 = nan without np.mean's warning


def running_sums(x, dim):
    """All partial sums in x's own format, each addition rounded: what the naive ops show, and nothing else uses."""
    return np.add.accumulate(x, axis=dim, dtype=x.dtype)


def amax(x, dim=None, keepdim=False):
    return np.max(x, axis=dim, keepdims=keepdim)


def amin(x, dim=None, keepdim=False):
    return np.min(x, axis=dim, keepdims=keepdim)


def argmax(x, dim=None, keepdim=False):
    return np.argmax(x, axis=dim, keepdims=keepdim)


def argmin(x, dim=None, keepdim=False):
    return np.argmin(x, axis=dim, keepdims=keepdim)


def sum_to(x, shape):
    """Undo a broadcast: sum `x` over the dimensions that broadcasting `shape` to x.shape has made."""
    lead = x.ndim - len(shape)
    dims = tuple(range(lead)) + tuple(
        lead + i for i, n in enumerate(shape) if n == 1 and x.shape[lead + i] != 1
    )
    return np.sum(widen(x), axis=dims, keepdims=True).reshape(shape) if dims else x.reshape(shape)


def expand(x, shape):
    if x.size == math.prod(shape):  # repeats nothing, so it may be written to: what NumPy broadcasts may not
        return np.reshape(x, shape)
    return np.broadcast_to(x, shape)


# ---- matmul: float32 BLAS on widened inputs is the tensor core's arithmetic (exact products, float32 sums)


def matmul(a, b):
    return np.matmul(widen(a), widen(b))


matmul_wide = matmul  # the GPU's matmul rounds to half, this one does not


def scaled_matmul(a, b, alpha):
    return matmul(a, b) * alpha


def scaled(x, factor):
    """x * factor in float32: a half array times a Python number would round the number too."""
    return widen(x) * factor


def linear(x, weight, bias):
    y = matmul(x, widen(weight).T)
    if bias is not None:
        y += widen(bias)
    return y


def mT(x):
    return np.swapaxes(x, -1, -2)


# ---- functions NumPy has not, or not so


def clamp(x, min=None, max=None):
    x = x if min is None else np.maximum(x, min)
    return x if max is None else np.minimum(x, max)


def sigmoid(x):
    e = np.exp(-np.abs(x))  # at most 1, so nothing overflows and small results keep their digits
    return np.maximum(e, x >= 0) / (1.0 + e)  # 1 where x >= 0, else e: 0.8 of the time of choosing


def sign(x):
    """-1, 0 or 1; 0 for nan, as in PyTorch."""
    return np.subtract(x > 0, x < 0, dtype=x.dtype)


def remainder(a, b):
    """a % b with b's sign. RuntimeError for integers over a 0, for which NumPy gives 0."""
    return np.remainder(a, _no_zero("remainder", a, b))


def floor_divide(a, b):
    return np.floor_divide(a, _no_zero("floor_divide", a, b))


def _no_zero(name, a, b):
    if np.result_type(a, b).kind in "iub" and not np.all(b):
        raise RuntimeError(f"{name}: integers can't be divided by 0: use x.float()")
    return b


_ZEROS = np.zeros(1 << 14, np.float32)


def _ordered(x):
    """Halves as int16, whose comparisons with 0 are theirs and 60 x faster; other arrays as they are.

    So are halves among which is a nan with its sign bit set (bits above those of -inf), which an int16 would call negative.
    """
    if not _is_half(x.dtype) or not x.ndim:
        return x
    low = 0xFC00 if x.dtype == np.float16 else 0xFF80
    return x.view(np.int16) if not x.size or x.view(np.uint16).max() <= low else x


def relu(x):
    words = _ordered(x)
    if words.dtype.char not in "fh" or x.size < len(_ZEROS):
        y = np.maximum(words, 0)
        return y if words is x else y.view(x.dtype)
    # 0.25 ms per million, of halves 0.15: NumPy's maximum with a scalar takes twice as long, with one of int16 0.5
    zeros = _ZEROS.view(words.dtype)
    source, target, y = _flat(words, words.dtype)
    for start in range(0, x.size, len(zeros)):
        cut = slice(start, start + len(zeros))
        np.maximum(source[cut], zeros[: x.size - start], out=target[cut])
    return y.view(x.dtype)


def relu_grad(g, y):
    """0 where y <= 0, else g: also where y is nan."""
    blocked = np.asarray(_ordered(y) <= 0)
    return _keep(g, np.logical_not(blocked, out=blocked))
