"""Writes in place: what a tensor may be given, and what becomes of its history and of the count of writes.

Every way to write ends in `_write` or `_put`, or counts by itself; the ops' in-place forms (methods.py) end there too. What a
write does to the histories of all that share the memory is in views.py.
"""

import numpy as np

from minamp import backends, views
from minamp.devices import same_device
from minamp.draw import exponential, normal, source, uniform
from minamp.formats import cast, is_floating
from minamp.keys import as_taken, ints_first, masks, picks, plain_key, without_idle_ellipsis
from minamp.methods import OPS, Methods
from minamp.numbers import check_fits, numbers
from minamp.record import grad_mode


class Writes:
    """What Tensor inherits of this file."""

    __slots__ = ()

    def _write(self, result, name):
        """What an op made, in the record or not, into this tensor's memory; its history, if it has one, becomes this one's."""
        if self._is_view:
            views.follow(self)
        if grad_mode.enabled and self.requires_grad and self.is_leaf:
            raise RuntimeError(
                f"{name}: in-place write to a leaf that requires grad: do it under minamp.no_grad()"
            )
        if result.shape != self.shape:
            raise RuntimeError(
                f"{name}: the result has shape {result.shape}, this tensor {self.shape}: use the out-of-place op"
            )
        # floats hold integers, and integers hold bools
        kind, own = ((is_floating(d), d.kind != "b") for d in (result.dtype, self.dtype))
        if kind > own:
            raise RuntimeError(
                f"{name}: result type {result.dtype} can't be written into a {self.dtype} tensor: "
                f"use x.to(minamp.{result.dtype}) first"
            )
        self._check_writeable(name)
        recorded = grad_mode.enabled and (self.requires_grad or result.requires_grad)
        if recorded and result.requires_grad:
            result._node.keep(self._data)
        if result.dtype != self.dtype:
            result = OPS["to"].plain(result, self.dtype)
        if recorded and self._origin is not None:
            views.write(self, result, name)
            return
        self._data[...] = result._data
        self._version[0] += 1
        if recorded and result.requires_grad:
            self._node = result._node

    def _check_writeable(self, name):
        data = self._data
        shared = any(n > 1 and not step for n, step in zip(data.shape, data.strides, strict=True))
        if shared and data.size or not getattr(data.flags, "writeable", True):
            raise RuntimeError(
                f"{name}: several elements of this tensor share one place in memory (expand): write to x.clone()"
            )

    def _put(self, key, value, name):
        """Write `value` at `key` as an op of the record: what stood there then has a gradient of 0."""
        # never autocast, and `key` may hold slices: past index_put's own argument checks
        self._write(OPS["index_put"]._run((self, value), {"key": key, "accumulate": False}), name)

    def copy_(self, other, non_blocking=False):
        """Write `other` (broadcast, cast to this dtype) here. What was here before then has a gradient of 0."""
        other = other if isinstance(other, Methods) else self._holding(numbers("copy_", other))
        result = OPS["expand"].plain(other.to(self.device), self.shape)
        if result.dtype != self.dtype:
            result = OPS["to"].plain(result, self.dtype)
        if grad_mode.enabled and self.requires_grad:
            self._put(Ellipsis, result, "copy_")
        else:
            self._write(result, "copy_")
        return self

    def fill_(self, value):
        """Write a number, or a 0-dim tensor, everywhere. RuntimeError for a number that the dtype can't hold, as in torch."""
        value = value if isinstance(value, Methods) else numbers("fill_", value)
        if value.ndim:
            raise RuntimeError(f"fill_: value must be a number or 0-dim, got shape {value.shape}: use copy_")
        if not isinstance(value, Methods):
            check_fits("fill_", value.item(), self.dtype)
            value = self._holding(backends.of(self._data).full(self.shape, value.item(), self.dtype))
        return self.copy_(value)

    def zero_(self):
        return self.fill_(0)

    def normal_(self, mean=0.0, std=1.0, *, generator=None):
        """Normal values everywhere."""
        return self.copy_(self._holding(normal("normal_", self.shape, self.dtype, generator) * std + mean))

    def uniform_(self, a=0.0, b=1.0, *, generator=None):
        """Uniform values in [a, b) everywhere: what rounds up to b becomes a, as in PyTorch."""
        values = cast(uniform("uniform_", self.shape, self.dtype, generator) * (b - a) + a, self.dtype)
        low, high = cast(np.array([a, b], np.float64), self.dtype)
        return self.copy_(self._holding(np.where(values == high, low, values)))

    def exponential_(self, lambd=1.0, *, generator=None):
        """Exponentially distributed values everywhere, of mean 1 / lambd. ValueError for lambd of 0 or less."""
        if not lambd > 0:
            raise ValueError(f"exponential_: lambd must be above 0, got {lambd}")
        return self.copy_(
            self._holding(exponential("exponential_", self.shape, self.dtype, generator) / lambd)
        )

    def bernoulli_(self, p=0.5, *, generator=None):
        """1 with probability p everywhere, else 0. ValueError for p outside [0, 1]."""
        if not 0 <= p <= 1:
            raise ValueError(f"bernoulli_: p must lie in [0, 1], got {p}")
        return self.copy_(self._holding((source(generator).random(self.shape) < p).astype(self.dtype)))

    def __setitem__(self, key, value):
        key = without_idle_ellipsis(plain_key(key, self), self.ndim)
        one = not getattr(value, "ndim", 0)  # a number; a tensor is one only for masks
        if isinstance(value, Methods):
            one = value.numel() == 1 and masks(key)
        else:
            if isinstance(value, int | float):
                if not is_floating(self.dtype):
                    check_fits("x[key] = value", value, self.dtype)
                value = self._holding(backends.of(self._data).full((), value, self.dtype))
            else:
                value = self._holding(backends.move(numbers("x[key] = value", value), self.device))
        if value.ndim:
            same_device("x[key] = value", x=self, value=value)
        elif not value.device.same(self.device):  # a number, wherever it lies
            value = value.to(self.device)
        if value.dtype != self.dtype and picks(key) and not one:
            raise RuntimeError(
                f"x[index] = value: value is {value.dtype}, x {self.dtype}: cast it with value.to(x.dtype)"
            )
        value = as_taken(key, self, value.to(self.dtype))
        if steps := ints_first(key):
            key, rest = steps
            part = self[key].clone()
            part[rest] = value
            value = part
        if grad_mode.enabled and (self.requires_grad or value.requires_grad):
            self._put(key, value, "x[key] = value")
            return
        self._check_writeable("x[key] = value")
        try:
            backends.of(self._data).assign(self._data, key, value._data)
        except ValueError as error:
            raise RuntimeError(
                f"x[key] = value: value of shape {value.shape} doesn't fit x of shape {self.shape} there: {error}"
            ) from None
        self._version[0] += 1
