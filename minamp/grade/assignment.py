"""An assignment: the cells of the instructor's notebook, each with the part it plays in grading.

The notebook is in nbgrader's format (schema 3); a cell's part follows from its metadata:

    given     locked, no points: what the student is given. Runs on both sides.
    driver    a given cell tagged `driver`: its functions call the student's, so they run on the student's side only.
    answer    solution, no points of its own: the student writes it. Here it holds the reference solution.
    tests     locked, with points: one test group. The asserts run on the grader's side only, hidden ones included.
    written   solution with points: a question answered in words and marked by hand.

Every other cell is text or a try-out and plays no part.
"""

import ast
import functools
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """One cell that plays a part: its nbgrader grade_id, part, source and points."""

    id: str
    part: str
    source: str
    points: float = 0.0


@dataclass(frozen=True)
class Assignment:
    """The cells of one assignment in order. ValueError from `read` names the cell that is malformed."""

    name: str
    cells: tuple[Cell, ...]

    def of(self, *parts):
        """The cells that play one of these parts, in order."""
        return [cell for cell in self.cells if cell.part in parts]

    @property
    def points(self):
        """All points, those marked by hand included."""
        return sum(cell.points for cell in self.cells)

    @functools.cached_property
    def called(self):
        """Names of the functions that tests may call and that run on the student's side."""
        return {name for cell in self.of("answer", "driver") for name in defined(cell.source)}


@functools.cache
def compiled(cell):
    """The code of one of our own cells; it runs for every group of every student."""
    return compile(cell.source, f"<{cell.id}>", "exec")


def defined(source):
    """Names of the functions that `source` defines at its top level."""
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def read(path):
    """The assignment in the instructor's notebook at `path` (trusted: it is ours)."""
    path = Path(path)
    return from_notebook(path.stem, json.loads(path.read_text(encoding="utf-8")))


def from_notebook(name, notebook):
    """The assignment `name` in a notebook given as nbformat 4 data."""
    cells, seen = [], set()
    for raw in notebook["cells"]:
        meta = raw["metadata"].get("nbgrader")
        if meta is None:
            continue
        cell = Cell(meta["grade_id"], _part(raw, meta), "".join(raw["source"]), float(meta.get("points", 0)))
        if cell.id in seen:
            raise ValueError(f"{name}: two cells have the grade_id {cell.id!r}")
        seen.add(cell.id)
        cells.append(cell)
    return Assignment(name, tuple(cells))


def _part(raw, meta):
    if meta["solution"]:
        return "written" if meta["grade"] else "answer"
    if meta["grade"]:
        return "tests"
    return "driver" if "driver" in raw["metadata"].get("tags", ()) else "given"
