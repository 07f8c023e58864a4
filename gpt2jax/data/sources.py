"""From names on a command line to pieces of text: finding files, unpacking, decoding, cutting. Everything streams; memory does not grow with a file."""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import itertools
import json
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from gpt2jax.data.tables import HF, PARQUET, hf_texts, parquet_texts
from gpt2jax.errors import InputError

#: The source that every machine has: the standard library's own .py files, without its tests.
STDLIB = "python-stdlib"
STDIN = "-"
#: Suffixes that are text for certain: in a folder, such a file that is no UTF-8 is an error, where another one would be left out as binary.
TEXT_SUFFIXES = frozenset(
    ".txt .text .md .markdown .rst .tex .org .html .htm .xml .json .jsonl .ndjson .yaml .yml .toml .ini .cfg .csv .tsv .log .srt "
    ".py .pyi .ipynb .c .h .cc .cpp .hpp .cu .java .js .mjs .jsx .ts .tsx .go .rs .rb .pl .php .lua .r .jl .m .swift .kt .scala .hs .ml .clj .sh .sql".split()
)
_JSON_LINES = (".jsonl", ".ndjson")
_PACKED = (".gz", ".zst")
_STDLIB_LEFT_OUT = frozenset({"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"})
_BLOCK = 1 << 20
_HEAD = 8192
_LONGEST_LINE = 1 << 28
_LONGEST_WORD = 1 << 25
_SURE_CUT = re.compile(r"(?<=\S)[ \n]")


@dataclass(frozen=True)
class Source:
    """One name of the command line, and the files that it stands for (`path` None is standard input or a data set). `name` of a file is what errors call it."""

    name: str
    files: tuple[SourceFile, ...]
    left_out: int = 0


@dataclass(frozen=True)
class SourceFile:
    """A file to read. `key` names it without its machine: a path relative to its source."""

    path: Path | None
    key: str
    size: int = 0


def find_sources(names: Iterable[str]) -> list[Source]:
    """The files of each name, sorted, each file once. A name is python-stdlib, '-', a file, a folder, a glob, or a data set as in `tables.hf_texts`.

    In folders, hidden files and binary files are left out. Raises InputError for a name that stands for nothing readable.
    """
    seen: set[str] = set()
    sources = []
    for name in names:
        source = _find(name)
        places = {os.path.realpath(file.path) if file.path else file.key: file for file in source.files}
        sources.append(Source(name, tuple(file for place, file in places.items() if place not in seen), source.left_out))
        seen |= places.keys()
    return sources


def read_documents(file: SourceFile, *, separator: str | None, text_key: str, on_bytes: Callable[[int], None] | None = None) -> Iterator[tuple[str, bool]]:
    """Pieces of a file's documents, as (text, whether a document ends here). A piece is about a million characters at most.

    Long documents are cut only where GPT-2's tokenizer certainly starts a new token, so the pieces' ids put together are the whole's.
    `on_bytes` is told how many bytes of the file were read. Raises InputError naming file and line for what is no text.
    """
    on_bytes, name = on_bytes or (lambda count: None), str(file.path or file.key)
    if texts := _texts(file, name, text_key, on_bytes):
        for text in texts:
            yield from split_text([text], name=name)
    else:
        yield from split_text(_decoded(name, _unpacked(file, on_bytes)), separator, name=name)


def split_text(blocks: Iterable[str], separator: str | None = None, size: int = _BLOCK, name: str = "text") -> Iterator[tuple[str, bool]]:
    """Cut a stream of text into (piece, whether a document ends here). `size` is the usual length of a piece, in characters.

    A document ends at `separator`, with the line break that may stand on either side of it, and at the end of the stream. A piece ends before a space or
    newline that follows a character which is no white space: no token of GPT-2's pattern reaches over that place, and none is decided by looking past it.
    Raises InputError, with `name`, where 32 million characters hold no such place.
    """
    ending = re.compile(rf"(?:\r?\n)?{re.escape(separator)}(?:\r?\n)?") if separator else None
    held = len(separator) + 6 if separator else 0  # a separator with its line breaks may be half read
    buffer, searched = "", 0
    for block in blocks:
        for start in range(0, len(block), size):
            buffer += block[start : start + size]
            place = 0
            while ending and (found := ending.search(buffer, place)) and found.end() <= len(buffer) - 2:
                yield buffer[place : found.start()], True
                place = found.end()
            if len(buffer) - place >= size:
                end = len(buffer) - held
                cut = _sure_cut(buffer, max(place, searched), end)
                if cut > place:
                    yield buffer[place:cut], False
                    place = cut
                searched = max(place, end)
            buffer, searched = buffer[place:], max(0, searched - place)
            if len(buffer) > _LONGEST_WORD + size:
                raise InputError(f"{name}: {_LONGEST_WORD:,} characters without a space or line break; that is no text to learn from, leave the file out")
    parts = ending.split(buffer) if ending else [buffer]
    yield from ((part, True) for part in parts)


def _sure_cut(text: str, start: int, end: int) -> int:
    """The last place in [start, end) where a piece may end; 0 if there is none."""
    window = 1 << 10
    while True:
        low = max(start, end - window)
        places = [found.start() for found in _SURE_CUT.finditer(text, low, max(low, end))]
        if places or low == start:
            return places[-1] if places else 0
        window *= 16


def _texts(file: SourceFile, name: str, text_key: str, on_bytes: Callable[[int], None]) -> Iterator[str] | None:
    """The documents of a file that holds several by itself; None for one of plain text."""
    if file.path is None and file.key.startswith(HF):
        return hf_texts(file.key, text_key)
    if file.path is not None and file.path.suffix.lower() == PARQUET:
        return parquet_texts(file.path, text_key, on_bytes)
    if _plain_suffix(file.path) in _JSON_LINES:
        return _json_lines(name, _unpacked(file, on_bytes), text_key)
    return None


def _find(name: str) -> Source:
    if name.startswith(HF):
        return Source(name, (SourceFile(None, name),))
    if name == STDLIB:
        return Source(name, tuple(_standard_library()))
    if name == STDIN:
        return Source(name, (SourceFile(None, "standard input"),))
    path = Path(name)
    if path.is_dir():
        files, left_out = _walk(path)
        if not files:
            raise InputError(f"{name}: the folder holds no text file" + (f" ({left_out} binary files were left out)" if left_out else ""))
        return Source(name, tuple(files), left_out)
    if path.exists():
        return Source(name, (_named(path),))
    matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))] if glob.has_magic(name) else []
    found = [_walk(match) if match.is_dir() else ([_named(match)], 0) for match in matches]
    if not any(files for files, _ in found):
        raise InputError(f"{name}: no such file or folder" if not glob.has_magic(name) else f"{name}: the pattern matches no text file")
    return Source(name, tuple(file for files, _ in found for file in files), sum(left_out for _, left_out in found))


def _named(path: Path) -> SourceFile:
    if path.is_file() and path.suffix.lower() not in (*_PACKED, PARQUET) and b"\0" in _head(path):
        tokens = "; the name of a file of tokens must say train or val" if path.suffix in (".bin", ".npy") else ""
        raise InputError(f"{path}: a binary file, not UTF-8 text{tokens}")
    return SourceFile(path, path.name, path.stat().st_size)


def _walk(folder: Path) -> tuple[list[SourceFile], int]:
    files, left_out = [], 0
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            if not path.is_file():
                continue
            if _plain_suffix(path) in TEXT_SUFFIXES or path.suffix.lower() == PARQUET or (path.suffix.lower() not in _PACKED and _looks_like_text(path)):
                files.append(SourceFile(path, path.relative_to(folder).as_posix(), path.stat().st_size))
            else:
                left_out += 1
    return sorted(files, key=lambda file: file.key), left_out


def _standard_library() -> list[SourceFile]:
    folder, files = Path(sysconfig.get_path("stdlib")), []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _STDLIB_LEFT_OUT]
        paths = (Path(parent, name) for name in names if name.endswith(".py"))
        files += [SourceFile(path, path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths if path.is_file()]
    if not files:
        raise InputError(f"{STDLIB}: this Python carries no .py files in {folder}; name text files or a folder instead")
    return sorted(files, key=lambda file: file.key)


def _plain_suffix(path: Path | None) -> str:
    """The suffix that says what the text is: '.jsonl' for a.jsonl.gz."""
    if path is None:
        return ""
    return (path.with_suffix("") if path.suffix.lower() in _PACKED else path).suffix.lower()


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _looks_like_text(path: Path) -> bool:
    head = _head(path)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < _HEAD)  # a character cut by the head's end is no fault
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _unpacked(file: SourceFile, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    suffix = file.path.suffix.lower() if file.path else ""
    try:
        with file.path.open("rb") if file.path else contextlib.nullcontext(sys.stdin.buffer) as opened:
            raw = _Counted(opened, on_bytes)
            if suffix == ".gz":
                unzipped = gzip.GzipFile(fileobj=cast(BinaryIO, raw))  # it only reads
                yield from iter(lambda: unzipped.read(_BLOCK), b"")
            elif suffix == ".zst":
                yield from _unzstd(file, raw)
            else:
                yield from iter(lambda: raw.read(_BLOCK), b"")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{file.path}: damaged or cut gzip file: {error}") from None
    except OSError as error:
        raise InputError(f"{file.path or file.key}: cannot be read: {error.strerror or error}") from None


def _unzstd(file: SourceFile, raw: _Counted) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise InputError(f"{file.path}: reading .zst needs the zstandard package: pip install zstandard") from None
    # the library's stream reader takes a cut file for a whole one, so frames are followed here
    whole, frame = True, zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    try:
        while data := frame.unused_data or raw.read(_BLOCK >> 3):
            if whole:
                frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            yield frame.decompress(data)
            whole = frame.eof
    except zstandard.ZstdError as error:
        raise InputError(f"{file.path}: damaged zstd file: {error}") from None
    if not whole:
        raise InputError(f"{file.path}: the zstd file is cut: its last frame does not end")


def _decoded(name: str, blocks: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines = 1
    for block in itertools.chain(blocks, [b""]):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = lines + error.object[: error.start].count(b"\n")
            raise InputError(f"{name}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x}); convert the file to UTF-8") from None
        yield text
        lines += block.count(b"\n")


def _json_lines(name: str, blocks: Iterable[bytes], text_key: str) -> Iterator[str]:
    for number, line in enumerate(_lines(name, blocks), 1):
        where = f"{name}:{number}"
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")) if line.strip() else None
        except ValueError as error:
            raise InputError(f"{where}: not a line of JSON: {error}") from None
        except RecursionError:
            raise InputError(f"{where}: not a line of JSON that can be read: it is nested too deep") from None
        if not line.strip():
            continue
        if not isinstance(row, dict) or not isinstance(row.get(text_key), str):
            keys = f"; its keys are {', '.join(list(row)[:8])}" if isinstance(row, dict) and text_key not in row else ""
            raise InputError(f"{where}: the line has no text under {text_key!r}{keys}")
        yield row[text_key]


def _lines(name: str, blocks: Iterable[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    for block in blocks:
        first, *others = block.split(b"\n")
        parts.append(first)
        if sum(map(len, parts)) > _LONGEST_LINE:
            raise InputError(f"{name}: a line of more than {_LONGEST_LINE >> 20} MiB; JSON lines end with a line break")
        if others:
            yield b"".join(parts)
            yield from others[:-1]
            parts = [others[-1]]
    yield b"".join(parts)


class _Counted:
    """A binary file that tells how much of it was read."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._file, self._on_bytes = file, on_bytes

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._on_bytes(len(data))
        return data
