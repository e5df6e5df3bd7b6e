"""The alerts fire in a real Prometheus that scrapes a real daemon in trouble, and name the rank.

promtool evaluates series that tests invent; here the daemon makes them.  The rules are the committed ones but for how
long a condition must last, which would take half an hour.  A file system that fills, and a job that becomes slower than
it was, need hours of numbers: those two are promtool's alone.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboards.scene import Planted
from tests.dashboards.store import Prometheus
from tests.kit.waiting import until
from tests.monitor.nvml_standin.standin import compiler

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.distributed]

RULES = sorted((Path(__file__).resolve().parents[2] / "dashboards" / "generated").glob("*.rules.yml"))
PATIENCE_SECONDS = 180.0
"""A rank of a hung job counts as silent after a minute."""

HAPPENS = {"PacecarRdmaPortDown", "PacecarOomKill", "PacecarGpuIdle", "PacecarJobHangs"}
ON_DISKS = {"PacecarDiskFull", "PacecarDiskReadOnly"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path | None]:
    """A small file system that the test may fill and remount, or None without the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield None
        return
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def hasty(tmp_path: Path) -> list[Path]:
    """The rules without `for`."""
    made = []
    for path in RULES:
        text = path.read_text(encoding="utf-8")
        made.append(tmp_path / path.name)
        made[-1].write_text(re.sub(r"^( +for:) \w+$", r"\1 0s", text, flags=re.MULTILINE), encoding="utf-8")
    return made


def test_alerts_fire_when_it_happens_and_not_before(tmp_path: Path, disk: Path | None, hasty: list[Path]) -> None:
    if compiler() is None:
        pytest.skip("there is no C compiler to build the stand-in GPUs with")
    for name in ("planted", "store"):
        (tmp_path / name).mkdir()
    expected = HAPPENS | (ON_DISKS if disk else set())
    mounts = ["/"] if disk is None else ["/", str(disk)]
    with (
        Planted(tmp_path / "planted", mounts) as planted,
        Prometheus(tmp_path / "store", {planted.address: {}}, hasty) as store,
    ):
        known = [
            "instance_device:pacecar_rdma_port_active:known",
            "instance_mountpoint:pacecar_host_filesystem_read_only:was_writable",
            "instance_gpu:pacecar_gpu_held:by_owner",
            "increase(pacecar_host_oom_kills_total[10m]) == 0",
        ]
        until(lambda: all(map(store.instant, known)), "the time before", PATIENCE_SECONDS, 1.0)
        early = {alert["labels"]["alertname"] for alert in store.firing()}
        assert not early & (expected | {"PacecarDaemonNotAnswering"})

        planted.starve()
        planted.stall()
        if disk is not None:
            (disk / "checkpoint").write_bytes(bytes(63 << 10))
            until(lambda: "PacecarDiskFull" in names(store), "a full disk", PATIENCE_SECONDS, 1.0)
            expected -= {"PacecarDiskFull"}  # which says no more of one that is read-only
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        until(lambda: expected <= names(store), f"not all of {expected}", PATIENCE_SECONDS, 1.0)
        hangs = ranks(store)
        until(lambda: ranks(store) != {None}, f"a rank is named, not {hangs}", PATIENCE_SECONDS, 1.0)
        assert ranks(store) == {str(rank) for rank in range(1, 7)}, "rank 0 says that it waits, the others say nothing"

        planted.kill()
        until(lambda: "PacecarDaemonNotAnswering" in names(store), "it is gone", PATIENCE_SECONDS, 1.0)


def names(store: Prometheus) -> set[str]:
    return {alert["labels"]["alertname"] for alert in store.firing()}


def ranks(store: Prometheus) -> set[str | None]:
    """The ranks that the alert about hangs names."""
    return {
        alert["labels"].get("rank") for alert in store.firing() if alert["labels"]["alertname"] == "PacecarJobHangs"
    }
