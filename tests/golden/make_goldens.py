"""Makes the golden GPT-2s of this folder: `python tests/golden/make_goldens.py` where torch and transformers are installed.

Four have the head count of a released size and a narrow width; `inner` has n_inner and the erf GELU. Weights, biases and norm scales are all random, and no
two sizes of a model are equal, so that a wrong transpose, split or order changes the result. NAME/ is a Hugging Face folder in float32; NAME.npz holds
transformers' answers to it in float32 with eager attention: tokens_BT, logits_BTV and hidden_LBTD (the embeddings, then each block's output; the last one
after the final norm).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

HERE = Path(__file__).parent
#: layers, heads, head width, context, vocabulary
SHAPES = {
    "gpt2": (2, 12, 3, 9, 101),
    "gpt2-medium": (3, 16, 2, 11, 89),
    "gpt2-large": (1, 20, 2, 10, 79),
    "gpt2-xl": (3, 25, 2, 8, 97),
    "inner": (2, 4, 3, 9, 61),
}
EXTRA = {"inner": dict(n_inner=31, activation_function="gelu")}
BATCH = 5


def main() -> None:
    for seed, (name, (layers, heads, head_width, context, vocabulary)) in enumerate(SHAPES.items()):
        sizes = dict(n_layer=layers, n_head=heads, n_embd=heads * head_width, n_positions=context, vocab_size=vocabulary)
        ends = dict(bos_token_id=vocabulary - 1, eos_token_id=vocabulary - 1)
        config = transformers.GPT2Config(**sizes, **ends, **EXTRA.get(name, {}), attn_implementation="eager")
        model = transformers.GPT2LMHeadModel(config).eval()
        random = np.random.default_rng(seed)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(draw(random, key, tuple(parameter.shape))))
            tokens = random.integers(0, vocabulary, (BATCH, context - 2))
            answer = model(torch.from_numpy(tokens), output_hidden_states=True)
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1, sort_keys=True) + "\n")
        weights = {key: value.numpy() for key, value in model.transformer.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        hidden = np.stack([state.numpy() for state in answer.hidden_states])
        np.savez_compressed(HERE / f"{name}.npz", tokens_BT=tokens.astype(np.int32), logits_BTV=answer.logits.numpy(), hidden_LBTD=hidden)


def draw(random: np.random.Generator, key: str, shape: tuple[int, ...]) -> np.ndarray:
    values = random.standard_normal(shape).astype(np.float32)
    if "ln_" in key:
        return (key.endswith("weight") + 0.3 * values).astype(np.float32)
    if "wte" in key or "wpe" in key:
        return 0.1 * values  # small enough that the norms' epsilon shows
    return (values / np.sqrt(shape[0])).astype(np.float32) if len(shape) == 2 else 0.3 * values


if __name__ == "__main__":
    main()
