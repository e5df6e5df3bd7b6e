"""Builds the rows of the dashboard "pacecar / Node" about processors, memory, NUMA, disks and control groups.

A training job waits for its host in four ways: a data loader gets no processor, memory swaps, a disk is full or slow,
or a container reaches its limit, which looks like an idle machine from outside.
"""

from __future__ import annotations

from ..palette import BAD, WARN
from ..panels import Query, Section, columns, look, table, time_series
from ..queries import JOB, LAUNCH, NODE, ON_NODES, RANK, combine, divide

__all__ = ["cgroup_section", "disk_section", "host_section", "memory_section", "numa_section"]

NO_NODE = "No daemon is scraped there"
NO_NUMA = "This node has one NUMA node, or the kernel does not report them"
NO_DISK = "No disk on this node"
NO_CGROUP = "No control group of a rank on this node"
_ON = f"{{{{{NODE}}}}}"
_RIGHT = {"custom__axisPlacement": "right"}

select, rate, increase = ON_NODES.select, ON_NODES.rate, ON_NODES.increase


def _where(text: str) -> str:
    return f"{_ON} {text}"


def host_section() -> Section:
    """Return the row about processors and the tasks that wait for them."""
    return Section("Host", [
        (8, 7, time_series("CPU", "Share of CPU time not idle nor waiting for I/O. Data loading and gloo compete "
            "here with the training threads.", [Query(select("pacecar_host_cpu_utilization_ratio"), _ON)],
            unit="percentunit", limit=1.0, empty=NO_NODE)),
        (8, 7, time_series("CPU by mode", "Busy processors by mode, without idle; the top line is the number of "
            "processors.", [
                Query(rate("pacecar_host_cpu_seconds_total", {"mode": "!=idle"}), _where("{{mode}}")),
                Query(select("pacecar_host_cpus_online"), _where("processors")),
            ], unit="none", empty=NO_NODE)),
        (8, 7, time_series("Pressure", "Share of time that tasks stalled on a resource (PSI): some of them, or all.",
            [Query(rate("pacecar_host_pressure_stalled_seconds_total"), _where("{{resource}} {{kind}}"))],
            unit="percentunit", limit=1.0, empty="This kernel keeps no pressure counters")),
        (8, 7, time_series("Load and tasks", "Load averages; runnable tasks, and tasks that wait for I/O.", [
                Query(select("pacecar_host_load_average"), _where("{{window}}")),
                Query(select("pacecar_host_tasks_runnable"), _where("runnable")),
                Query(select("pacecar_host_tasks_blocked"), _where("blocked")),
            ], unit="none", empty=NO_NODE)),
        (8, 7, time_series("Clocks of the processors", "Slowest and mean processor, and the limit of the slowest. A "
            "governor that saves power delays launches.", [
                Query(select("pacecar_host_cpu_frequency_min_hertz"), _where("slowest")),
                Query(select("pacecar_host_cpu_frequency_mean_hertz"), _where("mean")),
                Query(select("pacecar_host_cpu_frequency_limit_hertz"), _where("limit")),
            ], unit="hertz", empty="This node does not report its clocks (virtual machines mostly do not)")),
        (8, 7, time_series("Switches and interrupts", "Context switches and interrupts per second; new processes on "
            "the right.", [
                Query(rate("pacecar_host_context_switches_total"), _where("switches")),
                Query(rate("pacecar_host_interrupts_total"), _where("interrupts")),
                Query(rate("pacecar_host_forks_total"), _where("forks")),
            ], unit="cps", empty=NO_NODE, overrides=[look(".* forks", regex=True, **_RIGHT)])),
    ])  # fmt: skip


def memory_section() -> Section:
    """Return the row about memory and swap."""
    left = divide(select("pacecar_host_memory_available_bytes"), select("pacecar_host_memory_size_bytes"))
    kinds = [
        Query(select(f"pacecar_host_memory_{kind}_bytes"), _where(words))
        for kind, words in (
            ("shared", "shared, /dev/shm"), ("dirty", "waits for the disk"), ("writeback", "on its way to the disk"),
            ("unevictable", "pinned"), ("transparent_huge", "in huge pages"),
        )
    ]  # fmt: skip
    return Section("Memory", [
        (8, 7, time_series("Memory left", "Share of memory available without swapping.",
            [Query(left, _ON)], unit="percentunit", limit=1.0, empty=NO_NODE)),
        (8, 7, time_series("Memory", "Used, page cache, available, and size.", [
                Query(select("pacecar_host_memory_used_bytes"), _where("used")),
                Query(select("pacecar_host_memory_cached_bytes"), _where("cached")),
                Query(select("pacecar_host_memory_available_bytes"), _where("available")),
                Query(select("pacecar_host_memory_size_bytes"), _where("size")),
            ], unit="bytes", empty=NO_NODE)),
        (8, 7, time_series("Kinds of memory", "Data loaders pass batches in shared memory; copies to devices start "
            "from pinned memory.", kinds, unit="bytes", empty=NO_NODE)),
        (8, 7, time_series("Swap", "Swap in use; swapping alone makes a training job slow.", [
                Query(select("pacecar_host_swap_used_bytes"), _where("used")),
                Query(select("pacecar_host_swap_size_bytes"), _where("size")),
            ], unit="bytes", empty=NO_NODE)),
        (8, 7, time_series("Swapping", "Bytes per second to and from swap; page faults that waited for a disk on the "
            "right.", [
                Query(rate("pacecar_host_swap_in_bytes_total"), _where("read back")),
                Query(rate("pacecar_host_swap_out_bytes_total"), _where("written")),
                Query(rate("pacecar_host_major_page_faults_total"), _where("faults")),
            ], unit="Bps", empty=NO_NODE, overrides=[look(".* faults", regex=True, unit="cps", **_RIGHT)])),
        (8, 7, time_series("Killed for want of memory", "Processes that the kernel killed, in the window. Often it is "
            "a data loader's, and the job fails later with another error.",
            [Query(increase("pacecar_host_oom_kills_total"), _ON)], unit="none", empty=NO_NODE)),
        (8, 7, time_series("Memory of processes and kernel", "Memory of processes and kernel; requested memory may "
            "exceed the total, because not all of it is used.", [
                Query(select(f"pacecar_host_memory_{kind}_bytes"), _where(words)) for kind, words in (
                    ("anonymous", "of processes"), ("mapped", "mapped files"), ("slab", "the kernel's objects"),
                    ("page_tables", "page tables"), ("committed", "asked for"))
            ], unit="bytes", empty=NO_NODE)),
        (8, 7, time_series("Page faults", "Page faults per second; on the right, memory that the kernel retired "
            "because it is faulty.", [
                Query(rate("pacecar_host_page_faults_total"), _where("faults")),
                Query(select("pacecar_host_memory_corrupted_bytes"), _where("faulty memory")),
            ], unit="cps", empty=NO_NODE, overrides=[look(".* memory", regex=True, unit="bytes", **_RIGHT)])),
        (8, 7, time_series("Huge pages", "Pool of huge pages and its free part, by page size.", [
                Query(select("pacecar_host_hugepages_size_bytes"), _where("{{page}} pool")),
                Query(select("pacecar_host_hugepages_free_bytes"), _where("{{page}} free")),
            ], unit="bytes", empty="This kernel has no pool of huge pages")),
    ], collapsed=True)  # fmt: skip


def numa_section() -> Section:
    """Return the row about NUMA nodes."""
    node = _where("NUMA {{numa_node}}")
    return Section("NUMA", [
        (8, 7, time_series("CPU by NUMA node", "Share of each NUMA node's CPU time in use. If one is full and one "
            "idle, the job is not spread over the processors.",
            [Query(select("pacecar_host_numa_cpu_utilization_ratio"), node)],
            unit="percentunit", limit=1.0, empty=NO_NUMA)),
        (8, 7, time_series("Memory by NUMA node", "Free memory of each NUMA node, and its size.", [
                Query(select("pacecar_host_numa_memory_free_bytes"), f"{node} free"),
                Query(select("pacecar_host_numa_memory_size_bytes"), f"{node} size"),
            ], unit="bytes", empty=NO_NUMA)),
        (8, 7, time_series("Pages from afar", "Pages per second allocated on a NUMA node that the task did not run on "
            "or want.",
            [Query(rate("pacecar_host_numa_pages_total", {"outcome": "=~miss|foreign|other"}),
                   f"{node} {{{{outcome}}}}")],
            unit="cps", empty=NO_NUMA)),
        (24, 6, time_series("CPU by NUMA node and mode", "Busy processors of each NUMA node by mode, without "
            "idle.", [Query(rate("pacecar_host_numa_cpu_seconds_total", {"mode": "!=idle"}), f"{node} {{{{mode}}}}")],
            unit="none", empty=NO_NUMA)),
    ], collapsed=True)  # fmt: skip


def disk_section() -> Section:
    """Return the row about disks and file systems."""
    free = divide(select("pacecar_host_filesystem_available_bytes"), select("pacecar_host_filesystem_size_bytes"))
    files = divide(select("pacecar_host_filesystem_files_free"), select("pacecar_host_filesystem_files"))
    wait = divide(
        f"({rate('pacecar_host_disk_read_seconds_total')} + {rate('pacecar_host_disk_write_seconds_total')})",
        f"({rate('pacecar_host_disk_reads_total')} + {rate('pacecar_host_disk_writes_total')})",
    )
    return Section("Disks and file systems", [
        (8, 7, time_series("File systems", "Free share of each file system; checkpoints fail at zero.",
            [Query(free, _where("{{mountpoint}}"))], unit="percentunit", limit=1.0, empty=NO_NODE)),
        (8, 7, time_series("Files left", "Free share of files (inodes); 1 for a file system that is mounted read-only, "
            "as after an error, or not readable.", [
                Query(files, _where("{{mountpoint}}")),
                Query(select("pacecar_host_filesystem_read_only"), _where("{{mountpoint}} read-only")),
                Query(select("pacecar_host_filesystem_error"), _where("{{mountpoint}} not readable")),
            ], unit="percentunit", limit=1.0, empty=NO_NODE,
            overrides=[look(".* (read-only|not readable)", regex=True, unit="none")])),
        (8, 7, time_series("Disk", "Bytes per second by device.", [
                Query(rate("pacecar_host_disk_read_bytes_total"), _where("{{device}} read")),
                Query(rate("pacecar_host_disk_written_bytes_total"), _where("{{device}} written")),
            ], unit="Bps", empty=NO_DISK)),
        (8, 7, time_series("Disk operations", "Reads and writes per second; on the right, the share of time with I/O "
            "in flight.", [
                Query(rate("pacecar_host_disk_reads_total"), _where("{{device}} reads")),
                Query(rate("pacecar_host_disk_writes_total"), _where("{{device}} writes")),
                Query(rate("pacecar_host_disk_busy_seconds_total"), _where("{{device}} busy")),
            ], unit="iops", empty=NO_DISK,
            overrides=[look(".* busy", regex=True, unit="percentunit", **_RIGHT)])),
        (8, 7, time_series("Time of an operation", "Mean time of a read or write; absent without any.",
            [Query(wait, _where("{{device}}"))], unit="s", empty="No disk of this node was in use")),
        (8, 7, time_series("Queue", "Requests in flight now, and their mean over the window.", [
                Query(select("pacecar_host_disk_requests_in_flight"), _where("{{device}} now")),
                Query(rate("pacecar_host_disk_queue_seconds_total"), _where("{{device}} mean")),
            ], unit="none", empty=NO_DISK)),
    ], collapsed=True)  # fmt: skip


def cgroup_section() -> Section:
    """Return the row about control groups: the limits of containers."""
    group = _where("{{cgroup}}")
    used = divide(rate("pacecar_cgroup_cpu_seconds_total"), select("pacecar_cgroup_cpu_limit_cpus"))
    stopped = divide(rate("pacecar_cgroup_cpu_throttled_periods_total"), rate("pacecar_cgroup_cpu_periods_total"))
    memory = divide(select("pacecar_cgroup_memory_used_bytes"), select("pacecar_cgroup_memory_limit_bytes"))
    members = (NODE, "cgroup", "member", JOB, LAUNCH, RANK)
    return Section("Containers and their limits", [
        (8, 7, time_series("CPU of the limit", "CPU time as a share of the group's limit. At one it is throttled.",
            [Query(used, group)], unit="percentunit", empty="No control group here has a CPU limit",
            thresholds=[(1.0, BAD)])),
        (8, 7, time_series("Stopped by the limit", "Share of periods in which the CPU limit throttled the group, and "
            "seconds per second for which its tasks stood still: a slow job on an idle machine.", [
                Query(stopped, f"{group} periods"),
                Query(rate("pacecar_cgroup_cpu_throttled_seconds_total"), f"{group} time"),
            ], unit="percentunit", empty="No control group here has a CPU limit", thresholds=[(0.05, WARN)])),
        (8, 7, time_series("Memory of the limit", "Memory, with page cache, as a share of the group's limit.",
            [Query(memory, group)], unit="percentunit",
            empty="No control group here has a memory limit", thresholds=[(0.95, WARN)])),
        (8, 7, time_series("CPU of the groups", "Processors that each group keeps busy.",
            [Query(rate("pacecar_cgroup_cpu_seconds_total"), group)], unit="none", empty=NO_CGROUP)),
        (8, 7, time_series("Limits hit", "Times that a group ran into its memory limit, and processes killed for it, "
            "in the window.", [
                Query(increase("pacecar_cgroup_memory_limit_hits_total"), f"{group} hits"),
                Query(increase("pacecar_cgroup_oom_kills_total"), f"{group} killed"),
            ], unit="none", empty=NO_CGROUP)),
        (8, 7, table("Who is in which group", "Ranks of jobs, and the daemon itself.",
            [Query(combine("max", select("pacecar_cgroup_member_info"), *members), "", instant=True)],
            empty=NO_CGROUP, transformations=columns(*members))),
    ], collapsed=True)  # fmt: skip
