"""From submissions to marks: everybody has a row, nothing is lost, nothing is done twice, nothing of a student's gets out."""

import csv
import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from grading import classroom, ordinary, tiny
from grading.classroom import FULL, grade, hand_in, no_sandbox

from minamp.grade import __main__ as command
from minamp.grade import run
from minamp.grade.course import CourseError, exercise_seed
from minamp.grade.feedback import page, visible
from minamp.grade.run import cell

CLASS = [f"student{k:02}" for k in range(60)]


@pytest.fixture
def course(tmp_path):
    return classroom.course(tmp_path)


def rows(course):
    """{(student, exercise): row} of grades.csv."""
    with open(course.results / "grades.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    found = {(row["student"], row["exercise"]): row for row in table}
    assert len(found) == len(table)
    return found


def files(course):
    """{path: bytes} of all results."""
    there = sorted(path for path in course.results.rglob("*") if path.is_file())
    return {path.relative_to(course.results).as_posix(): path.read_bytes() for path in there}


def broken(path, k):
    """Break the submission at `path` in the k-th way."""
    ways = [
        lambda: path.write_text(""),
        lambda: path.write_text('{"cells": ['),
        lambda: path.write_text("[" * 100_000),
        lambda: path.write_bytes(b"\xff\xfe\x00"),
        lambda: path.unlink(),
        lambda: (path.unlink(), path.parent.rmdir()),
        lambda: (path.unlink(), path.symlink_to("/etc/passwd")),
        lambda: (path.unlink(), path.symlink_to(path)),
        lambda: (path.unlink(), os.mkfifo(path)),
        lambda: (path.unlink(), path.mkdir()),
        lambda: path.write_text('{"nbformat": 3, "cells": []}'),
        lambda: path.write_text(
            '{"nbformat": 4, "cells": [{"cell_type": "code", "metadata": {}, "source": "x"}]}'
        ),
    ]
    ways[k % len(ways)]()


def test_a_broken_submission_in_any_place_costs_nobody_else_anything(course):
    for student in CLASS:
        hand_in(course, student)
    made, _ = grade(course)
    assert {record["points"] for record in made.values()} == {FULL} and len(made) == 60
    for k, student in enumerate(CLASS):
        path = course.submitted / student / "tiny" / "tiny.ipynb"
        broken(path, k)
        grade(course)
        table = rows(course)
        assert [name for name, _ in table] == CLASS
        lost = [
            row["student"] for row in table.values() if row["auto_points"] != f"{FULL:g}" or row["problem"]
        ]
        assert lost == [student] and table[student, "tiny"]["problem"], k
        for entry in (path, path.parent):
            if entry.is_dir() and not entry.is_symlink() and entry is path:
                entry.rmdir()
        path.unlink(missing_ok=True)
        hand_in(course, student)


def test_everybody_has_a_row_whatever_the_folder_is_called_and_holds(course, tmp_path):
    names = ["-dash", "with space", "Zoë ☃", "=1+1", "+x", "@x", "grades.csv", "seed", "a\nb", "x" * 200]
    for name in names:
        hand_in(course, name)
    os.makedirs(os.fsencode(course.submitted) + b"/no\xfftext")
    (course.submitted / "link").symlink_to(tmp_path)
    (course.submitted / "nothing").mkdir()
    (course.submitted / "a file").write_text("no student")
    (course.submitted / ".ipynb_checkpoints").mkdir()
    made, _ = grade(course)
    everybody = [*names, "no\udcfftext", "link", "nothing"]
    assert course.loose() == ["a file"]
    assert sorted(student for student, _ in made) == sorted(everybody)
    problems = {student: record["problem"] for (student, _), record in made.items()}
    assert {name for name, problem in problems.items() if problem is None} == {*names} - {
        "grades.csv",
        "seed",
    }
    assert problems["nothing"] == problems["no\udcfftext"] == "No notebook was handed in."
    assert problems["link"] == "The student's folder is a link: not followed."
    assert problems["seed"].startswith("A student's folder cannot be called seed")
    assert [row["student"] for row in rows(course).values()] == [
        cell(visible(name)) for name in sorted(everybody)
    ]


def test_no_link_leads_out_of_a_students_folder(course):
    hand_in(course, "ada")
    for student, target in ("bob", "../../ada/tiny/tiny.ipynb"), ("cyd", "../other.ipynb"):
        folder = course.submitted / student / "tiny"
        folder.mkdir(parents=True)
        (folder / "tiny.ipynb").symlink_to(target)
    hand_in(course, "cyd", "other").rename(course.submitted / "cyd" / "other.ipynb")
    (course.submitted / "dan").mkdir()
    (course.submitted / "dan" / "tiny").symlink_to("../ada/tiny")
    made, graded = grade(course)
    assert graded == ["ada", "cyd"]
    for student in "bob", "dan":
        assert "a link that leads out of the student's folder" in made[student, "tiny"]["problem"]


def test_a_notebook_of_another_name_is_taken_if_it_is_the_only_one_and_named_if_not(course):
    for student in "ada", "bob", "cyd":
        path = hand_in(course, student)
        path.rename(path.with_name("tiny (1).ipynb"))
    hand_in(course, "bob").rename(course.submitted / "bob" / "tiny" / "tiny (2).ipynb")
    (course.submitted / "cyd" / "tiny" / "tiny (1).ipynb").rename(course.submitted / "cyd" / "tiny.ipynb")
    made, graded = grade(course)
    assert graded == ["ada"] and made["ada", "tiny"]["points"] == FULL
    assert made["ada", "tiny"]["notes"] == ["The file is called tiny (1).ipynb, not tiny.ipynb."]
    there = made["bob", "tiny"]["problem"], made["cyd", "tiny"]["problem"]
    assert there == (
        "There is no tiny/tiny.ipynb; there is tiny/tiny (1).ipynb, tiny/tiny (2).ipynb. If that is meant, move it there.",
        "There is no tiny/tiny.ipynb; there is tiny.ipynb. If that is meant, move it there.",
    )


def test_an_exercise_is_graded_once_somebody_has_handed_it_in(tmp_path):
    course = classroom.course(tmp_path, "ex1", "ex2", "ex3")
    for student in "ada", "bob":
        (course.submitted / student).mkdir()
    assert [e.assignment.name for e in command.chosen(course, [])] == ["ex1", "ex2", "ex3"]
    hand_in(course, "ada", "ex2")
    assert [e.assignment.name for e in command.chosen(course, [])] == ["ex2"]
    assert [e.assignment.name for e in command.chosen(course, ["ex3"])] == ["ex2", "ex3"]


def test_grading_one_exercise_leaves_the_others_as_they_are(tmp_path):
    course = classroom.course(tmp_path, "ex1", "ex2", "ex3")
    for student in "ada", "bob":
        hand_in(course, student, "ex1")
        hand_in(course, student, "ex2")
    grade(course, names=["ex1"])
    made, graded = grade(course, names=["ex2"])
    assert graded == ["ada", "bob"] and {name for _, name in made} == {"ex1", "ex2"}
    assert grade(course, names=["ex1"], again=True)[1] == ["ada", "bob"]
    problems = {name: row["problem"] for (student, name), row in rows(course).items() if student == "ada"}
    assert problems == {"ex1": "", "ex2": "", "ex3": "not graded yet"}


def test_grading_again_changes_nothing_and_runs_nobody(course):
    for student in "ada", "bob", "cyd":
        hand_in(course, student)
    (course.submitted / "dan").mkdir()
    broken(hand_in(course, "eve"), 1)
    _, graded = grade(course)
    first = files(course)
    assert graded == ["ada", "bob", "cyd", "eve"]
    assert grade(course)[1] == [] and files(course) == first
    assert grade(course, again=True)[1] == graded and files(course) == first


def test_what_has_changed_is_graded_again(course):
    for student in "ada", "bob":
        hand_in(course, student)
    grade(course)
    hand_in(course, "bob", answers={"scale": "def scale(x, factor):\n    return x"})
    made, graded = grade(course)
    assert graded == ["bob"] and made["bob", "tiny"]["points"] < FULL
    master = classroom.master()
    master["cells"][1]["source"] += "# reworded"
    classroom.write(course.masters()["tiny"], master)
    assert grade(course)[1] == ["ada", "bob"]
    before = files(course)["ada/tiny.json"]
    (course.results / "seed").unlink()
    assert grade(course)[1] == ["ada", "bob"]
    assert json.loads(before)["seed"] != json.loads(files(course)["ada/tiny.json"])["seed"]
    (course.results / "ada" / "tiny.html").unlink()
    (course.results / "bob" / "tiny.json").write_text("{")
    assert grade(course)[1] == ["ada", "bob"]
    (course.submitted / "ada" / "tiny" / "tiny.ipynb").unlink()
    made, graded = grade(course)
    assert graded == [] and made["ada", "tiny"]["problem"] == "No notebook was handed in."


def test_marks_made_without_a_sandbox_last_until_there_is_one(course):
    hand_in(course, "ada")
    for unsafe, graded, said in (
        (True, ["ada"], "NO: --unsafe"),
        (True, [], "NO: --unsafe"),
        (False, ["ada"], "yes"),
    ):
        assert grade(course, unsafe=unsafe)[1] == graded
        assert rows(course)["ada", "tiny"]["sandbox"] == said
    assert grade(course, unsafe=True)[1] == [] and rows(course)["ada", "tiny"]["sandbox"] == "yes"


KILLED = """
import sys, time
from pathlib import Path
from grading import classroom
from minamp.grade.course import Course

def slowly(*arguments):
    time.sleep(0.01)
    return classroom.here(*arguments)

folder = Path(sys.argv[1])
classroom.grade(Course(folder, folder / "submitted"), slowly)
"""


def test_a_run_that_is_killed_leaves_whole_results_and_the_next_goes_on(course, tmp_path_factory):
    for student in CLASS:
        hand_in(course, student)
    grade(course)
    whole = files(course)
    for path in course.results.glob("*/*"):
        path.unlink()
    environment = {**os.environ, "PYTHONPATH": f"{ordinary.ROOT}{os.pathsep}{ordinary.ROOT / 'tests'}"}
    for wanted in 5, 20, 45:
        process = subprocess.Popen([sys.executable, "-c", KILLED, course.root], env=environment)
        while len(list(course.results.glob("*/*.json"))) < wanted:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        there = {path: data for path, data in files(course).items() if not Path(path).name.startswith(".")}
        assert 60 > sum(path.endswith(".json") for path in there) >= wanted
        assert all(whole[path] == data for path, data in there.items() if path != "grades.csv")
        assert [student for student, _ in rows(course)] == CLASS
    done = {path.split("/")[0] for path in there if path.endswith(".json")}
    assert grade(course)[1] == sorted({*CLASS} - done)
    assert files(course) == whole


def test_two_runs_at_once_are_refused(course):
    with course.alone(), pytest.raises(CourseError, match="another run is grading .*: wait until it is done"):
        grade(course)


def test_if_the_grader_itself_fails_the_others_are_graded_and_it_is_tried_again(course, capsys):
    for student in "ada", "bob":
        hand_in(course, student)

    def fails(assignment, path, *rest):
        if "ada" in path.parts:
            raise ZeroDivisionError("a fault of ours")
        return classroom.here(assignment, path, *rest)

    made, _ = grade(course, fails)
    assert made["bob", "tiny"]["points"] == FULL
    said = "The grader itself failed, which is not the student's doing: ZeroDivisionError: a fault of ours"
    assert rows(course)["ada", "tiny"]["problem"] == said
    made, graded = grade(course)
    assert graded == ["ada"] and made["ada", "tiny"]["points"] == FULL


def test_the_seed_is_secret_and_every_exercise_has_its_own(course):
    hand_in(course, "ada")
    made, _ = grade(course)
    path = course.results / "seed"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(course.results.stat().st_mode) == 0o700
    seed = course.seed()
    assert len(seed) == 16 and course.seed() == seed
    assert (
        len({exercise_seed(seed, name) for name in ("ex1", "ex2")} | {exercise_seed(seed[::-1], "ex1")}) == 3
    )
    for name, data in files(course).items():
        assert name == "seed" or not (
            seed.hex().encode() in data or str(exercise_seed(seed, "tiny")).encode() in data
        )
    path.write_text("")
    with pytest.raises(CourseError, match="seed is damaged: delete it"):
        grade(course)


EVIL = "<script>alert(1)</script> & \x1b[31m\u202e\x00 `x`"


def test_what_a_student_writes_is_text_on_the_page(course):
    hand_in(
        course,
        EVIL.replace("/", "").replace("\x00", ""),
        answers={"scale": f"def scale(x, factor):\n    raise ValueError({EVIL!r})"},
    )
    (record,) = grade(course)[0].values()
    record["notes"].append(EVIL)
    record["problem"] = EVIL
    for html in page(record), page(record | {"problem": None}):
        assert "<script" not in html and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; " in html
        assert not re.search(r"[^\n -~]", html) and r"\x1b[31m\u202e\x00 <code>x</code>" in html
        assert re.findall(r"(?:src|href|url|http)[=(:]", html) == []


def test_the_page_says_what_failed_and_shows_no_test(course):
    hand_in(
        course, "ada", answers={"scale": "def scale(x, factor):\n    return x"}, written="YOUR ANSWER HERE"
    )
    hand_in(course, "bob", answers={"scale": "def scale(x, factor):\n    return x"})
    grade(course)
    ada, bob = ((course.results / student / "tiny.html").read_text() for student in ("ada", "bob"))
    assert "No answer was found." in ada and "Your answer is marked by hand." in bob
    assert (
        "<b>7 of 12 points</b> from the tests" in bob and "not yet: 0 of 4" in bob and "right: 3 of 3" in bob
    )
    assert "scale([1, 2, 3], 2) is wrong" in bob
    for line in {*tiny.SCALE_VALUES.splitlines(), *tiny.ACCUMULATE_INPLACE.splitlines()} - {""}:
        assert line.strip() not in bob
    assert [row["manual_pending"] for row in rows(course).values()] == ["0", "5"]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", " =1"])
def test_no_spreadsheet_computes_what_a_student_wrote(text):
    assert cell(text) == "'" + text
    assert cell("a=1") == "a=1"


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["nowhere"], "nowhere has no source/NAME/NAME.ipynb: make exercises makes a course folder"),
        ([".", "ex7"], "no exercise ex7: there are tiny"),
        ([".", "--submitted", "nowhere"], "there is no folder nowhere: put STUDENT/NAME/NAME.ipynb there"),
    ],
)
def test_a_wrong_command_line_is_explained(course, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(course.root)
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert text in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be refused as root")
def test_a_full_disk_is_named_and_the_next_run_goes_on(course, monkeypatch, capsys):
    hand_in(course, "ada")
    with no_sandbox(), monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(run, "write_grades", mock.Mock(side_effect=full))
        assert command.main([str(course.root), "--unsafe"]) == 2
    assert "No space left on device. What is marked is kept" in capsys.readouterr().err
    with no_sandbox():
        assert command.main([str(course.root), "--unsafe"]) == 0


def test_root_is_refused_unless_told(course, capsys):
    hand_in(course, "ada")
    assert command.main([str(course.root)]) == 2
    assert "This is root" in capsys.readouterr().err
    assert not course.results.exists()
    assert command.main([str(course.root), "--unsafe"]) == 0
    assert rows(course)["ada", "tiny"]["auto_points"] == f"{FULL:g}"


# The command itself, by an ordinary user.


WITHOUT = "import os, sys; os.environ['PATH'] = ''; from minamp.grade.__main__ import main; sys.exit(main())"


def command_line(course, *arguments, bubblewrap=True):
    ordinary.give(course.root)
    start = ("-m", "minamp.grade") if bubblewrap else ("-c", WITHOUT)
    return ordinary.run(*start, str(course.root), *arguments, COLUMNS="100")


@pytest.fixture
def open_course(ordinary_folder):
    return classroom.course(ordinary_folder)


def test_a_class_is_graded_in_the_sandbox(open_course, sandbox):
    for student in CLASS[:5]:
        hand_in(open_course, student)
    hand_in(
        open_course, "=loop\x1b", answers={"scale": "def scale(x, factor):\n    while True:\n        pass"}
    )
    broken(hand_in(open_course, "broken"), 1)
    (open_course.submitted / "nothing").mkdir()
    done = command_line(open_course)
    assert (done.returncode, done.stderr) == (0, "")
    table = rows(open_course)
    assert [table[s, "tiny"]["auto_points"] for s in ("nothing", "broken", *CLASS[:5])] == [
        "0",
        "0",
        *5 * ["12"],
    ]
    loop = table[r"'=loop\x1b", "tiny"]
    assert (loop["auto_points"], loop["problem"], loop["sandbox"]) == ("5", "", "yes")
    assert re.search(r"^tiny +8 +7 +1 +12 +12 +6$", done.stdout, re.M)
    assert "tiny broken: The file is no notebook" in done.stdout and "\x1b" not in done.stdout
    before = files(open_course)
    assert command_line(open_course).returncode == 0 and files(open_course) == before


def test_without_a_sandbox_it_refuses_unless_told_and_then_everything_says_so(open_course, sandbox):
    hand_in(open_course, "ada")
    done = command_line(open_course, bubblewrap=False)
    assert done.returncode == 2 and "bubblewrap is missing: sudo apt-get install bubblewrap" in done.stderr
    assert not open_course.results.exists()
    done = command_line(open_course, "--unsafe", bubblewrap=False)
    assert done.returncode == 0 and done.stdout.count("--unsafe") == 2, done.stderr
    assert rows(open_course)["ada", "tiny"]["sandbox"] == "NO: --unsafe"
    there = files(open_course)
    assert json.loads(there["ada/tiny.json"])["sandbox"] is False
    assert b"Graded without a sandbox (--unsafe): a trial, not a mark." in there["ada/tiny.html"]
