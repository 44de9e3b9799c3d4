"""The GPU's rows of the speed table. Without a GPU they say "not measured".

Times are the GPU's own, between two events, candidates in turn and the fastest round of each; steps, which include what Python
does and at most one wait for the scaler's flags, are wall time between two readings of a clock that waits for the GPU.
"""

import sys
from pathlib import Path

import numpy as np
from row import MISSING, Row, fastest

import minamp
import minamp.nn.functional as F
from minamp import bfloat16, float16, float32
from minamp.backends import device, gemm
from minamp.tensor import Tensor

COMPUTE_32F_FAST_TF32 = 77


NOT_MEASURED = "not measured"  # the lines under the table say why


def card():
    """What the figures hold for: card, driver, CUDA and CuPy; or why there are none."""
    if minamp.gpu_status() != "ok":
        return {"GPU": minamp.gpu_status()}
    runtime = device.xp.cuda.runtime
    return {
        "GPU": f"{minamp.cuda.get_device_name()}, compute capability {device.capability() / 10}",
        "driver": runtime.driverGetVersion(),
        "CUDA": runtime.runtimeGetVersion(),
        "CuPy": device.array_module().__version__,
    }


def seconds(candidates, rounds=20, calls=10):
    """GPU seconds a call of every candidate: events around `calls` calls, the fastest of `rounds`; one call before them."""
    best = dict.fromkeys(candidates, float("inf"))
    start, end = (minamp.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(rounds):
        for name, function in candidates.items():
            function()
            start.record()
            for _ in range(calls):
                function()
            end.record()
            best[name] = min(best[name], start.elapsed_time(end) / 1000 / calls)
    return best


def on_gpu(array, dtype):
    return device.to_device(np.ascontiguousarray(array)).astype(dtype)


# ------------------------------------------------------------------------------------------------------------- products


def raw(a, b, out, compute=gemm.COMPUTE_32F):
    """One call of cuBLAS for out = a @ b with everything prepared: what minamp's matmul is measured against."""
    p, cublas = gemm.plan(a, b, out), device.xp.cuda.cublas
    factors = np.array([1.0, 0.0], np.float32)
    (tb, ta, to), (ldb, lda, ldo) = p.types, p.leading
    handle = device.xp.cuda.device.get_cublas_handle()
    args = (
        handle,
        *p.transposed,
        p.m,
        p.n,
        p.k,
        factors.ctypes.data,
        b.data.ptr,
        tb,
        ldb,
        a.data.ptr,
        ta,
        lda,
    )
    args += (factors.ctypes.data + 4, out.data.ptr, to, ldo, compute, gemm.DEFAULT)

    def call(keep=(factors, a, b, out)):
        cublas.gemmEx(*args)

    return call


def matmul_rows(quick):
    n = 2048 if quick else 4096
    kinds = {"float16": float16, "bfloat16": bfloat16, "float32": float32}
    if minamp.gpu_status() != "ok":
        for name in kinds:
            yield Row(
                f"GPU, matmul {n}^3 {name}: cuBLAS / own",
                None,
                goal=0.95,
                at_least=True,
                detail=NOT_MEASURED,
            )
        yield Row(f"GPU, matmul {n}^3 TF32, cuBLAS", None, "TFLOP/s", detail=NOT_MEASURED)
        yield Row("GPU, cupy.matmul of 16 float16 matrices / own", None, detail=NOT_MEASURED)
        yield Row("GPU, cupy.einsum float16 / own matmul", None, detail=NOT_MEASURED)
        return
    rng = np.random.default_rng(0)
    values, flop = rng.standard_normal((2, n, n)).astype(np.float32), 2 * n**3 / 1e12
    for name, dtype in kinds.items():
        work = f"GPU, matmul {n}^3 {name}: cuBLAS / own"
        if dtype == bfloat16 and not minamp.cuda.is_bf16_supported():
            yield Row(work, None, goal=0.95, at_least=True, detail="not measured: the card has no bfloat16")
            continue
        a, b = (on_gpu(x, dtype) for x in values)
        out, ta, tb = device.xp.empty((n, n), dtype), Tensor(a), Tensor(b)
        t = seconds({"raw": raw(a, b, out), "own": lambda ta=ta, tb=tb: minamp.matmul(ta, tb)})
        detail = f"{flop / t['raw']:.0f} / {flop / t['own']:.0f} TFLOP/s"
        yield Row(work, t["raw"] / t["own"], goal=0.95, at_least=True, detail=detail)
    a, b = (on_gpu(x, float32) for x in values)
    t = seconds({"tf32": raw(a, b, device.xp.empty((n, n), float32), COMPUTE_32F_FAST_TF32)})
    detail = "minamp's float32 products are float32 throughout"
    yield Row(f"GPU, matmul {n}^3 TF32, cuBLAS", flop / t["tf32"], "TFLOP/s", detail=detail)
    xp = device.array_module()
    batch, one = (on_gpu(rng.standard_normal(s), float16) for s in ((16, 1024, 1024), (1024, 1024)))
    tb, to = Tensor(batch), Tensor(one)
    t = seconds(
        {
            "cupy": lambda: xp.matmul(batch, batch),
            "own": lambda: minamp.matmul(tb, tb),
            "einsum": lambda: xp.einsum("ij,jk->ik", one, one),
            "own 2-D": lambda: minamp.matmul(to, to),
        }
    )
    for work, theirs, own in (
        ("GPU, cupy.matmul of 16 float16 matrices / own", "cupy", "own"),
        ("GPU, cupy.einsum float16 / own matmul", "einsum", "own 2-D"),
    ):
        yield Row(work, t[theirs] / t[own], detail=f"{1e6 * t[theirs]:.0f} us / {1e6 * t[own]:.0f} us")


# ---------------------------------------------------------------------------------------------------------- convolution


def conv_rows(quick):
    """64 images of 56 x 56, 64 channels to 64, 3 x 3, in half: against the time its memory traffic alone would take.

    The bound counts x read, the columns (nine times x) written and read, y written, at the speed of a large copy. Columns in
    chunks that stay in the cache can beat it.
    """
    work, shape = "GPU, conv 64 x 64 x 56 x 56, 3 x 3, float16: bound / own", (64, 64, 56, 56)
    if minamp.gpu_status() != "ok":
        yield Row(work, None, goal=0.7, at_least=True, detail=NOT_MEASURED)
        return
    rng = np.random.default_rng(0)
    x = Tensor(on_gpu(rng.standard_normal(shape), float16))
    w = Tensor(on_gpu(rng.standard_normal((64, 64, 3, 3)) / 24, float16))
    source = device.xp.empty((1 << 29,), float16)
    target = device.xp.empty((1 << 29,), float16)

    def copy():
        target[...] = source

    t = seconds({"own": lambda: F.conv2d(x, w, padding=1), "copy": copy}, 10)
    bandwidth = 2 * source.nbytes / t["copy"]
    bound, least = 20 * x.nbytes / bandwidth, 2 * x.nbytes / bandwidth
    detail = (
        f"{1e6 * bound:.0f} us / {1e6 * t['own']:.0f} us; {1e6 * least:.0f} us for x and y alone; "
        f"{bandwidth / 1e12:.2f} TB/s copying"
    )
    yield Row(work, bound / t["own"], goal=0.7, at_least=True, detail=detail)


# ---------------------------------------------------------------------------------------------------------------- steps


def step_rows(quick):
    """A step large enough for the products to count (five layers of 4096, batch 4096), and one that is all launches."""
    from bench import mlp, torch, training_step

    large, batch = (4096,) * 6, 4096
    works = [
        ("GPU, MLP 5 x 4096, 4096: float32 step / autocast step", 1.8),
        ("GPU, the same: torch's autocast step / own", None),
    ]
    small = "GPU, MLP 784-512-512-10, 256, autocast step, fixed scale"
    if minamp.gpu_status() != "ok":
        for work, goal in works:
            yield Row(work, None, goal=goal, at_least=True, detail=NOT_MEASURED)
        yield Row(f"{small}, Python's part", None, "us", detail=NOT_MEASURED)
        yield Row(f"{small}, the GPU's part", None, "us", detail=NOT_MEASURED)
    else:
        candidates = {
            str(amp): training_step(minamp, mlp(minamp, large), (batch, large[0]), amp, "cuda")
            for amp in (False, True)
        }
        with_torch = torch is not None and torch.cuda.is_available()
        if with_torch:
            candidates["torch"] = training_step(torch, mlp(torch, large), (batch, large[0]), True, "cuda")
        t = fastest(candidates, 3 if quick else 10, clock=clock)
        ms = {k: f"{1000 * s:.1f} ms" for k, s in t.items()}
        detail = f"{ms['False']} / {ms['True']}"
        yield Row(works[0][0], t["False"] / t["True"], goal=1.8, at_least=True, detail=detail)
        if with_torch:
            yield Row(works[1][0], t["torch"] / t["True"], detail=f"{ms['torch']} / {ms['True']}")
        else:
            missing = MISSING if torch is None else "not measured: this torch sees no GPU"
            yield Row(works[1][0], None, detail=missing)
        step = small_step()
        python = fastest({"step": step}, 10, 20)["step"]  # it ends when the last launch has returned
        yield Row(f"{small}, Python's part", 1e6 * python, "us")
        graph, why = captured(step)  # launched one by one, the GPU would wait for Python
        alone = None if graph is None else 1e6 * seconds({"step": graph.replay})["step"]
        yield Row(f"{small}, the GPU's part", alone, "us", detail=why or "replayed as one CUDA graph")
    yield Row(f"{small}, launches", launches(), "launches", detail="counted on the tests' stand-in for a GPU")
    yield from graph_rows()


def clock():
    """Read when the GPU is done, torch's part of it too: both wait for the whole device."""
    return device.clock()


def launches():
    """Array functions and kernels of one step; CuPy keeps no count, the stand-in does."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import standin

    with standin.installed() as gpu:
        step = small_step()
        step()
        gpu.count.clear()
        step()
        return gpu.count["kernel"]


def small_step():
    """A step of forward, backward and update that never waits for the GPU: the loss scale is fixed, so nobody reads flags."""
    from bench import mlp

    model = mlp(minamp).to("cuda")
    rng = np.random.default_rng(0)
    x = minamp.tensor(rng.standard_normal((256, 784)).astype(np.float32)).to("cuda")
    y = minamp.tensor(rng.integers(0, 10, 256)).to("cuda")
    optimizer = minamp.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def step():
        optimizer.zero_grad(set_to_none=False)
        with minamp.autocast():
            loss = F.cross_entropy(model(x), y)
        (loss * 128.0).backward()
        optimizer.step()

    return step


def captured(step):
    """(step as a CUDA graph, None), or (None, why it can't be one)."""
    for _ in range(3):  # kernels compiled, cuBLAS and the buffers in place
        step()
    graph = minamp.cuda.CUDAGraph()
    try:
        with minamp.cuda.graph(graph):
            step()
    except RuntimeError as error:
        return None, f"not measured: {str(error).splitlines()[0]}"
    return graph, None


def graph_rows():
    """The small step launched piece by piece, and replayed as one CUDA graph."""
    work = "GPU, MLP 784-512-512-10, 256, fixed scale: launched / as a CUDA graph"
    if minamp.gpu_status() != "ok":
        yield Row(work, None, detail=NOT_MEASURED)
        return
    step = small_step()
    graph, why = captured(step)
    if graph is None:
        yield Row(work, None, detail=why)
        return
    t = fastest({"eager": step, "graph": graph.replay}, 10, 20, clock=clock)
    yield Row(work, t["eager"] / t["graph"], detail=f"{1e6 * t['eager']:.0f} us / {1e6 * t['graph']:.0f} us")


def rows(quick):
    yield from matmul_rows(quick)
    yield from conv_rows(quick)
    yield from step_rows(quick)
