"""Losses: in which format they and the softmax under them are computed, and in which form."""

import math

from minamp.clinic.rules.base import beginning, error, loss_scale, rule, tail, warning
from minamp.clinic.rules.overflow import summed_first
from minamp.formats import float16, format_of
from minamp.policy import FP32_SET_OPT_DTYPE

SOFTMAX = {"softmax", "naive_half_softmax"}
_SUMS = {"sum", "naive_half_sum"}
LOSSES = {"log_softmax", "logsumexp", "naive_half_cross_entropy"}
_PICKS = {"gather", "index"}
_PASSES = {
    *{"reshape", "permute", "expand", "to", "clone", "index", "gather", "where", "masked_fill", "cat"},
    *{"add", "sub", "clamp", "maximum", "mul", "div"},
}


@rule
def loss_in_half(trace):
    for backward in trace.calls("backward", "grad"):
        losses = [
            v for root in backward.facts["roots"] if _is_loss(trace, backward, root) for v in _passed_on(root)
        ]
        half = [v for v in losses if v.dtype == float16]
        if not half:
            continue
        below = _under_the_loss(half[-1])
        if any(run in below for run in [*softmax_runs(trace), *summed_first(trace)]):
            continue  # those have findings of their own
        made = half[-1].source
        # arithmetic and means are half inside a region as well
        helps = any(run.region is None and run.policy.startswith("fp32") for run in below)
        where = (
            "or compute the loss inside the autocast region"
            if helps
            else "autocast leaves arithmetic in half"
        )
        return error(
            "The loss is computed in float16: it has three decimal digits, is infinite from 65520 on, and so are its "
            "gradients' first factors.",
            made.line if made else backward.line,
            f"loss = loss_fn(output.float(), target)   # {where}",
            loss=half[-1].largest,
            limit=65504.0,
        )


def _is_loss(trace, backward, root):
    """Whether what backward or grad starts from is a loss: one number, or several in one tensor that a scaler has scaled."""
    scaled, output = loss_scale(root)[1], _is_output(root)
    if backward.name == "grad":
        # a Function's own; of inputs, for a penalty; beside the training, whose losses are scaled, or of an output
        others = backward.within is not None or not any(backward.facts["inputs"])
        if others or not scaled and (trace.scaled or output):
            return False
    return root.size == 1 or scaled and not output


def _passed_on(root):
    """The tail of a loss; several in one tensor have none."""
    return tail(root) if root.size == 1 else [root]


def _is_output(value):
    """Whether it is what a network puts out, or one number of it, as for a Jacobian: no loss."""
    run = value.source
    while run is not None and not run.is_product:
        if run.op not in ("index", "reshape", "to", "gather", "add") and not run.inside("scaler.scale"):
            return False
        run = run.tensors[0].source if run.tensors else None
    return run is not None


def _under_the_loss(value):
    """The ops that the loss is made of, down to the last matmul or convolution."""
    run = value.source
    return set() if run is None else {run, *run.ancestors(stop=lambda r: r.is_product)}


def softmax_runs(trace):
    """The ops that compute a softmax, or the logarithm of one, in float16, on the way to a gradient."""
    on_the_way = [r for r in trace.ops if r.output.recorded or r.inside("Function.apply")]
    half = [r for r in on_the_way if _is_softmax(r) and (r.output.dtype == float16 or _half_exponential(r))]
    return [r for r in half if trace.leads_to_a_loss(r)]


def _is_softmax(run):
    return run.op in SOFTMAX | LOSSES or _by_hand(run) or _weighted(run) or _logarithm_of_sum(run)


def _by_hand(run):
    """e / sum(e), or e * (1 / sum(e)), with e = exp(x)."""
    return run.op in ("div", "mul") and _over_its_sum(run, {"reshape", "to"})


def _weighted(run):
    """(e @ v) / sum(e), with e = exp(x): attention that divides at its end."""
    through = {"reshape", "to", "permute", "transpose", "matmul", "bmm", "mm"}
    return run.op == "div" and _over_its_sum(run, through)


def _half_exponential(run):
    """Whether it divides exponentials that are half, as exp_() leaves them in an autocast region."""
    made = run.tensors[0].source if run.op == "div" else None
    return made is not None and _is_exponential(made) and made.output.dtype == float16


def _picked(run):
    """e[i] / sum(e), with e = exp(x): one probability, as in a contrastive loss."""
    return run.op == "div" and _over_its_sum(run, {"reshape", "to", "index", "gather"})


def _over_its_sum(run, through):
    """Whether an exponential, taken through those ops, is divided by its own sum."""
    if len(run.tensors) < 2:
        return False
    exponential = _source(run.tensors[0], _is_exponential, through)
    total = _source(run.tensors[1], _is_sum, {"reciprocal", "mul", "reshape", "expand", "to", "add", "div"})
    return exponential is not None and total is not None and exponential in {total, *total.ancestors()}


def _logarithm_of_sum(run):
    """log(sum(exp(x))), of which log_softmax and cross entropy by hand are made."""
    total = _source(run.tensors[0], _is_sum, {"reshape", "to"}) if run.op == "log" and run.tensors else None
    return total is not None and _source(total.tensors[0], _is_exponential, {"reshape", "to"}) is not None


def _is_exponential(run):
    """exp(x), exp2(x), or a number to the power x."""
    return run.op in ("exp", "exp2") or run.op == "pow" and run.inputs[0].dtype is None


def _is_sum(run):
    return run.op in _SUMS


def _source(value, wanted, passes):
    """The op for which wanted(op) holds that a value comes from, through ops in `passes`."""
    run = value.source
    while run is not None and not wanted(run):
        if run.op not in passes or not run.tensors:
            return None
        run = run.tensors[0].source
    return run


@rule
def softmax_in_half(trace):
    runs = softmax_runs(trace)
    if not runs:
        return None
    run = next((r for r in runs if r.spoilt or not r.inputs), runs[0])
    score = max((v.largest for v in run.tensors), default=0.0)
    weights = run.op in SOFTMAX or _by_hand(run) or _weighted(run)
    repair = "F.softmax(scores.float(), dim=-1)" if weights else "F.cross_entropy(logits.float(), target)"
    asked = (
        run.region is not None and run.policy == FP32_SET_OPT_DTYPE
    )  # a region leaves the format to a dtype=
    why, instead = "outside autocast's protection", "or call it inside the autocast region"
    if asked:
        why, instead = (
            "since dtype= asks for that, inside a region too",
            "without dtype=, or with dtype=minamp.float32",
        )
    return error(
        f"A softmax or cross entropy is computed in float16, {why}: probabilities below 3e-8 become 0 and, in the textbook "
        "form, e**x overflows from x = 11.1 on.",
        run.line,
        f"{repair}   # {instead}",
        at=beginning(run),
        op_runs=len(runs),
        largest_input=score,
        exp_overflows_above=11.0859375,
    )


@rule
def log_of_softmax(trace):
    for run in trace.ops:
        if run.op not in ("log", "log2", "log10", "log1p") or not run.output.recorded:
            continue
        made, floor, chosen = run.tensors[0].source, 0.0, False
        while made is not None and made.op in _PASSES and not _is_softmax(made) and not _picked(made):
            floor, chosen = max(floor, _floor(made)), chosen or made.op in _PICKS
            value = max(made.tensors, key=lambda v: v.recorded)
            # 1 - p is no probability that log_softmax could give
            made = None if made.op == "sub" and value is not made.inputs[0] else value.source
        if made is not None and (made.op in SOFTMAX or _by_hand(made) or _picked(made)):
            what = "a probability that has become 0 gives -inf, and its gradient nan"
            if floor:
                if not _bites(trace, run, chosen or _picked(made), floor):
                    continue
                what = f"below the {floor:g} that keeps it from 0 the gradient vanishes, where it should be largest"
            scores = next((r for r in (made, *made.ancestors(limit=20)) if r.op in ("exp", *SOFTMAX)), made)
            zero = math.isinf(run.output.largest) and math.isfinite(made.tensors[0].largest)
            # the gradient of e / sum(e) has the square of the sum, which is infinite in float32 from e**44 on
            squared = scores.op == "exp" and scores.tensors[0].largest > 44
            ruined = squared and trace.reference is not None and not trace.reference.sound
            say = error if zero or ruined else warning
            return say(
                f"The logarithm of a softmax: {what}. log_softmax never forms the probability.",
                run.line,
                "F.log_softmax(scores, dim=-1)   # or F.cross_entropy(scores, target)",
                at=beginning(run),
                largest_score=scores.tensors[0].largest,
                largest_logarithm=run.output.largest,
            )


def _floor(run):
    """The positive constant that an op adds, or below which it lets nothing fall; 0.0 if there is none, or 0 in its format."""
    constants = run.constants if run.op in ("add", "maximum", "clamp") else []
    if run.op == "clamp":
        constants = [c for c in constants if c < 1]  # a probability's other limit
    zero = format_of(run.output.dtype).flush if run.output.half else 0.0
    return max((c for c in constants if c > zero), default=0.0)


def _bites(trace, run, chosen, floor):
    """Whether the probability of what was chosen is below the floor under its logarithm; of all others it does no harm."""
    users = [r for r in trace.ops if any(v.source is run for v in r.inputs)]
    # a product with targets, which have no history, chooses by ones and zeros
    picks = [
        r.output
        for r in users
        if r.op in _PICKS or r.op == "mul" and any(not v.recorded and v.largest <= 1 for v in r.tensors)
    ]
    base = {"log2": 2.0, "log10": 10.0}.get(run.op, math.e)
    return any(-v.largest <= math.log(2 * floor, base) for v in [*picks, *([run.output] if chosen else [])])
