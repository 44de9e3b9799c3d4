"""The layers without weights: activations, pooling, dropout, shapes."""

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


class ReLU(Module):
    """max(x, 0); inplace is accepted as in torch, and x is left alone all the same."""

    def __init__(self, inplace=False):
        super().__init__()

    def forward(self, x):
        return F.relu(x)


class GELU(Module):
    """x times the normal distribution function at x; approximate: 'none' or 'tanh'."""

    def __init__(self, approximate="none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, x):
        return F.gelu(x, approximate=self.approximate)

    def extra_repr(self):
        return f"approximate={self.approximate!r}"


class SiLU(Module):
    """x * sigmoid(x); inplace is accepted as in torch, and x is left alone all the same."""

    def __init__(self, inplace=False):
        super().__init__()

    def forward(self, x):
        return F.silu(x)


class LeakyReLU(Module):
    """x where positive, negative_slope * x elsewhere."""

    def __init__(self, negative_slope=0.01, inplace=False):
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x):
        return F.leaky_relu(x, self.negative_slope)

    def extra_repr(self):
        return f"negative_slope={self.negative_slope}"


class ELU(Module):
    """x where positive, alpha * (e**x - 1) elsewhere."""

    def __init__(self, alpha=1.0, inplace=False):
        super().__init__()
        self.alpha = alpha

    def forward(self, x):
        return F.elu(x, self.alpha)

    def extra_repr(self):
        return f"alpha={self.alpha}"


class Softplus(Module):
    """log(1 + e**(beta x)) / beta, x itself where beta x > threshold."""

    def __init__(self, beta=1.0, threshold=20.0):
        super().__init__()
        self.beta, self.threshold = beta, threshold

    def forward(self, x):
        return F.softplus(x, self.beta, self.threshold)

    def extra_repr(self):
        return f"beta={self.beta}, threshold={self.threshold}"


class LogSigmoid(Module):
    """log(sigmoid(x))."""

    def forward(self, x):
        return F.logsigmoid(x)


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


class Sigmoid(Module):
    """1 / (1 + e**-x)."""

    def forward(self, x):
        return F.sigmoid(x)


class Tanh(Module):
    """Hyperbolic tangent."""

    def forward(self, x):
        return F.tanh(x)


class Softmax(Module):
    """e**x / sum of e**x along `dim`."""

    def __init__(self, dim=None):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return F.softmax(x, dim=self.dim)

    def extra_repr(self):
        return f"dim={self.dim}"


class LogSoftmax(Softmax):
    """log of the softmax along `dim`, without its overflow."""

    def forward(self, x):
        return F.log_softmax(x, dim=self.dim)


class _MaxPool(Module):
    """The largest value of each window; stride defaults to kernel_size."""

    def __init__(self, kernel_size, stride=None, padding=0, dilation=1, *, ceil_mode=False):
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.dilation, self.ceil_mode = padding, dilation, ceil_mode

    def _settings(self):
        return self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode

    def extra_repr(self):
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, "
            f"dilation={self.dilation}, ceil_mode={self.ceil_mode}"
        )


class MaxPool1d(_MaxPool):
    """The largest value of each window of x (N, C, L); stride defaults to kernel_size."""

    def forward(self, x):
        return F.max_pool1d(x, *self._settings())


class MaxPool2d(_MaxPool):
    """The largest value of each window of x (N, C, H, W); stride defaults to kernel_size."""

    def forward(self, x):
        return F.max_pool2d(x, *self._settings())


class _AvgPool(Module):
    """The mean of each window, padded zeros included unless count_include_pad=False."""

    def __init__(self, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
        super().__init__()
        self.kernel_size, self.stride = kernel_size, kernel_size if stride is None else stride
        self.padding, self.ceil_mode, self.count_include_pad = padding, ceil_mode, count_include_pad

    def _settings(self):
        return self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad

    def extra_repr(self):
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class AvgPool1d(_AvgPool):
    """The mean of each window of x (N, C, L), padded zeros included unless count_include_pad=False."""

    def __init__(self, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
        sizes = (v if v is None or isinstance(v, tuple) else (v,) for v in (kernel_size, stride, padding))
        super().__init__(*sizes, ceil_mode, count_include_pad)

    def forward(self, x):
        return F.avg_pool1d(x, *self._settings())


class AvgPool2d(_AvgPool):
    """The mean of each window of x (N, C, H, W), padded zeros included unless count_include_pad=False."""

    def forward(self, x):
        return F.avg_pool2d(x, *self._settings())


class _AdaptivePool(Module):
    def __init__(self, output_size):
        super().__init__()
        self.output_size = output_size

    def extra_repr(self):
        return f"output_size={self.output_size}"


class AdaptiveAvgPool1d(_AdaptivePool):
    """The mean of each of output_size equal parts of x (N, C, L), whatever its length."""

    def forward(self, x):
        return F.adaptive_avg_pool1d(x, self.output_size)


class AdaptiveAvgPool2d(_AdaptivePool):
    """The mean of each of output_size equal parts of x (N, C, H, W), whatever its size."""

    def forward(self, x):
        return F.adaptive_avg_pool2d(x, self.output_size)


class AdaptiveMaxPool2d(_AdaptivePool):
    """The largest value of each of output_size equal parts of x (N, C, H, W), whatever its size."""

    def forward(self, x):
        return F.adaptive_max_pool2d(x, self.output_size)


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
