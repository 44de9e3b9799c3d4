"""gather and scatter: one place along a dimension for every element. Sums over places named twice are float32."""

from minamp import backends
from minamp.devices import same_device
from minamp.op import NOT_LISTED, PROMOTE, op
from minamp.ops.indexing import check_range, integers, number_in
from minamp.ops.shape import dim_of
from minamp.tensor import Tensor


def _places(name, x, dim, index, src=None):
    """The attributes of gather and scatter: dim and the index array, after torch's checks."""
    same_device(name, input=x, src=src)
    dim, at = dim_of(name, x, dim), integers(name, x, index)
    if at.ndim != x.ndim:
        raise RuntimeError(f"{name}: index has shape {at.shape}, input {x.shape}: give as many dimensions")
    if any(n > s for i, (n, s) in enumerate(zip(at.shape, x.shape, strict=True)) if i != dim):
        raise RuntimeError(
            f"{name}: index {at.shape} must be no larger than input {x.shape} apart from dimension {dim}"
        )
    if src is not None and (
        src.ndim != x.ndim or any(n > s for n, s in zip(at.shape, src.shape, strict=True))
    ):
        raise RuntimeError(f"{name}: index {at.shape} must be no larger than src {src.shape}")
    check_range(name, at, dim, x.shape)
    return {"dim": dim, "at": at}


@op(policy=NOT_LISTED, stored=True)
class gather:
    """x picked along `dim` at the positions in `index` (integers, as many dimensions as x). RuntimeError out of bounds."""

    def call(x, dim, index):
        return (x,), _places("gather", x, dim, index)

    def forward(m, x, *, dim, at):
        return m.gather(x, dim, at)

    def vjp_x(m, g, x_shape, dim, at):
        return m.gather_grad(g, dim, at, x_shape)


@op(policy=NOT_LISTED)
class gather_grad:
    """Zeros of `shape` with g added where gather read; repeated positions add up in float32."""

    def forward(m, g, *, dim, at, shape):
        return m.gather_grad(g, dim, at, shape)

    def vjp_g(m, g, dim, at):
        return m.gather(g, dim, at)


def _picked(m, g, dim, at, src_shape):
    """The gradient of src: what gather reads, and zeros where src is larger than index."""
    g = m.gather(g, dim, at)
    return g if g.shape == src_shape else m.index_grad(g, tuple(slice(n) for n in g.shape), src_shape)


@op(policy=PROMOTE)
class scatter_add:
    """x with src[p] added at place p, but index[p] along `dim`: gather's reverse. Sums are float32.

    index has as many dimensions as x and is no larger than src. RuntimeError where that fails, out of bounds, and for different
    dtypes (autocast promotes).
    """

    def call(input, dim, index, src):
        return (input, src), _places("scatter_add", input, dim, index, src)

    def forward(m, x, src, *, dim, at):
        return m.scatter_add(x, dim, at, src)

    def vjp_x(m, g):
        return g

    def vjp_src(m, g, src_shape, dim, at):
        return _picked(m, g, dim, at, src_shape)


@op(policy=NOT_LISTED, moves=True)
class scatter:
    """scatter_add that writes instead of adding; src (or `value`) may be a number. Of several values for one place one stays."""

    def call(input, dim, index, src=None, *, value=None):
        src = value if src is None else src
        if not isinstance(src, Tensor):
            src = number_in("scatter", src, input.dtype)
            src = Tensor(backends.of(input._data).full((), src, input.dtype))
            return (input, src), _places("scatter", input, dim, index)
        return (input, src), _places("scatter", input, dim, index, src)

    def forward(m, x, src, *, dim, at):
        return m.scatter(x, dim, at, src)

    def vjp_x(m, g, dim, at):
        return m.scatter_clear(g, dim, at)

    def vjp_src(m, g, src_shape, dim, at):
        return _picked(m, g, dim, at, src_shape)


@op(policy=NOT_LISTED, moves=True)
class scatter_clear:
    """x with zeros where scatter writes."""

    def forward(m, x, *, dim, at):
        return m.scatter_clear(x, dim, at)

    def vjp_x(m, g, dim, at):
        return m.scatter_clear(g, dim, at)
