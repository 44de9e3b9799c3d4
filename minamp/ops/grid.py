"""Images sampled at the points of a grid, and the grids of affine maps. Made of other ops, for half in float32."""

from minamp import backends
from minamp.arguments import check_floating
from minamp.devices import same_device
from minamp.formats import float32, is_floating, is_half
from minamp.op import PROMOTE, composite
from minamp.ops.arrange import constant_pad_nd, unbind
from minamp.ops.elementwise import clamp, floor, round, where
from minamp.ops.indexing import index
from minamp.ops.matmul import matmul
from minamp.ops.shape import expand, mT, permute, reshape, stack, unsqueeze
from minamp.tensor import Tensor
from minamp.warn import warn

# torch numbers them
_MODES, _PADDINGS = ["bilinear", "nearest", "bicubic"], ["zeros", "border", "reflection"]


@composite
def grid_sample(input, grid, mode="bilinear", padding_mode="zeros", align_corners=None):
    """input (N, C, H, W) at the points x, y in grid (N, OH, OW, 2), where -1 and 1 are opposite edges of the image.

    align_corners=True: the centres of the corner pixels instead. mode: 'bilinear' or 'nearest'. padding_mode: what lies
    outside of the image, 'zeros' or, 'border', its nearest pixels. ValueError for other modes, RuntimeError for shapes and
    dtypes that don't fit.
    """
    for what, value, known in (("mode", mode, _MODES), ("padding_mode", padding_mode, _PADDINGS)):
        if value not in known:
            raise ValueError(f"grid_sample: {what} must be one of {known[:2]}, got {value!r}")
    corners = _corners("grid_sample", align_corners)
    return grid_sampler(input, grid, _MODES.index(mode), _PADDINGS.index(padding_mode), corners)


def _corners(name, align_corners):
    if align_corners is None:
        warn(f"{name}: align_corners is not given, False is taken: pass align_corners=")
    return bool(align_corners)


@composite(policy=PROMOTE)
def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    """input (N, C, H, W) at the points of grid (N, OH, OW, 2), see grid_sample; its modes by their numbers."""
    _check(input, grid, _MODES[interpolation_mode], _PADDINGS[padding_mode])
    (n, c, h, w), (_, rows, cols, _), dtype = input.shape, grid.shape, input.dtype
    wide = float32 if is_half(dtype) else dtype
    # all pixels in a list, and after them zeros for what lies outside
    pixels = constant_pad_nd(reshape(permute(input, (0, 2, 3, 1)), (n * h * w, c)), (0, 0, 0, 1)).to(wide)
    image = Tensor(backends.of(input._data).arange(n)).reshape(n, 1, 1) * (h * w)
    around_x, around_y = (
        _around(_place(at, size, padding_mode == 1, align_corners), size, interpolation_mode == 1)
        for at, size in zip(unbind(grid.to(wide), -1), (w, h), strict=True)
    )
    out = 0.0
    for y, inside_y, weight_y in around_y:
        for x, inside_x, weight_x in around_x:
            at = where(inside_x & inside_y, image + y * w + x, n * h * w)
            picked = reshape(index(pixels, (reshape(at, -1),)), (n, rows, cols, c))
            out = out + picked * unsqueeze(weight_x * weight_y, -1)
    return permute(out, (0, 3, 1, 2)).to(dtype)


def _check(input, grid, mode, padding):
    if mode == "bicubic" or padding == "reflection" or input.ndim == 5:
        raise NotImplementedError(
            f"grid_sample: images only, with modes {_MODES[:2]} and {_PADDINGS[:2]}; got {input.shape}, {mode!r}, {padding!r}"
        )
    check_floating("grid_sample", input, NotImplementedError)
    same_device("grid_sample", input=input, grid=grid)
    if input.dtype != grid.dtype:
        raise RuntimeError(
            f"grid_sample: input is {input.dtype}, grid {grid.dtype}: cast one with .to(), or run inside minamp.autocast()"
        )
    if input.ndim != 4 or grid.ndim != 4 or grid.shape[3] != 2 or len(input) != len(grid):
        raise RuntimeError(
            f"grid_sample: input {input.shape} must be (N, C, H, W), grid {grid.shape} (N, OH, OW, 2) with the same N"
        )
    if 0 in input.shape[2:]:
        raise RuntimeError(f"grid_sample: the images of input {input.shape} are empty")


def _place(at, size, border, align_corners):
    """Coordinates from -1 to 1 as places among `size` pixels. nan lies outside; so does, but not far, all beyond the edge."""
    at = (at + 1.0) / 2.0 * (size - 1) if align_corners else ((at + 1.0) * size - 1.0) / 2.0
    at = where(at == at, at, -2.0)
    if not border:
        return clamp(at, -2.0, size + 1.0)
    # at the border the gradient is 0 already
    return where((at > 0) & (at < size - 1), at, clamp(at.detach(), 0.0, size - 1.0))


def _around(at, size, nearest):
    """The pixels that a place is made of: [(position, whether it lies inside, weight)]."""
    low = round(at) if nearest else floor(at)
    part = at - low
    # nearest: a weight of 1 whose gradient is 0
    parts = [(low, low * 0.0 + 1.0)] if nearest else [(low, 1.0 - part), (low + 1.0, part)]
    return [(i.long(), (i >= 0) & (i < size), weight) for i, weight in parts]


@composite
def affine_grid(theta, size, align_corners=None):
    """The grid (N, H, W, 2) for grid_sample that reads images of `size` (N, C, H, W) where theta (N, 2, 3) maps their places.

    align_corners: as grid_sample will be given. ValueError for shapes that don't fit.
    """
    corners = _corners("affine_grid", align_corners)
    if not is_floating(theta.dtype):
        raise ValueError(f"affine_grid: theta is {theta.dtype}: use theta.float()")
    if len(size) != 4:
        raise NotImplementedError(f"affine_grid: size must be (N, C, H, W), got {tuple(size)}")
    if theta.shape != (size[0], 2, 3):
        raise ValueError(
            f"affine_grid: for size {tuple(size)} theta must be {(size[0], 2, 3)}, got {theta.shape}"
        )
    if min(size) < 1:
        raise ValueError(f"affine_grid: all of size {tuple(size)} must be positive")
    h, w = size[2:]
    x, y = (_line(theta, n, corners) for n in (w, h))
    x, y = expand(x, (h, w)), expand(unsqueeze(y, 1), (h, w))
    places = reshape(stack([x, y, x * 0.0 + 1.0], -1), (h * w, 3))
    grid = matmul.plain(places, mT(theta.to(places.dtype)))  # plain: PyTorch casts nothing here
    return reshape(grid, (size[0], h, w, 2)).to(theta.dtype)


def _line(like, n, align_corners):
    """n places from -1 to 1 in float32 (float64): centres of n equal parts, or with align_corners the ends too."""
    i = Tensor(backends.of(like._data).arange(n)).to(float32 if is_half(like.dtype) else like.dtype)
    if align_corners:
        return i * (2.0 / (n - 1)) - 1.0 if n > 1 else i
    return (i * 2.0 + 1.0) / n - 1.0
