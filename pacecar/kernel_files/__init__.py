"""Reads the files that the kernel keeps about a machine and its processes: /proc, /sys and control groups.

In come the roots, which tests and containers give, out go text and what it says; what is missing or malformed is the
caller's to judge, because a collector, the doctor and a job do different things about it.
Start with `reader`; the others are pure but for `network`, which also finds the RDMA ports that are in use.

    reader        text, names, whole numbers, one row of a file; which errors say that something is not there
    processors    CPU lists, NUMA nodes, run delay, pressure
    contention    does more want to run than there are processors?  One rule for the doctor and a running job
    memory        /proc/meminfo and files of its form
    network       speed of interfaces; state and rate of RDMA ports
    cgroups       which control group a process is in, its parents, its limits

Left out: who may have put a file there (`path_walk`), and files of one reader alone, which that reader parses.
"""
