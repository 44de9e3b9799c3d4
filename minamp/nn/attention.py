"""MultiheadAttention: the projections around attention, torch's layout and masks; the arithmetic is in ops/attention.py."""

import math

from minamp.arguments import no_tensor
from minamp.create import empty, zeros
from minamp.nn import functional as F
from minamp.nn import init
from minamp.nn.layers import Linear, new_parameter
from minamp.nn.module import Module
from minamp.tensor import Tensor


class MultiheadAttention(Module):
    """num_heads attentions side by side, between one projection in and one out (Vaswani et al., 2017, section 3.2.2).

    in_proj_weight (3 * embed_dim, embed_dim) makes queries, keys and values; out_proj is a Linear. dropout zeroes attention
    weights in training. batch_first: (N, L, E) instead of (L, N, E). ValueError where num_heads does not divide embed_dim.
    """

    def __init__(
        self, embed_dim, num_heads, dropout=0.0, bias=True, *, batch_first=False, device=None, dtype=None
    ):
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"MultiheadAttention: num_heads={num_heads} must divide embed_dim={embed_dim}, both at least 1"
            )
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.head_dim, self.batch_first = embed_dim // num_heads, batch_first
        where = {"device": device, "dtype": dtype}
        self.in_proj_weight = new_parameter((3 * embed_dim, embed_dim), empty, **where)
        self.register_parameter(
            "in_proj_bias", new_parameter((3 * embed_dim,), zeros, **where) if bias else None
        )
        self.out_proj = Linear(embed_dim, embed_dim, bias, **where)
        self.reset_parameters()

    def reset_parameters(self):
        """Draw the initial values anew: biases 0, in_proj_weight as Glorot and Bengio (2010)."""
        init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                init.zeros_(bias)

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        need_weights=True,
        attn_mask=None,
        average_attn_weights=True,
        is_causal=False,
    ):
        """(output, weights): output in query's shape (L, N, E), or (L, E) without a batch.

        key, value: (S, N, E). attn_mask (L, S) or (N * num_heads, L, S) and key_padding_mask (N, S): bool, True where nobody
        may look (the other way round than in F.scaled_dot_product_attention), or float, added to the scores. weights
        (N, L, S), the mean over the heads, or (N, num_heads, L, S) with average_attn_weights=False; None with
        need_weights=False, which is faster and rounds nothing in between to half. is_causal: says that attn_mask is
        the causal one. RuntimeError for shapes that don't fit.
        """
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                raise no_tensor("MultiheadAttention", name, x)
            if x.ndim != query.ndim or x.ndim not in (2, 3) or x.shape[-1] != self.embed_dim:
                raise RuntimeError(
                    f"MultiheadAttention: {name} has shape {x.shape}: give (length, batch, {self.embed_dim}), batch first "
                    f"with batch_first=True, or (length, {self.embed_dim})"
                )
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "MultiheadAttention: is_causal=True only describes attn_mask: give that as well"
            )
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (self._heads(x) for x in self._projected(query, key, value))
        mask = self._mask(attn_mask, key_padding_mask, len(query), query.shape[1], key.shape[1])
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = (q * (1 / math.sqrt(self.head_dim))) @ k.mT
            if mask is not None:
                scores = scores.masked_fill(mask, -math.inf) if _is_bool(mask) else scores + mask
            weights = F.dropout(F.softmax(scores, -1), dropout)
            mixed = weights @ v
        else:
            allowed = ~mask if mask is not None and _is_bool(mask) else mask
            mixed = F.scaled_dot_product_attention(q, k, v, allowed, dropout)
        y = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if need_weights and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _projected(self, query, key, value):
        """Queries, keys and values: in one product where they are made of the same."""
        if query is key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        weights = self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def _heads(self, x):
        """(N, L, E) as (N, num_heads, L, head_dim)."""
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(self, attn_mask, padding, n, length, keys):
        """Both masks as one that broadcasts to the scores (N, num_heads, L, S); None without any."""
        if attn_mask is not None:
            if attn_mask.shape == (n * self.num_heads, length, keys):
                attn_mask = attn_mask.reshape(n, self.num_heads, length, keys)
            elif attn_mask.shape != (length, keys):
                raise RuntimeError(
                    f"MultiheadAttention: attn_mask has shape {attn_mask.shape}: give {(length, keys)} or "
                    f"{(n * self.num_heads, length, keys)}"
                )
        if padding is None:
            return attn_mask
        if padding.shape != (n, keys):
            raise RuntimeError(
                f"MultiheadAttention: key_padding_mask has shape {padding.shape}: give {(n, keys)}"
            )
        padding = padding.reshape(n, 1, 1, keys)
        if attn_mask is None:
            return padding
        if _is_bool(attn_mask) and _is_bool(padding):
            return attn_mask | padding
        return _added(attn_mask) + _added(padding)

    def extra_repr(self):
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"


def _is_bool(mask):
    return mask.dtype.kind == "b"


def _added(mask):
    """A mask that is added to the scores: of a bool one -inf where it is True."""
    return zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf) if _is_bool(mask) else mask
