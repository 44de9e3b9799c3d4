"""Sequential, ModuleList and ModuleDict: modules in order. ParameterList: parameters in order."""

import operator

from minamp.nn.module import Module, Parameter


def _name_at(owner, table, i):
    """The name of what stands at place i of a table."""
    i = operator.index(i)
    if not -len(table) <= i < len(table):
        what = "modules" if table is owner._modules else "parameters"
        raise IndexError(f"{type(owner).__name__}: index {i} is out of range, it has {len(table)} {what}")
    return list(table)[i]


class _Ordered(Module):
    """Modules named "0", "1", ... that index, slice, iterate and grow like a list."""

    def __getitem__(self, i):
        if isinstance(i, slice):
            return self._slice(list(self._modules.items())[i])
        return self._modules[_name_at(self, self._modules, i)]

    def __setitem__(self, i, module):
        self.add_module(_name_at(self, self._modules, i), module)

    def __delitem__(self, i):
        del self._modules[_name_at(self, self._modules, i)]
        modules = list(self._modules.values())
        self._modules.clear()
        self.extend(modules)

    def __len__(self):
        return len(self._modules)

    def __iter__(self):
        return iter(self._modules.values())

    def append(self, module):
        """Add one module at the end; returns self."""
        self.add_module(str(len(self)), module)
        return self

    def extend(self, modules):
        """Add modules at the end; returns self."""
        modules = list(modules)
        for i, module in enumerate(modules, len(self)):
            self._check_module(str(i), module)
        for module in modules:
            self.append(module)
        return self

    def insert(self, i, module):
        """Put a module before position i."""
        i = operator.index(i)
        self.append(module)  # under one name more, which refuses what is no module
        *modules, module = self
        modules.insert(i, module)
        self._modules.update(zip(list(self._modules), modules, strict=True))


class Sequential(_Ordered):
    """Modules called one after the other: Sequential(a, b, ...) or Sequential(dict(name=module, ...))."""

    def __init__(self, *modules):
        super().__init__()
        if len(modules) == 1 and isinstance(modules[0], dict):
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            self.extend(modules)

    def _slice(self, items):
        return Sequential(dict(items))

    def forward(self, x):
        for module in self._modules.values():
            x = module(x)
        return x


class ModuleList(_Ordered):
    """A list of modules whose parameters count as the owner's; it has no forward of its own."""

    def __init__(self, modules=()):
        super().__init__()
        self.extend(modules)

    def _slice(self, items):
        return ModuleList(module for _, module in items)


class ModuleDict(Module):
    """A dict of modules whose parameters count as the owner's; it has no forward of its own.

    Its keys are names, so none holds a dot, and none is an attribute's, such as "keys".
    """

    def __init__(self, modules=None):
        super().__init__()
        if modules is not None:
            self.update(modules)

    def _name(self, key):
        if key not in self._modules:
            raise KeyError(f"ModuleDict: no module is called {key!r}: it has {', '.join(self) or 'none'}")
        return key

    def __getitem__(self, key):
        return self._modules[self._name(key)]

    def __setitem__(self, key, module):
        self.add_module(key, module)

    def __delitem__(self, key):
        del self._modules[self._name(key)]

    def __contains__(self, key):
        return key in self._modules

    def __len__(self):
        return len(self._modules)

    def __iter__(self):
        return iter(self._modules)

    def keys(self):
        return self._modules.keys()

    def values(self):
        return self._modules.values()

    def items(self):
        return self._modules.items()

    def update(self, modules):
        """Add the modules of a dict, of a ModuleDict or of (name, module) pairs."""
        try:
            modules = dict(modules)
        except (TypeError, ValueError) as error:
            raise type(error)(f"ModuleDict.update: {error}: give a dict or (name, module) pairs") from None
        for name, module in modules.items():
            self._check_module(name, module)
        self._modules.update(modules)

    def pop(self, key):
        """Take the module of that name out; returns it."""
        return self._modules.pop(self._name(key))

    def clear(self):
        """Take all modules out."""
        self._modules.clear()


class ParameterList(Module):
    """A list of Parameters that count as the owner's, named "0", "1", ...; a Tensor is made a Parameter."""

    def __init__(self, values=()):
        super().__init__()
        self.extend(values)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return ParameterList(list(self)[i])
        return self._parameters[_name_at(self, self._parameters, i)]

    def __setitem__(self, i, value):
        self._parameters[_name_at(self, self._parameters, i)] = _parameter(value)

    def __len__(self):
        return len(self._parameters)

    def __iter__(self):
        return iter(self._parameters.values())

    def append(self, value):
        """Add one at the end; returns self."""
        self._parameters[str(len(self))] = _parameter(value)
        return self

    def extend(self, values):
        """Add several at the end; returns self."""
        for value in [_parameter(v) for v in values]:
            self.append(value)
        return self


def _parameter(value):
    return value if isinstance(value, Parameter) else Parameter(value)
