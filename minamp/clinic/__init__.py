"""doctor: what is wrong with a mixed-precision training step, in words.

Data flows one way: minamp/restore.py keeps the state safe, calls.py and ops.py record what the step does as plain facts
(trace.py), the rules (rules/) turn facts into findings, report.py says them. advice.py looks at one step in float32.
"""

import math
import threading

from minamp.announce import listeners
from minamp.autocast import without_autocast
from minamp.clinic import advice, rules
from minamp.clinic.advice import Reference
from minamp.clinic.calls import Backwards, Calls
from minamp.clinic.ops import Ops, error_of
from minamp.clinic.patient import Patient
from minamp.clinic.report import Advice, Finding, Report
from minamp.clinic.rules.base import scale_of
from minamp.clinic.trace import Trace
from minamp.record import observe
from minamp.restore import restored
from minamp.scaler import GradScaler


def doctor(step, model=None, optimizer=None, scaler=None):
    """Examine a training step: run it a few times under observation, undo everything, and report what is wrong.

    step: a callable without arguments that does one training step of your loop. model: its Module, or a list of them.
    optimizer: its Optimizer, or a list of them; with neither, the leaves that the step reaches are its parameters.
    scaler: its GradScaler or None. Returns a Report: a list of Findings, errors first, the cause before its consequences,
    empty for a healthy step; print it, or take report.to_json(). report.advice says what one step in float32 tells about
    scale and formats.

    The step runs twice, as it is and in float32; three to five times where it raises or spoils a parameter, fails in float32,
    steps an optimizer past the scaler or bounds gradients inside a backward (then once at a scale at which all gradients
    overflow), or the second call is not the first again, as in turns. What happens in a later call only is not seen, nor what
    runs in other threads.
    Model, optimizer, scaler, gradients, random generators and all that the step reaches through its closure, its object and
    its globals are put back, also when it raises, and so is iter() of minamp's DataLoader over a Dataset, or a zip of such. What
    can't be put back: other iterators and generators (they are some batches further), files, prints. An error that the doctor
    knows becomes a finding, any other is raised again. TypeError for an argument of the wrong kind, RuntimeError inside a step
    that is being examined.
    """
    if any(isinstance(x, Calls | Backwards) and x.thread == threading.get_ident() for x in listeners):
        raise RuntimeError(
            "doctor: called by a step that the doctor is examining, which might never end: give it a step without that call"
        )
    runs = 0

    def counted():
        nonlocal runs
        runs += 1
        try:
            step()
        except StopIteration as end:
            raise RuntimeError(
                f"doctor: an iterator was at its end in run {runs} of the step: give it one that goes on, such as "
                "itertools.cycle(batches)"
            ) from end

    patient = Patient(step, model, optimizer, scaler)
    with restored(step=step, model=model, optimizer=optimizer, scaler=scaler) as before:
        patient.find_parameters(before)
        trace = _examined(counted, patient, before)
    findings = rules.judge(trace)
    if trace.error is not None and not rules.explained(trace.error, findings):
        raise trace.error.exception
    error = None if trace.error is None else f"{trace.error.kind}: {trace.error.text}"
    return Report(findings, advice.advice(trace), runs, error)


def _examined(step, patient, before):
    """The Trace of two calls of the step, with a float32 run: that is the second call wherever it can stand for it."""
    trace = _noted(step, patient, before, in_float32=True)
    reference = trace.reference
    if reference is not None and rules.breaks_the_order(reference.error):
        trace.error = reference.error
        return trace
    if reference is not None and not (trace.repeats and rules.skips_explained(trace)):
        before.restore()
        trace = _noted(step, patient, before, in_float32=False)
        trace.reference = reference
    # what is not sound after the first call may be so where that started; not if all parameters are still what they were there
    unsound = reference is not None and reference.complete and not reference.sound
    if reference is None or unsound and not patient.kept(before):
        before.restore()
        trace.reference = _in_float32(step, trace, patient)
    if rules.may_decide(trace) or rules.may_hide(trace):
        before.restore()
        _overflow(step, trace, patient, before)
    return trace


def _overflow(step, trace, patient, before):
    """Run the step at a scale at which all gradients overflow; note in the trace who takes or hides them all the same."""
    for scaler in {c.owner: before.reached(c.owner) for c in trace.calls("scaler.scale")}.values():
        if isinstance(scaler, GradScaler):  # a user's class may have methods of its own
            GradScaler.load_state_dict(scaler, {**GradScaler.state_dict(scaler), "scale": 2.0**127})
    overflowing, limit = Trace(parameters=patient.describe()), 4 * len(trace.events) + 200

    def tick(*_):
        if len(overflowing.events) > limit:
            raise _Enough

    try:
        with Calls(overflowing, patient) as calls, observe(tick):
            _observe(step, calls)
    except (_Enough, SystemExit):
        pass  # it looks, and tries again or gives up
    steps = overflowing.calls("optimizer.step")
    heedless = {c.owner for c in steps if not all(math.isfinite(g.largest) for g in c.before.values())}
    trace.heedless = heedless & {o for p in patient.describe().values() if not p.finite for o in p.optimizers}
    trace.healers = rules.healers(overflowing)


class _Enough(BaseException):
    """Ends a step that tries again and again, at a scale at which its gradients are never finite."""


def _noted(step, patient, before, in_float32):
    """The Trace of two calls of the step: what one leaves to the next shows in the second, such as a gradient or a scale.

    in_float32: the second is made in float32, unless the first has raised or spoilt a parameter.
    """
    trace, scale = Trace(parameters=patient.describe()), patient.scale
    statistics = patient.ill_statistics()
    with Calls(trace, patient) as calls:
        _observe(step, calls)
        calls.step = 1
        trace.spoils = trace.error is None and not patient.finite
        if in_float32 and trace.error is None and not trace.spoils:
            _go_on_in_float32(step, trace, patient, patient.scale / scale)
        elif trace.error is None:
            _observe(step, calls)
    trace.versions = patient.versions
    trace.batch_norms = patient.still_ill(statistics)
    trace.scalers_made = {c.owner for c in trace.calls("scaler.scale") if before.reached(c.owner) is None}
    trace.half_state = patient.half_state(before)
    trace.masters = patient.masters(before) if trace.loses else set()
    return trace


def _observe(step, calls):
    """Run the step and note its ops and what it has done by hand; an exception becomes a fact."""
    trace = calls.trace
    with Ops(calls):
        try:
            step()
        except Exception as error:
            trace.error = error_of(error)
    if trace.error is None:  # what an unfinished step has not written is not lost
        trace.lost_by_hand = calls.by_hand()
    # those of the first call, before momentum has built up
    trace.descents = {**calls.descents(), **trace.descents}


def _go_on_in_float32(step, trace, patient, grown):
    """Run the step in float32 as the second call: its losses are multiplied as in the first, by a scale that has `grown`."""
    first = trace.calls("backward", "grad")
    trace.reference = _in_float32(step, trace, patient, grown)
    for call, before in zip(trace.calls("backward", "grad")[len(first) :], first, strict=False):
        scale, by_scaler = scale_of(before)
        call.facts["scale"] = grown * scale, by_scaler  # the ops that would say so were not noted


def _in_float32(step, trace, patient, grown=1.0):
    """The Reference of the step with autocast off. It may fail there: then the advice says so."""
    # Before the first backward nothing is multiplied, then the losses are by the factors of the first call. Where a scaler has
    # scaled some of them, those alone say which scale is right: None for the others.
    factors = [scale_of(call) for call in trace.calls("backward", "grad") if call.step == 0]
    some = any(by_scaler for _, by_scaler in factors)
    factors = [factor if by_scaler or not some else None for factor, by_scaler in factors]
    scales = [1.0, *(factor and grown * factor for factor in factors or [patient.scale])]
    backwards = Backwards()
    reference = Reference(patient.names, lambda: scales[min(backwards.count, len(scales) - 1)], trace.halves)
    with without_autocast(), reference, backwards:
        try:
            step()
        except Exception as error:
            reference.error = error_of(error)
    return reference
