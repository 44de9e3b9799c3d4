"""A walk over JSON of unknown making: where its values begin and end, without making them.

Outputs of 60 MB cost a second and no memory; arrays nested a million deep cost no stack. Only what `load` is asked for becomes
Python objects, and only if it is short. What is walked over is not checked further than brackets and quotes: nobody uses it.
"""

import json
import re

BRACKETS = 1_000_000  # opened and closed in one value: 0.8 s
VALUES = 50_000  # looked at one by one in a document: 0.5 s, 14 MB; a million costs 4 s and 250 MB

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SPACE = re.compile(rb"[ \t\r\n]*+")
_TEXT = re.compile(_STRING, re.DOTALL)
_PLAIN = re.compile(rb"[-+.0-9A-Za-z]++")  # a number, true, false, null
_TO_BRACKET = re.compile(rb'[^"\[\]{}]*+(?:' + _STRING + rb'[^"\[\]{}]*+)*+', re.DOTALL)


class NotJson(ValueError):
    """The bytes do not read as JSON, or have more structure than a document of the expected kind can have."""


def skip(data, at):
    """The position behind the value that begins at `at`."""
    first = data[at : at + 1]
    if first not in (b"[", b"{"):
        match = (_TEXT if first == b'"' else _PLAIN).match(data, at)
        if not match:
            raise _broken(data, len(data) if first == b'"' else at)
        return match.end()
    depth = 0
    for _ in range(BRACKETS):
        at = _TO_BRACKET.match(data, at).end()
        bracket = data[at : at + 1]
        if bracket in (b"", b'"'):  # the end, or a text without one
            raise _broken(data, len(data))
        depth += 1 if bracket in b"[{" else -1
        at += 1
        if not depth:
            return at
    raise NotJson(f"more than {BRACKETS:,} brackets")


def document(data):
    """Where the one value of a document begins. NotJson if there is none or more than one."""
    start = _space(data, len(b"\xef\xbb\xbf") if data.startswith(b"\xef\xbb\xbf") else 0)
    end = _space(data, skip(data, start))
    if end < len(data):
        raise _broken(data, end)
    return start


def items(data, at, room):
    """(begin, end) of each value of the array at `at`; none if that is no array. `room`: [how many values may still come]."""
    return ((start, end) for _, start, end in _inside(data, at, b"[]", room))


def members(data, at, room):
    """{key: (begin, end) of its value} of the object at `at`; empty if that is no object. Of equal keys the last counts."""
    return {key: (start, end) for key, start, end in _inside(data, at, b"{}", room)}


def load(data, span, most):
    """The value at `span`, made. NotJson if that has more than `most` bytes or is malformed."""
    start, end = span
    if end - start > most:
        raise NotJson(f"more than {most:,} bytes")
    try:
        return json.loads(data[start:end].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise NotJson(f"{type(error).__name__} at byte {start:,}") from None


def _inside(data, at, brackets, room):
    """(key, begin, end) of each value of an object, or (None, begin, end) of an array."""
    if data[at] != brackets[0]:
        return
    key, comma = None, False
    at = _space(data, at + 1)
    while comma or data[at : at + 1] != brackets[1:]:
        room[0] -= 1
        if room[0] < 0:
            raise NotJson(f"more than {VALUES:,} cells and entries")
        if brackets == b"{}":
            end = skip(data, at)
            key = load(data, (at, end), 1 << 10)
            at = _space(data, end)
            if type(key) is not str or data[at : at + 1] != b":":
                raise _broken(data, at)
            at = _space(data, at + 1)
        end = skip(data, at)
        yield key, at, end
        at = _space(data, end)
        comma = data[at : at + 1] == b","
        if comma:
            at = _space(data, at + 1)
        elif data[at : at + 1] != brackets[1:]:
            raise _broken(data, at)


def _space(data, at):
    return _SPACE.match(data, at).end()


def _broken(data, at):
    return NotJson("it ends too early" if at >= len(data) else f"unexpected at byte {at:,}")
