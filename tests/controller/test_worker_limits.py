"""Objects that processes must not share are found in a dataset, and room is computed from this machine."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pacecar.controller.knobs.dataloader.worker_limits import (
    WALK_BYTES_MAX,
    WorkerRoom,
    entangled,
    read_room,
    workers_max,
)


class Holds:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


class Hides(Holds):
    """Omits its handle when pickled, as datasets made for `spawn` do; fork shares it all the same."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[Any]:
    with (tmp_path / "data.bin").open("w+b") as file:
        yield file


def test_an_open_file_is_found_wherever_it_is(handle: Any) -> None:
    for holder in (Holds(handle), Hides(handle), Holds([{"deep": Holds(handle)}]), lambda: handle):
        assert "BufferedRandom" in str(entangled(holder))


@pytest.mark.parametrize("thing", [threading.Lock(), (n for n in range(3))])
def test_what_belongs_to_this_process_is_found(thing: Any) -> None:
    assert "must not share" in str(entangled(Holds(thing)))


def test_a_database_is_found() -> None:
    connection = sqlite3.connect(":memory:")
    try:
        assert "sqlite3" in str(entangled(Hides(connection)))
    finally:
        connection.close()


def test_a_tensor_on_another_device_is_found() -> None:
    assert "meta" in str(entangled(Holds(torch.empty(2, device="meta"))))


def test_what_can_be_shared_is_no_reason_to_refuse() -> None:
    harmless = [torch.zeros(1000, 1000), "text", {1: 2.0}, Holds(Path("x")), lambda x: x + 1, torch.Generator(), Holds]
    assert entangled(Holds(harmless), len) is None


def test_a_dataset_too_large_to_be_looked_through_is_unknown_and_not_harmless() -> None:
    assert "too large" in str(entangled(Holds(["x" * 1000 + str(i) for i in range(WALK_BYTES_MAX // 1000)])))


def test_room_is_read_from_the_machine_and_zero_is_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  5 kB\n")
    (tmp_path / "proc/7/smaps_rollup").write_text("Rss: 99 kB\nPrivate_Clean: 1 kB\nPrivate_Dirty: 2 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("4096\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("4096\n")
    room = read_room((7, 8), environ={"LOCAL_WORLD_SIZE": "4"}, root=tmp_path, shm=str(tmp_path / "none"))
    assert (room.memory_bytes, room.worker_bytes, room.shared_bytes, room.ranks) == (0, 3072, None, 4)
    assert workers_max(room, present=3, prefetch=2, batch_bytes=None) == 3
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert read_room((), environ={}, root=tmp_path).memory_bytes == 5 * 1024
    empty = read_room((), environ={"LOCAL_WORLD_SIZE": "x"}, root=tmp_path / "nothing", shm=str(tmp_path / "none"))
    assert (empty.memory_bytes, empty.worker_bytes, empty.shared_bytes, empty.ranks) == (None, None, None, 1)


def test_without_a_figure_cores_alone_bound_the_workers() -> None:
    assert workers_max(WorkerRoom(16, None, None, None, ranks=8), present=1, prefetch=2, batch_bytes=10) == 4
    assert workers_max(WorkerRoom(64, None, None, None, ranks=8), present=1, prefetch=2, batch_bytes=10) == 16
