"""Datasets, samplers and the DataLoader as PyTorch's scripts use them; dtypes and structures are those of PyTorch 2.13."""

import collections
import functools

import numpy as np
import pytest

import minamp
import minamp.nn.functional as F
from minamp import data as course
from minamp import nn, optim
from minamp.data import digits
from minamp.record import observe
from minamp.restore import Snapshot
from minamp.utils import data
from minamp.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    random_split,
)

Point = collections.namedtuple("Point", "x y")
TEN = TensorDataset(minamp.arange(10), minamp.arange(10.0) * 2)


def plain(x):
    """A batch as plain values, each tensor as (dtype, values)."""
    if isinstance(x, minamp.Tensor):
        return str(x.dtype), x.tolist()
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return Point(*map(plain, x))
    return type(x)(map(plain, x)) if isinstance(x, tuple | list) else x


def loaded(*args, **options):
    return [plain(batch) for batch in DataLoader(*args, **options)]


def first_column(loader):
    return [batch[0].tolist() for batch in loader]


class Squares(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i, i * i


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


class StreamOfSeven(Stream):
    def __len__(self):
        return 7


# ------------------------------------------------------------------------------------------------------------------- datasets


def test_tensors_parts_and_rows_of_datasets():
    assert len(TEN) == 10 and plain(TEN[3]) == (("int64", 3), ("float32", 6.0))
    assert plain(TEN[[1, 2]])[0] == ("int64", [1, 2]) and plain(TEN[-1])[0] == ("int64", 9)
    part = Subset(TEN, [4, 2, 0])
    assert (
        len(part) == 3 and plain(part[1])[0] == ("int64", 2) and plain(part[[0, 2]])[0] == ("int64", [4, 0])
    )
    row = TEN + part
    assert isinstance(row, ConcatDataset) and len(row) == 13 and row.cumulative_sizes == [10, 13]
    assert [row[i][0].item() for i in (0, 9, 10, 12, -1, -13)] == [0, 9, 4, 0, 0, 0]
    assert [x[0].item() for x in row] == [*range(10), 4, 2, 0]


def test_random_split():
    for lengths, sizes in [
        ([7, 3], [7, 3]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([0.5, 0.25, 0.25], [6, 2, 2]),
        ([1.0], [10]),
    ]:
        parts = random_split(TEN, lengths)
        assert [len(p) for p in parts] == sizes and all(type(p) is Subset for p in parts)
        assert sorted(i for p in parts for i in p.indices) == list(range(10))
    a, b = (random_split(range(50), [25, 25], generator=minamp.Generator().manual_seed(1)) for _ in range(2))
    assert a[0].indices == b[0].indices != random_split(range(50), [25, 25])[0].indices
    with pytest.warns(
        UserWarning, match="random_split: of 2 samples part 1 gets none: give it a larger fraction"
    ):
        assert [len(p) for p in random_split(range(2), [0.9, 0.05, 0.05])] == [2, 0, 0]


def test_what_is_no_dataset():
    with pytest.raises(AssertionError, match=r"TensorDataset: tensors have different lengths \[3, 2\]: give"):
        TensorDataset(minamp.zeros(3), minamp.zeros(2))
    with pytest.raises(TypeError, match=r"TensorDataset: tensors\[1\] is a NumPy array, not a Tensor: use"):
        TensorDataset(minamp.zeros(3), np.zeros(3))
    with pytest.raises(TypeError, match=r"TensorDataset: tensors\[0\] is one number, 3: give a row for each"):
        TensorDataset(minamp.tensor(3))
    with pytest.raises(ValueError, match="TensorDataset: needs at least one tensor"):
        TensorDataset()
    with pytest.raises(AssertionError, match="ConcatDataset: got no dataset: give at least one"):
        ConcatDataset([])
    with pytest.raises(AssertionError, match="ConcatDataset: an IterableDataset can't be indexed"):
        Stream() + Stream()
    with pytest.raises(IndexError, match="ConcatDataset: index 20 is out of range: there are 20 samples"):
        (TEN + TEN)[20]
    with pytest.raises(ValueError, match="ConcatDataset: index -21 is out of range"):
        (TEN + TEN)[-21]
    for wrong in [7, 2], [0.7, 0.2], [11]:
        with pytest.raises(
            ValueError, match="random_split: lengths .* and there are 10 samples: give lengths"
        ):
            random_split(TEN, wrong)
    with pytest.raises(ValueError, match=r"random_split: lengths \[12, -2\] has a negative number"):
        random_split(TEN, [12, -2])
    with pytest.raises(TypeError, match="generator must be a Generator, got 42: use minamp.Generator"):
        random_split(TEN, [5, 5], generator=42)
    for base, words in [(Dataset, "__getitem__"), (IterableDataset, "__iter__"), (Sampler, "__iter__")]:
        with pytest.raises(NotImplementedError, match=f"Half: has no {words}"):
            half = type("Half", (base,), {})()
            half[0] if base is Dataset else next(iter(half))


# ------------------------------------------------------------------------------------------------------------------- samplers


def test_samplers():
    five = range(5)
    assert list(SequentialSampler(five)) == list(five)
    assert sorted(RandomSampler(five)) == list(five) and len(RandomSampler(five)) == 5
    twelve = list(RandomSampler(five, num_samples=12))
    assert len(twelve) == 12 and sorted(twelve[:5]) == sorted(twelve[5:10]) == list(five)
    drawn = list(RandomSampler(five, replacement=True, num_samples=200))
    assert len(drawn) == 200 and set(drawn) == set(five)
    assert sorted(SubsetRandomSampler([3, 5, 7])) == [3, 5, 7]
    assert list(WeightedRandomSampler([0.0, 0.0, 2.0], 4)) == [2] * 4
    assert sorted(WeightedRandomSampler(minamp.tensor([1.0, 2.0, 3.0]), 3, replacement=False)) == [0, 1, 2]
    counts = np.bincount(
        list(WeightedRandomSampler([1, 3], 4000, generator=minamp.Generator().manual_seed(0)))
    )
    assert abs(counts[1] / 4000 - 0.75) < 0.03
    assert list(BatchSampler(five, 2, False)) == [[0, 1], [2, 3], [4]]
    batches = BatchSampler(SequentialSampler(five), batch_size=2, drop_last=True)
    assert list(batches) == [[0, 1], [2, 3]] and len(batches) == 2
    assert all(type(i) is int for i in [*twelve, *RandomSampler(five), *SequentialSampler(five)])


@pytest.mark.parametrize(
    "sampler",
    [
        lambda g: RandomSampler(range(40), generator=g),
        lambda g: RandomSampler(range(40), True, generator=g),
        lambda g: SubsetRandomSampler(range(40), generator=g),
        lambda g: WeightedRandomSampler(np.ones(40), 30, generator=g),
        lambda g: WeightedRandomSampler(np.ones(40), 30, False, generator=g),
    ],
)
def test_orders_come_from_manual_seed_or_a_generator_and_are_new_each_time(sampler):
    def twice(generator=None):
        made = sampler(generator)
        return list(made), list(made)

    minamp.manual_seed(3)
    first, second = twice()
    assert first != second
    minamp.manual_seed(3)
    assert twice() == (first, second)
    assert twice(minamp.Generator().manual_seed(3)) == (first, second)
    before = minamp.get_rng_state()
    twice(minamp.Generator())
    assert minamp.get_rng_state() == before, "a generator of one's own leaves the thread's alone"


def test_what_no_sampler_does():
    for call, error, words in [
        (
            lambda: RandomSampler(range(5), replacement=1),
            TypeError,
            "replacement must be True or False, got 1",
        ),
        (
            lambda: RandomSampler(range(5), num_samples=0),
            ValueError,
            "num_samples must be a whole number of at",
        ),
        (lambda: RandomSampler([]), ValueError, "num_samples must be a whole number of at least 1, got 0"),
        (
            lambda: WeightedRandomSampler([1.0], 0),
            ValueError,
            "num_samples must be a whole number of at least 1",
        ),
        (lambda: WeightedRandomSampler([1.0], 1, 0), ValueError, "replacement must be True or False, got 0"),
        (lambda: WeightedRandomSampler([[1.0]], 1), ValueError, r"weights has shape \(1, 1\): give a vector"),
        (
            lambda: list(WeightedRandomSampler([-1.0, 1.0], 1)),
            RuntimeError,
            "must be finite and not negative",
        ),
        (
            lambda: BatchSampler(range(3), 2.0, False),
            ValueError,
            "batch_size must be a whole number .* got 2.0",
        ),
        (
            lambda: BatchSampler(range(3), True, False),
            ValueError,
            "batch_size must be a whole number .* got True",
        ),
        (lambda: BatchSampler(range(3), 2, "no"), ValueError, "drop_last must be True or False, got 'no'"),
    ]:
        with pytest.raises(error, match=words):
            call()


# -------------------------------------------------------------------------------------------------------------------- batches

COLLATED = [
    ([1.0, 2.0], ("float64", [1.0, 2.0])),
    ([1, 2], ("int64", [1, 2])),
    ([True, False], ("bool", [True, False])),
    ([1.0, 2], ("float64", [1.0, 2.0])),
    ([np.float32(1), np.float32(2)], ("float32", [1.0, 2.0])),
    ([np.float16(1)], ("float16", [1.0])),
    ([np.int32(1)], ("int32", [1])),
    ([np.bool_(1)], ("bool", [True])),
    ([np.arange(2.0), np.ones(2)], ("float64", [[0.0, 1.0], [1.0, 1.0]])),
    ([np.array(1, np.uint8)], ("uint8", [1])),
    ([np.arange(2, dtype=np.int32), np.ones(2, np.float32)], ("float32", [[0.0, 1.0], [1.0, 1.0]])),
    ([minamp.ones(2).half()], ("float16", [[1.0, 1.0]])),
    ([minamp.tensor(1), minamp.tensor(2)], ("int64", [1, 2])),
    (["a", "b"], ["a", "b"]),
    ([b"a"], [b"a"]),
    ([("a", 1), ("b", 2)], [("a", "b"), ("int64", [1, 2])]),
    ([[1, 2.0], [3, 4.0]], [("int64", [1, 3]), ("float64", [2.0, 4.0])]),
    ([Point(1, 2), Point(3, 4)], Point(("int64", [1, 3]), ("int64", [2, 4]))),
    ([{"a": 1, "b": ("s", [2])}], {"a": ("int64", [1]), "b": [("s",), [("int64", [2])]]}),
    ([{"a": 1}, {"a": 2, "more": 3}], {"a": ("int64", [1, 2])}),
    ([(), ()], []),
]


@pytest.mark.parametrize("batch, wanted", COLLATED, ids=[str(b).replace("\n", "") for b, _ in COLLATED])
def test_what_samples_become(batch, wanted):
    assert plain(default_collate(batch)) == wanted


def test_dicts_keep_their_class():
    made = default_collate([collections.OrderedDict(a=1)]), default_collate([collections.UserDict(a=1)])
    assert [type(m) for m in made] == [collections.OrderedDict, collections.UserDict]


def test_a_batch_of_tensors_passes_gradients_on():
    x, y = (minamp.ones(2, requires_grad=True) for _ in range(2))
    (default_collate([x, y]) * minamp.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0] and y.grad.tolist() == [3.0, 4.0]
    (batch,) = DataLoader(TensorDataset(x), 2)
    batch[0].sum().backward()
    assert x.grad.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    "batch, error, words",
    [
        ([{"x": np.ones(2)}, {"x": np.ones(2)}, {"x": np.ones(3)}], RuntimeError,
         r"batch\[0\]\['x'\] has shape \(2,\), batch\[2\]\['x'\] \(3,\): pad or crop .* or give the DataLoader"),
        ([Point(1, minamp.ones(2)), Point(1, minamp.ones(1))], RuntimeError, r"batch\[0\].y has .* batch\[1\].y \(1,\)"),
        ([(1, [1, 2]), (1, [1])], RuntimeError, r"batch\[0\]\[1\] has 2 entries, batch\[1\]\[1\] 1: give as many"),
        ([(1, None)], TypeError, r"batch\[0\]\[1\] is None: give tensors, arrays of numbers, numbers, strings"),
        ([np.array(["a"])], TypeError, r"batch\[0\] is array\(\['a'\]"),
        ([minamp.ones(2), 1.0], TypeError, r"batch\[0\] is a Tensor, batch\[1\] a float: give tensors only"),
        ([{"a": 1}, {"b": 1}], KeyError, "a"),
    ],
)  # fmt: skip
def test_what_makes_no_batch(batch, error, words):
    with pytest.raises(error, match=words):
        default_collate(batch)


def test_a_sample_alone_is_converted():
    sample = {"a": np.zeros(2, np.float32), "b": (np.float32(1), "s", 3, None), "c": Point([np.int64(1)], 2)}
    made = default_convert(sample)
    assert plain(made) == {
        "a": ("float32", [0.0, 0.0]),
        "b": [("float32", 1.0), "s", 3, None],
        "c": Point([("int64", 1)], 2),
    }


# ----------------------------------------------------------------------------------------------------------------- DataLoader


def test_batches_in_order():
    assert loaded(TEN, batch_size=4)[2] == [("int64", [8, 9]), ("float32", [16.0, 18.0])]
    assert first_column(DataLoader(TEN, 4, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loaded(TEN)[0] == [("int64", [0]), ("float32", [0.0])]
    assert loaded(Squares(3), 2) == [[("int64", [0, 1]), ("int64", [0, 1])], [("int64", [2]), ("int64", [4])]]
    assert loaded([(1, 2.0), (3, 4.0)], 2) == [[("int64", [1, 3]), ("float64", [2.0, 4.0])]]
    assert loaded(minamp.arange(4).reshape(2, 2), 2) == [("int64", [[0, 1], [2, 3]])]
    assert [len(DataLoader(TEN, *args)) for args in [(4,), (20,), (None,)]] == [3, 1, 10]
    assert len(DataLoader(TEN, 4, drop_last=True)) == 2 and len(iter(DataLoader(TEN, 4))) == 3
    assert loaded([]) == [] and data.get_worker_info() is None and minamp.utils.data is data


def test_single_samples():
    assert loaded(TEN, batch_size=None)[3] == [("int64", 3), ("float32", 6.0)]
    in_bulk = DataLoader(TEN, batch_size=None, sampler=BatchSampler(SequentialSampler(TEN), 4, False))
    assert first_column(in_bulk) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert loaded(Squares(2), None, collate_fn=sum) == [0, 2]


def test_shuffling():
    loader = DataLoader(TEN, 4, shuffle=True)
    minamp.manual_seed(0)
    first, second = first_column(loader), first_column(loader)
    assert first != second and sorted(sum(first, [])) == list(range(10))
    minamp.manual_seed(0)
    assert [first_column(loader), first_column(loader)] == [first, second]
    assert first_column(DataLoader(TEN, 4, True, generator=minamp.Generator().manual_seed(0))) == first
    for x, y in loader:
        assert (y == 2 * x).all()


def test_samplers_of_a_loader():
    assert first_column(DataLoader(TEN, 2, sampler=[5, 1, 1])) == [[5, 1], [1]]
    assert first_column(DataLoader(TEN, batch_sampler=[[5, 1], [7], np.array([2, 3])])) == [
        [5, 1],
        [7],
        [2, 3],
    ]
    assert first_column(DataLoader(TEN, 2, sampler=minamp.tensor([3, -1]))) == [[3, 9]]
    assert len(DataLoader(TEN, batch_sampler=[[5, 1], [7]])) == 2

    class Endless(Sampler[int]):
        def __iter__(self):
            while True:
                yield 3

    batches = iter(DataLoader(TEN, 2, sampler=Endless()))
    assert [next(batches)[0].tolist() for _ in range(20)] == [[3, 3]] * 20
    with pytest.raises(TypeError, match="has no len"):
        len(DataLoader(TEN, 2, sampler=Endless()))


@pytest.mark.parametrize(
    "indices", [[4, 2, 0], np.array([4, 2, 0]), minamp.tensor([4, 2, 0]), range(4, -1, -2)]
)
def test_parts_of_datasets(indices):
    assert first_column(DataLoader(Subset(TEN, indices), 2)) == [[4, 2], [0]]
    assert first_column(DataLoader(Subset(Subset(TEN, indices), [2, 0]), 2)) == [[0, 4]]
    assert first_column(DataLoader(Subset(Squares(9), indices), 2)) == [[4, 2], [0]]


def test_whole_rows_are_read_only_where_that_is_the_same():
    class Doubled(TensorDataset):
        def __getitem__(self, i):
            return tuple(2 * t for t in super().__getitem__(i))

    class Changed(Subset):
        def __getitem__(self, i):
            return (100 + super().__getitem__(i)[0],)

    class InOneGo(Squares):
        def __getitems__(self, indices):
            return [-i for i in indices]

    assert first_column(DataLoader(Doubled(minamp.arange(3)), 2)) == [[0, 2], [4]]
    assert first_column(DataLoader(Changed(TEN, [4, 2, 0]), 2)) == [[104, 102], [100]]
    assert loaded(Subset(InOneGo(9), [4, 2]), 2) == [("int64", [-4, -2])]
    batches = loaded(TEN, 5, collate_fn=lambda samples: [len(samples), type(samples[0])])
    assert batches == [[5, tuple]] * 2


def test_loading_is_no_op_that_watchers_see():
    seen, rows = [], [minamp.ones(2), minamp.zeros(2)]
    with observe(lambda *call: seen.append(call)):
        for loader in DataLoader(TEN, 4), DataLoader(Subset(TEN, [3, 1]), 2), DataLoader(rows, 2):
            list(loader)
    assert not seen


def test_streams():
    assert loaded(Stream(), 3) == [("int64", [0, 1, 2]), ("int64", [3, 4, 5]), ("int64", [6])]
    assert loaded(Stream(), 3, drop_last=True, shuffle=False) == loaded(Stream(), 3)[:2]
    assert loaded(Stream(), batch_size=None) == list(range(7))
    assert [len(DataLoader(StreamOfSeven(), b)) for b in (3, 7, None)] == [3, 1, 7]
    with pytest.raises(TypeError, match="has no len"):
        len(DataLoader(Stream(), 3))
    for options in {"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}:
        with pytest.raises(ValueError, match="an IterableDataset comes in its own order: leave out shuffle"):
            DataLoader(Stream(), **options)


def test_what_excludes_each_other():
    with pytest.raises(ValueError, match="DataLoader: sampler and shuffle exclude each other"):
        DataLoader(TEN, shuffle=True, sampler=[1])
    for options in {"batch_size": 2}, {"shuffle": True}, {"sampler": [1]}, {"drop_last": True}:
        with pytest.raises(
            ValueError, match="batch_sampler says the batches itself: leave out batch_size, shuffle"
        ):
            DataLoader(TEN, batch_sampler=[[1]], **options)
    with pytest.raises(ValueError, match=r"without batches \(batch_size=None\) drop_last drops nothing"):
        DataLoader(TEN, None, drop_last=True)
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got 0"):
        DataLoader(TEN, 0)
    with pytest.raises(ValueError, match="DataLoader: batch_size can't be changed any more: make a new"):
        DataLoader(TEN).batch_size = 3
    with pytest.raises(TypeError, match="generator must be a Generator, got 42"):
        iter(DataLoader(TEN, shuffle=True, generator=42))


def test_workers_and_pinned_memory_are_accepted_and_change_nothing():
    def start(worker):
        raise AssertionError("there are no workers")

    loader = DataLoader(
        TEN, 4, num_workers=4, pin_memory=True, timeout=5, worker_init_fn=start, multiprocessing_context="spawn",
        prefetch_factor=2, persistent_workers=True, pin_memory_device="cuda", in_order=False,
    )  # fmt: skip
    assert first_column(loader) == first_column(DataLoader(TEN, 4))
    assert loader.num_workers == 4 and loader.pin_memory and loader.dataset is TEN and loader.batch_size == 4


def test_several_ways_through_one_loader_and_its_end():
    loader = DataLoader(TEN, 5)
    a, b = iter(loader), iter(loader)
    assert [next(i)[0][0].item() for i in (a, b, a, b)] == [0, 0, 5, 5]
    assert next(a, "end") == next(a, "end") == "end"


# ----------------------------------------------------------------------------------------------------------- what is undone


def drawing(batches):
    """A training step that asks `batches` for its data, and what the doctor wants to know of it."""
    model = nn.Linear(1, 1)
    optimizer, scaler = optim.SGD(model.parameters(), 1e-3), minamp.GradScaler()

    def step():
        x, y = next(batches)
        optimizer.zero_grad()
        with minamp.autocast():
            loss = F.mse_loss(model(x[:, None].float()), y[:, None])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step, {"model": model, "optimizer": optimizer, "scaler": scaler}


FORTY = TensorDataset(minamp.arange(40), minamp.arange(40.0))
LOADERS = {
    "shuffled": lambda: DataLoader(FORTY, 2, shuffle=True),
    "generator": lambda: DataLoader(FORTY, 2, shuffle=True, generator=minamp.Generator().manual_seed(1)),
    "in order": lambda: DataLoader(FORTY, 2),
    "part": lambda: DataLoader(random_split(FORTY, [20, 20])[0], 2, shuffle=True),
    "weights": lambda: DataLoader(FORTY, 2, sampler=WeightedRandomSampler([1.0] * 40, 40)),
    "to be resumed": lambda: course.DataLoader(FORTY, 2, shuffle=True),
}


@pytest.mark.parametrize("examine", [minamp.doctor, functools.partial(minamp.verify_amp, rounds=1)])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_batch_after_an_examination_is_the_one_that_would_have_come(kind, examine):
    left = []
    for examined in False, True:
        minamp.manual_seed(5)
        loader = LOADERS[kind]()
        batches = iter(loader)
        next(batches)
        step, parts = drawing(batches)
        if examined:
            examine(step, **parts)
        left.append([first_column(batches), first_column(loader), vars(loader).get("epoch")])
    assert left[0] == left[1] and len(left[0][0]) == len(loader) - 1


# --------------------------------------------------------------------------------------------- scripts, as their users write them


def test_digits_as_the_tutorials_train_them():
    minamp.manual_seed(0)
    raw = digits("train")
    dataset = TensorDataset(minamp.from_numpy(raw.images[:1200]), minamp.from_numpy(raw.labels[:1200]))
    train_set, val_set = random_split(dataset, [0.8, 0.2], generator=minamp.Generator().manual_seed(42))
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True, num_workers=2, pin_memory=True)
    val_loader = DataLoader(val_set, batch_size=100)
    assert len(train_loader.dataset) == 960 and len(train_loader) == 15 and len(val_loader) == 3

    device = minamp.device("cpu")
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    scaler = minamp.amp.GradScaler("cuda")
    losses = []
    for _epoch in range(3):
        model.train()
        running_loss = 0.0
        for _batch_idx, (images, labels) in enumerate(train_loader):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with minamp.autocast(device_type="cuda", dtype=minamp.float16):
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            running_loss += loss.item() * images.size(0)
        losses.append(running_loss / len(train_loader.dataset))
    model.eval()
    correct = 0
    with minamp.no_grad():
        for images, labels in val_loader:
            correct += (model(images).argmax(dim=1) == labels).sum().item()
    assert losses[2] < losses[0] / 3 and correct / len(val_loader.dataset) > 0.8


def test_sentences_of_different_lengths_with_a_collate_fn():
    """Does the sum of a sequence's numbers exceed its length? Padded by hand, with a mask."""

    class Sequences(Dataset):
        def __init__(self, n, seed):
            rng = np.random.default_rng(seed)
            self.sequences = [rng.uniform(0, 2, rng.integers(3, 9)).astype(np.float32) for _ in range(n)]

        def __len__(self):
            return len(self.sequences)

        def __getitem__(self, idx):
            x = self.sequences[idx]
            return {"x": minamp.tensor(x), "label": float(x.mean() > 1), "id": f"sequence {idx}"}

    def collate_fn(batch):
        longest = max(len(item["x"]) for item in batch)
        x, mask = minamp.zeros(len(batch), longest), minamp.zeros(len(batch), longest)
        for i, item in enumerate(batch):
            x[i, : len(item["x"])] = item["x"]
            mask[i, : len(item["x"])] = 1
        labels = minamp.tensor([item["label"] for item in batch])
        return {"x": x, "mask": mask, "label": labels, "id": [item["id"] for item in batch]}

    minamp.manual_seed(1)
    dataset = Sequences(300, 0)
    with pytest.raises(
        RuntimeError, match=r"batch\[0\]\['x'\] has shape .* give the DataLoader a collate_fn"
    ):
        next(iter(DataLoader(dataset, batch_size=16)))
    loader = DataLoader(dataset, batch_size=16, shuffle=True, collate_fn=collate_fn, drop_last=True)
    model = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = optim.Adam(model.parameters(), lr=2e-2)
    seen, losses = set(), []
    for _ in range(12):
        total = 0.0
        for batch in loader:
            seen.update(batch["id"])
            scores = model(batch["x"].unsqueeze(-1)).squeeze(-1) * batch["mask"]
            loss = F.binary_cross_entropy_with_logits(scores.sum(1), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(loader))
    assert len(loader) == 18 and len(seen) == 300 and losses[-1] < losses[0] / 2


def test_the_data_itself_is_not_copied_by_who_undoes_a_step():
    images, mean = minamp.zeros(1000, 100), np.zeros(3)
    batches = iter(DataLoader(Subset(TensorDataset(images), [1, 2, 3]), 2))
    before = Snapshot(step=lambda: (next(batches), mean))
    assert {path: a.shape for path, a, _ in before.arrays if a.size == 100_000} == {}
    assert any(a is mean for _, a, _ in before.arrays)
