"""Files that are whole or not there."""

import contextlib
import os
import tempfile
from pathlib import Path


@contextlib.contextmanager
def replacing(path):
    """The path of a temporary file beside `path` that takes its place at the end, or vanishes on an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield temporary
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
