"""Texts out of tables: parquet files, and Hugging Face datasets, which are streamed. Both need packages that the extra `hf` brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from gpt2jax.errors import InputError

HF = "hf:"
PARQUET = ".parquet"
_ROWS = 1024


def parquet_texts(path: Path, text_key: str, on_bytes: Callable[[int], None]) -> Iterator[str]:
    """The column `text_key`, row by row; an absent value is an empty text. Raises InputError, naming the file, for what has no such column of texts."""
    try:
        from pyarrow import ArrowException, parquet, types
    except ImportError:
        raise InputError(f"{path}: reading {PARQUET} needs the pyarrow package: pip install 'gpt2jax[hf]'") from None
    try:
        with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:  # pages, not whole row groups, in memory
            names, size = file.schema_arrow.names, path.stat().st_size
            if text_key not in names:
                raise InputError(f"{path}: no column {text_key!r}; its columns are {', '.join(names[:8])}; name the text's with --text-key")
            kind = file.schema_arrow.field(text_key).type
            if not any(is_text(kind) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
                raise InputError(f"{path}: column {text_key!r} holds {kind}, not text; name the text's column with --text-key")
            for group in range(groups := file.num_row_groups):
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[text_key]):
                    yield from (text or "" for text in batch.column(0).to_pylist())
                on_bytes(size * (group + 1) // groups - size * group // groups)
    except (ArrowException, OSError) as error:
        raise InputError(f"{path}: no {PARQUET} file that can be read: {_line(error)}") from None


def hf_texts(name: str, text_key: str) -> Iterator[str]:
    """The texts of `hf:NAME`, `hf:NAME:CONFIG` or `hf:NAME:CONFIG:SPLIT` under `text_key`, streamed; NAME is a data set of the Hugging Face Hub or a folder,
    SPLIT is train by default. A text that is None is an empty one.

    Raises InputError, naming the data set, for one that cannot be found or read, and for rows without text.
    """
    where, config, split, *more = [*name.removeprefix(HF).split(":"), "", ""][: max(3, name.count(":"))]
    if more or not where:
        raise InputError(f"{name}: a data set is written hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    try:
        import datasets
    except ImportError:
        raise InputError(f"{name}: reading a Hugging Face data set needs the datasets package: pip install 'gpt2jax[hf]'") from None
    try:
        rows = datasets.load_dataset(where, config or None, split=split or "train", streaming=True)
        if text_key in (rows.column_names or []):
            rows = rows.select_columns([text_key])  # else pictures and sound beside the text would be decoded
        for number, row in enumerate(rows):
            if text_key not in row or not isinstance(row[text_key], str | None):
                keys = ", ".join(list(row)[:8])
                raise InputError(f"{name}: row {number} has no text under {text_key!r}; its keys are {keys}; name the text's with --text-key")
            yield row[text_key] or ""
    except InputError:
        raise
    except Exception as error:  # each of its readers and the network under them has errors of its own
        raise InputError(f"{name}: the data set cannot be read: {type(error).__name__}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
