"""The table's own arithmetic: what counts as met, by how much a goal is missed, and the slopes. No timing here."""

import importlib.util
import sys
from pathlib import Path

import pytest

import minamp

spec = importlib.util.spec_from_file_location("bench", Path(__file__).with_name("bench.py"))
bench = sys.modules["bench"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)


def test_without_a_gpu_its_rows_are_not_measured_and_launches_are_counted(monkeypatch):
    monkeypatch.setattr(minamp, "gpu_status", lambda: "there is no usable CUDA device")
    rows = list(bench.gpu.rows(quick=True))
    counted = [r for r in rows if r.value is not None]
    assert [r.unit for r in counted] == ["launches"] and counted[0].value > 50
    unmeasured = [r for r in rows if r.value is None]
    assert {r.verdict() for r in unmeasured} == {"not measured"}
    goals = {r.goal for r in rows}
    assert {0.95, 0.7, 1.8} <= goals
    assert bench.gpu.card() == {"GPU": "there is no usable CUDA device"}


@pytest.mark.parametrize(
    "row, verdict",
    [
        (bench.Row("a", 1.5, goal=1.5), "met"),
        (bench.Row("a", 1.65, goal=1.5), "missed by 10%"),
        (bench.Row("a", 8.0, goal=8, at_least=True), "met"),
        (bench.Row("a", 4.0, goal=8, at_least=True), "missed by 100%"),
        (bench.Row("a", None, goal=8, detail=bench.MISSING), "torch not installed"),
        (bench.Row("a", 2.0), "-"),
    ],
)
def test_verdict(row, verdict):
    assert row.verdict() == verdict


def test_slope_is_the_exponent():
    sizes = (32, 64, 128)
    assert bench.slope(sizes, [3e-3 * n**1.5 for n in sizes]) == pytest.approx(1.5)


def test_candidates_take_turns():
    calls = []
    times = bench.fastest({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2, calls=2)
    assert "".join(calls) == "aaabbb" * 2
    assert set(times) == {"a", "b"} and min(times.values()) > 0


def test_casts_are_timed_and_put_back():
    x, loops = minamp.randn(100_000), [getattr(bench.halves, name) for name in ("narrow", "widen", "round_")]
    assert bench.time_in_casts(lambda: x.half().float(), rounds=2) > 0
    assert bench.time_in_casts(lambda: x + x, rounds=2) == 0
    assert [getattr(bench.halves, name) for name in ("narrow", "widen", "round_")] == loops


def test_autocast_keeps_half_the_bytes():
    (row,) = bench.memory_rows(quick=True)
    assert row.met
