"""One GPU at a time: what is asked of it, how often, and what the answers mean.

In come answers of the driver (NVML), out go samples of one GPU and of its health.
Start with `device` (one GPU) and `gpu_state` (its thread and health); `pacecar.monitor.collectors.gpu` runs them.
"""
