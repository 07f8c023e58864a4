"""The guard against loss spikes: whether a step is applied, decided on the device from running statistics of the loss and the gradient's norm."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gpt2jax.config import GuardConfig

#: The least deviation that counts as one standard deviation, as a share of the mean: a run whose loss hardly moves is not stopped for moving a little.
_LEAST_DEVIATION = 0.01


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guard:
    """Statistics of the steps applied so far: mean and variance float32 [2] of (loss, gradient norm); steps applied, skipped, and skipped at last in a row,
    int32."""

    mean: jax.Array
    variance: jax.Array
    applied: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array

    @classmethod
    def start(cls) -> Guard:
        return cls(jnp.zeros(2), jnp.zeros(2), *(jnp.int32(0) for _ in range(3)))


class Verdict(NamedTuple):
    """On one step, scalars: whether it is applied, whether the run ends with it (bool), and how many standard deviations above its mean the loss or the norm
    is, whichever is more (float32; 0 in the warm-up, infinite if one of them is not finite)."""

    applies: jax.Array
    halts: jax.Array
    z: jax.Array


def judge(guard: Guard | None, config: GuardConfig, loss: jax.Array, grad_norm: jax.Array) -> tuple[Verdict, Guard | None]:
    """The verdict on a step, and the statistics with it in them. Only steps that are applied enter them. Without a guard: what is not finite ends the run."""
    measured = jnp.stack([loss, grad_norm])
    finite = jnp.isfinite(measured).all()
    if guard is None:
        return Verdict(finite, ~finite, jnp.where(finite, 0.0, jnp.inf)), None
    deviation = jnp.maximum(jnp.sqrt(guard.variance), _LEAST_DEVIATION * jnp.abs(guard.mean))
    z = jnp.where(guard.applied >= config.warmup, ((measured - guard.mean) / deviation).max(), 0.0)
    z = jnp.where(finite, z, jnp.inf)
    applies = z <= config.threshold
    in_a_row = jnp.where(applies, 0, guard.in_a_row + 1)
    halts = in_a_row >= (config.patience if config.action == "skip" else 1)
    # a plain mean at first, then an exponential one (West 1979, doi:10.1145/359146.359153)
    share = jnp.maximum(1 / (guard.applied + 1), 1 - config.decay)
    off = measured - guard.mean
    mean, variance = guard.mean + share * off, (1 - share) * (guard.variance + share * off**2)
    mean, variance = select(applies, (mean, variance), (guard.mean, guard.variance))
    return Verdict(applies, halts, z), Guard(mean, variance, guard.applied + applies, guard.skipped + ~applies, in_a_row)


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """One of two trees. Array by array inside the loop that makes the new one, so that no second copy is held."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
