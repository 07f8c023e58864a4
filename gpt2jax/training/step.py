"""The training state and the one jitted step. B batch, T tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2jax.config import ModelConfig
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import abstract_model, named_parameters, with_parameters
from gpt2jax.parallel.mesh import parameter_shardings, shardings_like
from gpt2jax.training.objective import mean_loss

Metrics = dict[str, jax.Array]
Batch = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step: step int32 (optimizer steps done), parameters float32 by name, optimizer state. Data order and dropout follow
    from the step and the seed alone."""

    step: jax.Array
    parameters: dict[str, jax.Array]
    optimizer: Any


def state_shardings(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Where each array of the state lies: parameters as the table says, the optimizer's state of a parameter as the parameter."""
    skeleton = abstract_model(config)
    placed = parameter_shardings(skeleton, mesh)
    optimizer_state = jax.eval_shape(optimizer.init, named_parameters(skeleton))
    return TrainState(NamedSharding(mesh, PartitionSpec()), placed, shardings_like(optimizer_state, placed, mesh))  # type: ignore[arg-type]


def init_state(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int, shardings: TrainState | None = None) -> TrainState:
    """The state before the first step; initial values depend on the seed alone. With shardings, each device makes its own part: none holds the whole."""
    parameters = init_parameters(config, jax.random.key(seed), None if shardings is None else shardings.parameters)
    optimizer_state = jax.jit(optimizer.init, out_shardings=None if shardings is None else shardings.optimizer)(parameters)
    return TrainState(jax.device_put(jnp.int32(0), None if shardings is None else shardings.step), parameters, optimizer_state)


def init_parameters(config: ModelConfig, key: jax.Array, shardings: Any = None) -> dict[str, jax.Array]:
    """The initial parameters by name, made in one compiled program."""
    # run once, so compiling it is what costs: unoptimised code takes a quarter of the time on a CPU, where the random draws are the slow part
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(lambda key: named_parameters(GPT2(config, key)), compiler_options=options, out_shardings=shardings)(key)


def make_train_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[Any], Any],
    learning_rate: float,
    seed: int,
    remat: str = "none",
    shardings: TrainState | None = None,
) -> Callable[[TrainState, Batch, Batch], tuple[TrainState, Metrics]]:
    """step(state, inputs, targets) -> (state, metrics): jitted, the old state donated; inputs and targets int32 [B, T].

    Metrics: loss (nats a target), grad_norm (before clipping), lr, targets (those that count).
    """
    skeleton = abstract_model(config)
    dropped = config.embd_pdrop or config.attn_pdrop or config.resid_pdrop

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))
    def step(state: TrainState, inputs_BT: jax.Array, targets_BT: jax.Array) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step) if dropped else None

        def loss_of(parameters: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return mean_loss(with_parameters(skeleton, parameters), inputs_BT, targets_BT, key, remat)

        (loss, targets), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.parameters)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradients), "lr": learning_rate * schedule(state.step), "targets": targets}
        return TrainState(state.step + 1, optax.apply_updates(state.parameters, updates), optimizer_state), metrics

    return step
