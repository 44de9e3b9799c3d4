"""Files that are no notebook, broken ones, and notebooks whose cells are not as they were handed out."""

import json
import os
from pathlib import Path

from grading import tiny
from grading.hostile.case import SCALE, Case


def _raw(data):
    return lambda notebook: data


def _json(replace):
    """A change of the notebook's JSON, as bytes."""
    return lambda notebook: replace(json.dumps(notebook).encode())


def _instead(old, new):
    return _json(lambda data: data.replace(old, new, 1))


def _source(value):
    """Another JSON value as the source of the cell `scale`."""
    return _instead(b'"source": "_mark', b'"source": ' + value + b', "was": "_mark')


def _cells(change):
    """A change of the notebook and its cells by name, in place."""
    return lambda notebook: change(
        notebook, {cell["metadata"]["nbgrader"]["grade_id"]: cell for cell in notebook["cells"]}
    )


def _place(make):
    """Something else than a file, which `make` puts at a path; or it returns another path."""
    return lambda notebook: make


def _link(path):
    path.with_name("elsewhere").write_text(json.dumps(tiny.notebook()))
    path.symlink_to("elsewhere")


def _renamed(path):
    path = path.with_name("tiny (1)\n\x1b.ipynb")
    path.write_text(json.dumps(tiny.notebook()))
    return path


def _tests_edited(notebook, cells):
    for name in tiny.POINTS:
        cells[name]["source"] = "pass"
        cells[name]["metadata"]["nbgrader"]["points"] = 100
    cells["setup"]["source"] = "assert False"
    cells["driver"]["source"] = "def counts(limit, steps): return None"
    notebook["metadata"]["kernelspec"] = {"name": "no such kernel"}


def _tests_deleted(notebook, cells):
    notebook["cells"] = [cells[name] for name in ("counter", "scale", "accumulate")]


def _stripped(notebook, cells):
    for cell in notebook["cells"]:
        cell["metadata"] = {}


def _strange_cells(notebook, cells):
    for strange in (3, None, [], {}, {"metadata": 3}):
        notebook["cells"].append(strange)
    for nbgrader in ([], {"grade_id": ["scale"]}, {"grade_id": "unknown"}):
        notebook["cells"].append({"metadata": {"nbgrader": nbgrader}, "source": "import os; os._exit(1)"})


def _lost(reason, **change):
    return {"loses": dict.fromkeys(SCALE, reason)} | change


MB = 1 << 20
CASES = [
    Case("empty", change=_raw(b""), problem="The file is empty"),
    Case("blank", change=_raw(b" \n\n"), problem="The file is empty"),
    Case(
        "no JSON", change=_raw(b"PK\x03\x04 something zipped"), problem="no notebook: its JSON cannot be read"
    ),
    Case("zeros", change=_raw(bytes(MB)), problem="its JSON cannot be read"),
    Case("cut off", change=_json(lambda data: data[: len(data) // 2]), problem="it ends too early"),
    Case(
        "cut off in a string",
        change=_json(lambda data: data[: data.index(b"_mark") + 3]),
        problem="cannot be read",
    ),
    Case("twice", change=_json(lambda data: data + data), problem="unexpected at byte"),
    Case(
        "a comma too many", change=_instead(b'"nbformat": 4', b'"nbformat": 4,'), problem="unexpected at byte"
    ),
    Case("UTF-16", change=lambda notebook: json.dumps(notebook).encode("utf-16"), problem="cannot be read"),
    Case("byte order mark", change=_json(lambda data: b"\xef\xbb\xbf" + data)),
    Case("a list", change=_json(lambda data: b"[" + data + b"]"), problem="does not say in which format"),
    Case("a number", change=_raw(b"3"), problem="does not say in which format"),
    Case("nested without end", change=_raw(b"[" * MB), problem="cannot be read"),
    Case("nested deep", change=_raw(b"[" * 10**5 + b"]" * 10**5), problem="does not say in which format"),
    Case(
        "brackets without end", change=_raw(b"[" + b"[]" * MB + b"]"), problem="more than 1,000,000 brackets"
    ),
    *(
        Case(
            f"{what} without end",
            change=_instead(old, old + new),
            problem="more than 50,000 cells and entries",
        )
        for what, old, new in [
            ("cells", b'"cells": [', b"{}," * 50_000),
            ("numbers for cells", b'"cells": [', b"1," * 10 * MB),
            ("entries", b"{", b",".join(b'"%x":1' % k for k in range(MB)) + b","),
            ("entries of a cell", b'"cells": [{', b",".join(b'"%x":1' % k for k in range(MB)) + b","),
            ("metadata", b'"metadata": {', b",".join(b'"%x":1' % k for k in range(MB)) + b","),
        ]
    ),
    Case(
        "101 MB",
        change=_json(lambda data: data + b" " * (101 * MB)),
        problem="larger than 100 MB: clear the outputs",
    ),
    Case(
        "60 MB of outputs",
        change=_instead(
            b'"outputs": []', b'"outputs": [{"text": [' + b'"0123456789\\n",' * (4 * MB) + b'""]}]'
        ),
    ),
    Case(
        "outputs nested deep", change=_instead(b'"outputs": []', b'"outputs": ' + b"[" * 10**5 + b"]" * 10**5)
    ),
    Case("outputs not UTF-8", change=_instead(b'"outputs": []', b'"outputs": ["\xff\xfe", "\\ud800"]')),
    Case("format 3", change=_instead(b'"nbformat": 4', b'"nbformat": 3'), problem="format 3, not 4"),
    Case(
        "format as text", change=_instead(b'"nbformat": 4', b'"nbformat": "4"'), problem="format '4', not 4"
    ),
    Case("no format", change=_instead(b'"nbformat"', b'"format"'), problem="does not say in which format"),
    Case("no cells", change=_raw(b'{"nbformat": 4}'), problem="none of the answer cells of tiny"),
    Case(
        "cells are no list",
        change=_raw(b'{"nbformat": 4, "cells": {"a": 3}}'),
        problem="none of the answer cells of tiny",
    ),
    Case(
        "another notebook",
        change=_raw(b'{"nbformat": 4, "cells": []}'),
        problem="none of the answer cells of tiny",
    ),
    Case("metadata stripped", change=_cells(_stripped), problem="none of the answer cells of tiny"),
    Case("tests, points, setup and driver edited", change=_cells(_tests_edited)),
    Case("tests deleted, answers in another order", change=_cells(_tests_deleted)),
    Case("strange cells", change=_cells(_strange_cells)),
    Case(
        "answer in a text cell", change=_cells(lambda nb, cells: cells["scale"].update(cell_type="markdown"))
    ),
    Case(
        "answer cell twice",
        **_lost(
            "has 2 cells `scale`; a copy keeps the name",
            change=_cells(lambda nb, cells: nb["cells"].insert(3, cells["scale"])),
        ),
    ),
    Case(
        "answer cell deleted",
        **_lost("has no cell `scale`", change=_cells(lambda nb, cells: nb["cells"].remove(cells["scale"]))),
    ),
    Case(
        "answer cell renamed",
        **_lost("has no cell `scale`", change=_instead(b'"grade_id": "scale"', b'"grade_id": "scale-copy"')),
    ),
    Case(
        "source as lines",
        change=_cells(
            lambda nb, cells: cells["scale"].update(source=cells["scale"]["source"].splitlines(True))
        ),
    ),
    Case(
        "source missing",
        **_lost("has no cell `scale`", change=_instead(b'"source": "_mark', b'"was": "_mark')),
    ),
    Case(
        "source is a number",
        **_lost("Your cell `scale` holds something that is no text", change=_source(b"3")),
    ),
    Case(
        "source is null",
        **_lost("Your cell `scale` holds something that is no text", change=_source(b"null")),
    ),
    Case(
        "source is an object",
        **_lost("Your cell `scale` holds something that is no text", change=_source(b'{"pass": 1}')),
    ),
    Case(
        "source of lists",
        **_lost("Your cell `scale` holds something that is no text", change=_source(b'["pass", ["pass"]]')),
    ),
    Case(
        "source nested deep",
        **_lost("Your cell `scale` cannot be read", change=_source(b"[" * 10**5 + b"]" * 10**5)),
    ),
    Case("source not UTF-8", **_lost("Your cell `scale` cannot be read", change=_source(b'"\xff"'))),
    Case(
        "source with half a character",
        **_lost("Your cell `scale` holds something that is no text", change=_source(b'"\\ud800"')),
    ),
    Case(
        "source of 50 MB",
        **_lost(
            "Your cell `scale` cannot be read .more than 8,388,608",
            change=_source(b'"' + b"#" * (50 * MB) + b'"'),
        ),
    ),
    Case(
        "source of 2 MB",
        **_lost("Your cell `scale` is longer than 1,048,576", change=_source(b'"' + b"#" * (2 * MB) + b'"')),
    ),
    Case(
        "another cell of 50 MB",
        change=_instead(b'"cells": [', b'"cells": [{"source": "' + b"#" * (50 * MB) + b'"},'),
    ),
    Case(
        "metadata of 9 MB",
        change=_instead(b'"nbgrader": {', b'"nbgrader": {"more": "' + b"#" * (9 * MB) + b'",'),
    ),
    Case("a link", change=_place(_link), problem="tiny.ipynb cannot be opened as a file: Too many levels"),
    Case(
        "a link to nothing",
        change=_place(lambda path: path.symlink_to("nowhere")),
        problem="cannot be opened as a file",
    ),
    Case("a pipe", change=_place(os.mkfifo), problem="is no file but something else"),
    Case("a folder", change=_place(Path.mkdir), problem="is no file but something else"),
    Case(
        "a device",
        change=_place(lambda path: Path("/dev/zero")),
        problem="zero is no file but something else",
    ),
    Case("not there", change=_place(lambda path: None), problem="There is no file tiny.ipynb"),
    Case(
        "not readable",
        change=_place(lambda path: path.touch(0o200)),
        problem="cannot be opened as a file: Permission denied",
    ),
    Case(
        "renamed", change=_place(_renamed), note="The file is called tiny .1.\n\ufffd.ipynb, not tiny.ipynb"
    ),
    Case(
        "written answer too long",
        change=_cells(lambda nb, cells: cells["why"].update(source="x" * (2 * MB))),
        note="The written answer `why` is longer than 1,048,576",
    ),
]
