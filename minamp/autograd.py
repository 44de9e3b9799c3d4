"""Gradients by other doors than .backward(): grad(), and check_grads for testing an op against central differences."""

import numpy as np

from minamp.announce import announced
from minamp.anomaly import detect_anomaly, is_anomaly_enabled, set_detect_anomaly  # noqa: F401
from minamp.arguments import no_tensor
from minamp.backends import host
from minamp.formats import float64, widen
from minamp.function import Function  # noqa: F401
from minamp.record import (
    enable_grad,  # noqa: F401  torch.autograd has these too
    naive_half_accumulation,  # noqa: F401
    no_grad,  # noqa: F401
    run_backward,
    set_grad_enabled,  # noqa: F401
)
from minamp.tensor import Tensor, add_gradients


@announced("backward")
def backward(tensors, grad_tensors=None, retain_graph=None, create_graph=False, inputs=None):
    """Tensor.backward from a Tensor or several at once, as torch.autograd.backward.

    grad_tensors: a gradient for each, None for a scalar's. RuntimeError as there, and for another number of gradients.
    """
    tensors = _listed("backward", "tensors", tensors)
    add_gradients(
        tensors, _seeds("backward", tensors, "grad_tensors", grad_tensors), retain_graph, create_graph, inputs
    )


@announced("grad")
def grad(
    outputs,
    inputs,
    grad_outputs=None,
    retain_graph=None,
    create_graph=False,
    only_inputs=True,
    allow_unused=False,
):
    """d(outputs)/d(inputs) as a tuple of Tensors; no .grad is touched, as torch.autograd.grad.

    outputs, inputs: a Tensor or a sequence. grad_outputs: needed for outputs that are not scalars.
    RuntimeError if an input was not used, unless allow_unused=True (then None).
    only_inputs is taken and without effect, as in PyTorch.
    """
    outputs, inputs = _listed("grad", "outputs", outputs), _listed("grad", "inputs", inputs)
    seeds = _seeds("grad", outputs, "grad_outputs", grad_outputs)
    for i, x in enumerate(inputs):
        if not x.requires_grad:
            raise RuntimeError(
                f"grad: inputs[{i}] of shape {x.shape} requires no grad: call requires_grad_() before it is used"
            )
    roots = [y._history() for y in outputs]
    gradients = [y._seed(s, create_graph) for y, s in zip(outputs, seeds, strict=True)]
    retain = create_graph if retain_graph is None else retain_graph
    answers = run_backward(roots, gradients, retain, create_graph, wanted=[x._history() for x in inputs])
    for x, g in zip(inputs, answers, strict=True):
        if g is None and not allow_unused:
            raise RuntimeError(
                f"grad: an input of shape {x.shape} was not used in the outputs: pass allow_unused=True to get None"
            )
    return tuple(g if g is None else x._as_gradient(g) for x, g in zip(inputs, answers, strict=True))


def _listed(name, argument, given):
    """A Tensor, or a sequence of them, as a list."""
    given = [given] if isinstance(given, Tensor) else list(given)
    for i, x in enumerate(given):
        if not isinstance(x, Tensor):
            raise no_tensor(name, f"{argument}[{i}]", x)
    return given


def _seeds(name, outputs, argument, given):
    """A gradient or None for each of `outputs`."""
    given = [None] * len(outputs) if given is None else [given] if isinstance(given, Tensor) else list(given)
    if len(given) != len(outputs):
        raise RuntimeError(
            f"{name}: {len(outputs)} outputs and {len(given)} {argument}: give one for each output"
        )
    return given


def check_grads(function, *arrays, order=2, eps=1e-6, tolerance=1e-6, seed=0):
    """Compare the gradients of `function` with central differences in float64, along random directions.

    function: Tensors -> Tensor, differentiable in every argument. arrays: NumPy arrays, used as float64. order=2 also checks
    the gradient of the gradient. AssertionError names the argument and both values if they differ by more than
    `tolerance` relative to the larger of 1 and the values.
    """
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(a, float64) for a in arrays]

    def scalar(*xs):  # one number: the output against fixed random weights
        y = function(*xs)
        weights = np.random.default_rng(seed + 1).standard_normal(y.shape)
        return (y * Tensor(weights)).sum()

    def value(at):
        return scalar(*(Tensor(a) for a in at)).item()

    for i in range(len(arrays)):
        tensors = [Tensor(a, requires_grad=True) for a in arrays]
        (g,) = grad(scalar(*tensors), tensors[i], create_graph=order > 1)
        assert g.shape == arrays[i].shape, (
            f"argument {i}: gradient has shape {g.shape}, argument {arrays[i].shape}"
        )
        direction = rng.standard_normal(arrays[i].shape)
        moved = [[*arrays[:i], arrays[i] + s * eps * direction, *arrays[i + 1 :]] for s in (1, -1)]
        numeric = (value(moved[0]) - value(moved[1])) / (2 * eps)
        analytic = float((widen(host(g._data)) * direction).sum())
        error = abs(numeric - analytic) / max(1.0, abs(numeric), abs(analytic))
        assert error <= tolerance, (
            f"argument {i}: gradient along a direction is {analytic}, differences give {numeric}"
        )
    if order > 1:

        def first(*xs):  # the sum of squares of all gradients exercises every second derivative
            gs = grad(scalar(*xs), xs, create_graph=True, allow_unused=True)
            total = sum((g * g).sum() for g in gs if g is not None)
            return total + sum((x * 0.0).sum() for x in xs)

        def wrapped(*xs):
            return first(*(x if x.requires_grad else x.detach().requires_grad_() for x in xs))

        check_grads(wrapped, *arrays, order=1, eps=eps * 10, tolerance=tolerance * 10, seed=seed)
