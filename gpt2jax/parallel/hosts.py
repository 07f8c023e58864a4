"""Several hosts: joining them, finding out that they disagree, and speaking with one voice."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from gpt2jax.config import HostsConfig
from gpt2jax.errors import InputError

#: Environment variables that name more than one process, and from which JAX itself finds the rest (Slurm, Open MPI, a TPU slice, its own).
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "JAX_NUM_PROCESSES")
_NAMED = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")


def join(config: HostsConfig) -> None:
    """Become one of several processes, before anything else asks JAX for devices; nothing in a single one, or if this was done.

    Addresses come from config.hosts, or else from the environment of Slurm, Open MPI or a TPU slice. InputError if the others can't be reached in time.
    """
    given = {name: value for name, value in (("hosts.coordinator", config.coordinator), ("hosts.count", config.count), ("hosts.index", config.index))}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) not in (0, len(given)):
        raise InputError(f"{' and '.join(missing)} must be given too: several hosts need hosts.coordinator, hosts.count and hosts.index")
    if config.count is not None and config.index is not None and config.index >= config.count:
        raise InputError(f"hosts.index={config.index} is not one of hosts.count={config.count}; indices count from 0")
    if jax.distributed.is_initialized() or (missing and not _in_a_cluster(os.environ)):
        return
    try:
        jax.distributed.initialize(
            config.coordinator, config.count, config.index, initialization_timeout=config.timeout, heartbeat_timeout_seconds=config.timeout
        )
    except (RuntimeError, ValueError) as error:
        where = f"at {config.coordinator} " if config.coordinator else ""
        raise InputError(f"the hosts did not come together {where}within hosts.timeout={config.timeout} s: {' '.join(str(error).split())[:200]}") from None


def _in_a_cluster(environment: Mapping[str, str]) -> bool:
    counts = (environment.get(name, "") for name in _COUNTS)
    return any(count.isdecimal() and int(count) > 1 for count in counts) or any("," in environment.get(name, "") for name in _NAMED)


def several_hosts() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process is the one that writes logs and lays out folders."""
    return jax.process_index() == 0


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """What other processes than the first print goes nowhere; errors still come."""
    if is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def agree(facts: Mapping[str, str]) -> None:
    """InputError, naming the fact and the hosts, unless every process passes the same values. Every process must call it."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    mine = np.stack([np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8) for value in facts.values()])
    everyones = np.asarray(multihost_utils.process_allgather(mine))
    for i, name in enumerate(facts):
        others = [str(host) for host in range(len(everyones)) if not np.array_equal(everyones[host, i], everyones[0, i])]
        if others:
            raise InputError(f"the hosts disagree on {name}: process {', '.join(others)} has another than process 0; start all with the same")


def wait(name: str) -> None:
    """Every process comes here before any goes on."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def any_of(flag: int) -> int:
    """The largest of all processes' numbers. Every process must call it."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return int(np.asarray(multihost_utils.process_allgather(np.int32(flag))).max())


def code_fingerprint() -> str:
    """A hash of the package's own source."""
    package = Path(__file__).resolve().parent.parent
    files = sorted(package.rglob("*.py"))
    return hashlib.sha256(b"".join(str(file.relative_to(package)).encode() + file.read_bytes() for file in files)).hexdigest()
