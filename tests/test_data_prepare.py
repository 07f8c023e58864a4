"""gpt2jax.data.sources and gpt2jax.data.prepare: which text is read, how it is cut, and that a prepared folder is whole or absent."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2jax.data import prepare as prepare_module
from gpt2jax.data import sources as sources_module
from gpt2jax.data.prepare import in_validation, prepare
from gpt2jax.data.shards import Manifest, open_shard, read_manifest
from gpt2jax.data.sources import find_sources, split_text
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer

BYTES = load_tokenizer("bytes")


def run(sources: list[Any], out: Path, tokenizer: Tokenizer = BYTES, **settings: Any) -> Manifest:
    return prepare([str(source) for source in sources], out, tokenizer=tokenizer, **{"progress": False, **settings})


def tokens(folder: Path, split: str = "train") -> list[int]:
    return [int(token) for shard in read_manifest(folder).splits[split].shards for token in open_shard(folder / shard.name, verify=True)]


def documents(folder: Path, split: str = "train") -> list[str]:
    """The texts of a split: it begins with the end-of-text id, and each document is followed by it."""
    ids = tokens(folder, split)
    assert not ids or ids[0] == ids[-1] == BYTES.eot
    text = BYTES.decode_bytes(ids).decode().split(END_OF_TEXT)
    return text[1:-1]


def prepared(sources: list[Any], tmp_path: Path, **settings: Any) -> list[str]:
    run(sources, tmp_path / "out", val_fraction=0.0, **settings)
    return documents(tmp_path / "out")


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


# which files


def test_folder_is_read_sorted_without_hidden_and_binary_files(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for name in ["b.txt", "a/z.md", "a/b.py", "c", ".hidden.txt", ".git/x.txt", "d.unknown"]:
        write(source / name, name)
    write(source / "image.png", b"\x89PNG\r\n\x1a\n\0\0")
    write(source / "latin.bin", "é".encode("latin-1"))
    write(source / "empty.txt", "")
    write(source / "packed.tar.gz", gzip.compress(b"x"))
    write(source / "e.txt.gz", gzip.compress(b"e.txt.gz"))
    assert prepared([source], tmp_path) == ["a/b.py", "a/z.md", "b.txt", "c", "d.unknown", "e.txt.gz"]
    assert find_sources([str(source)])[0].left_out == 3


def test_files_globs_and_folders_keep_the_order_of_the_command_line_and_come_once(tmp_path: Path) -> None:
    for name in ["one.txt", "two.txt", "sub/three.txt"]:
        write(tmp_path / "in" / name, name)
    source = tmp_path / "in"
    assert prepared([source / "two.txt", source / "*.txt", source], tmp_path) == ["two.txt", "one.txt", "sub/three.txt"]


def test_every_form_of_a_file_reads_the_same(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    text = "héllo\r\nworld 🤗\n"
    lines = rows(text, "", "second") + "\n"
    two_members = zstandard.compress(lines[:9].encode()) + zstandard.compress(lines[9:].encode())
    plain = {"1.txt": text.encode(), "2.txt.gz": gzip.compress(text.encode()), "3.MD.zst": zstandard.compress(text.encode())}
    plain |= {"4.txt": b"\xef\xbb\xbf" + text.encode()}
    packed = {"5.jsonl": lines.encode(), "6.ndjson.gz": gzip.compress(lines.encode()), "7.jsonl.zst": two_members}
    files = [write(tmp_path / name, content) for name, content in {**plain, **packed}.items()]
    assert prepared(files, tmp_path) == [text] * 4 + [text, "second"] * 3


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("from a pipe é".encode())))
    assert prepared(["-"], tmp_path) == ["from a pipe é"]


def test_standard_library_is_read_without_tests_and_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = ["json/data.txt", "test/t.py", "lib2to3/tests/t.py", "idlelib/idle_test/t.py", "site-packages/p.py", "__pycache__/c.py"]
    for name in ["b.py", "json/decoder.py", *left_out]:
        write(tmp_path / "lib" / name, name)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    assert prepared(["python-stdlib"], tmp_path) == ["b.py", "json/decoder.py"]


def test_real_standard_library_is_there() -> None:
    [source] = find_sources(["python-stdlib"])
    keys = [file.key for file in source.files]
    assert "argparse.py" in keys and "json/decoder.py" in keys and keys == sorted(keys)
    assert not [key for key in keys if {"test", "tests", "site-packages", "dist-packages"} & set(key.split("/"))]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"fine\nalso\ncaf\xe9\n", r"a.txt:3: not UTF-8 text \(byte 0xe9\)"),
        ("a.txt", b"fine\ncut \xe2\x82", r"a.txt:2: not UTF-8"),
        ("a.png", b"\x89PNG\0", "a.png: a binary file"),
        ("a.txt", b"", "a.txt holds no text"),
        ("a.jsonl", rows("x") + '{"body": "y", "id": 3}\n', "a.jsonl:2: the line has no text under 'text'; its keys are body, id"),
        ("a.jsonl", rows("x") + '{"text": 5}\n', "a.jsonl:2: the line has no text under 'text'"),
        ("a.jsonl", rows("x") + '\n["x"]\n', "a.jsonl:3"),
        ("a.jsonl", rows("x", "y") + '{"text": "z"\n', "a.jsonl:3: not a line of JSON"),
        ("a.jsonl", rows("x").encode() + b'{"text": "\xff"}\n', "a.jsonl:2: not a line of JSON"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1: not a line of JSON"),
        ("a.txt.gz", gzip.compress(b"hello" * 99, mtime=0)[:-9], "a.txt.gz: damaged or cut"),
        ("a.txt.gz", b"hello", "a.txt.gz: damaged or cut"),
        ("a.txt.zst", b"hello", "a.txt.zst: damaged zstd"),
    ],
)
def test_unreadable_files_are_named(name: str, content: str | bytes, said: str, tmp_path: Path) -> None:
    write(tmp_path / "in" / name, content)
    for source in ([tmp_path / "in"] if name != "a.png" else []) + [tmp_path / "in" / name]:
        if content == b"" and source == tmp_path / "in":
            said = "in holds no text"
        elif content == b"":
            said = "a.txt holds no text"
        with pytest.raises(InputError, match=said) as error:
            run([source], tmp_path / "out")
        assert "\n" not in str(error.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_cut_zstd_file_is_refused(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.compress(random.Random(0).randbytes(5000).hex().encode())
    for length in (len(packed) - 1, len(packed) // 2, 7):
        with pytest.raises(InputError, match="a.txt.zst: the zstd file is cut"):
            run([write(tmp_path / "a.txt.zst", packed[:length])], tmp_path / "out")


def test_names_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "images" / "a.png", b"\0")
    for source, said in [
        (tmp_path / "empty", "empty: the folder holds no text file"),
        (tmp_path / "images", "1 binary files were left out"),
        (tmp_path / "absent.txt", "absent.txt: no such file"),
        (tmp_path / "*.absent", "matches no text file"),
    ]:
        with pytest.raises(InputError, match=said):
            run([source], tmp_path / "out")
    with pytest.raises(InputError, match="no source"):
        run([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# cutting


def awkward_text(length: int, seed: int) -> str:
    draw = random.Random(seed)
    parts = [*"ab '\n\t.,1", "  ", "   ", "don't", "'s", "'ll ", " 've", "\r\n", "\n\n\n", " word", "'", END_OF_TEXT]
    parts += ["\x1c", "\u2028", "\xa0", "\u3000", "\x85", "🤗", "é"]
    return "".join(draw.choices(parts, k=length))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_ids_of_pieces_are_the_ids_of_the_whole(size: int) -> None:
    # a second vocabulary has what GPT-2's lacks: tokens over the edges between white space, so that a cut inside a run of it shows
    over_edges = ["\xa0 ", "\xa0\n", "\r\n", " \n", "\n ", "\n\n", "\u3000 ", "\u2028\n", ".\x1c", "a\x1c", "'\x1c", "\x1c\x1c"]
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"\xc2\xa0": 256, b"\xe3\x80": 257, b"\xe3\x80\x80": 258, b"\xe2\x80": 259, b"\xe2\x80\xa8": 260}
    touchy = Tokenizer("hf", ranks | {token.encode(): 300 + place for place, token in enumerate(over_edges)}, {END_OF_TEXT: 400}, eot=400)
    cuts = 0
    for seed in range(60):
        text = awkward_text(200, seed)
        pieces = list(split_text([text[i : i + 11] for i in range(0, len(text), 11)], size=size))
        assert "".join(piece for piece, _ in pieces) == text
        assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
        for tokenizer in (load_tokenizer("gpt2"), touchy):
            assert [token for piece, _ in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text), text
        cuts += len(pieces) - 1
    assert cuts > 100


def test_pieces_are_short_and_long_spaces_are_not_cut() -> None:
    pieces = [piece for piece, _ in split_text(["some words here and there\n" * 4000], size=1000)]
    assert max(map(len, pieces)) < 1100 and len(pieces) > 90
    assert [piece for piece, _ in split_text(["x" + " " * 5000], size=10)] == ["x", " " * 5000]


@pytest.mark.parametrize("size", [1, 4, 9, 1000])
@pytest.mark.parametrize("separator", [END_OF_TEXT, "=== end ===", "\n\n", "~"])
def test_separator_divides_documents_wherever_blocks_end(separator: str, size: int) -> None:
    draw = random.Random(size)
    for _ in range(40):
        texts = [" ".join(draw.choices(["a", "bc", "=", "<|end", "d\r", "e"], k=draw.randrange(1, 6))) + "." for _ in range(draw.randrange(1, 6))]
        breaks = [draw.choice(["", "\n", "\r\n"]) if separator != "\n\n" else "" for _ in range(12)]
        whole = texts[0] + "".join(breaks[i] + separator + breaks[-i - 1] + text for i, text in enumerate(texts[1:]))
        found = [""]
        for piece, ends in split_text([whole[i : i + 3] for i in range(0, len(whole), 3)], separator, size=size):
            found[-1] += piece
            found += [""] if ends else []
        assert found[:-1] == texts


def test_separator_at_the_ends_makes_no_empty_documents(tmp_path: Path) -> None:
    file = write(tmp_path / "stories.txt", f"{END_OF_TEXT}\nOne.\n{END_OF_TEXT}\nTwo.\n\nMore.\n{END_OF_TEXT}\n")
    assert prepared([file], tmp_path, separator=END_OF_TEXT) == ["One.", "Two.\n\nMore."]
    assert len(tokens(tmp_path / "out")) == 4 + 11 + 3


def test_end_of_text_in_a_document_stays_text(tmp_path: Path) -> None:
    run([write(tmp_path / "a.txt", f"x{END_OF_TEXT}y")], tmp_path / "out", val_fraction=0.0)
    assert tokens(tmp_path / "out") == [256, *f"x{END_OF_TEXT}y".encode(), 256]


def test_text_without_any_space_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "_LONGEST_WORD", 1 << 20)
    with pytest.raises(InputError, match="a.txt: 1,048,576 characters without a space"):
        run([write(tmp_path / "a.txt", "x" * (1 << 22))], tmp_path / "out")


def test_a_file_is_read_as_a_stream(tmp_path: Path) -> None:
    """No more than a few pieces are read before the first ones are encoded."""
    file, read_before_first = write(tmp_path / "a.txt", "some words\n" * 3_000_000), []

    class Watched(_Wrapped):
        def encode_array(self, text: str) -> np.ndarray:
            assert len(text) <= 2 << 20
            read_before_first.append(reading[0])
            return super().encode_array(text)

    reading = [0]
    [source] = find_sources([str(file)])
    pieces = sources_module.read_documents(source.files[0], separator=None, text_key="text", on_bytes=lambda count: reading.__setitem__(0, reading[0] + count))
    next(pieces)
    assert reading[0] <= 3 << 20
    run([file], tmp_path / "out", Watched(), workers=1)
    assert sum(len(open_shard(tmp_path / "out" / shard.name)) for shard in read_manifest(tmp_path / "out").splits["train"].shards) > 30_000_000


# the prepared folder


class _Wrapped(Tokenizer):
    def __init__(self) -> None:
        super().__init__("bytes", BYTES._ranks, BYTES._specials, eot=256)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    write(folder / "rows.jsonl", rows(*(f"document {i} " + "word " * draw.randrange(20) for i in range(3000))))
    write(folder / "long.txt", awkward_text(300_000, 1))
    return folder


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_any_number_of_workers_makes_the_same_folder(name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_CHUNK", 1000)  # many more pieces of work than fit in the queue
    one, three = (run([corpus], tmp_path / str(count), load_tokenizer(name), workers=count, shard_tokens=100_007) for count in (1, 3))
    assert one == three
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "3").iterdir()) and len(files) > 4
    for file in files:
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "3" / file).read_bytes()


def test_ids_are_the_tokenizers(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_CHUNK", 1000)
    gpt2 = load_tokenizer("gpt2")
    manifest = run([corpus], tmp_path / "out", gpt2, val_fraction=0.0)
    texts = [(corpus / "long.txt").read_bytes().decode(), *(json.loads(line)["text"] for line in (corpus / "rows.jsonl").read_text().splitlines())]
    assert tokens(tmp_path / "out") == [50256, *(token for text in texts for token in [*gpt2.encode(text), 50256])]
    assert manifest.splits["train"].documents == len(texts) == 3001
    assert manifest.splits["train"].bytes == sum(len(text.encode()) for text in texts)
    assert manifest.splits["val"].tokens == manifest.splits["val"].documents == 0


def test_manifest_describes_what_lies_there(corpus: Path, tmp_path: Path) -> None:
    manifest = run([corpus], tmp_path / "out", shard_tokens=200_000, seed=4)
    assert read_manifest(tmp_path / "out") == manifest
    assert (manifest.tokenizer_name, manifest.tokenizer_fingerprint, manifest.eot, manifest.seed) == ("bytes", BYTES.fingerprint, 256, 4)
    assert load_tokenizer(tmp_path / "out").fingerprint == BYTES.fingerprint
    assert manifest.sources == (str(corpus),)
    for split, info in manifest.splits.items():
        assert info.tokens == len(tokens(tmp_path / "out", split)) == info.bytes + info.documents + 1
        assert [shard.tokens for shard in info.shards[:-1]] == [200_000] * (len(info.shards) - 1)


def test_documents_are_split_by_number_and_seed(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(2000)]
    file = write(tmp_path / "a.jsonl", rows(*texts))
    for seed in (0, 1):
        run([file], tmp_path / str(seed), val_fraction=0.1, seed=seed)
        expected = [in_validation(seed, number, 0.1) for number in range(2000)]
        assert documents(tmp_path / str(seed), "val") == [text for text, val in zip(texts, expected, strict=True) if val]
        assert documents(tmp_path / str(seed), "train") == [text for text, val in zip(texts, expected, strict=True) if not val]
        assert 150 < sum(expected) < 250
    assert documents(tmp_path / "0", "val") != documents(tmp_path / "1", "val")


@pytest.mark.parametrize("shard_tokens", [10**6, 97, 30])
@pytest.mark.parametrize("drawn_into_validation", [False, True])
def test_one_document_gives_its_end_to_validation(drawn_into_validation: bool, shard_tokens: int, tmp_path: Path, capsys: Any) -> None:
    seed = next(seed for seed in range(1000) if in_validation(seed, 0, 0.1) == drawn_into_validation)
    text = "".join(f"line {i}\n" for i in range(50))
    manifest = run([write(tmp_path / "a.txt", text)], tmp_path / "out", val_fraction=0.1, seed=seed, shard_tokens=shard_tokens, progress=None)
    whole = [256, *text.encode(), 256]
    train, val = tokens(tmp_path / "out", "train"), tokens(tmp_path / "out", "val")
    assert val[0] == 256 and train + val[1:] == whole and len(val) - 1 == round(len(whole) * 0.1)
    assert "few documents" in manifest.notes[0] and manifest.notes[0] in capsys.readouterr().err
    assert [(info.tokens, info.documents) for info in manifest.splits.values()] == [(len(train), 1), (len(val), 1)]
    assert sum(info.bytes for info in manifest.splits.values()) == len(text)
    names = [shard.name for info in manifest.splits.values() for shard in info.shards]
    assert sorted(names) == sorted(path.name for path in (tmp_path / "out").glob("*.bin"))


def test_a_vocabulary_past_uint16_takes_wider_tokens(tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 70_000}
    wide = Tokenizer("hf", ranks, {END_OF_TEXT: 65_600}, eot=65_600)
    run([write(tmp_path / "a.txt", "the")], tmp_path / "out", wide, val_fraction=0.0)
    assert tokens(tmp_path / "out") == [65_600, 70_000, ord("e"), 65_600]


def test_an_id_outside_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    class Wrong(_Wrapped):
        def encode_array(self, text: str) -> np.ndarray:
            return np.array([300], np.uint32)

    with pytest.raises(InputError, match="token id 300 is outside the vocabulary of 257"):
        run([write(tmp_path / "a.txt", "x")], tmp_path / "out", Wrong())

    class Wraps(_Wrapped):
        def encode_array(self, text: str) -> np.ndarray:
            return np.array([65_536 + 97], np.uint32)

    with pytest.raises(InputError, match="token id 65633"):
        run([write(tmp_path / "a.txt", "x")], tmp_path / "out", Wraps())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    file, out = write(tmp_path / "a.txt", "text"), tmp_path / "out"
    write(out / "thesis.txt", "mine")
    with pytest.raises(InputError, match="out exists and is not an empty folder"):
        run([file], out)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    with pytest.raises(InputError, match="a.txt exists"):
        run([file], file)
    assert file.read_text() == "text"


def test_an_empty_folder_or_a_link_to_one_is_filled(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "text of some length")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    run([file], tmp_path / "link")
    run([file], tmp_path / "deep" / "new")
    assert sorted(os.listdir(tmp_path / "empty")) == sorted(os.listdir(tmp_path / "deep" / "new"))
    assert (tmp_path / "link").is_symlink() and tokens(tmp_path / "empty") == tokens(tmp_path / "deep" / "new")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "deep", "empty", "link"]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_leaves_nothing_behind(stop: type[BaseException], exists: bool, tmp_path: Path, corpus: Path) -> None:
    class Interrupted(_Wrapped):
        calls = 0

        def encode_array(self, text: str) -> np.ndarray:
            self.calls += 1
            if self.calls > 1500:
                raise stop
            return super().encode_array(text)

    if exists:
        (tmp_path / "out").mkdir()
    before = threading.active_count()
    with pytest.raises(stop):
        run([corpus], tmp_path / "out", Interrupted(), workers=2)
    assert os.listdir(tmp_path) == (["out"] if exists else [])
    assert not exists or not os.listdir(tmp_path / "out")
    assert threading.active_count() == before


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "text")
    for key, value, said in [("val_fraction", 1.0, "=1.0"), ("workers", 0, "workers=0"), ("shard_tokens", 0, "shard_tokens=0"), ("separator", "", "separator")]:
        with pytest.raises(InputError, match=said):
            run([file], tmp_path / "out", **{key: value})
    with pytest.raises(InputError, match="no end-of-text token"):
        run([file], tmp_path / "out", Tokenizer("hf", BYTES._ranks, {}, eot=None))


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "text")
    with pytest.raises(InputError, match="out cannot be made: .*a.txt is no folder"):
        run([file], file / "out")


def test_progress_shows_a_bar_or_lines_or_nothing(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path / "a.txt", "text " * 100)
    for number, (progress, said) in enumerate([(None, "preparing 1 files"), (True, "reading"), (False, None)]):
        run([file], tmp_path / str(number), progress=progress)
        out, err = capsys.readouterr()
        assert out == "" and ((said in err) if said else err == "")


def test_lone_surrogates_in_json_are_replaced(tmp_path: Path) -> None:
    assert prepared([write(tmp_path / "a.jsonl", '{"text": "a\\ud83db"}\n')], tmp_path) == ["a\ufffdb"]


def test_other_text_key(tmp_path: Path) -> None:
    assert prepared([write(tmp_path / "a.jsonl", '{"body": "x"}\n')], tmp_path, text_key="body") == ["x"]


# a part of a source


def test_reading_ends_after_so_many_documents(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(30)]
    files = [write(tmp_path / "a.jsonl", rows(*texts[:9], "")), write(tmp_path / "b.jsonl", rows(*texts[9:]))]
    for limit in (1, 9, 10, 30, 99):
        run(files, tmp_path / str(limit), val_fraction=0.0, limit_documents=limit)
        assert documents(tmp_path / str(limit)) == texts[:limit]
    assert "at most 9 documents" in read_manifest(tmp_path / "9").notes[0]


@pytest.mark.parametrize("workers", [1, 3])
def test_reading_ends_with_the_document_that_reaches_so_many_tokens(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_CHUNK", 50)  # limits fall inside chunks and between them
    texts = [f"text {i} " + "word " * (i % 7) for i in range(200)]
    file = write(tmp_path / "a.jsonl", rows(*texts))
    ends = np.cumsum([len(text) + 1 for text in texts])
    for limit in (1, 8, 9, 100, 999, 1500, int(ends[99]), int(ends[99]) + 1, 10**9):
        out = tmp_path / f"{limit}-{workers}"
        run([file], out, val_fraction=0.3, limit_tokens=limit, workers=workers)
        count = int(np.searchsorted(ends, limit)) + 1
        if read_manifest(out).splits["val"].documents and count > 20:  # else validation is cut off the end of training
            assert len(documents(out)) + len(documents(out, "val")) == min(count, 200)
        assert sum(info.tokens for info in read_manifest(out).splits.values()) == ends[min(count, 200) - 1] + 2


def test_a_long_document_is_not_cut_by_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_CHUNK", 50)
    monkeypatch.setattr(sources_module.split_text, "__defaults__", (None, 20, "text"))  # pieces of 20 characters
    texts = ["many words of one document " * 40, "the next one"]
    run([write(tmp_path / "a.jsonl", rows(*texts))], tmp_path / "out", val_fraction=0.0, limit_tokens=60, workers=1)
    assert documents(tmp_path / "out") == texts[:1]


def test_limits_below_one_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "text")
    for limits in ({"limit_documents": 0}, {"limit_tokens": 0}, {"limit_documents": 5, "limit_tokens": -1}):
        with pytest.raises(InputError, match="limit_tokens=.*must be 1 or more"):
            run([file], tmp_path / "out", **limits)
