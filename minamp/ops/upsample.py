"""Upsampling of images (N, C, H, W) and lines (N, C, L): linear maps, whose gradients are the transposed maps, ops too."""

import numpy as np

from minamp.arguments import check_floating
from minamp.formats import float32, float64
from minamp.op import FP32, NOT_LISTED, composite, op
from minamp.ops.conv import images, like_input


def _resize_arguments(name, sizes, x, output_size, scales, taps):
    dims = len(sizes.split(", "))
    if x.ndim != dims + 2:
        raise NotImplementedError(f"{name}: input must be (N, C, {sizes}), this one has shape {x.shape}")
    check_floating(name, x, NotImplementedError)
    output_size = tuple(int(n) for n in output_size)
    if len(output_size) != dims or min(*x.shape[2:], *output_size) < 1:
        raise RuntimeError(
            f"{name}: input {x.shape} to output size {output_size}: give ({sizes}), all sizes greater than 0"
        )
    scales = scales or (None,) * dims
    one_row = [(1, ((np.zeros(1, np.int64), None),))] * (2 - dims)
    rows, cols = one_row + [taps(*n) for n in zip(x.shape[2:], output_size, scales, strict=True)]
    return (x,), {"rows": rows, "cols": cols}


# Taps are (size, ((inputs, weights), ...)): output i is the sum of the inputs[i] times weights[i]; None: weights of 1.


def _nearest_taps(size, out, scale):
    """Output i reads floor(i / scale). In float32, as PyTorch: the floor of a product depends on its last bit."""
    step = np.float32(1.0 / scale if scale else size / out)
    low = np.minimum(np.floor(np.arange(out, dtype=np.float32) * step).astype(np.int64), size - 1)
    return size, ((low, None),)


def _nearest_taps_2d(size, out, scale):
    """A size that stays, or doubles, does just that, whatever the scale: 3 rows times 1.3 are 3 rows, and the same ones.

    In two dimensions; of a line PyTorch takes the scale at its word: 3 values times 1.3 are the first twice, then the second.
    """
    return _nearest_taps(size, out, None if out in (size, 2 * size) else scale)


def _centres(size, out, scale, align_corners):
    """Where each output lies among the inputs: pixel centres match, or with align_corners the outermost centres do."""
    if align_corners:
        return np.arange(out) * ((size - 1) / (out - 1) if out > 1 else 0.0)
    return (np.arange(out) + 0.5) * (1.0 / scale if scale else size / out) - 0.5


def _linear_taps(align_corners, dtype):
    def taps(size, out, scale):
        """Output i lies between two inputs. A size that stays is a copy, whatever the scale."""
        at = np.maximum(_centres(size, out, None if out == size else scale, align_corners), 0.0)
        low = np.minimum(at.astype(np.int64), size - 1)
        # in the dtype of the products, as PyTorch: the other weight is 1 minus the rounded one
        part = np.where(low < size - 1, at - low, 0.0).astype(float64 if dtype == float64 else float32)
        return size, ((low, 1.0 - part), (np.minimum(low + 1, size - 1), part))

    return taps


def _cubic_taps(align_corners):
    def taps(size, out, scale):
        """Output i lies among four inputs, the outermost repeated; weights of Keys (1981) with a slope of -0.75 at 1."""
        at = _centres(size, out, scale, align_corners)
        low = np.floor(at).astype(np.int64)
        return size, tuple(
            (np.clip(low + k, 0, size - 1), _cubic(np.abs(at - low - k))) for k in (-1, 0, 1, 2)
        )

    return taps


def _cubic(x, a=-0.75):
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, far)


class _Resize:
    """The map that all upsample ops are, once the taps of rows and columns are known."""

    def forward(m, x, *, rows, cols):
        dims = x.ndim - 2
        return like_input(m, m.upsample2d(images(m, x, dims), rows, cols), x.shape, dims)

    def vjp_x(m, g, x_shape, rows, cols):
        return m.reshape(m.upsample2d_grad(images(m, g, g.ndim - 2), rows, cols), x_shape)


@op(policy=FP32)
class upsample_nearest1d(_Resize):
    """upsample_nearest2d of x (N, C, L), to output_size (L,)."""

    def call(input, output_size, scale_factors=None):
        return _resize_arguments("upsample_nearest1d", "L", input, output_size, scale_factors, _nearest_taps)


@op(policy=FP32)
class upsample_linear1d(_Resize):
    """upsample_bilinear2d of x (N, C, L), to output_size (L,): every output between its two neighbours."""

    def call(input, output_size, align_corners, scale_factors=None):
        taps = _linear_taps(align_corners, input.dtype)
        return _resize_arguments("upsample_linear1d", "L", input, output_size, scale_factors, taps)


@op(policy=FP32)
class upsample_nearest2d(_Resize):
    """x (N, C, H, W) resized to output_size (H, W), every output a copy of the nearest input at its upper left.

    scale_factors: what the caller was asked for, where size / output_size would not give it back exactly.
    """

    def call(input, output_size, scale_factors=None):
        taps = _nearest_taps_2d
        return _resize_arguments("upsample_nearest2d", "H, W", input, output_size, scale_factors, taps)


@op(policy=FP32)
class upsample_bilinear2d(_Resize):
    """x (N, C, H, W) resized to output_size (H, W), every output between its four neighbours. Products and sums are float32."""

    def call(input, output_size, align_corners, scale_factors=None):
        taps = _linear_taps(align_corners, input.dtype)
        return _resize_arguments("upsample_bilinear2d", "H, W", input, output_size, scale_factors, taps)


@op(policy=FP32)
class upsample_bicubic2d(_Resize):
    """x (N, C, H, W) resized to output_size (H, W), every output a cubic through the sixteen inputs around it (Keys, 1981).

    Where both sizes stay it is a copy, whatever the scale.
    """

    def call(input, output_size, align_corners, scale_factors=None):
        scale_factors = None if input.shape[2:] == tuple(output_size) else scale_factors
        taps = _cubic_taps(align_corners)
        return _resize_arguments("upsample_bicubic2d", "H, W", input, output_size, scale_factors, taps)


@op(policy=NOT_LISTED)
class upsample2d(_Resize):
    """x resized by taps that are known: the gradient of upsample2d_grad."""


@op(policy=NOT_LISTED)
class upsample2d_grad:
    """The transposed map: every output's gradient goes back to the inputs it was made of. Sums are float32."""

    def forward(m, g, *, rows, cols):
        return m.upsample2d_grad(g, rows, cols)

    def vjp_g(m, g, rows, cols):
        return m.upsample2d(g, rows, cols)


def _sizes(what, value, dims):
    values = tuple(value) if isinstance(value, tuple | list) else (value,) * dims
    if len(values) != dims:
        form = "(H, W)" if dims == 2 else "(L,)"
        raise ValueError(f"interpolate: {what} {values} must be one number or {form}")
    return values


_MODES = {  # torch's mode -> dimensions of the input -> op
    "nearest": {3: upsample_nearest1d, 4: upsample_nearest2d},
    "linear": {3: upsample_linear1d},
    "bilinear": {4: upsample_bilinear2d},
    "bicubic": {4: upsample_bicubic2d},
}


@composite
def interpolate(input, size=None, scale_factor=None, mode="nearest", align_corners=None):
    """Images (N, C, H, W) or lines (N, C, L) resized to `size`, or by `scale_factor`; each one number or one a dimension.

    mode: 'nearest', for images 'bilinear' or 'bicubic', for lines 'linear'. align_corners (not for 'nearest'): match the
    centres of the corner pixels, not the image edges. ValueError unless exactly one of size and scale_factor is given.
    """
    if (size is None) == (scale_factor is None):
        raise ValueError("interpolate: give either size or scale_factor, and not both")
    if mode not in _MODES:
        raise NotImplementedError(f"interpolate: mode must be one of {list(_MODES)}, got {mode!r}")
    if mode == "nearest" and align_corners is not None:
        raise ValueError("interpolate: mode='nearest' has no align_corners: leave it out")
    resize = _MODES[mode].get(input.ndim)
    if resize is None:
        takes = " or ".join({3: "(N, C, L)", 4: "(N, C, H, W)"}[n] for n in _MODES[mode])
        raise NotImplementedError(
            f"interpolate: input must be {takes} for mode={mode!r}, this one has shape {input.shape}"
        )
    factors = None
    if size is None:
        factors = _sizes("scale_factor", scale_factor, input.ndim - 2)
        size = tuple(int(n * f) for n, f in zip(input.shape[2:], factors, strict=True))
    size = _sizes("size", size, input.ndim - 2)
    return resize(input, size, *(() if mode == "nearest" else (bool(align_corners),)), factors)
