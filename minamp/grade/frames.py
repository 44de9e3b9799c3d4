"""The wire between grader and sandbox: plain values and NumPy arrays as bytes. Both sides use this file, the standard library
and NumPy, nothing else.

    4 bytes  length of the header            a frame, little endian
    4 bytes  length of the payload
    header   JSON: {"arrays": [[dtype, shape, writeable], ...], "value": tree}
    payload  the arrays' bytes one after another, in C order

In the tree None, booleans, integers, floats and strings stand for themselves; everything else is an object with one key:
{"list": [...]}, {"tuple": [...]}, {"dict": [[key, tree], ...]}, {"array": k} and {"scalar": k} (number k of the arrays). An array
that occurs twice is one array on the other side too.

Whoever reads trusts nothing: each length is checked against its cap and against what the header announces before memory is
taken for it, and whatever does not fit is a FrameError.
"""

import json
import math
import struct
import time

import numpy as np

HEADER = 1 << 20  # bytes of JSON
PAYLOAD = 64 << 20  # bytes of arrays
ARRAYS = 256
VALUES = 100_000
DEPTH = 16  # of lists in lists
DIMS = 32
BITS = 64  # of a Python integer: a larger one can make the grader compute for hours
DTYPES = {np.dtype(code).str for code in "?bhiqBHIQefd"}


class FrameError(Exception):
    """The bytes that arrived are no frame."""


class NotPlain(TypeError):
    """A value that does not cross. The text says which and what would."""


def send(channel, value, until=None):
    """Send `value` over the socket `channel`; the arrays in it, in the order of the frame, are returned.

    `until`: the time (time.monotonic) by which it must be done. NotPlain, TimeoutError; EOFError if nobody listens.
    """
    frame, arrays = pack(value)
    try:
        channel.settimeout(_left(until))
        channel.sendall(frame)
    except ConnectionError as error:
        raise EOFError("the channel is closed") from error
    return arrays


def receive(channel, until=None):
    """The next value and the list of its arrays. FrameError, TimeoutError; EOFError if the channel is closed."""
    header, payload = struct.unpack("<II", _read(channel, 8, until))
    if header > HEADER or payload > PAYLOAD:
        raise FrameError(f"a frame of {header} + {payload} bytes")
    tree, table = _header(_read(channel, header, until), payload)
    arrays = _arrays(_read(channel, payload, until), table)
    return _value(tree, arrays, [VALUES], DEPTH), arrays


def pack(value):
    """The frame of `value` as bytes, and the arrays in it. NotPlain names what does not cross."""
    arrays = []
    tree = _tree(value, arrays, {}, [VALUES], DEPTH)
    size = sum(array.nbytes for array in arrays)
    if len(arrays) > ARRAYS or size > PAYLOAD:
        raise NotPlain(
            f"{len(arrays)} arrays of {size >> 20} MiB; at most {ARRAYS} of {PAYLOAD >> 20} MiB may cross"
        )
    table = [[array.dtype.str, array.shape, bool(array.flags.writeable)] for array in arrays]
    header = json.dumps({"arrays": table, "value": tree}).encode("ascii")
    if len(header) > HEADER:
        raise NotPlain(f"lists or text of {len(header)} bytes; at most {HEADER} may cross outside arrays")
    return b"".join(
        [struct.pack("<II", len(header), size), header, *(array.tobytes() for array in arrays)]
    ), arrays


def _tree(value, arrays, known, room, depth):
    """`value` as JSON data; arrays are put into `arrays`, `known` is {id: number} of those that are there already."""
    room[0] -= 1
    if room[0] < 0 or depth < 0:
        raise NotPlain(f"more than {VALUES} values, or lists nested deeper than {DEPTH}")
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        if value.bit_length() > BITS:
            raise NotPlain(f"an integer of more than {BITS} bits")
        return value
    if type(value) is np.ndarray:
        return {"array": _number(value, value, arrays, known)}
    if isinstance(value, np.generic):
        return {"scalar": _number(value, np.array(value), arrays, known)}
    for kind in (list, tuple):
        if isinstance(value, kind):
            return {
                kind.__name__: [_tree(item, arrays, known, room, depth - 1) for item in kind.__iter__(value)]
            }
    if isinstance(value, dict):
        if not all(type(key) is str for key in dict.keys(value)):
            raise NotPlain("a dict with keys that are no strings")
        return {
            "dict": [[key, _tree(item, arrays, known, room, depth - 1)] for key, item in dict.items(value)]
        }
    raise NotPlain(
        f"a value of type {type(value).__name__}; None, bool, int, float, str, NumPy arrays and scalars, and lists, tuples "
        "and dicts of these may cross"
    )


def _number(value, array, arrays, known):
    if id(value) not in known:
        if array.dtype.str not in DTYPES:
            raise NotPlain(
                f"an array of dtype {array.dtype}; booleans, integers and floats of up to 64 bits may cross"
            )
        known[id(value)] = len(arrays)
        arrays.append(array)
    return known[id(value)]


def _left(until):
    """Seconds until then, at least a little: a timeout of 0 would mean not to wait at all."""
    return None if until is None else max(until - time.monotonic(), 1e-3)


def _read(channel, size, until):
    """Exactly `size` bytes."""
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        # byte after byte would keep every single wait short
        if until is not None and time.monotonic() > until:
            raise TimeoutError
        channel.settimeout(_left(until))
        try:
            more = channel.recv_into(view[have:])
        except ConnectionError as error:
            raise EOFError("the channel is closed") from error
        if not more:
            raise EOFError("the channel is closed")
        have += more
    return data


def _header(data, payload):
    """The tree and the table of arrays, whose sizes must add up to `payload` bytes."""
    try:
        header = json.loads(data.decode("utf-8"))
        tree, table = header["value"], header["arrays"]
        if len(header) != 2 or len(table) > ARRAYS:
            raise FrameError("a header with other entries or too many arrays")
        for dtype, shape, writeable in table:
            sound = dtype in DTYPES and type(writeable) is bool and type(shape) is list and len(shape) <= DIMS
            if not (sound and all(type(n) is int and 0 <= n <= PAYLOAD for n in shape)):
                raise FrameError("an array that cannot be")
            payload -= np.dtype(dtype).itemsize * math.prod(shape)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FrameError(f"a header that cannot be read: {type(error).__name__}") from None
    if payload:
        raise FrameError("arrays of another size than announced")
    return tree, table


def _arrays(payload, table):
    arrays, at = [], 0
    for dtype, shape, writeable in table:
        try:
            array = np.ndarray(shape, dtype, payload, at).copy()
        except ValueError as error:  # no bytes, but dimensions whose product NumPy cannot hold
            raise FrameError("an array that cannot be") from error
        array.flags.writeable = writeable
        arrays.append(array)
        at += array.nbytes
    return arrays


def _value(tree, arrays, room, depth):
    """The value that a tree stands for."""
    room[0] -= 1
    if room[0] < 0 or depth < 0:
        raise FrameError("too many values or too deep")
    if tree is None or type(tree) in (bool, float, str) or (type(tree) is int and tree.bit_length() <= BITS):
        return tree
    if type(tree) is not dict or len(tree) != 1:
        raise FrameError("an unknown value")
    (kind, inner), *_ = tree.items()
    if kind in ("array", "scalar"):
        if type(inner) is not int or not 0 <= inner < len(arrays):
            raise FrameError("an array that is not there")
        if kind == "array":
            return arrays[inner]
        if arrays[inner].ndim:
            raise FrameError("a scalar with dimensions")
        return arrays[inner][()]
    if kind not in ("list", "tuple", "dict") or type(inner) is not list:
        raise FrameError("an unknown value")
    if kind != "dict":
        items = [_value(item, arrays, room, depth - 1) for item in inner]
        return items if kind == "list" else tuple(items)
    if not all(type(pair) is list and len(pair) == 2 and type(pair[0]) is str for pair in inner):
        raise FrameError("a dict that cannot be")
    return {key: _value(item, arrays, room, depth - 1) for key, item in inner}
