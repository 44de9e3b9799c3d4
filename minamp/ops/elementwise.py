"""Elementwise ops: a table of derivatives."""

import math

from minamp.arguments import check_floating, no_tensor, number
from minamp.formats import format_of, is_floating
from minamp.numbers import check_fits
from minamp.op import NOT_LISTED, PROMOTE, op
from minamp.ops.indexing import nonzero
from minamp.promotion import is_float
from minamp.tensor import Tensor

# ---------------------------------------------------------------------------------------------------------------- arithmetic


def _no_slope(m, g):
    """The gradient of what is flat, or constant, almost everywhere."""
    return m.zeros_like(g)


def _alpha(name, alpha, *args):
    """alpha as a number. RuntimeError for a float where everything else is an integer: the sum would lose what it adds."""
    alpha = number(alpha)
    if isinstance(alpha, float) and not any(map(is_float, args)):
        raise RuntimeError(f"{name}: alpha is {alpha}, but the tensors hold integers: use x.float()")
    return alpha


@op(policy=NOT_LISTED, mixed="promote")
class add:
    """a + alpha * b, rounded once. RuntimeError for a float alpha with integers only."""

    def call(a, b, *, alpha=1):
        if type(alpha) is not int or alpha != 1:
            alpha = _alpha("add", alpha, a, b)
        return (a, b), {"alpha": alpha}

    def forward(m, a, b, *, alpha):
        return a + b if alpha == 1 else a + b * alpha

    def vjp_a(m, g):
        return g

    def vjp_b(m, g, alpha):
        return g if alpha == 1 else g * alpha


@op(policy=NOT_LISTED, mixed="promote")
class sub:
    """a - alpha * b, rounded once. RuntimeError for bools, and for a float alpha with integers only."""

    def call(a, b, *, alpha=1):
        for x in (a, b):
            if x is True or x is False or isinstance(x, Tensor) and x._data.dtype.kind == "b":
                raise RuntimeError("sub: bools can't be subtracted: use ~mask to invert one, or mask.float()")
        if type(alpha) is not int or alpha != 1:
            alpha = _alpha("sub", alpha, a, b)
        return (a, b), {"alpha": alpha}

    def forward(m, a, b, *, alpha):
        return a - b if alpha == 1 else a - b * alpha

    def vjp_a(m, g):
        return g

    def vjp_b(m, g, alpha):
        return -g if alpha == 1 else g * -alpha


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
    """a / b, true division (integers give float32); rounding_mode="floor" or "trunc": the whole number below it, or towards 0."""

    def call(a, b, *, rounding_mode=None):
        if rounding_mode is None:
            return (a, b), {}
        if rounding_mode == "floor":
            return floor_divide(a, b), None
        if rounding_mode != "trunc":
            raise RuntimeError(f"div: rounding_mode must be None, 'floor' or 'trunc', got {rounding_mode!r}")
        return trunc_divide(a, b), None

    def forward(m, a, b):
        return a / b

    def vjp_a(m, g, b):
        return g / b

    def vjp_b(m, g, b, y):
        return -(g * y / b)


@op(policy=PROMOTE, mixed="promote")
class addcmul:
    """input + value * tensor1 * tensor2, rounded once. Shapes broadcast."""

    def call(input, tensor1, tensor2, *, value=1):
        return (input, tensor1, tensor2), {"value": number(value)}

    def forward(m, input, tensor1, tensor2, *, value):
        return input + value * (tensor1 * tensor2)

    def vjp_input(m, g):
        return g

    def vjp_tensor1(m, g, tensor2, value):
        return g * (tensor2 * value)

    def vjp_tensor2(m, g, tensor1, value):
        return g * (tensor1 * value)


@op(policy=PROMOTE, mixed="promote")
class addcdiv:
    """input + value * tensor1 / tensor2, rounded once. Shapes broadcast; RuntimeError for integers only."""

    def call(input, tensor1, tensor2, *, value=1):
        if tensor1.dtype.kind in "iub" and tensor2.dtype.kind in "iub":
            raise RuntimeError(
                f"addcdiv: {tensor1.dtype} / {tensor2.dtype} has no quotient in its own dtype: use tensor1.float()"
            )
        return (input, tensor1, tensor2), {"value": number(value)}

    def forward(m, input, tensor1, tensor2, *, value):
        return input + value * (tensor1 / tensor2)

    def vjp_input(m, g):
        return g

    def vjp_tensor1(m, g, tensor2, value):
        return g * value / tensor2

    def vjp_tensor2(m, g, tensor1, tensor2, value):
        return -(g * value * (tensor1 / tensor2) / tensor2)  # two quotients: tensor2's square could overflow


@op(policy=NOT_LISTED)
class lerp:
    """input + weight * (end - input), from the nearer end as in PyTorch: a weight of 1 gives `end` itself. All of one dtype."""

    def call(input, end, weight):
        check_floating("lerp", input)
        return (input, end, weight), {}

    def forward(m, input, end, weight):
        way = end - input
        if isinstance(weight, int | float):
            return input + weight * way if -0.5 < weight < 0.5 else end - (1.0 - weight) * way
        return m.where(m.abs(weight) < 0.5, input + weight * way, end - (1.0 - weight) * way)

    def vjp_input(m, g, weight):
        return g * (1.0 - weight)

    def vjp_end(m, g, weight):
        return g * weight

    def vjp_weight(m, g, input, end):
        return g * (end - input)


@op(policy=NOT_LISTED)
class neg:
    """-x. RuntimeError for bools."""

    def call(x):
        if x._data.dtype.kind == "b":
            raise RuntimeError("neg: bools have no minus: use ~mask to invert one, or mask.float()")
        return (x,), {}

    def forward(m, x):
        return -x

    def vjp_x(m, g):
        return -g


@op(policy=NOT_LISTED)
class abs:
    """|x|; the gradient at 0 is 0."""

    def forward(m, x):
        return m.abs(x)

    def vjp_x(m, g, x):
        return g * m.sign(x)


@op(policy=NOT_LISTED)
class sign:
    """-1, 0 or 1, and 0 for nan; flat, so its gradient is 0."""

    def forward(m, x):
        return x.copy() if x.dtype.kind == "b" else m.sign(x)  # NumPy has no sign of bools

    vjp_x = _no_slope


@op(policy=NOT_LISTED, mixed="promote")
class maximum:
    """The larger of a and b; equal values share the gradient, and beside nan both get it whole, as in PyTorch."""

    def forward(m, a, b):
        return m.maximum(a, b)

    def vjp_a(m, g, a, b):
        return m.where(a < b, m.zeros_like(g), m.where(a == b, g * 0.5, g))

    def vjp_b(m, g, a, b):
        return m.where(b < a, m.zeros_like(g), m.where(a == b, g * 0.5, g))


@op(policy=NOT_LISTED, mixed="promote")
class minimum:
    """The smaller of a and b; equal values share the gradient, and beside nan both get it whole, as in PyTorch."""

    def forward(m, a, b):
        return m.minimum(a, b)

    def vjp_a(m, g, a, b):
        return m.where(a > b, m.zeros_like(g), m.where(a == b, g * 0.5, g))

    def vjp_b(m, g, a, b):
        return m.where(b > a, m.zeros_like(g), m.where(a == b, g * 0.5, g))


@op(policy=NOT_LISTED, mixed="promote")
class clamp:
    """x between min and max (numbers, or tensors that broadcast); max wins where they cross. RuntimeError without both.

    The gradient passes where min <= x <= max, as in PyTorch, and elsewhere reaches the bound that was taken.
    """

    def call(input, min=None, max=None):
        if min is None and max is None:
            raise RuntimeError("clamp: at least one of min and max must be given")
        return (input, min, max), {}

    def forward(m, x, min, max):
        return m.clamp(x, min, max)

    def vjp_x(m, g, x, min, max):
        if min is not None:
            g = m.where(x >= min, g, m.zeros_like(g))
        return g if max is None else m.where(x <= max, g, m.zeros_like(g))

    def vjp_min(m, g, x, min, max):
        g = m.where(x < min, g, m.zeros_like(g))
        return g if max is None else m.where(min < max, g, m.zeros_like(g))

    def vjp_max(m, g, x, min, max):
        taken = x > max if min is None else (x > max) + (max < min)
        return m.where(taken, g, m.zeros_like(g))


@op(policy=NOT_LISTED)
class nan_to_num:
    """x with `nan` (0.0) for nan and posinf, neginf (the largest and smallest value of x's format) for inf; gradient 0 there."""

    def call(input, nan=None, posinf=None, neginf=None):
        top = format_of(input.dtype).max if is_floating(input.dtype) else 0.0
        return (input,), {
            "nan": 0.0 if nan is None else float(nan),
            "posinf": top if posinf is None else float(posinf),
            "neginf": -top if neginf is None else float(neginf),
        }

    def forward(m, x, *, nan, posinf, neginf):
        if x.dtype.kind in "iub":
            return x
        x = m.where(m.isnan(x), m.full(x.shape, nan, x.dtype), x)
        x = m.where(x == math.inf, m.full(x.shape, posinf, x.dtype), x)
        return m.where(x == -math.inf, m.full(x.shape, neginf, x.dtype), x)

    def vjp_x(m, g, x):
        return m.where(m.isfinite(x), g, m.zeros_like(g))


@op(policy=NOT_LISTED, mixed="promote")
class remainder:
    """a % b, with the sign of b as in Python. RuntimeError for integers over a 0, on the CPU."""

    def forward(m, a, b):
        return m.remainder(a, b)

    def vjp_a(m, g):
        return g

    def vjp_b(m, g, a, b):
        return -g * m.floor(a / b)


@op(policy=NOT_LISTED, mixed="promote")
class where:
    """input where condition holds, other elsewhere; alone, where(condition) says where: nonzero(condition, as_tuple=True).

    RuntimeError for a condition that is not bool.
    """

    def call(condition, input=None, other=None):
        if input is None is other:
            return nonzero(condition, as_tuple=True), None
        for name, x in (("condition", condition), ("input", input), ("other", other)):
            if not isinstance(x, Tensor) and (name == "condition" or x is None):
                raise no_tensor("where", name, x)
        if condition._data.dtype.kind != "b":
            raise RuntimeError(
                f"where: condition must be bool, got {condition.dtype}: compare first, as in x > 0"
            )
        for x, y in ((input, other), (other, input)):
            if isinstance(x, int) and isinstance(y, Tensor) and not is_float(y):
                check_fits("where", x, y.dtype)
        return (condition, input, other), {}

    def forward(m, condition, input, other):
        return m.where(condition, input, other)

    def vjp_input(m, g, condition):
        return m.where(condition, g, m.zeros_like(g))

    def vjp_other(m, g, condition):
        return m.where(condition, m.zeros_like(g), g)


@op(policy=NOT_LISTED)
class zeros_like:
    """Zeros in the shape and dtype of x."""

    def forward(m, x):
        return m.zeros_like(x)

    vjp_x = _no_slope


@op(policy=NOT_LISTED)
class ones_like:
    """Ones in the shape and dtype of x."""

    def forward(m, x):
        return m.ones_like(x)

    vjp_x = _no_slope


# ------------------------------------------------------------------------------------------------- steps: their gradient is 0


@op(policy=NOT_LISTED, mixed="promote")
class floor_divide:
    """a // b, the largest whole number not above a / b; flat, so its gradient is 0. RuntimeError for integers over a 0."""

    def forward(m, a, b):
        return m.floor_divide(a, b)

    vjp_a = vjp_b = _no_slope


@op(policy=NOT_LISTED, mixed="promote")
class trunc_divide:
    """a / b without what stands behind the point; flat, so its gradient is 0. RuntimeError for integers over a 0."""

    def forward(m, a, b):
        if is_float(a) or is_float(b):
            return m.trunc(a / b)
        y = m.floor_divide(a, b)  # exact where a / b is rounded
        return y + ((y * b != a) & ((a < 0) != (b < 0)))

    vjp_a = vjp_b = _no_slope


@op(policy=NOT_LISTED)
class round:
    """The nearest whole number, halves to even; flat, so its gradient is 0."""

    def forward(m, x):
        return m.round(x)

    vjp_x = _no_slope


@op(policy=NOT_LISTED)
class floor:
    """The largest whole number not above x; flat, so its gradient is 0."""

    def forward(m, x):
        return m.floor(x)

    vjp_x = _no_slope


@op(policy=NOT_LISTED)
class ceil:
    """The smallest whole number not below x; flat, so its gradient is 0."""

    def forward(m, x):
        return m.ceil(x)

    vjp_x = _no_slope


@op(policy=NOT_LISTED)
class trunc:
    """x without what stands behind the point; flat, so its gradient is 0."""

    def forward(m, x):
        return m.trunc(x)

    vjp_x = _no_slope
