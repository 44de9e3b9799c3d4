"""How NOT to compute in half: the textbook formulas with every intermediate rounded, kept for lessons on what goes wrong.

Nothing else in minamp uses them. They are never autocast, and float32 input gives the same formulas in float32. Every sum is a
running sum, rounded after each addition, forwards and backwards. What to use instead stands in each docstring.
"""

from minamp.devices import same_device
from minamp.op import NOT_LISTED, op
from minamp.ops.shape import dim_of
from minamp.tensor import Tensor


def _stored(m, g, x):
    """The incoming gradient in the format of x: the engine carries half gradients in float32 words."""
    return g if g.dtype == x.dtype else m.cast(g, x.dtype)


def _running_sum(m, x, dim):
    """Sum over `dim`, kept as size 1: an op for tensors, for arrays one rounded addition after the other."""
    if isinstance(x, Tensor):
        return m.naive_half_sum(x, dim, True)
    if not x.shape[dim]:
        return m.sum(x, dim, True)
    return m.running_sums(x, dim)[(slice(None),) * (dim % x.ndim) + (slice(-1, None),)]


@op(policy=NOT_LISTED, stored=True)
class naive_half_sum:
    """Running sum over dim (all by default), rounded to x's format at every step; use sum, whose accumulator is float32.

    4096 ones in float16 give 2048: there 2048 + 1 is a tie and goes to the even 2048.
    """

    def call(x, dim=None, keepdim=False):
        return (x,), {"dim": None if dim is None else dim_of("naive_half_sum", x, dim), "keepdim": keepdim}

    def forward(m, x, *, dim, keepdim):
        total = _running_sum(m, m.reshape(x, (-1,)), 0) if dim is None else _running_sum(m, x, dim)
        shape = (1,) * x.ndim if dim is None else total.shape
        if not keepdim:
            shape = () if dim is None else x.shape[:dim] + x.shape[dim + 1 :]
        return m.reshape(total, shape)

    def vjp_x(m, g, x_shape, dim):
        shape = tuple(1 if dim is None or i == dim else n for i, n in enumerate(x_shape))
        return m.expand(m.reshape(g, shape), x_shape)


@op(policy=NOT_LISTED, stored=True)
class naive_half_softmax:
    """exp(x) / sum(exp(x)) over dim without the shift by the maximum; use softmax.

    In float16 one logit of 11.09375 makes exp and the sum inf, and inf / inf is nan; three of 10 make only the sum inf,
    and every probability 0.
    """

    def call(x, dim=-1):
        return (x,), {"dim": dim_of("naive_half_softmax", x, dim)}

    def forward(m, x, *, dim):
        e = m.exp(x)
        return e / _running_sum(m, e, dim)

    def vjp_x(m, g, y, dim):
        g = _stored(m, g, y)
        return y * (g - _running_sum(m, g * y, dim))


@op(policy=NOT_LISTED, stored=True)
class naive_half_cross_entropy:
    """mean(-log(p[target])) of p = naive_half_softmax(logits); use cross_entropy, which never forms p.

    logits (N, C), target (N,) integers. In float16 p is 0 from a gap of 17.34375 on, and the loss inf; it is 1 from a gap of
    about 8 on, and the loss and the gradient of the right logit are 0. IndexError for a class id outside [0, C).
    """

    def call(logits, target):
        same_device("naive_half_cross_entropy", logits=logits, target=target)
        ids = target._data
        if logits.ndim != 2 or ids.shape != logits.shape[:1]:
            raise ValueError(
                f"naive_half_cross_entropy: give logits (N, C) and target (N,), got {logits.shape} and {ids.shape}"
            )
        if ids.dtype.kind not in "iu":
            raise RuntimeError(
                f"naive_half_cross_entropy: target must be integer, this one is {ids.dtype}: use target.long()"
            )
        return (naive_half_softmax(logits, 1),), {"at": ids.reshape(-1, 1)}

    def forward(m, p, *, at):
        losses = -m.log(m.gather(p, 1, at))
        return m.reshape(_running_sum(m, losses, 0), ()) / float(len(at))

    def vjp_p(m, g, p, at):
        g = _stored(m, g, p) / float(len(at))
        return m.gather_grad(-(g / m.gather(p, 1, at)), 1, at, p.shape)


@op(policy=NOT_LISTED, stored=True)
class naive_half_layer_norm:
    """(x - mean) / sqrt(var + eps) over the last dimension, statistics in x's own format; use layer_norm.

    In float16 the sum of D squares is inf from a standard deviation of sqrt(65504 / D) on - 8 for D = 1024 -, 1 / inf is 0, and
    the row becomes zeros without any nan. eps = 1e-8 is 0 there, and a constant row nan.
    """

    def call(x, eps=1e-5):
        return (x,), {"eps": eps}

    def forward(m, x, *, eps):
        return _naive_standardised(m, x, eps)[0]

    def vjp_x(m, g, x, eps):
        g = _stored(m, g, x)
        xhat, std = _naive_standardised(m, x, eps)
        return (g - _naive_mean(m, g) - xhat * _naive_mean(m, g * xhat)) / std


def _naive_mean(m, x):
    return _running_sum(m, x, -1) / float(x.shape[-1])


def _naive_standardised(m, x, eps):
    centred = x - _naive_mean(m, x)
    std = m.sqrt(_naive_mean(m, centred * centred) + eps)
    return centred / std, std
