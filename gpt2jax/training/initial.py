"""What a run starts from: initial values, or with `run.init_from` the weights, model and tokenizer of a folder, and with `lora` adapters on those."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2jax.config import Config, ModelConfig, RunConfig, read_yaml
from gpt2jax.errors import InputError
from gpt2jax.loading import find_folder, own_tokenizer, read_model_config
from gpt2jax.training.folder import BASE, CONFIG

if TYPE_CHECKING:
    from gpt2jax.model.gpt2 import GPT2
    from gpt2jax.tokenizer import Tokenizer
    from gpt2jax.training.step import TrainState

#: What a run may choose for a model that is there already; all else comes with its weights, and the end of text with the tokenizer.
_FREE = {"embd_pdrop", "attn_pdrop", "resid_pdrop", "compute_dtype", "attention_backend", "initializer_range", "position_initializer_range", "eos_token_id"}


def filled(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """The tree of a config with run.init_from, its model section filled from there and, unless it names one, its tokenizer. InputError for a model key that the
    weights contradict. A run that goes on takes both from its own folder: where it came from may be gone."""
    run, model, data = tree["run"], tree.get("model", {}), tree.get("data", {})
    source = run["init_from"]
    saved = Path(str(run.get("dir", RunConfig().dir))) / CONFIG
    earlier = read_yaml(saved) if run.get("resume") == "auto" and saved.is_file() else {}
    if earlier.get("run", {}).get("init_from") == source:
        found, tokenizer = earlier["model"], earlier["data"]["tokenizer"]
    else:
        folder = find_folder(source)
        found, tokenizer = dataclasses.asdict(read_model_config(folder)), own_tokenizer(folder)
        found["attention_backend"] = "auto"  # the schedule of the machine that trained it may not exist here
    if changed := _contradictions(found, model):
        raise InputError(f"{where}: {changed} in run.init_from={source}, whose weights fix it; leave it out")
    data = data if "tokenizer" in data or tokenizer is None else {**data, "tokenizer": tokenizer}
    return {**tree, "model": {**found, **model}, "data": data}


def check_start(config: Config, tokenizer: Tokenizer) -> None:
    """InputError, for a new run, unless config.model, the tokenizer and lora go with run.init_from."""
    source = config.run.init_from
    if source is None:
        if config.lora.rank is not None:
            raise InputError(f"lora.rank={config.lora.rank} adapts weights that are there; name them by run.init_from, or leave lora out")
        return
    if config.lora.rank is not None and config.optimizer.name == "muon":
        raise InputError("optimizer.name=muon is for the blocks' matrices, which lora does not train; use optimizer.name=adamw")
    folder = find_folder(source)
    if changed := _contradictions(dataclasses.asdict(read_model_config(folder)), dataclasses.asdict(config.model)):
        raise InputError(f"{changed} in run.init_from={source}, whose weights fix it; leave it out")
    own = own_tokenizer(folder)
    if own is not None and own != config.data.tokenizer:
        from gpt2jax.tokenizer import load_tokenizer

        if load_tokenizer(own).fingerprint != tokenizer.fingerprint:
            raise InputError(f"data.tokenizer={config.data.tokenizer} is not the one that run.init_from={source} was trained with; leave it out")


def _contradictions(found: dict[str, Any], given: dict[str, Any]) -> str:
    shape = {key: value for key, value in given.items() if key not in _FREE}
    return "; ".join(f"model.{key} is {value!r}, but {found.get(key)!r}" for key, value in shape.items() if found.get(key) != value)


def frozen_parameters(config: Config, shardings: TrainState, run_dir: Path) -> dict[str, Any]:
    """What of the model lora does not train: run.init_from's parameters, of which the run keeps a copy of its own. Without lora there are none."""
    from gpt2jax.training.checkpoint import read_parameters, write_parameters

    places: Any = shardings.frozen  # shardings in place of arrays
    if config.lora.rank is None:
        return {}
    base = run_dir / BASE
    if base.is_dir():
        return read_parameters(base, config.model, places)
    assert config.run.init_from is not None
    frozen = read_source(config.run.init_from, config.model, places)
    write_parameters(base, frozen)
    return frozen


def initial_state(config: Config, optimizer: Any, shardings: TrainState, frozen: dict[str, Any]) -> TrainState:
    """The state before the first step, each device making or reading its own part."""
    import jax

    from gpt2jax.model.lora import init_adapters
    from gpt2jax.training.step import init_state

    source, seed = config.run.init_from, config.train.seed
    places: Any = shardings.parameters  # shardings in place of arrays
    if config.lora.rank is not None:
        adapters = init_adapters(config.model, config.lora, jax.random.key(seed), places)
        return init_state(config.model, optimizer, seed, shardings, parameters=adapters, frozen=frozen)
    start = None if source is None else read_source(source, config.model, places)
    return init_state(config.model, optimizer, seed, shardings, parameters=start)


def plain_model(config: Config, state: TrainState) -> GPT2:
    """The model as it stands, its adapters merged into the weights."""
    from gpt2jax.model.lora import merged
    from gpt2jax.model.parameters import abstract_model, with_parameters

    return with_parameters(abstract_model(config.model), merged({**state.frozen, **state.parameters}, config.lora) if state.frozen else state.parameters)


def read_source(source: str, config: ModelConfig, shardings: dict[str, Any]) -> dict[str, Any]:
    """The parameters of run.init_from by name, float32, laid as `shardings` says: no device holds more than its own part."""
    from gpt2jax.loading import load_placed
    from gpt2jax.model.parameters import abstract_model, named_parameters, with_parameters

    parameters = named_parameters(load_placed(find_folder(source), shardings))
    with_parameters(abstract_model(config), parameters)  # names what does not fit
    return parameters
