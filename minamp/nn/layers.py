"""The layers with weights: their parameters and initial values; the computing is done in nn.functional."""

import math

from minamp.create import empty
from minamp.formats import float32
from minamp.nn import functional as F
from minamp.nn import init
from minamp.nn.module import Module, Parameter
from minamp.ops.indexing import padding_row
from minamp.record import no_grad


def _tuple(value, dims):
    return tuple(value) if isinstance(value, tuple | list) else (value,) * dims


def _check_groups(name, in_channels, out_channels, groups):
    if groups < 1 or in_channels % groups or out_channels % groups:
        raise ValueError(
            f"{name}: groups={groups} must divide in_channels={in_channels} and out_channels={out_channels}"
        )


def new_parameter(shape, make=empty, *, dtype, device):
    """A Parameter of that shape, float32 by default, as `make` (empty, zeros, ones) fills it."""
    return Parameter(make(shape, dtype=dtype or float32, device=device))


class _Weighted(Module):
    """A weight of some shape and, if wanted, a bias for each of the outputs."""

    def _make(self, shape, outputs, bias, device, dtype):
        self.weight = new_parameter(shape, dtype=dtype, device=device)
        made = new_parameter((outputs,), dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", made)
        self.reset_parameters()

    def reset_parameters(self):
        """Draw the initial values anew: torch's, uniform within 1/sqrt(fan_in)."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # gain sqrt(2/6), times sqrt(3): exactly that
        if self.bias is not None:
            fan_in = init.fans(self.weight)[0]
            bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
            init.uniform_(self.bias, -bound, bound)


class Linear(_Weighted):
    """x @ weight.T + bias. weight (out_features, in_features), bias (out_features,)."""

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._make((out_features, in_features), out_features, bias, device, dtype)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self):
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


class Bilinear(_Weighted):
    """x1 @ weight[o] @ x2 + bias[o]. weight (out_features, in1_features, in2_features), bias (out_features,)."""

    def __init__(self, in1_features, in2_features, out_features, bias=True, device=None, dtype=None):
        super().__init__()
        self.in1_features, self.in2_features, self.out_features = in1_features, in2_features, out_features
        self._make((out_features, in1_features, in2_features), out_features, bias, device, dtype)

    def reset_parameters(self):
        """Draw the initial values anew: uniform within 1/sqrt(in1_features)."""
        bound = 1 / math.sqrt(self.in1_features)
        for p in self.parameters():
            init.uniform_(p, -bound, bound)

    def forward(self, x1, x2):
        return F.bilinear(x1, x2, self.weight, self.bias)

    def extra_repr(self):
        return (
            f"in1_features={self.in1_features}, in2_features={self.in2_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


class _Conv(_Weighted):
    dims, transposed = 2, False

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        dilation=1,
        groups=1,
        bias=True,
        *,
        device=None,
        dtype=None,
    ):
        _check_groups(type(self).__name__, in_channels, out_channels, groups)
        super().__init__()
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride = _tuple(kernel_size, self.dims), _tuple(stride, self.dims)
        self.padding = padding if isinstance(padding, str) else _tuple(padding, self.dims)
        self.dilation = _tuple(dilation, self.dims)
        first, second = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        self._make((first, second // groups, *self.kernel_size), out_channels, bias, device, dtype)

    def extra_repr(self):
        text = (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        )
        if isinstance(self.padding, str) or any(self.padding):
            text += f", padding={self.padding!r}"
        for name, idle in (("dilation", 1), ("output_padding", 0), ("groups", 1)):
            value = getattr(self, name, idle)
            if set(_tuple(value, 1)) != {idle}:
                text += f", {name}={value}"
        return text + ("" if self.bias is not None else ", bias=False")


class Conv1d(_Conv):
    """1-D convolution of x (N, in, L). weight (out, in / groups, *kernel_size), bias (out,)."""

    dims = 1

    def forward(self, x):
        return F.conv1d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Conv2d(_Conv):
    """2-D convolution of x (N, in, H, W). weight (out, in / groups, *kernel_size), bias (out,)."""

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Conv3d(_Conv):
    """3-D convolution of x (N, in, D, H, W). weight (out, in / groups, *kernel_size), bias (out,)."""

    dims = 3

    def forward(self, x):
        return F.conv3d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class _ConvTranspose(_Conv):
    transposed = True

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        output_padding=0,
        groups=1,
        bias=True,
        dilation=1,
        *,
        device=None,
        dtype=None,
    ):
        sizes = in_channels, out_channels, kernel_size
        super().__init__(*sizes, stride, padding, dilation, groups, bias, device=device, dtype=dtype)
        self.output_padding = _tuple(output_padding, self.dims)

    def _how(self):
        return self.stride, self.padding, self.output_padding, self.groups, self.dilation


class ConvTranspose1d(_ConvTranspose):
    """Transposed 1-D convolution of x (N, in, L). weight (in, out / groups, *kernel_size), bias (out,)."""

    dims = 1

    def forward(self, x):
        return F.conv_transpose1d(x, self.weight, self.bias, *self._how())


class ConvTranspose2d(_ConvTranspose):
    """Transposed 2-D convolution of x (N, in, H, W). weight (in, out / groups, *kernel_size), bias (out,)."""

    def forward(self, x):
        return F.conv_transpose2d(x, self.weight, self.bias, *self._how())


class Embedding(Module):
    """Rows of weight (num_embeddings, embedding_dim), picked by integers; drawn from N(0, 1).

    padding_idx: a row that starts as zeros and gets no gradient.
    """

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, *, device=None, dtype=None):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_row("Embedding", padding_idx, num_embeddings)
        self.weight = new_parameter((num_embeddings, embedding_dim), dtype=dtype, device=device)
        self.reset_parameters()

    @no_grad()
    def reset_parameters(self):
        """Draw the initial values anew."""
        init.normal_(self.weight)
        if self.padding_idx is not None:
            self.weight[self.padding_idx] = 0.0

    def forward(self, index):
        return F.embedding(index, self.weight, self.padding_idx)

    def extra_repr(self):
        return f"{self.num_embeddings}, {self.embedding_dim}"


class PReLU(Module):
    """x where positive, weight * x elsewhere, the weight being learned: one, or one per channel (He et al., 2015)."""

    def __init__(self, num_parameters=1, init=0.25, device=None, dtype=None):
        super().__init__()
        self.num_parameters, self.init = num_parameters, init
        self.weight = new_parameter((num_parameters,), dtype=dtype, device=device)
        self.reset_parameters()

    def reset_parameters(self):
        """The initial slope again."""
        init.constant_(self.weight, self.init)

    def forward(self, x):
        return F.prelu(x, self.weight)

    def extra_repr(self):
        return f"num_parameters={self.num_parameters}"
