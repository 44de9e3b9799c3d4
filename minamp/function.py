"""autograd.Function: an op written by the user, forward and backward in Tensors."""

import inspect

from minamp import backends
from minamp.announce import announced
from minamp.create import zeros
from minamp.formats import is_floating, is_half
from minamp.op import Op
from minamp.ops.shape import expands, sum_to
from minamp.record import FREED, Forgotten, Node, grad_mode, no_grad, observers, set_grad_enabled
from minamp.tensor import Tensor


class Context:
    """What forward keeps for backward. Attributes may be set freely; tensors go through save_for_backward."""

    def __init__(self, needs_input_grad):
        self.needs_input_grad = needs_input_grad
        self._saved, self._undifferentiable, self._dirty, self._materialize = (), (), (), True

    def save_for_backward(self, *tensors):
        """Keep input or output tensors (or None); read them back from saved_tensors. TypeError for anything else."""
        for i, t in enumerate(tensors):
            if not isinstance(t, Tensor | None):
                raise TypeError(
                    f"save_for_backward: argument {i} is a {type(t).__name__}, not a Tensor: keep it as an attribute of ctx"
                )
        self._saved = tuple((t, None if t is None else t._version[0]) for t in tensors)

    @property
    def saved_tensors(self):
        """The tensors given to save_for_backward. RuntimeError if they were freed, or written in place since."""
        while isinstance(self._saved, Forgotten):
            self._saved = self._saved.again()
        if self._saved is FREED:
            raise RuntimeError(
                "saved_tensors: freed by the first backward. Pass retain_graph=True to it, or run the forward again"
            )
        for t, version in self._saved:
            if t is not None and t._version[0] != version:
                raise RuntimeError(
                    f"saved_tensors: a tensor of shape {t.shape} was written in place after it was saved: save a clone()"
                )
        return tuple(t for t, _ in self._saved)

    def mark_non_differentiable(self, *tensors):
        """These outputs get no history."""
        self._undifferentiable = tensors

    def mark_dirty(self, *tensors):
        """These inputs were written in place and are among the outputs: their history becomes that of the outputs."""
        self._dirty = tensors

    def set_materialize_grads(self, value):
        """False: an output without gradient gives backward None instead of zeros."""
        self._materialize = bool(value)


class Function:
    """Subclass with static methods forward(ctx, *args) and backward(ctx, *grads), call with .apply(*args), as torch's.

    forward returns a Tensor, or a tuple of Tensors; what else stands in the tuple is handed on as it is. backward returns one
    gradient (or None) per argument of forward. It runs outside the record unless create_graph=True. Where a subclass has
    setup_context(ctx, inputs, output), forward(*args) gets no ctx, and what backward needs is kept there.
    """

    is_cast = False

    @staticmethod
    def forward(ctx, *args, **kwargs):
        raise NotImplementedError("a Function needs a static method forward(ctx, *args)")

    setup_context = None

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("a Function needs a static method backward(ctx, *grads)")

    @classmethod
    @announced("Function.apply")
    def apply(cls, *args, **kwargs):
        """Run forward and record it."""
        tensors = [a if isinstance(a, Tensor) else None for a in args]
        record = grad_mode.enabled and any(t is not None and t.requires_grad for t in tensors)
        ctx = Context(tuple(t is not None and t.requires_grad for t in tensors))
        with no_grad():
            if cls.setup_context is None:
                result = cls.forward(ctx, *args, **kwargs)
            else:
                result = cls.forward(*args, **kwargs)
                cls.setup_context(ctx, args, result)
        several = isinstance(result, tuple)
        outputs = list(result) if several else [result]
        if not any(isinstance(y, Tensor) for y in outputs):
            raise TypeError(
                f"{cls.__name__}.forward returned no Tensor but {type(result).__name__}: "
                "return a Tensor, or a tuple of Tensors"
            )
        _check_dirty(cls.__name__, ctx._dirty, outputs)
        plain = [any(y is u for u in ctx._undifferentiable) for y in outputs]
        given = [a for a in (*args, *kwargs.values()) if not any(a is d for d in ctx._dirty)]
        outputs = [y.detach() if isinstance(y, Tensor) and any(y is a for a in given) else y for y in outputs]
        if record:
            edges = tuple(t._node if t is not None else None for t in tensors)
            metas = tuple((t.shape, t.dtype) if t is not None else None for t in tensors)
            made = [(y.shape, y.dtype, y.device) if isinstance(y, Tensor) else None for y in outputs]
            op = Applied(cls, ctx, made)
            whole = Node(op, {}, edges, metas, (), None)
            for i, y in enumerate(outputs):
                if made[i] and is_floating(y.dtype) and not plain[i]:
                    y._node = Node(_Output(cls.__name__, i), {}, (whole,), (), (), y.dtype)
            for observe in observers:
                for y in outputs:
                    if isinstance(y, Tensor):
                        observe("forward", op, args, y)
        return tuple(outputs) if several else outputs[0]


def _check_dirty(name, dirty, outputs):
    """RuntimeError for tensors marked dirty whose history can't become that of an output."""
    for x in dirty:
        if not any(x is y for y in outputs):
            raise RuntimeError(
                f"{name}.forward: an input marked dirty is not returned: return it as an output"
            )
        if grad_mode.enabled and (x._origin is not None or x.is_leaf and x.requires_grad):
            raise RuntimeError(
                f"{name}.forward: wrote in place to {'a view' if x._origin else 'a leaf that requires grad'}: give it x.clone()"
            )


class _Output:
    """The op of one output of a Function: passes its gradient on under its number."""

    is_cast = False

    def __init__(self, name, i):
        self.name, self.i = name, i

    def pull(self, node, g, create_graph, only=None):
        yield node.edges[0], _Gradients({self.i: g}), False

    def free(self, node):
        pass


class _Gradients(dict):
    """Gradients of the outputs of one Function call by number; + joins those of different outputs."""

    def __add__(self, other):
        return _Gradients({**self, **other})


class Applied:
    """The op of one Function call; observers see it as one op, beside those that its forward runs."""

    is_cast = False
    policy = "Function"  # none of autocast's: the ops inside have theirs
    described = Op.described

    def __init__(self, cls, ctx, outputs):
        self.cls, self.ctx, self.name = cls, ctx, cls.__name__
        self.outputs = outputs  # of each (shape, dtype, device), None for what is no Tensor

    def _names(self, args):
        """The names of the arguments of forward, after ctx."""
        parameters = inspect.signature(self.cls.forward).parameters.values()
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
        rest = "".join(p.name for p in parameters if p.kind is p.VAR_POSITIONAL)
        return [*named, *(f"{rest}[{i}]" for i in range(len(args) - len(named)))][: len(args)]

    def pull(self, node, gradients, create_graph, only=None):
        grads = []
        for i, made in enumerate(self.outputs):
            g = gradients.get(i)
            if g is None:
                if made is not None and self.ctx._materialize:
                    shape, dtype, device = made
                    g = zeros(shape, dtype=dtype, device=device)
            elif not create_graph:
                dtype = made[1]
                g = Tensor(backends.of(g).narrow(g, dtype) if is_half(dtype) else g)
            grads.append(g)
        with set_grad_enabled(create_graph):
            answers = self.cls.backward(self.ctx, *grads)
        answers = answers if isinstance(answers, tuple) else (answers,)
        n = len(node.edges)
        if len(answers) < n or any(gx is not None for gx in answers[n:]):
            raise RuntimeError(
                f"{self.name}.backward returned {len(answers)} gradients for {n} arguments of forward: "
                "return one per argument, None where there is none"
            )
        for gx in answers:
            if not isinstance(gx, Tensor | None):
                raise TypeError(
                    f"{self.name}.backward returned a {type(gx).__name__} as a gradient: return a Tensor or None for every "
                    "argument of forward, several as a tuple"
                )
        for i, (edge, meta, gx) in enumerate(zip(node.edges, node.metas, answers, strict=False)):
            if meta is None and gx is not None:
                raise RuntimeError(
                    f"{self.name}.backward returned a gradient for argument {i} of forward, which was no Tensor: return None"
                )
            if edge is None or gx is None or only is not None and edge not in only:
                continue
            shape, dtype = meta
            if gx.shape != shape:
                gx = sum_to(gx, shape) if expands(shape, gx.shape) else _refuse(self.name, gx.shape, shape)
            gx = gx.to(dtype) if create_graph else _on_grid(gx, dtype)
            for observe in observers:
                observe("backward", self, (tuple(grads), node, i), gx)
            yield edge, gx, False

    def free(self, node):
        self.ctx._saved = FREED


def _on_grid(g, dtype):
    """A Tensor as the float array that gradients travel as."""
    array = g.detach()._data
    m = backends.of(array)
    return m.grid(array, dtype) if is_half(dtype) else m.widen(array).astype(dtype, copy=False)


def _refuse(name, got, wanted):
    raise RuntimeError(
        f"{name}.backward returned a gradient of shape {got} for an argument of shape {wanted}"
    )
