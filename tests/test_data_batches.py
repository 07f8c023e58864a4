"""gpt2jax.data.batches: the order of windows, and that a batch depends on (seed, step, process) alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from gpt2jax.data.batches import TokenData, open_data, permute
from gpt2jax.data.shards import Manifest, SplitInfo, write_manifest, write_shard
from gpt2jax.errors import InputError

T, B, PRINT = 7, 4, "cd" * 32
TOKENS = 7 * 29 + 1 + 3  # 29 whole windows and an end of 3 more tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A split whose token at place i is i, in shards of odd lengths: one shorter than a window, cuts inside windows and on their edges."""
    return _write(tmp_path, [7 * 3, 1, 2, 40, 5, TOKENS - 69])


def _write(folder: Path, lengths: list[int], **more: list[int]) -> Path:
    splits = {}
    for split, sizes in {"train": lengths, "val": [T * 2 + 4, T * 2 - 1], **more}.items():
        starts = np.cumsum([0, *sizes])
        shards = [
            write_shard(folder / f"{split}_{number:06d}.bin", np.arange(start, start + size), vocab_size=50257, fingerprint=PRINT)
            for number, (start, size) in enumerate(zip(starts[:-1], sizes, strict=True))
        ]
        splits[split] = SplitInfo(sum(sizes), 1, sum(sizes), tuple(shards))
    write_manifest(folder, Manifest("gpt2", PRINT, 50257, 50256, splits))
    return folder


def _open(folder: Path, split: str = "train", **changes: int) -> TokenData:
    settings = {"sequence_length": T, "batch_size": B, "seed": 11, **changes}
    return open_data(folder, split=split, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 1000, 4097, 65536, 100_003])
def test_permutation_is_a_bijection(n: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed=5, epoch=n % 3)), np.arange(n))


def test_permutation_never_changes() -> None:
    """A resumed run with another version of NumPy must read on where it was."""
    assert permute(np.arange(10), 10, seed=0).tolist() == [1, 3, 5, 0, 4, 2, 8, 6, 9, 7]
    assert permute(np.array([0, 1, 10**12 - 1]), 10**12, seed=2**70, epoch=3).tolist() == [111649839946, 936095234260, 544067554110]


def test_permutation_looks_random() -> None:
    n = 1000
    orders = np.array([permute(np.arange(n), n, seed, epoch) for seed in range(20) for epoch in range(10)])
    fixed = (orders == np.arange(n)).sum(1).mean()  # 1 on average, for random orders
    assert 0.7 < fixed < 1.3
    neighbours = (np.diff(orders, axis=1) == 1).sum(1).mean()  # also 1
    assert 0.7 < neighbours < 1.3
    assert abs(np.corrcoef(orders[0], np.arange(n))[0, 1]) < 0.1
    assert len({tuple(order) for order in orders}) == 200
    small = np.array([permute(np.arange(3), 3, seed) for seed in range(600)])
    counts = np.unique(small, axis=0, return_counts=True)[1]
    assert len(counts) == 6 and counts.min() > 60  # each of the 6 orders about 100 times


def test_the_order_of_a_run_never_changes(folder: Path) -> None:
    data = _open(folder)
    assert [(data.batch(step)[0][:, 0] // T).tolist() for step in (0, 7, 8)] == [[22, 24, 1, 6], [27, 7, 13, 16], [28, 18, 9, 5]]


def test_the_last_token_of_a_split_has_nothing_to_predict(tmp_path: Path) -> None:
    assert _open(_write(tmp_path, [3 * T])).windows == 2
    assert _open(_write(tmp_path, [3 * T + 1])).windows == 3


def test_shapes_and_shift(folder: Path) -> None:
    data = _open(folder)
    assert (data.windows, data.tokens, data.vocab_size, len(data.fingerprint)) == (29, TOKENS, 50257, 64)
    for step in range(20):
        inputs, targets = data.batch(step)
        assert inputs.shape == targets.shape == (B, T) and inputs.dtype == targets.dtype == np.int32
        assert inputs.flags.c_contiguous and targets.flags.c_contiguous
        assert (targets == inputs + 1).all()  # across every shard's edge
        assert (np.diff(inputs, axis=1) == 1).all() and (inputs[:, 0] % T == 0).all()


def test_no_repeats_within_an_epoch_and_another_order_in_the_next(folder: Path) -> None:
    data = _open(folder)
    starts = np.concatenate([data.batch(step)[0][:, 0] for step in range(3 * 29)])[: 3 * 29].reshape(3, 29)  # 29 windows: epochs end inside batches
    for epoch in starts:
        assert sorted(epoch) == [T * window for window in range(29)]
    assert not np.array_equal(starts[0], starts[1]) and not np.array_equal(starts[1], starts[2])
    assert not np.array_equal(starts[0], np.sort(starts[0]))


def test_another_seed_is_another_order(folder: Path) -> None:
    assert not np.array_equal(_open(folder).batch(0)[0], _open(folder, seed=12).batch(0)[0])


def test_resuming_reads_the_same_batches(folder: Path) -> None:
    def digest(data: TokenData, steps: range) -> list[str]:
        return [hashlib.sha256(b"".join(part.tobytes() for part in data.batch(step))).hexdigest() for step in steps]

    straight = digest(_open(folder), range(100))
    resumed = _open(folder)
    assert digest(_open(folder), range(50)) + digest(resumed, range(50, 100)) == straight
    assert digest(resumed, range(49, -1, -1)) == straight[49::-1]  # nor does the order of calls matter
    assert len(set(straight)) == 100


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_one_global_batch(processes: int, folder: Path) -> None:
    whole = _open(folder)
    shares = [_open(folder, process_index=process, process_count=processes) for process in range(processes)]
    for step in (0, 6, 7, 8, 40):
        rows = [share.batch(step) for share in shares]
        assert all(inputs.shape == (B // processes, T) for inputs, _ in rows)
        for side in range(2):
            assert np.array_equal(np.concatenate([row[side] for row in rows]), whole.batch(step)[side])
    for parts in zip(*(share.eval_batches(11) for share in shares), whole.eval_batches(11), strict=True):
        assert np.array_equal(np.concatenate([inputs for inputs, _ in parts[:-1]]), parts[-1][0])
        assert np.array_equal(np.concatenate([targets for _, targets in parts[:-1]]), parts[-1][1])


def test_one_window_makes_every_row(tmp_path: Path) -> None:
    data = _open(_write(tmp_path, [T + 1]))
    assert data.windows == 1
    assert (data.batch(3)[0] == np.arange(T)).all()


def test_evaluation_reads_windows_in_order_and_pads_the_last_batch(folder: Path) -> None:
    batches = list(_open(folder, seed=99).eval_batches(6))
    assert [inputs.shape for inputs, _ in batches] == [(B, T), (B, T)]
    inputs, targets = (np.concatenate(side) for side in zip(*batches, strict=True))
    assert (inputs[:6].ravel() == np.arange(6 * T)).all() and (targets[:6].ravel() == np.arange(1, 6 * T + 1)).all()
    assert (targets[6:] == -1).all() and inputs.min() >= 0


def test_evaluation_of_the_whole_split_predicts_each_token_once(folder: Path) -> None:
    for split, tokens in [("train", TOKENS), ("val", 4 * T + 3)]:
        targets = np.concatenate([targets.ravel() for _, targets in _open(folder, split).eval_batches(10**6)])
        assert targets[targets != -1].tolist() == list(range(1, tokens))
        inputs = np.concatenate([inputs.ravel() for inputs, _ in _open(folder, split).eval_batches(10**6)])
        assert (inputs[targets != -1] == targets[targets != -1] - 1).all()


def test_a_split_too_short_for_a_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"train holds {T} tokens, and sequences of {T} need {T + 1}"):
        _open(_write(tmp_path, [T]))


def test_a_short_validation_split_can_still_be_read_with_padding(tmp_path: Path) -> None:
    data = _open(_write(tmp_path, [50], val=[3]), "val")
    [(inputs, targets)] = data.eval_batches(5)
    assert targets[0].tolist() == [1, 2] + [-1] * 5 and (targets[1:] == -1).all() and data.windows == 0
    with pytest.raises(InputError, match="3 tokens"):
        data.batch(0)
    with pytest.raises(InputError, match="val holds 1 tokens.*val_fraction"):
        _open(_write(tmp_path, [50], val=[1]), "val")
    with pytest.raises(InputError, match="val holds 0 tokens"):
        _open(_write(tmp_path, [50], val=[]), "val")


def test_bad_settings_are_refused(folder: Path) -> None:
    for changes, said in [
        ({"process_count": 3}, "batch size 4 cannot be shared evenly by 3"),
        ({"process_count": 2, "process_index": 2}, "process 2 is not one of 2"),
        ({"batch_size": 0}, "1 or more"),
        ({"sequence_length": 0}, "1 or more"),
    ]:
        with pytest.raises(InputError, match=said):
            _open(folder, **changes)
    with pytest.raises(InputError, match="no split 'test'; it has train, val"):
        _open(folder, "test")
    with pytest.raises(InputError, match="step -1"):
        _open(folder).batch(-1)


def test_a_damaged_shard_is_named(folder: Path) -> None:
    path = folder / "train_000003.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="train_000003.bin.*damaged"):
        _open(folder)
    open_data(folder, split="train", sequence_length=T, batch_size=B, seed=0, verify=False)


def test_batches_are_read_without_loading_the_shards(folder: Path) -> None:
    assert all(not shard.flags.owndata for source in _open(folder)._sources for shard in source._shards)


def test_large_steps_do_not_overflow(folder: Path) -> None:
    inputs, _ = _open(folder, batch_size=512).batch(10**13)
    assert inputs.shape == (512, T) and len(np.unique(inputs[:, 0])) == 29
