"""Attention on another schedule equals the plain one. Letters: B batch, T tokens, H query heads, G key heads, K head width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2jax.kernels import attention


@pytest.mark.parametrize("padded", [False, True])
def test_causal_blocks_are_masked_attention_with_equal_gradients(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 over 11 tokens, the last one short; a row whose first tokens are padding, so that a block has queries without any key."""
    B, T, H, G, K = 2, 11, 4, 2, 3
    q, k, v = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(B, T, H, K), (B, G, T, K), (B, G, T, K)]))
    valid_BT = jnp.arange(T) >= jnp.array([[5], [0]]) if padded else None
    mask_BTS = jnp.tril(jnp.ones((1, T, T), bool)) & (valid_BT[:, None] if padded else True)
    segment_BT = None if valid_BT is None else jnp.where(valid_BT, 0, -1)
    calls: list[tuple[int, int]] = []
    plain = attention.attend

    def counted(q: jax.Array, k: jax.Array, *rest: jax.Array, **options: object) -> jax.Array:
        calls.append((q.shape[1], k.shape[2]))
        return plain(q, k, *rest, **options)

    monkeypatch.setattr(attention, "attend", counted)
    monkeypatch.setattr(attention, "BLOCK", 4)
    weight = jax.random.normal(jax.random.key(9), q.shape)
    loss = lambda o: ((o * weight).sum(), o)  # noqa: E731
    blocks = jax.jit(jax.grad(lambda q, k, v: loss(attention.attend_causally(q, k, v, segment_BT)), (0, 1, 2), has_aux=True))
    whole = jax.jit(jax.grad(lambda q, k, v: loss(plain(q, k, v, mask_BTS)), (0, 1, 2), has_aux=True))
    (got, got_o), (want, want_o) = blocks(q, k, v), whole(q, k, v)
    np.testing.assert_allclose(got_o, want_o, rtol=1e-5, atol=1e-6)
    assert calls == [(4, 4), (4, 8), (3, 11)], "no block computes scores behind its own end"
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
