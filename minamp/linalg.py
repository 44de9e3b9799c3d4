"""torch.linalg, as far as minamp has it: norms and products."""

from minamp.ops.contractions import cross as _cross
from minamp.ops.contractions import matrix_norm, multi_dot, vecdot
from minamp.ops.matmul import matmul
from minamp.ops.norm import vector_norm

__all__ = ["cross", "matmul", "matrix_norm", "multi_dot", "norm", "vecdot", "vector_norm"]


def cross(input, other, *, dim=-1):
    """minamp.cross over the last dimension unless dim says otherwise."""
    return _cross(input, other, dim)


def norm(A, ord=None, dim=None, keepdim=False, *, dtype=None):
    """vector_norm over one dimension, or over all without ord and dim; matrix_norm over two."""
    several = A.ndim == 2 if dim is None else isinstance(dim, list | tuple) and len(dim) == 2
    if several and not (ord is None and dim is None):
        dims = (-2, -1) if dim is None else dim
        return matrix_norm(A, "fro" if ord is None else ord, dims, keepdim, dtype=dtype)
    return vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)
