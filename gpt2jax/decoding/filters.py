"""From logits to the next token: penalties, then temperature, then filters, then a draw. All settings are traced: changing one never compiles anything.

Letters: B rows, V vocabulary, H tokens of history, F new tokens that may be forced, N blocks of the vocabulary, M ids a block.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

#: Ids a block of the two-level draw and of sums over the vocabulary.
BLOCK = 256
#: What `draw` returns instead of a token: the logits are not finite; the settings leave no token that may come.
BROKEN, STUCK = -2, -3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each row draws, as `settings.Settings` says. Names as there; float32 [B] or int32 [B] but for these:

    bias_BV float32: logit_bias, and -inf for forbidden tokens and ids without text; forced_BF int32: the token at each index of the new text, -1 for none;
    seed_B uint32; eos int32 scalar: the token that ends a row, -1 for none.
    """

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    typical_p_B: jax.Array
    repetition_penalty_B: jax.Array
    presence_penalty_B: jax.Array
    frequency_penalty_B: jax.Array
    no_repeat_ngram_size_B: jax.Array
    min_new_tokens_B: jax.Array
    bias_BV: jax.Array
    forced_BF: jax.Array
    seed_B: jax.Array
    eos: jax.Array

    def rows(self, index_N: jax.Array) -> Sampling:
        """The settings of rows index_N."""
        return jax.tree.map(lambda leaf: leaf[index_N] if leaf.ndim else leaf, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """The tokens of each row: token_BH int32, of which the first count_B are real and the first prompt_B of these the prompt's."""

    token_BH: jax.Array
    count_B: jax.Array
    prompt_B: jax.Array

    def push(self, token_B: jax.Array) -> History:
        """One more token a row."""
        rows = jnp.arange(token_B.shape[0])
        return dataclasses.replace(self, token_BH=self.token_BH.at[rows, self.count_B].set(token_B, mode="drop"), count_B=self.count_B + 1)


def filtered_log_probs(logits_BV: jax.Array, sampling: Sampling, history: History, step: jax.Array) -> jax.Array:
    """What a draw follows, float32 [B, V]: log-probabilities after all settings; exactly -inf for every token that cannot come.

    At temperature 0 the filters act on the probabilities at temperature 1.
    """
    return jax.nn.log_softmax(_scores(logits_BV, sampling, history, step), -1)


@jax.jit  # traced once for the first token and the loop
def draw(logits_BV: jax.Array, sampling: Sampling, history: History, step: jax.Array) -> jax.Array:
    """The next token of each row, int32 [B]; BROKEN in rows whose logits hold NaN or +inf, STUCK in rows where no token may come.

    A row's randomness is a function of its seed and `step` (int32 scalar, tokens drawn before) alone. Equally likely tokens at temperature 0: the lowest id.
    """
    scores_BV = _scores(logits_BV, sampling, history, step)
    best_B = jnp.argmax(scores_BV, -1)
    warm_B = sampling.temperature_B > 0
    token_B = jax.lax.cond(warm_B.any(), lambda: jnp.where(warm_B, _draw_by_blocks(scores_BV, sampling.seed_B, step), best_B), lambda: best_B)
    token_B = jnp.where(scores_BV.max(-1) == 0, token_B, STUCK)  # a row of -inf has become NaN
    return jnp.where(jnp.isfinite(logits_BV.max(-1)), token_B, BROKEN).astype(jnp.int32)


def penalised(logits_BV: jax.Array, sampling: Sampling, history: History, step: jax.Array) -> jax.Array:
    """Logits after everything that stands before the temperature: biases, penalties, what may not come and what must."""
    ids_V = jnp.arange(logits_BV.shape[-1])
    logits_BV = logits_BV + sampling.bias_BV
    counts = (sampling.repetition_penalty_B != 1) | (sampling.presence_penalty_B != 0) | (sampling.frequency_penalty_B != 0)
    logits_BV = jax.lax.cond(counts.any(), lambda: _penalise_counts(logits_BV, sampling, history), lambda: logits_BV)
    repeats = sampling.no_repeat_ngram_size_B > 0
    logits_BV = jax.lax.cond(repeats.any(), lambda: _forbid_repeats(logits_BV, sampling.no_repeat_ngram_size_B, history), lambda: logits_BV)
    early_B = step < sampling.min_new_tokens_B
    logits_BV = jnp.where(early_B[:, None] & (ids_V == sampling.eos), -jnp.inf, logits_BV)
    forced_B = jnp.where(step < sampling.forced_BF.shape[1], sampling.forced_BF[:, jnp.minimum(step, sampling.forced_BF.shape[1] - 1)], -1)[:, None]
    return jnp.where(forced_B < 0, logits_BV, jnp.where(ids_V == forced_B, 0.0, -jnp.inf))


def _scores(logits_BV: jax.Array, sampling: Sampling, history: History, step: jax.Array) -> jax.Array:
    """Unnormalised log-probabilities of the draw; the largest is 0."""
    logits_BV = penalised(logits_BV, sampling, history, step)
    temperature_B1 = jnp.where(sampling.temperature_B > 0, sampling.temperature_B, 1.0)[:, None]
    # the maximum goes first, so that the smallest temperature overflows to -inf, never to an +inf that several tokens share
    scores_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / temperature_B1
    top_k, top_p, min_p, typical_p = sampling.top_k_B > 0, sampling.top_p_B < 1, sampling.min_p_B > 0, sampling.typical_p_B < 1

    def filtered() -> jax.Array:
        kept_BV = jax.lax.cond(top_k.any(), lambda: keep_top_k(scores_BV, sampling.top_k_B), lambda: scores_BV)
        kept_BV = jax.lax.cond(top_p.any(), lambda: keep_top_p(kept_BV, sampling.top_p_B), lambda: kept_BV)
        kept_BV = keep_min_p(kept_BV, sampling.min_p_B)
        kept_BV = jax.lax.cond(typical_p.any(), lambda: keep_typical(kept_BV, sampling.typical_p_B), lambda: kept_BV)
        return kept_BV - kept_BV.max(-1, keepdims=True)

    return jax.lax.cond((top_k | top_p | min_p | typical_p).any(), filtered, lambda: scores_BV)


def keep_top_k(scores_BV: jax.Array, k_B: jax.Array) -> jax.Array:
    """-inf for all but the k largest of each row. 0 keeps all; every token equal to the k-th largest stays, so ties may keep more than k."""
    return _keep(scores_BV, k_B > 0, _reaches(scores_BV, jnp.ones_like(scores_BV), k_B))


def keep_top_p(scores_BV: jax.Array, p_B: jax.Array) -> jax.Array:
    """-inf for all but the fewest most likely tokens that together have the probability p: those with less than p above them, so at least one. 1 keeps all."""
    return _keep(scores_BV, p_B < 1, _reaches(scores_BV, jax.nn.softmax(scores_BV, -1), p_B))


def keep_min_p(scores_BV: jax.Array, p_B: jax.Array) -> jax.Array:
    """-inf for tokens with less than p times the probability of the most likely one. 0 keeps all."""
    return _keep(scores_BV, p_B > 0, scores_BV >= scores_BV.max(-1, keepdims=True) + jnp.log(p_B)[:, None])


def keep_typical(scores_BV: jax.Array, p_B: jax.Array) -> jax.Array:
    """-inf for all but the tokens whose -log p is nearest to the entropy, as many as reach the probability p together (Meister et al. 2022). 1 keeps all."""
    log_p_BV = jax.nn.log_softmax(scores_BV, -1)
    p_BV = jnp.exp(log_p_BV)
    entropy_B1 = -jnp.where(p_BV > 0, p_BV * log_p_BV, 0.0).sum(-1, keepdims=True)
    return _keep(scores_BV, p_B < 1, _reaches(-jnp.abs(log_p_BV + entropy_B1), p_BV, p_B))


def _keep(scores_BV: jax.Array, active_B: jax.Array, keep_BV: jax.Array) -> jax.Array:
    return jnp.where(keep_BV | ~active_B[:, None], scores_BV, -jnp.inf)


def _reaches(score_BV: jax.Array, weight_BV: jax.Array, target_B: jax.Array) -> jax.Array:
    """Which entries the heaviest scores need until their weights sum to the target: bool [B, V], True where the scores above weigh less than the target.

    The least score kept is found bit by bit from the top, in an integer view that sorts as the floats do: 32 sums instead of a sort of the vocabulary, which
    takes 20 times as long on a CPU.
    """
    sign = jnp.uint32(1 << 31)
    bits_BV = jax.lax.bitcast_convert_type(jnp.where(score_BV == 0, 0.0, score_BV), jnp.uint32)  # -0 equals 0
    order_BV = jnp.where(bits_BV >= sign, ~bits_BV, bits_BV | sign)
    order_BNM, weight_BNM = _in_blocks(order_BV, 0), _in_blocks(weight_BV, 0.0)  # a sum over blocks first is one that a CPU does in vectors

    def find_bit(i: jax.Array, found_B: jax.Array) -> jax.Array:
        higher_B = found_B | (sign >> i.astype(jnp.uint32))
        sum_B = jnp.where(order_BNM >= higher_B[:, None, None], weight_BNM, 0.0).sum(1).sum(-1)
        return jnp.where(sum_B >= target_B, higher_B, found_B)

    least_B = jax.lax.fori_loop(0, 32, find_bit, jnp.zeros(score_BV.shape[0], jnp.uint32))
    return order_BV >= least_B[:, None]


def _penalise_counts(logits_BV: jax.Array, sampling: Sampling, history: History) -> jax.Array:
    B, V = logits_BV.shape
    place_H = jnp.arange(history.token_BH.shape[1])
    real_BH = place_H < history.count_B[:, None]
    count = lambda use_BH: jnp.zeros((B, V)).at[jnp.arange(B)[:, None], history.token_BH].add(use_BH.astype(jnp.float32))  # noqa: E731
    all_BV, new_BV = count(real_BH), count(real_BH & (place_H >= history.prompt_B[:, None]))
    penalty_B1 = sampling.repetition_penalty_B[:, None]
    repeated_BV = jnp.where(logits_BV < 0, logits_BV * penalty_B1, logits_BV / penalty_B1)
    logits_BV = jnp.where(all_BV > 0, repeated_BV, logits_BV)
    return logits_BV - sampling.frequency_penalty_B[:, None] * new_BV - sampling.presence_penalty_B[:, None] * (new_BV > 0)


def _forbid_repeats(logits_BV: jax.Array, n_B: jax.Array, history: History) -> jax.Array:
    """-inf for each token that has followed the last n - 1 tokens before."""
    B, H = history.token_BH.shape
    place_H = jnp.arange(H)

    def compare(back: jax.Array, match_BH: jax.Array) -> jax.Array:
        """match[b, j]: the `back` tokens before j are the last ones of the row. Rows whose n is smaller already know."""
        last_B1 = jnp.take_along_axis(history.token_BH, jnp.maximum(history.count_B - back, 0)[:, None], 1)
        before_BH = jnp.take(history.token_BH, jnp.maximum(place_H - back, 0), axis=1)
        same_BH = (before_BH == last_B1) & (place_H >= back) & (history.count_B >= back)[:, None]
        return match_BH & (same_BH | (back >= n_B)[:, None])

    match_BH = jax.lax.fori_loop(1, jnp.minimum(n_B.max(), H), compare, (place_H < history.count_B[:, None]) & (n_B > 0)[:, None])
    match_BH &= (n_B <= H)[:, None]
    banned_BV = jnp.zeros(logits_BV.shape, bool).at[jnp.arange(B)[:, None], history.token_BH].max(match_BH)
    return jnp.where(banned_BV, -jnp.inf, logits_BV)


def _in_blocks(x_BV: jax.Array, fill: float) -> jax.Array:
    return jnp.pad(x_BV, ((0, 0), (0, -x_BV.shape[1] % BLOCK)), constant_values=fill).reshape(x_BV.shape[0], -1, BLOCK)


def _draw_by_blocks(scores_BV: jax.Array, seed_B: jax.Array, step: jax.Array) -> jax.Array:
    """A draw from softmax(scores): a block of the vocabulary by its total probability, then an id inside it, both by the Gumbel-max trick.

    Exact, and it takes N + M random numbers instead of V, which would cost a quarter of a decode step on a CPU. (One uniform number and a running sum would
    take fewer still, but rounding in the sum moves the borders between tokens, and rows of a batch would part from the same rows alone.)
    """

    def one_row(scores_NM: jax.Array, seed: jax.Array) -> jax.Array:
        N = scores_NM.shape[0]
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
        noise = jax.random.gumbel(key, (N + BLOCK,), mode="high")  # one call: each one is half a second of compiling
        total_N = jnp.log(jnp.exp(scores_NM).sum(-1))  # the largest score is 0, so nothing overflows
        block = jnp.argmax(total_N + noise[:N])
        return block * BLOCK + jnp.argmax(scores_NM[block] + noise[N:])

    return jax.vmap(one_row)(_in_blocks(scores_BV, -jnp.inf), seed_B)
