"""The inventory against the model itself, hand formulas, and what a compiled forward multiplies. Letters: B batch, T tokens, S cache slots."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpt2jax.analysis import inventory as module
from gpt2jax.analysis.inventory import CACHE_BYTES, take_inventory
from gpt2jax.cli import main
from gpt2jax.config import ModelConfig, load_config
from gpt2jax.decoding.weights import prepare
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import parameter_count
from gpt2jax.model.parameters import abstract_model

CONFIGS = Path(__file__).parent.parent / "configs"
VARIANTS = sorted((CONFIGS / "variants").glob("*.yaml"))
#: A Llama in small: no two sizes alike.
LLAMA: dict[str, Any] = dict(
    vocab_size=96, vocab_multiple=1, n_positions=22, n_layer=3, n_head=6, kv_heads=2, head_dim=10, n_embd=24, n_inner=28, position="rope", norm="rmsnorm",
    mlp="swiglu", attention_bias=False, tie_word_embeddings=False,
)  # fmt: skip
MOE: dict[str, Any] = dict(mlp="moe", moe_experts=5, moe_top_k=3, moe_shared=2, moe_router="sigmoid", moe_bias_rate=0.0)
#: Latent attention in its place.
MLA: dict[str, Any] = dict(attention="mla", kv_heads=None, mla_kv_rank=17, mla_nope_dim=5, mla_rope_dim=4, mla_value_dim=7)


def test_gpt2_has_the_published_numbers() -> None:
    inventory = take_inventory(ModelConfig.preset("gpt2"))
    d = 768
    by_part = {entry.part: entry.total for entry in inventory.parameters}
    assert by_part["token table"] == 38_597_376 and by_part["position table"] == 786_432 and by_part["final norm"] == 1_536
    assert sum(total for part, total in by_part.items() if part.startswith("block")) == 12 * (12 * d * d + 13 * d)
    assert inventory.parameter_count == 124_439_808
    # 6 N + 12 L H K T of PaLM (arXiv:2204.02311, appendix B), N without the position table, norms and biases
    N = 12 * 12 * d * d + 50257 * d
    assert inventory.as_dict()["training_flops_per_token"] == 6 * N + 12 * 12 * 12 * 64 * 1024
    assert inventory.cache_bytes == {"float32": 2 * 12 * 768 * 4, "bfloat16": 2 * 12 * 768 * 2, "int8": 2 * 12 * (768 + 12 * 4)}


@pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)
def test_every_variant_names_one_line_and_is_counted(path: Path) -> None:
    assert len(path.read_text().strip().splitlines()) == 2, "the section and one line"
    base, config = load_config(CONFIGS / "gpt2-124m.yaml"), load_config([CONFIGS / "gpt2-124m.yaml", path])
    assert config != base
    assert take_inventory(config.model).parameter_count == parameter_count(abstract_model(config.model))


def _multiplications(jaxpr: Any) -> int:
    """Multiply-adds of all products of a program, a loop's as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            total += math.prod(equation.outvars[0].aval.shape) * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        if equation.primitive.name == "ragged_dot_general":  # each row meets its own expert
            total += math.prod(equation.outvars[0].aval.shape) * equation.invars[0].aval.shape[-1]
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        inner = [part for part in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr) if _is_jaxpr(part)]
        total += times * sum(_multiplications(getattr(part, "jaxpr", part)) for part in inner)
    return total


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.parametrize(
    "change",
    [
        {}, dict(mlp="geglu", attention_sinks=True), dict(position="learned", norm="layernorm", mlp="gelu", kv_heads=1), MLA, MOE, MLA | MOE,
        MLA | dict(mla_q_rank=13, attention_bias=True, attention_sinks=True),
    ],
    ids=str,
)  # fmt: skip
def test_flops_are_the_products_of_the_forward(change: dict[str, Any]) -> None:
    config = ModelConfig(**{**LLAMA, **change, "attention_backend": "xla"})
    program = jax.make_jaxpr(lambda model, tokens: model(tokens))(abstract_model(config), jnp.zeros((5, 22), jnp.int32))
    assert 2 * _multiplications(program.jaxpr) == 5 * 22 * take_inventory(config).forward_flops


def test_experts_count_as_held_and_as_used() -> None:
    inventory = take_inventory(ModelConfig(**{**LLAMA, **MOE}))
    unused = 3 * (5 - 3) * 3 * 24 * 28
    assert inventory.parameter_count == parameter_count(abstract_model(inventory.config))
    assert inventory.as_dict()["active_parameter_count"] == inventory.parameter_count - unused
    assert take_inventory(ModelConfig(**LLAMA)).active_parameter_count == take_inventory(ModelConfig(**LLAMA)).parameter_count


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("change", "widths"), [({}, 10 + 10), (MLA, 5 + 4 + 7)])
def test_causal_flops_count_what_is_seen(window: int | None, change: dict[str, Any], widths: int) -> None:
    inventory = take_inventory(ModelConfig(**{**LLAMA, **change}, sliding_window=window))
    seen = sum(min(t + 1, window or 22) for t in range(22)) / 22
    products = inventory.forward_flops - 3 * 2 * 6 * widths * (window or 22)
    assert inventory.causal_forward_flops == pytest.approx(products + 3 * 2 * 6 * widths * seen, abs=3)


@pytest.mark.parametrize("dtype", CACHE_BYTES)
@pytest.mark.parametrize("change", [{}, dict(kv_heads=None), dict(kv_heads=1, position="learned"), MLA], ids=str)
def test_cache_bytes_are_those_of_the_decode_state(dtype: str, change: dict[str, Any]) -> None:
    config = ModelConfig(**{**LLAMA, **change})
    model = jax.eval_shape(lambda model: prepare(model, turned=False, cache_dtype=dtype), abstract_model(config))
    _, state = jax.eval_shape(lambda model: model.prefill(jnp.zeros((3, 6), jnp.int32), jnp.full(3, 6), slots=16, recent=4), model)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.frozen))
    assert size == 3 * 16 * take_inventory(config).cache_bytes[dtype]
    if change is MLA and dtype != "int8":
        assert size == 3 * 16 * config.n_layer * (17 + 4) * CACHE_BYTES[dtype], "exactly the latent and the shared key"


def test_a_formula_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = module._parameters(ModelConfig(**LLAMA))
    monkeypatch.setattr(module, "_parameters", lambda config: [(part, "2*d" if part == "final norm" else formula) for part, formula in parts])
    with pytest.raises(InputError, match="final norm has 24 parameters in the model, 48 by its formula"):
        take_inventory(ModelConfig(**LLAMA))
    monkeypatch.setattr(module, "_parameters", lambda config: parts)
    monkeypatch.setitem(module._PREFIXES, "block: mlp", "blocks.mlp.down.")
    with pytest.raises(InputError, match="mlp"):
        take_inventory(ModelConfig(**LLAMA))


def test_the_command_prints_tables_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = str(CONFIGS / "gpt2-124m.yaml")
    assert main(["inspect", config, str(CONFIGS / "variants" / "gqa.yaml"), "--model.kv_heads=3"]) == 0
    text = capsys.readouterr().out
    assert "G=3" in text and "2·L·G·(K·4)" in text and f"{2 * 12 * 3 * 64 * 4:,}" in text
    assert main(["inspect", config, str(CONFIGS / "variants" / "mla.yaml")]) == 0
    text = capsys.readouterr().out
    assert "r=256 q=0 n=64 p=32 v=64" in text and "L·((r + p)·4)" in text and f"{12 * 288 * 4:,}" in text
    assert main(["inspect", config, "--json", "--context", "512"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parameter_count"] == 124_439_808 and report["cache_bytes_at_context"]["float32"] == 512 * 73_728
    for words in ([config, "--context", "4096"], [str(tmp_path)], [str(tmp_path), config], [config, "--model.kv_heads=5"]):
        assert main(["inspect", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.torch
def test_a_llama_is_counted_as_transformers_counts_it() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    sizes = dict(vocab_size=96, hidden_size=24, intermediate_size=28, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=10)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, max_position_embeddings=22, tie_word_embeddings=False))
    assert take_inventory(ModelConfig(**LLAMA)).parameter_count == int(np.sum([p.numel() for p in theirs.parameters()]))
