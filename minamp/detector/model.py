"""The network: convolution blocks, two scales, one head."""

import math

import minamp
from minamp import nn

STRIDES = (4, 8)  # pixels between neighbouring cells of the two grids


class ConvBlock(nn.Module):
    """3x3 convolution, BatchNorm, SiLU."""

    def __init__(self, in_channels, out_channels, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Head(nn.Module):
    """Per cell of a grid 4 numbers of a box, the objectness and the scores of the classes, as channels."""

    def __init__(self, channels, classes):
        super().__init__()
        self.block = ConvBlock(channels, channels)
        self.out = nn.Conv2d(channels, 5 + classes, 1)
        # all probabilities start at 1 %, for nearly all cells are empty (Lin et al., 2017, section 4.1)
        with minamp.no_grad():
            self.out.bias.zero_()
            self.out.bias[4:] = -math.log(99)

    def forward(self, x):
        return self.out(self.block(x))


class Detector(nn.Module):
    """Images (N, 1, H, W), H and W multiples of 8 -> grids (N, 5 + classes, H/4, W/4) and (..., H/8, W/8).

    Channels of a grid: 4 for the box (boxes.decode), 1 objectness logit, the logits of the classes. Built after YOLOX
    (Ge et al., 2021): no anchors, and coarse features come back to the fine grid. ValueError for images of another shape.
    """

    def __init__(self, widths=(16, 32, 64), classes=10, head=Head):
        super().__init__()
        a, b, c = widths
        self.fine = nn.Sequential(ConvBlock(1, a, stride=2), ConvBlock(a, b, stride=2), ConvBlock(b, b))
        self.coarse = nn.Sequential(ConvBlock(b, c, stride=2), ConvBlock(c, c))
        self.up = nn.Upsample(scale_factor=2)
        self.merge = ConvBlock(b + c, b)
        self.heads = nn.ModuleList([head(b, classes), head(c, classes)])

    def forward(self, x):
        if x.ndim != 4 or x.shape[2] % STRIDES[1] or x.shape[3] % STRIDES[1]:
            raise ValueError(
                f"Detector: images must be (N, 1, H, W) with H and W multiples of {STRIDES[1]}, got {x.shape}"
            )
        fine = self.fine(x)
        coarse = self.coarse(fine)
        fine = self.merge(minamp.cat([fine, self.up(coarse)], 1))
        return [head(grid) for head, grid in zip(self.heads, (fine, coarse), strict=True)]
