"""transformers' `GPT2LMHeadModel` and `GPT2Model`.

The names and shapes are those of transformers' models/gpt2/modeling_gpt2.py, whose `Conv1D` keeps weights as [in, out]. Its fused c_attn has the columns
query, key, value, each of them heads x head width.

Letters: V vocabulary, C context, D width, F inner width of the MLP.
"""

from __future__ import annotations

from gpt2jax.convert.format import Format, Source

GPT2_FORMAT = Format(
    parameters={
        "token_table": Source("wte.weight", "V D"),
        "head": Source("lm_head.weight", "V D"),
        "position.table": Source("wpe.weight", "C D"),
        "blocks.mixer_norm.scale": Source("h.{i}.ln_1.weight", "D"),
        "blocks.mixer_norm.bias": Source("h.{i}.ln_1.bias", "D"),
        "blocks.mixer.query.w": Source("h.{i}.attn.c_attn.weight", "D 3D", columns=(0, 1)),
        "blocks.mixer.query.b": Source("h.{i}.attn.c_attn.bias", "3D", columns=(0, 1)),
        "blocks.mixer.key_value.w": Source("h.{i}.attn.c_attn.weight", "D 3D", columns=(1, 3)),
        "blocks.mixer.key_value.b": Source("h.{i}.attn.c_attn.bias", "3D", columns=(1, 3)),
        "blocks.mixer.out.w": Source("h.{i}.attn.c_proj.weight", "D D"),
        "blocks.mixer.out.b": Source("h.{i}.attn.c_proj.bias", "D"),
        "blocks.mlp_norm.scale": Source("h.{i}.ln_2.weight", "D"),
        "blocks.mlp_norm.bias": Source("h.{i}.ln_2.bias", "D"),
        "blocks.mlp.up.w": Source("h.{i}.mlp.c_fc.weight", "D F"),
        "blocks.mlp.up.b": Source("h.{i}.mlp.c_fc.bias", "F"),
        "blocks.mlp.down.w": Source("h.{i}.mlp.c_proj.weight", "F D"),
        "blocks.mlp.down.b": Source("h.{i}.mlp.c_proj.bias", "D"),
        "norm.scale": Source("ln_f.weight", "D"),
        "norm.bias": Source("ln_f.bias", "D"),
    },
    table="wte.weight",
    head="lm_head.weight",
    prefix="transformer.",
    buffers=("h.{i}.attn.bias", "h.{i}.attn.masked_bias"),  # causal masks of old transformers versions
    defaults=dict(  # GPT2Config's
        vocab_size=50257,
        n_positions=1024,
        n_layer=12,
        n_head=12,
        n_embd=768,
        n_inner=None,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        initializer_range=0.02,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        resid_pdrop=0.1,
        eos_token_id=50256,
        tie_word_embeddings=True,
    ),
    names=dict(  # GPT2Config.attribute_map, and n_ctx of 2019
        n_positions=("n_positions", "max_position_embeddings", "n_ctx"),
        n_embd=("n_embd", "hidden_size"),
        n_layer=("n_layer", "num_hidden_layers"),
        n_head=("n_head", "num_attention_heads"),
    ),
    switches=dict(
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False, None),
        reorder_and_upcast_attn=(False, None),
        add_cross_attention=(False, None),
    ),
    more=lambda tree, values: dict(position_initializer_range=values["initializer_range"]),
)
