"""Mean average precision: the grade of a detector."""

import numpy as np

from minamp.detector.boxes import box_iou
from minamp.tensor import Tensor


def mean_average_precision(found, boxes, classes, iou_threshold=0.5):
    """Mean over the classes that occur of the area under the precision-recall curve (Everingham et al., 2010, section 4.2).

    found: per image (boxes, scores, classes), as detect() gives them. boxes (N, K, 4), classes (N, K): the truth, -1 in unused
    rows. A detection is right if it overlaps a box of its class by at least iou_threshold that no surer one has claimed; it
    tries the box it overlaps most. ValueError for another number of images, nan if there is no box at all.
    """
    boxes, classes = np.asarray(boxes), np.asarray(classes)
    if len(found) != len(boxes):
        raise ValueError(
            f"mean_average_precision: {len(found)} images were detected in, the truth has {len(boxes)}"
        )
    found = [tuple(np.asarray(part) for part in image) for image in found]
    grades = []
    for c in np.unique(classes[classes >= 0]):
        right, scores = [], []
        for (box, score, label), true_box, true_class in zip(found, boxes, classes, strict=True):
            mine = label == c
            scores.append(score[mine])
            right.append(_right(box[mine], score[mine], true_box[true_class == c], iou_threshold))
        order = np.argsort(-np.concatenate(scores), kind="stable")
        grades.append(average_precision(np.concatenate(right)[order], int((classes == c).sum())))
    return float(np.mean(grades)) if grades else float("nan")


def _right(boxes, scores, true_boxes, iou_threshold):
    """Which of an image's detections of one class are right: bool (k,)."""
    right = np.zeros(len(boxes), bool)
    if not len(boxes) or not len(true_boxes):
        return right
    iou = box_iou(Tensor(boxes), Tensor(true_boxes)).numpy()
    claimed = np.zeros(len(true_boxes), bool)
    for i in np.argsort(-scores, kind="stable"):
        best = iou[i].argmax()
        right[i] = iou[i, best] >= iou_threshold and not claimed[best]
        claimed[best] |= right[i]
    return right


def average_precision(right, total):
    """The area under the precision-recall curve. right: bool (k,), detections from the surest on; total: boxes there are.

    At every recall counts the best precision at that recall or a higher one.
    """
    hits = np.cumsum(right)
    precision = hits / np.arange(1, len(hits) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    return float(best[right].sum() / total)  # every hit moves the recall on by 1 / total
