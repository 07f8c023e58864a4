"""Config: YAML, extends, presets, overrides, and refusals in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpt2jax.config import PRESETS, Config, ModelConfig, config_from_tree, describe_options, load_config, to_tree, to_yaml
from gpt2jax.errors import InputError

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.name)
def test_every_file_in_configs_loads(path: Path) -> None:
    config = load_config(path)
    assert config_from_tree(yaml.safe_load(to_yaml(config))) == config


def test_defaults_without_a_file() -> None:
    assert load_config() == Config()


def test_overrides_lie_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("train: {steps: 7, batch_size: 3}\noptimizer: {learning_rate: 6e-4}\n")
    config = load_config(file, ["--train.steps=9", "--optimizer.learning_rate=1e-2", "--optimizer.clip_norm=none"])
    assert (config.train.steps, config.train.batch_size) == (9, 3)
    assert config.optimizer.learning_rate == 0.01
    assert config.optimizer.clip_norm is None


def test_yaml_floats_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optimizer: {learning_rate: 6e-4, eps: 1E-9}\n")
    optimizer = load_config(tmp_path / "a.yaml").optimizer
    assert (optimizer.learning_rate, optimizer.eps) == (6e-4, 1e-9)


def test_text_options_are_taken_as_they_stand() -> None:
    config = load_config(None, ["--run.dir=2024", "--data.source=yes", "--run.sample_prompt=a=b: {c}"])
    assert (config.run.dir, config.data.source, config.run.sample_prompt) == ("2024", "yes", "a=b: {c}")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{a/b: 1, c: -1}", "data.source of c=-1: input should be greater than 0$"),
        ("{a: x}", "data.source of a='x': input should be a valid number$"),
        ("{a}", "data.source of a=None"),
        ("{a: 1", "--data.source={a: 1 is no mapping: "),
        ("{a: 1, a: 2}", "is no mapping: key 'a' stands twice"),
        ("", "data.source='': string should have at least 1 character$"),
    ],
)
def test_a_mix_that_is_wrong_is_named_by_its_source(value: str, words: str) -> None:
    assert load_config(None, ["--data.source={a/b: 1, c: 1e-9}"]).data.source == {"a/b": 1.0, "c": 1e-9}
    with pytest.raises(InputError, match=words):
        load_config(None, [f"--data.source={value}"])


def test_extends_names_only_what_changes(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {n_layer: 3, n_head: 2, n_embd: 6}\ntrain: {steps: 5}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "more.yaml").write_text("extends: ../base.yaml\ntrain: {batch_size: 4}\n")
    config = load_config(tmp_path / "sub" / "more.yaml")
    assert (config.model.n_layer, config.train.steps, config.train.batch_size) == (3, 5, 4)


def test_preset_replaces_the_sizes_of_the_file_it_extends(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {n_layer: 3, n_head: 2, n_embd: 6, resid_pdrop: 0.5}\n")
    (tmp_path / "xl.yaml").write_text("extends: base.yaml\nmodel: {preset: gpt2-xl}\n")
    model = load_config(tmp_path / "xl.yaml").model
    assert (model.n_layer, model.n_head, model.n_embd, model.resid_pdrop) == (48, 25, 1600, 0.5)
    assert load_config(None, ["--model.preset=gpt2-medium", "--model.n_layer=2"]).model.n_layer == 2
    assert [ModelConfig.preset(name).n_layer for name in PRESETS] == [12, 24, 36, 48]


def test_padded_vocabulary() -> None:
    assert ModelConfig().padded_vocab_size == 50304
    assert ModelConfig(vocab_size=257, vocab_multiple=1).padded_vocab_size == 257


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--train.stepz=5", ["train.stepz", "did you mean train.steps?"]),
        ("--trian.steps=5", ["trian", "did you mean train?"]),
        ("--model.n_layers=5", ["did you mean model.n_layer?"]),
        ("--model.n_layer=2.5", ["model.n_layer=2.5", "integer"]),
        ("--model.n_layer=true", ["model.n_layer=True", "integer"]),
        ("--model.n_layer=twelve", ["model.n_layer='twelve'", "integer"]),
        ("--model.n_layer=0", ["model.n_layer=0", "greater than or equal to 1"]),
        ("--model.n_layer=", ["model.n_layer=None"]),
        ("--model.resid_pdrop=1.0", ["resid_pdrop=1.0", "less than 1"]),
        ("--optimizer.learning_rate=-1", ["learning_rate=-1", "greater than 0"]),
        ("--optimizer.learning_rate=.inf", ["learning_rate=inf", "finite"]),
        ("--model.n_head=7", ["n_head=7", "n_embd=768", "nearest that does is 6"]),
        ("--model.eos_token_id=60000", ["eos_token_id=60000", "50257"]),
        ("--train.sequence_length=2048", ["sequence_length=2048", "n_positions=1024"]),
        ("--model.position=ropes", ["position='ropes'", "learned"]),
        ("--model.sliding_window=3000000000", ["sliding_window=3000000000", "less than 2147483648"]),
        ("--model.rope_theta=5.0", ["rope_theta=5.0", "position=learned"]),
        ("--model.kv_heads=5", ["kv_heads=5", "n_head=12", "nearest that does is 4"]),
        ("--model.preset=gpt3", ["gpt3", "gpt2-xl"]),
        ("--run.resume=yes", ["run.resume=True", "auto"]),
        ("train.steps=5", ["train.steps=5", "--section.key=value"]),
        ("--train=5", ["--train=5"]),
    ],
)
def test_bad_overrides_are_refused_in_one_line(override: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_config(None, [override])
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


YARN: dict[str, Any] = dict(position="rope", rope_scaling="yarn", rope_factor=2.0, rope_original_positions=64)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (dict(position="rope", rope_theta=1.0), "rope_theta=1.0 must be above 1"),
        (dict(position="rope", rope_scaling="linear"), "rope_factor=1.0 with model.rope_scaling=linear must be above 1"),
        (dict(position="rope", rope_factor=2.0), "rope_factor=2.0 has no meaning with model.rope_scaling=none"),
        (dict(position="rope", rope_scaling="linear", rope_factor=2.0, rope_beta_fast=9.0), "rope_beta_fast=9.0 has no meaning with model.rope_scaling=linear"),
        (dict(position="rope", rope_scaling="yarn", rope_factor=2.0), "needs model.rope_original_positions"),
        (dict(position="rope", rope_scaling="yarn", rope_factor=2.0, rope_original_positions=64, rope_beta_fast=1.0), "rope_beta_fast=1.0 must be above"),
        (dict(position="rope", rope_scaling="llama3", rope_factor=2.0, rope_original_positions=64, rope_low_freq_factor=4.0), "must be below"),
        (dict(position="rope", n_head=4, n_embd=12), "a head is 3 wide"),
        (dict(position="none", rope_layout="interleaved"), "rope_layout=interleaved has no meaning with model.position=none"),
        (dict(position="rope", position_initializer_range=0.3), "position_initializer_range=0.3 has no meaning with model.position=rope"),
        (dict(mla_kv_rank=8), "mla_kv_rank=8 has no meaning with model.attention=mha"),
        (dict(attention="mla", kv_heads=2), "kv_heads=2 does not go with model.attention=mla"),
        (dict(attention="mla", qk_norm=True), "qk_norm=True does not go with model.attention=mla"),
        (dict(attention="mla", mla_rope_dim=3, position="rope"), "mla_rope_dim is 3; choose an even one"),
        (dict(attention="mla", n_head=12, n_embd=12), "a head is 1 wide, and model.mla_rope_dim is half of it"),
        (dict(attention="mla", position="rope", rope_mscale_all_dim=1.0), "rope_mscale_all_dim=1.0 has no meaning with model.rope_scaling=none"),
        (dict(**YARN, rope_mscale_all_dim=1.0), "rope_mscale_all_dim=1.0 has no meaning with model.attention=mha"),
        (dict(mlp="swiglu", activation_function="gelu"), "activation_function=gelu does not go with model.mlp=swiglu"),
        (dict(mlp="geglu", activation_function="silu"), "activation_function=silu does not go with model.mlp=geglu"),
    ],
    ids=str,
)
def test_choices_that_do_not_go_together_are_named(model: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig(**model)


def test_files_are_laid_over_each_other_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {mlp: swiglu, n_layer: 3}")
    (tmp_path / "b.yaml").write_text("model: {n_layer: 5}")
    config = load_config([tmp_path / "a.yaml", tmp_path / "b.yaml"], ["--model.kv_heads=none", "--model.position=none"])
    assert (config.model.mlp, config.model.n_layer, config.model.kv_heads, config.model.position) == ("swiglu", 5, None, "none")
    assert load_config([tmp_path / "b.yaml", tmp_path / "a.yaml"]).model.n_layer == 3


def test_default_widths_of_the_mlp() -> None:
    """4 d, and 8/3 d up to a multiple of 64: with 2,048 for 768 three matrices are as large as two of 3,072."""
    widths = {(mlp, d): ModelConfig(mlp=mlp, n_embd=d, n_head=1).mlp_width for mlp in ("gelu", "swiglu", "geglu") for d in (24, 768, 1000)}
    assert widths == {(mlp, d): {24: 64, 768: 2048, 1000: 2688}[d] if mlp != "gelu" else 4 * d for mlp, d in widths}
    assert ModelConfig(mlp="swiglu", n_inner=77).mlp_width == 77


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {n_layer: '3'}", ["model.n_layer='3'", "integer"]),
        ("modle: {n_layer: 3}", ["modle", "did you mean model?"]),
        ("position: rope", ["unknown key position", "did you mean model.position?"]),
        ("train: 5", ["section train"]),
        ("- a\n- b", ["sections"]),
        ("train: {steps: 5", ["not valid YAML"]),
        ("train: {steps: 5, steps: 6}", ["steps", "twice"]),
        ("extends: nowhere.yaml", ["nowhere.yaml", "does not exist"]),
        ("extends: [a]", ["extends must name a file"]),
        ("extends: config.yaml", ["circle"]),
        ("data: {verify: 'no'}", ["data.verify='no'"]),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_config(tmp_path / "config.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in ["config.yaml", *words]), message


def test_a_missing_file_names_its_nearest_neighbour(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(InputError, match="did you mean .*quickstart.yaml"):
        load_config(tmp_path / "quikstart.yaml")


def test_in_python_bad_values_are_value_errors() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        ModelConfig(n_embd=10, n_head=3)
    with pytest.raises(ValueError, match="n_layer"):
        ModelConfig(n_layer="3")  # type: ignore[arg-type]


def test_options_for_help_cover_every_key() -> None:
    named = {name for name, *_ in describe_options()}
    assert named == {f"--{section}.{key}" for section, values in to_tree(Config()).items() for key in values}
    assert (
        "--model.n_inner",
        "int|none",
        "none",
        "width of the MLP, or of each expert; none means 4 x n_embd (gated: 8/3, up to a multiple of 64)",
    ) in describe_options()
    assert all(meaning for name, _, _, meaning in describe_options() if name.split(".")[0] != "--optimizer")


def test_config_does_not_import_jax() -> None:
    code = "import sys, gpt2jax.config, gpt2jax.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
