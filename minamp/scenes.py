"""Scenes: several real digits on one canvas, with the box and the class of each; data for a detector."""

import numpy as np

import minamp.nn.functional as F
from minamp.data import digits
from minamp.tensor import Tensor
from minamp.utils.data import TensorDataset

MOST = 6  # digits on one scene
SIDES = (13, 30)  # pixels of a digit's longer side, at any size of the canvas
INK = 0.2  # a pixel brighter than this belongs to the digit


class Scenes(TensorDataset):
    """images float32 (N, 1, size, size); boxes float32 (N, 6, 4), x1 y1 x2 y2 in pixels; classes int64 (N, 6).

    Rows beyond a scene's digits hold the class -1 and a box of zeros, so that scenes go through a DataLoader in batches.
    """

    images = property(lambda self: self.tensors[0].numpy())
    boxes = property(lambda self: self.tensors[1].numpy())
    classes = property(lambda self: self.tensors[2].numpy())


def scenes(n, split="train", size=64, *, seed=0, noise=0.1, overlap=0.2):
    """n scenes of 1 to 6 digits of the split 'train' or 'test', which share no digit; the same for the same arguments.

    size: 64 or 128, the canvas in pixels. noise: standard deviation added to ink that lies between 0 and 1. overlap: the
    largest share of a box that another may cover. A digit that finds no place in 20 throws is left out. ValueError for
    arguments out of range.
    """
    if n != int(n) or n < 1:
        raise ValueError(f"scenes: n must be a whole number of at least 1, got {n!r}")
    if split not in ("train", "test"):
        raise ValueError(f"scenes: split must be 'train' or 'test', got {split!r}")
    if size not in (64, 128):
        raise ValueError(f"scenes: size must be 64 or 128 pixels, got {size!r}")
    if noise < 0:
        raise ValueError(f"scenes: noise must be at least 0, got {noise!r}")
    if not 0 <= overlap <= 1:
        raise ValueError(f"scenes: overlap is a share of a box and must lie in [0, 1], got {overlap!r}")
    source = digits(split, normalize=False)
    rng = np.random.default_rng([seed, size, split == "test"])
    images = np.zeros((int(n), 1, size, size), np.float32)
    boxes = np.zeros((int(n), MOST, 4), np.float32)
    classes = np.full((int(n), MOST), -1, np.int64)
    for image, box, label in zip(images[:, 0], boxes, classes, strict=True):
        _compose(rng, source, image, box, label, overlap)
    images += rng.standard_normal(images.shape, np.float32) * np.float32(noise)
    return Scenes(Tensor(images), Tensor(boxes), Tensor(classes))


def _compose(rng, source, image, boxes, classes, overlap):
    """Place 1 to 6 digits on `image` (size, size), and note them in boxes (6, 4) and classes (6,); all three in place."""
    placed = 0
    for _ in range(rng.integers(1, MOST + 1)):
        i = rng.integers(len(source))
        ink = _sized(_trimmed(source.images[i, 0]), rng.uniform(*SIDES)) * rng.uniform(0.6, 1.0)
        (h, w), size = ink.shape, len(image)
        for _ in range(20):
            y, x = rng.integers(0, size - h + 1), rng.integers(0, size - w + 1)
            box = np.array([x, y, x + w, y + h], np.float32)
            if _most_overlap(box, boxes[:placed]) <= overlap:
                np.maximum(image[y : y + h, x : x + w], ink, out=image[y : y + h, x : x + w])
                boxes[placed], classes[placed] = box, source.labels[i]
                placed += 1
                break


def _trimmed(digit):
    """The part of a digit's image that holds its ink."""
    rows, columns = (np.flatnonzero((digit > INK).any(axis)) for axis in (1, 0))
    return digit[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _sized(ink, side):
    """Resized so that the longer side has `side` pixels and the shorter at least 4."""
    factor = side / max(ink.shape)
    h, w = (max(4, round(n * factor)) for n in ink.shape)
    return F.interpolate(Tensor(ink[None, None]), size=(h, w), mode="bilinear").numpy()[0, 0]


def _most_overlap(box, others):
    """The largest share of the smaller box that one box has in common with any of others (k, 4); 0 with none."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    both = np.maximum(high - low, 0).prod(1)
    smaller = np.minimum((box[2:] - box[:2]).prod(), (others[:, 2:] - others[:, :2]).prod(1))
    return float((both / smaller).max(initial=0.0))
