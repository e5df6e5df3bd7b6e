"""Stands in for Lightning where it is not installed: the calls that its Trainer makes in `fit`, in its order."""

__version__ = "stand-in"
