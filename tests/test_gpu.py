"""What only a GPU can show: products, convolutions, kernels and every op against float64, training against the CPU's.

The checks that were left for a GPU, and where each is made (a row of `make bench` is a measurement, the rest are tests):

1. status ok, driver and toolkit        test_status_is_ok (prints the pair), and the line under the table of make bench
2. GEMM against float64; TFLOP/s        test_gemm_against_float64; rows "matmul n^3" of make bench
3. CuPy's own batched half product      test_cupys_batches_and_ours; rows "cupy.matmul", "cupy.einsum"
4. half sums and variance               test_half_sums_keep_their_digits (prints CuPy's own)
5. weight-gradient GEMM, split sums     test_a_long_sum_neither_overflows_nor_loses_digits
6. convolution against its bound        test_conv_against_float64 (in chunks); row "conv 64 x 64 x 56 x 56"
7. subnormals                           test_subnormal_halves_survive, test_float32_subnormals (prints)
8. launches, CPU and GPU time, graph    rows "autocast step", "as a CUDA graph"
9. bfloat16 in two and three dims       test_gemm_against_float64, test_batches_against_float64, test_bfloat16_is_as_tried
"""

import gc
import warnings

import doubles
import numpy as np
import pytest
import standin
import test_capture
import test_cuda
import test_kernels
import test_policy

import minamp
from minamp import backends, bfloat16, float16, float32, float64
from minamp.backends import (
    cpu,
    cuda,
    cuda_conv,
    device,
    gemm,
    kernels,
    kernels_conv,
    kernels_pool,
    kernels_update,
)
from minamp.formats import cast, format_of, widen
from minamp.tensor import Tensor

STATUS = minamp.gpu_status()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(STATUS != "ok", reason=STATUS)]

HALVES = [float16, bfloat16]
FLOATS = [*HALVES, float32, float64]


def values(shape, dtype, seed=0, scale=1.0):
    return cast(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def put(a):
    return device.to_device(np.asarray(a, order="C"))


def get(a):
    return cast(widen(a.get()), float64)


def close(ours, exact, dtype, terms=1, size=None):
    """One rounding to `dtype` and `terms` float32 roundings away from `exact`, whose summands have the magnitude `size`."""
    size = np.abs(exact) if size is None else size
    sums = format_of(float64 if dtype == float64 else float32).eps
    f = format_of(dtype)
    bound = f.eps / 2 * np.abs(exact) + f.smallest_subnormal / 2 + 2 * (terms + 2) * sums * size
    wrong = ~(np.abs(ours - exact) <= bound)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size}, by up to {np.max(np.abs(ours - exact) / bound):.3g} bounds"
    )


# ---------------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize(
    "dtype, result", [(d, r) for d in FLOATS for r in {d, float32} if d != float64 or r == float64]
)
def test_gemm_against_float64(dtype, result, beta, ta, tb):
    m, k, n = 65, 200, 33
    a, b = values((k, m) if ta else (m, k), dtype), values((n, k) if tb else (k, n), dtype, 1)
    start = values((m, n), result, 2)
    out = put(start)
    a_dev, b_dev = put(a), put(b)
    gemm.gemm(a_dev.T if ta else a_dev, b_dev.T if tb else b_dev, out, beta=beta)
    a, b, start = (cast(x, float64) for x in (a.T if ta else a, b.T if tb else b, start))
    close(get(out), a @ b + beta * start, result, k, np.abs(a) @ np.abs(b) + 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "a, b",
    [
        ((4, 65, 40), (4, 40, 17)),
        ((4, 65, 40), (40, 17)),
        ((65, 40), (4, 40, 17)),
        ((2, 1, 8, 9), (3, 9, 5)),
        ((40,), (40,)),
    ],
)
def test_batches_against_float64(a, b, dtype):
    a, b = values(a, dtype), values(b, dtype, 1)
    y = gemm.matmul(put(a), put(b), dtype)
    a, b = cast(a, float64), cast(b, float64)
    close(get(y), a @ b, dtype, a.shape[-1], np.abs(a) @ np.abs(b))


def test_a_long_sum_neither_overflows_nor_loses_digits():
    """A weight gradient: 200704 products; parts added in half would be inf or off by far more than a rounding."""
    g, x = values((200704, 64), float16), values((200704, 576), float16, 1)
    y = cuda.matmul(cuda.mT(put(x)), put(g))
    assert y.dtype == float32
    # split and pairwise sums: the error grows with the square root of the number of terms at most
    exact = cast(x, float64).T @ cast(g, float64)
    close(get(y), exact, float32, 450, np.abs(cast(x, float64)).T @ np.abs(cast(g, float64)))
    half = gemm.gemm(put(x).T, put(g), device.xp.empty((576, 64), float16))
    close(get(half), exact, float16, 450, np.abs(cast(x, float64)).T @ np.abs(cast(g, float64)))


def test_subnormal_halves_survive():
    tiny = put(np.full((8, 8), 2.0**-24, float16))
    one = put(np.eye(8, dtype=float16))
    assert (cuda.matmul(tiny, one).get() == np.float16(2.0**-24)).all()
    assert float((Tensor(tiny) * 1.0).sum().item()) == 64 * 2.0**-24


def test_sums_in_half_are_the_lesson():
    out = gemm.gemm(
        put(np.ones((8, 8192), float16)), put(np.ones((8192, 8), float16)), device.xp.empty((8, 8), float16)
    )
    assert (out.get() == 8192).all()


# ------------------------------------------------------------------------------------------------------------ convolutions


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "c, o, size, kernel, stride, padding, dilation, groups",
    [(3, 8, (9, 7), (3, 3), (2, 2), (1, 1), (1, 1), 1), (8, 16, (12, 12), (3, 3), (1, 1), (1, 1), (1, 1), 1)]
    + [
        (8, 8, (9, 9), (3, 2), (1, 2), (2, 0), (2, 1), 4),
        (16, 24, (8, 8), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ],
)
def test_conv_against_float64(c, o, size, kernel, stride, padding, dilation, groups, dtype, monkeypatch):
    monkeypatch.setattr("minamp.backends.cuda_conv.COLUMN_BYTES", 4096)  # so that there are several chunks
    x, w, bias = (
        values((5, c, *size), dtype),
        values((o, c // groups, *kernel), dtype, 1),
        values(o, dtype, 2),
    )
    rest = (stride, padding, dilation, groups)
    y = cuda.conv2d(put(x), put(w), put(bias), *rest)
    wide = [cast(a, float64) for a in (x, w, bias)]
    terms = c // groups * kernel[0] * kernel[1]
    exact, size_ = cpu.conv2d(*wide, *rest), cpu.conv2d(*map(np.abs, wide), *rest)
    close(get(y), exact, dtype, terms, size_)
    g = values(y.shape, dtype, 3)
    wide_g = cast(g, float64)
    gx = cuda.conv2d_input_grad(put(g), put(w), x.shape, *rest)
    gx_size = cpu.conv2d_input_grad(np.abs(wide_g), np.abs(wide[1]), x.shape, *rest)
    close(
        get(gx),
        cpu.conv2d_input_grad(wide_g, wide[1], x.shape, *rest),
        dtype,
        o * kernel[0] * kernel[1],
        gx_size,
    )
    gw = cuda.conv2d_weight_grad(put(g), put(x), w.shape, *rest)
    assert gw.dtype == (float64 if dtype == float64 else float32)
    gw_size = cpu.conv2d_weight_grad(np.abs(wide_g), np.abs(wide[0]), w.shape, *rest)
    close(get(gw), cpu.conv2d_weight_grad(wide_g, wide[0], w.shape, *rest), gw.dtype, y.size // o, gw_size)


# ----------------------------------------------------------------------------------------------------------------- kernels


@pytest.fixture
def doubled(monkeypatch):
    """Every launch is done again in NumPy on copies; all arrays must be equal, bit for bit."""
    launch, run, ran = kernels.launch, kernels_update._run, []

    def both(base, kind, n, *args, **block):
        if isinstance(args[0], np.ndarray):  # a table of addresses on the GPU: both_tables compares
            return launch(base, kind, n, *args, **block)
        copies = [a.get() if device.holds(a) else a for a in args]
        launch(base, kind, n, *args, **block)
        doubles.of(f"{base}_{kind}" if kind else base)(*copies)
        equal(base, args, copies)

    def both_tables(base, dtype, columns, *args, **options):
        flat = [a for c in columns for a in c or ()]
        copies, held = [a.get() if device.holds(a) else a for a in args], [a.get() for a in flat]
        rest = iter(map(standin.ndarray, held))
        table, _ = kernels_update._table([c and [next(rest) for _ in c] for c in columns])
        run(base, dtype, columns, *args, **options)
        count = np.int32(len(columns[0]))
        doubles.of(f"{base}_{kernels.C_TYPES[dtype]}")(table, count, np.int32(0), *copies)
        if base == "unscale":  # its flags lie in the first argument, and are compared one by one
            args, copies = (args[0][:1],), [copies[0][:1]]
        equal(base, (*args, *flat), (*copies, *held))

    def equal(base, arrays, copies):
        for a, b in zip(arrays, copies, strict=True):
            if device.holds(a):
                # CUDA's pow of doubles is right to two units in the last place, and 1 - pow cancels 9 bits of 0.999**3
                few = 1e-12 if base == "count_steps" and a.dtype == float64 else 0
                np.testing.assert_allclose(widen(a.get()), widen(b), rtol=few, atol=0, err_msg=base)
        ran.append(base)

    monkeypatch.setattr(kernels, "launch", both)
    monkeypatch.setattr(kernels_update, "_run", both_tables)
    yield
    assert ran


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kernels_equal_their_doubles(doubled, dtype):
    x = put(values((3, 9, 7, 8), dtype))
    geometry = ((5, 4), (3, 3), (2, 2), (1, 1), (1, 1))
    sums = float64 if dtype == float64 else float32
    kernels_conv.im2col(device.xp.empty((60, 72), dtype), x, 0, 0, 8, *geometry)
    kernels_conv.col2im(x, put(values((60, 72), sums, 1)), put(values(8, dtype, 2)), 0, 8, *geometry)
    for bad in (1.0, np.inf):
        g = values(1000, dtype)
        g[17] = bad
        kernels_update.unscale([put(g), put(g[:9]), put(g[:600])], put(np.array(2.0**16, np.float32)))
    rows, cols = [(0, 4), (4, 9)], [(0, 3), (2, 7)]
    y = kernels_pool.window_mean(x, rows, cols, np.outer([4, 5], [3, 5]))
    kernels_pool.window_mean_grad(y, x.shape, rows, cols, np.outer([4, 5], [3, 5]))
    kernels.keep_mask(2**63 + 5, (1001,), 0.3)


@pytest.mark.parametrize("dtype", [float32, float64], ids=str)
def test_updates_equal_their_doubles(doubled, dtype):
    several = [[put(np.abs(values(n, dtype, i))) for n in (1000, 7, 333)] for i in range(5)]
    w, g, m, v, top = several
    halves = None if dtype == float64 else [device.xp.zeros(a.shape, float16) for a in w]
    steps, skip = [put(np.array(2, np.float32)) for _ in w], put(np.ones(1, np.uint32))
    options = dict(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=True, maximize=False)
    kernels_update.sgd(w, g, m, False, halves=halves, **options)
    kernels_update.sgd(w, g, m, False, halves=halves, skip=skip, **options)
    options = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True, maximize=False)
    kernels_update.adam(w, g, m, v, top, 3, halves=halves, **options)
    room = device.xp.zeros(6, dtype)
    for flag in (skip, None):
        kernels_update.adam(w, g, m, v, None, steps, corrections=room, skip=flag, **options)
    options = dict(lr=0.01, alpha=0.9, eps=1e-8, weight_decay=0.1, momentum=0.9, maximize=False)
    for flag in (skip, None):
        kernels_update.rmsprop(w, g, v, m, top, halves=halves, skip=flag, **options)
    kernels_update.widen_all([put(values(9, d)) for d in HALVES])
    scale, tracker = put(np.array(4.0, np.float32)), put(np.array(1, np.int32))
    kernels_update.update_scale(scale, tracker, None, False, 2.0, 0.5, 2, 0.0, 1e9)
    assert scale.get() == 8.0 and tracker.get() == 0


@pytest.mark.parametrize("optimizer", test_capture.OPTIMIZERS)
@pytest.mark.parametrize("make", [test_cuda.mlp, test_cuda.CNN])
def test_a_captured_step_trains_as_steps_do(make, optimizer):
    """Skips and growth are the same; the losses to the last bits, since a graph may choose other products' algorithms."""
    plain = test_capture.Training(make, optimizer)
    ours = test_capture.Training(make, optimizer, capturable=True)
    for _ in range(5):
        plain.step(), ours.step()
    g = minamp.cuda.CUDAGraph()
    with minamp.cuda.graph(g):
        ours.step()
    for _ in range(4):
        plain.step(), g.replay()
    assert ours.scaler.state_dict() == plain.scaler.state_dict()
    for p, q in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        np.testing.assert_allclose(p.data.cpu().numpy(), q.data.cpu().numpy(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("source", [*FLOATS, np.dtype(np.int64)], ids=str)
@pytest.mark.parametrize("target", [*HALVES, float32], ids=str)
def test_casts_are_the_cpus_bit_for_bit(source, target):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(100_000) * 10.0 ** rng.integers(-9, 6, 100_000)
    x = rng.integers(-(2**60), 2**60, 1000) if source.kind == "i" else cast(x, source)
    ours, theirs = cuda.cast(put(x), target).get(), cpu.cast(x, target)
    np.testing.assert_array_equal(ours.view(f"u{target.itemsize}"), theirs.view(f"u{target.itemsize}"))


# ----------------------------------------------------------------------------------------------------- every op, training


# The gradient of a sum of normalised values is 0: what is left of terms of the size of 1 / std, about 50 here.
CANCELLING = {"layer_norm", "rms_norm", "group_norm", "batch_norm"}
RANDOM = {"dropout", "dropout1d", "dropout2d"}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", sorted(set(test_policy.EXAMPLES) - test_cuda.SKIPPED - RANDOM))
def test_every_op_against_float64(name, dtype, monkeypatch):
    y, grads = test_cuda.forward_and_back(name, dtype, "cuda", False, monkeypatch)
    if "naive" in name:  # wrong on purpose: against the CPU's own
        exact, exact_grads = test_cuda.forward_and_back(name, dtype, "cpu", False, monkeypatch)
    else:  # the same values, carried as float64
        rounded, plain = test_cuda.ORIGINAL, float64
        monkeypatch.setattr(test_cuda, "ORIGINAL", lambda _, *shape: rounded(dtype, *shape).to(plain))
        exact, exact_grads = test_cuda.forward_and_back(name, dtype, "cpu", False, monkeypatch)
    assert y.device == "cuda:0"
    for ours, theirs in zip([y, *grads], [exact, *exact_grads], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            eps = (
                format_of(dtype).eps
                if name != "to"
                else format_of(float16 if dtype == float16 else dtype).eps
            )
            ours, theirs = (cast(backends.widen(t.cpu().detach()._data), float64) for t in (ours, theirs))
            # a few roundings: values and gradients are of the size of 1
            few = 8 * max(eps, 2e-15)
            np.testing.assert_allclose(ours, theirs, rtol=few, atol=few * (100 if name in CANCELLING else 1))


@pytest.mark.parametrize("half_weights", [False, True])
@pytest.mark.parametrize("optimizer", test_cuda.OPTIMIZERS)
@pytest.mark.parametrize("make", [test_cuda.mlp, test_cuda.CNN])
def test_training_is_the_cpus(make, optimizer, half_weights):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, _, scale = test_cuda.train(make, optimizer, "cpu", half_weights=half_weights)
        losses, _, our_scale = test_cuda.train(make, optimizer, "cuda", half_weights=half_weights)
    assert our_scale == scale and losses[-1] < losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-2)


# ------------------------------------------------------------------------------------- the tensor-core kernel, pooling, padding


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("n, image, c, o, kernel, stride, padding, dilation", test_kernels.WMMA_CASES)
def test_the_tensor_core_kernel_against_the_columns(
    n, image, c, o, kernel, stride, padding, dilation, dtype, bias, monkeypatch
):
    if dtype == bfloat16 and int(device.xp.cuda.Device().compute_capability) < 80:
        pytest.skip("tensor cores take bfloat16 from compute capability 8.0 on")
    x, w, b = values((n, c, *image), dtype), values((o, c, *kernel), dtype, 1), values(o, dtype, 2)
    rest, y = (stride, padding, dilation, 1), {}
    for asked in (True, False):
        monkeypatch.setattr(cuda_conv, "WMMA", asked)
        y[asked] = get(cuda.conv2d(put(x), put(w), put(b) if bias else None, *rest))
    wide = [cast(a, float64) for a in (x, w, b)]
    exact = cpu.conv2d(*wide[:2], wide[2] if bias else None, *rest)
    size = cpu.conv2d(*map(np.abs, wide), *rest)
    for ours in y.values():
        close(ours, exact, dtype, c * kernel[0] * kernel[1], size)


@pytest.mark.parametrize("kind", ["plain", "ties", "nan", "inf"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("image, kernel, stride, padding, dilation, ceil_mode", test_kernels.POOLS)
def test_max_pooling_equals_its_doubles(
    doubled, image, kernel, stride, padding, dilation, ceil_mode, dtype, kind
):
    geometry = (kernel, stride, padding, dilation)
    x = put(test_kernels.pooled_values((2, 3, *image), dtype, kind))
    y = cuda.max_pool2d(x, *geometry, ceil_mode)
    position = cuda.max_pool2d_position(x, y, *geometry)
    gx = cuda.max_pool2d_scatter(put(values(y.shape, dtype, 1)), position, x.shape, *geometry)
    cuda.max_pool2d_gather(gx, position, *geometry)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_padded_product_against_float64(dtype, monkeypatch):
    monkeypatch.setattr(gemm, "PAYS", 0)
    x, w, g = values((128, 256), dtype), values((10, 256), dtype, 1), values((128, 10), dtype, 2)
    for a, b in ((x, w.T), (g, w), (g.T, x)):
        out = device.xp.empty((a.shape[0], b.shape[1]), dtype)
        a_dev, b_dev = (put(t) if t.flags.c_contiguous else put(t.T).T for t in (a, b))
        assert gemm.padding(a_dev, b_dev, out)
        gemm.gemm(a_dev, b_dev, out)
        a, b = cast(a, float64), cast(b, float64)
        close(get(out), a @ b, dtype, a.shape[1], np.abs(a) @ np.abs(b))


# ------------------------------------------------------------------------------------------------ the card and its manners


def test_status_is_ok():
    runtime = device.xp.cuda.runtime
    print(
        f"driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}, sm_{device.capability()}"
    )
    assert minamp.cuda.is_available() and minamp.cuda.device_count() >= 1


def test_cupys_batches_and_ours():
    a = put(values((3, 65, 40), float16))
    b = put(values((3, 40, 17), float16, 1))
    theirs, ours = device.xp.matmul(a, b), gemm.matmul(a, b, float16)
    # both sum in float32 and round once; the sums may run in another order
    np.testing.assert_allclose(get(ours), get(theirs), rtol=2**-10, atol=1e-2)


def test_half_sums_keep_their_digits():
    xp = device.xp
    for number, dim in ((1.0, None), (0.1, None), (0.1, 0)):
        x = xp.full((60000, 1), number, float16)
        print(f"60000 x {number}, dim {dim}: CuPy's sum {float(xp.sum(x, axis=dim).max())}")
        exact = 60000 * float(np.float16(number))
        ours = Tensor(x).sum() if dim is None else Tensor(x).sum(dim)
        assert float(ours.item()) == float(np.float16(exact))
    wide = put(values(4096, float16, scale=100.0))
    print(f"variance of 4096 values of the size of 100: CuPy's {float(xp.var(wide))}")
    exact = np.var(get(wide))
    assert abs(Tensor(wide).var(correction=0).item() / exact - 1) < 2**-10


def test_float32_subnormals():
    x = put(np.full(8, 2.0**-130, float32))
    y = (Tensor(x) * 1.0).cpu().tolist()
    print(f"2^-130 * 1 in float32: {y[0]}")
    assert y[0] in (0.0, 2.0**-130)  # CuPy compiles with -ftz=true: 0 is expected
    assert float(device.xp.asarray(x)[0]) == 2.0**-130  # a copy keeps it


def test_bfloat16_is_as_tried():
    if device.capability() >= 80:
        assert minamp.cuda.is_bf16_supported()
    if minamp.cuda.is_bf16_supported():  # below 8.0 the libraries may do it all the same
        ones = minamp.ones(2, 8, 8).bfloat16().cuda()
        assert (ones @ ones).float().tolist() == [[[8.0] * 8] * 8] * 2


def test_memory_is_counted_and_its_end_is_named():
    gc.collect()  # what earlier tests left in cycles
    minamp.cuda.reset_peak_memory_stats()
    before = minamp.cuda.memory_allocated()
    x = Tensor(device.xp.full((1 << 20, 1), 1.0, float32))
    x + 1.0
    assert minamp.cuda.memory_allocated() == before + (4 << 20)
    assert before + (8 << 20) <= minamp.cuda.max_memory_allocated() <= before + (9 << 20)
    with pytest.raises(
        minamp.cuda.OutOfMemoryError, match="^add .*out of memory on the GPU: 4398046511104 bytes"
    ):
        x + x.T  # 4 TB
    assert minamp.cuda.memory_allocated() == before + (4 << 20)
    assert (x + 1.0).sum().item() == 2 << 20
    assert 0 < minamp.cuda.mem_get_info()[0] < minamp.cuda.mem_get_info()[1]


def test_events_and_debug():
    a = Tensor(device.xp.full((4096, 4096), 1.0, float16))
    start, end = (minamp.cuda.Event(enable_timing=True) for _ in range(2))
    a @ a
    start.record()
    with minamp.debug(sync=True):
        a @ a
    end.record()
    assert start.elapsed_time(end) > 0 and end.query()


def test_what_the_driver_says_of_the_card():
    found = minamp.cuda.get_device_properties()
    assert (
        found.name == minamp.cuda.get_device_name() and 10 * found.major + found.minor == device.capability()
    )
