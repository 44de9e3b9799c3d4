"""The command python -m minamp.grade: mark what a class has handed in."""

import argparse
import sys
from pathlib import Path
from statistics import median

from minamp.grade import gradebook
from minamp.grade.course import NOTHING, Course, CourseError
from minamp.grade.feedback import points, visible
from minamp.grade.run import grade_all, pending, tasks
from minamp.grade.sandbox import Sandbox, SandboxError

UNSAFE = "--unsafe: students' code ran as you, with all your files. These marks are a trial, no marks."


def parse(argv):
    parser = argparse.ArgumentParser(
        "python -m minamp.grade",
        description="Mark what a class has handed in: the tests run here, the students' code in a sandbox.",
    )
    parser.add_argument(
        "course", type=Path, metavar="COURSE", help="the course folder; it has source/ and submitted/"
    )
    parser.add_argument(
        "exercises",
        nargs="*",
        metavar="EXERCISE",
        help="only these (without: those that anybody has handed in)",
    )
    parser.add_argument(
        "--submitted",
        type=Path,
        metavar="DIR",
        help="the folder with the students' folders (default COURSE/submitted)",
    )
    parser.add_argument("--again", action="store_true", help="grade also what is graded already")
    parser.add_argument(
        "--unsafe",
        action="store_true",
        help="no sandbox, for your own trials: whatever a notebook says is done, as you",
    )
    options = parser.parse_args(argv)
    course = Course(options.course, options.submitted or options.course / "submitted")
    if not course.masters():
        parser.error(f"{options.course} has no source/NAME/NAME.ipynb: make exercises makes a course folder")
    if not course.submitted.is_dir():
        parser.error(f"there is no folder {course.submitted}: put STUDENT/NAME/NAME.ipynb there")
    if unknown := set(options.exercises) - set(course.masters()):
        parser.error(f"no exercise {', '.join(sorted(unknown))}: there are {', '.join(course.masters())}")
    return options, course


def chosen(course, names):
    """The exercises of grades.csv: those named and those that anybody has handed in, or if there is nothing, all."""
    students, masters = course.students(), course.masters()
    shown = [m for m in masters if m in names or any(course.handed_in(s, m) for s in students)]
    return [course.exercise(name) for name in shown or masters]


def play(course, todo, sandbox, names, again, console):
    """Grade and report; 0, or 1 if the grader itself or nbgrader failed at something."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("grading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    records = []
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=sum(task.name in names for task in todo))
        for made in grade_all(course, todo, sandbox, names, again):
            records.append(made)
            progress.advance(bar, made["exercise"] in names)
    console.print(table(records))
    for made in sorted(records, key=lambda made: (made["exercise"], made["student"])):
        if made["problem"] not in (None, NOTHING):
            say(console, f"{made['exercise']}  {made['student']}: {made['problem']}")
    if loose := course.loose():
        say(console, f"Not looked at, because a student has a folder: {', '.join(loose)}")
    say(
        console,
        f"Marks: {course.results / 'grades.csv'}; pages for students: {course.results}/STUDENT/EXERCISE.html",
    )
    try:
        say(console, gradebook.enter(course, todo, records))
    except gradebook.GradebookError as error:
        say(console, f"Not all entered into nbgrader's gradebook: {error}", "bold red")
        return 1
    return int(any("failed" in made for made in records))


def table(records):
    """What came of each exercise, in numbers."""
    from rich.table import Table

    made_of = {name: [] for name in sorted({made["exercise"] for made in records})}
    for made in records:
        made_of[made["exercise"]].append(made)
    rows = Table("exercise", box=None, pad_edge=False)
    for column in ("students", "handed in", "with a problem", "median", "of", "answers to read"):
        rows.add_column(column, justify="right")
    for name, made in made_of.items():
        handed_in = [r for r in made if r["problem"] != NOTHING]
        marks = [r["points"] for r in handed_in if not r["problem"]]
        rows.add_row(
            name,
            str(len(made)),
            str(len(handed_in)),
            str(len(handed_in) - len(marks)),
            points(median(marks)) if marks else "-",
            points(made[0]["of"]),
            str(sum(pending(r) > 0 for r in made)),
        )
    return rows


def say(console, text, style=None):
    """Print a line that may hold anything a student wrote."""
    console.print(" ".join(visible(text).split()), style=style, markup=False, highlight=False, soft_wrap=True)


def main(argv=None):
    from rich.console import Console

    options, course = parse(argv)
    console = Console()
    sandbox = Sandbox(unsafe=options.unsafe)
    if not options.unsafe and (reason := sandbox.why_not()):
        print(f"grade: {reason}", file=sys.stderr)
        return 2
    if options.unsafe:
        say(console, UNSAFE, "bold red")
    try:
        with course.alone():
            exercises = chosen(course, options.exercises)
            names = options.exercises or [exercise.assignment.name for exercise in exercises]
            code = play(course, tasks(course, exercises), sandbox, names, options.again, console)
    except (CourseError, SandboxError) as error:
        print(f"grade: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"grade: {error}. What is marked is kept; the next run goes on from there", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the next run goes on from here", file=sys.stderr)
        return 130
    if options.unsafe:
        say(console, UNSAFE, "bold red")
    return code


if __name__ == "__main__":
    sys.exit(main())
