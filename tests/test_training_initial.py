"""Runs that start from weights: what they take from there, what they refuse, and runs of adapters from start to sample."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from golden.folders import GOLDEN

from gpt2jax.config import Config, config_from_tree, load_config, to_yaml
from gpt2jax.errors import InputError
from gpt2jax.loading import convert_folder, load
from gpt2jax.model.parameters import named_parameters
from gpt2jax.tokenizer import load_tokenizer
from gpt2jax.training.checkpoint import load_model
from gpt2jax.training.folder import BASE
from gpt2jax.training.initial import check_start
from gpt2jax.training.loop import train
from gpt2jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def source(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps whose model has dropout and grouped keys."""
    run_dir = tmp_path_factory.mktemp("source") / "run"
    options = ["--model.vocab_size=257", "--model.n_positions=24", "--model.n_layer=2", "--model.n_head=4", "--model.kv_heads=2", "--model.n_embd=16"]
    options += ["--model.resid_pdrop=0.1", "--train.steps=2", "--eval.every=0", f"--run.dir={run_dir}"]
    assert train(load_config(None, [*_data(prepared), *options])) == 0
    return run_dir


def _data(prepared: Path) -> list[str]:
    sizes = ["--train.batch_size=4", "--train.log_every=1", "--optimizer.warmup_steps=1", "--eval.sequences=5", "--run.sample_prompt=none"]
    return [f"--data.source={prepared}", "--data.tokenizer=bytes", *sizes]


def _options(prepared: Path, source: Path | str, run_dir: Path) -> list[str]:
    """Without a model and without a tokenizer."""
    own = [option for option in _data(prepared) if "tokenizer" not in option]
    return [*own, f"--run.init_from={source}", f"--run.dir={run_dir}", "--train.steps=4", "--eval.every=2", "--checkpoint.every=2"]


def _run(options: list[str], *more: str) -> Config:
    config = load_config(None, [*options, *more])
    assert train(config) == 0
    return config


def _weights(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(leaf) for name, leaf in named_parameters(load(folder)[0]).items()}


def test_a_run_takes_model_tokenizer_and_weights_from_another(source: Path, prepared: Path, tmp_path: Path) -> None:
    options = _options(prepared, source, tmp_path / "run")
    config = _run(options, "--optimizer.learning_rate=1e-12", "--model.compute_dtype=float32", "--model.attn_pdrop=0.2")
    assert (config.model.n_embd, config.model.kv_heads, config.model.resid_pdrop, config.model.attn_pdrop) == (16, 2, 0.1, 0.2)
    assert config.data.tokenizer == str(source / "tokenizer")
    assert config_from_tree(yaml.safe_load(to_yaml(config))) == config
    assert not (tmp_path / "run" / BASE).exists()
    for name, leaf in _weights(source).items():
        np.testing.assert_allclose(_weights(tmp_path / "run")[name], leaf, rtol=0, atol=1e-9)


def test_one_that_goes_on_needs_the_source_no_more(source: Path, prepared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    options = _options(prepared, copy, tmp_path / "run")
    _run(options, "--train.steps=2", "--optimizer.decay_steps=4")
    shutil.rmtree(copy)
    _run(options, "--run.resume=auto", "--optimizer.decay_steps=4")
    _run(_options(prepared, source, tmp_path / "straight"), "--optimizer.decay_steps=4")
    a, b = (read_metrics(tmp_path / name / "metrics.jsonl")[-1] for name in ("run", "straight"))
    assert (a["step"], a["loss"], a["val_loss"]) == (4, b["loss"], b["val_loss"])
    with pytest.raises(InputError, match="run.init_from was .*copy', is None"):
        _run([option for option in options if "init_from" not in option], "--run.resume=auto")


def test_a_hugging_face_folder(prepared: Path, tmp_path: Path) -> None:
    """Its model fills the config; its ids, fewer than bytes, fit no tokenizer here."""
    tree = json.loads((GOLDEN / "gpt2" / "config.json").read_text())
    options = [*_options(prepared, GOLDEN / "gpt2", tmp_path / "run"), "--data.tokenizer=bytes"]
    config = load_config(None, options)
    assert (config.model.n_embd, config.model.vocab_size, config.model.attn_pdrop) == (tree["n_embd"], tree["vocab_size"], tree["attn_pdrop"])
    with pytest.raises(InputError, match="model.vocab_size=.* is smaller than the 257 ids"):
        train(config)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model.n_layer=3"], "model.n_layer is 3, but 2 in run.init_from=.*leave it out"),
        (["--model.position=rope", "--model.n_embd=32"], "model.position is 'rope', but 'learned'; model.n_embd is 32, but 16"),
        (["--data.tokenizer=gpt2"], "model.vocab_size=257 is smaller than the 50257 ids"),
        (["--run.init_from=/no/such"], "there is no /no/such"),
        (["--lora.rank=2", "--optimizer.name=muon"], "optimizer.name=muon"),
        (["--lora.rank=2", "--lora.targets=[querry]"], "querry; did you mean query"),
    ],
)
def test_what_contradicts_the_weights_is_named_before_anything_is_written(source: Path, prepared: Path, tmp_path: Path, more: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        train(load_config(None, [*_options(prepared, source, tmp_path / "run"), *more]))
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_of_the_same_size_is_named(source: Path, prepared: Path, tmp_path: Path) -> None:
    config = load_config(None, [*_options(prepared, source, tmp_path / "run"), "--data.tokenizer=bytes"])
    check_start(config, load_tokenizer("bytes"))
    with pytest.raises(InputError, match="data.tokenizer=bytes is not the one that run.init_from"):
        check_start(config, types.SimpleNamespace(fingerprint="0" * 64))  # type: ignore[arg-type]


def test_adapters_without_weights_are_refused(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lora.rank=2 adapts weights that are there"):
        train(load_config(None, [*_data(prepared), "--model.vocab_size=257", "--model.n_layer=1", "--lora.rank=2", f"--run.dir={tmp_path / 'run'}"]))


def test_a_run_of_adapters_from_start_to_sample(source: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints hold adapters only, going on equals going through, and what comes out is an ordinary model."""
    lora = ["--lora.rank=2", "--lora.alpha=4", "--optimizer.learning_rate=0.01", "--optimizer.decay_steps=4", "--optimizer.ema_decay=0.5"]
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    options = [*_options(prepared, copy, tmp_path / "run"), *lora]
    _run(options, "--train.steps=2")
    shutil.rmtree(copy)
    _run(options, "--run.resume=auto", "--run.sample_prompt=a", "--run.sample_tokens=3")
    assert "trains" in capsys.readouterr().out
    _run([*_options(prepared, source, tmp_path / "straight"), *lora])
    a, b = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "straight"))
    assert [line["loss"] for line in a] == [line["loss"] for line in b]
    assert a[-1]["val_loss"] == b[-1]["val_loss"]

    (model, _), (step2, _) = load_model(tmp_path / "run"), load_model(tmp_path / "run" / "checkpoints" / "2")
    base, final = _weights(source), {name: np.asarray(leaf) for name, leaf in named_parameters(model).items()}
    changed = {name for name in base if not np.array_equal(base[name], final[name])}
    assert changed == {f"blocks.{name}.w" for name in ("mixer.query", "mixer.key_value", "mixer.out", "mlp.up", "mlp.down")}
    assert not np.array_equal(named_parameters(step2)["blocks.mlp.up.w"], final["blocks.mlp.up.w"])
    size = lambda folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())  # noqa: E731
    import orbax.checkpoint as ocp

    saved = ocp.StandardCheckpointer().metadata((tmp_path / "run" / "checkpoints" / "4" / "parameters").absolute())
    names = set(getattr(saved, "item_metadata", saved).keys())
    assert names and all(name.endswith(("lora_a", "lora_b")) for name in names) and size(tmp_path / "run" / BASE) > 0

    convert_folder(tmp_path / "run", tmp_path / "converted")
    tokens = jnp.arange(9)[None]
    np.testing.assert_array_equal(load(tmp_path / "converted")[0](tokens), model(tokens))
    assert float(jnp.abs(load(tmp_path / "run", weights_dtype="int8")[0](tokens) - model(tokens)).max()) < 0.1


@pytest.mark.slow
def test_adapters_on_a_mesh_train_as_on_one_device(source: Path, prepared: Path, tmp_path: Path) -> None:
    lines = []
    for devices, mesh in ((1, []), (8, ["--mesh.fsdp=2", "--mesh.tensor=2"])):
        run_dir = tmp_path / str(devices)
        options = [*_options(prepared, source, run_dir), "--lora.rank=2", "--train.batch_size=8", "--train.accumulation=2", *mesh]
        command = [sys.executable, "train.py", os.devnull, *options, "--model.resid_pdrop=0"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)})
        assert result.returncode == 0, result.stderr
        lines.append([[line[key] for key in ("loss", "grad_norm")] for line in read_metrics(run_dir / "metrics.jsonl")])
    np.testing.assert_allclose(lines[0], lines[1], rtol=2e-5)
    for name, leaf in _weights(tmp_path / "1").items():
        np.testing.assert_allclose(_weights(tmp_path / "8")[name], leaf, rtol=0, atol=2e-5)
