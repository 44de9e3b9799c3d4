"""Matrix products on the GPU: one entry over cuBLAS's gemmEx and gemmStridedBatchedEx.

CuPy's own matmul widens half to float32 copies from three dimensions on, and rounds to half even where the result is asked for
in float32. This one takes half or bfloat16 and gives that or float32, transposes by strides without a copy, and can add to
what `out` holds. `plan` turns arrays into cuBLAS's arguments and needs no GPU; `gemm` calls.
"""

from dataclasses import dataclass

import numpy as np

from minamp.backends import cublas
from minamp.backends.device import xp
from minamp.formats import bfloat16, float16, float32, float64, is_half

# cudaDataType_t and cublasComputeType_t of CUDA 12 and 13
TYPES = {float32: 0, float64: 1, float16: 2, bfloat16: 14}
COMPUTE_16F, COMPUTE_32F, COMPUTE_64F = 64, 68, 70
# cuBLAS's own choice, tensor cores included. 99, "default tensor op", would let it round float32 factors to half.
DEFAULT = -1
# Long sums may be cut over several blocks, whose parts are added in the format of the result: in half they could overflow.
# With this math mode they are added in float32.
NO_REDUCED_PRECISION_REDUCTION = 16
LIMIT = 2**31 - 1  # cuBLAS counts in 32 bits


@dataclass(frozen=True)
class Plan:
    """The arguments of one call in cuBLAS's column-major words: there `first` is b, `second` is a, m counts out's columns."""

    transposed: tuple  # (first, second): 1 if read across
    m: int
    n: int
    k: int
    leading: tuple  # leading dimensions of first, second and out
    types: tuple  # cudaDataType of first, second and out
    batch: int = 1
    strides: tuple = (0, 0, 0)  # elements from one matrix of a batch to the next


def lay(x):
    """(1 if column-major else 0, leading dimension) of the last two dimensions of `x`; None if neither runs without gaps."""
    rows, cols = x.shape[-2:]
    down, right = (s // x.itemsize for s in x.strides[-2:])
    if (right == 1 or cols == 1) and (down >= max(cols, 1) or rows == 1):
        return 0, max(down if rows > 1 else 0, cols, 1)
    if (down == 1 or rows == 1) and (right >= max(rows, 1) or cols == 1):
        return 1, max(right if cols > 1 else 0, rows, 1)
    return None


def plan(a, b, out):
    """The call for out = a @ b: matrices, or batches (B, ., .) of them, where a batch of stride 0 is one matrix for all.

    A row-major matrix is its own transpose in cuBLAS's column-major eyes, and out.T = b.T @ a.T: so b goes first, and a
    matrix that is row-major here needs no transposing there. ValueError for shapes, layouts and sizes it can't take.
    """
    (rows, inner), cols = a.shape[-2:], b.shape[-1]
    batch = out.shape[0] if out.ndim == 3 else 1
    if b.shape[-2] != inner or out.shape[-2:] != (rows, cols):
        raise ValueError(f"gemm: {a.shape} @ {b.shape} does not make {out.shape}")
    layouts = [lay(b), lay(a), lay(out)]
    if None in layouts or layouts[2][0]:
        raise ValueError(f"gemm: a layout with gaps, strides {a.strides} @ {b.strides} -> {out.strides}")
    if max(rows, cols, inner, batch, *(ld for _, ld in layouts)) > LIMIT:
        raise ValueError(
            f"gemm: {a.shape} @ {b.shape} has a size above 2**31 - 1, where cuBLAS ends: cut the batch"
        )
    (tb, ldb), (ta, lda), (_, ldo) = layouts
    return Plan(
        (tb, ta),
        cols,
        rows,
        inner,
        (ldb, lda, ldo),
        tuple(TYPES[x.dtype] for x in (b, a, out)),
        batch,
        tuple(x.strides[0] // x.itemsize if x.ndim == 3 else 0 for x in (b, a, out)),
    )


# Padding costs a handful of small launches, 3 us each on the device, and two passes over what is copied. It pays where the
# product takes longer than the launches, moving 32 MB or as long as that takes (7 us on an H200, 100 on a T4), and where the
# copies are a quarter of it. A product computes 200 operations in the time of a byte: tensor cores against memory of an H200,
# 206; A100, 153; T4, 203. All this is arithmetic from data sheets, no GPU has measured it.
PAYS = 32 << 20
OPERATIONS_A_BYTE = 200


def padding(a, b, out):
    """(m, n, k) that give all rows of a half product a multiple of 8 elements, as tensor cores like them; None to leave it.

    The case in mind: classes. 10 of them make rows of 20 bytes, in the scores and in their gradient, beside an input that is much
    larger and aligned. So the scores are made 16 wide and 10 columns taken; small networks stay as they are.
    """
    if a.ndim != 2 or not is_half(a.dtype):
        return None
    (m, k), n = a.shape, b.shape[1]
    across_a, across_b = lay(a)[0], lay(b)[0]
    odd_m, odd_n = m % 8 and across_a, n % 8  # out is row-major, so n is the length of its rows
    odd_k = k % 8 and (not across_a or across_b)
    copied = (
        a.nbytes * bool(odd_m or odd_k) + b.nbytes * bool(odd_n or odd_k) + out.nbytes * bool(odd_m or odd_n)
    )
    whole = max(a.nbytes + b.nbytes + out.nbytes, 2 * m * n * k // OPERATIONS_A_BYTE)
    if not copied or whole < PAYS or 4 * copied > whole:
        return None
    return tuple(-(-size // 8) * 8 if odd else size for size, odd in ((m, odd_m), (n, odd_n), (k, odd_k)))


def _padded(x, rows, cols):
    """x with zeros after its rows and columns, in its own order; x itself if it has that shape."""
    if x.shape == (rows, cols):
        return x
    if lay(x)[0]:
        return _padded(x.T, cols, rows).T
    out = xp.zeros((rows, cols), x.dtype)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def gemm(a, b, out, *, alpha=1.0, beta=0.0, half_sums=False):
    """out = alpha * a @ b + beta * out, for matrices or batches of them; a and b of one dtype, out of that or float32.

    Sums are float32 (float64 for float64). half_sums=True adds them up in float16, as a lesson: that needs float16 throughout.
    Returns out.
    """
    if not out.size:
        return out
    a, b = (x if lay(x) else xp.ascontiguousarray(x) for x in (a, b))
    if a.dtype != b.dtype or out.dtype not in (a.dtype, float32) or half_sums and out.dtype != float16:
        raise ValueError(
            f"gemm: no product of {a.dtype} and {b.dtype} in {out.dtype}" + half_sums * " with half sums"
        )
    if not a.size:  # a sum of nothing
        out[...] = out * beta if beta else 0
        return out
    if sizes := padding(a, b, out):  # zeros change no sum
        (rows, cols), (m, n, k) = out.shape, sizes
        whole = _padded(out, m, n)
        gemm(_padded(a, m, k), _padded(b, k, n), whole, alpha=alpha, beta=beta, half_sums=half_sums)
        if whole is not out:
            out[...] = whole[:rows, :cols]
        return out
    p = plan(a, b, out)
    compute, kind = (COMPUTE_64F, float64) if a.dtype == float64 else (COMPUTE_32F, float32)
    if half_sums:
        compute, kind = COMPUTE_16F, float16
    factors = np.array([alpha, beta], kind)  # read by cuBLAS while the call lasts
    at = factors.ctypes.data
    handle = xp.cuda.device.get_cublas_handle()
    xp.cuda.cublas.setMathMode(handle, NO_REDUCED_PRECISION_REDUCTION)
    head = (handle, *p.transposed, p.m, p.n, p.k, at)
    # a and b may be copies that only these names keep alive until the call
    from_b, from_a, beta_at = b.data.ptr, a.data.ptr, at + factors.itemsize
    (tb, ta, to), (ldb, lda, ldo), (sb, sa, so) = p.types, p.leading, p.strides
    if p.batch == 1:
        tail = (compute, DEFAULT)
        cublas.call("gemmEx", *head, from_b, tb, ldb, from_a, ta, lda, beta_at, out.data.ptr, to, ldo, *tail)
    else:
        tail = (p.batch, compute, DEFAULT)
        by_a, by_b, by_out = (from_a, ta, lda, sa), (from_b, tb, ldb, sb), (out.data.ptr, to, ldo, so)
        cublas.call("gemmStridedBatchedEx", *head, *by_b, *by_a, beta_at, *by_out, *tail)
    return out


def matmul(a, b, dtype, alpha=1.0):
    """alpha * a @ b by NumPy's rules for shapes (vectors, batches that broadcast), as a new array of `dtype`."""
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError("matmul: a number has no matrix product, use a * b")
    if a.ndim == 1:
        return (
            matmul(a[None], b, dtype, alpha)[..., 0, :]
            if b.ndim > 1
            else matmul(a[None], b[:, None], dtype, alpha)[0, 0]
        )
    if b.ndim == 1:
        return matmul(a, b[:, None], dtype, alpha)[..., 0]
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"matmul: {a.shape} and {b.shape}: the inner sizes {a.shape[-1]}, {b.shape[-2]} differ"
        )
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*lead, a.shape[-2], b.shape[-1])
    if not (a.size and b.size):
        return xp.zeros(shape, dtype)  # sums of nothing
    out = xp.empty(shape, dtype)
    if b.ndim == 2 and a.ndim > 2 and a.flags.c_contiguous:  # one product instead of a batch of them
        gemm(a.reshape(-1, a.shape[-1]), b, out.reshape(-1, out.shape[-1]), alpha=alpha)
    elif not lead:
        gemm(a, b, out, alpha=alpha)
    else:
        gemm(_batch(a, lead), _batch(b, lead), out.reshape(-1, *out.shape[-2:]), alpha=alpha)
    return out


def _batch(x, lead):
    """x broadcast to (*lead, ., .), as one batch (B, ., .): without a copy where one stride serves all of it."""
    if all(n == 1 for n in x.shape[:-2]):
        return xp.broadcast_to(x.reshape(x.shape[-2:]), (int(np.prod(lead)), *x.shape[-2:]))
    x = xp.broadcast_to(x, (*lead, *x.shape[-2:]))
    return x if len(lead) == 1 else x.reshape(-1, *x.shape[-2:])
