"""Tensor = array + grad + how it was made.

Its operators and methods that are ops stand in methods.py, what writes into it in writes.py.
"""

import functools
import weakref

import numpy as np

from minamp import backends, views
from minamp.announce import announced
from minamp.backends import host
from minamp.devices import same_device
from minamp.formats import bfloat16, float16, float32, float64, is_floating, is_half, widen
from minamp.methods import OPS, Methods
from minamp.numbers import check_fits, check_integers, numbers, sized, sizes
from minamp.record import leaf_node, run_backward
from minamp.writes import Writes

_KEEP = "retain_grad"  # the key of its hook
_UNSAID = (float32, np.dtype(np.int64), np.dtype(np.bool_))  # dtypes that values show by themselves


class Tensor(Methods, Writes):
    """An array that can remember how it was made and carry a gradient (`grad`, a Tensor).

    data: NumPy array, wrapped without a copy (use minamp.tensor to copy), or numbers. requires_grad needs a floating dtype.
    Raises RuntimeError for requires_grad on integers, TypeError for what holds no numbers, and for sizes: give those to
    minamp.empty or minamp.zeros.
    """

    __slots__ = ("_data", "_grad", "_node", "_version", "__weakref__", "__dict__")
    _is_view = _keeps_grad = False  # rarely set, so not written for every tensor
    _origin = None  # of a view: how it was taken (views.py)
    __array_priority__ = 1000  # ndarray + Tensor comes to Tensor.__radd__

    def __init__(self, data, requires_grad=False, *sizes):
        self._data = data if isinstance(data, np.ndarray) else _checked("Tensor", data, requires_grad, *sizes)
        self._grad = self._node = None
        self._version = [0]  # counts in-place writes; views share it with their base
        if requires_grad:
            self.requires_grad = True

    # -- what it holds

    @property
    def data(self):
        """detach() under its older name. Assigning a tensor, or an array, makes this one hold it: as an in-place write.

        RuntimeError for integers where gradients are wanted.
        """
        return self.detach()

    @data.setter
    def data(self, value):
        array, version = (
            (value._data, value._version) if isinstance(value, Tensor) else (_checked("data", value), [0])
        )
        if self._node is not None and not is_floating(array.dtype):
            raise RuntimeError(
                f"data: a tensor that requires grad can't hold {array.dtype}: use value.float(), or requires_grad_(False)"
            )
        # The count belongs to the memory: later writes through `value` are seen here, and those to the old memory are not.
        # It goes on from the higher one, so that no number noted of this tensor comes again.
        self._version[0] += 1
        version[0] = max(version[0], self._version[0])
        self._data, self._version = array, version
        if self._is_view:  # not any more of what it was taken from
            self._is_view, self._origin = False, None
        if self._node is not None and self._node.op is None:
            self._node.dtype = array.dtype  # a leaf may change format: model.half()

    @property
    def grad(self):
        """The gradient, a Tensor of this tensor's dtype and shape, or None."""
        return self._grad

    @grad.setter
    def grad(self, value):
        if value is not None:
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"grad must be a Tensor or None, got {type(value).__name__}: wrap it in minamp.tensor(...)"
                )
            if value.shape != self.shape or value.dtype != self.dtype:
                raise RuntimeError(
                    f"grad of a {self.dtype} tensor of shape {self.shape} can't be {value.dtype} of shape {value.shape}: "
                    "give a gradient of the same dtype and shape"
                )
            same_device("grad", tensor=self, gradient=value)
        self._grad = value

    dtype = property(lambda self: self._data.dtype, doc="Storage format, a NumPy dtype.")
    shape = property(lambda self: self._data.shape, doc="Tuple of ints.")
    ndim = property(lambda self: self._data.ndim)
    itemsize = property(lambda self: self._data.itemsize)
    nbytes = property(lambda self: self._data.nbytes)
    is_cuda = property(lambda self: self.device.type == "cuda")
    device = property(
        lambda self: backends.Device(backends.device_name(self._data)), doc="Where the array lives."
    )
    is_leaf = property(lambda self: self._node is None or self._node.op is None)
    grad_fn = property(
        lambda self: None if self.is_leaf else self._node, doc="The Node that made it, None for a leaf."
    )
    T = property(lambda self: self.permute(*reversed(range(self.ndim))), doc="All dimensions reversed.")
    mT = property(lambda self: OPS["mT"](self), doc="The last two dimensions swapped.")

    @property
    def requires_grad(self):
        if self._is_view:
            views.follow(self)
        return self._node is not None

    @requires_grad.setter
    def requires_grad(self, value):
        if not self.is_leaf:
            if value:
                return
            raise RuntimeError("requires_grad can only be switched off on a leaf: use x.detach()")
        if value and not is_floating(self.dtype):
            raise RuntimeError(
                f"only floating tensors can require gradients, this one is {self.dtype}: use x.float()"
            )
        self._node = (self._node or leaf_node(self)) if value else None

    def requires_grad_(self, requires_grad=True):
        self.requires_grad = requires_grad
        return self

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self):
        return self.ndim

    def numel(self):
        return self._data.size

    nelement, ndimension = numel, dim

    def element_size(self):
        return self._data.itemsize

    def is_floating_point(self):
        return is_floating(self.dtype)

    def is_contiguous(self):
        return self._data.flags.c_contiguous

    def contiguous(self):
        """This tensor, or a copy whose memory runs in the order of its dimensions."""
        return self if self.is_contiguous() else self.clone()

    def stride(self, dim=None):
        """Steps between neighbours along each dimension, in elements."""
        steps = tuple(n // self._data.itemsize for n in self._data.strides)
        return steps if dim is None else steps[dim]

    def item(self):
        """The one value as a Python number. RuntimeError if there is not exactly one."""
        if self._data.size != 1:
            raise RuntimeError(f"item() needs a tensor with one element, this one has shape {self.shape}")
        data = host(self._data)
        return data.item() if data.dtype != bfloat16 else float(data.reshape(()))

    def tolist(self):
        data = host(self._data)
        return widen(data).tolist() if self.dtype == bfloat16 else data.tolist()

    def numpy(self, *, force=False):
        """The array, sharing memory; force=True: x.detach().cpu() first.

        RuntimeError while gradients are recorded: use x.detach().numpy().
        """
        if force:
            return self.detach().cpu().numpy()
        if self.requires_grad:
            raise RuntimeError(
                "numpy() on a tensor that requires grad would lose its history: use x.detach().numpy()"
            )
        if backends.device.holds(self._data):
            raise TypeError(f"numpy() on a tensor on {self.device}: use x.cpu().numpy()")
        return self._data

    def __array__(self, dtype=None, copy=None):
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    @property
    def __cuda_array_interface__(self):
        """x's memory on the GPU, for another library to share. A tensor on the CPU has none."""
        if self.requires_grad:
            raise RuntimeError(
                "a tensor that requires grad would lose its history in another library: give it x.detach()"
            )
        return self._data.__cuda_array_interface__

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __bool__(self):
        if self._data.size != 1:
            raise RuntimeError(
                f"the truth of a tensor of shape {self.shape} is ambiguous: use .any() or .all()"
            )
        return bool(self.item())

    def __index__(self):
        return host(self._data).__index__()

    def __len__(self):
        if not self.ndim:
            raise TypeError("len() of a 0-dim tensor")
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __contains__(self, value):
        """Whether any element equals `value`."""
        return bool((self == value).any())

    __hash__ = object.__hash__

    def __format__(self, spec):
        """A number for a 0-dim tensor, as in PyTorch: f"{loss:.3f}"."""
        if not self.ndim:
            return format(self.item(), spec)
        if spec:
            raise TypeError(
                f"{spec!r} formats one number, this tensor has shape {self.shape}: use x.tolist()"
            )
        return str(self)

    def __repr__(self):
        text = np.array2string(
            np.asarray(widen(host(self._data))), separator=", ", prefix="tensor(", precision=5
        )
        tail = "" if self.device == "cpu" else f", device='{self.device}'"
        tail += "" if self.dtype in _UNSAID else f", dtype={self.dtype}"
        if not self.is_leaf:
            tail += f", grad_fn={self._node.op.name}"
        elif self.requires_grad:
            tail += ", requires_grad=True"
        return f"tensor({text}{tail})"

    # -- backward

    @announced("backward")
    def backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None):
        """Add d(self)/d(leaf) into the .grad of every leaf this was made from; of `inputs` only (Tensors), if they are given.

        gradient: Tensor of this shape, needed unless this has one element. RuntimeError for a tensor without history, a
        non-scalar without gradient, a gradient of another shape, or a record that an earlier backward has freed.
        """
        add_gradients([self], [gradient], retain_graph, create_graph, inputs)

    def _history(self):
        if not self.requires_grad:
            raise RuntimeError(
                "backward on a tensor that requires no grad: nothing it was made from has requires_grad=True "
                "(or it was made under no_grad)"
            )
        return self._node

    @backends.guard("backward: the gradient it starts from")
    def _seed(self, gradient, create_graph):
        made_by = "a leaf" if self.is_leaf else f"the output of {self._node.op.name}"
        if gradient is None:
            if self._data.size != 1:
                raise RuntimeError(
                    f"backward starts from a scalar, but this is {made_by} with shape {self.shape}: "
                    "reduce it (loss.sum(), loss.mean()) or pass gradient="
                )
            gradient = Tensor(backends.of(self._data).ones_like(self._data))
        elif not isinstance(gradient, Tensor):
            raise TypeError(
                f"backward: gradient must be a Tensor, got {type(gradient).__name__}: wrap it in minamp.tensor(...)"
            )
        elif gradient.shape != self.shape:
            raise RuntimeError(
                f"gradient has shape {gradient.shape}, but {made_by} has shape {self.shape}: give the same shape"
            )
        same_device("backward", tensor=self, gradient=gradient)
        gradient = gradient.to(self.dtype)
        return gradient if create_graph else _travelling(gradient._data)

    def _as_gradient(self, g, new=False):
        """An arriving gradient (array, or Tensor under create_graph) as a Tensor of this tensor's dtype.

        new: no one else holds the array, so it is kept without a copy where its dtype is right and it lies as the tensor does.
        """
        if isinstance(g, Tensor):
            return g.to(self.dtype)
        fits = new and g.dtype == self.dtype and g.strides == self._data.strides
        return Tensor(g if fits else backends.of(g).owned(g, self.dtype, self._data))

    def _accumulated(self, g, new=False):
        """.grad with an arriving gradient added in float32, in this tensor's dtype: a new Tensor, or the array it is to hold."""
        if isinstance(g, Tensor):  # create_graph: .grad keeps its history, in memory that is no one else's
            return g.to(self.dtype, copy=True) if self._grad is None else self._grad + g.to(self.dtype)
        if self._grad is None:
            return self._as_gradient(g, new)
        m = backends.of(g)
        return m.cast(m.widen(self._grad._data) + m.widen(g), self.dtype)

    def _keep_gradient(self, total):
        """What _accumulated gave, in place: p.grad.data, or a flat buffer of all gradients, may share the memory."""
        if isinstance(total, Tensor):
            self._grad = total
        else:
            self._grad._data[...] = total
            self._grad._version[0] += 1

    def _add_gradient(self, g):
        """An arriving gradient added to .grad, which is there and needs no rounding, in its memory."""
        data = self._grad._data
        data += g
        self._grad._version[0] += 1

    def _to_keep(self, g, new=False, whole=False):
        """(function, argument) that will keep an arriving gradient; all that needs memory is done before.

        whole: the argument is all that .grad is to hold, which reducers send.
        """
        if whole or isinstance(g, Tensor) or self._grad is None or is_half(self.dtype):
            return self._keep_gradient, self._accumulated(g, new)
        return self._add_gradient, g

    def register_hook(self, hook):
        """Call hook(gradient) when this tensor's gradient is known; what it returns (if not None) replaces it.

        Returns a handle with remove(). RuntimeError if the tensor requires no grad.
        """
        if not callable(hook):
            raise TypeError(f"register_hook: hook must be callable, got {type(hook).__name__}")
        return self._add_hook(functools.partial(_call_hook, hook))

    def retain_grad(self):
        """Keep .grad for a tensor that is not a leaf. RuntimeError if it requires no grad."""
        if self.is_leaf or self._keeps_grad:
            self._history()
            return
        self._keeps_grad, me = True, weakref.ref(self)

        def keep(g, dtype):
            tensor = me()
            if tensor is not None:
                keep_it, arrived = tensor._to_keep(g)
                keep_it(arrived)
            return g

        node = self._history()
        node.hooks = node.hooks or {}
        node.hooks[_KEEP] = keep

    def _add_hook(self, function):
        node = self._history()
        node.hooks = node.hooks or {}
        handle = HookHandle(node.hooks, function)
        if _KEEP in node.hooks:  # .grad is what the hooks made of the gradient: last, as in PyTorch
            node.hooks[_KEEP] = node.hooks.pop(_KEEP)
        return handle

    # -- history and copies

    def __copy__(self):
        """Another leaf on the same memory, without the gradient, as in PyTorch."""
        out = self.detach()
        out.__class__ = type(self)
        out.__dict__.update({k: v for k, v in vars(self).items() if k != "_origin"})
        return out.requires_grad_(self.requires_grad)

    def __getstate__(self):  # a deep or pickled copy shares no memory, so it is no view
        held = {k: v for k, v in vars(self).items() if k not in ("_origin", "_is_view")}
        return held, {k: getattr(self, k) for k in ("_data", "_grad", "_node", "_version")}

    def detach(self):
        """The same memory without history."""
        out = Tensor(self._data)
        out._version, out._is_view = self._version, True
        return out

    def detach_(self):
        """Forget the history. RuntimeError for a view, whose history is that of the tensor it was taken from."""
        if self._origin is not None:
            raise RuntimeError("detach_: a view can't be detached in place: use x.detach()")
        self._node = None
        return self

    def to(self, *args, dtype=None, device=None, non_blocking=False, copy=False):
        """This tensor in another dtype and/or on another device: x.to(float16), x.to('cpu'), x.to('cpu', float16), x.to(other).

        Two bools after these are non_blocking, which has no effect, and copy.
        Changes are the ops `to` and `to_device`, recorded like any other; no change returns x itself unless copy=True.
        """
        dtype, device, copy = to_arguments(args, dtype, device, copy)
        out = self if dtype is None or dtype == self.dtype else OPS["to"](self, dtype)
        if device is not None and not out.device.same(device):
            out = OPS["to_device"](out, device)
        return out.clone() if copy and out is self else out

    def half(self):
        return self.to(float16)

    def bfloat16(self):
        return self.to(bfloat16)

    def float(self):
        return self.to(float32)

    def double(self):
        return self.to(float64)

    def long(self):
        return self.to(np.dtype(np.int64))

    def int(self):
        return self.to(np.dtype(np.int32))

    def bool(self):
        return self.to(np.dtype(np.bool_))

    def type_as(self, other):
        return self.to(other.dtype)

    def type(self, dtype):
        return self.to(dtype)

    def view_as(self, other):
        return self.view(other.shape)

    def reshape_as(self, other):
        return self.reshape(other.shape)

    def expand_as(self, other):
        return self.expand(other.shape)

    def where(self, condition, other):
        return OPS["where"](condition, self, other)

    def cpu(self):
        return self.to("cpu")

    def cuda(self, device=None, non_blocking=False):
        return self.to("cuda" if device is None else device)

    # -- new ones like this

    @staticmethod
    def _holding(array):
        """A Tensor of an array, for writes.py, which comes before this file."""
        return Tensor(array)

    def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
        """A tensor of `data` in this one's dtype, on its device."""
        return tensor(data, dtype or self.dtype, requires_grad, device or self.device)

    def new_full(self, size, fill_value, *, dtype=None, device=None, requires_grad=False):
        """A tensor of that size filled with one value, in this one's dtype, on its device."""
        filled, dtype = np.full(sizes("new_full", (size,)), fill_value), np.dtype(dtype or self.dtype)
        check_fits("new_full", fill_value, dtype)
        return tensor(filled, dtype, requires_grad, device or self.device)

    @sized
    def new_zeros(self, *size, **options):
        return self.new_full(sizes("new_zeros", size), 0, **options)

    @sized
    def new_ones(self, *size, **options):
        return self.new_full(sizes("new_ones", size), 1, **options)

    @sized
    def new_empty(self, *size, **options):
        return self.new_full(sizes("new_empty", size), 0, **options)

    def __getitem__(self, key):
        return OPS["index"](self, key)


def _checked(name, data, requires_grad=False, *sizes):
    """What a Tensor is made of, if that is no NumPy array. torch.Tensor(2, 3) takes sizes and torch.Tensor([1, 2]) floats."""
    if type(requires_grad) is int:
        sizes = ", ".join(map(str, (data, requires_grad, *sizes)))
        raise TypeError(f"{name}: takes an array, not sizes: use minamp.zeros({sizes})")
    array = backends.array(data) if isinstance(data, np.generic) else numbers(name, data)
    return array.astype(float32) if isinstance(data, list | tuple) else array


def add_gradients(tensors, gradients, retain_graph, create_graph, inputs):
    """Backward from several tensors at once, each with its gradient or None, into all leaves or into `inputs`."""
    roots = [y._history() for y in tensors]
    seeds = [y._seed(g, create_graph) for y, g in zip(tensors, gradients, strict=True)]
    retain = create_graph if retain_graph is None else retain_graph
    if inputs is None:
        run_backward(roots, seeds, retain, create_graph)
        return
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if not inputs or not all(isinstance(x, Tensor) for x in inputs):
        raise RuntimeError(
            f"backward: inputs must be one or more Tensors, got {[type(x).__name__ for x in inputs]}"
        )
    answers = run_backward(roots, seeds, retain, create_graph, wanted=[x._history() for x in inputs])
    for keep, gradient in [x._to_keep(g) for x, g in zip(inputs, answers, strict=True) if g is not None]:
        keep(gradient)


class HookHandle:
    """What registering a hook returns: it stands in the dict `hooks` until remove()."""

    def __init__(self, hooks, hook):
        self.hooks, self.key = hooks, object()
        hooks[self.key] = hook

    def remove(self):
        self.hooks.pop(self.key, None)


def _travelling(g):
    """A gradient array in the form that backward passes on."""
    return backends.of(g).grid(g, g.dtype) if is_half(g.dtype) else g


def _call_hook(hook, g, dtype):
    """Show the gradient to the user as a Tensor of the tensor's own dtype; go on with what comes back."""
    shown = g if isinstance(g, Tensor) else Tensor(backends.of(g).narrow(g, dtype) if is_half(dtype) else g)
    answer = hook(shown)
    if answer is None:
        return g
    if not isinstance(answer, Tensor):
        raise TypeError(f"hook: a gradient's hook returns a Tensor or None, got {type(answer).__name__}")
    if answer.shape != shown.shape:
        raise RuntimeError(
            f"hook: the gradient has shape {shown.shape}, the hook returned {answer.shape}: return one of that shape"
        )
    return answer if isinstance(g, Tensor) else _travelling(answer.to(dtype)._data)


def to_arguments(args, dtype, device, copy=False):
    """(dtype or None, device or None, copy) from the many ways to call .to(): a dtype, a device, both, another tensor."""
    flags = [a for a in args if isinstance(a, bool)]
    copy = flags[1] if len(flags) > 1 else copy
    for a in args:
        if isinstance(a, Tensor):
            dtype, device = a.dtype, a.device
        elif isinstance(a, str | backends.Device):
            device = a
        elif not isinstance(a, bool) and a is not None:
            dtype = a
    return None if dtype is None else np.dtype(dtype), device, copy


def tensor(data, dtype=None, requires_grad=False, device=None):
    """A new Tensor holding a copy of `data` (numbers, nested lists, arrays).

    Python floats become float32, ints int64, arrays keep their dtype, as in torch.tensor.
    """
    if isinstance(data, Tensor):
        data = data._data
    kept = isinstance(data, np.ndarray | np.generic) or backends.device.holds(data)
    array = numbers("tensor", data)
    array = array.copy() if kept else array
    if not kept:
        check_integers("tensor", array, dtype)
        if array.dtype == np.uint64:  # NumPy's for ints beyond int64
            check_integers("tensor", array, np.int64)
        while isinstance(data, list | tuple) and data:
            data = data[0]
        # a list of NumPy's numbers: theirs is the dtype, too
        kept = isinstance(data, np.ndarray | np.generic)
    if dtype is None and not kept and array.dtype == float64:
        dtype = float32
    out = Tensor(array) if dtype is None else Tensor(array).to(np.dtype(dtype))
    if device is not None:
        out = out.to(device)
    return out.requires_grad_() if requires_grad else out


def as_tensor(data, dtype=None, device=None):
    """`data` as a Tensor, sharing memory where it is a Tensor or an array of that dtype already."""
    if isinstance(data, Tensor | np.ndarray):
        out = data if isinstance(data, Tensor) else Tensor(numbers("as_tensor", data))
        return out.to(dtype=dtype, device=device)
    return tensor(data, dtype, device=device)


def is_tensor(x):
    """True for a Tensor."""
    return isinstance(x, Tensor)
