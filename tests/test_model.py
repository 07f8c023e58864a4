"""The model by itself: sizes, initial values, vocabulary padding, causality, padding, dropout, cache, precision, and that it is a plain pytree.

Letters: B batch, T tokens, L layers, V vocabulary, P padded vocabulary, D width.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2jax.config import ModelConfig
from gpt2jax.errors import InputError
from gpt2jax.kernels.attention import attend
from gpt2jax.model.cache import Span
from gpt2jax.model.gpt2 import GPT2, parameter_count
from gpt2jax.model.parameters import abstract_model, map_named, named_parameters, with_parameters

V, C, L, H, K, D, F, T = 61, 29, 3, 4, 5, 20, 28, 11
SIZES: dict[str, Any] = dict(vocab_size=V, n_positions=C, n_layer=L, n_head=H, n_embd=D, n_inner=F, vocab_multiple=16)


@jax.jit
def hidden(model: GPT2, tokens_BT: jax.Array, mask_BT: jax.Array | None = None, dropout_key: jax.Array | None = None) -> jax.Array:
    return model.hidden(tokens_BT, mask_BT=mask_BT, dropout_key=dropout_key)


@pytest.fixture(autouse=True)
def _float32_matmuls() -> Any:
    with jax.default_matmul_precision("float32"):
        yield


@functools.partial(jax.jit, static_argnums=0)
def fresh(config: ModelConfig, key: jax.Array) -> GPT2:
    return GPT2(config, key)


@functools.cache
def make(seed: int = 0, **changes: Any) -> GPT2:
    """A small model with weights, biases and scales that are random and large, so that each part shows in the result."""
    random = np.random.default_rng(seed)

    def draw(name: str, leaf: Any) -> jax.Array:
        values = random.standard_normal(leaf.shape).astype(np.float32) * (0.15 if name.endswith((".w", "table")) else 0.3)
        return jax.device_put(np.where(np.arange(len(values))[:, None] < V, values, 0) if name == "token_table" else values + name.endswith(".scale"))

    return map_named(draw, abstract_model(ModelConfig(**{**SIZES, **changes})))


def values_of(config: ModelConfig, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Fresh parameters by name."""
    return {name: np.asarray(leaf) for name, leaf in named_parameters(fresh(config, jax.random.key(seed))).items()}


@jax.jit
def padded_logits(model: GPT2, tokens_BT: jax.Array) -> jax.Array:
    return model.padded_logits(model.hidden(tokens_BT))


def tokens_of(rows: int, length: int = T, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, (rows, length)), jnp.int32)


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


PRESET_SIZES = [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)]


@pytest.mark.parametrize(("preset", "count"), PRESET_SIZES)
def test_released_sizes_have_the_released_parameter_counts(preset: str, count: int) -> None:
    assert parameter_count(abstract_model(ModelConfig.preset(preset))) == count


# --- initial values ---


def test_initial_values_of_each_parameter() -> None:
    config = ModelConfig(vocab_size=211, n_positions=90, n_layer=3, n_head=4, n_embd=64, n_inner=80)
    std, residual = 0.02, 0.02 / math.sqrt(2 * 3)
    expected = {"token_table": std, "position.table": 0.01}
    expected |= {f"blocks.{name}.w": std for name in ("mixer.query", "mixer.key_value", "mlp.up")}
    expected |= {f"blocks.{name}.w": residual for name in ("mixer.out", "mlp.down")}
    found = values_of(config, 3)
    assert found["token_table"].shape == (256, 64) and not found["token_table"][211:].any()
    found["token_table"] = found["token_table"][:211]
    for name, values in found.items():
        assert values.dtype == np.float32
        if name in expected:
            # four standard errors of an estimated standard deviation
            assert float(values.std()) == pytest.approx(expected[name], rel=4 / math.sqrt(2 * values.size)), name
            assert abs(float(values.mean())) < 4 * expected[name] / math.sqrt(values.size), name
        else:
            assert name.endswith((".b", ".bias", ".scale")) and bool((values == (1.0 if name.endswith(".scale") else 0.0)).all()), name
    assert expected.keys() < found.keys()


def test_no_two_layers_and_no_two_parameters_start_alike() -> None:
    found = values_of(ModelConfig(**SIZES), 0)
    starts = [layer.ravel()[:4] for name, leaf in found.items() if name.endswith(".w") for layer in leaf]
    starts += [found[name].ravel()[:4] for name in ("token_table", "position.table")]
    normalised = {tuple(np.round(start / start[0], 4)) for start in starts}
    assert len(normalised) == len(starts) == 5 * L + 2


def test_initial_loss_is_about_ln_v() -> None:
    model = fresh(ModelConfig(**SIZES), jax.random.key(1))
    logits_BTV = model(tokens_of(7))
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), tokens_of(7, seed=9)[..., None], -1).mean()
    assert abs(float(loss) - math.log(V)) < 0.1


@pytest.mark.parametrize(
    ("change", "touched"),
    [
        ({"n_inner": 44}, "blocks.mlp."),
        ({"vocab_size": 57}, "token_table"),
        ({"n_positions": 17, "activation_function": "gelu"}, "position.table"),
    ],
)
def test_a_change_leaves_all_other_initial_values_as_they_were(change: dict[str, Any], touched: str) -> None:
    before = values_of(ModelConfig(**SIZES), 5)
    after = values_of(ModelConfig(**{**SIZES, **change}), 5)
    assert before.keys() == after.keys()
    for name in before:
        if not name.startswith(touched):
            np.testing.assert_array_equal(before[name], after[name], strict=True, err_msg=name)


# --- what the model takes and gives ---


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_logits_are_float32_over_real_ids_only(compute_dtype: str) -> None:
    model = make(compute_dtype=compute_dtype)
    for length in (1, T, C):
        logits = jax.eval_shape(lambda m, x: m(x), model, jax.ShapeDtypeStruct((2, length), jnp.int32))
        assert logits.shape == (2, length, V) and logits.dtype == jnp.float32
    assert jax.eval_shape(hidden, model, tokens_of(2)).dtype == compute_dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("shape", [(2, C + 1), (2, 0), (T,), (2, T, 1)])
def test_a_wrong_number_of_tokens_raises_before_any_compute(shape: tuple[int, ...]) -> None:
    model = abstract_model(ModelConfig(**SIZES))  # has no arrays: any compute would fail in another way
    with pytest.raises(InputError):
        model(jnp.zeros(shape, jnp.int32))
    with pytest.raises(InputError):
        jax.eval_shape(lambda m, x: m.hidden(x), model, jax.ShapeDtypeStruct(shape, jnp.int32))


def test_the_limit_is_named() -> None:
    with pytest.raises(InputError, match=f"{C + 1} tokens .*n_positions={C}"):
        make()(tokens_of(1, C + 1))
    with pytest.raises(InputError, match="integers .*float32"):
        make()(tokens_of(1).astype(jnp.float32))


def test_padding_of_the_vocabulary_changes_nothing() -> None:
    padded, x = make(), tokens_of(2)
    exact = with_parameters(
        abstract_model(ModelConfig(**{**SIZES, "vocab_multiple": 1})), {**named_parameters(padded), "token_table": padded.token_table[...][:V]}
    )
    P = padded.config.padded_vocab_size
    assert (P, exact.config.padded_vocab_size) == (64, V) and not np.asarray(padded.token_table[...])[V:].any()
    close(padded(x), exact(x), 1e-6)
    logits_BTP = np.asarray(padded_logits(padded, x))
    assert logits_BTP.shape == (2, T, P) and np.isneginf(logits_BTP[..., V:]).all()
    close(np.logaddexp.reduce(logits_BTP, -1), np.logaddexp.reduce(np.asarray(exact(x)), -1), 1e-6)

    gradient = jax.jit(jax.grad(lambda model: jax.nn.logsumexp(padded_logits(model, x), -1).sum()))(padded)
    table_PD = np.asarray(gradient.token_table[...])
    assert np.isfinite(table_PD).all() and not table_PD[V:].any() and table_PD[:V].any()


def test_padded_ids_do_not_win_when_all_logits_are_negative() -> None:
    model = map_named(lambda name, leaf: jnp.abs(leaf) if name == "token_table" else leaf, make())
    logits_P = model.padded_logits(-jnp.ones(D))
    assert float(logits_P.max()) < 0 and int(logits_P.argmax()) < V


def test_no_token_sees_a_later_one() -> None:
    model = make()
    tokens_BT = jnp.asarray(np.random.default_rng(2).permutation(V)[None, :T], jnp.int32)  # each once: a row of the table is one position's embedding
    weights_D = jnp.asarray(np.random.default_rng(3).standard_normal(D), jnp.float32)
    jacobian = jax.jit(jax.jacrev(lambda table: map_named(lambda n, v: table if n == "token_table" else v, model).hidden(tokens_BT)[0] @ weights_D))
    reach_TS = np.abs(np.asarray(jacobian(model.token_table[...]))[:, tokens_BT[0]]).max(-1)
    assert (reach_TS[np.triu_indices(T, 1)] == 0).all() and (reach_TS[np.tril_indices(T)] > 0).all()


@pytest.mark.parametrize("groups", [H, 2, 1])
def test_attention_equals_the_formula(groups: int) -> None:
    random = np.random.default_rng(0)
    q_BTHK, k_BGSK, v_BGSK = (random.standard_normal(shape).astype(np.float32) for shape in ((3, 7, H, K), (3, groups, 7, K), (3, groups, 7, K)))
    k_BHSK, v_BHSK = (np.repeat(x, H // groups, 1) for x in (k_BGSK, v_BGSK))
    scores = np.einsum("bthk,bhsk->bhts", q_BTHK, k_BHSK) / math.sqrt(K) + np.where(np.tril(np.ones((7, 7))), 0, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    close(jax.jit(attend)(q_BTHK, k_BGSK, v_BGSK, np.tril(np.ones((1, 7, 7), bool))), np.einsum("bhts,bhsk->bthk", weights, v_BHSK), 2e-6)


# --- padded batches ---


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_the_same_rows_alone(side: str) -> None:
    model, lengths = make(), (1, 6, T)
    tokens, mask = np.array(tokens_of(3, seed=4)), np.zeros((3, T), bool)
    places = [slice(T - n, T) if side == "left" else slice(0, n) for n in lengths]
    for row, place in enumerate(places):
        mask[row, place] = True
    logits = model(jnp.asarray(tokens), mask_BT=jnp.asarray(mask))
    for row, place in enumerate(places):
        close(logits[row, place], model(jnp.asarray(tokens[row : row + 1, place]))[0])


def test_a_row_of_padding_alone_stays_finite_with_its_gradient() -> None:
    model, x = make(), tokens_of(2)
    mask = jnp.array([[False] * T, [True] * T])
    logits, gradient = jax.jit(jax.value_and_grad(lambda m: jnp.square(m.hidden(x, mask_BT=mask)).sum()))(model)
    assert np.isfinite(logits) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    close(model(x, mask_BT=mask)[1], model(x)[1])


def test_a_query_without_keys_gets_zeros_and_no_gradient() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal(shape).astype(np.float32) for shape in ((2, 7, H, K), (2, H, 9, K), (2, H, 9, K)))
    mask = np.zeros((2, 7, 9), bool)
    mask[0, 2, :4] = True
    out = np.asarray(jax.jit(attend)(q, k, v, mask))
    assert out[0, 2].all() and not np.delete(out[0], 2, 0).any() and not out[1].any()
    gradients = jax.jit(jax.grad(lambda q, k, v: jnp.square(attend(q, k, v, mask) + 1).sum(), (0, 1, 2)))(q, k, v)
    for gradient in map(np.asarray, gradients):
        assert np.isfinite(gradient).all() and gradient[0].any() and not gradient[1].any()


# --- dropout ---


@pytest.mark.parametrize("kind", ["embd_pdrop", "attn_pdrop", "resid_pdrop"])
def test_each_dropout_follows_its_key(kind: str) -> None:
    model, x = make(**{kind: 0.4}), tokens_of(2)
    plain, one = model(x), model(x, dropout_key=jax.random.key(1))
    np.testing.assert_array_equal(one, model(x, dropout_key=jax.random.key(1)))
    assert float(jnp.abs(one - plain).max()) > 1e-2
    assert float(jnp.abs(one - model(x, dropout_key=jax.random.key(2))).max()) > 1e-2
    close(plain, make()(x))
    close(plain, make()(x, dropout_key=jax.random.key(1)))  # rate 0 with a key


def test_dropout_masks_differ_between_layers_and_within_a_block() -> None:
    # each layer adds 10 and 1, each kept or dropped: with masks of their own, sums of L tens and L ones in many combinations
    model = fresh(ModelConfig(**{**SIZES, "n_embd": 320, "resid_pdrop": 0.5}), jax.random.key(0))
    constant = {"blocks.mixer.out.b": 10.0, "blocks.mlp.down.b": 1.0, "norm.scale": 1.0}
    model = map_named(lambda name, leaf: np.full(leaf.shape, constant.get(name, 0.0), np.float32), model)
    values_D = np.asarray(hidden(model, tokens_of(1, 1), dropout_key=jax.random.key(4)))[0, 0]
    assert len(set(np.round(values_D, 4))) > 8, "masks shared by the layers, or by mixer and MLP, give at most 4"


def test_dropout_keeps_the_mean() -> None:
    from gpt2jax.model.linear import dropout

    kept = np.asarray(dropout(jnp.ones((90, 110)), 0.25, jax.random.key(0)))
    assert {float(value) for value in np.unique(kept)} == {0.0, np.float32(1 / 0.75)}
    assert abs(kept.mean() - 1) < 4 * math.sqrt(0.25 / 0.75 / kept.size)


# --- a plain pytree, run in several ways ---


@jax.jit
def unrolled(model: GPT2, tokens_BT: jax.Array) -> jax.Array:
    span = Span.of(tokens_BT.shape)
    x_BTD = model.position(model.token_table[...][tokens_BT], span.position_BT)
    for block in model.unstacked():
        x_BTD, _ = block(x_BTD, span)
    return model.padded_logits(model.norm(x_BTD))[..., :V]


def test_the_scan_equals_an_unrolled_loop() -> None:
    model, x = make(), tokens_of(2)
    assert all(leaf.shape[0] == L for name, leaf in named_parameters(model).items() if name.startswith("blocks."))
    close(model(x), unrolled(model.unstack(), x))


def test_jit_grad_and_vmap_take_the_model_as_it_is() -> None:
    models, x = [make(seed) for seed in (0, 1, 2)], tokens_of(2)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
    together = jax.vmap(lambda model: model(x))(stacked)
    for model, logits in zip(models, together, strict=True):
        close(logits, model(x))
    gradient = jax.jit(jax.grad(lambda model: jnp.square(model(x)).mean()))(models[0])
    assert isinstance(gradient, GPT2) and jax.tree.structure(gradient) == jax.tree.structure(models[0])
    for name, leaf in named_parameters(gradient).items():
        if name != "blocks.mixer.key_value.b":
            assert leaf.dtype == jnp.float32 and np.asarray(leaf).any(), name


def test_bfloat16_stays_near_float32() -> None:
    """bfloat16 has 8 bits of mantissa: over 3 layers the logits stay within 3 % of the largest."""
    x = tokens_of(2)
    plain, half = make()(x), make(compute_dtype="bfloat16")(x)
    error = float(jnp.abs(plain - half).max() / jnp.abs(plain).max())
    assert 1e-4 < error < 0.03
    gradient = jax.eval_shape(jax.grad(lambda model: jnp.square(model(x)).mean()), make(compute_dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


# --- the cache ---

STEP = jax.jit(lambda model, tokens_BT, state: model.step(tokens_BT, state))
COMMIT = jax.jit(lambda model, state: model.commit(state))


@functools.partial(jax.jit, static_argnames=("slots", "recent"))
def prefill(model: GPT2, tokens_BT: jax.Array, length_B: jax.Array, slots: int, recent: int) -> Any:
    return model.prefill(tokens_BT, length_B, slots=slots, recent=recent)


def head(model: GPT2, hidden: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(hidden) @ np.asarray(model.token_table[...])[:V].T


def layout(state: Any) -> Any:
    return jax.tree.structure(state), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("unstacked", [False, True])
def test_cached_steps_equal_the_full_forward_after_every_prefill(unstacked: bool) -> None:
    """Row n holds a prompt of n tokens, n = 1 .. T-1, padded with other ids; then 2 x 3 + 2 single steps, committed every R = 3."""
    model, recent, steps = make(n_layer=2), 3, 8
    lengths, tokens = np.arange(1, T), np.asarray(tokens_of(T - 1, T - 1 + steps))
    expected = np.asarray(model(tokens))
    cached = model.unstack() if unstacked else model
    hidden_BD, state = prefill(cached, tokens[:, : T - 1], lengths.astype(np.int32), slots=T - 1 + 2 * recent, recent=recent)
    first, rows = layout(state), np.arange(T - 1)
    close(head(model, hidden_BD), expected[rows, lengths - 1])
    for step in range(steps):
        hidden_BTD, state = STEP(cached, tokens[rows, lengths + step][:, None], state)
        close(head(model, hidden_BTD)[:, 0], expected[rows, lengths + step])
        if step % recent == recent - 1:
            state = COMMIT(cached, state)
        assert layout(state) == first
        assert state.length_B.tolist() == (lengths + step + 1).tolist()


@pytest.mark.parametrize(("prompt", "chunk"), [(1, 5), (T - 1, 2)])
def test_chunks_of_several_tokens_on_an_exact_cache(prompt: int, chunk: int) -> None:
    """No free slot anywhere: the chunks fill the recent part, and the last commit fills the other one."""
    model, tokens = make(n_layer=2), np.asarray(tokens_of(7, 16))
    expected = np.asarray(model(tokens))
    _, state = prefill(model, tokens[:, :prompt], np.full(7, prompt, np.int32), slots=16, recent=chunk)
    for start in range(prompt, 16, chunk):
        hidden_BTD, state = STEP(model, tokens[:, start : start + chunk], state)
        close(head(model, hidden_BTD), expected[:, start : start + chunk])
        state = COMMIT(model, state)
