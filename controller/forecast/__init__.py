"""What a setting should gain, before it is tried: models of buckets, links and data loading.

In come ledgers and measured settings, out go expected gains with bounds.
Start with `forecast`; `alpha_beta_link` fits latency and bandwidth, `gain_model` learns from past trials.
"""
