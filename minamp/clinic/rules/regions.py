"""Autocast regions: what they cover, what they should not, and functions that don't know them."""

from minamp.autocast import custom_fwd
from minamp.clinic.rules.base import error, rule, scale_of, short, warning
from minamp.formats import float32, float64


@rule
def backward_in_autocast(trace):
    for call in trace.calls("backward", "grad"):
        # a Function that computes its forward again has its region from custom_bwd
        if call.region is not None and not (call.within and call.within.inside("backward")):
            code = "scaler.scale(loss).backward()" if scale_of(call)[1] else "loss.backward()"
            return warning(
                f"{call.name}() runs inside the autocast region. Every op's backward has its forward's format anyway; the region "
                "only changes what should be left alone: hooks, autograd.Functions, second derivatives.",
                call.line,
                f"{code if call.name == 'backward' else 'autograd.grad(...)'}   # one indentation less, after the region",
                region=str(call.region),
            )


@rule
def autocast_covers_nothing(trace):
    regions = [c for c in trace.calls("autocast") if c.facts["enabled"]]
    made = [run for run in trace.ops if run.is_product]
    products = [run for run in made if _is_trained(run)]
    single = [run for run in products if run.output.dtype in (float32, float64)]
    covered = any(run.region is not None for run in made if not _is_trained(run))
    if regions and covered and not trace.scaled:
        return None  # a float32 training whose validation is half on purpose
    if regions and not products and trace.pulled == {float32}:
        return error(
            "The matmuls and convolutions of the training ran in other threads, in float32: a region holds for the thread that "
            "opens it.",
            regions[0].line,
            "with autocast(): ...   # in the function that the other thread runs",
            wide_products="not seen",
            half_products=0,
        )
    if not (regions or trace.scaled) or not single or any(run.output.half for run in products):
        return None
    what = (
        "The autocast region covers no"
        if regions
        else "A GradScaler scales the loss, but no autocast region covers a"
    )
    # one that is switched off, inside one that is on or in its place
    off = [c for c in trace.calls("autocast") if not c.facts["enabled"] and c.index < single[0].index]
    off = [c for c in off if c.region is not None or not regions]
    dtype = single[0].output.dtype
    repair = "with autocast(): loss = loss_fn(model(x), y)   # the model's call belongs inside"
    if off and regions:
        repair = "# without this autocast(enabled=False), or only around what needs float32"
    elif off:
        repair = "autocast(enabled=True, dtype=minamp.float16)   # this region is switched off"
    elif dtype == float64:
        repair += "; float64 is never cast: model.float()"
    return error(
        f"{what} matmul or convolution of the training: all {len(single)} of them ran in {dtype}, so nothing is faster or "
        "smaller.",
        off[-1].line if off else single[0].line,
        repair,
        wide_products=len(single),
        half_products=0,
    )


def _is_trained(run):
    """Whether gradients come through an op: also in an autograd.Function outside every region; inside it may want float32."""
    call = run.within
    while call is not None and call.name != "Function.apply":
        call = call.within
    return run.output.recorded or call is not None and call.region is None


def _knows_autocast(function):
    """Whether custom_fwd or custom_bwd is among a function's decorators."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename == custom_fwd.__code__.co_filename:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


@rule
def op_without_policy(trace):
    for call in trace.calls("Function.apply"):
        kind = call.facts["function"]
        bare = [name for name in ("forward", "backward") if not _knows_autocast(getattr(kind, name))]
        if call.region is None or not bare:
            continue
        inner = [run for run in trace.ops if run.within is call and run.region is not None]
        listed = [run for run in inner if _is_listed(run)]
        # its backward opens the region that it needs; one at the line of backward() itself is a checkpoint's second run
        if any(c.inside("backward") and c.line != c.within.line for c in trace.calls("autocast")):
            continue
        failed = trace.error is not None and trace.error.function is kind
        mixes = failed or any(run.is_product for run in listed)
        if mixes or listed and _is_cast_in_backward(trace, call):
            # products stay in the region; what is cast to float32 one by one is float32 as a whole
            cast = "" if mixes else f", cast_inputs=minamp.{float32}"
            return error(
                f"{kind.__name__} is an autograd.Function without {' and '.join(map(_decorator, bare))}: its forward is cast by "
                "the region it stands in, its backward runs outside every region and meets other formats.",
                trace.error.line if failed else call.line,
                ("forward(ctx, ...) in place of setup_context; " if kind.setup_context else "")
                + f"@custom_fwd(device_type='cuda'{cast}) on forward, @custom_bwd(device_type='cuda') on backward",
                ops_that_were_cast=short([run.op for run in listed]) or "none",
            )


def _is_listed(run):
    return run.policy not in ("not listed", "Function")


def _is_cast_in_backward(trace, call):
    """Whether a backward after a Function's forward, its own or another, runs an op that autocast would cast."""
    return any(run.index > call.index and run.inside("backward") and _is_listed(run) for run in trace.ops)


def _decorator(name):
    return {"forward": "custom_fwd", "backward": "custom_bwd"}[name]
