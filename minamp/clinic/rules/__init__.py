"""The rules: each a pure function from a Trace to a Finding or None, grouped by what they look at."""

from dataclasses import replace

from minamp.clinic.report import ERROR
from minamp.clinic.rules import clipping, gradients, order, overflow, regions, softmax, state, widening
from minamp.clinic.rules.base import CODES, RULES
from minamp.clinic.rules.clipping import healers, may_hide  # asked before there is anything to judge
from minamp.clinic.rules.gradients import skips_explained  # these, too
from minamp.clinic.rules.order import may_decide

_FORWARD = (
    "softmax_in_half",
    "log_of_softmax",
    "mask_overflows",
    "eps_rounds_to_zero",
    "layer_norm_overflows",
)

# code -> the codes that are its consequences: with the cause in the report, they would only repeat it
CONSEQUENCES = {
    **dict.fromkeys((*_FORWARD, "mean_of_too_many"), ("forward_overflow", "scale_pinned")),
    "clip_value_hides_overflow": ("clip_before_unscale",),
    "raw_optimizer_step": ("forward_overflow", "scale_pinned"),
    "scaler_rebuilt": ("scale_pinned",),
    "forward_overflow": ("scale_pinned", "gradients_flushed"),
    "update_forgotten": ("scale_pinned",),
    "adam_in_half": ("forward_overflow", "scale_pinned", "updates_swamped"),
    "op_without_policy": ("scale_pinned",),
    "scale_pinned": ("gradients_flushed",),
}

# (exception, text in its message) -> the codes of which one must have been found for the error to be explained
_ORDER = {
    ("RuntimeError", "unscale_() has already been called"): ("unscale_every_micro_batch",),
    ("RuntimeError", "unscale_() is being called after step()"): ("update_forgotten", "clip_before_unscale"),
    ("RuntimeError", "step() has already been called"): ("update_forgotten",),
    ("AssertionError", "update: no optimizer was stepped"): ("update_repeated", "raw_optimizer_step"),
}
ERRORS = {
    **_ORDER,
    ("ValueError", "float16 gradients can't be unscaled"): ("half_parameters_with_scaler",),
    ("AssertionError", "the scale is not there yet"): ("scaler_rebuilt",),
    ("RuntimeError", "can't be held by float16"): ("mask_overflows",),
    ("FloatingPointError", "GradScaler: "): (
        *_FORWARD,
        "mean_of_too_many",
        "forward_overflow",
        "scale_pinned",
    ),
    ("AttributeError", "_autocast_enabled"): ("op_without_policy",),  # custom_bwd without custom_fwd
    ("RuntimeError", "tensors of different dtypes"): ("op_without_policy", "widened_by_scalar"),
}


def judge(trace):
    """The findings of all rules, errors first and each in the order of CODES, without what is only a consequence of another."""
    found = {code: RULES[code](trace) for code in CODES}
    found = {code: replace(f, code=code) for code, f in found.items() if f is not None}
    follow = {
        c for code in found for c in CONSEQUENCES.get(code, ()) if not _earlier(found.get(c), found[code])
    }
    left = [f for code, f in found.items() if code not in follow]
    return sorted(left, key=lambda f: f.severity != ERROR)


def _earlier(finding, cause):
    """Whether a finding begins before what would else be its cause."""
    return None not in (finding, cause.at) and finding.at is not None and finding.at < cause.at


def breaks_the_order(error):
    """Whether an error of the step (or None) is the scaler's word on the order of its calls, whatever the formats."""
    return error is not None and any(error.kind == kind and text in error.text for kind, text in _ORDER)


def explained(error, findings):
    """Whether one of the findings says why the step raised."""
    codes = {f.code for f in findings}
    return any(
        error.kind == kind and text in error.text and codes & set(causes)
        for (kind, text), causes in ERRORS.items()
    )
