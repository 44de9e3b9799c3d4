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
from minamp.ops.arrange import pad, pixel_shuffle, pixel_unshuffle
from minamp.ops.attention import scaled_dot_product_attention
from minamp.ops.contractions import bilinear
from minamp.ops.conv import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d
from minamp.ops.cross_entropy import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    nll_loss,
)
from minamp.ops.distance import pairwise_distance, pdist
from minamp.ops.fold import fold, unfold
from minamp.ops.gates import glu, hardsigmoid, hardswish, hardtanh, mish, relu6, selu
from minamp.ops.grid import affine_grid, grid_sample
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
from minamp.ops.normalize import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    log_softmax,
    rms_norm,
    softmax,
)
from minamp.ops.pool import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_max_pool2d,
    avg_pool1d,
    avg_pool2d,
    max_pool1d,
    max_pool2d,
)
from minamp.ops.shape import dropout, dropout1d, dropout2d
from minamp.ops.upsample import interpolate

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "affine_grid",
    "avg_pool1d",
    "avg_pool2d",
    "batch_norm",
    "bilinear",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cross_entropy",
    "dropout",
    "dropout1d",
    "dropout2d",
    "elu",
    "embedding",
    "fold",
    "gaussian_nll_loss",
    "gelu",
    "glu",
    "grid_sample",
    "group_norm",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "hinge_embedding_loss",
    "huber_loss",
    "instance_norm",
    "interpolate",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "logsigmoid",
    "margin_ranking_loss",
    "max_pool1d",
    "max_pool2d",
    "mish",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "nll_loss",
    "normalize",
    "one_hot",
    "pad",
    "pairwise_distance",
    "pdist",
    "pixel_shuffle",
    "pixel_unshuffle",
    "poisson_nll_loss",
    "prelu",
    "relu",
    "relu6",
    "rms_norm",
    "scaled_dot_product_attention",
    "selu",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax",
    "softplus",
    "tanh",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
    "unfold",
]
