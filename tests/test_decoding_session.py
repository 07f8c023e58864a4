"""A session's results are those of a fresh call, and it prefills only what is new."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from decoding_helpers import prompt, slow_greedy, tiny

from gpt2jax.decoding import loop
from gpt2jax.decoding.generate import generate
from gpt2jax.decoding.session import Session
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.tokenizer import load_tokenizer

GREEDY: dict[str, Any] = dict(temperature=0.0, eos_token_id=None)


def new_tokens(session: Session, prompt: Any, count: int, *, send: bool = False, **options: Any) -> list[int]:
    call = session.send if send else session.stream
    return [token for piece in call(prompt, max_new_tokens=count, **{**GREEDY, **options}) for token in piece.tokens]


def test_turns_go_on_from_the_cache() -> None:
    model = tiny()
    session, text, before = Session(model), prompt(20), 1
    for turn, more in enumerate(([7, 8, 9], [5], prompt(17), [])):
        text = text + more if turn else text
        got = new_tokens(session, more if turn else text, 33, send=True)
        assert got == slow_greedy(model, text, 33)
        assert session.reused == before - 1, "all but the last new token, which was never fed back"
        text, before = text + got, len(text + got)
        assert session.tokens == text


def test_another_prompt_uses_what_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prefills = tiny(), []
    monkeypatch.setattr(loop, "_prefill", lambda *a, real=loop._prefill, **k: prefills.append(1) or real(*a, **k))
    session, start = Session(model), prompt(40)
    for ids, reused in [(start, 0), ([*start[:30], 1, 2], 30), (start[:25], 24), ([*start[:5], 3], 0), ([*start[:5], 3], 0)]:
        assert new_tokens(session, ids, 20) == slow_greedy(model, ids, 20)
        assert session.reused == reused
    assert len(prefills) == 3, "a beginning of 5 is not worth a cut"


def test_a_call_that_was_left_early() -> None:
    """The reader stops after a chunk while the next one is already under way: what the cache holds of it must not count."""
    model, ids = tiny(), prompt(30)
    session = Session(model)
    pieces = session.stream(ids, max_new_tokens=100, **GREEDY)
    text = [*ids, *next(pieces).tokens, *next(pieces).tokens, 250, 3]
    assert new_tokens(session, [250, 3], 40, send=True) == slow_greedy(model, text, 40)
    assert session.reused == 63, "the last token that was read was fed to that chunk"


def test_a_stop_string_and_an_end_of_text() -> None:
    model, tokenizer = tiny(), load_tokenizer("bytes")
    free = generate(model, ["hello there, you"], max_new_tokens=40, temperature=0, eos_token_id=None, tokenizer=tokenizer)[0]
    session = Session(model, tokenizer)
    stop = free.text[9:11]
    pieces = list(session.stream("hello there, you", max_new_tokens=40, stop=stop, **GREEDY))
    assert "".join(piece.text for piece in pieces) == free.text[: free.text.index(stop)] and pieces[-1].result.stop == stop
    text = list(session.tokens)
    assert new_tokens(session, "abc", 12, send=True) == slow_greedy(model, text + list(b"abc"), 12)
    eos = free.tokens[6]
    fresh = Session(model, tokenizer)
    assert new_tokens(fresh, "hello there, you", 40, eos_token_id=eos)[-1] == eos
    assert new_tokens(fresh, "abc", 12, send=True) == slow_greedy(
        model, list(b"hello there, you") + free.tokens[: free.tokens.index(eos) + 1] + list(b"abc"), 12
    )
    assert fresh.reused >= 16


def test_new_weights_start_anew() -> None:
    model = jax.tree.map(lambda leaf: leaf + 0, tiny())
    session, ids = Session(model), prompt(40)
    new_tokens(session, ids, 20)
    model.norm.scale[...] = -model.norm.scale[...]
    assert new_tokens(session, ids, 20) == slow_greedy(model, ids, 20)
    assert session.reused == 0


def test_a_window_that_slides() -> None:
    model, ids = tiny(), prompt(190)
    session = Session(model)
    expected = generate(model, [ids], max_new_tokens=60, overflow="slide", **GREEDY)[0].tokens
    assert new_tokens(session, ids, 60, overflow="slide") == expected
    with pytest.raises(InputError, match="more than the model's context of 208"):
        session.send([1], max_new_tokens=3)


def test_a_mixer_that_cannot_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on from a cache that is a whole beginning of the prompt, and starts anew otherwise."""
    model, ids = tiny(), prompt(40)
    monkeypatch.setattr(GPT2, "can_trim", property(lambda self: False))
    session = Session(model)
    first = new_tokens(session, ids, 20)
    text = [*ids, *first, 9]
    assert new_tokens(session, text, 20) == slow_greedy(model, text, 20) and session.reused == 59
    assert new_tokens(session, ids[:30], 20) == slow_greedy(model, ids[:30], 20) and session.reused == 0
    decoder = loop.Decoder(model.unstack())
    decoder.prefill([ids])
    with pytest.raises(InputError, match="cannot be cut shorter"):
        jax.eval_shape(lambda state: model.trim(state, state.length_B), decoder.state)


def test_bad_input_is_refused_at_the_call() -> None:
    session = Session(tiny())
    for options, message in [
        (dict(num_samples=2), "drop num_samples"),
        (dict(draft_model=tiny()), "drop draft_model"),
        (dict(top_p=0), "top_p=0"),
        (dict(frob=1), "no option 'frob'"),
    ]:
        with pytest.raises(InputError, match=message):
            session.stream([1, 2], max_new_tokens=4, **options)
    with pytest.raises(InputError, match="needs a tokenizer"):
        session.send("text", max_new_tokens=4)
    assert session.tokens == []
