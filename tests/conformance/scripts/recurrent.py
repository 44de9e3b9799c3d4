"""Sequences through an LSTM, both ways, its states carried over, a GRU and an LSTM cell, in float32 under a scaler."""

import json

import numpy as np
import torch as tn
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler

rng = np.random.default_rng(14)
inputs = rng.standard_normal((3, 6, 7, 5)).astype(np.float32)
targets = (inputs[:, :, 0, 0] > inputs[:, :, -1, 1]).astype(np.int64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(16, 8, batch_first=True)
        self.cell, self.head = nn.LSTMCell(8, 8), nn.Linear(8, 2)

    def forward(self, x, hidden):
        self.lstm.flatten_parameters()
        h, hidden = self.lstm(x, hidden)
        h, last = self.gru(h)
        state = (last[0], tn.zeros(last.shape[1:]))
        for _ in range(3):
            state = self.cell(h[:, -1], state)
        return self.head(state[0]), hidden


net = Net()
net.load_state_dict(
    {
        name: tn.from_numpy((0.4 * rng.standard_normal(tuple(p.shape))).astype(np.float32))
        for name, p in net.state_dict().items()
    }
)
optimizer = tn.optim.Adam(net.parameters(), lr=1e-2)
scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=5)
losses, scales, norms, carried = [], [], [], []
hidden = None
for step in range(24):
    x, target = tn.from_numpy(inputs[step % 3]), tn.from_numpy(targets[step % 3])
    optimizer.zero_grad()
    logits, hidden = net(x, hidden)
    hidden = tuple(h.detach() for h in hidden)
    loss = F.cross_entropy(logits, target)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    scales.append(scaler.get_scale())
    norms.append(norm.item())
    carried.append(hidden[1].abs().mean().item())
print(json.dumps({"losses": losses, "scales": scales, "norms": norms, "carried": carried}))
