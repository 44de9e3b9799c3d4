"""Numbers that leave float16's range in the forward, upwards and downwards, and the usual reasons."""

import math

from minamp.clinic.rules.base import beginning, error, feeds, is_square, rule, second_moment, warning
from minamp.formats import float16, format_of

_MASKS = {"index_put", "where", "add", "sub", "mul", "to", "masked_fill", "maximum", "minimum"}
_SQUARES = {"mul", "pow", "square", "var", "naive_half_sum", "sum", "mean"}
_ROOTS = {"sqrt", "rsqrt", "pow", "std"}
_SUMS = {"sum", "naive_half_sum"}
_SCATTERED = {"index_add", "scatter_add"}
_FACTORS = {"linear", "matmul", "mm", "bmm", "mv", "einsum", "conv1d", "conv2d"}
_LIMITS = {"maximum", "clamp"}
_FILLS = {"where", "masked_fill"}
_NEED_EPS = {"div", "reciprocal", "sqrt", "rsqrt", "log"}


def _spoilt(trace):
    # What overflows in a backward that is recorded (create_graph) is made by the loss scale, and the scaler sees to it.
    apart = ("optimizer.step", "backward", "grad")
    return [run for run in trace.ops if run.spoilt is not None and not any(map(run.inside, apart))]


# ----------------------------------------------------------------------------------------------------------------- masks


def mask_runs(trace):
    """The half ops that made -inf, or inf to be subtracted, where one operand is a large constant."""
    runs = [run for run in _spoilt(trace) if run.op in _MASKS and run.output.half]
    return [run for run in runs if (_masked(run) or _masked_before(run)) and not _is_data(trace, run)]


def _is_data(trace, run):
    """Whether it is multiplied, or divided by: no mask, although a fused attention and baddbmm take masks."""
    users = [r for r in trace.ops if run.output in r.inputs]
    return any(r.op in _FACTORS or r.op == "div" and r.inputs[-1] is run.output for r in users)


def _masked_before(run):
    """Whether a cast made -inf of scores to which a mask had been added in a wider format, as by scores += mask."""
    made = run.tensors[0].source if run.op == "to" and run.tensors else None
    if made is None or made.op not in _MASKS or run.spoilt.kind != "-inf":
        return False
    return any(not v.recorded and 65504 < v.largest < math.inf for v in made.inputs)


def _masked(run):
    # The mask itself, a constant times zeros and ones, may be made positive; what is not a mask varies where it overflows.
    mask = not run.output.recorded and all(r is None or r[0] == r[1] for r in run.spoilt.ranges)
    if run.spoilt.kind == "nan" or run.spoilt.kind == "inf" and not mask:
        return False
    operands = [v for v in run.inputs if v.dtype is None or v.floating or v.dtype.kind == "b"]
    for v, places in zip(operands, run.spoilt.ranges, strict=False):
        if places is None or v.recorded:
            continue
        low, high = places
        if low == high and abs(low * run.attrs.get("alpha", 1)) >= 1e4:
            return True
    return False


def _infinite_constant(run):
    """Whether one of its operands is a half constant with an infinity, made elsewhere."""
    return any(v.half and math.isinf(v.largest) and v.source is None and not v.recorded for v in run.tensors)


@rule
def mask_overflows(trace):
    if trace.fails_with("RuntimeError", "can't be held by float16"):
        return error(
            f"A mask constant does not fit float16: {trace.error.text}",
            trace.error.line,
            "scores.masked_fill(mask, minamp.finfo(scores.dtype).min)   # softmax turns it into 0 in every format",
            at=len(trace.events),
            limit=-65504.0,
        )
    runs = mask_runs(trace)
    if runs:
        run = runs[0]
        ranges = [r for r in run.spoilt.ranges if r]
        constant = max((low for low, high in ranges if low == high), key=abs, default=-math.inf)
        return error(
            f"A mask constant leaves float16's range: {run.op} makes {run.spoilt.kind} of {run.spoilt.count} values, and a row "
            "of nothing but masked ones, or one masked twice, gives nan.",
            run.line,
            f"scores.masked_fill(mask, minamp.finfo(scores.dtype).{_end(trace, run)})   # never add it; or add the mask to "
            "scores.float()",
            at=beginning(run),
            constant=constant,
            limit=-65504.0,
            values=run.spoilt.count,
        )
    for softmax in trace.ops:
        added = _given_mask(softmax) or _times_infinity(softmax)
        if added is not None:
            return error(
                "A mask that holds -inf in float16, where its constant left the range or was -inf from the start, is put on "
                "the scores: a row of nothing else gives nan in softmax, and so does 0 times it.",
                added.line,
                "scores.masked_fill(mask, minamp.finfo(scores.dtype).min)   # never add it; or add the mask to scores.float()",
                at=beginning(added),
                limit=-65504.0,
                rows=softmax.output.size // max(softmax.output.shape[-1], 1),
            )


def _end(trace, run):
    """The end of a format's range that belongs where a mask has made an infinity: the other one, if it is subtracted.

    A finite one: softmax makes nan of a row that is all -inf.
    """
    user = feeds(trace, run, ("sub",))
    subtracted = user is not None and user.inputs[-1].source is run
    return "min" if subtracted or run.spoilt.kind == "-inf" else "max"


def _times_infinity(softmax):
    """The op that multiplied the mask of a softmax by a half infinity: 0 * inf is nan."""
    if softmax.op not in ("softmax", "log_softmax"):
        return None
    multiplied = (r for r in softmax.ancestors(stop=lambda r: r.is_product) if r.op == "mul")
    return next((r for r in multiplied if math.isnan(r.output.largest) and _infinite_constant(r)), None)


def _given_mask(softmax):
    """The op that added a ready-made half mask with an infinity to the scores of a softmax that gives nan for them."""
    if softmax.op not in ("softmax", "log_softmax") or not softmax.output.shape or not softmax.tensors:
        return None
    if not math.isnan(softmax.output.largest) or not math.isinf(softmax.tensors[0].largest):
        return None
    for run in softmax.ancestors(stop=lambda r: r.is_product):
        if run.op in ("add", "sub", "index_put") and _infinite_constant(run):
            return run
    return None


# ------------------------------------------------------------------------------------------------------------------- eps


@rule
def eps_rounds_to_zero(trace):
    for run in trace.ops:
        if not run.output.half or run.inside("optimizer.step"):
            continue
        f = format_of(run.output.dtype)
        if run.op in {"add", "sub"} | _LIMITS | _FILLS:
            tiny = [c for c in (*run.constants, run.attrs.get("value", 0)) if 0 < abs(c) <= f.flush]
        elif run.op == "to" and run.output.constant == 0:
            tiny = [c for c in run.constants if c]
        else:
            eps = run.attrs.get("eps", 0.0) if run.op.startswith("naive") else 0.0
            tiny = [eps] if 0 < eps <= f.flush else []
        if not tiny and _adds_a_zero(trace, run):
            tiny = [0.0]
        protects = tiny and (run.op not in _FILLS or _protects(trace, run))
        if protects and not second_moment(trace, run) and trace.trains(run):
            constant = f"The constant {tiny[0]:g}" if tiny[0] else f"A constant, made {f.name} beforehand,"
            does = "as a lower limit it lets 0 pass" if run.op in _LIMITS else "added to a zero it leaves 0"
            return error(
                f"{constant} is 0 in {f.name}: {does}, and what it should protect, a division, a root or a logarithm, is not "
                "protected.",
                run.line,
                f"x.float() + {tiny[0] or 1e-8:g}   # or an eps that {f.name} can hold, such as 1e-3",
                at=beginning(run),
                eps=tiny[0],
                smallest_number=f.smallest_subnormal,
            )


def _protects(trace, run):
    """Whether a division by what comes of it, a root or a logarithm follows soon."""
    for user in (r for r in trace.ops if r.op in _NEED_EPS and r.index > run.index and r.tensors):
        made = (user.inputs[-1] if user.op == "div" else user.tensors[0]).source
        if made is run or made is not None and run in made.ancestors(stop=lambda r: r.is_product, limit=12):
            return True
    return False


def _adds_a_zero(trace, run):
    """Whether a half constant that is 0 is added to what is then divided by, or put under a root or logarithm."""
    flush = format_of(run.output.dtype).flush
    if run.op not in ("add", "maximum", "where") or any(abs(c) > flush for c in run.constants):
        return False
    zeros = [v for v in run.tensors if v.half and v.largest == 0 and not v.recorded]
    # full_like makes one by a cast; what an op has made of data, such as a count, may happen to be 0
    if not any(v.source is None or v.source.op == "to" and v.source.inputs[0].largest for v in zeros):
        return False
    user = feeds(trace, run, _NEED_EPS)
    return user is not None and (user.op != "div" or user.inputs[-1].source is run)


# ------------------------------------------------------------------------------------------------------------ statistics


def statistic_runs(trace):
    """The half ops whose squares or sums of squares overflow on the way to a standard deviation."""
    return [
        run
        for run in _spoilt(trace)
        if (run.op in _SQUARES | {"std", "to"} or run.is_product)
        and run.output.half
        and (run.op in ("var", "std") or _squared(run) and _rooted(trace, run))
    ]


def _squared(run):
    """Whether it squares a tensor, or adds up squares."""
    if run.op in ("mul", "pow", "square") or run.is_product:
        return is_square(run)
    return any(_squared(v.source) for v in run.tensors if v.source is not None)


def _rooted(trace, run):
    """Whether a root is taken of what comes from `run`, soon and before it is squared again, on the way to a gradient."""
    later = [r for r in trace.ops if 0 < r.index - run.index <= 40]
    users = [r for r in later if run in r.ancestors(lambda a: a is not run and is_square(a), limit=12)]
    recorded = run.inside("Function.apply") or any(r.output.recorded for r in [run, *users])
    rooted = any(r.op in _ROOTS and not is_square(r) for r in users)
    return recorded and rooted and trace.leads_to_a_loss(run)


@rule
def layer_norm_overflows(trace):
    naive = [run for run in trace.ops if run.op == "naive_half_layer_norm" and run.output.dtype == float16]
    runs = [*statistic_runs(trace), *naive]
    if not runs:
        return None
    run = runs[0]
    wide = "with autocast(enabled=False): x = x.float()   # a product is cast back to half; or F.rms_norm or F.layer_norm"
    return error(
        "The statistics of a normalisation are computed in float16: squares overflow from 256 on and their sum much earlier; "
        "the variance is inf, and the row becomes zeros without any nan.",
        run.line,
        wide
        if run.is_product
        else "x = x.float()   # before the mean; or F.layer_norm(x, x.shape[-1:]), which does so by itself",
        at=beginning(run),
        op=run.op,
        largest_input=max((v.largest for v in run.tensors), default=0.0),
        limit=65504.0,
    )


# ----------------------------------------------------------------------------------------------------------------- means


def summed_first(trace):
    """The sums in float16 that are divided by a number afterwards and overflow, or have more terms than float16 counts."""
    found = []
    for run in trace.ops:
        if run.inside("backward") or run.inside("grad"):
            continue
        if run.op in _SUMS and run.output.dtype == float16 and run.tensors:
            # With fewer terms, or such small ones, no sum of values like these overflows.
            many = _terms(run) > 65504 and _terms(run) * run.tensors[0].largest > 65504
            if (run.spoilt is not None or many) and _is_divided(trace, run):
                found.append(run)
        elif run.op in ("add", "to") and run.output.dtype == float16 and run.spoilt:
            sums = _terms(run) > 1 and _is_divided(trace, run)  # it adds sums, or makes one of float32 half
            if sums or _count(run) > 65504 and feeds(trace, run, ("div",)):
                found.append(run)
        elif run.is_product and run.output.dtype == float16 and run.spoilt:
            if _averages(trace, run):
                found.append(run)
        elif run.op in _SCATTERED and run.output.dtype == float16 and run.spoilt:
            if feeds(trace, run, ("div",)):  # by how many each place was given
                found.append(run)
    return [run for run in found if trace.trains(run) and not (_squared(run) and _rooted(trace, run))]


def _is_divided(trace, run):
    """Whether a sum is divided afterwards, multiplied or cast; as it is, or added to others first."""
    while run is not None and feeds(trace, run, ("div", "mul", "to")) is None:
        run = feeds(trace, run, ("add",))
    return run is not None


def _count(run):
    """The number that a cast makes half, such as that of the values in a mean; 0 for any other op."""
    return run.constants[0] if run.op == "to" and run.constants else 0


def _averages(trace, run):
    """Whether a product with ones, or an einsum of one tensor, adds up as many values as it is divided by afterwards."""
    terms = _summed(run)
    sums = len(run.tensors) == 1 or any(v.largest == 1 and not v.recorded for v in run.tensors)
    while sums and run is not None:
        divided = feeds(trace, run, ("div",))
        if divided is not None:
            return divided.constants == [terms]
        run = feeds(trace, run, ("reshape",))
    return False


def _summed(run):
    """How many values make one of a product with ones, of an einsum of one tensor, or at most of what is added by an index."""
    first, last = run.tensors[0], run.tensors[-1]
    if run.op in _SCATTERED:
        return last.shape[0]
    return first.size // max(run.output.size, 1) if first is last else first.shape[-1]


def _terms(run):
    """How many values make one of a sum. Those of a sum of sums, x.sum(0).sum(0), are multiplied, of x.sum() + y.sum() added."""
    if run is not None and run.op == "add":
        terms = [_terms(v.source) for v in run.tensors]
        return sum(terms) if max(terms) > 1 else 1
    if run is not None and run.op == "to":
        return _terms(run.tensors[0].source)
    if run is None or run.op not in _SUMS:
        return 1
    return run.tensors[0].size // max(run.output.size, 1) * _terms(run.tensors[0].source)


@rule
def mean_of_too_many(trace):
    runs = summed_first(trace)
    if runs:
        run = next((r for r in runs if r.spoilt), runs[0])
        count = int(_count(run))
        terms = count or (_summed(run) if run.is_product or run.op in _SCATTERED else _terms(run))
        say, what = error, f"{'it' if count else 'the sum'} is infinite from 65520 on"
        if run.spoilt is None and math.isfinite(run.output.largest):
            say = warning
            what = f"it is {run.output.largest:.3g} here, and infinite where their average reaches {65520 / terms:.2g}"
        first = "divides by that number in float16" if count else "sums them up in float16 first"
        return say(
            f"A mean by hand over {'up to ' if run.op in _SCATTERED else ''}{terms} values {first}: {what}.",
            run.line,
            "x.mean()   # adds up in float32; or x.float().sum() / n, with n a Python number",
            at=beginning(run),
            terms=terms,
            **({"largest_term": run.tensors[0].largest} if run.op in _SUMS else {}),
            limit=65504.0,
        )


# ------------------------------------------------------------------------------------------------------- everything else


@rule
def forward_overflow(trace):
    known = {*mask_runs(trace), *statistic_runs(trace), *summed_first(trace)}
    for run in _spoilt(trace):
        if run in known or run.spoilt.kind == "nan" and run.op == "log":
            continue
        trained = run.output.half and (run.output.recorded or _used(trace, run))
        if trained and trace.leads_to_a_loss(run) or _reaches_a_loss(trace, run):
            how = "leaves the format's range" if run.spoilt.kind != "nan" else "is undefined there"
            name = "A cast" if run.op == "to" else run.op
            return error(
                f"{name} makes {run.spoilt.count} of {run.output.size} values {run.spoilt.kind} of finite input, in "
                f"{run.output.dtype}: the forward itself {how}, and no loss scale cures that.",
                run.line,
                _repair(run),
                at=run.index,
                largest_input=max((v.largest for v in run.inputs), default=0.0),
                values=run.spoilt.count,
                limit=format_of(run.output.dtype).max,
            )


def _repair(run):
    """The line that repairs an overflow, or an op where it is not defined."""
    if run.spoilt.kind == "nan" and run.op == "div":
        return "x / n.clamp(min=...)   # 0 / 0 is nan: where the count or the size may be 0, keep the divisor above it"
    if run.output.half:
        return "with autocast(enabled=False): ...x.float()...   # this op in float32; or scale its input down"
    if run.op == "exp":
        return "(x - x.amax(-1, keepdim=True)).exp()   # or log_softmax or logsumexp, which do so"
    return f"# scale its input down, or leave out what is infinite: {run.output.dtype} is the widest there is to gain"


def _used(trace, run):
    return any(run.output in r.inputs and r.output.recorded for r in trace.ops)


def _reaches_a_loss(trace, run):
    roots = [root for b in trace.calls("backward") for root in b.facts["roots"]]
    return any(
        not math.isfinite(root.largest)
        and root.source is not None
        and run in [root.source, *root.source.ancestors(limit=5000)]
        for root in roots
    )
