"""Reading folders of safetensors files: shards, and each way in which a folder can be broken."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from golden.folders import GOLDEN, variant, weights_of, write_shards
from safetensors.numpy import save_file

from gpt2jax.convert.tensors import INDEX, TensorFolder, aligned_zeros, listed, read_json
from gpt2jax.errors import InputError


def refusal(folder: Path) -> str:
    """The message of the InputError that the folder gets; it must be one line."""
    with pytest.raises(InputError) as caught:
        TensorFolder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_single_file_is_read_as_it_is() -> None:
    tensors, weights = TensorFolder(GOLDEN / "inner"), weights_of("inner")
    assert tensors.places.keys() == weights.keys()
    for name, expected in weights.items():
        assert tensors.shape(name) == expected.shape
        np.testing.assert_array_equal(tensors.read(name), expected, strict=True)


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    tensors, weights = TensorFolder(write_shards(tmp_path, "inner", 3)), weights_of("inner")
    assert tensors.places.keys() == weights.keys()
    for name, expected in weights.items():
        np.testing.assert_array_equal(tensors.read(name), expected, strict=True)


def test_shards_may_be_links_out_of_the_folder_as_in_a_hub_cache(tmp_path: Path) -> None:
    write_shards(tmp_path / "blobs", "inner", 2)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert TensorFolder(tmp_path / "snapshot").places.keys() == weights_of("inner").keys()


def test_the_single_file_comes_before_the_index(tmp_path: Path) -> None:
    variant(tmp_path, "inner")
    (tmp_path / INDEX).write_text("{}")
    assert TensorFolder(tmp_path).places


@pytest.mark.parametrize("keep", [0, 5, 400, -1])
def test_a_cut_file_is_refused(tmp_path: Path, keep: int) -> None:
    file = variant(tmp_path, "inner") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert f"cannot read {file}" in refusal(tmp_path) and "fetch it again" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"\xff" * 64, b"\x08" + bytes(7) + b"[1,2,3] " + bytes(9), b"not safetensors at all"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert f"cannot read {tmp_path / 'model.safetensors'}" in refusal(tmp_path)


def test_a_git_lfs_pointer_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 548105171\n")
    assert "git lfs pull" in refusal(tmp_path)


def test_a_cut_shard_is_refused(tmp_path: Path) -> None:
    shard = write_shards(tmp_path, "inner", 3) / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    assert f"cannot read {shard}" in refusal(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (write_shards(tmp_path, "inner", 3) / "model-00003-of-00003.safetensors").unlink()
    assert "names model-00003-of-00003.safetensors, which is not there" in refusal(tmp_path)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..\\model.safetensors", "C:x.safetensors", "..", ""]
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, file: str) -> None:
    folder = variant(tmp_path / "sub", "inner").parent / "model"
    variant(tmp_path, "inner")  # what the index points at is there, so only the check can refuse it
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"wte.weight": file}}))
    message = refusal(folder)
    assert f"names {file!r}" in message and "same folder" in message


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"wte.weight": 3}}', "\udcff"])
def test_a_malformed_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_bytes(index.encode("utf-8", "surrogateescape"))
    assert str(tmp_path / INDEX) in refusal(tmp_path)


def test_an_index_that_names_a_tensor_the_shard_lacks_is_refused(tmp_path: Path) -> None:
    index = write_shards(tmp_path, "inner", 2) / INDEX
    tree = json.loads(index.read_text())
    tree["weight_map"]["h.0.nowhere"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(tree))
    assert "h.0.nowhere" in refusal(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    weight_map = {}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"wpe.weight": np.zeros((3, 2), np.float32), file: np.zeros(5, np.float32)}, tmp_path / file)
        weight_map |= {"wpe.weight": file, file: file}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "wpe.weight" in refusal(tmp_path)


def test_pickled_weights_alone_say_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    message = refusal(tmp_path)
    assert "pytorch_model.bin" in message and f"from_pretrained('{tmp_path}').save_pretrained" in message


def test_sharded_pickled_weights_alone_say_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    assert "save_pretrained" in refusal(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "holds no weights" in refusal(tmp_path) and str(tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numbers_that_are_not_finite_are_named(tmp_path: Path, value: float, dtype: str) -> None:
    tensor = np.zeros((3, 5), np.float32)
    tensor[2, 4] = value
    save_file({"good": np.ones(2, np.float32), "h.1.bad": tensor.astype(dtype)}, tmp_path / "model.safetensors")
    tensors = TensorFolder(tmp_path)
    tensors.read("good")
    with pytest.raises(InputError, match=r"tensor h\.1\.bad holds NaN or infinity"):
        tensors.read("h.1.bad")


@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8"])
def test_other_dtypes_are_named(tmp_path: Path, dtype: str) -> None:
    save_file({"x": np.zeros(4, dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"tensor x has dtype [FIU]\d+; weights must be F32, F16, BF16"):
        TensorFolder(tmp_path).read("x")


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.zeros(2, np.float32), "b": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    tensors = TensorFolder(tmp_path)
    with pytest.raises(InputError, match="hold b twice"):
        tensors.rename({"a": "b"})
    tensors.rename({"a": "b", "b": "a"})
    assert tensors.shape("a") == (3,) and tensors.read("b").tolist() == [0, 0]


@pytest.mark.parametrize("content", ["", "{'a': 1}", "[1]", "3", "[" * 100_000])
def test_malformed_json_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"config\.json") as caught:
        read_json(tmp_path / "config.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_long_lists_are_cut_and_counted() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(i) for i in range(15)], most=3) == "0, 1, 2 and 12 more"


def test_aligned_zeros_are_taken_without_a_copy() -> None:
    values = aligned_zeros((3, 5, 7))
    values[1, 2, 3] = 4.0
    array = jax.device_put(values, may_alias=True)
    assert array.unsafe_buffer_pointer() == values.ctypes.data and values.sum() == 4.0 and values.shape == (3, 5, 7)
