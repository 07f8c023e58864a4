"""The sample command: continue a prompt, a file of prompts, or a conversation. Only text or JSON goes to stdout."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2jax.decoding.settings import CACHE_DTYPES, SETTINGS, WEIGHTS_DTYPES, check_new_tokens, check_settings, check_text
from gpt2jax.errors import InputError

if TYPE_CHECKING:
    from gpt2jax.model.gpt2 import GPT2
    from gpt2jax.tokenizer import Tokenizer

RULE = "-" * 40
#: Without --max-new-tokens, in a context that is large enough.
NEW_TOKENS = 128
BATCH_SIZE = 8
#: Options that a mode has no use for, and options that need another one.
REFUSED = {
    "prompts": {"prompt", "stream", "json", "interactive", "num_beams"},
    "interactive": {"prompt", "json", "logprobs", "num_samples", "out", "batch_size", "draft", "num_beams"},
    "stream": {"json", "logprobs", "num_samples", "out", "batch_size", "num_beams"},
}
NEEDED = {
    "out": {"prompts"},
    "batch_size": {"prompts"},
    "prompts": {"out"},
    "logprobs": {"json", "prompts"},
    "draft_tokens": {"draft"},
    "length_penalty": {"num_beams"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `run_sample`."""
    parser.add_argument("model", metavar="MODEL", help="a run folder, a checkpoint, a Hugging Face GPT-2 or Llama folder, or a hub id")
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue (default: empty, which means the end-of-text token)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help=f"most tokens to add (default: {NEW_TOKENS}, or what the context leaves room for)")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="continuations of each prompt (default: 1)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    parser.add_argument("--overflow", choices=("error", "slide"), default="error", help="slide: go on past the context over its last half (default: error)")

    modes = parser.add_argument_group("where prompts come from and text goes")
    modes.add_argument("--stream", action="store_true", help="print the text as it comes")
    modes.add_argument("--json", action="store_true", help="one JSON object a line: prompt, text, tokens, finish_reason")
    modes.add_argument("--logprobs", type=int, metavar="N", help="with --json or --prompts: log-probabilities of the tokens, and of the N likeliest ones")
    modes.add_argument(
        "--prompts", metavar="FILE.jsonl", help='continue every line, {"prompt": ..., and any sampling setting}; resumes where it was interrupted'
    )
    modes.add_argument("--out", metavar="OUT.jsonl", help="where the results of --prompts go")
    modes.add_argument("--batch-size", type=int, metavar="N", help=f"prompts computed together (default: {BATCH_SIZE})")
    modes.add_argument("--interactive", action="store_true", help="continue what you type, line by line, on one growing text")

    settings = parser.add_argument_group("sampling settings, which act in the order of gpt2jax.decoding.settings.Settings")
    for name, setting in SETTINGS.items():
        default = f" (default: {setting.default})" if isinstance(setting.default, (int, float)) else ""
        settings.add_argument(f"--{name.replace('_', '-')}", type=setting.kind, metavar=name.rpartition("_")[2].upper(), help=setting.help + default)

    parser.add_argument("--num-beams", type=int, metavar="N", help="search with N beams instead of drawing; --num-samples of the best are shown")
    parser.add_argument("--length-penalty", type=float, metavar="P", help="of beams: scores are sums over length to this power (default: 1.0)")
    parser.add_argument("--draft", metavar="MODEL", help="a smaller model of the same vocabulary that drafts tokens for the model to check")
    parser.add_argument("--draft-tokens", type=int, metavar="N", help="tokens drafted at a time (default: 4)")
    parser.add_argument("--mesh", metavar="data=N,tensor=N", help="devices to spread rows and weights over")
    parser.add_argument("--weights-dtype", choices=WEIGHTS_DTYPES, help="what weights are stored in, made on load (default: float32)")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, help="what keys and values are kept in (default: the compute dtype)")
    parser.add_argument("--compute-dtype", choices=("float32", "bfloat16"), help="dtype of matmuls (default: the model's)")


def run_sample(options: argparse.Namespace) -> int:
    """Load the model, continue the prompt, print. Returns the exit status 0; raises InputError for bad input, most of it before the model is loaded."""
    settings = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    _check(options, settings)
    mesh = _read_mesh(options.mesh)
    prompts = None
    if options.prompts is not None:
        from gpt2jax.decoding.many import read_prompts

        prompts = read_prompts(Path(options.prompts))

    from gpt2jax import runtime
    from gpt2jax.loading import load

    runtime.start()
    dtypes = dict(compute_dtype=options.compute_dtype, weights_dtype=options.weights_dtype)
    model, tokenizer = load(options.model, **dtypes)
    texts = prompts is None or any(isinstance(row["prompt"], str) for row in prompts)
    if tokenizer is None and texts:
        raise InputError(
            f"{options.model} has no tokenizer, which text needs; put its tokenizer.json beside the weights, or give a file of --prompts that holds token ids"
        )
    common = {**settings, "stop": options.stop, "overflow": options.overflow}
    common |= {name: getattr(options, name) for name in ("num_beams", "length_penalty", "cache_dtype") if getattr(options, name) is not None}
    if options.draft is not None:
        common |= {"draft_model": load(options.draft, **dtypes)[0], "draft_tokens": options.draft_tokens or 4}
    if mesh is not None:
        from gpt2jax.parallel.mesh import shard

        model = shard(model, **mesh)
        common |= {"draft_model": shard(common["draft_model"], **mesh)} if options.draft is not None else {}
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not lose the rest
    if prompts is not None:
        return _sample_file(options, model, tokenizer, prompts, common)
    assert tokenizer is not None
    if options.interactive:
        return _converse(options, model, tokenizer, common)
    prompt = options.prompt or ""
    common["max_new_tokens"] = options.max_new_tokens or _room(model, [len(tokenizer.encode(prompt))], options.overflow)
    if options.stream:
        return _stream(model, tokenizer, prompt, common)
    from gpt2jax.decoding.generate import generate
    from gpt2jax.decoding.many import result_fields

    results = generate(model, [prompt], tokenizer=tokenizer, num_samples=options.num_samples, logprobs=options.logprobs, **common)
    for i, result in enumerate(results):
        if options.json:
            print(json.dumps({"prompt": prompt, **result_fields(result)}))
        else:
            print((RULE + "\n" if i else "") + prompt + (result.text or ""))
    return 0


def _check(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Whatever can be refused without a model; an option that a mode has no use for is an error."""
    if options.max_new_tokens is not None:
        check_new_tokens(options.max_new_tokens)
    check_settings(settings, 1)
    for name, text in [("--prompt", options.prompt or ""), *(("--stop", stop) for stop in options.stop)]:
        check_text(name, text)
    if "" in options.stop:
        raise InputError("--stop='' is empty; give some text")
    if options.num_samples < 1:
        raise InputError(f"--num-samples={options.num_samples} must be 1 or more")
    check_settings({"seed": settings.get("seed", 0) + options.num_samples - 1}, 1)
    if options.batch_size is not None and options.batch_size < 1:
        raise InputError(f"--batch-size={options.batch_size} must be 1 or more")
    given = {name for name, value in vars(options).items() if value not in (None, False, []) and name not in ("num_samples", "overflow")}
    given |= {"num_samples"} if options.num_samples > 1 else set()
    flag = lambda name: "--" + name.replace("_", "-")  # noqa: E731
    for mode, others in REFUSED.items():
        if mode in given and given & others:
            raise InputError(f"{flag(mode)} does not go with {flag(min(given & others))}; drop one of the two")
    for name, needed in NEEDED.items():
        if name in given and not given & needed:
            raise InputError(f"{flag(name)} needs {' or '.join(map(flag, sorted(needed)))}")


def _read_mesh(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    sizes = dict(part.partition("=")[::2] for part in text.split(","))
    if not sizes.keys() <= {"data", "tensor"} or not all(size.isdecimal() for size in sizes.values()):
        raise InputError(f"--mesh={text} must name sizes, as in data=2,tensor=4")
    return {axis: int(size) for axis, size in sizes.items()}


def _room(model: GPT2, lengths: list[int], overflow: str) -> int:
    """The new tokens that a user who names no number gets."""
    room = NEW_TOKENS if model.config.context is None else model.config.context + 1 - max(1, *lengths)
    return NEW_TOKENS if overflow == "slide" else max(min(NEW_TOKENS, room), 1)


def _stream(model: GPT2, tokenizer: Tokenizer, prompt: str, common: dict[str, Any]) -> int:
    from gpt2jax.decoding.generate import stream

    pieces = stream(model, [prompt], tokenizer=tokenizer, **common)
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece.text, end="", flush=True)
    print()
    return 0


def _sample_file(options: argparse.Namespace, model: GPT2, tokenizer: Tokenizer | None, prompts: list[dict[str, Any]], common: dict[str, Any]) -> int:
    from gpt2jax.decoding.many import sample_file

    lengths = [len(tokenizer.encode(row["prompt"]) if tokenizer and isinstance(row["prompt"], str) else row["prompt"]) for row in prompts]
    common["max_new_tokens"] = options.max_new_tokens or _room(model, [0, *lengths], options.overflow)
    more = dict(num_samples=options.num_samples, logprobs=options.logprobs, batch_size=options.batch_size or BATCH_SIZE)
    sample_file(
        model,
        prompts,
        Path(options.out),
        tokenizer=tokenizer,
        made_with=f"{options.model} {options.compute_dtype} {options.weights_dtype} {options.draft}",
        **more,
        **common,
    )
    print(f"wrote {options.out}: {len(prompts)} prompts", file=sys.stderr)
    return 0


def _converse(options: argparse.Namespace, model: GPT2, tokenizer: Tokenizer, common: dict[str, Any]) -> int:
    """Read a line, continue the text with it, print what comes. The seed counts up from turn to turn."""
    from gpt2jax.decoding.session import Session

    session, turns = Session(model, tokenizer), list[int]()
    asking = sys.stdin.isatty()
    print("Type text to continue; it is added to the text so far. /new starts over, /undo takes the last turn back, /exit ends.", file=sys.stderr)
    while True:
        print("> " if asking else "", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        command = line.strip()
        if not line or command == "/exit":
            return 0
        if command in ("/new", "/undo"):
            session.tokens = session.tokens[: turns.pop()] if command == "/undo" and turns else []
            turns = turns if command == "/undo" else []
            continue
        text = line.removesuffix("\n")
        try:
            check_text("the line", text)
            start = len(session.tokens)
            new = options.max_new_tokens or _room(model, [start + len(tokenizer.encode(text))], options.overflow)
            pieces = session.send(text, **{**common, "max_new_tokens": new, "seed": (common.get("seed", 0) + len(turns)) % 2**32})
            turns.append(start)
            for piece in pieces:
                print(piece.text, end="", flush=True)
            print(flush=True)
            print(f"[{len(session.tokens)} tokens; {session.reused} of the prompt were in the cache]", file=sys.stderr)
        except InputError as error:
            print(f"gpt2jax: error: {error}; /new starts over", file=sys.stderr)
        except KeyboardInterrupt:
            print(flush=True)  # this turn ends, the conversation does not
