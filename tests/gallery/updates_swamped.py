"""My float16 network hardly moves, and nothing is NaN.

For most weights the step, learning rate times gradient, is less than half the distance to the next float16 number, and is
rounded away.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import optim


def broken():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10).half()
    optimizer = optim.SGD(model.parameters(), lr=1e-4)  # the fault

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10).half()
    optimizer = optim.SGD(model.parameters(), lr=1e-4, master_weights=True)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)
