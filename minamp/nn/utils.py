"""Gradient clipping, and parameters as one vector."""

import math

import numpy as np

from minamp import backends
from minamp.announce import announced
from minamp.arguments import no_tensor
from minamp.formats import float32
from minamp.methods import OPS
from minamp.quiet import quiet
from minamp.tensor import Tensor
from minamp.warn import warn


def _gradients(name, parameters):
    """The gradients step() will use: a master's float32 one where it is set, else the parameter's."""
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    else:
        was_generator = not hasattr(parameters, "__len__")
        parameters = list(parameters)
        if was_generator and not parameters:
            warn(f"{name}: got an empty generator, nothing was clipped")
    gradients = []
    for i, p in enumerate(parameters):
        if not isinstance(p, Tensor):
            raise no_tensor(name, f"parameters[{i}]", p)
        master = getattr(p, "master", None)
        g = p.grad if master is None or master.grad is None else master.grad
        if g is not None:
            gradients.append(g)
    return gradients


@announced("clip_grad_norm_")
@quiet
def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """Scale all gradients in place so that their joint norm is at most max_norm; returns the norm before.

    The factor is min(max_norm / (norm + 1e-6), 1), so an infinite norm sets the finite gradients to 0, and a
    nan all to nan. Norms are float32 whatever the gradients' format. parameters: Tensors or one Tensor;
    norm_type: any power, or inf; gradients without values count for nothing. RuntimeError with
    error_if_nonfinite=True for a norm that is inf or nan; the gradients are then untouched. foreach: torch's choice between
    implementations, without effect.
    """
    gradients = [g for g in _gradients("clip_grad_norm_", parameters) if g.numel()]
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not gradients:
        return Tensor(np.float32(0.0))
    m = backends.of(gradients[0]._data)
    norms = [m.vector_norm(g._data, norm_type, tuple(range(g.ndim))) for g in gradients]
    norms = m.cat([m.reshape(m.asarray(norm), (1,)) for norm in norms], 0)
    total = m.asarray(m.vector_norm(norms, norm_type, (0,)))
    if error_if_nonfinite and not math.isfinite(Tensor(total).item()):
        raise RuntimeError(
            f"clip_grad_norm_: the gradients' norm of order {norm_type} is {total}, so they can't be "
            "clipped: look for inf or nan in "
            "them, or pass error_if_nonfinite=False to go on"
        )
    factor = m.minimum(1.0 / (total + 1e-6) * max_norm, 1.0)  # two roundings, as in torch
    for g in gradients:
        _scale(g, factor.astype(g.dtype if g.dtype.itemsize > 4 else float32))
    return Tensor(total)


def _scale(g, factor):
    g._data[...] = backends.cast(backends.widen(g._data) * factor, g.dtype)
    g._version[0] += 1


@announced("clip_grad_value_")
@quiet
def clip_grad_value_(parameters, clip_value, foreach=None):
    """Clamp every gradient value to [-clip_value, clip_value] in place; nan stays nan. foreach: as in clip_grad_norm_."""
    clip_value = float(clip_value)
    for g in _gradients("clip_grad_value_", parameters):
        m = backends.of(g._data)
        g._data[...] = m.cast(m.clamp(m.widen(g._data), -clip_value, clip_value), g.dtype)
        g._version[0] += 1


def parameters_to_vector(parameters):
    """All parameters one after the other in one 1-D tensor; gradients flow back through it."""
    return OPS["cat"]([p.reshape(-1) for p in parameters])


def vector_to_parameters(vec, parameters):
    """Write consecutive pieces of a 1-D tensor into the parameters, in place. RuntimeError for one that is too short."""
    if not isinstance(vec, Tensor):
        raise no_tensor("vector_to_parameters", "vec", vec)
    parameters = list(parameters)
    needed = sum(p.numel() for p in parameters)
    if vec.ndim != 1 or vec.numel() < needed:
        raise RuntimeError(
            f"vector_to_parameters: vec has shape {vec.shape}, the parameters hold {needed} values: give a vector of "
            "as many"
        )
    at = 0
    for p in parameters:
        p._data[...] = backends.cast(vec._data[at : at + p.numel()], p.dtype).reshape(p.shape)
        p._version[0] += 1
        at += p.numel()
