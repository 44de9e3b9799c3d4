"""A small one-stage detector: model.py the network, boxes.py its boxes, loss.py what it learns from, metric.py its grade.

Everything is user code: it needs nothing of minamp that torch has not, and runs there with the imports changed.
"""

from minamp.detector.boxes import box_iou, decode, detect, generalized_iou, nms
from minamp.detector.loss import assign, class_bce, detection_loss
from minamp.detector.metric import average_precision, mean_average_precision
from minamp.detector.model import Detector
