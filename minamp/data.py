"""The 5,000 real handwritten digits that come with the package, and a DataLoader that can be resumed.

The digits are a subset of MNIST (LeCun, Cortes, Burges; CC BY-SA 3.0); assets/NOTICE.md says where they come from.
"""

import hashlib
from pathlib import Path

import numpy as np

from minamp.tensor import Tensor, as_tensor
from minamp.utils import data
from minamp.utils.data import BatchSampler, TensorDataset
from minamp.utils.data.dataloader import BatchIterator
from minamp.utils.data.sampler import Order

DIGITS = Path(__file__).parent / "assets" / "mnist5k.npz"
SHA256 = "246e0c30eeea57c8d0037d3f38c8e00651ec204cc61b8022563e9aeeb9d756f4"


class Digits(TensorDataset):
    """A split of the digits. Arrays: `images` float32 (N, 1, 28, 28), `labels` int64 (N,), 0 to 9. Of MNIST, assets/NOTICE.md"""

    images = property(lambda self: self.tensors[0].numpy())
    labels = property(lambda self: self.tensors[1].numpy())


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
    made = {name: Digits(Tensor(x[part]), Tensor(labels[part])) for name, part in parts.items()}
    return made[split] if split else (made["train"], made["test"])


class DataLoader(data.DataLoader):
    """Batches of a dataset (or a tuple of arrays) whose order can be repeated and resumed exactly; every `for` is a new epoch.

    shuffle=True draws the order of each epoch from (seed, epoch); state_dict() holds the epoch and the batch within it.
    drop_last leaves out a last batch that is not full. ValueError for a batch size that is no whole number of at least 1, or an
    empty dataset; TypeError for a bare array.
    """

    def __init__(self, dataset, batch_size=1, shuffle=False, *, seed=0, drop_last=False):
        if isinstance(dataset, np.ndarray | Tensor):  # would be taken apart into single samples
            raise TypeError(
                f"DataLoader: dataset is a bare array of shape {dataset.shape}: give a tuple, (array,) or (images, labels)"
            )
        dataset = TensorDataset(*map(as_tensor, dataset)) if isinstance(dataset, tuple | list) else dataset
        if not len(dataset):
            raise ValueError("DataLoader: the dataset is empty: give it at least one sample")
        super().__init__(dataset, batch_size, drop_last=drop_last)
        self.shuffle, self.seed = shuffle, seed
        self.epoch = self.batch = 0
        self._resumed = False

    def __iter__(self):
        if self.batch and not self._resumed:  # the epoch before was left by a break
            self.epoch, self.batch = self.epoch + 1, 0
        self._resumed = False
        n = len(self.dataset)
        order = (
            np.random.default_rng([self.seed, self.epoch]).permutation(n) if self.shuffle else np.arange(n)
        )
        left = Order(order[self.batch * self.batch_size :])
        return _Epoch(self, BatchSampler(left, self.batch_size, self.drop_last))

    def state_dict(self):
        """Where the loader stands: epoch and number of batches already given in it."""
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state):
        """Go on from what state_dict() gave: the next `for` starts with the batch after it."""
        self.epoch, self.batch = state["epoch"], state["batch"]
        self._resumed = True


class _Epoch(BatchIterator):
    """One epoch of a DataLoader, which it tells how far it is."""

    ended = False

    def __next__(self):
        loader = self.loader
        try:
            batch = super().__next__()
        except StopIteration:
            if not self.ended:
                self.ended, loader.epoch, loader.batch = True, loader.epoch + 1, 0
            raise
        loader.batch += 1
        return batch
