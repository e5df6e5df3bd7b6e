"""One GPU at a time: what is asked of it, how often, and what the answers mean.

In come answers of the driver (NVML), out go samples of one GPU and of its health.
Start with `device` (one GPU) and `gpu_state` (its readings and health); `pacecar.monitor.collectors.gpu` runs them.

    driver, nvml                the driver as all others see it; `nvml` is the only file that knows pynvml
    driver_session              opens the driver and finds the GPUs
    driver_thread               calls on threads that nobody waits for longer than he wants: any may hang for 45 s
    call_deadlines              how long each call may take: a slow driver is not called dead
    queries                     at most 12 driver calls a GPU and tick (and one a glance where PCIe counters of 32 bits
                                wrap); totals that never fall; what the driver does not report
    health_source               the verdict on each GPU (`pacecar.gpu_health`), from what ticks read
    known_gpus                  which GPUs this node had, so that one that does not come back after a boot is missed
    xid, xid_sources, xid_news  Xid errors from two sources, each counted once; one log line for what hits all GPUs
"""
