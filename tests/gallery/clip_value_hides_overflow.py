"""My scale never moves, although the gradients overflow in every step.

clip_grad_value_ turns inf into 1 before the scaler looks for it, so nothing is skipped and the scale stays too high.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import GradScaler, autocast, optim
from minamp.nn.utils import clip_grad_value_


def broken():
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
        clip_grad_value_(model.parameters(), clip_value=1.0)  # the fault
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
        scaler.unscale_(optimizer)
        clip_grad_value_(model.parameters(), clip_value=1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
