"""A penalty on the norm of the gradients: gradients of gradients, with the scale taken out in between."""

import json

import numpy as np
from torch import float16, from_numpy, nn, no_grad
from torch.amp import GradScaler, autocast
from torch.autograd import grad
from torch.optim import Adam

rng = np.random.default_rng(13)
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
with no_grad():
    for p in model.parameters():
        p.copy_(from_numpy((0.5 * rng.standard_normal(tuple(p.shape))).astype(np.float32)))
data = rng.standard_normal((3, 20, 5)).astype(np.float32)
targets = np.sin(data.sum(-1, keepdims=True)).astype(np.float32)

loss_fn, optimizer = nn.MSELoss(), Adam(model.parameters(), lr=0.01)
scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=6)
losses, penalties, scales = [], [], []
for step in range(18):
    x, target = from_numpy(data[step % 3]), from_numpy(targets[step % 3])
    optimizer.zero_grad()
    with autocast(device_type="cpu", dtype=float16):
        loss = loss_fn(model(x), target)

    # outside the region, with gradients of the scaled loss
    scaled = grad(outputs=scaler.scale(loss), inputs=list(model.parameters()), create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    grads = [g * inverse for g in scaled]

    # the penalty is part of the forward, so it is made in a region again
    with autocast(device_type="cpu", dtype=float16):
        norm = 0
        for g in grads:
            norm = norm + g.pow(2).sum()
        penalty = norm.sqrt()
        total = loss + 0.1 * penalty
    scaler.scale(total).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    penalties.append(penalty.item())
    scales.append(scaler.get_scale())
print(json.dumps({"losses": losses, "penalties": penalties, "scales": scales}))
