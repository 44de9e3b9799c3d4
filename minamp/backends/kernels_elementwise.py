"""CUDA kernels that take one element to one element: a single pass over memory where array functions would make many.

Of array functions sigmoid takes 7 and erf 21, each of which reads and writes everything. Arrays may lie in any order, channels
last as a convolution leaves them: the result lies as the first argument does.
"""

from minamp.backends import kernels
from minamp.backends.device import xp
from minamp.backends.kernels import C_TYPES, KINDS, SOURCES, ints
from minamp.formats import float32, float64

# exp's argument is never positive, so nothing overflows and small results keep their digits
SIGMOID = r"""
template <class T> __device__ void sigmoid(T* y, const T* x, i64 n) {
  EACH(i, n) {
    T e = exp(-fabs(x[i]));
    y[i] = (x[i] >= 0 ? 1 : e) / (1 + e);
  }
}
#define SIGMOID(T) extern "C" __global__ void sigmoid_##T(T##_t* y, const T##_t* x, i64 n) { sigmoid(y, x, n); }
"""
# CUDA's own, to two units in the last place; NumPy has none, so the CPU computes erf.py's
ERF = r"""
template <class T> __device__ void error_function(T* y, const T* x, i64 n) {
  EACH(i, n) y[i] = erf(x[i]);
}
#define ERF(T) extern "C" __global__ void erf_##T(T##_t* y, const T##_t* x, i64 n) { error_function(y, x, n); }
"""
# g is copied or not, so all that matters of it is its size
RELU_GRAD = r"""
typedef unsigned short u16;
typedef unsigned long long u64;
template <class T, class S, class W> __device__ void relu_grad(W* out, const T* y, const W* g, i64 n) {
  EACH(i, n) out[i] = (S)y[i] <= 0 ? W(0) : g[i];
}
#define RELU_GRAD(T, bits) extern "C" __global__ void relu_grad_##T##_##bits(u##bits* out, const T##_t* y, \
    const u##bits* g, i64 n) { \
  relu_grad<T##_t, Sum<T##_t>::type>(out, y, g, n); }
"""

SOURCES.update({"sigmoid": SIGMOID, "erf": ERF, "relu_grad": RELU_GRAD})
KINDS.update(dict.fromkeys(("sigmoid", "erf"), (C_TYPES[float32], C_TYPES[float64])))
KINDS["relu_grad"] = tuple(f"{t}_{bits}" for t in C_TYPES.values() for bits in (16, 32, 64))


def sigmoid(x):
    """1 / (1 + e**-x) of a float32 or float64 array."""
    return _mapped("sigmoid", C_TYPES[x.dtype], xp.empty_like(x), x)


def erf(x):
    """The error function of a float32 or float64 array."""
    return _mapped("erf", C_TYPES[x.dtype], xp.empty_like(x), x)


def relu_grad(g, y):
    """g, but 0 where y <= 0: also where g is inf."""
    return _mapped("relu_grad", f"{C_TYPES[y.dtype]}_{8 * g.itemsize}", xp.empty_like(y, dtype=g.dtype), y, g)


def _mapped(name, kind, out, *arrays):
    """`out`, filled from the elements of `arrays` at the same place: in the order of its memory, so that others are copied."""
    order = sorted(range(out.ndim), key=lambda i: -out.strides[i])
    arrays = [xp.ascontiguousarray(x.transpose(*order)) for x in arrays]
    kernels.launch(name, kind, out.size, out.transpose(*order), *arrays, *ints(out.size))
    return out
