"""Sequential and ModuleList: modules in order."""

import operator

from minamp.nn.module import Module


class _Ordered(Module):
    """Modules named "0", "1", ... that index, slice, iterate and grow like a list."""

    def _name(self, i):
        names = list(self._modules)
        i = operator.index(i)
        if not -len(names) <= i < len(names):
            raise IndexError(f"{type(self).__name__}: index {i} is out of range, it has {len(names)} modules")
        return names[i]

    def __getitem__(self, i):
        if isinstance(i, slice):
            return self._slice(list(self._modules.items())[i])
        return self._modules[self._name(i)]

    def __setitem__(self, i, module):
        setattr(self, self._name(i), module)

    def __delitem__(self, i):
        del self._modules[self._name(i)]
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
        for module in modules:
            self.append(module)
        return self


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

    def insert(self, i, module):
        """Put a module before position i."""
        modules = list(self)
        modules.insert(i, module)
        self._modules.clear()
        self.extend(modules)
