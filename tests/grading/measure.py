"""python -m grading.measure (from tests/): how long it takes to grade a class of 60 with all exercises.

The class is made of the answers in grading/solutions, right and wrong; one in sixty loops for ever in one task. nbgrader's
gradebook is not part of it. Run it as an ordinary user, or as root: then the grader runs as an ordinary user.
"""

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from grading import local, ordinary
from minamp.grade.run import cores

STUDENTS = 60
LOOP = "while True:\n    pass\n"


def answers(exercise, known, draw):
    """{task: source} of one student: for each task the reference, another right answer or a wrong one."""
    found = {}
    for cell in exercise.of("answer"):
        wrong = [w.of(cell.source) for w in known.WRONG[cell.id]]
        found[cell.id] = draw.choice([cell.source, *known.RIGHT[cell.id], draw.choice(wrong)])
    if draw.random() < 1 / STUDENTS:
        found[draw.choice(list(found))] = LOOP
    return found


def notebook(path, exercise, replaced):
    """Write the notebook of an exercise with these sources replaced."""
    import jupytext
    import nbformat

    made = jupytext.read(local.EXERCISES / f"{exercise.name}.py")
    for cell in made.cells:
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        cell.source = replaced.get(name, cell.source)
    path.parent.mkdir(parents=True)
    nbformat.write(made, path)


def main(students=STUDENTS):
    folder, draw = Path(tempfile.mkdtemp()), random.Random(0)
    try:
        for name in local.names():
            exercise, known = local.master(name), local.solutions(name)
            notebook(folder / "source" / name / f"{name}.ipynb", exercise, {})
            for k in range(students):
                path = folder / "submitted" / f"student{k:02}" / name / f"{name}.ipynb"
                notebook(path, exercise, answers(exercise, known, draw))
        ordinary.give(folder)
        start = time.perf_counter()
        done = ordinary.run("-m", "minamp.grade", str(folder), OPENBLAS_NUM_THREADS="1")
        seconds = time.perf_counter() - start
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        made = len(list(folder.glob("results/*/*.json")))
        print(done.stdout)
        print(f"{made} notebooks in {seconds:.0f} s on {cores()} cores")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
