"""What is looked at before a kernel runs: one GPU for all arrays of an op, and a card that multiplies their format."""

from minamp.backends import device
from minamp.backends.device import xp
from minamp.backends.gemm import gemm
from minamp.formats import bfloat16, float32


def check(what, names, arrays, product):
    """Refuse arguments no kernel can take together, given the op's name and those of its arguments.

    RuntimeError for arrays on different GPUs or not on the current one, and (product) for a format that the card can't multiply.
    """
    here = [(n, a) for n, a in zip(names, arrays, strict=True) if device.holds(a)]
    places = {a.device.id for _, a in here}
    if len(places) > 1:
        found = ", ".join(f"{n} cuda:{a.device.id}" for n, a in here)
        raise RuntimeError(
            f"{what}: tensors on different devices ({found}): move them to one, e.g. with x.to('cuda:0')"
        )
    if what != "to_device" and (current := device.current()) not in places:
        place = places.pop()
        raise RuntimeError(
            f"{what}: tensors on cuda:{place}, and the GPU that computes is cuda:{current}: "
            f"call minamp.cuda.set_device({place}) first"
        )
    if product and any(a.dtype == bfloat16 for _, a in here) and not bf16_works():
        raise RuntimeError(
            f"{what}: the GPU (compute capability {device.capability() / 10}) can't multiply bfloat16, Ampere (8.0) and "
            "newer can: use float16 with a GradScaler, or float32"
        )


_bf16 = {}  # (array module, number of the GPU) -> whether it multiplies bfloat16


def bf16_works():
    """Whether the current GPU multiplies bfloat16: tried once with 8 x 8 ones, not guessed from a version. Waits for it."""
    key = (id(device.array_module()), device.current())
    if key not in _bf16:
        try:
            ones = xp.full((8, 8), 1.0, float32).astype(bfloat16)
            _bf16[key] = float(gemm(ones, ones, xp.empty((8, 8), float32))[7, 7]) == 8.0
        except Exception:  # whatever cuBLAS or the compiler says to it: not on this card
            _bf16[key] = False
    return _bf16[key]
