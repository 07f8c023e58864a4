"""A kernel on each device's own rows and heads: XLA does not split one by itself, and would gather its inputs on every device.

Letters: B batch, T tokens, H query heads, G key/value heads, K key width, V value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from gpt2jax.parallel.table import axes_of


def on_mesh(
    run: Callable[..., jax.Array], q_BTHK: jax.Array, k_BGTK: jax.Array, v_BGTV: jax.Array, segment_BT: jax.Array | None, sink_H: jax.Array | None
) -> jax.Array:
    """`run`, an attention to [B, T, H, V], where a mesh is in context: spread as the table says, whole over the axes that don't divide it. Tokens lie whole."""
    mesh, (B, _, H), G = jax.sharding.get_abstract_mesh(), q_BTHK.shape[:3], k_BGTK.shape[1]
    # axes that are manual already were split by the caller
    sizes = {name: mesh.shape[name] for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    if math.prod(sizes.values()) == 1:
        return run(q_BTHK, k_BGTK, v_BGTV, segment_BT, sink_H)
    rows, heads = axes_of("batch", B, sizes), axes_of("heads", H, sizes)
    if G % (tensor := math.prod(sizes[name] for name in heads or ())):  # as few copies of the keys as make them divide
        copies = math.lcm(G, tensor) // G
        k_BGTK, v_BGTV = jnp.repeat(k_BGTK, copies, 1), jnp.repeat(v_BGTV, copies, 1)
    of_queries, of_keys = PartitionSpec(rows, None, heads), PartitionSpec(rows, heads)
    specs = (of_queries, of_keys, of_keys, PartitionSpec(rows), PartitionSpec(heads))
    return jax.shard_map(run, in_specs=specs, out_specs=of_queries, check_vma=False)(q_BTHK, k_BGTK, v_BGTV, segment_BT, sink_H)
