"""Matrix products: half in, float32 sums, one rounding - the arithmetic of a tensor core."""

import math

from minamp.op import LOWER_PRECISION, NOT_LISTED, op
from minamp.ops.shape import expands


@op(policy=LOWER_PRECISION, stored=True)
class matmul:
    """a @ b with NumPy's rules: vectors, matrices, batches that broadcast. Sums in float32 for half."""

    def forward(m, a, b):
        return m.matmul(a, b)

    def vjp_a(m, g, b, a_shape):
        column = m.reshape(g, (*g.shape, 1))
        if b.ndim == 1:
            return column * b
        if len(a_shape) == 1:
            return m.reshape(_product(m, b, column, b.ndim > 2), b.shape[:-1])
        return _product(m, g, m.mT(b), g.shape[:-2] != a_shape[:-2])

    def vjp_b(m, g, a, b_shape):
        if a.ndim == 1:
            row = m.reshape(g, (*g.shape[:-1], 1, g.shape[-1])) if len(b_shape) > 1 else g
            return m.reshape(a, (-1, 1)) * row if len(b_shape) > 1 else a * g
        if len(b_shape) == 1:
            product = _product(m, m.mT(a), m.reshape(g, (*g.shape, 1)), a.ndim > 2)
            return m.reshape(product, (*a.shape[:-2], a.shape[-1]))
        return _product(m, m.mT(a), g, g.shape[:-2] != b_shape[:-2])


def _product(m, a, b, summed):
    """a @ b for a gradient: in float32 if it will be `summed` over a batch that was broadcast, and rounded after that."""
    return m.matmul_wide(a, b) if summed else m.matmul(a, b)


@op(policy=NOT_LISTED, stored=True)
class matmul_wide:
    """a @ b that a gradient is summed from: a backend hands its sums on in float32."""

    def forward(m, a, b):
        return m.matmul_wide(a, b)

    def vjp_a(m, g, b):
        return m.matmul_wide(g, m.mT(b))

    def vjp_b(m, g, a):
        return m.matmul_wide(m.mT(a), g)


@op(policy=LOWER_PRECISION, stored=True)
class linear:
    """x @ weight.T + bias. x (..., in), weight (out, in), bias (out,) or None; the bias is added in float32, before rounding.

    weight may be a vector (in,): the result is (...,) then, and bias, if given, a number. RuntimeError for other shapes.
    """

    def call(x, weight, bias=None):
        if weight.ndim not in (1, 2):
            raise RuntimeError(f"linear: weight must be (out, in) or (in,), got shape {weight.shape}")
        if x.shape[-1:] != weight.shape[-1:]:
            raise RuntimeError(
                f"linear: x {x.shape} has {x.shape[-1:]} features, weight {weight.shape} takes {weight.shape[-1:]}"
            )
        if bias is not None and bias.shape != weight.shape[:-1]:
            shape = x.shape[:-1] + weight.shape[:-1]
            if not expands(bias.shape, shape):
                raise RuntimeError(
                    f"linear: bias {bias.shape} can't be expanded to the result's shape {shape}"
                )
        return (x, weight, bias), {}

    def forward(m, x, weight, bias):
        return m.linear(x, weight, bias)

    def vjp_x(m, g, weight):
        if weight.ndim == 1:
            return m.matmul(m.reshape(g, (*g.shape, 1)), m.reshape(weight, (1, -1)))
        return m.matmul(g, weight)

    def vjp_weight(m, g, x, weight_shape):
        out = 1 if len(weight_shape) == 1 else weight_shape[0]
        rows = math.prod(x.shape[:-1])
        gw = m.matmul(m.mT(m.reshape(g, (rows, out))), m.reshape(x, (rows, x.shape[-1])))
        return m.reshape(gw, weight_shape)

    def vjp_bias(m, g, bias_shape):
        return m.sum_to(g, bias_shape)
