"""From tokens to text while they come: whole characters only, and nothing that may turn out to belong to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpt2jax.tokenizer import Tokenizer


class TextStream:
    """The text of a growing list of tokens, cut before the first stop string.

    Stop strings are matched on text, so across the borders of tokens, as if the text came letter by letter: the one that is complete first counts (of two that
    end together, the longer one). What a token gives may therefore be empty, or belong to tokens before it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # an emoji may be split over tokens
        self._held = ""
        #: The stop string that has come, if one has.
        self.stop: str | None = None

    def push(self, token: int) -> str:
        """One more token: the text that is now certain."""
        return self._more(self._utf8.decode(self._tokenizer.decode_bytes([token])))

    def finish(self) -> str:
        """No more tokens: the text held back, half a character as U+FFFD."""
        text = self._more(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _more(self, text: str) -> str:
        if self.stop is not None:
            return ""
        first_new, self._held = len(self._held), self._held + text
        for end in range(first_new + 1, len(self._held) + 1):
            ending = [stop for stop in self._stops if self._held.endswith(stop, 0, end)]
            if ending:
                self.stop = max(ending, key=len)
                certain, self._held = self._held[: end - len(self.stop)], ""
                return certain
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        keep = next((n for n in range(longest, 0, -1) if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain
