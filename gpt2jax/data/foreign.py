"""Token files of other programs, read as they are: memory-mapped, nothing is converted.

    train.bin, val.bin                        nanoGPT: uint16, no header
    NAME_train_000001.bin, NAME_val_....bin   llm.c, modded-nanogpt: 256 int32 of header (magic, version, number of tokens), then uint16 or uint32
    NAME_train_000001.npy, NAME_val_....npy   build-nanogpt: NumPy arrays of whole numbers

All little-endian. A file belongs to the split that its name says, and a split is its files in the order of their names. There is no manifest: which tokenizer
made the ids is the user's word, and what can be checked is that they lie in its vocabulary.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpt2jax.data.batches import TokenSource
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import Tokenizer

_SUFFIXES = (".bin", ".npy")
_SPLIT = re.compile(r"(?<![a-z])(train|val)(?:ing|id|idation)?(?![a-z])", re.IGNORECASE)
_HEADER_BYTES = 256 * 4
#: magic -> version, dtype (llm.c, dev/data/data_common.py)
_FORMATS: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
_EVALUATION = 20240522
_BLOCK = 1 << 15
_SAMPLED = 64


def find_token_files(source: str) -> dict[str, list[Path]] | None:
    """The files of splits 'train' and 'val', sorted by name; None where `source`, a folder, file or glob, stands for none.

    A token file ends in .bin or .npy, and has train or val in its name or a known header. Where train files alone are named, validation is those beside
    them whose names begin alike. Raises InputError where one of the two is missing.
    """
    path = Path(source)
    if path.is_dir():
        named = list(path.iterdir())
    else:
        named = [path] if path.is_file() else [Path(match) for match in glob.glob(source, recursive=True)]
    found = sorted(path for path in named if _is_token_file(path))
    if not found:
        return None
    files = {split: [path for path in found if _split(path) == split] for split in ("train", "val")}
    if not files["train"]:
        raise InputError(f"{source}: no token file is for training ({found[0].name}, ...); give those that are a name with 'train' in it, as in train.bin")
    first = files["train"][0]
    if not files["val"]:
        files["val"] = sorted(path for path in first.parent.iterdir() if _is_token_file(path) and _split(path) == "val" and _start(path) == _start(first))
    if not files["val"]:
        name = _SPLIT.sub("val", first.name)
        raise InputError(f"{source}: no token file is for validation; put one called {name} beside {first.name}: a shard kept from training will do")
    return files


def foreign_tokens(files: dict[str, list[Path]], tokenizer: Tokenizer, *, verify: bool) -> dict[str, TokenSource]:
    """The splits of `files`. The fingerprint is made of the tokenizer, each file's count, and 64 blocks spread over its tokens (a short file's are all of
    them). With `verify` all ids are held against the vocabulary, without it those blocks' alone.

    Raises InputError, naming the file, for one that is cut or no token file, and for an id outside the vocabulary.
    """
    shards = {split: [_open(path) for path in paths] for split, paths in files.items()}
    facts = hashlib.sha256(f"foreign tokens 1 {tokenizer.fingerprint}".encode())
    for split, paths in files.items():
        for path, tokens in zip(paths, shards[split], strict=True):
            facts.update(f"\n{split} {len(tokens)} ".encode())
            for block in _blocks(tokens, whole=False):
                _check_ids(path, block, tokenizer)
                facts.update(block.astype("<u4").tobytes())
            for block in _blocks(tokens, whole=True) if verify else ():
                _check_ids(path, block, tokenizer)
    return {split: TokenSource(arrays, tokenizer.n_vocab, facts.hexdigest()) for split, arrays in shards.items()}


def _is_token_file(path: Path) -> bool:
    if path.suffix.lower() not in _SUFFIXES or not path.is_file() or path.name.startswith("."):
        return False
    return _split(path) is not None or _magic(_head(path)) in _FORMATS


def _split(path: Path) -> str | None:
    said = _SPLIT.findall(path.name)
    return said[-1].lower() if said else None


def _start(path: Path) -> str:
    """What stands before the split in a file's name."""
    return _SPLIT.split(path.name)[0]


def _head(path: Path) -> np.ndarray:
    """The first three int32, or fewer."""
    try:
        with path.open("rb") as file:
            return np.frombuffer(file.read(12).ljust(12, b"\0"), "<i4")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _magic(head: np.ndarray) -> int:
    return int(head[0])


def _open(path: Path) -> np.ndarray:
    """The tokens of a file, memory-mapped and read-only: whole numbers [n]."""
    head, size = _head(path), path.stat().st_size
    if size == 0:
        raise InputError(f"{path}: the file is empty")
    if path.suffix.lower() == ".npy":
        return _open_array(path, size)
    if head.tobytes()[:8] == b"GPT2JAX\0":
        raise InputError(f"{path}: a shard of gpt2jax, without the manifest.json of its folder; prepare the data again")
    if _magic(head) == _EVALUATION:
        raise InputError(f"{path}: an evaluation file of llm.c, not tokens to train on")
    if _magic(head) not in _FORMATS:  # no header
        if size % 2:
            raise InputError(f"{path}: no file of tokens that is known: it has no header, and {size} bytes are no whole number of uint16")
        return _map(path, np.dtype("<u2"), 0, size // 2)
    version, dtype = _FORMATS[_magic(head)]
    if head[1] != version:
        raise InputError(f"{path}: version {head[1]} of the header {head[0]}; this gpt2jax reads version {version}: make the file again in that one")
    if head[2] < 1:
        raise InputError(f"{path}: the file holds no tokens: its header says {head[2]}; fetch or make it again")
    expected = _HEADER_BYTES + int(head[2]) * dtype.itemsize
    if size != expected:
        fault = f"the file is cut: {size} bytes instead of" if size < expected else f"{size - expected} bytes stand after the end at"
        raise InputError(f"{path}: {fault} {expected} for the {head[2]} tokens that its header says; fetch or make it again")
    return _map(path, dtype, _HEADER_BYTES, int(head[2]))


def _map(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype, "r", offset, (count,)))  # slices of an ndarray cost less than a memmap's


def _open_array(path: Path, size: int) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InputError(f"{path}: no NumPy array, or a file that is cut ({error}); fetch or make it again") from None
    if not isinstance(tokens, np.memmap):
        raise InputError(f"{path}: an archive of arrays (npz), not one list of token ids; save the array alone, by numpy.save")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise InputError(f"{path}: an array of {tokens.dtype} {list(tokens.shape)} is no list of token ids")
    if (end := tokens.offset + tokens.nbytes) != size:
        raise InputError(f"{path}: {size - end} bytes stand after the end at {end}; fetch or make it again")
    return np.asarray(tokens)


def _blocks(tokens: np.ndarray, whole: bool) -> Iterator[np.ndarray]:
    """All of the tokens in blocks, or 64 of these, the first and the last among them."""
    last = max(len(tokens) - _BLOCK, 0)
    if whole or last < _SAMPLED * _BLOCK:
        starts = list(range(0, len(tokens), _BLOCK))
    else:
        starts = [last * number // (_SAMPLED - 1) for number in range(_SAMPLED)]
    return (tokens[start : start + _BLOCK] for start in starts)


def _check_ids(path: Path, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= tokenizer.n_vocab:
        found = low if low < 0 else high
        raise InputError(
            f"{path}: token id {found} is outside the {tokenizer.n_vocab} ids of the tokenizer {tokenizer.name}; "
            "set data.tokenizer to the one that made the file, if it is a file of tokens"
        )
