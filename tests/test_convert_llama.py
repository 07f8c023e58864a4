"""Hugging Face Llama folders: transformers' logits, each parameter's place, the forms that folders and settings take, and what is refused.

Letters: V vocabulary, D width, F inner width of the MLP, H heads, G key/value heads, K head width.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.folders import GOLDEN, Weights, config_of, variant, weights_of, write_folder, write_shards

from gpt2jax.convert import huggingface
from gpt2jax.convert.huggingface import load_huggingface, read_config
from gpt2jax.convert.tensors import TensorFolder
from gpt2jax.decoding.generate import generate
from gpt2jax.errors import InputError
from gpt2jax.loading import convert_folder, load
from gpt2jax.model.cache import Span
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import named_parameters
from gpt2jax.tokenizer import load_tokenizer

LLAMAS = ("llama", "llama-tied")
#: Absolute, for logits and hidden states between 1 and 4.
TOLERANCE = 1e-5
#: The golden `llama`: its sizes.
L, H, G, K, D, F, V = 2, 4, 2, 6, 20, 37, 101


def answers(name: str) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def refusal(folder: Path) -> str:
    """The message of the InputError that loading the folder gives; it must be one line."""
    with pytest.raises(InputError) as caught:
        load_huggingface(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def logits_error(folder: Path, name: str) -> float:
    """The largest difference from transformers' logits for the golden `name`."""
    golden = answers(name)
    logits = load_huggingface(folder)(jnp.asarray(golden["tokens_BT"]))
    assert logits.shape == golden["logits_BTV"].shape and logits.dtype == jnp.float32
    return float(jnp.abs(logits - golden["logits_BTV"]).max())


@jax.jit
def hidden_states(model: GPT2, tokens_BT: jax.Array) -> list[jax.Array]:
    span = Span.of(tokens_BT.shape)
    states = [model.position(model.token_table[...][tokens_BT], span.position_BT)]
    for block in model.unstacked():
        states.append(block(states[-1], span)[0])
    return [*states[:-1], model.norm(states[-1])]


@pytest.mark.parametrize("name", LLAMAS)
def test_logits_and_hidden_states_equal_transformers(name: str, optimised: None) -> None:
    golden = answers(name)
    assert logits_error(GOLDEN / name, name) <= TOLERANCE
    states = hidden_states(load_huggingface(GOLDEN / name), jnp.asarray(golden["tokens_BT"]))
    for layer, (state, expected) in enumerate(zip(states, golden["hidden_LBTD"], strict=True)):
        np.testing.assert_allclose(state, expected, rtol=0, atol=TOLERANCE, err_msg=f"hidden state {layer}")


@pytest.mark.parametrize("name", LLAMAS)
def test_logits_of_a_left_padded_batch_equal_transformers(name: str, optimised: None) -> None:
    golden = answers(name)
    logits = load_huggingface(GOLDEN / name)(jnp.asarray(golden["tokens_BT"]), mask_BT=jnp.asarray(golden["mask_BT"]))
    assert float(jnp.abs(logits - golden["padded_BTV"])[golden["mask_BT"]].max()) <= TOLERANCE


@pytest.mark.parametrize("name", LLAMAS)
def test_prefill_and_decode_give_the_full_forwards_tokens(name: str) -> None:
    model, new, prompts = load_huggingface(GOLDEN / name), 9, [[5], [17, 3, 60, 2, 11], [40, 8, 8, 31, 0, 22, 9]]
    rows = generate(model, prompts, max_new_tokens=new, temperature=0.0, eos_token_id=None, logprobs=0)
    for prompt, row in zip(prompts, rows, strict=True):
        tokens = [*prompt, *row.tokens, *[0] * (7 - len(prompt))]
        logprobs = jax.nn.log_softmax(model(jnp.asarray([tokens])))[0, len(prompt) - 1 : len(prompt) + new - 1]
        assert row.tokens == logprobs.argmax(-1).tolist()
        np.testing.assert_allclose(row.logprobs, logprobs.max(-1), rtol=0, atol=TOLERANCE)
    assert len({token for row in rows for token in row.tokens}) > 3, "a model that repeats one id would prove little"


def as_theirs(model: GPT2) -> Weights:
    """The parameters of the golden `llama` under transformers' names, written down a second time, from our side."""
    p = {name: np.asarray(leaf) for name, leaf in named_parameters(model).items()}
    theirs = {"model.embed_tokens.weight": p["token_table"][:V], "lm_head.weight": p["head"][:V], "model.norm.weight": p["norm.scale"]}
    for i in range(L):
        layer = {name.removeprefix("blocks."): leaf[i] for name, leaf in p.items() if name.startswith("blocks.")}
        assert layer["mixer.query.w"].shape == (D, H, K) and layer["mixer.key_value.w"].shape == (D, 2, G, K)
        maps = {
            "self_attn.q_proj": layer["mixer.query.w"].reshape(D, H * K),
            "self_attn.k_proj": layer["mixer.key_value.w"][:, 0].reshape(D, G * K),
            "self_attn.v_proj": layer["mixer.key_value.w"][:, 1].reshape(D, G * K),
            "self_attn.o_proj": layer["mixer.out.w"].reshape(H * K, D),
            "mlp.gate_proj": layer["mlp.gate_up.w"][:, 0],
            "mlp.up_proj": layer["mlp.gate_up.w"][:, 1],
            "mlp.down_proj": layer["mlp.down.w"],
        }
        theirs |= {f"model.layers.{i}.{name}.weight": w.T for name, w in maps.items()}
        norms = {"input_layernorm": layer["mixer_norm.scale"], "post_attention_layernorm": layer["mlp_norm.scale"]}
        theirs |= {f"model.layers.{i}.{name}.weight": scale for name, scale in norms.items()}
    return theirs


def assert_equal_weights(model: GPT2, expected: Weights) -> None:
    assert all(leaf.dtype == jnp.float32 and isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model))
    found = as_theirs(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor.astype(np.float32), strict=True, err_msg=name)
    assert not np.asarray(model.token_table[...])[V:].any() and not np.asarray(model.head[...])[V:].any(), "rows that pad the tables are zero"


def bare(weights: Weights) -> Weights:
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def with_buffers(weights: Weights) -> Weights:
    inv_freq = np.ones(K // 2, np.float32)
    return weights | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": inv_freq for i in range(L)} | {"model.rotary_emb.inv_freq": inv_freq}


@pytest.mark.parametrize("form", [dict, bare, with_buffers, lambda w: bare(with_buffers(w))], ids=["plain", "bare", "buffers", "bare+buffers"])
def test_each_form_gives_the_same_parameters(tmp_path: Path, form: Any) -> None:
    assert_equal_weights(load_huggingface(variant(tmp_path, "llama", form)), weights_of("llama"))


def test_shards_give_the_same_parameters(tmp_path: Path) -> None:
    assert_equal_weights(load_huggingface(write_shards(tmp_path, "llama", 3)), weights_of("llama"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_widened_exactly(tmp_path: Path, dtype: str) -> None:
    half = {name: tensor.astype(dtype) for name, tensor in weights_of("llama").items()}
    assert_equal_weights(load_huggingface(variant(tmp_path, "llama", lambda _: half)), half)


@pytest.mark.parametrize("wide", [huggingface.STRIPE - 1, 2 * huggingface.STRIPE, 2 * huggingface.STRIPE + 1])
def test_maps_of_any_width_are_turned_whole(tmp_path: Path, wide: int) -> None:
    draw = np.random.default_rng(wide).standard_normal
    sizes = {"gate_proj": (wide, D), "up_proj": (wide, D), "down_proj": (D, wide)}

    def widened(weights: Weights) -> Weights:
        return {name: draw(sizes.get(name.split(".")[-2], tensor.shape)).astype(np.float32) for name, tensor in weights.items()}

    weights = widened(weights_of("llama"))
    assert_equal_weights(load_huggingface(variant(tmp_path, "llama", lambda _: weights, intermediate_size=wide)), weights)


def with_head(weights: Weights) -> Weights:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].copy()}


def with_head_only(weights: Weights) -> Weights:
    return {"lm_head.weight" if "embed_tokens" in name else name: tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("form", [with_head, with_head_only], ids=["head", "head only"])
def test_a_tied_head_may_be_there_too(tmp_path: Path, form: Any) -> None:
    found, expected = (named_parameters(load_huggingface(folder)) for folder in (variant(tmp_path, "llama-tied", form), GOLDEN / "llama-tied"))
    assert found.keys() == expected.keys() and "head" not in found
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf, strict=True)


def test_a_head_that_config_json_wrongly_ties_or_unties_is_named(tmp_path: Path) -> None:
    message = refusal(variant(tmp_path / "differs", "llama", tie_word_embeddings=True))
    assert "lm_head.weight differs from embed_tokens.weight" in message and "tie_word_embeddings" in message
    assert "missing lm_head.weight" in refusal(variant(tmp_path / "missing", "llama-tied", tie_word_embeddings=False))
    message = refusal(variant(tmp_path / "shape", "llama-tied", lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"][:-2]}))
    assert "lm_head.weight has shape [87, 24]" in message
    assert "tensor lm_head.weight has shape [99, 20]" in refusal(
        variant(tmp_path / "untied", "llama", lambda w: w | {"lm_head.weight": w["lm_head.weight"][2:]})
    )


@pytest.mark.parametrize("biases", ["attention_bias", "mlp_bias"])
def test_biases_that_config_json_does_not_expect_are_left_over_and_others_missing(tmp_path: Path, biases: str) -> None:
    bias = "layers.0.self_attn.q_proj.bias" if biases == "attention_bias" else "layers.0.mlp.gate_proj.bias"
    assert bias in refusal(variant(tmp_path / "more", "llama-tied", **{biases: False})).split("left over")[1]
    assert bias in refusal(variant(tmp_path / "fewer", "llama", **{biases: True})).split("missing")[1]


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.q_norm.weight", "model.layers.2.self_attn.rotary_emb.inv_freq", "score.weight"])
def test_missing_and_left_over_tensors_are_listed_before_anything_is_read(tmp_path: Path, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorFolder, "read", lambda self, name: pytest.fail(f"read {name}"))
    weights = {name: tensor for name, tensor in weights_of("llama").items() if "1.mlp.up_proj" not in name} | {extra: np.zeros(3, np.float32)}
    message = refusal(variant(tmp_path, "llama", lambda _: weights))
    assert "missing layers.1.mlp.up_proj.weight" in message and f"left over {extra.removeprefix('model.')}" in message and "num_hidden_layers=2" in message


@pytest.mark.parametrize("name", sorted(weights_of("llama")))
def test_a_wrong_shape_is_named_with_both(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorFolder, "read", lambda self, name: pytest.fail(f"read {name}"))
    right = weights_of("llama")[name].shape
    wrong = (*right[:-1], right[-1] + 1)
    message = refusal(variant(tmp_path, "llama", lambda w: w | {name: np.zeros(wrong, np.float32)}))
    assert f"tensor {name.removeprefix('model.')} has shape {list(wrong)}" in message and str(list(right)) in message


def test_gpt2s_own_layout_is_refused(tmp_path: Path) -> None:
    message = refusal(variant(tmp_path, "llama", lambda w: {name: t.T if "proj" in name else t for name, t in w.items()}))
    assert f"[{D}, {H * K}]" in message and f"[{H * K}, {D}]" in message


def test_a_vocabulary_that_disagrees_is_named_with_both_sizes(tmp_path: Path) -> None:
    message = refusal(variant(tmp_path, "llama", vocab_size=103))
    assert "vocab_size=103" in message and "101 rows" in message


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "lm_head.weight"])
def test_a_nan_is_named(tmp_path: Path, name: str) -> None:
    def spoiled(weights: Weights) -> Weights:
        weights[name][-1, -1] = np.nan
        return weights

    assert f"tensor {name} holds NaN" in refusal(variant(tmp_path, "llama", spoiled))


def test_config_is_read_as_it_stands() -> None:
    config = read_config(GOLDEN / "llama")
    assert (config.n_layer, config.n_head, config.kv_heads, config.head_dim, config.n_embd, config.n_inner, config.vocab_size) == (L, H, G, K, D, F, V)
    assert (config.position, config.norm, config.mlp, config.attention, config.rope_layout) == ("rope", "rmsnorm", "swiglu", "mha", "half")
    assert (config.layer_norm_epsilon, config.n_positions, config.tie_word_embeddings, config.compute_dtype) == (1e-5, 128, False, "float32")
    assert (config.attention_bias, config.mlp_bias, config.attn_pdrop, config.resid_pdrop, config.embd_pdrop) == (False, False, 0.0, 0.0, 0.0)
    assert (config.rope_theta, config.rope_scaling, config.rope_factor, config.rope_original_positions) == (100.0, "llama3", 4.0, 32)
    tied = read_config(GOLDEN / "llama-tied")
    assert (tied.rope_theta, tied.rope_scaling, tied.rope_factor, tied.rope_original_positions, tied.rope_attention_factor) == (100.0, "yarn", 4.0, 16, None)
    assert (tied.attention_bias, tied.mlp_bias, tied.tie_word_embeddings, tied.head_dim, tied.head_width) == (True, True, True, None, 4)


def rope_of(**settings: Any) -> dict[str, Any]:
    """config.json's entries of one setting, the others of the golden `llama` left out."""
    return {"rope_parameters": None, **settings}


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ({"num_key_value_heads": None}, "kv_head_count", H),
        ({"num_key_value_heads": 1}, "kv_heads", 1),
        ({"head_dim": None, "num_attention_heads": G}, "head_width", D // G),
        ({"rms_norm_eps": 1e-6}, "layer_norm_epsilon", 1e-6),
        ({"max_position_embeddings": 131072}, "n_positions", 131072),
        ({"initializer_range": 0.03}, "initializer_range", 0.03),
        ({"attention_dropout": 0.1}, "attn_pdrop", 0.1),
        ({"hidden_act": "swish", "pretraining_tp": None, "quantization_config": None}, "mlp", "swiglu"),
        ({}, "eos_token_id", 100),  # the first of two
        ({"eos_token_id": 3}, "eos_token_id", 3),
        ({"eos_token_id": None}, "eos_token_id", None),
        ({"eos_token_id": []}, "eos_token_id", None),
        ({"eos_token_id": 128001}, "eos_token_id", None),
        (rope_of(), "rope_theta", 10000.0),
        (rope_of(rope_theta=500000), "rope_theta", 500000),
        (rope_of(rope_theta=500000, rope_parameters=dict(rope_type="default", rope_theta=7.0)), "rope_theta", 7.0),
        (rope_of(rope_scaling=dict(type="linear", factor=2)), "rope_scaling", "linear"),
        (rope_of(rope_scaling=dict(type="linear", factor=2)), "rope_factor", 2),
        (rope_of(rope_scaling=dict(type="default")), "rope_scaling", None),
        (rope_of(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.5, high_freq_factor=5.0)), "rope_original_positions", 128),
        (rope_of(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.5, high_freq_factor=5.0)), "rope_low_freq_factor", 1.5),
        (rope_of(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.5, high_freq_factor=5.0)), "rope_high_freq_factor", 5.0),
        (rope_of(rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=55)), "rope_original_positions", 55),
        (
            rope_of(rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=55), original_max_position_embeddings=77),
            "rope_original_positions",
            77,
        ),
        (rope_of(rope_scaling=dict(type="linear", factor=2.0), rope_parameters=dict(rope_type="yarn", factor=8.0)), "rope_scaling", "linear"),
        (rope_of(rope_scaling=dict(rope_type="yarn", factor=8.0, beta_fast=16, finetuned=True)), "rope_beta_fast", 16),
        (rope_of(rope_scaling=dict(rope_type="yarn", factor=8.0, beta_slow=2, truncate=True)), "rope_beta_slow", 2),
        (rope_of(rope_scaling=dict(rope_type="yarn", factor=8.0, attention_factor=1.5)), "rope_attention_factor", 1.5),
        (rope_of(rope_scaling=dict(rope_type="yarn", factor=8.0, mscale=1.0, mscale_all_dim=1.0)), "rope_attention_factor", 1.0),
        (
            rope_of(rope_scaling=dict(rope_type="yarn", factor=8.0, mscale=0.7, mscale_all_dim=0.5)),
            "rope_attention_factor",
            (0.07 * math.log(8) + 1) / (0.05 * math.log(8) + 1),
        ),
    ],
)
def test_config_fields(tmp_path: Path, setting: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(read_config(variant(tmp_path, "llama", **setting)), field) == value


@pytest.mark.parametrize("name", LLAMAS)
def test_both_spellings_of_rope_are_one(tmp_path: Path, name: str) -> None:
    tree = config_of(name)
    rope = {"rope_theta": tree.pop("rope_theta", None), **(tree.pop("rope_scaling", None) or tree.pop("rope_parameters"))}
    theta = rope.pop("rope_theta") or 100.0
    spellings = [
        {"rope_parameters": {**rope, "rope_theta": theta}},
        {"rope_theta": theta, "rope_scaling": rope},
        {"rope_theta": theta, "rope_parameters": rope},
        {"rope_theta": theta, "rope_scaling": {"type": rope["rope_type"], **{key: value for key, value in rope.items() if key != "rope_type"}}},
    ]
    for i, spelling in enumerate(spellings):
        assert read_config(write_folder(tmp_path / str(i), {}, {**tree, **spelling})) == read_config(GOLDEN / name)


def test_what_config_json_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = read_config(tmp_path)
    assert (config.vocab_size, config.n_positions, config.n_layer, config.n_head, config.n_embd, config.n_inner) == (32000, 2048, 32, 32, 4096, 11008)
    assert (config.layer_norm_epsilon, config.initializer_range, config.rope_theta, config.rope_scaling, config.eos_token_id) == (1e-6, 0.02, 10000.0, None, 2)
    assert (config.kv_head_count, config.head_width, config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (32, 128, False, False, False)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"model_type": "mllama"}, "model_type='mllama'"),
        ({"model_type": ["llama"]}, "model_type=['llama']"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"num_attention_heads": 3, "num_key_value_heads": None, "head_dim": None}, "num_attention_heads=3 does not divide hidden_size=20"),
        ({"head_dim": 5}, "a head is 5 wide"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=None"),
        ({"mlp_bias": "no"}, "mlp_bias='no'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: rope_type='dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters: rope_type='longrope'"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type=['yarn']"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters={'full_attention'"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type='linear' needs factor"),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "rope_type='yarn' needs factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate=False"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}}, "rope_type='llama3' needs high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8.5}}, "original_max_position_embeddings=8.5"),
        ({"rope_scaling": {"type": "yarn", "factor": "2", "mscale": 1.0, "mscale_all_dim": 0.5}}, "factor='2'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta=-1"),
    ],
)
def test_settings_that_are_refused_by_name(tmp_path: Path, setting: dict[str, Any], named: str) -> None:
    message = refusal(variant(tmp_path, "llama", **setting))
    assert named in message and message.count(str(tmp_path / "config.json")) == 1 and "model." not in message.replace(str(tmp_path), "")


def test_a_config_without_model_type_is_refused(tmp_path: Path) -> None:
    assert "'llama'" in refusal(variant(tmp_path, "llama", drop=("model_type",)))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama", {"rope_parameters": {**config_of("llama")["rope_parameters"], "factor": 3.0}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        ("llama", {"rms_norm_eps": 1e-6}),
        ("llama-tied", {"rms_norm_eps": 1e-6}),
        ("llama-tied", {"rope_scaling": {**config_of("llama-tied")["rope_scaling"], "attention_factor": 1.0}}),
        ("llama-tied", {"rope_theta": 101.0}),
    ],
    ids=str,
)
def test_wrong_settings_are_seen(tmp_path: Path, name: str, wrong: dict[str, Any]) -> None:
    assert logits_error(variant(tmp_path, name, **wrong), name) > 3 * TOLERANCE


def renamed(old: str, new: str) -> Any:
    """Two tensors of each layer change places."""

    def change(weights: Weights) -> Weights:
        swap = lambda name: name.replace(old, new) if old in name else name.replace(new, old)  # noqa: E731
        return {swap(name): tensor for name, tensor in weights.items()}

    return change


def turned(weights: Weights) -> Weights:
    return {name: tensor.T if name.endswith("o_proj.weight") else tensor for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (renamed("gate_proj", "up_proj"), "llama"),
        (renamed("k_proj", "v_proj"), "llama"),
        (renamed("embed_tokens", "lm_head"), "llama"),
        (renamed("layers.0", "layers.1"), "llama"),
        (renamed("input_layernorm", "post_attention_layernorm"), "llama-tied"),
        (turned, "llama-tied"),
    ],
    ids=["gate and up", "key and value", "table and head", "layers", "norms", "square o_proj"],
)
def test_scrambled_weights_of_the_right_shape_are_seen(tmp_path: Path, change: Any, name: str) -> None:
    assert logits_error(variant(tmp_path, name, lambda weights: change(bare(weights))), name) > 1e-3


def test_the_map_covers_each_parameter_and_each_tensor_once() -> None:
    sources = huggingface.FORMATS["llama"].parameters
    names = {name: {tensor for source in sources.values() for layer in source.tensors(L) for tensor in layer} for name in LLAMAS}
    assert {source for name in LLAMAS for source in named_parameters(huggingface.abstract_model(read_config(GOLDEN / name)))} == sources.keys()
    assert {name.removeprefix("model.") for golden in LLAMAS for name in weights_of(golden)} == names["llama"]


def test_convert_and_load_keep_the_model_and_its_tokenizer(tmp_path: Path) -> None:
    folder = variant(tmp_path / "theirs", "llama")
    load_tokenizer("bytes").save(folder)
    convert_folder(folder, tmp_path / "ours")
    (model, _), (again, tokenizer) = load(folder), load(tmp_path / "ours")
    assert again.config == model.config and tokenizer is not None and tokenizer.encode("AB") == [65, 66]
    for name, leaf in named_parameters(model).items():
        np.testing.assert_array_equal(named_parameters(again)[name], leaf, strict=True)


def test_a_tokenizer_of_another_scheme_leaves_the_model_with_ids_and_says_so(tmp_path: Path) -> None:
    folder = variant(tmp_path, "llama")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"<unk>": 0}, "merges": [], "byte_fallback": True}}))
    with pytest.warns(UserWarning, match="tokenizer.json.*takes and gives token ids"):
        model, tokenizer = load(folder)
    assert tokenizer is None and generate(model, [[5, 7]], max_new_tokens=2, temperature=0.0)[0].text is None


def test_a_llama_without_tokenizer_files_never_gets_gpt2s(tmp_path: Path) -> None:
    big = {name: np.zeros((50257, D), np.float32) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert load(variant(tmp_path, "llama", lambda weights: weights | big, vocab_size=50257))[1] is None


def live_folder(folder: Path, **settings: Any) -> Any:
    """A random model of transformers', saved."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=53, hidden_size=24, intermediate_size=29, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64)
    torch.manual_seed(len(json.dumps(settings)))
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | settings, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.torch
@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(num_key_value_heads=1, head_dim=10, tie_word_embeddings=True, rms_norm_eps=1e-3),
        dict(num_key_value_heads=2, attention_bias=True, rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=50.0)),
        dict(mlp_bias=True, rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=300.0, mscale=0.8, mscale_all_dim=0.3, beta_fast=2.0)),
        dict(
            rope_parameters=dict(
                rope_type="llama3", factor=8.0, rope_theta=5000.0, low_freq_factor=1.0, high_freq_factor=2.0, original_max_position_embeddings=40
            )
        ),
    ],
    ids=["plain", "mqa", "linear", "yarn", "llama3"],
)
def test_a_saved_model_gives_transformers_logits(tmp_path: Path, settings: dict[str, Any], optimised: None) -> None:
    torch = pytest.importorskip("torch")

    theirs, ours = live_folder(tmp_path, **settings), load_huggingface(tmp_path)
    tokens = np.random.default_rng(1).integers(0, 53, (2, 60))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(np.asarray(ours(jnp.asarray(tokens, jnp.int32))) - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.torch
@pytest.mark.slow
def test_greedy_ids_equal_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    theirs, ours = (
        live_folder(tmp_path, num_key_value_heads=2, rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=50.0)),
        load_huggingface(tmp_path),
    )
    prompt = [5, 17, 3, 50, 2, 11]
    greedy = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    found = generate(ours, [prompt], max_new_tokens=12, temperature=0.0, eos_token_id=None)[0].tokens
    assert found == greedy[0, len(prompt) :].tolist() and len(set(found)) > 2


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_stretched_by_one_is_not_stretched(tmp_path: Path, kind: str) -> None:
    config = read_config(variant(tmp_path, "llama", rope_parameters={"rope_type": kind, "factor": 1.0, "rope_theta": 10000.0}))
    assert config.rope_scaling is None and config.rope_theta == 10000.0
