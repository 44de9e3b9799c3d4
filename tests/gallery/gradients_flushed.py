"""The lower layers of my deep network don't learn under autocast; in float32 they do.

Their gradients are smaller than half of 6e-8, float16's smallest number, and become 0. I had switched the scaler off.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits
from minamp import GradScaler, autocast, nn, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(64)
    layers = [nn.Linear(784, 64), nn.Sigmoid()]
    for _ in range(5):
        layers += [nn.Linear(64, 64), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler(enabled=False)  # the fault

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
    x, y = digits(64)
    layers = [nn.Linear(784, 64), nn.Sigmoid()]
    for _ in range(5):
        layers += [nn.Linear(64, 64), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
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
