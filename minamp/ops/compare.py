"""Comparisons, and the bools they give: no gradients here."""

from minamp.op import NOT_LISTED, op


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


# ------------------------------------------------------------------------------------------------------------- masks and bits


@op(policy=NOT_LISTED, mixed="promote")
class bitwise_and:
    """a & b of bools or integers."""

    def forward(m, a, b):
        return a & b


@op(policy=NOT_LISTED, mixed="promote")
class bitwise_or:
    """a | b of bools or integers."""

    def forward(m, a, b):
        return a | b


@op(policy=NOT_LISTED, mixed="promote")
class bitwise_xor:
    """a ^ b of bools or integers."""

    def forward(m, a, b):
        return a ^ b


@op(policy=NOT_LISTED)
class bitwise_not:
    """~x of bools or integers."""

    def forward(m, x):
        return ~x
