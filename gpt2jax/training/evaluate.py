"""Validation inside a run. B batch, T tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gpt2jax.config import Config
from gpt2jax.data import TokenData
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import with_parameters
from gpt2jax.parallel.mesh import place_rows
from gpt2jax.tokenizer import Tokenizer
from gpt2jax.training.objective import summed_loss
from gpt2jax.training.signals import Signals
from gpt2jax.training.step import TrainState


def make_evaluate(config: Config, skeleton: GPT2, mesh: Mesh, tokenizer: Tokenizer, data: TokenData) -> Any:
    bytes_of_id = tokenizer.token_bytes()

    @jax.jit
    def batch_sum(parameters: dict[str, jax.Array], inputs_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
        model = with_parameters(skeleton, parameters)
        return summed_loss(model, inputs_BT, targets_BT, chunk=config.train.loss_chunk)[1]

    def evaluate(state: TrainState, signals: Signals) -> dict[str, float] | None:
        """Exact mean over all targets of the validation sequences; None if a signal came in between."""
        total, targets, text_bytes = 0.0, 0, 0
        batches: Iterable[tuple[np.ndarray, np.ndarray]] = data.eval_batches(config.eval.sequences)
        for inputs_BT, targets_BT in batches:
            rows, tokens = targets_BT.shape
            batch = place_rows(lambda part: (inputs_BT[part], targets_BT[part]), rows, tokens, mesh)  # noqa: B023
            total += float(batch_sum({**state.frozen, **state.parameters}, *batch))
            real = targets_BT[targets_BT >= 0]
            targets, text_bytes = targets + real.size, text_bytes + int(bytes_of_id[real].sum())
            if signals.number and jax.process_count() == 1:  # several stop together, between two steps
                return None
        return {"loss": total / targets, "bits_per_byte": total / math.log(2) / max(text_bytes, 1)}

    return evaluate
