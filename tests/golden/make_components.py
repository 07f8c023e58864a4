"""Makes components.npz: transformers' own answers for each component that can be swapped. Run with torch and transformers: `python make_components.py`.

`CASES` says which of transformers' classes answers which configuration of ours. No two sizes are equal, biases and scales are random, and what feeds a norm is
small enough that its epsilon shows. An array is called case/name: the inputs x (and position), the weights under transformers' names, the answer y, float32.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]

B, T, D, F, H, K = 3, 5, 20, 31, 4, 6
LAST = 1000  # largest position


class Case(NamedTuple):
    """`ours` is laid over ModelConfig's defaults; `theirs` is a class of transformers (Interleaved: see `_interleaved`), `settings` go into its config."""

    theirs: str
    ours: dict[str, Any]
    settings: dict[str, Any]


def _rope(theirs: str, rope_type: str, ours: dict[str, Any] | None = None, width: int = 14, **parameters: Any) -> Case:
    theta = parameters.pop("rope_theta", 10000.0)
    settings = dict(head_dim=width, max_position_embeddings=8192, rope_parameters=dict(rope_type=rope_type, rope_theta=theta, **parameters))
    return Case(theirs, dict(position="rope", rope_theta=theta, head_dim=width, **(ours or {})), settings)


def _attention(theirs: str, ours: dict[str, Any], kv_heads: int = 2, **settings: Any) -> Case:
    theta = 100.0
    ours = dict(position="rope", rope_theta=theta, kv_heads=kv_heads, head_dim=K, attention_bias=False, layer_norm_epsilon=1e-3) | ours
    sizes = dict(num_attention_heads=H, num_key_value_heads=kv_heads, head_dim=K, attention_bias=ours["attention_bias"], rms_norm_eps=1e-3)
    return Case(theirs, ours, sizes | dict(rope_parameters=dict(rope_type="default", rope_theta=theta)) | settings)


def _latent(theirs: str, ours: dict[str, Any], **settings: Any) -> Case:
    """3 heads, which the widths of 7, 4 and 5 and the ranks do not fit."""
    ours = dict(attention="mla", n_head=3, mla_kv_rank=11, mla_nope_dim=7, mla_rope_dim=4, mla_value_dim=5, attention_bias=False, head_dim=6) | ours
    if "position" not in ours:
        ours = dict(position="rope", rope_theta=100.0, rope_layout="interleaved") | ours
        settings = dict(rope_parameters=dict(rope_type="default", rope_theta=100.0)) | settings
    sizes = dict(num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=11, q_lora_rank=ours.get("mla_q_rank"), attention_bias=ours["attention_bias"])
    return Case(theirs, ours, sizes | dict(qk_nope_head_dim=7, qk_rope_head_dim=4, head_dim=4, v_head_dim=5) | settings)


_LLAMA3: dict[str, Any] = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=16.0, original_max_position_embeddings=512)
_OUR_LLAMA3 = dict(rope_scaling="llama3", rope_factor=8.0, rope_original_positions=512, rope_high_freq_factor=16.0)
_YARN: dict[str, Any] = dict(factor=4.0, original_max_position_embeddings=2048)
_OUR_YARN = dict(rope_scaling="yarn", rope_factor=4.0, rope_original_positions=2048)
_YARN_SET = dict(beta_fast=8.0, beta_slow=4.0, attention_factor=1.25)
_OUR_YARN_SET = dict(rope_beta_fast=8.0, rope_beta_slow=4.0, rope_attention_factor=1.25)
# of 4 tokens, so that 5 reach past it; DeepSeek-V2's two factors, here not equal
_MLA_YARN: dict[str, Any] = dict(factor=4.0, original_max_position_embeddings=4, beta_fast=2.0, beta_slow=0.5, mscale=0.707, mscale_all_dim=1.3)
_OUR_MLA_YARN = dict(
    rope_scaling="yarn", rope_factor=4.0, rope_original_positions=4, rope_beta_fast=2.0, rope_beta_slow=0.5, rope_mscale_all_dim=1.3,
    rope_attention_factor=(0.1 * 0.707 * math.log(4.0) + 1) / (0.1 * 1.3 * math.log(4.0) + 1),
)  # fmt: skip

CASES: dict[str, Case] = {
    "rope": _rope("LlamaRotaryEmbedding", "default"),
    "rope theta": _rope("LlamaRotaryEmbedding", "default", width=10, rope_theta=500000.0),
    "rope linear": _rope("LlamaRotaryEmbedding", "linear", dict(rope_scaling="linear", rope_factor=2.5), factor=2.5),
    "rope llama3": _rope("LlamaRotaryEmbedding", "llama3", _OUR_LLAMA3, **_LLAMA3),
    "rope yarn": _rope("LlamaRotaryEmbedding", "yarn", _OUR_YARN, **_YARN),
    "rope yarn set": _rope("LlamaRotaryEmbedding", "yarn", _OUR_YARN | _OUR_YARN_SET, **_YARN, **_YARN_SET),
    "interleaved": _rope("Interleaved", "default", dict(rope_layout="interleaved")),
    "interleaved llama3": _rope("Interleaved", "llama3", _OUR_LLAMA3 | dict(rope_layout="interleaved"), **_LLAMA3),
    "interleaved yarn": _rope("Interleaved", "yarn", _OUR_YARN | dict(rope_layout="interleaved"), **_YARN),
    "rmsnorm": Case("LlamaRMSNorm", dict(norm="rmsnorm", layer_norm_epsilon=1e-3), dict(rms_norm_eps=1e-3)),
    "swiglu": Case("LlamaMLP", dict(mlp="swiglu"), dict()),
    "swiglu bias": Case("LlamaMLP", dict(mlp="swiglu", mlp_bias=True), dict(mlp_bias=True)),
    "geglu": Case("GemmaMLP", dict(mlp="geglu"), dict(hidden_act="gelu_pytorch_tanh")),
    "geglu erf": Case("LlamaMLP", dict(mlp="geglu", activation_function="gelu"), dict(hidden_act="gelu")),
    "mha": _attention("LlamaAttention", dict(attention_bias=True), kv_heads=4),
    "gqa": _attention("LlamaAttention", dict(), kv_heads=2),
    "mqa": _attention("LlamaAttention", dict(), kv_heads=1),
    "qk norm": _attention("Qwen3Attention", dict(qk_norm=True)),
    "window": _attention("Qwen3Attention", dict(qk_norm=True, sliding_window=3), use_sliding_window=True, sliding_window=3, max_window_layers=0),
    # the cap is low, so that it bends scores of this size
    "softcap": _attention("Gemma2Attention", dict(attention_softcap=1.5), attn_logit_softcapping=1.5, query_pre_attn_scalar=K, layer_types=["full_attention"]),
    "sinks": _attention("GptOssAttention", dict(attention_sinks=True, attention_bias=True), layer_types=["full_attention"]),
    "mla": _latent("DeepseekV3Attention", dict()),
    "mla queries": _latent("DeepseekV3Attention", dict(mla_q_rank=9, attention_bias=True)),
    "mla half": _latent("DeepseekV3Attention", dict(rope_layout="half"), rope_interleave=False),
    "mla yarn": _latent("DeepseekV3Attention", _OUR_MLA_YARN, rope_parameters=dict(rope_type="yarn", rope_theta=100.0, **_MLA_YARN)),
    "mla nope": _latent("KimiLinearAttention", dict(position="none", mla_q_rank=9)),
}


def inputs(name: str, seed: int | None = None) -> Arrays:
    """x, position and weights of a case; of those in the file without a seed."""
    draw = np.random.default_rng([list(CASES).index(name)] if seed is None else [seed, list(CASES).index(name)])
    if CASES[name].theirs in ("LlamaRotaryEmbedding", "Interleaved"):
        position = draw.integers(0, LAST, (B, T)).astype(np.int32)
        position[0, :2] = 0, LAST
        return dict(x=draw.standard_normal((B, T, 2, CASES[name].settings["head_dim"])).astype(np.float32), position=position)
    module = _module(name)
    # RMSNorm divides by about 0.03, of which its epsilon is a good part
    arrays = dict(x=(draw.standard_normal((B, T, D)) * (0.03 if name == "rmsnorm" else 1)).astype(np.float32))
    for key, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        values = draw.standard_normal(shape)
        if "norm" in key or name == "rmsnorm":
            values = 1 + 0.3 * values
        elif len(shape) == 2:
            # small keys and queries where they are normalised, so that epsilon shows there too
            values *= (0.1 if hasattr(module, "q_norm") and key[0] in "qk" else 1) / np.sqrt(shape[1])
        if key.startswith(("q_a_proj", "kv_a_proj")):  # latents are normalised too, with an epsilon of 1e-6; the keys behind them are not
            values[: CASES[name].settings["q_lora_rank" if key[0] == "q" else "kv_lora_rank"]] *= 2e-3
        arrays[key] = values.astype(np.float32)
    return arrays


def answer(name: str, arrays: Arrays) -> np.ndarray[Any, Any]:
    """What transformers makes of them: y, of x's shape."""
    import torch

    tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
    with torch.no_grad():
        if "position" in tensors:
            return (_interleaved if CASES[name].theirs == "Interleaved" else _half)(name, tensors["x"], tensors["position"])
        module = _module(name)
        module.load_state_dict({key: value for key, value in tensors.items() if key != "x"})
        if not CASES[name].theirs.endswith("Attention"):
            return module(tensors["x"]).numpy()
        x_BTD, config = tensors["x"], _config(name)
        position_BT = torch.arange(T).expand(B, T)
        from transformers import masking_utils

        sliding = getattr(module, "sliding_window", None) is not None
        make_mask = masking_utils.create_sliding_window_causal_mask if sliding else masking_utils.create_causal_mask
        mask = make_mask(config, x_BTD, torch.ones(B, T, dtype=torch.long), None, position_ids=position_BT)
        if CASES[name].theirs.startswith("Kimi"):
            return module(x_BTD, mask)[0].numpy()
        rotary = getattr(_modeling(name), CASES[name].theirs.replace("Attention", "RotaryEmbedding"))(config)
        return module(x_BTD, rotary(x_BTD, position_BT), mask)[0].numpy()


def _half(name: str, x_BTHK: Any, position_BT: Any) -> np.ndarray[Any, Any]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    return apply_rotary_pos_emb(x_BTHK, x_BTHK, *LlamaRotaryEmbedding(_config(name))(x_BTHK, position_BT), unsqueeze_dim=2)[0].numpy()


def _interleaved(name: str, x_BTHK: Any, position_BT: Any) -> np.ndarray[Any, Any]:
    """Neighbours are the two parts of a complex number, which is multiplied by exp(i angle) (Meta's llama, model.py `apply_rotary_emb`): float32 angles, then
    float64.

    transformers has no class that turns neighbours and leaves them neighbours: its apply_rotary_pos_emb_interleave hands back the other layout. Dot products
    are the same, which is checked.
    """
    import torch
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(_config(name))
    angle_BTJ = (position_BT.float()[..., None] * rotary.inv_freq).double()
    turn_BT1J = rotary.attention_scaling * torch.polar(torch.ones_like(angle_BTJ), angle_BTJ)[:, :, None]
    turned_BTHJ = turn_BT1J * torch.view_as_complex(x_BTHK.double().unflatten(-1, (-1, 2)))
    y_BTHK = torch.view_as_real(turned_BTHJ).flatten(-2)
    theirs_BTHK = apply_rotary_pos_emb_interleave(x_BTHK, x_BTHK, *rotary(x_BTHK, position_BT), unsqueeze_dim=2)[0].double()
    scores = lambda y_BTHK: torch.einsum("bthk,bshk->bhts", y_BTHK, y_BTHK)  # noqa: E731
    assert (scores(y_BTHK) - scores(theirs_BTHK)).abs().max() < 1e-4
    return y_BTHK.float().numpy()


def _config(name: str) -> Any:
    import transformers

    families = ("Llama", "Gemma2", "Gemma", "Qwen3", "GptOss", "DeepseekV3", "KimiLinear")
    family = next((family for family in families if CASES[name].theirs.startswith(family)), "Llama")
    sizes = dict(hidden_size=D, intermediate_size=F, num_attention_heads=H, num_hidden_layers=1, head_dim=K, attn_implementation="eager")
    return getattr(transformers, f"{family}Config")(**sizes | CASES[name].settings)


def _modeling(name: str) -> Any:
    import importlib

    model_type = _config(name).model_type
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def _module(name: str) -> Any:
    kind = getattr(_modeling(name), CASES[name].theirs)
    if name == "rmsnorm":
        return kind(D, CASES[name].settings["rms_norm_eps"])
    return kind(_config(name), layer_idx=0).eval() if CASES[name].theirs.endswith("Attention") else kind(_config(name)).eval()


def main() -> None:
    arrays = {}
    for name in CASES:
        given = inputs(name)
        arrays |= {f"{name}/{key}": value for key, value in {**given, "y": answer(name, given)}.items()}
    np.savez_compressed(Path(__file__).with_name("components.npz"), **arrays)


if __name__ == "__main__":
    main()
