"""Each recipe on each machine: sizes, batches and meshes add up, and the small ones train. What is in launch/ parses, down to the command lines."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpt2jax.analysis.inventory import take_inventory
from gpt2jax.config import Config, load_config
from gpt2jax.parallel.mesh import check_divisible, mesh_sizes
from gpt2jax.training.loop import train
from gpt2jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent
CONFIGS, LAUNCH = ROOT / "configs", ROOT / "launch"
#: Parameters, learning rate and tokens a step: the release, and GPT-3's table 2.1 (xl: 1M tokens).
MODELS = {
    "gpt2-124m": (124_439_808, 6e-4, 2**19),
    "gpt2-medium": (354_823_168, 3e-4, 2**19),
    "gpt2-large": (774_030_080, 2.5e-4, 2**19),
    "gpt2-xl": (1_557_611_200, 2e-4, 2**20),
}
HARDWARE = sorted((CONFIGS / "hardware").glob("*.yaml"))
TEXT = "To be, or not to be, that is the question: line %d of a speech.\n"


def fits(config: Config, devices: int) -> None:
    sizes = mesh_sizes(config.mesh, devices)
    check_divisible(config, sizes)
    rows = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    assert config.train.batch_size % (rows * config.train.accumulation) == 0
    assert config.train.batch_size // (rows * config.train.accumulation) <= 64, "rows of a micro-batch on one device"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("data", ["openwebtext", "fineweb-edu"])
@pytest.mark.parametrize("hardware", [None, *HARDWARE], ids=lambda path: path.stem if path else "one")
def test_a_model_a_text_and_a_machine_add_up(name: str, data: str, hardware: Path | None) -> None:
    parts = [CONFIGS / f"{name}.yaml", CONFIGS / "data" / f"{data}.yaml", *([hardware] if hardware else [])]
    config = load_config(parts)
    parameters, rate, tokens = MODELS[name]
    assert take_inventory(config.model).parameter_count == parameters
    assert (config.optimizer.learning_rate, config.train.batch_size * config.sequence_length) == (rate, tokens)
    assert config.data.source == f"data/{data}" and config.model.compute_dtype == "bfloat16"
    assert config.train.steps == {"openwebtext": 600_000, "fineweb-edu": 19_073}[data]
    fits(config, int(hardware.stem.split("-")[1]) if hardware else 1)


def test_all_machines_are_known() -> None:
    assert [path.stem for path in HARDWARE] == ["gpu-8", "v5e-256", "v5e-8", "v6e-8"]


@pytest.mark.parametrize("name", ["quickstart", "shakespeare-char", "shakespeare", "finetune", "finetune-lora"])
def test_small_recipes_fit_one_device(name: str) -> None:
    fits(load_config(CONFIGS / f"{name}.yaml"), 1)


def commands() -> list[tuple[str, list[str]]]:
    """(file, words after train.py) of every command in launch/ and its page."""
    found = []
    for path in [*sorted(LAUNCH.iterdir()), ROOT / "docs" / "launch.md"]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".yaml":
            found += [(path.name, [str(word) for word in words[2:]]) for words in _values(list(yaml.safe_load_all(text)), "command")]
        else:
            found += [(path.name, shlex.split(line.split('"')[0])) for line in re.findall(r"python train\.py (.*)", text)]
    return found


def _values(tree: Any, key: str) -> list[Any]:
    if isinstance(tree, dict):
        return ([tree[key]] if key in tree else []) + [value for part in tree.values() for value in _values(part, key)]
    return [value for part in tree for value in _values(part, key)] if isinstance(tree, list) else []


def test_the_commands_in_launch_are_ones_that_train_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    devices = {"slurm.sbatch": 8, "tpu.sh": 256, "gke-tpu.yaml": 256, "kubernetes-gpu.yaml": 32, "launch.md": 8}
    seen = set()
    for name, words in commands():
        words = [word.replace("$(JOB_COMPLETION_INDEX)", "3") for word in words]
        files = [word for word in words if not word.startswith("--")]
        fits(load_config(files, [word for word in words if word.startswith("--")]), devices[name])
        seen.add(name)
    assert seen == devices.keys()


@pytest.mark.parametrize("name", ["tpu.sh", "slurm.sbatch"])
def test_scripts_are_well_formed(name: str) -> None:
    assert subprocess.run(["bash", "-n", LAUNCH / name], capture_output=True).stderr == b""


def test_kubernetes_files_name_what_jax_needs() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes-gpu.yaml").read_text())
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 4
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} and service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    [jobset] = yaml.safe_load_all((LAUNCH / "gke-tpu.yaml").read_text())
    slice_spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = slice_spec["template"]["spec"]["containers"]
    assert slice_spec["parallelism"] * container["resources"]["limits"]["google.com/tpu"] == 256


@pytest.mark.slow
def test_the_small_recipes_train(tmp_path: Path) -> None:
    """A few steps each of a smaller size; both kinds of fine-tuning start from the first one's run."""
    text = tmp_path / "text.txt"
    text.write_text("".join(TEXT % i for i in range(900)))
    small = ["--model.n_layer=1", "--model.n_head=2", "--model.n_embd=16", "--model.n_positions=32"]
    short = [f"--data.source={text}", "--train.steps=4", "--eval.every=2", "--eval.sequences=8", "--checkpoint.every=2", "--run.sample_prompt=none"]
    start = f"--run.init_from={tmp_path / 'shakespeare-char'}"
    for name, own in (
        ("shakespeare-char", small), ("shakespeare", small), ("finetune", [start]), ("finetune-lora", [start, "--lora.rank=2"]),
    ):  # fmt: skip
        options = [*short, *own, "--train.batch_size=4", f"--run.dir={tmp_path / name}"]
        assert train(load_config(CONFIGS / f"{name}.yaml", options)) == 0
    losses = {path.parent.name: read_metrics(path)[-1]["val_loss"] for path in tmp_path.glob("*/metrics.jsonl")}
    assert losses["finetune-lora"] < losses["shakespeare-char"] and losses["finetune"] < losses["shakespeare-char"]
