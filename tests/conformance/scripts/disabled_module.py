"""One module of the network runs in float32: a disabled region inside the region, and .float() on what comes in."""

import json

import numpy as np
import torch as tn
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


class Distances(nn.Module):
    """Squared distances to learned centres; in float16 they would overflow from 256 on."""

    def __init__(self, centres):
        super().__init__()
        self.centres = nn.Parameter(centres)

    def forward(self, x):
        with autocast("cpu", enabled=False):
            x = x.float()
            squares = (x * x).sum(dim=1, keepdim=True) + (self.centres * self.centres).sum(dim=1)
            distances = squares - 2 * (x @ self.centres.t())
            assert distances.dtype == tn.float32
            return -1e-4 * distances


rng = np.random.default_rng(21)
encode = nn.Linear(6, 10)
net = nn.Sequential(
    encode, nn.ReLU(), Distances(tn.tensor((80 * rng.standard_normal((3, 10))).astype(np.float32)))
)
with tn.no_grad():
    for p in encode.parameters():
        p.copy_(tn.from_numpy((40 * rng.standard_normal(tuple(p.shape))).astype(np.float32)))
labels = rng.integers(0, 3, 60)
data = (rng.standard_normal((3, 6))[labels] + 0.5 * rng.standard_normal((60, 6))).astype(np.float32)

optimizer = tn.optim.Adam(
    [{"params": encode.parameters(), "lr": 0.3}, {"params": net[2].parameters()}], lr=1.0
)
scaler = GradScaler("cpu", growth_interval=6)
losses, scales = [], []
for step in range(20):
    rows = slice(step % 3 * 20, step % 3 * 20 + 20)
    optimizer.zero_grad(set_to_none=True)
    with autocast("cpu", dtype=tn.float16):
        loss = F.cross_entropy(net(tn.tensor(data[rows])), tn.tensor(labels[rows]))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    scales.append(scaler.get_scale())
print(json.dumps({"losses": losses, "scales": scales}))
