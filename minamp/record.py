"""The record: how tensors were made, and the walk back over it. Also where recording is switched on and off.

An op that runs while gradients are recorded gives its output a `Node`: which op, its attributes, an edge to the node of every
input that needs a gradient, and the few arrays its gradient needs. `run_backward` walks these nodes from the last made to the
first. Nothing here knows what a Tensor is.
"""

import contextlib
import functools
import heapq
import itertools
import threading
import weakref

from minamp import backends
from minamp.formats import is_half
from minamp.quiet import quiet

observers = []  # functions f(phase, op, inputs, output) that see every op, forward and backward; see observe
reducers = []  # objects that share out gradients among processes while backward runs; see distributed/parallel.py
_counter = itertools.count()


class _GradMode(threading.local):
    enabled = True
    inference = False
    naive_half_sums = False

    def __init__(self):
        self.outer = []  # what every block that is open in this thread found, innermost last


grad_mode = _GradMode()


def is_grad_enabled():
    """True where ops are recorded for backward (thread-local)."""
    return grad_mode.enabled


class set_grad_enabled:
    """Switch recording on or off in this thread: at once as a call, for a block, or as a decorator, as torch's."""

    def __init__(self, mode):
        self.mode, self.before = bool(mode), grad_mode.enabled
        grad_mode.enabled = self.mode

    def __enter__(self):
        grad_mode.outer.append(self.before)
        grad_mode.enabled = self.mode
        return self

    def __exit__(self, *_):
        grad_mode.enabled = grad_mode.outer.pop()

    def __call__(self, function):
        grad_mode.enabled = self.before  # as a decorator it holds only while the function runs

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            with set_grad_enabled(self.mode):
                return function(*args, **kwargs)

        return wrapped


class _Mode(contextlib.ContextDecorator):
    """A block or decorator that sets attributes of grad_mode; one object may be entered again, and by several threads."""

    changes = {}

    def __new__(cls, function=None):  # @no_grad without parentheses
        return super().__new__(cls) if function is None else cls()(function)

    def __enter__(self):
        grad_mode.outer.append({name: getattr(grad_mode, name) for name in self.changes})
        for name, value in self.changes.items():
            setattr(grad_mode, name, value)
        return self

    def __exit__(self, *_):
        for name, value in grad_mode.outer.pop().items():
            setattr(grad_mode, name, value)


class no_grad(_Mode):
    """Nothing inside is recorded. Context manager or decorator, as torch.no_grad."""

    changes = {"enabled": False}


class enable_grad(_Mode):
    """Recording on again inside a no_grad block, as torch.enable_grad."""

    changes = {"enabled": True}


class inference_mode(_Mode):
    """no_grad, and autocast keeps no weight casts inside, as torch.inference_mode; with mode=False neither holds inside."""

    def __new__(cls, mode=True):
        return super().__new__(cls, None if isinstance(mode, bool) else mode)

    def __init__(self, mode=True):
        self.changes = {"enabled": not mode, "inference": mode}


class naive_half_accumulation(_Mode):
    """Teaching material: a backward inside adds the gradients of a half tensor up in half, as PyTorch does (2048 + 1 = 2048).

    Everywhere else they are summed in float32 and rounded once.
    """

    changes = {"naive_half_sums": True}


class Node:
    """How a tensor was made. A leaf that wants a gradient has a Node too, with op None and `leaf` set."""

    __slots__ = ("op", "attrs", "edges", "metas", "saved", "dtype", "order", "_leaf", "hooks", "__weakref__")

    def __init__(self, op, attrs, edges, metas, saved, dtype, leaf=None):
        self.op = op  # what made the tensor, None for a leaf
        self.attrs = attrs  # keyword arguments of the op
        self.edges = edges  # per argument: the Node its gradient goes to, or None
        self.metas = metas  # per argument: (shape, dtype) of the tensor, or None
        self.saved = saved  # what the gradient needs (op.py); FREED after a backward
        self.dtype = dtype  # the tensor's dtype: gradients are passed on in it
        self.order = next(_counter)  # inputs are made before outputs, so this is a topological order
        # Held weakly, since the leaf holds its Node: else only the garbage collector would free the two.
        self._leaf = None if leaf is None else weakref.ref(leaf)
        self.hooks = None  # or a dict of functions (gradient, dtype) -> gradient

    def __getstate__(self):  # a weak reference can't be copied or pickled, and would lead to the original
        names = [n for n in self.__slots__ if n not in ("_leaf", "__weakref__")]
        return {n: getattr(self, n) for n in names}, self.leaf

    def __setstate__(self, state):
        values, leaf = state
        for name, value in values.items():
            setattr(self, name, value)
        self._leaf = None if leaf is None else weakref.ref(leaf)

    @property
    def leaf(self):
        """The leaf whose Node this is; None for others, and once nobody holds the leaf, who could ask for its gradient."""
        return None if self._leaf is None else self._leaf()

    def keep(self, array):
        """Copy what was saved of `array`, which the result of this op is about to be written over."""
        for n, (i, value, _, _, edge) in enumerate(self.saved or ()):
            if value is array:
                self.saved[n] = i, value.copy(), [0], 0, edge

    def __lt__(self, other):  # heapq pops the smallest: the node made last
        return self.order > other.order


def described(node):
    """'backward of matmul (arguments float16 (2, 3), float16 (3, 4))', for errors."""
    if node.op is None:
        return f"backward: .grad of a leaf ({node.dtype}{'' if node.leaf is None else f' {node.leaf.shape}'})"
    given = ", ".join(f"{meta[1]} {meta[0]}" for meta in node.metas if meta is not None)
    return f"backward of {node.op.name} (arguments {given})"


FREED = object()  # stands for what a Node kept, after a backward


class Forgotten(tuple):
    """Stands for what a Node or a Function's Context kept and `again` makes anew: empty for whoever looks into it."""

    def __new__(cls, again):
        self = super().__new__(cls)
        self.again = again
        return self


def is_leaf(edge):
    """Whether an edge leads to a tensor that wants a gradient and was made by no op."""
    return edge is not None and edge.op is None


def leaf_node(tensor):
    """The Node of a tensor that was not made by an op but wants a gradient."""
    return Node(None, None, (), (), None, tensor.dtype, leaf=tensor)


@quiet
def run_backward(roots, gradients, retain_graph=False, create_graph=False, wanted=None):
    """Walk the record from `roots` (Nodes) with their `gradients`, last made first, and add into the leaves' .grad.

    Gradients travel as float32 (float64) arrays whose values lie on the grid of the tensor they belong to; with
    create_graph they travel as Tensors. A tensor used several times gets the float32 sum of its gradients, rounded
    once when it is passed on; through a cast the sum goes unrounded. With `wanted` (a list of Nodes), their gradients are
    returned in order (None where the record does not lead) and no .grad is touched; the walk keeps to the ways that lead there.
    """
    pending, heap = {}, []
    arrived = []  # (function, argument) that keep a leaf's gradient: called at the end, so that a failure changes no .grad
    captured = dict.fromkeys(wanted or ())
    on_the_way = None if wanted is None else _leading_to(wanted, roots)
    told = reducers if wanted is None else ()
    for reducer in told:
        reducer.begin(create_graph)
    # a leaf is the last of all in order, but may be complete long before
    uses, ready = _leaf_uses(roots) if told else {}, []

    def add(a, b):
        # on a GPU gradients travel as halves; two of them are summed in float32
        if not create_graph and is_half(getattr(a, "dtype", None)):
            a = backends.widen(a)
        return a + b

    def give(node, g, new=False):
        if node not in pending:
            pending[node] = [g, 1, new]
            heapq.heappush(heap, node)
        else:
            entry = pending[node]
            entry[:] = add(entry[0], g), entry[1] + 1, False
            if grad_mode.naive_half_sums and is_half(node.dtype) and not create_graph:
                entry[0] = backends.of(entry[0]).grid(entry[0], node.dtype)
        if uses and pending[node][1] == uses.get(node):
            ready.append(node)

    for node, g in zip(roots, gradients, strict=True):
        if on_the_way is None or node in on_the_way:
            give(node, g)
    while heap:
        node = ready.pop() if ready else heapq.heappop(heap)
        if node not in pending:
            continue  # it was ready early
        g, count, new = pending.pop(node)  # new: no one else holds this array
        try:
            is_cast = node.op is not None and node.op.is_cast
            if count > 1 and is_half(node.dtype) and not is_cast and not create_graph:
                g = backends.of(g).grid(g, node.dtype)
            if node.hooks:
                for hook in list(node.hooks.values()):  # a hook may take itself off
                    g, new = hook(g, node.dtype), False
            if node in captured:
                captured[node], new = g, False
            if node.op is None:
                leaf = node.leaf
                # a leaf that wants no gradient any more (requires_grad_(False)) is given none
                if wanted is None and leaf is not None and leaf._node is not None:
                    keep, gradient = leaf._to_keep(g, new, whole=bool(told))
                    arrived.append((keep, gradient))
                    for reducer in told:
                        reducer.arrived(leaf, gradient)
                continue
            if on_the_way is not None and on_the_way.isdisjoint(node.edges):
                continue  # wanted for itself
            passed_on = new and len(node.edges) == 1
            for edge, gx, made in node.op.pull(node, g, create_graph, on_the_way):
                give(edge, gx, made or gx is g and passed_on)
        except (MemoryError, RuntimeError) as error:
            backends.explain(error, described(node))
            raise
        if not retain_graph:
            node.op.free(node)  # frees as it goes
    for reducer in told:
        arrived += [(leaf._keep_gradient, total) for leaf, total in reducer.finish()]
    for keep, gradient in arrived:
        keep(gradient)
    return [captured[node] for node in wanted or ()]


def _leading_to(wanted, roots):
    """The Nodes in `wanted`, and those under `roots` from which the record leads to one of them."""
    seen, todo = set(roots), list(roots)
    for node in todo:
        for edge in node.edges:
            if edge is not None and edge not in seen:
                seen.add(edge)
                todo.append(edge)
    leading = set(wanted)
    for node in sorted(todo, reverse=True):  # first what was made first
        if not leading.isdisjoint(node.edges):
            leading.add(node)
    return leading


def _leaf_uses(roots):
    """How many gradients each leaf under `roots` will be given, if every op gives one for every edge."""
    uses, seen, todo = {}, set(roots), list(roots)
    for node in todo:
        for edge in node.edges:
            if edge is None:
                continue
            if edge.op is None:
                uses[edge] = uses.get(edge, 0) + 1
            elif edge not in seen:
                seen.add(edge)
                todo.append(edge)
    return uses


class observe:
    """Context manager: `function(phase, op, inputs, output)` sees every op that runs inside.

    phase 'forward': inputs are the op's arguments, output its Tensor. phase 'backward': inputs are (incoming gradient, Node,
    argument number), output the gradient array for that argument. An autograd.Function's incoming gradient is a tuple, one for
    each output, None where there is none. Ops of other threads are not shown. A subclass may have `see` in place of the
    function.
    """

    def __init__(self, function):
        self.function = function

    def see(self, phase, op, inputs, output):
        self.function(phase, op, inputs, output)

    def _told(self, *event):
        if threading.get_ident() == self.thread:
            self.see(*event)

    def __enter__(self):
        self.thread = threading.get_ident()
        observers.append(self._told)
        return self

    def __exit__(self, *_):
        observers.remove(self._told)
