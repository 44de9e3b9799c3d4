"""Comparisons, and the bools they give: no gradients here."""

from minamp.op import NOT_LISTED, op
from minamp.promotion import is_float


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


@op(policy=NOT_LISTED)
class isinf:
    """Where x is inf or -inf, bool."""

    def forward(m, x):
        return m.isinf(x)


# ------------------------------------------------------------------------------------------------------- truth: 0 is False


@op(policy=NOT_LISTED, mixed="promote")
class logical_and:
    """Where a and b are both not 0, bool."""

    def forward(m, a, b):
        return m.logical_and(a, b)


@op(policy=NOT_LISTED, mixed="promote")
class logical_or:
    """Where a or b is not 0, bool."""

    def forward(m, a, b):
        return m.logical_or(a, b)


@op(policy=NOT_LISTED, mixed="promote")
class logical_xor:
    """Where one of a and b is not 0 and the other is, bool."""

    def forward(m, a, b):
        return m.logical_xor(a, b)


@op(policy=NOT_LISTED)
class logical_not:
    """Where x is 0, bool."""

    def forward(m, x):
        return m.logical_not(x)


# ------------------------------------------------------------------------------------------------------------- masks and bits


def _whole(name, *args):
    for a in args:
        if is_float(a):
            found = getattr(a, "dtype", "a float")
            raise RuntimeError(f"{name}: needs bools or integers, got {found}: compare first, as in x > 0")
    return args


@op(policy=NOT_LISTED, mixed="promote")
class bitwise_and:
    """a & b of bools or integers; RuntimeError for others."""

    def call(a, b):
        return _whole("bitwise_and", a, b), {}

    def forward(m, a, b):
        return a & b


@op(policy=NOT_LISTED, mixed="promote")
class bitwise_or:
    """a | b of bools or integers; RuntimeError for others."""

    def call(a, b):
        return _whole("bitwise_or", a, b), {}

    def forward(m, a, b):
        return a | b


@op(policy=NOT_LISTED, mixed="promote")
class bitwise_xor:
    """a ^ b of bools or integers; RuntimeError for others."""

    def call(a, b):
        return _whole("bitwise_xor", a, b), {}

    def forward(m, a, b):
        return a ^ b


@op(policy=NOT_LISTED)
class bitwise_not:
    """~x of bools or integers; RuntimeError for others."""

    def call(x):
        return _whole("bitwise_not", x), {}

    def forward(m, x):
        return ~x
