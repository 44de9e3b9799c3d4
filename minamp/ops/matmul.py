"""Matrix products: half in, float32 sums, one rounding - the arithmetic of a tensor core."""

from minamp.op import LOWER_PRECISION, op


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
            return m.reshape(m.matmul(b, column), b.shape[:-1])
        return m.matmul(g, m.mT(b))

    def vjp_b(m, g, a, b_shape):
        if a.ndim == 1:
            row = m.reshape(g, (*g.shape[:-1], 1, g.shape[-1])) if len(b_shape) > 1 else g
            return m.reshape(a, (-1, 1)) * row if len(b_shape) > 1 else a * g
        if len(b_shape) == 1:
            return m.reshape(m.matmul(m.mT(a), m.reshape(g, (*g.shape, 1))), (*a.shape[:-2], a.shape[-1]))
        return m.matmul(m.mT(a), g)


@op(policy=LOWER_PRECISION, stored=True)
class linear:
    """x @ weight.T + bias. x (..., in), weight (out, in), bias (out,) or None; the bias is added in float32, before rounding."""

    def call(x, weight, bias=None):
        if x.shape[-1:] != weight.shape[-1:]:
            raise RuntimeError(
                f"linear: x {x.shape} has {x.shape[-1:]} features, weight {weight.shape} takes {weight.shape[-1:]}"
            )
        return (x, weight, bias), {}

    def forward(m, x, weight, bias):
        return m.linear(x, weight, bias)

    def vjp_x(m, g, weight):
        return m.matmul(g, weight)

    def vjp_weight(m, g, x):
        return m.matmul(m.mT(m.reshape(g, (-1, g.shape[-1]))), m.reshape(x, (-1, x.shape[-1])))

    def vjp_bias(m, g):
        return m.sum(m.reshape(g, (-1, g.shape[-1])), 0)
