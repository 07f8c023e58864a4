"""The sample command: continue a prompt from the command line. Only text or JSON goes to stdout."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import sys

from gpt2jax.decoding.settings import check_new_tokens, check_seed, check_temperature, check_text, check_top_k
from gpt2jax.errors import InputError

RULE = "-" * 40
#: Without --max-new-tokens, in a context that is large enough.
NEW_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `run_sample`."""
    parser.add_argument("model", metavar="MODEL", help="a run folder, a checkpoint, a Hugging Face GPT-2 folder or a hub id")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue (default: empty, which means the end-of-text token)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help=f"most tokens to add (default: {NEW_TOKENS}, or what the context leaves room for)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 always takes the most likely token (default: 1.0)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among the K most likely tokens; 0 is no limit (default: 0)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first sample; the next ones use N+1, N+2, ... (default: 0)")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="continuations of the prompt (default: 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line: prompt, text, tokens, finish_reason")
    parser.add_argument("--compute-dtype", choices=("float32", "bfloat16"), help="dtype of matmuls (default: the model's)")


def run_sample(options: argparse.Namespace) -> int:
    """Load the model, continue the prompt, print. Returns the exit status 0; raises InputError for bad input, most of it before the model is loaded."""
    if options.max_new_tokens is not None:
        check_new_tokens(options.max_new_tokens)
    check_temperature(options.temperature)
    check_top_k(options.top_k)
    check_text("--prompt", options.prompt)
    if options.num_samples < 1:
        raise InputError(f"--num-samples={options.num_samples} must be 1 or more")
    seeds = [check_seed(options.seed + i) for i in range(options.num_samples)]

    from gpt2jax import runtime
    from gpt2jax.decoding.generate import generate
    from gpt2jax.loading import load

    runtime.start()
    model, tokenizer = load(options.model, compute_dtype=options.compute_dtype)
    if tokenizer is None:
        raise InputError(f"{options.model} has no tokenizer, which a prompt needs; put its tokenizer.json beside the weights")
    room = model.config.n_positions + 1 - max(len(tokenizer.encode(options.prompt)), 1)
    results = generate(
        model,
        [options.prompt] * options.num_samples,
        max_new_tokens=options.max_new_tokens or max(min(NEW_TOKENS, room), 1),
        temperature=options.temperature,
        top_k=options.top_k,
        seed=seeds,
        tokenizer=tokenizer,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not lose the rest
    for i, result in enumerate(results):
        if options.json:
            fields = dataclasses.asdict(result)
            print(json.dumps({"prompt": options.prompt, **{name: fields[name] for name in ("text", "tokens", "finish_reason")}}))
        else:
            print((RULE + "\n" if i else "") + options.prompt + (result.text or ""))
    return 0
