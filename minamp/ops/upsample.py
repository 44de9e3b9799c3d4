"""Upsampling of images (N, C, H, W). Every resize is a linear map; its gradient is the transposed map, an op of its own."""

import numpy as np

from minamp.arguments import check_floating
from minamp.op import FP32, NOT_LISTED, composite, op


def _resize_arguments(name, x, output_size, scales, taps):
    if x.ndim != 4:
        raise NotImplementedError(f"{name}: input must be (N, C, H, W), this one has shape {x.shape}")
    check_floating(name, x, NotImplementedError)
    output_size = tuple(int(n) for n in output_size)
    if len(output_size) != 2 or min(*x.shape[2:], *output_size) < 1:
        raise RuntimeError(
            f"{name}: input {x.shape} to output size {output_size}: give (H, W), all sizes greater than 0"
        )
    scales = scales or (None, None)
    rows, cols = (taps(*sizes) for sizes in zip(x.shape[2:], output_size, scales, strict=True))
    return (x,), {"rows": rows, "cols": cols}


def _nearest_taps(size, out, scale):
    """Output i reads floor(i / scale). In float32, as PyTorch: the floor of a product depends on its last bit.

    A size that stays, or doubles, does just that, whatever the scale: 3 rows times 1.3 are 3 rows, and the same ones.
    """
    scale = None if out in (size, 2 * size) else scale
    step = np.float32(1.0 / scale if scale else size / out)
    low = np.minimum(np.floor(np.arange(out, dtype=np.float32) * step).astype(np.int64), size - 1)
    return size, low, low, None


def _bilinear_taps(align_corners):
    def taps(size, out, scale):
        """Output i lies between two inputs: pixel centres match, or with align_corners the outermost centres do.

        A size that stays is a copy, whatever the scale.
        """
        scale = None if out == size else scale
        if align_corners:
            at = np.arange(out) * ((size - 1) / (out - 1) if out > 1 else 0.0)
        else:
            at = np.maximum((np.arange(out) + 0.5) * (1.0 / scale if scale else size / out) - 0.5, 0.0)
        low = np.minimum(at.astype(np.int64), size - 1)
        high = np.minimum(low + 1, size - 1)
        return size, low, high, np.where(low < size - 1, at - low, 0.0)

    return taps


class _Resize:
    """The map that all three upsample ops are, once the taps of rows and columns are known."""

    def forward(m, x, *, rows, cols):
        return m.upsample2d(x, rows, cols)

    def vjp_x(m, g, rows, cols):
        return m.upsample2d_grad(g, rows, cols)


@op(policy=FP32)
class upsample_nearest2d(_Resize):
    """x (N, C, H, W) resized to output_size (H, W), every output a copy of the nearest input at its upper left.

    scale_factors: what the caller was asked for, where size / output_size would not give it back exactly.
    """

    def call(input, output_size, scale_factors=None):
        return _resize_arguments("upsample_nearest2d", input, output_size, scale_factors, _nearest_taps)


@op(policy=FP32)
class upsample_bilinear2d(_Resize):
    """x (N, C, H, W) resized to output_size (H, W), every output between its four neighbours. Products and sums are float32."""

    def call(input, output_size, align_corners, scale_factors=None):
        taps = _bilinear_taps(align_corners)
        return _resize_arguments("upsample_bilinear2d", input, output_size, scale_factors, taps)


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


def _two(what, value):
    values = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(values) != 2:
        raise ValueError(f"interpolate: {what} {values} must be one number or (H, W)")
    return values


@composite
def interpolate(input, size=None, scale_factor=None, mode="nearest", align_corners=None):
    """Images (N, C, H, W) resized to `size`, or by `scale_factor`; each a number or (H, W).

    mode: 'nearest' or 'bilinear'. align_corners (bilinear only): match the centres of the corner pixels, not the image edges.
    ValueError unless exactly one of size and scale_factor is given.
    """
    if (size is None) == (scale_factor is None):
        raise ValueError("interpolate: give either size or scale_factor, and not both")
    if mode not in ("nearest", "bilinear"):
        raise NotImplementedError(f"interpolate: mode must be 'nearest' or 'bilinear', got {mode!r}")
    if mode == "nearest" and align_corners is not None:
        raise ValueError("interpolate: align_corners is for mode='bilinear' only: leave it out")
    if input.ndim != 4:
        raise NotImplementedError(
            f"interpolate: input must be (N, C, H, W), this one has shape {input.shape}"
        )
    factors = None
    if size is None:
        factors = _two("scale_factor", scale_factor)
        size = tuple(int(n * f) for n, f in zip(input.shape[2:], factors, strict=True))
    size = _two("size", size)
    if mode == "nearest":
        return upsample_nearest2d(input, size, factors)
    return upsample_bilinear2d(input, size, bool(align_corners), factors)
