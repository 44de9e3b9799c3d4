"""The story of two processes: it holds on real ranks, what does not hold is said, and so is a missing MPI."""

import dataclasses
import json

import pytest

from minamp.demo import __main__ as command
from minamp.demo import data_parallel
from minamp.demo.data_parallel import Run
from minamp.distributed.__main__ import why_not

needs_mpi = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@needs_mpi
def test_the_story_by_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data_parallel, "QUICK", 6)  # checkpoints in steps 2 and 4, overflow in 3, death in 5
    file = tmp_path / "out.json"
    assert command.main(["mpi", "--quick", "--seed", "3", "--json", str(file)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("rank 1 was killed by SIGKILL while rank 0 was in averaging", "9 of 9 claims held"):
        assert words in out
    found = json.loads(file.read_text())
    runs = found["acts"]["mpi"]
    assert found["device"] == "cpu" and len(runs) == 9 and len(found["claims"]) == 9
    assert runs["overflow, 2 processes"]["made"] == [[True, True, False, True, True, True]] * 2
    assert runs["overflow, 2 processes"]["losses"][1][2] is None
    assert runs["resumed, 2 processes"]["first"] == 5
    assert [len(losses) for losses in runs["float16, 1 process"]["losses"]] == [6]


@needs_mpi
def test_ranks_that_fail_are_heard(tmp_path):
    with pytest.raises(RuntimeError, match="KeyError: 'no such run'"):
        data_parallel.start(tmp_path, 0, 6, 1, ["no such run"])


class Silent:
    """A stage that only remembers the claims."""

    def __init__(self):
        self.held, self.console = [], self

    def claim(self, act, sentence, ok):
        self.held.append(bool(ok))

    def say(self, *_):
        pass

    print = say


def held(tell, *arguments):
    stage = Silent()
    tell(stage, *arguments)
    return stage.held


ONE = Run("one", 1, losses=[[2.0, 1.0, 0.5]], made=[[True] * 3], weights=["a"])
TWO = Run(
    "two",
    2,
    losses=[[2.5, 1.0, 0.25], [1.5, 1.0, 0.75]],
    scales=[[4.0, 2.0, 2.0]] * 2,
    made=[[True] * 3] * 2,
    weights=["a", "a"],
    state_bytes=[50, 50],
)


def changed(run, **fields):
    return dataclasses.replace(run, **fields)


def test_the_same_training():
    tell = data_parallel._same_training
    assert held(tell, ONE, TWO, ONE, TWO) == [True, True, True]
    far = changed(TWO, losses=[[2.5, 1.0, 0.25], [1.5, 1.00001, 0.75]])  # 5e-6 in the batch's loss
    assert held(tell, ONE, far, ONE, far) == [False, True, True]
    skipped = changed(TWO, made=[[True, False, True]] * 2, weights=["a", "b"])
    assert held(tell, ONE, TWO, ONE, skipped) == [True, False, False]


def test_an_overflow():
    losses = [[2.5, 1.0, 0.2], [1.5, float("nan"), 0.7]]
    overflow = changed(TWO, losses=losses, made=[[True, False, True]] * 2)
    assert held(data_parallel._overflow, overflow, 2) == [True, True]
    alone = changed(overflow, made=[[True] * 3, [True, False, True]], scales=[[4.0] * 3, [4.0, 2.0, 2.0]])
    assert held(data_parallel._overflow, alone, 2) == [False, False]


def test_a_death():
    said = "PeerError: rank 1 was killed by SIGKILL while rank 0 was in averaging gradients"
    for text, seconds, ok in ((said, 2.0, True), (said, 21.0, False), ("", 2.0, False)):
        assert held(data_parallel._death, Run("killed", 2, said=text, seconds=seconds), 2) == [ok]


def test_a_resumed_run():
    resumed = changed(TWO, first=2, losses=[[1.0, 0.25], [1.0, 0.75]])
    assert held(data_parallel._resume, TWO, resumed) == [True]
    assert held(data_parallel._resume, TWO, changed(resumed, weights=["a", "b"])) == [False]
    assert held(data_parallel._resume, TWO, changed(resumed, losses=[[1.0, 0.25], [1.0, 0.76]])) == [False]
    assert held(data_parallel._resume, TWO, changed(TWO, first=1)) == [False]


def test_shares():
    whole = changed(TWO, state_bytes=[100, 100])
    assert held(data_parallel._shares, whole, TWO) == [True, True]
    uneven = changed(TWO, state_bytes=[60, 40], weights=["a", "b"])
    assert held(data_parallel._shares, whole, uneven) == [False, False]


def test_without_mpi_it_is_one_line_and_exit_2(monkeypatch, capsys):
    monkeypatch.setattr(command, "why_not", lambda: "there is no mpiexec: install it")
    assert command.main(["mpi"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "demo: mpi: there is no mpiexec: install it\n")


@pytest.mark.parametrize(
    "options, words",
    [
        (["mpi", "--act", "1"], "mpi has no acts"),
        (["mpi", "--variant", "half"], "belongs to the detector"),
        (["mpi", "--device", "cuda"], "the processes of mpi run on the CPU"),
    ],
)
def test_wrong_options(options, words, capsys):
    with pytest.raises(SystemExit) as exit:
        command.main(options)
    assert exit.value.code == 2 and words in capsys.readouterr().err
