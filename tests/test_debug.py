"""Named errors on the GPU: arguments on different devices before any kernel runs, failed kernels at their own op."""

import contextlib
import warnings

import faults
import numpy as np
import pytest
import standin
import test_policy

import minamp
import minamp.nn.functional as F
from minamp import GradScaler, autocast, float16, float32, nn, optim
from minamp.tensor import Tensor


@pytest.fixture
def gpu():
    with standin.installed() as gpu:
        yield gpu


# ------------------------------------------------------------------------------------------------- different devices

MAKE, STATS = test_policy.x, test_policy.stats
IDS = test_policy.IDS
# Indices on the CPU are moved, as in PyTorch; everything else that is mixed is refused.
MOVED = {("gather", 1), ("index_put", 1), ("scatter", 1), ("scatter_add", 1)}
MOVED |= {("index_select", 0)}


def example(gpu, name, lonely, monkeypatch, region=False, elsewhere=lambda t: t):
    """test_policy's example of the op `name` on the GPU, its tensor number `lonely` put `elsewhere`: how many it has."""
    made = []

    def place(t):
        t = elsewhere(t) if len(made) == lonely else t.to("cuda")
        made.append(t)
        gpu.count.clear()  # so that in the end it holds what the op itself has done
        return t

    def make(dtype, *shape):
        with monkeypatch.context() as m:
            m.setattr(test_policy, "Tensor", Tensor)
            return place(MAKE(dtype, *shape))

    monkeypatch.setattr(test_policy, "x", make)
    monkeypatch.setattr(test_policy, "stats", lambda n: [place(t) for t in STATS(n)])
    monkeypatch.setattr(test_policy, "Tensor", lambda a: place(Tensor(a)))
    monkeypatch.setattr(test_policy, "IDS", place(IDS) if name in WITH_IDS else IDS)
    with autocast(enabled=region), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        test_policy.EXAMPLES[name](float16)
    return len(made)


WITH_IDS = {"nll_loss", "cross_entropy", "naive_half_cross_entropy", "index_select", "embedding", "one_hot"}
WITH_IDS |= {"cosine_embedding_loss", "multi_margin_loss"}
# Their second tensor is a comparison that the example makes itself: that kernel is not the op's.
COMPARED = {"bitwise_and", "bitwise_or", "bitwise_xor", "masked_fill", "masked_scale", "where"}


@pytest.mark.parametrize("region", [False, True])
@pytest.mark.parametrize("name", sorted(set(test_policy.EXAMPLES) - {"to_device"}))
def test_a_host_tensor_among_others_is_refused_by_every_op(gpu, name, region, monkeypatch):
    if region and name == "binary_cross_entropy":
        return  # banned there
    n = example(gpu, name, -1, monkeypatch)
    for lonely in range(n if n > 1 else 0):
        if (name, lonely) in MOVED:
            continue
        with pytest.raises(
            RuntimeError, match=r"^\w+: tensors on different devices \(.*cpu.*\): move them to one"
        ):
            example(gpu, name, lonely, monkeypatch, region)
        # in a region casts come before the op
        assert region or name in COMPARED or not gpu.count["kernel"], name


TWO = {
    "add": lambda a, b: a + b,
    "where": lambda a, b: minamp.where(minamp.tensor([True, False]).to(a.device), a, b),
    "matmul": lambda a, b: a @ b,
    "linear": lambda a, b: F.linear(a, b),
    "cat": lambda a, b: minamp.cat([a, b]),
    "layer_norm": lambda a, b: F.layer_norm(a, (2, 2), b, b),
    "batch_norm": lambda a, b: F.batch_norm(a, b[0], b[0], training=True),
    "conv2d": lambda a, b: F.conv2d(a[None, None], b[None, None]),
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "index_put": lambda a, b: minamp.index_put(a, (minamp.tensor([0, 1]),), b),
    "index": lambda a, b: a[b],
    "x\\[key\\] = value": lambda a, b: a.__setitem__(0, b[0]),
    "backward": lambda a, b: a.requires_grad_().backward(b),
    "grad": lambda a, b: setattr(a, "grad", b),
}


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("swapped", [False, True])
def test_two_gpus_are_refused(gpu, name, swapped):
    a = minamp.ones(2, 2, device="cuda")
    b = Tensor(standin.second(minamp.ones(2, 2, device="cuda")._data._a))
    b = type("OnSecond", (Tensor,), {"__getitem__": lambda s, k: Tensor(standin.second(s._data._a[k]))})(
        b._data
    )
    if swapped and name in ("index",):
        a, b = Tensor(b._data), a
    gpu.count.clear()
    with pytest.raises(
        RuntimeError, match=rf"^{name}: tensors on different devices \(.*cuda:.*cuda:.*\): move them to one"
    ):
        TWO[name](a, b)
    assert not gpu.count["kernel"]


def test_numpy_arrays_are_refused_by_name(gpu):
    a = minamp.ones(2, device="cuda")
    gpu.count.clear()
    for wrong in (np.ones(2, np.float32), np.array(1.0)):
        with pytest.raises(
            TypeError,
            match=r"^add: b is a NumPy array, not a Tensor: use minamp.tensor\(b, device='cuda'\)",
        ):
            a + wrong
    assert not gpu.count["kernel"] and (a + np.float32(1)).tolist() == [2.0, 2.0]


# -------------------------------------------------------------------------------------------------------- failed kernels

ILLEGAL = "CUDARuntimeError: cudaErrorIllegalAddress: an illegal memory access was encountered"


def chain(x):
    y = x * 3.0
    faults.fail_kernel(0)
    z = y + 1.0  # this one fails
    return z.exp().sqrt().tanh().sin()


def test_without_debug_a_later_op_is_blamed_and_debug_advised(gpu):
    with pytest.raises(RuntimeError) as caught:
        chain(minamp.ones(2, 3, device="cuda"))
    text = str(caught.value)
    assert text.startswith(
        f"sqrt (x float32 (2, 3)): the GPU reports {ILLEGAL}. Kernels fail late, so an earlier op"
    )
    assert "minamp.debug(sync=True)" in text and "start it again" in text


def test_with_debug_the_error_names_op_shapes_dtypes_and_line(gpu):
    x = minamp.ones(2, 3, device="cuda")
    with minamp.debug(sync=True), pytest.raises(RuntimeError) as caught:
        chain(x)
    text = str(caught.value)
    assert text.startswith(
        f"add (a float32 (2, 3)): its kernel failed on the GPU ({ILLEGAL}). Called at {__file__}:"
    )
    assert "in chain: z = y + 1.0" in text


def test_with_debug_a_failing_backward_names_the_forward(gpu):
    x = minamp.ones(2, 3, device="cuda", requires_grad=True)
    with minamp.debug(sync=True):
        loss = (x.exp() * 2.0).sum()
        faults.fail_kernel(1)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
    text = str(caught.value)
    assert text.startswith("backward of mul (arguments float32 (2, 3)), argument 0, of the forward at ")
    assert "loss = (x.exp() * 2.0).sum()" in text and "loss.backward()" in text and ILLEGAL in text
    assert x.grad is None


def test_with_debug_a_failing_step_is_named(gpu):
    w = minamp.ones(3, device="cuda", requires_grad=True)
    optimizer, scaler = optim.SGD([w], lr=0.1), GradScaler()
    with minamp.debug(sync=True):
        scaler.scale(w.sum()).backward()
        scaler.unscale_(optimizer)
        faults.fail_kernel(0)
        with pytest.raises(RuntimeError, match="^SGD.step: its kernel failed on the GPU"):
            scaler.step(optimizer)


def test_with_debug_a_failing_unscale_names_the_users_line(gpu):
    w = minamp.ones(3, device="cuda", requires_grad=True)
    optimizer, scaler = optim.SGD([w], lr=0.1), GradScaler()
    scaler.scale(w.sum()).backward()
    faults.fail_kernel(0)
    with (
        minamp.debug(sync=True),
        pytest.raises(RuntimeError, match=r"Called at .*: scaler.unscale_\(optimizer\)"),
    ):
        scaler.unscale_(optimizer)


def test_every_op_is_waited_for(gpu):
    x = minamp.ones(3, device="cuda", requires_grad=True)

    def waits():
        gpu.count.clear()
        (x * 2.0).sum().backward()
        return gpu.count["sync"]

    assert waits() == 0
    with minamp.debug(sync=True):
        assert waits() == 5  # two ops, forward and backward, and the gradient 1 it starts from
        with minamp.debug(sync=False):
            assert waits() == 0
        assert waits() == 5
    assert waits() == 0
    switch = minamp.debug(sync=True)
    assert waits() == 5
    minamp.debug(sync=True)  # twice is once
    assert waits() == 5
    minamp.debug(sync=False)
    assert waits() == 0 and switch is not None


def on_gpu(values):
    return minamp.tensor(values).to("cuda")


@pytest.mark.parametrize(
    "call, kind, text",
    [
        (
            lambda: F.embedding(on_gpu([0, 7]), minamp.ones(5, 2).to("cuda")),
            IndexError,
            "embedding: id 7 is out",
        ),
        (
            lambda: minamp.ones(3, 2).to("cuda").gather(1, on_gpu([[2]])),
            RuntimeError,
            "gather: index 2 is out",
        ),
        (
            lambda: F.nll_loss(minamp.ones(1, 3).to("cuda"), on_gpu([3])),
            IndexError,
            "nll_loss: class id 3 is not",
        ),
        (lambda: F.one_hot(on_gpu([3]), 3), RuntimeError, "one_hot: id 3 does not fit num_classes 3"),
        (
            lambda: F.binary_cross_entropy(on_gpu([2.0]), on_gpu([1.0])),
            RuntimeError,
            r"input must lie in \[0, 1\]",
        ),
        (
            lambda: minamp.ones(2, dtype=float16).to("cuda").masked_fill(on_gpu([True, False]), on_gpu(1e6)),
            RuntimeError,
            "masked_fill: value 1000000.0 can't be held by float16",
        ),
        (lambda: on_gpu([2]) ** on_gpu([-1]), RuntimeError, "pow: int64 to the power -1 is no whole number"),
    ],
    ids="embedding gather nll_loss one_hot binary_cross_entropy masked_fill pow".split(),
)
def test_with_debug_values_are_checked_as_on_the_cpu(gpu, call, kind, text):
    """Elsewhere that would wait for the GPU in every step; an id outside the table is then read modulo its size, or worse."""
    with minamp.debug(sync=True), pytest.raises(kind, match=text):
        call()
    gpu.count.clear()
    with contextlib.suppress(IndexError, RuntimeError):  # the stand-in's own, NumPy's; a GPU has none
        call()
    assert gpu.count["get"] == 0


def test_debug_changes_no_number(gpu):
    def losses(where):
        minamp.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(where)
        optimizer, x = optim.Adam(model.parameters()), minamp.randn(5, 4).to(where)
        out = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    for where in ("cpu", "cuda"):
        plain = losses(where)
        with minamp.debug(sync=True):
            assert losses(where) == plain


def test_errors_that_are_not_the_gpus_pass_unchanged(gpu):
    x = minamp.ones(3, device="cuda", requires_grad=True)
    y = (x * 2.0).sum()

    def hook(g):
        raise RuntimeError("mine")

    x.register_hook(hook)
    with minamp.debug(sync=True), pytest.raises(RuntimeError, match="^mine$"):
        y.backward()
    assert x.grad is None and x.dtype == float32
