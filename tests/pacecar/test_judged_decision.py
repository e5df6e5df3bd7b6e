"""Decisions and verdicts are paired once for report, page, demo and `pacecar tune`."""

from __future__ import annotations

from msgspec import structs

from pacecar.records.judged_decision import JudgedDecision, by_number, pair
from tests.commands.report.runs import decision, verdict


def test_each_decision_has_its_verdict_in_the_order_of_numbers_and_a_lone_verdict_stands_alone() -> None:
    first, second, third = decision(1, 10, 2, 4), decision(2, 20, 4, 8), decision(3, 30, 4, 6)
    kept, lone = verdict(2, 25), verdict(4, 35, "rolled_back")
    judged = pair(by_number([third, first, second]), by_number([lone, kept]))
    assert list(judged.items()) == [
        (1, JudgedDecision(first, None)),
        (2, JudgedDecision(second, kept)),
        (3, JudgedDecision(third, None)),
        (4, JudgedDecision(None, lone)),
    ]
    assert [one.outcome for one in judged.values()] == [None, "kept", None, "rolled_back"]
    assert [one.reason for one in judged.values()] == ["larger", kept.reason, "larger", lone.reason]
    assert (judged[4].kind, judged[4].from_value, judged[4].to_value, judged[4].said) == (None, None, None, lone)
    assert (judged[2].expected_gain_ratio, judged[2].measured_gain_ratio) == (0.1, 0.2)


def test_of_two_verdicts_on_one_decision_the_last_counts() -> None:
    """Compression that was kept is rolled back when the loss diverges: that is a second verdict."""
    kept = verdict(1, 20)
    back = structs.replace(kept, outcome="rolled_back", step=90)
    (judged,) = pair(by_number([decision(1, 10, 2, 4)]), by_number([kept, back])).values()
    assert judged.outcome == "rolled_back"


def test_decisions_of_two_starts_of_a_job_are_not_mixed_up() -> None:
    one, other = decision(1, 10, 2, 4), decision(1, 12, 2, 8)
    judged = pair({(0, 1): one, (1, 1): other}, {(1, 1): verdict(1, 30)})
    assert [both.outcome for both in judged.values()] == [None, "kept"]
