"""Columns beyond the room in memory lie in a file: the same arrays, few of their pages, and the same answers."""

from __future__ import annotations

import resource
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pacecar.analysis import shelf as shelves
from pacecar.analysis.shelf import Derived, Shelf, ShelfError
from pacecar.analysis.verdict import key_blocks
from tests.analysis.models import analyzed
from tests.kit.selection import decisive
from tests.kit.simulated_jobs import LOUD, Fault, FaultKind, Job, Layout, Model, simulate

MB = 2**20


class Pair(NamedTuple):
    left: NDArray[np.int64]
    right: str


@dataclass(frozen=True, slots=True)
class Record:
    numbers: NDArray[np.int64]
    flags: NDArray[np.bool_]
    small: NDArray[np.int64]
    pair: Pair
    by_kind: dict[int, tuple[NDArray[np.int32], NDArray[np.int64]]]
    words: tuple[str, ...] = ("a", "b")
    nothing: None = None


def record(seed: int) -> Record:
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 2**62, 3000)
    narrow = rng.integers(0, 2**30, (70, 41)).astype(np.int32)
    return Record(numbers, numbers % 3 == 0, numbers[:5], Pair(numbers, "x"), {1: (narrow, numbers[::2])})


def test_what_lies_in_the_file_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "ROOM_BYTES", 0)
    mine = record(1)
    kept = Shelf().put(mine)
    assert kept is not mine
    assert (kept.words, kept.pair.right, kept.nothing) == (mine.words, "x", None)
    assert kept.small is mine.small, "too small to be worth a page"
    assert kept.flags is mine.flags
    assert kept.pair.left is kept.numbers, "one array is written once"
    both = [(kept.numbers, mine.numbers), *zip(kept.by_kind[1], mine.by_kind[1], strict=True)]
    for found, given in both:
        assert found is not given
        assert (found.dtype, found.shape) == (given.dtype, given.shape)
        assert np.array_equal(found, given)
    with pytest.raises(ValueError, match="read-only"):
        kept.numbers[0] = 1


def test_only_what_exceeds_the_room_is_written_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "ROOM_BYTES", 2 * 50_000)
    shelf = Shelf()
    first, again = record(1), None
    for _ in range(5):
        again = shelf.put(first)
    assert again is first, "it was counted once"
    shelf.put(record(2))
    third = record(3)
    kept = shelf.put(third)
    assert kept is not third
    assert shelf.put(kept) is kept


@pytest.mark.slow
def test_the_pages_of_what_was_read_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "ROOM_BYTES", 0)
    kept = Shelf().keep(np.full(MB // 8, seed) for seed in range(200))
    before = _mapped_bytes()
    assert [int(each.sum()) for each in kept] == [seed * MB // 8 for seed in range(200)]
    assert [int(each[0]) for each in kept[190:]] == list(range(190, 200))
    assert _mapped_bytes() - before < 2 * shelves.PASSED_MAX * MB
    assert len(Derived(kept, len)) == 200
    assert Derived(kept, lambda each: int(each[0]))[198:] == [198, 199]


def _mapped_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_a_full_disk_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shelves, "ROOM_BYTES", 0)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shelf, limits = Shelf(), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MB, limits[1]))
        with pytest.raises(ShelfError, match=rf"{tmp_path}: no place .*: file too large \(TMPDIR names another"):
            shelf.put(np.zeros(MB))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    with pytest.raises(ShelfError, match=r"nowhere: no place .*: no such file or directory"):
        Shelf().put(np.zeros(MB))


JOBS = {
    "ddp with a slow rank": Job(Layout(data=8), faults=(Fault(FaultKind.SLOW_COMPUTE, (3,), 0.3),), seed=1),
    "loud fsdp": Job(Layout(data=8, is_sharded=True), noise=LOUD, seed=2),
    "stages": Job(Layout(pipeline=4, data=2), model=Model(microbatches=8), seed=4),
    "stages alone": Job(Layout(pipeline=4), model=Model(microbatches=4), seed=5),
    "gloo": Job(Layout(data=4), is_cpu=True, seed=7),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", decisive(JOBS, *(JOBS.keys() - {"stages"})))
def test_the_ranks_compare_the_same_from_the_file_and_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = simulate(JOBS[name]).traces()
    whole = msgspec.json.encode(analyzed(traces))
    monkeypatch.setattr(shelves, "ROOM_BYTES", 0)
    monkeypatch.setattr(shelves, "ARRAY_BYTES_MIN", 1)
    monkeypatch.setattr(shelves, "PASSED_MAX", 2)
    monkeypatch.setattr(key_blocks, "PIECES_MAX", 500)
    assert msgspec.json.encode(analyzed(traces)) == whole
