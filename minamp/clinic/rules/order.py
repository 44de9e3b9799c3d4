"""The order of the calls of a loop: backward, unscale, clip, step, update, zero_grad, save."""

import math

from minamp.clinic.rules.base import error, rule, scale_of, warning

_READS = {"vector_norm", "norm", "pow", "square", "abs", "amax", "max", "mul"}
_CLAMPS = {"clamp", "minimum", "maximum"}


# -------------------------------------------------------------------------------------------------------------- clipping


def _clips(trace):
    """(event, backward, scale, before, after) of everything that limits gradients while they are still scaled."""
    for clip in trace.calls("clip_grad_norm_", "clip_grad_value_"):
        names = clip.facts.get("names") or list(clip.before)
        backward = trace.last_backward(clip, names)
        if backward is None:
            continue
        scale, by_scaler = scale_of(backward)
        still = _still_scaled if by_scaler else _divided_later
        if scale != 1 and still(trace, backward, clip, scale, names):
            yield clip, scale, clip.before, clip.after
    yield from _clips_by_hand(trace)


def _still_scaled(trace, backward, event, scale, names):
    """Whether neither unscale_ nor the user has divided the gradients since their backward."""
    for call in trace.calls("scaler.unscale_"):
        if backward.index < call.index < event.index:
            mine = [n for n in names if trace.parameters[n].optimizer == call.facts["optimizer"]]
            if mine or all(trace.parameters[n].optimizer is None for n in names):
                return False
    return not _same_factor(backward.after, event.before, 1 / scale)


def _divided_later(trace, backward, clip, scale, names):
    """Manual scaling: whether the factor is taken out only between this clip and the step."""
    if _same_factor(backward.after, clip.before, 1 / scale):
        return False
    step = next((c for c in trace.calls("optimizer.step") if c.index > clip.index), None)
    return step is not None and _same_factor(clip.after, step.before, 1 / scale)


def _same_factor(before, after, factor):
    """Whether every gradient is `factor` times what it was, within a few roundings."""
    pairs = [
        (before[n].largest, after[n].largest)
        for n in before
        if n in after and 0 < before[n].largest < math.inf
    ]
    return bool(pairs) and all(math.isclose(b, a * factor, rel_tol=0.02) for a, b in pairs)


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
        runs = [
            e
            for e in trace.between(backward, call)
            if hasattr(e, "op") and any(v.gradient for v in e.inputs) and not e.inside("backward")
        ]
        limits = [r for r in runs if r.op in _CLAMPS or r.op in _READS and _reads_a_size(r)]
        written = [
            n
            for n, g in call.before.items()
            if n in backward.after and backward.after[n].largest != g.largest
        ]
        scale = scale_of(backward)[0]
        if limits and written and not _same_factor(backward.after, call.before, 1 / scale):
            clamps = limits[0].op in _CLAMPS
            hand = type(call)(
                call.index,
                call.step,
                "clip_grad_value_" if clamps else "by hand",
                0,
                limits[0].line,
                None,
                None,
            )
            yield hand, scale, backward.after, call.before


def _reads_a_size(run):
    """Whether the op reads how large a gradient is; a product with a number does not."""
    return run.op != "mul" or len([v for v in run.tensors if v.gradient]) == 2


@rule
def clip_before_unscale(trace):
    for clip, scale, before, _ in _clips(trace):
        if not _hidden(clip, before, _):
            return error(
                f"Gradients are clipped while they are still {scale:g} times too large: the limit holds for the scaled ones, "
                "and after unscaling next to nothing is left.",
                clip.line,
                "scaler.unscale_(optimizer)   # before the clipping",
                scale=scale,
                largest_gradient=max((g.largest for g in before.values()), default=0.0),
            )
    if trace.fails_with("RuntimeError", "unscale_() is being called after step()") and trace.calls(
        "scaler.update"
    ):
        return error(
            "unscale_ comes after step, which has unscaled and used the gradients already.",
            trace.error.line,
            "scaler.unscale_(optimizer)   # then clip, then scaler.step(optimizer)",
        )


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
                f"Clipping by value makes finite numbers of the infinite gradients of {len(hidden)} parameters before the "
                "scaler looks for them: the step is taken and the scale stays too high.",
                clip.line,
                "scaler.unscale_(optimizer)   # before the clipping: it notes the overflow",
                scale=scale,
                parameters=len(hidden),
                largest_after=max(after[n].largest for n in hidden),
            )


# --------------------------------------------------------------------------------------------------- steps and updates


def _raw_steps(trace):
    """optimizer.step calls outside scaler.step whose gradients come from a scaled loss."""
    for call in trace.calls("optimizer.step"):
        if call.inside("scaler.step"):
            continue
        names = [n for n, p in trace.parameters.items() if p.optimizer == call.owner]
        backward = trace.last_backward(call, names or None)
        if backward is not None and scale_of(backward)[1]:
            yield call


@rule
def raw_optimizer_step(trace):
    for call in _raw_steps(trace):
        beside = [
            c
            for c in trace.calls("scaler.step")
            if c.facts["optimizer"] == call.owner and c.step == call.step
        ]
        what = "beside scaler.step: the update is made twice" if beside else "instead of scaler.step"
        return error(
            f"optimizer.step() is called {what}, although the loss is scaled: nothing divides these gradients by the scale or "
            "skips the infinite ones.",
            call.line,
            "scaler.step(optimizer)   # and no optimizer.step()",
            largest_gradient=max((g.largest for g in call.before.values()), default=0.0),
        )


@rule
def update_forgotten(trace):
    steps, updates = trace.calls("scaler.step"), trace.calls("scaler.update")
    twice = trace.fails_with("RuntimeError", "step() has already been called")
    if twice or steps and not updates and (trace.error is None or "after step()" in trace.error.text):
        return error(
            "scaler.update() is missing after scaler.step(): the next step is refused and the scale never moves.",
            trace.error.line if trace.error else steps[-1].line,
            "scaler.update()   # once, after the last scaler.step of the iteration",
            scaler_steps=len(steps),
            updates=len(updates),
        )


@rule
def update_repeated(trace):
    updates = [u for u in trace.calls("scaler.update") if u.facts["new_scale"] is None]
    before, last = set(), None
    for event in sorted(
        [*updates, *trace.calls("scaler.step", "scaler.unscale_", "optimizer.step")], key=lambda e: e.index
    ):
        if last is not None and last.step != event.step:
            before, last = set(), None
        if event.name != "scaler.update":
            continue
        since = {
            c.facts.get("optimizer", c.owner)
            for c in trace.calls("scaler.step", "scaler.unscale_", "optimizer.step")
            if (last.index if last else -1) < c.index < event.index and c.step == event.step
        }
        refused = (
            trace.fails_with("AssertionError", "update: no optimizer was stepped") and event is updates[-1]
        )
        if (last is not None and not since & before) or (refused and not since and last is None):
            return error(
                "scaler.update() runs more than once an iteration: the scale is judged and may change between optimizers "
                "whose gradients were made with the same scale.",
                event.line,
                "scaler.update()   # once, after the last scaler.step of the iteration",
                updates_in_this_step=sum(u.step == event.step for u in updates),
            )
        before, last = since, event


@rule
def unscale_every_micro_batch(trace):
    calls = [c for c in trace.calls("scaler.unscale_") if not c.inside("scaler.step")]
    twice = trace.fails_with("RuntimeError", "unscale_() has already been called")
    steps = trace.calls("scaler.step", "optimizer.step")
    again = twice
    for a, b in zip(calls, calls[1:], strict=False):
        same = [c for c in calls if a.index <= c.index <= b.index]
        if len({c.facts["optimizer"] for c in same}) == 1 and _accumulates(trace, a, b, steps):
            again = True
    if again:
        return error(
            "unscale_() is called more than once before the step: it divides everything that has been added up so far, so the "
            "first micro-batches are divided by the scale again and again.",
            trace.error.line if twice else calls[-1].line,
            "if last_micro_batch: scaler.unscale_(optimizer)   # once, when all gradients are there",
            unscale_calls=len(calls),
            backward_calls=len(trace.calls("backward")),
        )


def _accumulates(trace, a, b, steps):
    """Whether a backward between two events adds to the gradients that were there, without a step."""
    if any(a.index < s.index < b.index for s in steps):
        return False
    return any(a.index < c.index < b.index and _nonzero(c.before) for c in trace.calls("backward"))


def _nonzero(gradients):
    return {n for n, g in gradients.items() if g.largest != 0}


# ------------------------------------------------------------------------------------------------- from step to step


@rule
def zero_grad_missing(trace):
    requests = [
        (c, c.facts.get("optimizer", c.owner))
        for c in trace.calls("scaler.step", "optimizer.step")
        if not (c.name == "optimizer.step" and c.inside("scaler.step"))
    ]
    for i, (second, optimizer) in enumerate(requests):
        first = next((c for c, o in reversed(requests[:i]) if o == optimizer), None)
        if first is None:
            continue
        backwards = [c for c in trace.calls("backward") if first.index < c.index < second.index]
        mine = {n for n, p in trace.parameters.items() if p.optimizer == optimizer}
        stale = mine & _nonzero(second.before)
        for c in backwards:
            stale &= _nonzero(c.before) & {n for n, g in c.before.items() if n in first.before}
        stale = [n for n in stale if any(n in c.written() for c in backwards)]
        if backwards and stale:
            name = sorted(stale)[0]
            return error(
                f"The gradients of {len(stale)} parameters are never cleared between two steps: every backward adds to those "
                "of all steps before.",
                f"{name}: {second.line}",
                "optimizer.zero_grad()   # before the backward of every step",
                parameters=len(stale),
                largest_gradient=second.before[name].largest,
            )


@rule
def scaler_rebuilt(trace):
    built = trace.calls("scaler.new")
    if len({c.step for c in built}) > 1:
        return error(
            "Every step makes a new GradScaler: its scale starts anew each time, and what the last one learnt is lost.",
            built[0].line,
            "scaler = GradScaler()   # once, before the loop",
            scalers_made=len(built),
            scale=float(built[0].facts["scale"]),
        )


@rule
def scaler_not_saved(trace):
    models, optimizers = trace.calls("model.state_dict"), trace.calls("optimizer.state_dict")
    if models and optimizers and trace.scaled and not trace.calls("scaler.state_dict"):
        saved = trace.calls("save")
        return warning(
            "The checkpoint holds the model and the optimizer but not the scaler: a resumed run starts at another scale and "
            "count, skips other steps and is another run.",
            (saved or optimizers)[0].line,
            "checkpoint['scaler'] = scaler.state_dict()",
            checkpoints_seen=max(len(saved), 1),
        )
