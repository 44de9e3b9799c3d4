"""autograd.Function, detect_anomaly, check_grads."""

import faults
import numpy as np
import pytest
import standin

import minamp
from minamp import GradScaler, autocast, autograd, float16, float32, optim, tensor, verify_amp, watch
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


def test_a_function_that_keeps_what_backward_needs_apart_from_forward():
    class Scaled(Function):
        @staticmethod
        def forward(x, factor):
            return x.square() * factor, x.exp()

        @staticmethod
        def setup_context(ctx, inputs, output):
            (x, ctx.factor), (_, e) = inputs, output
            ctx.save_for_backward(x, e)

        @staticmethod
        def backward(ctx, g, ge):
            x, e = ctx.saved_tensors
            return 2.0 * ctx.factor * g * x + ge * e, None

    x = tensor([1.0, -2.0], dtype=minamp.float64, requires_grad=True)
    a, b = Scaled.apply(x, 3.0)
    (a.sum() + b.sum()).backward()
    assert np.allclose(x.grad.numpy(), [6 + np.e, -12 + np.exp(-2)])
    check_grads(lambda x: Scaled.apply(x, 3.0)[1], np.array([0.3, -1.2]))


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
    # as in PyTorch: a flat buffer may hold all gradients
    assert flat.tolist() == [0.0, 5.0, 5.0, 5.0, 5.0, 0.0]


# ---------------------------------------------------------------------------------------------- observers see a Function


class Bad(Function):
    """x * factor, and half of it; backward gives what `gradient` makes of the first gradient."""

    @staticmethod
    def forward(ctx, x, factor, gradient, *rest):
        ctx.gradient, ctx.rest = gradient, rest
        return x * factor, x * factor / 2, "no tensor"

    @staticmethod
    def backward(ctx, g, h, nothing):
        assert nothing is None
        return ctx.gradient(g), None, None, *(None for _ in ctx.rest)


def same(g):
    return g


def root(g):
    return (g * 0.0 - 1.0).sqrt()


@pytest.mark.parametrize("forward", ["one", "two"])
def test_verify_amp_of_a_step_with_a_function(forward):
    w, x = minamp.ones(4, 4, requires_grad=True), minamp.ones(2, 4)

    def step():
        with autocast():
            y = x @ w
            y = Cube.apply(y, 2.0) if forward == "one" else Bad.apply(y, 2.0, same, [1], None)[0]
        w.grad = None
        y.float().sum().backward()

    seen = verify_amp(step, rounds=1).with_amp
    name = "Cube" if forward == "one" else "Bad"
    assert seen.activations["float16"][name] == (1 if forward == "one" else 2)
    assert seen.passed_back["float16"][name] == 1 and seen.covered == 1


def test_first_bad_op_names_the_arguments_of_a_function():
    x = tensor([2.0, 1.0], dtype=float16, requires_grad=True)
    with watch.first_bad_op() as bad:
        Cube.apply(x * 2.0, 1.0)[0].backward()
    assert bad.found is None

    class Overflows(Function):
        @staticmethod
        def forward(ctx, x, *rest):
            return tensor([float("inf"), 1.0], dtype=float16)

        @staticmethod
        def backward(ctx, g):
            return tensor([float("nan"), 1.0])

    with watch.first_bad_op() as bad:
        Overflows.apply(x, 3.0, None, "text", x)
    assert str(bad).startswith(
        "Overflows (forward): 1 of 2 values of its float16 result are inf, from finite inputs x = 2 (shape (2,)), "
        "rest[0] = 3 (shape ()), rest[3] = 2 (shape (2,))"
    )
    y = Overflows.apply(x)
    with watch.first_bad_op() as bad:
        y.sum().backward()
    assert str(bad).startswith(
        "Overflows (backward): 1 of 2 values of its float16 gradient for x are nan, from finite inputs incoming gradient = 1"
    )


def test_saved_bytes_count_what_a_function_saves():
    class Keeps(Cube):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w, None, x * 2.0)
            return x * w, x + w

    x, w = minamp.ones(8), minamp.ones(8, requires_grad=True)
    with watch.saved_bytes() as kept:
        Keeps.apply(x, w)
    assert kept.by_op == {"Keeps": 2 * 8 * 4}  # w is a weight


def test_a_scaler_gives_up_on_a_functions_backward():
    w = tensor([1.0], requires_grad=True)
    optimizer, scaler = optim.SGD([w], lr=0.1), GradScaler(max_skips=2)
    infinite = tensor([float("inf")])
    with pytest.raises(FloatingPointError, match=r"First non-finite tensor: .*Bad \(backward\)"):
        for _ in range(2):
            a, b, _ = Bad.apply(w, 1.0, lambda g: infinite)
            scaler.scale(a.sum() + b.sum()).backward()
            scaler.step(optimizer)
            scaler.update()


def test_debug_names_a_function_and_its_line():
    with standin.installed():
        x = minamp.ones(2, 3, device="cuda", dtype=float16, requires_grad=True)

        def failing(g):
            g = g.float()
            faults.fail_kernel(0)  # that of rounding the gradient
            return g

        with minamp.debug(sync=True), pytest.raises(RuntimeError) as caught:
            y, half, _ = Bad.apply(x, 2.0, failing)  # the made line
            (y + half).sum().backward()
    assert "backward of Bad (arguments float16 (2, 3))" in str(caught.value)
    assert "the made line" in str(caught.value)


@pytest.mark.parametrize("region", [False, True])
def test_detect_anomaly_names_the_line_of_a_function(region):
    x = tensor([1.0], requires_grad=True)
    with detect_anomaly(), autocast(enabled=region):
        y, half, _ = Bad.apply(x, 2.0, root)  # the made line
        with pytest.raises(RuntimeError, match="backward of Bad gave nan for its argument 0 .*the made line"):
            (y + half).sum().backward()


def test_zeros_for_an_output_without_gradient_lie_where_it_does():
    with standin.installed():
        x = minamp.ones(2, device="cuda", requires_grad=True)
        SumAndDifference.apply(x, x)[0].sum().backward()
        assert x.grad.cpu().tolist() == [2.0, 2.0]


# ------------------------------------------------------------------------------------- what a Function returns and saves


def test_a_function_that_returns_its_input():
    class Triple(Function):
        @staticmethod
        def forward(ctx, x, same=None):
            return x, same

        @staticmethod
        def backward(ctx, g, h):
            return g * 3.0

    x, w = tensor([1.0], requires_grad=True), tensor([1.0], requires_grad=True)
    y, same = Triple.apply(x, same=w)
    y.sum().backward()
    assert y is not x and x.is_leaf and same is not w and w.is_leaf and x.grad.item() == 3.0


def function(forward=lambda x: x * 2.0, backward=lambda g: g, saved=()):
    class Mine(Function):
        pass

    def kept(ctx, x):
        ctx.save_for_backward(*saved)
        return forward(x)

    Mine.forward, Mine.backward = staticmethod(kept), staticmethod(lambda ctx, g: backward(g))
    return Mine.apply


@pytest.mark.parametrize("recorded", [False, True])
def test_a_forward_without_a_tensor_is_refused(recorded):
    x = tensor([1.0], requires_grad=recorded)
    for result, kind in ((np.ones(1), "ndarray"), ([x], "list"), (None, "NoneType"), ((1.0, None), "tuple")):
        with pytest.raises(
            TypeError, match=f"Mine.forward returned no Tensor but {kind}: return a Tensor, or a tuple of"
        ):
            function(forward=lambda x, result=result: result)(x)


def test_a_backward_that_returns_no_gradients_is_refused():
    x = tensor([1.0], requires_grad=True)
    for answer, kind in ((np.ones(1), "ndarray"), ([x], "list"), (1.0, "float")):
        with pytest.raises(
            TypeError, match=f"Mine.backward returned a {kind} as a gradient: return a Tensor or None"
        ):
            function(backward=lambda g, answer=answer: answer)(x).backward()
    with pytest.raises(RuntimeError, match="Mine.backward returned 2 gradients for 1 arguments of forward"):
        function(backward=lambda g: (g, g))(x).backward()
    assert x.grad is None
    function(backward=lambda g: (g, None))(x).backward()
    assert x.grad.item() == 1.0


@pytest.mark.parametrize("value, kind", [(3.0, "float"), (np.ones(2), "ndarray"), ([tensor(1.0)], "list")])
def test_saving_what_is_no_tensor_is_refused(value, kind):
    with pytest.raises(
        TypeError,
        match=f"save_for_backward: argument 1 is a {kind}, not a Tensor: keep it as an attribute of",
    ):
        function(saved=(None, value))(tensor([1.0]))


def test_grad_walks_only_the_ways_to_its_inputs():
    x, w = tensor([2.0], requires_grad=True), tensor([3.0], requires_grad=True)
    shown = []
    w.register_hook(shown.append)
    side = w * w
    y = x * side
    (g,) = minamp.autograd.grad(y, x)
    assert g.item() == 9.0 and not shown
    side.backward()  # not freed: it does not lead to x
    assert w.grad.item() == 6.0 and len(shown) == 1
    y = (x * w).exp()
    assert minamp.autograd.grad(y.sum(), y)[0].item() == 1.0
    y.backward()  # y was wanted for itself, so exp was not walked through
    with pytest.raises(RuntimeError, match="exp a second time"):
        y.backward()


def test_an_input_that_was_written_stops_only_the_ways_through_it():
    x, w = tensor([2.0], requires_grad=True), tensor([3.0], requires_grad=True)
    a = w * 1
    y = x * 2 + a * a
    with minamp.no_grad():
        a.add_(1.0)
    assert minamp.autograd.grad(y, x, retain_graph=True)[0].item() == 2.0
    with pytest.raises(RuntimeError, match="written in place"):
        y.backward()


def test_a_leaf_that_was_switched_off_is_given_no_gradient():
    x, w = tensor([2.0], requires_grad=True), tensor([3.0], requires_grad=True)
    y = x * w
    w.requires_grad_(False)
    y.backward(retain_graph=True)
    assert w.grad is None and x.grad.item() == 3.0
    w.requires_grad_()
    y.backward()
    assert w.grad.item() == 2.0


def test_retain_graph_false_frees_under_create_graph_too():
    x = tensor([2.0], requires_grad=True)
    y = x**3
    (g,) = minamp.autograd.grad(y, x, retain_graph=False, create_graph=True)
    g.backward()
    assert x.grad.item() == 12.0
    with pytest.raises(RuntimeError, match="pow a second time"):
        y.backward()
    y = x**3
    y.backward(create_graph=True)
    y.backward()  # kept by default


class Answers(Function):
    """Answers what the third argument holds."""

    @staticmethod
    def forward(ctx, a, k, answers):
        ctx.answers = answers
        return a * k

    @staticmethod
    def backward(ctx, g):
        return ctx.answers


def test_what_shapes_a_function_may_answer():
    x = minamp.ones(2, 3).requires_grad_()
    Answers.apply(x, 1.0, (minamp.ones(4, 2, 3), None, None)).sum().backward()
    assert x.grad.tolist() == [[4.0] * 3] * 2  # as if x had been broadcast
    for small in (minamp.ones(()), minamp.ones(1, 3)):
        with pytest.raises(RuntimeError, match="returned a gradient of shape"):
            Answers.apply(x, 1.0, (small, None, None)).sum().backward()
    with pytest.raises(RuntimeError, match="a gradient for argument 1 of forward, which was no Tensor"):
        Answers.apply(x, 1.0, (minamp.ones(2, 3), minamp.ones(2, 3), None)).sum().backward()


def test_saved_tensors_are_gone_after_backward_even_if_there_were_none():
    class Empty(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            assert ctx.saved_tensors == ()
            return g * 2

    y = Empty.apply(tensor([1.0], requires_grad=True))
    y.backward()
    with pytest.raises(RuntimeError, match="saved_tensors: freed"):
        y.backward()


def test_an_input_that_is_returned_may_be_marked_non_differentiable():
    class Both(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.needed = ctx.needs_input_grad
            ctx.mark_non_differentiable(x)
            return x, x * 2

        @staticmethod
        def backward(ctx, g, h):
            return h * 2

    x = tensor([1.0], requires_grad=True)
    same, twice = Both.apply(x)
    assert not same.requires_grad and twice.requires_grad and x.requires_grad


class Square_(Function):
    @staticmethod
    def forward(ctx, x, returned=True):
        ctx.save_for_backward(x.clone())
        x.mul_(x)
        ctx.mark_dirty(x)
        return x if returned else x * 1

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0], None


def test_what_is_marked_dirty_has_the_history_of_the_output():
    x = tensor([3.0], requires_grad=True)
    y = x * 1
    assert Square_.apply(y) is y
    y.sum().backward()  # through y, not through what apply gave
    assert x.grad.item() == 6.0
    plain = tensor([3.0])
    assert Square_.apply(plain) is plain and not plain.requires_grad


def test_what_can_not_be_marked_dirty():
    x = tensor([3.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="Square_.forward: an input marked dirty is not returned"):
        Square_.apply(x * 1, False)
    with pytest.raises(RuntimeError, match="Square_.forward: wrote in place to a leaf that requires grad"):
        Square_.apply(x)
    with pytest.raises(RuntimeError, match="Square_.forward: wrote in place to a view"):
        Square_.apply((x * 1)[:1])


def test_backward_from_several_tensors_at_once():
    a, b = (tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
    autograd.backward([(a * 2).sum(), b * 3], [None, tensor([1.0, 10.0])])
    assert a.grad.tolist() == [2.0, 2.0] and b.grad.tolist() == [3.0, 30.0]
    c = a * b
    autograd.backward((c.sum(), c.sum()))  # through c once
    assert a.grad.tolist() == [4.0, 6.0]
    with pytest.raises(
        RuntimeError, match="backward: 2 outputs and 1 grad_tensors: give one for each output"
    ):
        autograd.backward([a.sum(), b.sum()], [None])
    with pytest.raises(TypeError, match=r"backward: tensors\[1\] is a NumPy array"):
        autograd.backward([a.sum(), np.ones(1)])


def test_backward_into_some_inputs_only():
    a, b = (tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
    y = a * b
    loss = y.sum()
    loss.backward(inputs=[a], retain_graph=True)
    assert a.grad.tolist() == [1.0, 2.0] and b.grad is None
    loss.backward(inputs=a, retain_graph=True)
    assert a.grad.tolist() == [2.0, 4.0]
    autograd.backward(loss, inputs=[y])
    assert y.grad.tolist() == [1.0, 1.0] and a.grad.tolist() == [2.0, 4.0]
    unused = tensor([1.0], requires_grad=True)
    (a * b).sum().backward(inputs=[unused])
    assert unused.grad is None
    for wrong, named in (([], r"\[\]"), ([None], r"\['NoneType'\]")):
        with pytest.raises(RuntimeError, match=f"backward: inputs must be one or more Tensors, got {named}"):
            (a * b).sum().backward(inputs=wrong)
