"""grid_sample and affine_grid: values worked out by hand, gradients, what lies outside, half and regions."""

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import bfloat16, float16, float32, float64, tensor
from minamp.autograd import check_grads
from minamp.formats import cast, widen
from minamp.tensor import Tensor

_rng = np.random.default_rng(3)
MODES = [
    {"mode": mode, "padding_mode": padding, "align_corners": corners}
    for mode in ("bilinear", "nearest")
    for padding in ("zeros", "border")
    for corners in (False, True)
]


def normal(*shape):
    return _rng.standard_normal(shape)


def at(values, *places, **options):
    """A row of pixels at some x."""
    x = tensor(np.array(values, np.float32).reshape(1, 1, 1, -1))
    grid = tensor(np.array([[[[p, 0.0] for p in places]]], np.float32))
    return F.grid_sample(x, grid, **options).flatten().tolist()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gradients(mode):
    grid = _rng.uniform(-1.3, 1.3, (2, 2, 3, 2))
    check_grads(lambda x, g: F.grid_sample(x, g, **mode), normal(2, 2, 3, 4), grid)


@pytest.mark.parametrize("corners", [False, True])
def test_gradients_of_affine_grids(corners):
    check_grads(lambda t: F.affine_grid(t, (2, 1, 3, 2), corners) ** 2, normal(2, 2, 3))
    check_grads(
        lambda x, t: F.grid_sample(x, F.affine_grid(t, (1, 1, 2, 3), corners), align_corners=corners),
        normal(1, 2, 4, 3),
        0.6 * normal(1, 2, 3),
    )


def test_values():
    edges, corners = dict(align_corners=False), dict(align_corners=True)
    assert at([1, 2, 4], -1, -2 / 3, 0, 1 / 3, 1, **edges) == pytest.approx([0.5, 1, 2, 3, 2])
    assert at([1, 2, 4], -1, -0.5, 0, 1, 1.5, **corners) == [1, 1.5, 2, 4, 2]
    assert at([1, 2, 4], -1, 1, 5, padding_mode="border", **edges) == [1, 4, 4]
    assert at([1, 2, 4], -0.4, 0.9, 1.1, mode="nearest", **edges) == [1, 4, 0]
    assert at([1, 2, 4], -0.5, 0.5, mode="nearest", **corners) == [1, 4]  # 0.5 and 1.5: ties go to even
    x = normal(1, 2, 3, 5)
    for option in (edges, corners):
        grid = F.affine_grid(tensor([[[1.0, 0, 0], [0, 1, 0]]], dtype=float64), (1, 2, 3, 5), **option)
        np.testing.assert_allclose(F.grid_sample(tensor(x), grid, **option).numpy(), x, rtol=1e-13)
    mirror = tensor([[[-1.0, 0, 0], [0, 1, 0]]], dtype=float64)
    y = F.grid_sample(tensor(x), F.affine_grid(mirror, x.shape, True), "nearest", align_corners=True)
    np.testing.assert_array_equal(y.numpy(), x[..., ::-1])


def test_a_grid_of_one_place_is_the_middle():
    theta = tensor([[[2.0, 0, 0.5], [0, 3, 0.25]]])
    for corners in (False, True):
        assert F.affine_grid(theta, (1, 1, 1, 1), corners).flatten().tolist() == [0.5, 0.25]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_places_that_are_no_numbers_or_far_away(mode):
    """As on a GPU: infinities lie outside like all that is far away, nan before the first pixel."""
    x = minamp.full((1, 1, 2, 2), 3.0, requires_grad=True)
    grid = tensor(
        [[[[v, w] for v in (np.nan, np.inf, -np.inf, 1e30) for w in (0.0, np.nan)]]], requires_grad=True
    )
    y = F.grid_sample(x, grid, **mode)
    y.sum().backward()
    assert y.flatten().tolist() == [3.0 if mode["padding_mode"] == "border" else 0.0] * 8
    assert np.isfinite(x.grad.numpy()).all() and not grid.grad.numpy().any()


def test_pixels_that_are_not_finite_stay_where_they_are():
    y = at([np.inf, 1.0, 2.0, np.nan], -3.0, 0.0, 3.0, align_corners=True)
    assert y == [0, 1.5, 0]


def test_the_border_passes_no_gradient_outwards():
    x = tensor([[[[1.0, 2.0, 4.0]]]])
    grid = tensor([[[[-1.0, 0.0], [-0.5, 0.0], [1.0, 0.0], [2.0, 0.0]]]], requires_grad=True)
    F.grid_sample(x, grid, padding_mode="border", align_corners=True).sum().backward()
    assert grid.grad[..., 0].flatten().tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_half_is_the_float64_result_rounded_once(mode, dtype):
    x, grid = (Tensor(cast(a, dtype)) for a in (normal(2, 3, 5, 4), _rng.uniform(-1.2, 1.2, (2, 6, 5, 2))))
    results = []
    for xs in ((x, grid), (x.double(), grid.double())):
        xs = [a.detach().requires_grad_() for a in xs]
        y = F.grid_sample(*xs, **mode)
        results.append((y.detach(), *minamp.autograd.grad(y.sum(), xs)))
    for half, exact in zip(*results, strict=True):
        assert half.dtype == dtype
        # float32 on the way: a value beside a tie may go to the other side
        step = np.finfo(np.float16).eps if dtype == float16 else 2.0**-7
        bound = 0.501 * step * np.abs(exact.numpy()) + 1e-6
        assert (np.abs(widen(half.numpy()) - exact.numpy()) <= bound).all()


def test_gradient_sums_are_float32():
    x = minamp.zeros(1, 1, 1, 1, dtype=bfloat16, requires_grad=True)
    grid = minamp.zeros(1, 32, 32, 2, dtype=bfloat16)
    F.grid_sample(x, grid, align_corners=False).sum().backward()
    assert x.grad.item() == 1024


def test_dtypes():
    x, grid = minamp.ones(1, 1, 2, 2), minamp.zeros(1, 3, 3, 2)
    half = dict(align_corners=False)
    with minamp.autocast():
        assert (
            F.grid_sample(x.half(), grid, **half).dtype
            == F.grid_sample(x, grid.half(), **half).dtype
            == float32
        )
        assert F.grid_sample(x.half(), grid.half(), **half).dtype == float16
        theta = minamp.zeros(1, 2, 3)
        assert F.affine_grid(theta, (1, 1, 2, 2), False).dtype == float32  # PyTorch casts nothing here
        assert F.affine_grid(theta.half(), (1, 1, 2, 2), False).dtype == float16
    with pytest.raises(RuntimeError, match="grid_sample: input is float16, grid float32"):
        F.grid_sample(x.half(), grid, **half)


def test_align_corners_left_out_warns():
    with pytest.warns(UserWarning, match="grid_sample: align_corners is not given, False is taken"):
        y = F.grid_sample(minamp.ones(1, 1, 2, 2), minamp.full((1, 1, 1, 2), 1.0))
    assert y.item() == 0.25
    with pytest.warns(UserWarning, match="affine_grid: align_corners is not given, False is taken"):
        F.affine_grid(minamp.ones(1, 2, 3), (1, 1, 2, 2))


def test_errors():
    x, grid = minamp.ones(2, 1, 2, 2), minamp.zeros(2, 3, 3, 2)
    for call, error, text in (
        (
            lambda: F.grid_sample(x, grid, "cubic"),
            ValueError,
            r"mode must be one of \['bilinear', 'nearest'\], got",
        ),
        (lambda: F.grid_sample(x, grid, padding_mode="edge"), ValueError, "padding_mode must be one of"),
        (
            lambda: F.grid_sample(x, grid, "bicubic", align_corners=False),
            NotImplementedError,
            "'bicubic', 'zeros'",
        ),
        (
            lambda: F.grid_sample(x[:1], grid, align_corners=True),
            RuntimeError,
            r"grid \(2, 3, 3, 2\) .* the same N",
        ),
        (lambda: F.grid_sample(x, grid[..., :1], align_corners=True), RuntimeError, r"\(N, OH, OW, 2\)"),
        (
            lambda: F.grid_sample(x[:, :, :0], grid, align_corners=True),
            RuntimeError,
            r"images of .* are empty",
        ),
        (
            lambda: F.grid_sample(x.long(), grid, align_corners=True),
            NotImplementedError,
            "not defined for int64",
        ),
        (lambda: F.affine_grid(grid, (2, 1, 3, 3), True), ValueError, r"theta must be \(2, 2, 3\), got"),
        (lambda: F.affine_grid(minamp.ones(2, 2, 3), (2, 1, 0, 3), True), ValueError, "must be positive"),
        (
            lambda: F.affine_grid(minamp.ones(2, 2, 3), (2, 3, 3), True),
            NotImplementedError,
            r"got \(2, 3, 3\)",
        ),
        (
            lambda: F.affine_grid(minamp.ones(2, 2, 3).long(), (2, 1, 3, 3), True),
            ValueError,
            r"use theta.float\(\)",
        ),
    ):
        with pytest.raises(error, match=text):
            call()
