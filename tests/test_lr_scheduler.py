"""Learning-rate schedules: torch's rates, resuming, and what a skipped step leaves alone."""

import copy
import math
import pickle

import numpy as np
import pytest

import minamp
import minamp.optim.lr_scheduler
from minamp import nn, optim
from minamp.optim import lr_scheduler
from minamp.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR


def made(kind="SGD", **options):
    """An optimizer of two groups, with lr 0.1 and 0.3."""
    p, q = (nn.Parameter(np.ones(1, np.float32)) for _ in range(2))
    return getattr(optim, kind)([{"params": [p]}, {"params": [q], "lr": 0.3}], lr=0.1, **options)


def three_phases(o):
    return lr_scheduler.OneCycleLR(
        o,
        1.0,
        epochs=3,
        steps_per_epoch=3,
        anneal_strategy="linear",
        three_phase=True,
        pct_start=0.4,
        div_factor=10,
        final_div_factor=100,
    )


def in_a_row(o):
    warm_up, down, end = (
        lr_scheduler.LinearLR(o, 0.1, 1.0, 3),
        lr_scheduler.CosineAnnealingLR(o, 4),
        lr_scheduler.ExponentialLR(o, 0.5),
    )
    return SequentialLR(o, [warm_up, down, end], [3, 6])


# What torch 2.13 gives before each of nine steps: the rate of each group and, of one cycle, SGD's momentum.
RATES = {
    "LambdaLR": (
        lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.5**t),
        "0.1 0.05 0.025 0.0125 0.00625 0.003125 0.0015625 0.00078125 0.000390625",
        "0.3 0.15 0.075 0.0375 0.01875 0.009375 0.0046875 0.00234375 0.001171875",
    ),
    "LambdaLR of each group": (
        lambda o: lr_scheduler.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 1 - t / 10]),
        "0.1 0.05 0.03333333 0.025 0.02 0.01666667 0.01428571 0.0125 0.01111111",
        "0.3 0.27 0.24 0.21 0.18 0.15 0.12 0.09 0.06",
    ),
    "StepLR": (
        lambda o: lr_scheduler.StepLR(o, 3, 0.5),
        "0.1 0.1 0.1 0.05 0.05 0.05 0.025 0.025 0.025",
        "0.3 0.3 0.3 0.15 0.15 0.15 0.075 0.075 0.075",
    ),
    "MultiStepLR": (
        lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5], 0.5),
        "0.1 0.1 0.05 0.05 0.05 0.0125 0.0125 0.0125 0.0125",
        "0.3 0.3 0.15 0.15 0.15 0.0375 0.0375 0.0375 0.0375",
    ),
    "ExponentialLR": (
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        "0.1 0.09 0.081 0.0729 0.06561 0.059049 0.0531441 0.04782969 0.04304672",
        "0.3 0.27 0.243 0.2187 0.19683 0.177147 0.1594323 0.1434891 0.1291402",
    ),
    "LinearLR": (
        lambda o: lr_scheduler.LinearLR(o, 0.25, 0.75, 4),
        "0.025 0.0375 0.05 0.0625 0.075 0.075 0.075 0.075 0.075",
        "0.075 0.1125 0.15 0.1875 0.225 0.225 0.225 0.225 0.225",
    ),
    "ConstantLR": (
        lambda o: lr_scheduler.ConstantLR(o, 0.25, 3),
        "0.025 0.025 0.025 0.1 0.1 0.1 0.1 0.1 0.1",
        "0.075 0.075 0.075 0.3 0.3 0.3 0.3 0.3 0.3",
    ),
    "PolynomialLR": (
        lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
        "0.1 0.05625 0.025 0.00625 0 0 0 0 0",
        "0.3 0.16875 0.075 0.01875 0 0 0 0 0",
    ),
    "CosineAnnealingLR": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5, 0.01),
        "0.1 0.09140576 0.06890576 0.04109424 0.01859424 0.01 0.01859424 0.04109424 0.06890576",
        "0.3 0.2723075 0.1998075 0.1101925 0.03769254 0.01 0.03769254 0.1101925 0.1998075",
    ),
    "CosineAnnealingWarmRestarts": (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, eta_min=0.01),
        "0.1 0.055 0.1 0.055 0.1 0.055 0.1 0.055 0.1",
        "0.3 0.155 0.3 0.155 0.3 0.155 0.3 0.155 0.3",
    ),
    "CosineAnnealingWarmRestarts, ever longer": (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2, 0.01),
        "0.1 0.055 0.1 0.08681981 0.055 0.02318019 0.1 0.09657458 0.08681981",
        "0.3 0.155 0.3 0.2575305 0.155 0.05246952 0.3 0.2889625 0.2575305",
    ),
    "OneCycleLR": (
        lambda o: lr_scheduler.OneCycleLR(o, [1.0, 0.5], total_steps=9),
        "0.04 0.6513582 0.9944154 0.8985667 0.7056447 0.4626371 0.22873 0.06089297 4e-06",
        "0.02 0.3256791 0.4972077 0.4492833 0.3528224 0.2313186 0.114365 0.03044648 2e-06",
        "0.95 0.8863169 0.8505585 0.8601434 0.8794356 0.9037365 0.9271273 0.9439111 0.95",
    ),
    "OneCycleLR in three phases": (
        three_phases,
        "0.1 0.4461538 0.7923077 0.8615385 0.5153846 0.1692308 0.07171429 0.03635714 0.001",
        "0.1 0.4461538 0.7923077 0.8615385 0.5153846 0.1692308 0.07171429 0.03635714 0.001",
        "0.95 0.9115385 0.8730769 0.8653846 0.9038462 0.9423077 0.95 0.95 0.95",
    ),
    "SequentialLR": (
        in_a_row,
        "0.01 0.04 0.07 0.1 0.08535534 0.05 0.1 0.05 0.025",
        "0.03 0.12 0.21 0.3 0.256066 0.15 0.3 0.15 0.075",
    ),
}

# And after each of these metrics.
METRICS = [1.0, 0.9, 0.95, 0.91, 0.92, 0.89999, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6]
PLATEAUS = {
    "min": (
        {"factor": 0.5, "patience": 1, "cooldown": 1, "min_lr": [0.0, 0.2]},
        "0.1 0.1 0.1 0.05 0.05 0.05 0.05 0.05 0.025 0.025 0.025 0.0125",
        "0.3 0.3 0.3 0.2 0.2 0.2 0.2 0.2 0.2 0.2 0.2 0.2",
    ),
    "max": (
        {"mode": "max", "factor": 0.5, "patience": 2, "threshold": 0.01, "threshold_mode": "abs"},
        "0.1 0.1 0.1 0.05 0.05 0.05 0.025 0.025 0.025 0.0125 0.0125 0.0125",
        "0.3 0.3 0.3 0.15 0.15 0.15 0.075 0.075 0.075 0.0375 0.0375 0.0375",
    ),
    "max rel": (
        {"mode": "max", "patience": 0, "threshold": 0.1},
        "0.1 0.01 0.001 0.0001 1e-05 1e-06 1e-07 1e-08 1e-08 1e-08 1e-08 1e-08",
        "0.3 0.03 0.003 0.0003 3e-05 3e-06 3e-07 3e-08 3e-09 3e-09 3e-09 3e-09",
    ),
    "min abs": (
        {"patience": 1, "threshold": 0.01, "threshold_mode": "abs", "min_lr": 0.001},
        "0.1 0.1 0.1 0.01 0.01 0.001 0.001 0.001 0.001 0.001 0.001 0.001",
        "0.3 0.3 0.3 0.03 0.03 0.003 0.003 0.003 0.001 0.001 0.001 0.001",
    ),
}


def numbers(lines):
    """The table's columns as rows."""
    return list(zip(*([float(x) for x in line.split()] for line in lines), strict=True))


def shown(o, row):
    """As much of the optimizer's rates, and of its momentum, as the row has."""
    return [*(g["lr"] for g in o.param_groups), o.param_groups[0]["momentum"]][: len(row)]


@pytest.mark.parametrize("case", RATES)
def test_the_rates_are_torchs(case):
    make, *lines = RATES[case]
    o = made()
    schedule = make(o)
    for row in numbers(lines):
        assert shown(o, row) == pytest.approx(row, rel=1e-6)
        assert schedule.get_last_lr() == [g["lr"] for g in o.param_groups]
        schedule.step()


def test_warm_restarts_between_two_epochs():
    o = made()
    schedule = lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2, 0.01)
    for epoch, *rates in (
        (0.5, 0.08681981, 0.2575305),
        (1.5, 0.02318019, 0.05246952),
        (2, 0.1, 0.3),
        (5.75, 0.01086466, 0.01278613),
        (14.25, 0.0999458, 0.2998253),
    ):
        schedule.step(epoch)
        assert schedule.get_last_lr() == pytest.approx(rates, rel=1e-6)
    assert schedule.last_epoch == 14
    other = made()
    resumed = lr_scheduler.CosineAnnealingWarmRestarts(other, 2, 2, 0.01)
    resumed.load_state_dict(schedule.state_dict())
    schedule.step(), resumed.step()
    assert resumed.get_last_lr() == schedule.get_last_lr() != [0.1, 0.3]
    with pytest.raises(ValueError, match="^CosineAnnealingWarmRestarts: epoch must be at least 0, got -1"):
        schedule.step(-1)


def test_a_schedule_that_counts_its_steps():
    """As published for the first Transformer."""

    class Noam(lr_scheduler.LRScheduler):
        def get_lr(self):
            t = max(1, self._step_count)
            return [base * min(t**-0.5, t * 4**-1.5) for base in self.base_lrs]

    o = made()
    schedule = Noam(o)
    rates = [schedule.get_last_lr()[0]]
    for _ in range(5):
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    # what torch 2.13 gives
    assert rates == pytest.approx([0.0125, 0.025, 0.0375, 0.05, 0.04472136, 0.04082483], rel=1e-6)


@pytest.mark.parametrize("case", PLATEAUS)
def test_a_plateaus_rates_are_torchs(case):
    options, *lines = PLATEAUS[case]
    o = made()
    schedule = ReduceLROnPlateau(o, **options)
    for metric, row in zip(METRICS, numbers(lines), strict=True):
        schedule.step(minamp.tensor(metric))
        assert schedule.get_last_lr() == [g["lr"] for g in o.param_groups] == pytest.approx(row, rel=1e-6)


def test_one_cycle_moves_adams_first_beta():
    o = made("Adam")
    schedule = lr_scheduler.OneCycleLR(o, [1.0, 0.5], total_steps=9)
    for row in numbers(["0.95 0.8863169 0.8505585 0.8601434 0.8794356 0.9037365 0.9271273 0.9439111 0.95"]):
        assert [*o.param_groups[1]["betas"]] == pytest.approx([*row, 0.999])
        schedule.step()


# -- saving and resuming


@pytest.mark.parametrize("case", RATES)
@pytest.mark.parametrize("at", [1, 4, 7])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_resumed_schedule_goes_on(case, at, optimizer_first):
    make, *lines = RATES[case]
    o = made()
    schedule = make(o)
    for _ in range(at):
        schedule.step()
    saved = pickle.loads(pickle.dumps((o.state_dict(), schedule.state_dict())))
    other = made()
    if optimizer_first:
        other.load_state_dict(saved[0])
    resumed = make(other)
    if not optimizer_first:
        other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for row in numbers(lines)[at:]:
        assert shown(other, row) == pytest.approx(row, rel=1e-6)
        resumed.step()


def test_a_resumed_plateau_goes_on():
    options, *lines = PLATEAUS["min"]
    o = made()
    schedule = ReduceLROnPlateau(o, **options)
    for metric in METRICS[:8]:
        schedule.step(metric)
    other = made()
    resumed = ReduceLROnPlateau(other, **options)
    resumed.load_state_dict(pickle.loads(pickle.dumps(schedule.state_dict())))
    for metric, row in zip(METRICS[8:], numbers(lines)[8:], strict=True):
        resumed.step(metric)
        assert [g["lr"] for g in other.param_groups] == pytest.approx(row, rel=1e-6)


@pytest.mark.parametrize("make", [RATES["OneCycleLR"][0], in_a_row, ReduceLROnPlateau])
def test_a_state_is_saved_in_a_file(make, tmp_path):
    schedule = make(made())
    minamp.save(schedule.state_dict(), tmp_path / "schedule")
    assert minamp.load(tmp_path / "schedule") == schedule.state_dict()


def test_last_epoch_resumes_from_the_groups_initial_rate():
    o = made()
    for _ in range(2):
        StepLR(o, 1, 0.5).step()
    schedule = StepLR(o, 1, 0.5, last_epoch=1)
    assert schedule.last_epoch == 2 and schedule.get_last_lr() == pytest.approx([0.025, 0.075])
    with pytest.raises(
        KeyError, match="^.StepLR: group 0 has no 'initial_lr': load the optimizer's state first"
    ):
        StepLR(made(), 1, last_epoch=3)


@pytest.mark.parametrize("make", [*(case[0] for case in RATES.values()), ReduceLROnPlateau])
def test_a_state_that_does_not_fit_changes_nothing(make):
    o = made()
    schedule = make(o)
    before, rates = copy.deepcopy(schedule.state_dict()), [g["lr"] for g in o.param_groups]
    name = type(schedule).__name__
    with pytest.raises(ValueError, match=f"^{name}.load_state_dict: the state has no "):
        schedule.load_state_dict({"last_epoch": 3})
    with pytest.raises(TypeError, match=f"^{name}.load_state_dict: last_epoch must be a number, got 'x'"):
        schedule.load_state_dict({**before, "last_epoch": "x"})
    assert schedule.state_dict() == before and [g["lr"] for g in o.param_groups] == rates


# -- with a scaler


def test_the_schedule_follows_the_steps_that_are_made():
    """The loop of the module's first lines."""
    o = made()
    scaler, schedule = minamp.GradScaler(init_scale=4.0), StepLR(o, 1, 0.5)
    for kind in (math.inf, 1.0, math.inf, 1.0):
        loss = minamp.tensor(1.0)
        scaler.scale(loss)
        for group in o.param_groups:
            group["params"][0].grad = minamp.tensor([kind])
        stepped = scaler.step(o)
        scaler.update()
        if stepped:
            schedule.step()
    assert schedule.last_epoch == 2 and schedule.get_last_lr() == pytest.approx([0.025, 0.075])


# -- errors


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda o: StepLR(nn.Linear(1, 1), 1),
            TypeError,
            "StepLR: the first argument must be an optimizer, got Linear",
        ),
        (lambda o: StepLR(o, "3"), TypeError, "StepLR: step_size must be a number, got '3'"),
        (lambda o: StepLR(o, 0), ValueError, "StepLR: step_size must be above 0, got 0"),
        (lambda o: lr_scheduler.ExponentialLR(o, "x"), TypeError, "ExponentialLR: gamma must be a number"),
        (lambda o: lr_scheduler.MultiStepLR(o, [1], None), TypeError, "MultiStepLR: gamma must be a number"),
        (
            lambda o: lr_scheduler.LambdaLR(o, [abs]),
            ValueError,
            "lr_lambda has 1 values for 2 parameter groups",
        ),
        (
            lambda o: lr_scheduler.ConstantLR(o, 1.5),
            ValueError,
            r"ConstantLR: factor must lie in \[0, 1\], got 1.5",
        ),
        (
            lambda o: lr_scheduler.PolynomialLR(o, 0),
            ValueError,
            "PolynomialLR: total_iters must be above 0, got 0",
        ),
        (lambda o: lr_scheduler.LinearLR(o, 0), ValueError, "LinearLR: start_factor must be above 0, got 0"),
        (
            lambda o: lr_scheduler.LinearLR(o, 1, 2),
            ValueError,
            "start_factor and end_factor must be at most 1",
        ),
        (
            lambda o: lr_scheduler.CosineAnnealingLR(o, 0),
            ValueError,
            "CosineAnnealingLR: T_max must be above 0",
        ),
        (
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2.5),
            ValueError,
            "CosineAnnealingWarmRestarts: T_0 must be a whole number from 1 on, got 2.5",
        ),
        (
            lambda o: lr_scheduler.OneCycleLR(o, 1.0),
            ValueError,
            "give total_steps, or epochs and steps_per_epoch",
        ),
        (
            lambda o: lr_scheduler.OneCycleLR(o, 1.0, 9, pct_start=2),
            ValueError,
            "pct_start must be between 0 and 1",
        ),
        (
            lambda o: lr_scheduler.OneCycleLR(o, 1.0, 9, anneal_strategy="x"),
            ValueError,
            "must be 'cos' or 'linear'",
        ),
        (lambda o: SequentialLR(o, [StepLR(o, 1)], [1]), ValueError, "1 schedules need 0 milestones, got 1"),
        (lambda o: SequentialLR(o, [StepLR(made(), 1)], []), ValueError, "must be of this optimizer"),
        (lambda o: SequentialLR(o, [ReduceLROnPlateau(o)], []), ValueError, "ReduceLROnPlateau is not"),
        (lambda o: ReduceLROnPlateau(o, factor=1), ValueError, "factor must be less than 1, got 1"),
        (lambda o: ReduceLROnPlateau(o, "best"), ValueError, "mode must be 'min' or 'max', got 'best'"),
        (lambda o: ReduceLROnPlateau(o, threshold_mode="x"), ValueError, "must be 'rel' or 'abs', got 'x'"),
        (lambda o: LRScheduler(o), NotImplementedError, r"LRScheduler has no get_lr\(\)"),
    ],
)
def test_errors_name_the_argument_and_the_repair(make, error, text):
    with pytest.raises(error, match=text):
        make(made())


def test_a_cycle_ends_and_a_new_group_needs_a_new_schedule():
    o = made()
    schedule = lr_scheduler.OneCycleLR(o, 1.0, total_steps=2)
    schedule.step(), schedule.step()
    before = schedule.state_dict(), repr(o)
    with pytest.raises(ValueError, match="OneCycleLR: step 3 is past the last of total_steps=2"):
        schedule.step()
    assert (schedule.state_dict(), repr(o)) == before
    schedule = StepLR(o, 1)
    o.add_param_group({"params": [nn.Parameter(np.ones(1, np.float32))]})
    with pytest.raises(ValueError, match="StepLR: made for 2 parameter groups, the optimizer has 3"):
        schedule.step()


class Poly(lr_scheduler._LRScheduler):
    """As users write them for torch: from the first rates."""

    def __init__(self, optimizer, steps, power=0.9, last_epoch=-1):
        self.steps, self.power = steps, power
        super().__init__(optimizer, last_epoch)

    def get_lr(self):
        return [base * (1 - self.last_epoch / self.steps) ** self.power for base in self.base_lrs]


class Halving(LRScheduler):
    """From the rates as they stand, every second step."""

    def get_lr(self):
        factor = 0.5 if self.last_epoch > 0 and self.last_epoch % 2 == 0 else 1.0
        return [group["lr"] * factor for group in self.optimizer.param_groups]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda o: Poly(o, 10), [0.1 * (1 - t / 10) ** 0.9 for t in range(9)]),
        (Halving, [0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125, 0.00625]),
    ],
)
def test_a_schedule_of_ones_own_defines_get_lr(make, wanted):
    optimizer = made()
    schedule = make(optimizer)
    seen = []
    for t in range(9):
        if t == 4:  # goes on in a new one, after an odd and an even step alike
            state, optimizer = schedule.state_dict(), made()
            schedule = make(optimizer)
            schedule.load_state_dict(state)
        seen.append(optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == [g["lr"] for g in optimizer.param_groups]
        assert optimizer.param_groups[1]["lr"] == pytest.approx(3 * seen[-1])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx(wanted)


def test_a_get_lr_that_fails_changes_nothing():
    class Failing(Halving):
        def get_lr(self):
            return super().get_lr() if self.last_epoch < 2 else 1 / 0

    optimizer = made()
    schedule = Failing(optimizer)
    schedule.step()
    with pytest.raises(ZeroDivisionError):
        schedule.step()
    assert schedule.last_epoch == 1 and optimizer.param_groups[0]["lr"] == 0.1
