"""With nbgrader itself: what is released, what its gradebook knows, the commands of the instructor's page. make test-grade."""

import csv
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbgrader", reason="needs nbgrader: run make test-grade")

from grading import classroom, ordinary, tiny
from grading.classroom import FULL, grade, hand_in
from nbgrader.api import Gradebook

from minamp.grade import assignment, gradebook, run
from minamp.grade.autograded import harmless
from minamp.grade.course import Course

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "notebooks"))
import course as making  # noqa: E402

NAMES = [source.stem for source in making.sources()]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A course folder as make exercises makes it."""
    folder = tmp_path_factory.mktemp("course")
    making.make(folder, making.sources())
    return folder


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell):
    return "".join(cell["source"])


def regions(cell):
    """(the lines of a master's cell that students may see, those that they may not)."""
    secret, shown, hidden = False, [], []
    meta = cell["metadata"].get("nbgrader", {})
    if cell["cell_type"] == "markdown" and meta.get("solution"):
        return shown, source(cell).splitlines()
    for line in source(cell).splitlines():
        if "### BEGIN" in line:
            secret = True
        (hidden if secret else shown).append(line)
        if "### END" in line:
            secret = False
    return shown, hidden


@pytest.mark.parametrize("name", NAMES)
def test_the_release_shows_the_visible_tests_and_nothing_that_nbgrader_should_take_out(made, name):
    master, release = (made / kind / name / f"{name}.ipynb" for kind in ("source", "release"))
    both = [regions(cell) for cell in cells(master)]
    shown = "\n".join(line for visible, _ in both for line in visible)
    hidden = {line.strip() for _, secret in both for line in secret}
    hidden = {line for line in hidden if line not in shown or "###" in line}
    assert len(hidden) > 50
    released = release.read_text(encoding="utf-8")  # metadata and outputs included
    assert [line for line in hidden if json.dumps(line, ensure_ascii=False)[1:-1] in released] == []
    lines = {line for cell in cells(release) for line in source(cell).splitlines()}
    assert {*shown.splitlines()} <= lines
    parts = assignment.read(master)
    assert sum("raise NotImplementedError()" in source(cell) for cell in cells(release)) == len(
        parts.of("answer")
    )
    assert sum(source(cell) == "YOUR ANSWER HERE" for cell in cells(release)) == len(parts.of("written"))


def test_making_the_exercises_again_changes_nothing(made):
    paths = sorted(made.glob("[rs]*/*/*.ipynb"))
    before = [path.read_bytes() for path in paths]
    assert len(paths) == 2 * len(NAMES)
    (made / "nbgrader_config.py").write_text("# mine\n" + (made / "nbgrader_config.py").read_text())
    making.make(made, making.sources()[:1])
    for source in making.sources():
        making.write_master(source, made)
    assert [path.read_bytes() for path in paths] == before
    assert (made / "nbgrader_config.py").read_text().startswith("# mine\n")


def test_nbgrader_says_nothing_but_what_it_does(made):
    said = making.nbgrader(made, "generate_assignment", NAMES[0], "--force")
    assert said and all(
        "INFO" in line or "Removing existing assignment" in line for line in said.splitlines()
    ), said


def test_nbgrader_is_kept_from_running_submissions(made, tmp_path):
    folder = tmp_path / "course"
    shutil.copytree(made, folder)
    shutil.copytree(made / "source", folder / "submitted" / "ada")
    with pytest.raises(RuntimeError, match="use python -m minamp.grade instead"):
        making.nbgrader(folder, "autograde", NAMES[0])


# The tiny exercise, and nbgrader's gradebook of it.


@pytest.fixture(scope="session")
def tiny_course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    classroom.course(folder)
    shutil.copy(making.EXERCISES / "nbgrader_config.py", folder)
    making.nbgrader(folder, "generate_assignment", "tiny")
    return folder


@pytest.fixture
def course(tiny_course, tmp_path):
    shutil.copytree(tiny_course, tmp_path / "course")
    return Course(tmp_path / "course", tmp_path / "course" / "submitted")


def enter(course):
    """Grade without a sandbox and enter; what is said."""
    records, _ = grade(course)
    todo = run.tasks(course, [course.exercise("tiny")])
    return gradebook.enter(course, todo, list(records.values()))


def book(course):
    return Gradebook(f"sqlite:///{course.root / 'gradebook.db'}", "minamp")


def state(course, student="ada"):
    """{cell: (auto_score, manual_score, needs_manual_grade)} in the gradebook."""
    with book(course) as opened:
        grades = opened.find_submission_notebook("tiny", "tiny", student).grades
        return {g.name: (g.auto_score, g.manual_score, g.needs_manual_grade) for g in grades}


def mark(course, name, points, student="ada"):
    """Give a mark by hand, as nbgrader's page does."""
    with book(course) as opened:
        given = opened.find_grade(name, "tiny", "tiny", student)
        given.manual_score, given.needs_manual_grade = points, False
        opened.db.commit()


def test_marks_are_entered_and_exported(course):
    hand_in(course, "ada")
    hand_in(
        course, "bob", answers={"scale": "def scale(x, factor):\n    return x"}, written="YOUR ANSWER HERE"
    )
    hand_in(course, "-cyd, Zoë").write_text("{")
    (course.submitted / "dan").mkdir()
    assert (
        enter(course) == "Entered into nbgrader's gradebook: 3 submissions; 1 of them wait for marks by hand."
    )
    assert state(course)["scale_values"] == (4.0, None, False) and state(course)["why"] == (None, None, True)
    assert state(course, "bob")["scale_values"] == (0.0, None, False) and state(course, "bob")["why"] == (
        0.0,
        None,
        False,
    )
    mark(course, "why", 3.5)
    making.nbgrader(course.root, "export")
    with open(course.root / "grades.csv", newline="", encoding="utf-8") as file:
        scores = {row["student_id"]: (row["score"], row["max_score"]) for row in csv.DictReader(file)}
    broken = gradebook.student_id("-cyd, Zoë")
    assert scores == {"ada": ("15.5", "17.0"), "bob": ("7.0", "17.0"), broken: ("0.0", "17.0")}


def test_marks_by_hand_stay_and_changed_answers_are_flagged(course):
    hand_in(course, "ada")
    enter(course)
    mark(course, "why", 3.0)
    mark(course, "scale_kept", 1.0)
    enter(course)
    assert state(course)["why"] == (None, 3.0, False) and state(course)["scale_kept"] == (2.0, 1.0, False)
    hand_in(course, "ada", answers={"scale": "def scale(x, factor):\n    x *= 2\n    return x"})
    enter(course)
    assert state(course)["why"] == (None, 3.0, False) and state(course)["scale_kept"] == (0.0, 1.0, True)
    hand_in(course, "ada", written="Another reason.")
    enter(course)
    assert state(course)["why"] == (None, 3.0, True)
    mark(course, "why", 4.0)
    enter(course)
    assert state(course)["why"] == (None, 4.0, False)
    hand_in(course, "ada", written="YOUR ANSWER HERE")
    enter(course)
    assert state(course)["why"] == (0.0, 4.0, True)


def test_the_time_of_handing_in_costs_what_the_settings_say(course):
    making.nbgrader(course.root, "db", "assignment", "add", "tiny", "--duedate", "2030-01-31 23:59 UTC")
    settings = course.root / "nbgrader_config.py"
    settings.write_text(settings.read_text().replace('penalty_method = "none"', 'penalty_method = "zero"'))
    times = {
        "ada": "2030-01-31 12:00:00 UTC",
        "bob": "2030-02-01 12:00:00 UTC",
        "cyd": "when it was done",
        "dan": None,
    }
    for student, when in times.items():
        path = hand_in(course, student).with_name("timestamp.txt")
        if when:
            path.write_text(when + "\n")
    enter(course)
    with book(course) as opened:
        found = {
            s.student.id: (str(s.timestamp), s.late_submission_penalty)
            for s in opened.assignment_submissions("tiny")
        }
    assert found == {
        "ada": ("2030-01-31 12:00:00", 0.0),
        "bob": ("2030-02-01 12:00:00", FULL),
        "cyd": ("None", 0.0),
        "dan": ("None", 0.0),
    }
    (course.submitted / "bob" / "tiny" / "timestamp.txt").write_text(times["ada"])
    enter(course)
    with book(course) as opened:
        assert opened.find_submission("tiny", "bob").late_submission_penalty == 0.0


def test_nbgraders_pages_show_the_answers_and_the_reasons_and_no_hidden_test(course):
    evil = "<script>alert(1)</script> [x](javascript:alert(2)) $a<b$"
    hand_in(
        course,
        "ada",
        answers={"scale": "def scale(x, factor):\n    return 'x'\r\n# \x1b"},
        written=evil,
    )
    hand_in(course, "bob").unlink()
    (course.submitted / "bob" / "tiny" / "tiny.ipynb").mkdir()
    enter(course)
    there = {
        c["metadata"]["nbgrader"]["grade_id"]: c
        for c in cells(course.root / "autograded/ada/tiny/tiny.ipynb")
    }
    assert source(there["scale"]) == "def scale(x, factor):\n    return 'x'\n# \\x1b"
    assert source(there["why"]) == harmless(evil)
    assert there["scale_values"]["outputs"][0]["text"][0].startswith("0 of 4 points. ")
    making.nbgrader(course.root, "generate_feedback", "tiny")
    page = (course.root / "feedback/ada/tiny/tiny.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and 'href="javascript' not in page
    assert "0 of 4 points." in page and (course.root / "feedback/bob/tiny/tiny.html").exists()


def test_written_answers_hold_no_html_and_no_links():
    text = (
        "a<b, 1 < 2, <img onerror=x>, </p>, <!-- -->, [x](javascript:y), [x]: y, http://x, "
        "$\\href{x}{y} \\mmlToken{mi}[href=x]{y}$ \\\\ [0](1)"
    )
    assert harmless(text) == (
        "a< b, 1 < 2, < img onerror=x>, < /p>, < !-- -->, [x] (javascript:y), [x] : y, http: //x, "
        "$\\ href{x}{y} \\ mmlToken{mi}[href=x]{y}$ \\\\ [0] (1)"
    )


@pytest.mark.parametrize("name", ["ada", "<" * 255, "\u202e" * 85, "ä," * 85])
def test_a_students_name_in_nbgrader_fits_into_a_folders_name(name):
    assert len(gradebook.student_id(name).encode()) <= 255
    assert (gradebook.student_id(name) == name) == (name == "ada")


@pytest.mark.parametrize("name", ["=1", "+1", "-1", "@a", " -1", "\t=1"])
def test_no_spreadsheet_computes_a_students_name(name):
    assert gradebook.student_id(name).startswith("_")


def test_what_is_not_entered_is_said(course, monkeypatch):
    hand_in(course, "ada")
    records, _ = grade(course, unsafe=True)
    todo = run.tasks(course, [course.exercise("tiny")])
    records = list(records.values())
    nowhere = "Not entered into nbgrader's gradebook: "
    assert gradebook.enter(course, todo, records) == f"{nowhere}these marks were made without a sandbox."
    records[0]["sandbox"] = True
    more = tiny.cell("more", "assert True", points=1)
    classroom.write(course.masters()["tiny"], classroom.master(more))
    records, _ = grade(course)
    with pytest.raises(
        gradebook.GradebookError, match="tiny has other cells now .more.: make exercises enters them"
    ):
        gradebook.enter(course, run.tasks(course, [course.exercise("tiny")]), list(records.values()))
    (course.root / "gradebook.db").unlink()
    assert (
        gradebook.enter(course, todo, [])
        == f"{nowhere}{course.root}/gradebook.db is not there; make exercises makes it."
    )
    monkeypatch.setitem(sys.modules, "nbgrader.api", None)
    assert (
        gradebook.enter(course, todo, [])
        == f"{nowhere}nbgrader is not installed here; make grade installs it."
    )


def commands():
    """The commands of the instructor's page, from a clone to exported marks."""
    text = (ROOT / "notebooks" / "pages" / "grading.md").read_text(encoding="utf-8")
    return re.search(r"```bash\n(.+?)```", text, re.DOTALL)[1].splitlines()


def test_the_commands_of_the_instructors_page_lead_from_a_clone_to_exported_marks(ordinary_folder, sandbox):
    clone, *rest = commands()
    assert clone == "git clone REPOSITORY minamp && cd minamp" and len(rest) == 9
    left_out = shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", "*_cache", "__pycache__")
    shutil.copytree(ROOT, ordinary_folder / "minamp", ignore=left_out)
    environment = ordinary_folder / "minamp" / ".venv-grade"  # this one, which make test-grade has made
    environment.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (environment / name).symlink_to(Path(sys.prefix) / name)
    (environment / "ready").touch()
    ordinary.give(ordinary_folder)
    script = "\n".join([f"cd {ordinary_folder}/minamp", *rest])
    shell = "import os, sys; os.execvp('bash', ['bash', '-exc', sys.argv[1]])"
    done = ordinary.run("-c", shell, script, PYTHONPATH="", HOME=str(ordinary_folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        f"Entered into nbgrader's gradebook: {2 * len(NAMES)} submissions; {len(NAMES)} of them"
        in done.stdout
    )
    folder = ordinary_folder / "course"
    with open(folder / "grades.csv", newline="", encoding="utf-8") as file:
        exported = {(row["student_id"], row["assignment"]): row for row in csv.DictReader(file)}
    with open(folder / "results" / "grades.csv", newline="", encoding="utf-8") as file:
        graded = {(row["student"], row["exercise"]): row for row in csv.DictReader(file)}
    assert exported.keys() == graded.keys() == {(s, name) for s in ("ada", "bob") for name in NAMES}
    for (student, name), row in graded.items():
        assert row["auto_points"] == (row["auto_max"] if student == "ada" else "0") and row["problem"] == ""
        assert float(exported[student, name]["score"]) == float(row["auto_points"])
        assert exported[student, name]["max_score"] == "100.0"
    assert exported["ada", "ex1_round"]["duedate"] == "2030-01-31 23:59:00"
    assert (folder / "feedback" / "bob" / "ex1_round" / "ex1_round.html").exists()
    assert "SAWarning" not in done.stderr and "Warning" not in done.stdout
