"""Undocumented output of kernels, containers and drivers: each loses its own series, and is named."""

import errno
import os

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.kernel_files.reader import KernelFiles
from pacecar.monitor.collectors.cgroup import CgroupCollector, CgroupMember
from pacecar.monitor.collectors.cpu import CACHED_TICKS, CpuCollector
from pacecar.monitor.collectors.disk import DiskCollector
from pacecar.monitor.collectors.hwmon import READ_TICKS, HwmonCollector
from pacecar.monitor.collectors.memory import MemoryCollector
from pacecar.monitor.collectors.network import NetworkCollector
from pacecar.monitor.collectors.rates import Rates
from pacecar.monitor.collectors.rdma import RdmaCollector
from pacecar.monitor.collectors.tcp import TcpCollector
from pacecar.monitor.sampling.sample_screen import SampleScreen
from pacecar.records import Ok
from tests.kit.fake_clock import FakeClock

IB = "sys/class/infiniband/mlx5_0/ports/1"


class Refusing(KernelFiles):
    """Kernel files; those with these path endings cannot be read."""

    def __init__(self, files, number, *ends):
        super().__init__(files.proc, files.sys)
        self.number, self.ends, self.reads = number, ends, 0

    def read(self, path):
        self.reads += 1
        if str(path).endswith(self.ends):
            raise OSError(self.number, os.strerror(self.number))
        return super().read(path)


def statvfs(path):
    return os.statvfs_result((8192, 4096, 1000, 500, 250, 70, 60, 50, 4, 255))


MADE = {
    "cpu": lambda files: CpuCollector(files, ticks_per_second=100),
    "memory": MemoryCollector,
    "disk": lambda files: DiskCollector(files, statvfs=statvfs),
    "network": lambda files: NetworkCollector(files, FakeClock()),
    "tcp": TcpCollector,
    "rdma": lambda files: RdmaCollector(files, FakeClock()),
    "hwmon": HwmonCollector,
}


@pytest.fixture
def read(values):
    """Collect and screen, as the sampler does: the samples served, and the failures in words."""

    def collected(collector, screen=None):
        outcome = collector.collect()
        assert isinstance(outcome, Ok), outcome
        sound, refusals = (screen or SampleScreen()).screen(outcome.samples)
        reasons = [outcome.reason] * (outcome.read_failures > 0) + [refusal.reason for refusal in refusals]
        return values(Ok(sound)), outcome.read_failures + len(refusals), "; ".join(reasons)

    return collected


def edited(machine, path, old, new):
    text = (machine / path).read_text()
    assert old in text
    (machine / path).write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "path", "old", "new", "lost", "words"),
    [
        ("cpu", "proc/stat", "processes 4242", "processes -2049562273", {("host_forks_total",)}, "proc/stat:"),
        ("cpu", "proc/stat", "procs_blocked 0", "procs_blocked 4294967295", {("host_tasks_blocked",)}, "/proc/stat"),
        ("cpu", "proc/stat", "1008 ", "18446744073709551615 ", {("host_cpu_seconds_total", "steal")}, "mode='steal'"),
        ("cpu", "proc/loadavg", "2.5", "nan", {("host_load_average", "5m")}, "window='5m'"),
        ("cpu", "proc/loadavg", "2.5", "2,5", {("host_load_average", "5m")}, "proc/loadavg:1"),
        ("memory", "proc/meminfo", "SwapFree:        1999", "SwapFree:        18446744073709551488",
         {("host_swap_used_bytes",)}, "/proc/meminfo: pacecar_host_swap_used_bytes"),
        ("memory", "proc/meminfo", "MemAvailable:    5002", "MemAvailable:    10001",
         {("host_memory_available_bytes",)}, "is above pacecar_host_memory_size_bytes"),
        ("memory", "proc/meminfo", "Dirty:             61", "Dirty:             18446744073709551612",
         {("host_memory_dirty_bytes",)}, "/proc/meminfo: pacecar_host_memory_dirty_bytes"),
        ("disk", "proc/diskstats", " 109 ", " -1 ", {("host_disk_requests_in_flight", "sda")}, "proc/diskstats:"),
        ("disk", "proc/diskstats", " 109 ", " 4294967295 ", {("host_disk_requests_in_flight", "sda")}, "device='sda'"),
        ("network", "proc/net/dev", " 404 ", " -404 ", {("host_network_receive_drops_total", "eth0")}, "proc/net/dev:"),
        ("network", "proc/net/dev", " 404 ", " 18446744073709551615 ",
         {("host_network_receive_drops_total", "eth0")}, "interface='eth0'"),
        ("tcp", "proc/net/sockstat", "orphan 632", "orphan -632", {("host_tcp_sockets", "orphan")}, "net/sockstat:"),
        ("rdma", f"{IB}/counters/symbol_error", "1006", "18446744073709551615",
         {("rdma_errors_total", "mlx5_0", "1", "symbol_error")}, "error='symbol_error'"),
        ("hwmon", "sys/class/hwmon/hwmon2/fan1_input", "4206", "4294967295",
         {("host_sensor_fan_rpm", "board", "hwmon2", "FAN A")}, "sensor='FAN A'"),
    ],
)  # fmt: skip
def test_one_odd_number_costs_its_own_series_and_is_named(name, path, old, new, lost, words, files, machine, read):
    whole, failures, _ = read(MADE[name](files))
    assert failures == 0
    edited(machine, path, old, new)
    served, failures, reason = read(MADE[name](files))
    assert whole.keys() - served.keys() == lost
    assert served.items() <= whole.items()
    assert failures == 1
    assert words in reason


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES, errno.EIO])
def test_an_rdma_counter_that_is_refused_costs_itself_and_no_searches(number, files, machine, read):
    whole, _, _ = read(MADE["rdma"](files))
    refusing = Refusing(files, number, "mlx5_0/ports/1/counters/symbol_error")
    collector = MADE["rdma"](refusing)
    reads = []
    for _ in range(3):
        before = refusing.reads
        served, failures, reason = read(collector)
        reads.append(refusing.reads - before)
        assert whole.keys() - served.keys() == {("rdma_errors_total", "mlx5_0", "1", "symbol_error")}
        assert (failures, "symbol_error: " + os.strerror(number) in reason) == (1, True)
    assert reads[1] == reads[2] < reads[0]


def test_an_rdma_device_that_does_not_say_its_firmware_has_its_facts_all_the_same(files, read):
    served, failures, _ = read(MADE["rdma"](Refusing(files, errno.EINVAL, "mlx5_0/fw_ver")))
    assert ("rdma_port_info", "mlx5_0", "1", "InfiniBand", "MT4129", "") in served
    assert failures == 0


def test_a_frequency_that_the_kernel_does_not_know_is_not_the_others(files, machine, read):
    folder = machine / "sys/devices/system/cpu/cpufreq"
    policies = sorted(p.name for p in folder.iterdir())
    (folder / policies[0] / "scaling_cur_freq").write_text("<unknown>\n")
    served, failures, _ = read(MADE["cpu"](files))
    known = [int((folder / name / "scaling_cur_freq").read_text()) for name in policies[1:]]
    assert failures == 0
    assert served[("host_cpu_frequency_mean_hertz",)] == sum(known) / len(known)
    assert served[("host_cpu_frequency_min_hertz",)] == min(known)
    offline = Refusing(files, errno.EBUSY, f"{policies[-1]}/scaling_cur_freq")
    assert read(MADE["cpu"](offline))[1] == 0


def test_a_frequency_that_cannot_be_read_costs_neither_limit_nor_ticks(files, read):
    refusing = Refusing(files, errno.EIO, "policy1/scaling_cur_freq")
    collector = MADE["cpu"](refusing)
    reads = []
    for _ in range(CACHED_TICKS + 2):
        before = refusing.reads
        served, failures, reason = read(collector)
        reads.append(refusing.reads - before)
        assert ("host_cpu_frequency_limit_hertz",) in served
        assert ("host_cpu_frequency_mean_hertz",) not in served
        assert (failures, "policy1" in reason) == (1, True)
    every = [n for n, count in enumerate(reads) if count > min(reads)]
    assert every == [0, 1, CACHED_TICKS, CACHED_TICKS + 1]  # at the third the lists of NUMA nodes


def test_a_row_of_a_processor_that_cannot_be_read_costs_its_numa_node_alone(files, machine, read):
    whole, _, _ = read(MADE["cpu"](files))
    edited(machine, "proc/stat", "cpu3 511", "cpu3 x")
    served, failures, _ = read(MADE["cpu"](files))
    lost = whole.keys() - served.keys()
    assert {key[:2] for key in lost} == {("host_numa_cpu_seconds_total", "1")}
    assert served[("host_cpus_online",)] == whole[("host_cpus_online",)]
    assert failures == 1


def test_a_processor_that_goes_off_line_takes_no_time_from_its_node(files, machine, read):
    collector, screen = MADE["cpu"](files), SampleScreen()
    whole, _, _ = read(collector, screen)
    stat = machine / "proc/stat"
    text = stat.read_text()
    stat.write_text("".join(line for line in text.splitlines(keepends=True) if not line.startswith("cpu1 ")))
    served, failures, _ = read(collector, screen)
    assert failures == 0
    assert served[("host_cpus_online",)] == whole[("host_cpus_online",)] - 1
    node = {key: value for key, value in whole.items() if key[0] == "host_numa_cpu_seconds_total"}
    assert node.items() <= served.items()


def test_what_iowait_goes_back_by_is_no_restart(files, machine, read):
    collector, screen = MADE["cpu"](files), SampleScreen()
    whole, _, _ = read(collector, screen)
    edited(machine, "proc/stat", " 1005 ", " 1003 ")
    served, failures, _ = read(collector, screen)
    key = ("host_cpu_seconds_total", "iowait")
    assert (served[key], failures) == (whole[key], 0)


def test_a_steal_below_zero_is_no_use_of_the_processors(files, machine, values):
    collector = MADE["cpu"](files)
    collector.collect()
    edited(machine, "proc/stat", "cpu  1001 1002 1003 1004", "cpu  1011 1002 1003 1034")
    edited(machine, "proc/stat", "1008 ", "18446744073709551615 ")
    assert values(collector.collect())[("host_cpu_utilization_ratio",)] == 0.25


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_file_system_that_the_daemon_may_not_reach_says_so_and_fails_nothing(number, files, read):
    def kept_out(path):
        if path == "/mnt/big disk":
            raise OSError(number, os.strerror(number))
        return statvfs(path)

    served, failures, _ = read(DiskCollector(files, statvfs=kept_out))
    assert failures == 0
    assert {key[0]: value for key, value in served.items() if key[1:] == ("/mnt/big disk",)} == {
        "host_filesystem_error": 1
    }
    assert served[("host_filesystem_error", "/")] == 0


def test_a_file_system_that_does_not_know_its_free_files_has_none(files, read):
    """CephFS."""

    def endless(path):
        return os.statvfs_result((8192, 4096, 1000, 500, 250, 70, 2**64 - 1, 2**64 - 1, 4, 255))

    served, failures, _ = read(DiskCollector(files, statvfs=endless))
    assert failures == 0
    assert ("host_filesystem_files", "/") in served
    assert ("host_filesystem_files_free", "/") not in served


def test_sensors_of_one_name_are_told_apart_by_their_files(files, machine, read):
    folder = machine / "sys/class/hwmon/hwmon2"
    (folder / "fan2_input").write_text("777\n")
    (folder / "fan2_label").write_text("FAN A\n")
    served, failures, _ = read(HwmonCollector(files))
    fans = {key[3]: value for key, value in served.items() if key[0] == "host_sensor_fan_rpm"}
    assert fans == {"FAN A (hwmon2/fan1)": 4206, "FAN A (hwmon2/fan2)": 777}
    assert failures == 0


def test_a_sensor_that_is_always_refused_does_not_make_the_others_be_read_each_tick(files, read):
    refusing = Refusing(files, errno.EIO, "fan1_input")
    collector = HwmonCollector(refusing)
    reads = []
    for _ in range(READ_TICKS):
        before = refusing.reads
        _, failures, _ = read(collector)
        reads.append(refusing.reads - before)
        assert failures == 1
    assert reads[2:] == [0] * (READ_TICKS - 2)


def test_an_rdma_counter_in_both_folders_is_two_series(files, machine, read):
    (machine / IB / "hw_counters").mkdir(exist_ok=True)
    (machine / IB / "hw_counters/symbol_error").write_text("77\n")
    served, failures, _ = read(MADE["rdma"](files))
    errors = {key[3]: value for key, value in served.items() if key[:3] == ("rdma_errors_total", "mlx5_0", "1")}
    assert (errors["symbol_error"], errors["hw_counters/symbol_error"], failures) == (1006, 77, 0)


@pytest.mark.parametrize(("name", "path"), [("network", "proc/net/dev"), ("disk", "proc/diskstats")])
def test_a_second_row_of_one_name_is_said_and_the_first_is_served(name, path, files, machine, read):
    whole, _, _ = read(MADE[name](files))
    text = (machine / path).read_text()
    row = next(line for line in text.splitlines() if "eth0" in line or " sda " in line)
    (machine / path).write_text(text + row.replace("1", "2") + "\n")
    served, failures, reason = read(MADE[name](files))
    assert (served, failures) == (whole, 1)
    assert "a second row of" in reason


def test_two_control_groups_of_one_name_are_not_mixed(tmp_path, values):
    for path, text in {
        "proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "proc/self/cgroup": "4:memory:/a\n3:cpu:/a\n1:name=systemd:/x\n",
        "proc/1/cgroup": "4:memory:/a\n3:cpu:/a\n1:name=systemd:/y\n",
        "proc/2/cgroup": "4:memory:/a\n3:cpu:/b\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    ranks = [CgroupMember(pid, "rank", "job", pid) for pid in ("1", "2")]
    outcome = CgroupCollector(KernelFiles(tmp_path / "proc", tmp_path / "sys"), lambda: ranks).collect()
    assert [key[1:3] for key in values(outcome) if key[0] == "cgroup_member_info"] == [("/a", "daemon"), ("/a", "rank")]
    assert (outcome.read_failures, "another group is called '/a'" in outcome.reason) == (1, True)


def test_a_rate_of_a_counter_that_reads_zero_once_goes_on():
    rates, second = Rates(), NS_PER_SECOND
    got = [rates.per_second(("a",), count, n * second) for n, count in enumerate((1000, 1010, 0, 1030, 5, 6, 8))]
    assert got == [None, 10, None, 10, None, 1, 2]
