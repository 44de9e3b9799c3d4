"""Many arrays as a few blocks that stay in the L2 cache over all passes: large ones are cut, small ones packed together.

No temporary is as large as a weight, and arrays stay where they are: packed values are copied back. With flat buffers for weights
and state nothing would be copied, but then every way to replace an array (p.data = ..., model.half(), load_state_dict) would
have to be noticed and undone.
"""

import numpy as np

from minamp.formats import float32, float64, is_half, narrow, widen

BLOCK = 1 << 17  # elements, 512 KB of float32: Adam on 5.8 million weights takes 51 ms, in one piece 83
# Elements, below which calls cost more than arithmetic: unscale and Adam of 60 small tensors take 0.58 ms, one by one 0.97.
SMALL = 1 << 11


def cuts(a):
    """Slices along the first dimension that make blocks of `a`; [...] for the whole."""
    rows = max(1, BLOCK * len(a) // a.size) if a.ndim and a.size > BLOCK else None
    return [...] if rows is None or rows >= len(a) else [slice(i, i + rows) for i in range(0, len(a), rows)]


def packs(arrays):
    """Their indices in groups: [i] for what is worked on by itself, small arrays of one dtype together, up to a block."""
    pack, filled = [], 0
    for i, a in enumerate(arrays):
        if a.size > SMALL:
            yield [i]
            continue
        if pack and (filled + a.size > BLOCK or a.dtype != arrays[pack[0]].dtype):
            yield from _worth(pack)
            pack, filled = [], 0
        pack.append(i)
        filled += a.size
    yield from _worth(pack)


def _worth(pack):
    """Packing pays from four arrays on."""
    return [pack] if len(pack) > 3 else [[i] for i in pack]


def packed(arrays, pack, dtype=None):
    """The arrays with these indices, one after the other."""
    return np.concatenate([arrays[i].reshape(-1) for i in pack], dtype=dtype)


def unpack(flat, arrays, pack):
    """The reverse of `packed`."""
    at = 0
    for i in pack:
        a = arrays[i]
        a[...] = flat[at : at + a.size].reshape(a.shape)
        at += a.size


def blocks(ws, gs, *states, halves=None):
    """Yield (scratch, scratch, w, g, *states) block by block, float32 (float64); lists that are None give None.

    What was done to w and the states is in the arrays of `ws` and `states` when the next block comes, and in `halves` rounded.
    """
    wide = ws[0].dtype if ws[0].dtype == float64 else float32
    rounded = ws if is_half(ws[0].dtype) else halves  # where halves are written
    for pack in packs(ws):
        if len(pack) > 1:
            w, g = packed(ws, pack, wide), packed(gs, pack, wide)
            held = [a and packed(a, pack) for a in states]
            yield (np.empty_like(w), np.empty_like(w), w, g, *held)
            for flat, arrays in zip(held, states, strict=True):
                if arrays:
                    unpack(flat, arrays, pack)
            if rounded is not ws:
                unpack(w, ws, pack)
            if rounded:
                unpack(narrow(w, rounded[0].dtype), rounded, pack)
            continue
        i, s, t = pack[0], None, None
        for cut in cuts(ws[i]):
            w, g = widen(ws[i][cut]), widen(gs[i][cut])
            if s is None:
                s, t = np.empty_like(w), np.empty_like(w)
            elif len(s) != len(w):  # the last one
                s, t = s[: len(w)], t[: len(w)]
            yield (s, t, w, g, *(a and a[i][cut] for a in states))
            if rounded:
                rounded[i][cut] = narrow(w, rounded[i].dtype)
