"""The device mesh, and where arrays lie on it.

Two axes: over `data` the rows of a batch are spread, over `tensor` the parameters that TABLE names. Training uses `data` alone so far.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import map_named, map_variables

#: The mesh axis of each logical axis that is spread; all others lie whole on every device. Megatron's split (arXiv:1909.08053): a block's first products are
#: split by output, its second ones by input, so that each sub-layer needs one sum over devices.
TABLE = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}

Tree = TypeVar("Tree")


def data_mesh(batch_size: int) -> Mesh:
    """All devices in a row. InputError if they cannot share `batch_size` rows evenly."""
    devices = jax.devices()
    if batch_size % len(devices):
        raise InputError(f"train.batch_size={batch_size} cannot be shared evenly by {len(devices)} devices; make it a multiple of {len(devices)}")
    return Mesh(np.array(devices), ("data",))


def replicate(tree: Tree, mesh: Mesh) -> Tree:
    """The same arrays on every device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def split_rows(rows: np.ndarray, mesh: Mesh) -> jax.Array:
    """[B, ...] with B's rows spread over the devices."""
    return jax.device_put(rows, NamedSharding(mesh, PartitionSpec("data")))


def shard(model: GPT2, *, data: int = 1, tensor: int = 1) -> GPT2:
    """The model on a mesh of data x tensor devices, for `gpt2jax.generate` and the forward: nothing else in those calls changes.

    Parameters are spread over `tensor` where its size divides their axis and lie whole elsewhere; rows of a batch are spread over `data`.
    InputError for a size below 1, or if there are fewer devices than the mesh has places.
    """
    devices = jax.devices()
    if data < 1 or tensor < 1:
        raise InputError(f"a mesh of data={data} x tensor={tensor} has no devices; each size must be 1 or more")
    if data * tensor > len(devices):
        raise InputError(f"a mesh of data={data} x tensor={tensor} needs {data * tensor} devices, and there are {len(devices)}; choose a smaller one")
    mesh = Mesh(np.array(devices[: data * tensor]).reshape(data, tensor), ("data", "tensor"))
    shardings = map_variables(lambda name, variable: NamedSharding(mesh, _spec(variable, mesh)), model)
    return map_named(lambda name, leaf: jax.device_put(leaf, shardings[name]), model)


def rows_sharding(model: GPT2, rows: int) -> NamedSharding | None:
    """Where a batch's rows go: spread over the mesh that the model lies on, whole if they don't divide evenly; None for a model on one device."""
    sharding = jax.tree.leaves(model)[0].sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec("data" if rows % sharding.mesh.shape["data"] == 0 else None))


def _spec(variable: nnx.Variable, mesh: Mesh) -> PartitionSpec:
    """Of the axes that the table spreads, the first whose size is a multiple of the mesh axis. Stacked blocks have a leading axis more than the names say."""
    axes = variable.get_metadata().get("axes", ())
    axes = (None,) * (variable.ndim - len(axes)) + tuple(axes)
    spread = [TABLE.get(axis or "") if size % mesh.shape["tensor"] == 0 else None for axis, size in zip(axes, variable.shape, strict=True)]
    first = next((i for i, axis in enumerate(spread) if axis), None)
    return PartitionSpec(*(axis if i == first else None for i, axis in enumerate(spread)))
