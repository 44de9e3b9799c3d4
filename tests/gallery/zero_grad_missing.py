"""The first step is right, every later one is too large.

Nobody clears the gradients: every backward adds its own to those of all steps before.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import autocast, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)

    def step():
        with autocast(dtype=minamp.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)

    def step():
        optimizer.zero_grad()
        with autocast(dtype=minamp.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)
