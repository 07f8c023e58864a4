"""A model's parameters by name, as in `blocks.mixer.query.w`: what checkpoints, converters and optimizers talk about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from gpt2jax.config import ModelConfig
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2

Tree = TypeVar("Tree")


def abstract_model(config: ModelConfig) -> GPT2:
    """The model with `jax.ShapeDtypeStruct` in place of arrays: names, shapes and axes at no cost."""
    return jax.eval_shape(lambda: GPT2(config, jax.random.key(0)))


def named_parameters(model: GPT2) -> dict[str, Any]:
    """Each parameter by name. Stacked blocks have a leading axis of layers."""
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(model)}


def with_parameters(model: GPT2, parameters: Mapping[str, Any]) -> GPT2:
    """The same model with these parameters. InputError names every one that is missing, left over or of another shape."""
    check_parameters(named_parameters(model), parameters)
    return map_named(lambda name, _: parameters[name], model)


def check_parameters(wanted: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """InputError, naming every one that is missing, left over or of another shape, unless these parameters are those that are wanted."""
    missing, extra = sorted(wanted.keys() - parameters.keys()), sorted(parameters.keys() - wanted.keys())
    if missing or extra:
        raise InputError(f"parameters do not fit the model: missing {missing or 'none'}, left over {extra or 'none'}")
    for name, leaf in wanted.items():
        if tuple(parameters[name].shape) != tuple(leaf.shape):
            raise InputError(f"parameter {name} has shape {list(parameters[name].shape)}; the model's config asks for {list(leaf.shape)}")


def map_named(function: Callable[[str, Any], Any], model: Tree) -> Tree:
    """`function(name, leaf)` at each parameter; the result has the model's structure."""
    return jax.tree.map_with_path(lambda path, leaf: function(_name(path), leaf), model)


def map_variables(function: Callable[[str, nnx.Variable[Any]], Any], model: GPT2) -> dict[str, Any]:
    """`function(name, variable)` for each parameter's NNX variable, which knows its logical axes (`variable.axes`)."""
    leaves = jax.tree.leaves_with_path(model, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return {_name(path): function(_name(path), leaf) for path, leaf in leaves}


def _name(path: tuple[Any, ...]) -> str:
    parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
    return ".".join(part for part in parts if part not in ("value", "raw_value"))
