"""Which schedule computes causal attention over a whole sequence: one name each, chosen from static facts while JAX traces.

Letters: B batch, T tokens, H query heads, G key/value heads (G divides H), K key width, V value width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gpt2jax.config import ModelConfig
from gpt2jax.errors import InputError
from gpt2jax.kernels.attention import CAUSAL, Rule, attend_causally
from gpt2jax.kernels.cudnn import attend_cudnn
from gpt2jax.kernels.flash import attend_flash
from gpt2jax.kernels.platform import canonical, target_platform
from gpt2jax.kernels.spread import on_mesh

BACKENDS = ("auto", "xla", "flash", "splash", "cudnn")
#: Tokens from which `auto` prefers flash to xla. On a CPU it is about as fast or faster from there on, in much less memory (benchmarks/attention.py); elsewhere
#: this is for memory, and not measured.
FLASH_FROM = {"cpu": 128, "gpu": 1024, "tpu": 1024}
#: Below this many tokens `auto` leaves a TPU's kernel, whose blocks are of 128, alone.
SPLASH_FROM = 128
#: Widest head of cuDNN's kernel; GPUs of compute capability 9 and above have 256 in `CUDNN_WIDTH_9`.
CUDNN_WIDTH, CUDNN_WIDTH_9 = 128, 256


@dataclasses.dataclass(frozen=True)
class Case:
    """What is known of an attention before it runs. platform: cpu, gpu or tpu.

    capability: a GPU's compute capability; None is a GPU without cuDNN (AMD's). One that is not there is taken for an A100. precision: JAX's
    jax_default_matmul_precision.
    """

    platform: str
    dtype: str
    T: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    segments: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: bool = False
    capability: tuple[int, int] | None = (8, 0)
    precision: str | None = None


def attention(
    q_BTHK: jax.Array,
    k_BGTK: jax.Array,
    v_BGTV: jax.Array,
    segment_BT: jax.Array | None = None,
    sink_H: jax.Array | None = None,
    *,
    rule: Rule = CAUSAL,
    backend: str = "auto",
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Each token over itself and what stands before it in its own segment, as `kernels.attention.attend_causally` says: [B, T, H, V] in v's dtype.

    segment_BT int32, a negative one marks padding: it sees nothing, nothing sees it, and its rows are zeros. InputError if `backend` can't do it.
    """
    (_, T, H, K), G, V = q_BTHK.shape, k_BGTK.shape[1], v_BGTV.shape[-1]
    if rule.window is not None and rule.window >= T:
        rule = dataclasses.replace(rule, window=None)
    case = Case(
        **_device(target_platform()), dtype=q_BTHK.dtype.name, T=T, heads=H, kv_heads=G, key_width=K, value_width=V, window=rule.window,
        softcap=rule.softcap, segments=segment_BT is not None, sinks=sink_H is not None, dropout=dropout_rate > 0 and dropout_key is not None,
    )  # fmt: skip
    name = choose(backend, case)
    if name == "xla":
        return attend_causally(q_BTHK, k_BGTK, v_BGTV, segment_BT, sink_H, rule=rule, dropout_rate=dropout_rate, dropout_key=dropout_key)
    run = functools.partial(_kernel(name), rule=rule)
    spread = functools.partial(on_mesh, run) if name in ("splash", "cudnn") else run
    o_BTHV = spread(q_BTHK, k_BGTK, v_BGTV, segment_BT, sink_H)
    # a kernel lets padding see padding, so that no row is without keys; zeros here are zero gradients there
    return o_BTHV if segment_BT is None else jnp.where((segment_BT >= 0)[:, :, None, None], o_BTHV, 0)


def choose(backend: str, case: Case) -> str:
    """The schedule that a name stands for: xla, flash, splash or cudnn. InputError, with the reason and the way out, for a named one that can't do the case."""
    if backend not in BACKENDS:
        raise InputError(f"model.attention_backend={backend} is unknown; it is one of {', '.join(BACKENDS)}")
    if backend != "auto":
        if reason := _refusal(backend, case):
            raise InputError(f"model.attention_backend={backend} {reason}; use model.attention_backend=auto, which takes {choose('auto', case)} here")
        return backend
    if case.platform == "tpu" and case.T >= SPLASH_FROM and not _refusal("splash", case):
        return "splash"
    if case.platform == "gpu" and not _refusal("cudnn", case):
        return "cudnn"
    return "flash" if case.T >= FLASH_FROM[case.platform] and not _refusal("flash", case) else "xla"


def describe(config: ModelConfig, T: int, platform: str | None = None, *, segments: bool = False, training: bool = True) -> str:
    """One line on what attention over T tokens will run on. InputError as from `choose`. segments: padding or packed documents are marked."""
    platform = canonical(platform) if platform else target_platform()
    case = Case(
        **_device(platform), dtype=config.compute_dtype, T=T, heads=config.n_head, kv_heads=config.kv_head_count, key_width=config.key_width,
        value_width=config.value_width, segments=segments, window=config.sliding_window, softcap=config.attention_softcap, sinks=config.attention_sinks,
        dropout=training and config.attn_pdrop > 0,
    )  # fmt: skip
    name = choose(config.attention_backend, case)
    how = "auto on" if config.attention_backend == "auto" else "as named, on"
    return f"attention: {name} ({how} {platform}, T={T}, {config.compute_dtype})"


def _device(platform: str) -> dict[str, Any]:
    """The facts of a Case that the arrays don't say."""
    facts: dict[str, Any] = dict(platform=platform, precision=jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
    if platform == "gpu" and jax.default_backend() == "gpu":  # else none is here to ask
        numbers = str(jax.local_devices()[0].compute_capability).split(".")
        facts["capability"] = (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else None  # AMD's are names
    return facts


def _refusal(backend: str, case: Case) -> str | None:
    """Why a schedule can't do a case."""
    if backend == "xla":
        return None
    if case.dropout:
        return "has no dropout on attention weights (model.attn_pdrop, which 0 turns off)"
    if backend == "flash":
        return None
    if backend == "splash":
        return _splash_refusal(case)
    return _cudnn_refusal(case)


def _splash_refusal(case: Case) -> str | None:
    if case.platform != "tpu":
        return f"is a kernel for TPUs, and this is a {case.platform}"
    if case.dtype not in ("float32", "bfloat16"):
        return f"computes in float32 or bfloat16, and model.compute_dtype is {case.dtype}"
    # what Mosaic compiles (libtpu 0.0.42): each product as it comes, or in full float32 if its inputs are
    if case.precision not in (None, "default", "fastest", "bfloat16", *(("highest", "float32") if case.dtype == "float32" else ())):
        return f"can't multiply {case.dtype} at jax_default_matmul_precision={case.precision}"
    return None


def _cudnn_refusal(case: Case) -> str | None:
    """From check_layout and check_is_flash_attention of jax/_src/cudnn/fused_attention_stablehlo.py (jax 0.10.2)."""
    if case.platform != "gpu" or case.capability is None:
        return f"is a kernel for NVIDIA's GPUs, and this is {'an AMD' if case.platform == 'gpu' else 'a'} {case.platform}"
    if case.capability < (8, 0):
        return f"needs a GPU of compute capability 8.0 (Ampere) or above, and this one has {case.capability[0]}.{case.capability[1]}"
    if case.dtype not in ("float16", "bfloat16"):
        return f"computes in bfloat16 or float16, and model.compute_dtype is {case.dtype}"
    widest = CUDNN_WIDTH if case.capability < (9, 0) else CUDNN_WIDTH_9
    if max(case.key_width, case.value_width) > widest:
        return f"has heads of at most {widest} on this GPU, and these are {max(case.key_width, case.value_width)} wide"
    if case.segments:
        return "can't mark padding or packed documents without a T x T mask"
    if case.softcap is not None:
        return f"has no cap on scores (model.attention_softcap={case.softcap})"
    return "has no sinks (model.attention_sinks)" if case.sinks else None


def _kernel(name: str) -> Callable[..., Any]:
    """Pallas takes half a second to import, so only who needs it does."""
    if name == "flash":
        return attend_flash
    if name == "cudnn":
        return attend_cudnn
    from gpt2jax.kernels.splash import attend_splash

    return attend_splash
