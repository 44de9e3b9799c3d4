"""The digits and the loader."""

import numpy as np
import pytest

from minamp import Tensor
from minamp.data import DIGITS, DataLoader, digits


def test_the_split_is_stratified_fixed_and_disjoint():
    train, test = digits()
    assert train.images.shape == (4000, 1, 28, 28) and test.images.shape == (1000, 1, 28, 28)
    assert train.images.dtype == np.float32 and train.labels.dtype == np.int64
    assert (np.bincount(train.labels) == 400).all() and (np.bincount(test.labels) == 100).all()
    assert len({a.tobytes() for a in np.concatenate([train.images, test.images])}) == 5000
    again = digits("train")
    assert np.array_equal(again.images, train.images) and np.array_equal(again.labels, train.labels)
    assert len(set(train.labels[:50])) > 5  # not sorted by class


def test_normalisation_uses_the_training_split():
    train, test = digits()
    assert (
        abs(train.images.mean(dtype=np.float64)) < 1e-6 and abs(train.images.std(dtype=np.float64) - 1) < 1e-6
    )
    assert abs(test.images.mean(dtype=np.float64)) > 1e-4
    raw = digits("test", normalize=False).images
    assert raw.min() == 0 and raw.max() == 1


def test_a_missing_or_damaged_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone.npz is missing: reinstall minamp"):
        digits(path=tmp_path / "gone.npz")
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(DIGITS.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged.npz is damaged: its sha256 is .* reinstall minamp"):
        digits(path=damaged)
    with pytest.raises(ValueError, match="split must be 'train', 'test' or None, got 'valid'"):
        digits("valid")


def numbers(loader):
    return [batch.tolist() for (batch,) in loader]


def test_batches():
    loader = DataLoader((np.arange(10),), batch_size=4)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and len(loader) == 3
    assert numbers(DataLoader((np.arange(10),), 4, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(isinstance(t, Tensor) for batch in loader for t in batch)
    x, y = next(iter(DataLoader(digits("train"), batch_size=32, shuffle=True)))
    assert x.shape == (32, 1, 28, 28) and y.shape == (32,)


def test_shuffling_is_seeded_and_new_each_epoch():
    a, b = (DataLoader((np.arange(20),), 5, shuffle=True, seed=3) for _ in range(2))
    first, second = numbers(a), numbers(a)
    assert first != second and sorted(sum(second, [])) == list(range(20))
    assert [numbers(b), numbers(b)] == [first, second]
    assert numbers(DataLoader((np.arange(20),), 5, shuffle=True, seed=4)) != first


def test_resume_in_the_middle_of_an_epoch():
    whole = DataLoader((np.arange(20),), 5, shuffle=True)
    numbers(whole)
    second = numbers(whole)
    broken = DataLoader((np.arange(20),), 5, shuffle=True)
    numbers(broken)
    running = iter(broken)
    next(running), next(running)
    resumed = DataLoader((np.arange(20),), 5, shuffle=True)
    resumed.load_state_dict(broken.state_dict())
    assert numbers(resumed) == second[2:]
    assert numbers(resumed) == numbers(whole)


def test_a_loop_left_by_break_is_followed_by_a_whole_new_epoch():
    loader = DataLoader((np.arange(6),), 2, shuffle=True)
    for _ in loader:
        break
    assert len(numbers(loader)) == 3 and loader.epoch == 2


def test_errors():
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got 0"):
        DataLoader((np.arange(3),), batch_size=0)
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got 2.5"):
        DataLoader((np.arange(3),), batch_size=2.5)
    with pytest.raises(TypeError, match=r"dataset is a bare array of shape \(3,\): give a tuple, \(array,\)"):
        DataLoader(np.arange(3))
    with pytest.raises(ValueError, match="at least one tensor: give TensorDataset"):
        DataLoader(())
    with pytest.raises(ValueError, match="the dataset is empty"):
        DataLoader((np.arange(0),))
    with pytest.raises(AssertionError, match=r"different lengths \[3, 2\]"):
        DataLoader((np.arange(3), np.arange(2)))
