"""Optimizers and the learning-rate schedule, from optax, over parameters by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from gpt2jax.config import OptimizerConfig
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import map_variables


def make_schedule(config: OptimizerConfig, steps: int) -> Callable[[Any], Any]:
    """Share of the peak learning rate at each step (counted from 0): linear warm-up, then a cosine down to final_fraction."""
    decay_steps = config.decay_steps or steps
    warmup = min(config.warmup_steps, max(decay_steps - 1, 0))
    ramp = optax.linear_schedule(1.0 / max(warmup, 1), 1.0, max(warmup - 1, 1))
    cosine = optax.cosine_decay_schedule(1.0, max(decay_steps - warmup, 1), alpha=config.final_fraction)
    return optax.join_schedules([ramp, cosine], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int, model: GPT2) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (Loshchilov & Hutter, arXiv:1711.05101) or Muon (Jordan et al. 2024) with AdamW on all but the blocks' matrices.

    Works on `named_parameters(model)`; `model` may be abstract.
    """
    schedule = make_schedule(config, steps)
    at_rate: Callable[[float], Callable[[Any], Any]] = lambda peak: lambda step: peak * schedule(step)  # noqa: E731
    decayed = decay_mask(model)
    if config.name == "muon":
        update = muon(
            at_rate(config.matrix_learning_rate),
            weight_decay=config.weight_decay,
            weight_decay_mask=lambda parameters: jax.tree.map(lambda _: True, parameters),
            adam_learning_rate=at_rate(config.learning_rate),
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            eps=config.eps,
            muon_weight_dimension_numbers=muon_matrices(model),
        )
    else:
        rate = at_rate(config.learning_rate)
        update = optax.adamw(rate, b1=config.beta1, b2=config.beta2, eps=config.eps, weight_decay=config.weight_decay, mask=decayed)
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, update)


def decay_mask(model: GPT2) -> dict[str, bool]:
    """Which parameters weight decay pulls on: the matrices (two logical axes or more), token and position tables included, as in nanoGPT; no bias, no scale.

    A bias of several axes, such as a query's [heads, head], is no matrix: names ending in `.b` never decay.
    """
    return map_variables(lambda name, variable: len(variable.axes) >= 2 and not name.endswith(".b"), model)


def muon_matrices(model: GPT2) -> dict[str, MuonDimensionNumbers | None]:
    """The blocks' weights as matrices for Muon: which axes are input and output. Stacked layers, and the key/value axis, are separate matrices."""

    def dimensions(name: str, variable: Any) -> MuonDimensionNumbers | None:
        if not (name.startswith("blocks.") and name.endswith(".w")):
            return None
        named = [1 + i for i, axis in enumerate(variable.axes) if axis is not None]
        inputs = tuple(i for i in named if i <= variable.inputs)
        return MuonDimensionNumbers(inputs, tuple(i for i in named if i > variable.inputs))

    return map_variables(dimensions, model)
