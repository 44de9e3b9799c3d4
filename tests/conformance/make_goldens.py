"""Make the golden values with torch and write them to a folder, or show where they differ from the committed ones.

    python make_goldens.py goldens           write them anew
    python make_goldens.py --check           compare with the committed ones; exits with 1 on any difference
    python make_goldens.py --list            how many there are

Needs torch 2.13 and NumPy, and nothing of minamp. `make conformance` runs --check in an environment of its own.
"""

import contextlib
import json
import logging
import math
import pathlib
import subprocess
import sys
import tempfile
import warnings

import autocast_cases
import numpy as np
import op_cases
import scaler_cases
import torch
import training_cases
from torch_kit import FakeCudaKit, Kit, fake_cuda

HERE = pathlib.Path(__file__).parent
COMMITTED, SCRIPTS = HERE / "goldens", HERE / "scripts"
# These ask for a real device, or are not checked without one; they are on neither list of torch, the CPU's or CUDA's.
NOT_FAKED = ("index", "index_add", "nonzero", "batch_norm", "instance_norm", "unfold")


def scaler_goldens():
    return {name: scaler_cases.outcome(torch, case) for name, case in scaler_cases.CASES.items()}


def autocast_goldens():
    goldens = {}
    for name, case in autocast_cases.CASES.items():
        fake = autocast_cases.how(name) == "fake cuda"
        with fake_cuda() if fake else contextlib.nullcontext():
            outcome = autocast_cases.outcome(FakeCudaKit if fake else Kit, case)
        goldens[name] = {"how": autocast_cases.how(name), "outcome": outcome}
    return goldens


# ------------------------------------------------------------------------------------------------------------------------- ops


def _dtype(kit, case, key, dtypes, region):
    tn = kit.tn
    xs = [
        tn.tensor(op_cases.make(key, i, text).tolist(), dtype=torch.float32).to(getattr(tn, dtype))
        for i, (text, dtype) in enumerate(zip(case.inputs, dtypes, strict=True))
    ]
    with tn.autocast(kit.device, dtype=getattr(tn, region)) if region else contextlib.nullcontext():
        y = case.call(op_cases.Constants(tn), None if case.op == "index" else kit.find(case.op), *xs)
    return autocast_cases.name(y.dtype)


def _dtype_golden(case, key, dtypes, region):
    """[dtype or error type, how it was found]. Outside regions the CPU's own checks count, inside the CUDA lists."""
    fake = region is not None and case.op not in NOT_FAKED
    try:
        with fake_cuda() if fake else contextlib.nullcontext():
            found = _dtype(FakeCudaKit if fake else Kit, case, key, dtypes, region)
    except RuntimeError:
        found = "RuntimeError"
    return [found, "fake cuda" if fake else "run on cpu"]


def dtype_goldens():
    return {
        key: {
            label: _dtype_golden(case, key, dtypes, region)
            for label, dtypes, region in op_cases.dtype_combinations(case)
        }
        for key, case in op_cases.CASES.items()
    }


def value_goldens():
    """All arrays of all cases in one flat float64 array; `index` says where each lies."""
    index, pieces, at = {}, [], 0

    def store(key, what, array):
        nonlocal at
        array = np.asarray(array, np.float64)
        index.setdefault(key, {})[what] = [at, list(array.shape)]
        pieces.append(array.ravel())
        at += array.size

    for key, case in op_cases.CASES.items():
        if case.check != "values":
            continue
        arrays = [op_cases.make(key, i, text) for i, text in enumerate(case.inputs)]
        xs = [torch.tensor(a, requires_grad=True) for a in arrays]
        y = case.call(op_cases.Constants(torch), None if case.op == "index" else Kit.find(case.op), *xs)
        weight = op_cases.make(key, "weight", "A" + "x".join(map(str, y.shape)))
        gs = torch.autograd.grad(y, xs, torch.tensor(weight).to(y.dtype), allow_unused=True)
        for i, (a, g) in enumerate(zip(arrays, gs, strict=True)):
            store(key, f"input {i}", a)
            store(key, f"gradient {i}", np.zeros_like(a) if g is None else g.numpy())
        store(key, "weight", weight)
        store(key, "output", y.detach().double().numpy())
    return {"index": np.array(json.dumps(index)), "data": np.concatenate(pieces)}


def training_goldens():
    return {
        f"{name} {what}": np.array(values)
        for name, run in training_cases.RUNS.items()
        for what, values in zip(("losses", "scales"), run(torch), strict=True)
    }


def script_goldens():
    outputs = {}
    for path in sorted(SCRIPTS.glob("*.py")):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, path], cwd=folder, capture_output=True, text=True, check=True
            )
        outputs[path.stem] = json.loads(done.stdout)
    return outputs


# --------------------------------------------------------------------------------------------------------- writing, comparing


MAKERS = {
    "scaler.json": scaler_goldens,
    "autocast.json": autocast_goldens,
    "dtypes.json": dtype_goldens,
    "values.npz": value_goldens,
    "training.npz": training_goldens,
    "scripts.json": script_goldens,
}


def write(folder):
    folder.mkdir(exist_ok=True)
    for file, maker in MAKERS.items():
        goldens = maker()
        if file.endswith(".npz"):
            np.savez_compressed(folder / file, **goldens)
        else:  # one line a case
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in goldens.items())
            (folder / file).write_text("{\n" + lines + "\n}\n")


def _flat(value, path=""):
    """(path, leaf) of nested dicts and lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path} > {key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _flat(item, f"{path} [{i}]")
    else:
        yield path, value


def _load(path):
    if path.suffix == ".json":
        return dict(_flat(json.loads(path.read_text())))
    with np.load(path) as arrays:
        return {f"{name} [{i}]": v for name in arrays for i, v in enumerate(arrays[name].ravel().tolist())}


def _same(a, b, tolerance):
    if isinstance(a, float) and isinstance(b, float) and tolerance:
        return (
            math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-3 * tolerance) or math.isnan(a) and math.isnan(b)
        )
    return repr(a) == repr(b)


# Another processor may sum in another order: float32 and half results then differ in their last digits. Scales never do.
TOLERANCE = {
    "values.npz": 1e-13,
    "training.npz": 1e-3,
    "scripts.json": 1e-3,
    "autocast.json": 1e-6,
    "scaler.json": 1e-6,
}


def differences(new, old):
    for file in MAKERS:
        a, b = _load(new / file), _load(old / file)
        for path in [*a, *(p for p in b if p not in a)]:
            exact = "scales" in path
            if not _same(a.get(path), b.get(path), 0 if exact else TOLERANCE.get(file, 0)):
                yield f"{file}{' ' if path[0] != ' ' else ''}{path}: committed {b.get(path)!r}, torch now {a.get(path)!r}"


def count(folder):
    return {file: len(_load(folder / file)) for file in MAKERS}


def main(argument):
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # fake tensors log every error that is asked for
    torch.set_num_threads(1)
    if argument == "--list":
        print(count(COMMITTED))
    elif argument == "--check":
        with tempfile.TemporaryDirectory() as folder:
            write(pathlib.Path(folder))
            found = list(differences(pathlib.Path(folder), COMMITTED))
        print("\n".join(found) or f"torch {torch.__version__} gives the committed values: {count(COMMITTED)}")
        return bool(found)
    else:
        write(pathlib.Path(argument))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
