"""CuPy's side of the short list of functions that op declarations compute with; cpu.py is NumPy's.

The arithmetic is the same: half is widened, sums have a float32 accumulator, named every time (CuPy's own half sums differ by
axis and layout), and rounding to half is the one last step. Matrix products and convolutions take half as it is stored, since
that is what tensor cores multiply. Nothing here waits for the GPU, except where the size of a result depends on values (nonzero,
a bool mask as an index).
"""

import numpy as np

from minamp.backends import gemm, kernels
from minamp.backends.cuda_cast import alike as _alike
from minamp.backends.cuda_cast import cast, narrow, widen  # noqa: F401  part of the vocabulary
from minamp.backends.cuda_check import check  # noqa: F401  what is looked at before a kernel runs
from minamp.backends.cuda_conv import (  # noqa: F401  the convolution room, same vocabulary
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
from minamp.backends.cuda_place import (  # noqa: F401  picking and placing
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
from minamp.backends.cuda_series import cumprod, cumsum, prod, recurrence, vector_norm  # noqa: F401
from minamp.backends.cuda_upsample import upsample2d, upsample2d_grad  # noqa: F401
from minamp.backends.device import xp
from minamp.backends.kernels_elementwise import erf, relu_grad, sigmoid  # noqa: F401
from minamp.backends.kernels_update import (  # noqa: F401  the scaler's and the optimizers' passes
    adam,
    rmsprop,
    sgd,
    unscale,
    update_scale,
    widen_all,
)
from minamp.formats import float32, is_half

name = "cuda"


def _named(name):
    def function(*args, **kwargs):
        return getattr(xp, name)(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    return function


abs = _named("abs")
exp, log, sqrt, tanh = (_named(n) for n in ("exp", "log", "sqrt", "tanh"))
sin, cos, tan, sinh, cosh = (_named(n) for n in ("sin", "cos", "tan", "sinh", "cosh"))
asin, acos, atan, atan2 = (_named(n) for n in ("arcsin", "arccos", "arctan", "arctan2"))
log1p, expm1, log2, log10 = (_named(n) for n in ("log1p", "expm1", "log2", "log10"))
maximum, minimum, where = (_named(n) for n in ("maximum", "minimum", "where"))
isfinite, isnan, isinf = (_named(n) for n in ("isfinite", "isnan", "isinf"))
nonzero = _named("nonzero")
round, floor, ceil, trunc = (_named(n) for n in ("round", "floor", "ceil", "trunc"))
logical_and, logical_or, logical_xor, logical_not = (
    _named(f"logical_{n}") for n in ("and", "or", "xor", "not")
)
remainder, floor_divide = _named("remainder"), _named("floor_divide")
zeros_like, ones_like = _named("zeros_like"), _named("ones_like")
permute, flip = _named("transpose"), _named("flip")
may_share_memory = _named("may_share_memory")
asarray = _named("asarray")


def reshape(x, shape):
    """`x` itself if that is its shape: a gradient that is no view is kept where it lies."""
    return x if x.shape == shape else xp.reshape(x, shape)


def full(shape, value, dtype):
    return xp.full(shape, value, dtype)


def arange(n):
    return xp.arange(n)


def lower_triangle(rows, cols):
    return xp.tri(rows, cols, dtype=np.bool_)


def keep_mask(generator, shape, p):
    """A bool array, False with probability p: drawn on the GPU, from a key that the host's generator gives."""
    return kernels.keep_mask(int(generator.integers(2**63)), shape, p)


def factor(x, dtype):
    """`x` rounded to `dtype` for products alone: as halves, which is what tensor cores multiply."""
    return cast(x, dtype)


def grid(g, dtype, new=False):
    """A gradient rounded to `dtype`, in the form it travels in: as halves, which the next product takes as they are."""
    return narrow(g, dtype)


def store(out, x):
    """float32 `x` into the memory of the half array `out`, rounded once by the copy itself: no array is made for it."""
    out[...] = x


def owned(x, dtype, like):
    """`x`, which may be shared, as an array of its own in `dtype` that lies in memory as `like` does."""
    made = cast(x, dtype)
    if made is not x and made.strides == like.strides:
        return made
    out = xp.empty_like(like, dtype)
    out[...] = made
    return out


# ---- sums


def _accumulator(dtype):
    return float32 if is_half(dtype) else dtype if dtype.kind == "f" else np.dtype(np.int64)


def sum(x, dim=None, keepdim=False):
    return xp.sum(x, axis=dim, keepdims=keepdim, dtype=_accumulator(x.dtype))


def mean(x, dim=None, keepdim=False):
    return xp.mean(x, axis=dim, keepdims=keepdim, dtype=_accumulator(x.dtype))


def running_sums(x, dim):
    """All partial sums in x's own format, each addition rounded: one launch a step, since CuPy's cumsum adds in a tree."""
    y = xp.moveaxis(x.copy(), dim, 0)
    for k in range(1, len(y)):
        step = y[k, ...]
        step += y[k - 1]
    return xp.moveaxis(y, 0, dim)


def amax(x, dim=None, keepdim=False):
    return xp.max(x, axis=dim, keepdims=keepdim)


def amin(x, dim=None, keepdim=False):
    return xp.min(x, axis=dim, keepdims=keepdim)


def argmax(x, dim=None, keepdim=False):
    return xp.argmax(widen(x), axis=dim, keepdims=keepdim)


def argmin(x, dim=None, keepdim=False):
    return xp.argmin(widen(x), axis=dim, keepdims=keepdim)


def sum_to(x, shape):
    """Undo a broadcast: sum `x` over the dimensions that broadcasting `shape` to x.shape has made."""
    lead = x.ndim - len(shape)
    dims = tuple(range(lead)) + tuple(
        lead + i for i, n in enumerate(shape) if n == 1 and x.shape[lead + i] != 1
    )
    return sum(x, dims, True).reshape(shape) if dims else x.reshape(shape)


def expand(x, shape):
    return xp.broadcast_to(x, shape)


# ---- matmul


def matmul(a, b):
    """a @ b. Of two half arrays: half, rounded once; float32 where the sum is the long side, as in a weight gradient."""
    return scaled_matmul(a, b, 1.0)


def scaled_matmul(a, b, alpha):
    """alpha * (a @ b): matmul whose float32 sums are scaled before they are rounded."""
    a, b = _alike(a, b)
    if a.dtype.kind in "iub":
        return xp.matmul(a, b) * int(alpha)
    long = a.ndim > 1 and b.ndim > 1 and a.shape[-1] > max(a.shape[-2], b.shape[-1])
    return gemm.matmul(a, b, float32 if is_half(a.dtype) and long else a.dtype, alpha)


def matmul_wide(a, b):
    """a @ b in float32 (float64), not rounded to half: for sums that go on."""
    a, b = _alike(a, b)
    return gemm.matmul(a, b, float32 if is_half(a.dtype) else a.dtype)


def scaled(x, factor):
    """x * factor in float32: a half array times a Python number would round the number too."""
    return widen(x) * factor


def linear(x, weight, bias):
    """x @ weight.T + bias: the bias lies in the result before the product is added to it, so all is rounded once.

    A following activation is not fused into this. Every op is recorded, cast and watched by itself, and a linear_relu beside
    linear and relu would be a second place that says what either does. What it would save is one pass over y and one launch:
    relu keeps its output for backward, which is what the next product keeps anyway. gelu and silu keep their input, so y would
    be written all the same; and computed from the float32 sum instead of the half y they would not give the CPU's numbers.
    """
    x, weight = _alike(x, weight)
    if bias is None or not bias.dtype == x.dtype or weight.ndim == 1:
        y = matmul_wide(x, weight.T)
        return y if bias is None else y + widen(bias)
    y = xp.empty((*x.shape[:-1], len(weight)), x.dtype)
    y[...] = bias
    if x.size and weight.size:
        gemm.gemm(x.reshape(-1, x.shape[-1]), weight.T, y.reshape(-1, len(weight)), beta=1.0)
    return y


def mT(x):
    return xp.swapaxes(x, -1, -2)


# ---- functions CuPy has not, or not so


def clamp(x, min=None, max=None):
    x = x if min is None else xp.maximum(x, min)
    return x if max is None else xp.minimum(x, max)


def cat(xs, dim):
    return xp.concatenate(xs, axis=dim)


def sign(x):
    """-1, 0 or 1; 0 for nan, where CuPy's is nan."""
    return xp.subtract(x > 0, x < 0, dtype=x.dtype)


def relu(x):
    return xp.maximum(x, 0)
