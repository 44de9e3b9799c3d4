"""The names of torch.amp: autocast, GradScaler, and the decorators for the two halves of a Function."""

from minamp.autocast import autocast, custom_bwd, custom_fwd  # noqa: F401
from minamp.scaler import GradScaler  # noqa: F401
