"""Calls as PyTorch spells them: the names of arguments, their places, and what is refused because torch means something else."""

import math

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import nn, tensor


def env():
    x = tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, 6.0]])
    return {
        "m": minamp,
        "F": F,
        "nn": nn,
        "x": x,
        "y": -x,
        "k": x > 0,
        "i": tensor([[0, 2, 1], [1, 1, 0]]),
        "w": nn.Parameter(tensor([[1.0, 2.0, 3.0]])),
    }


SAME = {  # spelled by name = by place
    "m.pow(input=x, exponent=2)": "x * x",
    "x.pow(exponent=2)": "x * x",
    "m.where(condition=k, input=x, other=y)": "m.where(k, x, y)",
    "m.where(k, x, other=0)": "m.where(k, x, 0)",
    "x.where(condition=k, other=y)": "m.where(k, x, y)",
    "m.max(input=x)": "x.max()",
    "m.max(input=x, other=y)": "m.maximum(x, y)",
    "x.min(other=y)": "m.minimum(x, y)",
    "m.max(input=x, dim=1, keepdim=True).values": "x.amax(1, True)",
    "x.sum(dim=1, keepdims=True)": "x.sum(1, True)",
    "m.flip(input=x, dims=(0, 1))": "x.flip(0, 1)",
    "x.flip(dims=[0])": "x.flip(0)",
    "m.permute(input=x, dims=(1, 0))": "x.T",
    "x.permute(dims=(1, 0))": "x.T",
    "m.reshape(input=x, shape=(3, 2))": "x.reshape(3, 2)",
    "x.view(size=(-1,))": "x.reshape(-1)",
    "x.expand(size=(2, -1, -1))": "x.expand(2, 2, 3)",
    "x.repeat(repeats=(2, 1))": "x.repeat(2, 1)",
    "m.transpose(input=x, dim0=0, dim1=1)": "x.T",
    "m.flatten(input=x, start_dim=0)": "x.reshape(6)",
    "m.squeeze(input=x[:1], dim=0)": "x[0]",
    "m.unsqueeze(input=x, dim=0)": "x[None]",
    "m.t(input=x)": "x.T",
    "m.split(tensor=x, split_size_or_sections=2, dim=1)[1]": "x[:, 2:]",
    "m.scatter(x, 1, i[:, :1], value=7)": "x.scatter(1, i[:, :1], 7)",
    "x.clone().scatter_(dim=1, index=i[:, :1], value=7)": "x.scatter(1, i[:, :1], 7)",
    "x.clone().mul_(other=2)": "x * 2",
    "x.clone().pow_(exponent=2)": "x * x",
    "m.exp(input=x, out=m.zeros(2, 3))": "x.exp()",
    "m.add(x, other=y, out=m.ones(2, 3))": "x + y",
    "m.exp(x, out=None)": "x.exp()",
    "F.dropout(input=x, p=0.5, training=False)": "x",
    "F.dropout(x, 0.5, False, inplace=True)": "x",
    "m.zeros(size=(2, 3))": "m.zeros(2, 3)",
    "m.ones(size=[2], dtype=m.int64)": "m.ones(2, dtype=m.int64)",
    "m.empty(size=(0, 3))": "m.zeros(0, 3)",
    "m.zeros_like(m.randn(size=(2,)))": "m.zeros(2)",
    "m.zeros_like(m.rand(size=(2,)))": "m.zeros(2)",
    "m.arange(end=3)": "m.arange(3)",
    "m.arange(start=0.0, end=2)": "m.tensor([0.0, 1.0])",
    "m.randint(high=1, size=(2,))": "m.tensor([0, 0])",
    "m.randint(1, size=(2,))": "m.tensor([0, 0])",
    "m.randint(low=4, high=5, size=(2,), dtype=m.float32, requires_grad=True)": "m.tensor([4.0, 4.0])",
    "m.randperm(n=1, dtype=m.int32)": "m.zeros(1, dtype=m.int32)",
    "m.zeros_like(input=x, device='cpu')": "m.zeros(2, 3)",
    "m.ones_like(input=x, dtype=m.int64, device=x.device)": "m.ones(2, 3, dtype=m.int64)",
    "m.full_like(input=x, fill_value=2, device='cpu')": "m.full((2, 3), 2.0)",
    "x.new_zeros(size=(2,), device='cpu')": "m.zeros(2)",
    "x.new_ones((2,), dtype=m.int64)": "m.ones(2, dtype=m.int64)",
    "x.new_full((2,), 3, device='cpu')": "m.full((2,), 3.0)",
    "x.new_tensor([1], device='cpu')": "m.tensor([1.0])",
    "m.zeros(2, 3).copy_(x, non_blocking=True)": "x",
    "x.to('cpu', m.float64, non_blocking=True)": "x.double()",
    "m.as_tensor((x * w).numpy(force=True))": "(x * w).detach()",
    "m.cdist(x1=x, x2=y, p=1.0)": "m.cdist(x, y, 1.0)",
    "F.pdist(input=x, p=1)": "F.pdist(x, 1)",
    "m.dist(input=x, other=y, p=1)": "x.dist(y, 1)",
    "m.renorm(input=x, p=2, dim=0, maxnorm=1)": "x.renorm(2, 0, 1)",
    "F.pairwise_distance(x1=x, x2=y, p=1, eps=0.0, keepdim=True)": "(x - y).abs().sum(1, True)",
    "F.margin_ranking_loss(input1=x, input2=y, target=x, margin=9)": "F.margin_ranking_loss(x, y, x, 9)",
    "F.triplet_margin_loss(anchor=x, positive=y, negative=x, margin=2, p=1)": "F.triplet_margin_loss(x, y, x, 2, 1)",
    "F.gaussian_nll_loss(input=x, target=y, var=2.0, reduction='sum')": "F.gaussian_nll_loss(x, y, 2.0, False, 1e-6, 'sum')",
    "True & k": "k",
    "1 | i": "m.bitwise_or(i, 1)",
    "3 ^ i": "m.bitwise_xor(i, 3)",
}


@pytest.mark.parametrize("call", SAME)
def test_names_and_places(call):
    a, b = eval(call, env()), eval(SAME[call], env())
    assert a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


REFUSED = {
    "x.to(dtpe=m.float16)": "unexpected keyword argument 'dtpe'",
    "nn.Linear(1, 1).to(dtpe=m.float16)": "unexpected keyword argument 'dtpe'",
    "F.mse_loss(x, y, 'sum')": "positional",  # torch's third is size_average, and the loss would be the mean
    "F.l1_loss(x, y, 'sum')": "positional",
    "F.smooth_l1_loss(x, y, 'sum')": "positional",
    "F.kl_div(x, y, 'sum')": "positional",
    "F.binary_cross_entropy(x, y, None, 'sum')": "positional",
    "F.binary_cross_entropy_with_logits(x, y, None, 'sum')": "positional",
    "F.poisson_nll_loss(x, y, True, False, 'sum')": "positional",
    "F.hinge_embedding_loss(x, y, 1.0, 'sum')": "positional",
    "F.soft_margin_loss(x, y, 'sum')": "positional",
    "F.margin_ranking_loss(x, x, y, 0.0, 'sum')": "positional",
    "F.cosine_embedding_loss(x, x, y[:, 0], 0.0, 'sum')": "positional",
    "F.triplet_margin_loss(x, x, x, 1.0, 2, 1e-6, False, 'sum')": "positional",
    "F.multi_margin_loss(x, i[0, :2], 1, 1.0, None, 'sum')": "positional",
    "F.multilabel_margin_loss(x, i, 'sum')": "positional",
    "F.nll_loss(x, i[0], None, 1)": "positional",
    "F.cross_entropy(x, i[0], None, 1)": "positional",
    "nn.Embedding(3, 4, 0, 1.0)": "positional",  # torch's fourth is max_norm
    "nn.Conv2d(1, 1, 1, 1, 0, 1, 1, True, 'zeros')": "positional",
    "m.zeros(2, size=(3,))": "not of ints",
    "m.arange()": "needs an end",
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_would_mean_something_else_is_refused(call):
    with pytest.raises(TypeError, match=REFUSED[call]):
        eval(call, env())


def test_out_is_not_recorded_however_the_input_is_spelled():
    w = tensor([1.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="exp: out= can't be recorded"):
        minamp.exp(input=w, out=minamp.zeros(1))
    with pytest.raises(RuntimeError, match="add: out= can't be recorded"):
        minamp.add(tensor([1.0]), other=w, out=minamp.zeros(1))


def test_the_last_of_two_bools_to_is_copy():
    x = minamp.zeros(2)
    assert x.to(minamp.float32, True) is x and x.to("cpu", minamp.float32, False, False) is x
    assert x.to(minamp.float32, False, True) is not x


def test_mask_operators_write_in_place():
    mask = tensor([True, False, True])
    same = mask
    mask &= tensor([True, True, False])
    assert mask is same and same.tolist() == [True, False, False]
    mask |= tensor([False, True, False])
    mask ^= True
    assert mask is same and same.tolist() == [False, False, True]


ALIASES = (
    "absolute negative subtract multiply divide true_divide clip greater greater_equal less less_equal not_equal swapaxes "
    "swapdims"
)


@pytest.mark.parametrize("name", ALIASES.split())
def test_second_names(name):
    """As functions, as methods and, where they write, in place."""
    x, args = (
        tensor([[1.0, -2.0], [3.0, 4.0]]),
        {"absolute": (), "negative": (), "swapaxes": (0, 1), "swapdims": (0, 1)},
    )
    args = args.get(name, (2.0,))
    wanted = getattr(minamp, name)(x, *args)
    assert getattr(x, name)(*args).tolist() == wanted.tolist() != x.tolist()
    if hasattr(x, name + "_"):
        assert getattr(x, name + "_")(*args) is x and x.tolist() == wanted.tolist()


def test_second_names_of_cat():
    x = tensor([1.0])
    assert minamp.concat((x, x)).tolist() == minamp.concatenate((x, x), axis=0).tolist() == [1.0, 1.0]


IN_PLACE = "abs sign round floor ceil trunc rsqrt reciprocal expm1 log log1p log2 log10 sin cos erf tril triu bitwise_not"


@pytest.mark.parametrize("name", IN_PLACE.split())
def test_in_place_forms(name):
    x = tensor([[1.5, 2.5], [3.5, 4.5]])
    x = x.long() if name == "bitwise_not" else x
    wanted = getattr(x, name)()
    assert getattr(x, name + "_")() is x and x.tolist() == wanted.tolist()


def test_in_place_forms_of_sums_and_masks():
    x, mask = tensor([1.0, 2.0, 3.0]), tensor([True, False, True])
    assert x.cumsum_(0).tolist() == [1.0, 3.0, 6.0] and x.cumprod_(dim=0).tolist() == [1.0, 3.0, 18.0]
    assert mask.bitwise_and_(~mask).tolist() == mask.bitwise_and(True).tolist() == [False] * 3
    assert (
        mask.bitwise_or_(True).tolist() == [True] * 3
        and mask.bitwise_xor(mask).bitwise_or(False).any().item() is False
    )
    assert mask.bitwise_xor_(True).tolist() == [False] * 3


def test_truth_in_any_dtype():
    a, b = tensor([0.0, 0.5, math.nan, 0.0]), tensor([0, 2, 0, 1])
    assert minamp.logical_and(a, b).tolist() == [False, True, False, False]
    assert a.logical_or(b).tolist() == [False, True, True, True]
    assert a.logical_xor(other=b).tolist() == [False, False, True, True]
    assert a.half().logical_not().tolist() == [True, False, False, True]
    assert b.logical_not_().tolist() == [1, 0, 1, 0] and b.dtype == minamp.int64
    assert minamp.trunc(tensor([-1.5, 1.5, -0.0])).tolist() == [-1.0, 1.0, 0.0]


def test_in_asks_for_an_equal_element():
    x = tensor([[1.0, 2.0], [3.0, 4.0]])
    assert 3.0 in x and 5.0 not in x and tensor(2.0) in x


def test_allow_unused_comes_after_only_inputs():
    w, unused = tensor([1.0], requires_grad=True), tensor([1.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="allow_unused=True"):
        minamp.autograd.grad(w.sum(), [w, unused], None, None, False, True)
    g = minamp.autograd.grad(w.sum(), [w, unused], None, None, False, True, True)
    assert g[0].tolist() == [1.0] and g[1] is None


def test_modules_and_parameters_by_name():
    inner = nn.Linear(1, 1, bias=False)
    model = nn.Sequential(inner, inner)
    assert [n for n, _ in model.named_modules(None, "net")] == ["net", "net.0"]
    assert [n for n, _ in model.named_modules(memo={inner}, prefix="net")] == ["net"]
    assert [n for n, _ in model.named_modules(remove_duplicate=False)] == ["", "0", "1"]
    assert [n for n, _ in model.named_parameters("net", True, False)] == ["net.0.weight", "net.1.weight"]
    assert [n for n, _ in model.named_parameters()] == ["0.weight"]
    norm = nn.BatchNorm1d(1)
    names = [n for n, _ in nn.Sequential(norm, norm).named_buffers(remove_duplicate=False)]
    assert names[0] == "0.running_mean" and "1.running_mean" in names


def test_devices_of_a_type_and_an_index():
    for device in (minamp.device("cuda", 1), minamp.device(type="cuda", index=1), minamp.device("cuda:1")):
        assert device == "cuda:1" and (device.type, device.index) == ("cuda", 1)


def test_files_are_f(tmp_path):
    minamp.save(obj={"x": tensor([1.0])}, f=tmp_path / "x")
    assert minamp.load(f=tmp_path / "x")["x"].tolist() == [1.0]


def test_a_graph_takes_no_stream_by_position():
    """torch's second argument is the pool."""
    with pytest.raises(TypeError, match="positional"):
        minamp.cuda.graph(None, None)


def test_foreach_is_taken_when_clipping():
    w = nn.Parameter(tensor([1.0]))
    w.grad = tensor([3.0])
    nn.utils.clip_grad_norm_([w], 2.0, foreach=True)
    nn.utils.clip_grad_value_([w], 1.0, foreach=False)
    assert w.grad.tolist() == [1.0]


def test_result_type_of_numbers():
    """A number leaves a tensor of its own kind as it is and takes one of a lower kind to its default dtype."""
    half, ints = minamp.zeros(1, dtype=minamp.float16), minamp.zeros(1, dtype=minamp.int32)
    for a, b, wanted in (
        (half, 2.0, minamp.float16),
        (ints, 2, minamp.int32),
        (ints, True, minamp.int32),
        (ints, 2.0, minamp.float32),
        (minamp.tensor(1, dtype=minamp.int32), 2, minamp.int32),
        (half > 0, 2, minamp.int64),
        (1, 2.0, minamp.float32),
        (True, 1, minamp.int64),
        (half, np.float32(1), minamp.float16),
    ):
        assert minamp.result_type(a, b) == wanted
