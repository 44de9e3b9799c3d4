"""Convolution and pooling on NumPy arrays: copies of shifted slices, and one matrix product per block of them.

Logical shapes are NCHW everywhere. In memory the images come last, (C, H, W, N): the slice that a kernel offset reads is then
one run of OW * N numbers per row, so a column is filled by plain copies, the columns of all images are one matrix, and pooling
is a maximum of whole slices. Results keep that order (a permuted view), so a chain of layers never transposes.

Half arrays are widened on the way in and every sum is float32 (float64 for float64); rounding to half is the caller's one step.
"""

import numpy as np

from minamp.backends.select import keep
from minamp.formats import widen

# A block of columns is used up while it is still in the cache; small blocks wait for BLAS's threads too often.
# Forward of 16 -> 32 channels, 3x3, 14x14, 128 images on 2 threads: 1 MB 5.3 ms, 2 MB 4.2, 4 MB 3.8, 8 MB 4.2;
# all columns in one block take twice as long (9.5 ms against 4.8 on 1 thread).
COLUMN_BYTES = 4 << 20


def conv2d(x, w, bias, stride, padding, dilation, groups):
    """x (N, C, H, W), w (O, C / groups, KH, KW), bias (O,) or None -> (N, O, OH, OW), float32 or float64."""
    (n, _, h, wide), (o, cg, kh, kw) = x.shape, w.shape
    padded = _images_last(x, padding)
    oh, ow = conv_size((h, wide), (kh, kw), stride, padding, dilation)
    weights = widen(w).reshape(groups, o // groups, cg * kh * kw)
    y = np.empty((o, oh, ow, n), np.result_type(padded, weights))
    flat = y.reshape(groups, o // groups, oh * ow * n)
    shift = None if bias is None else widen(bias).reshape(groups, o // groups, 1)
    for rows, cols, span, columns in _blocks((groups, cg, kh, kw), (oh, ow), n, padded.dtype):
        _fill(columns, padded, rows, cols, stride, dilation)
        block = flat[:, :, span]
        np.matmul(weights, columns.reshape(groups, cg * kh * kw, -1), out=block)
        if shift is not None:
            block += shift
    return y.transpose(3, 0, 1, 2)


def conv2d_weight_grad(g, x, w_shape, stride, padding, dilation, groups):
    """The gradient that reaches w, given g (N, O, OH, OW), the gradient of the output."""
    o, cg, kh, kw = w_shape
    n, _, oh, ow = g.shape
    padded = _images_last(x, padding)
    flat = _images_last(g).reshape(groups, o // groups, oh * ow * n)
    out = np.zeros((groups, cg * kh * kw, o // groups), np.result_type(padded, flat))
    for rows, cols, span, columns in _blocks((groups, cg, kh, kw), (oh, ow), n, padded.dtype):
        _fill(columns, padded, rows, cols, stride, dilation)
        out += np.matmul(columns.reshape(groups, cg * kh * kw, -1), flat[:, :, span].transpose(0, 2, 1))
    return out.transpose(0, 2, 1).reshape(w_shape)


def conv2d_input_grad(g, w, x_shape, stride, padding, dilation, groups):
    """The gradient that reaches x: columns of it by one product, each added where the forward read it."""
    (n, c, h, wide), (o, cg, kh, kw) = x_shape, w.shape
    (ph, pw), (oh, ow) = padding, g.shape[2:]
    flat = _images_last(g).reshape(groups, o // groups, oh * ow * n)
    weights = widen(w).reshape(groups, o // groups, cg * kh * kw).transpose(0, 2, 1)
    out = np.zeros((c, h + 2 * ph, wide + 2 * pw, n), np.result_type(flat, weights))
    for rows, cols, span, columns in _blocks((groups, cg, kh, kw), (oh, ow), n, out.dtype):
        np.matmul(weights, flat[:, :, span], out=columns.reshape(groups, cg * kh * kw, -1))
        for i, j, at in _offsets((kh, kw), rows, cols, stride, dilation):
            out[at] += columns[:, i, j]
    return out[:, ph : ph + h, pw : pw + wide].transpose(3, 0, 1, 2)


def conv2d_transposed(x, w, bias, y_shape, stride, padding, dilation, groups):
    """conv2d_input_grad as a forward, plus bias (O,) or None."""
    y = conv2d_input_grad(x, w, y_shape, stride, padding, dilation, groups)
    return y if bias is None else y + widen(bias)[:, None, None]


def conv_size(size, kernel, stride, padding, dilation):
    """(OH, OW) of a convolution over an image of `size`."""
    return tuple(
        (a + 2 * p - d * (k - 1) - 1) // s + 1
        for a, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    )


def _images_last(x, padding=(0, 0)):
    """x (N, C, H, W) widened, as a contiguous (C, H + 2 * ph, W + 2 * pw, N) with zeros around."""
    x = widen(x).transpose(1, 2, 3, 0)
    if padding == (0, 0):
        return np.ascontiguousarray(x)
    (c, h, w, n), (ph, pw) = x.shape, padding
    out = np.zeros((c, h + 2 * ph, w + 2 * pw, n), x.dtype)
    out[:, ph : ph + h, pw : pw + w] = x
    return out


def _blocks(kernel, size, n, dtype):
    """Cut the output positions (OH, OW) into whole rows, or parts of one row, whose columns take COLUMN_BYTES.

    Yields rows, cols (slices), their span in the flat (OH * OW * N), and one buffer (C, KH, KW, rows, cols, N), always reused.
    """
    (groups, cg, kh, kw), (oh, ow) = kernel, size
    height = groups * cg * kh * kw
    fit = max(1, COLUMN_BYTES // max(1, height * n * dtype.itemsize))
    rows, cols = max(1, min(oh, fit // ow)), min(ow, fit)
    buffer = np.empty(height * rows * cols * n, dtype)
    for top in range(0, oh, rows):
        for left in range(0, ow, cols):
            shape = (min(rows, oh - top), min(cols, ow - left))
            count = shape[0] * shape[1] * n
            start = (top * ow + left) * n
            yield (
                slice(top, top + shape[0]),
                slice(left, left + shape[1]),
                slice(start, start + count),
                buffer[: height * count].reshape(groups * cg, kh, kw, *shape, n),
            )


def _offsets(kernel, rows, cols, stride, dilation):
    """For every kernel offset i, j: the index of the padded input that output positions rows, cols read there."""
    (kh, kw), (sh, sw), (dh, dw) = kernel, stride, dilation
    for i in range(kh):
        for j in range(kw):
            top, left = rows.start * sh + i * dh, cols.start * sw + j * dw
            bottom, right = (
                top + (rows.stop - rows.start - 1) * sh + 1,
                left + (cols.stop - cols.start - 1) * sw + 1,
            )
            yield i, j, (slice(None), slice(top, bottom, sh), slice(left, right, sw))


def _fill(columns, padded, rows, cols, stride, dilation):
    for i, j, at in _offsets(columns.shape[1:3], rows, cols, stride, dilation):
        columns[:, i, j] = padded[at]


# ----------------------------------------------------------------------------------------------------------------- max pooling


def max_pool2d(x, kernel, stride, padding, dilation, ceil_mode):
    """The largest value of every window; nan wins, the padding is -inf."""
    size = pool_size(x.shape[2:], kernel, stride, padding, dilation, ceil_mode)
    half, (values,) = x.dtype, _comparable(x)
    y = np.full((x.shape[1], *size, x.shape[0]), -np.inf, half if values.dtype == np.int16 else values.dtype)
    best = y.view(values.dtype)
    for _, out, at in windows(x.shape[2:], size, kernel, stride, padding, dilation):
        np.maximum(best[out], values[at], out=best[out])
    return y.transpose(3, 0, 1, 2)


def max_pool2d_position(x, y, kernel, stride, padding, dilation):
    """Which kernel offset (i * KW + j) holds the first maximum y of every window; all bits set where none does."""
    values, best = _comparable(x, y)
    kind = np.uint8 if kernel[0] * kernel[1] < 256 else np.uint32
    position = np.full(best.shape, -1, np.int8 if kind is np.uint8 else np.int32).view(kind)
    nan = best.dtype != np.int16 and np.isnan(best).any()
    for k, out, at in windows(x.shape[2:], best.shape[1:3], kernel, stride, padding, dilation):
        hit = values[at] == best[out]
        if nan:
            hit |= np.isnan(values[at])
        miss = hit.view(np.uint8).astype(kind, copy=False) - kind(1)  # 0 for a hit, otherwise all bits
        np.minimum(position[out], miss | kind(k), out=position[out])
    return position.transpose(3, 0, 1, 2)


def max_pool2d_scatter(g, position, x_shape, kernel, stride, padding, dilation):
    """Zeros of x_shape with g added where `position` points: the gradient of max_pool2d."""
    g, position = _images_last(g), np.ascontiguousarray(position.transpose(1, 2, 3, 0))
    n, c, h, w = x_shape
    out = np.zeros((c, h, w, n), g.dtype)
    apart = all(s > d * (k - 1) for s, d, k in zip(stride, dilation, kernel, strict=True))
    for k, window, at in windows((h, w), g.shape[1:3], kernel, stride, padding, dilation):
        if apart:  # no element lies in two windows
            keep(g[window], position[window] == k, out[at])
        else:
            out[at] += keep(g[window], position[window] == k)
    return out.transpose(3, 0, 1, 2)


def max_pool2d_gather(x, position, kernel, stride, padding, dilation):
    """x where `position` points: what max_pool2d_scatter undoes."""
    x, position = _images_last(x), position.transpose(1, 2, 3, 0)
    y = np.zeros(position.shape, x.dtype)
    for k, window, at in windows(x.shape[1:3], position.shape[1:3], kernel, stride, padding, dilation):
        y[window] += keep(x[at], position[window] == k)
    return y.transpose(3, 0, 1, 2)


def pool_size(size, kernel, stride, padding, dilation, ceil_mode):
    """(OH, OW) of a pooling; with ceil_mode a last window that starts in the image or its left padding counts too."""
    out = []
    for a, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True):
        span = a + 2 * p - d * (k - 1) - 1
        count = (-(-span // s) if ceil_mode else span // s) + 1
        out.append(count - 1 if ceil_mode and (count - 1) * s >= a + p else count)
    return tuple(out)


def _comparable(*arrays):
    """The arrays (N, C, H, W) as (C, H, W, N), in a dtype with a fast maximum.

    Halves without a sign bit order like their bits, nan above inf: an int16 maximum is 20x faster than NumPy's half one.
    """
    arrays = [np.ascontiguousarray(a.transpose(1, 2, 3, 0)) for a in arrays]
    if arrays[0].dtype.itemsize == 2:
        bits = [a.view(np.int16) for a in arrays]
        if all(not b.size or b.min() >= 0 for b in bits):
            return bits
    return [widen(a) for a in arrays]


def windows(size, out, kernel, stride, padding, dilation):
    """For every kernel offset: its number, the outputs whose window has it inside the image, and where they read."""
    axes = []
    for a, o, k, s, p, d in zip(size, out, kernel, stride, padding, dilation, strict=True):
        axis = []
        for i in range(k):
            first = max(0, -((i * d - p) // s))  # the first output with first * s - p + i * d >= 0
            last = min(o - 1, (a - 1 + p - i * d) // s)
            start = first * s - p + i * d
            if last >= first:
                axis.append((i, slice(first, last + 1), slice(start, start + (last - first) * s + 1, s)))
        axes.append(axis)
    for i, rows, in_rows in axes[0]:
        for j, cols, in_cols in axes[1]:
            yield i * kernel[1] + j, (slice(None), rows, cols), (slice(None), in_rows, in_cols)


# ------------------------------------------------------------------------------------------------------------- average pooling


def window_mean(x, rows, cols, counts):
    """Sums of x over windows, divided by `counts` (OH, OW). rows, cols: (start, stop) per output position."""
    x = _images_last(x)
    c, _, w, n = x.shape
    strips = np.empty((c, len(rows), w, n), x.dtype)
    for i, (start, stop) in enumerate(rows):
        np.sum(x[:, start:stop], axis=1, out=strips[:, i])
    y = np.empty((c, len(rows), len(cols), n), x.dtype)
    for j, (start, stop) in enumerate(cols):
        np.sum(strips[:, :, start:stop], axis=2, out=y[:, :, j])
    y /= counts.astype(x.dtype)[..., None]
    return y.transpose(3, 0, 1, 2)


def window_mean_grad(g, x_shape, rows, cols, counts):
    """The gradient that reaches x in window_mean: every window hands g / count to each of its elements."""
    n, c, h, w = x_shape
    g = _images_last(g)
    g = g / counts.astype(g.dtype)[..., None]
    strips = np.zeros((c, len(rows), w, n), g.dtype)
    for j, (start, stop) in enumerate(cols):
        strips[:, :, start:stop] += g[:, :, j : j + 1]
    out = np.zeros((c, h, w, n), g.dtype)
    for i, (start, stop) in enumerate(rows):
        out[:, start:stop] += strips[:, i : i + 1]
    return out.transpose(3, 0, 1, 2)
