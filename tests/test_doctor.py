"""minamp.doctor, judged by tests/gallery: the right finding for every fault, nothing for what is healthy, nothing changed."""

import difflib
import importlib
import inspect
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from gallery import healthy, symptoms, variations
from gallery.parts import told

import minamp

CODES = """half_parameters_with_scaler loss_in_half softmax_in_half log_of_softmax mask_overflows eps_rounds_to_zero
    layer_norm_overflows mean_of_too_many backward_in_autocast autocast_covers_nothing clip_before_unscale
    clip_value_hides_overflow raw_optimizer_step update_forgotten update_repeated unscale_every_micro_batch zero_grad_missing
    scaler_rebuilt scaler_not_saved gradients_flushed forward_overflow updates_swamped adam_in_half scale_pinned
    op_without_policy batchnorm_nan widened_by_scalar""".split()
GALLERY = {code: importlib.import_module(f"gallery.{code}") for code in CODES}
WELL = {
    **{f"{code}-repaired": module.repaired for code, module in GALLERY.items()},
    **healthy.LOOPS,
    **variations.HEALTHY,
}
ILL = {code: (code, module.broken) for code, module in GALLERY.items()} | variations.BROKEN
MARK = "# the fault"
# Made before the step, or spread over its parameters: a step that runs can't tell the line.
NOT_IN_THE_STEP = {
    "half_parameters_with_scaler",
    "gradients_flushed",
    "updates_swamped",
    "scale_pinned",
    "batchnorm_nan",
}


@pytest.fixture(autouse=True)
def temporary_files_here(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(autouse=True)
def numpys_seed():
    np.random.seed(0)


def examine(it):
    """The doctor's report, and how often it called the step: counted in a file, since a variable would be put back."""
    calls = Path(tempfile.mkdtemp()) / "calls"
    calls.touch()

    def step():
        with open(calls, "ab") as file:
            file.write(b".")
        return it["step"]()

    report = minamp.doctor(step, model=it["model"], optimizer=it["optimizer"], scaler=it["scaler"])
    return report, calls.stat().st_size


# ------------------------------------------------------------------------------------------------- the gallery is what it says


def test_the_gallery_is_complete():
    files = {p.stem for p in Path(healthy.__file__).parent.glob("*.py")}
    assert files - {"__init__", "parts", "symptoms", "healthy", "variations", "loops", "ported"} == set(CODES)
    assert len(CODES) == 27 and {code for code, _ in variations.BROKEN.values()} == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_twins_differ_in_few_lines(code):
    module = GALLERY[code]
    assert module.__doc__
    texts = []
    for build in (module.broken, module.repaired):
        lines = inspect.getsource(build).splitlines()[1:]
        texts.append([line.split(MARK)[0].rstrip() for line in lines])
    changes = [d for d in difflib.ndiff(*texts) if d[0] in "+-"]
    assert 1 <= len(changes) <= 3, "\n".join(changes)


@pytest.mark.parametrize("name", ILL)
def test_a_broken_script_shows_its_fault(name):
    code, build = ILL[name]
    assert symptoms.shows(code, build)


@pytest.mark.parametrize("code", CODES)
def test_a_repaired_twin_does_not(code):
    assert not symptoms.shows(code, GALLERY[code].repaired)


@pytest.mark.parametrize("name", WELL)
def test_what_is_healthy_learns(name):
    it = WELL[name]()
    losses = [it["step"]() for _ in range(10)]
    assert np.isfinite(losses).all() and min(losses[-2:]) < losses[0]
    assert all(np.isfinite(p.detach().float().numpy()).all() for p in it["model"].parameters())


# -------------------------------------------------------------------------------------------------------------- the findings


def marked_lines(build):
    """file:line of the marked lines of a script, or of the file it stands in if it is its only script."""
    path = Path(inspect.getsourcefile(build))
    lines, start = inspect.getsourcelines(build)
    text = path.read_text().splitlines()
    if path.stem in CODES:  # classes stand above the function
        end = start + len(lines)
        stop = text.index("def repaired():")
        return {f"{path.name}:{i}" for i, line in enumerate(text[: min(end, stop)], 1) if MARK in line}
    return {f"{path.name}:{i}" for i, line in enumerate(lines, start) if MARK in line}


@pytest.mark.parametrize("name", ILL)
def test_the_fault_is_the_first_finding(name):
    code, build = ILL[name]
    report, calls = examine(build())
    assert len(report) and report[0].code == code, told(report)
    assert 1 <= calls <= 5
    finding = report[0]
    assert finding.what and finding.where and finding.evidence and finding.repair and finding.severity
    places = set(re.findall(r"[\w.]+\.py:\d+", finding.where))
    assert all(place.startswith(Path(inspect.getsourcefile(build)).name) for place in places), finding.where
    marked = marked_lines(build)
    if marked and code not in NOT_IN_THE_STEP:
        assert places & marked, f"{finding.where} names none of {sorted(marked)}"


@pytest.mark.parametrize("name", WELL)
def test_nothing_is_found_where_nothing_is_wrong(name):
    report, calls = examine(WELL[name]())
    assert list(report) == [], told(report)
    assert 1 <= calls <= 5


def test_a_report_goes_through_json_and_print(capsys):
    report, _ = examine(GALLERY["clip_before_unscale"].broken())
    data = report.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert [f["code"] for f in data["findings"]] == [f.code for f in report]
    print(report)
    printed = capsys.readouterr().out
    assert report[0].repair.split()[0] in printed and "clip_before_unscale" in printed


def test_nothing_found_says_so(capsys):
    report, _ = examine(healthy.mlp_float16())
    print(report)
    assert report.to_json()["findings"] == [] and capsys.readouterr().out.strip()


def test_an_error_that_is_no_fault_of_precision_is_raised_again():
    it = healthy.mlp_float16()
    before = state_of(it)

    def step():
        it["step"]()
        raise KeyError("a mistake of another kind")

    with pytest.raises(KeyError, match="another kind"):
        minamp.doctor(step, model=it["model"], optimizer=it["optimizer"], scaler=it["scaler"])
    assert state_of(it) == before


# ------------------------------------------------------------------------------------------------------- the patient afterwards


def frozen(x):
    """Nested state as comparable bytes."""
    if isinstance(x, dict):
        return {k: frozen(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [frozen(v) for v in x]
    if isinstance(x, minamp.Tensor):
        x = x.data.numpy()
    return (x.dtype.name, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else x


def state_of(it):
    optimizers = it["optimizer"] if isinstance(it["optimizer"], list) else [it["optimizer"]]
    optimizers = [o for o in optimizers if isinstance(o, minamp.optim.Optimizer)]
    return {
        "model": frozen(it["model"].state_dict()),
        "gradients": [frozen(p.grad) for p in it["model"].parameters()],
        "requires_grad": [p.requires_grad for p in it["model"].parameters()],
        "training": [m.training for m in it["model"].modules()],
        "optimizers": [frozen(o.state_dict()) for o in optimizers],
        "scaler": it["scaler"]
        and {**it["scaler"].state_dict(), "records": len(vars(it["scaler"]).get("_records", ()))},
        "random": repr(minamp.get_rng_state()),
        "numpy": repr(np.random.get_state(legacy=False)),
    }


def run(build, before, after, doctor):
    minamp.manual_seed(0)
    np.random.seed(0)
    it = build()
    losses = [it["step"]() for _ in range(before)]
    if doctor:
        examine(it)
    losses += [it["step"]() for _ in range(after)]
    return losses, state_of(it)


EXAMINED = {**healthy.LOOPS, "batches_from_numpys_generator": variations.batches_from_numpys_generator}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", EXAMINED)
def test_training_goes_on_as_if_never_examined(name, before):
    assert run(EXAMINED[name], before, 3, True) == run(EXAMINED[name], before, 3, False)


@pytest.mark.parametrize("name", ILL)
def test_an_ill_patient_is_given_back_as_it_came(name):
    it = ILL[name][1]()
    before = state_of(it)
    examine(it)
    assert state_of(it) == before


def test_the_repair_of_a_clipping_names_the_scaler_only_where_there_is_one():
    by_hand, _ = examine(variations.a_loss_scaled_by_hand_that_is_clipped_first())
    assert (
        by_hand[0].repair
        == "p.grad /= 65536   # for every parameter before the clipping, instead of after it"
    )
    with_scaler, _ = examine(GALLERY["clip_before_unscale"].broken())
    assert with_scaler[0].repair.startswith("scaler.unscale_(optimizer)")
