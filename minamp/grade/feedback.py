"""The page that a student gets: points, and in words what failed. It shows no test, no expected value and runs nothing.

Whatever a student has written is escaped, and characters that cannot be seen are written out.
"""

import re
import unicodedata
from html import escape
from itertools import groupby

STYLE = """
:root { color-scheme: light dark; --soft: #59636e; --line: #d1d9e0; --good: #1a7f37; --bad: #b32400; }
@media (prefers-color-scheme: dark) { :root { --soft: #9da7b1; --line: #3d444d; --good: #57d364; --bad: #ff8f73; } }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 44rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.125rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; }
.soft { color: var(--soft); }
.sum { font-size: 1.25rem; margin: 1rem 0; }
.box { border-left: .25rem solid var(--bad); padding: .25rem .75rem; margin: 1rem 0; white-space: pre-wrap; }
ul { list-style: none; margin: 0; padding: 0; border-top: 1px solid var(--line); }
li { border-bottom: 1px solid var(--line); padding: .5rem 0; }
.row { display: flex; gap: 1rem; justify-content: space-between; align-items: baseline; }
.row b { white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
.text { white-space: pre-wrap; }
code { font: .9375rem/1.5 ui-monospace, monospace; }
"""


def visible(text):
    """`text` with what cannot be seen, or acts on what is around it, written as an escape; line breaks and tabs stay."""
    text = text.replace("\r\n", "\n")
    return "".join(c if c in "\n\t" or not _hidden(c) else c.encode("unicode_escape").decode() for c in text)


def _hidden(character):
    if character in "\u200c\u200d":  # they join letters and emoji
        return False
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def points(number):
    """'8' or '2.5'."""
    return f"{number:g}"


def page(record):
    """The HTML of one record: one file, no script, nothing to fetch."""
    title, student = _safe(record["title"]), _safe(record["student"])
    parts = [f"<h1>{title}</h1>", f'<p class="soft">{student}</p>']
    parts.append(
        f'<p class="sum"><b>{points(record["points"])} of {points(record["of"])} points</b> from the tests</p>'
    )
    if not record["sandbox"]:
        parts.append('<p class="box">Graded without a sandbox (--unsafe): a trial, not a mark.</p>')
    if record["problem"]:
        parts.append(f'<p class="box">{_text(record["problem"])}</p>')
    for heading, marks in groupby(record["marks"], key=lambda mark: mark["heading"]):
        rows = "".join(_row(mark, bool(record["problem"])) for mark in marks)
        parts.append(f"<h2>{_safe(heading)}</h2><ul>{rows}</ul>" if heading else f"<ul>{rows}</ul>")
    if record["by_hand"]:
        rows = "".join(_written(question) for question in record["by_hand"])
        parts.append(f"<h2>Answered in words</h2><ul>{rows}</ul>")
    if record["notes"]:
        notes = "".join(f'<li class="text">{_text(note)}</li>' for note in record["notes"])
        parts.append(f"<h2>Notes</h2><ul>{notes}</ul>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{title}: {student}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _safe(text):
    return escape(visible(text))


def _text(text):
    """`text` as HTML, names in backticks as code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", _safe(text))


def _row(mark, told):
    good = mark["points"] == mark["of"]
    word, colour = ("right", "good") if good else ("not yet", "bad")
    name = f"<code>{_safe(mark['id'])}</code>"
    if mark["about"]:
        name = f'<span>{_safe(mark["about"])} <span class="soft">{name}</span></span>'
    text = "" if good or told else f'<p class="text">{_text(mark["text"])}</p>'
    return (
        f'<li><div class="row">{name}<b class="{colour}">{word}: {points(mark["points"])} of {points(mark["of"])}</b></div>'
        f"{text}</li>"
    )


def _written(question):
    text = "Your answer is marked by hand." if question["answered"] else "No answer was found."
    return (
        f'<li><div class="row"><span>{_safe(question["heading"] or question["id"])}</span>'
        f"<b>{points(question['of'])} points</b></div><p>{text}</p></li>"
    )
