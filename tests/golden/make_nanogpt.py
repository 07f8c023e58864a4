"""Makes nanogpt.npz: the loss curve of nanoGPT's training step (github.com/karpathy/nanoGPT, model.py and train.py), written anew in PyTorch.

    python tests/golden/make_nanogpt.py      (needs torch; seconds)

Nothing of gpt2jax is imported. Initial weights are the state_dict's arrays by name; biases and norms are not at 0 and 1, so that each of them counts.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

LAYERS, HEADS, WIDTH, VOCAB, CONTEXT, BATCH, STEPS = 2, 3, 12, 29, 10, 4, 50
RATE, LEAST, WARMUP, DECAY_STEPS, DECAY, BETAS, CLIP = 1e-2, 1e-3, 7, 40, 0.1, (0.9, 0.95), 1.0


def initial_weights() -> dict[str, torch.Tensor]:
    random = np.random.default_rng(0)
    draw = lambda *shape, std=0.02, mean=0.0: torch.tensor(random.normal(mean, std, shape), dtype=torch.float32)  # noqa: E731
    weights = {"transformer.wte.weight": draw(VOCAB, WIDTH, std=0.2), "transformer.wpe.weight": draw(CONTEXT, WIDTH, std=0.2)}
    for i in range(LAYERS):
        h = f"transformer.h.{i}"
        for norm in ("ln_1", "ln_2"):
            weights |= {f"{h}.{norm}.weight": draw(WIDTH, mean=1.0, std=0.1), f"{h}.{norm}.bias": draw(WIDTH, std=0.1)}
        for name, outputs, inputs in (("attn.c_attn", 3, 1), ("attn.c_proj", 1, 1), ("mlp.c_fc", 4, 1), ("mlp.c_proj", 1, 4)):
            weights |= {f"{h}.{name}.weight": draw(outputs * WIDTH, inputs * WIDTH, std=0.2), f"{h}.{name}.bias": draw(outputs * WIDTH, std=0.1)}
    return weights | {"transformer.ln_f.weight": draw(WIDTH, mean=1.0, std=0.1), "transformer.ln_f.bias": draw(WIDTH, std=0.1)}


def loss_of(w: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """nanoGPT's GPT.forward with targets: pre-norm blocks, fused query/key/value, erf GELU, the token table as head, ignore_index=-1."""
    B, T = inputs.shape
    x = w["transformer.wte.weight"][inputs] + w["transformer.wpe.weight"][:T]
    linear = lambda x, name: F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])  # noqa: E731
    norm = lambda x, name: F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)  # noqa: E731
    for i in range(LAYERS):
        h = f"transformer.h.{i}"
        q, k, v = (y.view(B, T, HEADS, -1).transpose(1, 2) for y in linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(WIDTH, 2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        weights = F.softmax(scores.masked_fill(~torch.tril(torch.ones(T, T, dtype=torch.bool)), float("-inf")), -1)
        x = x + linear((weights @ v).transpose(1, 2).reshape(B, T, WIDTH), f"{h}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")), f"{h}.mlp.c_proj")
    logits = norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T
    return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1), ignore_index=-1)


def learning_rate(step: int) -> float:
    """train.py's get_lr: linear warm-up, cosine to the least."""
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    if step > DECAY_STEPS:
        return LEAST
    return LEAST + 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / (DECAY_STEPS - WARMUP))) * (RATE - LEAST)


def main() -> None:
    torch.use_deterministic_algorithms(True)
    weights = initial_weights()
    before = {name: leaf.numpy().copy() for name, leaf in weights.items()}
    tokens = np.random.default_rng(1).integers(0, VOCAB, (STEPS, BATCH, CONTEXT + 1))
    tokens[:, :, 1:] = np.where(np.random.default_rng(2).random((STEPS, BATCH, CONTEXT)) < 0.5, (tokens[:, :, :-1] * 5 + 3) % VOCAB, tokens[:, :, 1:])
    for leaf in weights.values():
        leaf.requires_grad_()
    # configure_optimizers: what has two axes or more decays, the tables too
    groups = [
        {"params": [leaf for leaf in weights.values() if leaf.dim() >= 2], "weight_decay": DECAY},
        {"params": [leaf for leaf in weights.values() if leaf.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS)
    losses, norms, rates = [], [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = loss_of(weights, torch.tensor(tokens[step, :, :-1]), torch.tensor(tokens[step, :, 1:]))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(list(weights.values()), CLIP).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        rates.append(learning_rate(step))
    curve = dict(losses=np.float32(losses), norms=np.float32(norms), rates=np.float64(rates), tokens=tokens.astype(np.uint8))
    np.savez_compressed(Path(__file__).with_name("nanogpt.npz"), **curve, **before)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; gradient norm {min(norms):.2f} to {max(norms):.2f}")


if __name__ == "__main__":
    main()
