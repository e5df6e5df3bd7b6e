"""Stands in for Ray where it is not installed: a training function's context, and nobody who starts workers."""

__version__ = "stand-in"
