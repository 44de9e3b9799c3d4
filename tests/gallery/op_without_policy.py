"""My own autograd.Function works in float32; under autocast its backward raises about dtypes.

Its forward is cast by the region it stands in, its backward runs outside every region: there the float16 gradient meets the
float32 weight.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits
from minamp import GradScaler, autocast, nn, optim
from minamp.autograd import Function


def broken():
    minamp.manual_seed(0)

    class Product(Function):  # the fault
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            return g @ weight.mT, x.mT @ g  # the fault

    x, y = digits(32)
    model = nn.ModuleList([nn.Linear(784, 64), nn.Linear(64, 10)])
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            h = F.relu(model[0](x))
            logits = Product.apply(h, model[1].weight.mT) + model[1].bias  # the fault
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)


def repaired():
    minamp.manual_seed(0)

    class Product(Function):
        @staticmethod
        @minamp.custom_fwd(device_type="cuda")
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @minamp.custom_bwd(device_type="cuda")
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            return g @ weight.mT, x.mT @ g

    x, y = digits(32)
    model = nn.ModuleList([nn.Linear(784, 64), nn.Linear(64, 10)])
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler()

    def step():
        optimizer.zero_grad()
        with autocast():
            h = F.relu(model[0](x))
            logits = Product.apply(h, model[1].weight.mT) + model[1].bias
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=scaler)
