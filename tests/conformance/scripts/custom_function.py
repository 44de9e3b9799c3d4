"""Two functions with a backward of their own: one follows the region it is called in, one insists on float32."""

import json

import numpy as np
import torch as tn
from torch.amp import GradScaler, autocast, custom_bwd, custom_fwd
from torch.autograd import Function
from torch.nn import Module, Parameter
from torch.nn.functional import mse_loss

dtypes = []


class Product(Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        dtypes.append(str(g.dtype).split(".")[-1])
        return g.mm(b.t()), a.t().mm(g)


class Cube(Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=tn.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        dtypes.append(str(x.dtype).split(".")[-1])
        return x * x * x

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        dtypes.append(str(g.dtype).split(".")[-1])
        return 3 * x * x * g


rng = np.random.default_rng(15)


class Net(Module):
    def __init__(self):
        super().__init__()
        self.a = Parameter(tn.tensor((0.3 * rng.standard_normal((6, 10))).astype(np.float32)))
        self.b = Parameter(tn.tensor((0.3 * rng.standard_normal((10, 1))).astype(np.float32)))

    def forward(self, x):
        return Product.apply(Cube.apply(Product.apply(x, self.a)), self.b)


net = Net()
optimizer = tn.optim.SGD(net.parameters(), lr=0.02)
scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
x = rng.standard_normal((24, 6)).astype(np.float32)
target = (x[:, :1] ** 3 * 0.2).astype(np.float32)
losses, scales = [], []
for _ in range(16):
    optimizer.zero_grad()
    with autocast("cpu", dtype=tn.float16):
        loss = mse_loss(net(tn.tensor(x)), tn.tensor(target))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    scales.append(scaler.get_scale())
print(json.dumps({"losses": losses, "scales": scales, "dtypes": dtypes[:5]}))
