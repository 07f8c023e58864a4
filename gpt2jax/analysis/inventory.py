"""The explicit inventory of a configuration: parameters by part, FLOPs a token, bytes of the decode cache, each from a formula.

Letters: V vocabulary, C rows of the position table, T context, L layers, d width, H heads, G key/value heads, K head width, f inner width of the MLP or of
an expert, A tokens that a token sees; E experts, of which a token uses N, and S that all tokens share; of latent attention r rank of keys and values, q of
queries, n, p and v widths of what never turns, what turns, and values.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from gpt2jax.config import ModelConfig
from gpt2jax.errors import InputError
from gpt2jax.model.parameters import abstract_model, named_parameters

#: Bytes of a number of the cache; int8 keeps a float32 scale a head beside it.
CACHE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


class Entry(NamedTuple):
    """One line: a part, its formula, its value, and how many of it there are."""

    part: str
    formula: str
    each: int
    times: int = 1

    @property
    def total(self) -> int:
        return self.each * self.times


@dataclasses.dataclass(frozen=True)
class Inventory:
    """What a configuration says before anything is made.

    parameters: numbers by part, without rows that pad the tables. flops: forward, a token, of the matrix products (2 a multiply-add), every token counted as
    seeing the whole context; causal_attention_flops: attention's two products with what a token really sees on average. cache_bytes: a token of one row, by the
    dtype that keys and values are kept in. context: the T of all this.
    """

    config: ModelConfig
    context: int
    parameters: tuple[Entry, ...]
    flops: tuple[Entry, ...]
    causal_attention_flops: int
    cache_bytes: dict[str, int]

    @property
    def parameter_count(self) -> int:
        return sum(entry.total for entry in self.parameters)

    @property
    def non_embedding_count(self) -> int:
        """Without the tables: of tokens, positions and the head."""
        return sum(entry.total for entry in self.parameters if not entry.part.endswith("table"))

    @property
    def active_parameter_count(self) -> int:
        """Without the experts that a token does not use."""
        c = self.config
        return self.parameter_count - (c.n_layer * (c.moe_experts - c.moe_top_k) * 3 * c.n_embd * c.mlp_width if c.mlp == "moe" else 0)

    @property
    def forward_flops(self) -> int:
        return sum(entry.total for entry in self.flops)

    @property
    def causal_forward_flops(self) -> int:
        """With attention as causal order, and a window, leave it on average."""
        attention = next(entry.total for entry in self.flops if entry.part == "attention scores and sums")
        return self.forward_flops - attention + self.causal_attention_flops

    def as_dict(self) -> dict[str, Any]:
        """What `gpt2jax inspect --json` prints."""
        lines = lambda entries: [{**entry._asdict(), "total": entry.total} for entry in entries]  # noqa: E731
        return {
            "parameters": lines(self.parameters),
            "parameter_count": self.parameter_count,
            "active_parameter_count": self.active_parameter_count,
            "non_embedding_count": self.non_embedding_count,
            "context": self.context,
            "flops_per_token": lines(self.flops),
            "forward_flops_per_token": self.forward_flops,
            "training_flops_per_token": 3 * self.forward_flops,
            "causal_forward_flops_per_token": self.causal_forward_flops,
            "causal_training_flops_per_token": 3 * self.causal_forward_flops,
            "cache_bytes_per_token": self.cache_bytes,
            "cache_bytes_at_context": {dtype: size * self.context for dtype, size in self.cache_bytes.items()},
        }


def take_inventory(config: ModelConfig, context: int | None = None) -> Inventory:
    """The inventory at `context` tokens (default: n_positions). InputError if they do not fit, or if the model's tree has other counts than the formulas."""
    T = config.n_positions if context is None else context
    if T < 1 or (config.context is not None and T > config.context):
        raise InputError(f"context={T} must be 1 or more, and with a table of positions at most model.n_positions={config.n_positions}")
    letters = dict(V=config.vocab_size, C=config.n_positions, L=config.n_layer, d=config.n_embd, H=config.n_head, G=config.kv_head_count)
    letters |= dict(K=config.head_width, f=config.mlp_width, A=min(T, config.sliding_window or T)) | _latent_letters(config)
    letters |= dict(E=config.moe_experts, N=config.moe_top_k, S=config.moe_shared) if config.mlp == "moe" else {}
    entry = lambda part, formula, times=1: Entry(part, formula.replace("*", "·"), eval(formula, {"__builtins__": {}}, letters), times)  # noqa: E731
    L = config.n_layer
    parameters = [entry(part, formula, L if part.startswith("block") else 1) for part, formula in _parameters(config)]
    _check(config, parameters)
    matrices = {"gelu": "2*d*f", "moe": "(d*E + (N + S)*3*d*f)"}.get(config.mlp, "3*d*f")
    flops = [
        entry("attention projections", f"2*({_projections(config)})", L),
        entry("attention scores and sums", "2*H*(n + p + v)*A" if config.attention == "mla" else "4*H*K*A", L),
        entry("mlp", f"2*{matrices}", L),
        entry("logits", "2*V*d"),
    ]
    window = letters["A"]
    seen = (window * (window + 1) // 2 + (T - window) * window) / T  # the mean of min(t, window) over t = 1..T
    causal = round(2 * config.n_head * (config.key_width + config.value_width) * seen) * L
    cache = {dtype: entry("cache", _cache(config, dtype)).each for dtype in CACHE_BYTES}
    return Inventory(config, T, tuple(parameters), tuple(flops), causal, cache)


def _latent_letters(config: ModelConfig) -> dict[str, int]:
    if config.attention != "mla":
        return {}
    return dict(r=config.kv_rank, q=config.mla_q_rank or 0, n=config.nope_dim, p=config.rope_dim, v=config.value_width)


def _projections(config: ModelConfig) -> str:
    """Weights of attention's matrices."""
    if config.attention != "mla":
        return "d*H*K + 2*d*G*K + H*K*d"
    return ("d*q + q*H*(n + p)" if config.mla_q_rank else "d*H*(n + p)") + " + d*(r + p) + r*H*(n + v) + H*v*d"


def _cache(config: ModelConfig, dtype: str) -> str:
    """Bytes of a token, all layers."""
    size, scale = CACHE_BYTES[dtype], " + 4" if dtype == "int8" else ""
    return f"L*((r + p)*{size}{' + 8' if scale else ''})" if config.attention == "mla" else f"2*L*G*(K*{size}{scale})"


def _parameters(config: ModelConfig) -> list[tuple[str, str]]:
    """Each part and its formula, in the order of the forward pass."""
    norm = {"layernorm": "2*d", "rmsnorm": "d"}[config.norm]
    if config.attention == "mla":
        vectors = " + r" + " + q" * bool(config.mla_q_rank) + (" + r + p + d" + " + q" * bool(config.mla_q_rank)) * config.attention_bias
    else:
        vectors = " + H*K + 2*G*K + d" * config.attention_bias + " + 2*K" * config.qk_norm
    attention = _projections(config) + vectors + " + H" * config.attention_sinks
    if config.mlp == "gelu":
        mlp = "2*d*f" + " + f + d" * (config.mlp_bias is not False)
    elif config.mlp == "moe":
        mlp = "d*E + (E + S)*3*d*f" + " + E" * (config.moe_bias_rate is not None)
    else:
        mlp = "3*d*f" + " + 2*f + d" * (config.mlp_bias is True)
    parts = [("token table", "V*d")] + [("position table", "C*d")] * (config.position == "learned")
    parts += [("block: attention norm", norm), ("block: attention", attention), ("block: mlp norm", norm), ("block: mlp", mlp)]
    return [*parts, ("final norm", norm)] + [("head table", "V*d")] * (not config.tie_word_embeddings)


#: How the parameters of the tree begin that a part counts.
_PREFIXES = {
    "token table": "token_table",
    "position table": "position.",
    "block: attention norm": "blocks.mixer_norm.",
    "block: attention": "blocks.mixer.",
    "block: mlp norm": "blocks.mlp_norm.",
    "block: mlp": "blocks.mlp.",
    "final norm": "norm.",
    "head table": "head",
}


def _check(config: ModelConfig, entries: list[Entry]) -> None:
    """The formulas against the model's own tree."""
    tree = named_parameters(abstract_model(config))
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    for part, prefix in _PREFIXES.items():
        real = sum(leaf.size for name, leaf in tree.items() if name.startswith(prefix)) - (padding if part in ("token table", "head table") else 0)
        counted = sum(entry.total for entry in entries if entry.part == part)
        if max(real, 0) != counted:
            raise InputError(f"the {part} has {real:,} parameters in the model, {counted:,} by its formula: the inventory is wrong")
    if loose := [name for name in tree if not name.startswith(tuple(_PREFIXES.values()))]:
        raise InputError(f"the inventory has no part for {', '.join(loose)}")


def print_inventory(inventory: Inventory) -> None:
    """Tables for people, on standard output."""
    c, console = inventory.config, Console()
    letters = f"V={c.vocab_size} C={c.n_positions} L={c.n_layer} d={c.n_embd} H={c.n_head} G={c.kv_head_count} K={c.head_width} f={c.mlp_width}"
    letters += f" E={c.moe_experts} N={c.moe_top_k} S={c.moe_shared}" * (c.mlp == "moe")
    letters += "".join(f" {letter}={size}" for letter, size in _latent_letters(c).items())
    seen = min(inventory.context, c.sliding_window or inventory.context)
    choices = f"position={c.position} norm={c.norm} attention={c.attention} mlp={c.mlp}"
    console.print(f"{choices}\n{letters}; T={inventory.context}, A={seen} tokens seen\n", highlight=False)
    _print(console, "Parameters", inventory.parameters, inventory.parameter_count)
    active = f"; used by a token: {inventory.active_parameter_count:,}" * (c.mlp == "moe")
    console.print(f"without the tables: {inventory.non_embedding_count:,}{active}\n", highlight=False)
    _print(console, "FLOPs a token, forward, every token seeing A", inventory.flops, inventory.forward_flops)
    forward, causal = inventory.forward_flops, inventory.causal_forward_flops
    console.print(f"as causal order leaves it: {causal:,}; training is 3 x: {3 * forward:,}, causal {3 * causal:,}\n", highlight=False)
    table = Table("Cache of keys and values", "formula", "bytes a token", f"bytes at T={inventory.context}", title_justify="left")
    for dtype, size in inventory.cache_bytes.items():
        table.add_row(dtype, _cache(c, dtype).replace("*", "·"), f"{size:,}", f"{size * inventory.context:,}")
    console.print(table)


def _print(console: Console, title: str, entries: tuple[Entry, ...], total: int) -> None:
    table = Table(title, "formula", "each", "times", "total")
    for column in table.columns[2:]:
        column.justify = "right"
    for entry in entries:
        table.add_row(entry.part, entry.formula, f"{entry.each:,}", str(entry.times), f"{entry.total:,}")
    table.add_section()
    table.add_row("all", "", "", "", f"{total:,}")
    console.print(table)
