"""Reading a folder of safetensors files: one `model.safetensors`, or the shards that `model.safetensors.index.json` names.

Follows the layout that transformers writes (`save_pretrained`). Headers are read first, so that a cut, foreign or incomplete folder is refused before any
tensor is; tensors are then views into memory-mapped files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from gpt2jax.errors import InputError

SINGLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
FLOATS: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class Place(NamedTuple):
    """Where a tensor is: its file as mapped bytes, its name, dtype and shape there, and its first byte."""

    file: np.ndarray[Any, Any]
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class TensorFolder:
    """The tensors of a folder by name. `places` comes from the files' headers; nothing else is read before `read`.

    Raises InputError for a folder without safetensors weights and for a missing, cut or foreign file or index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[str, Place] = {}
        if (folder / SINGLE).is_file():
            self._open(SINGLE)
        elif (folder / INDEX).is_file():
            self._open_shards(_read_index(folder / INDEX))
        elif (folder / PICKLED).is_file() or (folder / f"{PICKLED}.index.json").is_file():
            raise InputError(
                f'{folder} has {PICKLED} but no {SINGLE}; convert it where torch and transformers are installed: python -c "import transformers as t; '
                f"t.AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('{folder}')\""
            )
        else:
            raise InputError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there")

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tensors other names (old -> new). InputError if two tensors would then share one."""
        renamed = [names.get(name, name) for name in self.places]
        if twice := sorted({name for name in renamed if renamed.count(name) > 1}):
            raise InputError(f"{self.folder}: the weights hold {listed(twice)} twice, under two names; keep one of each")
        self.places = dict(zip(renamed, self.places.values(), strict=True))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.places[name].shape

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """One tensor as a view into its file, in the file's dtype (float32, float16, bfloat16). InputError for another dtype, NaN and infinity."""
        place = self.places[name]
        if place.dtype not in FLOATS:
            raise InputError(f"{self.folder}: tensor {place.name} has dtype {place.dtype}; weights must be {', '.join(FLOATS)}")
        tensor: np.ndarray[Any, Any] = np.ndarray(place.shape, FLOATS[place.dtype], buffer=place.file, offset=place.offset)
        if not np.isfinite(tensor).all():
            raise InputError(f"{self.folder}: tensor {place.name} holds NaN or infinity; the file is damaged or its training diverged")
        return tensor

    def _open(self, file_name: str) -> list[str]:
        path = self.folder / file_name
        if not path.is_file():
            raise InputError(f"{self.folder / INDEX} names {file_name}, which is not there; fetch the missing shard")
        try:
            safetensors.safe_open(path, framework="np")  # the library's own check of the header and of the file's length
            file = np.memmap(path, np.uint8, "r")
        except (safetensors.SafetensorError, OSError) as error:
            hint = "it is a git-lfs pointer: run `git lfs pull`" if _is_lfs_pointer(path) else f"{error}; it is cut or no safetensors file: fetch it again"
            raise InputError(f"cannot read {path}: {' '.join(hint.split())}") from None
        header_bytes = int.from_bytes(file[:8].tobytes(), "little")
        header = json.loads(file[8 : 8 + header_bytes].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            self.places[name] = Place(file, name, entry["dtype"], tuple(entry["shape"]), 8 + header_bytes + entry["data_offsets"][0])
        return list(header)

    def _open_shards(self, weight_map: dict[str, str]) -> None:
        for file_name in sorted(set(weight_map.values())):
            found = set(self._open(file_name))
            wanted = {name for name, file in weight_map.items() if file == file_name}
            if found != wanted:
                raise InputError(f"{self.folder}/{file_name} does not fit {INDEX}: tensors {listed(sorted(found ^ wanted))} are in one of the two only")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. InputError, one line, for a missing or malformed file or another kind of value."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def listed(names: Iterable[str], most: int = 12) -> str:
    """Names in one line, the first `most` of them spelled out."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{path} has no weight_map from tensor names to file names")
    for file in weight_map.values():
        # names are judged as text: in a hub cache a shard is a link that leads out of the folder, and rightly so
        if PureWindowsPath(file).name != file or not file.endswith(".safetensors"):
            raise InputError(f"{path} names {file!r}; a shard must be a .safetensors file in the same folder")
    return weight_map


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(24).startswith(b"version https://git-lfs")
    except OSError:
        return False


def aligned_zeros(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """float32 zeros at an address that XLA on a CPU takes as it is (a multiple of 64), where it would copy any other."""
    size = 4 * math.prod(shape)
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(np.float32).reshape(shape)
