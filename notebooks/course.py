"""python notebooks/course.py FOLDER: make or renew a course folder for nbgrader from the sources in notebooks/exercises.

    FOLDER/source/NAME/NAME.ipynb     the instructor's notebooks, with solutions, hidden tests and mark schemes
    FOLDER/release/NAME/NAME.ipynb    what students get: nbgrader has taken those out
    FOLDER/submitted/                 for what they hand in: STUDENT/NAME/NAME.ipynb
    FOLDER/gradebook.db               nbgrader's list of cells and points
    FOLDER/nbgrader_config.py         its settings; once there, it is left as it is

Marks and submissions that lie there stay. Run it in an environment that has nbgrader; `make exercises` makes one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import build

EXERCISES = build.FOLDER / "exercises"


def sources():
    """The source files of the exercises, in order."""
    return sorted(EXERCISES.glob("ex[0-9]*.py"))


def write_master(source, course):
    """The instructor's notebook of a source, in the place where nbgrader looks for it."""
    import nbformat

    notebook = build.convert(source)
    for cell in notebook.cells:
        cell.metadata.pop("lines_to_next_cell", None)  # jupytext's note to itself
    nbformat.validate(notebook)
    path = course / "source" / source.stem / f"{source.stem}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def nbgrader(course, *arguments):
    """Run an nbgrader command in the course folder; RuntimeError with what it said if it fails."""
    # It starts alembic by bare name, so the environment's programs have to be on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments],
        cwd=course,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"nbgrader {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def make(course, exercises):
    """The course folder of these source files; one line printed for each."""
    (course / "submitted").mkdir(parents=True, exist_ok=True)
    if not (course / "nbgrader_config.py").exists():
        shutil.copy(EXERCISES / "nbgrader_config.py", course)
    for source in exercises:
        write_master(source, course)
        nbgrader(course, "generate_assignment", source.stem, "--force")
        print(f"{course / 'release' / source.stem}", flush=True)


if __name__ == "__main__":
    try:
        make(Path(sys.argv[1]).resolve(), sources())
    except RuntimeError as error:
        sys.exit(f"course: {error}")
