"""The ops that networks are made of, under the names torch.nn.functional gives them."""

from minamp.ops.activations import (
    elu,
    gelu,
    leaky_relu,
    logsigmoid,
    prelu,
    relu,
    sigmoid,
    silu,
    softplus,
    tanh,
)
from minamp.ops.arrange import pad
from minamp.ops.attention import scaled_dot_product_attention
from minamp.ops.conv import conv1d, conv2d, conv_transpose2d
from minamp.ops.cross_entropy import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    nll_loss,
)
from minamp.ops.distance import pairwise_distance, pdist
from minamp.ops.indexing import embedding, one_hot
from minamp.ops.likelihood import gaussian_nll_loss, poisson_nll_loss
from minamp.ops.loss import huber_loss, kl_div, l1_loss, mse_loss, smooth_l1_loss
from minamp.ops.margin_loss import (
    cosine_embedding_loss,
    hinge_embedding_loss,
    margin_ranking_loss,
    multi_margin_loss,
    multilabel_margin_loss,
    soft_margin_loss,
    triplet_margin_loss,
    triplet_margin_with_distance_loss,
)
from minamp.ops.matmul import linear
from minamp.ops.norm import cosine_similarity, normalize
from minamp.ops.normalize import batch_norm, group_norm, layer_norm, log_softmax, rms_norm, softmax
from minamp.ops.pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from minamp.ops.shape import dropout
from minamp.ops.upsample import interpolate

__all__ = [
    "adaptive_avg_pool2d",
    "avg_pool2d",
    "batch_norm",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "conv1d",
    "conv2d",
    "conv_transpose2d",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy",
    "dropout",
    "elu",
    "embedding",
    "gaussian_nll_loss",
    "gelu",
    "group_norm",
    "hinge_embedding_loss",
    "huber_loss",
    "interpolate",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "logsigmoid",
    "margin_ranking_loss",
    "max_pool2d",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "nll_loss",
    "normalize",
    "one_hot",
    "pad",
    "pairwise_distance",
    "pdist",
    "poisson_nll_loss",
    "prelu",
    "relu",
    "rms_norm",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax",
    "softplus",
    "tanh",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
]
