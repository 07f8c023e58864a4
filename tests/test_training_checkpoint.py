"""Checkpoints: what is saved comes back bit for bit, by count and by best; folders are whole or absent."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from gpt2jax.training.folder import checkpoint_folder, is_checkpoint
from gpt2jax.training.guard import Guard
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import TrainState, init_state, make_train_step

ROOT = Path(__file__).parent.parent
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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_val_loss_that_is_not_finite_is_never_the_best(tmp_path: Path, bad: float) -> None:
    for steps in ([(1, 3.0), (2, 1.0), (3, bad)], [(4, 2.0), (5, bad), (6, 2.5)]):  # in a second process it is read back
        checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
        for step, loss in steps:
            checkpoints.save(_state(step), loss)
        checkpoints.close()
    assert _steps(tmp_path) == [2, 6]


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path: Path) -> None:
    junk = {"\N{SUPERSCRIPT TWO}", "-3", "1e3", "9.orbax-checkpoint", "broken-7", "notes.txt"}
    for name in junk:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    assert checkpoints.restore(_state()) is None
    checkpoints.save(_state(1))
    checkpoints.save(_state(2))
    checkpoints.close()
    assert {entry.name for entry in (tmp_path / "checkpoints").iterdir()} == junk | {"2"}


def test_without_keep_best_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1, keep_best=False))
    for step, loss in enumerate([1.0, 2.0, 3.0], start=1):
        checkpoints.save(_state(step), loss)
    checkpoints.close()
    assert _steps(tmp_path) == [3]


def test_what_is_kept_by_time_and_what_was_best_outlive_the_process(tmp_path: Path) -> None:
    """Saves 4 minutes apart, by two processes of one clock: the newest, the best, and those that are 10 minutes younger than the one kept before them."""
    clock = [0.0]
    for steps in (range(1, 5), range(5, 9)):
        checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1, keep_every_minutes=10), clock=lambda: clock[0])
        for step in steps:
            clock[0] += 240
            checkpoints.save(_small(step), 1.0 if step == 2 else 2.0)
        checkpoints.close()
    assert _steps(tmp_path) == [1, 2, 4, 7, 8]


def test_a_save_is_overdue_by_the_clock_since_the_last(tmp_path: Path) -> None:
    clock = [100.0]
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(every_minutes=1.5), clock=lambda: clock[0])
    assert not checkpoints.overdue()
    clock[0] += 90
    assert checkpoints.overdue()
    checkpoints.save(_small(1))
    assert not checkpoints.overdue()
    clock[0] += 89
    assert not checkpoints.overdue()
    clock[0] += 1
    assert checkpoints.overdue()
    checkpoints.close()
    assert not Checkpoints(tmp_path, CheckpointConfig(), clock=lambda: clock[0] + 1e6).overdue()


def _small(step: int, value: float = 1.0, shape: tuple[int, ...] = (3, 5), dtype: str = "float32") -> TrainState:
    """A state of few and small arrays: quick to save, and whole to see."""
    parameters = {"a": jnp.full(shape, value * step, dtype), "b": jnp.arange(7.0) + step}
    return TrainState(jnp.int32(step), parameters, ({"count": jnp.int32(step)}, (), jnp.full(4, -value * step)))


def _save(run_dir: Path, *states: TrainState) -> None:
    checkpoints = Checkpoints(run_dir, CheckpointConfig(keep=9))
    for state in states:
        checkpoints.save(state)
    checkpoints.close()


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": lambda file: file.unlink(),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(b"\x7f{" * (file.stat().st_size // 2 + 1)),
}


@pytest.mark.filterwarnings("ignore:passed over")
@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_file_is_damaged_the_state_is_the_newest_or_an_older_one_and_never_another(tmp_path: Path, damage: str) -> None:
    """Each file of a checkpoint in turn. What is passed over is set aside, and its step can be saved again."""
    _save(tmp_path / "good", _small(1), _small(2))
    names = sorted(str(path.relative_to(tmp_path / "good")) for path in (tmp_path / "good" / "checkpoints" / "2").rglob("*") if path.is_file())
    assert len(names) > 20
    passed = 0
    for i, name in enumerate(names):
        run_dir = tmp_path / str(i)
        shutil.copytree(tmp_path / "good", run_dir)
        DAMAGE[damage](run_dir / name)
        checkpoints = Checkpoints(run_dir, CheckpointConfig())
        restored = checkpoints.restore(_small(0))
        assert restored is not None
        _assert_equal(restored, _small(int(restored.step)))
        if int(restored.step) == 1:
            passed += 1
            assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["1", "broken-2"]
            checkpoints.save(_small(2, 3.0))
            checkpoints.close()
            again = Checkpoints(run_dir, CheckpointConfig()).restore(_small(0))
            assert again is not None
            _assert_equal(again, _small(2, 3.0))
        else:
            assert int(restored.step) == 2
    assert passed >= (4 if damage == "missing" else 6)


@pytest.mark.parametrize(
    ("newest", "words"),
    [
        (_small(2, shape=(4, 5)), r"checkpoints/2: parameters a is float32\[4, 5\], and the run's is float32\[3, 5\]"),
        (_small(2, dtype="bfloat16"), r"checkpoints/2: parameters a is bfloat16\[3, 5\], and the run's is float32\[3, 5\]"),
        (TrainState(jnp.int32(2), {"a": jnp.ones((3, 5))}, _small(2).optimizer), r"checkpoints/2: parameters b is missing, and"),
        (TrainState(jnp.int32(2), {**_small(2).parameters, "c": jnp.ones(1)}, _small(2).optimizer), r"parameters c is float32\[1\], and the run's is missing"),
    ],
    ids=["shape", "dtype", "missing", "left-over"],
)
def test_arrays_that_do_not_fit_are_passed_over_by_name(tmp_path: Path, newest: TrainState, words: str) -> None:
    _save(tmp_path, _small(1), newest)
    with pytest.warns(UserWarning, match=words):
        restored = Checkpoints(tmp_path, CheckpointConfig()).restore(_small(0))
    assert restored is not None
    _assert_equal(restored, _small(1))


@pytest.mark.filterwarnings("ignore:passed over")
def test_with_no_whole_checkpoint_nothing_is_touched(tmp_path: Path) -> None:
    _save(tmp_path, _small(1), _small(2))
    for step in "12":
        (tmp_path / "checkpoints" / step / "optimizer" / "_METADATA").unlink()
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    with pytest.raises(InputError, match=r"no checkpoint in .* is whole \(steps 2, 1\); put a copy in its place, or begin anew in another --run.dir"):
        Checkpoints(tmp_path, CheckpointConfig()).restore(_small(0))
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_a_checkpoint_without_a_guard_restores_with_and_without_one(tmp_path: Path) -> None:
    """As checkpoints of before there were guards and facts."""
    _save(tmp_path, _small(1))
    shutil.rmtree(tmp_path / "checkpoints" / "1" / "facts")
    plain = Checkpoints(tmp_path, CheckpointConfig()).restore(_small(0))
    assert plain is not None
    _assert_equal(plain, _small(1))
    guarded = Checkpoints(tmp_path, CheckpointConfig()).restore(dataclasses.replace(_small(0), guard=Guard.start()))
    assert guarded is not None
    _assert_equal(guarded, dataclasses.replace(_small(1), guard=Guard.start()))
    moved = dataclasses.replace(_small(2), guard=Guard(jnp.array([1.5, 2.5]), jnp.array([0.5, 0.1]), jnp.int32(7), jnp.int32(2), jnp.int32(1)))
    _save(tmp_path, moved)
    again = Checkpoints(tmp_path, CheckpointConfig()).restore(dataclasses.replace(_small(0), guard=Guard.start()))
    assert again is not None
    _assert_equal(again, moved)


#: On 8 devices: 3 steps with fsdp=8, saved; restored with data=4 x tensor=2, saved; restored on one. No device may hold more than its part meanwhile, and no
#: second state may be there. In the end on 8 again, and one step more, whose old state must be gone.
MESHES = """
import sys, jax, numpy as np
from pathlib import Path
from gpt2jax.config import CheckpointConfig, Config, GuardConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from gpt2jax.model.parameters import abstract_model
from gpt2jax.parallel.mesh import place_rows, training_mesh
from gpt2jax.training.checkpoint import Checkpoints
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import abstract_state, init_state, make_train_step, state_shardings

model = ModelConfig(vocab_size=64, vocab_multiple=8, n_positions=16, n_layer=2, n_head=4, n_embd=64, position="rope")
optimizer_config, guard = OptimizerConfig(ema_decay=0.9), GuardConfig(action="skip")
optimizer, skeleton = make_optimizer(optimizer_config, 20, abstract_model(model)), abstract_model(model)
tokens = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)

def held():
    most = {}
    for array in jax.live_arrays():
        for part in array.addressable_shards:
            most[part.device] = most.get(part.device, 0) + part.data.nbytes
    return max(most.values())

def on(**sizes):
    mesh = training_mesh(Config(model=model, mesh=MeshConfig(**sizes), train=TrainConfig(batch_size=8)))
    return mesh, state_shardings(model, optimizer, mesh, guarded=True)

def one():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1, 1), ("data", "fsdp", "expert", "sequence", "tensor"))
    return mesh, state_shardings(model, optimizer, mesh, guarded=True)

def step_on(mesh, shardings, state):
    step = make_train_step(model, optimizer, make_schedule(optimizer_config, 20), 0.01, 0, "none", shardings, guard=guard)
    return step(state, *place_rows(lambda rows: (tokens[rows, :-1], tokens[rows, 1:]), 8, 16, mesh))[0]

def numbers(state):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}

root = Path(sys.argv[1])
mesh, shardings = on(data=1, fsdp=8)
with jax.set_mesh(mesh):
    state = init_state(model, optimizer, 0, shardings)
    fresh = held()
    for _ in range(3):
        state = step_on(mesh, shardings, state)
    checkpoints = Checkpoints(root / "0", CheckpointConfig())
    checkpoints.save(state)
    checkpoints.close()
    want, whole = numbers(state), sum(leaf.nbytes for leaf in jax.tree.leaves(state))
assert fresh < whole / 5 and len(want) > 40, (fresh, whole)
del state
for i, (mesh, shardings) in enumerate([on(data=4, tensor=2), one(), on(data=1, fsdp=8)]):
    with jax.set_mesh(mesh):
        before = held() if jax.live_arrays() else 0
        state = Checkpoints(root / str(i), CheckpointConfig()).restore(abstract_state(optimizer, shardings, skeleton))
        parts = zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
        part = sum(int(np.prod(place.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf, place in parts)
        assert held() - before <= part, (i, held(), before, part)
        got = numbers(state)
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert value.dtype == got[name].dtype
            np.testing.assert_array_equal(got[name], value, err_msg=f"{i} {name}")
        for leaf, place in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
            assert leaf.sharding.is_equivalent_to(place, leaf.ndim), (leaf.sharding, place)
        checkpoints = Checkpoints(root / str(i + 1), CheckpointConfig())
        checkpoints.save(state)
        checkpoints.close()
        if i == 2:
            assert held() - before <= fresh, "as much as a fresh start"
            state = Checkpoints(root / str(i), CheckpointConfig()).restore(abstract_state(optimizer, shardings, skeleton))  # none of whose arrays numpy shares
            old = jax.tree.leaves(state)
            state = step_on(mesh, shardings, state)
            jax.block_until_ready(state)
            assert all(leaf.is_deleted() for leaf in old if leaf.ndim), "what was restored is donated as any other state"
    del state
"""


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_restores_on_another_and_no_device_holds_more_than_its_part(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", MESHES, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    )
    assert result.returncode == 0, result.stderr


#: Saves steps 1, 2, ... under a limit on the size of files that only the small checkpoint of step 1 keeps; the report comes at a later step, not at the end.
FULL = """
import resource, sys, time, jax.numpy as jnp
from pathlib import Path
from gpt2jax.config import CheckpointConfig
from gpt2jax.errors import RunFailed
from gpt2jax.training.checkpoint import Checkpoints
from gpt2jax.training.step import TrainState
state = lambda step, size: TrainState(jnp.int32(step), {"a": jnp.sin(jnp.arange(size, dtype=jnp.float32))}, {"count": jnp.int32(step)})
checkpoints = Checkpoints(Path(sys.argv[1]), CheckpointConfig(keep=1))
checkpoints.save(state(1, 9))
checkpoints._manager.wait_until_finished()
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    checkpoints.save(state(2, 99_999))
    while True:
        checkpoints.check()
except RunFailed as error:
    print(error)
"""


def test_a_full_disk_is_reported_while_the_run_goes_on_and_the_earlier_checkpoint_stays(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.stdout.startswith(f"cannot save a checkpoint in {tmp_path / 'checkpoints'}: "), result.stderr
    assert "File too large" in result.stdout and "go on with --run.resume=auto" in result.stdout and len(result.stdout.splitlines()) == 1
    assert _steps(tmp_path) == [1]
    restored = Checkpoints(tmp_path, CheckpointConfig()).restore(TrainState(jnp.int32(0), {"a": jnp.zeros(9)}, {"count": jnp.int32(0)}))
    assert restored is not None and int(restored.step) == 1


def test_checkpoints_may_lie_elsewhere(tmp_path: Path) -> None:
    """As a run's folder names it: what loads a model follows, by run and by step."""
    save_model(tmp_path / "run", GPT2(CONFIG, jax.random.key(1)), load_tokenizer("bytes"))
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    config = tmp_path / "run" / CONFIG_FILE
    assert not is_checkpoint(tmp_path / "run")
    config.write_text(config.read_text() + f"checkpoint: {{dir: {tmp_path / 'elsewhere'}}}\n")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "0"):
        assert is_checkpoint(path)
        np.testing.assert_array_equal(named_parameters(load_model(path)[0])["token_table"], GPT2(CONFIG, jax.random.key(1)).token_table[...])


def test_urls_are_taken_as_they_are_if_their_package_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    with pytest.raises(InputError, match="checkpoint.dir=ftp://host/x is a kind of URL that is not known; give gs://BUCKET/FOLDER, s3://"):
        checkpoint_folder(tmp_path, "ftp://host/x")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for where, package in (("gs://bucket/run", "gcsfs"), ("s3://bucket/run", "s3fs")):
        with pytest.raises(InputError, match=f"checkpoint.dir={where} needs the package {package}; pip install {package}, or give a folder"):
            checkpoint_folder(tmp_path, where)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace())
    for where in ("gs://bucket/run", "s3://bucket/run"):
        assert str(checkpoint_folder(tmp_path, where) / "3") == f"{where}/3"


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
