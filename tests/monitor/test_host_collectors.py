"""The collectors of processors, memory, disks and network against a recorded machine."""

import os
import shutil

import pytest

from pacecar.monitor.collectors.cpu import CpuCollector, utilization
from pacecar.monitor.collectors.disk import DiskCollector
from pacecar.monitor.collectors.memory import MemoryCollector
from pacecar.monitor.collectors.network import INTERFACES_MAX, NetworkCollector
from pacecar.monitor.collectors.own import OwnCollector
from pacecar.records import Absent, Failed, Ok

KIB = 1024


def statvfs(path):
    """f_bsize differs from f_frsize, and every figure from the others."""
    size = {"/": 1000, "/mnt/big disk": 2000, "/dev/shm": 0, "/var/lib": 3000}[path]
    return os.statvfs_result((8192, 4096, size, size // 2, size // 4, 7, 6, 5, 4, 255))


def cpu(files):
    return CpuCollector(files, ticks_per_second=100)


def disk(files):
    return DiskCollector(files, statvfs=statvfs)


COLLECTORS = {"cpu": cpu, "memory": MemoryCollector, "disk": disk, "network": NetworkCollector}


@pytest.fixture(params=list(COLLECTORS))
def make(request):
    return COLLECTORS[request.param]


def test_cpu_values(files, values):
    read = values(cpu(files).collect())
    modes = ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"]
    assert {m: read[("host_cpu_seconds_total", m)] for m in modes} == {
        mode: (1001 + i) * 10_000_000 for i, mode in enumerate(modes)
    }
    assert read[("host_cpus_online",)] == 3
    assert read[("host_context_switches_total",)] == 7654321
    assert [read[("host_load_average", w)] for w in ("1m", "5m", "15m")] == [1.25, 2.5, 3.75]


def test_cpu_utilization_needs_two_ticks_and_counts_neither_idle_nor_iowait(files, machine, values):
    collector = cpu(files)
    assert ("host_cpu_utilization_ratio",) not in values(collector.collect())
    stat = machine / "proc/stat"
    stat.write_text(stat.read_text().replace("cpu  1001 1002 1003 1004 1005", "cpu  1031 1002 1003 1054 1025"))
    assert values(collector.collect())[("host_cpu_utilization_ratio",)] == 0.3


def test_cpu_utilization_of_no_time_is_absent_and_of_idle_time_is_zero():
    assert utilization({"user": 5, "idle": 5}, {"user": 5, "idle": 5}) is None
    assert utilization({"user": 5, "idle": 5}, {"user": 5, "idle": 9}) == 0.0
    assert utilization({"user": 5, "iowait": 9}, {"user": 7, "iowait": 3}) == 1.0


def test_memory_values(files, values):
    read = values(MemoryCollector(files).collect())
    assert read[("host_memory_size_bytes",)] == 10000 * KIB
    assert read[("host_memory_available_bytes",)] == 5002 * KIB
    assert read[("host_memory_cached_bytes",)] == 1504 * KIB
    assert read[("host_memory_used_bytes",)] == (10000 - 3001 - 103 - (1504 + 307 - 206)) * KIB
    assert read[("host_swap_size_bytes",)] == 2048 * KIB
    assert read[("host_swap_used_bytes",)] == 49 * KIB
    pressure = {k[1:]: v for k, v in read.items() if k[0] == "host_pressure_stalled_seconds_total"}
    assert pressure == {
        ("cpu", "some"): 4_011_000,
        ("cpu", "full"): 4_012_000,
        ("memory", "some"): 4_021_000,
        ("memory", "full"): 4_022_000,
        ("io", "some"): 4_031_000,
        ("io", "full"): 4_032_000,
        ("irq", "full"): 4_042_000,
    }


def test_disk_values_are_of_whole_disks_and_local_file_systems_once_each(files, values):
    read = values(disk(files).collect())
    assert {key for key in read if key[0].startswith("host_disk")} == {
        (f"host_disk_{quantity}_total", device)
        for quantity in ("reads", "read_bytes", "writes", "written_bytes", "busy_seconds")
        for device in ("sda", "nvme0n1")
    }
    assert read[("host_disk_reads_total", "sda")] == 101
    assert read[("host_disk_read_bytes_total", "sda")] == 103 * 512
    assert read[("host_disk_writes_total", "sda")] == 105
    assert read[("host_disk_written_bytes_total", "sda")] == 107 * 512
    assert read[("host_disk_busy_seconds_total", "nvme0n1")] == 210 * 1_000_000
    sizes = {key[1]: value for key, value in read.items() if key[0] == "host_filesystem_size_bytes"}
    assert sizes == {"/": 1000 * 4096, "/mnt/big disk": 2000 * 4096, "/dev/shm": 0}
    assert read[("host_filesystem_available_bytes", "/mnt/big disk")] == 500 * 4096


def test_disk_whose_file_system_fails_loses_only_that_one(files, values):
    def failing(path):
        if path == "/":
            raise OSError(5, "Input/output error")
        return statvfs(path)

    outcome = DiskCollector(files, statvfs=failing).collect()
    assert isinstance(outcome, Failed)
    assert outcome.reason == "/: Input/output error"
    assert ("host_filesystem_size_bytes", "/mnt/big disk") in values(outcome)


def test_network_values(files, values):
    read = values(NetworkCollector(files).collect())
    expected = {"bytes": 1, "packets": 2, "errors": 3, "drops": 4}
    for quantity, column in expected.items():
        assert read[(f"host_network_receive_{quantity}_total", "eth0")] == 400 + column
        assert read[(f"host_network_transmit_{quantity}_total", "eth0")] == 408 + column
        assert read[(f"host_network_receive_{quantity}_total", "lo")] == 300 + column


def test_network_link_speed_is_absent_where_it_is_unknown(files, values):
    read = values(NetworkCollector(files).collect())
    speeds = {k[1]: v for k, v in read.items() if k[0] == "host_network_link_bytes_per_second"}
    assert speeds == {"eth0": 25_000_000_000 // 8}


def test_network_interfaces_are_bounded_and_those_left_out_are_said(files, machine):
    row = ": 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
    (machine / "proc/net/dev").write_text("a\nb\n" + "".join(f"v{i}{row}" for i in range(INTERFACES_MAX + 3)))
    outcome = NetworkCollector(files).collect()
    assert isinstance(outcome, Failed)
    assert "3 interfaces beyond the first 256" in outcome.reason
    assert len(outcome.samples) == INTERFACES_MAX * 8


def test_zero_is_a_measurement(make, files, machine, values):
    """Every number of the sources set to 0: the same series as before, all of them zero (sizes stay)."""
    before = values(make(files).collect())
    for path in (machine / "proc").rglob("*"):
        if path.is_file() and path.name != "mountinfo":
            path.write_text("\n".join(zeroed(path.name, line) for line in path.read_text().splitlines()))
    (machine / "sys/class/net/eth0/speed").write_text("0\n")
    after = values(make(files).collect())
    assert after.keys() == before.keys()
    assert {k for k, v in after.items() if v != 0} <= {
        ("host_cpus_online",),
        *((name, mount) for name in ("host_filesystem_size_bytes", "host_filesystem_available_bytes") for mount in "/"),
        ("host_filesystem_size_bytes", "/mnt/big disk"),
        ("host_filesystem_available_bytes", "/mnt/big disk"),
    }


def zeroed(name, line):
    """Put 0 for every number of `line` that is a value, not a key."""
    words = line.replace("eth0:401", "eth0: 401").split(" ")
    keep = {"diskstats": 3}.get(name, 0)
    seen = 0
    out = []
    for word in words:
        seen += word != ""
        if seen > keep and word.replace(".", "").isdigit():
            word = "0"
        elif "=" in word:
            word = word.split("=")[0] + "=0"
        out.append(word)
    return " ".join(out)


def test_missing_source_is_absent(make, files, machine):
    shutil.rmtree(machine / "proc")
    outcome = make(files).collect()
    assert isinstance(outcome, Absent)
    assert "No such file" in outcome.reason


@pytest.mark.parametrize(
    ("make", "path", "line", "bad", "number"),
    [
        (cpu, "stat", "ctxt 7654321", "ctxt -3", 6),
        (cpu, "stat", "cpu  1001 1002 1003", "cpu  1001 x 1003", 1),
        (cpu, "loadavg", "1.25 2.5 3.75 2/345 6789", "1.25", 1),
        (MemoryCollector, "meminfo", "Cached:          1504 kB", "Cached:          1504 pages", 5),
        (MemoryCollector, "pressure/io", "total=4032", "total=", 2),
        (disk, "diskstats", "201 202", "2O1 202", 4),
        (disk, "self/mountinfo", " - ext4 /dev/sda1 rw\n28", " ext4\n28", 2),
        (NetworkCollector, "net/dev", "301 302 303", "301 302", 3),
    ],
)
def test_malformed_source_fails_naming_file_and_line_and_keeps_the_rest(
    make, path, line, bad, number, files, machine, values
):
    source = machine / "proc" / path
    whole = values(make(files).collect())
    assert line in source.read_text()
    source.write_text(source.read_text().replace(line, bad, 1))
    outcome = make(files).collect()
    assert isinstance(outcome, Failed)
    assert f"{source}:{number}: " in outcome.reason
    partial = values(outcome)
    assert partial
    assert partial.items() <= whole.items() or path == "self/mountinfo"


def test_any_one_read_may_fail_and_the_others_still_count(make, failing_files, values):
    """For every n: the n-th read fails, the outcome is failed and names the error, and the next collect is ok."""
    probe = failing_files(None)
    everything = values(make(probe).collect())
    assert probe.reads > 1
    for n in range(1, probe.reads + 1):
        files = failing_files(n)
        collector = make(files)
        outcome = collector.collect()
        assert isinstance(outcome, Failed)
        assert "Input/output error" in outcome.reason
        assert values(outcome).items() <= everything.items()
        assert isinstance(collector.collect(), Ok)


def test_own_figures_are_those_of_this_process(values):
    read = values(OwnCollector().collect())
    assert read[("daemon_cpu_seconds_total",)] > 0
    assert read[("daemon_resident_memory_bytes",)] > 1_000_000


def test_this_machine_itself_can_be_read():
    """The recorded machine is only as good as our idea of /proc; the kernel under this test is real."""
    from pacecar.monitor.collectors.reading import Files

    for make in (CpuCollector, MemoryCollector, NetworkCollector):
        assert isinstance(make(Files()).collect(), Ok)
