"""The collectors, one file per source: processors, memory, disks, network, TCP, system, sensors, RDMA, cgroups, GPUs.

In come files of the kernel and answers of the driver, out go samples.  The parser is apart from the reader, and the
roots of /proc and /sys are passed in; `pacecar.kernel_files` reads, and parses what other rooms read as well.  An
outcome is ok, absent (healthy) or failed, and one bad line costs one sample.
Start with `source_reader`, the types that all share, and `cpu`, a typical collector.

`identity` finds the container, pod and Slurm job of ranks and GPU processes (by `jobs.cgroup_identity`, which is pure);
`cgroup_mounts` finds the host's control groups from inside a container; `clock_sync` asks the kernel for the state of
its clock; `rates` makes rates of counters.
`sampling.collector_registry` lists all collectors.
"""
