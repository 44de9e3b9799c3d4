"""What each CUDA kernel does, in NumPy: the same arguments, the same order of operations. tests/test_kernels.py holds the
kernels' own text to these, compiled for the CPU."""

import numpy as np

from minamp.backends import update
from minamp.formats import cast


def of(name):
    """The double of the kernel `name`, which ends in the types it is made for."""
    while name not in globals():
        name = name.rpartition("_")[0]
    return globals()[name]


def _taps(kernel, size, stride, padding, dilation, image):
    """For every kernel offset: (i, j, output rows, input rows, output cols, input cols) inside the image."""
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            sides = []
            for k, o, s, p, d, n in zip((i, j), size, stride, padding, dilation, image, strict=True):
                at = np.arange(o) * s - p + k * d
                inside = (at >= 0) & (at < n)
                sides += [np.flatnonzero(inside), at[inside]]
            yield i, j, *sides


def _geometry(h, w, oh, ow, kh, kw, sh, sw, ph, pw, dh, dw):
    return (kh, kw), (oh, ow), (sh, sw), (ph, pw), (dh, dw), (h, w)


def im2col(columns, x, first, count, width, h, w, c, c0, cg, oh, ow, *rest):
    geometry = _geometry(h, w, oh, ow, *rest)
    kh, kw = geometry[0]
    word = columns.nbytes // max(1, count * width)  # bytes that count as one channel
    x = x.view(f"V{word}").reshape(len(x), h, w, c)[..., c0 : c0 + cg]
    out = np.zeros((len(x), oh, ow, kh, kw, cg), x.dtype)
    for i, j, rows, at_rows, cols, at_cols in _taps(*geometry):
        out[:, rows[:, None], cols, i, j] = x[:, at_rows[:, None], at_cols]
    part = out.reshape(-1, kh * kw * cg)[first : first + count]
    columns = columns.view(f"V{word}").reshape(-1, width)
    columns[...] = np.zeros((), columns.dtype)
    columns[:, : part.shape[1]] = part


def col2im(x, columns, bias, images, width, h, w, c, c0, cg, oh, ow, *rest):
    geometry = _geometry(h, w, oh, ow, *rest)
    (kh, kw), sums = geometry[0], columns.dtype
    columns = columns.reshape(-1, width)[:, : kh * kw * cg].reshape(images, oh, ow, kh, kw, cg)
    out = np.zeros((images, h, w, cg), columns.dtype)
    for i, j, rows, at_rows, cols, at_cols in _taps(*geometry):
        out[:, at_rows[:, None], at_cols] += columns[:, rows[:, None], cols, i, j]
    if _array(bias) is not None:
        out += cast(bias[c0 : c0 + cg], sums)
    x[..., c0 : c0 + cg] = cast(out, x.dtype)


@np.errstate(all="ignore")
def conv2d_wmma(y, x, w, bias, positions, h, wide, c, o, *rest):
    """One product after the other in float32: kernel rows, kernel columns, channels."""
    (oh, ow, kh, kw), w = rest[:4], w.reshape(-1, o)
    columns, total = np.zeros((positions, kh * kw * c), x.dtype), np.zeros((positions, o), np.float32)
    im2col(columns, x, 0, positions, columns.shape[1], h, wide, c, 0, c, oh, ow, *rest[2:])
    columns, w = cast(columns, np.float32), cast(w, np.float32)
    for k in range(len(w)):
        total += columns[:, k : k + 1] * w[k]
    if _array(bias) is not None:
        total += cast(bias, np.float32)
    y[...] = cast(total, y.dtype).reshape(y.shape)


def max_pool2d(y, x, least, n, h, w, c, oh, ow, *rest):
    y[...] = cast(np.asarray(least), y.dtype)
    for i, j, rows, at_rows, cols, at_cols in _taps(*_geometry(h, w, oh, ow, *rest)):
        at, value = np.s_[:, rows[:, None], cols], x[:, at_rows[:, None], at_cols]
        better = (cast(value, least.dtype) > cast(y[at], least.dtype)) | np.isnan(cast(value, least.dtype))
        y[at] = np.where(better, value, y[at])


def max_pool2d_position(position, x, y, n, h, w, c, oh, ow, *rest):
    none, kw = np.iinfo(position.dtype).max, rest[1]
    position[...] = none
    for i, j, rows, at_rows, cols, at_cols in _taps(*_geometry(h, w, oh, ow, *rest)):
        at, value = np.s_[:, rows[:, None], cols], x[:, at_rows[:, None], at_cols]
        hit = (value == y[at]) | np.isnan(cast(value, np.float64))
        position[at] = np.where(hit & (position[at] == none), i * kw + j, position[at])


def max_pool2d_scatter(x, g, position, n, h, w, c, oh, ow, *rest):
    sums = np.float64 if x.itemsize == 8 else np.float32
    out, kw = np.zeros(x.shape, sums), rest[1]
    for i, j, rows, at_rows, cols, at_cols in _taps(*_geometry(h, w, oh, ow, *rest)):
        at = np.s_[:, rows[:, None], cols]
        out[:, at_rows[:, None], at_cols] += np.where(position[at] == i * kw + j, cast(g[at], sums), 0)
    x[...] = cast(out, x.dtype)


def max_pool2d_gather(y, x, position, n, h, w, c, oh, ow, *rest):
    y[...], kw = 0, rest[1]
    for i, j, rows, at_rows, cols, at_cols in _taps(*_geometry(h, w, oh, ow, *rest)):
        at = np.s_[:, rows[:, None], cols]
        y[at] = np.where(position[at] == i * kw + j, x[:, at_rows[:, None], at_cols], y[at])


@np.errstate(all="ignore")
def unscale(g, bad, inverse, n):
    if inverse != 1:
        g[...] = cast(cast(g, inverse.dtype) * inverse, g.dtype)
    if not np.isfinite(cast(g, np.float32 if g.itemsize < 4 else g.dtype)).all():
        bad[...] = 1


def _array(x):
    return None if isinstance(x, np.generic) else x


@np.errstate(all="ignore")
def sgd(w, g, b, half16, skip, n, lr, momentum, damp, decay, fresh, nesterov, maximize, brain):
    if _array(skip) is not None and skip[0]:
        return
    update.sgd(
        w,
        g,
        _array(b),
        fresh,
        lr=lr,
        momentum=momentum,
        dampening=0 if damp == 1 else 1 - float(damp),
        weight_decay=decay,
        nesterov=nesterov,
        maximize=maximize,
    )
    if _array(half16) is not None:
        half16[...] = cast(w, half16.dtype)


@np.errstate(all="ignore")
def adam(
    w, g, m, v, top, half16, skip, n, shrink, decay, less1, beta2, less2, root, eps, size, maximize, brain
):
    if _array(skip) is not None and skip[0]:
        return
    w *= shrink
    d = w * decay if decay else 0
    d = d - g if maximize else d + g if decay else g
    m += (d - m) * less1
    v *= beta2
    v += d * less2 * d
    if _array(top) is not None:
        np.maximum(top, v, out=top)
        v = top
    w -= m * size / (np.sqrt(v) / root + eps)
    if _array(half16) is not None:
        half16[...] = cast(w, half16.dtype)


def keep_mask(keep, n, key0, key1, threshold):
    """Philox4x32-10 in 64-bit integers."""
    block = np.arange(-(-int(n) // 4), dtype=np.uint64)
    low, u32 = np.uint64(0xFFFFFFFF), np.uint64(32)
    x = [block & low, block >> u32, np.zeros_like(block), np.zeros_like(block)]
    k0, k1 = int(key0), int(key1)
    for _ in range(10):
        p0, p1 = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(p1 >> u32) ^ x[1] ^ np.uint64(k0), p1 & low, (p0 >> u32) ^ x[3] ^ np.uint64(k1), p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    keep.reshape(-1)[...] = (np.stack(x, 1) >= np.uint64(threshold)).reshape(-1)[: int(n)]


def window_mean(y, x, rows, cols, counts, n, h, w, c, oh, ow):
    for i in range(oh):
        for j in range(ow):
            total = np.zeros((n, c), counts.dtype)
            for row in range(*rows[i]):
                for col in range(*cols[j]):
                    total += cast(x[:, row, col], counts.dtype)
            y[:, i, j] = cast(total / counts[i, j], y.dtype)


def window_mean_grad(x, g, rows, cols, counts, n, h, w, c, oh, ow):
    for row in range(h):
        for col in range(w):
            total = np.zeros((n, c), counts.dtype)
            for i in range(*rows[row]):
                for j in range(*cols[col]):
                    total += cast(g[:, i, j], counts.dtype) / counts[i, j]
            x[:, row, col] = cast(total, x.dtype)
