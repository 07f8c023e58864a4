"""Hugging Face GPT-2 folders (transformers' `GPT2LMHeadModel` and `GPT2Model`): config.json and safetensors weights, without torch.

The names and shapes are those of transformers' models/gpt2/modeling_gpt2.py, whose `Conv1D` keeps weights as [in, out]. Its fused c_attn has the columns
query, key, value, each of them heads x head width.

Letters: V vocabulary, C context, D width, F inner width of the MLP.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from gpt2jax.config import ModelConfig, config_from_tree
from gpt2jax.convert.tensors import INDEX, PICKLED, SINGLE, TensorFolder, aligned_zeros, listed, read_json
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import abstract_model, named_parameters, with_parameters


class Source(NamedTuple):
    """Where a parameter comes from: a tensor's name ({i} is the layer) and shape, and its share of the last axis in units of D, if not all."""

    name: str
    shape: str
    columns: tuple[int, int] | None = None


PARAMETERS: dict[str, Source] = {
    "token_table": Source("wte.weight", "V D"),
    "position.table": Source("wpe.weight", "C D"),
    "blocks.mixer_norm.scale": Source("h.{i}.ln_1.weight", "D"),
    "blocks.mixer_norm.bias": Source("h.{i}.ln_1.bias", "D"),
    "blocks.mixer.query.w": Source("h.{i}.attn.c_attn.weight", "D 3D", columns=(0, 1)),
    "blocks.mixer.query.b": Source("h.{i}.attn.c_attn.bias", "3D", columns=(0, 1)),
    "blocks.mixer.key_value.w": Source("h.{i}.attn.c_attn.weight", "D 3D", columns=(1, 3)),
    "blocks.mixer.key_value.b": Source("h.{i}.attn.c_attn.bias", "3D", columns=(1, 3)),
    "blocks.mixer.out.w": Source("h.{i}.attn.c_proj.weight", "D D"),
    "blocks.mixer.out.b": Source("h.{i}.attn.c_proj.bias", "D"),
    "blocks.mlp_norm.scale": Source("h.{i}.ln_2.weight", "D"),
    "blocks.mlp_norm.bias": Source("h.{i}.ln_2.bias", "D"),
    "blocks.mlp.up.w": Source("h.{i}.mlp.c_fc.weight", "D F"),
    "blocks.mlp.up.b": Source("h.{i}.mlp.c_fc.bias", "F"),
    "blocks.mlp.down.w": Source("h.{i}.mlp.c_proj.weight", "F D"),
    "blocks.mlp.down.b": Source("h.{i}.mlp.c_proj.bias", "D"),
    "norm.scale": Source("ln_f.weight", "D"),
    "norm.bias": Source("ln_f.bias", "D"),
}
#: Causal-mask buffers of old transformers versions; no weights.
BUFFERS = ("h.{i}.attn.bias", "h.{i}.attn.masked_bias")
PREFIX, HEAD = "transformer.", "lm_head.weight"

#: transformers' own defaults for what a config.json leaves out (GPT2Config).
DEFAULTS: dict[str, Any] = dict(
    vocab_size=50257,
    n_positions=1024,
    n_layer=12,
    n_head=12,
    n_embd=768,
    n_inner=None,
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    initializer_range=0.02,
    embd_pdrop=0.1,
    attn_pdrop=0.1,
    resid_pdrop=0.1,
    eos_token_id=50256,
)
#: Other names for the same settings: GPT2Config.attribute_map, and n_ctx of 2019.
ALIASES: dict[str, tuple[str, ...]] = dict(
    n_positions=("max_position_embeddings", "n_ctx"), n_embd=("hidden_size",), n_layer=("num_hidden_layers",), n_head=("num_attention_heads",)
)
#: Switches that change the forward pass, with the only value that is supported.
SWITCHES: dict[str, bool] = dict(
    scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False, add_cross_attention=False, tie_word_embeddings=True
)


def is_huggingface_folder(folder: Path) -> bool:
    """Whether the folder holds anything of a Hugging Face model: its config or its weights."""
    return any((folder / name).is_file() for name in ("config.json", SINGLE, INDEX, PICKLED))


def load_huggingface(folder: Path) -> GPT2:
    """The model in a Hugging Face GPT-2 folder, with float32 parameters whatever the file's dtype (float32, float16, bfloat16).

    Raises InputError, one line, for a missing or malformed file, a setting that is not supported, and tensors that are missing, left over, of another shape
    or not finite, before any array is made wherever headers can tell. Needs memory for the weights and one tensor more.
    """
    config = read_config(folder)
    tensors = TensorFolder(folder)
    tensors.rename({name: name.removeprefix(PREFIX) for name in tensors.places})
    if "wte.weight" not in tensors.places and HEAD in tensors.places:
        tensors.rename({HEAD: "wte.weight"})  # tied weights are one tensor, and some writers keep the other of its two names
    _check_tensors(tensors, config)
    model = abstract_model(config)
    # the largest first, while there is most room for the copy that goes to the device
    leaves = sorted(named_parameters(model).items(), key=lambda item: -item[1].size)
    with ThreadPoolExecutor(2) as pool:  # numpy checks and copies without Python's lock
        arrays = pool.map(lambda item: jax.device_put(_read_parameter(tensors, item[0], item[1].shape, config), may_alias=True), leaves)
        return with_parameters(model, dict(zip((name for name, _ in leaves), arrays, strict=True)))


def read_config(folder: Path) -> ModelConfig:
    """The folder's config.json as a ModelConfig. InputError for another architecture, a bad value, or a setting that is not supported, by name."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} has no config.json, so its weights cannot be understood; copy the config.json that belongs to them there")
    tree = read_json(path)
    if "model_type" not in tree:
        raise InputError(f'{path} names no model_type; add "model_type": "gpt2" if it is a GPT-2')
    if tree["model_type"] != "gpt2":
        raise InputError(f"{path}: model_type={tree['model_type']!r} is not supported; only 'gpt2' is")
    for switch, supported in SWITCHES.items():
        if bool(tree.get(switch, supported)) != supported:
            raise InputError(f"{path}: {switch}={tree[switch]!r} is not supported; only {supported} is")
    values = {}
    for key, default in DEFAULTS.items():
        names = (key, *ALIASES.get(key, ()))
        values[key] = next((tree[name] for name in names if name in tree), default)
    eos, vocab_size = values["eos_token_id"], values["vocab_size"]
    if isinstance(eos, int) and isinstance(vocab_size, int) and not 0 <= eos < vocab_size:
        values["eos_token_id"] = None  # transformers writes 50256 for any vocabulary; an id that does not exist ends no text
    return config_from_tree({"model": {**values, "position_initializer_range": values["initializer_range"]}}, where=str(path)).model


def _check_tensors(tensors: TensorFolder, config: ModelConfig) -> None:
    wanted = {name: shape for source in PARAMETERS.values() for name, shape in _sources(source, config).items()}
    ignored = {buffer.format(i=i) for buffer in BUFFERS for i in range(config.n_layer)} | {HEAD}
    missing, extra = sorted(wanted.keys() - tensors.places.keys()), sorted(tensors.places.keys() - wanted.keys() - ignored)
    if missing or extra:
        parts = [f"{kind} {listed(names)}" for kind, names in (("missing", missing), ("left over", extra)) if names]
        raise InputError(f"{tensors.folder}: the weights do not fit config.json (n_layer={config.n_layer}): {'; '.join(parts)}")
    V = tensors.shape("wte.weight")[0] if tensors.shape("wte.weight") else 0
    if V != config.vocab_size:
        raise InputError(f"{tensors.folder}: config.json says vocab_size={config.vocab_size}, but tensor wte.weight has {V} rows; correct config.json")
    for name, shape in wanted.items():
        if tensors.shape(name) != shape:
            raise InputError(f"{tensors.folder}: tensor {name} has shape {list(tensors.shape(name))}; config.json asks for {list(shape)}")
    if HEAD in tensors.places:
        _check_head(tensors)


def _check_head(tensors: TensorFolder) -> None:
    if tensors.shape(HEAD) != tensors.shape("wte.weight"):
        raise InputError(f"{tensors.folder}: {HEAD} has shape {list(tensors.shape(HEAD))}, wte.weight {list(tensors.shape('wte.weight'))}; they must be equal")
    if not np.array_equal(tensors.read(HEAD), tensors.read("wte.weight")):
        raise InputError(f"{tensors.folder}: {HEAD} differs from wte.weight; a head that is not tied to the token table is not supported")


def _sources(source: Source, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a source, in the order of layers, with their shapes."""
    sizes = {"V": config.vocab_size, "C": config.n_positions, "D": config.n_embd, "3D": 3 * config.n_embd, "F": config.mlp_width}
    shape = tuple(sizes[letter] for letter in source.shape.split())
    layers = range(config.n_layer) if "{i}" in source.name else range(1)
    return {source.name.format(i=i): shape for i in layers}


def _read_parameter(tensors: TensorFolder, name: str, shape: tuple[int, ...], config: ModelConfig) -> np.ndarray[Any, Any]:
    source = PARAMETERS[name]
    stacked, D = "{i}" in source.name, config.n_embd
    values = aligned_zeros(shape)
    for i, tensor_name in enumerate(_sources(source, config)):
        tensor = tensors.read(tensor_name)
        if source.columns:
            tensor = tensor[..., source.columns[0] * D : source.columns[1] * D]
        target = values[i] if stacked else values[: len(tensor)]  # rows that pad the token table stay zero
        target[...] = tensor.reshape(target.shape)
    return values
