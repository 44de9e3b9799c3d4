"""Unscale, then clip the norm of the gradients, then step."""

import json

import numpy as np
import torch as tn
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_

rng = np.random.default_rng(11)
inputs = rng.standard_normal((4, 16, 6)).astype(np.float32)
targets = (20 * np.tanh(inputs.sum(-1, keepdims=True))).astype(np.float32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.second = nn.Linear(32, 1)

    def forward(self, x):
        return self.second(F.silu(self.first(x)))


net = Net()
net.load_state_dict(
    {
        name: tn.from_numpy((0.4 * rng.standard_normal(tuple(p.shape))).astype(np.float32))
        for name, p in net.state_dict().items()
    }
)
optimizer = tn.optim.AdamW(net.parameters(), lr=0.02)
scaler = GradScaler("cpu", init_scale=4096.0, growth_interval=5)
losses, scales, norms = [], [], []
for step in range(24):
    x, target = tn.from_numpy(inputs[step % 4]), tn.from_numpy(targets[step % 4])
    optimizer.zero_grad()
    with autocast("cpu", dtype=tn.float16):
        loss = F.mse_loss(net(x), target)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norms.append(float(clip_grad_norm_(net.parameters(), max_norm=5.0)))
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    scales.append(scaler.get_scale())
print(json.dumps({"losses": losses, "scales": scales, "norms": norms}))
