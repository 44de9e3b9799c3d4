"""The experiment: networks, runs, and the loop that trains and measures them.

ARMS is all of it in one table; `training_step` is the loop a user writes.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import minamp
import minamp.nn.functional as F
from minamp import nn, optim, watch
from minamp.data import DataLoader

# ---------------------------------------------------------------------------------------------------------- the networks


def mlp():
    """784-128-128-10 with ReLU and He's initial weights."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    return model.apply(he_normal)


def he_normal(module):
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)


def deep_mlp():
    """Seven hidden layers of 192, all weights from N(0, 0.01²): AlexNet's initial values, small for a net this deep."""
    sizes = [784] + [192] * 7
    hidden = [m for a, b in zip(sizes, sizes[1:], strict=False) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(192, 10)).apply(small_normal)


def small_normal(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)


def cnn():
    """Two convolutions, two linear layers, torch's default initial weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def textbook_cross_entropy(scores, target):
    """exp, divide by the sum, logarithm: right on paper. F.cross_entropy subtracts the largest score first."""
    e = scores.exp()
    p = e / e.sum(1, keepdim=True)
    return -minamp.gather(p, 1, target.reshape(-1, 1)).log().mean()


# ----------------------------------------------------------------------------------------------------------- the experiment


@dataclass(frozen=True)
class Arm:
    """One training run. weights: the format that weights, data and so everything outside autocast is stored in."""

    name: str
    network: Callable
    optimizer: Callable
    loss: Callable = F.cross_entropy
    weights: np.dtype = minamp.float32
    autocast: np.dtype | None = None
    scaler: dict | None = None  # options of GradScaler
    decay: bool = False  # the learning rate falls linearly to 0
    post_mortem: bool = False  # look for the first op that turns finite values into inf or NaN
    count_lost: bool = False  # count the updates that change no weight


def sgd(lr, **options):
    return lambda params: optim.SGD(params, lr=lr, momentum=0.9, **options)


def adam(lr):
    return lambda params: optim.Adam(params, lr=lr)


half, bf16 = minamp.float16, minamp.bfloat16
ARMS = {
    1: [
        Arm("float32", mlp, sgd(0.05), textbook_cross_entropy),
        Arm("float16 everywhere", mlp, sgd(0.05), textbook_cross_entropy, weights=half, post_mortem=True),
        Arm("autocast", mlp, sgd(0.05), textbook_cross_entropy, autocast=half),
    ],
    2: [
        Arm("float32", mlp, sgd(1e-4), count_lost=True),
        Arm("float16 weights", mlp, sgd(1e-4), weights=half, count_lost=True),
        Arm("float16 + masters", mlp, sgd(1e-4, master_weights=True), weights=half, count_lost=True),
    ],
    3: [
        Arm("float32", deep_mlp, adam(1e-3)),
        Arm("autocast", deep_mlp, adam(1e-3), autocast=half),
        Arm("autocast + GradScaler", deep_mlp, adam(1e-3), autocast=half, scaler={}),
    ],
    4: [
        Arm("float32", cnn, adam(2e-3), decay=True),
        Arm("float16 recipe", cnn, adam(2e-3), decay=True, autocast=half, scaler={"growth_interval": 25}),
        Arm("bfloat16", cnn, adam(2e-3), decay=True, autocast=bf16),
    ],
}
TITLES = {1: "NaN collapse", 2: "Silent stall", 3: "Underflow", 4: "The full recipe"}
BATCH, EPOCH = 64, 62  # 62 full batches of 64 in the 4,000 training digits
STEPS = {1: 3 * EPOCH, 2: 7 * EPOCH, 3: 5 * EPOCH, 4: 4 * EPOCH}
QUICK = {1: EPOCH, 2: 3 * EPOCH, 3: 2 * EPOCH, 4: 2 * EPOCH}
PLATEAU = 2.2  # guessing among ten digits has a loss of log 10 = 2.303


@dataclass
class Run:
    """What `train` measured. Steps count from 1."""

    name: str
    losses: list = field(default_factory=list)
    nan_step: int | None = None
    first_bad_op: str | None = None  # the post-mortem in a line
    bad_op: str | None = None  # the op's name
    largest_input: float | None = None  # the value that the first bad op was given
    nan_gradients: float | None = None  # share of the weight gradients at the NaN step
    accuracy: float | None = None  # on the 1,000 test digits; None if the network answers NaN
    left_plateau: int | None = None  # first step with a loss below PLATEAU
    lost_updates: float | None = None  # share of the non-zero updates that changed no weight
    flushed: float | None = None  # share of the first non-zero weight gradients that are 0 at the last scale
    skips: list = field(default_factory=list)
    scales: list = field(default_factory=list)
    saved_bytes: int = 0
    seconds: float = 0.0
    step_ms: float = 0.0

    @property
    def score(self):
        return self.accuracy or 0.0


def training_step(arm, model, optimizer, scaler, x, y):
    """One step of mixed-precision training. Returns the loss and whether the weights were updated."""
    with minamp.autocast(dtype=arm.autocast or half, enabled=arm.autocast is not None):
        loss = arm.loss(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    updated = scaler.step(optimizer)  # None: a gradient was inf or NaN, the step was skipped
    scaler.update()
    return loss.item(), updated is not None


def train(arm, data, steps, seed=0, device="cpu", advance=lambda: None):
    """Train `arm` for `steps` batches of data (what digits() returns) and measure it; calls advance() after every step."""
    train_set, test_set = data
    minamp.manual_seed(seed)
    model = arm.network().to(device, arm.weights)
    optimizer = arm.optimizer(model.parameters())
    scaler = minamp.GradScaler(device, enabled=arm.scaler is not None, **(arm.scaler or {}))
    batches = endless(DataLoader(train_set, BATCH, shuffle=True, seed=seed, drop_last=True))
    run, times, lost, updates = Run(arm.name), [], 0, 0
    start = time.perf_counter()
    for step in range(1, steps + 1):
        x, y = next(batches)
        x, y = x.to(device, arm.weights), y.to(device)
        for group in optimizer.param_groups if arm.decay else ():
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - (step - 1) / steps)
        before = [numpy(w).copy() for w in optimizer.master_params()] if arm.count_lost else None
        tick = time.perf_counter()
        with contextlib.ExitStack() as stack:
            bad = stack.enter_context(watch.first_bad_op()) if arm.post_mortem and not run.nan_step else None
            kept = stack.enter_context(watch.saved_bytes()) if step == 1 else None
            loss, updated = training_step(arm, model, optimizer, scaler, x, y)
        times.append(time.perf_counter() - tick)
        run.losses.append(loss)
        run.scales.append(scaler.get_scale())
        if kept:
            run.saved_bytes = kept.total
        if not updated:
            run.skips.append(step)
        if before:  # master_params: where updates add up, the float32 masters or else the weights themselves
            for p, w, b in zip(model.parameters(), optimizer.master_params(), before, strict=True):
                moving = numpy(optimizer.state[p]["momentum_buffer"]) != 0
                updates, lost = updates + moving.sum(), lost + (moving & (numpy(w) == b)).sum()
        if run.left_plateau is None and loss < PLATEAU:
            run.left_plateau = step
        if run.nan_step is None and not np.isfinite(loss):
            run.nan_step, gradients = (
                step,
                np.concatenate([numpy(p.grad).ravel() for p in model.parameters()]),
            )
            run.nan_gradients = float(np.isnan(gradients).mean())
            if bad and bad.found:
                run.first_bad_op, run.bad_op, run.largest_input = str(bad), bad.found.op, bad.found.value
        advance()
    run.seconds, run.step_ms = time.perf_counter() - start, 1e3 * statistics.median(times)
    run.lost_updates = float(lost / updates) if updates else None
    run.accuracy = accuracy(arm, model, test_set, device)
    return run


def endless(loader):
    while True:
        yield from loader


def numpy(tensor):
    return tensor.detach().cpu().numpy()


def accuracy(arm, model, test_set, device):
    x, y = minamp.tensor(test_set.images).to(device, arm.weights), test_set.labels
    with minamp.no_grad(), minamp.autocast(dtype=arm.autocast or half, enabled=arm.autocast is not None):
        scores = numpy(model(x).float())
    return float((scores.argmax(1) == y).mean()) if np.isfinite(scores).all() else None


def first_gradients(arm, train_set, scale, seed=0, device="cpu"):
    """The gradients of the first batch, with the loss multiplied by `scale`: (histograms, all weight gradients)."""
    minamp.manual_seed(seed)
    model = arm.network().to(device, arm.weights)
    x, y = next(iter(DataLoader(train_set, BATCH, shuffle=True, seed=seed)))
    with minamp.autocast(dtype=arm.autocast or half, enabled=arm.autocast is not None):
        loss = arm.loss(model(x.to(device)), y.to(device))
    with watch.gradient_histograms(low=-56, high=20) as seen:
        (loss * scale).backward()
    return seen, np.concatenate([numpy(p.grad).ravel() for p in model.parameters()])
