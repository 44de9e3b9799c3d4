"""Sphinx's settings for `make site`: static pages with the stored outputs, no kernel, and nothing that a browser has to fetch.

Three things are made here: formulas as MathML, a page for each file of code that is linked to, and the list of notebooks.
"""

import ast
import json
import re
from pathlib import Path

import latex2mathml.converter
from docutils import nodes
from sphinx import addnodes

BOOK = Path(__file__).resolve().parent
ROOT = BOOK.parent

project, author = "minamp", "the minamp authors"
extensions = ["myst_nb"]
exclude_patterns = ["src", "exercises", "pages/*.py"]
html_theme = "furo"
html_title = "The minamp course"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = False
html_copy_source = False
html_use_index = False  # it would be empty
html_show_search_summary = False  # it is fetched, which a browser forbids to a page opened as a file
myst_enable_extensions = ["dollarmath"]
nb_execution_mode = "off"
nb_code_prompt_show, nb_code_prompt_hide = "Show the answer", "Hide the answer"  # only answers are folded
# A width makes the figure a link to its file, which a phone can zoom; the style sheet shows it at its own size.
nb_render_image_options = {"width": "100%", "alt": "Figure; the text below says what it shows"}


# Formulas become MathML, which browsers set by themselves: no script and no font. The converter takes some TeX by its other name.
OTHER_NAMES = {"{aligned}": "{align*}", r"\lVert": r"\|", r"\rVert": r"\|"}


def _mathml(tex, display):
    for name, other in OTHER_NAMES.items():
        tex = tex.replace(name, other)
    return latex2mathml.converter.convert(tex, display=display)


def _inline(self, node):
    self.body.append(_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _block(self, node):
    self.body.append(f'<div class="math">{_mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


html_math_renderer = "mathml"


# A link to a file of code leads to a page that shows it, at the line where the name in the link's text is defined.
linked = set()


def _line(path, name):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        names = [getattr(t, "id", getattr(t, "name", None)) for t in targets]
        if name in names:
            return f"#line-{node.lineno}"
    return ""


def _link_code(app, doctree):
    here = Path(app.env.doc2path(app.env.docname)).parent
    for node in list(doctree.findall(addnodes.download_reference)):
        path = (here / node["reftarget"]).resolve()
        if path.suffix == ".py" and path.is_file():
            page = "code/" + path.relative_to(ROOT).with_suffix("").as_posix()
            linked.add((page, path))
            up = "../" * app.env.docname.count("/")
            line = _line(path, node.astext().rpartition(".")[2])
            node.replace_self(
                nodes.reference("", "", *node.children, internal=True, refuri=f"{up}{page}.html{line}")
            )


def _code_pages(app):
    for page, path in sorted(linked):
        text = path.read_text(encoding="utf-8")
        code = app.builder.highlighter.highlight_block(text, "python", linespans="line")
        title = path.relative_to(ROOT).as_posix()
        yield page, {"title": title, "body": f"<h1>{title}</h1>{code}"}, "page.html"


# The list of notebooks on the first page: title and time as each notebook says them.
def _list_notebooks(app, docname, source):
    rows = ["| notebook | takes about |", "|---|---:|"]
    for path in sorted(BOOK.glob("[0-9]*.ipynb")):
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        title, time = first.partition("\n")[0].lstrip("# "), re.search(r"about (\d+\s+minutes)", first)
        rows.append(f"| [{title}]({path.name}) | {time[1] if time else ''} |")
    source[0] = source[0].replace("<!-- the list of notebooks -->", "\n".join(rows))


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("source-read", _list_notebooks)
    app.connect("doctree-read", _link_code, priority=400)  # before Sphinx copies what is to be downloaded
    app.connect("html-collect-pages", _code_pages)
