"""torch.linalg, as far as minamp has it: the norms of vectors."""

from minamp.ops.matmul import matmul
from minamp.ops.norm import vector_norm

__all__ = ["matmul", "vector_norm"]
