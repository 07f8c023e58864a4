"""Hugging Face folders for the tests: the goldens beside this file, and changed copies of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent
NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "inner")

Weights = dict[str, np.ndarray[Any, Any]]


def weights_of(name: str) -> Weights:
    return load_file(GOLDEN / name / "model.safetensors")


def config_of(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


def write_folder(folder: Path, weights: Mapping[str, np.ndarray[Any, Any]], config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    # safetensors writes an array's raw memory, so that a transposed view would come out scrambled
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def variant(folder: Path, name: str, change: Callable[[Weights], Weights] = lambda weights: weights, drop: tuple[str, ...] = (), **config: Any) -> Path:
    """A copy of the golden `name` in `folder`, its weights changed by `change`, its config.json without the keys `drop` and with `config` laid over it."""
    settings = {key: value for key, value in config_of(name).items() if key not in drop}
    return write_folder(folder, change(weights_of(name)), {**settings, **config})


def write_shards(folder: Path, name: str, shards: int) -> Path:
    """The golden `name` as so many shards with an index, tensors dealt out in turn so that each layer is spread over them."""
    variant(folder, name)
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    weights = weights_of(name)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: weights[key] for key in sorted(weights)[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return folder
