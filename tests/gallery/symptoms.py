"""What a fault does to a run, measured without the doctor: trace() runs some steps, SHOWS[code](trace) tells whether it is there.

This keeps the gallery honest: every broken script must show its fault, and no repaired twin may.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import numpy as np

import minamp
from minamp import autocast, float16, float32, float64, serialization
from minamp.autocast import state
from minamp.formats import is_floating, is_half, widen
from minamp.policy import LOWER_PRECISION
from minamp.record import observe
from minamp.tensor import Tensor


def parameters(it):
    """The parameters of a script: the model's."""
    return list(it["model"].parameters())


def _finite(x):
    return bool(np.isfinite(widen(x)).all())


class Trace:
    """Some steps of a script under observation.

    seen: one entry per op and phase. losses, scales: one per step. error: what step() raised. stepped, raw, updates,
    rebuilt: how often an optimizer was stepped, stepped past the scaler, the scaler updated, a scaler made.
    leftover: steps whose backward met gradients of an earlier step. saved: what went into minamp.save.
    """

    def __init__(self, it, steps):
        self.it, self.seen, self.losses, self.scales, self.error = it, [], [], [], None
        self.stepped = self.raw = self.updates = self.rebuilt = self.leftover = 0
        self.saved, self._inside, self._fresh = [], False, False
        self.before = [np.array(widen(p.data.numpy())) for p in parameters(it)]
        self.first_gradients = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(observe(self._see))
            self._count_calls(stack)
            for i in range(steps):
                self._fresh = i > 0
                try:
                    self.losses.append(it["step"]())
                except (RuntimeError, ValueError, AssertionError) as error:
                    self.error = error
                    break
                self.scales.append(it["scaler"].get_scale() if it["scaler"] else 1.0)
                if i == 0:
                    self.first_gradients = [
                        None if p.grad is None else p.grad.numpy().copy() for p in parameters(it)
                    ]

    def _count_calls(self, stack):
        scaler, optimizers = self.it["scaler"], self.it["optimizer"]
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers] if optimizers else []:
            stack.enter_context(mock.patch.object(optimizer, "step", self._optimizer_step(optimizer.step)))
        if scaler is not None and scaler.is_enabled():
            stack.enter_context(mock.patch.object(scaler, "step", self._scaler_step(scaler.step)))
            stack.enter_context(mock.patch.object(scaler, "update", self._update(scaler.update)))
        made, pack = minamp.GradScaler.__init__, serialization._pack

        def init(*args, **kwargs):
            self.rebuilt += 1
            return made(*args, **kwargs)

        def packed(x, where, arrays):
            if where == "state":
                self.saved.append(x)
            return pack(x, where, arrays)

        stack.enter_context(mock.patch.object(minamp.GradScaler, "__init__", init))
        stack.enter_context(mock.patch.object(serialization, "_pack", packed))

    def _optimizer_step(self, step):
        def counted(*args, **kwargs):
            self.stepped += 1
            self.raw += not self._inside
            return step(*args, **kwargs)

        return counted

    def _scaler_step(self, step):
        def counted(*args, **kwargs):
            self._inside = True
            try:
                return step(*args, **kwargs)
            finally:
                self._inside = False

        return counted

    def _update(self, update):
        def counted(*args, **kwargs):
            self.updates += 1
            return update(*args, **kwargs)

        return counted

    def _see(self, phase, op, inputs, output):
        forward = phase == "forward"
        y = output._data if isinstance(output, Tensor) else output
        if not is_floating(y.dtype):
            return
        if not forward and self._fresh:
            self._fresh = False
            self.leftover += any(
                p.grad is not None and np.any(widen(p.grad.numpy())) for p in parameters(self.it)
            )
        tensors = [a for a in inputs if isinstance(a, Tensor) and is_floating(a.dtype)] if forward else []
        self.seen.append(
            SimpleNamespace(
                forward=forward,
                op=op.name,
                heavy=getattr(op, "policy", None) == LOWER_PRECISION,
                cls=getattr(op, "cls", None),
                dtype=y.dtype,
                ndim=y.ndim,
                region=state.enabled,
                grad=forward and output.requires_grad,
                finite=_finite(y),
                nan=bool(np.isnan(widen(y)).any()),
                given_finite=all(_finite(a._data) for a in tensors),
                given=[(a.dtype, a.ndim, a.requires_grad) for a in tensors],
            )
        )

    def any(self, **wanted):
        """Whether an op was seen with these properties; op may be a tuple of names."""

        def fits(seen, name, value):
            found = getattr(seen, name)
            return found in value if isinstance(value, tuple) else found == value

        return any(all(fits(s, name, value) for name, value in wanted.items()) for s in self.seen)

    def says(self, text):
        return self.error is not None and text in str(self.error)

    @property
    def moved(self):
        return any(
            np.any(widen(p.data.numpy()) != b) for p, b in zip(parameters(self.it), self.before, strict=True)
        )

    @property
    def gradient_norm(self):
        gradients = [widen(p.grad.numpy()) for p in parameters(self.it) if p.grad is not None]
        return float(np.sqrt(sum(np.sum(g.astype(float64) ** 2) for g in gradients)))

    @property
    def unmoved_share(self):
        """Of the half weights with a gradient, the share whose stored value (the master's, if any) is as before."""
        same = total = 0
        for p, b in zip(parameters(self.it), self.before, strict=True):
            if is_half(p.dtype) and p.grad is not None:
                master = getattr(p, "master", None)
                same += np.sum((widen(p.data.numpy()) if master is None else master.data.numpy()) == b)
                total += b.size
        return same / total if total else 0.0


@contextlib.contextmanager
def everything_in_float32():
    """Autocast regions do nothing here."""
    enter = autocast.__enter__

    def disabled(self):
        answer = enter(self)
        state.enabled = False
        return answer

    with mock.patch.object(autocast, "__enter__", disabled):
        yield


def gradient_error(build):
    """The largest relative error that half makes in the first gradient of any matrix or kernel (a bias may have none at all)."""
    minamp.manual_seed(0)
    half = Trace(build(), 1).first_gradients
    minamp.manual_seed(0)
    with everything_in_float32():
        full = Trace(build(), 1).first_gradients
    return max(
        float(np.linalg.norm(h - f) / np.linalg.norm(f))
        for h, f in zip(half, full, strict=True)
        if f.ndim > 1
    )


def _keys(x):
    """All keys of nested dicts."""
    if isinstance(x, dict):
        return set(x) | set().union(*map(_keys, x.values()))
    return set().union(*map(_keys, x)) if isinstance(x, list | tuple) else set()


def _widened(t):
    def constant_widens(s):
        widths = [d.itemsize for d, ndim, _ in s.given if ndim]
        return (
            s.forward
            and s.grad
            and len(widths) > 1
            and min(widths) < s.dtype.itemsize
            and any(d == s.dtype and ndim and not grad for d, ndim, grad in s.given)
        )

    return any(constant_widens(s) for s in t.seen)


OVERFLOWED = dict(forward=True, dtype=float16, finite=False)
HALF = dict(forward=True, dtype=float16)

SHOWS = {
    "half_parameters_with_scaler": lambda t: t.says("float16 gradients"),
    "loss_in_half": lambda t: t.any(**HALF, ndim=0, grad=True),
    "softmax_in_half": lambda t: t.any(**HALF, op=("softmax", "log_softmax", "exp")),
    "log_of_softmax": lambda t: t.any(forward=True, op="softmax") and t.any(forward=True, op="log"),
    "mask_overflows": lambda t: (
        t.says("masked_fill")
        or t.any(**OVERFLOWED, op=("add", "where"), given_finite=True)
        and np.isnan(t.losses[0])
    ),
    "eps_rounds_to_zero": lambda t: t.any(**HALF, op="div", nan=True, given_finite=True),
    "layer_norm_overflows": lambda t: t.any(**OVERFLOWED, op=("mean", "var")),
    "mean_of_too_many": lambda t: t.any(**OVERFLOWED, op="sum", given_finite=True),
    "backward_in_autocast": lambda t: t.any(forward=False, region=True),
    "autocast_covers_nothing": lambda t: (
        t.any(forward=True, heavy=True, dtype=float32)
        and not t.any(heavy=True, dtype=(float16, minamp.bfloat16))
    ),
    "clip_before_unscale": lambda t: 0.0 < t.gradient_norm < 1e-4,
    "clip_value_hides_overflow": lambda t: (
        t.any(forward=False, finite=False) and t.scales[0] == t.scales[-1] and t.moved
    ),
    "raw_optimizer_step": lambda t: t.raw > 0,
    "update_forgotten": lambda t: t.says("step() has already been called") or t.says("called after step()"),
    "update_repeated": lambda t: t.updates > len(t.losses) + (t.error is not None),
    "unscale_every_micro_batch": lambda t: t.says("unscale_() has already been called"),
    "zero_grad_missing": lambda t: t.leftover > 0,
    "scaler_rebuilt": lambda t: t.rebuilt > 0,
    "scaler_not_saved": lambda t: any(
        "param_groups" in _keys(x) and "_growth_tracker" not in _keys(x) for x in t.saved
    ),
    "forward_overflow": lambda t: t.any(**OVERFLOWED, op=("linear", "conv2d", "mul"), given_finite=True),
    "updates_swamped": lambda t: t.unmoved_share > 0.5,
    "adam_in_half": lambda t: t.any(**HALF, op="sqrt", grad=False),
    "scale_pinned": lambda t: bool(np.isfinite(t.losses).all()) and not t.moved,
    "op_without_policy": lambda t: any(
        s.cls is not None and s.region and not hasattr(s.cls.forward, "__wrapped__") for s in t.seen
    ),
    "batchnorm_nan": lambda t: any(np.isnan(b.data.numpy()).any() for b in t.it["model"].buffers()),
    "widened_by_scalar": _widened,
}


def shows(code, build, steps=5):
    """Whether the script that build() makes shows the fault."""
    if code == "gradients_flushed":  # seen only against float32
        return gradient_error(build) > 0.3
    minamp.manual_seed(0)
    return bool(SHOWS[code](Trace(build(), steps)))
