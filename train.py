"""Train a GPT-2: `python train.py` for the quickstart, `python train.py configs/X.yaml --train.steps=200 --run.dir=DIR` for any other."""

import sys

from gpt2jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
