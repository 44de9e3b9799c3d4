"""python -m minamp.distributed -n 2 train.py [arguments]: start a program on several ranks, as torchrun does.

It calls mpiexec, MPICH's or Open MPI's, with one BLAS thread for each rank, and says in a line how it ended.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile

from minamp.distributed.farewell import RANKS

# What runs each rank's program. Were a rank killed without it, mpiexec would end the others before they could say a word; so
# the signal is written down where they look for it, and mpiexec hears of it when they have had time to (farewell.PATIENCE).
KEEPER = """\
"$@"
code=$?
if [ $code -gt 128 ]; then
    echo $code > "$MINAMP_RANKS/part" && mv "$MINAMP_RANKS/part" "$MINAMP_RANKS/${PMI_RANK:-$OMPI_COMM_WORLD_RANK}"
    sleep 8
fi
exit $code"""

# Open MPI wants to be asked twice before it runs as root, as it must in a container.
ROOT = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)


def mpiexec():
    """The command that starts ranks: the one installed beside this Python, else the system's. None if there is none."""
    beside = os.path.join(sysconfig.get_path("scripts"), "mpiexec")
    return beside if os.path.exists(beside) else shutil.which("mpiexec")


def why_not():
    """None where ranks can be started, else why not and what to install, in a line."""
    if mpiexec() is None:
        return "there is no mpiexec: pip install 'minamp[distributed]' brings MPICH's"
    # In another process: this one shall not load MPI to know. mpi4py may be there without a library that it can load.
    test = "import mpi4py; mpi4py.rc(initialize=False); from mpi4py import MPI"
    done = subprocess.run([sys.executable, "-c", test], capture_output=True, text=True)
    if done.returncode:
        return f"{done.stderr.splitlines()[-1]}: pip install 'minamp[distributed]' brings mpi4py and MPICH"
    return None


def command(ranks, program):
    """(command, environment) that runs `program` (a list) on `ranks` ranks. RuntimeError if there is no mpiexec."""
    start = mpiexec()
    if start is None:
        raise RuntimeError("there is no mpiexec: pip install 'minamp[distributed]' brings MPICH's")
    version = subprocess.run([start, "--version"], capture_output=True, text=True).stdout
    more = ["--oversubscribe"] if "Open MPI" in version or "PRTE" in version.upper() else []
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment = {**threads, **os.environ, **dict.fromkeys(ROOT, "1")}
    return [start, *more, "-n", str(ranks), "sh", "-c", KEEPER, "rank", sys.executable, *program], environment


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m minamp.distributed", description="Start a program on several ranks."
    )
    parser.add_argument("-n", type=int, default=2, metavar="RANKS", help="how many processes (default 2)")
    rest = {"nargs": argparse.REMAINDER, "default": []}
    parser.add_argument("-m", dest="module", metavar="MODULE", help="a module and its arguments", **rest)
    parser.add_argument("program", help="or a Python file and its arguments", **rest)
    args = parser.parse_args(arguments)
    program = ["-m", *args.module] if args.module else args.program
    if not program or args.n < 1:
        parser.error("give a program to run on at least one rank, such as: -n 2 train.py")
    try:
        line, environment = command(args.n, program)
    except RuntimeError as error:
        print(f"minamp.distributed: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as ranks:
        code = subprocess.run(line, env={**environment, RANKS: ranks}).returncode
    if code:
        print(
            "minamp.distributed: the run has ended with an error, printed above by each rank", file=sys.stderr
        )
    return min(abs(code), 255)


if __name__ == "__main__":
    sys.exit(main())
