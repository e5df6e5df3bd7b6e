"""Exact windows: some steps recorded by Kineto and read operator by operator.

In come torch's profiler events, out go rows and spans for the ledger.
Start with `kineto_window`; `window_price` says beforehand what one costs, `window_reader` turns it into spans.
"""
