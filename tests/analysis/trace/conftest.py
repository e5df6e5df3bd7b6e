"""The fixture `read`, with which tests of the reader read traces of their own making."""

import pytest

from pacecar.analysis.trace.reader import read_trace
from tests.analysis.trace.writing import document


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a trace of these bytes, or of these events after other `members`."""

    def read(*events, name="t.json", details=False, progress=None, **members):
        assert len(events) == 1 or not any(isinstance(event, bytes) for event in events)
        path = tmp_path / name
        path.write_bytes(events[0] if events and isinstance(events[0], bytes) else document(events, members))
        return read_trace(path, details=details, progress=progress)

    return read
