"""Activations as layers: the functions of minamp.nn.functional with their options."""

from minamp.nn import functional as F
from minamp.nn.module import Module


class _InPlace(Module):
    """inplace is accepted as in torch, and x is left alone all the same."""

    def __init__(self, inplace=False):
        super().__init__()


class ReLU6(_InPlace):
    """x between 0 and 6."""

    def forward(self, x):
        return F.relu6(x)


class Hardsigmoid(_InPlace):
    """x / 6 + 1 / 2 between 0 and 1."""

    def forward(self, x):
        return F.hardsigmoid(x)


class Hardswish(_InPlace):
    """x * hardsigmoid(x)."""

    def forward(self, x):
        return F.hardswish(x)


class Mish(_InPlace):
    """x * tanh(softplus(x))."""

    def forward(self, x):
        return F.mish(x)


class SELU(_InPlace):
    """The scaled elu that keeps variance 1."""

    def forward(self, x):
        return F.selu(x)


class Hardtanh(Module):
    """x between min_val and max_val."""

    def __init__(self, min_val=-1.0, max_val=1.0, inplace=False):
        super().__init__()
        self.min_val, self.max_val = min_val, max_val

    def forward(self, x):
        return F.hardtanh(x, self.min_val, self.max_val)

    def extra_repr(self):
        return f"min_val={self.min_val}, max_val={self.max_val}"


class GLU(Module):
    """The first half of dimension `dim` times the sigmoid of the second."""

    def __init__(self, dim=-1):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return F.glu(x, self.dim)

    def extra_repr(self):
        return f"dim={self.dim}"
