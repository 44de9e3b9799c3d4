"""A classifier trained with autocast and a GradScaler: the loop as it stands in every introduction."""

import json

import numpy as np
from torch import float16, from_numpy, nn, no_grad, optim
from torch.amp import GradScaler, autocast

rng = np.random.default_rng(10)
labels = rng.integers(0, 3, 96)
points = (rng.standard_normal((3, 12))[labels] + 0.7 * rng.standard_normal((96, 12))).astype(np.float32)

device = "cpu"
model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 3)).to(device)
with no_grad():
    for p in model.parameters():
        p.copy_(from_numpy((0.3 * rng.standard_normal(tuple(p.shape))).astype(np.float32)))

criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = GradScaler(device, init_scale=2.0**20, growth_interval=8)
losses, scales = [], []
for epoch in range(8):
    for start in range(0, 96, 32):
        x = from_numpy(points[start : start + 32]).to(device)
        y = from_numpy(labels[start : start + 32]).to(device)
        optimizer.zero_grad(set_to_none=True)
        with autocast(device_type=device, dtype=float16):
            output = model(x)
            assert output.dtype == float16
            loss = criterion(output, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
print(json.dumps({"losses": losses, "scales": scales}))
