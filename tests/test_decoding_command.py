"""The sample command, with a loader that hands out a tiny model."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from decoding_helpers import tiny

from gpt2jax.decoding.command import RULE, add_arguments, run_sample
from gpt2jax.decoding.generate import generate
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    loaded: dict[str, Any] = dict(model=tiny(), tokenizer=BYTES)
    monkeypatch.setattr(importlib.import_module("gpt2jax.runtime"), "start", lambda: None)

    def run(*arguments: str, tokenizer: Any = BYTES, load: Any = None) -> int:
        fake = load or (lambda path, *, compute_dtype=None: (loaded["model"], tokenizer))
        monkeypatch.setattr(importlib.import_module("gpt2jax.loading"), "load", fake)
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return run_sample(parser.parse_args(["MODEL", *arguments]))

    return run


def test_json_lines(sample: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert sample("--prompt", "añb", "--max-new-tokens", "9", "--seed", "4", "--num-samples", "3", "--temperature", "0.8", "--top-k", "30", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = generate(tiny(), ["añb"] * 3, max_new_tokens=9, temperature=0.8, top_k=30, seed=[4, 5, 6], tokenizer=BYTES)
    assert [list(line) for line in lines] == [["prompt", "text", "tokens", "finish_reason"]] * 3
    assert lines == [dict(prompt="añb", text=row.text, tokens=row.tokens, finish_reason=row.finish_reason) for row in expected]
    assert lines[0] != lines[1] != lines[2]


def test_plain_text(sample: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert sample("--prompt", "ab", "--max-new-tokens", "5", "--num-samples", "2") == 0
    texts = [row.text for row in generate(tiny(), ["ab"] * 2, max_new_tokens=5, seed=[0, 1], tokenizer=BYTES)]
    output = capsys.readouterr()
    assert output.out == f"ab{texts[0]}\n{RULE}\nab{texts[1]}\n" and output.err == ""


def test_the_default_prompt_is_the_end_of_text(sample: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert sample("--json") == 0
    line = json.loads(capsys.readouterr().out)
    expected = generate(tiny(), [[256]], max_new_tokens=128)[0]
    assert line["prompt"] == "" and line["tokens"] == expected.tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--top-k", "-2"], "top_k=-2"),
        (["--seed", "-1"], "seed=-1"),
        (["--seed", "4294967295", "--num-samples", "2"], "seed=4294967296"),
        (["--num-samples", "0"], "--num-samples=0"),
        (["--prompt", "x\udcffy"], "--prompt is not valid UTF-8"),
    ],
)
def test_bad_values_are_refused_before_the_model_is_loaded(sample: Callable[..., int], arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sample(*arguments, load=lambda *_, **__: pytest.fail("loaded"))


def test_no_tokenizer(sample: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="MODEL has no tokenizer"):
        sample("--prompt", "a", tokenizer=None)
    assert capsys.readouterr().out == ""


def test_the_dtype_goes_to_the_loader(sample: Callable[..., int]) -> None:
    seen = []

    def load(path: str, *, compute_dtype: str | None = None) -> Any:
        seen.append((path, compute_dtype))
        return tiny(), BYTES

    sample("--compute-dtype", "bfloat16", "--max-new-tokens", "1", load=load)
    assert seen == [("MODEL", "bfloat16")]


def test_the_options_import_no_jax() -> None:
    code = "import sys, gpt2jax.decoding.command; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
