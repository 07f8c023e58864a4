"""Batches from prepared shards: `batch(step)` is a pure function of (seed, step, process), so resuming, replaying and changing the number of
processes need no state.

B sequences of a global batch, P processes, T tokens a sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from gpt2jax.data.shards import Manifest, open_shard, read_manifest
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


class TokenData:
    """One split of a prepared folder, cut into windows of T + 1 tokens at stride T: the last token of a window is the first of the next.

    Made by `open_data`. `windows` is the number of sequences in an epoch, `tokens` the length of the split, `vocab_size` that of the tokenizer, and
    `fingerprint` names the data: a resumed run that finds another one is reading other tokens.
    """

    def __init__(
        self, manifest: Manifest, shards: list[np.ndarray], *, sequence_length: int, batch_size: int, seed: int, process_index: int = 0, process_count: int = 1
    ) -> None:
        if sequence_length < 1 or batch_size < 1:
            raise InputError(f"sequence length and batch size must be 1 or more, not {sequence_length} and {batch_size}")
        if not 0 <= process_index < process_count:
            raise InputError(f"process {process_index} is not one of {process_count} processes")
        if batch_size % process_count:
            raise InputError(f"batch size {batch_size} cannot be shared evenly by {process_count} processes; make it a multiple of {process_count}")
        self.sequence_length, self.batch_size, self.seed = sequence_length, batch_size, seed
        self.manifest, self.vocab_size, self.fingerprint = manifest, manifest.vocab_size, manifest.fingerprint
        self._rows = batch_size // process_count
        self._first_row = process_index * self._rows
        self._shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards])
        self.tokens = int(self._ends[-1]) if shards else 0
        self.windows = max(0, (self.tokens - 1) // sequence_length)

    def batch(self, step: int, rows: slice | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), each int32 [B/P, T]: this process's rows of the global batch of `step` (0, 1, ...), or the `rows` of it that are asked for.

        Sequences come in an order drawn by (seed, epoch) without repeats within an epoch; a batch may begin in one epoch and end in the next.
        """
        if not self.windows:
            raise InputError(f"the split holds {self.tokens} tokens; one sequence of {self.sequence_length} needs {self.sequence_length + 1}")
        if step < 0:
            raise InputError(f"step {step} is below 0")
        first, stop, _ = (rows or slice(self._first_row, self._first_row + self._rows)).indices(self.batch_size)
        number = step * self.batch_size + np.arange(first, stop, dtype=np.int64)
        epochs, places = number // self.windows, number % self.windows
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permute(places[here], self.windows, self.seed, int(epoch))
        tokens = self._read(windows)
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()

    def eval_batches(self, sequences: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The first `sequences` windows in order, as batches like `batch`'s: the same at any seed and step.

        What a batch lacks is targets of -1: rows past the last window, and the end of a split whose last window is shorter than T. Each process gets the
        same number of batches.
        """
        T = self.sequence_length
        count = min(sequences, -(-(self.tokens - 1) // T))
        for start in range(0, count, self.batch_size):
            windows = start + self._first_row + np.arange(self._rows, dtype=np.int64)
            tokens = self._read(windows)
            inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()  # of one row, both would be views of the same numbers
            targets[windows >= count] = IGNORED
            targets[windows[:, None] * T + np.arange(1, T + 1) >= self.tokens] = IGNORED
            yield inputs, targets

    def _read(self, windows: np.ndarray) -> np.ndarray:
        """int32 [len(windows), T + 1]; positions past the end of the split are 0."""
        T = self.sequence_length
        rows = np.zeros((len(windows), T + 1), np.int32)
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
    folder = Path(folder)
    manifest = read_manifest(folder)
    if split not in manifest.splits:
        raise InputError(f"{folder} has no split {split!r}; it has {', '.join(manifest.splits)}")
    info = manifest.splits[split]
    needed = 2 if split == "val" else sequence_length + 1
    if info.tokens < needed:
        out = "prepare it with a larger val_fraction" if split == "val" else f"take more text, or sequences of at most {max(info.tokens - 1, 1)}"
        raise InputError(f"{folder}: split {split} holds {info.tokens} tokens, and sequences of {sequence_length} need {needed}; {out}")
    shards = [open_shard(folder / shard.name, manifest=manifest, info=shard, verify=verify) for shard in info.shards]
    return TokenData(
        manifest, shards, sequence_length=sequence_length, batch_size=batch_size, seed=seed, process_index=process_index, process_count=process_count
    )


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
