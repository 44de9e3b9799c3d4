"""Elementwise ops: a table of derivatives. The cast between dtypes is one of them."""

import math

import numpy as np

from minamp.op import FP32, NOT_LISTED, op

# ---------------------------------------------------------------------------------------------------------- dtype and copies


@op(policy=NOT_LISTED, stored=True)
class to:
    """x in another dtype. An ordinary op with an ordinary gradient: the gradient is cast back to the dtype of x."""

    def call(x, dtype):
        return (x,), {"target": np.dtype(dtype)}

    def forward(m, x, *, target):
        return m.cast(x, target)

    def vjp_x(m, g):
        return g


@op(policy=NOT_LISTED, moves=True)
class clone:
    """A copy of x in memory of its own."""

    def forward(m, x):
        return x.copy()

    def vjp_x(m, g):
        return g


# ---------------------------------------------------------------------------------------------------------------- arithmetic


@op(policy=NOT_LISTED, mixed="promote")
class add:
    """a + alpha * b."""

    def call(a, b, *, alpha=1):
        return (a, b if alpha == 1 else b * alpha), {}

    def forward(m, a, b):
        return a + b

    def vjp_a(m, g):
        return g

    def vjp_b(m, g):
        return g


@op(policy=NOT_LISTED, mixed="promote")
class sub:
    """a - alpha * b."""

    def call(a, b, *, alpha=1):
        return (a, b if alpha == 1 else b * alpha), {}

    def forward(m, a, b):
        return a - b

    def vjp_a(m, g):
        return g

    def vjp_b(m, g):
        return -g


@op(policy=NOT_LISTED, mixed="promote")
class mul:
    """a * b."""

    def forward(m, a, b):
        return a * b

    def vjp_a(m, g, b):
        return g * b

    def vjp_b(m, g, a):
        return g * a


@op(policy=NOT_LISTED, mixed="promote", ints="float")
class div:
    """a / b, true division (integers give float32)."""

    def forward(m, a, b):
        return a / b

    def vjp_a(m, g, b):
        return g / b

    def vjp_b(m, g, b, y):
        return -(g * y / b)


@op(policy=NOT_LISTED)
class neg:
    """-x."""

    def forward(m, x):
        return -x

    def vjp_x(m, g):
        return -g


@op(policy=FP32, mixed="promote")
class pow:
    """a ** b; float32 under autocast, since squares leave half's range at 256."""

    def forward(m, a, b):
        return a**b

    def vjp_a(m, g, a, b):
        # b * a**(b-1), but 0 where b == 0, also at a == 0 where the power would be inf
        if isinstance(b, int | float):
            return g * (b * a ** (b - 1)) if b else g * 0.0
        return m.where(b == 0, m.zeros_like(g * a), g * b * a ** (b - 1))

    def vjp_b(m, g, a, y):
        # y * log(a), but 0 where a == 0 and b >= 0 (there y is 0 or 1), as PyTorch
        if isinstance(a, int | float):
            return g * y * math.log(a) if a > 0 else g * 0.0
        return g * m.where((a == 0) * (y <= 1.0), m.zeros_like(y), y * m.log(a))


@op(policy=FP32)
class square:
    """x * x; float32 under autocast, as pow."""

    def forward(m, x):
        return x * x

    def vjp_x(m, g, x):
        return g * (2.0 * x)


@op(policy=NOT_LISTED)
class abs:
    """|x|; the gradient at 0 is 0."""

    def forward(m, x):
        return m.abs(x)

    def vjp_x(m, g, x):
        return g * m.sign(x)


@op(policy=NOT_LISTED)
class sign:
    """-1, 0 or 1; flat, so its gradient is 0."""

    def forward(m, x):
        return m.sign(x)

    def vjp_x(m, g):
        return g * 0.0


@op(policy=NOT_LISTED, mixed="promote")
class maximum:
    """The larger of a and b; equal values share the gradient."""

    def forward(m, a, b):
        return m.maximum(a, b)

    def vjp_a(m, g, a, b):
        return m.where(a > b, g, m.where(a == b, g * 0.5, m.zeros_like(g)))

    def vjp_b(m, g, a, b):
        return m.where(b > a, g, m.where(a == b, g * 0.5, m.zeros_like(g)))


@op(policy=NOT_LISTED, mixed="promote")
class minimum:
    """The smaller of a and b; equal values share the gradient."""

    def forward(m, a, b):
        return m.minimum(a, b)

    def vjp_a(m, g, a, b):
        return m.where(a < b, g, m.where(a == b, g * 0.5, m.zeros_like(g)))

    def vjp_b(m, g, a, b):
        return m.where(b < a, g, m.where(a == b, g * 0.5, m.zeros_like(g)))


@op(policy=NOT_LISTED, mixed="promote")
class where:
    """a where condition (bool) holds, b elsewhere."""

    def forward(m, condition, a, b):
        return m.where(condition, a, b)

    def vjp_a(m, g, condition):
        return m.where(condition, g, m.zeros_like(g))

    def vjp_b(m, g, condition):
        return m.where(condition, m.zeros_like(g), g)


@op(policy=NOT_LISTED)
class zeros_like:
    """Zeros in the shape and dtype of x."""

    def forward(m, x):
        return m.zeros_like(x)

    def vjp_x(m, g):
        return g * 0.0


# --------------------------------------------------------------------------------------------------- exponentials, logarithms


@op(policy=FP32, ints="float")
class exp:
    """e**x. In float16 it is inf from x = 11.09375 on (log 65504 = 11.0899)."""

    def forward(m, x):
        return m.exp(x)

    def vjp_x(m, g, y):
        return g * y


@op(policy=FP32, ints="float")
class log:
    """Natural logarithm; -inf at 0, nan below."""

    def forward(m, x):
        return m.log(x)

    def vjp_x(m, g, x):
        return g / x


@op(policy=FP32, ints="float")
class log1p:
    """log(1 + x), exact for small x."""

    def forward(m, x):
        return m.log1p(x)

    def vjp_x(m, g, x):
        return g / (1.0 + x)


@op(policy=NOT_LISTED, ints="float")
class sqrt:
    """Square root; nan below 0."""

    def forward(m, x):
        return m.sqrt(x)

    def vjp_x(m, g, y):
        return g / (2.0 * y)


# --------------------------------------------------------------------------------------------------------------- activations


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
    """max(x, 0); the gradient at 0 is 0."""

    def forward(m, x):
        return m.relu(x)

    def vjp_x(m, g, y):
        return g * (y > 0)


@op(policy=NOT_LISTED, ints="float")
class erf:
    """The error function, 2/sqrt(pi) times the integral of exp(-t*t) from 0 to x."""

    def forward(m, x):
        return m.erf(x)

    def vjp_x(m, g, x):
        return g * (m.exp(-(x * x)) * (2.0 / math.sqrt(math.pi)))


@op(policy=NOT_LISTED)
class gelu:
    """x times the normal distribution function at x (Hendrycks and Gimpel, 2016); approximate='tanh' for their formula."""

    def call(x, approximate="none"):
        if approximate not in ("none", "tanh"):
            raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
        return (x,), {"approximate": approximate}

    def forward(m, x, *, approximate):
        if approximate == "none":
            return 0.5 * x * (1.0 + m.erf(x * math.sqrt(0.5)))
        return 0.5 * x * (1.0 + m.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))

    def vjp_x(m, g, x, approximate):
        if approximate == "none":
            density = m.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
            return g * (0.5 * (1.0 + m.erf(x * math.sqrt(0.5))) + x * density)
        t = m.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))
        inner = math.sqrt(2 / math.pi) * (1.0 + 3 * 0.044715 * (x * x))
        return g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)


@op(policy=NOT_LISTED)
class silu:
    """x * sigmoid(x), also called swish; bounded derivative, so safe in half."""

    def forward(m, x):
        return x * m.sigmoid(x)

    def vjp_x(m, g, x):
        s = m.sigmoid(x)
        return g * (s * (1.0 + x * (1.0 - s)))


# --------------------------------------------------------------------------------------------------- comparisons: no gradient


@op(policy=NOT_LISTED, mixed="promote")
class eq:
    """a == b, bool."""

    def forward(m, a, b):
        return a == b


@op(policy=NOT_LISTED, mixed="promote")
class ne:
    """a != b, bool."""

    def forward(m, a, b):
        return a != b


@op(policy=NOT_LISTED, mixed="promote")
class lt:
    """a < b, bool."""

    def forward(m, a, b):
        return a < b


@op(policy=NOT_LISTED, mixed="promote")
class le:
    """a <= b, bool."""

    def forward(m, a, b):
        return a <= b


@op(policy=NOT_LISTED, mixed="promote")
class gt:
    """a > b, bool."""

    def forward(m, a, b):
        return a > b


@op(policy=NOT_LISTED, mixed="promote")
class ge:
    """a >= b, bool."""

    def forward(m, a, b):
        return a >= b


@op(policy=NOT_LISTED)
class isfinite:
    """Where x is neither inf nor nan, bool."""

    def forward(m, x):
        return m.isfinite(x)


@op(policy=NOT_LISTED)
class isnan:
    """Where x is nan, bool."""

    def forward(m, x):
        return m.isnan(x)
