"""`gpt2jax.load`: a model and its tokenizer from wherever they are."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2jax.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax.sharding import Sharding

    from gpt2jax.config import ModelConfig
    from gpt2jax.model.gpt2 import GPT2
    from gpt2jax.tokenizer import Tokenizer

TOKENIZER_FILES = ("gpt2jax_tokenizer.json", "tokenizer.json", "vocab.json", "merges.txt")
GPT2_VOCABULARY = 50257
KINDS = "it is neither a run folder, a checkpoint, nor a Hugging Face folder (config.json and model.safetensors)"


def load(path: str | os.PathLike[str], *, compute_dtype: str | None = None, weights_dtype: str | None = None) -> tuple[GPT2, Tokenizer | None]:
    """A model, its parameters float32, and its tokenizer.

    path: a run folder, a checkpoint, a converted folder, a Hugging Face GPT-2 or Llama folder, or a hub id such as "gpt2" (extra `hub`).
    What looks like a local path (starts with `.`, `/` or `~`, has more than one slash, or lies in a folder that exists) is never asked of the hub.
    compute_dtype: "float32" or "bfloat16" for matmuls; None keeps what the model was saved with (float32 for Hugging Face folders).
    weights_dtype: "float32", "bfloat16" or "int8" for the weights of linear maps and of the token table, as `gpt2jax.decoding.weights.quantize` makes them: to
    decode in less memory, and with int8 faster. None is float32.
    The tokenizer is the folder's own, else GPT-2's if the vocabulary holds its ids, else None.
    Raises InputError, one line that says what to do, for anything that is missing, broken or not supported.
    """
    from gpt2jax.config import config_from_tree
    from gpt2jax.decoding.weights import check_weights_dtype, quantize

    if compute_dtype is not None:
        config_from_tree({"model": {"compute_dtype": compute_dtype}}, where="load")
    if weights_dtype is not None:
        check_weights_dtype(weights_dtype)
    model, tokenizer = _load_folder(find_folder(path))
    if compute_dtype is not None and compute_dtype != model.config.compute_dtype:
        model = _with_compute_dtype(model, compute_dtype)
    if weights_dtype is not None:
        model = quantize(model, weights_dtype)
    return model, tokenizer


def find_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that `load` reads for a path or a hub id, fetched first if need be."""
    folder = Path(path).expanduser()
    if folder.exists():
        return folder
    if not _is_hub_id(str(path)):
        raise InputError(f"there is no {path}; give a run folder, a checkpoint, a Hugging Face folder or a hub id such as gpt2")
    return _download(str(path))


def load_placed(folder: Path, shardings: Mapping[str, Sharding]) -> GPT2:
    """The model in a folder, each parameter laid as `shardings` says by name: devices, and processes, get their own parts only."""
    from gpt2jax.convert.huggingface import load_huggingface
    from gpt2jax.training.folder import is_checkpoint

    if is_checkpoint(folder):
        from gpt2jax.training.checkpoint import load_model

        return load_model(folder, shardings)[0]
    return load_huggingface(folder, shardings)


def own_tokenizer(folder: Path) -> str | None:
    """What `data.tokenizer` calls the tokenizer of the model in a folder: a path, or gpt2 where a released model has none of its own. None if there is none."""
    from gpt2jax.training.folder import TOKENIZER, is_checkpoint, split_step

    if is_checkpoint(folder):
        tokenizer = split_step(folder)[0] / TOKENIZER
        return str(tokenizer) if tokenizer.is_dir() else None
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return str(folder)
    config = read_model_config(folder)
    return "gpt2" if config.position == "learned" and config.vocab_size >= GPT2_VOCABULARY else None


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration of the model in a folder that `load` takes. InputError if it holds none."""
    from gpt2jax.config import load_config
    from gpt2jax.convert.huggingface import is_huggingface_folder, read_config
    from gpt2jax.training.folder import CONFIG, is_checkpoint, split_step

    if is_checkpoint(folder):
        return load_config(split_step(folder)[0] / CONFIG).model
    if is_huggingface_folder(folder):
        return read_config(folder)
    raise InputError(f"{folder} holds no model; {KINDS}")


def convert_folder(src: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Load `src` (anything that `load` takes) and write it as a folder of ours, model and tokenizer (if it has one).

    Raises InputError as `load` does, and if `out` is in use.
    """
    from gpt2jax.training.folder import require_unused

    require_unused(Path(out), "give a new --out")
    model, tokenizer = load(src)
    from gpt2jax.training.checkpoint import save_model

    save_model(Path(out), model, tokenizer)


def _load_folder(folder: Path) -> tuple[GPT2, Tokenizer | None]:
    from gpt2jax.convert.huggingface import is_huggingface_folder, load_huggingface
    from gpt2jax.training.folder import is_checkpoint

    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the folder that it lies in")
    if is_checkpoint(folder):
        from gpt2jax.training.checkpoint import load_model

        return load_model(folder)
    if not is_huggingface_folder(folder):
        raise InputError(f"{folder} holds no model; {KINDS}")
    model = load_huggingface(folder)
    return model, _tokenizer(folder, model.config)


def _tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    """The folder's own. GPT-2's stands in where a GPT-2 has none; what a Llama's splits text by may be beyond us, and then the model takes token ids only."""
    from gpt2jax.tokenizer import load_tokenizer

    is_gpt2 = config.position == "learned"
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        try:
            return load_tokenizer(str(folder))
        except InputError as error:
            if is_gpt2:
                raise
            warnings.warn(f"{error}; the model is loaded without a tokenizer: it takes and gives token ids, not text", stacklevel=4)
            return None
    return load_tokenizer("gpt2") if is_gpt2 and config.vocab_size >= GPT2_VOCABULARY else None


def _with_compute_dtype(model: GPT2, compute_dtype: str) -> GPT2:
    import dataclasses

    from gpt2jax.model.parameters import abstract_model, named_parameters, with_parameters

    change: Any = {"compute_dtype": compute_dtype}
    config = dataclasses.replace(model.config, **change)
    return with_parameters(abstract_model(config), named_parameters(model))


def _is_hub_id(text: str) -> bool:
    """`name` or `owner/name`, unless the part before the slash is a folder here: then it is a misspelt path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", text) is not None and not ("/" in text and Path(text).parent.is_dir())


def _download(hub_id: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import RepositoryNotFoundError
    except ImportError:
        raise InputError(f"there is no folder {hub_id}; to fetch the model {hub_id} from the hub, install the extra: pip install 'gpt2jax[hub]'") from None
    try:
        # only what is read, and only the top folder: GPT-2's repository also holds other formats of the same weights
        patterns = ["*.json", "*.txt", "*.safetensors"]
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except RepositoryNotFoundError:
        raise InputError(f"there is no folder {hub_id}, and the hub has no such model, or it is private: check the name, or run `hf auth login`") from None
    except Exception as error:  # the hub's client raises its own, the HTTP library's and the system's errors
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"there is no folder {hub_id}, and it could not be fetched from the hub ({type(error).__name__}: {reason}); "
            f"go online, or give the folder of a model that you have"
        ) from None
