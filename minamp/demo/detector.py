"""The detector whose loss turned NaN: one network, one training loop, and what people change in it for half precision.

VARIANTS is the list; `training_step` is the loop that they change.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import minamp
from minamp import nn, optim, watch
from minamp.data import DataLoader
from minamp.demo.experiment import endless
from minamp.detector import Detector, class_bce, detect, detection_loss, mean_average_precision
from minamp.detector.model import Head
from minamp.scenes import Scenes, scenes

BATCH, WARMUP, LR, MAX_NORM = 16, 50, 0.1, 10.0
STEPS, QUICK = 1200, 20
TRAIN, TEST = 4000, 600  # scenes, composed of 4,000 and 1,000 other digits
HALF, BF16 = minamp.float16, minamp.bfloat16

# ------------------------------------------------------------------------------- what the variants change: the end of a step


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def recipe(model, optimizer, scaler):
    """The right order. Returns None if the step was skipped."""
    scaler.unscale_(optimizer)
    clip(model)
    updated = scaler.step(optimizer)
    scaler.update()
    return updated


def clip_first(model, optimizer, scaler):
    """Clips the gradients while they are still 65,536 times too large: all that is left of them is a tiny vector."""
    clip(model)
    updated = scaler.step(optimizer)  # unscales
    scaler.update()
    return updated


def step_first(model, optimizer, scaler):
    """Steps with scaled gradients and unscales afterwards. (scaler.step in this place would unscale by itself.)"""
    updated = optimizer.step()
    scaler.unscale_(optimizer)
    scaler.update()
    return updated


def forget_update(model, optimizer, scaler):
    """Ends without scaler.update()."""
    scaler.unscale_(optimizer)
    clip(model)
    return scaler.step(optimizer)


# ----------------------------------------------------------------------------------- what the variants change: head and loss


class FloatHead(Head):
    """The head outside autocast, on float32 features."""

    def forward(self, x):
        with minamp.autocast(enabled=False):
            return super().forward(x.float())


def softmax(logits):
    """exp, divided by the sum: the textbook's. minamp's own softmax subtracts the largest score first."""
    e = logits.exp()
    return e / e.sum(-1, keepdim=True)


def softmax_loss(logits, labels):
    """Minus the logarithm of the right class's probability, summed over cells."""
    return -minamp.gather(softmax(logits), 1, labels[:, None]).log().sum()


@dataclass(frozen=True)
class Variant:
    """One way to train the detector. weights: the format of weights, images and boxes."""

    name: str
    change: str  # in words, against the float16 recipe
    weights: np.dtype = minamp.float32
    autocast: np.dtype | None = HALF
    scaler: dict | None = field(default_factory=dict)  # options of GradScaler
    head: type = Head
    floats: bool = True  # the network's outputs reach the loss as float32
    loss_inside: bool = False  # the loss is computed inside the autocast region
    probabilities: Callable = minamp.sigmoid
    class_loss: Callable = class_bce
    finish: Callable = recipe
    post_mortem: bool = False  # look for the op that made the first loss NaN


VARIANTS = {
    v.name: v
    for v in (
        Variant("float32", "no half precision", autocast=None, scaler=None),
        Variant("float16", "the recipe: autocast, scaler, loss in float32"),
        Variant("bfloat16", "autocast in bfloat16, no scaler", autocast=BF16, scaler=None),
        Variant("half", ".half() on model and data", HALF, autocast=None, scaler=None, floats=False),
        Variant("autocast_all", "decoding and loss inside autocast too", floats=False, loss_inside=True),
        Variant("head_float", "head outside autocast, in float32", head=FloatHead),
        Variant("clip_before_unscale", "clipping comes before unscaling", finish=clip_first),
        Variant("step_before_unscale", "optimizer.step() comes before unscaling", finish=step_first),
        Variant("no_update", "scaler.update() is missing", finish=forget_update),
        Variant("init_scale_2_20", "the scale starts at 2^20", scaler={"init_scale": 2.0**20}),
        Variant("no_scaler", "autocast without a scaler", scaler=None),
        Variant(
            "softmax_half",
            "softmax by the textbook, on half scores",
            floats=False,
            probabilities=softmax,
            class_loss=softmax_loss,
            post_mortem=True,
        ),
    )
}
ENOUGH, NEAR = 0.80, 0.01  # mAP that float32 must reach, and how near the half recipes must come


@dataclass
class Run:
    """What `train` measured. Steps count from 1."""

    name: str
    losses: list = field(default_factory=list)
    nan_step: int | None = None  # the first step with a loss that is NaN or infinite
    nan_losses: int = 0  # how many there were
    first_bad_op: str | None = None  # the post-mortem in a line
    broken: bool = False  # a weight was not finite after the last step
    error: str | None = None  # the exception that ended the run
    skips: list = field(default_factory=list)
    scales: list = field(default_factory=list)
    mean_ap: float | None = None  # mAP@0.5 on the test scenes; None if the run broke
    example: list = field(default_factory=list)  # found in the scene of 128x128: x1 y1 x2 y2 score class
    saved_bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def load(quick=False):
    """Scenes to train with, to grade with, and one of 128x128 to look at; the last two of digits that are never trained."""
    train, test = (400, 50) if quick else (TRAIN, TEST)
    large = scenes(20, "test", 128)
    fullest = (large.classes >= 0).sum(1).argmax()
    return scenes(train), scenes(test, "test"), Scenes(*large[fullest : fullest + 1])


def training_step(variant, model, optimizer, scaler, x, boxes, classes):
    """One step of training. Returns the loss and whether the weights were updated."""
    region = minamp.autocast(dtype=variant.autocast or HALF, enabled=variant.autocast is not None)
    with region:
        grids = model(x)
    if variant.floats:
        grids = [grid.float() for grid in grids]
    with region if variant.loss_inside else contextlib.nullcontext():
        loss = detection_loss(grids, boxes, classes, variant.class_loss)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    updated = variant.finish(model, optimizer, scaler)
    return loss.item(), updated is not None


def train(variant, data, steps, seed=0, device="cpu", advance=lambda: None):
    """Train the detector for `steps` batches and measure it; data: what load() returns; calls advance() after every step.

    The run ends early when a weight is not finite, for nothing repairs that, and when the loop raises an exception.
    """
    train_set, test_set, one_scene = data
    minamp.manual_seed(seed)
    model = Detector(head=variant.head).to(device, variant.weights)
    optimizer = optim.SGD(model.parameters(), LR, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scaler = minamp.GradScaler(device, enabled=variant.scaler is not None, **(variant.scaler or {}))
    batches = endless(DataLoader(train_set, BATCH, shuffle=True, seed=seed, drop_last=True))
    run, start, cpu_start = Run(variant.name), time.perf_counter(), time.process_time()
    for step in range(1, steps + 1):
        x, boxes, classes = (t.to(device) for t in next(batches))
        x, boxes = x.to(variant.weights), boxes.to(variant.weights)
        for group in optimizer.param_groups:  # warm-up, then half a cosine down to 0
            group["lr"] = LR * min(1, step / WARMUP) * (1 + np.cos(np.pi * step / steps)) / 2
        with contextlib.ExitStack() as stack:
            look = variant.post_mortem and not run.nan_step
            bad = stack.enter_context(watch.first_bad_op()) if look else None
            kept = stack.enter_context(watch.saved_bytes()) if step == 1 else None
            try:
                loss, updated = training_step(variant, model, optimizer, scaler, x, boxes, classes)
            except RuntimeError as error:
                run.error = f"{type(error).__name__} at step {step}: {error}"
                break
        run.saved_bytes = kept.total if kept else run.saved_bytes
        run.losses.append(loss)
        run.scales.append(scaler.get_scale())
        if not updated:
            run.skips.append(step)
        if not np.isfinite(loss):
            run.first_bad_op = run.first_bad_op or (str(bad) if bad and bad.found else None)
            run.nan_step, run.nan_losses = run.nan_step or step, run.nan_losses + 1
            if not all(p.isfinite().all() for p in model.parameters()):
                run.broken = True
                break
        advance()
    run.seconds, run.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    if run.error is None and not run.broken:
        found = find(variant, model, test_set, device)
        run.mean_ap = mean_average_precision(found, test_set.boxes, test_set.classes)
        (boxes, scores, labels), *_ = find(variant, model, one_scene, device)
        run.example = minamp.cat([boxes, scores[:, None], labels[:, None].float()], 1).tolist()
    return run


def find(variant, model, data, device):
    """The detections in Scenes, in the variant's precision: what detect() returns for every scene, on the CPU."""
    model.eval()
    found = []
    for i in range(0, len(data), 50):
        x = minamp.tensor(data.images[i : i + 50]).to(device, variant.weights)
        with (
            minamp.no_grad(),
            minamp.autocast(dtype=variant.autocast or HALF, enabled=variant.autocast is not None),
        ):
            grids = [grid.cpu() for grid in model(x)]
        found += detect(grids, variant.probabilities)
    return found
