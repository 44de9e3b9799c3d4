"""The loss from the textbook: the logarithm of the softmax. With a sharp temperature it is infinite at once.

The softmax of a score far below the best one is 0, and log(0) is -inf. log_softmax never forms the probability.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import GradScaler, autocast, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.Adam(model.parameters(), lr=1e-4)
    scaler = GradScaler(init_scale=2.0**10)

    def step():
        optimizer.zero_grad()
        with autocast():
            scores = model(x) / 0.01  # the temperature
            log_p = F.softmax(scores, dim=-1).log()  # the fault
            loss = F.nll_loss(log_p, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10)
    optimizer = optim.Adam(model.parameters(), lr=1e-4)
    scaler = GradScaler(init_scale=2.0**10)

    def step():
        optimizer.zero_grad()
        with autocast():
            scores = model(x) / 0.01  # the temperature
            log_p = F.log_softmax(scores, dim=-1)
            loss = F.nll_loss(log_p, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
