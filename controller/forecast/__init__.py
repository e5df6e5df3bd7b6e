"""Forecasts what a setting should gain, before it is tried: models of buckets, links and data loading.

In come ledgers and measured settings, out go expected gains with their uncertainty.
Start with `forecast`, which carries the uncertainty; `gain_model` covers every knob.  `alpha_beta_link` prices a
collective by the all-reduces that windows saw, `bucket_timeline` lays buckets over the times at which gradients are
ready, and `bucket_model` puts both together; `dataloader` is about workers, `setting_history` keeps what was measured.
"""
