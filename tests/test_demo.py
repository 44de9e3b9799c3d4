"""The demo: each failure happens and each cure works, in short trainings; and what the command line promises."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import minamp
from minamp.data import digits
from minamp.demo import acts, experiment, figures
from minamp.demo.__main__ import main, parse


@pytest.fixture(scope="module")
def data():
    return digits()


def train(data, act, number, steps, seed=0):
    return experiment.train(experiment.ARMS[act][number], data, steps, seed)


# ------------------------------------------------------------------------------------------------ the failures, the cures


@pytest.mark.parametrize("seed", range(6))
def test_act_1_collapses_and_is_cured(data, seed):
    full, broken, cured = (train(data, 1, i, 25, seed) for i in range(3))
    assert 4 <= broken.nan_step <= 25
    assert np.isfinite(broken.losses[: broken.nan_step - 1]).all()
    assert not np.isfinite(broken.losses[broken.nan_step - 1 :]).any()
    assert broken.accuracy is None and broken.nan_gradients > 0.2
    assert broken.bad_op == "exp" and 11.0859375 < broken.largest_input < 40
    assert "exp overflows float16 above 11.0859375" in broken.first_bad_op
    for run in full, cured:
        assert run.nan_step is None and run.losses[0] > 2.0 and np.mean(run.losses[-5:]) < 1.2
        assert run.accuracy > 0.6


def test_act_2_loses_updates_and_is_cured(data):
    full, broken, cured = (train(data, 2, i, 60) for i in range(3))
    assert full.lost_updates < 0.05 and cured.lost_updates < 0.05
    assert broken.lost_updates > 0.5
    assert acts.tail(broken) - acts.tail(full) > 0.05
    assert abs(acts.tail(cured) - acts.tail(full)) < 0.02


@pytest.mark.parametrize("seed", range(6))
def test_act_3_flushes_gradients(data, seed):
    full, broken, _ = experiment.ARMS[3]
    seen, exact = experiment.first_gradients(full, data[0], 1.0, seed)
    unscaled = experiment.first_gradients(broken, data[0], 1.0, seed)[1]
    scaled = experiment.first_gradients(broken, data[0], 2.0**13, seed)[1]
    nonzero = exact != 0
    assert (unscaled[nonzero] == 0).mean() > 0.9
    assert (scaled[nonzero] == 0).mean() < 0.2 and np.isfinite(scaled).all()
    assert seen.weights.total == exact.size and seen.weights.zeros == exact.size - nonzero.sum()


def test_act_3_waits_on_the_plateau_and_is_cured(data):
    broken, cured = (train(data, 3, i, 62) for i in (1, 2))
    assert cured.left_plateau < 62 and broken.left_plateau is None
    assert cured.losses[-1] < experiment.PLATEAU < broken.losses[-1]


def test_the_recipe_skips_steps_and_halves_the_memory(data):
    arm = dataclasses.replace(experiment.ARMS[4][1], scaler={"init_scale": 2.0**24, "growth_interval": 5})
    run = experiment.train(arm, data, 20)
    assert run.skips and all(run.scales[step - 1] < 2.0**24 for step in run.skips)
    assert np.isfinite(run.losses).all()
    full = train(data, 4, 0, 1)
    assert 0.45 < run.saved_bytes / full.saved_bytes < 0.6
    assert train(data, 4, 2, 1).saved_bytes < 0.6 * full.saved_bytes


def test_a_run_repeats(data):
    assert train(data, 1, 2, 4).losses == train(data, 1, 2, 4).losses
    assert train(data, 1, 2, 4).losses != train(data, 1, 2, 4, seed=1).losses


# ------------------------------------------------------------------------------------------------------- the command line


def test_act_1_by_the_command_line(tmp_path, capsys):
    file, figures = tmp_path / "out.json", tmp_path / "figures"
    options = ["--act", "1", "--quick", "--seed", "3", "--json", str(file), "--figures", str(figures)]
    assert main(options) == 0
    out = capsys.readouterr().out
    for words in (
        "Act 1: NaN collapse",
        "exp overflows float16 above 11.0859375",
        "3 of 3 claims held",
        "Read next:",
    ):
        assert words in " ".join(out.split())
    found = json.loads(file.read_text())
    assert (found["seed"], found["device"], found["quick"], list(found["acts"])) == (3, "cpu", True, ["1"])
    assert {"python", "numpy", "minamp"} <= set(found["versions"]) and {"system", "cores"} <= set(
        found["machine"]
    )
    assert all(claim["ok"] for claim in found["claims"])
    broken = found["acts"]["1"]["float16 everywhere"]
    assert broken["losses"][broken["nan_step"] - 1] is None and broken["accuracy"] is None
    fields = {
        "nan_step",
        "accuracy",
        "losses",
        "flushed",
        "lost_updates",
        "skips",
        "scales",
        "saved_bytes",
        "seconds",
    }
    assert all(fields <= set(run) for run in found["acts"]["1"].values())
    assert [p.name for p in figures.iterdir()] == ["collapse.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["figures", "out.json"]


def test_a_failure_that_does_not_happen_is_said(tmp_path, capsys, monkeypatch):
    full = experiment.ARMS[1][0]
    monkeypatch.setitem(
        experiment.ARMS, 1, [full, dataclasses.replace(full, name="float16 everywhere"), full]
    )
    monkeypatch.setitem(experiment.QUICK, 1, 10)
    assert main(["--act", "1", "--quick", "--figures", str(tmp_path)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "Not as expected: float16 everywhere collapsed to NaN within the first pass over the data" in out


def test_no_gpu_is_one_line_and_exit_2(capsys, monkeypatch):
    monkeypatch.setattr(minamp, "gpu_status", lambda: "cupy is not importable")
    assert main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "demo: --device cuda: cupy is not importable\n"


@pytest.mark.parametrize(
    "options, words",
    [
        (["--act", "5"], "invalid choice"),
        (["--seed", "-1"], "must be at least 0, got -1"),
        (["--fast"], "unrecognized"),
    ],
)
def test_wrong_options(options, words, capsys):
    with pytest.raises(SystemExit) as exit:
        main(options)
    assert exit.value.code == 2 and words in capsys.readouterr().err


def test_ctrl_c(tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "training_step", interrupt)
    assert (
        main(["--act", "2", "--quick", "--figures", str(tmp_path), "--json", str(tmp_path / "x.json")]) == 130
    )
    assert capsys.readouterr().err.strip() == "stopped"
    assert list(tmp_path.iterdir()) == []


def test_only_the_readmes_run_writes_the_readmes_figures():
    folders = {" ".join(a): str(parse(a).figures) for a in ([], ["--act", "1"], ["--quick"], ["--seed", "3"])}
    assert folders == {
        "": "figures",
        "--act 1": "figures",
        "--quick": "build/figures",
        "--seed 3": "build/figures",
    }
    assert str(parse(["--quick", "--figures", "mine"]).figures) == "mine"


def test_the_module_runs_and_imports_nothing_heavy():
    code = "import sys, minamp.demo.__main__; print([m for m in ('matplotlib', 'rich', 'cupy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    # so that it starts anew
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "minamp.demo", "--help"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and "--figures DIR" in done.stdout


# ---------------------------------------------------------------------------------------------------------------- figures


def test_an_interrupted_figure_leaves_the_old_one(tmp_path):
    path = tmp_path / "scale.png"
    path.write_bytes(b"old")

    def interrupted(figure):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        figures.save_figure(path, interrupted, 4)
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["scale.png"]


def test_figures_are_1200_pixels_wide(tmp_path, data):
    run = experiment.Run("x", scales=[2.0**16] * 30 + [2.0**15] * 30, skips=[31])
    figures.save_figure(tmp_path / "a.png", lambda f: figures.scale_trace(f, run, 25), 4)
    seen, _ = experiment.first_gradients(experiment.ARMS[3][0], data[0], 1.0)
    figures.save_figure(tmp_path / "b.png", lambda f: figures.underflow(f, seen.weights, 2.0**13), 6.5)
    for path in tmp_path.iterdir():
        header = path.read_bytes()[:24]
        assert header[1:4] == b"PNG" and int.from_bytes(header[16:20], "big") == 1200


@pytest.mark.parametrize(
    "share, text", [(0, "0 %"), (1e-5, "<0.1 %"), (0.9345, "93.5 %"), (0.9999, ">99.9 %"), (1, "100 %")]
)
def test_percent_never_rounds_to_none_or_all(share, text):
    assert figures.percent(share) == text
