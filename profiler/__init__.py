"""Measures a training job from inside its processes, and analyzes traces that torch's profiler wrote.

`hook/` notes phases and steps and makes records; `timing/` times phases and keeps the overhead budget; `windows/`
profiles single steps; `ledger/` attributes time; `utilization/` counts FLOPs and memory; `ranks/` compares ranks;
`transport/` carries records; `trace/` reads trace files, `causal/` models what all ranks waited for, and
`analysis/` answers from both.  See ARCHITECTURE.md.
"""
