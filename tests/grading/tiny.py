"""Three small tasks, for tests of the grader: a pure function, one that works in place, a class behind a driver."""

from minamp.grade import assignment

SETUP = "import numpy as np\n\nrng = np.random.default_rng(0)\n"

SCALE = '''
def scale(x, factor):
    """x * factor as a new float32 array."""
    return (x * np.float32(factor)).astype(np.float32)
'''
SCALE_VALUES = """
x = np.array([1, 2, 3], np.float32)
assert np.array_equal(scale(x, 2.0), [2, 4, 6]), "scale([1, 2, 3], 2) is wrong"
for n in rng.integers(1, 50, 5):
    x = rng.standard_normal(n).astype(np.float32)
    expected = x * np.float32(3)
    y = scale(x, 3.0)
    assert type(y) is np.ndarray and y.dtype == np.float32 and y.shape == (n,), "type, dtype or shape is wrong"
    assert np.array_equal(y.view(np.uint32), expected.view(np.uint32)), "values are wrong"
"""
SCALE_KEPT = """
x = rng.standard_normal(7).astype(np.float32)
before = x.copy()
scale(x, 3.0)
assert np.array_equal(x.view(np.uint32), before.view(np.uint32)), "the input was changed"
"""
SCALE_SHAPES = """
for shape in [(0,), (3, 4), (2, 1, 5)]:
    x = rng.standard_normal(shape).astype(np.float32)
    expected = x * np.float32(0.5)
    y = scale(x, 0.5)
    assert type(y) is np.ndarray and y.shape == shape, "the shape is wrong"
    assert np.array_equal(y, expected), "values are wrong for other shapes"
"""

ACCUMULATE = '''
def accumulate(totals, terms, weight=1):
    """Add weight * terms[k] to the array totals[k], in place, for all k."""
    for total, term in zip(totals, terms):
        total += weight * term
'''
ACCUMULATE_INPLACE = """
totals = [rng.integers(0, 9, 4), rng.integers(0, 9, (2, 3))]
terms = tuple(rng.integers(0, 9, total.shape) for total in totals)
expected = [total + 2 * term for total, term in zip(totals, terms)]
assert accumulate(totals, terms, weight=2) is None, "it works in place and returns nothing"
assert all(np.array_equal(a, b) for a, b in zip(totals, expected)), "the sums are wrong"
"""

COUNTER = '''
class Counter:
    """Counts its calls, back to 0 after `limit` of them."""

    def __init__(self, limit):
        self.limit, self.calls = limit, 0

    def __call__(self):
        self.calls = (self.calls + 1) % self.limit
        return self.calls
'''
DRIVER = """
def counts(limit, steps):
    counter = Counter(limit)
    return [counter() for _ in range(steps)]
"""
COUNTER_RESETS = """
limit = int(rng.integers(2, 5))
assert counts(limit, 9) == [(k + 1) % limit for k in range(9)], "the counts are wrong"
"""

ANSWERS = {"scale": SCALE, "accumulate": ACCUMULATE, "counter": COUNTER}
POINTS = {"scale_values": 4, "scale_kept": 2, "scale_shapes": 1, "accumulate_inplace": 3, "counter_resets": 2}


def cell(name, source, solution=False, points=None, kind="code", tags=()):
    """A notebook's cell with nbgrader's metadata."""
    nbgrader = {
        "grade": points is not None,
        "grade_id": name,
        "locked": not solution,
        "schema_version": 3,
        "solution": solution,
        "task": False,
    }
    if points is not None:
        nbgrader["points"] = points
    data = {"cell_type": kind, "metadata": {"nbgrader": nbgrader, "tags": list(tags)}, "source": source}
    return data | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook(answers=ANSWERS, written="Because."):
    """The notebook with these answers: the instructor's by default, and a student's that gets every point."""
    cells = [
        cell("setup", SETUP),
        cell("scale", answers["scale"], solution=True),
        cell("scale_values", SCALE_VALUES, points=POINTS["scale_values"]),
        cell("scale_kept", SCALE_KEPT, points=POINTS["scale_kept"]),
        cell("scale_shapes", SCALE_SHAPES, points=POINTS["scale_shapes"]),
        cell("accumulate", answers["accumulate"], solution=True),
        cell("accumulate_inplace", ACCUMULATE_INPLACE, points=POINTS["accumulate_inplace"]),
        cell("counter", answers["counter"], solution=True),
        cell("driver", DRIVER, tags=["driver"]),
        cell("counter_resets", COUNTER_RESETS, points=POINTS["counter_resets"]),
        cell("why", written, solution=True, points=5, kind="markdown"),
    ]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


TINY = assignment.from_notebook("tiny", notebook())
