"""The order of the calls of a loop: backward, unscale, step, update, zero_grad, save."""

import math
import re
from itertools import pairwise

from minamp.clinic.rules.base import (
    counted,
    error,
    first_backward,
    largest_of,
    rule,
    scale_of,
    unscale_refused,
    update_line,
    warning,
)
from minamp.clinic.rules.clipping import same_factor, still_scaled, unscales_late

TOO_FAR = 10.0  # a learning rate, of gradients without their scale: nobody descends by hand at a larger one
ALONG = 0.999  # the cosine between a change and the gradient, from which on it is a multiple of it

# --------------------------------------------------------------------------------------------------- steps and updates


def _raw_steps(trace):
    """(call, whether its gradients are still scaled, a scale by hand or None) of the optimizer.steps that nobody guards."""
    for call, still, scale, decides in _steps_outside(trace):
        if still or scale is None and (call.owner in trace.heedless or not decides):
            yield call, still, scale


def may_decide(trace):
    """Whether an optimizer.step outside scaler.step has finite, unscaled gradients: by chance, or because the user looks.

    Of a scaler whose scale moves: where nobody calls update() it is what the user has found to do.
    """
    return bool(trace.calls("scaler.update")) and any(decides for *_, decides in _steps_outside(trace))


def _steps_outside(trace):
    """(call, whether its gradients are still scaled, a scale by hand or None, what _decides says) of steps past the scaler."""
    for call in trace.calls("optimizer.step"):
        names = trace.held_by(call.owner)
        if call.inside("scaler.step") and not _smuggled(trace, call, names):
            continue
        backward = trace.last_backward(call, names)
        if backward is None:
            continue
        scale, by_scaler = scale_of(backward)
        if not by_scaler and not _strides(trace, call, scale):
            continue
        names = names or list(call.before)
        clips = [
            c for c in trace.calls("clip_grad_norm_", "clip_grad_value_") if c.written.keys() & set(names)
        ]
        look = next((c for c in clips if backward.index < c.index < call.index), call)
        divided = look is not call and same_factor(look.after, call.before, 1 / scale)
        still = still_scaled(trace, backward, look, scale, names) and not divided
        yield (
            call,
            still,
            None if by_scaler else scale,
            by_scaler and not still and _decides(trace, call, names),
        )


def _smuggled(trace, step, names):
    """Whether scaler.step was asked for another optimizer, of other weights: it has not looked at these gradients."""
    outer = step.within
    while outer.name != "scaler.step":
        outer = outer.within
    asked = trace.held_by(outer.facts["optimizer"])
    return bool(asked and names) and not set(asked) & set(names) and bool(_nonzero(step.before) & set(names))


def _strides(trace, step, scale):
    """Whether SGD's rate is one that nobody means, for gradients that a number multiplies as a loss scale does."""
    return step.facts["rate"] * scale > TOO_FAR and _chosen_scale(trace, scale)


def _decides(trace, step, names):
    """Whether the user, whose gradients are unscaled, decides about the step as well as scaler.step would.

    Finite gradients, divided by hand, or by unscale_ with an update after it; and no scaler.step in the same iteration.
    """
    if not all(math.isfinite(g.largest) for n, g in step.before.items() if n in names):
        return False
    mine = [
        c
        for c in trace.calls("scaler.unscale_", "scaler.step")
        if c.step == step.step and c.facts["optimizer"] == step.owner
    ]
    if any(c.name == "scaler.step" for c in mine):
        return False
    updates = [u for u in trace.calls("scaler.update") if u.step == step.step]
    return not mine or any(u.index > mine[-1].index for u in updates)


def _raw_descent(trace):
    """(line, rate, scale) of an update by hand whose rate multiplies gradients that are still scaled, to TOO_FAR and more."""
    made, backwards = trace.calls("backward", "grad"), trace.calls("backward")
    if not made:
        return None
    was, now = backwards[0].facts["versions"] if backwards else {}, trace.versions
    written = {n for n in trace.unheld if n in was and was[n] != now[n]}
    # who calls update() leaves no part of the scale to the rate
    farthest = 0.0 if trace.fails_with("AssertionError", "update: no optimizer was stepped") else TOO_FAR
    for run in trace.ops if written else ():
        rates = [abs(c) for c in (*run.constants, run.attrs.get("alpha", 1)) if 0 < abs(c) < 1]
        for v in run.inputs if rates else ():
            backward = trace.last_backward(run, [v.gradient])
            if backward is None or v.gradient not in written:
                continue
            scale, by_scaler = scale_of(backward)
            if by_scaler and v.largest == backward.after[v.gradient].largest and rates[0] * scale > farthest:
                return run.line, rates[0], scale
    return None if trace.calls("scaler.step") else _descent_in_numbers(trace)


def _descent_in_numbers(trace):
    """The same by what the weights have done, whoever wrote it: several moved along their gradients, by one rate.

    Momentum does so at first, and NumPy is no op of ours. Adam goes its own way, in every weight at another rate.
    """
    scale, by_scaler = scale_of(first_backward(trace))
    if not by_scaler and not _chosen_scale(trace, scale):
        return None
    rates = sorted(rate for rate, cosine in trace.descents.values() if cosine > ALONG)
    for a, b in pairwise(rates):
        if a * scale > TOO_FAR and math.isclose(a, b, rel_tol=0.01):
            return update_line(trace), a, scale
    return None


def _chosen_scale(trace, factor):
    """Whether a loss was multiplied by a number that is no weight of it: a power of two from 256 on, for float16's gradients."""
    return trace.in_float16 and factor >= 256 and math.log2(factor).is_integer()


@rule
def raw_optimizer_step(trace):
    descent = _raw_descent(trace)
    if descent is not None:
        line, rate, scale = descent
        return error(
            f"An update by hand takes {rate:g} times gradients that are still {scale:g} times too large: nothing divides them "
            "by the scale or leaves out the infinite ones.",
            line,
            f"scaler.step(optimizer)   # or p -= lr * p.grad / {'scaler.get_scale()' if trace.scaled else f'{scale:g}'}",
            at=first_backward(trace).index,
            rate=rate,
            scale=scale,
        )
    for call, still, by_hand in _raw_steps(trace):
        beside = [
            c
            for c in trace.calls("scaler.step")
            if c.facts["optimizer"] == call.owner and c.step == call.step
        ]
        what = "" if by_hand else "instead of scaler.step, "
        what = "beside scaler.step: the update is made twice, " if beside else what
        lacks = (
            "divides the gradients by the scale or skips infinite ones"
            if still
            else "skips infinite gradients"
        )
        return error(
            f"optimizer.step() is called {what}although the loss is scaled: nothing {lacks}.",
            call.line,
            f"p.grad /= {by_hand:g}   # of every p, before the step; or a GradScaler"
            if by_hand
            else "closure(); scaler.step(optimizer); scaler.update()   # a scaled step takes no closure"
            if call.facts["closure"]
            else "scaler.step(optimizer)   # and no optimizer.step()",
            at=call.index,
            largest_gradient=largest_of(call.before),
        )


@rule
def update_forgotten(trace):
    steps, updates = trace.calls("scaler.step"), trace.calls("scaler.update")
    twice = trace.fails_with("RuntimeError", "step() has already been called")
    late = unscale_refused(trace) and not unscales_late(trace)
    early = _early_update(trace) if late else None
    if early is not None:
        return error(
            "scaler.update() stands before scaler.step(): it forgets that unscale_ was called, so that the step divides by the "
            "scale a second time.",
            early.line,
            "scaler.step(optimizer); scaler.update()   # in this order",
            at=early.index,
            scaler_steps=len(steps),
            updates=len(updates),
        )
    before = late and not steps  # the iteration before those that were observed has left it
    if twice or before or steps and not updates and (trace.error is None or late):
        return error(
            "scaler.update() is missing after scaler.step(): the next step is refused and the scale never moves.",
            trace.error.line if before else steps[-1].line,
            "scaler.update()   # once, after the last scaler.step of the iteration",
            scaler_steps=len(steps),
            updates=len(updates),
        )


def _early_update(trace):
    """The last update, if it stands between a backward and the step of its gradients; else None."""
    updates, steps = trace.calls("scaler.update"), trace.calls("scaler.step")
    if not updates or not steps or updates[-1].index > steps[-1].index:
        return None
    update, backward = updates[-1], trace.last_backward(updates[-1])
    stepped = trace.calls("scaler.step", "optimizer.step")
    fresh = backward is not None and backward.step == update.step == steps[-1].step
    return update if fresh and not any(backward.index < c.index < update.index for c in stepped) else None


@rule
def update_repeated(trace):
    updates = [u for u in trace.calls("scaler.update") if u.facts["new_scale"] is None]
    before, last = set(), {}  # last: of each scaler
    for event in updates:
        previous = last.get(event.owner)
        if previous is not None and previous.step != event.step:
            before, previous = set(), None
        used = [
            c
            for c in trace.calls("scaler.step", "scaler.unscale_", "optimizer.step")
            if (previous.index if previous else -1) < c.index < event.index and c.step == event.step
        ]
        since = {c.facts.get("optimizer", c.owner) for c in used}
        refused = (
            trace.fails_with("AssertionError", "update: no optimizer was stepped") and event is updates[-1]
        )
        made = _made(trace, used)
        anew = bool(made) and previous is not None and all(b is not None and b > previous.index for b in made)
        old = previous is not None and any(b is not None and b < previous.index for b in made)
        again = previous is not None and not anew and (old or not since & before)
        if again or (refused and not since and previous is None):
            return error(
                "scaler.update() runs between unscale_ and step too: it forgets that the gradients are unscaled, and step "
                "divides them by the scale a second time."
                if again and _unscaled_before(trace, previous, since)
                else "scaler.update() runs more than once an iteration: the scale is judged and may change between optimizers "
                "whose gradients were made with the same scale."
                if since
                else "scaler.update() runs where nothing has been stepped since the last one: more than once an iteration, or "
                "before its scaler.step().",
                event.line,
                "scaler.update()   # once, after the last scaler.step of the iteration",
                updates_in_this_step=sum(u.step == event.step for u in updates),
            )
        before, last[event.owner] = since, event


def _unscaled_before(trace, update, optimizers):
    """Whether the loop itself has called unscale_ for one of some optimizers before an update in the same iteration."""
    calls = (c for c in trace.calls("scaler.unscale_") if c.step == update.step and c.index < update.index)
    return any(c.facts["optimizer"] in optimizers and not c.inside("scaler.step") for c in calls)


def _made(trace, used):
    """The numbers of the backwards that made the gradients for some calls; None where that is not known."""
    # Of weights that were made in the step no backward before their first scaler.step is known to have written them.
    backwards = [
        trace.last_backward(c, trace.held_by(c.facts.get("optimizer", c.owner))) or trace.last_backward(c)
        for c in used
    ]
    return [b and b.index for b in backwards]


@rule
def unscale_every_micro_batch(trace):
    calls = [c for c in trace.calls("scaler.unscale_") if not c.inside("scaler.step")]
    twice = trace.fails_with("RuntimeError", "unscale_() has already been called")
    steps = trace.calls("scaler.step", "optimizer.step")
    by_hand = _divided_by_hand(trace)
    again = twice or by_hand
    for a, b in zip(calls, calls[1:], strict=False):
        same = [c for c in calls if a.index <= c.index <= b.index]
        if len({c.facts["optimizer"] for c in same}) == 1 and _accumulates(trace, a, b, steps):
            again = True
    if twice and not _adds_between(trace, calls):
        return error(
            "unscale_() is called twice for the same gradients, and the second call is refused: it would divide them again.",
            trace.error.line,
            "# without this unscale_: one, before all that looks at the gradients, is enough",
            unscale_calls=len(calls),
        )
    if again:
        divide = (
            "p.grad /= scale" if by_hand and not trace.calls("scaler.step") else "scaler.unscale_(optimizer)"
        )
        return error(
            f"{'The gradients are divided by the scale' if by_hand else 'unscale_() is called'} more than once before the step: "
            "that divides everything that has been added up so far, so the first micro-batches are divided again and again.",
            trace.error.line if twice else by_hand or calls[-1].line,
            f"if last_micro_batch: {divide}   # once, when all gradients are there",
            unscale_calls=len(calls),
            backward_calls=len(trace.calls("backward")),
        )


def _adds_between(trace, calls):
    """Whether a backward ran between the last unscale_ and the one before it, which may be of an earlier step."""
    mine = [c for c in calls if c.facts["optimizer"] == calls[-1].facts["optimizer"]]
    return len(mine) < 2 or any(mine[-2].index < c.index < mine[-1].index for c in trace.calls("backward"))


def _divided_by_hand(trace):
    """The line that divides gradients to which the next backward adds scaled ones, or else of that backward; '' if none does."""
    for a, b in pairwise(trace.calls("backward")):
        scale, names = scale_of(a)[0], _nonzero(b.before) & a.after.keys() & b.written.keys()
        between = [
            e for e in trace.between(a, b) if getattr(e, "name", "") in ("scaler.unscale_", "optimizer.step")
        ]
        if names and not between and scale == scale_of(b)[0] > 1:
            # what a clipping has made of them is its own affair
            clips = trace.calls("clip_grad_norm_", "clip_grad_value_")
            ends = [g for c in clips if a.index < c.index < b.index for g in (c.before, c.after)]
            ends = [a.after, *ends, b.before]
            mine = [{n: g for n, g in was.items() if n in names} for was in ends[::2]]
            if any(same_factor(was, now, 1 / scale) for was, now in zip(mine, ends[1::2], strict=True)):
                runs = (e for e in trace.between(a, b) if hasattr(e, "op") and not e.inside("backward"))
                return next((r.line for r in runs if any(v.gradient in names for v in r.inputs)), b.line)
    return ""


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
    # on the way to the next step
    if unscale_refused(trace):
        requests += [(c, c.facts["optimizer"]) for c in trace.calls("scaler.unscale_")[-1:]]
    for i, (second, optimizer) in enumerate(requests):
        first = next((c for c, o in reversed(requests[:i]) if o == optimizer), None)
        if first is None:
            continue
        backwards = [c for c in trace.calls("backward") if first.index < c.index < second.index]
        mine = set(trace.held_by(optimizer) or ())
        stale = mine & _nonzero(second.before)
        for c in backwards:
            stale &= _nonzero(c.before) & {n for n, g in c.before.items() if n in first.before}
        stale = [n for n in stale if any(n in c.written for c in backwards)]
        if backwards and stale:
            name = sorted(stale)[0]
            unscaled = trace.calls("scaler.step", "scaler.unscale_")
            return error(
                f"The gradients of {counted(len(stale))} are never cleared between two steps: every backward adds to those "
                f"of all steps before{', which unscale_ has divided by the scale' if unscaled else ''}.",
                f"{name}: {second.line}",
                "optimizer.zero_grad()   # before the backward of every step",
                parameters=len(stale),
                largest_gradient=second.before[name].largest,
            )
    for first, second in pairwise(trace.calls("backward")):  # steps without an optimizer
        was, now = first.facts["versions"], second.facts["versions"]
        kept = _nonzero(second.before) & first.after.keys() & second.written.keys()
        used = _gradients_used(trace, first, second)
        stale = sorted(n for n in kept & used & trace.unheld if was[n] != now[n])
        if stale:
            return error(
                f"The gradients of {counted(len(stale))} are not cleared after the weights were changed by them: every "
                "backward adds to those of all steps before.",
                f"{stale[0]}: {second.line}",
                "model.zero_grad()   # or p.grad = None, before the backward of every step",
                parameters=len(stale),
                largest_gradient=second.before[stale[0]].largest,
            )


def _gradients_used(trace, a, b):
    """The parameters whose gradient an op of the user's, or an optimizer that we were not given, takes between two events."""
    events = trace.between(a, b)
    if any(getattr(e, "name", "") == "optimizer.step" for e in events):
        return set(trace.parameters)
    return {v.gradient for e in events if hasattr(e, "op") for v in e.inputs if v.gradient}


@rule
def scaler_rebuilt(trace):
    built = trace.calls("scaler.new")
    if len({c.step for c in built}) < 2:  # copied from another, or another's state loaded
        built = [c for c in trace.calls("scaler.scale") if c.owner in trace.scalers_made]
        built = built if len({c.owner for c in built}) == len({c.step for c in built}) else []
    if len({c.step for c in built}) > 1 and not _goes_on(trace, {c.owner for c in built}):
        return error(
            "Every step makes a new GradScaler: its scale starts anew each time, and what the last one learnt is lost.",
            built[0].line,
            "scaler = GradScaler()   # once, before the loop",
            scalers_made=len(built),
            scale=float(built[0].facts["scale"]),
        )
    new = [c for c in trace.calls("scaler.scale") if c.owner in trace.scalers_made]
    if new and trace.fails_with("AssertionError", "the scale is not there yet"):
        return error(
            "The loss is scaled by a GradScaler that the step has made, and another one, which has scaled nothing, is asked for "
            "the step.",
            new[-1].line,
            "scaler = GradScaler()   # once, before the loop, and the same one for scale, step and update",
            scalers_made=len({c.owner for c in new}),
        )
    for first, second in pairwise(trace.calls("scaler.update")):
        states = _states(first, second)
        if (
            first.owner == second.owner
            and first.step < second.step
            and states[0] == states[1] != _left(first)
        ):
            loaded = [
                c for c in trace.calls("scaler.load_state_dict") if first.index < c.index < second.index
            ]
            return error(
                "Every step puts the scaler back to the scale and count that the step before it began with: what it has learnt "
                "is lost.",
                (loaded or [second])[-1].line,
                "scaler.load_state_dict(state)   # once, before the loop",
                scale=states[0][0],
                good_steps=states[0][1],
            )


def _goes_on(trace, scalers):
    """Whether the second step's scaler begins with the scale and count that the first's was left with, and did not begin with."""
    for first, second in pairwise(u for u in trace.calls("scaler.update") if u.owner in scalers):
        if first.step < second.step:
            return _states(first, second)[0] != _states(first, second)[1] == _left(first)
    return False


def _states(*updates):
    """The scale and count that each update began with."""
    return [(u.facts["scale"], u.facts["good_steps_before"]) for u in updates]


def _left(update):
    """The scale and count that an update ended with."""
    return update.facts.get("scale_after"), update.facts.get("good_steps")


@rule
def scaler_not_saved(trace):
    models = trace.calls("model.state_dict")
    optimizers = [c for c in trace.calls("optimizer.state_dict") if not _is_read(c.line)]
    saved = trace.calls("save")
    whole = [c for c in saved if c.facts["whole"]]
    # the scalers that step those optimizers; if none steps, all that scale
    stepping = trace.calls("scaler.step", "scaler.unscale_")
    theirs = [c for c in stepping if c.facts["optimizer"] in {o.owner for o in optimizers}]
    used = {c.owner for c in (theirs if stepping else trace.calls("scaler.scale"))}
    taken = used <= {c.owner for c in trace.calls("scaler.state_dict") if not _is_read(c.line)}
    kept = taken and (not whole or any(c.facts["scaler"] for c in saved))
    if models and optimizers and trace.scaled and not kept:
        return warning(
            "The state of the model and of the optimizer is taken but not the scaler's: a run resumed from a checkpoint of them "
            "starts at another scale and count, skips other steps and is another run.",
            (saved or optimizers)[0].line,
            "checkpoint['scaler'] = scaler.state_dict()",
            checkpoints_seen=max(len(saved), 1),
        )


_WHOLE_PART = re.compile(r"""state_dict\(\)\[["'](state|param_groups)["']\](?!\[)""")


def _is_read(line):
    """Whether one value of a state is read at once, such as a rate or a scale for a log, or all are copied to be put back."""
    return "deepcopy(" in line or "state_dict()[" in line and not _WHOLE_PART.search(line)
