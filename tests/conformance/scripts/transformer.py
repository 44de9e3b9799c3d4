"""A transformer block on sequences of unequal length: attention with both masks, layer norms, a feed-forward part."""

import json

import numpy as np
import torch as tn
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

rng = np.random.default_rng(12)
inputs = rng.standard_normal((3, 8, 6, 16)).astype(np.float32)
lengths = rng.integers(2, 7, (3, 8))
targets = (inputs[..., 0] > inputs[:, :, :1, 1]).astype(np.int64)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x, causal, padding):
        h = self.norm1(x)
        h, weights = self.attention(h, h, h, attn_mask=causal, key_padding_mask=padding)
        x = x + h
        return x + self.feed_forward(self.norm2(x)), weights


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(16, 4)
        self.head = nn.Linear(16, 2)

    def forward(self, x, causal, padding):
        h, weights = self.block(x, causal, padding)
        return self.head(h), weights


net = Net()
net.load_state_dict(
    {
        name: tn.from_numpy((0.3 * rng.standard_normal(tuple(p.shape))).astype(np.float32))
        for name, p in net.state_dict().items()
    }
)
optimizer = tn.optim.Adam(net.parameters(), lr=5e-3)
scaler = GradScaler("cpu", init_scale=2.0**18, growth_interval=6)
causal = tn.triu(tn.ones(6, 6), diagonal=1) > 0
losses, scales, looks = [], [], []
for step in range(24):
    x, target = tn.from_numpy(inputs[step % 3]), tn.from_numpy(targets[step % 3])
    padding = tn.from_numpy(np.arange(6) >= lengths[step % 3][:, None])
    optimizer.zero_grad()
    with autocast("cpu", dtype=tn.float16):
        logits, weights = net(x, causal, padding)
        kept = ~padding
        loss = F.cross_entropy(logits[kept], target[kept])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    scales.append(scaler.get_scale())
    looks.append(weights[:, -1, 0].float().mean().item())
print(json.dumps({"losses": losses, "scales": scales, "looks": looks}))
