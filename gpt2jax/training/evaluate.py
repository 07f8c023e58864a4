"""Validation inside a run, and benchmarks beside it. B batch, T tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2jax.analysis.evals import Benchmark, batches, hellaswag, lambada, row_scores
from gpt2jax.config import Config, EvalConfig
from gpt2jax.data import TokenData
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import with_parameters
from gpt2jax.parallel.mesh import place_rows
from gpt2jax.parallel.table import TABLE
from gpt2jax.tokenizer import Tokenizer
from gpt2jax.training.objective import summed_loss
from gpt2jax.training.signals import Signals
from gpt2jax.training.step import TrainState


def make_evaluate(config: Config, skeleton: GPT2, mesh: Mesh, tokenizer: Tokenizer, data: TokenData) -> Any:
    bytes_of_id, measure = tokenizer.token_bytes(), _make_measure(config, skeleton, mesh, tokenizer)

    @jax.jit
    def batch_sum(parameters: dict[str, jax.Array], inputs_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
        model = with_parameters(skeleton, parameters)
        return summed_loss(model, inputs_BT, targets_BT, chunk=config.train.loss_chunk, separator=config.separator)[1]

    def evaluate(state: TrainState, signals: Signals) -> dict[str, float] | None:
        """Exact mean over all targets of the validation sequences; None if a signal came in between."""
        total, targets, text_bytes = 0.0, 0, 0
        validation: Iterable[tuple[np.ndarray, np.ndarray]] = data.eval_batches(config.eval.sequences)
        for i, (inputs_BT, targets_BT) in enumerate(validation, start=1):
            rows, tokens = targets_BT.shape
            batch = place_rows(lambda part: (inputs_BT[part], targets_BT[part]), rows, tokens, mesh)  # noqa: B023
            total += float(batch_sum({**state.frozen, **state.parameters}, *batch))
            real = targets_BT[targets_BT >= 0]
            targets, text_bytes = targets + real.size, text_bytes + int(bytes_of_id[real].sum())
            if signals.heard(i, every=8):
                return None
        scores = measure(state, signals)
        return None if scores is None else {"loss": total / targets, "bits_per_byte": total / math.log(2) / max(text_bytes, 1), **scores}

    return evaluate


def benchmarks(config: EvalConfig, tokenizer: Tokenizer) -> list[Benchmark]:
    """Those that config names, read and checked."""
    made = [hellaswag(config.hellaswag, tokenizer, config.hellaswag_form, config.examples)] if config.hellaswag else []
    return made + ([lambada(config.lambada, tokenizer, config.examples)] if config.lambada else [])


def _make_measure(config: Config, skeleton: GPT2, mesh: Mesh, tokenizer: Tokenizer) -> Any:
    scores = jax.jit(
        lambda parameters, inputs_BT, targets_BT: row_scores(with_parameters(skeleton, parameters), inputs_BT, targets_BT),
        out_shardings=NamedSharding(mesh, PartitionSpec()),  # whole everywhere, so that each process can read them
    )
    # rows that all devices share evenly, some 32 on each
    parts = math.prod(mesh.shape[name] for name in TABLE["batch"])
    made, size = benchmarks(config.eval, tokenizer), 32 * parts

    def measure(state: TrainState, signals: Signals) -> dict[str, float] | None:
        metrics: dict[str, float] = {}
        for benchmark in made:
            log_probs, greedy = np.zeros(len(benchmark.rows)), np.zeros(len(benchmark.rows), bool)
            for i, (places, inputs_BT, targets_BT) in enumerate(batches(benchmark.rows, size, config.model.n_positions), start=1):
                batch = place_rows(lambda part: (inputs_BT[part], targets_BT[part]), size, inputs_BT.shape[1], mesh)  # noqa: B023
                totals, hits = scores({**state.frozen, **state.parameters}, *batch)
                log_probs[places], greedy[places] = np.asarray(totals)[: len(places)], np.asarray(hits)[: len(places)]
                if signals.heard(i, every=8):
                    return None
            metrics |= benchmark.measure(log_probs, greedy)
        return metrics

    return measure
