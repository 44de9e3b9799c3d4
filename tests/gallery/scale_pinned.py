"""Every step is skipped, and the scale stands at 16,384 for ever.

The gradients overflow at this scale, and min_scale forbids a smaller one.
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
    scaler = GradScaler(min_scale=2.0**14)  # the fault

    def step():
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
    scaler = GradScaler(min_scale=1.0)

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y, reduction="sum")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
