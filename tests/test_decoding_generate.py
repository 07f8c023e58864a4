"""What users call: ragged batches, seeds, ends, text, and every refusal.

Batches have one row or five and models one config wherever that will do: each other shape is seconds of compiling.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import prompt, slow_greedy, tiny

import gpt2jax.decoding.generate as module
import gpt2jax.decoding.prepared as keeping
from gpt2jax.decoding import loop
from gpt2jax.decoding.generate import Generation, generate, stream
from gpt2jax.decoding.request import sampling_of
from gpt2jax.decoding.score import score
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")
EOT = 256
GREEDY: dict[str, Any] = dict(temperature=0.0, eos_token_id=None)
RAGGED = [prompt(1), prompt(30), [EOT, *prompt(5), EOT], prompt(7), prompt(130)]


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=0.0),
        dict(temperature=1.0, seed=11),
        dict(temperature=0.9, top_k=20, seed=[3, 1, 4, 1, 5]),
        dict(
            temperature=[0.0, 1.0, 2.0, 0.5, 1.0],
            top_p=[1.0, 0.5, 0.95, 1.0, 0.9],
            typical_p=[1.0, 1.0, 0.8, 1.0, 1.0],
            repetition_penalty=[1.3, 1.0, 1.2, 1.0, 0.9],
            frequency_penalty=[0.0, 0.5, 0.0, 0.0, 0.1],
            no_repeat_ngram_size=[2, 0, 3, 0, 1],
            min_new_tokens=[0, 45, 9, 0, 3],
            forced_tokens=[{}, {3: 7}, {-1: 9}, {}, {0: 1, 44: 2}],
            logit_bias=[{}, {EOT: 50.0}, {}, {EOT: 8.0}, {}],
            seed=[9, 8, 7, 6, 5],
        ),
    ],
)
def test_a_ragged_batch_equals_each_prompt_alone(settings: dict[str, Any]) -> None:
    model, settings = tiny(), dict(settings, eos_token_id=EOT)
    together = generate(model, RAGGED, max_new_tokens=45, **settings)
    for i, ids in enumerate(RAGGED):
        one = {name: value[i] if isinstance(value, list) else value for name, value in settings.items()}
        assert generate(model, [ids], max_new_tokens=45, **one) == [together[i]]
    order = [3, 0, 4, 2, 1]
    moved = {name: [value[i] for i in order] if isinstance(value, list) else value for name, value in settings.items()}
    assert generate(model, [RAGGED[i] for i in order], max_new_tokens=45, **moved) == [together[i] for i in order]
    assert len({tuple(result.tokens) for result in together}) == len(RAGGED)


def test_one_seed_is_used_by_every_row_and_seeds_differ() -> None:
    model, ids = tiny(), prompt(4)
    same = generate(model, [ids, ids, *RAGGED[2:]], max_new_tokens=20, seed=5)
    assert same[0] == same[1] == generate(model, [ids], max_new_tokens=20, seed=[5])[0]
    other = generate(model, [ids, ids, *RAGGED[2:]], max_new_tokens=20, seed=[5, 6, 5, 5, 7])
    assert other[0] == same[0] and other[1] != same[0]
    assert other[2:4] == same[2:4] and other[4] != same[4]


def test_more_new_tokens_go_on_from_the_same_text() -> None:
    model = tiny()
    short, long = (generate(model, [prompt(7)], max_new_tokens=n, seed=3)[0].tokens for n in (21, 60))
    assert long[:21] == short


def test_the_padding_of_the_vocabulary_changes_nothing() -> None:
    """Neither by their zero logits nor by the random numbers that they would take."""
    plain, padded = tiny(), tiny(vocab_multiple=1024)
    assert plain.token_table.shape[0] == 320
    padded.token_table[...] = jnp.pad(plain.token_table[...], ((0, 1024 - 320), (0, 0)))
    for settings in (dict(temperature=0.0), dict(temperature=3.0, seed=2)):
        plain_rows, padded_rows = (generate(m, RAGGED, max_new_tokens=40, **settings) for m in (plain, padded))
        assert plain_rows == padded_rows
        assert all(token < 257 for row in padded_rows for token in row.tokens)


def test_ids_without_text_in_the_tokenizer_are_never_drawn() -> None:
    model = tiny(vocab_size=300)
    rows = dict(max_new_tokens=1, temperature=9.0, seed=list(range(150)))
    assert max(row.tokens[0] for row in generate(model, ["abc"] * 150, tokenizer=BYTES, **rows)) < BYTES.n_vocab
    assert max(row.tokens[0] for row in generate(model, [[1, 2]] * 150, **rows)) >= BYTES.n_vocab


def test_end_of_text_counts_only_when_drawn() -> None:
    """The end-of-text id stands in every prompt: first, last, in the middle and alone; only the row that draws it ends."""
    model = tiny()
    for eos in range(257):
        prompts = [[eos, 5, 9], [7, eos], [3, eos, eos, 4], [eos], [eos, 8]]
        free = [slow_greedy(model, ids, 40) for ids in prompts[:1]]
        if eos in free[0][2:] and eos not in free[0][:2]:
            free += [slow_greedy(model, ids, 40) for ids in prompts[1:]]
            break
    expected = [Generation(row[: row.index(eos) + 1], None, "stop") if eos in row else Generation(row, None, "length") for row in free]
    assert generate(model, prompts, max_new_tokens=40, temperature=0, eos_token_id=eos) == expected
    end = free[0].index(eos)
    last = generate(model, prompts[:1], max_new_tokens=end + 1, temperature=0, eos_token_id=eos)[0]
    assert last == expected[0], "the end of text as the last token allowed is a stop"
    assert {row.finish_reason for row in expected} == {"stop", "length"}


def test_where_the_end_of_text_comes_from() -> None:
    first = slow_greedy(tiny(), [4, 5], 1)[0]
    stop = lambda model, **options: generate(model, [[4, 5]], max_new_tokens=1, temperature=0, **options)[0].finish_reason  # noqa: E731
    assert stop(tiny(eos_token_id=first)) == "stop"
    assert stop(tiny(eos_token_id=first), eos_token_id=None) == "length"
    assert stop(tiny()) == "length"
    assert stop(tiny(), eos_token_id=first) == "stop"
    tokenizer = load_tokenizer("bytes").__class__("x", {bytes([b]): b for b in range(256)}, {"<|end|>": 256}, eot=256)
    tokenizer.eot = first
    assert stop(tiny(), tokenizer=tokenizer) == "stop"
    assert stop(tiny(eos_token_id=(first + 1) % 257), tokenizer=tokenizer) == "length", "the model's own comes first"


def test_strings_and_text() -> None:
    model = tiny()
    from_text = generate(model, ["héllo", "<|endoftext|>"], max_new_tokens=30, seed=4, tokenizer=BYTES)
    from_ids = generate(model, [list("héllo".encode()), list(b"<|endoftext|>")], max_new_tokens=30, seed=4, eos_token_id=EOT)
    assert [row.tokens for row in from_text] == [row.tokens for row in from_ids]
    assert [row.text for row in from_ids] == [None, None]
    for row in from_text:
        assert row.text == bytes(token for token in row.tokens if token < 256).decode(errors="replace")
    eos = from_text[0].tokens[3]
    cut = generate(model, ["héllo"], max_new_tokens=30, seed=4, tokenizer=BYTES, eos_token_id=eos)[0]
    assert cut.finish_reason == "stop" and cut.tokens[-1] == eos
    assert cut.text == BYTES.decode(cut.tokens[:-1])


def test_an_empty_prompt_means_the_end_of_text() -> None:
    drawn = dict(max_new_tokens=1, seed=1, tokenizer=BYTES, temperature=0.01)
    empty = generate(tiny(eos_token_id=9), [[], [9], "", [EOT]], **drawn)
    assert empty[0] == empty[1] == empty[2] != empty[3], "the model's own end of text"
    by_tokenizer = generate(tiny(), ["", [EOT], [9], [8]], **drawn)
    assert by_tokenizer[0] == by_tokenizer[1] != by_tokenizer[2]
    with pytest.raises(InputError, match="prompt 1 is empty"):
        generate(tiny(), [[1], []], max_new_tokens=2)


def test_arrays_of_ids_are_taken() -> None:
    model, rows = tiny(), np.array([prompt(6), prompt(6, seed=1)])
    expected = generate(model, rows.tolist(), max_new_tokens=9)
    assert generate(model, rows, max_new_tokens=9) == expected
    assert generate(model, [jnp.asarray(rows[0]), rows[1].astype(np.uint16)], max_new_tokens=9) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prompts="abc"), "must be a list"),
        (dict(prompts=b"abc"), "must be a list"),
        (dict(prompts=5), "must be a list"),
        (dict(prompts=[]), "empty list"),
        (dict(prompts=[1, 2, 3]), r"prompt 0 must be .* \[\[1, 2, 3\]\]"),
        (dict(prompts=["abc"]), "needs a tokenizer"),
        (dict(prompts=[[1, 257]]), "token id 257 .* 0 to 256"),
        (dict(prompts=[[1], [3, -1]]), "prompt 1: token id -1"),
        (dict(prompts=[[True, 2]]), "whole number, not True"),
        (dict(prompts=[[2.0]]), "whole number, not 2.0"),
        (dict(prompts=np.ones((2, 3))), "whole number, not 1.0"),
        (dict(prompts=["a\udcff"], tokenizer=BYTES), "prompt 0 is not valid UTF-8"),
        (dict(prompts=[[7] * 209]), "209 tokens, more than the model's context of 208"),
        (dict(prompts=[[7], [7] * 204], max_new_tokens=6), "prompt 1 has 204 tokens, which leaves room for 5 .* of 208, not 6; .* to 5"),
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(max_new_tokens=2.0), "max_new_tokens=2.0"),
        (dict(max_new_tokens=True), "max_new_tokens=True"),
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(temperature=float("inf")), "temperature=inf"),
        (dict(temperature=1e39), r"temperature=1e\+39"),
        (dict(temperature="1"), "temperature='1'"),
        (dict(temperature=[1.0, 2.0]), "2 values for 1 prompts"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(top_k=1.5), "top_k=1.5"),
        (dict(seed=[1, 2]), "seed has 2 values for 1 prompts"),
        (dict(seed=-1), "seed=-1"),
        (dict(seed=2**32), "seed=4294967296"),
        (dict(eos_token_id=257), "eos_token_id=257: token id 257"),
        (dict(eos_token_id="256"), "eos_token_id='256'"),
        (dict(top_p=0.0), "top_p=0.0 must be above 0 and at most 1"),
        (dict(top_p=1.1), "top_p=1.1"),
        (dict(min_p=-0.1), "min_p=-0.1"),
        (dict(min_p=1.5), "min_p=1.5"),
        (dict(typical_p=0), "typical_p=0"),
        (dict(repetition_penalty=0), "repetition_penalty=0 must be a finite number above 0"),
        (dict(presence_penalty=float("inf")), "presence_penalty=inf"),
        (dict(frequency_penalty="x"), "frequency_penalty='x'"),
        (dict(no_repeat_ngram_size=-1), "no_repeat_ngram_size=-1"),
        (dict(min_new_tokens=-1), "min_new_tokens=-1"),
        (dict(logit_bias=[5]), "logit_bias=5 must be a map"),
        (dict(logit_bias={5: float("nan")}), "logit_bias=nan"),
        (dict(logit_bias={300: 1.0}), "logit_bias: token id 300"),
        (dict(forbidden_tokens=[257]), "forbidden_tokens: token id 257"),
        (dict(forbidden_tokens=[[1], [2]]), "forbidden_tokens has 2 values for 1 prompts"),
        (dict(forced_tokens={4: 1}), "new token 4; with max_new_tokens=4, 0 to 3"),
        (dict(forced_tokens={-5: 1}), "new token -5"),
        (dict(forced_tokens={0: 257}), "forced_tokens: token id 257"),
        (dict(forced_tokens={0: 9}, forbidden_tokens=[9]), "token 9, which is forbidden"),
        (dict(stop="x"), "needs a tokenizer"),
        (dict(stop=["a", ""], tokenizer=BYTES), "none of them empty"),
        (dict(stop=[5], tokenizer=BYTES), "none of them empty"),
        (dict(num_samples=0), "num_samples=0"),
        (dict(logprobs=-1), "logprobs=-1 must be between 0 and 64"),
        (dict(logprobs=True), "logprobs=True"),
        (dict(overflow="wrap"), "overflow='wrap'"),
        (dict(topp=0.5), "no option 'topp'"),
        (dict(draft_model=tiny(vocab_size=300)), "draft model has a vocabulary of 300 ids and the model one of 257"),
        (dict(draft_model=tiny(), draft_tokens=0), "draft_tokens=0"),
        (dict(draft_model=tiny(), overflow="slide"), "does not go with a draft model"),
        (dict(num_beams=0), "num_beams=0"),
        (dict(num_beams=2, num_samples=3), "num_samples=3 must be between 1 and 2"),
        (dict(num_beams=2, top_p=0.9), "top_p does not go with num_beams"),
        (dict(num_beams=2, temperature=0.9), "temperature does not go with num_beams"),
        (dict(num_beams=2, logprobs=0), "logprobs does not go with num_beams"),
        (dict(num_beams=2, stop="x", tokenizer=BYTES), "stop does not go with num_beams"),
        (dict(num_beams=2, overflow="slide"), "overflow does not go with num_beams"),
        (dict(num_beams=2, draft_model=tiny()), "draft_model does not go with num_beams"),
        (dict(num_beams=2, length_penalty=float("nan")), "length_penalty=nan"),
        (dict(num_beams=2, early_stopping="maybe"), "early_stopping='maybe'"),
        (dict(length_penalty=2.0), "need num_beams=2"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_any_compute(change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prepared", lambda *_: pytest.fail("computed"))
    with pytest.raises(InputError, match=message) as caught:
        generate(tiny(), **{"prompts": [[1, 2]], "max_new_tokens": 4, **change})
    assert "\n" not in str(caught.value)


def test_the_largest_legal_values() -> None:
    model = tiny()
    assert len(generate(model, [[7] * 204], max_new_tokens=5, seed=2**32 - 1, top_k=10**20, eos_token_id=None)[0].tokens) == 5
    plain = generate(model, [[7]], max_new_tokens=15)
    assert generate(model, [[7]], max_new_tokens=15, top_k=257) == plain == generate(model, [[7]], max_new_tokens=15, top_k=10**20)


def test_broken_weights_are_reported() -> None:
    model = tiny()
    broken = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.nan), model)
    with pytest.raises(InputError, match="not finite"):
        generate(broken, [[1, 2, 3]], max_new_tokens=5)


def test_weights_are_prepared_once_and_again_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = jax.tree.map(lambda leaf: leaf + 0, tiny())
    calls = []
    monkeypatch.setattr(keeping, "prepare", lambda model, real=keeping.prepare, **form: calls.append(1) or real(model, **form))
    before = [generate(model, [[1, 2]], max_new_tokens=20, temperature=0)[0].tokens for _ in range(2)]
    assert len(calls) == 1 and before[0] == before[1]
    model.norm.scale[...] = -model.norm.scale[...]  # as a training step that writes into the module does
    assert generate(model, [[1, 2]], max_new_tokens=20, temperature=0)[0].tokens == slow_greedy(model, [1, 2], 20) != before[0]
    assert len(calls) == 2
    expected = [slow_greedy(model, [1 + i, 2], 20) for i in range(5)]
    assert [row.tokens for row in generate(model, [[1 + i, 2] for i in range(5)], max_new_tokens=20, temperature=0)] == expected
    assert len(calls) == 2, "a batch takes the same form"
    assert generate(model, [[1, 2]], max_new_tokens=20, temperature=0, cache_dtype="int8")[0].tokens[:3] == slow_greedy(model, [1, 2], 3)
    assert len(calls) == 3


def test_pieces_add_up_to_the_result_and_come_as_they_are_drawn() -> None:
    model, options = tiny(), dict(max_new_tokens=70, seed=[1, 2, 3, 4, 5], tokenizer=BYTES)
    prompts, whole = ["a", "bc 🤗", "d" * 40, "", "xyz"], {}
    pieces = list(stream(model, prompts, **options))
    for index, expected in enumerate(generate(model, prompts, **options)):
        own = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in own) == expected.text and sum((piece.tokens for piece in own), []) == expected.tokens
        assert [piece.result for piece in own] == [None] * (len(own) - 1) + [expected]
        whole[index] = [len(piece.tokens) for piece in own]
    assert whole[0] == [1, 32, 32, 5]


def test_the_first_text_needs_the_prefill_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = []
    monkeypatch.setattr(loop, "_chunk", lambda *a, real=loop._chunk: chunks.append(1) or real(*a))
    pieces = stream(tiny(), [prompt(5)], max_new_tokens=150, seed=1)
    assert not chunks, "nothing is computed before the first piece is asked for"
    next(pieces)
    assert not chunks
    next(pieces)
    assert len(chunks) == 2, "the next chunk is under way while the caller has this one"


def test_bad_input_of_a_stream_is_refused_at_the_call() -> None:
    with pytest.raises(InputError, match="top_k=-1"):
        stream(tiny(), [[1]], max_new_tokens=3, top_k=-1)


def test_a_stop_string_ends_its_row_alone() -> None:
    model, prompts = tiny(), ["a", "bc 🤗", "d" * 40, "", "xyz"]
    free = generate(model, prompts, max_new_tokens=100, seed=3, tokenizer=BYTES, eos_token_id=None)
    stop = free[1].text[11:13]
    cut = generate(model, prompts, max_new_tokens=100, seed=3, tokenizer=BYTES, eos_token_id=None, stop=["not there at all", stop])
    for before, after in zip(free, cut, strict=True):
        place = before.text.find(stop)
        if place < 0:
            assert after == before
        else:
            assert after.text == before.text[:place] and after.finish_reason == "stop" and after.stop == stop
            assert after.tokens == before.tokens[: len(after.tokens)] and BYTES.decode(after.tokens).endswith(stop)
    assert cut[1].stop == stop and cut[1].text == free[1].text[: free[1].text.index(stop)]


def test_the_loop_ends_once_every_row_has_its_stop_string(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = []
    monkeypatch.setattr(loop, "_chunk", lambda *a, real=loop._chunk: chunks.append(1) or real(*a))
    text = generate(tiny(), ["a"], max_new_tokens=200, seed=3, tokenizer=BYTES, eos_token_id=None)[0].text
    everything = len(chunks)
    generate(tiny(), ["a"], max_new_tokens=200, seed=3, tokenizer=BYTES, eos_token_id=None, stop=text[2:5])
    assert everything == 7 and len(chunks) - everything == 2, "one chunk with the string in it, one that was under way"


def test_several_samples_of_each_prompt() -> None:
    model = tiny()
    samples = generate(model, [prompt(3), prompt(9)], max_new_tokens=20, seed=[5, 9], num_samples=3, top_k=[0, 20])
    for i, (ids, top_k) in enumerate([(prompt(3), 0), (prompt(9), 20)]):
        for j in range(3):
            assert samples[3 * i + j] == generate(model, [ids], max_new_tokens=20, seed=[5, 9][i] + j, top_k=top_k)[0]
    assert len({tuple(row.tokens) for row in samples}) == 6


def test_logprobs_are_the_models_own() -> None:
    model, prompts = tiny(), RAGGED[:2]
    results = generate(model, prompts, max_new_tokens=36, seed=2, temperature=0.7, top_k=30, repetition_penalty=1.5, logprobs=3, eos_token_id=None)
    for ids, result in zip(prompts, results, strict=True):
        log_probs = np.asarray(jax.nn.log_softmax(model(jnp.asarray([[*ids, *result.tokens]]))[0]))[len(ids) - 1 : -1]
        np.testing.assert_allclose(result.logprobs, log_probs[np.arange(36), result.tokens], atol=1e-4)
        for row, top in zip(log_probs, result.top_logprobs, strict=True):
            assert list(top) == np.argsort(-row)[:3].tolist()
            np.testing.assert_allclose(list(top.values()), np.sort(row)[::-1][:3], atol=1e-4)
    only = generate(model, prompts, max_new_tokens=36, seed=2, temperature=0.7, top_k=30, repetition_penalty=1.5, logprobs=0, eos_token_id=None)
    assert [row.tokens for row in only] == [row.tokens for row in results] and only[0].top_logprobs == [{}] * 36
    np.testing.assert_allclose(only[0].logprobs, results[0].logprobs, atol=1e-6)


def slow_slide(model: Any, ids: list[int], count: int) -> list[int]:
    """Greedy over windows: once the context is full, its last half is the next prompt."""
    C, window, new = model.config.n_positions, list(ids), []
    while len(new) < count:
        more = slow_greedy(model, window, min(count - len(new), C + 1 - len(window)))
        new, window = [*new, *more], [*window, *more]
        window = window[-(C // 2) :] if len(window) > C else window
    return new


def test_a_full_context_slides_on_request() -> None:
    """Rows slide each at its own time, as they do alone; a prompt that is too long starts with its last half window."""
    model = tiny(n_positions=75)
    prompts = [prompt(70), prompt(4), prompt(33), prompt(75), prompt(100)]
    results = generate(model, prompts, max_new_tokens=120, overflow="slide", **GREEDY)
    for ids, result in zip([*prompts[:4], prompts[4][-37:]], results, strict=True):
        assert result.tokens == slow_slide(model, ids, 120)
    eos = next(token for token in results[0].tokens[10:] if token not in results[0].tokens[:10])
    ended = generate(model, prompts, max_new_tokens=120, overflow="slide", temperature=0, eos_token_id=eos)
    for free, row in zip(results, ended, strict=True):
        assert row.tokens == (free.tokens[: free.tokens.index(eos) + 1] if eos in free.tokens else free.tokens)


def test_penalties_after_a_slide_count_the_new_text_in_the_window() -> None:
    """70 tokens of prompt and 6 new ones fill a context of 75; its last 37 hold 31 of the prompt."""
    model, ids = tiny(n_positions=75), prompt(70)
    slid = generate(model, [ids], max_new_tokens=16, overflow="slide", frequency_penalty=9.0, **GREEDY)[0].tokens
    window = [*ids, *slid[:6]][-37:]
    decoder, sampling = (
        loop.Decoder(keeping.prepared(model)),
        sampling_of(dict(temperature=0.0, frequency_penalty=9.0), 1, 257, eos=-1, new_tokens=16, positions=76),
    )
    decoder.prefill([window])
    blocks = decoder.decode([window], sampling, 10, prompt_lengths=[31], drawn=6, stopped_B=np.zeros(1, bool))
    assert slid[6:] == [token for block in blocks for token in block.token[0].tolist()]


def test_settings_that_leave_no_token_are_reported() -> None:
    with pytest.raises(InputError, match="leave no token that may follow prompt 0"):
        generate(tiny(), [[1]], max_new_tokens=2, forbidden_tokens=list(range(257)))


def test_a_draft_model_changes_no_greedy_token() -> None:
    model = tiny()
    draft = jax.tree.map(lambda leaf: leaf * 1.01, model)
    plain = generate(model, RAGGED, max_new_tokens=45, temperature=0, eos_token_id=EOT, logprobs=2)
    drafted = generate(model, RAGGED, max_new_tokens=45, temperature=0, eos_token_id=EOT, logprobs=2, draft_model=draft, draft_tokens=3)
    assert [row.tokens for row in drafted] == [row.tokens for row in plain] and [row.finish_reason for row in drafted] == [row.finish_reason for row in plain]
    for one, other in zip(plain, drafted, strict=True):
        assert one.draft_acceptance is None and 0 < other.draft_acceptance <= 1
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    prompts = ["abc", "d", "ef", "gh", "i"]
    text = generate(model, prompts, max_new_tokens=45, temperature=0, tokenizer=BYTES, eos_token_id=None)[0].text
    options = dict(max_new_tokens=45, temperature=0, tokenizer=BYTES, eos_token_id=None, logprobs=2, draft_model=draft, draft_tokens=3)
    cut = generate(model, prompts, stop=text[20:22], **options)[0]
    assert cut.text == text[: text.index(text[20:22])] and cut.finish_reason == "stop"


def test_in_bfloat16_a_batch_is_each_prompt_alone_up_to_rounding() -> None:
    """Sums of another order round differently, so tokens may part; along one text the log-probabilities stay within 1 % of the spread of the logits."""
    model, options = tiny(compute_dtype="bfloat16"), dict(max_new_tokens=40, logprobs=0, eos_token_id=None)
    texts = [row.tokens for row in generate(tiny(), RAGGED, temperature=0, **options)]
    forced = [dict(enumerate(text)) for text in texts]
    together, exact = (generate(m, RAGGED, forced_tokens=forced, **options) for m in (model, tiny()))
    spread = float(jnp.ptp(tiny()(jnp.asarray([RAGGED[1]]))))
    for i in (1, 4):
        alone = generate(model, [RAGGED[i]], forced_tokens=forced[i], **options)[0]
        assert alone.tokens == together[i].tokens == texts[i]
        np.testing.assert_allclose(alone.logprobs, together[i].logprobs, atol=0.01 * spread)
        assert 0 < np.abs(np.subtract(exact[i].logprobs, alone.logprobs)).max() < 0.02 * spread


def test_beams_come_best_first_with_text_and_score() -> None:
    model = tiny()
    results = generate(model, ["abc", [7, 8]], max_new_tokens=12, num_beams=4, num_samples=3, length_penalty=0.0, tokenizer=BYTES, repetition_penalty=1.2)
    assert len(results) == 6 and all(row.text == BYTES.decode([token for token in row.tokens if token != EOT]) for row in results)
    assert [row.score for row in results[:3]] == sorted((row.score for row in results[:3]), reverse=True)
    plain = generate(model, ["abc"], max_new_tokens=12, num_beams=4, length_penalty=0.0, tokenizer=BYTES, eos_token_id=None)[0]
    scored = score(model, [plain.tokens], context=list(b"abc"))[0]
    assert plain.score == pytest.approx(scored.total, abs=1e-3) and plain.finish_reason == "length"
    prompts = ["abc", "x", "hello", "q", "zz"]
    found, greedy = (generate(model, prompts, max_new_tokens=12, tokenizer=BYTES, eos_token_id=None, **how) for how in (dict(num_beams=4), dict(temperature=0)))
    gains = [
        best.score - score(model, [plain.tokens], context=text)[0].total / 12
        for best, plain, text in zip(found, greedy, [list(prompt.encode()) for prompt in prompts], strict=True)
    ]
    assert min(gains) > -1e-4 and max(gains) > 0.01, "the search finds likelier texts"
    with pytest.raises(InputError, match="cannot be streamed"):
        stream(model, ["abc"], max_new_tokens=2, num_beams=2, tokenizer=BYTES)
