"""Measures how well the job uses its device: FLOPs, MFU, memory and checkpoints.

In: a model's forwards, the device's name and allocator, finished steps.
Out: one `Vitals` record every few steps.
Start at `model_flops_utilization.UtilizationMeter`; `step_flops` counts each input shape once, with the dispatch mode
in `flop_counter`; `device_peaks` has data-sheet peaks, `allocator_memory` the memory that torch holds on the device.
"""
