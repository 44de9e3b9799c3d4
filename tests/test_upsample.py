"""interpolate: values worked out by hand, gradients, and half at its limits."""

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import bfloat16, float16, float32, float64, tensor
from minamp.autograd import check_grads
from minamp.methods import OPS

_rng = np.random.default_rng(13)
MODES = [
    {"mode": "nearest"},
    {"mode": "bilinear"},
    {"mode": "bilinear", "align_corners": True},
    {"mode": "bicubic"},
    {"mode": "bicubic", "align_corners": True},
]
LINE_MODES = [{"mode": "nearest"}, {"mode": "linear"}, {"mode": "linear", "align_corners": True}]
SIZES = [{"size": 5}, {"size": (3, 7)}, {"scale_factor": 2}, {"scale_factor": (1.7, 0.6)}, {"size": 1}]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients(size, mode):
    check_grads(lambda x: F.interpolate(x, **size, **mode) ** 2, _rng.standard_normal((2, 1, 3, 4)))


@pytest.mark.parametrize("mode", LINE_MODES, ids=str)
@pytest.mark.parametrize("size", [{"size": 5}, {"size": (3,)}, {"scale_factor": 1.7}, {"size": 1}], ids=str)
def test_gradients_of_lines(size, mode):
    check_grads(lambda x: F.interpolate(x, **size, **mode) ** 2, _rng.standard_normal((2, 2, 4)))


@pytest.mark.parametrize("mode", LINE_MODES, ids=str)
@pytest.mark.parametrize("dtype", [float16, float32, float64], ids=str)
def test_a_line_is_an_image_of_one_row(dtype, mode):
    x = tensor(_rng.standard_normal((2, 3, 5)), dtype=dtype)
    image = {**mode, "mode": mode["mode"].replace("linear", "bilinear")}
    for size in (1, 4, 7, 10):
        y = F.interpolate(x, size, **mode)
        assert y.dtype == dtype and y.equal(F.interpolate(x[:, :, None], (1, size), **image)[:, :, 0])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_gradient_is_the_transposed_map(mode):
    """<g, A x> = <A' g, x>, and the gradient of A' is A again."""
    x = tensor(_rng.standard_normal((1, 2, 3, 4)), dtype=float64, requires_grad=True)
    g = tensor(_rng.standard_normal((1, 2, 5, 6)), dtype=float64, requires_grad=True)
    y = F.interpolate(x, size=(5, 6), **mode)
    (back,) = minamp.autograd.grad(y, x, g, create_graph=True)
    assert (back * x).sum().item() == pytest.approx((g * y).sum().item(), rel=1e-13)
    (again,) = minamp.autograd.grad(back, g, x.detach().requires_grad_(), create_graph=True)
    np.testing.assert_allclose(again._data, y._data, rtol=1e-13)
    assert OPS["upsample2d"].policy == OPS["upsample2d_grad"].policy == "not listed"


def row(values, **options):
    x = tensor(np.array(values, np.float32).reshape(1, 1, 1, -1))
    return F.interpolate(x, **options).reshape(-1).tolist()


def test_values():
    assert row([1, 2], size=(1, 4)) == [1, 1, 2, 2]
    assert row([1, 2, 3], size=(1, 2)) == [1, 2]  # floor(0), floor(1.5)
    assert row([0, 4], size=(1, 4), mode="bilinear") == [0, 1, 3, 4]
    assert row([0, 3], size=(1, 4), mode="bilinear", align_corners=True) == [0, 1, 2, 3]
    assert row([0, 3], size=(1, 1), mode="bilinear", align_corners=True) == [0]
    assert row([0, 2, 4, 6], scale_factor=(1, 0.5), mode="bilinear") == [1, 5]
    assert row([1, 2, 3], scale_factor=(1, 1.5)) == [1, 1, 2, 3]  # floor(i / 1.5), not floor(i * 3 / 4)
    # the weights at 1/4 are (-27, 225, 67, -9) / 256; the outermost values are repeated
    assert row([0, 0, 256, 0, 0], size=(1, 10), mode="bicubic") == [0, -9, -27, 67, 225, 225, 67, -27, -9, 0]
    assert row([0, 3], size=(1, 4), mode="bicubic", align_corners=True) == pytest.approx(
        [0, 17 / 18, 37 / 18, 3]
    )


def test_a_line_that_stays_or_doubles_goes_by_its_scale():
    """As PyTorch's forward on both devices; its CPU backward goes by the sizes."""
    x = tensor([[[1.0, 2.0, 3.0]]], requires_grad=True)
    y = F.interpolate(x, scale_factor=1.3)
    y.sum().backward()
    assert y.flatten().tolist() == [1, 1, 2] and x.grad.flatten().tolist() == [2, 1, 0]
    assert F.interpolate(x, 3).equal(x)


def test_same_size_is_the_identity():
    x = tensor(_rng.standard_normal((1, 2, 5, 7)), dtype=float32)
    for mode in MODES:
        np.testing.assert_array_equal(F.interpolate(x, size=(5, 7), **mode)._data, x._data)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("value", [0.0, 65504.0, -65504.0, 148.0, -148.0, 6e4, -6e4])
def test_half_at_its_limits(value, mode):
    x = minamp.full((1, 1, 2, 2), value, dtype=float16, requires_grad=True)
    y = F.interpolate(x, scale_factor=4, **mode)
    assert y.dtype == float16 and set(y.reshape(-1).tolist()) == {float(np.float16(value))}
    y.sum().backward()
    assert x.grad.dtype == float16 and x.grad.reshape(-1).tolist() == [16] * 4


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gradient_sums_are_float32(mode):
    for dtype, n in ((float16, 64), (bfloat16, 32)):  # 4096 and 1024 ones come back to one pixel
        x = minamp.ones(1, 1, 1, 1, dtype=dtype, requires_grad=True)
        F.interpolate(x, size=n, **mode).sum().backward()
        assert x.grad.item() == n * n
    if mode in LINE_MODES:
        x = minamp.ones(1, 1, 1, dtype=bfloat16, requires_grad=True)
        F.interpolate(x, size=1024, **mode).sum().backward()
        assert x.grad.item() == 1024


def test_dtypes():
    x = minamp.ones(1, 1, 2, 2, dtype=float16)
    with minamp.autocast():
        for mode in MODES:
            assert F.interpolate(x, size=3, **mode).dtype == float32
            assert F.interpolate(x.double(), size=3, **mode).dtype == float64
        for mode in LINE_MODES:
            assert F.interpolate(x[0], size=3, **mode).dtype == float32
            assert F.interpolate(x[0].double(), size=3, **mode).dtype == float64


def test_errors():
    x = minamp.ones(1, 1, 2, 2)
    for options, error, text in (
        ({}, ValueError, "give either size or scale_factor, and not both"),
        ({"size": 3, "scale_factor": 2}, ValueError, "give either size or scale_factor, and not both"),
        ({"size": 3, "align_corners": False}, ValueError, "mode='nearest' has no align_corners"),
        ({"size": (3,)}, ValueError, r"size \(3,\) must be one number or \(H, W\)"),
        ({"scale_factor": (2, 2, 2)}, ValueError, r"scale_factor \(2, 2, 2\) must be one number"),
        (
            {"size": 3, "mode": "area"},
            NotImplementedError,
            r"mode must be one of \['nearest', 'linear', 'bilinear', 'bicubic'\], got 'area'",
        ),
        (
            {"size": 0},
            RuntimeError,
            r"upsample_nearest2d: input \(1, 1, 2, 2\) to output size \(0, 0\).*greater than 0",
        ),
        ({"scale_factor": 0.1, "mode": "bilinear"}, RuntimeError, "upsample_bilinear2d: .*greater than 0"),
        ({"size": 0, "mode": "bicubic"}, RuntimeError, "upsample_bicubic2d: .*greater than 0"),
        ({"size": 3, "mode": "linear"}, NotImplementedError, r"input must be \(N, C, L\) for mode='linear'"),
    ):
        with pytest.raises(error, match=text):
            F.interpolate(x, **options)
    with pytest.raises(NotImplementedError, match=r"interpolate: input must be \(N, C, H, W\).*\(1, 2, 2\)"):
        F.interpolate(x[0], size=3, mode="bilinear")
    with pytest.raises(NotImplementedError, match=r"must be \(N, C, L\) or \(N, C, H, W\).*shape \(2, 2\)"):
        F.interpolate(x[0, 0], size=3)
    with pytest.raises(ValueError, match=r"size \(3, 3\) must be one number or \(L,\)"):
        F.interpolate(x[0], size=(3, 3))
    with pytest.raises(RuntimeError, match=r"upsample_linear1d: input \(1, 2, 2\) to output size \(0,\)"):
        F.interpolate(x[0], size=0, mode="linear")
    with pytest.raises(NotImplementedError, match=r"not defined for int64: use x.float\(\)"):
        F.interpolate(x.long(), size=3)


@pytest.mark.parametrize("mode", [*MODES[:2], MODES[3]], ids=str)
def test_a_size_that_stays_is_a_copy_whatever_the_scale(mode):
    """3 * 1.3 rows are 3 rows; the columns are resized by the scale all the same."""
    x = tensor(_rng.standard_normal((1, 1, 3, 3)), dtype=float32)
    assert F.interpolate(x, scale_factor=1.3, **mode).equal(x)
    if mode["mode"] == "bicubic":
        return  # where only the rows stay, they too go by the scale
    y = F.interpolate(x, scale_factor=(1.3, 2), **mode)
    assert y.equal(F.interpolate(x, scale_factor=(1, 2), **mode))


def test_nearest_that_doubles_repeats_each():
    x = tensor([[[[1.0, 2.0, 3.0, 4.0, 5.0]]]])
    y = F.interpolate(x, scale_factor=(1, 2.15))
    assert y.flatten().tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_the_weights_of_two_neighbours_are_rounded_as_in_torch():
    """One weight is rounded to float32, the other is 1 minus that: else the last bits of what is resized differ."""
    x = np.random.default_rng(0).standard_normal((1, 1, 1, 7)).astype(np.float32)
    at = np.maximum((np.arange(12) + 0.5) * (7 / 12) - 0.5, 0.0)
    low = at.astype(np.int64)
    high, part = np.minimum(low + 1, 6), (at - low).astype(np.float32) * (low < 6)
    part = part.astype(np.float32)
    wanted = x[..., low] * (1 - part) + x[..., high] * part
    y = F.interpolate(minamp.tensor(x), size=(1, 12), mode="bilinear")
    np.testing.assert_array_equal(y.numpy(), wanted)
