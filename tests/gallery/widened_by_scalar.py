"""My scores and their gradients are float64, under autocast.

The contrast of each picture comes from NumPy, as float64. One product with it, and everything after is as wide, four times
the memory of float16.
"""

import numpy as np

import minamp
import minamp.nn.functional as F
from gallery.parts import digits
from minamp import GradScaler, autocast, nn, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(16, shape=(1, 28, 28))
    contrast = minamp.tensor(1.0 / np.std(x.numpy(), axis=(1, 2, 3), keepdims=True, dtype=np.float64))
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 10, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            scores = model(x) * contrast  # the fault
            loss = F.cross_entropy(scores.mean(dim=(2, 3)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(16, shape=(1, 28, 28))
    contrast = minamp.tensor(1.0 / np.std(x.numpy(), axis=(1, 2, 3), keepdims=True, dtype=np.float64)).half()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 10, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            scores = model(x) * contrast
            loss = F.cross_entropy(scores.mean(dim=(2, 3)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
