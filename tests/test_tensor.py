"""Tensor, the record and backward."""

import copy
import gc
import math
import pickle
import sys
import threading
import weakref

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import bfloat16, float16, float32, float64, tensor
from minamp.autograd import grad
from minamp.methods import OPS
from minamp.tensor import Tensor


def leaf(*values, dtype=float32):
    return tensor(list(values), dtype=dtype, requires_grad=True)


# ---- dtypes


@pytest.mark.parametrize(
    "a, b, expected",
    [
        (float16, float32, float32),
        (float16, bfloat16, float32),
        (float16, float64, float64),
        (bfloat16, bfloat16, bfloat16),
        (np.int64, float16, float16),
        (np.bool_, np.int32, np.int32),
        (np.int32, np.int64, np.int64),
    ],
)
def test_promotion_of_tensors_with_dimensions(a, b, expected):
    for x, y in ((a, b), (b, a)):
        assert (minamp.ones(2, dtype=np.dtype(x)) + minamp.ones(2, dtype=np.dtype(y))).dtype == expected


def test_a_0_dim_tensor_or_number_widens_nothing_of_its_kind():
    h = minamp.ones(2, dtype=float16)
    assert (h * tensor(2.0)).dtype == (h * 2.0).dtype == (h + 1).dtype == (2.0 / h).dtype == float16
    assert (minamp.ones(2, dtype=np.dtype(np.int64)) * tensor(2.0, dtype=float16)).dtype == float16
    assert (tensor(2.0, dtype=float16) * tensor(2.0)).dtype == float32  # both 0-dim
    assert (tensor([1, 2]) * 2.5).dtype == (tensor([1, 2]) / tensor([2, 2])).dtype == float32
    assert (tensor([1, 2]) * 2).dtype == np.int64


def test_constructor_dtypes():
    assert tensor([1.0]).dtype == float32 and tensor([1]).dtype == np.int64 and tensor(True).dtype == np.bool_
    assert tensor(np.zeros(2)).dtype == float64 and tensor([1.0], dtype=bfloat16).dtype == bfloat16
    assert tensor([1e6], dtype=float16).item() == float("inf")
    with pytest.raises(RuntimeError, match="only floating tensors can require gradients, this one is int64"):
        tensor([1], requires_grad=True)
    # a list of NumPy's numbers has their dtype; a full tensor that of its number
    assert tensor([[np.float64(1)]]).dtype == float64 and tensor((np.float32(1),)).dtype == float32
    assert minamp.full((2,), 1).dtype == np.int64 and minamp.full((), True).dtype == np.bool_
    assert minamp.full((2,), 1.0).dtype == float32 and minamp.full((), 2**60 + 1).item() == 2**60 + 1


def test_numbers_that_an_integer_dtype_can_not_hold():
    for make in (
        lambda: tensor([2**40], dtype=minamp.int32),
        lambda: tensor(300, dtype=minamp.uint8),
        lambda: tensor([1.0, float("nan")], dtype=minamp.int64),
        lambda: minamp.full((2,), 1e30, dtype=minamp.int64),
        lambda: minamp.ones(2, dtype=minamp.uint8).new_full((2,), 256),
    ):
        with pytest.raises(RuntimeError, match="a number among .* can't be held by"):
            make()
    assert tensor([-1, 255], dtype=minamp.uint8).tolist() == [255, 255]  # wraps, as in PyTorch
    assert tensor([0.5, 2.5], dtype=minamp.int32).tolist() == [0, 2]


def test_creation_refuses_what_makes_no_sense():
    for args in ((-1,), (5, 1), (0, 3, -1)):
        with pytest.raises(RuntimeError, match="arange: from .* turn its sign round"):
            minamp.arange(*args)
    assert minamp.arange(3, 3).shape == minamp.arange(0).shape == (0,)
    for draw in (minamp.rand, minamp.randn):
        with pytest.raises(
            RuntimeError, match="draws floating values, dtype int64 can't hold them: use randint"
        ):
            draw(2, dtype=minamp.int64)
    one = minamp.ones(1)
    for make, name in [
        (lambda: minamp.zeros(-1), "zeros"),
        (lambda: minamp.ones((2, -1)), "ones"),
        (lambda: minamp.empty(-1), "empty"),
        (lambda: minamp.full((-1,), 0), "full"),
        (lambda: minamp.rand(-1), "rand"),
        (lambda: minamp.randn(2, -1), "randn"),
        (lambda: minamp.randint(5, (-1,)), "randint"),
        (lambda: minamp.randperm(-1), "randperm"),
        (lambda: minamp.linspace(0, 1, -1), "linspace"),
        (lambda: minamp.eye(2, -1), "eye"),
        (lambda: one.new_zeros(-1), "new_zeros"),
        (lambda: one.new_ones(-1), "new_ones"),
        (lambda: one.new_full((-1,), 0), "new_full"),
    ]:
        with pytest.raises(
            RuntimeError, match=rf"^{name}: size \(.*-1.*\) has a negative number: give 0 or more"
        ):
            make()
    with pytest.raises(
        TypeError, match=r"zeros: size \(2.5,\) is not of ints: give ints or one tuple of them"
    ):
        minamp.zeros(2.5)
    with pytest.raises(RuntimeError, match=r"randint: no integers lie in \[5, 3\): give low < high"):
        minamp.randint(5, 3, (2,))
    for args in ((0, 1, 0), (0, float("inf")), (float("nan"),)):
        with pytest.raises(
            RuntimeError, match="arange: from .* by .* has no end: give finite ends and a step"
        ):
            minamp.arange(*args)


@pytest.mark.parametrize("dtype, bits", [(float16, 11), (bfloat16, 8), (float32, 24), (float64, 53)])
def test_random_values_have_the_bits_of_their_format(dtype, bits):
    minamp.manual_seed(0)
    like = minamp.zeros(100000, dtype=dtype)
    for values in (minamp.rand(100000, dtype=dtype), minamp.rand_like(like)):
        assert values.dtype == dtype
        steps = values.double().numpy() * 2.0**bits
        assert (
            0 <= steps.min() and steps.max() < 2.0**bits and (steps % 1 == 0).all() and (steps % 2 == 1).any()
        )
        assert abs(values.double().mean().item() - 0.5) < 0.004
    if dtype == float64:
        values = minamp.randn(1000, dtype=dtype).numpy()
        assert (values != values.astype(np.float32)).mean() > 0.99
    minamp.manual_seed(0)
    assert minamp.rand(1).item() == np.random.default_rng(0).random(1, np.float32).item()


def test_creation_takes_numpys_scalar_types():
    one = minamp.ones(1)
    for make in (minamp.rand, minamp.randn, minamp.zeros, minamp.ones, one.new_ones):
        assert make(2, dtype=np.float16).dtype == float16
    for make in (minamp.full, one.new_full):
        assert make((1,), 0.5, dtype=np.float16).dtype == float16
        with pytest.raises(RuntimeError, match="full: value 1000000000.0 can't be held by float16"):
            make((1,), 1e9, dtype=np.float16)


@pytest.mark.parametrize("dtype", [float32, float16, bfloat16])
def test_what_is_overwritten_gets_no_gradient(dtype):
    for write in (lambda y: y.zero_(), lambda y: y.fill_(float("inf")), lambda y: y.copy_(tensor([5.0]))):
        x = tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
        y = x * 3.0
        write(y)
        assert y.requires_grad
        (y * 2.0).sum().backward()
        assert x.grad.tolist() == [0.0, 0.0] and x.grad.dtype == dtype
    x, v = tensor([1.0, 2.0], dtype=dtype, requires_grad=True), tensor([4.0], requires_grad=True)
    y = (x * 3.0).copy_(v)
    (y * 2.0).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0] and v.grad.tolist() == [4.0]


def test_conversions_and_queries():
    x = leaf(1.0, 2.0)
    assert x.half().dtype == float16 and x.bfloat16().dtype == bfloat16 and x.half().float().dtype == float32
    assert x.to(float32) is x and x.to("cpu") is x and x.to(x.half()).dtype == float16
    assert (
        x.size() == (2,) and x.size(0) == x.numel() == len(x) == 2 and x.dim() == 1 and x.device.type == "cpu"
    )
    assert x.tolist() == [1.0, 2.0] and float(x[0]) == 1.0 and tensor(2.5, dtype=bfloat16).item() == 2.5
    assert "requires_grad=True" in repr(x) and "grad_fn=mul" in repr(x * 2)
    assert (x.detach().numpy() == np.asarray(x.detach())).all()
    with pytest.raises(RuntimeError, match=r"use x.detach\(\).numpy\(\)"):
        x.numpy()
    with pytest.raises(RuntimeError, match="one element"):
        x.item()
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(x == x)


def test_a_gpu_that_is_not_there():
    if minamp.gpu_status() == "ok":
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="device 'cuda' asked for, but .*Stay on 'cpu'"):
        tensor([1.0]).cuda()
    with pytest.raises(RuntimeError, match="unknown device 'tpu'"):
        tensor([1.0]).to("tpu")


# ---- backward


def test_gradients_of_a_diamond_and_of_repeated_use():
    x = leaf(3.0)
    y = x * x
    (y + y * x).backward()
    assert x.grad.item() == 2 * 3 + 3 * 9


def test_backward_accumulates_into_leaves():
    x = leaf(2.0)
    (x * 3).backward()
    first = x.grad
    (x * 4).backward()
    assert x.grad is first and first.item() == 7.0


def test_leaf_gradients_never_share_memory():
    a, b = leaf(1.0), leaf(2.0)
    (a + b).backward()
    a.grad[0] = 5.0
    assert b.grad.item() == 1.0


def test_a_half_leaf_has_half_gradients_accumulated_in_float32():
    x = leaf(1.0, dtype=float16)
    parts = [x * 1.0 for _ in range(2049)]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    total.backward()
    # 2049 rounds to 2048, once: a half sum sticks at 2048 too
    assert x.grad.dtype == float16 and x.grad.item() == 2048
    y = leaf(1.0, dtype=float16)
    (y * 2048.0 + y * 1.0 + y * 1.0).backward()
    assert y.grad.item() == 2050  # added one by one in half it would be 2048


def test_a_long_chain_needs_no_recursion():
    x = leaf(1.0)
    y = x
    for _ in range(sys.getrecursionlimit() * 3):
        y = y + 0.0
    y.backward()
    assert x.grad.item() == 1.0
    del y


def test_backward_errors_name_the_op():
    x = leaf(1.0, 2.0)
    with pytest.raises(
        RuntimeError, match=r"starts from a scalar, but this is the output of mul with shape \(2,\)"
    ):
        (x * x).backward()
    y = (x * x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through mul a second time.*retain_graph=True"):
        y.backward()
    with pytest.raises(RuntimeError, match="requires no grad"):
        tensor([1.0]).backward()
    with pytest.raises(
        RuntimeError, match=r"gradient has shape \(3,\), but the output of mul has shape \(2,\)"
    ):
        (x * x).backward(minamp.ones(3))


def test_retain_graph():
    x = leaf(3.0)
    y = x * x
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.item() == 12.0


def test_backward_frees_what_it_no_longer_needs():
    x = leaf(*range(5))
    h = x * 2.0
    y = (h * h).sum()
    alive = weakref.ref(h)
    del h
    gc.collect()
    assert alive() is None  # the record keeps the array, not the tensor
    node = y._node.edges[0]
    y.backward()
    assert node.op.name == "mul" and not isinstance(node.saved, list)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "pow"])
def test_an_in_place_write_to_something_saved_is_refused(name):
    x = leaf(1.0, 2.0)
    h = x * 1.0
    y = (h * h).sum()
    with minamp.no_grad():
        getattr(h, name + "_")(2.0)
    with pytest.raises(
        RuntimeError,
        match=r"mul: argument '[ab]' of shape \(2,\) was saved for backward and then written in place",
    ):
        y.backward()


@pytest.mark.parametrize(
    "write", ["zero_", "fill_", "copy_", "setitem", "data", "in data", "key in data", "view", "output"]
)
def test_every_way_to_write_in_place_is_noticed(write):
    x = leaf(1.0, 2.0)
    h = x * 1.0
    e = h.exp()
    y = e.sum() if write == "output" else (h * h).sum()
    with minamp.no_grad():
        if write == "zero_":
            h.zero_()
        elif write == "fill_":
            h.fill_(3.0)
        elif write == "copy_":
            h.copy_(tensor([5.0, 6.0]))
        elif write == "setitem":
            h[0] = 1.0
        elif write == "data":
            h.data = minamp.zeros(2)
        elif write == "in data":
            h.data.zero_()
        elif write == "key in data":
            h.data[0] = 1.0
        elif write == "view":
            h.view(2, 1).zero_()
        else:
            e.zero_()
    with pytest.raises(RuntimeError, match="written in place"):
        y.backward()


def test_data_is_the_memory_without_history():
    w = leaf(1.0, 2.0)
    (w * w).sum().backward()
    assert type(w.data) is minamp.Tensor and w.data._data is w._data and not w.data.requires_grad
    w.data -= 0.5 * w.grad.data  # no no_grad() needed
    assert w.tolist() == [0.0, 0.0] and w.requires_grad and w.is_leaf
    w.data.add_(1.0).clamp_(max=0.75)
    w.grad.data.zero_()
    assert w.tolist() == [0.75, 0.75] and w.grad.tolist() == [0.0, 0.0]
    w.grad, w.data = None, w.data.half()
    w.sum().backward()
    assert w.dtype == w.grad.dtype == float16
    h = w * 3.0
    assert h.data.grad_fn is None and h.data.max(0)[1].item() == 0 and h.data.numpy()[0] == 2.25
    w.data = np.ones(2, np.float32)
    assert w.tolist() == [1.0, 1.0] and w.dtype == np.float32
    w.data = [2.0, 3.0]
    assert w.tolist() == [2.0, 3.0] and w.dtype == np.float32
    with pytest.raises(TypeError, match="needs numbers or bools, got NoneType"):
        w.data = None
    assert w.tolist() == [2.0, 3.0]


def test_a_tensor_that_wants_gradients_is_given_no_integers():
    w = leaf(1.0, 2.0)
    with pytest.raises(RuntimeError, match=r"can't hold int64: use value.float\(\)"):
        w.data = minamp.tensor([3, 4])
    assert w.tolist() == [1.0, 2.0]
    w.requires_grad = False
    w.data = minamp.tensor([3, 4])
    assert w.dtype == np.int64


def test_after_an_exchange_of_data_writes_count_for_the_memory_they_reach():
    w = leaf(1.0, 2.0)
    old, new = w.data, minamp.tensor([3.0, 4.0])
    w.data = new
    y = (w * w).sum()
    old.zero_()  # not w's memory any more
    y.backward()
    assert w.grad.tolist() == [6.0, 8.0]
    y = (w * w).sum()
    new.zero_()
    with pytest.raises(RuntimeError, match="written in place"):
        y.backward()
    # an untouched tensor's count starts lower than that of the one it is given to
    w = leaf(1.0, 2.0)
    w.data.add_(1.0)
    seen = w._version[0]
    w.data = minamp.tensor([3.0, 4.0])
    assert w._version[0] > seen


def test_the_cast_of_a_weight_whose_data_was_exchanged_is_made_anew():
    w, x = minamp.nn.Parameter(minamp.eye(2)), minamp.ones(1, 2)
    with minamp.autocast(dtype=float16):
        for factor in (1.0, 3.0, 5.0):
            w.data = minamp.eye(2) * factor
            assert (x @ w).tolist() == [[factor, factor]]
            w.data.mul_(2.0)
            assert (x @ w).tolist() == [[2 * factor, 2 * factor]]


def test_an_exchange_of_data_ends_a_view():
    a = leaf(1.0, 2.0)
    x = minamp.zeros(4)
    v = x[:2]
    v.data = minamp.tensor([5.0, 6.0])
    v += a
    assert x.tolist() == [0.0] * 4 and v.tolist() == [6.0, 8.0] and not x.requires_grad
    (v * v).sum().backward()
    assert a.grad.tolist() == [12.0, 16.0]
    x = minamp.ones(4)
    v, inner = x[:3], x[:3][:2]
    x.data = minamp.zeros(4)
    for view in (v[:2], inner):
        view *= a
    assert x.tolist() == [0.0] * 4 and v.tolist() == inner.tolist() + [1.0] == [1.0, 4.0, 1.0]
    assert not x.requires_grad


def test_what_shares_the_memory_of_a_gradient_sees_it_grow():
    w = leaf(1.0, 2.0)
    (w * w).sum().backward()
    g, same = w.grad.data, w.grad
    (w * w).sum().backward()
    assert w.grad is same and g.tolist() == w.grad.tolist() == [4.0, 8.0]


def test_a_retained_gradient_is_what_the_hooks_made_of_it():
    for first in (True, False):
        x = leaf(1.0, 2.0)
        y = x * 2.0
        if first:
            y.retain_grad()
        handle = y.register_hook(lambda g: g * 10.0)
        y.register_hook(lambda g: g + 1.0)
        if not first:
            y.retain_grad()
        y.sum().backward(retain_graph=True)
        assert y.grad.tolist() == [11.0, 11.0] and x.grad.tolist() == [22.0, 22.0]
        handle.remove()
        y.sum().backward()
        assert y.grad.tolist() == [13.0, 13.0]


def test_in_place_ops_inside_the_record():
    x = leaf(1.0, 2.0)
    y = x * 3.0
    y += x
    y *= 2.0
    y.sum().backward()
    assert x.grad.tolist() == [8.0, 8.0]
    with pytest.raises(RuntimeError, match="add_: in-place write to a leaf that requires grad"):
        x += 1.0
    with minamp.no_grad():
        x += 1.0
    assert x.tolist() == [2.0, 3.0] and x.requires_grad
    with pytest.raises(RuntimeError, match="the result has shape"):
        minamp.ones(2).add_(minamp.ones(3, 2))
    with pytest.raises(RuntimeError, match="can't be written into a int64 tensor"):
        tensor([1, 2]).add_(0.5)


@pytest.mark.parametrize("dtype", [float16, bfloat16, float32])
def test_what_is_written_over_has_a_gradient_of_0(dtype):
    for write in (
        lambda h: h.zero_(),
        lambda h: h.fill_(3.0),
        lambda h: h.copy_(tensor([-0.0, math.inf])),
        lambda h: h.copy_(tensor([1, 2])),
    ):
        x = tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
        h = x * 2.0
        write(h)
        assert h.requires_grad and h.dtype == dtype
        (h * 5.0).sum().backward()
        assert x.grad.tolist() == [0, 0]
    h = x * 1.0
    h.copy_(tensor([-0.0, math.nan]))
    assert np.signbit(h.tolist()[0]) and math.isnan(h.tolist()[1])
    source = tensor([3.0, 4.0], requires_grad=True)
    h.copy_(source)
    (h * 5.0).sum().backward()
    assert source.grad.tolist() == [5, 5]


def test_in_place_ops_keep_what_they_write_over():
    def gradients(function):
        x, w = leaf(0.5, 2.0), leaf(3.0, -1.0)
        y = function(x * 2.0, w)
        first = minamp.autograd.grad(y.sum(), [x, w], create_graph=True, allow_unused=True)
        second = minamp.autograd.grad(
            sum((g * g).sum() for g in first if g is not None), [x, w], allow_unused=True
        )
        return [None if g is None else g.tolist() for g in (*first, *second)]

    for in_place, out_of_place in (
        (lambda h, w: h.mul_(w), lambda h, w: h * w),
        (lambda h, w: h.mul_(h), lambda h, w: h * h),
        (lambda h, w: h.div_(w), lambda h, w: h / w),
        (lambda h, w: h.pow_(3), lambda h, w: h**3),
        (lambda h, w: h.square_(), lambda h, w: h.square()),
        (lambda h, w: h.clamp_(0, 3).mul_(w).tanh_(), lambda h, w: (h.clamp(0, 3) * w).tanh()),
    ):
        assert gradients(in_place) == gradients(out_of_place)
    h = leaf(1.0, 2.0) * 2.0
    y = (h * h).sum()
    h.mul_(leaf(3.0, 4.0))  # saved by an op before this one
    with pytest.raises(RuntimeError, match="saved for backward and then written in place"):
        y.backward()


def test_in_place_writes_change_no_kind_but_copies_do():
    flags = Tensor(np.array([True, False]))
    with pytest.raises(RuntimeError, match=r"add_: result type int64 can't be written into a bool tensor"):
        flags.add_(tensor([1, 1]))
    with pytest.raises(
        RuntimeError, match=r"mul_: result type float32 can't be .*: use x\.to\(minamp\.float32\)"
    ):
        flags.mul_(0.5)
    assert flags.tolist() == [True, False]
    assert flags.mul_(flags).tolist() == [True, False]
    assert tensor([1, 2]).add_(flags).tolist() == [2, 2] and tensor([1.0, 2.0]).mul_(flags).tolist() == [1, 0]
    assert tensor([1, 2]).copy_(tensor([2.7, -2.7])).tolist() == [2, -2]
    assert flags.copy_(tensor([0.0, 0.5])).tolist() == [False, True]


def test_hooks_see_and_replace_the_gradient():
    x, seen = leaf(2.0, dtype=float16), []
    h = x * 3.0
    handle = h.register_hook(lambda g: seen.append((g.dtype, g.item())))
    h.register_hook(lambda g: g * 10)
    (h * 1.0).sum().backward()
    assert seen == [(float16, 1.0)] and x.grad.item() == 30.0
    handle.remove()
    x.grad = None
    h2 = x * 3.0
    h2.retain_grad()
    (h2 * 4.0).sum().backward()
    assert h2.grad.item() == 4.0 and h2.grad.dtype == float16 and len(seen) == 1


def test_grad_without_touching_the_leaves():
    x, y = leaf(2.0), leaf(5.0)
    (gx,) = grad(x**3, x)
    assert gx.item() == 12.0 and x.grad is None
    (gx,) = grad(x**3, x, create_graph=True)
    (ggx,) = grad(gx, x)
    assert ggx.item() == 12.0
    with pytest.raises(RuntimeError, match="was not used"):
        grad(x * 2, y)
    assert grad(x * 2, y, allow_unused=True) == (None,)


def test_gradient_penalty_of_second_order():
    x = leaf(1.0, 2.0)
    (g,) = grad((x**3).sum(), x, create_graph=True)
    (g * g).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [4 * 9 * 1.0**3, 4 * 9 * 2.0**3])


def test_no_grad_as_context_and_decorator_and_thread_local():
    x = leaf(1.0)

    @minamp.no_grad()
    def double(v):
        return v * 2

    assert not double(x).requires_grad and (x * 2).requires_grad
    with minamp.no_grad():
        with minamp.enable_grad():
            assert (x * 2).requires_grad
        seen = []
        thread = threading.Thread(target=lambda: seen.append(minamp.is_grad_enabled()))
        thread.start()
        thread.join()
        assert seen == [True] and not minamp.is_grad_enabled()


def test_detach_shares_memory_and_version():
    x = leaf(1.0, 2.0)
    y = (x * x).sum()
    x.detach().add_(1.0)
    assert x.tolist() == [2.0, 3.0]
    with pytest.raises(RuntimeError, match="written in place"):
        y.backward()


def test_grad_must_fit_its_tensor():
    x = leaf(1.0)
    with pytest.raises(RuntimeError, match="grad of a float32 tensor"):
        x.grad = tensor([1.0], dtype=float16)
    with pytest.raises(TypeError, match="Tensor or None"):
        x.grad = 1.0


# ---- bad input


def test_shapes_that_do_not_fit():
    with pytest.raises(RuntimeError, match=r"matmul: shapes don't fit \(a \(2, 3\), b \(2, 3\)\)"):
        minamp.ones(2, 3) @ minamp.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"add: shapes don't fit \(a \(2,\), b \(3,\)\)"):
        minamp.ones(2) + minamp.ones(3)
    with pytest.raises(RuntimeError, match="reshape: shape"):
        minamp.ones(6).reshape(4, 2)
    with pytest.raises(IndexError, match="sum: dim 2 is out of range"):
        minamp.ones(2, 2).sum(2)
    with pytest.raises(IndexError, match="index"):
        minamp.ones(2)[5]


def test_ops_without_any_tensor():
    with pytest.raises(TypeError, match="exp: needs at least one minamp Tensor"):
        OPS["exp"](1.0)


def test_empty_and_zero_size_tensors():
    empty = minamp.zeros(0, 3, requires_grad=True)
    y = (empty @ minamp.ones(3, 2)).sum()
    y.backward()
    assert y.item() == 0.0 and empty.grad.shape == (0, 3)
    assert np.isnan(minamp.zeros(0).mean().item())
    for dtype in (float16, bfloat16):
        assert (minamp.zeros(0, dtype=dtype) * 2.0).dtype == dtype


def test_nothing_warns(recwarn):
    h = tensor([6e4, -6e4, 0.0, float("nan"), float("inf")], dtype=float16, requires_grad=True)
    for y in (
        h * h,
        h / h,
        h.exp(),
        h.log(),
        h.float() * 1e38,
        tensor([1e300]).to(float32),
        h.to(np.dtype(np.int32)),
    ):
        if y.requires_grad:
            y.sum().backward()
    assert not recwarn.list


def test_equality_leaves_what_is_no_tensor_to_python():
    """As PyTorch: None and lists are unequal, so that `x in (None, y)` works."""
    x = tensor([1.0, 2.0])
    for other in (None, "a", [1.0, 2.0], (1.0, 2.0)):
        assert (x == other) is False and (x != other) is True and (other == x) is False
    assert None not in [x] and (x == 1).tolist() == (1 == x).tolist() == [True, False]
    assert (x != np.float32(2)).tolist() == [True, False]
    for compare in (lambda: x == np.ones(2), lambda: np.ones(2) == x):
        with pytest.raises(TypeError, match="eq: b is a NumPy array, not a Tensor"):
            compare()


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.bool_])
@pytest.mark.parametrize(
    "half", [0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), np.array(0.5)], ids=repr
)
def test_integers_beside_a_floating_number_are_float32(kind, half):
    x = Tensor(np.array([1, 0], kind))
    assert (x * half).dtype == (half + x).dtype == float32
    assert (x * half).tolist() == [0.5, 0] and (half + x).tolist() == [1.5, 0.5]
    assert OPS["where"](x > 0, x, half).tolist() == [1, 0.5]


@pytest.mark.parametrize(
    "name",
    "abs neg sign round floor ceil square sqrt rsqrt reciprocal exp expm1 log log1p log2 log10 sin cos tanh sigmoid relu".split(),
)
def test_elementwise_ops_in_place(name):
    x = tensor([0.25, 1.5, 2.5], requires_grad=True)
    y = x * 1.0
    assert getattr(y, name + "_")() is y and y.equal(OPS[name](x))
    (g,) = grad(OPS[name](x).sum(), x)
    y.sum().backward()
    assert x.grad.equal(g)


def test_dtypes_are_numpys_and_shapes_tuples():
    x = minamp.zeros(2, 3)
    assert type(x.dtype) is type(np.dtype(np.float32)) and type(x.shape) is minamp.Size is tuple
    assert x.is_floating_point() and x.numel() == 6


def test_a_device_by_type_and_number():
    assert minamp.device("cuda", 1) == "cuda:1" and minamp.device("cuda", 0).index == 0
    with pytest.raises(RuntimeError, match="unknown device 'gpu:0'"):
        minamp.device("gpu", 0)


def test_cuda_names_of_training_scripts():
    assert minamp.cuda.amp.autocast is minamp.autocast and minamp.cuda.amp.GradScaler is minamp.GradScaler
    minamp.cuda.manual_seed_all(3)
    first = minamp.rand(2).tolist()
    minamp.cuda.manual_seed(3)
    assert minamp.rand(2).tolist() == first
    available = minamp.cuda.is_available()
    assert available == (minamp.gpu_status() == "ok") and minamp.cuda.device_count() == int(available)
    minamp.cuda.synchronize()


def test_a_generator_of_ones_own():
    draws = {
        "rand": lambda g: minamp.rand(6, generator=g),
        "randn": lambda g: minamp.randn(6, generator=g),
        "randint": lambda g: minamp.randint(99, (6,), generator=g),
        "randperm": lambda g: minamp.randperm(9, generator=g),
        "bernoulli": lambda g: minamp.bernoulli(minamp.full((64,), 0.5), generator=g),
        "multinomial": lambda g: minamp.multinomial(minamp.ones(9), 6, generator=g),
        "with replacement": lambda g: minamp.multinomial(minamp.ones(9), 6, True, generator=g),
        "normal_": lambda g: minamp.empty(6).normal_(generator=g),
        "uniform_": lambda g: minamp.empty(6).uniform_(generator=g),
        "uniform_ of halves": lambda g: minamp.empty(6, dtype=float16).uniform_(generator=g),
    }
    for name, draw in draws.items():
        before = minamp.get_rng_state()
        g = minamp.Generator().manual_seed(3)
        first, second = draw(g), draw(g)
        assert not first.equal(second) and draw(g.manual_seed(3)).equal(first), name
        assert minamp.get_rng_state() == before, f"{name} drew from the thread's generator"
        minamp.manual_seed(3)
        assert draw(None).equal(first), name
        with pytest.raises(TypeError, match="generator must be a Generator, got 3: use minamp.Generator"):
            draw(3)
    assert minamp.manual_seed(0).manual_seed(3).random() == minamp.Generator().manual_seed(3).random()


def test_grad_modes_as_torch_spells_them():
    x = leaf(1.0)

    @minamp.no_grad
    def bare(v):
        return v * 2

    assert not bare(x).requires_grad
    minamp.set_grad_enabled(False)  # holds at once
    assert not (x * 2).requires_grad
    minamp.set_grad_enabled(True)
    with minamp.set_grad_enabled(False):
        assert not (x * 2).requires_grad

    @minamp.set_grad_enabled(False)
    def decorated(v):
        return v * 2

    assert (x * 2).requires_grad and not decorated(x).requires_grad
    with minamp.inference_mode():
        assert not (x * 2).requires_grad


def test_masks_and_steps():
    x = tensor([-1.5, 0.5, 2.5])
    mask = (x > 0) & ~(x > 1) | (x < -1) ^ (x > 5)
    assert mask.tolist() == [True, True, False]
    assert (
        x.round().tolist() == [-2, 0, 2]
        and x.floor().tolist() == [-2, 0, 2]
        and x.ceil().tolist() == [-1, 1, 3]
    )
    assert (x / 0.0).isinf().tolist() == [True] * 3


def test_equal_allclose_repeat_and_layout():
    x = tensor([[1.0, 2.0], [3.0, 4.0]])
    assert x.equal(x.clone()) and not x.equal(x[0]) and x.allclose(x + 1e-6) and not x.allclose(x + 1e-3)
    assert tensor([float("nan")]).allclose(tensor([float("nan")]), equal_nan=True)
    assert x.repeat(1, 2).tolist() == [[1, 2, 1, 2], [3, 4, 3, 4]] and x.repeat(2, 1, 1).shape == (2, 2, 2)
    assert not x.T.is_contiguous() and x.T.contiguous().stride() == (2, 1) and x.contiguous() is x
    assert x.new_zeros(2, 3).shape == (2, 3) and x.half().new_ones((2,)).dtype == float16
    assert minamp.finfo(float16).min == -65504 and minamp.finfo(float16).tiny == 2.0**-14


def test_in_place_forms_of_unary_ops():
    x = tensor([0.25, 4.0], dtype=float16)
    assert x.sqrt_().tolist() == [0.5, 2.0] and x.neg_().relu_().tolist() == [0.0, 0.0] and x.dtype == float16


def test_torchs_methods_about_other_tensors_and_formats():
    x = minamp.tensor([[1.5, 2.0], [3.0, 4.0]], requires_grad=True)
    assert [t.element_size() for t in (x, x.half(), x.bfloat16(), x.double(), x.long())] == [4, 2, 2, 8, 8]
    assert x.is_floating_point() and x.half().is_floating_point() and not x.long().is_floating_point()
    assert x.long().type_as(x.half()).dtype == float16
    assert x.half().new_tensor([1, 2]).dtype == float16
    assert minamp.zeros(1, 2).expand_as(x).shape == (2, 2)
    (x.view_as(minamp.zeros(4)) * minamp.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    (x.reshape_as(minamp.zeros(4, 1))[3] * 10.0).sum().backward()
    assert x.grad.tolist() == [[1, 2], [3, 14]]
    y = x * 2
    assert y.detach_() is y and not y.requires_grad and y.is_leaf


# ---- what is no number, no tensor, no function


@pytest.mark.parametrize("wrong", [None, "1", {}, [None, 1.0], ["a"], int], ids=repr)
def test_a_tensor_is_made_of_numbers(wrong):
    x = minamp.ones(2)
    writes = {
        "tensor": lambda: minamp.tensor(wrong),
        "full": lambda: minamp.full((2,), wrong),
        "copy_": lambda: x.copy_(wrong),
        "fill_": lambda: x.fill_(wrong),
        r"x\[key\] = value": lambda: x.__setitem__(0, wrong),
        "data": lambda: setattr(x, "data", wrong),
    }
    if wrong is not None:
        writes["Parameter"] = lambda: minamp.nn.Parameter(wrong)
    for name, write in writes.items():
        with pytest.raises(TypeError, match=f"^{name}: needs numbers or bools, got {type(wrong).__name__} "):
            write()
    assert x.tolist() == [1, 1] and x._version == [0]
    with pytest.raises(TypeError, match="^as_tensor: needs numbers or bools, got ndarray "):
        minamp.as_tensor(np.array(wrong, dtype=object))
    with pytest.raises(TypeError, match="from_numpy: needs a NumPy array, got "):
        minamp.from_numpy(wrong)


def test_fill_takes_one_number():
    x = minamp.ones(2, dtype=float16)
    assert x.fill_(tensor(3.0)).tolist() == x.fill_(np.float64(3)).tolist() == [3, 3]
    for several in ([1.0, 2.0], tensor([1.0, 2.0]), np.ones(2)):
        with pytest.raises(RuntimeError, match=r"fill_: value must be a number or 0-dim, got shape \(2,\)"):
            x.fill_(several)
    assert x.tolist() == [3, 3]


def test_gradients_hooks_and_parameters_of_the_wrong_kind():
    x = leaf(1.0, 2.0)
    y = x * 2
    with pytest.raises(TypeError, match="^backward: gradient must be a Tensor, got list"):
        y.backward([1.0, 1.0])
    with pytest.raises(TypeError, match="^register_hook: hook must be callable, got NoneType"):
        y.register_hook(None)
    with pytest.raises(TypeError, match=r"^grad: inputs\[0\] is a NumPy array, not a Tensor"):
        minamp.autograd.grad(y.sum(), [np.ones(2)])
    with pytest.raises(TypeError, match=r"^clip_grad_norm_: parameters\[1\] is a str, not a Tensor"):
        minamp.nn.utils.clip_grad_norm_([x, "y"], 1.0)
    with pytest.raises(TypeError, match="^BatchNorm1d: x is a list, not a Tensor"):
        minamp.nn.BatchNorm1d(2)([[1.0, 2.0]])
    with pytest.raises(TypeError, match="^flatten: x is a list, not a Tensor"):
        minamp.nn.Flatten()([[1.0, 2.0]])
    assert x.grad is None


def test_a_tensor_of_no_dimensions_is_formatted_as_its_number():
    for dtype in (float32, float64, float16, bfloat16):
        x = tensor(2.5, dtype=dtype, requires_grad=True)
        assert f"{x:.3f}" == "2.500" and f"{x}" == "2.5" and f"{x * 1:>8.1e}" == " 2.5e+00"
    assert f"{tensor(3):03d}" == "003" and f"{tensor(True)}" == "True"
    assert f"{tensor([1, 2])}" == str(tensor([1, 2])) == "tensor([1, 2])"
    with pytest.raises(
        TypeError, match=r"'.2f' formats one number, this tensor has shape \(2,\): use x.tolist"
    ):
        f"{tensor([1.0, 2.0]):.2f}"


def test_dtypes_that_values_show_by_themselves_are_not_printed():
    assert repr(tensor([True])) == "tensor([ True])" and repr(tensor(2)) == "tensor(2)"
    assert repr(tensor(2, dtype=np.int32)) == "tensor(2, dtype=int32)"
    assert repr(tensor([1.5], dtype=float16)) == "tensor([1.5], dtype=float16)"
    x = tensor([1.0])
    assert +x is x


@pytest.mark.parametrize(
    "fill, name",
    [
        (lambda x: x.fill_(-1e9), "fill_"),
        (lambda x: x.new_full((2,), -1e9), "new_full"),
        (lambda x: minamp.full_like(x, -1e9), "full"),
        (lambda x: minamp.full((2,), -1e9, dtype=x.dtype), "full"),
    ],
)
def test_a_number_beyond_the_format_is_refused_and_an_infinity_is_not(fill, name):
    for dtype, there in ((minamp.float16, False), (minamp.bfloat16, True), (minamp.float32, True)):
        x = minamp.ones(2, dtype=dtype)
        if there:
            assert fill(x)[0].item() == pytest.approx(-1e9, rel=1e-2)
            continue
        with pytest.raises(RuntimeError, match=f"^{name}: value -1000000000.0 can't be held by float16"):
            fill(x)
        assert x.tolist() == [1.0, 1.0]
        assert minamp.full((), -np.inf, dtype=dtype).item() == x.fill_(-np.inf)[0].item() == -np.inf


def test_a_number_beyond_the_format_that_is_put_somewhere_is_infinite_without_a_warning(recwarn):
    x = minamp.ones(3, dtype=minamp.float16)
    x[1:] = -1e9  # as in PyTorch
    assert x.tolist() == [1.0, -np.inf, -np.inf] and not recwarn.list


# ---------------------------------------------------------------------------------------------- modes, hooks, copies, keywords


@pytest.mark.parametrize("mode", [minamp.no_grad, minamp.inference_mode, minamp.autocast, minamp.enable_grad])
def test_one_mode_object_in_two_threads(mode):
    """Both are inside when the first leaves; each goes on with what it came with."""
    shared, entered, left, found = mode(), threading.Event(), threading.Event(), []

    def state():
        return minamp.is_grad_enabled(), minamp.is_autocast_enabled()

    def other():
        with minamp.set_grad_enabled(mode is minamp.enable_grad):
            before = state()
            with shared:
                entered.set()
                left.wait(timeout=30)
            found.append(state() == before)

    before, thread = state(), threading.Thread(target=other)
    with shared:
        thread.start()
        assert entered.wait(timeout=30)
    assert state() == before
    left.set()
    thread.join(timeout=30)
    assert found == [True] and state() == before


def test_modes_nest_in_themselves():
    from minamp.autocast import without_autocast

    for mode, inside in ((minamp.no_grad(), False), (minamp.set_grad_enabled(False), False)):
        with mode, mode:
            assert minamp.is_grad_enabled() is inside
        minamp.set_grad_enabled(True)
    off = without_autocast()
    with minamp.autocast():
        with off, off:
            assert not minamp.is_autocast_enabled()
        assert minamp.is_autocast_enabled()


def test_inference_mode_takes_a_mode():
    with minamp.inference_mode(True):
        assert not minamp.is_grad_enabled()
        with minamp.inference_mode(False):
            assert minamp.is_grad_enabled()
    with minamp.inference_mode(mode=True):
        assert not minamp.is_grad_enabled()
    assert not minamp.inference_mode(minamp.is_grad_enabled)() and minamp.is_grad_enabled()


def test_a_hook_that_removes_itself_leaves_the_others():
    seen = []
    x = tensor([1.0], requires_grad=True)
    first = x.register_hook(lambda g: (seen.append("first"), first.remove())[1])
    x.register_hook(lambda g: seen.append("second"))
    for _ in range(2):
        (x * 1).sum().backward()
    assert seen == ["first", "second", "second"]


@pytest.mark.parametrize(
    "answer, error, text",
    [
        (minamp.ones(3), RuntimeError, r"hook: the gradient has shape \(2,\), the hook returned \(3,\)"),
        (np.ones(2), TypeError, "hook: a gradient's hook returns a Tensor or None, got ndarray"),
    ],
)
@pytest.mark.parametrize("leaf", [True, False])
def test_what_a_hook_may_return(answer, error, text, leaf):
    x = tensor([1.0, 2.0], requires_grad=True)
    y = x if leaf else x * 1
    y.register_hook(lambda g: answer)
    with pytest.raises(error, match=text):
        (y * 2).sum().backward()
    assert x.grad is None


def test_create_graph_gives_every_leaf_a_gradient_of_its_own():
    a, b, seed = minamp.ones(2, requires_grad=True), minamp.ones(2, requires_grad=True), minamp.ones(2) * 3
    (a + b).backward(seed, create_graph=True)
    assert a.grad is not b.grad and a.grad.requires_grad is False
    minamp.nn.utils.clip_grad_norm_([a, b], 1.0)
    np.testing.assert_allclose(a.grad.tolist() + b.grad.tolist(), [0.5] * 4, rtol=1e-6)
    assert seed.tolist() == [3.0, 3.0]
    a.grad = None
    a.sum().backward(create_graph=True)
    minamp.nn.utils.clip_grad_norm_([a], 0.5)  # what a sum hands down is expanded, and can't be written
    np.testing.assert_allclose(a.grad.tolist(), [0.5 / 2**0.5] * 2, rtol=1e-5)


def test_grad_says_what_is_missing():
    x = tensor([1.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="grad: 2 outputs and 1 grad_outputs"):
        minamp.autograd.grad([x * 1, x * 2], x, [tensor([1.0])])
    with pytest.raises(RuntimeError, match=r"grad: inputs\[1\] of shape \(2,\) requires no grad"):
        minamp.autograd.grad(x * 1, [x, minamp.ones(2)])


def test_copies():
    """A copy shares the memory and is a leaf of its own; a deep or pickled one shares nothing. An op is always itself."""
    w = minamp.nn.Parameter(np.ones(2, np.float32))
    w.grad = minamp.ones(2)
    twin = copy.copy(w)
    (twin * 3).sum().backward()
    assert type(twin) is type(w) and twin.grad.tolist() == [3, 3] and w.grad.tolist() == [1, 1]
    with minamp.no_grad():
        twin.add_(1)
    assert w.tolist() == [2, 2]
    view = minamp.zeros(2, 2)[0]
    for deep in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        deep.add_(tensor([1.0, 2.0], requires_grad=True))
        assert deep.requires_grad and deep.tolist() == [1, 2] and not view.any()
    assert copy.deepcopy(F.relu) is F.relu and pickle.loads(pickle.dumps(F.relu)) is F.relu


WRITES = {
    "fill_": lambda x, n: x.fill_(n),
    "x[key] = n": lambda x, n: x.__setitem__(0, n),
    "masked_fill_": lambda x, n: x.masked_fill_(tensor([True, False]), n),
    "new_full": lambda x, n: x.new_full((2,), n),
    "full_like": lambda x, n: minamp.full_like(x, n),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "kind, number",
    [("uint8", 300), ("uint8", -7e2), ("uint8", math.nan), ("uint8", math.inf)]
    + [("int64", n) for n in (1e300, math.nan, -math.inf)],
)
def test_numbers_that_integers_can_not_hold_are_not_written(write, kind, number):
    x = minamp.ones(2, dtype=getattr(minamp, kind))
    with pytest.raises(RuntimeError, match=f"a number among .* can't be held by {kind}"):
        WRITES[write](x, number)
    assert x.tolist() == [1, 1]


def test_numbers_beyond_an_integer_dtype():
    with pytest.raises(RuntimeError, match="where: a number among 300 to 300 can't be held by uint8"):
        minamp.where(tensor([True]), minamp.ones(1, dtype=minamp.uint8), 300)
    for data in (2**63, [2**63]):
        with pytest.raises(RuntimeError, match="tensor: a number among .* can't be held by .*int64"):
            tensor(data)
    x = minamp.zeros(1, dtype=float16)
    x[0] = 1e5  # floats overflow to inf, as in PyTorch
    assert x.item() == math.inf


def test_view_copies_where_it_has_to():
    x = minamp.zeros(2, 3)
    x.view(-1).add_(1)
    x.t().view(-1).add_(1)  # lost, where torch refuses
    assert x.tolist() == [[1, 1, 1], [1, 1, 1]]
    images = F.conv2d(minamp.ones(2, 1, 3, 3), minamp.ones(2, 1, 2, 2))
    assert not images.is_contiguous() and images.view(2, -1).shape == (2, 8)


def test_arange_of_int64_counts_in_ints():
    assert minamp.arange(2.5, dtype=minamp.int64).tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="by 0 has no end"):
        minamp.arange(0, 1, 0.1, dtype=minamp.int64)


def test_arguments_by_name():
    """By our names and by torch's; a tensor among them is an argument like any other, promoted and recorded."""
    x, y = tensor([1, 2]), tensor([1.5, 3.0], requires_grad=True)
    for z in (minamp.maximum(x, b=y), minamp.maximum(input=x, other=y), minamp.maximum(x, other=y)):
        assert z.tolist() == [1.5, 3.0] and z.requires_grad
    minamp.matmul(tensor([1.0, 1.0]), other=y).backward()
    assert y.grad.tolist() == [1.0, 1.0]
    assert minamp.exp(input=tensor([0.0])).item() == 1.0
    rows = tensor([[1.0, 2.0], [3.0, 4.0]])
    assert rows.sum(axis=1).tolist() == minamp.sum(input=rows, dim=1).tolist() == [3.0, 7.0]
    assert minamp.cat([rows, rows], axis=1).shape == (2, 4) and rows.argmax(axis=0).tolist() == [1, 1]
    assert minamp.pow(rows, exponent=2).tolist() == rows.pow(exponent=2).tolist() == [[1.0, 4.0], [9.0, 16.0]]
    assert rows.mean(axis=1, keepdims=True).tolist() == [[1.5], [3.5]]
    assert minamp.where(rows > 2.0, input=rows, other=0.0).tolist() == [[0.0, 0.0], [3.0, 4.0]]
    with pytest.raises(TypeError, match="pow: takes a, exponent, and no argument named 'power'"):
        minamp.pow(y, power=2)
    with pytest.raises(TypeError, match="sum: takes x, dim, keepdim, dtype, and no argument named 'mask'"):
        rows.sum(mask=y)


def test_arguments_of_composites_in_place_forms_and_sizes_by_name():
    x = tensor([[1.0, 2.0, 3.0]])
    y = tensor([[3.0, 1.0, 2.0]])
    assert minamp.max(input=x, other=y).tolist() == minamp.max(x, other=y).tolist() == [[3.0, 2.0, 3.0]]
    assert x.max(axis=1, keepdims=True)[0].tolist() == [[3.0]]
    assert minamp.stack([x, y], axis=1).shape == (1, 2, 3) and minamp.squeeze(input=x).shape == (3,)
    assert minamp.equal(x, other=x)
    assert x.clone().add_(other=y, alpha=2).tolist() == [[7.0, 4.0, 7.0]]
    at = tensor([[2, 0]])
    assert (
        x.scatter(1, at, value=9.0).tolist()
        == x.clone().scatter_(1, at, value=9).tolist()
        == [[9.0, 2.0, 9.0]]
    )
    with pytest.raises(TypeError, match="scatter: value is a NoneType, not a Tensor"):
        x.scatter(1, at)
    with pytest.raises(TypeError, match="add: takes .* and no argument named 'mask'"):
        x.add_(mask=y)
    assert minamp.flip(x, dims=(1,)).tolist() == x.flip(dims=[1]).tolist() == [[3.0, 2.0, 1.0]]
    assert minamp.permute(x, dims=(1, 0)).shape == minamp.reshape(x, shape=(3, 1)).shape == (3, 1)
    assert x.view(size=(3,)).shape == (3,) and x.expand(size=(2, 3)).shape == x.repeat(repeats=(2, 1)).shape
    for make in (minamp.zeros, minamp.ones, minamp.empty, minamp.rand, minamp.randn):
        assert make(size=(2, 3)).shape == minamp.Size([2, 3])
    for like in (minamp.zeros_like, minamp.ones_like, minamp.empty_like, minamp.rand_like, minamp.randn_like):
        assert like(x, device="cpu").shape == x.new_empty(1, 3, device="cpu").shape == x.shape
    assert x.new_ones((2,), dtype=float16, device="cpu").dtype == float16
    assert minamp.zeros(2).copy_(x[0, :2], non_blocking=True).tolist() == [1.0, 2.0]


def test_random_values_written_in_place():
    minamp.manual_seed(0)
    x = minamp.nn.Parameter(minamp.zeros(100, 100))
    assert (
        x.data.normal_(1.0, 0.5) is not x
        and abs(x.mean().item() - 1.0) < 0.02
        and abs(x.std().item() - 0.5) < 0.02
    )
    x.data.uniform_(-0.25, 0.25)
    assert x.min().item() >= -0.25 and x.max().item() < 0.25 and abs(x.std().item() - 0.5 / 12**0.5) < 0.01
    # two float16 numbers, of which the second is left out
    half = minamp.zeros(1000, dtype=float16).uniform_(1.0, 1.001)
    assert half.dtype == float16 and set(half.tolist()) == {1.0}
    with pytest.raises(RuntimeError, match="in-place write to a leaf that requires grad"):
        x.normal_()
    y = x * 2.0
    y.normal_().sum().backward()
    assert not x.grad.any()
    with pytest.raises(RuntimeError, match="normal_: draws floating values"):
        tensor([1, 2]).normal_()


def test_waiting_times_and_coins_written_in_place():
    minamp.manual_seed(0)
    x = minamp.empty(100, 100, dtype=float16)
    assert abs(x.exponential_(4.0).float().mean().item() - 0.25) < 0.01 and x.min().item() >= 0
    assert x.dtype == float16 and abs(x.bernoulli_(0.3).float().mean().item() - 0.3) < 0.02
    assert set(x.reshape(-1).tolist()) == {0.0, 1.0} and minamp.zeros(()).bernoulli_(1.0).item() == 1.0
    assert minamp.zeros(3, dtype=np.int64).bernoulli_(1.0).tolist() == [1, 1, 1]
    for call, text in (
        (lambda: x.exponential_(0.0), "exponential_: lambd must be above 0, got 0.0"),
        (lambda: x.bernoulli_(1.5), r"bernoulli_: p must lie in \[0, 1\], got 1.5"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(RuntimeError, match="exponential_: draws floating values"):
        tensor([1, 2]).exponential_()


def test_the_seed_and_the_state_of_a_generator():
    g = minamp.Generator(device="cpu").manual_seed(7)
    state = g.get_state()
    first = minamp.rand(3, generator=g).tolist()
    assert minamp.rand(3, generator=g.set_state(state)).tolist() == first and g.initial_seed() == 7
    assert g.seed() == g.initial_seed() != 7
    drawn = minamp.rand(3, generator=g).tolist()
    assert minamp.rand(3, generator=minamp.Generator().manual_seed(g.initial_seed())).tolist() == drawn
    with pytest.raises(RuntimeError, match="unknown device 'nowhere'"):
        minamp.Generator("nowhere")


def test_tensors_side_by_side_and_one_above_the_other():
    shapes = (
        [[(2,), (3,)], [(2, 1), (2, 3)], [(), ()], [(2, 1, 4), (2, 3, 4)]],
        [[(3,), (2, 3)], [(3,), (3,)]],
    )
    for name, cases in zip(("hstack", "vstack"), shapes, strict=True):
        for case in cases:
            arrays = [np.random.default_rng(0).random(s, np.float32) for s in case]
            joined = getattr(minamp, name)([tensor(a) for a in arrays])
            assert np.array_equal(joined.numpy(), getattr(np, name)(arrays))


def test_draws_by_probabilities():
    minamp.manual_seed(0)
    p = minamp.full((10000,), 0.3)
    assert abs(minamp.bernoulli(p).mean().item() - 0.3) < 0.02
    ends = minamp.bernoulli(tensor([0.0, 1.0]).half())
    assert ends.tolist() == [0.0, 1.0] and ends.dtype == float16
    weights = tensor([[0.0, 1.0, 3.0, 0.0], [2.0, 0.0, 0.0, 2.0]])
    drawn = minamp.multinomial(weights, 20000, replacement=True)
    share = F.one_hot(drawn, 4).float().mean(1)
    assert drawn.dtype == np.int64 and drawn.shape == (2, 20000)
    assert minamp.allclose(share, tensor([[0.0, 0.25, 0.75, 0.0], [0.5, 0.0, 0.0, 0.5]]), atol=0.02)
    assert [sorted(row) for row in minamp.multinomial(weights, 2).tolist()] == [[1, 2], [0, 3]]
    first = [minamp.multinomial(weights[0], num_samples=2)[0].item() for _ in range(2000)]
    assert set(first) == {1, 2} and abs(first.count(2) / 2000 - 0.75) < 0.04
    assert minamp.multinomial(weights[0], 1).shape == (1,)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: minamp.bernoulli(tensor([1.5])), r"bernoulli: probabilities must lie in \[0, 1\]"),
        (lambda: minamp.bernoulli(tensor([float("nan")])), "bernoulli: probabilities"),
        (lambda: minamp.multinomial(tensor([1.0, -1.0]), 1), "multinomial: weights must be finite"),
        (lambda: minamp.multinomial(tensor([1.0, 0.0]), 2), "fewer than 2 are above 0: draw fewer"),
        (lambda: minamp.multinomial(tensor([0.0, 0.0]), 2, True), "fewer than 1 are above 0"),
        (lambda: minamp.multinomial(minamp.ones(1, 1, 1), 1), "multinomial: input has shape"),
        (lambda: minamp.multinomial(tensor([1, 2]), 1), "multinomial: not defined for int64"),
    ],
)
def test_what_nothing_can_be_drawn_by(call, text):
    with pytest.raises(RuntimeError, match=text):
        call()


def test_tensor_takes_what_torchs_takes():
    assert minamp.Tensor([1, 2]).dtype == minamp.Tensor([1e10]).dtype == float32
    assert minamp.Tensor(np.array([1, 2])).dtype == np.int64
    for bad in (None, "abc", [None]):
        with pytest.raises(TypeError, match="Tensor: needs numbers or bools"):
            minamp.Tensor(bad)
    for sizes in ((2, 3), (1, 2, 3)):
        with pytest.raises(
            TypeError, match=rf"Tensor: takes an array, not sizes: use minamp.zeros\({str(sizes)[1:-1]}\)"
        ):
            minamp.Tensor(*sizes)


def test_an_expand_that_repeats_nothing_may_be_written_to():
    x = minamp.ones(2, 3)
    for y in (x.expand_as(x), x.expand(1, 2, 3), x[:, :1].expand(2, 1)):
        y.mul_(2.0)
    assert x.tolist() == [[8.0, 4.0, 4.0]] * 2
    for y in (x.expand(2, 2, 3), x[:1].expand(2, 3)):
        with pytest.raises(RuntimeError, match="several elements of this tensor share one place"):
            y.mul_(2.0)


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.repeat(2, 1),
        lambda x: x.repeat(1),
        lambda x: x.reshape(()).cumsum(0),
        lambda x: x.reshape(()).cumprod(0),
    ],
)
def test_what_is_no_view_shares_no_memory(copy):
    x = minamp.tensor([2.0], requires_grad=True)
    y = copy(x * 1)
    y.mul_(3.0)
    y.sum().backward()
    assert x.grad.item() == 3.0 * y.numel()
    x = minamp.tensor([2.0])
    y = copy(x)
    x.fill_(7.0)
    assert y.reshape(-1).tolist() == [2.0] * y.numel()


def test_t_of_a_vector_is_a_view():
    x = minamp.ones(3).requires_grad_()
    assert x.t() is not x and not x.t().is_leaf
    assert minamp.tensor(2.0).t().shape == ()


@pytest.mark.parametrize("dtype", [minamp.float32, minamp.bfloat16, np.dtype(np.int64)])
def test_one_element_takes_a_value_of_any_number_of_dimensions(dtype):
    x = minamp.zeros(2, 2, dtype=dtype)
    x[0, 1] = minamp.ones(1, 1)
    x[1][0] = minamp.ones(1)
    assert x.tolist() == [[0, 1], [1, 0]]
    w = minamp.ones(1).requires_grad_()
    y = minamp.zeros(2)
    y[1] = w
    (y * 3).sum().backward()
    assert w.grad.tolist() == [3.0]


def test_a_value_that_does_not_fit_is_refused_in_words():
    x = minamp.zeros(2, 3)
    for key, value in ((0, minamp.ones(2, 3)), ((0, 0), minamp.ones(2)), (slice(1), minamp.ones(2))):
        with pytest.raises(RuntimeError, match=r"x\[key\] = value: value of shape .* doesn't fit x of shape"):
            x[key] = value
    assert not x.any()


def test_a_view_is_not_detached_in_place():
    x = minamp.ones(2, 3).requires_grad_()
    y = x * 2
    with pytest.raises(RuntimeError, match=r"detach_: a view .*use x.detach\(\)"):
        y[0].detach_()
    assert not y.detach_().requires_grad and not x.detach().detach_().requires_grad


@pytest.mark.parametrize("parts", [lambda x: x.chunk(2), lambda x: x.split(1), lambda x: x.unbind(0)])
def test_one_of_several_views_is_written_like_any_other(parts):
    x = minamp.ones(2, 2).requires_grad_()
    y = x * 1
    parts(y)[0].mul_(3.0)
    (y * y).sum().backward()
    assert x.grad.tolist() == [[18.0, 18.0], [2.0, 2.0]]
    with pytest.raises(RuntimeError, match="in-place write to a leaf|leaf that requires grad"):
        parts(x)[0].mul_(3.0)


def test_an_op_may_write_over_what_it_reads_itself():
    x = minamp.full((2,), 3.0).requires_grad_()
    y = x * 1
    y.mul_(y)
    y.sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]


def test_a_view_made_under_no_grad_wants_no_gradient():
    x = minamp.ones(2, 2).requires_grad_()
    with minamp.no_grad():
        views = x[0], x.t(), x.reshape(-1), x.expand(3, 2, 2), x.chunk(2)[0]
    assert not any(v.requires_grad for v in views)
