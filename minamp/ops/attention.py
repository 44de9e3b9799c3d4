"""Attention: one op from queries, keys and values to their mixture, so that nothing in between is ever rounded to half."""

import math

import numpy as np

from minamp import backends
from minamp.autocast import is_autocast_enabled
from minamp.draw import generator
from minamp.formats import float32, is_floating, is_half
from minamp.op import LOWER_PRECISION, op
from minamp.tensor import Tensor

NAME = "scaled_dot_product_attention"


@op(policy=LOWER_PRECISION, mixed="first")
class scaled_dot_product_attention:
    """softmax(query @ key.mT * scale + mask) @ value (Vaswani et al., 2017, section 3.2.1).

    query (..., L, E), key (..., S, E), value (..., S, V) -> (..., L, V); leading dimensions broadcast. scale: 1 / sqrt(E) by
    default. attn_mask broadcasts to (..., L, S): bool (True: may look) or float (added). is_causal: query i sees keys 0..i.
    dropout_p zeroes weights with that probability and scales the rest by 1 / (1 - dropout_p), in evaluation too.
    A row with nothing to look at gives 0. Products, mask and softmax are float32; weights are not kept but computed again
    in backward, once. A float mask is an argument like others: autocast casts it to half, where -1e9 is -inf, so a row masked
    with -1e9 throughout gives 0 there and the mean of value in float32, as in PyTorch.
    RuntimeError for shapes, dtypes or a dropout_p that don't fit, and for attn_mask together with is_causal.
    """

    def call(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        _check_dtypes(query, key, value, attn_mask)
        shape, m = _weights_shape(query, key, value), backends.of(query._data)
        if not 0 <= dropout_p <= 1:
            raise RuntimeError(f"{NAME}: dropout_p must lie in [0, 1], got {dropout_p}")
        if is_causal:
            if attn_mask is not None:
                raise RuntimeError(
                    f"{NAME}: attn_mask and is_causal=True exclude each other: put both into one attn_mask"
                )
            attn_mask = Tensor(m.lower_triangle(*shape[-2:]))
        elif attn_mask is not None:
            lead = (1,) * (len(shape) - attn_mask.ndim) + attn_mask.shape
            if len(lead) > len(shape) or any(n not in (1, s) for n, s in zip(lead, shape, strict=True)):
                raise RuntimeError(
                    f"{NAME}: attn_mask {attn_mask.shape} can't be expanded to the weights' shape {shape}"
                )
        kept = None
        if dropout_p:
            kept = Tensor(m.keep_mask(generator(), shape, dropout_p))
        scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
        factor = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
        return (query, key, value, attn_mask, kept), {"scale": scale, "factor": factor}

    def forward(m, query, key, value, attn_mask, kept, *, scale, factor):
        weights = _weights(m, query, key, attn_mask, scale)
        return m.matmul(_dropped(m, weights, kept, factor), value)

    def shared_weights(m, g, query, key, attn_mask, scale):
        return _weights(m, query, key, attn_mask, scale)

    def shared_scores_grad(m, g, weights, value, kept, factor):
        """The gradient that reaches the scores: through the product with value, the dropout and the softmax."""
        dw = _dropped(m, m.matmul(_wide(g), m.mT(_wide(value))), kept, factor)
        return weights * (dw - m.sum(dw * weights, -1, True))

    def vjp_query(m, g, scores_grad, key, scale):
        return m.matmul(scores_grad, _wide(key)) * scale

    def vjp_key(m, g, scores_grad, query, scale):
        return m.matmul(m.mT(scores_grad), _wide(query)) * scale

    def vjp_value(m, g, weights, kept, factor):
        return m.matmul(m.mT(_dropped(m, weights, kept, factor)), _wide(g))

    def vjp_attn_mask(m, g, scores_grad):
        return scores_grad


def _wide(x):
    """Arrays come widened; tensors, when the gradient is to be differentiated again, come as they are stored."""
    return x.float() if is_half(x.dtype) else x


def _weights(m, query, key, mask, scale):
    """Each query's softmax over the keys, (..., L, S); 0 throughout where the mask leaves none."""
    scores = m.matmul(_wide(query) * scale, m.mT(_wide(key)))
    if 0 in scores.shape:
        return scores
    if mask is not None:
        scores = m.where(mask, scores, -math.inf) if mask.dtype.kind == "b" else scores + _wide(mask)
    top = m.amax(scores, -1, True)
    e = m.exp(scores - m.where(top == -math.inf, 0.0, top))  # -inf - -inf would be nan
    total = m.sum(e, -1, True)
    return e / m.where(total == 0.0, 1.0, total)


def _dropped(m, weights, kept, factor):
    return weights if kept is None else m.where(kept, weights * factor, 0.0)


def _check_dtypes(query, key, value, mask):
    dtypes = [t.dtype for t in (query, key, value)]
    found = ", ".join(f"{n} {d}" for n, d in zip(("query", "key", "value"), dtypes, strict=True))
    if not all(is_floating(d) for d in dtypes):
        raise RuntimeError(f"{NAME}: needs floating tensors, got {found}: use x.float()")
    if is_autocast_enabled():
        dtypes = [float32 if is_half(d) else d for d in dtypes]  # the region makes them one
    if len(set(dtypes)) > 1:
        raise RuntimeError(
            f"{NAME}: tensors of different dtypes ({found}): cast them to one dtype or run inside minamp.autocast()"
        )
    allowed = dict.fromkeys(("bool", "float32", str(query.dtype)))
    if (
        mask is not None
        and str(mask.dtype) not in allowed
        and not (is_autocast_enabled() and is_half(mask.dtype))
    ):
        raise RuntimeError(
            f"{NAME}: attn_mask must be {' or '.join(allowed)}, got {mask.dtype}: use mask.bool() or mask.float()"
        )


def _weights_shape(query, key, value):
    """(..., L, S); RuntimeError with all three shapes where they don't fit."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise RuntimeError(f"{NAME}: needs at least two dimensions each, got {shapes}")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"{NAME}: needs query (..., L, E), key (..., S, E) and value (..., S, V), got {shapes}"
        )
    try:
        lead = np.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        np.broadcast_shapes(lead, value.shape[:-2])
    except ValueError:
        raise RuntimeError(f"{NAME}: the leading dimensions don't broadcast, got {shapes}") from None
    return (*lead, query.shape[-2], key.shape[-2])
