"""transformers' `LlamaForCausalLM`: Llama 1 to 3.2 and what shares its code (SmolLM, TinyLlama, Yi, ...).

The names and shapes are those of transformers' models/llama/modeling_llama.py, whose linear maps are torch's, [out, in]. Its rotary pairs are (j, j + K/2);
weights in Meta's own files are ordered for pairs (2j, 2j + 1).

Letters: V vocabulary, D width, F inner width of the MLP, HK heads x head width, GK key/value heads x head width.
"""

from __future__ import annotations

import math
from typing import Any

from gpt2jax.convert.format import Format, Source
from gpt2jax.errors import InputError

_ATTENTION, _MLP = "layers.{i}.self_attn.", "layers.{i}.mlp."


def _more(tree: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    components = dict(position="rope", norm="rmsnorm", attention="mha", mlp="swiglu")
    return {**components, **_rope(tree, values["n_positions"])}


def _rope(tree: dict[str, Any], n_positions: Any) -> dict[str, Any]:
    """Rotary settings in either spelling: rope_theta and rope_scaling, or rope_parameters (transformers 5), with the precedence and the defaults of
    transformers' modeling_rope_utils.py. Keys that a kind of scaling does not know are ignored there and here."""
    where = next((key for key in ("rope_scaling", "rope_parameters") if tree.get(key)), "rope_parameters")
    rope = tree.get(where) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise InputError(f"{where}={rope!r} is not supported; it must hold one setting for all layers")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in tuple(_SCALINGS):
        raise InputError(f"{where}: rope_type={kind!r} is not supported; only {', '.join(_SCALINGS)} are")
    if (part := rope.get("partial_rotary_factor", tree.get("partial_rotary_factor"))) not in (None, 1):
        raise InputError(f"partial_rotary_factor={part!r} is not supported: a head turns as a whole")
    if kind == "yarn" and not rope.get("truncate", True):
        raise InputError(f"{where}: truncate={rope['truncate']!r} is not supported; only True is")
    if missing := [key for key in _SCALINGS[kind] if rope.get(key) is None]:
        raise InputError(f"{where}: rope_type={kind!r} needs {missing[0]}")
    values = dict(rope_theta=rope.get("rope_theta", tree.get("rope_theta", 10000.0)))
    if kind == "default" or (rope["factor"] == 1 and rope.get("attention_factor") is None):  # stretched by 1 is as it was
        return values
    values |= dict(rope_scaling=kind) | {_OURS[key]: rope[key] for key in _SCALINGS[kind]}
    if kind == "linear":
        return values
    original = tree.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or n_positions
    values |= dict(rope_original_positions=original)
    if kind == "yarn":
        values |= {_OURS[key]: rope[key] for key in ("beta_fast", "beta_slow") if rope.get(key)}
        values |= {_OURS["attention_factor"]: _attention_factor(rope)}
    return values


def _attention_factor(rope: dict[str, Any]) -> Any:
    """YaRN's, as DeepSeek-V2 writes it: one factor on the queries and keys that turn over another; None leaves the paper's 0.1 ln(factor) + 1."""
    scales: list[Any] = [rope.get(key) for key in ("factor", "mscale", "mscale_all_dim")]
    if rope.get("attention_factor") is not None or not all(isinstance(scale, (int, float)) and scale for scale in scales):
        return rope.get("attention_factor")
    length = lambda scale: 0.1 * scale * math.log(scales[0]) + 1.0 if scales[0] > 1 else 1.0  # noqa: E731
    return length(scales[1]) / length(scales[2])


#: What each kind of scaling must say.
_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OURS = {key: f"rope_{key}" for key in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")}

LLAMA_FORMAT = Format(
    parameters={
        "token_table": Source("embed_tokens.weight", "V D"),
        "head": Source("lm_head.weight", "V D"),
        "blocks.mixer_norm.scale": Source("layers.{i}.input_layernorm.weight", "D"),
        "blocks.mixer.query.w": Source(_ATTENTION + "q_proj.weight", "HK D", turned=True),
        "blocks.mixer.query.b": Source(_ATTENTION + "q_proj.bias", "HK"),
        "blocks.mixer.key_value.w": Source(_ATTENTION + "{part}_proj.weight", "GK D", parts=("k", "v"), turned=True),
        "blocks.mixer.key_value.b": Source(_ATTENTION + "{part}_proj.bias", "GK", parts=("k", "v")),
        "blocks.mixer.out.w": Source(_ATTENTION + "o_proj.weight", "D HK", turned=True),
        "blocks.mixer.out.b": Source(_ATTENTION + "o_proj.bias", "D"),
        "blocks.mlp_norm.scale": Source("layers.{i}.post_attention_layernorm.weight", "D"),
        "blocks.mlp.gate_up.w": Source(_MLP + "{part}_proj.weight", "F D", parts=("gate", "up"), turned=True),
        "blocks.mlp.gate_up.b": Source(_MLP + "{part}_proj.bias", "F", parts=("gate", "up")),
        "blocks.mlp.down.w": Source(_MLP + "down_proj.weight", "D F", turned=True),
        "blocks.mlp.down.b": Source(_MLP + "down_proj.bias", "D"),
        "norm.scale": Source("norm.weight", "D"),
    },
    table="embed_tokens.weight",
    head="lm_head.weight",
    prefix="model.",
    buffers=("layers.{i}.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"),  # of old transformers versions
    defaults=dict(  # LlamaConfig's
        vocab_size=32000,
        n_positions=2048,
        n_layer=32,
        n_head=32,
        n_embd=4096,
        n_inner=11008,
        layer_norm_epsilon=1e-6,
        kv_heads=None,
        head_dim=None,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        initializer_range=0.02,
        attn_pdrop=0.0,
        eos_token_id=2,
    ),
    names=dict(
        n_positions=("max_position_embeddings",),
        n_layer=("num_hidden_layers",),
        n_head=("num_attention_heads",),
        n_embd=("hidden_size",),
        n_inner=("intermediate_size",),
        layer_norm_epsilon=("rms_norm_eps",),
        kv_heads=("num_key_value_heads",),
        attn_pdrop=("attention_dropout",),
        rope_original_positions=("original_max_position_embeddings",),
        **{ours: (theirs,) for theirs, ours in _OURS.items()},
    ),
    switches=dict(hidden_act=("silu", "swish"), pretraining_tp=(1, None)),
    more=_more,
)
