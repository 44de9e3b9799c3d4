"""I add up the gradients of four micro-batches and unscale each time: the second one raises.

unscale_ divides everything added up so far. Between two updates it may be called once, when all gradients are there.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import GradScaler, autocast, optim
from minamp.nn.utils import clip_grad_norm_


def broken():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        for i in range(0, 32, 8):
            with autocast():
                loss = F.cross_entropy(model(x[i : i + 8]), y[i : i + 8]) / 4
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # the fault
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return 4 * loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        for i in range(0, 32, 8):
            with autocast():
                loss = F.cross_entropy(model(x[i : i + 8]), y[i : i + 8]) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return 4 * loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
