"""Learning-rate schedules: most classes of torch.optim.lr_scheduler, each as a formula of the number of steps made.

A schedule and a loss scaler: a step that the scaler skips must not use up a step of the schedule, so let it follow those made:

    stepped = scaler.step(optimizer)   # None if the step was skipped
    scaler.update()
    if stepped:
        schedule.step()

PyTorch's scaler can't say so: there the schedule runs on, and warns of "lr_scheduler.step() before optimizer.step()" if the
first step was skipped. (With capturable=True on a GPU the answer is always True.) A schedule per epoch needs no such care.

The rate is computed from the first one, so one schedule at a time sets it: put them in a row with SequentialLR.
"""

import copy
import math
from bisect import bisect_left, bisect_right

from minamp.arguments import check_number


class LRScheduler:
    """Base class: writes a new 'lr' into every parameter group, at once and at each step().

    A subclass defines get_lr(), a list of the groups' rates at step self.last_epoch, as torch's do, from self.base_lrs or from
    the rates that stand in self.optimizer.param_groups; those here define _lr, the rate as a formula.
    last_epoch: where an earlier run stood; other than -1 the groups need its 'initial_lr' (KeyError).
    """

    _name = property(lambda self: type(self).__name__)
    # how often step() was called, once by __init__: schedules from papers' code read it
    _step_count = property(lambda self: self.last_epoch + 1)

    def __init__(self, optimizer, last_epoch=-1):
        for i, group in enumerate(self._groups(optimizer)):
            if last_epoch != -1 and "initial_lr" not in group:
                raise KeyError(
                    f"{self._name}: group {i} has no 'initial_lr': load the optimizer's state first, or leave out last_epoch"
                )
            group.setdefault("initial_lr", group["lr"])
        self.optimizer, self.last_epoch = optimizer, last_epoch
        self.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        self.step()

    def _rewind(self):
        """Back to before its first step, for SequentialLR."""
        self.last_epoch = -1

    def _lr(self, base, step):
        """The rate after `step` steps where it began with `base`."""
        raise NotImplementedError(f"{self._name} has no get_lr(): define it")

    def get_lr(self):
        """The groups' rates at step last_epoch."""
        return [self._lr(base, self.last_epoch) for base in self.base_lrs]

    def _at(self, step):
        """Per group, the options after `step` steps."""
        before, self.last_epoch = self.last_epoch, step
        try:  # loaded, a rate made from the one before must not be made again
            return [{"lr": lr} for lr in (self._last_lr if step == before else self.get_lr())]
        finally:
            self.last_epoch = before

    def step(self):
        """The next learning rate; after optimizer.step()."""
        self._write(self._at(self.last_epoch + 1))
        self.last_epoch += 1

    def _write(self, options):
        groups = self.optimizer.param_groups
        if len(groups) != len(options):
            raise ValueError(
                f"{self._name}: made for {len(options)} parameter groups, the optimizer has {len(groups)}: "
                "make the schedule after the last add_param_group"
            )
        for group, new in zip(groups, options, strict=True):
            group.update(new)
        self._last_lr = [group["lr"] for group in groups]

    def get_last_lr(self):
        """The groups' learning rates, as last written."""
        return self._last_lr

    def state_dict(self):
        """Everything but the optimizer and functions."""
        return {k: v for k, v in vars(self).items() if k not in ("optimizer", "lr_lambdas")}

    def load_state_dict(self, state_dict):
        """Take over what state_dict() gave, and write its rates into the groups. Nothing is changed if it does not fit."""
        new = self._loaded(state_dict)
        options = new._at(new.last_epoch)
        self._write(options)
        vars(self).update(vars(new))

    def _loaded(self, state_dict):
        own, new = self.state_dict(), copy.copy(self)
        for key, value in own.items():
            if key not in state_dict:
                raise ValueError(
                    f"{self._name}.load_state_dict: the state has no {key!r}: give what state_dict() gave"
                )
            if isinstance(value, int | float):
                check_number(f"{self._name}.load_state_dict", key, state_dict[key])
            setattr(new, key, copy.copy(state_dict[key]))
        return new

    def _groups(self, optimizer):
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"{self._name}: the first argument must be an optimizer, got {type(optimizer).__name__}"
            )
        return optimizer.param_groups

    def _positive(self, **numbers):
        for name, value in numbers.items():
            check_number(self._name, name, value)
            if not value > 0:
                raise ValueError(f"{self._name}: {name} must be above 0, got {value}")

    def _per_group(self, name, value, groups):
        """`value`, or the values of a list, one for each group."""
        values = list(value) if isinstance(value, list | tuple) else [value] * len(groups)
        if len(values) != len(groups):
            raise ValueError(
                f"{self._name}: {name} has {len(values)} values for {len(groups)} parameter groups: give one for each"
            )
        return values


_LRScheduler = LRScheduler  # torch's older name


class LambdaLR(LRScheduler):
    """The first rate times lr_lambda(step); a list has one function for each group. They are not saved."""

    def __init__(self, optimizer, lr_lambda, last_epoch=-1):
        self.lr_lambdas = self._per_group("lr_lambda", lr_lambda, self._groups(optimizer))
        super().__init__(optimizer, last_epoch)

    def _at(self, step):
        pairs = zip(self.base_lrs, self.lr_lambdas, strict=True)
        return [{"lr": base * factor(step)} for base, factor in pairs]


class StepLR(LRScheduler):
    """Times gamma every step_size steps."""

    def __init__(self, optimizer, step_size, gamma=0.1, last_epoch=-1):
        self._positive(step_size=step_size)
        check_number(self._name, "gamma", gamma)
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def _lr(self, base, step):
        return base * self.gamma ** (step // self.step_size)


class MultiStepLR(LRScheduler):
    """Times gamma at each of the milestones."""

    def __init__(self, optimizer, milestones, gamma=0.1, last_epoch=-1):
        check_number(self._name, "gamma", gamma)
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, last_epoch)

    def _lr(self, base, step):
        return base * self.gamma ** bisect_right(self.milestones, step)


class ExponentialLR(LRScheduler):
    """Times gamma every step."""

    def __init__(self, optimizer, gamma, last_epoch=-1):
        check_number(self._name, "gamma", gamma)
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def _lr(self, base, step):
        return base * self.gamma**step


class LinearLR(LRScheduler):
    """From start_factor to end_factor times the first rate in total_iters steps, and there for good: a warm-up."""

    def __init__(self, optimizer, start_factor=1.0 / 3, end_factor=1.0, total_iters=5, last_epoch=-1):
        self._positive(start_factor=start_factor, total_iters=total_iters)
        check_number(self._name, "end_factor", end_factor)
        if not (start_factor <= 1 and 0 <= end_factor <= 1):
            raise ValueError(
                f"{self._name}: start_factor and end_factor must be at most 1, end_factor at least 0, "
                f"got {start_factor} and {end_factor}"
            )
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer, last_epoch)

    def _lr(self, base, step):
        share = min(self.total_iters, step) / self.total_iters
        return base * (self.start_factor + (self.end_factor - self.start_factor) * share)


class ConstantLR(LRScheduler):
    """factor times the first rate for total_iters steps, then the rate itself. ValueError unless factor lies in [0, 1]."""

    def __init__(self, optimizer, factor=1.0 / 3, total_iters=5, last_epoch=-1):
        self._positive(total_iters=total_iters)
        check_number(self._name, "factor", factor)
        if not 0 <= factor <= 1:
            raise ValueError(f"{self._name}: factor must lie in [0, 1], got {factor}")
        self.factor, self.total_iters = factor, total_iters
        super().__init__(optimizer, last_epoch)

    def _lr(self, base, step):
        return base * self.factor if step < self.total_iters else base


class PolynomialLR(LRScheduler):
    """The first rate times (1 - step / total_iters)**power, down to 0 and there for good."""

    def __init__(self, optimizer, total_iters=5, power=1.0, last_epoch=-1):
        self._positive(total_iters=total_iters, power=power)
        self.total_iters, self.power = total_iters, power
        super().__init__(optimizer, last_epoch)

    def _lr(self, base, step):
        return base * (1 - min(step, self.total_iters) / self.total_iters) ** self.power


class CosineAnnealingLR(LRScheduler):
    """Down to eta_min along half a cosine of T_max steps, and up again if they go on (Loshchilov and Hutter, 2017)."""

    def __init__(self, optimizer, T_max, eta_min=0.0, last_epoch=-1):
        self._positive(T_max=T_max)
        check_number(self._name, "eta_min", eta_min)
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, last_epoch)

    def _lr(self, base, step):
        return _cosine(base, self.eta_min, step / self.T_max)


class CosineAnnealingWarmRestarts(LRScheduler):
    """Down to eta_min along half a cosine of T_0 steps, then anew from the top, T_mult times as long each time.

    Loshchilov and Hutter, "SGDR", 2017. ValueError for a T_0 or T_mult that is no whole number from 1 on.
    """

    def __init__(self, optimizer, T_0, T_mult=1, eta_min=0.0, last_epoch=-1):
        for name, value in (("T_0", T_0), ("T_mult", T_mult)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{self._name}: {name} must be a whole number from 1 on, got {value!r}")
        check_number(self._name, "eta_min", eta_min)
        self.T_0, self.T_mult, self.eta_min = T_0, T_mult, eta_min
        super().__init__(optimizer, last_epoch)

    def _lr(self, base, step):
        length = self.T_0
        if self.T_mult == 1:
            step %= length
        while step >= length:
            step, length = step - length, length * self.T_mult
        return _cosine(base, self.eta_min, step / length)

    def step(self, epoch=None):
        """The next learning rate; or that at `epoch`, which may lie between two: epoch + batch / batches."""
        if epoch is None:
            return super().step()
        check_number(self._name, "epoch", epoch)
        if not epoch >= 0:
            raise ValueError(f"{self._name}: epoch must be at least 0, got {epoch}")
        self._write([{"lr": self._lr(base, epoch)} for base in self.base_lrs])
        self.last_epoch = math.floor(epoch)


class OneCycleLR(LRScheduler):
    """Up from max_lr / div_factor to max_lr and down to a 1 / final_div_factor of the start, momentum the other way.

    Smith and Topin, "Super-Convergence", 2019. pct_start: the share of the total_steps (or epochs * steps_per_epoch) that go up.
    three_phase: down as slowly as up, then on to the end. ValueError for a step past the last.
    """

    def __init__(
        self,
        optimizer,
        max_lr,
        total_steps=None,
        epochs=None,
        steps_per_epoch=None,
        pct_start=0.3,
        anneal_strategy="cos",
        cycle_momentum=True,
        base_momentum=0.85,
        max_momentum=0.95,
        div_factor=25.0,
        final_div_factor=1e4,
        three_phase=False,
        last_epoch=-1,
    ):
        groups = self._groups(optimizer)
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                raise ValueError(f"{self._name}: give total_steps, or epochs and steps_per_epoch")
            total_steps = epochs * steps_per_epoch
        self._positive(total_steps=total_steps, div_factor=div_factor, final_div_factor=final_div_factor)
        if not 0 <= pct_start <= 1:
            raise ValueError(f"{self._name}: pct_start must be between 0 and 1, got {pct_start}")
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(
                f"{self._name}: anneal_strategy must be 'cos' or 'linear', got {anneal_strategy!r}"
            )
        self.total_steps, self.anneal_strategy = total_steps, anneal_strategy
        self.cycle_momentum = cycle_momentum
        high = self._per_group("max_lr", max_lr, groups)
        low, most = (
            self._per_group(name, value, groups)
            for name, value in (("base_momentum", base_momentum), ("max_momentum", max_momentum))
        )
        start = [lr / div_factor for lr in high]
        end = [lr / final_div_factor for lr in start]
        # where each phase ends, and the rates and momenta there
        self.ends = [pct_start * total_steps - 1, total_steps - 1]
        corners, momenta = [start, high, end], [most, low, most]
        if three_phase:
            self.ends.insert(1, 2 * pct_start * total_steps - 2)
            corners, momenta = [start, high, start, end], [most, low, most, most]
        self.corners, self.momenta = (list(map(list, zip(*x, strict=True))) for x in (corners, momenta))
        for group, lr in zip(groups, start, strict=True):
            group["initial_lr"] = lr
        super().__init__(optimizer, last_epoch)

    def _at(self, step):
        if step > self.total_steps:
            raise ValueError(f"{self._name}: step {step} is past the last of total_steps={self.total_steps}")
        phase = min(bisect_left(self.ends, step), len(self.ends) - 1)
        start, end = self.ends[phase - 1] if phase else 0, self.ends[phase]
        share = (step - start) / (end - start) if end > start else 1.0
        anneal = _cosine if self.anneal_strategy == "cos" else _line
        options = [{"lr": anneal(*lrs[phase : phase + 2], share)} for lrs in self.corners]
        if self.cycle_momentum:
            for new, momenta, group in zip(options, self.momenta, self.optimizer.param_groups, strict=True):
                momentum = anneal(*momenta[phase : phase + 2], share)
                new |= (
                    {"betas": (momentum, group["betas"][1])} if "betas" in group else {"momentum": momentum}
                )
        return options


def _cosine(start, end, share):
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def _line(start, end, share):
    return start + (end - start) * share


class SequentialLR(LRScheduler):
    """One schedule after another: the next begins, at its step 0, at each of the milestones."""

    def __init__(self, optimizer, schedulers, milestones, last_epoch=-1):
        for s in schedulers:
            if isinstance(s, ReduceLROnPlateau) or s.optimizer is not optimizer:
                raise ValueError(
                    f"{self._name}: every schedule must be of this optimizer and need no metric, {type(s).__name__} is not"
                )
        if len(milestones) != len(schedulers) - 1:
            raise ValueError(
                f"{self._name}: {len(schedulers)} schedules need {len(schedulers) - 1} milestones, got {len(milestones)}"
            )
        self._schedulers, self._milestones = list(schedulers), list(milestones)
        self._rewind()
        super().__init__(optimizer, last_epoch)

    def _rewind(self):
        super()._rewind()
        for s in self._schedulers:
            s._rewind()

    def step(self):
        active = self._active(self.last_epoch + 1)
        active.step()
        self.last_epoch += 1
        self._last_lr = active.get_last_lr()

    def _active(self, step):
        return self._schedulers[bisect_right(self._milestones, step)]

    def _at(self, step):
        active = self._active(step)
        return active._at(active.last_epoch)

    def state_dict(self):
        return super().state_dict() | {"_schedulers": [s.state_dict() for s in self._schedulers]}

    def _loaded(self, state_dict):
        new = super()._loaded(state_dict)
        new._schedulers = [s._loaded(d) for s, d in zip(self._schedulers, new._schedulers, strict=True)]
        return new

    def load_state_dict(self, state_dict):
        mine = self._schedulers
        super().load_state_dict(state_dict)
        for s, new in zip(mine, self._schedulers, strict=True):
            vars(s).update(vars(new))
        self._schedulers = mine


class ReduceLROnPlateau(LRScheduler):
    """Times factor when step(metric) brought nothing better for more than patience calls; then cooldown calls of rest.

    mode: whether 'min' or 'max' is better, by more than threshold, a share ('rel') of the best so far or a number ('abs').
    Never below min_lr, and not at all for a change of less than eps.
    """

    def __init__(
        self,
        optimizer,
        mode="min",
        factor=0.1,
        patience=10,
        threshold=1e-4,
        threshold_mode="rel",
        cooldown=0,
        min_lr=0,
        eps=1e-8,
    ):
        numbers = {
            "factor": factor,
            "patience": patience,
            "threshold": threshold,
            "cooldown": cooldown,
            "eps": eps,
        }
        for name, value in numbers.items():
            check_number(self._name, name, value)
        if not factor < 1:
            raise ValueError(f"{self._name}: factor must be less than 1, got {factor}")
        if mode not in ("min", "max"):
            raise ValueError(f"{self._name}: mode must be 'min' or 'max', got {mode!r}")
        if threshold_mode not in ("rel", "abs"):
            raise ValueError(f"{self._name}: threshold_mode must be 'rel' or 'abs', got {threshold_mode!r}")
        self.min_lrs = self._per_group("min_lr", min_lr, self._groups(optimizer))
        vars(self).update(
            numbers, optimizer=optimizer, mode=mode, threshold_mode=threshold_mode, last_epoch=0
        )
        self.best = math.inf if mode == "min" else -math.inf
        self.cooldown_counter = self.num_bad_epochs = 0
        self._last_lr = [group["lr"] for group in optimizer.param_groups]

    def step(self, metrics):
        metric = float(metrics)
        self.last_epoch += 1
        self.num_bad_epochs += 1
        if self._is_better(metric):
            self.best, self.num_bad_epochs = metric, 0
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs > self.patience:
            self._reduce()
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _is_better(self, metric):
        sign = 1 if self.mode == "max" else -1
        if self.threshold_mode == "abs":
            return sign * metric > sign * self.best + self.threshold
        return sign * metric > sign * self.best * (1 + sign * self.threshold)

    def _reduce(self):
        for group, lowest in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
            lr = max(group["lr"] * self.factor, lowest)
            if group["lr"] - lr > self.eps:
                group["lr"] = lr

    def _at(self, step):
        return [{"lr": lr} for lr in self._last_lr]
