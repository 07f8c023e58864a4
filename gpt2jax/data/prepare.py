"""Text into a prepared folder of token shards: what `gpt2jax prepare` runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt2jax.data.shards import MANIFEST, Manifest, ShardInfo, ShardWriter, SplitInfo, open_shard, token_dtype, write_manifest, write_shard
from gpt2jax.data.sources import Source, find_sources, read_documents
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import Tokenizer

SPLITS = ("train", "val")
_CHUNK = 1 << 20  # characters that a worker takes at once

Piece = tuple[str, str, bool]  # split, text, whether the document ends here


def prepare(
    sources: list[str],
    out: str | Path,
    *,
    tokenizer: Tokenizer,
    val_fraction: float = 0.02,
    seed: int = 0,
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    separator: str | None = None,
    text_key: str = "text",
    limit_documents: int | None = None,
    limit_tokens: int | None = None,
    progress: bool | None = None,
) -> Manifest:
    """Turn text into token shards in the new folder `out` (format: `gpt2jax.data.shards`), and return its manifest.

    `sources` are names as in `gpt2jax.data.sources.find_sources`. A plain file is one document, or several where `separator` stands in it; a line of a
    .jsonl file, or a row of a .parquet file or of a data set, is one, under `text_key`. Empty documents are left out. Reading ends after
    `limit_documents` of all documents, or with the one whose end-of-text id is number `limit_tokens` of all tokens or comes after it.
    A split begins with the end-of-text id, and each document is followed by it. A document goes to validation by a hash of (seed, its number), for
    `val_fraction` of the documents; where that leaves a split empty, the last `val_fraction` of all tokens is validation, and a line says so.

    The shards do not depend on `workers` (None: all cores). `progress`: None shows a bar on a terminal and a few lines elsewhere, False nothing.
    Memory does not grow with the sources. `out` appears whole at the end or, after an error or Ctrl-C, not at all.
    Raises InputError for an `out` that is not empty, and naming file and line for a source that cannot be read.
    """
    out = Path(out)
    if not out.parent.is_dir() and out.parent.exists():
        raise InputError(f"{out} cannot be made: {out.parent} is no folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder; name another one, or remove it first")
    if not 0 <= val_fraction < 1:
        raise InputError(f"val_fraction={val_fraction} must be from 0 to below 1")
    if shard_tokens < 1 or (workers is not None and workers < 1) or separator == "":
        raise InputError(f"shard_tokens={shard_tokens} and workers={workers} must be 1 or more, and the separator not empty")
    if min(limit for limit in (limit_documents, limit_tokens, 1) if limit is not None) < 1:
        raise InputError(f"limit_documents={limit_documents} and limit_tokens={limit_tokens} must be 1 or more")
    if not sources:
        raise InputError("no source to prepare; name files, folders or python-stdlib")
    if tokenizer.eot is None:
        raise InputError("the tokenizer has no end-of-text token, so documents could not be told apart; add one to it, or take the gpt2 or bytes tokenizer")
    found = find_sources(sources)
    workers = workers or _cores()
    try:
        with _folder_made_whole(out) as folder, _reporter(progress, sum(file.size for source in found for file in source.files)) as report:
            files, left_out = sum(len(source.files) for source in found), sum(source.left_out for source in found)
            skipped = f", {left_out} binary files left out" if left_out else ""
            report.say(f"preparing {files} files with the {tokenizer.name} tokenizer on {workers} cores{skipped}")
            pieces = _pieces(found, val_fraction, seed, separator, text_key, limit_documents, report.advance)
            splits, notes = _write_splits(folder, pieces, tokenizer, val_fraction, shard_tokens, workers, limit_tokens)
            limits = [f"at most {limit:,} {what}" for limit, what in ((limit_documents, "documents"), (limit_tokens, "tokens")) if limit]
            notes = [*notes, *(f"a part of the source: {limit} were to be read" for limit in limits)]
            tokenizer.save(folder)
            manifest = Manifest(
                tokenizer.name, tokenizer.fingerprint, tokenizer.n_vocab, tokenizer.eot, splits, tuple(sources), val_fraction, seed, tuple(notes)
            )  # fmt: skip
            write_manifest(folder, manifest)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}") from None
    for note in notes:
        report.say(note)
    report.say(f"{out}: " + ", ".join(f"{name} {info.tokens:,} tokens of {info.documents:,} documents" for name, info in splits.items()))
    return manifest


def in_validation(seed: int, document: int, fraction: float) -> bool:
    """Whether document number `document` (0, 1, ...) belongs to validation: a pure function, true for `fraction` of all numbers."""
    digest = hashlib.blake2b(f"gpt2jax split {seed} {document}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _pieces(
    sources: list[Source], val_fraction: float, seed: int, separator: str | None, text_key: str, limit: int | None, on_bytes: Callable[[int], None]
) -> Iterator[Piece]:  # fmt: skip
    number = 0
    for source in sources:
        before = number
        for file in source.files:
            started = False
            for text, ends in read_documents(file, separator=separator, text_key=text_key, on_bytes=on_bytes):
                started = started or bool(text)
                if started:
                    yield SPLITS[in_validation(seed, number, val_fraction)], text, ends
                if started and ends:
                    number, started = number + 1, False
                if number == limit:
                    return
        if number == before and source.files:
            raise InputError(f"{source.name} holds no text")


def _chunks(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    chunk: list[Piece] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece[1]) + 16
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode(tokenizer: Tokenizer, chunk: list[Piece]) -> list[tuple[str, np.ndarray, bool]]:
    """(split, ids, whether the document ends here) of each piece."""
    end = np.array([tokenizer.eot], token_dtype(tokenizer.n_vocab))
    encoded = ((split, tokenizer.encode_array(text), ends) for split, text, ends in chunk)
    return [(split, np.concatenate([ids, end]) if ends else ids, ends) for split, ids, ends in encoded]


def _write_splits(
    folder: Path, pieces: Iterator[Piece], tokenizer: Tokenizer, val_fraction: float, shard_tokens: int, workers: int, limit: int | None
) -> tuple[dict[str, SplitInfo], list[str]]:  # fmt: skip
    writers = {split: _SplitWriter(folder, split, tokenizer, shard_tokens) for split in SPLITS}
    # Threads, not processes: tiktoken works outside Python's lock, so they use all cores, start at once and share the tokenizer.
    pool = ThreadPoolExecutor(workers, thread_name_prefix="prepare")
    waiting: deque[Future[list[tuple[str, np.ndarray, bool]]]] = deque()
    tokens, enough = 0, False

    def write_next() -> None:
        nonlocal tokens, enough
        encoded = waiting.popleft().result()
        for count, (_, ids, ends) in enumerate(encoded, 1):
            tokens += len(ids)
            if limit is not None and tokens >= limit and ends:
                encoded, enough = encoded[:count], True
                waiting.clear()
                break
        for split, writer in writers.items():
            if mine := [(ids, ends) for name, ids, ends in encoded if name == split]:
                writer.append(np.concatenate([ids for ids, _ in mine]), sum(ends for _, ends in mine))

    try:
        for chunk in _chunks(pieces):
            waiting.append(pool.submit(_encode, tokenizer, chunk))
            if len(waiting) > 2 * workers or waiting[0].done():
                write_next()
            if enough:
                break
        while waiting:
            write_next()
        splits = {split: writer.close() for split, writer in writers.items()}
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for writer in writers.values():
            writer.abandon()
    if val_fraction and not (splits["train"].tokens and splits["val"].tokens):
        splits = _cut_validation_off(folder, splits, tokenizer, val_fraction, shard_tokens)
        return splits, [f"too few documents to split: the last {splits['val'].tokens:,} tokens are the validation split"]
    return splits, []


@dataclass
class _SplitWriter:
    """Writes one split as shards of `shard_tokens` tokens each."""

    folder: Path
    split: str
    tokenizer: Tokenizer
    shard_tokens: int
    documents: int = 0
    size: int = 0
    shards: list[ShardInfo] = field(default_factory=list)
    _current: ShardWriter | None = None

    def __post_init__(self) -> None:
        self._fingerprint, self._bytes_of = self.tokenizer.fingerprint, self.tokenizer.token_bytes()

    def append(self, ids: np.ndarray, documents: int) -> None:
        if not self.shards and self._current is None:
            ids = np.concatenate([np.array([self.tokenizer.eot], token_dtype(self.tokenizer.n_vocab)), ids])
        self.documents += documents
        self.size += int(self._bytes_of.take(ids, mode="clip").sum(dtype=np.int64))  # an id outside the vocabulary is the shard's to refuse
        while ids.size:
            if self._current is None:
                path = self.folder / f"{self.split}_{len(self.shards):06d}.bin"
                self._current = ShardWriter(path, vocab_size=self.tokenizer.n_vocab, fingerprint=self._fingerprint)
            room = self.shard_tokens - self._current.tokens
            self._current.append(ids[:room])
            ids = ids[room:]
            if self._current.tokens == self.shard_tokens:
                self._close_shard()

    def close(self) -> SplitInfo:
        self._close_shard()
        return SplitInfo(sum(shard.tokens for shard in self.shards), self.documents, self.size, tuple(self.shards))

    def abandon(self) -> None:
        if self._current is not None:
            self._current.__exit__(None, None, None)

    def _close_shard(self) -> None:
        if self._current is not None:
            self.shards.append(self._current.close())
            self._current = None


def _cut_validation_off(
    folder: Path, splits: dict[str, SplitInfo], tokenizer: Tokenizer, fraction: float, shard_tokens: int
) -> dict[str, SplitInfo]:  # fmt: skip
    """Make the last `fraction` of the tokens of the one split that has any the validation split; the rest is the training split."""
    whole = next(info for info in splits.values() if info.tokens)
    shards = []
    for number, shard in enumerate(whole.shards):  # all under training's names first: the hash may have put the only document into validation
        name = f"train_{number:06d}.bin"
        (folder / shard.name).replace(folder / name)
        shards.append(ShardInfo(name, shard.tokens, shard.crc32))
    keep = whole.tokens - min(max(1, round(whole.tokens * fraction)), whole.tokens - 1)
    writer, kept, start, last = _SplitWriter(folder, "val", tokenizer, shard_tokens), [], 0, tokenizer.eot
    for shard in shards:
        path, here = folder / shard.name, max(0, keep - start)
        start += shard.tokens
        if here >= shard.tokens:
            kept.append(shard)
            last = int(open_shard(path)[-1])
            continue
        tokens = np.array(open_shard(path))
        writer.append(tokens[here:], int((tokens[here:] == tokenizer.eot).sum()))
        path.unlink()
        if here:
            kept.append(write_shard(path, tokens[:here], vocab_size=tokenizer.n_vocab, fingerprint=tokenizer.fingerprint))
            last = int(tokens[here - 1])
    val = writer.close()
    documents = whole.documents - val.documents + (last != tokenizer.eot)  # a document cut in two counts on both sides
    return {"train": SplitInfo(keep, documents, whole.bytes - val.bytes, tuple(kept)), "val": val}


@contextmanager
def _folder_made_whole(out: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `out` when the block ends well and is removed when it does not."""
    stays = out.exists()  # an empty folder, maybe a link or a mounted disk: it is filled, for it cannot always be replaced
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out if stays else out.parent))
    try:
        yield folder
        if stays:
            for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):  # last what makes the folder count as prepared
                path.replace(out / path.name)
            folder.rmdir()
        else:
            folder.chmod(0o777 & ~_umask())  # mkdtemp's folders are the owner's alone
            os.rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Reporter:
    """Says how far the work is: a bar on a terminal, else a line at each tenth of a long one; both on standard error."""

    def __init__(self, say: Callable[[str], None], advance: Callable[[int], None]) -> None:
        self.say, self.advance = say, advance


@contextmanager
def _reporter(progress: bool | None, total: int) -> Iterator[_Reporter]:
    if progress is False:
        yield _Reporter(lambda text: None, lambda count: None)
    elif progress is None and not sys.stderr.isatty():
        yield _plain_reporter(total)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        console = Console(stderr=True, highlight=False, markup=False)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("reading", total=total or None)
            yield _Reporter(lambda text: console.print(text, soft_wrap=True), lambda count: bar.advance(task, count))


def _plain_reporter(total: int) -> _Reporter:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if total > 50_000_000 and 10 * before // total < 10 * done // total < 10:
            say(f"{100 * done // total} % of {total / 1e6:,.0f} MB read")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return _Reporter(say, advance)
