"""What a student handed in: bytes of unknown making, of which only the sources of known answer cells are read.

Edited tests, points, added cells, kernel names and stored outputs play no part. Whatever is wrong is named, for the whole file
(`problem`) or for one answer (`lost`); nothing raises.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from minamp.grade import walk

FILE = 100 << 20  # bytes; a right answer beside 60 MB of printed output keeps its marks
SOURCE = 1 << 20  # characters of one cell
ENCODED = 8 * SOURCE  # bytes of a source as JSON, which writes a character in up to six
META = 1 << 16  # bytes of a cell's nbgrader metadata


@dataclass
class Submission:
    """What a student handed in.

    answers: {grade_id: source} of the answers that can be run; lost: {grade_id: reason} of the others
    written: {grade_id: text} of the questions answered in words
    notes: what is odd and costs nothing; problem: None, or why there is nothing to run
    """

    answers: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problem: str | None = None


class _Unusable(Exception):
    """A file or a source that cannot be taken; the text says why."""


def read(path, assignment):
    """The Submission in the file at `path`, which should be a notebook of `assignment`. Links and devices are not opened."""
    path, found = Path(path), Submission()
    if path.name != f"{assignment.name}.ipynb":
        found.notes.append(f"The file is called {path.name}, not {assignment.name}.ipynb.")
    data, sources = b"", {}
    try:
        data = _bytes(path)
        sources = _sources(data)
    except _Unusable as error:
        found.problem = str(error)
    except walk.NotJson as error:
        found.problem = f"The file is no notebook: its JSON cannot be read ({error})."
    answers = assignment.of("answer")
    if found.problem is None and not any(cell.id in sources for cell in answers):
        found.problem = (
            f"The notebook has none of the answer cells of {assignment.name}: it is another one, or its cells have lost their "
            "metadata. Take the exercise anew and put your answers into its cells."
        )
    for cell in answers:
        try:
            found.answers[cell.id] = _answer(data, cell.id, sources.get(cell.id, ()))
        except _Unusable as error:
            found.lost[cell.id] = str(error)
    for cell in assignment.of("written"):
        try:
            found.written[cell.id] = "\n\n".join(_source(data, span) for span in sources.get(cell.id, ()))
        except _Unusable as error:
            found.notes.append(f"The written answer `{cell.id}` {error}.")
    return found


def _bytes(path):
    """What the file holds, if it is one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _Unusable(f"There is no file {path.name}.") from None
    except OSError as error:  # a link among them
        raise _Unusable(f"{path.name} cannot be opened as a file: {error.strerror}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _Unusable(f"{path.name} is no file but something else, such as a folder or a pipe.")
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(FILE + 1)
    if len(data) > FILE:
        raise _Unusable(
            f"The file is larger than {FILE >> 20} MB: clear the outputs (Edit > Clear all outputs) and save it again."
        )
    if not data.strip():
        raise _Unusable("The file is empty.")
    return data


def _sources(data):
    """{grade_id: [where in `data` the source of such a cell is]}."""
    room = [walk.VALUES]
    top = walk.members(data, walk.document(data), room)
    if "nbformat" not in top:
        raise _Unusable("The file is no notebook: it does not say in which format.")
    if (version := walk.load(data, top["nbformat"], META)) != 4:
        raise _Unusable(
            f"The notebook is in format {version!r:.20}, not 4: open it in JupyterLab and save it again."
        )
    sources = {}
    for start, _ in walk.items(data, top["cells"][0], room) if "cells" in top else ():
        cell = walk.members(data, start, room)
        name = _name(data, cell.get("metadata"), room)
        if name is not None and "source" in cell:
            sources.setdefault(name, []).append(cell["source"])
    return sources


def _name(data, metadata, room):
    """The grade_id in a cell's metadata, or None."""
    try:
        nbgrader = walk.load(data, walk.members(data, metadata[0], room)["nbgrader"], META)
        return nbgrader["grade_id"] if type(nbgrader["grade_id"]) is str else None
    except (walk.NotJson, KeyError, TypeError):
        return None


def _answer(data, name, spans):
    if not spans:
        raise _Unusable(
            f"Your notebook has no cell `{name}`: it was deleted, or the name in its metadata was. "
            "Take the exercise anew and put your answer into that cell."
        )
    if len(spans) > 1:
        raise _Unusable(
            f"Your notebook has {len(spans)} cells `{name}`; a copy keeps the name, and both parts of a split cell do. "
            "Delete or merge all but one."
        )
    try:
        return _source(data, spans[0])
    except _Unusable as error:
        raise _Unusable(f"Your cell `{name}` {error}.") from None


def _source(data, span):
    """The source at `span`: a string or a list of strings."""
    try:
        source = walk.load(data, span, ENCODED)
        text = "".join(source) if type(source) is list else source
        text.encode("utf-8")
    except walk.NotJson as error:
        raise _Unusable(f"cannot be read ({error})") from None
    except (TypeError, AttributeError, ValueError):
        raise _Unusable("holds something that is no text") from None
    if len(text) > SOURCE:
        raise _Unusable(f"is longer than {SOURCE:,} characters")
    return text
