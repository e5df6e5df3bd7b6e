"""The collectors of processors, memory, disks, network, RDMA and control groups against a recorded machine.

Its values, each of them, are on the golden page (test_golden); here is what they are made of, and what goes wrong.
"""

import errno
import os
import shutil

import psutil
import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.kernel_files.reader import KernelFiles
from pacecar.monitor.collectors.cgroup import GROUPS_MAX, CgroupCollector, CgroupMember
from pacecar.monitor.collectors.clock_sync import ClockState, read_clock
from pacecar.monitor.collectors.cpu import CACHED_TICKS, CpuCollector, utilization
from pacecar.monitor.collectors.daemon_process import DaemonProcessCollector
from pacecar.monitor.collectors.disk import DiskCollector, MountCollector
from pacecar.monitor.collectors.hwmon import READ_TICKS, SENSORS_MAX, HwmonCollector
from pacecar.monitor.collectors.memory import MemoryCollector
from pacecar.monitor.collectors.network import INTERFACES_MAX, NetworkCollector
from pacecar.monitor.collectors.numa import NumaCollector
from pacecar.monitor.collectors.rates import SPAN_NS, Rates
from pacecar.monitor.collectors.rdma import FIND_TICKS, RdmaCollector
from pacecar.monitor.collectors.source_reader import ParsedLines, SourceReading
from pacecar.monitor.collectors.system import CACHED_TICKS as SYSTEM_TICKS
from pacecar.monitor.collectors.system import SystemCollector
from pacecar.monitor.collectors.tcp import TcpCollector
from pacecar.records import Absent, Failed, Ok
from tests.kit.fake_clock import FakeClock

KIB = 1024


def statvfs(path):
    """f_bsize differs from f_frsize, and every figure from the others."""
    size = {"/": 1000, "/mnt/big disk": 2000, "/dev/shm": 0, "/var/lib": 3000}[path]
    return os.statvfs_result((8192, 4096, size, size // 2, size // 4, 7 * size, 6 * size, 5 * size, 4, 255))


def cpu(files):
    return CpuCollector(files, ticks_per_second=100)


def disk(files):
    return DiskCollector(files, statvfs=statvfs)


def network(files, clock=None):
    return NetworkCollector(files, clock or FakeClock())


def rdma(files, clock=None):
    return RdmaCollector(files, clock or FakeClock())


CLOCK = ClockState(is_synchronized=True, offset_ns=-651, estimated_error_ns=652_000, max_error_ns=653_000)


def system(files):
    """The clock is the kernel's own and in no file: it is there as long as the machine is."""
    machine = files.proc.parent
    return SystemCollector(
        files,
        clock=lambda: CLOCK if files.proc.exists() else None,
        os_release=machine / "etc/os-release",
        architecture="x86_64",
    )


RANKS = (CgroupMember("4242", "rank", "run-7", "0"), CgroupMember("4243", "rank", "run-7", "1"))


def cgroup(files):
    return CgroupCollector(files, lambda: RANKS)


COLLECTORS = {
    "cpu": cpu,
    "memory": MemoryCollector,
    "numa": NumaCollector,
    "disk": disk,
    "network": network,
    "tcp": TcpCollector,
    "system": system,
    "hwmon": HwmonCollector,
    "rdma": rdma,
    "cgroup": cgroup,
}


@pytest.fixture(params=list(COLLECTORS))
def make(request):
    return COLLECTORS[request.param]


def test_what_the_kernel_counts_in_units_of_its_own(files, values):
    page, made = os.sysconf("SC_PAGE_SIZE"), {}
    for collector in (cpu, MemoryCollector, disk, TcpCollector, network, rdma):
        made |= values(collector(files).collect())
    assert made[("host_cpu_seconds_total", "user")] == 1001 * 10_000_000  # ticks, a hundred a second
    assert made[("host_memory_used_bytes",)] == (10000 - 3001 - 103 - (1504 + 307 - 206)) * KIB
    assert made[("host_swap_in_bytes_total",)] == 72 * page
    assert made[("host_socket_memory_bytes", "tcp")] == 635 * page
    assert made[("host_pressure_stalled_seconds_total", "io", "some")] == 4_031_000  # microseconds
    assert made[("host_disk_read_bytes_total", "sda")] == 103 * 512  # sectors, whatever the disk's are
    assert made[("host_filesystem_size_bytes", "/")] == 1000 * 4096  # fragments, not blocks
    assert made[("host_network_link_bytes_per_second", "eth0")] == 25_000_000_000 // 8
    assert made[("rdma_receive_bytes_total", "mlx5_0", "1")] == 1001 * 4  # words
    assert made[("rdma_receive_bytes_total", "efa_0", "1")] == 3001  # bytes


def test_a_file_system_without_space_and_inodes_has_a_size_and_no_number_of_files(files, values):
    read = values(disk(files).collect())
    assert read[("host_filesystem_size_bytes", "/dev/shm")] == 0
    assert ("host_filesystem_files", "/dev/shm") not in read


def test_cpu_utilization_needs_two_ticks_and_counts_neither_idle_nor_iowait(files, machine, values):
    collector = cpu(files)
    assert ("host_cpu_utilization_ratio",) not in values(collector.collect())
    stat = machine / "proc/stat"
    stat.write_text(stat.read_text().replace("cpu  1001 1002 1003 1004 1005", "cpu  1031 1002 1003 1054 1025"))
    assert values(collector.collect())[("host_cpu_utilization_ratio",)] == 0.3


def test_cpu_utilization_of_a_numa_node_is_that_of_its_processors(files, machine, values):
    collector = cpu(files)
    collector.collect()
    stat = machine / "proc/stat"
    stat.write_text(stat.read_text().replace("cpu3 511 512 513 514", "cpu3 521 512 513 554"))
    read = values(collector.collect())
    assert read[("host_numa_cpu_utilization_ratio", "1")] == 0.2
    assert ("host_numa_cpu_utilization_ratio", "0") not in read  # no time passed there


def test_cpu_glance_is_the_utilization_since_the_reading_before(files, machine):
    collector = cpu(files)
    collector.collect()
    assert not collector.glance()  # no time passed
    stat = machine / "proc/stat"
    text = stat.read_text()
    for modes, ratio in (("1011 1002 1003 1034", 0.25), ("1011 1002 1003 1044", 0), ("1013 1002 1003 1044", 1)):
        stat.write_text(text.replace("cpu  1001 1002 1003 1004", f"cpu  {modes}"))
        (found,) = collector.glance()
        assert (found.metric, found.value) == ("pacecar_host_cpu_utilization_ratio", ratio)
    ratio = [s.value for s in collector.collect().samples if s.metric == "pacecar_host_cpu_utilization_ratio"]
    assert ratio == []  # no time passed since the glance
    for wrong in ("", "cpu", "cpu  1 2 3\n", "cpu  1 2 3 -4\n", "cpu  1 2 3 1_0\n", "cpu0 1 2 3 4\n"):
        stat.write_text(wrong)
        assert not collector.glance()
    collector.close()


def test_cpu_frequencies_are_read_rarely_and_served_always(machine, failing_files, values):
    files = failing_files(None)
    collector = cpu(files)
    reads = []
    for _ in range(2 * CACHED_TICKS):
        before = files.reads
        assert ("host_cpu_frequency_mean_hertz",) in values(collector.collect())
        reads.append(files.reads - before)
    assert [n for n, count in enumerate(reads) if count > min(reads)] == [0, CACHED_TICKS]


def test_cpu_utilization_of_no_time_is_absent_and_of_idle_time_is_zero():
    assert utilization({"user": 5, "idle": 5}, {"user": 5, "idle": 5}) is None
    assert utilization({"user": 5, "idle": 5}, {"user": 5, "idle": 9}) == 0.0
    assert utilization({"user": 5, "iowait": 9}, {"user": 7, "iowait": 3}) == 1.0


def test_a_file_system_that_went_read_only_says_so(files, values):
    readonly = os.statvfs_result((4096, 4096, 1, 1, 1, 1, 1, 1, os.ST_RDONLY, 255))
    read = values(DiskCollector(files, statvfs=lambda path: readonly).collect())
    assert read[("host_filesystem_read_only", "/")] == 1


def test_a_named_mount_is_a_collector_of_its_own_and_not_counted_twice(files, values):
    named = MountCollector("/mnt/big disk", files, statvfs=statvfs)
    assert named.name == "mount /mnt/big disk"
    assert values(named.collect())[("host_filesystem_size_bytes", "/mnt/big disk")] == 2000 * 4096
    rest = values(DiskCollector(files, named=["/mnt/big disk"], statvfs=statvfs).collect())
    assert ("host_filesystem_size_bytes", "/mnt/big disk") not in rest

    def gone(path):
        raise OSError(116, "Stale file handle")

    outcome = MountCollector("/scratch", files, statvfs=gone).collect()
    assert (type(outcome), outcome.reason) == (Failed, "/scratch: Stale file handle")
    assert values(outcome) == {("host_filesystem_error", "/scratch"): 1}


def test_disk_whose_file_system_fails_loses_only_that_one(files, values):
    def failing(path):
        if path == "/":
            raise OSError(5, "Input/output error")
        return statvfs(path)

    outcome = DiskCollector(files, statvfs=failing).collect()
    assert (type(outcome), outcome.read_failures, outcome.reason) == (Ok, 1, "/: Input/output error")
    errors = {k[1]: v for k, v in values(outcome).items() if k[0] == "host_filesystem_error"}
    assert errors == {"/": 1, "/mnt/big disk": 0, "/dev/shm": 0}
    assert ("host_filesystem_size_bytes", "/mnt/big disk") in values(outcome)


def test_network_utilization_is_of_links_alone_at_ticks_and_at_glances(files, machine, values):
    clock = FakeClock()
    collector = network(files, clock)
    dev = machine / "proc/net/dev"
    text = dev.read_text()

    def move(received):
        clock.advance(NS_PER_SECOND)
        dev.write_text(text.replace("eth0:401", f"eth0:{401 + received}"))

    def ratios(read):
        return {k: v for k, v in read.items() if "utilization" in k[0]}

    assert ratios(values(collector.collect())) == {}
    move(25_000_000_000 // 8)
    receive, transmit = (f"host_network_{d}_utilization_ratio" for d in ("receive", "transmit"))
    assert ratios(values(collector.collect())) == {(receive, "eth0"): 1.0, (transmit, "eth0"): 0.0}
    move(25_000_000_000 // 8 * 3 // 2)
    assert [(s.metric.removeprefix("pacecar_"), s.value) for s in collector.glance()] == [
        (receive, 0.5),
        (transmit, 0.0),
    ]
    clock.jump_wall(-3600 * NS_PER_SECOND)
    move(25_000_000_000 // 8 * 3 // 2)
    assert ratios(values(collector.collect()))[(receive, "eth0")] == 0.0
    move(0)  # the counter went back: no rate, and the next one starts anew
    assert ratios(values(collector.collect())) == {(transmit, "eth0"): 0.0}


def test_network_without_any_link_does_not_even_read_at_a_glance(machine, failing_files):
    shutil.rmtree(machine / "sys/class/net/eth0/device")
    files = failing_files(None)
    collector = network(files)
    collector.collect()
    before = files.reads
    assert collector.glance() == []
    assert files.reads == before


def test_network_interfaces_are_bounded_and_those_left_out_are_said(files, machine):
    row = ": 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
    (machine / "proc/net/dev").write_text("a\nb\n" + "".join(f"v{i}{row}" for i in range(INTERFACES_MAX + 3)))
    outcome = network(files).collect()
    assert outcome.read_failures == 1
    assert "3 interfaces beyond the first 256" in outcome.reason
    assert len(outcome.samples) == INTERFACES_MAX * 8


def test_zero_is_a_measurement(make, files, machine, values):
    """Every number of the sources set to 0: the same series as before, all of them zero (sizes stay)."""
    before = values(make(files).collect())
    for path in (machine / "proc").rglob("*"):
        if path.is_file() and path.name not in CONSTANT:
            path.write_text("\n".join(zeroed(path.name, line) for line in path.read_text().splitlines()))
    for path in (machine / "sys").rglob("*"):
        if path.is_file() and path.name not in CONSTANT and not path.name.endswith("_label"):
            path.write_text("\n".join(zeroed(path.name, line) for line in path.read_text().splitlines()))
    after = values(make(files).collect())
    assert after.keys() == before.keys()
    for key, value in after.items():
        kept = key[0].startswith(("host_filesystem", "host_clock")) or key[0].endswith("_info") or key[0] in STATES
        assert kept or value == 0, key


CONSTANT = {"mountinfo", "cgroup", "cpulist", "possible", "state", "phys_state", "operstate", "link_layer"} | {
    "hca_type", "fw_ver", "osrelease", "name", ".keep",
}  # fmt: skip
"""Files that hold words and keys, no measurements."""

STATES = {"host_cpus_online", "host_network_up", "rdma_port_active", "rdma_port_link_up"}


def zeroed(name, line):
    """Put 0 for every number of `line` that is a value, not a key."""
    if name == "cpu.max":
        return line if line.startswith("max") else "0 " + line.split()[1]
    words = line.replace("eth0:401", "eth0: 401").replace("\t", " ").split(" ")
    keep = {"diskstats": 3, "meminfo": 2 if line.startswith("Node") else 0}.get(name, 0)
    seen = 0
    out = []
    for word in words:
        seen += word != ""
        if name == "softnet_stat":
            word = "0" * len(word)
        elif seen > keep and word.replace(".", "").replace("/", "").isdigit():
            word = "0/0" if "/" in word else "0"
        elif "=" in word:
            word = word.split("=")[0] + "=0"
        out.append(word)
    return " ".join(out)


def test_missing_source_is_absent(make, files, machine):
    shutil.rmtree(machine / "proc")
    shutil.rmtree(machine / "sys")
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
        (MemoryCollector, "vmstat", "pgmajfault 75", "pgmajfault", 5),
        (TcpCollector, "net/snmp", "Udp: 611 612", "Udp: 611", 6),
        (TcpCollector, "net/netstat", " 628", " -628", 2),
        (TcpCollector, "net/softnet_stat", "000000ff 00000001", "000000ff oops", 2),
        (TcpCollector, "net/sockstat", "mem 635", "mem", 2),
        (cpu, "loadavg", "2/345", "2", 1),
        (system, "sys/fs/file-nr", "641", "641 1", 1),
        (system, "sys/kernel/pid_max", "644", "unlimited", 1),
        (system, "sys/net/netfilter/nf_conntrack_max", "646", "-1", 1),
        (HwmonCollector, "../sys/class/hwmon/hwmon2/fan1_input", "4206", "4206 rpm", 1),
        (cpu, "../sys/devices/system/node/node1/cpulist", "3", "3-x", 1),
        (cpu, "../sys/devices/system/cpu/cpufreq/policy1/scaling_cur_freq", "24", "<unknown> 24", 1),
        (MemoryCollector, "../sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "11", "many", 1),
        (NumaCollector, "../sys/devices/system/node/node1/meminfo", "4000 kB", "4000", 1),
        (NumaCollector, "../sys/devices/system/node/node0/numastat", "numa_miss 1001", "numa_miss ?", 2),
        (network, "../sys/class/net/eth0/mtu", "9000", "-9000", 1),
        (network, "../sys/class/net/eth0/operstate", "up", "UP", 1),
        (rdma, "../sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", "1002", "1002 words", 1),
        (rdma, "../sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE", "ACTIVE", 1),
        (rdma, "../sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec", "400 Mb/sec", 1),
        (cgroup, "4242/cgroup", "0::/pods", "pods", 1),
        (cgroup, "../sys/fs/cgroup/pods/pod7/cpu.max", "250000 100000", "250000", 1),
        (cgroup, "../sys/fs/cgroup/pods/pod7/memory.max", "8000000", "8 MB", 1),
        (cgroup, "../sys/fs/cgroup/pods/pod7/box1/memory.events", "max 726", "max x", 3),
        (disk, "diskstats", "201 202", "2O1 202", 4),
        (disk, "self/mountinfo", " - ext4 /dev/sda1 rw\n28", " ext4\n28", 2),
        (network, "net/dev", "301 302 303", "301 302", 3),
    ],
)
def test_a_malformed_row_is_a_read_failure_that_names_file_and_line_and_keeps_the_rest(
    make, path, line, bad, number, files, machine, values
):
    source = (machine / "proc" / path).resolve()
    whole = values(make(files).collect())
    assert line in source.read_text()
    source.write_text(source.read_text().replace(line, bad, 1))
    outcome = make(files).collect()
    assert isinstance(outcome, Ok)
    assert outcome.read_failures == 1
    assert f"{source}:{number}: " in outcome.reason
    partial = values(outcome)
    assert partial
    assert partial.items() <= whole.items() or path == "self/mountinfo"


def test_any_one_read_may_fail_and_the_others_still_count(make, failing_files, values):
    """For every n: the n-th read fails, the outcome counts and names the error, and the next collect is without."""
    probe = failing_files(None)
    everything = values(make(probe).collect())
    assert probe.reads > 0
    for n in range(1, probe.reads + 1):
        files = failing_files(n)
        collector = make(files)
        outcome = collector.collect()
        assert outcome.read_failures == 1 or isinstance(outcome, Failed)
        assert "Input/output error" in outcome.reason
        assert values(outcome).items() <= everything.items()
        assert (collector.collect().read_failures, collector.collect().reason) == (0, "")


def test_own_figures_are_those_of_this_process(values):
    read = values(DaemonProcessCollector().collect())
    assert read[("daemon_cpu_seconds_total",)] > 0
    assert read[("daemon_resident_memory_bytes",)] > 1_000_000
    assert read[("daemon_threads",)] >= 1
    assert read[("daemon_open_files",)] >= 3


def test_own_figures_of_a_process_that_cannot_be_read_are_failed():
    class Gone(psutil.Process):
        def num_fds(self):
            raise psutil.NoSuchProcess(1)

    outcome = DaemonProcessCollector(Gone()).collect()
    assert isinstance(outcome, Failed)
    assert "no longer exists" in outcome.reason


def test_this_machine_itself_can_be_read():
    """The recorded machine is only as good as our idea of /proc; the kernel under this test is real."""
    for make in (CpuCollector, MemoryCollector, network, TcpCollector, SystemCollector, cgroup):
        assert (type(outcome := make(KernelFiles()).collect()), outcome.reason) == (Ok, "")
    for make in (NumaCollector, rdma, HwmonCollector, lambda files: DiskCollector(files)):
        assert not isinstance(make(KernelFiles()).collect(), Failed)


def test_system_is_read_rarely_and_served_always(failing_files, values):
    files = failing_files(None)
    collector = system(files)
    read = values(collector.collect())
    once = files.reads
    for _ in range(SYSTEM_TICKS - 1):
        assert values(collector.collect()) == read
    assert files.reads == once
    collector.collect()
    assert once < files.reads < 2 * once  # kernel and distribution are not read again so soon


def test_the_distribution_is_that_of_process_1_and_never_that_of_an_image(files, machine, values):
    def distribution():
        (key,) = (key for key in values(system(files).collect()) if key[0] == "host_os_info")
        return key[3:]

    mounts = machine / "proc/self/mountinfo"
    text = mounts.read_text()
    mounts.write_text(text.replace("/ / rw,relatime shared:1 - ext4 /dev/sda1", "/ / rw,relatime shared:1 - overlay o"))
    assert distribution() == ("", "")
    of_init = machine / "proc/1/root/etc/os-release"
    of_init.parent.mkdir(parents=True)
    of_init.write_text("ID='rocky'\nVERSION_ID=9.4\nnot a variable\n")
    assert distribution() == ("rocky", "9.4")


@pytest.mark.parametrize(("number", "failures"), [(errno.EPERM, 0), (errno.ENOSYS, 0), (errno.EINVAL, 1)])
def test_a_sandbox_that_keeps_the_clock_to_itself_is_no_failure(files, values, number, failures):
    def refuses():
        raise OSError(number, os.strerror(number))

    found = SystemCollector(files, clock=refuses).collect()
    assert (type(found), found.read_failures) == (Ok, failures)
    assert not [key for key in values(found) if key[0].startswith("host_clock")]


def test_the_clock_of_this_machine_answers():
    """Set by nobody here: the kernel's own bounds hold."""
    state = read_clock()
    assert abs(state.offset_ns) <= NS_PER_SECOND  # the kernel takes no larger one
    assert 0 <= state.max_error_ns <= 17 * NS_PER_SECOND
    assert state.estimated_error_ns >= 0


def test_a_machine_in_the_cold_has_a_temperature_below_zero(files, machine, values):
    (machine / "sys/class/hwmon/hwmon2/temp1_input").write_text("-5009\n")
    read = values(HwmonCollector(files).collect())
    assert read[("host_sensor_temperature_celsius", "board", "hwmon2", "temp1")] == -5009


def test_a_disk_without_a_limit_has_none_of_65_000_degrees(files, machine, values):
    (machine / "sys/class/hwmon/hwmon1/temp1_max").write_text("65261850\n")
    outcome = HwmonCollector(files).collect()
    assert isinstance(outcome, Ok)
    limits = {key[1] for key in values(outcome) if key[0] == "host_sensor_temperature_limit_celsius"}
    assert limits == {"coretemp"}


def test_hwmon_is_read_rarely_and_searched_more_rarely(failing_files, values):
    files = failing_files(None)
    collector = HwmonCollector(files)
    read = values(collector.collect())
    first = files.reads
    for _ in range(READ_TICKS - 1):
        assert values(collector.collect()) == read
    assert files.reads == first
    assert values(collector.collect()) == read
    assert files.reads - first == 7  # one a sensor, and none of names or labels


def test_a_machine_without_sensors_says_why_at_every_tick(tmp_path):
    collector = HwmonCollector(KernelFiles(tmp_path / "proc", tmp_path / "sys"))
    reasons = {collector.collect().reason for _ in range(READ_TICKS + 1)}
    assert reasons == {f"{tmp_path}/sys/class/hwmon: No such file or directory"}


def test_a_sensor_that_has_no_value_now_is_no_failure_and_comes_back(files, machine, values):
    class Asleep(KernelFiles):
        number = errno.ENODATA

        def read(self, path):
            if path.name == "fan1_input" and self.number:
                raise OSError(self.number, os.strerror(self.number))
            return super().read(path)

    asleep = Asleep(files.proc, files.sys)
    collector = HwmonCollector(asleep)
    fan = ("host_sensor_fan_rpm", "board", "hwmon2", "FAN A")
    outcome = collector.collect()
    assert isinstance(outcome, Ok)
    assert fan not in values(outcome)
    asleep.number = 0
    assert [fan in values(collector.collect()) for _ in range(READ_TICKS)][-1]


def test_sensors_are_bounded_and_those_left_out_are_said(files, machine):
    folder = machine / "sys/class/hwmon/hwmon2"
    for number in range(2, SENSORS_MAX + 2):
        (folder / f"temp{number}_input").write_text("1000\n")
    outcome = HwmonCollector(files).collect()
    assert outcome.read_failures == 1
    assert f"sensors beyond the first {SENSORS_MAX} left out" in outcome.reason
    assert len(outcome.samples) <= SENSORS_MAX


def test_rdma_utilization_at_ticks_and_glances(files, machine, values):
    clock = FakeClock()
    collector = rdma(files, clock)
    collector.collect()
    data = machine / "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data"
    key = ("rdma_receive_utilization_ratio", "mlx5_0", "1")
    clock.advance(NS_PER_SECOND)
    data.write_text(f"{1001 + 50_000_000_000 // 4}\n")
    read = values(collector.collect())
    assert read[key] == 1.0
    assert read[("rdma_transmit_utilization_ratio", "mlx5_0", "1")] == 0.0
    clock.advance(NS_PER_SECOND)
    data.write_text(f"{1001 + 50_000_000_000 // 4 * 5 // 4}\n")
    glanced = {(s.metric.removeprefix("pacecar_"), *s.labels): s.value for s in collector.glance()}
    assert glanced[key] == 0.25
    assert len(glanced) == 6


def test_rdma_glance_at_an_unreadable_file_loses_one_value(machine, failing_files):
    clock, files = FakeClock(), failing_files(None)
    collector = rdma(files, clock)
    collector.collect()
    for n in range(1, 7):
        clock.advance(NS_PER_SECOND)
        files.fail_at = files.reads + n
        assert len(collector.glance()) == 5


def test_rdma_port_without_counters_has_none(files, machine, values):
    """What mlx4 answers for a port that has no performance counters."""
    for name in ("port_rcv_data", "symbol_error"):
        (machine / "sys/class/infiniband/mlx5_0/ports/1/counters" / name).write_text("N/A (no PMA)\n")
    outcome = rdma(files).collect()
    assert isinstance(outcome, Ok)
    read = values(outcome)
    assert ("rdma_receive_bytes_total", "mlx5_0", "1") not in read
    assert ("rdma_transmit_bytes_total", "mlx5_0", "1") in read


def test_rdma_devices_that_come_and_go_are_found_at_once_and_new_files_after_a_while(files, machine, values):
    root = machine / "sys/class/infiniband"
    collector = rdma(files)
    collector.collect()
    (root / "mlx5_1").rename(machine / "away")
    assert {key[1] for key in values(collector.collect())} == {"mlx5_0", "efa_0"}
    (machine / "away").rename(root / "mlx5_1")
    assert {key[1] for key in values(collector.collect())} == {"mlx5_0", "mlx5_1", "efa_0"}
    (root / "mlx5_0/ports/1/counters/VL15_dropped").write_text("5\n")
    seen = [
        ("rdma_errors_total", "mlx5_0", "1", "VL15_dropped") in values(collector.collect()) for _ in range(FIND_TICKS)
    ]
    assert seen[-1]
    assert seen == sorted(seen)


V1 = {
    "proc/self/mountinfo": (
        "32 31 0:29 /docker/ab /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 /docker/ab /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    ),
    "proc/self/cgroup": "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n1:name=systemd:/docker/ab\n0::/docker/ab\n",
    "proc/4242/cgroup": "4:memory:/docker/ab/job\n3:cpu,cpuacct:/docker/ab/job\n0::/\n",
    "proc/4243/cgroup": "4:memory:/docker/other\n3:cpu,cpuacct:/docker/other\n0::/\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 11\nnr_throttled 12\nthrottled_time 13\n",
    "sys/fs/cgroup/cpu,cpuacct/cpuacct.usage": "14\n",
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/job/cpuacct.usage": "15\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "16\n",
    "sys/fs/cgroup/memory/memory.failcnt": "17\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 18\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1900\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "19\n",
}
"""A container on a v1 host, in which only its own part of each hierarchy is mounted, and v2 beside it without use."""


def test_cgroup_v1_values_and_groups_of_which_we_see_no_folder(tmp_path, values):
    for path, text in V1.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    outcome = cgroup(KernelFiles(tmp_path / "proc", tmp_path / "sys")).collect()
    assert isinstance(outcome, Ok)
    read = values(outcome)
    own, job = ("/docker/ab",), ("/docker/ab/job",)
    assert {key[0].removeprefix("cgroup_"): value for key, value in read.items() if key[1:] == own} == {
        "cpu_limit_cpus": 3.0,
        "cpu_periods_total": 11,
        "cpu_throttled_periods_total": 12,
        "cpu_throttled_seconds_total": 13,
        "cpu_seconds_total": 14,
        "memory_used_bytes": 16,  # and no limit: v1 writes a number that means none
        "memory_limit_hits_total": 17,
        "oom_kills_total": 18,
    }
    assert {key[0].removeprefix("cgroup_"): value for key, value in read.items() if key[1:] == job} == {
        "cpu_limit_cpus": 3.0,
        "cpu_periods_total": 11,
        "cpu_throttled_periods_total": 12,
        "cpu_throttled_seconds_total": 13,
        "cpu_seconds_total": 15,
        "memory_limit_bytes": 1900,
        "memory_used_bytes": 19,
    }
    assert not [key for key in read if key[1:] == ("/docker/other",)]


def test_cgroup_of_a_process_that_ended_is_no_failure(files, machine, values):
    shutil.rmtree(machine / "proc/4243")
    outcome = cgroup(files).collect()
    assert isinstance(outcome, Ok)
    assert len([key for key in values(outcome) if key[0] == "cgroup_member_info"]) == 2


def test_cgroups_are_bounded_and_those_left_out_are_said(files, machine):
    ranks = []
    for n in range(GROUPS_MAX + 5):
        (machine / f"proc/{n}").mkdir()
        (machine / f"proc/{n}/cgroup").write_text(f"0::/pods/{n}\n")
        ranks.append(CgroupMember(str(n), "rank", "run-7", str(n)))
    outcome = CgroupCollector(files, lambda: ranks).collect()
    assert outcome.read_failures == 1
    assert f"groups beyond the first {GROUPS_MAX} left out" in outcome.reason


def test_rates_span_at_least_their_span_and_start_anew_after_a_reset():
    rates = Rates()
    assert rates.per_second(("a",), 100, 0) is None
    assert rates.per_second(("a",), 200, NS_PER_SECOND) == 100.0
    short = NS_PER_SECOND + SPAN_NS // 5
    assert rates.per_second(("a",), 202, short) == 102 * NS_PER_SECOND / short  # not 2 in a hundredth of a second
    assert rates.per_second(("a",), 300, 2 * NS_PER_SECOND) == 100.0
    assert rates.per_second(("a",), 300, 3 * NS_PER_SECOND) == 0.0
    assert rates.per_second(("a",), 5, 4 * NS_PER_SECOND) is None
    assert rates.per_second(("a",), 6, 5 * NS_PER_SECOND) == 1.0
    rates.keep({"b"})
    assert rates.per_second(("a",), 7, 6 * NS_PER_SECOND) is None


def test_a_text_that_did_not_change_is_parsed_once_and_one_with_a_failure_each_time(tmp_path):
    path, before, parsed = tmp_path / "mountinfo", ParsedLines(), []

    def parse(line):
        parsed.append(line)
        return int(line)

    def read(text):
        parsed.clear()
        path.write_text(text)
        reading = SourceReading(KernelFiles(tmp_path, tmp_path))
        return reading.lines(path, parse, before=before), reading.failures, list(parsed)

    assert read("1\n2\n") == ([1, 2], 0, ["1", "2"])
    assert read("1\n2\n") == ([1, 2], 0, [])
    for _ in range(2):
        assert read("1\nx\n") == ([1], 1, ["1", "x"])
    assert read("1\n2\n") == ([1, 2], 0, [])
    assert read("") == ([], 0, [])
    assert read("3\n") == ([3], 0, ["3"])
