"""The collectors, one file per source: processors, memory, NUMA, disks, network, TCP, RDMA, control groups, GPUs.

In come files of the kernel and answers of the driver, out go samples.
Start with `source_reader`, the types that all share, and `cpu`, a typical collector.
"""
