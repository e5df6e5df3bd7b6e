"""The tests' own ranks: what fails is tried once more and then told, not waited for by every test that shares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_ranks_that_failed_twice_are_not_tried_again(run_ranks: Callable[..., Any]) -> None:
    told = []
    for _ in range(4):
        with pytest.raises(pytest.fail.Exception) as failure:
            run_ranks("no_such_job.py", 2, [{}])
        told.append(str(failure.value))
    assert [text.startswith("not tried again after 2 failures") for text in told] == [False, False, True, True]
    assert "exited" in told[0]
    assert told[1] in told[2]
