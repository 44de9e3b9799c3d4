"""Several processes: each test starts ranks through `python -m minamp.distributed` and reads what they report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minamp
from minamp import distributed as dist
from minamp import nn, record
from minamp.distributed.__main__ import command, why_not

ROOT = Path(__file__).resolve().parents[1]

needs_mpi = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


def start(ranks, *arguments):
    """(exit code, {rank: what it reported}, what was said on stderr) of tests/ranks.py on that many ranks."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    line = [
        sys.executable,
        "-m",
        "minamp.distributed",
        "-n",
        str(ranks),
        str(ROOT / "tests" / "ranks.py"),
        *arguments,
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=90, env=environment, cwd=ROOT)
    facts = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    return done.returncode, {f.pop("rank"): f for f in facts}, done.stderr


def together(ranks, *arguments):
    """What every rank reported, in order; all must have ended well."""
    code, facts, said = start(ranks, *arguments)
    assert code == 0 and sorted(facts) == list(range(ranks)), said
    return [facts[r] for r in range(ranks)]


# ------------------------------------------------------------------------------------------------------------- training


@needs_mpi
def test_the_losses_are_those_of_one_process_with_the_whole_batch():
    # float16: each rank rounds the sums over its part of the batch, which is another rounding than the whole batch's
    tolerances = {"float32 sgd": 1e-6, "float32 adam": 1e-6, "float16 sgd": 2e-3, "float16 adam": 2e-3}
    (alone,) = together(1, "traces")
    for ranks in (2, 4):
        several = together(ranks, "traces")
        assert all(s == several[0] for s in several), "ranks drift apart"
        for name, tolerance in tolerances.items():
            theirs, ours = alone[name]["losses"], several[0][name]["losses"]
            np.testing.assert_allclose(ours, theirs, atol=tolerance * max(theirs), rtol=0, err_msg=name)
            assert several[0][name]["buckets"] > 1 and theirs[-1] < 0.7 * theirs[0]


@needs_mpi
def test_the_first_bucket_leaves_while_backward_still_runs():
    for facts in together(2, "overlap"):
        assert facts["missing"] == [1, 0]  # the first layer's weight has no gradient yet


@needs_mpi
def test_accumulation_inside_no_sync():
    facts = together(2, "accumulation")
    assert facts[0]["sums"] == facts[1]["sums"] and facts[0]["local"] != facts[1]["local"]
    assert max(f["apart"] for f in facts) < 1e-7


@needs_mpi
def test_a_parameter_that_one_rank_did_not_use():
    a, b = (f["grads"] for f in together(2, "unused"))
    assert a == b
    assert a["second.bias"] == [1.0] * 4  # 2 rows, the mean over 2 ranks
    assert a["none.weight"] is None and a["none.bias"] is None


@needs_mpi
def test_buffers_are_rank_0s():
    a, b = together(2, "buffers")
    assert a["start"] == b["start"] == [5.0] * 3
    assert a["end"] == b["end"] or a["end"] != [5.0] * 3


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_overflow_of_one_rank_skips_the_step_on_all(ranks):
    facts = together(ranks, "overflow_in_forward")
    assert all(f == facts[0] for f in facts)
    assert facts[0]["made"] == [True, False, True] and facts[0]["scales"] == [256.0, 128.0, 128.0]


@needs_mpi
@pytest.mark.parametrize("shares", ["true", "false"])
def test_where_ranks_hold_other_gradients_one_overflow_skips_the_step_on_all(shares):
    a, b = together(2, "overflow", shares, "sharded")
    assert a == b and a["made"] == [True, False, True] and a["scales"] == [256.0, 128.0, 128.0]


@needs_mpi
def test_without_comparing_found_inf_ranks_drift():
    a, b = together(2, "overflow", "false", "plain")
    assert a["made"] == [True, False, True] and b["made"] == [True, True, True]
    assert a["scales"][-1] == 128.0 and b["scales"][-1] == 256.0 and a["weights"] != b["weights"]


# ------------------------------------------------------------------------------------------------------------- shares


@needs_mpi
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_optimizer_state_in_shares(ranks, tmp_path):
    facts = together(ranks, "zero", str(tmp_path / "checkpoint.npz"))
    assert all(f["same"] and f["exact"] for f in facts)
    assert sum(f["bytes"] for f in facts) == facts[0]["whole"]
    assert sorted(i for f in facts for i in f["mine"]) == list(range(4))


@needs_mpi
def test_more_ranks_than_parameters():
    a, b = together(2, "more_ranks_than_parameters")
    assert a["weights"] == b["weights"] and [a["mine"], b["mine"]] == [[0], []]


# ------------------------------------------------------------------------------------------------------------- half


@needs_mpi
def test_sums_in_half_lose_what_float32_keeps():
    for f in together(2, "half"):
        assert f["float16"] == [2048.0, float("inf"), 3.0, 2.0**-23]
        assert f["bfloat16"] == [256.0, float("inf")]
        assert f["small"]["float16"] == 0.0 and abs(f["small"]["float32"] - 1e-8) < 1e-14


@needs_mpi
def test_one_log_for_all_ranks():
    line, environment = command(2, [str(ROOT / "tests" / "ranks.py"), "talk"])
    done = subprocess.run(
        line, capture_output=True, text=True, env={**environment, "PYTHONPATH": str(ROOT)}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("said once 2") == 1
    facts = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    assert (
        all(f["sum"] == 10 and f["gathered"] == [{"rank": 0}, {"rank": 1}] for f in facts) and len(facts) == 2
    )


# ------------------------------------------------------------------------------------------------------------- GPUs


@needs_mpi
def test_gpus_without_nccl_sum_through_main_memory():
    a, b = together(2, "gpu", "host")
    assert a["same"] and b["same"] and a["weights"] == b["weights"] and not a["asked"]


@needs_mpi
def test_gpus_with_nccl_sum_every_bucket_where_it_lies():
    for rank, facts in enumerate(together(2, "gpu", "nccl")):
        assert facts["same"] and "ranks share a GPU: give each one of its own" in facts["shared"]
        join, *sums = facts["asked"]
        assert join == ["join", 2, [1, 2, 3], rank]
        # two buckets a step: the last layer (80 + 10) with the first bias (8), the first weight; one flag for each tensor
        assert sums == [["sum", 98 + 3, 77], ["sum", 6272 + 1, 77]] * 3


# ------------------------------------------------------------------------------------------------------------- what goes wrong


@needs_mpi
@pytest.mark.parametrize(
    "wrong, text",
    [
        ("version", "the ranks differ in minamp's version: rank 0 has '0.1.0', rank 1 has '9.9'"),
        ("shape", "the ranks differ in the module: rank 0 has [16, 8], rank 1 has [17, 8]"),
        ("seed", "rank 0 has 0, rank 1 has 1"),
        ("batch", "a batch of 17 can't be shared evenly by 2 ranks"),
        ("raise", "ValueError: a bad sample"),
        ("fewer", "rank 1 has ended its program while rank 0 was in averaging gradients"),
        ("exit", "rank 1 has ended its program while rank 0 was in averaging gradients"),
        ("kill", "rank 1 was killed by SIGKILL while rank 0 was in averaging gradients"),
        ("hang", "has waited 4 s for the other ranks in averaging gradients"),
    ],
)
def test_what_one_rank_does_wrong_ends_every_rank_with_its_name(wrong, text):
    code, _, said = start(2, "loop", wrong)
    assert code != 0
    assert text in said, said
    ended = [r for r in range(2) if f"--- rank {r} of 2" in said]
    assert ended == ([0] if wrong in ("kill", "hang") else [0, 1]), said
    assert "the run has ended with an error" in said


def test_a_killed_rank_is_read_when_its_file_is_whole(tmp_path):
    from minamp.distributed.farewell import Farewell

    farewell = Farewell.__new__(Farewell)
    farewell.folder, farewell.looked = str(tmp_path), -1.0
    (tmp_path / "part").write_text("13")  # the launcher is about to write 137
    assert farewell._killed() == []
    (tmp_path / "part").write_text("137\n")
    (tmp_path / "part").rename(tmp_path / "1")
    farewell.looked = -1.0
    assert farewell._killed() == [(1, "SIGKILL")]


@needs_mpi
def test_refusals():
    a, b = together(2, "refusals")
    assert a["texts"] == b["texts"] and a["untouched"] and a["reducers"] == 0
    for text, part in zip(
        a["texts"],
        [
            "RuntimeError: init: this process has joined the group already",
            "RuntimeError: DistributedDataParallel: backward with create_graph=True",
            "ValueError: the ranks differ in the tensor of all_reduce: rank 0 has [2], rank 1 has [3]",
            "ValueError: ShardedLoader: batch_size 8 is more than the 4 samples there are",
            "ValueError: ZeroRedundancyOptimizer.load_state_dict: the state is of 1 parameters, there are 2",
        ],
        strict=True,
    ):
        assert text.startswith(part)


def test_without_init():
    assert not dist.is_initialized() and dist.get_rank() == 0 and dist.get_world_size() == 1
    for call in (dist.barrier, lambda: dist.DistributedDataParallel(nn.Linear(1, 1))):
        with pytest.raises(RuntimeError, match="call minamp.distributed.init"):
            call()


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="backend must be 'mpi' or 'nccl', got 'gloo'"):
        dist.init("gloo")


@pytest.mark.parametrize("how", ["no mpi4py", "no library"])
def test_without_mpi_the_error_says_what_to_install(how, monkeypatch):
    class Broken:
        def __getattr__(self, name):
            raise RuntimeError("cannot load MPI library")

    monkeypatch.setitem(sys.modules, "mpi4py", None if how == "no mpi4py" else Broken())
    with pytest.raises(ImportError, match=r"pip install 'minamp\[distributed\]'"):
        dist.init()
    assert not dist.is_initialized()


def test_without_mpiexec_the_launcher_says_what_to_install(monkeypatch, capsys):
    from minamp.distributed import __main__ as launcher

    monkeypatch.setattr(launcher, "mpiexec", lambda: None)
    assert launcher.main(["-n", "2", "train.py"]) == 2
    assert "pip install 'minamp[distributed]'" in capsys.readouterr().err
    assert "pip install 'minamp[distributed]'" in why_not()


def test_an_mpi4py_that_finds_no_library(tmp_path, monkeypatch):
    from minamp.distributed import __main__ as launcher

    (tmp_path / "mpi4py.py").write_text("raise RuntimeError('cannot load MPI library')")
    monkeypatch.setattr(launcher, "mpiexec", lambda: "mpiexec")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = "RuntimeError: cannot load MPI library: pip install 'minamp[distributed]' brings mpi4py and MPICH"
    assert why_not() == text


@needs_mpi
def test_a_module_is_started_like_a_file(tmp_path):
    (tmp_path / "shout.py").write_text("import sys; print(sys.argv[1:])")
    line = [sys.executable, "-m", "minamp.distributed", "-n", "1", "-m", "shout", "-n", "3", "-m", "x"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, "['-n', '3', '-m', 'x']\n"), done.stderr


# ------------------------------------------------------------------------------------------------------------- the record


class Told:
    """A reducer that only writes down what it is told."""

    def __init__(self):
        self.order = []

    def begin(self, create_graph):
        self.order.append("begin")

    def arrived(self, leaf, total):
        self.order.append(leaf)

    def finish(self):
        self.order.append("finish")
        return []


@pytest.fixture
def told():
    reducer = Told()
    record.reducers.append(reducer)
    yield reducer
    record.reducers.remove(reducer)


def test_backward_tells_of_a_leaf_as_soon_as_its_gradient_is_whole(told):
    a, b, c = (minamp.ones(2, 2, requires_grad=True) for _ in range(3))
    seen = []
    h = (a @ b) @ b  # b is used twice
    h.register_hook(lambda g: seen.append(len(told.order)))
    (h @ c).sum().backward()
    assert [x is y for x, y in zip(told.order[1:-1], [c, b, a], strict=True)] == [True] * 3 or told.order[
        1
    ] is c
    assert seen == [2]  # c was told of before h's gradient went on


def test_gradients_are_the_same_with_a_reducer(told):
    minamp.manual_seed(0)
    x, w = minamp.randn(3, 3), minamp.randn(3, 3, requires_grad=True)

    def gradient():
        w.grad = None
        with minamp.autocast():
            ((x @ w).relu() @ w + w).sum().backward()
        return w.grad.tolist()

    with_one = gradient()
    record.reducers.remove(told)
    try:
        assert gradient() == with_one
    finally:
        record.reducers.append(told)
