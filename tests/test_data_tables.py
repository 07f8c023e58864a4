"""gpt2jax.data.tables: parquet files and Hugging Face data sets become documents, streamed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpt2jax.data.prepare import prepare
from gpt2jax.data.shards import open_shard, read_manifest
from gpt2jax.data.sources import find_sources, read_documents
from gpt2jax.data.tables import hf_texts, parquet_texts
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import load_tokenizer

TEXTS = [f"document {i} " + "word " * (i % 30) for i in range(250)]


def documents(source: str, **settings: Any) -> list[str]:
    [found] = find_sources([source])
    pieces = [piece for file in found.files for piece in read_documents(file, separator=None, **{"text_key": "text", **settings})]
    assert all(ends for _, ends in pieces)
    return [text for text, _ in pieces]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Data sets in folders of this machine: the library's own reader, and no network."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_parquet(path: Path, columns: dict[str, Any], **settings: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path, **settings)
    return path


def test_rows_of_a_parquet_file_are_documents_in_order(tmp_path: Path) -> None:
    path, read = write_parquet(tmp_path / "a.parquet", {"id": list(range(250)), "text": TEXTS}, row_group_size=60), []
    assert list(parquet_texts(path, "text", read.append)) == TEXTS
    assert sum(read) == path.stat().st_size and len(read) == 5
    assert documents(str(path)) == TEXTS


def test_kinds_of_text_columns_and_absent_values(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        path = write_parquet(tmp_path / "a.parquet", {"body": pyarrow.array(["é 🤗", None, "b"], kind)})
        assert documents(str(path), text_key="body") == ["é 🤗", "", "b"]


def test_parquet_files_of_a_folder_are_read_with_its_text(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "b.parquet", {"text": ["second", "third"]})
    (tmp_path / "in" / "a.txt").write_text("first")
    assert documents(str(tmp_path / "in")) == documents(str(tmp_path / "in" / "*")) == ["first", "second", "third"]


def test_parquet_is_prepared(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": TEXTS})
    tokenizer = load_tokenizer("bytes")
    manifest = prepare([str(path)], tmp_path / "out", tokenizer=tokenizer, val_fraction=0.0, progress=False)
    ids = [int(token) for shard in read_manifest(tmp_path / "out").splits["train"].shards for token in open_shard(tmp_path / "out" / shard.name)]
    assert ids == [256, *(token for text in TEXTS for token in [*text.encode(), 256])] and manifest.splits["train"].documents == 250


def test_what_is_no_table_of_texts_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"id": [1, 2], "body": ["a", "b"]})
    for key, said in [("text", "a.parquet: no column 'text'; its columns are id, body"), ("id", "a.parquet: column 'id' holds int64, not text")]:
        with pytest.raises(InputError, match=said):
            documents(str(path), text_key=key)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="a.parquet: no .parquet file that can be read"):
        documents(str(path), text_key="body")


def test_a_data_set_is_streamed(offline: None, tmp_path: Path) -> None:
    write_parquet(tmp_path / "set" / "train-00000.parquet", {"id": list(range(250)), "text": TEXTS})
    write_parquet(tmp_path / "set" / "validation-00000.parquet", {"id": [1, 2], "text": ["x", None]})
    assert documents(f"hf:{tmp_path}/set") == documents(f"hf:{tmp_path}/set::train") == TEXTS
    assert documents(f"hf:{tmp_path}/set::validation") == ["x", ""]
    manifest = prepare([f"hf:{tmp_path}/set"], tmp_path / "out", tokenizer=load_tokenizer("bytes"), limit_documents=200, progress=False)
    assert sum(info.documents for info in manifest.splits.values()) == 200
    assert manifest.sources == (f"hf:{tmp_path}/set",)


def test_a_configuration_of_a_data_set_is_chosen(offline: None, tmp_path: Path) -> None:
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text("".join(json.dumps({"text": f"{name} {i}", "n": i}) + "\n" for i in range(3)))
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("small", "large"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert documents(f"hf:{tmp_path}:large") == ["large 0", "large 1", "large 2"]
    for name, said in [("", "small"), (":medium", "medium"), (":small:nosplit", "nosplit")]:
        with pytest.raises(InputError, match=f"hf:{tmp_path}{name}: the data set cannot be read: ValueError: .*{said}"):
            documents(f"hf:{tmp_path}{name}")
    for key, said in [("body", "row 0 has no text under 'body'; its keys are text, n"), ("n", "row 0 has no text under 'n'")]:
        with pytest.raises(InputError, match=said):
            documents(f"hf:{tmp_path}:small", text_key=key)


def test_a_name_of_another_form_is_refused() -> None:
    for name in ("hf:", "hf::config", "hf:a:b:c:d"):
        with pytest.raises(InputError, match="hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"):
            documents(name)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=r"hf:a/b: .*datasets package: pip install 'gpt2jax\[hf\]'"):
        next(hf_texts("hf:a/b", "text"))
    with pytest.raises(InputError, match=r"a.parquet: .*pyarrow package: pip install 'gpt2jax\[hf\]'"):
        next(parquet_texts(tmp_path / "a.parquet", "text", lambda count: None))
