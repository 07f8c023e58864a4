"""Files of prompts: like single calls, in order, and resumable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from decoding_helpers import tiny

import gpt2jax.decoding.many as module
from gpt2jax.decoding.generate import generate
from gpt2jax.decoding.many import read_prompts, sample_file
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")
LINES: list[dict[str, Any]] = [
    {"prompt": "a long prompt of some words, longer than all others", "id": "x"},
    {"prompt": "ñ", "temperature": 0.0},
    {"prompt": [5, 256, 7], "seed": 77},
    {"prompt": ""},
    {"prompt": "middle", "top_p": 0.5, "logit_bias": {"97": 3.5}, "forbidden_tokens": [1, 2]},
]
OPTIONS: dict[str, Any] = dict(tokenizer=BYTES, batch_size=2, made_with="m", max_new_tokens=9, temperature=0.8, seed=3, stop=[], num_samples=1)


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def alone() -> list[dict[str, Any]]:
    rows = []
    for i, line in enumerate(LINES):
        settings = {"temperature": 0.8, "seed": 3 + i, **{key: value for key, value in line.items() if key not in ("prompt", "id")}}
        result = generate(tiny(), [line["prompt"]], max_new_tokens=9, tokenizer=BYTES, **settings)[0]
        names = {"index": i, **({"id": line["id"]} if "id" in line else {}), "prompt": line["prompt"]}
        rows.append({**names, "text": result.text, "tokens": result.tokens, "finish_reason": result.finish_reason})
    return rows


def test_each_line_gets_what_it_gets_alone_and_order_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES) + "\n")
    prompts = read_prompts(tmp_path / "p.jsonl")
    assert prompts == LINES
    sample_file(tiny(), prompts, tmp_path / "out.jsonl", **OPTIONS)
    assert written(tmp_path / "out.jsonl") == alone()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "p.jsonl"]
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines()[-1].startswith("prompt 5/5 ")


@pytest.mark.parametrize("torn", ["", '{"index": 3, "pro', '{"index": 3}'])
def test_an_interrupt_keeps_what_is_done_and_does_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: str) -> None:
    out, batches = tmp_path / "out.jsonl", []

    def interrupted(model: Any, request: Any, *, idle: int = 0, real: Any = module.pieces) -> Any:
        batches.append(request.rows)
        if len(batches) == 2:
            raise KeyboardInterrupt
        return real(model, request, idle=idle)

    monkeypatch.setattr(module, "pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sample_file(tiny(), LINES, out, **OPTIONS)
    done = written(out)
    assert [row["index"] for row in done] in ([0, 4], [4, 0]), "the longest first"
    with out.open("a") as file:
        file.write(torn)
    sample_file(tiny(), LINES, out, **OPTIONS)
    assert written(out) == alone()
    assert [len(rows) for rows in batches] == [2, 2, 2, 2] and not any(row[:6] == list(b"a long") for rows in batches[1:] for row in rows)


def test_work_made_with_something_else_is_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(module, "pieces", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sample_file(tiny(), LINES, out, **OPTIONS)
    for changes in (dict(made_with="other"), dict(temperature=0.9), dict(max_new_tokens=8)):
        with pytest.raises(InputError, match="unfinished work with another model, other prompts or other settings"):
            sample_file(tiny(), LINES, out, **{**OPTIONS, **changes})
    with pytest.raises(InputError, match="unfinished work"):
        sample_file(tiny(), LINES[:4], out, **OPTIONS)
    (tmp_path / "mine.txt").write_text("precious\n")
    with pytest.raises(InputError, match="mine.txt exists; give a new --out"):
        sample_file(tiny(), LINES, tmp_path / "mine.txt", **OPTIONS)
    assert (tmp_path / "mine.txt").read_text() == "precious\n"


def test_several_samples_of_each_prompt(tmp_path: Path) -> None:
    sample_file(tiny(), LINES[:3], tmp_path / "out.jsonl", **{**OPTIONS, "num_samples": 2})
    rows = written(tmp_path / "out.jsonl")
    assert [(row["index"], row["sample"]) for row in rows] == [(i, j) for i in range(3) for j in range(2)]
    assert rows[4]["tokens"] != rows[5]["tokens"] and rows[4]["tokens"] == generate(tiny(), [[5, 256, 7]], max_new_tokens=9, temperature=0.8, seed=77)[0].tokens


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "\xff"}', r"line 2 is not UTF-8 \(at byte 12\)"),
        (b"hello", "line 2 is not JSON"),
        (b'["a"]', 'line 2 must be an object with a "prompt"'),
        (b'{"text": "a"}', 'line 2 must be an object with a "prompt"'),
        (b'{"prompt": 5}', 'line 2 must be an object with a "prompt"'),
        (b'{"prompt": "a", "temprature": 1}', "line 2 has the unknown key 'temprature'; .* temperature"),
        (b'{"prompt": "a", "top_p": 1.5}', r"line 2: top_p=1.5 must be above 0"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "line 2: logit_bias="),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(InputError, match=message):
        read_prompts(tmp_path / "p.jsonl")


def test_nothing_is_written_when_a_prompt_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pieces", lambda *_, **__: pytest.fail("computed"))
    for line, message in [
        ({"prompt": [5] * 205}, "prompt 1 has 205 tokens"),
        ({"prompt": [999]}, "prompt 1: token id 999"),
        ({"prompt": "\udcff"}, "prompt 1 is not valid UTF-8"),
    ]:
        with pytest.raises(InputError, match=message):
            sample_file(tiny(), [{"prompt": "fine"}, line], tmp_path / "out.jsonl", **OPTIONS)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="cannot read"):
        read_prompts(tmp_path / "none.jsonl")
