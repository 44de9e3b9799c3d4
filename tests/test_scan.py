"""Running sums and products: gradients with and without zeros, float32 accumulators, and half at its limits."""

import itertools
import math

import numpy as np
import pytest

import minamp
from minamp import bfloat16, float16, float32, float64, tensor
from minamp.autograd import check_grads
from minamp.methods import OPS
from minamp.tensor import Tensor

_rng = np.random.default_rng(5)
ZEROS = np.array([[0.0, 1.5, -0.5], [0.0, 0.0, 2.0], [0.7, -1.2, 0.4]])  # columns with two, one and no zeros


def a(*shape):
    return _rng.standard_normal(shape)


@pytest.mark.parametrize(
    "function, arrays",
    [
        (lambda x: x.cumsum(1) ** 2, (a(2, 3, 2),)),
        (lambda x: x.cumsum(0) * x, (a(),)),
        (lambda x: x.cumprod(0), (a(4, 2),)),
        (lambda x: x.cumprod(-1), (ZEROS,)),
        (lambda x: x.cumprod(0), (ZEROS,)),
        (lambda x: x.cumprod(0) * x, (a(),)),
        (lambda x: x.prod(), (a(2, 3),)),
        (lambda x: x.prod() * x, (a(),)),
        (lambda x: x.prod(1), (a(2, 3),)),
        (lambda x: x.prod(0, keepdim=True), (ZEROS,)),
        (lambda x: x.prod(), (np.array([0.5, 0.0, -2.0]),)),
        (lambda x: x.prod(), (np.array([0.5, 0.0, 0.0]),)),
        (lambda p, q: OPS["recurrence"](p, q, 0), (a(4, 2), a(4, 2))),
        (lambda p, q: OPS["recurrence"](p, q, 1), (a(2, 1), a(2, 1))),
    ],
)
def test_gradients(function, arrays):
    check_grads(function, *arrays)


def test_the_gradient_of_a_product_is_that_of_its_definition():
    x = [3.0, 0.0, 2.0, 0.5]
    leaf = tensor(x, requires_grad=True)
    leaf.prod().backward()
    assert leaf.grad.tolist() == [math.prod(x[:i] + x[i + 1 :]) for i in range(4)] == [0, 3, 0, 0]
    leaf.grad = None
    leaf.cumprod(0).sum().backward()
    # dy[j] / dx[i], summed over j >= i
    assert leaf.grad.tolist() == [
        sum(math.prod(x[:i] + x[i + 1 : j + 1]) for j in range(i, 4)) for i in range(4)
    ]


@pytest.mark.parametrize("dtype, n", [(float16, 4096), (bfloat16, 1000)])
def test_running_sums_are_float32(dtype, n):
    x = minamp.ones(n, 2, dtype=dtype, requires_grad=True)
    y = x.cumsum(0)
    assert y.dtype == dtype and y[-1].tolist() == [n, n]
    y[-1].sum().backward()
    assert x.grad.dtype == dtype and np.all(x.grad.numpy() == 1)
    x.grad = None
    x.cumsum(0).sum().backward()
    assert x.grad[0, 0].item() == n  # n gradients of 1 come back to the first


def test_running_products_are_float32():
    x = tensor([300.0, 300.0, 2.0**-10], dtype=float16)  # 90000 on the way is inf in half
    assert x.prod().item() == x.prod(0).item() == 87.875  # 87.890625 rounded to half once
    assert x.cumprod(0).tolist() == [300, math.inf, 87.875]


def test_half_at_its_limits():
    x = tensor([6e4, -6e4], dtype=float16, requires_grad=True)
    y = x.prod()
    assert y.item() == -math.inf  # -3.6e9
    y.backward()
    assert x.grad.tolist() == [-6e4, 6e4]  # though the product itself is infinite
    for edge, sign, count in itertools.product((148.0, 65504.0, 6e4, 0.0), (1, -1), (1, 2)):
        x = tensor([sign * edge] * count, dtype=float16, requires_grad=True)
        for function in (lambda x: x.prod(), lambda x: x.cumprod(0)[-1], lambda x: x.cumsum(0)[0]):
            x.grad = None
            function(x).backward()
            assert np.isfinite(x.grad.numpy()).all()


def test_dtypes():
    ints, flags = tensor([[1, 2], [3, 4]]), Tensor(np.array([True, True, False]))
    assert ints.cumsum(1).tolist() == [[1, 3], [3, 7]] and ints.cumprod(0).tolist() == [[1, 2], [3, 8]]
    assert ints.int().prod().dtype == ints.int().cumsum(0).dtype == flags.cumsum(0).dtype == np.int64
    bytes_ = tensor([200, 100], dtype=minamp.uint8)
    assert bytes_.prod().dtype == bytes_.cumsum(0).dtype == bytes_.cumprod(0).dtype == np.int64
    assert bytes_.cumsum(0).tolist() == [200, 300] and (bytes_.prod() * -1).item() == -20000
    assert flags.prod().item() == 0 and flags.cumsum(0).tolist() == [1, 2, 2]
    for kind in (np.uint8, np.int32, np.bool_):  # all count in int64, also a single number
        for x in (Tensor(np.ones(2, kind)), Tensor(np.array(1, kind))):
            assert x.cumsum(0).dtype == x.cumprod(0).dtype == x.prod().dtype == x.prod(0).dtype == np.int64
    assert Tensor(np.full(3, 200, np.uint8)).cumsum(0).tolist() == [200, 400, 600]
    h = minamp.ones(3, dtype=float16)
    for name, args in (("cumsum", (0,)), ("cumprod", (0,)), ("prod", ()), ("prod", (0,))):
        f = OPS[name]
        assert f(h, *args).dtype == float16 and f(h, *args, dtype=float64).dtype == float64
        with minamp.autocast():
            assert f(h, *args).dtype == f(h.bfloat16(), *args).dtype == float32
            assert f(h, *args, dtype=float16).dtype == float16 and f(h.double(), *args).dtype == float64
            assert f(ints, *args).dtype == np.int64


def test_nothing_and_numbers():
    empty, number = minamp.zeros(0, 3, requires_grad=True), tensor(3.0)
    assert (
        empty.prod().item() == 1 and empty.prod(0).tolist() == [1, 1, 1] and empty.cumprod(0).shape == (0, 3)
    )
    (empty.prod(0).sum() + empty.cumprod(0).sum() + empty.cumsum(0).sum()).backward()
    assert empty.grad.shape == (0, 3)
    assert number.cumsum(0).shape == number.cumprod(-1).shape == number.prod(0, True).shape == ()


def test_errors():
    x = minamp.ones(2, 3)
    for name in ("cumsum", "cumprod", "prod"):
        with pytest.raises(
            IndexError, match=rf"{name}: dim 2 is out of range for a tensor of shape \(2, 3\)"
        ):
            OPS[name](x, 2)
    with pytest.raises(TypeError, match=r"prod: dim must be one int, got \(0, 1\): use .prod\(a\).prod\(b\)"):
        x.prod((0, 1))
