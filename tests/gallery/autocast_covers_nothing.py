"""I use autocast and my training is not one bit faster.

The region covers the loss alone, which it computes in float32 anyway. The network ran before it, in float32.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import GradScaler, autocast, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        logits = model(x)  # the fault
        with autocast():  # the fault
            loss = F.cross_entropy(logits, y)
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
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
