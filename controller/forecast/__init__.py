"""Forecasts what a setting should gain, before it is tried: models of buckets, links and data loading.

Ledgers and measured settings come in; expected gains with their uncertainty go out.  Start with `forecast`, which
carries the uncertainty; `gain_model` covers every knob.  `alpha_beta_link` prices a collective from all-reduces in
windows, `gradient_readiness` reads from them when gradients are ready, and `bucket_model` lays buckets over both.
`gather_model` counts FSDP2's gathers, and `micro_batch_model` learns from the sizes that were timed.
`setting_history` keeps what was measured.
"""
