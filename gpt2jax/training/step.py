"""The training state and the one jitted step. B batch, T tokens, N micro-batches, M rows of one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2jax.config import Config, GuardConfig, ModelConfig
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.lora import adapter_variables
from gpt2jax.model.moe import BIAS, load_metrics, rebalanced
from gpt2jax.model.parameters import abstract_model, named_parameters, with_parameters
from gpt2jax.parallel.mesh import parameter_shardings, shardings_like
from gpt2jax.parallel.table import TABLE, constrain
from gpt2jax.training.guard import Guard, judge, select
from gpt2jax.training.objective import summed_loss_and_loads
from gpt2jax.training.optimizer import Averaged, gradient_point

Metrics = dict[str, jax.Array]
Batch = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step: step int32 (steps done), parameters float32 by name, optimizer state, and the guard's statistics if it has a
    guard. Data order and dropout follow from the step and the seed alone. frozen: parameters of the model that are not trained.

    A step of -1 - s says that the run has ended at the step after s: that one was not applied, and no later one changes anything.
    """

    step: jax.Array
    parameters: dict[str, jax.Array]
    optimizer: Any
    frozen: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    guard: Guard | None = None


def state_shardings(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, skeleton: GPT2 | None = None, *, guarded: bool = False
) -> TrainState:
    """Where each array of the state lies: parameters as the table says, the optimizer's state of a parameter as the parameter, single numbers everywhere. Of a
    `skeleton` with adapters these alone are trained."""
    skeleton = skeleton or abstract_model(config)
    placed, leaves = parameter_shardings(skeleton, mesh), named_parameters(skeleton)
    trained = adapter_variables(skeleton).keys() or leaves.keys()
    optimizer_state = shardings_like(jax.eval_shape(optimizer.init, {name: leaves[name] for name in trained}), placed, mesh)
    whole: Any = NamedSharding(mesh, PartitionSpec())
    parameters, frozen = ({name: placed[name] for name in names} for names in (trained, leaves.keys() - trained))
    guard = jax.tree.map(lambda _: whole, jax.eval_shape(Guard.start)) if guarded else None
    return TrainState(whole, parameters, optimizer_state, frozen, guard)  # type: ignore[arg-type]


def abstract_state(optimizer: optax.GradientTransformation, shardings: TrainState, skeleton: GPT2) -> TrainState:
    """Shapes, dtypes and places of what is trained, as `jax.ShapeDtypeStruct`: what a checkpoint is restored into, at no cost."""
    leaves = named_parameters(skeleton)
    parameters = {name: leaves[name] for name in shardings.parameters}
    guard = None if shardings.guard is None else jax.eval_shape(Guard.start)
    like = TrainState(jax.ShapeDtypeStruct((), jnp.int32), parameters, jax.eval_shape(optimizer.init, parameters), guard=guard)  # type: ignore[arg-type]
    places = dataclasses.replace(shardings, frozen={})
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), like, places)


def init_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    shardings: TrainState | None = None,
    *,
    parameters: dict[str, jax.Array] | None = None,
    frozen: dict[str, jax.Array] | None = None,
) -> TrainState:
    """The state before the first step; initial values depend on the seed alone, unless `parameters` are given. With shardings, each device makes its own part:
    none holds the whole, and there is a guard if they have one."""
    if parameters is None:
        parameters = init_parameters(config, jax.random.key(seed), None if shardings is None else shardings.parameters)
    optimizer_state = jax.jit(optimizer.init, out_shardings=None if shardings is None else shardings.optimizer)(parameters)
    place = None if shardings is None else shardings.step
    guard = None if shardings is None or shardings.guard is None else jax.device_put(Guard.start(), place)
    return TrainState(jax.device_put(jnp.int32(0), place), parameters, optimizer_state, frozen or {}, guard)


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
    *,
    loss_chunk: int | None = None,
    z_loss: float = 0.0,
    accumulation: int = 1,
    skeleton: GPT2 | None = None,
    guard: GuardConfig | None = None,
    separator: int | None = None,
) -> Callable[[TrainState, Batch, Batch], tuple[TrainState, Metrics]]:
    """step(state, inputs, targets) -> (state, metrics): jitted, the old state donated; inputs and targets int32 [B, T].

    The batch is run in `accumulation` micro-batches, a divisor of B. Each target that counts has the same weight in the gradient, whichever micro-batch it is
    in (a mean of their means would give those of a short one more), and the schedule counts optimizer steps. See `summed_loss` for loss_chunk, z_loss and
    separator.
    skeleton: the abstract model that the state's parameters, trained and frozen, fill; None means config's.
    A step whose loss or gradient norm is not finite leaves parameters and optimizer as they were; `guard` says what else does (see `judge`).
    Metrics: loss (nats a target, without the z-loss and routers' losses), grad_norm (before clipping), lr, targets (those that count), z and applied (the
    guard's verdict), and with experts `load_metrics` of the whole batch, from which their biases follow: no gradient moves those.
    InputError if the platform can't do `remat`.
    """
    _check_remat(remat)
    guard = guard or GuardConfig()
    skeleton = skeleton or abstract_model(config)
    dropped = config.embd_pdrop or config.attn_pdrop or config.resid_pdrop
    no_loads = jnp.zeros((config.n_layer, config.moe_experts)) if config.mlp == "moe" else None

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))
    def step(state: TrainState, inputs_BT: jax.Array, targets_BT: jax.Array) -> tuple[TrainState, Metrics]:
        done = jnp.maximum(state.step, -1 - state.step)
        key = jax.random.fold_in(jax.random.key(seed), done) if dropped else None
        targets, point = (targets_BT >= 0).sum(), gradient_point(state.parameters, state.optimizer)

        def run(parameters: dict[str, jax.Array], inputs_MT: jax.Array, targets_MT: jax.Array, key: jax.Array | None) -> tuple[Any, dict[str, jax.Array]]:
            """A micro-batch's share of the mean over the whole batch's targets, and its gradient."""

            def loss_of(parameters: dict[str, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
                model = with_parameters(skeleton, {**state.frozen, **parameters})
                total, loss, loads = summed_loss_and_loads(model, inputs_MT, targets_MT, key, remat, loss_chunk, z_loss, separator)
                return total / jnp.maximum(targets, 1), (loss / jnp.maximum(targets, 1), loads)

            (_, measured), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
            return measured, gradients if shardings is None else jax.lax.with_sharding_constraint(gradients, shardings.parameters)

        if accumulation == 1:
            (loss, loads), gradients = run(point, inputs_BT, targets_BT, key)
        else:

            def add(sums: Any, part: Any) -> tuple[Any, None]:
                i, inputs_MT, targets_MT = part
                part_key = None if key is None else jax.random.fold_in(key, i)
                return jax.tree.map(jnp.add, sums, run(point, inputs_MT, targets_MT, part_key)), None

            zeros = ((jnp.float32(0), no_loads), jax.tree.map(jnp.zeros_like, point))
            parts = (jnp.arange(accumulation), micro_batches(inputs_BT, accumulation), micro_batches(targets_BT, accumulation))
            ((loss, loads), gradients), _ = jax.lax.scan(add, zeros, parts)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        norm = optax.tree.norm(gradients)
        verdict, statistics = judge(state.guard, guard, loss, norm)
        runs = state.step >= 0
        applies = runs & verdict.applies
        new = (optax.apply_updates(state.parameters, updates), optimizer_state)
        if loads is not None and config.moe_bias_rate and BIAS in state.parameters:
            new = _rebalance(new, loads, config.moe_bias_rate)
        parameters, optimizer_state = select(applies, new, (state.parameters, state.optimizer))
        updates_done = done if state.guard is None else done - state.guard.skipped  # the optimizer's own count, which its schedule goes by
        metrics = {"loss": loss, "grad_norm": norm, "lr": learning_rate * schedule(updates_done), "targets": targets, "z": verdict.z, "applied": applies}
        metrics |= {} if loads is None else load_metrics(loads)
        next_step = jnp.where(runs, jnp.where(verdict.halts, -1 - done, done + 1), state.step)
        return TrainState(next_step, parameters, optimizer_state, state.frozen, select(runs, statistics, state.guard)), metrics

    return step


def _rebalance(new: tuple[dict[str, jax.Array], Any], loads_LE: jax.Array, rate: float) -> tuple[dict[str, jax.Array], Any]:
    """Parameters and optimizer state with the experts' biases of the next step; those that gradients are taken at are no average."""
    parameters, optimizer = new
    bias = rebalanced(gradient_point(parameters, optimizer)[BIAS], loads_LE, rate)
    if isinstance(optimizer, Averaged):
        optimizer = optimizer._replace(trained={**optimizer.trained, BIAS: bias})
    return {**parameters, BIAS: bias}, optimizer


def _check_remat(remat: str) -> None:
    device = jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if remat == "offload" and "pinned_host" not in kinds:
        raise InputError(f"train.remat=offload needs pinned_host memory, and this {device.platform} has {', '.join(kinds)} only; use train.remat=dots")


def micro_batches(rows_BT: jax.Array, number: int) -> jax.Array:
    """[B, T] -> [N, M, T]: micro-batch i has every N-th row from i on, so that each device runs rows that it holds."""
    B, T = rows_BT.shape
    if B % number:
        raise InputError(f"a batch of {B} rows does not split into {number} micro-batches; make it a multiple of {number}")
    return constrain(rows_BT.reshape(B // number, number, T).swapaxes(0, 1), (None, "batch", "tokens"))


def check_accumulation(config: Config, mesh: Mesh) -> None:
    """InputError, before anything is compiled, unless each device has rows of each micro-batch."""
    number, rows = config.train.accumulation, config.train.batch_size
    parts = math.prod(mesh.shape[name] for name in TABLE["batch"])
    if rows % (number * parts):
        micro = f"{number} micro-batches (train.accumulation) on mesh {' x '.join(TABLE['batch'])}={parts}"
        raise InputError(f"train.batch_size={rows} cannot be shared evenly by {micro}; make it a multiple of {number * parts}")
