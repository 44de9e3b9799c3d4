"""Views: tensors that share memory with the one they were taken from, and what becomes of their histories when one is written.

A write in place changes all that share the memory, so it has to change their histories too. `x[:, 0] += 1` writes into a view:
the history of x becomes "x as it was, with these values put there", and that of the view is taken from it anew. The other
way round, when x itself is written, its views find out by their version counter, which they share, before they are used again.
"""

from minamp import backends
from minamp.methods import OPS
from minamp.record import enable_grad


class Origin:
    """How a view was taken: by which op, with which attributes, from which tensor, and that tensor's history then."""

    __slots__ = ("op", "attrs", "base", "node", "version")

    def __init__(self, op, attrs, base):
        self.op, self.attrs, self.base = op, attrs, base
        self.node, self.version = base._node, base._version[0]


def follow(view):
    """Take the history of `view` anew if the tensor it was taken from has another since, by a recorded write in place."""
    origin = view._origin
    if origin is None or origin.version == view._version[0]:
        return
    base = origin.base
    if base._version is not view._version:  # by x.data = y the base has other memory now
        view._origin = None
        return
    if base._is_view:
        follow(base)
    if base._node is not origin.node:
        with enable_grad():  # wherever that is noticed
            view._node = origin.op._run((base,), origin.attrs)._node
    view._origin = Origin(origin.op, origin.attrs, base)


def write(view, values, name):
    """Write `values`, which have a history or meet one, into `view`: as a write into the tensor that it is a view of."""
    root, places = _places(view)
    flat = OPS["index_put"]._run(
        (root.reshape(-1), values.reshape(-1)), {"key": (places,), "accumulate": False}
    )
    root._write(flat.reshape(root.shape), name)
    follow(view)


def _places(view):
    """The tensor that owns the memory, and which of its elements, counted flat, the view shows."""
    chain, root = [], view
    while root._is_view and root._origin is not None:
        chain.append(root._origin)
        root = root._origin.base
    m = backends.of(root._data)
    places = m.arange(root.numel()).reshape(root.shape)
    for origin in reversed(chain):
        places = origin.op.forward(m, places, **origin.attrs)
    return root, places.reshape(-1)
