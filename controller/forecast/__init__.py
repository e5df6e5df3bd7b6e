"""Forecasts what a setting should gain, before it is tried: models of buckets, links and data loading.

In come ledgers and measured settings, out go expected gains with their uncertainty.
Start with `forecast`; `gain_model` covers every knob, `alpha_beta_link` fits latency and bandwidth.
"""
