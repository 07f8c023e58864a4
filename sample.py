"""Sample from a model: `python sample.py runs/quickstart --prompt "def "`."""

import sys

from gpt2jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["sample", *sys.argv[1:]]))
