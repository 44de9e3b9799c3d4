"""Losses with a margin, and likelihoods of counts and measurements: gradients, what stands at the margin, and what is refused."""

import math

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import float16, float32, float64, nn, tensor
from minamp.autograd import check_grads
from minamp.methods import OPS
from minamp.tensor import Tensor

_rng = np.random.default_rng(3)
SIGNS = Tensor(np.array([[1, -1, 1, 0], [-1, -1, 1, 1]]))
CLASSES = Tensor(np.array([2, 0, 3]))
LABELS = Tensor(np.array([[3, 0, -1, 1], [-1, 0, 1, 2], [2, 2, 1, 0]]))
WEIGHT = Tensor(np.array([0.5, 1.0, 2.0, 3.0]))


def a(*shape):
    return _rng.standard_normal(shape)


def pos(*shape):
    return _rng.uniform(0.3, 1.7, shape)


GRADIENTS = {
    "soft_margin_loss": (F.soft_margin_loss, a(2, 4), a(2, 4)),
    "hinge_embedding_loss": (lambda x: F.hinge_embedding_loss(x, SIGNS, 0.7) ** 2, a(2, 4)),
    "margin_ranking_loss": (lambda x, y, t: F.margin_ranking_loss(x, y, t, 0.3), a(2, 4), a(1, 4), a(2, 4)),
    "cosine_embedding_loss": (
        lambda x, y: F.cosine_embedding_loss(x, y, SIGNS[0], -0.9, reduction="none"),
        a(4, 3),
        a(4, 3),
    ),
    "cosine_embedding_loss of vectors": (
        lambda x, y: F.cosine_embedding_loss(x, y, SIGNS[0, 0]),
        a(3),
        a(3),
    ),
    "triplet_margin_loss": (lambda *x: F.triplet_margin_loss(*x, swap=True), a(4, 3), a(4, 3), a(4, 3)),
    "triplet_margin_loss of order 1": (
        lambda *x: F.triplet_margin_loss(*x, 5.0, 1, reduction="none") ** 2,
        a(4, 3),
        a(4, 3),
        a(1, 3),
    ),
    "triplet_margin_with_distance_loss": (
        lambda *x: F.triplet_margin_with_distance_loss(
            *x, distance_function=lambda x, y: 1.0 - F.cosine_similarity(x, y), swap=True
        ),
        a(4, 3),
        a(4, 3),
        a(4, 3),
    ),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(x, CLASSES) ** 2, a(3, 4)),
    "multi_margin_loss of squares": (lambda x: F.multi_margin_loss(x, CLASSES, 2, 2.0, WEIGHT), a(3, 4)),
    "multilabel_margin_loss": (lambda x: F.multilabel_margin_loss(x, LABELS) ** 2, a(3, 4)),
    "poisson_nll_loss": (lambda x, t: F.poisson_nll_loss(x, t, full=True), a(2, 3), 2 * pos(2, 3)),
    "poisson_nll_loss of the mean": (
        lambda x, t: F.poisson_nll_loss(x, t, False, reduction="sum"),
        pos(2, 3),
        pos(3),
    ),
    "gaussian_nll_loss": (lambda x, t, v: F.gaussian_nll_loss(x, t, v, True), a(2, 3), a(2, 3), pos(2, 3)),
    "gaussian_nll_loss, var of rows": (
        lambda x, t, v: F.gaussian_nll_loss(x, t, v, reduction="none"),
        a(2, 3),
        a(2, 3),
        pos(2),
    ),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(case):
    function, *arrays = GRADIENTS[case]
    check_grads(function, *arrays)


# ------------------------------------------------------------------------------------------------------------------ values


def test_values():
    """Each as its formula says, entry by entry."""
    x, y, z = (tensor(a(2, 4)) for _ in range(3))
    none = {"reduction": "none"}
    for found, formula in (
        (F.soft_margin_loss(x, SIGNS, **none), lambda x, y, z, t: math.log(1 + math.exp(-t * x))),
        (
            F.hinge_embedding_loss(x, SIGNS, 0.5, **none),
            lambda x, y, z, t: (x if t != -1 else 0) + (max(0, 0.5 - x) if t != 1 else 0),
        ),
        (F.margin_ranking_loss(x, y, SIGNS, 0.3, **none), lambda x, y, z, t: max(0, 0.3 - t * (x - y))),
        (F.poisson_nll_loss(x, y, **none), lambda x, y, z, t: math.exp(x) - y * x),
        (
            F.gaussian_nll_loss(x, y, z.abs(), **none),
            lambda x, y, z, t: 0.5 * (math.log(abs(z)) + (x - y) ** 2 / abs(z)),
        ),
    ):
        wanted = np.vectorize(formula)(x._data, y._data, z._data, SIGNS._data)
        np.testing.assert_allclose(found._data, wanted, rtol=1e-12)
    cos = F.cosine_similarity(x.T, y.T)
    loss = F.cosine_embedding_loss(x.T, y.T, SIGNS[0], 0.1, reduction="none")
    wanted = [1 - cos[0].item(), max(0, cos[1].item() - 0.1), 1 - cos[2].item(), 0]
    np.testing.assert_allclose(loss._data, wanted, rtol=1e-9)
    near, far, between = F.pairwise_distance(x, y), F.pairwise_distance(x, z), F.pairwise_distance(y, z)
    for swap, away in ((False, far), (True, minamp.minimum(far, between))):
        loss = F.triplet_margin_loss(x, y, z, swap=swap, reduction="none")
        np.testing.assert_allclose(loss._data, np.maximum(1 + near._data - away._data, 0), rtol=1e-12)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_multi_margin_loss_row_by_row(p, weight):
    x = a(3, 4)
    wanted = []
    for row, right in zip(x, CLASSES.tolist(), strict=True):
        total = sum(max(0, 0.5 - row[right] + row[i]) ** p for i in range(4) if i != right)
        wanted.append(total / 4 * (1 if weight is None else weight[right].item()))
    for reduction, value in (("none", wanted), ("sum", sum(wanted)), ("mean", sum(wanted) / 3)):
        loss = F.multi_margin_loss(Tensor(x), CLASSES, p, 0.5, weight, reduction=reduction)
        np.testing.assert_allclose(loss._data, value, rtol=1e-12)
    for target, shape in ((CLASSES[0], ()), (CLASSES[:1], (1,))):  # one row is a vector
        one = F.multi_margin_loss(Tensor(x[0]), target, p, 0.5, weight, reduction="none")
        assert one.shape == shape and one.item() == pytest.approx(wanted[0])


def test_multilabel_margin_loss_row_by_row():
    """A row's labels end at the first -1, and one that stands there twice counts twice."""
    x = a(4, 4)
    target = np.array([[3, 0, -1, 1], [-1, 0, 1, 2], [2, 2, 1, -1], [1, 3, 0, 2]])
    wanted = []
    for row, labels in zip(x, ([3, 0], [], [2, 2, 1], [1, 3, 0, 2]), strict=True):
        others = set(range(4)) - set(labels)
        wanted.append(sum(max(0, 1 - row[j] + row[i]) for j in labels for i in others) / 4)
    assert wanted[0] > 0 and wanted[1] == wanted[3] == 0
    for reduction, value in (("none", wanted), ("sum", sum(wanted)), ("mean", sum(wanted) / 4)):
        loss = F.multilabel_margin_loss(Tensor(x), Tensor(target), reduction=reduction)
        np.testing.assert_allclose(loss._data, value, rtol=1e-12)
    one = F.multilabel_margin_loss(Tensor(x[2]), Tensor(target[2]))
    assert one.shape == () and one.item() == pytest.approx(wanted[2])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_class_ids_of_any_integer_dtype(dtype):
    """A uint8 index would be a mask elsewhere."""
    x, ids = tensor(a(3, 4)), Tensor(CLASSES._data.astype(dtype))
    for options in ({}, {"weight": WEIGHT}):
        assert (
            F.multi_margin_loss(x, ids, **options).item() == F.multi_margin_loss(x, CLASSES, **options).item()
        )
    full = Tensor(np.array([[1, 2, 0, 3], [3, 0, 1, 2], [0, 1, 2, 3]], dtype))
    assert F.multilabel_margin_loss(x, full).item() == 0


AT_THE_MARGIN = {  # the gradient for x = 0, with the loss exactly 0
    "hinge_embedding_loss": (lambda x: F.hinge_embedding_loss(x, tensor([-1]), 0.0), -1),
    "margin_ranking_loss": (lambda x: F.margin_ranking_loss(x, tensor([0.0]), tensor([1.0])), -1),
    "cosine_embedding_loss": (
        lambda x: F.cosine_embedding_loss(
            minamp.cat([x, tensor([1.0])])[None], tensor([[1.0, 0.0]]), tensor([-1])
        ),
        1,
    ),
    "triplet_margin_loss": (
        lambda x: F.triplet_margin_loss(x, tensor([1.0]), tensor([2.0]), eps=0.0),
        0,  # both distances grow alike
    ),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(minamp.cat([x, tensor([-1.0])]), tensor(0)), 0),
    "multilabel_margin_loss": (
        lambda x: F.multilabel_margin_loss(minamp.cat([x, tensor([-1.0])]), tensor([0, -1])),
        0,
    ),
}


@pytest.mark.parametrize("name", AT_THE_MARGIN)
def test_exactly_at_the_margin_the_gradient_is_pytorchs(name):
    function, slope = AT_THE_MARGIN[name]
    x = tensor([0.0], requires_grad=True)
    loss = function(x)
    loss.backward()
    assert loss.item() == 0 and x.grad.item() == slope


def test_soft_margin_loss_does_not_overflow():
    x = tensor([-200.0, 200.0, -1000.0], requires_grad=True)
    loss = F.soft_margin_loss(x, tensor([1, 1, -1]), reduction="none")
    loss.sum().backward()
    assert loss.tolist() == [200, 0, 0] and x.grad.tolist() == [-1, 0, 0]


def test_stirlings_term_counts_above_one_alone():
    x = minamp.zeros(4, dtype=float64)
    t = tensor([0.0, 1.0, 2.0, 9.0], dtype=float64, requires_grad=True)
    loss = F.poisson_nll_loss(x, t, full=True, reduction="none")
    wanted = [
        1 + (n * math.log(n) - n + 0.5 * math.log(2 * math.pi * n) if n > 1 else 0) for n in (0, 1, 2, 9)
    ]
    np.testing.assert_allclose(loss._data, wanted, rtol=1e-14)
    loss.sum().backward()
    np.testing.assert_allclose(t.grad._data, [0, 0, math.log(2) + 0.25, math.log(9) + 1 / 18], rtol=1e-14)
    counts = F.poisson_nll_loss(x, t.detach().long(), full=True)  # which may be integers
    assert counts.dtype == float64 and counts.item() == pytest.approx(loss.mean().item(), rel=1e-6)


def test_forms_of_a_variance():
    x, t = tensor(a(2, 3)), tensor(a(2, 3))
    for var in (tensor(pos(2)), tensor(pos(2, 1)), tensor(pos(1, 3)), 0.5, 2, tensor(pos(2, 3))):
        whole = var if isinstance(var, Tensor) else minamp.full((2, 3), float(var), dtype=float64)
        whole = (whole[:, None] if whole.ndim == 1 else whole).expand(2, 3).clone()
        assert F.gaussian_nll_loss(x, t, var).item() == F.gaussian_nll_loss(x, t, whole).item()
    one = F.gaussian_nll_loss(tensor(1.0), tensor(3.0), tensor(4.0), full=True)
    assert one.shape == () and one.item() == pytest.approx(0.5 * (math.log(4) + 1 + math.log(2 * math.pi)))


def test_a_variance_below_eps_counts_as_eps_and_still_gets_a_gradient():
    var = tensor([0.0, 1.0], requires_grad=True)
    F.gaussian_nll_loss(tensor([1.0, 1.0]), tensor([0.0, 0.0]), var, eps=0.5, reduction="sum").backward()
    assert var.tolist() == [0, 1] and var.grad.tolist() == [0.5 * (2 - 4), 0]


def test_losses_of_nothing():
    x, ids = minamp.zeros(0, 3, requires_grad=True), tensor(np.zeros(0, int))
    for name, args in (
        ("soft_margin_loss", (x,)),
        ("hinge_embedding_loss", (x,)),
        ("margin_ranking_loss", (x, x)),
        ("cosine_embedding_loss", (x, ids)),
        ("triplet_margin_loss", (x, x)),
        ("multi_margin_loss", (ids,)),
        ("multilabel_margin_loss", (minamp.zeros(0, 3, dtype=np.int64),)),
        ("poisson_nll_loss", (x,)),
        ("gaussian_nll_loss", (x, x)),
    ):
        x.grad = None
        loss = OPS[name](x, *args)
        loss.backward()
        assert math.isnan(loss.item()) and x.grad.shape == (0, 3), name
        assert OPS[name](x, *args, reduction="sum").item() == 0


# ----------------------------------------------------------------------------------------------------------------- regions


def test_inside_a_region_nothing_is_computed_in_half():
    """Squares of 300 are inf in float16, as e**12 is."""
    x = minamp.full((2, 3), 300.0, dtype=float16).requires_grad_()
    y = -x.detach()
    with minamp.autocast():
        losses = {
            "cosine": F.cosine_embedding_loss(x, y, tensor([1, 1])),
            "triplet": F.triplet_margin_loss(x, y, x.detach()),
            "multi": F.multi_margin_loss(x, tensor([0, 1]), 2, 600.0),
            "poisson": F.poisson_nll_loss(x / 25, y),
            "gaussian": F.gaussian_nll_loss(x, y, minamp.ones(2, 3, dtype=float16)),
            "hinge": F.hinge_embedding_loss(x * 200, minamp.ones(2, 3), reduction="sum"),
        }
    wanted = {
        "cosine": 2,
        "triplet": 600 * 3**0.5 + 1,
        "multi": 240000,
        "poisson": math.exp(12) + 3600,
        "gaussian": 180000,
        "hinge": 360000,
    }
    for name, loss in losses.items():
        assert loss.dtype == float32 and loss.item() == pytest.approx(wanted[name], rel=1e-5), name
    losses["triplet"].backward()
    assert x.grad.dtype == float16
    assert minamp.is_autocast_enabled() is False


def test_what_a_distance_function_computes_is_autocast():
    """As PyTorch, which has this loss on no list; triplet_margin_loss is on one."""
    seen, w, x = [], minamp.ones(3, 2), minamp.ones(4, 3)

    def distance(x, y):
        seen.append((x @ w).dtype)
        return F.pairwise_distance(x, y)

    with minamp.autocast():
        F.triplet_margin_with_distance_loss(x, x, x, distance_function=distance, swap=True)
    assert seen == [float16] * 3


# ------------------------------------------------------------------------------------------------------------------ errors


def test_errors():
    x, ids = minamp.zeros(3, 4), tensor([0, 1, 2])
    labels = minamp.zeros(3, 4, dtype=np.int64)
    for call, error, text in (
        (lambda: F.margin_ranking_loss(x, x, x[0]), RuntimeError, r"margin_ranking_loss: .*target \(4,\)"),
        (lambda: F.cosine_embedding_loss(x, x, x), RuntimeError, r"cosine_embedding_loss: .*with target \(3, 4\): give"),
        (lambda: F.cosine_embedding_loss(x, x, ids[0]), RuntimeError, "cosine_embedding_loss: inputs"),
        (lambda: F.cosine_embedding_loss(x[0], x, ids[0]), RuntimeError, "cosine_embedding_loss: inputs"),
        (lambda: F.triplet_margin_loss(x, x, x[0]), RuntimeError, r"triplet_margin_loss: .*same number of dim.*negative \(4,\)"),
        (lambda: F.triplet_margin_loss(x, x, x, 0), ValueError, "triplet_margin_loss: margin must be positive, got 0"),
        (lambda: F.triplet_margin_with_distance_loss(x, x, x[0]), RuntimeError, "triplet_margin_with_distance_loss: .*negative"),
        (lambda: F.triplet_margin_with_distance_loss(x, x, x, margin=-1), ValueError, "must be positive, got -1"),
        (lambda: F.multi_margin_loss(x, ids, 3), ValueError, "multi_margin_loss: p must be 1 or 2, got 3"),
        (lambda: F.multi_margin_loss(x[None], ids), RuntimeError, r"multi_margin_loss: input \(1, 3, 4\) must be \(N, C\)"),
        (lambda: F.multi_margin_loss(x[:, :0], ids), RuntimeError, "with one class or more"),
        (lambda: F.multi_margin_loss(x, ids[:2]), RuntimeError, r"target \(2,\) does not fit input \(3, 4\)"),
        (lambda: F.multi_margin_loss(x, ids[:, None]), RuntimeError, r"target \(3, 1\) does not fit"),
        (lambda: F.multi_margin_loss(x, ids + 2), RuntimeError, r"multi_margin_loss: class id 4 is not in \[0, 4\)"),
        (lambda: F.multi_margin_loss(x, ids - 1), RuntimeError, "class id -1 is not in"),
        (lambda: F.multi_margin_loss(x, ids.float()), RuntimeError, "must be integer, this one is float32: use target.long"),
        (lambda: F.multi_margin_loss(x.long(), ids), RuntimeError, "multi_margin_loss: not defined for int64"),
        (lambda: F.multi_margin_loss(x, ids, weight=x), ValueError, r"weight must be one-dimensional, .*\(3, 4\)"),
        (lambda: F.multi_margin_loss(x, ids, weight=x[:, 0]), RuntimeError, r"weight has shape \(3,\), the input has 4 classes"),
        (lambda: F.multilabel_margin_loss(x, labels[:, :3]), RuntimeError, r"target \(3, 3\) must have the shape of input"),
        (lambda: F.multilabel_margin_loss(x, labels + 4), RuntimeError, r"multilabel_margin_loss: class id 4 is not in \[-1"),
        (lambda: F.multilabel_margin_loss(x, labels - 2), RuntimeError, "class id -2 is not in"),
        (lambda: F.multilabel_margin_loss(x, x), RuntimeError, "must be integer, this one is float32"),
        (lambda: F.multilabel_margin_loss(x[None], labels[None]), RuntimeError, r"\(1, 3, 4\) must be \(N, C\)"),
        (lambda: F.soft_margin_loss(x.long(), labels), RuntimeError, "soft_margin_loss: not defined for int64"),
        (lambda: F.gaussian_nll_loss(x, x, x - 1), ValueError, "gaussian_nll_loss: var holds negative values"),
        (lambda: F.gaussian_nll_loss(x, x, -0.5), ValueError, "gaussian_nll_loss: var holds negative values"),
        (lambda: F.gaussian_nll_loss(x, x, x[0]), ValueError, r"var \(4,\) does not fit input \(3, 4\): give that shape, \(3,\)"),
        (lambda: F.gaussian_nll_loss(x, x, x[:1, :1]), ValueError, r"var \(1, 1\) does not fit"),
        (lambda: F.hinge_embedding_loss(x, [1, -1]), TypeError, "hinge_embedding_loss: target is a list, not a Tensor"),
        (lambda: F.soft_margin_loss(x, [1, -1]), TypeError, "soft_margin_loss: target is a list, not a Tensor"),
        (lambda: F.poisson_nll_loss(x, [1, -1]), TypeError, "poisson_nll_loss: target is a list, not a Tensor"),
        (lambda: F.multi_margin_loss(x, [0, 1, 2]), TypeError, "multi_margin_loss: target is a list, not a Tensor"),
        (lambda: nn.TripletMarginLoss(-1), ValueError, "TripletMarginLoss: margin must be positive, got -1"),
        (lambda: nn.TripletMarginWithDistanceLoss(margin=0), ValueError, "TripletMarginWithDistanceLoss: margin must be"),
        (lambda: nn.MultiMarginLoss(3), ValueError, "MultiMarginLoss: p must be 1 or 2, got 3"),
        (lambda: nn.MultiMarginLoss(weight=x), ValueError, "MultiMarginLoss: weight must be one-dimensional"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize("name", sorted({case.split()[0].rstrip(",") for case in GRADIENTS}))
def test_reductions(name):
    x = minamp.ones(3, 4)
    args = {
        "multi_margin_loss": (CLASSES,),
        "multilabel_margin_loss": (LABELS,),
        "cosine_embedding_loss": (x, CLASSES),
    }
    args = args.get(name, (x, x) if name[:3] in ("tri", "gau", "mar") else (x,))
    none = OPS[name](x, *args, reduction="none")
    assert OPS[name](x, *args).item() == pytest.approx(none.mean().item())
    assert OPS[name](x, *args, reduction="sum").item() == pytest.approx(none.sum().item())
    with pytest.raises(
        ValueError, match=f"^{name}: reduction must be one of 'mean', 'sum', 'none', got 'avg'"
    ):
        OPS[name](x, *args, reduction="avg")


def test_layers_call_their_losses():
    x, y, z, s = tensor(a(3, 4)), tensor(a(3, 4)), tensor(a(3, 4)), tensor([1, -1, 1])
    r = {"reduction": "none"}
    for layer, inputs, function, options in (
        (nn.PoissonNLLLoss(False, True, eps=0.1, **r), (x.abs(), z.abs()), F.poisson_nll_loss,
         {"log_input": False, "full": True, "eps": 0.1}),
        (nn.GaussianNLLLoss(full=True, eps=0.1, **r), (x, y, z.abs()), F.gaussian_nll_loss, {"full": True, "eps": 0.1}),
        (nn.SoftMarginLoss(**r), (x, y), F.soft_margin_loss, {}),
        (nn.HingeEmbeddingLoss(2.0, **r), (x, s[:, None]), F.hinge_embedding_loss, {"margin": 2.0}),
        (nn.MarginRankingLoss(2.0, **r), (x, y, z), F.margin_ranking_loss, {"margin": 2.0}),
        (nn.CosineEmbeddingLoss(-0.5, **r), (x, y, s), F.cosine_embedding_loss, {"margin": -0.5}),
        (nn.TripletMarginLoss(2.0, 1, 0.1, True, **r), (x, y, z), F.triplet_margin_loss,
         {"margin": 2.0, "p": 1, "eps": 0.1, "swap": True}),
        (nn.TripletMarginWithDistanceLoss(margin=2.0, swap=True, **r), (x, y, z), F.triplet_margin_loss,
         {"margin": 2.0, "swap": True}),
        (nn.MultiMarginLoss(2, 0.5, WEIGHT, **r), (x, CLASSES), F.multi_margin_loss,
         {"p": 2, "margin": 0.5, "weight": WEIGHT}),
        (nn.MultiLabelMarginLoss(**r), (x, LABELS), F.multilabel_margin_loss, {}),
    ):  # fmt: skip
        assert layer(*inputs).tolist() == function(*inputs, **options, **r).tolist(), layer
    assert list(nn.MultiMarginLoss(weight=WEIGHT).state_dict()) == ["weight"]
