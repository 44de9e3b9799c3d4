"""Encoder and decoder layers: made of attention, linear layers and norms in torch's order; masks hide what they should."""

import math

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import autocast, float16, float32, float64, nn

D = {"dropout": 0.0, "dtype": float64}


def plain(x):
    return x.detach().numpy()


def encoder_layer(**options):
    minamp.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, **{**D, **options})


def decoder_layer(**options):
    minamp.manual_seed(0)
    return nn.TransformerDecoderLayer(8, 2, 16, **{**D, **options})


def random(*shape):
    return minamp.randn(*shape, dtype=float64)


def attended(attention, query, keys):
    return attention(query, keys, keys, need_weights=False)[0]


@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu])
def test_an_encoder_layer_by_hand(activation):
    layer, x = encoder_layer(activation=activation), random(5, 3, 8)
    act = {"relu": F.relu, "gelu": F.gelu}.get(activation, activation)
    y = layer.norm1(x + attended(layer.self_attn, x, x))
    wanted = layer.norm2(y + layer.linear2(act(layer.linear1(y))))
    np.testing.assert_array_equal(plain(layer(x)), plain(wanted))


def test_a_decoder_layer_by_hand_with_norms_first():
    layer, x, memory = decoder_layer(norm_first=True), random(5, 3, 8), random(4, 3, 8)
    z = layer.norm1(x)
    y = x + attended(layer.self_attn, z, z)
    y = y + attended(layer.multihead_attn, layer.norm2(y), memory)
    wanted = y + layer.linear2(F.relu(layer.linear1(layer.norm3(y))))
    np.testing.assert_array_equal(plain(layer(x, memory)), plain(wanted))


def test_names_are_torchs():
    weights = [
        f"self_attn.{n}" for n in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    ]
    weights += [
        f"{layer}.{n}" for layer in ("linear1", "linear2", "norm1", "norm2") for n in ("weight", "bias")
    ]
    assert [n for n, _ in encoder_layer().named_parameters()] == weights
    cross = [n.replace("self_attn", "multihead_attn") for n in weights[:4]]
    names = [n for n, _ in decoder_layer().named_parameters()]
    assert names == [*weights[:4], *cross, *weights[4:], "norm3.weight", "norm3.bias"]
    assert not any("bias" in n for n, _ in encoder_layer(bias=False).named_parameters())
    stack = nn.TransformerEncoder(encoder_layer(), 2, nn.LayerNorm(8))
    assert [*stack.state_dict()][-3:] == ["layers.1.norm2.bias", "norm.weight", "norm.bias"]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("boolean", [False, True])
def test_masks(batch_first, boolean):
    """With the causal mask a later word changes no earlier output; a padded word of the memory changes none at all."""
    model = nn.Transformer(8, 2, 2, 2, 16, batch_first=batch_first, **D)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=float64)
    causal = causal < 0 if boolean else causal
    padding = minamp.tensor([[False, False, True], [False, False, False]])

    def run(source, target):
        turned = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
        out = model(
            turned(source),
            turned(target),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return plain(turned(out))

    source, target = random(2, 3, 8), random(2, 5, 8)
    before = run(source, target)
    later, padded = target.clone(), source.clone()
    later[:, 3:] += 1
    padded[0, 2] += 1
    np.testing.assert_array_equal(run(padded, target), before)
    after = run(source, later)
    np.testing.assert_allclose(after[:, :3], before[:, :3], rtol=1e-12)
    assert (after[:, 3:] != before[:, 3:]).all()


def test_the_causal_mask():
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    assert (
        mask.tolist() == [[0, -math.inf, -math.inf], [0, 0, -math.inf], [0, 0, 0]] and mask.dtype == float32
    )


def test_copies_start_alike_and_go_apart():
    stack = nn.TransformerDecoder(decoder_layer(), 2)
    first, second = stack.layers
    assert first.linear1.weight is not second.linear1.weight and stack.norm is None
    np.testing.assert_array_equal(plain(first.linear1.weight), plain(second.linear1.weight))
    stack(random(5, 3, 8), random(4, 3, 8)).sum().backward()
    assert (plain(first.linear2.weight.grad) != plain(second.linear2.weight.grad)).any()


def test_without_a_batch_and_under_autocast():
    layer, x = encoder_layer(dtype=float32), minamp.randn(5, 8)
    np.testing.assert_allclose(plain(layer(x)), plain(layer(x.unsqueeze(1)))[:, 0], rtol=1e-5, atol=1e-6)
    with autocast():
        y = layer(x)
        assert y.dtype == float32  # a layer norm's
        assert encoder_layer(dtype=float32, norm_first=True)(x.half()).dtype == float16  # a sum of halves
    np.testing.assert_allclose(plain(y), plain(layer(x)), atol=0.01)


def test_it_learns_to_reverse():
    """Six symbols, the answer backwards, with the words before as input: learned in half with a scaler."""
    minamp.manual_seed(1)
    table, head = nn.Embedding(7, 32), nn.Linear(32, 7)
    places = nn.Parameter(minamp.randn(6, 32) * 0.5)
    model = nn.Transformer(32, 2, 1, 1, 64, dropout=0.0, batch_first=True)
    whole = nn.ModuleList([table, head, model])
    optimizer = minamp.optim.Adam([*whole.parameters(), places], lr=3e-3)
    scaler, mask = minamp.GradScaler(), nn.Transformer.generate_square_subsequent_mask(6)
    for _ in range(150):
        words = minamp.randint(1, 7, (32, 6))
        answer = words.flip(1)
        given = minamp.cat([minamp.zeros(32, 1, dtype=minamp.int64), answer[:, :-1]], 1)
        with autocast():
            out = head(model(table(words) + places, table(given) + places, tgt_mask=mask))
            loss = F.cross_entropy(out.flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (out.argmax(-1) == answer).float().mean().item() > 0.9


def test_activations_that_are_none():
    with pytest.raises(
        RuntimeError, match="TransformerEncoderLayer: activation must be 'relu', 'gelu' or a function"
    ):
        encoder_layer(activation="swish")
