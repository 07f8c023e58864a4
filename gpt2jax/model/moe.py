"""A mixture of experts in the MLP's place: each token goes to its top K of E gated MLPs, and to the shared ones, if there are any.

Softmax router as in Mixtral (arXiv:2401.04088), Qwen3 and OLMoE (arXiv:2409.02060); sigmoid router, bias and groups as in DeepSeek-V3 (arXiv:2412.19437).

Letters: B batch, T tokens, D width, F inner width of an expert, E experts, K choices a token, L layers, N = B * T tokens, M rows of experts' inputs, C tokens
that an expert takes at most, I inputs, O outputs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from gpt2jax.model.config import ModelConfig
from gpt2jax.model.linear import Axes, child_key, constant, normal, quantized, residual_std
from gpt2jax.model.mlp import GatedMLP
from gpt2jax.parallel.table import STREAM, constrain, spec

#: The name of the bias among a model's parameters.
BIAS = "blocks.mlp.router.bias"


class Routing(NamedTuple):
    """Sums over the tokens that count, float32: how many chose each expert (loads [E]), each expert's share of the scores (shares [E]), and
    log(sum of exp(logits))^2 ([]). Of stacked blocks with a leading axis of layers."""

    loads: jax.Array
    shares: jax.Array
    squares: jax.Array


class Router(nnx.Module):
    """Which experts a token goes to, and with what weights. All in float32: in bfloat16 other experts would be chosen for some tokens.

    w: [D, E]. bias: [E], only with moe_bias_rate: it counts in the choice and not in the weights, and no gradient reaches it (arXiv:2408.15664).
    """

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        self.config = config
        draw = normal(child_key(key, "w"), (config.n_embd, config.moe_experts), ("embed", None), config.initializer_range)
        self.w = nnx.Param(draw[...], axes=draw.axes, inputs=1)
        self.bias = None if config.moe_bias_rate is None else constant((config.moe_experts,), (None,), 0.0)

    def __call__(self, x_BTD: jax.Array, counts_BT: jax.Array | None) -> tuple[jax.Array, jax.Array, Routing]:
        """(experts int32 [B, T, K], their weights float32 [B, T, K], sums over the tokens that count, None: over all)."""
        c = self.config
        logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD.astype(jnp.float32), self.w[...], precision=jax.lax.Precision.HIGHEST)
        scores_BTE = jax.nn.softmax(logits_BTE) if c.moe_router == "softmax" else jax.nn.sigmoid(logits_BTE)
        chosen_BTK = self._choose(jax.lax.stop_gradient(scores_BTE))
        weights_BTK = jnp.take_along_axis(scores_BTE, chosen_BTK, -1)
        if c.moe_norm_topk_prob:
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdims=True) + 1e-20)
        counts_BT = jnp.ones(x_BTD.shape[:2], bool) if counts_BT is None else counts_BT
        total = lambda x: jnp.where(counts_BT.reshape(counts_BT.shape + (1,) * (x.ndim - 2)), x, 0.0).sum((0, 1))  # noqa: E731
        loads_BTE = (chosen_BTK[..., None] == jnp.arange(c.moe_experts)).sum(2).astype(jnp.float32)
        shares_BTE = scores_BTE / (scores_BTE.sum(-1, keepdims=True) + 1e-20)
        squares_BT = jax.nn.logsumexp(logits_BTE, -1) ** 2
        return chosen_BTK, weights_BTK * c.moe_routed_scaling_factor, Routing(total(loads_BTE), total(shares_BTE), total(squares_BT))

    def _choose(self, scores_BTE: jax.Array) -> jax.Array:
        c = self.config
        if self.bias is not None:
            scores_BTE = scores_BTE + jax.lax.stop_gradient(self.bias[...])
        if c.moe_groups > 1:  # of each token the groups whose two best experts have the highest sums
            groups = scores_BTE.reshape(*scores_BTE.shape[:2], c.moe_groups, -1)
            best_BTG = jax.lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(-1)
            kept = (jax.lax.top_k(best_BTG, c.moe_topk_groups)[1][..., None] == jnp.arange(c.moe_groups)).any(2)
            scores_BTE = jnp.where(kept[..., None], groups, -jnp.inf).reshape(scores_BTE.shape)
        return jax.lax.top_k(scores_BTE, c.moe_top_k)[1]


class ExpertLinear(nnx.Module):
    """A linear map an expert, without bias, computed in `dtype` to float32. w: [E, I, *outputs]; int8 with one float32 scale an output, [E, *outputs]."""

    def __init__(self, w: nnx.Param[jax.Array], scale: nnx.Param[jax.Array] | None, dtype: jnp.dtype) -> None:
        self.w, self.scale, self.dtype = w, scale, dtype

    @classmethod
    def drawn(cls, key: jax.Array, shape: tuple[int, ...], axes: Axes, std: float, dtype: jnp.dtype) -> ExpertLinear:
        """From N(0, std^2)."""
        return cls(nnx.Param(normal(key, shape, axes, std)[...], axes=axes, inputs=2), None, dtype)

    def quantized(self) -> ExpertLinear:
        """The same map with int8 weights: see `QuantizedLinear`."""
        (w, scale), axes = quantized(self.w[...], (1,)), self.w.axes
        return ExpertLinear(nnx.Param(w, axes=axes), nnx.Param(scale, axes=(axes[0], *axes[2:])), self.dtype)

    @property
    def parts(self) -> tuple[jax.Array, jax.Array | None]:
        return self.w[...], None if self.scale is None else self.scale[...]

    @property
    def part_axes(self) -> tuple[Axes, Axes]:
        """Logical axes of `parts` where they are multiplied: inputs that are spread over the mesh only to be stored lie whole."""
        first, *rest = (None if axis == "embed" else axis for axis in self.w.axes)
        return (first, *rest), (first, *rest[1:])


def _ragged(x_MI: jax.Array, parts: tuple[jax.Array, jax.Array | None], sizes_E: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows sorted by expert, sizes_E[e] of expert e, float32 [M, *outputs]."""
    w, scale = parts
    y = jax.lax.ragged_dot(x_MI.astype(dtype), w.astype(dtype).reshape(*w.shape[:2], -1), sizes_E, preferred_element_type=jnp.float32)
    if scale is not None:
        y = y * jnp.repeat(scale.reshape(len(scale), -1), sizes_E, 0, total_repeat_length=len(x_MI))
    return y.reshape(-1, *w.shape[2:])


class MoE(nnx.Module):
    """sum over a token's experts e of weight_e (silu(x W_gate_e) * (x W_up_e)) W_down_e, plus the shared MLP of x.

    Dropless: tokens are sorted by expert, so that what becomes of one depends on no other. With moe_capacity an expert takes its first
    C = ceil(moe_capacity N K / E) choices in the order of tokens, and those over that add nothing: a cached step, which has fewer tokens, may then differ from
    the full forward.
    """

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        d, e, f, dtype = config.n_embd, config.moe_experts, config.mlp_width, jnp.dtype(config.compute_dtype)
        std = config.initializer_range
        self.config = config
        self.router = Router(config, child_key(key, "router"))
        self.gate_up = ExpertLinear.drawn(child_key(key, "gate_up"), (e, d, 2, f), ("experts", "embed", None, "mlp"), std, dtype)
        self.down = ExpertLinear.drawn(child_key(key, "down"), (e, f, d), ("experts", "mlp", "embed"), residual_std(std, config.n_layer), dtype)
        self.shared = GatedMLP(config, child_key(key, "shared"), config.moe_shared * f) if config.moe_shared else None

    def __call__(self, x_BTD: jax.Array, valid_BT: jax.Array | None = None, counts_BT: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """y [B, T, D] in the compute dtype, and the sums of `Router` over tokens that are no padding and count. None: all are."""
        if valid_BT is not None:
            counts_BT = valid_BT if counts_BT is None else counts_BT & valid_BT
        chosen_BTK, weights_BTK, routing = self.router(x_BTD, counts_BT)
        if self.config.moe_capacity is None:
            y_BTD = self._dropless(x_BTD, chosen_BTK, weights_BTK)
        else:
            y_BTD = self._within_capacity(self.config.moe_capacity, x_BTD, chosen_BTK, weights_BTK, valid_BT)
        y_BTD = y_BTD.astype(self.gate_up.dtype)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD), routing

    def _dropless(self, x_BTD: jax.Array, chosen_BTK: jax.Array, weights_BTK: jax.Array) -> jax.Array:
        """Float32 [B, T, D]. On a mesh each device runs its own experts: tokens are gathered, and their sums scattered, over the axis that experts lie on."""
        mesh, maps = jax.sharding.get_abstract_mesh(), (self.gate_up, self.down)
        parts = tuple(part.parts for part in maps)
        if mesh.empty or mesh.size == 1:
            return self._run(parts, x_BTD, chosen_BTK, weights_BTK)
        stream = spec(STREAM, x_BTD.shape, mesh)
        place = lambda x, axes: None if x is None else spec(axes, x.shape, mesh)  # noqa: E731
        of_parts = tuple(tuple(map(place, part.parts, part.part_axes)) for part in maps)
        names = lambda part: (part,) if isinstance(part, str) else tuple(part or ())  # noqa: E731
        experts, _, _, columns = map(names, spec(self.gate_up.part_axes[0], self.gate_up.w.shape, mesh))
        gathered = tuple(name for name in experts if name in names(stream[0]))
        summed = tuple(name for name in (*experts, *columns) if name not in gathered)

        def run(parts: Any, *tokens: jax.Array) -> jax.Array:
            first = jax.lax.axis_index(experts) * parts[0][0].shape[0] if experts else 0
            x_BTD, chosen_BTK, weights_BTK = (jax.lax.all_gather(x, gathered, tiled=True) if gathered else x for x in tokens)
            y_BTD = self._run(parts, x_BTD, chosen_BTK, weights_BTK, first)
            y_BTD = jax.lax.psum(y_BTD, summed) if summed else y_BTD
            return jax.lax.psum_scatter(y_BTD, gathered, tiled=True) if gathered else y_BTD

        return jax.shard_map(run, in_specs=(of_parts, stream, stream, stream), out_specs=stream)(parts, x_BTD, chosen_BTK, weights_BTK)

    def _run(self, parts: Any, x_BTD: jax.Array, chosen_BTK: jax.Array, weights_BTK: jax.Array, first: Any = 0) -> jax.Array:
        """The sums over those of the chosen experts that `parts` holds, of which number `first` is the first."""
        (B, T, D), K, E = x_BTD.shape, chosen_BTK.shape[-1], parts[0][0].shape[0]
        expert_M = chosen_BTK.reshape(-1) - first
        expert_M = jnp.where((expert_M >= 0) & (expert_M < E), expert_M, E)  # those of other devices come last
        order_M = jnp.argsort(expert_M)
        sizes_E = (expert_M[:, None] == jnp.arange(E)).sum(0, dtype=jnp.int32)
        own_M1 = (jnp.arange(len(order_M)) < sizes_E.sum())[:, None]  # what ragged_dot makes of rows that are in no group is not said
        h_M2F = _ragged(x_BTD.reshape(-1, D)[order_M // K], parts[0], sizes_E, self.gate_up.dtype)
        h_MF = jnp.where(own_M1, jax.nn.silu(h_M2F[:, 0]) * h_M2F[:, 1], 0.0)
        y_MD = jnp.where(own_M1, _ragged(h_MF, parts[1], sizes_E, self.down.dtype), 0.0)
        y_BTKD = y_MD[jnp.argsort(order_M)].reshape(B, T, K, D)
        return (y_BTKD * weights_BTK[..., None]).sum(2)

    def _within_capacity(self, factor: float, x_BTD: jax.Array, chosen_BTK: jax.Array, weights_BTK: jax.Array, valid_BT: jax.Array | None) -> jax.Array:
        """Float32 [B, T, D]. Padding takes no place."""
        (B, T, D), K, E = x_BTD.shape, chosen_BTK.shape[-1], self.config.moe_experts
        C = math.ceil(factor * B * T * K / E)
        expert_M = (chosen_BTK if valid_BT is None else jnp.where(valid_BT[..., None], chosen_BTK, E)).reshape(-1)
        of_M1 = expert_M[:, None]
        place_M = jnp.where(of_M1 == jnp.arange(E), jnp.cumsum(of_M1 == jnp.arange(E), 0) - 1, 0).sum(1)
        slot_M = jnp.where((place_M < C) & (expert_M < E), expert_M * C + place_M, E * C)
        x_MD = jnp.repeat(x_BTD.reshape(-1, D), K, 0).astype(self.gate_up.dtype)
        x_ECD = constrain(jnp.zeros((E * C, D), x_MD.dtype).at[slot_M].set(x_MD, mode="drop").reshape(E, C, D), ("experts", None, None))
        h_EC2F = _each(x_ECD, self.gate_up)
        y_ECD = _each(jax.nn.silu(h_EC2F[..., 0, :]) * h_EC2F[..., 1, :], self.down)
        y_BTKD = y_ECD.reshape(E * C, D).at[slot_M].get(mode="fill", fill_value=0).reshape(B, T, K, D)
        return (y_BTKD * weights_BTK[..., None]).sum(2)


def _each(x_ECI: jax.Array, experts: ExpertLinear) -> jax.Array:
    """As many rows an expert, float32 [E, C, *outputs]."""
    w, scale = experts.parts
    y = jax.lax.dot_general(x_ECI.astype(experts.dtype), w.astype(experts.dtype), (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return y if scale is None else y * scale[:, None]


def routing_loss(config: ModelConfig, routing: Routing) -> jax.Array:
    """What keeps experts in use, times the tokens that count: the mean over layers of moe_balance_loss * E sum_e f_e P_e and of moe_z_loss * mean log(sum of
    exp(logits))^2. routing has a leading axis L.

    f_e is the share of all choices that expert e got, P_e the mean of its score over the sum of all experts' scores; the sum is 1 where all are alike (Fedus et
    al., arXiv:2101.03961, equations 4 to 6, over K). Both are of the tokens that run together: of a micro-batch, or of rows on all devices.
    """
    used_LE = routing.loads / jnp.maximum(routing.loads.sum(-1, keepdims=True), 1)
    product_L = (used_LE * routing.shares).sum(-1)
    return (config.moe_balance_loss * config.moe_experts * product_L + config.moe_z_loss * routing.squares).mean()


def load_metrics(loads_LE: jax.Array) -> dict[str, jax.Array]:
    """How even the experts' loads are: the largest and the smallest of any layer times E (1 is even), and the least entropy over its most, in [0, 1]."""
    E = loads_LE.shape[-1]
    share_LE = loads_LE / jnp.maximum(loads_LE.sum(-1, keepdims=True), 1)
    entropy_L = -jnp.where(share_LE > 0, share_LE * jnp.log(jnp.maximum(share_LE, 1e-30)), 0.0).sum(-1)
    least = entropy_L.min() / math.log(max(E, 2))
    return {"moe_load_max": E * share_LE.max(), "moe_load_min": E * share_LE.min(), "moe_load_entropy": least}


def rebalanced(bias_LE: jax.Array, loads_LE: jax.Array, rate: float) -> jax.Array:
    """The biases for the next step: those of experts with less than the mean load rise by `rate`, those of experts with more fall (arXiv:2408.15664,
    algorithm 1)."""
    return bias_LE + rate * jnp.sign(loads_LE.mean(-1, keepdims=True) - loads_LE)
