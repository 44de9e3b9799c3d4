"""The few names of torch.cuda that training scripts ask for; minamp computes on the CPU today."""

from minamp.backends import gpu_status


def is_available():
    """True where a GPU can be used; minamp.gpu_status() says why not."""
    return gpu_status() == "ok"


def device_count():
    """0 where no GPU can be used."""
    return int(is_available())


def synchronize(device=None):
    """Wait for the GPU; on the CPU there is nothing to wait for."""
