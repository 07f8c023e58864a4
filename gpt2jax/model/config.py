"""The network's configuration. Names are GPT-2's own (transformers' `GPT2Config`) where it has the thing."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from gpt2jax.errors import InputError

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

STRICT = pydantic.ConfigDict(strict=True, extra="forbid")

#: The released sizes (OpenAI, "Language Models are Unsupervised Multitask Learners", 2019; sizes as in the released hparams.json files).
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),
}
_RELEASED: dict[str, Any] = dict(vocab_size=50257, n_positions=1024, eos_token_id=50256)


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The network: each of position, norm, attention and mlp names a component, and the keys that begin alike belong to it."""

    vocab_size: Annotated[Count, "token ids that exist"] = 50257
    n_positions: Annotated[Count, "context length in tokens: rows of the table of learned positions, else what training uses by default"] = 1024
    n_layer: Annotated[Count, "blocks"] = 12
    n_head: Annotated[Count, "attention heads; must divide n_embd"] = 12
    n_embd: Annotated[Count, "width of the residual stream"] = 768
    n_inner: Annotated[Count | None, "width of the MLP, or of each expert; none means 4 x n_embd (gated: 8/3, up to a multiple of 64)"] = None
    position: Annotated[Literal["learned", "rope", "none"], "learned: a table of n_positions rows; rope: rotated queries and keys"] = "learned"
    rope_theta: Annotated[Positive, "rope: base of the wave lengths"] = 10000.0
    rope_layout: Annotated[Literal["half", "interleaved"], "rope: pairs (j, j + K/2) as in Hugging Face's Llama, or (2j, 2j + 1) as in Meta's"] = "half"
    rope_scaling: Annotated[Literal["linear", "llama3", "yarn"] | None, "rope: how wave lengths are stretched for a longer context"] = None
    rope_factor: Annotated[Positive, "rope_scaling: how many times longer"] = 1.0
    rope_original_positions: Annotated[Count | None, "llama3, yarn: context length before stretching"] = None
    rope_low_freq_factor: Annotated[Positive, "llama3: waves longer than rope_original_positions over this are stretched in full"] = 1.0
    rope_high_freq_factor: Annotated[Positive, "llama3: waves shorter than rope_original_positions over this stay"] = 4.0
    rope_beta_fast: Annotated[Positive, "yarn: waves that turn more often than this in rope_original_positions stay"] = 32.0
    rope_beta_slow: Annotated[Positive, "yarn: waves that turn less often than this in rope_original_positions are stretched in full"] = 1.0
    rope_attention_factor: Annotated[Positive | None, "yarn: factor on rotated queries and keys; none means 0.1 ln(rope_factor) + 1"] = None
    rope_mscale_all_dim: Annotated[NonNegative, "yarn with mla: scores are times (0.1 rope_mscale_all_dim ln(rope_factor) + 1)^2, as DeepSeek's"] = 0.0
    norm: Annotated[Literal["layernorm", "rmsnorm"], "normalisation"] = "layernorm"
    layer_norm_epsilon: Annotated[Positive, "added to the variance, or to the mean square"] = 1e-5
    attention: Annotated[Literal["mha", "mla"], "sequence mixer: multi-head, or multi-head latent attention"] = "mha"
    kv_heads: Annotated[Count | None, "key/value heads; none means n_head, fewer is grouped-query attention, 1 multi-query; must divide n_head"] = None
    head_dim: Annotated[Count | None, "width of a head; none means n_embd / n_head"] = None
    mla_kv_rank: Annotated[Count | None, "mla: width of the latent that keys and values are made from; none means 4 heads"] = None
    mla_q_rank: Annotated[Count | None, "mla: width of a latent that queries are made from; none makes them without one"] = None
    mla_nope_dim: Annotated[Count | None, "mla: part of a head's queries and keys that never turns; none means a head's width"] = None
    mla_rope_dim: Annotated[Count | None, "mla: part that turns (with rope), whose keys all heads share; none means half a head's width"] = None
    mla_value_dim: Annotated[Count | None, "mla: width of a head's values; none means a head's width"] = None
    attention_bias: Annotated[bool, "biases in attention; mla has them on what comes from, and goes to, the residual stream"] = True
    qk_norm: Annotated[bool, "RMSNorm on each head's queries and keys, before rotation"] = False
    sliding_window: Annotated[Annotated[int, Field(ge=1, lt=2**31)] | None, "a token sees itself and this many tokens less one before it; none means all"] = (
        None
    )
    attention_softcap: Annotated[Positive | None, "scores become cap x tanh(score / cap)"] = None
    attention_sinks: Annotated[bool, "a learned logit a head takes part in each softmax and adds nothing to the sum"] = False
    attention_backend: Annotated[Literal["auto", "xla", "flash", "splash", "cudnn"], "schedule of attention over whole sequences"] = "auto"
    mlp: Annotated[Literal["gelu", "swiglu", "geglu", "moe"], "channel mixer; moe: a mixture of swiglu experts"] = "gelu"
    mlp_bias: Annotated[bool | None, "biases in the MLP; none means yes for gelu, no where it is gated"] = None
    moe_experts: Annotated[Count, "moe: experts, of which each token uses a few"] = 8
    moe_top_k: Annotated[Count, "moe: experts a token"] = 2
    moe_shared: Annotated[Natural, "moe: experts that every token uses beside them, as one MLP of so many widths"] = 0
    moe_router: Annotated[Literal["softmax", "sigmoid"], "moe: how logits become scores; softmax as in Mixtral, sigmoid as in DeepSeek-V3"] = "softmax"
    moe_norm_topk_prob: Annotated[bool, "moe: scores of a token's experts are divided by their sum (Mixtral, Qwen3, DeepSeek-V3; not OLMoE)"] = True
    moe_routed_scaling_factor: Annotated[Positive, "moe: factor on them after that"] = 1.0
    moe_groups: Annotated[Count, "moe: groups of experts, of which a token uses moe_topk_groups"] = 1
    moe_topk_groups: Annotated[Count, "moe: groups a token; those with the highest sums of their two best scores"] = 1
    moe_capacity: Annotated[Positive | None, "moe: an expert takes so many times its even share of tokens, others are dropped; none drops no token"] = None
    moe_balance_loss: Annotated[NonNegative, "moe: coefficient of the load-balance loss, which is 1 where loads are even"] = 0.01
    moe_z_loss: Annotated[NonNegative, "moe: coefficient of the mean of log(sum of exp(router logits))^2"] = 0.0
    moe_bias_rate: Annotated[NonNegative | None, "moe: step of a bias on the choice that evens loads (DeepSeek-V3: 0.001); none means no bias"] = None
    activation_function: Annotated[
        Literal["gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu"], "gelu_new is the tanh form GPT-2 was trained with; gelu is the erf form"
    ] = "gelu_new"
    tie_word_embeddings: Annotated[bool, "logits through the token table; false gives the head a table of its own"] = True
    initializer_range: Annotated[Positive, "std of initial weights; residual projections divide it by sqrt(2 n_layer)"] = 0.02
    position_initializer_range: Annotated[Positive, "std of initial positions: 0.01 as OpenAI's code, 0.02 in Hugging Face's"] = 0.01
    embd_pdrop: Annotated[Probability, "dropout after the embeddings"] = 0.0
    attn_pdrop: Annotated[Probability, "dropout on attention weights"] = 0.0
    resid_pdrop: Annotated[Probability, "dropout on each block's two outputs"] = 0.0
    eos_token_id: Annotated[Natural | None, "id that ends a text; none means no such id"] = None
    vocab_multiple: Annotated[Count, "the token table is padded with zero rows to a multiple of this; padded ids never leave the model"] = 128
    compute_dtype: Annotated[Literal["float32", "bfloat16"], "dtype of matmuls; parameters, softmax, norms and loss stay float32"] = "float32"

    def __post_init__(self) -> None:
        if self.head_dim is None and self.n_embd % self.n_head:
            raise InputError(f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}; {_nearest_divisor(self.n_embd, self.n_head)}")
        if self.kv_heads is not None and self.n_head % self.kv_heads:
            raise InputError(f"model.kv_heads={self.kv_heads} does not divide model.n_head={self.n_head}; {_nearest_divisor(self.n_head, self.kv_heads)}")
        if self.eos_token_id is not None and self.eos_token_id >= self.vocab_size:
            raise InputError(f"model.eos_token_id={self.eos_token_id} is outside the vocabulary of model.vocab_size={self.vocab_size} ids")
        if self.mlp in ("swiglu", "moe") and self.activation_function not in ("gelu_new", "silu"):
            raise InputError(f"model.activation_function={self.activation_function} does not go with model.mlp={self.mlp}, which is silu; leave it out")
        if self.mlp == "geglu" and not self.activation_function.startswith("gelu"):
            raise InputError(f"model.activation_function={self.activation_function} does not go with model.mlp=geglu; use a gelu, or model.mlp=swiglu for silu")
        if self.position != "learned" and self.position_initializer_range != 0.01:
            value = self.position_initializer_range
            raise InputError(f"model.position_initializer_range={value} has no meaning with model.position={self.position}; leave it out")
        self._check_mla()
        self._check_rope()
        self._check_moe()

    def _check_mla(self) -> None:
        given = [key for key in ("mla_kv_rank", "mla_q_rank", "mla_nope_dim", "mla_rope_dim", "mla_value_dim") if getattr(self, key) is not None]
        if self.attention != "mla":
            for key in given:
                raise InputError(f"model.{key}={getattr(self, key)} has no meaning with model.attention={self.attention}; leave it out, or use mla")
        elif self.kv_heads is not None:
            raise InputError(f"model.kv_heads={self.kv_heads} does not go with model.attention=mla, whose heads share one latent; leave it out")
        elif self.qk_norm:
            raise InputError("model.qk_norm=True does not go with model.attention=mla, which normalises its latents; leave it out")
        elif self.mla_rope_dim is None and self.head_width < 2:
            raise InputError(f"a head is {self.head_width} wide, and model.mla_rope_dim is half of it unless given; give it, or widen the head")

    def _check_rope(self) -> None:
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        given = [name for name in fields if name.startswith("rope_") and getattr(self, name) != fields[name]]
        of_scaling = {"linear": ("factor",), "llama3": ("factor", "original_positions", "low_freq_factor", "high_freq_factor")}
        of_scaling["yarn"] = ("factor", "original_positions", "beta_fast", "beta_slow", "attention_factor")
        of_scaling["yarn"] += ("mscale_all_dim",) * (self.attention == "mla")
        used = {"theta", "layout", "scaling", *of_scaling.get(self.rope_scaling or "", ())} if self.position == "rope" else set()
        for name in given:
            if name.removeprefix("rope_") not in used:
                other = "model.position" if self.position != "rope" else "model.rope_scaling"
                if self.rope_scaling == "yarn" and name == "rope_mscale_all_dim":
                    other = "model.attention"
                raise InputError(f"model.{name}={getattr(self, name)} has no meaning with {other}={getattr(self, other[6:]) or 'none'}; leave it out")
        if self.position == "rope" and self.attention == "mla" and self.rope_dim % 2:
            raise InputError(f"model.position=rope turns pairs of numbers, and model.mla_rope_dim is {self.rope_dim}; choose an even one")
        if self.position == "rope" and self.attention != "mla" and self.head_width % 2:
            raise InputError(f"model.position=rope turns pairs of numbers, and a head is {self.head_width} wide; choose n_head or head_dim so that it is even")
        if self.position == "rope" and self.rope_theta <= 1:
            raise InputError(f"model.rope_theta={self.rope_theta} must be above 1: it is the base of the wave lengths, 10000 in the paper")
        if self.rope_scaling and not 1 < self.rope_factor < 1e6:
            raise InputError(f"model.rope_factor={self.rope_factor} with model.rope_scaling={self.rope_scaling} must be above 1, how many times longer")
        if self.rope_scaling == "yarn" and self.rope_beta_fast <= self.rope_beta_slow:
            raise InputError(f"model.rope_beta_fast={self.rope_beta_fast} must be above model.rope_beta_slow={self.rope_beta_slow}")
        if self.rope_scaling in ("llama3", "yarn") and self.rope_original_positions is None:
            raise InputError(f"model.rope_scaling={self.rope_scaling} needs model.rope_original_positions, the context length before stretching")
        if self.rope_scaling == "llama3" and self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise InputError(f"model.rope_low_freq_factor={self.rope_low_freq_factor} must be below rope_high_freq_factor={self.rope_high_freq_factor}")

    def _check_moe(self) -> None:
        fields = {field.name: field.default for field in dataclasses.fields(self) if field.name.startswith("moe_")}
        for name, default in fields.items():
            if self.mlp != "moe" and getattr(self, name) != default:
                raise InputError(f"model.{name}={getattr(self, name)} has no meaning with model.mlp={self.mlp}; leave it out, or use model.mlp=moe")
        if self.mlp == "moe" and self.mlp_bias:
            raise InputError("model.mlp_bias=True does not go with model.mlp=moe, whose experts have no biases; leave it out")
        experts, groups = self.moe_experts, self.moe_groups
        if self.moe_top_k > experts:
            raise InputError(f"model.moe_top_k={self.moe_top_k} is more than the model.moe_experts={experts} that there are; lower the first")
        if experts % groups:
            raise InputError(f"model.moe_groups={groups} does not divide model.moe_experts={experts}; {_nearest_divisor(experts, groups)}")
        if not self.moe_top_k * groups <= self.moe_topk_groups * experts <= groups * experts:
            least = -(-self.moe_top_k * groups // experts)
            raise InputError(f"model.moe_topk_groups={self.moe_topk_groups} must be from {least}, which hold moe_top_k experts, to model.moe_groups={groups}")

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_head_count(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.n_head

    @property
    def kv_rank(self) -> int:
        """mla: width of the latent of keys and values. Four heads, and half of one that turns, are DeepSeek-V2's (arXiv:2405.04434, section 2.1.4)."""
        return self.mla_kv_rank or 4 * self.head_width

    @property
    def nope_dim(self) -> int:
        """mla: the part of a head's queries and keys that never turns."""
        return self.mla_nope_dim or self.head_width

    @property
    def rope_dim(self) -> int:
        """mla: the part that turns."""
        return self.mla_rope_dim or self.head_width // 2

    @property
    def key_width(self) -> int:
        """Width of a head's queries and keys as attention over a whole sequence sees them."""
        return self.nope_dim + self.rope_dim if self.attention == "mla" else self.head_width

    @property
    def value_width(self) -> int:
        """Width of a head's values."""
        return self.mla_value_dim or self.head_width

    @property
    def mlp_width(self) -> int:
        """Inner width of the MLP. 8/3 keeps a gated MLP's three matrices at the size of two of 4 (Shazeer, arXiv:2002.05202, section 3.1)."""
        return self.n_inner or (4 * self.n_embd if self.mlp == "gelu" else -(-8 * self.n_embd // 192) * 64)

    @property
    def context(self) -> int | None:
        """Most tokens that the model can see at all: n_positions with a table of positions, else None (the cache alone bounds it)."""
        return self.n_positions if self.position == "learned" else None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token table: vocab_size rounded up to a multiple of vocab_multiple (50257 -> 50304 at 128)."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ModelConfig:
        """One of the released sizes: gpt2, gpt2-medium, gpt2-large, gpt2-xl. `changes` are laid over it."""
        return cls(**{**preset(name), **changes})


def preset(name: Any) -> dict[str, Any]:
    """The values of a released size. InputError for another name."""
    if name not in PRESETS:
        raise InputError(f"model.preset={name!r} is unknown; there are {', '.join(PRESETS)}")
    return {**_RELEASED, **PRESETS[name]}


def _nearest_divisor(number: int, wish: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return f"the nearest that does is {min(divisors, key=lambda d: abs(d - wish))}"
