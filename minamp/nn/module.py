"""Module: a network or a part of one. Parameter: a tensor that belongs to it and is trained."""

from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from minamp import backends
from minamp.announce import announced
from minamp.formats import bfloat16, float16, float32, float64, is_floating
from minamp.nn.passage import Passage
from minamp.numbers import numbers
from minamp.tensor import HookHandle, Tensor, to_arguments


class Parameter(Tensor):
    """A Tensor that a Module finds and an optimizer trains; shares the memory of `data` (Tensor or array)."""

    __slots__ = ()

    def __init__(self, data=None, requires_grad=True):
        if isinstance(data, Tensor):
            super().__init__(data._data)
            self._version = data._version
        else:
            super().__init__(np.empty(0, float32) if data is None else numbers("Parameter", data))
        self.requires_grad = requires_grad

    def __getstate__(self):  # a deep or pickled copy starts without a gradient, as torch's
        held, slots = super().__getstate__()
        return held, {**slots, "_grad": None}

    def __repr__(self):
        return "Parameter containing:\n" + super().__repr__()


class _IncompatibleKeys(namedtuple("IncompatibleKeys", ["missing_keys", "unexpected_keys"])):
    __slots__ = ()

    def __repr__(self):
        some = self.missing_keys or self.unexpected_keys
        return super().__repr__() if some else "<All keys matched successfully>"


class Module:
    """Base class of networks and layers: set Parameters and Modules as attributes, write forward(), call it.

    Names and order are torch.nn.Module's, behaviour too unless a docstring says otherwise.
    """

    # most modules have no hooks; the first one makes a table of the module's own
    _forward_hooks = _forward_pre_hooks = _backward_hooks = _backward_pre_hooks = MappingProxyType({})

    def __init__(self):
        for table in ("_parameters", "_buffers", "_modules"):
            object.__setattr__(self, table, {})
        object.__setattr__(self, "_non_persistent", set())
        object.__setattr__(self, "training", True)

    def forward(self, *args, **kwargs):
        raise NotImplementedError(f"{type(self).__name__} has no forward(): define it")

    def __call__(self, *args, **kwargs):
        for hook in list(self._forward_pre_hooks.values()):  # a hook may take itself off
            changed = hook(self, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        passage = Passage(self) if self._backward_hooks or self._backward_pre_hooks else None
        if passage is not None:
            args = passage.enter(args)
        out = self.forward(*args, **kwargs)
        for hook in list(self._forward_hooks.values()):
            changed = hook(self, args, out)
            out = out if changed is None else changed
        return out if passage is None else passage.leave(out)

    def register_forward_hook(self, hook):
        """Call hook(module, args, output) after every forward; what it returns replaces the output."""
        return self._hooked("_forward_hooks", hook)

    def register_forward_pre_hook(self, hook):
        """Call hook(module, args) before every forward; what it returns replaces the arguments."""
        return self._hooked("_forward_pre_hooks", hook)

    def register_full_backward_hook(self, hook):
        """Call hook(module, grad_input, grad_output) in every backward through the module; both are tuples.

        grad_output: the gradients of forward's outputs, grad_input those of its positional Tensors, None where there is none.
        What it returns (a tuple as long) replaces grad_input. Where no input wants a gradient it is called when those of the
        outputs are there. An output that is neither a Tensor nor a tuple of them is not watched: a warning.
        """
        return self._hooked("_backward_hooks", hook)

    def register_full_backward_pre_hook(self, hook):
        """Call hook(module, grad_output) in every backward before the module's own; what it returns replaces grad_output."""
        return self._hooked("_backward_pre_hooks", hook)

    def _hooked(self, table, hook):
        return HookHandle(vars(self).setdefault(table, {}), hook)

    # -- attributes: parameters, buffers and modules live in their tables, everything else is plain

    def __setattr__(self, name, value):
        tables = self.__dict__
        if "_parameters" not in tables:
            if isinstance(value, Parameter | Module):
                raise AttributeError(
                    f"{type(self).__name__}: can't set {name!r} before super().__init__() has run: call it first"
                )
            object.__setattr__(self, name, value)
        elif isinstance(value, Parameter):
            self._forget(name, but=self._parameters)
            self._parameters[name] = value
        elif isinstance(value, Module) and name not in self._parameters:
            self._forget(name, but=self._modules)
            self._modules[name] = value
        else:
            for table, kind in (("_parameters", Parameter), ("_modules", Module), ("_buffers", Tensor)):
                if name in tables[table]:
                    if value is not None and not isinstance(value, kind):
                        raise TypeError(
                            f"{type(self).__name__}: can't set {name!r} to a {type(value).__name__}: "
                            f"give a {kind.__name__} or None"
                        )
                    tables[table][name] = value
                    return
            object.__setattr__(self, name, value)

    def __getattr__(self, name):
        for table in ("_parameters", "_buffers", "_modules"):
            found = self.__dict__.get(table, ())
            if name in found:
                return found[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __delattr__(self, name):
        if not self._forget(name):
            object.__delattr__(self, name)

    def __dir__(self):
        return [*super().__dir__(), *self._parameters, *self._buffers, *self._modules]

    def _forget(self, name, but=None):
        """Take `name` out of every table but one, in which it keeps its place; whether any of the others had it."""
        self._non_persistent.discard(name)
        found = False
        for table in (self.__dict__, self._parameters, self._buffers, self._modules):
            if name in table and table is not but:
                del table[name]
                found = True
        return found

    def _check_name(self, name, table):
        if not isinstance(name, str) or "." in name or not name:
            raise (KeyError if isinstance(name, str) else TypeError)(
                f"{type(self).__name__}: {name!r} can't be a name here: give a string without a dot"
            )
        if hasattr(self, name) and name not in table:
            raise KeyError(f"{type(self).__name__}: attribute {name!r} exists already: choose another name")

    def register_parameter(self, name, param):
        """Add a Parameter (or None) under `name`."""
        self._check_name(name, self._parameters)
        if param is not None and not isinstance(param, Parameter):
            raise TypeError(
                f"parameter {name!r} must be a Parameter or None, got {type(param).__name__}: use nn.Parameter(...)"
            )
        self._parameters[name] = param

    def register_buffer(self, name, tensor, persistent=True):
        """Add a Tensor (or None) that is not trained, but converted and, if persistent, saved."""
        self._check_name(name, self._buffers)
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(
                f"buffer {name!r} must be a Tensor or None, got {type(tensor).__name__}: use minamp.tensor(...)"
            )
        self._buffers[name] = tensor
        (self._non_persistent.discard if persistent else self._non_persistent.add)(name)

    def add_module(self, name, module):
        """Add a Module (or None) under `name`."""
        self._check_module(name, module)
        self._modules[name] = module

    def _check_module(self, name, module):
        self._check_name(name, self._modules)
        if module is not None and not isinstance(module, Module):
            raise TypeError(f"module {name!r} must be a Module or None, got {type(module).__name__}")

    register_module = add_module

    # -- walking

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        """(dotted name, module) of this module and all below it, each once; none of the set `memo`."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            for name, child in self._modules.items():
                if child is not None:
                    path = f"{prefix}.{name}" if prefix else name
                    yield from child.named_modules(memo, path, remove_duplicate)

    def get_submodule(self, target):
        """The module at a dotted name, itself at "". AttributeError where there is none."""
        found = self
        for name in filter(None, target.split(".")):
            found = found._entry("_modules", name, "module")
        return found

    def get_parameter(self, target):
        """The parameter at a dotted name. AttributeError where there is none."""
        path, _, name = target.rpartition(".")
        return self.get_submodule(path)._entry("_parameters", name, "parameter")

    def get_buffer(self, target):
        """The buffer at a dotted name. AttributeError where there is none."""
        path, _, name = target.rpartition(".")
        return self.get_submodule(path)._entry("_buffers", name, "buffer")

    def _entry(self, table, name, kind):
        if name not in vars(self)[table]:
            raise AttributeError(f"{type(self).__name__} has no {kind} {name!r}")
        return vars(self)[table][name]

    def _named(self, table, prefix, recurse, remove_duplicate):
        seen = set()
        modules = self.named_modules(None, prefix, remove_duplicate) if recurse else [(prefix, self)]
        for path, module in modules:
            for name, tensor in vars(module)[table].items():
                if tensor is not None and id(tensor) not in seen:
                    if remove_duplicate:
                        seen.add(id(tensor))
                    yield (f"{path}.{name}" if path else name), tensor

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """(dotted name, Parameter), each parameter once even if it is shared, or under each of its names."""
        return self._named("_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):
        """(dotted name, Tensor), as named_parameters."""
        return self._named("_buffers", prefix, recurse, remove_duplicate)

    def named_children(self):
        """(name, module) of the modules directly below, each once."""
        seen = set()
        for name, child in self._modules.items():
            if child is not None and child not in seen:
                seen.add(child)
                yield name, child

    def parameters(self, recurse=True):
        """The parameters, each once: what an optimizer is given."""
        return (p for _, p in self.named_parameters(recurse=recurse))

    def buffers(self, recurse=True):
        """The buffers, each once."""
        return (b for _, b in self.named_buffers(recurse=recurse))

    def modules(self):
        """This module and all below it, each once."""
        return (m for _, m in self.named_modules())

    def children(self):
        """The modules directly below, each once."""
        return (m for _, m in self.named_children())

    def apply(self, fn):
        """Call fn on every module below and then on this one; returns self."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    # -- modes and gradients

    def train(self, mode=True):
        """Training mode (dropout drops, batch norm uses the batch's statistics); returns self."""
        if not isinstance(mode, bool):
            raise ValueError(f"train: mode must be True or False, got {mode!r}")
        self.training = mode
        for child in self.children():
            child.train(mode)
        return self

    def eval(self):
        """Evaluation mode; returns self."""
        return self.train(False)

    def requires_grad_(self, requires_grad=True):
        """Switch the gradients of all parameters on or off; returns self."""
        for p in self.parameters():
            p.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none=True):
        """Drop the gradients of all parameters, or write zeros into them."""
        for p in self.parameters():
            zero_grad(p, set_to_none)

    # -- dtype and device: parameters stay the same objects, so an optimizer keeps its hold on them

    def _convert(self, dtype=None, device=None):
        for _, _, tensor in self._tensors():
            for t in (tensor, tensor.grad):
                if t is None:
                    continue
                array = t._data
                if dtype is not None and is_floating(t.dtype):
                    array = backends.cast(array, dtype)
                if device is not None:
                    array = backends.move(array, device)
                if array is not t._data:
                    t.data = array
        return self

    def to(self, *args, dtype=None, device=None, non_blocking=False):
        """Parameters, buffers, gradients to another floating dtype and/or device, in place; returns self.

        to(dtype), to(device), to(device, dtype), to(tensor). Integer buffers keep their dtype. TypeError for an integer dtype.
        """
        dtype, device, _ = to_arguments(args, dtype, device)
        if dtype is not None and not is_floating(dtype):
            raise TypeError(
                f"Module.to: dtype {dtype} is not a floating format: use float16, bfloat16, float32 or float64"
            )
        return self._convert(dtype, device)

    def half(self):
        """All floating tensors to float16, in place; returns self."""
        return self._convert(float16)

    def bfloat16(self):
        """All floating tensors to bfloat16, in place; returns self."""
        return self._convert(bfloat16)

    def float(self):
        """All floating tensors to float32, in place; returns self."""
        return self._convert(float32)

    def double(self):
        """All floating tensors to float64, in place; returns self."""
        return self._convert(float64)

    def cuda(self, device=None):
        """Everything to the GPU, in place; returns self."""
        return self._convert(device="cuda" if device is None else device)

    def cpu(self):
        """Everything to main memory, in place; returns self."""
        return self._convert(device="cpu")

    # -- saving and loading

    def _tensors(self, prefix=""):
        """(name, persistent, tensor) of every parameter and buffer, a shared one under each of its names."""
        for name, p in self._parameters.items():
            if p is not None:
                yield prefix + name, True, p
        for name, b in self._buffers.items():
            if b is not None:
                yield prefix + name, name not in self._non_persistent, b
        for name, child in self._modules.items():
            if child is not None:
                yield from child._tensors(f"{prefix}{name}.")

    @announced("model.state_dict")
    def state_dict(self, *, prefix="", keep_vars=False):
        """OrderedDict from dotted name to Tensor, detached but sharing memory: copy it to keep a snapshot."""
        return OrderedDict(
            (name, t if keep_vars else t.detach())
            for name, persistent, t in self._tensors(prefix)
            if persistent
        )

    def load_state_dict(self, state_dict, strict=True):
        """Copy the tensors (or arrays) of `state_dict` into this module's, casting to its dtypes.

        strict=True: the names must be exactly this module's. RuntimeError lists every missing name, unexpected
        name, wrong shape and value that is no tensor, and then nothing was loaded. Returns (missing_keys,
        unexpected_keys).
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict: expected a dict of tensors, got {type(state_dict).__name__}")
        own = {name: t for name, persistent, t in self._tensors() if persistent}
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        errors, found = [], {}
        if strict and unexpected:
            errors.append("Unexpected key(s) in state_dict: " + ", ".join(f'"{n}"' for n in unexpected) + ".")
        if strict and missing:
            errors.append("Missing key(s) in state_dict: " + ", ".join(f'"{n}"' for n in missing) + ".")
        for name, t in own.items():
            if name in state_dict:
                value = state_dict[name]
                try:
                    array = numbers(name, value._data if isinstance(value, Tensor) else value)
                except TypeError as error:
                    errors.append(f"{error}.")
                    continue
                if array.shape != t.shape:
                    errors.append(
                        f"size mismatch for {name}: copying a param with shape {array.shape} from checkpoint, "
                        f"the shape in current model is {t.shape}."
                    )
                found[name] = array
        if errors:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self).__name__} (nothing was loaded):\n\t"
                + "\n\t".join(errors)
            )
        for name, array in found.items():
            found[name] = backends.cast(backends.move(array, own[name].device), own[name].dtype)
        for name, array in found.items():
            own[name]._data[...] = array
            own[name]._version[0] += 1
        return _IncompatibleKeys(missing, unexpected)

    # -- repr

    def extra_repr(self):
        """What stands between the parentheses of a layer's repr; layers override it."""
        return ""

    def __repr__(self):
        extra = self.extra_repr()
        lines = extra.split("\n") if extra else []
        children = [
            f"({name}): " + repr(child).replace("\n", "\n  ") for name, child in self._modules.items()
        ]
        if not children and len(lines) <= 1:
            return f"{type(self).__name__}({extra})"
        return f"{type(self).__name__}(\n  " + "\n  ".join(lines + children) + "\n)"


def zero_grad(p, set_to_none=True):
    """Drop p's gradient, or replace it by zeros; its master's (the same one, unscaled) is dropped."""
    if p.grad is not None:
        if set_to_none:
            p.grad = None
        else:
            p.grad = Tensor(backends.of(p.grad._data).zeros_like(p.grad._data))
    master = getattr(p, "master", None)
    if master is not None:
        master.grad = None
