"""The course's notebooks: made from their sources, small, with working links, and saying the same when they are run again.

What needs Jupyter runs in make test-notebooks; the rest reads the stored files and runs everywhere.
"""

import functools
import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "notebooks"
SOURCES = sorted((BOOK / "src").glob("[0-9]*.py"))
NOTEBOOKS = [BOOK / f"{source.stem}.ipynb" for source in SOURCES]
MISSING = [name for name in ("jupytext", "nbclient", "ipykernel") if importlib.util.find_spec(name) is None]
jupyter = pytest.mark.skipif(MISSING != [], reason=f"needs {', '.join(MISSING)}: run make test-notebooks")
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@functools.cache
def build():
    spec = importlib.util.spec_from_file_location("build", BOOK / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def stored(path):
    return json.loads(path.read_text(encoding="utf-8"))


def text(source):
    return source if isinstance(source, str) else "".join(source)


def cells(notebook):
    return [(c["cell_type"], text(c["source"]), c["id"], c["metadata"]) for c in notebook["cells"]]


def rounded(notebook, skipped="machine"):
    """Per code cell its printed text, with every number to three digits."""

    def number(match):
        return f"{float(match.group()):.3g}"

    printed = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and skipped not in cell["metadata"].get("tags", ()):
            outputs = [
                text(o.get("text", "")) or text(o.get("data", {}).get("text/plain", ""))
                for o in cell["outputs"]
            ]
            printed.append(re.sub(r"\d+\.?\d*(e[+-]?\d+)?", number, "".join(outputs)))
    return printed


def links(path):
    for kind, source, *_ in cells(stored(path)):
        if kind == "markdown":
            yield from re.findall(r"\[([^\]]+)\]\(([^)#\s]+)[^)]*\)", source)


def test_there_is_a_notebook_for_every_source_and_no_other():
    assert NOTEBOOKS and sorted(BOOK.glob("*.ipynb")) == NOTEBOOKS


@jupyter
@every_notebook
def test_source_and_notebook_agree(path):
    made = json.loads(json.dumps(build().convert(BOOK / "src" / f"{path.stem}.py")))
    assert cells(made) == cells(stored(path)), "run make notebooks"


@jupyter
@every_notebook
def test_it_runs_from_a_clean_kernel_and_prints_the_same(path):
    again = json.loads(json.dumps(build().execute(build().convert(BOOK / "src" / f"{path.stem}.py"))))
    assert rounded(again) == rounded(stored(path)), "run make notebooks"


@jupyter
@every_notebook
def test_its_claims_hold_with_the_last_digits_of_another_machine(path):
    # Its own assertions. Two threads that wait for each other beside another test take five times as long.
    build().execute(build().convert(BOOK / "src" / f"{path.stem}.py"), threads=2, timeout=300)


@jupyter
def test_the_settings_in_somebodys_home_do_not_count(tmp_path, monkeypatch):
    import nbformat

    (tmp_path / "matplotlibrc").write_text("figure.dpi: 31\n", encoding="utf-8")
    startup = tmp_path / "profile_default/startup"
    startup.mkdir(parents=True)
    (startup / "mine.py").write_text("mine = True\n", encoding="utf-8")
    for name in ("MPLCONFIGDIR", "IPYTHONDIR", "MATPLOTLIBRC"):
        monkeypatch.setenv(name, str(tmp_path))
    asked = "import matplotlib\nprint(matplotlib.rcParams['figure.dpi'], 'mine' in globals())"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(asked, id="a")])
    assert build().execute(notebook).cells[0].outputs[0].text == "100.0 False\n"


@jupyter
@pytest.mark.parametrize("tag, changed", [("machine", False), ("other", True)])
def test_new_times_alone_do_not_change_a_notebook(tag, changed, tmp_path, monkeypatch):
    import nbformat

    def printing(words):
        cell = nbformat.v4.new_code_cell("print(now())", id="a", metadata={"tags": [tag]})
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=words)]
        return nbformat.v4.new_notebook(cells=[cell])

    path = tmp_path / "00_times.ipynb"
    monkeypatch.setattr(build(), "target", lambda source: path)
    monkeypatch.setattr(build(), "convert", lambda source: source)
    monkeypatch.setattr(build(), "execute", printing)
    assert build().build("1 ms") and not build().build("1 ms")
    assert build().build("2 ms") == changed
    assert ("2 ms" in path.read_text(encoding="utf-8")) == changed


@every_notebook
def test_what_is_stored(path):
    notebook = stored(path)
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(c["outputs"] for c in code if re.search(r"print\(|plt\.show\(", text(c["source"])))
    assert any("image/png" in o.get("data", {}) for c in code for o in c["outputs"]), "no figure"
    kinds = {o["output_type"] for c in code for o in c["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert not any(o.get("name") == "stderr" for c in code for o in c["outputs"])


@every_notebook
def test_nothing_that_varies_is_stored(path):
    notebook = stored(path)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert "version" not in notebook["metadata"]["language_info"]
    assert all(
        c.get("execution_count") is None and "execution" not in c["metadata"] for c in notebook["cells"]
    )
    ids = [c["id"] for c in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    raw = path.read_text(encoding="utf-8")
    assert not re.search(r"\b0x[0-9a-f]{6,}|/home/|/tmp/|site-packages", raw)


@every_notebook
def test_size(path):
    assert path.stat().st_size < 1_000_000


@every_notebook
def test_links_and_the_names_in_them(path):
    found = list(links(path))
    assert any(target.startswith("../minamp/") for _, target in found), "no link to the code it is about"
    for name, target in found:
        if "://" in target:
            continue
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
        if target.endswith(".py"):  # [`minamp.formats.ulp`](../minamp/formats.py): that file must define it
            module, _, attribute = name.strip("`").rpartition(".")
            assert module.replace(".", "/") == target.removeprefix("../").removesuffix(".py").removesuffix(
                "/__init__"
            ), name
            assert hasattr(importlib.import_module(module), attribute), f"{path.name} names {name}"


@every_notebook
def test_the_form(path):
    kinds = cells(stored(path))
    first = kinds[0][1]
    assert first.startswith("# ") and "you will be able to" in first and "pip install" in first
    answers = [i for i, (*_, metadata) in enumerate(kinds) if "hide-output" in metadata.get("tags", ())]
    questions = [i for i, (_, source, *_) in enumerate(kinds) if "**Predict.**" in source]
    assert questions and answers == [i + 1 for i in questions], "every question is answered by the next cell"
    last = kinds[-1][1]
    asked = re.findall(r"^\d+\. ", last.partition("## Questions")[2].partition("\n## ")[0], re.MULTILINE)
    assert 2 <= len(asked) <= 4
    assert "arxiv.org" in last


def test_every_claim_is_judged_by_a_cell_below_it():
    kinds = cells(stored(BOOK / "10_claims.ipynb"))
    headings = {
        m.group(1): (i, m.group(2))
        for i, (kind, source, *_) in enumerate(kinds)
        if kind == "markdown"
        for m in re.finditer(r"^## \((\w)\) (.+)$", source, re.MULTILINE)
    }
    assert "".join(headings) == "abcdefghijklmnopq"
    stops = [i for i, _ in headings.values()][1:] + [len(kinds)]
    for (letter, (start, _)), stop in zip(headings.items(), stops, strict=True):
        code = [source for kind, source, *_ in kinds[start:stop] if kind == "code"]
        verdicts = [c for c in code if re.search(rf'judge\(\s*"{letter}"', c)]
        assert len(verdicts) == 1, f"({letter}) has {len(verdicts)} cells that judge it"
        call = verdicts[0].partition("judge(")[2]
        assert not re.search(r',\s*"(true|false|half true|misleading|outdated)', call), f"({letter}) is typed"
