"""Keeps the deprecated path of `pacecar.records.recording` working: its names of then, and a warning."""

from __future__ import annotations

import warnings

from pacecar.records.recording import (
    CHUNK_BYTES_MAX,
    VERSION,
    Chunk,
    GlanceRow,
    Recording,
    RecordingError,
    RecordRow,
    Series,
    Tick,
    TickRow,
    Trigger,
    TriggerKind,
    pack,
    parts,
    read_recording,
)
from pacecar.records.recording import (
    RecordingEvent as Event,
)
from pacecar.records.recording import (
    RecordingHeader as Header,
)

__all__ = [
    "CHUNK_BYTES_MAX",
    "VERSION",
    "Chunk",
    "Event",
    "GlanceRow",
    "Header",
    "RecordRow",
    "Recording",
    "RecordingError",
    "Series",
    "Tick",
    "TickRow",
    "Trigger",
    "TriggerKind",
    "pack",
    "parts",
    "read_recording",
]

warnings.warn("pacecar.recording is deprecated: import pacecar.records.recording", DeprecationWarning, stacklevel=2)
