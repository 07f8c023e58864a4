"""Makes moe.npz: transformers' own answers for mixtures of experts. Run with torch and transformers: `python make_moe.py`.

`CASES` says which of transformers' blocks answers which configuration of ours. Experts are no power of two, and no two sizes are equal. An array is called
case/name: the input x, the weights under transformers' names, the answer y and the load-balance loss of `load_balancing_loss_func` (aux), float32.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]

B, T, D, F, E, K = 2, 7, 10, 9, 6, 3
SHARED = 2


class Case(NamedTuple):
    """`ours` is laid over ModelConfig's defaults; `theirs` is a block of transformers, `settings` go into its config."""

    theirs: str
    ours: dict[str, Any]
    settings: dict[str, Any]


_OLMOE = dict(num_experts=E, norm_topk_prob=False)
_DEEPSEEK = dict(n_routed_experts=E, moe_intermediate_size=F, n_shared_experts=SHARED, routed_scaling_factor=2.5, norm_topk_prob=True, n_group=1, topk_group=1)
_OUR_DEEPSEEK = dict(moe_router="sigmoid", moe_bias_rate=0.001, moe_shared=SHARED, moe_routed_scaling_factor=2.5)

CASES: dict[str, Case] = {
    "mixtral": Case("MixtralSparseMoeBlock", dict(), dict(num_local_experts=E)),
    "qwen3": Case("Qwen3MoeSparseMoeBlock", dict(), dict(num_experts=E, norm_topk_prob=True, moe_intermediate_size=F)),
    "olmoe": Case("OlmoeSparseMoeBlock", dict(moe_norm_topk_prob=False), _OLMOE),
    "deepseek": Case("DeepseekV3MoE", _OUR_DEEPSEEK, _DEEPSEEK),
    "deepseek groups": Case("DeepseekV3MoE", dict(**_OUR_DEEPSEEK, moe_groups=3, moe_topk_groups=2), _DEEPSEEK | dict(n_group=3, topk_group=2)),
    "deepseek plain": Case("DeepseekV3MoE", dict(**_OUR_DEEPSEEK, moe_norm_topk_prob=False), _DEEPSEEK | dict(norm_topk_prob=False)),
}


def inputs(name: str, seed: int | None = None) -> Arrays:
    """x and weights of a case; of those in the file without a seed."""
    draw = np.random.default_rng([list(CASES).index(name)] if seed is None else [seed, list(CASES).index(name)])
    arrays = dict(x=draw.standard_normal((B, T, D)).astype(np.float32))
    for key, tensor in _module(name).state_dict().items():
        shape = tuple(tensor.shape)
        # a bias as large as scores differ, so that it changes the choice
        arrays[key] = (draw.standard_normal(shape) * (0.3 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1]))).astype(np.float32)
    return arrays


def answer(name: str, arrays: Arrays) -> Arrays:
    """What transformers makes of them: y, of x's shape, and for softmax routers aux."""
    import torch
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    module = _module(name)
    with torch.no_grad():
        module.load_state_dict({key: torch.from_numpy(value) for key, value in arrays.items() if key != "x"})
        x = torch.from_numpy(arrays["x"])
        out = module(x)
        found = dict(y=(out[0] if isinstance(out, tuple) else out).numpy())
        if not name.startswith("deepseek"):
            found["aux"] = load_balancing_loss_func((x.reshape(-1, D) @ module.gate.weight.T,), E, K).numpy()
    return found


def _module(name: str) -> Any:
    import transformers

    case = CASES[name]
    family = next(family for family in ("Mixtral", "Qwen3Moe", "Olmoe", "DeepseekV3") if case.theirs.startswith(family))
    sizes = dict(hidden_size=D, intermediate_size=F, num_experts_per_tok=K, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    config = getattr(transformers, f"{family}Config")(**sizes, **case.settings)
    modeling = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    return getattr(modeling, case.theirs)(config).eval()


def main() -> None:
    arrays = {}
    for name in CASES:
        given = inputs(name)
        arrays |= {f"{name}/{key}": value for key, value in {**given, **answer(name, given)}.items()}
    np.savez_compressed(Path(__file__).with_name("moe.npz"), **arrays)


if __name__ == "__main__":
    main()
