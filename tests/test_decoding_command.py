"""The sample command, with a loader that hands out a tiny model."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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
        fake = load or (lambda path, **_: (loaded["model"], tokenizer))
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
        (["--top-p", "0"], "top_p=0.0"),
        (["--typical-p", "1.5"], "typical_p=1.5"),
        (["--min-p", "-1"], "min_p=-1.0"),
        (["--repetition-penalty", "0"], "repetition_penalty=0.0"),
        (["--logit-bias", "a=1"], "logit_bias="),
        (["--stop", ""], "--stop='' is empty"),
        (["--stop", "\udcff"], "--stop is not valid UTF-8"),
        (["--batch-size", "0", "--prompts", "p", "--out", "o"], "--batch-size=0"),
        (["--mesh", "data=x"], "--mesh=data=x must name sizes"),
        (["--mesh", "rows=2"], "--mesh=rows=2"),
        (["--stream", "--json"], "--stream does not go with --json"),
        (["--stream", "--num-samples", "2"], "--stream does not go with --num-samples"),
        (["--prompts", "p", "--out", "o", "--prompt", "x"], "--prompts does not go with --prompt"),
        (["--prompts", "p", "--out", "o", "--stream"], "--prompts does not go with --stream"),
        (["--prompts", "p"], "--prompts needs --out"),
        (["--out", "o"], "--out needs --prompts"),
        (["--batch-size", "3"], "--batch-size needs --prompts"),
        (["--logprobs", "3"], "--logprobs needs --json or --prompts"),
        (["--interactive", "--json"], "--interactive does not go with --json"),
        (["--draft-tokens", "3"], "--draft-tokens needs --draft"),
        (["--length-penalty", "3"], "--length-penalty needs --num-beams"),
        (["--stream", "--num-beams", "2"], "--stream does not go with --num-beams"),
        (["--prompts", "nowhere.jsonl", "--out", "o"], "cannot read nowhere.jsonl"),
    ],
)
def test_bad_values_are_refused_before_the_model_is_loaded(sample: Callable[..., int], arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sample(*arguments, load=lambda *_, **__: pytest.fail("loaded"))


def test_no_tokenizer(sample: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="MODEL has no tokenizer"):
        sample("--prompt", "a", tokenizer=None)
    assert capsys.readouterr().out == ""


def test_prompts_of_ids_need_no_tokenizer(sample: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text('{"prompt": [3, 5]}\n')
    assert sample("--prompts", str(tmp_path / "ids.jsonl"), "--out", str(tmp_path / "out"), "--max-new-tokens", "3", tokenizer=None) == 0
    assert len(json.loads((tmp_path / "out").read_text())["tokens"]) == 3
    (tmp_path / "text.jsonl").write_text('{"prompt": [3, 5]}\n{"prompt": "a"}\n')
    with pytest.raises(InputError, match="has no tokenizer"):
        sample("--prompts", str(tmp_path / "text.jsonl"), "--out", str(tmp_path / "other"), tokenizer=None)


def test_the_dtype_goes_to_the_loader(sample: Callable[..., int]) -> None:
    seen = []

    def load(path: str, **dtypes: str | None) -> Any:
        seen.append((path, dtypes))
        return tiny(), BYTES

    sample("--compute-dtype", "bfloat16", "--weights-dtype", "int8", "--max-new-tokens", "1", "--draft", "SMALL", load=load)
    assert seen == [(name, dict(compute_dtype="bfloat16", weights_dtype="int8")) for name in ("MODEL", "SMALL")]


def test_the_options_import_no_jax() -> None:
    code = "import sys, gpt2jax.decoding.command; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_stream_prints_what_a_call_prints(sample: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "añ", "--max-new-tokens", "50", "--seed", "5", "--top-p", "0.9", "--stop", "zzzz"]
    assert sample(*options) == 0
    whole = capsys.readouterr().out
    assert sample(*options, "--stream") == 0
    assert capsys.readouterr().out == whole


def test_settings_reach_the_sampler(sample: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--logit-bias",
        "5=2.5,9=-3",
        "--forced-tokens",
        "0=65,-1=66",
        "--forbidden-tokens",
        "70,71",
        "--no-repeat-ngram-size",
        "2",
        "--frequency-penalty",
        "0.5",
    ]
    assert sample("--prompt", "a", "--max-new-tokens", "9", *flags, "--json", "--logprobs", "2", "--overflow", "slide") == 0
    line = json.loads(capsys.readouterr().out)
    settings = dict(logit_bias={5: 2.5, 9: -3}, forced_tokens={0: 65, -1: 66}, forbidden_tokens=[70, 71], no_repeat_ngram_size=2, frequency_penalty=0.5)
    expected = generate(tiny(), ["a"], max_new_tokens=9, tokenizer=BYTES, logprobs=2, **settings)[0]
    assert line["tokens"] == expected.tokens and line["tokens"][0] == 65 and line["tokens"][-1] == 66
    assert line["logprobs"] == pytest.approx(expected.logprobs) and len(line["top_logprobs"][0]) == 2


def test_a_file_of_prompts(sample: Callable[..., int], tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "longer"}\n')
    files = ["--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "o.jsonl")]
    assert sample(*files, "--max-new-tokens", "9", "--batch-size", "2", "--seed", "4") == 0
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    expected = generate(tiny(), ["a", "longer"], max_new_tokens=9, seed=[4, 5], tokenizer=BYTES)
    assert [(row["prompt"], row["tokens"]) for row in rows] == [("a", expected[0].tokens), ("longer", expected[1].tokens)]
    assert capsys.readouterr().out == ""
    with pytest.raises(InputError, match="o.jsonl exists"):
        sample(*files)


def test_a_conversation(sample: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n there\n/undo\n again\n/new\nhello\n" + "x" * 300 + "\n/exit\nnot read\n"))
    assert sample("--interactive", "--max-new-tokens", "8", "--temperature", "0") == 0
    printed = capsys.readouterr()
    greedy = lambda text: generate(tiny(), [text], max_new_tokens=8, temperature=0, tokenizer=BYTES)[0]  # noqa: E731
    first = greedy("hello")
    ids = [*b"hello", *first.tokens]
    second, third = (generate(tiny(), [[*ids, *more]], max_new_tokens=8, temperature=0, tokenizer=BYTES)[0].text for more in (b" there", b" again"))
    assert printed.out == "".join(f"{text}\n" for text in (first.text, second, third, first.text))
    assert "[13 tokens; 0 of the prompt were in the cache]" in printed.err and "/new starts over" in printed.err.splitlines()[-1]
