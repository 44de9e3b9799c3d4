"""@op: everything about an op in one declaration - its name, what autocast does with it, the forward and the gradients.

    @op(policy=NOT_LISTED, mixed="promote")
    class mul:
        "a * b."
        def forward(m, a, b):
            return a * b
        def vjp_a(m, g, b):      # vjp_NAME: the gradient that reaches argument NAME
            return g * b
        def vjp_b(m, g, a):      # its parameters name what it needs, and only that is kept for backward
            return g * a

`m` is the namespace the declaration computes with: a backend (arrays), or minamp.ops (tensors) when gradients of gradients are
wanted. `g` is the incoming gradient; a gradient may also name `y` (the output), NAME_shape (keeps nothing), any attribute,
`i`, the position in a *variadic argument, and what a function shared_NAME returns: that is computed once for all gradients.

Half arithmetic happens here and nowhere else: inputs are widened to float32, the declaration computes, the result is rounded
once. Gradients likewise. So a declaration never mentions half.
"""

import functools
import itertools

import numpy as np

from minamp import backends
from minamp.arguments import PLAIN, bound, missing_attribute, refuse_strangers, spelled, starred_name
from minamp.autocast import state as autocast_state
from minamp.backends import cpu
from minamp.devices import same_device
from minamp.formats import float32, float64, is_floating, is_half
from minamp.methods import OPS
from minamp.policy import (  # noqa: F401  declarations take them from here
    BANNED,
    FP32,
    FP32_APPEND_DTYPE,
    FP32_SET_OPT_DTYPE,
    LOWER_PRECISION,
    NOT_LISTED,
    POLICIES,
    PROMOTE,
)
from minamp.promotion import is_float, result_type
from minamp.quiet import Quietly
from minamp.record import FREED, Forgotten, Node, grad_mode, observers
from minamp.tensor import Tensor
from minamp.views import Origin, follow

_quietly = Quietly()  # for an op's arithmetic, which calls no other op


def op(policy, *, mixed="error", ints="keep", stored=False, moves=False, view=False, banned_text=None):
    """Class decorator: make the class body the op of that name, callable as a function, and enter it in OPS.

    policy: one of the seven in policy.py; there is no default. mixed: what tensors of different float dtypes do: 'error',
    'promote' (torch's type promotion) or 'first' (the result has the first one's dtype). ints='float': integer input
    counts as float32. stored: forward and vjps take half arrays as they are stored (their backend function widens).
    moves: only moves values, so nothing needs rounding; or a function attrs -> whether that is so. view: the output may share
    the input's memory.
    Attributes, such as a dim, are forward's keyword-only arguments. A `call` function in the class is how users call the op:
    it checks arguments and returns (tensors, attributes), or (result, None) where other ops make it.
    """
    if policy not in POLICIES:
        raise ValueError(f"@op: policy must be one of {list(POLICIES)}, got {policy!r}")

    def declare(cls):
        return Op(cls, policy, mixed, ints, stored or bool(moves), moves, view, banned_text)

    return declare


class Op:
    """One declared op: call it like a function. `pull` is its backward."""

    def __init__(self, cls, policy, mixed, ints, stored, moves, view, banned_text):
        body = {name: part for c in reversed(cls.__mro__) for name, part in vars(c).items()}
        self.name = self.__name__ = self.__qualname__ = name = cls.__name__
        self.__doc__, self.__module__ = cls.__doc__, cls.__module__
        self.policy, self.cast_inputs = policy, POLICIES[policy]
        self.mixed, self.ints, self.stored, self.moves, self.view = mixed, ints, stored, moves, view
        self.banned_text, self.is_cast = banned_text, name == "to"
        self.forward, self.call = body["forward"], body.get("call")
        self.takes_dtype = policy in (FP32_SET_OPT_DTYPE, FP32_APPEND_DTYPE)
        self.__wrapped__ = self.call or self.forward  # help() shows this signature
        # Read directly: inspect.signature takes 50 us, and 300 of them would slow the import.
        code = self.forward.__code__
        self.variadic = bool(code.co_flags & 0x04)  # has a *argument
        last = code.co_argcount + code.co_kwonlyargcount
        self.params = list(
            code.co_varnames[last : last + 1] if self.variadic else code.co_varnames[1 : code.co_argcount]
        )
        self.attributes = code.co_varnames[code.co_argcount : last]  # forward's keyword-only arguments
        # whether it is called with what forward takes; after *arguments attributes go by name only
        self.direct = self.call is None and (self.variadic or not self.attributes)
        self.shapes = {f"{p}_shape": i for i, p in enumerate(self.params)}
        # name -> (function, names it needs); one that needs another stands below it
        self.shared = {n[7:]: (f, _parameters(f)) for n, f in body.items() if n.startswith("shared_")}
        self.vjps = []  # per argument: (function, names it needs) or None
        for param in self.params:
            vjp = body.get(f"vjp_{param}")
            self.vjps.append(vjp and (vjp, _parameters(vjp)))
        if reserved := {"m", "y", "i", *self.shared} & set(self.params):
            raise TypeError(
                f"@op {name}: {reserved} are taken (namespace, output, position, shared): name the argument otherwise"
            )
        unknown = {n for n in body if n.startswith("vjp_")} - {f"vjp_{p}" for p in self.params}
        if unknown:
            raise TypeError(f"@op {name}: {sorted(unknown)} match no argument of forward {self.params}")
        code = self.__wrapped__.__code__
        # what users can name: without the namespace, which only forward takes
        self.names = code.co_varnames[self.call is None : code.co_argcount + code.co_kwonlyargcount]
        self.starred = starred_name(self.call.__code__) if self.call else None
        self.closed = not code.co_flags & 0x08  # has no **argument
        self._plans = {}
        if OPS.setdefault(name, self) is not self:
            raise ValueError(f"@op: an op named {name!r} exists already")

    def __repr__(self):
        return f"<op {self.name}, autocast policy: {self.policy}>"

    def __reduce__(self):
        return _declared, (self.name,)  # a copy of an op, also a pickled one, is that op

    def __call__(self, *args, **attrs):
        if attrs:
            out = attrs.pop("out", None)
            args, attrs = self._by_name(args, attrs)
            if out is not None:
                return self._into(out, args, attrs)
        if not self.direct:
            args, attrs = self._called(args, attrs)
            if attrs is None:
                return args
        state = autocast_state
        if state.enabled and self.cast_inputs is not None:
            args = self.cast_inputs(self, args, attrs, state.dtype)
        return self._run(args, attrs)

    def _by_name(self, args, attrs):
        """Arguments given by their names, PyTorch's too: as `call` takes them, or at their places without one."""
        args, attrs = spelled(self.names, self.starred, args, attrs)
        for name in attrs:
            if name not in self.names and self.closed:
                raise TypeError(f"{self.name}: takes {', '.join(self.names)}, and no argument named {name!r}")
        if self.call is None:
            args = list(args)
            while len(args) < len(self.params) and self.params[len(args)] in attrs:
                args.append(attrs.pop(self.params[len(args)]))
        return args, attrs

    def plain(self, *args, **attrs):
        """The op outside every autocast region (in-place forms)."""
        if attrs:
            args, attrs = self._by_name(args, attrs)
        if not self.direct:
            args, attrs = self._called(args, attrs)
            if attrs is None:
                return args
        return self._run(args, attrs)

    def _called(self, args, attrs):
        """(tensors, attributes) of a call, as `call` says; without one attributes stand behind the tensors, or go by name."""
        if self.call is None:
            if len(args) > len(self.names):
                raise TypeError(f"{self.name}: takes {', '.join(self.names)}; got {len(args)} arguments")
            n = len(self.params)
            attrs |= zip(self.attributes, args[n:], strict=False)
            return args[:n], attrs
        try:
            return self.call(*args, **attrs)
        except AttributeError as error:
            raise missing_attribute(self.name, bound(self.call, args, attrs), error) from None

    def _into(self, out, args, attrs):
        """The out= form: never autocast, as in PyTorch, and never recorded."""
        given = (*args, *attrs.values())
        if grad_mode.enabled and any(isinstance(a, Tensor) and a.requires_grad for a in (*given, out)):
            raise RuntimeError(f"{self.name}: out= can't be recorded: leave it out, or use minamp.no_grad()")
        same_device(self.name, **{str(i): a for i, a in enumerate(given) if getattr(a, "ndim", 0)}, out=out)
        result = self.plain(*args, **attrs)
        if (result.dtype, result.shape) != (out.dtype, out.shape):
            raise RuntimeError(
                f"{self.name}: out= is {out.dtype} of shape {out.shape}, the result {result.dtype} of shape {result.shape}: "
                "give a tensor that fits"
            )
        return out.copy_(result)

    # -- forward: widen, compute, round once, record

    # What an op costs beside its arithmetic matters for small tensors, so the questions here are asked cheapest first
    # (`d is float32` takes a third of is_half(d)): an add of two scalars took 5.4 us and takes 4.3.
    def _run(self, args, attrs):
        if self.takes_dtype and attrs["dtype"] is not None:
            args = [args[0].to(attrs["dtype"]), *args[1:]]
        first = dtype = None
        arrays, mask, bit = [], 0, 1  # mask: which arguments want a gradient, as bits
        halves = strange = False
        home = np.ndarray  # the type of array the first tensor has
        for a in args:
            if isinstance(a, Tensor):
                array = a._data
                d = array.dtype
                if a._is_view:
                    follow(a)
                if dtype is None:
                    first, dtype, home = a, d, type(array)
                    m = cpu if home is np.ndarray else backends.of(array)
                elif d is not dtype and d != dtype:
                    dtype = self._result_dtype(args)
                if type(array) is not home and backends.of(array) is not m:
                    return self._run(self._on_one_device(args), attrs)
                if a._node is not None:
                    mask |= bit
                if d is float32 or self.stored or not is_half(d):
                    arrays.append(array)
                elif m is cpu:
                    arrays.append(m.widen(array))
                else:  # widening is a kernel, and none runs before all arguments have been looked at
                    arrays.append(array)
                    halves = True
            else:
                arrays.append(a)
                strange = strange or type(a) not in PLAIN
            bit <<= 1
        if first is None:
            raise TypeError(
                f"{self.name}: needs at least one minamp Tensor, got {[type(a).__name__ for a in args]}: "
                "wrap data in minamp.tensor(...)"
            )
        if strange:
            refuse_strangers(self.name, self._names(args), args, on_gpu=m is not cpu)
            # NumPy's numbers are numbers, as in PyTorch: they have no say in the dtype
            args, arrays = (
                [a.item() if isinstance(a, np.generic) else a for a in given] for given in (args, arrays)
            )
        if home is not np.ndarray and m is not cpu:
            product = self.stored and self.policy == LOWER_PRECISION
            m.check(self.name, self._names(args), arrays, product)
        try:
            if (
                dtype is not float32
                and dtype.kind in "iub"
                and (self.ints == "float" or any(not isinstance(a, Tensor) and is_float(a) for a in args))
            ):
                dtype = float32
                arrays = [
                    a.astype(float32) if isinstance(a, home) and a.dtype.kind in "iub" else a for a in arrays
                ]
            if halves:
                arrays = [
                    m.widen(a) if isinstance(t, Tensor) and is_half(a.dtype) else a
                    for t, a in zip(args, arrays, strict=True)
                ]
            y = _quietly.run(self.forward, m, *arrays, **attrs)
            if type(y) is not home:
                y = backends.array(y)
            d = y.dtype
            if d is not dtype and d != dtype:
                if is_floating(d):
                    if not self.is_cast:
                        y = m.cast(y, dtype)
                # NumPy widens by 0-dim arrays too, and some of its results of bools are int8
                elif self.mixed == "promote" and d.kind in "iu" and (dtype.kind in "iu" or d == np.int8):
                    y = m.cast(y, dtype)
        except Exception as error:
            self._explain(error, args)
            raise
        out = Tensor(y)
        if self.view and m.may_share_memory(y, first._data):  # x[[0, 2]] is a copy
            out._version, out._is_view, out._origin = first._version, True, Origin(self, attrs, first)
        if mask and grad_mode.enabled and (d is float32 or is_floating(y.dtype)):
            self._record(args, attrs, out, mask)
        if observers:
            for observe in observers:
                observe("forward", self, args, out)
        return out

    def _explain(self, error, args):
        """Raise what went wrong in the words of this op, if the error is NumPy's or Python's."""
        names = self._names(args)
        if isinstance(error, (ValueError, IndexError)):
            given = ", ".join(
                f"{p} {a.shape if isinstance(a, Tensor) else a}" for p, a in zip(names, args, strict=True)
            )
            if isinstance(error, IndexError):
                raise IndexError(f"{self.name} ({given}): {error}") from None
            raise RuntimeError(f"{self.name}: shapes don't fit ({given}): {error}") from None
        if isinstance(error, (MemoryError, RuntimeError)):
            backends.explain(error, self.described(args))
        if isinstance(error, AttributeError):
            raise missing_attribute(self.name, dict(zip(names, args, strict=True)), error) from None
        if isinstance(error, TypeError) and not self.variadic and len(args) != len(self.params):
            raise TypeError(
                f"{self.name}: takes {', '.join(self.params)}; got {len(args)} arguments"
            ) from None
        if isinstance(error, TypeError):  # None + 1
            raise TypeError(f"{self.described(args)}: {error}") from None
        if isinstance(error, OverflowError):  # a number that an integer dtype can't hold
            raise RuntimeError(f"{self.described(args)}: {error}: use x.long()") from None

    def _on_one_device(self, args):
        """`args` with 0-dim CPU tensors that want no gradient as numbers on the others' GPU, as in PyTorch; else RuntimeError."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        there = next((a for a in tensors if a.device.type == "cuda"), None)
        moved, stay = [], []
        for name, a in zip(self._names(args), args, strict=True):
            if isinstance(a, Tensor) and a.device.type == "cpu":
                if a.ndim or a.requires_grad or there is None:
                    stay.append(name)
                else:  # no copy waits for the GPU: the number travels as an argument of a kernel
                    a = Tensor(backends.of(there._data).full((), a.item(), a.dtype))
            moved.append(a)
        if stay or there is None:
            found = _listed(self._names(args), args, lambda a: a.device)
            raise RuntimeError(
                f"{self.name}: tensors on different devices ({found}): move them to one with x.to('cuda') or x.cpu()"
            )
        return moved

    def _result_dtype(self, args):
        """The dtype of the result where tensors of different dtypes meet; RuntimeError where they must not."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        if self.mixed == "promote":
            return result_type(*tensors)
        floats = [t for t in tensors if is_floating(t.dtype)]
        # masks and indices may stand beside one float dtype, but in no product
        one = len({t.dtype for t in floats}) == 1 and self.policy != LOWER_PRECISION
        if self.mixed == "first" or one:
            return (floats or tensors)[0].dtype
        found = _listed(self._names(args), args, lambda a: a.dtype)
        inside = ", since autocast casts no float64" if any(t.dtype == float64 for t in tensors) else ""
        raise RuntimeError(
            f"{self.name}: tensors of different dtypes ({found}): cast them to one dtype (x.float(), x.half())"
            f"{inside if autocast_state.enabled else ' or run inside minamp.autocast()'}"
        )

    def _names(self, args):
        if self.variadic:
            return [f"{self.params[0]}[{i}]" for i in range(len(args))]
        return self.params[: len(args)]

    def described(self, args):
        """'matmul (a float16 (2, 3), b float16 (3, 4))': the op and what it was given, for errors."""
        return f"{self.name} ({_listed(self._names(args), args, lambda a: f'{a.dtype} {a.shape}')})"

    def _role(self, i):
        return "its output" if i < 0 else f"argument {self.params[0 if self.variadic else i]!r}"

    def _record(self, args, attrs, out, mask):
        positions, needs_y = self._plans.get(mask) or self._plan(mask, len(args))
        edges, metas, saved = [], [], []
        for a in args:
            if isinstance(a, Tensor):
                edges.append(a._node)
                metas.append((a._data.shape, a._data.dtype))
            else:
                edges.append(None)
                metas.append(None)
        for i in positions:
            a = args[i]
            saved.append(
                (i, a._data, a._version, a._version[0], edges[i])
                if isinstance(a, Tensor)
                else (i, a, None, 0, None)
            )
        if needs_y:
            saved.append((-1, out._data, out._version, out._version[0], None))
        out._node = Node(self, attrs, edges, metas, saved, out._data.dtype)

    def _plan(self, mask, n):
        """Which of n arguments to keep, and whether to keep the output, when the gradients of those in `mask` are wanted."""
        names = set()
        for i in range(n):
            if mask >> i & 1:
                place = 0 if self.variadic else i
                vjp, name = self.vjps[place], self.params[place]
                if vjp is None:
                    raise RuntimeError(
                        f"{self.name} has no gradient for argument {name!r}: use {name}.detach()"
                    )
                names.update(vjp[1])
        for name, (_, needed) in reversed(self.shared.items()):
            if name in names:
                names.update(needed)
        if self.variadic:  # the gradient of one argument is made of the others
            kept = [i for i in range(n) if mask != 1 << i] if self.params[0] in names else []
            return kept, "y" in names
        plan = self._plans[mask] = [i for i, p in enumerate(self.params[:n]) if p in names], "y" in names
        return plan

    # -- backward: widen, compute, undo the broadcast, round

    def pull(self, node, g, create_graph, only=None):
        """Yield (edge, gradient, new) for every argument of `node` that wants one, given the gradient `g` of its output.

        only: a set of edges; no others are given one.
        new: nobody else holds the array. It may then be rounded where it lies, and a leaf may keep it.
        """
        if type(node.saved) is not list:
            self._recall(node)
        home = None if create_graph else backends.of(g)
        env = dict(node.attrs)
        if self.variadic:
            env[self.params[0]] = [None] * len(node.edges)
            env[f"{self.params[0]}_shape"] = [shape for shape, _ in node.metas]
        for i, value, counter, version, edge in node.saved:
            if counter is not None:
                if counter[0] != version:
                    raise RuntimeError(
                        f"{self.name}: {self._role(i)} of shape {value.shape} was saved for "
                        f"backward and then written in place (version {counter[0]}, saved at {version}): write to a clone()"
                    )
                if create_graph:
                    value = Tensor(value)
                    value._node = node if i < 0 else edge
                elif not self.stored and is_half(value.dtype):
                    value = home.widen(value)
            if i < 0:
                env["y"] = value
            elif self.variadic:
                env[self.params[0]][i] = value
            else:
                env[self.params[i]] = value
        if not create_graph and not self.stored and is_half(g.dtype):
            g = home.widen(g)
        m = OPS_NAMESPACE if create_graph else home
        moves = self.moves(node.attrs) if callable(self.moves) else self.moves
        for i, edge in enumerate(node.edges):
            if edge is None or only is not None and edge not in only:
                continue
            shape, dtype = node.metas[i]
            vjp, names = self.vjps[0 if self.variadic else i]
            if self.variadic:
                env["i"] = i
            gx = vjp(m, g, **self._named(names, m, g, node, env))
            if gx.shape != shape:
                gx = m.sum_to(gx, shape)
            if create_graph:
                new, gx = False, gx.to(dtype)
            else:
                made = gx
                new = not self.variadic and _is_new(gx, g, env)
                if is_half(dtype):
                    if not (moves or gx is g and node.dtype == dtype):  # those lie on the grid already
                        gx = backends.of(gx).grid(gx, dtype, new)
                elif gx.dtype != dtype:
                    gx = backends.of(gx).cast(backends.array(gx), dtype)
                new = new or gx is not made  # rounding makes another array
            if observers:
                new = False  # they may keep it
                for observe in observers:
                    observe("backward", self, (g, node, i), gx)
            yield edge, gx, new

    def _recall(self, node):
        """Put back what `node` has forgotten (utils/checkpoint.py); RuntimeError where a backward has freed it."""
        while isinstance(node.saved, Forgotten):
            node.saved = node.saved.again()
        if node.saved is FREED:
            raise RuntimeError(
                f"backward through {self.name} a second time: its saved values were freed by the first backward. "
                "Pass retain_graph=True to the first one, or run the forward again"
            )

    def _named(self, names, m, g, node, env):
        """What a gradient names: from `env`, the shape of an argument, or shared, computed now and put into `env`."""
        for name in names:
            if name in self.shared and name not in env:
                function, needed = self.shared[name]
                env[name] = function(m, g, **self._named(needed, m, g, node, env))
        return {n: env[n] if n in env else node.metas[self.shapes[n]][0] for n in names}

    def free(self, node):
        """Let go of what `node` kept; a node that kept nothing can be walked again."""
        if node.saved:
            node.saved = FREED


def _declared(name):
    return OPS[name]


def _parameters(function):
    """The names after m and g."""
    return function.__code__.co_varnames[2 : function.__code__.co_argcount]


def _listed(names, args, tell):
    """'a float32, b float16': what `tell` says of every Tensor, for errors."""
    return ", ".join(f"{p} {tell(a)}" for p, a in zip(names, args, strict=True) if isinstance(a, Tensor))


def _is_new(gx, g, env):
    """Whether the array gx was made by the gradient itself: no view, and none of the values it was computed from."""
    return (
        (type(gx) is np.ndarray or backends.device.holds(gx))
        and gx.base is None
        and gx is not g
        and not any(value is gx for value in env.values())
    )


def composite(function=None, *, policy=NOT_LISTED):
    """Enter a function made of ops in OPS too: a Tensor method, and usable in gradients. Its ops are autocast one by one.

    policy: for one that is itself on PyTorch's lists. Its arguments are cast as the policy says, and its ops then run as
    outside of every region: PyTorch switches autocast off inside what it lists.
    """
    if function is None:
        return functools.partial(composite, policy=policy)
    code, cast_inputs = function.__code__, POLICIES[policy]
    names, starred = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], starred_name(code)

    @functools.wraps(function)
    def composed(*args, **kwargs):
        if kwargs:
            args, kwargs = spelled(names, starred, args, kwargs)
        if cast_inputs is not None:  # else found by an op inside, after others have run
            numbered = (f"{starred}[{i}]" for i in itertools.count())
            named = {**dict(zip(itertools.chain(names, numbered), args, strict=False)), **kwargs}
            same_device(function.__name__, **{k: a for k, a in named.items() if getattr(a, "ndim", 0)})
        region_off = cast_inputs is not None and autocast_state.enabled
        if region_off:
            given = cast_inputs(composed, [*args, *kwargs.values()], {}, autocast_state.dtype)
            args, kwargs = given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True))
            autocast_state.enabled = False
        try:
            return function(*args, **kwargs)
        except AttributeError as error:
            raise missing_attribute(function.__name__, bound(function, args, kwargs), error) from None
        finally:
            autocast_state.enabled |= region_off

    composed.name, composed.policy = function.__name__, policy
    if OPS.setdefault(function.__name__, composed) is not composed:
        raise ValueError(f"@composite: an op named {function.__name__!r} exists already")
    return composed


class _Namespace:
    """minamp's own ops under their names: what a declaration is handed when gradients of gradients are wanted."""

    def __getattr__(self, name):
        try:
            return OPS[name]
        except KeyError:
            raise AttributeError(f"no op named {name!r} is declared") from None


OPS_NAMESPACE = _Namespace()
