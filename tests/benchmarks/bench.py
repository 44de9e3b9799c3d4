"""The speed table: every row measured in this one process, candidates in turn, as ratios. `make bench` runs it.

A shared machine is never quiet, and it slows what runs next to each other by the same factor: so the candidates of a row take
turns, and of every candidate the fastest of all rounds counts. PyTorch's rows need torch and say so where it is missing.

    python tests/benchmarks/bench.py [--quick] [--json FILE] [--page] [--only WORD]
"""

import argparse
import json
import os
import platform
import runpy
import sys
import time
from dataclasses import asdict
from pathlib import Path

import gpu
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from row import MISSING, Row, fastest

import minamp
from minamp import formats, halves, watch

try:
    import torch
except ImportError:
    torch = None

# ------------------------------------------------------------------------------------------- training steps, in either library


def mlp(lib, widths=(784, 512, 512, 10)):
    layers = []
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [lib.nn.Linear(a, b), lib.nn.ReLU()]
    return lib.nn.Sequential(*layers[:-1])


def cnn(lib):
    nn = lib.nn
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def training_step(lib, model, shape, amp, device="cpu"):
    """A function that makes one step of SGD with momentum on fixed data; the code is the same for both libraries."""
    model = model.to(device)
    F = lib.nn.functional
    rng = np.random.default_rng(0)
    x = lib.tensor(rng.standard_normal(shape).astype(np.float32)).to(device)
    y = lib.tensor(rng.integers(0, 10, shape[0])).to(device)
    optimizer = lib.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    scaler = lib.amp.GradScaler(device, enabled=amp)

    def step():
        with lib.amp.autocast(device, dtype=lib.float16, enabled=amp):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    step.held = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return step


def steps(build, shape, with_torch=True):
    candidates = {
        "own float32": training_step(minamp, build(minamp), shape, False),
        "own autocast": training_step(minamp, build(minamp), shape, True),
    }
    if torch and with_torch:
        candidates["torch float32"] = training_step(torch, build(torch), shape, False)
        candidates["torch autocast"] = training_step(torch, build(torch), shape, True)
    return candidates


WHY_AUTOCAST = """\
What autocast adds on a CPU is casts; the row says how long they take. An MLP step rounds 1.6 million weights and gradients, packs
0.5 million values to half and widens 0.9 million. NumPy needs 6 to 9, 11 and 4 passes for them, each at the speed of the
second-level cache, whatever the processor multiplies with: the faster its float32 products, the more the casts weigh. Tried with
little or no gain: two threads (they wait for the interpreter's lock), rounding by integers, packing through bfloat16's cast,
smaller pieces."""


def time_in_casts(step, rounds=30):
    """Seconds that one call of `step` spends in the loops of halves.py, the least of all rounds."""
    spent = 0.0

    def timed(loop):
        def run(*arrays):
            nonlocal spent
            start = time.perf_counter()
            loop(*arrays)
            spent += time.perf_counter() - start

        return run

    loops = {name: getattr(halves, name) for name in ("narrow", "widen", "round_")}
    least = float("inf")
    try:
        for name, loop in loops.items():
            setattr(halves, name, timed(loop))
        for _ in range(rounds):
            spent = 0.0
            step()
            least = min(least, spent)
    finally:
        for name, loop in loops.items():
            setattr(halves, name, loop)
    return least


def training_rows(name, build, shape, goal32, goal_torch16, rounds):
    candidates = steps(build, shape)
    # 4 to 14 times the others' time
    slow = {k: candidates.pop(k) for k in list(candidates) if k == "torch autocast"}
    t = fastest(candidates, 4 * rounds) | fastest(slow, rounds)
    t["casts"] = time_in_casts(candidates["own autocast"])
    ms = {k: f"{1000 * v:.1f} ms" for k, v in t.items()}
    yield Row(
        f"{name}, autocast step / own float32",
        t["own autocast"] / t["own float32"],
        goal=1.5,
        detail=f"{ms['own autocast']} / {ms['own float32']}, casts {ms['casts']}",
        why=WHY_AUTOCAST,
    )
    if torch is None:
        yield Row(f"{name}, float32 step / torch", None, goal=goal32, detail=MISSING)
        yield Row(
            f"{name}, torch's autocast / autocast step",
            None,
            goal=goal_torch16,
            at_least=True,
            detail=MISSING,
        )
        return
    yield Row(
        f"{name}, float32 step / torch",
        t["own float32"] / t["torch float32"],
        goal=goal32,
        detail=f"{ms['own float32']} / {ms['torch float32']}",
    )
    yield Row(
        f"{name}, torch's autocast / autocast step",
        t["torch autocast"] / t["own autocast"],
        goal=goal_torch16,
        at_least=True,
        detail=f"{ms['torch autocast']} / {ms['own autocast']}",
    )


def mlp_rows(quick):
    return training_rows("MLP 784-512-512-10, 256", mlp, (256, 784), 1.1, 8, 4 if quick else 15)


def cnn_rows(quick):
    return training_rows("CNN 1-16-32, 28x28, 128", cnn, (128, 1, 28, 28), 1.3, 3, 4 if quick else 15)


WHY_DOCTOR = """\
The doctor runs the step twice; keeping and restoring all state, noting every op and call, counting the
gradients and judging take about a millisecond however small the step is: more than three steps of 0.3 ms."""


def doctor_rows(quick):
    for name, build, shape, amp, rounds in (
        ("MLP 784-512-512-10, 256", mlp, (256, 784), True, 8),
        ("CNN 1-16-32, 28x28, 128", cnn, (128, 1, 28, 28), True, 8),
        ("MLP 64-64-10, 64", lambda lib: mlp(lib, (64, 64, 10)), (64, 64), True, 40),
        ("MLP 784-64-10, 32", lambda lib: mlp(lib, (784, 64, 10)), (32, 784), False, 40),
    ):
        step = training_step(minamp, build(minamp), shape, amp)
        t = fastest(
            {"step": step, "doctor": lambda step=step: minamp.doctor(step, **step.held)},
            3 if quick else rounds,
        )
        yield Row(
            f"{name}, doctor / {'autocast' if amp else 'float32'} step",
            t["doctor"] / t["step"],
            goal=5,
            detail=f"{1000 * t['doctor']:.1f} ms / {1000 * t['step']:.1f} ms",
            why=WHY_DOCTOR,
        )


# ----------------------------------------------------------------------------------------------------------- single operations


def matmul_rows(quick):
    n, small = 1024, 256  # NumPy's half product has no BLAS: 1024^3 would take half a minute
    a32 = minamp.randn(n, n)
    a16 = a32.half()
    t = fastest(
        {"half": lambda: minamp.matmul(a16, a16), "single": lambda: minamp.matmul(a32, a32)},
        6 if quick else 20,
    )
    yield Row(
        "half matmul 1024^3 / float32",
        t["half"] / t["single"],
        goal=1.4,
        detail=f"{1000 * t['half']:.1f} ms / {1000 * t['single']:.1f} ms",
    )
    block = a16._data[:small, :small].copy()
    numpy_time = fastest({"numpy": lambda: np.matmul(block, block)}, 1, 2)["numpy"] * (n / small) ** 3
    yield Row(
        "np.matmul float16 / half matmul",
        numpy_time / t["half"],
        goal=150,
        at_least=True,
        detail=f"NumPy: {numpy_time:.1f} s, from {small}^3 times {(n // small) ** 3}",
    )


def overhead_rows(quick, loops=1000):
    def candidate(lib):
        a = lib.tensor(1.0, requires_grad=True)
        b = lib.tensor(2.0, requires_grad=True)

        def adds():
            with lib.amp.autocast("cpu", dtype=lib.float16):
                for _ in range(loops):
                    a + b

        return adds

    candidates = {"own": candidate(minamp)} | ({"torch": candidate(torch)} if torch else {})
    t = fastest(candidates, 5 if quick else 20)
    own = 1e6 * t["own"] / loops
    yield Row("add of two scalars, grad and autocast on", own, "us", 5)
    if torch is None:
        yield Row("the same / torch", None, goal=2, detail=MISSING)
    else:
        theirs = 1e6 * t["torch"] / loops
        yield Row("the same / torch", own / theirs, goal=2, detail=f"{own:.2f} us / {theirs:.2f} us")


def cast_rows(quick, n=1 << 20):
    x32 = (np.random.default_rng(0).standard_normal(n)).astype(np.float32)
    x16 = x32.astype(np.float16)
    small = x32 * np.float32(1e-7)  # results that underflow raise a flag each in NumPy's cast
    t = fastest(
        {
            "narrow": lambda: formats.narrow(x32, formats.float16),
            "narrow small": lambda: formats.narrow(small, formats.float16),
            "widen": lambda: formats.widen(x16),
            "round": lambda: formats.round_to(x32, formats.float16),
            "astype half": lambda: x32.astype(np.float16),
            "astype half small": lambda: small.astype(np.float16),
            "astype single": lambda: x16.astype(np.float32),
        },
        5 if quick else 15,
    )
    for work, own, numpy_name in (
        ("astype / half to single", "widen", "astype single"),
        ("astype / single to half", "narrow", "astype half"),
        ("astype / single to half, 1e-7", "narrow small", "astype half small"),
    ):
        yield Row(
            f"{work}, per million",
            t[numpy_name] / t[own],
            detail=f"{1000 * t[numpy_name]:.2f} ms / {1000 * t[own]:.2f} ms",
        )
    yield Row("rounding to half kept in float32, per million", 1000 * t["round"], "ms")


# ---------------------------------------------------------------------------------------------------------------------- memory


def memory_rows(quick):
    """What the ops keep for backward where activations outweigh weights: 8 layers of 64, batch 2048."""
    model, x, y = mlp(minamp, (64,) * 8 + (10,)), minamp.randn(2048, 64), minamp.randint(0, 10, (2048,))
    kept = {}
    for amp in (False, True):
        with watch.saved_bytes() as saved, minamp.autocast(enabled=amp):
            minamp.nn.functional.cross_entropy(model(x), y)
        kept[amp] = saved.total
    yield Row(
        "bytes kept for backward, autocast / float32",
        kept[True] / kept[False],
        goal=0.55,
        detail=f"{kept[True] / 2**20:.2f} MB / {kept[False] / 2**20:.2f} MB",
    )


# ---------------------------------------------------------------------------------------------------------------------- growth


def slope(sizes, costs):
    """The exponent of growth: the slope of log cost against log size by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def growth_row(work, sizes, candidate, most, rounds):
    """Times of one autocast step at every size; `most` is the exponent that the arithmetic alone would have, plus 0.1."""
    t = fastest({n: candidate(n) for n in sizes}, rounds, 2)
    detail = "  ".join(f"{n}: {1000 * s:.1f}" for n, s in t.items()) + " ms"
    return Row(work, slope(sizes, list(t.values())), "exponent", most, detail=detail)


def conv_step(channels):
    conv = minamp.nn.Conv2d(channels, channels, 3, padding=1)
    x = minamp.randn(16, channels, 14, 14).requires_grad_()

    def step():
        with minamp.autocast():
            conv(x).sum().backward()
        x.grad = conv.weight.grad = conv.bias.grad = None

    return step


def growth_rows(quick):
    rounds = 2 if quick else 5
    batches = (32, 128, 512) if quick else (32, 64, 128, 256, 512, 1024, 2048)
    widths = (128, 256, 512) if quick else (128, 256, 512, 1024, 2048)
    channels = (8, 16, 32) if quick else (8, 16, 32, 64, 128)
    yield growth_row(
        "MLP step against batch",
        batches,
        lambda n: training_step(minamp, mlp(minamp), (n, 784), True),
        1.1,
        rounds,
    )
    yield growth_row(
        "MLP step against width",
        widths,
        lambda n: training_step(minamp, mlp(minamp, (n, n, n, 10)), (256, n), True),
        2.1,
        rounds,
    )
    yield growth_row("conv step against channels", channels, conv_step, 2.1, rounds)
    depths = (2, 4, 8) if quick else (2, 4, 8, 16, 32)
    peaks = [peak_bytes(depth) for depth in depths]
    detail = "  ".join(f"{d}: {p / 2**20:.1f}" for d, p in zip(depths, peaks, strict=True)) + " MB"
    yield Row("peak memory against depth", slope(depths, peaks), "exponent", 1.1, detail=detail)


def peak_bytes(depth):
    """Most bytes that one autocast step of an MLP of `depth` layers allocates, beside the weights and buffers it starts from."""
    step = training_step(minamp, mlp(minamp, (128,) * (depth + 1)), (512, 128), True)
    step()
    with watch.peak_memory() as peak:
        step()
    return peak.bytes


# ----------------------------------------------------------------------------------------------------------------------- table


PAGES = Path(__file__).parents[2] / "notebooks" / "pages"
GROUPS = {
    "mlp": mlp_rows,
    "cnn": cnn_rows,
    "doctor": doctor_rows,
    "matmul": matmul_rows,
    "overhead": overhead_rows,
    "casts": cast_rows,
    "memory": memory_rows,
    "growth": growth_rows,
    "gpu": gpu.rows,
}


def processor():
    """The processor's name where Linux tells it, and the widest of its instructions that NumPy was made for."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    simd = np.show_config(mode="dicts").get("SIMD Extensions", {}).get("found", [])
    return " ".join([names[0] if names else platform.processor() or platform.machine(), *simd[-1:]])


def machine():
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__ if torch else MISSING,
        "OPENBLAS_CORETYPE": os.environ.get("OPENBLAS_CORETYPE", "unset"),
        **gpu.card(),
    }


def show(rows, console):
    table = Table(title="minamp: speed and memory")
    for column, justify in (("work", "left"), ("measured", "right"), ("goal", "right"), ("verdict", "left")):
        table.add_column(column, justify=justify)
    table.add_column("detail", style="dim")
    for r in rows:
        measured = "-" if r.value is None else f"{r.value:.2f} {r.unit}"
        goal = "-" if r.goal is None else f"{'>=' if r.at_least else '<='} {r.goal:g}"
        style = {True: "green", False: "red", None: ""}[r.met]
        verdict = escape(r.verdict())
        detail = "" if r.value is None else escape(r.detail)  # the verdict has it
        table.add_row(escape(r.work), measured, goal, f"[{style}]{verdict}[/]" if style else verdict, detail)
    console.print(table)
    for why in dict.fromkeys(r.why for r in rows if r.met is False and r.why):
        console.print(why, style="dim")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds and sizes: a minute instead of five"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    parser.add_argument("--only", choices=GROUPS, action="append", help="these rows alone; may be repeated")
    parser.add_argument(
        "--page", action="store_true", help="also write notebooks/pages/speed.json and speed.md"
    )
    args = parser.parse_args()
    if torch:
        torch.set_num_threads(os.cpu_count())  # as many as BLAS takes
    minamp.manual_seed(0)
    rows = [row for name in args.only or GROUPS for row in GROUPS[name](args.quick)]
    console = Console()
    show(rows, console)
    console.print(escape("  ".join(f"{k} {v}" for k, v in machine().items())), style="dim")
    for path in [args.json] * bool(args.json) + [PAGES / "speed.json"] * args.page:
        found = {
            "quick": args.quick,
            "machine": machine(),
            "rows": [asdict(r) | {"met": r.met, "verdict": r.verdict()} for r in rows],
        }
        Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.page:
        runpy.run_path(str(PAGES / "speed.py"), run_name="__main__")


if __name__ == "__main__":
    sys.modules["bench"] = sys.modules["__main__"]  # gpu.py takes its models from here
    main()
