"""The sampling settings: one table with each one's default, range and meaning, for the command, for `generate` and for files of prompts.

Imports nothing heavy: the command refuses a bad value before it loads a model.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict

from gpt2jax.errors import InputError

if TYPE_CHECKING:
    from gpt2jax.model.gpt2 import GPT2
    from gpt2jax.tokenizer import Tokenizer

CACHE_DTYPES, WEIGHTS_DTYPES = (("float32", "bfloat16", "int8"),) * 2


class Settings(TypedDict, total=False):
    """How the next token is chosen. Each is one value, or a list with one for each prompt. They act in this order, which is transformers':

    logit_bias, forbidden_tokens: added to the logits of ids ({id: bias}; forbidden is minus infinity). Ids that the tokenizer lacks are always forbidden.
    repetition_penalty: logits of tokens of the prompt and of the new text are divided by it if positive, else multiplied (Keskar et al., arXiv:1909.05858).
    presence_penalty, frequency_penalty: subtracted from the logits of tokens of the new text, once, and once for each time that it came.
    no_repeat_ngram_size: n > 0 forbids a token that would repeat n tokens in a row of prompt and new text.
    min_new_tokens: the end of text is forbidden before so many new tokens.
    forced_tokens: {index: id}: the new token at an index (0 is the first; -1 is the last that max_new_tokens allows) is this one.
    temperature: divides the logits; at 0 the most likely token is taken, of those that the filters below leave.
    top_k: only the k most likely tokens; 0 is no limit. Tokens as likely as the last one stay, here and below.
    top_p: only the most likely tokens that together reach this probability; at least one (Holtzman et al., arXiv:1904.09751). 1 is no limit.
    min_p: only tokens with at least this share of the most likely one's probability (arXiv:2407.01082). 0 is no limit.
    typical_p: only the tokens whose surprise is nearest to the expected one, that together reach this probability (arXiv:2202.00666). 1 is no limit.
    seed: 0 to 2**32 - 1. A row's randomness is a function of its seed and of how many tokens were drawn before.
    """

    logit_bias: Any
    forbidden_tokens: Any
    repetition_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    no_repeat_ngram_size: int | Sequence[int]
    min_new_tokens: int | Sequence[int]
    forced_tokens: Any
    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    typical_p: float | Sequence[float]
    seed: int | Sequence[int]


class Options(Settings, total=False):
    """What `generate` and `stream` take beside the model and the prompts: the sampling settings, and these.

    max_new_tokens: most tokens to add. tokenizer: for prompts that are strings, and for text.
    eos_token_id: the id that ends a row once it is drawn; by default the model's own, else the tokenizer's. None: rows never end early.
    stop: strings that end a row when its new text holds one of them.
    num_samples: rows for each prompt, which is prefilled once; their seeds count up from its own (default 1).
    logprobs: None, or how many of the likeliest tokens come with each token (0: only its own log-probability).
    draft_model: a smaller model of the same vocabulary that drafts draft_tokens (default 4) tokens at a time, which the model checks in one step. Greedy tokens
    stay the same; draws are other draws from the same distribution (see speculative.py).
    cache_dtype: what keys and values behind the current chunk are kept in: 'float32', 'bfloat16', 'int8' (a scale for each slot of each head); by default the
    compute dtype.
    num_beams: search with this many beams instead of drawing (default 1: no search), as transformers does; num_samples is then how many of the best come back.
    What acts before the temperature acts on beams too; nothing else of the above goes with it. length_penalty (default 1.0): a beam's score is the sum of its
    log-probabilities over its length to this power. early_stopping: True, False (default) or 'never' (see beams.py).
    overflow: 'error' (default), or 'slide': go on past the context. When it is full, its last half becomes a new prompt (GPT-2's positions are absolute, so a
    window cannot move along), and penalties then count only what the model still sees. A prompt longer than the context starts with its last half window.
    """

    max_new_tokens: Required[int]
    tokenizer: Tokenizer | None
    eos_token_id: int | None | Literal["model's"]
    stop: str | Sequence[str]
    num_samples: int
    logprobs: int | None
    draft_model: GPT2 | None
    draft_tokens: int
    cache_dtype: Literal["float32", "bfloat16", "int8"] | None
    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    overflow: Literal["error", "slide"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """check(name, value) returns the value or raises InputError; kind is what the command line reads."""

    default: Any
    check: Callable[[str, Any], Any]
    kind: Callable[[str], Any]
    help: str


def check_settings(settings: Mapping[str, Any], rows: int) -> dict[str, list[Any]]:
    """Every setting with a checked value for each of `rows` prompts. InputError for an unknown name, a value out of range, or a list of another length."""
    for name in settings:
        if name not in SETTINGS:
            raise InputError(f"there is no option {name!r}; the sampling settings are {', '.join(SETTINGS)}")
    return {name: _per_row(name, settings.get(name, setting.default), rows, setting) for name, setting in SETTINGS.items()}


def check_new_tokens(value: Any) -> int:
    return _whole(1, "1 or more")("max_new_tokens", value)


def check_text(name: str, text: str) -> None:
    """Bytes of the command line that are no UTF-8 reach us as lone surrogates, which no tokenizer can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is not valid UTF-8 text (at character {error.start}); give it in UTF-8") from None


def _per_row(name: str, value: Any, rows: int, setting: Setting) -> list[Any]:
    one = isinstance(value, (str, Mapping)) or not hasattr(value, "__len__")
    if name == "forbidden_tokens" and not one:  # itself a list: one for each prompt is a list of lists
        one = all(isinstance(token, (numbers.Number, str)) for token in value)
    values = [value] * rows if one else list(value)
    if len(values) != rows:
        raise InputError(f"{name} has {len(values)} values for {rows} prompts; pass one value, or one for each prompt")
    return [setting.check(name, value) for value in values]


def _number(words: str, least: float, most: float = 1e30, *, above: bool = False) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not least <= float(value) <= most or (above and float(value) == least):
            raise InputError(f"{name}={value!r} must be {words}")
        return float(value)

    return check


def _whole(least: int, words: str, most: float = math.inf) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
            raise InputError(f"{name}={value!r} must be a whole number, {words}")
        return int(value)

    return check


def _token_map(key_words: str, value: Callable[[str, Any], Any]) -> Callable[[str, Any], dict[int, Any]]:
    def check(name: str, tree: Any) -> dict[int, Any]:
        if not isinstance(tree, Mapping):
            raise InputError(f"{name}={tree!r} must be a map, {key_words}")
        try:  # JSON has string keys only
            keys = [_whole(-(2**31), key_words)(name, int(key) if isinstance(key, str) else key) for key in tree]
        except ValueError as error:
            raise error if isinstance(error, InputError) else InputError(f"{name}={dict(tree)!r} must be a map, {key_words}") from None
        return dict(zip(keys, (value(name, item) for item in tree.values()), strict=True))

    return check


def _token_list(name: str, value: Any) -> list[int]:
    if isinstance(value, (str, Mapping)) or not hasattr(value, "__len__"):
        raise InputError(f"{name}={value!r} must be a list of token ids")
    return [_whole(0, "a token id")(name, token) for token in value]


def _read_pairs(text: str) -> dict[str, float]:
    """`ID=VALUE,ID=VALUE` of the command line."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {key.strip(): float(value) if "." in value or "e" in value or "inf" in value else int(value) for key, _, value in pairs}


def _read_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


_read_pairs.__name__, _read_ids.__name__ = "ID=VALUE list", "list of ids"  # argparse names them in its error

_FINITE = _number("a finite number", -1e30)
_SHARE = _number("above 0 and at most 1 (no limit)", 0, 1, above=True)
_TOKEN = _whole(0, "a token id")

SETTINGS: dict[str, Setting] = {
    "temperature": Setting(1.0, _number("a finite number, 0 (always the most likely token) or more", 0, 3e38), float, "0 always takes the most likely token"),
    "top_k": Setting(0, _whole(0, "0 (no limit) or more"), int, "draw among the K most likely tokens; 0 is no limit"),
    "top_p": Setting(1.0, _SHARE, float, "draw among the most likely tokens that together reach this probability; 1 is no limit"),
    "min_p": Setting(0.0, _number("between 0 (no limit) and 1", 0, 1), float, "least probability, as a share of the most likely token's; 0 is no limit"),
    "typical_p": Setting(1.0, _SHARE, float, "draw among the tokens of most typical surprise that together reach this probability; 1 is no limit"),
    "repetition_penalty": Setting(1.0, _number("a finite number above 0", 0, above=True), float, "above 1 makes tokens of the prompt and the text rarer"),
    "presence_penalty": Setting(0.0, _FINITE, float, "subtracted from the logits of tokens that the new text holds"),
    "frequency_penalty": Setting(0.0, _FINITE, float, "the same, once for each time that the token came"),
    "no_repeat_ngram_size": Setting(0, _whole(0, "0 (off) or more", 2**31 - 1), int, "no N tokens in a row come twice; 0 is off"),
    "min_new_tokens": Setting(0, _whole(0, "0 or more", 2**31 - 1), int, "the text does not end before so many new tokens"),
    "logit_bias": Setting({}, _token_map("{token id: bias}", _number("a finite bias", -1e30)), _read_pairs, "ID=BIAS,...: added to the logits of tokens"),
    "forced_tokens": Setting(
        {}, _token_map("{index of the new token: token id}", _TOKEN), _read_pairs, "INDEX=ID,...: the new token at an index; -1 is the last"
    ),
    "forbidden_tokens": Setting((), _token_list, _read_ids, "ID,...: tokens that never come"),
    "seed": Setting(0, _whole(0, "between 0 and 4294967295", 2**32 - 1), int, "seed of the first sample; the next ones use N+1, N+2, ..."),
}
