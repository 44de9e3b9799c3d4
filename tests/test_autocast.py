"""Autocast, case by case (A01...): the behaviour of torch.amp.autocast with the CUDA op lists."""

import threading
import warnings

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import autocast, backends, bfloat16, float16, float32, float64
from minamp.autocast import cast
from minamp.backends.ongrid import OnGrid
from minamp.record import observe


def rand(*shape, dtype=float32, grad=False):
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return minamp.tensor(data, dtype=dtype, requires_grad=grad)


def count_casts(body):
    """How many float32 -> float16 casts run in `body`."""
    casts = []

    def see(phase, op, inputs, output):
        if phase == "forward" and op.is_cast and output.dtype == float16 and inputs[0].dtype == float32:
            casts.append(inputs[0])

    with observe(see):
        body()
    return casts


def test_A01_matmul_runs_in_half_inside_and_in_float32_outside():
    a, b = rand(5, 7), rand(7, 3)
    with autocast(dtype=float16):
        inside = a @ b
    assert inside.dtype == float16 and (a @ b).dtype == float32
    assert np.array_equal(inside.numpy(), (a.half() @ b.half()).numpy())


def test_A02_mixed_matmul_is_cast_inside_and_refused_outside():
    a, b = rand(5, 7, dtype=float16), rand(7, 3)
    with autocast():
        assert (a @ b).dtype == float16
    with pytest.raises(
        RuntimeError, match=r"matmul: tensors of different dtypes \(a float16, b float32\).*autocast"
    ):
        a @ b
    with autocast(), pytest.raises(RuntimeError, match=r"x.half\(\)\), since autocast casts no float64$"):
        a @ b.to(minamp.float64)


def test_A03_float64_is_never_cast():
    a, b = rand(4, 4, dtype=float64), rand(4, 4, dtype=float16)
    with autocast():
        assert (a @ a).dtype == float64
        with pytest.raises(RuntimeError, match="float64"):
            a @ b


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.exp(),
        lambda x: x.abs().log(),
        lambda x: x**2.0,
        lambda x: F.layer_norm(x, (6,)),
        lambda x: F.softmax(x, dim=-1),
        lambda x: x.sum(),
        lambda x: F.mse_loss(x, x * 0),
    ],
    ids=["exp", "log", "pow", "layer_norm", "softmax", "sum", "mse_loss"],
)
def test_A04_float32_ops_take_half_and_give_float32(function):
    x = rand(4, 6, dtype=float16)
    with autocast():
        y = function(x)
    assert y.dtype == float32
    expected = function(x.float())
    np.testing.assert_array_equal(y.numpy(), expected.numpy())


def test_A05_integers_and_float64_keep_their_dtypes():
    i, d = minamp.tensor([1, 2, 3], dtype=np.int32), rand(3, dtype=float64)
    with autocast():
        assert (i**2).dtype == np.int32
        assert i.sum().dtype == np.int64
        assert (d**2).dtype == float64


def test_A06_a_dtype_given_by_the_caller_wins():
    with autocast():
        assert rand(4).sum(dtype=float16).dtype == float16
        assert F.softmax(rand(4, dtype=float16), dim=0, dtype=float64).dtype == float64


def test_A07_a_loss_in_half_overflows_outside_only():
    x, zero = minamp.tensor([400.0], dtype=float16), minamp.tensor([0.0], dtype=float16)
    with autocast():
        inside = F.mse_loss(x, zero)
    outside = F.mse_loss(x, zero)
    assert inside.dtype == float32 and inside.item() == 160000
    assert outside.dtype == float16 and outside.item() == float("inf")


def test_A08_elementwise_ops_promote_as_everywhere():
    a, b = rand(5), rand(5, dtype=float16)
    for enabled in (True, False):
        with autocast(enabled=enabled):
            assert (a + b).dtype == (a * b).dtype == (a / (b.abs() + 1)).dtype == float32
            assert (a == b).dtype == (a < b).dtype == np.bool_


def test_A09_cat_and_stack_promote():
    a, b = rand(5), rand(5, dtype=float16)
    with autocast():
        assert minamp.cat([a, b]).dtype == minamp.stack([a, b]).dtype == float32
        assert minamp.cat([b, b]).dtype == minamp.stack([b, b]).dtype == float16


@pytest.mark.parametrize("one, two", [(float32, float16), (float16, float32)])
def test_A10_ops_that_promote(one, two):
    a, b = rand(4, dtype=one), rand(4, dtype=two)
    where = minamp.tensor([0, 1, 2, 3])
    with autocast():
        assert (
            minamp.addcmul(a, b, b).dtype
            == minamp.addcdiv(a, b, b).dtype
            == minamp.dot(a, b).dtype
            == float32
        )
        assert minamp.index_put(a, (where,), b).dtype == minamp.scatter_add(a, 0, where, b).dtype == float32
    with (
        autocast(),
        pytest.raises(RuntimeError, match="addcmul: bfloat16 in a float16 autocast region can't be promoted"),
    ):
        minamp.addcmul(a.bfloat16(), b.bfloat16(), b.bfloat16())


def test_A11_binary_cross_entropy_is_refused_with_the_repair():
    p, t = minamp.tensor([0.5]), minamp.tensor([1.0])
    with autocast():
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(p, t)
        assert F.binary_cross_entropy_with_logits(p.half(), t).dtype == float32


def test_A12_in_place_and_out_are_never_cast():
    a, b, c = rand(3, 3), rand(3, 3), rand(3, 3)
    out = minamp.zeros(3, 3)
    with autocast():
        exact = (a.double() @ b.double()).float()
        assert minamp.mm(a, b, out=out) is out and out.dtype == float32
        np.testing.assert_allclose(out.numpy(), exact.numpy(), rtol=1e-5, atol=1e-6)
        a.addmm_(b, c)
        assert a.dtype == float32
        with pytest.raises(RuntimeError, match="mm: tensors of different dtypes"):
            minamp.mm(a, b.half(), out=out)
        with pytest.raises(RuntimeError, match="mm: out= is float16 of shape .*, the result float32"):
            minamp.mm(a, b, out=out.half())
        a.requires_grad_()
        with pytest.raises(RuntimeError, match="mm: out= can't be recorded"):
            minamp.mm(a, b, out=out)


def test_A13_a_disabled_region_inside():
    a, b = rand(3, 3), rand(3, 3)
    with autocast():
        h = a @ b
        with autocast(enabled=False):
            assert (a @ b).dtype == float32
            with pytest.raises(RuntimeError, match="different dtypes"):
                a @ h
        assert (a @ b).dtype == float16


def test_A14_an_exception_leaves_no_trace():
    with pytest.raises(KeyError), autocast():
        raise KeyError("x")
    assert not minamp.is_autocast_enabled() and (rand(2, 2) @ rand(2, 2)).dtype == float32


def test_A15_decorator_on_functions_and_methods():
    @autocast()
    def product(a, b):
        "doc"
        return a @ b

    class Layer:
        @autocast(dtype=bfloat16)
        def forward(self, x):
            return x @ x

    assert product(rand(2, 2), rand(2, 2)).dtype == float16
    assert product.__name__ == "product" and product.__doc__ == "doc"
    assert Layer().forward(rand(2, 2)).dtype == bfloat16
    assert not minamp.is_autocast_enabled()


def test_a_decorated_generator_runs_inside_and_its_caller_outside():
    @autocast()
    def products(a):
        received = yield (a @ a).dtype
        yield (a @ a).dtype, received

    running = products(rand(2, 2))
    assert next(running) == float16 and not minamp.is_autocast_enabled()
    assert running.send("hello") == (float16, "hello") and not minamp.is_autocast_enabled()


def test_the_same_object_entered_twice_and_recursion():
    region = autocast()
    with region, region:
        pass
    assert not minamp.is_autocast_enabled()

    @region
    def down(n):
        assert minamp.is_autocast_enabled()
        return n if n == 0 else down(n - 1)

    down(3)
    assert not minamp.is_autocast_enabled()


def test_A16_a_new_thread_starts_outside():
    seen = []

    def look():
        a = rand(2, 2)
        seen.extend([minamp.is_autocast_enabled(), minamp.get_autocast_dtype(), (a @ a).dtype])

    with autocast(dtype=bfloat16):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [False, float16, float32]


@pytest.mark.parametrize(
    "case, expected",
    [("used twice", 1), ("cache off", 2), ("frozen", 2), ("not a leaf", 2), ("a view", 2), ("two regions", 2)]
    + [("detached leaf", 1), ("nested regions", 1), ("cleared", 2), ("no_grad first", 1)],
)
def test_A17_how_often_a_weight_is_cast(case, expected):
    x, w = rand(2, 3, dtype=float16), rand(3, 3, grad=True)

    def body():
        if case == "two regions":
            for _ in range(2):
                with autocast():
                    x @ w
            return
        weight = w
        if case == "frozen":
            weight = rand(3, 3)
        elif case == "not a leaf":
            weight = w * 1
        elif case == "a view":
            weight = w.view(3, 3)
        elif case == "detached leaf":
            weight = rand(3, 3).clone().requires_grad_()
        with autocast(cache_enabled=case != "cache off"):
            if case == "nested regions":
                x @ weight
                with autocast(enabled=False):
                    with autocast():
                        x @ weight
                    x @ weight.half().detach()
            elif case == "no_grad first":
                with minamp.no_grad():
                    x @ weight
                    x @ weight
                x @ weight
            else:
                x @ weight
                if case == "cleared":
                    minamp.clear_autocast_cache()
                x @ weight

    casts = [t for t in count_casts(body) if t.shape == (3, 3)]
    assert len(casts) == expected + (case == "nested regions")  # that case makes one cast of its own


def test_A18_a_pass_under_no_grad_does_not_cost_the_next_one_its_gradient():
    layer = minamp.nn.Linear(3, 2)
    for _ in range(2):
        with autocast():
            with minamp.no_grad():
                assert not layer(rand(4, 3)).requires_grad
            y = layer(rand(4, 3))
            assert y.requires_grad
        y.sum().backward()
        assert layer.weight.grad is not None and layer.bias.grad is not None
        layer.weight.grad = layer.bias.grad = None


def test_A19_a_weight_written_inside_the_region_is_seen():
    w, x = minamp.ones(1, 1, requires_grad=True), minamp.ones(1, 1)
    out = []
    with autocast():
        out.append((x @ w).item())
        with minamp.no_grad():
            w *= 2
        out.append((x @ w).item())
        w.data = w.data * 2
        out.append((x @ w).item())
    assert out == [1.0, 2.0, 4.0]  # PyTorch's cache would give 1.0, 1.0, 1.0 until the region ends


def test_a_nested_region_of_another_dtype_gets_its_own_copy():
    w, x = rand(3, 3, grad=True), rand(2, 3)
    with autocast(dtype=float16):
        assert (x @ w).dtype == float16
        with autocast(dtype=bfloat16):
            assert (x @ w).dtype == bfloat16
        assert (x @ w).dtype == float16


def test_A20_gradients_have_the_dtype_of_their_tensors():
    first, second = minamp.nn.Linear(4, 5), minamp.nn.Linear(5, 2)
    x, seen = rand(3, 4, grad=True), {}
    with autocast():
        h1 = first(x)
        h2 = F.gelu(h1)
        h3 = second(h2)
        loss = F.mse_loss(h3, minamp.zeros(3, 2))
    for name, t in dict(h1=h1, h2=h2, h3=h3, loss=loss, x=x, weight=first.weight, bias=second.bias).items():
        t.register_hook(lambda g, name=name: seen.__setitem__(name, g.dtype))
    loss.backward()
    assert seen == dict(
        h1=float16, h2=float16, h3=float16, loss=float32, x=float32, weight=float32, bias=float32
    )
    assert first.weight.grad.dtype == x.grad.dtype == float32


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_A21_uses_of_a_weight_are_summed_in_float32(cache_enabled):
    w = minamp.ones(1, 1, requires_grad=True)
    with autocast(cache_enabled=cache_enabled):
        loss = (minamp.tensor([[2048.0]]) @ w).sum() + (minamp.tensor([[1.0]]) @ w).sum()
    loss.backward()
    assert w.grad.item() == 2049  # PyTorch sums in half through its cache: 2048


@pytest.mark.parametrize("cache_enabled, expected", [(True, 2048), (False, 2049)])
def test_A21_as_pytorch_sums_in_half_through_its_cache(cache_enabled, expected):
    w = minamp.ones(1, 1, requires_grad=True)
    with autocast(cache_enabled=cache_enabled):
        loss = (minamp.tensor([[2048.0]]) @ w).sum() + (minamp.tensor([[1.0]]) @ w).sum()
    with minamp.autograd.naive_half_accumulation():
        loss.backward()
    assert w.grad.item() == expected


def make_function(forward_decorator, backward_decorator, log):
    class Product(minamp.autograd.Function):
        @staticmethod
        @forward_decorator
        def forward(ctx, a, b):
            log["forward"] = (a.dtype, b.dtype, minamp.is_autocast_enabled())
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @backward_decorator
        def backward(ctx, g):
            a, b = ctx.saved_tensors
            log["backward"] = (g.dtype, minamp.is_autocast_enabled())
            return g @ b.mT, a.mT @ g

    return Product.apply


def test_A22_custom_function_runs_under_the_state_of_its_forward():
    log = {}
    product = make_function(minamp.custom_fwd(device_type="cuda"), minamp.custom_bwd(device_type="cuda"), log)
    a, b = rand(2, 3, grad=True), rand(3, 2, grad=True)
    with autocast():
        y = product(a, b)
    y.sum().backward()
    assert log == {"forward": (float32, float32, True), "backward": (float16, True)}
    assert y.dtype == float16 and a.grad.dtype == b.grad.dtype == float32


def test_A23_custom_function_with_cast_inputs():
    log = {}
    cast = minamp.custom_fwd(device_type="cuda", cast_inputs=float32)
    product = make_function(cast, minamp.custom_bwd(device_type="cuda"), log)
    a, b = rand(2, 3, dtype=float16, grad=True), rand(3, 2, dtype=float16, grad=True)
    with autocast():
        y = product(a, b)
        y.sum().backward()
    assert log == {"forward": (float32, float32, False), "backward": (float32, False)}
    assert y.dtype == float32 and a.grad.dtype == float16
    assert product(a, b).dtype == float16 and log["forward"] == (float16, float16, False)

    @cast
    def nested(ctx, x, box):
        return x.dtype, box[1][0].dtype

    class Ctx:
        pass

    with autocast():
        assert nested(Ctx(), a, (0, {0: b})) == (float32, float32)
    assert nested(Ctx(), a, (0, {0: b})) == (float16, float16)


def test_custom_bwd_without_custom_fwd_says_where_that_belongs():
    undecorated = make_function(lambda forward: forward, minamp.custom_bwd(device_type="cuda"), {})
    a, b = rand(2, 3, grad=True), rand(3, 2, grad=True)
    repair = r"put @custom_fwd\(device_type='cuda'\) on forward\(ctx, ...\)"
    with pytest.raises(AttributeError, match=f"^custom_bwd: ctx has no _autocast_enabled.*{repair}"):
        undecorated(a, b).sum().backward()
    assert a.grad is None and b.grad is None


def test_custom_fwd_needs_a_device_type():
    with pytest.raises(TypeError):
        minamp.custom_fwd(lambda ctx, x: x)
    with pytest.raises(ValueError, match="device_type must be a string"):
        minamp.custom_fwd(device_type=minamp.device("cpu").__class__)


def test_A24_an_odd_dtype_warns_and_disables():
    with pytest.warns(UserWarning, match="float32 is not a half format"):
        region = autocast("cpu", dtype=float32)
    with region:
        assert not minamp.is_autocast_enabled() and (rand(2, 2) @ rand(2, 2)).dtype == float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autocast("cpu", dtype=float32, enabled=False)


@pytest.mark.parametrize("dtype", [float32, float64, minamp.int64])
def test_regions_that_take_over_an_odd_dtype_warn_and_are_disabled(dtype):
    text, early = f"{dtype} is not a half format", autocast()
    minamp.set_autocast_dtype("cuda", dtype)
    try:
        with pytest.warns(UserWarning, match=text), autocast():
            assert not minamp.is_autocast_enabled() and (rand(2, 2) @ rand(2, 2)).dtype == float32
        with early:
            assert not minamp.is_autocast_enabled()
        with autocast(dtype=bfloat16):
            assert (rand(2, 2) @ rand(2, 2)).dtype == bfloat16
        with pytest.warns(UserWarning, match=text):
            minamp.set_autocast_enabled(True)
        assert not minamp.is_autocast_enabled()
    finally:
        minamp.set_autocast_dtype("cuda", float16)
    with autocast(), pytest.warns(UserWarning, match=text):
        minamp.set_autocast_dtype(dtype)
        assert not minamp.is_autocast_enabled()


def test_A25_wrong_arguments():
    with pytest.raises(ValueError, match="device_type must be a string"):
        autocast(minamp.device("cpu"))
    with pytest.raises(RuntimeError, match="unknown device 'gpu'"):
        autocast("gpu")
    with pytest.raises(TypeError, match="with autocast"):
        autocast()(rand(2))


def test_A26_the_bias_is_cast_too():
    x, w = minamp.zeros(1, 2), minamp.zeros(1, 2)
    with autocast():
        assert F.linear(x, w, minamp.tensor([1e-9])).item() == 0
        assert F.linear(x, w, minamp.tensor([70000.0])).item() == float("inf")


def test_a_nested_region_inherits_dtype_and_cache_flag():
    with autocast(dtype=bfloat16, cache_enabled=False), autocast():
        assert minamp.get_autocast_dtype() == bfloat16 and not minamp.is_autocast_cache_enabled()
    with autocast(dtype=bfloat16, enabled=False):
        assert minamp.get_autocast_dtype() == bfloat16 and not minamp.is_autocast_enabled()
    assert minamp.get_autocast_dtype() == float16 and minamp.is_autocast_cache_enabled()


def test_in_place_ops_are_never_cast():
    a, h = rand(3), rand(3, dtype=float16)
    with autocast():
        a += h
        assert a.dtype == float32
        h.pow_(2)
        assert h.dtype == float16


def test_setters_and_inference_mode():
    w, x = rand(3, 3, grad=True), rand(2, 3)
    minamp.set_autocast_enabled("cuda", True)
    minamp.set_autocast_dtype("cuda", bfloat16)
    try:
        assert (x @ w).dtype == bfloat16 and minamp.is_autocast_enabled("cuda")
    finally:
        minamp.set_autocast_enabled("cuda", False)
        minamp.set_autocast_dtype("cuda", float16)
        minamp.clear_autocast_cache()

    def body():
        with autocast(), minamp.inference_mode():
            x @ w
            x @ w

    assert len([t for t in count_casts(body) if t is w]) == 2  # nothing is kept there


# --------------------------------------------------------------------------------------------- a weight's copy is not packed


def test_a_large_weights_copy_reads_like_half_and_holds_float32_on_its_grid():
    w = rand(128, 96, grad=True)
    with minamp.autocast():
        copy = cast(w, float16)
    want = w._data.astype(np.float16)
    kept = copy._data
    assert type(kept) is OnGrid and kept.dtype == np.float16 and kept.nbytes == 4 * w.numel()
    assert np.array_equal(np.asarray(kept), want) and np.array_equal(kept[3], want[3])
    assert np.array_equal(backends.widen(kept), want.astype(np.float32))
    assert np.array_equal(np.asarray(kept.reshape(96, 128)), want.reshape(96, 128))
    assert np.array_equal(np.asarray(kept.swapaxes(0, 1)), want.T)
    assert copy.dtype == np.float16 and np.array_equal(copy.detach().numpy(), want)
    with pytest.raises(ValueError, match="read-only"):
        backends.widen(kept)[0] = 0
    copy.detach().add_(1.0)
    assert np.array_equal(copy.detach().numpy(), backends.narrow(want + np.float32(1), float16))
    assert np.array_equal(backends.widen(copy._data), copy.detach().numpy().astype(np.float32))


@pytest.mark.parametrize("dtype", [float16, bfloat16])
def test_gradients_through_a_weights_copy_equal_those_through_a_plain_half(dtype):
    w, x = rand(128, 96, grad=True), rand(32, 96)
    with minamp.autocast(dtype=dtype):
        minamp.matmul(x, w.transpose(0, 1)).sum().backward()
        F.linear(x, w).sum().backward()
    got, w.grad = w.grad, None
    for _ in range(2):
        F.linear(x.to(dtype), w.to(dtype)).float().sum().backward()
    assert np.array_equal(got._data, w.grad._data)


def test_a_gradient_that_somebody_else_holds_is_not_taken_over():
    a, b = rand(8, grad=True), rand(8, grad=True)
    seen = []
    c = a * 2
    c.register_hook(lambda g: seen.append(g))
    (c + b).sum().backward()
    arrays = [a.grad._data, b.grad._data, seen[0]._data]
    assert not any(np.may_share_memory(p, q) for i, p in enumerate(arrays) for q in arrays[:i])
