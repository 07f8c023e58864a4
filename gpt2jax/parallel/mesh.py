"""The device mesh, and where arrays lie on it. The table of axes is in table.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gpt2jax.config import Config, MeshConfig
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import map_named, map_variables
from gpt2jax.parallel.table import spec

Tree = TypeVar("Tree")


def mesh_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """The size of each axis, the one that is -1 filled. InputError unless their product is the number of devices."""
    sizes = {name: getattr(config, name) for name in ("data", "fsdp", "expert", "sequence", "tensor")}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    filled = {name: devices // fixed if size == -1 else size for name, size in sizes.items()}
    if math.prod(filled.values()) != devices:
        named = " x ".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "data=1"
        raise InputError(f"mesh {named} does not make {devices} devices; choose sizes whose product is {devices}, or -1 for one of them")
    return filled


def training_mesh(config: Config) -> Mesh:
    """All devices as config.mesh says, the last axis over the nearest ones. InputError for sizes that do not divide what they split."""
    devices = jax.devices()
    sizes = mesh_sizes(config.mesh, len(devices))
    check_divisible(config, sizes)
    if len(devices) == 1 or devices[0].platform == "cpu":
        grid = np.array(devices).reshape(*sizes.values())
    else:
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(tuple(sizes.values()), devices)  # follows the wires of a TPU slice
    return Mesh(grid, tuple(sizes))


def check_divisible(config: Config, sizes: dict[str, int]) -> None:
    """InputError, before anything is compiled, if a mesh axis would split something unevenly. Key/value heads may be fewer: they then lie whole."""
    model, train = config.model, config.train
    rows = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    for key, number, parts, axis in (
        ("train.batch_size", train.batch_size, rows, "data x fsdp x expert"),
        ("train.sequence_length", config.sequence_length, sizes["sequence"], "sequence"),
        ("model.n_embd", model.n_embd, sizes["fsdp"], "fsdp"),
        ("model.n_head", model.n_head, sizes["tensor"], "tensor"),
        ("the MLP's width", model.mlp_width, sizes["tensor"], "tensor"),
        ("model.moe_experts", model.moe_experts if model.mlp == "moe" else 0, sizes["expert"], "expert"),
        ("the padded vocabulary", model.padded_vocab_size, sizes["tensor"], "tensor"),
    ):
        if number % parts:
            own = "give a new run a larger model.vocab_multiple" if "vocabulary" in key else f"make it a multiple of {parts}"
            raise InputError(f"{key}={number} cannot be shared evenly by mesh {axis}={parts}; {own}, or choose another mesh")


def parameter_shardings(model: GPT2, mesh: Mesh) -> dict[str, NamedSharding]:
    """Where each parameter lies, by name; `model` may be abstract. Stacked blocks have a leading axis more than the names say, and vectors lie whole."""

    def place(name: str, variable: nnx.Variable[Any]) -> NamedSharding:
        axes = variable.get_metadata().get("axes", ())
        axes = axes if len(axes) > 1 else (None,) * len(axes)
        axes = (None,) * (variable.ndim - len(axes)) + tuple(axes)
        return NamedSharding(mesh, spec(axes, variable.shape, mesh))

    return map_variables(place, model)


def shardings_like(tree: Any, parameters: dict[str, NamedSharding], mesh: Mesh) -> Any:
    """Where the leaves of an optimizer's state (abstract arrays) lie: one that is kept for a parameter lies as the parameter does, all others lie whole."""

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = next((key.key for key in path if getattr(key, "key", None) in parameters), None)
        whole = NamedSharding(mesh, PartitionSpec())
        return whole if name is None or len(parameters[name].spec) != leaf.ndim else parameters[name]

    return jax.tree.map_with_path(place, tree)


def place_rows(read: Callable[[slice], tuple[np.ndarray, np.ndarray]], rows: int, tokens: int, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """A global batch of inputs and targets, int32 [rows, tokens] each, spread as the table says. `read` gives rows of it as host arrays: each process reads
    only those that its own devices hold."""
    sharding = NamedSharding(mesh, spec(("batch", "tokens"), (rows, tokens), mesh))
    known: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def place(which: int) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(rows)
            if (start, stop) not in known:
                known[start, stop] = read(slice(start, stop))
            return known[start, stop][which][:, index[1]]

        return jax.make_array_from_callback((rows, tokens), sharding, part)

    return place(0), place(1)


def rows_held(rows: int, tokens: int, mesh: Mesh) -> list[int]:
    """The rows of a global batch that this process's devices hold."""
    sharding = NamedSharding(mesh, spec(("batch", "tokens"), (rows, tokens), mesh))
    parts = [range(*index[0].indices(rows)) for index in sharding.addressable_devices_indices_map((rows, tokens)).values() if index is not None]
    return sorted({row for part in parts for row in part})


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
    shardings = parameter_shardings(model, mesh)
    return map_named(lambda name, leaf: jax.device_put(leaf, shardings[name]), model)


def rows_sharding(model: GPT2, rows: int) -> NamedSharding | None:
    """Where a batch's rows go: spread over the mesh that the model lies on, whole if they don't divide evenly; None for a model on one device."""
    sharding = jax.tree.leaves(model)[0].sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    return NamedSharding(sharding.mesh, spec(("batch",), (rows,), sharding.mesh))
