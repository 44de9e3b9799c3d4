"""Training is interrupted after twelve steps, saved, and goes on in fresh objects: model, optimizer and scaler."""

import json

import numpy as np
import torch as tn
import torch.nn as nn
from torch import load, save
from torch.amp import GradScaler, autocast

data = np.random.default_rng(17).standard_normal((4, 16, 6)).astype(np.float32)
targets = np.cos(data[..., :2]).astype(np.float32)


def build(seed):
    rng = np.random.default_rng(seed)
    model = nn.Sequential(nn.Linear(6, 20), nn.Sigmoid(), nn.Linear(20, 2))
    with tn.no_grad():
        for p in model.parameters():
            p.copy_(tn.from_numpy((0.5 * rng.standard_normal(tuple(p.shape))).astype(np.float32)))
    optimizer = tn.optim.Adam(model.parameters(), lr=0.02)
    return model, optimizer, GradScaler("cpu", init_scale=2.0**18, growth_interval=5)


def train(model, optimizer, scaler, steps):
    losses, scales = [], []
    for step in steps:
        optimizer.zero_grad()
        with autocast("cpu", dtype=tn.float16):
            loss = nn.functional.smooth_l1_loss(
                model(tn.from_numpy(data[step % 4])), tn.from_numpy(targets[step % 4])
            )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


model, optimizer, scaler = build(18)
losses, scales = train(model, optimizer, scaler, range(12))
checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
save(checkpoint, "checkpoint.pt")
uninterrupted, _ = train(model, optimizer, scaler, range(12, 24))

model, optimizer, scaler = build(19)
checkpoint = load("checkpoint.pt")
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
scaler.load_state_dict(checkpoint["scaler"])
more = train(model, optimizer, scaler, range(12, 24))
assert more[0] == uninterrupted
print(json.dumps({"losses": losses + more[0], "scales": scales + more[1]}))
