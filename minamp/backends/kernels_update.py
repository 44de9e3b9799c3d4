"""The scaler's and the optimizers' CUDA kernels: all tensors of a step in one launch, and every decision made on the GPU.

A kernel gets a table with the addresses of up to 64 tensors (of six arrays each) as an argument by value, 3.6 of the 4 KB that
arguments may have. So nothing is copied to the GPU, and weights, moments and gradients stay arrays of their own: flat buffers
would make the same number of launches, but each step would have to gather its gradients into one.
"""

import math

import numpy as np

from minamp.backends import kernels
from minamp.backends.device import xp
from minamp.backends.kernels import C_TYPES, KINDS, SOURCES, optional
from minamp.formats import bfloat16, float32, is_half

TENSORS, COLUMNS = 64, 6
TABLE = np.dtype([("start", np.int64, TENSORS + 1), ("at", np.uint64, (COLUMNS, TENSORS))])

# Element e of all the tensors of a table, one after the other, is element e - start[k] of tensor k.
TENSOR_TABLE = r"""
#ifndef TENSORS
#define TENSORS
struct Tensors { i64 start[65]; void* at[6][64]; };
__device__ inline int tensor_of(const Tensors& t, int count, i64 e) {
  int low = 0, high = count;
  while (high - low > 1) {
    int mid = (low + high) / 2;
    if (t.start[mid] <= e) low = mid; else high = mid;
  }
  return low;
}
template <class T> __device__ T* column(const Tensors& t, int c, int k) { return (T*)t.at[c][k]; }
#endif
"""

# g /= *scale, by multiplying with its inverse (scale may be null: 1), and a look at every value before and after. *bad, and the
# tensor's own flag in column 1, become 1 if a value was or became non-finite. A float16 gradient is only looked at.
UNSCALE = (
    TENSOR_TABLE
    + r"""
template <class T, class S>
__device__ void unscale(const Tensors& t, int count, u32* bad, const float* scale) {
  S inverse = scale ? (S)(1.0f / *scale) : (S)1;
  EACH(e, t.start[count]) {
    int k = tensor_of(t, count, e);
    T* g = column<T>(t, 0, k) + (e - t.start[k]);
    S x = (S)*g;
    if (inverse != (S)1) *g = rounded<T>(x * inverse);
    S y = (S)*g;
    if (!(x - x == (S)0) || !(y - y == (S)0)) *bad = *column<u32>(t, 1, k) = 1;  // all threads write the same
  }
}
#define UNSCALE(T) extern "C" __global__ void unscale_##T(const __grid_constant__ Tensors t, int count, int first, u32* bad, \
    const float* scale) { unscale<T##_t, Sum<T##_t>::type>(t, count, bad, scale); }
"""
)

# float32 copies of half tensors: column 1 = column 0.
WIDEN = (
    TENSOR_TABLE
    + r"""
#define WIDEN(T) extern "C" __global__ void widen_##T(const __grid_constant__ Tensors t, int count, int first) { \
  EACH(e, t.start[count]) { \
    int k = tensor_of(t, count, e); \
    column<float>(t, 1, k)[e - t.start[k]] = (float)column<T##_t>(t, 0, k)[e - t.start[k]]; \
  } }
"""
)

# Step counters that live on the GPU: counted up unless *skip, and what Adam's bias correction makes of them.
COUNT = (
    TENSOR_TABLE
    + r"""
template <class S>
__device__ void count_steps(const Tensors& t, int count, int first, S* corrections, const u32* skip, double lr, double beta1,
                            double beta2) {
  if (skip && *skip) return;
  EACH(k, count) {
    float* step = column<float>(t, 0, k);
    *step += 1;
    corrections[2 * (first + k)] = (S)sqrt(1 - pow(beta2, (double)*step));
    corrections[2 * (first + k) + 1] = (S)(lr / (1 - pow(beta1, (double)*step)));
  }
}
#define COUNT_STEPS(S) extern "C" __global__ void count_steps_##S(const __grid_constant__ Tensors t, int count, int first, \
    S* corrections, const u32* skip, double lr, double beta1, double beta2) { \
  count_steps(t, count, first, corrections, skip, lr, beta1, beta2); }
"""
)

# The optimizers' steps in backends/update.py's order of operations, in float32 (float64) whatever the weights' format T.
# Columns: weight, gradient, the optimizer's own, and a half weight that takes the new value rounded, where there is one.
# `skip` (may be null) points to a flag: where it is not 0, nothing is written.
UPDATE = (
    TENSOR_TABLE
    + r"""
__device__ inline void store16(void* half16, int brain, i64 i, double w) {
  if (!half16) return;
  if (brain) ((bf16_t*)half16)[i] = rounded<bf16_t>(w);
  else ((half_t*)half16)[i] = rounded<half_t>(w);
}
template <class S> __device__ S direction(S w, S g, S decay, int maximize) {
  if (decay == (S)0) return maximize ? -g : g;
  S s = w * decay;
  return maximize ? s - g : s + g;
}

template <class T, class S>
__device__ void sgd(const Tensors& t, int count, const u32* skip, S lr, S momentum, S damp, S decay, int fresh, int nesterov,
                    int maximize, int brain) {
  if (skip && *skip) return;
  EACH(e, t.start[count]) {
    int k = tensor_of(t, count, e);
    i64 i = e - t.start[k];
    T* w = column<T>(t, 0, k);
    S* b = column<S>(t, 2, k);
    const float* step = column<float>(t, 4, k);
    S d = direction((S)w[i], (S)column<T>(t, 1, k)[i], decay, maximize);
    if (b) {
      S held = b[i] * momentum;
      held = (step ? *step == 1 : fresh) ? d : held + d * damp;
      b[i] = held;
      d = nesterov ? d + held * momentum : held;
    }
    S y = (S)w[i] - d * lr;
    w[i] = rounded<T>(y);
    store16(t.at[3][k], brain, i, y);
  }
}

template <class T, class S>
__device__ void adam(const Tensors& t, int count, int first, const S* corrections, const u32* skip, S shrink, S decay,
                     S one_minus_beta1, S beta2, S one_minus_beta2, S root, S eps, S step_size, int maximize, int brain) {
  if (skip && *skip) return;
  EACH(e, t.start[count]) {
    int k = tensor_of(t, count, e);
    i64 i = e - t.start[k];
    T* w = column<T>(t, 0, k);
    S *m = column<S>(t, 2, k), *v = column<S>(t, 3, k), *top = column<S>(t, 4, k);
    if (corrections) {
      root = corrections[2 * (first + k)];
      step_size = corrections[2 * (first + k) + 1];
    }
    S y = (S)w[i] * shrink;
    S d = direction(y, (S)column<T>(t, 1, k)[i], decay, maximize);
    S mean = m[i] + (d - m[i]) * one_minus_beta1;
    m[i] = mean;
    S square = v[i] * beta2 + d * one_minus_beta2 * d;
    v[i] = square;
    if (top) {
      S before = top[i];
      square = before != before || before > square ? before : square;
      top[i] = square;
    }
    S below = (S)sqrt(square) / root + eps;
    y = y - mean * step_size / below;
    w[i] = rounded<T>(y);
    store16(t.at[5][k], brain, i, y);
  }
}

template <class T, class S>
__device__ void rmsprop(const Tensors& t, int count, const u32* skip, S lr, S alpha, S one_minus_alpha, S eps, S decay,
                        S momentum, int maximize, int brain) {
  if (skip && *skip) return;
  EACH(e, t.start[count]) {
    int k = tensor_of(t, count, e);
    i64 i = e - t.start[k];
    T* w = column<T>(t, 0, k);
    S *v = column<S>(t, 2, k), *mean = column<S>(t, 3, k), *b = column<S>(t, 4, k);
    S d = direction((S)w[i], (S)column<T>(t, 1, k)[i], decay, maximize);
    S square = v[i] * alpha + d * one_minus_alpha * d;
    v[i] = square;
    if (mean) {
      S middle = mean[i] + (d - mean[i]) * one_minus_alpha;
      mean[i] = middle;
      square = square - middle * middle;
      if (square < (S)0) square = (S)0;
    }
    S move = d / ((S)sqrt(square) + eps);
    if (b) {
      move = b[i] * momentum + move;
      b[i] = move;
    }
    S y = (S)w[i] - move * lr;
    w[i] = rounded<T>(y);
    store16(t.at[5][k], brain, i, y);
  }
}
#define SGD(T) extern "C" __global__ void sgd_##T(const __grid_constant__ Tensors t, int count, int first, const u32* skip, \
    Sum<T##_t>::type lr, Sum<T##_t>::type momentum, Sum<T##_t>::type damp, Sum<T##_t>::type decay, int fresh, int nesterov, \
    int maximize, int brain) { \
  sgd<T##_t>(t, count, skip, lr, momentum, damp, decay, fresh, nesterov, maximize, brain); }
#define ADAM(T) extern "C" __global__ void adam_##T(const __grid_constant__ Tensors t, int count, int first, \
    const Sum<T##_t>::type* corrections, const u32* skip, Sum<T##_t>::type shrink, Sum<T##_t>::type decay, \
    Sum<T##_t>::type one_minus_beta1, Sum<T##_t>::type beta2, Sum<T##_t>::type one_minus_beta2, Sum<T##_t>::type root, \
    Sum<T##_t>::type eps, Sum<T##_t>::type step_size, int maximize, int brain) { \
  adam<T##_t>(t, count, first, corrections, skip, shrink, decay, one_minus_beta1, beta2, one_minus_beta2, root, eps, \
              step_size, maximize, brain); }
#define RMSPROP(T) extern "C" __global__ void rmsprop_##T(const __grid_constant__ Tensors t, int count, int first, \
    const u32* skip, Sum<T##_t>::type lr, Sum<T##_t>::type alpha, Sum<T##_t>::type one_minus_alpha, Sum<T##_t>::type eps, \
    Sum<T##_t>::type decay, Sum<T##_t>::type momentum, int maximize, int brain) { \
  rmsprop<T##_t>(t, count, skip, lr, alpha, one_minus_alpha, eps, decay, momentum, maximize, brain); }
"""
)

# The scaler's rule (scaler.py) on its scale and its count of good steps; *bad (may be null) or `found`: a step was skipped.
# Products are formed in double and rounded once; growth stops at the largest float32.
UPDATE_SCALE = r"""
extern "C" __global__ void update_scale(float* scale, int* tracker, const u32* bad, int found, double growth, double backoff,
                                        i64 interval, double low, double high) {
  EACH(e, 1) {
    double now = *scale;
    if (found || (bad && *bad)) {
      double less = now * backoff;
      *scale = (float)(low > less ? low : less);
      *tracker = 0;
    } else if (*tracker + 1 >= interval) {
      double more = now * growth;
      more = high < more ? high : more;
      if (more <= 3.4028234663852886e38) *scale = (float)more;
      *tracker = 0;
    } else {
      *tracker += 1;
    }
  }
}
"""

SOURCES.update(
    unscale=UNSCALE,
    widen=WIDEN,
    count_steps=COUNT,
    sgd=UPDATE,
    adam=UPDATE,
    rmsprop=UPDATE,
    update_scale=UPDATE_SCALE,
)
ALL = tuple(C_TYPES.values())
KINDS.update(
    unscale=ALL, widen=("half", "bf16"), count_steps=("float", "double"), sgd=ALL, adam=ALL, rmsprop=ALL
)


def _table(columns):
    """(table of the arrays in `columns`, lists of up to 64 arrays or None; how many elements they have in all)."""
    table, n = np.zeros(1, TABLE), len(columns[0])
    starts = np.cumsum([a.size for a in columns[0]])
    table["start"][0, 1 : n + 1] = starts
    for c, arrays in enumerate(columns):
        if arrays is not None:
            table["at"][0, c, :n] = [a.data.ptr for a in arrays]
    return table, int(starts[-1])


def _dense(arrays):
    return arrays and [a if a.flags.c_contiguous else xp.ascontiguousarray(a) for a in arrays]


def _copy_back(arrays, dense):
    for a, d in zip(arrays or (), dense or (), strict=True):
        if a is not d:
            a[...] = d


def _run(base, dtype, columns, *args, per_tensor=False):
    """Launch `base` for lists of arrays, 64 tensors at a time. An array with gaps goes through a copy."""
    dense = [_dense(c) for c in columns]
    for first in range(0, len(columns[0]), TENSORS):
        part = [c and c[first : first + TENSORS] for c in dense]
        count = len(part[0])
        table, total = _table(part)
        n = count if per_tensor else total
        kernels.launch(base, C_TYPES[dtype], n, table, np.int32(count), np.int32(first), *args)
    for c, d in zip(columns, dense, strict=True):
        _copy_back(c, d)


def _by_dtype(arrays):
    found = {}
    for i, a in enumerate(arrays):
        found.setdefault(a.dtype, []).append(i)
    return found.items()


def unscale(gradients, scale):
    """update.unscale, one launch per format; scale: a float32 array on the GPU or None. The flags stay on the GPU."""
    bad = xp.zeros(1 + len(gradients), np.uint32)
    dense = _dense(gradients)  # all memory before the first write
    flags = [bad[i : i + 1] for i in range(1, len(bad))]
    for dtype, places in _by_dtype(gradients):
        columns = [dense[i] for i in places], [flags[i] for i in places]
        _run("unscale", dtype, columns, bad, optional(scale))
    _copy_back(gradients, dense)
    return bad


def widen_all(arrays):
    """float32 copies of half arrays, one launch per format."""
    out = [xp.empty(a.shape, float32) for a in arrays]
    for dtype, places in _by_dtype(arrays):
        _run("widen", dtype, ([arrays[i] for i in places], [out[i] for i in places]))
    return out


def _wide(dtype):
    return float32 if is_half(dtype) else dtype


def _count(steps, dtype, corrections, skip, lr=0.0, beta1=0.0, beta2=0.0):
    """Count the steps on the GPU up, and write Adam's two corrections for each."""
    numbers = (np.float64(x) for x in (lr, beta1, beta2))
    _run("count_steps", dtype, (steps,), corrections, optional(skip), *numbers, per_tensor=True)


def sgd(
    ws,
    gs,
    buffers,
    fresh,
    *,
    lr,
    momentum,
    dampening,
    weight_decay,
    nesterov,
    maximize,
    halves=None,
    steps=None,
    corrections=None,
    skip=None,
):
    """update.sgd in one launch. steps: counters on the GPU, 1 in the step that starts a buffer, and room for two numbers each;
    skip: a flag there, not 0 for no step."""
    dtype, wide = ws[0].dtype, _wide(ws[0].dtype)
    if steps is not None:
        _count(steps, wide, corrections, skip)
    numbers = (wide.type(v) for v in (lr, momentum, 1 - dampening, weight_decay))
    flags = (np.int32(v) for v in (fresh, nesterov, maximize, _is_brain(halves)))
    _run("sgd", dtype, (ws, gs, buffers, halves, steps), optional(skip), *numbers, *flags)


def adam(
    ws,
    gs,
    ms,
    vs,
    tops,
    step,
    *,
    lr,
    betas,
    eps,
    weight_decay,
    decoupled,
    maximize,
    halves=None,
    corrections=None,
    skip=None,
):
    """update.adam in one launch. step: its number, or a list of counters on the GPU; corrections and skip as in sgd."""
    dtype, wide, (beta1, beta2) = ws[0].dtype, _wide(ws[0].dtype), betas
    shrink, decay = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
    root = step_size = 0.0
    if corrections is not None:
        _count(step, wide, corrections, skip, lr, beta1, beta2)
    else:
        root, step_size = math.sqrt(1 - beta2**step), lr / (1 - beta1**step)
    numbers = (wide.type(x) for x in (shrink, decay, 1 - beta1, beta2, 1 - beta2, root, eps, step_size))
    flags = (np.int32(x) for x in (maximize, _is_brain(halves)))
    rest = (optional(corrections), optional(skip), *numbers, *flags)
    _run("adam", dtype, (ws, gs, ms, vs, tops, halves), *rest)


def rmsprop(
    ws, gs, vs, means, buffers, *, lr, alpha, eps, weight_decay, momentum, maximize, halves=None, skip=None
):
    """update.rmsprop in one launch; skip as in sgd."""
    dtype, wide = ws[0].dtype, _wide(ws[0].dtype)
    numbers = (wide.type(x) for x in (lr, alpha, 1 - alpha, eps, weight_decay, momentum))
    flags = (np.int32(x) for x in (maximize, _is_brain(halves)))
    _run("rmsprop", dtype, (ws, gs, vs, means, buffers, halves), optional(skip), *numbers, *flags)


def _is_brain(halves):
    return halves is not None and halves[0].dtype == bfloat16


def update_scale(scale, tracker, bad, found, growth, backoff, interval, low, high):
    """update.update_scale, in place. bad: a flag on the GPU that says what `found` does, or None."""
    numbers = (np.float64(x) for x in (growth, backoff))
    rest = (np.int64(interval), np.float64(low), np.float64(high))
    kernels.launch("update_scale", "", 1, scale, tracker, optional(bad), np.int32(found), *numbers, *rest)
    return scale, tracker
