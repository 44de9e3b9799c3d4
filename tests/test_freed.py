"""What a step has made is freed when the last name of it goes: nothing waits for the garbage collector.

Cycles of references would keep activations and gradients alive until it happens to run, on a GPU as well.
"""

import gc

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import nn, optim, watch


def a_step(optimizer):
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 3)),
    )
    optimizer, scaler = optimizer(net.parameters(), lr=0.1), minamp.GradScaler()
    x, y = minamp.randn(6, 1, 8, 8), minamp.tensor([0, 1, 2, 0, 1, 2])

    def step():
        for _ in range(2):
            with minamp.autocast():
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def half_weights_with_masters():
    net = nn.Linear(4, 4).half()
    optimizer, scaler = optim.Adam(net.parameters(), lr=0.1, master_weights=True), minamp.GradScaler()

    def step():
        scaler.scale(net(minamp.randn(4, 4).half()).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def leaf(*shape):
    return minamp.randn(*shape, requires_grad=True)


def a_leaf_made_in_the_step():
    x = leaf(2, 4, 8)
    F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()


def gradients_of_gradients():
    w = leaf(4, 4)
    (g,) = minamp.autograd.grad((w @ w).tanh().sum(), w, create_graph=True)
    (g * g).sum().backward()


def hooks():
    x = leaf(3)
    y = x * 2
    y.register_hook(lambda g: g * 2)
    y.retain_grad()
    y.sum().backward()


def instruments():
    with watch.first_bad_op(), watch.saved_bytes(), watch.gradient_histograms():
        leaf(3, 3).exp().sum().backward()


class Double(minamp.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2 + 0 * ctx.saved_tensors[0]


def a_function():
    Double.apply(leaf(3)).sum().backward()


STEPS = {
    "SGD": lambda: a_step(optim.SGD),
    "AdamW": lambda: a_step(optim.AdamW),
    "half weights with masters": half_weights_with_masters,
    **{
        f.__name__: lambda f=f: f
        for f in (a_leaf_made_in_the_step, gradients_of_gradients, hooks, instruments, a_function)
    },
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_leaves_nothing_to_the_garbage_collector(name):
    step = STEPS[name]()
    step()
    gc.collect()
    gc.disable()
    try:
        step()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_leaf_that_nobody_holds_gets_no_gradient_and_its_hook_runs():
    seen, w = [], leaf(2)

    def loss():
        x = minamp.tensor(np.float32([1.0, 2.0]), requires_grad=True)
        x.register_hook(lambda g: seen.append(g.tolist()))
        return (x * w).sum()

    loss().backward()
    assert w.grad.tolist() == [1, 2] and seen == [w.tolist()]
