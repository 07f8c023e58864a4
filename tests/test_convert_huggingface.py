"""Hugging Face GPT-2 folders: each parameter's place, the forms that people's folders take, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.folders import GOLDEN, Weights, variant, weights_of, write_shards

from gpt2jax.convert import huggingface
from gpt2jax.convert.huggingface import load_huggingface, read_config
from gpt2jax.convert.tensors import TensorFolder
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import named_parameters

#: The golden `inner`: its sizes.
L, H, K, D, F, V, C = 2, 4, 3, 12, 31, 61, 9


def refusal(folder: Path) -> str:
    """The message of the InputError that loading the folder gives; it must be one line."""
    with pytest.raises(InputError) as caught:
        load_huggingface(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def as_theirs(model: GPT2) -> Weights:
    """The model's parameters under transformers' names, written down a second time, from our side."""
    p = {name: np.asarray(leaf) for name, leaf in named_parameters(model).items()}
    theirs = {"wte.weight": p["token_table"][:V], "wpe.weight": p["position.table"], "ln_f.weight": p["norm.scale"], "ln_f.bias": p["norm.bias"]}
    for i in range(L):
        query_w, key_value_w, key_value_b = (p[f"blocks.mixer.{name}"][i] for name in ("query.w", "key_value.w", "key_value.b"))
        assert query_w.shape == (D, H, K) and key_value_w.shape == (D, 2, H, K)
        attention_w = np.concatenate([query_w.reshape(D, D), key_value_w[:, 0].reshape(D, D), key_value_w[:, 1].reshape(D, D)], 1)
        attention_b = np.concatenate([p["blocks.mixer.query.b"][i].reshape(D), key_value_b[0].reshape(D), key_value_b[1].reshape(D)])
        theirs |= {f"h.{i}.attn.c_attn.weight": attention_w, f"h.{i}.attn.c_attn.bias": attention_b}
        theirs |= {f"h.{i}.attn.c_proj.weight": p["blocks.mixer.out.w"][i].reshape(D, D), f"h.{i}.attn.c_proj.bias": p["blocks.mixer.out.b"][i]}
        theirs |= {f"h.{i}.mlp.c_fc.weight": p["blocks.mlp.up.w"][i], f"h.{i}.mlp.c_fc.bias": p["blocks.mlp.up.b"][i]}
        theirs |= {f"h.{i}.mlp.c_proj.weight": p["blocks.mlp.down.w"][i], f"h.{i}.mlp.c_proj.bias": p["blocks.mlp.down.b"][i]}
        for ours, name in (("mixer_norm", "ln_1"), ("mlp_norm", "ln_2")):
            theirs |= {f"h.{i}.{name}.weight": p[f"blocks.{ours}.scale"][i], f"h.{i}.{name}.bias": p[f"blocks.{ours}.bias"][i]}
    return theirs


def assert_equal_weights(model: GPT2, expected: Weights) -> None:
    assert all(leaf.dtype == jnp.float32 and isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model))
    found = as_theirs(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor.astype(np.float32), strict=True, err_msg=name)
    assert not np.asarray(model.token_table[...])[V:].any(), "rows that pad the table are zero"


def prefixed(weights: Weights) -> Weights:
    return {f"transformer.{name}": tensor for name, tensor in weights.items()}


def with_buffers(weights: Weights) -> Weights:
    mask = np.tril(np.ones((1, 1, C, C), np.uint8))
    buffers = {f"h.{i}.attn.bias": mask for i in range(L)} | {f"h.{i}.attn.masked_bias": np.array(-np.inf, np.float32) for i in range(L)}
    return weights | buffers


def with_head(weights: Weights) -> Weights:
    return weights | {"lm_head.weight": weights["wte.weight"].copy()}


def with_head_only(weights: Weights) -> Weights:
    return {"lm_head.weight" if name == "wte.weight" else name: tensor for name, tensor in weights.items()}


FORMS = [
    dict,
    prefixed,
    with_buffers,
    lambda w: prefixed(with_buffers(w)),
    with_head,
    lambda w: {name.removeprefix("transformer.") if "lm_head" in name else name: tensor for name, tensor in prefixed(with_head(w)).items()},
    with_head_only,
]


@pytest.mark.parametrize("form", FORMS, ids=["plain", "prefix", "buffers", "prefix+buffers", "head", "prefix+head", "head only"])
def test_each_form_gives_the_same_parameters(tmp_path: Path, form: Any) -> None:
    assert_equal_weights(load_huggingface(variant(tmp_path, "inner", form)), weights_of("inner"))


def test_shards_give_the_same_parameters(tmp_path: Path) -> None:
    assert_equal_weights(load_huggingface(write_shards(tmp_path, "inner", 3)), weights_of("inner"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_widened_exactly(tmp_path: Path, dtype: str) -> None:
    half = {name: tensor.astype(dtype) for name, tensor in weights_of("inner").items()}
    assert_equal_weights(load_huggingface(variant(tmp_path, "inner", lambda _: half)), half)


def test_parameters_survive_the_file_and_the_arrays_they_came_from(tmp_path: Path) -> None:
    model = load_huggingface(variant(tmp_path, "inner"))
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:  # in place: the memory map sees it
        opened.write(bytes(size))
    assert_equal_weights(model, weights_of("inner"))
    doubled = jax.jit(lambda m: jax.tree.map(lambda leaf: 2 * leaf, m), donate_argnums=0)(model)
    assert_equal_weights(doubled, {name: 2 * tensor for name, tensor in weights_of("inner").items()})


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ("h.0.attn.bias2", "h.0.attn.bias2"),
        ("h.0.mlp.bias", "h.0.mlp.bias"),
        ("h.2.attn.bias", "h.2.attn.bias"),
        ("attn.masked_bias", "attn.masked_bias"),
        ("score.weight", "score.weight"),
        ("transformer.h.0.ln_1.gain", "h.0.ln_1.gain"),
    ],
)
def test_a_tensor_left_over_is_named(tmp_path: Path, extra: str, named: str) -> None:
    message = refusal(variant(tmp_path, "inner", lambda w: w | {extra: np.zeros(3, np.float32)}))
    assert f"left over {named}" in message and "missing" not in message


def test_missing_and_left_over_tensors_are_listed_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorFolder, "read", lambda self, name: pytest.fail(f"read {name}"))
    drop = ("h.1.ln_2.bias", "wpe.weight")
    weights = {name: tensor for name, tensor in weights_of("inner").items() if name not in drop} | {"h.7.new": np.zeros(2, np.float32)}
    message = refusal(variant(tmp_path, "inner", lambda _: weights))
    assert "missing h.1.ln_2.bias, wpe.weight" in message and "left over h.7.new" in message


def test_another_number_of_layers_is_refused(tmp_path: Path) -> None:
    assert "left over h.1.attn.c_attn.bias" in refusal(variant(tmp_path / "fewer", "inner", n_layer=1))
    assert "missing h.2.attn.c_attn.bias" in refusal(variant(tmp_path / "more", "inner", n_layer=3))


def test_a_tensor_with_and_without_prefix_is_refused(tmp_path: Path) -> None:
    assert "wpe.weight twice" in refusal(variant(tmp_path, "inner", lambda w: w | {"transformer.wpe.weight": w["wpe.weight"]}))


@pytest.mark.parametrize("name", sorted(weights_of("inner")))
def test_a_wrong_shape_is_named_with_both(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorFolder, "read", lambda self, name: pytest.fail(f"read {name}"))
    right = weights_of("inner")[name].shape
    wrong = (*right[:-1], right[-1] + 1)
    message = refusal(variant(tmp_path, "inner", lambda w: w | {name: np.zeros(wrong, np.float32)}))
    assert f"tensor {name} has shape {list(wrong)}" in message and str(list(right)) in message


def test_torch_linear_layout_is_refused(tmp_path: Path) -> None:
    message = refusal(variant(tmp_path, "inner", lambda w: {name: t.T if "c_attn" in name or "c_fc" in name else t for name, t in w.items()}))
    assert f"[{3 * D}, {D}]" in message and f"[{D}, {3 * D}]" in message


def test_a_vocabulary_that_disagrees_is_named_with_both_sizes(tmp_path: Path) -> None:
    message = refusal(variant(tmp_path, "inner", vocab_size=67))
    assert "vocab_size=67" in message and "61 rows" in message


def untied(weights: Weights) -> Weights:
    head = weights["wte.weight"].copy()
    head[-1, -1] += 1e-3
    return weights | {"lm_head.weight": head}


def test_a_head_of_its_own_is_read_where_config_json_says_so(tmp_path: Path) -> None:
    model = load_huggingface(variant(tmp_path, "inner", untied, tie_word_embeddings=False))
    assert model.head is not None and not np.asarray(model.head[...])[V:].any()
    np.testing.assert_array_equal(model.head[...][:V], untied(weights_of("inner"))["lm_head.weight"], strict=True)
    np.testing.assert_array_equal(model.token_table[...][:V], weights_of("inner")["wte.weight"], strict=True)
    assert "missing lm_head.weight" in refusal(variant(tmp_path / "none", "inner", tie_word_embeddings=False))


def test_a_head_of_its_own_is_refused_by_name_where_config_json_ties_it(tmp_path: Path) -> None:
    message = refusal(variant(tmp_path, "inner", untied))
    assert "lm_head.weight differs from wte.weight" in message and "tie_word_embeddings" in message
    message = refusal(variant(tmp_path / "shape", "inner", lambda w: w | {"lm_head.weight": w["wte.weight"][:-2]}))
    assert f"lm_head.weight has shape [{V - 2}, {D}]" in message


def test_a_nan_deep_in_a_layer_is_named(tmp_path: Path) -> None:
    def spoiled(weights: Weights) -> Weights:
        weights["h.1.mlp.c_fc.bias"][F - 1] = np.nan
        return prefixed(weights)

    assert "tensor transformer.h.1.mlp.c_fc.bias holds NaN" in refusal(variant(tmp_path, "inner", spoiled))


def test_config_is_read_as_it_stands() -> None:
    config = read_config(GOLDEN / "inner")
    assert (config.n_layer, config.n_head, config.head_width, config.n_embd, config.mlp_width, config.vocab_size, config.n_positions) == (L, H, K, D, F, V, C)
    assert (config.activation_function, config.layer_norm_epsilon, config.eos_token_id, config.compute_dtype) == ("gelu", 1e-5, V - 1, "float32")
    assert (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop, config.initializer_range) == (0.1, 0.1, 0.1, 0.02)
    assert read_config(GOLDEN / "gpt2").n_inner is None and read_config(GOLDEN / "gpt2").mlp_width == 4 * 36


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ({"embd_pdrop": 0.3}, "embd_pdrop", 0.3),
        ({"attn_pdrop": 0}, "attn_pdrop", 0.0),
        ({"resid_pdrop": 0.2}, "resid_pdrop", 0.2),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon", 1e-6),
        ({"initializer_range": 0.03}, "initializer_range", 0.03),
        ({"initializer_range": 0.03}, "position_initializer_range", 0.03),
        ({"eos_token_id": 7}, "eos_token_id", 7),
        ({"eos_token_id": None}, "eos_token_id", None),
        ({"eos_token_id": [7, 1]}, "eos_token_id", 7),
        ({"eos_token_id": []}, "eos_token_id", None),
        ({"eos_token_id": 50256}, "eos_token_id", None),
        ({"n_inner": None}, "mlp_width", 4 * D),
        ({"activation_function": "relu"}, "activation_function", "relu"),
        ({"summary_type": "cls_index", "task_specific_params": {"text-generation": {"do_sample": True}}, "n_ctx": 5}, "n_positions", C),
    ],
)
def test_config_fields(tmp_path: Path, setting: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(read_config(variant(tmp_path, "inner", **setting)), field) == value


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("n_positions", "n_ctx"), ("n_positions", "max_position_embeddings"), ("n_embd", "hidden_size"), ("n_layer", "num_hidden_layers")]
    + [("n_head", "num_attention_heads")],
)
def test_other_names_of_sizes(tmp_path: Path, ours: str, theirs: str) -> None:
    expected = read_config(GOLDEN / "inner")
    assert read_config(variant(tmp_path, "inner", drop=(ours,), **{theirs: getattr(expected, ours)})) == expected


def test_what_config_json_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    config = read_config(tmp_path)
    assert (config.vocab_size, config.n_positions, config.n_layer, config.n_head, config.n_embd) == (50257, 1024, 12, 12, 768)
    assert (config.eos_token_id, config.activation_function, config.n_inner) == (50256, "gelu_new", None)
    assert (config.embd_pdrop, config.attn_pdrop, config.resid_pdrop) == (0.1, 0.1, 0.1)
    assert (config.layer_norm_epsilon, config.initializer_range) == (1e-5, 0.02)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"model_type": "gpt_neo"}, "model_type='gpt_neo'"),
        ({"model_type": None}, "model_type=None"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=None"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"activation_function": "gelu_fast"}, "activation_function='gelu_fast'"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon=0"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon=nan"),
        ({"n_head": 5}, "n_head=5 does not divide"),
        ({"n_layer": "2"}, "n_layer='2'"),
        ({"n_embd": 12.5}, "n_embd=12.5"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"eos_token_id": "7"}, "eos_token_id='7'"),
        ({"eos_token_id": ["7"]}, "eos_token_id='7'"),
        ({"attn_pdrop": 1.5}, "attn_pdrop=1.5"),
    ],
)
def test_settings_that_are_refused_by_name(tmp_path: Path, setting: dict[str, Any], named: str) -> None:
    message = refusal(variant(tmp_path, "inner", **setting))
    assert named in message and "config.json" in message


def test_a_config_without_model_type_is_refused(tmp_path: Path) -> None:
    assert '"model_type": "gpt2"' in refusal(variant(tmp_path, "inner", drop=("model_type",)))


def test_weights_without_config_are_refused(tmp_path: Path) -> None:
    (variant(tmp_path, "inner") / "config.json").unlink()
    assert f"{tmp_path} has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '"gpt2"'])
def test_malformed_config_is_refused(tmp_path: Path, content: str) -> None:
    (variant(tmp_path, "inner") / "config.json").write_text(content)
    assert str(tmp_path / "config.json") in refusal(tmp_path)


def test_the_map_covers_each_parameter_and_each_tensor_once() -> None:
    model = huggingface.abstract_model(read_config(GOLDEN / "inner"))
    sources = huggingface.FORMATS["gpt2"].parameters
    assert sources.keys() - {"head"} == named_parameters(model).keys()
    assert {source.name.format(i=i) for name, source in sources.items() if name != "head" for i in range(L)} == weights_of("inner").keys()
