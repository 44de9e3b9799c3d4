"""minamp: mixed-precision training written out by hand.

Read it in the order data flows: formats, backends, record, tensor, autocast, policy, promotion, op, ops, nn, optim, scaler.
"""

import numpy as _np

from minamp import amp, autograd, cuda, linalg, nn, ops, optim, utils  # noqa: I001  ops fills OPS, all after it build on it
from minamp.autocast import (
    autocast,
    clear_autocast_cache,
    custom_bwd,
    custom_fwd,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)
from minamp.backends import Device as device
from minamp.backends import gpu_status
from minamp.create import (
    arange,
    bernoulli,
    empty,
    empty_like,
    eye,
    from_numpy,
    full,
    full_like,
    int64,
    linspace,
    multinomial,
    ones,
    ones_like,
    rand,
    rand_like,
    randint,
    randn,
    randn_like,
    randperm,
    zeros,
    zeros_like,
)
from minamp.debug import debug
from minamp.draw import Generator, get_rng_state, manual_seed, set_rng_state
from minamp.formats import bfloat16, float8_e4m3fn, float8_e5m2, float16, float32, float64
from minamp.formats import format_of as finfo
from minamp.methods import ALIASES as _ALIASES
from minamp.methods import OPS as _OPS
from minamp.promotion import result_type
from minamp.record import enable_grad, inference_mode, is_grad_enabled, no_grad, set_grad_enabled
from minamp.scaler import GradScaler
from minamp.serialization import load, save
from minamp.tensor import Tensor, as_tensor, is_tensor, tensor

half, float, double = float16, float32, float64
long = int64
int8, int16, int32, uint8 = (_np.dtype(t) for t in (_np.int8, _np.int16, _np.int32, _np.uint8))
bool = _np.dtype(_np.bool_)

dtype, iinfo, inf, nan, pi = _np.dtype, _np.iinfo, _np.inf, _np.nan, _np.pi
Size = tuple  # what a shape is

__version__ = "0.1.0"


def __getattr__(name):
    """minamp.exp, minamp.matmul, ...: every op under its names; and what few scripts need, imported when it is asked for."""
    name = _ALIASES.get(name, name)
    if name in _OPS:
        return _OPS[name]
    if name == "doctor":
        from minamp.clinic import doctor

        return doctor
    if name == "verify_amp":
        from minamp.verify import verify_amp

        return verify_amp
    raise AttributeError(f"module 'minamp' has no attribute {name!r}")


def is_bf16_supported(including_emulation=True):
    """True: bfloat16 is emulated exactly on the CPU. With including_emulation=False, whether a GPU multiplies it (tried)."""
    return including_emulation or cuda.is_bf16_supported()
