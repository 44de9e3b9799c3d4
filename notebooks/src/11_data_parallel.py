# %% [markdown]
# # 11. Several processes
#
# One process is not enough, so several share the work: each has the whole network, takes its share of every batch, and
# the gradients are averaged. What does that do to half precision? Who decides that a step is skipped? In which format
# may gradients be added up? And what happens to the others when one process dies?
#
# After this notebook you will be able to
#
# - say when training on several processes is the same training, and how exactly;
# - read a timeline of gradients that travel while backward still runs, and choose how they are packed;
# - predict which processes skip a step after an overflow on one of them, and when that goes wrong;
# - compute how much memory each process needs with the optimizer's state in shares, and see what that leaves out.
#
# It needs about 45 minutes. Where you see **Predict**, stop and write your answer down first. The answer is
# the output of the next cell, folded away where the viewer can do that.
#
# It runs without MPI, the library by which processes talk to each other. Most of it is done by hand in this one
# process; what takes several is then printed as *not measured*, with the reason.
#
# The first cell finds minamp. If it says that minamp is not there: get the repository, run `pip install -e .`
# in its folder, and start this notebook again.
# On a hosted notebook service, in a cell above the first: `!git clone` the repository, then `%pip install -e` its
# folder, with `[distributed]` behind the folder's name for MPI, and restart the kernel.

# %%
import sys
from pathlib import Path

try:
    import minamp
except ImportError:  # not installed, but perhaps this notebook lies in the repository
    roots = [p for p in Path.cwd().resolve().parents if (p / "minamp" / "formats.py").exists()]
    if not roots:
        raise ImportError(
            "minamp is not here: get its repository, run `pip install -e .` in its folder, and restart"
        ) from None
    sys.path.insert(0, str(roots[0]))
    import minamp

import json
import os
import subprocess
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor

import matplotlib.pyplot as plt
import numpy as np

import minamp.nn.functional as F
from minamp import bfloat16, float16, float32, nn, optim
from minamp.data import DataLoader, digits
from minamp.distributed.__main__ import why_not
from minamp.formats import format_of, narrow, widen

BLUE, RED, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#666666"
plt.rcParams.update({"figure.dpi": 80, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
train, _ = digits()
print("minamp", minamp.__version__)

# %% [markdown]
# ## Starting ranks
#
# All processes of a run execute the same program. Each has a number, its *rank*, from 0 to $n - 1$, and does what its
# rank says. `python -m minamp.distributed -n 2 train.py` starts two. A notebook is one process, so it writes such
# programs into a temporary folder, starts them, and reads what each rank reports, a line of JSON.

# %% tags=["machine"]
MISSING = why_not()
print("\n".join(textwrap.wrap(f"not measured below: {MISSING}" if MISSING else "ranks can be started", 100)))

# %%
KEPT = tempfile.TemporaryDirectory()  # it goes when the notebook ends
FOLDER = Path(KEPT.name)

# What the programs share, and this notebook too.
SHARED = """
import json, sys
import minamp
import minamp.distributed as dist
from minamp import nn

def network(activation=nn.Tanh, seed=0):
    minamp.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), activation(), nn.Linear(64, 10))

def deep():
    minamp.manual_seed(0)
    sizes = [784] + [192] * 12 + [10]
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])

def report(**facts):
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), **facts}) + "\\n")
    sys.stdout.flush()
"""
(FOLDER / "shared.py").write_text(SHARED)
sys.path.insert(0, str(FOLDER))
from shared import deep, network  # noqa: E402


def launch(ranks, program, *arguments):
    """Run a program of FOLDER on that many ranks: (what each reported, in their order; what was said on stderr)."""
    line = ["-m", "minamp.distributed", "-n", str(ranks), str(FOLDER / program), *map(str, arguments)]
    paths = [str(Path(minamp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *line],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=55,
    )
    found = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    return sorted(found, key=lambda facts: facts["rank"]), done.stderr


def not_measured():
    """What a cell says where no ranks can be started."""
    return "\n".join(textwrap.wrap(f"not measured: {MISSING}", 100))


# %% [markdown]
# ## Why the gradients are averaged
#
# The loss of a batch of $B$ samples is the mean of theirs, and so is its gradient. Cut the batch into $n$ shares of
# $B/n$:
#
# $$ \frac{1}{B} \sum_{i=1}^{B} \nabla \ell_i \;=\; \frac{1}{n} \sum_{r=1}^{n} \;\frac{n}{B} \sum_{i \in
# \text{share } r} \nabla \ell_i. $$
#
# On the right stands the average of what $n$ ranks get from `loss.backward()` on their shares. If every rank starts
# with the same weights and makes the same step with this average, all stay the same, and weights need never be sent.
#
# **Predict.** A batch of 64 on two ranks. How far is the average of their gradients from the gradient of the whole
# batch if they take 32 rows each? 48 and 16? And what is the *sum* of the two gradients, which is what adding up gives?


# %% tags=["hide-output"]
def gradients(model, x, y, scale=1.0, dtype=None):
    """The gradients of the mean loss of these rows, times `scale`, as arrays; under autocast in dtype."""
    for p in model.parameters():
        p.grad = None
    with minamp.autocast(dtype=dtype or float16, enabled=dtype not in (None, float32)):
        loss = F.cross_entropy(model(x), y)
    (loss * scale).backward()
    return loss.item(), [p.grad.numpy() for p in model.parameters()]


def flat(arrays):
    return np.concatenate([a.astype(np.float64).ravel() for a in arrays])


x, y = next(iter(DataLoader(train, 64, shuffle=True)))
model = network()
whole = flat(gradients(model, x, y)[1])
miss = {}
for rows in (32, 48):
    first, second = (flat(gradients(model, x[part], y[part])[1]) for part in (slice(rows), slice(rows, None)))
    ways = {
        "average": (first + second) / 2,
        "sum": first + second,
        "weighted by rows": (rows * first + (64 - rows) * second) / 64,
    }
    for way, total in ways.items():
        miss[rows, way] = np.linalg.norm(total - whole) / np.linalg.norm(whole)
        text = "less than 0.0001 %" if miss[rows, way] < 1e-6 else f"{miss[rows, way]:.0%}"
        print(f"{rows} and {64 - rows} rows, {way:18}off by {text}")
assert miss[32, "average"] < 1e-6 and miss[48, "weighted by rows"] < 1e-6
assert miss[48, "average"] > 0.1 and abs(miss[32, "sum"] - 1) < 1e-6

# %% [markdown]
# So shares must have the same size: `ShardedLoader` gives each rank its rows of one common order, refuses a batch that
# the ranks don't divide, and leaves out the last batch if it is not full. A sum is $n$ times too large, which looks
# like a learning rate $n$ times as high.
#
# ## The same training?
#
# In exact arithmetic, yes. Here are the losses of 40 steps on 2, 4 and 8 ranks beside those on one. They are computed in
# this process, share by share; each share's gradients are what its rank would have, rounding included.
#
# **Predict.** In which of float32, float16 and bfloat16 do the losses differ, and by how much? Does it matter whether the
# activation is a smooth curve (tanh) or has a kink (ReLU)?

# %% tags=["hide-output"]
SIX = [(activation, dtype) for activation in (nn.Tanh, nn.ReLU) for dtype in (float32, float16, bfloat16)]


def training(ranks, activation, dtype, steps=40, batch=64):
    """The loss of every step, with the gradients of `ranks` shares averaged in float32."""
    model, losses = network(activation), []
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = minamp.GradScaler(init_scale=2.0**10, enabled=dtype == float16)
    for (x, y), _ in zip(DataLoader(train, batch, shuffle=True, drop_last=True), range(steps), strict=False):
        shares = [slice(r * batch // ranks, (r + 1) * batch // ranks) for r in range(ranks)]
        found = [gradients(model, x[s], y[s], scaler.scale(minamp.ones(())).item(), dtype) for s in shares]
        for p, *several in zip(model.parameters(), *(grads for _, grads in found), strict=True):
            p.grad = minamp.tensor(sum(g * np.float32(1 / ranks) for g in several))
        scaler.step(optimizer)
        scaler.update()
        losses.append(np.mean([loss for loss, _ in found]))
    return np.array(losses)


apart = {}
for activation, dtype in SIX:
    alone = training(1, activation, dtype)
    for ranks in (2, 4, 8):
        apart[activation, dtype, ranks] = np.abs(training(ranks, activation, dtype) - alone) / alone.max()
print("largest difference of a loss on 2, 4 and 8 ranks, relative to the largest loss:")
for activation, dtype in [SIX[i] for i in (0, 1, 2, 4, 5)]:
    largest = max(apart[activation, dtype, ranks].max() for ranks in (2, 4, 8))
    limit = 0.5 if activation is nn.Tanh and dtype != float32 else 8.0
    eps = format_of(dtype).eps
    print(f"{activation.__name__:6}{np.dtype(dtype)!s:10}less than {limit:3g} eps = {limit * eps:.0e}")
    assert largest < limit * eps
    assert dtype == float32 or largest > 20 * apart[nn.Tanh, float32, 8].max()
assert all(apart[nn.ReLU, f, 8].max() > 2 * apart[nn.Tanh, f, 8].max() for f in (float16, bfloat16))

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained")
for axes, (activation, dtype) in zip(panels.flat, SIX, strict=True):
    for ranks, color in ((2, BLUE), (4, GREEN), (8, RED)):
        difference = np.maximum(apart[activation, dtype, ranks], 1e-9)
        axes.plot(np.arange(1, 41), difference, color=color, lw=1.3, label=f"{ranks} ranks")
    axes.set(title=f"{activation.__name__}, {np.dtype(dtype)}", yscale="log", ylim=(5e-10, 3e-2))
for axes in panels[1]:
    axes.set_xlabel("step")
for axes in panels[:, 0]:
    axes.set_ylabel("relative difference")
panels[0, 0].legend(frameon=False)
plt.show()

# %% [markdown]
# *How far the losses on 2, 4 and 8 ranks are from those on one, relative to the largest loss. Two activations,
# three formats. (0 is drawn as 1e-9.)*
#
# In float32 only the order of the additions changes, and the losses agree to the last digits. In half each rank rounds
# the sum over *its* rows, one process the sum over all rows. These are different roundings, and the losses differ; with
# tanh by less than one rounding to the format does. A ReLU makes it worse: an input that is rounded to the other side
# of 0 switches a derivative from 0 to 1, which is no small difference any more. None of this is an error, and none of it
# grows with the number of ranks. But if you compare a run on eight ranks bit by bit with one on a single process, you
# will look for a bug that is not there.
#
# The same with real processes. The loop is that of one process; the lines with `dist` are what is new:

# %% tags=["machine"]
TRAIN = """
import minamp.nn.functional as F
from shared import *
from minamp import optim
from minamp.data import digits

dist.init("mpi")
model = dist.DistributedDataParallel(network(seed=dist.get_rank()))     # all take rank 0's weights
optimizer, scaler = optim.SGD(model.parameters(), lr=0.05, momentum=0.9), minamp.GradScaler(init_scale=2.0**10)
loader, losses = dist.ShardedLoader(digits("train"), 64, shuffle=True), []   # this rank's share
for (x, y), _ in zip(loader, range(40)):
    with minamp.autocast():
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()                                         # ends with the averages in .grad
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
report(losses=losses, weights=[p.double().sum().item() for p in model.parameters()])
"""
(FOLDER / "train.py").write_text(TRAIN)
if MISSING:
    print(not_measured())
else:
    (a, b), said = launch(2, "train.py")
    real, by_hand = np.mean([a["losses"], b["losses"]], axis=0), training(2, nn.Tanh, float16)
    print(
        f"two ranks: loss {real[0]:.4f} -> {real[-1]:.4f}; by hand above {by_hand[0]:.4f} -> {by_hand[-1]:.4f}"
    )
    print(
        "the same in every step:",
        np.array_equal(real, by_hand),
        "- the same weights on both ranks:",
        a["weights"] == b["weights"],
    )
    assert np.abs(real - by_hand).max() < 1e-3 and a["weights"] == b["weights"] and a["losses"] != b["losses"]

# %% [markdown]
# ## Buckets that travel while backward runs
#
# Summing $B$ bytes over $n$ ranks in a ring, each rank sending to the next, takes $2(n-1)$ messages of $B/n$ bytes:
#
# $$ t = 2 (n - 1) \left( \alpha + \frac{B}{n \beta} \right) $$
#
# with the *latency* $\alpha$ of a message and the *bandwidth* $\beta$ of a link. Backward finds the gradients of the last
# layer first, so they can leave while it still works on the others. Send each as soon as it is there, and there are
# many latencies; wait for all, and nothing travels during backward. So gradients are packed into *buckets* of about a
# megabyte, filled from the last layer to the first, and a bucket leaves when it is full.
#
# Suppose 16 ranks, $\alpha$ = 30 microseconds, $\beta$ = 3.1 GB/s (a network of 25 Gbit/s), and sixteen layers, each
# with a weight of 1 MB and three vectors, for which backward takes 1.5 ms.
#
# **Predict.** How long does one sum take for a vector, and how long for a weight? Which bucket size is best: nothing
# packed, 1, 2, 4 or 8 MB, or all in one?


# %% tags=["hide-output"]
def pack(sizes, cap):
    """Buckets of the gradients in the order in which backward finds them, each of at most `cap` bytes (or of one)."""
    buckets = [[]]
    for i, size in enumerate(sizes):
        if buckets[-1] and sum(sizes[j] for j in buckets[-1]) + size > cap:
            buckets.append([])
        buckets[-1].append(i)
    return buckets


def ring(size, ranks=16, latency=30e-6, bandwidth=3.1e9):
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


MB, LAYERS = 2**20, 16
sizes = [2048, 2048, 2048, MB] * LAYERS  # bytes of the gradients, last layer first
known = [1.5e-3 * (layer + part) for layer in range(LAYERS) for part in (0.25, 0.5, 0.75, 1.0)]
CAPS = {"each alone": 0, "1 MB": MB, "2 MB": 2 * MB, "4 MB": 4 * MB, "8 MB": 8 * MB, "all in one": 1e9}
timelines = {}
print(
    f"one vector {1e3 * ring(2048):.2f} ms, one weight {1e3 * ring(MB):.2f} ms; backward {1e3 * known[-1]:.1f} ms\n"
)
print(f"{'buckets of':12}{'number':>8}{'backward and sums':>20}{'not hidden':>13}")
for name, cap in CAPS.items():
    bars, free = [], 0.0  # when the link is free again
    for bucket in pack(sizes, cap):
        start = max(free, known[bucket[-1]])
        free = start + ring(sum(sizes[i] for i in bucket))
        bars.append((start, free))
    timelines[name] = bars
    print(f"{name:12}{len(bars):8}{1e3 * free:17.1f} ms{1e3 * (free - known[-1]):10.1f} ms")
ends = {name: bars[-1][1] for name, bars in timelines.items()}
assert min(ends, key=ends.get) == "2 MB" and max(ends, key=ends.get) == "each alone"

# %%
figure, panels = plt.subplots(3, 2, figsize=(9, 4.8), sharex=True, sharey=True, layout="constrained")
for axes, (name, bars) in zip(panels.flat, timelines.items(), strict=True):
    for layer in range(LAYERS):
        axes.barh(1, 1.5, left=1.5 * layer, height=0.6, color=GREY, alpha=0.6, edgecolor="white", lw=0.6)
    for start, end in bars:
        axes.barh(0, 1e3 * (end - start), left=1e3 * start, height=0.6, color=BLUE, edgecolor="white", lw=0.6)
    axes.axvline(1e3 * known[-1], color=RED, lw=1, ls="--")
    axes.set(title=f"{name}: {1e3 * bars[-1][1]:.1f} ms", yticks=[0, 1], yticklabels=["sums", "backward"])
    axes.title.set_fontsize(10)
for axes in panels[-1]:
    axes.set_xlabel("ms since the start of backward")
plt.show()

# %% [markdown]
# *Backward of sixteen layers (grey) and the sums of their gradients (blue), by the formula above, for six bucket sizes.
# Right of the red line nothing is left to compute: there sums cost time.*
#
# With tiny buckets the link does nothing but wait for latencies; with 1 MB too, as a weight then finds no room beside its
# vectors. With one bucket the link is idle until backward has ended. In between nearly all of it is hidden, and how fast
# the network is hardly matters, as long as the sums keep up.
# Half gradients would halve $B$ and leave $\alpha$; what they lose comes below.
#
# Now measured: two ranks, one backward through six layers, with the times at which gradients became known and buckets
# left and were there. The largest bucket size holds all.

# %% tags=["machine"]
BUCKETS = '''
import time
import minamp.nn.functional as F
from shared import *

class Watched:
    """A request that notes when it was seen to be done."""
    def __init__(self, request, note):
        self.request, self.note = request, note
    def Test(self):
        done = self.request.Test()
        if done and self.note:
            self.note(), setattr(self, "note", None)
        return done

dist.init("mpi")
for cap in map(float, sys.argv[1:]):
    minamp.manual_seed(0)
    model = dist.DistributedDataParallel(nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(512, 512), nn.Tanh())]), cap)
    x, reducer = minamp.randn(128, 512), model._reducer
    send, arrived = reducer._send, reducer.arrived
    def watched_send(b):
        left = time.perf_counter()
        send(b)
        b.request = Watched(b.request, lambda: buckets.append([left, time.perf_counter()]))
    reducer._send = watched_send
    reducer.arrived = lambda p, total: (known.append(time.perf_counter()), arrived(p, total))
    rounds = []
    for _ in range(12):
        known, buckets = [], []
        loss = model(x).square().mean()
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        rounds.append({"start": start, "known": known, "buckets": buckets, "end": time.perf_counter()})
    report(cap=cap, rounds=rounds, sizes=[[4 * p.numel() for p in b.parameters] for b in reducer.buckets])
'''
(FOLDER / "buckets.py").write_text(BUCKETS)
caps = {0.0: "each alone", 1.0: "1 MB", 2.0: "2 MB", 100.0: "all in one"}
if MISSING:
    print(not_measured())
else:
    found, said = launch(2, "buckets.py", *caps)
    pairs = {cap: [f for f in found if f["cap"] == cap] for cap in caps}
    figure, panels = plt.subplots(2, 2, figsize=(9, 4.4), sharex=True, sharey=True, layout="constrained")
    for axes, (cap, pair) in zip(panels.flat, pairs.items(), strict=True):
        spans = [max(f["rounds"][i]["end"] - f["rounds"][i]["start"] for f in pair) for i in range(12)]
        best = int(np.argmin(spans))
        zero = min(f["rounds"][best]["start"] for f in pair)
        for f in pair:
            times, row = f["rounds"][best], 2.4 * (1 - f["rank"])
            for a, b in zip([times["start"], *times["known"]], times["known"], strict=False):
                axes.barh(
                    row + 1,
                    1e3 * (b - a),
                    left=1e3 * (a - zero),
                    height=0.6,
                    color=GREY,
                    alpha=0.6,
                    edgecolor="w",
                )
            thick = 0.9 / len(times["buckets"])
            for i, (a, b) in enumerate(times["buckets"]):
                at = row + 0.4 - (i + 0.5) * thick
                axes.barh(at, 1e3 * (b - a), left=1e3 * (a - zero), height=0.8 * thick, color=BLUE)
            axes.plot(1e3 * (times["end"] - zero), row + 0.5, "|", color=RED, ms=22, mew=2)
        n = len(pair[0]["sizes"])
        axes.set(title=f"{caps[cap]}: {n} bucket{'s' * (n > 1)}, {1e3 * min(spans):.1f} ms")
        axes.set_yticks([0, 1, 2.4, 3.4], ["rank 1 sums", "backward", "rank 0 sums", "backward"])
    for axes in panels[-1]:
        axes.set_xlabel("ms since the start of backward")
    plt.show()
    order = [4 * 512, 4 * 512 * 512] * 6
    for cap, pair in pairs.items():
        assert [[order[i] for i in bucket] for bucket in pack(order, cap * MB)] == pair[0]["sizes"], cap
        left = pair[0]["rounds"][-1]
        assert cap == 100.0 or left["buckets"][0][0] < left["known"][-1], (
            "the first bucket leaves during backward"
        )
    print("minamp packs as pack() does, and its first bucket leaves before the last gradient is known.")

# %% [markdown]
# *If there is a figure: two ranks on this machine in one backward, the fastest of twelve. Grey: backward, gradient by
# gradient. Blue: the buckets, the first on top, each from its start to when it was seen to be there, for which the rank
# has to ask. Red: the averages are in place. Between processes of one machine latencies are short and memory is fast,
# but the sums take time from the cores that compute, so little is gained; what can be seen is the order of events.*
#
# ## One rank's overflow reaches all
#
# With `GradScaler` the scaled gradients are averaged, then unscaled. So look at the sum.
#
# **Predict.** On rank 2 of four one gradient overflows. Which of the four scalers see it? And if two ranks overflow, one to
# $+\infty$ and one to $-\infty$, can it cancel?

# %% tags=["hide-output"]
for values in ([1.0, 2.0, np.inf, 3.0], [1.0, -np.inf, np.inf, 3.0], [1.0, np.nan, 2.0, 3.0]):
    with np.errstate(invalid="ignore"):
        total = np.sum(np.array(values, np.float32) / 4)
    print(f"average of {', '.join(f'{v:g}' for v in values):18} = {total:g}")
    assert not np.isfinite(total)

# %% [markdown]
# Infinities and NaN survive every sum, and all ranks receive the same sum. So all see the overflow, skip the step and
# halve the scale, and nobody had to send a word about it. It is why an ordinary `GradScaler` is enough. Two ranks, and
# in step 3 the inputs of rank 1 are made huge:

# %% tags=["machine"]
OVERFLOW = """
import minamp.nn.functional as F
from shared import *
from minamp import optim
from minamp.data import digits

dist.init("mpi")
model = dist.DistributedDataParallel(network())
optimizer, scaler = optim.SGD(model.parameters(), lr=0.05), minamp.GradScaler(init_scale=2.0**10)
for step, (x, y) in zip(range(1, 6), dist.ShardedLoader(digits("train"), 64)):
    if step == 3 and dist.get_rank() == 1:
        x = x * 1e30
    with minamp.autocast():
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    made = scaler.step(optimizer) is not None
    scaler.update()
    report(step=step, loss=loss.item(), made=made, scale=scaler.get_scale())
"""
(FOLDER / "overflow.py").write_text(OVERFLOW)
if MISSING:
    print(not_measured())
else:
    found, said = launch(2, "overflow.py")
    print(f"{'step':>5}{'rank':>6}{'loss of its share':>20}{'step was':>11}{'scale':>8}")
    for f in sorted(found, key=lambda f: (f["step"], f["rank"])):
        print(
            f"{f['step']:5}{f['rank']:6}{f['loss']:20.4f}{'made' if f['made'] else 'skipped':>11}{f['scale']:8g}"
        )
        assert f["made"] == (f["step"] != 3) and np.isfinite(f["loss"]) == ((f["step"], f["rank"]) != (3, 1))
        assert f["scale"] == (1024 if f["step"] < 3 else 512)
    assert len(found) == 10

# %% [markdown]
# The price: the scale must suit the rank with the largest gradients.
#
# **Predict.** A batch of 64 on 1, 4, 16, 64 ranks. What is the highest scale, a power of two, at which no gradient of any
# rank overflows? Does it change with the number of ranks, although the average of their gradients does not?

# %% tags=["hide-output"]
highest, largest, model = {}, {}, network(nn.ReLU)
for ranks in (1, 4, 16, 64):
    shares = [slice(r * 64 // ranks, (r + 1) * 64 // ranks) for r in range(ranks)]
    largest[ranks] = max(np.abs(flat(gradients(model, x[s], y[s])[1])).max() for s in shares)
    exponent = 24
    while not all(
        np.isfinite(flat(gradients(model, x[s], y[s], 2.0**exponent, float16)[1])).all() for s in shares
    ):
        exponent -= 1
    highest[ranks] = exponent
    who = f"{ranks:3} rank{'s' if ranks > 1 else ' '} of {64 // ranks:2} rows"
    print(f"{who}: largest gradient {largest[ranks]:.2f}, highest scale 2^{exponent}")
assert highest[1] > highest[16] > highest[64] and largest[64] > 4 * largest[1]

# %% [markdown]
# The mean of few rows scatters more than that of many, and the largest of many ranks' gradients decides. So with more ranks
# the scale settles lower, by some powers of two. `GradScaler` finds that by itself, with a few skipped steps more at
# the start.
#
# ## Gradients added up in half
#
# Half the bytes, half the time? The sums above were float32. Now round each partial sum to half, as
# happens if half arrays are passed round the ring.
#
# **Predict.** Two ranks. What are, in float16, the sums 2048 + 1 and 40000 + 40000, and what if each is divided by 2 first,
# as an average allows? What is the average of two gradients of 1e-8? And all that in bfloat16?


# %% tags=["hide-output"]
def half_sum(arrays, dtype):
    """The sum over ranks, in the order of the ring: added in float32 and rounded for every rank it passes."""
    total = narrow(np.asarray(arrays[0], np.float32), dtype)
    for a in arrays[1:]:
        total = narrow(widen(total) + widen(narrow(np.asarray(a, np.float32), dtype)), dtype)
    return widen(total)


ask = np.array([[2048, 40000, 1e-8], [1, 40000, 1e-8]], np.float32)
print(f"{'':34}{'2048, 1':>10}{'40000, 40000':>14}{'1e-8, 1e-8':>14}")
for dtype in (float16, bfloat16):
    for way, values in (("summed", ask), ("halves summed (average)", ask / 2)):
        found = half_sum(values, dtype)
        print(
            f"{np.dtype(dtype)!s:10}{way:24}"
            + "".join(f"{v:{w}.6g}" for v, w in zip(found, (10, 14, 14), strict=True))
        )
        if dtype == float16:
            assert found[2] == 0 and (np.isinf(found[1]) if way == "summed" else found[1] == 40000)
print(
    f"{'float32':10}{'halves summed (average)':24}"
    + "".join(f"{v:{w}.6g}" for v, w in zip((ask / 2).sum(0), (10, 14, 14), strict=True))
)
assert half_sum(ask, float16)[0] == 2048

# %% [markdown]
# Dividing first saves the sum from overflowing, and moves the small gradients nearer to 0. In the average the 1 is lost
# either way: between 1024 and 2048 the numbers of float16 are 1 apart. bfloat16 keeps 1e-8 and loses more digits.
#
# How much of a network's gradients is that? Take a deep one with small initial weights, whose gradients shrink from layer to
# layer as in notebook 3, and one batch of 64 on 2, 8 and 64 ranks. Divide the gradients by the number of ranks, add them up
# in half, and compare with the exact average. Once as they are, once with a loss scale.
#
# **Predict.** Below which size will gradients be lost without a scale? Does the scale help? Does the error grow with the
# number of ranks?

# %% tags=["hide-output"]
SCALES, RANKS = (1.0, 2.0**12), (2, 8, 64)
minamp.manual_seed(0)
hidden = [m for a in (784, 64, 64, 64, 64) for m in (nn.Linear(a, 64), nn.Tanh())]
model, errors, flushed = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10)), {}, {}
for p in model.parameters():
    nn.init.normal_(p, std=0.01)
edges = np.arange(-40, 0)
for ranks in RANKS:
    several = [
        gradients(model, x[s], y[s])[1]
        for s in (slice(r * 64 // ranks, (r + 1) * 64 // ranks) for r in range(ranks))
    ]
    parts = np.array([flat(grads) for grads in several]) / ranks
    exact = parts.sum(0)
    size = np.floor(np.log2(np.abs(exact), where=exact != 0, out=np.full(exact.shape, -99.0)))
    for scale in SCALES:
        for dtype in (float16, bfloat16):
            found = half_sum(list(parts * scale), dtype).astype(np.float64) / scale
            off = np.abs(found - exact) / np.where(exact != 0, np.abs(exact), 1)
            errors[scale, ranks, dtype] = [
                np.median(off[size == e]) if (size == e).sum() > 50 else np.nan for e in edges
            ]
            lost = ((found == 0) & (exact != 0)).sum() / (exact != 0).sum()
            flushed[scale, ranks, dtype] = lost, np.linalg.norm(found - exact) / np.linalg.norm(exact)
print(f"{'':13}{'gradients that became 0':>26}{'error of all together':>25}")
print(f"{'scale':>6}{'ranks':>7}{'float16':>14}{'bfloat16':>12}{'float16':>13}{'bfloat16':>12}")
for scale in SCALES:
    for ranks in RANKS:
        (lost16, off16), (lostb, offb) = (flushed[scale, ranks, dtype] for dtype in (float16, bfloat16))
        print(f"{scale:6g}{ranks:7}{lost16:14.0%}{lostb:12.0%}{off16:13.2%}{offb:12.2%}")
worst = {dtype: [flushed[SCALES[1], n, dtype][1] for n in RANKS] for dtype in (float16, bfloat16)}
assert flushed[1.0, 64, float16][0] > flushed[SCALES[1], 64, float16][0]
assert worst[float16][0] < worst[float16][2] < worst[bfloat16][2] and worst[bfloat16][0] < worst[bfloat16][2]

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained")
for row, scale in zip(panels, SCALES, strict=True):
    for axes, ranks in zip(row, RANKS, strict=True):
        for dtype, color in ((float16, RED), (bfloat16, BLUE)):
            axes.plot(
                edges + 0.5, errors[scale, ranks, dtype], color=color, lw=1.6, label=str(np.dtype(dtype))
            )
        axes.axvline(-24 - np.log2(scale), color=GREY, lw=1, ls="--")
        title = f"{ranks} ranks, {'no scale' if scale == 1 else f'scale 2^{np.log2(scale):.0f}'}"
        axes.set(title=title, yscale="log", xlim=(-38, -2))
for axes in panels[1]:
    axes.set_xlabel("power of two of the gradient")
for axes in panels[:, 0]:
    axes.set_ylabel("relative error")
panels[1, 0].legend(frameon=False, loc="upper right")
plt.show()

# %% [markdown]
# *The typical (median) relative error of a gradient that was averaged in half, by its size, for 2, 8 and 64 ranks,
# without and with a loss scale. An error of 1 means that nothing is left. Dashed: the smallest number of float16,
# divided by the scale.*
#
# float16 loses the small gradients to its range, and a loss scale brings them back. bfloat16 loses digits everywhere:
# each rank that is passed rounds to 8 bits, and with 64 ranks the error of all together, printed above, is several
# percent. float32 sums have neither trouble, and overlapping hides most of their time, so minamp sums in float32 even
# where the gradients are half. `DistributedDataParallel(..., reduce_dtype=float16)` exists for this lesson. Real ranks
# agree with the sums by hand:

# %% tags=["machine"]
HALF = """
from shared import *
import numpy as np

dist.init("mpi")
ask = np.array([[2048, 40000, 1e-8], [1, 40000, 1e-8]], np.float32)[dist.get_rank()]
found = {name: dist.all_reduce(getattr(minamp.tensor(ask), method)()).float().tolist()
         for name, method in (("float16", "half"), ("bfloat16", "bfloat16"))}
small = {}
for name in ("float32", "float16"):
    layer = nn.Linear(1, 1, bias=False)
    model = dist.DistributedDataParallel(layer, reduce_dtype=getattr(minamp, name))
    (model(minamp.ones(1, 1)) * 1e-8).sum().backward()
    small[name] = layer.weight.grad.item()
report(found=found, small=small)
"""
(FOLDER / "half.py").write_text(HALF)
if MISSING:
    print(not_measured())
else:
    found, said = launch(2, "half.py")
    for f in found:
        small = ", ".join(f"{value:.3g} in {name}" for name, value in f["small"].items())
        print(
            f"rank {f['rank']}: summed in float16 {f['found']['float16']}; a gradient of 1e-8, averaged: {small}"
        )
        for dtype in (float16, bfloat16):
            assert np.array_equal(f["found"][str(np.dtype(dtype))], half_sum(ask, dtype))
        assert f["small"]["float16"] == 0 and abs(f["small"]["float32"] - 1e-8) < 1e-14
    assert len(found) == 2

# %% [markdown]
# ## When ranks don't see the same gradients
#
# All went well because every scaler looked at the same numbers. That ends when ranks *share out* the parameters: each keeps
# the optimizer's state of some of them, updates those, and sends the new weights to the others (the next section says why).
# A scaler looks at its optimizer's gradients, and these are now only a part.
#
# Two ranks, in this process again. Rank 0 updates the first layer, rank 1 the second. Now and then an overflow hits a gradient
# of the first layer only; the averages on both ranks have it, but rank 1's scaler does not look there. The ranks scale
# their losses by $S_0$ and $S_1$, add up, and divide by their own scale:
#
# $$ \frac{1}{S_0} \cdot \frac{S_0\, g_0 + S_1\, g_1}{2} \;\approx\; \frac{1 + S_1/S_0}{2}\, g. $$
#
# **Predict.** Both start at 4096. After four overflows, what are $S_0$ and $S_1$? By which factor are the first layer's
# gradients too large, and the second layer's too small? What does SGD make of it?


# %% tags=["hide-output"]
def two_ranks(overflows, compared, steps=60):
    """Scales of both ranks after each step, and the losses; compared: they tell each other what they have found."""
    models = [network() for _ in range(2)]
    mine = [list(models[0].parameters())[:2], list(models[1].parameters())[2:]]
    optimizers = [optim.SGD(share, lr=0.05, momentum=0.9) for share in mine]
    scalers = [minamp.GradScaler(init_scale=2.0**12, growth_interval=1000) for _ in range(2)]
    scales, losses = [], []
    for step, (x, y) in zip(range(steps), DataLoader(train, 64, shuffle=True, drop_last=True), strict=False):
        halves = slice(32), slice(32, None)
        found = [
            gradients(m, x[s], y[s], scaler.scale(minamp.ones(())).item(), float16)
            for m, scaler, s in zip(models, scalers, halves, strict=True)
        ]
        for a, b, *grads in zip(*(m.parameters() for m in models), *(g for _, g in found), strict=True):
            a.grad, b.grad = (minamp.tensor(sum(g * np.float32(0.5) for g in grads)) for _ in range(2))
        if step in overflows:
            for m in models:  # the average is the same on both ranks
                next(m.parameters()).grad[0, 0] = np.inf
        bad = [not all(np.isfinite(p.grad.numpy()).all() for p in share) for share in mine]
        if compared and any(bad):
            for share in mine:
                share[0].grad[...] = np.inf
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        # the owner sends its weights
        for i, (a, b) in enumerate(zip(*(m.parameters() for m in models), strict=True)):
            owner, other = (a, b) if i < 2 else (b, a)
            other.data = owner.detach().clone()
        scales.append([s.get_scale() for s in scalers])
        losses.append(np.mean([loss for loss, _ in found]))
    return np.array(scales), np.array(losses)


SETTINGS = {
    "not compared, 1 overflow": ([10], False),
    "not compared, 4 overflows": ([10, 15, 20, 25], False),
    "compared, 4 overflows": ([10, 15, 20, 25], True),
}
drift = {name: two_ranks(*setting) for name, setting in SETTINGS.items()}
ends = {name: losses[-20:].mean() for name, (_, losses) in drift.items()}
print(f"{'':28}{'S0':>7}{'S1':>7}{'first layer':>14}{'second layer':>15}{'loss at the end':>18}")
for name, (scales, _) in drift.items():
    s0, s1 = scales[-1]
    print(f"{name:28}{s0:7g}{s1:7g}{(1 + s1 / s0) / 2:12.2f} x{(1 + s0 / s1) / 2:13.2f} x{ends[name]:18.1f}")
assert ends["not compared, 4 overflows"] > 1.2 * ends["compared, 4 overflows"]
assert drift["not compared, 4 overflows"][0][-1].tolist() == [256, 4096]
assert drift["compared, 4 overflows"][0][-1].tolist() == [256, 256]

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, sharey="row", layout="constrained")
for column, (name, (scales, losses)) in zip(panels.T, drift.items(), strict=True):
    for rank, color, style in ((0, RED, "-"), (1, BLUE, "--")):
        column[0].step(
            np.arange(1, 61), np.log2(scales[:, rank]), color=color, ls=style, lw=1.8, label=f"rank {rank}"
        )
    column[1].plot(np.arange(1, 61), losses, color=GREEN, lw=1.4)
    column[0].set(title=name, ylim=(7, 13))
    column[0].title.set_fontsize(10)
    column[1].set(xlabel="step", ylim=(0, 2.5))
panels[0, 0].set_ylabel("log2 of the scale")
panels[1, 0].set_ylabel("loss")
panels[0, 0].legend(frameon=False, loc="lower left")
plt.show()

# %% [markdown]
# *Scales of two ranks that each update one layer, and the loss, for overflows in the first layer. Left and middle: each scaler
# sees its own layer. Right: they compare what they found.*
#
# Nothing is NaN and nothing is reported. But the steps are half made, and the learning rates of the layers drift apart, by
# a factor of two for every overflow that one rank alone has seen. The repair is one number: the largest `found_inf` of
# all ranks, before anybody decides. minamp's `ShardedGradScaler` is a `GradScaler` that asks for it.
#
# Now two real ranks. First every rank updates all weights, and an infinity comes into the gradients of rank 0 alone, after
# averaging; then the state is in shares, and it is in both ranks' gradients of the first layer, which rank 0 updates. There
# `optimizer.step()` also exchanges the new weights. What happens if one rank skips it?

# %% tags=["machine"]
DRIFT = """
import minamp.nn.functional as F
from shared import *
from minamp import optim
from minamp.data import digits

dist.init("mpi", timeout=3)
for in_shares, kind in ((False, minamp.GradScaler), (False, dist.ShardedGradScaler), (True, dist.ShardedGradScaler),
                        (True, minamp.GradScaler)):
    model = dist.DistributedDataParallel(network())
    if in_shares:
        optimizer = dist.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.05)
    else:
        optimizer = optim.SGD(model.parameters(), lr=0.05)
    scaler, scales = kind(init_scale=2.0**12), []
    for step, (x, y) in zip(range(6), dist.ShardedLoader(digits("train"), 64)):
        with minamp.autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step in (2, 4) and (in_shares or dist.get_rank() == 0):
            next(model.parameters()).grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    weights = sum(p.double().abs().sum().item() for p in model.parameters())
    report(in_shares=in_shares, kind=kind.__name__, scales=scales, weights=weights)
"""
(FOLDER / "drift.py").write_text(DRIFT)
if MISSING:
    print(not_measured())
else:
    found, said = launch(2, "drift.py")
    runs = {}
    for f in sorted(found, key=lambda f: (f["in_shares"], f["kind"], f["rank"])):
        runs.setdefault(("in shares" if f["in_shares"] else "whole", f["kind"]), []).append(f)
    for (state, kind), (a, b) in runs.items():
        same = "the same" if a["weights"] == b["weights"] else "different"
        print(f"{state:10}{kind:18}last scales {a['scales'][-1]:g} and {b['scales'][-1]:g}, {same} weights")
    error = next(line for line in said.splitlines() if line.startswith("TimeoutError"))
    print("in shares GradScaler", *textwrap.wrap(error.partition(": one of")[0], 80), sep="\n    ")
    last = {key: [f["scales"][-1] for f in pair] for key, pair in runs.items()}
    assert last == {
        ("whole", "GradScaler"): [1024, 4096],
        ("whole", "ShardedGradScaler"): [1024, 1024],
        ("in shares", "ShardedGradScaler"): [1024, 1024],
    }
    assert "has waited 3 s for the other ranks" in error

# %% [markdown]
# Without comparing, the ranks' weights are no longer the same in the first run, and training goes on with two networks. In the
# last one they take different ways: rank 1 makes its step and waits for the weights of rank 0, which has skipped its own and
# waits for the next gradients of rank 1. They wait until the first loses patience: an error, which is better. State in
# shares always needs the `ShardedGradScaler`.

# %% [markdown]
# ## The optimizer's state in shares
#
# Why share out parameters at all? Count the bytes of a parameter, with half weights and Adam: 2 for the weight, 2 for its
# gradient, and in float32 a master weight and two moments:
#
# $$ 2 + 2 + \underbrace{4 + 4 + 4}_{\text{optimizer state}} = 16. $$
#
# On $n$ ranks all of it is there $n$ times, though each rank needs all weights and gradients, but the state only for what it
# updates. Shared out, that is
#
# $$ 4 + \frac{12}{n} \quad\text{bytes per parameter on each rank.} $$
#
# **Predict.** A network of thirteen layers, the first four times as large as the next ones. How many bytes per parameter has the
# fullest rank with 1, 2, 4, 8, 16, 64 ranks, if whole tensors are dealt out, the largest first, each to the rank that has
# least? Where does the formula fail?


# %% tags=["hide-output"]
def deal(parameters, ranks):
    """Indices of the parameters that each rank updates."""
    hands, load = [[] for _ in range(ranks)], [0] * ranks
    for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        rank = load.index(min(load))
        hands[rank].append(i)
        load[rank] += parameters[i].numel()
    return hands


def tensor_bytes(tensors):
    return sum(t.numel() * t.dtype.itemsize for t in tensors)


def measured(ranks):
    """For every rank the bytes of weights, gradients and state, after a step of Adam over its share."""
    model = deep().half()
    parameters, found = list(model.parameters()), []
    with minamp.autocast():
        F.cross_entropy(model(x.half()), y).backward()
    for hand in deal(parameters, ranks):
        state = []
        if hand:
            optimizer = optim.Adam([parameters[i] for i in hand], lr=1e-6, master_weights=True)
            optimizer.step()
            state = [
                t
                for buffers in optimizer.state.values()
                for t in buffers.values()
                if isinstance(t, minamp.Tensor)
            ]
        found.append(
            (tensor_bytes(parameters), tensor_bytes([p.grad for p in parameters]), tensor_bytes(state))
        )
    return np.array(found) / sum(p.numel() for p in parameters)


shares = {ranks: measured(ranks) for ranks in (1, 2, 4, 8, 16, 64)}
print(f"{'ranks':>6}{'formula':>10}{'mean':>8}{'fullest rank':>14}{'ranks without a share':>23}")
for ranks, found in shares.items():
    total = found.sum(1)
    idle = int((found[:, 2] == 0).sum())
    print(f"{ranks:6}{4 + 12 / ranks:10.2f}{total.mean():8.2f}{total.max():14.2f}{idle:23}")
    assert abs(total.mean() - (4 + 12 / ranks)) < 1e-9
assert shares[1].tolist() == [[2, 2, 12]] and shares[2].sum(1).max() < 10.5 and shares[64].sum(1).max() > 7

# %%
figure, panels = plt.subplots(2, 3, figsize=(9, 4.6), sharey=True, layout="constrained")
for axes, (ranks, found) in zip(panels.flat, shares.items(), strict=True):
    bottom = np.zeros(ranks)
    for column, color, label in ((0, BLUE, "weights"), (1, GREEN, "gradients"), (2, RED, "optimizer state")):
        width = 0.85 if ranks < 64 else 1.0
        axes.bar(np.arange(ranks), found[:, column], width, bottom=bottom, color=color, label=label)
        bottom += found[:, column]
    axes.axhline(4 + 12 / ranks, color="black", ls="--", lw=1)
    axes.set(
        title=f"{ranks} rank{'s' * (ranks > 1)}: formula {4 + 12 / ranks:.2f}",
        xticks=[0, ranks - 1] if ranks > 1 else [0],
    )
for axes in panels[1]:
    axes.set_xlabel("rank")
for axes in panels[:, 0]:
    axes.set_ylabel("bytes per parameter")
panels[0, 2].legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# *Bytes per parameter on each rank, measured, with optimizer state in shares of whole tensors. Dashed: $4 + 12/n$.*
#
# The mean is the formula exactly. But a tensor stays whole, so the fullest rank can't have less than the largest tensor,
# and with many ranks most have none. Systems that train large models cut tensors into pieces for that reason. What the formula
# leaves out: the activations kept for backward, which more ranks do shrink, as each has a smaller share of the batch; and the
# bucket buffers.
#
# The price of it is a message: each rank receives the weights that others have updated. What the real thing measures, on four:

# %% tags=["machine"]
ZERO = """
import minamp.nn.functional as F
from shared import *
from minamp import optim
from minamp.data import digits

dist.init("mpi")
ends = []
for shared_out in (False, True):
    model = dist.DistributedDataParallel(deep().half())
    options = {"lr": 1e-3, "master_weights": True}
    if shared_out:
        optimizer = dist.ZeroRedundancyOptimizer(model.parameters(), optim.Adam, **options)
    else:
        optimizer = optim.Adam(model.parameters(), **options)
    for (x, y), _ in zip(dist.ShardedLoader(digits("train"), 64), range(3)):
        with minamp.autocast():
            loss = F.cross_entropy(model(x.half()), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ends.append([p.detach().clone() for p in model.parameters()])
same = all((a == b).all().item() for a, b in zip(*ends))
report(bytes=optimizer.state_bytes(), parameters=sum(p.numel() for p in model.parameters()), mine=optimizer.mine, same=same)
"""
(FOLDER / "zero.py").write_text(ZERO)
if MISSING:
    print(not_measured())
else:
    found, said = launch(4, "zero.py")
    for f in found:
        print(
            f"rank {f['rank']}: {f['bytes']:9,} bytes of state, {4 + f['bytes'] / f['parameters']:.2f} bytes per parameter in all"
        )
    hands = deal(list(deep().parameters()), 4)
    assert [sorted(f["mine"]) for f in found] == [sorted(hand) for hand in hands] and all(
        f["same"] for f in found
    )
    assert np.allclose([f["bytes"] / f["parameters"] for f in found], shares[4][:, 2])
    print(
        "as computed above; and the weights are those of an optimizer that is whole on every rank, bit for bit."
    )

# %% [markdown]
# ## What ends a run
#
# A sum waits for everybody. So whoever does not come stops all, and in most systems all then wait in silence.
#
# **Predict.** Two ranks. What does rank 0 see when rank 1 has another seed for the order of the data? Gets one batch
# fewer? Raises an exception? Is killed by the system for lack of memory?

# %% tags=["hide-output", "machine"]
ENDS = """
import os, signal
import minamp.nn.functional as F
from shared import *
from minamp import optim
from minamp.data import digits

wrong, one = sys.argv[1], os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1"
dist.init("mpi", timeout=20)
model = dist.DistributedDataParallel(network())
optimizer = optim.SGD(model.parameters(), lr=0.05)
loader = dist.ShardedLoader(digits("train"), 64, shuffle=True, seed=int(one and wrong == "another seed"))
for step, (x, y) in zip(range(10), loader):
    if one and step == 5:
        if wrong == "one batch fewer":
            break
        if wrong == "an exception":
            raise ValueError("sample 4711 can't be read")
        if wrong == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
(FOLDER / "ends.py").write_text(ENDS)
CASES = {
    "another seed": "rank 0 has 0, rank 1 has 1",
    "one batch fewer": "rank 1 has ended its program",
    "an exception": "rank 1 has failed",
    "killed": "rank 1 was killed by SIGKILL",
}
if MISSING:
    print(not_measured())
else:
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda case: launch(2, "ends.py", case)[1], CASES))
    for (case, words), said in zip(CASES.items(), runs, strict=True):
        errors = [line for line in said.splitlines() if "Error: " in line and "rank 0" in line]
        print("\n".join(textwrap.wrap(f"{case}: {errors[0].rpartition('.farewell.')[2]}", 100)))
        assert words in errors[0]

# %% [markdown]
# Each rank that fails tells the others, before it ends; each that leaves does too; for one that was killed, its launcher does.
# And whoever waits asks now and then whether there is such news, and gives up after a minute without any. So no run hangs, and
# the error names the rank to look at. What it cannot do is go on: the others have lost a part of the batch. You go on from
# the last checkpoint: model, optimizer, scaler and loader, written by one rank, into a file that is replaced only when the
# new one is whole (`minamp.save`). `make demo-mpi` kills a rank, resumes, and arrives at the same bits as the run that
# nobody killed.
#
# ## Questions
#
# 1. In the figure of the two activations ReLU makes the losses differ more. Try `nn.GELU`, and say why. Which of the
#    two would you choose to test that a data-parallel loop is right?
# 2. You accumulate gradients over four small batches before each step. Which of the four backwards has to average, and what
#    does `model.no_sync()` save? What if an overflow happens in the second?
# 3. In the timeline by formula, find the number of ranks at which buckets of 4 MB can no longer be hidden. Does a
#    faster network help then, or a lower latency?
# 4. Shared-out gradients save another 2 bytes per parameter. Each rank then needs only the averages of its own
#    parameters: which part of the ring's work can be left out, and what has to be sent instead?
#
# ## Where it is in minamp, and where it comes from
#
# - [`minamp.distributed.parallel.DistributedDataParallel`](../minamp/distributed/parallel.py): buckets and averages;
#   [`minamp.distributed.loader.ShardedLoader`](../minamp/distributed/loader.py): the shares of a batch.
# - [`minamp.record.reducers`](../minamp/record.py): how backward tells of each gradient as soon as it is known.
# - [`minamp.distributed.half.half_sum`](../minamp/distributed/half.py): sums in half, for the lesson.
# - [`minamp.distributed.sharding.ZeroRedundancyOptimizer`](../minamp/distributed/sharding.py) and
#   [`minamp.distributed.sharding.ShardedGradScaler`](../minamp/distributed/sharding.py).
# - [`minamp.distributed.farewell.Farewell`](../minamp/distributed/farewell.py): how ranks end together.
# - [How it scales](pages/data_parallel.md), measured and on paper.
# - Li et al., [PyTorch Distributed](https://arxiv.org/abs/2006.15704), 2020, section 3.2: buckets and overlap.
#   Rajbhandari et al., [ZeRO](https://arxiv.org/abs/1910.02054), 2020, section 3.1: the sixteen bytes, and 5.1: state
#   in shares. Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, Journal of
#   Parallel and Distributed Computing, 2009: the ring.
