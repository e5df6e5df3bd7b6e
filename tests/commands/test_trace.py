"""`pacecar trace` asks again where the job was past the steps before it heard of them; traces may be in a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pacecar.commands import daemon_client
from pacecar.commands.daemon_client import Reply
from pacecar.commands.main import TRACE_ATTEMPTS, cli
from tests.analysis.tracefiles import write_trace

LATE = [
    Reply(rank, "refused", "too late: steps 5 to 9 were asked for, and this rank is at 12 already") for rank in (0, 1)
]
DONE = [Reply(rank, "done", f"/t/rank{rank}.json") for rank in (0, 1)]
BUSY = [Reply(rank, "refused", "another trace is being taken, until step 9") for rank in (0, 1)]


def traced(monkeypatch: pytest.MonkeyPatch, *answers: list[Reply], options: tuple[str, ...] = ()) -> tuple[Result, int]:
    """Run the command against ranks that answer so, in turn; return what it said, and how often it asked."""
    left = list(answers)
    monkeypatch.setattr(daemon_client, "ask", lambda *_args, **_options: iter(left.pop(0)))
    result = CliRunner().invoke(cli, ["trace", "j", "--no-analysis", *options])
    return result, len(answers) - len(left)


def test_a_trace_that_came_too_late_on_all_ranks_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = traced(monkeypatch, LATE, DONE, DONE)
    assert (result.exit_code, asked) == (0, 2)
    assert result.output.splitlines()[-2:] == ["/t/rank0.json", "/t/rank1.json"]


def test_it_is_not_asked_for_without_end_nor_where_asking_again_would_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = traced(monkeypatch, *[LATE] * (TRACE_ATTEMPTS + 1))
    assert (result.exit_code, asked) == (1, TRACE_ATTEMPTS)
    assert "no rank of j wrote a trace" in result.output
    assert traced(monkeypatch, BUSY, DONE)[1] == 1
    assert traced(monkeypatch, [LATE[0], DONE[1]], DONE)[1] == 1, "one rank has it: another would be of other steps"
    assert traced(monkeypatch, LATE, DONE, options=("--at-step", "5"))[1] == 1, "the step was named"


def test_traces_may_lie_in_a_store_and_a_folder_is_meant_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, given = f"file://{tmp_path}", []
    paths = [write_trace(tmp_path / f"rank{rank}.json", "cccAA", rank=rank) for rank in (0, 1)]

    def ask(*words: Any, **_: Any) -> Iterator[Reply]:
        given.append(words[3]["directory"])
        return iter([Reply(rank, "done", f"file://{path}") for rank, path in enumerate(paths)])

    monkeypatch.setattr(daemon_client, "ask", ask)
    ran = CliRunner().invoke(cli, ["trace", "j", "--directory", store])
    assert ran.exit_code == 0, ran.output
    assert "2 of 2 ranks" in ran.stdout
    assert CliRunner().invoke(cli, ["trace", "j", "--no-analysis", "--directory", "here"]).exit_code == 0
    assert given == [store, str(Path.cwd() / "here")]
