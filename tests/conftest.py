import os
import shutil
import tempfile
from pathlib import Path

import pytest
from grading import ordinary

import minamp


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same generator state, in whatever order tests run."""
    minamp.manual_seed(0)


@pytest.fixture(scope="session")
def sandbox():
    """Skips where no sandbox can be had, and says why; fails instead where MINAMP_NEEDS_SANDBOX=1."""
    if shutil.which("bwrap") is None:
        reason = "bubblewrap is missing: apt-get install bubblewrap"
    else:
        probe = "from minamp.grade.sandbox import Sandbox; print(Sandbox().why_not() or '')"
        asked = ordinary.run("-c", probe)
        reason = asked.stdout.strip() or asked.stderr.strip()
    if reason and os.environ.get("MINAMP_NEEDS_SANDBOX") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(f"{reason} (MINAMP_NEEDS_SANDBOX=1 makes this a failure)")


@pytest.fixture
def ordinary_folder():
    """A folder of the user whom ordinary.run runs as; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)
