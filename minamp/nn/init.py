"""Initial values, written into a tensor in place."""

import math

import numpy as np

from minamp.draw import normal
from minamp.formats import float64
from minamp.record import no_grad
from minamp.tensor import Tensor


def _checked(tensor):
    if not isinstance(tensor, Tensor):
        raise TypeError(f"nn.init: needs a Tensor, got {type(tensor).__name__}: give the parameter itself")
    return tensor


@no_grad()
def uniform_(tensor, a=0.0, b=1.0):
    """Uniform values in [a, b)."""
    return _checked(tensor).uniform_(a, b)


@no_grad()
def normal_(tensor, mean=0.0, std=1.0):
    """Normal values."""
    return _checked(tensor).normal_(mean, std)


@no_grad()
def constant_(tensor, val):
    """`val` everywhere."""
    return _checked(tensor).fill_(val)


def zeros_(tensor):
    """Zeros."""
    return constant_(tensor, 0.0)


def ones_(tensor):
    """Ones."""
    return constant_(tensor, 1.0)


def trunc_normal_(tensor, mean=0.0, std=1.0, a=-2.0, b=2.0):
    """Normal values, those outside [a, b] drawn anew. ValueError where those are more than 999 of 1000."""
    low, high = ((limit - mean) / (std * math.sqrt(2)) for limit in (a, b))
    if not math.erf(high) - math.erf(low) > 2e-3:
        raise ValueError(
            f"trunc_normal_: hardly a value of mean {mean} and std {std} lies in [{a}, {b}]: give wider limits"
        )
    values = normal("trunc_normal_", _checked(tensor).shape, tensor.dtype) * std + mean
    while (outside := (values < a) | (values > b)).any():
        values[outside] = normal("trunc_normal_", int(outside.sum()), tensor.dtype) * std + mean
    return _write(tensor, values)


def orthogonal_(tensor, gain=1.0):
    """Rows (or columns, where there are more rows) at right angles, of length gain (Saxe et al., 2014).

    Further dimensions count as columns. ValueError for less than two dimensions.
    """
    if _checked(tensor).ndim < 2:
        raise ValueError(f"orthogonal_: needs at least 2 dimensions, this tensor has shape {tensor.shape}")
    rows, columns = tensor.shape[0], math.prod(tensor.shape[1:])
    q, r = np.linalg.qr(normal("orthogonal_", (max(rows, columns), min(rows, columns)), float64))
    q = q * np.sign(np.diagonal(r))  # or q would not be uniform among all rotations
    return _write(tensor, gain * (q if rows >= columns else q.T).reshape(tensor.shape))


@no_grad()
def _write(tensor, values):
    return tensor.copy_(Tensor(values))


def calculate_gain(nonlinearity, param=None):
    """The factor that keeps the variance through `nonlinearity`; param: leaky_relu's slope (0.01)."""
    gains = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2), "selu": 3 / 4}
    gains |= {f"conv{kind}{dims}d": 1.0 for kind in ("", "_transpose") for dims in (1, 2, 3)}
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in gains:
        raise ValueError(
            f"calculate_gain: unknown nonlinearity {nonlinearity!r}: use one of {[*gains, 'leaky_relu']}"
        )
    return gains[nonlinearity]


def fans(tensor):
    """(fan_in, fan_out) of a weight (out, in, *kernel): values meeting in an output, leaving an input."""
    if tensor.ndim < 2:
        raise ValueError(
            f"fan in and fan out need a weight of at least 2 dimensions, this one has shape {tensor.shape}"
        )
    kernel = math.prod(tensor.shape[2:])
    return tensor.shape[1] * kernel, tensor.shape[0] * kernel


def xavier_uniform_(tensor, gain=1.0):
    """Uniform, variance gain^2 * 2/(fan_in + fan_out) (Glorot and Bengio, 2010)."""
    bound = gain * math.sqrt(6 / sum(fans(tensor)))
    return uniform_(tensor, -bound, bound)


def xavier_normal_(tensor, gain=1.0):
    """Normal, variance gain^2 * 2/(fan_in + fan_out) (Glorot and Bengio, 2010)."""
    return normal_(tensor, 0.0, gain * math.sqrt(2 / sum(fans(tensor))))


def _kaiming_std(tensor, a, mode, nonlinearity):
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"kaiming: mode must be 'fan_in' or 'fan_out', got {mode!r}")
    fan = fans(tensor)[mode == "fan_out"]
    return calculate_gain(nonlinearity, a) / math.sqrt(max(fan, 1))  # 0 for an empty tensor


def kaiming_uniform_(tensor, a=0, mode="fan_in", nonlinearity="leaky_relu"):
    """Uniform, variance gain^2/fan (He et al., 2015); a: the negative slope of leaky_relu."""
    bound = math.sqrt(3) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound)


def kaiming_normal_(tensor, a=0, mode="fan_in", nonlinearity="leaky_relu"):
    """Normal, variance gain^2/fan (He et al., 2015); a: the negative slope of leaky_relu."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity))
