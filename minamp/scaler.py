"""GradScaler: keep small half gradients above the flush threshold by scaling the loss, and find the scale as training goes.

The whole algorithm, once per iteration:

    loss * scale -> backward             every gradient arrives multiplied by scale
    unscale_:  grad *= 1 / scale         in float32; found_inf = any gradient not finite
    step:      found_inf ? skip : optimizer.step()
    update:    found_inf ? scale *= backoff_factor, good = 0
               else good += 1, and at growth_interval good steps in a row scale *= growth_factor, good = 0

Micikevicius et al., "Mixed Precision Training", 2018, section 3.2, with the dynamic rule of PyTorch's GradScaler.

The scale and the count of good steps are arrays of one value where the loss lies, on a GPU too: unscale_ reads the scale there
and update() changes it there. All the host asks for is found_inf, once a step, since it makes the step or skips it. Optimizers
with capturable=True ask for nothing: their kernels read found_inf where it is, and so does update().
"""

import functools
import inspect
from dataclasses import dataclass
from enum import Enum

import numpy as np

from minamp import backends
from minamp.announce import announced
from minamp.arguments import check_number
from minamp.backends import device_type as check_device
from minamp.evidence import Evidence
from minamp.formats import float32, format_of
from minamp.tensor import Tensor

int32 = np.dtype(np.int32)

# What a number has to be for the scaler to work with it: the test, and the words for it.
SCALE = (
    lambda x: 2.0**-149 <= x <= format_of(float32).max,
    "a positive number that float32 holds, as 2.0**16 is",
)
FACTOR = lambda x: 0 < x < float("inf"), "positive and finite"
STEPS = lambda x: x >= 1 and x % 1 == 0, "a whole number of steps, at least 1"
COUNT = lambda x: 0 <= x < 2**31 and x % 1 == 0, "a whole number of steps, at least 0"
BOUND = lambda x: x >= 0, "at least 0"


def check(owner, name, value, rule):
    """TypeError for what is no number, ValueError for a number with which no scaler works."""
    check_number(owner, name, value)
    works, words = rule
    if not works(value):
        raise ValueError(f"{owner}: {name} must be {words}, got {value}")


class Stage(Enum):
    """Where one optimizer stands between two calls of update()."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


@dataclass
class _Record:
    """What is known of one optimizer between two calls of update()."""

    optimizer: object  # held, so that its id is not given out again
    stage: Stage = Stage.READY
    found_inf: object = None  # 0.0, 1.0, a flag on the GPU, or None if there was no gradient


class GradScaler:
    """Dynamic loss scaling, as torch.amp.GradScaler.

    device: accepted and without effect, scalers are live everywhere. init_scale, growth_factor (> 1), backoff_factor (< 1),
    growth_interval (good steps before the scale grows). enabled=False makes every method a plain pass-through.
    Beyond PyTorch, off by default: min_scale and max_scale keep the scale within bounds; max_skips makes update() raise
    FloatingPointError after that many skipped steps in a row, naming what went non-finite first: no scale cures a bug.
    AssertionError for factors on the wrong side of 1; ValueError for numbers no scaler works with (a scale that is not positive
    or that float32 does not hold, a count of steps that is not whole) and for bounds that exclude init_scale; TypeError for what
    is no number, and for a number as the device: init_scale comes second.
    """

    @announced("scaler.new")
    def __init__(
        self,
        device="cuda",
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        enabled=True,
        *,
        min_scale=None,
        max_scale=None,
        max_skips=None,
    ):
        if isinstance(device, int | float):
            raise TypeError(
                f"GradScaler: the first argument is the device, got {device}: use init_scale={device}"
            )
        check_device(device)
        self._enabled = bool(enabled)
        if not enabled:
            return
        check_number("GradScaler", "growth_factor", growth_factor)
        check_number("GradScaler", "backoff_factor", backoff_factor)
        assert growth_factor > 1.0, f"GradScaler: growth_factor must be greater than 1, got {growth_factor}"
        assert backoff_factor < 1.0, f"GradScaler: backoff_factor must be less than 1, got {backoff_factor}"
        check("GradScaler", "init_scale", init_scale, SCALE)
        check("GradScaler", "growth_factor", growth_factor, FACTOR)
        check("GradScaler", "backoff_factor", backoff_factor, FACTOR)
        check("GradScaler", "growth_interval", growth_interval, STEPS)
        for name, value, rule in (
            ("min_scale", min_scale, BOUND),
            ("max_scale", max_scale, BOUND),
            ("max_skips", max_skips, STEPS),
        ):
            if value is not None:
                check("GradScaler", name, value, rule)
        self._init_scale = init_scale
        # From the first scale() on 0-dim Tensors, float32 and int32, on the loss's device.
        self._scale = self._tracker = None
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._growth_tracker = growth_interval, 0  # the count to start from
        low = float("-inf") if min_scale is None else min_scale
        high = float("inf") if max_scale is None else max_scale
        if not low <= init_scale <= high:
            raise ValueError(
                f"GradScaler: init_scale {init_scale} lies outside min_scale {min_scale} and max_scale {max_scale}"
            )
        self._min_scale, self._max_scale, self._max_skips = low, high, max_skips
        self._skips, self._evidence = 0, Evidence()
        self._records = {}  # id(optimizer) -> _Record

    # -- the loss

    @announced("scaler.scale")
    def scale(self, outputs):
        """outputs * scale; a Tensor, or tuples and lists of them, nested.

        A float16 loss with dimensions stays float16 and overflows; a 0-dim one becomes float32, as in PyTorch.
        ValueError for anything else.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._make_scale(backends.of(outputs._data))
            if self._max_skips:
                self._evidence.loss(outputs)
            if not self._scale.device.same(outputs.device):
                self._scale, self._tracker = self._scale.to(outputs.device), self._tracker.to(outputs.device)
            return outputs * self._scale
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.scale(x) for x in outputs)
        if hasattr(outputs, "__iter__"):
            return map(self.scale, outputs)
        raise ValueError(
            f"scale: outputs must be a Tensor or nested lists and tuples of them, got {type(outputs).__name__}"
        )

    @backends.guard("GradScaler: making the scale")
    def _make_scale(self, m):
        scale, tracker = m.full((), self._init_scale, float32), m.full((), self._growth_tracker, int32)
        self._scale, self._tracker = Tensor(scale), Tensor(tracker)

    # -- one optimizer's gradients

    @announced("scaler.unscale_")
    def unscale_(self, optimizer):
        """Divide the optimizer's gradients by the scale, in place and in float32, and note whether any is not finite.

        Call it before clipping. Called by step() otherwise. RuntimeError the second time before update() or after step();
        ValueError for float16 gradients (nothing is changed then), unless the optimizer holds float32 master weights.
        """
        if not self._enabled:
            return
        self._need_scale("unscale_")
        record = self._record(optimizer)
        if record.stage is Stage.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(): call it once per step"
            )
        if record.stage is Stage.STEPPED:
            raise RuntimeError(
                "unscale_() is being called after step(): call it before, so that step() uses unscaled gradients"
            )
        record.found_inf = self._unscale(optimizer, self._scale)
        record.stage = Stage.UNSCALED

    @backends.guard("unscale_")
    def _unscale(self, optimizer, scale, allow_half=False):
        """Divide every gradient by `scale` (None: only look at them); found_inf, as in _Record."""
        gradients = {}  # backend -> (position, gradient) pairs
        for position, owner in enumerate(self._owners(optimizer)):
            g = owner.grad
            if g is None:
                continue
            if g.dtype == np.float16 and not allow_half:
                raise ValueError(
                    "unscale_: float16 gradients can't be unscaled in half without losing them: keep the weights in float32 "
                    "and run the forward under autocast, or give the optimizer master_weights=True"
                )
            gradients.setdefault(backends.of(g._data), []).append((position, g))
        if not gradients:
            return None
        found = 0.0
        for m, here in gradients.items():  # one pass, and on a GPU one wait, per kind of device
            arrays = [g._data for _, g in here]
            where = backends.device_name(arrays[0])
            flags = m.unscale(arrays, None if scale is None else backends.move(scale._data, where))
            for _, g in here:
                g._version[0] += 1
            if self._stays_on_gpu(optimizer, gradients):
                return flags[:1]
            flags = backends.host(flags)
            if flags[0]:
                found = 1.0
                for i in np.flatnonzero(flags[1:]):
                    self._evidence.gradient(*here[i])
        return found

    def _stays_on_gpu(self, optimizer, kinds):
        """Whether found_inf is left on the GPU. Not with max_skips: the evidence it gives up with is gathered here."""
        on_gpu = {m.name for m in kinds} == {backends.of(self._scale._data).name} == {"cuda"}
        return on_gpu and not self._max_skips and getattr(optimizer, "_reads_found_inf", False)

    @staticmethod
    def _owners(optimizer):
        """The tensors whose .grad step() will use: float32 masters where the optimizer has them, the parameters elsewhere."""
        if hasattr(optimizer, "master_params"):
            return optimizer.master_params()
        return (p for group in optimizer.param_groups for p in group["params"])

    # -- the step

    @announced("scaler.step")
    def step(self, optimizer, *args, **kwargs):
        """optimizer.step(*args, **kwargs) if every gradient is finite; its return value then, None if the step is skipped.

        Unscales first if that was not done. minamp's optimizers return True from a step, so None means skipped; only with
        capturable=True on a GPU True says nothing: whether the step is made is decided there.
        RuntimeError for a second step before update() and for a closure; AssertionError before any scale() or when no parameter
        of the optimizer has a gradient.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(a) for a in args):
            raise RuntimeError(
                "step: a closure can't be used with GradScaler, its losses would not be scaled: call step(optimizer) without one"
            )
        self._need_scale("step")
        record = self._record(optimizer)
        if record.stage is Stage.STEPPED:
            raise RuntimeError(
                "step() has already been called on this optimizer since the last update(): call update() after each step"
            )
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            answer = self._step_scaled(optimizer, record, args, kwargs)
        else:
            if record.stage is Stage.READY:
                self.unscale_(optimizer)
            if record.found_inf is None:
                raise AssertionError(
                    f"step: no parameter of this {type(optimizer).__name__} has a gradient, so nothing was checked for inf: "
                    "was its loss part of backward(), and are its parameters the model's?"
                )
            if isinstance(record.found_inf, float):
                answer = None if record.found_inf else optimizer.step(*args, **kwargs)
            else:
                optimizer.found_inf = Tensor(record.found_inf)
                try:
                    answer = optimizer.step(*args, **kwargs)
                finally:
                    del optimizer.found_inf
        record.stage = Stage.STEPPED
        return answer

    def _step_scaled(self, optimizer, record, args, kwargs):
        """The protocol of optimizers that unscale and skip by themselves (_step_supports_amp_scaling)."""
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            return optimizer.step(*args, grad_scaler=self, **kwargs)
        own = getattr(optimizer, "grad_scale", None)
        if record.stage is Stage.READY:
            record.found_inf = self._unscale(optimizer, None, allow_half=True)
            scale = self._scale._data if own is None else self._scale._data * own._data
            optimizer.grad_scale = Tensor(backends.of(scale).cast(scale, float32))
        else:
            optimizer.grad_scale = own
        optimizer.found_inf = self._as_float32(record.found_inf)
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    # -- the scale

    @announced("scaler.update")
    def update(self, new_scale=None):
        """Shrink the scale if any optimizer met a non-finite gradient since the last update, else count towards growth.

        new_scale (number or one-element Tensor without grad) sets the scale instead and leaves the count alone; ValueError,
        and nothing is changed, if it is not positive or float32 does not hold it.
        AssertionError before any scale(), or if no optimizer was checked.
        """
        if not self._enabled:
            return
        self._need_scale("update")
        if new_scale is not None:
            self._set_scale(new_scale)
        else:
            found = [r.found_inf for r in self._records.values() if r.found_inf is not None]
            if not found:
                raise AssertionError(
                    "update: no optimizer was stepped or unscaled since the last update: call step(optimizer) first"
                )
            self._adjust(found)
            if self._max_skips:
                self._skips = self._skips + 1 if any(found) else 0
        self._records = {}
        if self._max_skips:
            self._count_skips()

    def _count_skips(self):
        skips, evidence = self._skips, self._evidence
        if skips >= self._max_skips:
            self._skips, self._evidence = 0, Evidence()
            evidence.close()
            raise FloatingPointError(
                f"GradScaler: {skips} steps in a row were skipped and the scale is down to {self.get_scale():g}. {evidence}"
            )
        evidence.close()
        # The last iteration before giving up runs under observation, so that the first bad op can be named.
        self._evidence = Evidence(observing=skips == self._max_skips - 1 and skips > 0)

    def _adjust(self, found):
        m = backends.of(self._scale._data)
        known = any(f for f in found if isinstance(f, float))
        flags = [f for f in found if not isinstance(f, float)]
        flag = functools.reduce(m.maximum, flags) if flags else None
        rule = (
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            self._min_scale,
            self._max_scale,
        )
        scale, tracker = m.update_scale(self._scale._data, self._tracker._data, flag, known, *rule)
        self._put(scale, tracker)

    def _put(self, scale, tracker):
        """Take over the scale's and the count's new values. On a GPU they stay where they are: a captured step reads them."""
        on_cpu = backends.of(self._scale._data).name == "cpu"
        for name, new in (("_scale", scale), ("_tracker", tracker)):
            old = getattr(self, name)
            if on_cpu:
                setattr(self, name, Tensor(np.asarray(new, old.dtype)))
                continue
            if new is not old._data:
                old._data[...] = new
            old._version[0] += 1

    def _as_float32(self, found):
        """found_inf as a 0-dim Tensor where the scale lies."""
        m = backends.of(self._scale._data)
        if found is None or isinstance(found, float):
            return Tensor(m.full((), found or 0.0, float32))
        return Tensor(m.reshape(m.cast(found, float32), ()))

    def _set_scale(self, new_scale):
        if isinstance(new_scale, Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise AssertionError(
                    f"update: new_scale must be a number or a Tensor with one element and no grad, got shape {new_scale.shape}, "
                    f"requires_grad={new_scale.requires_grad}"
                )
            new_scale = new_scale.item()
        check("update", "new_scale", new_scale, SCALE)
        self._put(new_scale, self._tracker._data)

    # -- looking and setting

    def get_scale(self):
        """The scale as a Python float, copied from the GPU if it lies there; 1.0 if disabled."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else self._scale.item()

    def get_growth_factor(self):
        return self._growth_factor

    def set_growth_factor(self, new_factor):
        check("set_growth_factor", "new_factor", new_factor, FACTOR)
        self._growth_factor = new_factor

    def get_backoff_factor(self):
        return self._backoff_factor

    def set_backoff_factor(self, new_factor):
        check("set_backoff_factor", "new_factor", new_factor, FACTOR)
        self._backoff_factor = new_factor

    def get_growth_interval(self):
        return self._growth_interval

    def set_growth_interval(self, new_interval):
        check("set_growth_interval", "new_interval", new_interval, STEPS)
        self._growth_interval = new_interval

    def is_enabled(self):
        return self._enabled

    def _get_growth_tracker(self):
        if not self._enabled:
            return 0
        return self._growth_tracker if self._tracker is None else self._tracker.item()

    # -- saving

    @announced("scaler.state_dict")
    def state_dict(self):
        """scale, factors, interval and count; {} if disabled. Take it after update()."""
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }

    @announced("scaler.load_state_dict")
    def load_state_dict(self, state_dict):
        """Take over what state_dict() gave. RuntimeError for the empty state of a disabled scaler.

        KeyError for a key that is missing, TypeError or ValueError for a value that can't be; nothing is changed then.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("load_state_dict: the state is empty: it was saved from a disabled scaler")
        rules = {
            # a scale that went on shrinking is saved as 0 in the end
            "scale": (lambda x: x == 0 or SCALE[0](x), SCALE[1]),
            "growth_factor": FACTOR,
            "backoff_factor": FACTOR,
            "growth_interval": STEPS,
            "_growth_tracker": COUNT,
        }
        for key, rule in rules.items():
            if key not in state_dict:
                raise KeyError(f"load_state_dict: the state has no {key!r}: give what state_dict() gave")
            check("load_state_dict", key, state_dict[key], rule)
        scale, growth, backoff, interval, tracker = (state_dict[key] for key in rules)
        self._init_scale, self._growth_factor, self._backoff_factor = scale, growth, backoff
        self._growth_interval, self._growth_tracker = interval, tracker
        if self._scale is not None:
            self._put(scale, tracker)

    @announced("scaler.state_dict")  # a pickle saves it too
    def __getstate__(self):
        state = self.__dict__.copy()
        if self._enabled:
            if self._records:
                raise AssertionError(
                    "pickling a GradScaler between unscale_() and update() would lose what was checked: pickle it after update()"
                )
            state["_init_scale"], state["_growth_tracker"] = self.get_scale(), self._get_growth_tracker()
            state["_scale"] = state["_tracker"] = None
            state["_evidence"] = Evidence()
        return state

    # -- inside

    def _record(self, optimizer):
        return self._records.setdefault(id(optimizer), _Record(optimizer))

    def _need_scale(self, method):
        if self._scale is None:
            raise AssertionError(
                f"{method}: the scale is not there yet: call scaler.scale(loss).backward() first"
            )
