"""GPT-2: embeddings -> blocks -> final norm -> logits, through the token table unless the head is untied.

Letters: B batch, T tokens, L layers, V vocabulary, P padded vocabulary, D width, S and R slots of the decode cache (see cache.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from gpt2jax.errors import InputError
from gpt2jax.model.block import NORMS, POSITIONS, Block
from gpt2jax.model.cache import DecodeState, Slots, Span
from gpt2jax.model.config import ModelConfig
from gpt2jax.model.linear import child_key, dropout, normal
from gpt2jax.model.moe import Routing
from gpt2jax.parallel.table import STREAM, constrain, in_mesh_of


def _products_with_weights(primitive: Any, *operands: Any, **how: Any) -> bool:
    """Those of experts too."""
    return primitive.name == "ragged_dot_general" or bool(jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **how))


def _all_but_attention(primitive: Any, *operands: Any, **how: Any) -> bool:
    """Keep what has no axis of heads: products with weights, and floats of [batch, tokens, width] at most. Scores are [B, G, Q, T, S]."""
    plain = all(x.ndim <= 3 and jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    return plain or _products_with_weights(primitive, *operands, **how)


#: Rematerialisation by name: of each block the backward pass computes again nothing, all, all but the products with weights (Chen et al., arXiv:1604.06174),
#: only attention between its projections (Korthikanti et al., arXiv:2205.05198, section 5), or as dots, whose products wait in the host's memory meanwhile.
REMAT: dict[str, Callable[..., Any]] = {
    "none": lambda run: run,
    "block": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=_products_with_weights),
    "attention": functools.partial(jax.checkpoint, policy=_all_but_attention),
    "offload": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")),
}


class GPT2(nnx.Module):
    """The GPT-2 language model (Radford et al. 2019). A JAX pytree: jit, grad, vmap and scan take it as it is.

    Blocks are stacked: each of their parameters has a leading axis L and they run under `jax.lax.scan`. Make one with `GPT2(config, jax.random.key(0))`.
    """

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        self.config = config
        self.token_table = _table(config, child_key(key, "tokens"))
        self.head = None if config.tie_word_embeddings else _table(config, child_key(key, "head"))
        self.position = POSITIONS[config.position](config, child_key(key, "position"))
        layer_keys = jax.vmap(lambda layer: jax.random.fold_in(child_key(key, "blocks"), layer))(jnp.arange(config.n_layer))
        # lax.map stacks as vmap does, and compiles the random draws in half the time
        self.blocks = jax.lax.map(lambda layer_key: Block(config, layer_key), layer_keys)
        self.norm = NORMS[config.norm](config)

    def __call__(
        self, tokens_BT: jax.Array, *, mask_BT: jax.Array | None = None, segment_BT: jax.Array | None = None, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Logits float32 [B, T, V] of tokens int32 [B, T].

        mask_BT (bool): False marks padding, on either side; padding takes no position and nothing attends to it. segment_BT (int32): documents that are packed
        one behind the other have numbers of their own, each starts at position 0 and sees itself only. dropout_key turns dropout on.
        Raises InputError if T exceeds the context or the shape is not [B, T]. Ids must lie in [0, V): inside jit they can't be checked.
        """
        check_tokens(tokens_BT, self.config)
        with in_mesh_of(self):
            return _logits(self, tokens_BT, mask_BT, segment_BT, dropout_key)

    def hidden(
        self,
        tokens_BT: jax.Array,
        *,
        mask_BT: jax.Array | None = None,
        segment_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        remat: str = "none",
    ) -> jax.Array:
        """The final norm's output, [B, T, D] in the compute dtype. remat, one of `REMAT`: what the backward pass computes again instead of keeping it."""
        return self.routed(tokens_BT, mask_BT=mask_BT, segment_BT=segment_BT, dropout_key=dropout_key, remat=remat)[0]

    def routed(
        self,
        tokens_BT: jax.Array,
        *,
        mask_BT: jax.Array | None = None,
        segment_BT: jax.Array | None = None,
        counts_BT: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        remat: str = "none",
    ) -> tuple[jax.Array, Routing | None]:
        """`hidden`, and where tokens went in each layer, if MLPs are mixtures of experts. counts_BT (bool): the tokens that count there; None: all but
        padding."""
        check_tokens(tokens_BT, self.config)
        B, T = tokens_BT.shape
        span = dataclasses.replace(Span.of((B, T), mask_BT, segment_BT), counts_BT=counts_BT if self.config.mlp == "moe" else None)
        embed_key, block_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        keys_L = None if block_key is None else jax.random.split(block_key, self.config.n_layer)
        x_BTD = constrain(self._embed(tokens_BT, span, embed_key), STREAM)
        run = REMAT[remat](lambda block, x, span, key: block.routed(x, span, key)[::2])
        if isinstance(self.blocks, tuple):
            layers = []
            for i, block in enumerate(self.blocks):
                x_BTD, layer = run(block, x_BTD, span, None if keys_L is None else keys_L[i])
                layers.append(layer)
            routing = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        else:
            x_BTD, routing = jax.lax.scan(lambda x, layer: run(layer[0], x, span, layer[1]), x_BTD, (self.blocks, keys_L))
        return self.norm(x_BTD), routing

    def padded_logits(self, x: jax.Array) -> jax.Array:
        """Hidden states [..., D] -> float32 logits [..., P]; padded ids get -inf, so that no softmax, argmax or sample sees them."""
        return table_logits(x, self.head_table[...].astype(self.config.compute_dtype), self.config.vocab_size)

    @property
    def head_table(self) -> Any:
        """What logits are made with, [P, D]: the token table, or the head's own."""
        return self.token_table if self.head is None else self.head

    def prefill(self, tokens_BT: jax.Array, length_B: jax.Array, *, slots: int, recent: int) -> tuple[jax.Array, DecodeState]:
        """Run right-padded prompts: the hidden state [B, D] of each row's last real token, and the decode state behind all of them.

        tokens_BT int32, length_B int32 in [1, T]; slots >= T and recent >= 1 are the cache's two sizes.
        """
        B, T = tokens_BT.shape
        valid_BT = jnp.arange(T)[None, :] < length_B[:, None]
        span = dataclasses.replace(Span.of((B, T), valid_BT), segment_BT=None)  # padding stands behind: no real token sees it
        x_BTD = self._embed(tokens_BT, span, None)
        frozen, live = [], []
        for block in self.unstacked():
            x_BTD, entry = _whole(block, x_BTD, span)
            layer_frozen, layer_live = block.mixer.start(entry, slots, recent)
            frozen.append(layer_frozen)
            live.append(layer_live)
        valid_BS = jnp.pad(valid_BT, ((0, 0), (0, slots - T)))
        counts = Slots(valid_BS, jnp.zeros((B, recent), bool), jnp.max(length_B), jnp.int32(0))
        return self.norm(_last(x_BTD, length_B)), DecodeState(tuple(frozen), tuple(live), counts, length_B)

    def step(self, tokens_BT: jax.Array, state: DecodeState, valid_BT: jax.Array | None = None) -> tuple[jax.Array, DecodeState]:
        """T more tokens of every row on top of a cache: hidden states [B, T, D] and the state behind them, same structure, shapes and dtypes.

        valid_BT (bool, all True by default): False marks padding, which takes no position and is attended by nothing.
        The caller has planned for them: they fit the recent slots, and positions stay within the context.
        """
        if valid_BT is None:
            valid_BT = jnp.ones(tokens_BT.shape, bool)
        count_BT = jnp.cumsum(valid_BT, -1, dtype=jnp.int32)
        span = Span(state.length_B[:, None] + jnp.maximum(count_BT - 1, 0), valid_BT)
        slots = state.slots.push(valid_BT)
        x_BTD = self._embed(tokens_BT, span, None)
        live = []
        for block, layer_frozen, layer_live in zip(self.unstacked(), state.frozen, state.live, strict=True):
            x_BTD, layer_live = _step(block, x_BTD, layer_frozen, layer_live, slots, span)
            live.append(layer_live)
        return self.norm(x_BTD), DecodeState(state.frozen, tuple(live), slots, state.length_B + count_BT[:, -1])

    def extend(self, tokens_BT: jax.Array, length_B: jax.Array, state: DecodeState) -> tuple[jax.Array, DecodeState]:
        """Right-padded tokens of every row on top of a cache whose recent part is empty, written to the frozen part: the prefill of what follows a prefix.

        tokens_BT int32, length_B int32 in [1, T]. Returns the hidden state [B, D] of each row's last real token, and the state behind it. The caller has
        planned for T frozen slots.
        """
        B, T = tokens_BT.shape
        recent, blocks = state.slots.valid_BR.shape[1], self.unstacked()
        renewed = lambda state, slots: dataclasses.replace(  # noqa: E731
            state,
            live=tuple(block.mixer.renew(live, slots) for block, live in zip(blocks, state.live, strict=True)),
            slots=dataclasses.replace(state.slots, valid_BR=jnp.zeros((B, slots), bool)),
        )
        filled = state.slots.filled + jnp.max(length_B)  # what is padding in all rows is free again
        x_BTD, state = self.step(tokens_BT, renewed(state, T), jnp.arange(T) < length_B[:, None])
        state = renewed(self.commit(state), recent)
        return _last(x_BTD, length_B), dataclasses.replace(state, slots=dataclasses.replace(state.slots, filled=filled))

    @property
    def can_trim(self) -> bool:
        """Whether `trim` is possible: the state of every mixer can forget its last tokens (a recurrent state cannot)."""
        blocks = self.blocks if isinstance(self.blocks, tuple) else (self.blocks,)
        return all(block.mixer.can_trim for block in blocks)

    def trim(self, state: DecodeState, length_B: jax.Array) -> DecodeState:
        """The state as it was when row b had taken its first length_B[b] tokens. InputError if a mixer's state cannot forget tokens."""
        if not self.can_trim:
            raise InputError("a cache of this model cannot be cut shorter: one of its mixers keeps a running state; run the shorter prompt from its start")
        return dataclasses.replace(state, slots=state.slots.trim(length_B), length_B=jnp.minimum(state.length_B, length_B))

    def commit(self, state: DecodeState) -> DecodeState:
        """Move the recent part of every layer's cache behind its frozen part. The caller has planned for it: filled + R <= S."""
        frozen = tuple(b.mixer.commit(f, lv, state.slots) for b, f, lv in zip(self.unstacked(), state.frozen, state.live, strict=True))
        return dataclasses.replace(state, frozen=frozen, slots=state.slots.commit())

    def grow(self, state: DecodeState, slots: int) -> DecodeState:
        """The same state with `slots` slots in the frozen part, at least as many as now."""
        frozen = tuple(block.mixer.grow(entry, slots) for block, entry in zip(self.unstacked(), state.frozen, strict=True))
        more = slots - state.slots.valid_BS.shape[1]
        counts = dataclasses.replace(state.slots, valid_BS=jnp.pad(state.slots.valid_BS, ((0, 0), (0, more))))
        return dataclasses.replace(state, frozen=frozen, slots=counts)

    def unstack(self) -> GPT2:
        """The same model with blocks as a tuple of L separate ones, which decodes faster: slicing a stack inside the loop would copy the weights."""
        model = nnx.clone(self)
        model.blocks = nnx.data(self.unstacked())
        return model

    def unstacked(self) -> tuple[Any, ...]:
        """The L blocks one by one."""
        if isinstance(self.blocks, tuple):
            return self.blocks
        return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], self.blocks) for i in range(self.config.n_layer))

    def _rows(self, tokens_BT: jax.Array) -> jax.Array:
        """The tokens' rows of the table, float32 [B, T, D]."""
        if jax.sharding.get_abstract_mesh().empty:
            return self.token_table[tokens_BT]
        # the table's width is gathered before its rows are picked: the rows of a batch picked first would have to be laid anew
        return constrain(self.token_table[...], ("vocab", None))[tokens_BT]

    def _embed(self, tokens_BT: jax.Array, span: Span, dropout_key: jax.Array | None) -> jax.Array:
        x_BTD = self.position(self._rows(tokens_BT), span.position_BT)
        return dropout(x_BTD, self.config.embd_pdrop, dropout_key).astype(self.config.compute_dtype)


def check_tokens(tokens_BT: jax.Array, config: ModelConfig) -> None:
    """InputError unless tokens have the shape [B, T], 1 <= T within the context, and an integer dtype. Shapes are static, so this holds inside jit too."""
    if tokens_BT.ndim != 2 or not jnp.issubdtype(tokens_BT.dtype, jnp.integer):
        raise InputError(f"tokens must be integers of shape [batch, tokens], not {tokens_BT.dtype}{list(tokens_BT.shape)}")
    if tokens_BT.shape[1] < 1:
        raise InputError(f"tokens of shape {list(tokens_BT.shape)} are none; pass at least one a row")
    if config.context is not None and tokens_BT.shape[1] > config.context:
        raise InputError(f"{tokens_BT.shape[1]} tokens do not fit the context of n_positions={config.context}; pass between 1 and {config.context}")


def table_logits(x: jax.Array, table_PD: jax.Array, vocab_size: int) -> jax.Array:
    """Hidden states [..., D] against a table in the dtype to compute in: float32 logits [..., P], -inf from vocab_size on."""
    logits = jax.lax.dot_general(x.astype(table_PD.dtype), table_PD, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jnp.where(jnp.arange(table_PD.shape[0]) < vocab_size, logits, -jnp.inf)


def _table(config: ModelConfig, key: jax.Array) -> nnx.Param[jax.Array]:
    """A row a token id, and zero rows up to a multiple of vocab_multiple."""
    table = normal(key, (config.vocab_size, config.n_embd), ("vocab", "embed"), config.initializer_range)
    padded = table.replace(jnp.pad(table[...], ((0, config.padded_vocab_size - config.vocab_size), (0, 0))))
    return cast(nnx.Param[jax.Array], padded)


# traced and lowered once for all layers of a kind, which is most of what a decode loop's start costs; XLA inlines the calls
_whole = jax.jit(lambda block, x_BTD, span: block(x_BTD, span))
_step = jax.jit(lambda block, x_BTD, frozen, live, slots, span: block.step(x_BTD, frozen, live, slots, span))


def _last(x_BTD: jax.Array, length_B: jax.Array) -> jax.Array:
    """The last real token of each right-padded row, [B, D]."""
    return jnp.take_along_axis(x_BTD, (length_B - 1)[:, None, None], 1)[:, 0]


@jax.jit
def _logits(model: GPT2, tokens_BT: jax.Array, mask_BT: jax.Array | None, segment_BT: jax.Array | None, dropout_key: jax.Array | None) -> jax.Array:
    hidden_BTD = model.hidden(tokens_BT, mask_BT=mask_BT, segment_BT=segment_BT, dropout_key=dropout_key)
    return model.padded_logits(hidden_BTD)[..., : model.config.vocab_size]


def parameter_count(model: GPT2) -> int:
    """Numbers in the parameters, without the padding rows of the tables of tokens (gpt2: 124,439,808)."""
    total, tables = sum(leaf.size for leaf in jax.tree.leaves(model)), 1 if model.config.tie_word_embeddings else 2
    return total - tables * (model.config.padded_vocab_size - model.config.vocab_size) * model.config.n_embd
