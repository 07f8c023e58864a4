"""The device mesh. Today one axis, `data`: each device holds all parameters and takes an equal share of a batch's rows."""

from __future__ import annotations

from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2jax.errors import InputError

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
