"""Numbers: which values a format flushes, keeps or overflows, and how they spread over the powers of two."""

from dataclasses import dataclass

import numpy as np

from minamp import backends
from minamp.formats import cast, float32, float64, format_of, is_floating, widen
from minamp.record import is_leaf, observe
from minamp.tensor import Tensor


def as_array(x):
    """Tensor, array (of a GPU, too) or number as a NumPy array on the CPU; half as float32, which holds the same values."""
    x = backends.host(x._data if isinstance(x, Tensor) else backends.array(x))
    return widen(x) if is_floating(x.dtype) else x


@dataclass(frozen=True)
class TensorStats:
    """Shares of all values, each between 0 and 1, and the range of the finite non-zero ones."""

    dtype: np.dtype  # the format the values were judged by
    size: int
    zeros: float  # 0 already before the cast
    flushed: float  # not 0 before the cast, 0 after it
    subnormal: float  # kept, but below the smallest normal number, so with fewer digits
    inf: float  # after the cast: overflow counts
    nan: float
    max_abs: float  # before the cast; 0.0 if there is no finite non-zero value
    min_abs: float

    @property
    def flushed_of_nonzero(self):
        """flushed as a share of the non-zero values: zeros are often ReLU's and say nothing about the format."""
        return self.flushed / (1.0 - self.zeros) if self.zeros < 1.0 else 0.0


def tensor_stats(x, dtype=None):
    """What a cast of x to `dtype` does to its values, as TensorStats.

    x: Tensor or floating array of any shape; dtype: default its own. TypeError for a dtype that is no floating format.
    """
    f = format_of((x if isinstance(x, Tensor) else backends.array(x)).dtype if dtype is None else dtype)
    x = as_array(x)
    y = np.abs(cast(cast(x, f.dtype), float64))
    a = np.abs(x)
    kept = a[np.isfinite(a) & (a > 0)]

    def share(mask):
        return float(np.count_nonzero(mask) / x.size) if x.size else 0.0

    return TensorStats(
        f.dtype,
        x.size,
        zeros=share(x == 0),
        flushed=share((x != 0) & (y == 0)),
        subnormal=share((y > 0) & (y < f.smallest_normal)),
        inf=share(np.isinf(y)),
        nan=share(np.isnan(y)),
        max_abs=float(kept.max(initial=0.0)),
        min_abs=float(kept.min()) if kept.size else 0.0,
    )


@dataclass
class Histogram:
    """How many values have which power of two: counts[k] are those with 2^(low+k) <= |x| < 2^(low+k+1). Histograms add up."""

    low: int
    counts: np.ndarray
    zeros: int = 0
    nonfinite: int = 0
    below: int = 0  # not 0, but under 2^low
    above: int = 0  # finite, from 2^high on

    @property
    def exponents(self):
        return np.arange(self.low, self.low + len(self.counts))

    @property
    def total(self):
        return int(self.counts.sum()) + self.zeros + self.nonfinite + self.below + self.above

    def __add__(self, other):
        if (self.low, len(self.counts)) != (other.low, len(other.counts)):
            raise ValueError(
                "histograms of different ranges can't be added: make both with the same low and high"
            )
        return Histogram(
            self.low,
            self.counts + other.counts,
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.below + other.below,
            self.above + other.above,
        )


def exponent_histogram(x, low=-40, high=16):
    """Counts of x's values by floor(log2 |x|), for exponents low <= e < high; zeros and non-finite values apart.

    x: Tensor or array. The defaults span float16 (2^-24 to just under 2^16) and what falls off below it.
    """
    x = as_array(x).ravel()
    if x.dtype not in (float32, float64):
        x = x.astype(float64)
    finite = x[np.isfinite(x)]
    # exact, unlike floor(log2): the mantissa of frexp lies in [0.5, 1)
    e = np.frexp(finite[finite != 0])[1] - 1
    inside = e[(e >= low) & (e < high)]
    return Histogram(
        low,
        np.bincount(inside - low, minlength=high - low),
        zeros=int(np.count_nonzero(finite == 0)),
        nonfinite=x.size - finite.size,
        below=int(np.count_nonzero(e < low)),
        above=int(np.count_nonzero(e >= high)),
    )


class gradient_histograms(observe):
    """Context manager: histograms of all gradients that a backward inside makes, as `activations` and `weights`.

    Weights are the leaves with requires_grad, each counted once; everything else is an activation (casts are not counted
    again). low, high: the exponents shown, as in exponent_histogram.
    """

    def __init__(self, low=-40, high=16):
        self.low, self.high = low, high
        self.activations = self.weights = exponent_histogram(np.zeros(0), low, high)

    def see(self, phase, op, inputs, output):
        if phase != "backward":
            return
        _, node, i = inputs
        edge = node.edges[i]
        if is_leaf(edge):
            self.weights = self.weights + exponent_histogram(output, self.low, self.high)
        elif not op.is_cast and not (edge.op.is_cast and is_leaf(edge.edges[0])):
            self.activations = self.activations + exponent_histogram(output, self.low, self.high)
