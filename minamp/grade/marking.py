"""Marking one test group: its asserts run here, on values that the student's functions return from elsewhere.

A test cell is ordinary Python that calls functions by name and asserts. Here those names are bound to stand-ins that send the
arguments to the student's side and bring back plain data; whatever the student's code does, it cannot reach an expected value,
a tolerance or an assert. A stand-in has the instructor's answer as its attribute `reference`, to compare with.
"""

import functools
from dataclasses import dataclass

import numpy as np

from minamp.grade.assignment import compiled


class AnswerError(Exception):
    """The student's side gave no value: it raised, ran out of time, died, or answered with something that is no plain data.

    `text` is for the student to read.
    """

    def __init__(self, text):
        super().__init__(text)
        self.text = text


@dataclass(frozen=True)
class Mark:
    """What one test group earned, and why: `text` is for the student, empty when all is right."""

    id: str
    points: float
    of: float
    text: str = ""


def mark_group(assignment, group, call, seed):
    """The Mark of the tests cell `group`: all its points, or none and the reason.

    `call(name, args, kwargs)` asks the student's side: it returns plain data, has put what the function changed in its array
    arguments into `args`, or raises AnswerError. `seed` (integers) seeds the generator that the tests know as `rng`.
    """
    namespace = {"__name__": "__grader__"}
    try:
        with np.errstate(all="ignore"):  # a given cell may set it too: that ends here
            for cell in assignment.of("given"):
                exec(compiled(cell), namespace)  # ours
            right = functools.cache(functools.partial(_right_answers, assignment, dict(namespace)))
            for name in assignment.called:
                namespace[name] = _stand_in(name, call, right)
            namespace["rng"] = np.random.default_rng(seed)
            exec(compiled(group), namespace)  # ours
    except AnswerError as error:
        return Mark(group.id, 0.0, group.points, error.text)
    except AssertionError as error:
        return Mark(group.id, 0.0, group.points, str(error) or "A check of this group failed.")
    except Exception as error:  # a comparison that the returned value makes impossible
        kind = type(error).__name__
        text = f"What your function returned can't be compared with what is asked ({kind}): look at its type, shape and dtype."
        return Mark(group.id, 0.0, group.points, text)
    return Mark(group.id, group.points, group.points)


def _right_answers(assignment, namespace):
    """The namespace with our own answers in it; most groups don't ask for it."""
    for cell in assignment.of("answer", "driver"):
        exec(compiled(cell), namespace)  # ours
    return namespace


def _stand_in(name, call, right):
    def answer(*args, **kwargs):
        return call(name, args, kwargs)

    answer.__name__ = name
    answer.reference = lambda *args, **kwargs: right()[name](*args, **kwargs)
    return answer
