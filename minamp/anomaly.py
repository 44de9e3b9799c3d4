"""detect_anomaly: stop at the first nan that backward makes, and name the line of user code that made the tensor."""

import weakref

import numpy as np

from minamp import backends
from minamp.backends.errors import user_line
from minamp.record import observers
from minamp.tensor import Tensor

_lines = weakref.WeakKeyDictionary()  # Node -> the line that made it


def remember_line(op, output):
    """Note the line of user code where `op` is making the Tensor `output`; for observers of a forward."""
    node = output._node
    if node is not None:
        # the op's own Node, which a Function has behind those of its outputs
        _lines[node if node.op is op else node.edges[0]] = user_line()


def line_of(node, unknown):
    """The line that made a Node; the text `unknown` for one that was made before anybody noted lines."""
    return _lines.get(node, unknown)


def _watch(check_nan):
    def see(phase, op, inputs, output):
        if phase == "forward":
            remember_line(op, output)
            return
        if not check_nan:
            return
        g, node, i = inputs
        array = output._data if isinstance(output, Tensor) else output
        array = backends.widen(backends.host(array))
        if np.isnan(array).any():
            line = line_of(node, "made before anomaly detection was switched on")
            raise RuntimeError(
                f"backward of {op.name} gave nan for its argument {i} (shape {array.shape}). "
                f"The forward was: {line}"
            )

    return see


class set_detect_anomaly:
    """Switch anomaly detection on or off, as a call or as a context manager, as torch.autograd.set_detect_anomaly.

    mode: while on, every op remembers the line of user code that ran it, and a backward that produces nan raises RuntimeError
    naming the op, the argument and that line. check_nan=False only remembers. It slows everything down: for debugging.
    """

    _current = None

    def __init__(self, mode, check_nan=True):
        self.outer = set_detect_anomaly._current
        set_detect_anomaly._set(_watch(check_nan) if mode else None)

    @staticmethod
    def _set(observer):
        if set_detect_anomaly._current is not None:
            observers.remove(set_detect_anomaly._current)
        if observer is not None:
            observers.append(observer)
        set_detect_anomaly._current = observer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        set_detect_anomaly._set(self.outer)


class detect_anomaly:
    """Context manager: anomaly detection on, as torch.autograd.detect_anomaly."""

    def __init__(self, check_nan=True):
        self.check_nan = check_nan

    def __enter__(self):
        self.region = set_detect_anomaly(True, self.check_nan)
        return self

    def __exit__(self, *_):
        self.region.__exit__()


def is_anomaly_enabled():
    """True while anomaly detection is on."""
    return set_detect_anomaly._current is not None
