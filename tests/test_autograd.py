"""autograd.Function, detect_anomaly, check_grads."""

import numpy as np
import pytest

import minamp
from minamp import float16, float32, tensor
from minamp.autograd import Function, check_grads, detect_anomaly, is_anomaly_enabled, set_detect_anomaly


class Cube(Function):
    @staticmethod
    def forward(ctx, x, factor=1.0):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * x * factor

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x * x * ctx.factor, None


class SumAndDifference(Function):
    @staticmethod
    def forward(ctx, a, b):
        return a + b, a - b

    @staticmethod
    def backward(ctx, g, h):
        assert not minamp.is_grad_enabled()
        return g + h, g - h


def test_function_and_its_second_derivative():
    x = tensor([2.0], requires_grad=True)
    y = Cube.apply(x, 2.0)
    assert y.requires_grad and not y.is_leaf
    y.sum().backward()
    assert x.grad.item() == 24.0
    check_grads(lambda x: Cube.apply(x), np.array([0.3, -1.2]))


def test_function_with_two_outputs():
    a, b = tensor([1.0], requires_grad=True), tensor([2.0], requires_grad=True)
    s, d = SumAndDifference.apply(a, b)
    (s * 3 + d * 5).sum().backward()
    assert a.grad.item() == 8.0 and b.grad.item() == -2.0
    a.grad = None
    s, d = SumAndDifference.apply(a, b)
    s.sum().backward()  # d gets zeros
    assert a.grad.item() == 1.0


def test_function_gradients_take_the_dtype_of_the_input():
    x = tensor([2.0], dtype=float16, requires_grad=True)
    Cube.apply(x.float()).sum().backward()
    assert x.grad.dtype == float16 and x.grad.item() == 12.0


def test_function_errors():
    class Short(Cube):
        @staticmethod
        def backward(ctx, g):
            return ()

    class Wrong(Cube):
        @staticmethod
        def backward(ctx, g):
            return minamp.ones(3, 3), None

    x = tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="Short.backward returned 0 gradients for 1 arguments"):
        Short.apply(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"Wrong.backward returned a gradient of shape \(3, 3\)"):
        Wrong.apply(x, 1.0).sum().backward()
    y = Cube.apply(x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="freed by the first backward"):
        y.backward()
    y = Cube.apply(x).sum()
    with minamp.no_grad():
        x += 1
    with pytest.raises(RuntimeError, match="written in place after it was saved"):
        y.backward()


def test_needs_input_grad_and_non_differentiable_outputs():
    seen = []

    class Split(Function):
        @staticmethod
        def forward(ctx, x, y):
            seen.append(ctx.needs_input_grad)
            mark = x > 0
            ctx.mark_non_differentiable(mark)
            return x * 2, mark

        @staticmethod
        def backward(ctx, g, _):
            return g * 2, None

    y, mark = Split.apply(tensor([1.0], requires_grad=True), tensor([1.0]))
    assert seen == [(True, False)] and y.requires_grad and not mark.requires_grad


def test_detect_anomaly_names_op_and_line():
    x = tensor([0.0, 1.0], requires_grad=True)
    with detect_anomaly():
        assert is_anomaly_enabled()
        y = (x.sqrt() * 0.0).sum()  # the made line
        with pytest.raises(
            RuntimeError, match=r"backward of sqrt gave nan.*test_autograd.py:\d+ in .*the made line"
        ):
            y.backward()
    assert not is_anomaly_enabled()
    (x.sqrt() * 0.0).sum().backward()
    assert np.isnan(x.grad.numpy()[0])


def test_detect_anomaly_around_backward_only_and_switching():
    x = tensor([0.0], requires_grad=True)
    y = (x.sqrt() * 0.0).sum()
    set_detect_anomaly(True)
    try:
        with pytest.raises(RuntimeError, match="made before anomaly detection was switched on"):
            y.backward()
        with set_detect_anomaly(False):
            assert not is_anomaly_enabled()
        assert is_anomaly_enabled()
        with detect_anomaly(check_nan=False):
            (x.sqrt() * 0.0).sum().backward()
    finally:
        set_detect_anomaly(False)
    assert not is_anomaly_enabled()


def test_check_grads_finds_a_wrong_gradient():
    class Wrong(Cube):
        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 2 * x * x, None

    with pytest.raises(AssertionError, match="argument 0: gradient along a direction"):
        check_grads(lambda x: Wrong.apply(x), np.array([1.0, 2.0]))


def test_autocast_dtype_of_a_function_output_is_its_own():
    x = tensor([2.0], requires_grad=True)
    with minamp.autocast():
        assert Cube.apply(x).dtype == float32


@pytest.mark.parametrize("materialize", [True, False])
def test_an_output_without_gradient_gives_backward_zeros_or_none(materialize):
    seen = []

    class Two(minamp.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(materialize)
            return x * 1, x * 2

        @staticmethod
        def backward(ctx, a, b):
            seen.append(b)
            return a

    x = minamp.tensor([1.0, 2.0], requires_grad=True)
    Two.apply(x)[0].sum().backward()
    assert x.grad.tolist() == [1, 1]
    assert (seen[0].tolist() == [0, 0]) if materialize else (seen[0] is None)


def test_a_function_may_write_into_its_input():
    class Increment(minamp.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.add_(1.0)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, g):
            return g * 3

    x = minamp.tensor([1.0, 2.0], requires_grad=True)
    y = x * 1
    out = Increment.apply(y)
    assert out.tolist() == y.tolist() == [2, 3]
    out.sum().backward()
    assert x.grad.tolist() == [3, 3]
    y = x * 1
    square = y * y
    Increment.apply(y)
    with pytest.raises(
        RuntimeError, match="mul: argument 'a' of shape .* was saved for backward and then written"
    ):
        square.sum().backward()


@pytest.mark.parametrize("dtype", [minamp.float32, minamp.float16, minamp.bfloat16])
def test_a_gradient_that_is_there_is_added_to_in_its_memory(dtype):
    flat = minamp.zeros(6, dtype=dtype)
    p = minamp.ones(2, 2, dtype=dtype, requires_grad=True)
    p.grad = flat[1:5].reshape(2, 2)
    held, version = p.grad, p.grad._version[0]
    (p * 3.0).sum().backward()
    (p * 2.0).sum().backward()
    assert p.grad is held and held._version[0] > version
    assert flat.tolist() == [
        0.0,
        5.0,
        5.0,
        5.0,
        5.0,
        0.0,
    ]  # as in PyTorch: a flat buffer may hold all gradients
