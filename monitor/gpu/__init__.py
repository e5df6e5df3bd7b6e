"""Reads one GPU at a time: what to ask, how often, and what the answers mean.

In come answers of the driver (NVML), out go samples of one GPU and of its health.  Start with `device` (one GPU) and
`gpu_state` (its readings and health); `pacecar.monitor.collectors.gpu` runs them.

    driver, nvml      the driver as the rest of the code sees it; only `nvml` knows pynvml
    driver_session    opens the driver and finds the GPUs
    driver_thread     makes driver calls, which may hang for 45 s, on other threads
    call_deadlines    how long each call may take, so that a slow driver is not called dead
    queries           at most 12 driver calls a GPU and tick; totals that never fall; derived numbers
    health_source     the verdict on each GPU (`pacecar.gpu_health`), from what ticks read
    known_gpus        which GPUs this node had, to notice one that is missing after a boot
    xid               Xid errors from two sources, each counted once
    change_log        one log line for a change that several GPUs share
"""
