"""HellaSwag and LAMBADA from their public JSON lines, as rows of token ids to score and metrics of what they score.

Letters: B rows, T padded tokens, C tokens of a block, N blocks, D width, P padded vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from gpt2jax.decoding.loop import prompt_bucket
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2

if TYPE_CHECKING:
    from gpt2jax.tokenizer import Tokenizer

#: The shortest padded length of a row, so that few lengths are ever compiled, and the tokens of a row whose logits exist at one time.
_SHORTEST, _BLOCK = 64, 16

#: Names of metrics.
HELLASWAG, LAMBADA = ("hellaswag_acc", "hellaswag_acc_norm"), ("lambada_acc", "lambada_ppl")

Row = tuple[list[int], list[int]]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """rows: of each the ids before, and the ids to score. measure: from the log-probability of each row's ids, float64, and whether each of them is the most
    likely one, bool, to metrics by name."""

    rows: list[Row]
    measure: Callable[[np.ndarray, np.ndarray], dict[str, float]]


def hellaswag(path: str | Path, tokenizer: Tokenizer, form: str = "llm.c", examples: int | None = None) -> Benchmark:
    """Which of four endings is the likeliest (Zellers et al., arXiv:1905.07830): acc by an ending's log-probability, acc_norm by that over its length.

    form "llm.c": ctx, and an ending's length in tokens, as llm.c's dev/data/hellaswag.py, by which its runs and GPT-2's 29.4 are published. "lm-eval": the
    activity before the context, both without the brackets of WikiHow, and an ending's length in characters, as EleutherAI's harness (GPT-2's 31.1).
    Raises InputError for a line that is no such example.
    """
    rows, lengths, labels = [], [], []
    for where, example in _lines(path, examples):
        try:
            label, endings = int(example["label"]), [str(ending) for ending in example["endings"]]
            if form == "lm-eval":
                context = _without_brackets(f"{example['activity_label']}: {example['ctx_a']} {example['ctx_b'].capitalize()}")
                endings = [_without_brackets(ending) for ending in endings]
                parts = [_apart(tokenizer, context, f" {ending}") for ending in endings]
                sizes = [len(ending) for ending in endings]
            else:
                before = tokenizer.encode(str(example["ctx"]))
                parts = [(before, tokenizer.encode(f" {ending}")) for ending in endings]
                sizes = [len(after) for _, after in parts]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{where}: no example of HellaSwag ({type(error).__name__}: {error}); give the public file of its validation split") from None
        if len(endings) != 4 or not 0 <= label < 4 or not all(sizes) or not all(before for before, _ in parts):
            raise InputError(f"{where}: an example of HellaSwag has a context, four endings and a label of 0 to 3")
        rows += parts
        lengths.append(sizes)
        labels.append(label)

    def measure(log_probs: np.ndarray, greedy: np.ndarray) -> dict[str, float]:
        by_ending = log_probs.reshape(-1, 4)
        right = lambda scores: float((scores.argmax(1) == np.array(labels)).mean())  # noqa: E731
        return dict(zip(HELLASWAG, (right(by_ending), right(by_ending / np.array(lengths))), strict=True))

    return Benchmark(rows, measure)


def lambada(path: str | Path, tokenizer: Tokenizer, examples: int | None = None) -> Benchmark:
    """The last word of a passage (Paperno et al., arXiv:1606.06031), as `lambada_openai` of EleutherAI's harness: what follows the last space, all its tokens;
    acc: the share of words whose tokens are all the likeliest; ppl: exp of the mean surprise a word. Raises InputError for a line without two words."""
    rows = []
    for where, example in _lines(path, examples):
        text = example.get("text")
        before, _, word = text.rpartition(" ") if isinstance(text, str) else ("", "", "")
        row = _apart(tokenizer, before, f" {word}")
        if not word or not row[0]:
            raise InputError(f'{where}: an example of LAMBADA is {{"text": a passage of two words or more}}')
        rows.append(row)

    def measure(log_probs: np.ndarray, greedy: np.ndarray) -> dict[str, float]:
        return dict(zip(LAMBADA, (float(greedy.mean()), float(np.exp(-log_probs.mean()))), strict=True))

    return Benchmark(rows, measure)


def batches(rows: list[Row], size: int, most: int) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """(places, inputs, targets) of rows that are padded alike, int32 [size, T]; targets are -1 where nothing is scored. A row that is longer than a context of
    `most` tokens loses its beginning, as in EleutherAI's harness; the last batch of a length is filled with empty rows."""
    cut = [((before + after)[-(most + 1) :], len(after)) for before, after in rows]
    by_length: dict[int, list[int]] = {}
    for place, (ids, _) in enumerate(cut):
        by_length.setdefault(prompt_bucket(max(len(ids) - 1, _SHORTEST), most), []).append(place)
    for length, places in sorted(by_length.items()):
        for first in range(0, len(places), size):
            group = places[first : first + size]
            inputs_BT, targets_BT = np.zeros((size, length), np.int32), np.full((size, length), -1, np.int32)
            for i, place in enumerate(group):
                ids, scored = cut[place]
                start = max(len(ids) - 1 - scored, 0)
                inputs_BT[i, : len(ids) - 1] = ids[:-1]
                targets_BT[i, start : len(ids) - 1] = ids[start + 1 :]
            yield group, inputs_BT, targets_BT


def row_scores(model: GPT2, inputs_BT: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(log-probability of each row's targets, float32 [B]; whether each of them is the likeliest token, bool [B]); targets below 0 don't count.

    Logits are made for a few tokens of each row at a time.
    """
    B, T = targets_BT.shape
    C = _BLOCK if T % _BLOCK == 0 else T

    def block(carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, jax.Array], None]:
        total_B, greedy_B = carry
        hidden_BCD, targets_BC = part
        logits_BCP = model.padded_logits(hidden_BCD)
        is_target = jnp.arange(logits_BCP.shape[-1]) == targets_BC[..., None]  # no gather: the vocabulary may be spread
        log_prob_BC = jnp.where(is_target, logits_BCP, 0.0).sum(-1) - jax.nn.logsumexp(logits_BCP, -1)
        counts_BC = targets_BC >= 0
        hit_BC = logits_BCP.argmax(-1) == targets_BC
        return (total_B + jnp.where(counts_BC, log_prob_BC, 0.0).sum(-1), greedy_B & (hit_BC | ~counts_BC).all(-1)), None

    parts = [x.reshape(B, T // C, C, *x.shape[2:]).swapaxes(0, 1) for x in (model.hidden(inputs_BT), targets_BT)]
    return jax.lax.scan(block, (jnp.zeros(B, jnp.float32), jnp.ones(B, bool)), tuple(parts))[0]


def _lines(path: str | Path, examples: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, the object in it) of the first `examples` lines of JSON lines."""
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in islice(enumerate(file, 1), examples):
                example = json.loads(line)
                if not isinstance(example, dict):
                    raise ValueError("no object")
                yield f"{path} line {number}", example
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give a file of JSON lines") from None
    except ValueError as error:
        raise InputError(f"{path} line {number or 1}: not a JSON object ({error}); give a file of JSON lines") from None
    if not number:
        raise InputError(f"{path} is empty; give a file of JSON lines")


def _without_brackets(text: str) -> str:
    """lm-eval's `preprocess` of HellaSwag, in its order: spaces that brackets leave at an end stay."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _apart(tokenizer: Tokenizer, before: str, after: str) -> Row:
    """Both texts' ids as lm-eval parts them: spaces at the end of the first belong to the second, and the tokens are those of the whole text."""
    bare = before.rstrip()
    after = before[len(bare) :] + after
    first, whole = tokenizer.encode(bare), tokenizer.encode(bare + after)
    return whole[: len(first)], whole[len(first) :]
