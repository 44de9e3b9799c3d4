"""What tests/test_distributed.py runs on several ranks: python -m minamp.distributed -n 2 tests/ranks.py NAME."""

import ctypes
import json
import os
import signal
import sys
import time
import types

import numpy as np

import minamp
import minamp.distributed as dist
import minamp.nn.functional as F
from minamp import nn, optim, record
from minamp.data import digits

RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))  # before init()


def report(**facts):
    """What this rank has to say, in one line."""
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), **facts}) + "\n")
    sys.stdout.flush()


def mlp(width=64, seed=0):
    minamp.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def mean(loss):
    return dist.all_reduce(minamp.tensor(loss.item())).item() / dist.get_world_size()


def checksum(model):
    return [float(np.abs(p.detach().float().numpy().astype(np.float64)).sum()) for p in model.parameters()]


# ------------------------------------------------------------------------------------------------------------- training


def traces():
    """The mean loss of every step, and the weights at the end, by format and optimizer."""
    report(**{f"{amp} {opt}": trace(amp, opt) for amp in ("float32", "float16") for opt in ("sgd", "adam")})


def trace(amp, optimizer, steps=20):
    model = dist.DistributedDataParallel(mlp(seed=dist.get_rank()), bucket_cap_mb=0.05)
    params = list(model.parameters())
    opt = optim.SGD(params, lr=0.05, momentum=0.9) if optimizer == "sgd" else optim.Adam(params, lr=1e-3)
    scaler = minamp.GradScaler(enabled=amp == "float16", init_scale=2.0**10)
    losses, loader = [], dist.ShardedLoader(digits("train"), 128, shuffle=True)
    for (x, y), _ in zip(loader, range(steps), strict=False):
        with minamp.autocast(dtype=minamp.float16, enabled=amp == "float16"):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(mean(loss))
    return {"losses": losses, "weights": checksum(model), "buckets": len(model._reducer.buckets)}


def overlap():
    """How many parameters were still missing when the first bucket left."""
    model = dist.DistributedDataParallel(mlp(), bucket_cap_mb=0.01)
    reducer, missing = model._reducer, []
    send = reducer._send
    reducer._send = lambda b: (missing.append(sum(len(x.missing) for x in reducer.buckets)), send(b))
    F.cross_entropy(model(minamp.randn(8, 784)), minamp.randint(0, 10, (8,))).backward()
    report(missing=missing, parameters=len(list(model.parameters())))


def accumulation():
    """Two micro-batches, the first inside no_sync, against one batch: the largest difference of a gradient."""
    x = minamp.tensor(np.random.default_rng(dist.get_rank()).standard_normal((8, 784)).astype(np.float32))
    y = minamp.tensor(np.arange(8))
    whole, parts = (dist.DistributedDataParallel(mlp()) for _ in range(2))
    F.cross_entropy(whole(x), y).backward()
    with parts.no_sync():
        (0.5 * F.cross_entropy(parts(x[:4]), y[:4])).backward()
    local = [p.grad.clone() for p in parts.parameters()]
    (0.5 * F.cross_entropy(parts(x[4:]), y[4:])).backward()
    pairs = list(zip(whole.parameters(), parts.parameters(), strict=True))
    report(
        apart=max((a.grad - b.grad).abs().max().item() for a, b in pairs),
        local=float(local[0].abs().sum().item()),
        sums=[float(b.grad.double().abs().sum().item()) for _, b in pairs],
    )


def unused():
    """One layer that only rank 1 uses, one that nobody does."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.second, self.none = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = self.both(x)
            return self.second(x) if dist.get_rank() else x

    net = Net()
    out = dist.DistributedDataParallel(net)(minamp.ones(2, 4))
    out.sum().backward()
    report(grads={n: None if p.grad is None else p.grad.tolist() for n, p in net.named_parameters()})


def buffers():
    """The running statistics that a forward starts from are rank 0's."""
    minamp.manual_seed(dist.get_rank())
    net = nn.BatchNorm1d(3)
    net.running_mean[...] = float(dist.get_rank() + 5)
    model = dist.DistributedDataParallel(net)
    start = net.running_mean.tolist()
    for _ in range(2):
        model(minamp.randn(8, 3))
    net.train(False)
    model(minamp.randn(8, 3))
    report(start=start, end=net.running_mean.tolist())


def overflow(sharded, scaler, steps=3):
    """At step 1 a gradient of rank 0 alone is inf. Scales, steps made and weights of every rank."""
    model = dist.DistributedDataParallel(mlp(8))
    if sharded:
        opt = dist.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.05)
    else:
        opt = optim.SGD(model.parameters(), lr=0.05)
    kind = {"plain": minamp.GradScaler, "sharded": dist.ShardedGradScaler}[scaler]
    scaler = kind(init_scale=2.0**8)
    x, y = minamp.randn(4, 784), minamp.tensor([1, 2, 3, 4])
    scales, made = [], []
    for step in range(steps):
        with minamp.autocast():
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        if step == 1 and dist.get_rank() == 0:  # after averaging: what rank 0 adds to its gradients overflows
            next(model.parameters()).grad[...] = float("inf")
        made.append(scaler.step(opt) is not None)
        scaler.update()
        scales.append(scaler.get_scale())
    report(scales=scales, made=made, weights=checksum(model))


def overflow_in_forward():
    """Rank 1 alone meets an inf at step 1; a plain GradScaler."""
    model = dist.DistributedDataParallel(mlp(8))
    opt, scaler = optim.SGD(model.parameters(), lr=0.05), minamp.GradScaler(init_scale=2.0**8)
    scales, made = [], []
    for step in range(3):
        x = minamp.ones(4, 784) * (1e30 if step == 1 and dist.get_rank() == 1 else 1.0)
        with minamp.autocast():
            loss = F.cross_entropy(model(x), minamp.tensor([1, 2, 3, 4]))
        opt.zero_grad()
        scaler.scale(loss).backward()
        made.append(scaler.step(opt) is not None)
        scaler.update()
        scales.append(scaler.get_scale())
    report(scales=scales, made=made, weights=checksum(model))


# ------------------------------------------------------------------------------------------------------------- ZeRO


def zero(folder):
    """Adam with float32 masters of half weights, in shares and whole: the same weights; bytes of state; saved and resumed."""
    x = minamp.tensor(np.random.default_rng(dist.get_rank()).standard_normal((8, 784)).astype(np.float32))
    y = minamp.tensor(np.arange(8))

    def step(model, opt, scaler):
        with minamp.autocast():
            loss = F.cross_entropy(model(x.half()), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

    options = {"lr": 1e-3, "master_weights": True}
    models = [dist.DistributedDataParallel(mlp().half()) for _ in range(3)]
    plain = optim.Adam(models[0].parameters(), **options)
    shares = dist.ZeroRedundancyOptimizer(models[1].parameters(), optim.Adam, **options)
    scalers = [minamp.GradScaler(init_scale=2.0**8), dist.ShardedGradScaler(init_scale=2.0**8)]
    for _ in range(3):
        step(models[0], plain, scalers[0])
        step(models[1], shares, scalers[1])
    same = all(
        (a == b).all().item() for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )

    saved = shares.state_dict()
    if dist.get_rank() == 0:
        minamp.save(
            {"model": models[1].state_dict(), "optimizer": saved, "scaler": scalers[1].state_dict()}, folder
        )
    dist.barrier()
    found = minamp.load(folder)
    models[2].load_state_dict(found["model"])
    resumed = dist.ZeroRedundancyOptimizer(models[2].parameters(), optim.Adam, **options)
    resumed.load_state_dict(found["optimizer"])
    again = dist.ShardedGradScaler()
    again.load_state_dict(found["scaler"])
    step(models[1], shares, scalers[1])
    step(models[2], resumed, again)
    exact = all(
        (a == b).all().item() for a, b in zip(models[1].parameters(), models[2].parameters(), strict=True)
    )
    whole = sum(
        t.numel() * t.dtype.itemsize
        for b in plain.state.values()
        for t in b.values()
        if isinstance(t, minamp.Tensor)
    )
    fresh = optim.Adam(models[0].parameters(), **options)
    fresh.load_state_dict(found["optimizer"])  # a plain optimizer takes it too
    report(same=same, exact=exact, bytes=shares.state_bytes(), whole=whole, mine=shares.mine)


def more_ranks_than_parameters():
    model = dist.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    opt = dist.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.5)
    scaler = dist.ShardedGradScaler(init_scale=4.0)
    scaler.scale(model(minamp.ones(1, 2)).sum()).backward()
    scaler.step(opt)
    scaler.update()
    report(weights=checksum(model), mine=opt.mine)


# ------------------------------------------------------------------------------------------------------------- half


def half():
    """Sums in half: what is lost; gradients averaged in float16."""
    one = dist.get_rank() == 0
    a = minamp.tensor([2048.0 if one else 1.0, 40000.0, 1.5, 2.0**-24]).half()
    b = minamp.tensor([256.0 if one else 1.0, 3e38]).bfloat16()
    dist.all_reduce(a)
    dist.all_reduce(b)
    small = {}
    for name, dtype in (("float32", minamp.float32), ("float16", minamp.float16)):
        net = nn.Linear(1, 1, bias=False)
        model = dist.DistributedDataParallel(net, reduce_dtype=dtype)
        (model(minamp.ones(1, 1)) * 1e-8).sum().backward()
        small[name] = net.weight.grad.item()
    report(float16=a.float().tolist(), bfloat16=b.float().tolist(), small=small)


def talk():
    """One log and one progress bar."""
    dist.log("said once", dist.get_world_size())
    report(sum=sum(dist.track(range(5))), gathered=dist.all_gather_object({"rank": dist.get_rank()}))


# ------------------------------------------------------------------------------------------------------------- GPUs


class Nccl:
    """NCCL's double: sums at once, over MPI, what lies at an address; writes down what was asked of it."""

    asked = []

    class NcclCommunicator:
        def __init__(self, size, identity, rank):
            assert type(identity) is bytes
            Nccl.asked.append(["join", size, list(identity), rank])

        def allReduce(self, source, target, count, kind, op, stream):
            assert source == target and kind == 7 and op == 0  # float32, sum
            array = np.ctypeslib.as_array(ctypes.cast(source, ctypes.POINTER(ctypes.c_float)), (count,))
            group = dist.group.group()
            group.wait(group.comm.Iallreduce(group.MPI.IN_PLACE, array), "the double")
            Nccl.asked.append(["sum", count, stream])

    @staticmethod
    def get_version():
        return 22700

    @staticmethod
    def get_unique_id():
        return b"\1\2\3"


class Stream:
    """A stream of the double: one that sums waits for what came before it."""

    def __init__(self, non_blocking=False):
        self.ptr, self.waited = 77, 0

    def wait_event(self, event):
        self.waited += 1

    def record(self):
        return types.SimpleNamespace(done=True)


def gpu(way):
    """Three steps on the stand-in for a GPU, summed through main memory or by NCCL's double, against the same on the CPU."""
    import standin

    def train(device):
        model = dist.DistributedDataParallel(mlp(8).to(device), bucket_cap_mb=0.01)
        opt, scaler = optim.SGD(model.parameters(), lr=0.05), minamp.GradScaler(init_scale=2.0**8)
        x = minamp.tensor(
            np.random.default_rng(dist.get_rank()).standard_normal((4, 784)).astype(np.float32)
        ).to(device)
        for _ in range(3):
            with minamp.autocast():
                loss = F.cross_entropy(model(x), minamp.tensor([1, 2, 3, 4]).to(device))
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        return [p.detach().cpu().numpy().tolist() for p in model.parameters()]

    on_cpu, shared = train("cpu"), ""
    with standin.installed() as double:
        if way == "nccl":
            # `import cupy` leaves NCCL's module out
            sys.modules["cupy"] = sys.modules["cupy.cuda"] = double.xp
            sys.modules["cupy.cuda.nccl"], double.xp.cuda.Stream = Nccl, Stream
            double.xp.cuda.get_current_stream = Stream
            try:  # both ranks find the same card
                dist.group._join_ring(dist.group.group(), needed=True)
            except RuntimeError as error:
                shared = str(error)
            double.xp.cuda.Device.pci_bus_id = f"0000:0{dist.get_rank()}:00.0"
            dist.group._join_ring(dist.group.group(), needed=True)
        on_gpu = train("cuda")
    report(same=on_gpu == on_cpu, asked=Nccl.asked, weights=on_gpu[1], shared=shared)


# ------------------------------------------------------------------------------------------------------------- what goes wrong


def loop(wrong):
    """A training loop in which rank 1 does something that the others don't."""
    one = dist.get_rank() == 1
    width = 17 if wrong == "shape" and one else 16
    model = dist.DistributedDataParallel(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)))
    data = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32), np.zeros(64, np.int64)
    loader = dist.ShardedLoader(
        data, 17 if wrong == "batch" else 16, shuffle=True, seed=int(one and wrong == "seed")
    )
    opt = optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for i, (x, y) in enumerate(loader):
            if one and epoch == 1 and i == 2:
                if wrong == "raise":
                    raise ValueError("a bad sample")
                if wrong == "fewer":
                    return
                if wrong == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if wrong == "hang":
                    time.sleep(60)
                if wrong == "exit":
                    sys.exit(3)
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()


def refusals():
    """The errors that one rank can make alone."""
    texts = []

    def refused(call):
        try:
            call()
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")

    refused(dist.init)
    model = dist.DistributedDataParallel(nn.Linear(2, 1))
    loss = model(minamp.ones(1, 2)).sum()
    refused(lambda: loss.backward(create_graph=True))
    untouched = [p.grad for p in model.parameters()] == [None, None]
    refused(lambda: dist.all_reduce(minamp.ones(2 + dist.get_rank())))
    refused(lambda: dist.ShardedLoader((np.zeros((4, 1)),), 8))
    opt = dist.ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    refused(lambda: opt.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]}))
    loss.backward()
    model = opt = loss = None  # with the last module its reducer is gone
    report(texts=texts, untouched=untouched, reducers=len(record.reducers))


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name == "loop" and arguments == ["version"] and RANK == 1:
        minamp.__version__ = "9.9"
    dist.init(timeout=4.0 if name == "loop" else 30.0)
    globals()[name](*[json.loads(a) if a in ("true", "false") else a for a in arguments])
