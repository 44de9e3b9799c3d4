"""mm, bmm, mv, dot, outer, addmm and their kin, and einsum: gradients in float64, float32 sums in half, and the error texts."""

import itertools
import math

import numpy as np
import pytest

import minamp
from minamp import bfloat16, float16, float32, float64, tensor
from minamp.autograd import check_grads
from minamp.methods import OPS
from minamp.op import Op
from minamp.record import observe
from minamp.tensor import Tensor

OP = type("Ops", (), {"__getattr__": lambda self, name: OPS[name]})()
_rng = np.random.default_rng(11)


def a(*shape):
    return _rng.standard_normal(shape)


def line(name, function, *arrays):
    return pytest.param(name, function, arrays, id=name)


def es(equation, *arrays):
    return line("einsum", lambda *xs: OP.einsum(equation, *xs) ** 2, *arrays)


LINES = [
    line("matmul", OP.matmul, a(2, 2, 3), a(3, 2)),
    line("linear", OP.linear, a(2, 3), a(4, 3), a(4)),
    line("mm", OP.mm, a(2, 3), a(3, 4)),
    line("mm", OP.mm, a(2, 0), a(0, 4)),
    line("bmm", OP.bmm, a(2, 2, 3), a(2, 3, 4)),
    line("bmm", OP.bmm, a(0, 2, 3), a(0, 3, 4)),
    line("mv", OP.mv, a(2, 3), a(3)),
    line("dot", OP.dot, a(3), a(3)),
    line("vdot", OP.vdot, a(3), a(3)),
    line("outer", OP.outer, a(2), a(3)),
    line("matmul_wide", lambda x, y: OP.matmul_wide(x, y) ** 2, a(2, 2, 3), a(3, 2)),
    line("scaled", lambda x: OP.scaled(x, 0.5) ** 2, a(2, 3)),
    line("scaled_matmul", lambda x, y: OP.scaled_matmul(x, y, 0.5) ** 2, a(2, 2, 3), a(2, 3, 4)),
    line("addmm", OP.addmm, a(2, 4), a(2, 3), a(3, 4)),
    line("addmm", lambda x, y, z: OP.addmm(x, y, z, beta=0.5, alpha=-2) ** 2, a(4), a(2, 3), a(3, 4)),
    line("addmm", lambda x, y, z: OP.addmm(x, y, z, beta=0) ** 2, a(2, 1), a(2, 3), a(3, 4)),
    line("addmm", lambda x, y, z: OP.addmm(x, y, z, alpha=0) ** 2, a(), a(2, 3), a(3, 4)),
    line("baddbmm", OP.baddbmm, a(2, 2, 4), a(2, 2, 3), a(2, 3, 4)),
    line(
        "baddbmm",
        lambda x, y, z: OP.baddbmm(x, y, z, beta=3, alpha=0.5) ** 2,
        a(2, 1),
        a(2, 2, 3),
        a(2, 3, 4),
    ),
    line("addmv", OP.addmv, a(2), a(2, 3), a(3)),
    line("addmv", lambda x, y, z: OP.addmv(x, y, z, beta=3, alpha=0.5) ** 2, a(1), a(2, 3), a(3)),
    line("addr", lambda x, y, z: OP.addr(x, y, z, beta=3, alpha=0.5) ** 2, a(4), a(2), a(4)),
    line(
        "addbmm", lambda x, y, z: OP.addbmm(x, y, z, beta=3, alpha=0.5) ** 2, a(2, 4), a(3, 2, 5), a(3, 5, 4)
    ),
    line("vecdot", lambda x, y: OP.vecdot(x, y, dim=1), a(2, 3, 4), a(2, 3, 4)),
    line("chain_matmul", OP.chain_matmul, a(2, 5), a(5, 2), a(2, 6), a(6)),
    line("tensordot", lambda x, y: OP.tensordot(x, y, ([0, 2], [1, 0])), a(2, 3, 4), a(4, 2, 5)),
    line("tensordot", lambda x, y: OP.tensordot(x, y, 0), a(2, 3), a(2)),
    line("cross", OP.cross, a(2, 3), a(2, 3)),
    line("bilinear", OP.bilinear, a(2, 3), a(2, 4), a(5, 3, 4), a(5)),
    line("matrix_norm", OP.matrix_norm, a(2, 3, 4)),
    line("matrix_norm", lambda x: OP.matrix_norm(x, -1, (0, 2)), a(2, 3, 4)),
    es("ij,jk", a(2, 3), a(3, 4)),
    es("bij,bkj->bik", a(2, 2, 3), a(2, 4, 3)),
    es("ij,ij->", a(2, 3), a(2, 3)),
    es("i,j->ji", a(2), a(3)),
    es("ij,j->ij", a(2, 3), a(3)),
    es("ij->", a(2, 3)),
    es("ijk->kj", a(2, 3, 2)),
    es("ii", a(3, 3)),
    es("ii->i", a(3, 3)),
    es("iji,j->i", a(2, 3, 2), a(3)),
    es("iii,i->", a(2, 2, 2), a(2)),
    es("...ij,...jk->...ik", a(2, 1, 2, 3), a(2, 3, 2)),
    es("...ij->ij", a(2, 2, 3)),
    es("i...,i...->...", a(2, 3), a(2, 1)),
    es("ij,jk,kl->il", a(2, 3), a(3, 2), a(2, 2)),
    es("ai,bi,ci->abc", a(2, 3), a(2, 3), a(2, 3)),
    es("ij,ik,kl", a(2, 3), a(2, 2), a(2, 2)),
    es("ij,jk->ik", a(2, 1), a(3, 2)),
    es("ij,kl->", a(2, 3), a(2, 2)),
    es("i,i,->i", a(3), a(3), a()),
    es("ij,jk->ik", a(2, 0), a(0, 2)),
]


@pytest.mark.parametrize("name, function, arrays", LINES)
def test_gradients(name, function, arrays):
    check_grads(function, *arrays)


def test_one_tensor_in_both_places():
    check_grads(lambda x: OP.mm(x, x), a(3, 3))
    check_grads(lambda x: OP.einsum("ij,jk,ki->", x, x, x), a(3, 3))


def test_every_gradient_has_a_line():
    declared = {
        n
        for n, o in OPS.items()
        if isinstance(o, Op) and o.__module__ in [f"minamp.ops.{f}" for f in ("matmul", "products", "einsum")]
    }
    assert declared <= {p.values[0] for p in LINES}


# ---- values: half in, float32 sums, one rounding


def half(data, dtype=float16):
    return tensor(np.asarray(data, np.float64), dtype=dtype)


# In half a running sum of ones stays at 2048 (bfloat16: 256), where 1 is half a step.
@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
def test_long_sums(dtype):
    row, column, vector = (minamp.ones(*s, dtype=dtype) for s in ((1, 4096), (4096, 1), (4096,)))
    products = (
        OP.mm(row, column),
        OP.bmm(row[None], column[None]),
        OP.mv(row, vector),
        OP.dot(vector, vector),
        OP.vdot(vector, vector),
        OP.einsum("ij,jk->ik", row, column),
        OP.einsum("i,i", vector, vector),
        OP.einsum("ij->i", row),
    )
    for y in products:
        assert y.dtype == dtype and y.item() == 4096


def test_the_input_is_added_before_the_rounding():
    # 2048.5: in half the product alone would be 2048
    row, column = (half([[2048.0, 1.0]]), half([[1.0], [0.5]]))
    for name, args in {
        "addmm": (row, column),
        "baddbmm": (row[None], column[None]),
        "addmv": (row, column[:, 0]),
    }.items():
        assert OPS[name](half([0.75]), *args).item() == 2050  # 2049.25
        assert OPS[name](half([0.25]), *args).item() == 2048  # 2048.75
        assert OPS[name](half([0.25]), *args, beta=3).item() == 2050  # 2049.25
    big = half([[300.0, 300.0]])
    # the product 180000 would be inf
    assert OP.addmm(half([-60000.0]), big, big.T, alpha=0.5).item() == 30000


def test_half_results_are_the_exact_ones_rounded_once():
    rng = np.random.default_rng(0)
    # sums of these are exact in float32
    x, w, b = (half(rng.integers(-8, 9, s) / 8) for s in ((5, 7), (7, 6), (6,)))
    exact = x._data.astype(float) @ w._data.astype(float)
    np.testing.assert_array_equal(OP.mm(x, w)._data, exact.astype(np.float16))
    np.testing.assert_array_equal(OP.einsum("ij,jk->ik", x, w)._data, exact.astype(np.float16))
    added = 0.5 * b._data.astype(float) + 3 * exact
    np.testing.assert_array_equal(OP.addmm(b, x, w, beta=0.5, alpha=3)._data, added.astype(np.float16))


def test_the_chain_takes_the_cheapest_order():
    """(1000, 2) @ (2, 1000) @ (1000, 2): from the right 8,000 multiplications, from the left 4,000,000."""
    matrices, shapes = [minamp.ones(*s) for s in ((1000, 2), (2, 1000), (1000, 2))], []
    with observe(lambda phase, op, inputs, output: shapes.append(output.shape)):
        OP.chain_matmul(*matrices)
    assert shapes == [(2, 2), (1000, 2)]


@pytest.mark.parametrize("region", [None, float16], ids=str)
def test_a_listed_function_of_ops_runs_outside_the_region(region):
    """As PyTorch's: arguments are cast by its policy, and its inner products then keep that dtype."""
    x, y, half_y = minamp.ones(2, 3), minamp.ones(3, 4), minamp.ones(3, 4, dtype=float16)
    with minamp.autocast(dtype=region or float16, enabled=region is not None):
        assert OP.tensordot(x, y, 1).dtype == float32  # promoted, where matmul alone would be half
        assert OP.addr(y, x[0], y[0]).dtype == (float16 if region else float32)
        assert OP.addr(input=y, vec1=x[0], vec2=y[0]).dtype == (float16 if region else float32)
        if region:
            assert OP.tensordot(x, half_y, dims=1).dtype == float32
            assert (x @ y).dtype == float16  # the region goes on
            with pytest.raises(RuntimeError, match="addr: needs two vectors"):
                OP.addr(y, x, y)
            assert (x @ y).dtype == float16


def test_norms_of_torch_linalg():
    x = tensor([[3.0, -4.0], [0.0, 2.0]])
    norm = minamp.linalg.norm
    assert norm(x).item() == minamp.linalg.matrix_norm(x).item() == pytest.approx(math.sqrt(29))
    assert [norm(x, o).item() for o in (1, -1, math.inf, -math.inf)] == [6.0, 3.0, 7.0, 2.0]
    assert norm(x, 1, dim=1).tolist() == [7.0, 2.0] and norm(x[0]).item() == 5.0
    assert norm(x, 1, keepdim=True).shape == (1, 1)
    big = minamp.full((64, 64), 4096.0, dtype=float16)
    assert minamp.linalg.matrix_norm(big, 1, dtype=float32).item() == 64 * 4096
    with pytest.raises(NotImplementedError, match="matrix_norm: ord='nuc' needs singular values"):
        norm(x, "nuc")


def test_linear_with_a_vector_for_weight_and_biases_that_broadcast():
    for shape in ((3,), (2, 3), (2, 2, 3)):
        check_grads(OPS["linear"], a(*shape), a(3), order=2)
        check_grads(OPS["linear"], a(*shape), a(3), a(), order=2)
    check_grads(OPS["linear"], a(2, 3), a(4, 3), a(2, 1))
    check_grads(OPS["linear"], a(2, 3), a(4, 3), a())
    x = tensor([1.0, 2.0], dtype=float16)
    assert OPS["linear"](x, x).item() == 5.0 and OPS["linear"](x, x).shape == ()


def test_zero_factors_leave_their_term_out():
    nan, ones = minamp.full((2, 2), np.nan), minamp.ones(2, 2)
    assert (OP.addmm(nan, ones, ones, beta=0)._data == 2).all()
    assert (OP.addmm(ones, nan, ones, alpha=0)._data == 1).all()
    assert (OP.baddbmm(nan[None], ones[None], ones[None], beta=0)._data == 2).all()
    assert (OP.addmv(ones[0], nan, ones[0], alpha=0)._data == 1).all()


def test_gradients_in_half_are_half_and_sum_in_float32():
    w = half([[1.0, 1.0]])
    w.requires_grad = True
    OP.mm(minamp.ones(4096, 1, dtype=float16), w).backward(minamp.ones(4096, 2, dtype=float16))
    assert w.grad.dtype == float16 and w.grad.tolist() == [[4096, 4096]]


EQUATIONS = [
    ("ij,jk", (2, 3), (3, 4)),
    ("bA,ba", (2, 3), (2, 4)),
    ("ba", (2, 3)),
    ("ij->ji", (2, 3)),
    ("...i->i...", (2, 3, 4)),
    ("...ij,...jk", (2, 1, 2, 3), (5, 3, 4)),
    ("i...j,j...k->...ik", (2, 5, 3), (3, 1, 2)),
    ("bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 2, 5, 4)),
    ("iij,jkk->ik", (2, 2, 3), (3, 4, 4)),
    ("ij,jk,kl,lm->im", (2, 3), (3, 4), (4, 2), (2, 3)),
    ("abc,bd,ce,a->de", (2, 3, 4), (3, 2), (4, 2), (2,)),
    (" i j , j k -> i k ", (2, 3), (3, 2)),
    ("i,j,k->kij", (2,), (3,), (4,)),
    ("i,i,i->i", (3,), (3,), (3,)),
    ("->", ()),
    (",i->i", (), (3,)),
    ("ij,ij,ij->j", (2, 3), (2, 3), (2, 3)),
    ("i,ij->", (0,), (0, 2)),
]


@pytest.mark.parametrize("case", EQUATIONS, ids=[c[0] for c in EQUATIONS])
def test_einsum_values(case):
    equation, *shapes = case
    arrays = [a(*s) for s in shapes]
    y = OP.einsum(equation, *map(Tensor, arrays))
    exact = np.einsum(equation, *arrays)
    assert y.shape == exact.shape
    np.testing.assert_allclose(y._data, exact, rtol=1e-13, atol=1e-13)


def test_einsum_of_every_pair_of_short_terms():
    """All products of two terms over i, j, k with all outputs of up to two letters: 924 equations against NumPy's."""
    sizes, count = {"i": 2, "j": 3, "k": 2}, 0
    terms = ["".join(p) for n in (1, 2) for p in itertools.product("ijk", repeat=n)]
    data = {t: a(*(sizes[c] for c in t)) for t in terms}
    for s, t in itertools.product(terms, terms):
        letters = sorted(set(s + t))
        for out in [""] + ["".join(p) for n in (1, 2) for p in itertools.permutations(letters, n)]:
            equation = f"{s},{t}->{out}"
            y = OP.einsum(equation, Tensor(data[s]), Tensor(data[t]))._data
            np.testing.assert_allclose(y, np.einsum(equation, data[s], data[t]), atol=1e-12, err_msg=equation)
            count += 1
    assert count == 924


def test_einsum_takes_a_list_and_broadcasts_ones():
    x, y = Tensor(a(2, 1)), Tensor(a(3, 2))
    np.testing.assert_allclose(OP.einsum("ij,jk->ik", [x, y])._data, x._data * y._data.sum(0), rtol=1e-14)
    wide = OP.einsum("ij,ij->ij", x, Tensor(np.ones((1, 3))))
    np.testing.assert_array_equal(wide._data, np.repeat(x._data, 3, 1))


def test_einsum_rounds_once_however_many_operands():
    h = half([[256.0]])
    assert OP.einsum("ij,jk,kl->il", h, h, half([[0.5]])).item() == 32768  # 65536 on the way would be inf
    assert OP.einsum("ij,ij->", half([[300.0, 300.0]]), half([[300.0, -300.0]])).item() == 0


def test_half_einsum_differentiates_twice():
    x = half([[1.0, 2.0], [3.0, 4.0]])
    x.requires_grad = True
    (g,) = minamp.autograd.grad(OP.einsum("ij,jk->", x, x), x, create_graph=True)
    assert g.dtype == float16 and g.tolist() == [[3 + 4, 7 + 4], [3 + 6, 7 + 6]]
    g.sum().backward()
    assert x.grad.dtype == float16 and x.grad.tolist() == [[4, 4], [4, 4]]


# ---- dtypes


def test_mixed_dtypes():
    f, h, b = minamp.ones(2, 2), minamp.ones(2, 2, dtype=float16), minamp.ones(2, 2, dtype=bfloat16)
    with pytest.raises(
        RuntimeError, match=r"mm: tensors of different dtypes \(input float32, mat2 float16\): cast"
    ):
        OP.mm(f, h)
    with pytest.raises(RuntimeError, match="dot: tensors of different dtypes"):
        OP.dot(f[0], h[0])
    assert OP.outer(f[0], h[0]).dtype == float32
    with minamp.autocast():
        assert OP.mm(f, h).dtype == OP.addmm(f, b, h).dtype == OP.einsum("ij,jk", f, b).dtype == float16
        assert OP.dot(f[0], h[0]).dtype == OP.vdot(f[0], f[0]).dtype == float32
        assert OP.dot(h[0], h[0]).dtype == float16 and OP.outer(f[0], f[0]).dtype == float32
        with pytest.raises(
            RuntimeError, match=r"dot: bfloat16 in a float16 autocast region.*\.to\(float16\)"
        ):
            OP.dot(b[0], b[0])
        with pytest.raises(RuntimeError, match="mm: tensors of different dtypes"):
            OP.mm(f.double(), f)
    assert OP.mm(tensor([[1, 2]]), tensor([[3], [4]])).item() == 11


def test_methods():
    x, v = tensor([[1.0, 2.0], [3.0, 4.0]]), tensor([1.0, 2.0])
    assert x.mm(x).tolist() == [[7, 10], [15, 22]] and x[None].bmm(x[None]).tolist() == [[[7, 10], [15, 22]]]
    assert x.mv(v).tolist() == [5, 11] and v.dot(v).item() == v.vdot(v).item() == 5
    assert v.outer(v).tolist() == [[1, 2], [2, 4]] and v.addmv(x, v, beta=2).tolist() == [7, 15]
    assert x.addmm(x, x, alpha=2).tolist() == [[15, 22], [33, 48]]
    assert x[None].baddbmm(x[None], x[None]).tolist() == [[[8, 12], [18, 26]]]
    with minamp.autocast():
        # in place: never autocast
        assert x.addmm_(x, x).dtype == float32 and x.tolist() == [[8, 12], [18, 26]]


# ---- errors

t = minamp.ones
ERRORS = [
    (lambda: OP.addr(t(2, 3), t(2, 1), t(3)), r"addr: needs two vectors, got shapes \(2, 1\) and \(3,\)"),
    (
        lambda: OP.addbmm(t(2), t(2, 3, 4), t(2, 5, 2)),
        r"addbmm: needs batches of shapes \(b, n, k\) and \(b, k, m\), got \(2, 3, 4\) and \(2, 5, 2\)",
    ),
    (
        lambda: OP.cross(t(3), t(3).half()),
        r"cross: tensors of different dtypes \(input float32, other float16\): cast",
    ),
    (lambda: OP.chain_matmul(t(2, 3)), "chain_matmul: needs at least two tensors, got 1"),
    (
        lambda: minamp.linalg.multi_dot([t(2, 3), t(3), t(3, 2)]),
        r"chain_matmul: tensor 1 has shape \(3,\): only the first and the last may be a vector",
    ),
    (
        lambda: OP.tensordot(t(2, 3), t(2, 3), 1),
        r"tensordot: dims \[1\] of \(2, 3\) and \[0\] of \(2, 3\) differ in size",
    ),
    (
        lambda: OP.cross(t(2, 4), t(2, 4)),
        r"cross: needs dimension 1 of size 3 in both, got shapes \(2, 4\) and \(2, 4\)",
    ),
    (lambda: OP.mm(t(2, 3), t(4, 5)), r"mm: mat1 and mat2 shapes cannot be multiplied \(2x3 and 4x5\)"),
    (lambda: OP.mm(t(3), t(3, 2)), r"mm: input must be a matrix, got shape \(3,\): matmul takes"),
    (lambda: OP.mm(t(2, 3), t(1, 3, 2)), r"mm: mat2 must be a matrix, got shape \(1, 3, 2\)"),
    (
        lambda: OP.bmm(t(2, 3, 4), t(2, 5, 4)),
        r"bmm: input \(2, 3, 4\) takes a mat2 of shape \(2, 4, m\), got \(2, 5, 4\)",
    ),
    (lambda: OP.bmm(t(3, 4), t(2, 5, 4)), r"bmm: input must be a 3D tensor, got shape \(3, 4\)"),
    (
        lambda: OP.mv(t(2, 3), t(2)),
        r"mv: needs a matrix \(n, k\) and a vector \(k,\), got shapes \(2, 3\) and \(2,\)",
    ),
    (lambda: OP.dot(t(3), t(4)), r"dot: needs two vectors of one length, got shapes \(3,\) and \(4,\)"),
    (lambda: OP.vdot(t(3, 1), t(3)), r"vdot: needs two vectors of one length, got shapes \(3, 1\)"),
    (lambda: OP.outer(t(3, 1), t(3)), r"outer: needs two vectors, got shapes \(3, 1\) and \(3,\)"),
    (
        lambda: OP.addmm(t(3), t(2, 3), t(3, 4)),
        r"addmm: input \(3,\) can't be expanded to the product's shape \(2, 4\)",
    ),
    (lambda: OP.addmm(t(5, 2, 4), t(2, 3), t(3, 4)), r"addmm: input \(5, 2, 4\) can't be expanded"),
    (
        lambda: OP.baddbmm(t(5), t(1, 2, 3), t(1, 3, 4)),
        r"baddbmm: input \(5,\) can't be expanded .* \(1, 2, 4\)",
    ),
    (lambda: OP.baddbmm(t(5), t(1, 2, 3), t(3, 4)), r"baddbmm: batch2 must be a 3D tensor"),
    (
        lambda: OP.addmv(t(3), t(2, 3), t(3)),
        r"addmv: input \(3,\) can't be expanded to the product's shape \(2,\)",
    ),
    (lambda: OP.addmv(t(2), t(2, 3), t(2)), r"addmv: needs a matrix"),
    (lambda: OP.linear(t(2, 3), t(4, 3), t(5)), r"linear: bias \(5,\) can't be expanded .* shape \(2, 4\)"),
    (
        lambda: OP.linear(t(3), t(3), t(5)),
        r"linear: bias \(5,\) can't be expanded to the result's shape \(\)",
    ),
    (
        lambda: OP.linear(t(2, 3), t(1, 4, 3)),
        r"linear: weight must be \(out, in\) or \(in,\), got .* \(1, 4, 3\)",
    ),
    (
        lambda: OP.einsum("ij,jk", t(2, 3)),
        r"einsum: 'ij,jk' has 2 terms for 1 operands: give one tensor per term",
    ),
    (
        lambda: OP.einsum("ijk", t(2, 3)),
        r"einsum: 'ijk' has 3 subscripts for operand 0 of shape \(2, 3\): give one per",
    ),
    (lambda: OP.einsum("i", t(2, 3)), r"einsum: 'i' has 1 subscripts for operand 0 .*or '\.\.\.'"),
    (lambda: OP.einsum("ij...k", t(2, 3)), r"einsum: 'ij\.\.\.k' has 3 subscripts"),
    (lambda: OP.einsum("i+", t(2, 3)), r"einsum: 'i\+' may hold the letters a-z and A-Z and one '\.\.\.'"),
    (lambda: OP.einsum("i..j", t(2, 3)), r"einsum: 'i\.\.j' may hold"),
    (
        lambda: OP.einsum("ij,jk", t(2, 3), t(4, 5)),
        "einsum: subscript j has size 4 in operand 1, but 3 before: make them equal or 1",
    ),
    (lambda: OP.einsum("ii", t(2, 3)), r"einsum: subscript i is repeated in 'ii', but the sizes of \(2, 3\)"),
    (
        lambda: OP.einsum("ii", t(1, 3)),
        r"einsum: subscript i is repeated in 'ii', but the sizes of \(1, 3\) there differ",
    ),
    (lambda: OP.einsum("ij->k", t(2, 3)), r"einsum: output subscript k of 'ij->k' appears in no operand"),
    (lambda: OP.einsum("ij->ii", t(2, 3)), r"einsum: output subscript i of 'ij->ii' appears more than once"),
]


@pytest.mark.parametrize("call, text", ERRORS)
def test_errors(call, text):
    with pytest.raises(RuntimeError, match=text):
        call()


def test_float64_is_not_cast():
    x = Tensor(a(2, 2))
    with minamp.autocast():
        assert OP.einsum("ij,jk", x, x).dtype == OP.addmm(x, x, x).dtype == float64
