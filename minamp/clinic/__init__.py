"""doctor: what is wrong with a mixed-precision training step, in words.

Data flows one way: minamp/restore.py keeps the state safe, instruments.py record what the step does as plain facts (trace.py),
the rules (rules/) turn facts into findings, report.py says them. advice.py looks at one step in float32.
"""

from minamp.autocast import without_autocast
from minamp.clinic import advice, rules
from minamp.clinic.advice import Reference
from minamp.clinic.instruments import Backwards, Calls, Ops, error_of
from minamp.clinic.patient import Patient
from minamp.clinic.report import Advice, Finding, Report
from minamp.clinic.rules.base import scale_of
from minamp.clinic.trace import Trace
from minamp.record import observe
from minamp.restore import restored

STEPS = 2  # what one step leaves to the next shows in the second: stale gradients, a missing update, a falling scale


def doctor(step, model=None, optimizer=None, scaler=None):
    """Examine a training step: run it a few times under observation, undo everything, and report what is wrong.

    step: a callable without arguments that does one training step of your loop. model: its Module, or a list of them.
    optimizer: its Optimizer, or a list of them. scaler: its GradScaler or None. Returns a Report: a list of Findings, the
    cause before its consequences, empty for a healthy step; print it, or take report.to_json(). report.advice says what one
    step in float32 tells about scale and formats.

    The step runs three times at most. Model, optimizer, scaler, gradients, random generators and all that the step reaches
    through its closure, its object and its globals are put back, also when it raises. What can't be put back: iterators (a
    data loader is three batches further), files, prints. An error that the doctor knows becomes a finding, any other is
    raised again. TypeError for an argument of the wrong kind.
    """
    patient = Patient(step, model, optimizer, scaler)
    with restored(step=step, model=model, optimizer=optimizer, scaler=scaler) as before:
        trace = Trace(parameters=patient.describe(), scaler_given=patient.scaled)
        statistics = patient.ill_statistics()
        _observe(step, trace, patient)
        trace.batch_norms = patient.still_ill(statistics)
        trace.scalers_made = {c.owner for c in trace.calls("scaler.scale") if not before.reached(c.owner)}
        trace.half_state = patient.half_state(before)
        before.restore()
        _in_float32(step, trace, patient)
    findings = rules.judge(trace)
    if trace.error is not None and not rules.explained(trace.error, findings):
        raise trace.error.exception
    error = None if trace.error is None else f"{trace.error.kind}: {trace.error.text}"
    return Report(findings, advice.advice(trace), trace.steps, error)


def _observe(step, trace, patient):
    """Run the step STEPS times, or until it raises; the exception becomes a fact."""
    calls = Calls(trace, patient)
    with Ops(calls) as ops, calls:
        for calls.step in range(STEPS):
            trace.steps += 1
            ops.made.clear()
            try:
                step()
            except Exception as error:
                trace.error = error_of(error)
                return
            trace.lost_by_hand = calls.by_hand()


def _in_float32(step, trace, patient):
    """Run the step once with autocast off. It may fail there: then the advice says so."""
    # The step starts from the same state as the first observed one, so its losses are multiplied by the same factors.
    scales = [scale_of(call)[0] for call in trace.calls("backward", "grad") if call.step == 0]
    scales = [1.0, *(scales or [patient.scale])]  # before the first backward nothing is multiplied
    backwards = Backwards()
    trace.reference = Reference(patient.names, lambda: scales[min(backwards.count, len(scales) - 1)])
    trace.steps += 1
    with without_autocast(), trace.reference, observe(trace.reference.tick), backwards:
        try:
            step()
            trace.reference.complete = True
        except Exception:
            return
