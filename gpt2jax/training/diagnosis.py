"""Why a step is not finite: which layer goes wrong first, and which rows of the batch. B batch, T tokens, D width, L layers, N micro-batches, M rows of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2jax.config import Config
from gpt2jax.model.cache import Span
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import with_parameters
from gpt2jax.parallel.table import STREAM, constrain
from gpt2jax.training.objective import documents, summed_loss, token_losses
from gpt2jax.training.optimizer import gradient_point
from gpt2jax.training.step import TrainState, micro_batches

Flags = dict[str, jax.Array]


def diagnose(config: Config, skeleton: GPT2, state: TrainState, inputs_BT: jax.Array, targets_BT: jax.Array) -> str:
    """What is wrong with this step, in words, from running it again at parameters that it has left as they were. int32 [B, T]; without dropout.

    Names parameters that are not finite to begin with; the first layer whose output is not finite, and the rows whose loss is not; or, where the forward
    pass is finite, the parameters whose gradient is not. Every process must call it.
    """
    point, number = gradient_point(state.parameters, state.optimizer), config.train.accumulation
    everywhere = state.step.sharding
    parameters = _named(jax.jit(lambda point: _bad(point), out_shardings=everywhere)(point))
    found = [f"before the step {_listed(parameters)} {'is' if len(parameters) == 1 else 'are'} not finite"] if parameters else []

    def forward(part: tuple[jax.Array, jax.Array]) -> tuple[tuple[Flags, Flags, Flags], jax.Array]:
        return _forward(with_parameters(skeleton, {**state.frozen, **point}), *part, config)

    parts = (micro_batches(inputs_BT, number), micro_batches(targets_BT, number))
    stages, rows_NM = jax.jit(lambda parts: jax.lax.map(forward, parts), out_shardings=everywhere)(parts)
    first = _first(*jax.tree.map(_any, stages))
    rows = np.flatnonzero(np.asarray(rows_NM).T.reshape(-1))  # micro-batch i has every N-th row from i on
    if first:
        found.append(f"the first output that is not finite is that of {first}")
    if rows.size:
        found.append(f"the loss is not finite in {rows.size} of the batch's {len(targets_BT)} rows ({_listed(list(map(str, rows)))})")
    if not first and not rows.size:

        def backward(part: tuple[jax.Array, jax.Array]) -> Flags:
            how = config.train

            def loss(point: Any) -> jax.Array:
                model = with_parameters(skeleton, {**state.frozen, **point})
                return summed_loss(model, *part, None, how.remat, how.loss_chunk, how.z_loss, config.separator)[0]

            return _bad(jax.grad(loss)(point))

        flags = jax.jit(lambda parts: jax.lax.map(backward, parts), out_shardings=everywhere)(parts)
        gradients = _named(jax.tree.map(_any, flags))
        found.append(f"the forward pass is finite, and the gradient of {_listed(gradients)} is not" if gradients else "without dropout all is finite")
    return "; ".join(found)


def _forward(model: GPT2, inputs_MT: jax.Array, targets_MT: jax.Array, config: Config) -> tuple[tuple[Flags, Flags, Flags], jax.Array]:
    """Which outputs are not finite, in the order in which they are made, before the blocks (bool), in them (bool [L]) and after; and which rows' losses
    (bool [M])."""
    M, T = inputs_MT.shape
    span = Span.of((M, T), None, documents(inputs_MT, config.separator))
    before: Flags = {}
    after: Flags = {}
    x_MTD = constrain(_noting("the embedding", model._embed, before)(inputs_MT, span, None), STREAM)

    def run(x_MTD: jax.Array, block: Any) -> tuple[jax.Array, Flags]:
        notes: Flags = {}
        x_MTD, _ = _noting("residual sum", _with_notes(block, notes), notes)(x_MTD, span)
        return x_MTD, notes

    x_MTD, blocks = jax.lax.scan(run, x_MTD, model.blocks)
    x_MTD = _noting("the final norm", model.norm, after)(x_MTD)

    def losses(x_MCD: jax.Array, targets_MC: jax.Array) -> jax.Array:
        return ~jnp.isfinite(token_losses(model.padded_logits(x_MCD), targets_MC)[0]).all(-1)

    # as many tokens at once as the loss of a step would hold the logits of
    C = next(C for C in range(min(T, max((config.train.loss_chunk or M * T) // M, 1)), 0, -1) if T % C == 0)
    pieces = (x_MTD.reshape(M, T // C, C, -1).swapaxes(0, 1), targets_MT.reshape(M, T // C, C).swapaxes(0, 1))
    rows_M = jax.lax.map(lambda piece: losses(*piece), pieces).any(0)
    return (before, blocks, {**after, "the logits": rows_M.any()}), rows_M


def _with_notes(block: Any, notes: Flags) -> Any:
    """The block, with modules inside that note whether what they return is finite: whichever components it is made of."""
    watched = object.__new__(type(block))
    vars(watched).update({name: _noting(name, part, notes) if _is_module(part) else part for name, part in vars(block).items()})
    return watched


def _is_module(part: Any) -> bool:
    return callable(part) and hasattr(part, "__dict__") and bool(jax.tree.leaves(part))


def _noting(name: str, call: Callable[..., Any], notes: Flags) -> Callable[..., Any]:
    def noted(*arguments: Any, **options: Any) -> Any:
        out = call(*arguments, **options)
        notes[name] = ~jnp.isfinite(out[0] if isinstance(out, tuple) else out).all()
        return out

    return noted


def _any(flag: jax.Array) -> np.ndarray:
    """Over the micro-batches."""
    return np.asarray(np.asarray(flag).any(0))


def _bad(parameters: dict[str, jax.Array]) -> Flags:
    """Which parameters are not finite: bool, or bool [L] of those of stacked blocks."""
    return {name: ~jnp.isfinite(leaf).all(tuple(range(name.startswith("blocks."), leaf.ndim))) for name, leaf in parameters.items()}


def _named(flags: dict[str, Any]) -> list[str]:
    """The parameters whose flag is set, with the blocks."""
    found = []
    for name, flag in flags.items():
        layers = np.flatnonzero(np.asarray(flag))
        found += [f"{name} of block {layer}" if name.startswith("blocks.") else name for layer in layers]
    return found


def _first(before: Flags, blocks: Flags, after: Flags) -> str | None:
    """The first flag that is set, in the order in which a forward pass comes by."""
    in_blocks = [(layer, place, name) for place, (name, flag_L) in enumerate(blocks.items()) for layer in np.flatnonzero(np.asarray(flag_L))]
    words = [name for name, flag in before.items() if flag]
    words += [f"block {layer}'s {name}" for layer, _, name in sorted(in_blocks)]
    return next(iter([*words, *(name for name, flag in after.items() if flag)]), None)


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)
