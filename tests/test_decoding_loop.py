"""The compiled loop against the uncached forward, its ends, and how often it compiles. Letters: B rows, T tokens, K steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import prompt, slow_greedy, tiny

from gpt2jax.decoding import loop
from gpt2jax.decoding.filters import Sampling
from gpt2jax.decoding.generate import generate
from gpt2jax.decoding.request import sampling_of
from gpt2jax.decoding.weights import prepare, turns_weights
from gpt2jax.model.gpt2 import GPT2

GREEDY = dict(temperature=0.0, eos_token_id=None)


def sampling_for(rows: int, model: GPT2, **settings: Any) -> Sampling:
    settings = {"eos": -1, "new_tokens": 99, "positions": model.config.n_positions + 1, **settings}
    return sampling_of({"temperature": 0.0}, rows, model.config.vocab_size, **settings)


def greedy_blocks(model: GPT2, prompts: list[list[int]], *, eos: int, new_tokens: int) -> list[np.ndarray]:
    B = len(prompts)
    decoder = loop.Decoder(prepare(model, turned=turns_weights()))
    decoder.prefill(prompts)
    options = dict(prompt_lengths=list(map(len, prompts)), drawn=0, stopped_B=np.zeros(B, bool))
    return [block.token for block in decoder.decode(prompts, sampling_for(B, model, eos=eos), new_tokens, **options)]


@pytest.mark.parametrize("turned", [False, True])
def test_cached_logits_equal_uncached_ones_at_each_step(turned: bool) -> None:
    """Prompts of 1, 7 and 30 together, through commits and a growing cache: 5 chunks of 32."""
    model, lengths, new = tiny(), np.array([1, 7, 30]), 159
    rows = [prompt(int(n) + new) for n in lengths]
    T, slots = 32, 128
    start_BT = jnp.asarray([row[:n] + [0] * (T - n) for row, n in zip(rows, lengths, strict=True)])
    flat = prepare(model, turned=turned)
    full = [np.asarray(model(jnp.asarray([row]))[0]) for row in rows]
    step = jax.jit(lambda model, tokens_B, state: model.step(tokens_B[:, None], state))
    logits = jax.jit(lambda model, x: model.padded_logits(x)[..., : model.config.vocab_size])
    hidden_BD, state = jax.jit(GPT2.prefill, static_argnames=("slots", "recent"))(flat, start_BT, jnp.asarray(lengths), slots=slots, recent=loop.CHUNK)
    for t in range(new + 1):
        for got, row, n in zip(np.asarray(logits(flat, hidden_BD)), full, lengths, strict=True):
            if n + t <= len(row):
                np.testing.assert_allclose(got, row[n + t - 1], atol=1e-4, rtol=1e-5, err_msg=f"prompt of {n}, step {t}")
        if t == new:
            break
        if t and t % loop.CHUNK == 0:
            if T + t > slots:
                slots = loop.cache_bucket(T + t)
                state = flat.grow(state, slots)
            state = flat.commit(state)
        hidden_BTD, state = step(flat, jnp.asarray([row[n + t] for row, n in zip(rows, lengths, strict=True)]), state)
        hidden_BD = hidden_BTD[:, 0]
    assert slots == 256, "the cache must have grown"


@pytest.mark.parametrize(("length", "new_tokens"), [(1, 1), (7, 2), (16, 33), (17, 34), (100, 100), (3, 150)])
def test_greedy_equals_the_uncached_loop(length: int, new_tokens: int) -> None:
    model, ids = tiny(), prompt(length, seed=1)
    expected = slow_greedy(model, ids, new_tokens)
    assert generate(model, [ids], max_new_tokens=new_tokens, **GREEDY)[0].tokens == expected
    assert new_tokens < 33 or len(set(expected)) > 5, "a constant text would prove little"


def test_the_whole_context_is_usable() -> None:
    """A prompt of 1020 in a context of 1024 has room for 5: the last is never fed back."""
    model, ids = tiny(n_positions=1024), prompt(1020)
    assert generate(model, [ids], max_new_tokens=5, **GREEDY)[0].tokens == slow_greedy(model, ids, 5)
    assert generate(model, [prompt(1024)], max_new_tokens=1, **GREEDY)[0].tokens == slow_greedy(model, prompt(1024), 1)


def test_a_context_that_is_no_power_of_two() -> None:
    model, ids = tiny(n_positions=75), prompt(70)
    assert generate(model, [ids, ids[:3]], max_new_tokens=6, **GREEDY)[0].tokens == slow_greedy(model, ids, 6)


def test_a_row_ends_alone_and_the_loop_ends_with_the_last_row() -> None:
    model, prompts = tiny(), [prompt(n) for n in (5, 9, 2, 3, 14)]
    free = [slow_greedy(model, ids, 70) for ids in prompts]
    eos = next(token for token in free[0][3:30] if all(token not in row for row in free[1:]))
    end = free[0].index(eos)
    blocks = greedy_blocks(model, prompts, eos=eos, new_tokens=70)
    assert [block.shape[1] for block in blocks] == [1, 32, 32, 5]
    rows = np.concatenate(blocks, 1)
    assert rows[0].tolist() == free[0][: end + 1] + [loop.ENDED] * (69 - end)
    assert rows[1:].tolist() == free[1:]
    assert len(greedy_blocks(model, prompts[:1], eos=eos, new_tokens=70)) == 2, "no further chunk once all rows have ended"


def test_steps_stop_inside_a_chunk_once_all_rows_have_ended() -> None:
    model, ids = tiny(), prompt(5)
    free = slow_greedy(model, ids, 30)
    end = next(i for i in range(3, 30) if free[i] not in free[:i])
    carry = after_one_chunk(model, ids, eos=free[end], steps=31)
    assert int(carry.drawn) == end + 1 and int(carry.state.slots.recent) == end
    assert int(after_one_chunk(model, ids, eos=-1, steps=6).drawn) == 7


def started(model: GPT2, ids: list[int], *, eos: int) -> tuple[loop.Decoder, Sampling, loop.Carry]:
    """After the prefill and the first token."""
    decoder, sampling = loop.Decoder(prepare(model, turned=False)), sampling_for(1, model, eos=eos)
    decoder.prefill([ids])
    carry = decoder._start([ids], [len(ids)], 0, np.zeros(1, bool))
    return decoder, sampling, loop._first(decoder.model, decoder._hidden_BD, carry, sampling, None)[0]


def after_one_chunk(model: GPT2, ids: list[int], *, eos: int, steps: int) -> loop.Carry:
    decoder, sampling, carry = started(model, ids, eos=eos)
    carry, _ = loop._chunk(decoder.model, carry.state.frozen, loop._without_frozen(carry), sampling, np.zeros(1, bool), jnp.int32(steps), None)
    return carry


def test_programs_are_compiled_once_a_bucket() -> None:
    """20 lengths and 20 settings: one prefill a prompt bucket, one first draw, chunk and commit a cache bucket, one growth."""
    model = tiny(n_embd=15, n_inner=21)  # a shape that no other test compiles for
    programs = dict(prefill=loop._prefill, first=loop._first, chunk=loop._chunk, commit=loop._commit, grow=loop._grow, longer=loop._lengthen)
    others = dict(extend=loop._extend, gather=loop._gather, trim=loop._trim)
    before = {name: program._cache_size() for name, program in {**programs, **others}.items()}
    for i in range(20):
        settings = dict(temperature=i / 10, top_k=17 * i, top_p=1 - i / 30, min_p=i / 99, typical_p=1 - i / 40, repetition_penalty=1 + i / 9)
        settings |= dict(presence_penalty=i / 7, frequency_penalty=-i / 8, no_repeat_ngram_size=i, min_new_tokens=i, logit_bias={j: j / 7 for j in range(i)})
        settings |= dict(forced_tokens={i: i}, forbidden_tokens=list(range(200, 200 + i)))
        generate(model, [prompt(1 + 5 * i)], max_new_tokens=70 + i, seed=i, eos_token_id=None, **settings)
    added = {name: program._cache_size() - before[name] for name, program in {**programs, **others}.items()}
    assert added["prefill"] == 4  # 16, 32, 64, 128
    assert added["first"] == 1 and added["chunk"] == 2 and added["commit"] == 2 and added["grow"] == 1 >= added["longer"]  # caches of 128 and 256
    assert sum(added[name] for name in others) == 0


def test_equal_prompts_and_a_common_beginning_are_prefilled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny(), []
    monkeypatch.setattr(
        loop,
        "_prefill",
        lambda model, tokens_BT, *rest, real=loop._prefill, **options: seen.append(tokens_BT.shape) or real(model, tokens_BT, *rest, **options),
    )
    start = prompt(40, seed=2)
    prompts = [[*start, 5, 6], start, [*start, *prompt(9)], [*start, 5, 6]]
    results = generate(model, prompts, max_new_tokens=40, **GREEDY)
    assert seen == [(1, 64)]
    assert [row.tokens for row in results] == [slow_greedy(model, ids, 40) for ids in prompts]
    generate(model, [prompt(30)] * 5, max_new_tokens=2, seed=[1, 2, 3, 4, 5])
    generate(model, [prompt(20), prompt(25, seed=1)], max_new_tokens=2)
    assert seen[1:] == [(1, 32), (2, 32)]


def test_a_cache_is_cut_and_extended() -> None:
    """As a conversation does: decode, keep a part, go on with other tokens; each time as if from the start."""
    model, ids = tiny(), prompt(20)
    decoder = loop.Decoder(prepare(model, turned=turns_weights()))

    def go_on(tokens: list[int], new: int) -> list[int]:
        options = dict(prompt_lengths=[len(tokens)], drawn=0, stopped_B=np.zeros(1, bool))
        return [token for block in decoder.decode([tokens], sampling_for(1, model), new, **options) for token in block.token[0].tolist()]

    decoder.prefill([ids])
    first = go_on(ids, 50)
    assert first == slow_greedy(model, ids, 50)
    whole = [*ids, *first[:-1]]  # the last token was never fed back
    decoder.extend([[first[-1], 9, 8, 7]])
    whole += [first[-1], 9, 8, 7]
    assert go_on(whole, 37) == slow_greedy(model, whole, 37)
    decoder.trim([31])
    assert decoder._filled < 64, "slots behind the cut are free again"
    decoder.extend([[4, 4, 200]])
    whole = [*whole[:31], 4, 4, 200]
    assert go_on(whole, 40) == slow_greedy(model, whole, 40)


def test_buckets() -> None:
    assert [loop.prompt_bucket(n, 1000) for n in (1, 16, 17, 512, 513, 1000)] == [16, 16, 32, 512, 1000, 1000]
    assert loop.prompt_bucket(3, 7) == 7
    assert [loop.cache_bucket(n) for n in (1, 128, 129, 1024)] == [128, 128, 256, 1024]


def test_only_the_live_part_is_carried_by_the_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A carry that held the large cache would be copied at each step."""
    decoder, sampling, carry = started(tiny(), prompt(3), eos=-1)
    arguments = (decoder.model, carry.state.frozen, loop._without_frozen(carry), sampling, np.zeros(1, bool), jnp.int32(9))
    seen = []
    monkeypatch.setattr(jax.lax, "scan", lambda step, init, xs, scan=jax.lax.scan: seen.append((init, xs)) or scan(step, init, xs))
    jax.make_jaxpr(lambda *arguments: loop._chunk.__wrapped__(*arguments, None))(*arguments)  # a function of its own, or an earlier trace would be taken
    ((carried, steps),) = seen
    assert max(leaf.size for leaf in jax.tree.leaves(carried)) == max(loop.CHUNK * 12, carry.history.token_BH.size)
    assert max(loop.CHUNK * 12, carry.history.token_BH.size) < min(leaf.size for leaf in jax.tree.leaves(carry.state.frozen))
    assert steps.shape == (loop.CHUNK,)
