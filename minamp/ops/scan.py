"""Running sums and products. Gradients of products divide by nothing, so zeros in the input are no special case."""

from minamp.op import FP32_SET_OPT_DTYPE, NOT_LISTED, op
from minamp.ops.reduce import counted
from minamp.ops.shape import dim_of, reshape


def _reversed(m, function, x, dim):
    """function along `dim`, from the end to the start."""
    return m.flip(function(m.flip(x, dim), dim), dim)


def _shifted(m, x, dim, first):
    """x moved one step along `dim`: `first`, x[0], ..., x[n-2]."""
    return m.constant_pad_nd(x, (0, 0) * (x.ndim - 1 - dim) + (1, -1), first)


@op(policy=FP32_SET_OPT_DTYPE)
class cumsum:
    """y[k] = x[0] + ... + x[k] along dim, float32 sums for half; integers as int64. dtype: cast to it first."""

    def call(input, dim, *, dtype=None):
        return (input,), {"dim": dim_of("cumsum", input, dim), "dtype": dtype}

    def forward(m, x, *, dim, dtype):
        return counted(m, m.cumsum(x, dim), dtype)

    def vjp_x(m, g, dim):
        return _reversed(m, m.cumsum, g, dim) if g.ndim else g


@op(policy=FP32_SET_OPT_DTYPE)
class cumprod:
    """y[k] = x[0] * ... * x[k] along dim, float32 products for half; integers as int64. dtype: cast to it first.

    The gradient of x[k] is (x[0] ... x[k-1]) * s[k], where s[k] = g[k] + x[k+1] * s[k+1]: right with zeros in x.
    """

    def call(input, dim, *, dtype=None):
        return (input,), {"dim": dim_of("cumprod", input, dim), "dtype": dtype}

    def forward(m, x, *, dim, dtype):
        return counted(m, m.cumprod(x, dim), dtype)

    def vjp_x(m, g, x, dim):
        if not x.ndim or not x.shape[dim]:
            return g
        before = m.cumprod(_shifted(m, x, dim, 1.0), dim)
        factors = _shifted(m, m.flip(x, dim), dim, 0.0)
        return before * m.flip(m.recurrence(factors, m.flip(g, dim), dim), dim)


@op(policy=NOT_LISTED, mixed="promote")
class recurrence:
    """y[k] = a[k] * y[k-1] + b[k] along dim, with y[-1] = 0: what the gradient of a running product is made of."""

    def forward(m, a, b, *, dim):
        return m.recurrence(a, b, dim)

    def vjp_a(m, g, a, y, dim):
        return _recurrence_back(m, g, a, dim) * _shifted(m, y, dim, 0.0)

    def vjp_b(m, g, a, dim):
        return _recurrence_back(m, g, a, dim)


def _recurrence_back(m, g, a, dim):
    """s[k] = g[k] + a[k+1] * s[k+1]: the recurrence itself, from the end."""
    return m.flip(m.recurrence(_shifted(m, m.flip(a, dim), dim, 0.0), m.flip(g, dim), dim), dim)


@op(policy=FP32_SET_OPT_DTYPE)
class prod:
    """Product of all values, or over one dim; float32 for half, integers as int64. dtype: cast to it first.

    The gradient of x[k] is the product of what lies before k times that of what lies after: right with zeros in x.
    """

    def call(input, dim=None, keepdim=False, *, dtype=None):
        if dim is None:
            return (reshape(input, -1),), {"dim": 0, "keepdim": False, "dtype": dtype}
        if not isinstance(dim, int):
            raise TypeError(f"prod: dim must be one int, got {dim!r}: use .prod(a).prod(b)")
        dim = dim_of("prod", input, dim)
        if not input.ndim:
            input, keepdim = reshape(input, 1), False
        return (input,), {"dim": dim, "keepdim": keepdim, "dtype": dtype}

    def forward(m, x, *, dim, keepdim, dtype):
        return counted(m, m.prod(x, dim, keepdim), dtype)

    def vjp_x(m, g, x, dim, keepdim):
        if not keepdim:
            g = m.reshape(g, x.shape[:dim] + (1,) + x.shape[dim + 1 :])
        if not x.shape[dim]:
            return m.expand(g, x.shape)
        before = m.cumprod(_shifted(m, x, dim, 1.0), dim)
        after = m.flip(m.cumprod(_shifted(m, m.flip(x, dim), dim, 1.0), dim), dim)
        return g * (before * after)
