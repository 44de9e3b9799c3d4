"""My own layer normalisation gives rows of zeros, without any warning, as soon as its input is large.

The variance of values around 400 is 160000, which float16 can't hold: it is inf, and something divided by inf is 0.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits
from minamp import GradScaler, autocast, nn, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(32)
    x = 255 * x  # not normalised
    model = nn.ModuleList([nn.Linear(784, 64), nn.Linear(64, 10)])
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler(init_scale=2.0**10)

    def step():
        optimizer.zero_grad()
        with autocast():
            h = model[0](x)
            h = h - h.mean(dim=-1, keepdim=True)
            variance = (h * h).mean(dim=-1, keepdim=True)  # the fault
            h = h / (variance + 1e-5).sqrt()
            loss = F.cross_entropy(model[1](F.relu(h)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(32)
    x = 255 * x  # not normalised
    model = nn.ModuleList([nn.Linear(784, 64), nn.Linear(64, 10)])
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler(init_scale=2.0**10)

    def step():
        optimizer.zero_grad()
        with autocast():
            h = model[0](x).float()
            h = h - h.mean(dim=-1, keepdim=True)
            variance = (h * h).mean(dim=-1, keepdim=True)
            h = h / (variance + 1e-5).sqrt()
            loss = F.cross_entropy(model[1](F.relu(h)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
