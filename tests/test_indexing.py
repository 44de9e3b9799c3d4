"""Picking and placing: gradients against central differences, torch's rules for places, and the texts of the errors."""

import math

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import bfloat16, float16, float32, stack, tensor
from minamp.autograd import check_grads
from minamp.methods import OPS
from minamp.record import observe
from minamp.tensor import Tensor

_rng = np.random.default_rng(3)
# the edges of float16: nothing that moves values may lose one
EDGES = [0.0, 65504.0, -65504.0, 148.0, -148.0, 6e4, -6e4]


def a(*shape):
    return _rng.standard_normal(shape)


def at(values):
    return Tensor(np.array(values))


PLACES = at([[0, 2, 2], [1, 0, 1]])
MASK = at([[True, False, True], [False, False, True]])


def assigned(x, v, w):
    y = x * 1.0
    y[0] = v
    y[:, [0, 2]] = w
    return y * y


def line(name, function, *arrays):
    return pytest.param(function, arrays, id=name)


@pytest.mark.parametrize(
    "function, arrays",
    [
        line("index", lambda x: x[[0, 0, 1], 1:] ** 2, a(2, 3)),
        line("index rows", lambda x: x[at([[1, 1], [0, -1]])] ** 2, a(2, 3)),
        line("index mask", lambda x: x[MASK] ** 2, a(2, 3)),
        line("index_put", lambda x, v: x.index_put((MASK,), v) ** 2, a(2, 3), a(3)),
        line("index_put number", lambda x, v: x.index_put((MASK,), v) ** 2, a(2, 3), a()),
        line("index_put rows", lambda x, v: x.index_put((at([1, 0]), at([0, 2])), v) ** 2, a(2, 3), a(1)),
        line(
            "index_put accumulate",
            lambda x, v: x.index_put((at([1, 0, 1]),), v, accumulate=True) ** 2,
            a(2, 3),
            a(3, 1),
        ),
        line("x[key] = v", assigned, a(2, 3), a(1, 1, 3), a(2, 1)),
        line("gather", lambda x: OPS["gather"](x, 1, PLACES) ** 2, a(2, 3)),
        line("scatter_add", lambda x, s: x.scatter_add(1, PLACES, s) ** 2, a(2, 3), a(2, 3)),
        line("scatter_add larger src", lambda x, s: x.scatter_add(0, at([[1, 0]]), s) ** 2, a(2, 3), a(2, 4)),
        line("scatter", lambda x, s: x.scatter(1, at([[2, 0], [1, 2]]), s) ** 2, a(2, 3), a(2, 2)),
        line("scatter number", lambda x: x.scatter(1, at([[2], [1]]), 4.0) ** 2, a(2, 3)),
        line("index_select", lambda x: x.index_select(1, at([2, 0, 2])) ** 2, a(2, 3)),
        line(
            "index_add", lambda x, s: x.index_add(1, at([2, 0, 2]), s, alpha=-3) ** 2, a(2, 3, 2), a(2, 3, 2)
        ),
        line("masked_fill", lambda x: x.masked_fill(MASK, 2.0) ** 2, a(2, 3)),
        line("masked_fill tensor", lambda x, v: x.masked_fill(MASK, v) ** 2, a(3), a()),
        line("tril", lambda x: x.tril(-1) ** 2, a(2, 3, 3)),
        line("triu", lambda x: x.triu(1) ** 2, a(3, 4)),
        line("diag of a matrix", lambda x: x.diag(-1) ** 2, a(4, 3)),
        line("diag of a vector", lambda x: x.diag(1) ** 2, a(3)),
        line("embedding", lambda w: F.embedding(at([[1, 1], [0, 3]]), w, padding_idx=2) ** 2, a(4, 2)),
        line("sort", lambda x: x.sort(0, descending=True).values ** 2, a(4, 2)),
        line("topk", lambda x: x.topk(2).values ** 2, a(2, 4)),
        line("pad", lambda x: F.pad(x, (1, -1, 0, 2), value=3.0) ** 2, a(2, 3)),
        line("pad reflect", lambda x: F.pad(x, (2, 1, 1, 0), mode="reflect") ** 2, a(2, 3)),
        line("pad replicate", lambda x: F.pad(x, (2, 1, 1, 0), mode="replicate") ** 2, a(2, 3)),
        line("pad circular", lambda x: F.pad(x, (2, 1, 1, 0), mode="circular") ** 2, a(2, 3)),
        line("flip", lambda x: x.flip(0, 1) * x, a(2, 3)),
        line("split", lambda x: x.split([1, 2], 1)[1] * x.split(2, 1)[0], a(2, 3)),
        line("chunk", lambda x: x.chunk(2)[1] ** 2, a(3, 2)),
        line("unbind", lambda x: x.unbind(1)[1] ** 2, a(3, 2)),
        line("split many", lambda x: stack([p.sum(0) ** i for i, p in enumerate(x.split(2))]), a(23, 2)),
        line("unbind many", lambda x: stack(x.unbind(1)[::-1]) ** 2, a(2, 19)),
    ],
)
def test_gradients(function, arrays):
    check_grads(function, *arrays)


# ---- x[key] = v inside the record


def test_an_assignment_takes_part_in_the_record():
    x, v = tensor([1.0, 2.0, 3.0], requires_grad=True), tensor(5.0, requires_grad=True)
    y = x * 2
    y[1] = v * 3
    assert y.tolist() == [2, 15, 6] and y.grad_fn.op.name == "index_put"
    (y * tensor([1.0, 10.0, 100.0])).sum().backward()
    assert x.grad.tolist() == [2, 0, 200] and v.grad.item() == 30


def test_a_tensor_without_history_takes_over_that_of_the_value():
    x, v = minamp.zeros(3, dtype=float16), tensor([1.5, 2.5], requires_grad=True)
    x[1:] = v
    assert x.dtype == float16 and x.requires_grad and x.tolist() == [0, 1.5, 2.5]
    x.sum().backward()
    assert v.grad.dtype == float32 and v.grad.tolist() == [1, 1]


def test_assignments_are_never_autocast():
    x, v = minamp.zeros(2), tensor([2.0**-30], requires_grad=True)
    with minamp.autocast():
        x[:1] = v
    assert x.dtype == float32 and x.tolist() == [2.0**-30, 0]


def test_what_an_assignment_refuses():
    leaf = tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(RuntimeError, match=r"x\[key\] = value: in-place write to a leaf.*no_grad"):
        leaf[0] = 5.0
    with pytest.raises(RuntimeError, match=r"add_: in-place write to a leaf.*no_grad"):
        leaf[:1].add_(1.0)  # into a view of one
    with pytest.raises(RuntimeError, match=r"add_: several elements.*share one place.*clone"):
        minamp.ones(1, 2).expand(3, 2).add_(2.0)
    with pytest.raises(RuntimeError, match=r"x\[key\] = value: several elements.*clone"):
        minamp.ones(1, 2).expand(3, 2)[0] = 2.0
    for key in (tensor([0, 1]), [0, 1], tensor([True, True]), (slice(None), tensor([0, 0]))):
        x = minamp.zeros(2, 2)
        with pytest.raises(RuntimeError, match=r"value is float16, x float32: cast it with value.to"):
            x[key] = minamp.ones(2, 2, dtype=float16)
        assert not x.any()
    # these are cast, as in torch
    x[:1], x[0] = (minamp.ones(1, 2, dtype=float16), minamp.ones(2, dtype=float16))
    with minamp.no_grad():
        leaf[0] = 5.0
    assert leaf.tolist() == [5, 2] and leaf.is_leaf
    square = leaf * 1
    y = square * square
    square[0] = 0.0
    with pytest.raises(RuntimeError, match="mul: argument 'a'.*written in place"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=r"index_put: shapes don't fit"):
        square[:1] = leaf


def test_a_copy_can_be_assigned_to():
    x = tensor([1.0, 2.0, 3.0], requires_grad=True)
    picked = (x * 1)[[0, 2]]
    picked[0] = x[1] * 10
    picked.sum().backward()
    assert picked.tolist() == [20, 3] and x.grad.tolist() == [0, 10, 1]
    base = x * 1
    y = base[[0, 1]] ** 2
    base[0] = 7.0  # y was made from a copy, so its gradient is still right
    y.sum().backward()
    assert x.grad.tolist() == [2, 14, 1]


def test_in_place_forms():
    x = minamp.zeros(3, dtype=float16)
    assert x.masked_fill_(at([True, False, False]), -math.inf) is x and x.tolist() == [-math.inf, 0, 0]
    x.index_put_((at([1, 1]),), minamp.ones(2, dtype=float16), accumulate=True)
    x.scatter_add_(0, at([2]), minamp.ones(1, dtype=float16))
    assert x.tolist() == [-math.inf, 2, 1]


def test_ids_overwritten_before_backward_are_noticed():
    ids, w = at([0, 1]), minamp.ones(2, 2, requires_grad=True)
    y = F.embedding(ids, w)
    ids[0] = 1
    with pytest.raises(RuntimeError, match="embedding: argument 'ids'.*written in place"):
        y.sum().backward()


# ---- places named twice


@pytest.mark.parametrize("dtype, n", [(float16, 4096), (bfloat16, 1000)])
def test_sums_over_repeated_places_are_float32(dtype, n):
    ones, zeros = minamp.ones(n, dtype=dtype), minamp.zeros(2, dtype=dtype)
    same = Tensor(np.ones(n, int))
    assert zeros.scatter_add(0, same, ones).tolist() == [0, n]
    assert zeros.index_put((same,), ones, accumulate=True).tolist() == [0, n]
    for pick in (
        lambda w: F.embedding(same, w),
        lambda w: w[same],
        lambda w: OPS["gather"](w, 0, Tensor(np.ones((n, 1), int))),
        lambda w: w.index_select(0, same),
    ):
        weight = minamp.ones(2, 1, dtype=dtype, requires_grad=True)
        pick(weight).sum().backward()
        assert weight.grad.dtype == dtype and weight.grad.reshape(-1).tolist() == [0, n]


def test_a_sum_over_repeated_places_is_rounded_once_on_its_way():
    weight = minamp.ones(1, 1, dtype=float16, requires_grad=True)
    seen = []
    middle = weight * 1.0
    middle.register_hook(lambda g: seen.append(g.item()))
    F.embedding(Tensor(np.zeros(2049, int)), middle).sum().backward()
    assert seen == [2048] and weight.grad.item() == 2048  # 2049 lies between two halves


def test_index_put_and_scatter_add_promote():
    h, f, where = minamp.zeros(2, dtype=float16), minamp.ones(2), at([0, 1])
    for call in (lambda x, v: x.index_put((where,), v), lambda x, v: x.scatter_add(0, where, v)):
        with pytest.raises(RuntimeError, match="different dtypes.*float16.*float32.*autocast"):
            call(h, f)
        with minamp.autocast():
            assert call(h, f).dtype == call(f, h).dtype == float32 and call(h, h).dtype == float16
            with pytest.raises(RuntimeError, match="bfloat16.*can't be promoted"):
                call(h, f.bfloat16())


def test_scatters_follow_torch():
    x = minamp.zeros(2, 3)
    assert x.scatter(1, at([[2], [0]]), 5.0).tolist() == [[0, 0, 5], [5, 0, 0]]
    assert x.scatter_add(0, at([[1, 1, 0]]), minamp.ones(2, 3)).tolist() == [[0, 0, 1], [1, 1, 0]]
    assert x.scatter_(1, at([[1]]), 2.0) is x and x.tolist() == [[0, 2, 0], [0, 0, 0]]


@pytest.mark.parametrize("name", ["gather", "scatter_add"])
def test_what_gather_and_scatter_refuse(name):
    src = (minamp.ones(2, 3),) if name == "scatter_add" else ()

    def call(index):
        return OPS[name](minamp.zeros(2, 3), 1, index, *src)

    with pytest.raises(
        RuntimeError, match=rf"{name}: index 3 is out of bounds for dimension 1 of \(2, 3\): give 0 to 2"
    ):
        call(at([[0, 3], [0, 0]]))
    with pytest.raises(RuntimeError, match=f"{name}: index -1 is out of bounds"):
        call(at([[0, -1], [0, 0]]))
    with pytest.raises(RuntimeError, match=rf"{name}: index has shape \(2,\), input \(2, 3\)"):
        call(at([0, 1]))
    with pytest.raises(RuntimeError, match=rf"{name}: index \(3, 1\) must be no larger"):
        call(at([[0], [0], [0]]))
    with pytest.raises(RuntimeError, match=rf"{name}: index must hold integers.*float64: use index.long\(\)"):
        call(at([[0.0]]))
    with pytest.raises(IndexError, match=f"{name}: dim 2 is out of range"):
        OPS[name](minamp.zeros(2, 3), 2, at([[0]]), *src)


def test_what_the_others_refuse():
    x = minamp.zeros(2, 3)
    with pytest.raises(
        RuntimeError, match=r"scatter_add: index \(2, 2\) must be no larger than src \(2, 1\)"
    ):
        x.scatter_add(1, at([[0, 0], [0, 0]]), minamp.ones(2, 1))
    with pytest.raises(TypeError, match=r"index_put: indices must be a tuple of tensors, got Tensor: write"):
        x.index_put(at([0]), minamp.ones(3))
    with pytest.raises(IndexError, match="index_select: index 2 is out of bounds for dimension 0"):
        x.index_select(0, at([2]))
    with pytest.raises(IndexError, match=r"index_select: index has shape \(1, 1\): give a vector"):
        x.index_select(0, at([[0]]))
    with pytest.raises(RuntimeError, match=r"tril: needs at least 2 dimensions.*\(2,\)"):
        minamp.zeros(2).tril()
    with pytest.raises(RuntimeError, match="topk: k 4 is out of range, dimension 1.*3 values"):
        x.topk(4)
    with pytest.raises(RuntimeError, match=r"flip: dims \(0, 0\) name a dimension twice"):
        x.flip(0, -2)
    with pytest.raises(RuntimeError, match=r"split: sizes \[1, 1\] must sum to 3"):
        x.split([1, 1], 1)
    with pytest.raises(RuntimeError, match="chunk: chunks must be at least 1, got 0"):
        x.chunk(0)


def test_index_add_adds_slices():
    x = minamp.zeros(2, 3, dtype=float16)
    rows = tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0]])
    assert x.index_add(0, at([1, 0, 1]), rows.half()).tolist() == [[10, 20, 30], [101, 202, 303]]
    assert x.index_add(-1, at([2, 0]), rows[:2, :2].half(), alpha=2).tolist() == [[4, 0, 2], [40, 0, 20]]
    assert x.tolist() == [[0] * 3] * 2 and x.index_add_(0, at(1), rows[:1].half()) is x
    assert x.tolist() == [[0, 0, 0], [1, 2, 3]]
    counts = minamp.zeros(3, dtype=np.int64)
    assert counts.index_add_(0, at([2, 0, 2]), minamp.ones(3, dtype=np.int64)).tolist() == [1, 0, 2]
    n = 4096  # in half the sum would stand still at 2048
    assert x[0].index_add(0, at([1] * n), minamp.ones(n, dtype=float16)).tolist() == [0, n, 0]


def test_index_add_names_what_does_not_fit():
    x, one = minamp.zeros(2, 3), minamp.ones(1, 3)
    with pytest.raises(
        RuntimeError, match=r"index_add: source is float16, input float32: cast it with source.to"
    ):
        x.index_add(0, at([0]), one.half())
    with pytest.raises(
        RuntimeError, match=r"index_add: source has shape \(1, 3\).* 2 places .*give source \(2, 3\)"
    ):
        x.index_add(0, at([0, 1]), one)
    with pytest.raises(RuntimeError, match=r"index_add: .*input at least one dimension"):
        minamp.zeros(()).index_add(0, at([0]), one[0, :1])
    for bad in (2, -1):
        with pytest.raises(IndexError, match=rf"index_add: index {bad} is out of bounds for dimension 0"):
            x.index_add(0, at([bad]), one)
    with pytest.raises(RuntimeError, match="index_add: index must hold integers, this one is float32"):
        x.index_add(0, tensor([0.0]), one)


def test_nonzero_and_where_alone_say_where():
    for dtype in (float32, float16, minamp.bfloat16, np.int64):
        x = tensor([[1.0, 0.0, -2.0], [0.0, 3.0, -0.0]]).to(dtype)
        assert x.nonzero().tolist() == [[0, 0], [0, 2], [1, 1]] and x.nonzero().dtype == np.int64
        for rows, columns in (
            minamp.nonzero(x, as_tuple=True),
            minamp.where(x),
            minamp.where(condition=x != 0),
        ):
            assert rows.tolist() == [0, 0, 1] and columns.tolist() == [0, 2, 1]
    assert minamp.zeros(2, 3).nonzero().shape == (0, 2)
    # a number has no dimension to name, but as_tuple one place
    assert tensor(5.0).nonzero().shape == (1, 0) and tensor(0.0).nonzero().shape == (0, 0)
    assert [t.tolist() for t in tensor(5.0).nonzero(as_tuple=True)] == [[0]]
    with pytest.raises(TypeError, match="where: other is a NoneType, not a Tensor"):
        minamp.where(x > 0, 1.0)


def test_diag_of_vectors_and_matrices():
    x = tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert [x.diag(k).tolist() for k in (-2, -1, 0, 1, 2, 3)] == [[], [4], [1, 5], [2, 6], [3], []]
    assert minamp.diag(tensor([7, 8]), -1).tolist() == [[0, 0, 0], [7, 0, 0], [0, 8, 0]]
    assert minamp.diag(input=tensor([7, 8]), diagonal=1).tolist() == [[0, 7, 0], [0, 0, 8], [0, 0, 0]]
    assert minamp.diag(x[0].half()).dtype == float16 and minamp.diag(tensor([7, 8])).dtype == np.int64
    with pytest.raises(RuntimeError, match=r"diag: input has shape \(\): give a vector or a matrix"):
        minamp.diag(tensor(1.0))


# ---- masked_fill


@pytest.mark.parametrize(
    "value, dtype", [(-1e9, float16), (65505.0, float16), (4e38, bfloat16), (1e39, float32)]
)
def test_a_value_that_the_format_can_not_hold(value, dtype):
    x, mask = minamp.zeros(2, dtype=dtype), at([True, False])
    limit = {float16: "65504", bfloat16: "3.38953e.38", float32: "3.40282e.38"}[dtype]
    text = rf"masked_fill: value {str(value).replace('+', '.')} can't be held by {dtype}, whose limits are \+-{limit}"
    for given in (value, tensor(value, dtype=np.float64)):
        with pytest.raises(RuntimeError, match=text + r".*use -?[\d.e+]+ or -?inf, or x\.float\(\)"):
            x.masked_fill(mask, given)
    assert x.float().double().masked_fill(mask, value).tolist() == [value, 0]
    for name, call in (
        ("constant_pad_nd", lambda: F.pad(x, (1, 1), value=value)),
        ("scatter", lambda: x.scatter(0, at([0]), value)),
    ):
        with pytest.raises(RuntimeError, match=f"{name}: value"):
            call()


def test_masked_fill_keeps_the_format():
    x = minamp.ones(2, 2, dtype=float16, requires_grad=True)
    y = x.masked_fill(at([True, False]), -math.inf)
    assert y.dtype == float16 and y.tolist() == [[-math.inf, 1]] * 2
    OPS["softmax"](y, 1).sum().backward()
    assert np.isfinite(x.grad.numpy().astype(float)).all()
    assert tensor([1, 2]).masked_fill(at([True, False]), 7.9).tolist() == [7, 2]
    with pytest.raises(
        RuntimeError, match=r"masked_fill: mask must be a bool tensor, got float32: use mask.bool\(\)"
    ):
        x.masked_fill(minamp.ones(2), 0.0)
    with pytest.raises(RuntimeError, match=r"masked_fill: value must be a number or a 0-dim.*\(2,\).*where"):
        x.masked_fill(at([True, False]), minamp.ones(2))


# ---- embedding, one_hot


def test_embedding():
    w = tensor(np.arange(6.0).reshape(3, 2), dtype=float16, requires_grad=True)
    ids = at([[2, 0], [2, 1]])
    y = F.embedding(ids, w, padding_idx=-2)
    assert y.dtype == float16 and y.shape == (2, 2, 2) and y[0, 0].tolist() == [4, 5]
    y.sum().backward()
    assert w.grad.tolist() == [[1, 1], [0, 0], [2, 2]]
    for bad in (3, -1):
        with pytest.raises(
            IndexError, match=f"embedding: id {bad} is out of range for a table of 3 rows: give 0 to 2"
        ):
            F.embedding(at([0, bad]), w)
    with pytest.raises(
        RuntimeError, match=r"embedding: ids must be integers, these are float32: use input.long\(\)"
    ):
        F.embedding(minamp.ones(2), w)
    with pytest.raises(AssertionError, match="embedding: padding_idx 3 is outside a table of 3 rows"):
        F.embedding(ids, w, padding_idx=3)


def test_embedding_of_no_ids():
    w = minamp.ones(3, 2, requires_grad=True)
    F.embedding(Tensor(np.zeros((0, 4), int)), w).sum().backward()
    assert w.grad.tolist() == [[0, 0]] * 3


def test_one_hot():
    assert F.one_hot(at([1, 0])).tolist() == [[0, 1], [1, 0]]
    assert F.one_hot(at(1), 3).tolist() == [0, 1, 0] and F.one_hot(at([[1]]), 3).shape == (1, 1, 3)
    for ids, classes, text in (
        ([4], 3, "id 4 does not fit num_classes 3: give 5 or more"),
        ([-4], -1, "must not be negative, found -4"),
        ([1.0], -1, r"must be int64, these are float64: use input.long\(\)"),
        (np.zeros(0, int), -1, "give num_classes"),
    ):
        with pytest.raises(RuntimeError, match=f"one_hot: .*{text}"):
            F.one_hot(at(ids), classes)


# ---- orders


@pytest.mark.parametrize("dtype", [float16, bfloat16, float32], ids=str)
def test_orders_are_stable_and_nan_is_the_largest(dtype):
    x = tensor([1.0, 1.0, math.nan, 0.0, -math.inf], dtype=dtype)
    assert x.argsort().tolist() == [4, 3, 0, 1, 2]
    assert x.argsort(descending=True).tolist() == [2, 0, 1, 3, 4]
    best, worst = x.topk(3), x.topk(2, largest=False)
    assert (
        best.indices.tolist() == [2, 0, 1]
        and best.values.dtype == dtype
        and best.values[1:].tolist() == [1, 1]
    )
    assert worst.values.tolist() == [-math.inf, 0] and worst.indices.tolist() == [4, 3]
    assert best.indices.dtype == np.int64
    number = tensor(2.0, dtype=dtype)
    assert number.topk(1).values.item() == number.sort().values.item() == 2


# ---- pads, parts


def test_pads():
    x = tensor(np.arange(6.0).reshape(2, 3))
    assert F.pad(x, (1, 0), mode="reflect").tolist() == [[1, 0, 1, 2], [4, 3, 4, 5]]
    assert F.pad(x, (0, 1), mode="replicate").tolist() == [[0, 1, 2, 2], [3, 4, 5, 5]]
    assert F.pad(x, (2, 0), mode="circular").tolist() == [[1, 2, 0, 1, 2], [4, 5, 3, 4, 5]]
    assert F.pad(x, (-1, 1, 1, -1), value=9.0).tolist() == [[9, 9, 9], [1, 2, 9]]
    assert F.pad(tensor([1, 2]), (1, 1)).tolist() == [0, 1, 2, 0]
    for pad, mode, value, error, text in (
        (
            (3, 0),
            "reflect",
            None,
            RuntimeError,
            r"pad: 'reflect' with \(3, 0\) does not fit dimension 1 of \(2, 3\)",
        ),
        ((4, 0), "circular", None, RuntimeError, "pad: 'circular' with"),
        ((1, 0), "reflect", 1.0, RuntimeError, "pad: mode 'reflect' takes no value"),
        ((1, 0), "mirror", None, NotImplementedError, "pad: unknown mode 'mirror': use 'constant'"),
        ((1,), "constant", None, RuntimeError, r"pad \(1,\) must be \(before, after\).*at most 4 numbers"),
        ((0,) * 6, "constant", None, RuntimeError, "at most 4 numbers"),
        ((-2, -2), "constant", None, RuntimeError, "crops more than there is"),
    ):
        with pytest.raises(error, match=text):
            F.pad(x, pad, mode=mode, value=value)


def test_an_int_takes_its_dimension_away_before_index_arrays_are_looked_at():
    data = np.arange(360.0).reshape(3, 4, 5, 6)
    mask = Tensor(np.array([True, False, True, False]))
    for key, expected in (
        ((0, slice(None), [1, 2]), data[0][:, [1, 2]]),
        ((at(0), slice(None), at([1, 2])), data[0][:, [1, 2]]),
        ((slice(None), 0, ..., [0, 1]), data[:, 0][..., [0, 1]]),
        ((slice(None), [0, 1], slice(None), 0), data[:, :, :, 0][:, [0, 1]]),
        ((slice(None), mask, slice(None), -1), data[..., -1][:, mask.numpy()]),
        ((0, None, [1, 2]), data[0][None, [1, 2]]),
        (([0, 1], slice(None), 0), data[[0, 1], :, 0]),
        ((0, slice(None), [0, 1], slice(None)), data[0][:, [0, 1]]),
        ((0, [0, 1], slice(None), [1, 2]), data[0][[0, 1], :, [1, 2]]),  # these stand apart: to the front
        ((at(0), slice(None), 1), data[0, :, 1]),
    ):
        x = tensor(data, requires_grad=True)
        picked = x[key]
        assert picked.tolist() == expected.tolist(), key
        picked.backward(picked.detach())
        kept = np.where(np.isin(data, expected), data, 0.0)
        assert x.grad.tolist() == kept.tolist(), key
        y = minamp.zeros(data.shape, dtype=minamp.float64)
        y[key] = picked.detach()
        assert y.tolist() == kept.tolist(), key
        values = tensor(expected, requires_grad=True)
        z = x.detach() * 0.0
        z[key] = values
        (z * x.detach()).sum().backward()
        assert values.grad.tolist() == expected.tolist(), key


def test_uint8_is_a_mask_and_slices_go_forward():
    x = tensor(np.arange(6.0).reshape(3, 2))
    flags = at([1, 0, 1]).to(minamp.uint8)
    assert x[flags].tolist() == [[0, 1], [4, 5]] and x[flags[0]].shape == (1, 3, 2)
    x[:, at([0, 1]).to(minamp.uint8)] = 9.0
    assert x.tolist() == [[0, 9], [2, 9], [4, 9]]
    for key in (slice(None, None, -1), (0, slice(3, 0, -1)), slice(None, None, 0)):
        with pytest.raises(ValueError, match=r"slice step -?\d must be greater than zero: use x.flip\(dim\)"):
            x[key]
        with pytest.raises(ValueError, match="slice step"):
            x[key] = 0.0


def test_index_put_mixes_no_kinds():
    ids = (at([0, 1]),)
    with pytest.raises(RuntimeError, match="index_put: values are float32, input int64"):
        at([1, 2]).index_put(ids, tensor([0.5, 0.5]))
    with pytest.raises(RuntimeError, match="index_put: values are int64, input float32"):
        tensor([0.5, 0.5]).index_put(ids, at([1, 2]), accumulate=True)


def test_parts():
    x = tensor(np.arange(5.0))
    assert [p.tolist() for p in x.split(2)] == [[0, 1], [2, 3], [4]]
    assert [p.shape for p in x.chunk(4)] == [(2,), (2,), (1,)]
    assert [p.item() for p in x.unbind()] == [0, 1, 2, 3, 4]
    assert [p.shape for p in x[:0].chunk(3)] == [(0,)] * 3
    with pytest.raises(RuntimeError, match=r"split: sizes \[-1, 6\] must sum to 5, .* none be negative"):
        x.split([-1, 6])
    for cut in (lambda n: n.split(1), lambda n: n.chunk(2)):
        with pytest.raises(RuntimeError, match="split: a 0-dim tensor can't be cut"):
            cut(tensor(1.0))
    assert tensor(3.0).flip(0).item() == 3.0
    many = tensor(np.arange(40.0)).reshape(20, 2)
    assert [p.tolist() for p in many.unbind()] == many.tolist()
    assert [p.tolist() for p in many.split([3, *[1] * 16, 0, 1])][:2] == [
        many[:3].tolist(),
        many[3:4].tolist(),
    ]
    assert [len(p) for p in many.split((3, *[1] * 16, 0, 1))] == [3, *[1] * 16, 0, 1]
    many.unbind(0)[17].mul_(0.0)
    many.split(1)[2].zero_()
    assert (many.sum(1) == 0).nonzero().tolist() == [[2], [17]], "they are views"
    flipped = x.flip(0)
    flipped[0] = 9.0
    assert x.tolist() == [0, 1, 2, 3, 4]  # a copy, as in PyTorch


@pytest.mark.parametrize("cut", [lambda x: x.unbind(), lambda x: x.split(1), lambda x: x.chunk(256)])
def test_the_gradients_of_many_parts_take_no_quadratic_room(cut):
    """Each part's gradient is as large as what it was cut from: 256 * 256 rows, if that were x; it is a half of a half."""
    x, rows = tensor(np.ones((256, 3)), requires_grad=True), []
    y = stack(cut(x)).sum()
    with observe(lambda phase, op, inputs, out: rows.append(len(out)) if op.name == "index" else None):
        y.backward()
    assert sum(rows) == 256 * (8 + 2 * 5) and (x.grad == 1).all().item()


def test_shapes():
    x, number = tensor(np.ones((1, 2, 1))), tensor(3.0)
    assert x.squeeze((0, 2)).shape == x.squeeze((-1, 0, 1)).shape == (2,) and x.squeeze(()).shape == x.shape
    with pytest.raises(RuntimeError, match=r"squeeze: dims \(0, -3\) name a dimension twice"):
        x.squeeze((0, -3))
    with pytest.raises(RuntimeError, match=r"repeat: sizes \(1, -1, 2\) must not be negative"):
        tensor([1.0]).repeat(1, -1, 2)
    assert number.transpose(0, -1).shape == ()


def test_an_empty_vector_joins_with_anything():
    none, x = tensor([], requires_grad=True), tensor(np.ones((2, 3), np.float32), requires_grad=True)
    for dim in (0, -1):
        y = minamp.cat([none, x, none, x * 2.0], dim)
        assert y.tolist() == np.concatenate([x.tolist(), (x * 2.0).tolist()], dim).tolist()
        y.sum().backward()
    assert x.grad.tolist() == [[6.0] * 3] * 2 and none.grad.shape == (0,)
    assert minamp.cat([none, tensor([1.0])]).tolist() == [1.0] and minamp.cat([none, none]).shape == (0,)
    assert minamp.cat([none.detach(), at([[1, 2]])]).dtype == float32  # it takes part in the promotion


# ---- half at its limits


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x[[0, 1, 2, 3, 4, 5, 6]],
        lambda x: OPS["gather"](x, 0, at(range(7))),
        lambda x: x.index_put((at([]).long(),), minamp.ones(0, dtype=x.dtype)),
        lambda x: x.masked_fill(at([False]), 1.0),
        lambda x: minamp.zeros(7, dtype=x.dtype).scatter_add(0, at(range(7)), x),
        lambda x: x.scatter(0, Tensor(np.zeros(0, int)), 1.0),
        lambda x: F.embedding(at(range(7)), x.reshape(7, 1)),
        lambda x: x.sort().values,
        lambda x: F.pad(x, (1, 1)),
        lambda x: x.reshape(1, 7).triu(-9),
        lambda x: x.flip(0),
    ],
)
def test_nothing_is_lost_at_the_limits_of_half(move):
    x = tensor(EDGES, dtype=float16, requires_grad=True)
    y = move(x)
    assert sorted(set(y.reshape(-1).tolist())) == sorted(float(np.float16(v)) for v in EDGES)
    y.sum().backward()
    assert x.grad.tolist() == [1] * 7


# ------------------------------------------------------------------- what is written after an op has seen it (minamp/views.py)


def _grads(function):
    """The gradients of sum(i * function(w)) for w of ones, (2, 3)."""
    w = minamp.ones(2, 3, requires_grad=True)
    y = function(w)
    (y * tensor(np.arange(1.0, y.numel() + 1, dtype=np.float32).reshape(y.shape))).sum().backward()
    return y.tolist(), None if w.grad is None else w.grad.tolist()


def _into_a_view(w):
    x = w * 2
    x[:, 0] += 1.0
    x[1].mul_(3.0)
    x.view(-1)[:2].zero_()
    return x


def _into_a_view_of_a_view(w):
    x = w * 1
    x.t()[1:][0].copy_(x[:, 0] * 10)
    return x


def _into_memory_without_history(w):
    x = minamp.zeros(2, 3)
    x[:1].copy_(w[:1])
    x[1, 2:] += w[0, 1]
    return x


def _base_after_its_view(w):
    x = w * 2
    row, column = x[0], x[:, 1]
    x.mul_(3.0)
    x[0, 1] = w[1, 2] * 5
    return minamp.cat([row, column])


def _view_after_its_sibling(w):
    x = w * 1
    first, second = x[0], x.view(6)
    first.mul_(2.0)
    second[0] = 7.0
    return first + second[3:]


@pytest.mark.parametrize(
    "function, values, gradients",
    [  # what torch gives
        (_into_a_view, [[0.0, 0.0, 2.0], [9.0, 6.0, 6.0]], [[0.0, 0.0, 6.0], [24.0, 30.0, 36.0]]),
        (_into_a_view_of_a_view, [[1.0, 10.0, 1.0], [1.0, 10.0, 1.0]], [[21.0, 0.0, 3.0], [54.0, 0.0, 6.0]]),
        (
            _into_memory_without_history,
            [[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]],
            [[1.0, 8.0, 3.0], [0.0, 0.0, 0.0]],
        ),
        (_base_after_its_view, [6.0, 5.0, 6.0, 5.0, 6.0], [[6.0, 0.0, 18.0], [0.0, 30.0, 30.0]]),
        (_view_after_its_sibling, [8.0, 3.0, 3.0], [[0.0, 4.0, 6.0], [1.0, 2.0, 3.0]]),
    ],
)
def test_histories_follow_writes_in_place(function, values, gradients):
    assert _grads(function) == (values, gradients)


@pytest.mark.parametrize("mode", [minamp.no_grad, minamp.inference_mode])
def test_a_view_keeps_its_new_history_when_it_is_looked_at_first(mode):
    w = minamp.ones(2, requires_grad=True)
    x = w * 1
    v = x[0]
    x.mul_(3.0)
    with mode():
        assert (v * 2).item() == 6 and v.requires_grad
    v.backward()
    assert w.grad.tolist() == [3.0, 0.0]


def test_backward_from_a_view_of_what_was_written():
    w = minamp.ones(2, requires_grad=True)
    x = w * 1
    v = x[0]
    x.mul_(3.0)
    v.backward()
    assert w.grad.tolist() == [3.0, 0.0]


def test_a_view_of_a_weight_outlives_its_steps():
    """A step writes without a record, which changes no history."""
    w = minamp.ones(2, 3, requires_grad=True)
    tied = w.t()
    for _ in range(2):
        (tied * 2).sum().backward()
        assert w.grad.tolist() == [[2.0] * 3] * 2
        w.grad = None
        with minamp.no_grad():
            w.sub_(0.5)
    assert tied.tolist() == [[0.0, 0.0]] * 3 and tied.requires_grad


def test_one_element_is_a_view():
    x = minamp.zeros(3)
    x[1].add_(5.0)
    x[tensor(2)].sub_(1.0)
    assert x.tolist() == [0.0, 5.0, -1.0]


@pytest.mark.parametrize(
    "pick",
    [
        lambda x, i: x[i],
        lambda x, i: x[:, 0][i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.gather(0, minamp.stack([i, i], 1)),
        lambda x, i: x[:2][i == 1],
        lambda x, i: x[i.numpy()],
        lambda x, i: minamp.zeros(3, 2).scatter_add(0, minamp.stack([i, i], 1), x[:2]),
        lambda x, i: F.nll_loss(x[:2], i, reduction="sum"),
        lambda x, i: minamp.index_put(x * 1, (i,), x[:2] * 3, True),
    ],
)
def test_an_index_is_the_one_that_was_read(pick):
    """Written after the forward, it changes no gradient."""
    found = []
    for later in (0, 1):
        x = Tensor(np.arange(6, dtype=np.float32).reshape(3, 2), requires_grad=True)
        i = tensor([0, 1])
        y = pick(x, i)
        i.mul_(1 - later)
        y.sum().backward()
        found.append(x.grad.tolist())
    assert found[0] == found[1] and np.any(found[0])


def test_places_named_twice_in_a_tuple_add_up():
    for key in ([0, 0], ((0, 0),), (np.array([0, 0]),)):
        x = tensor([1.0, 2.0], requires_grad=True)
        x[key].sum().backward()
        assert x.grad.tolist() == [2.0, 0.0]


def test_an_ellipsis_for_no_dimension_keeps_no_arrays_apart():
    """PyTorch looks at the arrays after the Ellipsis has been filled in; NumPy moves their dimension to the front."""
    x = minamp.arange(24.0).reshape(2, 3, 4).requires_grad_()
    a, b = tensor([1, 0]), tensor([2, -1])
    y = x[:, a, ..., b]
    assert y.shape == (2, 2) and y.tolist() == [[6, 3], [18, 15]]
    (y * tensor([1.0, 2.0])).sum().backward()
    assert (
        x.grad[:, 1, 2].tolist() == [1, 1] and x.grad[:, 0, 3].tolist() == [2, 2] and x.grad.sum().item() == 6
    )
    assert x[None, 0, a, ..., b].shape == (1, 2)
    assert x[a, ..., b].shape == (2, 3)  # this one stands for a dimension
    z = x.detach().clone()
    z[:, a, ..., b] = tensor([[-1.0], [-2.0]])
    assert z[0, 1, 2].item() == z[0, 0, 3].item() == -1 and z[1, 1, 2].item() == z[1, 0, 3].item() == -2


def test_values_of_more_dimensions_at_a_mask_of_everything():
    mask = tensor([[True, False], [False, True]])
    x, v = minamp.zeros(2, 2), tensor([[1.0, 2.0]], requires_grad=True)
    x[mask] = v.detach()
    assert x.tolist() == [[1, 0], [0, 2]]
    y = minamp.zeros(2, 2)
    y[mask] = v
    (y * tensor([[3.0, 0.0], [0.0, 5.0]])).sum().backward()
    assert v.grad.tolist() == [[3, 5]]
    assert minamp.zeros(2, 2).index_put((mask,), v[None]).tolist() == [[1, 0], [0, 2]]


@pytest.mark.parametrize(
    ("shifts", "dims"), [(1, 0), (-5, 1), ((1, -2), (1, 2)), ((1, 1), (2, 2)), (4, None), ([2], [-1])]
)
def test_roll(shifts, dims):
    array = np.arange(24.0).reshape(2, 3, 4)
    rolled = minamp.roll(tensor(array), shifts, dims)
    numpys = shifts if isinstance(shifts, int) else tuple(shifts)
    wanted = np.roll(array, numpys, dims if dims is None or isinstance(dims, int) else tuple(dims))
    assert rolled.tolist() == wanted.tolist() == tensor(array).roll(shifts=shifts, dims=dims).tolist()
    check_grads(lambda x: minamp.roll(x, shifts, dims), array)


def test_roll_of_little_and_what_it_refuses():
    assert minamp.roll(tensor(3.0), 1).item() == 3.0 and minamp.roll(minamp.zeros(0, 2), 1, 0).shape == (0, 2)
    with pytest.raises(RuntimeError, match="roll: 1 shifts for 2 dims"):
        minamp.roll(minamp.zeros(2, 2), 1, (0, 1))
    with pytest.raises(IndexError, match="roll: dim 2 is out of range"):
        minamp.roll(minamp.zeros(2, 2), 1, 2)


def test_one_value_of_another_dtype_goes_to_masks_only():
    x = minamp.zeros(2, 3, dtype=float16)
    one = minamp.tensor(1.5)
    for mask in (x == 0, (x[:, 0] == 0, 0), np.ones((2, 3), bool)):
        x[mask] = one
        x[mask] = one[None] * 2
    assert x.tolist() == [[3.0] * 3] * 2
    for places in (
        [0],
        minamp.tensor([0]),
        (minamp.tensor([0]), slice(1)),
        (x[:, 0] > 0, minamp.tensor([0])),
    ):
        for value in (one, minamp.tensor(1)):
            with pytest.raises(RuntimeError, match="value is .*, x float16: cast it with"):
                x[places] = value
        x[places] = 4.0
    assert x[0, 0].item() == 4.0


def test_a_pad_sums_what_comes_back_over_all_dimensions_and_then_rounds():
    x = minamp.ones(1, 1, dtype=float16, requires_grad=True)
    g = np.array([[1, 2.0**-11, 0], [2.0**-11, 0, 0], [0, 0, 0]])  # each row or column alone rounds to 1
    F.pad(x, (1, 1, 1, 1), mode="replicate").backward(minamp.tensor(g).half())
    assert x.grad.item() == 1 + 2.0**-10


def test_windows_as_columns():
    x = np.arange(2.0 * 3 * 5 * 4).reshape(2, 3, 5, 4)
    columns = F.unfold(minamp.tensor(x), (2, 3), (2, 1), (1, 0), (2, 1)).numpy()
    deep = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)))
    windows = [deep[:, :, i : i + 3 : 2, j : j + 3].reshape(2, 18) for i in (0, 2, 4) for j in (0, 1)]
    np.testing.assert_array_equal(columns, np.stack(windows, -1))
    np.testing.assert_array_equal(
        F.unfold(minamp.tensor(x[0]), 2).numpy(), F.unfold(minamp.tensor(x), 2).numpy()[0]
    )
    # fold counts how often each value was read
    ones = F.fold(F.unfold(minamp.ones(1, 1, 3, 4), 2, padding=1), (3, 4), 2, padding=1)
    assert ones.tolist() == [[[[4.0] * 4] * 3]]
    # 1024 bfloat16 ones come back to one pixel
    one = minamp.ones(1, 32, 32, dtype=minamp.bfloat16)
    assert F.fold(one.reshape(1024, 1), 32, 32).equal(one)
    assert F.fold(minamp.ones(1024, 1024, dtype=minamp.bfloat16), 63, 32)[0, 31, 31].item() == 1024


def test_errors_of_blocks_and_columns():
    x = minamp.ones(2, 6, 4, 4)
    for call, text in (
        (lambda: F.unfold(x, 5), r"unfold: kernel \(5, 5\) is larger than the padded input \(4, 4\)"),
        (lambda: F.unfold(x[0, 0], 2), r"unfold: input must be \(N, C, H, W\) or \(C, H, W\)"),
        (
            lambda: F.fold(x[:, :, 0], (4, 4), 2),
            r"fold: input must be \(N, C \* 4, 9\) for kernel_size \(2, 2\)",
        ),
        (lambda: F.pixel_shuffle(x, 2), "pixel_shuffle: the 6 channels of .* must be a multiple of 4"),
        (lambda: F.pixel_shuffle(x[0, 0], 2), "pixel_shuffle: input must be"),
        (
            lambda: F.pixel_unshuffle(x, 3),
            "pixel_unshuffle: height and width of .* multiples of downscale_factor 3",
        ),
        (lambda: F.pixel_shuffle(x, 0), "pixel_shuffle: upscale_factor must be at least 1, got 0"),
        (lambda: x.unflatten(1, (4, 2)), r"unflatten: sizes \(4, 2\) must multiply to 6, dimension 1 of"),
        (lambda: x.unflatten(1, (-1, 4)), r"unflatten: sizes \(-1, 4\) must multiply to 6"),
        (lambda: x.unflatten(1, ()), r"unflatten: sizes \(\) must multiply to 6"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


def test_medians():
    x = tensor([[3.0, 1.0, 2.0, 4.0], [1.0, np.nan, 0.0, 2.0]])
    values, indices = x.median(1)
    assert values[0].item() == 2.0 and np.isnan(values[1].item()) and indices.tolist() == [2, 1]
    assert x[:1].median().item() == 2.0 and np.isnan(x.median().item()) and tensor(3.0).median().item() == 3.0
    assert x.median(0, keepdim=True).values.shape == (1, 4)
    assert tensor([5, 1, 3]).median().item() == 3
    check_grads(lambda x: x.median(1).values ** 2, np.array([[3.0, 1.0, 2.0], [0.5, 7.0, -1.0]]))
    with pytest.raises(IndexError, match=r"median: dimension 1 of \(2, 0\) has no values"):
        minamp.zeros(2, 0).median(1)


def test_narrow():
    x = minamp.arange(6).reshape(2, 3)
    assert x.narrow(1, -2, 2).tolist() == [[1, 2], [4, 5]] and x.narrow(0, 2, 0).shape == (0, 3)
    x.narrow(1, 0, 1).fill_(9)  # a view
    assert x.tolist() == [[9, 1, 2], [9, 4, 5]]
    with pytest.raises(
        IndexError, match=r"narrow: start 4 is out of range, dimension 1 of \(2, 3\) has 3 slices"
    ):
        x.narrow(1, 4, 0)
    for length in (-1, 3):
        with pytest.raises(
            RuntimeError, match=rf"narrow: length {length} from 1 on does not fit dimension 1"
        ):
            x.narrow(1, -2, length)


def test_slices_by_number_in_rows_and_in_other_places():
    x = minamp.arange(24).reshape(2, 3, 4)
    assert x.select(1, -1).tolist() == x.numpy()[:, -1].tolist() and x.ravel().tolist() == list(range(24))
    x.select(0, 1).fill_(0)  # a view
    assert x.numpy()[1].sum() == 0
    assert x.movedim((0, 1), (1, 2)).shape == (4, 2, 3) and x.moveaxis(0, -1).shape == (3, 4, 2)
    assert x.tile(2).shape == (2, 3, 8) and x.tile((2, 1, 1, 2)).shape == (2, 2, 3, 8)
    row = tensor([5, 6, 7])
    assert row.repeat_interleave(2).tolist() == [5, 5, 6, 6, 7, 7]
    assert row.repeat_interleave(tensor([1, 0, 2]), 0).tolist() == [5, 7, 7]
    assert x.repeat_interleave(2, 1).shape == (2, 6, 4) and x.repeat_interleave(2).shape == (48,)
    for call, error, text in (
        (
            lambda: x.select(1, 3),
            IndexError,
            r"select: index 3 is out of range for dimension 1 of \(2, 3, 4\)",
        ),
        (lambda: x.movedim((0, 0), (1, 2)), RuntimeError, "movedim: source .* names a dimension twice"),
        (
            lambda: x.movedim((0,), (1, 2)),
            RuntimeError,
            r"movedim: source \(0,\) and destination \(1, 2\) must be as",
        ),
        (
            lambda: row.repeat_interleave(-1),
            RuntimeError,
            "repeat_interleave: repeats must be a number from 0 on, or 3",
        ),
        (
            lambda: row.repeat_interleave(tensor([1, 2]), 0),
            RuntimeError,
            "repeats must be a number from 0 on, or 3",
        ),
    ):
        with pytest.raises(error, match=text):
            call()


def test_what_is_close_and_what_is_not_0():
    a, b = tensor([1.0, np.inf, np.nan, 1e-9]), tensor([1.1, np.inf, np.nan, 0.0])
    assert a.isclose(b).tolist() == [False, True, False, True]
    assert a.isclose(b, rtol=0.2, equal_nan=True).all() and not a.allclose(b, rtol=0.2)
    x = tensor([[0.0, 2.0], [0.0, -1.0]])
    assert x.count_nonzero().item() == 2 and x.count_nonzero(0).tolist() == [0, 2]
    with pytest.raises(RuntimeError, match="isclose: a is float32, b float64: cast one with .to"):
        a.isclose(b.double())
