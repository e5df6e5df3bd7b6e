"""Reads and parses the kernel's files about a machine and its processes: /proc, /sys and control groups.

In: the roots, which tests and containers choose.  Out: text and parsed values.  Callers decide what to do about missing
or malformed files, because a collector, the doctor and a job need different answers.
Start with `reader`.  The other modules are pure, except `link_speeds`, which also finds active RDMA ports.

    reader        text, names, whole numbers, one row of a file; the errors that mean "not there"
    processors    CPU lists, NUMA nodes, run delay, pressure; are there more tasks than processors?
    memory        /proc/meminfo and files of the same form
    mounts        lines of /proc/PID/mountinfo
    link_speeds   speed of interfaces; state and rate of RDMA ports
    cgroups       the control group of a process, its parents, its limits

Left out: whether a path can be trusted (`path_walk`), and files with a single reader, which parses them itself.
"""
