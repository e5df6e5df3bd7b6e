"""A GPU that does not come back after a restart is reported until it is there or its removal is confirmed."""

import json
import logging
import os
import stat

import msgspec
import pytest

from pacecar.monitor.gpu import known_gpus
from pacecar.monitor.gpu.known_gpus import GPUS_MAX, SETTLE_SECONDS, GpuInventory, known_gpus_path, read_known
from pacecar.records import Absent, Failed, Ok, Sample, Snapshot
from tests.kit.fake_clock import FakeClock
from tests.kit.waiting import until

S = 1_000_000_000


def tick(*gpus, down=(), unnamed=(), outcome=None, wall=7):
    """One tick of GPUs by number: `down` ones report their identity, `unnamed` ones do not."""
    samples = [Sample("pacecar_gpu_up", (str(gpu),), int(gpu not in down)) for gpu in (*gpus, *unnamed)]
    samples += [
        Sample("pacecar_gpu_info", (str(gpu), f"GPU-{gpu}", "H100", "d", f"0000:{gpu}0:00.0", "a", "c", "v", "off"), 1)
        for gpu in gpus
    ]
    return Snapshot(0, 0, wall * S, 0, {"gpu": outcome or Ok(tuple(samples))}, {})


@pytest.fixture
def path(tmp_path):
    return known_gpus_path(tmp_path / "recordings", "node-a")


class Run:
    """A daemon's life as the inventory sees it."""

    def __init__(self, path, *ticks, settle=True):
        self.clock = FakeClock(monotonic_ns=5 * S)
        self.inventory = GpuInventory(path, self.clock)
        self.inventory.start()
        until(lambda: self.inventory._is_loaded, "the file is read")
        for one in ticks:
            self.inventory.update(one)
        if settle:
            self.clock.advance(int(SETTLE_SECONDS * S))

    def missing(self):
        return [known.uuid for known in self.inventory.missing()]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.inventory.close()


def test_a_gpu_that_is_not_there_after_a_restart_is_missing_with_all_that_is_known_of_it(path, caplog):
    with Run(path, tick(0, 1, 2, wall=7)) as run:
        assert run.missing() == []
    with Run(path, tick(0, 2, wall=9)) as run, caplog.at_level(logging.WARNING):
        (gone,) = run.inventory.missing()
        assert (gone.uuid, gone.name, gone.pci_bus_id, gone.gpu, gone.seen_wall_ns) == (
            "GPU-1", "H100", "0000:10:00.0", "1", 7 * S,
        )  # fmt: skip
        samples = {one.labels[0]: one.value for one in run.inventory.own_samples()}
        assert samples == {"GPU-0": 0, "GPU-1": 1, "GPU-2": 0}
        run.inventory.update(tick(0, 2))
        run.inventory.update(tick(0, 2))
    said = [record.getMessage() for record in caplog.records if "missing" in record.getMessage()]
    assert len(said) == 1, "it is said once"
    assert "GPU-1 (H100, PCI address 0000:10:00.0)" in said[0]
    assert str(path) in said[0]
    with Run(path, tick(0, 2)) as run:
        assert run.missing() == ["GPU-1"], "it stays missing"
        run.inventory.update(tick(0, 1, 2))
        assert run.missing() == []


def test_no_driver_after_one_is_all_gpus_missing(path):
    with Run(path, tick(0, 1)):
        pass
    with Run(path, tick(outcome=Absent("no NVIDIA driver: not found"))) as run:
        assert run.missing() == ["GPU-0", "GPU-1"]


def test_nothing_is_missing_before_the_driver_had_time_nor_where_gpus_are_not_read(path):
    with Run(path, tick(0, 1)):
        pass
    with Run(path, tick(0), settle=False) as run:
        assert run.missing() == []
        assert list(run.inventory.own_samples()) == []
    with Run(path, Snapshot(0, 0, 0, 0, {"cpu": Ok(())}, {})) as run:
        assert run.missing() == [], "the collector of GPUs is disabled"


def test_a_gpu_that_goes_or_hangs_while_the_daemon_runs_is_down_and_not_missing(path):
    with Run(path, tick(0, 1, 2)):
        pass
    with Run(path, tick(0, 1, 2), tick(0, 1, 2, down=(1,)), tick(0, unnamed=(2,))) as run:
        assert run.missing() == []
    with Run(path, tick(0, unnamed=(1,))) as run:
        assert run.missing() == ["GPU-2"], "GPU 1 is there and does not say which it is"
        assert run.inventory.last_known("1").uuid == "GPU-1"
        assert run.inventory.last_known("7") is None
        run.inventory.update(tick(outcome=Failed("has not begun for 0.6 s")))
        assert run.missing() == ["GPU-2"], "a tick that came to no GPU tells nothing of them"


def test_a_deleted_file_forgets_what_is_not_there_and_nothing_else(path, monkeypatch):
    monkeypatch.setattr(known_gpus, "SYNC_SECONDS", 0.01)
    with Run(path, tick(0, 1)):
        pass
    with Run(path, tick(0)) as run:
        assert run.missing() == ["GPU-1"]
        path.unlink()
        until(lambda: run.missing() == [], "it is forgotten")
        until(path.exists, "the list is written anew")
        assert [known.uuid for known in read_known(path)] == ["GPU-0"]


def info(gpu, uuid, address):
    labels = (gpu, uuid, "H100", "d", address, "a", "c", "v", "off")
    return [Sample("pacecar_gpu_up", (gpu,), 1), Sample("pacecar_gpu_info", labels, 1)]


@pytest.mark.parametrize(
    ("before", "uuid", "missing", "known"),
    [((0, 1), "GPU-9", [], {"GPU-0", "GPU-9"}), ((0, 1, 2), "GPU-2", ["GPU-1"], {"GPU-0", "GPU-1", "GPU-2"})],
    ids=["new", "moved"],
)
def test_a_new_board_replaces_the_missing_one_at_its_address_and_a_moved_one_none(path, before, uuid, missing, known):
    with Run(path, tick(*before)):
        pass
    samples = (*info("0", "GPU-0", "0000:00:00.0"), *info("1", uuid, "0000:10:00.0"))
    with Run(path, Snapshot(0, 0, 0, 0, {"gpu": Ok(samples)}, {})) as run:
        assert run.missing() == missing
    assert {one.uuid for one in read_known(path)} == known


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"version": 2, "gpus": []}', b'{"version": 1, "gpus": [{"uuid": 3}]}', b"[" * 300_000]
)
def test_a_damaged_file_is_named_and_written_anew(path, text, caplog):
    path.parent.mkdir(mode=0o700)
    path.write_bytes(text)
    with caplog.at_level(logging.WARNING), Run(path, tick(0)) as run:
        assert run.missing() == []
    assert [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert [known.uuid for known in read_known(path)] == ["GPU-0"]


def test_a_pipe_in_its_place_is_not_waited_for(path):
    path.parent.mkdir(mode=0o700)
    os.mkfifo(path)
    with Run(path, tick(0)) as run:
        assert run.missing() == []
    assert stat.S_ISREG(path.stat().st_mode)


def test_a_folder_that_others_may_write_is_refused_once_in_the_log(path, caplog, monkeypatch):
    monkeypatch.setattr(known_gpus, "SYNC_SECONDS", 0.01)
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with caplog.at_level(logging.WARNING), Run(path, tick(0)):
        until(lambda: "others may write" in caplog.text, "it is said")
    assert caplog.text.count("others may write") == 1
    assert not path.exists()
    path.parent.chmod(0o700)


def test_the_file_is_the_users_own_and_the_list_is_bounded(path):
    with Run(path, *(tick(number) for number in range(GPUS_MAX + 5))):
        pass
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    known = read_known(path)
    assert len(known) == GPUS_MAX
    assert {"GPU-0", "GPU-4"}.isdisjoint({one.uuid for one in known}), "those seen longest ago are left out"
    raw = json.loads(path.read_bytes())
    assert raw["version"] == 1
    assert raw["gpus"][0].keys() == set(msgspec.structs.asdict(known[0]))


def test_nodes_that_share_a_home_folder_have_a_file_each():
    assert known_gpus_path("/r", "a") != known_gpus_path("/r", "b")
    assert known_gpus_path("/r", "../../etc/passwd").parent.as_posix() == "/r"
