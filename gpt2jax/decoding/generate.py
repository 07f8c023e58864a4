"""`gpt2jax.generate`: prompts in, continuations out. Everything that comes from the caller is checked here, on the host, before anything is computed."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from gpt2jax.config import ModelConfig
from gpt2jax.decoding.filters import Sampling
from gpt2jax.decoding.loop import BROKEN, ENDED, decode, prompt_bucket
from gpt2jax.decoding.settings import check_new_tokens, check_seed, check_temperature, check_text, check_top_k
from gpt2jax.decoding.weights import prepare, turns_weights
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2

if TYPE_CHECKING:
    from gpt2jax.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Generation:
    """What followed one prompt.

    tokens: the new ids only, with the end-of-text id if it was drawn. text: their text without that token, None without a tokenizer.
    finish_reason: 'stop' if the model ended the text, 'length' if `max_new_tokens` did.
    """

    tokens: list[int]
    text: str | None
    finish_reason: Literal["stop", "length"]


def generate(
    model: GPT2,
    prompts: Sequence[Prompt] | np.ndarray,
    *,
    max_new_tokens: int,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    seed: int | Sequence[int] = 0,
    tokenizer: Tokenizer | None = None,
    eos_token_id: int | None | Literal["model's"] = "model's",
) -> list[Generation]:
    """Continue each prompt by up to `max_new_tokens` tokens; one result a prompt, in their order.

    prompts: strings (with `tokenizer`) or lists of token ids, of any lengths together. An empty prompt means the end-of-text token.
    temperature: divides the logits; 0 always takes the most likely token. top_k: draw among the k most likely tokens only (ties with the last of them stay);
    0 is no limit. seed: 0 to 2**32 - 1. Each of the three is one value, or one for each prompt.
    eos_token_id: the id that ends a row once it is drawn; by default the model's own, else the tokenizer's. None: rows never end early.

    A row's result depends on its own prompt, settings and seed, not on the rows beside it: in float32 a batch gives the tokens that each prompt gives alone.
    With one seed all rows use it, so equal prompts get equal continuations. The first call for a new size of batch, prompt bucket (16, 32, 64, ... tokens) or
    cache bucket (128, 256, ...) compiles; settings, lengths and seeds never do.

        model, tokenizer = gpt2jax.load("runs/quickstart")
        for result in gpt2jax.generate(model, ["def ", "class "], max_new_tokens=64, seed=[1, 2], tokenizer=tokenizer):
            print(result.text, result.finish_reason)

    Raises InputError, before any compute, for an empty batch, an id outside the vocabulary, a setting out of range, a string without a tokenizer, or a prompt
    that does not fit the context with the new tokens (P tokens leave room for n_positions - P + 1). Also if the model's logits turn out not to be finite.
    """
    request = _Request.checked(model.config, prompts, max_new_tokens, temperature, top_k, seed, tokenizer, eos_token_id)
    rows: list[list[int]] = [[] for _ in request.prompts]
    for new_BK in _run(model, request):
        for row, new in zip(rows, new_BK.tolist(), strict=True):
            row.extend(token for token in new if token != ENDED)
    return [_result(row, request.eos, tokenizer) for row in rows]


def _result(tokens: list[int], eos: int | None, tokenizer: Tokenizer | None) -> Generation:
    stopped = eos is not None and tokens[-1] == eos
    text = None if tokenizer is None else tokenizer.decode(tokens[:-1] if stopped else tokens)
    return Generation(tokens, text, "stop" if stopped else "length")


@dataclasses.dataclass(frozen=True)
class _Request:
    """A checked call: ids of each prompt, settings per row, the id that ends a row."""

    prompts: list[list[int]]
    new_tokens: int
    sampling: Sampling
    eos: int | None

    @classmethod
    def checked(
        cls, config: ModelConfig, prompts: Any, new_tokens: Any, temperature: Any, top_k: Any, seed: Any, tokenizer: Tokenizer | None, eos_token_id: Any
    ) -> _Request:
        if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__len__"):
            raise InputError(f"prompts must be a list, not {_short(prompts)}; for one prompt pass a list of one, as in [prompt]")
        if len(prompts) == 0:
            raise InputError("prompts is an empty list; pass at least one prompt")
        check_new_tokens(new_tokens)
        rows, vocabulary = len(prompts), config.vocab_size
        temperatures = [check_temperature(value) for value in _per_row("temperature", temperature, rows)]
        top_ks = [min(check_top_k(value), vocabulary) for value in _per_row("top_k", top_k, rows)]
        seeds = [check_seed(value) for value in _per_row("seed", seed, rows)]
        end_of_text = config.eos_token_id if config.eos_token_id is not None else None if tokenizer is None else tokenizer.eot
        eos = end_of_text if eos_token_id == "model's" else eos_token_id
        if eos is not None and eos_token_id != "model's":
            _check_ids(f"eos_token_id={_short(eos)}", [eos], vocabulary)
        ids = [_prompt_ids(place, prompt, config, tokenizer, end_of_text) for place, prompt in enumerate(prompts)]
        for place, prompt in enumerate(ids):
            _check_room(place, len(prompt), new_tokens, config.n_positions)
        sampling = Sampling(
            jnp.asarray(np.array(temperatures, np.float32)),
            jnp.asarray(np.array(top_ks, np.int32)),
            jnp.asarray(np.array(seeds, np.uint32)),
            jnp.int32(vocabulary if tokenizer is None else min(vocabulary, tokenizer.n_vocab)),
        )
        return cls(ids, int(new_tokens), sampling, eos)


def _run(model: GPT2, request: _Request) -> Iterator[np.ndarray]:
    """New tokens of all rows as they come, [B, some]; ENDED fills rows that have ended."""
    lengths = np.array([len(prompt) for prompt in request.prompts], np.int32)
    tokens_BT = np.zeros((len(lengths), prompt_bucket(int(lengths.max()), model.config.n_positions)), np.int32)
    for row, prompt in zip(tokens_BT, request.prompts, strict=True):
        row[: len(prompt)] = prompt
    eos = -1 if request.eos is None else request.eos
    for new_BK in decode(_prepared(model, len(lengths)), tokens_BT, lengths, request.sampling, eos=eos, new_tokens=request.new_tokens):
        if (new_BK == BROKEN).any():
            place = int(np.argwhere(new_BK == BROKEN)[0, 0])
            raise InputError(f"the model's logits after prompt {place} are not finite (NaN or infinity): its weights are damaged; try another checkpoint")
        yield new_BK


_PREPARED: weakref.WeakKeyDictionary[GPT2, tuple[list[Any], bool, GPT2]] = weakref.WeakKeyDictionary()


def _prepared(model: GPT2, batch: int) -> GPT2:
    """`prepare(model)`, kept as long as the model lives and its arrays are the same ones: a second call need not copy the weights again."""
    leaves, turned = jax.tree.leaves(model), turns_weights(batch)
    known, known_turned, ready = _PREPARED.get(model, ([], turned, model))
    if known_turned != turned or len(known) != len(leaves) or any(old is not new for old, new in zip(known, leaves, strict=True)):
        _PREPARED.pop(model, None)  # first, so that memory holds the weights twice and not three times
        ready = prepare(model, turned=turned)
        _PREPARED[model] = leaves, turned, ready
    return ready


def _prompt_ids(place: int, prompt: Any, config: ModelConfig, tokenizer: Tokenizer | None, end_of_text: int | None) -> list[int]:
    """The ids of one prompt, checked against the vocabulary."""
    name = f"prompt {place}"
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InputError(f"{name} is a string, which needs a tokenizer; pass tokenizer=, or token ids")
        check_text(name, prompt)
        ids = tokenizer.encode(prompt)
    elif isinstance(prompt, bytes) or not hasattr(prompt, "__len__"):
        raise InputError(f"{name} must be a string or a list of token ids, not {_short(prompt)}; for one prompt of ids pass [[1, 2, 3]]")
    else:
        ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not ids:
        if end_of_text is None:
            raise InputError(f"{name} is empty, which means the end-of-text token, but neither the model nor a tokenizer names one; give it a token")
        ids = [end_of_text]
    _check_ids(name, ids, config.vocab_size)
    return [int(token) for token in ids]


def _check_ids(name: str, ids: list[Any], vocabulary: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise InputError(f"{name}: a token id must be a whole number, not {_short(token)}")
        if not 0 <= token < vocabulary:
            raise InputError(f"{name}: token id {token} is outside the model's vocabulary, 0 to {vocabulary - 1}; use the model's own tokenizer")


def _check_room(place: int, length: int, new_tokens: int, n_positions: int) -> None:
    """The last new token is never fed back, so it takes no position."""
    if length > n_positions:
        raise InputError(f"prompt {place} has {length} tokens, more than the model's context of {n_positions}; shorten it")
    room = n_positions - length + 1
    if new_tokens > room:
        raise InputError(
            f"prompt {place} has {length} tokens, which leaves room for {room} new ones in the model's context of {n_positions}, "
            f"not {new_tokens}; shorten the prompt or lower max_new_tokens to {room}"
        )


def _per_row(name: str, value: Any, rows: int) -> list[Any]:
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return [value] * rows
    if len(value) != rows:
        raise InputError(f"{name} has {len(value)} values for {rows} prompts; pass one value, or one for each prompt")
    return list(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
