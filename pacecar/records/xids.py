"""Lists the Xid errors that a user's program causes by itself, which therefore anybody with a GPU can cause at will."""

from __future__ import annotations

__all__ = ["XIDS_OF_PROGRAMS"]

XIDS_OF_PROGRAMS = ("13", "31", "43", "45")
"""Engine exception, page fault, reset of a channel, cleanup (NVIDIA's Xid catalog, column "application")."""
