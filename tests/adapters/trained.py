"""What a training under each library with accumulation must show: each of their tests is these and its own.

`jobs` are trainings on two ranks: "untuned NAME" and "tuned NAME" for each plain one, and "other NAME" for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import compatibility
import pytest
from world import REAL

Rank = dict[str, Any]
Jobs = dict[str, list[Rank]]
Options = Mapping[str, dict[str, Any]]

EQUAL = ("bodies", "accumulation", "rate")
CLOSE = {"loss": 1e-5, "history": 1e-4, "means": 1e-4}
"""What a library's job says of its training, as far as it does -> the relative difference that rounding may make."""


def train_all(run: Callable[..., Any], library: str, kind: str, plain: Options, other: Options, *also: str) -> Jobs:
    """Run all jobs, and those that `also` names, one after the other in the same two processes."""
    wanted = {("untuned", name): {"tune": None} | options for name, options in plain.items()}
    wanted |= {("tuned", name): {"tune": "exact"} | options for name, options in plain.items()}
    wanted |= {("other", name): {"tune": "exact"} | options for name, options in other.items()}
    calls = [*(("train", options) for options in wanted.values()), *((name, {}) for name in also)]
    answers = run(library, f"job_{library}.py", calls, kind)
    return dict(zip([*map(" ".join, wanted), *also], answers, strict=True))


def assert_alike(ranks: list[Rank], untuned: list[Rank]) -> None:
    """Assert that both trained the same, but for rounding."""
    for rank, plain in zip(ranks, untuned, strict=True):
        assert rank["models_agree"]
        assert {key: rank[key] for key in EQUAL if key in rank} == {key: plain[key] for key in EQUAL if key in plain}
        for key in CLOSE.keys() & plain.keys():
            assert rank[key] == pytest.approx(plain[key], rel=CLOSE[key]), key
        assert rank["weights"] == pytest.approx(plain["weights"], rel=1e-3, abs=1e-5)


class Trained:
    """A loop or a trainer of `library`; `untuned` is what most of the others are compared with."""

    library: str
    untuned: str
    job: str
    """As docs/compatibility.md has it."""

    def test_bucket_and_accumulation_turn_while_it_trains_to_the_untuned_run_s_losses_and_weights(
        self, jobs: Jobs
    ) -> None:
        names = [name.removeprefix("tuned ") for name in jobs if name.startswith("tuned ")]
        assert len(names) >= 3
        for name in names:
            ranks = jobs[f"tuned {name}"]
            assert {"bucket_bytes", "micro_batch"} <= set(compatibility.turned(ranks[0]["switches"])), name
            assert ranks[0]["switches"] == ranks[1]["switches"]
            assert len(set(ranks[0]["micro_batches"])) >= 3, "more and fewer forward and backward passes in an update"
            assert_alike(ranks, jobs[f"untuned {name}"])

    @pytest.mark.parametrize("jobs", [REAL], indirect=True)
    def test_the_table_says_what_ran(self, jobs: Jobs) -> None:
        answer = jobs[f"tuned {self.untuned}"][0]
        compatibility.ran(self.library, self.library, answer["version"], self.job, answer)

    def test_an_untested_version_is_measured_and_not_tuned_and_one_line_says_so(self, jobs: Jobs) -> None:
        one, other = jobs["other untested"]
        assert one["steps"] == 60
        assert one["switches"] == []
        assert len([line for line in one["lines"] if f"measured, not tuned: {self.library}" in line]) == 1
        assert not [line for line in other["lines"] if "measured, not tuned" in line], "one rank says it"

    def test_where_nothing_is_tuned_losses_are_equal_to_the_last_bit(self, jobs: Jobs) -> None:
        for name in ("untested", "off"):
            for rank, plain in zip(jobs[f"other {name}"], jobs[f"untuned {self.untuned}"], strict=True):
                assert (rank["weights"], rank["history"]) == (plain["weights"], plain["history"]), name

    def test_at_the_end_nothing_is_measured_any_more(self, jobs: Jobs) -> None:
        assert {name for name, ranks in jobs.items() for rank in ranks if not rank.get("is_over", True)} == set()


class TrainedByCallback(Trained):
    """A trainer that calls us back."""

    def test_the_trainer_has_its_own_methods_again_afterwards(self, jobs: Jobs) -> None:
        assert {name for name, ranks in jobs.items() for rank in ranks if rank["left_behind"]} == set()

    def test_what_fails_in_ours_is_one_message_and_the_trainer_trains_on(self, jobs: Jobs) -> None:
        ranks, untuned = jobs["other broken"], jobs[f"untuned {self.untuned}"]
        assert [rank["lines"] for rank in ranks] == [["pacecar does not measure this training"]] * 2
        assert [rank["weights"] for rank in ranks] == [rank["weights"] for rank in untuned]
        assert [rank["history"] for rank in ranks] == [rank["history"] for rank in untuned]
