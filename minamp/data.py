"""The 5,000 real handwritten digits that come with the package, and a loader of seeded batches.

The digits are a subset of MNIST (LeCun, Cortes, Burges; CC BY-SA 3.0); assets/NOTICE.md says where they come from.
"""

import hashlib
from pathlib import Path

import numpy as np

from minamp.tensor import Tensor

DIGITS = Path(__file__).parent / "assets" / "mnist5k.npz"
SHA256 = "246e0c30eeea57c8d0037d3f38c8e00651ec204cc61b8022563e9aeeb9d756f4"


class Dataset:
    """Arrays of one length, indexed together: dataset[i] is a tuple with the i-th (or i-th slice) of each.

    arrays: any shapes (N, ...) and dtypes. ValueError for no array, a scalar, or arrays of different lengths.
    """

    def __init__(self, *arrays):
        self.arrays = tuple(np.asarray(a) for a in arrays)
        if not arrays:
            raise ValueError("Dataset: needs at least one array, got none: give Dataset(images, labels)")
        for a in self.arrays:
            if not a.ndim:
                raise ValueError(
                    f"Dataset: arrays must have a first dimension of samples, got the scalar {a}"
                )
        lengths = [len(a) for a in self.arrays]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"Dataset: the arrays have different lengths {lengths}: give arrays of one length"
            )

    def __len__(self):
        return len(self.arrays[0])

    def __getitem__(self, i):
        return tuple(a[i] for a in self.arrays)


class Digits(Dataset):
    """A split of the digits: `images` float32 (N, 1, 28, 28), `labels` int64 (N,), 0 to 9. Source: MNIST, assets/NOTICE.md."""

    images = property(lambda self: self.arrays[0])
    labels = property(lambda self: self.arrays[1])


def _load(path):
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"digits: {path} is missing: reinstall minamp (pip install --force-reinstall minamp)"
        )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(
            f"digits: {path} is damaged: its sha256 is {found}, it should be {SHA256}: "
            "reinstall minamp (pip install --force-reinstall minamp)"
        )
    with np.load(path, allow_pickle=False) as file:
        return file["images"], file["labels"].astype(np.int64)


def digits(split=None, normalize=True, path=DIGITS):
    """The real digits: split 'train' (4,000, 400 of each class), 'test' (1,000, 100 of each), or None for both as a pair.

    The split and its order are fixed. normalize: images have mean 0 and standard deviation 1 over the training split;
    False leaves them in [0, 1]. path: another copy of the file, of the same sha256. FileNotFoundError or ValueError if the
    file is missing or damaged, ValueError for another split.
    """
    if split not in ("train", "test", None):
        raise ValueError(f"digits: split must be 'train', 'test' or None, got {split!r}")
    images, labels = _load(path)
    rng = np.random.default_rng(0)
    picks = [rng.permutation(np.flatnonzero(labels == c)) for c in range(10)]
    parts = {
        "train": rng.permutation(np.concatenate([p[:400] for p in picks])),
        "test": rng.permutation(np.concatenate([p[400:] for p in picks])),
    }
    x = images[:, None].astype(np.float32) / np.float32(255)
    if normalize:
        # float64 for the statistics: a float32 sum of 3 million pixels loses digits
        train = x[parts["train"]].astype(np.float64)
        x = ((x - train.mean()) / train.std()).astype(np.float32)
    made = {name: Digits(x[part], labels[part]) for name, part in parts.items()}
    return made[split] if split else (made["train"], made["test"])


class DataLoader:
    """Batches of a Dataset (or a tuple of arrays) as tuples of Tensors; every `for` over it is a new epoch.

    shuffle=True draws a new order each epoch from (seed, epoch), so that a run can be repeated and resumed exactly:
    state_dict() holds the epoch and the batch within it. drop_last leaves out a last batch that is not full.
    ValueError for a batch size that is no whole number of at least 1, or an empty dataset; TypeError for a bare array.
    """

    def __init__(self, dataset, batch_size=1, shuffle=False, *, seed=0, drop_last=False):
        if isinstance(dataset, np.ndarray | Tensor):  # would be taken apart into single samples
            raise TypeError(
                f"DataLoader: dataset is a bare array of shape {dataset.shape}: give a tuple, (array,) or (images, labels)"
            )
        dataset = Dataset(*dataset) if isinstance(dataset, tuple | list) else dataset
        if batch_size != int(batch_size) or batch_size < 1:
            raise ValueError(
                f"DataLoader: batch_size must be at least 1, got {batch_size}: give a whole number of samples"
            )
        batch_size = int(batch_size)
        if not len(dataset):
            raise ValueError("DataLoader: the dataset is empty: give it at least one sample")
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.seed, self.drop_last = seed, drop_last
        self.epoch = self.batch = 0
        self._resumed = False

    def __len__(self):
        n, b = len(self.dataset), self.batch_size
        return n // b if self.drop_last else -(-n // b)

    def __iter__(self):
        if self.batch and not self._resumed:  # the epoch before was left by a break
            self.epoch, self.batch = self.epoch + 1, 0
        self._resumed = False
        n = len(self.dataset)
        order = (
            np.random.default_rng([self.seed, self.epoch]).permutation(n) if self.shuffle else np.arange(n)
        )
        for i in range(self.batch, len(self)):
            part = order[i * self.batch_size : (i + 1) * self.batch_size]
            self.batch = i + 1
            yield tuple(Tensor(a) for a in self.dataset[part])
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self):
        """Where the loader stands: epoch and number of batches already given in it."""
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state):
        """Go on from what state_dict() gave: the next `for` starts with the batch after it."""
        self.epoch, self.batch = state["epoch"], state["batch"]
        self._resumed = True
