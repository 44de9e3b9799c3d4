"""What stands around a training loop: checkpoint.py, which computes activations again instead of keeping them."""

from minamp.utils import checkpoint  # noqa: F401
