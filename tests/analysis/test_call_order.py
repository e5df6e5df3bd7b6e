"""Who of two ranks made a call out of turn: drawn programs, healthy ones and ones with a fault, and nobody wrong."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.analysis.hang.dumps.call_order import ORDER_REPEATS, Called, call_order
from pacecar.analysis.hang.dumps.flight_recorder import read_dump
from pacecar.analysis.hang.judgement import judge
from pacecar.records.hangs import CallOrder, CollectiveCall, HangKind, HangVerdict, RankAccount, ThreadStack
from tests.kit.selection import reduced

# --- the order of one rank --------------------------------------------------------------------------------------------


def order(drawing: str, *, is_whole: bool = True) -> CallOrder | None:
    """Return the order of a drawing: a letter is a call of that size, a capital one on another group."""
    numbers: Counter[bool] = Counter()
    called = []
    for letter in drawing:
        numbers[letter.isupper()] += 1
        group, number = ("dp" if letter.isupper() else "0"), numbers[letter.isupper()]
        called.append(Called(group, CollectiveCall(number=number, operation="gloo:all_reduce", sizes=letter.lower())))
    return call_order(called, is_whole=is_whole)


def departure(drawing: str) -> tuple[str, int | None, int] | None:
    found = order(drawing)
    assert found is not None
    one = found.departure
    return None if one is None else (one.group, one.number, one.left_out)


def test_calls_that_repeat_have_an_order() -> None:
    found = order("aB" * 10 + "a")
    assert found is not None
    assert (found.period, found.repeats, found.departure) == (2, 10, None)
    assert order("aB" * (ORDER_REPEATS - 1)) is None, "too few to be sure"


def test_the_first_call_out_of_turn_is_a_departure() -> None:
    assert departure("aaB" * 9 + "aBaa") == ("dp", 10, 1)
    assert departure("aaB" * 9 + "aaaB") == ("0", 21, 2)
    assert departure("aB" * 9 + "ac") == ("0", 11, 0)


def test_the_beginning_may_differ_and_nothing_else() -> None:
    assert order("xyz" + "aB" * 10) is not None
    assert order("xyz" + "aB" * 10, is_whole=False) is None, "the ring has lost the beginning: this is not it"
    assert order("aB" * 9 + "E" + "aB" * 9) is None, "it evaluates now and then"
    assert order(("aB" * 3 + "E") * 8) is not None, "an evaluation every three steps is an order as well"
    assert order(("a" * 10 + "B") * 10 + "aaaaa") is not None
    assert departure(("a" * 10 + "B") * 10 + "a" * 11) == ("0", 111, 1), "the order is that of all calls"


def test_sizes_that_vary_do_not_matter() -> None:
    assert order("".join(chr(ord("a") + at % 7) + "bcdef"[at % 5].upper() for at in range(60))) is not None


# --- two ranks --------------------------------------------------------------------------------------------------------

GROUP = {"a": "0", "b": "0", "c": "0", "A": "1", "B": "1", "E": "0", "L": "1"}
"""Calls of a program, and their group.  "E" is an evaluation's, "L" a log's; "s" and "r" are a send and a receive."""

MARKS = "(!/"
"""The model runs forward in training, evaluates; the step ends."""


@dataclass
class Two:
    """Two ranks that run programs, with blocking calls, until nothing moves."""

    programs: list[str]
    at: list[int] = field(default_factory=lambda: [0, 0])

    def run(self) -> list[RankAccount]:
        while any([self._move(0), self._move(1)]):
            pass
        return [self._account(rank) for rank in (0, 1)]

    @property
    def has_ended(self) -> bool:
        return all(at >= len(program) for at, program in zip(self.at, self.programs, strict=True))

    def _move(self, rank: int) -> bool:
        if self.at[rank] >= len(self.programs[rank]) or not self._may_pass(rank):
            return False
        self.at[rank] += 1
        return True

    def _may_pass(self, rank: int) -> bool:
        own, other = self.programs[rank], self.programs[1 - rank]
        call, at, there = own[self.at[rank]], self.at[rank], self.at[1 - rank]
        if call == "r":
            return own[:at].count("r") < other[: there + 1].count("s")
        if call in GROUP:
            number = self._made(own[:at], GROUP[call])
            same = [one for one in other[: there + 1] if GROUP.get(one) == GROUP[call]]
            return number < len(same) and same[number] == call
        return call != "|"

    @staticmethod
    def _made(calls: str, group: str) -> int:
        return sum(GROUP.get(one) == group for one in calls)

    def _account(self, rank: int) -> RankAccount:
        program, at = self.programs[rank], self.at[rank]
        begun = program[: at + 1]
        entries: list[dict[str, Any]] = []
        numbers: Counter[str] = Counter()
        operations: Counter[str] = Counter()
        for index, call in enumerate(begun):
            group = "0" if call in "sr" else GROUP.get(call)
            if group is None:
                continue
            operations[group] += 1
            if call in "sr":
                continue
            numbers[group] += 1
            entries.append(
                {
                    "record_id": len(entries), "pg_id": int(group), "process_group": [group, f"group{group}"],
                    "collective_seq_id": numbers[group], "op_id": operations[group], "p2p_seq_id": 0, "is_p2p": False,
                    "profiling_name": "gloo:broadcast" if call == "c" else "gloo:all_reduce",
                    "input_sizes": [[ord(call)]], "input_dtypes": ["Float"], "state": "scheduled",
                    "retired": index < at, "time_created_ns": 10**18 + index,
                }
            )  # fmt: skip
        status = {
            group: {"last_enqueued_collective": count, "last_started_collective": -1, "last_completed_collective": -1}
            for group, count in numbers.items()
        }
        dump = {"version": "2.10", "pg_config": {}, "pg_status": status, "entries": entries}
        told = read_dump(json.dumps(dump).encode(), rank, operations)
        groups = tuple(msgspec.structs.replace(group, ranks=(0, 1)) for group in told.groups)
        is_waiting = at < len(program) and program[at] != "|"
        frame = "distributed_c10d.py:2799 recv" if is_waiting else "train.py:31 main"
        marks = [one for one in begun[: at + (not is_waiting)] if one in MARKS]
        return msgspec.structs.replace(
            told, world_size=2, groups=groups, step=begun[:at].count("/"), is_in_step=marks[-1:] == ["("],
            stacks=(ThreadStack(name="MainThread", frames=(frame, "train.py:9 main"), is_training=True),),
        )  # fmt: skip


def judged(first: str, second: str) -> HangVerdict:
    return judge(Two([first, second]).run(), 2)


STEP = "(aB/"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("(a/(aB/", HangKind.SKIPPED), ("(B/(aB/", HangKind.SKIPPED), ("(aBB/(aB/", HangKind.EXTRA),
        ("(acB/", HangKind.MISMATCHED), ("(ac/", HangKind.MISMATCHED), ("(arB/", HangKind.NOT_JOINED),
        ("(c/(aB/", HangKind.MISMATCHED),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_the_one_that_departs_from_what_both_did_is_named(fault: str, kind: HangKind, rank: int) -> None:
    programs = [STEP * 20, STEP * 20]
    programs[rank] = "abcA" + STEP * 10 + fault + STEP * 9
    programs[1 - rank] = "abcA" + programs[1 - rank]
    verdict = judged(*programs)
    assert verdict.culprits == (rank,), verdict.summary
    assert verdict.kind is kind or kind is HangKind.MISMATCHED, verdict.summary


def test_where_both_or_neither_departs_or_the_order_is_too_short_it_cannot_be_told() -> None:
    assert judged(STEP * 10 + "(bB/", STEP * 10 + "(Ab/").culprits in ((), (0, 1))
    assert judged(STEP * 4 + "(a/" + STEP, STEP * 6).culprits == ()
    irregular = "".join(STEP + "(aaB/" * (at % 3 == 0) + "(aBB/" * (at % 5 == 0) for at in range(12))
    assert judged(irregular + "(a/" + STEP, irregular + STEP * 2).culprits == ()


def test_the_rank_that_evaluates_is_not_out_of_turn() -> None:
    """Its first evaluation, which the other one leaves out."""
    assert judged(STEP * 12 + "!E" + STEP, STEP * 14).culprits == (0, 1), "which of them is wrong cannot be told"
    assert judged(STEP * 12 + "!A" + STEP, STEP * 14).culprits == ()
    assert judged(STEP * 12 + "A" + STEP, STEP * 14).culprits == (), "nor the one that saves, after the step"


def test_a_rank_that_waits_in_a_usual_receive_is_not_out_of_turn() -> None:
    """A pipeline of two stages: rank 1 waits for a send, and rank 0 for the all-reduce."""
    stages = "(sra/", "(rsa/"
    assert judged(stages[0] * 10 + "(ra/" + stages[0], stages[1] * 12).culprits == ()
    assert judged(stages[0] * 10 + "(|", stages[1] * 12).kind is HangKind.UNKNOWN


programs = st.builds(
    lambda calls, evaluates, logs, beginning, steps, stages: (
        beginning + "".join(
            "!E" * (bool(evaluates) and step > 0 and step % evaluates == 0)
            + "(" + "sr" * stages + calls + "L" * (bool(logs) and step % logs == 0) + "/"
            for step in range(steps)
        )
    ),
    st.text("abAB", min_size=1, max_size=6), st.sampled_from([0, 0, 1, 4, 11]), st.sampled_from([0, 0, 2, 5]),
    st.text("abcAB", max_size=6), st.integers(3, 26), st.booleans(),
)  # fmt: skip
"""Steps with collectives on two groups, evaluations and logs now and then, messages or none, and another beginning."""

COLLECTIVE_FAULTS = "abcAB"


@pytest.mark.slow
@settings(max_examples=reduced(300), deadline=None)
@given(programs, st.data())
def test_nothing_is_out_of_turn_in_a_healthy_program(program: str, data: st.DataObject) -> None:
    """One rank is late: it computes somewhere."""
    at, rank = data.draw(st.integers(0, len(program))), data.draw(st.integers(0, 1))
    pair = [_other_stage(program, 0), _other_stage(program, 1)]
    pair[rank] = pair[rank][:at] + "|" + pair[rank][at:]
    verdict = judged(*pair)
    assert verdict.kind in (HangKind.NOT_JOINED, HangKind.UNKNOWN, HangKind.NOBODY), verdict.summary
    assert set(verdict.culprits) <= {rank}, verdict.summary


@pytest.mark.slow
@settings(max_examples=reduced(600), deadline=None)
@given(programs, st.data())
def test_no_innocent_rank_is_named_whatever_the_other_one_does(program: str, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 1))
    at = data.draw(st.integers(0, len(program) - 1))
    what = data.draw(st.sampled_from(["skip", "extra", "other"]))
    pair = [_other_stage(program, 0), _other_stage(program, 1)]
    own = pair[rank]
    new = data.draw(st.sampled_from(COLLECTIVE_FAULTS + "r"))
    is_call = own[at] in GROUP or own[at] in "sr"
    if what == "extra":
        pair[rank] = own[:at] + new + own[at:]
    elif is_call:
        pair[rank] = own[:at] + (new if what == "other" else "") + own[at + 1 :]
    two = Two(pair)
    verdict = judge(two.run(), 2)
    if not two.has_ended:
        is_pair = "cannot be told" in verdict.summary and rank in verdict.culprits
        assert is_pair or set(verdict.culprits) <= {rank}, (pair, verdict.summary)


def _other_stage(program: str, rank: int) -> str:
    return program.replace("sr", "rs") if rank else program
