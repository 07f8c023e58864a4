"""Low-rank adapters (LoRA; Hu et al., arXiv:2106.09685): x W becomes x W + alpha/rank (x A) B, and A and B alone are trained.

An adapted model has the parameters of the plain one under the same names, and beside a linear map's `.w` its `.lora_a` and `.lora_b`. R rank, I inputs.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gpt2jax.config import LoraConfig, ModelConfig
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.linear import Linear, add_bias, child_key, constant, contract, normal, turned
from gpt2jax.model.parameters import abstract_model, map_variables

_SUFFIXES = (".lora_a", ".lora_b")


class LoraLinear(nnx.Module):
    """A `Linear` and its adapter: x @ w + scale (x @ lora_a) @ lora_b + b, computed in `dtype`.

    lora_a: float32 [*inputs, R], from N(0, 1/I); lora_b: float32 [R, *outputs], zeros, so that the map is at first what it was. Nothing as large as w is made,
    forward or backward: of a layer the backward pass keeps x @ lora_a, R numbers a token, beside what the plain map keeps.
    """

    def __init__(self, linear: Linear, key: jax.Array, rank: int, scale: float) -> None:
        n, axes = linear.contracted, linear.w.axes
        inputs, outputs = linear.w.shape[:n], linear.w.shape[n:]
        self.w, self.b = linear.w, linear.b
        self.lora_a = normal(key, (*inputs, rank), (*axes[:n], None), 1 / math.sqrt(math.prod(inputs)))
        self.lora_b = constant((rank, *outputs), (None, *axes[n:]), 0.0)
        self.contracted, self.dtype, self.scale = n, linear.dtype, scale

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., *inputs] -> [..., *outputs] in `dtype`."""
        x, w, a, b = (part[...].astype(self.dtype) for part in (x, self.w, self.lora_a, self.lora_b))
        return add_bias(contract(x, w, self.contracted) + self.scale * contract(contract(x, a, self.contracted), b, 1), self.b)

    def turned(self) -> tuple[jax.Array, jax.Array | None]:
        """As `Linear.turned`."""
        return turned(self.w[...] + self.scale * contract(self.lora_a[...], self.lora_b[...], 1), self.contracted), None


def adapted(model: GPT2, lora: LoraConfig, key: jax.Array) -> GPT2:
    """The model with an adapter at each of the blocks' linear maps that lora.targets names. InputError for a name that none has."""
    known: set[str] = set()
    targets = lora.targets

    def change(module: Any, key: jax.Array) -> Any:
        module = nnx.clone(module)
        for name, part in vars(module).items():
            if isinstance(part, Linear):
                known.add(name)
                if targets is None or name in targets:
                    setattr(module, name, LoraLinear(part, child_key(key, name), lora.rank or 1, scale_of(lora)))
            elif isinstance(part, nnx.Module):
                setattr(module, name, change(part, child_key(key, name)))
        return module

    changed: Any = nnx.clone(model)
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(model.config.n_layer))
    if isinstance(model.blocks, tuple):
        changed.blocks = nnx.data(tuple(change(block, keys[i]) for i, block in enumerate(model.blocks)))
    else:
        changed.blocks = jax.lax.map(lambda layer: change(*layer), (model.blocks, keys))
    for target in targets or ():
        if target not in known:
            near = difflib.get_close_matches(target, known, 1, 0.3)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
            raise InputError(f"lora.targets: the model has no linear map {target}; {hint}")
    return changed


def abstract_adapted(config: ModelConfig, lora: LoraConfig) -> GPT2:
    """`abstract_model`, with adapters if lora.rank says so."""
    if lora.rank is None:
        return abstract_model(config)
    return jax.eval_shape(lambda: adapted(GPT2(config, jax.random.key(0)), lora, jax.random.key(0)))


def adapter_variables(model: GPT2) -> dict[str, Any]:
    """The variables of a model's adapters by name; none for a plain model. An optimizer takes them in place of the model."""
    variables = map_variables(lambda _, variable: variable, model)
    return {name: variable for name, variable in variables.items() if name.endswith(_SUFFIXES)}


def init_adapters(config: ModelConfig, lora: LoraConfig, key: jax.Array, shardings: Any = None) -> dict[str, jax.Array]:
    """The adapters' initial parameters by name, made in one compiled program that holds nothing else."""

    def make(key: jax.Array) -> dict[str, jax.Array]:
        return {name: variable[...] for name, variable in adapter_variables(adapted(GPT2(config, key), lora, child_key(key, "lora"))).items()}

    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None  # run once, as `init_parameters`
    return jax.jit(make, compiler_options=options, out_shardings=shardings)(key)


def merged(parameters: Mapping[str, jax.Array], lora: LoraConfig) -> dict[str, jax.Array]:
    """The plain model's parameters: w + scale A B, float32, for each adapter among them. The result's arrays lie as w does."""
    return _merged(dict(parameters), scale_of(lora))


@jax.jit
def _merged(parameters: dict[str, jax.Array], scale: float) -> dict[str, jax.Array]:
    plain = {name: leaf for name, leaf in parameters.items() if not name.endswith(_SUFFIXES)}
    for name, a in parameters.items():
        if name.endswith(_SUFFIXES[0]):
            stem = name.removesuffix(_SUFFIXES[0])
            w, b = plain[f"{stem}.w"], parameters[stem + _SUFFIXES[1]]
            layers = w.shape[: a.ndim + b.ndim - 2 - w.ndim]  # a stack has a leading axis in all three
            product = a.reshape(*layers, -1, a.shape[-1]) @ b.reshape(*layers, a.shape[-1], -1)
            plain[f"{stem}.w"] = w + scale * product.reshape(w.shape)
    return plain


def scale_of(lora: LoraConfig) -> float:
    """alpha / rank."""
    return lora.alpha / (lora.rank or 1)
