"""The command python -m minamp.verify: two networks on the digits in two formats, or a training step of your own."""

import argparse
import json
import runpy
import sys
from pathlib import Path

import minamp
from minamp.data import digits
from minamp.demo.experiment import Arm, adam, cnn, mlp, sgd, training_step
from minamp.verify import verify_amp

ARMS = [
    Arm(
        f"{network.__name__.upper()} on the digits, {dtype}",
        network,
        optimizer,
        autocast=dtype,
        scaler=scaler,
    )
    for network, optimizer in ((mlp, sgd(0.05)), (cnn, adam(2e-3)))
    for dtype, scaler in ((minamp.float16, {}), (minamp.bfloat16, None))
]
BATCH = 128


def example(arm, rounds):
    """verify_amp's report on one arm of the examples, on the GPU if there is one."""
    minamp.manual_seed(0)
    device = "cuda" if minamp.gpu_status() == "ok" else "cpu"
    model = arm.network().to(device)
    optimizer = arm.optimizer(model.parameters())
    scaler = minamp.GradScaler(enabled=arm.scaler is not None)
    x, y = (minamp.tensor(a).to(device) for a in digits("train")[:BATCH])

    def step():
        training_step(arm, model, optimizer, scaler, x, y)

    return verify_amp(step, model=model, optimizer=optimizer, scaler=scaler, rounds=rounds)


def load(target):
    """The step in 'FILE.py' or 'FILE.py:function', and what the file has of model, optimizer and scaler."""
    path, _, function = target.rpartition(":") if not target.endswith(".py") else (target, "", "step")
    if not Path(path).is_file():
        raise SystemExit(f"verify: there is no file {path!r}: give FILE.py or FILE.py:function")
    sys.path.insert(0, str(Path(path).resolve().parent))  # so that it finds its own modules
    # not '__main__': a guarded training does not start
    names = runpy.run_path(path, run_name=Path(path).stem)
    if not callable(names.get(function)):
        raise SystemExit(
            f"verify: {path} defines no function {function!r}: define one that does one training step, "
            "or name another as FILE.py:function"
        )
    return names[function], {k: names[k] for k in ("model", "optimizer", "scaler") if k in names}


def main(argv=None):
    parser = argparse.ArgumentParser(
        "python -m minamp.verify",
        description="Is mixed precision really on in a training step, and does it pay?",
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="FILE.py[:function]",
        help="a script that defines a training step (default name: step) and, if it has them, model, optimizer and scaler; "
        "without it, examples run",
    )
    parser.add_argument("--rounds", type=int, default=10, help="how often each time is taken (default 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"argument --rounds: must be at least 1, got {options.rounds}")
    reports = {}
    if options.target:
        step, parts = load(options.target)
        reports[options.target] = verify_amp(step, rounds=options.rounds, **parts)
        print(reports[options.target])
    else:
        for arm in ARMS:
            reports[arm.name] = example(arm, options.rounds)
            print(f"{arm.name}\n\n{reports[arm.name]}\n")
    if options.json:
        options.json.write_text(
            json.dumps({name: json.loads(r.to_json()) for name, r in reports.items()}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
