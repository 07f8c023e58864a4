"""Attention compiled for a TPU and a GPU that are not there, on meshes of 4: the kernel is in the program, its inputs are not gathered, no T x T array is.

Each needs the vendor's compiler (the extras `tpu` and `cuda12`), and is skipped without.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: Prints facts of the compiled gradient of each case: (backend, mesh of data x tensor, dtype, T, H, G, K, segments and sinks).
COMPILE = r"""
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from gpt2jax.kernels.attention import Rule
from gpt2jax.kernels.backends import attention
from gpt2jax.kernels.platform import lowering_for

platform, target, cases = json.loads(sys.argv[1])
B = 8
if platform == "tpu":
    topology = topologies.get_topology_desc(platform="tpu", topology_name=target)
else:
    topology = topologies.get_topology_desc("", platform="cuda", target_config=target, topology="1 x 1 x 4")
for backend, shape, dtype, T, H, G, K, marked in cases:
    mesh = Mesh(np.array(topology.devices).reshape(shape), ("data", "tensor"))
    array = lambda shape, *axes, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))
    heads = "tensor" if G % shape[1] == 0 else None
    args = [array((B, T, H, K), "data", None, "tensor"), array((B, G, T, K), "data", heads), array((B, G, T, K), "data", heads)]
    marks = [array((B, T), "data", dtype="int32"), array((H,), "tensor", dtype="float32")] if marked else [None, None]

    def gradients(q, k, v, segment, sink):
        o = lambda *qkv: attention(*qkv, segment, sink, backend=backend, rule=Rule(window=T // 2)).astype(jnp.float32).sum()
        return jax.grad(o, (0, 1, 2))(q, k, v)

    with lowering_for(platform), jax.set_mesh(mesh):
        compiled = jax.jit(gradients).lower(*args, *marks).compile()
    text = compiled.as_text()
    sizes = [int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text)]
    facts = dict(kernels=len(re.findall(r'custom_call_target="(?:tpu_custom_call|__cudnn\$fmha\w*)"', text)), loops=len(re.findall(r" while\(", text)),
                 collectives=len(re.findall(r" (?:all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\(", text)),
                 largest=max(sizes), temporary=compiled.memory_analysis().temp_size_in_bytes)
    print(json.dumps(facts))
"""

A100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 167936
threads_per_core_limit: 2048 core_count: 108 fpus_per_core: 64 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 2039000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.41 device_memory_size: 84974239744 shared_memory_per_block_optin: 166912
cuda_compute_capability { major: 8 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA A100-SXM4-80GB" """


def compiled(platform: str, target: str, cases: list[tuple[Any, ...]]) -> list[dict[str, int]]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    environment.pop("JAX_DEFAULT_MATMUL_PRECISION", None)
    # libtpu asks a metadata server which TPU this is, and locks it for one process, unless told otherwise
    environment |= dict(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE="v5litepod-4", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    command = [sys.executable, "-c", COMPILE, json.dumps([platform, target, cases])]
    result = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_compiles_for_tpus_that_are_not_there() -> None:
    cases = [
        ("splash", (4, 1), "bfloat16", 4096, 3, 3, 64, False),
        ("auto", (2, 2), "bfloat16", 1000, 4, 2, 64, True),
        ("flash", (2, 2), "float32", 4096, 4, 2, 64, True),
    ]
    facts = compiled("tpu", "v5e:2x2", cases)
    for case, fact in zip(cases, facts, strict=True):
        assert fact["kernels"] == (0 if case[0] == "flash" else 3), fact
        assert fact["collectives"] == 0, fact
        assert case[3] == 1000 or fact["largest"] < 4096**2 and fact["temporary"] < 4096**2 * 2, fact


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("jax_cuda12_plugin"), reason="needs jax-cuda12-plugin")
def test_compiles_for_gpus_that_are_not_there() -> None:
    cases = [
        ("cudnn", (4, 1), "bfloat16", 4096, 3, 3, 64, False),
        ("auto", (2, 2), "bfloat16", 127, 4, 2, 60, False),
        ("auto", (2, 2), "bfloat16", 4096, 4, 2, 64, True),
    ]
    facts = compiled("gpu", A100, cases)
    assert [fact["kernels"] for fact in facts] == [2, 2, 0], "forward and backward; packed documents take flash"
    assert facts[2]["loops"] >= 2
    for case, fact in zip(cases, facts, strict=True):
        assert fact["collectives"] == 0, fact
        assert case[3] == 127 or fact["largest"] < 4096**2 and fact["temporary"] < 4096**2 * 4, fact
