"""The command python -m minamp.demo."""

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

import minamp
from minamp.demo.acts import Stage, act1, act2, act3, recipe, summary
from minamp.demo.data_parallel import data_parallel
from minamp.demo.detector import VARIANTS
from minamp.demo.detector_act import detector
from minamp.distributed.__main__ import why_not
from minamp.files import replacing

READ_NEXT = {
    None: """Read next:
  minamp/demo/         this demo; training_step in experiment.py is the loop to copy
  minamp/autocast.py   act 1: where the cast policy is switched on; minamp/ops/ holds the policy of every op
  minamp/optim/        act 2: master weights
  minamp/scaler.py     act 3: the dynamic loss scale, with the algorithm in its first lines
  minamp/watch/        the instruments used here: first_bad_op, histograms, memory
  minamp/ops/naive.py  more ways to compute wrongly in half precision""",
    "detector": """Read next:
  minamp/demo/detector.py  the variants; training_step is the loop, recipe the end of it to copy
  minamp/detector/         the detector: model, boxes, loss, metric
  minamp/scenes.py         its scenes""",
    "mpi": """Read next:
  minamp/demo/ranks.py               what each process does: the loop of one process and four more lines
  minamp/distributed/parallel.py     gradients averaged while backward runs
  minamp/distributed/farewell.py     how a dying rank takes the others along
  minamp/distributed/sharding.py     optimizer state in shares
  notebooks/11_data_parallel.ipynb   why it is done so""",
}


def report(stage, seconds):
    """Everything measured, as plain values; NaN and inf as null, which JSON has no words for."""
    acts = {str(act): {run.name: _plain(asdict(run)) for run in runs} for act, runs in stage.runs.items()}
    return {
        "seed": stage.seed,
        "device": stage.device,
        "quick": stage.quick,
        "seconds": seconds,
        "acts": acts,
        "claims": [{"act": a, "claim": sentence, "ok": ok} for a, sentence, ok in stage.claims],
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "minamp": minamp.__version__,
        },
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
    }


def _plain(values):
    def plain(v):
        if isinstance(v, list):
            return [plain(x) for x in v]
        return None if isinstance(v, float) and not np.isfinite(v) else v

    return {k: plain(v) for k, v in values.items()}


def parse(argv):
    parser = argparse.ArgumentParser(
        "python -m minamp.demo", description="Three networks fail in half precision and are cured."
    )
    parser.add_argument(
        "story",
        nargs="?",
        choices=["detector", "mpi"],
        help="another story. detector: its loss turned NaN, twelve variants (about 10 minutes; 12 s with --quick). "
        "mpi: one training on two processes (12 s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the initial weights and the order of the digits (default 0)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU if there is one"
    )
    parser.add_argument("--quick", action="store_true", help="shorter trainings, looser claims")
    parser.add_argument("--act", type=int, choices=(1, 2, 3), help="only this act")
    parser.add_argument(
        "--variant", choices=VARIANTS, metavar="NAME", help=f"only this detector: {', '.join(VARIANTS)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="DIR",
        help="where figures go (default figures; build/figures with --quick or another seed)",
    )
    options = parser.parse_args(argv)
    if options.seed < 0:
        parser.error(f"argument --seed: must be at least 0, got {options.seed}")
    if options.variant and options.story != "detector":
        parser.error(
            "argument --variant: belongs to the detector: python -m minamp.demo detector --variant ..."
        )
    if options.act and options.story:
        parser.error(f"argument --act: {options.story} has no acts")
    if options.figures is None:  # those in figures/ are the README's, drawn by the run that it shows
        options.figures = Path("build/figures" if options.quick or options.seed else "figures")
    if options.story == "mpi":
        if options.device == "cuda":
            parser.error("argument --device: the processes of mpi run on the CPU")
        options.device = "cpu"
    return options


def play(options):
    """Run the acts; 0 if every claim held, 1 if not."""
    from rich.console import Console

    start = time.perf_counter()
    device = options.device
    if device == "auto":
        device = "cuda" if minamp.gpu_status() == "ok" else "cpu"
    stage = Stage(Console(), options.seed, device, options.quick, options.figures)
    if options.story == "detector":
        detector(stage, options.variant)
    elif options.story == "mpi":
        data_parallel(stage)
    else:
        acts = {1: act1, 2: act2, 3: act3, 4: recipe}
        for number, act in acts.items():
            if options.act in (None, number):
                act(stage)
                stage.say()
        summary(stage)
    seconds = time.perf_counter() - start
    if options.json:
        with replacing(options.json) as temporary:
            Path(temporary).write_text(json.dumps(report(stage, seconds), indent=1, allow_nan=False))
        stage.say(f"Everything measured: {options.json}")
    missed = [sentence for _, sentence, ok in stage.claims if not ok]
    for sentence in missed:
        stage.console.print(f"[bold red]Not as expected:[/] {sentence}", highlight=False)
    stage.console.print(f"\n{READ_NEXT[options.story]}\n", highlight=False, soft_wrap=True)
    stage.console.print(
        f"{len(stage.claims) - len(missed)} of {len(stage.claims)} claims held, {seconds:.0f} s.",
        highlight=False,
    )
    return 1 if missed else 0


def main(argv=None):
    options = parse(argv)
    if options.device == "cuda" and minamp.gpu_status() != "ok":
        print(f"demo: --device cuda: {minamp.gpu_status()}", file=sys.stderr)
        return 2
    if options.story == "mpi" and (reason := why_not()):
        print(f"demo: mpi: {reason}", file=sys.stderr)
        return 2
    try:
        return play(options)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def use_one_blas_thread():
    """Start this process anew with one BLAS thread, unless the user has chosen a number.

    The networks are so small that a second thread gains nothing, and on a busy machine two threads that wait for each other
    made the demo five times slower. BLAS reads the variable when NumPy is imported, so it has to be set before.
    """
    if os.name == "posix" and "OPENBLAS_NUM_THREADS" not in os.environ:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    use_one_blas_thread()
    sys.exit(main())
