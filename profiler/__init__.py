"""Measures a training job from inside its processes.

`hook/` notes phases and steps and makes records; `timing/` times phases and keeps the overhead budget; `windows/`
profiles single steps and estimates the others; `utilization/` counts FLOPs and memory; `ranks/` compares ranks;
`transport/` carries records, `orders/` orders from rank to rank.  Time is charged by `pacecar.ledger`; trace files are
`pacecar.analysis`'s.
"""
