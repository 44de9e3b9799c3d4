"""A course folder and a class, made by script, and a grader that needs no sandbox, for tests of what is around the grader."""

import json
from contextlib import contextmanager
from unittest import mock

from grading import local, tiny
from minamp.grade import one, run, submission
from minamp.grade.course import Course
from minamp.grade.marking import Mark
from minamp.grade.sandbox import Sandbox

FULL = sum(tiny.POINTS.values())


def course(folder, *names):
    """A Course whose exercises, of these names, are all the tiny one."""
    for name in names or ("tiny",):
        write(folder / "source" / name / f"{name}.ipynb", master())
    (folder / "submitted").mkdir()
    return Course(folder, folder / "submitted")


def master(*more):
    """The instructor's notebook; with `more` cells at its end."""
    notebook = tiny.notebook()
    notebook["cells"] += more
    for k, cell in enumerate(notebook["cells"]):
        cell["id"] = f"cell{k}"
    return notebook


def hand_in(course, student, name="tiny", answers=(), **written):
    """Put a student's notebook where it belongs: the right answers, but for these. Its path."""
    notebook = tiny.notebook({**tiny.ANSWERS, **dict(answers)}, **written)
    return write(course.submitted / student / name / f"{name}.ipynb", notebook)


def write(path, notebook):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook))
    return path


def here(assignment, path, sandbox, seed):
    """grade_one for answers that we wrote ourselves: they run in this process."""
    found = submission.read(path, assignment)
    if found.problem:
        marks = [Mark(group.id, 0.0, group.points, found.problem) for group in assignment.of("tests")]
    else:
        marks = local.marks(assignment, found.answers, seed)
    return one.Result(tuple(marks), found.written, tuple(found.notes), found.problem)


@contextmanager
def no_sandbox(grade_one=here):
    """While this lasts, grade_one is what grades; yields the mock, which counts."""
    with mock.patch.object(run, "grade_one", side_effect=grade_one) as graded:
        yield graded


def grade(course, grade_one=here, names=None, again=False, unsafe=False):
    """Grade a class in this process: ({(student, exercise): record}, the students graded, not those whose record was kept)."""
    names = names or [*course.masters()]
    with no_sandbox(grade_one) as graded, course.alone():
        todo = run.tasks(course, [course.exercise(name) for name in course.masters()])
        made = list(run.grade_all(course, todo, Sandbox(unsafe=unsafe), names, again))
    students = sorted(
        call.args[1].relative_to(course.submitted.resolve()).parts[0] for call in graded.mock_calls
    )
    return {(r["student"], r["exercise"]): r for r in made}, students
