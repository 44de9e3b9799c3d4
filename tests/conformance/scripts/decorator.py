"""autocast as a decorator of forward; the loss is computed outside the region, on .float()."""

import json

import numpy as np
import torch as tn
import torch.nn as nn
from torch.amp import GradScaler, autocast


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 2 * width)
        self.head = nn.Linear(2 * width, 11, bias=False)

    @autocast(device_type="cpu", dtype=tn.float16)
    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        return self.head(nn.functional.gelu(self.hidden(x)))


rng = np.random.default_rng(16)
net = Net(8)
with tn.no_grad():
    for name, p in net.named_parameters():
        if "norm" not in name:
            p.copy_(tn.from_numpy((0.4 * rng.standard_normal(tuple(p.shape))).astype(np.float32)))
tokens = rng.integers(0, 11, (6, 12))
following = (tokens * 3 + 1) % 11

optimizer = tn.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.05)
scaler = GradScaler("cpu", init_scale=2.0**24, growth_interval=10)
losses, scales = [], []
for _ in range(24):
    logits = net(tn.from_numpy(tokens))
    assert logits.dtype == tn.float16 and not tn.is_autocast_enabled("cpu")
    loss = nn.functional.cross_entropy(logits.float().reshape(-1, 11), tn.from_numpy(following.reshape(-1)))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    scales.append(scaler.get_scale())
print(json.dumps({"losses": losses, "scales": scales}))
