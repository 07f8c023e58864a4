"""Optimizers and the learning-rate schedule, from optax, over parameters by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from gpt2jax.config import OptimizerConfig
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import map_variables

Schedule = Callable[[Any], Any]
Parameters = dict[str, jax.Array]


def make_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """Share of the peak learning rate at each optimizer step (counted from 0): linear warm-up, then `config.schedule` down to final_fraction at decay_steps.

    wsd: warm-up, stable, decay (Hu et al., arXiv:2404.06395; linear as in Haegele et al., arXiv:2405.18392).
    """
    decay_steps = config.decay_steps or steps
    warmup = min(config.warmup_steps, max(decay_steps - 1, 0))
    rest, final = max(decay_steps - warmup, 1), config.final_fraction
    ramp = optax.linear_schedule(1.0 / max(warmup, 1), 1.0, max(warmup - 1, 1))
    decay = min(max(round(config.decay_fraction * decay_steps), 1), rest)
    after: Schedule = {
        "cosine": optax.cosine_decay_schedule(1.0, rest, alpha=final),
        "constant": optax.constant_schedule(1.0),
        "linear": optax.linear_schedule(1.0, final, rest),
        "wsd": optax.linear_schedule(1.0, final, decay, rest - decay),
    }[config.schedule]
    return optax.join_schedules([ramp, after], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int, model: GPT2) -> optax.GradientTransformation:
    """Clipping by global norm, the update that `config.name` says, and with ema_decay an average of the weights (`averaged`).

    Weight decay is decoupled (Loshchilov & Hutter, arXiv:1711.05101), times the learning rate, and pulls on `decay_mask` alone. Works on
    `named_parameters(model)`; `model` may be abstract, and may be `adapter_variables` of one.
    """
    schedule = make_schedule(config, steps)
    update = OPTIMIZERS[config.name](config, lambda peak: lambda step: peak * schedule(step), model)
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    optimizer = optax.chain(clip, update)
    return optimizer if config.ema_decay is None else averaged(optimizer, config.ema_decay)


AtRate = Callable[[float], Schedule]


def _adamw(config: OptimizerConfig, at_rate: AtRate, model: GPT2) -> optax.GradientTransformation:
    rate = at_rate(config.learning_rate)
    return optax.adamw(rate, b1=config.beta1, b2=config.beta2, eps=config.eps, weight_decay=config.weight_decay, mask=decay_mask(model))


def _muon(config: OptimizerConfig, at_rate: AtRate, model: GPT2) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) with AdamW on all but the blocks' matrices, without decay there (optax offers that part no mask)."""
    return muon(
        at_rate(config.matrix_learning_rate),
        weight_decay=config.weight_decay,
        weight_decay_mask=lambda parameters: jax.tree.map(lambda _: True, parameters),
        adam_learning_rate=at_rate(config.learning_rate),
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        eps=config.eps,
        muon_weight_dimension_numbers=muon_matrices(model),
    )


def _lion(config: OptimizerConfig, at_rate: AtRate, model: GPT2) -> optax.GradientTransformation:
    """Chen et al., arXiv:2302.06675."""
    return optax.lion(at_rate(config.learning_rate), b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=decay_mask(model))


def _adafactor(config: OptimizerConfig, at_rate: AtRate, model: GPT2) -> optax.GradientTransformation:
    """Shazeer & Stern, arXiv:1804.04235: second moments of a matrix as one number a row and a column, updates clipped at a root mean square of 1.

    Without momentum, and without scaling by the parameter's size, so that a learning rate means what it does to AdamW. (The decay of optax.adafactor is not
    times the learning rate.)
    """
    factored = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    return _with_decay(_as_matrices(factored, model), config, at_rate, model)


def _sgd(config: OptimizerConfig, at_rate: AtRate, model: GPT2) -> optax.GradientTransformation:
    """Heavy-ball momentum: m = beta1 m + gradient."""
    return _with_decay(optax.trace(config.beta1), config, at_rate, model)


def _with_decay(update: optax.GradientTransformation, config: OptimizerConfig, at_rate: AtRate, model: GPT2) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(config.weight_decay, decay_mask(model))
    return optax.chain(update, decay, optax.scale_by_learning_rate(at_rate(config.learning_rate)))


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, AtRate, GPT2], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "muon": _muon,
    "lion": _lion,
    "adafactor": _adafactor,
    "sgd": _sgd,
}


class Averaged(NamedTuple):
    """State of `averaged`: the weights that gradients are taken at, the optimizer's own state, and the number of updates done (int32)."""

    trained: Parameters
    inner: Any
    done: jax.Array


def averaged(inner: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """An exponential moving average of the weights that `inner` trains (Polyak averaging).

    The parameters that it updates are the average, which is therefore what is validated, saved as a checkpoint's parameters, loaded and sampled; the weights
    that it follows are in its own state, and gradients are to be taken there (`gradient_point`). The decay is at most (1 + t) / (10 + t) at update t, so that
    the initial values are soon forgotten (as TensorFlow's ExponentialMovingAverage).
    """

    def init(parameters: Parameters) -> Averaged:
        return Averaged(jax.tree.map(jnp.copy, parameters), inner.init(parameters), jnp.int32(0))

    def update(gradients: Parameters, state: Averaged, parameters: Parameters) -> tuple[Parameters, Averaged]:
        updates, inner_state = inner.update(gradients, state.inner, state.trained)
        trained = optax.apply_updates(state.trained, updates)
        keep = jnp.minimum(decay, (1.0 + state.done) / (10.0 + state.done))
        moves = jax.tree.map(lambda average, new: (1.0 - keep) * (new - average), parameters, trained)
        return moves, Averaged(trained, inner_state, state.done + 1)

    return optax.GradientTransformation(init, update)


def gradient_point(parameters: Parameters, optimizer_state: Any) -> Parameters:
    """The weights at which the next gradient is to be taken: the parameters, but for an average of them."""
    return optimizer_state.trained if isinstance(optimizer_state, Averaged) else parameters


def _as_matrices(inner: optax.GradientTransformation, model: GPT2) -> optax.GradientTransformation:
    """`inner` on the blocks' weights as [layers, inputs, outputs], where a weight has an axis of heads as well."""

    def shape(name: str, variable: Any) -> tuple[int, ...]:
        if not (name.startswith("blocks.") and name.endswith(".w")):
            return tuple(variable.shape)
        first = 1 + variable.inputs
        return variable.shape[0], math.prod(variable.shape[1:first]), math.prod(variable.shape[first:])

    shapes = map_variables(shape, model)
    fold = lambda tree: {name: leaf.reshape(shapes[name]) for name, leaf in tree.items()}  # noqa: E731

    def update(gradients: Parameters, state: Any, parameters: Parameters) -> tuple[Parameters, Any]:
        updates, state = inner.update(fold(gradients), state, fold(parameters))
        return {name: leaf.reshape(gradients[name].shape) for name, leaf in updates.items()}, state

    return optax.GradientTransformation(lambda parameters: inner.init(fold(parameters)), update)


def decay_mask(model: GPT2) -> dict[str, bool]:
    """Which parameters weight decay pulls on: the matrices (two logical axes or more), token and position tables included, as in nanoGPT; no bias, no scale.

    A bias of several axes, such as a query's [heads, head], is no matrix: names ending in `.b` never decay.
    """
    return map_variables(lambda name, variable: len(variable.axes) >= 2 and not name.endswith(".b"), model)


def muon_matrices(model: GPT2) -> dict[str, MuonDimensionNumbers | None]:
    """The blocks' weights as matrices for Muon: which axes are input and output. Stacked layers, experts, and the key/value axis, are separate matrices."""

    def dimensions(name: str, variable: Any) -> MuonDimensionNumbers | None:
        if not (name.startswith("blocks.") and name.endswith(".w")):
            return None
        named = [1 + i for i, axis in enumerate(variable.axes) if axis not in (None, "experts")]
        inputs = tuple(i for i in named if i <= variable.inputs)
        return MuonDimensionNumbers(inputs, tuple(i for i in named if i > variable.inputs))

    return map_variables(dimensions, model)
