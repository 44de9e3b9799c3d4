"""What the scripts share: a few real digits, and small networks."""

import functools

from minamp import data, nn, tensor


@functools.cache
def _split():
    return data.digits("train")


def digits(n=32, start=0, shape=(-1,)):
    """n digits as (n, 784), or (n, *shape), and their labels."""
    split = _split()
    images, labels = split.images[start : start + n], split.labels[start : start + n]
    return tensor(images).reshape(n, *shape), tensor(labels)


def mlp(*sizes):
    """Linear layers with ReLU between them."""
    layers = [nn.Linear(sizes[0], sizes[1])]
    for i, o in zip(sizes[1:], sizes[2:], strict=False):
        layers += [nn.ReLU(), nn.Linear(i, o)]
    return nn.Sequential(*layers)
