"""Three trainings of 50 steps in float16 under autocast, run alike by torch and by minamp: (losses, scales after every step).

Data and first weights come from NumPy seeds. On the CPU torch's own lists leave the losses' softmax in half only if it is called
by name; cross_entropy and mse_loss are float32 on both sides, so both run the same arithmetic up to the order of sums.
"""

import numpy as np


def tensor(tn, array):
    return tn.from_numpy(np.ascontiguousarray(array, np.float32))


def weights(tn, seed, *shapes):
    """Parameters with a standard deviation of 1 / sqrt(fan-in); vectors start at zero."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(s) / np.sqrt(np.prod(s[1:])) if len(s) > 1 else np.zeros(s) for s in shapes]
    return [tn.nn.Parameter(tensor(tn, a)) for a in arrays]


def blobs(seed, n, features, classes):
    """n points around `classes` centres, and which centre."""
    rng = np.random.default_rng(seed)
    centres, labels = rng.standard_normal((classes, features)) * 1.2, rng.integers(0, classes, n)
    return centres[labels] + rng.standard_normal((n, features)), labels


def mlp(tn):
    """A classifier: SGD with momentum. The scale starts at 2**15 and doubles every 10 good steps."""
    F = tn.nn.functional
    x, labels = blobs(0, 32 * 5, 16, 4)
    w1, b1, w2, b2 = parameters = weights(tn, 1, (32, 16), (32,), (4, 32), (4,))
    optimizer = tn.optim.SGD(parameters, lr=0.05, momentum=0.9)
    scaler = tn.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=10)
    losses, scales = [], []
    for step in range(50):
        rows = slice(step % 5 * 32, step % 5 * 32 + 32)
        with tn.autocast("cpu", dtype=tn.float16):
            hidden = F.relu(F.linear(tensor(tn, x[rows]), w1, b1))
            loss = F.cross_entropy(F.linear(hidden, w2, b2), tn.from_numpy(labels[rows]))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def cnn(tn):
    """Stripes, horizontal or vertical: Adam, gradients clipped at norm 1. The scale grows every 7 steps from 2**12."""
    F = tn.nn.functional
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, 64)
    wave = np.sin(np.arange(8) * 1.5)
    images = np.where(labels[:, None, None] == 0, wave[:, None], wave[None, :])
    images = (images + 0.5 * rng.standard_normal((64, 8, 8)))[:, None]
    w1, b1, w2, b2 = parameters = weights(tn, 3, (4, 1, 3, 3), (4,), (2, 4 * 16), (2,))
    optimizer = tn.optim.Adam(parameters, lr=0.01)
    scaler = tn.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=7)
    losses, scales = [], []
    for step in range(50):
        rows = slice(step % 4 * 16, step % 4 * 16 + 16)
        with tn.autocast("cpu", dtype=tn.float16):
            hidden = F.max_pool2d(F.relu(F.conv2d(tensor(tn, images[rows]), w1, b1, padding=1)), 2)
            loss = F.cross_entropy(F.linear(hidden.reshape(16, -1), w2, b2), tn.from_numpy(labels[rows]))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        tn.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def accumulation(tn):
    """Regression with two micro-batches a step. At 2**24 the first gradients overflow, so the first steps are skipped."""
    F = tn.nn.functional
    rng = np.random.default_rng(4)
    x = rng.standard_normal((64, 8))
    target = np.sin(x[:, :1] * 1.5) + 0.5 * x[:, 1:2]
    w1, b1, w2, b2 = parameters = weights(tn, 5, (24, 8), (24,), (1, 24), (1,))
    optimizer = tn.optim.SGD(parameters, lr=0.1, momentum=0.5)
    scaler = tn.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=6)
    losses, scales = [], []
    for step in range(50):
        optimizer.zero_grad()
        total = 0.0
        for half in range(2):
            rows = slice((2 * step + half) % 4 * 16, (2 * step + half) % 4 * 16 + 16)
            with tn.autocast("cpu", dtype=tn.float16):
                prediction = F.linear(F.gelu(F.linear(tensor(tn, x[rows]), w1, b1)), w2, b2)
                loss = F.mse_loss(prediction, tensor(tn, target[rows])) / 2
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
        scales.append(scaler.get_scale())
    return losses, scales


RUNS = {"mlp": mlp, "cnn": cnn, "accumulation": accumulation}
