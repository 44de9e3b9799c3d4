"""What a training script begins with: datasets, samplers that put their samples in order, the DataLoader that makes batches.

In reading order: dataset.py, sampler.py, collate.py (from samples to a batch), dataloader.py.
"""

from minamp.utils.data.collate import default_collate, default_convert
from minamp.utils.data.dataloader import DataLoader, get_worker_info
from minamp.utils.data.dataset import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)
from minamp.utils.data.sampler import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
