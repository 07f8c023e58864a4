"""Adapters: what they compute, what they merge into, and what of a model is trained. Letters: L layers, R rank, B batch, T tokens, D width."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import partial_eval

from gpt2jax.config import LoraConfig, ModelConfig
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.lora import abstract_adapted, adapted, adapter_variables, init_adapters, merged
from gpt2jax.model.parameters import abstract_model, named_parameters, with_parameters
from gpt2jax.training.optimizer import make_optimizer
from gpt2jax.training.step import init_parameters, init_state, make_train_step

SIZES: dict[str, Any] = dict(vocab_size=97, n_positions=16, n_layer=2, n_head=4, n_embd=16)
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "variants": dict(kv_heads=2, mlp="swiglu", position="rope", norm="rmsnorm", qk_norm=True, attention_bias=False, attention_sinks=True, head_dim=6),
}
LORA = LoraConfig(rank=3, alpha=6.0)
TOKENS = np.random.default_rng(0).integers(0, 97, (3, 11)).astype(np.int32)


def _parameters(config: ModelConfig, lora: LoraConfig = LORA, *, zero: bool = False) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(base, adapters); unless zero, adapters as after training: B isn't zeros any more."""
    base, adapters = init_parameters(config, jax.random.key(1)), init_adapters(config, lora, jax.random.key(2))
    if not zero:
        adapters = {name: leaf + 0.2 * jax.random.normal(jax.random.key(len(name)), leaf.shape) for name, leaf in adapters.items()}
    return base, adapters


@pytest.mark.parametrize(("variant", "targets"), [("gpt2", ["query", "down"]), ("variants", None)])
def test_at_first_the_model_is_the_base_to_the_bit_and_trained_it_is_what_it_merges_into(variant: str, targets: list[str] | None) -> None:
    config, lora = ModelConfig(**SIZES, **VARIANTS[variant]), dataclasses.replace(LORA, targets=targets)
    skeleton = abstract_adapted(config, lora)
    base, adapters = _parameters(config, lora, zero=True)
    plain = with_parameters(abstract_model(config), base)(TOKENS)
    np.testing.assert_array_equal(with_parameters(skeleton, {**base, **adapters})(TOKENS), plain)
    base, adapters = _parameters(config, lora)
    apart = with_parameters(skeleton, {**base, **adapters})(TOKENS)
    together = with_parameters(abstract_model(config), merged({**base, **adapters}, lora))(TOKENS)
    np.testing.assert_allclose(together, apart, rtol=0, atol=1e-5 * float(jnp.abs(apart).max()))
    assert float(jnp.abs(apart - plain).max()) > 1e-2


def test_the_map_and_its_merge_against_numpy() -> None:
    """Written from the paper's equation 3, one layer and one map at a time."""
    config = ModelConfig(**SIZES)
    base, adapters = _parameters(config)
    whole = {name: np.asarray(leaf, np.float64) for name, leaf in merged({**base, **adapters}, LORA).items()}
    assert whole.keys() == base.keys()
    shapes = {"mixer.query": (16, 16), "mixer.key_value": (16, 32), "mixer.out": (16, 16), "mlp.up": (16, 64), "mlp.down": (64, 16)}
    for name in base:
        stem = name.removeprefix("blocks.").removesuffix(".w")
        if stem not in shapes:
            np.testing.assert_array_equal(whole[name], base[name])
            continue
        rows, columns = shapes[stem]
        for layer in range(2):
            a = np.asarray(adapters[f"blocks.{stem}.lora_a"][layer], np.float64).reshape(rows, 3)
            b = np.asarray(adapters[f"blocks.{stem}.lora_b"][layer], np.float64).reshape(3, columns)
            expected = np.asarray(base[name][layer], np.float64).reshape(rows, columns) + (6.0 / 3) * a @ b
            np.testing.assert_allclose(whole[name][layer].reshape(rows, columns), expected, rtol=0, atol=1e-6)


def test_initial_values_are_of_the_said_spread_and_differ_by_layer_and_map() -> None:
    config = ModelConfig(**{**SIZES, "n_embd": 64})
    adapters = init_adapters(config, LoraConfig(rank=32, targets=["query", "key_value", "down"]), jax.random.key(0))
    assert {name.rsplit(".", 1)[1] for name in adapters} == {"lora_a", "lora_b"}
    for name, leaf in adapters.items():
        if name.endswith("lora_b"):
            assert not leaf.any()
            continue
        inputs = leaf[0].size // 32
        assert float(leaf.std()) * inputs**0.5 == pytest.approx(1, abs=0.06)
        assert float(jnp.abs(leaf[0] - leaf[1]).max()) > 0.1
    query, key_value = (adapters[f"blocks.mixer.{name}.lora_a"] for name in ("query", "key_value"))
    assert float(jnp.abs(query.reshape(2, 64, 32) - key_value.reshape(2, 64, 32)).max()) > 0.1


def test_adapters_alone_are_trained_and_have_an_optimizer_state() -> None:
    """With an average of the weights, and in micro-batches."""
    from gpt2jax.config import OptimizerConfig
    from gpt2jax.training.optimizer import make_schedule

    config = ModelConfig(**SIZES, resid_pdrop=0.1)
    skeleton = abstract_adapted(config, LORA)
    variables: Any = adapter_variables(skeleton)
    options = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, ema_decay=0.5)
    optimizer = make_optimizer(options, 5, variables)
    base, adapters = _parameters(config, zero=True)
    before = {name: np.asarray(leaf) for name, leaf in base.items()}
    state = init_state(config, optimizer, 0, parameters=adapters, frozen=base)
    size = sum(leaf.size for leaf in jax.tree.leaves(state.parameters))
    # of each map [I, O], R (I + O) numbers a layer
    assert size == 2 * 3 * ((16 + 16) + (16 + 32) + (16 + 16) + (16 + 64) + (64 + 16))
    kept = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim)
    assert kept == size * 3  # two moments, and the weights that are averaged
    step = make_train_step(config, optimizer, make_schedule(options, 5), 1e-2, 0, accumulation=2, skeleton=skeleton)
    batch = np.resize(TOKENS, (4, 11))
    losses = []
    for _ in range(5):
        state, measured = step(state, batch[:, :-1], batch[:, 1:])
        losses.append(float(measured["loss"]))
    assert losses[-1] < losses[0]
    assert state.frozen.keys() == before.keys()
    for name, leaf in before.items():
        np.testing.assert_array_equal(state.frozen[name], leaf)
    assert all(leaf.any() for leaf in state.parameters.values())


def test_the_gradient_of_adapters_is_that_of_the_merged_weights() -> None:
    """dA = scale dW B^T and dB = scale A^T dW, with dW from the plain model."""
    config = ModelConfig(**SIZES)
    skeleton, plain = abstract_adapted(config, LORA), abstract_model(config)
    base, adapters = _parameters(config)

    def loss(model: GPT2) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(TOKENS[:, :-1]), TOKENS[:, 1:]).mean()

    gradients = jax.jit(jax.grad(lambda part: loss(with_parameters(skeleton, {**base, **part}))))(adapters)
    by_weight = jax.jit(jax.grad(lambda whole: loss(with_parameters(plain, whole))))(merged({**base, **adapters}, LORA))
    for stem in ("blocks.mixer.key_value", "blocks.mixer.out", "blocks.mlp.down"):
        a, b = (np.asarray(adapters[f"{stem}.lora_{letter}"], np.float64) for letter in "ab")
        inputs = a[0].size // 3
        dw, a, b = np.asarray(by_weight[f"{stem}.w"]).reshape(2, inputs, -1), a.reshape(2, inputs, 3), b.reshape(2, 3, -1)
        np.testing.assert_allclose(gradients[f"{stem}.lora_a"].reshape(a.shape), 2.0 * dw @ b.swapaxes(1, 2), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(gradients[f"{stem}.lora_b"].reshape(b.shape), 2.0 * a.swapaxes(1, 2) @ dw, rtol=1e-4, atol=1e-6)


def test_nothing_as_large_as_a_weight_is_made() -> None:
    """Neither merged weights nor their gradients, of one layer or of all."""
    config = ModelConfig(**{**SIZES, "n_layer": 3})
    skeleton = abstract_adapted(config, LORA)
    base, adapters = named_parameters(abstract_model(config)), named_parameters(adapter_variables(skeleton))  # type: ignore[arg-type]

    def loss(part: dict[str, jax.Array], base: dict[str, jax.Array]) -> jax.Array:
        return with_parameters(skeleton, {**base, **part}).hidden(jnp.asarray(TOKENS)).sum()

    made: set[tuple[str, tuple[int, ...]]] = set()

    def visit(equations: Any) -> None:
        for equation in equations:
            made.update((equation.primitive.name, v.aval.shape) for v in equation.outvars)
            for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    visit(getattr(inner, "jaxpr", inner).eqns)

    program = jax.make_jaxpr(jax.grad(loss))(adapters, base).jaxpr
    visit(partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[0].eqns)  # without what nothing uses, as XLA leaves it out
    shapes = {shape for _, shape in made}
    assert (3, 16, 3) in shapes and not {(3, 16, 64), (3, 64, 16)} & shapes
    assert not {("dot_general", (16, 64)), ("dot_general", (64, 16))} & made


def test_an_unknown_target_names_the_nearest() -> None:
    config = ModelConfig(**SIZES)
    with pytest.raises(InputError, match="no linear map queri; did you mean query"):
        abstract_adapted(config, dataclasses.replace(LORA, targets=["queri"]))


def test_blocks_in_a_list_are_adapted_too() -> None:
    config = ModelConfig(**SIZES)
    model = with_parameters(abstract_model(config), init_parameters(config, jax.random.key(1)))
    stacked, listed = jax.jit(lambda model: (adapted(model, LORA, jax.random.key(0)), adapted(model.unstack(), LORA, jax.random.key(0))))(model)
    np.testing.assert_array_equal(listed.blocks[1].mlp.up.lora_a[...], stacked.blocks.mlp.up.lora_a[...][1])
    np.testing.assert_allclose(listed(TOKENS), stacked(TOKENS), rtol=0, atol=1e-6)


@pytest.mark.torch
def test_logits_equal_those_of_peft() -> None:
    """The maps that its GPT-2 has apart, as ours does: those out of attention and of the MLP."""
    torch, peft, transformers = (pytest.importorskip(name) for name in ("torch", "peft", "transformers"))
    from golden.folders import GOLDEN

    from gpt2jax.convert.huggingface import load_huggingface

    model, lora = load_huggingface(GOLDEN / "gpt2"), dataclasses.replace(LORA, targets=["out", "up", "down"])
    adapters = init_adapters(model.config, lora, jax.random.key(2))
    adapters = {name: leaf + 0.1 * jax.random.normal(jax.random.key(len(name)), leaf.shape) for name, leaf in adapters.items()}
    options = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["attn.c_proj", "mlp.c_fc", "mlp.c_proj"], fan_in_fan_out=True)
    reference = peft.get_peft_model(transformers.GPT2LMHeadModel.from_pretrained(GOLDEN / "gpt2").eval(), options)
    state = {}
    for ours, theirs in (("mixer.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
        for layer in range(model.config.n_layer):
            stem = f"base_model.model.transformer.h.{layer}.{theirs}"
            a, b = (np.asarray(adapters[f"blocks.{ours}.lora_{letter}"][layer]) for letter in "ab")
            state[f"{stem}.lora_A.default.weight"] = torch.tensor(a.reshape(-1, 3).T)
            state[f"{stem}.lora_B.default.weight"] = torch.tensor(b.reshape(3, -1).T)
    assert not reference.load_state_dict(state, strict=False).unexpected_keys
    tokens = np.arange(2, 2 + model.config.n_positions)[None] % model.config.vocab_size
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    logits = with_parameters(abstract_adapted(model.config, lora), {**named_parameters(model), **adapters})(jnp.asarray(tokens, jnp.int32))
    assert float(jnp.abs(logits - model(jnp.asarray(tokens, jnp.int32))).max()) > 1e-2
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
