"""The story of two processes: one training on one and on two, an overflow, a rank that dies, a resumed run, state in shares.

What the processes do is in ranks.py; here they are started, and what they found is compared and told.
"""

import json
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from minamp.demo.experiment import BATCH
from minamp.demo.figures import percent
from minamp.demo.ranks import moments
from minamp.distributed.__main__ import command
from minamp.distributed.farewell import RANKS

STEPS, QUICK = 60, 24
EXACT = 1e-6  # of the largest loss; the order of additions made at most 3e-7 with thirty seeds
ROUNDED = 2e-4  # float16's roundings made at most 6e-5 with twelve seeds
PATIENCE = 20.0  # seconds after a rank was killed in which all must have ended


@dataclass
class Run:
    """What the ranks of one run saw; a list has an entry for each rank, those of losses, scales and made one for each step."""

    name: str
    ranks: int
    first: int = 1  # the first step
    losses: list = field(default_factory=list)  # mean over a rank's share of the batch
    scales: list = field(default_factory=list)
    made: list = field(default_factory=list)  # False: the step was skipped
    weights: list = field(default_factory=list)  # a digest of all their bits at the end
    state_bytes: list = field(default_factory=list)  # of the optimizer
    said: str = ""  # the error that names a killed rank
    seconds: float = 0.0  # from the death of a rank to the end of all

    @property
    def trace(self):
        """The loss of every whole batch: the shares are equal, so it is the mean of the ranks' means."""
        return np.mean(self.losses, axis=0)


def data_parallel(stage):
    """Start the ranks, one command for each line of `commands`, and say what came of it."""
    steps = QUICK if stage.quick else STEPS
    commands = [
        (1, "float32", "float16"),
        (2, "float32", "float16", "overflow", "whole", "shares"),
        (2, "killed"),
        (2, "resumed"),
    ]
    stage.console.rule("[bold]One training on two processes", align="left")
    stage.say(
        f"The digits again, in batches of {BATCH} and {steps} steps. One process takes whole batches; then each of two takes "
        f"half of every batch, {BATCH // 2} rows, and their gradients are averaged while backward runs. Next the same with an "
        "overflow on one of them, with one of them killed, and with the optimizer's state in shares."
    )
    runs = stage.runs["mpi"] = []
    with tempfile.TemporaryDirectory() as folder, stage.progress() as bar:
        task = bar.add_task("starting processes", total=len(commands))
        for ranks, *names in commands:
            runs += start(Path(folder), stage.seed, steps, ranks, names)
            bar.advance(task)
    one32, one16, two32, two16, overflow, whole, shares, killed, resumed = runs
    _same_training(stage, one32, two32, one16, two16)
    _overflow(stage, overflow, moments(steps)[1])
    _death(stage, killed, moments(steps)[2])
    _resume(stage, two16, resumed)
    _shares(stage, whole, shares)


def start(folder, seed, steps, ranks, names):
    """Train the named runs of ranks.py on that many ranks: [Run]. RuntimeError with what they said if they fail."""
    program = ["-m", "minamp.demo.ranks", str(folder), str(seed), str(steps), *names]
    line, environment = command(ranks, program)
    with tempfile.TemporaryDirectory(dir=folder) as signals:
        done = subprocess.run(line, env={**environment, RANKS: signals}, capture_output=True, text=True)
    ended = time.time()
    if names == ["killed"] and (folder / "when").exists():
        said = next((line for line in done.stderr.splitlines() if "was killed" in line), "")
        seconds = ended - float((folder / "when").read_text())
        return [Run("float16, rank 1 killed", ranks, said=said, seconds=seconds)]
    if done.returncode:
        raise RuntimeError(f"the ranks have failed:\n{done.stderr}")
    return [_read(folder, name, ranks) for name in names]


def _read(folder, name, ranks):
    found = [json.loads((folder / f"{name}.{ranks}.{rank}.json").read_text()) for rank in range(ranks)]
    lists = {k: [f[k] for f in found] for k in ("losses", "scales", "made", "weights", "state_bytes")}
    return Run(f"{name}, {ranks} process{'es' * (ranks > 1)}", ranks, found[0]["first"], **lists)


# ------------------------------------------------------------------------------------------------------------ what is told


def _same_training(stage, one32, two32, one16, two16):
    rows = []
    for one, two in (one32, two32), (one16, two16):
        for run in one, two:
            row = run.name, str(BATCH // run.ranks), f"{run.trace[0]:.6f}", f"{run.trace[-1]:.6f}"
            seen = short(apart(one, two)), "same bits" if alike(two.weights) else "other bits"
            rows.append(row + (seen if run is two else ("", "")))
    _table(stage, ("run", "rows each", "first loss", "last loss", "difference", "ranks' weights"), rows)
    stage.say(
        "The difference is the largest of all steps, relative to the largest loss. In float32 only the order of additions is "
        "another. In float16 each process rounds the sum over its own half of the batch before the halves are averaged, and "
        "one process alone rounds the sum over all of it: the same training, but not the same bits."
    )
    stage.say()
    stage.claim(
        "mpi",
        f"float32: at most {short(EXACT)} from the losses of one process",
        apart(one32, two32) <= EXACT,
    )
    stage.claim(
        "mpi",
        f"float16: at most {short(ROUNDED)} from them, and no step skipped",
        apart(one16, two16) <= ROUNDED and all(map(all, one16.made + two16.made)),
    )
    stage.claim(
        "mpi",
        "at the end both ranks have the same weights, bit for bit",
        alike(two32.weights) and alike(two16.weights),
    )
    stage.say()


def _overflow(stage, run, step):
    stage.say(
        f"An overflow. In step {step} the half batch of rank 1 is multiplied by 1e30, which is infinite in float16:"
    )
    rows = [
        (
            str(s),
            str(rank),
            f"{run.losses[rank][s - 1]:.3f}",
            "made" if run.made[rank][s - 1] else "skipped",
            f"{run.scales[rank][s - 1]:,.0f}",
        )
        for s in (step - 1, step, step + 1)
        for rank in range(run.ranks)
    ]
    _table(stage, ("step", "rank", "loss of its half", "the step was", "scale after it"), rows)
    stage.say(
        "Nobody has told rank 0. The infinity of one is in the sum of all gradients, so both scalers see it, skip and halve."
    )
    stage.say()
    skipped = [[i + 1 for i, made in enumerate(rank) if not made] for rank in run.made]
    finite = [bool(np.isfinite(rank[step - 1])) for rank in run.losses]
    stage.claim(
        "mpi",
        f"both ranks skipped step {step} and no other; rank 0's own loss was finite",
        skipped == [[step], [step]] and finite == [True, False],
    )
    stage.claim(
        "mpi",
        "both had the same scale after every step, and the same weights at the end",
        alike(run.scales) and alike(run.weights),
    )
    stage.say()


def _death(stage, run, step):
    stage.say(
        f"A death. In step {step} rank 1 is killed (SIGKILL), as when memory runs out. Rank 0 would wait for its gradients for "
        f"ever. {run.seconds:.1f} s later all had ended, rank 0 with this error:"
    )
    stage.say(f"[bold]{run.said or '(it said nothing)'}[/bold]")
    stage.say()
    stage.claim(
        "mpi",
        f"the error names rank and signal, and all ended within {PATIENCE:.0f} s",
        "rank 1 was killed by SIGKILL" in run.said and run.seconds <= PATIENCE,
    )
    stage.say()


def _resume(stage, whole, resumed):
    stage.say(
        f"The checkpoint. Rank 0 had saved model, optimizer, scaler and loader in step {resumed.first - 1}; minamp.save puts a "
        "file in place only when it is whole. Two new processes load it and go on, beside the run that nobody killed:"
    )
    later = [rank[resumed.first - 1 :] for rank in whole.losses]
    columns = "run", f"loss of step {resumed.first}", "last loss", "last scale", "weights (SHA-256)"
    _table(
        stage,
        columns,
        [
            (
                name,
                f"{np.mean([rank[0] for rank in losses]):.7f}",
                f"{np.mean([rank[-1] for rank in losses]):.7f}",
                f"{run.scales[0][-1]:,.0f}",
                f"{run.weights[0][:16]}...",
            )
            for name, run, losses in (("never killed", whole, later), ("resumed", resumed, resumed.losses))
        ],
    )
    stage.claim(
        "mpi",
        f"all losses from step {resumed.first} on and the last weights are the same, bit for bit",
        resumed.first > 1 and resumed.losses == later and resumed.weights == whole.weights,
    )
    stage.say()


def _shares(stage, whole, shares):
    stage.say(
        "Shares. A deeper network with half weights: Adam keeps a float32 master and two moments for each, 12 bytes, on every "
        "rank. ZeroRedundancyOptimizer deals them out, each rank updates its own, and all receive the new weights:"
    )
    _table(
        stage,
        ("optimizer state", "rank 0", "rank 1", "together"),
        [
            (name, *(f"{b:,} bytes" for b in (*run.state_bytes, sum(run.state_bytes))))
            for name, run in (("whole", whole), ("in shares", shares))
        ],
    )
    most = max(shares.state_bytes) / whole.state_bytes[0]
    stage.claim(
        "mpi",
        f"a rank keeps {percent(most)} of it (at most 51 %), both together keep it once",
        most <= 0.51 and sum(shares.state_bytes) == whole.state_bytes[0],
    )
    stage.claim(
        "mpi",
        "both ways the weights at the end are the same, bit for bit",
        alike(whole.weights + shares.weights),
    )


def apart(one, two):
    """The largest difference between the losses of two runs, relative to the largest loss."""
    return float(np.abs(one.trace - two.trace).max() / one.trace.max())


def short(number):
    return f"{number:.0e}".replace("e-0", "e-")


def alike(values):
    return all(value == values[0] for value in values)


def _table(stage, columns, rows):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    stage.console.print(table)
