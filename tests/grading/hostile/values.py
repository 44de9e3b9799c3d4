"""Answers that return what is no plain data, or raise what is no plain exception."""

from grading import tiny
from grading.hostile.case import Case, body, returns, scale

VALUES = ["scale_values", "scale_shapes"]

CASES = [
    returns("x.tolist()", "type, dtype or shape|wrong", groups=VALUES),
    returns("(x * factor).astype(np.float64)", "dtype", groups=["scale_values"]),
    returns("None", "wrong|can't be compared", groups=VALUES),
    returns("'text'", "wrong|can't be compared", groups=VALUES),
    returns("x * np.float32(np.nan)", "wrong", groups=VALUES),
    returns("(v for v in x)", "returned a value of type generator; None, bool"),
    returns("scale", "returned a value of type function"),
    returns("{1, 2}", "returned a value of type set"),
    returns("b'bytes'", "returned a value of type bytes"),
    returns("1j", "returned a value of type complex"),
    returns("x.astype(object)", "returned an array of dtype object"),
    returns("x.astype(complex)", "returned an array of dtype complex128"),
    returns("x.astype(np.longdouble)", "returned an array of dtype"),
    returns("x.astype(str)", "returned an array of dtype <U"),
    returns("x.astype('>f4')", "returned an array of dtype >f4"),
    returns("np.zeros(3, [('a', 'f4')])", "returned an array of dtype"),
    returns("np.datetime64('2020-01-01')", "returned an array of dtype datetime64"),
    returns("np.ma.masked_array(x)", "returned a value of type MaskedArray"),
    returns("10**5000", "returned an integer of more than 64 bits"),
    returns("{1: x}", "returned a dict with keys that are no strings"),
    returns("[0] * 10**6", "returned more than 100000 values"),
    returns("'x' * 2**21", "at most 1048576 may cross outside arrays"),
    returns("np.zeros(2**25, np.float32)", "at most 256 of 64 MiB may cross"),
    returns("np.broadcast_to(np.float32(0), (2**40,))", "at most 256 of 64 MiB may cross"),
    returns("[np.zeros(1) for _ in range(300)]", "30. arrays of 0 MiB; at most 256"),
    returns("np.empty((0, 2**40), np.float32)", "cannot be read"),
    scale(
        "returns a list in itself",
        "def scale(x, factor):\n    y = []\n    y.append(y)\n    return y\n",
        "nested deeper than 16",
    ),
    scale(
        "returns what equals everything",
        """
        class Yes:
            __class__ = np.ndarray
            __eq__ = __lt__ = __gt__ = lambda self, other: True
            __array__ = lambda self, *a, **k: np.zeros(3)
            dtype, shape, ndim = np.dtype("f4"), (3,), 1
            view = lambda self, dtype: self
        def scale(x, factor):
            return Yes()
        """,
        "returned a value of type Yes",
    ),
    scale(
        "returns a NaN that equals everything",
        """
        class Nan(float):
            __eq__ = lambda self, other: True
        def scale(x, factor):
            return Nan("nan")
        """,
        "returned a value of type Nan",
    ),
    scale(
        "returns an array that equals everything",
        """
        class Yes(np.ndarray):
            __eq__ = lambda self, other: True
            __array_ufunc__ = __array_function__ = lambda self, *a, **k: True
        def scale(x, factor):
            return x.view(Yes)
        """,
        "returned a value of type Yes",
    ),
    scale(
        "lies about its class",
        """
        class Lie:
            __class__ = property(lambda self: np.float32)
        def scale(x, factor):
            return Lie()
        """,
        "returned an array of dtype object",
    ),
    scale(
        "returns a list that never ends",
        """
        class Endless(list):
            __iter__ = lambda self: iter(int, 1)
            __len__ = lambda self: 10**9
        def scale(x, factor):
            return Endless(x.tolist())
        """,
        "type, dtype or shape|wrong",
        groups=VALUES,
    ),
    scale("is no function", "scale = 3\n", "raised TypeError: 'int' object is not callable"),
    scale(
        "takes other arguments",
        "def scale(x):\n    return x\n",
        r"raised TypeError: scale\(\) takes 1 positional argument but 2",
    ),
    scale("defines nothing", "pass\n", "Your notebook defines no `scale`"),
    scale(
        "has not begun",
        "def scale(x, factor):\n    raise NotImplementedError()\n",
        "NotImplementedError .line 3 of your cell",
    ),
    scale(
        "does not parse",
        "def scale(x, factor)\n    return x\n",
        "SyntaxError: expected ':' .line 2 of your cell",
    ),
    scale(
        "holds lines for IPython",
        "%%time\n%matplotlib inline\n!pip list\n"
        + tiny.SCALE
        + "\n%timeit scale(1\nnp.exp?\n?np\nif 1:\n    %cd /\n",
    ),
    scale(
        "has a line for IPython and another that is wrong",
        "%matplotlib inline\n" + tiny.SCALE + "\nx = = 1  # is it?\n",
        "SyntaxError: invalid syntax .line 8 of your cell.; only the answer cells are run, by Python 3",
    ),
    scale(
        "needs another cell",
        "import numpy as np\n\ndef scale(x, factor):\n    return helper(x)\n",
        "NameError: name 'helper' is not defined .line 5 of your cell.; only the answer cells are run",
    ),
    scale("needs a package", "import matplotlib\n", "ModuleNotFoundError.*; only the answer cells are run"),
    scale("holds a NUL", tiny.SCALE + "\0", "null bytes"),
    scale("nests too deep", "x = " + "(" * 10**5 + ")" * 10**5 + tiny.SCALE, "Your cell `scale`"),
    scale("negates too often", "x = " + "-" * 10**5 + "1" + tiny.SCALE, "Your cell `scale`"),
    scale("stops at the end of its cell", tiny.SCALE + "print(undefined_name)\n"),
    body("prints 60 MB", "if x.ndim == 3:\n    for _ in range(60):\n        print('x' * 10**6)"),
    body("asks for input", "input('mark? ')", "raised EOFError"),
    body("raises a text", "raise 'text'", "raised TypeError: exceptions must derive"),
    body("raises a long text", "raise ValueError('x' * 10**8)", "raised ValueError: x{300} .line 3"),
    body(
        "raises control characters",
        r"raise ValueError('\x1b[2J\x07\u202e\ud800')",
        "raised ValueError: \ufffd.2J\ufffd\ufffd\ufffd .line",
    ),
    scale(
        "raises what cannot be shown",
        """
        class Bad(BaseException):
            def __str__(self):
                raise SystemExit
        def scale(x, factor):
            raise Bad
        """,
        "raised an exception that cannot be shown",
    ),
    scale(
        "raises a class without a name",
        """
        class Nameless(type):
            __name__ = property(lambda self: 1 / 0)
        class Bad(Exception, metaclass=Nameless):
            pass
        def scale(x, factor):
            raise Bad("x")
        """,
        "raised an exception that cannot be shown",
    ),
    body("recurses", "return scale(x, factor)", "raised RecursionError"),
    body("interrupts", "raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    Case(
        "its class is not there",
        {"counter": "class Count:\n    pass\n"},
        {"counter_resets": "^`counts` raised NameError: name 'Counter' is not defined"},
    ),
    Case(
        "its class does not parse",
        {"counter": "class Counter\n    pass\n"},
        {"counter_resets": "Your cell `counter` raised SyntaxError.*`counts` raised NameError"},
    ),
    Case(
        "its class raises",
        {"counter": "class Counter:\n    def __init__(self, limit):\n        limit / 0\n"},
        {"counter_resets": "`counts` raised ZeroDivisionError: division by zero .line 4 of your cell"},
    ),
    Case(
        "adds to copies",
        {
            "accumulate": "def accumulate(totals, terms, weight=1):\n    totals = [a + weight * b for a, b in zip(totals, terms)]"
        },
        {"accumulate_inplace": "the sums are wrong"},
    ),
]
