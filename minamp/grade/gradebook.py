"""Marks into nbgrader's gradebook, so that its pages go on from there: marking by hand, late penalties, feedback, export.

nbgrader 0.9.6 would run students' notebooks as the instructor, with all that the instructor may do: it is never asked to.
"""

import os
import re
from pathlib import Path

from minamp.grade.autograded import autograded, released, sources
from minamp.grade.course import fingerprint
from minamp.grade.feedback import visible
from minamp.grade.run import write
from minamp.grade.submission import read


class GradebookError(RuntimeError):
    """nbgrader's gradebook does not take these marks; the text says why and what to do."""


def enter(course, tasks, records):
    """Enter the records of these tasks and write their autograded notebooks; a sentence says what was done, or why not.

    Marks given by hand stay. A written answer that has changed since, and a mark of tests that was overridden and would be
    another now, are flagged for a second look, as nbgrader does. GradebookError, when some may have been entered.
    """
    nowhere = "Not entered into nbgrader's gradebook: "
    try:
        from nbgrader.api import MissingEntry
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        return f"{nowhere}nbgrader is not installed here; make grade installs it."
    file = course.root / "gradebook.db"
    if not file.exists():
        return f"{nowhere}{file} is not there; make exercises makes it."
    if not all(made["sandbox"] for made in records):
        return f"{nowhere}these marks were made without a sandbox."
    made_of = {(made["student"], made["exercise"]): made for made in records if "failed" not in made}
    handed_in = [t for t in tasks if (t.student, t.name) in made_of and course.handed_in(t.student, t.name)]
    try:
        with _Book(course) as book:
            waiting = [book.enter(task, made_of[task.student, task.name]) for task in handed_in]
    except MissingEntry as error:
        raise GradebookError(
            f"{error}: make exercises enters exercises and their cells into {file}"
        ) from error
    except SQLAlchemyError as error:
        raise GradebookError(f"{file}: {error}") from error
    return f"Entered into nbgrader's gradebook: {len(waiting)} submissions; {sum(waiting)} of them wait for marks by hand."


class _Book:
    """The open gradebook of a course, with the settings of its nbgrader_config.py."""

    def __init__(self, course):
        from nbgrader.api import Gradebook
        from nbgrader.coursedir import CourseDirectory
        from traitlets.config.loader import Config, PyFileConfigLoader

        settings = course.root / "nbgrader_config.py"
        self.config = PyFileConfigLoader(str(settings)).load_config() if settings.exists() else Config()
        self.course, self.released = course, {}
        self.folder = CourseDirectory(config=self.config, root=str(course.root.resolve()))
        self.book = Gradebook(self.folder.db_url, self.folder.course_id)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.book.close()

    def enter(self, task, made):
        """Enter one record and write its notebook; whether something of it waits for marks by hand."""
        import nbformat

        name, student, time = task.name, student_id(task.student), self.timestamp(task)
        folder = Path(self.folder.format_path(self.folder.autograded_directory, student, name))
        path, new = folder / f"{name}.ipynb", self.notebook(task, made)
        old, text = path.read_text(encoding="utf-8") if path.exists() else None, nbformat.writes(new) + "\n"
        self.book.update_or_create_student(student)
        known = self.find(name, student) is not None
        self.book.update_or_create_submission(name, student, **({"timestamp": time} if time else {}))
        entry = self.find(name, student)
        if not known or old != text:
            before = sources(nbformat.reads(old, as_version=4)) if old else {}
            unchanged = {cell for cell, source in sources(new).items() if before.get(cell) == source}
            enter_marks(entry, made, unchanged)
            self.book.db.commit()
        self.penalize(name, student, entry)
        # Last: if this run is killed before, the next one finds the old answers here and compares with them again.
        write(path, text)
        if time:
            write(folder / "timestamp.txt", time + "\n")
        return entry.needs_manual_grade

    def find(self, name, student):
        """The student's notebook in the gradebook, or None."""
        from nbgrader.api import MissingEntry

        try:
            return self.book.find_submission_notebook(name, name, student)
        except MissingEntry:
            return None

    def notebook(self, task, made):
        """The notebook to show for a task."""
        if task.name not in self.released:
            self.released[task.name] = released(self.course.masters()[task.name], self.config)
        answers = {}
        if task.path:
            submission = read(task.path, task.exercise.assignment)
            answers = {**submission.answers, **submission.written}
        return autograded(self.released[task.name], answers, made)

    def timestamp(self, task):
        """When it was handed in, if that is known and can be read."""
        from nbgrader.utils import parse_utc

        text = self.course.timestamp(task.student, task.name)
        try:
            return text and parse_utc(text) and text
        except (ValueError, OverflowError):
            return None

    def penalize(self, name, student, entry):
        """Set or take back the penalty for lateness, by the settings' rule."""
        from nbformat.v4 import new_notebook
        from nbgrader.preprocessors import AssignLatePenalties

        if entry.assignment.total_seconds_late > 0 or entry.late_submission_penalty is not None:
            place = {"student": student, "assignment": name, "notebook": name, "db_url": self.folder.db_url}
            AssignLatePenalties(config=self.config).preprocess(new_notebook(), {"nbgrader": place})


def student_id(name):
    """What nbgrader calls the student with this folder: the same, but for what its pages and its CSV would take for their own."""
    plain = re.sub(r'[<>&",*?\[\]\s]|^\0*[=+@-]', "_", visible(name).replace(" ", "\0")).replace("\0", " ")
    # It names a folder too, for which no system takes more than 255 bytes.
    short = plain.encode("utf-8")[:240].decode("utf-8", "ignore")
    return name if plain == name else f"{short}-{fingerprint(os.fsencode(name))[:6]}"


def enter_marks(entry, made, unchanged):
    """Put the marks of a record into the gradebook's entry; `unchanged`: ids of cells that were entered before as they are."""
    answered = {question["id"]: question["answered"] for question in made["by_hand"]}
    earned = {mark["id"]: mark["points"] for mark in made["marks"]}
    grades = {grade.name: grade for grade in entry.grades}
    if odd := grades.keys() ^ {*answered, *earned}:
        raise GradebookError(
            f"{entry.name} has other cells now ({', '.join(sorted(odd))}): make exercises enters them"
        )
    for name, points in earned.items():
        grade, changed = grades[name], grades[name].auto_score != points
        grade.auto_score = points
        grade.needs_manual_grade = grade.manual_score is not None and (changed or grade.needs_manual_grade)
    for name, there in answered.items():
        grade = grades[name]
        if name not in unchanged or there != (grade.auto_score is None):
            grade.auto_score = None if there else 0.0
            grade.needs_manual_grade = there or grade.manual_score is not None
    for comment in entry.comments:
        comment.auto_comment = None if answered.get(comment.name, True) else "No response."
