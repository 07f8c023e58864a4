"""The folder of a run, and of a converted model: its names, and how files in it are written. Imports nothing heavy.

config.yaml              the resolved configuration
tokenizer/               what `gpt2jax.tokenizer.load_tokenizer` reads back
checkpoints/STEP/        Orbax: `parameters` (float32 by name); in a run also `optimizer`, `facts`, and `guard` where there is one. A run may keep them
                         elsewhere (checkpoint.dir)
base/                    (a run with lora only) Orbax: the parameters that are not trained; checkpoints then hold the adapters alone
tensorboard/, wandb_id, trace/   (a run only, if asked for) events, the id of its W&B run, a profile
data.json, metrics.jsonl (a run only) the data's fingerprint, and the run's own name; one JSON object a line
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2jax.config import Config, load_config
from gpt2jax.errors import InputError

CHECKPOINTS, CONFIG, TOKENIZER, BASE, DATA = "checkpoints", "config.yaml", "tokenizer", "base", "data.json"

#: What fsspec needs for the files of a URL; arrays go through TensorStore, which knows these by itself.
_REMOTE = {"gs": "gcsfs", "s3": "s3fs"}

#: What a process that was killed while it wrote may leave in a run folder.
_DRAFT = re.compile(r"\.(config\.yaml|data\.json|tokenizer|metrics\.jsonl)\.\d+")


def is_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a run folder, a converted folder, or one step's folder inside its checkpoints/."""
    run_dir, _ = split_step(Path(path))
    return (run_dir / CONFIG).is_file() and ((run_dir / CHECKPOINTS).is_dir() or load_config(run_dir / CONFIG).checkpoint.dir is not None)


def split_step(path: Path) -> tuple[Path, int | None]:
    """(run folder, step) of a step's folder inside checkpoints/; (path, None) of any other."""
    inside = path.name.isdecimal() and path.absolute().parent.name == CHECKPOINTS
    return (path.absolute().parent.parent, int(path.name)) if inside else (path, None)


def checkpoint_folder(run_dir: Path, where: str | None) -> Any:
    """The folder of a run's checkpoints, an `epath.Path`: `where` (checkpoint.dir), a folder or a URL; none means inside the run's own.

    InputError for a URL of a kind that is not known, or whose package is missing.
    """
    from etils import epath

    if where is None or not is_url(where):
        return epath.Path((run_dir / CHECKPOINTS if where is None else Path(where)).absolute())
    scheme = where.split("://")[0]
    if scheme not in _REMOTE:
        raise InputError(
            f"checkpoint.dir={where} is a kind of URL that is not known; give {', '.join(f'{name}://BUCKET/FOLDER' for name in _REMOTE)}, or a folder"
        )
    if importlib.util.find_spec(_REMOTE[scheme]) is None:
        raise InputError(f"checkpoint.dir={where} needs the package {_REMOTE[scheme]}; pip install {_REMOTE[scheme]}, or give a folder")
    return epath.Path(where)


def is_url(where: str) -> bool:
    return "://" in where


def finished_steps(checkpoints: Any) -> list[int]:
    """The steps with a whole checkpoint in a folder of checkpoints, in order: an unfinished one has another name."""
    return sorted(int(entry.name) for entry in checkpoints.iterdir() if entry.name.isdecimal()) if checkpoints.is_dir() else []


def saved_config(run_dir: Path) -> Config | None:
    """The configuration that a run folder was started with; None if it has none yet."""
    path = run_dir / CONFIG
    return load_config(path) if path.is_file() else None


def run_id(run_dir: Path) -> str | None:
    """What tells a run from others that keep their checkpoints in the same place; None if it has none."""
    try:
        return str(json.loads((run_dir / DATA).read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def require_unused(folder: Path, way_out: str) -> None:
    """InputError unless `folder` is absent or an empty folder."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder; {way_out}")
    if folder.is_dir() and any(not _DRAFT.fullmatch(entry.name) for entry in folder.iterdir()):
        raise InputError(f"folder {folder} is already in use; {way_out}")


def require_writable(folder: Path, what: str) -> None:
    """InputError unless `folder` can be made, or is there and can be written to; `what` names it."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not there.is_dir():
        raise InputError(f"{what} {folder} can't be used: {there} is no folder; choose another, or remove that")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{what} {folder} can't be used: {there} can't be written to; choose another, or change its permissions")


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """`write(draft)` makes a file or folder that takes the name `path` when it is whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(draft)
        os.replace(draft, path)
    except BaseException:
        _remove(draft)
        raise


def remove_drafts(run_dir: Path) -> None:
    """Remove what processes that were killed while they wrote left in a run folder."""
    for entry in run_dir.iterdir():
        if _DRAFT.fullmatch(entry.name):
            _remove(entry)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
