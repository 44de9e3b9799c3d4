"""Gradients of four micro-batches are added up at one scale before each step."""

import json

import numpy as np
import torch as tn
from torch import nn
from torch.amp import GradScaler, autocast
from torch.optim import SGD

ACCUMULATE = 4
rng = np.random.default_rng(12)
images = rng.standard_normal((48, 1, 6, 6)).astype(np.float32)
labels = (images[:, 0, :3].sum((1, 2)) > images[:, 0, 3:].sum((1, 2))).astype(np.int64)

model = nn.Sequential(
    nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 2)
)
with tn.no_grad():
    for p in model.parameters():
        p.copy_(tn.from_numpy((0.25 * rng.standard_normal(tuple(p.shape))).astype(np.float32)))

loss_fn, optimizer = nn.CrossEntropyLoss(), SGD(model.parameters(), lr=0.2)
scaler = GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
losses, scales = [], []
for epoch in range(5):
    for i in range(12):
        rows = slice(4 * i, 4 * i + 4)
        with autocast("cpu", dtype=tn.float16):
            loss = loss_fn(model(tn.tensor(images[rows])), tn.tensor(labels[rows]))
            loss = loss / ACCUMULATE
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if (i + 1) % ACCUMULATE == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
print(json.dumps({"losses": losses, "scales": scales}))
