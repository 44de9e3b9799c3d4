"""How data-parallel training scales from 1 to 2 processes here, and a model of it up to 1,024: `make scaling`.

    python tests/benchmarks/scaling.py [--page]

The same file is the launcher's program: with RANK_JOB in the environment it measures and prints one line of JSON on rank 0. One
BLAS thread for each rank. Steps and sums are the fastest of many, since a shared machine is never quiet.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import minamp
import minamp.distributed as dist
import minamp.nn.functional as F
from minamp import nn, optim
from minamp.distributed.__main__ import command

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "notebooks" / "pages" / "data_parallel.md"
START, END = "<!-- made by tests/benchmarks/scaling.py -->", "<!-- end -->"
JOB = "RANK_JOB"
BATCH = 512  # of all ranks together
SIZES = [2**k for k in range(10, 25, 2)]  # bytes that are summed
RANKS = [1, 2, 4, 8, 16, 64, 256, 1024]


# ---------------------------------------------------------------------------------------------------------- on the ranks


def mlp():
    sizes = (784, 512, 512, 10)
    layers = [m for a, b in zip(sizes, sizes[1:], strict=False) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def fastest(function, times):
    best = float("inf")
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return max(dist.all_gather_object(best))


def step_of(batch, amp, shared=True):
    """A training step on `batch` samples of this rank; shared=False: gradients are not averaged."""
    minamp.manual_seed(0)
    model = mlp()
    net = dist.DistributedDataParallel(model) if shared else model
    x, y = minamp.randn(batch, 784), minamp.randint(0, 10, (batch,))
    opt, scaler = optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), minamp.GradScaler(enabled=amp)

    def step():
        with minamp.autocast(enabled=amp):
            loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

    return step


def measure():
    """Everything that is measured on this number of ranks."""
    n, found = dist.get_world_size(), {}
    for name, amp in (("float32", False), ("float16", True)):
        found[f"{name} shared"] = fastest(step_of(BATCH // n, amp), 40)
        # the same share of the batch without averaging: what computing alone takes, with all ranks at it
        found[f"{name} alone"] = fastest(step_of(BATCH // n, amp, shared=False), 40)
    sums = {}
    for size in SIZES:
        array = np.zeros(size // 4, np.float32)
        group = dist.group.group()
        sums[size] = fastest(lambda a=array, g=group: g.wait(g.start_all_reduce(a), "scaling"), 60)
    found["sums"] = sums
    found["gradient bytes"] = 4 * sum(p.numel() for p in mlp().parameters())
    return found


# ---------------------------------------------------------------------------------------------------------- the model


def fit(sums, n):
    """(latency of a message in s, bytes per s) of the ring that is closest to what was measured: least squares of logarithms."""
    best = None
    for latency in np.geomspace(1e-7, 1e-3, 200):
        for bandwidth in np.geomspace(1e8, 1e11, 200):
            t = [ring(size, n, latency, bandwidth) for size in sums]
            miss = float(np.square(np.log(t) - np.log(list(sums.values()))).sum())
            if best is None or miss < best[0]:
                best = miss, latency, bandwidth
    return best[1:]


def ring(size, n, latency, bandwidth):
    """Seconds of a ring all-reduce of `size` bytes (Patarasuk and Yuan, 2009): 2 (n - 1) messages of size / n bytes."""
    return 2 * (n - 1) * (latency + size / n / bandwidth) if n > 1 else 0.0


def predicted(compute, size, n, latency, bandwidth, hidden):
    """Seconds of a step: computing, and what of the sums is not hidden behind the share `hidden` of it."""
    return compute + max(0.0, ring(size, n, latency, bandwidth) - hidden * compute)


# ---------------------------------------------------------------------------------------------------------- the page


def launched(ranks):
    line, environment = command(ranks, [str(Path(__file__).resolve())])
    paths = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {**environment, JOB: "1", "PYTHONPATH": paths}
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"scaling: {ranks} ranks ended with an error:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def tables(one, two):
    """The Markdown between the page's marks."""
    sums = {int(k): v for k, v in two["sums"].items()}
    latency, bandwidth = fit(sums, 2)
    size = one["gradient bytes"]
    lines = [
        f"Measured with {os.cpu_count()} cores, MPI on one machine, one BLAS thread a rank, an MLP 784-512-512-10 with "
        f"{size / 1e6:.1f} MB of gradients, {BATCH} samples a step on all ranks together.",
        "",
        "| step | 1 process | 2 processes | faster | computing alone on 2 | averaging, not hidden |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("float32", "float16"):
        a, b, alone = one[f"{name} shared"], two[f"{name} shared"], two[f"{name} alone"]
        cells = [
            f"{1e3 * a:.1f} ms",
            f"{1e3 * b:.1f} ms",
            f"{a / b:.2f} x",
            f"{1e3 * alone:.1f} ms",
            f"{1e3 * (b - alone):.1f} ms",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Sums of two ranks, fitted by latency {1e6 * latency:.1f} us and bandwidth {bandwidth / 1e9:.2f} GB/s:",
        "",
        "| bytes | measured | model |",
        "|---|---|---|",
        *(
            f"| {k:,} | {1e6 * v:.0f} us | {1e6 * ring(k, 2, latency, bandwidth):.0f} us |"
            for k, v in sums.items()
        ),
        "",
        "The step on 2 ranks by the model, if nothing of the sums were hidden, and if all were that fits behind backward (two "
        "thirds of computing):",
        "",
        "| step | nothing hidden | measured | hidden |",
        "|---|---|---|---|",
    ]
    for name in ("float32", "float16"):
        alone = two[f"{name} alone"]
        low, high = (predicted(alone, size, 2, latency, bandwidth, h) for h in (2 / 3, 0.0))
        lines.append(
            f"| {name} | {1e3 * high:.1f} ms | {1e3 * two[f'{name} shared']:.1f} ms | {1e3 * low:.1f} ms |"
        )
    compute = one["float32 alone"]
    lines += [
        "",
        f"On paper, with this latency and bandwidth between any two ranks and {BATCH} samples on each (float32; computing alone, "
        f"without averaging, takes {1e3 * compute:.1f} ms on one process): how much of n ranks' computing is left.",
        "",
        "| ranks | ring of n, nothing hidden | hidden behind backward | summed in float16 (half the bytes), hidden |",
        "|---|---|---|---|",
    ]
    for n in RANKS:
        shares = [
            compute / predicted(compute, s, n, latency, bandwidth, h)
            for s, h in ((size, 0.0), (size, 2 / 3), (size / 2, 2 / 3))
        ]
        lines.append(f"| {n:,} | " + " | ".join(f"{s:.0%}" for s in shares) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--page", action="store_true", help="write the tables into notebooks/pages/data_parallel.md"
    )
    args = parser.parse_args()
    text = tables(launched(1), launched(2))
    print(text)
    if args.page:
        old = PAGE.read_text(encoding="utf-8")
        head, tail = old.split(START)[0], old.split(END)[1]
        PAGE.write_text(f"{head}{START}\n\n{text}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    if JOB in os.environ:
        dist.init()
        facts = measure()
        dist.log(json.dumps(facts))
    else:
        main()
