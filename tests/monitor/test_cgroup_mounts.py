"""The host's control groups as seen from the daemon's container in the DaemonSet: `/` is its own group."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacecar.kernel_files.reader import KernelFiles
from pacecar.monitor.collectors.cgroup import CgroupCollector, CgroupMember

PODS = "kubepods.slice/kubepods-burstable.slice"
DAEMON = f"{PODS}/kubepods-burstable-pod1.slice/cri-containerd-d.scope"
RANK = f"{PODS}/kubepods-burstable-pod2.slice/cri-containerd-r.scope"
GUARANTEED = "kubepods.slice/kubepods-pod3.slice/cri-containerd-g.scope"


def group(top: Path, name: str, cpus: int, used: int) -> None:
    folder = top / name
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text(f"{cpus}00000 100000\n")
    (folder / "cpu.stat").write_text(f"usage_usec {used}\nnr_periods 1\nnr_throttled 2\nthrottled_usec 3\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.events").write_text("max 4\noom_kill 5\n")


@pytest.fixture
def container(tmp_path):
    """What the daemon's container sees of a node: mountinfo in either order of the two mounts, and the groups."""
    proc = tmp_path / "proc"
    seen = proc / "self" / "root"
    top = seen / "host/sys/fs/cgroup"
    group(top, DAEMON, 1, 101)
    group(top, RANK, 16, 202)
    group(top, GUARANTEED, 8, 303)
    (seen / "sys/fs").mkdir(parents=True)
    (seen / "sys/fs/cgroup").symlink_to(top / DAEMON)  # the same folder, as the kernel shows it
    mounts = [
        "30 29 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
        "51 50 0:26 /../../../.. /host/sys/fs/cgroup ro - cgroup2 cgroup2 rw\n",
    ]
    (proc / "self/mountinfo").write_text("".join(mounts))
    for pid, path in (("self", "/"), ("42", "/../../kubepods-burstable-pod2.slice/cri-containerd-r.scope"),
                      ("43", "/../../../kubepods-pod3.slice/cri-containerd-g.scope")):  # fmt: skip
        (proc / pid).mkdir(exist_ok=True)
        (proc / pid / "cgroup").write_text(f"0::{path}\n")
    return KernelFiles(proc, seen / "host/sys")


def read(files: KernelFiles) -> dict[tuple[str, str], float]:
    ranks = [CgroupMember("42", "rank", "job", "0"), CgroupMember("43", "rank", "job", "1")]
    outcome = CgroupCollector(files, lambda: ranks).collect()
    return {(sample.metric, sample.labels[0]): sample.value for sample in getattr(outcome, "samples", ())}


def test_groups_outside_of_our_view_are_found_below_the_hosts_mount(container):
    for turned in (False, True):
        file = container.proc / "self/mountinfo"
        file.write_text("".join(sorted(file.read_text().splitlines(keepends=True), reverse=turned)))
        values = read(container)
        cpus = {name: value for (metric, name), value in values.items() if metric == "pacecar_cgroup_cpu_limit_cpus"}
        assert cpus == {f"/{DAEMON}": 1, f"/{RANK}": 16, f"/{GUARANTEED}": 8}
        assert values["pacecar_cgroup_memory_used_bytes", f"/{RANK}"] == 202


def test_a_mount_point_with_a_space_is_read_as_the_kernel_writes_it(container):
    root, mounts = container.proc / "self/root", container.proc / "self/mountinfo"
    (root / "host").rename(root / "the host")
    (root / "sys/fs/cgroup").unlink()
    (root / "sys/fs/cgroup").symlink_to(root / "the host/sys/fs/cgroup" / DAEMON)
    mounts.write_text(mounts.read_text().replace("/host/", "/the\\040host/"))
    assert (
        read(KernelFiles(container.proc, root / "the host/sys"))["pacecar_cgroup_memory_used_bytes", f"/{RANK}"] == 202
    )


def test_where_our_own_place_is_not_found_nothing_is_guessed(container):
    (container.proc / "self/root/sys/fs/cgroup").unlink()
    (container.proc / "self/root/sys/fs/cgroup").mkdir()
    assert read(container) == {}


def test_without_the_hosts_mount_there_is_our_own_group_alone(container):
    file = container.proc / "self/mountinfo"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    own = KernelFiles(container.proc, container.proc / "self/root/sys")
    values = read(own)
    assert values["pacecar_cgroup_cpu_limit_cpus", "/"] == 1
    assert {name for metric, name in values if metric != "pacecar_cgroup_member_info"} == {"/"}
