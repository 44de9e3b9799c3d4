"""The loops of the float16 casts: a few NumPy passes over pieces of flat arrays (formats.py has the casts themselves).

A pass runs at the speed of the second-level cache, so what counts is the number of passes, how many arrays each one touches,
and the size of the pieces: 32768 float32 (128 KiB) and two such pieces of scratch space fit a 1 MiB cache. A pass takes 2 us in
place, 3.6 from one piece into another, 4.5 from two into one of them, 6 into a third; looking for the largest takes 1.9. So the
calls themselves must be short: with a constant that is a 0-dim array one costs 0.3 us, with a Python int or a NumPy scalar,
which has to be made into one, 0.8.
"""

import threading

import numpy as np

PIECE = 32768


def _int(value):
    return np.array(value, np.int32)


def _float(value):
    return np.array(value, np.float32)


def _aligned(count):
    """`count` int32 arrays of one piece each that start with a cache line: NumPy's own start anywhere, which takes 5 % more."""
    room = np.empty((count + 1) * 4 * PIECE, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + count * 4 * PIECE].view(np.int32).reshape(count, PIECE)


_EXPONENT = _int(0x7F800000)  # float32's exponent bits, which are also infinity
_SIGN = _int(-0x80000000)
# half's smallest normal; NumPy's maximum with a scalar is three times slower
_TINY = _aligned(1)[0].view(np.float32)
_TINY[:] = 2.0**-14
_UP, _DOWN = _float(2.0**112), _float(2.0**-112)
_13, _31 = _int(13), _int(31)


def _max(a):
    """The largest of a piece of integers: 1.9 us, where NumPy's maximum takes 2.7."""
    return a[a.argmax()]


def _min(a):
    return a[a.argmin()]


class _Scratch(threading.local):
    """Two pieces of scratch space, as int32 and as float32: kept per thread, so that they stay in the cache.

    Right after a matrix product, whose blocks fill the cache, that takes a fifth off narrow and round_.
    """

    def __init__(self):
        ints = _aligned(2)
        self.arrays = (*ints, *ints.view(np.float32))

    def of(self, n):
        """The first n elements of each: two int32 arrays and two float32 arrays on the same memory."""
        return self.arrays if n == PIECE else [a[:n] for a in self.arrays]


_scratch = _Scratch()


def pieces(*arrays, times=1):
    """The arrays, all flat and of one length, cut alike, into pieces of `times` the usual size."""
    size = times * PIECE
    for start in range(0, arrays[0].size, size):
        yield [x[start : start + size] for x in arrays]


_MAGNITUDE = _int(-0x70000001)  # 0x8FFFFFFF: the sign and the low 28 bits


def widen(source, target):
    """Half's exponent and mantissa, moved into float32's place, are the value times 2^-112."""
    # It needs no scratch space, so twice the size fits, with half the calls: a sixth less time.
    for h, y, bits in pieces(source.view(np.int16), target, target.view(np.int32), times=2):
        high = positive = _max(h.view(np.uint16))
        bits[...] = h  # the sign extends to the left: int16 0x8000 becomes 0xFFFF8000
        np.left_shift(bits, _13, bits)
        if high >= 0x8000:  # some sign is set; after a relu there is none
            np.bitwise_and(bits, _MAGNITUDE, bits)
            positive = _max(h)
        np.multiply(y, _UP, y)
        if high >= 0xFC00 or positive >= 0x7C00:  # exponent 31 came out as 2^16 times the mantissa
            special = np.flatnonzero((h & 0x7FFF) >= 0x7C00)
            y[special] = h[special].view(np.float16).astype(np.float32)


_COUNT = _float(2.0**13 * (1 + 0x0800 * 2.0**-23))
# turns the start of the count for x > 0 into that for x < 0
_NEGATIVE = _int(-0x80000000 + (0x0800 ^ 0x87FC))


def narrow(source, target):
    """float32 to half in one addition per element, for normals, subnormals and overflow alike.

    Let 2^e be the power of two at or below |x|, but not below half's smallest normal 2^-14. In |x| + 2^(e+13)
    the last bit of float32 is worth 2^(e-10), half's spacing at x: the processor's own rounding is the one
    wanted, and the low bits of the sum count half's steps. Adding e in half's exponent field, into which a
    count of 1024 carries, gives the pattern. What is added is the addend, shifted, whose field holds e + 13 + 127
    in place of e + 14: that is -0x0800 modulo 2^16, so the count starts at 0x0800. For negative x the addend is
    negative and the count starts 0x8000 higher, for half's sign bit, and 4 lower, which is 0x8000 shifted.
    """
    for x, bits, h in pieces(source, source.view(np.int32), target.view(np.int16)):
        addend, total, addend_f, total_f = _scratch.of(x.size)
        np.bitwise_and(bits, _EXPONENT, addend)
        high, finite = _max(addend), x
        np.maximum(addend_f, _TINY[: x.size], out=addend_f)
        if high >= 143 << 23:  # 65536: all from here on is inf, and so is 65536 itself
            np.minimum(addend, 143 << 23, out=addend)
            finite = np.clip(x, -65536.0, 65536.0)
        np.multiply(addend_f, _COUNT, addend_f)
        np.right_shift(bits, _31, total)
        np.bitwise_and(total, _NEGATIVE, total)
        np.bitwise_xor(addend, total, addend)
        np.add(finite, addend_f, total_f)
        np.right_shift(addend, _13, addend)
        np.add(addend, total, addend)
        np.copyto(h, addend, casting="unsafe")  # the low 16 bits
        if high == _EXPONENT:
            nan = np.flatnonzero(np.isnan(x))
            h[nan] = x[nan].astype(np.float16).view(np.int16)


_ABOVE = _float(1.5 * 2.0**13)
# The bits of -2^-24. As int32 those of -0 are the smallest of all, and they grow with the magnitude.
_TINY_NEGATIVE = -0x80000000 + (103 << 23)


def round_(source, target):
    """float32 rounded to half's grid, kept in float32: the same addition, undone. `target` may be `source`.

    The addend is 1.5 * 2^(e+13), so that both signs stay in one binade.
    """
    for x, bits, y in pieces(source, source.view(np.int32), target):
        exponent, sign, power, _ = _scratch.of(x.size)
        np.bitwise_and(bits, _EXPONENT, exponent)
        low, high = _min(exponent), _max(exponent)
        # up to -2^-25, and a little above: results of -0, whose sign the sum forgets
        signed = low < 103 << 23 and _min(bits) < _TINY_NEGATIVE
        if low < 113 << 23:  # below 2^-14
            np.maximum(power, _TINY[: x.size], out=power)
        if high >= 142 << 23:  # from 32768 on the result may be inf; inf and NaN need a finite power of two
            np.minimum(power, 65536.0, out=power)
        if signed:
            np.bitwise_and(bits, _SIGN, sign)
        np.multiply(power, _ABOVE, power)
        np.add(x, power, y)
        np.subtract(y, power, y)
        if signed:
            np.bitwise_or(y.view(np.int32), sign, y.view(np.int32))
        if high >= 142 << 23:
            np.multiply(y, _UP, y)  # 65536 times 2^112 is float32's first infinity
            np.multiply(y, _DOWN, y)
