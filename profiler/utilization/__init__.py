"""Measures how well the device is used: FLOPs, MFU, memory and checkpoints.

In: a model's forwards, the device's name and allocator, finished steps.
Out: one `Vitals` record every few steps.
Start at `model_flops_utilization.UtilizationMeter`; `step_flops` counts each input shape once, by the dispatch mode in
`flop_counter`; `device_peaks` has the peaks of data sheets, `allocator_memory` what torch holds of the device.
"""
