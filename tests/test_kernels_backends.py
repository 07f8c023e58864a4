"""Which schedule a name stands for, what is refused and why, and that the chosen one is what runs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels_helpers import Example, operations, shapes

from gpt2jax.config import ModelConfig
from gpt2jax.errors import InputError
from gpt2jax.kernels.attention import Rule, attend_causally
from gpt2jax.kernels.backends import BACKENDS, Case, attention, choose, describe
from gpt2jax.kernels.platform import lowering_for, target_platform

CPU = Case(platform="cpu", dtype="float32", T=1024, heads=12, kv_heads=12, key_width=64, value_width=64)
GPU = dataclasses.replace(CPU, platform="gpu", dtype="bfloat16")
TPU = dataclasses.replace(GPU, platform="tpu")
ALL = dict(segments=True, window=9, softcap=5.0, sinks=True)


@pytest.mark.parametrize(
    ("case", "changes", "wanted"),
    [
        (CPU, {}, "flash"), (CPU, dict(T=128), "flash"), (CPU, dict(T=127), "xla"), (CPU, ALL, "flash"), (CPU, dict(dropout=True), "xla"),
        (CPU, dict(dtype="bfloat16", kv_heads=3, key_width=96), "flash"),
        (GPU, {}, "cudnn"), (GPU, dict(T=1), "cudnn"), (GPU, dict(dtype="float16", window=9, kv_heads=3, value_width=40), "cudnn"),
        (GPU, dict(dtype="float32"), "flash"), (GPU, dict(dtype="float32", T=1023), "xla"), (GPU, dict(segments=True), "flash"),
        (GPU, dict(softcap=5.0), "flash"), (GPU, dict(sinks=True), "flash"), (GPU, dict(dropout=True), "xla"),
        (GPU, dict(key_width=136), "flash"), (GPU, dict(value_width=136), "flash"), (GPU, dict(key_width=256, capability=(9, 0)), "cudnn"),
        (GPU, dict(key_width=264, capability=(9, 0)), "flash"), (GPU, dict(capability=(7, 5)), "flash"), (GPU, dict(capability=None), "flash"),
        (TPU, {}, "splash"), (TPU, ALL, "splash"), (TPU, dict(dtype="float32", kv_heads=1, value_width=40), "splash"), (TPU, dict(T=128), "splash"),
        (TPU, dict(precision="float32"), "flash"), (TPU, dict(dtype="float32", precision="float32"), "splash"), (TPU, dict(precision="bfloat16"), "splash"),
        (TPU, dict(T=127), "xla"), (TPU, dict(dropout=True), "xla"), (TPU, dict(dtype="float16"), "flash"), (TPU, dict(dtype="float16", T=1023), "xla"),
    ],
)  # fmt: skip
def test_auto_takes_what_suits_device_shape_and_dtype(case: Case, changes: dict[str, object], wanted: str) -> None:
    case = dataclasses.replace(case, **changes)
    assert choose("auto", case) == wanted
    assert choose(wanted, case) == wanted, "what auto takes can be named"
    assert choose("xla", case) == "xla"


@pytest.mark.parametrize(
    ("backend", "case", "changes", "reason"),
    [
        ("flash", CPU, dict(dropout=True), "has no dropout on attention weights (model.attn_pdrop, which 0 turns off); .* takes xla here"),
        ("splash", CPU, {}, "is a kernel for TPUs, and this is a cpu; use model.attention_backend=auto, which takes flash here"),
        ("splash", TPU, dict(dropout=True), "has no dropout"),
        ("splash", TPU, dict(dtype="float16"), "computes in float32 or bfloat16, and model.compute_dtype is float16"),
        ("splash", TPU, dict(precision="highest"), "can't multiply bfloat16 at jax_default_matmul_precision=highest"),
        ("cudnn", CPU, {}, "is a kernel for NVIDIA's GPUs, and this is a cpu"),
        ("cudnn", TPU, {}, "is a kernel for NVIDIA's GPUs, and this is a tpu"),
        ("cudnn", GPU, dict(capability=None), "is a kernel for NVIDIA's GPUs, and this is an AMD gpu"),
        ("cudnn", GPU, dict(capability=(7, 5)), "needs a GPU of compute capability 8.0 (Ampere) or above, and this one has 7.5"),
        ("cudnn", GPU, dict(dtype="float32"), "computes in bfloat16 or float16, and model.compute_dtype is float32"),
        ("cudnn", GPU, dict(key_width=136), "has heads of at most 128 on this GPU, and these are 136 wide"),
        ("cudnn", GPU, dict(segments=True), "can't mark padding or packed documents"),
        ("cudnn", GPU, dict(softcap=5.0), "has no cap on scores (model.attention_softcap=5.0)"),
        ("cudnn", GPU, dict(sinks=True), "has no sinks (model.attention_sinks)"),
        ("cudnn", GPU, dict(dropout=True), "has no dropout"),
        ("flush", CPU, {}, "is unknown; it is one of auto, xla, flash, splash, cudnn"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(backend: str, case: Case, changes: dict[str, object], reason: str) -> None:
    reason = reason.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(InputError, match=f"^model.attention_backend={backend} {reason}"):
        choose(backend, dataclasses.replace(case, **changes))


def test_the_choice_is_described_for_a_config() -> None:
    config = ModelConfig()
    assert describe(config, 1024) == "attention: flash (auto on cpu, T=1024, float32)"
    assert describe(config, 64) == "attention: xla (auto on cpu, T=64, float32)"
    assert describe(config, 1024, "tpu") == "attention: splash (auto on tpu, T=1024, float32)"
    assert describe(ModelConfig(compute_dtype="bfloat16"), 1024, "cuda") == "attention: cudnn (auto on gpu, T=1024, bfloat16)"
    assert describe(ModelConfig(compute_dtype="bfloat16"), 1024, "cuda", segments=True) == "attention: flash (auto on gpu, T=1024, bfloat16)"
    assert describe(ModelConfig(attention_backend="xla"), 1024) == "attention: xla (as named, on cpu, T=1024, float32)"
    assert describe(ModelConfig(attn_pdrop=0.1), 1024) == "attention: xla (auto on cpu, T=1024, float32)"
    assert describe(ModelConfig(attn_pdrop=0.1), 1024, training=False) == "attention: flash (auto on cpu, T=1024, float32)"
    for name, changes in (("window", dict(sliding_window=8)), ("cap", dict(attention_softcap=5.0)), ("sinks", dict(attention_sinks=True))):
        wanted = "cudnn" if name == "window" else "flash"
        assert describe(ModelConfig(compute_dtype="bfloat16", **changes), 1024, "gpu").startswith(f"attention: {wanted} "), name
    with pytest.raises(InputError, match="136 wide"):
        describe(ModelConfig(compute_dtype="bfloat16", head_dim=136, attention_backend="cudnn"), 1024, "gpu")
    with pytest.raises(InputError, match="dropout"):
        describe(ModelConfig(attn_pdrop=0.1, attention_backend="flash"), 1024)
    with pytest.raises(InputError, match="platform 'abacus' is unknown"):
        describe(config, 8, "abacus")


def test_the_names_are_the_configs() -> None:
    annotation = inspect.get_annotations(ModelConfig, eval_str=True)["attention_backend"]
    assert annotation.__origin__.__args__ == BACKENDS


def test_programs_are_lowered_for_another_platform_only_inside_the_context() -> None:
    assert target_platform() == "cpu"
    with lowering_for("cuda"):
        assert target_platform() == "gpu"
        with lowering_for("tpu"):
            assert target_platform() == "tpu"
        assert target_platform() == "gpu"
    assert target_platform() == "cpu"
    program = jax.jit(lambda *qkv: attention(*qkv))
    assert "pallas_call" not in str(program.trace(*shapes(1, 128, 2, 8)).jaxpr)
    with lowering_for("tpu"):  # the same function and shapes again
        assert "pallas_call" in str(program.trace(*shapes(1, 128, 2, 8)).jaxpr)


def test_the_chosen_schedule_runs() -> None:
    """flash has loops, a TPU's is Pallas; the plain path is neither."""
    for T, backend, platform, wanted in ((128, "auto", "cpu", "while"), (127, "auto", "cpu", None), (128, "xla", "cpu", None), (127, "flash", "cpu", "while"),
                                         (128, "auto", "tpu", "pallas_call"), (127, "auto", "tpu", None)):  # fmt: skip
        with lowering_for(platform):
            names = operations(lambda *qkv, backend=backend: attention(*qkv, backend=backend), *shapes(1, T, 2, 8))
        assert {"while", "pallas_call"} & {*names} == ({wanted} if wanted else set()), (T, backend, platform)


def test_dropout_is_the_plain_paths() -> None:
    example, key = Example(T=20, H=2, G=1, K=4, V=4), jax.random.key(5)
    q, k, v = (example.inputs[name] for name in "qkv")
    dropped, whole = attention(q, k, v, dropout_rate=0.3, dropout_key=key), attention(q, k, v)
    np.testing.assert_array_equal(dropped, attend_causally(q, k, v, dropout_rate=0.3, dropout_key=key))
    np.testing.assert_array_equal(attention(q, k, v, dropout_rate=0.3), whole)
    assert jnp.abs(dropped - whole).max() > 0.1
    with pytest.raises(InputError, match="has no dropout"):
        attention(q, k, v, backend="flash", dropout_rate=0.3, dropout_key=key)


def test_a_window_wider_than_the_text_is_none() -> None:
    """2**31 - 1, said for "no limit", would overflow where blocks are counted."""
    wide, none = (Example(T=300, H=2, G=1, K=8, V=4, rule=Rule(window=window)) for window in (2**31 - 1, None))
    flash = functools.partial(attention, backend="flash")
    for name, want in none.evaluate(flash).items():
        np.testing.assert_array_equal(wide.evaluate(flash)[name], want, err_msg=name)


#: cuDNN's part is not there on a CPU, so that compiling ends where the program is whole: XLA looks for it. JAX's own checks of the GPU are answered for it.
ON_MESHES = """
import jax, jax.numpy as jnp, numpy as np
import jax._src.cudnn.fused_attention_stablehlo as checks
checks.check_cudnn_version, checks.check_compute_capability, checks.is_cuda_compute_capability_equal = lambda: 91000, lambda *a: True, lambda *a: False
from jax.sharding import NamedSharding
from gpt2jax.kernels.backends import attention
from gpt2jax.kernels.platform import lowering_for
from gpt2jax.parallel.table import spec
for shape, G in (((2, 2, 2), 4), ((1, 1, 4), 2), ((2, 1, 2), 1), ((1, 8, 1), 4), ((1, 3, 1), 4)):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("fsdp", "sequence", "tensor"))
    def like(axes, *shape):
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec(axes, shape, mesh)))
    q, k = like(("batch", "tokens", "heads", None), 4, 64, 4, 16), like(("batch", "kv_heads", "tokens", None), 4, G, 64, 16)
    with jax.set_mesh(mesh), lowering_for("gpu"):
        gradient = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v, backend="cudnn").astype("float32").sum(), (0, 1, 2)))
        try:
            gradient.trace(q, k, k).lower(lowering_platforms=("cuda",)).compile()
        except jax.errors.JaxRuntimeError as error:
            assert "No registered implementation" in str(error) and "cudnn$fmha" in str(error), (shape, error)
print("whole")
"""


@pytest.mark.slow
def test_cudnn_is_split_on_any_mesh() -> None:
    """Also where `tensor` is larger than the key heads, and where `sequence` cuts tokens: both are refused by JAX's own partitioning."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    result = subprocess.run([sys.executable, "-c", ON_MESHES], capture_output=True, text=True, env=environment)
    assert result.stdout == "whole\n", result.stderr[-2000:]
