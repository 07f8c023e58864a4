"""Many prompts from a file: sorted into batches of like lengths, results written as each batch is done, in the prompts' order in the end.

A line of the prompts is a JSON object: `prompt` (text, or a list of token ids), any sampling settings of its own, and an `id` that is handed on. While the work
lasts, OUT holds finished prompts in the order in which they were done, and OUT.job what they were made with; a run that was interrupted goes on from there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gpt2jax.decoding.generate import Generation, pieces
from gpt2jax.decoding.request import Request, end_of_text_id, prompt_ids
from gpt2jax.decoding.settings import SETTINGS, check_settings
from gpt2jax.errors import InputError
from gpt2jax.model.gpt2 import GPT2
from gpt2jax.training.folder import write_text

if TYPE_CHECKING:
    from gpt2jax.tokenizer import Tokenizer


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of prompts, checked as far as they can be without a model; InputError names the line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give a file of JSON lines") from None
    return [_read_line(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def sample_file(
    model: GPT2, prompts: Sequence[Mapping[str, Any]], out: Path, *, tokenizer: Tokenizer | None, batch_size: int, made_with: str, **options: Any
) -> None:
    """Continue every prompt (as `read_prompts` gives them) and write a JSON line for each result to `out`, in the prompts' order.

    A prompt's result depends on its own line and on options (those of `generate`), not on its batch; without a seed of its own, line i uses seed + i.
    made_with: what else the results depend on, such as the model's name; unfinished work that was made with something else is refused, as is a file that holds
    other things. Raises InputError, before any compute, for whatever `generate` refuses.
    """
    rows = [_row(i, prompt, options) for i, prompt in enumerate(prompts)]
    job = hashlib.sha256(
        json.dumps([made_with, [dict(p) for p in prompts], {k: repr(v) for k, v in sorted(options.items()) if k != "draft_model"}]).encode()
    ).hexdigest()
    samples = options.get("num_samples", 1)
    done = _finished(out, job, samples)
    end_of_text = end_of_text_id(model.config, tokenizer)
    lengths = [len(prompt_ids(f"prompt {i}", row["prompt"], model.config, tokenizer, end_of_text)) for i, row in enumerate(rows)]
    for i, row in enumerate(rows):  # all of them before the first is computed
        try:
            _request(model, [row], tokenizer, options)
        except InputError as error:
            raise InputError(str(error).replace("prompt 0", f"prompt {i}", 1)) from None
    todo = sorted((i for i in range(len(rows)) if i not in done), key=lambda i: -lengths[i])  # the longest first: what memory cannot hold shows at once
    write_text(_job_file(out), job + "\n")
    with out.open("ab") as file, _Progress(len(rows), len(done)) as progress:
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            for place, results in _continue(model, [rows[i] for i in batch], tokenizer, options, batch_size):
                i = batch[place]
                file.write(b"".join(_line(i, rows[i], sample, result, samples) for sample, result in enumerate(results)))
                file.flush()
                progress.advance(sum(len(result.tokens) for result in results))
    lines = sorted(out.read_bytes().splitlines(keepends=True), key=lambda line: (json.loads(line)["index"], json.loads(line).get("sample", 0)))
    write_text(out, b"".join(lines).decode())
    _job_file(out).unlink()


def _read_line(where: str, line: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 (at byte {error.start}); save the file in UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f'{where} is not JSON ({error.msg} at column {error.colno}); each line is an object such as {{"prompt": "Hello"}}') from None
    if not isinstance(tree, dict) or not isinstance(tree.get("prompt"), (str, list)):
        raise InputError(f'{where} must be an object with a "prompt", a string or a list of token ids')
    for key in tree:
        if key not in ("prompt", "id", *SETTINGS):
            raise InputError(f"{where} has the unknown key {key!r}; beside prompt and id there are {', '.join(SETTINGS)}")
    try:
        check_settings({key: value for key, value in tree.items() if key in SETTINGS}, 1)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return tree


def _row(index: int, prompt: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt with a seed of its own."""
    return {"seed": (options.get("seed", 0) + index) % 2**32, **prompt}


def _request(model: GPT2, rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None, options: Mapping[str, Any]) -> Request:
    settings = {name: [row.get(name, options.get(name, setting.default)) for row in rows] for name, setting in SETTINGS.items()}
    return Request.checked(model.config, [row["prompt"] for row in rows], **{**options, "tokenizer": tokenizer, **settings})


def _continue(
    model: GPT2, rows: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None, options: Mapping[str, Any], batch_size: int
) -> Iterator[tuple[int, list[Generation]]]:
    """(place in the batch, its results) as they are done. The last batch is filled up, since another size would compile again."""
    filled = [*rows, *[rows[-1]] * (batch_size - len(rows))]
    request = _request(model, filled, tokenizer, options)
    samples = len(request.rows) // len(filled)
    results: list[dict[int, Generation]] = [{} for _ in rows]
    for piece in pieces(model, request, idle=(batch_size - len(rows)) * samples):
        if piece.result is not None:
            place, sample = divmod(piece.index, samples)
            results[place][sample] = piece.result
            if len(results[place]) == samples:
                yield place, [results[place][sample] for sample in range(samples)]


def _line(index: int, row: Mapping[str, Any], sample: int, result: Generation, samples: int) -> bytes:
    names = {"index": index, **({"id": row["id"]} if "id" in row else {}), **({"sample": sample} if samples > 1 else {}), "prompt": row["prompt"]}
    return json.dumps({**names, **result_fields(result)}, ensure_ascii=False).encode() + b"\n"


def result_fields(result: Generation) -> dict[str, Any]:
    """A result as JSON has it: without what was not asked for."""
    fields = {"text": result.text, **dataclasses.asdict(result)}
    return {name: value for name, value in fields.items() if value is not None or name == "text"}


def _finished(out: Path, job: str, samples: int) -> set[int]:
    """The prompts that unfinished work at `out` has done. What an interrupt left half-written is cut off."""
    if not out.exists():
        return set()
    known = _job_file(out)
    if not known.is_file():
        raise InputError(f"{out} exists; give a new --out, or remove it")
    if known.read_text().strip() != job:
        raise InputError(f"{out} is unfinished work with another model, other prompts or other settings; finish it with those, give a new --out, or remove it")
    counts: dict[int, int] = {}
    kept = []
    for line in out.read_bytes().splitlines(keepends=True):
        try:
            index = json.loads(line)["index"] if line.endswith(b"\n") else None
        except ValueError:
            index = None
        if index is not None:
            counts[index] = counts.get(index, 0) + 1
            kept.append((index, line))
    whole = {index for index, count in counts.items() if count == samples}
    write_text(out, b"".join(line for index, line in kept if index in whole).decode())
    return whole


def _job_file(out: Path) -> Path:
    return out.with_name(out.name + ".job")


class _Progress:
    """A rich bar with rate and time left on a terminal; elsewhere a plain line now and then. All on stderr."""

    def __init__(self, total: int, done: int) -> None:
        self.console, self.total, self.done, self.tokens = Console(stderr=True), total, done, 0
        columns = (TextColumn("prompt"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TextColumn("left"))
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("sample", total=total, completed=done, note="")

    def __enter__(self) -> _Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def advance(self, tokens: int) -> None:
        self.done, self.tokens = self.done + 1, self.tokens + tokens
        rate = self.tokens / max(self.bar.tasks[0].elapsed or 0, 1e-9)
        self.bar.update(self.task, completed=self.done, note=f"{rate:,.0f} tokens/s")
        if not self.console.is_terminal and (self.done == self.total or self.done % max(self.total // 20, 1) == 0):
            self.console.print(f"prompt {self.done}/{self.total}  {rate:,.0f} tokens/s", markup=False, highlight=False)
