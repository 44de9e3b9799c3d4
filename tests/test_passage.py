"""Backward hooks of modules."""

import pytest

import minamp
from minamp import autocast, float16, float32, nn


def plain(gradients):
    return tuple(g if g is None else g.tolist() for g in gradients)


class Both(nn.Module):
    def forward(self, a, b):
        return a * 2, b * 3


@pytest.fixture
def seen():
    return []


@pytest.fixture
def note(seen):
    def hook(module, grad_input, grad_output):
        seen.append((plain(grad_input), plain(grad_output)))

    return hook


def ones():
    return minamp.ones(1, requires_grad=True)


def test_it_sees_both_sides_of_a_layer(seen, note):
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = minamp.tensor([[3.0, 4.0]])
    layer.register_full_backward_hook(note)
    x = minamp.ones(1, 2, requires_grad=True)
    y = layer(x)
    (y * 5).sum().backward()
    assert seen == [(([[15.0, 20.0]],), ([[5.0]],))]
    assert x.grad.tolist() == [[15.0, 20.0]] and layer.weight.grad.tolist() == [[5.0, 5.0]]


def test_where_no_input_wants_a_gradient(seen, note):
    layer = nn.Linear(2, 1)
    layer.register_full_backward_hook(note)
    layer(minamp.ones(1, 2)).sum().backward()
    assert seen == [((None,), ([[1.0]],))]


def test_an_input_used_elsewhere_too_brings_only_the_modules_own_gradient(seen, note):
    module, x = nn.Tanh(), minamp.zeros(1, requires_grad=True)
    module.register_full_backward_hook(note)
    (module(x) * 2 + x * 10).backward()
    assert seen == [(([2.0],), ([2.0],))] and x.grad.tolist() == [12.0]


def test_an_output_without_a_gradient(seen, note):
    module, (a, b) = Both(), (ones(), ones())
    module.register_full_backward_hook(note)
    module(a, b)[0].backward()
    assert seen == [(([2.0], None), ([1.0], None))] and b.grad is None


def test_what_hooks_return_replaces_the_gradients(seen, note):
    module, (a, b) = Both(), (ones(), ones())
    module.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 10, grad_output[1]))
    first = module.register_full_backward_hook(
        lambda module, grad_input, _: (grad_input[0] + 1, minamp.zeros(1))
    )
    module.register_full_backward_hook(note)
    sum(module(a, b)).backward()
    assert seen == [(([21.0], [0.0]), ([10.0], [1.0]))]
    assert (a.grad.item(), b.grad.item()) == (21.0, 0.0)
    first.remove()
    sum(module(a, b)).backward()
    assert seen[1] == (([20.0], [3.0]), ([10.0], [1.0]))


def test_under_autocast_the_gradients_have_the_formats_of_the_tensors():
    seen, layer = [], nn.Linear(2, 2)
    layer.register_full_backward_hook(lambda module, *sides: seen.append([side[0].dtype for side in sides]))
    with autocast():
        y = layer(minamp.ones(1, 2, requires_grad=True))
    y.sum().backward()
    assert seen == [[float32, float16]]


def test_every_backward_and_every_call(seen, note):
    module, x = nn.Tanh(), minamp.zeros(1, requires_grad=True)
    handle = module.register_full_backward_hook(note)
    y = module(module(x))
    y.backward(retain_graph=True)
    y.backward()
    assert len(seen) == 4
    handle.remove()
    module(x).backward()
    assert len(seen) == 4


def test_without_gradients_nothing_happens(seen, note):
    module = nn.Tanh()
    module.register_full_backward_hook(note)
    with minamp.no_grad():
        assert not module(ones()).requires_grad


def test_as_many_gradients_as_there_are():
    module = Both()
    module.register_full_backward_hook(lambda *_: (None,))
    with pytest.raises(
        RuntimeError, match="Both: a backward hook returned 1 gradients as grad_input where there are 2"
    ):
        module(ones(), ones())[0].backward()


def test_an_output_that_is_not_watched(seen, note):
    class Named(nn.Module):
        def forward(self, x):
            return {"y": x * 2}

    module, x = Named(), ones()
    module.register_full_backward_hook(note)
    with pytest.warns(UserWarning, match="Named: its backward hooks see nothing, since its output is a dict"):
        y = module(x)["y"]
    y.backward()
    assert not seen and x.grad.item() == 2.0
