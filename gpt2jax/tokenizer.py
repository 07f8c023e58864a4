"""Text to token ids and back: GPT-2's byte-level BPE (Radford et al., 2019, section 2.2) on tiktoken, a byte tokenizer, and those of Hugging Face folders.

Nothing here needs a network: GPT-2's merge table is package data. Ids are those of the model's vocabulary, so a tiktoken rank *is* a token id; merging
only compares ranks, so a foreign vocabulary is exact as long as its merged tokens' ids rise in the order of its merges (gaps may stand between them).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from gpt2jax.errors import InputError

#: The name of the end-of-text token in GPT-2's vocabulary.
END_OF_TEXT = "<|endoftext|>"
#: GPT-2's splitting rule (openai/gpt-2 `src/encoder.py`), in the possessive form that tiktoken runs fastest.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
#: The file that `Tokenizer.save` writes.
MARKER = "gpt2jax_tokenizer.json"

_VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
_HEADER = "#version: 0.2"


class Tokenizer:
    """A reversible map between text and token ids. Made by `load_tokenizer`; pickles, so it may go to worker processes.

    `encoding` is the tiktoken.Encoding beneath, `name` is 'gpt2', 'bytes' or 'hf', `n_vocab` is the highest id plus one, `eot` is the id that ends a text
    (None where the vocabulary has no such token).
    """

    def __init__(self, name: str, ranks: dict[bytes, int], specials: dict[str, int], *, eot: int | None, added: dict[str, bool] | None = None) -> None:
        """`ranks`: the bytes of each BPE token and its id. `specials`: the other tokens, by their text. `added`: which tokens are looked for in text
        before BPE runs, with True for those that only count when the caller allows special tokens."""
        self.name, self.eot = name, eot
        self._added = dict.fromkeys(specials, True) if added is None else added
        self.encoding = tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
        self.n_vocab: int = self.encoding.max_token_value + 1
        self._ranks, self._specials = ranks, specials
        self._find_plain = _finder(text for text, special in self._added.items() if not special)
        self._find_any = _finder(self._added)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.name in _BUILT_IN:
            return load_tokenizer, (self.name,)
        return _rebuild, (self.name, self._ranks, self._specials, self.eot, self._added)

    def __repr__(self) -> str:
        return f"Tokenizer({self.name!r}, n_vocab={self.n_vocab}, eot={self.eot})"

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`. `<|endoftext|>` and its like are plain text unless `allow_special`. Half a surrogate pair becomes U+FFFD."""
        finder = self._find_any if allow_special else self._find_plain
        if finder is None:
            return list(self._encode_piece(text).tobytes()) if self.name == "bytes" else self.encoding.encode_ordinary(text)
        return list(map(int, self._encode_around(finder, text)))

    def encode_array(self, text: str) -> np.ndarray:
        """`encode(text)` as an array (uint8 for 'bytes', else uint32), without the list between; other threads may run meanwhile."""
        return self._encode_piece(text) if self._find_plain is None else self._encode_around(self._find_plain, text)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. Raises InputError for an id outside the vocabulary."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The exact bytes of `ids`. Raises InputError for an id outside the vocabulary."""
        array = np.asarray(ids)
        if array.size == 0:
            return b""
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InputError(f"token ids must be one sequence of whole numbers, not shape {array.shape} of {array.dtype}")
        if array.min() < 0 or array.max() >= self.n_vocab:
            wrong = array[(array < 0) | (array >= self.n_vocab)][0]
            raise InputError(f"token id {wrong} is outside the vocabulary of {self.n_vocab} ids (0 to {self.n_vocab - 1})")
        try:
            return self.encoding.decode_bytes(array.tolist())
        except KeyError:
            known = {*self._ranks.values(), *self._specials.values()}
            wrong = next(int(i) for i in array if int(i) not in known)
            raise InputError(f"token id {wrong} stands for no token: it is a gap in the vocabulary") from None

    def token_bytes(self) -> np.ndarray:
        """int32 [n_vocab]: the bytes of text that each id stands for; 0 for special tokens and for ids that are no token."""
        sizes = np.zeros(self.n_vocab, np.int32)
        sizes[list(self._ranks.values())] = [len(token) for token in self._ranks]
        for text, token in self._specials.items():
            sizes[token] = 0 if self._added.get(text, True) else len(text.encode())
        return sizes

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that decides which ids a text gets: pattern, tokens with their ids, special tokens, end of text. Not of the name."""
        digest = hashlib.sha256(GPT2_PATTERN.encode())
        for token, number in sorted(self._ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %s\n" % (number, token.hex().encode()))
        digest.update(json.dumps([sorted(self._specials.items()), sorted(self._added.items()), self.eot]).encode())
        return digest.hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write what `load_tokenizer(folder)` reads back equal: for 'hf' the Hugging Face files too."""
        folder = _made(folder)
        if self.name not in _BUILT_IN:
            self.save_hf(folder)
        marker = dict(format="gpt2jax tokenizer", version=1, name=self.name, n_vocab=self.n_vocab, eot=self.eot, fingerprint=self.fingerprint)
        _write(folder / MARKER, json.dumps(marker, indent=2) + "\n")

    def save_hf(self, folder: str | Path) -> None:
        """Write vocab.json, merges.txt and tokenizer_config.json as transformers' GPT-2 tokenizer reads them (GPT-2's own: byte for byte OpenAI's files)."""
        if self.name == "bytes":
            raise InputError("the bytes tokenizer has no Hugging Face form: GPT-2's tokenizer class numbers the 256 bytes in another order")
        folder = _made(folder)
        symbols = {number: _to_symbols(token) for token, number in self._ranks.items()} | {number: text for text, number in self._specials.items()}
        vocab = {symbols[number]: number for number in sorted(symbols)}
        if len(vocab) != len(symbols):
            raise InputError("two tokens of this vocabulary are written the same in vocab.json; it cannot be saved in Hugging Face's form")
        _write(folder / "vocab.json", json.dumps(vocab))
        _write(folder / "merges.txt", _merges_text(self._ranks))
        numbers = {**self._specials, **{text: self._ranks[text.encode()] for text in self._added if text not in self._specials}}
        flags = dict(lstrip=False, normalized=False, rstrip=False, single_word=False)
        config: dict[str, Any] = dict(tokenizer_class="GPT2Tokenizer", add_prefix_space=False, add_bos_token=False, model_max_length=1024)
        config["added_tokens_decoder"] = {str(numbers[text]): dict(content=text, **flags, special=special) for text, special in self._added.items()}
        if self.eot is not None:
            config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), symbols[self.eot])
        _write(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")

    def _encode_piece(self, text: str) -> np.ndarray:
        try:
            if self.name == "bytes":
                return np.frombuffer(text.encode(), np.uint8)
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._encode_piece(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def _encode_around(self, finder: re.Pattern[str] | None, text: str) -> np.ndarray:
        if finder is None:
            return self._encode_piece(text)
        # as in Hugging Face's: the longest added token wins, and what stands between two of them is split into words on its own
        parts, start = [], 0
        for found in finder.finditer(text):
            number = self._specials.get(found[0])
            number = self._ranks[found[0].encode()] if number is None else number
            parts += [self._encode_piece(text[start : found.start()]), np.array([number], np.uint32)]
            start = found.end()
        return np.concatenate([*parts, self._encode_piece(text[start:])])


def load_tokenizer(source: str | Path) -> Tokenizer:
    """'gpt2', 'bytes', or a folder: one written by `Tokenizer.save`, or Hugging Face's (tokenizer.json, or vocab.json + merges.txt).

    Raises InputError where the folder has no tokenizer, a damaged one, or one that GPT-2's scheme cannot reproduce id for id.
    """
    if str(source) in _BUILT_IN:
        return _built_in(str(source))
    folder = Path(source)
    if not folder.is_dir():
        raise InputError(f"tokenizer {str(source)!r} is neither gpt2 nor bytes nor a folder that exists")
    if not (folder / MARKER).is_file():
        return _from_hugging_face(folder)
    marker = _read_json(folder / MARKER)
    if marker.get("format") != "gpt2jax tokenizer" or marker.get("version") != 1 or "name" not in marker:
        raise InputError(f"{folder / MARKER}: not a tokenizer marker of version 1, which is what this version of gpt2jax reads")
    tokenizer = _built_in(marker["name"]) if marker["name"] in _BUILT_IN else _from_hugging_face(folder)
    found, saved = tokenizer.fingerprint, str(marker.get("fingerprint"))
    if found != saved:
        raise InputError(f"{folder}: the tokenizer files are not those that were saved (fingerprint {found[:12]}, not {saved[:12]}); restore the folder")
    return tokenizer


_BUILT_IN = ("gpt2", "bytes")


@lru_cache
def _built_in(name: str) -> Tokenizer:
    if name == "bytes":
        return Tokenizer(name, {bytes([byte]): byte for byte in range(256)}, {END_OF_TEXT: 256}, eot=256)
    return Tokenizer(name, _gpt2_ranks(), {END_OF_TEXT: 50256}, eot=50256)


@lru_cache
def _gpt2_ranks() -> dict[bytes, int]:
    text = vocab_bpe()
    ranks = {bytes([byte]): number for number, byte in enumerate(_BYTE_OF.values())}
    for merge in text.split("\n")[1:-1]:
        ranks[_to_bytes(merge.replace(" ", ""))] = len(ranks)
    return ranks


def vocab_bpe() -> str:
    """GPT-2's merge table (OpenAI's vocab.bpe), from the package; its checksum is verified."""
    data = (resources.files("gpt2jax") / "assets" / "vocab.bpe").read_bytes()
    if hashlib.sha256(data).hexdigest() != _VOCAB_SHA256:
        raise InputError("the installed gpt2jax/assets/vocab.bpe is not GPT-2's (its sha256 differs); install gpt2jax again")
    return data.decode()


def _byte_symbols() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, in the order of its first 256 ids (openai/gpt-2 `src/encoder.py`, bytes_to_unicode)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + place): byte for place, byte in enumerate(others)}}


_BYTE_OF = _byte_symbols()
_SYMBOL_OF = {byte: symbol for symbol, byte in _BYTE_OF.items()}


def _to_bytes(symbols: str) -> bytes:
    return bytes(map(_BYTE_OF.__getitem__, symbols))


def _to_symbols(token: bytes) -> str:
    return "".join(map(_SYMBOL_OF.__getitem__, token))


def _from_hugging_face(folder: Path) -> Tokenizer:
    whole, vocab_file, merges_file = folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt"
    if not whole.is_file() and not (vocab_file.is_file() and merges_file.is_file()):
        raise InputError(f"{folder} has no tokenizer: it needs tokenizer.json, or vocab.json and merges.txt, or {MARKER}; name a tokenizer instead, as in gpt2")
    where = whole if whole.is_file() else vocab_file
    settings = {**_read_optional(folder / "special_tokens_map.json"), **_read_optional(folder / "tokenizer_config.json")}
    if settings.get("add_prefix_space"):
        raise InputError(f"{folder}: tokenizer_config.json asks for add_prefix_space, which gpt2jax does not do")
    try:
        if whole.is_file():
            tree = _read_json(whole)
            _check_scheme(whole, tree)
            vocab, merges, added = tree["model"]["vocab"], tree["model"]["merges"], list(tree.get("added_tokens") or [])
        else:
            vocab = _read_json(vocab_file)
            merges = [line.rstrip("\r") for line in _read_text(merges_file).split("\n")]
            merges = [line for place, line in enumerate(merges) if line and not (place == 0 and line.startswith("#version"))]
            added = [{"id": int(number), **token} for number, token in settings.get("added_tokens_decoder", {}).items()]
            listed, special = {token["content"] for token in added}, _special_texts(settings)
            extra = _read_optional(folder / "added_tokens.json")
            added += [{"id": number, "content": text, "special": text in special} for text, number in extra.items() if text not in listed]
        if not all(type(number) is int and number >= 0 for number in [*vocab.values(), *(token["id"] for token in added)]):
            raise InputError(f"{where}: token ids must be whole numbers from 0")
        ranks = _checked_ranks(where, vocab, [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges])
        return _with_added(where, vocab, ranks, added, _content(settings.get("eos_token")))
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{where}: the tokenizer cannot be read: {type(error).__name__} {error}") from None


def _check_scheme(where: Path, tree: dict[str, Any]) -> None:
    """Refuse a tokenizer.json that is anything but GPT-2's: byte-level BPE, split by GPT-2's pattern, the text left as it is."""
    model, before = tree.get("model") or {}, tree.get("pre_tokenizer") or {}
    if before.get("type") == "Sequence" and len(before.get("pretokenizers", [])) == 1:
        before = before["pretokenizers"][0]
    odd = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback") if model.get(key)]
    problem = (
        f"its model is {model.get('type')}, not BPE" if model.get("type", "BPE") != "BPE" or "merges" not in model
        else f"its pre-tokenizer is {before.get('type')}, not ByteLevel" if before.get("type") != "ByteLevel" or not before.get("use_regex", True)
        else "it puts a space before the text (add_prefix_space)" if before.get("add_prefix_space", True)
        else "it normalises the text" if tree.get("normalizer")
        else f"it uses {odd[0]}" if odd else None
    )  # fmt: skip
    if problem:
        raise InputError(f"{where}: not a GPT-2 tokenizer: {problem}")


def _checked_ranks(where: Path, vocab: dict[str, int], pairs: list[tuple[str, ...]]) -> dict[bytes, int]:
    """Bytes -> id of each BPE token, where tiktoken's merging by id provably gives the ids of merging by pair; else InputError."""
    missing = [symbol for symbol in _BYTE_OF if symbol not in vocab]
    if missing:
        raise InputError(f"{where}: not a byte-level vocabulary: {len(missing)} of the 256 byte symbols are missing, {missing[0]!r} for one")
    ranks = {bytes([byte]): vocab[symbol] for symbol, byte in _BYTE_OF.items()}
    last, parts = -1, {}
    for pair in pairs:
        if len(pair) != 2 or pair[0] + pair[1] not in vocab:
            raise InputError(f"{where}: merge {' '.join(pair)!r} does not make a token of the vocabulary")
        left, right, number = _to_bytes(pair[0]), _to_bytes(pair[1]), vocab[pair[0] + pair[1]]
        if left not in ranks or right not in ranks or number <= last:
            why = "its id is not above the merge's before it" if number <= last else "one of its halves is not made by an earlier merge"
            raise InputError(f"{where}: merge {' '.join(pair)!r} cannot be followed: {why}; gpt2jax reads vocabularies whose ids rise with their merges")
        ranks[left + right], parts[left + right], last = number, [left, right], number
    if ranks != _gpt2_ranks():
        # Merging never crosses a finished token's edge, so it is enough that each token, alone, is put together from the two halves its merge names.
        for token, number in ranks.items():
            if len(token) > 1 and _split(token, ranks, number) != parts[token]:
                raise InputError(f"{where}: token {_to_symbols(token)!r} is not reached through the merge that names it; gpt2jax cannot reproduce this order")
    return ranks


def _with_added(where: Path, vocab: dict[str, int], ranks: dict[bytes, int], added: list[dict[str, Any]], eot_text: str | None) -> Tokenizer:
    bpe = {_to_symbols(token) for token in ranks}
    specials = {_orphan_text(symbols): number for symbols, number in vocab.items() if symbols not in bpe}
    matched: dict[str, bool] = {}
    for token in added:
        text, number = token["content"], token["id"]
        if vocab.get(text, number) != number:
            raise InputError(f"{where}: added token {text!r} has id {number}, but the vocabulary gives it {vocab[text]}")
        flags = [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]
        if flags or (not token.get("special") and re.search(r"\s", text)):
            raise InputError(f"{where}: added token {text!r} {'sets ' + flags[0] if flags else 'holds white space'}, which gpt2jax cannot follow")
        matched[text] = bool(token.get("special"))
        if ranks.get(text.encode()) != number:
            specials[text] = number
    if END_OF_TEXT in specials:
        matched.setdefault(END_OF_TEXT, True)
    numbers = [*ranks.values(), *specials.values()]
    if len(set(numbers)) != len(numbers):
        twice = next(number for number in sorted(numbers) if numbers.count(number) > 1)
        raise InputError(f"{where}: id {twice} belongs to two tokens")
    eot_text = eot_text if eot_text in specials else END_OF_TEXT
    return Tokenizer("hf", ranks, specials, eot=specials.get(eot_text), added=matched)


def _orphan_text(symbols: str) -> str:
    """The text of a token that no merge makes: written in byte symbols if all of it can be, else as it stands."""
    try:
        return symbols if symbols.isascii() else _to_bytes(symbols).decode()
    except (KeyError, UnicodeDecodeError):
        return symbols


def _special_texts(settings: dict[str, Any]) -> set[str | None]:
    """The tokens that special_tokens_map.json or tokenizer_config.json give a role."""
    more = settings.get("additional_special_tokens") or []
    return {_content(token) for key, token in settings.items() if key.endswith("_token")} | {_content(token) for token in more}


def _content(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _split(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """The parts of `token` after all merges whose id is below `limit`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        best, place = min((ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1))
        if best >= limit:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _merges_text(ranks: dict[bytes, int]) -> str:
    if ranks == _gpt2_ranks():
        return vocab_bpe()
    merged = [(token, number) for token, number in sorted(ranks.items(), key=lambda item: item[1]) if len(token) > 1]
    return "\n".join([_HEADER, *(" ".join(map(_to_symbols, _split(token, ranks, number))) for token, number in merged), ""])


def _finder(texts: Any) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _rebuild(name: str, ranks: dict[bytes, int], specials: dict[str, int], eot: int | None, added: dict[str, bool]) -> Tokenizer:
    return Tokenizer(name, ranks, specials, eot=eot, added=added)


def _made(folder: str | Path) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(text.encode())
    partial.replace(path)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None


def _read_optional(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: must hold a JSON object")
    return tree
