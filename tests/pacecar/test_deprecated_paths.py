"""Paths that users import from and that moved go on working, with the names of their time and one warning."""

from __future__ import annotations

import importlib
import sys

import pytest

OLD = {
    "pacecar.live": [
        "VERSION",
        "Collector",
        "Daemon",
        "Document",
        "Gpu",
        "Hang",
        "History",
        "Host",
        "Job",
        "Ladder",
        "LateRank",
        "Link",
        "Move",
        "Rank",
        "Saving",
        "Tuner",
    ],
    "pacecar.recording": [
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
    ],
}


@pytest.mark.parametrize("path", OLD)
def test_a_path_that_moved_has_all_its_names_and_warns_when_it_is_imported(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, path, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{path} is deprecated: import pacecar.records") as warned:
        module = importlib.import_module(path)
    assert len(warned) == 1
    assert [name for name in OLD[path] if not hasattr(module, name)] == []
