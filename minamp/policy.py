"""What autocast does with the arguments of an op: PyTorch's seven policies, under PyTorch's names.

A policy is a function (op, arguments, attributes, the region's dtype) -> arguments. Only floating tensors other than float64
are ever cast. Which op has which policy stands in the op's own declaration.
"""

import numpy as np

from minamp.autocast import cast
from minamp.formats import bfloat16, float16, float32
from minamp.tensor import Tensor


def _eligible(a):
    return isinstance(a, Tensor) and a.dtype in (float32, float16, bfloat16)


def _cast_all(args, dtype):
    return [cast(a, dtype) if _eligible(a) else a for a in args]


def _lower_precision_fp(op, args, attrs, dtype):
    return _cast_all(args, dtype)


def _fp32(op, args, attrs, dtype):
    return _cast_all(args, float32)


def _fp32_set_opt_dtype(op, args, attrs, dtype):
    if attrs.get("dtype") is None and _eligible(args[0]):
        attrs["dtype"] = float32
    return args


def _promote(op, args, attrs, dtype):
    # PyTorch's rule reads from left to right: once a float32 has been seen, any half goes with it.
    widest = np.dtype(dtype)
    for a in args:
        if _eligible(a) and a.dtype != widest and widest != float32:
            if a.dtype != float32:
                raise RuntimeError(
                    f"{op.name}: {a.dtype} in a {dtype} autocast region can't be promoted: cast it with .to({dtype}) or .float()"
                )
            widest = a.dtype
    return _cast_all(args, widest)


def _banned(op, args, attrs, dtype):
    raise RuntimeError(op.banned_text)


LOWER_PRECISION, FP32, FP32_SET_OPT_DTYPE, FP32_APPEND_DTYPE, PROMOTE, BANNED, NOT_LISTED = (
    "lower_precision_fp",
    "fp32",
    "fp32_set_opt_dtype",
    "fp32_append_dtype",
    "promote",
    "banned",
    "not listed",
)
POLICIES = {
    LOWER_PRECISION: _lower_precision_fp,
    FP32: _fp32,
    FP32_SET_OPT_DTYPE: _fp32_set_opt_dtype,
    FP32_APPEND_DTYPE: _fp32_set_opt_dtype,
    PROMOTE: _promote,
    BANNED: _banned,
    NOT_LISTED: None,
}
