"""The loss is not finite from the first step on, and the scaler skips and halves, skips and halves.

The inputs are raw 16-bit readings. A weighted sum of them passes 65504 inside the network, before any scale is applied.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import mlp
from minamp import GradScaler, autocast, optim


def broken():
    minamp.manual_seed(0)
    readings = 55000.0 + 2000.0 * minamp.randn(32, 16)
    y = (readings[:, 0] > 55000.0).long()
    x = readings
    model = mlp(16, 256, 64, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x), y)  # the fault
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    readings = 55000.0 + 2000.0 * minamp.randn(32, 16)
    y = (readings[:, 0] > 55000.0).long()
    x = (readings - readings.mean(dim=0)) / readings.std(dim=0)
    model = mlp(16, 256, 64, 2)
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
