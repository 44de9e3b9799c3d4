"""autograded/STUDENT/NAME/NAME.ipynb, of which nbgrader makes its pages: put together here, not executed.

It is what was released, with the student's answers in it and, under each group of tests, its points and what failed, in words.
No hidden test and no mark scheme is in it: nbgrader would show them to the student.
"""

import re
from copy import deepcopy

from minamp.grade.feedback import points, visible


def released(master, config):
    """The instructor's notebook without solutions, hidden tests and mark schemes, as nbgrader takes them out."""
    import nbformat
    from nbgrader.preprocessors import ClearHiddenTests, ClearMarkScheme, ClearSolutions

    notebook, resources = nbformat.read(master, as_version=4), {}
    for step in (ClearSolutions, ClearHiddenTests, ClearMarkScheme):
        notebook, resources = step(config=config).preprocess(notebook, resources)
    return notebook


def harmless(text):
    """Markdown without HTML and links: nbgrader's pages would run what is in them in the instructor's name, or when clicked.

    They become plain text by a space that formulas and code hardly show: `a<b` becomes `a< b`, `[a](b)` becomes `[a] (b)`,
    `http://a` becomes `http: //a`.
    """
    return re.sub(r"<(?=[A-Za-z/!?])|\](?=[(:])|\\(?=href|mmlToken)|:(?=//)", r"\g<0> ", visible(text))


def autograded(released, answers, made):
    """A copy of what was released with these answers ({grade_id: source}) and the marks of the record `made`."""
    from nbformat.v4 import new_output

    notebook = deepcopy(released)
    marks = {mark["id"]: mark for mark in made["marks"]}
    for cell in notebook.cells:
        name = cell.metadata.get("nbgrader", {}).get("grade_id")
        if name in answers:
            cell.source = visible(answers[name]) if cell.cell_type == "code" else harmless(answers[name])
        if name in marks:
            mark = marks[name]
            text = f"{points(mark['points'])} of {points(mark['of'])} points. {visible(mark['text'])}".strip()
            cell.outputs = [new_output("stream", name="stdout", text=text + "\n")]
    return notebook


def sources(notebook):
    """{grade_id: source} of a notebook's cells."""
    return {c.metadata.nbgrader.grade_id: c.source for c in notebook.cells if "nbgrader" in c.metadata}
