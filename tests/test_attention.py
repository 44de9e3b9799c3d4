"""scaled_dot_product_attention: gradients in float64, masks, and one rounding in half."""

import math

import numpy as np
import pytest

import minamp
from minamp import bfloat16, float16, float32, float64, tensor
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
    assert (
        np.abs(widen(y._data) - right) <= 0.51 * ulp(right, dtype) + 1e-6
    ).all()  # 1e-6: float32 on the way


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
