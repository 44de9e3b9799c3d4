"""Two optimizers share my scaler, and I call update after each of them.

One iteration is then counted as two: the scale grows after half the interval, and the second optimizer's gradients are
divided by a scale that may already be another one than they were multiplied with.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import GradScaler, autocast, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    first = optim.SGD(model[0].parameters(), lr=0.05)
    second = optim.SGD(model[2].parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        first.zero_grad()
        second.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(first)
        scaler.update()  # the fault
        scaler.step(second)
        scaler.update()  # the fault
        return loss.item()

    return dict(step=step, model=model, optimizer=[first, second], scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    first = optim.SGD(model[0].parameters(), lr=0.05)
    second = optim.SGD(model[2].parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        first.zero_grad()
        second.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=[first, second], scaler=scaler)
