"""A typed name of a job means one job, or the error lists the candidates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.records.job_identity import CalledJob, JobKey, ambiguity, meant, titles

A, B = JobKey("train", "3f" * 8), JobKey("train", "3a" * 8)
ALONE, OLD = JobKey("other", "00" * 8), JobKey("train", "")
KEYS = st.lists(
    st.builds(JobKey, st.sampled_from(["a", "a@", "a@b", "a@00"]), st.sampled_from(["", "0" * 16, "00" * 7 + "ff"])),
    min_size=1,
    max_size=8,
)


def test_a_name_means_every_job_of_that_name_and_digits_tell_them_apart() -> None:
    keys = [A, B, ALONE, OLD]
    assert meant("other", keys) == [ALONE]
    assert meant("train", keys) == [OLD, B, A]
    assert meant("train@3f", keys) == [A]
    assert meant("train@3", keys) == [B, A]
    assert meant(str(A), keys) == [A]
    assert meant("train@", keys) == [OLD]
    assert meant("train@ff", keys) == meant("@", keys) == meant("", keys) == []


def test_a_name_with_an_at_sign_is_a_name_first() -> None:
    odd = JobKey("train@3f", "11" * 8)
    assert meant("train@3f", [A, odd]) == [odd]


@pytest.mark.slow
@given(KEYS)
def test_a_title_means_its_job_and_no_other_where_names_have_no_at_sign(keys: list[JobKey]) -> None:
    plain = [JobKey(key.job.replace("@", "-"), key.launch) for key in keys]
    called = titles(plain)
    assert set(called) == set(plain)
    for key, title in called.items():
        assert meant(title, plain) == [key]


def test_who_names_several_is_told_of_each_in_one_bounded_line() -> None:
    line = ambiguity("train", [CalledJob(A, 1000, (17, 18)), CalledJob(B, 1001, (19,))])
    assert line == (
        "2 jobs are called 'train'; name one of them: train@3f3f (uid 1000, pid 17, 18); train@3a3a (uid 1001, pid 19)"
    )
    many = [CalledJob(JobKey("train", f"{n:016x}"), n, tuple(range(100))) for n in range(100)]
    assert "and 92 more" in ambiguity("train", many)
    assert len(ambiguity("train", many)) < 1000
