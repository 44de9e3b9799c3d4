"""Gradients and their scale: what float16 flushes to zero, and a scale that can't move or moves one way only."""

import math

from minamp.clinic.advice import CEILING, USUAL_SHARE
from minamp.clinic.rules.base import error, reads_ill_statistics, rule, scale_of, short, warning

FLUSHED = 0.1  # of all non-zero gradients; a healthy run at 2^16 stays below 0.04
FLUSHED_OF_ONE = 0.5  # of one parameter's
FALLS = 2  # skipped steps in a row
# Steps that may be skipped at first; at the usual backoff of 0.5 also the powers of two that a scale may start too high.
STARTING = 12


def _scale(trace):
    """The scale of the first backward that a scaler scales, or else of the first; 1.0 if there was none."""
    scales = [scale_of(backward) for backward in trace.calls("backward")]
    return next((scale for scale, by_scaler in scales if by_scaler), scales[0][0] if scales else 1.0)


@rule
def gradients_flushed(trace):
    run, scale = trace.reference, _scale(trace)
    if run is None or not run.complete or run.half or not run.ceiling or scale <= 0 or not trace.in_float16:
        return None
    shares = {name: run.flushed(scale, name) for name in run.weights}
    share = run.flushed(scale)
    worst = max(shares, key=shares.get, default=None)
    if share <= FLUSHED and (worst is None or shares[worst] <= FLUSHED_OF_ONE):
        return None
    better = run.rescue()
    if better < 4 * scale or run.flushed(better) > share / 2:
        return None  # no scale would help, or the scaler is nearly there
    there, where = "on the way to the weights, which learn from what is left", "the gradients of activations"
    lost = _lost(trace)
    if lost:
        there, where = f"and nothing arrives at {short(lost)}", lost[0]
    elif shares[worst] > FLUSHED:
        there, where = f"{shares[worst]:.0%} in {worst}: those weights learn from what is left", worst
    return warning(
        f"At a scale of {scale:g} float16 turns {share:.0%} of the non-zero gradients into 0, {there}.",
        where,
        f"scaler = GradScaler(init_scale=2.0**{math.log2(better):.0f})",
        flushed=share,
        flushed_there=1.0 if lost else shares[worst],
        scale=scale,
        better_scale=better,
        flushed_then=run.flushed(better),
        ceiling=run.ceiling,
        largest_gradient=run.largest,
    )


def _lost(trace):
    """The weights whose gradient was 0 altogether in the first call, and is not in float32.

    No biases: that of a difference of two scores is 0, but for float32's rounding.
    """
    counts, now = trace.reference.counts, {}
    for backward in trace.calls("backward"):
        if backward.step == 0:
            now.update(backward.written)
    weights = [n for n, p in trace.parameters.items() if len(p.shape) > 1 and n in now and n in counts]
    return [n for n in weights if now[n].largest == 0 and counts[n].any()]


@rule
def scale_pinned(trace):
    cases = (_gave_up, _at_a_bound, _starts_again, _starts_too_high, _falls_in_vain)
    return next(filter(None, (case(trace) for case in cases)), None)


def _updates(trace):
    """The updates that move the scale by the scaler's own rule."""
    return [
        u for u in trace.calls("scaler.update") if u.facts["new_scale"] is None and "scale_after" in u.facts
    ]


def _gave_up(trace):
    if trace.fails_with("FloatingPointError", "GradScaler: "):
        return error(
            f"The scaler has given up: {trace.error.text}.",
            trace.error.line,
            "with watch.first_bad_op() as bad: step()   # then print(bad)",
            scale=trace.calls("scaler.update")[-1].facts["scale"],
        )


def _at_a_bound(trace):
    for u in _updates(trace):
        skipped = _skipped(trace, u)
        before, after = u.facts["scale"], u.facts["scale_after"]
        if skipped and (after >= before or u.facts["floor"] > allowed_scale(trace)):
            floor = max(u.facts["floor"], after)
            return error(
                f"The gradients overflow at a scale of {before:g}, and the scaler's floor of {floor:g} forbids one that would "
                "do: every step is skipped.",
                u.line,
                "scaler = GradScaler(min_scale=1.0)   # or none",
                scale=before,
                **_room(trace),
            )
        due = u.facts["good_steps"] == 0 or before >= u.facts["ceiling"]
        if not skipped and after <= before and due and _flushes(trace, before):
            return warning(
                f"The scale should grow and stays at its ceiling of {before:g}, while gradients are flushed to 0.",
                u.line,
                "scaler = GradScaler(max_scale=2.0**24)   # or none",
                scale=before,
                **_room(trace),
            )


def _starts_again(trace):
    """A scale that the user puts back before the next step, or a scale by hand that nobody lowers."""
    first, second = ([c for c in trace.calls("backward") if c.step == i][:1] for i in (0, 1))
    made = any(c.step == 0 for c in trace.calls("optimizer.step"))
    if first and second and not made and not all(math.isfinite(g.largest) for g in first[0].after.values()):
        (before, by_scaler), (after, _) = scale_of(first[0]), scale_of(second[0])
        asked = trace.calls("scaler.step") if by_scaler else before > 1
        if asked and after >= before and not before <= allowed_scale(trace):
            return error(
                f"The gradients overflow at a scale of {before:g}, the step is skipped, and the next one starts at {after:g}: "
                "every step is skipped.",
                second[0].line,
                "scaler.update()   # without a scale of your own, and nothing that puts the old one back"
                if by_scaler
                else "scale /= 2   # whenever a step is skipped; or a GradScaler, which does so",
                scale=before,
                **_room(trace),
            )


def _starts_too_high(trace):
    fall = next((u for u in _updates(trace) if _skipped(trace, u)), None)
    excess = _excess(trace, fall) if fall else math.nan
    if not excess > 0 or not trace.reference.ceiling:
        return None
    was, better = fall.facts["scale"], trace.reference.rescue()
    fallen = math.log2(was / fall.facts["scale_after"])
    skips = math.ceil(excess / fallen) if fallen > 0 else 0
    if skips <= STARTING:
        return None
    repair = f"scaler = GradScaler(init_scale=2.0**{math.log2(better):.0f})"
    if excess <= STARTING:
        repair = "scaler = GradScaler(backoff_factor=0.5)   # the default: one skip in place of many"
    elif trace.reference.flushed(better) > USUAL_SHARE:
        repair = (
            "with autocast(dtype=minamp.bfloat16): ...   # no scale fits float16's range to these gradients"
        )
    return warning(
        f"The scale, {was:g}, is above what the gradients allow and comes down slowly: {skips} steps are skipped until then."
        if excess <= STARTING
        else f"The scale, {was:g}, is far above what the gradients allow: {skips} steps are skipped while it comes down.",
        fall.line,
        repair,
        scale=was,
        **_room(trace),
    )


def _falls_in_vain(trace):
    updates = _updates(trace)
    if len(updates) < FALLS or not all(_skipped(trace, u) for u in updates) or _inherited(trace, updates[-1]):
        return None
    if reads_ill_statistics(trace):
        return None  # which has a finding of its own
    if not -1 <= _excess(trace, updates[0]) <= STARTING:
        scale = updates[-1].facts["scale_after"]
        return error(
            f"The scale has fallen {len(updates)} times in a row, to {scale:g}, and smaller will not help: what is not finite "
            "is not made by the scale.",
            updates[-1].line,
            "with watch.first_bad_op() as bad: step()   # then print(bad)",
            falls=len(updates),
            scale=scale,
            **_room(trace),
        )


def skips_explained(trace):
    """Whether every skipped step had an overflow in its forward, or a scale too high for its gradients in float32."""
    falls = [u for u in trace.calls("scaler.update") if _skipped(trace, u)]
    return any(run.spoilt for run in trace.ops) or all(_excess(trace, u) >= -1 for u in falls)


def _skipped(trace, update):
    """Whether a scaler.step since the update before found something not finite."""
    mine = [u for u in trace.calls("scaler.update") if u.owner == update.owner]
    before = [u.index for u in mine if u.index < update.index]
    since = max(before, default=-1)
    steps = [
        c for c in trace.calls("scaler.step") if c.owner == update.owner and since < c.index < update.index
    ]
    return any(not _ran(trace, c) for c in steps)


def _inherited(trace, update):
    """Whether something not finite was in the gradients before backward: left there by the step before, of a larger scale."""
    made = [c for c in trace.calls("backward") if c.step == update.step]
    return any(not math.isfinite(g.largest) for c in made for g in c.before.values())


def _ran(trace, step):
    """Whether a scaler.step led to an optimizer's."""
    return any(c.within is step for c in trace.calls("optimizer.step"))


def allowed_scale(trace):
    """The largest scale that the float32 gradients allow; nan if that is not known."""
    run = trace.reference
    return CEILING / run.largest if run is not None and run.complete and run.largest > 0 else math.nan


def _room(trace):
    """The largest allowed scale as evidence, where it is known."""
    allowed = allowed_scale(trace)
    return {} if math.isnan(allowed) else {"largest_allowed": allowed}


def _flushes(trace, scale):
    run = trace.reference
    return run is not None and run.complete and run.ceiling > 4 * scale and run.flushed(scale) > USUAL_SHARE


def _excess(trace, update):
    """How many powers of two a scale was above what the float32 gradients allow; nan if that is not known."""
    allowed = allowed_scale(trace)
    return math.log2(update.facts["scale"] / allowed) if 0 < allowed < math.inf else math.nan
