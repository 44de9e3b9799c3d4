"""nbgrader's settings for this course. Yours to change: `make exercises` copies them into the course folder once."""

import warnings

from sqlalchemy.exc import SAWarning

warnings.filterwarnings("ignore", category=SAWarning)  # nbgrader 0.9.6 raises pages of them, and errors drown


def refuse(notebook, resources):
    """Stands before all that `nbgrader autograde`, a button of formgrader's too, does with a submission."""
    raise RuntimeError(
        "nbgrader would run the student's code as you, on your files: use python -m minamp.grade instead"
    )


c = get_config()  # noqa: F821  nbgrader puts it here
c.CourseDirectory.course_id = "minamp"
c.Autograde.sanitize_preprocessors = [refuse]
c.HTMLExporter.sanitize_html = (
    True  # a written answer may hold HTML: without this its scripts run in your browser
)

# What a late submission loses: "none", "zero", or a plugin of your own (nbgrader's documentation, "late submission").
c.LateSubmissionPlugin.penalty_method = "none"
