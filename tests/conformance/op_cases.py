"""One table of calls for every op: what dtype comes out (dtypes.json), and which values and gradients (values.npz).

A case is an op's name, a variant, the kinds and shapes of its floating inputs, and a call f(k, op, *inputs) that runs under
torch and under minamp. `k` makes what is not differentiated: k.ints([..]), k.bools([..]).

Inputs have 8 significant bits, so they are the same numbers in float16, bfloat16, float32 and float64: the float64 result is
the oracle of all four.
"""

import math
import zlib
from collections import namedtuple

import numpy as np

Case = namedtuple("Case", "op variant inputs call half check")
CASES = {}

# How far a half run may lie from the float64 result rounded to half, for outputs and for gradients: 0 or 1 units in the last
# place. LOOSE, for what is rounded more than once on its way (ops made of ops, gradients computed from a stored output that is
# rounded already, as PyTorch computes them too): 4 units in the last place of the largest value.
LOOSE = "loose"
EXACT, ULP, FROM_OUTPUT, MANY = (0, 0), (1, 1), (1, LOOSE), (LOOSE, LOOSE)


def add(ops, *inputs, variant="", half=ULP, check="values"):
    """Decorator: enter a call for each of the ops named. Inputs are like 'A2x3': a kind and a shape.

    check="dtypes": no values, for ops that are random or have no gradient.
    """

    def enter(call):
        for op in ops.split():
            key = f"{op} {variant}".strip()
            assert key not in CASES, key
            CASES[key] = Case(op, variant, inputs, call, half, check)
        return call

    return enter


def shape_of(text):
    return tuple(int(n) for n in text[1:].split("x") if n)


def bfloat16_grid(array):
    """float32 rounded to the nearest number with 8 significant bits, ties to even."""
    bits = np.asarray(array, np.float32).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def make(key, i, text):
    """Input i of a case, float64. A: distinct values in -2.1 .. 2.3, P: positive ones, U: between 0 and 1."""
    shape = shape_of(text)
    n = int(np.prod(shape, dtype=int))
    low, high = {"A": (-2.1, 2.3), "P": (0.25, 3.1), "U": (0.06, 0.93)}[text[0]]
    order = np.random.default_rng(zlib.crc32(f"{key} {i}".encode())).permutation(n)
    return bfloat16_grid(np.linspace(low, high, n)[order] if n > 1 else np.full(n, 0.7 * high)).reshape(shape)


# ---------------------------------------------------------------------------------------------------------------- elementwise


add("tanh sigmoid", "A2x3", half=FROM_OUTPUT)(lambda k, f, x: f(x))
add("exp expm1 erf gelu silu softplus logsigmoid elu leaky_relu square sin cos", "A2x3")(lambda k, f, x: f(x))
add("log log2 log10 log1p sqrt reciprocal", "P2x3")(lambda k, f, x: f(x))
add("rsqrt", "P2x3", half=FROM_OUTPUT)(lambda k, f, x: f(x))
add("neg abs relu clone", "A2x3", half=EXACT)(lambda k, f, x: f(x))
add(
    "sign zeros_like ones_like isfinite isnan isinf round floor ceil trunc logical_not",
    "A2x3",
    half=EXACT,
    check="dtypes",
)(lambda k, f, x: f(x))
add("tan sinh cosh atan", "A2x3")(lambda k, f, x: f(x))
add("asin acos", "U2x3")(lambda k, f, x: f(x))
add("erfinv", "U2x3", half=FROM_OUTPUT)(lambda k, f, x: f(x))
add("atan2", "A2x3", "A2x3")(lambda k, f, a, b: f(a, b))
add("relu6 hardtanh", "A2x3", half=EXACT)(lambda k, f, x: f(x))
add("hardswish mish selu", "A2x3")(lambda k, f, x: f(x))
# torch's float64 gradient is a float32 sixth
add("hardsigmoid", "A2x3", check="dtypes")(lambda k, f, x: f(x))
add("hardtanh", "A2x3", variant="bounds", half=EXACT)(lambda k, f, x: f(x, -0.5, 0.75))
add("glu", "A2x4")(lambda k, f, x: f(x))
add("glu", "A4x3", variant="dim")(lambda k, f, x: f(x, 0))
add("lerp", "A2x3", "A2x3")(lambda k, f, a, b: f(a, b, 0.3))
add("lerp", "A2x3", "A2x3", "U3", variant="tensor")(lambda k, f, a, b, w: f(a, b, w))
add("nan_to_num", "A2x3", half=EXACT)(lambda k, f, x: f(x))
add("gelu", "A2x3", variant="tanh")(lambda k, f, x: f(x, approximate="tanh"))
add("leaky_relu", "A2x3", variant="slope")(lambda k, f, x: f(x, 0.25))
add("elu", "A2x3", variant="alpha")(lambda k, f, x: f(x, 0.5))
add("softplus", "A2x3", variant="beta, threshold")(lambda k, f, x: f(x, 2.0, 1.0))
add("prelu", "A2x3x2", "P3", variant="channels")(lambda k, f, x, w: f(x, w))
add("prelu", "A4", "P1", variant="one slope")(lambda k, f, x, w: f(x, w))

add("add sub mul", "A2x3", "A2x3")(lambda k, f, a, b: f(a, b))
add("add sub mul", "A2x3", "A3", variant="broadcast")(lambda k, f, a, b: f(a, b))
add("add sub mul", "A2x1", "A", variant="0-dim")(lambda k, f, a, b: f(a, b))
add("add sub", "A2x3", "A2x3", variant="alpha")(lambda k, f, a, b: f(a, b, alpha=0.3))
add("add sub mul div", "A2x3", variant="number")(lambda k, f, a: f(a, 0.7))
add("div", "A2x3", "P2x3")(lambda k, f, a, b: f(a, b))
add("div", "A2x3", "P2x3", variant="floor", half=EXACT)(lambda k, f, a, b: f(a, b, rounding_mode="floor"))
add("div", "A2x3", "P2x3", variant="trunc", half=EXACT)(lambda k, f, a, b: f(a, b, rounding_mode="trunc"))
add("div", "A2x3", "P2x1", variant="broadcast")(lambda k, f, a, b: f(a, b))
add("remainder", "A2x3", "P2x3")(lambda k, f, a, b: f(a, b))
add("remainder", "A2x3", variant="number")(lambda k, f, a: a % 0.7)
add("floor_divide", "A2x3", "P2x3", check="dtypes")(lambda k, f, a, b: f(a.detach(), b.detach()))
add("maximum minimum", "A2x3", "A2x3", half=EXACT)(lambda k, f, a, b: f(a, b))
add("maximum minimum", "A4", variant="equal", half=EXACT)(lambda k, f, a: f(a, a.detach()))
add("eq ne lt le gt ge", "A2x3", "A2x3", check="dtypes")(lambda k, f, a, b: f(a, b))
add("where", "A2x3", "A2x3", half=EXACT)(lambda k, f, a, b: f(k.bools([[1, 0, 1], [0, 0, 1]]), a, b))
add("where", "A2x3", variant="number", half=EXACT)(lambda k, f, a: f(k.bools([1, 0, 1]), a, 0.5))
add("addcmul", "A2x3", "A2x3", "A3")(lambda k, f, a, b, c: f(a, b, c))
add("addcmul", "A2x3", "A2x3", "A3", variant="value")(lambda k, f, a, b, c: f(a, b, c, value=0.5))
add("addcdiv", "A2x3", "A2x3", "P3")(lambda k, f, a, b, c: f(a, b, c, value=0.5))
add("clamp", "A2x3", half=EXACT)(lambda k, f, x: f(x, -1.0, 0.5))
add("clamp", "A2x3", variant="min", half=EXACT)(lambda k, f, x: f(x, min=0.25))
add("clamp", "A2x3", "A3", "P3", variant="tensors", half=EXACT)(lambda k, f, x, a, b: f(x, a, b))
add("pow", "P2x3", variant="square")(lambda k, f, x: f(x, 2))
add("pow", "P2x3", variant="root")(lambda k, f, x: f(x, 0.5))
add("pow", "P2x3", variant="inverse")(lambda k, f, x: f(x, -1.5))
add("pow", "P2x3", variant="zero")(lambda k, f, x: f(x, 0))
add("pow", "P2x3", "A2x3", variant="tensors")(lambda k, f, a, b: f(a, b))
add("pow", "A2x3", variant="of a number")(lambda k, f, x: 2.0**x)
add("pow", "A2x3", variant="negative base")(lambda k, f, x: f(x, 3))
add("reciprocal", "P2x3", variant="2 / x")(lambda k, f, x: 2.0 / x)
add("to", "A2x3", half=EXACT)(lambda k, f, x: f(x, k.tn.float64))
add("to", "A2x3", variant="bfloat16", half=EXACT)(lambda k, f, x: f(x, k.tn.bfloat16))

# -------------------------------------------------------------------------------------------------------------------- products

add("matmul", "A3x4", "A4x2")(lambda k, f, a, b: f(a, b))
add("matmul", "A4", "A4x2", variant="vector, matrix")(lambda k, f, a, b: f(a, b))
add("matmul", "A3x4", "A4", variant="matrix, vector")(lambda k, f, a, b: f(a, b))
add("matmul", "A4", "A4", variant="vectors")(lambda k, f, a, b: f(a, b))
add("matmul", "A2x3x4", "A4x2", variant="batch, matrix")(lambda k, f, a, b: f(a, b))
add("matmul", "A2x1x2x3", "A3x3x2", variant="broadcast")(lambda k, f, a, b: f(a, b))
add("linear", "A3x4", "A2x4", "A2")(lambda k, f, x, w, b: f(x, w, b))
add("linear", "A2x3x4", "A2x4", variant="no bias")(lambda k, f, x, w: f(x, w))
add("linear", "A4", "A2x4", "A2", variant="vector")(lambda k, f, x, w, b: f(x, w, b))
add("mm", "A3x4", "A4x2")(lambda k, f, a, b: f(a, b))
add("bmm", "A2x3x4", "A2x4x2")(lambda k, f, a, b: f(a, b))
add("mv", "A3x4", "A4")(lambda k, f, a, b: f(a, b))
add("dot vdot", "A4", "A4")(lambda k, f, a, b: f(a, b))
add("addr", "A3x4", "A3", "A4")(lambda k, f, x, a, b: f(x, a, b, beta=0.5, alpha=1.5))
add("addbmm", "A3x2", "A2x3x4", "A2x4x2")(lambda k, f, x, a, b: f(x, a, b))
add("vecdot", "A2x3", "A2x3")(lambda k, f, a, b: f(a, b))
# U, not A: what the first product gives of the largest halves is no half
add("chain_matmul", "U2x4", "A4x3", "A3x2", half=MANY)(lambda k, f, a, b, c: f(a, b, c))
add("tensordot", "A2x3x2", "A3x2x2")(lambda k, f, a, b: f(a, b))
add("tensordot", "A2x3x2", "A2x2", variant="dims")(lambda k, f, a, b: f(a, b, dims=([0, 2], [1, 0])))
add("cross", "A2x3", "A2x3", half=MANY)(lambda k, f, a, b: f(a, b, dim=1))
add("bilinear", "A4x2", "A4x3", "A2x2x3", "A2", half=MANY)(lambda k, f, a, b, w, c: f(a, b, w, c))
add("matrix_norm", "A2x3x4", half=MANY)(lambda k, f, x: f(x))
add("matrix_norm", "A2x3x4", variant="1", half=MANY)(lambda k, f, x: f(x, 1))
add("outer", "A4", "A3")(lambda k, f, a, b: f(a, b))
add("addmm", "A3x2", "A3x4", "A4x2")(lambda k, f, a, b, c: f(a, b, c))
add("addmm", "A2", "A3x4", "A4x2", variant="alpha, beta")(
    lambda k, f, a, b, c: f(a, b, c, beta=0.5, alpha=2.0)
)
add("baddbmm", "A2x3x2", "A2x3x4", "A2x4x2")(lambda k, f, a, b, c: f(a, b, c))
add("addmv", "A3", "A3x4", "A4")(lambda k, f, a, b, c: f(a, b, c))
add("einsum", "A3x4", "A4x2", variant="ij,jk->ik")(lambda k, f, a, b: f("ij,jk->ik", a, b))
add("einsum", "A2x3x4", "A2x5x4", variant="bqd,bkd->bqk")(lambda k, f, a, b: f("bqd,bkd->bqk", a, b))
add("einsum", "A3x3", variant="ii->i", half=EXACT)(lambda k, f, a: f("ii->i", a))
add("einsum", "A3", "A4", variant="i,j->ij")(lambda k, f, a, b: f("i,j->ij", a, b))
SDPA = "scaled_dot_product_attention"
add(SDPA, "A2x3x4", "A2x5x4", "A2x5x2")(lambda k, f, q, key, v: f(q, key, v))
add(SDPA, "A1x3x4", "A1x3x4", "A1x3x4", variant="causal")(
    lambda k, f, q, key, v: f(q, key, v, is_causal=True)
)
add(SDPA, "A2x3x4", "A2x3x4", "A2x3x4", variant="bool mask")(
    lambda k, f, q, key, v: f(q, key, v, attn_mask=k.bools([[1, 0, 1], [1, 1, 0], [0, 1, 1]]))
)
add(SDPA, "A2x3x4", "A2x3x4", "A2x3x4", "A3x3", variant="float mask, scale")(
    lambda k, f, q, key, v, mask: f(q, key, v, attn_mask=mask, scale=0.3)
)

# ---------------------------------------------------------------------------------------------------------------- convolutions

add("conv2d", "A2x2x4x3", "A3x2x2x2", "A3")(lambda k, f, x, w, b: f(x, w, b))
add("conv2d", "A1x4x5x4", "A4x2x3x2", "A4", variant="stride, padding, groups")(
    lambda k, f, x, w, b: f(x, w, b, stride=(2, 1), padding=1, groups=2)
)
add("conv2d", "A1x2x5x5", "A2x2x2x2", variant="dilation")(lambda k, f, x, w: f(x, w, dilation=2))
add("conv2d", "A1x2x4x4", "A2x2x2x3", variant="same")(lambda k, f, x, w: f(x, w, padding="same"))
add("conv1d", "A2x2x6", "A3x2x3", "A3")(lambda k, f, x, w, b: f(x, w, b))
add("conv1d", "A1x2x6", "A2x2x2", "A2", variant="stride, padding")(
    lambda k, f, x, w, b: f(x, w, b, stride=2, padding=1)
)
add("conv_transpose2d", "A1x2x3x3", "A2x2x2x2", "A2")(lambda k, f, x, w, b: f(x, w, b))
add("conv_transpose2d", "A1x2x3x3", "A2x2x3x3", variant="stride, padding")(
    lambda k, f, x, w: f(x, w, None, stride=2, padding=1, output_padding=1)
)
add("conv3d", "A2x2x3x3x2", "A2x2x2x2x2", "A2")(lambda k, f, x, w, b: f(x, w, b))
add("conv3d", "A1x2x4x3x3", "A2x1x3x2x2", variant="stride, padding, dilation, groups")(
    lambda k, f, x, w: f(x, w, None, (2, 1, 2), (2, 1, 0), (2, 1, 1), 2)
)
add("conv_transpose1d", "A1x2x3", "A2x2x2", "A2")(lambda k, f, x, w, b: f(x, w, b))
add("conv_transpose1d", "A1x2x3", "A2x1x3", variant="stride, padding, groups")(
    lambda k, f, x, w: f(x, w, None, stride=2, padding=1, output_padding=1, groups=2)
)
add("max_pool2d", "A1x2x4x4", half=EXACT)(lambda k, f, x: f(x, 2))
add("max_pool2d", "A1x2x5x4", variant="stride, padding", half=EXACT)(
    lambda k, f, x: f(x, 3, stride=2, padding=1)
)
add("max_pool2d", "A1x2x5x5", variant="ceil", half=EXACT)(lambda k, f, x: f(x, 2, ceil_mode=True))
add("avg_pool2d", "A1x2x4x4")(lambda k, f, x: f(x, 2))
add("avg_pool2d", "A1x2x5x4", variant="padding")(
    lambda k, f, x: f(x, 3, stride=2, padding=1, count_include_pad=False)
)
add("adaptive_avg_pool2d", "A1x2x5x4")(lambda k, f, x: f(x, (2, 3)))
add("adaptive_max_pool2d", "A1x2x5x4")(lambda k, f, x: f(x, (2, 3)))
add("adaptive_avg_pool1d", "A2x2x5")(lambda k, f, x: f(x, 3))
add("max_pool1d", "A2x2x5", half=EXACT)(lambda k, f, x: f(x, 2))
add("max_pool1d", "A1x2x6", variant="stride, padding, dilation, ceil")(lambda k, f, x: f(x, 2, 1, 1, 2, True))
add("avg_pool1d", "A2x2x5")(lambda k, f, x: f(x, 2))
add("avg_pool1d", "A1x2x6", variant="padding, ceil")(lambda k, f, x: f(x, 3, 2, 1, True, False))

# ------------------------------------------------------------------------------------------------------------------ reductions

add("sum mean prod", "P3x4")(lambda k, f, x: f(x))
add("sum mean", "A3x4", variant="dim")(lambda k, f, x: f(x, dim=1))
add("sum mean", "A2x3x2", variant="dims, keepdim")(lambda k, f, x: f(x, dim=(0, 2), keepdim=True))
add("prod", "P3x4", variant="dim")(lambda k, f, x: f(x, dim=1))
add("cumsum cumprod", "P3x4")(lambda k, f, x: f(x, 1))
add("var std", "A3x4")(lambda k, f, x: f(x))
add("var std", "A3x4", variant="dim")(lambda k, f, x: f(x, dim=1, keepdim=True))
add("var std", "A3x4", variant="correction")(lambda k, f, x: f(x, dim=0, correction=0))
add("amax amin", "A3x4", half=EXACT)(lambda k, f, x: f(x))
add("amax amin", "A3x4", variant="dim", half=EXACT)(lambda k, f, x: f(x, dim=1, keepdim=True))
add("max min", "A3x4", half=EXACT)(lambda k, f, x: f(x))
add("max min", "A3x4", variant="dim", half=EXACT)(lambda k, f, x: f(x, 1)[0])
add("argmax argmin all any", "A3x4", check="dtypes")(lambda k, f, x: f(x))
add("argmax argmin all any", "A3x4", variant="dim", check="dtypes")(lambda k, f, x: f(x, dim=1))
add("logsumexp", "A3x4")(lambda k, f, x: f(x, 1))
add("norm", "A3x4")(lambda k, f, x: f(x))
add("norm", "A3x4", variant="p, dim")(lambda k, f, x: f(x, 1, 1))
add("vector_norm", "A3x4")(lambda k, f, x: f(x))
add("vector_norm", "A3x4", variant="ord, dim")(lambda k, f, x: f(x, 3, 1, True))
add("vector_norm", "A3x4", variant="inf")(lambda k, f, x: f(x, float("inf"), 0))
add("var_mean std_mean", "A3x4", variant="first")(lambda k, f, x: f(x, dim=1)[0])
add("var_mean std_mean", "A3x4", variant="second")(lambda k, f, x: f(x, dim=1)[1])
add("argsort", "A3x4", check="dtypes")(lambda k, f, x: f(x))
add("sort", "A3x4", half=EXACT)(lambda k, f, x: f(x, 1)[0])
add("median", "A3x4", half=EXACT)(lambda k, f, x: f(x))
add("median", "A3x5", variant="dim", half=EXACT)(lambda k, f, x: f(x, 1, keepdim=True)[0])
add("ravel", "A3x4", half=EXACT)(lambda k, f, x: f(x))
add("count_nonzero", "A3x4", check="dtypes")(lambda k, f, x: f(x.detach()))
add("isclose", "A3x4", "A3x4", check="dtypes")(lambda k, f, a, b: f(a.detach(), b.detach()))
add("movedim", "A2x3x4", half=EXACT)(lambda k, f, x: f(x, (0, 1), (1, 2)))
add("tile", "A2x3", half=ULP)(lambda k, f, x: f(x, (2, 1, 2)))
add("select", "A2x3x4", half=EXACT)(lambda k, f, x: f(x, 1, -1))
add("repeat_interleave", "A2x3", half=ULP)(lambda k, f, x: f(x, 2, 1))
add("narrow", "A3x4", half=EXACT)(lambda k, f, x: f(x, 1, -3, 2))
add("topk", "A3x4", half=EXACT)(lambda k, f, x: f(x, 2)[0])
add("cosine_similarity", "A3x4", "A3x4")(lambda k, f, a, b: f(a, b))

# --------------------------------------------------------------------------------------------------------------- normalisation

add("softmax log_softmax", "A3x4", half=FROM_OUTPUT)(lambda k, f, x: f(x, 1))
add("softmax log_softmax", "A3x4", variant="dim 0", half=FROM_OUTPUT)(lambda k, f, x: f(x, 0))
add("softmax log_softmax", "A3x4", variant="dtype", check="dtypes")(
    lambda k, f, x: f(x, 1, dtype=k.tn.float64)
)
add("layer_norm", "A3x4", "A4", "A4")(lambda k, f, x, w, b: f(x, (4,), w, b))
add("layer_norm", "A2x3x2", variant="two dims")(lambda k, f, x: f(x, (3, 2)))
add("rms_norm", "A3x4", "A4")(lambda k, f, x, w: f(x, (4,), w))
add("rms_norm", "A3x4", variant="eps")(lambda k, f, x: f(x, (4,), eps=0.01))
add("group_norm", "A2x4x3", "A4", "A4")(lambda k, f, x, w, b: f(x, 2, w, b))
add("batch_norm", "A3x2x2", "A2", "A2", variant="training")(
    lambda k, f, x, w, b: f(x, k.halves([0, 0], w), k.halves([2, 2], w), w, b, training=True)
)
add("batch_norm", "A3x2x2", "A2", "A2", variant="evaluation")(
    lambda k, f, x, w, b: f(x, k.halves([1, 2], w), k.halves([2, 3], w), w, b)
)
add("instance_norm", "A2x2x3", "A2", "A2")(
    lambda k, f, x, w, b: f(x, k.halves([0, 0], w), k.halves([2, 2], w), w, b)
)
add("instance_norm", "A2x2x3", "A2", "A2", variant="evaluation")(
    lambda k, f, x, w, b: f(x, k.halves([1, 2], w), k.halves([2, 3], w), w, b, False)
)
add("normalize", "A3x4")(lambda k, f, x: f(x, dim=1))

# ---------------------------------------------------------------------------------------------------------------------- losses

for reduction in ("mean", "sum", "none"):
    r = {"variant": "" if reduction == "mean" else reduction}
    add("mse_loss l1_loss smooth_l1_loss huber_loss", "A3x4", "A3x4", **r)(
        lambda k, f, x, t, r=reduction: f(x, t, reduction=r)
    )
    add("binary_cross_entropy", "U3x4", "U3x4", **r)(lambda k, f, x, t, r=reduction: f(x, t, reduction=r))
    add("binary_cross_entropy_with_logits", "A3x4", "U3x4", **r)(
        lambda k, f, x, t, r=reduction: f(x, t, reduction=r)
    )
    add("nll_loss", "A3x4", **r)(lambda k, f, x, r=reduction: f(x, k.ints([1, 3, 0]), reduction=r))
    add("cross_entropy", "A3x4", half=MANY, **r)(
        lambda k, f, x, r=reduction: f(x, k.ints([1, 3, 0]), reduction=r)
    )
    add("kl_div", "A3x4", "U3x4", variant=f"of logs {reduction}".replace("mean", "batchmean"))(
        lambda k, f, x, t, r=reduction.replace("mean", "batchmean"): f(x, t, reduction=r)
    )
    signs = [[1, -1, 1, -1], [-1, -1, 1, 1], [1, 1, -1, 0]]
    add("soft_margin_loss", "A3x4", half=MANY, **r)(
        lambda k, f, x, r=reduction, t=signs: f(x, k.ints(t), reduction=r)
    )
    add("hinge_embedding_loss", "A3x4", half=MANY, **r)(
        lambda k, f, x, r=reduction, t=signs: f(x, k.ints(t), reduction=r)
    )
    add("margin_ranking_loss", "A3x4", "A3x4", half=MANY, **r)(
        lambda k, f, a, b, r=reduction, t=signs: f(a, b, k.ints(t), 0.3, reduction=r)
    )
    add("cosine_embedding_loss", "A3x4", "A3x4", half=MANY, **r)(
        lambda k, f, a, b, r=reduction: f(a, b, k.ints([1, -1, 1]), reduction=r)
    )
    add("triplet_margin_loss triplet_margin_with_distance_loss", "A3x4", "A3x4", "A3x4", half=MANY, **r)(
        lambda k, f, a, p, n, r=reduction: f(a, p, n, margin=0.5, reduction=r)
    )
    add("multi_margin_loss", "A3x4", half=MANY, **r)(
        lambda k, f, x, r=reduction: f(x, k.ints([1, 3, 0]), reduction=r)
    )
    add("multilabel_margin_loss", "A3x4", half=MANY, **r)(
        lambda k, f, x, r=reduction: f(x, k.ints([[3, 0, -1, 1], [-1, 0, 1, 2], [2, 2, 1, -1]]), reduction=r)
    )
    add("poisson_nll_loss", "A3x4", "P3x4", half=MANY, **r)(
        lambda k, f, x, t, r=reduction: f(x, t, reduction=r)
    )
    add("gaussian_nll_loss", "A3x4", "A3x4", "P3x4", half=MANY, **r)(
        lambda k, f, x, t, v, r=reduction: f(x, t, v, reduction=r)
    )
add("kl_div", "A3x4", "A3x4", variant="log_target")(
    lambda k, f, x, t: f(x, t, reduction="batchmean", log_target=True)
)
add("smooth_l1_loss", "A3x4", "A3x4", variant="beta")(lambda k, f, x, t: f(x, t, beta=0.3))
add("huber_loss", "A3x4", "A3x4", variant="delta")(lambda k, f, x, t: f(x, t, delta=0.3))
add("binary_cross_entropy_with_logits", "A3x4", "U3x4", variant="weights")(
    lambda k, f, x, t: f(x, t, weight=k.halves([1, 2, 3, 1], x), pos_weight=k.halves([3, 1, 2, 4], x))
)
add("nll_loss", "A3x4", variant="weight, ignore_index")(
    lambda k, f, x: f(x, k.ints([1, 2, 0]), weight=k.halves([1, 2, 3, 1], x), ignore_index=2)
)
add("nll_loss", "A2x3x4", variant="positions")(lambda k, f, x: f(x, k.ints([[0, 1, 2, 0], [2, 2, 1, 0]])))
add("cross_entropy", "A3x4", variant="label_smoothing", half=MANY)(
    lambda k, f, x: f(x, k.ints([1, 3, 0]), label_smoothing=0.1)
)
add("cross_entropy", "A3x4", "U3x4", variant="probabilities", half=MANY)(lambda k, f, x, t: f(x, t))
add("cross_entropy", "A4x3", variant="weight, ignore_index, label_smoothing", half=MANY)(
    lambda k, f, x: f(
        x, k.ints([1, 2, 0, -1]), weight=k.halves([1, 3, 2], x), ignore_index=-1, label_smoothing=0.2
    )
)

add("cosine_embedding_loss", "A4", "A4", variant="vectors, margin", half=MANY)(
    lambda k, f, a, b: f(a, b, k.ints(-1), -0.9)
)
add("triplet_margin_loss", "A3x4", "A3x4", "A3x4", variant="p, swap", half=MANY)(
    lambda k, f, a, p, n: f(a, p, n, 2.0, 1, 1e-3, True)
)
add("multi_margin_loss", "A3x4", variant="p, margin, weight", half=MANY)(
    lambda k, f, x: f(x, k.ints([1, 3, 0]), 2, 0.5, k.halves([1, 2, 3, 4], x))
)
add("poisson_nll_loss", "P3x4", "P3x4", variant="full, of the mean", half=MANY)(
    lambda k, f, x, t: f(x, t, False, True)
)
add("gaussian_nll_loss", "A3x4", "A3x4", "P3", variant="full, of rows", half=MANY)(
    lambda k, f, x, t, v: f(x, t, v, True)
)
for p in (2.0, 1.0, math.inf, 3.0, 1.5):
    r = {"variant": "" if p == 2 else f"p {p}"}
    add("cdist", "A2x3x4", "A1x5x4", **r)(lambda k, f, a, b, p=p: f(a, b, p))
    add("pdist", "A4x3", half=MANY, **r)(lambda k, f, x, p=p: f(x, p))
    add("dist", "A3x4", "A4", half=MANY, **r)(lambda k, f, a, b, p=p: f(a, b, p))
    add("pairwise_distance", "A3x4", "A4", half=MANY, **r)(lambda k, f, a, b, p=p: f(a, b, p))
    add("renorm", "A3x4x2", **r)(lambda k, f, x, p=p: f(x, p, 1, 1.5))

# ---------------------------------------------------------------------------------------------------------------------- shapes

add("reshape view", "A2x3", half=EXACT)(lambda k, f, x: f(x, (3, 2)))
add("permute", "A2x3x2", half=EXACT)(lambda k, f, x: f(x, (2, 0, 1)))
add("transpose", "A2x3x2", half=EXACT)(lambda k, f, x: f(x, 0, 2))
add("expand", "A2x1", half=ULP)(lambda k, f, x: f(x, (2, 3)))
add("bitwise_and bitwise_or bitwise_xor", "A2x3", "A2x3", check="dtypes")(lambda k, f, a, b: f(a > 0, b > 0))
add("logical_and logical_or logical_xor", "A2x3", "P2x3", check="dtypes")(lambda k, f, a, b: f(a > 0, b))
add("bitwise_not", "A2x3", check="dtypes")(lambda k, f, x: f(x > 0))
add("repeat", "A2x3", half=EXACT)(lambda k, f, x: x.repeat(2, 1, 2))
add("flatten", "A2x3x2", half=EXACT)(lambda k, f, x: f(x, 1))
add("unflatten", "A2x6", half=EXACT)(lambda k, f, x: f(x, 1, (2, -1)))
add("pixel_shuffle", "A2x4x2x3", half=EXACT)(lambda k, f, x: f(x, 2))
add("pixel_unshuffle", "A2x1x4x2", half=EXACT)(lambda k, f, x: f(x, 2))
add("unfold", "A2x2x4x3")(lambda k, f, x: f(x, 2))
add("unfold", "A1x2x4x5", variant="dilation, padding, stride")(lambda k, f, x: f(x, (2, 3), 2, 1, (1, 2)))
add("fold", "A2x8x6")(lambda k, f, x: f(x, (4, 3), 2))
add("fold", "A1x6x9", variant="dilation, padding, stride")(
    lambda k, f, x: f(x, (4, 5), (2, 3), (1, 2), 1, (2, 1))
)
add("squeeze", "A2x1x3", half=EXACT)(lambda k, f, x: f(x, 1))
add("unsqueeze", "A2x3", half=EXACT)(lambda k, f, x: f(x, 1))
add("t", "A2x3", half=EXACT)(lambda k, f, x: f(x))
add("mT", "A2x3x2", half=EXACT)(lambda k, f, x: x.mT)
add("cat stack hstack vstack", "A2x3", "A2x3", half=EXACT)(lambda k, f, a, b: f([a, b]))
add("cat stack", "A2x3", "A2x3", variant="dim 1", half=EXACT)(lambda k, f, a, b: f([a, b], dim=1))
add("index", "A3x4", variant="int", half=EXACT)(lambda k, f, x: x[1])
add("index", "A3x4", variant="slices", half=EXACT)(lambda k, f, x: x[1:, ::2])
add("index", "A3x4", variant="repeated", half=ULP)(lambda k, f, x: x[k.ints([0, 2, 0])])
add("index", "A3x4", variant="pairs", half=EXACT)(lambda k, f, x: x[k.ints([0, 2]), k.ints([1, 3])])
add("index", "A3x4", variant="mask", half=EXACT)(lambda k, f, x: x[k.bools([1, 0, 1])])
add("index_select", "A3x4", half=ULP)(lambda k, f, x: f(x, 1, k.ints([3, 0, 3])))
add("index_put", "A4", "A2", half=EXACT)(lambda k, f, x, v: f(x, (k.ints([2, 0]),), v))
add("index_put", "A4", "A3", variant="accumulate")(
    lambda k, f, x, v: f(x, (k.ints([2, 0, 2]),), v, accumulate=True)
)
add("index_add", "A3x4", "A3x2")(lambda k, f, x, v: f(x, 1, k.ints([3, 3]), v))
add("index_add", "A3x4", "A3x2", variant="alpha")(lambda k, f, x, v: f(x, 1, k.ints([3, 3]), v, alpha=0.3))
add("nonzero", "A2x3", check="dtypes")(lambda k, f, x: f(x))
add("scatter", "A3x4", "A3x2", half=EXACT)(lambda k, f, x, v: f(x, 1, k.ints([[0, 1], [3, 1], [2, 0]]), v))
add("scatter_add", "A3x4", "A3x2")(lambda k, f, x, v: f(x, 1, k.ints([[0, 0], [3, 1], [2, 2]]), v))
add("masked_fill", "A3x3", half=EXACT)(lambda k, f, x: f(x, k.bools([[1, 0, 0], [0, 1, 0], [1, 1, 0]]), -2.5))
add("tril triu", "A3x4", half=EXACT)(lambda k, f, x: f(x, 1))
add("diag", "A3x4", half=EXACT)(lambda k, f, x: f(x, 1))
add("diag", "A3", variant="vector", half=EXACT)(lambda k, f, x: f(x))
add("flip", "A2x3x2", half=EXACT)(lambda k, f, x: f(x, (0, 2)))
add("roll", "A2x3x2", half=EXACT)(lambda k, f, x: f(x, (1, -2), (0, 1)))
add("split", "A3x4", half=EXACT)(lambda k, f, x: f(x, [1, 3], 1)[1])
add("chunk", "A3x4", half=EXACT)(lambda k, f, x: f(x, 3, 1)[1])
add("unbind", "A3x4", half=EXACT)(lambda k, f, x: f(x, 1)[2])
add("one_hot", "A3x4", check="dtypes")(lambda k, f, x: f(k.ints([1, 0, 2]), 3))
add("pad", "A2x3x4", half=EXACT)(lambda k, f, x: f(x, (1, 2, 0, 1), value=0.5))
add("pad", "A2x3x4", variant="reflect")(lambda k, f, x: f(x, (1, 2), mode="reflect"))
add("pad", "A2x3x4", variant="replicate twice")(lambda k, f, x: f(x, (1, 2, 2, 1), mode="replicate"))
add("pad", "A2x3x4", variant="replicate")(lambda k, f, x: f(x, (1, 2), mode="replicate"))
add("interpolate", "A1x2x3x2")(lambda k, f, x: f(x, scale_factor=2))
add("interpolate", "A1x2x3x4", variant="bilinear")(lambda k, f, x: f(x, size=(5, 2), mode="bilinear"))
add("interpolate", "A1x2x3x2", variant="bilinear, corners")(
    lambda k, f, x: f(x, size=(4, 5), mode="bilinear", align_corners=True)
)
add("interpolate", "A1x2x3", variant="of a line")(lambda k, f, x: f(x, scale_factor=1.7))
add("interpolate", "A1x2x3", variant="linear")(lambda k, f, x: f(x, size=5, mode="linear"))
add("interpolate", "A1x2x4", variant="linear, corners")(
    lambda k, f, x: f(x, scale_factor=(0.8,), mode="linear", align_corners=True)
)
add("interpolate", "A1x2x3x4", variant="bicubic")(lambda k, f, x: f(x, scale_factor=1.7, mode="bicubic"))
add("interpolate", "A1x2x3x2", variant="bicubic, corners")(
    lambda k, f, x: f(x, size=(4, 5), mode="bicubic", align_corners=True)
)
for modes in (("bilinear", "zeros"), ("bilinear", "border"), ("nearest", "zeros"), ("nearest", "border")):
    add("grid_sample", "A2x2x4x3", "A2x2x3x2", variant=", ".join(modes))(
        lambda k, f, x, g, modes=modes: f(x, g, *modes, align_corners=modes[1] == "zeros")
    )
add("grid_sampler", "A1x2x3x3", "A1x2x2x2")(lambda k, f, x, g: f(x, g, 0, 0, False))
add("affine_grid", "A2x2x3")(lambda k, f, x: f(x, (2, 1, 3, 4), align_corners=False))
add("affine_grid", "A2x2x3", variant="corners")(lambda k, f, x: f(x, (2, 1, 4, 3), align_corners=True))
add("gather", "A3x4", half=ULP)(lambda k, f, x: f(x, 1, k.ints([[0, 0], [3, 1], [2, 2]])))
add("embedding", "A4x3", half=ULP)(lambda k, f, w: f(k.ints([1, 3, 1]), w))
add("dropout1d dropout2d", "A2x3x4", check="dtypes")(lambda k, f, x: f(x, 0.5, True))
add("dropout", "A3x4", check="dtypes")(lambda k, f, x: f(x, 0.5, True))
add("dropout", "A3x4", variant="evaluation", half=EXACT)(lambda k, f, x: f(x, 0.5, False))

# ---------------------------------------------------------------------------------------------- what has no counterpart in torch

# Ops that only other ops and gradients call; what the ops above give goes through them. equal and allclose answer with a
# Python bool and have no dtype.
INTERNAL = (
    "index_grad index_clear gather_grad scatter_clear masked_scale constant_pad_nd recurrence sum_to widen to_device "
    "matmul_wide scaled scaled_matmul trunc_divide gated lstm_state lstm_output gru_state "
    "conv2d_input_grad conv2d_weight_grad max_pool2d_position max_pool2d_scatter max_pool2d_gather window_mean "
    "window_mean_grad upsample2d upsample2d_grad upsample_nearest1d upsample_nearest2d upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d equal allclose"
).split()
# The teaching material of ops/naive.py.
NAIVE = "naive_half_sum naive_half_softmax naive_half_cross_entropy naive_half_layer_norm".split()

DTYPES = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16 + float32": ("float16", "float32"),
    "float32 + float16": ("float32", "float16"),
}
REGIONS = (None, "float16", "bfloat16")


class Constants:
    """Makes what a call needs beside its floating inputs."""

    def __init__(self, tn):
        self.tn = tn

    def ints(self, data):
        return self.tn.tensor(data, dtype=self.tn.int64)

    def bools(self, data):
        return self.tn.tensor(np.array(data, bool).tolist())

    def halves(self, data, like):
        """Multiples of 1/2, in the dtype of `like`."""
        return self.tn.tensor([v / 2 for v in data]).to(like.dtype)


def dtype_combinations(case):
    """(label, dtypes of the inputs, region): mixed ones for ops with several inputs."""
    for label, (first, rest) in DTYPES.items():
        if first == rest or len(case.inputs) > 1:
            for region in REGIONS:
                dtypes = [first] + [rest] * (len(case.inputs) - 1)
                yield f"{label}, {region or 'outside'}", dtypes, region
