"""A reference of cuBLAS's gemmEx in column-major order, on memory given by address: the double for all stride logic."""

import ctypes

import ml_dtypes
import numpy as np

DTYPES = {0: np.dtype("f4"), 1: np.dtype("f8"), 2: np.dtype("f2"), 14: np.dtype(ml_dtypes.bfloat16)}
SUMS = {64: "f2", 68: "f4", 70: "f8"}


def matrix(address, kind, rows, cols, leading):
    """Column-major: element (i, j) lies at i + j * leading."""
    assert leading >= max(rows, 1)
    dtype = DTYPES[kind]
    size = ((cols - 1) * leading + rows) * dtype.itemsize if rows * cols else 0
    memory = np.frombuffer((ctypes.c_char * size).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(memory, (rows, cols), (dtype.itemsize, leading * dtype.itemsize))


def gemm_ex(
    handle, ta, tb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, algo
):
    """C = alpha * op(A) @ op(B) + beta * C; sums in the compute type, one rounding at the end. beta = 0 does not read C."""
    kind = np.dtype(SUMS[compute])
    alpha, beta = (
        np.ctypeslib.as_array((ctypes.c_char * kind.itemsize).from_address(p)).view(kind)[0]
        for p in (alpha, beta)
    )
    a = matrix(a, a_type, k, m, lda).T if ta else matrix(a, a_type, m, k, lda)
    b = matrix(b, b_type, n, k, ldb).T if tb else matrix(b, b_type, k, n, ldb)
    c = matrix(c, c_type, m, n, ldc)
    if algo == 99 and kind == "f4":  # what the deprecated choice allows
        a, b = a.astype("f2"), b.astype("f2")
    with np.errstate(all="ignore"):
        if compute == 64:  # every step rounded to half
            total = np.zeros((m, n), kind)
            for i in range(k):
                total = total + a[:, i : i + 1] * b[i : i + 1]
        else:
            total = (b.T.astype(kind) @ a.T.astype(kind)).T
        total = total if alpha == 1 else alpha * total
        c[...] = (total if beta == 0 else total + beta * c.astype(kind)).astype(c.dtype)


def gemm_strided_batched_ex(
    handle,
    ta,
    tb,
    m,
    n,
    k,
    alpha,
    a,
    a_type,
    lda,
    sa,
    b,
    b_type,
    ldb,
    sb,
    beta,
    c,
    c_type,
    ldc,
    sc,
    batch,
    compute,
    algo,
):
    for i in range(batch):
        at = [
            p + i * s * DTYPES[t].itemsize for p, s, t in ((a, sa, a_type), (b, sb, b_type), (c, sc, c_type))
        ]
        args = (at[0], a_type, lda, at[1], b_type, ldb, beta, at[2], c_type, ldc, compute, algo)
        gemm_ex(handle, ta, tb, m, n, k, alpha, *args)
