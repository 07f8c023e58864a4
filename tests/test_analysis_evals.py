"""HellaSwag and LAMBADA: rows as the two published forms make them, metrics against a forward of each text alone, and both inside a run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import tiny

from gpt2jax.analysis import evals
from gpt2jax.analysis.evals import Benchmark, batches, hellaswag, lambada, row_scores
from gpt2jax.config import load_config
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import load_tokenizer
from gpt2jax.training.checkpoint import load_model
from gpt2jax.training.loop import train
from gpt2jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent
BYTES = load_tokenizer("bytes")
SWAG = [
    dict(activity_label="Rowing", ctx_a="A man rows.", ctx_b="he", ctx="A man rows. he", endings=["rests.", "sinks a lot", "is", "sings a song."], label="2"),
    dict(activity_label="Tea [x]", ctx_a="Boil [title] it. [step]", ctx_b="", ctx="Boil it", endings=["now [a]", "no  more", "x", "then"], label=0),
    dict(activity_label="Cut", ctx_a="Cut.", ctx_b="and", ctx="Cut. and", endings=["a", "bb", "ccc", "dddd"], label="3"),
]
LAST = [dict(text="he saw the cat"), dict(text="one\n\ntwo three"), dict(text="x " * 50 + "end")]


def write(path: Path, examples: list[Any]) -> Path:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


@pytest.fixture
def swag(tmp_path: Path) -> Path:
    return write(tmp_path / "hellaswag.jsonl", SWAG)


@pytest.fixture
def last(tmp_path: Path) -> Path:
    return write(tmp_path / "lambada.jsonl", LAST)


def text(row: tuple[list[int], list[int]]) -> tuple[str, str]:
    return BYTES.decode(row[0]), BYTES.decode(row[1])


def test_rows_of_both_forms(swag: Path, last: Path) -> None:
    assert [text(row) for row in hellaswag(swag, BYTES).rows[:5]] == [
        ("A man rows. he", " rests."), ("A man rows. he", " sinks a lot"), ("A man rows. he", " is"), ("A man rows. he", " sings a song."),
        ("Boil it", " now [a]"),
    ]  # fmt: skip
    rows = [text(row) for row in hellaswag(swag, BYTES, "lm-eval").rows]
    assert rows[0] == ("Rowing: A man rows. He", " rests.")
    # the brackets go, " [title]" is a full stop, two spaces become one, and what they leave at the context's end stands before the ending
    assert rows[4:6] == [("Tea : Boil. it.", "  now "), ("Tea : Boil. it.", "  no more")]
    assert [text(row) for row in lambada(last, BYTES).rows][:2] == [("he saw the", " cat"), ("one\n\ntwo", " three")]
    assert len(hellaswag(swag, BYTES, examples=2).rows) == 8 and len(lambada(last, BYTES, 1).rows) == 1


def measured(benchmark: Benchmark, model: Any, size: int = 4) -> tuple[dict[str, float], np.ndarray, np.ndarray, set[tuple[int, ...]]]:
    score, shapes = jax.jit(row_scores), set()
    log_probs, greedy = np.zeros(len(benchmark.rows)), np.zeros(len(benchmark.rows), bool)
    for places, inputs, targets in batches(benchmark.rows, size, model.config.n_positions):
        totals, hits = score(model, inputs, targets)
        log_probs[places], greedy[places] = totals[: len(places)], hits[: len(places)]
        shapes.add(inputs.shape)
    return benchmark.measure(log_probs, greedy), log_probs, greedy, shapes


def full(model: Any, ids: list[int]) -> np.ndarray:
    """Logits at each place of one text, always of the same padded length: one program."""
    return np.asarray(model(jnp.asarray([ids + [0] * (model.config.n_positions - len(ids))])), np.float64)[0]


def alone(model: Any, row: tuple[list[int], list[int]]) -> tuple[list[float], bool]:
    """The log-probability of each scored id, and whether all are the likeliest, from one forward of the text by itself."""
    ids, n = row[0] + row[1], len(row[1])
    ids = ids[-(model.config.n_positions + 1) :]
    logits = full(model, ids[:-1])[len(ids) - 1 - n : len(ids) - 1]
    log_prob = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return [log_prob[i, token] for i, token in enumerate(ids[-n:])], bool((logits.argmax(-1) == ids[-n:]).all())


def test_metrics_equal_a_forward_of_each_text_alone(swag: Path, last: Path) -> None:
    """Of other lengths, in batches with a ragged last one, and with a text that is longer than the context."""
    model = tiny(n_positions=80)
    for form in ("llm.c", "lm-eval"):
        benchmark = hellaswag(swag, BYTES, form)
        metrics, log_probs, _, shapes = measured(benchmark, model, size=5)
        by_token = [alone(model, row)[0] for row in benchmark.rows]
        np.testing.assert_allclose(log_probs, [sum(part) for part in by_token], rtol=0, atol=1e-4)
        assert shapes == {(5, 64)}
        sums = np.array([sum(part) for part in by_token]).reshape(3, 4)
        ends = [[ending.replace(" [a]", " ").replace("  ", " ") if form == "lm-eval" else f" {ending}" for ending in example["endings"]] for example in SWAG]
        sizes = np.array([[len(ending) for ending in four] for four in ends])  # of bytes, each is a token
        assert metrics == {
            "hellaswag_acc": np.mean(sums.argmax(1) == [2, 0, 3]),
            "hellaswag_acc_norm": np.mean((sums / sizes).argmax(1) == [2, 0, 3]),
        }
    benchmark = lambada(last, BYTES)
    metrics, log_probs, greedy, shapes = measured(benchmark, model, size=2)
    expected = [alone(model, row) for row in benchmark.rows]
    np.testing.assert_allclose(log_probs, [sum(part) for part, _ in expected], rtol=0, atol=1e-4)
    assert shapes == {(2, 64), (2, 80)} and greedy.tolist() == [hit for _, hit in expected]
    assert metrics["lambada_ppl"] == pytest.approx(math.exp(-np.mean([sum(part) for part, _ in expected])), rel=1e-5)
    # what the model itself says is greedy
    ids = benchmark.rows[0][0]
    said = [int(full(model, ids)[len(ids) - 1].argmax())]
    said.append(int(full(model, ids + said)[len(ids)].argmax()))
    rows = [(ids, said), (ids, [said[0], (said[1] + 1) % 257]), (ids, [(said[0] + 1) % 257, said[1]])]
    _, _, greedy, _ = measured(Benchmark(rows, benchmark.measure), model)
    assert greedy.tolist() == [True, False, False]


@pytest.mark.parametrize("form", ["llm.c", "lm-eval"])
def test_accuracy_of_known_scores(swag: Path, form: str) -> None:
    """By hand: sums are right in two of three, by length in one; tokens and characters differ by the space."""
    log_probs = np.array([[-9, -9, -1, -9], [-4, -5, -1, -6], [-9.0, -9, -9, -8]])
    sizes = {"llm.c": [[7, 12, 3, 14], [8, 9, 2, 5], [2, 3, 4, 5]], "lm-eval": [[6, 11, 2, 13], [4, 7, 1, 4], [1, 2, 3, 4]]}[form]
    by_length = [int(np.argmax([p / n for p, n in zip(row, four, strict=True)])) for row, four in zip(log_probs, sizes, strict=True)]
    expected = float(np.mean([guess == label for guess, label in zip(by_length, (2, 0, 3), strict=True)]))
    metrics = hellaswag(swag, BYTES, form).measure(log_probs.reshape(-1), np.zeros(12, bool))
    assert metrics == {"hellaswag_acc": pytest.approx(2 / 3), "hellaswag_acc_norm": pytest.approx(expected)}


@pytest.mark.parametrize(
    ("name", "examples", "words"),
    [
        ("hellaswag", [{"text": "a b"}], "line 1: no example of HellaSwag .*ctx|label"),
        ("hellaswag", [SWAG[0], {**SWAG[1], "endings": ["a"]}], "line 2: an example of HellaSwag has a context, four endings"),
        ("hellaswag", [{**SWAG[0], "label": "4"}], "label of 0 to 3"),
        ("lambada", [LAST[0], {"text": "word"}], "line 2: an example of LAMBADA"),
        ("lambada", [{"text": "ends in a space "}], "line 1: an example of LAMBADA"),
        ("lambada", [[1]], "line 1: not a JSON object"),
        ("lambada", [], "is empty"),
    ],
)
def test_what_is_no_example_is_named_before_anything_is_written(tmp_path: Path, tiny_options: list[str], name: str, examples: list[Any], words: str) -> None:
    path = write(tmp_path / "file.jsonl", examples)
    with pytest.raises(InputError, match=words):
        train(load_config(None, [*tiny_options, f"--eval.{name}={path}"]))
    with pytest.raises(InputError, match="cannot read .*nowhere"):
        train(load_config(None, [*tiny_options, f"--eval.{name}=nowhere"]))
    assert not (tmp_path / "run").exists()


def test_a_run_writes_them_at_each_validation(tiny_options: list[str], tmp_path: Path, swag: Path, last: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = [f"--eval.hellaswag={swag}", f"--eval.lambada={last}", "--eval.hellaswag_form=lm-eval", "--eval.examples=2", "--model.n_positions=80"]
    assert train(load_config(None, [*tiny_options, *options, "--train.sequence_length=24"])) == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    keys = [*evals.HELLASWAG, *evals.LAMBADA]
    assert all(list(line)[-4:] == keys for line in lines)
    assert [[line["step"] for line in lines if line[key] is not None] for key in keys] == [[6, 12]] * 4
    model, _ = load_model(tmp_path / "run")
    scores = [alone(model, row)[0] for row in lambada(last, BYTES, 2).rows]
    assert lines[-1]["lambada_ppl"] == pytest.approx(math.exp(-np.mean([sum(score) for score in scores])), rel=1e-5)
    rows = np.array([sum(alone(model, row)[0]) for row in hellaswag(swag, BYTES, "lm-eval", 2).rows])
    assert lines[-1]["hellaswag_acc"] == np.mean(rows.reshape(2, 4).argmax(1) == [2, 0])
    assert "lambada_ppl" in capfd.readouterr().err


@pytest.mark.slow
def test_eight_devices_find_what_one_does(tiny_options: list[str], tmp_path: Path, swag: Path, last: Path) -> None:
    found = []
    for devices, mesh in ((1, []), (8, ["--mesh.fsdp=2", "--mesh.sequence=2", "--mesh.data=2"])):
        options = ["--train.steps=2", "--train.batch_size=8", f"--eval.hellaswag={swag}", f"--eval.lambada={last}", f"--run.dir={tmp_path / str(devices)}"]
        command = [sys.executable, "train.py", os.devnull, *tiny_options, *options, *mesh]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)})
        assert result.returncode == 0, result.stderr
        found.append([read_metrics(tmp_path / str(devices) / "metrics.jsonl")[-1][key] for key in (*evals.HELLASWAG, *evals.LAMBADA)])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


@pytest.mark.torch
def test_scores_equal_those_of_transformers(swag: Path, last: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from gpt2jax.convert.huggingface import load_huggingface

    config = transformers.GPT2Config(vocab_size=257, n_positions=128, n_layer=2, n_head=2, n_embd=16, initializer_range=0.3)
    torch.manual_seed(0)
    reference = transformers.GPT2LMHeadModel(config).eval()
    reference.save_pretrained(swag.parent / "model")
    model = load_huggingface(swag.parent / "model")
    for benchmark in (hellaswag(swag, BYTES), hellaswag(swag, BYTES, "lm-eval"), lambada(last, BYTES)):
        metrics, log_probs, greedy, _ = measured(benchmark, model)
        totals, hits = [], []
        for before, after in benchmark.rows:
            with torch.no_grad():
                logits = reference(torch.tensor([(before + after)[:-1]])).logits[0, -len(after) :].log_softmax(-1)
            totals.append(float(logits.gather(1, torch.tensor(after)[:, None]).sum()))
            hits.append(logits.argmax(-1).tolist() == after)
        np.testing.assert_allclose(log_probs, totals, rtol=0, atol=1e-4)
        assert greedy.tolist() == hits and metrics == pytest.approx(benchmark.measure(np.array(totals), np.array(hits)), rel=1e-4)
