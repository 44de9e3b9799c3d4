"""A course folder, laid out as nbgrader lays it out: where masters, submissions and results lie, and the seed.

    source/NAME/NAME.ipynb               the instructor's notebooks
    submitted/STUDENT/NAME/NAME.ipynb    what students handed in; read, never run from there
    results/                             all that is written: STUDENT/NAME.json and .html, grades.csv, seed

A student's folder may have any name and hold anything: links that lead out of it, pipes, rubbish.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from minamp.grade.assignment import Assignment, from_notebook
from minamp.grade.submission import FILE


class CourseError(RuntimeError):
    """The course folder cannot be graded as it is; the text says why and what to do."""


class NotThere(Exception):
    """There is no notebook of a student's that could be read; the text says why."""


NOTHING = "No notebook was handed in."
RESERVED = ("grades.csv", "seed")  # files of results/, beside the students' folders


@dataclass(frozen=True)
class Exercise:
    """An assignment, its title, where its cells stand ({grade_id: id, heading, about}), and the master's fingerprint."""

    assignment: Assignment
    title: str
    places: dict
    fingerprint: str


@dataclass(frozen=True)
class Course:
    """The course folder `root`; submissions lie in `submitted`, which may be elsewhere."""

    root: Path
    submitted: Path

    @property
    def results(self):
        return self.root / "results"

    def masters(self):
        """{name: path} of the instructor's notebooks."""
        found = sorted((self.root / "source").glob("*/*.ipynb"))
        return {path.stem: path for path in found if path.stem == path.parent.name}

    def exercise(self, name):
        """The Exercise of that name."""
        path = self.masters()[name]
        try:
            notebook = json.loads(path.read_text(encoding="utf-8"))
            title, places = _outline(notebook)
            return Exercise(from_notebook(name, notebook), title or name, places, file_fingerprint(path))
        except (ValueError, KeyError) as error:
            raise CourseError(
                f"{path} is no notebook in nbgrader's format: {error!r}: make exercises makes it"
            ) from error

    def students(self):
        """The names of the students' folders. As nbgrader does, whatever begins with a dot is passed over."""
        return [e.name for e in self._submitted() if e.is_dir() or e.is_symlink()]

    def loose(self):
        """The names of what lies among the students' folders and is none."""
        return [e.name for e in self._submitted() if not (e.is_dir() or e.is_symlink())]

    def _submitted(self):
        with os.scandir(self.submitted) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)

    def handed_in(self, student, name):
        """Whether the student has a folder for the exercise `name`."""
        return os.path.lexists(self.submitted / student / name)

    def submission(self, student, name):
        """The path of the student's notebook; NotThere says why there is none to read.

        If it has another name, but is the only one in its folder, it will do.
        """
        if student in RESERVED:
            raise NotThere(
                f"A student's folder cannot be called {student}, as a file of the grader is: rename it."
            )
        try:
            return self._file(student, f"{name}/{name}.ipynb")
        except FileNotFoundError:
            there = self._notebooks(student, name)
        inside = [path for path in there if path.parent == Path(name)]
        if len(inside) == 1:
            return self._file(student, inside[0])
        if not there:
            raise NotThere(NOTHING)
        found = ", ".join(map(str, there[:3])) + ", ..." * (len(there) > 3)
        raise NotThere(f"There is no {name}/{name}.ipynb; there is {found}. If that is meant, move it there.")

    def _notebooks(self, student, name):
        """The notebooks near the top of a student's folder that belong to no exercise but `name`."""
        folder, others = self.submitted / student, {*self.masters()} - {name}
        found = (path for pattern in ("*.ipynb", "*/*.ipynb", "*/*/*.ipynb") for path in folder.glob(pattern))
        found = (p.relative_to(folder) for p in found if p.parent.resolve().is_relative_to(folder.resolve()))
        mine = (path for path in found if others.isdisjoint({path.parts[0], path.stem}))
        return sorted(path for path in mine if ".ipynb_checkpoints" not in path.parts)

    def timestamp(self, student, name):
        """When the student handed it in, as timestamp.txt says, which nbgrader puts there; None if it does not."""
        try:
            with open(self._file(student, f"{name}/timestamp.txt"), "rb") as file:
                return file.read(100).decode("utf-8", "replace").strip() or None
        except (NotThere, FileNotFoundError):
            return None

    def _file(self, student, wanted):
        """The path of a file in a student's folder, links in it resolved. FileNotFoundError, or NotThere for any other reason."""
        folder = self.submitted / student
        try:
            if folder.is_symlink():
                raise NotThere("The student's folder is a link: not followed.")
            real = (folder / wanted).resolve(strict=True)
            if not real.is_relative_to(folder.resolve()):
                raise NotThere(
                    f"{wanted} is reached by a link that leads out of the student's folder: not followed."
                )
            if not stat.S_ISREG(real.stat().st_mode):
                raise NotThere(f"{wanted} is not a file.")
            real.open("rb").close()
            return real
        except FileNotFoundError:
            if (folder / wanted).is_symlink():
                raise NotThere(f"{wanted} is a link that leads nowhere.") from None
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            reason = getattr(error, "strerror", None) or "links in a circle"
            raise NotThere(f"{wanted} cannot be read: {reason}.") from error

    @contextlib.contextmanager
    def alone(self):
        """While this lasts no other run grades this course; CourseError if one does now. A killed run leaves nothing to clear."""
        self.results.mkdir(mode=0o700, exist_ok=True)
        with open(self.results / ".lock", "w") as file:
            if os.name == "posix":
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise CourseError(f"another run is grading {self.root}: wait until it is done") from None
            for leftover in (*self.results.glob(".*.*"), *self.results.glob("*/.*")):
                leftover.unlink()  # of a run that was killed while it wrote
            yield

    def seed(self):
        """The secret that the hidden tests' random inputs come from, made the first time it is asked for."""
        path = self.results / "seed"
        if not path.exists():
            part = self.results / ".seed.part"
            part.unlink(missing_ok=True)
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(os.urandom(16).hex() + "\n")
            os.replace(part, path)
        text = path.read_text().strip()
        if len(text) != 32:
            raise CourseError(f"{path} is damaged: delete it, and everything is graded again with a new seed")
        return bytes.fromhex(text)


def _outline(notebook):
    """The title of a notebook, and {grade_id: its id, the heading that it stands under, what its first line says it is about}."""
    title, heading, places = "", "", {}
    for cell in notebook["cells"]:
        source, part = "".join(cell["source"]), cell["metadata"].get("nbgrader")
        if part:
            about = re.match(r"# +(.+?)(?:: [\d.]+ points)? *$", source, re.M)
            place = {"id": part["grade_id"], "heading": heading, "about": about[1] if about else ""}
            places[part["grade_id"]] = place
        elif cell["cell_type"] == "markdown":
            for level, text in re.findall(r"^(#{1,6}) +(.+?) *$", source, re.M):
                text = re.sub("[`$*]", "", text)
                title, heading = (text, "") if level == "#" else (title, text)
    return title, places


def exercise_seed(seed, name):
    """The seed of the exercise `name`, an integer that follows from the course's secret."""
    return int.from_bytes(hashlib.sha256(seed + name.encode()).digest()[:8], "little")


def fingerprint(data):
    """The SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def file_fingerprint(path):
    """The SHA-256 of a file; of one that is too large to be graded, that of its length."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return fingerprint(file.read() if size <= FILE else str(size).encode())
