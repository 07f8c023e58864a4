"""Makes beams.json: transformers' beam search on a tiny random GPT-2. Run with torch and transformers: `python tests/golden/make_beams.py`.

The weights come from numpy's generator and are not stored. They are large, so that logits are spread and two beams never score alike.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = dict(model_type="gpt2", vocab_size=61, n_positions=64, n_embd=12, n_layer=2, n_head=3, activation_function="gelu_new")
PROMPTS = [[5], [17, 3, 60, 2], [40, 8, 8, 31, 0, 22, 9, 51, 13]]
#: Laid over the cases in turn: what comes before the beams are chosen, and how long they are.
SETTINGS: list[dict[str, Any]] = [
    dict(),
    dict(repetition_penalty=1.3),
    dict(no_repeat_ngram_size=2),
    dict(repetition_penalty=1.3, no_repeat_ngram_size=2),
    dict(min_new_tokens=6),
    dict(logit_bias={"30": 2.5, "2": -3.0}, forbidden_tokens=[4, 50]),
    dict(forced_tokens={"-1": None}),  # the end-of-text id
]
LENGTHS = [30, 11, 1, 25, 30, 4, 19, 28]
EOS = [33, 13, None, 25, 45]


def cases() -> list[dict[str, Any]]:
    """Every number of beams with every length penalty and way to stop; the rest changes from one to the next."""
    every = itertools.product((2, 3, 5), (0.0, 1.0, 2.0, -1.0), (False, True, "never"))
    return [
        dict(
            num_beams=beams,
            length_penalty=penalty,
            early_stopping=early,
            new_tokens=LENGTHS[i % 8],
            eos=EOS[i % 5],
            returned=1 + i % beams,
            settings=SETTINGS[i % 7],
        )
        for i, (beams, penalty, early) in enumerate(every)
    ]


def weights() -> dict[str, np.ndarray]:
    """By their names in transformers' GPT2Model."""
    draw, D = np.random.default_rng(21), CONFIG["n_embd"]
    normal = lambda *shape: draw.standard_normal(shape).astype(np.float32)  # noqa: E731
    tensors = {"wte.weight": 0.9 * normal(CONFIG["vocab_size"], D), "wpe.weight": 1.5 * normal(CONFIG["n_positions"], D)}
    for layer in range(CONFIG["n_layer"]):
        for name, inputs, outputs in (("attn.c_attn", D, 3 * D), ("attn.c_proj", D, D), ("mlp.c_fc", D, 4 * D), ("mlp.c_proj", 4 * D, D)):
            tensors |= {f"h.{layer}.{name}.weight": 1.5 * normal(inputs, outputs) / np.float32(inputs) ** 0.5, f"h.{layer}.{name}.bias": 0.1 * normal(outputs)}
        for name in ("ln_1", "ln_2"):
            tensors |= {f"h.{layer}.{name}.weight": 1 + 0.1 * normal(D), f"h.{layer}.{name}.bias": 0.1 * normal(D)}
    return tensors | {"ln_f.weight": 1 + 0.1 * normal(D), "ln_f.bias": 0.1 * normal(D)}


def reference() -> Any:
    import torch
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG, bos_token_id=None, eos_token_id=None, attn_implementation="eager")).eval()
    missing, unexpected = model.transformer.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in weights().items()}, strict=False)
    assert not missing and not unexpected
    return model


def answers(model: Any, case: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """For each prompt the beams, best first: tokens with the end of text, and score. Where fewer texts are possible than beams are asked for, transformers
    fills up with copies at a score of -1e9; they are left out."""
    import torch

    settings, eos, new = dict(case["settings"]), case["eos"], case["new_tokens"]
    bias, forbidden = settings.pop("logit_bias", {}), settings.pop("forbidden_tokens", [])
    options = {**settings, **({"sequence_bias": [[[int(token)], value] for token, value in bias.items()]} if bias else {})}
    options |= {"bad_words_ids": [[token] for token in forbidden]} if forbidden else {}
    if options.pop("forced_tokens", None) and eos is not None:
        options["forced_eos_token_id"] = eos
    if eos is None:
        options.pop("min_new_tokens", None)
    results = []
    for ids in PROMPTS:
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=new, eos_token_id=eos, pad_token_id=eos,
            num_beams=case["num_beams"], length_penalty=case["length_penalty"], early_stopping=case["early_stopping"],
            num_return_sequences=case["returned"], return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
        rows = [row[len(ids) :] for row in out.sequences.tolist()]
        ends = [row.index(eos) + 1 if eos in row else len(row) for row in rows]
        found = zip(rows, ends, out.sequences_scores.tolist(), strict=True)
        results.append([dict(tokens=row[:end], score=round(score, 6)) for row, end, score in found if score > -1e8])
    return results


def main() -> None:
    model = reference()
    lines = [json.dumps(dict(case=case, beams=answers(model, case))) for case in cases()]
    (Path(__file__).parent / "beams.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
