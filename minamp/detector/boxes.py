"""Boxes: from the network's numbers to boxes, how much two of them overlap, and which ones to keep."""

import minamp
from minamp.detector.model import STRIDES


def decode(grids):
    """The detector's grids -> boxes (N, A, 4), objectness logits (N, A), class logits (N, A, classes); A cells of both grids.

    The cell in column i of the grid of stride s has a box with the centre (i + x) s and the width exp(w) s, YOLOX's reading
    (Ge et al., 2021). Boxes are x1 y1 x2 y2 in pixels; dtypes follow from the grids' and from autocast.
    """
    p = minamp.cat([grid.flatten(2) for grid in grids], 2).transpose(1, 2)  # (N, A, channels)
    cells, strides = (t.to(p.dtype) for t in cells_of(grids))
    centre, size = (p[..., 0:2] + cells) * strides, p[..., 2:4].exp() * strides
    return minamp.cat([centre - size / 2, centre + size / 2], -1), p[..., 4], p[..., 5:]


def cells_of(grids):
    """Column and row of every cell of the grids (A, 2), and its stride (A, 1); float32, exact."""
    cells, strides = [], []
    for grid, stride in zip(grids, STRIDES, strict=True):
        h, w = grid.shape[2:]
        rows, columns = (minamp.arange(n, dtype=minamp.float32, device=grid.device) for n in (h, w))
        pair = [columns.expand(h, w), rows.reshape(h, 1).expand(h, w)]
        cells.append(minamp.stack(pair, -1).reshape(h * w, 2))
        strides.append(minamp.full((h * w, 1), float(stride), device=grid.device))
    return minamp.cat(cells), minamp.cat(strides)


def area(boxes):
    """Width times height of boxes (..., 4)."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def _overlap(a, b):
    """Areas of the intersection and of the union of boxes (..., 4) that broadcast."""
    size = minamp.minimum(a[..., 2:], b[..., 2:]) - minamp.maximum(a[..., :2], b[..., :2])
    size = size.clamp(min=0.0)
    both = size[..., 0] * size[..., 1]
    return both, area(a) + area(b) - both


def box_iou(a, b):
    """Intersection over union of every box of a (n, 4) with every box of b (k, 4): (n, k), as torchvision.ops.box_iou."""
    both, either = _overlap(a[:, None], b[None])
    return both / either


def generalized_iou(a, b, eps=1e-7):
    """IoU minus the share of the hull that neither box covers: 1 for equal boxes, towards -1 for distant ones.

    a, b (..., 4), box by box. Unlike IoU it has a gradient where boxes do not touch (Rezatofighi et al., 2019).
    """
    both, either = _overlap(a, b)
    hull = minamp.maximum(a[..., 2:], b[..., 2:]) - minamp.minimum(a[..., :2], b[..., :2])
    hull = hull[..., 0] * hull[..., 1]
    return both / (either + eps) - (hull - either) / (hull + eps)


def nms(boxes, scores, iou_threshold):
    """Non-maximum suppression: positions of the boxes to keep, best first, as torchvision.ops.nms.

    boxes (n, 4), scores (n,). A box goes if its IoU with a better one that stays is above the threshold.
    ValueError for shapes that do not fit.
    """
    if boxes.ndim != 2 or boxes.shape[1] != 4 or scores.shape != boxes.shape[:1]:
        raise ValueError(f"nms: give boxes (n, 4) and scores (n,), got {boxes.shape} and {scores.shape}")
    order = scores.argsort(descending=True).tolist()
    near = (box_iou(boxes, boxes) > iou_threshold).tolist()
    kept = []
    for i in order:
        if not any(near[i][j] for j in kept):
            kept.append(i)
    return minamp.tensor(kept, minamp.int64, device=boxes.device)


def detect(grids, probabilities=minamp.sigmoid, score_threshold=0.05, iou_threshold=0.5, most=100):
    """The detections in each image: a list of (boxes (k, 4), scores (k,), classes (k,)), best first, k at most `most`.

    Per cell its best class; score = objectness times the class's probability, which `probabilities` makes of the class logits.
    A box competes in nms with its own class only. Computed in float32. A network that answers NaN detects nothing.
    """
    found = []
    boxes, objectness, classes = decode([grid.detach().float() for grid in grids])
    scores, labels = (objectness.sigmoid()[..., None] * probabilities(classes)).max(-1)
    for box, score, label in zip(boxes, scores, labels, strict=True):
        sure = score > score_threshold  # False for NaN
        box, score, label = box[sure], score[sure], label[sure]
        # boxes of different classes are moved out of each other's reach
        far = label.float()[:, None] * 1e4
        kept = nms(box + far, score, iou_threshold)[:most]
        found.append((box[kept], score[kept], label[kept]))
    return found
