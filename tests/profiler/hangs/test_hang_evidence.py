"""The accounts behind a verdict are kept in the run folder, within a bound, and judged again as they were."""

from __future__ import annotations

import msgspec

from pacecar.analysis.hang.document import hang_document
from pacecar.analysis.hang.judgement import judge
from pacecar.clock import SystemClock
from pacecar.profiler.hangs import hang_evidence
from pacecar.profiler.hangs.hang_evidence import keep_evidence
from pacecar.records.hangs import CollectiveCall, GroupState, HangEvidence, HangKind, ProcessState, RankAccount


def accounts():
    """Return three ranks, of which 0 and 2 wait for rank 1 in a collective."""

    def group(number):
        call = CollectiveCall(number=number, operation="gloo:all_reduce", is_finished=number == 4)
        return GroupState(name="dp", ranks=(0, 1, 2), enqueued=number, completed=4, calls=(call,))

    return [
        RankAccount(rank=0, world_size=3, groups=(group(5),)),
        RankAccount(rank=1, world_size=3, groups=(group(4),), process=ProcessState(pid=9, state="S")),
        RankAccount(rank=2, world_size=3, groups=(group(5),)),
    ]


def test_analyze_judges_a_run_folder_as_the_job_did_and_leaves_its_other_files_alone(tmp_path):
    verdict = msgspec.structs.replace(judge(accounts(), 3), step=387)
    assert (verdict.kind, verdict.culprits) == (HangKind.NOT_JOINED, (1,))
    keep_evidence(tmp_path / "run", verdict, accounts()).join()
    for name in ("rank0.jsonl", "rank0.log"):
        (tmp_path / "run" / name).write_text("{}\n")
    found = hang_document(tmp_path / "run", SystemClock())
    assert (found.verdict.kind, found.verdict.culprits, found.verdict.summary) == (
        verdict.kind, verdict.culprits, verdict.summary,
    )  # fmt: skip
    assert (found.files, found.world_size, found.problems) == (1, 3, [])
    assert (tmp_path / "run" / "hang-step387.json").stat().st_mode & 0o777 == 0o600


def test_what_does_not_fit_is_left_out_but_for_the_culprits_and_said_to_be(tmp_path, monkeypatch):
    verdict = judge(accounts(), 3)
    monkeypatch.setattr(hang_evidence, "BYTES_MAX", len(msgspec.json.encode(accounts()[1])) + 1)
    keep_evidence(tmp_path, verdict, accounts()).join()
    (file,) = tmp_path.iterdir()
    evidence = msgspec.json.decode(file.read_bytes(), type=HangEvidence)
    assert ([each.rank for each in evidence.accounts], evidence.left_out) == ([1], (0, 2))
    found = hang_document(tmp_path, SystemClock())
    assert found.problems[0] == f"{file.name}: the accounts of 2 ranks did not fit into it"


def test_a_folder_that_cannot_be_written_and_a_file_that_was_cut_are_said(tmp_path, caplog):
    keep_evidence(tmp_path / "file" / "run", judge(accounts(), 3), accounts()).join()
    (tmp_path / "taken").write_text("")
    keep_evidence(tmp_path / "taken", judge(accounts(), 3), accounts()).join()
    assert "pacecar cannot write" in caplog.text
    (file,) = (tmp_path / "file" / "run").iterdir()
    file.write_bytes(file.read_bytes()[:-40])
    found = hang_document(file.parent, SystemClock())
    assert "truncated, or not pacecar's evidence of a hang" in found.problems[0]
    assert found.verdict.kind is HangKind.UNKNOWN
