"""My causal attention works in float32; under autocast masked_fill refuses the usual -1e9.

The scores are float16 there, whose smallest number is -65504.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits
from minamp import GradScaler, autocast, nn, optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(8, shape=(28, 28))  # every row of pixels is a token
    model = nn.ModuleList([nn.Linear(28, 3 * 16), nn.Linear(16, 10)])
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()
    future = minamp.ones(28, 28).triu(1).bool()

    def step():
        optimizer.zero_grad()
        with autocast():
            q, k, v = model[0](x).chunk(3, dim=-1)
            scores = q @ k.mT / 4.0
            scores = scores.masked_fill(future, -1e9)  # the fault
            h = F.softmax(scores, dim=-1) @ v
            loss = F.cross_entropy(model[1](h.mean(dim=1)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(8, shape=(28, 28))  # every row of pixels is a token
    model = nn.ModuleList([nn.Linear(28, 3 * 16), nn.Linear(16, 10)])
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()
    future = minamp.ones(28, 28).triu(1).bool()

    def step():
        optimizer.zero_grad()
        with autocast():
            q, k, v = model[0](x).chunk(3, dim=-1)
            scores = q @ k.mT / 4.0
            scores = scores.masked_fill(future, float("-inf"))
            h = F.softmax(scores, dim=-1) @ v
            loss = F.cross_entropy(model[1](h.mean(dim=1)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
