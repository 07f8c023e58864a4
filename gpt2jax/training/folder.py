"""The folder of a run, and of a converted model: its names, and how files in it are written. Imports nothing heavy.

config.yaml              the resolved configuration
tokenizer/               what `gpt2jax.tokenizer.load_tokenizer` reads back
checkpoints/STEP/        Orbax: `parameters` (float32 by name); in a run also `optimizer`
base/                    (a run with lora only) Orbax: the parameters that are not trained; checkpoints then hold the adapters alone
tensorboard/, wandb_id, trace/   (a run only, if asked for) events, the id of its W&B run, a profile
data.json, metrics.jsonl (a run only) the data's fingerprint; one JSON object a line
"""

from __future__ import annotations

import os
from pathlib import Path

from gpt2jax.config import Config, load_config
from gpt2jax.errors import InputError

CHECKPOINTS, CONFIG, TOKENIZER, BASE = "checkpoints", "config.yaml", "tokenizer", "base"


def is_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a run folder, a converted folder, or one step's folder inside its checkpoints/."""
    run_dir, _ = split_step(Path(path))
    return (run_dir / CONFIG).is_file() and (run_dir / CHECKPOINTS).is_dir()


def split_step(path: Path) -> tuple[Path, int | None]:
    """(run folder, step) of a step's folder inside checkpoints/; (path, None) of any other."""
    inside = path.name.isdigit() and path.absolute().parent.name == CHECKPOINTS
    return (path.absolute().parent.parent, int(path.name)) if inside else (path, None)


def finished_steps(run_dir: Path) -> list[int]:
    """The steps with a whole checkpoint, in order: an unfinished one has another name."""
    folder = run_dir / CHECKPOINTS
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()) if folder.is_dir() else []


def saved_config(run_dir: Path) -> Config | None:
    """The configuration that a run folder was started with; None if it has none yet."""
    path = run_dir / CONFIG
    return load_config(path) if path.is_file() else None


def require_unused(folder: Path, way_out: str) -> None:
    """InputError unless `folder` is absent or an empty folder."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder; {way_out}")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"folder {folder} is already in use; {way_out}")


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
