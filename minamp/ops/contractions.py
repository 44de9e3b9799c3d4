"""Products under torch's further names, each made of one of matmul, addmm or einsum, so it is summed and rounded as they do."""

import math

from minamp.op import LOWER_PRECISION, PROMOTE, composite
from minamp.ops.arrange import roll
from minamp.ops.einsum import einsum
from minamp.ops.matmul import matmul
from minamp.ops.norm import vector_norm
from minamp.ops.products import addmm
from minamp.ops.reduce import dims_of
from minamp.ops.shape import dim_of
from minamp.promotion import result_type


@composite(policy=LOWER_PRECISION)
def addr(input, vec1, vec2, *, beta=1, alpha=1):
    """beta * input + alpha * outer(vec1, vec2): (n,), (m,), and input that broadcasts to (n, m). See addmm; dtypes promote."""
    if vec1.ndim != 1 or vec2.ndim != 1:
        raise RuntimeError(f"addr: needs two vectors, got shapes {vec1.shape} and {vec2.shape}")
    dtype = result_type(input, vec1, vec2)
    input, vec1, vec2 = (x.to(dtype) for x in (input, vec1, vec2))
    return addmm(input, vec1.unsqueeze(1), vec2.unsqueeze(0), beta=beta, alpha=alpha)


@composite(policy=LOWER_PRECISION)
def addbmm(input, batch1, batch2, *, beta=1, alpha=1):
    """beta * input + alpha * (the sum over b of batch1 @ batch2): (b, n, k), (b, k, m), input that broadcasts to (n, m).

    One product over b * k, rounded once. RuntimeError for other shapes.
    """
    if batch1.ndim != 3 or batch2.ndim != 3 or (batch1.shape[0], batch1.shape[2]) != batch2.shape[:2]:
        raise RuntimeError(
            f"addbmm: needs batches of shapes (b, n, k) and (b, k, m), got {batch1.shape} and {batch2.shape}"
        )
    b, n, k = batch1.shape
    side_by_side = batch1.transpose(0, 1).reshape(n, b * k)
    return addmm(input, side_by_side, batch2.reshape(b * k, -1), beta=beta, alpha=alpha)


@composite(policy=LOWER_PRECISION)
def vecdot(x, y, *, dim=-1):
    """The sum of x * y over a dimension, others broadcast; summed in float32 and rounded once."""
    return einsum("...i,...i->...", x.transpose(dim, -1), y.transpose(dim, -1))


@composite(policy=LOWER_PRECISION)
def chain_matmul(*matrices):
    """The product of two or more tensors, all matrices but for the first and last, which may be vectors: the cheapest order.

    Which order takes the fewest multiplications is dynamic programming: Cormen et al., "Introduction to Algorithms", section
    14.2. RuntimeError for shapes that don't fit.
    """
    n = len(matrices)
    if n < 2:
        raise RuntimeError(f"chain_matmul: needs at least two tensors, got {n}")
    for i, x in enumerate(matrices):
        if x.ndim != 2 and not (x.ndim == 1 and i in (0, n - 1)):
            raise RuntimeError(
                f"chain_matmul: tensor {i} has shape {x.shape}: only the first and the last may be a vector, all else matrices"
            )
    first = matrices[0].shape[0] if matrices[0].ndim == 2 else 1
    sizes = [
        first,
        *(x.shape[0] for x in matrices[1:]),
        matrices[-1].shape[1] if matrices[-1].ndim == 2 else 1,
    ]
    best = {
        (i, i): (0, None) for i in range(n)
    }  # (from, to) -> (multiplications, where the last product cuts)
    for length in range(1, n):
        for i in range(n - length):
            j = i + length
            best[i, j] = min(
                (best[i, k][0] + best[k + 1, j][0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k)
                for k in range(i, j)
            )

    def product(i, j):
        k = best[i, j][1]
        return matrices[i] if i == j else matmul(product(i, k), product(k + 1, j))

    return product(0, n - 1)


def multi_dot(tensors):
    """torch.linalg.multi_dot: chain_matmul of a list."""
    return chain_matmul(*tensors)


@composite(policy=PROMOTE)
def tensordot(a, b, dims=2):
    """The sum of products over the last `dims` dimensions of a and the first of b, or over the lists (dims of a, dims of b)."""
    if isinstance(dims, int):
        over_a, over_b = range(a.ndim - dims, a.ndim), range(dims)
    else:
        over_a, over_b = ([d] if isinstance(d, int) else d for d in dims)
    over_a = [dim_of("tensordot", a, d) for d in over_a]
    over_b = [dim_of("tensordot", b, d) for d in over_b]
    shared = tuple(a.shape[d] for d in over_a)
    if shared != tuple(b.shape[d] for d in over_b):
        raise RuntimeError(
            f"tensordot: dims {list(over_a)} of {a.shape} and {list(over_b)} of {b.shape} differ in size"
        )
    free_a = [d for d in range(a.ndim) if d not in over_a]
    free_b = [d for d in range(b.ndim) if d not in over_b]
    shape = tuple(a.shape[d] for d in free_a) + tuple(b.shape[d] for d in free_b)
    rows = a.permute(*free_a, *over_a).reshape(-1, math.prod(shared))
    return matmul(rows, b.permute(*over_b, *free_b).reshape(math.prod(shared), -1)).reshape(shape)


@composite(policy=PROMOTE)
def cross(input, other, dim=None):
    """The vector product over a dimension of size 3: the first such without dim. RuntimeError without one, or for two dtypes."""
    if input.dtype != other.dtype:
        raise RuntimeError(
            f"cross: tensors of different dtypes (input {input.dtype}, other {other.dtype}): cast them to one dtype "
            "(x.float(), x.half())"
        )
    if dim is None:
        dim = next((d for d, size in enumerate(input.shape) if size == 3), -1)
    dim = dim_of("cross", input, dim)
    if input.shape[dim] != 3 or other.ndim <= dim or other.shape[dim] != 3:
        raise RuntimeError(
            f"cross: needs dimension {dim} of size 3 in both, got shapes {input.shape} and {other.shape}"
        )

    def turned(x, by):
        return roll(x, -by, dim)

    return turned(input, 1) * turned(other, 2) - turned(input, 2) * turned(other, 1)


@composite(policy=PROMOTE)
def bilinear(input1, input2, weight, bias=None):
    """input1 @ weight[o] @ input2 for every output o, plus bias: (..., i), (..., j), (o, i, j), (o,) give (..., o)."""
    y = einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias


@composite
def matrix_norm(A, ord="fro", dim=(-2, -1), keepdim=False, *, dtype=None):
    """torch.linalg.matrix_norm: 'fro', or the largest (smallest for negative ord) sum of magnitudes of a column, 1, or row, inf.

    NotImplementedError for 'nuc' and 2, which need singular values. RuntimeError for fewer than two dimensions.
    """
    rows, columns = dims_of("matrix_norm", A, dim)
    if ord == "fro":
        return vector_norm(A, 2, (rows, columns), keepdim, dtype=dtype)
    if ord not in (1, -1, math.inf, -math.inf):
        raise NotImplementedError(f"matrix_norm: ord={ord!r} needs singular values, which minamp has not")
    summed, other = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = A.abs().sum(summed, keepdim=True, dtype=dtype)
    y = sums.amax(other, keepdim=True) if ord > 0 else sums.amin(other, keepdim=True)
    return y if keepdim else y.squeeze((rows, columns))
