"""What stands around a training loop: data, which makes batches, and checkpoint, which keeps less of a forward."""

from minamp.utils import checkpoint, data

__all__ = ["checkpoint", "data"]
