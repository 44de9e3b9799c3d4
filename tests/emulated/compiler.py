"""g++ in NVRTC's place: a kernel's text becomes a shared library, kept in a folder by text and options. And NumPy sorts.

To be imported after redirect.install: it imports CuPy.
"""

import ctypes
import hashlib
import os
import re
import subprocess
from pathlib import Path

import cupy
import numpy as np
import shim
from cupy.cuda import compiler, thrust

from minamp.backends import kernels_wmma

HERE = Path(__file__).parent
# -O1: compiling takes longer than running. -ffp-contract=off: no fused multiply-add, as minamp asks of NVRTC.
# -fno-strict-aliasing: CUDA's way to copy 16 bytes at once. -fpermissive: NVRTC is not strict about constants that narrow.
FLAGS = "-std=c++17 -O1 -fPIC -shared -w -ffp-contract=off -fno-strict-aliasing -fpermissive".split()
# Appended to every text: one launch of a kernel by its name, see cuda.cpp.
BIND = """
extern "C" bool bind_kernel(const char* name, const unsigned* dims, void** args, std::function<void()>* work) {
%s  return false;
}
"""
CASE = """  if (!strcmp(name, "{0}")) {{
    if (work) *work = emulated::bind<{1}>({0}, dims, args);
    return true;
  }}
"""
# The tests' product without tensor cores is a whole block's: the first thread of it does it alone.
PRODUCT = (
    shim.PRODUCT.replace("struct Product", "struct Alone")
    + """
template <class T> struct Product : Alone<T> {
  void add(const T* a, const T* b) { if (!threadIdx.x) Alone<T>::add(a, b); }
  void store(float* sums) const { if (!threadIdx.x) Alone<T>::store(sums); }
};
"""
)


def install(folder, includes):
    """CuPy compiles with g++ and sorts with NumPy from here on."""
    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{path}" for path in (folder, HERE, *includes)]
    # g++ reads CUDA's headers once for all kernels: it takes device.h.gch, in the folder asked first, for device.h
    header, read = HERE / "device.h", folder / "device.h.gch"
    if not read.exists() or read.stat().st_mtime < header.stat().st_mtime:
        target = folder / f"device.{os.getpid()}"
        gxx(*FLAGS, *includes, "-x", "c++-header", header, "-o", target)
        target.rename(read)

    def compile(source, options=(), arch=None, filename="", name_expressions=None, *_):
        source = source.replace(kernels_wmma.PRODUCT, PRODUCT)  # tensor cores: sums one by one
        options = [o for o in options if o.startswith(("-D", "-I"))]
        path = library(folder, source, [*includes, *options], name_expressions or ())
        return str(path).encode() + b"\0", {name: name for name in name_expressions or ()}

    compiler._compile_using_nvrtc_no_warning = compile
    thrust.sort, thrust.argsort = sort, argsort


def library(folder, source, options, names):
    """The path of the compiled text; `names`: the templates of it that are asked for, such as 'f<float>'."""
    key = hashlib.sha256(repr((source, options, names, FLAGS, BIND, CASE)).encode())
    key.update((HERE / "device.h").read_bytes())
    path = folder / f"{key.hexdigest()[:40]}.so"
    if path.exists():
        return path
    text, target = path.with_suffix(".cpp"), path.with_suffix(f".{os.getpid()}")
    # memory whose size the launch names: cuda.cpp refuses more than a block may have
    source = re.sub(
        r"extern\s+__shared__\s+([\w ]+?)\s+(\w+)\[\];",
        r"alignas(16) static \1 \2[49152 / sizeof(\1)];",
        source,
    )
    source = f'#include "device.h"\n{source}'
    text.write_text(source)
    # Names of kernels are made by macros: read them where macros are gone.
    found = gxx("-std=c++17", "-E", "-P", "-DFIND_KERNELS", *options, text)
    found = re.findall(r"A_KERNEL\s+void\s+(?:__attribute__\(\(.*?\)\)\s*)?(\w+)\s*\(", found)
    waits = "true" if re.search("__sync|__shfl", source) else "false"
    cases = "".join(CASE.format(name, waits) for name in dict.fromkeys((*found, *names)))
    text.write_text(source + BIND % cases)
    gxx(*FLAGS, *options, text, "-o", target)
    target.rename(path)  # whole or not there
    return path


def gxx(*args):
    done = subprocess.run(["g++", *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ does not take a kernel's text: {done.stderr[:3000]}")
    return done.stdout


def rows(address, dtype, shape):
    """Memory as an array of the rows to sort. CuPy's own sort comes compiled for GPUs; this one can't be captured."""
    if cupy.cuda.get_current_stream().is_capturing():
        raise NotImplementedError("a sort in a capture is not emulated")
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    flat = np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8).view(dtype)
    return flat.reshape(-1, shape[-1])


def sort(dtype, data, keys, shape):
    rows(data, dtype, shape).sort(axis=-1, kind="stable")


def argsort(dtype, index, data, keys, shape):
    values = rows(data, dtype, shape)
    order = np.argsort(values, axis=-1, kind="stable")
    rows(index, np.intp, shape)[...] = order
    values[...] = np.take_along_axis(values, order, -1)
