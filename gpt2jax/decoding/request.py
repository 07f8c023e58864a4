"""A call of `generate`, checked: everything that comes from the caller is looked at here, on the host, before anything is computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp
import numpy as np

from gpt2jax.config import ModelConfig
from gpt2jax.decoding.filters import Sampling
from gpt2jax.decoding.settings import CACHE_DTYPES, check_new_tokens, check_settings, check_text
from gpt2jax.errors import InputError

if TYPE_CHECKING:
    from gpt2jax.model.gpt2 import GPT2
    from gpt2jax.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray
#: Most alternatives to a token whose log-probabilities can be asked for.
MOST_LOGPROBS = 64


@dataclasses.dataclass(frozen=True)
class Beams:
    """A beam search: `returned` of the best of num_beams beams a prompt."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    returned: int


@dataclasses.dataclass(frozen=True)
class Request:
    """What to continue and how: ids of each row (`num_samples` rows a prompt, together), settings per row, the id and the strings that end a row.

    logprobs: None, or how many alternatives to each token are wanted. slide: go on past the context by its last half.
    """

    rows: list[list[int]]
    new_tokens: int
    sampling: Sampling
    eos: int | None
    stops: tuple[str, ...]
    tokenizer: Tokenizer | None
    logprobs: int | None
    slide: bool
    draft_model: GPT2 | None
    draft_tokens: int
    cache_dtype: str | None
    beams: Beams | None

    @classmethod
    def checked(
        cls,
        config: ModelConfig,
        prompts: Any,
        *,
        max_new_tokens: Any,
        tokenizer: Tokenizer | None = None,
        eos_token_id: Any = "model's",
        stop: Any = (),
        num_samples: Any = 1,
        logprobs: Any = None,
        overflow: Any = "error",
        draft_model: GPT2 | None = None,
        draft_tokens: Any = 4,
        cache_dtype: Any = None,
        num_beams: Any = 1,
        length_penalty: Any = 1.0,
        early_stopping: Any = False,
        **settings: Any,
    ) -> Request:
        """InputError for whatever is out of range, or does not fit the model's vocabulary or context."""
        if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__len__"):
            raise InputError(f"prompts must be a list, not {_short(prompts)}; for one prompt pass a list of one, as in [prompt]")
        if len(prompts) == 0:
            raise InputError("prompts is an empty list; pass at least one prompt")
        new_tokens, samples = check_new_tokens(max_new_tokens), check_count("num_samples", num_samples)
        if logprobs is not None:
            logprobs = check_count("logprobs", logprobs, least=0, most=min(MOST_LOGPROBS, config.vocab_size))
        if overflow not in ("error", "slide"):
            raise InputError(f"overflow={overflow!r} must be 'error' (refuse what does not fit the context) or 'slide' (go on over the last half of it)")
        check_settings(settings, len(prompts))
        if cache_dtype not in (None, *CACHE_DTYPES):
            raise InputError(f"cache_dtype={cache_dtype!r} is unknown; choose one of {', '.join(CACHE_DTYPES)}")
        beams = None
        if num_beams != 1:
            others = dict(stop=bool(stop), logprobs=logprobs is not None, draft_model=draft_model is not None, overflow=overflow == "slide")
            check_beams(num_beams, length_penalty, early_stopping, samples)
            _refuse_with_beams([name for name, given in others.items() if given], settings)
            beams, samples = Beams(num_beams, length_penalty, early_stopping, samples), 1
        elif length_penalty != 1 or early_stopping is not False:
            raise InputError("length_penalty and early_stopping say how beams compete; they need num_beams=2 or more")
        eos = end_of_text = end_of_text_id(config, tokenizer)
        if eos_token_id != "model's":
            eos = eos_token_id
            if eos is not None:
                check_ids(f"eos_token_id={_short(eos)}", [eos], config.vocab_size)
        ids = [prompt_ids(f"prompt {place}", prompt, config, tokenizer, end_of_text) for place, prompt in enumerate(prompts)]
        for place, prompt in enumerate(ids):
            if config.context is None:
                continue
            if overflow == "slide" and config.context >= 2:
                ids[place] = prompt if len(prompt) <= config.context else prompt[-(config.context // 2) :]
            else:
                check_room(place, len(prompt), new_tokens, config.context)
        allowed = config.vocab_size if tokenizer is None else tokenizer.n_vocab
        sizes = dict(allowed=allowed, samples=samples, new_tokens=new_tokens, positions=_forcible(config, new_tokens))
        sampling = sampling_of(settings, len(prompts), config.vocab_size, eos=-1 if eos is None else eos, **sizes)
        if draft_model is not None and overflow == "slide":
            raise InputError("overflow='slide' does not go with a draft model; drop one of the two")
        rows = [prompt for prompt in ids for _ in range(samples)]
        return cls(
            rows,
            new_tokens,
            sampling,
            eos,
            check_stops(stop, tokenizer),
            tokenizer,
            logprobs,
            overflow == "slide",
            draft_model,
            draft_tokens,
            cache_dtype,
            beams,
        )


def check_beams(num_beams: Any, length_penalty: Any, early_stopping: Any, returned: Any) -> None:
    """InputError for what a beam search cannot do."""
    check_count("num_beams", num_beams)
    check_count("num_samples", returned, most=num_beams)
    if isinstance(length_penalty, bool) or not isinstance(length_penalty, (int, float)) or not math.isfinite(length_penalty):
        raise InputError(f"length_penalty={length_penalty!r} must be a finite number: 0 for plain sums, above 0 to favour longer texts, below for shorter ones")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise InputError(f"early_stopping={early_stopping!r} must be True, False or 'never'")


def _refuse_with_beams(others: list[str], settings: Mapping[str, Any]) -> None:
    """A search draws nothing, so what says how to draw has no meaning; temperature 0 says the same as beams do."""
    others += [name for name in ("top_k", "top_p", "min_p", "typical_p", "seed") if name in settings]
    others += ["temperature"] if settings.get("temperature", 0) != 0 else []
    if others:
        raise InputError(f"{others[0]} does not go with num_beams: a beam search draws nothing and comes all at once; drop one of the two")


def end_of_text_id(config: ModelConfig, tokenizer: Tokenizer | None) -> int | None:
    """The model's own end-of-text id, else the tokenizer's."""
    return config.eos_token_id if config.eos_token_id is not None else None if tokenizer is None else tokenizer.eot


def check_stops(stop: Any, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """The stop strings, none of them empty."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InputError(f"stop={stop!r} must be a string or a list of strings, none of them empty")
    if stops and tokenizer is None:
        raise InputError("stop strings are matched on text, which needs a tokenizer; pass tokenizer=")
    return stops


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least or (most is not None and value > most):
        raise InputError(
            f"{name}={value!r} must be a whole number, {least} or more" if most is None else f"{name}={value!r} must be between {least} and {most}"
        )
    return int(value)


def prompt_ids(name: str, prompt: Any, config: ModelConfig, tokenizer: Tokenizer | None, end_of_text: int | None) -> list[int]:
    """The ids of one prompt, which messages call `name`, checked against the vocabulary."""
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
    check_ids(name, ids, config.vocab_size)
    return [int(token) for token in ids]


def check_ids(name: str, ids: list[Any], vocabulary: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise InputError(f"{name}: a token id must be a whole number, not {_short(token)}")
        if not 0 <= token < vocabulary:
            raise InputError(f"{name}: token id {token} is outside the model's vocabulary, 0 to {vocabulary - 1}; use the model's own tokenizer")


def _forcible(config: ModelConfig, new_tokens: int) -> int:
    """New tokens that can be forced: all that fit the context; without an end to it a power of two, so that few numbers mean few programs."""
    return max(config.n_positions + 1, 0 if config.context is not None else 1 << (new_tokens - 1).bit_length())


def check_room(place: int, length: int, new_tokens: int, context: int) -> None:
    """The last new token is never fed back, so it takes no position."""
    if length > context:
        raise InputError(f"prompt {place} has {length} tokens, more than the model's context of {context}; shorten it, or choose overflow='slide'")
    room = context - length + 1
    if new_tokens > room:
        raise InputError(
            f"prompt {place} has {length} tokens, which leaves room for {room} new ones in the model's context of {context}, "
            f"not {new_tokens}; shorten the prompt, lower max_new_tokens to {room}, or choose overflow='slide'"
        )


def sampling_of(
    settings: Mapping[str, Any], prompts: int, vocabulary: int, *, eos: int, new_tokens: int, allowed: int | None = None, samples: int = 1, positions: int = 64
) -> Sampling:
    """The settings as arrays, `samples` rows for each of `prompts`. Ids from `allowed` on are forbidden; the first `positions` new tokens can be forced."""
    values = {name: [value for value in rows for _ in range(samples)] for name, rows in check_settings(settings, prompts).items()}
    rows = prompts * samples
    bias_BV = np.zeros((rows, vocabulary), np.float32)
    bias_BV[:, vocabulary if allowed is None else allowed :] = -np.inf
    forced_BF = np.full((rows, positions), -1, np.int32)
    for row in range(rows):
        for name in ("logit_bias", "forbidden_tokens"):
            check_ids(name, list(values[name][row]), vocabulary)
        for token, bias in values["logit_bias"][row].items():
            bias_BV[row, token] += bias
        bias_BV[row, values["forbidden_tokens"][row]] = -np.inf
        for index, token in values["forced_tokens"][row].items():
            check_ids("forced_tokens", [token], vocabulary)
            place = index if index >= 0 else new_tokens + index
            if not 0 <= place < min(new_tokens, positions):
                raise InputError(
                    f"forced_tokens names the new token {index}; with max_new_tokens={new_tokens}, 0 to {min(new_tokens, positions) - 1} can be forced"
                )
            if bias_BV[row, token] == -np.inf:
                raise InputError(f"forced_tokens asks for token {token}, which is forbidden or has no text; drop one of the two")
            forced_BF[row, place] = token
    values["top_k"] = [min(k, vocabulary) for k in values["top_k"]]
    values["seed"] = [(seed + row % samples) % 2**32 for row, seed in enumerate(values["seed"])]
    number = lambda name, dtype: jnp.asarray(np.array(values[name], dtype))  # noqa: E731
    return Sampling(
        **{f"{name}_B": number(name, np.float32) for name in ("temperature", "top_p", "min_p", "typical_p")},
        **{f"{name}_B": number(name, np.float32) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")},
        **{f"{name}_B": number(name, np.int32) for name in ("top_k", "no_repeat_ngram_size", "min_new_tokens")},
        bias_BV=jnp.asarray(bias_BV),
        forced_BF=jnp.asarray(forced_BF),
        seed_B=number("seed", np.uint32),
        eos=jnp.int32(eos),
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
