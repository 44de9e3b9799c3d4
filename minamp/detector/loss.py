"""What the detector learns from: which cell answers for which box, and the three losses."""

import minamp
import minamp.nn.functional as F
from minamp.detector.boxes import area, cells_of, decode, generalized_iou
from minamp.detector.model import STRIDES

LARGE = 20.0  # pixels: a box with a longer side than this belongs to the coarse grid
BOX_WEIGHT = 5.0  # of the box loss against the two others, as in YOLOX


@minamp.no_grad()
def assign(grids, boxes, classes):
    """For every cell the row of the box that it answers for, and whether there is one: int64 (N, A), bool (N, A).

    boxes (N, K, 4), classes (N, K), -1 in unused rows. Cells are asked whose centre lies less than a stride from the box's in
    both directions, on the grid for the box's size: up to four; a cell asked by several answers for the smallest (after
    Tian et al., 2019, section 3.2).
    """
    boxes = boxes.float()
    cells, strides = cells_of(grids)
    points = ((cells + 0.5) * strides)[:, None]  # (A, 1, 2)
    centres = ((boxes[..., :2] + boxes[..., 2:]) / 2)[:, None]  # (N, 1, K, 2)
    near = ((points - centres).abs() < strides[:, None]).all(-1)  # (N, A, K)
    large = (boxes[..., 2:] - boxes[..., :2]).amax(-1) > LARGE  # (N, K)
    fits = large[:, None] == (strides > STRIDES[0])
    asked = near & fits & (classes >= 0)[:, None]
    size = minamp.where(asked, area(boxes)[:, None], 1e9)
    return size.argmin(-1), asked.any(-1)


def class_bce(logits, labels):
    """The sum over cells and classes of binary cross-entropies: every class is a yes or no. logits (P, C), labels (P,)."""
    target = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, target, reduction="sum")


def detection_loss(grids, boxes, classes, class_loss=class_bce):
    """The loss to train with, a scalar: 5 (1 - GIoU) + objectness + class loss, per cell that answers for a box.

    grids: what the Detector returns. boxes (N, K, 4), classes (N, K): as in Scenes. class_loss(logits (P, C), labels (P,)):
    summed over the P cells that answer for a box. ValueError for shapes that do not fit.
    """
    if boxes.ndim != 3 or boxes.shape[2] != 4 or classes.shape != boxes.shape[:2]:
        raise ValueError(
            f"detection_loss: boxes must be (N, K, 4) and classes (N, K), got {boxes.shape} and {classes.shape}"
        )
    predicted, objectness, logits = decode(grids)
    row, positive = assign(grids, boxes, classes)
    wanted = boxes.gather(1, row[..., None].expand(*row.shape, 4))[positive]
    labels = classes.gather(1, row)[positive]
    box = (1.0 - generalized_iou(predicted[positive], wanted)).sum()
    found = positive.to(objectness.dtype)
    obj = F.binary_cross_entropy_with_logits(objectness, found, reduction="sum")
    answering = positive.float().sum().clamp(min=1.0)
    return (BOX_WEIGHT * box + obj + class_loss(logits[positive], labels)) / answering
