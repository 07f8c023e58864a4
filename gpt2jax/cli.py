"""The `gpt2jax` command. Subcommands import what they need when they run, so that `--help` answers at once.

Exit status: 0 success, 2 bad input (one line on stderr), 1 a run that failed, 130 Ctrl-C, 143 SIGTERM after a last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from gpt2jax.errors import InputError

QUICKSTART = "quickstart.yaml"
TRAIN = "Train a model. With no CONFIG: configs/quickstart.yaml; of several each is laid over those before it."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: sys.argv) and return its exit status."""
    warnings.formatwarning = lambda message, *_, **__: f"gpt2jax: warning: {message}\n"
    try:
        return _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except InputError as error:
        print(f"gpt2jax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpt2jax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(arguments: list[str]) -> int:
    parser = _Parser(prog="gpt2jax", description="GPT-2 in JAX and Flax: train, sample, convert, prepare, inspect.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    run: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {}

    train = commands.add_parser("train", help="train a model", description=TRAIN, add_help=False)
    train.add_argument("config", nargs="*", metavar="CONFIG", help="YAML files, each laid over those before it")
    train.add_argument("-h", "--help", action="store_true")
    run["train"] = _train

    sample = commands.add_parser("sample", help="continue a prompt", description="Continue a prompt.")
    from gpt2jax.decoding.command import add_arguments

    add_arguments(sample)
    run["sample"] = _sample

    convert = commands.add_parser("convert", help="import a Hugging Face folder", description="Write a model as a folder that sample and load read.")
    convert.add_argument("src", metavar="SRC", help="a Hugging Face GPT-2 or Llama folder, a hub id, a run folder or a checkpoint")
    convert.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    run["convert"] = _convert

    prepare = commands.add_parser("prepare", help="turn text into token shards", description="Turn text into token shards that training reads.")
    prepare.add_argument(
        "sources", nargs="+", metavar="SOURCE",
        help="python-stdlib, - for standard input, files, folders and globs (.txt .md .py .jsonl .parquet, .gz, .zst), or hf:NAME[:CONFIG[:SPLIT]]",
    )  # fmt: skip
    prepare.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    prepare.add_argument("--tokenizer", default="gpt2", help="gpt2, bytes, or a Hugging Face folder (default: gpt2)")
    prepare.add_argument("--val-fraction", type=float, default=0.02, metavar="F", help="share of documents for validation (default: 0.02)")
    prepare.add_argument("--seed", type=int, default=0, help="seed of the train/validation split (default: 0)")
    prepare.add_argument("--separator", metavar="TEXT", help="text that separates documents inside plain text files")
    prepare.add_argument("--text-key", default="text", metavar="KEY", help="key of the text in JSON lines, tables and data sets (default: text)")
    prepare.add_argument("--limit-documents", type=int, metavar="N", help="read no more documents than this")
    prepare.add_argument("--limit-tokens", type=int, metavar="N", help="end with the document that reaches this many tokens")
    prepare.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens a shard (default: 100,000,000)")
    prepare.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    run["prepare"] = _prepare

    inspect = commands.add_parser("inspect", help="parameters, FLOPs and cache bytes of a config", description="Print what a model is made of, by formula.")
    inspect.add_argument("configs", nargs="+", metavar="CONFIG", help="YAML files, each laid over those before it; or a folder that holds a model")
    inspect.add_argument("--context", type=int, metavar="T", help="tokens of context (default: n_positions)")
    inspect.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    run["inspect"] = _inspect

    plot = commands.add_parser("plot", help="draw the curves of runs", description="Draw loss, learning rate, gradient norm and throughput of runs.")
    plot.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    plot.add_argument("--out", default="runs.png", metavar="FILE", help="the picture to write (default: runs.png)")
    run["plot"] = _plot

    # argparse would take an option that it does not know, and that has a space in it, for a file
    overrides = [argument for argument in arguments if re.match(r"--\w+\.\w+=", argument)] if arguments[:1] in (["train"], ["inspect"]) else []
    options, rest = parser.parse_known_args([argument for argument in arguments if argument not in overrides])
    if options.version:
        from gpt2jax import __version__

        print(f"gpt2jax {__version__}")
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    if rest and options.command not in ("train", "inspect"):
        raise InputError(f"unknown option {rest[0]!r}; see gpt2jax {options.command} --help")
    return run[options.command](options, [*rest, *overrides])


def _train(options: argparse.Namespace, overrides: list[str]) -> int:
    from gpt2jax.config import describe_options, load_config

    if options.help:
        print(f"usage: train.py [CONFIG ...] [--section.key=value ...]\n\n{TRAIN}\n\noptions:")
        for name, kind, default, meaning in describe_options():
            print(f"  {name:38} {meaning} ({kind}; default {default!s})")
        return 0
    config = load_config(options.config or _quickstart(), overrides)
    from gpt2jax import runtime
    from gpt2jax.parallel.hosts import several_hosts
    from gpt2jax.training.loop import RunFailed, train

    runtime.start()
    try:
        return train(config)
    except RunFailed as error:
        print(f"gpt2jax: the run failed: {error}", file=sys.stderr, flush=True)
        if several_hosts():
            os._exit(1)  # JAX would wait at its end for hosts that are gone
        return 1


def _sample(options: argparse.Namespace, _: list[str]) -> int:
    from gpt2jax.decoding.command import run_sample

    return run_sample(options)


def _convert(options: argparse.Namespace, _: list[str]) -> int:
    from gpt2jax.loading import convert_folder

    convert_folder(options.src, Path(options.out))
    print(f"wrote {options.out}; sample from it: python sample.py {options.out} --prompt TEXT")
    return 0


def _prepare(options: argparse.Namespace, _: list[str]) -> int:
    from gpt2jax.data.prepare import prepare
    from gpt2jax.tokenizer import load_tokenizer

    manifest = prepare(
        options.sources,
        Path(options.out),
        tokenizer=load_tokenizer(options.tokenizer),
        val_fraction=options.val_fraction,
        seed=options.seed,
        shard_tokens=options.shard_tokens,
        workers=options.workers,
        separator=options.separator,
        text_key=options.text_key,
        limit_documents=options.limit_documents,
        limit_tokens=options.limit_tokens,
    )
    sizes = ", ".join(f"{name} {split.tokens:,} tokens of {split.documents:,} documents" for name, split in manifest.splits.items())
    print(f"wrote {options.out}: {sizes}; train on it: --data.source={options.out} --data.tokenizer={options.tokenizer}")
    return 0


def _inspect(options: argparse.Namespace, overrides: list[str]) -> int:
    from gpt2jax.analysis.inventory import print_inventory, take_inventory
    from gpt2jax.config import load_config

    folders = [path for path in map(Path, options.configs) if path.is_dir()]
    if folders and (len(options.configs) > 1 or overrides):
        raise InputError(f"{folders[0]} is a folder, whose model is as it is; give it alone, or give YAML files")
    if folders:
        from gpt2jax.loading import read_model_config

        config = read_model_config(folders[0])
    else:
        config = load_config(options.configs, overrides).model
    inventory = take_inventory(config, options.context)
    if options.json:
        print(json.dumps(inventory.as_dict()))
    else:
        print_inventory(inventory)
    return 0


def _plot(options: argparse.Namespace, _: list[str]) -> int:
    from gpt2jax.training.plot import plot_runs

    plot_runs([Path(run) for run in options.runs], Path(options.out))
    print(f"wrote {options.out}")
    return 0


def _quickstart() -> Path:
    """configs/quickstart.yaml: of the working folder, else of the source tree, else the copy that an installed package carries."""
    package = Path(__file__).resolve().parent
    homes = [Path("configs"), package.parent / "configs", package / "configs"]
    return next((home / QUICKSTART for home in homes if (home / QUICKSTART).is_file()), homes[0] / QUICKSTART)


class _Parser(argparse.ArgumentParser):
    """argparse that reports bad usage in one line, as everything else does."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")
