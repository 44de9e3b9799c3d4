"""torch as the cases see it: on the CPU, or on fake tensors whose device is cuda (dtypes only, but the real CUDA op lists)."""

import contextlib

import torch
from torch._decomp import decomposition_table
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Kit:
    """torch on the CPU."""

    tn, device = torch, "cpu"

    @staticmethod
    def find(op):
        """The function that torch has under this name."""
        rooms = (torch.nn.functional, torch, torch.linalg, torch.Tensor)
        return next(getattr(room, op) for room in rooms if hasattr(room, op))

    @staticmethod
    def listed(x):
        return x.float()

    @staticmethod
    @contextlib.contextmanager
    def counting(tensor):
        casts = []

        class Counter(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten._to_copy.default and args[0].shape == tensor.shape:
                    casts.append(args[0])
                return func(*args, **(kwargs or {}))

        with Counter():
            yield casts


class FakeCudaKit(Kit):
    """torch where every new tensor claims to live on cuda; use inside fake_cuda()."""

    device = "cuda"


@contextlib.contextmanager
def fake_cuda():
    """New tensors are fake cuda ones and cuda regions are live. No gradients: their record asks for a real device."""
    absent, bf16 = torch.cuda.amp.common.amp_definitely_not_available, torch.cuda.is_bf16_supported
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
    # torch's own makes this one of Python indices, which ask for a real device
    sampler = torch.ops.aten.grid_sampler_2d.default
    decomposed = decomposition_table[sampler]
    decomposition_table[sampler] = lambda x, grid, *_: x.new_empty((*x.shape[:2], *grid.shape[1:3]))
    try:
        with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
            yield
    finally:
        torch.cuda.amp.common.amp_definitely_not_available, torch.cuda.is_bf16_supported = absent, bf16
        decomposition_table[sampler] = decomposed
