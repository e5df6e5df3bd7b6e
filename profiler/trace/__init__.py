"""Trace files in, columns out."""
