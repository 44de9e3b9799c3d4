"""Which op each operator and method of a Tensor is: `+` is OPS["add"], declared in minamp/ops/elementwise.py."""

import numpy as np

# PyTorch's second names: functions of minamp, and methods where the op is one
ALIASES = {
    "absolute": "abs",
    "negative": "neg",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "clip": "clamp",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "arctan2": "atan2",
    "concat": "cat",
    "concatenate": "cat",
}
OPS = {}  # every op, and every function made of ops, by its name; @op and @composite in minamp/op.py fill it


def _method(name):
    """The Tensor method that is the op `name`, declared with @op in minamp/ops/."""

    def method(self, *args, **kwargs):
        return OPS[name](self, *args, **kwargs)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"The op `{name}`, see minamp.{name}."
    return method


def _binary(name):
    """An operator's method: one argument, so half a call's overhead of _method's (0.2 us)."""

    def method(self, other):
        return OPS[name](self, other)

    return method


def _equality(name):
    """An operator's method that leaves None, strings and lists to Python, which compares identities: `x in (None, y)`."""

    def method(self, other):
        comparable = isinstance(other, (Methods, int, float, np.generic, np.ndarray))
        return OPS[name](self, other) if comparable else NotImplemented

    return method


def _reflected(name):
    def method(self, other):
        return OPS[name](other, self)

    return method


def _inplace(name):
    """x.op_(...): the op's result is written into x's memory. Never autocast, as in PyTorch."""

    def method(self, *args, **kwargs):
        self._write(OPS[name].plain(self, *args, **kwargs), name + "_")
        return self

    method.__name__ = method.__qualname__ = name + "_"
    method.__doc__ = (
        f"In-place `{name}`: writes into this tensor's memory, keeps its dtype, is never autocast."
    )
    return method


class Methods:
    """The part of a Tensor that is ops, one line each, by the file of minamp/ops/ in which they are declared."""

    __slots__ = ()

    # cast.py
    clone = _method("clone")
    # elementwise.py
    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("div"), lambda self, other: OPS["reciprocal"](self) * other
    __mod__, __rmod__ = _binary("remainder"), _reflected("remainder")
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _reflected("floor_divide")
    __neg__, __abs__, __pos__ = _method("neg"), _method("abs"), lambda self: self
    __iadd__ = add_ = _inplace("add")
    __isub__ = sub_ = _inplace("sub")
    __imul__ = mul_ = _inplace("mul")
    __itruediv__ = div_ = _inplace("div")
    __imod__ = remainder_ = _inplace("remainder")
    __ifloordiv__ = floor_divide_ = _inplace("floor_divide")
    remainder, floor_divide = _method("remainder"), _method("floor_divide")
    add, sub, mul, div, neg = (_method(n) for n in ("add", "sub", "mul", "div", "neg"))
    abs, sign, clamp, lerp, nan_to_num = (_method(n) for n in ("abs", "sign", "clamp", "lerp", "nan_to_num"))
    addcmul, addcdiv, maximum, minimum = (_method(n) for n in ("addcmul", "addcdiv", "maximum", "minimum"))
    round, floor, ceil, trunc = (_method(n) for n in ("round", "floor", "ceil", "trunc"))
    neg_, clamp_, addcmul_, addcdiv_ = (_inplace(n) for n in ("neg", "clamp", "addcmul", "addcdiv"))
    abs_, sign_, round_, lerp_ = (_inplace(n) for n in ("abs", "sign", "round", "lerp"))
    nan_to_num_ = _inplace("nan_to_num")
    floor_, ceil_, trunc_ = (_inplace(n) for n in ("floor", "ceil", "trunc"))
    # exponential.py
    __pow__, __rpow__ = _method("pow"), _reflected("pow")
    __ipow__ = pow_ = _inplace("pow")
    pow, square, sqrt, rsqrt, reciprocal = (
        _method(n) for n in ("pow", "square", "sqrt", "rsqrt", "reciprocal")
    )
    exp, expm1, log, log1p = (_method(n) for n in ("exp", "expm1", "log", "log1p"))
    log2, log10 = _method("log2"), _method("log10")
    exp_, sqrt_, square_, rsqrt_ = (_inplace(n) for n in ("exp", "sqrt", "square", "rsqrt"))
    reciprocal_, expm1_, log_, log1p_ = (_inplace(n) for n in ("reciprocal", "expm1", "log", "log1p"))
    log2_, log10_ = _inplace("log2"), _inplace("log10")
    # angles.py
    sin, cos, tan, sinh, cosh = (_method(n) for n in ("sin", "cos", "tan", "sinh", "cosh"))
    asin, acos, atan, atan2 = (_method(n) for n in ("asin", "acos", "atan", "atan2"))
    sin_, cos_, tan_, sinh_, cosh_ = (_inplace(n) for n in ("sin", "cos", "tan", "sinh", "cosh"))
    asin_, acos_, atan_, atan2_ = (_inplace(n) for n in ("asin", "acos", "atan", "atan2"))
    # compare.py
    __eq__, __ne__ = _equality("eq"), _equality("ne")
    __lt__, __le__, __gt__, __ge__ = _method("lt"), _method("le"), _method("gt"), _method("ge")
    __and__, __or__, __xor__ = _method("bitwise_and"), _method("bitwise_or"), _method("bitwise_xor")
    __rand__, __ror__ = _reflected("bitwise_and"), _reflected("bitwise_or")
    __rxor__ = _reflected("bitwise_xor")
    __iand__ = bitwise_and_ = _inplace("bitwise_and")
    __ior__ = bitwise_or_ = _inplace("bitwise_or")
    __ixor__ = bitwise_xor_ = _inplace("bitwise_xor")
    __invert__, bitwise_not_ = _method("bitwise_not"), _inplace("bitwise_not")
    bitwise_and, bitwise_or, bitwise_xor, bitwise_not = (
        _method(n) for n in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")
    )
    logical_and, logical_or, logical_xor, logical_not = (
        _method(n) for n in ("logical_and", "logical_or", "logical_xor", "logical_not")
    )
    logical_and_, logical_or_, logical_xor_, logical_not_ = (
        _inplace(n) for n in ("logical_and", "logical_or", "logical_xor", "logical_not")
    )
    eq, ne, lt, le, gt, ge = (_method(n) for n in ("eq", "ne", "lt", "le", "gt", "ge"))
    isfinite, isnan, isinf = (_method(n) for n in ("isfinite", "isnan", "isinf"))
    # activations.py
    tanh, sigmoid, relu, prelu = (_method(n) for n in ("tanh", "sigmoid", "relu", "prelu"))
    erf, erfinv = _method("erf"), _method("erfinv")
    tanh_, sigmoid_, relu_ = (_inplace(n) for n in ("tanh", "sigmoid", "relu"))
    erf_, erfinv_ = _inplace("erf"), _inplace("erfinv")
    # matmul.py
    __matmul__, __rmatmul__ = _method("matmul"), _reflected("matmul")
    matmul = _method("matmul")
    # products.py
    mm, bmm, mv = (_method(n) for n in ("mm", "bmm", "mv"))
    dot, vdot, outer = (_method(n) for n in ("dot", "vdot", "outer"))
    addmm, baddbmm, addmv = (_method(n) for n in ("addmm", "baddbmm", "addmv"))
    addmm_, baddbmm_, addmv_ = (_inplace(n) for n in ("addmm", "baddbmm", "addmv"))
    # contractions.py
    addr, addbmm, cross = (_method(n) for n in ("addr", "addbmm", "cross"))
    # reduce.py
    sum, mean, var, max, min, argmax = (_method(n) for n in ("sum", "mean", "var", "max", "min", "argmax"))
    amax, amin, argmin, all, any = (_method(n) for n in ("amax", "amin", "argmin", "all", "any"))
    equal, allclose, isclose, count_nonzero = (
        _method(n) for n in ("equal", "allclose", "isclose", "count_nonzero")
    )
    # indexing.py
    index_put, index_select, masked_fill = (_method(n) for n in ("index_put", "index_select", "masked_fill"))
    index_put_, masked_fill_ = _inplace("index_put"), _inplace("masked_fill")
    index_add, nonzero = _method("index_add"), _method("nonzero")
    index_add_ = _inplace("index_add")
    # scatter.py
    gather, scatter, scatter_add = (_method(n) for n in ("gather", "scatter", "scatter_add"))
    scatter_, scatter_add_ = _inplace("scatter"), _inplace("scatter_add")
    # arrange.py
    topk, sort, argsort, median, narrow = (
        _method(n) for n in ("topk", "sort", "argsort", "median", "narrow")
    )
    select, repeat_interleave = _method("select"), _method("repeat_interleave")
    tril, triu, diag = (_method(n) for n in ("tril", "triu", "diag"))
    flip, roll = _method("flip"), _method("roll")
    tril_, triu_ = _inplace("tril"), _inplace("triu")
    split, chunk, unbind = (_method(n) for n in ("split", "chunk", "unbind"))
    # scan.py
    cumsum, cumprod, prod = (_method(n) for n in ("cumsum", "cumprod", "prod"))
    cumsum_, cumprod_ = _inplace("cumsum"), _inplace("cumprod")
    # norm.py
    norm, renorm, logsumexp, std = (_method(n) for n in ("norm", "renorm", "logsumexp", "std"))
    renorm_ = _inplace("renorm")
    # distance.py
    dist = _method("dist")
    # normalize.py
    softmax, log_softmax = _method("softmax"), _method("log_softmax")
    # shape.py
    reshape, transpose, permute, flatten = (
        _method(n) for n in ("reshape", "transpose", "permute", "flatten")
    )
    view, expand, squeeze, unsqueeze, t = (
        _method(n) for n in ("view", "expand", "squeeze", "unsqueeze", "t")
    )
    repeat, unflatten = _method("repeat"), _method("unflatten")
    ravel, movedim, tile = (_method(n) for n in ("ravel", "movedim", "tile"))


for _alias, _name in ALIASES.items():
    for _end in ("", "_"):
        if hasattr(Methods, _name + _end):
            setattr(Methods, _alias + _end, getattr(Methods, _name + _end))
