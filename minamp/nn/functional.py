"""The ops that networks are made of, under the names torch.nn.functional gives them."""

from minamp.ops.conv import adaptive_avg_pool2d, avg_pool2d, conv1d, conv2d, conv_transpose2d, max_pool2d
from minamp.ops.elementwise import gelu, relu, sigmoid, silu, tanh
from minamp.ops.loss import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
)
from minamp.ops.matmul import linear
from minamp.ops.normalize import batch_norm, group_norm, layer_norm, log_softmax, rms_norm, softmax
from minamp.ops.shape import dropout

__all__ = [
    "adaptive_avg_pool2d",
    "avg_pool2d",
    "batch_norm",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "conv1d",
    "conv2d",
    "conv_transpose2d",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "group_norm",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "linear",
    "log_softmax",
    "max_pool2d",
    "mse_loss",
    "nll_loss",
    "relu",
    "rms_norm",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "softmax",
    "tanh",
]


def embedding(input, weight):
    """Rows of `weight` (num, dim) at the integers in `input`; a row picked twice gets both gradients."""
    return weight[input]
