"""Shared by all tests: full float32 products, a cache folder of their own, and tiny prepared data."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# set before anything imports jax, for the tests and for the processes that they start
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers share the folder of the process that starts them
    os.environ["GPT2JAX_CACHE"] = tempfile.mkdtemp(prefix="gpt2jax-test-cache-")
    atexit.register(shutil.rmtree, os.environ["GPT2JAX_CACHE"], ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["GPT2JAX_CACHE"] + "/compiled"  # many tests compile the same tiny program
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "float32"
os.environ["JAX_PLATFORMS"] = "cpu"
# compiling is most of the suite's time, and XLA's optimiser most of the compiling; `optimised` turns it on where users' own programs are compared
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


@pytest.fixture
def optimised() -> Iterator[None]:
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of 19 short documents, byte tokens."""
    from gpt2jax.data.prepare import prepare
    from gpt2jax.tokenizer import load_tokenizer

    root = tmp_path_factory.mktemp("text")
    for i in range(19):
        (root / f"{i:02}.txt").write_text("".join(f"line {j * j % (i + 7)} of file {i}\n" for j in range(29 + i)))
    prepare([str(root)], root.parent / f"{root.name}-tokens", tokenizer=load_tokenizer("bytes"), val_fraction=0.2, workers=1, progress=False)
    return root.parent / f"{root.name}-tokens"


@pytest.fixture
def tiny_options(prepared: Path, tmp_path: Path) -> list[str]:
    """Overrides of a training run that takes seconds."""
    return [
        "--model.vocab_size=257", "--model.n_positions=24", "--model.n_layer=2", "--model.n_head=3", "--model.n_embd=12", "--data.tokenizer=bytes",
        f"--data.source={prepared}", "--train.batch_size=5", "--train.steps=12", "--train.log_every=1", "--optimizer.warmup_steps=3",
        "--eval.every=6", "--eval.sequences=7", "--checkpoint.every=4", "--run.sample_prompt=none", f"--run.dir={tmp_path / 'run'}",
    ]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: a worker that begins one last would keep all others waiting."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
