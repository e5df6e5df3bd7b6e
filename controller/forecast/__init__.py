"""Forecasts what a setting should gain, before it is tried: models of buckets, links and data loading.

Ledgers and measured settings come in; expected gains with their uncertainty go out.  Start with `forecast`, which
carries the uncertainty; `gain_model` covers every knob.  `alpha_beta_link` prices a collective from all-reduces in
windows, `bucket_model` lays buckets over the times at which gradients are ready.  `setting_history` keeps what was
measured.
"""
