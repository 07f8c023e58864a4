"""The TPU's kernel, interpreted on a CPU, equals the plain path, forward and gradient, on one device and on a mesh."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from kernels_helpers import Example, operations, shapes

from gpt2jax.kernels import backends, splash
from gpt2jax.kernels.attention import Rule
from gpt2jax.kernels.platform import lowering_for


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> backends.Callable[..., jax.Array]:
    monkeypatch.setattr(splash, "attend_splash", functools.partial(splash.attend_splash, interpret=True))

    def call(*args: object, **options: object) -> jax.Array:
        with lowering_for("tpu"):
            return backends.attention(*args, backend="splash", **options)

    return call


@pytest.mark.parametrize(
    "example",
    [
        Example(T=1, H=2, G=1, K=16, V=16),
        Example(T=127, H=4, G=2, K=24, V=10, packed=True, sinks=True, rule=Rule(softcap=5.0, scale=0.3)),
        Example(T=128, H=2, G=2, K=64, V=64, packed=True, rule=Rule(window=50)),
        pytest.param(Example(T=1000, H=4, G=2, K=10, V=6, packed=True, sinks=True, rule=Rule(window=300)), marks=pytest.mark.slow),
        pytest.param(Example(T=1024, H=1, G=1, K=64, V=64), marks=pytest.mark.slow),
    ],
    ids=lambda example: f"{example.T}",
)
def test_equals_the_plain_path(example: Example, attend: backends.Callable[..., jax.Array]) -> None:
    example.check(attend)


def test_the_kernel_runs_and_nothing_else(attend: backends.Callable[..., jax.Array]) -> None:
    names = operations(attend, *shapes(2, 150, 3, 8))
    assert names.count("pallas_call") == 3, "forward, and backward for queries and for keys"
    assert not {"scan", "while", "exp"} & {*names}


#: On 4 devices: key heads that `tensor` divides, key heads that it does not, and rows that `data` does not divide.
ON_A_MESH = """
import functools
import jax
from kernels_helpers import Example, operations
from gpt2jax.kernels.attention import CAUSAL
from gpt2jax.kernels.splash import attend_splash
from gpt2jax.kernels.spread import on_mesh

def attend(q, k, v, segment=None, sink=None, *, rule=CAUSAL):
    return on_mesh(functools.partial(attend_splash, interpret=True, rule=rule), q, k, v, segment, sink)

for shape, G in (((2, 2), 2), ((2, 2), 3), ((4, 1), 1)):
    example = Example(T=20, H=2 * G if G > 1 else 5, G=G, K=8, V=4, sinks=True)
    with jax.set_mesh(jax.make_mesh(shape, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        example.check(attend)
        assert "shard_map" in operations(attend, *(example.inputs[name] for name in "qkv"))
print("alike")
"""


@pytest.mark.slow
def test_a_mesh_splits_rows_and_heads() -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4"}
    result = subprocess.run([sys.executable, "-c", ON_A_MESH], cwd=Path(__file__).parent, capture_output=True, text=True, env=environment)
    assert result.stdout == "alike\n", result.stderr[-3000:]
