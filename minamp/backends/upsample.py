"""Resizing images (N, C, H, W) along rows and columns, and the transpose of that.

A resize of one dimension is its `taps`: y[i] = x[low[i]] * (1 - part[i]) + x[high[i]] * part[i].
"""

import numpy as np

from minamp.formats import widen


def upsample2d(x, rows, cols):
    return _resize(_resize(widen(x), rows, 2), cols, 3)


def _resize(x, taps, dim):
    _, low, high, part = taps
    first = np.take(x, low, axis=dim)
    if part is None:  # nearest
        return first
    part = part.reshape((-1,) + (1,) * (3 - dim)).astype(x.dtype)
    return first * (1 - part) + np.take(x, high, axis=dim) * part


def upsample2d_grad(g, rows, cols):
    """Two matrix products a plane: float32 sums, and faster than adding value by value."""
    g = widen(g)
    return np.matmul(np.matmul(matrix(rows, g.dtype).T, g), matrix(cols, g.dtype))


def matrix(taps, dtype):
    """The (out, in) matrix of a resize."""
    size, low, high, part = taps
    matrix = np.zeros((len(low), size), dtype)
    places = np.arange(len(low))
    np.add.at(matrix, (places, low), 1.0 if part is None else 1.0 - part)
    if part is not None:
        np.add.at(matrix, (places, high), part)
    return matrix
