"""The command line as a user types it: exit statuses, one line for bad input, and a quick --help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2jax import __version__
from gpt2jax.cli import main

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["sample"], "arguments are required: MODEL"),
        (["sample", "nowhere/at/all", "--prompt", "x"], "there is no nowhere/at/all"),
        (["sample", ".", "--frob"], "unknown option '--frob'"),
        (["sample", ".", "--max-new-tokens=many"], "invalid int value: 'many'"),
        (["train", "nowhere.yaml"], "config file nowhere.yaml does not exist"),
        (["train", "--train.stepz=3"], "did you mean train.steps?"),
        (["train", "--frob"], "cannot read option '--frob'"),
        (["train", "--data.source={a/b: 1, c: -1}"], "data.source of c=-1: input should be greater than 0"),
        (["train", "--run.dir=my runs/a", "--train.steps=0"], "train.steps=0: input should be greater than or equal to 1"),
        (["train", os.devnull, "b.yaml"], "config file b.yaml does not exist"),
        (["convert", "nowhere/at/all", "--out", "x"], "there is no nowhere/at/all"),
        (["prepare", "nowhere.txt", "--out", "x"], "nowhere.txt"),
        (["plot", "nowhere"], "nowhere holds no metrics.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith("gpt2jax: error: ") and words in line
    assert list(tmp_path.iterdir()) == []


def test_prepare_then_train_then_sample_then_convert(tmp_path: Path, tiny_options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").mkdir()
    for i in range(9):
        (tmp_path / "text" / f"{i}.md").write_text(f"document {i} says hello\n" * 20)
    assert main(["prepare", str(tmp_path / "text"), "--out", str(tmp_path / "data"), "--tokenizer", "bytes", "--val-fraction", "0.3"]) == 0
    more = [f"--data.source={tmp_path / 'data'}", "--train.steps=2", "--run.sample_prompt=document", "--run.sample_tokens=5"]
    assert main(["train", os.devnull, *tiny_options, *more]) == 0
    assert "a sample of the trained model" in capsys.readouterr().out
    assert main(["sample", str(tmp_path / "run"), "--prompt", "document", "--max-new-tokens", "7"]) == 0
    assert capsys.readouterr().out.startswith("document")
    assert main(["sample", str(tmp_path / "run"), "--prompt", "x" * 20]) == 0, "without a number, what the context leaves room for"
    assert main(["convert", str(tmp_path / "run"), "--out", str(tmp_path / "model")]) == 0
    assert main(["sample", str(tmp_path / "model"), "--prompt", "document", "--max-new-tokens", "7"]) == 0


def test_help_and_version_do_not_start_jax() -> None:
    code = "import sys; from gpt2jax.cli import main; main(sys.argv[1:]); sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    for arguments in (["--help"], ["train", "--help"], ["--version"]):
        result = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert ("--model.n_layer" if "train" in arguments else __version__ if arguments == ["--version"] else "COMMAND") in result.stdout


def test_python_m_and_the_scripts_are_the_same_command() -> None:
    for command in (["-m", "gpt2jax", "sample"], ["sample.py"]):
        result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (2, "gpt2jax: error: the following arguments are required: MODEL; see gpt2jax sample --help\n")


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpt2jax.training.plot.plot_runs", interrupt)
    assert main(["plot", "runs/x"]) == 130
    assert capsys.readouterr().err == "gpt2jax: interrupted\n"
