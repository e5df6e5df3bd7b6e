"""Holds the collectors, one file per source.

They read processors, memory, disks, network, TCP, system, sensors, RDMA, cgroups and GPUs.  Kernel files and answers of
the driver come in, samples go out.  Parsers are separate from readers, and the roots of /proc and /sys are passed in;
`pacecar.kernel_files` reads, and parses what other rooms read too.  An outcome is ok, absent (healthy) or failed, and
one bad line loses one sample.
Start with `source_reader`, the types that all collectors share, and `cpu`, a typical collector.

`identity` finds the container, pod and Slurm job of ranks and GPU processes (by the pure `jobs.cgroup_identity`);
`cgroup_mounts` finds the host's control groups from inside a container; `clock_sync` asks the kernel how well its clock
is synchronized; `rates` computes rates of counters.  `sampling.collector_registry` lists all collectors.

To add a collector, in this order (one number of /proc/sys is only a row of `COUNTS` in `system`):

1. Its metrics, by the recipe in `pacecar/metrics/__init__.py`, up to `make dashboards`.
2. A module here like `numa` or `cpu`: a class with `name` and `collect() -> Outcome` (the `Collector` of
   `source_reader`), a separate parser, roots passed in, and a bound on repeated items (`SourceReading.first`).  What
   other rooms read too is parsed in `pacecar/kernel_files/`.
3. Its subject in the list above; a line in `default_collectors` of `monitor/sampling/collector_registry.py`.
4. Its name in the row `disable` of `docs/configuration.md`, in the registry's order.
5. Its files in `tests/machines/training_host.txt`, with a different number in every field.
6. `tests/monitor/test_host_collectors.py`: a line in `COLLECTORS` (which tests zeroes, a missing and an unreadable
   source), its values, a malformed line that is a read failure (or a test of its own, if it reads a single file and so
   fails as a whole), the bound, and whether this machine must have it (`test_this_machine_itself_can_be_read`).
7. `tests/monitor/test_golden.py`: a line in the fixture `collectors`; then write the golden page.
"""
