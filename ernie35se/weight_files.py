"""Model weight files cut or joined one array at a time: the memory of one array, whatever the model's size.

    <stem>.pdparams, <stem>.safetensors                     whole, stem model_state or model
    <stem>-00001-of-00002.*, with an index.json             whole, in several files
    <stem>.tp00.*, .pp00.*, .tp00_pp00.*                    one for each tensor-parallel rank and pipeline stage

Arrays are memory maps into the files; bfloat16 is carried as its bits. A .pdparams file is a pickle of a dict of numpy
arrays; `_LazyUnpickler` notes where in the file the arrays' bytes are and skips them.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
from paddlenlp.utils.log import logger

from . import conversion
from .configuration import Ernie35Config

RANK_FILE = re.compile(r"(model_state|model)\.(?:tp(\d+))?_?(?:pp(\d+))?\.(pdparams|safetensors)")
NUMPY_OF = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U16": "<u2",
            "I8": "i1", "U8": "u1", "BOOL": "?"}  # fmt: skip
SMALL = 1 << 16  # bytes: what a pickle holds within its frames is read, larger bytes are skipped


class Array(NamedTuple):
    """A memory-mapped array and the name of its element type in safetensors' terms."""

    values: np.ndarray
    kind: str


# ---------------------------------------------------------------- reading


def read_arrays(path: Path) -> Dict[str, Array]:
    """Name -> array of one weight file; nothing is read before it is used.

    Raises:
        ValueError: a file that is not what its name says.
    """
    try:
        return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pdparams(path)
    except (pickle.UnpicklingError, EOFError, struct.error, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as weights ({error}); is it whole?") from None


def _read_safetensors(path: Path) -> Dict[str, Array]:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: Array(_mapped(path, 8 + length + entry["data_offsets"][0], NUMPY_OF[entry["dtype"]], entry["shape"]), entry["dtype"])
        for name, entry in header.items()
    }


def _mapped(path: Path, offset: int, dtype: str, shape, order: str = "C") -> np.ndarray:
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=tuple(shape), order=order)


class _Skipped(NamedTuple):
    offset: int
    length: int


class _LazyArray:
    """Stands for a numpy array while a pickle is read: takes its state, with bytes or where they are."""

    def __init__(self, *_):
        self.state = None

    def __setstate__(self, state):
        self.state = state

    def array(self, path: Path) -> np.ndarray:
        _, shape, dtype, fortran, data = self.state
        order = "F" if fortran else "C"
        if isinstance(data, _Skipped):
            return _mapped(path, data.offset, dtype, shape, order)
        return np.frombuffer(data, dtype).reshape(shape, order=order)


class _LazyUnpickler(pickle._Unpickler):
    """Reads a dict of numpy arrays, leaving large ones in the file. Knows no other class, so nothing else can run."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def find_class(self, module, name):
        if name == "_reconstruct" and module.startswith("numpy."):
            return _LazyArray
        if (module, name) == ("builtins", "dict"):
            return dict
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        raise ValueError(f"holds a {module}.{name}; expected a dict of arrays, as paddle.save writes it")

    def load_large_bytes(self):
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(self._skip(length))

    def load_bytes(self):
        (length,) = struct.unpack("<I", self.read(4))
        self.append(self._skip(length))

    dispatch[pickle.BINBYTES8[0]] = load_large_bytes
    dispatch[pickle.BINBYTES[0]] = load_bytes

    def _skip(self, length: int):
        if length < SMALL or self._unframer.current_frame is not None:
            return self.read(length)
        offset = self.file.tell()  # outside any frame, as the writer puts large bytes
        self.file.seek(length, os.SEEK_CUR)
        return _Skipped(offset, length)


def warn_pickled(path: Path, only_arrays: bool = False) -> None:
    """Say that a pickled file is read, and what that trusts: each reader of one calls this first.

    Args:
        only_arrays: the reader takes arrays alone, so that nothing in the file can run.
    """
    if only_arrays:
        logger.info(f"{path}: a pickled file, read because you trust its source; only arrays are taken from it.")
    else:
        logger.warning(
            f"{path}: a pickled file can run code when it is read; it is read because you trust its source. Safetensors "
            "files hold arrays alone."
        )


def warn_pickled_folder(folder: Path) -> None:
    """The same for a model's folder that paddlenlp will read: for its pickled weights, if those are what it holds."""
    if Path(folder).is_dir():  # else a name that paddlenlp knows
        for name in _whole_files(Path(folder)):
            if name.endswith(".pdparams"):
                warn_pickled(Path(folder) / name)


def _read_pdparams(path: Path) -> Dict[str, Array]:
    warn_pickled(path, only_arrays=True)
    with open(path, "rb") as file:
        unpickler = _LazyUnpickler(file, encoding="latin1")
        unpickler.file = file
        content = unpickler.load()
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}; expected a dict of arrays")
    kind_of = {dtype: kind for kind, dtype in reversed(NUMPY_OF.items())}
    arrays = {}
    for name, value in content.items():
        if isinstance(value, tuple) and len(value) == 2:  # a tensor outside a layer: (its name, array)
            value = value[1]
        if isinstance(value, _LazyArray):
            values = value.array(path)
            arrays[name] = Array(values, kind_of.get(values.dtype.str, kind_of.get(values.dtype.str[1:], "F32")))
    return arrays


# ---------------------------------------------------------------- writing


def write_arrays(path: Path, shapes: Dict[str, Tuple[tuple, str]], array_of: Callable[[str], np.ndarray]) -> None:
    """Write arrays one after the other, to a name beside and then by a rename.

    Args:
        path: its suffix chooses the format. shapes: name -> (shape, kind). array_of: called once a name, in order.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open(temporary, "wb") as file:
            write = _write_safetensors if path.suffix == ".safetensors" else _write_pdparams
            write(file, shapes, array_of)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_safetensors(file, shapes, array_of) -> None:
    header: Dict[str, Any] = {"__metadata__": {"format": "np"}}
    end = 0
    for name, (shape, kind) in shapes.items():
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * np.dtype(NUMPY_OF[kind]).itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in shapes:
        np.ascontiguousarray(array_of(name)).tofile(file)


class _Stream:
    """Pickles as a dict whose items are made while they are written."""

    def __init__(self, items: Callable[[], Iterator]):
        self.items = items

    def __reduce__(self):
        return dict, (), None, None, self.items()


def _write_pdparams(file, shapes, array_of) -> None:
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True  # without a memory of what it has written, which would hold every array
    pickler.dump(_Stream(lambda: ((name, np.array(array_of(name))) for name in shapes)))


# ---------------------------------------------------------------- folders


class Folder:
    """The weight files of a folder: whole, or the pieces of a grid of ranks.

    Attributes:
        files: (tensor rank, pipeline stage) -> arrays by name; {(0, 0): ...} for whole weights.
        in_pieces: whether they are pieces. tensor, pipeline: number of tensor-parallel ranks, and of stages.
        names: the files. stem, extension: of their names.

    Raises:
        ValueError: no weights, two kinds of them, or a rank's file missing.
    """

    def __init__(self, path: Path):
        self.path = path
        ranks = {name: match for name in sorted(os.listdir(path)) if (match := RANK_FILE.fullmatch(name))
                 and (match[2] or match[3])}  # fmt: skip
        whole = _whole_files(path)
        if ranks and whole:
            raise ValueError(f"{path} holds whole weights ({whole[0]}) and pieces ({next(iter(ranks))}); keep one kind.")
        if not ranks and not whole:
            raise ValueError(f"{path} holds no weights; expected model_state.pdparams, model.safetensors, or a rank's "
                             "piece such as model_state.tp00.pdparams.")  # fmt: skip
        example = next(iter(ranks), None) or whole[0]
        self.extension = example.rpartition(".")[2]
        self.stem = "model_state" if example.startswith("model_state") else "model"
        self.names = list(ranks) or whole
        self.in_pieces = bool(ranks)
        self.files: Dict[Tuple[int, int], Dict[str, Array]] = {}
        for name, match in ranks.items():
            self.files[int(match[2] or 0), int(match[3] or 0)] = read_arrays(path / name)
        if whole:
            self.files[0, 0] = {name: array for file in whole for name, array in read_arrays(path / file).items()}
        self.tensor = 1 + max(tensor for tensor, _ in self.files)
        self.pipeline = 1 + max(stage for _, stage in self.files)
        lacking = {(t, p) for t in range(self.tensor) for p in range(self.pipeline)} - set(self.files)
        if lacking:
            tensor, stage = min(lacking)
            raise ValueError(f"{path}: the piece of tensor-parallel rank {tensor}, pipeline stage {stage} is missing; "
                             f"found: {', '.join(self.names)}.")  # fmt: skip

    def pieces(self) -> Dict[str, List[Array]]:
        """Name -> its array on every tensor rank; a copy that several stages hold, once."""
        found: Dict[str, List[Array]] = {}
        for stage in range(self.pipeline):
            for name in self.files[0, stage]:
                found.setdefault(name, [self.files[tensor, stage][name] for tensor in range(self.tensor)])
        return found


def _whole_files(path: Path) -> List[str]:
    for stem, extension in (("model", "safetensors"), ("model_state", "pdparams")):
        if (path / f"{stem}.{extension}").is_file():
            return [f"{stem}.{extension}"]
        index = path / f"{stem}.{extension}.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            for name in names:
                if not (path / name).is_file():
                    raise ValueError(f"{path / name} is missing; {index.name} names it.")
            return names
    return []


# What the config.json beside whole weights says, whichever run they come from.
WHOLE_CONFIG = {"tensor_parallel_degree": 1, "tensor_parallel_rank": 0, "architectures": ["Ernie35ForCausalLM"]}


def merge_folder(folder: Folder, target: Path, config: Ernie35Config) -> List[Path]:
    """Write the whole weights of a folder of pieces into `target`, one file; returns what was written."""
    pieces = folder.pieces()
    shapes = {name: (_whole_shape(name, arrays, config), arrays[0].kind) for name, arrays in pieces.items()}
    path = target / f"{folder.stem}.{folder.extension}"
    write_arrays(path, shapes, lambda name: conversion.merge(name, [array.values for array in pieces[name]], config))
    return [path]


def _whole_shape(name: str, arrays: List[Array], config: Ernie35Config) -> tuple:
    shape = list(arrays[0].values.shape)
    cut = conversion.layout(name, config)
    if cut is not None:
        shape[cut.axis] = sum(array.values.shape[cut.axis] for array in arrays)
    return tuple(shape)


def split_folder(folder: Folder, target: Path, config: Ernie35Config, degree: int) -> List[Path]:
    """Write the pieces of `degree` tensor-parallel ranks of a folder of whole weights into `target`."""
    arrays = folder.files[0, 0]
    written = []
    for rank in range(degree):
        def piece(name, rank=rank):
            return conversion.split(name, arrays[name].values, config, degree, rank)

        shapes = {name: (_piece_shape(name, array, config, degree), array.kind) for name, array in arrays.items()}
        written.append(target / f"{folder.stem}.tp{rank:02d}.{folder.extension}")
        write_arrays(written[-1], shapes, piece)
    return written


def _piece_shape(name: str, array: Array, config: Ernie35Config, degree: int) -> tuple:
    shape = list(array.values.shape)
    cut = conversion.layout(name, config)
    if cut is not None:
        shape[cut.axis] //= degree
    return tuple(shape)


def copy_beside(source: Path, target: Path, changes: Optional[Dict[str, Any]], skip: Iterable[str] = ()) -> List[str]:
    """Copy what makes a model folder complete (tokenizer, configuration), with `changes` made to config.json."""
    copied = []
    skip = set(skip)
    for path in sorted(source.iterdir()):
        is_weight = re.search(r"\.(pdparams|safetensors|pdopt)(\.index\.json)?$", path.name)
        if not path.is_file() or is_weight or path.name in skip or path.name.startswith((".", "optimizer", "rng_state")):
            continue
        content = path.read_bytes()
        if path.name == "config.json" and changes:
            content = (json.dumps({**json.loads(content), **changes}, indent=2) + "\n").encode()
        temporary = target / f".tmp-{path.name}"
        temporary.write_bytes(content)
        os.replace(temporary, target / path.name)
        copied.append(path.name)
    return copied
