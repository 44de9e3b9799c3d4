"""State in half: weights, what an optimizer keeps, running statistics."""

from minamp.clinic.rules.base import (
    counted,
    error,
    feeds,
    is_root,
    is_square,
    reads_ill_statistics,
    rule,
    second_moment,
    short,
    update_line,
)
from minamp.clinic.trace import state_shapes
from minamp.formats import bfloat16, float16, format_of

SWAMPED = 0.5  # of the weights that have a gradient
FLUSH = format_of(float16).flush
_STATISTICS = {"sum", "mean"}
# What half does to an average of squares. Half of bfloat16's distance to the next number is at least 0.0019 of a number.
MOMENTS = {
    float16: "squares of gradients up to 1.7e-4 are 0 and an eps of 1e-8 is 0 too, so that the step divides by 0",
    bfloat16: "0.999 * v rounds back to v, so that it never falls, and small squares add nothing to it",
}


@rule
def half_parameters_with_scaler(trace):
    half = [p for p in trace.parameters.values() if p.dtype == float16 and not p.master]
    held = [p for p in half if p.optimizers]
    refused = trace.fails_with("ValueError", "float16 gradients can't be unscaled")
    if refused or (trace.scaled and held):
        half = held or half
        are, their = ("are", "their gradients are") if len(half) > 1 else ("is", "its gradient is")
        return error(
            f"{counted(len(half))} {are} float16 and the loss is scaled by a GradScaler: {their} float16 too and can't be "
            "unscaled there without losing what scaling kept.",
            f"{short(p.name for p in half)}: {trace.calls('scaler.scale')[0].line}",
            "model.float()   # and the forward under autocast; or optim.SGD(..., master_weights=True)",
            half_parameters=len(half),
        )


@rule
def updates_swamped(trace):
    lost, line, kind = dict(trace.lost_by_hand), "", "SGD"
    for call in trace.calls("optimizer.step"):
        for name, (moving, still) in call.facts.get("lost", {}).items():
            a, b = lost.get(name, (0, 0))
            lost[name], line, kind = (a + moving, b + still), call.line, call.facts["kind"]
    if not line and lost:  # by hand: the last op that read a gradient
        made = update_line(trace)
        line = next((r.line for r in reversed(trace.ops) if any(v.gradient for v in r.inputs)), made)
    lost = {name: pair for name, pair in lost.items() if name not in trace.masters}
    moving, still = (sum(pair[i] for pair in lost.values()) for i in (0, 1))
    if moving and still > SWAMPED * moving:
        worst = max(lost, key=lambda n: lost[n][1] / lost[n][0])
        return error(
            f"{still / moving:.0%} of the weights that have a gradient stay as they are: their update is below half the distance "
            f"to the next {trace.parameters[worst].dtype} number and is rounded away, in every step.",
            f"{worst}: {line}",
            f"optim.{kind}(model.parameters(), lr=lr, master_weights=True)   # or write_back='stochastic' or 'kahan'",
            share_lost=still / moving,
            weights_with_gradient=moving,
        )


@rule
def adam_in_half(trace):
    shapes = state_shapes(trace.parameters.values())
    for run in trace.ops:
        if (
            is_root(run)
            and run.output.half
            and not run.output.recorded
            and run.output.shape in shapes
            and any(c.index < run.index and c.step == run.step for c in trace.calls("backward", "grad"))
            # a second moment is elementwise; that of a sum is somebody's statistic
            and not any(r.op in _STATISTICS for r in run.ancestors(limit=6))
        ):
            return _adam(run.line, run.output.dtype, run.tensors[0].largest)
        if run.op == "add" and run.output.dtype == float16 and second_moment(trace, run):
            if any(0 < c <= FLUSH for c in run.constants):
                return _adam(run.line, run.output.dtype, None)
    if trace.half_state:
        where, dtype = trace.half_state[0]
        return _adam(where, dtype, None)
    for run in trace.ops:  # after the root, which says more
        if _squares_a_gradient(trace, run):
            return _adam(run.line, run.output.dtype, run.output.largest)


def _squares_a_gradient(trace, run):
    """Whether the square of a float16 gradient is added to something of its shape: a second moment, no norm."""
    if run.op not in ("mul", "pow", "square") or run.output.dtype != float16 or not is_square(run):
        return False
    if not run.tensors[0].gradient:
        return False
    made = run
    while made is not None and made.op != "add":
        made = feeds(trace, made, ("add", "mul", "to"))
    return made is not None and made.output.shape == run.output.shape


def _adam(where, dtype, largest):
    evidence = {} if largest is None else {"largest_second_moment": largest}
    return error(
        f"The optimizer's second moment v, or its root, is in {dtype}: there {MOMENTS[dtype]}.",
        where,
        "optim.Adam(model.parameters(), lr=lr, master_weights=True)   # moments and eps in float32, as your own should be",
        dtype=str(dtype),
        **evidence,
    )


@rule
def batchnorm_nan(trace):
    read = reads_ill_statistics(trace)
    if not trace.batch_norms and read is None:
        return None
    bad = sum(n for _, n in trace.batch_norms)
    usual = all(name.endswith(("running_mean", "running_var")) for name, _ in trace.batch_norms)
    anew = "bn.running_mean.zero_(); bn.running_var.fill_(1.0)" if usual else "buffer.zero_()"
    count = f"{bad} {'value that is' if bad == 1 else 'values that are'} " if bad else ""
    matters = (
        "training does not read them, evaluation does, and no later batch can remove them"
        if read is None
        else "a layer in eval mode reads them, all that follows is nan, and no scale cures that"
    )
    names = short(name for name, _ in trace.batch_norms)
    return error(
        f"Running statistics of a batch normalisation hold {count}inf or nan: {matters}.",
        ": ".join(filter(None, (names, read.line if read else ""))),
        f"{anew}   # and keep the batch that did it out",
        **(dict(values=bad, buffers=len(trace.batch_norms)) if bad else dict(op=read.op)),
    )
