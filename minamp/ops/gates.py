"""Activations of mobile networks and detectors: clipped ones, which are cheap and bounded in half, and gates."""

from minamp.arguments import check_floating
from minamp.op import NOT_LISTED, composite, op
from minamp.ops.arrange import chunk

SELU_ALPHA, SELU_SCALE = (
    1.6732632423543772,
    1.0507009873554805,
)  # Klambauer et al., 2017, equation 14: they keep variance 1


@op(policy=NOT_LISTED, moves=True)
class hardtanh:
    """x between min_val and max_val; the gradient passes strictly between them."""

    def call(input, min_val=-1.0, max_val=1.0, inplace=False):  # inplace: as in relu
        if min_val > max_val:
            raise ValueError(f"hardtanh: min_val={min_val} must not be above max_val={max_val}")
        return (input,), {"low": min_val, "high": max_val}

    def forward(m, x, *, low, high):
        return m.clamp(x, low, high)

    def vjp_x(m, g, x, low, high):
        return m.where((x > low) * (x < high), g, m.zeros_like(g))


@composite
def relu6(input, inplace=False):
    """x between 0 and 6 (Howard et al., 2017): what a small format holds finely."""
    return hardtanh(input, 0.0, 6.0)


@op(policy=NOT_LISTED)
class hardsigmoid:
    """x / 6 + 1 / 2 between 0 and 1 (Howard et al., 2019, section 5.2)."""

    def call(input, inplace=False):
        check_floating("hardsigmoid", input)
        return (input,), {}

    def forward(m, x):
        return m.clamp(x + 3.0, 0.0, 6.0) / 6.0

    def vjp_x(m, g, x):
        return m.where((x > -3.0) * (x < 3.0), g / 6.0, m.zeros_like(g))


@op(policy=NOT_LISTED)
class hardswish:
    """x * hardsigmoid(x) (Howard et al., 2019, section 5.2)."""

    def call(input, inplace=False):
        check_floating("hardswish", input)
        return (input,), {}

    def forward(m, x):
        return x * m.clamp(x + 3.0, 0.0, 6.0) / 6.0

    def vjp_x(m, g, x):
        slope = m.where(x < 3.0, g * (x / 3.0 + 0.5), g)
        return m.where(x > -3.0, slope, m.zeros_like(g))


@op(policy=NOT_LISTED)
class mish:
    """x * tanh(softplus(x)) (Misra, 2020)."""

    def call(input, inplace=False):
        check_floating("mish", input)
        return (input,), {}

    def forward(m, x):
        return x * m.tanh(_softplus(m, x))

    def vjp_x(m, g, x):
        t = m.tanh(_softplus(m, x))
        return g * (t + x * m.sigmoid(x) * (1.0 - t * t))


def _softplus(m, x):
    return m.relu(x) + m.log1p(m.exp(-m.abs(x)))


@op(policy=NOT_LISTED)
class selu:
    """1.0507 x where positive, 1.0507 * 1.67326 * (e**x - 1) elsewhere."""

    def call(input, inplace=False):
        check_floating("selu", input)
        return (input,), {}

    def forward(m, x):
        # -relu(-x) is min(x, 0): the side not taken must not overflow
        return m.where(x < 0, SELU_SCALE * SELU_ALPHA * m.expm1(-m.relu(-x)), SELU_SCALE * x)

    def vjp_x(m, g, x):
        return m.where(x > 0, g * SELU_SCALE, g * (SELU_SCALE * SELU_ALPHA * m.exp(-m.relu(-x))))


@op(policy=NOT_LISTED, mixed="promote")
class gated:
    """a * sigmoid(b), rounded once: glu of the two halves."""

    def forward(m, a, b):
        return a * m.sigmoid(b)

    def vjp_a(m, g, b):
        return g * m.sigmoid(b)

    def vjp_b(m, g, a, b):
        s = m.sigmoid(b)
        return g * a * (s * (1.0 - s))


@composite
def glu(input, dim=-1):
    """The first half of a dimension times the sigmoid of the second (Dauphin et al., 2017). RuntimeError for an odd size."""
    if input.shape[dim] % 2:
        raise RuntimeError(f"glu: dimension {dim} of {input.shape} must have an even size")
    return gated(*chunk(input, 2, dim))
