"""The doctor's short way, whose second call of the step is the float32 run: it finds what two calls in half find."""

import numpy as np
import pytest
from test_doctor import ILL, WELL
from test_doctor_scripts import BROKEN, HEALTHY

import minamp
from minamp.clinic.trace import Trace

ALL = {f"{name}-well": build for scripts in (WELL, HEALTHY) for name, build in scripts.items()}
ALL |= {name: build for scripts in (ILL, BROKEN) for name, (_, build) in scripts.items()}
# (name, steps before) -> what shows where both calls in half are skipped: the step before has ruined the weights
SKIPPED_TWICE = {("an_optimizer_that_steps_another", 1): []}


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("name", ALL)
def test_both_ways_give_one_list(name, before, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    reports = []
    for repeats in (Trace.repeats, False):
        monkeypatch.setattr(Trace, "repeats", repeats)
        minamp.manual_seed(0)
        np.random.seed(0)
        it = ALL[name]()
        try:
            for _ in range(before):
                it["step"]()
            reports.append(minamp.doctor(it["step"], it["model"], it["optimizer"], it["scaler"]))
        except Exception as error:  # a broken step that can go on no more
            reports.append(str(error))
    short, long = reports
    if isinstance(short, str):
        assert short == long
        return
    found = [f.code for f in short]
    assert [f.code for f in long] == SKIPPED_TWICE.get((name, before), found)
    assert long.steps >= 3 or long.error
