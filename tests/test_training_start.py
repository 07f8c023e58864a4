"""What a killed start leaves behind can be gone on with, and checkpoints elsewhere are neither mixed up nor forgotten."""

from __future__ import annotations

import dataclasses
import os
import shutil
import types
from pathlib import Path
from typing import Any

import pytest

from gpt2jax.config import CheckpointConfig, Config, DataConfig, RunConfig, load_config
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import Tokenizer, load_tokenizer
from gpt2jax.training.folder import CONFIG, TOKENIZER
from gpt2jax.training.start import _check_data, _check_run_dir, _fit_tokenizer, _from_anywhere, lay_out

DATA: Any = types.SimpleNamespace(fingerprint="f", tokens=9)


def _config(run_dir: Path, resume: str = "auto", where: str | None = None) -> Config:
    return Config(run=RunConfig(dir=str(run_dir), resume=resume), checkpoint=CheckpointConfig(dir=where))  # type: ignore[arg-type]


@pytest.mark.parametrize("killed_at", range(4))
def test_wherever_laying_out_is_cut_off_the_next_start_completes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int) -> None:
    """Cut off before each of the renames; a kill leaves the draft as well."""
    run_dir, real, calls = tmp_path / "run", os.replace, []

    def cut(draft: Path, path: Path) -> None:
        calls.append(path)
        if len(calls) > killed_at:
            [left] = run_dir.glob(f".*.{os.getpid()}")
            (shutil.copytree if left.is_dir() else shutil.copy)(left, left.with_suffix(".1234567"))  # what stays, since the draft itself is removed
            raise KeyboardInterrupt
        real(draft, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", cut)
        with pytest.raises(KeyboardInterrupt):
            lay_out(run_dir, _config(run_dir), load_tokenizer("bytes"), DATA)
    assert [path.name for path in run_dir.glob(".*")], "a draft is left"
    _check_run_dir(run_dir, _config(run_dir))
    lay_out(run_dir, _config(run_dir), load_tokenizer("bytes"), DATA)
    assert sorted(path.name for path in run_dir.iterdir()) == sorted([CONFIG, TOKENIZER, "data.json"])
    assert load_tokenizer(str(run_dir / TOKENIZER)).n_vocab == 257 and load_config(run_dir / CONFIG) == _config(run_dir)


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_folders_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    """And not when the first checkpoint is due."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "closed").mkdir()
    lay_out(tmp_path / "run", _config(tmp_path / "run"), load_tokenizer("bytes"), DATA)
    (tmp_path / "run" / "checkpoints").write_text("mine")
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "closed" and real(path, mode))  # root may write anywhere
    for config, words in [
        (_config(tmp_path / "new", where=str(tmp_path / "file" / inside)), "checkpoint.dir .*file.* can't be used: .*file is no folder; choose another"),
        (_config(tmp_path / "new", where=str(tmp_path / "closed" / inside)), "checkpoint.dir .*closed.* can't be used: .*closed can't be written to"),
        (_config(tmp_path / "closed" / inside), "run.dir .*closed.* can't be used: .*closed can't be written to"),
        (_config(tmp_path / "file" / "deeper"), "run.dir .*deeper can't be used: .*file is no folder"),
        (_config(tmp_path / "run"), "checkpoint.dir .*run/checkpoints can't be used: .*checkpoints is no folder"),
    ]:
        with pytest.raises(InputError, match=words):
            _check_run_dir(Path(config.run.dir), config)


def test_checkpoints_elsewhere_belong_to_one_run_and_are_not_forgotten(tmp_path: Path) -> None:
    there, empty, run_dir = tmp_path / "there", tmp_path / "empty", tmp_path / "run"
    (there / "7").mkdir(parents=True)
    for resume in ("never", "auto"):
        with pytest.raises(InputError, match=r"checkpoint.dir=.*there holds checkpoints of another run \(steps \[7\]\); give a folder of its own"):
            _check_run_dir(run_dir, _config(run_dir, resume, str(there)))
    lay_out(run_dir, _config(run_dir, where=str(there)), load_tokenizer("bytes"), DATA)
    assert _check_run_dir(run_dir, _config(run_dir, where=str(there))) is not None
    with pytest.raises(InputError, match=r"the checkpoints of .*run are in .*there, and checkpoint.dir=.*empty has none; move them there first"):
        _check_run_dir(run_dir, _config(run_dir, where=str(empty)))
    there.rename(empty)
    assert _check_run_dir(run_dir, _config(run_dir, where=str(empty))) is not None


@pytest.mark.parametrize("text", ["", "[1]", '{"tokens": 3}', "null"])
def test_a_damaged_note_of_the_data_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"data.json is damaged: .*; remove it"):
        _check_data(path, DATA, resume=True)


def test_documents_are_kept_apart_by_an_end_of_text_alone() -> None:
    tokenizer = Tokenizer("hf", {bytes([byte]): byte for byte in range(256)}, {}, eot=None)
    apart = Config(data=DataConfig(separate_documents=True))
    with pytest.raises(InputError, match="data.separate_documents needs an end of text between documents, and data.tokenizer=gpt2 has none"):
        _fit_tokenizer(apart, tokenizer)
    assert _fit_tokenizer(Config(), tokenizer).model.eos_token_id is None
    assert _fit_tokenizer(apart, load_tokenizer("bytes")).separator == 256


def test_a_folder_of_checkpoints_means_the_same_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _from_anywhere(_config(tmp_path, where="a/b")).checkpoint.dir == str(tmp_path / "a" / "b")
    for where in ("s3://bucket/a", None):
        assert _from_anywhere(_config(tmp_path, where=where)) == dataclasses.replace(_config(tmp_path, where=where))
