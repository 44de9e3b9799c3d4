"""I make the GradScaler where I use it, inside the step. Not one step is taken.

A new scaler starts at 65,536 again. Here the gradients need a smaller scale, and what the last one learnt is gone.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import GradScaler, autocast, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.001)
    scaler = GradScaler()

    def step():
        scaler = GradScaler()  # the fault
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y, reduction="sum")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.001)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y, reduction="sum")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
