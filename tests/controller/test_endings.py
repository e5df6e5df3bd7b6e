"""However a job ends, pacecar prints at most one calm line about it, and no rank shows a traceback of pacecar's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.ranks import LATENESS_WORDS, Ended, finish, start_ranks
from tests.kit.selection import decisive

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOB = Path(__file__).with_name("job_ending.py")

WAYS = {
    "normal": (0, 0),
    "no close": (0, 0),
    "destroy": (0, 0),
    "late close": (0, 0),
    "early close": (0, 0),
    "exception": (1, 1),
    "exit": (1, 3),
    "kill": (1, -9),
    "term": (1, -15),
}
"""How both ranks end, as they would without pacecar."""

OF_NO_END = ("cannot write to the daemon", *LATENESS_WORDS)
"""What has to do with no end: there is no daemon, which is said once."""


def ended(way: str) -> list[Ended]:
    environ = {"SOCKET": "/nonexistent/socket", "PACECAR_HOOK_OVERHEAD_BUDGET": "0.2", "FORKED_FINALIZES": "1"}
    return finish(start_ranks([JOB, way], 2, environ=environ), 120)


@pytest.mark.parametrize("way", decisive(WAYS, "normal", "exit", "term", "exception", "kill"))
def test_every_end_is_quiet(way: str) -> None:
    ranks = ended(way)
    assert tuple(rank.code for rank in ranks) == WAYS[way], [rank.err[-2000:] for rank in ranks]
    for number, rank in enumerate(ranks):
        own = [line for line in rank.err.splitlines() if "PlannedError" not in line]
        if (way, number) == ("exception", 1):
            assert rank.err.count("Traceback") == 1, "the script's own"
        else:
            assert "Traceback" not in rank.err, rank.err
        lines = [line for line in own if line.startswith("LOG pacecar")]
        said = [line for line in lines if not any(words in line for words in OF_NO_END)]
        assert len(said) <= 1, said
        assert "terminate called" not in rank.err
