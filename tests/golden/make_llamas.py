"""Makes the golden Llamas of this folder: `python tests/golden/make_llamas.py` where torch and transformers are installed.

`llama` has a head of its own, heads that are not width / heads wide, Llama 3.1's stretched positions and transformers 5's spelling of them; `llama-tied` has
none of these, but biases, YaRN, square projections and the older spelling. Sizes and weights as in make_goldens.py. NAME/ is a Hugging Face folder in float32;
NAME.npz holds transformers' answers in float32 with eager attention: tokens_BT, logits_BTV, hidden_LBTD (as in make_goldens.py), and padded_BTV: logits where
mask_BT hides tokens at the left.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

HERE = Path(__file__).parent
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32, rope_theta=100.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=100.0)
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(
        vocab_size=101, hidden_size=20, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        max_position_embeddings=128, rms_norm_eps=1e-5, rope_parameters=LLAMA3, bos_token_id=99, eos_token_id=[100, 7],
    ),
    "llama-tied": dict(
        vocab_size=89, hidden_size=24, intermediate_size=29, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
        max_position_embeddings=64, rms_norm_eps=1e-4, rope_parameters=YARN, bos_token_id=87, eos_token_id=88,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
    ),
}  # fmt: skip
B, T = 3, 8


def main() -> None:
    for seed, (name, settings) in enumerate(MODELS.items()):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, attn_implementation="eager")).eval()
        random = np.random.default_rng([7, seed])
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(draw(random, key, tuple(parameter.shape))))
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(written(model.config), indent=1, sort_keys=True) + "\n")
        tied = ("lm_head.weight",) if settings.get("tie_word_embeddings") else ()
        weights = {key: value.numpy() for key, value in model.state_dict().items() if key not in tied}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        tokens, mask = random.integers(0, settings["vocab_size"], (B, T)), np.arange(T) >= np.array([[0], [4], [T - 1]])
        read = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        given = {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask.astype(np.int64))}
        with torch.no_grad():
            plain = read(given["input_ids"], output_hidden_states=True)
            padded = read(**given, position_ids=torch.from_numpy(np.maximum(mask.cumsum(-1) - 1, 0)))
            assert torch.equal(plain.logits, model(given["input_ids"]).logits), "the folder is not the model"
        hidden = np.stack([state.numpy() for state in plain.hidden_states])
        answers = dict(tokens_BT=tokens.astype(np.int32), logits_BTV=plain.logits.numpy(), hidden_LBTD=hidden, mask_BT=mask, padded_BTV=padded.logits.numpy())
        np.savez_compressed(HERE / f"{name}.npz", **answers)


def written(config: Any) -> dict[str, Any]:
    """What config.json holds: for `llama-tied` as transformers 4 wrote it."""
    tree = config.to_dict()
    if config.tie_word_embeddings:
        rope = tree.pop("rope_parameters")
        tree |= dict(rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
        del tree["head_dim"]
    return tree


def draw(random: np.random.Generator, key: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    values = random.standard_normal(shape).astype(np.float32)
    if "norm" in key:
        return (1 + 0.3 * values).astype(np.float32)
    if "embed" in key:
        return 0.1 * values  # small enough that the norms' epsilon shows
    return (values / np.sqrt(shape[1])).astype(np.float32) if len(shape) == 2 else 0.3 * values


if __name__ == "__main__":
    main()
