"""One loop over the registry: every op's policy is PyTorch's, and what autocast does to every op that takes floats."""

import re
import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest

import minamp
from minamp import bfloat16, float16, float32, float64, tensor
from minamp.methods import OPS
from minamp.op import (
    BANNED,
    FP32,
    FP32_APPEND_DTYPE,
    FP32_SET_OPT_DTYPE,
    LOWER_PRECISION,
    NOT_LISTED,
    POLICIES,
    PROMOTE,
    Op,
)
from minamp.tensor import Tensor

# The CUDA lists of PyTorch, as far as minamp has the ops. Everything that is not here must be NOT_LISTED.
LISTED = {
    LOWER_PRECISION: "matmul mm bmm mv addmm baddbmm addmv addr addbmm vecdot chain_matmul einsum linear "
    "scaled_dot_product_attention conv1d conv2d conv3d conv_transpose1d conv_transpose2d prelu",
    FP32: "exp log log2 log10 log1p expm1 pow square reciprocal rsqrt tan asin acos sinh cosh erfinv "
    "softplus layer_norm rms_norm group_norm nll_loss kl_div "
    "l1_loss smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits logsumexp "
    "cosine_similarity upsample_nearest1d upsample_nearest2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
    "poisson_nll_loss cosine_embedding_loss hinge_embedding_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss dist cdist pdist renorm",
    FP32_SET_OPT_DTYPE: "softmax log_softmax sum cumsum cumprod prod vector_norm",
    FP32_APPEND_DTYPE: "norm",
    PROMOTE: "dot vdot addcmul addcdiv index_put scatter_add atan2 tensordot cross bilinear grid_sampler",
    BANNED: "binary_cross_entropy",
}
EXPECTED = {name: policy for policy, names in LISTED.items() for name in names.split()}

DATA = np.linspace(0.25, 0.875, 24).reshape(2, 3, 4)  # positive, below 1, exact enough in every format
IDS = Tensor(np.array([1, 2]))
IMAGE = (1, 2, 4, 3)
SAME, BOOL, INT = "the dtype of the input", np.dtype(bool), np.dtype(np.int64)


WIDENED = "float32 that holds float16 values"


def x(dtype, *shape):
    data = np.resize(DATA, shape or (2, 3))
    if dtype == WIDENED:
        return x(float16, *shape).float()
    return Tensor(minamp.formats.cast(data, dtype))


def stats(n):
    return tensor(np.zeros(n, np.float32)), tensor(np.ones(n, np.float32))


def each(names, function):
    return {name: (lambda d, f=OPS[name]: function(f, d)) for name in names.split()}


# name -> a call whose float tensors all have dtype d
EXAMPLES = {
    **each(
        "clone neg square abs sign zeros_like ones_like exp log log1p reciprocal sqrt tanh sigmoid relu erf "
        "gelu silu leaky_relu elu logsigmoid softplus expm1 log2 log10 rsqrt sin cos tan asin acos atan sinh cosh erfinv "
        "relu6 hardtanh hardsigmoid hardswish mish selu nan_to_num matrix_norm "
        "isfinite isnan isinf logical_not round floor ceil trunc sum mean var amax amin argmax argmin all any max min "
        "naive_half_sum naive_half_softmax naive_half_layer_norm t mT squeeze flatten dropout",
        lambda f, d: f(x(d)),
    ),
    **each(
        "add sub mul div remainder floor_divide trunc_divide relu_grad maximum minimum eq ne lt le gt ge pow atan2 gated "
        "logical_and logical_or logical_xor",
        lambda f, d: f(x(d), x(d)),
    ),
    **each("mse_loss l1_loss smooth_l1_loss huber_loss kl_div", lambda f, d: f(x(d), x(d))),
    **each("binary_cross_entropy binary_cross_entropy_with_logits", lambda f, d: f(x(d), x(d), x(d))),
    **each("nll_loss cross_entropy", lambda f, d: f(x(d), IDS, x(d, 3))),
    **each("poisson_nll_loss soft_margin_loss hinge_embedding_loss", lambda f, d: f(x(d), x(d))),
    **each("margin_ranking_loss gaussian_nll_loss", lambda f, d: f(x(d), x(d), x(d))),
    **each(
        "triplet_margin_loss triplet_margin_with_distance_loss", lambda f, d: f(x(d), x(d, 1, 3), x(d, 2, 1))
    ),
    **each("cosine_embedding_loss", lambda f, d: f(x(d), x(d), IDS)),
    **each("multi_margin_loss", lambda f, d: f(x(d), IDS, 2, weight=x(d, 3))),
    **each("multilabel_margin_loss", lambda f, d: f(x(d), Tensor(np.array([[1, -1, 0], [0, 2, -1]])))),
    **each("dist pairwise_distance", lambda f, d: f(x(d), x(d, 1, 3))),
    **each("cdist", lambda f, d: f(x(d), x(d, 4, 3))),
    **each("pdist", lambda f, d: f(x(d))),
    **each("renorm", lambda f, d: f(x(d), 2, 0, 0.5)),
    **each("naive_half_cross_entropy", lambda f, d: f(x(d), IDS)),
    **each("bitwise_and bitwise_or bitwise_xor", lambda f, d: f(x(d) > 0, x(d) > 1)),
    **each("bitwise_not", lambda f, d: f(x(d) > 0)),
    **each("repeat", lambda f, d: f(x(d), 2, 2)),
    **each("softmax log_softmax unsqueeze", lambda f, d: f(x(d), 1)),
    **each("layer_norm", lambda f, d: f(x(d), 3, x(d, 3), x(d, 3))),
    **each("rms_norm", lambda f, d: f(x(d), 3, x(d, 3))),
    **each("group_norm", lambda f, d: f(x(d, 2, 4), 2, x(d, 4), x(d, 4))),
    **each("instance_norm", lambda f, d: f(x(d, 2, 3, 4), *stats(3), *stats(3))),
    **each("batch_norm", lambda f, d: f(x(d), *stats(3), *stats(3), True)),
    **each("mm", lambda f, d: f(x(d), x(d, 3, 2))),
    **each("bmm", lambda f, d: f(x(d, 2, 2, 3), x(d, 2, 3, 2))),
    **each("scaled", lambda f, d: f(x(d), 0.3)),
    **each("matmul_wide", lambda f, d: f(x(d), x(d, 3, 2))),
    **each("scaled_matmul", lambda f, d: f(x(d), x(d, 3, 2), 0.3)),
    **each("mv", lambda f, d: f(x(d), x(d, 3))),
    **each("dot vdot outer", lambda f, d: f(x(d, 3), x(d, 3))),
    **each("addmm", lambda f, d: f(x(d, 2), x(d), x(d, 3, 2))),
    **each("baddbmm", lambda f, d: f(x(d, 2), x(d, 2, 2, 3), x(d, 2, 3, 2))),
    **each("addmv", lambda f, d: f(x(d, 2), x(d), x(d, 3))),
    **each("addr", lambda f, d: f(x(d), x(d, 2), x(d, 3))),
    **each("addbmm", lambda f, d: f(x(d, 2, 2), x(d, 2, 2, 3), x(d, 2, 3, 2))),
    **each("vecdot", lambda f, d: f(x(d), x(d))),
    **each("chain_matmul", lambda f, d: f(x(d), x(d, 3, 4), x(d, 4, 2))),
    **each("tensordot", lambda f, d: f(x(d), x(d, 3, 2), 1)),
    **each("cross", lambda f, d: f(x(d), x(d))),
    **each("bilinear", lambda f, d: f(x(d), x(d, 2, 4), x(d, 5, 3, 4), x(d, 5))),
    **each("lerp", lambda f, d: f(x(d), x(d), x(d))),
    **each("lstm_state lstm_output", lambda f, d: f(x(d, 2, 8), x(d, 2, 2))),
    **each("gru_state", lambda f, d: f(x(d, 2, 6), x(d, 2, 6), x(d, 2, 2))),
    **each("glu", lambda f, d: f(x(d, 2, 4))),
    **each("einsum", lambda f, d: f("ij,jk", x(d), x(d, 3, 2))),
    **each("scaled_dot_product_attention", lambda f, d: f(x(d), x(d, 4, 3), x(d, 4, 2), x(d, 2, 4))),
    **each("addcmul addcdiv", lambda f, d: f(x(d), x(d), x(d))),
    **each("prelu", lambda f, d: f(x(d), x(d, 3))),
    **each("clamp", lambda f, d: f(x(d), 0.3, 0.6)),
    **each("matmul", lambda f, d: f(x(d), x(d, 3, 2))),
    **each("linear", lambda f, d: f(x(d), x(d, 4, 3), x(d, 4))),
    **each("to", lambda f, d: f(x(d), float64)),
    **each("to_device", lambda f, d: f(x(d), "cpu")),
    **each("where", lambda f, d: f(x(d) > 0.5, x(d), x(d))),
    **each("reshape view", lambda f, d: f(x(d), 3, 2)),
    **each("permute transpose", lambda f, d: f(x(d), 1, 0)),
    **each("expand", lambda f, d: f(x(d), 4, 2, 3)),
    **each("sum_to", lambda f, d: f(x(d), (3,))),
    **each("cat stack hstack vstack", lambda f, d: f([x(d), x(d)])),
    **each("index", lambda f, d: f(x(d), 0)),
    **each("index_grad", lambda f, d: f(x(d), 0, (2, 2, 3))),
    **each("gather", lambda f, d: f(x(d), 1, Tensor(np.zeros((2, 1), int)))),
    **each("gather_grad", lambda f, d: f(x(d), 1, np.zeros((2, 3), int), (2, 4))),
    **each("index_put", lambda f, d: f(x(d), (Tensor(np.array([1, 0])),), x(d, 3))),
    **each("index_add", lambda f, d: f(x(d), 1, IDS, x(d, 2, 2))),
    **each("index_clear", lambda f, d: f(x(d), 0)),
    **each("index_select", lambda f, d: f(x(d), 1, IDS)),
    **each("scatter scatter_add", lambda f, d: f(x(d), 1, Tensor(np.zeros((2, 1), int)), x(d))),
    **each("scatter_clear", lambda f, d: f(x(d), 1, np.zeros((2, 1), int))),
    **each("masked_fill", lambda f, d: f(x(d), x(d) > 0.5, 2.0)),
    **each("embedding", lambda f, d: f(IDS, x(d, 3, 2))),
    **each("one_hot", lambda f, d: f(IDS)),
    **each("argsort tril triu diag nonzero", lambda f, d: f(x(d))),
    **each("sort", lambda f, d: f(x(d)).values),
    **each("median ravel count_nonzero", lambda f, d: f(x(d))),
    **each("isclose", lambda f, d: f(x(d), x(d))),
    **each("movedim select", lambda f, d: f(x(d), 0, 1)),
    **each("tile repeat_interleave", lambda f, d: f(x(d), 2)),
    **each("narrow", lambda f, d: f(x(d), 1, 0, 2)),
    **each("topk", lambda f, d: f(x(d), 2).values),
    **each("pad constant_pad_nd", lambda f, d: f(x(d), (1, 1))),
    **each("flip roll cumsum cumprod", lambda f, d: f(x(d), 1)),
    **each("split chunk", lambda f, d: f(x(d), 2)[0]),
    **each("unbind", lambda f, d: f(x(d))[0]),
    **each("recurrence", lambda f, d: f(x(d), x(d), 1)),
    **each("prod norm vector_norm normalize std", lambda f, d: f(x(d))),
    **each("cosine_similarity", lambda f, d: f(x(d), x(d))),
    **each("logsumexp", lambda f, d: f(x(d), 1)),
    **each("var_mean std_mean", lambda f, d: f(x(d))[0]),
    **each("interpolate upsample_nearest2d", lambda f, d: f(x(d, *IMAGE), (3, 5))),
    **each("upsample_bilinear2d upsample_bicubic2d", lambda f, d: f(x(d, *IMAGE), (3, 5), False)),
    **each("upsample_nearest1d", lambda f, d: f(x(d, 1, 2, 4), (3,))),
    **each("upsample_linear1d", lambda f, d: f(x(d, 1, 2, 4), (3,), True)),
    **each("grid_sample", lambda f, d: f(x(d, *IMAGE), x(d, 1, 2, 3, 2), align_corners=False)),
    **each("grid_sampler", lambda f, d: f(x(d, *IMAGE), x(d, 1, 2, 3, 2), 1, 1, True)),
    **each("affine_grid", lambda f, d: f(x(d, 2, 2, 3), (2, 1, 3, 4), False)),
    **each("dropout1d", lambda f, d: f(x(d))),
    **each("dropout2d pixel_unshuffle", lambda f, d: f(x(d, 1, 2, 4, 6), 1)),
    **each("pixel_shuffle", lambda f, d: f(x(d, 1, 4, 2, 3), 2)),
    **each("unflatten", lambda f, d: f(x(d), 1, (3, 1))),
    **each("unfold", lambda f, d: f(x(d, *IMAGE), 2)),
    **each("fold", lambda f, d: f(x(d, 1, 8, 6), (4, 3), 2)),
    **each("masked_scale", lambda f, d: f(x(d), x(d) > 0.5, 2.0)),
    **each("conv2d", lambda f, d: f(x(d, *IMAGE), x(d, 3, 2, 2, 2), x(d, 3))),
    **each("conv1d", lambda f, d: f(x(d, 1, 2, 5), x(d, 3, 2, 2), x(d, 3))),
    **each("conv3d", lambda f, d: f(x(d, 1, 2, 3, 4, 3), x(d, 3, 2, 2, 2, 2), x(d, 3))),
    **each("conv_transpose1d", lambda f, d: f(x(d, 1, 2, 5), x(d, 2, 3, 2), x(d, 3))),
    **each("conv_transpose2d", lambda f, d: f(x(d, *IMAGE), x(d, 2, 3, 2, 2), x(d, 3))),
    **each("max_pool1d avg_pool1d adaptive_avg_pool1d", lambda f, d: f(x(d, 1, 2, 5), 2)),
    **each("max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d", lambda f, d: f(x(d, *IMAGE), 2)),
}
# Ops that only gradients call, with attributes of their own; they are never autocast (checked below) and tested with the ops
# they belong to.
INTERNAL = {
    *(
        "conv2d_input_grad",
        "conv2d_weight_grad",
        "max_pool2d_position",
        "max_pool2d_scatter",
        "max_pool2d_gather",
    ),
    *("window_mean", "window_mean_grad", "upsample2d", "upsample2d_grad"),
}
RESULT = (
    {"to": float64}
    | {
        n: BOOL
        for n in "isclose isfinite isnan isinf bitwise_and bitwise_or bitwise_xor bitwise_not eq ne lt le gt ge all any "
        "logical_and logical_or logical_xor logical_not".split()
    }
    | {n: INT for n in ("argmax", "argmin", "argsort", "nonzero", "one_hot", "count_nonzero")}
)
COMPOSITE = dict.fromkeys(
    "cross_entropy normalize interpolate gaussian_nll_loss pairwise_distance triplet_margin_with_distance_loss".split(),
    FP32,
) | {"matrix_norm": FP32_SET_OPT_DTYPE, "grid_sample": PROMOTE}


@pytest.mark.parametrize("name", OPS)
def test_the_policy_is_the_listed_one(name):
    op = OPS[name]
    assert op.policy in POLICIES and op.policy == EXPECTED.get(name, NOT_LISTED)
    if isinstance(op, Op):
        assert (op.banned_text is not None) == (op.policy == BANNED) and op.__doc__


def test_every_op_that_takes_floats_has_an_example():
    # those two answer with a Python bool
    assert set(OPS) - set(EXAMPLES) - INTERNAL - {"equal", "allclose"} == set()
    assert set(EXAMPLES) | INTERNAL <= set(OPS)


@pytest.mark.parametrize("name", sorted(INTERNAL))
def test_internal_ops_are_not_listed(name):
    assert OPS[name].policy == NOT_LISTED


def policy_of(name):
    return EXPECTED.get(name, COMPOSITE.get(name, NOT_LISTED))


def expected_dtype(name, given, region):
    if name in RESULT:
        return RESULT[name]
    policy = policy_of(name)
    if region is None or policy in (NOT_LISTED, PROMOTE) or given == float64:
        return given
    return region if policy == LOWER_PRECISION else float32


@pytest.mark.parametrize("region", [None, float16, bfloat16], ids=str)
@pytest.mark.parametrize("given", [float32, float16, bfloat16, float64], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_result_dtypes(name, given, region):
    with minamp.autocast(dtype=region, enabled=region is not None), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # kl_div's about 'mean'
        if name == "binary_cross_entropy" and region is not None:
            with pytest.raises(
                RuntimeError,
                match="binary_cross_entropy: unsafe in an autocast region.* 1 from about 8.3 on and 0 from about -17.3 down,"
                ".*binary_cross_entropy_with_logits",
            ):
                EXAMPLES[name](given)
            return
        if policy_of(name) == PROMOTE and region is not None and given not in (float32, float64, region):
            with pytest.raises(
                RuntimeError, match=f"{name}r?: {given} in a {region} autocast region can't be promoted"
            ):
                EXAMPLES[name](given)
            return
        y = EXAMPLES[name](given)
    assert y.dtype == expected_dtype(name, given, region)


@pytest.mark.parametrize(
    "name", sorted(n for n, p in EXPECTED.items() if p in (FP32, FP32_SET_OPT_DTYPE) and n in EXAMPLES)
)
def test_float32_ops_compute_on_the_widened_input(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with minamp.autocast():
            inside = EXAMPLES[name](float16)
        outside = EXAMPLES[name](WIDENED)
    assert inside.dtype == outside.dtype == float32
    np.testing.assert_array_equal(inside._data, outside._data)


def test_the_rest_of_the_table():
    """Rows of PyTorch's behaviour that mix dtypes or leave out a policy's usual path."""
    h, f, b = x(float16), x(float32), x(bfloat16)
    with minamp.autocast():
        assert (f @ h.T).dtype == (b @ f.T).dtype == float16
        assert (h + f).dtype == (h * f).dtype == (h / f).dtype == (h + b).dtype == float32
        assert OPS["cat"]([h, f]).dtype == OPS["stack"]([h, f]).dtype == OPS["cat"]([h, b]).dtype == float32
        assert (h * tensor(2.0)).dtype == float16  # a 0-dim tensor does not win
        assert (1 / h).dtype == float32 and (h / 2).dtype == float16  # 1 / h is reciprocal
        assert (2**h).dtype == (h**2).dtype == float32
        assert (
            OPS["sum"](f, dtype=float16).dtype == float16
            and OPS["softmax"](h, 1, dtype=float64).dtype == float64
        )
        assert OPS["layer_norm"](h, 3, x(float32, 3), x(float32, 3)).dtype == float32
        assert OPS["batch_norm"](h, *stats(3), *stats(3), True).dtype == float16
        assert OPS["mse_loss"](h, f).dtype == float32
        assert OPS["cross_entropy"](h, x(float16)).dtype == float32
        assert OPS["cross_entropy"](h, IDS, label_smoothing=0.1).dtype == float32
        ints = tensor([[1, 2]])
        assert (ints**2).dtype == ints.sum().dtype == INT
        for a in (x(float64) @ x(float64).T, x(float64).sum(), OPS["softmax"](x(float64), 1)):
            assert a.dtype == float64


def test_normalisation_outside_a_region_wants_one_dtype():
    h, w = minamp.ones(2, 4, dtype=float16), minamp.ones(4)
    for call in (lambda: OPS["layer_norm"](h, (4,), w), lambda: OPS["group_norm"](h, 2, w)):
        with pytest.raises(RuntimeError, match="tensors of different dtypes"):
            call()
        with minamp.autocast():
            assert call().dtype == float32


def test_what_the_page_calls_absent_is_absent():
    """The names beside the lists in notebooks/pages/policy_table.py, and the recurrent layers that stand in for some."""
    page = runpy.run_path(str(Path(__file__).parents[1] / "notebooks/pages/policy_table.py"))
    names = set(re.findall(r"`(\w+)`", " ".join(page["ABSENT"].values())))
    assert "lstm_cell" in names and not names & set(OPS)
