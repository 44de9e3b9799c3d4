"""I called model.half() and kept the GradScaler: the very first scaler.step raises.

Gradients have the weights' format. Half gradients can't be unscaled without losing the digits that scaling kept.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import GradScaler, autocast, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10).half()  # the fault
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
