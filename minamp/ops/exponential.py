"""Powers, roots, exponentials and logarithms: elementwise, and mostly float32 under autocast."""

import math

import numpy as np

from minamp import backends
from minamp.op import FP32, NOT_LISTED, op
from minamp.promotion import is_float


@op(policy=FP32, mixed="promote")
class pow:
    """input ** exponent; float32 under autocast, since squares leave half's range at 256."""

    def forward(m, a, exponent):
        if not (is_float(a) or is_float(exponent)):
            seen = backends.checkable(exponent)
            if seen is not None and np.any(np.less(seen, 0)):
                found = f"{getattr(a, 'dtype', 'int')} to the power {np.min(seen)}"
                raise RuntimeError(f"pow: {found} is no whole number: use x.float()")
        if type(exponent) is int and a.dtype.kind == "b":
            a = a.astype(np.int64)  # NumPy would count in int8
        if isinstance(exponent, int | float) and exponent == 3:
            return a * a * a  # as PyTorch; NumPy's power takes 47 ms per million where a is negative
        return a**exponent

    def vjp_a(m, g, a, exponent):
        # exponent * a**(exponent - 1), but 0 where it is 0, also at a == 0 where the power would be inf
        if isinstance(exponent, int | float):
            return g * (exponent * a ** (exponent - 1)) if exponent else m.zeros_like(g)
        return m.where(exponent == 0, m.zeros_like(g * a), g * exponent * a ** (exponent - 1))

    def vjp_exponent(m, g, a, exponent, y):
        # y * log(a), but 0 where a == 0 and exponent >= 0, as PyTorch; the log of a small integer would be half
        log = m.log(m.ones_like(y) * a)
        return g * m.where((exponent >= 0) * (a == 0), m.zeros_like(y), y * log)


@op(policy=FP32)
class square:
    """x * x; float32 under autocast, as pow."""

    def forward(m, x):
        return x * x if x.dtype.kind != "b" else x.astype(np.int64)

    def vjp_x(m, g, x):
        return g * (2.0 * x)


@op(policy=FP32, ints="float")
class reciprocal:
    """1 / x; float32 under autocast, since in half it is inf below 1.53e-5. `2 / x` is 2 * reciprocal(x), as in PyTorch."""

    def forward(m, x):
        return 1.0 / x

    def vjp_x(m, g, y):
        return -(g * y * y)


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
class log2:
    """Logarithm to base 2; -inf at 0, nan below."""

    def forward(m, x):
        return m.log2(x)

    def vjp_x(m, g, x):
        return g / x * (1 / math.log(2))


@op(policy=FP32, ints="float")
class log10:
    """Logarithm to base 10; -inf at 0, nan below."""

    def forward(m, x):
        return m.log10(x)

    def vjp_x(m, g, x):
        return g / (x * math.log(10))  # g / x may be inf though a 2.3rd of it is not


@op(policy=FP32, ints="float")
class log1p:
    """log(1 + x), exact for small x."""

    def forward(m, x):
        return m.log1p(x)

    def vjp_x(m, g, x):
        return g / (1.0 + x)


@op(policy=FP32, ints="float")
class expm1:
    """e**x - 1, exact for small x."""

    def forward(m, x):
        return m.expm1(x)

    def vjp_x(m, g, x):
        return g * m.exp(x)  # y + 1 would be 0 where y has been rounded to -1: below -8.3 in float16


@op(policy=NOT_LISTED, ints="float")
class sqrt:
    """Square root; nan below 0."""

    def forward(m, x):
        return m.sqrt(x)

    def vjp_x(m, g, y):
        return g / (2.0 * y)


@op(policy=FP32, ints="float")
class rsqrt:
    """1 / sqrt(x); inf at 0, nan below. float32 under autocast."""

    def forward(m, x):
        return 1.0 / m.sqrt(x)

    def vjp_x(m, g, y):
        return g * (-0.5 * y * y * y)
