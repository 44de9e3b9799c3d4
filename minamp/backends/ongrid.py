"""A half array held as float32 on half's grid: for weights under autocast, which are multiplied and hardly ever looked at."""

import numpy as np


class OnGrid:
    """Reads like a float16 array. Its values are kept in `wide`, float32 and read-only; the 16-bit words are made when asked for.

    The half copy of a weight is widened for every product with it, so on the CPU its words would be packed for nothing:
    rounding takes 0.8 ms per million, packing and widening twice 2.4. `wide` costs 4 bytes per weight until the backward has
    passed, where the words and one widened copy at a time cost 2 and 4.
    """

    __slots__ = ("wide", "_words")
    dtype, itemsize = np.dtype(np.float16), 2
    shape = property(lambda self: self.wide.shape)
    ndim = property(lambda self: self.wide.ndim)
    size = property(lambda self: self.wide.size)
    nbytes = property(lambda self: self.wide.nbytes)  # what it takes, for those who count memory
    base = property(lambda self: self.wide)
    __array_interface__ = property(lambda self: self.wide.__array_interface__)

    def __init__(self, wide):
        self.wide, self._words = wide, None
        wide.flags.writeable = False

    def words(self):
        """The float16 array."""
        if self._words is None:
            self._words = self.wide.astype(self.dtype)
        return self._words

    def astype(self, dtype):
        return self.wide if dtype == np.float32 else self.words().astype(dtype)

    def swapaxes(self, a, b):
        return OnGrid(self.wide.swapaxes(a, b))

    def reshape(self, *shape, **order):
        return OnGrid(self.wide.reshape(*shape, **order))

    def __array__(self, dtype=None, copy=None):
        return np.array(self.words(), dtype=dtype, copy=copy)

    def __getitem__(self, key):
        return self.words()[key]

    def __setitem__(self, key, value):
        words = self.words().copy()
        words[key] = value
        self._words, self.wide = words, words.astype(np.float32)

    def __getattr__(self, name):
        return getattr(self.words(), name)
