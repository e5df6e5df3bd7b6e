"""Turns one rank's trace into a graph of what it did and what it waited for."""
