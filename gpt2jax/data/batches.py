"""Batches from token arrays: `batch(step)` is a pure function of (seed, step, process), so resuming, replaying and changing the number of processes need
no state.

B sequences of a global batch, P processes, T tokens a sequence.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from gpt2jax.data.mixture import place, shares
from gpt2jax.data.shards import open_shard, read_manifest
from gpt2jax.errors import InputError

#: The label of a position without a next token: the loss leaves it out.
IGNORED = -1
_ROUNDS = 8


def permute(index: np.ndarray, n: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Places of `index` (whole numbers in [0, n)) under a permutation of [0, n) drawn by (seed, epoch): int64, same shape, no memory of size n.

    A Feistel network (Luby and Rackoff, 1988) over the next power of two, whose two halves change in turn, with cycle walking (Black and Rogaway, 2002)
    back into [0, n). Only integer operations, so it never changes with the version of NumPy.
    """
    bits = max(2, (n - 1).bit_length())
    low = bits // 2
    place = np.array(index, np.uint64)
    outside = np.ones(place.shape, bool)
    while outside.any():
        walked = place[outside]
        upper, lower = walked >> np.uint64(low), walked & np.uint64((1 << low) - 1)
        for turn, key in enumerate(_keys(seed, epoch)):
            if turn % 2:
                lower = lower ^ (_mix(upper, key) >> np.uint64(64 - low))
            else:
                upper = upper ^ (_mix(lower, key) >> np.uint64(64 - (bits - low)))
        place[outside] = (upper << np.uint64(low)) | lower
        outside[outside] = place[outside] >= n
    return place.astype(np.int64)


@dataclass(frozen=True)
class TokenSource:
    """One split of one source: arrays [n] of token ids below `vocab_size`, one behind the other; `fingerprint` names them."""

    shards: Sequence[np.ndarray]
    vocab_size: int
    fingerprint: str


class TokenData:
    """One split of one source or of several mixed, cut into windows of T + 1 tokens at stride T: the last token of a window is the first of the next.

    Made by `open_data` and `open_splits`. Row number n of a run (step * B + row) belongs to the source that `mixture.place` says, in shares by `weights`,
    and each source is read in an order of its own. `windows` is the number of sequences and `tokens` that of tokens of all sources, `vocab_size` that of
    the tokenizer, and `fingerprint` names the data: a resumed run that finds another one is reading other tokens.
    """

    def __init__(
        self, sources: Sequence[TokenSource], weights: Sequence[float] = (1.0,), *,
        sequence_length: int, batch_size: int, seed: int, process_index: int = 0, process_count: int = 1,
    ) -> None:  # fmt: skip
        if sequence_length < 1 or batch_size < 1:
            raise InputError(f"sequence length and batch size must be 1 or more, not {sequence_length} and {batch_size}")
        if not 0 <= process_index < process_count:
            raise InputError(f"process {process_index} is not one of {process_count} processes")
        if batch_size % process_count:
            raise InputError(f"batch size {batch_size} cannot be shared evenly by {process_count} processes; make it a multiple of {process_count}")
        self._shares = shares(weights)
        self.sequence_length, self.batch_size, self.vocab_size = sequence_length, batch_size, sources[0].vocab_size
        self._rows = batch_size // process_count
        self._first_row = process_index * self._rows
        # an order of its own for each: sources of one length would otherwise be walked through side by side
        self._sources = [_Windows(source.shards, sequence_length, seed + (number << 64)) for number, source in enumerate(sources)]
        self.tokens = sum(source.tokens for source in self._sources)
        self.windows = sum(source.windows for source in self._sources)
        prints = [source.fingerprint for source in sources]
        self.fingerprint = prints[0] if len(prints) == 1 else hashlib.sha256(json.dumps([self._shares, prints]).encode()).hexdigest()

    def batch(self, step: int, rows: slice | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), each int32 [B/P, T]: this process's rows of the global batch of `step` (0, 1, ...), or the `rows` of it that are asked for.

        A source's sequences come in an order drawn by (seed, epoch) without repeats within an epoch; a batch may begin in one epoch and end in the next.
        """
        for source in self._sources:
            if not source.windows:
                needed = f"one sequence of {self.sequence_length} needs {self.sequence_length + 1}"
                raise InputError(f"the split holds {source.tokens} tokens; {needed}")
        if step < 0:
            raise InputError(f"step {step} is below 0")
        first, stop, _ = (rows or slice(self._first_row, self._first_row + self._rows)).indices(self.batch_size)
        places = [place(step * self.batch_size + row, self._shares) for row in range(first, stop)]
        tokens = self._read(places, len(places), _Windows.shuffled)
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()

    def eval_batches(self, sequences: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The first windows of each source in order, `sequences` in all in shares by weight, as batches like `batch`'s: the same at any seed and step.

        A source that has run out is left out. What a batch lacks is targets of -1: rows past the last sequence, and the end of a split whose last window
        is shorter than T. Each process gets the same number of batches.
        """
        dealt = self._eval_places(sequences)
        while places := list(itertools.islice(dealt, self.batch_size)):
            tokens = self._read(places[self._first_row : self._first_row + self._rows], self._rows, _Windows.in_order)
            yield np.maximum(tokens[:, :-1], 0), tokens[:, 1:].copy()

    def _eval_places(self, sequences: int) -> Iterator[tuple[int, int]]:
        counts = [-(-(source.tokens - 1) // self.sequence_length) for source in self._sources]
        left = sum(counts)
        for number in range(sequences):
            source, window = place(number, self._shares)
            if window < counts[source]:
                yield source, window
                left -= 1
            if not left:
                return

    def _read(self, places: list[tuple[int, int]], rows: int, read: Callable[[_Windows, np.ndarray], np.ndarray]) -> np.ndarray:
        """int32 [rows, T + 1]; rows without a place, and positions past the end of a split, are IGNORED."""
        tokens = np.full((rows, self.sequence_length + 1), IGNORED, np.int32)
        for number, source in enumerate(self._sources):
            here = [row for row, (of, _) in enumerate(places) if of == number]
            tokens[here] = read(source, np.array([places[row][1] for row in here], np.int64))
        return tokens


class _Windows:
    """The windows of one source."""

    def __init__(self, shards: Sequence[np.ndarray], sequence_length: int, seed: int) -> None:
        self._shards, self._sequence_length, self._seed = shards, sequence_length, seed
        self._ends = np.cumsum([len(shard) for shard in shards])
        self.tokens = int(self._ends[-1]) if shards else 0
        self.windows = max(0, (self.tokens - 1) // sequence_length)

    def shuffled(self, numbers: np.ndarray) -> np.ndarray:
        """int32 [n, T + 1]: the sequences that come as `numbers` (0, 1, ...) in training."""
        epochs, places = numbers // self.windows, numbers % self.windows
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permute(places[here], self.windows, self._seed, int(epoch))
        return self.in_order(windows)

    def in_order(self, windows: np.ndarray) -> np.ndarray:
        """int32 [n, T + 1]; positions past the end of the split are IGNORED."""
        T = self._sequence_length
        rows = np.full((len(windows), T + 1), IGNORED, np.int32)
        first = np.searchsorted(self._ends, windows * T, side="right")
        for row, (start, shard) in enumerate(zip((windows * T).tolist(), first.tolist(), strict=True)):
            filled = 0
            while filled <= T and shard < len(self._shards):
                tokens = self._shards[shard]
                begin = start + filled - (int(self._ends[shard]) - len(tokens))
                part = tokens[begin : begin + T + 1 - filled]
                rows[row, filled : filled + len(part)] = part
                filled, shard = filled + len(part), shard + 1
        return rows


def open_data(
    folder: str | Path,
    *,
    split: str,
    sequence_length: int,
    batch_size: int,
    seed: int,
    verify: bool = True,
    process_index: int = 0,
    process_count: int = 1,
) -> TokenData:
    """Open the split ('train' or 'val') of a folder made by `gpt2jax prepare`. `batch_size` is the global B; process p of P reads rows [p B/P, (p+1) B/P).

    Raises InputError for a foreign, cut, stale or (with `verify`) damaged shard by name, for a split too short for one sequence of `sequence_length`
    tokens (for 'val', which is read with padding: one without a token to predict), and for a B that P does not divide.
    """
    source = prepared_tokens(Path(folder), split, verify=verify)
    check_length(source, str(folder), split, sequence_length)
    return TokenData([source], sequence_length=sequence_length, batch_size=batch_size, seed=seed, process_index=process_index, process_count=process_count)


def prepared_tokens(folder: Path, split: str, *, verify: bool) -> TokenSource:
    """The shards of one split of a prepared folder."""
    manifest = read_manifest(folder)
    if split not in manifest.splits:
        raise InputError(f"{folder} has no split {split!r}; it has {', '.join(manifest.splits)}")
    shards = [open_shard(folder / shard.name, manifest=manifest, info=shard, verify=verify) for shard in manifest.splits[split].shards]
    return TokenSource(shards, manifest.vocab_size, manifest.fingerprint)


def check_length(source: TokenSource, name: str, split: str, sequence_length: int) -> None:
    """InputError if `name`'s split is too short to be read."""
    tokens, needed = sum(map(len, source.shards)), 2 if split == "val" else sequence_length + 1
    if tokens < needed:
        out = "prepare it with a larger val_fraction" if split == "val" else f"take more text, or sequences of at most {max(tokens - 1, 1)}"
        raise InputError(f"{name}: split {split} holds {tokens} tokens, and sequences of {sequence_length} need {needed}; {out}")


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    digests = (hashlib.blake2b(f"gpt2jax order {seed} {epoch} {turn}".encode(), digest_size=8).digest() for turn in range(_ROUNDS))
    return tuple(np.uint64(int.from_bytes(digest, "little")) for digest in digests)


def _mix(half: np.ndarray, key: np.uint64) -> np.ndarray:
    """64 well-mixed bits of each number (the finaliser of SplitMix64; Steele, Lea and Flood, 2014). uint64 arrays wrap around, as it needs."""
    x = half ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
