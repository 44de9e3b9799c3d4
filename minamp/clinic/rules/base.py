"""What rules are made of: the table of codes, the decorator that enters a rule, and readings of a trace that several need.

A rule is a pure function Trace -> Finding or None, and its name is its code.
"""

import functools
import math

from minamp.clinic.report import ERROR, WARNING, Finding

# In the order of a report: what stops training or makes it wrong at the root comes first.
CODES = (
    "half_parameters_with_scaler",
    "loss_in_half",
    "softmax_in_half",
    "log_of_softmax",
    "mask_overflows",
    "eps_rounds_to_zero",
    "layer_norm_overflows",
    "mean_of_too_many",
    "backward_in_autocast",
    "autocast_covers_nothing",
    "clip_before_unscale",
    "clip_value_hides_overflow",
    "raw_optimizer_step",
    "update_forgotten",
    "update_repeated",
    "unscale_every_micro_batch",
    "zero_grad_missing",
    "scaler_rebuilt",
    "scaler_not_saved",
    "gradients_flushed",
    "forward_overflow",
    "updates_swamped",
    "adam_in_half",
    "scale_pinned",
    "op_without_policy",
    "batchnorm_nan",
    "widened_by_scalar",
)
RULES = {}  # code -> rule


def rule(function):
    """Enter a rule under its name."""
    assert function.__name__ in CODES, function.__name__
    RULES[function.__name__] = function
    return function


def asked_once(reading):
    """Decorator for what several rules read from the complete trace: it is kept there, as a tuple."""

    @functools.wraps(reading)
    def kept(trace):
        if reading not in trace.readings:
            trace.readings[reading] = tuple(reading(trace))
        return trace.readings[reading]

    return kept


def error(what, where, repair, at=None, **evidence):
    """A Finding without which training is wrong or stops; its code is filled in by the table of rules."""
    return Finding("", ERROR, what, where, repair, evidence, at)


def warning(what, where, repair, at=None, **evidence):
    """A Finding without which training would be better."""
    return Finding("", WARNING, what, where, repair, evidence, at)


def beginning(run):
    """The number of the first op that leads to `run` from the products before it, or of exponentials before those."""
    made = [r for r in run.ancestors(stop=lambda r: r.is_product) if not r.is_product]
    made += [r for r in run.ancestors(limit=20) if r.op == "exp"]
    return min(r.index for r in (run, *made))


# ------------------------------------------------------------------------------------------------------------- the loss

_SAME_NUMBER = {"mul", "div", "to", "neg", "reshape", "clone", "sum", "mean", "index", "expand"}
SMALLEST_SCALE = 16.0  # a factor below is the weight of a loss or one over a number of batches


def tail(root):
    """The one-element values that a loss passes on its way to backward, last first: scaled, converted, divided.

    Of a sum of losses, that term goes on which makes at least half of it.
    """
    value = root
    while value is not None and value.size == 1 and value.dtype is not None:
        yield value
        run = value.source
        if run is None or run.op not in _SAME_NUMBER | {"add"}:
            return
        parts = [v for v in run.tensors if v.recorded]
        if run.op == "add":
            parts = [v for v in parts if 2 * v.largest >= value.largest]
        value = parts[0] if parts else None


def loss_scale(root):
    """(the factor by which a loss was multiplied before backward, whether a GradScaler did it)."""
    factor, value = 1.0, root
    while value is not None and value.source is not None:
        run = value.source
        if value.size > 1 and not run.inside(
            "scaler.scale"
        ):  # several losses in one tensor may have been scaled
            break
        if run.op == "add":  # a sum of scaled losses
            scaled, by_scaler = _largest_scale(v for v in run.tensors if v.recorded)
            return factor * scaled, by_scaler
        if run.op not in _SAME_NUMBER:
            break
        constants = [c for c in run.constants if run.op == "mul" and 0 < abs(c) < math.inf]
        if run.inside("scaler.scale"):
            return factor * (constants[0] if constants else 1.0), True
        for c in constants:
            factor *= abs(c) if abs(c) >= SMALLEST_SCALE else 1.0
        value = next((v for v in run.tensors if v.recorded), None)
    return factor, False


def _largest_scale(losses):
    """The loss_scale of several losses: that of a scaler before others, the largest of these."""
    return max(map(loss_scale, losses), default=(1.0, False), key=lambda part: (part[1], part[0]))


def scale_of(backward):
    """(scale, by a GradScaler) of a backward call: by scaler.scale, or by hand with the number that scaler.get_scale() gives."""
    if "scale" not in backward.facts:
        scale, by_scaler = _largest_scale(backward.facts["roots"])
        backward.facts["scale"] = scale, by_scaler or scale == backward.facts["scaler"] > 1
    return backward.facts["scale"]


def largest_of(gradients):
    """The largest magnitude in some Gradients by name; 0.0 if there are none."""
    return max((g.largest for g in gradients.values()), default=0.0)


def feeds(trace, run, ops):
    """The first later op of those names that uses the output of `run`."""
    return next(
        (r for r in trace.ops if r.op in ops and r.index > run.index and run in {v.source for v in r.inputs}),
        None,
    )


def is_root(run):
    """Whether it takes square roots: x ** 0.5 too."""
    if run.op == "pow":
        return abs(run.attrs.get("exponent", 0)) == 0.5 or 0.5 in map(abs, run.constants)
    return run.op in ("sqrt", "rsqrt")


def is_square(run):
    """Whether it squares a tensor: by a product with itself too, as in einsum('bi,bi->b', x, x)."""
    if run.op == "mul" or run.is_product:
        return len(run.tensors) == 2 and _same(*run.tensors)
    return run.op == "square" or run.op == "pow" and (2.0 in run.constants or run.attrs.get("exponent") == 2)


def _same(a, b, depth=3):
    """Whether two values are one, or written out twice, as in (x - m) * (x - m): by at most `depth` ops."""
    if a is b or a.dtype is b.dtype is None:
        return a is b or a.constant == b.constant
    x, y = a.source, b.source
    if depth == 0 or x is None or y is None or not x.inputs or len(x.inputs) != len(y.inputs):
        return False
    alike = (x.op, x.attrs, x.output.shape) == (y.op, y.attrs, y.output.shape)
    return alike and all(_same(v, w, depth - 1) for v, w in zip(x.inputs, y.inputs, strict=True))


def second_moment(trace, run):
    """Whether the sum is an optimizer's sqrt(v) + eps, or the v + eps of its root: without history, in a parameter's shape."""
    shapes = {p.shape for p in trace.parameters.values()}
    return (
        not run.output.recorded
        and run.output.shape in shapes
        and (
            any(map(is_root, run.ancestors(limit=5)))
            or any(is_root(r) for r in trace.ops if any(v.source is run for v in r.inputs))
        )
    )


def reads_ill_statistics(trace):
    """The first batch norm in eval mode whose running statistics hold inf or nan, from where on all is nan; None without one."""
    norms = (r for r in trace.ops if r.op == "batch_norm")
    ill = (r for r in norms if any(not v.recorded and not math.isfinite(v.largest) for v in r.tensors[1:]))
    return next(ill, None)


def unscale_refused(trace):
    """Whether the step ended with an unscale_ that was refused, since its optimizer had been stepped and no update followed."""
    return trace.fails_with("RuntimeError", "unscale_() is being called after step()")


def first_backward(trace):
    """The last backward or grad of the first call that has one: the calls after it may be in float32, without their ops."""
    made = trace.calls("backward", "grad")
    return [c for c in made if c.step == made[0].step][-1]


def update_line(trace):
    """The line after that backward that last made something of a weight's shape; its own where none did: by NumPy, perhaps."""
    backward, shapes = first_backward(trace), {p.shape for p in trace.parameters.values()}
    later = (r for r in reversed(trace.ops) if r.index > backward.index and r.step == backward.step)
    made = (r.line for r in later if r.output.shape in shapes and not r.inside("backward"))
    return next(made, backward.line)


def counted(n, what="parameter"):
    """'1 parameter', '4 parameters'."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def short(names):
    """The first three of many names."""
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
