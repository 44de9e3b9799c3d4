"""Answers to try on exercise 2: right ones written in other ways, and wrong ones that a student would hand in."""

from grading.local import instead, wrong

RIGHT = {
    "softmax": [
        # in float64, the gradient from the Jacobian
        """
import numpy as np

def softmax(z, axis=-1):
    wide = np.moveaxis(z, axis, -1).astype(np.float64)
    result = np.empty(wide.shape, np.float16)
    for index in np.ndindex(wide.shape[:-1]):
        row = wide[index]
        if np.isneginf(row).all():
            result[index] = np.nan
            continue
        e = np.exp(row - row.max())
        result[index] = e / e.sum()
    return np.ascontiguousarray(np.moveaxis(result, -1, axis))

def softmax_grad(g, p, axis=-1):
    g, p = (np.moveaxis(a, axis, -1).astype(np.float64) for a in (g, p))
    result = np.empty(p.shape, np.float16)
    for index in np.ndindex(p.shape[:-1]):
        row = p[index]
        result[index] = row * g[index] - row * np.dot(row, g[index])
    return np.moveaxis(result, -1, axis)
""",
        # through the logarithm, and sums in float32 one term after the other
        """
import numpy as np

def total(x, axis):
    return np.take(np.add.accumulate(x, axis, dtype=np.float32), [-1], axis)

def softmax(z, axis=-1):
    x = z.astype(np.float32)
    top = x.max(axis=axis, keepdims=True)
    shifted = x - np.where(np.isneginf(top), np.float32(np.nan), top)
    return np.exp(shifted - np.log(total(np.exp(shifted), axis))).astype(np.float16)

def softmax_grad(g, p, axis=-1):
    g32, p32 = np.float32(g), np.float32(p)
    weighted = g32 * p32
    return (weighted - p32 * total(weighted, axis)).astype(np.float16)
""",
        # in place on copies, the sum as a matrix product
        """
import numpy as np

def softmax(z, axis=-1):
    x = np.swapaxes(z, axis, -1).astype(np.float32)
    top = np.max(x, -1)[..., None]
    with np.errstate(all="ignore"):
        x -= top
    np.exp(x, out=x)
    x /= (x @ np.ones(x.shape[-1], np.float32))[..., None]
    return np.swapaxes(x, axis, -1).astype("float16")

def softmax_grad(g, p, axis=-1):
    a, b = np.swapaxes(g, axis, -1).astype("f4"), np.swapaxes(p, axis, -1).astype("f4")
    inner = np.einsum("...i,...i->...", a, b)[..., None]
    return np.swapaxes((a - inner) * b, axis, -1).astype(np.half)
""",
    ],
    "masked_softmax": [
        # the maximum and the sum over the visible ones only
        """
import numpy as np

def masked_softmax(z, hidden):
    seen = ~np.broadcast_to(hidden, z.shape)
    x = z.astype(np.float32)
    top = np.max(x, axis=-1, keepdims=True, where=seen, initial=-np.inf)
    e = np.exp(np.where(seen, x - top, -np.inf))
    return (e / np.maximum(e.sum(-1, keepdims=True), 1)).astype(np.float16)
""",
        # row by row
        """
import numpy as np

def masked_softmax(z, hidden):
    result = np.zeros(z.shape, np.float16)
    mask = np.broadcast_to(hidden, z.shape)
    for index in np.ndindex(z.shape[:-1]):
        seen = np.flatnonzero(~mask[index])
        if len(seen):
            row = z[index][seen].astype(np.float64)
            e = np.exp(row - row.max())
            result[index][seen] = e / e.sum()
    return result
""",
        # minus infinity, and NaN turned into zeros where all are hidden
        """
import numpy as np

def masked_softmax(z, hidden):
    x = z.astype(np.float32)
    x[np.broadcast_to(hidden, z.shape)] = -np.inf
    with np.errstate(invalid="ignore"):
        x = np.exp(x - x.max(axis=-1, keepdims=True))
        x = x / x.sum(axis=-1, keepdims=True)
    return np.where(np.broadcast_to(hidden, z.shape).all(-1, keepdims=True), 0, x).astype(np.float16)
""",
    ],
    "log_softmax": [
        # in float64 the shift may be undone
        """
import numpy as np

def log_softmax(z, axis=-1):
    x = z.astype(np.float64)
    top = x.max(axis, keepdims=True)
    lse = top + np.log(np.exp(x - top).sum(axis, keepdims=True))
    return (x - lse).astype(np.float32)

def log_softmax_grad(g, logp, axis=-1):
    p = np.exp(logp.astype(np.float64))
    return (g - p * np.sum(g, axis, np.float64, keepdims=True)).astype(np.float16)
""",
        # slice by slice
        """
import math

import numpy as np

def log_softmax(z, axis=-1):
    def one(row):
        top = max(row.tolist())
        total = math.log(math.fsum(math.exp(v - top) for v in row.tolist()))
        return np.array([v - top - total for v in row.tolist()], np.float32)
    return np.apply_along_axis(one, axis, z)

def log_softmax_grad(g, logp, axis=-1):
    g, logp = np.moveaxis(g, axis, 0), np.moveaxis(logp, axis, 0)
    total = np.zeros(g.shape[1:], np.float32)
    for part in g:
        total += part
    return np.moveaxis((g - total * np.exp(logp)).astype(np.float16), 0, axis)
""",
        # logaddexp of what is shifted already
        """
import numpy as np

def log_softmax(z, axis=-1):
    x = z.astype(np.float32) - z.max(axis, keepdims=True).astype(np.float32)
    return x - np.logaddexp.reduce(x, axis=axis, keepdims=True)

def log_softmax_grad(g, logp, axis=-1):
    d = np.exp(logp)
    d *= -g.sum(axis, keepdims=True)
    d += g
    return np.float16(d)
""",
    ],
    "cross_entropy": [
        # a mask instead of an index, in float64
        """
import numpy as np

def cross_entropy(z, target, ignore_index=-100):
    x = z.astype(np.float64)
    x = x - x.max(1, keepdims=True)
    logp = x - np.log(np.exp(x).sum(1, keepdims=True))
    count = target != ignore_index
    picked = np.take_along_axis(logp, np.where(count, target, 0)[:, None], 1)[:, 0]
    return float(-np.where(count, picked, 0).sum() / count.sum())

def cross_entropy_grad(g, z, target, ignore_index=-100):
    x = z.astype(np.float64)
    e = np.exp(x - x.max(1, keepdims=True))
    d = e / e.sum(1, keepdims=True) - (np.arange(z.shape[1]) == target[:, None])
    count = target != ignore_index
    with np.errstate(over="ignore"):
        return np.where(count[:, None], d * (g / count.sum()), 0).astype(np.float16)
""",
        # row by row
        """
import numpy as np

def cross_entropy(z, target, ignore_index=-100):
    losses = []
    for row, t in zip(z.astype(np.float32), target.tolist()):
        if t != ignore_index:
            row = row - row.max()
            losses.append(np.log(np.sum(np.exp(row), dtype=np.float32)) - row[t])
    return np.array(sum(losses) / len(losses), np.float32)

def cross_entropy_grad(g, z, target, ignore_index=-100):
    kept = [i for i, t in enumerate(target) if t != ignore_index]
    result = np.zeros_like(z)
    for i in kept:
        row = z[i].astype(np.float32)
        row = np.exp(row - row.max())
        row /= row.sum()
        row[target[i]] -= np.float32(1)
        with np.errstate(over="ignore"):
            result[i] = row * np.float32(g) / np.float32(len(kept))
    return result
""",
        # a gradient with the one-hot matrix, through the logarithm
        """
import numpy as np

def logp_of(z):
    x = z.astype(np.float32)
    x = x - np.amax(x, 1, keepdims=True)
    return x - np.log(np.sum(np.exp(x), 1, keepdims=True))

def one_hot(z, target, ignore_index):
    hot = np.zeros(z.shape, np.float32)
    for i, t in enumerate(target):
        if t != ignore_index:
            hot[i, t] = 1
    return hot

def cross_entropy(z, target, ignore_index=-100):
    hot = one_hot(z, target, ignore_index)
    return -np.sum(logp_of(z) * hot) / np.sum(hot)

def cross_entropy_grad(g, z, target, ignore_index=-100):
    hot = one_hot(z, target, ignore_index)
    rows = hot.sum(1, keepdims=True)
    share = np.float32(g) / hot.sum() * rows
    with np.errstate(over="ignore"):
        return (np.exp(logp_of(z)) * share - hot * share).astype(np.float16)
""",
    ],
}

# ------------------------------------------------------------------------------------------------------------- wrong answers

_RANGE, _SUM, _GRAD, _ONCE = "softmax_range", "softmax_sum", "softmax_grad", "softmax_grad_once"
_VALUES, _NOTHING = "masked_softmax_values", "masked_softmax_nothing"
_LITTLE, _LARGE, _LOG_GRAD = "log_softmax_small", "log_softmax_large", "log_softmax_grad"
_LOSS, _IGNORED = "cross_entropy_loss", "cross_entropy_ignored"
_CE_GRAD, _SCALED = "cross_entropy_grad", "cross_entropy_scaled"
_CE = (_LOSS, _IGNORED, _CE_GRAD, _SCALED)

_SHIFTED = "e = np.exp(x - x.max(axis, keepdims=True))"
_RESULT = "(e / e.sum(axis, keepdims=True)).astype(np.float16)"
_BACK = "(p * (g - (g * p).sum(axis, keepdims=True))).astype(np.float16)"
_WIDEN = "g, p = g.astype(np.float32), p.astype(np.float32)"
_MASKED = "x = np.where(hidden, -np.inf, z.astype(np.float32))"
_LOG = "x - np.log(np.exp(x).sum(axis, keepdims=True))"
_LOG_SHIFT = "x -= x.max(axis, keepdims=True)"
_LOG_BACK = "(g - np.exp(logp) * g.sum(axis, keepdims=True)).astype(np.float16)"
_LOSSES = "losses = np.log(np.exp(x).sum(1)) - x[np.arange(len(rows)), target[rows]]"
_CE_BACK = "d[rows] = p * (g / len(rows))"
_CE_P = "p = e / e.sum(1, keepdims=True)"
_CE_SHIFT = "e = np.exp(x - x.max(1, keepdims=True))"
_CE_ZERO = "d = np.zeros(z.shape, np.float16)"


def _masked(body):
    """masked_softmax from the lines of its body."""
    return "import numpy as np\n\ndef masked_softmax(z, hidden):\n" + "".join(
        f"    {line}\n" for line in body
    )


WRONG = {
    "softmax": [
        wrong("exp without the shift, in float32", instead(_SHIFTED, "e = np.exp(x)"), _RANGE, _SUM),
        wrong("the textbook formula in half", instead(_SHIFTED, "e = np.exp(z)"), _RANGE, _SUM),
        wrong(
            "only the numerator is shifted",
            instead(_RESULT, "(e / np.exp(x).sum(axis, keepdims=True)).astype(np.float16)"),
            _RANGE,
            _SUM,
        ),
        wrong(
            "one maximum for the whole array",
            instead("x.max(axis, keepdims=True)", "x.max()"),
            _RANGE,
        ),
        wrong(
            "the shift is the mean",
            instead("x.max(axis, keepdims=True)", "x.mean(axis, keepdims=True)"),
            _RANGE,
        ),
        wrong(
            "always the last axis",
            instead("x = z.astype(np.float32)", "axis = -1\n    x = z.astype(np.float32)"),
            _RANGE,
            _SUM,
        ),
        wrong(
            "the maximum over the wrong axis",
            instead("x.max(axis, keepdims=True)", "x.max(axis - 1 if x.ndim > 1 else axis, keepdims=True)"),
            _RANGE,
            _SUM,
        ),
        wrong(
            "the shift is made in half",
            instead(_SHIFTED, "e = np.exp((z - z.max(axis, keepdims=True)).astype(np.float32))"),
            _RANGE,
            _SUM,
        ),
        wrong(
            "exp is rounded to half",
            instead(
                _RESULT,
                "(e.astype(np.float16).astype(np.float32) / e.sum(axis, keepdims=True)).astype(np.float16)",
            ),
            _RANGE,
            _SUM,
        ),
        wrong(
            "the sum is rounded to half",
            instead("e.sum(axis, keepdims=True)", "e.sum(axis, keepdims=True).astype(np.float16)"),
            _RANGE,
            _SUM,
        ),
        wrong(
            "the sum is accumulated in half",
            instead(
                "e.sum(axis, keepdims=True)", "np.take(np.add.accumulate(e, axis, np.float16), [-1], axis)"
            ),
            _RANGE,
            _SUM,
        ),
        wrong(
            "the logits are clipped to keep exp finite",
            instead(_SHIFTED, "e = np.exp(np.clip(x, -60, 60))"),
            _RANGE,
        ),
        wrong(
            "NaN is replaced by zero",
            instead(
                "return " + _RESULT, "return np.nan_to_num(e / e.sum(axis, keepdims=True)).astype(np.float16)"
            ),
            _RANGE,
        ),
        wrong(
            "the logits are shifted in place",
            instead(_SHIFTED, "z -= z.max(axis, keepdims=True)\n        e = np.exp(z.astype(np.float32))"),
            _RANGE,
            _SUM,
        ),
        wrong("the result stays float32", instead(_RESULT, "e / e.sum(axis, keepdims=True)"), _RANGE, _SUM),
        wrong("the gradient is p g", instead(_BACK, "(p * g).astype(np.float16)"), _GRAD, _ONCE),
        wrong(
            "only the diagonal of the Jacobian",
            instead(_BACK, "(p * (1 - p) * g).astype(np.float16)"),
            _GRAD,
            _ONCE,
        ),
        wrong(
            "the gradient subtracts the mean of g",
            instead("(g * p).sum(axis, keepdims=True)", "g.mean(axis, keepdims=True)"),
            _GRAD,
            _ONCE,
        ),
        wrong(
            "the gradient always sums over the last axis",
            instead("(g * p).sum(axis, keepdims=True)", "(g * p).sum(-1, keepdims=True)"),
            _GRAD,
            _ONCE,
        ),
        wrong("the gradient is computed in half", instead(_WIDEN, "g, p = g.copy(), p.copy()"), _ONCE),
        wrong(
            "the products g p are rounded to half",
            instead(
                "(g * p).sum(axis, keepdims=True)",
                "(g * p).astype(np.float16).sum(axis, np.float32, keepdims=True)",
            ),
            _ONCE,
        ),
        wrong(
            "the sum of the gradient is rounded to half",
            instead(
                "(g * p).sum(axis, keepdims=True)", "(g * p).sum(axis, keepdims=True).astype(np.float16)"
            ),
            _ONCE,
        ),
        wrong(
            "the difference is rounded to half before the product",
            instead(
                _BACK, "p.astype(np.float16) * (g - (g * p).sum(axis, keepdims=True)).astype(np.float16)"
            ),
            _ONCE,
        ),
        wrong(
            "the gradient stays float32",
            instead(_BACK, _BACK.replace(".astype(np.float16)", "")),
            _GRAD,
            _ONCE,
        ),
    ],
    "masked_softmax": [
        wrong(
            "minus infinity, and NaN where all are hidden",
            instead("np.where(np.isinf(top), 0, top)", "top"),
            _NOTHING,
        ),
        wrong(
            "-1e9 added in half",
            _masked(
                [
                    "x = (z + np.where(hidden, -1e9, 0).astype(np.float16)).astype(np.float32)",
                    "e = np.exp(x - x.max(-1, keepdims=True))",
                    "return (e / e.sum(-1, keepdims=True)).astype(np.float16)",
                ]
            ),
            _NOTHING,
        ),
        wrong(
            "-1e9 put in, in float32",
            instead(_MASKED, "x = np.where(hidden, np.float32(-1e9), z.astype(np.float32))"),
            _NOTHING,
        ),
        wrong(
            "-10000 added in float32",
            instead(_MASKED, "x = z.astype(np.float32) - 10000 * hidden"),
            _VALUES,
            _NOTHING,
        ),
        wrong(
            "the largest negative half put in",
            instead(_MASKED, "x = np.where(hidden, np.float32(-65504), z.astype(np.float32))"),
            _VALUES,
            _NOTHING,
        ),
        wrong(
            "the scores are multiplied by the mask",
            instead(_MASKED, "x = z.astype(np.float32) * ~hidden"),
            _VALUES,
            _NOTHING,
        ),
        wrong(
            "softmax of everything, hidden ones set to zero afterwards",
            _masked(
                [
                    "x = z.astype(np.float32)",
                    "e = np.exp(x - x.max(-1, keepdims=True))",
                    "return np.where(hidden, 0, e / e.sum(-1, keepdims=True)).astype(np.float16)",
                ]
            ),
            _VALUES,
            _NOTHING,
        ),
        wrong(
            "the maximum includes the hidden ones",
            _masked(
                [
                    "x = z.astype(np.float32)",
                    "e = np.exp(x - x.max(-1, keepdims=True)) * ~hidden",
                    "total = e.sum(-1, keepdims=True)",
                    "return (e / np.where(total == 0, 1, total)).astype(np.float16)",
                ]
            ),
            _VALUES,
            _NOTHING,
        ),
        wrong(
            "a small eps in the denominator instead of a case",
            _masked(
                [
                    "x = z.astype(np.float32)",
                    "e = np.exp(x - x.max(-1, keepdims=True)) * ~hidden",
                    "return (e / (e.sum(-1, keepdims=True) + 1e-6)).astype(np.float16)",
                ]
            ),
            _VALUES,
            _NOTHING,
        ),
        wrong(
            "the result in half normalised a second time",
            _masked(
                [
                    "x = z.astype(np.float32)",
                    "e = np.exp(x - x.max(-1, keepdims=True))",
                    "p = (e / e.sum(-1, keepdims=True)).astype(np.float16) * ~hidden",
                    "total = p.sum(-1, keepdims=True)",
                    "return np.where(total == 0, 0, p / np.where(total == 0, 1, total)).astype(np.float16)",
                ]
            ),
            _VALUES,
            _NOTHING,
        ),
        wrong(
            "True means visible",
            instead("np.where(hidden, -np.inf,", "np.where(~hidden, -np.inf,"),
            _VALUES,
            _NOTHING,
        ),
        wrong(
            "the scores are overwritten",
            _masked(
                [
                    "z[np.broadcast_to(hidden, z.shape)] = -np.inf",
                    "x = z.astype(np.float32)",
                    "top = x.max(-1, keepdims=True)",
                    "e = np.exp(x - np.where(np.isinf(top), 0, top))",
                    "total = e.sum(-1, keepdims=True)",
                    "return (e / np.where(total == 0, 1, total)).astype(np.float16)",
                ]
            ),
            _VALUES,
        ),
        wrong(
            "a row with nothing to see gets equal shares",
            instead(
                "(e / np.where(total == 0, 1, total))",
                "np.where(total == 0, 1 / z.shape[-1], e / np.where(total == 0, 1, total))",
            ),
            _NOTHING,
        ),
        wrong(
            "one hidden row makes all rows zero",
            instead(
                "(e / np.where(total == 0, 1, total))",
                "(e / np.where(total == 0, 1, total) * (total > 0).all())",
            ),
            _NOTHING,
        ),
        wrong(
            "the mask is an index and does not broadcast",
            instead(_MASKED, "x = z.astype(np.float32)\n    x[hidden] = -np.inf"),
            _VALUES,
        ),
        wrong(
            "the sum is rounded to half",
            instead(
                "total = e.sum(-1, keepdims=True)", "total = e.sum(-1, keepdims=True).astype(np.float16)"
            ),
            _VALUES,
            _NOTHING,
        ),
        wrong(
            "the result stays float32",
            instead(".astype(np.float16)", ".astype(np.float32)"),
            _VALUES,
            _NOTHING,
        ),
    ],
    "log_softmax": [
        wrong(
            "the logarithm of a half softmax",
            instead(
                _LOG,
                "np.log((np.exp(x) / np.exp(x).sum(axis, keepdims=True)).astype(np.float16).astype(np.float32))",
            ),
            _LITTLE,
            _LARGE,
        ),
        wrong(
            "the logarithm of a float32 softmax",
            instead(_LOG, "np.log(np.exp(x) / np.exp(x).sum(axis, keepdims=True))"),
            _LITTLE,
            _LARGE,
        ),
        wrong(
            "the logarithm of a softmax and 1e-8",
            instead(_LOG, "np.log(np.exp(x) / np.exp(x).sum(axis, keepdims=True) + np.float32(1e-8))"),
            _LITTLE,
            _LARGE,
        ),
        wrong("no shift", instead(_LOG_SHIFT, "pass"), _LARGE),
        wrong(
            "one maximum for the whole array",
            instead(_LOG_SHIFT, "x -= x.max()"),
            _LARGE,
        ),
        wrong(
            "always the last axis",
            instead(_LOG_SHIFT, "axis = -1\n    " + _LOG_SHIFT),
            _LITTLE,
            _LARGE,
        ),
        wrong(
            "the shift is undone inside the bracket",
            instead(
                _LOG_SHIFT + "\n    return " + _LOG,
                "top = x.max(axis, keepdims=True)\n    return x - (top + np.log(np.exp(x - top).sum(axis, keepdims=True)))",
            ),
            _LARGE,
        ),
        wrong(
            "logaddexp of the logits as they are",
            instead(
                _LOG_SHIFT + "\n    return " + _LOG,
                "return x - np.logaddexp.reduce(x, axis=axis, keepdims=True)",
            ),
            _LARGE,
        ),
        wrong(
            "only the exponentials are shifted",
            instead(
                _LOG_SHIFT + "\n    return " + _LOG,
                "return x - np.log(np.exp(x - x.max(axis, keepdims=True)).sum(axis, keepdims=True))",
            ),
            _LITTLE,
            _LARGE,
        ),
        wrong(
            "the shift is made in half",
            instead("x = z.astype(np.float32)", "x = (z - z.max(axis, keepdims=True)).astype(np.float32)"),
            _LITTLE,
            _LARGE,
        ),
        wrong(
            "the sum is rounded to half",
            instead(
                "np.exp(x).sum(axis, keepdims=True)",
                "np.exp(x).sum(axis, keepdims=True).astype(np.float16).astype(np.float32)",
            ),
            _LITTLE,
        ),
        wrong(
            "the result is half",
            instead("return " + _LOG, "return (" + _LOG + ").astype(np.float16)"),
            _LITTLE,
            _LARGE,
        ),
        wrong(
            "the result is rounded to half and called float32",
            instead("return " + _LOG, "return (" + _LOG + ").astype(np.float16).astype(np.float32)"),
            _LITTLE,
            _LARGE,
        ),
        wrong(
            "the gradient is g - p", instead(_LOG_BACK, "(g - np.exp(logp)).astype(np.float16)"), _LOG_GRAD
        ),
        wrong(
            "the gradient of softmax",
            instead(
                _LOG_BACK,
                "(np.exp(logp) * (g - (np.exp(logp) * g).sum(axis, keepdims=True))).astype(np.float16)",
            ),
            _LOG_GRAD,
        ),
        wrong(
            "the gradient with the mean of g",
            instead("g.sum(axis, keepdims=True)", "g.mean(axis, keepdims=True)"),
            _LOG_GRAD,
        ),
        wrong(
            "the gradient always sums over the last axis",
            instead("g.sum(axis, keepdims=True)", "g.sum(-1, keepdims=True)"),
            _LOG_GRAD,
        ),
        wrong("the gradient forgets exp", instead("np.exp(logp) * g.sum", "logp * g.sum"), _LOG_GRAD),
        wrong(
            "the sum of g is half",
            instead("g.sum(axis, keepdims=True)", "g.astype(np.float16).sum(axis, keepdims=True)"),
            _LOG_GRAD,
        ),
        wrong(
            "the probability in the gradient is half",
            instead("np.exp(logp) *", "np.exp(logp).astype(np.float16) *"),
            _LOG_GRAD,
        ),
        wrong(
            "the product in the gradient is rounded first",
            instead(
                _LOG_BACK,
                "g.astype(np.float16) - (np.exp(logp) * g.sum(axis, keepdims=True)).astype(np.float16)",
            ),
            _LOG_GRAD,
        ),
        wrong(
            "the gradient stays float32",
            instead(_LOG_BACK, "g - np.exp(logp) * g.sum(axis, keepdims=True)"),
            _LOG_GRAD,
        ),
        wrong(
            "the incoming gradient is overwritten",
            instead(
                "return " + _LOG_BACK,
                "g -= np.exp(logp) * g.sum(axis, keepdims=True)\n    return g.astype(np.float16)",
            ),
            _LOG_GRAD,
        ),
    ],
    "cross_entropy": [
        wrong(
            "the logarithm of a half softmax",
            instead(
                _LOSSES,
                "p = (np.exp(x) / np.exp(x).sum(1, keepdims=True)).astype(np.float16).astype(np.float32)\n"
                "    losses = -np.log(p[np.arange(len(rows)), target[rows]])",
            ),
            _LOSS,
        ),
        wrong(
            "an eps under the logarithm",
            instead(
                _LOSSES,
                "p = np.exp(x) / np.exp(x).sum(1, keepdims=True)\n"
                "    losses = -np.log(p[np.arange(len(rows)), target[rows]] + np.float32(1e-8))",
            ),
            _LOSS,
        ),
        wrong("no shift in the loss", instead("x -= x.max(1, keepdims=True)", "pass"), _LOSS),
        wrong(
            "the shift is undone in the loss",
            instead(
                "x -= x.max(1, keepdims=True)\n    " + _LOSSES,
                "top = x.max(1)\n"
                "    losses = top + np.log(np.exp(x - top[:, None]).sum(1)) - x[np.arange(len(rows)), target[rows]]",
            ),
            _LOSS,
        ),
        wrong(
            "the losses are averaged in half",
            instead("losses.mean()", "losses.astype(np.float16).mean()"),
            _LOSS,
        ),
        wrong("the sum of the losses", instead("losses.mean()", "losses.sum()"), _LOSS, _IGNORED),
        wrong(
            "the loss is divided by the number of logits",
            instead("losses.mean()", "losses.sum() / z[rows].size"),
            _LOSS,
            _IGNORED,
        ),
        wrong("the loss is divided by all rows", instead("losses.mean()", "losses.sum() / len(z)"), _IGNORED),
        wrong("one loss for each row", instead("losses.mean()", "losses"), _LOSS, _IGNORED),
        wrong(
            "ignored rows count as class 0",
            instead(
                "rows = np.flatnonzero(target != ignore_index)\n    x = z[rows].astype(np.float32)\n    x -=",
                "target = np.where(target == ignore_index, 0, target)\n"
                "    rows = np.arange(len(z))\n    x = z.astype(np.float32)\n    x -=",
            ),
            _IGNORED,
        ),
        wrong(
            "ignore_index is always -100",
            lambda reference: reference.replace("target != ignore_index", "target != -100"),
            _IGNORED,
        ),
        wrong(
            "every negative target is ignored",
            lambda reference: reference.replace("target != ignore_index", "target >= 0"),
            _IGNORED,
        ),
        wrong(
            "ignored targets are set to 0 in place",
            instead(
                "x -= x.max(1, keepdims=True)",
                "target[target == ignore_index] = 0\n    x -= x.max(1, keepdims=True)",
            ),
            _IGNORED,
        ),
        wrong(
            "the gradient is not divided by the rows",
            instead(_CE_BACK, "d[rows] = p * g"),
            _IGNORED,
            _CE_GRAD,
            _SCALED,
        ),
        wrong("the gradient is divided by all rows", instead("(g / len(rows))", "(g / len(z))"), _IGNORED),
        wrong(
            "ignored rows have a gradient",
            instead(
                _CE_ZERO,
                "w = z.astype(np.float32)\n    w = np.exp(w - w.max(1, keepdims=True))\n"
                "    d = (w / w.sum(1, keepdims=True) / len(rows)).astype(np.float16)",
            ),
            _IGNORED,
        ),
        wrong(
            "the gradient has the other sign",
            instead("(g / len(rows))", "(-g / len(rows))"),
            _IGNORED,
            _CE_GRAD,
            _SCALED,
        ),
        wrong(
            "the gradient forgets the true class", instead("] -= 1", "] -= 0"), _IGNORED, _CE_GRAD, _SCALED
        ),
        wrong("the gradient ignores g", instead("(g / len(rows))", "(1 / len(rows))"), _CE_GRAD, _SCALED),
        wrong("the scale is half", instead("(g / len(rows))", "(float(np.float16(g)) / len(rows))"), _SCALED),
        wrong("the gradient without a shift", instead(_CE_SHIFT, "e = np.exp(x)"), _CE_GRAD),
        wrong(
            "one maximum for the whole array in the gradient",
            instead(_CE_SHIFT, "e = np.exp(x - x.max())"),
            _CE_GRAD,
        ),
        wrong(
            "the probabilities are half",
            instead(_CE_P, _CE_P[:4] + "(e / e.sum(1, keepdims=True)).astype(np.float16).astype(np.float32)"),
            _CE_GRAD,
            _SCALED,
        ),
        wrong(
            "p - y is rounded before the scale",
            instead(_CE_BACK, "d[rows] = p.astype(np.float16).astype(np.float32) * (g / len(rows))"),
            _CE_GRAD,
            _SCALED,
        ),
        wrong(
            "(p - y) / N is rounded before the scale",
            instead(_CE_BACK, "d[rows] = (p / len(rows)).astype(np.float16).astype(np.float32) * g"),
            _CE_GRAD,
            _SCALED,
        ),
        wrong(
            "the gradient is clipped to the largest half",
            instead(_CE_BACK, "d[rows] = np.clip(p * (g / len(rows)), -65504, 65504)"),
            _SCALED,
        ),
        wrong(
            "the gradient stays float32",
            instead(_CE_ZERO, "d = np.zeros(z.shape, np.float32)"),
            _IGNORED,
            _CE_GRAD,
            _SCALED,
        ),
        wrong(
            "the gradient is written into the logits",
            instead(_CE_ZERO, "d = z\n    d[...] = 0"),
            _CE_GRAD,
            _IGNORED,
        ),
    ],
}
