"""Activations. Their gradients stay finite wherever the mathematics has them, up to the largest half.

tanh and sigmoid take their gradient from the stored output, as PyTorch does: where that has been rounded to 1 the gradient is 0.
The others keep the input, and their gradients are right to the rounding (gelu's to 2**-22 where it is small: 1 + erf in float32).
"""

import math

from minamp.arguments import check_floating
from minamp.formats import float64
from minamp.op import FP32, LOWER_PRECISION, NOT_LISTED, op

# ---------------------------------------------------------------------------------------------------- from the stored output


@op(policy=NOT_LISTED, ints="float")
class tanh:
    """Hyperbolic tangent; exactly 1 in float16 from 4.5078125 on."""

    def forward(m, x):
        return m.tanh(x)

    def vjp_x(m, g, y):
        return g * (1.0 - y * y)


@op(policy=NOT_LISTED, ints="float")
class sigmoid:
    """1 / (1 + e**-x), without overflow on either side; exactly 1 in float16 from 8.3203125 on."""

    def forward(m, x):
        return m.sigmoid(x)

    def vjp_x(m, g, y):
        return g * y * (1.0 - y)


@op(policy=NOT_LISTED, moves=True)
class relu:
    """max(x, 0); the gradient at 0 is 0, at nan it passes. inplace is accepted as in torch, and input left alone all the same."""

    def call(input, inplace=False):
        return (input,), {}

    def forward(m, x):
        return m.relu(x)

    def vjp_x(m, g, y):
        return m.relu_grad(g, y)


@op(policy=NOT_LISTED, mixed="first", moves=True)
class relu_grad:
    """0 where out, the output of relu, is 0, else g: also where g is inf, which g * (out > 0) would turn into nan."""

    def forward(m, g_, out):
        return m.relu_grad(g_, out)

    def vjp_g_(m, g, out):
        return m.relu_grad(g, out)

    def vjp_out(m, g):
        return m.zeros_like(g)


# ---------------------------------------------------------------------------------------------------------------- piecewise


@op(policy=NOT_LISTED)
class leaky_relu:
    """x where positive, negative_slope * x elsewhere (Maas, Hannun and Ng, 2013); at 0 the gradient is the slope."""

    def call(input, negative_slope=0.01, inplace=False):  # inplace: as in relu
        check_floating("leaky_relu", input)
        return (input,), {"slope": negative_slope}

    def forward(m, x, *, slope):
        return m.where(x > 0, x, x * slope)

    def vjp_x(m, g, x, slope):
        return m.where(x > 0, g, g * slope)


@op(policy=LOWER_PRECISION)
class prelu:
    """x where positive, weight * x elsewhere (He et al., 2015, section 2.1); half under autocast, as the convolution before it.

    input (N, C, ...), weight (C,), or one weight for any input. RuntimeError for another number of weights.
    """

    def call(input, weight):
        check_floating("prelu", input)
        if weight.ndim > 1:
            raise RuntimeError(
                f"prelu: weight must have shape (C,) or be one number, got shape {weight.shape}"
            )
        channels = input.shape[1] if input.ndim > 1 else 1
        if weight.numel() not in (1, channels):
            raise RuntimeError(
                f"prelu: weight holds {weight.numel()} slopes, input {input.shape} has {channels} channels: give 1 or {channels}"
            )
        return (input, weight), {}

    def forward(m, x, weight):
        return m.where(x > 0, x, x * _per_channel(m, weight, x))

    def vjp_x(m, g, x, weight):
        return m.where(x > 0, g, g * _per_channel(m, weight, x))

    def vjp_weight(m, g, x, weight):
        slopes = m.where(x > 0, m.zeros_like(g), g * x)
        return m.reshape(m.sum_to(slopes, _per_channel(m, weight, x).shape), weight.shape)


def _per_channel(m, weight, x):
    """(C,) as (1, C, 1, ...), which broadcasts against x (N, C, ...)."""
    n = math.prod(weight.shape)
    return m.reshape(weight, (1,) * x.ndim if n == 1 else (1, n) + (1,) * (x.ndim - 2))


@op(policy=NOT_LISTED)
class elu:
    """x where positive, alpha * (e**x - 1) elsewhere (Clevert et al., 2016, equation 15).

    In float16 exactly -alpha from x = -8.32 down.
    """

    def call(input, alpha=1.0, inplace=False):  # inplace: as in relu
        check_floating("elu", input)
        return (input,), {"alpha": alpha}

    def forward(m, x, *, alpha):
        # -relu(-x) is min(x, 0): the side not taken must not overflow. Not x > 0: elu(0) would be -0
        return m.where(x < 0, alpha * m.expm1(-m.relu(-x)), x)

    def vjp_x(m, g, x, alpha):
        return m.where(x > 0, g, g * (alpha * m.exp(-m.relu(-x))))


# -------------------------------------------------------------------------------------------------------------------- smooth


@op(policy=NOT_LISTED, ints="float")
class erf:
    """The error function, 2/sqrt(pi) times the integral of exp(-t*t) from 0 to x."""

    def forward(m, x):
        return m.erf(x)

    def vjp_x(m, g, x):
        return g * (m.exp(-(x * x)) * (2.0 / math.sqrt(math.pi)))


# M. Giles, "Approximating the erfinv function", GPU Computing Gems (2011): polynomials of w = -log(1 - x*x) below 5, of its root
# beyond; constant coefficients last.
_NEAR = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
_NEAR += (-0.00125372503, -0.00417768164, 0.246640727, 1.50140941)
_FAR = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
_FAR += (-0.0076224613, 0.00943887047, 1.00167406, 2.83297682)


def _polynomial(coefficients, x):
    y = coefficients[0]
    for c in coefficients[1:]:
        y = y * x + c
    return y


@op(policy=FP32, ints="float")
class erfinv:
    """The inverse of erf on (-1, 1); inf and -inf at the ends, nan beyond. To three units in the last place of float32."""

    def forward(m, x):
        w = -m.log((1.0 - x) * (1.0 + x))
        near, far = (
            _polynomial(_NEAR, m.minimum(w, 5.0) - 2.5),
            _polynomial(_FAR, m.sqrt(m.maximum(w, 5.0)) - 3.0),
        )
        y = m.where(w < 5.0, near, far) * x
        if x.dtype == float64:  # twice Newton's method doubles the digits and doubles them again
            for _ in range(2):
                y = y - (m.erf(y) - x) * m.exp(y * y) * (math.sqrt(math.pi) / 2)
        return m.where(m.abs(x) == 1.0, x * math.inf, y)

    def vjp_x(m, g, y):
        return g * (m.exp(y * y) * (math.sqrt(math.pi) / 2))


@op(policy=NOT_LISTED)
class gelu:
    """x times the normal distribution function at x (Hendrycks and Gimpel, 2016); approximate='tanh' for their formula."""

    def call(input, approximate="none"):
        if approximate not in ("none", "tanh"):
            raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
        check_floating("gelu", input)
        return (input,), {"approximate": approximate}

    def forward(m, x, *, approximate):
        if approximate == "none":
            return 0.5 * x * (1.0 + m.erf(x * math.sqrt(0.5)))
        return 0.5 * x * (1.0 + m.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))

    def vjp_x(m, g, x, approximate):
        # beyond, the gradient is 0 or 1 in every format, but x * x or x**3 may be inf
        x = m.clamp(x, -40.0, 40.0)
        if approximate == "none":
            density = m.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
            return g * (0.5 * (1.0 + m.erf(x * math.sqrt(0.5))) + x * density)
        # (1 + tanh) / 2 that keeps its small values
        s = m.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))
        inner = 2 * math.sqrt(2 / math.pi) * (1.0 + 3 * 0.044715 * (x * x))
        return g * (s + x * s * (1.0 - s) * inner)


@op(policy=NOT_LISTED)
class silu:
    """x * sigmoid(x), also called swish; bounded derivative, so safe in half."""

    def call(input, inplace=False):  # inplace: as in relu
        check_floating("silu", input)
        return (input,), {}

    def forward(m, x):
        return x * m.sigmoid(x)

    def vjp_x(m, g, x):
        s = m.sigmoid(x)
        return g * (s * (1.0 + x * (1.0 - s)))


@op(policy=NOT_LISTED)
class logsigmoid:
    """log(sigmoid(x)) without forming the sigmoid: x far below 0, -e**-x far above (0 in float16 from 17.34375 on)."""

    def call(input):
        check_floating("logsigmoid", input)
        return (input,), {}

    def forward(m, x):
        return -m.relu(-x) - m.log1p(m.exp(-m.abs(x)))

    def vjp_x(m, g, x):
        return g * m.sigmoid(-x)


@op(policy=FP32)
class softplus:
    """log(1 + e**(beta * x)) / beta, and x itself where beta * x > threshold; float32 under autocast."""

    def call(input, beta=1.0, threshold=20.0):
        check_floating("softplus", input)
        return (input,), {"beta": beta, "threshold": threshold}

    def forward(m, x, *, beta, threshold):
        z = x * beta
        return m.where(z > threshold, x, (m.relu(z) + m.log1p(m.exp(-m.abs(z)))) / beta)

    def vjp_x(m, g, x, beta, threshold):
        z = x * beta
        return m.where(z > threshold, g, g * m.sigmoid(z))
