"""Answers to try on exercise 3: right ones written differently, and the misconceptions that its tests must see."""

from grading.local import Wrong, changed, groups, instead

POLICY, CAST, REGION, CACHE = "compute_dtypes", "cast", "autocast", "cached_cast"


RIGHT = {
    POLICY: [
        '''
def compute_dtypes(op, dtypes, region):
    """A rule per list, each a function of the inputs that may be cast."""
    floats = [d for d in dtypes if d in FORMATS.values()]
    if region is None or not floats:
        return dtypes
    if op in HALF:
        new = lambda d: region
    elif op in FLOAT32:
        new = lambda d: "float32"
    elif op in WIDEST:
        mixed = any(d != floats[0] for d in floats)
        new = lambda d: "float32" if mixed else d
    else:
        new = lambda d: d
    return tuple(new(d) if d in floats else d for d in dtypes)
''',
        '''
def wider(a, b):
    if a is None or a == b:
        return b
    return "float32"


def compute_dtypes(op, dtypes, region):
    """Input by input, with the widest format found first."""
    widest = None
    for d in dtypes:
        if d == "float32" or d.endswith("float16"):
            widest = wider(widest, d)
    answer = []
    for d in dtypes:
        if region is not None and (d == "float32" or d.endswith("float16")):
            if op in HALF:
                d = region
            if op in FLOAT32:
                d = "float32"
            if op in WIDEST:
                d = widest
        answer.append(d)
    return answer
''',
        '''
def compute_dtypes(op, dtypes, region):
    """Formats as sets of bits: a format holds another if it has its mantissa and its exponent."""
    bits = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23)}
    there = [bits[d] for d in dtypes if d in bits]
    needed = tuple(max(column) for column in zip(*there))
    holding = [name for name, (e, m) in bits.items() if there and e >= needed[0] and m >= needed[1]]
    rules = [(HALF, region), (FLOAT32, "float32"), (WIDEST, holding[0] if holding else None)]
    if region:
        for ops, target in rules:
            if op in ops:
                return [target if d in bits else d for d in dtypes]
    return list(dtypes)
''',
    ],
    CAST: [
        '''
def cast(x, dtype):
    """With the vjp as a named function."""
    back = x.dtype

    def vjp(g):
        return convert(g, back)

    if back == dtype:
        return x
    return Tensor(data=convert(x.data, dtype), parents=((x, vjp),))
''',
        '''
import functools


def cast(x, dtype):
    """The parents are put in afterwards."""
    if dtype != x.dtype:
        y = Tensor(convert(np.copy(x.data), dtype), requires_grad=x.requires_grad)
        y.parents = ((x, functools.partial(convert, dtype=x.dtype)),)
        return y
    return x
''',
        '''
def cast(x, dtype):
    """All through float32: widening is exact, so one rounding is left, forward and backward."""
    if x.dtype == dtype:
        return x
    wide = convert(x.data, "float32")

    def vjp(g):
        wide = convert(g, "float32")
        return wide if x.dtype == "float32" else convert(wide, x.dtype)

    return Tensor(wide if dtype == "float32" else convert(wide, dtype), [(x, vjp)])
''',
    ],
    REGION: [
        '''
class autocast:
    """What to bring back lies on one stack for all regions."""

    stack = []

    def __init__(self, dtype=None, enabled=True):
        self.settings = dtype, enabled

    def __enter__(self):
        autocast.stack.append(dict(enabled=state.enabled, dtype=state.dtype))
        dtype, state.enabled = self.settings
        if dtype is not None:
            state.dtype = dtype
        state.depth = state.depth + 1

    def __exit__(self, *error):
        for name, value in autocast.stack.pop().items():
            setattr(state, name, value)
        state.depth = state.depth - 1
        if not state.depth:
            state.cache = {}
''',
        '''
import contextlib


@contextlib.contextmanager
def region(dtype, enabled):
    before = state.enabled, state.dtype
    state.enabled, state.depth = enabled, state.depth + 1
    if dtype is not None:
        state.dtype = dtype
    try:
        yield
    finally:
        (state.enabled, state.dtype), state.depth = before, state.depth - 1
        if state.depth == 0:
            state.cache.clear()


class autocast:
    """A generator does the work, a new one for each entry."""

    def __init__(self, dtype=None, enabled=True):
        self.make, self.open = (lambda: region(dtype, enabled)), []

    def __enter__(self):
        self.open.append(self.make())
        return self.open[-1].__enter__()

    def __exit__(self, error_type, error, traceback):
        return self.open.pop().__exit__(error_type, error, traceback)
''',
        '''
class autocast:
    """The ways back, as functions."""

    def __init__(self, dtype=None, enabled=True):
        self.dtype, self.enabled, self.undo = dtype, enabled, []

    def __enter__(self):
        enabled, dtype, depth = state.enabled, state.dtype, state.depth

        def undo():
            state.enabled, state.dtype, state.depth = enabled, dtype, depth
            if depth == 0:
                for key in list(state.cache):
                    del state.cache[key]

        self.undo.append(undo)
        state.enabled, state.dtype, state.depth = self.enabled, dtype if self.dtype is None else self.dtype, depth + 1
        return self

    def __exit__(self, error_type, error, traceback):
        self.undo.pop()()
        return None
''',
    ],
    CACHE: [
        '''
def cached_cast(x, dtype, cast):
    """Found by id; the entry holds the weight, so that its id stays taken."""
    if dtype == x.dtype:
        return x
    if state.depth == 0 or not x.requires_grad or x.parents or x.dtype != "float32":
        return cast(x, dtype)
    key = id(x), dtype
    if key in state.cache:
        weight, version, copy = state.cache[key]
        if weight is x and version == x.version:
            return copy
    state.cache[key] = x, x.version, cast(x, dtype)
    return state.cache[key][2]
''',
        '''
import weakref


def cached_cast(x, dtype, cast):
    """A table for each weight, gone with it."""
    if dtype == x.dtype:
        return x
    if state.enabled and x.requires_grad and x.is_leaf and x.data.dtype == np.float32:
        tables = state.cache.setdefault("tables", weakref.WeakKeyDictionary())
        table = tables.setdefault(x, {})
        if (dtype, x.version) not in table:
            table[dtype, x.version] = cast(x, dtype)
        return table[dtype, x.version]
    return cast(x, dtype)
''',
        '''
def cached_cast(x, dtype, cast):
    """The version is part of the key; copies of old versions lie there until the region ends."""
    if x.dtype == dtype:
        return x
    key = (x, x.version, dtype)
    copy = state.cache.get(key)
    if copy is None:
        copy = cast(x, dtype)
        if state.depth >= 1 and (x.dtype, x.is_leaf, x.requires_grad) == ("float32", True, True):
            state.cache[key] = copy
    return copy
''',
    ],
}

WRONG = {
    POLICY: [
        Wrong(
            "a product with a float32 input stays float32",
            instead("target = region", 'target = "float32" if "float32" in present else region'),
            groups(POLICY, "half", "untouched"),
        ),
        Wrong(
            "half means float16 in every region",
            instead("target = region", 'target = "float16"'),
            groups(POLICY, "half"),
        ),
        Wrong(
            "the bias of a product keeps its float32",
            instead(
                "return [target if target is not None and d in eligible else d for d in dtypes]",
                "new = [target if target is not None and d in eligible else d for d in dtypes]\n"
                "    return new[:2] + dtypes[2:] if op in HALF else new",
            ),
            groups(POLICY, "half"),
        ),
        Wrong(
            "only the first input is cast to float32",
            instead(
                "return [target if target is not None and d in eligible else d for d in dtypes]",
                "new = [target if target is not None and d in eligible else d for d in dtypes]\n"
                "    return new[:1] + dtypes[1:] if op in FLOAT32 else new",
            ),
            groups(POLICY, "float32"),
        ),
        Wrong(
            "bfloat16 has the range of float32 and needs no float32 list",
            instead('target = "float32"\n', 'target = "float32" if "float16" in present else None\n'),
            groups(POLICY, "float32"),
        ),
        Wrong(
            "float64 is cast like the others",
            instead(
                '    eligible = {"float16", "bfloat16", "float32"}',
                '    eligible = {"float16", "bfloat16", "float32", "float64"}',
            ),
            groups(POLICY, "untouched"),
        ),
        Wrong(
            "float64 counts as the widest format",
            instead(
                'target = "float32" if len(present) > 1 else None',
                'target = "float64" if "float64" in dtypes else "float32" if len(present) > 1 else None',
            ),
            groups(POLICY, "untouched"),
        ),
        Wrong(
            "what several inputs meet in is always the region's half format",
            instead('"float32" if len(present) > 1 else None', "region"),
            groups(POLICY, "widest", "untouched"),
        ),
        Wrong(
            "what several inputs meet in is always float32",
            instead('"float32" if len(present) > 1 else None', '"float32"'),
            groups(POLICY, "widest", "untouched"),
        ),
        Wrong(
            "the widest format is at least that of the region, as in the promote list",
            instead("len(present) > 1", "len(present | {region}) > 1"),
            groups(POLICY, "widest"),
        ),
        Wrong(
            "float16 is wider than bfloat16, it has more digits",
            instead(
                'target = "float32" if len(present) > 1 else None',
                'target = next((d for d in ("float32", "float16", "bfloat16") if d in present), None)',
            ),
            groups(POLICY, "widest"),
        ),
        Wrong(
            "bfloat16 is wider than float16, it has more range",
            instead(
                'target = "float32" if len(present) > 1 else None',
                'target = next((d for d in ("float32", "bfloat16", "float16") if d in present), None)',
            ),
            groups(POLICY, "widest"),
        ),
        Wrong(
            "two halves meet in the half format of the region",
            instead(
                '"float32" if len(present) > 1 else None',
                '"float32" if "float32" in present else region if len(present) > 1 else None',
            ),
            groups(POLICY, "widest"),
        ),
        Wrong(
            "in a region every op runs in half",
            instead("    else:\n        target = None", "    else:\n        target = region"),
            groups(POLICY, "untouched"),
        ),
        Wrong(
            "an op on no list is computed in float32 to be safe",
            instead("    else:\n        target = None", '    else:\n        target = "float32"'),
            groups(POLICY, "untouched"),
        ),
        Wrong(
            "the float32 list holds outside of regions too",
            instead("if region is None:", "if region is None and op not in FLOAT32:"),
            groups(POLICY, "untouched"),
        ),
    ],
    CAST: [
        Wrong(
            "the gradient passes through in the format it came in",
            instead("lambda g: convert(g, x.dtype)", "lambda g: g"),
            groups(CAST, "gradient", "weight"),
        ),
        Wrong(
            "the gradient is rounded to the format of the result",
            instead("convert(g, x.dtype)", "convert(g, dtype)"),
            groups(CAST, "gradient", "weight"),
        ),
        Wrong(
            "gradients are always float32",
            instead("convert(g, x.dtype)", 'convert(g, "float32")'),
            groups(CAST, "gradient", "weight"),
        ),
        Wrong(
            "only the gradient of a leaf is converted",
            instead("convert(g, x.dtype)", "convert(g, x.dtype) if x.is_leaf else g"),
            groups(CAST, "gradient"),
        ),
        Wrong(
            "the copy is a weight of its own, not recorded as made from x",
            instead("[(x, lambda g: convert(g, x.dtype))]", "requires_grad=x.requires_grad"),
            groups(CAST, "gradient", "weight"),
        ),
        Wrong(
            "x itself is turned into the other format",
            """
def cast(x, dtype):
    if x.dtype != dtype:
        x.data = convert(x.data, dtype)
    return x
""",
            groups(CAST, "values", "gradient", "weight"),
        ),
        Wrong(
            "a Tensor that has the format already is copied all the same",
            instead("    if x.dtype == dtype:\n        return x\n", ""),
            groups(CAST, "values"),
        ),
        Wrong(
            "values that do not fit are clamped to the largest number",
            instead(
                "Tensor(convert(x.data, dtype)",
                'Tensor(convert(np.clip(convert(x.data, "float32"), -65504, 65504), dtype)',
            ),
            groups(CAST, "values"),
        ),
        Wrong(
            "infinities and NaNs are made harmless on the way",
            instead(
                "Tensor(convert(x.data, dtype)",
                'Tensor(convert(np.nan_to_num(convert(x.data, "float32")), dtype)',
            ),
            groups(CAST, "values"),
        ),
        Wrong(
            "everything is rounded to float16 first",
            instead("Tensor(convert(x.data, dtype)", 'Tensor(convert(convert(x.data, "float16"), dtype)'),
            groups(CAST, "values"),
        ),
        Wrong(
            "astype is enough, and the bits of bfloat16 are taken for numbers",
            """
def cast(x, dtype):
    if x.dtype == dtype:
        return x
    new = {name: d for d, name in FORMATS.items()}[dtype]
    return Tensor(x.data.astype(new), [(x, lambda g: g.astype(x.data.dtype))])
""",
            groups(CAST, "values", "gradient", "weight"),
        ),
        Wrong(
            "no gradient where the cast lost the value",
            """
def cast(x, dtype):
    if x.dtype == dtype:
        return x
    y = convert(x.data, dtype)
    kept = convert(convert(y, x.dtype), "float32") == convert(x.data, "float32")
    return Tensor(y, [(x, lambda g: convert(convert(g, "float32") * kept, x.dtype))])
""",
            groups(CAST, "gradient"),
        ),
        Wrong(
            "the slope of a cast is the ratio of result and input",
            """
def cast(x, dtype):
    if x.dtype == dtype:
        return x
    y = convert(x.data, dtype)
    slope = convert(y, "float32") / convert(x.data, "float32")
    return Tensor(y, [(x, lambda g: convert(convert(g, "float32") * slope, x.dtype))])
""",
            groups(CAST, "gradient", "weight"),
        ),
        Wrong(
            "the vjp writes the gradient into x besides returning it",
            """
def cast(x, dtype):
    if x.dtype == dtype:
        return x

    def vjp(g):
        x.grad = convert(g, x.dtype)
        return x.grad

    return Tensor(convert(x.data, dtype), [(x, vjp)])
""",
            groups(CAST, "gradient", "weight"),
        ),
    ],
    REGION: [
        Wrong(
            "leaving a region switches autocast off",
            instead(
                "state.enabled, state.dtype = self.outer.pop()",
                "state.enabled, state.dtype = False, self.outer.pop()[1]",
            ),
            groups(REGION, "nesting", "exception", "again"),
        ),
        Wrong(
            "the format is not brought back",
            instead("state.enabled, state.dtype = self.outer.pop()", "state.enabled = self.outer.pop()[0]"),
            groups(REGION, "nesting", "exception", "again"),
        ),
        Wrong(
            "after a region the format is float16",
            instead(
                "state.enabled, state.dtype = self.outer.pop()",
                'state.enabled, state.dtype = self.outer.pop()[0], "float16"',
            ),
            groups(REGION, "nesting", "exception", "again"),
        ),
        Wrong(
            "every region that ends empties the cache",
            instead("if state.depth == 0:\n            state.cache", "if True:\n            state.cache"),
            groups(REGION, "cache", "exception"),
        ),
        Wrong(
            "the cache is never emptied",
            instead("state.cache.clear()", "pass"),
            groups(REGION, "cache", "exception"),
        ),
        Wrong(
            "the cache is emptied when the next outermost region begins",
            changed(
                ("state.cache.clear()", "pass"),
                (
                    "        return self\n",
                    "        if state.depth == 1:\n            state.cache.clear()\n        return self\n",
                ),
            ),
            groups(REGION, "cache", "exception"),
        ),
        Wrong(
            "the cache is emptied on the way into a region that is disabled",
            instead(
                "        state.depth += 1\n",
                "        state.depth += 1\n        if not self.enabled:\n            state.cache.clear()\n",
            ),
            groups(REGION, "cache"),
        ),
        Wrong(
            "disabled regions are not counted",
            changed(
                ("state.depth += 1", "state.depth += self.enabled"),
                ("state.depth -= 1", "state.depth -= self.enabled"),
            ),
            groups(REGION, "cache", "again"),
        ),
        Wrong(
            "the state comes back only if there was no exception",
            instead(
                "        state.enabled, state.dtype = self.outer.pop()",
                "        if error_type is not None:\n            return False\n"
                "        state.enabled, state.dtype = self.outer.pop()",
            ),
            groups(REGION, "exception"),
        ),
        Wrong(
            "the cache survives an exception",
            instead("if state.depth == 0:", "if state.depth == 0 and error is None:"),
            groups(REGION, "exception"),
        ),
        Wrong(
            "the exception ends at the region",
            instead("return False", "return True"),
            groups(REGION, "exception"),
        ),
        Wrong(
            "a disabled region does not set the format",
            instead(
                "state.dtype = self.dtype or state.dtype",
                "state.dtype = self.enabled and self.dtype or state.dtype",
            ),
            groups(REGION, "nesting", "again"),
        ),
        Wrong(
            "a region that names no format means float16",
            instead("self.dtype or state.dtype", 'self.dtype or "float16"'),
            groups(REGION, "nesting", "again"),
        ),
        Wrong(
            "an enabled region inside a disabled one stays disabled",
            instead(
                "state.enabled = self.enabled",
                "state.enabled = self.enabled and (state.enabled or state.depth == 0)",
            ),
            groups(REGION, "nesting", "again"),
        ),
        Wrong(
            "what was outside is kept in one place of the object",
            changed(
                (
                    "self.outer.append((state.enabled, state.dtype))",
                    "self.outer = state.enabled, state.dtype",
                ),
                ("self.outer.pop()", "self.outer"),
            ),
            groups(REGION, "again"),
        ),
        Wrong(
            "what was outside is noted when the object is made",
            changed(
                ("        self.outer.append((state.enabled, state.dtype))\n", ""),
                ("self.outer = []", "self.outer = state.enabled, state.dtype"),
                ("self.outer.pop()", "self.outer"),
            ),
            groups(REGION, "again"),
        ),
        Wrong(
            "the format is looked up when the object is made",
            instead(
                "self.dtype, self.enabled = dtype, enabled",
                "self.dtype, self.enabled = dtype or state.dtype, enabled",
            ),
            groups(REGION, "again"),
        ),
    ],
    CACHE: [
        Wrong(
            "nothing is kept",
            instead("    if not keep:", "    if True:"),
            groups(CACHE, "once", "which", "format", "stale"),
        ),
        Wrong(
            "the cast is made first and looked up afterwards",
            instead(
                "    version, copy = state.cache.get",
                "    made = cast(x, dtype)\n    version, copy = state.cache.get",
            ),
            groups(CACHE, "once", "which", "format", "stale"),
        ),
        Wrong(
            "a copy is found by the weight alone, whatever its format",
            instead("key = (x, dtype)", "key = x"),
            groups(CACHE, "format"),
        ),
        Wrong(
            "one copy a weight, and the other format throws it out",
            changed(
                ("key = (x, dtype)", "key = x"),
                ("if version != x.version:", "if version != x.version or copy.dtype != dtype:"),
            ),
            groups(CACHE, "format"),
        ),
        Wrong(
            "a weight that was changed in place keeps its old copy",
            instead("if version != x.version:", "if version is None:"),
            groups(CACHE, "stale"),
        ),
        Wrong(
            "the id of a weight is the key, and nothing keeps the weight",
            instead("key = (x, dtype)", "key = (id(x), dtype)"),
            groups(CACHE, "stale"),
        ),
        Wrong(
            "the values are the key, so equal weights share a copy and one of them gets no gradient",
            instead("key = (x, dtype)", "key = (x.data.tobytes(), dtype)"),
            groups(CACHE, "once"),
        ),
        Wrong(
            "a stale copy is overwritten without a new cast",
            instead(
                "    if version != x.version:",
                "    if version is not None and version != x.version:\n"
                "        copy.data[...] = convert(x.data, dtype)\n"
                "        state.cache[key] = x.version, copy\n"
                "    elif version is None:",
            ),
            groups(CACHE, "stale"),
        ),
        Wrong(
            "one stale copy empties the whole cache",
            instead(
                "        copy = cast(x, dtype)\n",
                "        if version is not None:\n            state.cache.clear()\n        copy = cast(x, dtype)\n",
            ),
            groups(CACHE, "stale"),
        ),
        Wrong(
            "after a change in place the weight is cast each time",
            instead("state.cache[key] = x.version, copy", "state.cache.setdefault(key, (x.version, copy))"),
            groups(CACHE, "stale"),
        ),
        Wrong(
            "frozen weights are kept too",
            instead(" and x.requires_grad", ""),
            groups(CACHE, "which"),
        ),
        Wrong("activations are kept too", instead(" and x.is_leaf", ""), groups(CACHE, "which")),
        Wrong(
            "weights in half are kept too",
            instead(' and x.dtype == "float32"', ""),
            groups(CACHE, "which"),
        ),
        Wrong(
            "copies are kept outside of regions", instead("state.depth > 0 and ", ""), groups(CACHE, "which")
        ),
        Wrong(
            "copies are kept in the outermost region only",
            instead("keep = state.depth > 0", "keep = state.depth == 1"),
            groups(CACHE, "once"),
        ),
        Wrong(
            "a Tensor that has the format already is cast all the same",
            instead("    if x.dtype == dtype:\n        return x\n", ""),
            groups(CACHE, "which"),
        ),
    ],
}
