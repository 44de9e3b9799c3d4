"""Backward hooks of a Module: its call stands between two Functions that pass everything on and see the gradients come by."""

from minamp.function import Function
from minamp.record import is_grad_enabled
from minamp.tensor import Tensor
from minamp.warn import warn


class _Pass(Function):
    """Tensors as they are; their gradients are what `seen` makes of those that arrive."""

    @staticmethod
    def forward(ctx, seen, *tensors):
        ctx.seen = seen
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        return None, *ctx.seen(gradients)


class Passage:
    """One call of a module with backward hooks: enter() its arguments, leave() with its output."""

    def __init__(self, module):
        self.module, self.grad_output, self.inputs = module, None, 0
        self.waits = False  # whether gradients of inputs will come

    def enter(self, args):
        tensors = [x for x in args if isinstance(x, Tensor)]
        self.inputs = len(tensors)
        self.waits = is_grad_enabled() and any(x.requires_grad for x in tensors)
        return _passed(args, self._at_the_inputs) if self.waits else args

    def leave(self, out):
        outputs = out if isinstance(out, tuple) else (out,)
        if not any(isinstance(y, Tensor) for y in outputs):
            warn(
                f"{type(self.module).__name__}: its backward hooks see nothing, since its output is a {type(out).__name__}: "
                "return a Tensor or a tuple of Tensors"
            )
            return out
        outputs = _passed(outputs, self._at_the_outputs)
        return outputs if isinstance(out, tuple) else outputs[0]

    def _at_the_outputs(self, gradients):
        for hook in list(self.module._backward_pre_hooks.values()):
            gradients = self._replaced("grad_output", gradients, hook(self.module, gradients))
        self.grad_output = gradients
        if not self.waits:
            self._at_the_inputs((None,) * self.inputs)
        return gradients

    def _at_the_inputs(self, gradients):
        if self.grad_output is None:  # those of the outputs were not seen
            return gradients
        for hook in list(self.module._backward_hooks.values()):
            gradients = self._replaced(
                "grad_input", gradients, hook(self.module, gradients, self.grad_output)
            )
        return gradients

    def _replaced(self, name, gradients, answer):
        """`gradients`, or what a hook has answered in their place."""
        if answer is None:
            return gradients
        answer = answer if isinstance(answer, tuple) else (answer,)
        if len(answer) != len(gradients):
            raise RuntimeError(
                f"{type(self.module).__name__}: a backward hook returned {len(answer)} gradients as {name} where there are "
                f"{len(gradients)}: return as many, or None"
            )
        return answer


def _passed(values, seen):
    """`values` with its Tensors passed through one _Pass."""
    tensors = iter(_Pass.apply(seen, *(x for x in values if isinstance(x, Tensor))))
    return tuple(next(tensors) if isinstance(x, Tensor) else x for x in values)
