"""Activations that are computed again in backward: the same gradients bit for bit, for less memory."""

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import GradScaler, autocast, nn, optim
from minamp.autograd import Function, grad
from minamp.utils.checkpoint import CheckpointError, checkpoint, checkpoint_sequential
from minamp.watch import peak_memory, saved_bytes

DTYPES = [None, minamp.float16, minamp.bfloat16]  # None: without autocast


def region(dtype):
    return autocast(dtype=dtype or minamp.float16, enabled=dtype is not None)


def network():
    minamp.manual_seed(0)
    layers = [(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.3)) for _ in range(4)]
    return nn.Sequential(*[layer for block in layers for layer in block], nn.Linear(32, 10))


def gradients(run, dtype, model=None):
    """(loss, bytes kept, gradients of all weights) of one step, backward outside of the region."""
    model = model or network()
    minamp.manual_seed(1)
    x, y = minamp.randn(16, 32), minamp.randint(0, 10, (16,))
    with saved_bytes() as kept, region(dtype):
        loss = F.cross_entropy(run(model, x), y)
    (loss * 1024.0).backward()
    return loss.item(), kept.total, [p.grad.numpy() for p in model.parameters()]


WAYS = {
    "whole": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "sequential": lambda model, x: checkpoint_sequential(model, 4, x, use_reentrant=False),
    "nested": lambda model, x: checkpoint(lambda x: checkpoint_sequential(model, 3, x), x),
    "keyword": lambda model, x: checkpoint(lambda x, *, model: model(x), x, model=model),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_gradients_are_the_same_bit_for_bit(way, dtype):
    """Dropout draws the first run's numbers again, and backward outside the region computes in its dtype."""
    loss, bytes_, wanted = gradients(lambda model, x: model(x), dtype)
    again, fewer, got = gradients(WAYS[way], dtype)
    assert loss == again and fewer < 0.4 * bytes_
    for a, b in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_drawing_goes_on_as_if_nothing_had_run_again():
    x = minamp.ones(4, requires_grad=True)
    y = checkpoint(F.dropout, x, 0.5)
    minamp.manual_seed(3)
    first = minamp.rand(3).tolist()
    minamp.manual_seed(3)
    y.sum().backward()
    assert minamp.rand(3).tolist() == first
    np.testing.assert_array_equal(x.grad.numpy(), y.detach().numpy())


def test_without_the_random_state_the_second_run_draws_other_numbers():
    minamp.manual_seed(0)
    x = minamp.ones(64, requires_grad=True)
    y = checkpoint(F.dropout, x, 0.5, preserve_rng_state=False)
    y.sum().backward()
    assert (x.grad.numpy() != y.detach().numpy()).any()


def test_it_keeps_less_at_once():
    """32 layers whose outputs take 1 MB each, in 6 segments: 32 MB and more without, at most 5 + 7 and what one layer needs."""
    x = minamp.ones(256, 1024)
    layers = [nn.Tanh() for _ in range(32)]
    peaks = []
    for run in (nn.Sequential(*layers), lambda x: checkpoint_sequential(layers, 6, x)):
        leaf = minamp.ones(256, 1024).requires_grad_()
        with peak_memory() as peak:
            run(leaf * x).sum().backward()
        peaks.append(peak.bytes / 2**20)
    assert peaks[0] > 32 and peaks[1] < 20


def test_what_the_function_holds_gets_gradients_though_no_argument_wants_one():
    weight = minamp.tensor([2.0], requires_grad=True)
    checkpoint(lambda x: (x * weight).exp(), minamp.tensor([1.0])).backward()
    assert weight.grad.item() == pytest.approx(np.exp(2.0))


def test_autograd_grad_and_only_some_of_the_ways():
    x, w = (minamp.tensor([v], requires_grad=True) for v in (0.5, 2.0))
    y = checkpoint(lambda x: (x * w).exp() * x.sin(), x)
    (gx,) = grad(y, x, retain_graph=True)
    (gw,) = grad(y, w)
    assert gx.item() == pytest.approx(np.exp(1.0) * (2 * np.sin(0.5) + np.cos(0.5)))
    assert gw.item() == pytest.approx(np.exp(1.0) * 0.5 * np.sin(0.5))


def test_gradients_of_gradients():
    def penalty(run):
        x = minamp.tensor([0.3, -0.7], dtype=minamp.float64, requires_grad=True)
        w = minamp.tensor([1.5, 2.5], dtype=minamp.float64, requires_grad=True)
        (g,) = grad(run(lambda x: (x * w).tanh().pow(3).sum(), x), x, create_graph=True)
        (g * g).sum().backward()
        return [*x.grad.tolist(), *w.grad.tolist()]

    # the same terms, added in another order
    assert penalty(checkpoint) == pytest.approx(penalty(lambda function, x: function(x)), rel=1e-13)


def test_retain_graph_and_a_second_backward():
    x = minamp.tensor([1.0], requires_grad=True)
    runs = []

    def function(x):
        runs.append(1)
        return x.exp()

    y = checkpoint(function, x)
    y.backward(retain_graph=True)
    y.backward()
    assert len(runs) == 2 and x.grad.item() == pytest.approx(2 * np.e)
    with pytest.raises(RuntimeError, match="backward through exp a second time"):
        y.backward()


def test_a_function_of_the_users_inside():
    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x, x + 1

        @staticmethod
        def backward(ctx, g, h):
            (x,) = ctx.saved_tensors
            return 2 * x * g + h

    x = minamp.tensor([3.0], requires_grad=True)
    with saved_bytes() as kept:
        y = checkpoint(lambda x: sum(Square.apply(x.exp())), x)
    y.backward()
    assert kept.total == 0 and x.grad.item() == pytest.approx((2 * np.exp(3) + 1) * np.exp(3))


def test_writes_in_place_inside():
    def function(x):
        y = x * 3
        y.pow_(2)  # keeps what it is about to write over
        y[0] = 0.5
        return y.relu_().exp_()

    grads = []
    for run in (checkpoint, lambda function, x: function(x)):
        x = minamp.tensor([0.1, -0.2, 0.3], requires_grad=True)
        run(function, x).sum().backward()
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1]


def test_several_outputs_and_none():
    x = minamp.tensor([0.5], requires_grad=True)
    a, b, name = checkpoint(lambda x: (x.exp(), x.sin(), "name"), x)
    assert name == "name"
    (a + b).backward()
    assert x.grad.item() == pytest.approx(np.exp(0.5) + np.cos(0.5))


def test_without_gradients_the_function_just_runs():
    with minamp.no_grad():
        assert not checkpoint(lambda x: x.exp(), minamp.ones(1, requires_grad=True)).requires_grad


def test_a_cast_that_the_first_run_found_in_the_cache():
    """The weight was cast before, so the first run casts less than the second, which keeps nothing of casts."""
    weight = minamp.randn(8, 8).requires_grad_()
    x = minamp.randn(4, 8)
    grads = []
    for run in (checkpoint, lambda function, x: function(x)):
        weight.grad = None
        with autocast():
            y = run(lambda y: (y @ weight).relu(), x @ weight)
        y.float().sum().backward()
        grads.append(weight.grad.numpy())
    np.testing.assert_array_equal(*grads)


def test_the_statistics_of_a_batch_norm_are_updated_twice_as_in_torch():
    norm = nn.BatchNorm1d(2)
    x = minamp.tensor([[0.0, 1.0], [2.0, 5.0]], requires_grad=True)
    checkpoint(norm, x).sum().backward()
    assert int(norm.num_batches_tracked) == 2
    np.testing.assert_allclose(norm.running_mean.numpy(), [0.19, 0.57], rtol=1e-6)


def test_training_with_a_scaler():
    losses = []
    for run in (lambda model, x: model(x), WAYS["sequential"]):
        model, scaler = network(), GradScaler(init_scale=2.0**30)  # the first steps are skipped
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        x, y = minamp.randn(16, 32), minamp.randint(0, 10, (16,))
        for _ in range(20):
            optimizer.zero_grad()
            with autocast():
                loss = F.cross_entropy(run(model, x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    assert losses[0] == losses[1] < 2.0  # from 2.4


def test_the_doctor_finds_nothing_in_a_healthy_loop():
    model, scaler = network(), GradScaler()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    x, y = minamp.randn(16, 32), minamp.randint(0, 10, (16,))

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(checkpoint_sequential(model, 2, x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    report = minamp.doctor(step, model=model, optimizer=optimizer, scaler=scaler)
    assert not report and report.steps == 2, report


# -- what can't be run again


def test_another_function_the_second_time_is_refused():
    x, runs = minamp.ones(2, requires_grad=True), []

    def function(x):
        runs.append(1)
        return x.exp().sin() if len(runs) == 1 else x.exp()

    y = checkpoint(function, x)
    with pytest.raises(
        CheckpointError,
        match=r"op 1 of the function was sin \(float32 \(2,\)\) in forward and is none in backward",
    ):
        y.sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("what", ["argument", "weight"])
def test_what_was_written_meanwhile_is_refused(what):
    x, weight = (minamp.ones(2, requires_grad=True) for _ in range(2))
    y = checkpoint(lambda x: (x * weight).exp() * weight, x)
    with minamp.no_grad():
        (x if what == "argument" else weight).mul_(2)
    text = {"argument": "an argument", "weight": "a tensor that the function uses"}[what]
    with pytest.raises(RuntimeError, match=f"checkpoint: {text} was written in place between forward"):
        y.sum().backward()


def test_an_error_in_the_second_run_leaves_everything_as_it_was():
    x, runs = minamp.ones(2, requires_grad=True), []

    def function(x):
        runs.append(1)
        if len(runs) == 2:
            raise KeyError("gone")
        return x.exp()

    y = checkpoint(function, x)
    minamp.manual_seed(5)
    before = minamp.get_rng_state()
    with pytest.raises(KeyError, match="gone"):
        y.sum().backward()
    assert minamp.get_rng_state() == before and not minamp.is_autocast_enabled() and x.grad is None
    y.sum().backward()
    assert x.grad.tolist() == pytest.approx([np.e, np.e])


def test_segments_that_are_too_many():
    with pytest.raises(ValueError, match="checkpoint_sequential: segments=3 for 2 functions: give 1 to 2"):
        checkpoint_sequential([F.relu, F.relu], 3, minamp.ones(2))
