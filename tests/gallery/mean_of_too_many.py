"""The mean error of my autoencoder is infinite although every single error is about 1.

I wrote sum / n. The pictures have 98,304 numbers; their sum passes 65504 before it is divided.
"""

import minamp
import minamp.nn.functional as F
from minamp import GradScaler, autocast, nn, optim


def broken():
    minamp.manual_seed(0)
    x = minamp.randn(32, 3, 32, 32)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            output = model(x)
        loss = (output - x.half()).abs().sum() / x.numel()  # the fault
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    x = minamp.randn(32, 3, 32, 32)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            output = model(x)
        loss = F.l1_loss(output.float(), x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
