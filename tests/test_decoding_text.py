"""Text that comes token by token: split characters and stop strings."""

from __future__ import annotations

import random

import pytest

from gpt2jax.decoding.text import TextStream
from gpt2jax.tokenizer import Tokenizer, load_tokenizer

BYTES, GPT2 = load_tokenizer("bytes"), load_tokenizer("gpt2")


def pieces(tokens: list[int], *stops: str, tokenizer: Tokenizer = BYTES) -> tuple[list[str], str | None]:
    stream = TextStream(tokenizer, stops)
    texts = []
    for token in tokens:
        texts.append(stream.push(token))
        if stream.stop:
            break
    return [*texts, stream.finish()], stream.stop


def test_a_split_emoji_comes_whole() -> None:
    tokens = GPT2.encode("I 🤗é")
    assert len(tokens) > 4
    texts, stop = pieces(tokens, tokenizer=GPT2)
    assert "".join(texts) == "I 🤗é" and "�" not in "".join(texts) and stop is None
    assert any(text == "" for text in texts[:-1]), "the parts of the emoji show nothing"
    assert pieces(list("añb".encode()))[0] == ["a", "", "ñ", "b", ""]


def test_half_a_character_at_the_end_is_replaced() -> None:
    assert pieces(list("a🤗".encode())[:-1])[0] == ["a", "", "", "", "�"]
    assert "".join(pieces([0xFF, *b"ok"])[0]) == "�ok"


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stop"),
    [
        ("one\ntwo", ["\n"], "one", "\n"),
        ("aab", ["ab"], "a", "ab"),  # a matcher that starts again from nothing after a mismatch misses this
        ("xababac", ["abac"], "xab", "abac"),
        ("abab", ["abc"], "abab", None),
        ("ab", ["abc"], "ab", None),  # what was held back comes at the end
        ("zzabcd", ["bcd", "c"], "zzab", "c"),  # the one that is complete first
        ("zzabcd", ["cd", "abcd"], "zz", "abcd"),  # of two that end together the longer one
        ("é!ñ?", ["ñ"], "é!", "ñ"),
        ("END", ["END"], "", "END"),
        ("", ["x"], "", None),
    ],
)
def test_stop_strings(text: str, stops: list[str], shown: str, stop: str | None) -> None:
    texts, found = pieces(list(text.encode()), *stops)
    assert ("".join(texts), found) == (shown, stop)


def test_no_part_of_a_stop_string_is_shown_before_it_is_certain() -> None:
    stream, seen, whole = TextStream(BYTES, ["<end>"]), "", "a <enough <en"
    for i, token in enumerate((whole + "<end>").encode()):
        seen += stream.push(token)
        assert whole.startswith(seen) and len(seen) >= i - len("<end>"), "neither too much nor held back for nothing"
    assert stream.stop == "<end>" and seen + stream.finish() == whole


def test_what_is_shown_does_not_depend_on_the_borders_of_tokens() -> None:
    draw = random.Random(4)
    for _ in range(300):
        text = "".join(draw.choice("abé🤗") for _ in range(draw.randrange(12)))
        stops = ["".join(draw.choice("abé🤗") for _ in range(draw.randrange(1, 4))) for _ in range(draw.randrange(3))]
        ends = sorted((text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text)
        expected = text[: ends[0][0] + ends[0][1]] if ends else text
        by_bytes, by_tokens = (pieces(tokenizer.encode(text), *stops, tokenizer=tokenizer) for tokenizer in (BYTES, GPT2))
        assert "".join(by_bytes[0]) == "".join(by_tokens[0]) == expected and by_bytes[1] == by_tokens[1]
