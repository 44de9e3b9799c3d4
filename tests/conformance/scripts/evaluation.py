"""Training with batch norm and dropout layers, and after every epoch an evaluation inside no_grad and autocast."""

import json

import numpy as np
from torch import argmax, float16, from_numpy, nn, no_grad
from torch.amp import GradScaler, autocast
from torch.nn.functional import cross_entropy
from torch.optim import SGD

rng = np.random.default_rng(20)
labels = rng.integers(0, 4, 80)
images = (rng.standard_normal((4, 2, 6, 6))[labels] + rng.standard_normal((80, 2, 6, 6))).astype(np.float32)
training, held_out = slice(0, 60), slice(60, 80)

model = nn.Sequential(
    nn.Conv2d(2, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Dropout(0.0),
    nn.AvgPool2d(2),
    nn.Flatten(),
    nn.Linear(72, 4),
)
with no_grad():
    for layer in (model[0], model[6]):
        for p in layer.parameters():
            p.copy_(from_numpy((0.2 * rng.standard_normal(tuple(p.shape))).astype(np.float32)))

optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)
scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=7)
losses, scales, evaluations, hits = [], [], [], []
for epoch in range(6):
    model.train()
    for start in range(0, 60, 20):
        x, y = from_numpy(images[start : start + 20]), from_numpy(labels[start : start + 20])
        with autocast("cpu", dtype=float16):
            loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    model.eval()
    with no_grad(), autocast("cpu", dtype=float16):
        output = model(from_numpy(images[held_out]))
        assert not output.requires_grad
        evaluations.append(cross_entropy(output, from_numpy(labels[held_out])).item())
        hits.append((argmax(output, dim=1) == from_numpy(labels[held_out])).sum().item())
print(json.dumps({"losses": losses, "scales": scales, "evaluations": evaluations, "hits": hits}))
