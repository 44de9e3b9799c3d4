"""Training looks perfect, and model.eval() gives NaN.

The first batch had an empty picture in it, which I divided by 0. Its NaN went into the running mean and variance, where no
later batch can remove it; training never reads them.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits
from minamp import GradScaler, autocast, nn, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(16, shape=(1, 28, 28))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10)
    )
    first, _ = digits(16, start=16, shape=(1, 28, 28))
    first[3] = 0.0  # an empty picture
    brightest = first.abs().amax(dim=(1, 2, 3), keepdim=True)
    first = first / brightest
    with minamp.no_grad():
        model(first)
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


def repaired():
    minamp.manual_seed(0)
    x, y = digits(16, shape=(1, 28, 28))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10)
    )
    first, _ = digits(16, start=16, shape=(1, 28, 28))
    first[3] = 0.0  # an empty picture
    brightest = first.abs().amax(dim=(1, 2, 3), keepdim=True)
    first = first / brightest.clamp(min=1.0)
    with minamp.no_grad():
        model(first)
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
