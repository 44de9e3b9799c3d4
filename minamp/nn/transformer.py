"""The layers of a transformer, encoder and decoder, with torch's names, masks and order of residual and norm.

Attention is all you need (Vaswani et al., 2017), section 3; norm_first: Xiong et al., 2020, figure 1b.
"""

import copy
import math

from minamp.create import full
from minamp.nn import functional as F
from minamp.nn import init
from minamp.nn.attention import MultiheadAttention
from minamp.nn.containers import ModuleList
from minamp.nn.layers import Linear
from minamp.nn.module import Module
from minamp.nn.normalization import LayerNorm
from minamp.nn.stateless import Dropout
from minamp.ops.arrange import triu

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu}


class _Layer(Module):
    """Self-attention, for a decoder attention to the encoder's memory, and two linear layers, each with a residual and a norm."""

    def __init__(
        self,
        d_model,
        nhead,
        dim_feedforward=2048,
        dropout=0.1,
        activation=F.relu,
        layer_norm_eps=1e-5,
        batch_first=False,
        norm_first=False,
        bias=True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if not callable(activation) and activation not in ACTIVATIONS:
            raise RuntimeError(
                f"{type(self).__name__}: activation must be 'relu', 'gelu' or a function, got {activation!r}"
            )
        where = {"device": device, "dtype": dtype}
        for name in self.attentions:
            attention = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, **where)
            self.add_module(name, attention)
        self.linear1 = Linear(d_model, dim_feedforward, bias, **where)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, **where)
        parts = range(1, len(self.attentions) + 2)
        for i in parts:
            self.add_module(f"norm{i}", LayerNorm(d_model, layer_norm_eps, bias=bias, **where))
        for i in parts:
            self.add_module(f"dropout{i}", Dropout(dropout))
        self.norm_first = norm_first
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def _add(self, i, x, part):
        """x plus what `part` makes of it, the i-th of the layer, with the norm before or after it."""
        norm, dropout = getattr(self, f"norm{i}"), getattr(self, f"dropout{i}")
        return x + dropout(part(norm(x))) if self.norm_first else norm(x + dropout(part(x)))

    def _attend(self, name, query, keys, mask, padding, causal):
        attention = getattr(self, name)
        return attention(query, keys, keys, padding, need_weights=False, attn_mask=mask, is_causal=causal)[0]

    def _feed_forward(self, x):
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class TransformerEncoderLayer(_Layer):
    """One layer of an encoder: self-attention, then two linear layers with `activation` between them.

    activation: 'relu', 'gelu' or a function of a Tensor. norm_first: norms before the parts instead of after the sums.
    batch_first: (N, L, E) instead of (L, N, E).
    """

    attentions = ("self_attn",)

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        """src (L, N, E), or (L, E). Masks and is_causal as MultiheadAttention's: (L, L), and (N, L) True at what is no word."""

        def attention(x):
            return self._attend("self_attn", x, x, src_mask, src_key_padding_mask, is_causal)

        return self._add(2, self._add(1, src, attention), self._feed_forward)


class TransformerDecoderLayer(_Layer):
    """One layer of a decoder: as TransformerEncoderLayer, with attention to the encoder's memory between the two parts."""

    attentions = ("self_attn", "multihead_attn")

    def forward(
        self,
        tgt,
        memory,
        tgt_mask=None,
        memory_mask=None,
        tgt_key_padding_mask=None,
        memory_key_padding_mask=None,
        tgt_is_causal=False,
        memory_is_causal=False,
    ):
        """tgt (T, N, E), memory (S, N, E). tgt_mask (T, T), memory_mask (T, S), the padding masks (N, T) and (N, S)."""

        def attention(x):
            return self._attend("self_attn", x, x, tgt_mask, tgt_key_padding_mask, tgt_is_causal)

        def to_memory(x):
            return self._attend(
                "multihead_attn", x, memory, memory_mask, memory_key_padding_mask, memory_is_causal
            )

        return self._add(3, self._add(2, self._add(1, tgt, attention), to_memory), self._feed_forward)


class _Stack(Module):
    def __init__(self, layer, num_layers, norm):
        super().__init__()
        self.layers = ModuleList([copy.deepcopy(layer) for _ in range(num_layers)])
        self.num_layers = num_layers
        self.norm = norm

    def _through(self, x, *args):
        for layer in self.layers:
            x = layer(x, *args)
        return x if self.norm is None else self.norm(x)


class TransformerEncoder(_Stack):
    """num_layers copies of an encoder layer, all with the same initial values, and a norm after the last if one is given.

    enable_nested_tensor and mask_check are taken and without effect: there are no nested tensors.
    """

    def __init__(self, encoder_layer, num_layers, norm=None, enable_nested_tensor=True, mask_check=True):
        super().__init__(encoder_layer, num_layers, norm)

    def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
        return self._through(src, mask, src_key_padding_mask, bool(is_causal))


class TransformerDecoder(_Stack):
    """num_layers copies of a decoder layer, all with the same initial values, and a norm after the last if one is given."""

    def __init__(self, decoder_layer, num_layers, norm=None):
        super().__init__(decoder_layer, num_layers, norm)

    def forward(
        self,
        tgt,
        memory,
        tgt_mask=None,
        memory_mask=None,
        tgt_key_padding_mask=None,
        memory_key_padding_mask=None,
        tgt_is_causal=None,
        memory_is_causal=False,
    ):
        return self._through(
            tgt,
            memory,
            tgt_mask,
            memory_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            bool(tgt_is_causal),
            memory_is_causal,
        )


class Transformer(Module):
    """An encoder and a decoder, each with a norm at its end; weights drawn as Glorot and Bengio (2010)."""

    def __init__(
        self,
        d_model=512,
        nhead=8,
        num_encoder_layers=6,
        num_decoder_layers=6,
        dim_feedforward=2048,
        dropout=0.1,
        activation=F.relu,
        custom_encoder=None,
        custom_decoder=None,
        layer_norm_eps=1e-5,
        batch_first=False,
        norm_first=False,
        bias=True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        options = (dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)
        where = {"device": device, "dtype": dtype}

        def norm():
            return LayerNorm(d_model, layer_norm_eps, bias=bias, **where)

        self.encoder = custom_encoder or TransformerEncoder(
            TransformerEncoderLayer(d_model, nhead, *options, **where), num_encoder_layers, norm()
        )
        self.decoder = custom_decoder or TransformerDecoder(
            TransformerDecoderLayer(d_model, nhead, *options, **where), num_decoder_layers, norm()
        )
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first
        for p in self.parameters():
            if p.ndim > 1:
                init.xavier_uniform_(p)

    def forward(
        self,
        src,
        tgt,
        src_mask=None,
        tgt_mask=None,
        memory_mask=None,
        src_key_padding_mask=None,
        tgt_key_padding_mask=None,
        memory_key_padding_mask=None,
        src_is_causal=None,
        tgt_is_causal=None,
        memory_is_causal=False,
    ):
        """src (S, N, E), tgt (T, N, E); the decoder's output, in tgt's shape. Masks as the layers take them."""
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        return self.decoder(
            tgt,
            memory,
            tgt_mask,
            memory_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            tgt_is_causal,
            memory_is_causal,
        )

    @staticmethod
    def generate_square_subsequent_mask(sz, device=None, dtype=None):
        """(sz, sz), -inf above the diagonal and 0 elsewhere: nobody sees what comes after."""
        return triu(full((sz, sz), -math.inf, device=device, dtype=dtype), 1)
