"""gpt2jax.tokenizer: ids, round trips, folders, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken

from gpt2jax import tokenizer as module
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import END_OF_TEXT, GPT2_PATTERN, MARKER, Tokenizer, load_tokenizer

ODD = ["", " ", "\n\n", "don't we'll I'M", "  a   b \t\n c  ", "a\x1cb\u2028c\xa0d\u3000e", "x\r\ny\r\n\r\n"]
ODD += ["🤗’s 👨‍👩‍👧 日本語 é e\u0301", "½²٣ 12345", "\0\x7f\ufeff", END_OF_TEXT * 2]


def odd_strings(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    alphabet = [*"ab'stdlmre  \n\n\t\r019.,-_(){}", "'ll", " the", END_OF_TEXT]
    alphabet += ["\x1c", "\x85", "\xa0", "\u2028", "\u200b", "\u3000", "é", "ß", "日", "🤗", "\u0301"]
    return ["".join(draw.choices(alphabet, k=draw.randrange(40))) for _ in range(count)]


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load_tokenizer("gpt2")


def test_gpt2_ids(gpt2: Tokenizer) -> None:
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("The dog") == [464, 3290]
    assert (gpt2.name, gpt2.n_vocab, gpt2.eot) == ("gpt2", 50257, 50256)
    assert gpt2.decode([464, 3290, 50256]) == "The dog" + END_OF_TEXT
    assert gpt2.encoding.name == "gpt2"


def test_pattern_is_tiktokens() -> None:
    openai = pytest.importorskip("tiktoken_ext.openai_public")
    assert openai.r50k_pat_str == GPT2_PATTERN


def test_same_ids_as_tiktokens_own_gpt2(gpt2: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken's cache is filled with the two files that it would download: it checks their sha256 itself."""
    gpt2.save_hf(tmp_path / "hf")
    for name, url in [("merges.txt", "vocab.bpe"), ("vocab.json", "encoder.json")]:
        key = hashlib.sha1(f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{url}".encode()).hexdigest()
        (tmp_path / key).write_bytes((tmp_path / "hf" / name).read_bytes())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(socket, "socket", _no_network)
    theirs = tiktoken.get_encoding("gpt2")
    for text in ODD + odd_strings(2000):
        assert gpt2.encode(text) == theirs.encode_ordinary(text), text
        assert gpt2.encode(text, allow_special=True) == theirs.encode(text, allowed_special="all"), text


def test_known_corpus(gpt2: Tokenizer) -> None:
    """The counts that nanoGPT and llm.c print for tiny shakespeare, and llm.c's first validation tokens (which begin with the end-of-text id)."""
    folder = os.environ.get("GPT2JAX_TEST_DATA")
    if not folder:
        pytest.skip("GPT2JAX_TEST_DATA names no folder with tinyshakespeare.txt and llmc_first257_tokens.txt")
    text = Path(folder, "tinyshakespeare.txt").read_text(encoding="utf-8")
    ids = gpt2.encode_array(text)
    assert len(ids) == 338_025 and gpt2.decode(ids) == text
    first = [int(number) for number in Path(folder, "llmc_first257_tokens.txt").read_text().replace(",", " ").split()]
    parted = END_OF_TEXT + text[:2000].replace("\n\n", "\n\n" + END_OF_TEXT)  # llm.c takes each speech for a document
    assert gpt2.encode(parted, allow_special=True)[:257] == first


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_round_trip(name: str) -> None:
    tokenizer = load_tokenizer(name)
    for text in ODD + odd_strings(500, seed=1):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes(np.array(ids, np.int32)) == text.encode()
        assert tokenizer.encode_array(text).tolist() == ids
        assert all(type(number) is int for number in ids)
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_end_of_text_in_text_is_text_unless_asked_for(name: str) -> None:
    tokenizer = load_tokenizer(name)
    text = f"a{END_OF_TEXT} b"
    assert tokenizer.eot not in tokenizer.encode(text)
    assert tokenizer.eot not in tokenizer.encode_array(text)
    assert tokenizer.encode(text, allow_special=True) == [*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode(" b")]
    assert tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text


def test_bytes_are_their_own_ids() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.n_vocab, tokenizer.eot) == (257, 256)
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9] == tokenizer.encoding.encode_ordinary("aé")
    assert tokenizer.decode([0xC3]) == "\ufffd"


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_half_a_surrogate_pair_becomes_the_replacement_character(name: str) -> None:
    tokenizer = load_tokenizer(name)
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == tokenizer.decode(tokenizer.encode_array("a\ud83db")) == "a\ufffdb"


@pytest.mark.parametrize(("ids", "named"), [([15496, 50257], "50257"), ([-1], "-1"), ([0.5], "float64"), ([[1, 2]], r"\(1, 2\)"), (["a"], "U1")])
def test_decode_refuses_what_is_no_id(gpt2: Tokenizer, ids: Any, named: str) -> None:
    with pytest.raises(InputError, match=named) as error:
        gpt2.decode(ids)
    assert "\n" not in str(error.value)


def test_token_bytes(gpt2: Tokenizer) -> None:
    sizes = gpt2.token_bytes()
    assert sizes.dtype == np.int32 and sizes.shape == (50257,)
    assert sizes[50256] == 0
    assert sizes[[15496, 995]].tolist() == [5, 6]


def test_hugging_face_files_are_openais_byte_for_byte(gpt2: Tokenizer, tmp_path: Path) -> None:
    gpt2.save_hf(tmp_path)
    assert _sha256(tmp_path / "vocab.json") == "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    assert _sha256(tmp_path / "merges.txt") == "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    loaded = load_tokenizer(tmp_path)
    assert (loaded.name, loaded.eot, loaded.fingerprint) == ("hf", 50256, gpt2.fingerprint)
    loaded.save_hf(tmp_path / "again")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_loads_from_a_folder_without_config(gpt2: Tokenizer, tmp_path: Path) -> None:
    gpt2.save_hf(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).fingerprint == gpt2.fingerprint


@pytest.mark.parametrize("name", ["gpt2", "bytes", "small"])
def test_saved_folder_loads_equal(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_small(tmp_path / "hf") if name == "small" else name)
    tokenizer.save(tmp_path / "run")
    loaded = load_tokenizer(tmp_path / "run")
    assert (loaded.name, loaded.n_vocab, loaded.eot, loaded.fingerprint) == (tokenizer.name, tokenizer.n_vocab, tokenizer.eot, tokenizer.fingerprint)
    for text in odd_strings(50):
        assert loaded.encode(text, allow_special=True) == tokenizer.encode(text, allow_special=True)


def test_saved_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    load_tokenizer(_small(tmp_path / "hf")).save(tmp_path)
    load_tokenizer(_small(tmp_path / "other", merges=["Ġ t", "h e"])).save_hf(tmp_path)
    with pytest.raises(InputError, match="not those that were saved"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "bytes", "small"])
def test_pickles(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_small(tmp_path) if name == "small" else name)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.encode(f"the hat<pad>word{END_OF_TEXT}") == tokenizer.encode(f"the hat<pad>word{END_OF_TEXT}")


def test_needs_no_network_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", _no_network)
    module._built_in.cache_clear()
    module._gpt2_ranks.cache_clear()
    before = dict(os.environ)
    assert load_tokenizer("gpt2").encode("Hello") == [15496]
    assert dict(os.environ) == before


def test_damaged_package_data_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "vocab.bpe").write_bytes(module.vocab_bpe().encode()[:-1])
    monkeypatch.setattr(module.resources, "files", lambda package: tmp_path)
    with pytest.raises(InputError, match="sha256"):
        module.vocab_bpe()


def test_fingerprints_tell_apart(tmp_path: Path) -> None:
    prints = {load_tokenizer(name).fingerprint for name in ("gpt2", "bytes")}
    prints |= {load_tokenizer(_small(tmp_path / "a")).fingerprint, load_tokenizer(_small(tmp_path / "b", merges=["Ġ t", "h e"])).fingerprint}
    prints |= {load_tokenizer(_small(tmp_path / "c", eos="<pad>")).fingerprint}
    assert len(prints) == 5


# a small vocabulary of another order: special tokens first, bytes backwards, gaps, and ids of merges that only rise

MERGES = ["Ġ t", "h e", "Ġt he", "a t", "h at", "he at"]


def _small_vocab(merges: list[str] = MERGES) -> dict[str, int]:
    symbols = list(reversed(module._BYTE_OF))
    vocab = {"<pad>": 0, END_OF_TEXT: 1, **{symbol: 2 + place for place, symbol in enumerate(symbols)}}
    return vocab | {merge.replace(" ", ""): 300 + 2 * place for place, merge in enumerate(merges)}


def _tree(merges: list[Any] = MERGES, **changes: Any) -> dict[str, Any]:
    tokens = [("<pad>", 0, True), (END_OF_TEXT, 1, True), ("word", 400, False)]
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    added = [{"id": number, "content": text, "special": special, **flags} for text, number, special in tokens]
    model = {"type": "BPE", "vocab": _small_vocab(), "merges": merges, "dropout": None, "unk_token": None, "byte_fallback": False}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "ignore_merges": False}
    before = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tree = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": before, "post_processor": None}
    return {**tree, "decoder": {**before}, "model": model, **changes}


def _small(folder: Path, merges: list[str] = MERGES, eos: str = END_OF_TEXT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(_small_vocab(merges)))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (folder / "added_tokens.json").write_text(json.dumps({"word": 400, "<pad>": 0}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<pad>"}, "eos_token": eos}))
    return folder


def _write_tree(folder: Path, tree: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder


def test_small_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_small(tmp_path))
    vocab = _small_vocab()
    assert (tokenizer.name, tokenizer.n_vocab, tokenizer.eot) == ("hf", 401, 1)
    assert tokenizer.encode("heat the that") == [vocab["heat"], vocab["Ġthe"], vocab["Ġt"], vocab["hat"]]
    assert tokenizer.encode("awordb<pad>")[:3] == [vocab["a"], 400, vocab["b"]]
    assert 0 not in tokenizer.encode("<pad>") and tokenizer.encode("<pad>", allow_special=True) == [0]
    assert tokenizer.decode([400, 1, vocab["Ġthe"]]) == f"word{END_OF_TEXT} the"
    assert tokenizer.token_bytes()[[400, 1, 0, vocab["Ġthe"], 301]].tolist() == [4, 0, 0, 4, 0]
    with pytest.raises(InputError, match="301.*gap"):
        tokenizer.decode([vocab["a"], 301])


@pytest.mark.parametrize("merges", [MERGES, [merge.split(" ") for merge in MERGES]], ids=["strings", "pairs"])
def test_tokenizer_json_equals_vocab_and_merges(merges: list[Any], tmp_path: Path) -> None:
    one, other = load_tokenizer(_write_tree(tmp_path / "json", _tree(merges))), load_tokenizer(_small(tmp_path / "pair"))
    assert one.fingerprint == other.fingerprint


def test_longest_added_token_wins(tmp_path: Path) -> None:
    tree = _tree()
    tree["added_tokens"] += [{"id": 401, "content": "word2", "special": False}, {"id": 402, "content": "the", "special": False}]
    tokenizer = load_tokenizer(_write_tree(tmp_path, tree))
    assert tokenizer.encode("word2word") == [401, 400]
    assert tokenizer.encode(" the") == [_small_vocab()["Ġ"], 402]


def test_equals_hugging_faces_tokenizers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tree = _tree()
    tree["model"]["vocab"]["word"] = 400  # the library would number it anew, after the gaps, if it were not here too
    ours, theirs = load_tokenizer(_write_tree(tmp_path, tree)), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = ODD + odd_strings(1000, seed=2) + ["the heat that atheathat wordword<pad> the\nthat 'the"]
    assert [ours.encode(text, allow_special=True) for text in texts] == [theirs.encode(text).ids for text in texts]


def test_equals_a_trained_one(tmp_path: Path) -> None:
    """A vocabulary that Hugging Face's trainer made: special tokens first, ids in the order of merges."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    texts = odd_strings(3000, seed=3)
    trained.train_from_iterator(texts, vocab_size=700, min_frequency=2, special_tokens=["<s>", "<pad>", END_OF_TEXT], show_progress=False)
    trained.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours.n_vocab == 700 and ours.eot == 2
    assert [ours.encode(text, allow_special=True) for text in texts] == [trained.encode(text).ids for text in texts]


def test_transformers_reads_what_is_saved(gpt2: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    texts = ODD + odd_strings(300, seed=4)
    for name, ours in [("gpt2", gpt2), ("small", load_tokenizer(_small(tmp_path / "source")))]:
        ours.save_hf(tmp_path / name)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs.eos_token_id == ours.eot
        assert [ours.encode(text, allow_special=True) for text in texts] == [theirs(text)["input_ids"] for text in texts]


def _refused(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    place = tree
    for key in parents:
        place = place[key]
    place[last] = value
    return tree


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("model.type", "Unigram", "not BPE"),
        ("pre_tokenizer.type", "Metaspace", "Metaspace"),
        ("pre_tokenizer.use_regex", False, "ByteLevel"),
        ("pre_tokenizer.add_prefix_space", True, "add_prefix_space"),
        ("normalizer", {"type": "NFC"}, "normalises"),
        ("model.dropout", 0.1, "dropout"),
        ("model.end_of_word_suffix", "</w>", "end_of_word_suffix"),
        ("model.merges", [*MERGES, "x y"], "'x y'"),
        ("model.merges", MERGES[::-1], "earlier merge|above"),
        ("model.merges", ["Ġ t", "a t", "h e"], "ids rise"),
        ("model.merges", ["Ġ t", 7], "cannot be read"),
        ("model.vocab", {"a": 0}, "255 of the 256"),
        ("model.vocab", {"a": "x"}, "whole numbers"),
        ("model.vocab", ["a"], "cannot be read"),
        ("added_tokens", [{"id": 5, "content": "<pad>", "special": True}], "id 5.*gives it 0"),
        ("added_tokens", [{"id": 5, "content": "<new>", "special": True}], "id 5 belongs to two"),
        ("added_tokens", [{"id": 400, "content": "two words", "special": False}], "white space"),
        ("added_tokens", [{"id": 400, "content": "<mask>", "special": True, "lstrip": True}], "lstrip"),
        ("added_tokens", [{"id": 400}], "cannot be read"),
    ],
)
def test_foreign_schemes_are_refused(path: str, value: Any, said: str, tmp_path: Path) -> None:
    _write_tree(tmp_path, _refused(_tree(), path, value))
    with pytest.raises(InputError, match=said) as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_vocabulary_that_tiktoken_would_merge_otherwise_is_refused(tmp_path: Path) -> None:
    """Alone, "aaa" becomes aa+a by the first merge, so merging by token would take a+aa for the merge that is named a different way."""
    vocab = {**_small_vocab([]), "aa": 300, "aaa": 301}
    tree = _tree(["a a", "a aa"])
    tree["model"]["vocab"] = vocab
    with pytest.raises(InputError, match="cannot reproduce"):
        load_tokenizer(_write_tree(tmp_path, tree))
    tree["model"]["merges"] = ["a a", "aa a"]
    assert load_tokenizer(_write_tree(tmp_path, tree)).encode("aaa") == [301]


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="'gtp2' is neither"):
        load_tokenizer("gtp2")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(InputError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match="not UTF-8"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / MARKER).write_text('{"format": "gpt2jax tokenizer", "version": 2, "name": "gpt2"}')
    with pytest.raises(InputError, match="version 1"):
        load_tokenizer(tmp_path)
    (tmp_path / MARKER).write_text('{"format": "gpt2jax tokenizer", "version": 1, "name": "gpt2", "fingerprint": "00"}')
    with pytest.raises(InputError, match="not those that were saved"):
        load_tokenizer(tmp_path)


def test_bytes_has_no_hugging_face_form(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no Hugging Face form"):
        load_tokenizer("bytes").save_hf(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def _no_network(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a socket was opened")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
