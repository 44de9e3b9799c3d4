"""Clipping: gradients that are limited while they are still scaled, by the library's functions, by hand, or by a hook."""

import math
from dataclasses import replace

from minamp.clinic.rules.base import (
    asked_once,
    counted,
    error,
    largest_of,
    rule,
    scale_of,
    unscale_refused,
    warning,
)
from minamp.clinic.rules.gradients import allowed_scale
from minamp.clinic.trace import Call

_READS = {"vector_norm", "norm", "pow", "square", "abs", "amax", "max", "mul"}
_CLAMPS = {"clamp", "minimum", "maximum"}
_REPLACES = {"where", "masked_fill", "nan_to_num"}
_LIMITS = _CLAMPS | _REPLACES
_BOUNDS = _LIMITS | {"sign", "tanh", "sigmoid"}  # may be finite where what they are given is not
_ASKS = {"isfinite", "isinf", "isnan"}
_RIGHT = 2e-5  # how close clipping comes to the limit: float32's last digits, and 1e-6 / norm


@asked_once
def _clips(trace):
    """(event, backward, scale, before, after) of everything that limits gradients while they are still scaled."""
    for clip in trace.calls("clip_grad_norm_", "clip_grad_value_"):
        names = clip.written  # those it was given: within the limit they count as written too
        backward = trace.last_backward(clip, names)
        if backward is None or clip.facts["limit"] == math.inf:  # that only asks for the norm
            continue
        scale, by_scaler = scale_of(backward)
        still = still_scaled if by_scaler else _divided_later
        unscaled = scale == 1 or _carries(clip.facts["limit"], scale) or _spares(clip, scale)
        if not unscaled and still(trace, backward, clip, scale, names):
            yield clip, scale, clip.before, clip.after
    yield from _clips_in_hooks(trace)
    yield from _clips_by_hand(trace)


def still_scaled(trace, backward, event, scale, names):
    """Whether neither unscale_ nor the user has divided some of the gradients since their backward."""
    left = {n: g for n, g in backward.written.items() if n in names}
    for call in trace.calls("scaler.unscale_"):
        if backward.index < call.index < event.index:
            if left.keys() <= trace.unheld:
                return False
            seen = trace.held_by(call.facts["optimizer"]) or ()
            left = {n: g for n, g in left.items() if n not in seen}
    divided = same_factor(left, event.before, 1 / scale) or _divides_in_hooks(trace, backward, scale)
    return bool(left) and not divided


def _divides_in_hooks(trace, backward, scale):
    """Whether an op inside a backward, of a hook, takes the scale out of something of a parameter's shape."""
    shapes, factor = {p.shape for p in trace.parameters.values()}, {"div": scale, "mul": 1 / scale}
    hooks = (r for r in _runs_in_hooks(trace, backward) if r.op in factor and r.output.shape in shapes)
    return any(math.isclose(c, factor[r.op], rel_tol=1e-3) for r in hooks for c in r.constants)


def _divided_later(trace, backward, clip, scale, names):
    """Manual scaling: whether the factor is taken out only between this clip and the step."""
    if same_factor(backward.after, clip.before, 1 / scale):
        return False
    step = next((c for c in trace.calls("optimizer.step") if c.index > clip.index), None)
    return step is not None and same_factor(clip.after, step.before, 1 / scale)


def same_factor(before, after, factor):
    """Whether every gradient is `factor` times what it was, within a few roundings."""
    pairs = [
        (before[n].largest, after[n].largest)
        for n in before
        if n in after and 0 < before[n].largest < math.inf
    ]
    return bool(pairs) and all(math.isclose(b, a * factor, rel_tol=0.02) for a, b in pairs)


def _clips_in_hooks(trace):
    """The same inside a backward: what a hook has clamped to a limit that a parameter's gradient now has for its largest."""
    for backward in trace.calls("backward"):
        scale, by_scaler = scale_of(backward)
        if not by_scaler or scale == 1:
            continue
        written = backward.written
        for run in _runs_in_hooks(trace, backward):
            if run.op not in _LIMITS:
                continue
            limits = {abs(c) for c in (*run.constants, *run.attrs.values())}
            replaced = run.op in _REPLACES and any(not math.isfinite(v.largest) for v in run.tensors)
            if replaced:
                limits = {run.output.largest}
            for name, g in written.items():
                if trace.parameters[name].shape != run.output.shape or _carries(g.largest, scale):
                    continue
                # 0.1 is another number in every format
                if g.largest in {float(g.dtype.type(limit)) for limit in limits}:
                    given = math.inf if replaced else run.tensors[0].largest
                    if run.within is not backward:  # which is in float32, where nothing overflows
                        given = math.inf if scale > allowed_scale(trace) else g.largest
                    yield _by_hand(backward, run), scale, {name: replace(g, largest=given)}, {name: g}
        lengths = [g.length for g in written.values()]
        if _one_chosen(lengths) and lengths[0] % scale:  # not so in a toy whose gradients are all 1
            shapes = {trace.parameters[name].shape for name in written}
            hooks = [r for r in trace.ops if r.within is backward and r.output.shape in shapes]
            clip = replace(backward, name="by hand", within=backward, line=(hooks or [backward])[-1].line)
            yield clip, scale, backward.after, backward.after


def _runs_in_hooks(trace, backward):
    """The ops inside a backward. Of the second call, in float32, none are noted: those of the first stand for them."""
    inside = (r for r in trace.ops if r.inside(backward.name))
    return [
        r for r in inside if r.within is backward or r.step < backward.step and r.within.line == backward.line
    ]


def _by_hand(call, run):
    """A clipping by the user's own op as if it were a Call: inside the backward, if a hook does it."""
    name = "clip_grad_value_" if run.op in _LIMITS else "by hand"
    return Call(call.index, call.step, name, 0, run.line, None, run.within)


def _repair(trace, clip, scale, why=""):
    """The line that repairs a clipping."""
    if not trace.scaled:
        return f"p.grad /= {scale:g}   # for every parameter before the clipping, instead of after it"
    if clip.inside("backward"):
        return "scaler.unscale_(optimizer)   # after backward, and the clipping after that: not in a hook"
    return f"scaler.unscale_(optimizer)   # before the clipping{why}"


def _clips_by_hand(trace):
    """The same for gradients that the user's own ops read and write between backward and the scaler's next call."""
    for call in trace.calls("scaler.unscale_", "scaler.step"):
        if call.inside("scaler.step") and call.name == "scaler.unscale_":
            continue
        backward = trace.last_backward(call)
        if backward is None or not scale_of(backward)[1]:
            continue
        if any(
            backward.index < c.index < call.index and c.name != "autocast"
            for c in trace.calls("scaler.unscale_", "clip_grad_norm_", "clip_grad_value_", "scaler.step")
        ):
            continue
        runs = _runs_on_gradients(trace, backward, call)
        limits = [r for r in runs if r.op in _CLAMPS or r.op in _READS and _reads_a_size(r)]
        written = [
            n
            for n, g in call.before.items()
            if n in backward.after and backward.after[n].largest != g.largest
        ]
        scale = scale_of(backward)[0]
        if not written or same_factor(backward.after, call.before, 1 / scale):
            continue
        total = math.hypot(*(g.length for g in call.before.values()))
        left = _left(*({n: g[n] for n in written} for g in (backward.after, call.before)))
        if _carries(total, scale) or left > scale**-0.5:
            continue
        if limits:
            yield _by_hand(call, limits[0]), scale, backward.after, call.before
            continue
        line = runs[0].line if runs else call.line  # what writes the numbers may be an op
        if _at_one_limit(backward.after, call.before):  # NumPy's clip is no op of ours
            yield replace(call, name="clip_grad_value_", line=line), scale, backward.after, call.before
        elif _at_one_length(backward.after, call.before):  # nor are its norms
            yield replace(call, name="by hand", line=line), scale, backward.after, call.before


def _runs_on_gradients(trace, backward, call):
    """The user's own ops that take gradients between a backward and a later call."""
    return [
        e
        for e in trace.between(backward, call)
        if hasattr(e, "op") and any(v.gradient for v in e.inputs) and not e.inside("backward")
    ]


def _at_one_limit(before, after):
    """Whether several gradients, that had different largest values, now have one and the same smaller one."""
    cut = [
        (g.largest, before[n].largest)
        for n, g in after.items()
        if n in before and before[n].largest > g.largest
    ]
    return len(cut) > 1 and len({now for now, _ in cut}) == 1 < len({was for _, was in cut}) and cut[0][0] > 0


def _at_one_length(before, after):
    """Whether gradients have become shorter and have now, together or each, a length that somebody has chosen."""
    pairs = [(before[n].length, g.length) for n, g in after.items() if n in before]
    pairs = [(was, now) for was, now in pairs if 0 < was < math.inf]
    shorter = [(was, now) for was, now in pairs if now < was]
    factors = [now / was for was, now in shorter]
    if factors and len(shorter) == len(pairs) and math.isclose(min(factors), max(factors), rel_tol=1e-3):
        if _chosen(math.hypot(*(now for _, now in pairs))):
            return True
    return _one_chosen([now for _, now in shorter])


def _one_chosen(lengths):
    """Whether several gradients have one length, and it is one that somebody has chosen."""
    return (
        len(lengths) > 1 and math.isclose(min(lengths), max(lengths), rel_tol=_RIGHT) and _chosen(lengths[0])
    )


def _chosen(length):
    """Whether a length is a number that people write, such as 1 or 0.25: one among 600 is so by chance."""
    return 0 < length < math.inf and math.isclose(length, float(f"{length:.1e}"), rel_tol=_RIGHT)


def _left(before, after):
    """Which part of the largest gradient a clipping has left: about 1 / scale, where the gradient is scaled and the limit not."""
    was, now = largest_of(before), largest_of(after)
    return now / was if 0 < was < math.inf else 0.0


def _carries(limit, scale):
    """Whether a limit is a number that people write times the scale: clipping before unscale_ as it is done after it."""
    return not _chosen(limit) and _chosen(limit / scale)


def _spares(clip, scale):
    """Whether a limit that is computed, or larger than the scale, has left more than one for unscaled gradients would have."""
    limit = clip.facts["limit"]
    return (limit >= scale or not _chosen(limit)) and _left(clip.before, clip.after) > scale**-0.5


def _reads_a_size(run):
    """Whether the op reads how large a gradient is; a product with a number does not."""
    return run.op != "mul" or len([v for v in run.tensors if v.gradient]) == 2


@rule
def clip_before_unscale(trace):
    for clip, scale, before, after in _clips(trace):
        if not _hidden(clip, before, after):
            return error(
                f"Gradients are clipped while they are still {scale:g} times too large: the limit holds for the scaled ones, "
                "and after unscaling next to nothing is left.",
                clip.line,
                _repair(trace, clip, scale),
                scale=scale,
                largest_gradient=largest_of(before),
            )
    if unscales_late(trace):
        return error(
            "unscale_ comes after step, which has unscaled and used the gradients already.",
            trace.error.line,
            "scaler.unscale_(optimizer)   # then clip, then scaler.step(optimizer)",
        )


def unscales_late(trace):
    """Whether the unscale_ that was refused stands after the step of the same gradients, not of those before."""
    if not unscale_refused(trace):
        return False
    steps, refused = trace.calls("scaler.step"), trace.calls("scaler.unscale_")[-1]
    backward = trace.last_backward(refused)
    return bool(steps) and backward is not None and backward.index < steps[-1].index


def _hidden(clip, before, after):
    """Names of the gradients that were infinite before the clip and are finite after it."""
    if clip.name != "clip_grad_value_":
        return []
    return [
        n
        for n, g in before.items()
        if math.isinf(g.largest) and n in after and math.isfinite(after[n].largest)
    ]


@rule
def clip_value_hides_overflow(trace):
    for clip, scale, before, after in _clips(trace):
        hidden = _hidden(clip, before, after)
        if hidden:
            return error(
                f"Clipping by value makes finite numbers of the infinite gradients of {counted(len(hidden))} before the "
                "scaler looks for them: the step is taken and the scale stays too high.",
                clip.line,
                _repair(trace, clip, scale, ": it notes the overflow"),
                scale=scale,
                parameters=len(hidden),
                largest_after=max(after[n].largest for n in hidden),
            )
    for look, backward, names in _looks(trace):
        hidden = _replaced(look, backward, names)
        if hidden:
            runs = _runs_on_gradients(trace, trace.last_backward(look, hidden), look)
            return error(
                f"Between backward and the scaler's look at them the infinite gradients of {counted(len(hidden))} have become "
                "finite: the step is taken and the scale stays too high.",
                runs[0].line if runs else look.line,
                "scaler.unscale_(optimizer)   # right after backward: it notes the overflow, and the step is skipped",
                parameters=len(hidden),
                largest_after=max(look.before[n].largest for n in hidden),
            )
    found = (_would_hide(trace, look, backward, names) for look, backward, names in _looks(trace))
    for run in (*found, *trace.healers):
        if run is not None:
            return warning(
                f"{run.op} takes inf and nan out of the gradients before the scaler looks for them: the scale grows until they "
                "overflow, then such steps are taken and it never comes down.",
                run.line,
                f"# no {run.op} here: let inf and nan through, and limit after scaler.unscale_(optimizer) what shall be limited"
                if run.inside("backward")
                else "scaler.unscale_(optimizer)   # right after backward: it notes the overflow, and the step is skipped",
                op=run.op,
            )


def may_hide(trace):
    """Whether an op inside a backward, of a hook or a Function, can make finite numbers of gradients that a scaler is to see."""
    if not trace.scaled or not trace.in_float16 or trace.error is not None:
        return False
    return any(r.op in _BOUNDS and r.inside("backward") and not r.output.recorded for r in trace.ops)


def healers(trace):
    """Of a step whose gradients overflow: the ops inside a backward that make them finite, if no scaler.step skips."""
    asked, steps = trace.calls("scaler.step"), trace.calls("optimizer.step")
    if not asked or any(all(step.within is not call for step in steps) for call in asked):
        return []
    inside = [r for r in trace.ops if r.inside("backward") and r.op in _BOUNDS]
    healed = [r for r in inside if math.isfinite(r.output.largest)]
    return [r for r in healed if not all(math.isfinite(v.largest) for v in r.tensors)]


@asked_once
def _looks(trace):
    """(call, backward, names) where the scaler looks for the first time at gradients, of these names, that a backward scaled."""
    unscales = trace.calls("scaler.unscale_")
    for look in trace.calls("scaler.unscale_", "scaler.step"):
        optimizer = look.facts["optimizer"]
        names = trace.held_by(optimizer) or ()
        backward = trace.last_backward(look, names)
        if backward is not None and scale_of(backward)[1]:
            mine = (c for c in unscales if c.facts["optimizer"] == optimizer)
            if not any(backward.index < c.index < look.index for c in mine):
                yield look, backward, names


def _would_hide(trace, look, backward, names):
    """The op that makes finite numbers of infinite gradients, should there be some, before the scaler looks at them."""
    was, now = backward.after, look.before
    written = {n for n in names if n in was and n in now and was[n].stamp != now[n].stamp}
    for run in _runs_on_gradients(trace, backward, look):
        if _heals(run) and any(v.gradient in written for v in run.inputs):
            return run
    shapes = {trace.parameters[n].shape for n in backward.written if n in names}
    return next((r for r in _runs_in_hooks(trace, backward) if _heals(r) and r.output.shape in shapes), None)


def _heals(run):
    """Whether it puts numbers in the places of inf and nan."""
    asks = run.op in _REPLACES and any(r.op in _ASKS for r in run.ancestors(limit=5))
    return run.op == "nan_to_num" or asks


def _replaced(look, backward, names):
    """Names of the gradients that are finite when the scaler first looks, and were not when backward had made them."""
    was, now = backward.after, look.before
    return [
        n
        for n in names
        if n in was and n in now and not math.isfinite(was[n].largest) and math.isfinite(now[n].largest)
    ]
