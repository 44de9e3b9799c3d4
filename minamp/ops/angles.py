"""Trigonometric and hyperbolic functions and their inverses, elementwise; the steep ones are float32 under autocast."""

from minamp.op import FP32, NOT_LISTED, PROMOTE, op


@op(policy=NOT_LISTED, ints="float")
class sin:
    """Sine, x in radians. Half values near 65504 are 32 apart: five turns."""

    def forward(m, x):
        return m.sin(x)

    def vjp_x(m, g, x):
        return g * m.cos(x)


@op(policy=NOT_LISTED, ints="float")
class cos:
    """Cosine, x in radians."""

    def forward(m, x):
        return m.cos(x)

    def vjp_x(m, g, x):
        return -(g * m.sin(x))


@op(policy=FP32, ints="float")
class tan:
    """Tangent, x in radians. The float16 nearest to pi / 2 is 4.8e-4 away from it, so none is larger than 2066."""

    def forward(m, x):
        return m.tan(x)

    def vjp_x(m, g, y):
        return g * (1.0 + y * y)


@op(policy=FP32, ints="float")
class asin:
    """The angle in [-pi/2, pi/2] whose sine is x; nan beyond 1 and -1, where the gradient is inf."""

    def forward(m, x):
        return m.asin(x)

    def vjp_x(m, g, x):
        return g / m.sqrt((1.0 - x) * (1.0 + x))


@op(policy=FP32, ints="float")
class acos:
    """The angle in [0, pi] whose cosine is x; nan beyond 1 and -1, where the gradient is -inf."""

    def forward(m, x):
        return m.acos(x)

    def vjp_x(m, g, x):
        return -(g / m.sqrt((1.0 - x) * (1.0 + x)))


@op(policy=NOT_LISTED, ints="float")
class atan:
    """The angle in [-pi/2, pi/2] whose tangent is x."""

    def forward(m, x):
        return m.atan(x)

    def vjp_x(m, g, x):
        return g / (1.0 + x * x)


@op(policy=PROMOTE, mixed="promote", ints="float")
class atan2:
    """The angle in [-pi, pi] of the point (other, input). The gradient at the origin is 0, as in PyTorch."""

    def forward(m, input, other):
        return m.atan2(input, other)

    def shared_per_length(m, g, input, other):
        square = input * input + other * other
        return m.where(square == 0, m.zeros_like(square), g / square)

    def vjp_input(m, g, other, per_length):
        return per_length * other

    def vjp_other(m, g, input, per_length):
        return -(per_length * input)


@op(policy=FP32, ints="float")
class sinh:
    """Hyperbolic sine, (e**x - e**-x) / 2."""

    def forward(m, x):
        return m.sinh(x)

    def vjp_x(m, g, x):
        return g * m.cosh(x)


@op(policy=FP32, ints="float")
class cosh:
    """Hyperbolic cosine, (e**x + e**-x) / 2."""

    def forward(m, x):
        return m.cosh(x)

    def vjp_x(m, g, x):
        return g * m.sinh(x)
