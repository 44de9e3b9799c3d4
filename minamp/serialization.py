"""save and load: training state in one file that holds data and nothing that runs.

The file is a zip: checkpoint.json has the structure, arrays/0.npy, arrays/1.npy, ... the arrays. Nothing is pickled,
so a file from a stranger can be wrong but can't execute code. bfloat16 and float8 arrays, which .npy has no
name for, are stored as the unsigned integers with their bits.

In the JSON, None, bool, int, float, str and list stand for themselves; everything else is {kind: content, ...}:

    {"dict": [[key, value], ...]}, {"OrderedDict": ...}     keys are str or int, in their order
    {"tuple": [...]}
    {"int": "0x..."}                                        beyond 53 bits, where other readers of JSON round
    {"float": "7ff8000000000000"}                           inf and nan, by their bits
    {"array" | "scalar" | "tensor": 3, "dtype": "float16"}  arrays/3.npy; a tensor also has "requires_grad"
"""

import io
import json
import math
import os
import secrets
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np

from minamp import backends
from minamp.announce import announced
from minamp.formats import FORMATS
from minamp.tensor import Tensor

VERSION = 1  # of the file format; a reader takes its own and older ones
DOCUMENT, MAGIC, ZIP = "checkpoint.json", "minamp checkpoint", b"PK\x03\x04"
_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 complex64 complex128".split()
DTYPES = {d.name: d for d in (*map(np.dtype, _NAMES), *FORMATS)}


@announced("save")
def save(obj, f):
    """Write `obj` to `f`, a path or a file open for writing bytes.

    obj: Tensors, arrays, numbers, strings, bools and None in dicts, lists and tuples, nested; Tensors are saved without
    history and without .grad. At a path the file is written beside `f`, brought to disk and then put in its place, so
    that `f` holds the old file or the whole new one at every moment. TypeError naming the place of an object that can't
    be stored, FileNotFoundError if the folder does not exist; the old file then stays.
    """
    arrays = []
    document = {"format": MAGIC, "version": VERSION, "content": _pack(obj, "state", arrays)}
    if hasattr(f, "write"):
        _write(f, document, arrays)
        return
    path = Path(os.path.realpath(f))  # through a symbolic link: the link stays one
    if not path.parent.is_dir():
        raise FileNotFoundError(f"save: the folder {path.parent} does not exist: create it first")
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            _write(file, document, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # Ctrl-C too
        part.unlink(missing_ok=True)
        raise


def _write(file, document, arrays):
    with zipfile.ZipFile(file, "w") as archive:
        with archive.open(DOCUMENT, "w") as member:  # not writestr: that would put the time of day in
            member.write(json.dumps(document, allow_nan=False).encode())
        for i, array in enumerate(arrays):
            with archive.open(_member(i), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def load(f, map_location=None, *, weights_only=True):
    """What save() was given: `f` is its path, or the file open for reading bytes.

    Tensors (Parameters too) come back as leaf Tensors, requires_grad as it was.

    map_location: the device they are moved to, the CPU by default. weights_only: accepted as in torch; nothing is unpickled
    either way. TypeError for a map_location that is a function or a dict: tensors are saved without their device.
    FileNotFoundError if there is no such file; ValueError, saying what it is instead, for a file that save() has not
    written, that is damaged, or that a newer minamp has written.
    """
    if not isinstance(map_location, str | None):
        raise TypeError(
            f"load: map_location must be a device such as 'cpu' or 'cuda', got {type(map_location).__name__}"
        )
    if hasattr(f, "read"):
        return _loaded(f, getattr(f, "name", type(f).__name__), map_location or "cpu")
    path = Path(f)
    if path.is_dir() or not path.exists():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"load: {path} {what}: give the path of a file that minamp.save has written")
    with open(path, "rb") as file:
        return _loaded(file, path, map_location or "cpu")


def _loaded(file, path, device):
    start = file.read(4)
    if not start or not ZIP.startswith(start):
        raise ValueError(f"load: {path} {_foreign(start)}")
    try:
        with zipfile.ZipFile(file) as archive:
            return _read(archive, path, device)
    except (_Refused, MemoryError):
        raise
    except Exception as error:  # changed bytes make zipfile, json and NumPy raise a dozen kinds
        raise ValueError(
            f"load: {path} is truncated or damaged ({type(error).__name__}: {error}): take another copy or an "
            "older checkpoint"
        ) from error


class _Refused(ValueError):
    """An undamaged file that load() won't take."""


def _foreign(start):
    """What a file is, judged by its first bytes."""
    if not start:
        return "is empty: take another copy or an older checkpoint"
    if start[:1] == b"\x80":
        return (
            "is a pickle (an old torch.save?), which is never opened because it can run any code: load it where you "
            "trust it, turn its tensors into NumPy arrays and minamp.save them"
        )
    return f"is not a checkpoint (it starts with {start!r}): give a file that minamp.save has written"


def _is_extension(dtype):
    return dtype.isbuiltin == 2  # NumPy's mark of a registered type: bfloat16 and the float8 types


def _member(i):
    return f"arrays/{i}.npy"


def _read(archive, path, device):
    names = archive.namelist()
    if any(name.endswith("data.pkl") for name in names):
        raise _Refused(
            f"load: {path} was written by torch.save, which pickles, and is never opened because a pickle can run any "
            "code: in torch, turn its tensors into NumPy arrays and minamp.save them"
        )
    document = json.loads(archive.read(DOCUMENT)) if DOCUMENT in names else None
    if not isinstance(document, dict) or document.get("format") != MAGIC:
        raise _Refused(
            f"load: {path} is a zip file but not a checkpoint: give a file that minamp.save has written"
        )
    if document["version"] > VERSION:
        raise _Refused(
            f"load: {path} was written by a newer minamp (checkpoint format {document['version']}, this one reads up to "
            f"{VERSION}): update minamp"
        )
    return _unpack(document["content"], archive, device)


def _pack(x, where, arrays):
    """`x` as JSON values; its arrays go to the end of the list `arrays`. `where` is its place, for the error."""
    kind = type(x)  # exactly: a subclass (defaultdict, namedtuple, IntEnum) would come back as something else
    if x is None or kind in (bool, str):
        return x
    if kind is int:
        return x if abs(x) < 2**53 else {"int": hex(x)}
    if kind is float:
        return x if math.isfinite(x) else {"float": struct.pack(">d", x).hex()}
    if kind in (dict, OrderedDict):
        for key in x:
            if type(key) not in (str, int):
                raise TypeError(
                    f"save: can't store {where}: the key {key!r} is a {type(key).__name__}: use str or int keys"
                )
        return {
            kind.__name__: [
                [_pack(k, where, arrays), _pack(v, f"{where}[{k!r}]", arrays)] for k, v in x.items()
            ]
        }
    if kind in (list, tuple):
        items = [_pack(v, f"{where}[{i}]", arrays) for i, v in enumerate(x)]
        return items if kind is list else {"tuple": items}
    if isinstance(x, Tensor):
        array, node = backends.move(x._data, "cpu"), {"tensor": len(arrays), "requires_grad": x.requires_grad}
    elif kind is np.ndarray:
        array, node = x, {"array": len(arrays)}
    elif isinstance(x, np.generic):
        array, node = np.asarray(x), {"scalar": len(arrays)}
    else:
        repair = "save its state_dict()" if hasattr(x, "state_dict") else "leave it out or convert it"
        raise TypeError(
            f"save: can't store {where}: a {kind.__name__}; stored are Tensors, arrays, numbers, strings, bools and None in "
            f"dicts, lists and tuples: {repair}"
        )
    name = array.dtype.name
    if DTYPES.get(name) != array.dtype.newbyteorder("="):
        raise TypeError(
            f"save: can't store {where}: an array of dtype {name}; stored are {', '.join(DTYPES)}: convert it with astype"
        )
    arrays.append(array.view(f"u{array.itemsize}") if _is_extension(array.dtype) else array)
    return {**node, "dtype": name}


def _unpack(x, archive, device):
    """What _pack was given."""
    if isinstance(x, list):
        return [_unpack(v, archive, device) for v in x]
    if not isinstance(x, dict):
        return x
    kind = next(iter(x))
    content = x[kind]
    if kind in ("dict", "OrderedDict"):
        pairs = [(_unpack(k, archive, device), _unpack(v, archive, device)) for k, v in content]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    if kind == "tuple":
        return tuple(_unpack(v, archive, device) for v in content)
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if kind not in ("array", "scalar", "tensor"):
        raise ValueError(f"unknown kind {kind!r}")
    dtype = DTYPES[x["dtype"]]
    array = np.lib.format.read_array(io.BytesIO(archive.read(_member(content))), allow_pickle=False)
    if _is_extension(dtype) and array.dtype == f"u{dtype.itemsize}":
        array = array.view(dtype)
    if array.dtype.name != dtype.name:
        raise ValueError(f"{_member(content)} has dtype {array.dtype}, not {dtype}")
    if kind == "scalar":
        return array[()]
    return Tensor(backends.move(array, device), x["requires_grad"]) if kind == "tensor" else array
