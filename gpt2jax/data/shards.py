"""Token shards: the files that training reads.

A prepared folder holds `train_000000.bin`, `train_000001.bin`, ..., `val_000000.bin`, ..., a `manifest.json`, and the tokenizer that made the ids.
A shard is a header of 64 bytes and then its tokens, all little-endian:

    offset  bytes  what
         0      8  magic, b"GPT2JAX" and a zero
         8      4  format version, 1
        12      4  bytes a token: 2 (uint16) or 4 (uint32)
        16      4  vocabulary size; each id is below it
        20      4  crc32 (zlib's) of the tokens' bytes
        24      8  number of tokens
        32     32  fingerprint of the tokenizer (sha256)
        64      -  the tokens, nothing after them

A split's text is the tokens of its shards in order: the end-of-text id, then each document followed by the end-of-text id.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from gpt2jax.errors import InputError

VERSION = 1
MANIFEST = "manifest.json"
_MAGIC = b"GPT2JAX\0"
_HEADER = struct.Struct("<8sIIIIQ32s")
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class ShardHeader(NamedTuple):
    """What a shard says of itself."""

    dtype: np.dtype[Any]
    vocab_size: int
    crc32: int
    tokens: int
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """What the manifest says of a shard."""

    name: str
    tokens: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class SplitInfo:
    """One split: `tokens` counts the end-of-text ids too, `bytes` is UTF-8 text alone."""

    tokens: int
    documents: int
    bytes: int
    shards: tuple[ShardInfo, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds."""

    tokenizer_name: str
    tokenizer_fingerprint: str
    vocab_size: int
    eot: int
    splits: dict[str, SplitInfo]
    sources: tuple[str, ...] = ()
    val_fraction: float = 0.0
    seed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the tokens: tokenizer, and each shard's count and checksum. Where the text came from does not count."""
        shards = {split: [(shard.tokens, shard.crc32) for shard in info.shards] for split, info in sorted(self.splits.items())}
        return hashlib.sha256(json.dumps([VERSION, self.tokenizer_fingerprint, shards]).encode()).hexdigest()


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype of a shard: uint16 up to 65,536 ids, else uint32."""
    return _DTYPES[2 if vocab_size <= 1 << 16 else 4]


class ShardWriter:
    """Writes one shard piece by piece, under another name until `close`; leaving a `with` block by an exception leaves no file."""

    def __init__(self, path: Path, *, vocab_size: int, fingerprint: str) -> None:
        self.path, self.vocab_size, self.fingerprint = path, vocab_size, bytes.fromhex(fingerprint)
        self.tokens, self._crc = 0, 0
        self._dtype = token_dtype(vocab_size)
        self._partial = path.with_name(f".{path.name}.partial")
        self._file = self._partial.open("wb")
        self._file.write(bytes(_HEADER.size))

    def append(self, ids: np.ndarray) -> None:
        """Raises InputError, and writes nothing, where an id is not in the vocabulary: a cast to the shard's dtype would make another token of it."""
        if ids.size == 0:
            return
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self.vocab_size:
            wrong = ids.dtype if ids.dtype.kind not in "iu" else ids.min() if ids.min() < 0 else ids.max()
            raise InputError(f"{self.path.name}: token id {wrong} is outside the vocabulary of {self.vocab_size} ids, and does not fit {self._dtype}")
        payload = np.ascontiguousarray(ids, self._dtype).data.cast("B")
        self._crc = zlib.crc32(payload, self._crc)
        self._file.write(payload)
        self.tokens += len(ids)

    def close(self) -> ShardInfo:
        self._file.seek(0)
        self._file.write(_HEADER.pack(_MAGIC, VERSION, self._dtype.itemsize, self.vocab_size, self._crc, self.tokens, self.fingerprint))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self.path)
        return ShardInfo(self.path.name, self.tokens, self._crc)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._file.closed:
            self._file.close()
            self._partial.unlink(missing_ok=True)


def write_shard(path: str | Path, tokens: np.ndarray, *, vocab_size: int, fingerprint: str) -> ShardInfo:
    """Write `tokens` [n], whole numbers below `vocab_size`, as one shard. `fingerprint` is the tokenizer's, 64 hex digits."""
    with ShardWriter(Path(path), vocab_size=vocab_size, fingerprint=fingerprint) as writer:
        writer.append(tokens)
        return writer.close()


def read_header(path: str | Path) -> ShardHeader:
    """The header of a shard, checked against the file's size. Raises InputError for a foreign, cut or padded file and for another version."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            head, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(f"{path}: the shard cannot be read: {error.strerror}") from None
    if head[:8] != _MAGIC[: len(head)] or not head:
        raise InputError(f"{path}: not a gpt2jax shard; make shards with `gpt2jax prepare`")
    if len(head) < _HEADER.size:
        raise InputError(f"{path}: the shard is cut: {size} bytes, less than its header of {_HEADER.size}; prepare the data again")
    _, version, itemsize, vocab_size, crc, tokens, fingerprint = _HEADER.unpack(head)
    if version != VERSION:
        raise InputError(f"{path}: shard of format version {version}; this gpt2jax reads version {VERSION}; prepare the data again")
    if itemsize not in _DTYPES:
        raise InputError(f"{path}: the header is damaged: {itemsize} bytes a token, which must be 2 or 4; prepare the data again")
    expected = _HEADER.size + tokens * itemsize
    if size != expected:
        fault = f"the shard is cut: {size} bytes instead of" if size < expected else f"{size - expected} bytes stand after the end at"
        raise InputError(f"{path}: {fault} {expected} for {tokens} tokens; prepare the data again")
    return ShardHeader(_DTYPES[itemsize], vocab_size, crc, tokens, fingerprint.hex())


def open_shard(path: str | Path, *, manifest: Manifest | None = None, info: ShardInfo | None = None, verify: bool = False) -> np.ndarray:
    """The tokens of a shard, memory-mapped and read-only: uint16 or uint32 [n].

    `manifest` and `info` are what the shard must agree with; a stale one is refused. `verify` reads it through once and compares the checksum
    (about a second a gigabyte).
    """
    path = Path(path)
    header = read_header(path)
    claims: list[tuple[object, object, str]] = []
    if manifest is not None:
        claims += [(header.fingerprint, manifest.tokenizer_fingerprint, "tokenizer"), (header.vocab_size, manifest.vocab_size, "vocabulary")]
    if info is not None:
        claims += [(header.tokens, info.tokens, "number of tokens"), (header.crc32, info.crc32, "checksum")]
    for found, expected, what in claims:
        if found != expected:
            raise InputError(f"{path}: the shard does not belong to its manifest: {what} {found!s:.12}, not {expected!s:.12}; prepare the data again")
    if header.dtype != token_dtype(header.vocab_size):
        raise InputError(f"{path}: the header is damaged: {header.dtype} for a vocabulary of {header.vocab_size}; prepare the data again")
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if verify and zlib.crc32(memoryview(content)[_HEADER.size :]) != header.crc32:
        raise InputError(f"{path}: the shard is damaged: its checksum does not fit its tokens; prepare the data again")
    return np.frombuffer(content, header.dtype, count=header.tokens, offset=_HEADER.size)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    tree = {"format": "gpt2jax tokens", "version": VERSION, **dataclasses.asdict(manifest)}
    partial = folder / f".{MANIFEST}.partial"
    partial.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / MANIFEST)


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a prepared folder. Raises InputError where there is none, or one that is damaged or of another version."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise InputError(f"{folder} is no prepared folder: it has no {MANIFEST}; make one with `gpt2jax prepare SOURCE --out DIR`")
    try:
        tree = json.loads(path.read_bytes())
        if tree.pop("format") != "gpt2jax tokens" or tree.pop("version") != VERSION:
            raise InputError(f"{path}: not a manifest of version {VERSION}, which this gpt2jax reads; prepare the data again")
        splits = {name: SplitInfo(**{**split, "shards": tuple(ShardInfo(**shard) for shard in split["shards"])}) for name, split in tree.pop("splits").items()}
        rest: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}
        manifest = Manifest(splits=splits, **rest)
        for name, split in splits.items():
            if split.tokens != sum(shard.tokens for shard in split.shards):
                raise InputError(f"{path}: the shards of {name} do not add up to its {split.tokens} tokens; prepare the data again")
        return manifest
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: the manifest is damaged ({type(error).__name__}: {error}); prepare the data again") from None
