"""Latent attention: its two forms and what is in its cache. Letters as in gpt2jax/model/mla.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import prompt, slow_greedy, tiny

from gpt2jax.config import LoraConfig, ModelConfig
from gpt2jax.decoding.beams import search
from gpt2jax.decoding.generate import generate
from gpt2jax.decoding.request import sampling_of
from gpt2jax.decoding.session import Session
from gpt2jax.decoding.weights import prepare, quantize
from gpt2jax.model.cache import KV, Slots, Span
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.lora import adapted
from gpt2jax.model.mla import LatentAttention
from gpt2jax.model.parameters import abstract_model, map_named
from gpt2jax.training.optimizer import decay_mask, muon_matrices

#: 3 heads, which no other size is a multiple of.
SIZES: dict[str, Any] = dict(attention="mla", mla_kv_rank=10, mla_nope_dim=5, mla_rope_dim=4, mla_value_dim=7)
MODEL: dict[str, Any] = SIZES | dict(position="rope", mla_q_rank=8)


@functools.cache
def module(**changes: Any) -> LatentAttention:
    """Weights and scales far from where they start."""
    config = ModelConfig(**{**SIZES, "n_layer": 1, "n_head": 3, "n_embd": 12, **changes})
    spread = lambda leaf: leaf + 0.4 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)  # noqa: E731
    return jax.tree.map(spread, LatentAttention(config, jax.random.key(0)))


def by_hand(m: LatentAttention, x_TD: np.ndarray[Any, Any], theta: float | None) -> np.ndarray[Any, Any]:
    """The paper's equations in float64, a token, a head and a pair at a time; theta turns neighbours."""
    w = lambda linear: np.asarray(linear.w[...], np.float64)  # noqa: E731
    normed = lambda norm, x: x / np.sqrt((x**2).mean() + 1e-6) * np.asarray(norm.scale[...], np.float64)  # noqa: E731

    def turned(x_P: np.ndarray[Any, Any], t: int) -> np.ndarray[Any, Any]:
        if theta is None:
            return x_P
        turns = [complex(x_P[2 * j], x_P[2 * j + 1]) * np.exp(1j * t * theta ** (-2 * j / len(x_P))) for j in range(len(x_P) // 2)]
        return np.array([part for z in turns for part in (z.real, z.imag)])

    q, k, v = [], [], []
    for t, x_D in enumerate(np.asarray(x_TD, np.float64)):
        q_in = x_D if m.query_down is None else normed(m.query_norm, x_D @ w(m.query_down) + np.asarray(m.query_down.b[...]))
        both = x_D @ w(m.latent) + np.asarray(m.latent.b[...])
        c_E, k_P = normed(m.latent_norm, both[:10]), turned(both[10:], t)
        q_HK = np.einsum("d,dhk->hk", q_in, w(m.query))
        q.append([np.concatenate([q_K[:5], turned(q_K[5:], t)]) for q_K in q_HK])
        k.append([np.concatenate([c_E @ w(m.key_up)[:, h], k_P]) for h in range(3)])
        v.append([c_E @ w(m.value_up)[:, h] for h in range(3)])
    y = []
    for t in range(len(q)):
        o = np.zeros((3, 7))
        for h in range(3):
            score = np.exp([q[t][h] @ k[s][h] / math.sqrt(9) for s in range(t + 1)])
            o[h] = sum(score[s] / score.sum() * v[s][h] for s in range(t + 1))
        y.append(np.einsum("hv,hvd->d", o, w(m.out)) + np.asarray(m.out.b[...]))
    return np.stack(y)


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * float(np.abs(want).max()))


@pytest.mark.parametrize("changes", [dict(position="rope", rope_layout="interleaved", mla_q_rank=8), dict(position="none")], ids=str)
def test_both_forms_are_the_papers_equations(changes: dict[str, Any]) -> None:
    """Expanded: a whole sequence. Absorbed: the same tokens from an empty cache, three and then one by one."""
    m, x_BTD = module(**changes), jax.random.normal(jax.random.key(1), (2, 8, 12))
    want_BTD = np.stack([by_hand(m, np.asarray(x_TD), 1e4 if changes["position"] == "rope" else None) for x_TD in x_BTD])
    y_BTD, kv = m(x_BTD, Span.of((2, 8)))
    close(y_BTD, want_BTD)
    frozen, live = m.start(jax.tree.map(lambda leaf: leaf[:, :, :0], kv), 1, 8)
    slots, ys, start = Slots(jnp.zeros((2, 1), bool), jnp.zeros((2, 8), bool), jnp.int32(0), jnp.int32(0)), [], 0
    for end in (3, 4, 5, 6, 7, 8):
        slots = slots.push(jnp.ones((2, end - start), bool))
        span = Span(jnp.broadcast_to(jnp.arange(start, end), (2, end - start)))
        y_BtD, live = m.step(x_BTD[:, start:end], frozen, live, slots, span)
        ys.append(y_BtD)
        start = end
    close(jnp.concatenate(ys, 1), want_BTD)
    close(live.k, kv.k)
    close(live.v, kv.v)


def test_the_cache_is_a_latent_and_a_shared_key_a_token() -> None:
    """10 + 4 numbers, however many heads there are."""
    for heads in (3, 6):
        model = abstract_model(tiny(**MODEL).config if heads == 3 else ModelConfig(**MODEL, n_layer=2, n_head=heads, n_embd=12))
        _, state = jax.eval_shape(lambda model: model.prefill(jnp.zeros((5, 6), jnp.int32), jnp.full(5, 6), slots=16, recent=4), model)
        for part, slots in ((state.frozen, 16), (state.live, 4)):
            assert sum(leaf.size for leaf in jax.tree.leaves(part)) == 2 * 5 * slots * (10 + 4)


def steps(model: GPT2, **options: Any) -> Any:
    """Logits of 21 tokens' prefill, and of a step before and after a commit."""
    tokens_BT, ready = jnp.asarray([prompt(23), prompt(23, seed=1)]), prepare(model, **options)
    hidden_BD, state = jax.jit(lambda model: model.prefill(tokens_BT[:, :21], jnp.full(2, 21), slots=32, recent=3))(ready)
    out, step = [ready.padded_logits(hidden_BD)], jax.jit(lambda model, tokens_BT, state: model.step(tokens_BT, state))
    for t in (21, 22):
        hidden_BTD, state = step(ready, tokens_BT[:, t : t + 1], state)
        out.append(ready.padded_logits(hidden_BTD[:, 0]))
        state = ready.grow(ready.commit(state), 64)
    assert isinstance(state.frozen[0], KV) and state.frozen[0].k.dtype == jnp.dtype(options.get("cache_dtype") or "float32")
    return jnp.stack(out, 1)[..., :257], model(tokens_BT)[:, 20:]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_smaller_and_turned_weights_decode_as_they_compute(kind: str, turned: bool) -> None:
    """The absorbed form reads the same small weights. Turned maps round activations, for int8 to 16 bits, for bfloat16 to two numbers."""
    close(*steps(quantize(tiny(**MODEL), kind), turned=turned), 3e-4 if kind != "float32" and turned else 1e-5)


def test_adapters_decode_as_they_compute() -> None:
    model = adapted(tiny(**MODEL), LoraConfig(rank=2, alpha=4.0), jax.random.key(1))
    model = map_named(lambda name, leaf: leaf + 0.5 * jax.random.normal(jax.random.key(7), leaf.shape) if name.endswith("lora_b") else leaf, model)
    got, want = steps(model, turned=True)
    close(got, want)
    assert float(jnp.abs(want - steps(tiny(**MODEL), turned=True)[1]).max()) > 0.1


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 0.02), ("int8", 0.03)])
def test_a_cache_of_another_dtype(dtype: str, error: float) -> None:
    got, want = steps(tiny(**MODEL), turned=False, cache_dtype=dtype)
    close(got[:, 0], want[:, 0])  # the prompt itself is attended in the compute dtype
    errors = np.abs(got - want)[:, 1:].max() / np.abs(want).max()
    assert errors < error and (dtype == "float32" or errors > 1e-5)


def test_it_decodes_every_way() -> None:
    """Prompts of two lengths, drafting, a session that goes on from what it shares, and a beam of one: the uncached forward's tokens."""
    model, draft = tiny(**MODEL), tiny(**MODEL | dict(n_layer=1))
    rows = [prompt(20), prompt(5, seed=2)]
    want = [slow_greedy(model, row, 18) for row in rows]
    options: dict[str, Any] = dict(max_new_tokens=18, temperature=0, eos_token_id=None)
    assert [result.tokens for result in generate(model, rows, **options)] == want
    assert [result.tokens for result in generate(model, rows, **options, draft_model=draft, draft_tokens=3)] == want
    session = Session(model)
    for ids in (rows[0], [*rows[0][:18], 3]):
        assert [token for piece in session.stream(ids, **options) for token in piece.tokens] == slow_greedy(model, ids, 18)
    assert session.reused == 18
    sampling = sampling_of({}, 2, 257, eos=-1, new_tokens=18)
    found = search(prepare(model, turned=False), rows, sampling, new_tokens=18, num_beams=1)
    assert [row[0].tokens for row in found] == want


def test_axes_decay_and_matrices() -> None:
    model = abstract_model(tiny(**MODEL).config)
    decays, matrices = decay_mask(model), muon_matrices(model)
    mixer = {name.removeprefix("blocks.mixer."): name for name in decays if name.startswith("blocks.mixer.")}
    assert {name for name, full in mixer.items() if decays[full]} == {f"{name}.w" for name in ("query_down", "query", "latent", "key_up", "value_up", "out")}
    shapes = {name: (matrices[full].reduction_axis, matrices[full].output_axis) for name, full in mixer.items() if matrices[full] is not None}  # type: ignore[union-attr]
    two, heads = ((1,), (2,)), ((1,), (2, 3))
    assert shapes == {"query_down.w": two, "latent.w": two, "query.w": heads, "key_up.w": heads, "value_up.w": heads, "out.w": ((1, 2), (3,))}


def test_defaults_are_the_papers() -> None:
    config = ModelConfig(attention="mla")
    assert (config.kv_rank, config.nope_dim, config.rope_dim, config.key_width, config.value_width) == (256, 64, 32, 96, 64)
    assert dataclasses.replace(config, head_dim=128).kv_rank == 512, "DeepSeek-V2's own: heads of 128, a latent of 512 and 64 that turn"
