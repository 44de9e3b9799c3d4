"""The student's side as the grader sees it: calls by name that bring back plain data, or the reason why not."""

import ast
import functools
import signal
import socket
import struct
import time

import numpy as np

from minamp.grade import frames
from minamp.grade.assignment import defined
from minamp.grade.marking import AnswerError

TIMEOUTS = 2  # so many of one answer, and it is not called again
_IRREGULAR = (TimeoutError, EOFError, frames.FrameError)


class StudentSide:
    """A submission's answers in the sandbox, as a context manager: everything is killed at its end.

    `group()` begins a test group and `call(name, args, kwargs)` is what mark_group asks for. SandboxError on entering and from
    `group`, if there is no sandbox; nothing that a student's code does raises anything but AnswerError, from `call`.
    """

    def __init__(self, assignment, submission, sandbox):
        self._sandbox, self._limits = sandbox, sandbox.limits
        self._behind = answers_behind(assignment)
        self._cells = [
            {"id": cell.id, "part": cell.part, "source": submission.answers.get(cell.id, cell.source)}
            for cell in assignment.of("given", "answer", "driver")
            if cell.part != "answer" or cell.id in submission.answers
        ]
        self._lost = dict(submission.lost)  # {answer id: why it is not run}
        self._timeouts = dict.fromkeys(submission.answers, 0)
        self._process = self._channel = self._dead = None

    def __enter__(self):
        self._process = self._sandbox.start(self._cells)
        self._end = time.monotonic() + self._limits.total
        return self

    def __exit__(self, *error):
        self._drop()

    def group(self):
        """Begin a test group: a fresh child has executed the cells, nothing of the group before is left."""
        self._hang_up()
        self._dead = None
        try:
            self._load()
        except _IRREGULAR as error:
            self._dead = AnswerError(f"Your notebook {self._how(error)}.")
            self._drop()

    def call(self, name, args, kwargs):
        """What the student's function returns. Array arguments that it changed in place are changed here too.

        AnswerError if there is no such value. One that ends the process is raised again by every later call of the group.
        """
        if self._dead:
            raise self._dead
        for answer in self._behind[name]:
            if answer in self._lost:
                raise AnswerError(self._lost[answer])
            if self._timeouts[answer] >= TIMEOUTS:
                raise AnswerError(f"Not run: `{answer}` ran out of time {TIMEOUTS} times before.")
        try:
            return self._ask(name, args, kwargs)
        except _IRREGULAR as error:
            if isinstance(error, TimeoutError):
                for answer in self._behind[name]:
                    self._timeouts[answer] += 1
            self._dead = AnswerError(f"`{name}` {self._how(error)}.")
            self._drop()
            raise self._dead from None

    def _load(self):
        """Have a fresh child execute the cells. One of the student's that ends or outlasts it is left out from then on."""
        while True:
            if time.monotonic() >= self._end:
                raise TimeoutError
            self._until = min(time.monotonic() + self._limits.group, self._end)
            fresh = self._process is None
            if fresh:
                self._process = self._sandbox.start(self._cells)
            cell = None
            try:
                self._fork()
                kind, value = _entry(frames.receive(self._channel, self._until)[0])
                while kind == "begin":
                    if type(value) is not str or value not in self._timeouts or value in self._lost:
                        raise frames.FrameError("a cell that is not run")
                    cell = value
                    kind, value = _entry(frames.receive(self._channel, self._until)[0])
                if (
                    kind != "failed"
                    or type(value) is not dict
                    or not all(type(t) is str for t in value.values())
                ):
                    raise frames.FrameError("an unknown message")
                self._failed = value
                return
            except _IRREGULAR as error:
                if cell is None and fresh:
                    raise
                if cell is not None:
                    self._lost[cell] = f"Your cell `{cell}` {self._how(error)}."
                self._drop()  # without a cell: the group before did something to the process that forks

    def _fork(self):
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._process.channel, [b"g"], [theirs.fileno()])
            except OSError as error:
                raise EOFError("the worker is gone") from error
        frames.send(self._channel, {"skip": [*self._lost]}, self._until)

    def _ask(self, name, args, kwargs):
        try:
            mine = frames.send(self._channel, {"name": name, "args": args, "kwargs": kwargs}, self._until)
        except frames.NotPlain as error:  # a fault of the exercise
            text = f"This check cannot hand over to `{name}` {error}. Please tell your instructor."
            raise AnswerError(text) from None
        reply, _ = frames.receive(self._channel, self._until)
        if type(reply) is dict and reply.keys() == {"value", "after"}:
            _write_back(name, mine, reply["after"])
            return reply["value"]
        kind, text = _entry(reply)
        if kind not in ("raised", "returned", "unknown") or type(text) is not str:
            raise frames.FrameError("an unknown reply")
        stopped = [cell for cell in self._behind[name] if cell in self._failed]
        texts = [f"Your cell `{cell}` raised {self._failed[cell]}." for cell in stopped]
        if kind != "unknown":
            texts.append(f"`{name}` {kind} {text}.")
        raise AnswerError(" ".join(texts) or f"Your notebook defines no `{name}`.")

    def _how(self, error):
        """What went wrong with a process, in words that follow a name."""
        if isinstance(error, frames.FrameError):
            return "sent back what cannot be read"
        if isinstance(error, EOFError):
            return f"ended its process ({self._ending()})"
        if time.monotonic() >= self._end:
            used_up = f"was stopped: the {self._limits.total:g} s for one submission are used up"
            return f"{used_up} (all answer cells run anew for each group of checks; trials in them cost time)"
        return f"did not come to an end within {self._limits.group:g} s (an endless loop?)"

    def _ending(self):
        """How the group's child ended: asked of the worker, which may be gone too or lie."""
        try:
            self._process.channel.settimeout(2.0)  # it answers at once, but a busy machine may let it wait
            self._process.channel.sendall(b"w")
            (code,) = struct.unpack("<i", self._process.channel.recv(4))
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except (OSError, struct.error, ValueError):
            return "killed"

    def _hang_up(self):
        if self._channel:
            self._channel.close()
            self._channel = None

    def _drop(self):
        """Kill the sandbox and everything in it."""
        self._hang_up()
        if self._process:
            self._process.close()
            self._process = None


@functools.cache
def answers_behind(assignment):
    """{name of a function that tests may call: ids of the answer cells it needs}. A driver needs those whose names it uses."""
    maker, behind = {}, {}
    for cell in assignment.of("answer"):
        for node in ast.parse(cell.source).body:  # ours, the reference solution
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                maker[node.name] = cell.id
        behind |= {name: [cell.id] for name in defined(cell.source)}
    for cell in assignment.of("driver"):
        used = {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}
        needs = list(dict.fromkeys(maker[name] for name in maker if name in used))
        behind |= dict.fromkeys(defined(cell.source), needs)
    return behind


def _entry(message):
    """The key and the value of a message that is a dict with one entry."""
    if type(message) is not dict or len(message) != 1:
        raise frames.FrameError("an unknown message")
    return next(iter(message.items()))


def _write_back(name, mine, after):
    """Put what the student's side made of the arrays that it was given into these arrays, bit by bit."""
    if type(after) is not list or len(after) != len(mine):
        raise frames.FrameError("other arrays than were sent")
    for array, changed in zip(mine, after, strict=True):
        if type(changed) is not np.ndarray:
            raise frames.FrameError("no array")
        if (changed.shape, changed.dtype) != (array.shape, array.dtype):
            raise AnswerError(f"`{name}` changed the shape or the dtype of an array that it was given.")
        if changed.tobytes() == array.tobytes():
            continue
        if not array.flags.writeable:
            raise AnswerError(f"`{name}` changed an array that may only be read.")
        np.copyto(array, changed)
