"""@op: what a declaration may say, and what it is refused for."""

import numpy as np
import pytest

import minamp
from minamp import op as ops
from minamp.op import NOT_LISTED, Op


@pytest.fixture(autouse=True)
def undeclared():
    """Takes the ops that a test declares out of the table again."""
    before = dict(ops.OPS)
    yield
    ops.OPS.clear()
    ops.OPS.update(before)


def leaf(*values):
    return minamp.tensor(np.array(values, np.float32), requires_grad=True)


def counted(calls):
    """a * b + e**b whose gradients share e**b, which itself needs the shared product; every computing is noted in `calls`."""

    @ops.op(policy=NOT_LISTED)
    class counted_op:
        def forward(m, a, b):
            return a * b + m.exp(b)

        def shared_product(m, g, a, b):
            calls.append("product")
            return a * b

        def shared_power(m, g, product, b):
            calls.append("power")
            return m.exp(b) + 0.0 * product

        def vjp_a(m, g, b, power):
            return g * b + 0.0 * power

        def vjp_b(m, g, a, power):
            return g * (a + power)

    return counted_op


def test_what_gradients_share_is_computed_once():
    calls, a, b = [], leaf(2.0, 3.0), leaf(0.0, 1.0)
    counted(calls)(a, b).sum().backward()
    assert calls == ["product", "power"]
    assert np.allclose(a.grad.numpy(), [0, 1]) and np.allclose(b.grad.numpy(), [3, 3 + np.e])


def test_nothing_shared_is_computed_that_no_wanted_gradient_names():
    calls, a = [], leaf(2.0)

    @ops.op(policy=NOT_LISTED)
    class half_shared:
        def forward(m, a, b):
            return a * b

        def shared_costly(m, g, a):
            calls.append("costly")
            return a

        def vjp_a(m, g, b):
            return g * b

        def vjp_b(m, g, costly):
            return g * costly

    y = half_shared(a, minamp.tensor([5.0]))
    assert len(y.grad_fn.saved) == 1  # b alone
    y.sum().backward()
    assert calls == [] and a.grad.item() == 5


def test_shared_values_have_gradients_of_their_own():
    calls, a, b = [], leaf(2.0), leaf(0.5)
    (first,) = minamp.autograd.grad(counted(calls)(a, b).sum(), b, create_graph=True)
    (second,) = minamp.autograd.grad(first.sum(), b)
    assert np.allclose(first.item(), 2 + np.exp(0.5)) and np.allclose(second.item(), np.exp(0.5))


def test_a_shared_array_that_is_itself_a_gradient_is_not_taken_over():
    """A leaf keeps an array that nobody else holds; this one two leaves get."""

    @ops.op(policy=NOT_LISTED)
    class both:
        def forward(m, a, b):
            return a + b

        def shared_doubled(m, g):
            return g * 2.0

        def vjp_a(m, g, doubled):
            return doubled

        def vjp_b(m, g, doubled):
            return doubled

    a, b = leaf(1.0), leaf(2.0)
    both(a, b).sum().backward()
    a.grad.mul_(10.0)
    assert a.grad.item() == 20 and b.grad.item() == 2


def declare(policy=NOT_LISTED, **body):
    return ops.op(policy=policy)(type("declared", (), body))


def test_attributes_stand_behind_the_tensors_or_go_by_name():
    @ops.op(policy=NOT_LISTED)
    class affine:
        def forward(m, x, *, scale, shift):
            return x * scale + shift

        def vjp_x(m, g, scale):
            return g * scale

    x = leaf(1.0, 2.0)
    for y in (affine(x, 2.0, 1.0), affine(x, 2.0, shift=1.0), affine(input=x, shift=1.0, scale=2.0)):
        assert y.tolist() == [3, 5]
        y.sum().backward()
    assert x.grad.tolist() == [6, 6]
    with pytest.raises(TypeError, match="affine: takes x, scale, shift; got 4 arguments"):
        affine(x, 2.0, 1.0, 0.0)
    with pytest.raises(TypeError, match="affine .*'shift'"):
        affine(x, 2.0)


def test_behind_any_number_of_tensors_attributes_go_by_name():
    @ops.op(policy=NOT_LISTED)
    class weighed:
        def forward(m, *tensors, scale):
            return sum(tensors) * scale

    assert weighed(leaf(1.0).detach(), leaf(2.0).detach(), scale=3.0).tolist() == [9]


def test_a_declaration_with_a_mistake_is_refused():
    with pytest.raises(ValueError, match="policy must be one of .*got 'fp16'"):
        declare("fp16", forward=lambda m, x: x)
    with pytest.raises(TypeError, match=r"@op declared: \{'y'\} are taken .*name the argument otherwise"):
        declare(forward=lambda m, y: y)
    with pytest.raises(TypeError, match=r"@op declared: \{'total'\} are taken"):
        declare(forward=lambda m, total: total, shared_total=lambda m, g: g)
    with pytest.raises(TypeError, match=r"@op declared: \['vjp_z'\] match no argument of forward \['x'\]"):
        declare(forward=lambda m, x: x, vjp_z=lambda m, g: g)
    assert "declared" not in ops.OPS
    assert isinstance(declare(forward=lambda m, x: x), Op)
    with pytest.raises(ValueError, match="an op named 'declared' exists already"):
        declare(forward=lambda m, x: x)
