"""Runs Python as an ordinary user, also in tests that root runs: the grader refuses root, whom some limits do not bind."""

import os
import stat
import subprocess
import sys
from pathlib import Path

NOBODY = 65534
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, **environment):
    """`python *arguments` in tests/ by an ordinary user, with more `environment`; a CompletedProcess with text."""
    command = [sys.executable, *arguments]
    if os.geteuid() == 0:
        command = [
            *_without_closed_folders(),
            *f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups".split(),
            *command,
        ]
    variables = (
        os.environ
        | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "HOME": "/", "TMPDIR": "/tmp"}
        | environment
    )
    return subprocess.run(command, cwd=ROOT / "tests", env=variables, capture_output=True, text=True)


def give(folder):
    """Give a folder and what is in it to the user whom `run` runs as."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def _without_closed_folders():
    """bwrap and options, where root's interpreter or this repository lies in a folder that others may not enter.

    They are shown where they are, in place of the closed folder.
    """
    needed = {Path(sys.base_prefix), Path(sys.prefix), ROOT}
    options = []
    for path in sorted(needed):
        closed = next((p for p in reversed(path.parents) if not p.stat().st_mode & stat.S_IXOTH), None)
        if closed is None:
            continue
        if closed not in options:
            options += ["--tmpfs", closed]
        for folder in reversed(path.parents):
            if closed in folder.parents:
                options += ["--perms", "0755", "--dir", folder]
        options += ["--ro-bind", path, path]
    return ["bwrap", "--dev-bind", "/", "/", *map(str, options), "--"] if options else []
