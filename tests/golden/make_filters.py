"""Makes filters.json, what transformers' own pipeline of logits processors leaves of given logits: `python tests/golden/make_filters.py`.

It needs torch and transformers. transformers itself puts the processors in order (`GPT2LMHeadModel._get_logits_processor`), so the file pins the order too.
The logits and the tokens come from numpy's generator and are not stored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

ROWS, LENGTH, V, EOS = 3, 23, 97, 13
CASES: list[dict[str, Any]] = [
    dict(temperature=0.7),
    dict(top_k=1),
    dict(top_k=9),
    dict(top_p=0.01),
    dict(top_p=0.5),
    dict(top_p=0.95),
    dict(min_p=0.05),
    dict(min_p=1.0),
    dict(typical_p=0.2),
    dict(typical_p=0.9),
    dict(repetition_penalty=1.7),
    dict(repetition_penalty=0.6),
    dict(no_repeat_ngram_size=1),
    dict(no_repeat_ngram_size=2),
    dict(no_repeat_ngram_size=3),
    dict(no_repeat_ngram_size=40),
    dict(logit_bias={"5": 6.5, "96": -4.0, "0": 30.0}),
    dict(forbidden_tokens=[0, 7, 96]),
    dict(min_new_tokens=5),
    dict(min_new_tokens=4),
    dict(temperature=1.6, top_k=30, top_p=0.8, min_p=0.02, typical_p=0.9),
    dict(temperature=0.5, top_p=0.9, typical_p=0.5),
    dict(repetition_penalty=1.4, logit_bias={"3": -9.0, "4": 8.0}, no_repeat_ngram_size=2, temperature=1.3, top_k=12),
    dict(repetition_penalty=2.5, forbidden_tokens=[1, 2], min_new_tokens=9, typical_p=0.6, min_p=0.001),
]
#: Of the LENGTH tokens the last ones are new.
NEW = 4


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Tokens [ROWS, LENGTH] with many repeats, and logits [ROWS, V] of both signs."""
    draw = np.random.default_rng(11)
    return draw.integers(0, 6, (ROWS, LENGTH)), (3 * draw.standard_normal((ROWS, V)) - 1).astype(np.float32)


def answers() -> list[list[list[float | None]]]:
    """Log-probabilities after each case, None for minus infinity."""
    import torch
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=V, n_positions=64, n_embd=4, n_layer=1, n_head=1))
    tokens, logits = (torch.from_numpy(x) for x in inputs())
    results = []
    for case in CASES:
        settings = dict(case)
        bias = {(int(token),): value for token, value in settings.pop("logit_bias", {}).items()} or None
        suppressed = settings.pop("forbidden_tokens", None)
        config = transformers.GenerationConfig(
            do_sample=True, sequence_bias=bias, suppress_tokens=suppressed, eos_token_id=EOS, **{"top_k": 0, "pad_token_id": 0, **settings}
        )
        model._prepare_special_tokens(config, device="cpu")
        processors = model._get_logits_processor(generation_config=config, input_ids_seq_length=LENGTH - NEW, encoder_input_ids=tokens, device="cpu")
        scores = torch.log_softmax(processors(tokens, logits.clone()), -1)
        results.append([[None if x == -np.inf else round(float(x), 7) for x in row] for row in scores.tolist()])
    return results


def main() -> None:
    lines = ",\n".join(json.dumps(dict(settings=case, log_probs=result)) for case, result in zip(CASES, answers(), strict=True))
    Path(__file__).with_name("filters.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
