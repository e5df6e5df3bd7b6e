"""The knob store loses nothing with concurrent writers, and leaves other files in its place alone."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pacecar.controller.memory import knob_store
from pacecar.controller.memory.knob_store import (
    ENTRIES_MAX,
    Fingerprint,
    KnobsFileError,
    KnobStore,
    StoredKnobs,
    default_place,
    forgotten,
    remembered,
    stale,
    used,
)
from pacecar.controller.memory.store_thread import JobMemory, StoreThread, store_thread_for
from tests.kit.fake_clock import FakeClock
from tests.kit.records import job_hello

KIND = Fingerprint(
    parameters="f00d", elements=42_000_000, world_size=4, device="cpu", backend="gloo", link="ethernet 10 Gb/s",
    torch="2.13", began={"bucket_bytes": 26214400},
)  # fmt: skip


def entry(number: int = 0, **changes: Any) -> StoredKnobs:
    kind = msgspec.structs.replace(KIND, parameters=f"{number:x}")
    given: dict[str, Any] = {
        "key": kind.key, "fingerprint": kind, "knobs": {"bucket_bytes": 2**20 + number}, "gain_ratio": 0.12,
        "pace_ns": 90_000_000, "steps": 500, "saved_wall_ns": 10**18 + number, "used_wall_ns": 10**18 + number,
        "job": "gpt", "pacecar_version": "0.1.0",
    }  # fmt: skip
    return StoredKnobs(**given | changes)


def put(file: KnobStore, *entries: StoredKnobs) -> str | None:
    told = None
    for one in entries:
        told = file.change(lambda others, one=one: remembered(others, one)) or told  # type: ignore[misc]
    return told


@pytest.fixture
def file(tmp_path: Path) -> KnobStore:
    return KnobStore(tmp_path / "state" / "pacecar" / "knobs.json", is_ours=True)


def test_what_is_written_is_read_and_the_file_is_its_users_alone(file: KnobStore) -> None:
    assert file.read() == ()
    put(file, entry(1), entry(2))
    assert file.read() == (entry(1), entry(2))
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads(file.path.read_text())["format"] == "pacecar knobs"
    assert sorted(p.name for p in file.path.parent.iterdir()) == ["knobs.json", "knobs.json.lock"]


def test_a_key_depends_on_everything_that_the_best_knobs_depend_on() -> None:
    others = [
        msgspec.structs.replace(KIND, **{name: value})
        for name, value in {
            "parameters": "beef", "world_size": 8, "device": "NVIDIA H200", "backend": "nccl", "link": "local",
            "torch": "2.14", "began": {"bucket_bytes": 1},
        }.items()
    ]  # fmt: skip
    assert len({kind.key for kind in [KIND, *others]}) == 1 + len(others)
    again = msgspec.structs.replace(KIND, began=dict(reversed(list({"a": 1, "b": 2}.items()))))
    assert again.key == msgspec.structs.replace(KIND, began={"a": 1, "b": 2}).key


WRITER = """
    import sys
    from pathlib import Path
    from pacecar.controller.memory.knob_store import KnobStore, remembered
    from tests.controller.test_knob_store import entry
    file = KnobStore(Path(sys.argv[1]), is_ours=True)
    sys.stdin.readline()
    for number in range(int(sys.argv[2]), int(sys.argv[2]) + 40):
        file.change(lambda others: remembered(others, entry(number)))
"""


@pytest.mark.slow
def test_two_processes_that_write_at_the_same_time_lose_nothing_and_a_reader_sees_whole_files(file: KnobStore) -> None:
    code = textwrap.dedent(WRITER)
    root = str(Path(__file__).parents[2])
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(file.path), str(first)],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root},
        )
        for first in (0, 100)
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    while any(writer.poll() is None for writer in writers):
        file.read()  # raises at half a file
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == 0, errors
    assert {e.key: e for e in file.read()} == {
        entry(number).key: entry(number) for first in (0, 100) for number in range(first, first + 40)
    }


def test_entries_are_bounded_and_the_one_used_longest_ago_goes(file: KnobStore) -> None:
    file.change(lambda _: [entry(number) for number in range(ENTRIES_MAX)])
    file.change(lambda entries: used(entries, entry(0), 2 * 10**18))
    put(file, entry(ENTRIES_MAX))
    left = {e.key for e in file.read()}
    assert len(left) == ENTRIES_MAX
    assert entry(1).key not in left
    assert {entry(0).key, entry(ENTRIES_MAX).key} <= left


def test_an_entry_that_did_not_hold_is_marked_unless_something_newer_is_known() -> None:
    old, new = entry(1), entry(1, saved_wall_ns=2 * 10**18)
    assert stale([old, entry(2)], old, "slower")[0].stale == "slower"
    assert stale([old, entry(2)], old, "slower")[1].stale is None
    assert stale([new], old, "slower") == [new]
    assert remembered(stale([old], old, "slower"), new) == [new]


def test_forgetting_goes_by_the_beginning_of_a_key() -> None:
    assert forgotten([entry(1), entry(2)], [entry(1).key[:6]]) == [entry(2)]


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        (b"{", "damaged"),
        (b'{"format": "pacecar knobs", "version": 1, "entries": [{"key": 1}]}', "damaged"),
        (b"\xff\xfe not text", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b'{"format": "pacecar knobs", "version": 7, "entries": "of the future"}', "version-7"),
    ],
)
def test_what_cannot_be_read_is_moved_aside_and_never_lost(file: KnobStore, text: bytes, suffix: str) -> None:
    file.path.parent.mkdir(parents=True)
    for number in (1, 2):
        file.path.write_bytes(text)
        told = put(file, entry(number))
        aside = file.path.with_name(f"knobs.json.{suffix}" + ("" if number == 1 else "-2"))
        assert aside.read_bytes() == text
        assert told is not None
        assert str(aside) in told
        assert file.read() == (entry(number),)


@pytest.mark.parametrize("text", [b"a user's own notes", b'{"other": "json"}', b"x" * (knob_store.FILE_BYTES_MAX + 1)])
def test_a_wrong_path_in_the_configuration_costs_nobody_his_file(tmp_path: Path, text: bytes) -> None:
    mine = tmp_path / "notes"
    mine.write_bytes(text)
    with pytest.raises(KnobsFileError, match="left alone"):
        put(KnobStore(mine, is_ours=False), entry())
    assert mine.read_bytes() == text
    assert os.listdir(tmp_path) == ["notes"]


def test_pipes_and_folders_in_its_place_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ""):
        with pytest.raises(KnobsFileError):
            KnobStore(tmp_path / name, is_ours=True).read()


def test_a_link_stays_a_link_and_the_files_mode_stays_its_mode(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_bytes(b"")
    real.chmod(0o640)
    link.symlink_to(real)
    put(KnobStore(link, is_ours=False), entry())
    assert link.is_symlink()
    assert KnobStore(real, is_ours=False).read() == (entry(),)
    assert real.stat().st_mode & 0o777 == 0o640


def test_a_lock_that_is_never_let_go_is_waited_for_no_longer_than_stated(
    file: KnobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(file, entry(1))
    monkeypatch.setattr(knob_store, "LOCK_SECONDS_MAX", 0.05)
    with file.path.with_name("knobs.json.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(KnobsFileError, match=r"held by another job for 0\.05 s"):
            put(file, entry(2))
    put(file, entry(2))
    assert len(file.read()) == 2


def test_a_disk_that_is_full_leaves_the_old_file_and_no_draft(file: KnobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(file, entry(1))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KnobsFileError, match="No space left"):
        put(file, entry(2))
    assert file.read() == (entry(1),)
    assert sorted(os.listdir(file.path.parent)) == ["knobs.json", "knobs.json.lock"]


def test_the_place_is_the_users_state_folder_and_none_for_a_user_without_home(tmp_path: Path) -> None:
    home, state = {"HOME": str(tmp_path)}, {"XDG_STATE_HOME": "/state"}
    assert default_place(home | state) == Path("/state/pacecar/knobs.json")
    assert default_place(home) == tmp_path / ".local/state/pacecar/knobs.json"
    assert default_place(home | {"XDG_STATE_HOME": "not/absolute"}) == tmp_path / ".local/state/pacecar/knobs.json"
    for environ in ({}, {"HOME": "/"}, {"HOME": "/nonexistent"}, {"HOME": ""}):
        assert default_place(environ) is None


# --- the keeper ---


def job_memory(keeper: StoreThread, clock: FakeClock) -> JobMemory:
    return JobMemory(keeper, msgspec.structs.replace(KIND, began={}), job_hello(job="gpt", world_size=4), clock)


def settled(keeper: StoreThread) -> None:
    done = threading.Event()
    keeper.put(lambda entries: (done.set(), entries)[1])  # type: ignore[func-returns-value]
    assert done.wait(10)


def test_one_run_keeps_and_the_next_recalls_until_it_is_doubted(file: KnobStore) -> None:
    began = {"bucket_bytes": 26214400}
    clock = FakeClock(wall_ns=10**18)
    first = StoreThread(file)
    first.start()
    settled(first)
    assert job_memory(first, clock).recall(began) is None
    run = job_memory(first, clock)
    run.recall(began)
    run.keep({"bucket_bytes": 2**20}, 0.2, 1000, 77)
    first.close()
    second = StoreThread(file)
    second.start()
    settled(second)
    known = job_memory(second, clock).recall(began)
    assert known is not None
    assert (known.knobs, known.gain_ratio, known.steps) == ({"bucket_bytes": 2**20}, 0.2, 77)
    assert job_memory(second, clock).recall({"bucket_bytes": 1}) is None, "the script's own value changed"
    job_memory(second, clock).doubt(known, "slower here")
    second.close()
    third = StoreThread(file)
    third.start()
    settled(third)
    assert job_memory(third, clock).recall(began) is None
    assert file.read()[0].stale == "slower here", "it is not forgotten"
    third.close()


def test_trouble_is_said_once_and_never_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "blocked").write_text("a file where a folder should be")
    keeper = StoreThread(KnobStore(tmp_path / "blocked" / "knobs.json", is_ours=True))
    with caplog.at_level(logging.WARNING):
        keeper.start()
        for number in range(3):
            keeper.put(lambda entries, number=number: remembered(entries, entry(number)))  # type: ignore[misc]
        keeper.close()
    assert len(caplog.messages) == 1
    assert "this run's best knobs are not saved" in caplog.messages[0]


def test_a_damaged_file_is_moved_aside_when_the_job_begins_and_the_log_says_where(
    file: KnobStore, caplog: pytest.LogCaptureFixture
) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_text("{")
    with caplog.at_level(logging.WARNING):
        keeper = StoreThread(file)
        keeper.start()
        settled(keeper)
        keeper.close()
    assert "it is now" in caplog.text
    assert "knobs.json.damaged" in caplog.text


def test_a_disk_that_hangs_holds_up_neither_the_steps_nor_the_end(file: KnobStore) -> None:
    release = threading.Event()
    keeper = StoreThread(file)
    keeper.start()
    keeper.put(lambda entries: (release.wait(20), entries)[1])  # type: ignore[func-returns-value]
    for number in range(40):  # more than the queue holds
        keeper.put(lambda entries, number=number: remembered(entries, entry(number)))  # type: ignore[misc]
    keeper.close(timeout_seconds=0.05)
    release.set()


def test_a_path_of_the_users_own_is_not_taken_for_ours(tmp_path: Path) -> None:
    keeper = store_thread_for(str(tmp_path / "x.json"))
    assert keeper is not None
    (tmp_path / "x.json").write_text("mine")
    keeper.start()
    keeper.put(lambda entries: [*entries, entry()])
    keeper.close()
    assert (tmp_path / "x.json").read_text() == "mine"
