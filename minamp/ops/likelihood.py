"""Negative log-likelihoods of counts and of measurements; those of classes stand in cross_entropy.py.

They are made of ops, as PyTorch's are: outside of a region halves are rounded after each.
"""

import math

from minamp import backends
from minamp.devices import same_device
from minamp.op import FP32, composite
from minamp.ops.elementwise import ones_like, where
from minamp.ops.exponential import log
from minamp.ops.loss import check_reduction, reduce_losses
from minamp.ops.shape import unsqueeze
from minamp.record import no_grad


@composite(policy=FP32)
def poisson_nll_loss(input, target, log_input=True, full=False, *, eps=1e-8, reduction="mean"):
    """exp(input) - target * input: of counts `target` whose mean is exp(input), without the term log(target!).

    log_input=False: the mean is input itself, and the loss input - target * log(input + eps). full=True adds Stirling's
    approximation of log(target!) for targets above 1. Shapes broadcast. reduction: 'mean', 'sum', 'none'.
    """
    check_reduction("poisson_nll_loss", reduction)
    losses = input.exp() - target.mul(input) if log_input else input - target.mul(log(input + eps))
    if full:
        many = target > 1
        count = where(many, target, 1.0)  # so that no gradient is one of log(0)
        losses = losses + where(many, count * log(count) - count + 0.5 * log(count * (2 * math.pi)), 0.0)
    return reduce_losses(losses, reduction)


@composite
def gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction="mean"):
    """(log(var) + (input - target)**2 / var) / 2: of measurements `target` with mean input and variance var, at least eps.

    var: a number, or a tensor of input's shape, or of that shape without the last size, or with one size 1 (ValueError
    otherwise, and for negative values). full=True adds log(2 pi) / 2. reduction: 'mean', 'sum', 'none'.
    """
    check_reduction("gaussian_nll_loss", reduction)
    same_device("gaussian_nll_loss", input=input, target=target, var=var)
    if isinstance(var, int | float):
        var = ones_like(input) * float(var)
    seen = backends.checkable(var._data)
    if seen is not None and (seen < 0).any():
        raise ValueError(
            "gaussian_nll_loss: var holds negative values: give variances, such as F.softplus(x)"
        )
    if var.shape == input.shape[:-1] and input.ndim:
        var = unsqueeze(var, -1)
    unequal = [v for v, n in zip(var.shape, input.shape, strict=False) if v != n]
    if var.ndim != input.ndim or unequal not in ([], [1]):
        raise ValueError(
            f"gaussian_nll_loss: var {var.shape} does not fit input {input.shape}: give that shape, "
            f"{input.shape[:-1]}, or one with a 1 in it"
        )
    var = var.clone()
    with no_grad():  # below eps the gradient is that at eps, as in PyTorch, and not 0
        var.clamp_(min=eps)
    losses = 0.5 * (log(var) + (input - target) ** 2 / var)
    return reduce_losses(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)
