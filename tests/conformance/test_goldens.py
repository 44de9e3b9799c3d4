"""minamp against golden values made by torch 2.13 (make_goldens.py). torch is not needed here: the values are committed as data.

Where minamp differs on purpose, DIFFERENCES below holds torch's value, the value minamp must give, and why. Both are
checked, so a difference that has gone away does not stay in the table.
"""

import contextlib
import json
import math
import pathlib
import warnings

import autocast_cases
import minamp_kit
import numpy as np
import op_cases
import pytest
import scaler_cases
import training_cases

import minamp
from minamp.formats import bfloat16, cast, float16
from minamp.methods import OPS
from minamp.tensor import Tensor

GOLDENS = pathlib.Path(__file__).parent / "goldens"


def load(file):
    return json.loads((GOLDENS / file).read_text())


def plain(value):
    """As it would come back from a JSON file: tuples as lists."""
    return json.loads(json.dumps(value))


def same(a, b, tolerance=0.0):
    """Equal, floats up to a relative tolerance; nan equals nan, and True is not 1."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k], tolerance) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return a == b or math.isnan(a) and math.isnan(b) or math.isclose(a, b, rel_tol=tolerance)
    return type(a) is type(b) and a == b


GROWS = "growth is at >= and not at == the interval, so a lowered interval still grows"
# (case, label) -> (torch, minamp, why)
DIFFERENCES = {
    ("B18", "closure True"): (
        "no error",
        "RuntimeError",
        "a positional closure is refused like a keyword one",
    ),
    ("B21", "plain"): (None, True, "optimizer.step() returns True, so that None means skipped"),
    ("B29", "int"): ("AttributeError", "no error", "update(10) works"),
    ("B38", "overflow by the multiplication"): (
        [2.0**-127, 1, [-math.inf]],
        [2.0**-128, 0, [1.0]],
        "a gradient that overflows while it is unscaled is found too",
    ),
    **{
        (case, label): ("no error", "ValueError", "refused: no scaler works with it")
        for case, label in [
            ("B02", "{'backoff_factor': 0.0}"),
            ("B02", "{'growth_interval': 0}"),
            ("B02", "{'init_scale': 0.0}"),
            ("B02", "{'init_scale': -1.0}"),
            ("B28", "update(-1.0)"),
            ("B28", "update(0.0)"),
            ("B28", "update(inf)"),
        ]
    },
    ("B39", "3"): ([8.0, 4, [0.0]], [16.0, 0, [0.0]], GROWS),
    ("B39", "4"): ([8.0, 5, [-0.25]], [16.0, 1, [-0.25]], GROWS),
    ("B39", "5"): ([8.0, 6, [-0.5]], [32.0, 0, [-0.5]], GROWS),
    ("B39", "6"): ([8.0, 7, [-0.75]], [32.0, 1, [-0.75]], GROWS),
    ("B39", "7"): ([4.0, 0, [-0.75]], [16.0, 0, [-0.75]], GROWS),
    ("B39", "8"): ([4.0, 1, [-1.0]], [16.0, 1, [-1.0]], GROWS),
    ("B39", "9"): ([8.0, 0, [-1.25]], [32.0, 0, [-1.25]], GROWS),
    ("A19", "2 after w *= 2"): ([[1.0]], [[2.0]], "the cache knows the weight's version: no stale copy"),
    ("A21", "cache True"): ([[2048.0]], [[2049.0]], "the gradients of a weight's uses are summed in float32"),
}


def compare(case, golden, outcome, tolerance):
    outcome = plain(outcome)
    assert outcome.keys() == golden.keys()
    wrong = []
    for label, expected in golden.items():
        if (case, label) in DIFFERENCES:
            torch_gives, minamp_gives, why = DIFFERENCES[case, label]
            assert same(expected, torch_gives), (
                f"{label}: torch gives {expected}, the table of differences says {torch_gives}"
            )
            if not same(outcome[label], minamp_gives):
                wrong.append(f"{label}: minamp {outcome[label]}, on purpose {minamp_gives}: {why}")
        elif not same(outcome[label], expected, tolerance):
            wrong.append(f"{label}: minamp {outcome[label]}, torch {expected}")
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------------------- scaler and autocast

SCALER, AUTOCAST = load("scaler.json"), load("autocast.json")


def test_every_case_has_a_golden_value_and_every_difference_a_case():
    assert SCALER.keys() == scaler_cases.CASES.keys() and len(SCALER) >= 44
    assert AUTOCAST.keys() == autocast_cases.CASES.keys()
    labels = {(case, label) for case, golden in SCALER.items() for label in golden}
    labels |= {(case, label) for case, golden in AUTOCAST.items() for label in golden["outcome"]}
    assert DIFFERENCES.keys() <= labels


@pytest.mark.parametrize("case", SCALER)
def test_scaler(case):
    # B11 and B41 take norms, where the sums of squares may be added in another order
    outcome = scaler_cases.outcome(minamp, scaler_cases.CASES[case])
    compare(case, SCALER[case], outcome, 3e-7 if case in ("B11", "B41") else 0)


@pytest.mark.parametrize("case", AUTOCAST)
def test_autocast(case):
    assert AUTOCAST[case]["how"] == autocast_cases.how(case)
    outcome = autocast_cases.outcome(minamp_kit.Kit, autocast_cases.CASES[case])
    # A04: float32 exp, log and sums of another library, up to 5 units in the last place
    compare(case, AUTOCAST[case]["outcome"], outcome, 6e-7 if case == "A04_values" else 0)


# ------------------------------------------------------------------------------------------------------------- ops: the dtypes

DTYPES = load("dtypes.json")
HALF_INPUT, HALF_REST = "float16 + float32, outside", "float32 + float16, outside"
CPU_KERNEL = (
    "torch's CPU kernel takes half input with float32 weights; outside a region minamp asks for one dtype"
)
STATISTICS = (
    "torch refuses half weights for float32 input; minamp computes in float32 as for every other mixture"
)
PROMOTES = "minamp's losses all promote; here torch's CPU kernel keeps one side's dtype or refuses"
NO_HALF_KERNEL = "torch's CPU has no half kernel; minamp computes in float32 as for every other op"
FAKE = "a fake tensor has no values: torch can't ask whether var is negative, or pick a class's weight"
# (case or op, combination) -> (torch, minamp, why)
DTYPE_DIFFERENCES = {
    ("layer_norm", HALF_INPUT): ("float16", "RuntimeError", CPU_KERNEL),
    ("group_norm", HALF_INPUT): ("float16", "RuntimeError", CPU_KERNEL),
    **{
        (norm, f"float32 + float16, {where}"): ("RuntimeError", "float32", STATISTICS)
        for norm in ("batch_norm", "instance_norm")
        for where in ("outside", "float16", "bfloat16")
    },
    ("huber_loss", HALF_INPUT): ("float16", "float32", PROMOTES),
    ("binary_cross_entropy", HALF_INPUT): ("RuntimeError", "float32", PROMOTES),
    ("binary_cross_entropy", HALF_REST): ("RuntimeError", "float32", PROMOTES),
    ("binary_cross_entropy_with_logits", HALF_REST): ("float16", "float32", PROMOTES),
    **{
        (op, f"{half}, outside"): ("RuntimeError", half, NO_HALF_KERNEL)
        for op in ("multi_margin_loss", "multilabel_margin_loss", "cdist", "pdist")
        for half in ("float16", "bfloat16")
    },
    **{
        (case, f"{dtypes}, {region}"): ("RuntimeError", "float32", FAKE)
        for case in ("gaussian_nll_loss", "multi_margin_loss p, margin, weight")
        for dtypes in op_cases.DTYPES
        for region in ("float16", "bfloat16")
    },
    ("einsum i,j->ij", HALF_INPUT): ("float32", "RuntimeError", "one rule for all equations: one dtype"),
    ("einsum i,j->ij", HALF_REST): ("float32", "RuntimeError", "one rule for all equations: one dtype"),
}


@pytest.mark.parametrize("key", [key for key, case in op_cases.CASES.items() if minamp_kit.Kit.find(case.op)])
def test_dtypes(key):
    case, wrong = op_cases.CASES[key], []
    assert [label for label, _, _ in op_cases.dtype_combinations(case)] == list(DTYPES[key])
    for label, dtypes, region in op_cases.dtype_combinations(case):
        xs = [
            Tensor(cast(op_cases.make(key, i, text), np.dtype(getattr(minamp, dtype))))
            for i, (text, dtype) in enumerate(zip(case.inputs, dtypes, strict=True))
        ]
        inside = minamp.autocast(dtype=getattr(minamp, region)) if region else contextlib.nullcontext()
        with inside, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                y = case.call(op_cases.Constants(minamp), minamp_kit.Kit.find(case.op), *xs)
                found = autocast_cases.name(y.dtype)
            except RuntimeError:
                found = "RuntimeError"
        expected = DTYPES[key][label][0]
        difference = DTYPE_DIFFERENCES.get((key, label), DTYPE_DIFFERENCES.get((case.op, label)))
        if difference:
            assert expected == difference[0]
            expected = difference[1]
        if found != expected:
            wrong.append(f"{label}: minamp {found}, torch {DTYPES[key][label]}")
    assert not wrong, "\n".join(wrong)


def test_every_op_has_a_golden_value():
    assert DTYPES.keys() == op_cases.CASES.keys()
    ops = {*op_cases.CASES, *(case.op for case in op_cases.CASES.values())}
    assert {case for case, _ in DTYPE_DIFFERENCES} <= ops
    covered = {case.op for case in op_cases.CASES.values()} | {*op_cases.INTERNAL, *op_cases.NAIVE}
    # gradients are checked with their ops
    missing = {op for op in OPS if op not in covered and not op.endswith("_grad")}
    assert not missing, f"add a case for {sorted(missing)} to op_cases.py and run make_goldens.py"


# ----------------------------------------------------------------------------------------------------- ops: values, gradients

with np.load(GOLDENS / "values.npz") as stored:
    INDEX, FLAT = json.loads(str(stored["index"])), stored["data"]
VALUE_CASES = [key for key in INDEX if minamp_kit.Kit.find(op_cases.CASES[key].op)]


def golden(key, what):
    at, shape = INDEX[key][what]
    return FLAT[at : at + math.prod(shape)].reshape(shape)


def run(key, dtype):
    """Output and gradients of a case whose inputs are in `dtype`."""
    case = op_cases.CASES[key]
    xs = [Tensor(cast(golden(key, f"input {i}"), dtype), requires_grad=True) for i in range(len(case.inputs))]
    y = case.call(op_cases.Constants(minamp), minamp_kit.Kit.find(case.op), *xs)
    weight = Tensor(golden(key, "weight")).to(y.dtype)
    gs = minamp.autograd.grad(y, xs, weight, allow_unused=True)
    return y.detach(), [minamp.zeros_like(x) if g is None else g for x, g in zip(xs, gs, strict=True)]


@pytest.mark.parametrize("key", VALUE_CASES)
def test_float64_values(key):
    y, gs = run(key, np.float64)
    for what, found in {"output": y, **{f"gradient {i}": g for i, g in enumerate(gs)}}.items():
        expected = golden(key, what)
        assert found.shape == expected.shape
        # 1e-12 relative; a sum whose terms cancel is measured against the largest value
        allowed = 1e-12 * np.maximum(np.abs(expected), 0.1 * np.abs(expected).max(initial=0))
        assert (np.abs(found.double().numpy() - expected) <= allowed).all(), (what, found, expected)


def units(found, exact, dtype):
    """How many numbers of `dtype` lie between found and the rounded exact value."""

    def place(x):
        bits = np.asarray(x).view(np.int16).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    return np.abs(place(found) - place(cast(exact, dtype)))


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize("key", [key for key in VALUE_CASES if op_cases.CASES[key].op != "to"])
def test_half_values_are_the_rounded_float64_ones(key, dtype):
    y, gs = run(key, dtype)
    of_y, of_g = op_cases.CASES[key].half
    eps = {float16: 2.0**-10, bfloat16: 2.0**-7}[dtype]
    for what, found, most in [("output", y, of_y), *((f"gradient {i}", g, of_g) for i, g in enumerate(gs))]:
        exact = golden(key, what)
        assert found.dtype == dtype and found.shape == exact.shape
        if most == op_cases.LOOSE:
            error = np.abs(found.double().numpy() - exact).max(initial=0)
            assert error <= 4 * eps * np.abs(exact).max(initial=0), (what, found, exact)
        else:
            assert units(found.numpy(), exact, dtype).max(initial=0) <= most, (what, found, exact)


# --------------------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("name", training_cases.RUNS)
def test_training(name):
    losses, scales = training_cases.RUNS[name](minamp)
    with np.load(GOLDENS / "training.npz") as stored:
        assert scales == stored[f"{name} scales"].tolist()
        # half rounds at 2**-11; sums in another order move a few roundings, and fifty steps carry that on
        np.testing.assert_allclose(losses, stored[f"{name} losses"], rtol=5e-3)
    assert len(set(scales)) >= 4
