"""Analyzes one rank's trace: its steps, ledger, collectives, families of kernels and what-if scenarios."""
