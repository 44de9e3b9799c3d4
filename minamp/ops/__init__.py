"""Every op, by family. `+` is `add` in elementwise.py; the policy of each stands in its declaration."""

from minamp.op import OPS_NAMESPACE
from minamp.ops import (
    activations,
    arrange,
    attention,
    cast,
    compare,
    conv,
    cross_entropy,
    einsum,
    elementwise,
    exponential,
    grid,
    indexing,
    loss,
    matmul,
    naive,
    norm,
    normalize,
    pool,
    products,
    reduce,
    scan,
    scatter,
    shape,
    upsample,
)
