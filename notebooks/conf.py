"""Sphinx's settings for `make site`: static pages with the stored outputs, no kernel, and nothing that a browser has to fetch."""

import latex2mathml.converter
from docutils import nodes

project, author = "minamp", "the minamp authors"
extensions = ["myst_nb"]
exclude_patterns = ["src", "pages/*.py"]
html_theme = "furo"
html_show_sphinx = False
html_copy_source = False
myst_enable_extensions = ["dollarmath"]
nb_execution_mode = "off"


# Formulas become MathML, which browsers set by themselves: no script and no font.
def _inline(self, node):
    self.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def _block(self, node):
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    self.body.append(f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))


html_math_renderer = "mathml"
