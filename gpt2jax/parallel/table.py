"""The one table from logical axes to mesh axes, and the constraint that keeps activations where it says. Knows no model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

#: Mesh axes of each logical axis; all others lie whole on every device. `tensor` is Megatron's split (arXiv:1909.08053): a block's first products are split by
#: output, its second ones by input, so that each sub-layer needs one sum over devices. `fsdp` spreads every matrix and the batch (ZeRO-3, arXiv:1910.02054).
TABLE: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "embed": ("fsdp",),
    "latent": ("fsdp",),
    "batch": ("data", "fsdp", "expert"),
    "tokens": ("sequence",),
}

#: Activations of the residual stream: rows and tokens are spread, the width is whole.
STREAM = ("batch", "tokens", None)


def axes_of(axis: str | None, size: int, sizes: Mapping[str, int], used: Collection[str] = ()) -> tuple[str, ...] | None:
    """The mesh axes that a logical axis of this size is spread over, on a mesh of these sizes; None (it lies whole) if none are or they don't divide it."""
    names = tuple(name for name in TABLE.get(axis or "", ()) if sizes.get(name, 1) > 1 and name not in used)
    return names if names and size % math.prod(sizes[name] for name in names) == 0 else None


def spec(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Where an array with these logical axes lies. A mesh axis is used once, by the first logical axis that can be spread over it."""
    parts: list[tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=True):
        parts.append(axes_of(axis, size, mesh.shape, [name for part in parts for name in part or ()]))
    return PartitionSpec(*parts)


def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """x, laid where the table says, under the mesh in context (`jax.set_mesh`); x as it is without one. Said at the boundary of each block: without it XLA may
    gather a whole batch on each device."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty or mesh.size == 1 else jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def in_mesh_of(tree: Any) -> contextlib.AbstractContextManager[Any]:
    """The context of the mesh that a model's arrays lie on: kernels are split over devices by it. No context for a model on one device, or inside a trace."""
    leaf = next((leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)), None)
    if leaf is None or isinstance(leaf, jax.core.Tracer) or not isinstance(leaf.sharding, NamedSharding) or leaf.sharding.mesh.size == 1:
        return contextlib.nullcontext()
    return jax.set_mesh(leaf.sharding.mesh)  # type: ignore[arg-type]
