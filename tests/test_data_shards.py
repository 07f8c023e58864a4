"""gpt2jax.data.shards: what is written reads back, and every damaged file is refused by name."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpt2jax.data.shards import Manifest, ShardInfo, ShardWriter, SplitInfo, open_shard, read_header, read_manifest, token_dtype, write_manifest, write_shard
from gpt2jax.errors import InputError

PRINT = "ab" * 32
IDS = np.arange(1000, 1037)


def shard(tmp_path: Path, vocab_size: int = 50257) -> tuple[Path, Manifest, ShardInfo]:
    path = tmp_path / "train_000000.bin"
    info = write_shard(path, IDS, vocab_size=vocab_size, fingerprint=PRINT)
    return path, Manifest("gpt2", PRINT, vocab_size, 50256, {"train": SplitInfo(len(IDS), 1, 37, (info,))}, ("a.txt",), 0.02, 3, ("note",)), info


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_written_reads_back(vocab_size: int, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    ids = np.array([0, 5, vocab_size - 1, 7])
    info = write_shard(path, ids, vocab_size=vocab_size, fingerprint=PRINT)
    payload = ids.astype(dtype).tobytes()
    assert path.read_bytes()[64:] == payload
    assert info == ShardInfo("x.bin", 4, zlib.crc32(payload))
    assert read_header(path) == (np.dtype(dtype), vocab_size, info.crc32, 4, PRINT)
    tokens = open_shard(path, info=info, verify=True)
    assert tokens.dtype == np.dtype(dtype) == token_dtype(vocab_size) and tokens.tolist() == ids.tolist()
    assert not tokens.flags.writeable
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"]


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    path, _, info = shard(tmp_path)
    assert struct.unpack("<8sIIIIQ32s", path.read_bytes()[:64]) == (b"GPT2JAX\0", 1, 2, 50257, info.crc32, 37, bytes.fromhex(PRINT))


def test_pieces_make_the_same_shard_as_the_whole(tmp_path: Path) -> None:
    path, _, info = shard(tmp_path)
    with ShardWriter(tmp_path / "pieces.bin", vocab_size=50257, fingerprint=PRINT) as writer:
        for part in (IDS[:5], IDS[5:5], IDS[5:].astype(np.uint32)):
            writer.append(part)
        assert writer.close().crc32 == info.crc32
    assert (tmp_path / "pieces.bin").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("ids", "named"), [([1, 65539], "65539"), ([257], "257"), ([-1, 3], "-1"), ([0.0], "float64")])
def test_an_id_that_does_not_fit_is_an_error_and_leaves_nothing(ids: list[int], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"token id {named}.*257 ids.*uint16"):
        write_shard(tmp_path / "x.bin", np.array(ids), vocab_size=257, fingerprint=PRINT)
    assert not list(tmp_path.iterdir())


def test_failing_to_write_keeps_the_old_shard(tmp_path: Path) -> None:
    path, _, _ = shard(tmp_path)
    before = path.read_bytes()
    with pytest.raises(InputError):
        write_shard(path, np.array([99999]), vocab_size=50257, fingerprint=PRINT)
    assert path.read_bytes() == before


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"", "not a gpt2jax shard"),
        (lambda data: b"PK\x03\x04" + data, "not a gpt2jax shard"),
        (lambda data: b"\x93NUMPY" + data[6:], "not a gpt2jax shard"),
        (lambda data: data[:40], "cut: 40 bytes"),
        (lambda data: data[:64], "cut: 64 bytes instead of 138"),
        (lambda data: data[:-1], "cut: 137 bytes instead of 138"),
        (lambda data: data + b"\0\0", "2 bytes stand after the end"),
        (flip(0), "not a gpt2jax shard"),
        (flip(8), "version 0; this gpt2jax reads version 1"),
        (flip(12), "damaged: 3 bytes a token"),
        (flip(16), "vocabulary 50256, not 50257"),
        (flip(20), "checksum"),
        (flip(24), "cut|after the end"),
        (flip(40), "tokenizer"),
        (flip(64), "checksum does not fit"),
        (flip(137), "checksum does not fit"),
    ],
)
def test_damaged_files_are_refused(change: Callable[[bytes], bytes], said: str, tmp_path: Path) -> None:
    path, manifest, info = shard(tmp_path)
    open_shard(path, manifest=manifest, info=info, verify=True)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=said) as error:
        open_shard(path, manifest=manifest, info=info, verify=True)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_header_of_the_wrong_width_is_refused(tmp_path: Path) -> None:
    path, _, _ = shard(tmp_path, vocab_size=65536)
    data = path.read_bytes()
    path.write_bytes(data[:16] + struct.pack("<I", 70000) + data[20:])
    with pytest.raises(InputError, match="uint16 for a vocabulary of 70000"):
        open_shard(path)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="train_000007.bin.*No such file"):
        open_shard(tmp_path / "train_000007.bin")


def test_a_shard_of_other_data_is_stale(tmp_path: Path) -> None:
    path, manifest, info = shard(tmp_path)
    write_shard(path, IDS[::-1], vocab_size=50257, fingerprint=PRINT)  # the same length, whole in itself
    open_shard(path, manifest=manifest, verify=True)
    with pytest.raises(InputError, match="does not belong to its manifest: checksum"):
        open_shard(path, manifest=manifest, info=info)


def test_manifest_reads_back(tmp_path: Path) -> None:
    _, manifest, _ = shard(tmp_path)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert read_manifest(tmp_path).fingerprint == manifest.fingerprint


def test_data_fingerprint_follows_the_tokens_and_not_their_origin(tmp_path: Path) -> None:
    _, manifest, info = shard(tmp_path)
    assert dataclasses.replace(manifest, sources=("b.txt",), notes=()).fingerprint == manifest.fingerprint
    other = {"train": SplitInfo(37, 1, 37, (dataclasses.replace(info, crc32=1),))}
    assert dataclasses.replace(manifest, splits=other).fingerprint != manifest.fingerprint
    assert dataclasses.replace(manifest, tokenizer_fingerprint="cd" * 32).fingerprint != manifest.fingerprint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"format": "other", "version": 1}', "version 1"),
        ('{"format": "gpt2jax tokens", "version": 2}', "version 1"),
        ('{"format": "gpt2jax tokens", "version": 1, "splits": {}}', "damaged"),
        ('{"format": "gpt2jax tokens", "version": 1, "splits": {"train": {"tokens": 5}}}', "damaged"),
    ],
)
def test_damaged_manifests_are_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=said) as error:
        read_manifest(tmp_path)
    assert "manifest.json" in str(error.value) and "\n" not in str(error.value)


def test_manifest_whose_counts_do_not_add_up_is_refused(tmp_path: Path) -> None:
    _, manifest, _ = shard(tmp_path)
    write_manifest(tmp_path, manifest)
    tree = json.loads((tmp_path / "manifest.json").read_text())
    tree["splits"]["train"]["tokens"] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(tree))
    with pytest.raises(InputError, match="do not add up to its 38 tokens"):
        read_manifest(tmp_path)


def test_a_folder_without_manifest_is_no_prepared_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gpt2jax prepare"):
        read_manifest(tmp_path)
