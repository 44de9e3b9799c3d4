"""Products of fixed shapes under torch's names: mm, bmm, mv, dot, outer, and those that add, addmm, baddbmm, addmv."""

from minamp.arguments import number
from minamp.op import LOWER_PRECISION, NOT_LISTED, PROMOTE, op
from minamp.ops.shape import expands


def _check_mm(name, mat1, mat2, names):
    for x, what in zip((mat1, mat2), names, strict=True):
        if x.ndim != 2:
            raise RuntimeError(
                f"{name}: {what} must be a matrix, got shape {x.shape}: matmul takes other shapes"
            )
    if mat1.shape[1] != mat2.shape[0]:
        sizes = " and ".join(f"{r}x{c}" for r, c in (mat1.shape, mat2.shape))
        raise RuntimeError(
            f"{name}: mat1 and mat2 shapes cannot be multiplied ({sizes}): (n, k) takes (k, m)"
        )


def _check_bmm(name, batch1, batch2, names):
    for x, what in zip((batch1, batch2), names, strict=True):
        if x.ndim != 3:
            raise RuntimeError(
                f"{name}: {what} must be a 3D tensor, got shape {x.shape}: matmul takes other shapes"
            )
    (b, _, k), expected = batch1.shape, batch2.shape[:2]
    if (b, k) != expected:
        raise RuntimeError(
            f"{name}: {names[0]} {batch1.shape} takes a {names[1]} of shape ({b}, {k}, m), got {batch2.shape}"
        )


def _check_mv(name, mat, vec):
    if mat.ndim != 2 or vec.ndim != 1 or mat.shape[1] != vec.shape[0]:
        raise RuntimeError(
            f"{name}: needs a matrix (n, k) and a vector (k,), got shapes {mat.shape} and {vec.shape}"
        )


def _check_dot(name, a, b):
    if a.ndim != 1 or b.ndim != 1 or a.shape != b.shape:
        raise RuntimeError(f"{name}: needs two vectors of one length, got shapes {a.shape} and {b.shape}")


class _Product:
    """What mm and bmm have in common."""

    def forward(m, input, mat2):
        return m.matmul(input, mat2)

    def vjp_input(m, g, mat2):
        return m.matmul(g, m.mT(mat2))

    def vjp_mat2(m, g, input):
        return m.matmul(m.mT(input), g)


@op(policy=LOWER_PRECISION, stored=True)
class mm(_Product):
    """The product of two matrices, (n, k) and (k, m). RuntimeError for other shapes: nothing broadcasts."""

    def call(input, mat2):
        _check_mm("mm", input, mat2, ("input", "mat2"))
        return (input, mat2), {}


@op(policy=LOWER_PRECISION, stored=True)
class bmm(_Product):
    """The products of two batches of matrices, (b, n, k) and (b, k, m). RuntimeError for other shapes: nothing broadcasts."""

    def call(input, mat2):
        _check_bmm("bmm", input, mat2, ("input", "mat2"))
        return (input, mat2), {}


@op(policy=LOWER_PRECISION)
class mv:
    """Matrix (n, k) times vector (k,). RuntimeError for other shapes."""

    def call(input, vec):
        _check_mv("mv", input, vec)
        return (input, vec), {}

    def forward(m, input, vec):
        return m.matmul(input, vec)

    def vjp_input(m, g, vec):
        return m.reshape(g, (-1, 1)) * vec

    def vjp_vec(m, g, input):
        return m.matmul(m.mT(input), g)


@op(policy=PROMOTE)
class dot:
    """The sum of the products of two vectors of one length, (k,). Sums in float32. RuntimeError for other shapes."""

    def call(input, tensor):
        _check_dot("dot", input, tensor)
        return (input, tensor), {}

    def forward(m, input, tensor):
        return m.matmul(input, tensor)

    def vjp_input(m, g, tensor):
        return g * tensor

    def vjp_tensor(m, g, input):
        return g * input


@op(policy=PROMOTE)
class vdot:
    """dot under the name that conjugates its first vector; real numbers are their own conjugates."""

    def call(input, other):
        _check_dot("vdot", input, other)
        return (input, other), {}

    def forward(m, input, other):
        return m.matmul(input, other)

    def vjp_input(m, g, other):
        return g * other

    def vjp_other(m, g, input):
        return g * input


@op(policy=NOT_LISTED, mixed="promote")
class outer:
    """The products of every pair: (n,) and (m,) give (n, m). Not on autocast's lists: no sum, so nothing to accumulate."""

    def call(input, vec2):
        if input.ndim != 1 or vec2.ndim != 1:
            raise RuntimeError(f"outer: needs two vectors, got shapes {input.shape} and {vec2.shape}")
        return (input, vec2), {}

    def forward(m, input, vec2):
        return m.reshape(input, (-1, 1)) * vec2

    def vjp_input(m, g, vec2):
        return m.matmul(g, vec2)

    def vjp_vec2(m, g, input):
        return m.matmul(m.mT(g), input)


# ------------------------------------------------------------------- beta * input + alpha * product, in float32, rounded once


def _check_added(name, input, shape):
    if not expands(input.shape, shape):
        raise RuntimeError(f"{name}: input {input.shape} can't be expanded to the product's shape {shape}")


def _added(m, input, product, beta, alpha):
    """beta = 0 and alpha = 0 leave their term out, whatever it holds, as in PyTorch."""
    y = product * alpha if alpha else m.zeros_like(product)
    return y + m.widen(input) * beta if beta else y


@op(policy=NOT_LISTED, stored=True)
class scaled:
    """x * factor, in float32, rounded once: the gradient of what addmm and baddbmm add."""

    def forward(m, x, *, factor):
        return m.scaled(x, factor)

    def vjp_x(m, g, factor):
        return m.scaled(g, factor)


@op(policy=NOT_LISTED, stored=True)
class scaled_matmul:
    """alpha * (a @ b), rounded once: the gradients of addmm and baddbmm."""

    def forward(m, a, b, *, alpha):
        return m.scaled_matmul(a, b, alpha)

    def vjp_a(m, g, b, alpha):
        return m.scaled_matmul(g, m.mT(b), alpha)

    def vjp_b(m, g, a, alpha):
        return m.scaled_matmul(m.mT(a), g, alpha)


@op(policy=LOWER_PRECISION, stored=True)
class addmm:
    """beta * input + alpha * (mat1 @ mat2): matrices (n, k), (k, m), and input that broadcasts to (n, m).

    The sum is made in float32 and rounded once. beta=0 ignores input, nan or not. RuntimeError for other shapes.
    """

    def call(input, mat1, mat2, *, beta=1, alpha=1):
        _check_mm("addmm", mat1, mat2, ("mat1", "mat2"))
        _check_added("addmm", input, (mat1.shape[0], mat2.shape[1]))
        return (input, mat1, mat2), {"beta": number(beta), "alpha": number(alpha)}

    def forward(m, input, mat1, mat2, *, beta, alpha):
        return _added(m, input, m.matmul_wide(mat1, mat2), beta, alpha)

    def vjp_input(m, g, beta):
        return m.scaled(g, beta)

    def vjp_mat1(m, g, mat2, alpha):
        return m.scaled_matmul(g, m.mT(mat2), alpha)

    def vjp_mat2(m, g, mat1, alpha):
        return m.scaled_matmul(m.mT(mat1), g, alpha)


@op(policy=LOWER_PRECISION, stored=True)
class baddbmm:
    """beta * input + alpha * (batch1 @ batch2): (b, n, k), (b, k, m), and input that broadcasts to (b, n, m). See addmm."""

    def call(input, batch1, batch2, *, beta=1, alpha=1):
        _check_bmm("baddbmm", batch1, batch2, ("batch1", "batch2"))
        _check_added("baddbmm", input, (*batch1.shape[:2], batch2.shape[2]))
        return (input, batch1, batch2), {"beta": number(beta), "alpha": number(alpha)}

    def forward(m, input, batch1, batch2, *, beta, alpha):
        return _added(m, input, m.matmul_wide(batch1, batch2), beta, alpha)

    def vjp_input(m, g, beta):
        return m.scaled(g, beta)

    def vjp_batch1(m, g, batch2, alpha):
        return m.scaled_matmul(g, m.mT(batch2), alpha)

    def vjp_batch2(m, g, batch1, alpha):
        return m.scaled_matmul(m.mT(batch1), g, alpha)


@op(policy=LOWER_PRECISION)
class addmv:
    """beta * input + alpha * (mat @ vec): (n, k), (k,), and input that broadcasts to (n,). See addmm."""

    def call(input, mat, vec, *, beta=1, alpha=1):
        _check_mv("addmv", mat, vec)
        _check_added("addmv", input, mat.shape[:1])
        return (input, mat, vec), {"beta": number(beta), "alpha": number(alpha)}

    def forward(m, input, mat, vec, *, beta, alpha):
        return _added(m, input, m.matmul(mat, vec), beta, alpha)

    def vjp_input(m, g, beta):
        return g * beta

    def vjp_mat(m, g, vec, alpha):
        return m.reshape(g, (-1, 1)) * (vec * alpha)

    def vjp_vec(m, g, mat, alpha):
        return m.matmul(m.mT(mat), g) * alpha
