"""The model against transformers: stored answers for tiny models at the released sizes' proportions, and live where torch is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.folders import GOLDEN, NAMES, Weights, variant

from gpt2jax.convert.huggingface import load_huggingface
from gpt2jax.model.cache import Span
from gpt2jax.model.gpt2 import GPT2

#: Absolute. Logits and hidden states here lie between 1 and 6, so this is stricter than the same number relative to the largest.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _float32_matmuls(optimised: None) -> Any:
    with jax.default_matmul_precision("float32"):
        yield


def answers(name: str) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def logits_error(folder: Path, name: str) -> float:
    """The largest difference from transformers' logits for the golden `name`."""
    golden = answers(name)
    logits = load_huggingface(folder)(jnp.asarray(golden["tokens_BT"]))
    assert logits.shape == golden["logits_BTV"].shape and logits.dtype == jnp.float32
    return float(jnp.abs(logits - golden["logits_BTV"]).max())


@jax.jit
def hidden_states(model: GPT2, tokens_BT: jax.Array) -> list[jax.Array]:
    span = Span.of(tokens_BT.shape)
    states = [model.position(model.token_table[...][tokens_BT], span.position_BT)]
    for block in model.unstacked():
        states.append(block(states[-1], span)[0])
    return [*states[:-1], model.norm(states[-1])]


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str) -> None:
    assert logits_error(GOLDEN / name, name) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_of_each_layer_equal_transformers(name: str) -> None:
    golden = answers(name)
    states = hidden_states(load_huggingface(GOLDEN / name), jnp.asarray(golden["tokens_BT"]))
    assert len(states) == len(golden["hidden_LBTD"])
    for layer, (state, expected) in enumerate(zip(states, golden["hidden_LBTD"], strict=True)):
        np.testing.assert_allclose(state, expected, rtol=0, atol=TOLERANCE, err_msg=f"hidden state {layer}")


def transposed(weights: Weights) -> Weights:
    return {name: tensor.T if name.endswith("attn.c_proj.weight") else tensor for name, tensor in weights.items()}


def query_and_key_swapped(weights: Weights) -> Weights:
    def swap(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        query, key, value = np.split(tensor, 3, -1)
        return np.concatenate([key, query, value], -1)

    return {name: swap(tensor) if "c_attn" in name else tensor for name, tensor in weights.items()}


def layers_reversed(weights: Weights) -> Weights:
    last = max(int(name.split(".")[1]) for name in weights if name.startswith("h."))
    turn = lambda name: ".".join(["h", str(last - int(name.split(".")[1])), *name.split(".")[2:]])  # noqa: E731
    return {turn(name) if name.startswith("h.") else name: tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_transpose_of_the_square_projection_is_seen(tmp_path: Path, name: str) -> None:
    assert logits_error(variant(tmp_path, name, transposed), name) > 1e-3


@pytest.mark.parametrize("change", [query_and_key_swapped, layers_reversed])
def test_scrambled_weights_of_the_right_shape_are_seen(tmp_path: Path, change: Any) -> None:
    assert logits_error(variant(tmp_path, "gpt2-xl", change), "gpt2-xl") > 1e-3


@pytest.mark.parametrize("wrong", [{"activation_function": "gelu"}, {"layer_norm_epsilon": 1e-6}, {"n_head": 9}], ids=str)
def test_wrong_settings_are_seen(tmp_path: Path, wrong: dict[str, Any]) -> None:
    assert logits_error(variant(tmp_path, "gpt2", **wrong), "gpt2") > 3 * TOLERANCE


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, GPT2]:
    """A random model of the released 124M shape: transformers' and ours, read from its folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # biases and scales of a fresh model are constant, which would hide a wrong order
            parameter.add_(torch.randn_like(parameter), alpha=0.02 if parameter.ndim == 2 and "c_" in name else 0.1)
    folder = tmp_path_factory.mktemp("full")
    theirs.save_pretrained(folder)
    return theirs, load_huggingface(folder)


@pytest.mark.torch
@pytest.mark.slow
def test_full_size_logits_equal_transformers(full_size: tuple[Any, GPT2]) -> None:
    import torch

    theirs, ours = full_size
    tokens = np.random.default_rng(1).integers(0, 50257, (1, 1024))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    error = np.abs(np.asarray(ours(jnp.asarray(tokens, jnp.int32))) - expected).max()
    assert error <= 1e-5 * np.abs(expected).max()


@pytest.mark.torch
@pytest.mark.slow
def test_full_size_greedy_ids_equal_transformers(full_size: tuple[Any, GPT2]) -> None:
    import torch

    theirs, ours = full_size
    prompt, new = [50256, 464, 3290, 11, 1212], 24
    expected = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=new, eos_token_id=None)
    tokens = np.zeros((1, len(prompt) + new), np.int32)
    tokens[0, : len(prompt)] = prompt
    for t in range(len(prompt), tokens.shape[1]):  # causal: what stands behind t does not matter
        tokens[0, t] = int(ours(jnp.asarray(tokens))[0, t - 1].argmax())
    assert tokens[0].tolist() == expected[0].tolist()
    assert len(set(tokens[0].tolist())) > 3, "a model that repeats one id would prove little"
