"""Formats that become wider than anybody meant."""

from minamp.clinic.rules.base import rule, warning
from minamp.formats import float64
from minamp.policy import LOWER_PRECISION, NOT_LISTED, PROMOTE


def _goes_on_wide(trace, run):
    """Whether ops that would have computed in half take the wide result further, to the next matmul or convolution.

    A mask before a softmax, or boxes before a loss, are float32 from there on anyway.
    """
    users = [r for r in trace.ops if r.index > run.index and any(v is run.output for v in r.inputs)]
    users = [r for r in users if r.policy != "Function"]  # whose ops, inside, use it too
    if not users or any(r.policy not in (NOT_LISTED, LOWER_PRECISION) for r in users):
        return False
    products = [r for r in trace.ops if r.is_product and r.index > run.index]
    return any(run in r.ancestors(stop=lambda a: a.policy not in (NOT_LISTED, PROMOTE)) for r in products)


def _is_input(trace, value):
    """Whether a product takes it, cast to half: the network's own input."""
    casts = [r for r in trace.ops if r.op == "to" and r.inputs[0] is value]
    return any(r.is_product and any(v.source in casts for v in r.inputs) for r in trace.ops if casts)


@rule
def widened_by_scalar(trace):
    if any(p.dtype == float64 for p in trace.parameters.values()):
        return None
    for run in trace.ops:
        out = run.output
        graph = [v for v in run.tensors if v.recorded and v.floating and v.dtype != out.dtype]
        added = [v for v in run.tensors if not v.recorded and v.dtype == out.dtype]
        # zeros are the first state of a recurrent cell, which is half from the second on
        added = [v for v in added if v.largest != 0 or v.shape != out.shape]
        # in a backward the gradients themselves have no history
        if run.op == "to" or not graph or not added or run.inside("backward") or _is_input(trace, added[0]):
            continue
        wide = out.dtype == float64 and any(v.shape for v in added)
        if wide or run.policy == NOT_LISTED and graph[0].half and _goes_on_wide(trace, run):
            numpys = "NumPy's numbers are float64, and " if added[0].dtype == float64 else ""
            return warning(
                f"A {added[0].dtype} constant of shape {added[0].shape} widens a {graph[0].dtype} tensor to {out.dtype}, and "
                f"all that follows from it: {numpys}unlike a number a tensor with dimensions counts.",
                run.line,
                f"constant.to(x.dtype)   # before it meets x in {run.op}; or a Python float",
                bytes_per_value_before=graph[0].dtype.itemsize,
                bytes_per_value_after=out.dtype.itemsize,
            )
