"""From logits to the next token: temperature, then top-k, then a draw. All settings are traced: changing one never compiles anything.

Letters: B rows, V vocabulary, N blocks of the vocabulary, M ids a block.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

#: Below this k, `lax.top_k` is faster on every backend than counting; at most this many values are sorted per row.
SORTED = 256
#: Ids a block of the two-level draw.
BLOCK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each row draws: temperature_B float32 (0: the most likely token), top_k_B int32 (0: no limit), seed_B uint32.

    allowed is an int32 scalar: ids from there on are never drawn (the tokenizer has no text for them).
    """

    temperature_B: jax.Array
    top_k_B: jax.Array
    seed_B: jax.Array
    allowed: jax.Array


def filtered_log_probs(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """What a draw follows, float32 [B, V]: log-probabilities after temperature and top-k; exactly -inf for every token that cannot come.

    At temperature 0 the filters act on the model's own probabilities (temperature 1).
    """
    return jax.nn.log_softmax(_scores(logits_BV, sampling), -1)


def draw(logits_BV: jax.Array, sampling: Sampling, step: jax.Array) -> jax.Array:
    """The next token of each row, int32 [B]; -1 in rows whose logits hold NaN or +inf.

    A row's randomness is a function of its seed and `step` (int32 scalar, tokens drawn before) alone. Equally likely tokens at temperature 0: the lowest id.
    """
    scores_BV = _scores(logits_BV, sampling)
    best_B = jnp.argmax(scores_BV, -1)
    warm_B = sampling.temperature_B > 0
    token_B = jax.lax.cond(warm_B.any(), lambda: jnp.where(warm_B, _draw_by_blocks(scores_BV, sampling.seed_B, step), best_B), lambda: best_B)
    return jnp.where(jnp.isfinite(logits_BV.max(-1)), token_B, -1).astype(jnp.int32)


def _scores(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    logits_BV = jnp.where(jnp.arange(logits_BV.shape[-1]) < sampling.allowed, logits_BV, -jnp.inf)
    temperature_B1 = jnp.where(sampling.temperature_B > 0, sampling.temperature_B, 1.0)[:, None]
    # the maximum goes first, so that the smallest temperature overflows to -inf, never to an +inf that several tokens share
    scores_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / temperature_B1
    return jax.lax.cond((sampling.top_k_B > 0).any(), lambda: keep_top_k(scores_BV, sampling.top_k_B), lambda: scores_BV)


def keep_top_k(scores_BV: jax.Array, k_B: jax.Array) -> jax.Array:
    """-inf for all but the k largest of each row. 0 keeps all, more than V is V; every token equal to the k-th largest stays, so ties may keep more than k."""
    V = scores_BV.shape[-1]
    wanted_B = jnp.clip(jnp.where(k_B > 0, k_B, V), 1, V)
    sortable = min(SORTED, V)

    def by_sorting() -> jax.Array:
        top_BK = jax.lax.top_k(scores_BV, sortable)[0]
        return jnp.take_along_axis(top_BK, jnp.minimum(wanted_B, sortable)[:, None] - 1, 1)[:, 0]

    least_B = jax.lax.cond(jnp.where(k_B > 0, wanted_B, 0).max() <= sortable, by_sorting, lambda: _kth_largest(scores_BV, wanted_B))
    return jnp.where((scores_BV >= least_B[:, None]) | (k_B <= 0)[:, None], scores_BV, -jnp.inf)


def _kth_largest(x_BV: jax.Array, k_B: jax.Array) -> jax.Array:
    """The exact k-th largest value of each row in 32 counting passes: its bits are found from the top, in an integer view that sorts as the floats do."""
    sign = jnp.uint32(1 << 31)
    bits_BV = jax.lax.bitcast_convert_type(x_BV, jnp.uint32)
    order_BV = jnp.where(bits_BV >= sign, ~bits_BV, bits_BV | sign)

    def find_bit(i: jax.Array, found_B: jax.Array) -> jax.Array:
        higher_B = found_B | (sign >> i.astype(jnp.uint32))
        return jnp.where((order_BV >= higher_B[:, None]).sum(-1) >= k_B, higher_B, found_B)

    order_B = jax.lax.fori_loop(0, 32, find_bit, jnp.zeros(x_BV.shape[0], jnp.uint32))
    return jax.lax.bitcast_convert_type(jnp.where(order_B >= sign, order_B ^ sign, ~order_B), jnp.float32)


def _draw_by_blocks(scores_BV: jax.Array, seed_B: jax.Array, step: jax.Array) -> jax.Array:
    """A draw from softmax(scores): a block of the vocabulary by its total probability, then an id inside it, both by the Gumbel-max trick.

    Exact, and it takes N + M random numbers instead of V, which would cost a quarter of a decode step on a CPU. (One uniform number and a running sum would
    take fewer still, but rounding in the sum moves the borders between tokens, and rows of a batch would part from the same rows alone.)
    """
    B, V = scores_BV.shape
    scores_BNM = jnp.pad(scores_BV, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf).reshape(B, -1, BLOCK)

    def one_row(scores_NM: jax.Array, seed: jax.Array) -> jax.Array:
        N = scores_NM.shape[0]
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
        noise = jax.random.gumbel(key, (N + BLOCK,), mode="high")  # one call: each one is half a second of compiling
        total_N = jnp.log(jnp.exp(scores_NM).sum(-1))  # the largest score is 0, so nothing overflows
        block = jnp.argmax(total_N + noise[:N])
        return block * BLOCK + jnp.argmax(scores_NM[block] + noise[N:])

    return jax.vmap(one_row)(scores_BNM, seed_B)
