"""Convolution and pooling against plain loops in float64, in every format, with their gradients and errors."""

import itertools

import numpy as np
import pytest

import minamp
from minamp.autograd import check_grads
from minamp.backends import conv as backend
from minamp.formats import bfloat16, cast, float16, float32, widen
from minamp.methods import OPS
from minamp.tensor import Tensor

conv2d, conv1d, conv3d = OPS["conv2d"], OPS["conv1d"], OPS["conv3d"]
conv_transpose2d, conv_transpose1d = OPS["conv_transpose2d"], OPS["conv_transpose1d"]
max_pool2d, avg_pool2d = OPS["max_pool2d"], OPS["avg_pool2d"]
max_pool1d, avg_pool1d = OPS["max_pool1d"], OPS["avg_pool1d"]
adaptive_avg_pool2d, adaptive_max_pool2d = OPS["adaptive_avg_pool2d"], OPS["adaptive_max_pool2d"]
adaptive_avg_pool1d = OPS["adaptive_avg_pool1d"]
POOLS = [max_pool2d, avg_pool2d, adaptive_avg_pool2d, adaptive_max_pool2d]
HALVES = [float16, bfloat16]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def integers(*shape, seed=0, top=4):
    return np.random.default_rng(seed).integers(-top, top + 1, shape).astype(np.float64)


def reference(x, w, b, stride, padding, dilation, groups):
    """Convolution by its definition, one output at a time, float64."""
    (ph, pw), (sh, sw), (dh, dw) = padding, stride, dilation
    x = np.pad(np.asarray(x, np.float64), ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    (n, _, h, wide), (o, cg, kh, kw) = x.shape, w.shape
    oh, ow = (h - dh * (kh - 1) - 1) // sh + 1, (wide - dw * (kw - 1) - 1) // sw + 1
    y = np.zeros((n, o, oh, ow))
    for image, out, i, j in itertools.product(range(n), range(o), range(oh), range(ow)):
        first = out // (o // groups) * cg
        for c, a, b_ in itertools.product(range(cg), range(kh), range(kw)):
            y[image, out, i, j] += x[image, first + c, i * sh + a * dh, j * sw + b_ * dw] * w[out, c, a, b_]
    return y if b is None else y + np.asarray(b, np.float64)[:, None, None]


def pooled(x, kernel, stride, padding, dilation, size, reduce):
    """Pooling by its definition: `reduce` over what of every window lies inside the image."""
    n, c, h, w = x.shape
    y = np.zeros((n, c, *size))
    for i, j in itertools.product(range(size[0]), range(size[1])):
        rows = [
            r for r in (i * stride[0] - padding[0] + k * dilation[0] for k in range(kernel[0])) if 0 <= r < h
        ]
        cols = [
            q for q in (j * stride[1] - padding[1] + k * dilation[1] for k in range(kernel[1])) if 0 <= q < w
        ]
        y[:, :, i, j] = reduce(x[:, :, rows][:, :, :, cols].reshape(n, c, -1))
    return y


# --------------------------------------------------------------------------------------------------------------- convolutions


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 2), (3, 0)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (3, 2)])
def test_conv2d_is_its_definition(stride, padding, dilation, groups):
    x, w, b = integers(2, 4, 7, 6), integers(4, 4 // groups, 3, 2, seed=1), integers(4, seed=2)
    got = conv2d(*(Tensor(a.astype(np.float32)) for a in (x, w, b)), stride, padding, dilation, groups)
    assert got.dtype == float32
    np.testing.assert_array_equal(got.numpy(), reference(x, w, b, stride, padding, dilation, groups))


@pytest.mark.parametrize("settings", [((1, 1), (1, 1), (1, 1), 1), ((2, 3), (2, 0), (1, 2), 2)])
def test_gradients_are_the_adjoints_of_the_forward(settings):
    # <g, conv(x, w)> = <input_grad(g, w), x> = <weight_grad(g, x), w>, exactly, on small integers
    x, w = integers(3, 4, 9, 8), integers(6, 4 // settings[3], 3, 2, seed=1)
    y = reference(x, w, None, *settings)
    g = integers(*y.shape, seed=2)
    single = [a.astype(np.float32) for a in (g, w, x)]
    gx = backend.conv2d_input_grad(single[0], single[1], x.shape, *settings)
    gw = backend.conv2d_weight_grad(single[0], single[2], w.shape, *settings)
    assert gx.dtype == gw.dtype == np.float32 and gx.shape == x.shape and gw.shape == w.shape
    assert (g * y).sum() == (gx * x).sum() == (gw * w).sum()


def test_inputs_need_not_be_contiguous():
    x, w = (
        integers(5, 6, 3, 7).transpose(0, 2, 3, 1)[:, ::-1, :, ::2],
        integers(3, 2, 3, 4, seed=1).transpose(3, 0, 1, 2),
    )
    x = np.asarray(x, np.float32)
    y = conv2d(Tensor(x), Tensor(w.astype(np.float32)))
    np.testing.assert_array_equal(y.numpy(), reference(x, w, None, (1, 1), (0, 0), (1, 1), 1))


@pytest.mark.parametrize("bytes_", [1, 3000, 40000])
def test_every_size_of_block_gives_the_same(monkeypatch, bytes_):
    # 1 byte: one position a block; 3000: parts of a row; 40000: several rows, the last block shorter
    x, w, settings = integers(5, 4, 11, 7), integers(6, 2, 3, 3, seed=1), ((1, 1), (1, 1), (1, 1), 2)
    y = reference(x, w, None, *settings)
    g = integers(*y.shape, seed=2)
    x, w, g = (a.astype(np.float32) for a in (x, w, g))
    gx, gw = (
        backend.conv2d_input_grad(g, w, x.shape, *settings),
        backend.conv2d_weight_grad(g, x, w.shape, *settings),
    )
    monkeypatch.setattr(backend, "COLUMN_BYTES", bytes_)
    np.testing.assert_array_equal(backend.conv2d(x, w, None, *settings), y)
    np.testing.assert_array_equal(backend.conv2d_input_grad(g, w, x.shape, *settings), gx)
    np.testing.assert_array_equal(backend.conv2d_weight_grad(g, x, w.shape, *settings), gw)


def test_a_batch_of_columns_larger_than_the_block():
    x, w = integers(1400, 3, 8, 8), integers(2, 3, 3, 3, seed=1)
    assert x.shape[0] * 27 * 64 * 4 > 2 * backend.COLUMN_BYTES
    y = conv2d(Tensor(x.astype(np.float32)), Tensor(w.astype(np.float32)), None, 1, 1).numpy()
    for at in (0, 700, 1399):
        np.testing.assert_array_equal(y[at], reference(x[at : at + 1], w, None, (1, 1), (1, 1), (1, 1), 1)[0])


def test_an_empty_batch_works():
    x, w, b = (
        Tensor(np.zeros(s, np.float32), requires_grad=True) for s in ((0, 2, 5, 5), (3, 2, 3, 3), (3,))
    )
    y = conv2d(x, w, b, padding=1)
    assert y.shape == (0, 3, 5, 5)
    y.sum().backward()
    assert x.grad.shape == (0, 2, 5, 5) and not w.grad.numpy().any() and not b.grad.numpy().any()
    for pooled_ in (pool(x, 2) for pool in POOLS):
        assert pooled_.shape == (0, 2, 2, 2)
        pooled_.sum().backward()


def test_same_and_valid_padding():
    x, w = (
        Tensor(integers(2, 3, 8, 7).astype(np.float32)),
        Tensor(integers(4, 3, 3, 4, seed=1).astype(np.float32)),
    )
    same = conv2d(x, w, padding="same", dilation=(2, 1))
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (2, 2), (1, 2)))  # an odd rest goes to the end
    assert same.shape == (2, 4, 8, 7)
    np.testing.assert_array_equal(same.numpy(), reference(padded, w.numpy(), None, (1, 1), (0, 0), (2, 1), 1))
    np.testing.assert_array_equal(conv2d(x, w, padding="valid").numpy(), conv2d(x, w).numpy())
    line = conv1d(
        Tensor(np.ones((1, 1, 5), np.float32)), Tensor(np.ones((1, 1, 2), np.float32)), padding="same"
    )
    assert line.tolist() == [[[2, 2, 2, 2, 1]]]


def test_without_a_batch_dimension():
    x, w, b = (Tensor(integers(*s).astype(np.float32)) for s in ((3, 6, 5), (4, 3, 2, 2), (4,)))
    one = Tensor(x.numpy()[None])
    np.testing.assert_array_equal(conv2d(x, w, b).numpy(), conv2d(one, w, b).numpy()[0])
    back = Tensor(w.numpy().transpose(1, 0, 2, 3))
    np.testing.assert_array_equal(
        conv_transpose2d(x, back, b).numpy(), conv_transpose2d(one, back, b).numpy()[0]
    )
    for pool in POOLS:
        np.testing.assert_array_equal(pool(x, 2).numpy(), pool(one, 2).numpy()[0])


def test_conv1d_is_conv2d_on_one_row():
    x, w, b = integers(2, 4, 9), integers(6, 2, 3, seed=1), integers(6, seed=2)
    y = conv1d(*(Tensor(a.astype(np.float32)) for a in (x, w, b)), stride=2, padding=1, dilation=2, groups=2)
    expected = reference(x[:, :, None], w[:, :, None], b, (1, 2), (0, 1), (1, 2), 2)
    np.testing.assert_array_equal(y.numpy(), expected[:, :, 0])
    alone = conv1d(
        *(Tensor(a.astype(np.float32)) for a in (x[0], w, b)), stride=2, padding=1, dilation=2, groups=2
    )
    np.testing.assert_array_equal(alone.numpy(), y.numpy()[0])


def test_conv_transpose2d_scatters_every_input():
    x, w, b = integers(2, 4, 3, 4), integers(4, 3, 3, 2, seed=1), integers(6, seed=2)
    stride, padding, extra, dilation = (2, 3), (1, 0), (1, 2), (2, 1)
    y = conv_transpose2d(
        *(Tensor(a.astype(np.float32)) for a in (x, w, b)), stride, padding, extra, 2, dilation
    )
    full = np.zeros((2, 6, 2 * 2 + 2 * 2 + 2, 3 * 3 + 1 + 3))
    for c, o, i, j, a, k in itertools.product(*map(range, (4, 3, 3, 4, 3, 2))):
        full[:, c // 2 * 3 + o, i * 2 + a * 2, j * 3 + k] += x[:, c, i, j] * w[c, o, a, k]
    np.testing.assert_array_equal(y.numpy(), full[:, :, 1:-1] + b[:, None, None])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_conv3d_sums_over_the_depth_of_its_kernel(stride, padding, dilation, groups):
    x, w, b = integers(2, 4, 5, 4, 4), integers(6, 4 // groups, 2, 3, 2, seed=1), integers(6, seed=2)
    settings = ((stride, 1, 2), (padding, 1, 0), (dilation, 1, 2), groups)
    y = conv3d(*(Tensor(a.astype(np.float32)) for a in (x, w, b)), *settings).numpy()
    deep = np.pad(x, ((0, 0), (0, 0), (padding, padding), (0, 0), (0, 0)))
    assert y.shape[2] == (deep.shape[2] - dilation - 1) // stride + 1
    for out in range(y.shape[2]):
        expected = sum(
            reference(
                deep[:, :, out * stride + k * dilation], w[:, :, k], None, (1, 2), (1, 0), (1, 2), groups
            )
            for k in range(2)
        )
        np.testing.assert_array_equal(y[:, :, out], expected + b[:, None, None])
    alone = conv3d(*(Tensor(a.astype(np.float32)) for a in (x[0], w, b)), *settings)
    np.testing.assert_array_equal(alone.numpy(), y[0])


def test_conv_transpose1d_is_conv_transpose2d_on_one_row():
    x, w, b = (Tensor(integers(*s).astype(np.float32)) for s in ((2, 4, 5), (4, 3, 2), (6,)))
    y = conv_transpose1d(x, w, b, stride=3, padding=1, output_padding=2, groups=2, dilation=2)
    row = conv_transpose2d(x[:, :, None], w[:, :, None], b, (1, 3), (0, 1), (0, 2), 2, (1, 2))
    np.testing.assert_array_equal(y.numpy(), row.numpy()[:, :, 0])
    alone = conv_transpose1d(x[0], w, b, stride=3, padding=1, output_padding=2, groups=2, dilation=2)
    np.testing.assert_array_equal(alone.numpy(), y.numpy()[0])


# ------------------------------------------------------------------------------------------------------------------- gradients


def test_gradients_of_convolutions():
    settings = dict(stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)
    check_grads(
        lambda x, w, b: conv2d(x, w, b, **settings), normal(2, 4, 5, 4), normal(4, 2, 3, 2), normal(4)
    )
    check_grads(lambda x, w: conv2d(x, w, padding="same"), normal(3, 5, 4), normal(2, 3, 2, 3))
    check_grads(lambda x, w, b: conv1d(x, w, b, 2, 1, 2, 2), normal(2, 4, 7), normal(2, 2, 3), normal(2))
    check_grads(lambda x, w: conv1d(x, w), normal(4, 7), normal(2, 4, 3))
    settings = dict(stride=(2, 1, 2), padding=(1, 0, 1), dilation=(1, 2, 1), groups=2)
    deep, cube = normal(2, 2, 3, 4, 3), normal(2, 1, 2, 2, 2)
    check_grads(lambda x, w, b: conv3d(x, w, b, **settings), deep, cube, normal(2))
    check_grads(lambda x, w: conv3d(x, w, padding="same", groups=2), deep[0], cube)
    transposed = dict(stride=(2, 3), padding=1, output_padding=(1, 0), groups=2, dilation=(1, 2))
    check_grads(
        lambda x, w, b: conv_transpose2d(x, w, b, **transposed),
        normal(2, 4, 3, 2),
        normal(4, 1, 3, 2),
        normal(2),
    )
    check_grads(lambda x, w: conv_transpose2d(x, w), normal(2, 3, 2), normal(2, 2, 2, 2))
    check_grads(
        lambda x, w, b: conv_transpose1d(x, w, b, 2, 1, 1, 2, 2), normal(2, 4, 3), normal(4, 1, 3), normal(2)
    )
    # output_padding as below
    check_grads(
        lambda x, w: conv_transpose1d(x, w, output_padding=2, dilation=3), normal(2, 3), normal(2, 1, 2)
    )
    # an output_padding of the stride or more, which the dilation allows: a convolution of the gradient would be larger
    for settings in (dict(output_padding=1), dict(stride=(1, 2), output_padding=(0, 2), groups=2)):
        settings["dilation"] = (2, 3)
        check_grads(
            lambda x, w, s=settings: conv_transpose2d(x, w, **s),
            normal(2, 2, 3, 2),
            normal(2, 1, 2, 2),
            order=2,
        )


def test_gradients_of_the_gradient_ops():
    tail = ((2, 1), (1, 0), (1, 2), 2)
    g, x, w = normal(2, 4, 3, 2), normal(2, 4, 5, 4), normal(4, 2, 3, 2)
    check_grads(lambda g, w: OPS["conv2d_input_grad"](g, w, x.shape, *tail), g, w)
    check_grads(lambda g, x: OPS["conv2d_weight_grad"](g, x, w.shape, *tail), g, x)


def test_gradients_of_pools():
    x = np.random.default_rng(0).permutation(2 * 3 * 6 * 7).reshape(2, 3, 6, 7) / 10.0  # no ties
    check_grads(lambda x: max_pool2d(x, 2), x)
    check_grads(lambda x: max_pool2d(x, (3, 2), (2, 1), 1, (1, 2), True), x)
    check_grads(lambda x: avg_pool2d(x, 2), x)
    check_grads(lambda x: avg_pool2d(x, 3, 2, 1, True, False), x)
    check_grads(lambda x: adaptive_avg_pool2d(x, (4, 3)), x)
    check_grads(lambda x: max_pool2d(x, 2), x[0])
    check_grads(lambda x: max_pool1d(x, 3, 2, 1, 2, True), x[0])
    check_grads(lambda x: avg_pool1d(x, 3, 2, 1, True, False), x[0])
    check_grads(lambda x: adaptive_avg_pool1d(x, 4), x[0])
    check_grads(lambda x: adaptive_max_pool2d(x, (4, 3)), x)
    kernel, stride, padding, dilation = (3, 2), (2, 1), (1, 1), (1, 1)
    at = OPS["max_pool2d_position"](
        Tensor(x), max_pool2d(Tensor(x), kernel, stride, 1), kernel, stride, padding, dilation
    )
    settings = (kernel, stride, padding, dilation)
    check_grads(lambda x: OPS["max_pool2d_gather"](x, at, *settings), x)
    check_grads(lambda g: OPS["max_pool2d_scatter"](g, at, x.shape, *settings), normal(*at.shape))
    windows = dict(rows=[(0, 2), (1, 6)], cols=[(0, 7), (3, 4)], counts=np.array([[14, 2], [35, 5]]))
    check_grads(lambda g: OPS["window_mean_grad"](g, x.shape, **windows), normal(2, 3, 2, 2))


# ---------------------------------------------------------------------------------------------------------------- half formats


@pytest.mark.parametrize("dtype", HALVES)
def test_half_is_the_float64_result_rounded_once(dtype):
    # up to 27 products of integers up to 8: exact in float32, mostly not in bfloat16
    x, w, b = integers(3, 3, 8, 8, top=8), integers(5, 3, 3, 3, seed=1, top=8), integers(5, seed=2)
    y = conv2d(*(Tensor(a).to(dtype) for a in (x, w, b)), padding=1)
    assert y.dtype == dtype
    expected = reference(x, w, b, (1, 1), (1, 1), (1, 1), 1)
    np.testing.assert_array_equal(widen(y.numpy()), widen(cast(expected, dtype)))


@pytest.mark.parametrize("dtype", HALVES)
def test_conv3d_rounds_sums_over_the_depth_once(dtype):
    # integers up to 8, so that float32 is exact: also where a gradient is the sum of what three depths give
    x, w = integers(2, 2, 5, 4, 4, top=8), integers(3, 2, 3, 2, 2, seed=1, top=8)
    results = []
    for kind in (dtype, np.float64):
        xs = [Tensor(a).to(kind).requires_grad_() for a in (x, w)]
        y = conv3d(*xs, padding=(1, 0, 1))
        g = Tensor(integers(*y.shape, seed=2, top=8)).to(kind)
        results.append((y.detach(), *minamp.autograd.grad(y, xs, g)))
    for half, exact in zip(*results, strict=True):
        assert half.dtype == dtype
        np.testing.assert_array_equal(widen(half.numpy()), widen(cast(exact.numpy(), dtype)))


@pytest.mark.parametrize("dtype", HALVES)
def test_half_is_within_one_step_of_float64(dtype):
    x, w = (cast(normal(*s, seed=i), dtype) for i, s in enumerate([(2, 16, 9, 9), (8, 16, 3, 3)]))
    y = widen(conv2d(Tensor(x), Tensor(w), stride=2).numpy()).astype(np.float64)
    exact = reference(widen(x), widen(w), None, (2, 2), (0, 0), (1, 1), 1)
    step = np.finfo(np.float16).eps if dtype == float16 else 2.0**-7
    assert (np.abs(y - exact) <= step * np.maximum(np.abs(exact), 2.0**-13)).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_weight_gradients_are_summed_in_float32(dtype):
    # 64 * 16 * 16 ones: a half sum would stop at 2048 (float16) or 256 (bfloat16)
    x = Tensor(np.ones((64, 1, 16, 16))).to(dtype)
    w, b = (Tensor(np.ones(s)).to(dtype).requires_grad_() for s in ((1, 1, 1, 1), (1,)))
    y = conv2d(x, w, b)
    y.backward(Tensor(np.ones(y.shape)).to(dtype))
    assert w.grad.item() == b.grad.item() == 16384.0


def test_the_bias_is_added_before_rounding():
    one, w, b = (
        Tensor(np.full(s, v)).half() for s, v in (((1, 1, 1, 1), 1.0), ((1, 1, 1, 1), 2048.0), ((1,), 0.5))
    )
    two = Tensor(np.full((1, 2, 1, 1), 1.0)).half()
    w2 = Tensor(np.array([2048.0, 0.5]).reshape(1, 2, 1, 1)).half()
    assert conv2d(two, w2, b).item() == 2048.0  # 2049 exactly, a tie that goes to even
    w3 = Tensor(np.array([2048.0, 1.0]).reshape(1, 2, 1, 1)).half()
    assert conv2d(two, w3, b).item() == 2050.0  # 2049.5; rounding the sum first would give 2048
    assert conv_transpose2d(one, w, b).item() == 2048.0


def test_autocast_casts_input_weight_and_bias():
    x = Tensor(np.zeros((1, 1, 4, 4), np.float32))
    w = Tensor(np.ones((2, 1, 3, 3), np.float32), requires_grad=True)
    b = Tensor(np.array([70000.0, 1e-9], np.float32), requires_grad=True)
    with minamp.autocast(dtype=float16):
        y = conv2d(x, w, b)
        assert (
            y.dtype == float16
            and np.isinf(y.detach().numpy()[0, 0]).all()
            and not y.detach().numpy()[0, 1].any()
        )
        line = conv1d(Tensor(np.zeros((1, 1, 4), np.float32)), Tensor(np.ones((1, 1, 3), np.float32)))
        assert line.dtype == float16
        assert conv_transpose2d(x, Tensor(np.ones((1, 1, 2, 2), np.float32))).dtype == float16
        for pool in POOLS:
            assert pool(x, 2).dtype == float32 and pool(x.half(), 2).dtype == float16
    y[:, 1:].sum().backward()
    assert w.grad.dtype == b.grad.dtype == float32 and b.grad.tolist() == [0.0, 4.0]


def test_mixed_dtypes_are_refused_outside_autocast():
    with pytest.raises(RuntimeError, match="conv2d: tensors of different dtypes"):
        conv2d(Tensor(np.ones((1, 1, 3, 3), np.float32)).half(), Tensor(np.ones((1, 1, 3, 3), np.float32)))


# -------------------------------------------------------------------------------------------------------------------- pooling


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("stride", [None, 1, (3, 2)])
def test_max_pool2d_is_its_definition(stride, padding, dilation, ceil_mode):
    x = normal(2, 3, 8, 7).astype(np.float32)
    kernel = (3, 2)
    y = max_pool2d(Tensor(x), kernel, stride, padding, dilation, ceil_mode).numpy()
    stride = kernel if stride is None else np.broadcast_to(stride, 2)
    padding, dilation = (padding,) * 2, (dilation,) * 2
    np.testing.assert_array_equal(
        y, pooled(x, kernel, stride, padding, dilation, y.shape[2:], lambda v: v.max(-1))
    )


def test_ceil_mode_counts_a_window_that_starts_inside():
    size = dict(kernel=(3, 2), stride=(2, 2), padding=(0, 1), dilation=(1, 1))
    assert backend.pool_size((6, 5), ceil_mode=False, **size) == (2, 3)
    # a 4th would start at 5, in the right padding
    assert backend.pool_size((6, 5), ceil_mode=True, **size) == (3, 4 - 1)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1)])
def test_avg_pool2d_is_its_definition(padding, ceil_mode):
    x, kernel, stride = integers(2, 3, 8, 7), (3, 2), (2, 2)
    settings = (kernel, stride, padding, ceil_mode)
    y = avg_pool2d(Tensor(x), *settings, count_include_pad=False).numpy()
    mean = pooled(x, kernel, stride, padding, (1, 1), y.shape[2:], lambda v: v.mean(-1))
    np.testing.assert_allclose(y, mean, rtol=1e-15)
    # with the padding: the mean over the padded image; a window that reaches past the padding (ceil_mode) is cut there
    wide = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    y = avg_pool2d(Tensor(x), *settings).numpy()
    mean = pooled(wide, kernel, stride, (0, 0), (1, 1), y.shape[2:], lambda v: v.mean(-1))
    np.testing.assert_allclose(y, mean, rtol=1e-15)


def test_adaptive_avg_pool2d_covers_the_image():
    x = integers(2, 3, 7, 5)
    y = adaptive_avg_pool2d(Tensor(x), (3, None)).numpy()
    assert y.shape == (2, 3, 3, 5)
    np.testing.assert_allclose(
        y, np.stack([x[:, :, a:b].mean(2) for a, b in ((0, 3), (2, 5), (4, 7))], 2), rtol=1e-15
    )
    np.testing.assert_allclose(
        adaptive_avg_pool2d(Tensor(x), 1).numpy()[..., 0, 0], x.mean((2, 3)), rtol=1e-15
    )


@pytest.mark.parametrize("dtype", [float32, *HALVES])
def test_pools_of_lines_are_those_of_one_row(dtype):
    x = Tensor(cast(normal(2, 3, 9), dtype))
    row = x[:, :, None]
    for line, image in (
        (max_pool1d(x, 3, 2, 1, 2, True), max_pool2d(row, (1, 3), (1, 2), (0, 1), (1, 2), True)),
        (max_pool1d(x, (2,)), max_pool2d(row, (1, 2))),
        (avg_pool1d(x, 3, 2, 1, True, False), avg_pool2d(row, (1, 3), (1, 2), (0, 1), True, False)),
        (adaptive_avg_pool1d(x, 4), adaptive_avg_pool2d(row, (1, 4))),
        (adaptive_avg_pool1d(x[0], (4,))[None], adaptive_avg_pool2d(row, (1, 4))[:1]),
    ):
        assert line.dtype == dtype and line.equal(image[:, :, 0])


@pytest.mark.parametrize("dtype", [float32, *HALVES])
def test_adaptive_max_pool2d_covers_the_image(dtype):
    x = cast(normal(2, 3, 7, 5), dtype)
    x[1, 2, 6, 0] = np.nan
    y = adaptive_max_pool2d(Tensor(x), (3, None))
    assert y.dtype == dtype and y.shape == (2, 3, 3, 5)
    expected = np.stack([widen(x)[:, :, a:b].max(2) for a, b in ((0, 3), (2, 5), (4, 7))], 2)
    np.testing.assert_array_equal(widen(y.numpy()), expected)


def test_adaptive_max_pool2d_gives_its_gradient_to_the_first_maximum():
    # the middle lies in all four windows, and the values beside it are as large
    t = Tensor(np.array([[[0, 0, 0], [0, 1, 1], [0, 1, 1]]], np.float32), requires_grad=True)
    adaptive_max_pool2d(t, 2).backward(Tensor(np.array([[[1, 2], [4, 8]]], np.float32)))
    assert t.grad.tolist() == [[[0, 0, 0], [0, 15, 0], [0, 0, 0]]]
    # 1 + 2**-11 twice: rounded once, after the sum of all
    half = Tensor(t.detach().numpy()).half().requires_grad_()
    adaptive_max_pool2d(half, 2).backward(Tensor(np.array([[[1, 2.0**-11], [2.0**-11, 0]]])).half())
    assert half.grad[0, 1, 1].item() == 1 + 2.0**-10


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("negative", [False, True])
def test_half_max_pool_equals_float32(dtype, negative):
    x = cast(normal(3, 4, 9, 8) if negative else np.abs(normal(3, 4, 9, 8)), dtype)
    x[0, 0, 3, 3], x[1, 2, 0, 0], x[2, 1, 8, 7] = np.inf, 0.0, np.nan
    half, single = Tensor(x, requires_grad=True), Tensor(widen(x), requires_grad=True)
    y, expected = (max_pool2d(a, 3, 2, 1, 1, True) for a in (half, single))
    assert y.dtype == dtype
    np.testing.assert_array_equal(widen(y.detach().numpy()), expected.detach().numpy())
    y.sum().backward()
    expected.sum().backward()
    np.testing.assert_array_equal(widen(half.grad.numpy()), single.grad.numpy())


def test_average_pools_sum_half_in_float32():
    x = Tensor(np.full((1, 1, 8, 8), 60000.0)).half()  # a half sum would be inf
    assert avg_pool2d(x, 8).item() == adaptive_avg_pool2d(x, 1).item() == widen(x.numpy())[0, 0, 0, 0]


def test_nan_wins_and_ties_go_to_the_first():
    x = np.zeros((1, 1, 4, 4), np.float32)
    x[0, 0, 1, 1] = np.nan
    y = max_pool2d(Tensor(x), 2).numpy()
    assert np.isnan(y[0, 0, 0, 0]) and np.isnan(y).sum() == 1
    t = Tensor(np.array([[[[1, 3, 0, 0], [3, 3, 0, 0]]]], np.float32), requires_grad=True)
    max_pool2d(t, 2).backward(Tensor(np.array([[[[5, 7]]]], np.float32)))
    assert t.grad.tolist() == [[[[0, 5, 7, 0], [0, 0, 0, 0]]]]


def test_an_infinite_gradient_stays_where_it_belongs():
    t = Tensor(np.array([[[[1.0, 2.0], [0.0, 0.0]]]], np.float32), requires_grad=True)
    max_pool2d(t, 2).backward(Tensor(np.full((1, 1, 1, 1), np.inf, np.float32)))
    assert t.grad.tolist() == [[[[0.0, np.inf], [0.0, 0.0]]]]


def test_overlapping_windows_add_their_gradients():
    t = Tensor(np.array([[[[0, 9, 0]]]], np.float32), requires_grad=True)
    max_pool2d(t, (1, 2), 1).backward(Tensor(np.array([[[[5, 7]]]], np.float32)))
    assert t.grad.tolist() == [[[[0, 12, 0]]]]


def test_a_kernel_of_more_than_255_elements():
    x = np.arange(400, dtype=np.float32).reshape(1, 1, 20, 20)
    t = Tensor(x, requires_grad=True)
    y = max_pool2d(t, 20)
    y.sum().backward()
    assert y.item() == 399 and t.grad.numpy().reshape(-1).nonzero()[0].tolist() == [399]


# --------------------------------------------------------------------------------------------------------------------- errors


def ones(*shape):
    return Tensor(np.ones(shape, np.float32))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: conv2d(ones(2, 3), ones(4, 3, 3, 3)),
            r"conv2d: input must be \(N, C, H, W\) or \(C, H, W\), got shape \(2, 3\)",
        ),
        (
            lambda: conv1d(ones(4), ones(4, 3, 3)),
            r"conv1d: input must be \(N, C, L\) or \(C, L\), got shape \(4,\)",
        ),
        (
            lambda: conv2d(ones(1, 3, 5, 5), ones(4, 3, 3)),
            r"conv2d: weight must have 4 dimensions, got shape \(4, 3, 3\)",
        ),
        (
            lambda: conv2d(ones(1, 2, 5, 5), ones(4, 3, 3, 3), groups=2),
            r"conv2d: input \(1, 2, 5, 5\) has 2 channels, weight \(4, 3, 3, 3\) with groups=2 takes 6",
        ),
        (
            lambda: conv2d(ones(1, 3, 5, 5), ones(4, 1, 3, 3), groups=3),
            r"conv2d: groups=3 must divide the 4 channels",
        ),
        (lambda: conv2d(ones(1, 3, 5, 5), ones(4, 3, 3, 3), groups=0), r"conv2d: groups=0 must divide"),
        (
            lambda: conv2d(ones(1, 3, 5, 5), ones(4, 3, 3, 3), ones(3)),
            r"conv2d: bias must have shape \(4,\).* got \(3,\)",
        ),
        (
            lambda: conv2d(ones(1, 1, 2, 5), ones(1, 1, 3, 3)),
            r"conv2d: kernel \(3, 3\) is larger than the padded input \(2, 5\).*would be empty",
        ),
        (
            lambda: conv2d(ones(1, 1, 4, 5), ones(1, 1, 3, 3), dilation=2),
            r"conv2d: kernel \(5, 5\) is larger than",
        ),
        (
            lambda: conv1d(ones(1, 1, 2), ones(1, 1, 3)),
            r"conv1d: kernel \(3,\) is larger than the padded input \(2,\)",
        ),
        (
            lambda: conv3d(ones(1, 3, 5, 5), ones(4, 3, 3, 3, 3)),
            r"conv3d: input \(1, 3, 5, 5\) has 1 channels, weight .* takes 3",
        ),
        (
            lambda: conv3d(ones(5, 5, 5), ones(4, 1, 3, 3, 3)),
            r"conv3d: input must be \(N, C, D, H, W\) or \(C, D, H, W\), got shape \(5, 5, 5\)",
        ),
        (
            lambda: conv3d(ones(1, 1, 2, 5, 5), ones(1, 1, 3, 3, 3)),
            r"conv3d: kernel \(3, 3, 3\) is larger than the padded input \(2, 5, 5\)",
        ),
        (
            lambda: conv2d(ones(1, 1, 0, 5), ones(1, 1, 3, 3), padding=3),
            r"conv2d: input of shape \(1, 1, 0, 5\) is empty",
        ),
        (
            lambda: conv2d(ones(1, 1, 5, 5), ones(1, 1, 3, 3), stride=0),
            r"conv2d: stride must be .* at least 1, got 0",
        ),
        (
            lambda: conv2d(ones(1, 1, 5, 5), ones(1, 1, 3, 3), padding=-1),
            r"conv2d: padding must be .* at least 0, got -1",
        ),
        (
            lambda: conv2d(ones(1, 1, 5, 5), ones(1, 1, 3, 3), stride=(1, 1, 1)),
            r"conv2d: stride must be an int or 2 ints",
        ),
        (
            lambda: conv2d(ones(1, 1, 5, 5), ones(1, 1, 3, 3), padding="some"),
            r"padding must be 'same', 'valid' or ints",
        ),
        (
            lambda: conv2d(ones(1, 1, 5, 5), ones(1, 1, 3, 3), 0, 2, "same"),
            r"conv2d: bias must be a Tensor or None, got int",
        ),
        (
            lambda: conv2d(ones(1, 1, 5, 5), ones(1, 1, 3, 3), None, 2, "same"),
            r"conv2d: padding='same' needs stride 1, got \(2, 2\)",
        ),
        (
            lambda: conv_transpose2d(ones(1, 3, 5, 5), ones(4, 3, 3, 3)),
            r"conv_transpose2d: input \(1, 3, 5, 5\) has 3 channels, weight \(4, 3, 3, 3\) with groups=1 takes 4",
        ),
        (
            lambda: conv_transpose2d(ones(1, 4, 5, 5), ones(4, 3, 3, 3), output_padding=1),
            r"conv_transpose2d: output_padding \(1, 1\) must be smaller than stride",
        ),
        (
            lambda: conv_transpose2d(ones(1, 4, 1, 1), ones(4, 3, 1, 1), padding=1),
            r"conv_transpose2d: the output .* size \(-1, -1\)",
        ),
        (
            lambda: conv_transpose1d(ones(1, 4, 5), ones(4, 3, 3), output_padding=1),
            r"conv_transpose1d: output_padding \(1,\) must be smaller than stride \(1,\) or dilation \(1,\)",
        ),
        (
            lambda: conv_transpose1d(ones(1, 4, 1), ones(4, 3, 1), padding=1),
            r"conv_transpose1d: the output .* size \(-1,\)",
        ),
        (lambda: max_pool2d(ones(5, 5), 2), r"max_pool2d: input must be \(N, C, H, W\)"),
        (
            lambda: max_pool2d(ones(1, 1, 5, 5), 6),
            r"max_pool2d: kernel \(6, 6\) is larger than the padded input \(5, 5\)",
        ),
        (
            lambda: max_pool2d(ones(1, 1, 5, 5), 2, padding=2),
            r"max_pool2d: padding \(2, 2\) must be at most half of kernel_size \(2, 2\)",
        ),
        (lambda: avg_pool2d(ones(1, 1, 5, 5), 0), r"avg_pool2d: kernel_size must be .* at least 1, got 0"),
        (lambda: avg_pool2d(ones(1, 1, 5, 5), 9), r"avg_pool2d: kernel \(9, 9\) is larger"),
        (
            lambda: max_pool1d(ones(5), 2),
            r"max_pool1d: input must be \(N, C, L\) or \(C, L\), got shape \(5,\)",
        ),
        (
            lambda: max_pool1d(ones(1, 5), 2, padding=2),
            r"max_pool1d: padding \(2,\) must be at most half of kernel_size \(2,\)",
        ),
        (lambda: max_pool1d(ones(1, 5), (2, 2)), r"max_pool1d: kernel_size must be an int or 1 ints"),
        (
            lambda: avg_pool1d(ones(1, 5), 6),
            r"avg_pool1d: kernel \(6,\) is larger than the padded input \(5,\)",
        ),
        (lambda: adaptive_avg_pool1d(ones(1, 5), (2, 3)), r"adaptive_avg_pool1d: output_size must be"),
        (lambda: adaptive_max_pool2d(ones(5, 5), 2), r"adaptive_max_pool2d: input must be \(N, C, H, W\)"),
        (
            lambda: adaptive_avg_pool2d(ones(1, 1, 5, 5), (1, 2, 3)),
            r"adaptive_avg_pool2d: output_size must be",
        ),
    ],
)
def test_errors_name_the_op_the_shapes_and_what_fits(call, text):
    with pytest.raises(RuntimeError, match=text):
        call()


def test_gradients_of_windows_that_overlap_are_summed_and_then_rounded():
    # The middle is the maximum of all four windows: 1 + 2^-11 lies between two halves, on the tie that goes to 1.
    x = Tensor(
        np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]], np.float16).reshape(1, 1, 3, 3), requires_grad=True
    )
    g = Tensor(np.array([[1, 2.0**-11], [0, 0]], np.float16).reshape(1, 1, 2, 2))
    seen = []
    with minamp.record.observe(lambda phase, op, inputs, output: phase == "backward" and seen.append(output)):
        max_pool2d(x, 2, 1).backward(g)
        max_pool2d(x, 3, 3).backward(g[:, :, :1, :1])
    assert seen[0].dtype == float32 and seen[0][0, 0, 1, 1] == 1.0  # in float32 on its way, already rounded
    assert seen[1][0, 0, 1, 1] == 1.0 and seen[1].sum() == 1.0
