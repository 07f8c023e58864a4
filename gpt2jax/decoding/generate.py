"""`gpt2jax.generate` and `gpt2jax.stream`: prompts in, continuations out, all at once or as they come."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Unpack

import jax
import numpy as np

from gpt2jax.decoding.beams import search
from gpt2jax.decoding.filters import BROKEN, STUCK
from gpt2jax.decoding.loop import ENDED, Decoder, Drawn
from gpt2jax.decoding.prepared import prepared
from gpt2jax.decoding.request import Beams, Prompt, Request
from gpt2jax.decoding.settings import Options
from gpt2jax.decoding.speculative import SpeculativeDecoder, check_draft
from gpt2jax.decoding.text import TextStream
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2


@dataclasses.dataclass(frozen=True)
class Generation:
    """What followed one prompt.

    tokens: the new ids only, with the end-of-text id if it was drawn, and with those that a stop string ended in. text: their text without that token and cut
    before the stop string; None without a tokenizer. finish_reason: 'stop' if the model ended the text or a stop string came (then `stop` is that string),
    'length' if `max_new_tokens` ended it. logprobs, on request: of each token, under the model's own distribution, before all settings; top_logprobs: for each
    token the likeliest ones at its place with theirs. draft_acceptance, with a draft model: the share of its tokens that the row took. score: what
    a beam was ranked by.
    """

    tokens: list[int]
    text: str | None
    finish_reason: Literal["stop", "length"]
    stop: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    draft_acceptance: float | None = None
    score: float | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """More of one row: its index among all rows, the text that is now certain (whole characters, no part of a stop string), the tokens that came, and the whole
    `Generation` once the row has ended."""

    index: int
    text: str
    tokens: list[int]
    result: Generation | None = None


def generate(model: GPT2, prompts: Sequence[Prompt] | np.ndarray, **options: Unpack[Options]) -> list[Generation]:
    """Continue each prompt by up to `max_new_tokens` tokens; `num_samples` results a prompt, in the prompts' order.

    prompts: strings (with `tokenizer=`) or lists of token ids, of any lengths together. An empty prompt means the end-of-text token.
    options: `gpt2jax.decoding.settings.Options` has them all, and the order in which the sampling settings act.

    A row's result depends on its own prompt, settings and seed, not on the rows beside it: in float32 a batch gives the tokens that each prompt gives alone.
    With one seed all rows use it, so equal prompts get equal continuations. The first call for a new size of batch, prompt bucket (16, 32, 64, ... tokens) or
    cache bucket (128, 256, ...) compiles; settings, lengths and seeds never do.

        model, tokenizer = gpt2jax.load("runs/quickstart")
        for result in gpt2jax.generate(model, ["def ", "class "], max_new_tokens=64, seed=[1, 2], top_p=0.9, tokenizer=tokenizer):
            print(result.text, result.finish_reason)

    Raises InputError, before any compute, for an empty batch, an id outside the vocabulary, an option out of range, a string without a tokenizer, or a prompt
    that does not fit the context with the new tokens (P tokens leave room for n_positions - P + 1). Also if the model's logits turn out not to be finite.
    """
    request = _checked(model, prompts, options)
    if request.beams is not None:
        return _best_beams(model, request, request.beams)
    results = {piece.index: piece.result for piece in pieces(model, request) if piece.result is not None}
    return [results[index] for index in sorted(results)]


def stream(model: GPT2, prompts: Sequence[Prompt] | np.ndarray, **options: Unpack[Options]) -> Iterator[Piece]:
    """`generate`, piece by piece: each row's first token after the prefill, then what each chunk of 32 steps brings.

    Arguments and errors are those of `generate`, but for beams, which come all at once; bad input is refused at the call, before a piece is asked for.
    """
    request = _checked(model, prompts, options)
    if request.beams is not None:
        raise InputError("beams come all at once and cannot be streamed; drop num_beams, or call generate")
    return pieces(model, request)


def _checked(model: GPT2, prompts: Any, options: Options) -> Request:
    request = Request.checked(model.config, prompts, **options)
    if request.draft_model is not None:
        check_draft(model, request.draft_model, request.draft_tokens, max(map(len, request.rows)) + request.new_tokens - 1)
    return request


def _best_beams(model: GPT2, request: Request, beams: Beams) -> list[Generation]:
    wide = prepared(model, request.cache_dtype)
    results = []
    for row in search(wide, request.rows, request.sampling, new_tokens=request.new_tokens, **dataclasses.asdict(beams)):
        for beam in row:
            ended = beam.tokens[-1:] == [request.eos]
            text = None if request.tokenizer is None else request.tokenizer.decode(beam.tokens[:-1] if ended else beam.tokens)
            results.append(Generation(beam.tokens, text, "stop" if ended else "length", score=beam.score))
    return results


def pieces(model: GPT2, request: Request, *, idle: int = 0, decoder: Decoder | SpeculativeDecoder | None = None) -> Iterator[Piece]:
    """What `stream` yields. The last `idle` rows only fill up a batch and give nothing; a `decoder` may bring a cache that begins as the prompts do."""
    rows = [_Row(request) for _ in request.rows]
    stopped_B = np.arange(len(rows)) >= len(rows) - idle
    for row in rows[len(rows) - idle :]:
        row.ended = True
    decoder = decoder or _decoder(model, request)
    for drawn in _run(model, request, stopped_B, decoder):
        for index, row in enumerate(rows):
            if row.ended:
                continue
            piece = row.take(index, jax.tree.map(lambda x, index=index: x[index], drawn))
            if piece.result is not None and isinstance(decoder, SpeculativeDecoder):
                piece = dataclasses.replace(piece, result=dataclasses.replace(piece.result, draft_acceptance=decoder.acceptance.of(index)))
            stopped_B[index] = row.ended
            if piece.tokens:
                yield piece
        if stopped_B.all():
            return


def _decoder(model: GPT2, request: Request) -> Decoder | SpeculativeDecoder:
    if request.draft_model is None:
        return Decoder(prepared(model, request.cache_dtype), request.logprobs)
    ready = prepared(model, request.cache_dtype), prepared(request.draft_model, request.cache_dtype)
    return SpeculativeDecoder(*ready, request.draft_tokens, request.logprobs)


def _run(model: GPT2, request: Request, stopped_B: np.ndarray, decoder: Decoder | SpeculativeDecoder) -> Iterator[Drawn]:
    """New tokens of all rows as they come. Where the context is full, its last half is prefilled anew; so are the rows beside it, each from its own window."""
    windows, left = request.rows, request.new_tokens
    context = model.config.context or max(map(len, windows)) + left  # what has no end is never full
    cut = [len(row) - len(window) for row, window in zip(request.rows, windows, strict=True)]
    while left:
        steps = min(left, context + 1 - max(len(window) for window, stopped in zip(windows, stopped_B, strict=True) if not stopped))
        windows = [window if not stopped else window[:1] for window, stopped in zip(windows, stopped_B, strict=True)]
        decoder.prefill(windows)
        prompt_lengths = [max(len(row) - gone, 0) for row, gone in zip(request.rows, cut, strict=True)]
        news: list[list[int]] = [[] for _ in windows]
        for drawn in decoder.decode(windows, request.sampling, steps, prompt_lengths=prompt_lengths, drawn=request.new_tokens - left, stopped_B=stopped_B):
            for new, tokens in zip(news, drawn.token.tolist(), strict=True):
                new.extend(token for token in tokens if token >= 0)
            yield drawn
        left -= steps
        if stopped_B.all():
            return
        for i, (window, new) in enumerate(zip(windows, news, strict=True)):
            window = [*window, *new]
            keep = len(window) if len(window) <= context else context // 2
            cut[i] += len(window) - keep
            windows[i] = window[len(window) - keep :]


class _Row:
    """What has come of one row."""

    def __init__(self, request: Request) -> None:
        self.request, self.ended = request, False
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.stream = None if request.tokenizer is None else TextStream(request.tokenizer, request.stops)
        self.logprobs: list[float] = []
        self.top: list[dict[int, float]] = []

    def take(self, index: int, drawn: Drawn) -> Piece:
        """A block's tokens, up to the row's end."""
        first, text = len(self.tokens), ""
        reason: Literal["stop", "length"] | None = None
        for k, token in enumerate(drawn.token.tolist()):
            if token == ENDED:
                break
            _check_drawn(index, token)
            self.tokens.append(token)
            if self.request.logprobs is not None:
                self.logprobs.append(float(drawn.log_prob[k]))
                self.top.append(dict(zip(drawn.top_id[k].tolist(), drawn.top_log_prob[k].tolist(), strict=True)))
            if token == self.request.eos:
                reason = "stop"
                break
            if self.stream is not None:
                text += self.stream.push(token)
                if self.stream.stop is not None:
                    reason = "stop"
                    break
        if reason is None and len(self.tokens) == self.request.new_tokens:
            reason = "length"
        if reason is not None and self.stream is not None:
            text += self.stream.finish()
        self.text.append(text)
        self.ended = reason is not None
        return Piece(index, text, self.tokens[first:], self._result(reason) if reason else None)

    def _result(self, reason: Literal["stop", "length"]) -> Generation:
        asked = self.request.logprobs is not None
        text, stop = (None, None) if self.stream is None else ("".join(self.text), self.stream.stop)
        return Generation(self.tokens, text, reason, stop, self.logprobs if asked else None, self.top if asked else None)


def _check_drawn(index: int, token: int) -> None:
    if token == BROKEN:
        raise InputError(f"the model's logits after prompt {index} are not finite (NaN or infinity): its weights are damaged; try another checkpoint")
    if token == STUCK:
        raise InputError(f"the settings leave no token that may follow prompt {index}; forbid fewer tokens, or lower no_repeat_ngram_size or min_new_tokens")
