"""Pooling layers: the largest value or the mean of each window, or of each of some equal parts."""

from minamp.nn import functional as F
from minamp.nn.module import Module


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
