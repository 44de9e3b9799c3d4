"""Writes the table of speed.md from speed.json: python notebooks/pages/speed.py (`make bench ARGS=--page` runs it)."""

import json
from pathlib import Path

PAGE = Path(__file__).with_name("speed.md")
DATA = Path(__file__).with_name("speed.json")
START, END = "<!-- made by notebooks/pages/speed.py -->", "<!-- end -->"


def _cell(text):
    return str(text).replace("|", "\\|")


def table(data):
    """The Markdown between the page's marks: where it was measured, all rows, why goals are missed."""
    machine = ", ".join(f"{name} {value}" for name, value in data["machine"].items())
    short = " Measured quickly, with few rounds and sizes." * data["quick"]
    lines = [
        f"Measured on: {machine}.{short}",
        "",
        "| work | measured | goal | verdict | detail |",
        "|---|---|---|---|---|",
    ]
    for r in data["rows"]:
        known = r["value"] is not None
        measured = f"{r['value']:.2f} {r['unit']}" if known else "-"
        goal = "-" if r["goal"] is None else f"{'at least' if r['at_least'] else 'at most'} {r['goal']:g}"
        cells = (r["work"], measured, goal, r["verdict"], r["detail"] if known else "")
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    missed = {}
    for r in data["rows"]:
        if r["met"] is False:
            missed.setdefault(
                r["why"] or "Nothing is known to stand in the way: look there first.", []
            ).append(r["work"])
    lines += ["", "## Goals that are missed, and why", ""]
    lines += [f"- {'; '.join(works)}. {' '.join(why.split())}" for why, works in missed.items()]
    return "\n".join(lines if missed else [*lines, "None in this run."])


def page(text, data):
    """`text` with everything between its marks made again from `data`."""
    head, tail = text.split(START)[0], text.split(END)[1]
    return f"{head}{START}\n\n{table(data)}\n\n{END}{tail}"


if __name__ == "__main__":
    data = json.loads(DATA.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), data), encoding="utf-8")
