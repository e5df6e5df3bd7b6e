"""Meetings end: with all ranks, without some, and where the store keeps too much or nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from pacecar.profiler.transport.store_rendezvous import RendezvousError, meet


def both(store: object, *, claims: tuple[str, str] = ("a", "a"), name: str = "0") -> list[str]:
    """Return what became of a meeting for each of two ranks."""
    ends = ["", ""]

    def come(rank: int) -> None:
        try:
            meet(store, rank, 2, claims[rank], name=name, seconds=2.0)
            ends[rank] = "met"
        except RendezvousError as error:
            ends[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return ends


def test_ranks_that_want_the_same_meet_and_others_do_not() -> None:
    store = dist.HashStore()
    assert both(store) == ["met", "met"]
    assert both(store, claims=("a", "b"), name="1") == ["rank 1 has b, rank 0 has a"] * 2


def test_the_verdict_of_a_life_before_is_not_this_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # torchrun's agent keeps its store while it starts workers anew
    assert both(store) == ["met", "met"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(RendezvousError, match="ranks \\[1\\] did not attach"):
        meet(store, 0, 2, "a", name="0", seconds=0.1)


def test_a_store_that_forgets_ends_the_meeting(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    store.set("long ago", "x" * 4096)
    store.get("long ago")
    (tmp_path / "store").unlink()
    with pytest.raises(RendezvousError, match="forgets"):
        meet(store, 1, 2, "a", name="0", seconds=0.1)
