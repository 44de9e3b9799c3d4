"""The scaler's and the optimizers' arithmetic on plain arrays, in place, in torch's order of operations.

Every function takes all tensors of a step at once. `ws` are the weights, of one dtype, and `gs` their gradients in the same
dtype, which are only read; the arithmetic is float32 (float64 for float64 weights), and a half weight is rounded once, at the
end. `halves`, where it is given, are half weights that take the new values of their float32 masters `ws`, rounded.
Work goes block by block through small scratch arrays (blocks.py).
"""

import math

import numpy as np

from minamp.backends.blocks import blocks, packed, packs
from minamp.formats import float32, narrow, widen
from minamp.quiet import quiet


def _direction(w, g, weight_decay, maximize, s):
    """The gradient to descend along: g (or -g) + weight_decay * w. Uses `s` unless that is g itself."""
    if weight_decay:
        np.multiply(w, weight_decay, out=s)
        return np.subtract(s, g, out=s) if maximize else np.add(s, g, out=s)
    return np.negative(g, out=s) if maximize else g


def sgd(ws, gs, buffers, fresh, *, lr, momentum, dampening, weight_decay, nesterov, maximize, halves=None):
    """w -= lr * direction; with momentum, `buffers` collect the directions (`fresh`: these are the first)."""
    for s, t, w, g, b in blocks(ws, gs, buffers, halves=halves):
        d = _direction(w, g, weight_decay, maximize, s)
        if b is not None:
            if fresh:
                b[...] = d
            else:
                b *= momentum
                b += np.multiply(d, 1 - dampening, out=s) if dampening else d
            if nesterov:
                np.multiply(b, momentum, out=t)
                d = np.add(d, t, out=t)
            else:
                d = b
        w -= np.multiply(d, lr, out=s)


def adam(ws, gs, ms, vs, tops, step, *, lr, betas, eps, weight_decay, decoupled, maximize, halves=None):
    """Adam (Kingma and Ba, 2015, algorithm 1); `tops` for AMSGrad (Reddi et al., 2018), decoupled for AdamW.

    ms, vs: running means of the gradient and of its square, biased towards 0; `step` (1, 2, ...) undoes the
    bias. decoupled: weight decay shrinks the weight itself (Loshchilov and Hutter, 2019), it is not in the
    gradient.
    """
    beta1, beta2 = betas
    step_size = lr / (1 - beta1**step)
    root = math.sqrt(1 - beta2**step)
    for s, t, w, g, m, v, top in blocks(ws, gs, ms, vs, tops, halves=halves):
        if decoupled and weight_decay:
            w *= 1 - lr * weight_decay
        d = _direction(w, g, 0 if decoupled else weight_decay, maximize, s)
        np.subtract(d, m, out=t)
        m += np.multiply(t, 1 - beta1, out=t)
        v *= beta2
        np.multiply(d, 1 - beta2, out=t)  # the small factor first: d * d alone overflows from 1.8e19 on
        v += np.multiply(t, d, out=t)
        if top is not None:
            v = np.maximum(top, v, out=top)
        np.sqrt(v, out=t)
        t /= root
        t += eps
        np.multiply(m, step_size, out=s)
        w -= np.divide(s, t, out=s)


def rmsprop(ws, gs, vs, means, buffers, *, lr, alpha, eps, weight_decay, momentum, maximize, halves=None):
    """RMSprop (Hinton, "Neural networks for machine learning", 2012, lecture 6e); `means` for the centered one.

    vs, means: running means of the gradient's square and of the gradient, towards 0 at first; buffers: momentum's.
    """
    for s, t, w, g, v, mean, b in blocks(ws, gs, vs, means, buffers, halves=halves):
        d = _direction(w, g, weight_decay, maximize, s)
        v *= alpha
        np.multiply(d, 1 - alpha, out=t)  # the small factor first, as in adam
        v += np.multiply(t, d, out=t)
        if mean is None:
            np.sqrt(v, out=t)
        else:  # the variance: of gradients that are all alike, rounding may leave it below 0, whose root is nan
            np.subtract(d, mean, out=t)
            mean += np.multiply(t, 1 - alpha, out=t)
            np.subtract(v, np.multiply(mean, mean, out=t), out=t)
            np.sqrt(np.maximum(t, 0.0, out=t), out=t)
        t += eps
        move = np.divide(d, t, out=t)
        if b is not None:
            b *= momentum
            b += move
            move = b
        w -= np.multiply(move, lr, out=t)


# ---- the scaler


def _all_finite(x):
    """True if `x` holds neither inf nor nan. x . x is finite then, one BLAS pass; only if it is not, look at each value."""
    flat = x.reshape(-1)
    if x.dtype in (np.float32, np.float64) and np.isfinite(np.dot(flat, flat)):
        return True
    return bool(np.isfinite(flat).all())


@quiet
def unscale(gradients, scale):
    """Multiply every gradient by 1 / scale (an array of one value; None: by 1), rounded to float32 once.

    Returns uint32 flags: whether any value was or became non-finite (one that was stays one), then the same for each gradient.
    """
    inverse = float32.type(1.0) if scale is None else float32.type(1.0) / np.asarray(scale, float32)[()]
    bad = np.zeros(1 + len(gradients), np.uint32)
    if inverse != 1.0:
        for g in gradients:
            if g.dtype in (np.float32, np.float64):
                np.multiply(g, float(inverse), out=g)
            else:  # bfloat16: in float32, rounded once
                g[...] = narrow(widen(g) * inverse, g.dtype)
    # Large gradients in one piece: both passes over 401,000 values take 69 us, and 86 block by block.
    for pack in packs(gradients):
        if not _all_finite(packed(gradients, pack) if len(pack) > 1 else gradients[pack[0]]):
            bad[0] = 1
            for i in pack:
                bad[1 + i] = not _all_finite(gradients[i])
    return bad


def widen_all(arrays):
    """float32 copies of half arrays."""
    return [widen(a) for a in arrays]


def update_scale(scale, tracker, bad, found, growth, backoff, interval, low, high):
    """The scaler's rule (scaler.py): the new scale and count of good steps. `found` says that a step was skipped; bad is None.

    The product is formed in double and rounded once to float32; growth stops at the largest one.
    """
    now, good = float(scale), int(tracker) + 1
    if found:
        now, good = max(now * backoff, low), 0
    elif good >= interval:  # and not ==, so that an interval lowered below the count still grows
        grown = min(now * growth, high)
        now, good = (grown if grown <= float(np.finfo(float32).max) else now), 0
    return np.asarray(now, float32), np.asarray(good, np.int32)
