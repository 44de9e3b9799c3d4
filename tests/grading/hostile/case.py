"""A submission with what it must lose, and short ways to write one."""

import json
import re
import textwrap
from dataclasses import dataclass, field

from grading import tiny

MARK = "made by a student 5f1c"  # in every answer: the grader's process must never execute it
SCALE = [group for group in tiny.POINTS if group.startswith("scale")]
RIGHT = "return (x * np.float32(factor)).astype(np.float32)"


@dataclass(frozen=True)
class Case:
    """A submission whose `answers` {answer id: source} differ from the right ones, or whose notebook is changed.

    change: alters the notebook (a dict), or gives the file's bytes, or a function that puts something at a path
    loses: {group: pattern of the reason}; every other group must get its points
    problem, note: pattern of what must be said of the whole
    """

    name: str
    answers: dict = field(default_factory=dict)
    loses: dict = field(default_factory=dict)
    change: object = None
    problem: str | None = None
    note: str | None = None

    def write(self, folder):
        """Put the submission into a new folder. Returns its path."""
        folder.mkdir()
        path = folder / "tiny.ipynb"
        answers = {
            name: f"_mark = {MARK!r}\n{source}" for name, source in (tiny.ANSWERS | self.answers).items()
        }
        notebook = tiny.notebook(answers)
        content = self.change(notebook) if self.change else None
        if callable(content):
            return content(path) or path
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(notebook).encode())
        return path

    def faults(self, result):
        """How a Result differs from what it should be, in words."""
        for mark, group in zip(result.marks, tiny.TINY.of("tests"), strict=True):
            pattern = self.problem or self.loses.get(group.id)
            if mark.points != (0 if pattern else group.points):
                yield f"{group.id}: {mark.points:g} points, {mark.text!r}"
            elif not re.search(pattern or "^$", mark.text):
                yield f"{group.id}: the reason is {mark.text!r}"
        if bool(self.problem) != bool(result.problem):
            yield f"problem: {result.problem!r}"
        if self.note and not any(re.search(self.note, note) for note in result.notes):
            yield f"notes: {result.notes}"


def scale(name, source, reason=None, groups=SCALE, **others):
    """A Case whose cell `scale` is another; it loses `groups` for one reason, or nothing."""
    loses = dict.fromkeys(groups, reason) if reason else {}
    return Case(name, {"scale": textwrap.dedent(source)}, loses | others)


def body(name, lines, reason=None, **others):
    """A Case whose function `scale` runs these lines, then answers rightly."""
    lines = textwrap.indent(textwrap.dedent(lines).strip("\n"), "    ")
    return scale(name, f"def scale(x, factor):\n{lines}\n    {RIGHT}\n", reason, **others)


def top(name, lines, reason=None, **others):
    """A Case whose cell `scale` runs these lines, then defines the right function."""
    return scale(name, textwrap.dedent(lines).strip("\n") + "\n" + tiny.SCALE, reason, **others)


def returns(value, reason, **others):
    """A Case whose function `scale` returns this expression."""
    return scale(f"returns {value}", f"def scale(x, factor):\n    return {value}\n", reason, **others)
