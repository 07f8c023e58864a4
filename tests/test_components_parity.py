"""Each component that can be swapped against transformers: stored answers, and live where torch is installed. Letters as in golden/make_components.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.folders import GOLDEN
from golden.make_components import CASES, Arrays, D, F, H, K, answer, inputs

from gpt2jax.config import ModelConfig
from gpt2jax.model.attention import Attention, Cached
from gpt2jax.model.cache import Span
from gpt2jax.model.mla import LatentAttention
from gpt2jax.model.mlp import GatedMLP
from gpt2jax.model.norm import RMSNorm
from gpt2jax.model.position import rotation

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def _float32_matmuls() -> Any:
    with jax.default_matmul_precision("float32"):
        yield


def tolerance(name: str) -> float:
    """Relative to the largest number of the answer. Rotation sums nothing; angles must be the same to the last bit, which at a position of 1,000 is 6e-5."""
    return 1e-6 if "position" in stored(name) else 1e-5


def stored(name: str) -> Arrays:
    with np.load(GOLDEN / "components.npz") as file:
        return {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}


def config_of(name: str, **changes: Any) -> ModelConfig:
    sizes = dict(n_layer=1, n_head=H, n_embd=D, n_inner=F, vocab_size=11, attn_pdrop=0.0)
    return ModelConfig(**{**sizes, **CASES[name].ours, **changes})


def module_of(name: str, arrays: Arrays, **changes: Any) -> Any:
    """Our module with transformers' weights, whose linear maps are [out, in]."""
    config = config_of(name, **changes)
    if CASES[name].theirs == "LlamaRMSNorm":
        return filled(RMSNorm(config), scale=arrays["weight"])
    if CASES[name].theirs.endswith("MLP"):
        module = GatedMLP(config, KEY)
        filled(module.gate_up, w=np.stack([arrays["gate_proj.weight"].T, arrays["up_proj.weight"].T], 1))
        filled(module.down, w=arrays["down_proj.weight"].T)
        if "down_proj.bias" in arrays:
            filled(module.gate_up, b=np.stack([arrays["gate_proj.bias"], arrays["up_proj.bias"]]))
            filled(module.down, b=arrays["down_proj.bias"])
        return module
    if config.attention == "mla":
        return latent_of(config, arrays)
    module, G = Attention(config, KEY), config.kv_head_count
    filled(module.query, w=arrays["q_proj.weight"].T.reshape(D, H, K))
    filled(module.key_value, w=np.stack([arrays[f"{part}_proj.weight"].T.reshape(D, G, K) for part in "kv"], 1))
    filled(module.out, w=arrays["o_proj.weight"].T.reshape(H, K, D))
    if "q_proj.bias" in arrays:
        filled(module.query, b=arrays["q_proj.bias"].reshape(H, K))
        filled(module.key_value, b=np.stack([arrays[f"{part}_proj.bias"].reshape(G, K) for part in "kv"]))
        filled(module.out, b=arrays["o_proj.bias"])
    if "q_norm.weight" in arrays:
        filled(module.query_norm, scale=arrays["q_norm.weight"])
        filled(module.key_norm, scale=arrays["k_norm.weight"])
    return filled(module, sinks=arrays["sinks"]) if "sinks" in arrays else module


def latent_of(config: ModelConfig, arrays: Arrays) -> LatentAttention:
    """Their kv_b_proj holds a head's part of the key beside its value."""
    module, N = LatentAttention(config, KEY), config.nope_dim
    by_head = lambda name: arrays[f"{name}.weight"].T.reshape(-1, config.n_head, arrays[f"{name}.weight"].shape[0] // config.n_head)  # noqa: E731
    filled(module.query, w=by_head("q_b_proj" if config.mla_q_rank else "q_proj"))
    filled(module.latent, w=arrays["kv_a_proj_with_mqa.weight"].T)
    filled(module.latent_norm, scale=arrays["kv_a_layernorm.weight"])
    filled(module.key_up, w=by_head("kv_b_proj")[..., :N])
    filled(module.value_up, w=by_head("kv_b_proj")[..., N:])
    filled(module.out, w=arrays["o_proj.weight"].T.reshape(config.n_head, config.value_width, D))
    if config.mla_q_rank:
        filled(module.query_down, w=arrays["q_a_proj.weight"].T)
        filled(module.query_norm, scale=arrays["q_a_layernorm.weight"])
    if config.attention_bias:
        filled(module.query_down, b=arrays["q_a_proj.bias"])
        filled(module.latent, b=arrays["kv_a_proj_with_mqa.bias"])
        filled(module.out, b=arrays["o_proj.bias"])
    return module


def filled(module: Any, **parameters: np.ndarray[Any, Any]) -> Any:
    for name, value in parameters.items():
        assert getattr(module, name).shape == value.shape, name
        getattr(module, name)[...] = jnp.asarray(value)
    return module


def ours(name: str, arrays: Arrays, **changes: Any) -> np.ndarray[Any, Any]:
    x = jnp.asarray(arrays["x"])
    if "position" in arrays:
        config = config_of(name, **changes)
        return np.asarray(rotation(config, config.head_width)(x, jnp.asarray(arrays["position"])))
    module = module_of(name, arrays, **changes)
    return np.asarray(module(x, Span.of(x.shape[:2]))[0] if isinstance(module, Cached) else module(x))


def error(name: str, arrays: Arrays, expected: np.ndarray[Any, Any], **changes: Any) -> float:
    found = ours(name, arrays, **changes)
    assert found.shape == expected.shape and found.dtype == np.float32
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_a_component_equals_transformers(name: str) -> None:
    arrays = stored(name)
    assert error(name, arrays, arrays["y"]) <= tolerance(name)


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_a_component_equals_transformers_live(name: str) -> None:
    pytest.importorskip("transformers")
    arrays = inputs(name, seed=5)
    assert error(name, arrays, answer(name, arrays)) <= tolerance(name)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rope", dict(rope_theta=10001.0)),
        ("rope", dict(rope_layout="interleaved")),
        ("interleaved", dict(rope_layout="half")),
        ("rope linear", dict(rope_factor=2.501)),
        ("rope llama3", dict(rope_scaling="linear", rope_original_positions=None, rope_high_freq_factor=4.0)),
        ("rope llama3", dict(rope_high_freq_factor=16.1)),
        ("rope llama3", dict(rope_low_freq_factor=1.1)),
        ("rope llama3", dict(rope_original_positions=511)),
        ("rope yarn", dict(rope_beta_fast=2.0)),
        ("rope yarn", dict(rope_attention_factor=1.0)),
        ("rope yarn", dict(rope_original_positions=1024)),
        ("rope yarn set", dict(rope_beta_slow=1.0)),
        ("rope yarn set", dict(rope_beta_fast=32.0)),
        ("rmsnorm", dict(layer_norm_epsilon=1e-5)),
        ("geglu", dict(activation_function="gelu")),
        ("qk norm", dict(qk_norm=False)),
        ("qk norm", dict(layer_norm_epsilon=1e-5)),
        ("gqa", dict(position="none", rope_theta=10000.0)),
        ("window", dict(sliding_window=4)),
        ("softcap", dict(attention_softcap=1.6)),
        ("sinks", dict(attention_sinks=False)),
        ("mla", dict(rope_layout="half")),
        ("mla", dict(position="none", rope_theta=10000.0, rope_layout="half")),
        ("mla queries", dict(rope_theta=101.0)),
        ("mla yarn", dict(rope_mscale_all_dim=1.0)),
        ("mla yarn", dict(rope_attention_factor=1.0)),
        ("mla nope", dict(position="rope")),
    ],
    ids=str,
)
def test_a_wrong_setting_is_seen(name: str, wrong: dict[str, Any]) -> None:
    """The answers depend on each setting, so that the comparison above says something about it."""
    arrays, expected = stored(name), stored(name)["y"]
    parts = [part for part, there in (("norm", wrong.get("qk_norm", True)), ("sinks", wrong.get("attention_sinks", True))) if not there]
    given = {key: value for key, value in arrays.items() if not any(part in key for part in parts)}
    assert error(name, given, expected, **wrong) > 10 * tolerance(name)
