"""The CUDA backend without a GPU: under a strict stand-in for CuPy (standin.py) every op, a training step and the scaler give the
CPU's numbers and copy nothing behind anybody's back."""

import inspect
import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import standin
import test_policy

import minamp
import minamp.nn.functional as F
from minamp import GradScaler, autocast, backends, bfloat16, float16, float32, float64, nn, optim, tensor
from minamp.backends import cpu, cuda, device
from minamp.tensor import Tensor
from minamp.utils import data

ROOT = Path(minamp.__file__).parent


@pytest.fixture
def gpu():
    with standin.installed() as gpu:
        yield gpu


def names(module):
    return {
        n for n, v in vars(module).items() if not n.startswith("_") and callable(v) and not inspect.isclass(v)
    }


def test_both_backends_have_the_same_vocabulary():
    # what only one side exports: round_to is the CPU's quick grid; is_half is an import; check is for GPUs alone
    assert names(cpu) - {"round_to"} == names(cuda) - {"is_half", "check"}


def test_nothing_outside_backends_mentions_cupy():
    found = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if re.search("cupy|cublas", path.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert all(p.startswith("backends/") for p in found), found


def test_importing_minamp_imports_no_cupy():
    code = "import sys, minamp; minamp.tensor([1.0]).sum(); assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------------------ gpu_status


def failing(error):
    def call(*args, **kwargs):
        raise error

    return call


def module(**cuda):
    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(**cuda), ones=failing(OSError("libnvrtc.so.13: not found"))
    )


@pytest.fixture
def status():
    def ask(fake):
        device.use(fake)
        return minamp.gpu_status()

    before = device.use(None)
    yield ask
    device.use(before)


def test_status_not_importable(status, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert re.match(r"cupy is not importable \(.+\): pip install 'minamp\[gpu\]' brings", status(None))


def test_status_no_device(status):
    runtime = types.SimpleNamespace(
        getDeviceCount=failing(RuntimeError("cudaErrorInsufficientDriver: too old"))
    )
    text = status(module(is_available=lambda: False, runtime=runtime))
    assert text.startswith(
        "cupy is installed, but there is no usable CUDA device (RuntimeError: cudaErrorInsuff"
    )
    assert text.endswith("check nvidia-smi and the driver")
    assert status(module(is_available=failing(RuntimeError("first\nsecond")))) == (
        "CUDA is not usable (RuntimeError: first): check nvidia-smi and the driver"
    )


def of_capability(c, cuda=13020):
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: cuda)
    card = types.SimpleNamespace(compute_capability=c)
    return module(is_available=lambda: True, Device=lambda: card, runtime=runtime)


def test_status_old_card_and_incomplete_toolkit(status):
    assert status(of_capability("70")) == (
        "the GPU has compute capability 7.0 (a V100 has 7.0), and CuPy for CUDA 13 needs 7.5 (Turing, T4) or newer: "
        "put cupy-cuda12x in the place of cupy-cuda13x, or use a newer card"
    )
    # the CUDA 12 build takes the V100, and goes on to the libraries
    assert status(of_capability("70", 12090)).startswith(
        "there is a CUDA device, but the toolkit is incomplete"
    )
    text = status(of_capability("90"))
    assert text.startswith(
        "there is a CUDA device, but the toolkit is incomplete (OSError: libnvrtc.so.13: not found)"
    )
    assert "pip install 'minamp[gpu]'" in text


def test_status_ok(gpu):
    assert minamp.gpu_status() == "ok" and minamp.cuda.is_available() and minamp.cuda.device_count() == 1
    minamp.cuda.synchronize()
    assert gpu.count == {"sync": 1}
    with pytest.raises(
        RuntimeError, match="device 'cuda:1' asked for, but there are 1 GPUs: give a number below 1"
    ):
        tensor([1.0], device="cuda:1")


# --------------------------------------------------------------------------------------------------- devices of tensors


def test_to_cuda_and_back(gpu):
    x = tensor([1.0, 2.0], requires_grad=True)
    for y in (x.cuda(), x.to("cuda"), x.to("cuda:0"), x.to(device="cuda"), minamp.ones(2, device="cuda")):
        assert y.device == "cuda:0" and y.device.type == "cuda" and y.device.index == 0
        assert y.to("cuda") is y and y.cuda() is y and y.cpu().device == "cpu"
    (x.cuda() * 3.0).sum().backward()  # the copy is differentiable
    assert x.grad.device == "cpu" and x.grad.tolist() == [3.0, 3.0]
    assert repr(x.detach().cuda()) == "tensor([1., 2.], device='cuda:0')"
    with pytest.raises(TypeError, match=r"numpy\(\) on a tensor on cuda:0: use x.cpu\(\).numpy\(\)"):
        x.detach().cuda().numpy()
    with pytest.raises(TypeError, match="ufunc"):
        np.exp(x.detach().cuda()._data)
    y = x.detach().cuda()
    assert y.__cuda_array_interface__["data"][0] == y._data.data.ptr, "another library shares the memory"
    with pytest.raises(RuntimeError, match="give it x.detach()"):
        x.cuda().__cuda_array_interface__  # noqa: B018
    assert not hasattr(y.cpu(), "__cuda_array_interface__")


def test_a_module_moves_in_place(gpu):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    first = model[0].weight
    assert model.cuda() is model and model[0].weight is first
    assert {t.device for t in model.state_dict().values()} == {"cuda:0"}
    model.load_state_dict(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict())
    assert {t.device for t in model.cpu().state_dict().values()} == {"cpu"}


def test_mixed_devices_are_refused_by_name(gpu):
    a, b = minamp.ones(2, device="cuda"), minamp.ones(2)
    before = gpu.count["kernel"]
    for x, y, found in ((a, b, "a cuda:0, b cpu"), (b, a, "a cpu, b cuda:0")):
        with pytest.raises(RuntimeError, match=rf"add: tensors on different devices \({found}\): move them"):
            x + y
    assert gpu.count["kernel"] == before
    y = a * tensor(2.0)  # a 0-dim CPU tensor is a number, as in PyTorch
    assert y.device == "cuda:0" and y.tolist() == [2.0, 2.0]


def test_the_gpu_that_computes_is_chosen(gpu):
    x = Tensor(standin.second(np.ones(2, float32)))
    before = gpu.count["kernel"]
    with pytest.raises(
        RuntimeError, match=r"exp: tensors on cuda:1, .* cuda:0: call minamp.cuda.set_device\(1\)"
    ):
        minamp.exp(x)
    assert gpu.count["kernel"] == before
    assert x.cpu().tolist() == [1.0, 1.0] and x.to("cuda:0").device == "cuda:0", "but they can be moved"
    for name in (0, "cuda:0", "cuda"):
        minamp.cuda.set_device(name)
    assert minamp.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="'cuda:1' asked for, but there are 1 GPUs"):
        minamp.cuda.set_device("cuda:1")


@pytest.mark.parametrize("source", [float32, float64, float16, bfloat16, np.dtype(np.int64)], ids=str)
@pytest.mark.parametrize("target", [float16, bfloat16, float32], ids=str)
def test_casts_round_once(gpu, source, target):
    rng = np.random.default_rng(0)
    data = np.concatenate(
        [rng.standard_normal(500) * 10.0 ** rng.integers(-9, 6, 500), [1 + 2**-11 + 2**-40, 0.0, -0.0]]
    )
    big = np.array([2**53 + 1, 2**62 + 1, 2049, -(2**54) - 3, 4097])
    x = big if source.kind == "i" else minamp.formats.cast(data, source)
    moved = device.to_device(x)
    got, expected = cuda.cast(moved, target).get(), cpu.cast(x, target)
    assert got.dtype == target
    np.testing.assert_array_equal(got.view(f"u{target.itemsize}"), expected.view(f"u{target.itemsize}"))


# ------------------------------------------------------------------------------------------------------ the whole registry


def forward_and_back(name, dtype, where, region, monkeypatch):
    """The example of test_policy, its floating inputs on `where`: the output, and the gradients of the inputs."""
    made = []

    def x(*args, **kwargs):
        t = ORIGINAL(*args, **kwargs).to(where)
        made.append(t.requires_grad_(not made or name not in WITH_WEIGHT))
        return t

    monkeypatch.setattr(test_policy, "x", x)
    monkeypatch.setattr(test_policy, "IDS", Tensor(np.array([1, 2])).to(where))
    monkeypatch.setattr(test_policy, "stats", lambda n: [t.to(where) for t in STATS(n)])
    monkeypatch.setattr(test_policy, "Tensor", lambda a: Tensor(a).to(where))
    minamp.manual_seed(0)
    with autocast(enabled=region), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        y = test_policy.EXAMPLES[name](dtype)
    if y.requires_grad:
        y.sum().backward()
    return y, [t.grad for t in made]


ORIGINAL, STATS = test_policy.x, test_policy.stats
# Their sums run in another order: columns of a convolution, windows of a mean, pixels that are read several times.
NOT_BIT_FOR_BIT = {
    "conv2d",
    "conv1d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "avg_pool1d",
    "adaptive_avg_pool1d",
    "grid_sample",
}
SKIPPED = {"to_device"}
# their weight has no gradient
WITH_WEIGHT = {"binary_cross_entropy", "binary_cross_entropy_with_logits", "nll_loss", "cross_entropy"}


@pytest.mark.parametrize("dtype", [float32, float16, bfloat16, float64], ids=str)
@pytest.mark.parametrize("name", sorted(set(test_policy.EXAMPLES) - SKIPPED))
def test_every_op_is_the_cpus(gpu, name, dtype, monkeypatch):
    cases = [(region, forward_and_back(name, dtype, "cpu", region, monkeypatch)) for region in (False,)]
    for region, (y, grads) in cases:
        there, back = forward_and_back(name, dtype, "cuda", region, monkeypatch)
        if "dropout" not in name:  # drawn by another generator
            assert there.device == "cuda:0" and there.dtype == y.dtype
            close(name, there, y)
            for ours, theirs in zip(back, grads, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    assert ours.device == "cuda:0" and ours.dtype == theirs.dtype
                    close(name, ours, theirs)


def close(name, ours, theirs):
    ours, theirs = (backends.widen(t.cpu().detach()._data) for t in (ours, theirs))
    if name in NOT_BIT_FOR_BIT:
        np.testing.assert_allclose(
            ours, theirs, rtol=2e-3 if theirs.dtype == np.float32 else 1e-12, atol=1e-3
        )
    else:
        np.testing.assert_array_equal(ours, theirs)


def test_no_op_copies_or_waits(gpu, monkeypatch):
    """Every example, forward and back, with its constants (geometry of pools and resizes) in place after a first run."""
    # picks by host lists, or as many values as a mask holds; converts to Python numbers
    allowed = {"one_hot": "sync", "nonzero": "sync"}
    for name in sorted(set(test_policy.EXAMPLES) - SKIPPED):
        for _ in range(2):
            forward_and_back(
                name, float16, "cuda", True, monkeypatch
            ) if name != "binary_cross_entropy" else None
            moved = dict(gpu.count)
            gpu.count.clear()
        # the inputs themselves are moved by the test
        assert not moved.get("get") and (not moved.get("sync") or name in allowed), (name, moved)


# ------------------------------------------------------------------------------------------------------- training steps


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.fc = nn.BatchNorm2d(8), nn.Linear(16 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        return self.fc(F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1))


def mlp():
    return nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 10))


class Recurrent(nn.Module):
    """Every fourth row of the picture, one after the other and both ways, through all three kinds."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.gru, self.rnn, self.fc = nn.GRU(16, 8), nn.RNN(8, 8), nn.Linear(8, 10)

    def forward(self, x):
        x, _ = self.gru(self.lstm(x.squeeze(1)[:, ::4])[0].transpose(0, 1))
        return self.fc(self.rnn(x)[1].squeeze(0))


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    # a bias before a batch norm has rounding for a gradient, which eps keeps small
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, eps=1e-3, momentum=0.5, centered=True),
}


def train(make, optimizer, where, steps=4, half_weights=False, count=None, counts=None):
    """The standard loop on `where`: the losses, and what the model holds in the end."""
    minamp.manual_seed(1)
    rng = np.random.default_rng(2)
    x = Tensor(rng.standard_normal((12, 1, 16, 16)).astype(np.float32)).to(where)
    y = Tensor(rng.integers(0, 10, 12)).to(where)
    model = make().to(where)
    if isinstance(model, nn.Sequential):
        x = x.flatten(1)
    params = model.parameters()
    if half_weights:
        model.half()
        optimizer = optim.SGD(params, lr=0.1, momentum=0.9, master_weights=True)
    else:
        optimizer = OPTIMIZERS[optimizer](params)
    scaler, losses = GradScaler(init_scale=2.0**17 if half_weights else 2.0**12, growth_interval=2), []
    for step in range(steps):
        if count is not None:
            count.clear()
        with autocast(dtype=float16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        if count is not None:
            counts.append(dict(count))
    return (
        [t.item() for t in losses],
        {n: t.float().cpu()._data for n, t in model.state_dict().items()},
        scaler.get_scale(),
    )


@pytest.mark.parametrize("half_weights", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [mlp, CNN, Recurrent])
def test_training_is_the_cpus(gpu, make, optimizer, half_weights):
    expected, weights, scale = train(make, optimizer, "cpu", half_weights=half_weights)
    losses, ours, our_scale = train(make, optimizer, "cuda", half_weights=half_weights)
    assert our_scale == scale and losses[-1] < losses[0]
    # the sums of products run in another order, and Adam turns the last bit of a small gradient into a step
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    for name in weights:
        np.testing.assert_allclose(ours[name], weights[name], rtol=1e-2, atol=2e-2, err_msg=name)


@pytest.mark.parametrize("make, kernels", [(mlp, 146), (CNN, 207)])
def test_a_step_waits_once_for_the_scaler(gpu, make, kernels):
    counts = []
    train(make, "adam", "cuda", steps=3, count=gpu.count, counts=counts)
    # the scaler's flags; nothing is put, nothing waits
    assert counts[1] == counts[2] == {"get": 1, "kernel": kernels}


@pytest.mark.parametrize("enabled, kernels", [(True, 2), (False, 1)])
def test_a_weights_gradient_is_the_product_and_its_widening(gpu, enabled, kernels):
    """And no copy of what nobody else holds."""
    x, w = minamp.ones(4, 6, device="cuda"), minamp.ones(5, 6, device="cuda", requires_grad=True)
    with autocast(enabled=enabled):
        y = F.linear(x, w)
    g = minamp.ones(4, 5, device="cuda", dtype=y.dtype)
    gpu.count.clear()
    y.backward(g)
    assert gpu.count == {"kernel": kernels} and w.grad.tolist() == [[4.0] * 6] * 5
    # the gradient that reaches w in w * 1 is a new array, in w + 0 it is the seed, which is copied
    for y, launches in ((w * 1.0, 1), (w + 0.0, 1)):
        w.grad, g = None, minamp.ones(5, 6, device="cuda")
        gpu.count.clear()
        y.backward(g)
        assert gpu.count == {"kernel": launches} and not np.shares_memory(w.grad._data._a, g._data._a)


def test_adding_to_a_gradient_is_one_launch(gpu):
    w = minamp.ones(5, 6, device="cuda", requires_grad=True)
    (w * 2.0).backward(minamp.ones(5, 6, device="cuda"))
    held, y, g = w.grad.data, w * 3.0, minamp.ones(5, 6, device="cuda")
    gpu.count.clear()
    y.backward(g)
    assert gpu.count == {"kernel": 2}, "the product, and the sum where the gradient lies"
    assert held.tolist() == w.grad.tolist() == [[5.0] * 6] * 5


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_gradient_lies_in_memory_as_its_leaf(gpu, where):
    """Its sum may come channels last; unscale and the optimizers would copy it to and fro."""
    w = minamp.ones(8, 4, 3, 3, device=where, requires_grad=True)
    with autocast():
        y = F.conv2d(minamp.ones(2, 4, 5, 5, device=where), w)
    y.sum().backward()
    assert w.grad.stride() == w.stride() == (36, 9, 3, 1)


def test_a_training_is_watched(gpu):
    """What an observer sees of a backward are the GPU's arrays."""
    w = minamp.ones(3, device="cuda", dtype=float16, requires_grad=True)
    with minamp.watch.first_bad_op() as bad, minamp.watch.gradient_histograms() as seen:
        ((w * 3e4) * minamp.zeros(3, device="cuda").half()).sum().backward()
        (w.exp() * 4e4).sum().backward()
    assert bad.found.op == "mul" and bad.found.phase == "forward" and bad.found.result == "inf"
    assert seen.weights.total == 6 and seen.activations.total > 0
    with minamp.watch.first_bad_op() as bad:
        (w * 3e4).backward(minamp.full((3,), 3.0, device="cuda").half())
    assert (bad.found.op, bad.found.phase) == ("mul", "backward")
    assert minamp.watch.tensor_stats(w._data).max_abs == 1.0


def test_new_tensors_lie_where_the_old_one_does(gpu):
    x = minamp.ones(2, device="cuda", dtype=float16)
    for y in (x.new_zeros(3), x.new_ones((3,)), x.new_full((3,), 2.0), x.new_tensor([1.0])):
        assert y.device == x.device and y.dtype == float16


def test_an_index_on_the_cpu_reads_and_writes(gpu):
    x, at = minamp.zeros(3, device="cuda"), minamp.tensor([0, 2])
    x[at] = minamp.ones(2, device="cuda")
    x[np.array([1])] = 5.0
    assert x.tolist() == [1.0, 5.0, 1.0] and x[at].tolist() == [1.0, 1.0]


def test_the_scaler_skips_and_grows_on_the_gpu(gpu):
    w = minamp.ones(3, device="cuda", requires_grad=True)
    optimizer, scaler = optim.SGD([w], lr=1.0), GradScaler(init_scale=4.0, growth_interval=1)
    for bad, expected in ((False, 8.0), (True, 4.0), (False, 8.0)):
        optimizer.zero_grad()
        scaler.scale((w * (float("inf") if bad else 1.0)).sum()).backward()
        assert scaler.step(optimizer) is (None if bad else True)
        scaler.update()
        assert scaler.get_scale() == expected
    assert w.tolist() == [-1.0, -1.0, -1.0]


def test_subclasses_of_numpys_array_are_on_the_cpu(gpu, tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=3)
    y = Tensor(mapped) + minamp.ones(3) + Tensor(mapped)
    assert y.device == "cpu" and y.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name, a, b", [("addmm", (5, 7), (7, 6)), ("baddbmm", (2, 5, 7), (2, 7, 6))])
@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
def test_gradients_with_alpha_are_rounded_once(gpu, name, a, b, dtype):
    """alpha = 1/3 after a rounding to half would move the last bit of about a third of them."""
    rng = np.random.default_rng(0)
    shapes = ((*a[:-1], b[-1]), a, b)
    data = [minamp.formats.cast(rng.standard_normal(s), dtype) for s in shapes]
    first, second = {}, {}
    for where in ("cpu", "cuda"):
        x = [Tensor(d).to(where).requires_grad_(True) for d in data]
        y = getattr(minamp, name)(*x, beta=0.7, alpha=1 / 3)
        weights = Tensor(minamp.formats.cast(np.random.default_rng(1).standard_normal(y.shape), dtype)).to(
            where
        )
        grads = minamp.autograd.grad((y * weights).sum(), x, create_graph=True)
        first[where] = [t.detach().cpu() for t in (y, *grads)]
        (second[where],) = minamp.autograd.grad((grads[1] * grads[1]).sum(), x[2:])
        y = getattr(minamp, name)(*x, beta=0.7, alpha=1 / 3)
        (y * weights).sum().backward()
        first[where] += [t.grad.cpu() for t in x]
    for ours, theirs in zip([*first["cuda"], second["cuda"]], [*first["cpu"], second["cpu"]], strict=True):
        assert ours.dtype == dtype
        close(name, ours, theirs)


@pytest.mark.parametrize(
    "a, b", [((5, 7), (8, 7, 6)), ((7,), (8, 7, 6)), ((8, 5, 7), (7, 6)), ((8, 5, 7), (7,))], ids=str
)
def test_gradients_of_a_broadcast_matrix_are_rounded_after_the_sum(gpu, a, b):
    """Eight products added up: each rounded to half before, half of the sums would end in another bit."""
    rng, grads = np.random.default_rng(0), {}
    data = [rng.standard_normal(s).astype(np.float16) for s in (a, b)]
    for where in ("cpu", "cuda"):
        x = [Tensor(d).to(where).requires_grad_(True) for d in data]
        y = x[0] @ x[1]
        weights = Tensor(np.random.default_rng(1).standard_normal(y.shape).astype(np.float16)).to(where)
        (y * weights).sum().backward()
        grads[where] = [t.grad for t in x]
    for ours, theirs in zip(grads["cuda"], grads["cpu"], strict=True):
        assert ours.dtype == float16
        close("matmul", ours, theirs)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
def test_a_transposed_convolution_adds_its_bias_where_it_gathers(gpu, dtype, bias, groups):
    rng = np.random.default_rng(0)
    data = [
        minamp.formats.cast(rng.integers(-8, 9, s) / 8, dtype)  # sums of these products are exact
        for s in ((2, 6, 4, 5), (6, 3, 3, 3), (3 * groups,))
    ]
    minamp.cuda.is_bf16_supported()  # tried at first use, with kernels of its own
    results = {}
    for where in ("cpu", "cuda"):
        x, w, b = (Tensor(d).to(where) for d in data)
        gpu.count.clear()
        y = F.conv_transpose2d(x, w, b if bias else None, stride=2, padding=1, groups=groups)
        results[where] = y.cpu()
    # weights in order, filled up (2), a product and a gather a group, which may copy its part of x: no pass for the bias
    assert gpu.count["kernel"] <= 4 + 3 * groups
    assert results["cuda"].dtype == dtype
    close("exact", results["cuda"], results["cpu"])


@pytest.mark.parametrize("wmma", [False, True])
def test_a_bias_may_have_gaps(gpu, wmma, monkeypatch):
    monkeypatch.setattr("minamp.backends.cuda_conv.WMMA", wmma)
    rng = np.random.default_rng(0)
    x, w, bias = (rng.integers(-8, 9, s).astype(np.float16) for s in ((2, 16, 4, 5), (16, 16, 3, 3), (32,)))
    for convolve in (F.conv2d, F.conv_transpose2d):
        y = [
            convolve(*(Tensor(a).to(where) for a in (x, w)), Tensor(bias).to(where)[::2])
            for where in ("cpu", "cuda")
        ]
        close("exact", *y)


def test_first_layers_are_aligned_and_exact(gpu, monkeypatch):
    """1 or 3 channels: every operand of every product has rows of multiples of 16 bytes; the sums are the CPU's."""
    from minamp.backends import gemm

    calls, plan = [], gemm.plan
    monkeypatch.setattr(gemm, "plan", lambda *args: calls.append(plan(*args)) or calls[-1])
    for channels, kernel in ((1, 3), (3, 3), (3, 5), (1, 5)):
        data = [
            (np.random.default_rng(i).integers(-8, 9, s) / 8).astype(np.float16)
            for i, s in enumerate([(2, channels, 9, 8), (16, channels, kernel, kernel)])
        ]
        grads = {}
        for where in ("cpu", "cuda"):
            x, w = (Tensor(d).to(where).requires_grad_(True) for d in data)
            y = F.conv2d(x, w, padding=1, stride=2)
            y.sum().backward()
            grads[where] = [t.detach() for t in (y, x.grad, w.grad)]
        for ours, theirs in zip(grads["cuda"], grads["cpu"], strict=True):
            close("exact", ours, theirs)
    assert len(calls) == 12 and all(leading % 8 == 0 for p in calls for leading in p.leading)


@pytest.mark.parametrize("kernel, stride", [(2, 2), (3, 2)])
def test_a_gradient_through_max_pooling_stays_half(gpu, kernel, stride):
    """Apart or overlapping, what travels on is what tensor cores take: no float32 gradient makes the convolution widen."""
    x = device.to_device(np.ones((1, 8, 8, 8), np.float16))
    geometry = ((kernel, kernel), (stride, stride), (0, 0), (1, 1))
    y = cuda.max_pool2d(x, *geometry, False)
    position = cuda.max_pool2d_position(x, y, *geometry)
    assert cuda.max_pool2d_scatter(y, position, x.shape, *geometry).dtype == float16
    assert cuda.max_pool2d_gather(x, position, *geometry).dtype == float16


def test_the_tensor_core_kernel_takes_what_it_is_written_for(gpu, monkeypatch):
    from minamp.backends import cuda_conv

    def taken(dtype=float16, c=32, o=48, groups=1, skip=0):
        memory = gpu.xp.zeros(c * 4 + 8, dtype)
        x = memory[skip : skip + 4 * c].reshape(1, 2, 2, c)
        return cuda_conv._takes_wmma(x, gpu.xp.zeros((o, c // groups, 1, 1), dtype), groups)

    assert not taken()  # only when asked for
    monkeypatch.setattr(cuda_conv, "WMMA", True)
    assert taken() and taken(bfloat16)
    assert not any((taken(float32), taken(c=24), taken(o=40), taken(groups=2), taken(skip=1)))
    monkeypatch.setattr(standin.Device, "compute_capability", "75")
    assert taken() and not taken(bfloat16)
    code = "import minamp.backends.cuda_conv as c; print(c.WMMA)"
    for value, expected in (("1", "True"), ("0", "False")):
        env = {**os.environ, "MINAMP_WMMA": value}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert done.stdout.strip() == expected


@pytest.mark.parametrize("dtype", [float32, float16])
@pytest.mark.parametrize("inside, outside", [(0, 3), (4, 0), (0, 0)])
@pytest.mark.parametrize("lead", [(2,), (2, 3), (2, 0)])
def test_layers_of_no_features(gpu, dtype, inside, outside, lead):
    layer = nn.Linear(inside, outside, dtype=dtype, device="cuda")
    x = minamp.ones(*lead, inside, dtype=dtype, device="cuda", requires_grad=True)
    y = layer(x)
    assert y.tolist() == layer.bias.expand(y.shape).tolist()
    y.sum().backward()
    assert layer.weight.grad.shape == (outside, inside) and x.grad.shape == x.shape
    assert not minamp.matmul(x, layer.weight.mT).cpu().any()


def test_clipping_waits_for_nothing(gpu):
    for order in (2, 1, 0, 0.5, float("inf"), -float("inf")):
        ps = [nn.Parameter(minamp.zeros(*size, device="cuda")) for size in ((), (2, 3), (0, 2))]
        for p in ps:
            p.grad = minamp.full(p.shape, 2.0, device="cuda")
        gpu.count.clear()
        total = nn.utils.clip_grad_norm_(ps, 1.0, order)
        assert set(gpu.count) == {"kernel"} and total.is_cuda


def test_calls_as_pytorch_spells_them(gpu):
    """What torch's names lead to, on a GPU: the same values as on the CPU, and integer dtypes that were asked for."""
    x = tensor([[1.0, float("nan")], [3.0, -2.0]])
    on = x.cuda(non_blocking=True)
    assert on.device.type == nn.Linear(1, 1).cuda(None).weight.device.type == "cuda"
    for call in (
        lambda x: x.sign(),
        lambda x: x.isnan().sum(dtype=minamp.int32),
        lambda x: x.isnan().long().cumsum(dim=0, dtype=minamp.uint8),
        lambda x: x.isnan() ** 2,
        lambda x: minamp.pow(input=x.isnan().long(), exponent=2),
        lambda x: minamp.where(condition=x > 0, input=x, other=0.0),
        lambda x: F.cosine_similarity(x[1, 0], x[1, 1], dim=0),
        lambda x: x[1, 0].flip(0),
        lambda x: x.new_zeros(size=(2,)),
        lambda x: minamp.ones_like(input=x),
    ):
        there, here = call(on), call(x)
        assert there.device.type == "cuda" and there.dtype == here.dtype
        np.testing.assert_array_equal(there.cpu().numpy(), here.numpy())
    for name in ("abs", "amax"):
        slopes = []
        for start in (on, x):
            leaf = start.clone().requires_grad_()
            getattr(leaf, name)().sum().backward()
            slopes.append(leaf.grad.tolist())
        assert slopes[0] == slopes[1]


def test_batches_lie_where_the_data_lies(gpu):
    x, y = minamp.arange(12.0).reshape(6, 2), minamp.arange(6)
    on = data.TensorDataset(x.cuda(), y.cuda())
    part = data.Subset(on, [5, 0, 3])
    for dataset, rows in (on, [0, 1, 2, 3]), (part, [5, 0, 3]), ([on[2], on[4]], [2, 4]):
        batch = next(iter(data.DataLoader(dataset, 4)))
        assert all(t.is_cuda for t in batch) and batch[1].tolist() == rows
        assert batch[0].cpu().equal(x[rows])
    weights = tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]).cuda()
    for sampler in data.WeightedRandomSampler(weights, 3), tensor([1, 1, 1]).cuda():
        assert next(iter(data.DataLoader(on, 3, sampler=sampler)))[1].tolist() == [1, 1, 1]
    assert sorted(data.SubsetRandomSampler(y.cuda())) == y.tolist()
