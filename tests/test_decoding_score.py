"""Scores against the full log-softmax and transformers' loss. Letters: T tokens, V vocabulary."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_helpers import prompt, tiny
from golden.folders import GOLDEN

from gpt2jax.convert.huggingface import load_huggingface
from gpt2jax.decoding import score as module
from gpt2jax.decoding.score import Score, score
from gpt2jax.decoding.weights import prepare
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.model.parameters import map_named
from gpt2jax.tokenizer import load_tokenizer

LENGTHS = (1, 7, 16, 17, 40, 3, 5)


def full(model: GPT2, before: list[int], ids: list[int]) -> np.ndarray[Any, Any]:
    """The slow way: one uncached forward of the one text."""
    tokens = (before + ids)[: model.config.n_positions]
    padded = tokens + [0] * (model.config.n_positions - len(tokens))
    log_prob_TV = jax.nn.log_softmax(model(jnp.asarray([padded]))[0], -1)
    return np.array([log_prob_TV[len(before) + i - 1, token] for i, token in enumerate(ids)])


def check(result: Score, expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=1e-5)
    assert result.total == pytest.approx(expected.sum(), abs=1e-4)
    assert result.perplexity == pytest.approx(math.exp(-expected.mean()), rel=1e-5)


def test_log_probs_equal_the_full_forward() -> None:
    """Texts of several buckets together, in any order, behind the model's own end-of-text token."""
    model, texts = tiny(eos_token_id=9), [prompt(n) for n in LENGTHS]
    results = score(model, texts)
    assert [result.tokens for result in results] == texts
    for result, ids in zip(results, texts, strict=True):
        check(result, full(model, [9], ids))
        assert result.text_bytes is None and result.bits_per_byte is None
    check(score(prepare(model, turned=False), texts[1:2])[0], full(model, [9], texts[1]))


def test_batches_and_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens a batch than texts take together, and a chunk that divides no batch."""
    model, texts = tiny(eos_token_id=9), [prompt(n) for n in LENGTHS]
    whole = score(model, texts)
    monkeypatch.setattr(module, "BATCH_TOKENS", 32)
    monkeypatch.setattr(module, "CHUNK", 7)
    module._next_log_probs.clear_cache()
    for part, expected in zip(score(model, texts), whole, strict=True):
        np.testing.assert_allclose(part.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    module._next_log_probs.clear_cache()


def test_logits_of_a_whole_batch_never_exist() -> None:
    model = tiny()
    program = jax.make_jaxpr(module._next_log_probs.__wrapped__)(model, jnp.zeros((64, 16), jnp.int32), jnp.zeros((64, 16), jnp.int32))
    sizes: list[int] = []

    def visit(equations: Any) -> None:
        for equation in equations:
            sizes.extend(v.aval.size for v in equation.outvars)
            for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    visit(getattr(inner, "jaxpr", inner).eqns)

    visit(program.jaxpr.eqns)
    assert module.CHUNK * 320 in sizes, "the logits of one chunk"
    assert max(sizes) < 64 * 16 * 320 / 2


def test_context_is_not_scored_and_may_be_one_or_one_a_text() -> None:
    model, texts = tiny(eos_token_id=9), [prompt(n) for n in (4, 11, 2)]
    before = prompt(6, seed=1)
    for result, ids in zip(score(model, texts, context=before), texts, strict=True):
        assert result.tokens == ids
        check(result, full(model, before, ids))
    each = [prompt(n, seed=2) for n in (1, 30, 5)]
    for result, own, ids in zip(score(model, texts, context=each), each, texts, strict=True):
        check(result, full(model, own, ids))
    assert score(model, texts[:1], context=[])[0].logprobs == score(model, texts[:1])[0].logprobs, "an empty context is the end-of-text token"


def test_without_an_end_of_text_token_the_first_token_is_not_scored() -> None:
    model, ids = tiny(), prompt(12)
    (result,) = score(model, [ids])
    assert result.tokens == ids[1:]
    check(result, full(model, ids[:1], ids[1:]))


def test_strings_use_the_tokenizer_its_end_of_text_and_its_bytes() -> None:
    model, tokenizer = tiny(), load_tokenizer("bytes")
    (result,) = score(model, ["héllo"], tokenizer=tokenizer)
    assert result.tokens == list("héllo".encode()) and result.text_bytes == 6
    check(result, full(model, [tokenizer.eot], result.tokens))
    assert result.bits_per_byte == pytest.approx(-result.total / math.log(2) / 6)
    (behind,) = score(model, ["llo"], tokenizer=tokenizer, context="hé")
    check(behind, full(model, list("hé".encode()), list(b"llo")))


def test_the_whole_context_can_be_scored() -> None:
    """The last token is never fed, so n_positions tokens fit behind one."""
    model = tiny(n_positions=75, eos_token_id=9)
    check(score(model, [prompt(75)])[0], full(model, [9], prompt(75)))
    with pytest.raises(InputError, match="text 1 has 76 tokens to score behind 1, more than the model's context of 75"):
        score(model, [[1], prompt(76)])
    with pytest.raises(InputError, match="behind 3"):
        score(model, [prompt(74)], context=[1, 2, 3])


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ([], {}, "empty list"),
        ("abc", {}, "must be a list"),
        ([[1, 2], []], {}, "text 1 is empty"),
        ([[1, 257]], {}, "257 is outside the model's vocabulary, 0 to 256"),
        ([[1, -1]], {}, "-1 is outside"),
        ([[1, 2.0]], {}, "whole number"),
        (["abc"], {}, "needs a tokenizer"),
        ([[5]], {}, "no|neither"),
        ([[1, 2]], dict(context=[[1], [2]]), "context has 2 entries for 1 texts"),
        ([[1, 2]], dict(context=[300]), "300 is outside"),
        ([[1, 2]], dict(context=7), "must be a string or a list"),
        ([[1, 2]], dict(context=[]), "names one"),
    ],
)
def test_bad_input_is_refused(texts: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        score(tiny(), texts, **options)


def test_damaged_weights_are_named() -> None:
    model = map_named(lambda name, leaf: leaf.at[3].set(jnp.nan) if name == "token_table" else leaf, tiny(eos_token_id=9))
    with pytest.raises(InputError, match="text 0 are not finite"):
        score(model, [[1, 2]])


@pytest.mark.torch
def test_total_equals_the_loss_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = transformers.GPT2LMHeadModel.from_pretrained(GOLDEN / "gpt2-medium").eval()
    ids = prompt(11, vocabulary=89)
    with torch.no_grad():
        loss = float(reference(torch.tensor([ids]), labels=torch.tensor([ids])).loss)
    (result,) = score(load_huggingface(GOLDEN / "gpt2-medium"), [ids[1:]], context=ids[:1])
    assert -result.total / 10 == pytest.approx(loss, abs=1e-5)
