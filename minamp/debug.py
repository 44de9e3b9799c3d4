"""debug(sync=True): wait for the GPU after every op, so that a kernel that fails is reported at the op that launched it.

Kernels run after the call that launched them has returned. One that reads outside its arrays is noticed at a later, innocent
call, and the GPU answers nothing from then on. Waiting after every op costs most of the speed: for looking for a fault only.
"""

from minamp.anomaly import line_of, remember_line
from minamp.backends import device, errors
from minamp.record import described, observers
from minamp.tensor import Tensor


def _see(phase, op, inputs, output):
    if phase == "forward":
        array, what = output._data, None
        remember_line(op, output)
    else:
        array = output._data if isinstance(output, Tensor) else output
        _, node, i = inputs
        line = line_of(node, "a line before debug was switched on")
        what = f"{described(node)}, argument {i}, of the forward at {line}"
    if device.holds(array):
        errors.wait(what or op.described(inputs))


class debug:
    """Switch the waiting on or off, at once as a call or for a block as a context manager.

    sync=True: after every op on a GPU, forward and backward, after every optimizer step and unscale, the GPU is waited for;
    an error then names the op, its shapes and dtypes and the line of user code. Indices, class ids and probabilities are
    checked as on the CPU, where it changes nothing.
    """

    def __init__(self, sync):
        self.outer = errors.checking
        self._switch(bool(sync))

    @staticmethod
    def _switch(on):
        if on != errors.checking:
            (observers.append if on else observers.remove)(_see)
        errors.checking = on

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._switch(self.outer)
