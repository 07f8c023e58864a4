"""`gpt2jax.load`: which reader a path gets, the tokenizer that comes with it, and the hub without a network."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.folders import GOLDEN, Weights, config_of, variant, weights_of, write_folder

from gpt2jax.errors import InputError
from gpt2jax.loading import convert_folder, load
from gpt2jax.model.parameters import named_parameters
from gpt2jax.tokenizer import load_tokenizer


def refusal(path: Any, **options: Any) -> str:
    """The message of the InputError that `load` gives; it must be one line."""
    with pytest.raises(InputError) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture()
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub that records what it is asked and answers with `hub.answer`: a folder, or an error to raise."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    hub = types.SimpleNamespace(asked=[], options={}, answer=ConnectionError("no network in this test"))

    def snapshot_download(hub_id: str, **options: Any) -> str:
        hub.asked.append(hub_id)
        hub.options = options
        if isinstance(hub.answer, Exception):
            raise hub.answer
        return str(hub.answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return hub


@pytest.mark.parametrize("kind", [str, Path])
def test_a_hugging_face_folder(kind: Any) -> None:
    model, tokenizer = load(kind(GOLDEN / "inner"))
    assert tokenizer is None, "61 ids are not GPT-2's"
    with np.load(GOLDEN / "inner.npz") as answers:
        np.testing.assert_allclose(model(jnp.asarray(answers["tokens_BT"])), answers["logits_BTV"], rtol=0, atol=1e-5)


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant(tmp_path / "models" / "small", "inner")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert load("~/models/small")[0].config.vocab_size == 61


def test_compute_dtype_changes_matmuls_and_nothing_else() -> None:
    (plain, _), (half, _) = load(GOLDEN / "gpt2"), load(GOLDEN / "gpt2", compute_dtype="bfloat16")
    assert (plain.config.compute_dtype, half.config.compute_dtype) == ("float32", "bfloat16")
    for name, leaf in named_parameters(plain).items():
        np.testing.assert_array_equal(named_parameters(half)[name], leaf, strict=True)
    tokens = jnp.arange(7)[None]
    dtype = lambda model: jax.eval_shape(lambda m: m.hidden(tokens), model).dtype  # noqa: E731
    assert dtype(half) == jnp.bfloat16 and dtype(plain) == jnp.float32
    assert 1e-4 < float(jnp.abs(half(tokens) - plain(tokens)).max()) < 0.1


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16", "int8"])
def test_weights_dtype_makes_the_weights_smaller_and_leaves_the_rest(weights_dtype: str) -> None:
    (plain, _), (small, _) = load(GOLDEN / "gpt2"), load(GOLDEN / "gpt2", weights_dtype=weights_dtype)
    assert small.config == plain.config
    size = lambda model: sum(leaf.nbytes for name, leaf in named_parameters(model).items() if name.startswith("blocks.mlp.up.w"))  # noqa: E731
    assert size(plain) == {"float32": 1, "bfloat16": 2, "int8": 4}[weights_dtype] * size(small)
    error = float(jnp.abs(small(jnp.arange(7)[None]) - plain(jnp.arange(7)[None])).max())
    assert error == 0 if weights_dtype == "float32" else 1e-6 < error < 0.1


def test_an_unknown_weights_dtype_is_refused_before_the_path_is_looked_at() -> None:
    assert "weights_dtype='int4'" in refusal("/nowhere/at/all", weights_dtype="int4")


def test_an_unknown_compute_dtype_is_refused_before_the_path_is_looked_at() -> None:
    assert "compute_dtype='float16'" in refusal("/nowhere/at/all", compute_dtype="float16")


def resized(rows: int) -> Any:
    def change(weights: Weights) -> Weights:
        return weights | {"wte.weight": np.zeros((rows, weights["wte.weight"].shape[1]), np.float32)}

    return change


@pytest.mark.parametrize(("rows", "name"), [(50257, "gpt2"), (50300, "gpt2"), (50256, None)])
def test_without_tokenizer_files_gpt2s_is_used_if_the_vocabulary_holds_it(tmp_path: Path, rows: int, name: str | None) -> None:
    _, tokenizer = load(variant(tmp_path, "inner", resized(rows), vocab_size=rows))
    assert tokenizer is None if name is None else tokenizer.encode("Hello world") == [15496, 995]


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_the_folders_own_tokenizer_comes_first(tmp_path: Path, name: str) -> None:
    if name == "gpt2":
        load_tokenizer(name).save_hf(tmp_path)  # vocab.json and merges.txt
    else:
        load_tokenizer(name).save(tmp_path)
    _, for_few = load(variant(tmp_path, "inner"))
    _, for_many = load(variant(tmp_path, "inner", resized(50257), vocab_size=50257))
    for tokenizer in (for_few, for_many):
        assert tokenizer is not None and tokenizer.encode("Hello") == ([15496] if name == "gpt2" else [72, 101, 108, 108, 111])


def test_half_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (variant(tmp_path, "inner") / "vocab.json").write_text('{"a": 0}')
    assert str(tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize("path", ["./gpt2", "../gpt2", "/gpt2", "~/gpt2", "a/b/c", "", ".", "gpt2/", "runs\\quickstart", "C:\\gpt2", "-gpt2", "open ai/gpt2"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(hub: Any, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(path)
    assert hub.asked == []
    assert "holds no model" in message if path in ("", ".") else f"there is no {path};" in message


def test_a_misspelt_name_in_a_folder_that_exists_is_no_hub_id(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "there is no runs/quikstart" in refusal("runs/quikstart") and hub.asked == []


@pytest.mark.parametrize("hub_id", ["gpt2", "openai-community/gpt2", "some_one/gpt2-v1.1"])
def test_a_hub_id_is_fetched(hub: Any, hub_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hub.answer = GOLDEN / "inner"
    assert load(hub_id)[0].config.vocab_size == 61
    assert hub.asked == [hub_id]
    assert {pattern.rsplit(".")[-1] for pattern in hub.options["allow_patterns"]} == {"json", "txt", "safetensors"}


def test_a_folder_comes_before_the_hub(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(variant(tmp_path / "gpt2", "inner").parent)
    assert load("gpt2")[0].config.vocab_size == 61 and hub.asked == []


def test_the_hub_offline_says_what_to_do(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hub.answer = ConnectionError("Name or service\nnot known")
    message = refusal("gpt2")
    assert "ConnectionError: Name or service not known" in message and "go online, or give the folder" in message


def test_the_real_client_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert "go online, or give the folder" in refusal("gpt2")


def test_an_unknown_hub_id_is_named(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    errors = pytest.importorskip("huggingface_hub.errors")
    hub.answer = errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)
    assert "the hub has no such model" in refusal("nobody/nothing")


def test_without_the_hub_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "gpt2jax[hub]" in refusal("gpt2")


def test_an_empty_folder_a_file_and_a_config_alone(tmp_path: Path) -> None:
    assert "holds no model" in refusal(tmp_path)
    folder = write_folder(tmp_path / "model", weights_of("inner"), config_of("inner"))
    assert "is a file" in refusal(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refusal(folder)
    variant(folder, "inner")
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_convert_writes_a_folder_that_loads_equal(tmp_path: Path) -> None:
    load_tokenizer("bytes").save(tmp_path / "source")
    convert_folder(variant(tmp_path / "source", "inner"), tmp_path / "out")
    (before, _), (after, tokenizer) = load(tmp_path / "source"), load(tmp_path / "out")
    assert after.config == before.config and tokenizer is not None and tokenizer.encode("a") == [97]
    for name, leaf in named_parameters(before).items():
        np.testing.assert_array_equal(named_parameters(after)[name], leaf, strict=True)
    assert load(tmp_path / "out", compute_dtype="bfloat16")[0].config.compute_dtype == "bfloat16"


def test_convert_without_tokenizer_keeps_the_model(tmp_path: Path) -> None:
    convert_folder(GOLDEN / "inner", tmp_path / "out")
    model, tokenizer = load(tmp_path / "out")
    assert tokenizer is None and model.config == load(GOLDEN / "inner")[0].config


def test_convert_leaves_a_used_folder_as_it_was_and_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(InputError, match="already in use"):
        convert_folder("/no/such/source", tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("note.txt", "mine")]
