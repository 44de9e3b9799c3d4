"""The grader: what hostile submissions get, and that they get at nothing. The submissions are in grading/hostile."""

import contextlib
import json
import os
import random
import re
import socket
import struct
import threading
import tracemalloc

import numpy as np
import pytest
from grading import ordinary, tiny
from grading.hostile import THEMES

from minamp.grade import frames, submission, walk
from minamp.grade.one import grade_one, shown
from minamp.grade.sandbox import Sandbox, SandboxError, _reason
from minamp.grade.student import answers_behind


def hostile(*arguments):
    """What python -m grading.hostile says, run by an ordinary user."""
    from grading.hostile.cheats import SECRET

    run = ordinary.run("-m", "grading.hostile", *arguments, SECRET=SECRET)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("theme", THEMES)
def test_hostile_submissions_get_their_marks_and_reasons_and_nothing_else(theme, sandbox):
    out = hostile("--grade", theme)
    assert out["faults"] == {}
    assert out["executed"] == [], "the grader's process executed what a student wrote"
    assert not out["deaf"], "the watch over what is executed did not hear a call that it must hear"
    assert not out["left over"], "a process of a student's is still there"


def test_nothing_outlives_a_grader_that_is_killed(sandbox):
    assert hostile("--kill") == {"left over": False}


# --- the wire


def through(value):
    here, there = socket.socketpair()
    with here, there:
        frames.send(here, value)
        return frames.receive(there)


def same(a, b):
    """Whether two plain values are the same bit by bit, type by type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b or a != a and b != b


DTYPES = "? i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8".split()


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -(2**64) + 1,
        2**64 - 1,
        1.5,
        -0.0,
        float("inf"),
        float("nan"),
        "",
        "\0 \ud800 é",
        [],
        (),
        {},
    ]
    + [[1, (2.0, "x"), {"a": [None], "": ()}]]
    + [np.arange(-3, 3).astype(dtype) for dtype in DTYPES]
    + [np.ones(3, dtype)[0] for dtype in DTYPES]
    + [np.zeros(()), np.zeros((0, 3)), np.zeros((2, 1, 3))]
    + [np.arange(12).reshape(3, 4)[::2, 1::2].T, np.array([0x7FC1, 0xFFC1, 0x7F81], "u2").view("f2")],
    ids=repr,
)
def test_plain_values_cross_unchanged(value):
    assert same(through(value)[0], value)


def test_an_array_that_occurs_twice_is_one_array_on_the_other_side():
    x = np.zeros(3)
    x.flags.writeable = False
    (a, [b], c), arrays = through((x, [x], x.copy()))
    assert a is b and a is not c and len(arrays) == 2
    assert not a.flags.writeable and c.flags.writeable


FRAME = frames.pack({"a": [1, "x"], "b": (np.arange(3.0), np.float16(2)), "c": [np.zeros((2, 0, 3))]})[0]


def received(data):
    """What reading these bytes brings: a value, or the class of the exception."""
    here, there = socket.socketpair()

    def write():
        with here, contextlib.suppress(OSError):  # who reads may have hung up
            here.sendall(data)

    writer = threading.Thread(target=write)  # a channel holds 200 kB
    writer.start()
    try:
        return frames.receive(there)[0]
    except Exception as error:
        return type(error)
    finally:
        there.close()
        writer.join()


def framed(header, payload=b"", size=None):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<II", len(header), len(payload) if size is None else size) + header + payload


ARRAY = {"arrays": [["<f4", [2], True]], "value": {"array": 0}}


@pytest.mark.parametrize(
    "data",
    [
        framed(b""),
        framed(b"{"),
        framed(b"\xff\xfe"),
        framed(b"[" * 10**6),
        framed(b"9" * 10**5),
        framed(b'{"arrays": [], "value": ' + b"9" * 400 + b"}"),
        framed(b'{"arrays": [], "value": ' + b"[" * 900 + b"]" * 900 + b"}"),
        framed([]),
        framed(3),
        framed({"arrays": []}),
        framed({"arrays": [], "value": 1, "more": 1}),
        framed({"arrays": {}, "value": [1]}),
        framed({"arrays": 3, "value": 1}),
        framed({"arrays": ["abc"], "value": 1}),
        framed({"arrays": [["<f4", [0], True]] * 257, "value": 1}),
        framed(ARRAY),
        framed(ARRAY, bytes(7)),
        framed(ARRAY, bytes(9)),
        framed(ARRAY | {"arrays": [["<f4", [2], 1]]}, bytes(8)),
        framed(ARRAY | {"arrays": [["<f4", [-2], True]]}, bytes(8)),
        framed(ARRAY | {"arrays": [["<f4", [2.0], True]]}, bytes(8)),
        framed(ARRAY | {"arrays": [["<f4", [True], True]]}, bytes(4)),
        framed(ARRAY | {"arrays": [["<f4", 2, True]]}, bytes(8)),
        framed(ARRAY | {"arrays": [["<f4", [1] * 33, True]]}, bytes(4)),
        framed(ARRAY | {"arrays": [["<f4", [0, 2**40], True]]}),
        framed(ARRAY | {"arrays": [["<f4", [0] + [2**26] * 31, True]]}),
        *(
            framed(ARRAY | {"arrays": [[dtype, [1], True]]}, bytes(8))
            for dtype in ["|O", "O", "<c8", "|V8", "<U2", "M8[s]", ["<f4"], 3]
        ),
        *(framed(ARRAY | {"value": {"array": k}}, bytes(8)) for k in [1, -1, True, "0", None, 0.0]),
        framed(ARRAY | {"value": {"scalar": 0}}, bytes(8)),
        *(
            framed({"arrays": [], "value": tree})
            for tree in [[], {}, {"list": 3}, {"set": []}, {"list": [], "tuple": []}]
        ),
        *(
            framed({"arrays": [], "value": {"dict": pairs}})
            for pairs in [{}, [1], [["a"]], [[1, 2]], [["a", 1, 2]]]
        ),
        framed({"arrays": [], "value": {"list": [None] * 100_000}}),
        framed(b'{"arrays": [], "value": ' + b'{"list": [' * 18 + b"]}" * 18 + b"}"),
        struct.pack("<II", frames.HEADER + 1, 0),
        struct.pack("<II", 2, frames.PAYLOAD + 1),
        struct.pack("<II", 2**32 - 1, 2**32 - 1),
    ],
    ids=lambda data: f"{len(data)}-{data[8:60]!r}",
)
def test_hostile_bytes_are_a_frame_error(data):
    assert received(data) is frames.FrameError


def test_a_frame_that_is_cut_off_is_the_end_of_the_channel():
    assert {received(FRAME[:n]) for n in range(len(FRAME))} == {EOFError}


def test_random_bytes_bring_a_plain_value_or_a_named_error():
    chance = random.Random(0)
    outcomes = set()
    for _ in range(3000):
        data = bytearray(FRAME)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = (
                chance.choice(b'\x00\xff{}[]",:019aT') if chance.random() < 0.7 else chance.randrange(256)
            )
        outcome = received(bytes(data))
        outcomes.add(outcome if isinstance(outcome, type) else "a value")
    assert outcomes == {"a value", frames.FrameError, EOFError}


def test_memory_is_taken_only_for_what_is_announced_and_allowed():
    tracemalloc.start()
    giant = framed({"arrays": [["<f8", [2**26] * 32, True]], "value": 1}, size=frames.PAYLOAD)
    assert received(struct.pack("<II", 2**32 - 1, 2**32 - 1)) is frames.FrameError
    assert received(giant) is frames.FrameError
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_waiting_for_a_frame_has_one_deadline():
    here, there = socket.socketpair()
    with here, there:
        here.sendall(FRAME[:-1])
        with pytest.raises(TimeoutError):
            frames.receive(there, until=0.0)
        with pytest.raises(TimeoutError):
            frames.send(there, np.zeros(2**20), until=0.0)


# --- reading what was handed in


def documents(chance, depth=0):
    kind = chance.randrange(8 if depth < 4 else 5)
    if kind < 5:
        return [
            None,
            True,
            chance.randint(-99, 99),
            chance.random(),
            'a "q" \\ [{}] é\n' * chance.randint(0, 2),
        ][kind]
    if kind == 5:
        return [documents(chance, depth + 1) for _ in range(chance.randint(0, 4))]
    return {
        chance.choice('"]}:,') + str(n): documents(chance, depth + 1) for n in range(chance.randint(0, 4))
    }


def walked(data, at):
    """The document that a walk finds, down to its leaves."""
    if data[at : at + 1] == b"{":
        return {key: walked(data, start) for key, (start, _) in walk.members(data, at, [walk.VALUES]).items()}
    if data[at : at + 1] == b"[":
        return [walked(data, start) for start, _ in walk.items(data, at, [walk.VALUES])]
    return walk.load(data, (at, walk.skip(data, at)), 1000)


def test_a_walk_finds_what_json_finds():
    chance = random.Random(0)
    for _ in range(300):
        document = documents(chance)
        for options in ({}, {"indent": 1}, {"ensure_ascii": False, "separators": (",", ":")}):
            data = json.dumps(document, **options).encode()
            assert walked(data, walk.document(data)) == document


def test_no_file_makes_reading_raise(tmp_path):
    chance = random.Random(0)
    whole = json.dumps(tiny.notebook(), indent=1).encode()
    path = tmp_path / "tiny.ipynb"
    problems = set()
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data))
            data[at : at + chance.choice([0, 1, 1, 40])] = chance.choice(
                [b"", b"[", b"]", b"{", b"}", b'"', b",", b"\\", b"\0", b"\xff"]
            )
        path.write_bytes(data)
        found = submission.read(path, tiny.TINY)
        problems.add(found.problem)
        assert found.answers.keys() | found.lost.keys() == tiny.ANSWERS.keys()
    assert len(problems) > 100 and None in problems


def test_a_written_answer_is_passed_on_and_a_second_one_added(tmp_path):
    notebook = tiny.notebook(written="Because.\n\x1b[2J")
    notebook["cells"].append(tiny.cell("why", "And so.", solution=True, points=5, kind="markdown"))
    notebook["cells"] = [
        cell for cell in notebook["cells"] if cell["metadata"]["nbgrader"]["grade_id"] not in tiny.ANSWERS
    ]
    path = tmp_path / "tiny.ipynb"
    path.write_text(json.dumps(notebook))
    result = grade_one(tiny.TINY, path, Sandbox(), seed=0)  # without an answer there is nothing to run
    assert result.written == {"why": "Because.\n\ufffd[2J\n\nAnd so."}
    assert "none of the answer cells of tiny" in result.problem
    assert [(mark.id, mark.points, mark.of) for mark in result.marks] == [
        (name, 0, of) for name, of in tiny.POINTS.items()
    ]


# --- where answers run


def test_root_is_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "run the grader as an ordinary user" in Sandbox().why_not()
    with pytest.raises(SandboxError, match="This is root"):
        Sandbox().start([])


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda patch: patch.setattr("sys.platform", "darwin"), "exists on Linux only"),
        (lambda patch: patch.setattr("os.name", "nt"), "Grading needs Linux"),
        (lambda patch: patch.setenv("PATH", "/nowhere"), "sudo apt-get install bubblewrap"),
    ],
    ids=["macOS", "Windows", "no bubblewrap"],
)
def test_why_there_is_no_sandbox(change, reason, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    change(monkeypatch)
    assert reason in Sandbox().why_not()


@pytest.mark.parametrize(
    "words, reason",
    [
        (
            "bwrap: No permissions to create new namespace, likely because ...",
            "sudo sysctl kernel.unprivileged_userns_clone=1",
        ),
        ("bwrap: setting up uid map: Permission denied", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("bwrap: Unknown option --some-option", "bubblewrap is too old"),
        ("bwrap: Can't find source path /x", "did not start .bwrap: Can't find source path /x"),
        ("", "it said nothing"),
    ],
)
def test_what_bubblewrap_says_is_explained(words, reason):
    assert _reason(words) and re.search(reason, _reason(words))


def test_a_driver_needs_the_answers_whose_names_it_uses():
    assert answers_behind(tiny.TINY) == {
        "scale": ["scale"],
        "accumulate": ["accumulate"],
        "counts": ["counter"],
    }


def test_texts_are_short_and_hold_no_control_characters():
    assert shown("a\tb\n\x1b[31m\r\0\ud800\u202e é") == "a\tb\n\ufffd[31m\ufffd\ufffd\ufffd\ufffd é"
    assert len(shown("x" * 10**6)) == 2000
