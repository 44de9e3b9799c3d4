"""Every op, by family. `+` is `add` in elementwise.py; the policy of each stands in its declaration."""

from minamp.op import OPS_NAMESPACE
from minamp.ops import conv, elementwise, loss, matmul, naive, normalize, reduce, shape
