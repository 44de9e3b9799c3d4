"""What is left standing when the GPU's memory ends: a named error, and every number as it was. On the stand-in."""

import faults
import numpy as np
import pytest
import standin

import minamp
import minamp.nn.functional as F
from minamp import GradScaler, autocast, nn, optim
from minamp.tensor import Tensor


@pytest.fixture
def gpu():
    with standin.installed() as gpu:
        yield gpu


def test_the_error_names_the_op_and_the_bytes(gpu):
    a, b = (minamp.ones(64, 64).half().to("cuda") for _ in range(2))
    faults.out_of_memory_at(0)
    with pytest.raises(minamp.cuda.OutOfMemoryError) as caught:
        a @ b
    text = str(caught.value)
    assert isinstance(caught.value, RuntimeError) and not isinstance(caught.value, MemoryError)
    assert text.startswith(
        "matmul (a float16 (64, 64), b float16 (64, 64)): out of memory on the GPU: 8192 bytes (0.0 MB) needed, "
    )
    assert "bytes" in text.split("needed, ")[1] and caught.value.needed == 8192 and caught.value.free > 0
    for advice in ("Lower the batch", "in chunks", "minamp.utils.checkpoint"):
        assert advice in text
    assert (a @ b).tolist()[0][0] == 64.0  # there is room again: nothing is broken


def test_moving_and_the_driver_say_it_too(gpu, monkeypatch):
    x = minamp.ones(1000)
    faults.out_of_memory_at(0)
    with pytest.raises(
        minamp.cuda.OutOfMemoryError, match=r"^moving float32 \(1000,\) to cuda: out of memory"
    ):
        x.cuda()
    y = x.cuda()

    def no_workspace(*args):
        raise type("CUBLASError", (RuntimeError,), {})("CUBLAS_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(standin.MODULE.cuda.cublas, "gemmEx", no_workspace)
    with pytest.raises(minamp.cuda.OutOfMemoryError, match="^matmul.*an unknown number of bytes needed"):
        y @ y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(64, 3)

    def forward(self, x):
        return self.fc(F.relu(self.norm(self.conv(x))).flatten(1))


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "capturable": lambda p: optim.Adam(p, lr=0.1, capturable=True),
    "masters": lambda p: optim.AdamW(p, lr=0.1, master_weights=True),
    "half alone": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}


class Training:
    """A small training on the stand-in, and all that must not change when a part of a step fails."""

    def __init__(self, optimizer):
        minamp.manual_seed(0)
        model = Net()
        self.model = (model.half() if optimizer in ("masters", "half alone") else model).to("cuda")
        self.optimizer, self.scaler = (
            OPTIMIZERS[optimizer](self.model.parameters()),
            GradScaler(init_scale=4.0),
        )
        self.x = minamp.randn(5, 1, 6, 6).to("cuda")
        self.y = Tensor(np.array([0, 1, 2, 0, 1])).to("cuda")

    def loss(self):
        with autocast():
            return self.scaler.scale(F.cross_entropy(self.model(self.x), self.y))

    def values(self):
        def plain(t):
            return t.detach().float().cpu().tolist() if isinstance(t, Tensor) else t

        # masters and compensations are made when first asked for, equal to what they stand for
        state = {
            (i, name): plain(value)
            for i, p in enumerate(self.model.parameters())
            for name, value in self.optimizer.state.get(p, {}).items()
            if name != "master"
        }
        grads = [None if p.grad is None else plain(p.grad) for p in self.model.parameters()]
        return (
            {n: plain(t) for n, t in self.model.state_dict().items()},
            grads,
            state,
            self.scaler.state_dict(),
        )


def every_failure(part, training):
    """Run `part` with memory that ends at its first, second, ... array until it goes through; nothing may change before."""
    n = 0
    while True:
        before = training.values()
        faults.out_of_memory_at(n)
        try:
            result = part()
        except minamp.cuda.OutOfMemoryError as error:
            assert "out of memory on the GPU" in str(error)
            assert training.values() == before, f"changed at array {n}"
            n += 1
            continue
        finally:
            met = not faults.pending()
            faults.clear()
        assert not met, "a failure was swallowed"
        return result, n


@pytest.mark.parametrize("layer", ["conv", "norm", "fc"])
def test_a_forward_without_memory_changes_nothing(gpu, layer):
    training = Training("sgd")
    x = minamp.ones(2, 64, device="cuda") if layer == "fc" else minamp.ones(2, 4, 4, 4, device="cuda")
    x = x[:, :1] if layer == "conv" else x

    def part():
        with autocast():
            return getattr(training.model, layer)(x)

    _, failures = every_failure(part, training)
    assert failures >= 4
    assert training.model.norm.num_batches_tracked.item() == (layer == "norm")


def test_a_backward_without_memory_changes_nothing(gpu):
    training = Training("sgd")
    for _ in range(2):  # the second adds to gradients that are there
        n = 0
        while True:
            loss, before = training.loss(), training.values()
            faults.out_of_memory_at(n)
            try:
                loss.backward()
            except minamp.cuda.OutOfMemoryError as error:
                assert str(error).startswith("backward")
                assert training.values() == before, f"changed at array {n}"
                n += 1
                continue
            finally:
                faults.clear()
            break
        assert n > 20


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_without_memory_changes_nothing(gpu, optimizer):
    training, undisturbed = Training(optimizer), Training(optimizer)
    for _ in range(2):  # the first makes the buffers
        for each in (training, undisturbed):
            each.optimizer.zero_grad()
            each.loss().backward()
        if optimizer == "half alone":  # float16 gradients are not for a scaler
            undisturbed.optimizer.step()
            every_failure(training.optimizer.step, training)
        else:
            undisturbed.scaler.step(undisturbed.optimizer)
            undisturbed.scaler.update()
            every_failure(lambda: training.scaler.unscale_(training.optimizer), training)
            every_failure(lambda: training.scaler.step(training.optimizer), training)
            every_failure(training.scaler.update, training)
    assert training.values() == undisturbed.values()


def test_the_step_is_named(gpu):
    training = Training("adam")
    training.loss().backward()
    faults.out_of_memory_at(0)
    with pytest.raises(minamp.cuda.OutOfMemoryError, match="^Adam.step: out of memory"):
        training.optimizer.step()
