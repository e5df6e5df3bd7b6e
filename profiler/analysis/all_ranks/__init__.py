"""Compares the traces of all ranks: matches collectives, aligns clocks, reports what the causal model finds."""
