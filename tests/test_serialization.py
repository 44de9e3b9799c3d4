"""Checkpoints: what is saved comes back bit for bit, damage is named, an interrupted save leaves the old file."""

import enum
import io
import json
import os
import pickle
import threading
import zipfile
from collections import OrderedDict, defaultdict, namedtuple

import ml_dtypes
import numpy as np
import pytest
import standin

import minamp
from minamp import nn, optim, serialization
from minamp.data import DataLoader, digits

f16, f32 = np.float16, np.float32


def bits(x):
    """Everything about a value that a round trip must keep, as something that == compares."""
    if isinstance(x, minamp.Tensor):
        return "Tensor", bits(x.detach().numpy()), x.requires_grad
    if isinstance(x, np.ndarray | np.generic):
        return type(x), x.dtype.str, x.dtype.name, x.shape, x.tobytes()
    if isinstance(x, float):
        return float, np.float64(x).tobytes()
    if isinstance(x, dict):
        return type(x), [(bits(k), bits(v)) for k, v in x.items()]
    if isinstance(x, list | tuple):
        return type(x), [bits(v) for v in x]
    return type(x), x


def round_trip(x, tmp_path):
    minamp.save(x, tmp_path / "state.minamp")
    return minamp.load(tmp_path / "state.minamp")


# -- round trips


@pytest.mark.parametrize("dtype", serialization.DTYPES.values(), ids=str)
def test_arrays_tensors_and_scalars_of_every_dtype_keep_every_bit(dtype, tmp_path):
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, 1024 * dtype.itemsize, np.uint8)
    # Random bits: subnormals, infinities, nans of every payload.
    a = (raw & 1 if dtype.kind == "b" else raw).view(dtype)
    state = [
        a, a.reshape(32, 32).T, a[::3], a[5].reshape(()), a[7], a[:0].reshape(0, 4),
        minamp.Tensor(a), minamp.Tensor(a[9].reshape(())),
    ]  # fmt: skip
    got = round_trip(state, tmp_path)
    assert bits(got) == bits(state)
    got[0][:] = got[0][::-1].copy()  # and it is memory of one's own


def test_all_half_patterns_come_back(tmp_path):
    every = np.arange(65536, dtype=np.uint16)
    for dtype in (minamp.float16, minamp.bfloat16):
        assert np.array_equal(round_trip(every.view(dtype), tmp_path).view(np.uint16), every)


def test_plain_values_and_containers(tmp_path):
    state = {
        "ints": [0, -1, 2**53, 2**63, 2**127 + 1, -(10**5000)],
        "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, float("inf"), float("-inf"), float("nan"), 1.0],
        "nan with a payload": float(np.uint64(0x7FF80000DEADBEEF).view(np.float64)),
        "others": (True, False, None, "", "text \u00e9 \U0001f600 \udc80", ()),
        "order": OrderedDict([("b", 1), ("a", {}), (7, [])]),
        3: "an int key", "3": "a string key", -(2**100): 0,
        "dict": {"dict": {"tensor": 0, "dtype": "x"}, "format": "minamp checkpoint"},  # looks like our own marks
        "big-endian": np.arange(3, dtype=">f4"),
    }  # fmt: skip
    assert bits(round_trip(state, tmp_path)) == bits(state)
    for alone in (None, 3, "x", [], np.float32(1), minamp.ones(2)):
        assert bits(round_trip(alone, tmp_path)) == bits(alone)


def test_parameters_come_back_as_leaf_tensors_and_history_is_dropped(tmp_path):
    p = nn.Parameter(np.ones(3, f32))
    frozen = nn.Parameter(np.ones(2, f16), requires_grad=False)
    got = round_trip([p, frozen, p * 2, p.detach()], tmp_path)
    assert [type(t) for t in got] == [minamp.Tensor] * 4
    assert [t.requires_grad for t in got] == [True, False, True, False] and all(t.is_leaf for t in got)


def test_load_takes_torchs_arguments(tmp_path):
    state = {"w": minamp.ones(2), "steps": [np.arange(2)]}
    minamp.save(state, tmp_path / "c")
    for device in (None, "cpu", minamp.device("cpu")):
        assert bits(minamp.load(tmp_path / "c", map_location=device, weights_only=False)) == bits(state)
    with standin.installed():
        got = minamp.load(tmp_path / "c", "cuda")
        assert (
            got["w"].is_cuda and type(got["steps"][0]) is np.ndarray and got["w"].cpu().tolist() == [1.0, 1.0]
        )
    for function in (lambda storage, loc: storage, {"cuda:0": "cpu"}):
        with pytest.raises(TypeError, match="map_location must be a device such as 'cpu'"):
            minamp.load(tmp_path / "c", map_location=function)


def test_rng_states_are_128_bit_integers(tmp_path):
    minamp.manual_seed(5)
    minamp.rand(3)
    state = minamp.get_rng_state()
    assert state["state"]["state"] > 2**64
    wanted = minamp.rand(4).tolist()
    minamp.set_rng_state(round_trip(state, tmp_path))
    assert minamp.rand(4).tolist() == wanted


# -- what save refuses


Pair = namedtuple("Pair", "a b")


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {"model": [0, 1, 2, lambda: 0]},
            r"state\['model'\]\[3\]: a function; .*: leave it out or convert it",
        ),
        ({1: (object(),)}, r"state\[1\]\[0\]: a object"),
        ({"net": nn.Linear(1, 1)}, r"state\['net'\]: a Linear; .*: save its state_dict\(\)"),
        ({"a": {1, 2}}, r"state\['a'\]: a set"),
        (b"bytes", "store state: a bytes"),
        ([defaultdict(int)], r"state\[0\]: a defaultdict"),
        ([Pair(1, 2)], r"state\[0\]: a Pair"),
        ([Color.RED], r"state\[0\]: a Color"),
        ({"a": {True: 1}}, r"state\['a'\]: the key True is a bool: use str or int keys"),
        ({(1, 2): 1}, r"store state: the key \(1, 2\) is a tuple"),
        (
            [np.array([None])],
            r"state\[0\]: an array of dtype object; stored are bool, .*: convert it with astype",
        ),
        ([np.array(["a"])], r"state\[0\]: an array of dtype str32"),
        ([np.zeros(2, "M8[s]")], r"state\[0\]: an array of dtype datetime64\[s\]"),
        ([np.ma.masked_array([1.0])], r"state\[0\]: a MaskedArray"),
    ],
)
def test_save_names_the_place_of_what_it_cant_store_and_keeps_the_old_file(state, text, tmp_path):
    path = tmp_path / "state.minamp"
    minamp.save("old", path)
    with pytest.raises(TypeError, match=text):
        minamp.save(state, path)
    assert minamp.load(path) == "old" and os.listdir(tmp_path) == ["state.minamp"]


def test_save_names_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="save: the folder .*nowhere does not exist: create it first"):
        minamp.save(1, tmp_path / "nowhere" / "state.minamp")


# -- an interrupted save


@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", ["write_array", "fsync", "replace"])
@pytest.mark.parametrize("old", [True, False])
def test_a_failing_save_leaves_the_old_file_and_no_other(failure, moment, old, tmp_path, monkeypatch):
    path, calls = tmp_path / "state.minamp", []
    if old:
        minamp.save("old", path)
    where = np.lib.format if moment == "write_array" else os
    real = getattr(where, moment)

    def fail(*args, **kwargs):
        calls.append(sorted(os.listdir(tmp_path)))
        # the second array: half of the file is written
        if len(calls) == (2 if moment == "write_array" else 1):
            raise failure
        return real(*args, **kwargs)

    monkeypatch.setattr(where, moment, fail)
    with pytest.raises(type(failure)):
        minamp.save([np.zeros(5000), np.ones(5000)], path)
    monkeypatch.undo()
    # it was on its way, beside the old file
    assert len(calls[-1]) == 1 + old and calls[-1][-1].endswith(".part")
    assert os.listdir(tmp_path) == ["state.minamp"] * old
    assert not old or minamp.load(path) == "old"


def test_the_file_is_on_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    path, log = tmp_path / "state.minamp", []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (log.append(("fsync", os.fstat(fd).st_size)), fsync(fd)))
    monkeypatch.setattr(
        os, "replace", lambda a, b: (log.append(("replace", os.path.getsize(a))), replace(a, b))
    )
    minamp.save(np.zeros(100), path)
    size = path.stat().st_size
    assert log == [("fsync", size), ("replace", size)]


def test_a_symbolic_link_stays_one(tmp_path):
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "runs" / "7.minamp")
    minamp.save(7, link)
    assert link.is_symlink() and minamp.load(tmp_path / "runs" / "7.minamp") == 7 == minamp.load(str(link))


def test_threads_saving_to_one_path_leave_one_whole_file(tmp_path):
    path = tmp_path / "state.minamp"
    threads = [threading.Thread(target=minamp.save, args=([np.full(999, i)] * 5, path)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    values = {v for a in minamp.load(path) for v in a.tolist()}
    assert len(values) == 1 and os.listdir(tmp_path) == ["state.minamp"]


# -- what load refuses


def zip_of(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def checkpoint_with(path, **changes):
    document = {"format": "minamp checkpoint", "version": 1, "content": None, **changes}
    zip_of(path, {"checkpoint.json": json.dumps(document)})


def refused(path, text):
    with pytest.raises(ValueError, match=text) as caught:
        minamp.load(path)
    assert str(path) in str(caught.value)


def test_load_refuses_what_is_no_checkpoint_by_name(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError, match="load: .*file does not exist: give the path of a file"):
        minamp.load(path)
    with pytest.raises(FileNotFoundError, match="is a folder: give the path of a file"):
        minamp.load(tmp_path)
    path.write_bytes(b"")
    refused(path, "is empty: take another copy or an older checkpoint")
    path.write_text("lr: 0.1")
    refused(path, r"is not a checkpoint \(it starts with b'lr: '\): give a file that minamp.save has written")
    path.write_bytes(pickle.dumps({"a": 1}))
    refused(
        path,
        "is a pickle .*, which is never opened because it can run any code: .* NumPy arrays and minamp.save",
    )
    zip_of(path, {"readme.txt": "hello"})
    refused(path, "is a zip file but not a checkpoint: give a file that minamp.save has written")
    zip_of(path, {"checkpoint.json": "[1]"})
    refused(path, "is a zip file but not a checkpoint")
    zip_of(path, {"archive/data.pkl": pickle.dumps(0), "archive/version": "3"})  # the layout of a .pt file
    refused(
        path, "was written by torch.save, .* never opened .*: in torch, turn its tensors into NumPy arrays"
    )
    checkpoint_with(path, version=2)
    refused(path, r"by a newer minamp \(checkpoint format 2, this one reads up to 1\): update minamp")


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("the file was unpickled",)


def test_nothing_is_ever_unpickled(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps(Bomb()))
    refused(path, "is a pickle")
    np.save(tmp_path / "object.npy", np.array([Bomb()], object), allow_pickle=True)
    document = {"format": "minamp checkpoint", "version": 1, "content": {"array": 0, "dtype": "float32"}}
    npy = (tmp_path / "object.npy").read_bytes()
    zip_of(path, {"checkpoint.json": json.dumps(document), "arrays/0.npy": npy})
    refused(path, "damaged .*Object arrays cannot be loaded")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"code": "x"}, "unknown kind 'code'"),
        ({"array": 0, "dtype": "object"}, "KeyError: 'object'"),
        ({"array": 0, "dtype": "float64"}, r"arrays/0.npy has dtype float32, not float64"),
        ({"array": 0, "dtype": "bfloat16"}, r"arrays/0.npy has dtype float32, not bfloat16"),
        ({"array": 1, "dtype": "float32"}, "no item named 'arrays/1.npy'"),
        ({"tensor": 0, "dtype": "float32"}, "KeyError: 'requires_grad'"),
        ({}, "StopIteration"),
    ],
)
def test_a_structure_that_save_would_not_write_is_damage(content, text, tmp_path):
    path = tmp_path / "file"
    np.save(tmp_path / "a.npy", np.ones(2, f32))
    document = {"format": "minamp checkpoint", "version": 1, "content": content}
    npy = (tmp_path / "a.npy").read_bytes()
    zip_of(path, {"checkpoint.json": json.dumps(document), "arrays/0.npy": npy})
    refused(path, "is truncated or damaged .*" + text + ".*: take another copy or an older checkpoint")


def small_checkpoint(path):
    state = {"w": minamp.Tensor(np.arange(6, dtype=minamp.bfloat16)), "big": 2**100, "t": (1.5, None, "x")}
    minamp.save(state, path)
    return state, path.read_bytes()


def test_truncations_are_refused(tmp_path):
    path = tmp_path / "file"
    _, data = small_checkpoint(path)
    for n in range(1, len(data), 2):
        path.write_bytes(data[:n])
        refused(path, "is truncated or damaged .*: take another copy or an older checkpoint")


def test_every_changed_byte_is_refused_or_harmless(tmp_path):
    path = tmp_path / "file"
    state, data = small_checkpoint(path)
    want, harmless = bits(state), set()
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
        try:
            got = minamp.load(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert bits(got) == want
            harmless.add(i)
    assert harmless, "the times and versions in the zip's own tables don't matter"
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            content = archive.read(info)
            start = data.index(content)
            assert not harmless & set(range(start, start + len(content))), "contents are under a checksum"


def test_the_same_state_gives_the_same_bytes(tmp_path):
    assert small_checkpoint(tmp_path / "a")[1] == small_checkpoint(tmp_path / "b")[1]


# -- resuming


class Run:
    """A small training run with everything in it that has a state."""

    def __init__(self, dtype, make):
        minamp.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(49, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10)).to(dtype)
        self.optimizer = make(self.model.parameters())
        self.scaler = minamp.GradScaler(init_scale=2.0**10, growth_interval=7)
        images = digits("train").images[:200, 0, ::4, ::4].reshape(200, 49)
        labels = digits("train").labels[:200]
        self.loader = DataLoader((images, labels), 16, shuffle=True, seed=3)  # 13 batches an epoch
        self.log, self.step = [], 0

    def train(self, until):
        while self.step < until:
            for x, y in self.loader:
                self.one_step(x, y)
                if self.step == until:
                    break

    def one_step(self, x, y):
        with minamp.autocast(dtype=minamp.bfloat16):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.step in (4, 15):  # an overflow, before and after the checkpoint
            self.model[0].weight.grad[0, 0] = np.inf
        stepped = self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        self.log.append((loss.item(), stepped, self.scaler.get_scale()))

    PARTS = ("model", "optimizer", "scaler", "loader")

    def state_dict(self):
        parts = {name: getattr(self, name).state_dict() for name in self.PARTS}
        return {**parts, "rng": minamp.get_rng_state(), "step": self.step}

    def load_state_dict(self, state):
        for name in self.PARTS:
            getattr(self, name).load_state_dict(state[name])
        minamp.set_rng_state(state["rng"])
        self.step = state["step"]


RUNS = {
    "SGD": (f32, lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9)),
    "Adam": (f32, lambda ps: optim.Adam(ps, lr=3e-3, amsgrad=True)),
    "master": (f16, lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, master_weights=True)),
    "stochastic": (ml_dtypes.bfloat16, lambda ps: optim.AdamW(ps, lr=3e-3, write_back="stochastic")),
    "kahan": (ml_dtypes.bfloat16, lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, write_back="kahan")),
}


@pytest.mark.parametrize("name", RUNS)
def test_bug13_ten_steps_save_load_ten_steps_are_twenty_steps(name, tmp_path):
    straight = Run(*RUNS[name])
    straight.train(20)
    assert [stepped for _, stepped, _ in straight.log].count(None) == 2
    assert [scale for *_, scale in straight.log] == [2.0**10] * 4 + [2.0**9] * 7 + [2.0**10] * 4 + [
        2.0**9
    ] * 5

    first = Run(*RUNS[name])
    first.train(10)
    minamp.save(first.state_dict(), tmp_path / "half-way.minamp")
    second = Run(*RUNS[name])  # fresh objects, then other random numbers than the saved ones
    minamp.manual_seed(99)
    second.load_state_dict(minamp.load(tmp_path / "half-way.minamp"))
    second.train(20)

    assert first.log + second.log == straight.log
    assert bits(second.state_dict()) == bits(straight.state_dict())


def test_open_files_are_written_and_read(tmp_path):
    state = {"w": minamp.ones(2), "epoch": 3}
    memory = io.BytesIO()
    minamp.save(state, memory)
    memory.seek(0)
    with open(tmp_path / "state", "wb") as file:
        minamp.save(state, file)
    with open(tmp_path / "state", "rb") as file:
        for found in (minamp.load(memory), minamp.load(file), minamp.load(tmp_path / "state")):
            assert found["w"].tolist() == [1, 1] and found["epoch"] == 3
    with pytest.raises(ValueError, match="load: BytesIO is empty"):
        minamp.load(io.BytesIO())
    with pytest.raises(ValueError, match="load: BytesIO is truncated or damaged"):
        minamp.load(io.BytesIO(memory.getvalue()[:100]))
