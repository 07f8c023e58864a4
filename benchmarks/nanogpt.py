"""nanoGPT's training step (github.com/karpathy/nanoGPT, model.py and train.py), written anew in PyTorch, as the benchmark of steps runs it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

LAYERS, HEADS, WIDTH, VOCAB, CONTEXT = 12, 12, 768, 50304, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.mlp_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, _ = x.shape
        q, k, v = (y.view(B, T, HEADS, -1).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(WIDTH, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, WIDTH))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.ln_f = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH), nn.LayerNorm(WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, 0.02 / (math.sqrt(2 * LAYERS) if "proj" in name else 1))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(inputs) + self.wpe(torch.arange(inputs.shape[1]))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).view(-1, VOCAB), targets.view(-1), ignore_index=-1)


def make_step(dtype: str, compiled: bool, threads: int) -> Callable[[np.ndarray], float]:
    """step(tokens int [B, T + 1]) -> loss. bf16 is autocast, as in its train.py."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Model()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() >= 2) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    run = torch.compile(model) if compiled else model

    def step(tokens: np.ndarray) -> float:
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = run(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step
