"""Snapshot: the state of everything that a training step can reach, and the way back to it.

A step is a callable, and what it changes hangs on it: its closure, the globals it names, the object it is a method of, and
from there lists, dicts, modules, optimizers, scalers, tensors, arrays, random generators. The walk takes each once and
remembers what it holds; `restore` puts that back into the same objects, so whoever holds one of them sees the old state.
An iterator of minamp's DataLoader comes back, too. Beyond reach: other iterators and generators (they go on where they stand),
what is written into a TensorDataset, files, threads, and process groups.
"""

import array
import collections
import contextlib
import functools
import random
import sys
import threading
import types
from operator import is_

import numpy as np

from minamp import backends
from minamp.announce import listeners
from minamp.anomaly import set_detect_anomaly
from minamp.autocast import state as autocast_state
from minamp.backends import errors
from minamp.draw import generator, local
from minamp.record import grad_mode, observers
from minamp.tensor import Tensor
from minamp.utils.data import TensorDataset

_KEYS = (str, int)
_CONTAINERS = (collections.OrderedDict, dict, list, tuple, set, frozenset, collections.deque)
_CALLED_BY_OTHERS = {"forward", "backward", "setup_context", "step"}  # methods that the library calls
_WRAPPERS = (functools.cached_property, functools.partialmethod, functools.singledispatchmethod)
# of the standard library, with what users put in
_CARRIERS = (types.SimpleNamespace, types.FunctionType, dict)
_FOREIGN = {"numpy", "ml_dtypes"} | sys.stdlib_module_names  # their insides are nobody's training state


@contextlib.contextmanager
def restored(**roots):
    """Context manager: what a block does to `roots`, all that they reach and the random generators is undone at its end."""
    before = Snapshot(**roots)
    try:
        yield before
    finally:
        before.restore()


class Snapshot:
    """What `roots` and everything reachable from them hold now. `restore()` may be called any number of times."""

    def __init__(self, **roots):
        self.arrays = []  # (path, array, a copy of it)
        self.leaves = []  # (path, tensor) of those that want a gradient
        self._roots, self._undo, self._classes = roots, [], set()
        self._named, self._waiting = (
            set(),
            {},
        )  # names that functions use; name -> the methods that nobody has named yet
        self._seen = {id(x): x for x in (observers, listeners)}  # of all threads: no user's lists
        self._globals()
        pending = list(roots.items())
        while pending:
            path, x = pending.pop()
            way = _way(type(x))
            if way is not None and id(x) not in self._seen:
                self._seen[id(x)] = x  # held, so that no id is given out twice
                pending.extend(way(self, path, x))

    def restore(self):
        """Put everything back; all of it anew where Ctrl-C comes in between, so that nothing stays half done."""
        try:
            self._put_back()
        except KeyboardInterrupt:
            self._put_back()
            raise

    def _put_back(self):
        for undo in reversed(self._undo):
            undo()

    def reached(self, identity):
        """The object with this id, None if it was not there."""
        return self._seen.get(identity)

    def kept(self, array):
        """Whether an array was there and holds what it held."""
        return any(a is array and _same(a, copy) for _, a, copy in self.arrays)

    def changed(self, wanted):
        """(path, array) of what the roots reach now and did not reach then, or with other contents; wanted(path, array) asks."""
        old = {path: copy for path, _, copy in self.arrays}
        now = [(path, a) for path, a, _ in _Glance(**self._roots).arrays if wanted(path, a)]
        return [(path, a) for path, a in now if path not in old or not _same(a, old[path])]

    # -- the state that hangs on nothing: thread-local modes and random generators

    def _globals(self):
        for mode in (autocast_state, grad_mode):
            names = [n for n in {**vars(type(mode)), **vars(mode)} if not n.startswith("_") and n != "cache"]
            self._attributes(mode, names)
            self._list(mode.outer)
        self._dict(autocast_state.cache)
        self._observers()
        self._attributes(set_detect_anomaly, ["_current"])
        self._attributes(errors, ["checking"])
        self._generator("", generator())
        self._attributes(local, ["generator"])  # manual_seed makes another one
        legacy, python = np.random.get_state(), random.getstate()
        self._undo.append(lambda: np.random.set_state(legacy))
        self._undo.append(lambda: random.setstate(python))

    # -- one object: remember what it holds, return what it leads to

    def _mapping(self, path, x):
        keys, values = self._dict(x)
        held = zip(keys, values, strict=True)
        inner = [(f"{path}[{k!r}]" if isinstance(k, _KEYS) else path, v) for k, v in held if _way(type(v))]
        inner += [(path, k) for k in keys if type(k) is not str]
        return inner + self._instance(path, x)

    def _sequence(self, path, x):
        self._list(x)
        return [*self._members(path, x), *self._instance(path, x)]

    def _members(self, path, x):
        return [(f"{path}[{i}]", v) for i, v in enumerate(_own(type(x)).__iter__(x)) if _way(type(v))]

    def _numbers(self, path, x):
        values = x[:]
        self._undo.append(lambda: x.__setitem__(slice(None), values))
        return []

    def _memory(self, path, x):
        return [(path, x.obj)]

    def _filled(self, path, x):
        own = _own(type(x))
        saved = list(own.__iter__(x))
        fill = set.update if own is set else own.extend
        self._undo.append(lambda: (own.clear(x), fill(x, saved)))
        return [*((path, v) for v in saved), *self._instance(path, x)]

    def _older_generator(self, path, x):
        reading, writing = (
            (x.getstate, x.setstate) if isinstance(x, random.Random) else (x.get_state, x.set_state)
        )
        state = reading()
        self._undo.append(lambda: writing(state))
        return []

    def _generator(self, path, x):
        state = x.bit_generator.state
        self._undo.append(lambda: setattr(x.bit_generator, "state", state))
        return self._instance(path, x)  # minamp's has the seed that it started from

    def _zipped(self, path, x):
        return [(path, iterator) for iterator in x.__reduce__()[1]]  # a zip has no state beside theirs

    def _partial(self, path, x):
        return [(path, x.func), (path, x.args), (path, x.keywords)]

    def _method(self, path, x):
        return [(path, x.__self__), (path, x.__func__)]

    def _tensor(self, path, x):
        if x._node is not None and x._node.op is None:
            self.leaves.append((path, x))
        data, grad, node, version, number = x._data, x._grad, x._node, x._version, x._version[0]

        def undo():
            x._data, x._grad, x._node, x._version = data, grad, node, version
            version[0] = number

        self._undo.append(undo)
        if node is not None:
            self._attributes(node, ["dtype", "hooks"])
            if node.hooks is not None:
                self._dict(node.hooks)
        self._dict(vars(x))
        inner = [(f"{path}.grad", x._grad), *((f"{path}.{k}", v) for k, v in vars(x).items())]
        hooks = () if node is None or node.hooks is None else list(node.hooks.values())
        return [(path, x._data), *inner, *((f"{path}.hook", hook) for hook in hooks)]

    def _array(self, path, x):
        if isinstance(x, np.ndarray) and not x.flags.writeable:
            return []
        if isinstance(x, np.ndarray) and x.dtype.hasobject:
            members = x.copy()
            self._undo.append(lambda: x.__setitem__(Ellipsis, members))
            return [(path, v) for v in members.ravel().tolist()]
        copy = self._copy(x)
        self.arrays.append((path, x, copy))
        self._undo.append(lambda: x.__setitem__(Ellipsis, copy))
        return []

    def _copy(self, array):
        return array.copy()

    def _function(self, path, f):
        if _library(f.__module__):
            return []
        found = [(f.__name__, f.__defaults__), (f.__name__, f.__kwdefaults__)]
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._attributes(cell, ["cell_contents"])
            found.append((name, value))
        used = _names(f.__code__)
        self._named |= used
        for name in used & self._waiting.keys():
            found += self._waiting.pop(name)
        for name in used:
            if name in f.__globals__:
                self._item(f.__globals__, name)
                found.append((name, f.__globals__[name]))
        for module in [x for _, x in found if isinstance(x, types.ModuleType) and not _library(x.__name__)]:
            for name in used:
                if name in vars(module):
                    self._item(vars(module), name)
                    found.append((f"{module.__name__}.{name}", vars(module)[name]))
        return [*found, *self._instance(f.__name__, f)]

    def _instance(self, path, x):
        """The attributes of an object of a class that is not the standard library's or NumPy's."""
        if type(x) is dict or type(x) is list:
            return []
        if backends.device.holds(x):
            return self._array(path, x)
        if _foreign(type(x).__module__) and not isinstance(x, _CARRIERS):
            return []
        attributes = getattr(x, "__dict__", None)
        found = []
        if isinstance(attributes, dict):
            self._dict(attributes)
            found += [(f"{path}.{name}", v) for name, v in attributes.items() if _way(type(v))]
        found += self._class(path, type(x))
        names = [n for n in _slots(type(x)) if hasattr(x, n)]
        if names:
            self._attributes(x, names)
            found += [(f"{path}.{n}", getattr(x, n)) for n in names]
        return found

    def _class(self, path, kind):
        """What a user's class and its bases hold, as a count of all steps, and what their methods reach.

        Of methods that no function names, such as one that plots, nothing is looked at: it may be large.
        """
        found = []
        for c in kind.__mro__:
            if c in self._classes or _library(c.__module__):
                continue
            self._classes.add(c)
            held = {n: v for n, v in vars(c).items() if not n.startswith("__") and not _descriptor(v)}
            self._attributes(c, held)
            found += [(f"{c.__name__}.{n}", v) for n, v in held.items()]
            for n, v in vars(c).items():
                methods = [(f"{c.__name__}.{n}", f) for f in _functions(v)]
                if n in self._named or n in _CALLED_BY_OTHERS or n.startswith("__"):
                    found += methods
                else:
                    self._waiting.setdefault(n, []).extend(methods)
        return found

    # -- the ways to put something back

    def _attributes(self, x, names):
        saved = [(name, getattr(x, name)) for name in names if hasattr(x, name)]

        def undo():
            for name, value in saved:
                # What is as it was is not written: members of an Enum and frozen objects refuse that.
                if _held(x, name) is not value:
                    setattr(x, name, value)

        self._undo.append(undo)

    def _item(self, d, name):
        value = d[name]
        self._undo.append(lambda: d.__setitem__(name, value))

    def _dict(self, d):
        """Returns its keys and values."""
        own = _own(type(d))
        if not own.__len__(d):
            self._undo.append(lambda: own.clear(d))
            return (), ()
        keys, values = list(own.keys(d)), list(own.values(d))

        def undo():
            now = own.keys(d), own.values(d)
            # by identity: == of tensors is elementwise
            if len(now[0]) != len(keys) or not (
                all(map(is_, now[0], keys)) and all(map(is_, now[1], values))
            ):
                own.clear(d)
                for key, value in zip(keys, values, strict=True):
                    own.__setitem__(d, key, value)

        self._undo.append(undo)
        return keys, values

    def _list(self, x):
        saved = list.copy(x)
        self._undo.append(lambda: list.__setitem__(x, slice(None), saved))

    def _observers(self):
        """But for those of other threads, which come and go meanwhile."""
        here = threading.get_ident()

        def mine():
            return [o for o in observers if getattr(getattr(o, "__self__", None), "thread", here) == here]

        saved = mine()

        def undo():
            for o in mine():
                if o not in saved:
                    observers.remove(o)
            for o in saved:
                if o not in observers:
                    observers.append(o)

        self._undo.append(undo)


class _Glance(Snapshot):
    """What is reached, without copies of it."""

    def _globals(self):
        pass

    def _copy(self, array):
        return None


# How objects of these classes are taken, the first that fits; None: nothing hangs on them. All others by their attributes.
_WAYS = (
    (TensorDataset, None),  # read by every step and written by none; often larger than all the rest
    ((int, float, complex, str, bytes, np.generic, np.dtype, types.ModuleType, type(None)), None),
    (type, Snapshot._class),
    (dict, Snapshot._mapping),
    (Tensor, Snapshot._tensor),
    (np.ndarray, Snapshot._array),
    (list, Snapshot._sequence),
    ((bytearray, array.array), Snapshot._numbers),
    (memoryview, Snapshot._memory),
    ((set, collections.deque), Snapshot._filled),
    ((tuple, frozenset), Snapshot._members),
    (np.random.Generator, Snapshot._generator),
    ((np.random.RandomState, random.Random), Snapshot._older_generator),
    (functools.partial, Snapshot._partial),
    (zip, Snapshot._zipped),
    (types.MethodType, Snapshot._method),
    (types.FunctionType, Snapshot._function),
)


@functools.cache
def _way(kind):
    """The method of Snapshot that takes objects of a class, None for what is not looked at."""
    return next((way for kinds, way in _WAYS if issubclass(kind, kinds)), Snapshot._instance)


@functools.cache
def _own(kind):
    """The container class whose methods only read and write: those of a class derived from it may do more, as Counter's do."""
    return next(base for base in _CONTAINERS if issubclass(kind, base))


def _held(x, name):
    """An attribute, or a new object if there is none, as in an emptied cell of a closure."""
    try:
        return getattr(x, name)
    except (AttributeError, ValueError):
        return object()


def _same(a, b):
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return bool(backends.host((a == b) | (a != a) & (b != b)).all())


@functools.cache
def _slots(kind):
    """The attributes that instances of a class keep in slots."""
    slots = [vars(k).get("__slots__", ()) for k in kind.__mro__]
    names = [n for s in slots for n in ((s,) if isinstance(s, str) else s)]
    return [n for n in names if not n.startswith("__")]


def _functions(x):
    """The functions of which what stands in a class is made: methods and properties of all kinds. No user's code is run."""
    kind = type(x)
    if issubclass(kind, property):
        parts = (x.fget, x.fset, x.fdel)
    elif issubclass(kind, classmethod | staticmethod):
        parts = (x.__func__,)
    else:
        parts = (x.func if issubclass(kind, _WRAPPERS) else x,)
    return [f for f in parts if issubclass(type(f), types.FunctionType)]


def _descriptor(x):
    """Whether it is a method or a property: part of what a class is, not of what it holds."""
    return isinstance(x, types.FunctionType) or hasattr(type(x), "__get__")


@functools.cache
def _library(module):
    """Whether functions and classes of that module are no user's."""
    return _foreign(module) or (module or "").partition(".")[0] == "minamp"


@functools.cache
def _foreign(module):
    return (module or "").partition(".")[0] in _FOREIGN


def _names(code):
    """The global names that a function and the functions inside it use."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return {*code.co_names, *(name for c in inner for name in _names(c))}
