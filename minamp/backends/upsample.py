"""Resizing images (N, C, H, W) along rows and columns, and the transpose of that.

A resize of one dimension is its `taps`, (size, ((inputs, weights), ...)): y[i] is the sum of x[inputs[i]] * weights[i].
"""

import functools
import operator

import numpy as np

from minamp.formats import widen


def upsample2d(x, rows, cols):
    return _resize(_resize(widen(x), rows, 2), cols, 3)


def _resize(x, taps, dim):
    parts = (_weighted(np.take(x, at, axis=dim), weights, dim) for at, weights in taps[1])
    return functools.reduce(operator.add, parts)


def _weighted(x, weights, dim):
    """x times the weights along `dim`; None: x."""
    return x if weights is None else x * weights.reshape((-1,) + (1,) * (3 - dim)).astype(x.dtype)


def upsample2d_grad(g, rows, cols):
    """Two matrix products a plane: float32 sums, and faster than adding value by value."""
    g = widen(g)
    return np.matmul(np.matmul(matrix(rows, g.dtype).T, g), matrix(cols, g.dtype))


def matrix(taps, dtype):
    """The (out, in) matrix of a resize."""
    size, reads = taps
    places = np.arange(len(reads[0][0]))
    matrix = np.zeros((len(places), size), dtype)
    for at, weights in reads:
        np.add.at(matrix, (places, at), 1.0 if weights is None else weights)
    return matrix
