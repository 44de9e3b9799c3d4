"""I divide features by their largest value plus 1e-8. One empty picture, and everything is NaN.

The sum is formed in float16, where 1e-8 is 0: a row of zeros becomes 0 / 0.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits
from minamp import GradScaler, autocast, nn, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(32)
    x[0] = 0.0  # an empty picture
    model = nn.ModuleList([nn.Linear(784, 64, bias=False), nn.Linear(64, 10)])
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler(init_scale=2.0**10)

    def step():
        optimizer.zero_grad()
        with autocast():
            h = F.relu(model[0](x))
            h = h / (h.amax(dim=-1, keepdim=True) + 1e-8)  # the fault
            loss = F.cross_entropy(model[1](h), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(32)
    x[0] = 0.0  # an empty picture
    model = nn.ModuleList([nn.Linear(784, 64, bias=False), nn.Linear(64, 10)])
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler(init_scale=2.0**10)

    def step():
        optimizer.zero_grad()
        with autocast():
            h = F.relu(model[0](x))
            h = h / (h.amax(dim=-1, keepdim=True) + 1e-3)
            loss = F.cross_entropy(model[1](h), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
