"""The one table from logical axes to mesh axes, and the constraint that keeps activations where it says. Knows no model."""

from __future__ import annotations

import math

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

#: Mesh axes of each logical axis; all others lie whole on every device. `tensor` is Megatron's split (arXiv:1909.08053): a block's first products are split by
#: output, its second ones by input, so that each sub-layer needs one sum over devices. `fsdp` spreads every matrix and the batch (ZeRO-3, arXiv:1910.02054).
TABLE: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("fsdp",),
    "batch": ("data", "fsdp", "expert"),
    "tokens": ("sequence",),
}

#: Activations of the residual stream: rows and tokens are spread, the width is whole.
STREAM = ("batch", "tokens", None)


def spec(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Where an array with these logical axes lies. A mesh axis is used once, and by the first logical axis that is a multiple of its size."""
    used: set[str] = set()
    parts = []
    for axis, size in zip(axes, shape, strict=True):
        wanted = tuple(name for name in TABLE.get(axis or "", ()) if mesh.shape.get(name, 1) > 1 and name not in used)
        if size % math.prod(mesh.shape[name] for name in wanted):
            wanted = ()
        used |= set(wanted)
        parts.append(wanted or None)
    return PartitionSpec(*parts)


def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """x, laid where the table says, under the mesh in context (`jax.set_mesh`); x as it is without one. Said at the boundary of each block: without it XLA may
    gather a whole batch on each device."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty or mesh.size == 1 else jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))
