"""My loss is computed after the autocast region has ended. It has three digits, and the first step is always skipped.

The network's output is half, the target was made half to fit, and nothing outside the region widens them. The loss is rounded
to half, and the scale, which its gradient starts with, is 65536 and too large for half.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import GradScaler, autocast, optim


def broken():
    minamp.manual_seed(0)
    x, _ = digits(32)
    model = mlp(784, 64, 784)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            output = model(x)
        loss = F.mse_loss(output, x.half())  # the fault
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    x, _ = digits(32)
    model = mlp(784, 64, 784)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            output = model(x)
        loss = F.mse_loss(output.float(), x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
