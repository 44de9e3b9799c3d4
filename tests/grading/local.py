"""Marks the answers of this repository without a sandbox, for whoever writes exercises. Never for students' work.

python -m grading.local ex1_round          (from tests/) the marks of the reference solution, group by group
"""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minamp.grade import assignment as assignments
from minamp.grade.marking import AnswerError, mark_group

EXERCISES = Path(__file__).resolve().parents[2] / "notebooks" / "exercises"


def names():
    """The exercises, in order."""
    return sorted(path.stem for path in EXERCISES.glob("ex[0-9]*.py"))


def master(name):
    """The assignment made from the percent source of an exercise, as the instructor's notebook would be."""
    import jupytext

    return assignments.from_notebook(name, jupytext.read(EXERCISES / f"{name}.py"))


@dataclass(frozen=True)
class Wrong:
    """A wrong answer: the misconception in words, its source (or a function from the reference's source), the groups it loses."""

    story: str
    source: object
    loses: frozenset

    def of(self, reference):
        return self.source(reference) if callable(self.source) else self.source


def instead(old, new):
    """The reference solution with one piece of text replaced, which must occur once."""

    def patched(reference):
        if reference.count(old) != 1:
            raise ValueError(f"{old!r} occurs {reference.count(old)} times in the reference solution")
        return reference.replace(old, new)

    return patched


def changed(*pairs):
    """The reference solution with several pieces of text replaced, one after the other."""

    def patched(reference):
        for old, new in pairs:
            reference = instead(old, new)(reference)
        return reference

    return patched


def wrong(story, source, *loses):
    """A Wrong that loses the groups named."""
    return Wrong(story, source, frozenset(loses))


def groups(task, *names):
    """The ids of groups of tests of one task."""
    return frozenset(f"{task}_{name}" for name in names)


def solutions(name):
    """The module with RIGHT = {answer id: [sources]} and WRONG = {answer id: [Wrong]}."""
    return importlib.import_module(f"grading.solutions.{name}")


def marks(exercise, answers=None, seed=0):
    """The Marks of every test group, with `answers` ({answer id: source}) in place of the reference's."""
    side = {"__name__": "__student__"}
    for cell in exercise.of("given", "answer", "driver"):
        source = (answers or {}).get(cell.id, cell.source)
        try:
            with np.errstate(all="ignore"):
                exec(compile(source, f"<{cell.id}>", "exec"), side)
        except Exception:
            continue  # its names are missing then, and a call of one says so

    def call(name, args, kwargs):
        try:
            with np.errstate(all="ignore"):
                return side[name](*args, **kwargs)
        except Exception as error:
            raise AnswerError(f"Your code raised {type(error).__name__}: {error}") from error

    return [mark_group(exercise, group, call, [seed, k]) for k, group in enumerate(exercise.of("tests"))]


if __name__ == "__main__":
    exercise = master(sys.argv[1])
    for mark in marks(exercise):
        print(f"{mark.points:5g} of {mark.of:g}  {mark.id}  {mark.text}")
    print(f"{exercise.points:g} points, of which {sum(c.points for c in exercise.of('written')):g} by hand")
