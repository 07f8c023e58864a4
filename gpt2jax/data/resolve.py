"""From `data.source` of a configuration to batches: through a prepared folder, which may be made once and kept in the cache, or token files as they are."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gpt2jax.data.batches import TokenData, TokenSource, check_length, prepared_tokens
from gpt2jax.data.foreign import find_token_files, foreign_tokens
from gpt2jax.data.prepare import prepare
from gpt2jax.data.shards import MANIFEST, VERSION, read_manifest
from gpt2jax.data.sources import STDIN, STDLIB, find_sources
from gpt2jax.data.tables import HF
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import Tokenizer


def default_cache_dir() -> Path:
    """$GPT2JAX_CACHE, else $XDG_CACHE_HOME/gpt2jax, else ~/.cache/gpt2jax."""
    if own := os.environ.get("GPT2JAX_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "gpt2jax"


def open_splits(
    source: str | Mapping[str, float], tokenizer: Tokenizer, *, sequence_length: int, batch_size: int, seed: int, verify: bool = True,
    val_fraction: float = 0.02, split_seed: int = 0, cache_dir: Path | None = None,
) -> dict[str, TokenData]:  # fmt: skip
    """The splits 'train' and 'val' of a source, or of several mixed in proportion to their weights. A source is what `resolve_source` takes, or token files
    as in `gpt2jax.data.foreign`.

    Raises InputError for what cannot be read, for ids of another tokenizer than `tokenizer`, and for a split too short for one sequence.
    """
    weights = {source: 1.0} if isinstance(source, str) else source
    opened = [_open(name, tokenizer, verify, val_fraction, split_seed, cache_dir) for name in weights]
    for name, splits in zip(weights, opened, strict=True):
        for split, tokens in splits.items():
            check_length(tokens, name, split, sequence_length)
    settings = {"sequence_length": sequence_length, "batch_size": batch_size, "seed": seed}
    return {split: TokenData([splits[split] for splits in opened], list(weights.values()), **settings) for split in ("train", "val")}


def resolve_source(
    source: str, tokenizer: Tokenizer, *, val_fraction: float = 0.02, seed: int = 0, cache_dir: Path | None = None, progress: bool | None = None
) -> Path:
    """The prepared folder of `source`.

    A folder with a manifest is returned as it is; its tokenizer must be `tokenizer`. python-stdlib, and text files, folders and globs, are prepared into
    `cache_dir` (None: `default_cache_dir()`) under a name that changes with the files (path, size, time), the tokenizer, `val_fraction` and `seed`, and
    found there the next time. Two processes may do so at once: each writes a folder of its own, and the first one's is kept.
    """
    folder = Path(source)
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        if manifest.tokenizer_fingerprint != tokenizer.fingerprint:
            raise InputError(
                f"{folder} was prepared with the tokenizer {_called(manifest.tokenizer_name, manifest.tokenizer_fingerprint)}, but the run asks for "
                f"{_called(tokenizer.name, tokenizer.fingerprint)}; set data.tokenizer to the first, or prepare the text again"
            )
        return folder
    if source.startswith(HF):
        raise InputError(f"data.source cannot be a data set, which is fetched once; run `gpt2jax prepare {source} --out DIR` first, and name DIR")
    if source == STDIN:
        raise InputError("data.source cannot be standard input, which can be read only once; run `gpt2jax prepare - --out DIR` first")
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(source).name).strip("-")[:40] or "text"
    target = cache / f"{label}-{_key(source, tokenizer, val_fraction, seed)}"
    if (target / MANIFEST).is_file():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".prepare-", dir=cache))
    except OSError as error:
        raise InputError(f"cache folder {cache} cannot be written: {error.strerror}; set GPT2JAX_CACHE to one that can") from None
    try:
        prepare([source], scratch / label, tokenizer=tokenizer, val_fraction=val_fraction, seed=seed, progress=progress)
        try:
            os.rename(scratch / label, target)
        except OSError:
            if not (target / MANIFEST).is_file():  # else another process was first, with the same tokens
                raise InputError(f"{target} is in the way and is no prepared folder; remove it") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _open(source: str, tokenizer: Tokenizer, verify: bool, val_fraction: float, seed: int, cache_dir: Path | None) -> dict[str, TokenSource]:
    try:
        files = None if (Path(source) / MANIFEST).is_file() else find_token_files(source)
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error.strerror}; name another data.source, or change its permissions") from None
    if files is not None:
        return foreign_tokens(files, tokenizer, verify=verify)
    folder = resolve_source(source, tokenizer, val_fraction=val_fraction, seed=seed, cache_dir=cache_dir)
    return {split: prepared_tokens(folder, split, verify=verify) for split in ("train", "val")}


def _key(source: str, tokenizer: Tokenizer, val_fraction: float, seed: int) -> str:
    files = []
    for file in find_sources([source])[0].files:
        assert file.path is not None
        state = file.path.stat()
        files.append((file.key if source == STDLIB else str(file.path.resolve()), state.st_size, state.st_mtime_ns))
    what = [VERSION, sorted(files), platform.python_version(), tokenizer.fingerprint, val_fraction, seed]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _called(name: str, fingerprint: str) -> str:
    return f"{name} ({fingerprint[:12]})"
