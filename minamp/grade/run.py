"""Grading a class: what has to be graded, students side by side, each result kept as soon as it is there.

A result is two files: the student's page, and then the record. So whatever is killed, and when, leaves results that are whole;
the next run grades what has none, and what has changed.
"""

import csv
import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import minamp
from minamp.files import replacing
from minamp.grade.course import RESERVED, Exercise, NotThere, exercise_seed, file_fingerprint, fingerprint
from minamp.grade.feedback import page, visible
from minamp.grade.marking import Mark
from minamp.grade.one import Result, grade_one
from minamp.grade.sandbox import SandboxError

COLUMNS = ("student", "exercise", "auto_points", "auto_max", "manual_pending", "problem", "sandbox")
STUB = "YOUR ANSWER HERE"  # nbgrader's, in a cell that the student is to fill
VERSIONS = {"minamp": minamp.__version__, "numpy": np.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class Task:
    """One student's notebook of one exercise. `inputs`: what its marks depend on, as it stands in the record."""

    student: str
    exercise: Exercise
    path: Path | None
    inputs: dict

    @property
    def name(self):
        return self.exercise.assignment.name

    def file(self, course, ending):
        """Where a result of this task is kept."""
        return course.results / self.student / f"{self.name}.{ending}"


def tasks(course, exercises):
    """One Task for every student of the course and every one of these exercises."""
    seed = fingerprint(course.seed())[:16]  # not the seed itself: a record may be shown to its student
    found = []
    for student in course.students():
        for exercise in exercises:
            try:
                path, missing = course.submission(student, exercise.assignment.name), None
            except NotThere as error:
                path, missing = None, str(error)
            submission = file_fingerprint(path) if path else None
            inputs = {"submission": submission, "missing": missing, "master": exercise.fingerprint}
            found.append(Task(student, exercise, path, inputs | {"seed": seed}))
    return found


def kept(course, task, sandbox):
    """The record of an earlier run if it holds: of the same inputs, and not made without a sandbox where there is one now."""
    try:
        old = json.loads(task.file(course, "json").read_text(encoding="utf-8"))
        same = all(old[key] == value for key, value in task.inputs.items())
        good = same and task.file(course, "html").exists() and (old["sandbox"] or sandbox.unsafe)
        return old if good else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def grade(course, task, sandbox):
    """Grade one task and keep the result; its record. If the grader itself fails, the record says so and is not kept."""
    if (missing := task.inputs["missing"]) is not None:
        groups = task.exercise.assignment.of("tests")
        result = Result(tuple(Mark(g.id, 0.0, g.points, missing) for g in groups), problem=missing)
    else:
        try:
            seed = exercise_seed(course.seed(), task.name)
            result = grade_one(task.exercise.assignment, task.path, sandbox, seed)
        except SandboxError:
            raise
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            result = Result(
                (), problem=f"The grader itself failed, which is not the student's doing: {fault}"
            )
            return record(task, result, sandbox) | {"failed": True}
    made = record(task, result, sandbox)
    if task.student not in RESERVED:
        write(task.file(course, "html"), page(made))
        write(task.file(course, "json"), json.dumps(made, indent=1) + "\n")
    return made


def record(task, result, sandbox):
    """What is kept of a Result: plain values, the same each time."""
    assignment, places, written = task.exercise.assignment, task.exercise.places, result.written
    marks = [places[m.id] | {"points": m.points, "of": m.of, "text": m.text} for m in result.marks]
    by_hand = [
        places[c.id] | {"of": c.points, "answered": answered(written.get(c.id, ""))}
        for c in assignment.of("written")
    ]
    return {
        "student": task.student,
        "exercise": task.name,
        "title": task.exercise.title,
        "points": sum(m.points for m in result.marks),
        "of": sum(c.points for c in assignment.of("tests")),
        "problem": result.problem,
        "notes": list(result.notes),
        "marks": marks,
        "by_hand": by_hand,
        "sandbox": not sandbox.unsafe,
        **task.inputs,
        "versions": VERSIONS,
    }


def answered(text):
    """Whether a written answer is more than what stood there."""
    return text.strip() not in ("", STUB)


def pending(made):
    """The points of a record that wait for somebody to read the written answers."""
    return sum(question["of"] for question in made["by_hand"] if question["answered"])


def grade_all(course, todo, sandbox, names, again=False):
    """Grade the tasks of the exercises `names`; of the others, only what an earlier run has found is there.

    Yields the records in the order in which they are done, and keeps results/grades.csv in step. `again`: grade also what is
    graded already. SandboxError if the sandbox is lost on the way.
    """
    rows = {(task.student, task.name): None for task in todo}
    pool = ThreadPoolExecutor(cores())
    try:
        to_grade = []
        for task in todo:
            wanted = task.name in names
            if not (again and wanted) and (old := kept(course, task, sandbox)):
                rows[task.student, task.name] = old
                yield old
            elif wanted:
                to_grade.append(task)
        write_grades(course, rows)
        for future in as_completed([pool.submit(grade, course, task, sandbox) for task in to_grade]):
            made = future.result()
            rows[made["student"], made["exercise"]] = made
            write_grades(course, rows)
            yield made
    finally:
        pool.shutdown(cancel_futures=True)  # what is being graded comes to its end


def cores():
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def write_grades(course, rows):
    """Write results/grades.csv: a row for every student and exercise, those not graded yet included."""
    with (
        replacing(course.results / "grades.csv") as temporary,
        open(temporary, "w", newline="", encoding="utf-8") as file,
    ):
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for (student, name), made in rows.items():
            values = ["", "", "", "not graded yet", ""]
            if made:
                safe = "yes" if made["sandbox"] else "NO: --unsafe"
                problem = " ".join(visible(made["problem"] or "").split())
                values = [f"{made['points']:g}", f"{made['of']:g}", f"{pending(made):g}", cell(problem), safe]
            table.writerow([cell(visible(student)), name, *values])


def cell(text):
    """`text` as a cell that no spreadsheet takes for a formula."""
    return "'" + text if text.lstrip().startswith(("=", "+", "-", "@")) else text


def write(path, text):
    """Write a file that is whole or not there."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
