"""verify_amp: is mixed precision really on in a training step, and does it pay?

    report = minamp.verify_amp(step, model=model, optimizer=optimizer, scaler=scaler)
    print(report)           # one table and a verdict; report.py says how the verdict is reached

`step` is a function that does one step of the user's own loop, autocast region and all. It runs as it is and again with every
region switched off (autocast.without_autocast), and three things are compared: the bytes kept for backward, the time, and the
dtypes in which parameters, gradients and op outputs are.
"""

import numpy as np

from minamp import backends
from minamp.autocast import state, without_autocast
from minamp.backends.device import clock
from minamp.formats import float32, is_floating, is_half
from minamp.policy import LOWER_PRECISION
from minamp.record import observe
from minamp.restore import restored
from minamp.tensor import Tensor
from minamp.verify.report import Pair, Report, Seen
from minamp.watch import peak_memory, saved_bytes


def verify_amp(step, *, model=None, optimizer=None, scaler=None, rounds=10):
    """Run `step` with and without its autocast regions and compare memory, time and dtypes, in a Report.

    step: a function without arguments that does one training step, backward included; it runs 4 * rounds + 2 times (and twice
    more on a GPU). rounds: how often each time is taken; the shortest counts.
    Model, optimizer, scaler, the random generators and all that the step reaches, such as an average of the weights or a count
    of the steps, have their old state afterwards, bit for bit, and so has iter() of minamp's DataLoader; any other iterator
    that the step draws from has moved on.
    Meanwhile the scaler's scale is 1, so that no step is skipped for an overflow: a skipped step would be a quicker one.
    TypeError for an argument of the wrong kind, ValueError for rounds below 1, RuntimeError if the step runs no backward, or
    fails with autocast switched off: half weights and float32 data, for one, meet in autocast only.
    """
    if not callable(step):
        raise TypeError(
            f"verify_amp: step must be a function that does one training step, got {type(step).__name__}: "
            "write `def step(): ...` and give step, not step()"
        )
    for name, given, needed, kind in (
        ("model", model, "named_parameters", "Module"),
        ("optimizer", optimizer, "state", "Optimizer"),
        ("scaler", scaler, "is_enabled", "GradScaler"),
    ):
        if given is not None and not hasattr(given, needed):
            raise TypeError(
                f"verify_amp: {name} must be one {kind} or None, got {type(given).__name__}: give {name}={name}"
            )
    if not isinstance(rounds, int | np.integer):
        raise TypeError(f"verify_amp: rounds must be a whole number, got {rounds!r}: give rounds=10")
    if rounds < 1:
        raise ValueError(f"verify_amp: rounds must be at least 1, got {rounds}")
    with restored(step=step, model=model, optimizer=optimizer, scaler=scaler):
        if scaler is not None and scaler.is_enabled():
            scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0, "_growth_tracker": 0})
        looks = _both(_Look, step)  # the warm-up, too: optimizers make their state in the first step
        leaves, device = looks.with_amp.leaves, looks.with_amp.device
        if not leaves:
            raise RuntimeError(
                "verify_amp: step ran no backward() that reached a parameter: give a function that does one whole training step"
            )
        peak = None if device == "cpu" else _both(lambda s: _peak_bytes(s, device), step)
        # A machine that is shared takes whole slices of 4 ms away, in step with the step at times: hence the two orders, and
        # the shortest.
        times = [(_both(_forward_seconds, step, i % 2), _both(_seconds, step, i % 2)) for i in range(rounds)]
        forward, whole = (
            Pair(min(t.with_amp for t in kind), min(t.without_amp for t in kind))
            for kind in zip(*times, strict=True)
        )
        parameters = (
            [(str(i), p) for i, p in enumerate(leaves)] if model is None else [*model.named_parameters()]
        )
        gradients = [(name, p) for name, p in parameters if p in leaves]
        buffers = [] if optimizer is None else [b for s in optimizer.state.values() for b in s.values()]
        fixed = sum(p.nbytes for _, p in parameters + gradients)
        return Report(
            device=device,
            rounds=int(rounds),
            with_amp=looks.with_amp.seen,
            without_amp=looks.without_amp.seen,
            fixed_bytes=fixed + sum(b.nbytes for b in buffers if isinstance(b, Tensor)),
            peak_bytes=peak,
            forward_time=forward,
            step_time=whole,
            overhead=_overhead(device),
            parameters=_sizes((p.dtype, name, p) for name, p in parameters),
            gradients=_sizes((leaves[p], name, p) for name, p in gradients),
        )


def _both(measure, step, off_first=False):
    """measure(step) as it is, and with autocast switched off."""
    off = _switched_off(measure, step) if off_first else None
    as_it_is = measure(step)
    return Pair(as_it_is, off if off_first else _switched_off(measure, step))


def _switched_off(measure, step):
    with without_autocast():
        try:
            return measure(step)
        except RuntimeError as error:
            raise RuntimeError(
                f"verify_amp: with autocast switched off the step fails, so there is nothing to compare it with: {error}"
            ) from error


def _sizes(rows):
    table = {}
    for dtype, name, tensor in rows:
        table.setdefault(str(dtype), {})[name] = tensor.numel()
    return table


class _Look(observe):
    """One step, watched op by op: `seen` for the report, the `leaves` that got a gradient and in which dtype, the `device`."""

    def __init__(self, step):
        self.seen, self.leaves, self.device = Seen(), {}, "cpu"
        with saved_bytes() as saved, self:
            step()
        self.seen.saved_bytes = saved.total

    def see(self, phase, op, inputs, output):
        seen = self.seen
        seen.op_calls += 1
        if phase == "backward":
            _, node, i = inputs
            edge = node.edges[i]
            if edge.op is None:
                self.leaves[edge.leaf] = edge.dtype
            elif not edge.op.is_cast:
                _count(seen.passed_back, edge.dtype, edge.op.name)
            return
        seen.region_ops += state.enabled
        if op.is_cast:
            seen.casts += 1
        elif is_floating(output.dtype):
            _count(seen.activations, output.dtype, op.name)
            self.device = str(output.device)
            if op.policy == LOWER_PRECISION:
                _count(seen.products, output.dtype, op.name)
                seen.covered += state.enabled and is_half(output.dtype)


def _count(table, dtype, name):
    row = table.setdefault(str(dtype), {})
    row[name] = row.get(name, 0) + 1


def _seconds(step):
    start = clock()
    step()
    return clock() - start


def _forward_seconds(step):
    """Until backward has computed its first gradient, that of the scaled loss: one multiplication late, and seen from outside.

    A step of several forwards and backwards (gradient accumulation) counts with its first forward.
    """
    marks = [clock()]

    def see(phase, *_):
        if phase == "backward" and len(marks) == 1:
            marks.append(clock())

    with observe(see):
        step()
    return marks[1] - marks[0]


def _peak_bytes(step, device):
    """The most GPU memory that the step takes beyond what was in use before it."""
    with peak_memory(device) as peak:
        step()
    return peak.bytes


def _overhead(device):
    """Seconds that an op takes whatever its size: the mean of a forward and backward through 100 additions of single numbers."""
    one = Tensor(backends.move(np.ones((), float32), device), requires_grad=True)

    def chain():
        y = one
        for _ in range(100):
            y = y + 1.0
        y.backward()

    chain()
    return min(_seconds(chain) for _ in range(5)) / 200
