"""The windows of images as columns, and columns added up to images. A value that lies in several windows is summed in float32."""

import math

import numpy as np

from minamp.arguments import check_floating
from minamp.backends.conv import conv_size
from minamp.op import composite
from minamp.ops.arrange import constant_pad_nd
from minamp.ops.conv import check_images, check_size, pair, reach
from minamp.ops.indexing import index, index_grad
from minamp.ops.shape import reshape


def _blocks(name, image, kernel_size, dilation, padding, stride):
    """How the windows over an image (H, W) lie: the kernel, their count (OH, OW), what they read once padded, the pads."""
    kernel, dilation = pair(name, "kernel_size", kernel_size, 1), pair(name, "dilation", dilation, 1)
    padding, stride = pair(name, "padding", padding, 0), pair(name, "stride", stride, 1)
    count = conv_size(image, kernel, stride, padding, dilation)
    rows, cols = (
        np.arange(k)[:, None] * d + np.arange(n) * s
        for k, d, n, s in zip(kernel, dilation, count, stride, strict=True)
    )
    reads = (..., rows[:, None, :, None], cols[None, :, None, :])  # (KH, KW, OH, OW)
    return kernel, count, reads, (padding[1], padding[1], padding[0], padding[0]), reach(dilation, kernel)


@composite
def unfold(input, kernel_size, dilation=1, padding=0, stride=1):
    """The windows of input (N, C, H, W) or (C, H, W) as columns (N, C * KH * KW, number of windows)."""
    check_images("unfold", input, 2)
    image = input.shape[-2:]
    kernel, count, reads, pads, span = _blocks("unfold", image, kernel_size, dilation, padding, stride)
    check_size("unfold", input, span, pads[2::-2], count, 2)
    columns = index(constant_pad_nd(input, pads), reads)
    rows = input.shape[-3] * math.prod(kernel)
    return reshape(columns, (*input.shape[:-3], rows, math.prod(count)))


@composite
def fold(input, output_size, kernel_size, dilation=1, padding=0, stride=1):
    """Columns (N, C * KH * KW, number of windows) added up to images (N, C, *output_size): the transpose of unfold."""
    check_floating("fold", input, NotImplementedError)
    image = pair("fold", "output_size", output_size, 1)
    kernel, count, reads, pads, _ = _blocks("fold", image, kernel_size, dilation, padding, stride)
    fits = math.prod(kernel), math.prod(count) if min(count) > 0 else 0
    if input.ndim not in (2, 3) or input.shape[-2] % fits[0] or input.shape[-1] != fits[1] or not fits[1]:
        raise RuntimeError(
            f"fold: input must be (N, C * {fits[0]}, {fits[1]}) for kernel_size {kernel} over images {image}, "
            f"got shape {input.shape}"
        )
    lead = (*input.shape[:-2], input.shape[-2] // fits[0])
    padded = (*lead, image[0] + 2 * pads[2], image[1] + 2 * pads[0])
    out = index_grad(reshape(input, (*lead, *kernel, *count)), reads, padded)
    return constant_pad_nd(out, tuple(-n for n in pads))
