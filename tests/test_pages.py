"""The pages of the course tell the truth about the code."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from minamp.clinic.rules import CODES, RULES

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "notebooks" / "pages"


def test_the_policy_table_is_that_of_the_registry():
    made = runpy.run_path(str(PAGES / "policy_table.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), (
        "run python notebooks/pages/policy_table.py"
    )


def test_the_speed_table_is_that_of_its_measurements():
    made = runpy.run_path(str(PAGES / "speed.py"))
    text, data = (
        made["PAGE"].read_text(encoding="utf-8"),
        json.loads(made["DATA"].read_text(encoding="utf-8")),
    )
    assert text == made["page"](text, data), "run python notebooks/pages/speed.py"
    assert all(r["value"] is not None or r["verdict"] for r in data["rows"])  # unmeasured rows say why


def without_numbers(text):
    """What the doctor measures may differ from one machine to another; what it says does not."""
    return re.sub(r"\d+(\.\d+)?", "0", text)


@pytest.fixture(scope="module")
def doctors_page():
    return runpy.run_path(str(PAGES / "doctor.py"))


def test_the_doctors_page_lists_every_finding_that_a_rule_can_make(doctors_page):
    text = doctors_page["PAGE"].read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == list(CODES)
    assert RULES.keys() == doctors_page["SEEN"].keys() == set(CODES)


def test_the_doctors_page_is_what_the_doctor_says(doctors_page):
    text = doctors_page["PAGE"].read_text(encoding="utf-8")
    assert without_numbers(text) == without_numbers(doctors_page["page"]()), (
        "run python notebooks/pages/doctor.py"
    )


def test_the_readme_shows_a_report_of_the_doctor(doctors_page):
    finding = doctors_page["examine"]("clip_before_unscale")
    said = str(replace(finding, where=finding.where.replace(f"{ROOT}/", "")))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert without_numbers(" ".join(said.split())) in without_numbers(readme)


def test_every_test_named_on_the_differences_page_exists():
    named = re.findall(
        r"`(test_\w+\.py)(?:::(\w+))?`", (PAGES / "differences.md").read_text(encoding="utf-8")
    )
    assert len(named) >= 15
    for file, test in named:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, f"{file} has no {test}"


@pytest.mark.parametrize("page", sorted(p.name for p in PAGES.glob("*.md")) + ["../../README.md"])
def test_links_and_file_names_lead_somewhere(page):
    path = PAGES / page
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}"
    for name in re.findall(r"`((?:minamp|tests|notebooks)/[\w/.]+\.\w+)`", text):
        assert (ROOT / name).exists(), f"{page} names {name}"
