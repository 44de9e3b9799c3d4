"""Copies: in another dtype, on another device, or the same again. A cast is an op like any other, with a gradient."""

import numpy as np

from minamp import backends
from minamp.op import NOT_LISTED, op
from minamp.tensor import Tensor


@op(policy=NOT_LISTED, stored=True)
class to:
    """x in another dtype. An ordinary op with an ordinary gradient: the gradient is cast back to the dtype of x."""

    def call(x, dtype, factor=False):
        # factor: the copy of a weight that autocast keeps, which is multiplied and not looked at
        return (x,), {"target": np.dtype(dtype), "factor": factor}

    def forward(m, x, *, target, factor):
        return m.factor(x, target) if factor else m.cast(x, target)

    def vjp_x(m, g):
        return g


@op(policy=NOT_LISTED, moves=True)
class to_device:
    """x in the memory of another device, 'cpu' or 'cuda'; its gradient comes back."""

    def call(x, device):
        return (x,), {"target": backends.Device(device), "source": x.device}

    def forward(m, x, *, target, source):
        return backends.move(x, target)

    def vjp_x(m, g, source):
        return g.to(source) if isinstance(g, Tensor) else backends.move(g, source)


@op(policy=NOT_LISTED, moves=True)
class clone:
    """A copy of x in memory of its own."""

    def forward(m, x):
        return x.copy()

    def vjp_x(m, g):
        return g
