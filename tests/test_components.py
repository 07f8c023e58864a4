"""Every pair of component choices: the invariants that hold whatever a block is made of.

Letters: B rows, T tokens, L layers, H heads, G key/value heads, K head width.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import tiny

from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import map_named, named_parameters
from gpt2jax.training.objective import mean_loss

ROOT = Path(__file__).parent.parent
YARN = dict(position="rope", rope_layout="interleaved", rope_scaling="yarn", rope_factor=4.0, rope_original_positions=8)
MOE = dict(mlp="moe", moe_experts=5, moe_top_k=2, moe_shared=1, moe_router="sigmoid", moe_bias_rate=0.0)
#: Each choice as what it sets, the baseline first. Two prompts of 13 tokens reach past the window, and 4 heads can be spread over 4 devices.
FACTORS: dict[str, list[dict[str, Any]]] = {
    "position": [{}, dict(position="rope"), YARN, dict(position="none")],
    "norm": [{}, dict(norm="rmsnorm")],
    "mlp": [{}, dict(mlp="swiglu"), dict(mlp="geglu", mlp_bias=True), MOE],
    "kv_heads": [{}, dict(kv_heads=2), dict(kv_heads=1)],
    "qk_norm": [{}, dict(qk_norm=True)],
    "window": [{}, dict(sliding_window=5)],
    "softcap": [{}, dict(attention_softcap=2.0)],
    "sinks": [{}, dict(attention_sinks=True)],
    "head": [{}, dict(tie_word_embeddings=False)],
    "bias": [{}, dict(attention_bias=False)],
    "backend": [dict(attention_backend="xla"), dict(attention_backend="flash")],
    "width": [{}, dict(head_dim=8)],
}
#: Latent attention with each choice that goes with it; no two widths are equal.
MLA: dict[str, Any] = dict(attention="mla", mla_kv_rank=10, mla_nope_dim=5, mla_rope_dim=4, mla_value_dim=3)
MLA_ROWS: list[dict[str, Any]] = [
    MLA | dict(attention_softcap=2.0, attention_backend="xla"),
    MLA | dict(position="rope", mla_q_rank=7, attention_sinks=True, attention_backend="flash"),
    MLA | YARN | dict(rope_mscale_all_dim=1.0, mla_q_rank=7, sliding_window=5, attention_bias=False, attention_backend="xla"),
    MLA | dict(position="none", sliding_window=5, attention_sinks=True, attention_backend="flash"),
]
SIZES = dict(n_head=4, n_embd=24, n_positions=32)


def _pairwise() -> list[dict[str, Any]]:
    """Greedily, rows in which every two choices of two factors stand together in one at least."""
    names = list(FACTORS)
    choices = [(i, j) for i, name in enumerate(names) for j in range(len(FACTORS[name]))]
    open_pairs = {frozenset(pair) for pair in itertools.combinations(choices, 2) if pair[0][0] != pair[1][0]}
    rows = []
    while open_pairs:
        row: dict[int, int] = dict(sorted(min(open_pairs, key=sorted)))  # the first pair that is open, then what closes most
        for i, name in enumerate(names):
            if i not in row:
                gain = [sum(frozenset({(i, j), other}) in open_pairs for other in row.items()) for j in range(len(FACTORS[name]))]
                row[i] = int(np.argmax(gain))
        open_pairs -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append({key: value for i, j in sorted(row.items()) for key, value in FACTORS[names[i]][j].items()})
    return rows


PLAIN_ROWS = _pairwise()
ROWS = PLAIN_ROWS + MLA_ROWS


def _name(row: dict[str, Any]) -> str:
    return "-".join(str(value) if isinstance(value, str) else key for key, value in row.items() if key not in ("rope_layout", *list(MLA)[1:]))


def _tokens(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).integers(0, 257, shape), jnp.int32)


def _close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * float(np.abs(want).max()))


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_prefill_and_cached_steps_are_the_full_forward_in_one_program(row: dict[str, Any]) -> None:
    """Rows of 1 and 6 tokens, then 7 more one by one: each step's logits are those of the uncached forward, whatever stands in the other row."""
    model = tiny(**SIZES, **row)
    tokens_BT = _tokens(2, 13)
    want_BTV = model(tokens_BT)
    prefill = jax.jit(functools.partial(GPT2.prefill, slots=8, recent=4))
    step, commit = jax.jit(lambda *args: GPT2.step(*args)), jax.jit(GPT2.commit)  # a lambda has a cache of its own
    grow = jax.jit(GPT2.grow, static_argnums=2)
    length_B = np.array([1, 6])
    hidden_BD, state = prefill(model.unstack(), jnp.where(jnp.arange(6) < length_B[:, None], tokens_BT[:, :6], 0), length_B)
    state = grow(model.unstack(), state, 16)
    logits = lambda hidden: np.asarray(model.padded_logits(hidden)[..., :257])  # noqa: E731
    for i in range(7):
        _close(logits(hidden_BD), [want_BTV[b, length_B[b] - 1 + i] for b in range(2)])
        if i == 4:
            state = commit(model.unstack(), state)
        before = jax.tree.map(jnp.shape, state)
        hidden_B1D, state = step(model.unstack(), jnp.stack([tokens_BT[b, length_B[b] + i] for b in range(2)])[:, None], state)
        assert jax.tree.map(jnp.shape, state) == before
        hidden_BD = hidden_B1D[:, 0]
    assert step._cache_size() == 1, "no step compiles again"


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_padding_and_packing_change_nothing(row: dict[str, Any]) -> None:
    """One batch: a text padded on the left, on the right, and two texts packed into a row; logits are those of the texts alone, and so is every third
    row's gradient."""
    model = tiny(**SIZES, **row)
    a, b = _tokens(8), _tokens(5)
    junk = jnp.full((5,), 7, jnp.int32)
    tokens_BT = jnp.stack([jnp.concatenate(parts) for parts in ((junk, a), (a, junk), (a, b), (b, a))])
    segment_BT = jnp.array([[-1] * 5 + [0] * 8, [0] * 8 + [-1] * 5, [3] * 8 + [1] * 5, [0] * 5 + [1] * 8])
    alone, got = model(jnp.stack([jnp.concatenate((a, junk)), jnp.concatenate((b, b, b[:3]))])), model(tokens_BT, segment_BT=segment_BT)
    for i, start in enumerate((5, 0, 0, 5)):
        _close(got[i, start : start + 8], alone[0, :8])
    _close(got[2, 8:], alone[1, :5])
    _close(got[3, :5], alone[1, :5])
    if row not in ROWS[::3]:
        return
    masked = model(tokens_BT[:2], mask_BT=segment_BT[:2] >= 0)  # masks say the same as negative segments
    _close(masked[0, 5:], got[0, 5:])
    _close(masked[1, :8], got[1, :8])

    def loss_of_a(model: GPT2, segment_BT: jax.Array | None, rows: tuple[int, ...], starts: tuple[int, ...]) -> jax.Array:
        hidden_BTD = model.hidden(tokens_BT[np.array(rows)], segment_BT=segment_BT)
        return sum((jnp.sin(hidden_BTD[i, start : start + 8]).sum() for i, start in enumerate(starts)), jnp.float32(0)) / len(starts)

    want = jax.jit(jax.grad(loss_of_a), static_argnums=(2, 3))(model, None, (1,), (0,))
    padded = jax.jit(jax.grad(loss_of_a), static_argnums=(2, 3))(model, segment_BT, (0, 1, 2, 3), (5, 0, 0, 5))
    for name, leaf in named_parameters(want).items():
        _close(named_parameters(padded)[name], leaf, 1e-4)


@pytest.mark.parametrize("row", ROWS[::3], ids=_name)
@pytest.mark.parametrize("remat", ["block", "dots", "attention", "offload"])
def test_remat_changes_no_gradient(row: dict[str, Any], remat: str) -> None:
    """With dropout on: the second run of a block draws the masks of the first. (Flash has no dropout on attention weights.)"""
    dropout = dict(resid_pdrop=0.2, attn_pdrop=0.0 if row["attention_backend"] == "flash" else 0.3)
    model, tokens_BT = tiny(**SIZES, **row, **dropout), _tokens(3, 14)

    def gradient(remat: str) -> Any:
        def loss(model: GPT2) -> jax.Array:
            return mean_loss(model, tokens_BT[:, :-1], tokens_BT[:, 1:], jax.random.key(5), remat)[0]

        assert str(jax.make_jaxpr(jax.grad(loss))(model)).count("remat") == 0 if remat == "none" else True
        return jax.jit(jax.grad(loss))(model)

    for (name, want), got in zip(named_parameters(gradient("none")).items(), named_parameters(gradient(remat)).values(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * float(jnp.abs(want).max()), err_msg=name)


#: What of a model a choice may change, by what parameters' names contain; nothing for the rest.
OWN = {
    "position": ("position.",), "norm": ("norm.",), "mlp": (".mlp.",), "kv_heads": ("key_value",), "qk_norm": ("query_norm", "key_norm"), "sinks": ("sinks",),
    "head": ("head",), "bias": ("mixer.query.b", "mixer.key_value.b", "mixer.out.b"), "width": (".mixer.",), "attention": (".mixer.",),
}  # fmt: skip


#: Latent attention with learned positions, and without what has a choice of its own.
SWAPS = {**FACTORS, "attention": [dict(attention="mla"), MLA | dict(mla_q_rank=7, attention_bias=False)]}


@pytest.mark.parametrize(("factor", "change"), [(name, change) for name, changes in SWAPS.items() for change in changes if change], ids=str)
def test_swapping_one_component_leaves_the_rest_as_it_was(factor: str, change: dict[str, Any]) -> None:
    from gpt2jax.config import ModelConfig

    sizes = dict(vocab_size=31, n_layer=2, vocab_multiple=8, **SIZES)
    before, after = (named_parameters(GPT2(ModelConfig(**{**sizes, **part}), jax.random.key(7))) for part in ({}, change))  # type: ignore[arg-type]
    kept = lambda name: not any(part in name for part in OWN.get(factor, ()))  # noqa: E731
    assert {name for name in before if kept(name)} == {name for name in after if kept(name)}
    for name in filter(kept, before):
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    assert before.keys() != after.keys() or factor in ("kv_heads", "width", "window", "softcap", "backend") or change == dict(mlp="geglu", mlp_bias=True)


def test_as_many_key_heads_as_heads_is_multi_head_attention_to_the_bit() -> None:
    tokens_BT = _tokens(2, 9)
    np.testing.assert_array_equal(tiny(**SIZES)(tokens_BT), tiny(**SIZES, kv_heads=4)(tokens_BT))


def test_grouped_heads_are_repeated_heads() -> None:
    """Query heads 0 and 1 read key head 0, 2 and 3 read key head 1."""
    grouped, plain = tiny(**SIZES, kv_heads=2, position="rope"), tiny(**SIZES, position="rope")
    given = named_parameters(grouped)

    def repeat(name: str, _: jax.Array) -> jax.Array:
        axis = {"blocks.mixer.key_value.w": 3, "blocks.mixer.key_value.b": 2}.get(name)
        return given[name] if axis is None else jnp.repeat(given[name], 2, axis)

    tokens_BT = _tokens(2, 9)
    _close(grouped(tokens_BT), map_named(repeat, plain)(tokens_BT))


def test_rope_and_no_positions_have_no_end() -> None:
    """Decoding goes on past n_positions where no table of positions ends, and equals the uncached forward there."""
    from gpt2jax.decoding.generate import generate
    from gpt2jax.decoding.score import score

    model = tiny(position="rope", n_positions=16)
    [result] = generate(model, [list(range(14))], max_new_tokens=9, temperature=0, eos_token_id=None)
    tokens = [*range(14), *result.tokens]
    assert model(jnp.asarray([tokens]))[0, 13:-1].argmax(-1).tolist() == result.tokens
    assert score(model, [tokens])[0].tokens[-1] == tokens[-1]
    [forced] = generate(model, [[1, 2, 3]], max_new_tokens=40, temperature=0, forced_tokens={-1: 5, 30: 6}, eos_token_id=None)
    assert (forced.tokens[-1], forced.tokens[30]) == (5, 6)
    with pytest.raises(ValueError, match="n_positions=16"):
        tiny(n_positions=16)(jnp.asarray([tokens]))


#: A Llama, and what Gemma 2, Qwen 3 and gpt-oss added; 3 heads and 24 positions as in `tiny_options`.
LLAMA = ["position=rope", "norm=rmsnorm", "mlp=swiglu", "kv_heads=1", "attention_bias=false", "tie_word_embeddings=false"]
DEEPSEEK = ["position=rope", "norm=rmsnorm", "mlp=swiglu", "attention=mla", "mla_q_rank=7", "attention_bias=true", "rope_layout=interleaved"]
OTHERS = ["position=none", "mlp=geglu", "qk_norm=true", "sliding_window=7", "attention_softcap=3.0", "attention_sinks=true", "attention_backend=flash"]


@pytest.mark.parametrize(
    ("choices", "optimizer"), [([*LLAMA, "rope_theta=500.0"], "adamw"), (OTHERS, "muon"), (DEEPSEEK, "muon")], ids=["llama", "others", "mla"]
)
def test_variants_train_are_saved_and_decode(choices: list[str], optimizer: str, tiny_options: list[str], tmp_path: Path) -> None:
    """Through the same loop, checkpoint and decode loop as the baseline; the loss falls, every parameter moves, and int8 weights decode as they compute."""
    from gpt2jax.config import load_config
    from gpt2jax.decoding.generate import generate
    from gpt2jax.decoding.weights import quantize
    from gpt2jax.loading import load
    from gpt2jax.training.loop import train
    from gpt2jax.training.metrics import read_metrics
    from gpt2jax.training.step import init_parameters

    heads = "--model.n_embd=24" if "position=rope" in choices else "--model.n_head=3"  # rotated heads are even
    config = load_config(None, [*tiny_options, heads, *(f"--model.{choice}" for choice in choices), f"--optimizer.name={optimizer}", "--train.remat=dots"])
    assert train(config) == 0
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < losses[0] - 0.05
    model, _ = load(tmp_path / "run")
    assert model.config.attention_backend == "auto", "another machine may have no such schedule"
    before = init_parameters(config.model, jax.random.key(config.train.seed))
    for name, leaf in named_parameters(model).items():
        assert not np.array_equal(leaf, before[name]), f"{name} does not learn"
    for decoded in (model, quantize(model, "int8")):
        [result] = generate(decoded, [[5, 9, 14]], max_new_tokens=6, temperature=0, eos_token_id=None)
        logits_BTV = decoded(jnp.asarray([[5, 9, 14, *result.tokens]]))
        for i, token in enumerate(result.tokens):
            assert float(logits_BTV[0, 2 + i, token]) >= float(logits_BTV[0, 2 + i].max()) - 1e-5


#: Runs on 8 devices: 4 heads over tensor = 4, where 1 or 2 key/value heads lie whole.
SPREAD = """
import jax, numpy as np
from decoding_helpers import prompt, tiny
from test_components import PLAIN_ROWS, ROWS, SIZES, _tokens
from gpt2jax.decoding.generate import generate
from gpt2jax.model.parameters import named_parameters
from gpt2jax.parallel.mesh import shard
from gpt2jax.training.objective import mean_loss

def run(model, tokens_BT):
    return jax.jit(jax.value_and_grad(lambda model: mean_loss(model, tokens_BT[:, :-1], tokens_BT[:, 1:])[0]))(model)

for i, row in enumerate(ROWS):
    model = tiny(**SIZES, **row)
    spread = shard(model, data=2, tensor=4)
    assert spread.blocks.mixer.query.w.addressable_shards[0].data.shape[2] == 1
    if row in PLAIN_ROWS:
        assert spread.blocks.mixer.key_value.w.addressable_shards[0].data.shape[3] == (1 if row.get("kv_heads") is None else row["kv_heads"])
    else:  # heads are spread, the latent lies whole
        assert [getattr(spread.blocks.mixer, name).w.addressable_shards[0].data.shape for name in ("key_up", "latent")] == [(2, 10, 1, 5), (2, 24, 14)]
    (loss, gradient), (spread_loss, spread_gradient) = run(model, _tokens(4, 14)), run(spread, _tokens(4, 14))
    np.testing.assert_allclose(spread_loss, loss, rtol=1e-5)
    for (name, want), got in zip(named_parameters(gradient).items(), named_parameters(spread_gradient).values()):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=3e-5 * float(abs(want).max()), err_msg=f"{row} {name}")
    if i in (1, 4, 7, len(PLAIN_ROWS) + 1):  # two key heads, one, and all; latents
        rows = [prompt(1), prompt(7), prompt(12), prompt(3)]
        one, many = (generate(m, rows, max_new_tokens=12, temperature=0, eos_token_id=None) for m in (model, spread))
        assert [x.tokens for x in one] == [x.tokens for x in many], row
"""


@pytest.mark.slow
def test_one_device_and_eight_agree_on_every_row() -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    result = subprocess.run([sys.executable, "-c", SPREAD], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
