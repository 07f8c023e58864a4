"""gpt2jax.data.resolve: prepared once, found again, never mixed up."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from gpt2jax.data import resolve as module
from gpt2jax.data.prepare import prepare
from gpt2jax.data.resolve import default_cache_dir, resolve_source
from gpt2jax.data.shards import read_manifest
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "my text.txt"
    path.write_text("some text to learn from\n" * 9)
    return path


@pytest.fixture
def prepared_times(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    times = []

    def counted(sources: list[str], *args: Any, **settings: Any) -> Any:
        times.append(sources[0])
        return prepare(sources, *args, **settings)

    monkeypatch.setattr(module, "prepare", counted)
    return times


def resolve(source: Path | str, cache: Path, **settings: Any) -> Path:
    return resolve_source(str(source), settings.pop("tokenizer", BYTES), cache_dir=cache, progress=False, **settings)


def test_text_is_prepared_once(text: Path, tmp_path: Path, prepared_times: list[str]) -> None:
    cache = tmp_path / "deep" / "cache"
    folder = resolve(text, cache)
    assert folder.parent == cache and folder.name.startswith("my-text-txt-")
    assert read_manifest(folder).splits["train"].tokens > 0
    assert resolve(text, cache) == folder and prepared_times == [str(text)]
    assert os.listdir(cache) == [folder.name]


def test_whatever_changes_the_tokens_makes_another_folder(text: Path, tmp_path: Path) -> None:
    folders = {resolve(text, tmp_path / "cache")}
    folders |= {resolve(text, tmp_path / "cache", seed=1), resolve(text, tmp_path / "cache", val_fraction=0.3)}
    folders |= {resolve(text, tmp_path / "cache", tokenizer=load_tokenizer("gpt2"))}
    os.utime(text, ns=(1, 1))
    folders |= {resolve(text, tmp_path / "cache")}
    text.write_text("longer text " * 99)
    os.utime(text, ns=(1, 1))
    folders |= {resolve(text, tmp_path / "cache")}
    assert len(folders) == 6


def test_a_prepared_folder_is_taken_as_it_is(text: Path, tmp_path: Path, prepared_times: list[str]) -> None:
    prepare([str(text)], tmp_path / "mine", tokenizer=BYTES, progress=False)
    assert resolve(tmp_path / "mine", tmp_path / "cache") == tmp_path / "mine"
    assert not (tmp_path / "cache").exists() and not prepared_times


def test_a_folder_of_another_tokenizer_is_refused_naming_both(text: Path, tmp_path: Path) -> None:
    prepare([str(text)], tmp_path / "mine", tokenizer=BYTES, progress=False)
    with pytest.raises(InputError, match="prepared with the tokenizer bytes .*asks for gpt2"):
        resolve(tmp_path / "mine", tmp_path / "cache", tokenizer=load_tokenizer("gpt2"))


def test_the_same_vocabulary_under_another_name_will_do(text: Path, tmp_path: Path) -> None:
    gpt2 = load_tokenizer("gpt2")
    gpt2.save_hf(tmp_path / "hf")
    prepare([str(text)], tmp_path / "mine", tokenizer=gpt2, progress=False)
    assert resolve(tmp_path / "mine", tmp_path / "cache", tokenizer=load_tokenizer(tmp_path / "hf")) == tmp_path / "mine"


def test_two_at_once_end_with_one_whole_folder(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)

    def together(*args: Any, **settings: Any) -> Any:
        manifest = prepare(*args, **settings)
        both.wait()  # each has its folder ready before either gives it its name
        return manifest

    monkeypatch.setattr(module, "prepare", together)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve(text, tmp_path / "cache"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert os.listdir(tmp_path / "cache") == [found[0].name]
    assert read_manifest(found[0]).splits["train"].tokens > 0


def test_a_failure_leaves_the_cache_empty(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match="bad.txt:1: not UTF-8"):
        resolve(tmp_path / "bad.txt", tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_refusals(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="standard input"):
        resolve("-", tmp_path / "cache")
    with pytest.raises(InputError, match="run `gpt2jax prepare hf:a/b --out DIR` first"):
        resolve("hf:a/b", tmp_path / "cache")
    with pytest.raises(InputError, match="python-stdlb: no such file"):
        resolve("python-stdlb", tmp_path / "cache")
    with pytest.raises(InputError, match="GPT2JAX_CACHE"):
        resolve(text, text / "cache")
    folder = resolve(text, tmp_path / "cache")
    (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match="in the way"):
        resolve(text, tmp_path / "cache")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT2JAX_CACHE", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/a/b")
    monkeypatch.delenv("GPT2JAX_CACHE")
    assert default_cache_dir() == Path("/x/gpt2jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "gpt2jax"


def test_a_source_that_the_system_refuses_is_named() -> None:
    with pytest.raises(InputError, match="^a{300}: cannot be read: File name too long; name another data.source"):
        module.open_splits("a" * 300, BYTES, sequence_length=8, batch_size=1, seed=0)
