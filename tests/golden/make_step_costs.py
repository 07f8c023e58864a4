"""Makes step_costs.json: what the compiled training step costs at fixed shapes, by jax's version, so that a change which makes it dearer is seen.

    python tests/golden/make_step_costs.py           (seconds; adds this jax's figures, or renews them)
    python tests/golden/make_step_costs.py --print   (writes nothing)

Figures are XLA's own for a CPU with AVX2, whichever this one is: floating-point operations, bytes accessed, and bytes of temporaries.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_cpu_max_isa=AVX2 --xla_force_host_platform_device_count=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

from gpt2jax.config import ModelConfig, OptimizerConfig
from gpt2jax.model.parameters import abstract_model
from gpt2jax.training.optimizer import make_optimizer, make_schedule
from gpt2jax.training.step import init_state, make_train_step

B, T = 4, 640
CASES = {
    "float32": dict(),
    "bfloat16": dict(compute_dtype="bfloat16"),
    "float32, remat=block, accumulation=2": dict(remat="block", accumulation=2),
}


def costs(remat: str = "none", accumulation: int = 1, **changes: object) -> dict[str, int]:
    config = ModelConfig(vocab_size=2000, n_positions=T, n_layer=3, n_head=6, n_embd=192, **changes)
    options = OptimizerConfig()
    optimizer = make_optimizer(options, 10, abstract_model(config))
    step = make_train_step(config, optimizer, make_schedule(options, 10), 1e-3, 0, remat, loss_chunk=512, accumulation=accumulation)
    batch = jax.ShapeDtypeStruct((B, T), jnp.int32)
    compiled = step.lower(init_state(config, optimizer, 0), batch, batch).compile()
    analysis = compiled.cost_analysis()
    return {"flops": int(analysis["flops"]), "bytes_accessed": int(analysis["bytes accessed"]), "temporaries": compiled.memory_analysis().temp_size_in_bytes}


if __name__ == "__main__":
    found = {name: costs(**case) for name, case in CASES.items()}
    if "--print" in sys.argv:
        print(json.dumps(found))
    else:
        path = Path(__file__).with_name("step_costs.json")
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**known, jax.__version__: found}, indent=1, sort_keys=True) + "\n")
