"""The CUDA kernels without a GPU: their own text, compiled for the CPU (shim.py) and held to NumPy doubles bit for bit, and
compiled by NVRTC for the cards we mean where that is installed."""

import itertools
import math

import doubles
import numpy as np
import pytest
import shim
import standin

from minamp.backends import (
    cpu,
    cuda_conv,
    kernels,
    kernels_conv,
    kernels_elementwise,
    kernels_pool,
    kernels_update,
    kernels_wmma,
    update,
)
from minamp.formats import bfloat16, cast, float16, float32, float64, widen

FLOATS = [float16, bfloat16, float32, float64]


def same_bits(a, b, what):
    """Equal bit by bit; any nan equals any other."""
    nan = np.isnan(widen(a)) & np.isnan(widen(b)) if a.dtype in FLOATS else False
    bits = f"u{a.itemsize}"
    assert ((a.view(bits) == b.view(bits)) | nan).all(), what


@pytest.fixture
def both(monkeypatch, capfd):
    """Every launch runs the kernel's text and then, from the same values, its double; all arrays must be equal afterwards."""
    lib, why = shim.load()
    if lib is None:
        pytest.skip(why)
    ran = []

    class Both:
        def __init__(self, source, name, options=()):
            self.name = name

        def __call__(self, grid, block, args):
            plain = [a._a if isinstance(a, standin.ndarray) else a for a in args]
            # The kernel's text runs first; its results are set aside, and the double starts from the same values.
            held = [a for row in self.reached(plain) for a in row if a is not None]
            held += [a for a in plain if isinstance(a, np.ndarray) and not a.dtype.names]
            before = [a.copy() for a in held]
            alone = dict(block=1) if "wmma" in self.name else {}  # its threads meet at barriers
            shim.run(self.name, plain, **alone)
            after = [a.copy() for a in held]
            for a, b in zip(held, before, strict=True):
                a[...] = b
            doubles.of(self.name)(*plain)
            for i, (a, b) in enumerate(zip(held, after, strict=True)):
                same_bits(a, b, f"{self.name}, array {i}")
            ran.append(self.name)

        def reached(self, args):
            table = isinstance(args[0], np.ndarray) and args[0].dtype.names
            return doubles.tensors(self.name, args[0], args[1], args[-1]) if table else ()

    with standin.installed():
        monkeypatch.setattr(standin.MODULE, "RawKernel", Both)
        monkeypatch.setattr(kernels, "_compiled", {})
        yield ran
    assert ran
    assert "runtime error" not in capfd.readouterr().err  # the sanitizer's words


def dev(a):
    return standin.ndarray(np.asarray(a, order="C"))


def values(shape, dtype, seed=0, scale=1.0):
    return cast(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


GEOMETRY = [  # H, W, kernel, stride, padding, dilation
    ((9, 7), (3, 3), (2, 2), (1, 1), (1, 1)),
    ((5, 6), (2, 3), (1, 2), (0, 2), (2, 1)),
    ((4, 4), (1, 1), (1, 1), (0, 0), (1, 1)),
    ((3, 3), (3, 3), (3, 3), (2, 2), (1, 1)),
]


def out_size(image, kernel, stride, padding, dilation):
    from minamp.backends.conv import conv_size

    return conv_size(image, kernel, stride, padding, dilation)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "channels, c0, cg", [(8, 0, 8), (16, 8, 8), (3, 0, 3), (6, 2, 2), (4, 0, 4), (1, 0, 1)]
)
@pytest.mark.parametrize("image, kernel, stride, padding, dilation", GEOMETRY)
def test_im2col(both, image, kernel, stride, padding, dilation, channels, c0, cg, dtype):
    x = values((2, *image, channels), dtype)
    size = out_size(image, kernel, stride, padding, dilation)
    total = 2 * size[0] * size[1]
    every = []
    for first in range(0, total, 5):  # chunks that end within a row
        count = min(5, total - first)
        values_ = kernel[0] * kernel[1] * cg
        columns = dev(np.full((count, kernels_conv.row_width(values_, dtype)), 7, dtype))
        kernels_conv.im2col(columns, dev(x), first, c0, cg, size, kernel, stride, padding, dilation)
        assert columns.strides[0] % 16 == 0 or dtype.itemsize > 2
        assert not columns._a[:, values_:].any()
        every.append(columns._a[:, :values_].reshape(count, *kernel, cg))
    # and against a plain definition
    (ph, pw), (sh, sw), (dh, dw) = padding, stride, dilation
    padded = np.pad(x, ((0, 0), (ph, ph), (pw, pw), (0, 0)))[..., c0 : c0 + cg]
    for p, column in enumerate(np.concatenate(every)):
        n, row, col = p // (size[0] * size[1]), p // size[1] % size[0], p % size[1]
        for i, j in itertools.product(*map(range, kernel)):
            expected = padded[n, row * sh + i * dh, col * sw + j * dw]
            np.testing.assert_array_equal(column[i, j], expected)


def test_im2col_takes_the_widest_words(both):
    for dtype, channels, word in (
        (float16, 8, 16),
        (float16, 4, 8),
        (float16, 6, 4),
        (float16, 3, 2),
        (float32, 3, 4),
    ):
        x = dev(values((1, 2, 2, channels), dtype))
        ones = ((1, 1), (1, 1), (0, 0), (1, 1))
        kernels_conv.im2col(dev(np.empty((4, channels), dtype)), x, 0, 0, channels, (2, 2), *ones)
        assert both[-1] == f"im2col_{word}"


def test_im2col_counts_beyond_32_bits():
    lib, why = shim.load()
    if lib is None:
        pytest.skip(why)
    n = 2**31 + 16
    x = np.zeros(n, np.uint16)  # 4 GB of address space, of which only the last page is touched
    x[-4:] = [1, 2, 3, 4]
    columns = np.empty(4, np.uint16)
    ones = [np.int64(v) for v in (n - 4, 4, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1)]
    shim.run("im2col_2", [columns, x, *ones])
    assert columns.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels, c0, cg", [(4, 0, 4), (6, 2, 3)])
@pytest.mark.parametrize("image, kernel, stride, padding, dilation", GEOMETRY)
def test_col2im(both, image, kernel, stride, padding, dilation, channels, c0, cg, bias, dtype):
    size = out_size(image, kernel, stride, padding, dilation)
    sums = float64 if dtype == float64 else float32
    width = kernels_conv.row_width(kernel[0] * kernel[1] * cg, dtype)
    columns = values((2 * size[0] * size[1], width), sums)
    x, bias = dev(np.full((2, *image, channels), 7, dtype)), dev(values(channels, dtype, 1)) if bias else None
    kernels_conv.col2im(x, dev(columns), bias, c0, cg, size, kernel, stride, padding, dilation)
    assert (np.delete(x._a, np.s_[c0 : c0 + cg], 3) == 7).all()  # other channels are left alone


WMMA_CASES = [  # images, image, channels in and out, kernel, stride, padding, dilation
    (2, (9, 7), 16, 16, (3, 3), (2, 2), (1, 1), (1, 1)),
    (1, (12, 13), 32, 80, (3, 3), (1, 1), (1, 1), (1, 1)),  # three tiles of positions, two of channels
    (3, (5, 6), 48, 64, (2, 3), (1, 2), (0, 2), (2, 1)),
    (1, (8, 8), 16, 32, (1, 1), (1, 1), (0, 0), (1, 1)),  # one full tile
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("n, image, c, o, kernel, stride, padding, dilation", WMMA_CASES)
def test_wmma_tiles(both, n, image, c, o, kernel, stride, padding, dilation, dtype, bias, monkeypatch):
    """The indexing of the tensor-core kernel around a scalar product; the columns and their product give the same bits."""
    x, w = (
        dev(cast(np.random.default_rng(i).integers(-8, 9, s) / 8, dtype))  # sums of these products are exact
        for i, s in enumerate([(n, c, *image), (o, c, *kernel)])
    )
    bias = dev(values(o, dtype, 2)) if bias else None
    y = {}
    for asked in (True, False):
        monkeypatch.setattr(cuda_conv, "WMMA", asked)
        y[asked] = cuda_conv.conv2d(x, w, bias, stride, padding, dilation, 1)._a
        assert ("conv2d_wmma" in both[-1]) == asked
        both.append("")
    assert y[True].dtype == dtype and y[True].any()
    same_bits(np.ascontiguousarray(y[True]), np.ascontiguousarray(y[False]), "tensor-core kernel and columns")


def test_wmma_copies_weights_that_start_anywhere(both, monkeypatch):
    memory = dev(values(9 * 16 * 16 + 1, float16, 1))
    x, y = dev(values((1, 6, 6, 16), float16)), dev(np.empty((1, 6, 6, 16), float16))
    launch = kernels.launch

    def see(base, kind, n, y, x, w, *args, **block):
        assert w.data.ptr % 16 == 0
        launch(base, kind, n, y, x, w, *args, **block)

    monkeypatch.setattr(kernels, "launch", see)
    for start in (0, 1):
        w = memory[start : start + 9 * 16 * 16].reshape(9 * 16, 16)
        kernels_wmma.conv2d_wmma(y, x, w, None, (3, 3), (1, 1), (1, 1), (1, 1))
    assert w.data.ptr % 16


def test_wmma_with_any_numbers(both):
    """Sums in float32 that round: the order of the double. nan and inf go where they belong."""
    for dtype in FLOATS[:2]:
        x, w = values((1, 6, 6, 32), dtype), values((9 * 32, 48), dtype, 1)
        x[0, 0, 0, 3], x[0, 5, 5, 0] = np.nan, np.inf
        y = dev(np.empty((1, 6, 6, 48), dtype))
        kernels_wmma.conv2d_wmma(y, dev(x), dev(w), None, (3, 3), (1, 1), (1, 1), (1, 1))
        lost = ~np.isfinite(widen(y._a)).all(3)[0]
        assert lost.sum() == 8 and lost[:2, :2].all() and lost[4:, 4:].all()


POOLS = [  # H, W, kernel, stride, padding, dilation, ceil_mode
    ((8, 8), (2, 2), (2, 2), (0, 0), (1, 1), False),
    ((9, 7), (3, 2), (2, 1), (1, 1), (1, 2), True),
    ((5, 6), (3, 3), (1, 1), (1, 1), (1, 1), False),
    # rows -1 and 2 of 2: these windows see nothing of the image
    ((2, 4), (2, 2), (1, 1), (1, 1), (3, 2), False),
    ((17, 18), (16, 16), (1, 2), (0, 8), (1, 1), False),  # 256 offsets: positions take 32 bits
]


def pooled_values(shape, dtype, kind):
    x = values(shape, dtype)
    if kind == "ties":
        return cast(np.round(widen(x)), dtype)
    if kind == "nan":
        x[np.random.default_rng(1).random(shape) < 0.1] = np.nan
    if kind == "inf":
        x[np.random.default_rng(1).random(shape) < 0.5] = -np.inf
    return x


@pytest.mark.parametrize("kind", ["plain", "ties", "nan", "inf"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("image, kernel, stride, padding, dilation, ceil_mode", POOLS)
def test_max_pooling_is_the_cpus(both, image, kernel, stride, padding, dilation, ceil_mode, dtype, kind):
    """Forward, position, gradient and the gradient's own, each one launch."""
    geometry = (kernel, stride, padding, dilation)
    x = pooled_values((2, 3, *image), dtype, kind)
    y = cuda_conv.max_pool2d(dev(x), *geometry, ceil_mode)
    on_cpu = cpu.max_pool2d(x, *geometry, ceil_mode)
    position = cuda_conv.max_pool2d_position(dev(x), y, *geometry)
    position_on_cpu = cpu.max_pool2d_position(x, on_cpu, *geometry)
    g = values(y.shape, dtype, 1)
    gx = cuda_conv.max_pool2d_scatter(dev(g), position, x.shape, *geometry)
    back = cuda_conv.max_pool2d_gather(gx, position, *geometry)
    assert len(both) == 4  # launches
    gx_on_cpu = cpu.max_pool2d_scatter(g, position_on_cpu, x.shape, *geometry)
    back_on_cpu = cpu.max_pool2d_gather(cast(gx_on_cpu, dtype), position_on_cpu, *geometry)
    assert position.dtype == position_on_cpu.dtype and y.dtype == gx.dtype == back.dtype == dtype
    for ours, theirs in ((y, on_cpu), (position, position_on_cpu), (gx, gx_on_cpu), (back, back_on_cpu)):
        np.testing.assert_array_equal(widen(ours._a), widen(cast(theirs, ours.dtype)))


SIZES = [(), (23,), (0,), (5, 7), (2, 3, 4)]


def several(dtype, seed=0, count=len(SIZES)):
    """Tensors of many shapes, one of them empty."""
    return [np.asarray(values(SIZES[i % len(SIZES)], dtype, 10 * seed + i)) for i in range(count)]


def devs(arrays):
    return [dev(a.copy()) for a in arrays]


@pytest.mark.parametrize("scale", [None, 2.0**16, 3.0, 2.0**-126])
@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unscale(both, dtype, bad, scale):
    g = several(dtype)
    if bad is not None:
        g[3][2, 5] = bad
    if dtype == float16:
        scale = None
    ours = devs(g)
    array = None if scale is None else dev(np.float32(scale))
    flags = kernels_update.unscale(ours, array)._a
    assert flags.tolist() == cpu.unscale(g, None if scale is None else np.float32(scale)).tolist()
    assert bad is None or flags[0] == flags[4] == 1
    for a, b in zip(ours, g, strict=True):
        same_bits(a._a, b, "unscaled")


def test_unscale_takes_formats_side_by_side_and_more_tensors_than_a_table_holds(both):
    g = [
        a
        for i in range(50)
        for a in (values(3, float32, i), values((2, 2), float64, i), values(5, bfloat16, i))
    ]
    g[70][1] = np.inf
    ours = devs(g)
    with standin.installed() as gpu:
        flags = kernels_update.unscale(ours, dev(np.float32(4)))._a
        assert both == ["unscale_float", "unscale_double", "unscale_bf16"]
        assert gpu.count["get"] == 0
    assert np.flatnonzero(flags).tolist() == [0, 71]
    assert flags.tolist() == cpu.unscale(g, np.float32(4)).tolist()
    for a, b in zip(ours, g, strict=True):
        same_bits(a._a, b, "unscaled")
    both.clear()
    kernels_update.unscale(devs(several(float32, count=130)), None)
    assert both == ["unscale_float"] * 3


def test_unscale_finds_what_becomes_infinite(both):
    g = dev(np.array([1e10], float32))
    assert kernels_update.unscale([g], dev(np.float32(2.0**-100)))._a.all() and np.isinf(g._a[0])


def test_tensors_with_gaps(both):
    g = np.arange(24, dtype=np.float32).reshape(4, 6)
    ours = standin.ndarray(g.copy()).T
    kernels_update.unscale([ours], dev(np.float32(2)))
    assert (ours._a == g.T / 2).all()


def test_widen_all(both):
    halves = several(float16) + several(bfloat16, 1)
    for a, b in zip(kernels_update.widen_all(devs(halves)), halves, strict=True):
        assert a.shape == b.shape
        same_bits(a._a, widen(b), "widened")


SGD = [
    dict(momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False),
    dict(momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False),
    dict(momentum=0.9, dampening=0.3, weight_decay=0.01, nesterov=False, maximize=True),
    dict(momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=True, maximize=False),
    dict(momentum=0.0, dampening=0.0, weight_decay=0.01, nesterov=False, maximize=True),
]
WIDE = {float16: float32, bfloat16: float32, float32: float32, float64: float64}
FORMATS = [(d, None) for d in FLOATS] + [(float32, float16), (float32, bfloat16)]  # weights, half copies


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("dtype, half", FORMATS, ids=str)
@pytest.mark.parametrize("options", SGD)
def test_sgd(both, options, dtype, half, counted):
    """Blocks on the CPU, a table on the GPU, steps counted there or not: the same bits."""
    w, b = several(dtype), [np.zeros(a.shape, WIDE[dtype]) for a in several(dtype)]
    b = b if options["momentum"] else None
    copies = None if half is None else [np.zeros(a.shape, half) for a in w]
    ours, buffers, halves = devs(w), b and devs(b), copies and devs(copies)
    counting = {}
    if counted and b:
        counting = {
            "steps": [dev(np.float32(0)) for _ in w],
            "corrections": dev(np.zeros(2 * len(w), WIDE[dtype])),
        }
    for step in range(3):
        g, fresh = several(dtype, 3 + step), step == 0
        kernels_update.sgd(ours, devs(g), buffers, fresh, lr=0.1, halves=halves, **counting, **options)
        update.sgd(w, g, b, fresh, lr=0.1, halves=copies, **options)
    for mine, cpus in ((ours, w), (buffers, b), (halves, copies)):
        for x, y in zip(mine or (), cpus or (), strict=True):
            same_bits(x._a, y, "sgd")
    assert not copies or any(c.any() for c in copies)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("dtype, half", FORMATS, ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(
    "decay, decoupled, maximize", [(0.0, False, False), (0.1, False, True), (0.1, True, False)]
)
def test_adam(both, decay, decoupled, maximize, amsgrad, dtype, half, counted):
    options = dict(
        lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay, decoupled=decoupled, maximize=maximize
    )
    w = several(dtype)
    m, v, top = ([np.zeros(a.shape, WIDE[dtype]) for a in w] for _ in range(3))
    top[1][5] = np.nan  # of amsgrad's maxima: it stays
    copies = None if half is None else [np.zeros(a.shape, half) for a in w]
    ours = [devs(arrays) for arrays in (w, m, v, top)]
    halves, steps = copies and devs(copies), [dev(np.float32(0)) for _ in w]
    room = {"corrections": dev(np.zeros(2 * len(w), WIDE[dtype]))} if counted else {}
    for step in (1, 2, 3):
        g = several(dtype, step)
        tops = (top, ours[3]) if amsgrad else (None, None)
        update.adam(w, g, m, v, tops[0], step, halves=copies, **options)
        which = steps if counted else step
        kernels_update.adam(
            ours[0], devs(g), ours[1], ours[2], tops[1], which, halves=halves, **room, **options
        )
    for mine, cpus in zip([*ours, halves or []], [w, m, v, top, copies or []], strict=True):
        for x, y in zip(mine, cpus, strict=True):
            same_bits(x._a, y, "adam")


@pytest.mark.parametrize("dtype, half", FORMATS, ids=str)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(
    "decay, momentum, maximize", [(0.0, 0.0, False), (0.1, 0.0, True), (0.1, 0.9, False)]
)
def test_rmsprop(both, decay, momentum, maximize, centered, dtype, half):
    options = dict(lr=0.01, alpha=0.9, eps=1e-8, weight_decay=decay, momentum=momentum, maximize=maximize)
    w = several(dtype)
    v, mean, b = ([np.zeros(a.shape, WIDE[dtype]) for a in w] for _ in range(3))
    copies = None if half is None else [np.zeros(a.shape, half) for a in w]
    ours, squares, means, buffers = (devs(arrays) for arrays in (w, v, mean, b))
    halves = copies and devs(copies)
    for step in (1, 2, 3):
        g = several(dtype, step)
        mine = (means if centered else None, buffers if momentum else None)
        cpus = (mean if centered else None, b if momentum else None)
        kernels_update.rmsprop(ours, devs(g), squares, *mine, halves=halves, **options)
        update.rmsprop(w, g, v, *cpus, halves=copies, **options)
    pairs = zip([ours, squares, means, buffers, halves or []], [w, v, mean, b, copies or []], strict=True)
    for mine, cpus in pairs:
        for x, y in zip(mine, cpus, strict=True):
            same_bits(x._a, y, "rmsprop")


@pytest.mark.parametrize("flag", [0, 1])
def test_a_set_flag_skips_the_step(both, flag):
    """The decision stays on the GPU: with the flag set nothing is written: moments, half copy and step counter included."""
    start = [values(7, float32, i) ** 2 for i in range(3)]
    w, m, v = (dev(a.copy()) for a in start)
    half, g, skip = dev(np.zeros(7, float16)), dev(values(7, float32, 5)), dev(np.array([flag], np.uint32))
    steps, room = [dev(np.float32(4)), dev(np.float32(4))], dev(np.zeros(2, float32))
    plain = dict(momentum=0.9, dampening=0, weight_decay=0, nesterov=False, maximize=False)
    kernels_update.sgd(
        [w], [g], [m], False, lr=0.1, halves=[half], skip=skip, steps=steps[:1], corrections=room, **plain
    )
    rest = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True, maximize=False)
    kernels_update.adam(
        [w], [g], [m], [v], None, steps[1:], halves=[half], corrections=room, skip=skip, **rest
    )
    mean = dev(start[2].copy())
    rest = dict(lr=0.01, alpha=0.9, eps=1e-8, weight_decay=0.1, momentum=0.9, maximize=False)
    kernels_update.rmsprop([w], [g], [m], [mean], [v], halves=[half], skip=skip, **rest)
    assert np.array_equal(mean._a, start[2]) == bool(flag)
    changed = [not np.array_equal(a._a, b) for a, b in zip((w, m, v), start, strict=True)] + [half._a.any()]
    assert changed == [not flag] * 4 and [float(s._a) for s in steps] == [4 if flag else 5] * 2


@pytest.mark.parametrize("scale", [1.0, 2.0**127, 3e38, 0.0, 2.0**-126])
def test_update_scale(both, scale):
    """The scaler's rule on the GPU is the CPU's, whoever knows of the skip."""
    for bad, found, good, interval in itertools.product(
        (None, 0, 1), (False, True), (0, 1, 5), (0, 2, 2**40)
    ):
        for bounds in ((float("-inf"), float("inf")), (0.75, 2.0)):
            rule = (2.0, 0.5, interval, *bounds)
            ours, count = dev(np.float32(scale)), dev(np.int32(good))
            flag = None if bad is None else dev(np.array([bad], np.uint32))
            assert kernels_update.update_scale(ours, count, flag, found, *rule) == (ours, count)
            expected = update.update_scale(np.float32(scale), np.int32(good), None, found or bool(bad), *rule)
            assert (ours._a, count._a) == expected


def test_keep_mask(both):
    for n in (1, 5, 1002):
        assert kernels.keep_mask(12345678901234567890, (n,), 0.5).shape == (n,)
    keep = kernels.keep_mask(7, (200, 50), 0.3)._a
    assert abs(1 - keep.mean() - 0.3) < 4 * (0.3 * 0.7 / 10000) ** 0.5
    assert (keep != kernels.keep_mask(8, (200, 50), 0.3)._a).any()
    assert kernels.keep_mask(7, (100,), 0.0)._a.all()


def test_philox_known_answer(both):
    """Counter 0 and key 0 give the words of the known-answer file of Random123."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for i, word in enumerate(words):
        for threshold, expected in ((word, True), (word + 1, False)):
            keep = dev(np.zeros(4, np.bool_))
            kernels.launch(
                "keep_mask", "", 4, keep, np.int64(4), np.uint32(0), np.uint32(0), np.uint32(threshold)
            )
            assert keep._a[i] == expected


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "rows, cols", [([(0, 2), (2, 4)], [(0, 3), (1, 4), (2, 5)]), ([(0, 4)], [(0, 1), (4, 5)])]
)
def test_window_means(both, rows, cols, dtype):
    counts = np.outer([b - a for a, b in rows], [b - a for a, b in cols])
    x = values((2, 4, 5, 3), dtype)
    y = kernels_pool.window_mean(dev(x), rows, cols, counts)._a
    tolerance = {2: 1e-2, 4: 1e-6, 8: 1e-14}[dtype.itemsize]
    exact = cast(x, float64)
    for i, j in np.ndindex(len(rows), len(cols)):
        mean = exact[:, slice(*rows[i]), slice(*cols[j])].mean((1, 2))
        np.testing.assert_allclose(cast(y[:, i, j], float64), mean, rtol=tolerance, atol=tolerance)
    g = values(y.shape, dtype, 1)
    back = kernels_pool.window_mean_grad(dev(g), x.shape, rows, cols, counts)._a
    expected = np.zeros(x.shape)
    for i, j in np.ndindex(len(rows), len(cols)):
        expected[:, slice(*rows[i]), slice(*cols[j])] += (cast(g[:, i, j], float64) / counts[i, j])[
            :, None, None
        ]
    np.testing.assert_allclose(cast(back, float64), expected, rtol=tolerance, atol=tolerance)


LAYOUTS = {  # (2, 3, 4, 5) as it is, channels last, and with gaps
    "plain": lambda a: a,
    "channels last": lambda a: np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
    "gaps": lambda a: np.repeat(a, 2, 3)[..., ::2],
    "one": lambda a: np.broadcast_to(a[:1, :1, :1, :1], a.shape),
}


@pytest.mark.parametrize("layout_y", ["plain", "channels last", "gaps"])
@pytest.mark.parametrize("layout_g", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_relu_grad(both, dtype, layout_g, layout_y):
    y, g = values((2, 3, 4, 5), dtype), values((2, 3, 4, 5), dtype, 1)
    y[0, 0, 0] = [0.0, -0.0, np.nan, np.inf, -np.inf]
    g[0, 0] = [np.inf, np.nan, -np.inf, -0.0, 1.0]
    y, g = LAYOUTS[layout_y](y), LAYOUTS[layout_g](g)
    ours = kernels_elementwise.relu_grad(standin.ndarray(g), standin.ndarray(y))._a
    expected = np.where(widen(y) <= 0, np.zeros((), dtype), g)
    same_bits(np.ascontiguousarray(ours), np.ascontiguousarray(expected), "relu's gradient")
    if layout_y == "channels last":
        assert ours.strides == y.strides
    for wide in (float32, float64):  # a sum that has not been rounded yet
        out = kernels_elementwise.relu_grad(standin.ndarray(cast(g, wide)), standin.ndarray(y))._a
        same_bits(np.ascontiguousarray(out), cast(np.ascontiguousarray(expected), wide), "of a wide g")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["sigmoid", "erf"])
def test_one_launch_and_the_layout_stays(name, layout):
    x = LAYOUTS[layout](values((2, 3, 4, 5), float32, scale=3.0))
    with standin.installed() as gpu:
        ours = standin.ndarray(x)
        gpu.count.clear()
        y = getattr(kernels_elementwise, name)(ours)._a
        assert gpu.count["kernel"] == 1 + (layout in ("gaps", "one"))  # those are copied first
    same_bits(np.ascontiguousarray(y), np.ascontiguousarray(getattr(cpu, name)(x)), name)
    if layout == "channels last":
        assert y.strides == x.strides


@pytest.mark.parametrize("dtype", [float32, float64], ids=str)
@pytest.mark.parametrize("name", ["sigmoid", "erf"])
def test_of_one_element(name, dtype):
    """The kernel's own text, with the C library's exp and erf in the place of CUDA's: within 3 units in the last place."""
    lib, why = shim.load()
    if lib is None:
        pytest.skip(why)
    exact = {"sigmoid": lambda v: 1 / (1 + math.exp(-v)) if v > -700 else math.exp(v), "erf": math.erf}[name]
    x = np.concatenate([np.linspace(-30, 30, 2001), [0.0, -0.0, 1e-30, -80.0, 80.0]]).astype(dtype)
    y = np.empty_like(x)
    kind = kernels.C_TYPES[dtype]
    shim.run(f"{name}_{kind}", [y, x, np.int64(len(x))])
    expected = np.array([exact(float(v)) for v in x])
    assert (np.abs(y - expected) <= 3 * np.spacing(np.abs(expected).astype(dtype))).all()
    assert y[-4] == exact(-0.0) and np.signbit(y[-4]) == (name == "erf")
    ends = np.array([np.inf, -np.inf, np.nan], dtype)
    out = np.empty_like(ends)
    shim.run(f"{name}_{kind}", [out, ends, np.int64(3)])
    assert out[:2].tolist() == ([1.0, 0.0] if name == "sigmoid" else [1.0, -1.0]) and np.isnan(out[2])


# ------------------------------------------------------------------------------------------------------------------- NVRTC


@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("base", kernels.SOURCES)
def test_nvrtc_compiles(base, arch):
    """Straight to machine code, with the options CuPy adds. CuPy's own entry asks a GPU; the class beneath it does not."""
    compile = nvrtc()
    code = compile(kernels.source(base, *kinds(base, arch)), arch)
    names = [f"{base}_{kind}" for kind in kinds(base, arch)] or [base]
    names = [name for name in names if name.encode() not in code]
    assert not names, f"not in the machine code: {names}"


def test_nvrtc_refuses_a_wrong_kernel():
    """So that the test above can fail."""
    with pytest.raises(Exception, match="undefined"):
        nvrtc()(kernels.source("im2col", "8") + "__global__ void f() { undefined(); }", 75)


def nvrtc():
    cupy = pytest.importorskip("cupy", reason="cupy is not installed: pip install -e '.[gpu-compile]'")
    from cupy._core import core
    from cupy.cuda import compiler

    if not cupy.__version__.startswith("14.2."):
        pytest.skip(f"the compiler's inner names are those of cupy 14.2, this is {cupy.__version__}")
    options = tuple(core.assemble_cupy_compiler_options(())) + kernels.OPTIONS + ("-ftz=true",)

    def compile(source, arch):
        try:
            program = compiler._NVRTCProgram(source, "kernels.cu", method="cubin")
        except RuntimeError as error:  # the library is looked for here
            pytest.skip(
                f"NVRTC is not installed ({str(error).splitlines()[0]}): pip install -e '.[gpu-compile]'"
            )
        return program.compile((*options, f"-arch=sm_{arch}"))[0]

    return compile


def kinds(base, arch=90):
    """The types that kernel `base` is made for: tensor cores take bfloat16 from compute capability 8.0 on."""
    return ("half",) if base == "conv2d_wmma" and arch < 80 else kernels.KINDS.get(base, ())
