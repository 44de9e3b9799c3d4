"""The few names of torch.cuda that training scripts ask for."""

from minamp import backends
from minamp.backends import gpu_status


def is_available():
    """True where a GPU can be used; minamp.gpu_status() says why not."""
    return gpu_status() == "ok"


def device_count():
    """How many GPUs there are; 0 where none can be used."""
    return backends.device.count() if is_available() else 0


def synchronize(device=None):
    """Wait until everything launched on the GPU is done; on the CPU there is nothing to wait for."""
    if backends.device.in_use():
        backends.device.synchronize()
