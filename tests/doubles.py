"""What each CUDA kernel does, in NumPy: the same arguments, the same order of operations. tests/test_kernels.py holds the
kernels' own text to these, compiled for the CPU."""

import ctypes
import functools
import math

import numpy as np

from minamp.backends import cpu, update
from minamp.formats import bfloat16, cast, float32, float64


def of(name):
    """The double of the kernel `name`, which ends in the types it is made for."""
    base = name
    while base not in globals():
        base = base.rpartition("_")[0]
    double = globals()[base]
    if base not in COLUMNS:
        return double

    @functools.wraps(double)
    def on_memory(table, *args):
        double(tensors(name, table, args[0], args[-1]), *args)

    return on_memory


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


# Kernels over a table of tensors (kernels_update.py): which dtypes its columns have, "T" and "S" being the kernel's
# "1" one float32, "U" one uint32.
COLUMNS = {
    "unscale": "TU",
    "widen": "Tf",
    "count_steps": "1",
    "sgd": "TTSH1",
    "adam": "TTSSSH",
    "rmsprop": "TTSSSH",
}
TYPES = {"half": np.dtype(np.float16), "bf16": bfloat16, "float": float32, "double": float64}


def tensors(name, table, count, brain=0):
    """[(array of each column or None)] per tensor of the kernel's `table`, which has their addresses."""
    base, _, kind = name.rpartition("_")
    t = TYPES[kind]
    types = {
        "T": t,
        "S": t if t.itemsize > 2 else float32,
        "f": float32,
        "1": float32,
        "U": np.dtype(np.uint32),
        "H": bfloat16 if brain else TYPES["half"],
    }
    sizes, at = np.diff(table["start"][0]), table["at"][0]
    return [
        [_memory(at[c, k], 1 if x in "1U" else sizes[k], types[x]) for c, x in enumerate(COLUMNS[base])]
        for k in range(count)
    ]


def _memory(address, n, dtype):
    if not address:
        return None
    raw = (ctypes.c_char * (int(n) * dtype.itemsize)).from_address(int(address))
    return np.frombuffer(raw, np.uint8).view(dtype)


def _array(x):
    return None if isinstance(x, np.generic) else x


@np.errstate(all="ignore")
def unscale(held, count, first, bad, scale):
    inverse = np.float32(1) if _array(scale) is None else np.float32(1) / scale.reshape(())
    for g, own in held:
        wide = float32 if g.itemsize < 4 else g.dtype
        if inverse != 1:
            g[...] = cast(cast(g, wide) * wide.type(inverse), g.dtype)
        if not np.isfinite(cast(g, wide)).all():
            bad[0] = own[0] = 1


def widen(held, count, first):
    for half, out in held:
        out[...] = cast(half, float32)


def count_steps(held, count, first, corrections, skip, lr, beta1, beta2):
    if _array(skip) is not None and skip.reshape(-1)[0]:
        return
    for k, (step,) in enumerate(held):
        step += 1
        corrections[2 * (first + k)] = math.sqrt(1 - float(beta2) ** float(step[0]))
        corrections[2 * (first + k) + 1] = float(lr) / (1 - float(beta1) ** float(step[0]))


@np.errstate(all="ignore")
def sgd(held, count, first, skip, lr, momentum, damp, decay, fresh, nesterov, maximize, brain):
    if _array(skip) is not None and skip.reshape(-1)[0]:
        return
    for w, g, b, half, step in held:
        update.sgd(
            [w],
            [g],
            None if b is None else [b],
            fresh if step is None else step[0] == 1,
            lr=lr,
            momentum=momentum,
            dampening=0 if damp == 1 else 1 - float(damp),
            weight_decay=decay,
            nesterov=nesterov,
            maximize=maximize,
            halves=None if half is None else [half],
        )


@np.errstate(all="ignore")
def adam(
    held,
    count,
    first,
    corrections,
    skip,
    shrink,
    decay,
    less1,
    beta2,
    less2,
    root,
    eps,
    size,
    maximize,
    brain,
):
    if _array(skip) is not None and skip.reshape(-1)[0]:
        return
    for k, (weight, g, m, v, top, half) in enumerate(held):
        if _array(corrections) is not None:
            root, size = corrections[2 * (first + k) : 2 * (first + k) + 2]
        w, g = cast(weight, m.dtype), cast(g, m.dtype)
        w = w * shrink
        d = w * decay if decay else 0
        d = d - g if maximize else d + g if decay else g
        m += (d - m) * less1
        v *= beta2
        v += d * less2 * d
        if top is not None:
            v = np.maximum(top, v, out=top)
        w -= m * size / (np.sqrt(v) / root + eps)
        weight[...] = cast(w, weight.dtype)
        if half is not None:
            half[...] = cast(w, half.dtype)


@np.errstate(all="ignore")
def rmsprop(held, count, first, skip, lr, alpha, rest, eps, decay, momentum, maximize, brain):
    if _array(skip) is not None and skip.reshape(-1)[0]:
        return
    for weight, g, v, mean, b, half in held:
        w, g = cast(weight, v.dtype), cast(g, v.dtype)
        d = w * decay if decay else 0
        d = d - g if maximize else d + g if decay else g
        v *= alpha
        v += d * rest * d
        square = v
        if mean is not None:
            mean += (d - mean) * rest
            square = np.maximum(v - mean * mean, v.dtype.type(0))
        move = d / (np.sqrt(square) + eps)
        if b is not None:
            b *= momentum
            b += move
            move = b
        w = w - move * lr
        weight[...] = cast(w, weight.dtype)
        if half is not None:
            half[...] = cast(w, half.dtype)


def update_scale(scale, tracker, bad, found, growth, backoff, interval, low, high):
    found = bool(found) or _array(bad) is not None and bool(bad.reshape(-1)[0])
    rule = (float(growth), float(backoff), int(interval), float(low), float(high))
    scale[...], tracker[...] = update.update_scale(scale, tracker, None, found, *rule)


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


def sigmoid(y, x, n):
    y[...] = cpu.sigmoid(x)


def erf(y, x, n):
    y[...] = cpu.erf(x)


def relu_grad(out, y, g, n):
    out[...] = cpu.relu_grad(g, y)


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
