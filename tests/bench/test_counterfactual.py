"""What is said of a change is compared with the run that has it."""

from __future__ import annotations

import msgspec
import pytest

from bench.bench_counterfactual import HEALTHY, QUESTIONS, SLOW, Answer, Question, Run, Seen, answered, lines
from pacecar.analysis.document.report import LateTraceRank, Scenario, TraceJob

SLOWED = Run("compute")
VERDICT = Question("a slow rank", SLOWED, HEALTHY, causes=("compute",))


def job(*named: tuple[int, str, int], data_free_ns: float = 0.0) -> TraceJob:
    late = [
        LateTraceRank(
            rank=rank, caused_wait_ns=0, late_count=0, collectives=0, cause=cause, excess_ns=saved_ns, evidence="",
            saved_ns=saved_ns, error_ns=5, since_step=0, ranks=[rank],
        )
        for rank, cause, saved_ns in named
    ]  # fmt: skip
    what_if = [Scenario(name="data_free", step_ns=0.0, speedup=1.0, saved_ns=data_free_ns, note="", error_ns=3.0)]
    plain = {field.name: field.default for field in msgspec.structs.fields(TraceJob)}
    given = {name: value for name, value in plain.items() if value is not msgspec.NODEFAULT}
    missing = {field.name: _of(field) for field in msgspec.structs.fields(TraceJob) if field.required}
    return TraceJob(**(given | missing | {"stragglers": late, "what_if": what_if}))


def _of(field: msgspec.structs.FieldInfo) -> object:
    return [] if "list" in str(field.type) else {} if "dict" in str(field.type) else 0


def test_a_saving_is_compared_with_the_difference_of_the_two_runs_of_a_round() -> None:
    found = {SLOWED: Seen(130.0, job((SLOW, "compute", 28))), HEALTHY: Seen(100.0, job())}
    assert answered(VERDICT, found) == Answer(30.0, 130.0, 28.0, 5.0, ((SLOW,), "compute"))


def test_without_a_named_rank_there_is_no_saving() -> None:
    found = {SLOWED: Seen(130.0, job()), HEALTHY: Seen(100.0, job())}
    assert answered(VERDICT, found) == Answer(30.0, 130.0, None, None, None)
    text = "\n".join(lines(VERDICT, [answered(VERDICT, found)]))
    assert "said" not in text
    assert "right in 0 of 1 rounds; named: no rank" in text


def test_a_what_if_answer_is_the_one_of_its_name() -> None:
    question = next(one for one in QUESTIONS if one.answer == "data_free")
    found = {question.run: Seen(100.0, job(data_free_ns=9.0)), question.without: Seen(90.0, job())}
    assert answered(question, found) == Answer(10.0, 100.0, 9.0, 3.0, None)


def test_another_rank_or_another_cause_is_not_right() -> None:
    others = [Answer(30e6, 130e6, 28e6, 5e6, ((1,), "compute")), Answer(30e6, 130e6, 27e6, 5e6, ((SLOW,), "link"))]
    right = Answer(30e6, 130e6, 30e6, 5e6, ((SLOW,), "compute"))
    text = "\n".join(lines(VERDICT, [*others, right]))
    assert "right in 1 of 3 rounds; named: [1] compute, [2] compute, [2] link" in text
    assert "off by -1.5 % of the step (-2.3 to +0.0)" in text


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one.name)
def test_each_question_is_of_two_runs(question: Question) -> None:
    assert question.run != question.without
    assert (question.answer == "verdict") == bool(question.causes)
