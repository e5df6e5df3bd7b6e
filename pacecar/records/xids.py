"""Lists the Xid errors that are no fault of the GPU: those that a user's program causes, and notes about repairs."""

from __future__ import annotations

__all__ = ["XIDS_OF_PROGRAMS", "XIDS_OF_REPAIR"]

XIDS_OF_PROGRAMS = ("13", "31", "43", "45")
"""Engine exception, page fault, reset of a channel, cleanup (NVIDIA's Xid catalog, column "application").

Anybody with a GPU can cause them at will.
"""

XIDS_OF_REPAIR = ("63", "92", "160")
"""Xids that note bad memory and cost no work by themselves: a row or page to be taken out of use was recorded (63; 64
is that this failed), many errors that were corrected (92), memory marked for repair (160).  NVIDIA, "GPU Memory Error
Management", in-band reporting.  What could not be corrected says so itself: 48, 94 and 95."""
