"""What demo and report compute alike."""

from __future__ import annotations

import pytest

from pacecar.run_statistics import percentile


def test_percentile_is_numpys_default() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.1) == pytest.approx(1.3)
    assert percentile([7.0], 0.9) == 7.0
