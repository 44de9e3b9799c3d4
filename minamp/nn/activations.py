"""Activations as layers: the functions of minamp.nn.functional with their options."""

from minamp.nn import functional as F
from minamp.nn.module import Module


class _InPlace(Module):
    """inplace is accepted as in torch, and x is left alone all the same."""

    def __init__(self, inplace=False):
        super().__init__()


class ReLU(_InPlace):
    """max(x, 0)."""

    def forward(self, x):
        return F.relu(x)


class GELU(Module):
    """x times the normal distribution function at x; approximate: 'none' or 'tanh'."""

    def __init__(self, approximate="none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, x):
        return F.gelu(x, approximate=self.approximate)

    def extra_repr(self):
        return f"approximate={self.approximate!r}"


class SiLU(_InPlace):
    """x * sigmoid(x)."""

    def forward(self, x):
        return F.silu(x)


class LeakyReLU(Module):
    """x where positive, negative_slope * x elsewhere."""

    def __init__(self, negative_slope=0.01, inplace=False):
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x):
        return F.leaky_relu(x, self.negative_slope)

    def extra_repr(self):
        return f"negative_slope={self.negative_slope}"


class ELU(Module):
    """x where positive, alpha * (e**x - 1) elsewhere."""

    def __init__(self, alpha=1.0, inplace=False):
        super().__init__()
        self.alpha = alpha

    def forward(self, x):
        return F.elu(x, self.alpha)

    def extra_repr(self):
        return f"alpha={self.alpha}"


class Softplus(Module):
    """log(1 + e**(beta x)) / beta, x itself where beta x > threshold."""

    def __init__(self, beta=1.0, threshold=20.0):
        super().__init__()
        self.beta, self.threshold = beta, threshold

    def forward(self, x):
        return F.softplus(x, self.beta, self.threshold)

    def extra_repr(self):
        return f"beta={self.beta}, threshold={self.threshold}"


class LogSigmoid(Module):
    """log(sigmoid(x))."""

    def forward(self, x):
        return F.logsigmoid(x)


class Sigmoid(Module):
    """1 / (1 + e**-x)."""

    def forward(self, x):
        return F.sigmoid(x)


class Tanh(Module):
    """Hyperbolic tangent."""

    def forward(self, x):
        return F.tanh(x)


class Softmax(Module):
    """e**x / sum of e**x along `dim`."""

    def __init__(self, dim=None):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return F.softmax(x, dim=self.dim)

    def extra_repr(self):
        return f"dim={self.dim}"


class LogSoftmax(Softmax):
    """log of the softmax along `dim`, without its overflow."""

    def forward(self, x):
        return F.log_softmax(x, dim=self.dim)


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
