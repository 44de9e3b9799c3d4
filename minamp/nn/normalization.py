"""The normalisations as layers: weight and bias, and BatchNorm's running statistics; the arithmetic is in ops/normalize.py."""

from minamp.arguments import no_tensor
from minamp.create import ones, zeros
from minamp.formats import float32
from minamp.nn import functional as F
from minamp.nn import init
from minamp.nn.layers import new_parameter
from minamp.nn.module import Module
from minamp.tensor import Tensor, tensor
from minamp.warn import warn


class _Affine(Module):
    def reset_parameters(self):
        """The initial values again: weight 1, bias 0."""
        for name, fill in (("weight", init.ones_), ("bias", init.zeros_)):
            if self._parameters.get(name) is not None:
                fill(self._parameters[name])


class _BatchNorm(_Affine):
    dims = ()

    def __init__(
        self,
        num_features,
        eps=1e-5,
        momentum=0.1,
        affine=True,
        track_running_stats=True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        shape, dtype = (num_features,), dtype or float32
        self.register_parameter(
            "weight", new_parameter(shape, ones, dtype=dtype, device=device) if affine else None
        )
        self.register_parameter(
            "bias", new_parameter(shape, zeros, dtype=dtype, device=device) if affine else None
        )
        track = track_running_stats
        self.register_buffer("running_mean", zeros(shape, dtype=dtype, device=device) if track else None)
        self.register_buffer("running_var", ones(shape, dtype=dtype, device=device) if track else None)
        self.register_buffer("num_batches_tracked", tensor(0, device=device) if track else None)

    def reset_running_stats(self):
        """The running statistics as before the first batch."""
        if self.track_running_stats:
            self.running_mean.zero_()
            self.running_var.fill_(1.0)
            self.num_batches_tracked.zero_()

    def reset_parameters(self):
        """The initial values again: weight 1, bias 0, and the running statistics' own."""
        self.reset_running_stats()
        super().reset_parameters()

    def _check(self, x):
        if not isinstance(x, Tensor):
            raise no_tensor(type(self).__name__, "x", x)
        if x.ndim not in self.dims:
            raise ValueError(
                f"{type(self).__name__}: expected {' or '.join(map(str, self.dims))} dimensions, got "
                f"shape {x.shape}"
            )

    def forward(self, x):
        self._check(x)
        factor, count = self.momentum, None
        if self.training and self.num_batches_tracked is not None:
            count = self.num_batches_tracked + 1
            if factor is None:  # the plain average over all batches
                factor = 1.0 / count.item()
        y = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            0.0 if factor is None else factor,
            self.eps,
        )
        if count is not None:
            self.num_batches_tracked.copy_(count)  # last: a batch that failed is not counted
        return y

    def extra_repr(self):
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}"
        )


class BatchNorm1d(_BatchNorm):
    """Normalizes each feature of x (N, C) or (N, C, L) over the batch (Ioffe and Szegedy, 2015)."""

    dims = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Normalizes each channel of x (N, C, H, W) over the batch (Ioffe and Szegedy, 2015)."""

    dims = (4,)


class _InstanceNorm(_BatchNorm):
    """BatchNorm of every sample by itself; no weight and no running statistics unless they are asked for."""

    def __init__(
        self,
        num_features,
        eps=1e-5,
        momentum=0.1,
        affine=False,
        track_running_stats=False,
        device=None,
        dtype=None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)

    def forward(self, x):
        self._check(x)
        alone = x.ndim == self.dims[0]  # a sample without a batch
        found = x.shape[0 if alone else 1]
        if found != self.num_features:
            text = f"{type(self).__name__}: x {x.shape} has {found} channels, num_features is {self.num_features}"
            if self.affine:
                raise ValueError(text)
            warn(f"{text}, which is not used with affine=False")
        y = F.instance_norm(
            x.unsqueeze(0) if alone else x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
        )
        return y.squeeze(0) if alone else y


class InstanceNorm1d(_InstanceNorm):
    """Normalizes each channel of each sample of x (N, C, L) or (C, L) (Ulyanov et al., 2016)."""

    dims = (2, 3)


class InstanceNorm2d(_InstanceNorm):
    """Normalizes each channel of each sample of x (N, C, H, W) or (C, H, W) (Ulyanov et al., 2016)."""

    dims = (3, 4)


class LayerNorm(_Affine):
    """Normalizes each sample over its last dimensions, `normalized_shape` (Ba et al., 2016)."""

    def __init__(
        self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device=None, dtype=None
    ):
        super().__init__()
        self.normalized_shape = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        self.eps, self.elementwise_affine = eps, elementwise_affine
        shape, affine = self.normalized_shape, elementwise_affine
        self.register_parameter(
            "weight", new_parameter(shape, ones, dtype=dtype, device=device) if affine else None
        )
        self.register_parameter(
            "bias", new_parameter(shape, zeros, dtype=dtype, device=device) if affine and bias else None
        )

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self):
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class RMSNorm(_Affine):
    """Divides each sample by its root mean square over the last dimensions (Zhang and Sennrich, 2019)."""

    def __init__(self, normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None):
        super().__init__()
        self.normalized_shape = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        self.eps, self.elementwise_affine = eps, elementwise_affine
        weight = (
            new_parameter(self.normalized_shape, ones, dtype=dtype, device=device)
            if elementwise_affine
            else None
        )
        self.register_parameter("weight", weight)

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self):
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class GroupNorm(_Affine):
    """Normalizes each sample over groups of channels of x (N, C, ...) (Wu and He, 2018)."""

    def __init__(self, num_groups, num_channels, eps=1e-5, affine=True, device=None, dtype=None):
        if num_channels % num_groups:
            raise ValueError(
                f"GroupNorm: {num_channels} channels can't be split into {num_groups} groups: choose a divisor"
            )
        super().__init__()
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        shape = (num_channels,)
        self.register_parameter(
            "weight", new_parameter(shape, ones, dtype=dtype, device=device) if affine else None
        )
        self.register_parameter(
            "bias", new_parameter(shape, zeros, dtype=dtype, device=device) if affine else None
        )

    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self):
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"
