"""Beam search against transformers' answers: stored ones, and live where torch is installed."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import prompt, slow_greedy
from golden import make_beams
from golden.folders import GOLDEN, write_folder

from gpt2jax.convert.huggingface import load_huggingface
from gpt2jax.decoding import beams
from gpt2jax.decoding.beams import Beam, search
from gpt2jax.decoding.request import check_beams, sampling_of
from gpt2jax.decoding.weights import prepare
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import map_named

STORED: list[dict[str, Any]] = json.loads((GOLDEN / "beams.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GPT2:
    folder = write_folder(tmp_path_factory.mktemp("beams") / "model", make_beams.weights(), make_beams.CONFIG)
    return prepare(load_huggingface(folder), turned=False)


def find(model: GPT2, rows: list[list[int]], settings: dict[str, Any], new_tokens: int, eos: int | None = None, **options: Any) -> list[list[Beam]]:
    check_beams(options["num_beams"], options.get("length_penalty", 1.0), options.get("early_stopping", False), options.get("returned", 1))
    sampling = sampling_of(settings, len(rows), model.config.vocab_size, eos=-1 if eos is None else eos, new_tokens=new_tokens)
    return search(model, rows, sampling, new_tokens=new_tokens, **options)


def answers(model: GPT2, case: dict[str, Any], rows: list[list[int]]) -> list[list[Beam]]:
    settings = dict(case["settings"])
    if "forced_tokens" in settings:
        settings["forced_tokens"] = {} if case["eos"] is None else {-1: case["eos"]}
    names = ("new_tokens", "eos", "num_beams", "length_penalty", "early_stopping", "returned")
    return find(model, rows, settings, **{name: case[name] for name in names})


def check(found: list[list[Beam]], expected: list[list[dict[str, Any]]]) -> None:
    assert [[beam.tokens for beam in row] for row in found] == [[beam["tokens"] for beam in row] for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose([beam.score for beam in row], [beam["score"] for beam in wanted], rtol=1e-5, atol=1e-5)


def test_stored_cases_are_those_of_the_script() -> None:
    assert [stored["case"] for stored in STORED] == json.loads(json.dumps(make_beams.cases()))
    lengths = [(stored["case"]["new_tokens"], len(beam["tokens"])) for stored in STORED for row in stored["beams"] for beam in row]
    early = sum(length < most for most, length in lengths)
    assert early > 20 and len(lengths) - early > 100, "beams that end early, and beams that do not"


@pytest.mark.parametrize("num_beams", [2, 3, 5])
def test_beams_equal_transformers(model: GPT2, num_beams: int) -> None:
    """The three prompts together, each as transformers has it alone."""
    cases = [stored for stored in STORED if stored["case"]["num_beams"] == num_beams]
    assert len(cases) == 12
    compiled = beams._advance._cache_size()
    for stored in cases:
        check(answers(model, stored["case"], make_beams.PROMPTS), stored["beams"])
    assert beams._advance._cache_size() <= compiled + 1, "one program for all settings"


def test_a_live_cache_that_grows_changes_nothing(model: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = next(s for s in STORED if s["case"]["num_beams"] == 2 and s["case"]["new_tokens"] == 30 and len(s["beams"][0][0]["tokens"]) == 30)
    monkeypatch.setattr(beams, "_LIVE", 16)
    before = beams._widen._cache_size()
    check(answers(model, stored["case"], make_beams.PROMPTS), stored["beams"])
    assert beams._widen._cache_size() == before + 1, "16, then 32"


def test_one_beam_is_greedy(model: GPT2) -> None:
    found = find(model, make_beams.PROMPTS, {}, 24, num_beams=1)
    assert [row[0].tokens for row in found] == [slow_greedy(model, ids, 24) for ids in make_beams.PROMPTS]


def test_more_beams_than_texts(model: GPT2) -> None:
    """Two tokens that may come, each once: two texts of 2, whatever is asked for. A row that is at its end does not end the others."""
    settings = dict(forbidden_tokens=[[token for token in range(61) if token not in (11, 12)], [], []], no_repeat_ngram_size=[1, 0, 0])
    rows = find(model, make_beams.PROMPTS, settings, 2, num_beams=5, returned=5)
    assert sorted(beam.tokens for beam in rows[0]) == [[11, 12], [12, 11]]
    assert rows[0][0].score > rows[0][1].score and len(rows[1]) == len(rows[2]) == 5
    with pytest.raises(InputError, match="no text that may follow prompt 0"):
        find(model, make_beams.PROMPTS, settings, 3, num_beams=5)


def test_the_whole_context_is_usable(model: GPT2) -> None:
    """A prompt of 60 leaves room for 5 tokens in a context of 64: the last is never fed back, so the 5th comes behind the last position."""
    ids = prompt(60, vocabulary=61)
    row = find(model, [[1], ids, [2]], {}, 5, num_beams=2)[1]
    tokens = [*ids, *row[0].tokens]
    logits_TV = np.asarray(model(jnp.asarray([tokens[:64]]))[0, 59:], np.float64)
    log_prob_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    assert row[0].score == pytest.approx(log_prob_TV[np.arange(5), row[0].tokens].mean(), abs=1e-5)


def test_damaged_weights_are_named(model: GPT2) -> None:
    damaged = map_named(lambda name, leaf: leaf.at[3].set(jnp.nan) if name == "token_table" else leaf, model)
    with pytest.raises(InputError, match="after prompt 0 are not finite"):
        find(damaged, make_beams.PROMPTS, {}, 5, num_beams=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(num_beams=0), "num_beams=0"),
        (dict(num_beams=2, returned=3), "num_samples=3 must be between 1 and 2"),
        (dict(num_beams=2, length_penalty=float("nan")), "length_penalty=nan"),
        (dict(num_beams=2, early_stopping="always"), "early_stopping='always'"),
    ],
)
def test_bad_options_are_refused(model: GPT2, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        find(model, [[1]], {}, 3, **options)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
def test_transformers_still_gives_the_stored_answers() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    reference = make_beams.reference()
    for stored in STORED[::9]:
        for found, expected in zip(make_beams.answers(reference, stored["case"]), stored["beams"], strict=True):
            assert [beam["tokens"] for beam in found] == [beam["tokens"] for beam in expected]
            np.testing.assert_allclose([beam["score"] for beam in found], [beam["score"] for beam in expected], rtol=1e-5, atol=1e-5)
