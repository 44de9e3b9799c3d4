"""What the scripts share: a few real digits, small networks, how they are collected, and a report on one line a finding."""

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


class Scripts:
    """Scripts under their function's name, entered by two decorators. ill: name -> (code, build), well: name -> build."""

    def __init__(self):
        self.ill, self.well = {}, {}

    def broken(self, code):
        def enter(build):
            self.ill[build.__name__] = code, build
            return build

        return enter

    def healthy(self, build):
        self.well[build.__name__] = build
        return build


def told(report):
    """What a test prints of a report that it did not expect."""
    return "\n".join(f"{f.code}: {f.what} [{f.where}] {f.evidence}" for f in report)
