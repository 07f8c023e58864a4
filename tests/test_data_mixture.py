"""gpt2jax.data.mixture, and batches of several sources: exact shares, each source in its own order, the same on any number of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from gpt2jax.config import load_config, to_yaml
from gpt2jax.data import open_splits
from gpt2jax.data.batches import TokenData, TokenSource
from gpt2jax.data.mixture import place, shares
from gpt2jax.data.prepare import prepare
from gpt2jax.errors import InputError
from gpt2jax.tokenizer import load_tokenizer

T, B = 5, 8
WEIGHTS = (0.6, 0.3, 0.1)
SIZES = (41, 17, 30)  # windows of each source


def mixed(weights: Sequence[float] = WEIGHTS, sizes: Sequence[int] = SIZES, **changes: int) -> TokenData:
    """Sources whose window w begins with the token 1000 s + w, s being the source; the other tokens are 0."""
    sources = []
    for number, size in enumerate(sizes):
        tokens = np.zeros(size * T + 1, np.uint16)
        tokens[:-1:T] = 1000 * number + np.arange(size)
        sources.append(TokenSource([tokens[:13], tokens[13:]], 50257, f"{number}" * 64))
    return TokenData(sources, weights, **{"sequence_length": T, "batch_size": B, "seed": 3, **changes})


@pytest.mark.parametrize(
    ("weights", "whole"), [((0.7, 0.3), (7, 3)), ((1, 1), (1, 1)), ((2.5, 5), (1, 2)), ((1e-9, 1.0), (1, 10**9)), ((0.1, 0.2, 0.3), (1, 2, 3)), ((9.0,), (1,))]
)
def test_weights_are_taken_as_they_are_written(weights: tuple[float, ...], whole: tuple[int, ...]) -> None:
    assert shares(weights) == whole


@pytest.mark.parametrize("weights", [(), (0.0, 1.0), (-0.1, 1.0), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_weights_that_are_none_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="weight"):
        shares(weights)


@pytest.mark.parametrize("weights", [(0.7, 0.3), WEIGHTS, (1 / 3, 0.2, 0.5, 1e-3), (1, 1, 1), (0.001, 0.999), (1,)])
def test_rows_of_each_source_are_numbered_and_keep_to_its_share(weights: tuple[float, ...]) -> None:
    whole = shares(weights)
    counts = [0] * len(whole)
    for row in range(3000):
        source, number = place(row, whole)
        assert number == counts[source]
        counts[source] += 1
        assert all(abs(count - Fraction(share * (row + 1), sum(whole))) < len(whole) for count, share in zip(counts, whole, strict=True))
    assert sum(counts) == 3000


@pytest.mark.parametrize("start", [10**12, 10**18, 10**25])
def test_shares_do_not_drift_in_a_long_run(start: int) -> None:
    whole = shares((0.7, 0.2, 0.1))
    assert sum(whole) == 10
    counts = [sum(place(start + row, whole)[0] == source for row in range(10)) for source in range(3)]
    assert counts == [7, 2, 1]
    for source, share in enumerate(whole):
        numbers = [number for of, number in (place(start + row, whole) for row in range(10)) if of == source]
        assert numbers == list(range(start * share // 10, start * share // 10 + share))


def test_each_source_comes_in_an_order_of_its_own_without_repeats_within_its_epoch() -> None:
    data = mixed()
    begins = np.concatenate([data.batch(step)[0][:, 0] for step in range(60)])
    assert [int((begins // 1000 == source).sum()) for source in range(3)] == [288, 144, 48]
    for source, size in enumerate(SIZES):
        own = begins[begins // 1000 == source] % 1000
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
        assert own[:size].tolist() != sorted(own[:size])
    alike = mixed((1, 1), (20, 20))
    begins = np.concatenate([alike.batch(step)[0][:, 0] for step in range(5)])
    assert begins[begins < 1000].tolist() != (begins[begins >= 1000] - 1000).tolist()


def test_a_lone_source_reads_as_it_did_without_a_weight() -> None:
    one, alone = mixed((0.3,), SIZES[:1]), mixed((1,), SIZES[:1])
    assert one.fingerprint == alone.fingerprint == "0" * 64
    for step in (0, 9, 10**12):
        assert np.array_equal(one.batch(step)[0], alone.batch(step)[0])


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_one_global_batch(processes: int) -> None:
    whole, shares = mixed(), [mixed(process_index=process, process_count=processes) for process in range(processes)]
    for step in (0, 5, 6, 10**12):
        rows = [share.batch(step) for share in shares]
        asked = [whole.batch(step, slice(process * B // processes, (process + 1) * B // processes)) for process in range(processes)]
        for side in range(2):
            expected = whole.batch(step)[side]
            assert np.array_equal(np.concatenate([row[side] for row in rows]), expected)
            assert np.array_equal(np.concatenate([row[side] for row in asked]), expected)
    for parts in zip(*(share.eval_batches(21) for share in shares), whole.eval_batches(21), strict=True):
        for side in range(2):
            assert np.array_equal(np.concatenate([part[side] for part in parts[:-1]]), parts[-1][side])


def test_resuming_reads_the_same_batches() -> None:
    straight, resumed = mixed(), mixed()
    batches = [straight.batch(step) for step in range(40)]
    for step in range(39, 19, -1):
        for side in range(2):
            assert np.array_equal(resumed.batch(step)[side], batches[step][side])


def test_validation_takes_the_first_sequences_of_each_in_their_shares() -> None:
    batches = list(mixed(seed=99).eval_batches(20))
    begins = np.concatenate([inputs[:, 0] for inputs, _ in batches])
    real = np.concatenate([targets[:, 0] for _, targets in batches]) != -1
    assert len(batches) == 3 and real.tolist() == [True] * 20 + [False] * 4
    for source, count in enumerate((12, 6, 2)):
        assert begins[real & (begins // 1000 == source)].tolist() == [1000 * source + window for window in range(count)]


def test_validation_leaves_out_a_source_that_has_run_out() -> None:
    def begins(sequences: int) -> list[int]:
        batches = mixed((0.5, 0.5), (3, 40)).eval_batches(sequences)
        return [int(token) for inputs, targets in batches for token in inputs[targets[:, 0] != -1, 0]]

    assert sorted(begins(20)) == [0, 1, 2, *range(1000, 1010)]  # 3 of the 10 that are the first one's share
    assert sorted(begins(10**9)) == [0, 1, 2, *range(1000, 1040)]


def test_the_fingerprint_is_of_all_sources_and_weights() -> None:
    prints = {mixed(weights, sizes).fingerprint for weights, sizes in [(WEIGHTS, SIZES), ((0.6, 0.2, 0.2), SIZES), ((0.6, 0.3), SIZES[:2])]}
    assert len(prints) == 3
    assert mixed((6, 3, 1)).fingerprint == mixed(WEIGHTS, seed=4).fingerprint
    one, other, third = (TokenSource([np.arange(50)], 50257, name) for name in "abc")
    settings = {"sequence_length": T, "batch_size": B, "seed": 3}
    assert len({TokenData(sources, (1, 2), **settings).fingerprint for sources in [(one, other), (other, one), (one, third)]}) == 3


def test_a_mix_is_written_in_yaml_or_on_the_command_line(tmp_path: Path) -> None:
    config = load_config(None, ["--data.source={data/web: 0.7, python-stdlib: 3}"])
    assert config.data.source == {"data/web": 0.7, "python-stdlib": 3}
    (tmp_path / "a.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "a.yaml") == config
    assert load_config(tmp_path / "a.yaml", ["--data.source={other: 1}"]).data.source == {"other": 1}
    assert load_config(tmp_path / "a.yaml", ["--data.source=plain"]).data.source == "plain"
    for value, said in [("{a: x}", "data.source of a='x'.*valid number"), ("{a: 0}", "data.source of a=0.*greater than 0"), ("{a: 1, a: 2}", "twice")]:
        (tmp_path / "b.yaml").write_text(f"data: {{source: {value}}}")
        with pytest.raises(InputError, match=said):
            load_config(tmp_path / "b.yaml")


def test_sources_of_every_kind_are_mixed(prepared: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    (tmp_path / "a.txt").write_text("text of another source\n" * 40)
    np.full(400, 7, np.uint16).tofile(tmp_path / "train.bin")
    np.full(90, 7, np.uint16).tofile(tmp_path / "val.bin")
    mix = {str(prepared): 0.5, str(tmp_path / "a.txt"): 0.25, str(tmp_path / "train.bin"): 0.25}
    settings = {"sequence_length": 24, "batch_size": 8, "seed": 0, "cache_dir": tmp_path / "cache"}
    splits = open_splits(mix, tokenizer, **settings)
    inputs, _ = splits["train"].batch(0)
    assert (inputs == 7).all(1).sum() == 2
    alone = [open_splits(source, tokenizer, **settings)["train"] for source in mix]
    assert splits["train"].tokens == sum(data.tokens for data in alone)
    assert len({data.fingerprint for data in [splits["train"], *alone]}) == 4
    assert sum(int((targets != -1).any(1).sum()) for _, targets in splits["val"].eval_batches(8)) <= 8
    with pytest.raises(InputError, match="names none"):
        open_splits({}, tokenizer, **settings)
    with pytest.raises(InputError, match="nowhere"):
        open_splits({str(prepared): 1, "nowhere": 1}, tokenizer, **settings)


def test_sources_of_several_tokenizers_are_refused(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text of another source\n" * 40)
    prepare([str(tmp_path / "a.txt")], tmp_path / "gpt2", tokenizer=load_tokenizer("gpt2"), progress=False)
    with pytest.raises(InputError, match="prepared with the tokenizer gpt2 .*asks for bytes"):
        open_splits({str(prepared): 1, str(tmp_path / "gpt2"): 1}, load_tokenizer("bytes"), sequence_length=8, batch_size=4, seed=0)
