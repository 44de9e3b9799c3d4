"""Two models that feed each other's losses, two optimizers, one scaler. Only the first optimizer is unscaled by hand."""

import json

import numpy as np
import torch as tn
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

rng = np.random.default_rng(14)


def network():
    layers = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2))
    with tn.no_grad():
        for p in layers.parameters():
            p.copy_(tn.from_numpy((0.4 * rng.standard_normal(tuple(p.shape))).astype(np.float32)))
    return layers


model0, model1 = network(), network()
optimizer0 = tn.optim.SGD(model0.parameters(), lr=0.05)
optimizer1 = tn.optim.Adam(model1.parameters(), lr=0.02)
data = rng.standard_normal((5, 16, 8)).astype(np.float32)
targets = np.stack([data[..., :4].sum(-1), data[..., 4:].sum(-1)], -1).astype(np.float32)

scaler = GradScaler("cpu", init_scale=2.0**17, growth_interval=4)
losses, others, scales = [], [], []
for step in range(20):
    x, target = tn.from_numpy(data[step % 5]), tn.from_numpy(targets[step % 5])
    optimizer0.zero_grad()
    optimizer1.zero_grad()
    with autocast("cpu", dtype=tn.float16):
        output0, output1 = model0(x), model1(x)
        loss0 = F.mse_loss(2 * output0 + 0.5 * output1, target)
        loss1 = F.l1_loss(0.5 * output0 - output1, target)
    scaler.scale(loss0).backward(retain_graph=True)
    scaler.scale(loss1).backward()

    scaler.unscale_(optimizer0)
    nn.utils.clip_grad_value_(model0.parameters(), 1.0)
    scaler.step(optimizer0)
    scaler.step(optimizer1)
    scaler.update()
    losses.append(loss0.item())
    others.append(loss1.item())
    scales.append(scaler.get_scale())
print(json.dumps({"losses": losses, "other losses": others, "scales": scales}))
