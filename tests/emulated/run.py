"""tests/test_gpu.py without a GPU: the real CuPy, and all that lies below it played by the CPU. `make test-emulated` runs it.

The stand-in of the ordinary tests is NumPy that refuses what CuPy refuses, as far as that is known. Here it is CuPy itself:

- redirect.py puts an emulated CUDA under CuPy's unchanged files, in this process alone; nothing is installed or written there
- cuda.cpp is that CUDA: memory, streams, captures, launches; cublas.cpp the two matrix products
- compiler.py makes every kernel, minamp's and those that CuPy writes, from its CUDA text with g++, behind device.h

It shows that CuPy takes every call, that kernels compile, find their elements and treat edges right, that barriers are where
they must be for threads in turns, and that captured steps can be replayed. It says nothing about

- speed: everything is slow here, and no time means anything; events say 1 ms. Only tests run, no row of the benchmark
- rounding in cuBLAS, in tensor cores or by the GPU's functions: numbers are the CPU's, sums are in one fixed order. CuPy's own
  kernels have no fused multiply-add here, and float32 subnormals stay, which CuPy's -ftz=true makes 0
- races between threads, an access outside of an array within the pool, streams that overtake each other, several GPUs
- the driver, NVRTC (make setup-compile is for that), and what CuPy's wheel holds ready compiled: CUB's reductions and thrust's
  sorts, where CuPy's text kernels and NumPy stand in

Kernels are kept in build/emulated/kernels: the first run compiles 480, four minutes of CPU time; later ones take half a minute.
None of CuPy's options that matter for numbers is passed on, but for definitions and include paths.
"""

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "emulated"
CUPY = "14.2.0"  # redirect.py and compiler.py reach into this one
# The name that CuPy asks for -> what it is made of. The first has the runtime too. Empty ones only have to be there.
LIBRARIES = {
    "libcuda.so.1": "cuda.cpp",
    "libcublas.so.13": "cublas.cpp",
    "libcublasLt.so.13": "/dev/null",
    "libcurand.so.10": "/dev/null",
}


def no_machine():
    """Why this machine can't be used, or ''."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"needs Linux on x86_64, this is {sys.platform} on {platform.machine()}"
    missing = [tool for tool in ("g++", "nm") if shutil.which(tool) is None]
    return f"needs {' and '.join(missing)} (apt-get install g++)" if missing else ""


def no_cupy():
    """Why CuPy and CUDA's headers can't be used, or ''."""
    try:
        version = importlib.metadata.version("cupy-cuda13x")
    except importlib.metadata.PackageNotFoundError:
        return "cupy-cuda13x is not installed"
    if version != CUPY:
        return f"the emulated GPU is written for CuPy {CUPY}, this is {version}"
    missing = [path for path in headers() if not path.is_dir()]
    return f"needs CUDA's headers in {missing[0]}" if missing else ""


def headers():
    site = Path(importlib.util.find_spec("cupy").origin).parents[1]  # without importing it
    bundled = site / "cupy" / "_core" / "include"
    return [bundled, bundled / "cupy" / "_cccl" / "libcudacxx", site / "nvidia" / "cu13" / "include"]


def build():
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = "g++ -std=c++17 -O3 -fPIC -shared -Wall".split() + [f"-I{path}" for path in headers()]
    for name, source in LIBRARIES.items():
        target, source = BUILD / name, HERE / source
        newest = max(path.stat().st_mtime for path in (source, Path(__file__)))
        if target.exists() and target.stat().st_mtime > newest:
            continue
        linked = [BUILD / "libcuda.so.1"] if source.name == "cublas.cpp" else []
        ends = ["-x", "none", *linked, f"-Wl,-soname,{name}", "-o", target]
        subprocess.run([*flags, "-x", "c++", source, *ends], check=True)


def main(args):
    if reason := no_machine() or (args != ["--machine"] and no_cupy()):
        return f"make test-emulated: {reason}"
    if args == ["--machine"]:
        return 0
    build()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import redirect

    redirect.install(BUILD, LIBRARIES)
    import compiler  # and CuPy with it

    compiler.install(BUILD / "kernels", headers())
    import pytest

    import minamp

    if (status := minamp.gpu_status()) != "ok":  # else every test would be skipped
        return f"make test-emulated: the emulated GPU does not work: {status}"
    print("An emulated GPU: numbers are the CPU's, and no time means anything.")
    return pytest.main(["-q", "-m", "gpu", str(ROOT / "tests" / "test_gpu.py"), *args])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
