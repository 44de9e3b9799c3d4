"""What every rank of `python -m minamp.demo mpi` does; data_parallel.py starts it.

    python -m minamp.distributed -n 2 -m minamp.demo.ranks FOLDER SEED STEPS RUN ...

Each rank trains the named runs and writes what it saw to FOLDER/RUN.RANKS.RANK.json.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import minamp
import minamp.distributed as dist
from minamp import nn, optim
from minamp.data import digits
from minamp.demo.experiment import BATCH, Arm, adam, deep_mlp, endless, training_step

HALF = minamp.float16
# A scale that no step overflows at, and that grows even in a short run: a resumed one shows whether it was saved.
SCALER = {"init_scale": 2.0**10, "growth_interval": 15}


def masters(params):
    """Adam with float32 masters of half weights, all of them and their moments on every rank."""
    return optim.Adam(params, lr=1e-3, master_weights=True)


def shares(params):
    """The same in shares."""
    return dist.ZeroRedundancyOptimizer(params, optim.Adam, lr=1e-3, master_weights=True)


def smooth_mlp():
    """784-128-128-10 with tanh. A ReLU's input that rounds to the other side of 0 makes 1e-3 of a difference of 1e-7."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)
    )


RECIPE = Arm("float16", smooth_mlp, adam(1e-3), autocast=HALF, scaler=SCALER)
RUNS = {
    "float32": Arm("float32", smooth_mlp, adam(1e-3)),
    "float16": RECIPE,
    "overflow": RECIPE,
    "killed": RECIPE,
    "resumed": RECIPE,
    # A deep network: an optimizer is shared out in whole layers, and these make two even shares.
    "whole": Arm("whole", deep_mlp, masters, weights=HALF, autocast=HALF, scaler=SCALER),
    "shares": Arm("shares", deep_mlp, shares, weights=HALF, autocast=HALF, scaler=SCALER),
}


def moments(steps):
    """(steps between two checkpoints, the step that overflows, the step in which rank 1 is killed)."""
    return steps // 3, steps // 2, steps * 5 // 6


def train(name, seed, steps, folder):
    """One run on this rank: the losses of its share, scales, which steps were made; weights and bytes of state at the end."""
    arm, rank = RUNS[name], dist.get_rank()
    every, overflows, dies = moments(steps)
    minamp.manual_seed(seed + rank)  # each draws its own weights; DistributedDataParallel makes them rank 0's
    model = dist.DistributedDataParallel(arm.network().to("cpu", arm.weights))
    optimizer = arm.optimizer(model.parameters())
    kind = dist.ShardedGradScaler if name == "shares" else minamp.GradScaler
    scaler = kind(enabled=arm.scaler is not None, **(arm.scaler or {}))
    loader = dist.ShardedLoader(digits("train"), BATCH, shuffle=True, seed=seed)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "loader": loader}
    checkpoint, first = folder / "checkpoint", 1
    if name == "resumed":
        saved = minamp.load(checkpoint)
        first = saved["step"] + 1
        for part, owner in parts.items():
            owner.load_state_dict(saved[part])
    losses, scales, made = [], [], []
    for step, (x, y) in zip(range(first, steps + 1), endless(loader), strict=False):
        if (name, rank, step) == ("overflow", 1, overflows):
            x = x * 1e30
        if (name, rank, step) == ("killed", 1, dies):
            (folder / "when").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        loss, updated = training_step(arm, model, optimizer, scaler, x.to(arm.weights), y)
        losses.append(loss)
        scales.append(scaler.get_scale())
        made.append(updated)
        if name == "killed" and rank == 0 and step % every == 0:
            minamp.save({"step": step, **{k: v.state_dict() for k, v in parts.items()}}, checkpoint)
    return {
        "first": first,
        "losses": losses,
        "scales": scales,
        "made": made,
        "weights": digest(model),
        "state_bytes": state_bytes(optimizer),
    }


def digest(model):
    """The same for two networks whose weights are the same bit for bit."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def state_bytes(optimizer):
    """Bytes of masters and moments that this rank keeps."""
    tensors = [t for buffers in optimizer.state.values() for t in buffers.values()]
    return sum(t.numel() * t.dtype.itemsize for t in tensors if isinstance(t, minamp.Tensor))


def main(folder, seed, steps, *names):
    dist.init("mpi")
    for name in names:
        found = train(name, int(seed), int(steps), Path(folder))
        path = Path(folder) / f"{name}.{dist.get_world_size()}.{dist.get_rank()}.json"
        path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
