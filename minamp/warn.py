"""Warnings at the user's own line, however many of minamp's frames lie between: where PyTorch's point, and a filter applies."""

import sys
import warnings

from minamp.backends.errors import ours


def warn(text):
    """A UserWarning at the innermost line outside minamp."""
    frame, level = sys._getframe(1), 2
    while frame is not None and ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)
