"""Norms of vectors and what is made of them. Squares and sums are float32, and every gradient at a zero vector is 0."""

import math

import numpy as np

from minamp.arguments import check_floating, check_number
from minamp.autocast import is_autocast_enabled
from minamp.formats import float32, is_floating, is_half
from minamp.op import FP32, FP32_APPEND_DTYPE, FP32_SET_OPT_DTYPE, NOT_LISTED, composite, op
from minamp.ops.elementwise import maximum
from minamp.ops.reduce import dims_of, mean, over, spread_arguments, var
from minamp.ops.shape import dim_of, expand

# -------------------------------------------------------------------------------------------------------------- vector norms


def _norm_arguments(name, x, ord, dim, keepdim, dtype):
    check_floating(name, x)
    if isinstance(ord, bool) or not isinstance(ord, int | float):
        raise TypeError(f"{name}: the order must be a number such as 2 or float('inf'), got {ord!r}")
    if dtype is not None and not is_floating(np.dtype(dtype)):
        raise RuntimeError(f"{name}: dtype must be floating, got {np.dtype(dtype)}")
    if dtype is not None and np.dtype(dtype) != x.dtype and np.dtype(dtype).itemsize <= x.itemsize:
        raise RuntimeError(
            f"{name}: dtype {np.dtype(dtype)} is narrower than the input's {x.dtype}: use x.to()"
        )
    dim = dims_of(name, x, dim)
    if (ord < 0 or ord == math.inf) and not math.prod(x.shape[d] for d in dim):
        raise RuntimeError(f"{name}: the {ord} norm of nothing (shape {x.shape}, dim {dim}) does not exist")
    return (x,), {"ord": ord, "dim": dim, "keepdim": keepdim, "dtype": dtype}


def norm_vjp(m, g, x, ord, dim, keepdim):
    """g * d(norm)/dx: sign(x) * (|x| / norm)**(ord - 1), and 0 wherever x or the norm is 0, as PyTorch."""
    g = over(m, g, x.shape, dim, keepdim)
    if ord == 0:
        return m.zeros_like(g)
    if ord == 1:
        return g * m.sign(x)
    y = m.expand(m.vector_norm(x, ord, dim, True), x.shape)  # again: the saved one may be rounded to half
    if abs(ord) == math.inf:
        best = (m.abs(x) == y) + (x != x)  # nan is the extreme wherever there is one
        best = m.where(best, m.ones_like(x), m.zeros_like(x))
        return g * m.where(x != x, x, m.sign(x)) * (best / m.sum(best, dim, True))  # equal ones share
    # Where the slope is not defined, divide by 1 and take 0 in the end: no 0 / 0 and no 0 ** -1 in any gradient of this.
    zero = y == 0 if ord == 2 else (x == 0) + (y == 0)
    one = m.ones_like(x)
    ratio = m.where(zero, one, x) / m.where(zero, one, y)
    slope = ratio if ord == 2 else m.sign(x) * m.abs(ratio) ** (ord - 1)
    return m.where(zero, m.zeros_like(x), g * slope)


class _Norm:
    """What vector_norm and norm have in common."""

    def forward(m, x, *, ord, dim, keepdim, dtype):
        return m.vector_norm(x, ord, dim, keepdim)

    vjp_x = norm_vjp


@op(policy=FP32_SET_OPT_DTYPE)
class vector_norm(_Norm):
    """(sum |x|**ord)**(1/ord) over dim (all by default), as torch.linalg.vector_norm; ord 0 counts the values that are not 0,
    inf and -inf give the largest and smallest |x|.

    Any floating dtype; dtype: cast to it first, not to a narrower one. RuntimeError for integers and for orders that nothing
    has. Half: 10000 values of 3.0 have norm 300, though their squares sum to 90000.
    """

    def call(x, ord=2, dim=None, keepdim=False, *, dtype=None):
        return _norm_arguments("vector_norm", x, ord, dim, keepdim, dtype)


@op(policy=FP32_APPEND_DTYPE)
class norm(_Norm):
    """torch.norm: vector_norm of order p, all dimensions by default; p='fro' and None mean 2 (also over two dimensions)."""

    def call(input, p="fro", dim=None, keepdim=False, *, dtype=None):
        if p == "nuc":
            raise NotImplementedError("norm: the nuclear norm needs singular values, which minamp has not")
        return _norm_arguments("norm", input, 2 if p in ("fro", None) else p, dim, keepdim, dtype)


@composite
def normalize(input, p=2.0, dim=1, eps=1e-12):
    """input / max(norm over dim, eps): vectors of length 1. The norm is float32 for half, where eps would be 0 and 0 / 0 nan."""
    half = is_half(input.dtype)
    length = norm(input, p, dim, True, dtype=float32 if half else None)
    y = input / maximum(length, eps)
    return y.to(input.dtype) if half and not is_autocast_enabled() else y


@op(policy=FP32)
class renorm:
    """input with every slice along `dim` whose norm of order p is above maxnorm scaled down to it; norms are float32.

    RuntimeError for vectors and numbers, for integers, for p <= 0 and for a negative maxnorm.
    """

    def call(input, p, dim, maxnorm):
        check_floating("renorm", input)
        check_number("renorm", "p", p)
        check_number("renorm", "maxnorm", maxnorm)
        if input.ndim < 2:
            raise RuntimeError(f"renorm: input needs at least 2 dimensions, this one has shape {input.shape}")
        if not p > 0:
            raise RuntimeError(f"renorm: p must be positive, got {p}")
        if not maxnorm >= 0:
            raise RuntimeError(f"renorm: maxnorm must not be negative, got {maxnorm}")
        dim = dim_of("renorm", input, dim)
        return (input,), {"p": p, "dims": tuple(d for d in range(input.ndim) if d != dim), "maxnorm": maxnorm}

    def forward(m, x, *, p, dims, maxnorm):
        length = m.vector_norm(x, p, dims, True)
        return x * m.where(length > maxnorm, maxnorm / (length + 1e-7), 1.0)

    def vjp_x(m, g, x, p, dims, maxnorm):
        length = m.vector_norm(x, p, dims, True)
        along = norm_vjp(m, m.sum(g * x, dims, True), x, p, dims, True)  # what g has along the norm's slope
        scaled = maxnorm / (length + 1e-7) * (g - along / (length + 1e-7))
        return m.where(length > maxnorm, scaled, g)


@op(policy=FP32, mixed="promote", ints="float")
class cosine_similarity:
    """sum(x1 * x2) / (max(|x1|, eps) * max(|x2|, eps)) over dim of the common shape. Squares are float32."""

    def call(x1, x2, dim=1, eps=1e-8):
        try:
            shape = np.broadcast_shapes(x1.shape, x2.shape)
        except ValueError:
            raise RuntimeError(
                f"cosine_similarity: shapes {x1.shape} and {x2.shape} don't broadcast: sizes must be equal or 1"
            ) from None
        x1, x2 = expand(x1, shape), expand(x2, shape)
        return (x1, x2), {"dim": dims_of("cosine_similarity", x1, dim), "eps": eps}

    def forward(m, x1, x2, *, dim, eps):
        return m.sum(_unit(m, x1, dim, eps)[0] * _unit(m, x2, dim, eps)[0], dim)

    def vjp_x1(m, g, x1, x2, dim, eps):
        return _cosine_vjp(m, g, x1, x2, dim, eps)

    def vjp_x2(m, g, x1, x2, dim, eps):
        return _cosine_vjp(m, g, x2, x1, dim, eps)


def _unit(m, x, dim, eps):
    """x over its length (at least eps), and that length."""
    length = m.maximum(m.vector_norm(x, 2, dim, True), eps)
    return x / length, length


def _cosine_vjp(m, g, a, b, dim, eps):
    """The part of b's direction that is across a, over a's length; a shorter than eps has a direction too, as in PyTorch."""
    (ua, length), (ub, _) = _unit(m, a, dim, eps), _unit(m, b, dim, eps)
    norm = m.vector_norm(a, 2, dim, True)
    along = a / m.where(norm == 0, m.ones_like(norm), norm)
    g = m.reshape(g, length.shape)
    return g * (ub - along * m.sum(ua * ub, dim, True)) / length


# ------------------------------------------------------------------------------------------------------------------ logsumexp


@op(policy=FP32, ints="float")
class logsumexp:
    """log(sum(exp(x))) over dim, shifted by the largest x so that nothing overflows. Only -inf gives -inf, any inf gives inf."""

    def call(input, dim, keepdim=False):
        return (input,), {"dim": dims_of("logsumexp", input, dim), "keepdim": keepdim}

    def forward(m, x, *, dim, keepdim):
        if not math.prod(x.shape[d] for d in dim):
            return m.log(m.sum(x, dim, keepdim))
        top = _finite_top(m, x, dim)
        y = m.log(m.sum(m.exp(x - top), dim, True)) + top
        return m.sum(y, dim, keepdim)  # of one value each: drops the dimensions

    def vjp_x(m, g, x, dim, keepdim):
        if not math.prod(x.shape):
            return over(m, g, x.shape, dim, keepdim)
        e = m.exp(x - _finite_top(m, x, dim))
        return over(m, g, x.shape, dim, keepdim) * (e / m.sum(e, dim, True))


def _finite_top(m, x, dim):
    top = m.amax(x, dim, True)
    return m.where(m.isfinite(top), top, m.zeros_like(top))


# ------------------------------------------------------------------------------------------------------------------------ std


@op(policy=NOT_LISTED)
class std:
    """Standard deviation over dim, divided by n - correction (1 by default); mean and squares in float32, gradient 0 at 0."""

    def call(x, dim=None, correction=1, keepdim=False, unbiased=None):
        return spread_arguments("std", x, dim, correction, keepdim, unbiased)

    def forward(m, x, *, dim, keepdim, count):
        centred = x - m.mean(x, dim, True)
        return m.vector_norm(centred, 2, dim, keepdim) / (count**0.5 if count else 0.0)

    def vjp_x(m, g, x, dim, keepdim, count):
        if not count:
            return x * math.nan
        centred = x - m.mean(x, dim, True)
        return norm_vjp(m, g, centred, 2, dim, keepdim) / count**0.5


@composite
def var_mean(x, dim=None, correction=1, keepdim=False, unbiased=None):
    """(var, mean) over dim."""
    over = None if isinstance(dim, bool) else dim  # torch's var_mean(unbiased)
    return var(x, dim, correction, keepdim, unbiased), mean(x, over, keepdim)


@composite
def std_mean(x, dim=None, correction=1, keepdim=False, unbiased=None):
    """(std, mean) over dim."""
    over = None if isinstance(dim, bool) else dim
    return std(x, dim, correction, keepdim, unbiased), mean(x, over, keepdim)
