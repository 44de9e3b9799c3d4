"""The other layers without weights: dropout, padding, resizing, shapes."""

from minamp.nn import functional as F
from minamp.nn.module import Module
from minamp.ops.shape import flatten, unflatten


class Identity(Module):
    """x itself; takes and ignores any arguments."""

    def __init__(self, *args, **kwargs):
        super().__init__()

    def forward(self, x):
        return x


class Flatten(Module):
    """Dimensions start_dim..end_dim as one."""

    def __init__(self, start_dim=1, end_dim=-1):
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x):
        return flatten(x, self.start_dim, self.end_dim)

    def extra_repr(self):
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Unflatten(Module):
    """Dimension `dim` as several of unflattened_size."""

    def __init__(self, dim, unflattened_size):
        super().__init__()
        if not isinstance(unflattened_size, tuple | list):
            raise TypeError(f"Unflatten: unflattened_size must be a tuple of ints, got {unflattened_size!r}")
        self.dim, self.unflattened_size = dim, unflattened_size

    def forward(self, x):
        return unflatten(x, self.dim, self.unflattened_size)

    def extra_repr(self):
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"


class _Dropout(Module):
    def __init__(self, p=0.5, inplace=False):
        if not 0 <= p <= 1:
            raise ValueError(f"{type(self).__name__}: p must lie in [0, 1], got {p}")
        super().__init__()
        self.p = p

    def extra_repr(self):
        return f"p={self.p}"


class Dropout(_Dropout):
    """In training, zero each value with probability p, scale the rest by 1/(1-p); else the identity.

    inplace is accepted as in torch, and x is left alone all the same.
    """

    def forward(self, x):
        return F.dropout(x, self.p, self.training)


class Dropout1d(_Dropout):
    """Dropout of whole channels of x (N, C, L) or (C, L)."""

    def forward(self, x):
        return F.dropout1d(x, self.p, self.training)


class Dropout2d(_Dropout):
    """Dropout of whole channels of x (N, C, H, W)."""

    def forward(self, x):
        return F.dropout2d(x, self.p, self.training)


class Upsample(Module):
    """x resized to `size` or by `scale_factor`; modes and shapes as F.interpolate."""

    def __init__(self, size=None, scale_factor=None, mode="nearest", align_corners=None):
        super().__init__()
        self.size, self.scale_factor, self.mode, self.align_corners = size, scale_factor, mode, align_corners

    def forward(self, x):
        return F.interpolate(x, self.size, self.scale_factor, self.mode, self.align_corners)

    def extra_repr(self):
        how = f"size={self.size}" if self.size is not None else f"scale_factor={self.scale_factor}"
        return f"{how}, mode={self.mode!r}"


class _Pad2d(Module):
    mode = ""

    def __init__(self, padding):
        super().__init__()
        self.padding = (padding,) * 4 if isinstance(padding, int) else tuple(padding)

    def forward(self, x):
        return F.pad(x, self.padding, self.mode)

    def extra_repr(self):
        return f"{self.padding}"


class ZeroPad2d(_Pad2d):
    """x with zeros around its last two dimensions; padding: (left, right, top, bottom), or one number for all."""

    mode = "constant"


class ReflectionPad2d(_Pad2d):
    """x with its mirror image around its last two dimensions; padding: (left, right, top, bottom), or one number."""

    mode = "reflect"


class ReplicationPad2d(_Pad2d):
    """x with its edge repeated around its last two dimensions; padding: (left, right, top, bottom), or one number."""

    mode = "replicate"


class PixelShuffle(Module):
    """upscale_factor squared channels as a block of pixels: (N, C * r * r, H, W) to (N, C, H * r, W * r)."""

    def __init__(self, upscale_factor):
        super().__init__()
        self.upscale_factor = upscale_factor

    def forward(self, x):
        return F.pixel_shuffle(x, self.upscale_factor)

    def extra_repr(self):
        return f"upscale_factor={self.upscale_factor}"


class PixelUnshuffle(Module):
    """PixelShuffle undone: (N, C, H * r, W * r) to (N, C * r * r, H, W)."""

    def __init__(self, downscale_factor):
        super().__init__()
        self.downscale_factor = downscale_factor

    def forward(self, x):
        return F.pixel_unshuffle(x, self.downscale_factor)

    def extra_repr(self):
        return f"downscale_factor={self.downscale_factor}"


class Unfold(Module):
    """The windows of images (N, C, H, W) as columns (N, C * KH * KW, number of windows)."""

    def __init__(self, kernel_size, dilation=1, padding=0, stride=1):
        super().__init__()
        self.kernel_size, self.dilation, self.padding, self.stride = kernel_size, dilation, padding, stride

    def forward(self, x):
        return F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)

    def extra_repr(self):
        return (
            f"kernel_size={self.kernel_size}, dilation={self.dilation}, padding={self.padding}, "
            f"stride={self.stride}"
        )


class Fold(Unfold):
    """Columns (N, C * KH * KW, number of windows) added up to images (N, C, *output_size)."""

    def __init__(self, output_size, kernel_size, dilation=1, padding=0, stride=1):
        super().__init__(kernel_size, dilation, padding, stride)
        self.output_size = output_size

    def forward(self, x):
        return F.fold(x, self.output_size, self.kernel_size, self.dilation, self.padding, self.stride)

    def extra_repr(self):
        return f"output_size={self.output_size}, {super().extra_repr()}"
