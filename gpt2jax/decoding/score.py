"""`gpt2jax.score`: how likely texts are under a model, token by token.

Letters: B rows, T padded tokens, D width, N = B T, P padded vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from gpt2jax.config import ModelConfig
from gpt2jax.decoding.loop import power_of_two, prompt_bucket
from gpt2jax.decoding.request import Prompt, end_of_text_id, prompt_ids
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.parallel.table import in_mesh_of

if TYPE_CHECKING:
    from gpt2jax.tokenizer import Tokenizer

#: Padded tokens of one forward pass, where a text is not longer on its own.
BATCH_TOKENS = 4096
#: Tokens whose logits exist at one time: 25 MB with GPT-2's vocabulary. Those of a whole batch would take 800.
CHUNK = 128


@dataclasses.dataclass(frozen=True)
class Score:
    """tokens: the scored ids; logprobs: the natural logarithm of each one's probability after everything before it. text_bytes: bytes of text that they stand
    for, where a tokenizer is known."""

    tokens: list[int]
    logprobs: list[float]
    text_bytes: int | None = None

    @property
    def total(self) -> float:
        """The log-probability of the whole."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean surprise a token."""
        return math.exp(-self.total / len(self.logprobs))

    @property
    def bits_per_byte(self) -> float | None:
        """Surprise in bits by bytes of text, which models of different tokenizers share. None where there are no bytes."""
        return -self.total / math.log(2) / self.text_bytes if self.text_bytes else None


def score(model: GPT2, texts: Sequence[Prompt], *, tokenizer: Tokenizer | None = None, context: Prompt | Sequence[Prompt] | None = None) -> list[Score]:
    """The log-probability of each token of each text, in float32.

    texts: strings (with `tokenizer=`) or lists of token ids, of any lengths together. context: what stands before them, one for all or one for each; its own
    tokens are not scored, and it is tokenized apart from the text. Without it a text stands behind the end-of-text token (the model's own, else the
    tokenizer's); where there is none, its first token has nothing to follow and is not scored.

    A text's score does not depend on the texts beside it. The first call for a new padded length (16, 32, 64, ... tokens) and number of texts compiles.

    Raises InputError, before any compute, for an empty list or text, an id outside the vocabulary, a string without a tokenizer, or a text that does not fit
    the model's context. Also if the model's logits turn out not to be finite.
    """
    rows = _checked(model.config, texts, tokenizer, context)
    results: list[list[float]] = [[] for _ in rows]
    for length, places in _batches([len(before) + len(ids) - 1 for before, ids in rows], model.config.context).items():
        size = max(1, BATCH_TOKENS // length)
        for first in range(0, len(places), size):
            group = places[first : first + size]
            with in_mesh_of(model):
                log_prob_BT = _log_probs_of(model, [rows[place] for place in group], length)
            for place, log_prob_T in zip(group, log_prob_BT, strict=False):  # rows that pad the batch come last
                before, ids = rows[place]
                results[place] = log_prob_T[len(before) - 1 :][: len(ids)].tolist()
    bytes_V = None if tokenizer is None else tokenizer.token_bytes()
    for place, logprobs in enumerate(results):
        if not np.isfinite(logprobs).all():
            raise InputError(f"the model's logits in text {place} are not finite (NaN or infinity): its weights are damaged; try another checkpoint")
    return [_result(ids, logprobs, bytes_V) for (_, ids), logprobs in zip(rows, results, strict=True)]


def _checked(
    config: ModelConfig, texts: Sequence[Prompt], tokenizer: Tokenizer | None, context: Prompt | Sequence[Prompt] | None
) -> list[tuple[list[int], list[int]]]:
    """For each text the ids before it, at least one, and its own."""
    if isinstance(texts, (str, bytes)) or not hasattr(texts, "__len__"):
        raise InputError(f"texts must be a list, not {texts!r:.60}; for one text pass a list of one, as in [text]")
    if len(texts) == 0:
        raise InputError("texts is an empty list; pass at least one text")
    end_of_text = end_of_text_id(config, tokenizer)
    befores = _contexts(config, len(texts), tokenizer, context, end_of_text)
    rows = []
    for place, (text, before) in enumerate(zip(texts, befores, strict=True)):
        if hasattr(text, "__len__") and len(text) == 0:
            raise InputError(f"text {place} is empty: it has no token to score; leave it out")
        ids = prompt_ids(f"text {place}", text, config, tokenizer, end_of_text)
        if not before:
            before, ids = ids[:1], ids[1:]
        if not ids:
            raise InputError(f"text {place} is one token, and neither the model nor a tokenizer names an end-of-text token for it to follow; pass a context")
        if config.context is not None and len(before) + len(ids) - 1 > config.context:
            raise InputError(
                f"text {place} has {len(ids)} tokens to score behind {len(before)}, more than the model's context of {config.context} can take "
                f"(the last one takes no place); split it, or shorten what stands before it"
            )
        rows.append((before, ids))
    return rows


def _contexts(
    config: ModelConfig, texts: int, tokenizer: Tokenizer | None, context: Prompt | Sequence[Prompt] | None, end_of_text: int | None
) -> list[list[int]]:
    """The ids before each text; none where nothing may stand there."""
    if context is None:
        return [[] if end_of_text is None else [end_of_text]] * texts
    if isinstance(context, str) or not hasattr(context, "__len__") or not any(hasattr(item, "__len__") for item in context):
        return [prompt_ids("context", context, config, tokenizer, end_of_text)] * texts
    if len(context) != texts:
        raise InputError(f"context has {len(context)} entries for {texts} texts; pass one for all, or one for each text")
    return [prompt_ids(f"context {place}", item, config, tokenizer, end_of_text) for place, item in enumerate(context)]


def _batches(lengths: list[int], most: int | None) -> dict[int, list[int]]:
    """Which texts go together, by their padded length."""
    places: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        places.setdefault(prompt_bucket(length, most), []).append(place)
    return places


def _log_probs_of(model: GPT2, rows: list[tuple[list[int], list[int]]], length: int) -> np.ndarray:
    """Float32 [B, T]: at each place the log-probability of the next id. B is rounded up to a power of two, so that few sizes are ever compiled."""
    tokens_BT = np.zeros((power_of_two(len(rows)), length + 1), np.int32)
    for row_T, (before, ids) in zip(tokens_BT, rows, strict=False):
        row_T[: len(before) + len(ids)] = before + ids
    return np.asarray(_next_log_probs(model, tokens_BT[:, :-1], tokens_BT[:, 1:]))


@jax.jit
def _next_log_probs(model: GPT2, tokens_BT: jax.Array, next_BT: jax.Array) -> jax.Array:
    def one_token(hidden_D: jax.Array, token: jax.Array) -> jax.Array:
        logits_P = model.padded_logits(hidden_D)
        return logits_P[token] - jax.nn.logsumexp(logits_P)

    # causal, so what pads a row on the right cannot matter
    hidden_ND = model.hidden(tokens_BT).reshape(next_BT.size, -1)
    log_prob_N = jax.lax.map(lambda pair: one_token(*pair), (hidden_ND, next_BT.reshape(-1)), batch_size=CHUNK)
    return log_prob_N.reshape(next_BT.shape)


def _result(ids: list[int], logprobs: list[float], bytes_V: np.ndarray | None) -> Score:
    return Score(ids, logprobs, None if bytes_V is None else sum(int(bytes_V[token]) for token in ids if token < len(bytes_V)))
