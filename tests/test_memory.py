"""The GPU's memory, clock and formats under torch's names. On the stand-in."""

import pytest
import standin

import minamp
import minamp.nn.functional as F
from minamp import autocast, bfloat16, float16, float32, nn
from minamp.backends import cuda_check, device
from minamp.tensor import Tensor


@pytest.fixture
def gpu():
    with standin.installed() as gpu:
        yield gpu


MB = 1 << 20


def filled(n):
    return Tensor(device.xp.full((n,), 1.0, float32))


# ------------------------------------------------------------------------------------------------------------ how much


def test_allocated_and_peak(gpu):
    before = minamp.cuda.memory_allocated()
    minamp.cuda.reset_peak_memory_stats()
    assert minamp.cuda.max_memory_allocated() == before
    a = filled(MB // 4)
    view = a.reshape(2, -1)
    assert minamp.cuda.memory_allocated() == before + MB  # a view is no memory
    b = filled(10)  # 40 bytes take a block of 512
    assert minamp.cuda.memory_allocated("cuda:0") == before + MB + 512
    del a, view
    assert minamp.cuda.memory_allocated(0) == before + 512
    assert minamp.cuda.max_memory_allocated() == before + MB + 512
    minamp.cuda.reset_peak_memory_stats()
    assert minamp.cuda.max_memory_allocated() == before + 512
    filled(1000)
    assert minamp.cuda.max_memory_allocated(minamp.device("cuda")) == before + 512 + 4096
    assert b.tolist() == [1.0] * 10


def test_reserved_is_given_back(gpu):
    filled(MB)
    held, free = minamp.cuda.memory_reserved(), minamp.cuda.mem_get_info()[0]
    assert held >= minamp.cuda.memory_allocated() + 4 * MB
    minamp.cuda.empty_cache()
    assert minamp.cuda.memory_reserved() == minamp.cuda.memory_allocated()
    assert minamp.cuda.mem_get_info()[0] == free + held - minamp.cuda.memory_reserved()


def test_what_the_driver_says_of_the_card(gpu):
    found = minamp.cuda.get_device_properties("cuda:0")
    assert (found.name, found.total_memory, found.multi_processor_count) == ("stand-in", 2**30, 4)
    assert minamp.cuda.get_device_name() == "stand-in" and minamp.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize(
    "name",
    "get_device_name get_device_capability memory_allocated max_memory_allocated reset_peak_memory_stats memory_reserved "
    "mem_get_info Event".split(),
)
def test_without_a_gpu_the_reason_is_given(name, monkeypatch):
    monkeypatch.setattr(device, "gpu_status", lambda: "there is no usable CUDA device: check nvidia-smi")
    with pytest.raises(
        RuntimeError,
        match=f"^minamp.cuda.(get_device_properties|{name}) asked for, but there is no usable CUDA device: check nvidia-smi",
    ):
        getattr(minamp.cuda, name)()
    minamp.cuda.empty_cache()  # nothing is cached, so nothing is left to do
    minamp.cuda.synchronize()


def test_saved_bytes_are_the_cpus(gpu):
    def kept(where):
        x = minamp.randn(32, 64).to(where)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(where)
        with minamp.watch.saved_bytes() as saved, autocast():
            model(x).sum()
        return saved.by_op

    assert kept("cuda") == kept("cpu")


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_peak_memory_of_a_block(gpu, where):
    x = minamp.ones(MB // 4).to(where)
    with minamp.watch.peak_memory(where) as peak:
        y = x + 1.0
        del y
        x + 1.0
    assert MB <= peak.bytes < 1.2 * MB


# ---------------------------------------------------------------------------------------------------------------- time


def test_events_measure_the_gpu(gpu):
    start, end = (minamp.cuda.Event(enable_timing=True) for _ in range(2))
    x = filled(4)
    start.record()
    x + x + x
    end.record()
    end.synchronize()
    assert end.query() and start.elapsed_time(end) == 2.0  # the stand-in's kernels take a millisecond each


def test_events_that_keep_no_time_are_named(gpu):
    start, plain = minamp.cuda.Event(enable_timing=True), minamp.cuda.Event()
    with pytest.raises(ValueError, match="elapsed_time: the start event was not recorded: call record"):
        start.elapsed_time(plain)
    start.record()
    with pytest.raises(ValueError, match="the end event keeps no time: make it with enable_timing=True"):
        start.elapsed_time(plain)


def test_the_clock_waits_before_it_reads(gpu):
    gpu.count.clear()
    assert device.clock() <= device.clock() and gpu.count == {"sync": 2}


# ------------------------------------------------------------------------------------------------------------ bfloat16


def test_bfloat16_is_tried_once_and_not_guessed(gpu, monkeypatch):
    monkeypatch.setattr(cuda_check, "_bf16", {})
    gpu.count.clear()
    assert minamp.cuda.is_bf16_supported() and minamp.is_bf16_supported(including_emulation=False)
    assert gpu.count["sync"] == 1
    monkeypatch.setattr(device, "gpu_status", lambda: "none")
    monkeypatch.setattr(minamp.cuda, "gpu_status", lambda: "none")
    assert not minamp.cuda.is_bf16_supported() and not minamp.is_bf16_supported(including_emulation=False)
    assert minamp.is_bf16_supported()


PRODUCTS = {
    "matmul": lambda a: a @ a,
    "bmm": lambda a: minamp.bmm(a[None], a[None]),
    "addmm": lambda a: minamp.addmm(a, a, a),
    "linear": lambda a: F.linear(a, a),
    "conv1d": lambda a: F.conv1d(a[None], a[:, :, None]),
    "conv2d": lambda a: F.conv2d(a[None, None], a[None, None]),
    "conv_transpose2d": lambda a: F.conv_transpose2d(a[None, None], a[None, None]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_card_without_bfloat16_is_named_before_any_kernel(gpu, name, monkeypatch):
    monkeypatch.setattr(cuda_check, "_bf16", {})
    monkeypatch.setattr(standin.Device, "compute_capability", "75")

    def refuse(*args):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    with monkeypatch.context() as m:
        m.setattr(standin.MODULE.cuda.cublas, "gemmEx", refuse)
        assert not minamp.cuda.is_bf16_supported()
    a = minamp.ones(2, 2).bfloat16().to("cuda")
    gpu.count.clear()
    with pytest.raises(
        RuntimeError,
        match=rf"^{name}: the GPU \(compute capability 7.5\) can't multiply bfloat16, Ampere \(8.0\) and newer can: use "
        "float16 with a GradScaler",
    ):
        PRODUCTS[name](a)
    assert not gpu.count["kernel"]
    assert (a + a).dtype == bfloat16  # what is no product is computed in float32 anyway
    assert PRODUCTS[name](a.half()).dtype == float16
