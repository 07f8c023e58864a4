"""A text that grows: each call goes on from the cache of the last one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from gpt2jax.decoding.generate import Piece, pieces
from gpt2jax.decoding.loop import Decoder, common_prefix
from gpt2jax.decoding.prepared import prepared
from gpt2jax.decoding.request import Prompt, Request, end_of_text_id, prompt_ids
from gpt2jax.decoding.settings import Options
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2

if TYPE_CHECKING:
    from gpt2jax.tokenizer import Tokenizer

#: A shorter common beginning is not worth a cut: the prompt is prefilled from its start.
WORTH_KEEPING = 16


class Session:
    """One text and its cache: `stream` continues any prompt, `send` adds to the text so far and continues that.

    The cache is used again for the tokens that the new prompt begins with, as long as it was made by the same weights (the very same arrays), for the same
    tokens at the same positions; behind them it is cut. Where nothing can be used (new weights, another beginning, a mixer whose running state cannot be cut,
    a window that slid) the prompt is prefilled from its start: the result is the same, up to rounding.

        session = Session(model, tokenizer)
        for piece in session.send("Once upon a time", max_new_tokens=40):
            print(piece.text, end="")
        session.tokens, session.reused  # the text so far, and how many tokens of the last prompt the cache already held
    """

    def __init__(self, model: GPT2, tokenizer: Tokenizer | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.tokens: list[int] = []
        self.reused = 0
        self._decoder: _Keeping | None = None

    def send(self, more: Prompt, **options: Unpack[Options]) -> Iterator[Piece]:
        """Add to the text (a string or ids; nothing is put between) and continue it, as `gpt2jax.stream` does. Both become part of the text."""
        config, new = self.model.config, list[int]()
        if len(more) or not self.tokens:
            new = prompt_ids("prompt 0", more, config, self.tokenizer, end_of_text_id(config, self.tokenizer))
        return self.stream([*self.tokens, *new], **options)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Piece]:
        """Continue this prompt instead of the text so far. Arguments and errors as those of `gpt2jax.stream`; one row, so no num_samples."""
        for name, least in (("num_samples", 1), ("draft_model", None), ("num_beams", 1)):
            if options.get(name, least) != least:
                raise InputError(f"a session has one row and one cache; drop {name}")
        settings: dict[str, Any] = {"tokenizer": self.tokenizer, **options}
        return self._pieces(Request.checked(self.model.config, [prompt], **settings))

    def _pieces(self, request: Request) -> Iterator[Piece]:
        decoder, ready = self._decoder, prepared(self.model, request.cache_dtype)
        if decoder is None or decoder.model is not ready or decoder.alternatives != request.logprobs:  # another `ready`: the weights have changed
            decoder = self._decoder = _Keeping(ready, request.logprobs)
        self.tokens, decoder.reused = list(request.rows[0]), None
        for piece in pieces(self.model, request, decoder=decoder):
            self.tokens.extend(piece.tokens)
            self.reused = decoder.reused or 0
            yield piece


class _Keeping(Decoder):
    """A decoder of one row that knows which tokens its cache holds, and prefills only what is new."""

    def __init__(self, model: GPT2, alternatives: int | None) -> None:
        super().__init__(model, alternatives)
        self.held: list[int] = []
        self.reused: int | None = None  # of the first prefill of a call

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        (row,) = prompts
        cached = min(len(self.held), int(self.state.length_B[0])) if self.held else 0  # the last token drawn was not fed back
        shared = min(common_prefix(row, self.held[:cached]), len(row) - 1) if cached else 0
        whole = cached > 0 and shared == int(self.state.length_B[0])
        if shared < WORTH_KEEPING or not (whole or self.model.can_trim):
            shared = 0
            super().prefill(prompts)
        else:
            if not whole:
                self.trim([shared])
            self.extend([row[shared:]])
        self.held = list(row)
        self.reused = shared if self.reused is None else self.reused

    def decode(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        for drawn in super().decode(*arguments, **options):
            self.held.extend(token for token in drawn.token[0].tolist() if token >= 0)
            yield drawn
