"""How well the device is used: FLOPs, MFU, memory, peaks.

In come operators and the device's properties, out go vitals of a step.
Start with `model_flops_utilization`.
"""
