"""Reads trace files: finds them, reads and attributes each where there is room, and hands on what came back."""
