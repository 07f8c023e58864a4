"""Hugging Face folders: config.json and safetensors weights, without torch. config.json's model_type picks the format, see `FORMATS`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gpt2jax.config import ModelConfig, config_from_tree
from gpt2jax.convert.format import Format, Source
from gpt2jax.convert.gpt2 import GPT2_FORMAT
from gpt2jax.convert.llama import LLAMA_FORMAT
from gpt2jax.convert.tensors import INDEX, PICKLED, SINGLE, TensorFolder, aligned_zeros, listed, read_json
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import abstract_model, named_parameters, with_parameters

#: By model_type. A new format is one file and one line here.
FORMATS: dict[str, Format] = {"gpt2": GPT2_FORMAT, "llama": LLAMA_FORMAT}

#: Columns of a turned weight that are widened and copied at once: a cache line of theirs. 5 times faster than all at once.
STRIPE = 16


def is_huggingface_folder(folder: Path) -> bool:
    """Whether the folder holds anything of a Hugging Face model: its config or its weights."""
    return any((folder / name).is_file() for name in ("config.json", SINGLE, INDEX, PICKLED))


def load_huggingface(folder: Path, shardings: Mapping[str, jax.sharding.Sharding] | None = None) -> GPT2:
    """The model in a Hugging Face folder of one of `FORMATS`, with float32 parameters whatever the file's dtype (float32, float16, bfloat16).

    Raises InputError, one line, for a missing or malformed file, a setting that is not supported, and tensors that are missing, left over, of another shape
    or not finite, before any array is made wherever headers can tell. Needs memory for the weights and one tensor more.
    """
    form, config = _read_config(folder)
    tensors = TensorFolder(folder)
    tensors.rename({name: name.removeprefix(form.prefix) for name in tensors.places})
    if config.tie_word_embeddings and form.table not in tensors.places and form.head in tensors.places:
        tensors.rename({form.head: form.table})  # tied weights are one tensor, and some writers keep the other of its two names
    model = abstract_model(config)
    leaves = named_parameters(model)
    sources = {name: source for name, source in form.parameters.items() if name in leaves}
    _check_tensors(tensors, form, config, sources)
    # the largest first, while there is most room for the copy that goes to the device
    names = sorted(sources, key=lambda name: -leaves[name].size)
    with ThreadPoolExecutor(2) as pool:  # numpy checks and copies without Python's lock
        arrays = pool.map(lambda name: _placed(_read_parameter(tensors, sources[name], leaves[name].shape, config), (shardings or {}).get(name)), names)
        return with_parameters(model, dict(zip(names, arrays, strict=True)))


def _placed(values: np.ndarray[Any, Any], sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(values, may_alias=True)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def read_config(folder: Path) -> ModelConfig:
    """The folder's config.json as a ModelConfig. InputError for another architecture, a bad value, or a setting that is not supported, by name.

    Of a list of ids that end a text the first is taken: it stands for the end of text itself, the others for ends of turns (Llama 3.1 and later).
    """
    return _read_config(folder)[1]


def _read_config(folder: Path) -> tuple[Format, ModelConfig]:
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} has no config.json, so its weights cannot be understood; copy the config.json that belongs to them there")
    tree = read_json(path)
    if "model_type" not in tree:
        raise InputError(f'{path} names no model_type; add "model_type": "gpt2" if it is a GPT-2, or {" or ".join(map(repr, FORMATS.keys() - {"gpt2"}))}')
    form = FORMATS.get(tree["model_type"]) if isinstance(tree["model_type"], str) else None
    if form is None:
        raise InputError(f"{path}: model_type={tree['model_type']!r} is not supported; only {' and '.join(map(repr, FORMATS))} are")
    for switch, supported in {**form.switches, "quantization_config": (None,)}.items():
        if tree.get(switch, supported[0]) not in supported:
            raise InputError(f"{path}: {switch}={tree[switch]!r} is not supported; only {supported[0]} is")
    values = {}
    for key, default in form.defaults.items():
        values[key] = next((tree[name] for name in form.names.get(key, (key,)) if name in tree), default)
    values["eos_token_id"] = _end_of_text(values["eos_token_id"], values["vocab_size"])
    try:
        return form, config_from_tree({"model": {**values, **form.more(tree, values)}}, where=str(path)).model
    except InputError as error:
        message = str(error).removeprefix(f"{path}: ").replace("model.", "")
        for ours, (theirs, *_) in form.names.items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
        raise InputError(f"{path}: {message}") from None


def _end_of_text(eos: Any, vocab_size: Any) -> Any:
    if isinstance(eos, list):
        eos = eos[0] if eos else None
    # transformers writes GPT-2's 50256 for any vocabulary; an id that does not exist ends no text
    return None if isinstance(eos, int) and isinstance(vocab_size, int) and not 0 <= eos < vocab_size else eos


def _check_tensors(tensors: TensorFolder, form: Format, config: ModelConfig, sources: dict[str, Source]) -> None:
    sizes = _sizes(config)
    wanted = {
        name: tuple(sizes[letter] for letter in source.shape.split())
        for source in sources.values()
        for names in source.tensors(config.n_layer)
        for name in names
    }
    ignored = {buffer.format(i=i) for buffer in form.buffers for i in range(config.n_layer)} | {form.head}
    missing, extra = sorted(wanted.keys() - tensors.places.keys()), sorted(tensors.places.keys() - wanted.keys() - ignored)
    if missing or extra:
        parts = [f"{kind} {listed(names)}" for kind, names in (("missing", missing), ("left over", extra)) if names]
        layers = form.names["n_layer"][0]
        raise InputError(f"{tensors.folder}: the weights do not fit config.json ({layers}={config.n_layer}): {'; '.join(parts)}")
    V = tensors.shape(form.table)[0] if tensors.shape(form.table) else 0
    if V != config.vocab_size:
        raise InputError(f"{tensors.folder}: config.json says vocab_size={config.vocab_size}, but tensor {form.table} has {V} rows; correct config.json")
    for name, shape in wanted.items():
        if tensors.shape(name) != shape:
            raise InputError(f"{tensors.folder}: tensor {name} has shape {list(tensors.shape(name))}; config.json asks for {list(shape)}")
    if config.tie_word_embeddings and form.head in tensors.places:
        _check_tied(tensors, form.head, form.table)


def _check_tied(tensors: TensorFolder, head: str, table: str) -> None:
    if tensors.shape(head) != tensors.shape(table):
        raise InputError(f"{tensors.folder}: {head} has shape {list(tensors.shape(head))}, {table} {list(tensors.shape(table))}; they must be equal")
    if not np.array_equal(tensors.read(head), tensors.read(table)):
        raise InputError(
            f"{tensors.folder}: {head} differs from {table}, and config.json ties them; "
            f"set tie_word_embeddings to false there if the model has a head of its own"
        )


def _sizes(config: ModelConfig) -> dict[str, int]:
    """What the letters in a source's shape stand for."""
    sizes = {"V": config.vocab_size, "C": config.n_positions, "D": config.n_embd, "3D": 3 * config.n_embd, "F": config.mlp_width}
    return {**sizes, "HK": config.n_head * config.head_width, "GK": config.kv_head_count * config.head_width}


def _read_parameter(tensors: TensorFolder, source: Source, shape: tuple[int, ...], config: ModelConfig) -> np.ndarray[Any, Any]:
    values, D = aligned_zeros(shape), config.n_embd
    for i, names in enumerate(source.tensors(config.n_layer)):
        for place, name in enumerate(names):
            tensor = tensors.read(name)
            tensor = tensor.T if source.turned else tensor
            if source.columns:
                tensor = tensor[..., source.columns[0] * D : source.columns[1] * D]
            target = values[i] if source.stacked else values[: len(tensor)]  # rows that pad a table of tokens stay zero
            target = target.reshape(*tensor.shape[:-1], len(names), tensor.shape[-1])[..., place, :]
            if not source.turned:
                target[...] = tensor
                continue
            for start in range(0, tensor.shape[-1], STRIPE):
                stripe = slice(start, start + STRIPE)
                target[..., stripe] = tensor[..., stripe].astype(np.float32, copy=False)
    return values
