"""Configuration: frozen, typed dataclasses, filled from YAML files and `--section.key=value`.

A YAML file holds sections (`model:`, `data:`, ...) and may start from another file with `extends: other.yaml` (a path relative to itself), naming only what
it changes. `model.preset` fills the model section with one of the released sizes before the other keys are laid over it. Types are checked strictly: a
number in quotes is no number, and an unknown key is refused with the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pydantic
import yaml
from pydantic import Field

from gpt2jax.errors import InputError
from gpt2jax.model.config import PRESETS as PRESETS
from gpt2jax.model.config import STRICT, Count, ModelConfig, Natural, NonNegative, Positive, Probability, preset

Size = Annotated[int, Field(ge=-1)]
Name = Annotated[str, Field(min_length=1)]  # an empty path would be the working folder


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Where tokens come from."""

    source: Annotated[
        Name | dict[str, Positive],
        "python-stdlib, a folder made by `gpt2jax prepare`, token files of nanoGPT or llm.c, or text files or folders to prepare first; "
        "or several with weights, as in {data/web: 0.7, data/code: 0.3}",
    ] = "python-stdlib"
    tokenizer: Annotated[str, "gpt2, bytes, or a Hugging Face folder with tokenizer files"] = "gpt2"
    val_fraction: Annotated[Probability, "share of documents kept for validation when a source is prepared"] = 0.02
    split_seed: Annotated[Natural, "seed of the train/validation split when a source is prepared"] = 0
    separate_documents: Annotated[bool, "tokens see their own document only, whose positions start at 0; no: all of their row"] = False
    verify: Annotated[bool, "check each shard's checksum at start (about a second a gigabyte)"] = True


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig:
    """The run's length and batch."""

    steps: Annotated[Count, "optimizer steps"] = 1000
    batch_size: Annotated[Count, "sequences a step, over all devices and micro-batches"] = 8
    accumulation: Annotated[Count, "micro-batches that the batch is run in, one behind the other; each target weighs the same whatever their number"] = 1
    sequence_length: Annotated[Count | None, "tokens a sequence; none means model.n_positions"] = None
    seed: Annotated[Natural, "seed of the initial weights, the data order and dropout"] = 0
    remat: Annotated[
        Literal["none", "attention", "dots", "block", "offload"],
        "what the backward pass computes again: nothing, attention, all of a block but its matmuls, all of it; offload: as dots, kept in the host's memory",
    ] = "none"
    # of blocks of 256 to 2048, those of 512 and 1024 are the fastest on a CPU, as fast as the whole or faster, at a fifth to a third of its memory
    loss_chunk: Annotated[Count | None, "the most tokens a device whose logits are held at once, forward and backward; none means all"] = 1024
    z_loss: Annotated[NonNegative, "coefficient of the mean over targets of log(sum of exp(logits))^2, added to what is minimised; metrics leave it out"] = 0.0
    peak_tflops: Annotated[Positive | None, "peak of one device for the MFU; none means the table's, if it has the device"] = None
    log_every: Annotated[Count, "steps between lines of metrics"] = 10


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class MeshConfig:
    """Devices on axes; the product of the sizes is the number of devices, and one of them may be -1, which fills."""

    data: Annotated[Size, "rows of a batch"] = -1
    fsdp: Annotated[Size, "rows of a batch, and every matrix and its optimizer state"] = 1
    tensor: Annotated[Size, "heads, columns of the MLP, and the vocabulary"] = 1
    sequence: Annotated[Size, "tokens of a sequence"] = 1
    expert: Annotated[Size, "rows of a batch, and experts where there are any"] = 1

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        if wrong := [f"mesh.{name}={size}" for name, size in sizes.items() if size == 0 or size < -1]:
            raise InputError(f"{wrong[0]} must be 1 or more, or -1 to fill")
        if len(filled := [f"mesh.{name}" for name, size in sizes.items() if size == -1]) > 1:
            raise InputError(f"{' and '.join(filled)} are both -1; one axis alone can be filled")


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class HostsConfig:
    """Several processes, one a host. On Slurm, Open MPI and TPU slices nothing need be given."""

    coordinator: Annotated[str | None, "address and port of process 0, as in 10.0.0.1:8476; none means what the cluster says, or one process"] = None
    count: Annotated[Count | None, "processes in all"] = None
    index: Annotated[Natural | None, "number of this process"] = None
    timeout: Annotated[Count, "seconds to wait for a host that is missing or silent"] = 300


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """The update and its learning rate: a linear warm-up, then the schedule."""

    name: Annotated[
        Literal["adamw", "muon", "lion", "adafactor", "sgd"],
        "muon: on the blocks' matrices, and adamw on the rest; adafactor: second moments as rows and columns, no momentum",
    ] = "adamw"
    learning_rate: Annotated[Positive, "peak learning rate"] = 6e-4
    matrix_learning_rate: Annotated[Positive, "muon only: peak learning rate of the blocks' matrices"] = 0.02
    schedule: Annotated[
        Literal["cosine", "constant", "linear", "wsd"], "after the warm-up; wsd: at the peak, then linear decay over the last decay_fraction"
    ] = "cosine"
    decay_fraction: Annotated[float, Field(gt=0, le=1), "wsd: share of decay_steps that decays"] = 0.2
    final_fraction: Annotated[NonNegative, "the learning rate at the end, as a share of the peak"] = 0.1
    warmup_steps: Annotated[Natural, "steps from zero to the peak"] = 100
    decay_steps: Annotated[Count | None, "step at which the decay ends; none means train.steps"] = None
    weight_decay: Annotated[NonNegative, "decoupled decay, on matrices only; muon: on those of the blocks only"] = 0.1
    beta1: Annotated[Probability, "momentum (all but adafactor and muon's matrices)"] = 0.9
    beta2: Annotated[Probability, "decay of adamw's second moments, or of lion's momentum"] = 0.95
    eps: Annotated[Positive, "adamw and muon: added to the divisor"] = 1e-8
    clip_norm: Annotated[Positive | None, "limit of the gradient's global norm; none means no limit"] = 1.0
    ema_decay: Annotated[Probability | None, "validate, keep and sample an average of the weights over about 1 / (1 - this) steps; none means the last"] = None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig:
    """Low-rank adapters: a run from run.init_from that trains them alone."""

    rank: Annotated[Count | None, "rank of the adapters; none means no adapters: all weights are trained"] = None
    alpha: Annotated[Positive, "an adapter's product counts alpha / rank times"] = 16.0
    targets: Annotated[list[str] | None, "the blocks' linear maps that get one, as in [query, key_value, out, up, down]; none means all"] = None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class EvalConfig:
    """Validation inside the run."""

    every: Annotated[Natural, "steps between validations; 0 means only at the end"] = 250
    sequences: Annotated[Count, "validation sequences used, from the start of the validation split"] = 64
    hellaswag: Annotated[str | None, "HellaSwag's validation split as JSON lines: accuracy at each validation"] = None
    hellaswag_form: Annotated[Literal["llm.c", "lm-eval"], "whose contexts, and lengths that acc_norm divides by: tokens, or characters"] = "llm.c"
    lambada: Annotated[str | None, "LAMBADA's test split as JSON lines: accuracy and perplexity of last words at each validation"] = None
    examples: Annotated[Count | None, "examples used of each of these files, from its start; none means all"] = None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """What is kept of a run."""

    dir: Annotated[Name | None, "folder, or gs:// or s3:// URL, that holds the checkpoints of this run alone; none means RUN/checkpoints"] = None
    every: Annotated[Natural, "steps between checkpoints; 0 means only at the end"] = 250
    every_minutes: Annotated[Positive | None, "also one at the first line of metrics so many minutes after the last; none means by steps alone"] = None
    keep: Annotated[Count, "newest checkpoints kept"] = 2
    keep_best: Annotated[bool, "also keep the checkpoint of the lowest val_loss"] = True
    keep_every_minutes: Annotated[Positive | None, "also keep the first, and always the next that is so many minutes younger; none means no others"] = None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class GuardConfig:
    """What happens at a step whose loss or gradient norm is far above its running mean, or not finite. A step that is not finite is never applied."""

    action: Annotated[
        Literal["none", "skip", "stop"], "skip: leave parameters and optimizer as they were and go on; stop: end the run; none: only what is not finite ends it"
    ] = "none"
    threshold: Annotated[Positive, "standard deviations above the mean from which on a step is a spike"] = 6.0
    warmup: Annotated[Count, "steps before a step can be one"] = 100
    decay: Annotated[Probability, "weight of the past in mean and variance, at each step"] = 0.99
    patience: Annotated[Count, "skip: so many steps in a row end the run"] = 10


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """Where the run lives."""

    dir: Annotated[Name, "folder of the run"] = "runs/default"
    init_from: Annotated[str | None, "start from the weights, model and tokenizer of a run, converted or Hugging Face folder, or hub id"] = None
    resume: Annotated[Literal["never", "auto"], "auto: go on from the newest checkpoint in run.dir, if there is one"] = "never"
    sample_prompt: Annotated[str | None, "text continued at the end of the run; none prints no sample"] = "\n"
    sample_tokens: Annotated[Count, "tokens of that sample"] = 256
    sample_every: Annotated[Natural, "steps between further such samples; 0 means only the one at the end"] = 0
    track: Annotated[Literal["none", "tensorboard", "wandb"], "also send metrics there (extras of the same names)"] = "none"
    trace: Annotated[str | None, "steps that JAX's profiler writes to the run's trace/, as in 10-12"] = None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """A whole run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    hosts: HostsConfig = Field(default_factory=HostsConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.model.context is not None and self.sequence_length > self.model.context:
            raise InputError(
                f"train.sequence_length={self.sequence_length} is longer than model.n_positions={self.model.n_positions}; lower the first or raise the second"
            )
        if (rows := self.train.batch_size) % (parts := self.train.accumulation):
            raise InputError(f"train.batch_size={rows} does not split into train.accumulation={parts} micro-batches; make it a multiple of {parts}")

        if self.run.trace is not None and traced_steps(self.run.trace)[1] > self.train.steps:
            raise InputError(f"run.trace={self.run.trace} goes past train.steps={self.train.steps}; name steps that the run takes")

    @property
    def sequence_length(self) -> int:
        return self.train.sequence_length or self.model.n_positions

    @property
    def separator(self) -> int | None:
        """The id that begins each document, where documents are kept apart."""
        return self.model.eos_token_id if self.data.separate_documents else None


def traced_steps(text: str) -> tuple[int, int]:
    """First and last step, counted from 1, of `run.trace`."""
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"run.trace={text} must be a first and a last step, as in 10-12; steps count from 1")
    return int(match[1]), int(match[2])


def load_config(path: str | Path | Sequence[str | Path] | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file (none: all defaults; several: each laid over those before it), lay `--section.key=value` strings over it, and check the whole.

    Raises InputError, one line, for a missing or malformed file, an unknown key (with the nearest valid one), a wrong type or an impossible combination.
    """
    paths = [] if path is None else [path] if isinstance(path, (str, Path)) else list(path)
    tree: dict[str, Any] = {}
    for part in [*(read_yaml(Path(path)) for path in paths), *map(_parse_override, overrides)]:
        tree = _merge(tree, part)
    return config_from_tree(tree, where=", ".join(map(str, paths)) or "command line")


def config_from_tree(tree: dict[str, Any], where: str = "config") -> Config:
    """Nested dicts to a checked Config; `where` names the source in errors."""
    for section, values in tree.items():
        _check_key(section, _fields(Config), "", where)
        if not isinstance(values, dict):
            raise InputError(f"{where}: section {section} must hold keys and values, not {values!r}")
        for key in values:
            _check_key(key, _keys(section), f"{section}.", where)
    model = dict(tree.get("model", {}))
    if (name := model.pop("preset", None)) is not None:
        model = {**preset(name), **model}
    tree = {**tree, "model": model}
    if isinstance(tree.get("run", {}).get("init_from"), str) and not set(_fields(ModelConfig)) <= model.keys():
        from gpt2jax.training.initial import filled

        tree = filled(tree, where)
    sections = {}
    for section, values in tree.items():
        try:
            sections[section] = _section_type(section)(**values)
        except pydantic.ValidationError as error:
            raise InputError(f"{where}: {_explain(section, error)}") from None
    try:
        return Config(**sections)
    except pydantic.ValidationError as error:
        raise InputError(f"{where}: {_explain('config', error)}") from None


def to_tree(config: Config) -> dict[str, dict[str, Any]]:
    """The resolved configuration as plain nested dicts, each key present."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back equal."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)


def describe_options() -> list[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of each `--section.key` option, for `--help`."""
    rows = []
    for section in _fields(Config):
        kind = _section_type(section)
        for key, hint in get_type_hints(kind, include_extras=True).items():
            meaning = next((note for note in getattr(hint, "__metadata__", ()) if isinstance(note, str)), "")
            default = getattr(kind(), key)
            rows.append((f"--{section}.{key}", _plain_type(hint), "none" if default is None else repr(default).strip("'"), meaning))
    return rows


def read_yaml(path: Path, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One YAML file with its `extends` chain merged in, unchecked."""
    if not path.exists() or path.is_dir():  # /dev/null and pipes are fine
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else [], 1, 0.4)
        raise InputError(f"config file {path} does not exist" + (f"; did you mean {path.parent / near[0]}?" if near else ""))
    if path.resolve() in _seen:
        raise InputError(f"{path}: `extends` goes round in a circle: {' -> '.join(p.name for p in (*_seen, path))}")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise InputError(f"{path}: a config must hold sections, not {tree!r}")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise InputError(f"{path}: extends must name a file, not {base!r}")
    return _merge(read_yaml(path.parent / base, (*_seen, path.resolve())), tree)


class _Loader(yaml.SafeLoader):
    """YAML whose floats are those of YAML 1.2: PyYAML follows 1.1, which reads 6e-4 as a string."""


def _construct_mapping(loader: Any, node: Any) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.YAMLError(f"key {key!r} stands twice in one section (line {node.start_mark.line + 1})")
    return dict(loader.construct_mapping(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def _parse_override(text: str) -> dict[str, Any]:
    match = re.fullmatch(r"--([A-Za-z_]+)\.([A-Za-z_0-9]+)=(.*)", text, re.S)
    if not match:
        raise InputError(f"cannot read option {text!r}; options are written --section.key=value, as in --train.steps=200")
    section, key, value = match.groups()
    _check_key(section, _fields(Config), "", "command line")
    _check_key(key, _keys(section), f"{section}.", "command line")
    if _takes(section, key, "none") and value == "none":
        return {section: {key: value}}  # a choice of that name, not the lack of one
    if key in _fields(_section_type(section)) and _is_text(section, key) and not (value.startswith("{") and _takes_mapping(section, key)):
        # a text option is taken as it stands: a folder named 2024 or yes is a name, not a number
        return {section: {key: None if value in ("null", "none") else value}}
    try:
        return {section: {key: None if value == "none" else yaml.load(value, _Loader)}}
    except yaml.YAMLError as error:
        if _takes_mapping(section, key):
            raise InputError(f"--{section}.{key}={value} is no mapping: {' '.join(str(error).split())}") from None
        return {section: {key: value}}


def _is_text(section: str, key: str) -> bool:
    hint = get_type_hints(_section_type(section))[key]
    return hint is str or str in get_args(hint)


def _takes_mapping(section: str, key: str) -> bool:
    return any(get_origin(part) is dict for part in get_args(get_type_hints(_section_type(section))[key]))


def _takes(section: str, key: str, choice: str) -> bool:
    """Whether a key chooses among names, and this is one."""
    hint = get_type_hints(_section_type(section), include_extras=False).get(key)
    return get_origin(hint) is Literal and choice in get_args(hint)


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            # a preset in the change replaces the sizes that the base spelled out
            keep = {k: v for k, v in old.items() if not ("preset" in value and k in ("n_layer", "n_head", "n_embd"))}
            merged[key] = {**keep, **value}
        else:
            merged[key] = value
    return merged


def _keys(section: str) -> list[str]:
    return _fields(_section_type(section)) + (["preset"] if section == "model" else [])


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _section_type(section: str) -> Any:
    return {
        "model": ModelConfig,
        "data": DataConfig,
        "train": TrainConfig,
        "mesh": MeshConfig,
        "hosts": HostsConfig,
        "optimizer": OptimizerConfig,
        "lora": LoraConfig,
        "eval": EvalConfig,
        "checkpoint": CheckpointConfig,
        "guard": GuardConfig,
        "run": RunConfig,
    }[section]


def _check_key(key: Any, valid: list[str], prefix: str, where: str) -> None:
    if key in valid:
        return
    inside = [f"{section}.{key}" for section in _fields(Config) if not prefix and key in _keys(section)]
    near = inside or difflib.get_close_matches(str(key), valid, 1, 0.3)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"valid ones are {', '.join(valid)}"
    raise InputError(f"{where}: unknown key {prefix}{key}; {hint}")


def _explain(section: str, error: pydantic.ValidationError) -> str:
    first = max(error.errors(), key=lambda fault: len(fault["loc"]))  # of a union's branches the one that fits furthest
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):  # from a __post_init__, which names its keys itself
        return str(cause)
    key, *inside = first["loc"]
    others = len({fault["loc"][0] for fault in error.errors()}) - 1  # a union has a fault for each of its branches
    more = f" ({others} more such)" * bool(others)
    return f"{section}.{key}{f' of {inside[1]}' if inside[1:] else ''}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}{more}"


def _plain_type(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return _plain_type(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    if get_origin(hint) is dict:
        return f"{{{': '.join(_plain_type(part) for part in get_args(hint))}}}"
    if get_args(hint):  # a union
        return "|".join(_plain_type(part) for part in get_args(hint))
    return "none" if hint is type(None) else str(hint.__name__)
