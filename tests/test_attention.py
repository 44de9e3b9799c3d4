"""scaled_dot_product_attention: gradients in float64, masks, and one rounding in half."""

import math

import numpy as np
import pytest

import minamp
from minamp import autocast, bfloat16, float16, float32, float64, nn, no_grad, tensor
from minamp.autograd import check_grads, grad
from minamp.formats import cast, ulp, widen
from minamp.nn.functional import scaled_dot_product_attention as attend
from minamp.tensor import Tensor

_rng = np.random.default_rng(3)


def a(*shape):
    return _rng.standard_normal(shape)


def exact(q, k, v, mask=None, scale=None):
    """In float64, with the softmax written out."""
    scores = np.matmul(q, np.swapaxes(k, -1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    with np.errstate(invalid="ignore"):
        e = np.exp(scores - np.max(scores, -1, keepdims=True))
        return np.matmul(np.nan_to_num(e / e.sum(-1, keepdims=True)), v)


SOME = np.array([[True, False, True, True], [False] * 4, [True, True, False, False]])
SHAPES = (2, 3, 2), (2, 4, 2), (2, 4, 3)


def args(*shapes):
    return [a(*s) for s in shapes or SHAPES]


@pytest.mark.parametrize(
    "function, arrays",
    [
        (attend, args()),
        (lambda q, k, v: attend(q, k, v, scale=0.3) ** 2, args((3, 2), (4, 2), (4, 1))),
        (lambda q, k, v: attend(q, k, v, Tensor(SOME)), args()),
        (lambda q, k, v: attend(q, k, v, is_causal=True), args()),
        (lambda q, k, v, mask: attend(q, k, v, mask), [*args(), a(3, 4)]),
        (lambda q, k, v, mask: attend(q, k, v, mask), [*args(), a(2, 1, 4)]),
        (lambda q, k, v: attend(q, k, v, Tensor(np.where(SOME, 0.5, -np.inf))), args()),
        (attend, args((2, 1, 3, 2), (1, 2, 4, 2), (2, 2, 4, 2))),
        (attend, args((3, 2), (4, 2), (2, 4, 2))),
        (lambda x: attend(x, x, x), [a(3, 2)]),
    ],
    ids="plain scale bool causal float float-broadcast minus-inf batches more-values self".split(),
)
def test_gradients(function, arrays):
    check_grads(function, *arrays)


def test_gradients_with_dropout():
    def dropped(q, k, v):
        minamp.manual_seed(0)
        return attend(q, k, v, dropout_p=0.4)

    check_grads(dropped, *args())


@pytest.mark.parametrize(
    "mask",
    [None, SOME, SOME[:1], np.where(SOME, a(3, 4), -np.inf), a(2, 3, 4)],
    ids=lambda m: str(np.shape(m)),
)
def test_values(mask):
    q, k, v = args()
    y = attend(*map(Tensor, (q, k, v)), None if mask is None else Tensor(mask))
    np.testing.assert_allclose(y._data, exact(q, k, v, mask), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("queries, keys", [(3, 3), (4, 2), (2, 4)])
def test_causal(queries, keys):
    """Query i sees keys 0..i, counted from the start on both sides."""
    q, k, v = args((queries, 2), (keys, 2), (keys, 3))
    y = attend(*map(Tensor, (q, k, v)), is_causal=True)
    np.testing.assert_allclose(y._data, exact(q, k, v, np.tri(queries, keys, dtype=bool)), rtol=1e-13)
    np.testing.assert_array_equal(y._data[0], v[0])


def test_a_row_that_sees_nothing_gives_zero():
    q, k, v = (Tensor(x.astype(np.float32), requires_grad=True) for x in args())
    for mask in (Tensor(SOME), Tensor(np.where(SOME, 0, -np.inf).astype(np.float32))):
        y = attend(q, k, v, mask)
        assert (y._data[:, 1] == 0).all() and (y._data[:, 0] != 0).all()
        gq, gk, gv = grad(y.sum(), (q, k, v))
        assert (gq._data[:, 1] == 0).all() and all(np.isfinite(g._data).all() for g in (gk, gv))


def test_minus_1e9_is_minus_infinity_in_half():
    """In float32 a row of -1e9 is uniform; autocast casts the mask, float16 has no -1e9, and a row of -inf gives 0."""
    q, k, v = (Tensor(x.astype(np.float32)) for x in args())
    mask = Tensor(np.where(SOME, 0, -1e9).astype(np.float32))
    np.testing.assert_allclose(attend(q, k, v, mask)._data[:, 1], v._data.mean(1), rtol=1e-5)
    with minamp.autocast():
        assert (attend(q, k, v, mask)._data[:, 1] == 0).all()
    with minamp.autocast(dtype=bfloat16):
        half = attend(q, k, v, mask)._data[:, 1].astype(float)
    np.testing.assert_allclose(half, v._data.mean(1), atol=0.02)
    outside = attend(q.half(), k.half(), v.half(), mask)  # outside a region a float32 mask stays float32
    assert outside.dtype == float16
    np.testing.assert_allclose(outside._data[:, 1].astype(float), v._data.mean(1), atol=2e-3)


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
def test_half_is_the_exact_result_rounded_once(dtype):
    q, k, v = (Tensor(cast(x, dtype)) for x in args((8, 16), (50, 16), (50, 16)))
    wide = [widen(t._data).astype(float) for t in (q, k, v)]
    y = attend(q, k, v)
    assert y.dtype == dtype
    right = exact(*wide)
    # 1e-6: float32 on the way
    assert (np.abs(widen(y._data) - right) <= 0.51 * ulp(right, dtype) + 1e-6).all()


def test_scores_past_the_format_do_not_overflow():
    q = tensor([[300.0, 300.0]], dtype=float16, requires_grad=True)
    k = tensor([[300.0, 300.0], [300.0, 299.75]], dtype=float16, requires_grad=True)
    v = tensor([[1.0], [2.0]], dtype=float16, requires_grad=True)
    y = attend(q, k, v)  # scores near 127000; they differ by 53
    assert y.item() == 1
    for create_graph in (False, True):
        gs = grad(y, (q, k, v), retain_graph=True, create_graph=create_graph)
        assert all(np.isfinite(g._data).all() for g in gs) and gs[2].tolist() == [[1], [0]]


def test_weights_below_the_smallest_half_still_count():
    n = 60000  # each weight is 1/60000; their rounded values 1.67e-5 are subnormal and off by 0.2 %
    q, k = minamp.zeros(1, 1, dtype=float16), minamp.zeros(n, 1, dtype=float16)
    assert attend(q, k, minamp.ones(n, 1, dtype=float16)).item() == 1


def test_autocast_casts_every_tensor_once_and_returns_half():
    q, k, v = (Tensor(x.astype(np.float32), requires_grad=True) for x in args())
    mask = Tensor(a(3, 4).astype(np.float32), requires_grad=True)
    with minamp.autocast():
        y = attend(q, k.half(), v.bfloat16(), mask)
        assert y.dtype == float16 and attend(q, k, v, Tensor(SOME)).dtype == float16
        assert attend(*(t.double() for t in (q, k, v))).dtype == float64
        assert attend(q, k, v, mask.bfloat16()).dtype == float16
    y.float().sum().backward()
    assert q.grad.dtype == mask.grad.dtype == float32 and mask.grad.shape == (3, 4)


def test_dropout():
    minamp.manual_seed(0)
    q, k, v = minamp.zeros(1, 2), minamp.zeros(1000, 2), minamp.ones(1000, 1)
    y = attend(q, k, v, dropout_p=0.5).item()
    assert abs(y - 1) < 0.1 and y != 1
    assert attend(q, k, v, dropout_p=1.0).item() == 0 and attend(
        q, k, v, dropout_p=0.0
    ).item() == pytest.approx(1)


def test_nothing_to_look_at():
    assert attend(minamp.ones(2, 3), minamp.ones(0, 3), minamp.ones(0, 4)).tolist() == [[0] * 4] * 2
    v = Tensor(a(3, 2))
    y = attend(minamp.ones(1, 0).double(), minamp.ones(3, 0).double(), v)
    np.testing.assert_allclose(y._data[0], v._data.mean(0))


t = minamp.ones
NAME = "scaled_dot_product_attention: "
ERRORS = [
    (lambda: attend(t(3), t(3), t(3)), r"needs at least two dimensions each, got query \(3,\)"),
    (
        lambda: attend(t(2, 3), t(2, 4), t(2, 3)),
        r"needs query \(\.\.\., L, E\), key .* got query \(2, 3\), key \(2, 4\)",
    ),
    (lambda: attend(t(2, 3), t(2, 3), t(3, 3)), r"value \(\.\.\., S, V\), got .* value \(3, 3\)"),
    (
        lambda: attend(t(2, 2, 3), t(3, 2, 3), t(2, 3)),
        r"the leading dimensions don't broadcast, got query \(2, 2, 3\)",
    ),
    (
        lambda: attend(t(2, 3), t(2, 3).half(), t(2, 3)),
        r"different dtypes \(query float32, key float16, value float32\): cast",
    ),
    (lambda: attend(*[tensor([[1]])] * 3), r"needs floating tensors, got query int64.*x\.float\(\)"),
    (
        lambda: attend(t(2, 3), t(2, 3), t(2, 3), tensor([[1, 0]])),
        r"attn_mask must be bool or float32, got int64: use mask\.bool",
    ),
    (
        lambda: attend(t(2, 3), t(2, 3), t(2, 3), t(2, 3)),
        r"attn_mask \(2, 3\) can't be expanded to the weights' shape \(2, 2\)",
    ),
    (lambda: attend(t(2, 3), t(2, 3), t(2, 3), t(4, 2, 2)), r"attn_mask \(4, 2, 2\) can't be expanded"),
    (
        lambda: attend(t(2, 3), t(2, 3), t(2, 3), t(2, 2), is_causal=True),
        "attn_mask and is_causal=True exclude each other",
    ),
    (lambda: attend(t(2, 3), t(2, 3), t(2, 3), dropout_p=1.5), r"dropout_p must lie in \[0, 1\], got 1\.5"),
]


@pytest.mark.parametrize("call, text", ERRORS)
def test_errors(call, text):
    with pytest.raises(RuntimeError, match=NAME + ".*" + text):
        call()


def test_mixed_dtypes_that_no_region_unites():
    with minamp.autocast(), pytest.raises(RuntimeError, match="query float64, key float32"):
        attend(t(2, 3).double(), t(2, 3), t(2, 3))


def test_a_finished_mask_of_minus_infinity_in_autocast_is_finite_in_backward():
    q, k, v = (Tensor(x.astype(np.float32), requires_grad=True) for x in args())
    with minamp.autocast():
        y = attend(q, k, v, Tensor(np.full((3, 4), -math.inf, np.float32)))
    y.float().sum().backward()
    assert (y._data == 0).all() and all((x.grad._data == 0).all() for x in (q, k, v))


# ---------------------------------------------------------------------------------------------------------- MultiheadAttention


def heads_one_by_one(layer, q, k, v, mask=0.0):
    """(output, weights of each head) of batch-first float64 arrays, head by head; the mask is added to (N, H, L, S)."""
    mask = np.broadcast_to(mask, (len(q), layer.num_heads, q.shape[1], k.shape[1]))
    w, b = (layer.state_dict()[n].numpy().astype(float) for n in ("in_proj_weight", "in_proj_bias"))
    e, d, mixed, looks = layer.embed_dim, layer.head_dim, [], []
    for h in range(layer.num_heads):
        rows = [slice(i * e + h * d, i * e + (h + 1) * d) for i in range(3)]
        x, y, z = (t @ w[r].T + b[r] for t, r in zip((q, k, v), rows, strict=True))
        scores = np.exp(x @ y.swapaxes(1, 2) / math.sqrt(d) + mask[:, h])
        looks.append(scores / scores.sum(-1, keepdims=True))
        mixed.append(looks[-1] @ z)
    out = layer.out_proj
    return np.concatenate(mixed, -1) @ out.weight.detach().numpy().T + out.bias.detach().numpy(), np.stack(
        looks, 1
    )


def a_layer(**options):
    minamp.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, **options)
    with no_grad():
        layer.in_proj_bias.normal_()
        layer.out_proj.bias.normal_()
    return layer


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_heads_are_computed_side_by_side(batch_first, need_weights):
    layer, q, k, v = a_layer(batch_first=batch_first), a(3, 4, 8), a(3, 5, 8), a(3, 5, 8)
    expected, looks = heads_one_by_one(layer, q, k, v)
    given = [tensor(x.astype(np.float32)) for x in (q, k, v)]
    given = given if batch_first else [x.transpose(0, 1) for x in given]
    y, weights = layer(*given, need_weights=need_weights)
    np.testing.assert_allclose((y if batch_first else y.transpose(0, 1)).detach(), expected, atol=2e-6)
    if need_weights:
        np.testing.assert_allclose(weights.detach(), looks.mean(1), atol=1e-6)
        _, each = layer(*given, average_attn_weights=False)
        np.testing.assert_allclose(each.detach(), looks, atol=1e-6)
    else:
        assert weights is None


MASKS = {  # True where nobody may look
    "attn_mask": np.triu(np.ones((4, 4), bool), 1),
    "attn_mask of every head": _rng.random((6, 4, 4)) < 0.4,
    "key_padding_mask": np.arange(4) >= np.array([[4], [2], [1]]),
}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float", "one of each"])
@pytest.mark.parametrize("names", [*([n] for n in MASKS), ["attn_mask", "key_padding_mask"]], ids=str)
def test_masks_say_where_nobody_may_look(names, kind, need_weights):
    layer, x, given, added = a_layer(batch_first=True), a(3, 4, 8), {}, 0.0
    for i, name in enumerate(names):
        mask = MASKS[name] & (np.arange(4) > 0)  # key 0 is seen by all
        shape = (1, 1, 4, 4) if name == "attn_mask" else (3, 1, 1, 4) if "key" in name else (3, 2, 4, 4)
        floats = kind == "float" or kind == "one of each" and i == 0
        values = np.where(mask, -3.0 if floats else -np.inf, 0.0)
        added = added + values.reshape(shape)
        given[name.split()[0]] = tensor(values.astype(np.float32)) if floats else tensor(mask)
    expected, looks = heads_one_by_one(layer, x, x, x, added)
    x = tensor(x.astype(np.float32))
    y, weights = layer(x, x, x, need_weights=need_weights, **given)
    np.testing.assert_allclose(y.detach(), expected, atol=2e-6)
    if need_weights:
        np.testing.assert_allclose(weights.detach(), looks.mean(1), atol=1e-6)


def test_attention_without_a_batch():
    layer, x = a_layer(), tensor(a(4, 8).astype(np.float32))
    padding = tensor([False, False, True, True])
    y, weights = layer(x, x, x, key_padding_mask=padding)
    whole, both = layer(*[x.unsqueeze(1)] * 3, key_padding_mask=padding.unsqueeze(0))
    assert y.shape == (4, 8) and weights.shape == (4, 4) and weights[:, 2:].abs().max().item() == 0
    assert y.tolist() == whole.squeeze(1).tolist() and weights.tolist() == both.squeeze(0).tolist()


def test_attention_layers_dropout_is_of_the_weights_and_in_training_only():
    layer, x = a_layer(dropout=0.5), tensor(a(4, 3, 8).astype(np.float32))
    _, weights = layer(x, x, x, average_attn_weights=False)
    assert (weights == 0).any().item()
    layer.eval()
    (y, weights), (again, none) = layer(x, x, x), layer(x, x, x, need_weights=False)
    assert (weights > 0).all().item() and none is None
    np.testing.assert_allclose(y.detach(), again.detach(), atol=1e-6)


def test_attention_layer_under_autocast():
    """Products are half, the softmax that gives the weights is float32, as by PyTorch's lists."""
    layer, x = a_layer(batch_first=True), tensor(a(2, 4, 8).astype(np.float32))
    with autocast(dtype=float16):
        (y, weights), (short, _) = layer(x, x, x), layer(x, x, x, need_weights=False)
    assert (y.dtype, weights.dtype, short.dtype) == (float16, float32, float16)
    exact, _ = layer(x, x, x)
    np.testing.assert_allclose(y.float().detach(), exact.detach(), atol=5e-3)
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == float32 for p in layer.parameters())


def test_attention_layers_parameters_are_torchs():
    shapes = {n: p.shape for n, p in nn.MultiheadAttention(8, 2).named_parameters()}
    assert shapes == {
        "in_proj_weight": (24, 8),
        "in_proj_bias": (24,),
        "out_proj.weight": (8, 8),
        "out_proj.bias": (8,),
    }
    assert [*nn.MultiheadAttention(8, 2, bias=False).state_dict()] == ["in_proj_weight", "out_proj.weight"]
    layer = nn.MultiheadAttention(8, 2)
    assert layer.in_proj_bias.abs().sum().item() == layer.out_proj.bias.abs().sum().item() == 0
    assert 0 < layer.in_proj_weight.abs().max().item() <= math.sqrt(6 / 32)


X = tensor(a(4, 3, 8).astype(np.float32))


@pytest.mark.parametrize(
    "call, kind, text",
    [
        (lambda m: nn.MultiheadAttention(8, 3), ValueError, "num_heads=3 must divide embed_dim=8"),
        (lambda m: m(X, X, 3), TypeError, "MultiheadAttention: value is a int, not a Tensor"),
        (
            lambda m: m(X, X, X[..., :4]),
            RuntimeError,
            r"value has shape \(4, 3, 4\): give \(length, batch, 8\)",
        ),
        (lambda m: m(X, X[0], X), RuntimeError, r"key has shape \(3, 8\)"),
        (lambda m: m(X, X, X, is_causal=True), RuntimeError, "is_causal=True only describes attn_mask"),
        (
            lambda m: m(X, X, X, attn_mask=minamp.ones(3, 4)),
            RuntimeError,
            r"attn_mask has shape \(3, 4\): give \(4, 4\) or \(6, 4, 4\)",
        ),
        (
            lambda m: m(X, X, X, key_padding_mask=minamp.ones(4, 3) > 0),
            RuntimeError,
            r"key_padding_mask has shape \(4, 3\): give \(3, 4\)",
        ),
    ],
)
def test_attention_layers_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call(nn.MultiheadAttention(8, 2))
