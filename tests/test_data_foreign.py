"""gpt2jax.data.foreign: token files of other programs are read where they lie, and what is none is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2jax.data import foreign as module
from gpt2jax.data import open_splits
from gpt2jax.data.batches import TokenData
from gpt2jax.data.foreign import find_token_files, foreign_tokens
from gpt2jax.data.prepare import prepare
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import Tokenizer, load_tokenizer

GPT2 = load_tokenizer("gpt2")
WIDE = Tokenizer("llama", {bytes([byte]): byte for byte in range(256)} | {b"th": 128_000}, {"<|end_of_text|>": 128_001}, eot=128_001)
FORMATS = {"nanoGPT": "{}.bin", "llm.c": "tiny_shakespeare_{}.bin", "llama": "fineweb_{}_000000.bin", "build-nanogpt": "edufineweb_{}_000000.npy"}


def header(magic: int, version: int, count: int) -> bytes:
    return np.array([magic, version, count, *[0] * 253], "<i4").tobytes()


def write(path: Path, ids: np.ndarray, form: str) -> Path:
    if form == "nanoGPT":
        ids.astype("<u2").tofile(path)
    elif form == "llm.c":
        path.write_bytes(header(20240520, 1, len(ids)) + ids.astype("<u2").tobytes())
    elif form == "llama":
        path.write_bytes(header(20240801, 7, len(ids)) + ids.astype("<u4").tobytes())
    else:
        np.save(path, ids.astype(np.uint16))
    return path


def opened(source: Any, tokenizer: Tokenizer = GPT2, **changes: Any) -> dict[str, TokenData]:
    return open_splits(str(source), tokenizer, **{"sequence_length": 9, "batch_size": 4, "seed": 1, **changes})


def read(data: TokenData) -> list[int]:
    """The targets of a whole split, in order."""
    return [int(token) for _, targets in data.eval_batches(10**6) for token in targets[targets != -1]]


def fill(folder: Path, form: str = "nanoGPT", train: int = 500, val: int = 60) -> tuple[Path, np.ndarray, np.ndarray]:
    folder.mkdir(exist_ok=True)
    ids = np.arange(train + val) * 37 % 50257
    for split, part in (("train", ids[:train]), ("val", ids[train:])):
        write(folder / FORMATS[form].format(split), part, form)
    return folder, ids[:train], ids[train:]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_reads_as_it_was_written(form: str, tmp_path: Path) -> None:
    folder, train, val = fill(tmp_path / form, form)
    splits = opened(folder, WIDE if form == "llama" else GPT2)
    assert read(splits["train"]) == train[1:].tolist() and read(splits["val"]) == val[1:].tolist()
    inputs, targets = splits["train"].batch(3)
    assert inputs.dtype == targets.dtype == np.int32 and (targets[:, :-1] == inputs[:, 1:]).all()
    assert all(not shard.flags.owndata and not shard.flags.writeable for source in splits["train"]._sources for shard in source._shards)


def test_the_same_ids_in_another_format_are_the_same_data(tmp_path: Path) -> None:
    prints = {opened(fill(tmp_path / form, form)[0])["train"].fingerprint for form in ("nanoGPT", "llm.c", "build-nanogpt")}
    assert len(prints) == 1


def test_ids_past_uint16_are_read(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write(tmp_path / FORMATS["llama"].format(split), np.array([128_001, 5, 128_000, 7] * 9), "llama")
    assert read(opened(tmp_path, WIDE)["val"])[:3] == [5, 128_000, 7]


def test_shards_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    ids = np.arange(300)
    for number, (split, part) in enumerate([("val", ids[:40]), ("train", ids[40:55]), ("train", ids[55:200]), ("train", ids[200:])]):
        write(tmp_path / f"edufineweb_{split}_{number:06d}.npy", part, "build-nanogpt")
    assert read(opened(tmp_path)["train"]) == list(range(41, 300)) and read(opened(tmp_path)["val"]) == list(range(1, 40))


def test_a_folder_a_glob_or_a_file_finds_both_splits(tmp_path: Path) -> None:
    folder, train, val = fill(tmp_path / "data", "llm.c")
    (folder / "input.txt").write_text("the text that it was made of")
    write(folder / "other_val.bin", val[:9], "llm.c")
    for source in (folder / "tiny_*", folder / "tiny_shakespeare_train.bin", folder / "tiny_*train*.bin"):
        assert read(opened(source)["train"]) == train[1:].tolist() and read(opened(source)["val"]) == val[1:].tolist()
    assert find_token_files(str(folder))["val"] == [folder / "other_val.bin", folder / "tiny_shakespeare_val.bin"]  # type: ignore[index]


def test_names_say_the_split_as_words(tmp_path: Path) -> None:
    for name in ("train.bin", "a_train_1.bin", "validation.bin", "x-VAL-0.npy", "interval.bin", "constraint.bin", "evaluate.npy", ".train.bin", "train.txt"):
        (tmp_path / name).write_bytes(b"\0\0")
    files = find_token_files(str(tmp_path))
    assert files is not None
    assert {split: [path.name for path in paths] for split, paths in files.items()} == {
        "train": ["a_train_1.bin", "train.bin"],
        "val": ["validation.bin", "x-VAL-0.npy"],
    }


def test_text_and_prepared_folders_are_not_taken_for_token_files(tmp_path: Path, prepared: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "weights.bin").write_bytes(b"\0\1" * 9)
    assert find_token_files(str(tmp_path)) is None and find_token_files("python-stdlib") is None and find_token_files(str(tmp_path / "*.txt")) is None
    assert opened(prepared, load_tokenizer("bytes"))["train"].windows > 0


def test_a_missing_split_is_told_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path / "fineweb_val_000000.bin", np.arange(50), "llm.c")
    with pytest.raises(InputError, match="no token file is for training .fineweb_val_000000.bin"):
        opened(tmp_path)
    write(tmp_path / "tokens.bin", np.arange(50), "llm.c")  # without a split in its name, but with the header
    with pytest.raises(InputError, match="no token file is for training .tokens.bin"):
        opened(tmp_path / "tokens.bin")
    (tmp_path / "fineweb_val_000000.bin").rename(tmp_path / "other_val.bin")
    write(tmp_path / "fineweb_train_000001.bin", np.arange(50), "llm.c")
    with pytest.raises(InputError, match="no token file is for validation; put one called fineweb_val_000001.bin beside fineweb_train_000001.bin"):
        opened(tmp_path / "fineweb_train_000001.bin")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train.bin", b"\1\0\2", "train.bin: no file of tokens.*3 bytes are no whole number of uint16"),
        ("train.bin", b"", "train.bin: the file is empty"),
        ("train.bin", header(20240520, 1, 9) + b"\0\0" * 8, "train.bin: the file is cut: 1040 bytes instead of 1042 for the 9 tokens"),
        ("train.bin", header(20240520, 1, 9) + b"\0\0" * 10, "train.bin: 2 bytes stand after the end at 1042"),
        ("train.bin", header(20240520, 1, 0), "train.bin: the file holds no tokens"),
        ("train.bin", header(20240520, 1, -4), "train.bin: the file holds no tokens: its header says -4"),
        ("train.bin", header(20240520, 2, 9) + b"\0\0" * 9, "train.bin: version 2 of the header 20240520; .*version 1"),
        ("train.bin", header(20240801, 7, 9) + b"\0\0" * 9, "train.bin: the file is cut: 1042 bytes instead of 1060"),
        ("train.bin", header(20240522, 1, 9) + b"\0\0" * 9, "train.bin: an evaluation file of llm.c"),
        ("train.bin", b"GPT2JAX\0" + b"\0" * 60, "train.bin: a shard of gpt2jax, without the manifest.json"),
        ("train.npy", b"\0\1\2", "train.npy: no NumPy array"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    write(tmp_path / "val.bin", np.arange(50), "nanoGPT")
    with pytest.raises(InputError, match=said):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("array", "said"), [(np.zeros((3, 4), np.uint16), "uint16 .3, 4. is no list"), (np.zeros(9), "float64"), (np.array(["a"]), "<U1"), (np.zeros(0, int), "no")]
)
def test_other_arrays_are_refused(array: np.ndarray, said: str, tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", array)
    np.save(tmp_path / "val.npy", np.arange(50))
    with pytest.raises(InputError, match=f"train.npy: .*{said}"):
        opened(tmp_path)


def test_an_archive_of_arrays_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", np.arange(50))
    (tmp_path / "a.npz").rename(tmp_path / "train.npy")
    np.save(tmp_path / "val.npy", np.arange(50))
    with pytest.raises(InputError, match="train.npy: an archive of arrays"):
        opened(tmp_path)


def test_a_cut_or_padded_array_is_named(tmp_path: Path) -> None:
    folder, *_ = fill(tmp_path / "data", "build-nanogpt")
    path = folder / "edufineweb_train_000000.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(InputError, match="train_000000.npy: no NumPy array, or a file that is cut"):
        opened(folder)
    path.write_bytes(whole + b"\0\0")
    with pytest.raises(InputError, match="train_000000.npy: 2 bytes stand after the end"):
        opened(folder)


@pytest.mark.parametrize(("ids", "dtype", "named"), [([50257], np.uint16, "50257"), ([-1], np.int32, "-1"), ([65539], np.int64, "65539")])
@pytest.mark.parametrize("verify", [True, False])
def test_an_id_outside_the_vocabulary_is_an_error(ids: list[int], dtype: type, named: str, verify: bool, tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.array([*range(50), *ids], dtype))
    np.save(tmp_path / "val.npy", np.arange(50))
    with pytest.raises(InputError, match=f"train.npy: token id {named} is outside the 50257 ids of the tokenizer gpt2; set data.tokenizer"):
        opened(tmp_path, verify=verify)


def test_verify_reads_all_ids_and_without_it_blocks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 4)
    ids = np.arange(4 * 64 * 9) % 50257
    blocks = [block.tolist() for block in module._blocks(ids, whole=False)]
    assert len(blocks) == 64 and all(len(block) == 4 for block in blocks)
    assert blocks[0] == ids[:4].tolist() and blocks[-1] == ids[-4:].tolist()
    ids[6] = 60_000  # between two blocks
    assert all(60_000 not in block for block in blocks)
    write(tmp_path / "train.bin", ids, "nanoGPT")
    write(tmp_path / "val.bin", np.arange(50), "nanoGPT")
    opened(tmp_path, verify=False)
    with pytest.raises(InputError, match="token id 60000"):
        opened(tmp_path, verify=True)


def test_the_fingerprint_is_of_the_ids_and_the_tokenizer(tmp_path: Path) -> None:
    def fingerprint(tokenizer: Tokenizer = GPT2, verify: bool = True) -> str:
        sources = foreign_tokens(find_token_files(str(tmp_path)), tokenizer, verify=verify)  # type: ignore[arg-type]
        assert sources["train"].fingerprint == sources["val"].fingerprint
        return sources["train"].fingerprint

    fill(tmp_path)
    first = fingerprint()
    assert fingerprint(verify=False) == first  # a run may go on with another data.verify
    fill(tmp_path, val=61)
    longer = fingerprint()
    fill(tmp_path, train=510, val=50)  # the same ids, cut elsewhere
    cut = fingerprint()
    fill(tmp_path)
    with (tmp_path / "train.bin").open("r+b") as file:
        file.seek(500)
        file.write(b"\1\1")
    changed = fingerprint()
    fill(tmp_path)
    assert fingerprint() == first and len({first, longer, cut, changed, fingerprint(WIDE_ENOUGH)}) == 5


WIDE_ENOUGH = Tokenizer("other", {bytes([byte]): byte for byte in range(256)} | {b"th": 50_300}, {"<|end|>": 50_301}, eot=50_301)


def test_a_prepared_folder_wins_over_the_names_of_its_shards(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text of a few words\n" * 20)
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer=GPT2, progress=False)
    assert opened(tmp_path / "out")["train"].windows > 0
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(InputError, match="train_000000.bin: a shard of gpt2jax"):
        opened(tmp_path / "out")
