"""Grading one submission."""

from dataclasses import dataclass, field, replace

from minamp.grade import submission
from minamp.grade.marking import Mark, mark_group
from minamp.grade.student import StudentSide

TEXT = 2000  # characters of one text


@dataclass(frozen=True)
class Result:
    """What one submission earned.

    marks: one Mark for each test group of the assignment, in order, whatever was handed in
    written: {grade_id: text} of the questions answered in words, which are marked by hand
    notes: what the marker should know and what cost nothing, such as a renamed file
    problem: None, or why nothing of the submission could be run; then every mark is 0 and says so

    Texts hold no control characters; they may hold what a student wrote, so a page made of them must escape them.
    """

    marks: tuple[Mark, ...]
    written: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problem: str | None = None


def grade_one(assignment, path, sandbox, seed):
    """The Result of the notebook at `path`, whatever it holds: what a student did never raises.

    `assignment`: an Assignment; `sandbox`: a Sandbox; `seed`: an integer, secret until the marks are out.
    SandboxError when the machine gives no sandbox; then nothing is marked. To grade several at once take processes, not threads:
    a thread that reads a large file holds up the others, whose students' seconds pass.
    """
    found = submission.read(path, assignment)
    groups = assignment.of("tests")
    problem = found.problem and shown(found.problem)
    if problem:
        marks = [Mark(group.id, 0.0, group.points, problem) for group in groups]
    else:
        marks = []
        with StudentSide(assignment, found, sandbox) as student:
            for k, group in enumerate(groups):
                student.group()
                mark = mark_group(assignment, group, student.call, [seed, k])
                marks.append(replace(mark, text=shown(mark.text)))
    written = {name: shown(text, most=len(text)) for name, text in found.written.items()}
    return Result(tuple(marks), written, tuple(map(shown, found.notes)), problem)


def shown(text, most=TEXT):
    """`text` without what a terminal or a file would not take for text: control characters, lone surrogates."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text[:most])
