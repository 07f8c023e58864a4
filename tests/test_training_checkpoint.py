"""Checkpoints: what is saved comes back bit for bit, by count and by best; folders are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import tiny

from gpt2jax.config import CheckpointConfig, ModelConfig, OptimizerConfig
from gpt2jax.decoding.weights import quantize
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import abstract_model, named_parameters
from gpt2jax.tokenizer import load_tokenizer
from gpt2jax.training.checkpoint import Checkpoints, load_model, save_model
from gpt2jax.training.folder import CONFIG as CONFIG_FILE
from gpt2jax.training.folder import is_checkpoint
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import TrainState, init_state, make_train_step

CONFIG = ModelConfig(vocab_size=257, n_positions=9, n_layer=2, n_head=2, n_embd=6, eos_token_id=256)
OPTIMIZER = make_optimizer(OptimizerConfig(), 9, abstract_model(CONFIG))


def _state(step: int = 0, scale: float = 1.0) -> TrainState:
    state = init_state(CONFIG, OPTIMIZER, 0)
    return TrainState(jnp.int32(step), jax.tree.map(lambda p: p * scale, state.parameters), state.optimizer)


def _assert_equal(a: TrainState, b: TrainState) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def _steps(run_dir: Path) -> list[int]:
    return sorted(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit())


def test_restore_gives_back_the_newest_state_bit_for_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=3))
    assert checkpoints.restore(_state()) is None
    checkpoints.save(_state(1, 0.5))
    checkpoints.save(_state(2, 0.1))
    checkpoints.close()
    restored = Checkpoints(tmp_path, CheckpointConfig()).restore(_state())
    assert restored is not None
    _assert_equal(restored, _state(2, 0.1))


def test_a_save_in_flight_is_not_disturbed_by_donated_steps(tmp_path: Path) -> None:
    """The step after an asynchronous save reuses the state's memory; what is saved must be what was there."""
    step = make_train_step(CONFIG, OPTIMIZER, make_schedule(OptimizerConfig(), 9), 0.1, 0)
    ids = jnp.arange(2 * 8).reshape(2, 8)
    state = init_state(CONFIG, OPTIMIZER, 0)
    state, _ = step(state, ids[:, :-1], ids[:, 1:])
    kept = jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(state)
    for _ in range(20):
        state, _ = step(state, ids[:, :-1], ids[:, 1:])
    jax.block_until_ready(state)
    checkpoints.close()
    restored = Checkpoints(tmp_path, CheckpointConfig()).restore(state)
    assert restored is not None
    _assert_equal(restored, kept)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2, keep_best=True))
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, 2.4], start=1):
        checkpoints.save(_state(step), loss)
    checkpoints.close()
    assert _steps(tmp_path) == [2, 4, 5]


def test_without_keep_best_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1, keep_best=False))
    for step, loss in enumerate([1.0, 2.0, 3.0], start=1):
        checkpoints.save(_state(step), loss)
    checkpoints.close()
    assert _steps(tmp_path) == [3]


def test_an_unfinished_checkpoint_is_passed_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(_state(1, 0.5))
    checkpoints.close()
    half = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp-0"
    half.mkdir()
    (half / "parameters").write_text("half")
    again = Checkpoints(tmp_path, CheckpointConfig())
    restored = again.restore(_state())
    assert restored is not None and int(restored.step) == 1


def test_a_saved_model_loads_back_equal(tmp_path: Path) -> None:
    model = GPT2(CONFIG, jax.random.key(1))
    save_model(tmp_path / "out", model, load_tokenizer("bytes"))
    assert is_checkpoint(tmp_path / "out") and is_checkpoint(tmp_path / "out" / "checkpoints" / "0")
    for path in (tmp_path / "out", tmp_path / "out" / "checkpoints" / "0"):
        loaded, tokenizer = load_model(path)
        assert loaded.config == CONFIG and tokenizer is not None and tokenizer.n_vocab == 257
        for name, value in named_parameters(model).items():
            np.testing.assert_array_equal(named_parameters(loaded)[name], value)
    assert not [p for p in tmp_path.iterdir() if p.name != "out"]


def test_a_model_without_tokenizer_loads_without(tmp_path: Path) -> None:
    save_model(tmp_path / "out", GPT2(CONFIG, jax.random.key(1)), None)
    assert load_model(tmp_path / "out")[1] is None


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_model(tmp_path / "out", GPT2(CONFIG, jax.random.key(1)), load_tokenizer("bytes"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "used"])
def test_a_used_folder_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("mine")
    with pytest.raises(InputError, match=name):
        save_model(tmp_path / name, GPT2(CONFIG, jax.random.key(1)), load_tokenizer("bytes"))
    assert (tmp_path / "file").read_text() == (tmp_path / "used" / "mine").read_text() == "mine"


def test_a_run_without_a_finished_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("model: {n_layer: 2}\n")
    with pytest.raises(InputError, match="no finished checkpoint"):
        load_model(tmp_path)
    assert not is_checkpoint(tmp_path / "checkpoints")


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    save_model(tmp_path / "out", GPT2(CONFIG, jax.random.key(1)), load_tokenizer("bytes"))
    with pytest.raises(InputError, match="no checkpoint of step 7; it has 0"):
        load_model(tmp_path / "out" / "checkpoints" / "7")


def test_parameters_of_another_shape_are_named(tmp_path: Path) -> None:
    save_model(tmp_path / "out", GPT2(CONFIG, jax.random.key(1)), load_tokenizer("bytes"))
    config = tmp_path / "out" / CONFIG_FILE
    config.write_text(config.read_text().replace("n_positions: 9", "n_positions: 10"))
    with pytest.raises(InputError, match=r"position.table has shape \[9, 6\]"):
        load_model(tmp_path / "out")


def test_a_damaged_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    save_model(tmp_path / "out", GPT2(CONFIG, jax.random.key(1)), load_tokenizer("bytes"))
    for file in (tmp_path / "out" / "checkpoints" / "0" / "parameters").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(InputError, match=r"cannot read the checkpoint .*damaged"):
        load_model(tmp_path / "out")


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_weights_made_smaller_are_not_saved(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(InputError, match=f"weights are {dtype}, made smaller for decoding"):
        save_model(tmp_path / "out", quantize(tiny(), dtype), None)
    assert list(tmp_path.iterdir()) == []
